package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// Only for the demonstration: a service has its own database, tables and orders.

// throwAwayDatabase starts a server that is gone when the process is.
func throwAwayDatabase(ctx context.Context, log io.Writer) (url string, stop func(), err error) {
	// It may name a server for this module's tests, and this is none.
	if err := os.Unsetenv("JOBRUN_TEST_DATABASE_URL"); err != nil {
		return "", nil, err
	}
	fmt.Fprintln(log, "starting a throw-away PostgreSQL; -database-url names another database")
	server, err := pgtest.Start(ctx, pgtest.Options{Log: log})
	if err != nil {
		return "", nil, err
	}
	return server.URL("postgres"), server.Stop, nil
}

// demoTables can be executed by several instances at once: without the lock, two
// CREATE TABLE IF NOT EXISTS of the same moment can fail.
const demoTables = `
SELECT pg_advisory_xact_lock(hashtext('jobrun example service'));
CREATE TABLE IF NOT EXISTS demo_order (
  order_id bigint      PRIMARY KEY,
  item     text        NOT NULL,
  amount   bigint      NOT NULL,
  paid_at  timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS demo_settlement (
  order_id      bigint PRIMARY KEY,
  business_date date   NOT NULL,
  payout        bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS demo_stock (
  item      text        PRIMARY KEY,
  sold      bigint      NOT NULL,
  synced_at timestamptz NOT NULL
);` + alertTables

// prepareDemo creates the tables and puts in the orders of yesterday.
func prepareDemo(ctx context.Context, pool *pgxpool.Pool, zone *time.Location) error {
	if _, err := pool.Exec(ctx, demoTables); err != nil {
		return fmt.Errorf("demo tables: %w", err)
	}
	now := time.Now().In(zone)
	yesterday := time.Date(now.Year(), now.Month(), now.Day()-1, 0, 0, 0, 0, zone)
	var orders pgx.Batch
	for i, item := range []string{"tea", "coffee", "tea", "rice", "noodles", "rice", "tea", "coffee"} {
		id := int64(yesterday.Year()*10_000+int(yesterday.Month())*100+yesterday.Day())*100 + int64(i)
		orders.Queue(`
			INSERT INTO demo_order (order_id, item, amount, paid_at)
			VALUES ($1, $2, $3, $4)
			ON CONFLICT (order_id) DO NOTHING`, id, item, 10_000+1_234*i, yesterday.Add(time.Duration(3*i)*time.Hour))
	}
	if err := pool.SendBatch(ctx, &orders).Close(); err != nil {
		return fmt.Errorf("demo orders: %w", err)
	}
	return nil
}
