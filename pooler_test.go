package jobrun_test

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// A pooler in transaction mode gives the next client the same session, and this client
// another one: nothing may be left in it but what the pool itself put there.
func TestNothingIsLeftInASession(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.DefaultQueryExecMode = 3, mode })
			r := newRunner(t, pool, jobrun.Options{})
			failure := errors.New("rates are missing")
			job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2}, Func: func(ctx context.Context, run *jobrun.Run) error {
				if _, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(30)), strconv.Itoa, func(context.Context, pgx.Tx, int) error { return nil }, &jobrun.EachOptions{ChunkSize: 7, Parallel: 2}); err != nil {
					return err
				}
				if _, err := run.Once(ctx, "summary", func(pgx.Tx) error { return nil }); err != nil {
					return err
				}
				if err := run.Tx(ctx, func(tx pgx.Tx) error { return run.SetCheckpoint(ctx, tx, map[string]int{"page": 7}) }); err != nil {
					return err
				}
				if run.Attempt() == 1 {
					return failure
				}
				return run.Complete(ctx, func(pgx.Tx) error { return nil })
			}}
			if _, err := r.RunDate(t.Context(), job, date); !errors.Is(err, failure) {
				t.Fatal(err)
			}
			rec, err := r.Get(t.Context(), job.Key(date))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.ApproveRerun(t.Context(), rec, jobrun.Action{By: "kim", Reason: "rates loaded", ResetItems: true}); err != nil {
				t.Fatal(err)
			}
			if results, err := r.RetryDue(t.Context(), job); err != nil || len(results) != 1 || results[0].Record.Status != jobrun.Succeeded {
				t.Fatal(results, err)
			}
			if _, err := r.Skip(t.Context(), job.Key(date.AddDays(1)), jobrun.Action{By: "kim", Reason: "no trading"}); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Attention(t.Context(), nil, job); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Prune(t.Context(), date.AddDays(1)); err != nil {
				t.Fatal(err)
			}
			if err := r.Verify(t.Context()); err != nil {
				t.Fatal(err)
			}
			conns := pool.AcquireAllIdle(t.Context())
			if len(conns) == 0 {
				t.Fatal("no connection is idle")
			}
			for _, c := range conns {
				left, err := pgtest.Leftovers(t.Context(), c)
				if err != nil {
					t.Error(err)
				}
				for _, thing := range left {
					t.Error(thing)
				}
				c.Release()
			}
		})
	}
}
