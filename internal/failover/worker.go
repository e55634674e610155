//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// settings are what the command tells a worker process.
type settings struct {
	Name, URL, Notes string
	Begin            time.Time // of the first key
}

const (
	// workerVariable holds the settings of a process that is a worker.
	workerVariable = "JOBRUN_FAILOVER_WORKER"

	pace  = 200 * time.Millisecond // a new key begins
	lease = time.Minute

	databaseTimeout = 30 * time.Second
	quiet           = 6 * time.Second // without anything due, after which all runs have come to an end

	// wordFinish on its input tells a worker to try no new keys and to end when all
	// runs have; the end of its input, to end at once.
	wordFinish = "finish"
)

type worker struct {
	settings
	notes *notebook
	r     *jobrun.Runner
	jobs  map[string]jobrun.Job
	busy  atomic.Int64 // calls of RunDate and functions under way
}

func runWorker(text string) int {
	var w worker
	err := json.Unmarshal([]byte(text), &w.settings)
	if err == nil {
		err = w.run()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker %s: %v\n", w.Name, err)
		return 1
	}
	return 0
}

func (w *worker) run() (err error) {
	ctx := context.Background()
	if w.notes, err = newNotebook(w.Notes); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(w.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	w.r, err = jobrun.New(pool, time.UTC, &jobrun.Options{
		Lease: lease, DatabaseTimeout: databaseTimeout, WorkerID: w.Name,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	w.jobs = map[string]jobrun.Job{}
	for _, kind := range turns {
		w.jobs[kind] = w.job(kind)
	}
	finish := make(chan struct{})
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			if in.Text() == wordFinish {
				close(finish)
			}
		}
		os.Exit(4)
	}()
	var due sync.WaitGroup
	stop := make(chan struct{})
	var idle atomic.Int64 // since when nothing was due, as Unix time in ns
	due.Go(func() { w.retryDue(ctx, stop, &idle) })
	w.tryKeys(ctx, finish)
	idle.Store(time.Now().UnixNano())
	for w.busy.Load() > 0 || time.Since(time.Unix(0, idle.Load())) < quiet {
		sleep(ctx, 100*time.Millisecond)
		if w.busy.Load() > 0 {
			idle.Store(time.Now().UnixNano())
		}
	}
	close(stop)
	due.Wait()
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return w.r.Shutdown(limit)
}

// tryKeys tries each key when its time has come, until told to finish.
func (w *worker) tryKeys(ctx context.Context, finish <-chan struct{}) {
	for n := range mostKeys {
		select {
		case <-finish:
			w.notes.write(note{What: tried, Number: n})
			return
		case <-time.After(time.Until(w.Begin.Add(time.Duration(n) * pace))):
		}
		w.busy.Add(1)
		go func() {
			defer w.busy.Add(-1)
			w.tryKey(ctx, n)
		}()
	}
	w.notes.write(note{What: tried, Number: mostKeys})
	<-finish
}

// tryKey calls RunDate until it says whose the run is.
func (w *worker) tryKey(ctx context.Context, n int) {
	kind, date := keyNumber(n)
	for {
		res, err := w.r.RunDate(ctx, w.jobs[kind], date)
		w.told([]jobrun.Result{res}, err)
		if res.Decision != "" {
			return
		}
		sleep(ctx, time.Second)
	}
}

// retryDue calls RetryDue every second; one call may take as long as the jobs.
func (w *worker) retryDue(ctx context.Context, stop <-chan struct{}, idle *atomic.Int64) {
	var all []jobrun.Job
	for _, job := range w.jobs {
		all = append(all, job)
	}
	var calls sync.WaitGroup
	defer calls.Wait()
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Second):
		}
		calls.Go(func() {
			results, err := w.r.RetryDue(ctx, all...)
			if len(results) > 0 || err != nil {
				idle.Store(time.Now().UnixNano())
			}
			w.told(results, err)
		})
	}
}

// told notes what a call said of its runs. An error that is not about a job says
// something of one of them, and does not tell which: then only failures are certain,
// which name their attempts.
func (w *worker) told(results []jobrun.Result, err error) {
	failed, other := map[string]int{}, false
	for _, err := range leaves(err) {
		run, ok := err.(*jobrun.RunError) //nolint:errorlint // what the call says, not what the job says
		if ok {
			failed[run.Key] = run.Attempt
		} else {
			other = true
		}
	}
	for _, res := range results {
		n := note{What: outcome, Key: res.Record.Key, Attempt: res.Record.Attempt, Status: string(res.Record.Status), Worker: res.Record.WorkerID}
		attempt, isFailed := failed[n.Key]
		isUnknown := errors.Is(err, jobrun.ErrOutcomeUnknown) || errors.Is(err, jobrun.ErrLeaseLost)
		switch {
		case res.Decision == jobrun.AlreadySucceeded:
			n.What = seen
		case res.Ran() && !isFailed && isUnknown: // whatever the run's row says, which may be on the primary alone
			n.What = unknown
		case res.Ran() && res.Record.Status == jobrun.Running: // and no word of it: the judge finds no such outcome
		case !res.Ran(), isFailed && attempt != n.Attempt, !isFailed && other:
			continue
		}
		w.notes.write(n)
	}
}

// leaves are the errors that a call has joined.
func leaves(err error) (all []error) {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error }) // the outermost alone is the call's
	if !ok {
		return []error{err}
	}
	for _, err := range joined.Unwrap() {
		all = append(all, leaves(err)...)
	}
	return all
}
