package jobrun_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

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

// effect writes one row for an item.
func effect(ctx context.Context, tx pgx.Tx, n int) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (item) VALUES ($1)`, n)
	return err
}

const effectTable = `CREATE TABLE effect (item integer NOT NULL)`

func TestEachDoesEveryItemOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, effectTable)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var got jobrun.EachResult
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily-settlement", Func: func(ctx context.Context, run *jobrun.Run) (err error) {
		got, err = jobrun.Each(ctx, run, jobrun.FromSlice(numbers(1234)), orderKey, effect, nil)
		return err
	}}, date)
	if err != nil || got != (jobrun.EachResult{Done: 1234}) || res.Record.ItemsProcessed != 1234 {
		t.Fatalf("%+v, %+v, %v", got, res.Record, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(DISTINCT item) * 10000 + count(*) FROM effect`); n != 12341234 {
		t.Errorf("effects: %d", n)
	}
}
