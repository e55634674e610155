package sqldrivers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

// TestErrorAfterTheFencedRowIsReturned proves that a serialization failure is not
// overlooked that the server finds after it has sent the row of the fence, as it
// does when it scans a small table to its end. COMMIT by a statement would then
// roll back without an error.
func TestErrorAfterTheFencedRowIsReturned(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"pgx", "postgres"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			r, serializable := newRunner(t, db.Pool), pgx.TxOptions{IsoLevel: pgx.Serializable}
			conn := openConn(t, openSQL(t, driver, db.URL))
			exec(t, db, `CREATE TABLE pivot (value integer); INSERT INTO pivot VALUES (0)`)
			_, err := execute(r, "first", func(ctx context.Context, run *jobrun.Run) error {
				// A row on another page, which the scan comes to after ours.
				exec(t, db, `
INSERT INTO batch_job_run (job_key, status, worker_id)
SELECT 'other-' || n, 'SUCCEEDED', 'other' FROM generate_series(1, 150) AS n`)
				if _, err := execute(r, "last", func(context.Context, *jobrun.Run) error { return nil }); err != nil {
					return err
				}
				exec(t, db, `ANALYZE batch_job_run`)
				rows, _ := db.Pool.Query(ctx, `EXPLAIN SELECT FROM batch_job_run WHERE job_key = 'x'`)
				if plan, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !strings.HasPrefix(plan[0], "Seq Scan") {
					return fmt.Errorf("plan %s: %w", plan, err)
				}
				// ours -> middle -> early: each reads what the next one changes, and early commits first.
				statements(t, conn, "BEGIN ISOLATION LEVEL SERIALIZABLE", "UPDATE merchant SET balance = 100")
				err := pgx.BeginTxFunc(ctx, db.Pool, serializable, func(middle pgx.Tx) error {
					if _, err := middle.Exec(ctx, `SELECT value FROM pivot`); err != nil {
						return err
					}
					if err := pgx.BeginTxFunc(ctx, db.Pool, serializable, func(early pgx.Tx) error {
						_, err := early.Exec(ctx, `UPDATE pivot SET value = 1`)
						return err
					}); err != nil {
						return err
					}
					_, err := middle.Exec(ctx, `UPDATE batch_job_run SET error_message = 'changed' WHERE job_key LIKE 'last:%'`)
					return err
				})
				if err != nil {
					return err
				}
				fenced := run.FenceSQL(ctx, conn)
				_, committed := conn.ExecContext(ctx, "COMMIT")
				_, balance := settled(t, db)
				if fenced == nil || !strings.Contains(fenced.Error(), "40001") || balance != 0 {
					t.Errorf("FenceSQL: %v; COMMIT: %v; balance %d", fenced, committed, balance)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
