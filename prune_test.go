package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// prune expects this many runs to be pruned.
func prune(t testing.TB, r *jobrun.Runner, before string, want int64) {
	t.Helper()
	if n, err := r.Prune(t.Context(), jobrun.MustParseDate(before)); err != nil || n != want {
		t.Errorf("prune before %s: %d, %v; want %d", before, n, err, want)
	}
}

// oldRuns makes n runs of a job that have SUCCEEDED, with an attempt each.
func oldRuns(t testing.TB, pool *pgxpool.Pool, job string, n int) {
	t.Helper()
	exec(t, pool, `WITH run AS (
		INSERT INTO batch_job_run (job_key, status, worker_id, job_name, business_date, token, finished_at)
		SELECT $1 || ':' || ('2010-01-01'::date + n), 'SUCCEEDED', 'node-1', $1, '2010-01-01'::date + n, gen_random_uuid(), now() FROM generate_series(1, $2) AS n RETURNING *)
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, finished_at, outcome, ended_by)
		SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, finished_at, status, 'WORKER' FROM run`, job, n)
}

// theRest is every row of the tables whose key is none of those, with its place
// and writer: equal texts mean that nobody wrote to it.
func theRest(t testing.TB, pool *pgxpool.Pool, without ...string) string {
	t.Helper()
	if without == nil {
		without = []string{}
	}
	return query[string](t, pool, `SELECT
		coalesce((SELECT string_agg(concat_ws(' ', r.ctid, r.xmin, r), E'\n' ORDER BY r.job_key) FROM batch_job_run AS r WHERE r.job_key <> ALL ($1)), '') || E'\n' ||
		coalesce((SELECT string_agg(concat_ws(' ', a.ctid, a.xmin, a), E'\n' ORDER BY a.job_key, a.attempt) FROM batch_job_attempt AS a WHERE a.job_key <> ALL ($1)), '') || E'\n' ||
		coalesce((SELECT string_agg(concat_ws(' ', p.ctid, p.xmin, p), E'\n' ORDER BY p.id) FROM batch_job_action AS p), '')`, without)
}

func TestPruneRemovesTheHistoryAndKeepsTheGuard(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const runs = 1203 // more than two batches
	oldRuns(t, db.Pool, "daily", runs)
	sum := `SELECT md5(string_agg(concat_ws(' ', job_key, status, started_at, finished_at, worker_id, attempt, executions, token, business_date), ',' ORDER BY job_key)) FROM batch_job_run`
	before := query[string](t, db.Pool, sum)
	prune(t, r, "2010-01-02", 0) // the date itself is not before
	prune(t, r, "2010-01-05", 3)
	prune(t, r, "2020-01-01", runs-3)
	prune(t, r, "2020-01-01", 0)
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt`); n != 0 {
		t.Errorf("%d attempts", n)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_run WHERE pruned_at > now() - interval '1 min'`); n != runs {
		t.Errorf("%d rows are marked", n)
	}
	if after := query[string](t, db.Pool, sum); after != before {
		t.Error("more than the mark has changed")
	}
	rec, err := r.Get(t.Context(), "daily:2010-01-02")
	if err != nil || rec.Status != jobrun.Succeeded || rec.PrunedAt.IsZero() || rec.Attempt != 1 {
		t.Errorf("%+v, %v", rec, err)
	}
	if entries, err := r.History(t.Context(), rec.Key); err != nil || len(entries) != 1 || entries[0].Outcome != jobrun.Succeeded {
		t.Errorf("history: %+v, %v", entries, err)
	}
	job, _ := countingJob("daily")
	missed, err := r.Missed(t.Context(), job, jobrun.MustParseDate("2010-01-02"), jobrun.MustParseDate("2012-01-01"))
	sameDates(t, "missed", missed, err)
}

func TestPruneTouchesOnlyWhatHasEnded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	before := date.AddDays(1).String()
	end := func(name string, d jobrun.Date, err error, retry jobrun.Retry) jobrun.Record {
		t.Helper()
		res, got := r.RunDate(t.Context(), jobrun.Job{Name: name, Retry: retry, Func: func(context.Context, *jobrun.Run) error { return err }}, d)
		if got != nil && !errors.Is(got, err) {
			t.Fatal(got)
		}
		return res.Record
	}
	approve := func(rec jobrun.Record) {
		t.Helper()
		if _, err := r.ApproveRerun(t.Context(), rec, jobrun.Action{By: "operator", Reason: "again", Force: true}); err != nil {
			t.Fatal(err)
		}
	}
	theirs := errors.New("no rates")
	// To be pruned.
	end("succeeded", date, nil, jobrun.Retry{})
	end("skipped", date, jobrun.SkipRun("no orders"), jobrun.Retry{})
	if _, err := r.Skip(t.Context(), "skipped-by-a-person:2026-09-15", operator); err != nil {
		t.Fatal(err)
	}
	approve(end("approval-void", date, nil, jobrun.Retry{}))
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'SKIPPED' WHERE job_name = 'approval-void'`)
	pruned := []string{"succeeded:2026-09-15", "skipped:2026-09-15", "skipped-by-a-person:2026-09-15", "approval-void:2026-09-15"}
	// To be left alone.
	end("failed", date, theirs, jobrun.Retry{}) // a person has not decided yet
	f := launch(t, t.Context(), r, jobrun.Job{Name: "running"})
	end("due", date, theirs, jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }})
	end("retrying", date, theirs, jobrun.Retry{MaxAttempts: 2})
	approve(end("approved", date, theirs, jobrun.Retry{}))
	approve(end("approved-skipped", date, jobrun.SkipRun("no orders"), jobrun.Retry{}))
	approve(end("approved-succeeded", date, nil, jobrun.Retry{}))
	end("later", date.AddDays(1), nil, jobrun.Retry{})
	paused := end("paused", date, nil, jobrun.Retry{})
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'PAUSED' WHERE job_key = $1`, paused.Key)
	for n, status := range []string{"RUNNING", "SUCCEEDED", "FAILED", "SKIPPED"} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, finished_at) VALUES ($1, $2, 'node-1', now())`, fmt.Sprintf("neighbour:2026-01-%02d", n+1), status)
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, finished_at) VALUES ('neighbour, without a date', 'SUCCEEDED', 'node-1', now())`)

	rest := theRest(t, db.Pool, pruned...)
	prune(t, r, before, int64(len(pruned)))
	prune(t, r, before, 0)
	if after := theRest(t, db.Pool, pruned...); after != rest {
		t.Errorf("other rows were written to:\n%s\n\n%s", rest, after)
	}
	for _, key := range pruned {
		if n := rowsOf(t, db.Pool, key); n != [2]int{1, 0} || !query[bool](t, db.Pool, `SELECT pruned_at IS NOT NULL AND approved_at IS NULL FROM batch_job_run WHERE job_key = $1`, key) {
			t.Errorf("%s: %v rows", key, n)
		}
	}
	f.succeeds(t, 1) // it was not even noticed
	prune(t, r, before, 1)
	if results, err := r.RetryDue(t.Context(), jobrun.Job{Name: "approved", Func: noop}, jobrun.Job{Name: "approved-succeeded", Func: noop}, jobrun.Job{Name: "due", Func: noop}); err != nil || len(results) != 3 {
		t.Errorf("after that: %+v, %v", results, err)
	}
}

// TestPruneRemovesSlotsWhole: a slot's time never comes again, so its row guards
// nothing.
func TestPruneRemovesSlotsWhole(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	hourly, _ := countingJob("hourly")
	hourly.Every = time.Hour
	for _, at := range []string{"2026-09-14T22:30:00+09:00", "2026-09-14T23:30:00+09:00", "2026-09-15T00:30:00+09:00"} {
		if _, err := r.RunTrigger(t.Context(), hourly, instant(at)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Skip(t.Context(), "hourly:2026-09-14T21:00+09:00", operator); err != nil {
		t.Fatal(err)
	}
	failing := hourly
	failing.Retry = jobrun.Retry{MaxAttempts: 2}
	failing.Func = func(context.Context, *jobrun.Run) error { return errors.New("no rates") }
	if _, err := r.RunTrigger(t.Context(), failing, instant("2026-09-14T20:30:00+09:00")); err == nil {
		t.Fatal("no error")
	}
	prune(t, r, "2026-09-15", 0) // a delayed trigger of these slots may still come
	exec(t, db.Pool, `UPDATE batch_job_run SET finished_at = finished_at - interval '25 hours'`)
	prune(t, r, "2026-09-15", 3)
	keys := query[[]string](t, db.Pool, `SELECT array_agg(job_key::text ORDER BY job_key COLLATE "C") FROM batch_job_run`)
	if strings.Join(keys, " ") != "hourly:2026-09-14T20:00+09:00 hourly:2026-09-15T00:00+09:00" {
		t.Errorf("left: %v", keys)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt`); n != 2 {
		t.Errorf("%d attempts", n)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_action`); n != 1 {
		t.Errorf("%d actions", n)
	}
}

func TestPruneRefusesADateAfterToday(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if _, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: noop}, date); err != nil {
		t.Fatal(err)
	}
	var invalid *jobrun.InvalidError
	if n, err := r.Prune(t.Context(), r.Today().AddDays(1)); !errors.As(err, &invalid) || n != 0 {
		t.Errorf("pruned %d, %v", n, err)
	}
}

func TestPrunedRunNeverRunsAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	force := jobrun.Action{By: "operator", Reason: "rates were wrong", Force: true}
	for name, c := range map[string]struct {
		err  error
		want jobrun.Decision
	}{
		"succeeded": {nil, jobrun.AlreadySucceeded},
		"skipped":   {jobrun.SkipRun("no orders"), jobrun.AlreadySkipped},
	} {
		job, executions := countingJob(name)
		job.Retry = jobrun.Retry{MaxAttempts: 9}
		first := job
		first.Retry = jobrun.Retry{}
		first.Func = func(context.Context, *jobrun.Run) error { return c.err }
		seen, _ := r.RunDate(t.Context(), first, date)
		prune(t, r, r.Today().String(), 1)
		row := rowAsStored(t, db.Pool, job.Key(date))
		refuse := func() {
			t.Helper()
			for what, call := range map[string]func() (jobrun.Result, error){
				"RunDate":    func() (jobrun.Result, error) { return r.RunDate(t.Context(), job, date) },
				"RunTrigger": func() (jobrun.Result, error) { return r.RunTrigger(t.Context(), job, instant("2026-09-15T01:00:00Z")) },
			} {
				if res, err := call(); err != nil || res.Decision != c.want || res.Record.PrunedAt.IsZero() {
					t.Errorf("%s, %s: %+v, %v", name, what, res, err)
				}
			}
			now, err := r.Get(t.Context(), job.Key(date))
			if err != nil {
				t.Fatal(err)
			}
			for _, rec := range []jobrun.Record{seen.Record, now} {
				for _, a := range []jobrun.Action{operator, force} {
					if _, err := r.ApproveRerun(t.Context(), rec, a); !errors.Is(err, jobrun.ErrConflict) {
						t.Errorf("%s, approve: %v", name, err)
					}
				}
				if _, err := r.MarkFailed(t.Context(), rec, force); !errors.Is(err, jobrun.ErrConflict) {
					t.Errorf("%s, mark failed: %v", name, err)
				}
			}
			if _, err := r.Skip(t.Context(), job.Key(date), force); !errors.Is(err, jobrun.ErrConflict) {
				t.Errorf("%s, skip: %v", name, err)
			}
			if results, err := r.RetryDue(t.Context(), job); err != nil || len(results) != 0 {
				t.Errorf("%s, RetryDue: %+v, %v", name, results, err)
			}
		}
		refuse()
		if now := rowAsStored(t, db.Pool, job.Key(date)); now != row {
			t.Errorf("%s was written to: %s\n%s", name, row, now)
		}
		demands(t, r, nil, nil) // nobody can do anything about it
		// Not even when another program makes it look due and approved.
		exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now(), approved_at = now(), approved_attempt = attempt, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at`)
		if refuse(); executions.Load() != 0 {
			t.Errorf("%s was executed", name)
		}
		exec(t, db.Pool, `DELETE FROM batch_job_run`)
	}
}

// TestPrunePassesOverLockedRuns: it waits neither for a run that somebody holds
// nor makes others wait, and takes the run the next time.
func TestPrunePassesOverLockedRuns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	oldRuns(t, db.Pool, "daily", 20)
	var sessions []pgx.Tx
	for _, lock := range []string{
		`SELECT FROM batch_job_run WHERE job_key = 'daily:2010-01-03' FOR SHARE`,
		`UPDATE batch_job_run SET error_message = 'mine' WHERE job_key = 'daily:2010-01-04'`,
	} {
		session, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, session)
		if _, err := session.Exec(t.Context(), lock); err != nil {
			t.Fatal(err)
		}
	}
	// With lock_timeout it would be an error if it waited.
	prune(t, r, "2020-01-01", 18)
	prune(t, r, "2020-01-01", 0)
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE job_key IN ('daily:2010-01-03', 'daily:2010-01-04')`); n != 2 {
		t.Errorf("%d attempts of the locked runs are left", n)
	}
	for _, session := range sessions {
		if err := session.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	prune(t, r, "2020-01-01", 2)
}

func TestConcurrentPrunesPruneEachRunOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const runs = 2100
	oldRuns(t, db.Pool, "daily", runs)
	before := jobrun.MustParseDate("2020-01-01")
	var total atomic.Int64
	start := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
		wg.Go(func() {
			<-start
			n, err := r.Prune(context.Background(), before)
			if err != nil {
				t.Error(err)
			}
			total.Add(n)
		})
	}
	close(start)
	wg.Wait()
	// What one passes over the other has locked, to prune it.
	if n := query[int64](t, db.Pool, `SELECT count(*) FROM batch_job_run WHERE pruned_at IS NOT NULL`); n != runs || total.Load() != runs {
		t.Errorf("%d are pruned, counted %d, of %d", n, total.Load(), runs)
	}
	prune(t, newRunner(t, db.Pool, jobrun.Options{}), "2020-01-01", 0)
}

func TestPruneRefusesInvalidDates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	oldRuns(t, db.Pool, "daily", 1)
	for _, d := range []jobrun.Date{{}, {Year: 2026, Month: 2, Day: 30}, {Year: 10000, Month: 1, Day: 1}, {Year: 2026, Month: 13, Day: 1}, {Year: -1, Month: 1, Day: 1}} {
		var invalid *jobrun.InvalidError
		if n, err := r.Prune(t.Context(), d); !errors.As(err, &invalid) || invalid.Field != "before" || n != 0 {
			t.Errorf("%s: %d, %v", d, n, err)
		}
	}
	if n := rowsOf(t, db.Pool, "daily:2010-01-02"); n != [2]int{1, 1} {
		t.Errorf("%v rows", n)
	}
}

// Items guard their effects: they go only with runs that can never run again, and
// what an interrupted call has left goes with the next one.
func TestPruneRemovesItemsOnlyOfRunsThatCannotRunAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	oldRuns(t, db.Pool, "daily", 3)
	exec(t, db.Pool, `
UPDATE batch_job_run SET status = 'FAILED' WHERE job_key = 'daily:2010-01-03';
UPDATE batch_job_run SET pruned_at = now() WHERE job_key = 'daily:2010-01-04'; -- interrupted there
INSERT INTO batch_job_run (job_key, status, worker_id, job_name, business_date, finished_at, pruned_at)
SELECT 'slots:2010-01-01T0' || n || ':00+09:00', 'SUCCEEDED', 'node-1', 'slots', '2010-01-01', '2010-01-01', CASE WHEN n = 2 THEN now() END FROM generate_series(1, 2) AS n;
INSERT INTO batch_job_item (job_key, item, attempt)
SELECT key, 'item-' || m, 1
FROM (VALUES ('daily:2010-01-02', 20500), ('daily:2010-01-03', 7), ('daily:2010-01-04', 5), ('daily:2010-01-05', 9),
  ('slots:2010-01-01T01:00+09:00', 3), ('slots:2010-01-01T02:00+09:00', 3), ('zz:2010-01-01', 1)) AS k (key, total), generate_series(1, total) AS m;
INSERT INTO batch_job_item_failure (job_key, item, attempt, error_message)
SELECT DISTINCT job_key, 'item-x', 1, 'declined' FROM batch_job_item;
INSERT INTO batch_job_checkpoint (job_key, attempt, value) SELECT job_key, 1, '1' FROM batch_job_run WHERE pruned_at IS NULL`)
	left := func() string {
		return query[string](t, db.Pool, `SELECT string_agg(concat_ws(' ', job_key, items, failures, checkpoints), ', ' ORDER BY job_key COLLATE "C") FROM (
			SELECT job_key, sum(i) AS items, sum(f) AS failures, sum(c) AS checkpoints FROM (
				SELECT job_key, 1 AS i, 0 AS f, 0 AS c FROM batch_job_item UNION ALL SELECT job_key, 0, 1, 0 FROM batch_job_item_failure
				UNION ALL SELECT job_key, 0, 0, 1 FROM batch_job_checkpoint) AS every GROUP BY job_key) AS sums`)
	}
	prune(t, r, "2010-01-03", 2) // daily:2010-01-02 and a slot; another slot and a date were marked before
	// daily:2010-01-05 has no run: somebody deleted its row, and a claim makes a new one.
	if got, want := left(), "daily:2010-01-03 7 1 1, daily:2010-01-05 9 1 0, zz:2010-01-01 1 1 0"; got != want {
		t.Errorf("left %s, want %s", got, want)
	}
	if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_run WHERE job_key LIKE 'slots%'`); n != 0 {
		t.Errorf("%d slots are left", n)
	}
	prune(t, r, "2010-01-03", 0)
	if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_run WHERE pruned_at IS NOT NULL`); n != 2 {
		t.Errorf("%d dates are marked", n)
	}
}

// Only a rehearsal can be discarded: every other row guards its date.
func TestDiscardRemovesRehearsalsAlone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	rehearsal := jobrun.Job{Name: jobrun.Rehearsal + "1", Func: func(context.Context, *jobrun.Run) error { return nil }}
	other := jobrun.Job{Name: "daily-settlement", Func: rehearsal.Func}
	for _, job := range []jobrun.Job{rehearsal, other} {
		if _, err := r.RunDate(t.Context(), job, date); err != nil {
			t.Fatal(err)
		}
	}
	var invalid *jobrun.InvalidError
	for _, key := range []string{other.Key(date), "", jobrun.Rehearsal + "1", jobrun.Rehearsal, "x" + rehearsal.Key(date), jobrun.Rehearsal + "1:2026-02-30"} {
		if err := r.Discard(t.Context(), key); !errors.As(err, &invalid) {
			t.Errorf("%q: %v", key, err)
		}
	}
	if err := r.Discard(t.Context(), rehearsal.Key(date)); err != nil {
		t.Fatal(err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE job_key = $1`, rehearsal.Key(date)); n != 0 {
		t.Errorf("%d attempts are left", n)
	}
	if err := r.Discard(t.Context(), rehearsal.Key(date)); !errors.Is(err, jobrun.ErrNotFound) {
		t.Errorf("again: %v", err)
	}
	if _, err := r.Get(t.Context(), other.Key(date)); err != nil {
		t.Error(err)
	}
	name, url := db.Role(t, "")
	exec(t, db.Pool, `GRANT USAGE ON SCHEMA public TO `+name+`; GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO `+name)
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := newRunner(t, pool, jobrun.Options{}).Discard(t.Context(), rehearsal.Key(date)); err == nil || !strings.Contains(err.Error(), "needs DELETE") {
		t.Errorf("without the privilege: %v", err)
	}
}
