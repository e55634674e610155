package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// Only for the demonstration, on a server that is thrown away: jobs in every state that
// the admin page shows.

// demoJobs are the jobs of -demo. The states that need a person wait for one: what is
// approved on the page is executed by RetryDue within seconds.
func demoJobs() []scheduledJob {
	tries := map[string]int{} // an attempt ends before the next begins
	return []scheduledJob{
		{spec: "0 9 * * *", Job: jobrun.Job{
			Name: "customer-notices",
			Func: func(ctx context.Context, run *jobrun.Run) error {
				tries[run.Key()]++
				customers := make([]int, 40)
				for i := range customers {
					customers[i] = 1001 + i
				}
				_, err := jobrun.Each(ctx, run, jobrun.FromSlice(customers), func(n int) string { return fmt.Sprintf("customer-%d", n) },
					func(_ context.Context, _ pgx.Tx, n int) error {
						if tries[run.Key()] == 1 && n%16 == 0 {
							return fmt.Errorf("no address of customer %d", n)
						}
						return nil
					}, nil)
				return err
			},
		}},
		{spec: "0 7 * * *", Job: jobrun.Job{
			Name:  "exchange-rates",
			Retry: jobrun.Retry{MaxAttempts: 3, Backoff: func(int) time.Duration { return time.Hour }},
			Func: func(context.Context, *jobrun.Run) error {
				return errors.New("the bank has not published the rates yet")
			},
		}},
		{spec: "0 2 * * *", Job: jobrun.Job{
			Name: "payout",
			Func: func(_ context.Context, run *jobrun.Run) error {
				run.AddProcessed(480)
				return nil
			},
		}},
		{spec: "@every 2s", Job: jobrun.Job{
			Name: "price-import", Every: time.Minute, // the first trigger of a minute claims its slot
			Func: func(ctx context.Context, run *jobrun.Run) error {
				for range 75 { // 15 s, less than the grace
					select {
					case <-ctx.Done():
						return context.Cause(ctx)
					case <-time.After(200 * time.Millisecond):
						run.AddProcessed(65)
					}
				}
				return nil
			},
		}},
	}
}

// fillDemo makes four weeks of runs, and one in each state that waits for somebody. The
// jobs are those that run once a day.
func fillDemo(ctx context.Context, runner *jobrun.Runner, pool *pgxpool.Pool, jobs []scheduledJob) error {
	broken := errors.New("order 10012345: amount is negative\nthe import of the day before brought it")
	run := func(job jobrun.Job, daysAgo int, ends error) (jobrun.Record, error) {
		job.Func = func(_ context.Context, run *jobrun.Run) error {
			run.AddProcessed(int64(900 + run.Date().Day*37))
			return ends
		}
		result, err := runner.RunDate(ctx, job, runner.Today().AddDays(-daysAgo))
		if _, skips := jobrun.SkipReason(ends); errors.Is(err, broken) || skips {
			err = nil
		}
		return result.Record, err
	}
	approved := jobrun.Action{By: "demo", Reason: "the order is corrected"}
	export := jobrun.Job{Name: "ledger-export"}
	daily := []jobrun.Job{export}
	for _, j := range jobs {
		if j.Every == 0 {
			daily = append(daily, j.Job)
		}
	}
	for _, job := range daily {
		for daysAgo := 28; daysAgo >= 1; daysAgo-- {
			var ends error
			switch weekday := runner.Today().AddDays(-daysAgo).Weekday(); {
			case job.Name == "daily-settlement" && daysAgo == 6:
				continue // nothing ran that day: MISSED
			case job.Name == "daily-settlement" && daysAgo == 10:
				ends = broken
			case job.Name == "exchange-rates" && (weekday == time.Saturday || weekday == time.Sunday):
				ends = jobrun.SkipRun("no trading at the weekend")
			}
			rec, err := run(job, daysAgo, ends)
			if errors.Is(ends, broken) && err == nil { // corrected, and executed once more
				job.Retry = jobrun.Retry{}
				if _, err = runner.ApproveRerun(ctx, rec, approved); err == nil {
					_, err = run(job, daysAgo, nil)
				}
			}
			if err != nil {
				return fmt.Errorf("demo runs: %s, %d days ago: %w", job.Name, daysAgo, err)
			}
		}
	}
	// A re-run that is approved, of a job that this service does not have.
	rec, err := run(export, 0, broken)
	if err == nil {
		_, err = runner.ApproveRerun(ctx, rec, approved)
	}
	if err != nil {
		return fmt.Errorf("demo runs: %w", err)
	}
	// As if they had been executed at two in the morning, and taken some minutes.
	_, err = pool.Exec(ctx, `
		WITH run AS (
			UPDATE batch_job_run
			SET started_at = (business_date + 1 + time '02:00') AT TIME ZONE $1, finished_at = (business_date + 1 + time '02:07') AT TIME ZONE $1 + extract(day FROM business_date) * interval '7 s'
			WHERE business_date < $2 AND attempt = 1
			RETURNING *
		)
		UPDATE batch_job_attempt AS a
		SET started_at = run.started_at, heartbeat_at = run.started_at, finished_at = run.finished_at
		FROM run
		WHERE a.job_key = run.job_key`, runner.Zone().String(), runner.Today())
	if err != nil {
		return fmt.Errorf("demo runs: %w", err)
	}
	// What a process leaves behind that was killed in the night.
	_, err = pool.Exec(ctx, `
		WITH run AS (
			INSERT INTO batch_job_run (job_key, status, worker_id, job_name, business_date, attempt, executions, token, started_at)
			VALUES ($1, 'RUNNING', 'node-2-0a1b2c3d', 'payout', $2, 1, 1, gen_random_uuid(), now() - interval '5 hours')
			RETURNING *
		)
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, items_processed, items_moved_at)
		SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, started_at + interval '7 minutes', '2 minutes', '20 minutes', 312, started_at + interval '7 minutes'
		FROM run`, jobrun.Job{Name: "payout"}.Key(runner.Today()), runner.Today())
	if err != nil {
		return fmt.Errorf("demo runs: %w", err)
	}
	for _, j := range jobs {
		if j.Name == "customer-notices" || j.Name == "exchange-rates" { // which fail
			if result, err := runner.RunDate(ctx, j.Job, runner.Today()); result.Record.Status != jobrun.Failed {
				return fmt.Errorf("demo runs: %s is %s: %w", j.Name, result.Record.Status, err)
			}
		}
	}
	return nil
}
