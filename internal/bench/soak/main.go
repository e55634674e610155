// Soak runs 200 jobs in every minute, in three processes that all try each of them, for
// 45 minutes, and looks whether anything grows: memory, goroutines, connections, tables
// and indexes in proportion to their rows.
//
//	go run -C internal/bench ./soak -chart soak.svg
//
// It prints a table and fails if a slot was not executed once, or if something grew.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

type config struct {
	time      time.Duration
	jobs      int
	processes int
	chart     string
}

func main() {
	var c config
	flag.DurationVar(&c.time, "time", 45*time.Minute, "how long")
	flag.IntVar(&c.jobs, "jobs", 200, "jobs, each of which runs once in every minute")
	flag.IntVar(&c.processes, "processes", 3, "processes, each of which tries all jobs")
	flag.StringVar(&c.chart, "chart", "", "`file` for an SVG of what was seen; empty: none")
	flag.Parse()
	if flag.NArg() > 0 || c.time < 2*time.Minute || c.jobs < 1 || c.processes < 1 {
		fmt.Fprintln(os.Stderr, "soak: -time is at least 2m, -jobs and -processes are positive, and there are no further arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	do := func() error { return soak(ctx, c) }
	if url := os.Getenv("SOAK_WORKER"); url != "" {
		do = func() error { return work(ctx, url, c.jobs) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// soak starts the server and the workers, looks at them, and judges.
func soak(ctx context.Context, c config) error {
	server, err := pgtest.Start(ctx, pgtest.Options{Durable: true, Log: os.Stderr, Settings: map[string]string{"max_connections": "100"}})
	if err != nil {
		return err
	}
	defer server.Stop()
	pool, err := pgxpool.New(ctx, server.URL("postgres"))
	if err != nil {
		return err
	}
	defer pool.Close()
	runner, err := jobrun.New(pool, time.UTC, nil)
	if err != nil {
		return err
	}
	if err := runner.Migrate(ctx); err != nil {
		return err
	}
	// What was executed, by the functions themselves: no key, so that a second time shows.
	if _, err := pool.Exec(ctx, `CREATE TABLE execution (job_key text, attempt integer, finished boolean DEFAULT false)`); err != nil {
		return err
	}
	var workers []*worker
	defer func() {
		for _, w := range workers {
			w.kill()
		}
	}()
	for range c.processes {
		w, err := startWorker(c, server.URL("postgres"))
		if err != nil {
			return err
		}
		workers = append(workers, w)
	}
	samples, err := watch(ctx, c, pool, workers)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if err := w.stop(); err != nil {
			return fmt.Errorf("a worker: %w", err)
		}
	}
	err = errors.Join(judgeRuns(ctx, c, pool), judgeGrowth(samples))
	if c.chart != "" {
		err = errors.Join(err, chart(c.chart, samples))
	}
	return err
}
