package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// total is what one merchant sold on a date.
type total struct {
	Merchant                    string
	Orders, Amount, Fee, Payout int64
}

// settledTotals sums up what the job wrote, the biggest merchant first.
func settledTotals(ctx context.Context, pool *pgxpool.Pool, date jobrun.Date) ([]total, error) {
	rows, _ := pool.Query(ctx, `
		SELECT merchant, count(*), sum(amount)::bigint, sum(fee)::bigint, sum(payout)::bigint
		FROM settlement_item
		WHERE business_date = $1
		GROUP BY merchant
		ORDER BY sum(amount) DESC, merchant`, date)
	return pgx.CollectRows(rows, pgx.RowToStructByPos[total])
}

// expectedTotals sums up the orders themselves. Nothing of it is shared with the
// job: not the bounds of the day, not the fee, not the rows that were written.
func expectedTotals(ctx context.Context, pool *pgxpool.Pool, date jobrun.Date) ([]total, error) {
	rows, _ := pool.Query(ctx, `
		SELECT merchant, count(*), sum(amount)::bigint,
		       sum(amount * fee_bp / 10000)::bigint,
		       sum(amount - amount * fee_bp / 10000)::bigint
		FROM orders
		WHERE paid_at >= ($1 || ' 00:00:00+09')::timestamptz
		  AND paid_at < ($2 || ' 00:00:00+09')::timestamptz
		GROUP BY merchant
		ORDER BY merchant`, date.String(), date.AddDays(1).String())
	return pgx.CollectRows(rows, pgx.RowToStructByPos[total])
}

// compare returns a line for each merchant whose settled total is not the expected one.
func compare(ctx context.Context, pool *pgxpool.Pool, date jobrun.Date) (differences []string, err error) {
	expected, err := expectedTotals(ctx, pool, date)
	if err != nil {
		return nil, fmt.Errorf("sum up the orders: %w", err)
	}
	settled, err := settledTotals(ctx, pool, date)
	if err != nil {
		return nil, fmt.Errorf("sum up the settlement: %w", err)
	}
	open := make(map[string]total, len(settled))
	for _, s := range settled {
		open[s.Merchant] = s
	}
	for _, e := range expected {
		if s := open[e.Merchant]; s != e {
			differences = append(differences, fmt.Sprintf("%s: settled %s, expected %s", e.Merchant, s, e))
		}
		delete(open, e.Merchant)
	}
	for _, s := range settled {
		if _, ok := open[s.Merchant]; ok {
			differences = append(differences, fmt.Sprintf("%s: settled %s, expected nothing", s.Merchant, s))
		}
	}
	return differences, nil
}

// settledTwice counts the orders that took effect more than once.
func settledTwice(ctx context.Context, pool *pgxpool.Pool) (n int64, err error) {
	err = pool.QueryRow(ctx, `
		SELECT count(*)
		FROM (SELECT order_id FROM settlement_item GROUP BY order_id HAVING count(*) > 1) AS twice`).Scan(&n)
	return n, err
}

func (t total) String() string {
	return fmt.Sprintf("%s orders, amount %s, fee %s, payout %s", thousands(t.Orders), thousands(t.Amount), thousands(t.Fee), thousands(t.Payout))
}
