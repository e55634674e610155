package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func ExampleParseDate() {
	d, err := jobrun.ParseDate("2026-02-28")
	fmt.Println(d, err)
	fmt.Println(d.AddDays(1), d.EndOfMonth(), d.Weekday())

	_, err = jobrun.ParseDate("2026-02-29")
	fmt.Println(err)
	// Output:
	// 2026-02-28 <nil>
	// 2026-03-01 2026-02-28 Saturday
	// date "2026-02-29": want YYYY-MM-DD, a calendar date from 0001-01-01 to 9999-12-31
}

func ExampleCalendar() {
	bankingDays := jobrun.Weekdays.Except(
		jobrun.MustParseDate("2026-09-24"),
		jobrun.MustParseDate("2026-09-25"),
	)
	next, err := bankingDays.Next(jobrun.MustParseDate("2026-09-23"))
	fmt.Println(next, err)

	rule := jobrun.PreviousBusinessDay(bankingDays)
	previous, err := rule(jobrun.MustParseDate("2026-09-28"))
	fmt.Println(previous, err)
	// Output:
	// 2026-09-28 <nil>
	// 2026-09-23 <nil>
}

func ExampleJob_Validate() {
	job := jobrun.Job{
		Name: "daily settlement",
		Func: func(context.Context, *jobrun.Run) error { return nil },
	}
	fmt.Println(job.Validate())
	job.Name = "billing/daily-settlement"
	fmt.Println(job.Validate())
	fmt.Println(job.Key(jobrun.MustParseDate("2026-09-15")))
	// Output:
	// jobrun: Job.Name is "daily settlement", allowed: 1 to 80 letters and digits of any script and . _ - /
	// <nil>
	// billing/daily-settlement:2026-09-15
}

func ExampleRunner_RunDate() {
	ctx := context.Background()
	pool, closePool := examplePool()
	defer closePool()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		log.Fatal(err)
	}
	runner, err := jobrun.New(pool, zone, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	if err := runner.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	job := jobrun.Job{
		Name: "daily-settlement",
		Func: func(ctx context.Context, run *jobrun.Run) error {
			fmt.Println("settling", run.Date(), "attempt", run.Attempt())
			return nil
		},
	}
	for range 2 {
		res, err := runner.RunDate(ctx, job, jobrun.MustParseDate("2026-09-15"))
		fmt.Println(res.Decision, res.Record.Status, err)
	}
	// Output:
	// settling 2026-09-15 attempt 1
	// RAN SUCCEEDED <nil>
	// ALREADY_SUCCEEDED SUCCEEDED <nil>
}

// A cron callback becomes a job. The callback may drop what Run returns: an error
// has been logged.
func ExampleRunner_Run_cron() {
	ctx := context.Background()
	pool, closePool := examplePool()
	defer closePool()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		log.Fatal(err)
	}
	runner, err := jobrun.New(pool, zone, &jobrun.Options{
		Logger: slog.New(slog.DiscardHandler),
		Now:    func() time.Time { return time.Date(2026, time.September, 16, 1, 0, 0, 0, zone) }, // for the example's output
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := runner.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	job := jobrun.Job{
		Name: "daily-settlement",
		Date: jobrun.PreviousDay,
		Func: func(ctx context.Context, run *jobrun.Run) error {
			fmt.Println("settling", run.Date())
			return nil
		},
	}
	c := cron.New(cron.WithLocation(zone))
	id, err := c.AddFunc("0 1 * * *", func() {
		_, _ = runner.Run(ctx, job)
	})
	if err != nil {
		log.Fatal(err)
	}
	c.Entry(id).WrappedJob.Run() // in a service: c.Start(), and one o'clock
	c.Entry(id).WrappedJob.Run() // the other server
	// Output:
	// settling 2026-09-15
}

// The job is dated by the nominal time of each fire. RetryDue, on cron's own
// goroutines, makes the attempts that are due or approved.
func ExampleRunner_Schedule() {
	ctx := context.Background() // in a service not the context that SIGTERM ends: Shutdown gives running jobs their time
	pool, closePool := examplePool()
	defer closePool()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		log.Fatal(err)
	}
	runner, err := jobrun.New(pool, zone, &jobrun.Options{
		Logger: slog.New(slog.DiscardHandler),
		Now:    func() time.Time { return time.Date(2026, time.September, 16, 1, 0, 0, 0, zone) }, // for the example's output
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := runner.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	job := jobrun.Job{
		Name:  "daily-settlement",
		Date:  jobrun.PreviousDay,
		Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}, // at once, for the example
		Func: func(ctx context.Context, run *jobrun.Run) error {
			fmt.Println("settling", run.Date(), "attempt", run.Attempt())
			if run.Attempt() == 1 {
				return fmt.Errorf("connection refused")
			}
			return nil
		},
	}
	c := cron.New(cron.WithLocation(zone))
	settlement, err := runner.Schedule(ctx, c, "0 1 * * *", job)
	if err != nil {
		log.Fatal(err)
	}
	retries, err := c.AddFunc("@every 1m", func() { _, _ = runner.RetryDue(ctx) })
	if err != nil {
		log.Fatal(err)
	}
	for _, id := range []cron.EntryID{settlement, retries, retries} { // in a service: c.Start()
		c.Entry(id).WrappedJob.Run()
	}
	// Output:
	// settling 2026-09-15 attempt 1
	// settling 2026-09-15 attempt 2
}

// A person approves a re-run of a run that has no attempt left, on the same key.
func ExampleRunner_ApproveRerun() {
	ctx := context.Background()
	pool, closePool := examplePool()
	defer closePool()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		log.Fatal(err)
	}
	runner, err := jobrun.New(pool, zone, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	if err := runner.Migrate(ctx); err != nil {
		log.Fatal(err)
	}
	loaded := false
	job := jobrun.Job{
		Name: "daily-settlement",
		Func: func(context.Context, *jobrun.Run) error {
			if !loaded {
				return fmt.Errorf("no rates")
			}
			return nil
		},
	}
	res, err := runner.RunDate(ctx, job, jobrun.MustParseDate("2026-09-15"))
	fmt.Println(res.Decision, res.Record.Status, err)

	loaded = true
	approval := jobrun.Action{By: "operator", Reason: "rates loaded"}
	if _, err := runner.ApproveRerun(ctx, res.Record, approval); err != nil {
		log.Fatal(err)
	}
	_, err = runner.ApproveRerun(ctx, res.Record, approval)
	fmt.Println("approved again, a conflict:", errors.Is(err, jobrun.ErrConflict))
	if _, err := runner.RetryDue(ctx, job); err != nil {
		log.Fatal(err)
	}

	history, err := runner.History(ctx, res.Record.Key)
	if err != nil {
		log.Fatal(err)
	}
	for _, h := range history {
		if h.Action != nil {
			fmt.Println(h.Kind, "by", h.Action.By, "because", h.Action.Reason)
		} else {
			fmt.Println("attempt", h.Attempt, h.Trigger, h.Outcome, h.Error)
		}
	}
	// Output:
	// RAN FAILED daily-settlement:2026-09-15 attempt 1: no rates
	// approved again, a conflict: true
	// attempt 1 MANUAL FAILED no rates
	// APPROVE_RERUN by operator because rates loaded
	// attempt 2 RERUN SUCCEEDED
}

// examplePool is a pool on a database of the example's own.
func examplePool() (pool *pgxpool.Pool, closePool func()) {
	t := &exampleT{}
	return pgtest.New(t).Pool, t.end
}

// exampleT is what pgtest needs of a test.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (t *exampleT) Helper()                           {}
func (t *exampleT) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (t *exampleT) Errorf(format string, args ...any) { log.Fatalf(format, args...) }
func (t *exampleT) Cleanup(f func())                  { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

// Each order is paid once, whatever happens in between.
func ExampleEach() {
	var pool *pgxpool.Pool
	type order struct{ ID, Amount int64 }
	job := jobrun.Job{Name: "payouts", Func: func(ctx context.Context, run *jobrun.Run) error {
		rows, err := pool.Query(ctx, `SELECT order_id, amount FROM orders WHERE paid_on = $1`, run.Date())
		orders := jobrun.FromRows(rows, err, pgx.RowToStructByPos[order])
		_, err = jobrun.Each(ctx, run, orders,
			func(o order) string { return strconv.FormatInt(o.ID, 10) },
			func(ctx context.Context, tx pgx.Tx, o order) error {
				_, err := tx.Exec(ctx, `INSERT INTO payout (order_id, amount) VALUES ($1, $2)`, o.ID, o.Amount)
				return err
			}, nil)
		return err
	}}
	_ = job
}

// A step that must happen once, in however many attempts.
func ExampleRun_Once() {
	job := jobrun.Job{Name: "close-day", Func: func(ctx context.Context, run *jobrun.Run) error {
		ran, err := run.Once(ctx, "booking", func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO booking (day) VALUES ($1)`, run.Date())
			return err
		})
		run.Logger().Info("booked", "now", ran)
		return err
	}}
	_ = job
}

// The work and SUCCEEDED in one commit.
func ExampleRun_Complete() {
	job := jobrun.Job{Name: "close-day", Func: func(ctx context.Context, run *jobrun.Run) error {
		return run.Complete(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE day SET closed = true WHERE day = $1`, run.Date())
			return err
		})
	}}
	_ = job
}

// A stream that goes on where the attempt before stopped.
func ExampleRun_Checkpoint() {
	var archive func(ctx context.Context, tx pgx.Tx, after int64) (last int64, err error)
	job := jobrun.Job{Name: "archive", Func: func(ctx context.Context, run *jobrun.Run) error {
		var last int64
		if _, err := run.Checkpoint(ctx, &last); err != nil {
			return err
		}
		return run.Tx(ctx, func(tx pgx.Tx) error {
			next, err := archive(ctx, tx, last)
			if err != nil {
				return err
			}
			return run.SetCheckpoint(ctx, tx, next)
		})
	}}
	_ = job
}
