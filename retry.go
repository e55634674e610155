package jobrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Retry says how often a run that fails is attempted, and when. The zero value
// is one attempt.
type Retry struct {
	// MaxAttempts counts executions including the first; 0 and 1: no retry. An
	// attempt that a deployment interrupted counts; one that never started does not.
	MaxAttempts int
	// Backoff is the pause after the given execution (from 1) has failed. nil:
	// Exponential(time.Minute, time.Hour).
	Backoff func(attempt int) time.Duration
}

// Exponential returns a backoff that doubles from min and never exceeds max:
// min·2^(attempt-1), with a jitter of up to 20% so that jobs that failed at one
// instant do not return at one instant. The result is never over max and never
// zero or negative, whatever the attempt. A min that is not positive counts as a
// nanosecond, a max below min as min.
func Exponential(min, max time.Duration) func(attempt int) time.Duration {
	if min <= 0 {
		min = 1
	}
	if max < min {
		max = min
	}
	return func(attempt int) time.Duration {
		d := min
		for i := 1; i < attempt && d < max; i++ {
			if d > max/2 { // doubling would pass max, or overflow
				d = max
			} else {
				d *= 2
			}
		}
		low, high := d-d/5, max
		if d/5 < max-d {
			high = d + d/5
		}
		return low + rand.N(high-low+1)
	}
}

// Permanent marks an error that no retry can mend: the run fails for good,
// whatever attempts remain, and whatever the error is wrapped in or joined with.
// nil stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanent{err}
}

// RetryAfter marks an error with the pause before the next attempt, in place of
// Retry.Backoff; attempts still count. nil stays nil, a negative pause is none.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &later{err, max(d, 0)}
}

// RetryDue executes the runs of the given jobs (none given: those registered by
// Schedule; none at all is an error) that are due or approved now, and returns
// when they have ended: jobs side by side, the runs of one job within this call
// one after the other, oldest date first. Runs of other jobs are left alone, so that a new
// binary's jobs are not run by an old one. It may be called by several instances
// and overlap with itself: a run is executed by one of them. The results are in
// the order of the jobs; the error joins those of all runs that failed, which
// have been logged. One slow run makes the whole call slow, so call it on a
// goroutine of its own, such as cron's @every 1m.
func (r *Runner) RetryDue(ctx context.Context, jobs ...Job) ([]Result, error) {
	if r.stopped() {
		return nil, r.report(ctx, Job{}, fmt.Errorf("due runs: %w", ErrShutdown))
	}
	if len(jobs) == 0 {
		jobs = r.Scheduled()
	}
	if len(jobs) == 0 {
		return nil, r.report(ctx, Job{}, &InvalidError{"jobs", 0, "at least one job, given here or registered by Schedule"})
	}
	names := make([]string, len(jobs))
	for i, job := range jobs {
		if err := job.Validate(); err != nil {
			return nil, r.report(ctx, job, err)
		}
		names[i] = job.Name
	}
	var keys []string
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		keys, err = s.Due(ctx, r.pool, names)
		return err
	})
	if err != nil {
		return nil, r.report(ctx, Job{}, fmt.Errorf("due runs: %w", err))
	}
	results := make([][]Result, len(jobs))
	errs := make([]error, len(jobs))
	var wg sync.WaitGroup
	for i, job := range jobs {
		wg.Go(func() { results[i], errs[i] = r.retryJob(ctx, job, keys) })
	}
	wg.Wait()
	return slices.Concat(results...), errors.Join(errs...)
}

// retryJob executes those of the keys that are the job's, in order.
func (r *Runner) retryJob(ctx context.Context, job Job, keys []string) (results []Result, err error) {
	var errs []error
	for _, key := range keys {
		name, date, start, ok := parseKey(key)
		if !ok || name != job.Name || ctx.Err() != nil || r.stopped() {
			continue
		}
		res, err := r.call(ctx, job, func() (slot, error) {
			return slot{key: key, date: date, fired: cmp.Or(start, r.opts.Now()), trigger: TriggerRetry, again: true}, nil
		})
		results, errs = append(results, res), append(errs, err)
	}
	return results, errors.Join(errs...)
}

type permanent struct{ error }

func (e *permanent) Unwrap() error { return e.error }

type later struct {
	error
	pause time.Duration
}

func (e *later) Unwrap() error { return e.error }

// nextAttempt is the pause before the next attempt of a run whose execution of
// this number failed with err; negative: there is none.
func (r *Runner) nextAttempt(ctx context.Context, job Job, run *Run, err error, interrupted bool) time.Duration {
	const none = -1
	var told *later
	switch {
	case run.held.Row.Executions >= job.Retry.MaxAttempts,
		run.Trigger() == TriggerRerun, // one approval, one execution
		errors.As(err, new(*permanent)):
		return none
	case interrupted:
		return 0
	case errors.As(err, &told):
		return told.pause
	case job.Retry.Backoff == nil:
		return Exponential(time.Minute, time.Hour)(run.held.Row.Executions)
	}
	pause := time.Duration(-1)
	var p *PanicError
	done := make(chan struct{})
	go func() { // a Goexit must not end the caller's goroutine
		defer close(done)
		p = caught(func() { pause = max(0, job.Retry.Backoff(run.held.Row.Executions)) })
	}()
	<-done
	if pause < 0 {
		run.log.ErrorContext(ctx, "backoff panicked, retrying in a minute", "err", fmt.Sprint(p))
		return time.Minute
	}
	return pause
}
