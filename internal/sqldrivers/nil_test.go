package sqldrivers

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// A pointer that is nil is no open transaction either; it must not panic.
func TestNilTransactionIsNoPanic(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	_, err := execute(newRunner(t, db.Pool), "job", func(ctx context.Context, run *jobrun.Run) error {
		for name, fence := range map[string]func() error{
			"FenceSQL": func() error { return run.FenceSQL(ctx, (*sql.Tx)(nil)) },
			"Fence":    func() error { return run.Fence(ctx, (*pgxpool.Tx)(nil)) },
		} {
			func() {
				defer func() {
					if p := recover(); p != nil {
						t.Errorf("%s panics: %v", name, p)
					}
				}()
				if err := fence(); !errors.As(err, new(*jobrun.InvalidError)) {
					t.Errorf("%s: %v", name, err)
				}
			}()
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// The tables of jobrun in another database know nothing of the run: that is no
// change "at the same moment", and the message should say what is wrong.
func TestFenceInAnotherDatabaseSaysSo(t *testing.T) {
	t.Parallel()
	db, other := newDB(t), newDB(t)
	pool := openSQL(t, "pgx", other.URL)
	_, err := execute(newRunner(t, db.Pool), "job", func(ctx context.Context, run *jobrun.Run) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		err = run.FenceSQL(ctx, tx)
		if err == nil || errors.Is(err, jobrun.ErrLeaseLost) || !strings.Contains(err.Error(), "not in the Runner's database") {
			t.Errorf("got %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
