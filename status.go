package jobrun

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Status is what batch_job_run.status holds. A value of another program that is
// none of these is shown as it is and never claimed.
type Status string

// The states of a run.
const (
	Running   Status = "RUNNING"
	Succeeded Status = "SUCCEEDED"
	Failed    Status = "FAILED"
	Skipped   Status = "SKIPPED"
)

// Decision is what a call did, and why.
type Decision string

// The decisions of calls that run jobs.
const (
	Ran              Decision = "RAN"               // this call executed an attempt
	AlreadyRunning   Decision = "ALREADY_RUNNING"   // an attempt is RUNNING, here or elsewhere
	AlreadySucceeded Decision = "ALREADY_SUCCEEDED" // the run is done
	AlreadySkipped   Decision = "ALREADY_SKIPPED"   // the run was skipped
	AlreadyFailed    Decision = "ALREADY_FAILED"    // no attempt is left: a person decides
	RetryLater       Decision = "RETRY_LATER"       // Record.NextAttemptAt says when
	NotDue           Decision = "NOT_DUE"           // Job.Calendar leaves this date out
	UnknownStatus    Decision = "UNKNOWN_STATUS"    // another program wrote a status that jobrun does not know
)

// Trigger is what started an attempt.
type Trigger string

// The triggers of attempts. A claim of a FAILED run is a retry whichever call
// makes it, that of an approved run a re-run.
const (
	TriggerSchedule Trigger = "SCHEDULE" // Run, RunTrigger, Schedule
	TriggerManual   Trigger = "MANUAL"   // RunDate
	TriggerRetry    Trigger = "RETRY"
	TriggerRerun    Trigger = "RERUN"
	TriggerCatchUp  Trigger = "CATCH_UP"
)

// Record is a run with its latest attempt as it was at one moment. Times are
// those of the database clock, in the business zone; absent ones are zero. A run
// that another program made has no Trigger, HeartbeatAt or item counts, and if
// its key does not parse, no Job and Date. ItemsProcessed and ItemsFailed are the
// latest attempt's alone and, until it has ended itself, those of its last
// heartbeat. People's actions need the Record as a
// method returned it: one that went through JSON says too little.
type Record struct {
	Key            string    `json:"key"`
	Job            string    `json:"job,omitempty"`
	Date           Date      `json:"date,omitzero"`
	Status         Status    `json:"status"`
	Attempt        int       `json:"attempt"`           // 0: nothing was executed
	Trigger        Trigger   `json:"trigger,omitempty"` // of the latest attempt
	WorkerID       string    `json:"worker_id"`
	ScheduledFor   time.Time `json:"scheduled_for,omitzero"` // nominal time of the trigger
	StartedAt      time.Time `json:"started_at,omitzero"`    // of the latest attempt
	FinishedAt     time.Time `json:"finished_at,omitzero"`
	HeartbeatAt    time.Time `json:"heartbeat_at,omitzero"`
	NextAttemptAt  time.Time `json:"next_attempt_at,omitzero"` // of a FAILED run; zero: no retry follows
	ApprovedAt     time.Time `json:"approved_at,omitzero"`     // of a re-run that nobody has claimed yet
	PrunedAt       time.Time `json:"pruned_at,omitzero"`
	ItemsProcessed int64     `json:"items_processed"`
	ItemsFailed    int64     `json:"items_failed"`
	Error          string    `json:"error,omitempty"` // why it is FAILED or SKIPPED, at most 8 KiB

	token string
}

// record translates a row, with the zone that people read.
func (r *Runner) record(row store.Row) Record {
	at := func(t time.Time) time.Time {
		if t.IsZero() {
			return t
		}
		return t.In(r.zone)
	}
	job, date, _, _ := parseKey(row.Key)
	return Record{
		Key: row.Key, Job: job, Date: date, Status: Status(row.Status), Attempt: row.Attempt,
		Trigger: Trigger(row.Trigger), WorkerID: row.Worker, ScheduledFor: at(row.ScheduledFor),
		StartedAt: at(row.StartedAt), FinishedAt: at(row.FinishedAt), HeartbeatAt: at(row.HeartbeatAt),
		NextAttemptAt: at(row.NextAttemptAt), ApprovedAt: at(row.ApprovedAt), PrunedAt: at(row.Pruned),
		ItemsProcessed: row.Processed, ItemsFailed: row.Failed, Error: store.CleanText(row.Error), token: row.Token,
	}
}

// Result is what a call did about one run.
type Result struct {
	Decision Decision
	Record   Record // after the call
}

// Ran reports whether the call executed an attempt, whatever its outcome.
func (r Result) Ran() bool { return r.Decision == Ran }

// Errors that callers branch on, with errors.Is.
var (
	// ErrLeaseLost: the attempt is no longer the one that may act for its run. It
	// is also the cause of the context of such an attempt.
	ErrLeaseLost = lease.ErrLost
	// ErrOutcomeUnknown: the function has returned, but what became of the run
	// could not be recorded. The row stays RUNNING until a person decides. From Tx,
	// Once and Complete, and then from Each: the answer to a COMMIT was lost, and
	// nothing tells what became of it.
	ErrOutcomeUnknown = lease.ErrUnknown
	// ErrCompleted: the attempt has ended its run with Complete, so nothing more can
	// be done for it.
	ErrCompleted = lease.ErrDone
	// ErrNotFound: there is no run of this key.
	ErrNotFound = errors.New("jobrun: no such run")
	// ErrConflict: the run is not, or no longer, in a state that allows the action.
	ErrConflict = errors.New("jobrun: the run is not in the state that this needs")
	// ErrAlive: the attempt sends heartbeats.
	ErrAlive = errors.New("jobrun: the attempt is alive")
	// ErrShutdown: the Runner starts nothing more. It is also the cause of the
	// context of an attempt that Shutdown interrupted.
	ErrShutdown = errors.New("jobrun: shut down")
)

// InvalidError is a value that was refused before anything happened.
type InvalidError struct {
	Field   string // such as "Job.Name"
	Value   any
	Allowed string
}

func (e *InvalidError) Error() string {
	if s, ok := e.Value.(string); ok {
		return fmt.Sprintf("jobrun: %s is %.200q, allowed: %s", e.Field, s, e.Allowed)
	}
	return fmt.Sprintf("jobrun: %s is %v, allowed: %s", e.Field, e.Value, e.Allowed)
}

// RunError is an attempt that failed; it wraps the job's own error.
type RunError struct {
	Key     string
	Attempt int
	Err     error
}

func (e *RunError) Error() string {
	return fmt.Sprintf("%s attempt %d: %s", e.Key, e.Attempt, errorText(e.Err))
}

// Unwrap returns the job's own error, a [*PanicError], or why its context ended.
func (e *RunError) Unwrap() error { return e.Err }

// PanicError is a panic of a job, or its end by runtime.Goexit, turned into an
// error. Stack is cut to 4 KiB.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	value := fmt.Sprintf("%T", e.Value) // printing any value could recurse without end
	switch kind := reflect.ValueOf(e.Value).Kind(); v := e.Value.(type) {
	case error:
		value = errorText(v)
	default:
		if kind <= reflect.Complex128 || kind == reflect.String {
			value = fmt.Sprint(v)
		}
	}
	return fmt.Sprintf("panic: %s\n\n%s", value, e.Stack)
}

// Unwrap returns the value of the panic if it was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// SkipRun is what a [Func] returns when there was nothing to do: the run ends
// SKIPPED with the reason, and the call returns no error.
func SkipRun(reason string) error { return &skip{reason} }

// SkipReason returns the reason of an error that ends a run SKIPPED: one of
// [SkipRun], plainly or wrapped. It is for what wraps a [Func], such as traces.
func SkipReason(err error) (reason string, ok bool) {
	s := skipOf(err)
	if s == nil {
		return "", false
	}
	return s.reason, true
}

type skip struct{ reason string }

func (e *skip) Error() string { return "skipped: " + e.reason }

// Action is a person's decision: who, why, and how far it may go.
type Action struct {
	By, Reason string // both required
	Force      bool   // overrides what the method refuses otherwise
	ResetItems bool   // ApproveRerun only: forgets which items are done, so that the re-run does every item again
}

// Event is a change of a run, after it was committed.
type Event struct {
	Record   Record
	Previous Status  // "": there was no run
	Err      error   // of the attempt that failed
	Action   *Action // of the person who acted; nil: an attempt did it
}

// HistoryEntry is one line of a run's history: an attempt, or a person's action
// if Action is set. Times are those of the database clock, in the business zone.
type HistoryEntry struct {
	At      time.Time // start of the attempt, or time of the action
	Attempt int

	Trigger                     Trigger // "": another program made the attempt, or its history was pruned
	WorkerID                    string
	HeartbeatAt, FinishedAt     time.Time
	Outcome                     Status // Running while it is open
	ItemsProcessed, ItemsFailed int64
	// Error is why it FAILED or was SKIPPED. An attempt that another program's
	// statement ended says "changed outside jobrun".
	Error string

	Action   *Action
	Kind     string // of the action: MARK_FAILED, APPROVE_RERUN, SKIP
	Previous Status // of the run before the action
	DBUser   string // role that had logged in to the database for the action, by the server's word
}

// Get returns the run of a key, or ErrNotFound.
func (r *Runner) Get(ctx context.Context, key string) (Record, error) {
	var row store.Row
	found := false
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		row, found, err = s.Get(ctx, r.pool, key)
		return err
	})
	if err == nil && !found {
		err = ErrNotFound
	}
	if err != nil {
		return Record{}, fmt.Errorf("get %q: %w", key, err)
	}
	return r.record(row), nil
}

// Filter says which runs List returns. The zero value means all of them.
type Filter struct {
	Job      string   // exact name
	Status   []Status // any of these
	From, To Date     // business dates, both included; zero: no limit
	After    string   // the key of the last record of the page before
	Limit    int      // records of a page, 1 to 1000; 0: 100
}

// List returns runs by key in descending byte order, so that those of one job
// come newest date first. For the next page, pass the last record's key as
// Filter.After; runs that are added meanwhile do not shift the pages. Keys that
// do not parse are listed too, unless the filter names a job or a date.
func (r *Runner) List(ctx context.Context, f Filter) ([]Record, error) {
	p := store.Page{Before: f.After, Limit: f.Limit}
	switch {
	case f.Limit < 0 || f.Limit > 1000:
		return nil, &InvalidError{"Filter.Limit", f.Limit, "1 to 1000, or 0 for 100"}
	case f.From != Date{} && !f.From.IsValid():
		return nil, &InvalidError{"Filter.From", f.From.String(), "a date of the calendar"}
	case f.To != Date{} && !f.To.IsValid():
		return nil, &InvalidError{"Filter.To", f.To.String(), "a date of the calendar"}
	case store.CleanText(f.After) != f.After:
		return nil, &InvalidError{"Filter.After", f.After, "the key of a record"}
	case f.Job != "":
		if err := validName(f.Job); err != nil {
			err.Field = "Filter.Job"
			return nil, err
		}
		p.From = f.Job + ":"
		if end := f.Job + ";"; p.Before == "" || p.Before > end { // ';' follows ':'
			p.Before = end
		}
	}
	if p.Limit == 0 {
		p.Limit = 100
	}
	if f.From != (Date{}) {
		p.DateFrom = f.From.String()
		if f.Job != "" {
			p.From += p.DateFrom
		}
	}
	if f.To != (Date{}) {
		p.DateTill = f.To.String() + "U" // a slot's time follows the date after a 'T'
		if end := f.Job + ":" + p.DateTill; f.Job != "" && end < p.Before {
			p.Before = end
		}
	}
	for _, s := range f.Status {
		if store.CleanText(string(s)) != string(s) {
			return nil, &InvalidError{"Filter.Status", string(s), "statuses of records"}
		}
		p.Status = append(p.Status, string(s))
	}
	p.Readable = f.Job != "" || f.From != Date{} || f.To != Date{}
	records, limit := []Record{}, p.Limit
	for {
		var rows []store.Row
		err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
			rows, err = s.List(ctx, r.pool, p)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("list runs: %w", err)
		}
		for _, row := range rows {
			// A key may have the shape of one and still name the 30th of February.
			if rec := r.record(row); rec.Job != "" || !p.Readable {
				records = append(records, rec)
			}
		}
		if len(rows) < p.Limit || len(records) == limit {
			return records, nil
		}
		p.Before, p.Limit = rows[len(rows)-1].Key, limit-len(records)
	}
}

// History returns the attempts of a run and what people did about it, oldest
// first; ErrNotFound if there never was such a run.
func (r *Runner) History(ctx context.Context, key string) ([]HistoryEntry, error) {
	var entries []store.Entry
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		entries, err = s.History(ctx, r.pool, key)
		return err
	})
	if err == nil && len(entries) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("history of %q: %w", key, err)
	}
	history := make([]HistoryEntry, len(entries))
	for i, e := range entries {
		times := r.record(store.Row{StartedAt: e.At, HeartbeatAt: e.HeartbeatAt, FinishedAt: e.FinishedAt})
		history[i] = HistoryEntry{
			At: times.StartedAt, Attempt: e.Attempt, Trigger: Trigger(e.Trigger), WorkerID: e.Worker,
			HeartbeatAt: times.HeartbeatAt, FinishedAt: times.FinishedAt, Outcome: Status(e.Outcome),
			ItemsProcessed: e.Processed, ItemsFailed: e.Failed, Error: store.CleanText(e.Error),
			Kind: e.Action, Previous: Status(e.PreviousStatus), DBUser: e.DBUser,
		}
		if e.Action != "" {
			history[i].Action = &Action{By: e.By, Reason: e.Reason, Force: e.Forced, ResetItems: e.ResetItems}
		}
		if e.EndedBy == "OUTSIDE" && e.Trigger != "" {
			history[i].Error = outside(history[i].Error)
		}
	}
	return history, nil
}

// outside marks the error text of an attempt of ours that somebody else ended.
func outside(text string) string {
	if text == "" {
		return "changed outside jobrun"
	}
	return "changed outside jobrun: " + text
}

// StaleRun is the evidence about a RUNNING run that is silent or over its limit,
// by the database clock. It is no verdict: a person looks further and decides.
type StaleRun struct {
	Record
	Silent       time.Duration // since the last heartbeat, or since the start if there never was one
	Overdue      time.Duration // beyond the attempt's StaleAfter; 0: not yet
	Alive        bool          // the last heartbeat is younger than the attempt's lease
	ItemsMovedAt time.Time     // when a heartbeat last saw the item counts change
	Typical      time.Duration // median duration of the latest 50 that succeeded of the job's last 200 runs, by key; 0: none
	Longest      time.Duration // the longest of them
	// Session tells of the database session that sent the last heartbeat: "present",
	// "gone" or "unknown" (behind a pooler, before the first heartbeat, or without the
	// right to see it). It proves nothing: a live process may have a new session.
	Session string
}

// Stale returns the RUNNING runs that were silent for longer than the lease, or
// run for longer than StaleAfter, both as stored by the attempt; oldest first. A
// slow healthy run is Overdue and Alive. A run of another program has no
// heartbeat: HeartbeatAt is zero, and its start and Options.StaleAfter judge it
// alone. Stale changes nothing.
func (r *Runner) Stale(ctx context.Context) ([]StaleRun, error) {
	var rows []store.StaleRow
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		rows, err = s.Stale(ctx, r.pool, r.opts.StaleAfter)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("stale runs: %w", err)
	}
	stale := make([]StaleRun, len(rows))
	for i, row := range rows {
		moved := r.record(store.Row{StartedAt: row.ItemsMovedAt}).StartedAt
		stale[i] = StaleRun{r.record(row.Row), row.Silent, row.Overdue, row.Alive, moved, row.Typical, row.Longest, row.Session}
	}
	return stale, nil
}
