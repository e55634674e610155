package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

const (
	bareLedger = `
CREATE TABLE IF NOT EXISTS bare.item (
  job_key varchar(120) NOT NULL, item text COLLATE "C" NOT NULL, attempt integer NOT NULL, done_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (job_key, item)
)`
	bareTake = `INSERT INTO bare.item (job_key, item, attempt) SELECT $1, unnest($2::text[]), 1 ON CONFLICT DO NOTHING`
)

// ledger is items whose work does nothing.
func (b *bench) ledger(ctx context.Context) error {
	t := b.out.table(fmt.Sprintf("%d items whose work does nothing", b.items), "time of one item")
	pool, err := open(ctx, b.url, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, ours, err := newRunner(ctx, b.url, "jobrun", 4, jobrun.Options{})
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := script(ctx, pool, bareSchema+`;`+bareLedger); err != nil {
		return err
	}
	items := make([]string, b.items)
	for i := range items {
		items[i] = fmt.Sprintf("order-%08d", i)
	}
	each := func(size int) slice {
		return func() (float64, error) {
			begin := time.Now()
			_, err := r.RunDate(ctx, jobrun.Job{Name: fresh(), Func: func(ctx context.Context, run *jobrun.Run) error {
				_, err := jobrun.Each(ctx, run, jobrun.FromSlice(items), func(s string) string { return s },
					func(context.Context, pgx.Tx, string) error { return nil }, &jobrun.EachOptions{ChunkSize: size})
				return err
			}}, date)
			return time.Since(begin).Seconds() / float64(len(items)), err
		}
	}
	bare := func() (float64, error) {
		begin, key := time.Now(), fresh()
		for part := range slices.Chunk(items, 1000) {
			if _, err := pool.Exec(ctx, bareTake, key, part); err != nil {
				return 0, err
			}
		}
		return time.Since(begin).Seconds() / float64(len(items)), nil
	}
	peers := b.sides.wanted("jobrun, the default", "jobrun, chunks of 100", "River", "DBOS, no step")
	started := slices.DeleteFunc(slices.Clone(peers), func(name string) bool { return strings.HasPrefix(name, "jobrun") })
	err = b.with(ctx, b.url, 10, started, func(all map[string]*side) error {
		// A job of River's for each, inserted by the thousand, and a workflow of DBOS's: of fewer, which are as many a second.
		few := func(name string) (slice, error) {
			return sized(func(n int) slice {
				if all[name].many != nil {
					return all[name].many(ctx, n)
				}
				return sliceOf(ctx, n, 8, all[name].run)
			}, 200, 20*b.slice)
		}
		return b.against(t, "bare, `unnest` in chunks of 1000", peers, func(name string) (slice, error) {
			switch name {
			case "jobrun, chunks of 100":
				return each(100), nil
			case "jobrun, the default":
				return each(0), nil
			case "River", "DBOS, no step":
				return few(name)
			default:
				return bare, nil
			}
		})
	})
	return err
}

// retries is a run that fails once and is tried again: two attempts.
func (b *bench) retries(ctx context.Context) error {
	t := b.out.table("a run that fails once, and its retry", "time of both attempts")
	r, ours, err := newRunner(ctx, b.url, "jobrun", 4, jobrun.Options{})
	if err != nil {
		return err
	}
	defer ours.Close()
	pool, err := open(ctx, b.url, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := script(ctx, pool, bareSchema); err != nil {
		return err
	}
	failure := errors.New("once")
	again := func(ctx context.Context, key string) error {
		job := jobrun.Job{
			Name: key, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Nanosecond }},
			Func: func(_ context.Context, run *jobrun.Run) error {
				if run.Attempt() == 1 {
					return failure
				}
				return nil
			},
		}
		if _, err := r.RunDate(ctx, job, date); !errors.Is(err, failure) {
			return fmt.Errorf("the first attempt: %w", err)
		}
		results, err := r.RetryDue(ctx, job)
		if err == nil && (len(results) != 1 || !results[0].Ran()) {
			err = fmt.Errorf("the retry: %v", results)
		}
		return err
	}
	byHand := func(ctx context.Context, key string) error {
		for _, sql := range []string{
			`INSERT INTO bare.batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'bench-00000000') ON CONFLICT (job_key) DO NOTHING`,
			`UPDATE bare.batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'once' WHERE job_key = $1`,
			`SELECT status FROM bare.batch_job_run WHERE job_key = $1 AND status = 'FAILED'`,
			`UPDATE bare.batch_job_run SET status = 'RUNNING', started_at = now(), finished_at = NULL, error_message = NULL WHERE job_key = $1 AND status = 'FAILED'`,
			bareFinish,
		} {
			if _, err := pool.Exec(ctx, sql, key+suffix); err != nil {
				return err
			}
		}
		return nil
	}
	return b.against(t, "bare", []string{"jobrun"}, func(name string) (slice, error) {
		op := byHand
		if name == "jobrun" {
			op = again
		}
		return sized(func(n int) slice { return sliceOf(ctx, n, 1, op) }, 1, b.slice)
	})
}
