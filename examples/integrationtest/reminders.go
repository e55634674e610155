// Package integrationtest is a job as a service would have it, and its integration
// test, to copy from: reminders_test.go runs the job against a real PostgreSQL, the
// way its scheduler would, and looks at what is on record afterwards. Only
// pool_test.go knows where the database comes from.
//
// The job sends a reminder for every invoice that is due on the business date.
package integrationtest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// Tables are what the job needs beside those of jobrun.
const Tables = `
CREATE TABLE invoice (
  invoice_id bigint PRIMARY KEY,
  email      text   NOT NULL,
  due_on     date   NOT NULL
);
CREATE TABLE reminder (
  invoice_id    bigint PRIMARY KEY, -- one reminder per invoice, whoever tries again
  business_date date   NOT NULL
);`

// Mailer is the dependency that can fail. It drops a mail with a key that it has
// had before, as mail and payment services do.
type Mailer interface {
	Send(ctx context.Context, key, email string) error
}

// ErrRejected is what a Mailer returns, wrapped, for mail that it will never take.
var ErrRejected = errors.New("mail rejected")

// Reminders is the job. The Mailer is a parameter so that a test can pass its own.
func Reminders(pool *pgxpool.Pool, mailer Mailer) jobrun.Job {
	return jobrun.Job{
		Name:  "invoice-reminders",
		Date:  jobrun.PreviousDay, // triggered after midnight for the day that has ended
		Retry: jobrun.Retry{MaxAttempts: 3, Backoff: jobrun.Exponential(time.Minute, 15*time.Minute)},
		Func: func(ctx context.Context, run *jobrun.Run) error {
			rows, _ := pool.Query(ctx, `
				SELECT invoice_id, email
				FROM invoice
				WHERE due_on = $1
				ORDER BY invoice_id`, run.Date())
			invoices, err := pgx.CollectRows(rows, pgx.RowToStructByPos[invoice])
			if err != nil {
				return err
			}
			if len(invoices) == 0 {
				return jobrun.SkipRun("no invoice is due")
			}
			for _, inv := range invoices {
				sent, err := remind(ctx, pool, mailer, run, inv)
				if errors.Is(err, ErrRejected) {
					return jobrun.Permanent(err) // the address has to be mended first
				}
				if err != nil {
					return err
				}
				if sent {
					run.AddProcessed(1)
				}
			}
			return nil
		},
	}
}

type invoice struct {
	ID    int64
	Email string
}

// remind sends the reminder of an invoice unless an earlier attempt has done so.
// A crash between Send and the commit repeats the mail, with the same key.
func remind(ctx context.Context, pool *pgxpool.Pool, mailer Mailer, run *jobrun.Run, inv invoice) (sent bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			INSERT INTO reminder (invoice_id, business_date)
			VALUES ($1, $2)
			ON CONFLICT (invoice_id) DO NOTHING`, inv.ID, run.Date())
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		sent = true
		return mailer.Send(ctx, fmt.Sprintf("%s/%d", run.Key(), inv.ID), inv.Email)
	})
	if err != nil {
		return false, fmt.Errorf("invoice %d: %w", inv.ID, err)
	}
	return sent, nil
}
