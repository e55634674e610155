package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

const (
	jobName = "customer-notices"
	lease   = 2 * time.Second // short, so that a look takes seconds; a service keeps the default
)

// notices is the job: one request to the outside for each customer. Answered hears
// of every answer, before the item is committed.
func notices(pool *pgxpool.Pool, send sender, answered func(customer, message string)) jobrun.Job {
	return jobrun.Job{Name: jobName, Func: func(ctx context.Context, run *jobrun.Run) error {
		rows, err := pool.Query(ctx, `SELECT customer FROM customer ORDER BY customer`)
		customers := jobrun.FromRows(rows, err, pgx.RowTo[string])
		key := func(customer string) string { return customer }
		notify := func(ctx context.Context, tx pgx.Tx, customer string) error {
			// The text comes from the run, not from the clock: a repeat has to say the same.
			text := "Your statement of " + run.Date().String() + " is ready."
			message, err := send(ctx, run.IdempotencyKey(customer).String(), customer, text)
			if err != nil {
				return err // it may have been sent all the same: the next attempt calls with the same key
			}
			answered(customer, message)
			_, err = tx.Exec(ctx, `INSERT INTO notice (customer, message) VALUES ($1, $2)`, customer, message)
			return err
		}
		// A rollback takes back no request: the calls of a chunk that does not commit are
		// made again. After a crash, or for one bad item, those can be all 1000 of a chunk
		// of 1000. With one item, its call and its entry in the ledger are one chunk, and at
		// most that one call is repeated.
		_, err = jobrun.Each(ctx, run, customers, key, notify, &jobrun.EachOptions{ChunkSize: 1})
		return err
	}}
}

// sender makes a request and returns the receiver's name for the message.
type sender func(ctx context.Context, key, customer, text string) (message string, err error)

func newSender(receiver string, withoutKey bool) sender {
	// The item's transaction is open during the call. The server ends a transaction that
	// is silent for a lease, so the call has to give up earlier.
	client := &http.Client{Timeout: lease / 2}
	return func(ctx context.Context, key, customer, text string) (string, error) {
		form := url.Values{"customer": {customer}, "text": {text}}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, receiver, strings.NewReader(form.Encode()))
		if err != nil {
			return "", err
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if !withoutKey {
			req.Header.Set("Idempotency-Key", key)
		}
		resp, err := client.Do(req)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1024))
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("receiver: %s: %q", resp.Status, body)
		}
		return string(body), err
	}
}
