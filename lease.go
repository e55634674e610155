package jobrun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/schema"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Run is what a running attempt holds: the right to act for its run. It is of no
// use after the [Func] has returned.
type Run struct {
	runner *Runner
	record Record
	held   *lease.Held
	log    *slog.Logger

	mu     sync.Mutex
	unread map[string]error // by EachOptions.Step: why Each ended before the last item
}

// Key is the key of the run, such as daily-settlement:2026-09-15.
func (r *Run) Key() string { return r.record.Key }

// Job is the name of the job.
func (r *Run) Job() string { return r.record.Job }

// Date is the business date of the run; for a job with Every, that of its slot.
func (r *Run) Date() Date { return r.record.Date }

// Attempt is the number of this attempt, from 1.
func (r *Run) Attempt() int { return r.record.Attempt }

// Trigger is what started this attempt.
func (r *Run) Trigger() Trigger { return r.record.Trigger }

// WorkerID is this process in the tables.
func (r *Run) WorkerID() string { return r.runner.workerID }

// ScheduledFor is the nominal time of the trigger that made the run, in the
// business zone; retries and re-runs keep it. For a job with Every it is the
// start of the slot.
func (r *Run) ScheduledFor() time.Time { return r.record.ScheduledFor }

// Logger logs with the attributes of the run: job, job_key, business_date,
// attempt, worker_id, trigger.
func (r *Run) Logger() *slog.Logger { return r.log }

// AddProcessed adds to the count of items processed. It only counts in memory;
// heartbeats and the result carry the count to the attempt's row.
func (r *Run) AddProcessed(n int64) { r.held.Processed.Add(n) }

// AddFailed adds to the count of items failed, as AddProcessed does.
func (r *Run) AddFailed(n int64) { r.held.Failed.Add(n) }

// Items is what was counted so far in this attempt.
func (r *Run) Items() (processed, failed int64) {
	return r.held.Processed.Load(), r.held.Failed.Load()
}

// attrs are the attributes of log lines, as far as they are known.
func (r Record) attrs() []any {
	var attrs []any
	add := func(known bool, key string, value any) {
		if known {
			attrs = append(attrs, key, value)
		}
	}
	add(r.Key != "", "job_key", r.Key)
	add(r.Date.IsValid(), "business_date", r.Date.String())
	add(r.Status != "", "attempt", r.Attempt)
	add(r.Trigger != "", "trigger", r.Trigger)
	add(r.Status != "", "status", r.Status)
	add(!r.StartedAt.IsZero(), "started_at", r.StartedAt)
	if !r.FinishedAt.IsZero() {
		add(true, "finished_at", r.FinishedAt)
		add(true, "duration", r.FinishedAt.Sub(r.StartedAt))
		add(true, "items_processed", r.ItemsProcessed)
		add(true, "items_failed", r.ItemsFailed)
	}
	return attrs
}

// claim establishes whose the run of a slot is, and executes it if it is ours.
func (r *Runner) claim(ctx context.Context, job Job, s slot) (res Result, err error) {
	res.Record = Record{Key: s.key, Job: job.Name, Date: s.date, ScheduledFor: s.fired.In(r.zone)}
	if ctx.Err() != nil { // before anything happens
		return res, fmt.Errorf("claim %s: %w", s.key, context.Cause(ctx))
	}
	if err := r.book.Open(ctx); err != nil {
		return res, fmt.Errorf("claim %s: %w", s.key, err)
	}
	defer r.reserve.Close()
	c := store.Claim{
		Key: s.key, Job: job.Name, Date: s.date.String(), Token: uuid.NewString(), Worker: r.workerID,
		Trigger: string(s.trigger), ScheduledFor: s.fired, Lease: r.opts.Lease, StaleAfter: r.opts.StaleAfter,
	}
	if job.StaleAfter > 0 {
		c.StaleAfter = job.StaleAfter
	}
	if s.notDue {
		res.Decision = NotDue
		row, err := r.book.Record(ctx, c, "not due: the job's calendar leaves this date out")
		if err != nil {
			return res, fmt.Errorf("claim %s: %w", s.key, schema.Explain(err))
		}
		if res.Record = r.record(row); c.Won(row) {
			r.emit(ctx, Event{Record: res.Record})
		}
		return res, nil
	}
	c.Again, c.First = s.again, s.trigger == TriggerCatchUp // which keeps the order of dates, and repeats none
	claimed, err := r.book.Claim(ctx, c)
	if err == nil && claimed.Key == "" { // there was one when it was found due
		err = ErrNotFound
	}
	if err != nil {
		return res, fmt.Errorf("claim %s: %w", s.key, schema.Explain(err))
	}
	row := claimed.Row
	if res.Record = r.record(row); !c.Won(row) || row.Status != string(Running) {
		res.Decision = r.lost(row)
		return res, nil
	}
	if err := ctx.Err(); err != nil {
		return r.giveBack(ctx, c, row, context.Cause(ctx))
	}
	jobCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	run := &Run{runner: r, record: res.Record, log: r.log.With("job", job.Name, "job_key", s.key, "business_date", s.date.String(),
		"attempt", row.Attempt, "worker_id", r.workerID, "trigger", row.Trigger)}
	if run.held, err = r.book.Hold(row, claimed.Sent, cancel, run.log); err != nil {
		return r.giveBack(ctx, c, row, err)
	}
	defer r.book.Release(run.held)
	started := false
	defer func() {
		if !started { // OnEvent ended this goroutine
			_, _ = r.giveBack(ctx, c, row, errors.New("OnEvent did not return"))
		}
	}()
	run.log.InfoContext(ctx, "run started", "started_at", res.Record.StartedAt)
	r.emit(ctx, Event{Record: res.Record, Previous: Status(claimed.Previous)})
	started, res.Decision = true, Ran
	res.Record, err = r.execute(ctx, jobCtx, job, run)
	return res, err
}

// unfinished is err, or why the work is not done although it is nil or a skip:
// Each ended before the last item, and nobody has read those behind.
func (r *Run) unfinished(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && skipOf(err) == nil {
		return err
	}
	for step, why := range r.unread {
		return fmt.Errorf("not all items of step %q were read: %w", step, why)
	}
	return err
}

// leftUnread notes why a step's Each ended before its last item; nil: it has read all.
func (r *Run) leftUnread(step string, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unread == nil {
		r.unread = map[string]error{}
	}
	if r.unread[step] = why; why == nil {
		delete(r.unread, step)
	}
}

// giveBack closes a claim that was won and will not be executed.
func (r *Runner) giveBack(ctx context.Context, c store.Claim, row store.Row, why error) (Result, error) {
	record := r.record(r.book.NeverStarted(ctx, c, row, errorText(why)))
	if record.Status != Running {
		r.emit(ctx, Event{Record: record, Previous: Running, Err: why})
	}
	return Result{Record: record}, fmt.Errorf("claim %s: %w", c.Key, why)
}

// lost is the decision about a run that another claim holds.
func (r *Runner) lost(row store.Row) Decision {
	switch Status(row.Status) {
	case Running:
		return AlreadyRunning
	case Succeeded:
		return AlreadySucceeded
	case Skipped:
		return AlreadySkipped
	case Failed:
		if !row.NextAttemptAt.IsZero() && row.Pruned.IsZero() {
			return RetryLater
		}
		return AlreadyFailed
	}
	return UnknownStatus
}

// execute runs the function of an attempt that is held, and records what became
// of it.
func (r *Runner) execute(ctx, jobCtx context.Context, job Job, run *Run) (Record, error) {
	if job.Timeout > 0 {
		var stop context.CancelFunc
		jobCtx, stop = context.WithTimeoutCause(jobCtx, job.Timeout, fmt.Errorf("%w: Job.Timeout %s", context.DeadlineExceeded, job.Timeout))
		defer stop()
	}
	err := run.unfinished(call(jobCtx, job.Func, run))
	lost := run.held.Returned()
	if row, ended := run.held.Ended(); ended {
		if err != nil {
			err = &RunError{Key: run.Key(), Attempt: run.Attempt(), Err: fmt.Errorf("after Complete: %w", err)}
		}
		return r.record(row), err
	}

	o, err := r.outcome(ctx, jobCtx, job, run, err)
	row, finishErr := r.book.Finish(ctx, run.held, o)
	if errors.Is(finishErr, lease.ErrGone) {
		o, err = r.outcome(ctx, jobCtx, job, run, finishErr)
		row, finishErr = r.book.Finish(ctx, run.held, o)
	}
	if finishErr != nil {
		if now, e := r.Get(context.WithoutCancel(ctx), run.Key()); e == nil {
			run.record = now
		}
		if err != nil {
			return run.record, fmt.Errorf("%s: %w (the job itself: %w)", run.Key(), finishErr, itself{err})
		}
		return run.record, fmt.Errorf("%s: %w", run.Key(), finishErr)
	}
	if lost != nil && err == nil {
		run.log.WarnContext(ctx, "the lease was lost meanwhile, but the run was still ours at the end", "err", lost.Error())
	}
	record := r.record(row)
	r.emit(ctx, Event{Record: record, Previous: Running, Err: err})
	return record, err
}

// outcome is how an attempt ends whose function has returned err, and the error that
// the call returns of it.
func (r *Runner) outcome(ctx, jobCtx context.Context, job Job, run *Run, err error) (store.Outcome, error) {
	o := store.Outcome{Status: string(Succeeded), Next: -1, Processed: run.held.Processed.Load(), Failed: run.held.Failed.Load()}
	if err == nil {
		return o, nil
	}
	if skipped := skipOf(err); skipped != nil {
		o.Status, o.Error = string(Skipped), store.CleanText(skipped.reason)
		return o, nil
	}
	interrupted := ctx.Err() != nil || errors.Is(context.Cause(jobCtx), ErrShutdown)
	o.Status, o.Next = string(Failed), r.nextAttempt(ctx, job, run, err, interrupted)
	if cause := context.Cause(jobCtx); cause != nil {
		err = withCause(err, cause)
	}
	o.Error = errorText(err)
	return o, &RunError{Key: run.Key(), Attempt: run.Attempt(), Err: err}
}

// itself is the error of a job whose result was not recorded. What it says of the
// lease is not what the call says: that is told by the error beside it.
type itself struct{ err error }

func (e itself) Error() string { return e.err.Error() }

func (e itself) Is(target error) bool {
	return target != ErrLeaseLost && target != ErrOutcomeUnknown && errors.Is(e.err, target)
}

func (e itself) As(target any) bool { return errors.As(e.err, target) }

// call runs the function on a goroutine of its own and waits for it: a Goexit
// ends that goroutine, not the caller's.
func call(ctx context.Context, f Func, run *Run) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		finished := false
		defer func() {
			if v := recover(); v != nil || !finished {
				if v == nil {
					v = "the job ended its goroutine with runtime.Goexit"
				}
				err = &PanicError{Value: v, Stack: stack()}
			}
		}()
		err = f(ctx, run)
		finished = true
	}()
	<-done
	return harmless(err)
}

// harmless is err, or its text if it is one whose methods panic.
func harmless(err error) error {
	if p := caught(func() { ask(err) }); p != nil {
		return fmt.Errorf("%s (%T, whose methods panic: %v)", errorText(err), err, p.Value)
	}
	return err
}

// ask calls the methods of err that errors.Is and errors.As call: those of a
// typed nil may panic, and would do so here or in the caller's hands.
func ask(err error) {
	_ = errors.Is(err, ErrLeaseLost)
	_ = errors.As(err, new(*skip))
	_ = store.Code(err)
}

// skipOf finds the skip that a job returned, plainly or wrapped; nil: none. One
// that a panic carried, or that stands beside other errors, is none: something
// went wrong.
func skipOf(err error) *skip {
	for {
		switch e := err.(type) { //nolint:errorlint // walks the chain itself
		case *skip:
			return e
		case *PanicError:
			return nil
		case interface{ Unwrap() error }:
			err = e.Unwrap()
		default:
			return nil
		}
	}
}

// withCause adds why the job's context ended to its error, unless one says what
// the other does. The cause is the caller's: its methods may panic.
func withCause(err, cause error) error {
	both := fmt.Errorf("%w (%s)", err, errorText(cause))
	_ = caught(func() {
		switch {
		case errors.Is(err, cause), errors.Is(err, ErrLeaseLost) && errors.Is(cause, ErrLeaseLost):
			both = err
		case errors.Is(cause, err): // says more
			both = cause
		default:
			both = fmt.Errorf("%w (%w)", err, cause)
		}
	})
	return both
}

// contain calls fn and returns its panic as a *PanicError.
func contain(fn func() error) (err error) {
	if p := caught(func() { err = fn() }); p != nil {
		return p
	}
	return err
}

// caught calls fn and returns its panic; nil: none.
func caught(fn func()) (p *PanicError) {
	defer func() {
		if v := recover(); v != nil {
			p = &PanicError{Value: v, Stack: stack()}
		}
	}()
	fn()
	return nil
}

// stack is the stack of a panic, cut to 4 KiB.
func stack() []byte {
	s := debug.Stack()
	return s[:min(len(s), 4<<10)]
}

// errorText is the text of any error, storable and bounded; one whose Error
// method panics says so instead.
func errorText(err error) string {
	text := ""
	if p := caught(func() { text = err.Error() }); p != nil {
		text = fmt.Sprintf("%T, whose Error method panicked: %v", err, p.Value)
	}
	if text == "" {
		text = fmt.Sprintf("%T without a text", err)
	}
	return store.CleanText(text)
}

// emit hands an event to Options.OnEvent.
func (r *Runner) emit(ctx context.Context, e Event) {
	if r.opts.OnEvent == nil {
		return
	}
	ctx = context.WithoutCancel(ctx)
	if err := contain(func() error { r.opts.OnEvent(ctx, e); return nil }); err != nil {
		r.log.ErrorContext(ctx, "OnEvent panicked", append(e.Record.attrs(), "err", errorText(err))...)
	}
}
