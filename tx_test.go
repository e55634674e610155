package jobrun_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

const (
	effectTable   = `CREATE TABLE effect (item integer NOT NULL)`
	sealStatement = "FOR NO KEY UPDATE OF r"
)

// effect writes one row.
func effect(ctx context.Context, tx pgx.Tx, n int) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (item) VALUES ($1)`, n)
	return err
}

// effects expects these rows, in order.
func effects(t testing.TB, pool *pgxpool.Pool, want string) {
	t.Helper()
	if got := query[string](t, pool, `SELECT coalesce(string_agg(item::text, ' ' ORDER BY item), '') FROM effect`); got != want {
		t.Errorf("effects %q, want %q", got, want)
	}
}

// effectDB is a database with a table for effects.
func effectDB(t testing.TB) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	exec(t, db.Pool, effectTable)
	return db
}

// supersedings are the ways in which a run stops being its attempt's.
var supersedings = map[string]func(t testing.TB, r *jobrun.Runner, pool *pgxpool.Pool, key string){
	"by a person": func(t testing.TB, r *jobrun.Runner, _ *pgxpool.Pool, key string) {
		if _, err := r.MarkFailed(context.Background(), recordOf(t, r, key), forced); err != nil {
			t.Error(err)
		}
	},
	"by hand": func(t testing.TB, _ *jobrun.Runner, pool *pgxpool.Pool, key string) {
		exec(t, pool, `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`, key)
	},
	"by a neighbour's take-over": func(t testing.TB, _ *jobrun.Runner, pool *pgxpool.Pool, key string) {
		exec(t, pool, `UPDATE batch_job_run SET worker_id = 'node-1', started_at = now() WHERE job_key = $1`, key)
	},
	"by a deletion": func(t testing.TB, _ *jobrun.Runner, pool *pgxpool.Pool, key string) {
		exec(t, pool, `DELETE FROM batch_job_run WHERE job_key = $1`, key)
	},
}

var isolationLevels = []string{"READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"}

// Whoever ends the run between the beginning and the commit of a transaction, and
// whatever its isolation level: nothing of it is committed.
func TestSupersededAttemptCommitsNothing(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for how, supersede := range supersedings {
		for i, level := range isolationLevels {
			t.Run(how+"/"+level, func(t *testing.T) {
				t.Parallel()
				r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
				name := fmt.Sprintf("daily-%d-%s", i, strings.ReplaceAll(strings.ReplaceAll(how, " ", "-"), "'", ""))
				for what, call := range map[string]func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error{
					"tx": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error { return run.Tx(ctx, work) },
					"complete": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error {
						return run.Complete(ctx, work)
					},
					"fence": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error {
						return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
							if err := work(tx); err != nil {
								return err
							}
							return run.Fence(ctx, tx)
						})
					},
				} {
					f := launch(t, t.Context(), r, jobrun.Job{Name: name + "-" + what})
					calls := 0
					err := call(t.Context(), f.run, func(tx pgx.Tx) error {
						calls++
						if _, err := tx.Exec(t.Context(), `SET TRANSACTION ISOLATION LEVEL `+level); err != nil {
							return err
						}
						err := effect(t.Context(), tx, 1)
						supersede(t, r, db.Pool, f.run.Key())
						return err
					})
					if !errors.Is(err, jobrun.ErrLeaseLost) || calls != 1 {
						t.Errorf("%s: %v after %d calls, want ErrLeaseLost after 1", what, err, calls)
					}
					if what != "fence" && !errors.Is(context.Cause(f.ctx), jobrun.ErrLeaseLost) {
						t.Errorf("%s: the context's cause is %v", what, context.Cause(f.ctx))
					}
					if err := f.run.Tx(t.Context(), func(pgx.Tx) error { calls++; return nil }); !errors.Is(err, jobrun.ErrLeaseLost) || calls != 1 {
						t.Errorf("%s: a further transaction: %v", what, err)
					}
					if _, err := f.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
						t.Errorf("%s: the run: %v", what, err)
					}
				}
			})
		}
	}
	t.Cleanup(func() { effects(t, db.Pool, "") })
}

func TestHeldAttemptCommits(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for i, level := range isolationLevels {
		if err := f.run.Tx(t.Context(), func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SET TRANSACTION ISOLATION LEVEL `+level)
			return errors.Join(err, effect(t.Context(), tx, i))
		}); err != nil {
			t.Errorf("%s: %v", level, err)
		}
		err := pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{IsoLevel: pgx.TxIsoLevel(strings.ToLower(level))}, func(tx pgx.Tx) error {
			return errors.Join(effect(t.Context(), tx, 10+i), f.run.Fence(t.Context(), tx))
		})
		if err != nil {
			t.Errorf("%s, fence: %v", level, err)
		}
	}
	// One that has written nothing is a transaction too.
	if err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return f.run.Fence(t.Context(), tx) }); err != nil {
		t.Errorf("a transaction without writes: %v", err)
	}
	if err := f.run.Tx(t.Context(), func(pgx.Tx) error { return nil }); err != nil {
		t.Errorf("a transaction without statements: %v", err)
	}
	effects(t, db.Pool, "0 1 2 10 11 12")
	f.succeeds(t, 1)
}

// A serialization failure of the run's row alone is not a lost lease.
func TestFenceTellsASerializationFailureFromALostLease(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	tries := 0
	disturbed := func(tx pgx.Tx) error {
		tries++
		err := effect(t.Context(), tx, 1)
		if tries <= 2 {
			exec(t, db.Pool, `UPDATE batch_job_run SET scheduled_for = now()`)
		}
		return err
	}
	err := pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		return errors.Join(disturbed(tx), f.run.Fence(t.Context(), tx))
	})
	var pg *pgconn.PgError
	if errors.Is(err, jobrun.ErrLeaseLost) || !errors.As(err, &pg) || pg.Code != "40001" {
		t.Errorf("fence: %v", err)
	}
	// Tx repeats it.
	if err := f.run.Tx(t.Context(), func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)
		return errors.Join(err, disturbed(tx))
	}); err != nil || tries != 3 {
		t.Errorf("tx: %v after %d tries", err, tries)
	}
	effects(t, db.Pool, "1")
	f.succeeds(t, 1)
}

func TestTxRepeatsWhatPasses(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for _, c := range []struct {
		code         string
		times, calls int
	}{{"40001", 2, 3}, {"40P01", 2, 3}, {"40001", math.MaxInt, 8}, {"23505", 1, 1}, {"55P03", 1, 1}} {
		calls := 0
		err := f.run.Tx(t.Context(), func(tx pgx.Tx) error {
			if calls++; calls > c.times {
				return effect(t.Context(), tx, c.calls)
			}
			_, err := tx.Exec(t.Context(), fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'injected' USING ERRCODE = '%s'; END $$`, c.code))
			return fmt.Errorf("step 2: %w", err)
		})
		var pg *pgconn.PgError
		if calls != c.calls || c.calls != 3 && (!errors.As(err, &pg) || pg.Code != c.code) || c.calls == 3 && err != nil {
			t.Errorf("%s: %v after %d calls, want %d", c.code, err, calls, c.calls)
		}
	}
	effects(t, db.Pool, "3 3")
	f.succeeds(t, 1)
}

// A lost answer to COMMIT is no reason to do the work twice, nor to call it done.
func TestLostAnswerToACommit(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for what, call := range transactions {
		for n, arm := range map[int]func(p *pgtest.Proxy){
			1: func(p *pgtest.Proxy) { p.CutAfter("^commit") },
			2: func(p *pgtest.Proxy) { p.CutBefore("^commit") },
			3: func(p *pgtest.Proxy) { p.CutBefore("^commit"); p.CutBefore("^commit"); p.CutAfter("pg_xact_status") },
		} {
			t.Run(fmt.Sprintf("%s/%d", what, n), func(t *testing.T) {
				t.Parallel()
				p, r := proxied(t, db, jobrun.Options{})
				f := launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("%s-%d", what, n)})
				arm(p)
				calls := 0
				err := call(t.Context(), f.run, func(tx pgx.Tx) error {
					calls++
					_, err := tx.Exec(t.Context(), `INSERT INTO effect SELECT $1::text::integer`, fmt.Sprint(n))
					return err
				})
				if err != nil || calls != n || p.Cuts() == 0 {
					t.Errorf("%v, %d calls, %d cuts", err, calls, p.Cuts())
				}
				f.succeeds(t, 1)
			})
		}
	}
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1 2 2 2 2 3 3 3 3") })
}

// When the server that had the transaction is another one by then, its number says
// nothing. The ledger and the run's row still do; of a plain Tx nothing does.
func TestLostAnswerToACommitOfAServerThatIsGone(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	for _, committed := range []bool{true, false} {
		t.Run(fmt.Sprintf("committed=%t", committed), func(t *testing.T) {
			t.Parallel()
			db := effectDB(t)
			// As after a fail-over: the start of the server is never the same.
			exec(t, db.Pool, `CREATE SCHEMA another; CREATE FUNCTION another.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql AS 'SELECT clock_timestamp()'`)
			p := pgtest.NewProxy(t, db.URL)
			r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) {
				through(p)(c)
				c.ConnConfig.RuntimeParams["search_path"] = "another, pg_catalog, public"
			}), jobrun.Options{Schema: "public"})
			calls := 0
			work := func(n int) func(tx pgx.Tx) error {
				return func(tx pgx.Tx) error {
					if calls++; calls == 1 {
						if committed {
							p.CutAfter("^commit")
						} else {
							p.CutBefore("^commit")
						}
					}
					return effect(t.Context(), tx, n)
				}
			}
			want := map[bool]int{true: 1, false: 2}[committed]
			f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
			if ran, err := f.run.Once(t.Context(), "item", work(1)); err != nil || !ran || calls != want {
				t.Errorf("once: %t, %v after %d calls, want %d", ran, err, calls, want)
			}
			calls = 0
			if err := f.run.Tx(t.Context(), work(2)); !errors.Is(err, jobrun.ErrOutcomeUnknown) || calls != 1 {
				t.Errorf("tx: %v after %d calls", err, calls)
			}
			calls = 0
			if err := f.run.Complete(t.Context(), work(3)); err != nil || calls != want {
				t.Errorf("complete: %v after %d calls, want %d", err, calls, want)
			}
			f.succeeds(t, 1)
			effects(t, db.Pool, map[bool]string{true: "1 2 3", false: "1 3"}[committed])
		})
	}
}

// A function that hides what became of its statements, or ends the transaction
// itself, is found out.
func TestWorkMustNotEndItsTransaction(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	for _, c := range []struct {
		want string
		fn   func(tx pgx.Tx) error
	}{
		{"a statement of the transaction failed", func(tx pgx.Tx) error { _, _ = tx.Exec(t.Context(), `SELECT 1/0`); return nil }},
		{"ended its transaction itself", func(tx pgx.Tx) error { _, err := tx.Exec(t.Context(), `ROLLBACK`); return err }},
		{"not yours to end", func(tx pgx.Tx) error { return tx.Commit(t.Context()) }},
		{"not yours to end", func(tx pgx.Tx) error { return tx.Rollback(t.Context()) }},
		{"fn is <nil>", nil},
	} {
		if err := f.run.Tx(t.Context(), c.fn); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	func() {
		defer func() {
			if v := recover(); v != "boom" {
				t.Errorf("recovered %v", v)
			}
		}()
		_ = f.run.Tx(t.Context(), func(tx pgx.Tx) error { _ = effect(t.Context(), tx, 1); panic("boom") })
	}()
	// A savepoint inside is fine, rolled back or not.
	if err := f.run.Tx(t.Context(), func(tx pgx.Tx) error {
		bad := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error { _ = effect(t.Context(), tx, 2); return errBroken })
		return errors.Join(pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error { return effect(t.Context(), tx, 3) }), map[bool]error{false: bad}[errors.Is(bad, errBroken)])
	}); err != nil {
		t.Error(err)
	}
	effects(t, db.Pool, "3")
	eventually(t, "the connections are back", func() bool { return db.Pool.Stat().AcquiredConns() == 1 })
	f.succeeds(t, 1)
}

func TestFenceNeedsATransaction(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	refused := func(what, want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", what, err, want)
		}
	}
	refused("nil", "tx is <nil>", f.run.Fence(t.Context(), nil))
	refused("nil", "tx is <nil>", f.run.FenceSQL(t.Context(), nil))
	refused("nil", "tx is <nil>", f.run.SetCheckpoint(t.Context(), nil, 1))
	_ = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error {
			refused("a savepoint", "outermost", f.run.Fence(t.Context(), nested))
			return nil
		})
	})
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), `COMMIT`); err != nil {
				t.Fatal(err)
			}
			for range 3 { // a prepared statement behaves in another way from its second time on
				refused("no transaction", "needs an open transaction", f.run.Fence(t.Context(), tx))
			}
			_ = tx.Rollback(t.Context())
		})
	}
	f.succeeds(t, 1)
}

// Two fenced transactions are open at the same time, heartbeats pass them, and so
// does the end of neither wait for the other.
func TestFencedTransactionsDoNotQueue(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	var open []pgx.Tx
	for n := range 3 {
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(effect(t.Context(), tx, n), f.run.Fence(t.Context(), tx)); err != nil {
			t.Fatal(err)
		}
		// Fence sets it to the lease, which these are to survive.
		if _, err := tx.Exec(t.Context(), `SET LOCAL idle_in_transaction_session_timeout = '60s'`); err != nil {
			t.Fatal(err)
		}
		open = append(open, tx)
	}
	beaten(t, db.Pool, f.run.Key(), 3)
	for _, tx := range open {
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
	}
	effects(t, db.Pool, "0 1 2")
	f.succeeds(t, 1)
}

// The row locks of many committers overlap all the time: without the advisory
// lock, a person would wait until they pause, thousands of commits later. With it,
// each of them commits once or twice more from the moment of the wait, which the
// test sees a little late, and before its call has arrived.
func TestPersonIsNotStarvedByCommitters(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	const committers = 32
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = committers + 2 }), jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	rec := recordOf(t, r, f.run.Key())
	elsewhere := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = "person" }), jobrun.Options{})
	recordOf(t, elsewhere, f.run.Key()) // connects
	watch, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Close(context.Background()) }()
	var commits atomic.Int64
	var wg sync.WaitGroup
	for range committers {
		wg.Go(func() {
			for {
				err := f.run.Tx(t.Context(), func(tx pgx.Tx) error { return effect(t.Context(), tx, 1) })
				if err != nil {
					if !errors.Is(err, jobrun.ErrLeaseLost) {
						t.Error(err)
					}
					return
				}
				commits.Add(1)
			}
		})
	}
	eventually(t, "all of them commit", func() bool { return commits.Load() > 10*committers })
	var waiting, begin, between int64 // between: most commits from one look to the next
	stop := make(chan struct{})
	looks, watched := make(chan struct{}), make(chan struct{})
	go func() { // from when it waits for a lock, and not from when it is called
		defer close(watched)
		for first := true; ; first = false {
			select {
			case <-stop:
				return
			default:
			}
			n, before := 0, commits.Load()
			if err := watch.QueryRow(context.Background(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'person' AND state = 'active' AND wait_event_type = 'Lock'`).Scan(&n); err != nil {
				t.Error(err)
				return
			}
			if n > 0 && waiting == 0 {
				waiting = commits.Load()
			}
			between = max(between, commits.Load()-before)
			if first {
				close(looks)
			}
		}
	}()
	<-looks
	begin = commits.Load()
	start := time.Now()
	if _, err := elsewhere.MarkFailed(t.Context(), rec, forced); err != nil {
		t.Error(err)
	}
	took := time.Since(start)
	close(stop)
	<-watched
	wg.Wait()
	after := commits.Load() - waiting
	if waiting == 0 { // it did not wait from one look to the next, nor before its call
		after = min(between, commits.Load()-begin)
	}
	if after > 20*committers {
		t.Errorf("%d commits while the person waited", after)
	}
	t.Logf("MarkFailed took %s beside %d committers; %d commits since the call", took, committers, commits.Load()-begin)
	if n := query[int64](t, db.Pool, `SELECT count(*) FROM effect`); n != commits.Load() {
		t.Errorf("%d effects of %d commits", n, commits.Load())
	}
	if _, err := f.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Error(err)
	}
}

// A process that stands still with an open transaction loses it: the server ends
// the session after the length of the lease.
func TestIdleTransactionIsEndedByTheServer(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := effectDB(t)
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	ran, err := f.run.Once(t.Context(), "item", func(tx pgx.Tx) error {
		pid := tx.Conn().PgConn().PID()
		err := effect(t.Context(), tx, 1)
		eventually(t, "the session ends", func() bool {
			return query[bool](t, db.Pool, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1::integer)`, int32(pid))
		})
		return err
	})
	if ran || err == nil {
		t.Errorf("got %t, %v", ran, err)
	}
	effects(t, db.Pool, "")
	if ran, err := f.run.Once(t.Context(), "item", func(tx pgx.Tx) error { return effect(t.Context(), tx, 2) }); err != nil || !ran {
		t.Errorf("the item is held: %t, %v", ran, err)
	}
	effects(t, db.Pool, "2")
	f.succeeds(t, 1)
}

func TestOnceIsOncePerRun(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	fails := errBroken
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}, Func: func(ctx context.Context, run *jobrun.Run) error {
		// Its error takes the marker with it.
		if ran, err := run.Once(ctx, "b", func(tx pgx.Tx) error { return errors.Join(effect(ctx, tx, 99), errBroken) }); ran || !errors.Is(err, errBroken) {
			t.Errorf("a failing item: %t, %v", ran, err)
		}
		var wg sync.WaitGroup
		var count atomic.Int64
		for range 6 {
			wg.Go(func() {
				ran, err := run.Once(ctx, "a", func(tx pgx.Tx) error { return effect(ctx, tx, 1) })
				if err != nil {
					t.Error(err)
				}
				if ran {
					count.Add(1)
				}
			})
		}
		wg.Wait()
		run.AddProcessed(count.Load())
		return fails
	}}
	for attempt, want := range []int64{1, 0} {
		if res, err := r.RunDate(t.Context(), job, date); !errors.Is(err, errBroken) || res.Record.Attempt != attempt+1 || res.Record.ItemsProcessed != want {
			t.Errorf("attempt %d: %+v, %v", attempt+1, res, err)
		}
	}
	effects(t, db.Pool, "1")
	fails = nil
	again := func(a jobrun.Action, want int64) {
		t.Helper()
		if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, job.Key(date)), a); err != nil {
			t.Fatal(err)
		}
		if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.ItemsProcessed != want {
			t.Errorf("re-run: %+v, %v", res, err)
		}
	}
	again(operator, 0)
	again(forced, 0)
	effects(t, db.Pool, "1")
	reset := forced
	reset.ResetItems = true
	again(reset, 1)
	effects(t, db.Pool, "1 1")
	history, err := r.History(t.Context(), job.Key(date))
	if err != nil || !history[len(history)-2].Action.ResetItems {
		t.Errorf("the history does not tell of the reset: %+v, %v", history, err)
	}
	// The next business date has a ledger of its own.
	if res, err := r.RunDate(t.Context(), job, date.AddDays(1)); err != nil || res.Record.ItemsProcessed != 1 {
		t.Errorf("next date: %+v, %v", res, err)
	}
	for _, act := range []func(jobrun.Record, jobrun.Action) error{
		func(rec jobrun.Record, a jobrun.Action) error {
			_, err := r.MarkFailed(t.Context(), rec, a)
			return err
		},
		func(rec jobrun.Record, a jobrun.Action) error { _, err := r.Skip(t.Context(), rec.Key, a); return err },
	} {
		var invalid *jobrun.InvalidError
		if err := act(recordOf(t, r, job.Key(date)), reset); !errors.As(err, &invalid) || invalid.Field != "Action.ResetItems" {
			t.Errorf("got %v", err)
		}
	}
}

func TestCompleteEndsTheRunWithItsWork(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	var events []jobrun.Event
	log, text := logged()
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second, Logger: log, OnEvent: func(_ context.Context, e jobrun.Event) { events = append(events, e) }})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 5, Backoff: atOnce}})
	key := f.run.Key()
	if err := f.run.Complete(t.Context(), func(tx pgx.Tx) error { return errors.Join(effect(t.Context(), tx, 9), errBroken) }); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	if rec := recordOf(t, r, key); rec.Status != jobrun.Running {
		t.Errorf("after an error: %+v", rec)
	}
	f.run.AddProcessed(7)
	if err := f.run.Complete(t.Context(), func(tx pgx.Tx) error {
		if n := query[string](t, db.Pool, `SELECT status FROM batch_job_run`); n != "RUNNING" {
			t.Errorf("%s before the commit", n)
		}
		return effect(t.Context(), tx, 1)
	}); err != nil {
		t.Fatal(err)
	}
	done := recordOf(t, r, key)
	if done.Status != jobrun.Succeeded || done.ItemsProcessed != 7 || len(events) != 2 || events[1].Record.Status != jobrun.Succeeded || events[1].Previous != jobrun.Running {
		t.Errorf("%+v, events %+v", done, events)
	}
	never := func(tx pgx.Tx) error { t.Error("called"); return nil }
	_, errOnce := f.run.Once(t.Context(), "a", never)
	_, errEach := jobrun.Each(t.Context(), f.run, jobrun.FromSlice(numbers(3)), orderKey, effect, nil)
	for i, err := range []error{
		f.run.Tx(t.Context(), never), errOnce, errEach, f.run.Complete(t.Context(), never),
		pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return f.run.Fence(t.Context(), tx) }),
		pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return f.run.SetCheckpoint(t.Context(), tx, 1) }),
	} {
		if !errors.Is(err, jobrun.ErrCompleted) || errors.Is(err, jobrun.ErrLeaseLost) {
			t.Errorf("%d after Complete: %v", i, err)
		}
	}
	// Another attempt beats for as long as this one's lease would have run out.
	other := launch(t, t.Context(), r, jobrun.Job{Name: "other"})
	beaten(t, db.Pool, other.run.Key(), 6)
	other.succeeds(t, 1)
	if f.ctx.Err() != nil {
		t.Errorf("the context has ended: %v", context.Cause(f.ctx))
	}
	res, err := f.end(t, jobrun.RetryAfter(errBroken, 0))
	var failed *jobrun.RunError
	if !errors.As(err, &failed) || !errors.Is(err, errBroken) || res.Record.Status != jobrun.Succeeded || !res.Ran() {
		t.Errorf("an error after Complete: %+v, %v", res, err)
	}
	if now := recordOf(t, r, key); now != done || res.Record != done {
		t.Errorf("it was\n%+v, it is\n%+v, returned\n%+v", done, now, res.Record)
	}
	if lines := text.lines("run finished", "level=ERROR", "status=SUCCEEDED", errBroken.Error()); len(lines) != 1 {
		t.Errorf("logged %q", lines)
	}
	oneSuccess(t, db.Pool, key)
	effects(t, db.Pool, "1")
	if len(events) != 4 {
		t.Errorf("%d events", len(events))
	}
}

// afterCommit stops a connection's goroutine between the answer to COMMIT and what
// it is told to.
type afterCommit struct{ reached, goOn chan struct{} }

func (c *afterCommit) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, c, data.SQL)
}

func (c *afterCommit) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(c) == "commit" {
		close(c.reached)
		<-c.goOn
	}
}

// A heartbeat that finds the run SUCCEEDED before the process knows that its
// Complete was committed is no lost lease.
func TestHeartbeatDuringComplete(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	pause := &afterCommit{make(chan struct{}), make(chan struct{})}
	p := pgtest.NewProxy(t, db.URL)
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) {
		through(p)(c)
		c.ConnConfig.Tracer = pause
	}), jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
	done := make(chan error, 1)
	go func() {
		done <- f.run.Complete(t.Context(), func(tx pgx.Tx) error { return effect(t.Context(), tx, 1) })
	}()
	within(t, "it is committed", pause.reached)
	if status := query[string](t, db.Pool, `SELECT status FROM batch_job_run`); status != "SUCCEEDED" {
		t.Error(status)
	}
	looked := p.Statements(standingStatement)
	eventually(t, "heartbeats look for the run", func() bool { return p.Statements(standingStatement) >= looked+3 })
	if f.ctx.Err() != nil {
		t.Errorf("the context has ended: %v", context.Cause(f.ctx))
	}
	close(pause.goOn)
	if err := <-done; err != nil {
		t.Error(err)
	}
	f.succeeds(t, 1)
}

func TestCheckpointIsFoundByTheNextAttempt(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	type place struct {
		File   string
		Offset int64
		Seen   []string `json:",omitempty"`
	}
	save := func(f *flight, v any, also error) error {
		return f.run.Tx(t.Context(), func(tx pgx.Tx) error { return errors.Join(f.run.SetCheckpoint(t.Context(), tx, v), also) })
	}
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
	f := launch(t, t.Context(), r, job)
	var got place
	if found, err := f.run.Checkpoint(t.Context(), &got); found || err != nil {
		t.Errorf("before: %t, %v", found, err)
	}
	for _, v := range []any{nil, true, 12345678901234567, math.MaxFloat64, "주문 \u0000 끝", []any{}, map[string]any{"a": []any{nil, "b"}}, json.RawMessage(`{"as":"written"}`)} {
		if err := save(f, v, nil); err != nil {
			t.Errorf("%v: %v", v, err)
			continue
		}
		back := reflect.New(reflect.TypeOf(&v).Elem())
		if v != nil {
			back = reflect.New(reflect.TypeOf(v))
		}
		if found, err := f.run.Checkpoint(t.Context(), back.Interface()); !found || err != nil || !reflect.DeepEqual(back.Elem().Interface(), v) && v != nil {
			t.Errorf("%v came back as %v: %t, %v", v, back.Elem(), found, err)
		}
	}
	want := place{"orders.csv", 1 << 40, []string{"주문"}}
	if err := save(f, want, nil); err != nil {
		t.Fatal(err)
	}
	if err := save(f, place{}, errBroken); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	if err := save(f, func() {}, nil); err == nil || !strings.Contains(err.Error(), "unsupported type") {
		t.Error(err)
	}
	if err := save(f, strings.Repeat("x", 1<<20), nil); err == nil || !strings.Contains(err.Error(), "at most 1048576 bytes") {
		t.Error(err)
	}
	if _, err := f.end(t, errBroken); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	finds := func(attempt int, end error) {
		t.Helper()
		f := launch(t, t.Context(), r, job)
		var got place
		if found, err := f.run.Checkpoint(t.Context(), &got); !found || err != nil || !reflect.DeepEqual(got, want) || f.run.Attempt() != attempt {
			t.Errorf("attempt %d: %+v, %t, %v", f.run.Attempt(), got, found, err)
		}
		var number int
		if found, err := f.run.Checkpoint(t.Context(), &number); found || err == nil || !strings.Contains(err.Error(), "checkpoint of daily:2026-09-15, saved by attempt 1, does not decode into *int") {
			t.Errorf("into a number: %t, %v", found, err)
		}
		if _, err := f.end(t, end); !errors.Is(err, end) {
			t.Error(err)
		}
	}
	finds(2, errBroken)
	approved := func(a jobrun.Action) {
		t.Helper()
		if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, f.run.Key()), a); err != nil {
			t.Fatal(err)
		}
	}
	approved(operator)
	finds(3, errBroken)
	approved(operator)
	finds(4, nil) // SUCCEEDED
	approved(forced)
	f = launch(t, t.Context(), r, job)
	if found, err := f.run.Checkpoint(t.Context(), &got); found || err != nil {
		t.Errorf("after a success: %t, %v", found, err)
	}
	if err := save(f, 7, nil); err != nil {
		t.Error(err)
	}
	// One that was superseded cannot put an older value over it, fence or not.
	supersedings["by a person"](t, r, db.Pool, f.run.Key())
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.run.SetCheckpoint(t.Context(), tx, 8); !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Errorf("a superseded attempt: %v", err)
	}
	_ = tx.Rollback(t.Context())
	reset := operator
	reset.ResetItems = true
	approved(reset)
	again := launch(t, t.Context(), r, job)
	if found, err := again.run.Checkpoint(t.Context(), &got); found || err != nil {
		t.Errorf("after a reset: %t, %v", found, err)
	}
	again.succeeds(t, 6)
	_, _ = f.end(t, nil)
}

func TestIdempotencyKeyIsTheSameForEveryAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var keys []uuid.UUID
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}, Func: func(_ context.Context, run *jobrun.Run) error {
		keys = append(keys, run.IdempotencyKey("order-1"), run.IdempotencyKey("order-2"), run.IdempotencyKey(""))
		return errBroken
	}}
	for _, d := range []jobrun.Date{date, date, date.AddDays(1)} {
		_, _ = r.RunDate(t.Context(), job, d)
	}
	// Receivers in other languages can compute it: version 5 of key, zero byte, item.
	want := uuid.NewSHA1(uuid.MustParse("6f1d6a52-3f0b-4c0e-9d0a-5c6f3a1e7b84"), []byte("daily:2026-09-15\x00order-1"))
	if keys[0] != want || keys[0].Version() != 5 || keys[0] != keys[3] || keys[1] != keys[4] || keys[2] != keys[5] {
		t.Errorf("attempts differ: %v", keys)
	}
	seen := map[uuid.UUID]bool{}
	for _, k := range append(keys[:3:3], keys[6:]...) {
		seen[k] = true
	}
	if len(seen) != 6 {
		t.Errorf("not all different: %v", keys)
	}
}
