package store

import (
	"context"
	"time"
)

// Claim is what a process wants to execute.
type Claim struct {
	Key, Job, Date    string // Date: YYYY-MM-DD
	Token             string // a fresh UUID: whose claim it is
	Worker, Trigger   string
	ScheduledFor      time.Time
	Lease, StaleAfter time.Duration
	Again             bool // only if the run exists
	First             bool // only if the run does not exist
}

// bounded limits a statement's waits for locks.
const bounded = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $3::text, true), ` + durable + `
)`

// unseen holds while the statement's snapshot has no row of the key, seen reads it.
const (
	unseen = `NOT EXISTS (SELECT FROM batch_job_run AS r WHERE r.job_key = $1::text)`
	seen   = `
SELECT` + rowColumns + `
FROM batch_job_run AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt + `
WHERE r.job_key = $1::text`
)

// claimSQL reads the run's row if there is one, else makes it together with its
// first history row. One round trip; when the winner had committed before,
// nothing is locked or written. Else it inserts the run row first and waits for
// another session's uncommitted insert of the same key, at most lock_timeout: set
// in a subquery of the statement, so that nothing is left behind in the session.
// No row in the answer: the winner committed after this statement's snapshot. A
// fresh run answers the columns of rowColumns without looking them up.
const claimSQL = bounded + `, claimed AS (
  INSERT INTO batch_job_run AS r
    (job_key, status, started_at, worker_id, job_name, business_date, scheduled_for, attempt, token)
  SELECT $1::text, 'RUNNING', clock_timestamp(), $2::text, $4::text, $5::text::date, $6::timestamptz,
    1 + coalesce((SELECT max(h.attempt) FROM batch_job_attempt AS h WHERE h.job_key = $1::text), 0),
    $7::text::uuid
  FROM bound
  WHERE ` + unseen + `
  ON CONFLICT (job_key) DO NOTHING
  RETURNING r.job_key, r.status, r.token, r.worker_id, r.attempt, r.executions, r.scheduled_for, r.started_at
), history AS (
  INSERT INTO batch_job_attempt AS a
    (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after)
  SELECT job_key, attempt, token, worker_id, $8::text, started_at, started_at,
    $9::bigint * interval '1 microsecond', $10::bigint * interval '1 microsecond'
  FROM claimed
)
SELECT job_key, status, token::text, worker_id, $8::text, '', attempt, executions, scheduled_for, started_at,
  NULL, started_at, NULL, NULL, NULL, false, 0, 0
FROM claimed
UNION ALL` + seen

// Claim makes the run RUNNING under c.Token if no row of its key exists, and
// returns the row that exists afterwards: ours if its Token is c.Token. Found is
// false when the winner was not visible yet: repeat.
func (s *Store) Claim(ctx context.Context, db DB, c Claim, lock time.Duration) (row Row, found bool, err error) {
	rows, err := db.Query(ctx, s.claim, c.Key, c.Worker, millis(lock), c.Job, c.Date, c.ScheduledFor,
		c.Token, c.Trigger, micros(c.Lease), micros(c.StaleAfter))
	return one(rows, err, collectRow)
}

// Won reports whether a row is this claim's. A neighbour that took it over left
// the token there, but not the worker.
func (c Claim) Won(row Row) bool { return row.Token == c.Token && row.Worker == c.Worker }

// settledNumber is the number under which the attempt that a run row describes
// stands in the history: its own, unless that one is somebody else's because the
// row was taken over, or deleted and inserted, by plain SQL; then the number under
// which it was written down before, else the next free one. Start and worker tell
// apart what attempt and token do not.
const settledNumber = `
    coalesce((
      SELECT h.attempt FROM batch_job_attempt AS h
      WHERE h.job_key = r.job_key AND h.token IS NOT DISTINCT FROM r.token
        AND h.worker_id = r.worker_id AND h.started_at = r.started_at
        AND (h.finished_at IS NULL OR h.finished_at = r.finished_at)
      ORDER BY h.attempt DESC
      LIMIT 1
    ), CASE WHEN EXISTS (
      SELECT FROM batch_job_attempt AS h
      WHERE h.job_key = r.job_key AND h.attempt = r.attempt
        AND (h.token IS DISTINCT FROM r.token OR h.worker_id <> r.worker_id OR h.token IS NULL AND h.started_at <> r.started_at
          OR h.finished_at <> r.finished_at)
    ) THEN 1 + last.attempt ELSE r.attempt END) AS number`

// lastAttempt joins the highest attempt number of the key's history.
const lastAttempt = `
  CROSS JOIN LATERAL (
    SELECT coalesce(max(h.attempt), 0) AS attempt FROM batch_job_attempt AS h WHERE h.job_key = $1::text
  ) AS last`

// leftOpen closes the key's other attempts that are still open: plain SQL has taken
// their run away, or deleted its row, and nobody can have noted when. They lived
// until their last sign of life, or until the run row's attempt started.
func leftOpen(from string) string {
	return `, left_open AS (
  UPDATE batch_job_attempt AS a
  SET finished_at = greatest(a.heartbeat_at, CASE WHEN isfinite(` + from + `.started_at) THEN ` + from + `.started_at END, a.started_at), outcome = 'FAILED', ended_by = 'OUTSIDE'
  FROM ` + from + `
  WHERE a.job_key = ` + from + `.job_key
    AND a.attempt <> ` + from + `.number
    AND a.finished_at IS NULL
)`
}

// reclaimSQL is a compare-and-set: it takes the run over only if it still has the
// attempt, token, worker, status and end that the caller saw, and is due or approved
// now. The status counts: a statement that arrives late, after its client has given it
// up and a person has skipped the run and approved it again, must find nothing. It locks
// the run row (FOR NO KEY UPDATE, waiting at most lock_timeout), then the
// attempt rows. Before the row changes, the attempt that it describes is
// written down or closed: another program may have made or ended it.
var reclaimSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $3::text, true), ` + durable + `
), old AS (
  SELECT r.*,` + settledNumber + `,
    greatest(r.attempt, last.attempt) AS highest,
    ` + approvedNow + ` AS approved
  FROM bound
  CROSS JOIN batch_job_run AS r` + lastAttempt + `
  WHERE r.job_key = $1::text
    AND r.attempt = $4::integer
    AND coalesce(r.token::text, '') = $5::text
    AND r.worker_id = $10::text
    AND r.status || '' = $11::text
    AND ` + moment(`r.finished_at`) + ` = $12::timestamptz
    AND r.pruned_at IS NULL
    AND (r.status || '' = 'FAILED' AND r.next_attempt_at <= clock_timestamp()
        AND (r.token IS NULL OR EXISTS (SELECT FROM batch_job_attempt AS a WHERE ` + sameAttempt + ` AND ` + asLeft + `))
      OR ` + approvedNow + `)
  FOR NO KEY UPDATE OF r
), settled AS (
  INSERT INTO batch_job_attempt AS a
    (job_key, attempt, token, worker_id, started_at, finished_at, outcome, ended_by, error_message)
  SELECT job_key, number, token, worker_id, started_at, coalesce(finished_at, clock_timestamp()), status, 'OUTSIDE',
    error_message
  FROM old
  ON CONFLICT (job_key, attempt) DO UPDATE
  SET finished_at = excluded.finished_at, outcome = excluded.outcome, ended_by = excluded.ended_by,
    error_message = excluded.error_message
  WHERE a.finished_at IS NULL
)` + leftOpen("old") + `, claimed AS (
  UPDATE batch_job_run AS r
  SET status = 'RUNNING', started_at = clock_timestamp(), finished_at = NULL, error_message = NULL,
    worker_id = $2::text, token = $7::text::uuid, attempt = 1 + greatest(old.number, old.highest),
    executions = r.executions + 1, next_attempt_at = NULL, scheduled_for = coalesce(r.scheduled_for, $6::timestamptz),
    ` + noApproval + `
  FROM old
  WHERE r.job_key = old.job_key
  RETURNING r.*, old.approved
), history AS (
  INSERT INTO batch_job_attempt AS a
    (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after)
  SELECT job_key, attempt, token, worker_id, CASE WHEN approved THEN 'RERUN' ELSE 'RETRY' END, started_at, started_at,
    $8::bigint * interval '1 microsecond', $9::bigint * interval '1 microsecond'
  FROM claimed
  RETURNING a.*
)
SELECT` + rowColumns + `
FROM claimed AS r
JOIN history AS a ON true`

// Reclaim starts the next attempt of the run as seen, if it is still so and due
// or approved. Found is false when it is not: read the row again.
func (s *Store) Reclaim(ctx context.Context, db DB, c Claim, seen Row, lock time.Duration) (row Row, found bool, err error) {
	rows, err := db.Query(ctx, s.reclaim, c.Key, c.Worker, millis(lock), seen.Attempt, seen.Token,
		c.ScheduledFor, c.Token, micros(c.Lease), micros(c.StaleAfter), seen.Worker,
		seen.Status, seen.FinishedAt)
	return one(rows, err, collectRow)
}

// skipSQL records a run as SKIPPED without an execution, or reads the row that
// is there already. Locks as claimSQL.
const skipSQL = bounded + `, skipped AS (
  INSERT INTO batch_job_run AS r
    (job_key, status, started_at, finished_at, worker_id, job_name, business_date, scheduled_for, attempt, executions,
     token, error_message)
  SELECT $1::text, 'SKIPPED', now(), now(), $2::text, $4::text, $5::text::date, $6::timestamptz,
    coalesce((SELECT max(h.attempt) FROM batch_job_attempt AS h WHERE h.job_key = $1::text), 0), 0,
    $7::text::uuid, $8::text
  FROM bound
  WHERE ` + unseen + `
  ON CONFLICT (job_key) DO NOTHING
  RETURNING r.*
)
SELECT` + rowColumns + `
FROM skipped AS r
LEFT JOIN batch_job_attempt AS a ON false
UNION ALL` + seen

// Skip records the run SKIPPED with the reason if no row of its key exists, and
// returns the row that exists afterwards, as [Store.Claim] does.
func (s *Store) Skip(ctx context.Context, db DB, c Claim, reason string, lock time.Duration) (row Row, found bool, err error) {
	rows, err := db.Query(ctx, s.skip, c.Key, c.Worker, millis(lock), c.Job, c.Date, c.ScheduledFor, c.Token, reason)
	return one(rows, err, collectRow)
}

// abandonSQL closes a claim that was committed but never executed: FAILED, due
// at once, and not counted as an execution. An approval that it had used up is
// given back. It reaches the run row by its primary key, locks it, then the
// attempt row; the status is compared as an expression so that no plan can walk
// the status index instead.
const abandonSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $4::text, true), ` + durable + `, clock_timestamp() AS now
), used AS MATERIALIZED (
  SELECT a.trigger = 'RERUN' AS approval
  FROM batch_job_attempt AS a
  WHERE a.job_key = $1::text AND a.attempt = $2::integer
), done AS (
  UPDATE batch_job_run AS r
  SET status = 'FAILED', finished_at = greatest(bound.now, r.started_at), error_message = $5::text,
    executions = r.executions - 1,
    next_attempt_at = greatest(bound.now, r.started_at),
    approved_at = CASE WHEN used.approval THEN clock_timestamp() END,
    approved_attempt = CASE WHEN used.approval THEN r.attempt END,
    approved_status = CASE WHEN used.approval THEN 'FAILED' END,
    approved_worker = CASE WHEN used.approval THEN r.worker_id END,
    approved_finished_at = CASE WHEN used.approval THEN greatest(bound.now, r.started_at) END
  FROM bound
  LEFT JOIN used ON true
  WHERE r.job_key = $1::text
    AND r.attempt = $2::integer
    AND r.token = $3::text::uuid
    AND r.worker_id = $6::text
    AND r.status || '' = 'RUNNING'
  RETURNING r.*
), history AS (
  UPDATE batch_job_attempt AS a
  SET finished_at = done.finished_at, outcome = 'FAILED', ended_by = 'WORKER', error_message = done.error_message
  FROM done
  WHERE a.job_key = done.job_key
    AND a.attempt = done.attempt
    AND a.token = done.token
  RETURNING a.*
)
SELECT` + rowColumns + `
FROM done AS r
LEFT JOIN history AS a ON true`

// Abandon closes the attempt as never started. Found is false when the run is no
// longer RUNNING under this token.
func (s *Store) Abandon(ctx context.Context, db DB, row Row, reason string, lock time.Duration) (after Row, found bool, err error) {
	rows, err := db.Query(ctx, s.abandon, row.Key, row.Attempt, row.Token, millis(lock), reason, row.Worker)
	return one(rows, err, collectRow)
}
