//go:build unix

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(workerVariable); text != "" {
		os.Exit(runWorker(text))
	}
	os.Exit(m.Run())
}

// A few seconds of everything: the command works, and finds nothing.
func TestShortRun(t *testing.T) {
	for _, name := range []string{"JOBRUN_TEST_DATABASE_URL", "DATABASE_URL"} {
		t.Setenv(name, os.Getenv(name)) // the command unsets them
	}
	var out, errOut bytes.Buffer
	code := command([]string{"-time", "8s", "-instances", "3", "-pause", "80ms"}, &out, &errOut)
	if code != sound || !strings.Contains(out.String(), "verdict: no violation") {
		t.Errorf("exit code %d\n%s%s", code, out.String(), errOut.String())
	}
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"-h", sound, "go run ./internal/torture [flags]"},
		{"-faults kill,flood", usage, `"flood" is none; allowed: all, none, cut, kill, stop`},
		{"-mutants fence-lock,gremlin", usage, `"gremlin" is none; allowed: all, fence-condition`},
		{"-time 10ms", usage, "-time is 10ms; allowed: 1s or more"},
		{"-instances 0", usage, "-instances is 0; allowed: 1 to 20"},
		{"-pause 0", usage, "-pause has to be 1ms or more"},
		{"-mutants token -time 5s", usage, "allowed beside it: -seed, not -time"},
		{"now", usage, `unexpected argument "now"`},
		{"-seed x", usage, "invalid value"},
	} {
		var out, errOut bytes.Buffer
		if code := command(strings.Fields(c.args), &out, &errOut); code != c.code || !strings.Contains(errOut.String(), c.want) {
			t.Errorf("%s: exit code %d, %q; want %d, %q", c.args, code, errOut.String(), c.code, c.want)
		}
	}
}

func TestChosenFaults(t *testing.T) {
	names := func(list string) (all []string) {
		t.Helper()
		picked, people, err := chosen(list)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range picked {
			all = append(all, f.name)
		}
		for name := range people {
			all = append(all, name)
		}
		slices.Sort(all)
		return all
	}
	if got := names("none"); len(got) != 0 {
		t.Errorf("none: %q", got)
	}
	if got := names("hand, kill,crash"); !slices.Equal(got, []string{"crash", "hand", "kill"}) {
		t.Errorf("got %q", got)
	}
	if got := names("cut"); len(got) != 2*(len(statements)-1) {
		t.Errorf("cut: %q", got)
	}
	all := slices.Sorted(slices.Values(faultNames()))
	if got := names("all"); !slices.Equal(got, all) {
		t.Errorf("all: %q, want %q", got, all)
	}
}

// A guard that was rewritten takes its mutant along, or the mutant says so.
func TestMutantsFitTheSource(t *testing.T) {
	for _, m := range mutants {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(m.file)))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), m.old); n != 1 {
			t.Errorf("%s: %s has what is to be changed %d times, want 1", m.name, m.file, n)
		}
	}
}

// The statements that cuts are aimed at are those of the library.
func TestStatementsFitTheSource(t *testing.T) {
	files, err := filepath.Glob("../store/*.go")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString(strings.ToLower(string(b)))
	}
	for _, s := range statements {
		if s.name == "commit" {
			continue // pgx's own
		}
		if n := len(regexp.MustCompile(regexp.QuoteMeta(s.match)).FindAllString(text.String(), -1)); n == 0 {
			t.Errorf("no statement has %q", s.match)
		}
	}
}

func TestStretchesAreAllDates(t *testing.T) {
	for last, want := range map[int]string{
		0:    "[1900-01-01 1900-01-01]",
		3999: "[1900-01-01 1910-12-14]",
		4000: "[1900-01-01 1910-12-14] [1910-12-15 1910-12-15]",
		9000: "[1900-01-01 1910-12-14] [1910-12-15 1921-11-26] [1921-11-27 1924-08-23]",
	} {
		var got []string
		for from, to := range stretches(last) {
			got = append(got, fmt.Sprint([]jobrun.Date{from, to}))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%d: %s, want %s", last, got, want)
		}
	}
}

// Missed and CatchUp know only dates that are past.
func TestAllDatesArePast(t *testing.T) {
	if last := date(mostDates); last.Compare(jobrun.DateOf(time.Now().Add(-24*time.Hour))) >= 0 {
		t.Errorf("the last date is %s", last)
	}
	if code := command([]string{"-time", "1000h"}, io.Discard, io.Discard); code != usage {
		t.Errorf("more dates than there are: exit code %d", code)
	}
}
