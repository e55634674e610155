// Package store holds every SQL statement of jobrun. One method is one
// statement or one transaction; when to call it, how often to repeat it and
// what an answer means is decided by the caller.
//
// The statements name the tables without a schema, so that each can be pasted
// into psql; [New] qualifies them once. Parameters carry explicit casts, because
// some pgx modes tell the server only the Go type. Durations travel as whole
// microseconds, the server's resolution.
package store

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// DB is a connection, a transaction or a pool.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Store is the statements for the tables of one schema. It holds no connection
// and is safe for concurrent use.
type Store struct {
	Schema string

	claim, reclaim, skip, finish, abandon, beat, standing string
	get, history, stale                                   string
	markFailed, approve, approveReset, skipFailed         string
	skipNew, acted, replicated                            string
	due, present, first, attention, failing, prune        string
	fence, seal, take, done, kept, failItem, failedItems  string
	checkpoint, saveCheckpoint                            string
	countItems, pruneSlots, discard, jobs, days           string
	pruneNext, pruneItems                                 [len(ledgers)]string
	list                                                  [1 << len(statuses)]string
}

// New returns the statements for the tables in schema.
func New(schema string) *Store {
	table := pgx.Identifier{schema}.Sanitize() + ".batch_job_"
	// E: the same literal whatever standard_conforming_strings says.
	literal := "E'jobrun " + strings.NewReplacer(`'`, `''`, `\`, `\\`).Replace(schema) + " '"
	q := strings.NewReplacer("batch_job_", table, "'jobrun '", literal).Replace
	s := &Store{
		Schema: schema,
		claim:  q(claimSQL), reclaim: q(reclaimSQL), skip: q(skipSQL), finish: q(finishSQL), abandon: q(abandonSQL),
		beat: q(beatSQL), standing: q(standingSQL),
		get: q(getSQL), history: q(historySQL), stale: q(staleSQL),
		markFailed: q(markFailedSQL), approve: q(approveSQL), approveReset: q(approveResetSQL), skipFailed: q(skipFailedSQL), skipNew: q(skipNewSQL), acted: q(actedSQL), replicated: replicatedSQL,
		fence: q(fenceSQL), seal: q(sealSQL), take: q(takeSQL), done: q(doneSQL), kept: q(keptSQL),
		failItem: q(failItemSQL), failedItems: q(failedItemsSQL), countItems: q(countItemsSQL), checkpoint: q(checkpointSQL), saveCheckpoint: q(saveSQL),
		due: q(dueSQL), present: q(presentSQL), first: q(firstSQL), attention: q(attentionSQL), failing: q(failingSQL), prune: q(pruneSQL),
		pruneSlots: q(pruneSlotsSQL), discard: q(discardSQL), jobs: q(jobsSQL), days: q(daysSQL),
	}
	for known := range s.list {
		s.list[known] = q(listSQL(known))
	}
	for i, ledger := range ledgers {
		s.pruneNext[i], s.pruneItems[i] = q(pruneNextSQL(ledger)), q(pruneItemsSQL(ledger))
	}
	return s
}

// Tables finds the schema of the tables once. It is safe for concurrent use.
type Tables struct {
	mu     sync.Mutex
	schema string
	store  *Store
}

// NewTables returns Tables for schema, or for what the search_path says if schema is "".
func NewTables(schema string) *Tables { return &Tables{schema: schema} }

// Open returns the statements; the first call may ask the server. An error is
// not remembered.
func (t *Tables) Open(ctx context.Context, db DB) (*Store, error) {
	t.mu.Lock()
	s, schema := t.store, t.schema
	t.mu.Unlock()
	if s != nil {
		return s, nil
	}
	if schema == "" {
		var err error
		if schema, err = resolve(ctx, db); err != nil {
			return nil, fmt.Errorf("schema of the tables: %w", err)
		}
		if schema == "" {
			return nil, ErrNoSchema
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.store == nil {
		t.store = New(schema)
	}
	return t.store, nil
}

// ErrNoSchema says that no schema was given and the search_path names none that exists.
var ErrNoSchema error = Refusal("the search_path of the session names no schema that exists: set Options.Schema")

// Row is a run together with its latest attempt. Absent texts are "", absent
// times zero.
type Row struct {
	Key, Status, Token, Worker, Trigger, Error                              string
	Attempt, Executions                                                     int
	ScheduledFor, StartedAt, FinishedAt, HeartbeatAt, NextAttemptAt, Pruned time.Time
	ApprovedAt                                                              time.Time // zero also when the approval no longer holds
	Due                                                                     bool      // FAILED and its time has come
	Processed, Failed                                                       int64
}

// sameAttempt joins the attempt a that a run row r describes. The worker counts: a
// neighbour that takes a run over by plain SQL knows nothing of tokens.
const sameAttempt = `a.job_key = r.job_key AND a.attempt = r.attempt AND a.token = r.token AND a.worker_id = r.worker_id`

// durable makes the statement's commit wait for the disk, and for a synchronous standby
// if there is one, even if the session does not: what was acknowledged must outlive a
// crash of the server, and a fail-over.
const durable = `CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN set_config('synchronous_commit', 'on', true) END`

// asLeft holds while a FAILED run r is as its attempt a left it: somebody else's
// plain SQL would have written another end.
const asLeft = `a.outcome = 'FAILED' AND a.finished_at = r.finished_at`

// approvedNow holds while a run r is as the person saw it who approved a re-run,
// in a state that can be run again.
const approvedNow = `coalesce(r.approved_at IS NOT NULL AND r.approved_attempt = r.attempt AND r.approved_status = r.status
    AND r.approved_worker = r.worker_id AND r.approved_finished_at IS NOT DISTINCT FROM r.finished_at
    AND r.status || '' IN ('FAILED', 'SKIPPED', 'SUCCEEDED'), false)`

// noApproval clears what a person approved.
const noApproval = `approved_at = NULL, approved_attempt = NULL, approved_status = NULL, approved_worker = NULL,
    approved_finished_at = NULL`

// moment is a time of a row as a [Row] has it: none and an infinite one are the zero
// time, whatever another program has written.
func moment(column string) string {
	return `coalesce(CASE WHEN isfinite(` + column + `) THEN ` + column + ` END, timestamptz '0001-01-01 00:00:00+00')`
}

// retryable is the time from which a run r is to be tried again, if it is still
// as the attempt a left it; a row that never was an attempt of ours says it alone.
const retryable = `CASE WHEN r.status = 'FAILED' AND (r.token IS NULL OR ` + asLeft + `) THEN r.next_attempt_at END`

// rowColumns reads a Row from a run r and its attempt a. An approval counts
// only while the run is as the person saw it, and in a state that can be run
// again: one of another program never is.
const rowColumns = `
  r.job_key, r.status, coalesce(r.token::text, ''), r.worker_id, coalesce(a.trigger, ''),
  coalesce(r.error_message, ''), r.attempt, r.executions, r.scheduled_for, r.started_at,
  r.finished_at, a.heartbeat_at, ` + retryable + `, r.pruned_at,
  CASE WHEN ` + approvedNow + ` THEN r.approved_at END,
  coalesce(` + retryable + ` <= clock_timestamp(), false),
  coalesce(a.items_processed, 0), coalesce(a.items_failed, 0)`

// scanRow scans rowColumns, and into more what follows them.
func scanRow(row pgx.CollectableRow, more ...any) (Row, error) {
	var r Row
	var scheduled, started, finished, beat, next, pruned, approved pgtype.Timestamptz
	err := row.Scan(append([]any{
		&r.Key, &r.Status, &r.Token, &r.Worker, &r.Trigger, &r.Error, &r.Attempt, &r.Executions,
		&scheduled, &started, &finished, &beat, &next, &pruned, &approved, &r.Due, &r.Processed, &r.Failed,
	}, more...)...)
	r.ScheduledFor, r.StartedAt, r.FinishedAt = scheduled.Time, started.Time, finished.Time
	r.HeartbeatAt, r.NextAttemptAt, r.Pruned, r.ApprovedAt = beat.Time, next.Time, pruned.Time, approved.Time
	return r, err
}

// collectRow collects a plain Row for [pgx.CollectRows].
func collectRow(row pgx.CollectableRow) (Row, error) { return scanRow(row) }

// one returns the first row of a query, and whether there was one.
func one[T any](rows pgx.Rows, err error, scan pgx.RowToFunc[T]) (T, bool, error) {
	var none T
	if err != nil {
		return none, false, err
	}
	all, err := pgx.CollectRows(rows, scan)
	if err != nil || len(all) == 0 {
		return none, false, err
	}
	return all[0], true, nil
}

// micros is d in whole microseconds, rounded up: a limit never gets shorter.
func micros(d time.Duration) int64 {
	n := int64(d / time.Microsecond)
	if d%time.Microsecond > 0 { // no sum, which could overflow
		n++
	}
	return n
}

// millis is a timeout of the server's as text, at least 1 ms (0 would mean no
// limit) and at most what it takes, 24 days.
func millis(d time.Duration) string {
	return strconv.FormatInt(min(max(1, d.Milliseconds()), math.MaxInt32), 10)
}
