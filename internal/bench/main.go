//go:build unix

// Command bench measures jobrun beside the bare SQL statements and beside other
// libraries, on a PostgreSQL that it starts with default durability. It prints
// Markdown tables and writes charts.
//
// Two sides work in adjacent short slices, A B B and B B A: the ratio is taken
// pair by pair, and B against itself tells what the machine can resolve.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	all := make([]string, len(works))
	for i, w := range works {
		all[i] = w.name
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	b := &bench{out: &report{out: out}, old: []int{1_000_000}}
	flags.IntVar(&b.pairs, "pairs", 16, "pairs of slices for each figure")
	flags.DurationVar(&b.slice, "slice", 100*time.Millisecond, "how long a slice should take")
	flags.Func("old", "`runs` in the long histories, a list with commas, at least 1000 each (default 1000000)", func(list string) error {
		b.old = nil
		for text := range strings.SplitSeq(list, ",") {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1000 || n == 10_000 || slices.Contains(b.old, n) {
				return errors.New("want numbers of runs, at least 1000, not 10000, which they are compared with")
			}
			b.old = append(b.old, n)
		}
		return nil
	})
	flags.IntVar(&b.items, "items", 100_000, "items of one run")
	flags.IntVar(&b.beats, "beats", 100_000, "heartbeats to send, to count the HOT updates among them")
	only := flags.String("only", strings.Join(all, ","), "what to measure, a list with commas")
	flags.Var(&b.sides, "sides", "which sides to measure beside the bare statements, a list of beginnings of their names with commas, such as jobrun,River; none: all")
	dir := flags.String("charts", "", "`directory` for charts, as seen from internal/bench; none: no charts")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || b.pairs < 1 || b.items < 1 || b.beats < 1 || b.slice <= 0 {
		return errors.New("-pairs, -items, -beats and -slice are positive, and there are no further arguments")
	}
	for name := range strings.SplitSeq(*only, ",") {
		if !strings.Contains(","+strings.Join(all, ",")+",", ","+name+",") {
			return fmt.Errorf("-only: %q is none; allowed: %s", name, strings.Join(all, ", "))
		}
	}
	server, err := pgtest.Start(ctx, pgtest.Options{Durable: true, Log: os.Stderr, Settings: map[string]string{
		"max_connections": "600", "autovacuum": "off", // the tables stay as they were made: never analyzed
	}})
	if err != nil {
		return err
	}
	defer server.Stop()
	b.url = server.URL("postgres")
	if err := b.describe(ctx); err != nil {
		return err
	}
	for _, w := range works {
		if strings.Contains(","+*only+",", ","+w.name+",") {
			if err := w.do(b, ctx); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}
	}
	if *dir == "" {
		return nil
	}
	return b.charts(*dir)
}

// describe tells what is measured on what.
func (b *bench) describe(ctx context.Context) error {
	pool, err := open(ctx, b.url, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	var version string
	if err := pool.QueryRow(ctx, `SHOW server_version`).Scan(&version); err != nil {
		return err
	}
	fmt.Fprintf(b.out.out, "PostgreSQL %s, %s, %d cores (%s) for server and client together", version, runtime.Version(), runtime.NumCPU(), processor())
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			for _, name := range []string{"jackc/pgx/v5", "riverqueue/river", "dbos-inc/dbos-transact-golang", "go-co-op/gocron/v2", "cirello.io/pglock"} {
				if strings.HasSuffix(dep.Path, name) {
					fmt.Fprintf(b.out.out, ", %s %s", dep.Path, dep.Version)
				}
			}
		}
	}
	fmt.Fprintf(b.out.out, ". %d pairs of slices of about %s.\n", b.pairs, b.slice)
	return nil
}

// processor is the model of the machine's.
func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// charts are the works that are drawn, by the names of their files.
var charts = map[string]string{"run": "a complete run, 8 at a time", "lost": "a call for a run that is done", "race": "64 calls for one key at one instant, until all have returned", "items": "items whose work does nothing"}

// charts writes those of what was compared.
func (b *bench) charts(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, t := range b.out.tables {
		for name, work := range charts {
			if !strings.HasSuffix(t.work, work) || len(t.rows) == 0 {
				continue
			}
			f, err := os.Create(filepath.Join(dir, name+".svg"))
			if err != nil {
				return err
			}
			if err := errors.Join(chart(f, t), f.Close()); err != nil {
				return err
			}
		}
	}
	return nil
}
