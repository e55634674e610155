//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// The workers and the guard of a trial are this test binary.
func TestMain(m *testing.M) {
	if os.Getenv(guardVariable)+os.Getenv(workerVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestFailovers(t *testing.T) {
	if os.Getenv("JOBRUN_FAILOVER") == "" {
		t.Skip("takes three minutes and needs patroni and etcd; JOBRUN_FAILOVER=1 runs it")
	}
	pattern := filepath.Join(os.TempDir(), "jobrun-failover-*") // not t.TempDir: PostgreSQL's account must reach it
	before, _ := filepath.Glob(pattern)
	var out, errOut bytes.Buffer
	if code := command([]string{"-kills", "2", "-stops", "1", "-switchovers", "1", "-lag", "0"}, &out, &errOut); code != sound {
		t.Errorf("exit code %d: %s", code, errOut.String())
	}
	t.Log(out.String())
	if after, _ := filepath.Glob(pattern); !slices.Equal(after, before) {
		t.Errorf("directories before: %q, after: %q", before, after)
	}
}

func TestGuardKillsWhatStandsInTheDirectoryAndRemovesIt(t *testing.T) {
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	end, err := startGuard(below, false)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := (programs{}).start(below, "log", "sleep", "60")
	if err != nil {
		t.Fatal(err)
	}
	outer, err := (programs{}).start(dir, "log", "sleep", "60")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = outer.Process.Kill(); _ = outer.Wait() }()
	ended := make(chan error, 1)
	go func() { ended <- inner.Wait() }()
	if pids := inside(below); !slices.Equal(pids, []int{inner.Process.Pid}) {
		t.Errorf("inside: %v, want %d", pids, inner.Process.Pid)
	}
	end()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("what stands in the directory lives")
	}
	if pids := inside(dir); !slices.Equal(pids, []int{outer.Process.Pid}) {
		t.Errorf("alive beside it: %v, want %d", pids, outer.Process.Pid)
	}
	if _, err := os.Stat(below); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"-kills", "-1"}, {"-kills", "0", "-stops", "0", "-switchovers", "0"}, {"-ttl", "1"}, {"-lag", "-1s"}, {"more"}, {"-what"}} {
		if code := command(args, &bytes.Buffer{}, &bytes.Buffer{}); code != usage {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
}

func TestMissingProgramsAreNamed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var errOut bytes.Buffer
	if code := command(nil, &bytes.Buffer{}, &errOut); code != usage || !bytes.Contains(errOut.Bytes(), []byte("apt-get install patroni etcd-server")) {
		t.Errorf("exit code %d: %s", code, errOut.String())
	}
}

// TestWhatACallSaid: the notes are what the judge believes, so nothing may be noted as
// recorded that the call did not say.
func TestWhatACallSaid(t *testing.T) {
	ran := func(key string, attempt int, status jobrun.Status) jobrun.Result {
		return jobrun.Result{Decision: jobrun.Ran, Record: jobrun.Record{Key: key, Attempt: attempt, Status: status}}
	}
	failed := func(key string, attempt int) error {
		return &jobrun.RunError{Key: key, Attempt: attempt, Err: errors.New("its own")}
	}
	unrecorded := fmt.Errorf("b: %w", jobrun.ErrOutcomeUnknown)
	tests := []struct {
		name    string
		results []jobrun.Result
		err     error
		want    []string
	}{
		{"success", []jobrun.Result{ran("a", 1, jobrun.Succeeded)}, nil, []string{"outcome a 1 SUCCEEDED"}},
		{"failure", []jobrun.Result{ran("a", 2, jobrun.Failed)}, failed("a", 2), []string{"outcome a 2 FAILED"}},
		{"somebody else has it", []jobrun.Result{{Decision: jobrun.AlreadyRunning, Record: jobrun.Record{Key: "a", Attempt: 1, Status: jobrun.Running}}}, nil, nil},
		{"somebody else has done it", []jobrun.Result{{Decision: jobrun.AlreadySucceeded, Record: jobrun.Record{Key: "a", Attempt: 1, Status: jobrun.Succeeded}}}, nil, []string{"seen a 1 SUCCEEDED"}},
		{"no outcome, and no word of it", []jobrun.Result{ran("b", 1, jobrun.Running)}, nil, []string{"outcome b 1 RUNNING"}},
		{"no claim", []jobrun.Result{{}}, errors.New("no connection"), nil},
		{"outcome not recorded", []jobrun.Result{ran("b", 1, jobrun.Running)}, unrecorded, []string{"unknown b 1 RUNNING"}},
		{"a failure, and a success that may be the other error's", []jobrun.Result{ran("a", 1, jobrun.Failed), ran("b", 1, jobrun.Succeeded)}, errors.Join(failed("a", 1), unrecorded), []string{"outcome a 1 FAILED", "unknown b 1 SUCCEEDED"}},
		{"the failure of an attempt that was superseded", []jobrun.Result{ran("a", 2, jobrun.Succeeded)}, failed("a", 1), nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "notes")
			notes, err := newNotebook(file)
			if err != nil {
				t.Fatal(err)
			}
			(&worker{notes: notes}).told(test.results, test.err)
			all, err := readNotes(file)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, n := range all {
				got = append(got, fmt.Sprintf("%s %s %d %s", n.What, n.Key, n.Attempt, n.Status))
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("noted %q, want %q", got, test.want)
			}
		})
	}
}
