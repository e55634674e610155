package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// attention asks and returns the problems; said shows them as "KIND key".
func attention(t testing.TB, r *jobrun.Runner, opts *jobrun.AttentionOptions, jobs ...jobrun.Job) (problems []jobrun.Problem, said []string) {
	t.Helper()
	problems, err := r.Attention(t.Context(), opts, jobs...)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		said = append(said, string(p.Kind)+" "+p.Key)
	}
	return problems, said
}

// demands expects exactly these problems, in this order.
func demands(t testing.TB, r *jobrun.Runner, opts *jobrun.AttentionOptions, jobs []jobrun.Job, want ...string) []jobrun.Problem {
	t.Helper()
	problems, said := attention(t, r, opts, jobs...)
	if !slices.Equal(said, want) {
		t.Errorf("got %v, want %v", said, want)
	}
	return problems
}

// only expects one problem, that of this kind and key, since this time, and with
// the record as it is.
func only(t testing.TB, r *jobrun.Runner, opts *jobrun.AttentionOptions, kind jobrun.ProblemKind, key string, since func(jobrun.Record) time.Time) {
	t.Helper()
	problems, said := attention(t, r, opts)
	if len(problems) != 1 || said[0] != string(kind)+" "+key {
		t.Fatalf("got %v, want %s %s", said, kind, key)
	}
	rec, err := r.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	p := problems[0]
	if p.Record.StartedAt != rec.StartedAt || p.Record.Status != rec.Status || p.Record.Attempt != rec.Attempt || p.Job != rec.Job || p.Date != rec.Date {
		t.Errorf("%+v, but the run is %+v", p, rec)
	}
	if want := since(rec); !p.Since.Equal(want) || want.IsZero() || p.Since.Location() != seoul {
		t.Errorf("%s %s since %s, want %s", kind, key, p.Since, want)
	}
}

// TestProblemsComeAndGo: one run through everything that can be wrong with it.
func TestProblemsComeAndGo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r, other := newRunner(t, db.Pool, jobrun.Options{}), newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	const key = "nightly:2026-09-15"
	retry := jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Hour }}
	started := func(rec jobrun.Record) time.Time { return rec.StartedAt }
	beat := func(rec jobrun.Record) time.Time { return rec.HeartbeatAt }
	finished := func(rec jobrun.Record) time.Time { return rec.FinishedAt }
	approved := func(rec jobrun.Record) time.Time { return rec.ApprovedAt }
	both := func(kind jobrun.ProblemKind, since func(jobrun.Record) time.Time) {
		t.Helper()
		only(t, r, nil, kind, key, since)
		only(t, other, nil, kind, key, since)
	}
	nothing := func() {
		t.Helper()
		demands(t, r, nil, nil)
		demands(t, other, nil, nil)
	}
	nothing()

	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly", Retry: retry})
	nothing()
	exec(t, db.Pool, `UPDATE batch_job_attempt SET lease = '1 hour', heartbeat_at = now() - interval '61 min'`)
	both(jobrun.ProblemStale, beat) // silent
	exec(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = now() - interval '59 min'`)
	nothing()
	exec(t, db.Pool, `UPDATE batch_job_run SET started_at = now() - interval '21 min'`)
	both(jobrun.ProblemStale, started) // alive, overdue
	exec(t, db.Pool, `UPDATE batch_job_attempt SET stale_after = '22 min'`)
	nothing()

	if _, err := f.end(t, errors.New("no rates")); err == nil {
		t.Fatal("no error")
	}
	both(jobrun.ProblemRetrying, finished)
	exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now()`)
	both(jobrun.ProblemRetrying, finished) // due, but nobody has come
	f = launch(t, t.Context(), other, jobrun.Job{Name: "nightly", Retry: retry})
	nothing()
	if _, err := f.end(t, errors.New("no rates")); err == nil {
		t.Fatal("no error")
	}
	both(jobrun.ProblemFailed, finished)

	rec, err := r.Get(t.Context(), key)
	if err == nil {
		_, err = r.ApproveRerun(t.Context(), rec, operator)
	}
	if err != nil {
		t.Fatal(err)
	}
	nothing() // somebody has decided
	exec(t, db.Pool, `UPDATE batch_job_run SET approved_at = now() - interval '9 min 30 s'`)
	nothing()
	only(t, r, &jobrun.AttentionOptions{ApprovedAfter: 9 * time.Minute}, jobrun.ProblemApproved, key, approved)
	exec(t, db.Pool, `UPDATE batch_job_run SET approved_at = now() - interval '10 min 1 s'`)
	both(jobrun.ProblemApproved, approved)
	demands(t, r, &jobrun.AttentionOptions{ApprovedAfter: time.Hour}, nil)
	f = launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	nothing()
	f.succeeds(t, 3)
	nothing()

	// The same for a run that had SUCCEEDED.
	if rec, err = r.Get(t.Context(), key); err == nil {
		_, err = r.ApproveRerun(t.Context(), rec, jobrun.Action{By: "operator", Reason: "rates were wrong", Force: true})
	}
	if err != nil {
		t.Fatal(err)
	}
	nothing()
	exec(t, db.Pool, `UPDATE batch_job_run SET approved_at = now() - interval '1 hour'`)
	both(jobrun.ProblemApproved, approved)
	// Another program's statement makes the approval void.
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED'`)
	both(jobrun.ProblemFailed, finished)
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'RUNNING', finished_at = NULL, started_at = now()`)
	nothing()
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'PAUSED'`)
	nothing()
}

func TestProblemsOfOtherPrograms(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{StaleAfter: 30 * time.Minute})
	started := func(rec jobrun.Record) time.Time { return rec.StartedAt }
	for _, key := range []string{"theirs:2026-09-15", "theirs, without a date"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, started_at) VALUES ($1, 'RUNNING', 'node-1', now() - interval '29 min')`, key)
		demands(t, r, nil, nil)
		exec(t, db.Pool, `UPDATE batch_job_run SET started_at = now() - interval '31 min'`)
		only(t, r, nil, jobrun.ProblemStale, key, started)
		exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now()`)
		only(t, r, nil, jobrun.ProblemFailed, key, func(rec jobrun.Record) time.Time { return rec.FinishedAt })
		exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now() + interval '1 h'`)
		only(t, r, nil, jobrun.ProblemRetrying, key, func(rec jobrun.Record) time.Time { return rec.FinishedAt })
		for _, status := range []string{"SUCCEEDED", "SKIPPED", "PAUSED"} {
			exec(t, db.Pool, `UPDATE batch_job_run SET status = $1`, status)
			demands(t, r, nil, nil)
		}
		exec(t, db.Pool, `DELETE FROM batch_job_run`)
	}
}

// TestMissedDatesDemandAttention: from the job's first row to yesterday, and
// today from DueBy on.
func TestMissedDatesDemandAttention(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	clock := newHandClock("2026-09-15T01:00:00Z")
	options := func(dayStart time.Duration) *jobrun.Runner {
		return newRunner(t, db.Pool, jobrun.Options{Now: clock.now, DayStart: dayStart})
	}
	r, rise := options(0), options(6*time.Hour)
	nextDay := func(d jobrun.Date) (jobrun.Date, error) { return d.AddDays(1), nil }
	due := func(d time.Duration) *jobrun.AttentionOptions { return &jobrun.AttentionOptions{DueBy: d} }
	for n, c := range []struct {
		what     string
		r        *jobrun.Runner
		now      string // in Seoul
		opts     *jobrun.AttentionOptions
		rule     jobrun.DateRule
		calendar jobrun.Calendar
		rows     []string
		want     []string
	}{
		{"no row at all", r, "2026-09-15T23:00:00+09:00", due(time.Hour), nil, nil, nil, nil},
		{"nothing missed", r, "2026-09-15T23:00:00+09:00", due(time.Hour), nil, nil, []string{"2026-09-14", "2026-09-15"}, nil},
		{"from the first row on", r, "2026-09-15T00:00:00+09:00", nil, nil, nil, []string{"2026-09-11", "2026-09-13"}, []string{"2026-09-12", "2026-09-14"}},
		{"first row today", r, "2026-09-15T23:00:00+09:00", due(time.Hour), nil, nil, []string{"2026-09-15"}, nil},
		{"first row in the future", r, "2026-09-15T23:00:00+09:00", due(time.Hour), nil, nil, []string{"2026-09-20"}, nil},
		{"today without DueBy", r, "2026-09-15T23:59:59+09:00", nil, nil, nil, []string{"2026-09-14"}, nil},
		{"today before DueBy", r, "2026-09-15T02:59:59+09:00", due(3 * time.Hour), nil, nil, []string{"2026-09-14"}, nil},
		{"today from DueBy on", r, "2026-09-15T03:00:00+09:00", due(3 * time.Hour), nil, nil, []string{"2026-09-14"}, []string{"2026-09-15"}},
		{"an early DueBy and DayStart, before", rise, "2026-09-16T02:59:59+09:00", due(3 * time.Hour), nil, nil, []string{"2026-09-14"}, nil},
		{"an early DueBy and DayStart, after", rise, "2026-09-16T03:00:00+09:00", due(3 * time.Hour), nil, nil, []string{"2026-09-14"}, []string{"2026-09-15"}},
		{"an early DueBy and DayStart, next day", rise, "2026-09-16T06:00:00+09:00", due(3 * time.Hour), nil, nil, []string{"2026-09-14"}, []string{"2026-09-15"}},
		{"a late DueBy and DayStart, before", rise, "2026-09-15T06:59:59+09:00", due(7 * time.Hour), nil, nil, []string{"2026-09-14"}, nil},
		{"a late DueBy and DayStart, after", rise, "2026-09-15T07:00:00+09:00", due(7 * time.Hour), nil, nil, []string{"2026-09-14"}, []string{"2026-09-15"}},
		{"a late DueBy and DayStart, after midnight", rise, "2026-09-16T00:30:00+09:00", due(7 * time.Hour), nil, nil, []string{"2026-09-14"}, []string{"2026-09-15"}},
		{"calendar", r, "2026-09-15T12:00:00+09:00", nil, nil, jobrun.Weekdays.Except(datesOf("2026-09-10")...), []string{"2026-09-08"}, []string{"2026-09-09", "2026-09-11", "2026-09-14"}},
		{"previous day", r, "2026-09-15T12:00:00+09:00", nil, jobrun.PreviousDay, nil, []string{"2026-09-11"}, []string{"2026-09-12", "2026-09-13"}},
		{"previous day from DueBy on", r, "2026-09-15T12:00:00+09:00", due(time.Hour), jobrun.PreviousDay, nil, []string{"2026-09-11"}, []string{"2026-09-12", "2026-09-13", "2026-09-14"}},
		{"next day", r, "2026-09-15T12:00:00+09:00", nil, nextDay, nil, []string{"2026-09-13"}, []string{"2026-09-14", "2026-09-15"}},
		{"next day from DueBy on", r, "2026-09-15T12:00:00+09:00", due(time.Hour), nextDay, nil, []string{"2026-09-15"}, []string{"2026-09-16"}},
		{"next day, first row ahead", r, "2026-09-15T12:00:00+09:00", nil, nextDay, nil, []string{"2026-09-16"}, nil},
		{"month ends", r, "2026-09-15T12:00:00+09:00", nil, jobrun.PreviousMonthEnd, nil, []string{"2026-05-31", "2026-07-31"}, []string{"2026-06-30", "2026-08-31"}},
		{"rows before that are no dates", r, "2026-09-15T12:00:00+09:00", nil, nil, nil, []string{"0abc", "2026-02-30", "2026-09-01T13", "2026-09-13"}, []string{"2026-09-14"}},
	} {
		clock.set(c.now)
		job, executions := countingJob(fmt.Sprintf("job-%d", n))
		job.Date, job.Calendar = c.rule, c.calendar
		for _, label := range c.rows {
			exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'node-1')`, job.Name+":"+label)
		}
		var want []string
		for _, d := range c.want {
			want = append(want, "MISSED "+job.Name+":"+d)
		}
		problems, said := attention(t, c.r, c.opts, job)
		if !slices.Equal(said, want) {
			t.Errorf("%s: got %v, want %v", c.what, said, want)
			continue
		}
		for i, p := range problems {
			if p.Job != job.Name || p.Date != jobrun.MustParseDate(c.want[i]) || p.Record != (jobrun.Record{}) || p.Since.Format(time.RFC3339) != c.want[i]+"T00:00:00+09:00" {
				t.Errorf("%s: %+v", c.what, p)
			}
		}
		if executions.Load() > 0 {
			t.Errorf("%s: executed", c.what)
		}
	}
}

// TestLongHistoryOfMissedDatesIsBounded: a job that has slept for 15 years.
func TestLongHistoryOfMissedDatesIsBounded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-15T01:00:00Z").now})
	daily, _ := countingJob("daily")
	monthly, _ := countingJob("monthly")
	monthly.Date = jobrun.PreviousMonthEnd
	for _, job := range []jobrun.Job{daily, monthly} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'node-1')`, job.Key(jobrun.MustParseDate("2011-01-31")))
	}
	problems, _ := attention(t, r, nil, daily)
	if n := len(problems); n < 3000 || n > 4000 || problems[n-1].Key != "daily:2026-09-14" {
		t.Errorf("%d problems", n)
	}
	problems, _ = attention(t, r, nil, monthly)
	if n := len(problems); n < 100 || n > 140 || problems[n-1].Key != "monthly:2026-08-31" {
		t.Errorf("%d problems", n)
	}
}

// TestMissedDatesAreThoseOfTheJobsAskedFor: given ones, else those registered,
// each name once.
func TestMissedDatesAreThoseOfTheJobsAskedFor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-15T01:00:00Z").now})
	daily, _ := countingJob("daily")
	weekdays, _ := countingJob("daily")
	weekdays.Calendar = jobrun.Weekdays
	other, _ := countingJob("other")
	hourly, _ := countingJob("hourly")
	hourly.Every = time.Hour
	fresh, _ := countingJob("fresh")
	for _, key := range []string{"daily:2026-09-11", "other:2026-09-12", "unknown:2026-09-12", "hourly:2026-09-12T13:00+09:00"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'node-1')`, key)
	}
	demands(t, r, nil, nil) // none is registered
	demands(t, r, nil, []jobrun.Job{hourly, fresh})
	demands(t, r, nil, []jobrun.Job{other}, "MISSED other:2026-09-13", "MISSED other:2026-09-14")
	c := cron.New(cron.WithLocation(seoul))
	for _, job := range []jobrun.Job{daily, other, hourly, fresh, weekdays} {
		if _, err := r.Schedule(t.Context(), c, "5 0 * * *", job); err != nil {
			t.Fatal(err)
		}
	}
	demands(t, r, nil, nil, "MISSED other:2026-09-13", "MISSED daily:2026-09-14", "MISSED other:2026-09-14")
	demands(t, r, nil, []jobrun.Job{other}, "MISSED other:2026-09-13", "MISSED other:2026-09-14")
	demands(t, newRunner(t, db.Pool, jobrun.Options{}), nil, nil) // another instance has none registered
	if _, err := r.RunDate(t.Context(), other, jobrun.MustParseDate("2026-09-13")); err != nil {
		t.Fatal(err)
	}
	demands(t, r, nil, nil, "MISSED daily:2026-09-14", "MISSED other:2026-09-14")
}

// TestFailuresBetweenTwoLooksAreReported: FailedSince shows what a look at the
// state alone would not.
func TestFailuresBetweenTwoLooksAreReported(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r, other := newRunner(t, db.Pool, jobrun.Options{}), newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	now := func() time.Time { return query[time.Time](t, db.Pool, `SELECT clock_timestamp()`) }
	failing := func(name string) jobrun.Job {
		return jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: 5, Backoff: func(int) time.Duration { return 0 }}, Func: func(_ context.Context, run *jobrun.Run) error {
			return fmt.Errorf("attempt %d", run.Attempt())
		}}
	}
	fail := func(job jobrun.Job) {
		t.Helper()
		if res, err := r.RunDate(t.Context(), job, date); err == nil || !res.Ran() {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	succeed := func(job jobrun.Job) {
		t.Helper()
		job.Func = func(context.Context, *jobrun.Run) error { return nil }
		if res, err := other.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	start := now()
	past := failing("recovered-before")
	fail(past)
	succeed(past)
	mixed := failing("failed-before-and-since")
	fail(mixed)
	since := now()
	fail(mixed) // 2, after 1 that was before
	fail(mixed) // 3
	mixedAt := query[time.Time](t, db.Pool, `SELECT finished_at FROM batch_job_attempt WHERE job_key = $1 AND attempt = 2`, mixed.Key(date))
	recovered := failing("recovered")
	fail(recovered)
	succeed(recovered)
	running := failing("running-again")
	fail(running)
	f := launch(t, t.Context(), other, running)
	clean, _ := countingJob("clean")
	if _, err := r.RunDate(t.Context(), clean, date); err != nil {
		t.Fatal(err)
	}

	for _, r := range []*jobrun.Runner{r, other} {
		demands(t, r, nil, nil, "RETRYING failed-before-and-since:2026-09-15")
		problems := demands(t, r, &jobrun.AttentionOptions{FailedSince: since}, nil,
			"ATTEMPT_FAILED failed-before-and-since:2026-09-15", "ATTEMPT_FAILED recovered:2026-09-15", "ATTEMPT_FAILED running-again:2026-09-15",
			"RETRYING failed-before-and-since:2026-09-15")
		if len(problems) == 4 {
			// Each with the attempt that failed, as it was recorded.
			for i, attempt := range []int{2, 1, 1} {
				p := problems[i]
				if rec := p.Record; rec.Status != jobrun.Failed || rec.Attempt != attempt || rec.Error != fmt.Sprintf("attempt %d", attempt) || rec.Key != p.Key || p.Job+":"+p.Date.String() != p.Key || rec.StartedAt.IsZero() || !rec.FinishedAt.Equal(p.Since) {
					t.Errorf("%+v", p)
				}
			}
			if !problems[0].Since.Equal(mixedAt) || problems[0].Since.Location() != seoul {
				t.Errorf("since %s, want %s", problems[0].Since, mixedAt)
			}
		}
		demands(t, r, &jobrun.AttentionOptions{FailedSince: now()}, nil, "RETRYING failed-before-and-since:2026-09-15")
		if problems, _ := attention(t, r, &jobrun.AttentionOptions{FailedSince: start}); len(problems) != 6 {
			t.Errorf("since the beginning: %+v", problems)
		}
	}
	f.succeeds(t, 2)
}

func TestProblemsAreOldestFirstWithinEachKind(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-15T01:00:00Z").now})
	insert := func(key, status, finished, next string) {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, started_at, finished_at, next_attempt_at)
			VALUES ($1, $2, 'node-1', now() - interval '2 days' - $3::interval, now() - $3::interval, $4)`, key, status, finished, orNull(next))
	}
	insert("young:2026-09-15", "FAILED", "1 min", "")
	insert("old:2026-09-15", "FAILED", "3 min", "")
	insert("later:2026-09-15", "FAILED", "1 min", "2100-01-01")
	insert("sooner:2026-09-15", "FAILED", "2 min", "2100-01-01")
	insert("stuck:2026-09-15", "RUNNING", "1 min", "")
	insert("long-stuck:2026-09-15", "RUNNING", "1 day", "")
	insert("b:2026-09-12", "SUCCEEDED", "1 min", "")
	insert("a:2026-09-13", "SUCCEEDED", "1 min", "")
	a, _ := countingJob("a")
	b, _ := countingJob("b")
	demands(t, r, nil, []jobrun.Job{b, a},
		"FAILED old:2026-09-15", "FAILED young:2026-09-15",
		"MISSED b:2026-09-13", "MISSED a:2026-09-14", "MISSED b:2026-09-14",
		"RETRYING sooner:2026-09-15", "RETRYING later:2026-09-15",
		"STALE long-stuck:2026-09-15", "STALE stuck:2026-09-15")
}

// orNull is NULL for "".
func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func TestAttentionRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	ok, _ := countingJob("daily")
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('daily:2026-09-15', 'SUCCEEDED', 'node-1')`)
	broken := ok
	broken.Date = func(jobrun.Date) (jobrun.Date, error) { panic("rule") }
	nameless, every := ok, ok
	nameless.Name = "a b"
	every.Every = 7 * time.Minute
	var invalid *jobrun.InvalidError
	for _, c := range []struct {
		opts  jobrun.AttentionOptions
		job   jobrun.Job
		field string
	}{
		{jobrun.AttentionOptions{DueBy: -1}, ok, "AttentionOptions.DueBy"},
		{jobrun.AttentionOptions{DueBy: 24 * time.Hour}, ok, "AttentionOptions.DueBy"},
		{jobrun.AttentionOptions{ApprovedAfter: -1}, ok, "AttentionOptions.ApprovedAfter"},
		{jobrun.AttentionOptions{}, nameless, "Job.Name"},
		{jobrun.AttentionOptions{}, jobrun.Job{Name: "unknown"}, "Job.Func"},
		{jobrun.AttentionOptions{}, every, "Job.Every"},
	} {
		if problems, err := r.Attention(t.Context(), &c.opts, c.job); !errors.As(err, &invalid) || invalid.Field != c.field || problems != nil {
			t.Errorf("%s: %v, %v", c.field, problems, err)
		}
	}
	var panicked *jobrun.PanicError
	if problems, err := r.Attention(t.Context(), nil, broken); !errors.As(err, &panicked) || problems != nil {
		t.Errorf("%v, %v", problems, err)
	}
}

// statements notes what goes to the server, with its arguments.
type statements struct{ all []pgx.TraceQueryStartData }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.all = append(s.all, data)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		s.all = append(s.all, pgx.TraceQueryStartData{SQL: q.SQL, Args: q.Arguments})
	}
	return ctx
}

func (*statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// TestLooksDoNotWalkTheHistory: beside 200,000 old runs the statements of
// Attention, Stale, RetryDue and Missed read index ranges only, in plans for the
// values and in plans for any.
func TestLooksDoNotWalkTheHistory(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t) // it prepares statements
	t.Run("tables of Migrate", func(t *testing.T) { looksReadRanges(t, pgtest.New(t), true) })
	t.Run("adopted", func(t *testing.T) { looksReadRanges(t, newAdopted(t), true) })
	t.Run("never analyzed", func(t *testing.T) { looksReadRanges(t, pgtest.New(t), false) })
}

func looksReadRanges(t *testing.T, db *pgtest.DB, analyzed bool) {
	exec(t, db.Pool, `ALTER TABLE batch_job_run SET (autovacuum_enabled = off); ALTER TABLE batch_job_attempt SET (autovacuum_enabled = off)`)
	exec(t, db.Pool, `WITH run AS (
		INSERT INTO batch_job_run (job_key, status, worker_id, job_name, business_date, token, started_at, finished_at)
		SELECT 'job-' || job || ':' || ('2010-01-01'::date + n), 'SUCCEEDED', 'node-1', 'job-' || job, '2010-01-01'::date + n, gen_random_uuid(),
			'2010-01-01'::date + n, '2010-01-01'::date + n + interval '1 min'
		FROM generate_series(10, 49) AS job, generate_series(1, 5000) AS n RETURNING *)
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, finished_at, outcome, ended_by)
		SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, started_at, '2 min', '20 min', finished_at, status, 'WORKER' FROM run`)
	for n, row := range []string{"'RUNNING', NULL::timestamptz, NULL::timestamptz", "'FAILED', NULL::timestamptz, NULL::timestamptz", "'FAILED', now() - interval '1 min', NULL::timestamptz", "'SUCCEEDED', NULL::timestamptz, now() - interval '1 h'", "'SKIPPED', NULL::timestamptz, now() - interval '1 h'"} {
		exec(t, db.Pool, `WITH run AS (INSERT INTO batch_job_run (job_key, status, next_attempt_at, approved_at, worker_id, token, attempt, approved_attempt, approved_status, approved_worker, started_at, finished_at, approved_finished_at)
			SELECT $1::text, status, next, approved, 'node-1', gen_random_uuid(), 2, 2, status, 'node-1', now() - interval '1 h', now() - interval '30 min', now() - interval '30 min' FROM (VALUES (`+row+`)) AS v (status, next, approved) RETURNING *)
			INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, finished_at, outcome)
			SELECT job_key, n, CASE n WHEN 2 THEN token END, worker_id, 'SCHEDULE', started_at, started_at, '2 min', '20 min', now() - interval '30 min', CASE n WHEN 1 THEN 'FAILED' ELSE status END
			FROM run, generate_series(1, 2) AS n`, fmt.Sprintf("job-20:2026-09-%02d", n+1))
	}
	if analyzed {
		exec(t, db.Pool, `ANALYZE batch_job_run, batch_job_attempt`)
	}
	trace := &statements{}
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = trace }), jobrun.Options{Now: newHandClock("2026-09-15T01:00:00Z").now})
	job, _ := countingJob("job-20")
	problems, said := attention(t, r, &jobrun.AttentionOptions{FailedSince: time.Now().Add(-45 * time.Minute)}, job)
	kinds := map[jobrun.ProblemKind]int{}
	for _, p := range problems {
		kinds[p.Kind]++
	}
	if kinds[jobrun.ProblemStale] != 1 || kinds[jobrun.ProblemFailed] != 1 || kinds[jobrun.ProblemRetrying] != 1 || kinds[jobrun.ProblemApproved] != 2 || kinds[jobrun.ProblemMissed] == 0 {
		t.Errorf("%v", said)
	}
	none := job
	none.Name = "job-5" // RetryDue reads the same, and executes nothing
	if _, err := r.RetryDue(t.Context(), none); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Missed(t.Context(), job, jobrun.MustParseDate("2015-01-01"), jobrun.MustParseDate("2015-03-31")); err != nil {
		t.Fatal(err)
	}
	if names, err := r.Jobs(t.Context()); err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	if days, err := r.Days(t.Context(), jobrun.MustParseDate("2015-01-01"), jobrun.MustParseDate("2015-01-31"), "job-20", "job-21"); err != nil || len(days) == 0 {
		t.Fatal(days, err)
	}

	session, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Release()
	do := func(sql string) string {
		t.Helper()
		rows, _ := session.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return strings.Join(lines, "\n")
	}
	removed := regexp.MustCompile(`Rows Removed by (?:Join )?Filter: (\d+)`)
	explained := 0
	for n, s := range trace.all {
		if !strings.Contains(s.SQL, "batch_job_run") {
			continue
		}
		explained++
		name := fmt.Sprintf("look_%d", n)
		if err := session.Conn().PgConn().Exec(t.Context(), `PREPARE `+name+` AS `+s.SQL).Close(); err != nil {
			t.Fatal(err)
		}
		call := name
		if args := literals(s.Args); len(args) > 0 {
			call += "(" + strings.Join(args, ", ") + ")"
		}
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			do(`SET plan_cache_mode = ` + mode)
			plan := do(`EXPLAIN (ANALYZE, COSTS off, TIMING off, BUFFERS) EXECUTE ` + call)
			wasted := 0
			for _, m := range removed.FindAllStringSubmatch(plan, -1) {
				rows, _ := strconv.Atoi(m[1])
				wasted += rows
			}
			for _, m := range regexp.MustCompile(`on batch_job_run [lp] .*rows=(\d+) loops`).FindAllStringSubmatch(plan, -1) {
				if rows, _ := strconv.Atoi(m[1]); rows > 60 { // of the latest 50 that succeeded
					t.Errorf("%s, %d runs read for what is usual:\n%s", mode, rows, plan)
				}
			}
			if strings.Contains(plan, "Seq Scan on batch_job") || !strings.Contains(plan, "Index") || wasted > 50 {
				t.Errorf("%s, %d rows read in vain:\n%s\n%s", mode, wasted, s.SQL, plan)
			}
		}
	}
	if explained != 11 { // stale, attention, failing, first and present for each look at dates, due, names, days of two jobs
		t.Errorf("%d statements explained", explained)
	}
}

// TestEvidenceIsReadOncePerJob: after a crash of everything hundreds of runs may be
// stale, of jobs with a long history, on tables that were never analyzed.
func TestEvidenceIsReadOncePerJob(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `ALTER TABLE batch_job_run SET (autovacuum_enabled = off)`)
	exec(t, db.Pool, `
		INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id)
		SELECT 'job-' || n % 2 || ':' || '2020-01-01'::date + n, CASE WHEN n % 10 < 2 THEN 'RUNNING' ELSE 'SUCCEEDED' END,
			now() - interval '1 h', CASE WHEN n % 10 >= 2 THEN now() END, 'node-1'
		FROM generate_series(1, 1000) AS n`)
	trace := &statements{}
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = trace }), jobrun.Options{})
	stale, err := r.Stale(t.Context())
	if err != nil || len(stale) != 200 || stale[0].Typical < 59*time.Minute || stale[199].Longest < 59*time.Minute {
		t.Fatalf("%d are stale, %v", len(stale), err)
	}
	last := trace.all[len(trace.all)-1]
	sql := strings.ReplaceAll(last.SQL, "$1", literals(last.Args)[0])
	rows, _ := db.Pool.Query(t.Context(), `EXPLAIN (ANALYZE, COSTS off, TIMING off) `+sql)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(plan, "\n")
	reads := regexp.MustCompile(`batch_job_run l[ (].*loops=(\d+)|batch_job_run_key_idx.*loops=(\d+)`).FindAllStringSubmatch(text, -1)
	if len(reads) == 0 {
		t.Errorf("no read of what is usual in\n%s", text)
	}
	for _, m := range reads {
		if loops := m[1] + m[2]; loops != "2" {
			t.Errorf("what is usual was read %s times for 2 jobs:\n%s", loops, text)
		}
	}
}

// literals are arguments as SQL literals.
func literals(args []any) (all []string) {
	for _, arg := range args {
		var text string
		switch arg := arg.(type) {
		case pgx.QueryExecMode:
			continue
		case []string:
			text = "{" + strings.Join(arg, ",") + "}"
		case time.Time:
			text = arg.Format(time.RFC3339Nano)
		default:
			text = fmt.Sprint(arg)
		}
		all = append(all, "'"+strings.ReplaceAll(text, "'", "''")+"'")
	}
	return all
}
