package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// clockwork is a real cron that fires when the test says so, at once, for the
// nominal time that the test names.
type clockwork struct {
	*cron.Cron
	next  time.Time
	begin func() // called when a fire reaches its callback, before the job
	ended chan struct{}
}

func newClockwork(opts ...cron.Option) *clockwork {
	w := &clockwork{ended: make(chan struct{}, 1), begin: func() {}}
	w.Cron = cron.New(append([]cron.Option{cron.WithParser(w), cron.WithChain(func(j cron.Job) cron.Job {
		return cron.FuncJob(func() {
			w.begin()
			j.Run()
			w.ended <- struct{}{}
		})
	})}, opts...)...)
	return w
}

// Parse makes w the parser of all specs of its cron.
func (w *clockwork) Parse(string) (cron.Schedule, error) { return w, nil }

// Next gives out the nominal time once, then times that do not come.
func (w *clockwork) Next(t time.Time) time.Time {
	if next := w.next; !next.IsZero() {
		w.next = time.Time{}
		return next
	}
	return t.Add(1000 * time.Hour)
}

// fire returns when the one entry's callback for this nominal time, which must be
// past, has returned.
func (w *clockwork) fire(t testing.TB, nominal time.Time) {
	t.Helper()
	w.next = nominal
	w.Start()
	within(t, "the callback returns", w.ended)
	<-w.Stop().Done()
}

// cronFires are those of a spec in a zone, from a time on, as cron itself computes them.
func cronFires(t testing.TB, spec, zone, after string, n int) (all []time.Time) {
	t.Helper()
	schedule, err := cron.ParseStandard("CRON_TZ=" + zone + " " + spec)
	if err != nil {
		t.Fatal(err)
	}
	next := instant(after)
	for range n {
		next = schedule.Next(next)
		all = append(all, next.UTC())
	}
	return all
}

func datesOf(all ...string) (dates []jobrun.Date) {
	for _, s := range all {
		dates = append(dates, jobrun.MustParseDate(s))
	}
	return dates
}

// sameDates compares lists of dates, nil and empty being equal.
func sameDates(t testing.TB, what string, got []jobrun.Date, err error, want ...string) {
	t.Helper()
	if err != nil || !slices.Equal(got, datesOf(want...)) {
		t.Errorf("%s: %v, %v; want %v", what, got, err, want)
	}
}

func TestScheduledRunIsDatedByItsNominalTime(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for n, c := range []struct {
		nominal, clock string // when it was to fire; what the Runner's clock shows when the callback runs
		dayStart       time.Duration
		rule           jobrun.DateRule
		want           string
	}{
		{nominal: "2024-12-31T14:59:00Z", clock: "2024-12-31T14:59:00Z", want: "2024-12-31"},
		{nominal: "2024-12-31T14:59:00Z", clock: "2024-12-31T15:00:01.9Z", want: "2024-12-31"}, // late
		{nominal: "2024-12-31T14:59:00Z", clock: "2025-01-03T01:00:00Z", want: "2024-12-31"},
		{nominal: "2024-12-31T15:00:00Z", clock: "2024-12-31T14:59:59.977Z", want: "2025-01-01"}, // early
		{nominal: "2024-12-31T15:00:00Z", clock: "2024-12-31T15:00:00Z", rule: jobrun.PreviousDay, want: "2024-12-31"},
		{nominal: "2024-12-31T20:00:00Z", clock: "2025-01-01T04:00:00Z", dayStart: 6 * time.Hour, want: "2024-12-31"},
		{nominal: "2025-03-30T15:00:00Z", clock: "2025-04-01T15:00:00Z", rule: jobrun.PreviousMonthEnd, want: "2025-02-28"},
	} {
		clock := newHandClock("2024-12-01T00:00:00Z")
		r := newRunner(t, db.Pool, jobrun.Options{Now: clock.now, DayStart: c.dayStart})
		job, executions := countingJob(fmt.Sprintf("daily-%d", n))
		job.Date = c.rule
		w := newClockwork(cron.WithLocation(seoul))
		id, err := r.Schedule(t.Context(), w.Cron, "", job)
		if err != nil {
			t.Fatal(err)
		}
		w.begin = func() { clock.set(c.clock) }
		w.fire(t, instant(c.nominal))
		rec, err := r.Get(t.Context(), job.Name+":"+c.want)
		if err != nil || executions.Load() != 1 || rec.Status != jobrun.Succeeded || rec.Trigger != jobrun.TriggerSchedule || !rec.ScheduledFor.Equal(instant(c.nominal)) || !rec.ScheduledFor.Equal(w.Entry(id).Prev) {
			t.Errorf("%+v: %+v, %v; executed %d times", c, rec, err, executions.Load())
		}
	}
}

// TestCallbackHeldBackUntilTheNextFire: cron then tells only the later time. The
// date that gets no run is missed, not lost.
func TestCallbackHeldBackUntilTheNextFire(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2024-09-17T01:00:00Z").now})
	job, executions := countingJob("daily")
	w := newClockwork(cron.WithLocation(seoul))
	if _, err := r.Schedule(t.Context(), w.Cron, "", job); err != nil {
		t.Fatal(err)
	}
	var callbacks atomic.Int64
	held, let := make(chan struct{}), make(chan struct{})
	w.begin = func() {
		if callbacks.Add(1) == 1 {
			close(held)
			<-let
		}
	}
	w.next = instant("2024-09-16T01:00:00Z")
	w.Start()
	within(t, "the first fire", held)
	w.Stop()
	w.next = instant("2024-09-17T01:00:00Z")
	w.Start()
	within(t, "the second callback returns", w.ended)
	close(let)
	within(t, "the first callback returns", w.ended)
	<-w.Stop().Done()
	if executions.Load() != 1 {
		t.Errorf("executed %d times", executions.Load())
	}
	missed, err := r.Missed(t.Context(), job, jobrun.MustParseDate("2024-09-16"), jobrun.MustParseDate("2024-09-18"))
	sameDates(t, "missed", missed, err, "2024-09-16")
}

func TestEntryStartedByHandTakesTheClock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2024-12-31T15:00:00Z").now})
	job, executions := countingJob("daily")
	c := cron.New(cron.WithLocation(seoul))
	id, err := r.Schedule(t.Context(), c, "5 0 * * *", job)
	if err != nil {
		t.Fatal(err)
	}
	c.Entry(id).WrappedJob.Run()
	if rec, err := r.Get(t.Context(), "daily:2025-01-01"); err != nil || rec.Status != jobrun.Succeeded || executions.Load() != 1 {
		t.Errorf("%+v, %v", rec, err)
	}
}

func TestBadSpecsAreErrorsAndLeaveNoEntry(t *testing.T) {
	t.Parallel()
	standard := []string{"TZ=UTC", "CRON_TZ=Asia/Seoul", "TZ=0", "TZ=", "", "CRON_TZ=Asia/Soul 0 0 * * *", "* * *", "0 0 30 2 *"}
	withSeconds := []string{"TZ=UTC", "CRON_TZ=Asia/Seoul", "TZ=0", "TZ=", "", "CRON_TZ=Asia/Soul 0 0 0 * * *", "* * *", "0 5 0 * *", "0 0 0 30 2 *"}
	parser := cron.NewParser(cron.Second | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow)
	for name, c := range map[string]struct {
		opts    []cron.Option
		bad     []string
		ok      string
		running bool
	}{
		"standard":         {nil, standard, "CRON_TZ=Asia/Seoul 5 0 * * *", false},
		"standard running": {nil, standard, "CRON_TZ=Asia/Seoul 5 0 * * *", true},
		"seconds":          {[]cron.Option{cron.WithSeconds()}, withSeconds, "CRON_TZ=Asia/Seoul 0 5 0 * * *", false},
		"seconds running":  {[]cron.Option{cron.WithSeconds()}, withSeconds, "CRON_TZ=Asia/Seoul 0 5 0 * * *", true},
		"parser running":   {[]cron.Option{cron.WithParser(parser)}, append(withSeconds, "@daily"), "CRON_TZ=Asia/Seoul 0 5 0 * * *", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, tries := deadPool(t, 4)
			logs := newLogBook()
			r := newRunner(t, pool, jobrun.Options{Logger: slog.New(logs)})
			job, _ := countingJob("daily")
			cr := cron.New(append(c.opts, cron.WithLocation(seoul))...)
			if c.running {
				cr.Start()
				defer cr.Stop()
			}
			for _, spec := range c.bad {
				id, err := r.Schedule(t.Context(), cr, spec, job)
				if err == nil || id != 0 || !strings.Contains(err.Error(), "schedule daily") || !strings.Contains(err.Error(), fmt.Sprintf("%q", spec)) {
					t.Errorf("%q: entry %d, %v", spec, id, err)
				}
				if n := len(cr.Entries()); n != 0 {
					t.Fatalf("%q: %d entries", spec, n)
				}
				if lines := logs.take(); len(lines) != 1 || lines[0].level != slog.LevelError || lines[0].attrs["job"].String() != "daily" {
					t.Errorf("%q: logged %+v", spec, lines)
				}
			}
			if _, err := r.RetryDue(t.Context()); err == nil { // nothing was registered
				t.Error("RetryDue without jobs: no error")
			}
			logs.take()
			id, err := r.Schedule(t.Context(), cr, c.ok, job)
			if err != nil || len(cr.Entries()) != 1 || cr.Entry(id).ID != id || id == 0 || len(logs.take()) != 0 {
				t.Errorf("%q: %v, entries %v", c.ok, err, cr.Entries())
			}
			if tries.Load() > 0 {
				t.Error("the database was touched")
			}
		})
	}
}

func TestSpecThatNeverFiresIsAnError(t *testing.T) {
	t.Parallel()
	pool, _ := deadPool(t, 4)
	job, _ := countingJob("leap")
	for now, fires := range map[string]bool{"2096-03-01T00:00:00Z": false, "2096-02-28T00:00:00Z": true, "2026-03-01T00:00:00Z": true} {
		logs := newLogBook()
		r := newRunner(t, pool, jobrun.Options{Now: newHandClock(now).now, Logger: slog.New(logs)})
		c := cron.New(cron.WithLocation(time.UTC)) // differs from the business zone: its fires are listed too
		_, err := r.Schedule(t.Context(), c, "0 0 29 2 *", job)
		if (err == nil) != fires || (len(c.Entries()) == 1) != fires || !fires && !strings.Contains(err.Error(), "does not fire") {
			t.Errorf("at %s: %v, entries %v", now, err, c.Entries())
		}
		for _, line := range logs.all() {
			if strings.Contains(fmt.Sprint(line.attrs), "0001-01-01") {
				t.Errorf("at %s: %v", now, line.attrs)
			}
		}
	}
}

func TestScheduleRefusesNoCronAndInvalidJobs(t *testing.T) {
	t.Parallel()
	pool, _ := deadPool(t, 4)
	r := newRunner(t, pool, jobrun.Options{})
	job, _ := countingJob("daily")
	var invalid *jobrun.InvalidError
	if _, err := r.Schedule(t.Context(), nil, "@daily", job); !errors.As(err, &invalid) || invalid.Field != "cron" {
		t.Errorf("no cron: %v", err)
	}
	c := cron.New()
	for field, change := range map[string]func(*jobrun.Job){
		"Job.Name":              func(j *jobrun.Job) { j.Name = "a b" },
		"Job.Func":              func(j *jobrun.Job) { j.Func = nil },
		"Job.Every":             func(j *jobrun.Job) { j.Every = 7 * time.Minute },
		"Job.Retry.MaxAttempts": func(j *jobrun.Job) { j.Retry.MaxAttempts = -1 },
	} {
		bad := job
		change(&bad)
		if _, err := r.Schedule(t.Context(), c, "@daily", bad); !errors.As(err, &invalid) || invalid.Field != field || len(c.Entries()) != 0 {
			t.Errorf("%s: %v, entries %v", field, err, c.Entries())
		}
	}
}

func TestLatestScheduledJobOfANameIsRetried(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	c := cron.New(cron.WithLocation(seoul))
	first, old := countingJob("daily")
	latest, executions := countingJob("daily")
	other, others := countingJob("other")
	stranger, strangers := countingJob("stranger")
	for _, job := range []jobrun.Job{first, other, latest} {
		if _, err := r.Schedule(t.Context(), c, "5 0 * * *", job); err != nil {
			t.Fatal(err)
		}
	}
	for _, job := range []jobrun.Job{latest, other, stranger} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, next_attempt_at) VALUES ($1, 'FAILED', 'node-1', now())`, job.Key(date))
	}
	results, err := r.RetryDue(t.Context())
	if err != nil || len(results) != 2 || old.Load() != 0 || executions.Load() != 1 || others.Load() != 1 || strangers.Load() != 0 {
		t.Errorf("%+v, %v; executed: first %d, latest %d, other %d, stranger %d", results, err, old.Load(), executions.Load(), others.Load(), strangers.Load())
	}
}

// aNewDate is a DateRule that maps each call to a date of its own, so that every
// tick of a second is another run.
func aNewDate() jobrun.DateRule {
	var calls atomic.Int64
	return func(jobrun.Date) (jobrun.Date, error) { return date.AddDays(int(calls.Add(1)) - 1), nil }
}

// TestPanicDoesNotSilenceASchedule: with the wrappers of cron in either order,
// and without any, real ticks go on after a panic.
func TestPanicDoesNotSilenceASchedule(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	skip, recovered := cron.SkipIfStillRunning(cron.DiscardLogger), cron.Recover(cron.DiscardLogger)
	for name, chain := range map[string][]cron.JobWrapper{"recover-skip": {recovered, skip}, "skip-recover": {skip, recovered}, "bare": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunner(t, db.Pool, jobrun.Options{})
			job := jobrun.Job{Name: name, Date: aNewDate(), Func: func(_ context.Context, run *jobrun.Run) error {
				if run.Date() == date {
					panic("tick 1")
				}
				return nil
			}}
			c := cron.New(cron.WithLocation(seoul), cron.WithChain(chain...))
			if _, err := r.Schedule(t.Context(), c, "@every 1s", job); err != nil {
				t.Fatal(err)
			}
			c.Start()
			defer func() { <-c.Stop().Done() }()
			eventually(t, "three runs have ended", func() bool {
				return query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE job_name = $1 AND business_date < $2 AND finished_at IS NOT NULL`, name, date.AddDays(3)) == 3
			})
			for n, want := range []jobrun.Status{jobrun.Failed, jobrun.Succeeded, jobrun.Succeeded} {
				rec, err := r.Get(t.Context(), job.Key(date.AddDays(n)))
				if err != nil || rec.Status != want || rec.Attempt != 1 || rec.ScheduledFor.Nanosecond() != 0 || rec.StartedAt.Sub(rec.ScheduledFor).Abs() > patience || n == 0 != strings.HasPrefix(rec.Error, "panic: tick 1") {
					t.Errorf("tick %d: %+v, %v", n+1, rec, err)
				}
			}
		})
	}
}

// TestPlainCallbackMayDropTheError: it has been logged, and later ticks run.
func TestPlainCallbackMayDropTheError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	logs := newLogBook()
	r := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(logs)})
	job := jobrun.Job{Name: "daily", Date: aNewDate(), Func: func(_ context.Context, run *jobrun.Run) error {
		if run.Date() == date {
			return errors.New("no rates")
		}
		return nil
	}}
	c := cron.New(cron.WithLocation(seoul))
	if _, err := c.AddFunc("@every 1s", func() { _, _ = r.Run(t.Context(), job) }); err != nil {
		t.Fatal(err)
	}
	c.Start()
	eventually(t, "two runs have ended", func() bool {
		return query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE business_date < $1 AND finished_at IS NOT NULL`, date.AddDays(2)) == 2
	})
	<-c.Stop().Done()
	var failed []logLine
	for _, line := range logs.all() {
		if line.level >= slog.LevelWarn {
			failed = append(failed, line)
		}
	}
	if len(failed) != 1 || failed[0].level != slog.LevelError || failed[0].attrs["job_key"].String() != "daily:2026-09-15" || !strings.Contains(failed[0].attrs["err"].String(), "no rates") {
		t.Errorf("logged %+v", failed)
	}
}

func TestFiresAfterTheEndDoNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, end := range map[string]func(*jobrun.Runner, context.CancelFunc){
		"context":  func(_ *jobrun.Runner, cancel context.CancelFunc) { cancel() },
		"shutdown": func(r *jobrun.Runner, _ context.CancelFunc) { _ = r.Shutdown(context.Background()) },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		logs := newLogBook()
		r := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(logs)})
		job, executions := countingJob(name)
		w := newClockwork(cron.WithLocation(seoul))
		id, err := r.Schedule(ctx, w.Cron, "", job)
		if err != nil {
			t.Fatal(err)
		}
		w.fire(t, instant("2024-09-15T01:00:00Z"))
		if executions.Load() != 1 {
			t.Errorf("%s: the fire before did not execute", name)
		}
		end(r, cancel)
		logs.take()
		w.fire(t, instant("2024-09-16T01:00:00Z"))
		w.Entry(id).Job.Run()
		if lines := logs.take(); len(lines) > 0 || executions.Load() != 1 || len(w.Entries()) != 1 {
			t.Errorf("%s: executed %d times, entries %v, logged %+v", name, executions.Load(), w.Entries(), lines)
		}
		if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE job_name = $1`, name); n != 1 {
			t.Errorf("%s: %d runs", name, n)
		}
		cancel()
	}
}

func TestScheduleInAnotherZoneIsToldOnce(t *testing.T) {
	t.Parallel()
	pool, _ := deadPool(t, 4)
	daily, _ := countingJob("daily")
	hourly, _ := countingJob("hourly")
	hourly.Every = time.Hour
	weekly, _ := countingJob("ruled")
	weekly.Date = func(d jobrun.Date) (jobrun.Date, error) {
		if d.Day == 2 {
			return d, errors.New("no such day")
		}
		return jobrun.PreviousDay(d)
	}
	location := func(name string) *time.Location {
		z, err := time.LoadLocation(name)
		if err != nil {
			t.Fatal(err)
		}
		return z
	}
	for _, c := range []struct {
		zone *time.Location
		spec string
		job  jobrun.Job
		told string // zone; "": nothing is logged
		want string
	}{
		{location("Asia/Seoul"), "5 0 * * *", daily, "", ""},
		{location("ROK"), "5 0 * * *", daily, "", ""}, // another name of the same clock
		{location("Asia/Tokyo"), "5 0 * * *", daily, "", ""},
		{time.UTC, "@every 1h", daily, "", ""},
		{time.UTC, "CRON_TZ=Asia/Seoul 5 0 * * *", daily, "", ""},
		{location("Asia/Seoul"), "CRON_TZ=Asia/Seoul 5 0 * * *", daily, "", ""},
		{time.UTC, "30 15 * * *", daily, "UTC", "[2026-09-30T15:30:00Z -> daily:2026-10-01 2026-10-01T15:30:00Z -> daily:2026-10-02 2026-10-02T15:30:00Z -> daily:2026-10-03]"},
		{location("Asia/Seoul"), "CRON_TZ=America/New_York 0 20 * * *", daily, "America/New_York", "[2026-10-01T09:00:00+09:00 -> daily:2026-10-01 2026-10-02T09:00:00+09:00 -> daily:2026-10-02 2026-10-03T09:00:00+09:00 -> daily:2026-10-03]"},
		{time.UTC, "7 */6 * * *", hourly, "UTC", "[2026-09-30T18:07:00Z -> hourly:2026-10-01T03:00+09:00 2026-10-01T00:07:00Z -> hourly:2026-10-01T09:00+09:00 2026-10-01T06:07:00Z -> hourly:2026-10-01T15:00+09:00]"},
		{time.UTC, "30 15 * * *", weekly, "UTC", "[2026-09-30T15:30:00Z -> ruled:2026-09-30 2026-10-01T15:30:00Z -> no run: date of the run for 2026-10-02: no such day 2026-10-02T15:30:00Z -> ruled:2026-10-02]"},
		{time.FixedZone("Asia/Seoul", 8*3600), "5 0 * * *", daily, "Asia/Seoul", "[2026-10-01T00:05:00+08:00 -> daily:2026-10-01 2026-10-02T00:05:00+08:00 -> daily:2026-10-02 2026-10-03T00:05:00+08:00 -> daily:2026-10-03]"},
	} {
		logs := newLogBook()
		r := newRunner(t, pool, jobrun.Options{Now: newHandClock("2026-09-30T15:00:00Z").now, Logger: slog.New(logs)})
		if _, err := r.Schedule(t.Context(), cron.New(cron.WithLocation(c.zone)), c.spec, c.job); err != nil {
			t.Fatal(err)
		}
		switch lines := logs.all(); {
		case c.told == "" && len(lines) > 0:
			t.Errorf("%s, %q: logged %+v", c.zone, c.spec, lines)
		case c.told == "":
		case len(lines) != 1 || lines[0].level != slog.LevelWarn || lines[0].attrs["job"].String() != c.job.Name ||
			lines[0].attrs["schedule_zone"].String() != c.told || lines[0].attrs["business_zone"].String() != "Asia/Seoul":
			t.Errorf("%s, %q: logged %+v", c.zone, c.spec, lines)
		case fmt.Sprint(lines[0].attrs["first_fires"]) != c.want:
			t.Errorf("%s, %q: first fires %s", c.zone, c.spec, lines[0].attrs["first_fires"])
		}
	}
}

// The child schedules in a cron without a zone of its own.
var _ = pgtest.RegisterChild("schedule-in-local-zone", func() int {
	pool, err := pgxpool.New(context.Background(), "postgres://nobody@127.0.0.1:1/nothing")
	if err != nil {
		return 1
	}
	defer pool.Close()
	now := func() time.Time { return instant("2026-09-30T15:00:00Z") }
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Now: now, Logger: slog.New(slog.NewTextHandler(os.Stdout, nil))})
	if err != nil {
		return 1
	}
	job, _ := countingJob("daily")
	if _, err = r.Schedule(context.Background(), cron.New(), "5 0 * * *", job); err != nil {
		return 1
	}
	return 0
})

func TestHostZoneOfACronWithoutOneIsTold(t *testing.T) {
	t.Parallel()
	for zone, want := range map[string]string{
		"America/New_York": "2026-10-01T00:05:00-04:00 -> daily:2026-10-01 2026-10-02T00:05:00-04:00 -> daily:2026-10-02",
		"UTC":              "2026-10-01T00:05:00Z -> daily:2026-10-01 2026-10-02T00:05:00Z -> daily:2026-10-02",
		"Asia/Seoul":       "",
	} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()
			child := pgtest.Reexec(t, "schedule-in-local-zone", "TZ="+zone)
			out, err := child.Output()
			if err != nil {
				t.Fatal(err)
			}
			told := strings.Count(string(out), "\n") == 1 && strings.Contains(string(out), "level=WARN") && strings.Contains(string(out), want)
			if want == "" && len(out) > 0 || want != "" && !told {
				t.Errorf("logged %s", out)
			}
		})
	}
}

func TestDoubledFireOfARepeatedHourRunsOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	all := cronFires(t, "5 2 * * *", "Europe/Berlin", "2024-10-26T12:00:00Z", 3)
	if want := []time.Time{instant("2024-10-27T00:05:00Z"), instant("2024-10-27T01:05:00Z"), instant("2024-10-28T01:05:00Z")}; !slices.EqualFunc(all, want, time.Time.Equal) {
		t.Fatalf("cron fires at %v", all)
	}
	r := zoned(t, db.Pool, "Europe/Berlin", jobrun.Options{})
	job, executions := countingJob("close")
	w := newClockwork()
	if _, err := r.Schedule(t.Context(), w.Cron, "", job); err != nil {
		t.Fatal(err)
	}
	for n, want := range []int64{1, 1, 2} {
		w.fire(t, all[n])
		if executions.Load() != want {
			t.Errorf("after %s: executed %d times", all[n], executions.Load())
		}
	}
	rec, err := r.Get(t.Context(), "close:2024-10-27")
	if err != nil || rec.Attempt != 1 || rec.Status != jobrun.Succeeded || !rec.ScheduledFor.Equal(all[0]) || rowsOf(t, db.Pool, rec.Key) != [2]int{1, 1} {
		t.Errorf("%+v, %v", rec, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 2 {
		t.Errorf("%d runs", n)
	}
}

// TestTwoInstancesOneExecutionPerSlot: two Runners with the same schedule and
// real ticks.
func TestTwoInstancesOneExecutionPerSlot(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	job, executions := countingJob("inventory-sync")
	job.Every = time.Minute
	books := []*logBook{newLogBook(), newLogBook()}
	calls := func(b *logBook) (n int) {
		for _, line := range b.all() {
			if line.message == "run finished" || line.message == "run not started" {
				n++
			}
		}
		return n
	}
	var crons []*cron.Cron
	for _, logs := range books {
		r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Logger: slog.New(logs)})
		c := cron.New(cron.WithLocation(seoul))
		if _, err := r.Schedule(t.Context(), c, "@every 1s", job); err != nil {
			t.Fatal(err)
		}
		c.Start()
		crons = append(crons, c)
	}
	eventually(t, "two ticks of each", func() bool { return calls(books[0]) >= 2 && calls(books[1]) >= 2 })
	for _, c := range crons {
		<-c.Stop().Done()
	}
	// The ticks may touch two slots.
	slots := query[int64](t, db.Pool, `SELECT count(*) FROM batch_job_run WHERE attempt = 1 AND status = 'SUCCEEDED'`)
	if executions.Load() != slots || slots < 1 || slots > 2 {
		t.Errorf("%d executions of %d slots", executions.Load(), slots)
	}
	if books[0].count(slog.LevelWarn)+books[0].count(slog.LevelError)+books[1].count(slog.LevelWarn)+books[1].count(slog.LevelError) > 0 {
		t.Errorf("losing is normal, but: %+v %+v", books[0].all(), books[1].all())
	}
}

func TestDateOfASkippedHourIsMissedAndRunByHand(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	all := cronFires(t, "30 2 * * *", "America/New_York", "2026-03-05T12:00:00Z", 5)
	if !all[1].Equal(instant("2026-03-07T07:30:00Z")) || !all[2].Equal(instant("2026-03-09T06:30:00Z")) {
		t.Fatalf("cron fires at %v", all)
	}
	r := zoned(t, db.Pool, "America/New_York", jobrun.Options{Now: newHandClock("2026-03-11T16:00:00Z").now})
	job, executions := countingJob("daily")
	for _, at := range all {
		if _, err := r.RunTrigger(t.Context(), job, at); err != nil {
			t.Fatal(err)
		}
	}
	from, to := jobrun.MustParseDate("2026-03-06"), jobrun.MustParseDate("2026-03-11")
	missed, err := r.Missed(t.Context(), job, from, to)
	sameDates(t, "missed", missed, err, "2026-03-08")
	res, err := r.RunDate(t.Context(), job, jobrun.MustParseDate("2026-03-08"))
	if err != nil || !res.Ran() || res.Record.Key != "daily:2026-03-08" || executions.Load() != 6 {
		t.Errorf("%+v, %v", res, err)
	}
	missed, err = r.Missed(t.Context(), job, from, to)
	sameDates(t, "missed after that", missed, err)
}

func TestMissedDatesAreThoseThatWereDue(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	clock := newHandClock("2026-09-15T01:00:00Z")
	r := newRunner(t, db.Pool, jobrun.Options{Now: clock.now})
	rise := newRunner(t, db.Pool, jobrun.Options{Now: clock.now, DayStart: 6 * time.Hour})
	banking := jobrun.Weekdays.Except(datesOf("2026-09-14")...)
	nextDay := func(d jobrun.Date) (jobrun.Date, error) { return d.AddDays(1), nil }
	onlyMondays := func(d jobrun.Date) (jobrun.Date, error) {
		if d.Weekday() != time.Monday {
			return jobrun.Date{}, errors.New("not a Monday")
		}
		return d, nil
	}
	for n, c := range []struct {
		what     string
		r        *jobrun.Runner
		now      string
		rule     jobrun.DateRule
		calendar jobrun.Calendar
		from, to string
		want     []string
	}{
		{"until today", r, "2026-09-14T15:00:00Z", nil, nil, "2026-09-13", "2026-09-20", []string{"2026-09-13", "2026-09-14", "2026-09-15"}},
		{"a moment before midnight", r, "2026-09-14T14:59:59.999Z", nil, nil, "2026-09-13", "2026-09-20", []string{"2026-09-13", "2026-09-14"}},
		{"only future dates", r, "2026-09-15T01:00:00Z", nil, nil, "2026-09-16", "2026-09-20", nil},
		{"one date", r, "2026-09-15T01:00:00Z", nil, nil, "2026-09-15", "2026-09-15", []string{"2026-09-15"}},
		{"before the day starts", rise, "2026-09-14T20:59:59Z", nil, nil, "2026-09-13", "2026-09-20", []string{"2026-09-13", "2026-09-14"}},
		{"when the day starts", rise, "2026-09-14T21:00:00Z", nil, nil, "2026-09-13", "2026-09-20", []string{"2026-09-13", "2026-09-14", "2026-09-15"}},
		{"weekdays and a holiday", r, "2026-09-15T01:00:00Z", nil, banking, "2026-09-09", "2026-09-20", []string{"2026-09-09", "2026-09-10", "2026-09-11", "2026-09-15"}},
		{"previous day", r, "2026-09-15T01:00:00Z", jobrun.PreviousDay, nil, "2026-09-13", "2026-09-20", []string{"2026-09-13", "2026-09-14"}},
		{"previous business day", r, "2026-09-15T01:00:00Z", jobrun.PreviousBusinessDay(banking), nil, "2026-09-09", "2026-09-20", []string{"2026-09-09", "2026-09-10", "2026-09-11"}},
		{"previous weekday that is due", r, "2026-09-15T01:00:00Z", jobrun.PreviousBusinessDay(jobrun.Weekdays), banking, "2026-09-09", "2026-09-20", []string{"2026-09-09", "2026-09-10", "2026-09-11"}},
		{"month ends", r, "2026-09-15T01:00:00Z", jobrun.PreviousMonthEnd, nil, "2026-01-31", "2026-09-30", []string{"2026-01-31", "2026-02-28", "2026-03-31", "2026-04-30", "2026-05-31", "2026-06-30", "2026-07-31", "2026-08-31"}},
		{"month ends of a leap year", r, "2028-03-01T01:00:00Z", jobrun.PreviousMonthEnd, nil, "2028-02-01", "2028-03-31", []string{"2028-02-29"}},
		{"month ends, before the month is over", r, "2026-09-30T01:00:00Z", jobrun.PreviousMonthEnd, nil, "2026-08-31", "2026-09-30", []string{"2026-08-31"}},
		{"month ends by the calendar", r, "2026-09-15T01:00:00Z", nil, jobrun.MonthEnds, "2026-07-01", "2026-09-30", []string{"2026-07-31", "2026-08-31"}},
		{"next day", r, "2026-09-15T01:00:00Z", nextDay, nil, "2026-09-15", "2026-09-20", []string{"2026-09-15", "2026-09-16"}},
		{"last date of all", r, "9999-12-31T01:00:00Z", nextDay, nil, "9999-12-30", "9999-12-31", []string{"9999-12-30", "9999-12-31"}},
		{"first date of all", r, "0001-01-02T01:00:00Z", jobrun.PreviousDay, nil, "0001-01-01", "0001-01-03", []string{"0001-01-01"}},
	} {
		clock.set(c.now)
		job, executions := countingJob(fmt.Sprintf("job-%d", n))
		job.Date, job.Calendar = c.rule, c.calendar
		missed, err := c.r.Missed(t.Context(), job, jobrun.MustParseDate(c.from), jobrun.MustParseDate(c.to))
		sameDates(t, c.what, missed, err, c.want...)
		if executions.Load() > 0 {
			t.Errorf("%s: executed", c.what)
		}
	}
	// A trigger on which the rule fails has run nothing: that is told, with the dates that are known.
	clock.set("2026-09-15T01:00:00Z")
	job, _ := countingJob("partly")
	job.Date = onlyMondays
	missed, err := r.Missed(t.Context(), job, jobrun.MustParseDate("2026-09-01"), jobrun.MustParseDate("2026-09-20"))
	if err == nil || !strings.Contains(err.Error(), "2026-09-02: not a Monday") || !slices.Equal(missed, datesOf("2026-09-07", "2026-09-14")) {
		t.Errorf("%v, %v", missed, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 0 {
		t.Errorf("looking made %d rows", n)
	}
}

func TestAnyRowMakesADateNotMissed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-30T01:00:00Z").now})
	job, _ := countingJob("daily")
	day := func(n int) jobrun.Date { return date.AddDays(n) }
	if _, err := r.RunDate(t.Context(), job, day(0)); err != nil {
		t.Fatal(err)
	}
	failing := job
	failing.Func = func(context.Context, *jobrun.Run) error { return errors.New("no rates") }
	if _, err := r.RunDate(t.Context(), failing, day(1)); err == nil {
		t.Fatal("no error")
	}
	skipping := job
	skipping.Func = func(context.Context, *jobrun.Run) error { return jobrun.SkipRun("no orders") }
	if _, err := r.RunDate(t.Context(), skipping, day(2)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Skip(t.Context(), job.Key(day(3)), operator); err != nil {
		t.Fatal(err)
	}
	for n, status := range []string{"RUNNING", "SUCCEEDED", "FAILED", "PAUSED"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, $2, 'node-1')`, job.Key(day(4+n)), status)
	}
	// Neither of these is the run of a date of this job.
	for _, key := range []string{"daily:2026-09-23T13:00+09:00", "daily-2:2026-09-23", "daily", "Daily:2026-09-23"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'node-1')`, key)
	}
	missed, err := r.Missed(t.Context(), job, day(-1), day(8))
	sameDates(t, "missed", missed, err, "2026-09-14", "2026-09-23")
}

func TestMissedRefusesWhatItCannotJudge(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	now := newHandClock("2026-09-15T01:00:00Z")
	r := newRunner(t, db.Pool, jobrun.Options{Now: now.now})
	ok, _ := countingJob("daily")
	with := func(change func(*jobrun.Job)) jobrun.Job { job := ok; change(&job); return job }
	for name, c := range map[string]struct {
		job      jobrun.Job
		from, to jobrun.Date
		field    string // of the *InvalidError; "": a panic
	}{
		"reversed":          {ok, date, date.AddDays(-1), "dates"},
		"no dates":          {ok, jobrun.Date{}, jobrun.Date{}, "dates"},
		"impossible from":   {ok, jobrun.Date{Year: 2026, Month: 2, Day: 30}, date, "dates"},
		"impossible to":     {ok, date, jobrun.Date{Year: 2026, Month: 13, Day: 1}, "dates"},
		"too long":          {ok, date.AddDays(-3999), date.AddDays(1), "dates"},
		"all of time":       {ok, jobrun.MustParseDate("0001-01-01"), jobrun.MustParseDate("9999-12-31"), "dates"},
		"every":             {with(func(j *jobrun.Job) { j.Every = time.Hour }), date, date, "Job.Every"},
		"invalid job":       {with(func(j *jobrun.Job) { j.Name = "a b" }), date, date, "Job.Name"},
		"no func":           {with(func(j *jobrun.Job) { j.Func = nil }), date, date, "Job.Func"},
		"rule panics":       {with(func(j *jobrun.Job) { j.Date = func(jobrun.Date) (jobrun.Date, error) { panic("rule") } }), date, date, ""},
		"calendar panics":   {with(func(j *jobrun.Job) { j.Calendar = func(jobrun.Date) bool { panic("calendar") } }), date, date, ""},
		"rule gives itself": {with(func(j *jobrun.Job) { j.Date = func(jobrun.Date) (jobrun.Date, error) { panic(errors.New("rule")) } }), date, date, ""},
	} {
		judge := func(what string, err error) {
			t.Helper()
			var invalid *jobrun.InvalidError
			var panicked *jobrun.PanicError
			if c.field == "" && !errors.As(err, &panicked) || c.field != "" && (!errors.As(err, &invalid) || invalid.Field != c.field) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
		missed, err := r.Missed(t.Context(), c.job, c.from, c.to)
		if judge("Missed", err); missed != nil {
			t.Errorf("%s: %v", name, missed)
		}
		results, err := r.CatchUp(t.Context(), c.job, c.from, c.to, 3)
		if judge("CatchUp", err); results != nil {
			t.Errorf("%s: %+v", name, results)
		}
		if c.field != "" {
			_, err = r.CatchUp(t.Context(), c.job, c.from, c.to, 0)
			judge("CatchUp of none", err)
		}
	}
	if missed, err := r.Missed(t.Context(), ok, date.AddDays(-3999), date); err != nil || len(missed) != 4000 {
		t.Errorf("4000 days: %d, %v", len(missed), err)
	}
	var invalid *jobrun.InvalidError
	if results, err := r.CatchUp(t.Context(), ok, date, date, -1); !errors.As(err, &invalid) || invalid.Field != "limit" || results != nil {
		t.Errorf("a negative limit: %+v, %v", results, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 0 {
		t.Errorf("%d rows", n)
	}
}

// caughtUp compares the dates of the results, each expected to have been executed and SUCCEEDED.
func caughtUp(t testing.TB, what string, results []jobrun.Result, err error, want ...string) {
	t.Helper()
	var got []jobrun.Date
	for _, res := range results {
		got = append(got, res.Record.Date)
		if !res.Ran() || res.Record.Status != jobrun.Succeeded || res.Record.Trigger != jobrun.TriggerCatchUp || res.Record.Attempt != 1 {
			t.Errorf("%s: %+v", what, res)
		}
	}
	sameDates(t, what, got, err, want...)
}

func TestCatchUpRunsTheOldestFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-07-27T01:00:00Z").now})
	job, executions := countingJob("daily")
	from, to := jobrun.MustParseDate("2026-07-20"), jobrun.MustParseDate("2026-08-31")
	if _, err := r.RunDate(t.Context(), job, from); err != nil {
		t.Fatal(err)
	}
	missed, err := r.Missed(t.Context(), job, from, to.AddDays(-36))
	sameDates(t, "missed until yesterday", missed, err, "2026-07-21", "2026-07-22", "2026-07-23", "2026-07-24", "2026-07-25", "2026-07-26")
	results, err := r.CatchUp(t.Context(), job, from, to, 0)
	caughtUp(t, "none", results, err)
	results, err = r.CatchUp(t.Context(), job, from, to, 3)
	caughtUp(t, "three", results, err, "2026-07-21", "2026-07-22", "2026-07-23")
	missed, err = r.Missed(t.Context(), job, from, to)
	sameDates(t, "missed after that", missed, err, "2026-07-24", "2026-07-25", "2026-07-26", "2026-07-27")
	results, err = r.CatchUp(t.Context(), job, from, to, 10)
	caughtUp(t, "the rest", results, err, "2026-07-24", "2026-07-25", "2026-07-26", "2026-07-27")
	results, err = r.CatchUp(t.Context(), job, from, to, 10)
	caughtUp(t, "nothing left", results, err)
	if executions.Load() != 8 || !query[bool](t, db.Pool, `SELECT array_agg(job_key ORDER BY started_at) = array_agg(job_key ORDER BY job_key) FROM batch_job_run`) {
		t.Errorf("executed %d times, in another order", executions.Load())
	}
}

func TestCatchUpAfter200DaysIsBounded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-15T01:00:00Z").now})
	job, executions := countingJob("daily")
	if _, err := r.RunDate(t.Context(), job, date.AddDays(-200)); err != nil {
		t.Fatal(err)
	}
	results, err := r.CatchUp(t.Context(), job, date.AddDays(-200), date, 3)
	caughtUp(t, "three", results, err, date.AddDays(-199).String(), date.AddDays(-198).String(), date.AddDays(-197).String())
	if missed, err := r.Missed(t.Context(), job, date.AddDays(-200), date); err != nil || len(missed) != 197 || executions.Load() != 4 {
		t.Errorf("%d missed, %v, executed %d times", len(missed), err, executions.Load())
	}
}

// TestCatchUpStopsAtADateThatIsNotDone: whoever made it so, and continues over
// those that are SUCCEEDED or SKIPPED.
func TestCatchUpStopsAtADateThatIsNotDone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-20T01:00:00Z").now})
	fail := func(retry jobrun.Retry) func(*testing.T, jobrun.Job) {
		return func(t *testing.T, job jobrun.Job) {
			job.Retry = retry
			job.Func = func(context.Context, *jobrun.Run) error { return errors.New("no rates") }
			if _, err := r.RunDate(t.Context(), job, date.AddDays(1)); err == nil {
				t.Fatal("no error")
			}
		}
	}
	insert := func(status, more string) func(*testing.T, jobrun.Job) {
		return func(t *testing.T, job jobrun.Job) {
			exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, next_attempt_at) VALUES ($1, $2, 'node-1', `+more+`)`, job.Key(date.AddDays(1)), status)
		}
	}
	for name, c := range map[string]struct {
		make  func(*testing.T, jobrun.Job)
		stops bool
	}{
		"failed":              {fail(jobrun.Retry{}), true},
		"retrying":            {fail(jobrun.Retry{MaxAttempts: 2}), true},
		"due":                 {fail(jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}), true},
		"neighbour-running":   {insert("RUNNING", "NULL"), true},
		"neighbour-failed":    {insert("FAILED", "NULL"), true},
		"neighbour-due":       {insert("FAILED", "now()"), true},
		"neighbour-paused":    {insert("PAUSED", "NULL"), true},
		"neighbour-succeeded": {insert("SUCCEEDED", "NULL"), false},
		"neighbour-skipped":   {insert("SKIPPED", "NULL"), false},
		"skipped": {func(t *testing.T, job jobrun.Job) {
			if _, err := r.Skip(t.Context(), job.Key(date.AddDays(1)), operator); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			job, executions := countingJob(name)
			c.make(t, job)
			want := datesOf("2026-09-15")
			if !c.stops {
				want = datesOf("2026-09-15", "2026-09-17", "2026-09-18")
			}
			for call := range 2 { // the second one finds the open date first
				results, err := r.CatchUp(t.Context(), job, date, date.AddDays(3), 5)
				var got []jobrun.Date
				for _, res := range results {
					got = append(got, res.Record.Date)
				}
				if call == 1 {
					want = nil
				}
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("call %d: %v, %v; want %v", call, got, err, want)
				}
			}
			if n := executions.Load(); c.stops && n != 1 || !c.stops && n != 3 {
				t.Errorf("executed %d times", n)
			}
		})
	}
}

func TestCatchUpReturnsTheErrorThatStoppedIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	logs := newLogBook()
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-20T01:00:00Z").now, Logger: slog.New(logs)})
	theirs := errors.New("no rates")
	job, _ := countingJob("daily")
	job.Retry = jobrun.Retry{MaxAttempts: 5, Backoff: func(int) time.Duration { return 0 }}
	job.Func = func(_ context.Context, run *jobrun.Run) error {
		if run.Date() == date.AddDays(1) {
			return theirs
		}
		return nil
	}
	results, err := r.CatchUp(t.Context(), job, date, date.AddDays(3), 5)
	var failed *jobrun.RunError
	if !errors.Is(err, theirs) || !errors.As(err, &failed) || failed.Key != "daily:2026-09-16" || len(results) != 2 || results[0].Record.Status != jobrun.Succeeded || results[1].Record.Status != jobrun.Failed {
		t.Errorf("%+v, %v", results, err)
	}
	if n := logs.count(slog.LevelWarn) + logs.count(slog.LevelError); n != 1 {
		t.Errorf("logged %d times", n)
	}
	// It is due at once, and executing it is RetryDue's business.
	for range 2 {
		if results, err = r.CatchUp(t.Context(), job, date, date.AddDays(3), 5); err != nil || len(results) != 0 {
			t.Errorf("behind a date that is due: %+v, %v", results, err)
		}
	}
	if n := query[int](t, db.Pool, `SELECT sum(executions)::int FROM batch_job_run`); n != 2 {
		t.Errorf("%d executions", n)
	}
	theirs = nil
	if results, err = r.RetryDue(t.Context(), job); err != nil || len(results) != 1 {
		t.Errorf("retry: %+v, %v", results, err)
	}
	results, err = r.CatchUp(t.Context(), job, date, date.AddDays(3), 5)
	caughtUp(t, "after the retry", results, err, "2026-09-17", "2026-09-18")
}

// TestCatchUpDoesNotRetry: a date that turns out FAILED and due, or approved, at
// the moment of the claim ends the call, too.
func TestCatchUpDoesNotRetry(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, row := range map[string]string{
		"due":      `INSERT INTO batch_job_run (job_key, status, worker_id, next_attempt_at) VALUES ($1, 'FAILED', 'node-1', now())`,
		"approved": `INSERT INTO batch_job_run (job_key, status, worker_id, approved_at, approved_attempt, approved_status, approved_worker) VALUES ($1, 'FAILED', 'node-1', now(), 1, 'FAILED', 'node-1')`,
		"running":  `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'node-1')`,
		"done":     `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'SUCCEEDED', 'node-1')`,
	} {
		job, executions := countingJob(name)
		looks := 0
		r := newRunner(t, db.Pool, jobrun.Options{Now: func() time.Time {
			// The second look is at the nominal time of the claim, when the list of missed dates has been read.
			if looks++; looks == 2 {
				exec(t, db.Pool, row, job.Key(date))
			}
			return instant("2026-09-20T01:00:00Z")
		}})
		results, err := r.CatchUp(t.Context(), job, date, date.AddDays(1), 5)
		if name == "done" { // another instance has done it meanwhile: go on
			if err != nil || len(results) != 2 || results[0].Decision != jobrun.AlreadySucceeded || executions.Load() != 1 {
				t.Errorf("%s: %+v, %v; executed %d times", name, results, err, executions.Load())
			}
			continue
		}
		if err != nil || len(results) != 1 || results[0].Ran() || executions.Load() != 0 {
			t.Errorf("%s: %+v, %v; executed %d times", name, results, err, executions.Load())
		}
		if n := query[int](t, db.Pool, `SELECT executions FROM batch_job_run WHERE job_key = $1`, job.Key(date)); n != 1 {
			t.Errorf("%s: claimed", name)
		}
	}
}

func TestCatchUpAfterTheEndIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: newHandClock("2026-09-20T01:00:00Z").now})
	job, executions := countingJob("daily")
	theirs := errors.New("deployment")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(theirs)
	if results, err := r.CatchUp(ctx, job, date, date, 1); err == nil || executions.Load() != 0 {
		t.Errorf("an ended context: %+v, %v", results, err)
	}
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if results, err := r.CatchUp(t.Context(), job, date, date, 1); !errors.Is(err, jobrun.ErrShutdown) || executions.Load() != 0 {
		t.Errorf("after Shutdown: %+v, %v", results, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 0 {
		t.Errorf("%d rows", n)
	}
}

func TestFirstDeploymentBackfillsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job, executions := countingJob("daily")
	w := newClockwork(cron.WithLocation(seoul))
	if _, err := r.Schedule(t.Context(), w.Cron, "", job); err != nil {
		t.Fatal(err)
	}
	w.fire(t, instant("2024-09-15T01:00:00Z"))
	_, retryErr := r.RetryDue(t.Context())
	problems, err := r.Attention(t.Context(), nil)
	if err = errors.Join(retryErr, err); err != nil || len(problems) == 0 { // told, not run
		t.Errorf("%+v, %v", problems, err)
	}
	if executions.Load() != 1 || query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`) != 1 {
		t.Errorf("executed %d times", executions.Load())
	}
}

const (
	orderDays      = 12
	orderProcesses = 2
	orderRunners   = 3
)

// keepOrder catches up until all dates are done; the first attempt of every
// fourth date fails.
func keepOrder(ctx context.Context, r *jobrun.Runner, pool *pgxpool.Pool) error {
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}}
	job.Func = func(ctx context.Context, run *jobrun.Run) error {
		if _, err := pool.Exec(ctx, `INSERT INTO execution (key, failed) VALUES ($1, $2)`, run.Key(), run.Attempt() == 1 && run.Date().Day%4 == 0); err != nil {
			return err
		}
		if run.Attempt() == 1 && run.Date().Day%4 == 0 {
			return errors.New("first attempt")
		}
		return nil
	}
	for {
		_, err := r.CatchUp(ctx, job, date, date.AddDays(orderDays-1), 3)
		if failed := (*jobrun.RunError)(nil); err != nil && !errors.As(err, &failed) {
			return err
		}
		if _, err = r.RetryDue(ctx, job); err != nil {
			return err
		}
		var done int
		if err = pool.QueryRow(ctx, `SELECT count(*) FROM batch_job_run WHERE status = 'SUCCEEDED'`).Scan(&done); err != nil || done == orderDays {
			return err
		}
	}
}

var _ = pgtest.RegisterChild("keep-order", func() int {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_DATABASE_URL"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer pool.Close()
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Now: newHandClock("2026-12-01T01:00:00Z").now, Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = keepOrder(ctx, r, pool)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
})

// TestInstancesThatCatchUpAtOnceKeepTheOrder: Runners of this process and of
// others; nobody starts a date while an earlier one is running or failed.
func TestInstancesThatCatchUpAtOnceKeepTheOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE TABLE execution (key text, failed bool, at timestamptz DEFAULT clock_timestamp())`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for range orderProcesses {
		child := pgtest.Reexec(t, "keep-order", "CHILD_DATABASE_URL="+db.URL)
		wg.Go(func() {
			if out, err := child.Output(); err != nil {
				t.Errorf("child: %v: %s", err, out)
			}
		})
	}
	for range orderRunners {
		pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
		r := newRunner(t, pool, jobrun.Options{Now: newHandClock("2026-12-01T01:00:00Z").now})
		wg.Go(func() {
			if err := keepOrder(ctx, r, pool); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	const failures = 3 // of the 16th, 20th and 24th
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM execution`); n != orderDays+failures {
		t.Errorf("%d executions", n)
	}
	if early := query[[]string](t, db.Pool, `SELECT coalesce(array_agg(e.key || ' before ' || d.job_key), '{}')
		FROM execution AS e JOIN batch_job_run AS d ON d.job_key < e.key WHERE e.at < d.finished_at`); len(early) > 0 {
		t.Errorf("executed too early: %v", early)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE trigger = 'RETRY'`); n != failures {
		t.Errorf("%d retries", n)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE trigger = 'CATCH_UP'`); n != orderDays {
		t.Errorf("%d first attempts", n)
	}
}
