package sqldrivers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

var levels = []sql.IsolationLevel{sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}

// TestSupersededAttemptWritesNothing proves that a transaction commits while the
// attempt holds its run, and that nothing of it is written once a person or plain
// SQL has ended the attempt, before or after the transaction's snapshot.
func TestSupersededAttemptWritesNothing(t *testing.T) {
	eachWay(t, true, func(t *testing.T, db *pgtest.DB, w way) {
		r, begin := newRunner(t, db.Pool), w.open(t, db.URL)
		supersede := map[string]func(key string) error{
			"nobody":     func(string) error { return nil },
			"MarkFailed": func(key string) error { return markFailed(r, key) },
			"plain SQL":  func(key string) error { return changeStatus(db, key) },
		}
		var order, items int64
		for _, level := range levels {
			for who, act := range supersede {
				for _, moment := range []string{"begun", "written", "only fenced"} {
					order++
					name := fmt.Sprintf("%s/%s/%s", level, who, moment)
					var err error // not that of the run, which tells of a lost lease anyway
					_, ended := execute(r, fmt.Sprintf("job-%d", order), func(ctx context.Context, run *jobrun.Run) error {
						err = begin(ctx, run, level, func(x tx) error {
							if moment != "written" {
								if err := act(run.Key()); err != nil {
									return err
								}
							}
							if moment != "only fenced" {
								if fresh, err := x.write(ctx, order); err != nil || !fresh {
									return fmt.Errorf("written %t: %w", fresh, err)
								}
							}
							if moment == "written" {
								if err := act(run.Key()); err != nil {
									return err
								}
							}
							return x.fence(ctx)
						})
						return err
					})
					switch {
					case who == "nobody" && (err != nil || ended != nil):
						t.Errorf("%s: %v; %v", name, err, ended)
					case who == "nobody" && moment != "only fenced":
						items++
					case who != "nobody" && !errors.Is(err, jobrun.ErrLeaseLost):
						t.Errorf("%s: got %v, want ErrLeaseLost", name, err)
					}
					if n, balance := settled(t, db); n != items || balance != items*payout {
						t.Fatalf("%s: %d items and %d in all, want %d items", name, n, balance, items)
					}
				}
			}
		}
	})
}

// TestFenceHoldsUntilTheCommit proves that whoever would supersede the attempt
// after the fence waits for the commit.
func TestFenceHoldsUntilTheCommit(t *testing.T) {
	eachWay(t, false, func(t *testing.T, db *pgtest.DB, w way) {
		r, person, begin := newRunner(t, db.Pool), newRunner(t, db.PoolWith(t, nil)), w.open(t, db.URL)
		supersede := map[string]func(key string) error{
			"MarkFailed": func(key string) error { return markFailed(person, key) },
			"plain SQL":  func(key string) error { return changeStatus(db, key) },
		}
		var order int64
		for who, act := range supersede {
			order++
			done := make(chan error, 1)
			var after error
			_, err := execute(r, fmt.Sprintf("job-%d", order), func(ctx context.Context, run *jobrun.Run) error {
				err := begin(ctx, run, sql.LevelDefault, func(x tx) error {
					if _, err := x.write(ctx, order); err != nil {
						return err
					}
					if err := x.fence(ctx); err != nil {
						return err
					}
					go func() { done <- act(run.Key()) }()
					return eventually(who+" waits for a lock", func() bool {
						var waiting bool
						err := db.Pool.QueryRow(ctx, `
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waiting)
						if len(done) > 0 {
							t.Errorf("%s did not wait", who)
						}
						return len(done) > 0 || err == nil && waiting
					})
				})
				if err != nil {
					return err
				}
				if err := <-done; err != nil {
					t.Errorf("%s after the commit: %v", who, err)
				}
				after = begin(ctx, run, sql.LevelDefault, func(x tx) error { return x.fence(ctx) })
				return nil
			})
			if !errors.Is(after, jobrun.ErrLeaseLost) {
				t.Errorf("%s: %v; the next transaction: got %v, want ErrLeaseLost", who, err, after)
			}
			if n, balance := settled(t, db); n != order || balance != order*payout {
				t.Errorf("%s: %d items and %d in all, want %d items", who, n, balance, order)
			}
		}
	})
}
