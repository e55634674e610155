package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// A side does the same work in its own way, over a pool of its own.
type side struct {
	name  string
	run   operation                                       // a complete run of a function that does nothing
	call  operation                                       // a call for a key, won or lost: "run" for all but the bare statements
	claim operation                                       // the first half of a run, of the sides that have one
	bulk  func(ctx context.Context, n, workers int) slice // where runs are not to be waited for one by one: so many, begun by so many
	many  func(ctx context.Context, n int) slice          // the same, begun in batches of 1000
	end   func()
}

var (
	seoul  = time.FixedZone("KST", 9*60*60)
	date   = jobrun.MustParseDate("2026-09-15")
	noop   = func(context.Context, *jobrun.Run) error { return nil }
	silent = slog.New(slog.DiscardHandler)
)

const (
	suffix = ":2026-09-15"
	worker = "bench-00000000"

	bareSchema = `
CREATE SCHEMA IF NOT EXISTS bare;
CREATE TABLE IF NOT EXISTS bare.batch_job_run (
  job_key       varchar(120) PRIMARY KEY,
  status        varchar(20)  NOT NULL,
  started_at    timestamptz  NOT NULL DEFAULT now(),
  finished_at   timestamptz,
  worker_id     varchar(80)  NOT NULL,
  error_message text
);
CREATE INDEX IF NOT EXISTS batch_job_run_status_started_idx ON bare.batch_job_run (status, started_at)`
	bareClaim  = `INSERT INTO bare.batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', $2) ON CONFLICT (job_key) DO NOTHING`
	bareFinish = `UPDATE bare.batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`

	// The same with what jobrun keeps besides, by hand, on tables and indexes as
	// jobrun's: the wide row and a row of history, in one statement each.
	handClaim = `
WITH claimed AS (
  INSERT INTO hand.batch_job_run (job_key, status, started_at, worker_id, job_name, business_date, scheduled_for, attempt, token)
  VALUES ($1, 'RUNNING', now(), $2, $3, $4::date, now(), 1, $5)
  ON CONFLICT (job_key) DO NOTHING
  RETURNING job_key, attempt, token, worker_id, started_at
)
INSERT INTO hand.batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after)
SELECT job_key, attempt, token, worker_id, 'MANUAL', started_at, started_at, interval '2 minutes', interval '20 minutes'
FROM claimed`
	handFinish = `
WITH done AS (
  UPDATE hand.batch_job_run
  SET status = 'SUCCEEDED', finished_at = now()
  WHERE job_key = $1 AND attempt = 1 AND token = $2
  RETURNING job_key, finished_at
)
UPDATE hand.batch_job_attempt AS a
SET finished_at = done.finished_at, heartbeat_at = done.finished_at, outcome = 'SUCCEEDED', ended_by = 'WORKER', items_processed = 0, items_failed = 0
FROM done
WHERE a.job_key = $1 AND a.attempt = 1 AND a.token = $2`
)

// open is a pool for so many connections.
func open(ctx context.Context, url string, conns int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	return pgxpool.NewWithConfig(ctx, config)
}

// script executes several statements.
func script(ctx context.Context, pool *pgxpool.Pool, sql string) error {
	_, err := pool.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
	return err
}

// migrated is a Runner whose tables are in the schema.
func migrated(ctx context.Context, pool *pgxpool.Pool, schema string, opts jobrun.Options) (*jobrun.Runner, error) {
	if _, err := pool.Exec(ctx, `CREATE SCHEMA IF NOT EXISTS `+schema); err != nil {
		return nil, err
	}
	opts.Schema, opts.Logger = schema, silent
	r, err := jobrun.New(pool, seoul, &opts)
	if err == nil {
		err = r.Migrate(ctx)
	}
	return r, err
}

// newSide makes the tables that a side needs, if they are not there, and starts it.
func newSide(ctx context.Context, name, url string, conns int) (*side, error) {
	pool, err := open(ctx, url, conns)
	if err != nil {
		return nil, err
	}
	s, err := sides[name](ctx, pool)
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	s.name = name
	if s.call == nil {
		s.call = s.run
	}
	end := s.end
	s.end = func() {
		if end != nil {
			end()
		}
		pool.Close()
	}
	return s, nil
}

// sides are those that there are, by their name in the tables.
var sides = map[string]func(ctx context.Context, pool *pgxpool.Pool) (*side, error){
	"bare":                  newBare,
	"by hand, with history": newHand,
	"jobrun's own by hand":  newFloor,
	"jobrun":                newJobrun,
	"River":                 newRiver,
	"DBOS, no step":         func(ctx context.Context, pool *pgxpool.Pool) (*side, error) { return newDBOS(ctx, pool, 0) },
	"DBOS, 1 step":          func(ctx context.Context, pool *pgxpool.Pool) (*side, error) { return newDBOS(ctx, pool, 1) },
	"gocron, advisory lock": newGocron,
	"pglock":                newPglock,
}

// newBare is the two statements that a service would write by itself.
func newBare(ctx context.Context, pool *pgxpool.Pool) (*side, error) {
	if err := script(ctx, pool, bareSchema); err != nil {
		return nil, err
	}
	claim := func(ctx context.Context, key string) (won bool, err error) {
		tag, err := pool.Exec(ctx, bareClaim, key+suffix, worker)
		return tag.RowsAffected() == 1, err
	}
	finish := func(ctx context.Context, key string) error {
		_, err := pool.Exec(ctx, bareFinish, key+suffix)
		return err
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			if _, err := claim(ctx, key); err != nil {
				return err
			}
			return finish(ctx, key)
		},
		call: func(ctx context.Context, key string) error {
			won, err := claim(ctx, key)
			if won {
				err = finish(ctx, key)
			}
			return err
		},
		claim: func(ctx context.Context, key string) error {
			_, err := claim(ctx, key)
			return err
		},
	}, nil
}

func newHand(ctx context.Context, pool *pgxpool.Pool) (*side, error) {
	if _, err := migrated(ctx, pool, "hand", jobrun.Options{}); err != nil {
		return nil, err
	}
	claim := func(ctx context.Context, key, token string) error {
		_, err := pool.Exec(ctx, handClaim, key+suffix, worker, key, "2026-09-15", token)
		return err
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			token := uuid.NewString()
			if err := claim(ctx, key, token); err != nil {
				return err
			}
			_, err := pool.Exec(ctx, handFinish, key+suffix, token)
			return err
		},
		claim: func(ctx context.Context, key string) error { return claim(ctx, key, uuid.NewString()) },
	}, nil
}

// newFloor is jobrun's statements without jobrun.
func newFloor(ctx context.Context, pool *pgxpool.Pool) (*side, error) {
	if _, err := migrated(ctx, pool, "floor", jobrun.Options{}); err != nil {
		return nil, err
	}
	s := store.New("floor")
	claim := func(ctx context.Context, key string) (row store.Row, err error) {
		row, _, err = s.Claim(ctx, pool, store.Claim{
			Key: key + suffix, Job: key, Date: "2026-09-15", Token: uuid.NewString(), Worker: worker, Trigger: "MANUAL",
			ScheduledFor: time.Now(), Lease: 2 * time.Minute, StaleAfter: 20 * time.Minute,
		}, 10*time.Second)
		return row, err
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			row, err := claim(ctx, key)
			if err != nil || row.Status != "RUNNING" {
				return err
			}
			_, _, err = s.Finish(ctx, pool, row, store.Outcome{Status: "SUCCEEDED", Next: -1}, 10*time.Second)
			return err
		},
		claim: func(ctx context.Context, key string) error {
			_, err := claim(ctx, key)
			return err
		},
	}, nil
}

func newJobrun(ctx context.Context, pool *pgxpool.Pool) (*side, error) {
	r, err := migrated(ctx, pool, "jobrun", jobrun.Options{})
	if err != nil {
		return nil, err
	}
	return &side{
		run: func(ctx context.Context, key string) error {
			_, err := r.RunDate(ctx, jobrun.Job{Name: key, Func: noop}, date)
			return err
		},
		end: func() { _ = r.Shutdown(context.Background()) },
	}, nil
}

// runner of jobrun's with its pool, which its caller closes.
func newRunner(ctx context.Context, url, schema string, conns int, opts jobrun.Options) (*jobrun.Runner, *pgxpool.Pool, error) {
	pool, err := open(ctx, url, conns)
	if err != nil {
		return nil, nil, err
	}
	r, err := migrated(ctx, pool, schema, opts)
	if err != nil {
		pool.Close()
	}
	return r, pool, err
}
