package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Begin begins a transaction for work. The server ends it when it waits for a
// lock, or for its client, longer than limit: a process that was stopped cannot
// hold what it has locked for ever. No query has run yet, so its isolation level
// may still be set.
func (s *Store) Begin(ctx context.Context, conn *pgx.Conn, limit time.Duration) (pgx.Tx, error) {
	return conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL lock_timeout = %[1]s; SET LOCAL idle_in_transaction_session_timeout = %[1]s", millis(limit))})
}

// fenceSQL is the last statement of a fenced transaction. It takes the key's
// advisory lock shared, then locks the run row FOR SHARE if it is still the
// attempt's and RUNNING, each for at most lock_timeout; both are held until the
// commit, so nobody can change the run before it. Under READ COMMITTED a run that
// was changed meanwhile gives no row, under stricter levels 40001.
//
// Outside a transaction it would hold nothing. A transaction that has written has
// an id before; of one without, the next statement tells (sameSQL).
const fenceSQL = `
WITH bound AS MATERIALIZED (
  SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS written,
    set_config('lock_timeout', $5::text, true), set_config('idle_in_transaction_session_timeout', $6::text, true),
    ` + durable + `, pg_advisory_xact_lock_shared(` + keyLock + `)
)
SELECT pg_current_xact_id()::text, extract(epoch FROM pg_postmaster_start_time())::text, bound.written
FROM bound
CROSS JOIN batch_job_run AS r
WHERE r.job_key = $1::text
  AND r.attempt = $2::integer
  AND r.token = $3::text::uuid
  AND r.worker_id = $4::text
  AND r.status || '' = 'RUNNING'
FOR SHARE OF r`

// sealSQL is fenceSQL for the transaction that ends the attempt itself: the
// advisory lock is exclusive and the row lock that of the change that follows.
const sealSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $5::text, true), set_config('idle_in_transaction_session_timeout', $6::text, true),
    ` + durable + `, pg_advisory_xact_lock(` + keyLock + `)
)
SELECT pg_current_xact_id()::text, extract(epoch FROM pg_postmaster_start_time())::text, true
FROM bound
CROSS JOIN batch_job_run AS r
WHERE r.job_key = $1::text
  AND r.attempt = $2::integer
  AND r.token = $3::text::uuid
  AND r.worker_id = $4::text
  AND r.status || '' = 'RUNNING'
FOR NO KEY UPDATE OF r`

// sameSQL tells whether a statement belongs to the transaction of an id.
const sameSQL = `SELECT coalesce(pg_current_xact_id_if_assigned()::text = $1::text, false)`

// Mark names a transaction, so that its fate can be asked for when the answer to
// its COMMIT is lost.
type Mark struct {
	ID     string // of the transaction
	Server string // start of the server that has it: after a failover another may have the same id
}

// ErrNoTransaction says that a fence was called outside a transaction.
var ErrNoTransaction error = Refusal("the fence needs an open transaction, which it protects until the commit: this is none")

func fenceArgs(row Row, lock, idle time.Duration) []any {
	return []any{row.Key, int64(row.Attempt), row.Token, row.Worker, millis(lock), millis(idle)}
}

// Fence locks the run until the transaction's commit. Found is false when it is
// not, or no longer, the attempt's.
func (s *Store) Fence(ctx context.Context, tx DB, row Row, lock, idle time.Duration) (mark Mark, found bool, err error) {
	written := false
	scan := func(r pgx.CollectableRow) (m Mark, err error) { return m, r.Scan(&m.ID, &m.Server, &written) }
	rows, err := tx.Query(ctx, s.fence, fenceArgs(row, lock, idle)...)
	if mark, found, err = one(rows, err, scan); err != nil || !found || written {
		return mark, found, err
	}
	rows, err = tx.Query(ctx, sameSQL, mark.ID)
	same, _, err := one(rows, err, pgx.RowTo[bool])
	if err == nil && !same {
		err = ErrNoTransaction
	}
	return mark, found, err
}

// Seal is Fence for the transaction that ends the attempt.
func (s *Store) Seal(ctx context.Context, tx DB, row Row, lock, idle time.Duration) (mark Mark, found bool, err error) {
	rows, err := tx.Query(ctx, s.seal, fenceArgs(row, lock, idle)...)
	return one(rows, err, func(r pgx.CollectableRow) (m Mark, err error) { return m, r.Scan(&m.ID, &m.Server, new(bool)) })
}

// SQLTx is a transaction of database/sql.
type SQLTx interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// FenceSQL is Fence for database/sql.
func (s *Store) FenceSQL(ctx context.Context, tx SQLTx, row Row, lock, idle time.Duration) (found bool, err error) {
	var mark Mark
	written := false
	found, err = queryOne(ctx, tx, s.fence, fenceArgs(row, lock, idle), &mark.ID, &mark.Server, &written)
	if err != nil || !found || written {
		return found, err
	}
	same := false
	if _, err = queryOne(ctx, tx, sameSQL, []any{mark.ID}, &same); err == nil && !same {
		err = ErrNoTransaction
	}
	return found, err
}

// queryOne scans the only row of a query.
func queryOne(ctx context.Context, tx SQLTx, query string, args []any, into ...any) (found bool, err error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return false, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() { // to the end: the server may fail the transaction after it has sent the row
		if err := rows.Scan(into...); err != nil {
			return false, err
		}
		found = true
	}
	return found, rows.Err()
}

// fateSQL asks what became of a transaction; it locks nothing.
const fateSQL = `SELECT coalesce(pg_xact_status($1::text::xid8), ''), extract(epoch FROM pg_postmaster_start_time())::text`

// Fate returns "committed", "aborted", "in progress", or "" when this server
// cannot know.
func (s *Store) Fate(ctx context.Context, db DB, mark Mark) (string, error) {
	rows, err := db.Query(ctx, fateSQL, mark.ID)
	status, _, err := one(rows, err, func(r pgx.CollectableRow) (status string, err error) {
		server := ""
		if err = r.Scan(&status, &server); server != mark.Server {
			status = ""
		}
		return status, err
	})
	if Code(err) == "22023" { // an id that this server has not come to
		return "", nil
	}
	return status, err
}
