package jobrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// ProblemKind is what is wrong with a run.
type ProblemKind string

// The kinds of problems.
const (
	ProblemStale    ProblemKind = "STALE"          // RUNNING, but silent or over its limit
	ProblemFailed   ProblemKind = "FAILED"         // no attempt is left: a person decides
	ProblemRetrying ProblemKind = "RETRYING"       // FAILED, waits for its next attempt
	ProblemMissed   ProblemKind = "MISSED"         // a due date without a run
	ProblemApproved ProblemKind = "APPROVED"       // a re-run was approved and nobody has executed it
	ProblemAttempt  ProblemKind = "ATTEMPT_FAILED" // an attempt failed and a later one followed
)

// Problem is something that needs a person, or a look.
type Problem struct {
	Kind   ProblemKind `json:"kind"`
	Job    string      `json:"job,omitempty"`
	Key    string      `json:"key"`
	Date   Date        `json:"date,omitzero"`
	Record Record      `json:"record,omitzero"` // of the run now, for ATTEMPT_FAILED of that attempt; zero for a missed date
	Since  time.Time   `json:"since"`           // since when, or when it happened; the start of the date for a missed one
}

// AttentionOptions are the limits of Attention. nil or zero fields: the defaults.
type AttentionOptions struct {
	DueBy         time.Duration // wall-clock time of day from which a run of today is missed; 0: today is not judged
	ApprovedAfter time.Duration // age from which a pending approval is a problem; 0: 10 min
	FailedSince   time.Time     // report attempts too that failed since then and were followed by another, by the database clock; zero: none
}

// Attention reports what needs a person now, oldest first within each kind. Of
// every job in the schema: stale runs; failed ones, with no attempt left or
// waiting for the next; approvals that nobody executes. Of the given jobs (none
// given: those registered by Schedule): the due dates without a run, from the
// job's first run on. It reads a few index ranges, however long the history, and
// changes nothing. If the missed dates of a job cannot be told, because its Date or
// Calendar fails, the problems that were found come with that error.
func (r *Runner) Attention(ctx context.Context, opts *AttentionOptions, jobs ...Job) ([]Problem, error) {
	o := AttentionOptions{}
	if opts != nil {
		o = *opts
	}
	switch {
	case o.DueBy < 0 || o.DueBy >= 24*time.Hour:
		return nil, &InvalidError{"AttentionOptions.DueBy", o.DueBy, "0 to under 24h"}
	case o.ApprovedAfter < 0:
		return nil, &InvalidError{"AttentionOptions.ApprovedAfter", o.ApprovedAfter, "a positive duration, or 0 for 10m"}
	case o.ApprovedAfter == 0:
		o.ApprovedAfter = 10 * time.Minute
	}
	if len(jobs) == 0 {
		jobs = r.Scheduled()
	}
	for _, job := range jobs {
		if err := job.Validate(); err != nil {
			return nil, err
		}
	}
	var problems []Problem
	add := func(kind ProblemKind, rec Record, since time.Time) {
		problems = append(problems, Problem{kind, rec.Job, rec.Key, rec.Date, rec, since})
	}
	stale, err := r.Stale(ctx)
	if err != nil {
		return nil, fmt.Errorf("attention: %w", err)
	}
	for _, s := range stale {
		since := s.StartedAt
		if !s.HeartbeatAt.IsZero() && !s.Alive {
			since = s.HeartbeatAt
		}
		add(ProblemStale, s.Record, since)
	}
	var waiting []store.Waiting
	var failed []store.Row
	err = r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		if waiting, err = s.Attention(ctx, r.pool, o.ApprovedAfter); err == nil && !o.FailedSince.IsZero() {
			failed, err = s.Failing(ctx, r.pool, o.FailedSince)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("attention: %w", err)
	}
	for _, w := range waiting {
		switch rec := r.record(w.Row); {
		case !rec.ApprovedAt.IsZero():
			if w.Overripe { // else somebody has just decided
				add(ProblemApproved, rec, rec.ApprovedAt)
			}
		case rec.NextAttemptAt.IsZero():
			add(ProblemFailed, rec, rec.FinishedAt)
		default:
			add(ProblemRetrying, rec, rec.FinishedAt)
		}
	}
	for _, f := range failed {
		rec := r.record(f)
		add(ProblemAttempt, rec, rec.FinishedAt)
	}
	var errs []error // of one job's rule or calendar: the others' problems are shown all the same
	for _, job := range jobs {
		missed, err := r.overlooked(ctx, job, o.DueBy)
		if err != nil {
			errs = append(errs, fmt.Errorf("attention: missed dates of %s: %w", job.Name, err))
		}
		for _, d := range missed {
			problems = append(problems, Problem{ProblemMissed, job.Name, job.Key(d), d, Record{}, startOfDay(d, r.zone)})
		}
	}
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Since.Compare(b.Since), cmp.Compare(a.Key, b.Key))
	})
	return problems, errors.Join(errs...)
}
