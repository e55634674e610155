package jobrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun/internal/fire"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Schedule adds the job to c and dates each run by its nominal fire time. It
// returns an error for a spec that does not parse or never fires. The function's
// own panics and errors never reach c, whatever wrappers it has. The job is
// registered for RetryDue and Attention.
//
// ctx is the context of the jobs, not only of this call: when it ends, running
// attempts are interrupted, and later fires do nothing. Pass one that SIGTERM does
// not end, such as context.Background(), and let [Runner.Shutdown] give the
// running attempts their time. After Shutdown fires do nothing either; the entry
// stays in c.
//
// The spec's times are those of c's zone: create c with
// cron.WithLocation(zone), or the host's zone decides. A zone whose clock differs
// from the business zone's is logged at WARN with the first fires and their dates.
// Both fires of a repeated hour carry one date and run once. A fire in a skipped
// hour does not happen, and where clocks skip midnight cron may leave out a fire of
// the day that begins then; a callback that a wrapper such as DelayIfStillRunning
// holds back until after the next fire is dated by that one: Missed finds them all.
// Fires of cron on days that the spec does not name, after such a midnight, do
// nothing.
func (r *Runner) Schedule(ctx context.Context, c *cron.Cron, spec string, job Job) (id cron.EntryID, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("schedule %s: %w", job.Name, err)
			r.log.ErrorContext(ctx, "job not scheduled", "job", store.CleanText(job.Name), "err", errorText(err))
		}
	}()
	if c == nil {
		return 0, &InvalidError{"cron", nil, "a *cron.Cron"}
	}
	if err := job.Validate(); err != nil {
		return 0, err
	}
	id, err = fire.Add(c, spec, r.opts.Now(), func(nominal time.Time) {
		if ctx.Err() != nil || r.stopped() {
			return
		}
		if nominal.IsZero() { // started by hand
			nominal = r.opts.Now()
		}
		_, _ = r.RunTrigger(ctx, job, nominal) // logged there
	})
	if err != nil {
		return 0, fmt.Errorf("spec %q: %w", spec, err)
	}
	r.tellZone(ctx, c, id, job)
	r.mu.Lock()
	r.jobs = append(r.jobs, job)
	r.mu.Unlock()
	return id, nil
}

// tellZone logs a schedule's zone if it is not the business zone.
func (r *Runner) tellZone(ctx context.Context, c *cron.Cron, id cron.EntryID, job Job) {
	zone, ok := fire.Zone(c, id)
	if !ok || fire.SameClock(zone, r.zone, r.opts.Now()) {
		return
	}
	var fires []string
	for next := fire.Next(c, id, r.opts.Now()); len(fires) < 3 && !next.IsZero(); next = fire.Next(c, id, next) {
		var s slot
		err := contain(func() (err error) { s, err = r.slot(job, next); return err })
		if err != nil {
			s.key = "no run: " + errorText(err)
		}
		fires = append(fires, next.Format(time.RFC3339)+" -> "+s.key)
	}
	r.log.WarnContext(ctx, "the schedule's time zone is not the business zone", "job", job.Name,
		"schedule_zone", zone.String(), "business_zone", r.zone.String(), "first_fires", fires)
}

// Scheduled returns the jobs registered by Schedule, the latest of each name.
func (r *Runner) Scheduled() (jobs []Job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, job := range r.jobs {
		if !slices.ContainsFunc(r.jobs[i+1:], func(later Job) bool { return later.Name == job.Name }) {
			jobs = append(jobs, job)
		}
	}
	return jobs
}

// Missed returns the dates in [from, to], at most 4000 days, that were due and
// have no run: those that Job.Date yields for a trigger date up to today and that
// Job.Calendar accepts. It knows nothing of cron specs: a job that is due on some
// days only needs a Calendar. Where Job.Date fails, the known dates come with its
// error. A job with Every has no dates: an error.
func (r *Runner) Missed(ctx context.Context, job Job, from, to Date) ([]Date, error) {
	_, missed, err := r.ledger(ctx, job, from, to, r.Today())
	if err != nil {
		return missed, fmt.Errorf("missed dates of %s: %w", job.Name, err)
	}
	return missed, nil
}

// CatchUp runs missed dates in [from, to], oldest first, at most limit of them (0:
// none), with trigger TriggerCatchUp. It stops at the first date that is not SUCCEEDED
// or SKIPPED, whoever ran it and whenever it failed, so that several instances
// that catch up at once keep the order; a date that is due again is left to
// RetryDue. It returns what it did, and the error of the run that stopped it.
// Nothing calls it by itself: a first deployment backfills nothing.
func (r *Runner) CatchUp(ctx context.Context, job Job, from, to Date, limit int) (results []Result, err error) {
	err = judgeable(job, from, to)
	if err == nil && limit < 0 {
		err = &InvalidError{"limit", limit, "0 or more"}
	}
	if err != nil {
		return nil, r.report(ctx, job, fmt.Errorf("catch up %s: %w", job.Name, err))
	}
	for range limit {
		// Read again each time: what was done may be running again on approval.
		open, missed, err := r.ledger(ctx, job, from, to, r.Today())
		if err != nil {
			return results, r.report(ctx, job, fmt.Errorf("catch up %s: %w", job.Name, err))
		}
		if len(missed) == 0 || len(open) > 0 && open[0].Compare(missed[0]) < 0 {
			break // done, or an earlier date is not
		}
		res, err := r.call(ctx, job, func() (slot, error) {
			return slot{key: job.Key(missed[0]), date: missed[0], fired: r.opts.Now(), trigger: TriggerCatchUp}, nil
		})
		results = append(results, res)
		if err != nil || res.Record.Status != Succeeded && res.Record.Status != Skipped {
			return results, err
		}
	}
	return results, nil
}

// report logs an error of a call that never came to a run.
func (r *Runner) report(ctx context.Context, job Job, err error) error {
	level := slog.LevelError
	if errors.Is(err, ErrShutdown) {
		level = slog.LevelInfo
	}
	r.log.Log(ctx, level, "run not started", "job", store.CleanText(job.Name), "err", errorText(err))
	return err
}

// judgeable refuses jobs that have no run per date, and ranges that are none.
func judgeable(job Job, from, to Date) error {
	if err := job.Validate(); err != nil {
		return err
	}
	switch dates := from.String() + " to " + to.String(); {
	case job.Every != 0:
		return &InvalidError{"Job.Every", job.Every, "0: a job that runs several times a day has no run per date"}
	case !from.IsValid() || !to.IsValid() || to.Compare(from) < 0:
		return &InvalidError{"dates", dates, "two dates, the earlier first"}
	case from.AddDays(longest).Compare(to) <= 0:
		return &InvalidError{"dates", dates, fmt.Sprintf("at most %d days", longest)}
	}
	return nil
}

// longest is how many days Missed judges at most.
const longest = 4000

// ledger judges the job's dates in [from, to] whose trigger date is not after
// last: those without a row are missed, those with a row that is neither SUCCEEDED
// nor SKIPPED are open. Both oldest first.
func (r *Runner) ledger(ctx context.Context, job Job, from, to, last Date) (open, missed []Date, err error) {
	if err := judgeable(job, from, to); err != nil {
		return nil, nil, err
	}
	var dates []Date
	failed := contain(func() (err error) { dates, err = dueDates(job.Date, job.Calendar, from, to, last); return err })
	if dates == nil {
		return nil, nil, failed
	}
	keys := make([]string, len(dates))
	for i, d := range dates {
		keys[i] = job.Key(d)
	}
	var status map[string]string
	err = r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		status, err = s.Present(ctx, r.pool, keys)
		return err
	})
	for i, d := range dates {
		switch state, ok := status[keys[i]]; {
		case !ok:
			missed = append(missed, d)
		case Status(state) != Succeeded && Status(state) != Skipped:
			open = append(open, d)
		}
	}
	return open, missed, cmp.Or(err, failed)
}

// overlooked is Missed from the job's first run on: for trigger dates before
// today, and today's once the wall clock has passed dueBy, if that is not zero.
func (r *Runner) overlooked(ctx context.Context, job Job, dueBy time.Duration) ([]Date, error) {
	if job.Every != 0 {
		return nil, nil
	}
	var first Date
	for from, parsed := job.Name+":0", false; !parsed; {
		var key string
		found := false
		err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
			key, found, err = s.First(ctx, r.pool, from, job.Name+"::")
			return err
		})
		if err != nil || !found {
			return nil, err
		}
		_, first, _, parsed = parseKey(key)
		from = key + "\x01" // looks like a date, such as the 30th of February: look behind it
	}
	today := r.Today()
	last := today.AddDays(-1)
	if dueBy > 0 {
		// Within the business day, which starts at DayStart.
		now := timeOfDay(r.opts.Now().In(r.zone))
		const day = 24 * time.Hour
		if (now-r.opts.DayStart+day)%day >= (dueBy-r.opts.DayStart+day)%day {
			last = today
		}
	}
	to := last
	if job.Date != nil {
		to = last.AddDays(furthest) // of a trigger until then
	}
	if early := to.AddDays(1 - longest); first.Compare(early) < 0 {
		first = early
	}
	if first.Compare(to) > 0 {
		return nil, nil
	}
	_, missed, err := r.ledger(ctx, job, first, to, last)
	return missed, err
}
