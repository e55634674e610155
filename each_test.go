package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// numbers are the items 1 to n.
func numbers(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i + 1
	}
	return all
}

func orderKey(n int) string { return fmt.Sprintf("order-%d", n) }

// readAll ends a flight well although an Each of it had ended before the last item:
// another one comes to its end.
func readAll(t testing.TB, f *flight) {
	t.Helper()
	if _, err := jobrun.Each(t.Context(), f.run, jobrun.FromSlice([]int{}), orderKey, effect, nil); err != nil {
		t.Error(err)
	}
	f.succeeds(t, 1)
}

// each runs a job of a name that does the items by Each.
func each(t testing.TB, r *jobrun.Runner, name string, items iter.Seq2[int, error], fn func(context.Context, pgx.Tx, int) error, opts *jobrun.EachOptions) (got jobrun.EachResult, res jobrun.Result, err error) {
	t.Helper()
	res, err = r.RunDate(t.Context(), jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: 100, Backoff: atOnce}, Func: func(ctx context.Context, run *jobrun.Run) (err error) {
		got, err = jobrun.Each(ctx, run, items, orderKey, fn, opts)
		return err
	}}, date)
	return got, res, err
}

// eachOnce expects the effects of the items 1 to n, once each, and as many in the
// ledger of the key.
func eachOnce(t testing.TB, pool *pgxpool.Pool, key string, n int) {
	t.Helper()
	want := fmt.Sprintf("%d %d %d %d", n, n, n*(n+1)/2, n)
	if got := query[string](t, pool, `SELECT concat_ws(' ', count(*), count(DISTINCT item), sum(item), (SELECT count(*) FROM batch_job_item WHERE job_key = $1)) FROM effect`, key); got != want {
		t.Errorf("effects, different ones, their sum, ledger: %s, want %s", got, want)
	}
}

func TestEachDoesEveryItemOnce(t *testing.T) {
	t.Parallel()
	for _, opts := range []*jobrun.EachOptions{nil, {ChunkSize: 1}, {ChunkSize: 7}, {ChunkSize: 10_000}, {ChunkSize: 50, Parallel: 4}} {
		t.Run(fmt.Sprintf("%+v", opts), func(t *testing.T) {
			t.Parallel()
			db := effectDB(t)
			r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{})
			n := 1234
			if opts != nil && opts.ChunkSize == 1 {
				n = 30
			}
			var told jobrun.EachOptions
			if opts != nil {
				told = *opts
			}
			var heard jobrun.EachResult
			told.Progress = func(res jobrun.EachResult) {
				if committed := query[int64](t, db.Pool, `SELECT count(*) FROM batch_job_item`); res.Done <= heard.Done || res.Done > committed {
					t.Errorf("progress %+v after %+v, %d committed", res, heard, committed)
				}
				heard = res
			}
			got, res, err := each(t, r, "daily", jobrun.FromSlice(numbers(n)), effect, &told)
			if err != nil || heard != got || got != (jobrun.EachResult{Done: int64(n)}) || res.Record.ItemsProcessed != int64(n) {
				t.Fatalf("%+v, %+v, %v", got, res.Record, err)
			}
			eachOnce(t, db.Pool, "daily:2026-09-15", n)
			if _, err := r.ApproveRerun(t.Context(), res.Record, forced); err != nil {
				t.Fatal(err)
			}
			got, res, err = each(t, r, "daily", jobrun.FromSlice(numbers(n+1)), effect, opts)
			if err != nil || got != (jobrun.EachResult{Done: 1, AlreadyDone: int64(n)}) || res.Record.ItemsProcessed != 1 {
				t.Errorf("re-run: %+v, %+v, %v", got, res.Record, err)
			}
			eachOnce(t, db.Pool, "daily:2026-09-15", n+1)
			if query[int](t, db.Pool, `SELECT count(*) FROM batch_job_item WHERE attempt = 2 AND item = $1`, orderKey(n+1)) != 1 {
				t.Error("the ledger does not say which attempt did it")
			}
			reset := forced
			reset.ResetItems = true
			if _, err := r.ApproveRerun(t.Context(), res.Record, reset); err != nil {
				t.Fatal(err)
			}
			if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_item`); n != 0 {
				t.Errorf("%d items are left after the reset", n)
			}
			exec(t, db.Pool, `TRUNCATE effect`)
			if got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(n)), effect, opts); err != nil || got.Done != int64(n) {
				t.Errorf("after the reset: %+v, %v", got, err)
			}
			eachOnce(t, db.Pool, "daily:2026-09-15", n)
		})
	}
}

// Two items with one key are one item, in the same chunk or in others that are
// done at the same time.
func TestDuplicateItemsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	for _, opts := range []jobrun.EachOptions{{}, {ChunkSize: 10}, {ChunkSize: 10, Parallel: 4}} {
		db := effectDB(t)
		r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{})
		var items []int
		for range 5 {
			items = append(items, numbers(90)...)
			items = append(items, 7, 7, 90)
		}
		got, _, err := each(t, r, "daily", jobrun.FromSlice(items), effect, &opts)
		if err != nil || got != (jobrun.EachResult{Done: 90, AlreadyDone: int64(len(items)) - 90}) {
			t.Errorf("%+v: %+v, %v", opts, got, err)
		}
		eachOnce(t, db.Pool, "daily:2026-09-15", 90)
	}
	// With one key for all, the first one counts.
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if _, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.EachChunk(ctx, run, jobrun.FromSlice(numbers(9)), func(n int) string { return fmt.Sprint(n % 2) },
			func(ctx context.Context, tx pgx.Tx, part []int) error {
				for _, n := range part {
					if err := effect(ctx, tx, n); err != nil {
						return err
					}
				}
				return nil
			}, nil)
		return err
	}}, date); err != nil {
		t.Error(err)
	}
	effects(t, db.Pool, "1 2")
}

var errDeclined = errors.New("card declined")

// The items that fail leave no effect and no trace of done, the others of their
// chunk are done, and the next attempt tries only those that failed.
func TestOnlyTheBadItemsFail(t *testing.T) {
	t.Parallel()
	for _, opts := range []jobrun.EachOptions{{}, {ChunkSize: 10}, {ChunkSize: 10, Parallel: 3}, {ChunkSize: 1}} {
		t.Run(fmt.Sprintf("%+v", opts), func(t *testing.T) {
			t.Parallel()
			db := effectDB(t)
			r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{})
			bad := func(n int) bool { return n == 1 || n == 10 || n == 40 } // the first and the last of a chunk
			fn := func(ctx context.Context, tx pgx.Tx, n int) error {
				err := effect(ctx, tx, n)
				switch {
				case n == 23:
					panic("item 23")
				case n == 33:
					_, err = tx.Exec(ctx, `SELECT 1/0`)
				case bad(n):
					err = jobrun.Permanent(fmt.Errorf("payout of %d: %w", n, errDeclined))
				}
				return err
			}
			got, res, err := each(t, r, "daily", jobrun.FromSlice(numbers(40)), fn, &opts)
			var failed *jobrun.ItemsError
			if !errors.As(err, &failed) || got != (jobrun.EachResult{Done: 35, Failed: 5}) || failed.EachResult != got || len(failed.First) != 5 || failed.Stopped {
				t.Fatalf("%+v, %v", got, err)
			}
			if errors.Is(err, errDeclined) || res.Record.NextAttemptAt.IsZero() {
				t.Errorf("an item's Permanent decides about the run: %+v", res.Record)
			}
			if rec := res.Record; rec.Status != jobrun.Failed || rec.ItemsProcessed != 35 || rec.ItemsFailed != 5 ||
				!strings.HasPrefix(rec.Error, "5 of 40 items failed: ") || !strings.Contains(rec.Error, `"order-10": payout of 10: card declined`) {
				t.Errorf("recorded %+v", rec)
			}
			if n := query[int](t, db.Pool, `SELECT count(*) FROM effect WHERE item IN (1, 10, 23, 33, 40)`); n != 0 {
				t.Errorf("%d effects of failed items", n)
			}
			items, err := r.FailedItems(t.Context(), "daily:2026-09-15", "", 1000)
			if err != nil || len(items) != 5 || items[0].Item != "order-1" || items[0].Error != "payout of 1: card declined" || items[0].Attempt != 1 ||
				items[0].Failures != 1 || time.Since(items[0].FailedAt) > time.Hour || items[0].FailedAt.Location() != seoul || !strings.HasPrefix(items[2].Error, "panic: item 23") {
				t.Errorf("%+v, %v", items, err)
			}
			if done, failed, err := r.CountItems(t.Context(), "daily:2026-09-15"); done != 35 || failed != 5 || err != nil {
				t.Errorf("%d done, %d failed, %v", done, failed, err)
			}
			page, err := r.FailedItems(t.Context(), "daily:2026-09-15", items[1].Item, 2)
			if err != nil || !slices.Equal(page, items[2:4]) {
				t.Errorf("second page: %+v, %v", page, err)
			}
			var tried []int
			var mu sync.Mutex
			got, _, err = each(t, r, "daily", jobrun.FromSlice(numbers(40)), func(ctx context.Context, tx pgx.Tx, n int) error {
				mu.Lock()
				tried = append(tried, n)
				mu.Unlock()
				if n == 10 {
					return errDeclined
				}
				return effect(ctx, tx, n)
			}, &opts)
			slices.Sort(tried)
			if tried = slices.Compact(tried); !errors.As(err, &failed) || got != (jobrun.EachResult{Done: 4, AlreadyDone: 35, Failed: 1}) || fmt.Sprint(tried) != "[1 10 23 33 40]" {
				t.Errorf("second attempt: %+v, %v, tried %v", got, err, tried)
			}
			if items, err := r.FailedItems(t.Context(), "daily:2026-09-15", "", 1000); err != nil || len(items) != 1 || items[0].Item != "order-10" || items[0].Failures != 2 || items[0].Attempt != 2 || items[0].Error != "card declined" {
				t.Errorf("%+v, %v", items, err)
			}
			if _, _, err = each(t, r, "daily", jobrun.FromSlice(numbers(40)), effect, &opts); err != nil {
				t.Error(err)
			}
			eachOnce(t, db.Pool, "daily:2026-09-15", 40)
			if items, err := r.FailedItems(t.Context(), "daily:2026-09-15", "", 1000); err != nil || len(items) != 0 {
				t.Errorf("%+v, %v", items, err)
			}
		})
	}
}

func TestMaxFailuresStopsReading(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	read := 0
	items := func(yield func(int, error) bool) {
		for n := 1; ; n++ {
			if read = n; !yield(n, nil) {
				return
			}
		}
	}
	got, res, err := each(t, r, "daily", items, func(ctx context.Context, tx pgx.Tx, n int) error {
		if n%10 == 0 {
			return errDeclined
		}
		return effect(ctx, tx, n)
	}, &jobrun.EachOptions{ChunkSize: 20, MaxFailures: 15})
	var failed *jobrun.ItemsError
	if !errors.As(err, &failed) || !failed.Stopped || got != (jobrun.EachResult{Done: 135, Failed: 15}) || read != 160 || len(failed.First) != 10 {
		t.Errorf("%+v, %v, read %d", got, err, read)
	}
	if !strings.Contains(res.Record.Error, "stopped at the limit of failures") || !strings.Contains(res.Record.Error, "and 5 more") {
		t.Error(res.Record.Error)
	}
	// With failures that the job tolerates, the run succeeds.
	res, err = r.RunDate(t.Context(), jobrun.Job{Name: "tolerant", Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(3)), orderKey, func(context.Context, pgx.Tx, int) error { return errDeclined }, nil)
		if !errors.As(err, &failed) {
			return err
		}
		return nil
	}}, date)
	if err != nil || res.Record.Status != jobrun.Succeeded || res.Record.ItemsFailed != 3 {
		t.Errorf("%+v, %v", res, err)
	}
}

// Faults of the server, the connection or the lease end Each. None of them marks
// an item failed, and what was committed before stays.
func TestFaultsAreNotTheItemsFault(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	raise := func(code string) func(context.Context, *jobrun.Runner, pgx.Tx, string) error {
		return func(ctx context.Context, _ *jobrun.Runner, tx pgx.Tx, _ string) error {
			_, err := tx.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'injected' USING ERRCODE = '%s'; END $$`, code))
			return fmt.Errorf("payout: %w", err)
		}
	}
	faults := map[string]func(context.Context, *jobrun.Runner, pgx.Tx, string) error{
		"terminated": func(ctx context.Context, _ *jobrun.Runner, tx pgx.Tx, _ string) error {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return err
		},
		"terminated-unnoticed": func(ctx context.Context, _ *jobrun.Runner, tx pgx.Tx, _ string) error {
			_, err := db.Pool.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, int32(tx.Conn().PgConn().PID()))
			return err
		},
		"marked-failed": func(ctx context.Context, r *jobrun.Runner, _ pgx.Tx, key string) error {
			_, err := r.MarkFailed(ctx, recordOf(t, r, key), forced)
			return err
		},
		"changed-by-hand": func(ctx context.Context, _ *jobrun.Runner, _ pgx.Tx, key string) error {
			_, err := db.Pool.Exec(ctx, `UPDATE batch_job_run SET status = 'FAILED' WHERE job_key = $1`, key)
			return err
		},
	}
	for _, code := range []string{"40001", "40P01", "55P03", "57014", "57P01", "53300", "53100", "25006", "58030", "08006"} {
		faults["code-"+code] = raise(code)
	}
	for name, fault := range faults {
		for _, opts := range []jobrun.EachOptions{{ChunkSize: 10}, {ChunkSize: 10, Parallel: 2}} {
			job := fmt.Sprintf("%s-%d", name, opts.Parallel)
			t.Run(job, func(t *testing.T) {
				t.Parallel()
				if name == "terminated-unnoticed" { // by its process
					pgtest.NeedsSessions(t)
				}
				r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
				got, _, err := each(t, r, job, jobrun.FromSlice(numbers(50)), func(ctx context.Context, tx pgx.Tx, n int) error {
					if n == 35 {
						if err := fault(ctx, r, tx, job+":2026-09-15"); err != nil {
							return err
						}
					}
					_, err := tx.Exec(ctx, `SELECT 1`)
					return err
				}, &opts)
				var failed *jobrun.ItemsError
				if err == nil || errors.As(err, &failed) || got.Failed != 0 || got.Done != 30 && opts.Parallel == 0 || got.Done%10 != 0 {
					t.Errorf("%+v, %v", got, err)
				}
				if first := `"order-31" on of `; opts.Parallel == 0 && !strings.Contains(err.Error(), first) {
					t.Errorf("%v does not name the items", err)
				}
				if strings.HasPrefix(name, "marked") || strings.HasPrefix(name, "changed") {
					if !errors.Is(err, jobrun.ErrLeaseLost) {
						t.Error(err)
					}
				}
				key := job + ":2026-09-15"
				if n := query[int64](t, db.Pool, `SELECT count(*) FROM batch_job_item WHERE job_key = $1`, key); n != got.Done {
					t.Errorf("%d in the ledger, %d done", n, got.Done)
				}
				if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_item_failure WHERE job_key = $1`, key); n != 0 {
					t.Errorf("%d failures noted", n)
				}
			})
		}
	}
}

func TestEndOfTheContextEndsEach(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("the building is on fire")
	var got jobrun.EachResult
	_, err := r.RunDate(ctx, jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) (err error) {
		got, err = jobrun.Each(ctx, run, jobrun.FromSlice(numbers(50)), orderKey, func(ctx context.Context, tx pgx.Tx, n int) error {
			if n == 25 {
				cancel(stop)
				return context.Cause(ctx)
			}
			return effect(ctx, tx, n)
		}, &jobrun.EachOptions{ChunkSize: 10})
		return err
	}}, date)
	if !errors.Is(err, stop) || got != (jobrun.EachResult{Done: 20}) {
		t.Errorf("%+v, %v", got, err)
	}
	eachOnce(t, db.Pool, "daily:2026-09-15", 20)
	// A time limit of the item's own is the item's fault.
	got, _, err = each(t, r, "other", jobrun.FromSlice(numbers(2)), func(context.Context, pgx.Tx, int) error { return context.DeadlineExceeded }, nil)
	var failed *jobrun.ItemsError
	if !errors.As(err, &failed) || got.Failed != 2 {
		t.Errorf("%+v, %v", got, err)
	}
}

// An item key is kept byte for byte or refused; nothing is cut.
func TestItemKeys(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	odd := []string{
		" ", "a", "a ", "A", "é", "e\u0301", "주문-1", "\u200b", "\t\n", "'; DROP TABLE effect; --", `\`, `{"a",b}`, "NULL", "%s", "💶",
		strings.Repeat("x", 1024), strings.Repeat("x", 1023) + "y", strings.Repeat("주", 341) + "x",
	}
	fail := true
	job := jobrun.Job{Name: strings.Repeat("매", 80), Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}, Func: func(ctx context.Context, run *jobrun.Run) error {
		res, err := jobrun.Each(ctx, run, jobrun.FromSlice(odd), same, func(_ context.Context, _ pgx.Tx, s string) error {
			if fail {
				return fmt.Errorf("%q", s)
			}
			return nil
		}, nil)
		if !fail && res.Done != int64(len(odd)) {
			t.Errorf("%+v, %v", res, err)
		}
		return err
	}}
	if _, err := r.RunDate(t.Context(), job, date); err == nil {
		t.Error("no error")
	}
	items, err := r.FailedItems(t.Context(), job.Key(date), "", 1000)
	var got []string
	for _, f := range items {
		got = append(got, f.Item)
	}
	slices.Sort(odd)
	if err != nil || !slices.Equal(got, odd) {
		t.Errorf("failed: %q, %v", got, err)
	}
	fail = false
	if _, err := r.RunDate(t.Context(), job, date); err != nil {
		t.Error(err)
	}
	if stored := query[[]string](t, db.Pool, `SELECT array_agg(item ORDER BY item) FROM batch_job_item`); !slices.Equal(stored, odd) {
		t.Errorf("stored %q", stored)
	}
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for _, bad := range []string{"", "a\x00b", "\xff", strings.Repeat("x", 1025), strings.Repeat("주", 342)} {
		var invalid *jobrun.InvalidError
		ran, err := f.run.Once(t.Context(), bad, func(pgx.Tx) error { t.Error("called"); return nil })
		if ran || !errors.As(err, &invalid) || invalid.Field != "item" || invalid.Value != bad {
			t.Errorf("once %q: %v", bad, err)
		}
		keys := []string{"a", "b", "c", bad, "d"}
		res, err := jobrun.Each(t.Context(), f.run, jobrun.FromSlice(numbers(5)), func(n int) string { return keys[n-1] }, effect, &jobrun.EachOptions{ChunkSize: 2})
		if !errors.As(err, &invalid) || invalid.Field != "key of item 4" || invalid.Value != bad || res.Failed != 0 {
			t.Errorf("each %q: %+v, %v", bad, res, err)
		}
	}
	effects(t, db.Pool, "1 2") // the chunk before; no part of the one with the bad key
	readAll(t, f)
}

func TestEachRefusesBadInputBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	items := jobrun.FromSlice(numbers(3))
	for _, c := range []struct {
		field string
		call  func() (jobrun.EachResult, error)
	}{
		{"run", func() (jobrun.EachResult, error) { return jobrun.Each(t.Context(), nil, items, orderKey, effect, nil) }},
		{"items", func() (jobrun.EachResult, error) { return jobrun.Each(t.Context(), f.run, nil, orderKey, effect, nil) }},
		{"key", func() (jobrun.EachResult, error) { return jobrun.Each(t.Context(), f.run, items, nil, effect, nil) }},
		{"fn", func() (jobrun.EachResult, error) { return jobrun.Each(t.Context(), f.run, items, orderKey, nil, nil) }},
		{"EachOptions.ChunkSize", func() (jobrun.EachResult, error) {
			return jobrun.Each(t.Context(), f.run, items, orderKey, effect, &jobrun.EachOptions{ChunkSize: 10_001})
		}},
		{"EachOptions.ChunkSize", func() (jobrun.EachResult, error) {
			return jobrun.Each(t.Context(), f.run, items, orderKey, effect, &jobrun.EachOptions{ChunkSize: -1})
		}},
		{"EachOptions.Parallel", func() (jobrun.EachResult, error) {
			return jobrun.Each(t.Context(), f.run, items, orderKey, effect, &jobrun.EachOptions{Parallel: 101})
		}},
		{"EachOptions.MaxFailures", func() (jobrun.EachResult, error) {
			return jobrun.Each(t.Context(), f.run, items, orderKey, effect, &jobrun.EachOptions{MaxFailures: -1})
		}},
	} {
		var invalid *jobrun.InvalidError
		if got, err := c.call(); !errors.As(err, &invalid) || invalid.Field != c.field || got != (jobrun.EachResult{}) {
			t.Errorf("%s: %+v, %v", c.field, got, err)
		}
	}
	// A refused call closes the query, or its connection would never come back.
	rows, err := db.Pool.Query(t.Context(), `SELECT generate_series(1, 10)`)
	if _, err := jobrun.Each(t.Context(), f.run, jobrun.FromRows(rows, err, pgx.RowTo[int]), orderKey, effect, &jobrun.EachOptions{ChunkSize: -1}); err == nil {
		t.Error("no error")
	}
	eventually(t, "the query's connection is back", func() bool { return db.Pool.Stat().AcquiredConns() == 1 })
	effects(t, db.Pool, "")
	readAll(t, f)
}

func TestErrorsOfTheItemsSequenceEndEach(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	read := func(items iter.Seq2[int, error], want string, done int64) {
		t.Helper()
		got, err := jobrun.Each(t.Context(), f.run, items, orderKey, effect, &jobrun.EachOptions{ChunkSize: 2})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || got.Done != done {
			t.Errorf("%+v, %v; want %d done and %q", got, err, done, want)
		}
	}
	rows, err := db.Pool.Query(t.Context(), `SELECT 1/0`)
	read(jobrun.FromRows(rows, err, pgx.RowTo[int]), "division by zero", 0)
	rows, err = db.Pool.Query(t.Context(), `SELECT 10 / (4 - n) FROM generate_series(1, 9) AS n`) // 3 5 10
	read(jobrun.FromRows(rows, err, pgx.RowTo[int]), "item 4 of daily:2026-09-15: ERROR: division by zero", 2)
	rows, err = db.Pool.Query(t.Context(), `SELECT 'x'`)
	read(jobrun.FromRows(rows, err, pgx.RowTo[int]), "item 1 of daily:2026-09-15: can't scan", 0)
	read(jobrun.FromRows[int](nil, nil, nil), "rows or scan", 0)
	rows, err = db.Pool.Query(t.Context(), `SELECT generate_series(21, 23)`)
	once := jobrun.FromRows(rows, err, pgx.RowTo[int])
	read(once, "", 3)
	read(once, "the rows were read before", 0)
	effects(t, db.Pool, "3 5 21 22 23")
	if db.Pool.Stat().AcquiredConns() != 1 {
		t.Errorf("%d connections in use", db.Pool.Stat().AcquiredConns())
	}
	readAll(t, f)
}

// The rows hold one connection, the kept one is another, the work needs a third.
func TestEachOverAnOpenQueryNeedsAThirdConnection(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for conns, fits := range map[int32]bool{2: false, 3: true} {
		pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = conns })
		r := newRunner(t, pool, jobrun.Options{Lease: time.Second})
		_, err := r.RunDate(t.Context(), jobrun.Job{Name: fmt.Sprintf("daily-%d", conns), Func: func(ctx context.Context, run *jobrun.Run) error {
			rows, err := pool.Query(ctx, `SELECT generate_series(1, 1000)`)
			_, err = jobrun.Each(ctx, run, jobrun.FromRows(rows, err, pgx.RowTo[int]), orderKey, effect, nil)
			return err
		}}, date)
		if fits && err != nil || !fits && (err == nil || !strings.Contains(err.Error(), "no connection in time, 2 of at most 2 in use")) {
			t.Errorf("pool of %d: %v", conns, err)
		}
	}
	eachOnce(t, db.Pool, "daily-3:2026-09-15", 1000)
}

// An item that another session holds is waited for, bounded, and then the error
// names that session.
func TestHeldItemNamesItsHolder(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := effectDB(t)
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Lease: time.Second})
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SET application_name = 'settlement by hand'`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `INSERT INTO batch_job_item (job_key, item, attempt) VALUES ('daily:2026-09-15', 'order-7', 1)`); err != nil {
		t.Fatal(err)
	}
	// One that is at work on other items, and younger, is not named.
	busy := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, _, err := each(t, busy, fmt.Sprintf("busy-%d", n), jobrun.FromSlice(numbers(20)), func(context.Context, pgx.Tx, int) error { return nil }, nil); err != nil {
				t.Error(err)
			}
		}
	})
	got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(20)), effect, &jobrun.EachOptions{ChunkSize: 5})
	close(stop)
	wg.Wait()
	pid := fmt.Sprintf("pid %d (user ", tx.Conn().PgConn().PID())
	if err == nil || got != (jobrun.EachResult{Done: 5}) || strings.Count(err.Error(), "pid ") != 1 || !strings.Contains(err.Error(), pid) || !strings.Contains(err.Error(), `application "settlement by hand"`) ||
		!strings.Contains(err.Error(), "idle in transaction") || !strings.Contains(err.Error(), "55P03") {
		t.Errorf("%+v, %v; want %s", got, err, pid)
	}
	if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_item_failure`); n != 0 {
		t.Errorf("%d failures noted", n)
	}
}

// Deadlocks among parallel chunks pass: the chunk is done again.
func TestParallelChunksThatDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE TABLE account (id integer PRIMARY KEY, balance bigint NOT NULL); INSERT INTO account SELECT n, 1000 FROM generate_series(-3, 9) AS n`)
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) {
		c.MaxConns = 6
		c.ConnConfig.RuntimeParams["deadlock_timeout"] = "10ms"
	}), jobrun.Options{})
	// The items 1 and 3 begin two chunks: each has locked the account -n before the
	// other asks for it, so that one deadlock is sure.
	var met sync.WaitGroup
	met.Add(2)
	meet := map[int]func(){}
	for _, n := range []int{1, 3} {
		meet[n] = sync.OnceFunc(func() { met.Done(); met.Wait() })
	}
	var deadlocks atomic.Int64
	got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(200)), func(ctx context.Context, tx pgx.Tx, n int) (err error) {
		defer func() {
			var pg *pgconn.PgError
			if errors.As(err, &pg) && pg.Code == "40P01" {
				deadlocks.Add(1)
			}
		}()
		if meet := meet[n]; meet != nil {
			if _, err := tx.Exec(ctx, `SELECT FROM account WHERE id = $1 FOR UPDATE`, -n); err != nil {
				return err
			}
			meet()
			if _, err := tx.Exec(ctx, `SELECT FROM account WHERE id = $1 FOR UPDATE`, n-4); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, `UPDATE account SET balance = balance - 1 WHERE id = $1`, n*7%10)
		if err == nil {
			_, err = tx.Exec(ctx, `UPDATE account SET balance = balance + 1 WHERE id = $1`, n*3%10)
		}
		return err
	}, &jobrun.EachOptions{ChunkSize: 2, Parallel: 3})
	if err != nil || got.Done != 200 {
		t.Errorf("%+v, %v", got, err)
	}
	want := query[string](t, db.Pool, `SELECT string_agg(coalesce(1000 - minus + plus, 1000)::text, ' ' ORDER BY id) FROM generate_series(0, 9) AS id,
		LATERAL (SELECT count(*) FILTER (WHERE n * 7 % 10 = id) AS minus, count(*) FILTER (WHERE n * 3 % 10 = id) AS plus FROM generate_series(1, 200) AS n) AS s`)
	if deadlocks.Load() == 0 {
		t.Error("no deadlock: nothing was shown")
	}
	if got := query[string](t, db.Pool, `SELECT string_agg(balance::text, ' ' ORDER BY id) FROM account WHERE id >= 0`); got != want {
		t.Errorf("balances %s, want %s", got, want)
	}
}

func TestGoexitInEachIsAFailure(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	for _, parallel := range []int{1, 2} {
		_, res, err := each(t, r, fmt.Sprintf("daily-%d", parallel), jobrun.FromSlice(numbers(50)), func(ctx context.Context, tx pgx.Tx, n int) error {
			if n == 12 {
				runtime.Goexit()
			}
			return effect(ctx, tx, n)
		}, &jobrun.EachOptions{ChunkSize: 10, Parallel: parallel})
		if err == nil || !strings.Contains(err.Error(), "runtime.Goexit") || res.Record.Status != jobrun.Failed {
			t.Errorf("parallel %d: %+v, %v", parallel, res, err)
		}
	}
	eventually(t, "no transaction is left", func() bool {
		return query[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`) == 0
	})
}

// Counts reach the attempt's row with heartbeats, while Each goes on.
func TestProgressOfEachIsVisible(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	_, res, err := each(t, r, "daily", jobrun.FromSlice(numbers(31)), func(ctx context.Context, tx pgx.Tx, n int) error {
		if n == 31 {
			eventually(t, "the first chunks are shown", func() bool {
				rec, err := r.Get(ctx, "daily:2026-09-15")
				return err == nil && rec.Status == jobrun.Running && rec.ItemsProcessed == 29 && rec.ItemsFailed == 1
			})
		}
		if n == 30 {
			return errDeclined
		}
		return effect(ctx, tx, n)
	}, &jobrun.EachOptions{ChunkSize: 10})
	if err == nil || res.Record.ItemsProcessed != 30 || res.Record.ItemsFailed != 1 {
		t.Errorf("%+v, %v", res, err)
	}
}

// What is alive does not grow with the number of items.
func TestEachKeepsNoItems(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var at [2]uint64
	measure := func(i int) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		at[i] = m.HeapObjects
	}
	const n = 60_000
	items := func(yield func(int, error) bool) {
		for i := range n {
			switch i {
			case n / 10:
				measure(0)
			case n - 1:
				measure(1)
			}
			if !yield(i, nil) {
				return
			}
		}
	}
	got, _, err := each(t, r, "daily", items, func(context.Context, pgx.Tx, int) error { return nil }, nil)
	if err != nil || got.Done != n {
		t.Fatalf("%+v, %v", got, err)
	}
	// Other tests run beside this one: a key kept for each item would be 50,000 objects and more.
	if at[1] > at[0] && at[1]-at[0] > n/2 {
		t.Errorf("%d objects after a tenth, %d at the end", at[0], at[1])
	}
}

// Every way of pgx to talk to the server, under every isolation level, and a role
// with odd settings.
func TestItemsInEveryExecModeAndIsolationLevel(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := effectDB(t)
	var count atomic.Int64
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		for _, isolation := range []string{"read committed", "repeatable read", "serializable"} {
			t.Run(mode.String()+"/"+isolation, func(t *testing.T) {
				t.Parallel()
				pool := db.PoolWith(t, func(c *pgxpool.Config) {
					c.MaxConns = 6
					c.ConnConfig.DefaultQueryExecMode = mode
					c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
				})
				r := newRunner(t, pool, jobrun.Options{})
				job := jobrun.Job{Name: fmt.Sprintf("daily-%d", count.Add(1)), Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
				first := true
				job.Func = func(ctx context.Context, run *jobrun.Run) error {
					bad := func(ctx context.Context, tx pgx.Tx, n int) error {
						if first && n%50 == 0 {
							return errDeclined
						}
						return run.SetCheckpoint(ctx, tx, n)
					}
					res, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(100)), orderKey, bad, &jobrun.EachOptions{ChunkSize: 20})
					if first {
						if first = false; res != (jobrun.EachResult{Done: 98, Failed: 2}) {
							t.Errorf("%+v, %v", res, err)
						}
						return err
					}
					if err != nil || res != (jobrun.EachResult{Done: 2, AlreadyDone: 98}) {
						t.Errorf("%+v, %v", res, err)
					}
					if ran, err := run.Once(ctx, "주문", func(pgx.Tx) error { return nil }); !ran || err != nil {
						t.Errorf("%t, %v", ran, err)
					}
					var last int
					if found, err := run.Checkpoint(ctx, &last); !found || err != nil || last != 100 {
						t.Errorf("checkpoint %d: %t, %v", last, found, err)
					}
					return run.Complete(ctx, func(tx pgx.Tx) error { return effect(ctx, tx, 1) })
				}
				if _, err := r.RunDate(t.Context(), job, date); err == nil {
					t.Error("no error")
				}
				if items, err := r.FailedItems(t.Context(), job.Key(date), "", 10); err != nil || len(items) != 2 {
					t.Errorf("%+v, %v", items, err)
				}
				if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
					t.Errorf("%+v, %v", res, err)
				}
			})
		}
	}
}

// Emptying a large ledger takes longer than any other statement may.
func TestResetOfALargeLedger(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	fails, _ := failsWith("daily", errBroken, jobrun.Retry{})
	res, err := r.RunDate(t.Context(), fails, date)
	if !errors.Is(err, errBroken) {
		t.Fatal(err)
	}
	exec(t, db.Pool, `
INSERT INTO batch_job_item (job_key, item, attempt) VALUES ('daily:2026-09-15', 'order-1', 1);
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5.5); RETURN OLD; END $$;
CREATE TRIGGER slow BEFORE DELETE ON batch_job_item FOR EACH ROW EXECUTE FUNCTION slow()`)
	reset := operator
	reset.ResetItems = true
	if rec, err := r.ApproveRerun(t.Context(), res.Record, reset); err != nil || rec.ApprovedAt.IsZero() {
		t.Errorf("%+v, %v", rec, err)
	}
	if done, _, err := r.CountItems(t.Context(), "daily:2026-09-15"); err != nil || done != 0 {
		t.Errorf("%d items are left, %v", done, err)
	}
}
