package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/internal/reserve"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Parts of statements that tell them apart for the proxy.
const (
	claimStatement    = "), claimed AS (\n  INSERT INTO"
	reclaimStatement  = "), claimed AS (\n  UPDATE"
	finishStatement   = "error_message = nullif("
	abandonStatement  = "executions = r.executions - 1"
	beatStatement     = "SKIP LOCKED"
	standingStatement = "coalesce(r.attempt = m.attempt AND"
)

// through makes a pool connect through the proxy.
func through(p *pgtest.Proxy) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		config, err := pgx.ParseConfig(p.URL())
		if err != nil {
			panic(err)
		}
		c.ConnConfig = config
	}
}

// proxied returns a Runner behind a proxy.
func proxied(t testing.TB, db *pgtest.DB, opts jobrun.Options) (*pgtest.Proxy, *jobrun.Runner) {
	t.Helper()
	p := pgtest.NewProxy(t, db.URL)
	return p, newRunner(t, db.PoolWith(t, through(p)), opts)
}

// refuseResults makes statements that end a run fail with the code that the job's
// name begins with: the first two times, or always if it is 42501. What it returns
// counts them, with a sequence, because no rollback turns that back.
func refuseResults(t testing.TB, pool *pgxpool.Pool) (tries func(job string) int) {
	t.Helper()
	exec(t, pool, `CREATE FUNCTION tries(key text) RETURNS text LANGUAGE sql AS $$ SELECT quote_ident('tries of ' || split_part(key, ':', 1)) $$`)
	exec(t, pool, `CREATE FUNCTION count_tries() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			EXECUTE 'CREATE SEQUENCE ' || tries(NEW.job_key);
			RETURN NEW;
		END $$`)
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF NEW.status <> 'RUNNING' AND (nextval(tries(NEW.job_key)) <= 2 OR NEW.job_key LIKE '42501%') THEN
				RAISE EXCEPTION 'injected' USING ERRCODE = left(NEW.job_key, 5);
			END IF;
			RETURN NEW;
		END $$`)
	exec(t, pool, `CREATE TRIGGER count_tries BEFORE INSERT ON batch_job_run FOR EACH ROW EXECUTE FUNCTION count_tries()`)
	exec(t, pool, `CREATE TRIGGER refuse BEFORE UPDATE ON batch_job_run FOR EACH ROW EXECUTE FUNCTION refuse()`)
	return func(job string) int {
		t.Helper()
		return query[int](t, pool, fmt.Sprintf(`SELECT last_value::int FROM "tries of %s"`, job))
	}
}

// oneSuccess expects one attempt in all of a key, SUCCEEDED, in the run's row and in the history.
func oneSuccess(t testing.TB, pool *pgxpool.Pool, key string) {
	t.Helper()
	if !query[bool](t, pool, `SELECT status = 'SUCCEEDED' AND attempt = 1 AND executions = 1 AND error_message IS NULL AND finished_at >= started_at
			FROM batch_job_run WHERE job_key = $1`, key) ||
		!query[bool](t, pool, `SELECT bool_and(outcome = 'SUCCEEDED' AND attempt = 1 AND ended_by = 'WORKER' AND finished_at IS NOT NULL) AND count(*) = 1
			FROM batch_job_attempt WHERE job_key = $1`, key) {
		t.Errorf("run %s, attempts %s", query[string](t, pool, `SELECT to_jsonb(r)::text FROM batch_job_run AS r WHERE job_key = $1`, key),
			query[string](t, pool, `SELECT coalesce(jsonb_agg(a), '[]')::text FROM batch_job_attempt AS a WHERE job_key = $1`, key))
	}
}

func TestResultIsRepeatedUntilItIsRecorded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tries := refuseResults(t, db.Pool)
	for _, code := range []string{"57014", "40P01", "40001", "57P01", "55P03"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			r := newRunner(t, db.Pool, jobrun.Options{})
			executions := 0
			ctx, cancel := context.WithCancel(t.Context())
			job := jobrun.Job{Name: code, Func: func(context.Context, *jobrun.Run) error { executions++; cancel(); return nil }}
			res, err := r.RunDate(ctx, job, date)
			if err != nil || res.Record.Status != jobrun.Succeeded || executions != 1 {
				t.Errorf("got %+v, %v after %d executions", res, err, executions)
			}
			if n := tries(job.Name); n != 3 {
				t.Errorf("%d tries", n)
			}
			oneSuccess(t, db.Pool, job.Key(date))
		})
	}
	for name, theirs := range map[string]error{
		"42501": nil, "42501-and-failed": errors.New("ledger out of balance"),
		"42501-and-lost": fmt.Errorf("payment 7: %w", jobrun.ErrLeaseLost), // what a heartbeat said, or a fence: the row is still ours
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log, text := logged()
			r := newRunner(t, db.Pool, jobrun.Options{Logger: log})
			job := jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { return theirs }}
			res, err := r.RunDate(t.Context(), job, date)
			if !errors.Is(err, jobrun.ErrOutcomeUnknown) || errors.Is(err, jobrun.ErrLeaseLost) || !res.Ran() || theirs != nil && !errors.Is(err, theirs) {
				t.Errorf("got %+v, %v", res, err)
			}
			if res.Record.Status != jobrun.Running || !query[bool](t, db.Pool, `SELECT status = 'RUNNING' AND finished_at IS NULL FROM batch_job_run WHERE job_key = $1`, job.Key(date)) {
				t.Errorf("not RUNNING: %+v", res.Record)
			}
			if n := tries(job.Name); n != 1 {
				t.Errorf("%d tries", n)
			}
			if lines := text.lines("level=ERROR", "not recorded", "42501"); len(lines) != 1 {
				t.Errorf("logged %q", lines)
			}
			if again, err := r.RunDate(t.Context(), job, date); err != nil || again.Decision != jobrun.AlreadyRunning {
				t.Errorf("next call: %+v, %v", again, err)
			}
			exec(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = heartbeat_at - interval '3 minutes' WHERE job_key = $1`, job.Key(date))
			stale, err := r.Stale(t.Context())
			if err != nil || !slices.ContainsFunc(stale, func(s jobrun.StaleRun) bool { return s.Key == job.Key(date) && !s.Alive }) {
				t.Errorf("stale: %+v, %v", stale, err)
			}
		})
	}
}

func TestTerminatedSessionsDuringAJob(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = "app" }), jobrun.Options{Lease: time.Second})
	kill := func() {
		t.Helper()
		if n := query[int](t, db.Pool, `SELECT count(pg_terminate_backend(pid))::int FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'app'`); n == 0 {
			t.Error("nothing was terminated")
		}
	}
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	kill()
	beaten(t, db.Pool, f.run.Key(), 2)
	kill()
	f.succeeds(t, 1)
	oneSuccess(t, db.Pool, "nightly:2026-09-15")
}

func TestLostAnswerToTheResult(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, arm := range map[string]func(*pgtest.Proxy){
		"executed":             func(p *pgtest.Proxy) { p.CutAfter(finishStatement) },
		"not-executed":         func(p *pgtest.Proxy) { p.CutBefore(finishStatement) },
		"again-and-again":      func(p *pgtest.Proxy) { p.CutAfterN(finishStatement, 3) },
		"and-not-told-why":     func(p *pgtest.Proxy) { p.CutAfter(finishStatement); p.CutBefore(standingStatement) },
		"silent-then-executed": func(p *pgtest.Proxy) { p.CutBeforeN(finishStatement, 2); p.CutAfter(finishStatement) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var events []jobrun.Event
			p, r := proxied(t, db, jobrun.Options{OnEvent: func(_ context.Context, e jobrun.Event) { events = append(events, e) }})
			f := launch(t, t.Context(), r, jobrun.Job{Name: name})
			f.run.AddProcessed(3)
			arm(p)
			f.succeeds(t, 1)
			if p.Cuts() == 0 {
				t.Error("nothing was cut")
			}
			oneSuccess(t, db.Pool, f.run.Key())
			rec, err := r.Get(t.Context(), f.run.Key())
			if rec.HeartbeatAt = f.res.Record.HeartbeatAt; err != nil || rec != f.res.Record {
				t.Errorf("recorded %+v, %v; returned %+v", rec, err, f.res.Record)
			}
			if len(events) != 2 || events[1].Record != f.res.Record {
				t.Errorf("events %+v", events)
			}
		})
	}
}

func TestLostAnswerToAFailureKeepsItsRetry(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly", Retry: jobrun.Retry{MaxAttempts: 2}})
	p.CutAfter(finishStatement)
	theirs := errors.New("theirs")
	res, err := f.end(t, theirs)
	rec, getErr := r.Get(t.Context(), f.run.Key())
	if !errors.Is(err, theirs) || getErr != nil || rec != res.Record || rec.NextAttemptAt.IsZero() || rec.Error != "theirs" {
		t.Errorf("got %+v, %v; recorded %+v, %v", res, err, rec, getErr)
	}
}

func TestCancellationAfterTheFunctionReturned(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	f := launch(t, ctx, r, jobrun.Job{Name: "nightly"})
	p.Hold(finishStatement)
	f.tell <- nil
	eventually(t, "the result is on its way", func() bool { return p.Held() == 1 })
	cancel()
	p.Release()
	within(t, "the call returns", f.done)
	if f.err != nil || f.res.Record.Status != jobrun.Succeeded {
		t.Errorf("got %+v, %v", f.res, f.err)
	}
	oneSuccess(t, db.Pool, "nightly:2026-09-15")

	earlier, cancelEarlier := context.WithCancel(t.Context())
	job := jobrun.Job{Name: "earlier", Func: func(context.Context, *jobrun.Run) error { cancelEarlier(); return nil }}
	if res, err := r.RunDate(earlier, job, date); err != nil || res.Record.Status != jobrun.Succeeded {
		t.Errorf("cancelled just before it returned: %+v, %v", res, err)
	}
}

// TestSameResultTwiceIsOneResult: the same token repeating its outcome is told
// that all is well, with another outcome that it lost.
func TestSameResultTwiceIsOneResult(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	book := lease.NewBook(store.NewTables("public"), reserve.New(db.Pool), time.Minute, lease.AnswerLimit, slog.New(slog.DiscardHandler))
	defer book.Settle()
	claimed, err := book.Claim(t.Context(), store.Claim{
		Key: "nightly:2026-09-15", Job: "nightly", Date: "2026-09-15", Token: "6f2c1d6e-0000-4000-8000-000000000001",
		Worker: "w", Trigger: "MANUAL", ScheduledFor: time.Now(), Lease: time.Minute, StaleAfter: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	h := &lease.Held{Row: claimed.Row}
	success := store.Outcome{Status: "SUCCEEDED", Next: -1, Processed: 3}
	first, err := book.Finish(t.Context(), h, success)
	if err != nil || first.Status != "SUCCEEDED" {
		t.Fatalf("got %+v, %v", first, err)
	}
	const all = `SELECT (SELECT jsonb_agg(r) FROM batch_job_run AS r)::text || (SELECT jsonb_agg(a) FROM batch_job_attempt AS a)::text`
	before := query[string](t, db.Pool, all)
	if again, err := book.Finish(t.Context(), h, success); err != nil || again != first {
		t.Errorf("again: %+v, %v; want %+v", again, err, first)
	}
	for _, status := range []string{"FAILED", "SKIPPED"} {
		if _, err := book.Finish(t.Context(), h, store.Outcome{Status: status, Error: "no", Next: 0}); !errors.Is(err, lease.ErrLost) {
			t.Errorf("%s afterwards: %v", status, err)
		}
	}
	if after := query[string](t, db.Pool, all); after != before {
		t.Errorf("was %s, is %s", before, after)
	}
}

func TestLostAnswerToTheClaim(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, arm := range map[string]func(*pgtest.Proxy){
		"executed":        func(p *pgtest.Proxy) { p.CutAfter(claimStatement) },
		"not-executed":    func(p *pgtest.Proxy) { p.CutBefore(claimStatement) },
		"again-and-again": func(p *pgtest.Proxy) { p.CutAfterN(claimStatement, 4) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, r := proxied(t, db, jobrun.Options{})
			arm(p)
			f := launch(t, t.Context(), r, jobrun.Job{Name: name})
			if p.Cuts() == 0 {
				t.Error("nothing was cut")
			}
			f.succeeds(t, 1)
			oneSuccess(t, db.Pool, f.run.Key())
		})
	}
}

func TestLostAnswerToTheClaimOfARetry(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, arm := range map[string]func(*pgtest.Proxy){
		"executed":     func(p *pgtest.Proxy) { p.CutAfter(reclaimStatement) },
		"not-executed": func(p *pgtest.Proxy) { p.CutBefore(reclaimStatement) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var started []jobrun.Event
			p, r := proxied(t, db, jobrun.Options{OnEvent: func(_ context.Context, e jobrun.Event) {
				if e.Record.Status == jobrun.Running {
					started = append(started, e)
				}
			}})
			job := jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}}
			job.Func = func(context.Context, *jobrun.Run) error { return errors.New("theirs") }
			if res, _ := r.RunDate(t.Context(), job, date); res.Record.Status != jobrun.Failed {
				t.Fatalf("got %+v", res)
			}
			arm(p)
			f := launch(t, t.Context(), r, job)
			f.succeeds(t, 2)
			if p.Cuts() != 1 {
				t.Errorf("%d cuts", p.Cuts())
			}
			if len(started) != 2 || started[1].Previous != jobrun.Failed || f.run.Trigger() != jobrun.TriggerRetry {
				t.Errorf("trigger %s, events %+v", f.run.Trigger(), started)
			}
			if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE job_key = $1`, f.run.Key()); n != 2 {
				t.Errorf("%d attempts in the history", n)
			}
		})
	}
}

// TestClaimThatStaysUncertain: it was committed, nobody told us, and then the
// database is gone: the job does not run, and the claim is given back.
func TestClaimThatStaysUncertain(t *testing.T) {
	t.Parallel()
	for _, closing := range []string{"in the background", "by Shutdown", "with the server that had it"} {
		t.Run(closing, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			p, r := proxied(t, db, jobrun.Options{})
			if _, err := r.List(t.Context(), jobrun.Filter{}); err != nil { // opens the connection that will be cut
				t.Fatal(err)
			}
			p.CutAfter(claimStatement)
			p.RefuseNew(true)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			job := jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}
			res, err := r.RunDate(ctx, job, date)
			if !errors.Is(err, context.DeadlineExceeded) || res.Ran() {
				t.Fatalf("got %+v, %v", res, err)
			}
			if !query[bool](t, db.Pool, `SELECT status = 'RUNNING' FROM batch_job_run`) {
				t.Error("the claim was not committed")
			}
			if closing == "with the server that had it" { // and others have seen it there, and left the run to this one
				p.Hold(abandonStatement)
			}
			p.RefuseNew(false)
			if closing == "with the server that had it" {
				eventually(t, "the claim is about to be given back", func() bool { return p.Held() == 1 })
				exec(t, db.Pool, `WITH run AS (DELETE FROM batch_job_run) DELETE FROM batch_job_attempt`)
				p.Release()
				eventually(t, "the claim is there again", func() bool { return query[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM batch_job_run)`) })
			}
			if closing == "by Shutdown" {
				if err := r.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
				r = newRunner(t, db.Pool, jobrun.Options{})
			} else {
				eventually(t, "the claim is given back", func() bool { return query[bool](t, db.Pool, `SELECT status <> 'RUNNING' FROM batch_job_run`) })
			}
			rec, err := r.Get(t.Context(), "nightly:2026-09-15")
			if err != nil || rec.Status != jobrun.Failed || rec.Attempt != 1 || !strings.HasPrefix(rec.Error, "never started") {
				t.Errorf("got %+v, %v", rec, err)
			}
			if !query[bool](t, db.Pool, `SELECT executions = 0 AND next_attempt_at <= clock_timestamp() FROM batch_job_run`) ||
				!query[bool](t, db.Pool, `SELECT outcome = 'FAILED' AND ended_by = 'WORKER' AND finished_at IS NOT NULL FROM batch_job_attempt`) {
				t.Error("it was counted, or is not due, or the history is open")
			}
			job.Func = func(context.Context, *jobrun.Run) error { return errors.New("theirs") }
			if closing == "by Shutdown" { // the zero Retry
				if res, _ = r.RunDate(t.Context(), job, date); res.Record.Attempt != 2 || !res.Record.NextAttemptAt.IsZero() {
					t.Errorf("got %+v", res)
				}
				return
			}
			job.Retry = jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}
			if res, _ = r.RunDate(t.Context(), job, date); res.Record.Attempt != 2 || res.Record.NextAttemptAt.IsZero() {
				t.Errorf("first execution of two: %+v", res)
			}
			if res, _ = r.RunDate(t.Context(), job, date); res.Record.Attempt != 3 || !res.Record.NextAttemptAt.IsZero() {
				t.Errorf("second execution of two: %+v", res)
			}
			if res, err = r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed {
				t.Errorf("got %+v, %v", res, err)
			}
		})
	}
}

// TestUncertainClaimLosesToAnother: what settles it must neither claim nor end
// the run of somebody else.
func TestUncertainClaimLosesToAnother(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	other := newRunner(t, db.Pool, jobrun.Options{})
	if _, err := r.List(t.Context(), jobrun.Filter{}); err != nil {
		t.Fatal(err)
	}
	p.Hold(claimStatement)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	job := jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}
	if res, err := r.RunDate(ctx, job, date); err == nil || res.Ran() {
		t.Fatalf("got %+v, %v", res, err)
	}
	f := launch(t, t.Context(), other, jobrun.Job{Name: "nightly"})
	p.Release() // now the first claim arrives
	if err := r.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	f.succeeds(t, 1)
	oneSuccess(t, db.Pool, "nightly:2026-09-15")
}

// TestLateReclaimFindsAnotherState: the statement of a re-claim was held back on its
// way and given up; when it arrives, the attempt is still the one that was seen, but a
// person has skipped the run and approved it again.
func TestLateReclaimFindsAnotherState(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	other := newRunner(t, db.Pool, jobrun.Options{})
	calls := 0
	job := jobrun.Job{Name: "nightly", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}}
	job.Func = func(context.Context, *jobrun.Run) error {
		if calls++; calls == 1 {
			return errors.New("bank closed")
		}
		return nil
	}
	if res, _ := other.RunDate(t.Context(), job, date); res.Record.Status != jobrun.Failed {
		t.Fatalf("got %+v", res)
	}
	key := job.Key(date)

	p := pgtest.NewProxy(t, db.URL)
	pool := (&pgtest.DB{URL: p.URL()}).PoolWith(t, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["application_name"] = "late"
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // sends it whole
	})
	late := newRunner(t, pool, jobrun.Options{})
	p.Hold(reclaimStatement)
	done := make(chan jobrun.Decision, 1)
	go func() {
		res, err := late.RunDate(t.Context(), job, date)
		if err != nil {
			t.Error(err)
		}
		done <- res.Decision
	}()
	eventually(t, "the statement is held back", func() bool { return p.Held() == 1 })
	if _, err := other.Skip(t.Context(), key, operator); err != nil {
		t.Fatal(err)
	}
	if decision := <-done; decision != jobrun.AlreadySkipped { // by the repeat
		t.Errorf("decision %s", decision)
	}
	if _, err := other.ApproveRerun(t.Context(), recordOf(t, other, key), operator); err != nil {
		t.Fatal(err)
	}
	sessions := func() int {
		return query[int](t, db.Pool, `SELECT count(*)::int FROM pg_stat_activity WHERE application_name = 'late' AND datname = current_database()`)
	}
	before := sessions()
	p.Release()
	eventually(t, "the late statement's session has ended", func() bool { return sessions() < before })
	if p.Statements(reclaimStatement) != 1 {
		t.Errorf("%d re-claims have arrived", p.Statements(reclaimStatement))
	}
	if rec := recordOf(t, other, key); rec.Status != jobrun.Skipped || rec.Attempt != 1 || rec.ApprovedAt.IsZero() {
		t.Errorf("got %+v, want it SKIPPED and approved", rec)
	}
	if res, err := other.RunDate(t.Context(), job, date); err != nil || !res.Ran() || calls != 2 {
		t.Errorf("the re-run: %+v, %v", res, err)
	}
}

func TestCancellationRightAfterTheClaim(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	reason := errors.New("SIGTERM")
	ctx, cancel := context.WithCancelCause(t.Context())
	p.Hold(claimStatement)
	var res jobrun.Result
	var err error
	job := jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, err = r.RunDate(ctx, job, date)
	}()
	eventually(t, "the claim is on its way", func() bool { return p.Held() == 1 })
	cancel(reason)
	p.Release()
	within(t, "the call returns", done)
	if !errors.Is(err, reason) || res.Ran() || res.Record.Status != jobrun.Failed || !res.Record.NextAttemptAt.Before(time.Now().Add(time.Minute)) {
		t.Errorf("got %+v, %v", res, err)
	}
	if !query[bool](t, db.Pool, `SELECT status = 'FAILED' AND error_message LIKE 'never started%SIGTERM%' AND executions = 0 AND next_attempt_at <= clock_timestamp() FROM batch_job_run`) {
		t.Error(query[string](t, db.Pool, `SELECT to_jsonb(r)::text FROM batch_job_run AS r`))
	}
	job.Func = func(context.Context, *jobrun.Run) error { return nil }
	if res, err = r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 2 || res.Record.Status != jobrun.Succeeded {
		t.Errorf("next call: %+v, %v", res, err)
	}
}

// TestClaimIsGivenBackDespiteALostAnswer: the statement that closes a claim as
// never started is repeated like any result.
func TestClaimIsGivenBackDespiteALostAnswer(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	p.Hold(claimStatement)
	p.CutBefore(abandonStatement)
	p.CutAfter(abandonStatement)
	done := make(chan error, 1)
	go func() {
		_, err := r.RunDate(ctx, jobrun.Job{Name: "nightly", Func: func(context.Context, *jobrun.Run) error { panic("executed") }}, date)
		done <- err
	}()
	eventually(t, "the claim is on its way", func() bool { return p.Held() == 1 })
	cancel()
	p.Release()
	within(t, "the call returns", done)
	if !query[bool](t, db.Pool, `SELECT status = 'FAILED' AND executions = 0 AND next_attempt_at IS NOT NULL FROM batch_job_run`) {
		t.Error(query[string](t, db.Pool, `SELECT to_jsonb(r)::text FROM batch_job_run AS r`))
	}
}

func TestUnreachableForLongerThanTheLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, part := range map[string]func(*testing.T, *pgtest.Proxy){
		"refused": func(_ *testing.T, p *pgtest.Proxy) { p.RefuseNew(true); p.CutAll() },
		"silent": func(t *testing.T, p *pgtest.Proxy) {
			p.Hold(beatStatement)
			eventually(t, "a beat without an answer", func() bool { return p.Held() == 1 })
			p.RefuseNew(true)
		},
	} {
		for _, back := range []error{nil, errors.New("theirs")} {
			t.Run(fmt.Sprintf("%s/%v", name, back), func(t *testing.T) {
				t.Parallel()
				log, text := logged()
				p, r := proxied(t, db, jobrun.Options{Lease: time.Second, Logger: log})
				f := launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("%s-%t", name, back == nil)})
				beaten(t, db.Pool, f.run.Key(), 1)
				last := time.Now()
				part(t, p)
				within(t, "the job's context ends", f.ctx.Done())
				if took := time.Since(last); took < 700*time.Millisecond || took > 4*time.Second || !errors.Is(context.Cause(f.ctx), jobrun.ErrLeaseLost) {
					t.Errorf("after %s: %v", took, context.Cause(f.ctx))
				}
				p.RefuseNew(false)
				p.Release()
				res, err := f.end(t, back)
				want := jobrun.Succeeded
				if back != nil {
					want = jobrun.Failed
				}
				if res.Record.Status != want || (err == nil) != (back == nil) || back != nil && !errors.Is(err, back) {
					t.Errorf("got %+v, %v", res, err)
				}
				if got := query[string](t, db.Pool, `SELECT status FROM batch_job_run WHERE job_key = $1`, f.run.Key()); got != string(want) {
					t.Errorf("the row is %s", got)
				}
				if text.lines("level=WARN", "heartbeat missed") == nil || len(text.lines("level=WARN", "lease lost, ")) != 1 {
					t.Errorf("logged %q", text.lines("WARN"))
				}
			})
		}
	}
}

func TestMissedBeatsWithinTheLeaseAreNoLoss(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, text := logged()
	p, r := proxied(t, db, jobrun.Options{Lease: 2 * time.Second, Logger: log})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	p.CutBeforeN(beatStatement, 2)
	eventually(t, "two beats are missed", func() bool { return len(text.lines("level=WARN", "heartbeat missed")) == 2 })
	eventually(t, "one is answered again", func() bool { return text.lines("level=WARN", "heartbeat answered again", "gap=") != nil })
	if f.ctx.Err() != nil {
		t.Error(context.Cause(f.ctx))
	}
	f.succeeds(t, 1)
}

func TestShutdownWaitsForRunningAttempts(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			if err := r.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
			if status := query[string](t, db.Pool, `SELECT status FROM batch_job_run WHERE job_key LIKE 'nightly:%'`); status != "SUCCEEDED" {
				t.Errorf("Shutdown did not wait for the running attempt: %s", status)
			}
		})
	}
	job := jobrun.Job{Name: "late", Func: func(context.Context, *jobrun.Run) error { return nil }}
	eventually(t, "nothing new is started", func() bool {
		job.Name += "r"
		res, err := r.RunDate(t.Context(), job, date)
		return errors.Is(err, jobrun.ErrShutdown) && !res.Ran()
	})
	if f.ctx.Err() != nil {
		t.Errorf("the running attempt: %v", context.Cause(f.ctx))
	}
	f.succeeds(t, 1)
	both.Wait()
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE job_key = $1`, job.Key(date)); n != 0 {
		t.Error("a refused call left a row")
	}
	if n := db.Pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections not returned", n)
	}
}

func TestShutdownInterruptsWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := func(name string, attempts int) jobrun.Job {
		return jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: attempts}}
	}
	last, again, deaf := launch(t, t.Context(), r, job("last", 1)), launch(t, t.Context(), r, job("again", 2)), launch(t, t.Context(), r, job("deaf", 2))
	for _, f := range []*flight{last, again} {
		context.AfterFunc(f.ctx, func() { f.tell <- f.ctx.Err() })
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(ctx) }()
	within(t, "an interrupted attempt ends", last.done)
	within(t, "an interrupted attempt ends", again.done)
	within(t, "the deaf one's context ends", deaf.ctx.Done())
	select {
	case err := <-done:
		t.Errorf("Shutdown returned %v although an attempt is running", err)
	default:
	}
	deaf.succeeds(t, 1) // it ignores its context, and did its work
	select {
	case err := <-done:
		for _, key := range []string{"last:2026-09-15 attempt 1", "again:2026-09-15 attempt 1"} {
			if err == nil || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), key) {
				t.Errorf("Shutdown: %v; want %s named", err, key)
			}
		}
	case <-time.After(patience):
		t.Fatal("Shutdown does not return")
	}
	for _, f := range []*flight{last, again} {
		if !errors.Is(f.err, jobrun.ErrShutdown) || f.res.Record.Status != jobrun.Failed || !strings.Contains(f.res.Record.Error, "shut down") {
			t.Errorf("%s: %+v, %v", f.run.Key(), f.res, f.err)
		}
	}
	if !last.res.Record.NextAttemptAt.IsZero() || !query[bool](t, db.Pool, `SELECT next_attempt_at <= clock_timestamp() FROM batch_job_run WHERE job_key = $1`, again.run.Key()) {
		t.Errorf("due: %v, %v", last.res.Record.NextAttemptAt, again.res.Record.NextAttemptAt)
	}
	if err := r.Shutdown(t.Context()); err != nil {
		t.Errorf("the second Shutdown: %v", err)
	}
	again = launch(t, t.Context(), newRunner(t, db.Pool, jobrun.Options{}), job("again", 2))
	again.succeeds(t, 2)
}

// TestShutdownAmongCalls: every call either ran its job or was refused.
func TestShutdownAmongCalls(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for round := range 5 {
		r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
		var callers sync.WaitGroup
		running := make(chan struct{}, 1)
		for g := range 8 {
			callers.Go(func() {
				for i := 0; ; i++ {
					executed := false
					job := jobrun.Job{Name: fmt.Sprintf("short-%d-%d-%d", round, g, i), Func: func(context.Context, *jobrun.Run) error { executed = true; return nil }}
					res, err := r.RunDate(context.Background(), job, date)
					if errors.Is(err, jobrun.ErrShutdown) && !executed && !res.Ran() {
						return
					}
					if err != nil || !executed || res.Record.Status != jobrun.Succeeded {
						t.Errorf("%s: %+v, %v, executed %t", job.Name, res, err, executed)
						return
					}
					select {
					case running <- struct{}{}:
					default:
					}
				}
			})
		}
		within(t, "a run", running)
		ctx, cancel := context.WithCancel(context.Background())
		if round%2 == 1 { // it interrupts, and only what has not claimed yet is refused
			cancel()
		}
		_ = r.Shutdown(ctx)
		cancel()
		callers.Wait()
		if err := r.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE status = 'RUNNING'`); n != 0 {
		t.Errorf("%d runs left RUNNING", n)
	}
}

func TestLostAnswerIsUndecidedInEveryMode(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := effectDB(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		p := pgtest.NewProxy(t, db.URL)
		for _, args := range [][]any{{mode}, {mode, 1}} {
			conn, err := pgx.Connect(t.Context(), p.URL())
			if err != nil {
				t.Fatal(err)
			}
			sql := `INSERT INTO effect VALUES (1)`
			if len(args) == 2 {
				sql = `INSERT INTO effect VALUES ($1)`
			}
			p.CutAfter("insert into effect")
			_, err = conn.Exec(t.Context(), sql, args...)
			if !store.Undecided(err) {
				t.Errorf("%s, %d arguments: %v is taken for decided", mode, len(args)-1, err)
			}
			p.CutAfter("insert into effect")
			if conn, err = pgx.Connect(t.Context(), p.URL()); err != nil {
				t.Fatal(err)
			}
			rows, err := conn.Query(t.Context(), sql, args...)
			if err == nil {
				rows.Close()
				err = rows.Err()
			}
			if !store.Undecided(err) {
				t.Errorf("%s, %d arguments, query: %v is taken for decided", mode, len(args)-1, err)
			}
		}
	}
	effects(t, db.Pool, strings.TrimSpace(strings.Repeat("1 ", 20)))
}
