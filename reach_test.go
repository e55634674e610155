package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
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

// transactions are the calls whose work is one transaction.
var transactions = map[string]func(ctx context.Context, run *jobrun.Run, work func(tx pgx.Tx) error) error{
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

// A server that is away for longer than a few tries take, as while another one is
// promoted, costs no attempt: first its host is silent, then it refuses.
func TestTransactionsWaitForAServer(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for what, call := range transactions {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
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
			f := launch(t, t.Context(), newRunner(t, pool, jobrun.Options{}), jobrun.Job{Name: what})
			down.Store(true)
			pool.Reset() // the heartbeats' connection stays
			calls := 0
			err := call(t.Context(), f.run, func(tx pgx.Tx) error { calls++; return effect(t.Context(), tx, 1) })
			if err != nil || calls != 1 || dials.Load() != silent+refused {
				t.Errorf("%v after %d calls, %d connections tried", err, calls, dials.Load())
			}
			f.succeeds(t, 1)
		})
	}
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1") })
}

func TestTransactionsWaitNoLongerThanTheLease(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	for what, call := range transactions {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
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
	}
	t.Cleanup(func() { effects(t, db.Pool, "") })
}

// A server that is away for longer than the default costs no result of those who say
// that it may.
func TestResultTimeout(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	for name, c := range map[string]struct {
		limit, away time.Duration
		recorded    bool
	}{
		"short": {5 * time.Second, time.Hour, false}, "default": {0, time.Hour, false}, "long": {time.Hour, 32 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var gone atomic.Int64 // since when, as Unix time in ns
			pool := db.PoolWith(t, func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams["application_name"] = name
				dial := config.ConnConfig.DialFunc
				config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
					if since := gone.Load(); since > 0 && time.Since(time.Unix(0, since)) < c.away {
						return nil, syscall.ECONNREFUSED
					}
					return dial(ctx, network, address)
				}
			})
			job := jobrun.Job{Name: name, Func: func(ctx context.Context, run *jobrun.Run) error {
				gone.Store(time.Now().UnixNano())
				pool.Reset()
				exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, name)
				return nil
			}}
			start := time.Now()
			res, err := newRunner(t, pool, jobrun.Options{ResultTimeout: c.limit}).RunDate(t.Context(), job, date)
			if took := time.Since(start); errors.Is(err, jobrun.ErrOutcomeUnknown) == c.recorded || (res.Record.Status == jobrun.Succeeded) != c.recorded || name == "short" && took > 29*time.Second {
				t.Errorf("%+v, %v after %s", res, err, took)
			}
		})
	}
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
			"demoted": {readOnly, 1, 2, ""}, "read-only": {readOnly, math.MaxInt, 2, "25006"}, "too-long": {tooLong, 1, 1, "25P03"},
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
	t.Cleanup(func() { effects(t, db.Pool, "1 1 1 1 1 1 1 1") })
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
