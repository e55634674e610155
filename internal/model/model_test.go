package model

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// sound are the sizes in which every rule must hold; floor is a number of states
// below which something cannot happen any more.
var sound = []struct {
	name, settings string
	floor          int
}{
	{"two calls", "", 400_000}, // the first one is what -short checks
	{"three calls, three attempts", "CALLS=3 ATTEMPTS=3", 4_000_000},
	{"two calls, three actions", "ATTEMPTS=3 ACTIONS=3", 900_000},
	{"a Tx and two items", "TX=1 ITEMS=2", 1_000_000},
	{"a blind UPDATE", "PLAINSQL=1 ACTIONS=1", 500_000},
	{"a deleted row", "PLAINSQL=2 ACTIONS=1", 500_000},
	{"late claims", "LATE=1", 2_500_000},
}

// mutants are the guards that are left out, and the rule that then breaks; "": none
// does, because another guard does the same.
var mutants = []struct{ name, settings, rule string }{
	{"FENCE_RUNNING", "", "nothing_when_superseded"},
	{"FENCE_HOLDER", "", "nothing_when_superseded"},
	{"FENCE_ATTEMPT", "ACTIONS=1", ""},
	{"FENCE_TOKEN", "ACTIONS=1", ""},
	{"FENCE_LOCK", "", "nothing_when_superseded"},
	{"FINISH_RUNNING", "", "told_as_recorded"},
	{"FINISH_HOLDER", "", "one_live_attempt"},
	{"FINISH_ATTEMPT", "ACTIONS=1", ""},
	{"FINISH_TOKEN", "ACTIONS=1", ""},
	{"FINISH_LOST", "", "lost_only_if_ended"},
	{"FINISH_DONE", "", "told_as_recorded"},
	{"CLAIM_ABSENT", "", "one_approval_one_run"},
	{"CLAIM_UNSEEN", "", "no_orphan"},
	{"CLAIM_SETTLE", "", "no_orphan"},
	{"CLAIM_HOLDER", "", "executed_once"},
	{"CLAIM_TOKEN", "", "no_orphan"},
	{"CLAIM_NUMBER", "PLAINSQL=2 ACTIONS=1", "numbers_never_repeat"},
	{"RECLAIM_AGE", "", "nothing_by_age"},
	{"RECLAIM_NOW", "", ""},
	{"RECLAIM_SEEN", "LATE=1 ATTEMPTS=3", "no_orphan"},
	{"RECLAIM_STATUS", "LATE=1", "no_orphan"},
	{"RECLAIM_BLIND", "", "nothing_by_age"},
	{"RECLAIM_AS_LEFT", "PLAINSQL=1 ACTIONS=1", "nothing_by_age"},
	{"APPROVAL_FITS", "PLAINSQL=1 ACTIONS=1", "one_approval_one_run"},
	{"APPROVAL_CLEARED", "ACTIONS=1", ""},
	{"APPROVAL_ONCE", "", "one_approval_one_run"},
	{"ABANDON_HOLDER", "", "unstarted_only"},
	{"ABANDON_APPROVAL", "", "one_approval_one_run"},
	{"RERUN_RETRIED", "", "nothing_by_age"},
	{"COMMIT_DONE", "", "told_as_recorded"},
	{"COMMIT_AGAIN", "TX=1", "work_once"},
	{"COMPLETE_SPLIT", "", "complete_once"},
	{"LEDGER_SPLIT", "", "success_is_whole"},
	{"LEDGER_IGNORED", "", "item_once"},
	{"ACT_SEEN", "", "acted_as_seen"},
	{"ACT_ALIVE", "", "alive_needs_force"},
	{"ACT_FORCE", "", "one_success"},
	{"ACT_PENDING", "", "one_approval_one_run"},
	{"ACT_SKIP", "", "one_approval_one_run"},
	{"ACT_AGAIN", "", "acted_as_told"},
}

// witnesses are what must be able to happen.
var witnesses = []string{
	"AFTER_CRASH", "AFTER_FAILURE", "AFTER_NOTHING", "AFTER_SUCCESS", "RERUN_DONE", "ZOMBIE_FENCED", "ZOMBIE_ENDED",
	"CLAIM_FOUND", "CLAIM_RACED", "FATE_COMMITTED", "FATE_ABORTED", "FATE_PROVED", "FATE_COMPLETE", "ACT_FOUND",
}

// TestModel builds one checker of the model and lets it go through every order of
// steps: with all guards, without each of them, and looking for what must be possible.
func TestModel(t *testing.T) {
	needSpin(t)
	c := build(t)
	for _, m := range sound {
		t.Run(m.name, func(t *testing.T) {
			r := c.run(t, m.settings)
			t.Logf("%d states in %s", r.states, r.took)
			if r.broken != "" {
				t.Fatalf("%q is broken:\n%s", r.broken, r.output)
			}
			if r.states < m.floor {
				t.Errorf("%d states, want at least %d: something cannot happen any more", r.states, m.floor)
			}
		})
		if testing.Short() {
			return
		}
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			if r := c.run(t, "MUTANT="+c.numbers[m.name]+" "+m.settings); r.broken != m.rule {
				t.Errorf("%q is broken, want %q:\n%s", r.broken, m.rule, r.output)
			}
		})
	}
	for _, name := range witnesses {
		t.Run(name, func(t *testing.T) {
			if r := c.run(t, "FIND="+c.numbers[name]); r.broken != "found" {
				t.Errorf("not found:\n%s", r.output)
			}
		})
	}
}

// checker is a program that checks the model, in a directory.
type checker struct {
	dir     string
	numbers map[string]string // of mutants and witnesses
}

var (
	defaults = regexp.MustCompile(`(?m)^\t\t(calls|attempts|actions|items|tx|plainsql|late|mutant|find) = (\d+);$`)
	numbered = regexp.MustCompile(`(?m)^#define (\w+) +(\d+) /\*`)
)

// build makes the checker as one does by hand, but for the settings: it takes them from
// the environment, because compiling it takes longer than most of the checks.
func build(t *testing.T) checker {
	t.Helper()
	c := checker{t.TempDir(), map[string]string{}}
	source, err := filepath.Abs("protocol.pml")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range numbered.FindAllStringSubmatch(read(t, source), -1) {
		c.numbers[m[1]] = m[2]
	}
	command(t, c.dir, nil, "spin", "-a", source)
	program := filepath.Join(c.dir, "pan.c")
	text := read(t, program)
	if n := len(defaults.FindAllString(text, -1)); n != 9 {
		t.Fatalf("spin has written %d settings into pan.c, want 9", n)
	}
	text = `#include <stdlib.h>
static int setting(const char *name, int value) { const char *v = getenv(name); return v ? atoi(v) : value; }
` + defaults.ReplaceAllString(text, `$1 = setting("model_$1", $2);`)
	if err := os.WriteFile(program, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// SAFETY: no cycles are looked for. MEMLIM: MB, of which the largest size needs a third.
	command(t, c.dir, nil, "gcc", "-O2", "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c")
	return c
}

type result struct {
	states, errors int
	broken         string // the first rule that was; "": none
	took           time.Duration
	output         string
}

var (
	statesLine = regexp.MustCompile(`(?m)^\s*(\d+) states, stored`)
	errorsLine = regexp.MustCompile(`(?m)errors: (\d+)$`)
	brokenLine = regexp.MustCompile(`(?m)^pan:\d+: (?:assertion violated (\w+)|(.+?)) \(at depth`)
)

// run checks the model with some settings to the end, or to the first rule that is
// broken. A search that was cut off fails the test.
func (c checker) run(t *testing.T, settings string) (r result) {
	t.Helper()
	var env []string
	for _, s := range strings.Fields(settings) {
		name, value, _ := strings.Cut(s, "=")
		env = append(env, "model_"+strings.ToLower(name)+"="+value)
	}
	start := time.Now()
	r.output = command(t, c.dir, env, "./pan", "-m100000")
	r.took = time.Since(start).Round(time.Millisecond)
	for _, cut := range []string{"max search depth too small", "out of memory", "memory exceeded", "hashtable is full"} {
		if strings.Contains(r.output, cut) {
			t.Fatalf("the search was cut off:\n%s", r.output)
		}
	}
	states, errors := statesLine.FindStringSubmatch(r.output), errorsLine.FindStringSubmatch(r.output)
	if states == nil || errors == nil {
		t.Fatalf("the checker did not come to its end:\n%s", r.output)
	}
	r.states, _ = strconv.Atoi(states[1])
	r.errors, _ = strconv.Atoi(errors[1])
	if broken := brokenLine.FindStringSubmatch(r.output); broken != nil {
		r.broken = broken[1] + broken[2]
	}
	if (r.errors == 0) != (r.broken == "") || r.errors == 0 && strings.Contains(r.output, "Search not completed") {
		t.Fatalf("%d errors, %q broken:\n%s", r.errors, r.broken, r.output)
	}
	return r
}

func command(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func needSpin(t *testing.T) {
	t.Helper()
	for _, program := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("JOBRUN_REQUIRE_SPIN") != "" {
				t.Fatalf("%v, and JOBRUN_REQUIRE_SPIN is set: install the packages spin and gcc", err)
			}
			t.Skipf("%v: the model is checked where the packages spin and gcc are installed", err)
		}
	}
}

// TestTablesNameWhatThereIs compares README.md, the model, the tests and the code.
func TestTablesNameWhatThereIs(t *testing.T) {
	model, readme := read(t, "protocol.pml"), read(t, "README.md")
	names := regexp.MustCompile("`([^`]+)`")
	cells := func(line string) (all [][]string) {
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			var in []string
			for _, m := range names.FindAllStringSubmatch(cell, -1) {
				in = append(in, m[1])
			}
			all = append(all, in)
		}
		return all
	}
	var rules []string
	steps := 0
	for line := range strings.SplitSeq(readme, "\n") {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		row := cells(line)
		if len(row) < 3 {
			rules = append(rules, row[0]...)
			continue
		}
		steps++
		for _, step := range row[0] {
			if !found(model, `(?m)^(inline `+step+`\(|`+step+`:|#define `+step+`\b)`) {
				t.Errorf("the model has no step %s", step)
			}
		}
		for _, name := range row[1] {
			if !slices.ContainsFunc(row[2], func(file string) bool { return declares(read(t, "../../"+file), name) }) {
				t.Errorf("%s is not declared in %v", name, row[2])
			}
		}
	}
	if steps < 20 {
		t.Errorf("read %d steps in README.md, it has more", steps)
	}

	list, _, _ := strings.Cut(after(after(model, "/* The rules."), "hidden byte"), ";")
	want := matches(list, `(?m)^\t(\w+),`)
	if !slices.Equal(rules, want) {
		t.Errorf("rules of README.md\n%v\nof the model\n%v", rules, want)
	}
	var tested []string
	for _, m := range mutants {
		tested = append(tested, m.name)
	}
	chosen, _, _ := strings.Cut(after(model, "#define without"), "/* Witnesses")
	if want := matches(chosen, `(?m)^#define (\w+) +\d+ /\*`); !slices.Equal(tested, want) {
		t.Errorf("mutants of the tests\n%v\nof the model\n%v", tested, want)
	}
	chosen, _, _ = strings.Cut(after(model, "#define witness"), "/* The rules")
	if want := matches(chosen, `(?m)^#define (\w+) +\d+ /\*`); !slices.Equal(witnesses, want) {
		t.Errorf("witnesses of the tests\n%v\nof the model\n%v", witnesses, want)
	}
}

// declares reports whether a Go file declares a name, or Type.Method.
func declares(source, name string) bool {
	if receiver, method, ok := strings.Cut(name, "."); ok {
		return found(source, `(?m)^func \(\w+ \*?`+receiver+`\) `+method+`\(`)
	}
	return found(source, `(?m)^(func `+name+`\(|(const |var |\t)`+name+` += )`)
}

func found(text, pattern string) bool { return regexp.MustCompile(pattern).MatchString(text) }

func matches(text, pattern string) (all []string) {
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

func after(text, mark string) string {
	_, rest, _ := strings.Cut(text, mark)
	return rest
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
