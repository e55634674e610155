package sqldrivers

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

//go:embed schema.sql
var schema string

// newDB returns a database with the tables of jobrun and of a service.
func newDB(t *testing.T) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	exec(t, db, schema)
	return db
}

func newRunner(t *testing.T, pool *pgxpool.Pool) *jobrun.Runner {
	t.Helper()
	r, err := jobrun.New(pool, time.UTC, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return r
}

var date = jobrun.MustParseDate("2026-09-15")

// execute runs a job once.
func execute(r *jobrun.Runner, name string, fn jobrun.Func) (jobrun.Result, error) {
	return r.RunDate(context.Background(), jobrun.Job{Name: name, Func: fn}, date)
}

// by is a person.
func by(force bool) jobrun.Action { return jobrun.Action{By: "operator", Reason: "test", Force: force} }

// markFailed supersedes the attempt of a run that is alive.
func markFailed(r *jobrun.Runner, key string) error {
	rec, err := r.Get(context.Background(), key)
	if err == nil {
		_, err = r.MarkFailed(context.Background(), rec, by(true))
	}
	return err
}

// changeStatus supersedes it as a program does that knows nothing of jobrun.
func changeStatus(db *pgtest.DB, key string) error {
	tag, err := db.Pool.Exec(context.Background(), `UPDATE batch_job_run SET status = 'FAILED', finished_at = now() WHERE job_key = $1`, key)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("%d rows changed", tag.RowsAffected())
	}
	return err
}

// settled returns what took effect.
func settled(t *testing.T, db *pgtest.DB) (items, balance int64) {
	t.Helper()
	err := db.Pool.QueryRow(context.Background(), `SELECT (SELECT count(*) FROM settlement_item), balance FROM merchant`).Scan(&items, &balance)
	if err != nil {
		t.Fatal(err)
	}
	return items, balance
}

func exec(t *testing.T, db *pgtest.DB, sql string) {
	t.Helper()
	if _, err := db.Pool.Exec(context.Background(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// eventually waits until ok, also beside the goroutine of the test.
func eventually(what string, ok func() bool) error {
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("never: %s", what)
		}
	}
	return nil
}
