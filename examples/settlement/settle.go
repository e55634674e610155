package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

const (
	jobName   = "daily-settlement"
	chunkSize = 500
)

// settlement is the job. A scheduler starts it shortly after midnight in Seoul,
// for the day that has just ended. Progress hears the number of orders so far.
func settlement(pool *pgxpool.Pool, progress func(done int64)) jobrun.Job {
	return jobrun.Job{
		Name: jobName,
		Date: jobrun.PreviousDay,
		Func: func(ctx context.Context, run *jobrun.Run) error {
			var done, last int64
			for {
				var chunk []order
				var settled int64
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
					if chunk, err = ordersAfter(ctx, tx, run.Date(), last); err != nil {
						return err
					}
					settled, err = settle(ctx, tx, run.Date(), chunk)
					return err
				})
				if err != nil {
					return fmt.Errorf("orders after %d: %w", last, err)
				}
				if len(chunk) == 0 {
					return nil
				}
				last = chunk[len(chunk)-1].ID
				done += settled
				run.AddProcessed(settled)
				progress(done)
			}
		},
	}
}

// fee is amount x rate, cut down to whole won: a fraction is the merchant's. The
// check in check.go has the same rule in SQL, where / between integers cuts too.
func fee(amount, basisPoints int64) int64 { return amount * basisPoints / 10_000 }

// bounds are the instants at which the date begins and ends in Seoul.
func bounds(date jobrun.Date) (from, till time.Time) {
	from = time.Date(date.Year, date.Month, date.Day, 0, 0, 0, 0, seoul)
	return from, from.AddDate(0, 0, 1)
}

// ordersAfter returns the next chunk of the orders that were paid on the date.
func ordersAfter(ctx context.Context, tx pgx.Tx, date jobrun.Date, last int64) ([]order, error) {
	from, till := bounds(date)
	rows, _ := tx.Query(ctx, `
		SELECT order_id, merchant, paid_at, amount, fee_bp
		FROM orders
		WHERE paid_at >= $1
		  AND paid_at < $2
		  AND order_id > $3
		ORDER BY order_id
		LIMIT $4`, from, till, last, chunkSize)
	return pgx.CollectRows(rows, pgx.RowToStructByPos[order])
}

// settle writes the chunk's rows and returns how many it wrote. An order that an
// earlier attempt has settled is left as it is: an attempt after a crash does the
// rest (TestNextAttemptSettlesTheRest).
func settle(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) (int64, error) {
	var ids, amounts, fees []int64
	var merchants []string
	for _, o := range chunk {
		ids, merchants = append(ids, o.ID), append(merchants, o.Merchant)
		amounts, fees = append(amounts, o.Amount), append(fees, fee(o.Amount, o.FeeBP))
	}
	tag, err := tx.Exec(ctx, `
		INSERT INTO settlement_item (order_id, business_date, merchant, amount, fee, payout)
		SELECT order_id, $1, merchant, amount, fee, amount - fee
		FROM unnest($2::bigint[], $3::text[], $4::bigint[], $5::bigint[]) AS c (order_id, merchant, amount, fee)
		ON CONFLICT (order_id) DO NOTHING`, date, ids, merchants, amounts, fees)
	return tag.RowsAffected(), err
}
