package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// scheduledJob is a job and the times at which cron triggers it.
type scheduledJob struct {
	jobrun.Job
	spec string
}

// settlement settles, at 01:00, the orders of the day that has just ended.
func settlement(pool *pgxpool.Pool, c config) scheduledJob {
	job := scheduledJob{spec: "0 1 * * *", Job: jobrun.Job{
		Name: "daily-settlement",
		Date: jobrun.PreviousDay,
		// More than one attempt, or a run that a deployment interrupts waits for a person.
		Retry:      jobrun.Retry{MaxAttempts: 3, Backoff: jobrun.Exponential(time.Minute, 15*time.Minute)},
		StaleAfter: 20 * time.Minute, // at worst it takes 10: longer, and somebody should look
		Func: func(ctx context.Context, run *jobrun.Run) error {
			// The date of the run, not time.Now(): an attempt the day after keeps it.
			from := time.Date(run.Date().Year, run.Date().Month, run.Date().Day, 0, 0, 0, 0, c.zone)
			// One row per order, whoever tries again: the primary key holds even
			// against an attempt that has lost its lease and does not know it yet.
			tag, err := pool.Exec(ctx, `
				INSERT INTO demo_settlement (order_id, business_date, payout)
				SELECT order_id, $1, amount - amount * 180 / 10000
				FROM demo_order
				WHERE paid_at >= $2
				  AND paid_at < $3
				ON CONFLICT (order_id) DO NOTHING`, run.Date(), from, from.AddDate(0, 0, 1))
			if err != nil {
				return err // nil would close the date as SUCCEEDED
			}
			run.AddProcessed(tag.RowsAffected())
			run.Logger().Info("orders settled", "count", tag.RowsAffected())
			return nil
		},
	}}
	if c.fast {
		// The date is settled by the first trigger; the others find that it is done.
		job.spec, job.Retry.Backoff = "@every 2s", jobrun.Exponential(2*time.Second, 10*time.Second)
	}
	return job
}

// inventorySync brings the stock up to date, in a run of its own for every slot of
// the day: inventory-sync:2026-09-15T13:05+09:00.
func inventorySync(pool *pgxpool.Pool, c config) scheduledJob {
	job := scheduledJob{spec: "*/5 * * * *", Job: jobrun.Job{
		Name:       "inventory-sync",
		Every:      5 * time.Minute, // as often as the spec, so that each fire has its slot
		StaleAfter: 4 * time.Minute,
		// The next slot would bring what this one has missed, but a slot that FAILED
		// for good is a problem until a person decides: most of them retries mend.
		Retry: jobrun.Retry{MaxAttempts: 5, Backoff: jobrun.Exponential(30*time.Second, 5*time.Minute)},
		Func: func(ctx context.Context, run *jobrun.Run) error {
			tag, err := pool.Exec(ctx, `
				INSERT INTO demo_stock (item, sold, synced_at)
				SELECT item, count(*), now()
				FROM demo_order
				GROUP BY item
				ON CONFLICT (item) DO UPDATE SET sold = excluded.sold, synced_at = excluded.synced_at`)
			run.AddProcessed(tag.RowsAffected())
			return err
		},
	}}
	if c.fast {
		job.spec, job.Every, job.StaleAfter = "@every 2s", time.Minute, time.Minute
	}
	return job
}
