package jobrunprom_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops/jobrunprom"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var silent = slog.New(slog.DiscardHandler)

// service is a Runner with Metrics, and the page that Prometheus reads.
func service(t *testing.T, db *pgtest.DB, jobs ...jobrun.Job) (*jobrun.Runner, func() string) {
	t.Helper()
	m := jobrunprom.New(&jobrunprom.Options{MaxAge: time.Nanosecond, Logger: silent})
	r, err := jobrun.New(db.Pool, time.UTC, &jobrun.Options{OnEvent: m.OnEvent, Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(m)
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("before Watch: %v, %v", problems, err)
	}
	m.Watch(r, jobs...)
	page := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	t.Cleanup(page.Close)
	return r, func() string {
		t.Helper()
		response, err := http.Get(page.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v\n%s", response.Status, err, body)
		}
		return string(body)
	}
}

func has(t *testing.T, page string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(page) {
			t.Errorf("no %s in\n%s", line, regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(page, ""))
		}
	}
}

func TestMetricsTellWhatHappened(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	failure := errors.New("rates are missing")
	var fails error
	settle := jobrun.Job{Name: "settlement", Func: func(_ context.Context, run *jobrun.Run) error {
		run.AddProcessed(3)
		run.AddFailed(2)
		return fails
	}}
	slots := jobrun.Job{Name: "inventory", Every: time.Hour, Func: settle.Func}
	r, page := service(t, db, settle, slots)
	today := r.Today()
	has(t, page(), `jobrun_up 1`, `jobrun_problems\{job_name="settlement",kind="FAILED"\} 0`, `jobrun_problems\{job_name="settlement",kind="MISSED"\} 0`,
		`jobrun_attempts_total\{job_name="settlement",status="SUCCEEDED"\} 0`, `jobrun_running_attempts\{job_name="settlement"\} 0`)
	if strings.Contains(page(), "last_success") || strings.Contains(page(), `job_name="inventory",kind="MISSED"`) {
		t.Error("tells of a success or a date that there cannot be")
	}

	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	slow := settle
	slow.Func = func(context.Context, *jobrun.Run) error { close(started); <-end; return nil }
	go func() { _, err := r.RunDate(t.Context(), slow, today.AddDays(-3)); ended <- err }()
	<-started
	has(t, page(), `jobrun_running_attempts\{job_name="settlement"\} 1`)
	close(end)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_running_attempts\{job_name="settlement"\} 0`, `jobrun_problems\{job_name="settlement",kind="MISSED"\} 2`,
		`jobrun_last_success_timestamp_seconds\{job_name="settlement"\} 1\.[0-9]+e\+09`, `jobrun_last_success_age_seconds\{job_name="settlement"\} [0-9.e-]+`)

	fails = failure
	if _, err := r.RunDate(t.Context(), settle, today.AddDays(-2)); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_problems\{job_name="settlement",kind="FAILED"\} 1`, `jobrun_problems\{job_name="settlement",kind="MISSED"\} 1`,
		`jobrun_attempts_total\{job_name="settlement",status="FAILED"\} 1`, `jobrun_attempts_total\{job_name="settlement",status="SUCCEEDED"\} 1`,
		`jobrun_items_processed_total\{job_name="settlement"\} 3`, `jobrun_items_failed_total\{job_name="settlement"\} 2`,
		`jobrun_attempt_duration_seconds_count\{job_name="settlement",status="FAILED"\} 1`,
		`jobrun_attempt_duration_seconds_bucket\{job_name="settlement",status="SUCCEEDED",le="1"\} 1`)

	// What people do is no attempt's end, and is told at once.
	rec, err := r.Get(t.Context(), settle.Key(today.AddDays(-2)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ApproveRerun(t.Context(), rec, jobrun.Action{By: "kim", Reason: "rates loaded"}); err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_problems\{job_name="settlement",kind="FAILED"\} 0`, `jobrun_attempts_total\{job_name="settlement",status="FAILED"\} 1`)
	fails = nil
	if _, err := r.RetryDue(t.Context(), settle); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Skip(t.Context(), settle.Key(today.AddDays(-1)), jobrun.Action{By: "kim", Reason: "no trading"}); err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_attempts_total\{job_name="settlement",status="SUCCEEDED"\} 2`, `jobrun_attempts_total\{job_name="settlement",status="SKIPPED"\} 1`,
		`jobrun_attempt_duration_seconds_count\{job_name="settlement",status="SUCCEEDED"\} 2`, `jobrun_problems\{job_name="settlement",kind="MISSED"\} 0`,
		`jobrun_running_attempts\{job_name="settlement"\} 0`)
}

// An attempt that a person has ended elsewhere is not counted as running for ever.
func TestMetricsForgetAnAttemptThatLostItsRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	settle := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { close(started); <-end; return nil }}
	r, page := service(t, db, settle)
	go func() { _, err := r.RunDate(t.Context(), settle, r.Today()); ended <- err }()
	<-started
	has(t, page(), `jobrun_running_attempts\{job_name="settlement"\} 1`)
	other, err := jobrun.New(db.Pool, time.UTC, &jobrun.Options{Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	rec, err := other.Get(t.Context(), settle.Key(r.Today()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.MarkFailed(t.Context(), rec, jobrun.Action{By: "kim", Reason: "stuck", Force: true}); err != nil {
		t.Fatal(err)
	}
	close(end)
	if err := <-ended; !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_running_attempts\{job_name="settlement"\} 0`, `jobrun_problems\{job_name="settlement",kind="FAILED"\} 1`)
}

// A run of another process, and of another program, is told all the same.
func TestMetricsTellOfRunsOfOthers(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	_, page := service(t, db)
	if _, err := db.Pool.Exec(t.Context(), `
		INSERT INTO batch_job_run (job_key, status, started_at, worker_id) VALUES
		('payout:2026-09-15', 'RUNNING', now() - interval '1 day', 'node-1'), ('no key', 'RUNNING', now() - interval '1 day', 'node-1')`); err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_problems\{job_name="payout",kind="STALE"\} 1`, `jobrun_problems\{job_name="",kind="STALE"\} 1`)
}

// What nobody could ask is left out: a problem that becomes 0 would be an all-clear.
func TestMetricsWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	failure := errors.New("rates are missing")
	settle := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return failure }}
	r, page := service(t, db, settle)
	if _, err := r.RunDate(t.Context(), settle, r.Today()); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_up 1`, `jobrun_problems\{job_name="settlement",kind="FAILED"\} 1`)
	if _, err := db.Pool.Exec(t.Context(), `ALTER TABLE batch_job_run RENAME TO gone`); err != nil {
		t.Fatal(err)
	}
	p := page()
	has(t, p, `jobrun_up 0`, `jobrun_running_attempts\{job_name="settlement"\} 0`, `jobrun_attempts_total\{job_name="settlement",status="FAILED"\} 1`)
	for _, name := range []string{"jobrun_problems", "jobrun_last", "jobrun_missed"} {
		if regexp.MustCompile(`(?m)^` + name).MatchString(p) {
			t.Errorf("tells %s", name)
		}
	}
	if _, err := db.Pool.Exec(t.Context(), `ALTER TABLE gone RENAME TO batch_job_run`); err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_up 1`, `jobrun_problems\{job_name="settlement",kind="FAILED"\} 1`)
}

// A job whose calendar fails hides nothing but missed dates.
func TestMetricsWithARuleThatFails(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	failure := errors.New("rates are missing")
	settle := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return failure }}
	broken := jobrun.Job{Name: "broken", Func: settle.Func, Calendar: func(jobrun.Date) bool { panic("no holidays loaded") }}
	r, page := service(t, db, settle, broken)
	for _, job := range []jobrun.Job{settle, broken} {
		if _, err := r.RunDate(t.Context(), job, r.Today().AddDays(-3)); !errors.Is(err, failure) {
			t.Fatal(err)
		}
	}
	p := page()
	has(t, p, `jobrun_up 1`, `jobrun_missed_judged 0`, `jobrun_problems\{job_name="settlement",kind="FAILED"\} 1`, `jobrun_problems\{job_name="settlement",kind="MISSED"\} 2`)
	if strings.Contains(p, `job_name="broken",kind="MISSED"`) {
		t.Error("tells the missed dates of a job whose calendar fails")
	}
}

// A claim that was given back was not executed: it has no duration.
func TestMetricsOfAnAttemptThatNeverStarted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	m := jobrunprom.New(nil)
	var r *jobrun.Runner
	ended := errors.New("the caller has gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	r, err := jobrun.New(db.Pool, time.UTC, &jobrun.Options{Logger: silent, OnEvent: func(ctx context.Context, e jobrun.Event) {
		m.OnEvent(ctx, e)
		if e.Record.Status == jobrun.Running {
			runtime.Goexit() // nobody executes what was claimed
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	m.Watch(r)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = r.RunDate(ctx, jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return nil }}, r.Today())
	}()
	<-done
	cancel(ended)
	rec, err := r.Get(t.Context(), "settlement:"+r.Today().String())
	if err != nil || !strings.HasPrefix(rec.Error, "never started: ") {
		t.Fatalf("%+v, %v", rec, err)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(m)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "jobrun_attempt_duration_seconds" {
			t.Errorf("%v", f)
		}
	}
}

// One date that was run too early, by a slip, does not hide the successes that follow.
func TestLastSuccessIsTheLatest(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	settle := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return nil }}
	r, page := service(t, db, settle)
	for _, d := range []int{30, -2, -1} {
		if _, err := r.RunDate(t.Context(), settle, r.Today().AddDays(d)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Pool.Exec(t.Context(), `UPDATE batch_job_run SET finished_at = now() - interval '20 days', started_at = now() - interval '21 days' WHERE job_key = $1`, settle.Key(r.Today().AddDays(30))); err != nil {
		t.Fatal(err)
	}
	has(t, page(), `jobrun_last_success_age_seconds\{job_name="settlement"\} ([0-9]|[0-9]{2})(\.[0-9]+)?(e-[0-9]+)?`)
}
