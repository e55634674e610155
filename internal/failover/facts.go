//go:build linux

package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// facts are what is judged: what the workers were told, and what the tables say.
type facts struct {
	notes     []note
	failovers []failover
	runs      map[string]runRow
	attempts  map[attemptID]attemptRow
	effects   map[string]map[int]int // how often, by key and item
}

// failover is a primary that was lost, and what followed.
type failover struct {
	How, From, To   string
	Lag             time.Duration // nothing was replicated for so long before
	At, Back, Whole time.Time     // of the loss; when a write succeeded again; when the cluster was whole again
}

type runRow struct {
	Status  string
	Attempt int
}

type attemptID struct {
	Key     string
	Attempt int
}

type attemptRow struct {
	Worker, Outcome, EndedBy string
	NeverStarted             bool // a claim that was closed because its answer was lost
}

// readTables reads what the tables say.
func (f *facts) readTables(ctx context.Context, conn *pgx.Conn) error {
	f.runs, f.attempts, f.effects = map[string]runRow{}, map[attemptID]attemptRow{}, map[string]map[int]int{}
	var key, status, worker, endedBy string
	var number, count int
	var never bool
	rows, err := conn.Query(ctx, `SELECT job_key, status, attempt FROM batch_job_run`)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, []any{&key, &status, &number}, func() error {
		f.runs[key] = runRow{status, number}
		return nil
	})
	if err != nil {
		return err
	}
	if rows, err = conn.Query(ctx, `SELECT job_key, attempt, worker_id, coalesce(outcome, ''), coalesce(ended_by, ''), coalesce(error_message LIKE 'never started:%', false) FROM batch_job_attempt`); err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, []any{&key, &number, &worker, &status, &endedBy, &never}, func() error {
		f.attempts[attemptID{key, number}] = attemptRow{worker, status, endedBy, never}
		return nil
	})
	if err != nil {
		return err
	}
	if rows, err = conn.Query(ctx, `SELECT job_key, item, count(*) FROM effect GROUP BY 1, 2`); err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, []any{&key, &number, &count}, func() error {
		if f.effects[key] == nil {
			f.effects[key] = map[int]int{}
		}
		f.effects[key][number] = count
		return nil
	})
	return err
}
