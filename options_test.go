package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// deadPool returns a pool to an address where nobody listens, and how often somebody tried to connect.
func deadPool(t *testing.T, conns int32) (*pgxpool.Pool, *atomic.Int64) {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/nothing?connect_timeout=1")
	if err != nil {
		t.Fatal(err)
	}
	tries := new(atomic.Int64)
	config.MaxConns = conns
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { tries.Add(1); return nil }
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, tries
}

// zoned returns a Runner like newRunner's in another zone.
func zoned(t *testing.T, pool *pgxpool.Pool, zone string, opts jobrun.Options) *jobrun.Runner {
	t.Helper()
	location, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	opts.Logger = slog.New(slog.DiscardHandler)
	r, err := jobrun.New(pool, location, &opts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func instant(s string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		panic(err)
	}
	return at
}

// handClock is an Options.Now that shows what it was set to, and counts who looked.
type handClock struct {
	at    atomic.Pointer[time.Time]
	looks atomic.Int64
}

func newHandClock(s string) *handClock {
	c := &handClock{}
	c.set(s)
	return c
}

func (c *handClock) set(s string)   { at := instant(s); c.at.Store(&at) }
func (c *handClock) now() time.Time { c.looks.Add(1); return *c.at.Load() }

func TestInvalidJobsAreRefusedBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	pool, tries := deadPool(t, 4)
	logs := newLogBook()
	r := newRunner(t, pool, jobrun.Options{Logger: slog.New(logs)})
	ok := jobrun.Job{Name: "daily", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}
	with := func(change func(*jobrun.Job)) jobrun.Job { job := ok; change(&job); return job }
	named := func(name string) jobrun.Job { return with(func(j *jobrun.Job) { j.Name = name }) }
	every := func(d time.Duration) jobrun.Job { return with(func(j *jobrun.Job) { j.Every = d }) }
	sameDay := func(d jobrun.Date) (jobrun.Date, error) { return d, nil }

	for name, job := range map[string]jobrun.Job{
		"1": named("a"), "79": named(strings.Repeat("a", 79)), "80": named(strings.Repeat("a", 80)),
		"79 한": named(strings.Repeat("한", 79)), "80 한": named(strings.Repeat("한", 80)), "80 𐎀": named(strings.Repeat("𐎀", 80)),
		"marks": named("a.b_c-d/e"), "only marks": named("._-/"), "digits": named("2026-09-15"), "scripts": named("정산/決済/расчёт/٣"),
		"minute": every(time.Minute), "12 h": every(12 * time.Hour), "90 min": every(90 * time.Minute), "no every": every(0),
		"all": with(func(j *jobrun.Job) {
			j.Date, j.Calendar, j.StaleAfter, j.Timeout = sameDay, jobrun.Weekdays, time.Nanosecond, time.Nanosecond
			j.Retry = jobrun.Retry{MaxAttempts: 1 << 30, Backoff: jobrun.Exponential(0, 0)}
		}),
	} {
		if err := job.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	type refused struct {
		field string
		job   jobrun.Job
	}
	var all []refused
	for _, name := range []string{
		"", " ", "daily ", " daily", "dai ly", "daily\n", "dai\nly", "\t", "dai\x00ly", "\x00", "\xff", "dai\xffly", "\xed\xa0\x80",
		"a:b", ":", "daily:2026-09-15", "daily🙂", "zero\u200bwidth", "join\u200der", "bom\ufeff", "nbsp\u00a0", "wide\u3000space", "rtl\u202e", "soft\u00adhyphen",
		"filler\u3164", "\u3164", "\u115f", "\u1160", "half\uffa0", "\u2800", "\ufffd", "a,b", "a;b", "a'b", `a"b`, `a\b`, "a%b", "a*b", "a+b", "a@b", "\u0085", "\x7f",
		strings.Repeat("a", 81), strings.Repeat("한", 81), strings.Repeat("a", 80) + " ", strings.Repeat("a", 1<<20),
	} {
		all = append(all, refused{"Job.Name", named(name)})
	}
	all = append(all,
		refused{"Job.Func", with(func(j *jobrun.Job) { j.Func = nil })},
		refused{"Job.Every", every(-time.Hour)}, refused{"Job.Every", every(time.Nanosecond)}, refused{"Job.Every", every(30 * time.Second)},
		refused{"Job.Every", every(90 * time.Second)}, refused{"Job.Every", every(7 * time.Minute)}, refused{"Job.Every", every(5 * time.Hour)},
		refused{"Job.Every", every(24 * time.Hour)}, refused{"Job.Every", every(48 * time.Hour)},
		refused{"Job.Date", with(func(j *jobrun.Job) { j.Every, j.Date = time.Hour, sameDay })},
		refused{"Job.StaleAfter", with(func(j *jobrun.Job) { j.StaleAfter = -1 })},
		refused{"Job.Timeout", with(func(j *jobrun.Job) { j.Timeout = -1 })},
		refused{"Job.Retry.MaxAttempts", with(func(j *jobrun.Job) { j.Retry.MaxAttempts = -1 })},
	)
	for _, c := range all {
		invalid := func(err error) *jobrun.InvalidError {
			var e *jobrun.InvalidError
			if !errors.As(err, &e) || e.Field != c.field || e.Allowed == "" {
				t.Errorf("name %.20q: %v; want *InvalidError of %s", c.job.Name, err, c.field)
				return &jobrun.InvalidError{}
			}
			if len(err.Error()) > 4096 || !utf8.ValidString(err.Error()) {
				t.Errorf("name %.20q: text of %d bytes", c.job.Name, len(err.Error()))
			}
			return e
		}
		e := invalid(c.job.Validate())
		if n := utf8.RuneCountInString(c.job.Name); n > 80 && (e.Value != c.job.Name || !strings.Contains(e.Error(), "80") || !strings.Contains(e.Error(), fmt.Sprint(n))) {
			t.Errorf("%d characters: the error shows neither value nor limit: %v", n, e)
		}
		_, err := r.Run(t.Context(), c.job)
		invalid(err)
		_, err = r.RunTrigger(t.Context(), c.job, time.Now())
		invalid(err)
		_, err = r.RunDate(t.Context(), c.job, date)
		invalid(err)
	}
	if n := logs.count(slog.LevelError); n != 3*len(all) {
		t.Errorf("%d errors returned, %d logged", 3*len(all), n)
	}

	// What is wrong with the call, not with the job.
	for _, d := range []jobrun.Date{{}, {Year: 2026, Month: 2, Day: 29}, {Year: 0, Month: 1, Day: 1}, {Year: 10000, Month: 1, Day: 1}, {Year: 2026, Month: 13, Day: 1}} {
		var e *jobrun.InvalidError
		if _, err := r.RunDate(t.Context(), ok, d); !errors.As(err, &e) || e.Field != "date" {
			t.Errorf("date %s: %v", d, err)
		}
	}
	var e *jobrun.InvalidError
	if _, err := r.RunDate(t.Context(), every(time.Hour), date); !errors.As(err, &e) || e.Field != "Job.Every" {
		t.Errorf("RunDate of a job with Every: %v", err)
	}
	for _, at := range []time.Time{time.Date(10000, 1, 2, 0, 0, 0, 0, time.UTC), time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)} {
		for _, job := range []jobrun.Job{ok, every(time.Hour)} {
			if _, err := r.RunTrigger(t.Context(), job, at); !errors.As(err, &e) {
				t.Errorf("trigger %s, every %s: %v", at, job.Every, err)
			}
		}
	}
	for _, f := range []jobrun.Filter{
		{Limit: -1},
		{Limit: 1001},
		{From: jobrun.Date{Year: 2026, Month: 2, Day: 30}},
		{To: jobrun.Date{Year: 10000, Month: 1, Day: 1}},
		{Job: "a:b"},
		{Job: "\xff"},
		{Job: strings.Repeat("한", 81)},
		{After: "a\x00b"},
		{After: "\xff"},
		{Status: []jobrun.Status{jobrun.Failed, "\x00"}},
		{Status: []jobrun.Status{"\xff"}},
	} {
		if _, err := r.List(t.Context(), f); !errors.As(err, &e) || !strings.HasPrefix(e.Field, "Filter.") {
			t.Errorf("filter %+v: %v", f, err)
		}
	}
	if n := tries.Load(); n != 0 {
		t.Errorf("%d connections were tried", n)
	}
}

func TestLongNamesNeverShareARun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, long := range []string{strings.Repeat("a", 79), strings.Repeat("한", 79)} {
		for _, last := range []string{"1", "2"} {
			job, executions := countingJob(long + last)
			job.Every = time.Hour // the longest keys
			res, err := r.RunTrigger(t.Context(), job, instant("2026-09-15T04:30:00Z"))
			if err != nil || !res.Ran() || executions.Load() != 1 || res.Record.Job != job.Name || res.Record.Key != job.Name+":2026-09-15T13:00+09:00" {
				t.Errorf("%+v, %v", res, err)
			}
			longer, executions := countingJob(job.Name + "3") // equal in all that the limit allows
			if _, err := r.RunDate(t.Context(), longer, date); err == nil || executions.Load() != 0 {
				t.Errorf("one character over the limit: %v, executed %d times", err, executions.Load())
			}
		}
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE char_length(split_part(job_key, ':', 1)) = 80 AND job_name = split_part(job_key, ':', 1)`); n != 4 {
		t.Errorf("%d rows, want 4", n)
	}
}

func TestInvalidOptionsAreRefused(t *testing.T) {
	t.Parallel()
	pool, tries := deadPool(t, 2)
	small, _ := deadPool(t, 1)
	for _, c := range []struct {
		field string
		pool  *pgxpool.Pool
		zone  *time.Location
		opts  *jobrun.Options
	}{
		{"pool", nil, seoul, nil},
		{"pool.MaxConns", small, seoul, nil},
		{"zone", pool, nil, nil},
		{"zone", pool, time.Local, nil},
		{"Options.DayStart", pool, seoul, &jobrun.Options{DayStart: -1}},
		{"Options.DayStart", pool, seoul, &jobrun.Options{DayStart: 24 * time.Hour}},
		{"Options.Lease", pool, seoul, &jobrun.Options{Lease: -time.Minute}},
		{"Options.Lease", pool, seoul, &jobrun.Options{Lease: time.Second - 1}},
		{"Options.StaleAfter", pool, seoul, &jobrun.Options{StaleAfter: -1}},
		{"Options.DatabaseTimeout", pool, seoul, &jobrun.Options{DatabaseTimeout: 5*time.Second - 1}},
		{"Options.DatabaseTimeout", pool, seoul, &jobrun.Options{DatabaseTimeout: time.Hour + 1}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: strings.Repeat("w", 72)}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: strings.Repeat("한", 72)}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: "a\x00b"}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: "a\nb"}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: "zero\u200bwidth"}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: "rtl\u202e"}},
		{"Options.WorkerID", pool, seoul, &jobrun.Options{WorkerID: "\xff"}},
		{"Options.Schema", pool, seoul, &jobrun.Options{Schema: "a\x00b"}},
		{"Options.Schema", pool, seoul, &jobrun.Options{Schema: "\xff"}},
		{"Options.Schema", pool, seoul, &jobrun.Options{Schema: strings.Repeat("한", 22)}}, // 66 bytes
	} {
		r, err := jobrun.New(c.pool, c.zone, c.opts)
		var e *jobrun.InvalidError
		if r != nil || !errors.As(err, &e) || e.Field != c.field || e.Allowed == "" {
			t.Errorf("%s %+v: %v, %v", c.field, c.opts, r, err)
		}
	}
	for _, opts := range []*jobrun.Options{
		nil,
		{},
		{DayStart: 24*time.Hour - 1},
		{Lease: time.Second},
		{StaleAfter: 1},
		{DatabaseTimeout: 5 * time.Second},
		{DatabaseTimeout: time.Hour},
		{WorkerID: strings.Repeat("한", 71)},
		{WorkerID: "배치 서버 1"},
		{Schema: strings.Repeat("한", 21)},
		{Schema: `we"ird`},
	} {
		if r, err := jobrun.New(pool, seoul, opts); r == nil || err != nil {
			t.Errorf("%+v: %v, %v", opts, r, err)
		}
	}
	if n := tries.Load(); n != 0 {
		t.Errorf("New tried %d connections", n)
	}
}

func TestBusinessZoneIsExplicit(t *testing.T) {
	t.Parallel()
	pool, tries := deadPool(t, 2)
	at := instant("2026-07-26T16:00:00Z")
	now := func() time.Time { return at }
	for _, name := range []string{"Asia/Seoul", "ROK", "Etc/GMT-9"} {
		if today := zoned(t, pool, name, jobrun.Options{Now: now}).Today(); today != jobrun.MustParseDate("2026-07-27") {
			t.Errorf("%s: today is %s", name, today)
		}
	}
	if today := zoned(t, pool, "Asia/Seoul", jobrun.Options{Now: now, DayStart: 2 * time.Hour}).Today(); today != jobrun.MustParseDate("2026-07-26") {
		t.Errorf("01:00 before a day start of 02:00: today is %s", today)
	}
	if today := zoned(t, pool, "UTC", jobrun.Options{Now: now}).Today(); today != jobrun.MustParseDate("2026-07-26") { // named, not defaulted to
		t.Errorf("UTC: today is %s", today)
	}
	for _, name := range []string{"KST", "KST-9", "GMT+9", "+09:00", "Asia/Soul", "../etc/passwd"} {
		zone, err := time.LoadLocation(name)
		if err == nil {
			t.Errorf("%q is a zone", name)
		}
		if r, err := jobrun.New(pool, zone, nil); r != nil || err == nil || !strings.Contains(err.Error(), "zone") { // who drops the error gets nil
			t.Errorf("%q: %v, %v", name, r, err)
		}
	}
	if local, err := time.LoadLocation("Local"); err == nil {
		if r, err := jobrun.New(pool, local, nil); r != nil || err == nil {
			t.Errorf("Local: %v, %v", r, err)
		}
	}
	if n := tries.Load(); n != 0 {
		t.Errorf("%d connections were tried", n)
	}
}

func TestWorkerIDNamesTheProcess(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for n, c := range []struct{ label, want string }{
		{"", host}, {"batch-1", "batch-1"}, {"batch-1", "batch-1"}, {strings.Repeat("w", 71), strings.Repeat("w", 71)}, {strings.Repeat("한", 71), strings.Repeat("한", 71)},
	} {
		r := newRunner(t, db.Pool, jobrun.Options{WorkerID: c.label})
		for _, name := range []string{"a", "b"} {
			job, _ := countingJob(fmt.Sprintf("%s-%d", name, n))
			res, err := r.RunDate(t.Context(), job, date)
			id := res.Record.WorkerID
			if err != nil || !regexp.MustCompile(`^`+regexp.QuoteMeta(c.want)+`-[0-9a-f]{8}$`).MatchString(id) || utf8.RuneCountInString(id) > 80 {
				t.Errorf("label %q: worker id %q, %v", c.label, id, err)
			}
			if stored := query[string](t, db.Pool, `SELECT worker_id FROM batch_job_run JOIN batch_job_attempt USING (job_key, worker_id) WHERE job_key = $1`, job.Key(date)); stored != id {
				t.Errorf("label %q: stored %q, not %q", c.label, stored, id)
			}
			if seen[id] != (name == "b") {
				t.Errorf("%q is not one process's", id)
			}
			seen[id] = true
		}
	}
}

func TestDateIsFixedWhenTheCallBegins(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
	clock := newHandClock("2026-12-31T14:59:59.9Z")
	r := newRunner(t, pool, jobrun.Options{Now: clock.now})
	var strangers []*pgxpool.Conn
	for range 2 {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		strangers = append(strangers, conn)
	}
	var dates []jobrun.Date
	job := jobrun.Job{Name: "daily", Func: func(_ context.Context, run *jobrun.Run) error {
		dates = append(dates, run.Date())
		clock.set("2027-01-01T15:20:00Z") // it takes more than a day
		return nil
	}}
	var res jobrun.Result
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, err = r.Run(t.Context(), job)
	}()
	if !pollUntil(t.Context(), func() bool { return clock.looks.Load() > 0 }) {
		t.Fatal("nobody asked for the time")
	}
	clock.set("2026-12-31T15:00:01.9Z")
	for _, conn := range strangers {
		conn.Release()
	}
	<-done
	if err != nil || !res.Ran() || res.Record.Key != "daily:2026-12-31" || len(dates) != 1 || dates[0] != jobrun.MustParseDate("2026-12-31") ||
		!res.Record.ScheduledFor.Equal(instant("2026-12-31T14:59:59.9Z")) {
		t.Errorf("got %+v, %v, dates %v", res, err, dates)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func TestNominalTimeDecidesTheDate(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	clock := newHandClock("2026-12-31T14:59:59.977Z") // a timer that fired a hair early
	r := newRunner(t, db.Pool, jobrun.Options{Now: clock.now})
	job, _ := countingJob("daily")
	nominal := instant("2026-12-31T15:00:00Z")
	if res, err := r.RunTrigger(t.Context(), job, nominal); err != nil || res.Record.Key != "daily:2027-01-01" || !res.Record.ScheduledFor.Equal(nominal) ||
		res.Record.ScheduledFor.Location() != seoul || res.Record.Trigger != jobrun.TriggerSchedule {
		t.Errorf("RunTrigger: %+v, %v", res, err)
	}
	if res, err := r.Run(t.Context(), job); err != nil || res.Record.Key != "daily:2026-12-31" || res.Record.Trigger != jobrun.TriggerSchedule {
		t.Errorf("Run: %+v, %v", res, err)
	}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Key != "daily:2026-09-15" || res.Record.Trigger != jobrun.TriggerManual {
		t.Errorf("RunDate: %+v, %v", res, err)
	}
}

func TestRetryOnALaterDayKeepsTheRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	clock := newHandClock("2026-12-31T14:50:00Z")
	r := newRunner(t, db.Pool, jobrun.Options{Now: clock.now})
	fired := instant("2026-12-31T14:50:00Z")
	type seen struct {
		key     string
		date    jobrun.Date
		attempt int
		fired   string
	}
	var runs []seen
	job := jobrun.Job{
		Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }},
		Func: func(_ context.Context, run *jobrun.Run) error {
			runs = append(runs, seen{run.Key(), run.Date(), run.Attempt(), run.ScheduledFor().Format(time.RFC3339)})
			if run.Attempt() == 1 {
				return errors.New("broken")
			}
			return nil
		},
	}
	hourly := job
	hourly.Name, hourly.Every = "hourly", time.Hour
	for _, job := range []jobrun.Job{job, hourly} {
		if res, err := r.RunTrigger(t.Context(), job, fired); err == nil || res.Record.NextAttemptAt.IsZero() {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	clock.set("2026-12-31T15:10:00Z")
	never := func(jobrun.Date) bool { t.Error("a retry asked the calendar"); return false }
	job.Calendar = never
	if res, err := r.RunDate(t.Context(), job, jobrun.MustParseDate("2026-12-31")); err != nil || !res.Ran() || res.Record.Trigger != jobrun.TriggerRetry || !res.Record.ScheduledFor.Equal(fired) {
		t.Errorf("%+v, %v", res, err)
	}
	if res, err := r.RunTrigger(t.Context(), hourly, instant("2026-12-31T14:55:00Z")); err != nil || !res.Ran() || res.Record.Trigger != jobrun.TriggerRetry || !res.Record.ScheduledFor.Equal(instant("2026-12-31T14:00:00Z")) {
		t.Errorf("%+v, %v", res, err)
	}
	want := []seen{
		{"daily:2026-12-31", jobrun.MustParseDate("2026-12-31"), 1, "2026-12-31T23:50:00+09:00"},
		{"hourly:2026-12-31T23:00+09:00", jobrun.MustParseDate("2026-12-31"), 1, "2026-12-31T23:00:00+09:00"},
		{"daily:2026-12-31", jobrun.MustParseDate("2026-12-31"), 2, "2026-12-31T23:50:00+09:00"},
		{"hourly:2026-12-31T23:00+09:00", jobrun.MustParseDate("2026-12-31"), 2, "2026-12-31T23:00:00+09:00"},
	}
	if fmt.Sprint(runs) != fmt.Sprint(want) {
		t.Errorf("ran %v\nwant %v", runs, want)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 2 {
		t.Errorf("%d rows", n)
	}
}

func TestRepeatedHour(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := zoned(t, db.Pool, "Europe/Berlin", jobrun.Options{})
	passes := []time.Time{instant("2024-10-27T00:05:00Z"), instant("2024-10-27T01:05:00Z")} // 02:05 twice

	daily, executions := countingJob("close")
	for n, at := range passes {
		res, err := r.RunTrigger(t.Context(), daily, at)
		if err != nil || res.Ran() != (n == 0) || res.Record.Key != "close:2024-10-27" || res.Record.Attempt != 1 {
			t.Errorf("%s: %+v, %v", at, res, err)
		}
	}
	if executions.Load() != 1 || rowsOf(t, db.Pool, "close:2024-10-27") != [2]int{1, 1} {
		t.Errorf("the daily job was executed %d times", executions.Load())
	}

	hourly, executions := countingJob("inventory-sync")
	hourly.Every = time.Hour
	var keys []string
	for _, at := range append(passes, passes...) {
		res, err := r.RunTrigger(t.Context(), hourly, at)
		if err != nil || res.Record.Date != jobrun.MustParseDate("2024-10-27") || !res.Record.ScheduledFor.Equal(at.Add(-5*time.Minute)) {
			t.Errorf("%s: %+v, %v", at, res, err)
		}
		keys = append(keys, res.Record.Key)
	}
	want := "[inventory-sync:2024-10-27T02:00+02:00 inventory-sync:2024-10-27T02:00+01:00]"
	if got := fmt.Sprint(keys[:2]); got != want || fmt.Sprint(keys[2:]) != want || executions.Load() != 2 {
		t.Errorf("executed %d times, keys %v", executions.Load(), keys)
	}
	if _, err := r.RunDate(t.Context(), hourly, date); err == nil || !strings.Contains(err.Error(), "no run per date") {
		t.Errorf("RunDate: %v", err)
	}
}

func TestFaultyRuleWritesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	theirs := errors.New("no banking day known")
	ok, executions := countingJob("daily")
	for name, c := range map[string]struct {
		change func(*jobrun.Job)
		text   string
	}{
		"rule fails":     {func(j *jobrun.Job) { j.Date = func(jobrun.Date) (jobrun.Date, error) { return date, theirs } }, "2026-09-15: no banking day known"},
		"rule panics":    {func(j *jobrun.Job) { j.Date = func(jobrun.Date) (jobrun.Date, error) { panic(theirs) } }, "panic: no banking day known"},
		"rule gives bad": {func(j *jobrun.Job) { j.Date = func(jobrun.Date) (jobrun.Date, error) { return jobrun.Date{}, nil } }, "date of the run"},
		"calendar panics": {func(j *jobrun.Job) {
			j.Calendar = func(jobrun.Date) bool { panic(theirs) }
		}, "panic: no banking day known"},
		"calendar panics on nil": {func(j *jobrun.Job) {
			var holidays *jobrun.Date
			j.Calendar = func(d jobrun.Date) bool { return d == *holidays }
		}, "nil pointer"},
		"slot's calendar panics": {func(j *jobrun.Job) {
			j.Every, j.Calendar = time.Hour, func(jobrun.Date) bool { panic(theirs) }
		}, "panic: no banking day known"},
	} {
		job := ok
		c.change(&job)
		res, err := r.RunTrigger(t.Context(), job, time.Date(2026, 9, 15, 9, 0, 0, 0, seoul))
		if err == nil || res.Decision != "" || !strings.Contains(err.Error(), "daily") || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
		if strings.Contains(c.text, "banking") && !errors.Is(err, theirs) {
			t.Errorf("%s: %v hides the error", name, err)
		}
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 0 || executions.Load() != 0 {
		t.Errorf("%d rows, executed %d times", n, executions.Load())
	}
}

func TestDateNotDueIsRecordedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var events []jobrun.Event
	r := newRunner(t, db.Pool, jobrun.Options{OnEvent: func(_ context.Context, e jobrun.Event) { events = append(events, e) }})
	job, executions := countingJob("daily")
	var judged []jobrun.Date
	job.Date = jobrun.PreviousDay
	job.Calendar = func(d jobrun.Date) bool { judged = append(judged, d); return jobrun.Weekdays(d) }
	sunday := jobrun.MustParseDate("2026-09-13")
	monday := time.Date(2026, 9, 14, 0, 10, 0, 0, seoul)
	var first jobrun.Record
	for n := range 3 {
		res, err := r.RunTrigger(t.Context(), job, monday)
		rec := res.Record
		if err != nil || res.Decision != jobrun.NotDue || rec.Key != "daily:2026-09-13" || rec.Status != jobrun.Skipped || rec.Attempt != 0 || rec.Error == "" || rec.FinishedAt.IsZero() || !rec.ScheduledFor.Equal(monday) {
			t.Errorf("call %d: %+v, %v", n, res, err)
		}
		if n == 0 {
			first = rec
		} else if rec != first {
			t.Errorf("call %d: %+v, not %+v", n, rec, first)
		}
	}
	if res, err := r.RunDate(t.Context(), job, sunday); err != nil || res.Decision != jobrun.AlreadySkipped || res.Record != first {
		t.Errorf("RunDate: %+v, %v", res, err)
	}
	var wg sync.WaitGroup
	sameTime, _ := countingJob("at-once")
	sameTime.Calendar = func(jobrun.Date) bool { return false }
	var told atomic.Int64
	others := newRunner(t, db.Pool, jobrun.Options{OnEvent: func(context.Context, jobrun.Event) { told.Add(1) }})
	for range 20 {
		wg.Go(func() {
			if res, err := others.RunTrigger(context.Background(), sameTime, monday); err != nil || res.Decision != jobrun.NotDue || res.Record.Status != jobrun.Skipped {
				t.Errorf("at once: %+v, %v", res, err)
			}
		})
	}
	wg.Wait()
	if told.Load() != 1 {
		t.Errorf("20 calls at once told %d events", told.Load())
	}
	if len(events) != 1 || events[0].Record != first || events[0].Previous != "" || events[0].Err != nil || events[0].Action != nil {
		t.Errorf("events %+v", events)
	}
	if rowsOf(t, db.Pool, "daily:2026-09-13") != [2]int{1, 0} || executions.Load() != 0 {
		t.Errorf("rows %v, executed %d times", rowsOf(t, db.Pool, "daily:2026-09-13"), executions.Load())
	}
	if fmt.Sprint(judged) != "[2026-09-13 2026-09-13 2026-09-13]" { // the run's date, and not for RunDate
		t.Errorf("the calendar was asked about %v", judged)
	}
	// Nobody has skipped this one yet: by hand it runs, due or not.
	if res, err := r.RunDate(t.Context(), job, jobrun.MustParseDate("2026-09-12")); err != nil || !res.Ran() {
		t.Errorf("RunDate of a date that is not due: %+v, %v", res, err)
	}
}

func TestHostClockOnlyDecidesDates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	watchers := map[time.Duration]*jobrun.Runner{}
	skewed := func(d time.Duration) *jobrun.Runner {
		return newRunner(t, db.Pool, jobrun.Options{Lease: 5 * time.Second, Now: func() time.Time { return time.Now().Add(d) }})
	}
	skews := []time.Duration{-10 * time.Minute, -5 * time.Minute, 0, 10 * time.Minute}
	for _, d := range skews {
		watchers[d] = skewed(d)
	}
	for n, d := range skews {
		job := jobrun.Job{
			Name: fmt.Sprintf("skew-%d", n), Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Minute }},
			Func: func(ctx context.Context, run *jobrun.Run) error {
				for range 20 {
					for _, w := range watchers {
						if stale, err := w.Stale(ctx); err != nil || len(stale) > 0 {
							t.Errorf("%s: stale: %+v, %v", run.Key(), stale, err)
						}
					}
				}
				return errors.New("broken")
			},
		}
		before := query[time.Time](t, db.Pool, `SELECT clock_timestamp()`)
		res, err := watchers[d].Run(t.Context(), job)
		after := query[time.Time](t, db.Pool, `SELECT clock_timestamp()`)
		rec := res.Record
		if err == nil || rec.StartedAt.Before(before) || rec.FinishedAt.Before(rec.StartedAt) || rec.FinishedAt.After(after) {
			t.Errorf("skew %s: %+v, %v; by the server's clock between %s and %s", d, rec, err, before, after)
		}
		if pause := rec.NextAttemptAt.Sub(rec.FinishedAt); pause < time.Minute || pause > time.Minute+time.Second {
			t.Errorf("skew %s: next attempt %s after the end", d, pause)
		}
		for skew, w := range watchers {
			if res, err := w.RunDate(t.Context(), job, rec.Date); err != nil || res.Decision != jobrun.RetryLater || !res.Record.NextAttemptAt.Equal(rec.NextAttemptAt) {
				t.Errorf("a claim with skew %s: %+v, %v", skew, res, err)
			}
		}
	}
}

func TestTimesReadRightUnderEverySessionTimeZone(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	fired := instant("2026-09-14T15:30:00.123456Z") // 00:30 of the 15th in Seoul
	modes := []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}
	for n, zone := range []string{"UTC", "Asia/Seoul", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia"} {
		for _, mode := range modes {
			pool := db.PoolWith(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["timezone"] = zone
				c.ConnConfig.DefaultQueryExecMode = mode
			})
			r := newRunner(t, pool, jobrun.Options{})
			job, _ := countingJob(fmt.Sprintf("zone-%d-%d", n, mode))
			res, err := r.RunTrigger(t.Context(), job, fired)
			rec := res.Record
			if err != nil || rec.Date != date || !rec.ScheduledFor.Equal(fired) {
				t.Errorf("%s: %+v, %v", zone, res, err)
			}
			const layout = "2006-01-02 15:04:05.000000"
			want := fmt.Sprint(date, " ", rec.ScheduledFor.Format(layout), " ", rec.StartedAt.Format(layout), " ", rec.FinishedAt.Format(layout))
			got := query[string](t, pool, `SELECT concat_ws(' ', business_date, scheduled_for AT TIME ZONE 'Asia/Seoul',
				to_char(started_at AT TIME ZONE 'Asia/Seoul', 'YYYY-MM-DD HH24:MI:SS.US'), to_char(finished_at AT TIME ZONE 'Asia/Seoul', 'YYYY-MM-DD HH24:MI:SS.US'))
				FROM batch_job_run WHERE job_key = $1`, rec.Key)
			if got != want {
				t.Errorf("%s, %s: the row says %s, the record %s", zone, mode, got, want)
			}
			if again, err := newRunner(t, db.Pool, jobrun.Options{}).Get(t.Context(), rec.Key); err != nil || again != rec {
				t.Errorf("%s, %s: another session reads %+v, %v; want %+v", zone, mode, again, err, rec)
			}
		}
	}
}
