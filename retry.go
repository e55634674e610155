package jobrun

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
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
		// Below max the jitter goes both ways, at max only down.
		jittered := time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
		if jittered > max || jittered <= 0 {
			jittered = d - time.Duration(float64(d)*0.2*rand.Float64())
		}
		return jittered
	}
}

// Permanent marks an error that no retry can mend: the run fails for good,
// whatever attempts remain. nil stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &directive{err: err, permanent: true}
}

// RetryAfter marks an error with the pause before the next attempt, in place of
// Retry.Backoff; attempts still count. nil stays nil, a negative pause is none.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &directive{err: err, after: max(d, 0)}
}

// directive is an error that also says what follows.
type directive struct {
	err       error
	permanent bool
	after     time.Duration
}

func (e *directive) Error() string { return e.err.Error() }
func (e *directive) Unwrap() error { return e.err }

// nextAttempt is the pause before the next attempt of a run whose execution of
// this number failed with err; negative: there is none.
func (r *Runner) nextAttempt(ctx context.Context, job Job, run *Run, err error, interrupted bool) time.Duration {
	const none = -1
	var d *directive
	told := errors.As(err, &d)
	switch {
	case run.held.Row.Executions >= job.Retry.MaxAttempts,
		run.Trigger() == TriggerRerun, // one approval, one execution
		told && d.permanent:
		return none
	case interrupted:
		return 0
	case told:
		return d.after
	case job.Retry.Backoff == nil:
		return Exponential(time.Minute, time.Hour)(run.held.Row.Executions)
	}
	pause := time.Minute
	if err := contain(func() error { pause = max(0, job.Retry.Backoff(run.held.Row.Executions)); return nil }); err != nil {
		run.log.ErrorContext(ctx, "backoff panicked, retrying in a minute", "err", errorText(err))
	}
	return pause
}
