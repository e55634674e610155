package store

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// getSQL reads one run by its primary key.
const getSQL = `
SELECT` + rowColumns + `
FROM batch_job_run AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt + `
WHERE r.job_key = $1::text`

// Get reads the run of a key. There is none of a key that cannot be stored.
func (s *Store) Get(ctx context.Context, db DB, key string) (row Row, found bool, err error) {
	if CleanText(key) != key {
		return Row{}, false, nil
	}
	rows, err := db.Query(ctx, s.get, key)
	return one(rows, err, collectRow)
}

// Page is the range of keys of a listing, in byte order, and what to keep of it.
type Page struct {
	From, Before       string   // keys >= From and < Before; Before "": no end
	Status             []string // empty: every status
	DateFrom, DateTill string   // text after the job's name, >= DateFrom and < DateTill; "": no limit
	Readable           bool     // only keys that look like a name with a date or a slot
	Limit              int
}

// statuses are those that jobrun writes.
var statuses = [...]string{"RUNNING", "SUCCEEDED", "FAILED", "SKIPPED"}

// listSQL walks the index on the key in byte order, backwards, or reads the index on the
// status and sorts, if few runs have it. The statuses of jobrun, of which known has the
// bits, stand in the text: the planner knows then, also in a plan that is kept for all
// values, how many runs have them. The end is a bound of the index in every plan:
// without a key to begin before, it begins before one that is just behind the last. It
// is a subquery, so that the planner does not know its value: between two keys that fall
// into one step of its histogram it expects hardly a row, and would rather sort all
// runs of a job for a page of them.
func listSQL(known int) string {
	var only []string
	for bit, status := range statuses {
		if known&(1<<bit) != 0 {
			only = append(only, "'"+status+"'")
		}
	}
	condition := `(cardinality($3::text[]) = 0 OR r.status = ANY ($3::text[]))`
	if known != 0 {
		condition = `$3::text[] IS NOT NULL AND r.status IN (` + strings.Join(only, ", ") + `)`
	}
	return `
SELECT` + rowColumns + `
FROM batch_job_run AS r
LEFT JOIN batch_job_attempt AS a
  ON ` + sameAttempt + `
WHERE r.job_key COLLATE "C" >= $1::text
  AND r.job_key COLLATE "C" < (SELECT coalesce(nullif($2::text, ''),
    (SELECT max(l.job_key COLLATE "C") || ' ' FROM batch_job_run AS l)))
  AND ` + condition + `
  AND split_part(r.job_key, ':', 2) COLLATE "C" >= $4::text
  AND ($5::text = '' OR split_part(r.job_key, ':', 2) COLLATE "C" < $5::text)
  AND (NOT $6::boolean OR r.job_key ~ '^[^:]+:[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}[+-][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?$')
ORDER BY r.job_key COLLATE "C" DESC
LIMIT $7::integer`
}

// List reads the runs of a page, by key in descending byte order.
func (s *Store) List(ctx context.Context, db DB, p Page) ([]Row, error) {
	known := 0
	for _, status := range p.Status {
		bit := slices.Index(statuses[:], status)
		if bit < 0 { // of another program
			known = 0
			break
		}
		known |= 1 << bit
	}
	if p.Status == nil {
		p.Status = []string{}
	}
	rows, err := db.Query(ctx, s.list[known], p.From, p.Before, p.Status, p.DateFrom, p.DateTill, p.Readable, p.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, collectRow)
}

// Entry is one line of a run's history: an attempt, or an action if Action is set.
type Entry struct {
	At                                         time.Time
	Attempt                                    int
	Worker, Trigger, Outcome, EndedBy, Error   string
	HeartbeatAt, FinishedAt                    time.Time
	Processed, Failed                          int64
	Action, By, Reason, PreviousStatus, DBUser string
	Forced, ResetItems                         bool
}

// historySQL reads the attempts and actions of a run, oldest first, in one
// snapshot. An attempt that is open although the run is no longer RUNNING under
// its token was ended by somebody else's plain SQL; one that another program
// made has no row of its own and is told from the run's.
const historySQL = `
SELECT a.started_at, 0 AS part, a.attempt, a.worker_id, coalesce(a.trigger, ''),
  coalesce(a.outcome, CASE WHEN live.key IS NULL THEN coalesce(r.status, '') ELSE 'RUNNING' END),
  coalesce(a.ended_by, CASE WHEN live.key IS NULL THEN 'OUTSIDE' ELSE '' END),
  coalesce(a.error_message, ''), a.heartbeat_at, a.finished_at, a.items_processed, a.items_failed,
  '' AS action, '' AS acted_by, '' AS reason, '' AS previous_status, false AS forced, false AS reset_items, '' AS db_user, 0::bigint AS id
FROM batch_job_attempt AS a
LEFT JOIN batch_job_run AS r
  ON r.job_key = a.job_key AND r.attempt = a.attempt AND r.token IS NOT DISTINCT FROM a.token AND r.worker_id = a.worker_id
LEFT JOIN LATERAL (SELECT r.job_key WHERE r.status = 'RUNNING') AS live (key) ON true
WHERE a.job_key = $1::text
UNION ALL
SELECT r.started_at, 0, r.attempt, r.worker_id, '', r.status,
  CASE WHEN r.status <> 'RUNNING' AND r.attempt > 0 AND r.pruned_at IS NULL THEN 'OUTSIDE' ELSE '' END,
  CASE WHEN r.token IS NULL OR r.status = 'RUNNING' OR r.attempt = 0 OR r.pruned_at IS NOT NULL THEN coalesce(r.error_message, '')
    ELSE concat_ws(': ', 'changed outside jobrun', r.error_message) END, NULL, r.finished_at, 0, 0, '', '', '', '', false, false, '', 0
FROM batch_job_run AS r
WHERE r.job_key = $1::text
  AND NOT EXISTS (
    SELECT FROM batch_job_attempt AS a
    WHERE a.job_key = r.job_key AND a.attempt = r.attempt
      AND (a.token = r.token AND a.worker_id = r.worker_id
          AND (r.status = 'RUNNING' OR a.finished_at IS NULL OR a.finished_at = r.finished_at)
        OR a.token IS NULL AND r.token IS NULL AND a.started_at = r.started_at))
UNION ALL
SELECT p.acted_at, 1, p.attempt, '', '', '', '', '', NULL, NULL, 0, 0,
  p.action, p.acted_by, p.reason, coalesce(p.previous_status, ''), p.forced, p.reset_items, p.db_user, p.id
FROM batch_job_action AS p
WHERE p.job_key = $1::text
ORDER BY 1, 2, 3, 20`

// History reads the attempts and actions of a run, oldest first.
func (s *Store) History(ctx context.Context, db DB, key string) ([]Entry, error) {
	if CleanText(key) != key {
		return nil, nil
	}
	rows, err := db.Query(ctx, s.history, key)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Entry, err error) {
		var at, beat, finished pgtype.Timestamptz
		var part, id int64
		err = row.Scan(&at, &part, &e.Attempt, &e.Worker, &e.Trigger, &e.Outcome, &e.EndedBy, &e.Error, &beat, &finished,
			&e.Processed, &e.Failed, &e.Action, &e.By, &e.Reason, &e.PreviousStatus, &e.Forced, &e.ResetItems, &e.DBUser, &id)
		e.At, e.HeartbeatAt, e.FinishedAt = at.Time, beat.Time, finished.Time
		return e, err
	})
}

// StaleRow is a RUNNING run with the ages that the server computed.
type StaleRow struct {
	Row
	Silent, Overdue  time.Duration // since the last sign of life; beyond the longest expected duration
	Alive            bool
	ItemsMovedAt     time.Time
	Typical, Longest time.Duration // of the latest 50 that succeeded of the job's last 200 runs; 0: none
	Session          string        // of the last heartbeat: present, gone, unknown
}

// staleSQL lists RUNNING runs that are silent for longer than their lease or
// over their limit, both as stored with the attempt. A run without an attempt
// row has no heartbeat: its start and the caller's limit judge it alone. It
// reads the index on (status, started_at) and locks nothing. What is usual for a
// job is read once per job: after a crash of everything, hundreds of its runs may be
// stale. That is a walk of the index on the key from the job's last one backwards, of at
// most 200 keys: it is bounded also for a job that never succeeds, and as nothing else
// bounds it, no estimate can make the planner sort all that the job ever had. A server process
// counts as the heartbeat's session only if it is older than
// the heartbeat.
const staleSQL = `
WITH found AS MATERIALIZED (
  SELECT` + rowColumns + `,
    CASE WHEN isfinite(r.started_at)
      THEN (extract(epoch FROM now() - coalesce(a.heartbeat_at, r.started_at)) * 1000000)::bigint ELSE 0 END,
    CASE WHEN isfinite(r.started_at)
      THEN greatest(0, (extract(epoch FROM now() - r.started_at - coalesce(a.stale_after, $1::bigint * interval '1 microsecond')) * 1000000)::bigint) ELSE 0 END,
    coalesce(a.heartbeat_at + a.lease >= now(), false),
    a.items_moved_at,
    CASE
      WHEN a.backend_pid IS NULL OR session.pid IS NOT NULL AND session.backend_start IS NULL THEN 'unknown'
      WHEN session.backend_start <= a.heartbeat_at THEN 'present'
      ELSE 'gone'
    END
  FROM batch_job_run AS r
  LEFT JOIN batch_job_attempt AS a
    ON ` + sameAttempt + `
  LEFT JOIN pg_catalog.pg_stat_activity AS session
    ON session.pid = a.backend_pid
  WHERE r.status = 'RUNNING'
    AND (a.heartbeat_at + a.lease < now()
      OR r.started_at < now() - coalesce(a.stale_after, $1::bigint * interval '1 microsecond')) -- a sum may be out of range
), usual AS MATERIALIZED (
  SELECT jobs.job, percentile_cont(0.5) WITHIN GROUP (ORDER BY latest.duration) AS typical, max(latest.duration) AS longest
  FROM (SELECT DISTINCT split_part(job_key, ':', 1) AS job FROM found) AS jobs
  CROSS JOIN LATERAL (
    SELECT p.finished_at - p.started_at AS duration
    FROM (
      SELECT l.job_key, l.status, l.started_at, l.finished_at
      FROM batch_job_run AS l
      WHERE l.job_key COLLATE "C" < jobs.job || ';'
      ORDER BY l.job_key COLLATE "C" DESC
      LIMIT 200
    ) AS p
    WHERE p.job_key COLLATE "C" >= jobs.job || ':'
      AND p.status = 'SUCCEEDED' AND isfinite(p.started_at) AND isfinite(p.finished_at)
    LIMIT 50
  ) AS latest
  GROUP BY jobs.job
)
SELECT found.*,
  coalesce((extract(epoch FROM usual.typical) * 1000000)::bigint, 0),
  coalesce((extract(epoch FROM usual.longest) * 1000000)::bigint, 0)
FROM found
LEFT JOIN usual
  ON usual.job = split_part(found.job_key, ':', 1)
ORDER BY found.started_at, found.job_key`

// Stale lists stale runs, oldest first. The limit is for runs that carry none.
func (s *Store) Stale(ctx context.Context, db DB, limit time.Duration) ([]StaleRow, error) {
	rows, err := db.Query(ctx, s.stale, micros(limit))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (st StaleRow, err error) {
		var silent, overdue, typical, longest int64
		var moved pgtype.Timestamptz
		st.Row, err = scanRow(row, &silent, &overdue, &st.Alive, &moved, &st.Session, &typical, &longest)
		st.Typical, st.Longest = time.Duration(typical)*time.Microsecond, time.Duration(longest)*time.Microsecond
		st.Silent, st.Overdue = time.Duration(silent)*time.Microsecond, time.Duration(overdue)*time.Microsecond
		st.ItemsMovedAt = moved.Time
		return st, err
	})
}

// jobsSQL goes from name to name by the index on the key: behind the last key that a
// name can have, or behind a key without a colon.
const jobsSQL = `
WITH RECURSIVE keys AS (
  (SELECT job_key FROM batch_job_run ORDER BY job_key COLLATE "C" LIMIT 1)
  UNION ALL
  SELECT (
    SELECT r.job_key
    FROM batch_job_run AS r
    WHERE r.job_key COLLATE "C" > CASE WHEN position(':' IN keys.job_key) > 0 THEN split_part(keys.job_key, ':', 1) || ';' ELSE keys.job_key END
    ORDER BY r.job_key COLLATE "C"
    LIMIT 1
  )
  FROM keys
  WHERE keys.job_key IS NOT NULL
)
SELECT DISTINCT split_part(job_key, ':', 1) COLLATE "C"
FROM keys
WHERE job_key IS NOT NULL
  AND job_key ~ '^[^:]+:[0-9]{4}-[0-9]{2}-[0-9]{2}'
ORDER BY 1`

// Jobs lists what keys that look like a name with a date begin with.
func (s *Store) Jobs(ctx context.Context, db DB) ([]string, error) {
	rows, err := db.Query(ctx, s.jobs)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// DayCount is how many runs of a job and date have a status.
type DayCount struct {
	Job, Date, Status string
	Runs              int
}

// daysSQL reads one range of the index on the key. It is a statement for each name,
// all of them sent at once, because the planner then knows the range: in one statement
// for all names it would expect 0.5 % of all runs for each, and compile so costly a plan.
const daysSQL = `
SELECT split_part(r.job_key, ':', 1), left(split_part(r.job_key, ':', 2), 10) AS date, r.status, count(*)::integer
FROM batch_job_run AS r
WHERE r.job_key COLLATE "C" >= $1::text
  AND r.job_key COLLATE "C" < $2::text
GROUP BY 1, 2, 3
ORDER BY 2, 3`

// Batcher sends several statements at once.
type Batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Days counts the runs of jobs with dates >= from and < before, in the jobs' order.
func (s *Store) Days(ctx context.Context, db Batcher, jobs []string, from, before string) (all []DayCount, err error) {
	var batch pgx.Batch
	for _, job := range jobs {
		batch.Queue(s.days, job+":"+from, job+":"+before).Query(func(rows pgx.Rows) error {
			days, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DayCount])
			all = append(all, days...)
			return err
		})
	}
	err = db.SendBatch(ctx, &batch).Close()
	return all, err
}
