package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Action is what a person does to a run, as that person saw it.
type Action struct {
	Token, Kind, By, Reason string // Token: a fresh UUID
	Force, ResetItems       bool
	Seen                    Row
	Text                    string // for the run's error_message
	Lock                    time.Duration
}

// keyLock is taken exclusively before the row by every change that a person
// makes, and shared by fenced transactions before theirs: without it, a stream
// of fenced commits, whose row locks overlap, would make the person wait. The
// schema's name is put into it with the tables'.
const keyLock = `hashtextextended('jobrun ' || $1::text, 0)`

// seenSQL locks the run row FOR NO KEY UPDATE if it is still as the person saw
// it, after the key's advisory lock; each wait lasts at most lock_timeout. Then
// it locks the attempt's row, if there is one, and reads it as it is after that
// wait: a heartbeat that came meanwhile counts.
var seenSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $2::text, true), ` + durable + `, pg_advisory_xact_lock(` + keyLock + `),
    clock_timestamp() AS now
), old AS MATERIALIZED (
  SELECT r.*, bound.now, ` + approvedNow + ` AS pending,` + settledNumber + `
  FROM bound
  CROSS JOIN batch_job_run AS r` + lastAttempt + `
  WHERE r.job_key = $1::text
    AND r.status || '' = $3::text
    AND r.attempt = $4::integer
    AND coalesce(r.token::text, '') = $5::text
    AND ` + moment(`r.started_at`) + ` = $6::timestamptz
    AND r.worker_id = $14::text
  FOR NO KEY UPDATE OF r
), attempt AS MATERIALIZED (
  SELECT a.*
  FROM old
  JOIN batch_job_attempt AS a ON a.job_key = old.job_key AND a.attempt = old.attempt AND a.token = old.token
    AND a.worker_id = old.worker_id
  FOR NO KEY UPDATE OF a
)`

// actSQL closes or writes the attempt's row, closes others that were left open, and
// notes the action, of the rows in act, which a statement defines between seenSQL and this.
var actSQL = `, settled AS (
  INSERT INTO batch_job_attempt AS a
    (job_key, attempt, token, worker_id, started_at, finished_at, outcome, ended_by, error_message)
  SELECT job_key, number, token, worker_id, started_at, coalesce(finished_at, greatest(now, started_at)), outcome, ended_by,
    outcome_text
  FROM act
  ON CONFLICT (job_key, attempt) DO UPDATE
  SET finished_at = excluded.finished_at, outcome = excluded.outcome, ended_by = excluded.ended_by,
    error_message = excluded.error_message
  WHERE a.finished_at IS NULL
)` + leftOpen("act") + `, noted AS (
  INSERT INTO batch_job_action
    (token, job_key, attempt, action, acted_by, reason, forced, reset_items, previous_status)
  SELECT $7::text::uuid, job_key, number, $8::text, $9::text, $10::text, $11::boolean, $12::boolean, status
  FROM act
)`

const afterSQL = `
SELECT` + rowColumns + `
FROM done AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt

// markFailedSQL ends a RUNNING run, unless its attempt is alive and force is off.
var markFailedSQL = seenSQL + `, act AS MATERIALIZED (
  SELECT old.*, 'FAILED' AS outcome, 'PERSON' AS ended_by, $13::text AS outcome_text
  FROM old
  LEFT JOIN attempt ON true
  WHERE old.status = 'RUNNING'
    AND ($11::boolean OR coalesce(attempt.heartbeat_at + attempt.lease < clock_timestamp(), true))
)` + actSQL + `, done AS (
  UPDATE batch_job_run AS r
  SET status = 'FAILED', finished_at = greatest(act.now, r.started_at), error_message = $13::text,
    next_attempt_at = NULL, ` + noApproval + `
  FROM act
  WHERE r.job_key = act.job_key
  RETURNING r.*
)` + afterSQL

// resetSQL forgets what the run has done so far. Fenced
// transactions of an attempt that was superseded come before it, because of the
// advisory lock, or not at all.
const resetSQL = `, items AS (
  DELETE FROM batch_job_item AS i
  USING act
  WHERE i.job_key = act.job_key
), failures AS (
  DELETE FROM batch_job_item_failure AS f
  USING act
  WHERE f.job_key = act.job_key
), checkpoint AS (
  DELETE FROM batch_job_checkpoint AS c
  USING act
  WHERE c.job_key = act.job_key
)`

// approveSQL allows one more execution of a run that has ended: FAILED or
// SKIPPED, SUCCEEDED only with force, and no approval is pending.
var approveSQL = approvableSQL + approvedSQL

// approveResetSQL does so and makes it a run that has done nothing yet.
var approveResetSQL = approvableSQL + resetSQL + approvedSQL

var approvableSQL = seenSQL + `, act AS MATERIALIZED (
  SELECT old.*, old.status AS outcome, 'OUTSIDE' AS ended_by, old.error_message AS outcome_text
  FROM old
  LEFT JOIN attempt ON true
  WHERE (old.status IN ('FAILED', 'SKIPPED') OR $11::boolean AND old.status = 'SUCCEEDED')
    AND $13::text = ''
    AND NOT old.pending
    AND old.pruned_at IS NULL
)` + actSQL

const approvedSQL = `, done AS (
  UPDATE batch_job_run AS r
  SET approved_at = act.now, approved_attempt = r.attempt, approved_status = r.status, approved_worker = r.worker_id,
    approved_finished_at = r.finished_at
  FROM act
  WHERE r.job_key = act.job_key
  RETURNING r.*
)` + afterSQL

// skipFailedSQL makes a FAILED run without a pending approval SKIPPED.
var skipFailedSQL = seenSQL + `, act AS MATERIALIZED (
  SELECT old.*, old.status AS outcome, 'OUTSIDE' AS ended_by, old.error_message AS outcome_text
  FROM old
  LEFT JOIN attempt ON true
  WHERE old.status = 'FAILED'
    AND NOT old.pending
    AND old.pruned_at IS NULL
)` + actSQL + `, done AS (
  UPDATE batch_job_run AS r
  SET status = 'SKIPPED', finished_at = coalesce(r.finished_at, greatest(act.now, r.started_at)), error_message = $13::text,
    next_attempt_at = NULL, ` + noApproval + `
  FROM act
  WHERE r.job_key = act.job_key
  RETURNING r.*
)` + afterSQL

// act executes one of the statements above. Found is false when the run is not,
// or no longer, as seen, or in a state that does not allow the action.
func (s *Store) act(ctx context.Context, db DB, sql string, a Action) (after Row, found bool, err error) {
	rows, err := db.Query(ctx, sql, a.Seen.Key, millis(a.Lock), a.Seen.Status, a.Seen.Attempt, a.Seen.Token,
		a.Seen.StartedAt, a.Token, a.Kind, a.By, a.Reason, a.Force, a.ResetItems, a.Text, a.Seen.Worker)
	return one(rows, err, collectRow)
}

// MarkFailed ends a RUNNING run, see [Store.act].
func (s *Store) MarkFailed(ctx context.Context, db DB, a Action) (Row, bool, error) {
	return s.act(ctx, db, s.markFailed, a)
}

// Approve allows one more execution, see [Store.act].
func (s *Store) Approve(ctx context.Context, db DB, a Action) (Row, bool, error) {
	if a.ResetItems {
		return s.act(ctx, db, s.approveReset, a)
	}
	return s.act(ctx, db, s.approve, a)
}

// SkipFailed makes a FAILED run SKIPPED, see [Store.act].
func (s *Store) SkipFailed(ctx context.Context, db DB, a Action) (Row, bool, error) {
	return s.act(ctx, db, s.skipFailed, a)
}

// skipNewSQL records a run that does not exist as SKIPPED. It inserts the run row
// first and waits for another session's uncommitted insert, at most lock_timeout.
const skipNewSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $2::text, true), ` + durable + `, pg_advisory_xact_lock(` + keyLock + `)
), done AS (
  INSERT INTO batch_job_run AS r
    (job_key, status, started_at, finished_at, worker_id, job_name, business_date, attempt, executions, error_message)
  SELECT $1::text, 'SKIPPED', now(), now(), $3::text, $4::text, $5::text::date,
    coalesce((SELECT max(h.attempt) FROM batch_job_attempt AS h WHERE h.job_key = $1::text), 0), 0, $6::text
  FROM bound
  ON CONFLICT (job_key) DO NOTHING
  RETURNING r.*
), noted AS (
  INSERT INTO batch_job_action
    (token, job_key, attempt, action, acted_by, reason, forced, reset_items)
  SELECT $7::text::uuid, job_key, 0, $8::text, $9::text, $10::text, $11::boolean, false
  FROM done
)
SELECT` + rowColumns + `
FROM done AS r
LEFT JOIN batch_job_attempt AS a ON false`

// SkipNew records a run that does not exist as SKIPPED; found is false when it
// exists.
func (s *Store) SkipNew(ctx context.Context, db DB, worker, job, date string, a Action) (after Row, found bool, err error) {
	rows, err := db.Query(ctx, s.skipNew, a.Seen.Key, millis(a.Lock), worker, job, date, a.Text,
		a.Token, a.Kind, a.By, a.Reason, a.Force)
	return one(rows, err, collectRow)
}

// Acted reports whether an action of this token was committed.
func (s *Store) Acted(ctx context.Context, db DB, token string) (bool, error) {
	rows, err := db.Query(ctx, s.acted, token)
	_, found, err := one(rows, err, pgx.RowTo[int])
	return found, err
}

const actedSQL = `SELECT 1 FROM batch_job_action WHERE token = $1::text::uuid`

// Replicated returns when all that was committed before is where the server's settings
// want a commit to be, also what a statement wrote that was given up while it waited
// for a synchronous standby: the server then answers an error, but has committed.
func (s *Store) Replicated(ctx context.Context, db DB) error {
	_, err := db.Exec(ctx, s.replicated)
	return err
}

// replicatedSQL writes something, as only a commit that has written waits. It locks nothing.
// On a standby, the first function fails as read-only (25006).
const replicatedSQL = `
WITH bound AS MATERIALIZED (SELECT pg_catalog.pg_current_xact_id(), ` + durable + `)
SELECT pg_catalog.pg_logical_emit_message(true, 'jobrun', '')
FROM bound`
