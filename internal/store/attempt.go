package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Outcome is how an attempt ended.
type Outcome struct {
	Status            string
	Error             string        // "": none
	Next              time.Duration // until the next attempt may be claimed; negative: none
	Processed, Failed int64
}

// finishSQL ends the attempt in the run row and in the history. It reaches the
// run row by its primary key, locks it FOR NO KEY UPDATE (waiting at most
// lock_timeout) and then the attempt row. The status is compared as an
// expression: with a bare status = 'RUNNING' the planner may walk the index on
// (status, started_at) over every run that was RUNNING since the last vacuum.
const finishSQL = `
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', $4::text, true), ` + durable + `, clock_timestamp() AS now
), done AS (
  UPDATE batch_job_run AS r
  SET status = $5::text, finished_at = greatest(bound.now, r.started_at),
    error_message = nullif($6::text, ''),
    next_attempt_at = CASE WHEN $7::bigint >= 0
      THEN greatest(bound.now, r.started_at) + $7::bigint * interval '1 microsecond' END
  FROM bound
  WHERE r.job_key = $1::text
    AND r.attempt = $2::integer
    AND r.token = $3::text::uuid
    AND r.worker_id = $10::text
    AND r.status || '' = 'RUNNING'
  RETURNING r.status, r.finished_at, r.next_attempt_at, r.error_message
), history AS (
  UPDATE batch_job_attempt AS a
  SET finished_at = done.finished_at, heartbeat_at = done.finished_at, outcome = done.status, ended_by = 'WORKER',
    error_message = done.error_message, items_processed = $8::bigint, items_failed = $9::bigint
  FROM done
  WHERE a.job_key = $1::text
    AND a.attempt = $2::integer
    AND a.token = $3::text::uuid
    AND a.finished_at IS NULL
)
SELECT finished_at, next_attempt_at
FROM done`

// Finish ends the attempt. Found is false when the run is no longer RUNNING
// under this token: it was superseded, or an earlier Finish whose answer was
// lost has ended it; [Store.Ended] tells which.
func (s *Store) Finish(ctx context.Context, db DB, row Row, o Outcome, lock time.Duration) (after Row, found bool, err error) {
	next := int64(-1)
	if o.Next >= 0 {
		next = micros(o.Next)
	}
	rows, err := db.Query(ctx, s.finish, row.Key, row.Attempt, row.Token, millis(lock),
		o.Status, o.Error, next, o.Processed, o.Failed, row.Worker)
	return one(rows, err, func(answer pgx.CollectableRow) (Row, error) {
		var finished, due pgtype.Timestamptz
		err := answer.Scan(&finished, &due)
		return row.ended(o, finished.Time, due.Time), err
	})
}

// ended is the row after the outcome was recorded.
func (r Row) ended(o Outcome, at, next time.Time) Row {
	r.Status, r.Error, r.Processed, r.Failed = o.Status, o.Error, o.Processed, o.Failed
	r.FinishedAt, r.HeartbeatAt, r.NextAttemptAt = at, at, next
	return r
}

// Pulse is what one running attempt sends with a heartbeat.
type Pulse struct {
	Row
	Processed, Failed int64
}

// beatSQL renews all running attempts of a process. It locks the attempt rows
// FOR NO KEY UPDATE in key order and passes over those that somebody is
// changing at this moment; the run rows are only read, so a heartbeat never
// waits for a status change nor makes one wait. It is planned anew each time: a
// plan made while the tables were small would later walk all attempts.
const beatSQL = `
WITH mine AS MATERIALIZED (
  SELECT a.job_key, a.attempt, m.processed, m.failed
  FROM unnest($1::text[], $2::integer[], $3::text[], $4::bigint[], $5::bigint[])
    AS m (job_key, attempt, token, processed, failed)
  JOIN batch_job_attempt AS a
    ON a.job_key = m.job_key AND a.attempt = m.attempt AND a.token = m.token::uuid
  JOIN batch_job_run AS r
    ON r.job_key = m.job_key AND r.attempt = m.attempt AND r.token = m.token::uuid
  WHERE a.finished_at IS NULL
    AND r.worker_id = a.worker_id
    AND r.status || '' = 'RUNNING'
  ORDER BY a.job_key
  FOR NO KEY UPDATE OF a SKIP LOCKED
)
UPDATE batch_job_attempt AS a
SET heartbeat_at = clock_timestamp(), backend_pid = CASE WHEN pg_backend_pid() = $6::integer THEN $6::integer END,
  items_moved_at = CASE WHEN (a.items_processed, a.items_failed) IS DISTINCT FROM (mine.processed, mine.failed)
    THEN clock_timestamp() ELSE a.items_moved_at END,
  items_processed = mine.processed, items_failed = mine.failed
FROM mine
WHERE a.job_key = mine.job_key
  AND a.attempt = mine.attempt
RETURNING a.token::text`

// Beat writes a sign of life and the item counts of all pulses, and returns the
// tokens that it reached. A missing one is either gone or locked just now: read
// its [Store.Standing] before calling it lost.
func (s *Store) Beat(ctx context.Context, conn *pgx.Conn, pulses []Pulse) ([]string, error) {
	n := len(pulses)
	keys, tokens := make([]string, n), make([]string, n)
	attempts := make([]int32, n)
	processed, failed := make([]int64, n), make([]int64, n)
	for i, p := range pulses {
		keys[i], tokens[i], attempts[i] = p.Key, p.Token, int32(p.Attempt)
		processed[i], failed[i] = p.Processed, p.Failed
	}
	// A pooler tells the client another process than the one that answers: then none is noted.
	rows, err := conn.Query(ctx, s.beat, unprepared(conn), keys, attempts, tokens, processed, failed, int32(conn.PgConn().PID()))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// unprepared is the mode in which a statement is planned for its parameters each
// time, within what the connection was configured for.
func unprepared(conn *pgx.Conn) pgx.QueryExecMode {
	if mode := conn.Config().DefaultQueryExecMode; mode == pgx.QueryExecModeSimpleProtocol {
		return mode
	}
	return pgx.QueryExecModeExec
}

// standingSQL reads where an attempt stands, by its token. It locks nothing.
const standingSQL = `
SELECT coalesce(r.attempt = m.attempt AND r.token = m.token AND r.worker_id = m.worker_id, false),
  a.job_key IS NULL,
  coalesce(a.outcome, ''), coalesce(a.ended_by, ''), a.finished_at,
  coalesce(r.status, ''), coalesce(r.attempt, 0), coalesce(r.worker_id, ''),
  r.finished_at, CASE WHEN r.attempt = m.attempt AND r.token = m.token AND r.worker_id = m.worker_id THEN r.next_attempt_at END
FROM (SELECT $1::text AS job_key, $2::integer AS attempt, $3::text::uuid AS token,
  $4::text AS worker_id) AS m
LEFT JOIN batch_job_run AS r
  ON r.job_key = m.job_key
LEFT JOIN batch_job_attempt AS a
  ON a.job_key = m.job_key AND a.attempt = m.attempt AND a.token = m.token`

// Ended is the row of an attempt whose outcome was recorded, as st says, by a try
// whose answer was lost.
func (st Standing) Ended(row Row, o Outcome) Row { return row.ended(o, st.FinishedAt, st.Next) }

// Standing is what the tables say about an attempt.
type Standing struct {
	Ours, Holds      bool   // the run row is the attempt's; and RUNNING
	Gone             bool   // its row in the history was deleted
	Outcome, EndedBy string // of the attempt, once closed
	FinishedAt, Next time.Time
	Status, Worker   string // of the run now; "" when its row is gone
	Attempt          int
}

// Standing reads where the attempt of row stands now.
func (s *Store) Standing(ctx context.Context, db DB, row Row) (Standing, error) {
	rows, err := db.Query(ctx, s.standing, row.Key, row.Attempt, row.Token, row.Worker)
	st, _, err := one(rows, err, func(row pgx.CollectableRow) (st Standing, err error) {
		var finished, ended, next pgtype.Timestamptz
		err = row.Scan(&st.Ours, &st.Gone, &st.Outcome, &st.EndedBy, &finished, &st.Status, &st.Attempt, &st.Worker, &ended, &next)
		st.FinishedAt, st.Next = finished.Time, next.Time
		if st.Gone {
			st.FinishedAt = ended.Time
		}
		st.Holds = st.Ours && st.Status == "RUNNING"
		return st, err
	})
	return st, err
}
