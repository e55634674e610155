package sqldrivers

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// TestOneConnectionOfPgx proves what a service that works with database/sql pays
// beside its own pool: one connection while a job runs, for the claim, heartbeats,
// what a fence has to ask, and the result. A second one is opened only for what is
// asked meanwhile, or when two of those coincide.
func TestOneConnectionOfPgx(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	begin := overSQL("pgx")(t, db.URL)
	for name, c := range map[string]struct {
		lease time.Duration
		work  func(ctx context.Context, r *jobrun.Runner, run *jobrun.Run) error
		lost  bool
		want  int64
	}{
		"heartbeats": {lease: time.Second, want: 1, work: func(ctx context.Context, _ *jobrun.Runner, run *jobrun.Run) error {
			beat := lastBeat(db, run.Key())
			return eventually("two heartbeats", func() bool { return lastBeat(db, run.Key()).Sub(beat) > time.Second/4 })
		}},
		"a lost lease": {lost: true, want: 1, work: func(ctx context.Context, _ *jobrun.Runner, run *jobrun.Run) error {
			if err := changeStatus(db, run.Key()); err != nil {
				return err
			}
			return begin(ctx, run, sql.LevelDefault, func(x tx) error { return x.fence(ctx) })
		}},
		"a question": {want: 2, work: func(ctx context.Context, r *jobrun.Runner, run *jobrun.Run) error {
			_, err := r.Get(ctx, run.Key())
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			exec(t, db, `TRUNCATE settlement_item`)
			pool := db.PoolWith(t, nil)
			r, err := jobrun.New(pool, time.UTC, &jobrun.Options{Lease: c.lease, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			_, err = execute(r, strings.ReplaceAll(name, " ", "-"), func(ctx context.Context, run *jobrun.Run) error {
				for order := range int64(20) {
					if err := settle(ctx, run, begin, order); err != nil {
						return err
					}
				}
				err := c.work(ctx, r, run)
				if n := pool.Stat().NewConnsCount(); n != c.want {
					t.Errorf("%d connections opened, want %d", n, c.want)
				}
				return err
			})
			if c.lost != (err != nil) {
				t.Error(err)
			}
			if err := r.Shutdown(t.Context()); err != nil || pool.Stat().AcquiredConns() != 0 {
				t.Errorf("%v; %d connections kept", err, pool.Stat().AcquiredConns())
			}
		})
	}
}

// lastBeat is the zero time if it cannot be read.
func lastBeat(db *pgtest.DB, key string) (at time.Time) {
	_ = db.Pool.QueryRow(context.Background(), `SELECT heartbeat_at FROM batch_job_attempt WHERE job_key = $1`, key).Scan(&at)
	return at
}

// TestTwoConnectionsForManyJobs proves that the least pool, of 2, is enough for
// jobs at once that work with database/sql, also if that borrows its connections
// from the same pool.
func TestTwoConnectionsForManyJobs(t *testing.T) {
	t.Parallel()
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared=%t", shared), func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
			r := newRunner(t, pool)
			own := openSQL(t, "pgx", db.URL)
			if shared {
				own = stdlib.OpenDBFromPool(pool)
				defer own.Close()
			}
			begin := sqlTx(own)
			const jobs, orders = 8, 5
			var wg, started sync.WaitGroup
			started.Add(jobs)
			for n := range int64(jobs) {
				wg.Go(func() {
					res, err := execute(r, fmt.Sprintf("job-%d", n), func(ctx context.Context, run *jobrun.Run) error {
						started.Done()
						started.Wait() // all of them run
						for order := range int64(orders) {
							if err := settle(ctx, run, begin, n*orders+order); err != nil {
								return err
							}
						}
						return nil
					})
					if err != nil || res.Record.Status != jobrun.Succeeded {
						t.Errorf("job %d: %+v, %v", n, res.Record, err)
					}
				})
			}
			wg.Wait()
			if n, balance := settled(t, db); n != jobs*orders || balance != jobs*orders*payout {
				t.Errorf("%d items, %d in all", n, balance)
			}
		})
	}
}
