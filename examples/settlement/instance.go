package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// The program starts itself again for each instance and tells it in these
// variables what to do: an argument would show a password to everybody on the host.
const (
	instanceVar = "SETTLEMENT_INSTANCE"
	databaseVar = "SETTLEMENT_INSTANCE_DATABASE_URL"
	schemaVar   = "SETTLEMENT_INSTANCE_SCHEMA"
	dateVar     = "SETTLEMENT_INSTANCE_DATE"
)

// Exit codes of an instance besides exitFailed.
const (
	instanceSettled = 0
	instanceIdle    = 10 // did nothing, as it should
)

// newRunner is all that a service needs to set up.
func newRunner(pool *pgxpool.Pool, worker string) (*jobrun.Runner, error) {
	return jobrun.New(pool, seoul, &jobrun.Options{
		WorkerID: worker,
		// The lines for people are this program's; of the library's log only trouble.
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// runInstance is one instance of the service, in a process of its own.
func runInstance(ctx context.Context) int {
	code, err := serve(ctx)
	if err != nil {
		fmt.Fprintf(os.Stderr, "settlement: %s: %v\n", os.Getenv(instanceVar), err)
		return exitFailed
	}
	return code
}

// serve connects, waits for the starting signal, does what the scheduler of a
// service does at one o'clock, and returns an exit code.
func serve(ctx context.Context) (int, error) {
	date, err := jobrun.ParseDate(os.Getenv(dateVar))
	if err != nil {
		return 0, err
	}
	pool, err := connect(ctx, os.Getenv(databaseVar), os.Getenv(schemaVar))
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	runner, err := newRunner(pool, os.Getenv(instanceVar))
	if err != nil {
		return 0, err
	}
	fmt.Printf("ready, process %d\n", os.Getpid())
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return 0, fmt.Errorf("no starting signal: %w", err)
	}

	job := settlement(pool, func(done int64) { fmt.Printf("%s orders settled\n", thousands(done)) })
	nextMorning := date.AddDays(1)
	oneOClock := time.Date(nextMorning.Year, nextMorning.Month, nextMorning.Day, 1, 0, 0, 0, seoul)
	res, err := runner.RunTrigger(ctx, job, oneOClock)
	if err != nil {
		return exitFailed, nil // jobrun has logged it
	}
	fmt.Println(explain(res))
	if !res.Ran() {
		return instanceIdle, nil
	}
	return instanceSettled, nil
}

// explain says what a call did, and why, to somebody who does not know the words.
func explain(res jobrun.Result) string {
	rec := res.Record
	switch res.Decision {
	case jobrun.Ran:
		return fmt.Sprintf("RAN: won the claim and settled %s orders in %s", thousands(rec.ItemsProcessed), seconds(rec.FinishedAt.Sub(rec.StartedAt)))
	case jobrun.AlreadyRunning:
		return fmt.Sprintf("ALREADY_RUNNING: did nothing, %s has been at it since %s", rec.WorkerID, rec.StartedAt.Format("15:04:05 MST"))
	case jobrun.AlreadySucceeded:
		return fmt.Sprintf("ALREADY_SUCCEEDED: did nothing, %s finished at %s", rec.WorkerID, rec.FinishedAt.Format("15:04:05 MST"))
	}
	return fmt.Sprintf("%s: did nothing, the run is %s", res.Decision, rec.Status)
}
