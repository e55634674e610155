package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// The tables of a job that moves money: what it is to do, and what it has done.
// The log of transfers has no key that could refuse a second transfer of an item.
const ledgerTables = `
CREATE TABLE account (
  id      integer PRIMARY KEY,
  opening bigint NOT NULL,
  balance bigint NOT NULL
);
CREATE TABLE payment (
  item   integer PRIMARY KEY,
  debit  integer NOT NULL,
  credit integer NOT NULL,
  amount bigint  NOT NULL
);
CREATE TABLE transfer (
  item    integer NOT NULL,
  attempt integer NOT NULL,
  debit   integer NOT NULL,
  credit  integer NOT NULL,
  amount  bigint  NOT NULL,
  backend integer NOT NULL DEFAULT pg_backend_pid(),
  xid     xid8    NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX transfer_attempt_idx ON transfer (attempt);

-- How much each attempt had committed when a person ended it. The trigger runs in
-- the transaction that ends it, after that has locked the run, and its query sees
-- what was committed by then: what is more later was committed later.
CREATE TABLE superseded (
  attempt   integer NOT NULL,
  transfers bigint  NOT NULL
);
CREATE FUNCTION note_superseded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO superseded
  SELECT NEW.attempt, count(*) FROM transfer AS t WHERE t.attempt = NEW.attempt;
  RETURN NULL;
END $$;
CREATE TRIGGER note_superseded AFTER INSERT ON batch_job_action
  FOR EACH ROW WHEN (NEW.action = 'MARK_FAILED') EXECUTE FUNCTION note_superseded()`

// ledgerRules find what is wrong, one row for each fault, in SQL that shares
// nothing with the library but the tables. They are for one run.
var ledgerRules = []struct{ name, sql string }{
	{"every item once", `
		SELECT format('item %s: %s transfers', p.item, count(t.item))
		FROM payment AS p
		LEFT JOIN transfer AS t ON t.item = p.item
		GROUP BY p.item
		HAVING count(t.item) <> 1`},
	{"transfers are those ordered", `
		SELECT to_jsonb(t)::text
		FROM transfer AS t
		LEFT JOIN payment AS p ON p.item = t.item
		WHERE (t.debit, t.credit, t.amount) IS DISTINCT FROM (p.debit, p.credit, p.amount)`},
	{"ledger is the log", `
		SELECT format('item %s of attempt %s, transfer %s', i.item, i.attempt, to_jsonb(t))
		FROM batch_job_item AS i
		FULL JOIN transfer AS t ON t.item::text = i.item AND t.attempt = i.attempt
		WHERE i.item IS NULL OR t.item IS NULL`},
	{"no money made or lost", `
		SELECT format('%s won', sum(balance) - sum(opening))
		FROM account
		HAVING sum(balance) <> sum(opening)`},
	{"balances are the log's", `
		SELECT to_jsonb(a)::text
		FROM account AS a
		LEFT JOIN (
		  SELECT m.id, sum(m.amount) AS moved
		  FROM transfer AS t
		  CROSS JOIN LATERAL (VALUES (t.debit, -t.amount), (t.credit, t.amount)) AS m (id, amount)
		  GROUP BY m.id
		) AS m ON m.id = a.id
		WHERE a.balance <> a.opening + coalesce(m.moved, 0)`},
	{"nothing committed after it was superseded", `
		SELECT format('attempt %s: %s transfers, %s when it was superseded', s.attempt, count(t.item), s.transfers)
		FROM superseded AS s
		LEFT JOIN transfer AS t ON t.attempt = s.attempt
		GROUP BY s.attempt, s.transfers
		HAVING count(t.item) <> s.transfers`},
	{"nothing committed later than that", ` -- by the times of the commits, if the server keeps them
		SELECT format('%s at %s, superseded at %s', to_jsonb(t), pg_xact_commit_timestamp(t.xmin), pg_xact_commit_timestamp(a.xmin))
		FROM transfer AS t
		JOIN batch_job_action AS a ON a.attempt = t.attempt AND a.action = 'MARK_FAILED'
		WHERE CASE WHEN current_setting('track_commit_timestamp')::boolean
		  THEN pg_xact_commit_timestamp(t.xmin) > pg_xact_commit_timestamp(a.xmin) END`},
	{"SUCCEEDED", `SELECT to_jsonb(r)::text FROM batch_job_run AS r WHERE r.status <> 'SUCCEEDED'`},
}

// ledgerFaults names the rules that do not hold, with examples.
func ledgerFaults(t testing.TB, db interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
},
) (broken, examples []string) {
	t.Helper()
	for _, rule := range ledgerRules {
		rows, _ := db.Query(context.Background(), rule.sql)
		faults, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", rule.name, err)
		}
		if len(faults) > 0 {
			broken = append(broken, rule.name)
			examples = append(examples, fmt.Sprintf("%s: %d faults: %.500s", rule.name, len(faults), strings.Join(faults, "; ")))
		}
	}
	return broken, examples
}

// commitTimes is a database on a server that keeps the times of commits, and finds
// deadlocks soon.
func commitTimes(t testing.TB) *pgtest.DB {
	t.Helper()
	server, err := pgtest.Start(t.Context(), pgtest.Options{Settings: map[string]string{
		"track_commit_timestamp": "on", "deadlock_timeout": "10ms",
	}})
	if err != nil {
		t.Skipf("no server of one's own: %v", err)
	}
	t.Cleanup(server.Stop)
	db := &pgtest.DB{URL: server.URL("postgres")}
	db.Pool = db.PoolWith(t, nil)
	return db
}

// newLedger makes the tables with random payments. A fourth of the accounts' uses
// are of a few that many payments share.
func newLedger(t testing.TB, db *pgtest.DB, rng *rand.Rand, accounts, shared, payments int) {
	t.Helper()
	if err := newRunner(t, db.Pool, jobrun.Options{}).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, db.Pool, ledgerTables)
	exec(t, db.Pool, `INSERT INTO account SELECT n, 1000000 + n, 1000000 + n FROM generate_series(1, $1::integer) AS n`, accounts)
	account := func() int {
		if rng.IntN(4) == 0 {
			return 1 + rng.IntN(shared)
		}
		return 1 + rng.IntN(accounts)
	}
	rows := make([][]any, payments)
	for i := range rows {
		debit, credit := account(), account()
		for credit == debit {
			credit = account()
		}
		rows[i] = []any{i + 1, debit, credit, 1 + rng.IntN(100_000)}
	}
	columns := []string{"item", "debit", "credit", "amount"}
	if _, err := db.Pool.CopyFrom(t.Context(), pgx.Identifier{"payment"}, columns, pgx.CopyFromRows(rows)); err != nil {
		t.Fatal(err)
	}
}

type payment struct {
	Item, Debit, Credit int
	Amount              int64
}

func (p payment) key() string { return fmt.Sprint(p.Item) }

// payments reads them all.
func payments(t testing.TB, db *pgtest.DB) []payment {
	t.Helper()
	rows, _ := db.Pool.Query(context.Background(), `SELECT item, debit, credit, amount FROM payment ORDER BY item`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[payment])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pay moves the money of a payment and writes it in the log.
func pay(ctx context.Context, tx pgx.Tx, attempt int, p payment) error {
	var b pgx.Batch
	b.Queue(`UPDATE account SET balance = balance - $2 WHERE id = $1`, p.Debit, p.Amount)
	b.Queue(`UPDATE account SET balance = balance + $2 WHERE id = $1`, p.Credit, p.Amount)
	b.Queue(`INSERT INTO transfer (item, attempt, debit, credit, amount) VALUES ($1, $2, $3, $4, $5)`, p.Item, attempt, p.Debit, p.Credit, p.Amount)
	return tx.SendBatch(ctx, &b).Close()
}

// payAll is a job that makes all payments.
func payAll(all []payment, got *jobrun.EachResult, opts *jobrun.EachOptions) jobrun.Job {
	return jobrun.Job{Name: "move-money", Func: func(ctx context.Context, run *jobrun.Run) (err error) {
		*got, err = jobrun.Each(ctx, run, jobrun.FromSlice(all), payment.key, func(ctx context.Context, tx pgx.Tx, p payment) error {
			return pay(ctx, tx, run.Attempt(), p)
		}, opts)
		return err
	}}
}

// The check is worth something only if it finds what is wrong, and nothing else.
func TestLedgerCheckFindsFaults(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	newLedger(t, db, rand.New(rand.NewPCG(1, 1)), 10, 2, 30)
	var got jobrun.EachResult
	if _, err := newRunner(t, db.Pool, jobrun.Options{}).RunDate(t.Context(), payAll(payments(t, db), &got, nil), date); err != nil || got.Done != 30 {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, c := range []struct {
		sql  string
		want []string
	}{
		{`SELECT`, nil},
		{`INSERT INTO transfer SELECT * FROM transfer WHERE item = 7`, []string{"every item once", "balances are the log's"}},
		{`DELETE FROM transfer WHERE item = 7`, []string{"every item once", "ledger is the log", "balances are the log's"}},
		{`DELETE FROM batch_job_item WHERE item = '7'`, []string{"ledger is the log"}},
		{`INSERT INTO batch_job_item VALUES ('move-money:2026-09-15', '31', 1)`, []string{"ledger is the log"}},
		{`INSERT INTO payment VALUES (31, 1, 2, 1)`, []string{"every item once"}},
		{`UPDATE batch_job_item SET attempt = 2 WHERE item = '7'`, []string{"ledger is the log"}},
		{`UPDATE payment SET amount = amount + 1 WHERE item = 7`, []string{"transfers are those ordered"}},
		{`UPDATE account SET balance = balance + 1 WHERE id = 1`, []string{"no money made or lost", "balances are the log's"}},
		{`UPDATE account SET balance = balance + CASE id WHEN 1 THEN 1 ELSE -1 END WHERE id IN (1, 2)`, []string{"balances are the log's"}},
		{`UPDATE batch_job_run SET status = 'RUNNING'`, []string{"SUCCEEDED"}},
		{`INSERT INTO superseded VALUES (1, 29)`, []string{"nothing committed after it was superseded"}},
	} {
		tx, err := db.Pool.Begin(t.Context())
		if err == nil {
			_, err = tx.Exec(t.Context(), c.sql)
		}
		if err != nil {
			t.Fatal(err)
		}
		if broken, examples := ledgerFaults(t, tx); !slices.Equal(broken, c.want) {
			t.Errorf("%s: found %q, want %q", c.sql, examples, c.want)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A chunk is rolled back for its last item, and the others of it are done once all the same.
func TestBadItemDoesNotUndoItsChunk(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE TABLE effect (item integer NOT NULL)`)
	r := newRunner(t, db.Pool, jobrun.Options{})
	theirs := errors.New("account closed")
	var calls []int
	var got jobrun.EachResult
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2}, Func: func(ctx context.Context, run *jobrun.Run) (err error) {
		got, err = jobrun.Each(ctx, run, jobrun.FromSlice(numbers(10)), orderKey, func(ctx context.Context, tx pgx.Tx, n int) error {
			calls = append(calls, n)
			if _, err := tx.Exec(ctx, `INSERT INTO effect (item) VALUES ($1)`, n); err != nil {
				return err
			}
			if n == 5 && run.Attempt() == 1 {
				return theirs
			}
			return nil
		}, &jobrun.EachOptions{ChunkSize: 5})
		if err != nil {
			err = jobrun.RetryAfter(err, 0)
		}
		return err
	}}
	attempt := func(done, already, failed int64, called []int, items string) {
		t.Helper()
		calls = nil
		_, err := r.RunDate(t.Context(), job, date)
		var bad *jobrun.ItemsError
		switch {
		case failed == 0 && err != nil:
			t.Error(err)
		case failed > 0 && (!errors.As(err, &bad) || errors.Is(err, theirs) || bad.EachResult != got || bad.Stopped ||
			len(bad.First) != 1 || bad.First[0].Item != "order-5" || !errors.Is(bad.First[0].Err, theirs)):
			t.Errorf("failed with %+v", err)
		}
		if want := (jobrun.EachResult{Done: done, AlreadyDone: already, Failed: failed}); got != want || !slices.Equal(calls, called) {
			t.Errorf("%+v by calls %v, want %+v by %v", got, calls, want, called)
		}
		if s := query[string](t, db.Pool, `SELECT string_agg(item::text, ' ' ORDER BY item) FROM effect`); s != items {
			t.Errorf("effects %q, want %q", s, items)
		}
		items = strings.ReplaceAll("order-"+items, " ", " order-")
		if s := query[string](t, db.Pool, `SELECT string_agg(item, ' ' ORDER BY length(item), item) FROM batch_job_item`); s != items {
			t.Errorf("ledger %q, want %q", s, items)
		}
		open, err := r.FailedItems(t.Context(), job.Key(date), "", 10)
		if err != nil || int64(len(open)) != failed || failed > 0 && (open[0].Item != "order-5" || open[0].Failures != 1 || open[0].Error != "account closed") {
			t.Errorf("failed items %+v, %v", open, err)
		}
	}
	attempt(9, 0, 1, []int{1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, "1 2 3 4 6 7 8 9 10")
	attempt(1, 9, 0, []int{5}, "1 2 3 4 5 6 7 8 9 10")
}
