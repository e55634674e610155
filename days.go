package jobrun

import (
	"context"
	"fmt"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Jobs returns the names of the jobs that have runs, in byte order, those of other
// programs too; keys that do not parse have none. It takes one step of the index for
// each name, however many runs there are.
func (r *Runner) Jobs(ctx context.Context) ([]string, error) {
	var all []string
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		all, err = s.Jobs(ctx, r.pool)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("names of jobs: %w", err)
	}
	names := []string{}
	for _, name := range all {
		if validName(name) == nil {
			names = append(names, name)
		}
	}
	return names, nil
}

// Day is how many runs of a job there are on a business date, by their status: one of
// a job that runs by date, one for each slot of a job with Every.
type Day struct {
	Job  string
	Date Date
	Runs map[Status]int
}

// Days returns the days in [from, to], at most 400, on which the jobs have runs, by job
// and date; a date without a run is not in it. It is for a calendar of at most 1000 jobs
// at a time, and reads one range of the index for each.
func (r *Runner) Days(ctx context.Context, from, to Date, jobs ...string) ([]Day, error) {
	switch dates := from.String() + " to " + to.String(); {
	case !from.IsValid() || !to.IsValid() || to.Compare(from) < 0 || from.AddDays(400).Compare(to) <= 0:
		return nil, &InvalidError{"dates", dates, "two dates, the earlier first, at most 400 days"}
	case len(jobs) > 1000:
		return nil, &InvalidError{"jobs", len(jobs), "at most 1000"}
	}
	for _, name := range jobs {
		if err := validName(name); err != nil {
			err.Field = "jobs"
			return nil, err
		}
	}
	var counts []store.DayCount
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		counts, err = s.Days(ctx, r.pool, jobs, from.String(), to.String()+"U") // a slot's time follows the date after a 'T'
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("days of jobs: %w", err)
	}
	days := []Day{}
	for _, c := range counts {
		date, err := ParseDate(c.Date)
		if err != nil {
			continue // looks like a date, such as the 30th of February
		}
		if n := len(days); n == 0 || days[n-1].Job != c.Job || days[n-1].Date != date {
			days = append(days, Day{c.Job, date, map[Status]int{}})
		}
		days[len(days)-1].Runs[Status(c.Status)] = c.Runs
	}
	return days, nil
}
