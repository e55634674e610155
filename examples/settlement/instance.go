package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// The program starts itself again for each instance and tells it in this variable
// what to do: an argument would show a password to everybody on the host.
const instanceVar = "SETTLEMENT_INSTANCE"

// task is what an instance is to do, as JSON in instanceVar.
type task struct {
	Name, DatabaseURL, Schema string
	Date                      jobrun.Date
	Rerun                     bool  // execute what was approved; else the date at one o'clock
	FailItem                  int64 // the order that fails; 0: none
	KillAfter                 int64 // how many orders are committed when the process is killed; 0: it is not
}

// Exit codes of an instance besides exitFailed.
const (
	instanceSettled = 0
	instanceIdle    = 10 // did nothing, as it should
	instanceOpen    = 11 // settled, but for orders that failed
)

// shortLease is for a process that is going to be killed: nobody wants to watch
// the usual two minutes of silence.
const shortLease = 2 * time.Second

// newRunner is all that a service needs to set up.
func newRunner(pool *pgxpool.Pool, t task) (*jobrun.Runner, error) {
	opts := &jobrun.Options{
		WorkerID: t.Name,
		// The lines for people are this program's; of the library's log only trouble.
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	if t.KillAfter != 0 {
		opts.Lease = shortLease
	}
	if t.FailItem != 0 {
		opts.Logger = slog.New(slog.DiscardHandler) // a failure that was ordered is no trouble
	}
	return jobrun.New(pool, seoul, opts)
}

// runInstance is one instance of the service, in a process of its own.
func runInstance(ctx context.Context) int {
	var t task
	err := json.Unmarshal([]byte(os.Getenv(instanceVar)), &t)
	code := exitFailed
	if err == nil {
		code, err = serve(ctx, t)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "settlement: %s: %v\n", t.Name, err)
		return exitFailed
	}
	return code
}

// serve connects, waits for the starting signal, starts the job as the scheduler
// of a service does, and returns an exit code.
func serve(ctx context.Context, t task) (int, error) {
	pool, err := connect(ctx, t.DatabaseURL, t.Schema)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	runner, err := newRunner(pool, t)
	if err != nil {
		return 0, err
	}
	fmt.Printf("ready, process %d\n", os.Getpid())
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return 0, fmt.Errorf("no starting signal: %w", err)
	}

	var orders jobrun.EachResult
	job := settlement(pool, withFaults(t, runner), func(res jobrun.EachResult) { orders = res })
	res, err := t.fire(ctx, runner, job)
	switch {
	case errors.As(err, new(*jobrun.ItemsError)):
		fmt.Println(explain(res, orders))
		return instanceOpen, nil
	case err != nil && t.FailItem != 0:
		return 0, err
	case err != nil:
		return exitFailed, nil // jobrun has logged it
	}
	fmt.Println(explain(res, orders))
	if !res.Ran() {
		return instanceIdle, nil
	}
	return instanceSettled, nil
}

// fire is what a scheduler does at one o'clock, when the date is over, or what it
// does every minute: execute what is due or approved, here one run.
func (t task) fire(ctx context.Context, runner *jobrun.Runner, job jobrun.Job) (jobrun.Result, error) {
	if t.Rerun {
		results, err := runner.RetryDue(ctx, job)
		if len(results) == 0 {
			return jobrun.Result{}, errors.Join(err, errors.New("no run is due or approved"))
		}
		return results[0], err
	}
	nextMorning := t.Date.AddDays(1)
	oneOClock := time.Date(nextMorning.Year, nextMorning.Month, nextMorning.Day, 1, 0, 0, 0, seoul)
	return runner.RunTrigger(ctx, job, oneOClock)
}

// explain says what a call did, and why, to somebody who does not know the words.
func explain(res jobrun.Result, orders jobrun.EachResult) string {
	rec := res.Record
	switch res.Decision {
	case jobrun.Ran:
		text := fmt.Sprintf("RAN: won the claim and settled %s of %s orders in %s", thousands(orders.Done),
			thousands(orders.Done+orders.AlreadyDone+orders.Failed), seconds(rec.FinishedAt.Sub(rec.StartedAt)))
		if orders.AlreadyDone > 0 {
			text += fmt.Sprintf("; settled before: %s", thousands(orders.AlreadyDone))
		}
		if orders.Failed > 0 {
			text += fmt.Sprintf("; failed: %s", thousands(orders.Failed))
		}
		return text
	case jobrun.AlreadyRunning:
		return fmt.Sprintf("ALREADY_RUNNING: did nothing, %s has been at it since %s", rec.WorkerID, rec.StartedAt.Format("15:04:05 MST"))
	case jobrun.AlreadySucceeded:
		return fmt.Sprintf("ALREADY_SUCCEEDED: did nothing, %s finished at %s", rec.WorkerID, rec.FinishedAt.Format("15:04:05 MST"))
	}
	return fmt.Sprintf("%s: did nothing, the run is %s", res.Decision, rec.Status)
}
