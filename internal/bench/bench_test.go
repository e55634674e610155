//go:build unix

package main

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Every work is measured, on every side, in short.
func TestEveryWork(t *testing.T) {
	if testing.Short() {
		t.Skip("a minute")
	}
	var out bytes.Buffer
	dir := t.TempDir()
	args := []string{"-pairs", "1", "-slice", "5ms", "-old", "2000", "-items", "2000", "-beats", "2000", "-charts", dir}
	if err := command(t.Context(), args, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Log(out.String())
	for _, want := range []string{
		"| jobrun | bare |", "| jobrun | by hand, with history |", "| jobrun | jobrun's own by hand |", "| DBOS, no step | bare |", "| DBOS, 1 step | bare |",
		"| River | bare |", "| pglock | bare |", "| gocron, advisory lock | bare |", "| jobrun, the default | ", "64 calls for one key", "200 jobs at one instant",
		"a run that fails once", "what one run takes", "500 running attempts", "Attention, 20 failed runs beside old runs", "| 2000 | 10000 |", "a winning claim alone", "`batch_job_run_pkey`",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q", want)
		}
	}
	for _, line := range strings.Split(out.String(), "\n") {
		if strings.HasPrefix(line, "|") && (strings.Contains(line, "NaN") || strings.Contains(line, "Inf")) {
			t.Errorf("no figure: %s", line)
		}
	}
	for _, name := range []string{"run", "lost", "race", "items"} {
		svg, err := os.ReadFile(filepath.Join(dir, name+".svg"))
		if err != nil || !bytes.Contains(svg, []byte("jobrun")) {
			t.Errorf("%s.svg: %v, %d bytes", name, err, len(svg))
		}
	}
}

// What is 2 times slower shows as 2, and nothing as 1.
func TestCompareTakesPairs(t *testing.T) {
	drift := 1.0
	at := func(seconds float64) slice {
		return func() (float64, error) {
			drift *= 1.001 // the machine gets slower all the time
			return seconds * drift, nil
		}
	}
	c, err := compare(50, at(2), at(1))
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(c.ratio.median-2) > 0.01 || math.Abs(c.control.median-1) > 0.01 || c.pairs != 50 {
		t.Errorf("%+v", c)
	}
}

func TestArgumentsThatMeanNothingAreRefused(t *testing.T) {
	for _, args := range [][]string{{"-only", "everything"}, {"-pairs", "0"}, {"-old", "5"}, {"-old", "2000,x"}, {"-sides", "nonsense"}, {"run"}, {"-slice", "0"}} {
		if err := command(t.Context(), args, new(bytes.Buffer)); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}
