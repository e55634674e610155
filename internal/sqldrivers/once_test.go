package sqldrivers

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// TestUniqueKeyAndFenceMakeOnce proves what a service without jobrun's ledger can
// rely on: with a unique key of its own and the fence in one transaction, every
// item takes effect once over a re-run, also when the answer to a COMMIT is lost.
func TestUniqueKeyAndFenceMakeOnce(t *testing.T) {
	t.Parallel()
	for name, open := range snippets {
		t.Run("README/"+name, func(t *testing.T) {
			t.Parallel()
			once(t, newDB(t), name != "sqlc", open)
		})
	}
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			once(t, newDB(t), !w.own, func(t *testing.T, url string) settleFunc {
				begin := w.open(t, url)
				return func(ctx context.Context, run *jobrun.Run, order int64) error { return settle(ctx, run, begin, order) }
			})
		})
	}
}

// once executes a run of 9 orders: the first attempt fails at the 3rd, whose COMMIT
// may be cut, the second does what is left.
func once(t *testing.T, db *pgtest.DB, cut bool, open func(*testing.T, string) settleFunc) {
	r, proxy := newRunner(t, db.Pool), pgtest.NewProxy(t, db.URL)
	settle, theirs := open(t, proxy.URL()), errors.New("the third order")
	all := func(ctx context.Context, run *jobrun.Run) error {
		for order := int64(1); order <= 9; order++ {
			third := order == 3 && run.Attempt() == 1
			if third && cut {
				proxy.CutAfter("^commit")
			}
			err := settle(ctx, run, order)
			if third && cut != (err != nil) || !third && err != nil {
				t.Errorf("attempt %d, order %d: %v", run.Attempt(), order, err)
			}
			if third {
				return errors.Join(theirs, err)
			}
		}
		return nil
	}
	first, err := execute(r, "job", all)
	if !errors.Is(err, theirs) || errors.Is(err, jobrun.ErrLeaseLost) || first.Record.Status != jobrun.Failed {
		t.Fatalf("first attempt: %s, %v", first.Record.Status, err)
	}
	if cut && proxy.Cuts() != 1 {
		t.Fatalf("%d connections cut", proxy.Cuts())
	}
	if n, balance := settled(t, db); n != 3 || balance != 3*payout { // the lost answer was that of a commit
		t.Errorf("%d items, %d in all after the first attempt", n, balance)
	}
	if _, err := r.ApproveRerun(t.Context(), first.Record, by(false)); err != nil {
		t.Fatal(err)
	}
	second, err := execute(r, "job", all)
	if err != nil || second.Record.Status != jobrun.Succeeded || second.Record.Attempt != 2 {
		t.Fatalf("second attempt: %+v, %v", second.Record, err)
	}
	if n, balance := settled(t, db); n != 9 || balance != 9*payout {
		t.Errorf("%d items, %d in all", n, balance)
	}
}

// TestStandingTransactionIsEnded proves that a process which stands still in a
// transaction of its own, before the fence, does not hold its unique keys for
// ever if the URL of its pool says so: the next attempt can go on, and the fence
// of the first one refuses.
func TestStandingTransactionIsEnded(t *testing.T) {
	eachWay(t, false, func(t *testing.T, db *pgtest.DB, w way) {
		standing := w.open(t, with(t, db.URL, "idle_in_transaction_session_timeout", "200ms"))
		first, second, begin := newRunner(t, db.Pool), newRunner(t, db.PoolWith(t, nil)), w.open(t, db.URL)
		_, err := execute(first, "job", func(ctx context.Context, run *jobrun.Run) error {
			var fenced error
			err := standing(ctx, run, sql.LevelDefault, func(x tx) error {
				if _, err := x.write(ctx, 1); err != nil {
					return err
				}
				if err := markFailed(second, run.Key()); err != nil {
					return err
				}
				rec, err := second.Get(ctx, run.Key())
				if err == nil {
					_, err = second.ApproveRerun(ctx, rec, by(false))
				}
				if err != nil {
					return err
				}
				res, err := execute(second, "job", func(ctx context.Context, run *jobrun.Run) error { return settle(ctx, run, begin, 1) })
				if err != nil || res.Record.Attempt != 2 {
					t.Errorf("second attempt: %+v, %v", res.Record, err)
				}
				fenced = x.fence(ctx)
				return fenced
			})
			if fenced == nil {
				t.Error("the fence of the first attempt did not refuse")
			}
			return err
		})
		if err == nil {
			t.Error("the first attempt succeeded")
		}
		if n, balance := settled(t, db); n != 1 || balance != payout {
			t.Errorf("%d items, %d in all", n, balance)
		}
	})
}
