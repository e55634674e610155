package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

const doubtful = "customer-3" // whose call is answered when the process is killed

var (
	date     = jobrun.MustParseDate("2026-09-15")
	errWrong = errors.New("the count is not what it should be")
	errTwice = errors.New(doubtful + " got two messages")
)

// tell is the whole story, from an empty database to the count.
func tell(ctx context.Context, databaseURL string, withoutKey, keep bool, out io.Writer) (err error) {
	r := &receiver{byKey: map[string]string{}, got: map[string]tally{}}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a free port of this host
	if err != nil {
		return err
	}
	go func() { _ = http.Serve(l, r) }() // until the program ends
	db, err := openDatabase(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.close(context.WithoutCancel(ctx), keep, out)) }()
	runner, err := newRunner(db.pool, "operations")
	if err != nil {
		return err
	}
	if err := runner.Migrate(ctx); err != nil {
		return err
	}
	if _, err := db.pool.Exec(ctx, tables); err != nil {
		return err
	}
	w := worker{DatabaseURL: db.url, Receiver: "http://" + l.Addr().String(), WithoutKey: withoutKey}
	key := jobrun.Job{Name: jobName}.Key(date)

	fmt.Fprintf(out, "1. A process is killed between the answer for %s and the commit\n\n", doubtful)
	w.Name, w.StopAt = "process-1", doubtful
	err = w.run(ctx, out, func(ctx context.Context) error {
		return await(ctx, func() (bool, error) { // after a heartbeat there is more for the operator to see
			rec, err := runner.Get(ctx, key)
			return rec.HeartbeatAt.After(rec.StartedAt), err
		})
	})
	if err != nil {
		return err
	}

	fmt.Fprintf(out, "\n2. No other process goes on by itself: what the first one did is not known\n\n")
	w.Name, w.StopAt = "process-2", ""
	if err := w.run(ctx, out, nil); err != nil {
		return err
	}

	fmt.Fprintf(out, "\n3. An operator looks, and decides\n\n")
	if err := operate(ctx, runner, out); err != nil {
		return err
	}

	fmt.Fprintf(out, "\n4. The re-run: who is done is not called, the call in doubt is made once more\n\n")
	w.Name = "process-3"
	if err := w.run(ctx, out, nil); err != nil {
		return err
	}

	fmt.Fprintf(out, "\n5. The ledger, and what the receiver counted\n\n")
	return count(ctx, db, r, key, withoutKey, out)
}

// operate is what a person does about a run whose process has gone.
func operate(ctx context.Context, runner *jobrun.Runner, out io.Writer) error {
	var stale []jobrun.StaleRun
	err := await(ctx, func() (_ bool, err error) { // silent for longer than the lease
		stale, err = runner.Stale(ctx)
		return len(stale) > 0, err
	})
	if err != nil {
		return err
	}
	s := stale[0]
	fmt.Fprintf(out, "   Stale         %s %s, attempt %d of %s,\n", s.Key, s.Status, s.Attempt, s.WorkerID)
	fmt.Fprintf(out, "                 %d customers done, silent for %.1f s, alive: %t, its database session: %s\n",
		s.ItemsProcessed, s.Silent.Seconds(), s.Alive, s.Session)
	rec, err := runner.MarkFailed(ctx, s.Record, jobrun.Action{By: "operator", Reason: "the process was killed"})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "   MarkFailed    %s, %s\n", rec.Status, rec.Error)
	// Receivers forget keys after a while. Before that, nothing speaks against a repeat.
	_, err = runner.ApproveRerun(ctx, rec, jobrun.Action{By: "operator", Reason: "the receiver drops repeats"})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "   ApproveRerun  approved, the next trigger executes it\n")
	return nil
}

// count prints what happened to each customer and compares it with what should have.
func count(ctx context.Context, db *database, r *receiver, key string, withoutKey bool, out io.Writer) error {
	rows, _ := db.pool.Query(ctx, `
		SELECT c.customer, coalesce(i.attempt, 0)
		FROM customer AS c
		LEFT JOIN batch_job_item AS i ON i.job_key = $1 AND i.item = c.customer
		ORDER BY c.customer`, key)
	type done struct {
		Customer string
		Attempt  int
	}
	customers, err := pgx.CollectRows(rows, pgx.RowToStructByPos[done])
	if err != nil {
		return err
	}
	const line = "   %-10s  %7v  %8v  %7v  %8v  %s\n"
	fmt.Fprintf(out, line, "CUSTOMER", "ATTEMPT", "REQUESTS", "DROPPED", "MESSAGES", "ONE EACH")
	r.mu.Lock()
	defer r.mu.Unlock()
	var sum tally
	right, oneEach := true, true
	for _, c := range customers {
		attempt, got, want := 1, r.got[c.Customer], tally{requests: 1, sent: 1}
		if c.Customer >= doubtful {
			attempt = 2
		}
		switch {
		case c.Customer == doubtful && withoutKey:
			want = tally{requests: 2, sent: 2}
		case c.Customer == doubtful:
			want = tally{requests: 2, dropped: 1, sent: 1}
		}
		right = right && got == want && c.Attempt == attempt
		oneEach = oneEach && got.sent == 1
		sum = tally{sum.requests + got.requests, sum.dropped + got.dropped, sum.sent + got.sent}
		fmt.Fprintf(out, line, c.Customer, c.Attempt, got.requests, got.dropped, got.sent, yesNo(got.sent == 1))
	}
	fmt.Fprintf(out, line, fmt.Sprintf("All %d", len(customers)), "", sum.requests, sum.dropped, sum.sent, yesNo(oneEach))
	switch {
	case !right:
		return errWrong
	case withoutKey:
		fmt.Fprintf(out, "\n   %s got two messages. A call whose commit is missing may have been made or\n"+
			"   not, and without a key the receiver takes the repeat for a second message.\n", doubtful)
		return errTwice
	}
	return nil
}

// await asks until the answer is yes.
func await(ctx context.Context, ask func() (bool, error)) error {
	for tick := time.Tick(50 * time.Millisecond); ; {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "NO"
}
