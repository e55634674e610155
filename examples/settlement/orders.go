package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

//go:generate go run ./internal/gen -o orders.csv

//go:embed orders.csv
var ordersCSV []byte

// order is one line of orders.csv. Money is whole won, the fee is in basis points.
type order struct {
	ID            int64
	Merchant      string
	PaidAt        time.Time
	Amount, FeeBP int64
}

// date is the business date on which the order was paid.
func (o order) date() jobrun.Date { return jobrun.DateOf(o.PaidAt.In(seoul)) }

func readOrders() ([]order, error) {
	r := csv.NewReader(bytes.NewReader(ordersCSV))
	r.FieldsPerRecord = 5
	if _, err := r.Read(); err != nil {
		return nil, fmt.Errorf("orders.csv: %w", err)
	}
	var all []order
	for {
		fields, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("orders.csv: %w", err)
		}
		o := order{Merchant: fields[1]}
		var errs [4]error
		o.ID, errs[0] = strconv.ParseInt(fields[0], 10, 64)
		o.PaidAt, errs[1] = time.Parse(time.RFC3339, fields[2])
		o.Amount, errs[2] = strconv.ParseInt(fields[3], 10, 64)
		o.FeeBP, errs[3] = strconv.ParseInt(fields[4], 10, 64)
		if err := errors.Join(errs[:]...); err != nil {
			line, _ := r.FieldPos(0)
			return nil, fmt.Errorf("orders.csv line %d: %w", line, err)
		}
		all = append(all, o)
	}
}

// countOn returns how many orders were paid on the date in Seoul, and how many of
// those have another date in UTC.
func countOn(all []order, date jobrun.Date) (total, elsewhere int64) {
	for _, o := range all {
		if o.date() == date {
			total++
			if jobrun.DateOf(o.PaidAt.UTC()) != date {
				elsewhere++
			}
		}
	}
	return total, elsewhere
}

// datesOf lists the business dates that have orders.
func datesOf(all []order) string {
	var dates []string
	for _, o := range all {
		dates = append(dates, o.date().String())
	}
	slices.Sort(dates)
	return strings.Join(slices.Compact(dates), ", ")
}

// tables of the application, beside those of jobrun. settlement_item has no unique
// key so that nothing hides an order that took effect twice: it would be two rows,
// which the check counts. A table of yours should have one all the same.
const tables = `
CREATE TABLE orders (
  order_id  bigint      PRIMARY KEY,
  merchant  text        NOT NULL,
  paid_at   timestamptz NOT NULL,
  amount    bigint      NOT NULL CHECK (amount > 0),
  fee_bp    bigint      NOT NULL CHECK (fee_bp BETWEEN 0 AND 10000)
);
CREATE INDEX orders_paid_at_idx ON orders (paid_at);
CREATE TABLE settlement_item (
  order_id      bigint NOT NULL REFERENCES orders,
  business_date date   NOT NULL,
  merchant      text   NOT NULL,
  amount        bigint NOT NULL,
  fee           bigint NOT NULL,
  payout        bigint NOT NULL
);
CREATE INDEX settlement_item_date_idx ON settlement_item (business_date);`

// load creates the tables of the application and fills in the orders.
func load(ctx context.Context, pool *pgxpool.Pool, all []order) error {
	if _, err := pool.Exec(ctx, tables); err != nil {
		return fmt.Errorf("create tables: %w", err)
	}
	source := pgx.CopyFromSlice(len(all), func(i int) ([]any, error) {
		o := all[i]
		return []any{o.ID, o.Merchant, o.PaidAt, o.Amount, o.FeeBP}, nil
	})
	columns := []string{"order_id", "merchant", "paid_at", "amount", "fee_bp"}
	if _, err := pool.CopyFrom(ctx, pgx.Identifier{"orders"}, columns, source); err != nil {
		return fmt.Errorf("load orders: %w", err)
	}
	return nil
}
