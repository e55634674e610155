package main

import (
	"context"
	"strconv"
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
// for the day that has just ended. EachChunk keeps the ledger of what is settled:
// an attempt after a crash or a failure does the rest, and only the rest. Work is
// settle; told hears how many orders this attempt did and how many it found done.
func settlement(pool *pgxpool.Pool, work settleFunc, told func(jobrun.EachResult)) jobrun.Job {
	return jobrun.Job{
		Name: jobName,
		Date: jobrun.PreviousDay,
		Func: func(ctx context.Context, run *jobrun.Run) error {
			rows, err := ordersOf(ctx, pool, run.Date())
			res, err := jobrun.EachChunk(ctx, run, jobrun.FromRows(rows, err, pgx.RowToStructByPos[order]), order.key,
				func(ctx context.Context, tx pgx.Tx, chunk []order) error { return work(ctx, tx, run.Date(), chunk) },
				&jobrun.EachOptions{ChunkSize: chunkSize})
			told(res)
			return err
		},
	}
}

// key names the order in the ledger of the run.
func (o order) key() string { return strconv.FormatInt(o.ID, 10) }

// bounds are the instants at which the date begins and ends in Seoul.
func bounds(date jobrun.Date) (from, till time.Time) {
	from = time.Date(date.Year, date.Month, date.Day, 0, 0, 0, 0, seoul)
	return from, from.AddDate(0, 0, 1)
}

// ordersOf are the orders that were paid on the date, those of earlier attempts too.
func ordersOf(ctx context.Context, pool *pgxpool.Pool, date jobrun.Date) (pgx.Rows, error) {
	from, till := bounds(date)
	return pool.Query(ctx, `
		SELECT order_id, merchant, paid_at, amount, fee_bp
		FROM orders
		WHERE paid_at >= $1
		  AND paid_at < $2
		ORDER BY order_id`, from, till)
}

type settleFunc func(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) error

// settle writes the rows of a chunk, whatever is there already: that no order
// comes here twice is for the ledger to see to.
func settle(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) error {
	var ids, amounts, fees []int64
	var merchants []string
	for _, o := range chunk {
		ids, merchants = append(ids, o.ID), append(merchants, o.Merchant)
		amounts, fees = append(amounts, o.Amount), append(fees, fee(o.Amount, o.FeeBP))
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO settlement_item (order_id, business_date, merchant, amount, fee, payout)
		SELECT order_id, $1, merchant, amount, fee, amount - fee
		FROM unnest($2::bigint[], $3::text[], $4::bigint[], $5::bigint[]) AS c (order_id, merchant, amount, fee)`,
		date, ids, merchants, amounts, fees)
	return err
}

// fee is amount x rate, cut down to whole won: a fraction is the merchant's. The
// check in check.go has the same rule in SQL, where / between integers cuts too.
func fee(amount, basisPoints int64) int64 { return amount * basisPoints / 10_000 }
