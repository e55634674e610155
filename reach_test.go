package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
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

// transaction is a call whose work is one transaction.
type transaction func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error

var transactions = map[string]transaction{
	"tx": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error { return run.Tx(ctx, work) },
	"once": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error {
		ran, err := run.Once(ctx, "item", work)
		if err == nil && !ran {
			return errors.New("it did not run")
		}
		return err
	},
	"complete": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error {
		return run.Complete(ctx, work)
	},
	"each": func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error {
		res, err := jobrun.Each(ctx, run, jobrun.FromSlice([]int{1}), orderKey, func(_ context.Context, tx pgx.Tx, _ int) error { return work(tx) }, nil)
		if err == nil && res.Done != 1 {
			return fmt.Errorf("%+v", res)
		}
		return err
	},
}

// together runs a test for each of the cases, all at the same time: they mostly wait, and
// would take the places of tests that do something.
func together[V any](t *testing.T, cases map[string]V, test func(t *testing.T, name string, c V)) {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for name, c := range cases {
		wg.Go(func() { t.Run(name, func(t *testing.T) { test(t, name, c) }) })
	}
}

// A server that is away for longer than a few tries take, as while another one is
// promoted, costs no attempt: first its host is silent, then it refuses.
func TestTransactionsWaitForAServer(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	together(t, transactions, func(t *testing.T, what string, call transaction) {
		const silent, refused = 2, 8
		var down atomic.Bool
		var dials atomic.Int64
		pool := db.PoolWith(t, func(c *pgxpool.Config) {
			dial := c.ConnConfig.DialFunc
			c.ConnConfig.ConnectTimeout = 200 * time.Millisecond
			c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				if !down.Load() {
					return dial(ctx, network, address)
				}
				switch n := dials.Add(1); {
				case n <= silent:
					<-ctx.Done()
					return nil, ctx.Err()
				case n == silent+refused:
					down.Store(false)
				}
				return nil, syscall.ECONNREFUSED
			}
		})
		logger, text := logged()
		f := launch(t, t.Context(), newRunner(t, pool, jobrun.Options{Logger: logger}), jobrun.Job{Name: what})
		down.Store(true)
		pool.Reset() // the heartbeats' connection stays
		calls := 0
		err := call(t.Context(), f.run, func(tx pgx.Tx) error { calls++; return effect(t.Context(), tx, 1) })
		if err != nil || calls != 1 || dials.Load() != silent+refused {
			t.Errorf("%v after %d calls, %d connections tried", err, calls, dials.Load())
		}
		if told := text.lines("level=WARN", "work waits for the database", "job_key="+what+":2026-09-15"); len(told) != 1 {
			t.Errorf("logged %q", told)
		}
		f.succeeds(t, 1)
	})
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1") })
}

// A host that is silent, and no limit of its own on connecting: that is not a pool that is
// used up.
func TestTransactionsWaitForASilentServer(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	var down atomic.Bool
	var dials atomic.Int64
	release := make(chan struct{})
	pool := db.PoolWith(t, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if down.Load() && dials.Add(1) <= 2 {
				<-release
				return nil, syscall.ETIMEDOUT
			}
			return dial(ctx, network, address)
		}
	})
	t.Cleanup(func() { close(release) })
	f := launch(t, t.Context(), newRunner(t, pool, jobrun.Options{Lease: time.Second}), jobrun.Job{Name: "daily"})
	down.Store(true)
	pool.Reset() // the heartbeats' connection stays
	calls := 0
	if err := f.run.Tx(f.ctx, func(tx pgx.Tx) error { calls++; return effect(t.Context(), tx, 1) }); err != nil || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	f.succeeds(t, 1)
	effects(t, db.Pool, "1")
}

// Also a call with a context that does not know of the end of the process.
func TestShutdownEndsTheWaitForAServer(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	var down atomic.Bool
	pool := db.PoolWith(t, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if down.Load() {
				return nil, syscall.ECONNREFUSED
			}
			return dial(ctx, network, address)
		}
	})
	logger, text := logged()
	r := newRunner(t, pool, jobrun.Options{Logger: logger})
	var told error
	ended := make(chan error, 1)
	go func() {
		_, err := r.RunDate(context.Background(), jobrun.Job{Name: "daily", Func: func(_ context.Context, run *jobrun.Run) error {
			down.Store(true)
			pool.Reset() // the heartbeats' connection stays
			told = run.Tx(context.Background(), func(tx pgx.Tx) error { return effect(context.Background(), tx, 1) })
			return told
		}}, date)
		ended <- err
	}()
	eventually(t, "it waits", func() bool { return len(text.lines("work waits for the database")) > 0 })
	now, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Shutdown(now); err == nil || !strings.Contains(err.Error(), "interrupted daily:2026-09-15") {
		t.Errorf("Shutdown: %v", err)
	}
	if err := <-ended; !errors.Is(told, jobrun.ErrShutdown) || !errors.Is(err, jobrun.ErrShutdown) {
		t.Errorf("Tx: %v; the run: %v", told, err)
	}
	if rec := recordOf(t, newRunner(t, db.Pool, jobrun.Options{}), "daily:2026-09-15"); rec.Status != jobrun.Failed {
		t.Errorf("%+v", rec)
	}
}

func TestTransactionsWaitNoLongerThanTheLease(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	together(t, transactions, func(t *testing.T, what string, call transaction) {
		p, r := proxied(t, db, jobrun.Options{Lease: 2 * time.Second})
		f := launch(t, t.Context(), r, jobrun.Job{Name: what})
		p.RefuseNew(true)
		p.CutAll()
		for name, ctx := range map[string]context.Context{"the function's": f.ctx, "another": t.Context()} {
			if err := call(ctx, f.run, func(tx pgx.Tx) error { return effect(ctx, tx, 1) }); !errors.Is(err, jobrun.ErrLeaseLost) {
				t.Errorf("with %s context: %v", name, err)
			}
		}
		p.RefuseNew(false)
		_, _ = f.end(t, nil) // TestUnreachableForLongerThanTheLease
	})
	t.Cleanup(func() { effects(t, db.Pool, "") })
}

// away is a pool whose connections all break, and which gets no new one for that long,
// when leave is called.
func away(t *testing.T, db *pgtest.DB, name string, long time.Duration) (pool *pgxpool.Pool, leave func()) {
	t.Helper()
	pgtest.NeedsSessions(t)
	var since atomic.Int64 // Unix time in ns
	pool = db.PoolWith(t, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["application_name"] = name
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if since := since.Load(); since > 0 && time.Since(time.Unix(0, since)) < long {
				return nil, syscall.ECONNREFUSED
			}
			return dial(ctx, network, address)
		}
	})
	return pool, func() {
		since.Store(time.Now().UnixNano())
		exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND state = 'idle'`, name)
	}
}

// A server that is away for longer than the default costs no claim and no outcome of those
// who say that it may.
func TestDatabaseTimeout(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	type timeout struct {
		limit, long time.Duration
		claim, ends bool
	}
	together(t, map[string]timeout{
		"claim-short": {5 * time.Second, time.Hour, true, false}, "claim-long": {time.Hour, 32 * time.Second, true, true},
		"result-short": {5 * time.Second, time.Hour, false, false}, "result-long": {time.Hour, 32 * time.Second, false, true},
		"claim-default": {0, time.Hour, true, false}, "result-default": {0, time.Hour, false, false},
	}, func(t *testing.T, name string, c timeout) {
		pool, leave := away(t, db, name, c.long)
		executed := false
		job := jobrun.Job{Name: name, Func: func(ctx context.Context, run *jobrun.Run) error {
			_, err := run.Once(ctx, "item", func(pgx.Tx) error { return nil }) // which the end of the run looks for
			if executed = true; !c.claim {
				leave()
			}
			return err
		}}
		r := newRunner(t, pool, jobrun.Options{DatabaseTimeout: c.limit})
		if c.claim {
			leave()
		}
		start := time.Now()
		res, err := r.RunDate(t.Context(), job, date)
		if took := time.Since(start); executed != (c.ends || !c.claim) || (err == nil) != c.ends || errors.Is(err, jobrun.ErrOutcomeUnknown) != (!c.ends && !c.claim) || c.limit == 5*time.Second && took > 9*time.Second || executed && !c.ends && !strings.Contains(err.Error(), "ended SUCCEEDED") {
			t.Errorf("%+v, %v after %s, executed %t", res, err, took, executed)
		}
	})
}

// While nobody can read whether the attempt still holds its run, it is not over.
func TestServerIsGoneAfterASerializationFailure(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	pool, leave := away(t, db, "daily", 13*time.Second) // longer than the look at the run may take
	f := launch(t, t.Context(), newRunner(t, pool, jobrun.Options{}), jobrun.Job{Name: "daily"})
	calls := 0
	err := f.run.Tx(t.Context(), func(tx pgx.Tx) error {
		if calls++; calls > 1 {
			return effect(t.Context(), tx, 1)
		}
		_, err := tx.Exec(t.Context(), `DO $$ BEGIN RAISE EXCEPTION 'injected' USING ERRCODE = '40001'; END $$`)
		leave()
		return err
	})
	if err != nil || calls != 2 {
		t.Errorf("%v after %d calls", err, calls)
	}
	f.succeeds(t, 1)
	effects(t, db.Pool, "1")
}

// Work whose connection is lost before the COMMIT is repeated, but only once: what
// crashes its server is not sent for ever. Nor is what the server ends for its length.
func TestWorkIsRepeatedOnceWhenItsConnectionIsLost(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	terminate := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		return err
	}
	readOnly := func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL transaction_read_only = on`); err != nil {
			return err
		}
		return effect(ctx, tx, 9)
	}
	demoted := func(ctx context.Context, tx pgx.Tx) error { // the fence finds it out
		_, err := tx.Exec(ctx, `SET LOCAL transaction_read_only = on`)
		return err
	}
	tooLong := func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '50ms'`); err != nil {
			return err
		}
		eventually(t, "the session ends", func() bool {
			return query[bool](t, db.Pool, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1::integer)`, int32(tx.Conn().PgConn().PID()))
		})
		return effect(ctx, tx, 9)
	}
	for what, call := range transactions {
		for name, c := range map[string]struct {
			fault        func(ctx context.Context, tx pgx.Tx) error
			times, calls int
			code         string // of the error; empty: none
		}{
			"lost": {terminate, 1, 2, ""}, "lost-again": {terminate, math.MaxInt, 2, "57P01"},
			"demoted": {readOnly, 1, 2, ""}, "demoted-later": {demoted, 1, 2, ""}, "read-only": {readOnly, math.MaxInt, 2, "25006"}, "too-long": {tooLong, 1, 1, "25P03"},
		} {
			t.Run(what+"/"+name, func(t *testing.T) {
				t.Parallel()
				if name == "too-long" { // by its process
					pgtest.NeedsSessions(t)
				}
				f := launch(t, t.Context(), newRunner(t, db.PoolWith(t, nil), jobrun.Options{}), jobrun.Job{Name: what + "-" + name})
				calls := 0
				err := call(t.Context(), f.run, func(tx pgx.Tx) error {
					if calls++; calls <= c.times {
						return c.fault(t.Context(), tx)
					}
					return effect(t.Context(), tx, 1)
				})
				var pg *pgconn.PgError
				if calls != c.calls || (err == nil) != (c.code == "") || err != nil && (!errors.As(err, &pg) || pg.Code != c.code) {
					t.Errorf("%v after %d calls", err, calls)
				}
				if what == "each" && err != nil {
					readAll(t, f)
					return
				}
				f.succeeds(t, 1)
			})
		}
	}
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1 1 1 1 1 1 1 1 1") })
}

// After a failover to a server that lacks items which were acknowledged, the run is not
// SUCCEEDED, and the next attempt does them again. Where nothing is lost, nothing fails.
func TestItemsThatAFailoverLostAreDoneAgain(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := effectDB(t)
	// As after a failover: the start of the server is never the same.
	exec(t, db.Pool, `CREATE SCHEMA another; CREATE FUNCTION another.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql AS 'SELECT clock_timestamp()'`)
	moves := func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "another, pg_catalog, public" }
	for name, c := range map[string]struct {
		moves, loses bool
		end          func(ctx context.Context, run *jobrun.Run) error
	}{
		"lost": {true, true, nil}, "kept": {true, false, nil}, "same server": {false, false, nil},
		"lost before Complete": {true, true, func(ctx context.Context, run *jobrun.Run) error { return run.Complete(ctx, nil) }},
		"kept before Complete": {true, false, func(ctx context.Context, run *jobrun.Run) error { return run.Complete(ctx, nil) }},
		"lost before SkipRun":  {true, true, func(context.Context, *jobrun.Run) error { return jobrun.SkipRun("none today") }},
		"ignored error of Complete": {true, true, func(ctx context.Context, run *jobrun.Run) error {
			_ = run.Complete(ctx, nil)
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := moves
			if !c.moves {
				set = nil
			}
			r := newRunner(t, db.PoolWith(t, set), jobrun.Options{Schema: "public"})
			job := jobrun.Job{Name: strings.ReplaceAll(name, " ", "-"), Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
			var executed []int
			job.Func = func(ctx context.Context, run *jobrun.Run) error {
				_, err := jobrun.Each(ctx, run, jobrun.FromSlice(numbers(30)), orderKey, func(_ context.Context, _ pgx.Tx, n int) error {
					executed = append(executed, n)
					return nil
				}, &jobrun.EachOptions{ChunkSize: 10})
				if _, once := run.Once(ctx, "last", func(pgx.Tx) error { executed = append(executed, 31); return nil }); err != nil || once != nil {
					return errors.Join(err, once)
				}
				if c.loses && run.Attempt() == 1 {
					exec(t, db.Pool, `DELETE FROM batch_job_item WHERE job_key = $1 AND item IN ('order-29', 'order-30', 'last')`, run.Key())
				}
				if c.end != nil {
					return c.end(ctx, run)
				}
				return nil
			}
			res, err := r.RunDate(t.Context(), job, date)
			if !c.loses {
				if err != nil || res.Record.Status != jobrun.Succeeded || len(executed) != 31 {
					t.Errorf("%+v, %v, %d items", res, err, len(executed))
				}
				return
			}
			if err == nil || res.Record.Status != jobrun.Failed || !strings.Contains(res.Record.Error, "has 28 of the 31 of attempt 1") || len(executed) != 31 {
				t.Errorf("attempt 1: %+v, %v, %d items", res, err, len(executed))
			}
			all, err := r.RetryDue(t.Context(), job)
			if err != nil || len(all) != 1 || all[0].Record.Status == jobrun.Failed || !slices.Equal(executed[31:], []int{29, 30, 31}) {
				t.Errorf("attempt 2: %+v, %v, items %v", all, err, executed[31:])
			}
		})
	}
}

// So is a transaction whose connection is lost at a statement of jobrun's own.
func TestWorkIsRepeatedWhenItsFenceIsLost(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for what, call := range transactions {
		for name, cut := range map[string]func(p *pgtest.Proxy, match string){"before": (*pgtest.Proxy).CutBefore, "after": (*pgtest.Proxy).CutAfter} {
			t.Run(fmt.Sprintf("%s/%s", what, name), func(t *testing.T) {
				t.Parallel()
				p, r := proxied(t, db, jobrun.Options{})
				f := launch(t, t.Context(), r, jobrun.Job{Name: what + "-" + name})
				match := "FOR SHARE OF r"
				if what == "complete" {
					match = sealStatement
				}
				cut(p, match)
				calls := 0
				err := call(t.Context(), f.run, func(tx pgx.Tx) error { calls++; return effect(t.Context(), tx, 1) })
				if err != nil || calls != 2 || p.Cuts() != 1 {
					t.Errorf("%v after %d calls, %d cuts", err, calls, p.Cuts())
				}
				f.succeeds(t, 1)
			})
		}
	}
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1 1 1 1 1") })
}

// A session that a pooler gives to others has their prepared statements: the error says
// what to do about it.
func TestErrorOfASharedSessionNamesThePooler(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE FUNCTION taken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'prepared statement "stmtcache_1" already exists' USING ERRCODE = '42P05'; END $$`)
	exec(t, db.Pool, `CREATE TRIGGER taken BEFORE INSERT ON batch_job_run FOR EACH ROW EXECUTE FUNCTION taken()`)
	r := newRunner(t, db.Pool, jobrun.Options{DatabaseTimeout: 5 * time.Second})
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}, date)
	if err == nil || res.Ran() || !strings.Contains(err.Error(), "default_query_exec_mode=exec") {
		t.Errorf("%+v, %v", res, err)
	}
}
