package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var date = jobrun.MustParseDate("2026-09-15")

// loaded returns a database with the orders, and their number on the date.
func loaded(t *testing.T) (*pgxpool.Pool, int64) {
	t.Helper()
	all, err := readOrders()
	if err != nil {
		t.Fatal(err)
	}
	pool := pgtest.New(t).Pool
	if err := load(t.Context(), pool, all); err != nil {
		t.Fatal(err)
	}
	total, _ := countOn(all, date)
	return pool, total
}

func ignore(jobrun.EachResult) {}

// runJob is a trigger for the date.
func runJob(t *testing.T, ctx context.Context, pool *pgxpool.Pool, job jobrun.Job) (jobrun.Result, error) {
	t.Helper()
	runner, err := newRunner(pool, task{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	_, midnight := bounds(date)
	return runner.RunTrigger(ctx, job, midnight)
}

func TestCheckFindsWrongRows(t *testing.T) {
	t.Parallel()
	pool, total := loaded(t)
	res, err := runJob(t, t.Context(), pool, settlement(pool, settle, ignore))
	if err != nil || !res.Ran() || res.Record.Date != date || res.Record.ItemsProcessed != total {
		t.Fatalf("the job: %+v, %v; want %d items", res, err, total)
	}
	differences := func() []string {
		t.Helper()
		d, err := compare(t.Context(), pool, date)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := differences(); len(d) > 0 {
		t.Fatalf("what the job settled is called wrong: %q", d)
	}

	const one = `(SELECT min(order_id) FROM settlement_item WHERE merchant = '달빛분식')`
	for _, c := range []struct{ name, corrupt, repair, want string }{
		{
			"a won too much",
			`UPDATE settlement_item SET fee = fee + 1 WHERE order_id = ` + one,
			`UPDATE settlement_item SET fee = fee - 1 WHERE order_id = ` + one,
			"달빛분식",
		},
		{
			"an order twice",
			`INSERT INTO settlement_item SELECT * FROM settlement_item WHERE order_id = ` + one,
			`DELETE FROM settlement_item WHERE ctid = (SELECT max(ctid) FROM settlement_item WHERE order_id = ` + one + `)`,
			"달빛분식",
		},
		{
			"an order of the next day",
			`INSERT INTO settlement_item SELECT order_id, '2026-09-15', merchant, amount, 0, amount FROM orders
			 WHERE paid_at = '2026-09-15T15:00:00Z' ORDER BY order_id LIMIT 1`,
			`DELETE FROM settlement_item USING orders WHERE orders.order_id = settlement_item.order_id AND paid_at >= '2026-09-15T15:00:00Z'`,
			"settled",
		},
		{
			"a merchant without orders",
			`UPDATE settlement_item SET merchant = 'nobody''s' WHERE order_id = ` + one,
			`UPDATE settlement_item SET merchant = '달빛분식' WHERE merchant = 'nobody''s'`,
			"expected nothing",
		},
		{
			"another date",
			`UPDATE settlement_item SET business_date = '2026-09-14' WHERE merchant = '한강서점'`,
			`UPDATE settlement_item SET business_date = '2026-09-15' WHERE merchant = '한강서점'`,
			"settled 0 orders",
		},
	} {
		if tag, err := pool.Exec(t.Context(), c.corrupt); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %s, %v", c.name, tag, err)
		}
		if d := strings.Join(differences(), "\n"); !strings.Contains(d, c.want) {
			t.Errorf("%s: the check says %q, want it to mention %q", c.name, d, c.want)
		}
		if _, err := pool.Exec(t.Context(), c.repair); err != nil {
			t.Fatal(err)
		}
		if d := differences(); len(d) > 0 {
			t.Fatalf("%s, repaired: %q", c.name, d)
		}
	}
}

// TestOneOrderTwiceAndAnotherNever: the totals can be right, and the count of
// double effects still tells.
func TestOneOrderTwiceAndAnotherNever(t *testing.T) {
	t.Parallel()
	pool, _ := loaded(t)
	if _, err := runJob(t, t.Context(), pool, settlement(pool, settle, ignore)); err != nil {
		t.Fatal(err)
	}
	if n, err := settledTwice(t.Context(), pool); err != nil || n != 0 {
		t.Fatalf("what the job settled: %d orders twice, %v", n, err)
	}
	tag, err := pool.Exec(t.Context(), `
		UPDATE settlement_item
		SET order_id = twin.keep
		FROM (SELECT min(order_id) AS keep, max(order_id) AS gone FROM settlement_item
		      GROUP BY merchant, amount, fee HAVING count(*) > 1 ORDER BY 1 LIMIT 1) AS twin
		WHERE order_id = twin.gone`)
	if err != nil || tag.RowsAffected() != 1 {
		t.Fatalf("%s, %v", tag, err)
	}
	if d, err := compare(t.Context(), pool, date); err != nil || len(d) > 0 {
		t.Errorf("totals: %q, %v", d, err)
	}
	if n, err := settledTwice(t.Context(), pool); err != nil || n != 1 {
		t.Errorf("%d orders twice, %v; want 1", n, err)
	}
}

func TestNextAttemptSettlesTheRest(t *testing.T) {
	t.Parallel()
	pool, total := loaded(t)
	errCrash := errors.New("crash")
	ctx, crash := context.WithCancelCause(t.Context())
	chunks := 0
	interrupted := settlement(pool, func(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) error {
		if chunks++; chunks == 3 {
			crash(errCrash)
		}
		return settle(ctx, tx, date, chunk)
	}, ignore)
	interrupted.Retry = jobrun.Retry{MaxAttempts: 2}
	res, err := runJob(t, ctx, pool, interrupted)
	if !errors.Is(err, errCrash) || res.Record.Status != jobrun.Failed || res.Record.ItemsProcessed != 2*chunkSize {
		t.Fatalf("first attempt: %+v, %v", res, err)
	}
	var second jobrun.EachResult
	res, err = runJob(t, t.Context(), pool, settlement(pool, settle, func(r jobrun.EachResult) { second = r }))
	if err != nil || res.Record.Attempt != 2 || second != (jobrun.EachResult{Done: total - 2*chunkSize, AlreadyDone: 2 * chunkSize}) {
		t.Fatalf("second attempt: %+v, %+v, %v", res, second, err)
	}
	correct(t, pool)
}

func TestOneOrderFailsAlone(t *testing.T) {
	t.Parallel()
	pool, total := loaded(t)
	const id = 10012345
	res, err := runJob(t, t.Context(), pool, settlement(pool, failItem(id, settle), ignore))
	var failed *jobrun.ItemsError
	if !errors.As(err, &failed) || failed.EachResult != (jobrun.EachResult{Done: total - 1, Failed: 1}) || failed.First[0].Item != "10012345" {
		t.Fatalf("%+v, %v", res, err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT order_id FROM orders WHERE (paid_at AT TIME ZONE 'Asia/Seoul')::date = $1
		EXCEPT SELECT order_id FROM settlement_item`, date)
	if open, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64]); err != nil || open != id {
		t.Errorf("not settled: %d, %v", open, err)
	}
	if n, err := settledTwice(t.Context(), pool); err != nil || n != 0 {
		t.Errorf("%d orders twice, %v", n, err)
	}
}

// correct compares what was settled with what should be.
func correct(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if d, err := compare(t.Context(), pool, date); err != nil || len(d) > 0 {
		t.Errorf("totals differ: %q, %v", d, err)
	}
	if n, err := settledTwice(t.Context(), pool); err != nil || n != 0 {
		t.Errorf("%d orders twice, %v", n, err)
	}
}

func TestFeeIsCutToWholeWon(t *testing.T) {
	for _, c := range []struct{ amount, rate, want int64 }{
		{10_000, 180, 180}, {9_999, 180, 179}, {5_555, 180, 99}, {99, 100, 0}, {100, 100, 1}, {4_800_000, 345, 165_600},
	} {
		if got := fee(c.amount, c.rate); got != c.want {
			t.Errorf("fee(%d, %d) = %d, want %d", c.amount, c.rate, got, c.want)
		}
	}
}

func TestTableAlignsWideCharacters(t *testing.T) {
	var out bytes.Buffer
	printTable(&printer{w: &out}, [][]string{{"NAME", "WON"}, {"달빛분식", "1"}, {"Harbor Books", "12,345"}, {"카페 Blue", "-7"}}, "WON")
	want := `
   NAME             WON
   달빛분식           1
   Harbor Books  12,345
   카페 Blue         -7
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("got%swant%s", got, want)
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1_000: "1,000", -999: "-999", -123_456: "-123,456", 1_234_567: "1,234,567"} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestBadFlagsAreRefusedBeforeAnythingStarts(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://nowhere.invalid/x") // reaching for it would be exitFailed
	for _, c := range []struct {
		args string
		want string
	}{
		{"-date 2026-02-30", "-date: date \"2026-02-30\""},
		{"-date yesterday", "want YYYY-MM-DD"},
		{"-date 2026-09-17", "no orders were paid on 2026-09-17; there are some on 2026-09-13, 2026-09-14, 2026-09-15, 2026-09-16"},
		{"-instances 0", "-instances is 0, allowed: 1 to 20"},
		{"-instances 21", "allowed: 1 to 20"},
		{"-instances two", "invalid value"},
		{"-fail-item 0", "-fail-item is 0, allowed on 2026-09-15: 10011371 to 10016750; there is no such order"},
		{"-fail-item 10000001", "allowed on 2026-09-15: 10011371 to 10016750; this order was paid on 2026-09-13"},
		{"-date 2026-09-13 -fail-item 10012345", "allowed on 2026-09-13: 10000001 to 10006240; this order was paid on 2026-09-15"},
		{"-fail-item some", "invalid value"},
		{"-kill-after 0", "-kill-after is 0, allowed on 2026-09-15: 1 to 4879"},
		{"-kill-after 4880", "allowed on 2026-09-15: 1 to 4879"},
		{"-kill-after -1", "allowed on 2026-09-15: 1 to 4879"},
		{"-kill-after all", "invalid value"},
		{"-speed 3", "not defined: -speed"},
		{"2026-09-15", "unexpected argument"},
	} {
		var out, errs bytes.Buffer
		code := run(context.Background(), strings.Fields(c.args), &out, &errs)
		if code != exitUsage || !strings.Contains(errs.String(), c.want) || out.Len() > 0 {
			t.Errorf("%s: exit code %d, said %q %q; want %d and %q", c.args, code, &out, &errs, exitUsage, c.want)
		}
	}
	var out, errs bytes.Buffer
	if code := run(context.Background(), []string{"-help"}, &out, &errs); code != exitOK || !strings.Contains(errs.String(), "Exit codes") {
		t.Errorf("-help: exit code %d, said %s", code, &errs)
	}
}
