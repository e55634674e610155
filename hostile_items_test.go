//go:build unix

package jobrun_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// A function may sort its slice, as one does against deadlocks: the keys stay with
// their items when they are done one by one.
func TestChunkFunctionMaySortItsItems(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	bad := true
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}, Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.EachChunk(ctx, run, jobrun.FromSlice(numbers(6)), orderKey, func(ctx context.Context, tx pgx.Tx, part []int) error {
			slices.SortFunc(part, func(a, b int) int { return cmp.Compare(b, a) })
			for _, n := range part {
				if bad && n == 6 {
					return errDeclined
				}
				if err := effect(ctx, tx, n); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		return err
	}}
	if _, err := r.RunDate(t.Context(), job, date); err == nil {
		t.Error("no error")
	}
	if items, err := r.FailedItems(t.Context(), job.Key(date), "", 10); err != nil || len(items) != 1 || items[0].Item != "order-6" {
		t.Errorf("failed: %+v, %v", items, err)
	}
	bad = false
	if _, err := r.RunDate(t.Context(), job, date); err != nil {
		t.Error(err)
	}
	effects(t, db.Pool, "1 2 3 4 5 6")
}

// A crash of one server process restarts the server in place, and the id of a
// transaction that was lost with it is given to another one. Its fate is not ours.
func TestCrashOfTheServerDuringACommit(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	for _, what := range []string{"once", "tx", "complete"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, err := pgtest.Start(t.Context(), pgtest.Options{Durable: true, Settings: map[string]string{"restart_after_crash": "on", "autovacuum": "off"}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(s.Stop)
			connect := func() (conn *pgx.Conn) {
				eventually(t, "the server takes connections", func() bool {
					var err error
					conn, err = pgx.Connect(t.Context(), s.URL("postgres"))
					return err == nil
				})
				return conn
			}
			p := pgtest.NewProxy(t, s.URL("postgres"))
			pool := (&pgtest.DB{URL: s.URL("postgres")}).PoolWith(t, func(c *pgxpool.Config) { through(p)(c); c.MaxConns = 8 })
			r := newRunner(t, pool, jobrun.Options{})
			if err := r.Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			exec(t, pool, effectTable+`; CREATE TABLE neighbour (n integer)`)
			f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
			victim := connect()
			p.Hold("^commit")
			done := make(chan error, 1)
			go func() {
				work := func(tx pgx.Tx) error { return effect(context.Background(), tx, 1) }
				switch what {
				case "once":
					_, err := f.run.Once(context.Background(), "payout-1", work)
					done <- err
				case "tx":
					done <- f.run.Tx(context.Background(), work)
				case "complete":
					done <- f.run.Complete(context.Background(), work)
				}
			}()
			eventually(t, "COMMIT is on its way", func() bool { return p.Held() > 0 })
			if err := syscall.Kill(int(victim.PgConn().PID()), syscall.SIGKILL); err != nil { // of this server, which is the test's own
				t.Fatal(err)
			}
			eventually(t, "its sessions end", func() bool { return victim.Ping(t.Context()) != nil })
			neighbour := connect()
			for range 2 { // take the ids that are free again
				eventually(t, "neighbours write", func() bool {
					_, err := neighbour.Exec(t.Context(), `INSERT INTO neighbour VALUES (1)`)
					if err != nil {
						neighbour = connect()
					}
					return err == nil
				})
			}
			p.Release()
			err = <-done
			n := 0
			if scanned := connect().QueryRow(t.Context(), `SELECT count(*) FROM effect`).Scan(&n); scanned != nil {
				t.Fatal(scanned)
			}
			if (err == nil) != (n == 1) || err != nil && !errors.Is(err, jobrun.ErrOutcomeUnknown) || err != nil && what != "tx" {
				t.Errorf("%v, with %d effects", err, n)
			}
			if res, err := f.end(t, nil); err != nil || res.Record.Status != jobrun.Succeeded {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
}

// Work that ends its transaction and begins another would leave half of it outside
// of the fence.
func TestWorkThatBeginsAnewIsFoundOut(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for i, sql := range []string{`COMMIT; BEGIN`, `COMMIT AND CHAIN`, `ROLLBACK; BEGIN`, `ROLLBACK AND CHAIN`} {
		item := fmt.Sprintf("item-%d", i)
		ran, err := f.run.Once(t.Context(), item, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), sql)
			return errors.Join(err, effect(t.Context(), tx, i))
		})
		if ran || err == nil || !strings.Contains(err.Error(), "ended its transaction itself and began another") {
			t.Errorf("%s: %t, %v", sql, ran, err)
		}
	}
	effects(t, db.Pool, "")
	f.succeeds(t, 1)
}

// A savepoint that was left behind, as GORM and pgx leave them, is no obstacle to a
// fence at the end of the outermost transaction.
func TestFenceAfterNestedTransactions(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for n, nested := range []error{nil, errBroken} {
		if err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if err := pgx.BeginFunc(t.Context(), tx, func(in pgx.Tx) error { return errors.Join(effect(t.Context(), in, n), nested) }); !errors.Is(err, nested) {
				return err
			}
			return f.run.Fence(t.Context(), tx)
		}); err != nil {
			t.Errorf("%v: %v", nested, err)
		}
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `SAVEPOINT left_behind`); err != nil {
			t.Fatal(err)
		}
		supersede := n == 1
		if err := errors.Join(effect(t.Context(), tx, 10+n), f.run.Fence(t.Context(), tx)); err != nil {
			t.Error(err)
		}
		if supersede { // it has to wait for the commit
			done := make(chan error, 1)
			go func() {
				_, err := r.MarkFailed(context.Background(), recordOf(t, r, f.run.Key()), forced)
				done <- err
			}()
			eventually(t, "the person waits", func() bool {
				return query[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`)
			})
			if err := tx.Commit(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		} else if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
	}
	effects(t, db.Pool, "0 10 11")
	if _, err := f.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Error(err)
	}
}

// What one item does to its own connection is that item's failure.
func TestItemThatSpoilsItsConnectionFailsAlone(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"time limit": func(ctx context.Context, tx pgx.Tx) error {
			ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		},
		"open rows": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`)
			return err
		},
		"typed nil": func(context.Context, pgx.Tx) error {
			var e *pgconn.PgError
			return e
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := effectDB(t)
			r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
			got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(20)), func(ctx context.Context, tx pgx.Tx, n int) error {
				if n == 5 {
					return spoil(ctx, tx)
				}
				return effect(ctx, tx, n)
			}, &jobrun.EachOptions{ChunkSize: 10})
			items, listed := r.FailedItems(t.Context(), "daily:2026-09-15", "", 10)
			if got != (jobrun.EachResult{Done: 19, Failed: 1}) || listed != nil || len(items) != 1 || items[0].Item != "order-5" {
				t.Errorf("%+v, %v; failed %+v, %v", got, err, items, listed)
			}
		})
	}
}

// A person who resets the server's statistics while a COMMIT is under way has not
// crashed it.
func TestStatisticsResetDuringACommit(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	exec(t, db.Pool, `CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`)
	p, r := proxied(t, db, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	holder, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.Background()) }()
	if _, err := holder.Exec(t.Context(), `SELECT pg_advisory_xact_lock(4711)`); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		ran bool
		err error
	}
	done := make(chan answer, 1)
	go func() {
		ran, err := f.run.Once(context.Background(), "payout", func(tx pgx.Tx) error { return effect(context.Background(), tx, 1) })
		done <- answer{ran, err}
	}()
	eventually(t, "COMMIT is under way", func() bool {
		return query[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query = 'commit' AND state = 'active' AND datname = current_database())`)
	})
	exec(t, db.Pool, `SELECT pg_stat_reset_shared('bgwriter')`)
	p.CutAll()
	asked := p.Statements("pg_xact_status")
	eventually(t, "its fate is asked for", func() bool { return p.Statements("pg_xact_status") > asked })
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got.err != nil || !got.ran {
		t.Errorf("%+v", got)
	}
	effects(t, db.Pool, "1")
	f.succeeds(t, 1)
}

// Trouble with the ledger itself is not the items' fault.
func TestLedgerTroubleIsNotTheItemsFault(t *testing.T) {
	t.Parallel()
	for what, trouble := range map[string]func(ctx context.Context, db *pgtest.DB, role string, tx pgx.Tx) error{
		"privilege": func(_ context.Context, db *pgtest.DB, role string, _ pgx.Tx) error {
			exec(t, db.Pool, `REVOKE INSERT ON batch_job_item FROM `+role)
			return nil
		},
		"statements": func(ctx context.Context, _ *pgtest.DB, _ string, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `DEALLOCATE ALL`)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := effectDB(t)
			role, url := db.Role(t, "")
			exec(t, db.Pool, `GRANT ALL ON ALL TABLES IN SCHEMA public TO `+role)
			r := newRunner(t, (&pgtest.DB{URL: url}).PoolWith(t, nil), jobrun.Options{})
			struck := false
			got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(50)), func(ctx context.Context, tx pgx.Tx, n int) error {
				if n == 20 && !struck {
					struck = true
					if err := trouble(ctx, db, role, tx); err != nil {
						return err
					}
				}
				return effect(ctx, tx, n)
			}, &jobrun.EachOptions{ChunkSize: 10})
			if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_item_failure`); n != 0 || got.Failed != 0 || (err == nil) != (got.Done == 50) {
				t.Errorf("%+v, %d failures noted: %v", got, n, err)
			}
		})
	}
}

// Two steps of one run share its ledger, unless they say which they are.
func TestStepsHaveItemsOfTheirOwn(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if _, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		for i, step := range []string{"", "pay", "book", "pay", ""} {
			got, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(3)), orderKey, func(ctx context.Context, tx pgx.Tx, n int) error {
				return effect(ctx, tx, 10*i+n)
			}, &jobrun.EachOptions{Step: step})
			if want := map[bool]jobrun.EachResult{true: {Done: 3}, false: {AlreadyDone: 3}}[i < 3]; err != nil || got != want {
				t.Errorf("step %q: %+v, %v", step, got, err)
			}
		}
		var invalid *jobrun.InvalidError
		for _, bad := range []string{"a:b", "\xff", strings.Repeat("x", 101)} {
			if _, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(3)), orderKey, effect, &jobrun.EachOptions{Step: bad}); !errors.As(err, &invalid) || invalid.Field != "EachOptions.Step" {
				t.Errorf("step %q: %v", bad, err)
			}
		}
		_, err := jobrun.Each(ctx, run, jobrun.FromSlice([]int{}), orderKey, effect, nil) // the refused ones have left items unread
		return err
	}}, date); err != nil {
		t.Error(err)
	}
	effects(t, db.Pool, "1 2 3 11 12 13 21 22 23")
	if got := query[string](t, db.Pool, `SELECT string_agg(item, ' ' ORDER BY item) FROM batch_job_item WHERE item LIKE 'pay%'`); got != "pay:order-1 pay:order-2 pay:order-3" {
		t.Errorf("ledger %s", got)
	}
}

// Items that nobody has read are not done, whatever the job says.
func TestRunThatStoppedAtItsFailuresCannotSucceed(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	complete, again := false, false
	for i, want := range []jobrun.Status{jobrun.Failed, jobrun.Failed, jobrun.Succeeded} {
		complete, again = i == 1, i == 2
		res, err := r.RunDate(t.Context(), jobrun.Job{Name: fmt.Sprintf("daily-%d", i), Func: func(ctx context.Context, run *jobrun.Run) error {
			do := func(limit int64) {
				_, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(100)), orderKey, func(ctx context.Context, tx pgx.Tx, n int) error {
					if n <= 3 {
						return errDeclined
					}
					return effect(ctx, tx, n)
				}, &jobrun.EachOptions{MaxFailures: limit, ChunkSize: 10})
				var failed *jobrun.ItemsError
				if !errors.As(err, &failed) || failed.Stopped != (limit > 0) {
					t.Error(err)
				}
			}
			if do(3); again {
				do(0)
			}
			if complete {
				return run.Complete(ctx, nil)
			}
			return nil
		}}, date)
		if res.Record.Status != want || (err == nil) != (want == jobrun.Succeeded) || err != nil && !strings.Contains(err.Error(), "not all items of step \"\" were read: 3 of 3 items failed") {
			t.Errorf("%d: %+v, %v", i, res.Record, err)
		}
	}
}

// An Each that could not read all of its items is no success of the run, also when
// its error was only logged, and whatever other steps have done.
func TestRunWithUnreadItemsCannotSucceed(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for name, items := range map[string]iter.Seq2[int, error]{
		"sequence": func(yield func(int, error) bool) { _ = yield(1, nil) && yield(2, errBroken) },
		"bad-key":  jobrun.FromSlice([]int{1, -1}),
		"options":  jobrun.FromSlice([]int{1}),
		"panic":    func(func(int, error) bool) { panic("no items today") },
	} {
		for _, complete := range []bool{false, true} {
			opts := &jobrun.EachOptions{Step: "pay", ChunkSize: map[bool]int{true: -1, false: 1}[name == "options"]}
			res, err := r.RunDate(t.Context(), jobrun.Job{Name: fmt.Sprintf("%s-%t", name, complete), Func: func(ctx context.Context, run *jobrun.Run) error {
				key := func(n int) string { return map[int]string{1: "a", 2: "b", -1: "\x00"}[n] }
				func() {
					defer func() { _ = recover() }() // as some frameworks do
					_, _ = jobrun.Each(ctx, run, items, key, effect, opts)
				}()
				if _, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(3)), orderKey, effect, &jobrun.EachOptions{Step: "mail"}); err != nil {
					t.Error(err)
				}
				if complete {
					return run.Complete(ctx, nil)
				}
				return nil
			}}, date)
			if res.Record.Status != jobrun.Failed || err == nil || !strings.Contains(err.Error(), "were read: ") {
				t.Errorf("%s, complete %t: %s, %v", name, complete, res.Record.Status, err)
			}
		}
	}
}

// Many a sequence ends quietly when the context does.
func TestSequenceThatEndsWithTheContextIsNotAllItems(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, parallel := range []int{1, 3} {
		var items iter.Seq2[int, error]
		res, err := r.RunDate(t.Context(), jobrun.Job{Name: fmt.Sprintf("daily-%d", parallel), Timeout: 300 * time.Millisecond, Func: func(ctx context.Context, run *jobrun.Run) error {
			items = func(yield func(int, error) bool) {
				for n := range 3 {
					if !yield(n, nil) {
						return
					}
				}
				<-ctx.Done()
			}
			_, err := jobrun.Each(ctx, run, items, orderKey, effect, &jobrun.EachOptions{ChunkSize: 1, Parallel: parallel})
			return err
		}}, date)
		if !errors.Is(err, context.DeadlineExceeded) || res.Record.Status != jobrun.Failed || res.Record.ItemsProcessed != 3 {
			t.Errorf("%+v, %v", res.Record, err)
		}
	}
}

// An encoding that stores two characters as one must not make an item look done.
func TestKeyThatComesBackAsAnotherIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	name := "eucjp_" + db.Name
	exec(t, db.Pool, `CREATE DATABASE `+name+` ENCODING 'EUC_JP' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	t.Cleanup(func() { _, _ = db.Pool.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`) })
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	pool := (&pgtest.DB{URL: u.String()}).PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["client_encoding"] = "UTF8" })
	t.Cleanup(pool.Close)
	r := newRunner(t, pool, jobrun.Options{})
	if err := r.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	keys := []string{"a", "a", "x\u00a6"} // one that is there twice, so that not all are taken
	_, err = r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(3)), func(n int) string { return keys[n-1] }, func(context.Context, pgx.Tx, int) error { return nil }, nil)
		return err
	}}, date)
	if n := query[int](t, pool, `SELECT count(*) FROM batch_job_item`); err == nil || !strings.Contains(err.Error(), "stores the key of another item as") || n != 0 {
		t.Errorf("%v, %d in the ledger", err, n)
	}
}

// Connections that fall silent under jobrun's own statements are given up.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	together(t, map[string]jobrun.Options{
		"^begin": {Lease: time.Second}, "insert into \"public\".batch_job_item": {Lease: time.Second}, "for share": {Lease: time.Second},
		"^commit": {}, // the server holds the run until the session is ended, but not for the length of this lease
	}, func(t *testing.T, at string, opts jobrun.Options) {
		db := effectDB(t)
		p, r := proxied(t, db, opts)
		var ran bool
		res, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) (err error) {
			p.Hold(at)
			ran, err = run.Once(ctx, "payout", func(tx pgx.Tx) error { return effect(ctx, tx, 1) })
			return err
		}}, date)
		if rec := recordOf(t, newRunner(t, db.Pool, jobrun.Options{}), "daily:2026-09-15"); rec.Status == jobrun.Running || (rec.Status == jobrun.Succeeded) != ran || errors.Is(err, jobrun.ErrOutcomeUnknown) {
			t.Errorf("%s, %t: %+v, %v", rec.Status, ran, res, err)
		}
		if !ran { // on another connection
			t.Errorf("%+v, %v", res, err)
		}
		p.Release()
		effects(t, db.Pool, map[bool]string{true: "1"}[ran])
	})
}

// Of Completes at the same time, one completes, and those whose COMMIT fails do not
// make heartbeats and fences believe that the lease is lost.
func TestConcurrentCompletes(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	exec(t, db.Pool, `CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 IF new.item > 1 THEN PERFORM pg_sleep(0.05); RAISE EXCEPTION 'odd' USING ERRCODE = '23514'; END IF; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER odd AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION odd()`)
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{Lease: time.Second})
	for round := range 5 {
		f := launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("daily-%d", round)})
		var wg sync.WaitGroup
		var completed atomic.Int64
		for _, n := range []int{2, 3, 4, 1, 5, 1, 6, 7} {
			wg.Go(func() {
				err := f.run.Complete(t.Context(), func(tx pgx.Tx) error { return effect(t.Context(), tx, n) })
				if err == nil {
					completed.Add(1)
				}
				if errors.Is(err, jobrun.ErrLeaseLost) {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		if f.ctx.Err() != nil || completed.Load() != 1 {
			t.Errorf("round %d: %d completed, context %v", round, completed.Load(), context.Cause(f.ctx))
		}
		f.succeeds(t, 1)
	}
	effects(t, db.Pool, "1 1 1 1 1")
}

// Equal keys in two schemas are two runs.
func TestSchemasDoNotShareLocks(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	runs := map[string]*flight{}
	for _, schema := range []string{"a", "it's"} {
		exec(t, db.Pool, `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize())
		r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Schema: schema})
		if err := r.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		runs[schema] = launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if err := runs["it's"].run.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	if err := runs["a"].run.Complete(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

// Whoever clears the tables by hand starts the numbers again, and can save again.
func TestCheckpointOfAForgottenHistoryIsReplaced(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
	save := func(f *flight, v any) error {
		return f.run.Tx(t.Context(), func(tx pgx.Tx) error { return f.run.SetCheckpoint(t.Context(), tx, v) })
	}
	for range 2 {
		f := launch(t, t.Context(), r, job)
		if err := save(f, 41); err != nil {
			t.Error(err)
		}
		_, _ = f.end(t, errBroken)
	}
	exec(t, db.Pool, `DELETE FROM batch_job_run; DELETE FROM batch_job_attempt`)
	f := launch(t, t.Context(), r, job)
	if err := save(f, 42); err != nil || f.run.Attempt() != 1 {
		t.Errorf("attempt %d: %v", f.run.Attempt(), err)
	}
	f.succeeds(t, 1)
}

// An error whose methods panic is one item's.
func TestItemErrorsThatPanic(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(20)), func(ctx context.Context, tx pgx.Tx, n int) error {
		switch n {
		case 5:
			var e *selfless
			return e
		case 7:
			return explosive{}
		case 9:
			return mute{}
		}
		return effect(ctx, tx, n)
	}, &jobrun.EachOptions{ChunkSize: 10})
	if got != (jobrun.EachResult{Done: 17, Failed: 3}) || err == nil {
		t.Errorf("%+v, %v", got, err)
	}
}

// A constraint that is checked at the commit, after the fence, fails its item alone.
func TestDeferredConstraintFailsItsItem(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	exec(t, db.Pool, `CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 IF new.item = 7 THEN RAISE EXCEPTION 'seven' USING ERRCODE = '23514'; END IF; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: 30 * 24 * time.Hour}) // longer than the server takes for a timeout
	got, _, err := each(t, r, "daily", jobrun.FromSlice(numbers(10)), effect, nil)
	if got != (jobrun.EachResult{Done: 9, Failed: 1}) || err == nil || !strings.Contains(err.Error(), `"order-7": ERROR: seven`) {
		t.Errorf("%+v, %v", got, err)
	}
	effects(t, db.Pool, "1 2 3 4 5 6 8 9 10")
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "complete", Func: func(ctx context.Context, run *jobrun.Run) error {
		return run.Complete(ctx, func(tx pgx.Tx) error { return effect(ctx, tx, 7) })
	}}, date)
	if err == nil || res.Record.Status != jobrun.Failed {
		t.Errorf("%+v, %v", res, err)
	}
}

// A heartbeat in between is a serialization failure of Complete, and the error says so.
func TestLongCompleteUnderRepeatableReadSaysWhy(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Lease: time.Second})
	calls := 0
	_, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		return run.Complete(ctx, func(tx pgx.Tx) error {
			calls++
			if _, err := tx.Exec(ctx, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`); err != nil {
				return err
			}
			err := effect(ctx, tx, calls)
			beaten(t, db.Pool, run.Key(), 1)
			return err
		})
	}}, date)
	if err == nil || !strings.Contains(err.Error(), "shorter than the pause between heartbeats") || calls != 8 {
		t.Errorf("%v after %d calls", err, calls)
	}
	effects(t, db.Pool, "")
}
