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
// may still be set. The name, a UUID, tells the fence that it is still the same
// transaction: the work may have ended it and begun another.
func (s *Store) Begin(ctx context.Context, conn *pgx.Conn, name string, limit time.Duration) (pgx.Tx, error) {
	return conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"BEGIN; SET LOCAL lock_timeout = %[1]s; SET LOCAL idle_in_transaction_session_timeout = %[1]s; SET LOCAL jobrun.transaction = '%[2]s'",
		millis(limit), name)})
}

// fenceSQL is the last statement of a fenced transaction. It takes the key's
// advisory lock shared, then locks the run row FOR SHARE if it is still the
// attempt's and RUNNING, each for at most lock_timeout; both are held until the
// commit, so nobody can change the run before it. Under READ COMMITTED a run that
// was changed meanwhile gives no row, under stricter levels 40001.
//
// $7 is the name that Begin gave the transaction. Outside a transaction it would
// hold nothing: one that has written has an id before; of one without, the next
// statement tells (sameSQL).
const fenceSQL = `
WITH bound AS MATERIALIZED (
  SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS written,
    set_config('lock_timeout', $5::text, true), set_config('idle_in_transaction_session_timeout', $6::text, true),
    ` + durable + `, pg_advisory_xact_lock_shared(` + keyLock + `)
)
SELECT` + markColumns + `, bound.written
FROM bound
CROSS JOIN batch_job_run AS r
WHERE ` + stillOurs + `
FOR SHARE OF r`

// sealSQL is fenceSQL for the transaction that ends the attempt itself: the
// advisory lock is exclusive and the row lock that of the change that follows.
const sealSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $5::text, true), set_config('idle_in_transaction_session_timeout', $6::text, true),
    ` + durable + `, pg_advisory_xact_lock(` + keyLock + `)
)
SELECT` + markColumns + `, true
FROM bound
CROSS JOIN batch_job_run AS r
WHERE ` + stillOurs + `
FOR NO KEY UPDATE OF r`

// stillOurs holds while a run r is RUNNING under the attempt, the token and the
// worker of fenceArgs. The status is compared as an expression, so that the row is
// reached by its key.
const stillOurs = `r.job_key = $1::text
    AND r.attempt = $2::integer
    AND r.token = $3::text::uuid
    AND r.worker_id = $4::text
    AND r.status || '' = 'RUNNING'`

// markColumns reads a Mark, and whether the transaction is the one of the name $7.
const markColumns = `
  pg_current_xact_id()::text, extract(epoch FROM pg_postmaster_start_time())::text, extract(epoch FROM clock_timestamp())::text,
  coalesce(current_setting('jobrun.transaction', true), '') = $7::text`

// sameSQL tells whether a statement belongs to the transaction of an id.
const sameSQL = `SELECT coalesce(pg_current_xact_id_if_assigned()::text = $1::text, false)`

// Mark names a transaction, so that its fate can be asked for when the answer to
// its COMMIT is lost.
type Mark struct {
	ID     string // of the transaction
	Server string // start of the server that has it: after a failover another may have the same id
	At     string // the server's clock before the commit: after a crash, too
}

// ErrNoTransaction says that a fence was called outside a transaction.
var ErrNoTransaction error = Refusal("the fence needs an open transaction, which it protects until the commit: this is none")

// ErrAnotherTransaction says that the work ended its transaction and began another.
var ErrAnotherTransaction error = Refusal("the work ended its transaction itself and began another (or reset its settings): what it did before is not protected by the lease")

func fenceArgs(row Row, name string, lock, idle time.Duration) []any {
	return []any{row.Key, int64(row.Attempt), row.Token, row.Worker, millis(lock), millis(idle), name}
}

// Fence locks the run until the commit of the transaction that Begin gave this
// name. Found is false when it is not, or no longer, the attempt's.
func (s *Store) Fence(ctx context.Context, tx DB, row Row, name string, lock, idle time.Duration) (mark Mark, found bool, err error) {
	return marked(ctx, tx, s.fence, fenceArgs(row, name, lock, idle))
}

// Seal is Fence for the transaction that ends the attempt.
func (s *Store) Seal(ctx context.Context, tx DB, row Row, name string, lock, idle time.Duration) (mark Mark, found bool, err error) {
	return marked(ctx, tx, s.seal, fenceArgs(row, name, lock, idle))
}

func marked(ctx context.Context, tx DB, sql string, args []any) (mark Mark, found bool, err error) {
	same := false
	rows, err := tx.Query(ctx, sql, args...)
	mark, found, err = one(rows, err, func(r pgx.CollectableRow) (m Mark, err error) {
		return m, r.Scan(&m.ID, &m.Server, &m.At, &same, new(bool))
	})
	if err == nil && found && !same {
		err = ErrAnotherTransaction
	}
	return mark, found, err
}

// FenceTheirs is Fence for a transaction of the caller's, which Begin did not begin.
func (s *Store) FenceTheirs(ctx context.Context, tx DB, row Row, lock, idle time.Duration) (found bool, err error) {
	query := func(into []any, sql string, args ...any) (bool, error) {
		rows, err := tx.Query(ctx, sql, args...)
		_, found, err := one(rows, err, func(r pgx.CollectableRow) (_ bool, err error) { return false, r.Scan(into...) })
		return found, err
	}
	return s.fenceTheirs(query, row, lock, idle)
}

// fenceTheirs fences a transaction, whichever way it is queried.
func (s *Store) fenceTheirs(query func(into []any, sql string, args ...any) (bool, error), row Row, lock, idle time.Duration) (bool, error) {
	var id, ignored string
	written, same := false, false
	found, err := query([]any{&id, &ignored, &ignored, new(bool), &written}, s.fence, fenceArgs(row, "", lock, idle)...)
	if err != nil || !found || written {
		return found, err
	}
	if _, err = query([]any{&same}, sameSQL, id); err == nil && !same {
		err = ErrNoTransaction
	}
	return found, err
}

// SQLTx is a transaction of database/sql.
type SQLTx interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// FenceSQL is FenceTheirs for database/sql.
func (s *Store) FenceSQL(ctx context.Context, tx SQLTx, row Row, lock, idle time.Duration) (found bool, err error) {
	return s.fenceTheirs(func(into []any, sql string, args ...any) (bool, error) { return queryOne(ctx, tx, sql, args, into...) }, row, lock, idle)
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

// fateSQL asks what became of a transaction; it locks nothing. The statistics are
// reset by a restart after a crash, and after one the id of a transaction that was
// lost may be another's. A standby, which may lag behind, answers as read-only (25006).
const fateSQL = `
SELECT CASE WHEN pg_is_in_recovery() THEN pg_current_xact_id()::text ELSE '' END || coalesce(pg_xact_status($1::text::xid8), ''),
  extract(epoch FROM pg_postmaster_start_time())::text = $2::text
    AND (pg_xact_status($1::text::xid8) = 'in progress'
      OR coalesce(extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()) < $3::text::numeric, true))`

// Fate returns "committed", "aborted", "in progress", or "" when this server
// cannot know.
func (s *Store) Fate(ctx context.Context, db DB, mark Mark) (string, error) {
	rows, err := db.Query(ctx, fateSQL, mark.ID, mark.Server, mark.At)
	status, _, err := one(rows, err, func(r pgx.CollectableRow) (status string, err error) {
		same := false
		if err = r.Scan(&status, &same); !same {
			status = ""
		}
		return status, err
	})
	if Code(err) == "22023" { // an id that this server has not come to
		return "", nil
	}
	return status, err
}
