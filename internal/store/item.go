package store

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// takeSQL writes the ledger's rows of those items that have none, in the order
// of their keys, so that two transactions cannot wait for each other. It waits
// for another transaction that is about to write the same item, at most
// lock_timeout. Which items are new is only answered when not all of them are.
const takeSQL = `
WITH taken AS (
  INSERT INTO batch_job_item AS i
    (job_key, item, attempt)
  SELECT $1::text, k.item, $2::integer
  FROM unnest($3::text[]) AS k (item)
  ORDER BY k.item COLLATE "C"
  ON CONFLICT (job_key, item) DO NOTHING
  RETURNING i.item
)
SELECT count(*), CASE WHEN count(*) < cardinality($3::text[]) THEN array_agg(item) END
FROM taken`

// Take enters the items in the run's ledger and returns those that were not in it:
// nil and all true when none was.
func (s *Store) Take(ctx context.Context, tx DB, row Row, items []string) (taken []string, all bool, err error) {
	rows, err := tx.Query(ctx, s.take, row.Key, int64(row.Attempt), items)
	_, _, err = one(rows, err, func(r pgx.CollectableRow) (n int64, err error) {
		err = r.Scan(&n, &taken)
		all = n == int64(len(items))
		return n, err
	})
	return taken, all, err
}

// doneSQL counts those of the items that are in the ledger, each by the primary
// key, whatever the planner knows of the table; it locks nothing.
const doneSQL = `
SELECT count((SELECT 1 FROM batch_job_item AS i WHERE i.job_key = $1::text AND i.item = k.item COLLATE "C" LIMIT 1))
FROM unnest($2::text[]) AS k (item)`

// AllDone reports whether the ledger has every one of the items.
func (s *Store) AllDone(ctx context.Context, db DB, key string, items []string) (bool, error) {
	rows, err := db.Query(ctx, s.done, key, items)
	n, _, err := one(rows, err, pgx.RowTo[int64])
	return n == int64(len(items)), err
}

// keptSQL tells whether the ledger has as many items of an attempt as it was told are
// done. They are counted only if this is not the server that said so; nothing is locked.
const keptSQL = `
SELECT CASE WHEN extract(epoch FROM pg_postmaster_start_time())::text = $4::text THEN $3::bigint
  ELSE (SELECT count(*) FROM batch_job_item AS i WHERE i.job_key = $1::text AND i.attempt = $2::integer) END`

// Kept returns how many of the items that the server of that start has acknowledged are
// in the ledger: another one, to which replication was asynchronous, may lack the last.
func (s *Store) Kept(ctx context.Context, db DB, row Row, items int64, server string) (int64, error) {
	rows, err := db.Query(ctx, s.kept, row.Key, int64(row.Attempt), items, server)
	n, _, err := one(rows, err, pgx.RowTo[int64])
	return n, err
}

// failItemSQL notes the failure of an item, in a transaction of its own that is
// fenced as fenceSQL is. A repeated statement of the same attempt counts once.
const failItemSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $5::text, true), ` + durable + `, pg_advisory_xact_lock_shared(` + keyLock + `)
), held AS MATERIALIZED (
  SELECT r.job_key
  FROM bound
  CROSS JOIN batch_job_run AS r
  WHERE ` + stillOurs + `
  FOR SHARE OF r
)
INSERT INTO batch_job_item_failure AS f
  (job_key, item, attempt, error_message)
SELECT job_key, $6::text, $2::integer, $7::text
FROM held
ON CONFLICT (job_key, item) DO UPDATE
SET failures = f.failures + CASE WHEN f.attempt < excluded.attempt THEN 1 ELSE 0 END,
  attempt = excluded.attempt, failed_at = excluded.failed_at, error_message = excluded.error_message
RETURNING 1`

// FailItem notes the failure of an item. Found is false when the run is not, or
// no longer, the attempt's.
func (s *Store) FailItem(ctx context.Context, db DB, row Row, item, text string, lock time.Duration) (found bool, err error) {
	rows, err := db.Query(ctx, s.failItem, row.Key, int64(row.Attempt), row.Token, row.Worker, millis(lock), item, text)
	_, found, err = one(rows, err, pgx.RowTo[int])
	return found, err
}

const failedItemsSQL = `
SELECT f.item, f.attempt, f.failures, f.failed_at, f.error_message
FROM batch_job_item_failure AS f
WHERE f.job_key = $1::text
  AND f.item > $2::text COLLATE "C"
  AND NOT EXISTS (SELECT FROM batch_job_item AS i WHERE i.job_key = f.job_key AND i.item = f.item)
ORDER BY f.item
LIMIT $3::integer`

// FailedItem is an item that failed and is not done.
type FailedItem struct {
	Item              string
	Attempt, Failures int
	At                time.Time
	Error             string
}

// FailedItems lists the items of a run that failed and are not done, in the order
// of their keys, after one.
func (s *Store) FailedItems(ctx context.Context, db DB, key, after string, limit int) ([]FailedItem, error) {
	rows, err := db.Query(ctx, s.failedItems, key, after, int64(limit))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (f FailedItem, err error) {
		var at pgtype.Timestamptz
		err = r.Scan(&f.Item, &f.Attempt, &f.Failures, &at, &f.Error)
		f.At = at.Time
		return f, err
	})
}

const countItemsSQL = `
SELECT (SELECT count(*) FROM batch_job_item AS i WHERE i.job_key = $1::text), (
  SELECT count(*)
  FROM batch_job_item_failure AS f
  WHERE f.job_key = $1::text
    AND NOT EXISTS (SELECT FROM batch_job_item AS i WHERE i.job_key = f.job_key AND i.item = f.item))`

// CountItems counts the items of a run that are done, and that failed and are not.
func (s *Store) CountItems(ctx context.Context, db DB, key string) (done, failed int64, err error) {
	rows, err := db.Query(ctx, s.countItems, key)
	_, _, err = one(rows, err, func(r pgx.CollectableRow) (_ bool, err error) { return false, r.Scan(&done, &failed) })
	return done, failed, err
}

// holdersSQL lists the sessions that may hold an item for which this one has
// waited: their transactions have written to the ledger and are older than the
// wait, or of a role that this one may not see.
const holdersSQL = `
SELECT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.client_addr::text, 'local'),
  coalesce(a.state, 'unknown'), coalesce((extract(epoch FROM clock_timestamp() - a.xact_start) * 1000)::bigint, 0)
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_class AS c
  ON c.oid = l.relation AND c.relname = 'batch_job_item'
JOIN pg_catalog.pg_namespace AS n
  ON n.oid = c.relnamespace AND n.nspname = $2::text
JOIN pg_catalog.pg_stat_activity AS a
  ON a.pid = l.pid
WHERE l.locktype = 'relation'
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
  AND l.mode = 'RowExclusiveLock'
  AND l.granted
  AND (a.state IS NULL OR a.xact_start < clock_timestamp() - $1::bigint * interval '1 millisecond')
ORDER BY a.xact_start
LIMIT 10`

// Holder is a session that may hold an item.
type Holder struct {
	PID                              int
	User, Application, Client, State string
	Age                              time.Duration // of its transaction
}

// Holders lists the sessions whose transactions have written to the ledger and
// are older than waited, oldest first, at most 10.
func (s *Store) Holders(ctx context.Context, db DB, waited time.Duration) ([]Holder, error) {
	rows, err := db.Query(ctx, holdersSQL, waited.Milliseconds(), s.Schema)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (h Holder, err error) {
		var age int64
		err = r.Scan(&h.PID, &h.User, &h.Application, &h.Client, &h.State, &age)
		h.Age = time.Duration(age) * time.Millisecond
		return h, err
	})
}

// checkpointSQL reads the checkpoint unless its attempt or a later one has
// succeeded since.
const checkpointSQL = `
SELECT c.value::text, c.attempt
FROM batch_job_checkpoint AS c
WHERE c.job_key = $1::text
  AND NOT EXISTS (
    SELECT FROM batch_job_attempt AS a
    WHERE a.job_key = c.job_key AND a.attempt >= c.attempt AND a.outcome = 'SUCCEEDED')`

// Checkpoint reads the run's checkpoint and the attempt that saved it.
func (s *Store) Checkpoint(ctx context.Context, db DB, key string) (value json.RawMessage, attempt int, found bool, err error) {
	rows, err := db.Query(ctx, s.checkpoint, key)
	text, found, err := one(rows, err, func(r pgx.CollectableRow) (text string, err error) {
		return text, r.Scan(&text, &attempt)
	})
	return json.RawMessage(text), attempt, found, err
}

// saveSQL saves the checkpoint in the caller's transaction, unless the run is no
// longer the attempt's. It only reads the run row: the transaction's fence locks it.
const saveSQL = `
INSERT INTO batch_job_checkpoint AS c
  (job_key, attempt, value)
SELECT r.job_key, r.attempt, $5::text::json
FROM batch_job_run AS r
WHERE ` + stillOurs + `
ON CONFLICT (job_key) DO UPDATE
SET attempt = excluded.attempt, value = excluded.value, saved_at = excluded.saved_at
RETURNING 1`

// SaveCheckpoint saves the checkpoint. Found is false when the run is not, or no
// longer, the attempt's.
func (s *Store) SaveCheckpoint(ctx context.Context, tx DB, row Row, value json.RawMessage) (found bool, err error) {
	rows, err := tx.Query(ctx, s.saveCheckpoint, row.Key, int64(row.Attempt), row.Token, row.Worker, string(value))
	_, found, err = one(rows, err, pgx.RowTo[int])
	return found, err
}
