//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Limits of what is printed.
const (
	mostFindings = 10
	mostStories  = 2
	storyLines   = 10
	lineWidth    = 200
)

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return cut(s)
}

func cut(s string) string {
	if len(s) > lineWidth {
		return strings.ToValidUTF8(s[:lineWidth], "") + "..."
	}
	return s
}

// verdict prints what was judged and returns how many findings are violations.
func verdict(out io.Writer, f facts, found []finding, n figures, async bool, took time.Duration) (violations int) {
	counts := map[string]int{}
	var shown []finding
	for _, v := range found {
		counts[v.rule.name]++
		if !async || !v.rule.sync {
			violations++
			shown = append(shown, v)
		}
	}
	told := map[string]bool{}
	for i, v := range shown {
		if i == mostFindings {
			fmt.Fprintf(out, "... and %d more\n", len(shown)-i)
			break
		}
		fmt.Fprintln(out, cut(fmt.Sprintf("VIOLATION of %q: %s: %s", v.rule.name, v.key, v.what)))
		if v.key == "" || told[v.key] || len(told) == mostStories {
			continue
		}
		told[v.key] = true
		for _, line := range story(f, v.key) {
			fmt.Fprintln(out, "    "+cut(line))
		}
	}
	row := func(name string, value any) { fmt.Fprintf(out, "| %s | %v |\n", name, value) }
	fmt.Fprintf(out, "\n| %s replication | |\n|---|---|\n", map[bool]string{false: "synchronous", true: "asynchronous"}[async])
	for _, how := range hows {
		var down, whole []time.Duration
		for _, f := range f.failovers {
			if f.How == how {
				down, whole = append(down, f.Back.Sub(f.At)), append(whole, f.Whole.Sub(f.At))
			}
		}
		if len(down) > 0 {
			row("failovers, "+how, len(down))
			row("without a primary: median, at most", seconds(middle(down))+", "+seconds(slices.Max(down)))
			row("until all three nodes were whole: median, at most", seconds(middle(whole))+", "+seconds(slices.Max(whole)))
		}
	}
	held := map[time.Duration]int{}
	for _, f := range f.failovers {
		held[f.Lag]++
	}
	for lag, count := range held {
		if lag > 0 {
			row(fmt.Sprintf("of them after %s without replication", lag), count)
		}
	}
	row("keys tried by three processes each", n.keys)
	row("runs, attempts", fmt.Sprintf("%d, %d", n.runs, n.attempts))
	row("effects of items", n.effects)
	if async {
		row("claims: acknowledged, lost", fmt.Sprintf("%d, %d", n.claims, n.lostClaims))
		row("outcomes: acknowledged, lost", fmt.Sprintf("%d, %d", n.outcomes, n.lostOutcomes))
		row("items: acknowledged, lost", fmt.Sprintf("%d, %d", n.items, n.lostItems))
		row("answers ALREADY_SUCCEEDED: given, no longer true", fmt.Sprintf("%d, %d", n.answers, n.lostAnswers))
		row("so: attempts started twice, beside another one", fmt.Sprintf("%d, %d", n.doubleStarts, n.overlaps))
		row("so: keys without a run, RUNNING without a worker, FAILED", fmt.Sprintf("%d, %d, %d", n.open[""], n.open["RUNNING"], n.open["FAILED"]))
	} else {
		row("claims, outcomes, items acknowledged", fmt.Sprintf("%d, %d, %d", n.claims, n.outcomes, n.items))
		row("answers ALREADY_SUCCEEDED", n.answers)
	}
	row("outcomes that a call said it could not record; runs that so wait for a person", fmt.Sprintf("%d, %d", n.unknown, n.person))
	row("attempts that ran through a failover and SUCCEEDED", n.through)
	row("attempts running at one that ended FAILED", n.interrupted)
	row("violations", violations)
	row("time in all", took.Round(time.Second))
	if violations > 0 {
		fmt.Fprintln(out, "\nviolations by rule:")
		for _, r := range rules {
			if counts[r.name] > 0 && (!async || !r.sync) {
				fmt.Fprintf(out, "  %5d  %s: %s\n", counts[r.name], r.name, r.what)
			}
		}
	}
	return violations
}

// story is all that is known about a key.
func story(f facts, key string) (lines []string) {
	var all []note
	for _, n := range f.notes {
		if n.Key == key && n.What != seen {
			all = append(all, n)
		}
	}
	slices.SortStableFunc(all, func(a, b note) int { return a.At.Compare(b.At) })
	for _, n := range all {
		line := fmt.Sprintf("%s  %s attempt %d by %s %s", clock(n.At), n.What, n.Attempt, n.Worker, n.Status)
		if n.What == items {
			line += fmt.Sprintf(" %d to %d", n.First, n.Last)
		}
		lines = append(lines, line)
	}
	if len(lines) > storyLines { // the beginning and the end say most
		lines = slices.Concat(lines[:storyLines/2], []string{"..."}, lines[len(lines)-storyLines/2:])
	}
	for attempt := range f.runs[key].Attempt + 1 {
		if row, ok := f.attempts[attemptID{key, attempt}]; ok {
			lines = append(lines, fmt.Sprintf("the row of attempt %d: %s", attempt, describe(row, ok)))
		}
	}
	return append(lines, fmt.Sprintf("the run: %q in attempt %d", f.runs[key].Status, f.runs[key].Attempt))
}

func middle(all []time.Duration) time.Duration {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
