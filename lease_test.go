package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// patience bounds every wait of these tests; each waits for the thing itself.
const patience = 20 * time.Second

// eventually polls until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// within waits for a channel.
func within[T any](t testing.TB, what string, c <-chan T) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("never: %s", what)
	}
}

// flight is a call of RunDate whose function ignores its context and returns what
// the test tells it to.
type flight struct {
	ctx  context.Context // of the function
	run  *jobrun.Run
	tell chan error
	done chan struct{}
	res  jobrun.Result
	err  error
}

// launch returns when the function runs.
func launch(t testing.TB, ctx context.Context, r *jobrun.Runner, job jobrun.Job) *flight {
	t.Helper()
	f := &flight{tell: make(chan error, 1), done: make(chan struct{})}
	started := make(chan struct{})
	job.Func = func(ctx context.Context, run *jobrun.Run) error {
		f.ctx, f.run = ctx, run
		close(started)
		return <-f.tell
	}
	go func() {
		defer close(f.done)
		f.res, f.err = r.RunDate(ctx, job, date)
	}()
	t.Cleanup(func() {
		select {
		case f.tell <- nil:
		default:
		}
		<-f.done
	})
	select {
	case <-started:
	case <-f.done:
		t.Fatalf("%s did not start: %+v, %v", job.Name, f.res, f.err)
	case <-time.After(patience):
		t.Fatalf("%s did not start", job.Name)
	}
	return f
}

// end makes the function return err, and the call with it.
func (f *flight) end(t testing.TB, err error) (jobrun.Result, error) {
	t.Helper()
	f.tell <- err
	within(t, "the call returns", f.done)
	return f.res, f.err
}

// succeeds ends the flight well and expects the attempt of this number SUCCEEDED.
func (f *flight) succeeds(t testing.TB, attempt int) {
	t.Helper()
	if res, err := f.end(t, nil); err != nil || !res.Ran() || res.Record.Status != jobrun.Succeeded || res.Record.Attempt != attempt {
		t.Errorf("got %+v, %v; want attempt %d SUCCEEDED", res, err, attempt)
	}
}

// logged is a Logger for Options and what it has written.
func logged() (*slog.Logger, *logText) {
	text := &logText{}
	return slog.New(slog.NewTextHandler(text, nil)), text
}

type logText struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// lines returns those that contain all parts.
func (l *logText) lines(parts ...string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
			found = append(found, line)
		}
	}
	return found
}

// beaten waits for n further heartbeats of the latest attempt of a key.
func beaten(t testing.TB, pool *pgxpool.Pool, key string, n int) {
	t.Helper()
	const last = `SELECT heartbeat_at FROM batch_job_attempt WHERE job_key = $1 ORDER BY attempt DESC LIMIT 1`
	for at := query[time.Time](t, pool, last, key); n > 0; n-- {
		seen := at
		eventually(t, "a heartbeat of "+key, func() bool { at = query[time.Time](t, pool, last, key); return at.After(seen) })
	}
}

func TestPanicAndGoexitEndFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	theirs := errors.New("ledger out of balance")
	var deep func(n int)
	deep = func(n int) {
		if n == 0 {
			panic("deep")
		}
		deep(n - 1)
	}
	for _, c := range []struct {
		name, text string
		fn         func()
	}{
		{"string", "panic: x", func() { panic("x") }},
		{"nil", "panic called with nil argument", func() { panic(nil) }},
		{"error", "panic: ledger out of balance", func() { panic(theirs) }},
		{"nil-map", "assignment to entry in nil map", func() { var m map[string]int; m["a"]++ }}, //nolint:staticcheck // on purpose
		{"nil-pointer", "nil pointer dereference", func() { var j *jobrun.Job; _ = j.Name }},
		{"deep", "panic: deep", func() { deep(500) }},
		{"long", "panic: long", func() { panic("long" + strings.Repeat("한", 1<<18)) }},
		{"goexit", "runtime.Goexit", runtime.Goexit},
		{"fail-now", "runtime.Goexit", func() { new(testing.T).FailNow() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			pool := db.PoolWith(t, nil)
			r := newRunner(t, pool, jobrun.Options{})
			var res jobrun.Result
			var err error
			label := pprof.Labels("test", t.Name()) // goroutines pass it on to those that they start
			pprof.Do(t.Context(), label, func(ctx context.Context) {
				job := jobrun.Job{Name: c.name, Func: func(context.Context, *jobrun.Run) error { c.fn(); return nil }}
				res, err = r.RunDate(ctx, job, date)
			})
			var failed *jobrun.RunError
			var panicked *jobrun.PanicError
			if !errors.As(err, &failed) || !errors.As(err, &panicked) || failed.Attempt != 1 || res.Record.Status != jobrun.Failed {
				t.Fatalf("got %+v, %v", res, err)
			}
			if errors.Is(err, theirs) != (c.name == "error") {
				t.Errorf("errors.Is is %t for the error that was the value of the panic", errors.Is(err, theirs))
			}
			stored := query[string](t, db.Pool, `SELECT error_message FROM batch_job_run WHERE job_key = $1 AND status = 'FAILED' AND finished_at >= started_at`, failed.Key)
			if !strings.Contains(stored, c.text) || !strings.Contains(stored, "goroutine ") || len(stored) > 8<<10 || !utf8.ValidString(stored) {
				t.Errorf("stored %d bytes: %s", len(stored), stored)
			}
			if n := len(panicked.Stack); n == 0 || n > 4<<10 {
				t.Errorf("a stack of %d bytes", n)
			}
			if text := query[string](t, db.Pool, `SELECT error_message FROM batch_job_attempt WHERE job_key = $1 AND outcome = 'FAILED' AND ended_by = 'WORKER'`, failed.Key); text != stored {
				t.Errorf("the history says %s", text)
			}
			if n := pool.Stat().AcquiredConns(); n != 0 {
				t.Errorf("%d connections not returned", n)
			}
			eventually(t, "no goroutine of the call is left", func() bool {
				var profile strings.Builder
				_ = pprof.Lookup("goroutine").WriteTo(&profile, 1)
				return !strings.Contains(profile.String(), fmt.Sprintf("%q:%q", "test", t.Name()))
			})
		})
	}
}

// selfless is an error whose methods need the receiver that a typed nil lacks.
type selfless struct{ inner error }

func (e *selfless) Error() string { return e.inner.Error() }
func (e *selfless) Unwrap() error { return e.inner }

// explosive is an error that nobody can ask anything.
type explosive struct{}

func (explosive) Error() string   { panic("no text for you") }
func (explosive) Is(error) bool   { panic("not comparable") }
func (explosive) As(any) bool     { panic("not assignable") }
func (explosive) Unwrap() []error { panic("nothing inside") }

// mute is an error whose text cannot be had.
type mute struct{}

func (mute) Error() string { panic("no text for you") }

func TestAnyErrorTextIsStored(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const limit = 8 << 10
	theirs := errors.New("theirs")
	across := func(shift int) error { // a character lies across both cuts, for one of the shifts each
		return errors.New(strings.Repeat("a", limit/4+shift) + strings.Repeat("한", limit) + strings.Repeat("z", shift))
	}
	for _, c := range []struct {
		name       string
		err        error
		head, tail string // what the stored text begins and ends with
	}{
		{"nul", errors.New("a\x00b"), "a\uFFFDb", "a\uFFFDb"},
		{"invalid", errors.New("bad\xf8utf"), "bad\uFFFDutf", "utf"},
		{"cut-off", errors.New("half \xed\x95"), "half \uFFFD", "\uFFFD"},
		{"hangul", errors.New("처음" + strings.Repeat("한", 1<<20/3) + "끝: 원인"), "처음한", "한끝: 원인"},
		{"across-0", across(0), "aaa", "한"},
		{"across-1", across(1), "aaa", "한z"},
		{"across-2", across(2), "aaa", "한zz"},
		{"limit", errors.New(strings.Repeat("x", limit)), strings.Repeat("x", limit), ""},
		{"only-invalid", errors.New(strings.Repeat("\xff\x00", limit)), "\uFFFD", "\uFFFD"},
		{"empty", errors.New(""), "*errors.errorString without a text", ""},
		{"mute", mute{}, "jobrun_test.mute, whose Error method panicked: no text for you", ""},
		{"typed-nil", (*selfless)(nil), "", ""},
		{"explosive", explosive{}, "", ""},
		{"joined", errors.Join(errors.New("first"), theirs), "first\ntheirs", ""},
		{"wrapped", fmt.Errorf("settle: %w", fmt.Errorf("book: %w", theirs)), "settle: book: theirs", ""},
		{"wrapped-mute", fmt.Errorf("settle: %w", mute{}), "settle: ", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			job := jobrun.Job{Name: c.name, Func: func(context.Context, *jobrun.Run) error { return c.err }}
			res, err := r.RunDate(t.Context(), job, date)
			var failed *jobrun.RunError
			if !errors.As(err, &failed) || res.Record.Status != jobrun.Failed {
				t.Fatalf("got %+v, %v", res, err)
			}
			switch c.name {
			case "typed-nil", "explosive": // nothing can be asked of it
			case "joined", "wrapped":
				if !errors.Is(err, theirs) || !errors.Is(err, c.err) {
					t.Errorf("the caller did not get the job's own error: %v", err)
				}
			default:
				if !errors.Is(err, c.err) {
					t.Errorf("the caller did not get the job's own error: %v", err)
				}
			}
			_ = err.Error()
			stored := query[string](t, db.Pool, `SELECT error_message FROM batch_job_run WHERE status = 'FAILED' AND job_key = $1`, job.Key(date))
			if stored != res.Record.Error || stored == "" || len(stored) > limit || !utf8.ValidString(stored) || strings.Contains(stored, "\x00") {
				t.Errorf("stored %d bytes: %.200q", len(stored), stored)
			}
			if !strings.HasPrefix(stored, c.head) || !strings.HasSuffix(stored, c.tail) {
				t.Errorf("stored %.60q ... %q", stored, stored[max(0, len(stored)-60):])
			}
			if c.tail != "" && len(c.err.Error()) > limit && len(stored) < limit-8 {
				t.Errorf("only %d bytes kept", len(stored))
			}
		})
	}
}

func TestInterruptedAttemptIsDueAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	reason := errors.New("SIGTERM")
	for _, c := range []struct {
		name string
		ctx  func(context.Context) (context.Context, func())
		want []error
	}{
		{"cancelled", func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancel(ctx)
			return ctx, cancel
		}, []error{context.Canceled}},
		{"cancelled-with-cause", func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancelCause(ctx)
			return ctx, func() { cancel(reason) }
		}, []error{context.Canceled, reason}},
		{"deadline", func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			t.Cleanup(cancel)
			return ctx, func() {}
		}, []error{context.DeadlineExceeded}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRunner(t, db.Pool, jobrun.Options{})
			ctx, end := c.ctx(t.Context())
			job := jobrun.Job{Name: c.name, Retry: jobrun.Retry{MaxAttempts: 2}, Func: func(ctx context.Context, run *jobrun.Run) error {
				if run.Attempt() > 1 {
					return nil
				}
				end()
				<-ctx.Done()
				return ctx.Err()
			}}
			res, err := r.RunDate(ctx, job, date)
			for _, want := range c.want {
				if !errors.Is(err, want) || !strings.Contains(res.Record.Error, want.Error()) {
					t.Errorf("got %v, stored %q; want %v", err, res.Record.Error, want)
				}
			}
			if res.Record.Status != jobrun.Failed || res.Record.NextAttemptAt.IsZero() {
				t.Fatalf("got %+v", res)
			}
			if !query[bool](t, db.Pool, `SELECT status = 'FAILED' AND executions = 1 AND next_attempt_at <= clock_timestamp()
				AND next_attempt_at - finished_at < '1 s' FROM batch_job_run WHERE job_key = $1`, job.Key(date)) {
				t.Error("not due at once by the database clock")
			}
			res, err = r.RunDate(t.Context(), job, date)
			if err != nil || res.Record.Attempt != 2 || res.Record.Status != jobrun.Succeeded || res.Record.Trigger != jobrun.TriggerRetry {
				t.Errorf("next call: %+v, %v", res, err)
			}
		})
	}
}

func TestInterruptionBeforeTheClaimClaimsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	res, err := r.RunDate(ctx, jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}, date)
	if !errors.Is(err, context.Canceled) || res.Ran() {
		t.Errorf("got %+v, %v", res, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run`); n != 0 {
		t.Errorf("%d rows", n)
	}
}

func TestTimeoutIsAFailureWithBackoff(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{
		Name: "nightly", Timeout: 50 * time.Millisecond,
		Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Hour }},
		Func:  func(ctx context.Context, _ *jobrun.Run) error { <-ctx.Done(); return ctx.Err() },
	}
	res, err := r.RunDate(t.Context(), job, date)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(res.Record.Error, "Job.Timeout 50ms") || res.Record.Status != jobrun.Failed {
		t.Errorf("got %+v, %v", res, err)
	}
	if pause := res.Record.NextAttemptAt.Sub(res.Record.FinishedAt); pause < 59*time.Minute || pause > 61*time.Minute {
		t.Errorf("next attempt %s after the end", pause)
	}
	job.Name, job.Func = "in-time", func(ctx context.Context, _ *jobrun.Run) error { <-ctx.Done(); return nil }
	if res, err = r.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
		t.Errorf("a job that did its work all the same: %+v, %v", res, err)
	}
}

func TestJobThatIgnoresCancellationKeepsItsLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	other := newRunner(t, db.PoolWith(t, nil), jobrun.Options{Lease: time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	f := launch(t, ctx, r, jobrun.Job{Name: "nightly"})
	cancel()
	within(t, "the job's context ends", f.ctx.Done())
	for range 5 { // longer than the lease
		beaten(t, db.Pool, "nightly:2026-09-15", 1)
		if stale, err := other.Stale(t.Context()); err != nil || len(stale) != 0 {
			t.Errorf("stale: %+v, %v", stale, err)
		}
	}
	if res, err := other.RunDate(t.Context(), jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}, date); err != nil || res.Decision != jobrun.AlreadyRunning {
		t.Errorf("another instance: %+v, %v", res, err)
	}
	f.succeeds(t, 1)
}

func TestHealthyLongJobIsOverdueAndAlive(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly", StaleAfter: time.Millisecond})
	for range 5 {
		beaten(t, db.Pool, f.run.Key(), 1)
		stale, err := r.Stale(t.Context())
		if err != nil || len(stale) != 1 || stale[0].Overdue <= 0 || !stale[0].Alive || stale[0].Silent > time.Second || stale[0].Attempt != 1 {
			t.Errorf("stale: %+v, %v", stale, err)
		}
		if res, err := r.RunDate(t.Context(), jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}, date); err != nil || res.Decision != jobrun.AlreadyRunning {
			t.Errorf("got %+v, %v", res, err)
		}
	}
	f.succeeds(t, 1)
	if n := query[int](t, db.Pool, `SELECT executions FROM batch_job_run`); n != 1 {
		t.Errorf("%d executions", n)
	}
}

func TestCountersReachTheHistoryWithABeat(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	counts := func(processed, failed int64) func() bool {
		return func() bool {
			rec, err := r.Get(t.Context(), f.run.Key())
			return err == nil && rec.Status == jobrun.Running && rec.ItemsProcessed == processed && rec.ItemsFailed == failed
		}
	}
	f.run.AddProcessed(40)
	f.run.AddFailed(2)
	eventually(t, "40 and 2 while it runs", counts(40, 2))
	moved := query[time.Time](t, db.Pool, `SELECT items_moved_at FROM batch_job_attempt`)
	beaten(t, db.Pool, f.run.Key(), 2)
	if again := query[time.Time](t, db.Pool, `SELECT items_moved_at FROM batch_job_attempt`); !again.Equal(moved) {
		t.Errorf("the items moved at %s although the counts did not change", again)
	}
	f.run.AddProcessed(1)
	eventually(t, "41 and 2 while it runs", counts(41, 2))
	f.run.AddProcessed(1)
	f.succeeds(t, 1)
	if f.res.Record.ItemsProcessed != 42 || f.res.Record.ItemsFailed != 2 || !query[bool](t, db.Pool, `SELECT items_processed = 42 AND items_failed = 2 FROM batch_job_attempt`) {
		t.Errorf("at the end: %+v", f.res.Record)
	}
}

func TestOneBeatRenewsAllAttemptsOfAProcess(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := pgtest.NewProxy(t, db.URL)
	r := newRunner(t, db.PoolWith(t, through(p)), jobrun.Options{Lease: time.Second})
	const jobs = 20
	var flights []*flight
	for n := range jobs {
		flights = append(flights, launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("nightly-%d", n)}))
	}
	before := p.Statements(beatStatement)
	for range 4 {
		beaten(t, db.Pool, flights[jobs-1].run.Key(), 1)
		eventually(t, "one transaction has renewed all", func() bool {
			return query[bool](t, db.Pool, `SELECT count(DISTINCT xmin::text) = 1 AND count(*) = $1 AND min(heartbeat_at - started_at) > '0' FROM batch_job_attempt`, jobs)
		})
	}
	if n := p.Statements(beatStatement) - before; n > 10 {
		t.Errorf("%d statements for 4 beats of %d attempts", n, jobs)
	}
	for _, f := range flights {
		f.succeeds(t, 1)
	}
}

func TestBeatsUnderStricterIsolation(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			exec(t, db.Pool, fmt.Sprintf(`ALTER DATABASE %s SET default_transaction_isolation = '%s'`, db.Name, level))
			pool := db.PoolWith(t, nil)
			if got := query[string](t, pool, `SHOW transaction_isolation`); got != level {
				t.Fatalf("isolation %s", got)
			}
			log, text := logged()
			r := newRunner(t, pool, jobrun.Options{Lease: time.Second, Logger: log})
			f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
			stop := make(chan struct{})
			var others sync.WaitGroup
			for n := range 3 {
				others.Go(func() {
					for i := 0; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						job := jobrun.Job{Name: fmt.Sprintf("short-%d-%d", n, i), Func: func(context.Context, *jobrun.Run) error { return nil }}
						if res, err := r.RunDate(context.Background(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
							t.Errorf("%s: %+v, %v", job.Name, res, err)
							return
						}
					}
				})
			}
			beaten(t, db.Pool, f.run.Key(), 5)
			close(stop)
			others.Wait()
			f.succeeds(t, 1)
			if lost := text.lines("lease lost"); lost != nil {
				t.Error(lost)
			}
		})
	}
}

func TestLockedRowsDoNotStopTheBeats(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, text := logged()
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second, Logger: log})
	locked := launch(t, t.Context(), r, jobrun.Job{Name: "locked"})
	free := launch(t, t.Context(), r, jobrun.Job{Name: "free"})
	for _, table := range []string{"batch_job_run", "batch_job_attempt"} {
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `SELECT FROM `+table+` WHERE job_key = $1 FOR UPDATE`, locked.run.Key()); err != nil {
			t.Fatal(err)
		}
		if table == "batch_job_run" {
			beaten(t, db.Pool, locked.run.Key(), 3)
		}
		beaten(t, db.Pool, free.run.Key(), 5) // longer than the lease
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if locked.ctx.Err() != nil {
			t.Fatalf("a lock on %s: %v", table, context.Cause(locked.ctx))
		}
		beaten(t, db.Pool, locked.run.Key(), 1)
	}
	locked.succeeds(t, 1)
	free.succeeds(t, 1)
	if warnings := text.lines("level=WARN"); warnings != nil {
		t.Error(warnings)
	}
}

// TestLeaseLostToPlainSQL: what another program writes stays as it wrote it.
func TestLeaseLostToPlainSQL(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const neighbour = `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'neighbour')`
	const row = `SELECT coalesce((SELECT to_jsonb(r) FROM batch_job_run AS r WHERE job_key = $1)::text, 'none')`
	for name, sql := range map[string][]string{
		"succeeded":    {`UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`},
		"failed":       {`UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'by hand' WHERE job_key = $1`},
		"unknown":      {`UPDATE batch_job_run SET status = 'PAUSED' WHERE job_key = $1`},
		"deleted":      {`DELETE FROM batch_job_run WHERE job_key = $1`},
		"inserted-new": {`DELETE FROM batch_job_run WHERE job_key = $1`, neighbour},
		"truncated":    {`DELETE FROM batch_job_attempt WHERE job_key = $1`, `DELETE FROM batch_job_run WHERE job_key = $1`},
	} {
		for _, returns := range []error{nil, errors.New("theirs")} {
			t.Run(fmt.Sprintf("%s/%v", name, returns), func(t *testing.T) {
				t.Parallel()
				r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
				f := launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("%s-%t", name, returns == nil), Retry: jobrun.Retry{MaxAttempts: 3}})
				key := f.run.Key()
				for _, statement := range sql {
					exec(t, db.Pool, statement, key)
				}
				changed, foreign := time.Now(), query[string](t, db.Pool, row, key)
				within(t, "the job's context ends", f.ctx.Done())
				if took := time.Since(changed); took > 3*time.Second || !errors.Is(context.Cause(f.ctx), jobrun.ErrLeaseLost) {
					t.Errorf("after %s: %v", took, context.Cause(f.ctx))
				}
				if res, err := f.end(t, returns); !errors.Is(err, jobrun.ErrLeaseLost) || errors.Is(err, jobrun.ErrOutcomeUnknown) || !res.Ran() || returns != nil && !errors.Is(err, returns) {
					t.Errorf("got %+v, %v", res, err)
				}
				if now := query[string](t, db.Pool, row, key); now != foreign {
					t.Errorf("the row was %s, is %s", foreign, now)
				}
				if name == "truncated" {
					return
				}
				history, err := r.History(t.Context(), key)
				if err != nil || len(history) == 0 || history[0].Attempt != 1 || !strings.HasPrefix(history[0].Error, "changed outside jobrun") || history[0].Outcome == jobrun.Running {
					t.Errorf("history: %+v, %v", history, err)
				}
			})
		}
	}
}

// TestDeletedHistoryIsNoLostLease: only the run's row says who holds it.
func TestDeletedHistoryIsNoLostLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{Lease: time.Second})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	f.run.AddProcessed(3)
	exec(t, db.Pool, `DELETE FROM batch_job_attempt`)
	before := p.Statements(standingStatement)
	eventually(t, "more beats than the lease is long", func() bool { return p.Statements(standingStatement) > before+5 })
	f.succeeds(t, 1)
	if f.res.Record.ItemsProcessed != 3 {
		t.Errorf("got %+v", f.res.Record)
	}
}

// TestFinishFindsTheLostLease: the change comes after the last beat, so only the
// result can notice.
func TestFinishFindsTheLostLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'by hand'`)
	if res, err := f.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) || !res.Ran() {
		t.Errorf("got %+v, %v", res, err)
	}
	if text := query[string](t, db.Pool, `SELECT error_message FROM batch_job_run WHERE status = 'FAILED'`); text != "by hand" {
		t.Errorf("error_message %q", text)
	}
}

// TestTwoAttemptsOfOneKeyInOneProcess: the older one was superseded by hand.
func TestTwoAttemptsOfOneKeyInOneProcess(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	first := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	first.run.AddProcessed(7)
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), approved_at = now(),
		approved_attempt = attempt, approved_status = 'FAILED', approved_worker = worker_id, approved_finished_at = now()`)
	second := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	second.run.AddProcessed(1)
	within(t, "the first attempt's context ends", first.ctx.Done())
	if !errors.Is(context.Cause(first.ctx), jobrun.ErrLeaseLost) {
		t.Error(context.Cause(first.ctx))
	}
	beaten(t, db.Pool, second.run.Key(), 5) // longer than the lease
	if second.ctx.Err() != nil {
		t.Errorf("the second attempt: %v", context.Cause(second.ctx))
	}
	if _, err := first.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Errorf("first: %v", err)
	}
	beaten(t, db.Pool, second.run.Key(), 1)
	second.succeeds(t, 2)
	history, err := r.History(t.Context(), second.run.Key())
	if err != nil || len(history) != 2 || history[0].Outcome != jobrun.Failed || !strings.HasPrefix(history[0].Error, "changed outside jobrun") ||
		history[1].Outcome != jobrun.Succeeded || history[1].ItemsProcessed != 1 {
		t.Errorf("history: %+v, %v", history, err)
	}
}

func TestEventsFollowTheCommits(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	type key struct{}
	var r *jobrun.Runner
	var events []string
	var last jobrun.Event
	theirs := errors.New("theirs")
	r = newRunner(t, db.Pool, jobrun.Options{OnEvent: func(ctx context.Context, e jobrun.Event) {
		events, last = append(events, fmt.Sprintf("%s->%s %d %v", e.Previous, e.Record.Status, e.Record.Attempt, errors.Is(e.Err, theirs))), e
		if ctx.Err() != nil || ctx.Value(key{}) != "kept" {
			t.Errorf("%s: context %v, value %v", e.Record.Status, ctx.Err(), ctx.Value(key{}))
		}
		if rec, err := r.Get(ctx, e.Record.Key); err != nil || rec != e.Record {
			t.Errorf("committed is %+v, %v; the event says %+v", rec, err, e.Record)
		}
		if e.Action != nil {
			t.Errorf("action %+v", e.Action)
		}
	}})
	ctx := context.WithValue(t.Context(), key{}, "kept")
	job := jobrun.Job{Name: "nightly", Retry: jobrun.Retry{MaxAttempts: 2}}
	expect := func(want ...string) {
		t.Helper()
		if !slices.Equal(events, want) {
			t.Errorf("events %q, want %q", events, want)
		}
		events = nil
	}

	cancelled, cancel := context.WithCancel(ctx)
	job.Func = func(context.Context, *jobrun.Run) error { cancel(); return theirs }
	_, err := r.RunDate(cancelled, job, date)
	expect("->RUNNING 1 false", "RUNNING->FAILED 1 true")
	if failed := (*jobrun.RunError)(nil); !errors.As(last.Err, &failed) || err != last.Err { //nolint:errorlint // the very same error
		t.Errorf("event %v, returned %v", last.Err, err)
	}

	job.Func = func(context.Context, *jobrun.Run) error { return nil }
	res, err := r.RunDate(ctx, job, date)
	expect("FAILED->RUNNING 2 false", "RUNNING->SUCCEEDED 2 false")
	if err != nil || res.Record != last.Record {
		t.Errorf("returned %+v, %v; event %+v", res, err, last)
	}
	_, _ = r.RunDate(ctx, job, date)
	expect() // a lost claim changes nothing

	job.Name, job.Func = "empty", func(context.Context, *jobrun.Run) error { return jobrun.SkipRun("nothing to settle") }
	_, _ = r.RunDate(ctx, job, date)
	expect("->RUNNING 1 false", "RUNNING->SKIPPED 1 false")

	job.Name, job.Calendar = "holiday", func(jobrun.Date) bool { return false }
	_, _ = r.Run(ctx, job)
	expect("->SKIPPED 0 false")
}

func TestPanicOfOnEventIsContained(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, text := logged()
	var events atomic.Int64
	r := newRunner(t, db.Pool, jobrun.Options{Logger: log, OnEvent: func(context.Context, jobrun.Event) { events.Add(1); panic("webhook") }})
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { return nil }}, date)
	if err != nil || res.Record.Status != jobrun.Succeeded || events.Load() != 2 {
		t.Errorf("got %+v, %v after %d events", res, err, events.Load())
	}
	if lines := text.lines("level=ERROR", "webhook", "nightly:2026-09-15"); len(lines) != 2 {
		t.Errorf("logged %q", lines)
	}
}

// What wraps a function sees what it has done so far.
func TestWrappersSeeTheAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{WorkerID: "web-1"})
	var processed, failed int64
	worker := ""
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "settlement", Func: func(_ context.Context, run *jobrun.Run) error {
		run.AddProcessed(3)
		run.AddFailed(2)
		processed, failed = run.Items()
		worker = run.WorkerID()
		return nil
	}}, date)
	if err != nil || processed != 3 || failed != 2 || worker != res.Record.WorkerID {
		t.Errorf("%d, %d, %q, %+v, %v", processed, failed, worker, res, err)
	}
	for _, c := range []struct {
		err    error
		reason string
		ok     bool
	}{
		{nil, "", false},
		{jobrun.SkipRun("no trading"), "no trading", true},
		{fmt.Errorf("settle: %w", jobrun.SkipRun("")), "", true},
		{errors.New("skipped: no"), "", false},
		{errors.Join(jobrun.SkipRun("no trading"), errors.New("rates are missing")), "", false},
		{&jobrun.PanicError{Value: jobrun.SkipRun("no trading")}, "", false},
	} {
		if reason, ok := jobrun.SkipReason(c.err); reason != c.reason || ok != c.ok {
			t.Errorf("%v: %q, %t", c.err, reason, ok)
		}
	}
}
