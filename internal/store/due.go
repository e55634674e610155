package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// anyApproval holds for every approved_at but NULL. Without statistics the planner takes
// a range to leave 0.5 % of the rows, and IS NOT NULL 99.5 %: it would read all runs
// instead of the partial index.
const anyApproval = `r.approved_at BETWEEN '-infinity' AND 'infinity'`

// dueSQL finds the runs that may be claimed again now, by the two small partial
// indexes; it locks nothing.
const dueSQL = `
SELECT r.job_key
FROM (
  SELECT r.job_key
  FROM batch_job_run AS r
  WHERE r.next_attempt_at BETWEEN '-infinity' AND now() AND r.status || '' = 'FAILED' AND r.pruned_at IS NULL
    AND (r.token IS NULL OR EXISTS (SELECT FROM batch_job_attempt AS a WHERE ` + sameAttempt + ` AND ` + asLeft + `))
  UNION
  SELECT r.job_key
  FROM batch_job_run AS r
  WHERE ` + anyApproval + ` AND ` + approvedNow + ` AND r.pruned_at IS NULL
) AS r
WHERE split_part(r.job_key, ':', 1) = ANY ($1::text[])
ORDER BY r.job_key COLLATE "C"`

// Due lists the keys of the jobs' runs that are due or approved, oldest date
// first within a job.
func (s *Store) Due(ctx context.Context, db DB, jobs []string) ([]string, error) {
	rows, err := db.Query(ctx, s.due, jobs)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// presentSQL looks every key up by the primary key: OFFSET 0 keeps the planner from
// reading all runs for the sake of a few thousand keys.
const presentSQL = `
SELECT r.job_key, r.status
FROM unnest($1::text[]) AS k (job_key)
CROSS JOIN LATERAL (
  SELECT r.job_key, CASE WHEN ` + approvedNow + ` THEN 'APPROVED' ELSE r.status END AS status
  FROM batch_job_run AS r
  WHERE r.job_key = k.job_key
  OFFSET 0
) AS r`

// Present returns the status of those of the keys that have a row; APPROVED if a
// re-run is pending.
func (s *Store) Present(ctx context.Context, db DB, keys []string) (map[string]string, error) {
	rows, err := db.Query(ctx, s.present, keys)
	if err != nil {
		return nil, err
	}
	status := map[string]string{}
	var key, state string
	_, err = pgx.ForEachRow(rows, []any{&key, &state}, func() error { status[key] = state; return nil })
	return status, err
}

const firstSQL = `
SELECT job_key
FROM batch_job_run
WHERE job_key COLLATE "C" >= $1::text AND job_key COLLATE "C" < $2::text
  AND job_key ~ '^[^:]+:[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}[+-][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?$'
ORDER BY job_key COLLATE "C"
LIMIT 1`

// First returns the lowest key in a range that looks like a name with a date or a slot.
func (s *Store) First(ctx context.Context, db DB, from, before string) (key string, found bool, err error) {
	rows, err := db.Query(ctx, s.first, from, before)
	return one(rows, err, pgx.RowTo[string])
}

// attentionSQL reads the runs that wait for something: those that are FAILED, by
// the index on the status, and those with an approval that nobody has used.
const attentionSQL = `
SELECT` + rowColumns + `,
  coalesce(r.approved_at < now() - $1::bigint * interval '1 microsecond', false)
FROM batch_job_run AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt + `
WHERE r.status = 'FAILED'
UNION ALL
SELECT` + rowColumns + `,
  coalesce(r.approved_at < now() - $1::bigint * interval '1 microsecond', false)
FROM batch_job_run AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt + `
WHERE ` + anyApproval + ` AND ` + approvedNow + ` AND r.status || '' <> 'FAILED'`

// Waiting is a run that waits for somebody or something.
type Waiting struct {
	Row
	Overripe bool // approved for longer than the limit
}

// Attention lists the FAILED runs, and those with a pending approval.
func (s *Store) Attention(ctx context.Context, db DB, approval time.Duration) ([]Waiting, error) {
	rows, err := db.Query(ctx, s.attention, micros(approval))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (w Waiting, err error) {
		w.Row, err = scanRow(row, &w.Overripe)
		return w, err
	})
}

// failingSQL reads attempts that failed since a moment although a later attempt
// of the same run has started: the run's start is later than the failure, so the
// index on (status, started_at) finds it without walking the history. OFFSET 0 keeps
// the attempts being read by key, run by run, also where nothing was ever analyzed.
const failingSQL = `
SELECT` + rowColumns + `
FROM (
  SELECT r.job_key, r.executions, r.scheduled_for, f.attempt, f.outcome AS status, f.token, f.worker_id,
    f.error_message, f.started_at, f.finished_at, NULL::timestamptz AS next_attempt_at, NULL::timestamptz AS pruned_at,
    NULL::timestamptz AS approved_at, NULL::integer AS approved_attempt, NULL::text AS approved_status,
    NULL::text AS approved_worker, NULL::timestamptz AS approved_finished_at
  FROM batch_job_run AS r
  CROSS JOIN LATERAL (
    SELECT *
    FROM batch_job_attempt AS l
    WHERE l.job_key = r.job_key AND l.attempt < r.attempt AND l.outcome = 'FAILED' AND l.finished_at >= $1::timestamptz
    OFFSET 0
  ) AS f
  WHERE r.status IN ('RUNNING', 'SUCCEEDED', 'FAILED', 'SKIPPED')
    AND r.started_at >= $1::timestamptz
    AND r.attempt > 1
) AS r
CROSS JOIN LATERAL (
  SELECT *
  FROM batch_job_attempt AS l
  WHERE l.job_key = r.job_key AND l.attempt = r.attempt
  OFFSET 0
) AS a
ORDER BY r.finished_at, r.job_key`

// Failing lists attempts that failed since a moment and were followed by another,
// each as the row that its run had then.
func (s *Store) Failing(ctx context.Context, db DB, since time.Time) ([]Row, error) {
	rows, err := db.Query(ctx, s.failing, since)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, collectRow)
}

// pruneSQL marks one page of runs that are done as pruned, in the order of their
// keys, and removes their attempts and checkpoints: the run row is locked FOR
// UPDATE, passing over those that somebody is changing. A marked run can never run
// again, so from here on its items guard nothing.
const pruneSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $4::text, true), ` + durable + `
), page AS MATERIALIZED (
  SELECT r.job_key
  FROM bound
  CROSS JOIN batch_job_run AS r
  WHERE r.job_key COLLATE "C" > $1::text
    AND r.business_date < $2::text::date
    AND r.pruned_at IS NULL
    AND r.status || '' IN ('SUCCEEDED', 'SKIPPED')
    AND NOT ` + approvedNow + `
    AND (position('T' IN split_part(r.job_key, ':', 2)) = 0 OR r.finished_at < now() - interval '1 day')
  ORDER BY r.job_key COLLATE "C"
  LIMIT $3::integer
  FOR UPDATE OF r SKIP LOCKED
), attempts AS (
  DELETE FROM batch_job_attempt AS a
  USING page
  WHERE a.job_key = page.job_key
), checkpoints AS (
  DELETE FROM batch_job_checkpoint AS c
  USING page
  WHERE c.job_key = page.job_key
), marked AS (
  UPDATE batch_job_run AS r
  SET pruned_at = now(), ` + noApproval + `
  FROM page
  WHERE r.job_key = page.job_key
)
SELECT count(*), coalesce(max(job_key COLLATE "C"), '')
FROM page`

// Prune marks at most limit runs before a date, after a key, as pruned, and
// returns how many and the last key.
func (s *Store) Prune(ctx context.Context, db DB, after, before string, limit int, lock time.Duration) (n int64, last string, err error) {
	rows, err := db.Query(ctx, s.prune, after, before, limit, millis(lock))
	return counted(rows, err)
}

// counted reads a count and a key.
func counted(rows pgx.Rows, err error) (n int64, last string, _ error) {
	_, _, err = one(rows, err, func(row pgx.CollectableRow) (_ bool, err error) {
		return false, row.Scan(&n, &last)
	})
	return n, last, err
}

// ledgers are the tables that hold items.
var ledgers = [...]string{"batch_job_item", "batch_job_item_failure"}

// pruneNextSQL finds the next key in a ledger that belongs to a pruned run, going
// from key to key by the primary key. It locks nothing.
func pruneNextSQL(ledger string) string {
	return `
WITH RECURSIVE ledger (job_key) AS (
  (SELECT i.job_key FROM ` + ledger + ` AS i WHERE i.job_key > $1::text ORDER BY i.job_key LIMIT 1)
  UNION ALL
  SELECT (SELECT i.job_key FROM ` + ledger + ` AS i WHERE i.job_key > l.job_key ORDER BY i.job_key LIMIT 1)
  FROM ledger AS l
  WHERE l.job_key IS NOT NULL
    AND NOT EXISTS (SELECT FROM batch_job_run AS r WHERE r.job_key = l.job_key AND r.pruned_at IS NOT NULL)
)
SELECT l.job_key
FROM ledger AS l
JOIN batch_job_run AS r
  ON r.job_key = l.job_key
WHERE r.pruned_at IS NOT NULL
LIMIT 1`
}

// pruneItemsSQL removes a batch of a pruned run's items from a ledger.
func pruneItemsSQL(ledger string) string {
	return `
DELETE FROM ` + ledger + ` AS i
WHERE i.job_key = $1::text
  AND i.item IN (SELECT j.item FROM ` + ledger + ` AS j WHERE j.job_key = $1::text ORDER BY j.item LIMIT $2::integer)
  AND EXISTS (SELECT FROM batch_job_run AS r WHERE r.job_key = $1::text AND r.pruned_at IS NOT NULL)`
}

// PruneItems removes at most limit items (with failures, as many failures) of the
// next pruned run after a key that has some. It returns the key of that run, ""
// when there is none, and how many it removed.
func (s *Store) PruneItems(ctx context.Context, db DB, failures bool, after string, limit int) (key string, n int64, err error) {
	ledger := 0
	if failures {
		ledger = 1
	}
	rows, err := db.Query(ctx, s.pruneNext[ledger], after)
	key, found, err := one(rows, err, pgx.RowTo[string])
	if err != nil || !found {
		return "", 0, err
	}
	tag, err := db.Exec(ctx, s.pruneItems[ledger], key, limit)
	return key, tag.RowsAffected(), err
}

// pruneSlotsSQL removes the rows of pruned slots, whose keys never come again.
const pruneSlotsSQL = `
DELETE FROM batch_job_run AS r
WHERE r.job_key IN (
    SELECT p.job_key
    FROM batch_job_run AS p
    WHERE p.business_date < $1::text::date
      AND p.pruned_at IS NOT NULL
      AND position('T' IN split_part(p.job_key, ':', 2)) > 0
      AND NOT EXISTS (SELECT FROM batch_job_item AS i WHERE i.job_key = p.job_key)
      AND NOT EXISTS (SELECT FROM batch_job_item_failure AS f WHERE f.job_key = p.job_key)
    LIMIT $2::integer
    FOR UPDATE SKIP LOCKED)`

// PruneSlots removes at most limit rows of pruned slots before a date, and returns
// how many.
func (s *Store) PruneSlots(ctx context.Context, db DB, before string, limit int) (int64, error) {
	tag, err := db.Exec(ctx, s.pruneSlots, before, limit)
	return tag.RowsAffected(), err
}

// discardSQL removes a run and all that it has left, people's actions excepted. It
// locks the run row FOR UPDATE first, waiting at most lock_timeout.
const discardSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $2::text, true), ` + durable + `
), run AS MATERIALIZED (
  SELECT r.job_key
  FROM bound
  CROSS JOIN batch_job_run AS r
  WHERE r.job_key = $1::text
  FOR UPDATE OF r
), attempts AS (
  DELETE FROM batch_job_attempt AS a
  USING run
  WHERE a.job_key = run.job_key
), gone AS (
  DELETE FROM batch_job_run AS r
  USING run
  WHERE r.job_key = run.job_key
)
SELECT count(*), coalesce(max(job_key), '')
FROM run`

// Discard removes the run of a key with its history and returns how many there were.
func (s *Store) Discard(ctx context.Context, db DB, key string, lock time.Duration) (n int64, err error) {
	rows, err := db.Query(ctx, s.discard, key, millis(lock))
	n, _, err = counted(rows, err)
	return n, err
}
