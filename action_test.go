package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

var operator = jobrun.Action{By: "operator", Reason: "process log ends at 01:03, no session left"}

func TestLifeOfAFailedRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	r := newRunner(t, db.Pool, jobrun.Options{})
	broken := true
	executions := 0
	job := jobrun.Job{Name: "daily-settlement", Func: func(context.Context, *jobrun.Run) error {
		executions++
		if broken {
			return errors.New("no rates")
		}
		return nil
	}, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}}
	res, err := r.RunDate(ctx, job, date)
	if err == nil || res.Record.NextAttemptAt.IsZero() {
		t.Fatalf("first: %+v %v", res, err)
	}
	all, err := r.RetryDue(ctx, job)
	if err == nil || len(all) != 1 || all[0].Record.Attempt != 2 || all[0].Record.Trigger != jobrun.TriggerRetry || !all[0].Record.NextAttemptAt.IsZero() {
		t.Fatalf("retry: %+v %v", all, err)
	}
	if all, err = r.RetryDue(ctx, job); err != nil || len(all) != 0 {
		t.Fatalf("nothing is due: %+v %v", all, err)
	}
	problems, err := r.Attention(ctx, nil)
	if err != nil || len(problems) != 1 || problems[0].Kind != jobrun.ProblemFailed {
		t.Fatalf("attention: %+v %v", problems, err)
	}
	rec, err := r.ApproveRerun(ctx, recordOf(t, r, job.Key(date)), operator)
	if err != nil || rec.ApprovedAt.IsZero() {
		t.Fatalf("approve: %+v %v", rec, err)
	}
	if _, err = r.ApproveRerun(ctx, rec, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("second approval: %v", err)
	}
	broken = false
	if all, err = r.RetryDue(ctx, job); err != nil || len(all) != 1 || all[0].Record.Status != jobrun.Succeeded || all[0].Record.Trigger != jobrun.TriggerRerun {
		t.Fatalf("re-run: %+v %v", all, err)
	}
	if _, err = r.ApproveRerun(ctx, all[0].Record, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("approval of a SUCCEEDED run: %v", err)
	}
	if _, err = r.MarkFailed(ctx, all[0].Record, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("mark failed of a SUCCEEDED run: %v", err)
	}
	if _, err = r.Skip(ctx, rec.Key, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("skip of a SUCCEEDED run: %v", err)
	}
	if rec, err = r.Skip(ctx, "daily-settlement:2026-09-16", operator); err != nil || rec.Status != jobrun.Skipped || rec.Attempt != 0 {
		t.Fatalf("skip: %+v %v", rec, err)
	}
	history, err := r.History(ctx, "daily-settlement:2026-09-15")
	if err != nil || len(history) != 4 || history[2].Action == nil || history[2].Action.By != "operator" || history[3].Trigger != jobrun.TriggerRerun {
		t.Fatalf("history: %+v %v", history, err)
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('daily-settlement:2026-09-17', 'RUNNING', 'node-1')`)
	neighbour, err := r.Get(ctx, "daily-settlement:2026-09-17")
	if err != nil {
		t.Fatal(err)
	}
	if rec, err = r.MarkFailed(ctx, neighbour, operator); err != nil || rec.Status != jobrun.Failed || rec.FinishedAt.IsZero() {
		t.Fatalf("mark failed: %+v %v", rec, err)
	}
	if _, err = r.MarkFailed(ctx, neighbour, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("second mark failed: %v", err)
	}
	missed, err := r.Missed(ctx, job, date, jobrun.MustParseDate("2026-09-20"))
	if err != nil || len(missed) != 3 {
		t.Fatalf("missed: %v %v", missed, err)
	}
	if all, err = r.CatchUp(ctx, job, date, jobrun.MustParseDate("2026-09-20"), 3); err != nil || len(all) != 0 {
		t.Fatalf("catch up behind a failed date: %+v %v", all, err)
	}
	if _, err = r.Skip(ctx, rec.Key, operator); err != nil {
		t.Fatal(err)
	}
	if all, err = r.CatchUp(ctx, job, date, jobrun.MustParseDate("2026-09-20"), 2); err != nil || len(all) != 2 || all[1].Record.Date.String() != "2026-09-19" {
		t.Fatalf("catch up: %+v %v", all, err)
	}
	if n, err := r.Prune(ctx, jobrun.MustParseDate("2026-09-19")); err != nil || n != 3 {
		t.Fatalf("prune: %d %v", n, err)
	}
	if stale, err := r.Stale(ctx); err != nil || len(stale) != 0 {
		t.Fatalf("stale: %+v %v", stale, err)
	}
	if problems, err = r.Attention(ctx, &jobrun.AttentionOptions{FailedSince: res.Record.StartedAt}, job); err != nil {
		t.Fatalf("attention: %v", err)
	}
	t.Log(problems)
}

func recordOf(t testing.TB, r *jobrun.Runner, key string) jobrun.Record {
	t.Helper()
	rec, err := r.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// forced is what the operator does all the same.
var forced = jobrun.Action{By: operator.By, Reason: operator.Reason, Force: true}

// actions are the methods by which people act.
var actions = map[string]func(*jobrun.Runner, context.Context, jobrun.Record, jobrun.Action) (jobrun.Record, error){
	"MARK_FAILED":   (*jobrun.Runner).MarkFailed,
	"APPROVE_RERUN": (*jobrun.Runner).ApproveRerun,
	"SKIP": func(r *jobrun.Runner, ctx context.Context, rec jobrun.Record, a jobrun.Action) (jobrun.Record, error) {
		return r.Skip(ctx, rec.Key, a)
	},
}

// everything is what the tables say about a key, and whether somebody wrote to it.
func everything(t testing.TB, pool *pgxpool.Pool, key string) string {
	t.Helper()
	return query[string](t, pool, `SELECT concat_ws(E'\n',
		(SELECT string_agg(concat_ws(' ', r.ctid, r.xmin, r), E'\n') FROM batch_job_run AS r WHERE job_key = $1),
		(SELECT string_agg(concat_ws(' ', a.ctid, a.xmin, a), E'\n' ORDER BY attempt) FROM batch_job_attempt AS a WHERE job_key = $1),
		(SELECT string_agg(p::text, E'\n' ORDER BY id) FROM batch_job_action AS p WHERE job_key = $1))`, key)
}

// dead makes a run whose process is gone: RUNNING, and silent for longer than its lease.
func dead(t testing.TB, pool *pgxpool.Pool, key string) {
	t.Helper()
	exec(t, pool, `WITH run AS (
			INSERT INTO batch_job_run (job_key, status, started_at, worker_id, job_name, business_date, token)
			VALUES ($1::text, 'RUNNING', now() - interval '1 hour', 'gone', split_part($1, ':', 1), split_part($1, ':', 2)::date, gen_random_uuid())
			RETURNING *
		)
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after)
		SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, started_at + interval '10 min', '2 min', '20 min' FROM run`, key)
}

// duel lets two functions race. It evens out their chances: who won the last time waits a little longer the next time,
// and twice as much longer as before while the same one goes on winning, however slow the machine is.
type duel struct {
	handicap time.Duration // of the first function, if positive; else of the second
	step     time.Duration
	last     int // who won
	wins     [2]int
}

func (d *duel) fight(functions [2]func(), winner func() int) {
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, fn := range functions {
		wait := d.handicap
		if i == 1 {
			wait = -wait
		}
		wg.Go(func() {
			<-start
			for end := time.Now().Add(wait); time.Now().Before(end); {
				runtime.Gosched()
			}
			fn()
		})
	}
	close(start)
	wg.Wait()
	won := winner()
	d.wins[won]++
	const least, most = 40 * time.Microsecond, 5 * time.Millisecond
	if d.step = min(2*d.step, most); won != d.last || d.step == 0 {
		d.step = least
	}
	d.last = won
	d.handicap += d.step - time.Duration(2*won)*d.step
}

func TestTwoOperatorsMarkFailedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	runners := []*jobrun.Runner{newRunner(t, db.Pool, jobrun.Options{}), newRunner(t, db.PoolWith(t, nil), jobrun.Options{})}
	for round := range 50 {
		key := fmt.Sprintf("nightly-%d:2026-09-15", round)
		dead(t, db.Pool, key)
		seen := recordOf(t, runners[0], key)
		names := []string{"operator", "auditor"}
		records, errs := make([]jobrun.Record, 2), make([]error, 2)
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i, r := range runners {
			wg.Go(func() {
				<-start
				records[i], errs[i] = r.MarkFailed(context.Background(), seen, jobrun.Action{By: names[i], Reason: "its host is gone"})
			})
		}
		close(start)
		wg.Wait()
		won := slices.Index(errs, nil)
		if won < 0 || !errors.Is(errs[1-won], jobrun.ErrConflict) || !strings.Contains(errs[1-won].Error(), "FAILED") {
			t.Fatalf("round %d: %v", round, errs)
		}
		want := "marked failed by " + names[won] + ": its host is gone"
		if rec := records[won]; rec.Status != jobrun.Failed || rec.Error != want || rec.FinishedAt.Before(rec.StartedAt) || !rec.NextAttemptAt.IsZero() || rec != recordOf(t, runners[0], key) {
			t.Errorf("round %d: %+v", round, rec)
		}
		if !query[bool](t, db.Pool, `SELECT count(*) = 1 AND bool_and(p.acted_by = $2 AND p.attempt = 1 AND p.previous_status = 'RUNNING' AND NOT p.forced AND
				r.status = 'FAILED' AND r.finished_at IS NOT NULL AND r.error_message = $3 AND
				a.ended_by = 'PERSON' AND a.outcome = 'FAILED' AND a.error_message = $3 AND a.finished_at IS NOT NULL)
			FROM batch_job_run AS r JOIN batch_job_attempt AS a USING (job_key, attempt, token) JOIN batch_job_action AS p USING (job_key, attempt)
			WHERE job_key = $1`, key, names[won], want) {
			t.Errorf("round %d: %s", round, everything(t, db.Pool, key))
		}
	}
}

func TestAliveRunIsNotMarkedFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	f := launch(t, t.Context(), r, jobrun.Job{Name: "nightly"})
	key := f.run.Key()
	stored := everything(t, db.Pool, key)
	if rec, err := r.MarkFailed(t.Context(), recordOf(t, r, key), operator); !errors.Is(err, jobrun.ErrAlive) || errors.Is(err, jobrun.ErrConflict) || rec != recordOf(t, r, key) {
		t.Errorf("it beats: %+v, %v", rec, err)
	}
	if now := everything(t, db.Pool, key); now != stored {
		t.Errorf("it was\n%s\nand is\n%s", stored, now)
	}
	// A heartbeat that is committed while the action waits for it counts.
	exec(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = heartbeat_at - interval '1 hour'`)
	seen := recordOf(t, r, key)
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `UPDATE batch_job_attempt SET heartbeat_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	acted := make(chan error, 1)
	go func() {
		_, err := r.MarkFailed(context.Background(), seen, operator)
		acted <- err
	}()
	eventually(t, "the action waits for the heartbeat", func() bool {
		return query[int](t, db.Pool, `SELECT count(*)::int FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
			OR NOT granted AND locktype = 'transactionid'`) > 0
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-acted; !errors.Is(err, jobrun.ErrAlive) {
		t.Errorf("it has just beaten: %v", err)
	}
	f.succeeds(t, 1)
	oneSuccess(t, db.Pool, key)
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_action`); n != 0 {
		t.Errorf("%d actions", n)
	}
}

// TestForceEndsALiveAttempt: it loses its lease at its next heartbeat, no retry follows, and an approved re-run works in
// the same process while the old function has not returned yet.
func TestForceEndsALiveAttempt(t *testing.T) {
	t.Parallel()
	for _, returns := range []error{nil, errBroken, jobrun.RetryAfter(errBroken, 0), jobrun.SkipRun("nothing to do")} {
		t.Run(fmt.Sprint(returns), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
			elsewhere := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
			job := jobrun.Job{Name: "nightly", Retry: jobrun.Retry{MaxAttempts: 9, Backoff: atOnce}}
			f := launch(t, t.Context(), r, job)
			key := f.run.Key()
			beaten(t, db.Pool, key, 1)
			marked, err := elsewhere.MarkFailed(t.Context(), recordOf(t, elsewhere, key), forced)
			acted := time.Now()
			if err != nil || marked.Status != jobrun.Failed || !marked.NextAttemptAt.IsZero() {
				t.Fatalf("%+v, %v", marked, err)
			}
			within(t, "its context ends", f.ctx.Done())
			if took := time.Since(acted); took > 3*time.Second || !errors.Is(context.Cause(f.ctx), jobrun.ErrLeaseLost) {
				t.Errorf("after %s: %v", took, context.Cause(f.ctx))
			}
			job.Func = func(context.Context, *jobrun.Run) error { panic("executed") }
			for _, runner := range []*jobrun.Runner{r, elsewhere} {
				if res, err := runner.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed || res.Record != marked {
					t.Errorf("no approval yet: %+v, %v", res, err)
				}
				if all, err := runner.RetryDue(t.Context(), job); err != nil || len(all) != 0 {
					t.Errorf("no approval yet: %+v, %v", all, err)
				}
			}
			if _, err := elsewhere.ApproveRerun(t.Context(), marked, operator); err != nil {
				t.Fatal(err)
			}
			again := launch(t, t.Context(), r, job)
			if again.run.Attempt() != 2 || again.run.Trigger() != jobrun.TriggerRerun {
				t.Errorf("attempt %d, trigger %s", again.run.Attempt(), again.run.Trigger())
			}
			beaten(t, db.Pool, key, 2)
			res, err := f.end(t, returns)
			if !errors.Is(err, jobrun.ErrLeaseLost) || errors.Is(err, jobrun.ErrOutcomeUnknown) || !res.Ran() || errors.Is(returns, errBroken) && !errors.Is(err, errBroken) {
				t.Errorf("the old attempt: %+v, %v", res, err)
			}
			beaten(t, db.Pool, key, 2)
			if again.ctx.Err() != nil {
				t.Errorf("the new attempt: %v", context.Cause(again.ctx))
			}
			again.succeeds(t, 2)
			history, err := r.History(t.Context(), key)
			if err != nil || len(history) != 4 {
				t.Fatalf("%+v, %v", history, err)
			}
			first, mark, approval, second := history[0], history[1], history[2], history[3]
			if first.Attempt != 1 || first.Outcome != jobrun.Failed || first.Error != "marked failed by operator: "+operator.Reason || first.FinishedAt.IsZero() {
				t.Errorf("the old attempt: %+v", first)
			}
			if mark.Kind != "MARK_FAILED" || *mark.Action != forced || mark.Previous != jobrun.Running || mark.Attempt != 1 ||
				approval.Kind != "APPROVE_RERUN" || *approval.Action != operator || approval.Previous != jobrun.Failed || approval.Attempt != 1 {
				t.Errorf("actions %+v %+v", mark, approval)
			}
			if second.Attempt != 2 || second.Outcome != jobrun.Succeeded || second.Error != "" || second.Trigger != jobrun.TriggerRerun {
				t.Errorf("the new attempt: %+v", second)
			}
			if by := query[string](t, db.Pool, `SELECT string_agg(ended_by, ' ' ORDER BY attempt) FROM batch_job_attempt`); by != "PERSON WORKER" {
				t.Errorf("ended by %s", by)
			}
		})
	}
}

// The mirror: what the worker recorded first stays, and the operator is told.
func TestRecordedResultIsNotMarkedFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for i, c := range []struct {
		returns error
		want    jobrun.Status
	}{{nil, jobrun.Succeeded}, {errBroken, jobrun.Failed}, {jobrun.SkipRun("a holiday"), jobrun.Skipped}} {
		f := launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprintf("nightly-%d", i), Retry: jobrun.Retry{MaxAttempts: 2}})
		key := f.run.Key()
		seen := recordOf(t, r, key)
		res, _ := f.end(t, c.returns)
		stored := everything(t, db.Pool, key)
		for _, a := range []jobrun.Action{operator, forced} {
			for _, rec := range []jobrun.Record{seen, res.Record} { // as it was before, and as it is now
				if _, err := r.MarkFailed(t.Context(), rec, a); !errors.Is(err, jobrun.ErrConflict) || errors.Is(err, jobrun.ErrAlive) || !strings.Contains(err.Error(), string(c.want)) {
					t.Errorf("%s: %v", c.want, err)
				}
			}
		}
		if now := everything(t, db.Pool, key); now != stored {
			t.Errorf("%s: it was\n%s\nand is\n%s", c.want, stored, now)
		}
		if now := recordOf(t, r, key); now != res.Record || now.Status != c.want || now.NextAttemptAt.IsZero() != (c.want != jobrun.Failed) {
			t.Errorf("%s: %+v", c.want, now)
		}
	}
	oneSuccess(t, db.Pool, "nightly-0:2026-09-15")
}

// TestResultAgainstMarkFailed: one of the two ends the attempt, and the other one is told.
func TestResultAgainstMarkFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const workers, rounds = 4, 125
	var wins [2]atomic.Int64
	operators := newRunner(t, db.Pool, jobrun.Options{})
	var wg sync.WaitGroup
	for w := range workers {
		r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
		wg.Go(func() {
			var d duel
			for round := range rounds {
				returns := []error{nil, errBroken, jobrun.SkipRun("a holiday")}[round%3]
				ends := []jobrun.Status{jobrun.Succeeded, jobrun.Failed, jobrun.Skipped}[round%3]
				job := jobrun.Job{Name: fmt.Sprintf("nightly-%d-%d", w, round), Retry: jobrun.Retry{MaxAttempts: 2}}
				f := launch(t, context.Background(), r, job)
				key := f.run.Key()
				seen, err := operators.Get(context.Background(), key)
				if err != nil {
					t.Error(err)
					return
				}
				var marked jobrun.Record
				var markErr error
				d.fight([2]func(){
					func() { f.tell <- returns; <-f.done },
					func() { marked, markErr = operators.MarkFailed(context.Background(), seen, forced) },
				}, func() int {
					if markErr == nil {
						return 1
					}
					return 0
				})
				now, err := operators.Get(context.Background(), key)
				if err != nil {
					t.Error(err)
					return
				}
				const history = `SELECT concat_ws(' ', a.ended_by, a.outcome, (SELECT count(*) FROM batch_job_action AS p WHERE p.job_key = a.job_key),
					a.error_message IS NOT DISTINCT FROM r.error_message) FROM batch_job_attempt AS a JOIN batch_job_run AS r USING (job_key, attempt, token) WHERE job_key = $1`
				told := query[string](t, db.Pool, history, key)
				if markErr == nil {
					if !errors.Is(f.err, jobrun.ErrLeaseLost) || now != marked || now.Status != jobrun.Failed || !now.NextAttemptAt.IsZero() ||
						!strings.HasPrefix(now.Error, "marked failed by") || told != "PERSON FAILED 1 t" {
						t.Errorf("%s: the operator was first: worker %v, run %+v, history %s", key, f.err, now, told)
					}
				} else if !errors.Is(markErr, jobrun.ErrConflict) || errors.Is(f.err, jobrun.ErrLeaseLost) || errors.Is(f.err, errBroken) != errors.Is(returns, errBroken) ||
					now != f.res.Record || now.Status != ends || now.NextAttemptAt.IsZero() == errors.Is(returns, errBroken) || strings.Contains(now.Error, "marked") || told != fmt.Sprintf("WORKER %s 0 t", ends) {
					t.Errorf("%s: the worker was first: worker %+v, %v, operator %v, run %+v, history %s", key, f.res, f.err, markErr, now, told)
				}
			}
			for i := range wins {
				wins[i].Add(int64(d.wins[i]))
			}
		})
	}
	wg.Wait()
	t.Logf("the worker was first %d times, the operator %d times", wins[0].Load(), wins[1].Load())
	if wins[0].Load() < 20 || wins[1].Load() < 20 || wins[0].Load()+wins[1].Load() != workers*rounds {
		t.Errorf("both orders must happen: %d and %d", wins[0].Load(), wins[1].Load())
	}
}

// A run of another program has no heartbeat, so nothing keeps a person from ending it.
func TestRunOfANeighbourCanBeMarkedFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, key := range []string{"daily:2026-09-15", "not a key of ours"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'node-1')`, key)
		seen := recordOf(t, r, key)
		rec, err := r.MarkFailed(t.Context(), seen, operator)
		if err != nil || rec.Status != jobrun.Failed || rec.FinishedAt.Before(rec.StartedAt) || rec.WorkerID != "node-1" || rec != recordOf(t, r, key) {
			t.Errorf("%s: %+v, %v", key, rec, err)
		}
		events := 3
		if rec.Job == "" { // no job could ever execute it
			events = 2
			var invalid *jobrun.InvalidError
			if _, err := r.ApproveRerun(t.Context(), rec, operator); !errors.As(err, &invalid) {
				t.Errorf("%s: %v", key, err)
			}
		} else if rec, err = r.ApproveRerun(t.Context(), rec, operator); err != nil || rec.ApprovedAt.IsZero() {
			t.Errorf("%s: %+v, %v", key, rec, err)
		}
		history, err := r.History(t.Context(), key)
		if err != nil || len(history) != events || history[0].Attempt != 1 || history[0].WorkerID != "node-1" || history[0].Outcome != jobrun.Failed || history[0].Error != rec.Error || history[1].Kind != "MARK_FAILED" || events == 3 && history[2].Kind != "APPROVE_RERUN" {
			t.Errorf("%s: %+v, %v", key, history, err)
		}
	}
	job, executions := countingJob("daily")
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 2 || res.Record.Trigger != jobrun.TriggerRerun || executions.Load() != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	// The neighbour's own end comes too late, if it names itself.
	if tag, err := db.Pool.Exec(t.Context(), `UPDATE batch_job_run SET status = 'SUCCEEDED' WHERE job_key = 'daily:2026-09-15' AND worker_id = 'node-1' AND status = 'RUNNING'`); err != nil || tag.RowsAffected() != 0 {
		t.Errorf("%s, %v", tag, err)
	}
}

func TestApprovalNeedsWhatThePersonSaw(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const set = `UPDATE batch_job_run SET `
	for _, c := range []struct {
		name   string
		first  error  // of the only attempt
		before string // done by plain SQL before the person looks
		after  string // and after that
		want   error  // without Force
		forced error
	}{
		{name: "failed", first: errBroken},
		{name: "skipped", first: jobrun.SkipRun("a holiday")},
		{name: "succeeded", want: jobrun.ErrConflict},
		{name: "succeeded-by-neighbour", first: errBroken, before: set + `status = 'SUCCEEDED'`, want: jobrun.ErrConflict},
		{name: "failed-by-neighbour", before: set + `status = 'FAILED'`},
		{name: "running", before: set + `status = 'RUNNING', finished_at = NULL`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "unknown", before: set + `status = 'PAUSED'`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "pruned", first: errBroken, before: set + `pruned_at = now()`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "pending", first: errBroken, before: set + `approved_at = now(), approved_attempt = attempt, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "void-by-attempt", first: errBroken, before: set + `approved_at = now(), approved_attempt = attempt - 1, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at`},
		{name: "void-by-status", first: errBroken, before: set + `approved_at = now(), approved_attempt = attempt, approved_status = 'SKIPPED', approved_worker = worker_id, approved_finished_at = finished_at`},
		{name: "stale-status", first: errBroken, after: set + `status = 'SKIPPED'`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-attempt", first: errBroken, after: set + `attempt = 2`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-token", first: errBroken, after: set + `token = gen_random_uuid()`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-no-token", first: errBroken, after: set + `token = NULL`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-worker", first: errBroken, after: set + `worker_id = 'node-2'`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-start", first: errBroken, after: set + `started_at = started_at + interval '1 us'`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "stale-pruned", first: errBroken, after: set + `pruned_at = now()`, want: jobrun.ErrConflict, forced: jobrun.ErrConflict},
		{name: "deleted", first: errBroken, after: `DELETE FROM batch_job_run`, want: jobrun.ErrNotFound, forced: jobrun.ErrNotFound},
	} {
		for _, a := range []jobrun.Action{operator, forced} {
			job := jobrun.Job{Name: fmt.Sprintf("%s-%t", c.name, a.Force), Func: func(context.Context, *jobrun.Run) error { return c.first }}
			key, want := job.Key(date), c.want
			if a.Force {
				want = c.forced
			}
			_, _ = r.RunDate(t.Context(), job, date)
			if c.before != "" {
				exec(t, db.Pool, c.before+` WHERE job_key = $1`, key)
			}
			seen := recordOf(t, r, key)
			if c.after != "" {
				exec(t, db.Pool, c.after+` WHERE job_key = $1`, key)
			}
			stored := everything(t, db.Pool, key)
			rec, err := r.ApproveRerun(t.Context(), seen, a)
			if want != nil {
				if !errors.Is(err, want) || errors.Is(err, jobrun.ErrConflict) && rec != recordOf(t, r, key) {
					t.Errorf("%s: %+v, %v, want %v", key, rec, err, want)
				}
				if now := everything(t, db.Pool, key); now != stored {
					t.Errorf("%s: it was\n%s\nand is\n%s", key, stored, now)
				}
				continue
			}
			if err != nil || rec.ApprovedAt.IsZero() || rec.Status != seen.Status || rec.Attempt != seen.Attempt || rec.Error != seen.Error || rec != recordOf(t, r, key) {
				t.Errorf("%s: %+v, %v", key, rec, err)
			}
			job, executions := countingJob(job.Name)
			for _, decision := range []jobrun.Decision{jobrun.Ran, jobrun.AlreadySucceeded} {
				if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != decision || res.Record.Attempt != 2 || res.Record.Trigger != jobrun.TriggerRerun || executions.Load() != 1 {
					t.Errorf("%s: %+v, %v", key, res, err)
				}
			}
			history, err := r.History(t.Context(), key)
			if err != nil || len(history) != 3 || history[0].Outcome != firstOutcome(c.first) || *history[1].Action != a || history[1].Previous != seen.Status || history[1].At.Before(history[0].At) || history[2].Outcome != jobrun.Succeeded {
				t.Errorf("%s: %+v, %v", key, history, err)
			}
		}
	}
}

// firstOutcome is how an attempt that returned err ended.
func firstOutcome(err error) jobrun.Status {
	switch {
	case err == nil:
		return jobrun.Succeeded
	case errors.Is(err, errBroken):
		return jobrun.Failed
	}
	return jobrun.Skipped
}

func TestTenApprovalsAtOnceAreOne(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	runners := []*jobrun.Runner{newRunner(t, db.Pool, jobrun.Options{}), newRunner(t, db.PoolWith(t, nil), jobrun.Options{})}
	for round := range 20 {
		job, executions := countingJob(fmt.Sprintf("nightly-%d", round))
		first, err := runners[0].RunDate(t.Context(), job, date)
		if err != nil {
			t.Fatal(err)
		}
		var approved atomic.Int64
		start := make(chan struct{})
		var wg sync.WaitGroup
		for g := range 10 {
			wg.Go(func() {
				<-start
				switch _, err := runners[g%2].ApproveRerun(context.Background(), first.Record, forced); {
				case err == nil:
					approved.Add(1)
				case !errors.Is(err, jobrun.ErrConflict):
					t.Error(err)
				}
			})
		}
		close(start)
		wg.Wait()
		actions := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_action WHERE job_key = $1`, job.Key(date))
		if approved.Load() != 1 || actions != 1 {
			t.Fatalf("round %d: %d approvals, %d noted", round, approved.Load(), actions)
		}
		for range 3 {
			_, _ = runners[1].RunDate(t.Context(), job, date)
		}
		if executions.Load() != 2 {
			t.Errorf("round %d: executed %d times", round, executions.Load())
		}
	}
}

// An approval is for what the person saw. When another program changes the status, the run is not executed, also not
// as a retry: what was to follow an attempt of ours does not follow another program's.
func TestApprovalIsVoidWhenANeighbourChangesTheStatus(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for i, c := range []struct {
		first error
		sql   string
		want  jobrun.Decision
	}{
		{errBroken, `status = 'SUCCEEDED'`, jobrun.AlreadySucceeded},
		{errBroken, `status = 'SKIPPED'`, jobrun.AlreadySkipped},
		{errBroken, `status = 'RUNNING', finished_at = NULL`, jobrun.AlreadyRunning},
		{errBroken, `status = 'PAUSED'`, jobrun.UnknownStatus},
		{nil, `status = 'FAILED'`, jobrun.AlreadyFailed},
		{jobrun.SkipRun("a holiday"), `status = 'FAILED'`, jobrun.AlreadyFailed},
		{nil, `status = 'FAILED', next_attempt_at = now() + interval '1 hour'`, jobrun.AlreadyFailed},
		{nil, `status = 'FAILED', next_attempt_at = now()`, jobrun.AlreadyFailed},
	} {
		job := jobrun.Job{Name: fmt.Sprintf("nightly-%d", i), Func: func(context.Context, *jobrun.Run) error { return c.first }}
		res, _ := r.RunDate(t.Context(), job, date)
		if _, err := r.ApproveRerun(t.Context(), res.Record, forced); err != nil {
			t.Fatal(err)
		}
		exec(t, db.Pool, `UPDATE batch_job_run SET `+c.sql+` WHERE job_key = $1`, job.Key(date))
		if rec := recordOf(t, r, job.Key(date)); !rec.ApprovedAt.IsZero() {
			t.Errorf("%s: the approval still counts: %+v", c.sql, rec)
		}
		job, executions := countingJob(job.Name)
		all, err := r.RetryDue(t.Context(), job)
		res, again := r.RunDate(t.Context(), job, date)
		if err != nil || len(all) != 0 || again != nil || res.Decision != c.want || executions.Load() != 0 {
			t.Errorf("%s: %+v, %v, %+v, %v", c.sql, all, err, res, again)
		}
	}
}

func TestInvalidActionsAreRefusedBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	pool, tries := deadPool(t, 2)
	r := newRunner(t, pool, jobrun.Options{OnEvent: func(context.Context, jobrun.Event) { t.Error("an event") }})
	rec := jobrun.Record{Key: "daily:2026-09-15", Status: jobrun.Failed, Attempt: 1}
	refused := func(what, field, value string, err error) {
		t.Helper()
		var invalid *jobrun.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != field || invalid.Value != value || len(err.Error()) > 1000 {
			t.Errorf("%s: %.300v", what, err)
		}
	}
	for name, act := range actions {
		for _, bad := range []string{"", " ", "\t\r\n", "\u3000\u00a0", "a\x00b", "bad\xf8utf", "\xed\xa0\x80", strings.Repeat("a", 2001), strings.Repeat("한", 667)} {
			_, err := act(r, t.Context(), rec, jobrun.Action{By: bad, Reason: "a reason", Force: true})
			refused(name, "Action.By", bad, err)
			_, err = act(r, t.Context(), rec, jobrun.Action{By: "operator", Reason: bad, Force: true})
			refused(name, "Action.Reason", bad, err)
		}
		_, err := act(r, t.Context(), rec, jobrun.Action{})
		refused(name, "Action.By", "", err)
	}
	for _, bad := range []string{
		"", ":", "daily", "daily:", ":2026-09-15", "daily:2026-02-30", "daily:2026-9-15", "daily:2026-09-15 ", " daily:2026-09-15", "da ily:2026-09-15",
		"daily:20260915", "daily:2026-09-15T13:00", "daily:2026-09-15T25:00+09:00", "daily:2026-09-15:1", "daily\x00:2026-09-15", "dai\xffly:2026-09-15",
		strings.Repeat("a", 81) + ":2026-09-15",
	} {
		_, err := r.Skip(t.Context(), bad, operator)
		refused("SKIP", "key", bad, err)
	}
	if tries.Load() != 0 {
		t.Errorf("%d connections", tries.Load())
	}
}

func TestLongestActionIsStoredWhole(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	a := jobrun.Action{By: strings.Repeat("한", 666) + "ab", Reason: "r\n" + strings.Repeat("'\"\\", 666)}
	const key = "daily:2026-09-15"
	dead(t, db.Pool, key)
	rec, err := r.MarkFailed(t.Context(), recordOf(t, r, key), a)
	if err != nil || rec.Error != "marked failed by "+a.By+": "+a.Reason || rec != recordOf(t, r, key) {
		t.Fatalf("%+v, %v", rec, err)
	}
	if history, err := r.History(t.Context(), key); err != nil || len(history) != 2 || *history[1].Action != a {
		t.Errorf("%+v, %v", history, err)
	}
}

func TestSkipOnlyWhatIsNotAboutToHappen(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, c := range []struct {
		name, status, change string
		want                 error
	}{
		{"failed", "FAILED", ``, nil},
		{"failed-retry-later", "FAILED", `next_attempt_at = now() + interval '1 hour'`, nil},
		{"failed-due", "FAILED", `next_attempt_at = now()`, nil},
		{"failed-void-approval", "FAILED", `approved_at = now(), approved_attempt = attempt, approved_status = 'SUCCEEDED', approved_worker = worker_id, approved_finished_at = finished_at`, nil},
		{"failed-approved", "FAILED", `approved_at = now(), approved_attempt = attempt, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at`, jobrun.ErrConflict},
		{"failed-pruned", "FAILED", `pruned_at = now()`, jobrun.ErrConflict},
		{"running", "RUNNING", ``, jobrun.ErrConflict},
		{"succeeded", "SUCCEEDED", ``, jobrun.ErrConflict},
		{"skipped", "SKIPPED", ``, jobrun.ErrConflict},
		{"unknown", "PAUSED", ``, jobrun.ErrConflict},
	} {
		for _, a := range []jobrun.Action{operator, forced} {
			job, executions := countingJob(fmt.Sprintf("%s-%t", c.name, a.Force))
			key := job.Key(date)
			dead(t, db.Pool, key)
			exec(t, db.Pool, `UPDATE batch_job_run SET status = $2, error_message = 'before' WHERE job_key = $1`, key, c.status)
			if c.change != "" {
				exec(t, db.Pool, `UPDATE batch_job_run SET `+c.change+` WHERE job_key = $1`, key)
			}
			stored := everything(t, db.Pool, key)
			rec, err := r.Skip(t.Context(), key, a)
			if c.want != nil {
				if now := everything(t, db.Pool, key); !errors.Is(err, c.want) || now != stored {
					t.Errorf("%s: %v; it was\n%s\nand is\n%s", key, err, stored, now)
				}
				continue
			}
			if err != nil || rec.Status != jobrun.Skipped || rec.Attempt != 1 || rec.Error != "skipped by operator: "+operator.Reason || rec.FinishedAt.IsZero() || !rec.NextAttemptAt.IsZero() || rec != recordOf(t, r, key) {
				t.Errorf("%s: %+v, %v", key, rec, err)
			}
			if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadySkipped || executions.Load() != 0 {
				t.Errorf("%s: %+v, %v", key, res, err)
			}
			if all, err := r.RetryDue(t.Context(), job); err != nil || len(all) != 0 {
				t.Errorf("%s: %+v, %v", key, all, err)
			}
			history, err := r.History(t.Context(), key)
			if err != nil || len(history) != 2 || history[0].Outcome != jobrun.Failed || !strings.HasSuffix(history[0].Error, "before") || history[1].Kind != "SKIP" || history[1].Previous != jobrun.Failed || *history[1].Action != a {
				t.Errorf("%s: %+v, %v", key, history, err)
			}
		}
	}
	// There is no run yet.
	for _, key := range []string{"daily:2026-09-15", "정산/일별:2026-09-15", strings.Repeat("한", 80) + ":9999-12-31", "hourly:2026-09-15T13:00+09:00"} {
		rec, err := r.Skip(t.Context(), key, operator)
		if err != nil || rec.Status != jobrun.Skipped || rec.Attempt != 0 || rec.Trigger != "" || rec.FinishedAt.IsZero() || !strings.HasPrefix(key, rec.Job+":"+rec.Date.String()) || rec != recordOf(t, r, key) {
			t.Errorf("%s: %+v, %v", key, rec, err)
		}
		if _, err := r.Skip(t.Context(), key, operator); !errors.Is(err, jobrun.ErrConflict) {
			t.Errorf("%s: a second time: %v", key, err)
		}
	}
	job, executions := countingJob("daily")
	hourly := job
	hourly.Name, hourly.Every = "hourly", time.Hour
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadySkipped || executions.Load() != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if res, err := r.RunTrigger(t.Context(), hourly, time.Date(2026, 9, 15, 13, 59, 0, 0, seoul)); err != nil || res.Decision != jobrun.AlreadySkipped || executions.Load() != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, "daily:2026-09-15"), operator); err != nil {
		t.Fatal(err)
	}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || !res.Ran() || res.Record.Attempt != 1 || res.Record.Trigger != jobrun.TriggerRerun || executions.Load() != 1 {
		t.Errorf("after all: %+v, %v", res, err)
	}
	// A key whose row was deleted does not start anew, whoever comes first.
	exec(t, db.Pool, `DELETE FROM batch_job_run WHERE job_key = 'daily:2026-09-15'`)
	if rec, err := r.Skip(t.Context(), "daily:2026-09-15", operator); err != nil || rec.Attempt != 1 || rec.Status != jobrun.Skipped {
		t.Errorf("after a deletion: %+v, %v", rec, err)
	}
}

func TestSkipAgainstTheClaim(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	operators := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	var d duel
	for round := range 100 {
		job, executions := countingJob(fmt.Sprintf("daily-%d", round))
		var res jobrun.Result
		var runErr, skipErr error
		d.fight([2]func(){
			func() { res, runErr = r.RunDate(context.Background(), job, date) },
			func() { _, skipErr = operators.Skip(context.Background(), job.Key(date), operator) },
		}, func() int {
			if skipErr == nil {
				return 1
			}
			return 0
		})
		now := recordOf(t, r, job.Key(date))
		switch {
		case runErr != nil:
			t.Errorf("round %d: %v", round, runErr)
		case skipErr == nil:
			if res.Decision != jobrun.AlreadySkipped || executions.Load() != 0 || now.Status != jobrun.Skipped || now.Attempt != 0 || rowsOf(t, db.Pool, job.Key(date)) != [2]int{1, 0} {
				t.Errorf("round %d, skipped: %+v, executed %d times, %+v", round, res, executions.Load(), now)
			}
		case !errors.Is(skipErr, jobrun.ErrConflict) || !res.Ran() || executions.Load() != 1 || now.Status != jobrun.Succeeded || rowsOf(t, db.Pool, job.Key(date)) != [2]int{1, 1}:
			t.Errorf("round %d, claimed: %+v, executed %d times, %+v, %v", round, res, executions.Load(), now, skipErr)
		}
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_action`); n != d.wins[1] || d.wins[0] < 10 || d.wins[1] < 10 {
		t.Errorf("both orders must happen: %v, %d noted", d.wins, n)
	}
}

// step is one action of a run's life, on the run as the steps before have left it.
type step struct {
	kind, text string // text: what stands in the statement of this action only
	after      jobrun.Status
	prepare    func(t *testing.T, pool *pgxpool.Pool, r *jobrun.Runner, key string)
}

var steps = []step{
	{"SKIP", "::text, 'skipped', now(), now(),", jobrun.Skipped, func(*testing.T, *pgxpool.Pool, *jobrun.Runner, string) {}},
	{"APPROVE_RERUN", "approved_at = act.now, approved_attempt = r.attempt", jobrun.Skipped, func(*testing.T, *pgxpool.Pool, *jobrun.Runner, string) {}},
	{"MARK_FAILED", "'person' as ended_by", jobrun.Failed, func(t *testing.T, pool *pgxpool.Pool, r *jobrun.Runner, key string) {
		exec(t, pool, `DELETE FROM batch_job_run WHERE job_key = $1`, key)
		dead(t, pool, key)
	}},
	{"SKIP", "set status = 'skipped'", jobrun.Skipped, func(*testing.T, *pgxpool.Pool, *jobrun.Runner, string) {}},
	{"APPROVE_RERUN", "approved_at = act.now, approved_attempt = r.attempt", jobrun.Succeeded, func(t *testing.T, pool *pgxpool.Pool, _ *jobrun.Runner, key string) {
		exec(t, pool, `UPDATE batch_job_run SET status = 'SUCCEEDED', error_message = NULL WHERE job_key = $1`, key)
	}},
}

// TestActionsTellWhatTheyDid: the record, the event, the history and the log line agree with the row, also when an
// answer is lost.
func TestActionsTellWhatTheyDid(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, arm := range map[string]func(*pgtest.Proxy, string){
		"answered":     nil,
		"executed":     (*pgtest.Proxy).CutAfter,
		"not-executed": (*pgtest.Proxy).CutBefore,
		"both":         func(p *pgtest.Proxy, text string) { p.CutBefore(text); p.CutAfter(text) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var events []jobrun.Event
			logger, text := logged()
			p, r := proxied(t, db, jobrun.Options{Logger: logger, OnEvent: func(_ context.Context, e jobrun.Event) { events = append(events, e) }})
			key := name + ":2026-09-15"
			var before []jobrun.HistoryEntry
			for i, s := range steps {
				s.prepare(t, db.Pool, r, key)
				seen := jobrun.Record{Key: key}
				if i > 0 {
					seen = recordOf(t, r, key)
				}
				if arm != nil {
					arm(p, s.text)
				}
				cuts := p.Cuts()
				a := jobrun.Action{By: "operator", Reason: fmt.Sprintf("reason %d", i), Force: i%2 == 0}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				rec, err := actions[s.kind](r, ctx, seen, a)
				cancel()
				if err != nil || rec.Status != s.after || rec != recordOf(t, r, key) {
					t.Fatalf("step %d: %+v, %v", i, rec, err)
				}
				if arm != nil && p.Cuts() == cuts {
					t.Errorf("step %d: nothing was cut", i)
				}
				if len(events) != i+1 || events[i].Record != rec || events[i].Previous != seen.Status || events[i].Err != nil || events[i].Action == nil || *events[i].Action != a {
					t.Errorf("step %d: events %+v", i, events)
				}
				told := text.lines("level=INFO", "a person changed the run", "job_key="+key)
				if len(told) != i+1 || !strings.Contains(told[i], "action="+s.kind) || !strings.Contains(told[i], "status="+string(s.after)) {
					t.Errorf("step %d: logged %q", i, told)
				}
				history, err := r.History(t.Context(), key)
				if err != nil {
					t.Fatal(err)
				}
				var noted []jobrun.HistoryEntry
				for _, e := range history {
					if e.Action != nil {
						noted = append(noted, e)
					}
				}
				if len(noted) != i+1 {
					t.Fatalf("step %d: %d actions in %+v", i, len(noted), history)
				}
				if e := noted[i]; e.Kind != s.kind || *e.Action != a || e.Previous != seen.Status || e.Attempt != rec.Attempt || e.At.IsZero() {
					t.Errorf("step %d: %+v", i, e)
				}
				for j, e := range before {
					if *noted[j].Action != *e.Action || noted[j].At != e.At || noted[j].Kind != e.Kind {
						t.Errorf("step %d: the old entry is now %+v, was %+v", i, noted[j], e)
					}
				}
				before = noted
			}
			if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_action WHERE job_key = $1`, key); n != len(steps) {
				t.Errorf("%d actions noted", n)
			}
		})
	}
}

// recipe is the least that each kind of role needs: one that runs jobs, one that people act by, and one that only reads.
const recipe = `
GRANT USAGE ON SCHEMA public TO settlement_service, settlement_operator, settlement_reader;
GRANT SELECT ON batch_job_run, batch_job_attempt, batch_job_action TO settlement_service, settlement_operator, settlement_reader;
GRANT SELECT ON batch_job_migration TO settlement_service;
GRANT INSERT, UPDATE ON batch_job_run, batch_job_attempt TO settlement_service, settlement_operator;
GRANT SELECT, INSERT ON batch_job_item TO settlement_service;
GRANT SELECT, INSERT, UPDATE ON batch_job_item_failure, batch_job_checkpoint TO settlement_service;
GRANT SELECT ON batch_job_item, batch_job_item_failure TO settlement_operator, settlement_reader;
GRANT INSERT ON batch_job_action TO settlement_operator;
`

// TestRolesCanDoWhatTheyAreGranted: each grant of the recipe is needed, and none is missing.
func TestRolesCanDoWhatTheyAreGranted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `REVOKE ALL ON SCHEMA public FROM PUBLIC`)
	grants := recipe
	roles, pools := map[string]string{}, map[string]*pgxpool.Pool{}
	for _, name := range []string{"settlement_service", "settlement_operator", "settlement_reader"} {
		role, url := db.Role(t, "")
		roles[name] = role
		pools[name] = db.PoolWith(t, func(c *pgxpool.Config) { *c = *mustParse(t, url) })
		grants = strings.ReplaceAll(grants, name, role)
	}
	exec(t, db.Pool, grants)
	events := 0
	runner := func(name string) *jobrun.Runner {
		return newRunner(t, pools[name], jobrun.Options{Schema: "public", OnEvent: func(context.Context, jobrun.Event) { events++ }})
	}
	number := 0
	fresh := func() string { number++; return fmt.Sprintf("daily-%d", number) }
	run := func(r *jobrun.Runner) error {
		fails, executions := failsWith(fresh(), errBroken, jobrun.Retry{MaxAttempts: 2, Backoff: atOnce})
		if _, err := r.RunDate(t.Context(), fails, date); !errors.Is(err, errBroken) {
			return err
		}
		if _, err := r.RetryDue(t.Context(), fails); !errors.Is(err, errBroken) || executions.Load() != 2 {
			return err
		}
		_, err := r.RunTrigger(t.Context(), jobrun.Job{Name: fresh(), Func: fails.Func, Calendar: func(jobrun.Date) bool { return false }}, time.Now())
		return err
	}
	read := func(r *jobrun.Runner) error {
		job, _ := countingJob("daily-0")
		_, errGet := r.Get(t.Context(), job.Key(date))
		_, errList := r.List(t.Context(), jobrun.Filter{})
		_, errHistory := r.History(t.Context(), job.Key(date))
		_, errStale := r.Stale(t.Context())
		_, errAttention := r.Attention(t.Context(), nil, job)
		_, errMissed := r.Missed(t.Context(), job, date, date)
		_, errItems := r.FailedItems(t.Context(), job.Key(date), "", 10)
		return errors.Join(errGet, errList, errHistory, errStale, errAttention, errMissed, errItems)
	}
	act := func(r *jobrun.Runner) error {
		key := fresh() + ":2026-09-15"
		dead(t, db.Pool, key)
		rec, err := r.MarkFailed(t.Context(), recordOf(t, newRunner(t, db.Pool, jobrun.Options{}), key), operator)
		if err == nil {
			_, err = r.Skip(t.Context(), key, operator)
		}
		if err == nil {
			rec, err = r.Skip(t.Context(), fresh()+":2026-09-15", operator)
		}
		if err == nil {
			_, err = r.ApproveRerun(t.Context(), rec, operator)
		}
		return err
	}
	able := map[string]func(r *jobrun.Runner) error{
		"settlement_service": func(r *jobrun.Runner) error {
			return errors.Join(run(r), read(r), r.Verify(t.Context()), r.Migrate(t.Context()))
		},
		"settlement_operator": func(r *jobrun.Runner) error { return errors.Join(run(r), read(r), act(r)) },
		"settlement_reader":   read,
	}
	dead(t, db.Pool, "daily-0:2026-09-15")
	for name, can := range able {
		if err := can(runner(name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Everything else is refused, and changes nothing.
	denied := func(what string, err error) {
		t.Helper()
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: %v, want 42501", what, err)
		}
	}
	const whole = `SELECT concat_ws(E'\n', (SELECT string_agg(concat_ws(' ', r.ctid, r.xmin, r), E'\n' ORDER BY job_key) FROM batch_job_run AS r),
		(SELECT string_agg(concat_ws(' ', a.ctid, a.xmin, a), E'\n' ORDER BY job_key, attempt) FROM batch_job_attempt AS a), (SELECT count(*) FROM batch_job_action))`
	ready, _ := failsWith("due", errBroken, jobrun.Retry{MaxAttempts: 2, Backoff: atOnce})
	if _, err := newRunner(t, db.Pool, jobrun.Options{}).RunDate(t.Context(), ready, date); !errors.Is(err, errBroken) {
		t.Fatal(err)
	}
	stored, before := query[string](t, db.Pool, whole), events
	for _, name := range []string{"settlement_service", "settlement_reader"} {
		r := runner(name)
		_, err := r.MarkFailed(t.Context(), recordOf(t, r, "daily-0:2026-09-15"), forced)
		denied(name+": MarkFailed", err)
		_, err = r.ApproveRerun(t.Context(), recordOf(t, r, "due:2026-09-15"), forced)
		denied(name+": ApproveRerun", err)
		_, err = r.Skip(t.Context(), "due:2026-09-15", operator)
		denied(name+": Skip", err)
		_, err = r.Skip(t.Context(), "new:2026-09-15", operator)
		denied(name+": Skip of a new key", err)
		_, err = r.Prune(t.Context(), date.AddDays(1))
		denied(name+": Prune", err)
	}
	r := runner("settlement_reader")
	_, err := r.RunDate(t.Context(), ready, date)
	denied("claim of a due run by the reader", err)
	_, err = r.RetryDue(t.Context(), ready)
	denied("RetryDue by the reader", err)
	_, err = r.RunDate(t.Context(), jobrun.Job{Name: "new", Func: ready.Func}, date)
	denied("claim of a new key by the reader", err)
	for _, sql := range []string{`UPDATE batch_job_action SET reason = ''`, `DELETE FROM batch_job_action`, `TRUNCATE batch_job_action`} {
		for name, pool := range pools {
			_, err := pool.Exec(t.Context(), sql)
			denied(name+": "+sql, err)
		}
	}
	if now := query[string](t, db.Pool, whole); now != stored || events != before {
		t.Errorf("%d events; it was\n%s\nand is\n%s", events-before, stored, now)
	}
	// Without any one of the grants something is missing.
	tried := 0
	for _, statement := range strings.Split(strings.TrimSpace(recipe), "\n") {
		what, whom, _ := strings.Cut(strings.TrimSuffix(statement, ";"), " TO ")
		privileges, on, _ := strings.Cut(strings.TrimPrefix(what, "GRANT "), " ON ")
		for _, name := range strings.Split(whom, ", ") {
			for _, privilege := range strings.Split(privileges, ", ") {
				for _, table := range strings.Split(on, ", ") {
					tried++
					exec(t, db.Pool, fmt.Sprintf(`REVOKE %s ON %s FROM %s`, privilege, table, roles[name]))
					if err := able[name](runner(name)); err == nil {
						t.Errorf("%s does not need %s ON %s", name, privilege, table)
					}
					exec(t, db.Pool, fmt.Sprintf(`GRANT %s ON %s TO %s`, privilege, table, roles[name]))
				}
			}
		}
	}
	if tried != 34 {
		t.Errorf("%d grants tried", tried)
	}
	// Prune takes more.
	exec(t, db.Pool, `GRANT SELECT, DELETE ON batch_job_run, batch_job_attempt, batch_job_item, batch_job_item_failure, batch_job_checkpoint TO `+roles["settlement_operator"])
	if n, err := runner("settlement_operator").Prune(t.Context(), date.AddDays(1)); err != nil || n == 0 {
		t.Errorf("Prune: %d, %v", n, err)
	}
}

// A person who has looked at a run skips that run, and no later state of it.
func TestSkipSeenActsOnWhatWasSeen(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing")
	job := jobrun.Job{Name: "settlement", Func: func(context.Context, *jobrun.Run) error { return failure }}
	operator := jobrun.Action{By: "kim", Reason: "no trading"}
	none := jobrun.Record{Key: job.Key(date)}
	if _, err := r.RunDate(t.Context(), job, date); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	if now, err := r.SkipSeen(t.Context(), none, operator); !errors.Is(err, jobrun.ErrConflict) || now.Status != jobrun.Failed {
		t.Errorf("there was no run when it was seen: %+v, %v", now, err)
	}
	seen, err := r.Get(t.Context(), none.Key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ApproveRerun(t.Context(), seen, operator); err != nil {
		t.Fatal(err)
	}
	if _, err := r.RunDate(t.Context(), job, date); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	if now, err := r.SkipSeen(t.Context(), seen, operator); !errors.Is(err, jobrun.ErrConflict) || now.Attempt != 2 || now.Status != jobrun.Failed {
		t.Errorf("it has failed again since it was seen: %+v, %v", now, err)
	}
	if seen, err = r.Get(t.Context(), none.Key); err != nil {
		t.Fatal(err)
	}
	if now, err := r.SkipSeen(t.Context(), seen, operator); err != nil || now.Status != jobrun.Skipped {
		t.Errorf("%+v, %v", now, err)
	}
	if now, err := r.SkipSeen(t.Context(), jobrun.Record{Key: job.Key(date.AddDays(1))}, operator); err != nil || now.Status != jobrun.Skipped || now.Attempt != 0 {
		t.Errorf("%+v, %v", now, err)
	}
	// Another program's run under a key that no job can have is somebody's to end, too.
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id) VALUES ('no key', 'FAILED', now(), 'node-1')`)
	if seen, err = r.Get(t.Context(), "no key"); err != nil {
		t.Fatal(err)
	}
	if now, err := r.SkipSeen(t.Context(), seen, operator); err != nil || now.Status != jobrun.Skipped {
		t.Errorf("%+v, %v", now, err)
	}
	var invalid *jobrun.InvalidError
	if _, err := r.SkipSeen(t.Context(), jobrun.Record{Key: "no such key"}, operator); !errors.As(err, &invalid) {
		t.Error(err)
	}
}
