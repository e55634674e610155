// Package jobrun lets a batch job take effect exactly once per business date,
// however many servers, deployments and people start it.
//
// The right to run is a row in PostgreSQL. For every call of [Runner.Run]:
//
//  1. The business date comes from the trigger's time in the business zone; job
//     and date are the key: daily-settlement:2026-09-15.
//  2. INSERT ... ON CONFLICT DO NOTHING claims the key under a fresh token.
//     Whoever finds a row there is told what it says, and does nothing.
//  3. A FAILED run that is due, or approved by a person, is claimed instead by a
//     compare-and-set on its attempt and token.
//  4. The function runs, without any open transaction. Heartbeats prove it alive.
//  5. Every later write names key, attempt and token and needs the status
//     RUNNING: an attempt that was superseded can write nothing.
//  6. What the function writes through [Run.Tx], [Run.Once], [Each] and
//     [Run.Complete] is committed only while the attempt holds its run, and items
//     that are done stay done.
//  7. The outcome is written once, repeated until it is certain; if it cannot be,
//     the row stays RUNNING. Age never starts a run again: a person decides.
//
// A [Runner] is safe for concurrent use, and so is every method of this package
// unless it says otherwise.
package jobrun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/reserve"
	"github.com/seed-ccb5b62c/jobrun/internal/schema"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Func is the work of one attempt. nil means done; [SkipRun] means that there was
// nothing to do; any other error, a panic and runtime.Goexit mean FAILED. It runs
// on a goroutine of its own. Its context ends when the caller's does, when
// Job.Timeout has passed, when Shutdown runs out of patience (cause ErrShutdown)
// and when the lease is lost (cause ErrLeaseLost); heartbeats go on until it has
// returned.
type Func func(ctx context.Context, run *Run) error

// Job is a named function with its rules. Job values may be copied.
type Job struct {
	Name       string        // 1 to 80 letters and digits of any script and . _ - /
	Func       Func          // required
	Date       DateRule      // business date of the trigger -> date of the run; nil: the same day
	Calendar   Calendar      // dates on which the job is due; nil: every day. A trigger on another date is recorded SKIPPED
	Every      time.Duration // zero: one run per business date; else one run per slot of whole minutes that divide 24 h
	StaleAfter time.Duration // longest expected duration with margin; zero: Options.StaleAfter
	Timeout    time.Duration // hard limit of one attempt; zero: none
	Retry      Retry         // allows further attempts, which RetryDue or the next Run makes; zero: one attempt; an attempt interrupted by a deployment then needs a person
}

// Validate returns an [*InvalidError] for the first value that is not allowed.
// Every call that takes a Job validates it before it does anything.
func (j Job) Validate() error {
	if err := validName(j.Name); err != nil {
		return err
	}
	switch {
	case j.Func == nil:
		return &InvalidError{"Job.Func", nil, "a function"}
	case j.Every != 0 && (j.Every < time.Minute || j.Every%time.Minute != 0 || j.Every >= 24*time.Hour || 24*time.Hour%j.Every != 0):
		return &InvalidError{"Job.Every", j.Every, "whole minutes under 24h that divide 24h, or 0"}
	case j.Every != 0 && j.Date != nil:
		return &InvalidError{"Job.Date", "set together with Job.Every", "nil with Job.Every"}
	case j.StaleAfter < 0:
		return &InvalidError{"Job.StaleAfter", j.StaleAfter, "a positive duration, or 0 for Options.StaleAfter"}
	case j.Timeout < 0:
		return &InvalidError{"Job.Timeout", j.Timeout, "a positive duration, or 0 for none"}
	case j.Retry.MaxAttempts < 0:
		return &InvalidError{"Job.Retry.MaxAttempts", j.Retry.MaxAttempts, "0 or more"}
	}
	return nil
}

const maxName = 80

// validName judges a job's name. Hangul fillers count as letters in Unicode but
// show as white space, so they are refused with it.
func validName(name string) *InvalidError {
	allowed := fmt.Sprintf("1 to %d letters and digits of any script and . _ - /", maxName)
	n := utf8.RuneCountInString(name)
	if n > maxName {
		allowed += fmt.Sprintf("; these are %d characters", n)
	}
	ok := n >= 1 && n <= maxName && utf8.ValidString(name)
	for _, c := range name {
		ok = ok && (unicode.IsLetter(c) || unicode.IsDigit(c) || strings.ContainsRune("._-/", c)) &&
			!strings.ContainsRune("\u115F\u1160\u3164\uFFA0", c)
	}
	if !ok {
		return &InvalidError{"Job.Name", name, allowed}
	}
	return nil
}

// Key is the key of the job's run on a date. For a job with Every it is the
// beginning that the keys of the date's slots share.
func (j Job) Key(d Date) string { return j.Name + ":" + d.String() }

// Options are the settings of a Runner. nil or zero fields: the documented defaults.
type Options struct {
	DayStart        time.Duration                // wall-clock time of day at which a business day starts, under 24 h; not for jobs with Every; 0: midnight
	Lease           time.Duration                // silence after which an attempt counts as dead, at least 1 s; beats every Lease/4; 0: 2 min
	StaleAfter      time.Duration                // longest expected duration of jobs that do not say; 0: 20 min
	DatabaseTimeout time.Duration                // how long a claim and an outcome are tried while the database does not answer, 5 s to 1 h; longer than a failover; 0: 30 s
	WorkerID        string                       // label of this process, at most 71 characters; "": the host name
	Schema          string                       // schema of the tables; "": resolved once from the search_path
	Logger          *slog.Logger                 // nil: slog.Default()
	OnEvent         func(context.Context, Event) // after each commit, on the goroutine that made it, context detached; panics are contained
	Now             func() time.Time             // only for deriving dates; nil: time.Now
}

// Runner claims, executes and records runs. Create one per process.
type Runner struct {
	pool     *pgxpool.Pool
	zone     *time.Location
	opts     Options
	log      *slog.Logger
	workerID string
	tables   *store.Tables
	reserve  *reserve.Reserve
	book     *lease.Book

	mu      sync.Mutex
	jobs    []Job         // by Schedule
	calls   int           // under way
	closing chan struct{} // closed by Shutdown
	idle    chan struct{} // closed when calls is 0 after that
}

// New returns a Runner for jobs whose business dates are those of zone. It does
// not touch the database. The pool stays the caller's; it needs at least 2
// connections, because one is kept free for heartbeats and results while jobs
// run. There is no default zone: pass time.LoadLocation("Asia/Seoul"), and import
// time/tzdata if the machine may have no zone data.
func New(pool *pgxpool.Pool, zone *time.Location, opts *Options) (*Runner, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	switch {
	case pool == nil:
		return nil, &InvalidError{"pool", nil, "a pool"}
	case pool.Config().MaxConns < 2:
		return nil, &InvalidError{"pool.MaxConns", pool.Config().MaxConns, "2 or more: one connection is kept free for heartbeats and results"}
	case zone == nil:
		return nil, &InvalidError{"zone", nil, "the business time zone, such as time.LoadLocation(\"Asia/Seoul\")"}
	case zone == time.Local:
		return nil, &InvalidError{"zone", "time.Local", "the business time zone by its name: the server's local zone depends on the host"}
	case o.DayStart < 0 || o.DayStart >= 24*time.Hour:
		return nil, &InvalidError{"Options.DayStart", o.DayStart, "0 to under 24h"}
	case o.Lease != 0 && o.Lease < time.Second:
		return nil, &InvalidError{"Options.Lease", o.Lease, "1s or more, or 0 for 2m"}
	case o.StaleAfter < 0:
		return nil, &InvalidError{"Options.StaleAfter", o.StaleAfter, "a positive duration, or 0 for 20m"}
	case o.DatabaseTimeout != 0 && (o.DatabaseTimeout < lease.StatementLimit || o.DatabaseTimeout > time.Hour):
		return nil, &InvalidError{"Options.DatabaseTimeout", o.DatabaseTimeout, "5s to 1h, or 0 for 30s"}
	case strings.ContainsRune(o.Schema, 0) || !utf8.ValidString(o.Schema) || len(o.Schema) > 63:
		return nil, &InvalidError{"Options.Schema", o.Schema, "the name of a schema, at most 63 bytes"}
	}
	if o.Lease == 0 {
		o.Lease = 2 * time.Minute
	}
	if o.StaleAfter == 0 {
		o.StaleAfter = 20 * time.Minute
	}
	if o.DatabaseTimeout == 0 {
		o.DatabaseTimeout = lease.AnswerLimit
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	r := &Runner{
		pool: pool, zone: zone, opts: o, log: o.Logger, tables: store.NewTables(o.Schema), reserve: reserve.New(pool),
		closing: make(chan struct{}), idle: make(chan struct{}),
	}
	r.book = lease.NewBook(r.tables, r.reserve, o.Lease, o.DatabaseTimeout, o.Logger)
	r.book.Settled = func(ctx context.Context, row store.Row) {
		record := r.record(row)
		r.log.WarnContext(ctx, "a claim whose answer was lost is closed, nothing was executed", append(record.attrs(), "job", record.Job)...)
		r.emit(ctx, Event{Record: record, Previous: Running})
	}
	var err error
	if r.workerID, err = r.newWorkerID(o.WorkerID); err != nil {
		return nil, err
	}
	return r, nil
}

// newWorkerID is a label and the first 8 hexadecimal digits of a fresh UUID, so
// that two processes on one host differ.
func (r *Runner) newWorkerID(label string) (string, error) {
	const limit = 71 // of the column's 80 characters
	n := utf8.RuneCountInString(label)
	if n > limit || !utf8.ValidString(label) || strings.ContainsFunc(label, func(c rune) bool { return !unicode.IsPrint(c) }) {
		return "", &InvalidError{"Options.WorkerID", label, fmt.Sprintf("at most %d printable characters; these are %d", limit, n)}
	}
	if label == "" {
		host, err := os.Hostname()
		if label = store.CleanText(host); err != nil || label == "" {
			label = "unknown-host"
		}
		if short := []rune(label); len(short) > limit {
			label = string(short[:limit])
			r.log.Info("host name shortened for the worker id", "host", host, "label", label)
		}
	}
	id, err := uuid.NewRandom()
	if err != nil {
		return "", fmt.Errorf("worker id: %w", err)
	}
	return label + "-" + id.String()[:8], nil
}

// Zone is the business time zone.
func (r *Runner) Zone() *time.Location { return r.zone }

// Today is the business date now, by Options.Now and DayStart.
func (r *Runner) Today() Date { return businessDate(r.opts.Now(), r.zone, r.opts.DayStart) }

// Run claims and executes the job's run for a trigger now, unless it was claimed
// before: then it does nothing and says why. It returns when the outcome is
// recorded.
//
// It returns an error exactly when somebody should look: the claim could not be
// established (the job did not run), the job failed ([*RunError]), the lease was
// lost (ErrLeaseLost) or the outcome could not be recorded (ErrOutcomeUnknown).
// That error has been logged already, so a cron callback may drop it. Losing the
// claim to another instance is normal and no error.
//
// A timer that fires a hair before midnight belongs to the day before; a scheduler
// that knows the nominal time passes it to RunTrigger.
func (r *Runner) Run(ctx context.Context, job Job) (Result, error) {
	return r.RunTrigger(ctx, job, r.opts.Now())
}

// RunTrigger is Run for a trigger with this nominal time, from another scheduler
// or a test.
func (r *Runner) RunTrigger(ctx context.Context, job Job, fired time.Time) (Result, error) {
	return r.call(ctx, job, func() (slot, error) { return r.slot(job, fired) })
}

// slot is the run that a trigger at this nominal time stands for.
func (r *Runner) slot(job Job, fired time.Time) (slot, error) {
	if fired.IsZero() {
		return slot{}, &InvalidError{"time of the trigger", fired, "the nominal time of a fire, not the zero time"}
	}
	if job.Every != 0 {
		start := slotStart(fired, r.zone, job.Every)
		date := DateOf(start)
		if !date.IsValid() {
			return slot{}, &InvalidError{"date of the run", date.String(), "a calendar date from 0001-01-01 to 9999-12-31"}
		}
		return slot{key: job.Name + ":" + slotLabel(start), date: date, fired: start, trigger: TriggerSchedule, notDue: !job.Calendar.has(date)}, nil
	}
	date := businessDate(fired, r.zone, r.opts.DayStart)
	if job.Date != nil {
		mapped, err := job.Date(date)
		if err != nil {
			return slot{}, fmt.Errorf("date of the run for %s: %w", date, err)
		}
		date = mapped
	}
	if !date.IsValid() {
		return slot{}, &InvalidError{"date of the run", date.String(), "a calendar date from 0001-01-01 to 9999-12-31"}
	}
	return slot{key: job.Key(date), date: date, fired: fired, trigger: TriggerSchedule, notDue: !job.Calendar.has(date)}, nil
}

// RunDate is Run for an explicit date, by hand. Neither Job.Date nor Job.Calendar
// is applied. A job with Every has no run per date: an error.
func (r *Runner) RunDate(ctx context.Context, job Job, date Date) (Result, error) {
	return r.call(ctx, job, func() (slot, error) {
		if job.Every != 0 {
			return slot{}, &InvalidError{"Job.Every", job.Every, "0: a job that runs several times a day has no run per date"}
		}
		if !date.IsValid() {
			return slot{}, &InvalidError{"date", date.String(), "a calendar date from 0001-01-01 to 9999-12-31"}
		}
		return slot{key: job.Key(date), date: date, fired: r.opts.Now(), trigger: TriggerManual}, nil
	})
}

// slot is the run that a trigger stands for.
type slot struct {
	key     string
	date    Date
	fired   time.Time
	trigger Trigger
	notDue  bool // by the calendar
	again   bool // only if the run exists and is due or approved
}

// call validates, derives the run before anything can wait, claims and executes
// it, and logs how that ended.
func (r *Runner) call(ctx context.Context, job Job, derive func() (slot, error)) (res Result, err error) {
	defer func() { r.conclude(ctx, job, res, err) }()
	if err := job.Validate(); err != nil {
		return res, err
	}
	if !r.enter() {
		return res, fmt.Errorf("run %s: %w", job.Name, ErrShutdown)
	}
	defer r.leave()
	var s slot
	if err := contain(func() (err error) { s, err = derive(); return err }); err != nil {
		return res, fmt.Errorf("run %s: %w", job.Name, err)
	}
	return r.claim(ctx, job, s)
}

// conclude writes the one line at the end of a call: INFO, WARN for an attempt
// that failed and will be retried, ERROR for every other error that is returned
// but a refusal after Shutdown.
func (r *Runner) conclude(ctx context.Context, job Job, res Result, err error) {
	if err == nil && !r.log.Enabled(ctx, slog.LevelInfo) {
		return
	}
	level, message := slog.LevelInfo, "run finished"
	attrs := append([]any{"job", store.CleanText(job.Name), "worker_id", r.workerID}, res.Record.attrs()...)
	switch failed := (*RunError)(nil); {
	case err == nil && !res.Ran():
		message = "run not started"
		attrs = append(attrs, "decision", res.Decision, "run_worker_id", res.Record.WorkerID)
	case err != nil && res.Ran() && errors.As(err, &failed) && !res.Record.NextAttemptAt.IsZero():
		level = slog.LevelWarn
		attrs = append(attrs, "next_attempt_at", res.Record.NextAttemptAt)
	case errors.Is(err, ErrShutdown) && !res.Ran(): // a fire between stopping the scheduler and this process
		message = "run not started"
	case err != nil:
		level = slog.LevelError
		if !res.Ran() {
			message = "run not started"
		}
	}
	if err != nil {
		attrs = append(attrs, "err", errorText(err))
	}
	r.log.Log(context.WithoutCancel(ctx), level, message, attrs...)
}

// enter counts a call, unless the Runner is shutting down.
func (r *Runner) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped() {
		return false
	}
	r.calls++
	return true
}

func (r *Runner) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls--
	r.settleIdle()
}

// stopped reports whether Shutdown was called.
func (r *Runner) stopped() bool {
	select {
	case <-r.closing:
		return true
	default:
		return false
	}
}

// settleIdle closes idle once nothing is under way any more. r.mu is held.
func (r *Runner) settleIdle() {
	select {
	case <-r.idle:
	default:
		if r.calls == 0 && r.stopped() {
			close(r.idle)
		}
	}
}

// Shutdown makes the Runner start nothing more (ErrShutdown) and waits for the
// running attempts. When ctx ends, it cancels them with cause ErrShutdown and
// waits for their results, at most Options.DatabaseTimeout and 5 s; it then
// returns an error that names those that were interrupted. It does not close the pool; after an error that
// says "still running", closing it would wait for the connections of those jobs.
// Further calls wait in the same way.
func (r *Runner) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	if !r.stopped() {
		close(r.closing)
	}
	r.settleIdle()
	r.mu.Unlock()
	select {
	case <-r.idle:
		r.book.Settle()
		return nil
	case <-ctx.Done():
	}
	names := r.book.Interrupt(ErrShutdown)
	limit := time.NewTimer(r.opts.DatabaseTimeout + lease.StatementLimit)
	defer limit.Stop()
	select {
	case <-r.idle:
		r.book.Settle()
	case <-limit.C:
		return fmt.Errorf("shutdown: still running: %s: %w", strings.Join(r.book.Interrupt(ErrShutdown), ", "), context.Cause(ctx))
	}
	if len(names) > 0 {
		return fmt.Errorf("shutdown: interrupted %s: %w", strings.Join(names, ", "), context.Cause(ctx))
	}
	return nil
}

// read calls fn with the statements, bounded.
func (r *Runner) read(ctx context.Context, fn func(context.Context, *store.Store) error) error {
	return schema.Read(ctx, r.pool, r.tables, fn)
}

// Migrate creates the tables, or adopts an existing batch_job_run with its rows,
// and applies what is missing of the SQL files in package migrations. It is safe
// from every instance at once and does nothing when all is applied, whoever
// applied it; a newer schema is fine unless one of its files is marked
// incompatible. It waits at most a second for a lock and then tries again, for a
// minute in all, so that programs that use the table are not stopped. It needs
// the privileges to create tables in the schema, and to own an existing
// batch_job_run.
func (r *Runner) Migrate(ctx context.Context) error {
	return schema.Migrate(ctx, r.pool, r.tables, r.log)
}

// Verify judges the tables as they are, before the first run: the keys that
// claims rest on, the columns, the privileges of this role, a server that takes
// writes, and a clock that differs less than 5 s from the server's (business
// dates come from this one). It logs the session's time zone beside the business
// zone at INFO: SQL that derives dates from now() uses the former.
func (r *Runner) Verify(ctx context.Context) error {
	return schema.Verify(ctx, r.pool, r.tables, r.log, r.zone, r.opts.Now)
}
