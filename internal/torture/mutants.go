//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A mutant is a library with one guard taken out. The checker is worth something
// only if it notices.
type mutant struct {
	name, what     string
	file, old, new string   // of the module; old stands there exactly once
	faults         string   // what brings it to light soon
	rules          []string // what it breaks, one of them at least
}

var mutants = []mutant{
	{
		"fence-condition", "the fence does not look whose the run is", "internal/store/fence.go",
		"r.job_key = $1::text\n    AND r.attempt = $2::integer\n    AND r.token = $3::text::uuid\n    AND r.worker_id = $4::text\n    AND r.status || '' = 'RUNNING'`",
		"r.job_key = $1::text AND $2::integer > 0 AND $3::text <> '' AND $4::text <> ''`",
		"operator,second-operator,hand,stop,delay",
		[]string{"nothing after the end", "nothing more than at the end"},
	},
	{
		"fence-lock", "the fence locks nothing until the commit", "internal/store/fence.go",
		"` + durable + `, pg_advisory_xact_lock_shared(` + keyLock + `)\n)\nSELECT` + markColumns + `, bound.written\nFROM bound\nCROSS JOIN batch_job_run AS r\nWHERE ` + stillOurs + `\nFOR SHARE OF r`",
		"` + durable + `\n)\nSELECT` + markColumns + `, bound.written\nFROM bound\nCROSS JOIN batch_job_run AS r\nWHERE ` + stillOurs",
		"operator,second-operator,hand,delay,hold",
		[]string{"nothing after the end", "nothing more than at the end"},
	},
	{
		"token", "the result is written whatever the token", "internal/store/attempt.go",
		"WHERE r.job_key = $1::text\n    AND r.attempt = $2::integer\n    AND r.token = $3::text::uuid\n    AND r.worker_id = $10::text\n    AND r.status || '' = 'RUNNING'",
		"WHERE r.job_key = $1::text\n    AND $2::integer > 0 AND $3::text <> '' AND $10::text <> ''\n    AND r.status || '' = 'RUNNING'",
		"operator,second-operator,hand,stop",
		[]string{"end", "claim"},
	},
	{
		"result-status", "the result is written whatever the status", "internal/store/attempt.go",
		"    AND r.worker_id = $10::text\n    AND r.status || '' = 'RUNNING'", "    AND r.worker_id = $10::text",
		"operator,second-operator,hand,stop",
		[]string{"no other change"},
	},
	{
		"compare-and-set", "a run is claimed again without a look at what was seen", "internal/store/claim.go",
		"    AND r.attempt = $4::integer\n    AND coalesce(r.token::text, '') = $5::text\n    AND r.worker_id = $10::text\n    AND r.status || '' = $11::text\n    AND ` + moment(`r.finished_at`) + ` = $12::timestamptz\n    AND r.pruned_at IS NULL\n    AND (r.status || '' = 'FAILED' AND",
		"    AND $4::integer >= 0 AND $5::text IS NOT NULL AND $10::text <> '' AND $11::text <> '' AND ($12::timestamptz IS NULL OR true)\n    AND r.pruned_at IS NULL\n    AND (true OR r.status || '' = 'FAILED' AND",
		"operator,delay",
		[]string{"end", "claim"},
	},
	{
		"lost-commit-done", "a COMMIT whose answer was lost counts as done", "internal/lease/tx.go",
		"committed, unread := b.fate(ctx, mark, t.Proof)", "committed, unread := true, error(nil); _, _ = mark, t.Proof",
		"cut-before-commit,crash",
		[]string{"items complete"},
	},
	{
		"lost-commit-undone", "a COMMIT whose answer was lost counts as undone", "internal/lease/tx.go",
		"committed, unread := b.fate(ctx, mark, t.Proof)", "committed, unread := false, error(nil); _, _ = mark, t.Proof",
		"cut-after-commit",
		[]string{"items once", "items once by checkpoint"},
	},
	{
		"alive", "a person ends an attempt that is alive without Force", "internal/store/action.go",
		"($11::boolean OR coalesce(attempt.heartbeat_at + attempt.lease < clock_timestamp(), true))", "($11::boolean OR true)",
		"operator,second-operator",
		[]string{"people's changes"},
	},
	{
		"durable", "a session that does not wait for the disk is left so", "internal/store/store.go",
		"const durable = `CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN set_config('synchronous_commit', 'on', true) END`", "const durable = `true`",
		"crash",
		[]string{"answers", "one execution", "record", "items complete"},
	},
	{
		"attempts", "MaxAttempts is not looked at", "retry.go",
		"case run.held.Row.Executions >= job.Retry.MaxAttempts,\n", "case false,\n",
		"operator",
		[]string{"retry limit"},
	},
	{
		"approval", "a re-run that failed is tried again", "retry.go",
		"\t\trun.Trigger() == TriggerRerun, // one approval, one execution\n", "",
		"operator,second-operator,kill,stop,hand",
		[]string{"one execution per approval"},
	},
	{
		"lost-result", "a result whose answer was lost counts as somebody else's", "internal/lease/claim.go",
		"case standing.EndedBy == \"WORKER\" && standing.Outcome == o.Status,\n\t\t\tstanding.Gone", "case standing.Gone",
		"cut-after-finish",
		[]string{"answers"},
	},
	{
		"retry", "what failed is not tried again", "retry.go",
		"	case interrupted:\n\t\treturn 0\n", "	case true:\n\t\treturn none\n",
		"none",
		[]string{"retry limit"},
	},
	{
		"panic", "a panic counts as success", "lease.go",
		"err = &PanicError{Value: v, Stack: stack()}\n\t\t\t}\n\t\t}()\n\t\terr = f(ctx, run)", "_ = &PanicError{Value: v, Stack: stack()}\n\t\t\t}\n\t\t}()\n\t\terr = f(ctx, run)",
		"none",
		[]string{"outcome"},
	},
	{
		"ledger", "an item that is done is done again", "tx.go",
		"taken, all, err = s.Take(limited, tx, row, items)", "taken, all, err = s.Take(limited, tx, row, items); all = true",
		"kill,operator",
		[]string{"items once", "items once by checkpoint"},
	},
}

func mutantNames() (names []string) {
	for _, m := range mutants {
		names = append(names, m.name)
	}
	return names
}

// chosenMutants are those of a list of names, with commas.
func chosenMutants(list string) (some []mutant, err error) {
	if list == "all" || list == "" {
		return mutants, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		i := slices.Index(mutantNames(), strings.TrimSpace(name))
		if i < 0 {
			return nil, fmt.Errorf("-mutants: %q is none; allowed: all, %s", name, strings.Join(mutantNames(), ", "))
		}
		some = append(some, mutants[i])
	}
	return some, nil
}

// tries is for how long a mutant is hunted, one time after the other.
var tries = []time.Duration{8 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second, time.Minute, time.Minute}

// runMutants builds the command with each mutant and runs it until the checker finds
// a violation of one of the rules that the mutant breaks.
func runMutants(ctx context.Context, out io.Writer, some []mutant, seed uint64) int {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		fmt.Fprintln(out, "-mutants needs the go command and this module's directory:", err)
		return notJudged
	}
	dir, err := os.MkdirTemp("", "jobrun-mutants")
	if err != nil {
		fmt.Fprintln(out, err)
		return notJudged
	}
	defer func() { _ = os.RemoveAll(dir) }()
	code := sound
	for _, m := range some {
		begin := time.Now()
		found, err := m.hunt(ctx, strings.TrimSpace(string(root)), dir, seed)
		switch {
		case err != nil:
			code = notJudged
			fmt.Fprintf(out, "%-20s %s: %v\n", m.name, m.what, err)
		case found == "":
			code = max(code, violated)
			fmt.Fprintf(out, "%-20s ESCAPED: %s\n", m.name, m.what)
		default:
			fmt.Fprintf(out, "%-20s found by %q in %s: %s\n", m.name, found, time.Since(begin).Round(time.Second), m.what)
		}
	}
	return code
}

// hunt returns the rule that a mutant was found to violate, "" if none was.
func (m mutant) hunt(ctx context.Context, root, dir string, seed uint64) (rule string, err error) {
	binary, err := m.build(ctx, root, dir)
	if err != nil {
		return "", err
	}
	for n, duration := range tries {
		limited, cancel := context.WithTimeout(ctx, duration+5*time.Minute)
		run := exec.CommandContext(limited, binary, "-quick", "-time", duration.String(), "-faults", m.faults, "-seed", fmt.Sprint(seed+uint64(n)), "-pause", "60ms")
		run.Env = append(os.Environ(), "TMPDIR="+dir) // what a run keeps that has found something goes with the directory
		run.Cancel = func() error { return run.Process.Signal(syscall.SIGTERM) }
		run.WaitDelay = time.Minute
		text, err := run.CombinedOutput()
		cancel()
		var exit *exec.ExitError
		if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != violated) {
			return "", fmt.Errorf("%w: %.2000s", err, text)
		}
		var broken []string
		for _, match := range regexp.MustCompile(`(?m)^VIOLATION of "([^"]+)"`).FindAllSubmatch(text, -1) {
			if rule = string(match[1]); slices.Contains(m.rules, rule) {
				return rule, nil
			}
			broken = append(broken, rule)
		}
		if len(broken) > 0 {
			return "", fmt.Errorf("found by %q, expected one of %q: %.4000s", broken, m.rules, text[bytes.Index(text, []byte("VIOLATION")):])
		}
	}
	return "", nil
}

// build compiles the command with the mutated file in place of the module's.
func (m mutant) build(ctx context.Context, root, dir string) (binary string, err error) {
	file := filepath.Join(root, filepath.FromSlash(m.file))
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return "", fmt.Errorf("%s has what is to be changed %d times, not once", m.file, n)
	}
	mutated, overlay := filepath.Join(dir, m.name+".go"), filepath.Join(dir, m.name+".json")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {file: mutated}})
	if err == nil {
		err = os.WriteFile(mutated, []byte(strings.Replace(string(text), m.old, m.new, 1)), 0o600)
	}
	if err == nil {
		err = os.WriteFile(overlay, list, 0o600)
	}
	if err != nil {
		return "", err
	}
	binary = filepath.Join(dir, m.name)
	build := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "-o", binary, "./internal/torture")
	build.Dir = root
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, text)
	}
	return binary, nil
}
