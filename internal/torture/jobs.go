//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

// A kind is a kind of job. The checker reads what a run of it has to do from
// torture.job.
type kind struct {
	name, way string
	items     int
	attempts  int
	every     time.Duration
}

// kinds are the jobs of the run. The first ones are run by date, the last two by
// the clock of a process, which may be wrong.
var kinds = []kind{
	{name: "settle", way: "each", items: 40, attempts: 3},
	{name: "notify", way: "once", items: 8, attempts: 3},
	{name: "close", way: "complete", items: 1, attempts: 2},
	{name: "sync", way: "tx", items: 10, attempts: 3},
	{name: "export", way: "fence", items: 6, attempts: 2},
	{name: "ping", way: "plain", items: 0, attempts: 2},
	{name: "nightly", way: "each", items: 10, attempts: 3},
	{name: "slot", way: "plain", items: 0, attempts: 2, every: time.Minute},
}

const byDate = 6 // how many of the kinds

// job is the job of a kind in a worker process.
func (w *worker) job(k kind) jobrun.Job {
	return jobrun.Job{
		Name: k.name, Every: k.every, StaleAfter: staleAfter,
		Retry: jobrun.Retry{MaxAttempts: k.attempts, Backoff: jobrun.Exponential(50*time.Millisecond, 400*time.Millisecond)},
		Func:  func(ctx context.Context, run *jobrun.Run) error { return w.execute(ctx, run, k) },
	}
}

// execute is the function of every job: it notes that it was called, does the
// kind's work, in which something may go wrong, and notes what it returns.
func (w *worker) execute(ctx context.Context, run *jobrun.Run, k kind) (err error) {
	rng := rand.New(rand.NewPCG(w.Seed, rand.Uint64()))
	id := w.note(ctx, `
		INSERT INTO torture.execution (id, session, worker, job_key, attempt, trigger)
		SELECT $1, $2, coalesce((SELECT worker_id FROM public.batch_job_attempt WHERE job_key = $3 AND attempt = $4), ''), $3, $4, $5
		ON CONFLICT (id) DO NOTHING`, w.Name, run.Key(), run.Attempt(), string(run.Trigger()))
	if e, ok := ctx.Value(executedKey{}).(*executed); ok {
		*e = executed{id, run.Attempt()}
	}
	outcome := "panic"
	defer func() {
		text := ""
		if err != nil {
			text = err.Error()
		}
		w.note(ctx, `INSERT INTO torture.returned (id, execution, outcome, error) VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO NOTHING`, id, outcome, text)
	}()
	fate := rng.IntN(100)
	if w.calm.Load() {
		fate = 100
	}
	ends := "" // at a random item
	switch {
	case fate < 8:
		ends = "error"
	case fate < 11:
		ends = "panic"
	case fate < 13:
		ends = "goexit"
	case fate < 16:
		outcome = "skip"
		return jobrun.SkipRun("nothing to do today")
	case fate < 19: // much longer than a lease, and than it should
		w.pause(ctx, time.Duration(1+rng.IntN(3))*lease)
	}
	if ctx.Err() == nil && rng.IntN(8) == 0 {
		ctx = context.WithoutCancel(ctx) // a job that does not listen
	}
	at := rng.IntN(max(1, k.items))
	item := func(n int) error {
		if !w.calm.Load() {
			w.pause(ctx, time.Duration(rand.ExpFloat64()*float64(4*time.Millisecond))) // not rng: chunks go side by side
		}
		if n != at {
			return ctx.Err()
		}
		switch ends {
		case "error":
			return errors.New("item refused")
		case "panic":
			panic("item exploded")
		case "goexit":
			outcome = "goexit"
			runtime.Goexit()
		}
		return ctx.Err()
	}
	switch err = w.work(ctx, run, k, item); {
	case err != nil:
		outcome = "error"
	case ends != "" && k.way == "plain": // it has no item to fail at
		outcome = "error"
		err = item(at)
	default:
		outcome = "nil"
	}
	return err
}

// work does the items of a kind its way. Item is called for each, with numbers from 0.
func (w *worker) work(ctx context.Context, run *jobrun.Run, k kind, item func(int) error) error {
	effect := func(ctx context.Context, tx interface {
		Exec(context.Context, string, ...any) error
	}, name string,
	) error {
		return tx.Exec(ctx, `INSERT INTO torture.effect (way, job_key, attempt, item) VALUES ($1, $2, $3, $4)`, k.way, run.Key(), run.Attempt(), name)
	}
	name := func(n int) string { return fmt.Sprintf("item-%d", n+1) }
	switch k.way {
	case "each":
		numbers := make([]int, k.items)
		for n := range numbers {
			numbers[n] = n
		}
		_, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers), name, func(ctx context.Context, tx pgx.Tx, n int) error {
			if err := item(n); err != nil {
				return err
			}
			return effect(ctx, ours{tx}, name(n))
		}, &jobrun.EachOptions{ChunkSize: 1 + run.Attempt()*5%12, Parallel: 1 + run.Attempt()%2})
		return err
	case "once":
		for n := range k.items {
			if _, err := run.Once(ctx, name(n), func(tx pgx.Tx) error {
				if err := item(n); err != nil {
					return err
				}
				return effect(ctx, ours{tx}, name(n))
			}); err != nil {
				return err
			}
		}
		return nil
	case "complete":
		return run.Complete(ctx, func(tx pgx.Tx) error {
			if err := item(0); err != nil {
				return err
			}
			return effect(ctx, ours{tx}, "all")
		})
	case "tx":
		next := 0
		if _, err := run.Checkpoint(ctx, &next); err != nil {
			return err
		}
		for n := next; n < k.items; n++ {
			if err := run.Tx(ctx, func(tx pgx.Tx) error {
				if err := item(n); err != nil {
					return err
				}
				if err := effect(ctx, ours{tx}, name(n)); err != nil {
					return err
				}
				return run.SetCheckpoint(ctx, tx, n+1)
			}); err != nil {
				return err
			}
		}
		return nil
	case "fence":
		for n := range k.items {
			if err := item(n); err != nil {
				return err
			}
			own := w.fencePGX
			if n%2 == 1 {
				own = w.fenceSQL
			}
			if err := own(ctx, run, func(tx executer) error { return effect(ctx, tx, name(n)) }); err != nil {
				return err
			}
		}
		return nil
	}
	return item(0)
}

// executer is a transaction, of whichever library.
type executer interface {
	Exec(ctx context.Context, sql string, args ...any) error
}

type ours struct{ pgx.Tx }

func (t ours) Exec(ctx context.Context, sql string, args ...any) error {
	_, err := t.Tx.Exec(ctx, sql, args...)
	return err
}

type theirs struct{ *sql.Tx }

func (t theirs) Exec(ctx context.Context, sql string, args ...any) error {
	_, err := t.ExecContext(ctx, sql, args...)
	return err
}

// fencePGX commits an effect in a transaction of its own.
func (w *worker) fencePGX(ctx context.Context, run *jobrun.Run, effect func(executer) error) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := effect(ours{tx}); err != nil {
			return err
		}
		return run.Fence(ctx, tx)
	})
}

// fenceSQL does so through database/sql.
func (w *worker) fenceSQL(ctx context.Context, run *jobrun.Run, effect func(executer) error) error {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // nothing after a commit
	if err := effect(theirs{tx}); err != nil {
		return err
	}
	if err := run.FenceSQL(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}
