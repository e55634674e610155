package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/big"
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

// atOnce is a backoff without a pause.
func atOnce(int) time.Duration { return 0 }

var errBroken = errors.New("ledger out of balance")

// failsWith returns a job that always returns err, and counts its executions.
func failsWith(name string, err error, retry jobrun.Retry) (jobrun.Job, *atomic.Int64) {
	n := new(atomic.Int64)
	return jobrun.Job{Name: name, Retry: retry, Func: func(context.Context, *jobrun.Run) error { n.Add(1); return err }}, n
}

// pauseOf is next_attempt_at - finished_at of a FAILED run, both by the database clock; -1 when no attempt follows.
func pauseOf(t testing.TB, pool *pgxpool.Pool, key string) time.Duration {
	t.Helper()
	pause := query[*int64](t, pool, `SELECT (extract(epoch FROM next_attempt_at - finished_at) * 1000000)::bigint FROM batch_job_run
		WHERE job_key = $1 AND status = 'FAILED'`, key)
	if pause == nil {
		return -1
	}
	return time.Duration(min(*pause, math.MaxInt64/1000)) * time.Microsecond
}

// isPause: in whole microseconds, rounded up; the server multiplies an interval of centuries less exactly.
func isPause(got, want time.Duration) bool {
	return got > want-2*time.Microsecond && got-want < 2*time.Microsecond
}

func TestMaxAttemptsCountsExecutions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, limit := range []int{0, 1, 2, 3} {
		var told []int
		job, executions := failsWith(fmt.Sprintf("limit-%d", limit), errBroken, jobrun.Retry{
			MaxAttempts: limit, Backoff: func(n int) time.Duration { told = append(told, n); return 0 },
		})
		want := max(limit, 1)
		for n := 1; n <= want; n++ {
			var res jobrun.Result
			var err error
			if n == 3 { // either call executes what is due
				var all []jobrun.Result
				if all, err = r.RetryDue(t.Context(), job); len(all) == 1 {
					res = all[0]
				}
			} else {
				res, err = r.RunDate(t.Context(), job, date)
			}
			if !errors.Is(err, errBroken) || !res.Ran() || res.Record.Attempt != n || res.Record.NextAttemptAt.IsZero() != (n == want) {
				t.Fatalf("limit %d, execution %d: %+v, %v", limit, n, res, err)
			}
		}
		for range 2 {
			if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed || res.Record.Attempt != want || !res.Record.NextAttemptAt.IsZero() {
				t.Errorf("limit %d, afterwards: %+v, %v", limit, res, err)
			}
			if all, err := r.RetryDue(t.Context(), job); err != nil || len(all) != 0 {
				t.Errorf("limit %d, afterwards: %+v, %v", limit, all, err)
			}
		}
		if pauseOf(t, db.Pool, job.Key(date)) != -1 || int(executions.Load()) != want {
			t.Errorf("limit %d: executed %d times, pause %s", limit, executions.Load(), pauseOf(t, db.Pool, job.Key(date)))
		}
		if before := []int{1, 2, 3}[:want-1]; !slices.Equal(told, before) {
			t.Errorf("limit %d: the backoff was asked for %v, want %v", limit, told, before)
		}
	}
}

func TestNegativeMaxAttemptsIsRefusedBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	pool, tries := deadPool(t, 2)
	r := newRunner(t, pool, jobrun.Options{})
	good, executions := countingJob("good")
	bad, never := countingJob("bad")
	bad.Retry.MaxAttempts = -1
	for name, call := range map[string]func() error{
		"RetryDue": func() error { _, err := r.RetryDue(t.Context(), good, bad); return err },
		"RunDate":  func() error { _, err := r.RunDate(t.Context(), bad, date); return err },
		"Schedule": func() error { _, err := r.Schedule(t.Context(), cron.New(), "@daily", bad); return err },
	} {
		var invalid *jobrun.InvalidError
		if err := call(); !errors.As(err, &invalid) || invalid.Field != "Job.Retry.MaxAttempts" || invalid.Value != -1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if tries.Load() != 0 || executions.Load() != 0 || never.Load() != 0 {
		t.Errorf("%d connections, executed %d and %d times", tries.Load(), executions.Load(), never.Load())
	}
}

// What an error says about the next attempt holds wherever it stands in the tree, and hides nothing of the error.
func TestErrorsSayWhatFollows(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const usual, never = time.Hour, -1
	wrap := func(err error) error { return fmt.Errorf("settlement: %w", err) }
	for _, c := range []struct {
		name string
		err  error
		want time.Duration
	}{
		{"plain", errBroken, usual},
		{"permanent", jobrun.Permanent(errBroken), never},
		{"permanent-wrapped", wrap(wrap(jobrun.Permanent(errBroken))), never},
		{"permanent-joined", errors.Join(errors.New("other"), wrap(jobrun.Permanent(errBroken))), never},
		{"permanent-inside", wrap(jobrun.RetryAfter(jobrun.Permanent(errBroken), time.Minute)), never},
		{"permanent-outside", jobrun.Permanent(jobrun.RetryAfter(errBroken, time.Minute)), never},
		{"permanent-beside", errors.Join(jobrun.RetryAfter(errors.New("other"), time.Minute), jobrun.Permanent(errBroken)), never},
		{"later", jobrun.RetryAfter(errBroken, 7*time.Minute), 7 * time.Minute},
		{"later-wrapped", wrap(wrap(jobrun.RetryAfter(errBroken, 7*time.Minute))), 7 * time.Minute},
		{"later-joined", errors.Join(errors.New("other"), wrap(jobrun.RetryAfter(errBroken, 7*time.Minute))), 7 * time.Minute},
		{"later-twice", jobrun.RetryAfter(wrap(jobrun.RetryAfter(errBroken, time.Minute)), 7*time.Minute), 7 * time.Minute},
		{"later-zero", jobrun.RetryAfter(errBroken, 0), 0},
		{"later-negative", jobrun.RetryAfter(errBroken, math.MinInt64), 0},
		{"later-much", jobrun.RetryAfter(errBroken, math.MaxInt64), math.MaxInt64},
	} {
		for _, panics := range []bool{false, true} {
			name := fmt.Sprintf("%s-%t", c.name, panics)
			job := jobrun.Job{
				Name: name, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return usual }},
				Func: func(context.Context, *jobrun.Run) error {
					if panics {
						panic(c.err)
					}
					return c.err
				},
			}
			res, err := r.RunDate(t.Context(), job, date)
			if !errors.Is(err, errBroken) || !errors.Is(err, c.err) || strings.Contains(c.err.Error(), "permanent") || !strings.Contains(res.Record.Error, c.err.Error()) {
				t.Errorf("%s: %v, stored %q", name, err, res.Record.Error)
			}
			if pause := pauseOf(t, db.Pool, job.Key(date)); c.want == never && pause != never || c.want != never && !isPause(pause, c.want) {
				t.Errorf("%s: the next attempt follows after %s, want %s", name, pause, c.want)
			}
			switch again, err := r.RunDate(t.Context(), job, date); {
			case c.want == never:
				if err != nil || again.Decision != jobrun.AlreadyFailed {
					t.Errorf("%s: %+v, %v", name, again, err)
				}
			case c.want > 0: // a claim before its time loses, and says when that is
				if err != nil || again.Decision != jobrun.RetryLater || again.Record.NextAttemptAt != res.Record.NextAttemptAt || again.Record.NextAttemptAt.IsZero() {
					t.Errorf("%s: %+v, %v", name, again, err)
				}
			case !again.Ran() || !again.Record.NextAttemptAt.IsZero() || again.Record.Attempt != 2: // the last one: RetryAfter gives no more
				t.Errorf("%s: %+v, %v", name, again, err)
			}
		}
	}
	for _, c := range []error{jobrun.Permanent(nil), jobrun.RetryAfter(nil, time.Hour)} {
		if c != nil {
			t.Errorf("of nil became %#v", c)
		}
	}
	if text := fmt.Sprint(jobrun.Permanent(errBroken), jobrun.RetryAfter(errBroken, 1)); text != errBroken.Error()+" "+errBroken.Error() {
		t.Errorf("text %q", text)
	}
}

func TestBackoffDecidesTheNextAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Now: func() time.Time { return time.Now().Add(-8 * time.Hour) }})
	for _, c := range []struct {
		name     string
		backoff  func(int) time.Duration
		from, to time.Duration
	}{
		{"default", nil, 48 * time.Second, 72 * time.Second},
		{"zero", atOnce, 0, 0},
		{"negative", func(int) time.Duration { return -time.Hour }, 0, 0},
		{"most-negative", func(int) time.Duration { return math.MinInt64 }, 0, 0},
		{"nanosecond", func(int) time.Duration { return 1 }, time.Microsecond, time.Microsecond},
		{"minute", func(int) time.Duration { return time.Minute }, time.Minute, time.Minute},
		{"longest", func(int) time.Duration { return math.MaxInt64 }, math.MaxInt64 - time.Millisecond, math.MaxInt64},
		{"panics", func(int) time.Duration { panic("no pause") }, time.Minute, time.Minute},
	} {
		job, _ := failsWith(c.name, errBroken, jobrun.Retry{MaxAttempts: 2, Backoff: c.backoff})
		res, err := r.RunDate(t.Context(), job, date)
		if !errors.Is(err, errBroken) || res.Record.NextAttemptAt.IsZero() {
			t.Errorf("%s: %+v, %v", c.name, res, err)
		}
		if pause := pauseOf(t, db.Pool, job.Key(date)); pause < c.from || pause > c.to {
			t.Errorf("%s: the next attempt follows after %s, want %s to %s", c.name, pause, c.from, c.to)
		}
	}
}

// undithered is min·2^(attempt-1), at most max, reckoned without limits.
func undithered(min, max time.Duration, attempt int) time.Duration {
	if min <= 0 {
		min = 1
	}
	if max < min {
		max = min
	}
	d := big.NewInt(int64(min))
	if d.Lsh(d, uint(attempt-1)); d.Cmp(big.NewInt(int64(max))) > 0 {
		return max
	}
	return time.Duration(d.Int64())
}

// within a fifth, and never over max; exact, as whole nanoseconds.
func dithered(got, d, max time.Duration) bool {
	fifth := new(big.Int).Mul(big.NewInt(5), big.NewInt(int64(got)))
	return got > 0 && got <= max && fifth.Cmp(new(big.Int).Mul(big.NewInt(4), big.NewInt(int64(d)))) >= 0 &&
		fifth.Cmp(new(big.Int).Mul(big.NewInt(6), big.NewInt(int64(d)))) <= 0
}

func TestExponentialDoublesWithinItsBounds(t *testing.T) {
	t.Parallel()
	const longest = time.Duration(math.MaxInt64)
	for n, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		if got := undithered(time.Minute, time.Hour, n+1); got != want*time.Minute {
			t.Fatalf("attempt %d: %s", n+1, got)
		}
	}
	for _, c := range []struct{ min, max time.Duration }{
		{time.Minute, time.Hour},
		{time.Second, 30 * 24 * time.Hour},
		{1, 1},
		{1, 2},
		{2, 4},
		{3, 7},
		{1, longest},
		{longest, longest},
		{longest / 2, longest},
		{longest/2 + 1, longest},
		{longest - 1, longest},
		{time.Minute, longest},
		{time.Minute, time.Minute},
		{time.Hour, time.Minute}, // counts as an hour
		{0, 0},
		{0, time.Hour},
		{-time.Hour, -time.Minute},
		{math.MinInt64, longest},
	} {
		backoff := jobrun.Exponential(c.min, c.max)
		limit := max(c.max, c.min, 1)
		for n := 1; n <= 1000; n++ {
			d := undithered(c.min, c.max, n)
			for range 5 {
				if got := backoff(n); !dithered(got, d, limit) {
					t.Fatalf("Exponential(%d, %d)(%d) = %d, want %d more or less", c.min, c.max, n, got, d)
				}
			}
		}
		for _, n := range []int{math.MinInt, -1, 0} {
			if got := backoff(n); !dithered(got, max(c.min, 1), limit) {
				t.Errorf("Exponential(%d, %d)(%d) = %d", c.min, c.max, n, got)
			}
		}
		if got := backoff(math.MaxInt); !dithered(got, limit, limit) && limit < longest {
			t.Errorf("Exponential(%d, %d)(MaxInt) = %d", c.min, c.max, got)
		}
	}
}

func TestExponentialSpreadsWhatFailedTogether(t *testing.T) {
	t.Parallel()
	backoff := jobrun.Exponential(time.Minute, time.Hour)
	for n := 1; n <= 8; n++ {
		distinct := map[time.Duration]bool{}
		lowest, highest := time.Duration(math.MaxInt64), time.Duration(0)
		for range 200 {
			d := backoff(n)
			distinct[d] = true
			lowest, highest = min(lowest, d), max(highest, d)
		}
		d := undithered(time.Minute, time.Hour, n)
		if len(distinct) <= 100 || lowest > d*9/10 || d < time.Hour && highest < d*11/10 {
			t.Errorf("attempt %d: %d distinct pauses of 200, %s to %s around %s", n, len(distinct), lowest, highest, d)
		}
	}
}

func FuzzExponential(f *testing.F) {
	f.Add(int64(time.Minute), int64(time.Hour), 3)
	f.Add(int64(2), int64(3), 1)
	f.Add(int64(1), int64(math.MaxInt64), 1000)
	f.Add(int64(math.MinInt64), int64(math.MaxInt64), math.MinInt)
	f.Fuzz(func(t *testing.T, lowest, highest int64, attempt int) {
		shortest, longest := time.Duration(lowest), time.Duration(highest)
		limit := max(longest, shortest, 1)
		d := undithered(shortest, longest, min(max(attempt, 1), 100))
		if got := jobrun.Exponential(shortest, longest)(attempt); !dithered(got, d, limit) {
			t.Errorf("Exponential(%d, %d)(%d) = %d, want %d more or less", lowest, highest, attempt, got, d)
		}
	})
}

// A crash is an execution: what follows it goes on counting, in numbers and against MaxAttempts.
func TestCrashDoesNotResetTheCount(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	c := startLeaseChild(t, db.URL, time.Second)
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
	silence(t, db.Pool)
	job, executions := failsWith("nightly", errBroken, jobrun.Retry{MaxAttempts: 3, Backoff: atOnce})
	refused := func(when string) {
		t.Helper()
		if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed || !res.Record.NextAttemptAt.IsZero() {
			t.Errorf("%s: %+v, %v", when, res, err)
		}
		if all, err := r.RetryDue(t.Context(), job); err != nil || len(all) != 0 {
			t.Errorf("%s: %+v, %v", when, all, err)
		}
	}
	if _, err := r.MarkFailed(t.Context(), recordOf(t, r, job.Key(date)), operator); err != nil {
		t.Fatal(err)
	}
	refused("marked failed, two attempts left")
	exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now()`) // somebody's plain SQL allows a retry
	res, err := r.RunDate(t.Context(), job, date)
	if !errors.Is(err, errBroken) || res.Record.Attempt != 2 || res.Record.Trigger != jobrun.TriggerRetry || res.Record.NextAttemptAt.IsZero() {
		t.Errorf("second execution: %+v, %v", res, err)
	}
	all, err := r.RetryDue(t.Context(), job)
	if !errors.Is(err, errBroken) || len(all) != 1 || all[0].Record.Attempt != 3 || !all[0].Record.NextAttemptAt.IsZero() {
		t.Errorf("third execution: %+v, %v", all, err)
	}
	refused("three executions, one of them crashed")
	if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, job.Key(date)), operator); err != nil {
		t.Fatal(err)
	}
	if all, err = r.RetryDue(t.Context(), job); !errors.Is(err, errBroken) || len(all) != 1 || all[0].Record.Attempt != 4 || all[0].Record.Trigger != jobrun.TriggerRerun {
		t.Errorf("re-run: %+v, %v", all, err)
	}
	refused("a re-run")
	if executions.Load() != 3 || !query[bool](t, db.Pool, `SELECT executions = 4 AND attempt = 4 AND business_date = '2026-09-15' FROM batch_job_run`) ||
		!query[bool](t, db.Pool, `SELECT array_agg(attempt ORDER BY attempt) = '{1,2,3,4}' AND count(DISTINCT token) = 4 FROM batch_job_attempt`) {
		t.Errorf("executed %d times here; %s", executions.Load(), query[string](t, db.Pool, `SELECT to_jsonb(r)::text FROM batch_job_run AS r`))
	}
}

// One approval is one execution, also when attempts are left and the error asks for another one.
func TestFailedRerunIsNotRetried(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for name, c := range map[string]func(context.CancelFunc) error{
		"error":       func(context.CancelFunc) error { return errBroken },
		"asks":        func(context.CancelFunc) error { return jobrun.RetryAfter(errBroken, 0) },
		"panics":      func(context.CancelFunc) error { panic(errBroken) },
		"interrupted": func(cancel context.CancelFunc) error { cancel(); return errBroken },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		job, executions := countingJob(name)
		if _, err := r.RunDate(ctx, job, date); err != nil {
			t.Fatal(err)
		}
		job.Retry = jobrun.Retry{MaxAttempts: 9, Backoff: atOnce}
		job.Func = func(context.Context, *jobrun.Run) error { executions.Add(1); return c(cancel) }
		forced := operator
		forced.Force = true
		if _, err := r.ApproveRerun(ctx, recordOf(t, r, job.Key(date)), forced); err != nil {
			t.Fatal(err)
		}
		if res, err := r.RunDate(ctx, job, date); !errors.Is(err, errBroken) || res.Record.Trigger != jobrun.TriggerRerun || !res.Record.NextAttemptAt.IsZero() {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
		if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed || executions.Load() != 2 {
			t.Errorf("%s: %+v, %v; executed %d times", name, res, err, executions.Load())
		}
		cancel()
	}
}

// neverStarted makes a claim of the job succeed although nothing is executed.
func neverStarted(t testing.TB, p *pgtest.Proxy, r *jobrun.Runner, job jobrun.Job, statement string) jobrun.Record {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	p.Hold(statement)
	job.Func = func(context.Context, *jobrun.Run) error { panic("executed") }
	var res jobrun.Result
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, _ = r.RunDate(ctx, job, date)
	}()
	eventually(t, "the claim is on its way", func() bool { return p.Held() == 1 })
	cancel()
	p.Release()
	within(t, "the call returns", done)
	if res.Ran() || res.Record.Status != jobrun.Failed || !strings.HasPrefix(res.Record.Error, "never started") {
		t.Fatalf("%+v", res)
	}
	return res.Record
}

func TestNeverStartedAttemptIsNotCounted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	var told []int
	job, executions := failsWith("nightly", errBroken, jobrun.Retry{MaxAttempts: 2, Backoff: func(n int) time.Duration { told = append(told, n); return 0 }})
	neverStarted(t, p, r, job, claimStatement)
	neverStarted(t, p, r, job, reclaimStatement)
	for attempt := 3; attempt <= 4; attempt++ {
		if res, err := r.RunDate(t.Context(), job, date); !errors.Is(err, errBroken) || res.Record.Attempt != attempt || res.Record.NextAttemptAt.IsZero() != (attempt == 4) {
			t.Errorf("attempt %d: %+v, %v", attempt, res, err)
		}
	}
	res, err := r.RunDate(t.Context(), job, date)
	if err != nil || res.Decision != jobrun.AlreadyFailed || executions.Load() != 2 || !slices.Equal(told, []int{1}) {
		t.Errorf("%+v, %v; executed %d times, the backoff was asked for %v", res, err, executions.Load(), told)
	}
	// An approval that nobody executed is still there, for one execution.
	if _, err := r.ApproveRerun(t.Context(), res.Record, operator); err != nil {
		t.Fatal(err)
	}
	rec := neverStarted(t, p, r, job, reclaimStatement)
	if rec.ApprovedAt.IsZero() {
		t.Errorf("the approval is gone: %+v", rec)
	}
	if _, err := r.ApproveRerun(t.Context(), rec, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Errorf("a second approval: %v", err)
	}
	if res, err = r.RunDate(t.Context(), job, date); !errors.Is(err, errBroken) || res.Record.Attempt != 6 || res.Record.Trigger != jobrun.TriggerRerun || !res.Record.NextAttemptAt.IsZero() {
		t.Errorf("re-run: %+v, %v", res, err)
	}
	if res, err = r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed || executions.Load() != 3 {
		t.Errorf("afterwards: %+v, %v; executed %d times", res, err, executions.Load())
	}
}

// due makes runs of the job FAILED and due, by an attempt that fails.
func due(t testing.TB, r *jobrun.Runner, job jobrun.Job, dates ...jobrun.Date) {
	t.Helper()
	job.Retry = jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}
	job.Func = func(context.Context, *jobrun.Run) error { return errBroken }
	for _, d := range dates {
		if res, err := r.RunDate(t.Context(), job, d); !errors.Is(err, errBroken) || res.Record.NextAttemptAt.IsZero() {
			t.Fatalf("%+v, %v", res, err)
		}
	}
}

// days are n dates from the usual one on, latest first.
func days(n int) (dates []jobrun.Date) {
	for i := range n {
		dates = append(dates, date.AddDays(n-1-i))
	}
	return dates
}

// keysOf lists what results are about.
func keysOf(results []jobrun.Result) string {
	var keys []string
	for _, res := range results {
		keys = append(keys, res.Record.Key)
	}
	return strings.Join(keys, " ")
}

func TestRetryDueKnowsTheScheduledJobs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var invalid *jobrun.InvalidError
	if results, err := r.RetryDue(t.Context()); !errors.As(err, &invalid) || results != nil {
		t.Fatalf("without any job: %+v, %v", results, err)
	}
	c := cron.New(cron.WithLocation(seoul)) // never started
	a, ranA := countingJob("a")
	b, ranB := countingJob("b")
	other, ranOther := countingJob("other")
	old, ranOld := countingJob("b")
	prefix, ranPrefix := countingJob("a-longer")
	for _, job := range []jobrun.Job{old, a, b} { // of two with one name the later one counts
		if _, err := r.Schedule(t.Context(), c, "5 0 * * *", job); err != nil {
			t.Fatal(err)
		}
	}
	for _, job := range []jobrun.Job{a, b, other, prefix} {
		due(t, r, job, date)
	}
	if results, err := r.RetryDue(t.Context(), b); err != nil || keysOf(results) != "b:2026-09-15" || ranOld.Load() != 0 || ranB.Load() != 1 {
		t.Errorf("given one job: %s, %v", keysOf(results), err)
	}
	due(t, r, b, date.AddDays(1))
	if results, err := r.RetryDue(t.Context()); err != nil || keysOf(results) != "a:2026-09-15 b:2026-09-16" && keysOf(results) != "b:2026-09-16 a:2026-09-15" {
		t.Errorf("given none: %s, %v", keysOf(results), err)
	}
	if ranA.Load() != 1 || ranB.Load() != 2 || ranOld.Load() != 0 || ranOther.Load() != 0 || ranPrefix.Load() != 0 {
		t.Errorf("executed %d %d %d %d %d times", ranA.Load(), ranB.Load(), ranOld.Load(), ranOther.Load(), ranPrefix.Load())
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE status = 'FAILED' AND next_attempt_at <= now() AND attempt = 1`); n != 2 {
		t.Errorf("%d runs of other jobs are due, want 2", n)
	}
}

func TestRetryDueTakesTheOldestDateFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var mu sync.Mutex
	order := map[string][]string{}
	running := map[string]int{}
	jobs := make([]jobrun.Job, 3)
	for i, name := range []string{"second", "first", "third"} {
		jobs[i] = jobrun.Job{Name: name, Func: func(_ context.Context, run *jobrun.Run) error {
			mu.Lock()
			defer mu.Unlock()
			if running[name]++; running[name] > 1 {
				t.Errorf("two runs of %s at once", name)
			}
			order[name] = append(order[name], run.Date().String())
			mu.Unlock()
			_, err := r.Get(t.Context(), run.Key()) // takes a while
			mu.Lock()
			running[name]--
			return err
		}}
		due(t, r, jobs[i], days(4)...)
	}
	results, err := r.RetryDue(t.Context(), jobs...)
	if err != nil || len(results) != 12 {
		t.Fatalf("%+v, %v", results, err)
	}
	for i, res := range results {
		if want := jobs[i/4].Key(date.AddDays(i % 4)); res.Record.Key != want || res.Record.Status != jobrun.Succeeded || res.Record.Trigger != jobrun.TriggerRetry || res.Record.Attempt != 2 {
			t.Errorf("result %d: %+v, want %s", i, res, want)
		}
	}
	for name, got := range order {
		if !slices.Equal(got, []string{"2026-09-15", "2026-09-16", "2026-09-17", "2026-09-18"}) {
			t.Errorf("%s ran %v", name, got)
		}
	}
}

// TestRetryDueRunsJobsSideBySide: each of them waits until the other one runs.
func TestRetryDueRunsJobsSideBySide(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	here, there := make(chan struct{}), make(chan struct{})
	meet := func(name string, mine, other chan struct{}) jobrun.Job {
		return jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error {
			close(mine)
			select {
			case <-other:
				return nil
			case <-time.After(patience):
				return errors.New("the other job does not run")
			}
		}}
	}
	a, b := meet("a", here, there), meet("b", there, here)
	due(t, r, a, date)
	due(t, r, b, date)
	if results, err := r.RetryDue(t.Context(), a, b); err != nil || len(results) != 2 {
		t.Errorf("%+v, %v", results, err)
	}
}

func TestOverlappingRetryDueExecutesEachRunOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var executions sync.Map
	var jobs []jobrun.Job
	first := newRunner(t, db.Pool, jobrun.Options{})
	for _, name := range []string{"a", "b"} {
		job := jobrun.Job{Name: name, Func: func(_ context.Context, run *jobrun.Run) error {
			if _, twice := executions.LoadOrStore(run.Key(), true); twice {
				t.Errorf("%s twice", run.Key())
			}
			return nil
		}}
		due(t, first, job, days(15)...)
		jobs = append(jobs, job)
	}
	var ran atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 {
		r := first
		if i%2 == 1 {
			r = newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
		}
		wg.Go(func() {
			results, err := r.RetryDue(context.Background(), jobs...)
			if err != nil {
				t.Error(err)
			}
			for _, res := range results {
				switch res.Decision {
				case jobrun.Ran:
					ran.Add(1)
				case jobrun.AlreadyRunning, jobrun.AlreadySucceeded:
				default:
					t.Errorf("%+v", res)
				}
			}
		})
	}
	wg.Wait()
	if ran.Load() != 30 || query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE attempt = 2 AND outcome = 'SUCCEEDED'`) != 30 {
		t.Errorf("%d runs executed, want 30", ran.Load())
	}
}

// TestRetryDueLooksAgainBeforeItRuns: somebody changes a run by plain SQL after it was found due.
func TestRetryDueLooksAgainBeforeItRuns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const set = `UPDATE batch_job_run SET `
	for _, c := range []struct {
		name, sql string
		want      jobrun.Decision
	}{
		{"deleted", `DELETE FROM batch_job_run`, ""},
		{"succeeded", set + `status = 'SUCCEEDED'`, jobrun.AlreadySucceeded},
		{"skipped", set + `status = 'SKIPPED'`, jobrun.AlreadySkipped},
		{"running", set + `status = 'RUNNING', started_at = now(), worker_id = 'node-1'`, jobrun.AlreadyRunning},
		{"unknown", set + `status = 'PAUSED'`, jobrun.UnknownStatus},
		{"final", set + `next_attempt_at = NULL`, jobrun.AlreadyFailed},
		{"later", set + `next_attempt_at = now() + interval '1 hour'`, jobrun.RetryLater},
		{"pruned", set + `pruned_at = now()`, jobrun.AlreadyFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			second := c.name + ":2026-09-16"
			job, executions := countingJob(c.name)
			due(t, r, job, days(3)...)
			stored := ""
			job.Func = func(_ context.Context, run *jobrun.Run) error {
				if executions.Add(1); run.Date() == date {
					exec(t, db.Pool, c.sql+` WHERE job_key = $1`, second)
					stored = everything(t, db.Pool, second)
				}
				return nil
			}
			results, err := r.RetryDue(t.Context(), job)
			if (c.want == "") != errors.Is(err, jobrun.ErrNotFound) || c.want != "" && err != nil {
				t.Error(err)
			}
			if len(results) != 3 || !results[0].Ran() || results[1].Decision != c.want || results[1].Record.Key != second || !results[2].Ran() || executions.Load() != 2 {
				t.Errorf("%+v, executed %d times", results, executions.Load())
			}
			if now := everything(t, db.Pool, second); now != stored {
				t.Errorf("it was\n%s\nand is\n%s", stored, now)
			}
		})
	}
}

// TestClaimComparesBeforeItChanges: somebody changes a run after a claim has read that it is due or approved, while the
// statement that takes it over is on its way.
func TestClaimComparesBeforeItChanges(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const set = `UPDATE batch_job_run SET `
	for _, approved := range []bool{false, true} {
		for _, c := range []struct {
			name, sql string
			want      jobrun.Decision
		}{
			{"deleted", `DELETE FROM batch_job_run`, jobrun.Ran}, // a new run of the key; by RetryDue: none
			{"succeeded", set + `status = 'SUCCEEDED'`, jobrun.AlreadySucceeded},
			{"skipped", set + `status = 'SKIPPED'`, jobrun.AlreadySkipped},
			{"running", set + `status = 'RUNNING'`, jobrun.AlreadyRunning},
			{"unknown", set + `status = 'PAUSED'`, jobrun.UnknownStatus},
			{"final", set + `next_attempt_at = NULL, approved_at = NULL, approved_attempt = NULL, approved_status = NULL`, jobrun.AlreadyFailed},
			{"pruned", set + `pruned_at = now()`, jobrun.AlreadyFailed},
			{"attempt", set + `attempt = 5, status = 'RUNNING'`, jobrun.AlreadyRunning},
		} {
			for _, byRetryDue := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s-%t-%t", c.name, approved, byRetryDue), func(t *testing.T) {
					t.Parallel()
					p, r := proxied(t, db, jobrun.Options{})
					job, executions := countingJob(strings.ReplaceAll(t.Name(), "/", "."))
					key := job.Key(date)
					due(t, r, job, date)
					if approved {
						exec(t, db.Pool, approve, key)
						exec(t, db.Pool, set+`next_attempt_at = NULL WHERE job_key = $1`, key)
					}
					p.Hold(reclaimStatement)
					var res jobrun.Result
					var err error
					done := make(chan struct{})
					go func() {
						defer close(done)
						if byRetryDue {
							var all []jobrun.Result
							if all, err = r.RetryDue(t.Context(), job); len(all) == 1 {
								res = all[0]
							}
							return
						}
						res, err = r.RunDate(t.Context(), job, date)
					}()
					eventually(t, "the claim is on its way", func() bool { return p.Held() == 1 })
					exec(t, db.Pool, c.sql+` WHERE job_key = $1`, key)
					stored := everything(t, db.Pool, key)
					p.Release()
					within(t, "the call returns", done)
					if c.name == "deleted" {
						if byRetryDue && (!errors.Is(err, jobrun.ErrNotFound) || res.Ran() || executions.Load() != 0 || rowsOf(t, db.Pool, key)[0] != 0) {
							t.Errorf("%+v, %v", res, err)
						}
						if !byRetryDue && (err != nil || res.Record.Trigger != jobrun.TriggerManual || res.Record.Attempt != 2 || executions.Load() != 1) {
							t.Errorf("%+v, %v", res, err)
						}
						return
					}
					if err != nil || res.Decision != c.want || executions.Load() != 0 {
						t.Errorf("%+v, %v; executed %d times; want %s", res, err, executions.Load(), c.want)
					}
					if now := everything(t, db.Pool, key); now != stored {
						t.Errorf("it was\n%s\nand is\n%s", stored, now)
					}
				})
			}
		}
	}
}

func TestRetryDueKeepsSlots(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{Name: "sync", Every: 15 * time.Minute, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
	fails := true
	var ran []string
	job.Func = func(_ context.Context, run *jobrun.Run) error {
		if fails {
			return errBroken
		}
		ran = append(ran, fmt.Sprint(run.Key(), " ", run.Date(), " ", run.ScheduledFor().Format(time.RFC3339), " ", run.Attempt(), " ", run.Trigger()))
		return nil
	}
	for _, fired := range []string{"2026-09-15T23:47:11+09:00", "2026-09-15T09:00:00+09:00", "2026-09-16T00:14:59+09:00"} {
		at, err := time.Parse(time.RFC3339, fired)
		if err != nil {
			t.Fatal(err)
		}
		if res, err := r.RunTrigger(t.Context(), job, at); !errors.Is(err, errBroken) {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	fails = false
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, next_attempt_at) VALUES ('sync:2026-09-14T08:30+09:00', 'FAILED', 'node-1', now())`)
	results, err := r.RetryDue(t.Context(), job)
	if err != nil || len(results) != 4 {
		t.Fatalf("%+v, %v", results, err)
	}
	want := []string{
		"sync:2026-09-14T08:30+09:00 2026-09-14 2026-09-14T08:30:00+09:00 2 RETRY", // a neighbour's
		"sync:2026-09-15T09:00+09:00 2026-09-15 2026-09-15T09:00:00+09:00 2 RETRY",
		"sync:2026-09-15T23:45+09:00 2026-09-15 2026-09-15T23:45:00+09:00 2 RETRY",
		"sync:2026-09-16T00:00+09:00 2026-09-16 2026-09-16T00:00:00+09:00 2 RETRY",
	}
	if !slices.Equal(ran, want) {
		t.Errorf("ran %q\nwant %q", ran, want)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 4 {
		t.Errorf("%d rows", n)
	}
}

func TestRetryDueStopsBetweenRuns(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"context", "shutdown"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			r := newRunner(t, db.Pool, jobrun.Options{})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			job, executions := countingJob("daily")
			due(t, r, job, days(3)...)
			stopped := make(chan error, 1)
			job.Func = func(context.Context, *jobrun.Run) error {
				executions.Add(1)
				if how == "context" {
					cancel()
					return nil
				}
				go func() { stopped <- r.Shutdown(context.Background()) }()
				eventually(t, "no new claims", func() bool {
					_, err := r.RunDate(context.Background(), job, date)
					return errors.Is(err, jobrun.ErrShutdown)
				})
				return nil
			}
			results, err := r.RetryDue(ctx, job)
			if err != nil || keysOf(results) != "daily:2026-09-15" || results[0].Record.Status != jobrun.Succeeded || executions.Load() != 1 {
				t.Errorf("%+v, %v; executed %d times", results, err, executions.Load())
			}
			if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE status = 'FAILED' AND attempt = 1 AND next_attempt_at <= now()`); n != 2 {
				t.Errorf("%d runs are still due, want 2", n)
			}
			if how == "shutdown" {
				if err := <-stopped; err != nil {
					t.Error(err)
				}
				return
			}
			if results, err := r.RetryDue(ctx, job); !errors.Is(err, context.Canceled) || len(results) != 0 {
				t.Errorf("with an ended context: %+v, %v", results, err)
			}
		})
	}
}

func TestRetryDueReturnsAllErrors(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	logger, text := logged()
	r := newRunner(t, db.Pool, jobrun.Options{Logger: logger})
	theirs := []error{errors.New("no rates"), errors.New("disk full")}
	fine, executions := countingJob("fine")
	jobs := []jobrun.Job{
		{Name: "rates", Func: func(context.Context, *jobrun.Run) error { return theirs[0] }},
		fine,
		{Name: "files", Func: func(context.Context, *jobrun.Run) error { panic(theirs[1]) }},
	}
	for _, job := range jobs {
		due(t, r, job, days(2)...)
	}
	before := len(text.lines("level=ERROR"))
	results, err := r.RetryDue(t.Context(), jobs...)
	if keysOf(results) != "rates:2026-09-15 rates:2026-09-16 fine:2026-09-15 fine:2026-09-16 files:2026-09-15 files:2026-09-16" {
		t.Errorf("results %s", keysOf(results))
	}
	for i, want := range theirs {
		if !errors.Is(err, want) || results[4*i].Record.Status != jobrun.Failed {
			t.Errorf("%s is missing in %v", want, err)
		}
	}
	for _, part := range []string{"rates:2026-09-15 attempt 2", "rates:2026-09-16 attempt 2", "files:2026-09-15 attempt 2", "files:2026-09-16 attempt 2"} {
		if strings.Count(err.Error(), part) != 1 {
			t.Errorf("%q is not once in %v", part, err)
		}
	}
	if failed := text.lines("level=ERROR", "run finished"); len(failed)-before != 4 || executions.Load() != 2 {
		t.Errorf("executed %d times, logged %q", executions.Load(), failed)
	}
}

// An approval is enough, whatever state the person saw, and whoever made the run.
func TestRetryDueExecutesApprovedRuns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	first := errors.New("nobody said what to do")
	job := jobrun.Job{Name: "daily", Func: func(_ context.Context, run *jobrun.Run) error {
		if run.Trigger() == jobrun.TriggerRerun {
			return nil
		}
		return first
	}}
	forced := operator
	forced.Force = true
	for i, outcome := range []error{nil, jobrun.SkipRun("a holiday"), errBroken} {
		first = outcome
		_, _ = r.RunDate(t.Context(), job, date.AddDays(i))
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('daily:2026-09-18', 'FAILED', 'node-1')`)
	if _, err := r.Skip(t.Context(), "daily:2026-09-19", operator); err != nil {
		t.Fatal(err)
	}
	if results, err := r.RetryDue(t.Context(), job); err != nil || len(results) != 0 {
		t.Errorf("nothing is approved: %+v, %v", results, err)
	}
	for i, status := range []jobrun.Status{jobrun.Succeeded, jobrun.Skipped, jobrun.Failed, jobrun.Failed, jobrun.Skipped} {
		rec := recordOf(t, r, job.Key(date.AddDays(i)))
		if rec.Status != status {
			t.Fatalf("%+v, want %s", rec, status)
		}
		if _, err := r.ApproveRerun(t.Context(), rec, forced); err != nil {
			t.Fatal(err)
		}
	}
	results, err := r.RetryDue(t.Context(), job)
	if err != nil || len(results) != 5 {
		t.Fatalf("%+v, %v", results, err)
	}
	for i, res := range results {
		want := 2
		if i == 4 { // nothing was executed before
			want = 1
		}
		if res.Record.Key != job.Key(date.AddDays(i)) || res.Record.Status != jobrun.Succeeded || res.Record.Trigger != jobrun.TriggerRerun || res.Record.Attempt != want {
			t.Errorf("result %d: %+v", i, res)
		}
	}
	if results, err := r.RetryDue(t.Context(), job); err != nil || len(results) != 0 {
		t.Errorf("afterwards: %+v, %v", results, err)
	}
}

// allowances is how many runs the race tests allow once more: the first half is due, the second approved.
const allowances = 400

// contested is the job of a round. From the second attempt on it notes its executions in a table. Every other one
// fails again, and may not be executed a third time for all that: the retries have no attempt left, and the approval
// was for one execution.
func contested(pool *pgxpool.Pool, n int) jobrun.Job {
	job := jobrun.Job{Name: fmt.Sprintf("contested-%d", n), Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
	if n >= allowances/2 {
		job.Retry.MaxAttempts = 9
	}
	job.Func = func(ctx context.Context, run *jobrun.Run) error {
		if run.Attempt() == 1 {
			if n >= allowances/2 {
				return jobrun.Permanent(errBroken)
			}
			return errBroken
		}
		if _, err := pool.Exec(ctx, `INSERT INTO execution VALUES ($1, $2)`, run.Key(), os.Getpid()); err != nil {
			return err
		}
		if n%2 == 0 {
			return errBroken
		}
		return nil
	}
	return job
}

// allow makes all contested runs due or approved.
func allow(t *testing.T, pool *pgxpool.Pool, r *jobrun.Runner) {
	t.Helper()
	exec(t, pool, `CREATE TABLE execution (key text, pid int)`)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for n := g; n < allowances; n += 8 {
				res, err := r.RunDate(context.Background(), contested(pool, n), date)
				if !errors.Is(err, errBroken) || res.Record.NextAttemptAt.IsZero() != (n >= allowances/2) {
					t.Errorf("%+v, %v", res, err)
				}
				if n >= allowances/2 {
					if _, err := r.ApproveRerun(context.Background(), res.Record, operator); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
}

// seize tries to execute a contested run, by one of the two ways, and says how often it did.
func seize(ctx context.Context, r *jobrun.Runner, job jobrun.Job, byRetryDue bool) (ran int, err error) {
	var results []jobrun.Result
	if byRetryDue {
		results, err = r.RetryDue(ctx, job)
	} else {
		results = make([]jobrun.Result, 1)
		results[0], err = r.RunDate(ctx, job, date)
	}
	for _, res := range results {
		switch res.Decision {
		case jobrun.Ran:
			ran++
		case jobrun.AlreadyRunning, jobrun.AlreadySucceeded, jobrun.AlreadyFailed:
		default:
			return ran, fmt.Errorf("%+v: %w", res, err)
		}
	}
	if errors.Is(err, errBroken) {
		err = nil
	}
	return ran, err
}

// executedOnce checks the table that the job wrote, and the history.
func executedOnce(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for sql, want := range map[string]int{
		`SELECT count(*)::int FROM execution`:            allowances,
		`SELECT count(DISTINCT key)::int FROM execution`: allowances,
		`SELECT count(*)::int FROM batch_job_run WHERE attempt = 2 AND executions = 2 AND status IN ('SUCCEEDED', 'FAILED') AND next_attempt_at IS NULL AND approved_at IS NULL`: allowances,
		`SELECT count(*)::int FROM batch_job_attempt`:                                                                 2 * allowances,
		`SELECT count(*)::int FROM batch_job_attempt WHERE attempt = 2 AND trigger = 'RETRY' AND ended_by = 'WORKER'`: allowances / 2,
		`SELECT count(*)::int FROM batch_job_attempt WHERE attempt = 2 AND trigger = 'RERUN' AND ended_by = 'WORKER'`: allowances / 2,
		`SELECT count(*)::int FROM batch_job_action`:                                                                  allowances / 2,
	} {
		if got := query[int](t, pool, sql); got != want {
			t.Errorf("%d, want %d: %s", got, want, sql)
		}
	}
}

func TestGoroutinesOneExecutionPerAllowance(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var runners []*jobrun.Runner
	for range 3 {
		runners = append(runners, newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{}))
	}
	allow(t, db.Pool, runners[0])
	for n := range allowances {
		job := contested(db.Pool, n)
		var ran atomic.Int64
		start := make(chan struct{})
		var wg sync.WaitGroup
		for g := range 10 {
			wg.Go(func() {
				<-start
				did, err := seize(context.Background(), runners[g%3], job, g%2 == 1)
				if err != nil {
					t.Errorf("%s: %v", job.Name, err)
				}
				ran.Add(int64(did))
			})
		}
		close(start)
		wg.Wait()
		if ran.Load() != 1 {
			t.Fatalf("%s: %d calls say that they executed it", job.Name, ran.Load())
		}
	}
	executedOnce(t, db.Pool)
}

// The child seizes one run after the other, and waits before each for a byte: the barrier.
var _ = pgtest.RegisterChild("seize-all", func() int {
	if err := seizeAll(context.Background(), os.Getenv("CHILD_DATABASE_URL"), os.Getenv("CHILD_NUMBER") == "1"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
})

func seizeAll(ctx context.Context, url string, odd bool) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	for n := range allowances {
		if _, err := os.Stdout.Write([]byte{'?'}); err != nil {
			return err
		}
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return err
		}
		if _, err := seize(ctx, r, contested(pool, n), odd == (n%4 < 2)); err != nil {
			return err
		}
	}
	return nil
}

func TestProcessesOneExecutionPerAllowance(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	allow(t, db.Pool, newRunner(t, db.Pool, jobrun.Options{}))
	raceInRounds(t, "seize-all", allowances, func(process int) []string {
		return []string{"CHILD_DATABASE_URL=" + db.URL, fmt.Sprintf("CHILD_NUMBER=%d", process%2)}
	})
	executedOnce(t, db.Pool)
	if n := query[int](t, db.Pool, `SELECT count(DISTINCT pid)::int FROM execution`); n < 2 {
		t.Errorf("only %d process ever won", n)
	}
}
