//go:build unix

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/torture/checker"
)

// verdict prints what was done, what happened, what was judged and what is violated.
func (t *torture) verdict(ctx context.Context, report checker.Report) int {
	t.printf("\nwhat was done")
	struck := t.struck()
	struck["exhaust"] = report.Counts.Faults["exhaust"] // noted by the processes
	idle := ""
	for _, f := range faults() {
		if struck[f.name] == 0 && t.duration >= 10*time.Minute { // some come only every half minute
			idle = f.name
		}
		t.printf("  %-21s %7d  %s", f.name, struck[f.name], f.what)
	}
	for _, name := range []string{"cut-before-action", "cut-after-action"} {
		t.printf("  %-21s %7d  the same for a person's action", name, struck[name])
	}
	for _, name := range []string{"neighbour", "hand"} {
		t.printf("  %-21s %7d  rows changed with plain SQL", name, struck[name])
	}

	c := report.Counts
	t.printf("\nwhat happened")
	t.printf("  %7d runs: %s", c.Runs, sums(c.Statuses))
	t.printf("  %7d attempts: %d retries, %d re-runs; %d SUCCEEDED, %d FAILED, %d SKIPPED, %d superseded, %d never started, %d RUNNING",
		c.Attempts, c.Retries, c.Reruns, c.Succeeded, c.Failed, c.Skipped, c.Superseded, c.NeverStarted, c.Open)
	t.printf("  %7d executions, %d effects", c.Executions, c.Effects)
	t.printf("  %7d changes of rows: %s", total(c.Changes), sums(c.Changes))
	t.printf("  %7d answers to people: %s", total(c.Actions), sums(c.Actions))
	t.printf("  %7d answers to workers: %s", total(c.Answers), sums(c.Answers))

	t.printf("\nwhat was judged")
	violations := map[string]int{}
	for _, v := range report.Violations {
		violations[v.Rule]++
	}
	for _, rule := range checker.Rules {
		if report.Judged[rule.Name] == 0 {
			idle = rule.Name
		}
		t.printf("  %-29s %8d cases, %d violations", rule.Name, report.Judged[rule.Name], violations[rule.Name])
	}
	if len(report.Violations) == 0 && t.thorough && idle != "" {
		t.printf("\nno verdict: there was no case of %q in all this time; what the processes wrote: %s", idle, t.logFile.Name())
		return notJudged
	}
	if len(report.Violations) == 0 {
		t.printf("\nverdict: no violation (seed %d, %s of faults, %s in all)", t.seed, t.duration, time.Since(t.begin).Round(time.Second))
		return sound
	}
	t.violations(ctx, report)
	t.printf("\nverdict: %d violations (seed %d); what the processes wrote: %s", len(report.Violations), t.seed, t.logFile.Name())
	return violated
}

// Limits of what is printed of violations.
const maxViolations, maxTimelines = 40, 5

// violations prints the first violations, and all that is known about the runs of the
// first few. They are told by the rule's words: a rule's name may have spaces.
func (t *torture) violations(ctx context.Context, report checker.Report) {
	conn, err := t.connect(ctx, "torture")
	if err != nil {
		t.printf("no timelines: %v", err)
	} else {
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	}
	shown := map[string]bool{}
	for n, v := range report.Violations {
		if n == maxViolations {
			t.printf("... and %d more", len(report.Violations)-n)
			return
		}
		t.printf("\nVIOLATION of %q: %s: %s", v.Rule, v.Key, v.What)
		if conn == nil || v.Key == "" || shown[v.Key] || len(shown) == maxTimelines {
			continue
		}
		shown[v.Key] = true
		text, err := checker.Timeline(ctx, conn, v.Key)
		if err != nil {
			text = fmt.Sprintf("no timeline: %v", err)
		}
		t.printf("%s", text)
	}
}

// sums lists counts by their names.
func sums(counts map[string]int) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		all = append(all, fmt.Sprintf("%d %s", counts[name], name))
	}
	return strings.Join(all, ", ")
}

func total(counts map[string]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}
