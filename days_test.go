package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// Every job that has a run is named, whatever its neighbours in the index are called.
func TestJobsNamesEveryJob(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if names, err := r.Jobs(t.Context()); err != nil || names == nil || len(names) != 0 {
		t.Errorf("none: %q, %v", names, err)
	}
	want := []string{"a", "a-b", "a.b", "a/b", "a0", "a_b", "aa", "billing/a", "정산"}
	for _, name := range want {
		for n := range 3 {
			exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'w')`, fmt.Sprintf("%s:2026-09-%02d", name, 1+n))
		}
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) SELECT unnest(ARRAY['a', 'a!x', 'no key', '', ':', 'b:x', 'slots:2026-09-15T13:00+09:00', 'a b:2026-09-15']), 'RUNNING', 'w'`)
	want = append(want, "slots")
	slices.Sort(want)
	if names, err := r.Jobs(t.Context()); err != nil || !slices.Equal(names, want) {
		t.Errorf("%q, %v\nwant %q", names, err, want)
	}
}

func TestDaysCountsRunsByStatus(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing")
	fails := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return failure }}
	slots := jobrun.Job{Name: "inventory", Every: time.Hour, Func: noop}
	at := time.Date(2026, 9, 15, 0, 0, 0, 0, seoul)
	for hour := range 3 {
		if _, err := r.RunTrigger(t.Context(), slots, at.Add(time.Duration(hour)*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 3 {
		job := fails
		if n != 1 {
			job.Func = noop
		}
		if _, err := r.RunDate(t.Context(), job, date.AddDays(n)); err != nil && !errors.Is(err, failure) {
			t.Fatal(err)
		}
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('settlement:2026-02-30', 'RUNNING', 'w'), ('settlement-x:2026-09-15', 'RUNNING', 'w'), ('inventory:2026-09-15T03:00+09:00', 'PAUSED', 'w')`)
	days, err := r.Days(t.Context(), date, date.AddDays(1), "settlement", "none", "inventory")
	if err != nil {
		t.Fatal(err)
	}
	want := []jobrun.Day{
		{Job: "settlement", Date: date, Runs: map[jobrun.Status]int{jobrun.Succeeded: 1}},
		{Job: "settlement", Date: date.AddDays(1), Runs: map[jobrun.Status]int{jobrun.Failed: 1}},
		{Job: "inventory", Date: date, Runs: map[jobrun.Status]int{jobrun.Succeeded: 3, "PAUSED": 1}},
	}
	if fmt.Sprint(days) != fmt.Sprint(want) {
		t.Errorf("%v\nwant %v", days, want)
	}
	if days, err := r.Days(t.Context(), jobrun.MustParseDate("2026-02-01"), jobrun.MustParseDate("2026-03-01"), "settlement"); err != nil || len(days) != 0 {
		t.Errorf("the 30th of February: %v, %v", days, err)
	}
	var invalid *jobrun.InvalidError
	for _, bad := range []func() error{
		func() error { _, err := r.Days(t.Context(), date, date.AddDays(-1)); return err },
		func() error { _, err := r.Days(t.Context(), date, date.AddDays(400)); return err },
		func() error { _, err := r.Days(t.Context(), date, date, "a b"); return err },
		func() error { _, err := r.Days(t.Context(), date, date, make([]string, 1001)...); return err },
	} {
		if err := bad(); !errors.As(err, &invalid) {
			t.Error(err)
		}
	}
}
