//go:build linux

package main

import (
	"context"
	"errors"
	"hash/fnv"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

// Names of the kinds of jobs.
const (
	brief    = "brief"    // nothing to do
	itemised = "itemised" // items with Each
	flaky    = "flaky"    // fails the first time
	long     = "long"     // longer than a failover
	sealed   = "sealed"   // the same, with Once, ended by Complete
)

// turns are the kinds in the order in which keys come.
var turns = []string{brief, itemised, flaky, brief, long, itemised, brief, sealed, itemised, brief}

const (
	itemCount = 200
	chunk     = 20
	itemTime  = 10 * time.Millisecond
	sealItem  = 0 // what Complete writes; the items of Each are 1 to itemCount
	onceItem  = 1 // what Once writes in a job that Complete ends

	// There is no primary for half of the time, so a long job that needs one at its end
	// may fail several times: nobody is to run out of attempts for it.
	mostAttempts = 20

	firstDate = "1950-01-01" // dates are past, so each is allowed
	mostKeys  = 25_000
)

// keyNumber is the n-th key: its job and its date, from 0.
func keyNumber(n int) (job string, date jobrun.Date) {
	return turns[n%len(turns)], jobrun.MustParseDate(firstDate).AddDays(n)
}

// kindOf is the kind of a key's job.
func kindOf(key string) string {
	kind, _, _ := strings.Cut(key, ":")
	return kind
}

func keyText(n int) string {
	job, date := keyNumber(n)
	return jobrun.Job{Name: job}.Key(date)
}

// job is a kind's job. Its function notes when it starts and when it returns.
func (w *worker) job(kind string) jobrun.Job {
	work := map[string]jobrun.Func{brief: w.brief, itemised: w.itemised, flaky: w.flaky, long: w.long, sealed: w.sealed}[kind]
	return jobrun.Job{
		Name:  kind,
		Retry: jobrun.Retry{MaxAttempts: mostAttempts, Backoff: func(int) time.Duration { return time.Second }},
		Func: func(ctx context.Context, run *jobrun.Run) error {
			w.busy.Add(1)
			defer w.busy.Add(-1)
			w.about(run, note{What: started})
			err := work(ctx, run)
			w.about(run, note{What: returned})
			return err
		},
	}
}

// about notes something about a running attempt.
func (w *worker) about(run *jobrun.Run, n note) {
	n.Key, n.Attempt, n.Worker = run.Key(), run.Attempt(), run.WorkerID()
	w.notes.write(n)
}

func (w *worker) brief(context.Context, *jobrun.Run) error { return nil }

func (w *worker) flaky(_ context.Context, run *jobrun.Run) error {
	if run.Attempt() == 1 {
		return errors.New("fails the first time")
	}
	return nil
}

// itemised does its items slowly enough for kills to find it at work. Chunks are
// committed in the order of the items: the first n are done when n are.
func (w *worker) itemised(ctx context.Context, run *jobrun.Run) error {
	all := make([]int, itemCount)
	for n := range all {
		all[n] = n + 1
	}
	noted := 0
	_, err := jobrun.Each(ctx, run, jobrun.FromSlice(all), strconv.Itoa, func(ctx context.Context, tx pgx.Tx, item int) error {
		if !sleep(ctx, itemTime) {
			return context.Cause(ctx)
		}
		return effect(ctx, tx, run, item)
	}, &jobrun.EachOptions{ChunkSize: chunk, Progress: func(r jobrun.EachResult) {
		if done := int(r.Done + r.AlreadyDone); done > noted && r.Failed == 0 {
			w.about(run, note{What: items, First: noted + 1, Last: done})
			noted = done
		}
	}})
	return err
}

// effect is the work of an item. The table has no unique key: a second time shows.
func effect(ctx context.Context, tx pgx.Tx, run *jobrun.Run, item int) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (job_key, item) VALUES ($1, $2)`, run.Key(), item)
	return err
}

// long counts for 30 to 45 s.
func (w *worker) long(ctx context.Context, run *jobrun.Run) error {
	h := fnv.New32a()
	_, _ = io.WriteString(h, run.Key())
	end := time.Now().Add(30*time.Second + time.Duration(h.Sum32()%15000)*time.Millisecond)
	for time.Now().Before(end) {
		if !sleep(ctx, time.Second) {
			return context.Cause(ctx)
		}
		run.AddProcessed(1)
	}
	return nil
}

func (w *worker) sealed(ctx context.Context, run *jobrun.Run) error {
	if err := w.long(ctx, run); err != nil {
		return err
	}
	if _, err := run.Once(ctx, "once", func(tx pgx.Tx) error { return effect(ctx, tx, run, onceItem) }); err != nil {
		return err
	}
	w.about(run, note{What: items, First: onceItem, Last: onceItem})
	err := run.Complete(ctx, func(tx pgx.Tx) error { return effect(ctx, tx, run, sealItem) })
	if err == nil {
		w.about(run, note{What: items, First: sealItem, Last: sealItem})
		w.about(run, note{What: outcome, Status: string(jobrun.Succeeded)})
	}
	return err
}
