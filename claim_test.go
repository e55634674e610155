package jobrun_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	osexec "os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// countingJob returns a job that only counts its executions.
func countingJob(name string) (jobrun.Job, *atomic.Int64) {
	n := new(atomic.Int64)
	return jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { n.Add(1); return nil }}, n
}

// rowAsStored is a run's row with its place and writer: equal texts mean that nobody wrote to it.
func rowAsStored(t testing.TB, pool *pgxpool.Pool, key string) string {
	t.Helper()
	return query[string](t, pool, `SELECT concat_ws(' ', r.ctid, r.xmin, r) FROM batch_job_run AS r WHERE job_key = $1`, key)
}

// rowsOf counts the rows of a key in batch_job_run and batch_job_attempt.
func rowsOf(t testing.TB, pool *pgxpool.Pool, key string) (n [2]int) {
	t.Helper()
	n[0] = query[int](t, pool, `SELECT count(*)::int FROM batch_job_run WHERE job_key = $1`, key)
	n[1] = query[int](t, pool, `SELECT count(*)::int FROM batch_job_attempt WHERE job_key = $1`, key)
	return n
}

// pollUntil asks again and again, for at most 20 s, and reports whether it came true.
func pollUntil(ctx context.Context, is func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// contend lets 50 goroutines call at one instant, in turn on each of the runners. Exactly one call may execute; it
// returns what that one got, and how the others were refused.
func contend(t *testing.T, runners []*jobrun.Runner, job jobrun.Job) (winner jobrun.Result, lost map[jobrun.Decision]int, err error) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	ran := 0
	lost = map[jobrun.Decision]int{}
	start := make(chan struct{})
	for g := range 50 {
		wg.Go(func() {
			<-start
			res, e := runners[g%len(runners)].RunDate(context.Background(), job, date)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case res.Ran():
				ran++
				winner, err = res, e
			case e != nil:
				t.Errorf("%s: a loser got an error: %v", job.Name, e)
			default:
				lost[res.Decision]++
			}
		})
	}
	close(start)
	wg.Wait()
	if ran != 1 {
		t.Fatalf("%s: %d of 50 calls executed, want 1; the others: %v", job.Name, ran, lost)
	}
	return winner, lost, err
}

// onlyDecisions fails the test if a call was refused for another reason.
func onlyDecisions(t *testing.T, name string, got map[jobrun.Decision]int, allowed ...jobrun.Decision) {
	t.Helper()
	total := 0
	for _, d := range allowed {
		total += got[d]
	}
	if total != 49 {
		t.Errorf("%s: refused %v, want 49 times one of %v", name, got, allowed)
	}
}

func fiveRunners(t *testing.T, db *pgtest.DB) (runners []*jobrun.Runner) {
	for range 5 {
		pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 })
		runners = append(runners, newRunner(t, pool, jobrun.Options{}))
	}
	return runners
}

func TestLateSecondNodeLoses(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	fired := time.Date(2026, 7, 27, 0, 10, 0, 0, seoul)
	job, executions := countingJob("daily")
	first, err := newRunner(t, db.Pool, jobrun.Options{Now: func() time.Time { return fired }}).Run(t.Context(), job)
	if err != nil || !first.Ran() || first.Record.Key != "daily:2026-07-27" {
		t.Fatalf("first node: %+v, %v", first, err)
	}
	stored := rowAsStored(t, db.Pool, first.Record.Key)
	for _, later := range []time.Duration{3 * time.Second, time.Hour, 23 * time.Hour} {
		now := fired.Add(later)
		r := newRunner(t, db.Pool, jobrun.Options{Now: func() time.Time { return now }})
		for name, call := range map[string]func() (jobrun.Result, error){
			"Run":        func() (jobrun.Result, error) { return r.Run(t.Context(), job) },
			"RunTrigger": func() (jobrun.Result, error) { return r.RunTrigger(t.Context(), job, now) },
		} {
			res, err := call()
			if err != nil || res.Decision != jobrun.AlreadySucceeded || res.Record != first.Record {
				t.Errorf("%s %s later: %+v, %v; want AlreadySucceeded with %+v", name, later, res, err, first.Record)
			}
		}
	}
	if got := rowAsStored(t, db.Pool, first.Record.Key); got != stored {
		t.Errorf("the row was written to:\n%s\n%s", stored, got)
	}
	if executions.Load() != 1 || rowsOf(t, db.Pool, first.Record.Key) != [2]int{1, 1} {
		t.Errorf("executed %d times, rows %v", executions.Load(), rowsOf(t, db.Pool, first.Record.Key))
	}
}

// Both need a server on which nothing else happens, and its log.
func TestLosingClaimCostsNothing(t *testing.T) {
	t.Parallel()
	server, err := pgtest.Start(t.Context(), pgtest.Options{Settings: map[string]string{
		"autovacuum": "off", "checkpoint_timeout": "1h", "wal_level": "minimal", "max_wal_senders": "0",
	}})
	if err != nil {
		t.Skipf("no server of one's own: %v", err)
	}
	t.Cleanup(server.Stop)
	db := &pgtest.DB{URL: server.URL("postgres")}
	db.Pool = db.PoolWith(t, nil)
	if err := newRunner(t, db.Pool, jobrun.Options{}).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}

	t.Run("no WAL, no transaction id, one round trip", func(t *testing.T) {
		proxy := pgtest.NewProxy(t, db.URL)
		pool := (&pgtest.DB{URL: proxy.URL()}).PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
		r := newRunner(t, pool, jobrun.Options{})
		job, executions := countingJob("daily")
		broken := jobrun.Job{Name: "broken", Func: func(context.Context, *jobrun.Run) error { return errors.New("broken") }}
		for range 2 { // once to win, once to lose: the connection then knows the statement
			if _, err := r.RunDate(t.Context(), job, date); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.RunDate(t.Context(), broken, date); err == nil {
			t.Fatal("no error")
		}
		type cost struct{ wal, xid string }
		spent := func() (c cost) {
			rows, _ := db.Pool.Query(t.Context(), `SELECT pg_current_wal_insert_lsn()::text, pg_snapshot_xmax(pg_current_snapshot())::text`)
			c, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (c cost, err error) { return c, row.Scan(&c.wal, &c.xid) })
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		before, statements := spent(), proxy.Statements("")
		const losses = 20
		for range losses / 2 {
			if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadySucceeded {
				t.Fatalf("got %+v, %v", res, err)
			}
			if res, err := r.RunDate(t.Context(), broken, date); err != nil || res.Decision != jobrun.AlreadyFailed {
				t.Fatalf("got %+v, %v", res, err)
			}
		}
		if n := proxy.Statements("") - statements; n != losses {
			t.Errorf("%d lost claims sent %d statements", losses, n)
		}
		if after := spent(); after != before {
			t.Errorf("%d lost claims moved (WAL position, next transaction id) from %v to %v", losses, before, after)
		}
		if executions.Load() != 1 {
			t.Errorf("executed %d times", executions.Load())
		}
	})

	t.Run("nothing at WARN here, no duplicate key there", func(t *testing.T) {
		const nodes, keys = 5, 20
		var runners []*jobrun.Runner
		logs := newLogBook()
		for range nodes {
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 3 })
			runners = append(runners, newRunner(t, pool, jobrun.Options{Logger: slog.New(logs)}))
		}
		var won, lost atomic.Int64
		for k := range keys {
			job, _ := countingJob(fmt.Sprintf("race-%d", k))
			start := make(chan struct{})
			var wg sync.WaitGroup
			for _, r := range runners {
				wg.Go(func() {
					<-start
					switch res, err := r.RunDate(context.Background(), job, date); {
					case err != nil:
						t.Error(err)
					case res.Ran():
						won.Add(1)
					default:
						lost.Add(1)
					}
				})
			}
			close(start)
			wg.Wait()
		}
		if won.Load() != keys || lost.Load() != (nodes-1)*keys {
			t.Errorf("%d won, %d lost", won.Load(), lost.Load())
		}
		counts := map[string]int{}
		for _, line := range logs.all() {
			counts[line.message]++
			if line.level > slog.LevelInfo {
				t.Errorf("logged at %s: %s %v", line.level, line.message, line.attrs)
			}
		}
		if counts["run started"] != keys || counts["run finished"] != keys || counts["run not started"] != (nodes-1)*keys {
			t.Errorf("log lines %v", counts)
		}
		text, err := os.ReadFile(server.LogFile())
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "duplicate key") || strings.Contains(line, "ERROR:") {
				t.Errorf("the server logged %s", line)
			}
		}
	})
}

func TestDueRunHasOneWinner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	runners := fiveRunners(t, db)
	theirs := errors.New("ledger locked")
	for round := range 10 {
		failsAgain := round%2 == 1
		var executions atomic.Int64
		job := jobrun.Job{
			Name:  fmt.Sprintf("due-%d", round),
			Retry: jobrun.Retry{MaxAttempts: 3, Backoff: func(int) time.Duration { return time.Hour }},
			Func: func(_ context.Context, run *jobrun.Run) error {
				executions.Add(1)
				if run.Attempt() == 1 || failsAgain {
					return theirs
				}
				return nil
			},
		}
		if _, err := runners[0].RunDate(t.Context(), job, date); !errors.Is(err, theirs) {
			t.Fatal(err)
		}
		exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now() WHERE job_key = $1`, job.Key(date))
		winner, lost, err := contend(t, runners, job)
		if errors.Is(err, theirs) != failsAgain || winner.Record.Attempt != 2 || winner.Record.Trigger != jobrun.TriggerRetry {
			t.Errorf("winner: %+v, %v", winner, err)
		}
		if failsAgain {
			onlyDecisions(t, job.Name, lost, jobrun.AlreadyRunning, jobrun.RetryLater)
		} else {
			onlyDecisions(t, job.Name, lost, jobrun.AlreadyRunning, jobrun.AlreadySucceeded)
		}
		if executions.Load() != 2 || rowsOf(t, db.Pool, job.Key(date)) != [2]int{1, 2} {
			t.Errorf("executed %d times, rows %v", executions.Load(), rowsOf(t, db.Pool, job.Key(date)))
		}
		if !query[bool](t, db.Pool, `SELECT r.attempt = 2 AND r.executions = 2 AND r.token = a.token
			FROM batch_job_run AS r JOIN batch_job_attempt AS a USING (job_key, attempt) WHERE job_key = $1`, job.Key(date)) {
			t.Errorf("%s: the row and its attempt differ", job.Name)
		}
	}
}

// approve pretends that a person approved a re-run of the run as it is now.
const approve = `UPDATE batch_job_run SET approved_at = now(), approved_attempt = attempt, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at WHERE job_key = $1`

func TestApprovedRerunHasOneWinner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	runners := fiveRunners(t, db)
	notDue := func(jobrun.Date) bool { return false }
	for _, c := range []struct {
		name     string
		first    error // of the first attempt
		calendar jobrun.Calendar
		status   jobrun.Status
		attempt  int
	}{
		{"failed", errors.New("broken"), nil, jobrun.Failed, 2},
		{"skipped", jobrun.SkipRun("nothing to do"), nil, jobrun.Skipped, 2},
		{"not-due", nil, notDue, jobrun.Skipped, 1},
		{"succeeded", nil, nil, jobrun.Succeeded, 2},
	} {
		for _, second := range []error{nil, errors.New("broken again")} {
			name := c.name
			if second != nil {
				name += "-fails-again"
			}
			var executions atomic.Int64
			job := jobrun.Job{
				Name: name, Calendar: c.calendar, Retry: jobrun.Retry{MaxAttempts: 5},
				Func: func(_ context.Context, run *jobrun.Run) error {
					executions.Add(1)
					if run.Trigger() == jobrun.TriggerRerun {
						return second
					}
					return jobrun.Permanent(c.first)
				},
			}
			before, _ := runners[0].RunTrigger(t.Context(), job, time.Date(2026, 9, 15, 3, 0, 0, 0, seoul))
			if before.Record.Status != c.status {
				t.Fatalf("%s: before: %+v", name, before)
			}
			executions.Store(0)
			exec(t, db.Pool, approve, job.Key(date))
			if rec, err := runners[0].Get(t.Context(), job.Key(date)); err != nil || rec.ApprovedAt.IsZero() {
				t.Errorf("%s: approved: %+v, %v", name, rec, err)
			}
			winner, lost, err := contend(t, runners, job)
			rec := winner.Record
			if !errors.Is(err, second) || rec.Trigger != jobrun.TriggerRerun || rec.Attempt != c.attempt ||
				!rec.ApprovedAt.IsZero() || !rec.NextAttemptAt.IsZero() || !rec.ScheduledFor.Equal(before.Record.ScheduledFor) {
				t.Errorf("%s: winner: %+v, %v", name, winner, err)
			}
			if second == nil {
				onlyDecisions(t, name, lost, jobrun.AlreadyRunning, jobrun.AlreadySucceeded)
			} else {
				onlyDecisions(t, name, lost, jobrun.AlreadyRunning, jobrun.AlreadyFailed)
			}
			if !query[bool](t, db.Pool, `SELECT approved_at IS NULL AND approved_attempt IS NULL AND approved_status IS NULL
				FROM batch_job_run WHERE job_key = $1`, job.Key(date)) {
				t.Errorf("%s: the approval is still there", name)
			}
			if again, err := runners[1].RunDate(t.Context(), job, date); err != nil || again.Ran() || executions.Load() != 1 {
				t.Errorf("%s: a later call: %+v, %v; executed %d times", name, again, err, executions.Load())
			}
		}
	}
}

func TestApprovalHoldsOnlyForWhatThePersonSaw(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, c := range []struct {
		status jobrun.Status
		want   jobrun.Decision
	}{
		{jobrun.Failed, jobrun.AlreadyFailed},
		{jobrun.Skipped, jobrun.AlreadySkipped},
		{jobrun.Succeeded, jobrun.AlreadySucceeded},
		{jobrun.Running, jobrun.AlreadyRunning},
		{"PAUSED", jobrun.UnknownStatus},
	} {
		for name, approved := range map[string]string{
			"older-attempt": `attempt - 1, status`,
			"newer-attempt": `attempt + 1, status`,
			"other-status":  `attempt, CASE status WHEN 'FAILED' THEN 'SUCCEEDED' ELSE 'FAILED' END`,
			"no-status":     `attempt, NULL`,
			"no-attempt":    `NULL, status`,
			"unclaimable":   `attempt, status`, // of a status that nobody can approve
		} {
			if name == "unclaimable" && c.status != jobrun.Running && c.status != "PAUSED" {
				continue
			}
			job, executions := countingJob(name + "-" + string(c.status))
			key := job.Key(date)
			exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, attempt) VALUES ($1, $2, 'node-1', 2)`, key, c.status)
			exec(t, db.Pool, `UPDATE batch_job_run SET (approved_at, approved_worker, approved_finished_at, approved_attempt, approved_status) = ROW(now(), worker_id, finished_at, `+approved+`) WHERE job_key = $1`, key)
			stored := rowAsStored(t, db.Pool, key)
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			res, err := r.RunDate(ctx, job, date)
			cancel()
			if err != nil || res.Decision != c.want || executions.Load() != 0 || !res.Record.ApprovedAt.IsZero() {
				t.Errorf("%s: %+v, %v, executed %d times; want %s", key, res, err, executions.Load(), c.want)
			}
			if got := rowAsStored(t, db.Pool, key); got != stored {
				t.Errorf("%s: the row was written to:\n%s\n%s", key, stored, got)
			}
		}
	}
}

func TestOnlyADueFailedRunIsRetried(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	retry := jobrun.Retry{MaxAttempts: 5, Backoff: func(int) time.Duration { return time.Hour }}
	for _, c := range []struct {
		name, change string // by a neighbour, after the first attempt has failed
		want         jobrun.Decision
	}{
		{"later", `next_attempt_at = now() + interval '1 hour'`, jobrun.RetryLater},
		{"never", `next_attempt_at = NULL`, jobrun.AlreadyFailed},
		{"succeeded-meanwhile", `next_attempt_at = now(), status = 'SUCCEEDED', finished_at = now()`, jobrun.AlreadySucceeded},
		{"skipped-meanwhile", `next_attempt_at = now(), status = 'SKIPPED'`, jobrun.AlreadySkipped},
		{"running-meanwhile", `next_attempt_at = now(), status = 'RUNNING'`, jobrun.AlreadyRunning},
		{"unknown-status", `next_attempt_at = now(), status = 'PAUSED'`, jobrun.UnknownStatus},
		{"lower-case", `next_attempt_at = now(), status = 'failed'`, jobrun.UnknownStatus},
		{"empty-status", `next_attempt_at = now(), status = ''`, jobrun.UnknownStatus},
		{"pruned", `next_attempt_at = now(), pruned_at = now()`, jobrun.AlreadyFailed},
	} {
		var executions atomic.Int64
		job := jobrun.Job{Name: c.name, Retry: retry, Func: func(context.Context, *jobrun.Run) error {
			executions.Add(1)
			return errors.New("broken")
		}}
		if _, err := r.RunDate(t.Context(), job, date); err == nil {
			t.Fatal("no error")
		}
		exec(t, db.Pool, `UPDATE batch_job_run SET `+c.change+` WHERE job_key = $1`, job.Key(date))
		stored := rowAsStored(t, db.Pool, job.Key(date))
		res, err := r.RunDate(t.Context(), job, date)
		if err != nil || res.Decision != c.want || executions.Load() != 1 {
			t.Errorf("%s: %+v, %v, executed %d times; want %s", c.name, res, err, executions.Load(), c.want)
		}
		next := query[*time.Time](t, db.Pool, `SELECT CASE WHEN status = 'FAILED' THEN next_attempt_at END FROM batch_job_run WHERE job_key = $1`, job.Key(date))
		if next == nil != res.Record.NextAttemptAt.IsZero() || next != nil && !next.Equal(res.Record.NextAttemptAt) {
			t.Errorf("%s: next attempt at %v, the result says %s", c.name, next, res.Record.NextAttemptAt)
		}
		if got := rowAsStored(t, db.Pool, job.Key(date)); got != stored {
			t.Errorf("%s: the row was written to:\n%s\n%s", c.name, stored, got)
		}
	}
}

func TestUncommittedClaimOfAnotherSessionDoesNotHoldUpACall(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, commit := range []bool{false, true} {
		job, executions := countingJob(fmt.Sprintf("held-%t", commit))
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'node-1')`, job.Key(date)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		sent := time.Now()
		res, err := r.RunDate(ctx, job, date)
		took := time.Since(sent)
		cancel()
		if err == nil || res.Decision != "" || executions.Load() != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("while it is open: %+v, %v, executed %d times", res, err, executions.Load())
		}
		if took > 3*time.Second {
			t.Errorf("a call limited to 500 ms took %s", took)
		}
		if commit {
			err = tx.Commit(t.Context())
		} else {
			err = tx.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		res, err = r.RunDate(t.Context(), job, date)
		switch {
		case err != nil:
			t.Error(err)
		case commit && (res.Decision != jobrun.AlreadyRunning || res.Record.WorkerID != "node-1" || executions.Load() != 0):
			t.Errorf("committed: %+v, executed %d times", res, executions.Load())
		case !commit && (!res.Ran() || res.Record.Status != jobrun.Succeeded || executions.Load() != 1):
			t.Errorf("rolled back: %+v, executed %d times", res, executions.Load())
		}
	}
}

// The same for the row lock of a transaction that has not ended, on which a retry would wait.
func TestUncommittedChangeOfAnotherSessionDoesNotHoldUpARetry(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	var executions atomic.Int64
	job := jobrun.Job{Name: "daily", Retry: jobrun.Retry{MaxAttempts: 3, Backoff: func(int) time.Duration { return 0 }}, Func: func(_ context.Context, run *jobrun.Run) error {
		executions.Add(1)
		if run.Attempt() == 1 {
			return errors.New("broken")
		}
		return nil
	}}
	if _, err := r.RunDate(t.Context(), job, date); err == nil {
		t.Fatal("no error")
	}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE batch_job_run SET status = 'SUCCEEDED' WHERE job_key = $1`, job.Key(date)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	sent := time.Now()
	res, err := r.RunDate(ctx, job, date)
	if err == nil || res.Ran() || executions.Load() != 1 || time.Since(sent) > 3*time.Second {
		t.Errorf("while it is open: %+v, %v after %s, executed %d times", res, err, time.Since(sent), executions.Load())
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || !res.Ran() || res.Record.Attempt != 2 || executions.Load() != 2 {
		t.Errorf("rolled back: %+v, %v, executed %d times", res, err, executions.Load())
	}
}

// faultyInserts makes inserts of runs fail: those of a job once-CODE for the first time, those of ever-CODE always. A
// sequence for each job counts them.
func faultyInserts(t *testing.T, db *pgtest.DB, jobs ...string) {
	exec(t, db.Pool, `
CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  job text := split_part(NEW.job_key, ':', 1);
  try bigint;
BEGIN
  IF job LIKE 'once-%' OR job LIKE 'ever-%' THEN
    try := nextval(quote_ident(job)::regclass);
    IF job LIKE 'ever-%' OR try = 1 THEN
      RAISE EXCEPTION 'injected' USING ERRCODE = split_part(job, '-', 2);
    END IF;
  END IF;
  RETURN NEW;
END $$`)
	exec(t, db.Pool, `CREATE TRIGGER fault BEFORE INSERT ON batch_job_run FOR EACH ROW EXECUTE FUNCTION fault()`)
	for _, job := range jobs {
		exec(t, db.Pool, `CREATE SEQUENCE `+pgx.Identifier{job}.Sanitize())
	}
}

func triesOf(t *testing.T, db *pgtest.DB, job string) int {
	return query[int](t, db.Pool, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END::int FROM `+pgx.Identifier{job}.Sanitize())
}

func TestPassingFaultAtTheClaimIsRepeated(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	codes := []string{"40001", "40P01", "55P03", "57014", "53300"}
	var once, ever []string
	for _, code := range codes {
		once, ever = append(once, "once-"+code), append(ever, "ever-"+code)
	}
	faultyInserts(t, db, append(once, ever...)...)
	r := newRunner(t, db.Pool, jobrun.Options{})
	t.Cleanup(func() { exec(t, db.Pool, `DROP TRIGGER fault ON batch_job_run`) })

	for _, name := range once {
		job, executions := countingJob(name)
		res, err := r.RunDate(t.Context(), job, date)
		if err != nil || !res.Ran() || res.Record.Status != jobrun.Succeeded || res.Record.Attempt != 1 || executions.Load() != 1 {
			t.Errorf("%s: %+v, %v, executed %d times", name, res, err, executions.Load())
		}
		if tries := triesOf(t, db, name); tries != 2 || rowsOf(t, db.Pool, job.Key(date)) != [2]int{1, 1} {
			t.Errorf("%s: %d tries, rows %v", name, tries, rowsOf(t, db.Pool, job.Key(date)))
		}
	}
	var wg sync.WaitGroup
	for i, name := range ever {
		wg.Go(func() {
			job, executions := countingJob(name)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			sent := time.Now()
			res, err := r.RunDate(ctx, job, date)
			took := time.Since(sent)
			var pg *pgconn.PgError
			if res.Decision != "" || executions.Load() != 0 || !errors.As(err, &pg) || pg.Code != codes[i] || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %+v, %v, executed %d times", name, res, err, executions.Load())
			}
			if tries := triesOf(t, db, name); tries < 2 || tries > 15 || took > 5*time.Second {
				t.Errorf("%s: %d tries in %s", name, tries, took)
			}
			if rowsOf(t, db.Pool, job.Key(date)) != [2]int{} {
				t.Errorf("%s: rows %v", name, rowsOf(t, db.Pool, job.Key(date)))
			}
		})
	}
	wg.Wait()
}

func TestLastingFaultAtTheClaimIsTriedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	faultyInserts(t, db, "ever-42501", "ever-22023", "ever-P0001")
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, name := range []string{"ever-42501", "ever-22023", "ever-P0001"} {
		job, executions := countingJob(name)
		res, err := r.RunDate(t.Context(), job, date)
		if err == nil || res.Decision != "" || executions.Load() != 0 || !strings.Contains(err.Error(), job.Key(date)) || !strings.Contains(err.Error(), "injected") {
			t.Errorf("%s: %+v, %v, executed %d times", name, res, err, executions.Load())
		}
		if tries := triesOf(t, db, name); tries != 1 {
			t.Errorf("%s: %d tries", name, tries)
		}
	}

	_, url := db.Role(t, "") // may do nothing
	stranger := newRunner(t, (&pgtest.DB{URL: url}).PoolWith(t, nil), jobrun.Options{})
	job, executions := countingJob("daily")
	if _, err := stranger.RunDate(t.Context(), job, date); err == nil || !strings.Contains(err.Error(), "permission denied for table batch_job_") || executions.Load() != 0 {
		t.Errorf("without privileges: %v, executed %d times", err, executions.Load())
	}
}

func TestReadOnlyServerIsNoLostClaim(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	admin, err := db.Pool.Acquire(t.Context()) // a session from before stays writable
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Release()
	readOnly := func(state string) {
		if _, err := admin.Exec(t.Context(), `ALTER DATABASE `+db.Name+` SET default_transaction_read_only = `+state); err != nil {
			t.Fatal(err)
		}
	}
	readOnly("on")
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	job, executions := countingJob("daily")
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	res, err := r.RunDate(ctx, job, date)
	var pg *pgconn.PgError
	if res.Decision != "" || !errors.As(err, &pg) || pg.Code != "25006" || executions.Load() != 0 {
		t.Errorf("read-only: %+v, %v, executed %d times", res, err, executions.Load())
	}
	var rows int
	if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM batch_job_run`).Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows, %v", rows, err)
	}

	// Sessions that began read-only stay so: the claim needs a new one when the server has healed.
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, err = r.RunDate(t.Context(), job, date)
	}()
	readOnly("off")
	<-done
	if err != nil || !res.Ran() || res.Record.Attempt != 1 || executions.Load() != 1 {
		t.Errorf("healed: %+v, %v, executed %d times", res, err, executions.Load())
	}
}

func TestMissingTablesSayRunMigrate(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	job, executions := countingJob("daily")
	for _, opts := range []jobrun.Options{{}, {Schema: "public"}, {Schema: "nowhere"}} {
		r := newRunner(t, db.Pool, opts)
		_, runErr := r.RunDate(t.Context(), job, date)
		_, getErr := r.Get(t.Context(), "daily:2026-09-15")
		_, listErr := r.List(t.Context(), jobrun.Filter{})
		_, historyErr := r.History(t.Context(), "daily:2026-09-15")
		_, staleErr := r.Stale(t.Context())
		for name, err := range map[string]error{"RunDate": runErr, "Get": getErr, "List": listErr, "History": historyErr, "Stale": staleErr} {
			if err == nil || !strings.Contains(err.Error(), "run Migrate") {
				t.Errorf("schema %q: %s: %v", opts.Schema, name, err)
			}
		}
	}
	// No schema at all: the other remedy, at once.
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "nowhere" })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := newRunner(t, pool, jobrun.Options{}).RunDate(ctx, job, date); err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Options.Schema") {
		t.Errorf("no schema: %v", err)
	}
	if executions.Load() != 0 {
		t.Errorf("executed %d times", executions.Load())
	}
}

// lifeCycle takes runs of jobs that are called name-... through all that can happen to them on a healthy server.
func lifeCycle(t *testing.T, pool *pgxpool.Pool, schema, name string) {
	t.Helper()
	ctx := t.Context()
	r := newRunner(t, pool, jobrun.Options{Lease: 2 * time.Second, Schema: schema})
	other := newRunner(t, pool, jobrun.Options{Schema: schema})

	// Success with heartbeats and a lost claim meanwhile.
	job := jobrun.Job{Name: name + "-정산", Func: func(ctx context.Context, run *jobrun.Run) error {
		run.AddProcessed(3)
		if res, err := other.RunDate(ctx, jobrun.Job{Name: run.Job(), Func: func(context.Context, *jobrun.Run) error { panic("second execution") }}, run.Date()); err != nil || res.Decision != jobrun.AlreadyRunning {
			t.Errorf("%s: a second call: %+v, %v", run.Key(), res, err)
		}
		beaten := func() bool {
			rec, err := r.Get(ctx, run.Key())
			if err != nil {
				t.Errorf("%s: %v", run.Key(), err)
			}
			return rec.HeartbeatAt.After(rec.StartedAt) && rec.ItemsProcessed == 3
		}
		if !pollUntil(ctx, beaten) {
			t.Errorf("%s: no heartbeat", run.Key())
		}
		return ctx.Err()
	}}
	done, err := r.RunDate(ctx, job, date)
	if err != nil || !done.Ran() || done.Record.Status != jobrun.Succeeded || done.Record.Attempt != 1 {
		t.Fatalf("%s: %+v, %v", name, done, err)
	}
	if lost, err := other.RunDate(ctx, job, date); err != nil || lost.Decision != jobrun.AlreadySucceeded || lost.Record != done.Record {
		t.Errorf("%s: a later call: %+v, %v", name, lost, err)
	}

	// Failure, retry at once, history.
	theirs := errors.New("장부 불일치: it's \\broken\\ \x00")
	flaky := jobrun.Job{
		Name: name + "-flaky", Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }},
		Func: func(_ context.Context, run *jobrun.Run) error {
			if run.Attempt() == 1 {
				return theirs
			}
			return nil
		},
	}
	failed, err := r.RunDate(ctx, flaky, date)
	if !errors.Is(err, theirs) || failed.Record.Status != jobrun.Failed || failed.Record.NextAttemptAt.IsZero() {
		t.Fatalf("%s: %+v, %v", name, failed, err)
	}
	again, err := other.RunDate(ctx, flaky, date)
	if err != nil || !again.Ran() || again.Record.Attempt != 2 || again.Record.Trigger != jobrun.TriggerRetry || again.Record.Status != jobrun.Succeeded {
		t.Fatalf("%s: %+v, %v", name, again, err)
	}
	history, err := r.History(ctx, flaky.Key(date))
	if err != nil || len(history) != 2 || history[0].Outcome != jobrun.Failed || history[0].Error != failed.Record.Error || history[1].Outcome != jobrun.Succeeded {
		t.Errorf("%s: history %+v, %v", name, history, err)
	}

	// Not due; reading.
	idle := jobrun.Job{Name: name + "-idle", Func: job.Func, Calendar: func(jobrun.Date) bool { return false }}
	skipped, err := r.RunTrigger(ctx, idle, time.Date(2026, 9, 15, 9, 0, 0, 0, seoul))
	if err != nil || skipped.Decision != jobrun.NotDue || skipped.Record.Status != jobrun.Skipped {
		t.Errorf("%s: %+v, %v", name, skipped, err)
	}
	for _, want := range []jobrun.Record{done.Record, again.Record, skipped.Record} {
		if got, err := other.Get(ctx, want.Key); err != nil || got != want {
			t.Errorf("%s: Get: %+v, %v; want %+v", name, got, err, want)
		}
		list, err := other.List(ctx, jobrun.Filter{Job: want.Job, From: date, To: date, Status: []jobrun.Status{want.Status, jobrun.Running}})
		if err != nil || len(list) != 1 || list[0] != want {
			t.Errorf("%s: List: %+v, %v; want %+v", name, list, err, want)
		}
	}
	table := pgx.Identifier{schema, "batch_job_run"}.Sanitize()
	if schema == "" {
		table = "public.batch_job_run"
	}
	exec(t, pool, `INSERT INTO `+table+` (job_key, status, worker_id, started_at) VALUES ($1, 'RUNNING', 'node-1', now() - interval '1 hour')`, name+":yesterday")
	stale, err := other.Stale(ctx)
	found := 0
	for _, s := range stale {
		if s.Key == name+":yesterday" && !s.Alive && s.Overdue > 39*time.Minute && s.Overdue < 42*time.Minute {
			found++
		}
		if s.Key != name+":yesterday" && strings.HasPrefix(s.Key, name) {
			t.Errorf("%s: stale: %+v", name, s)
		}
	}
	if err != nil || found != 1 {
		t.Errorf("%s: stale: %+v, %v", name, stale, err)
	}
}

func TestEveryExecModeAndIsolationLevel(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		var wg sync.WaitGroup
		for _, isolation := range []string{"read committed", "repeatable read", "serializable"} {
			pool := db.PoolWith(t, func(c *pgxpool.Config) {
				c.MaxConns = 6
				c.ConnConfig.DefaultQueryExecMode = mode
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
			})
			wg.Go(func() { lifeCycle(t, pool, "", strings.ReplaceAll(mode.String()+"-"+isolation, " ", "_")) })
		}
		wg.Wait()
	}
}

func TestSettingsOfTheRoleDoNotMatter(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	name, url := db.Role(t, "")
	for _, sql := range []string{
		`GRANT SELECT, INSERT, UPDATE ON batch_job_run, batch_job_attempt TO ` + name,
		`GRANT SELECT ON batch_job_action, batch_job_migration TO ` + name,
		`ALTER ROLE ` + name + ` SET statement_timeout = '3s'`,
		`ALTER ROLE ` + name + ` SET lock_timeout = '2s'`,
		`ALTER ROLE ` + name + ` SET idle_in_transaction_session_timeout = '200ms'`,
		`ALTER ROLE ` + name + ` SET default_transaction_isolation = 'serializable'`,
		`ALTER ROLE ` + name + ` SET timezone = 'America/St_Johns'`,
		`ALTER ROLE ` + name + ` SET datestyle = 'SQL, DMY'`,
		`ALTER ROLE ` + name + ` SET intervalstyle = 'sql_standard'`,
		`ALTER ROLE ` + name + ` SET client_min_messages = 'debug1'`,
		`ALTER ROLE ` + name + ` SET row_security = off`,
		`ALTER ROLE ` + name + ` SET plan_cache_mode = force_generic_plan`,
	} {
		exec(t, db.Pool, sql)
	}
	lifeCycle(t, (&pgtest.DB{URL: url}).PoolWith(t, nil), "", "role")
}

func TestSchemaAndSearchPathDoNotMatter(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	const odd = `Batch "Jobs"; 정산 'x' batch_job_`
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE SCHEMA `+pgx.Identifier{odd}.Sanitize())
	temporary := func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `CREATE TEMPORARY TABLE batch_job_run (LIKE public.batch_job_run INCLUDING ALL);
				CREATE TEMPORARY TABLE batch_job_attempt (LIKE public.batch_job_attempt INCLUDING ALL)`)
			return err
		}
	}
	searchPath := func(path string) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = path }
	}
	for _, c := range []struct {
		name, schema string
		set          []func(*pgxpool.Config)
	}{
		{"quoted", odd, []func(*pgxpool.Config){searchPath("")}},
		{"public-by-name", "public", []func(*pgxpool.Config){searchPath("")}},
		{"temporary", "", []func(*pgxpool.Config){temporary}},
		{"temporary-by-path", "", []func(*pgxpool.Config){temporary, searchPath("pg_temp, nowhere, public")}},
		{"temporary-quoted", odd, []func(*pgxpool.Config){temporary, searchPath("")}},
	} {
		pool := db.PoolWith(t, func(cfg *pgxpool.Config) {
			for _, set := range c.set {
				set(cfg)
			}
		})
		r := newRunner(t, pool, jobrun.Options{Schema: c.schema})
		if err := r.Migrate(t.Context()); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := r.Verify(t.Context()); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		lifeCycle(t, pool, c.schema, c.name)
		table := pgx.Identifier{c.schema, "batch_job_run"}.Sanitize()
		if c.schema == "" {
			table = "public.batch_job_run"
		}
		if n := query[int](t, db.Pool, `SELECT count(*)::int FROM `+table+` WHERE starts_with(job_key, $1)`, c.name+"-"); n != 3 {
			t.Errorf("%s: %d rows", c.name, n)
		}
	}
}

func TestPoolOfOneIsRefused(t *testing.T) {
	t.Parallel()
	pool, _ := deadPool(t, 1)
	_, err := jobrun.New(pool, seoul, nil)
	var invalid *jobrun.InvalidError
	if !errors.As(err, &invalid) || invalid.Field != "pool.MaxConns" || !strings.Contains(invalid.Allowed, "2 or more") || !strings.Contains(err.Error(), "heartbeats") {
		t.Errorf("got %v", err)
	}
}

// holdForBeats keeps a connection of the pool until the attempt has sent so many heartbeats meanwhile.
func holdForBeats(ctx context.Context, pool *pgxpool.Pool, run *jobrun.Run, beats int) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	seen := map[time.Time]bool{}
	beaten := func() bool {
		var at time.Time
		err = conn.QueryRow(ctx, `SELECT heartbeat_at FROM batch_job_attempt WHERE job_key = $1 AND attempt = $2`, run.Key(), run.Attempt()).Scan(&at)
		seen[at] = true
		return err != nil || len(seen) > beats
	}
	if !pollUntil(ctx, beaten) {
		return errors.New("heartbeats missing")
	}
	return err
}

func TestJobThatUsesUpThePoolStaysAlive(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	watcher := newRunner(t, db.Pool, jobrun.Options{})
	for _, c := range []struct{ conns, jobs, beats int }{
		{2, 1, 6}, // six beats are longer than the lease
		{4, 8, 2},
	} {
		pool := db.PoolWith(t, func(cfg *pgxpool.Config) { cfg.MaxConns = int32(c.conns) })
		r := newRunner(t, pool, jobrun.Options{Lease: time.Second})
		var wg sync.WaitGroup
		var left atomic.Int64
		left.Store(int64(c.jobs))
		for n := range c.jobs {
			wg.Go(func() {
				defer left.Add(-1)
				job := jobrun.Job{Name: fmt.Sprintf("pool-%d-%d", c.conns, n), Func: func(ctx context.Context, run *jobrun.Run) error {
					return holdForBeats(ctx, pool, run, c.beats)
				}}
				res, err := r.RunDate(context.Background(), job, date)
				if err != nil || res.Record.Status != jobrun.Succeeded || res.Record.Attempt != 1 {
					t.Errorf("%s: %+v, %v", job.Name, res, err)
				}
				if rec := res.Record; c.jobs == 1 && rec.FinishedAt.Sub(rec.StartedAt) < time.Second {
					t.Errorf("%s: held for %s only", job.Name, rec.FinishedAt.Sub(rec.StartedAt))
				}
			})
		}
		if !pollUntil(t.Context(), func() bool {
			stale, err := watcher.Stale(t.Context())
			if err != nil || len(stale) > 0 {
				t.Errorf("%d connections: stale: %+v, %v", c.conns, stale, err)
			}
			return left.Load() == 0
		}) {
			t.Errorf("%d connections: %d jobs have not finished", c.conns, left.Load())
		}
		wg.Wait()
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections: %d still in use", c.conns, n)
		}
	}
}

func TestExhaustedPoolIsAnErrorInTime(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 3 })
	var strangers []*pgxpool.Conn
	for range 3 {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		strangers = append(strangers, conn)
	}
	r := newRunner(t, pool, jobrun.Options{})
	job, executions := countingJob("daily")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			sent := time.Now()
			res, err := r.RunDate(ctx, job, date)
			if res.Decision != "" || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(fmt.Sprint(err), "3 of at most 3 in use") {
				t.Errorf("got %+v, %v", res, err)
			}
			if took := time.Since(sent); took > 3*time.Second {
				t.Errorf("a call limited to 300 ms took %s", took)
			}
		})
	}
	wg.Wait()
	// Without a limit of the caller's there is one of the claim's, by a clock that runs ahead.
	synctest.Test(t, func(t *testing.T) {
		r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		sent := time.Now()
		res, err := r.RunDate(context.Background(), job, date)
		if took := time.Since(sent); res.Decision != "" || !strings.Contains(fmt.Sprint(err), "3 of at most 3 in use") || took > time.Minute {
			t.Errorf("after %s: %+v, %v", took, res, err)
		}
	})
	for _, conn := range strangers {
		conn.Release()
	}
	if executions.Load() != 0 || rowsOf(t, db.Pool, job.Key(date)) != [2]int{} {
		t.Errorf("executed %d times, rows %v", executions.Load(), rowsOf(t, db.Pool, job.Key(date)))
	}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || !res.Ran() || pool.Stat().AcquiredConns() != 0 {
		t.Errorf("afterwards: %+v, %v, %d connections in use", res, err, pool.Stat().AcquiredConns())
	}
}

func TestCallsGiveTheirConnectionsBack(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 25 }) // each Runner keeps one back while it works
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('paused:2026-09-15', 'PAUSED', 'node-1')`)
	fn := func(f func() error) jobrun.Func {
		return func(context.Context, *jobrun.Run) error { return f() }
	}
	nothing := fn(func() error { return nil })
	jobs := []jobrun.Job{
		{Name: "nil", Func: nothing},
		{Name: "failed", Func: fn(func() error { return errors.New("broken") })},
		{Name: "retried", Func: fn(func() error { return errors.New("broken") }), Retry: jobrun.Retry{MaxAttempts: 40, Backoff: func(int) time.Duration { return 0 }}},
		{Name: "skipped", Func: fn(func() error { return jobrun.SkipRun("nothing to do") })},
		{Name: "panics", Func: fn(func() error { panic("boom") })},
		{Name: "not-due", Func: nothing, Calendar: func(jobrun.Date) bool { return false }},
		{Name: "paused", Func: nothing},
		{Name: "no-date", Func: nothing, Date: func(jobrun.Date) (jobrun.Date, error) { return date, errors.New("no date") }},
		{Name: "in valid", Func: nothing},
	}
	var wg sync.WaitGroup
	for range 20 {
		r := newRunner(t, pool, jobrun.Options{})
		for _, job := range jobs {
			wg.Go(func() { _, _ = r.RunTrigger(context.Background(), job, time.Date(2026, 9, 15, 3, 0, 0, 0, seoul)) })
		}
	}
	wg.Wait()
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections still in use", n)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM batch_job_run WHERE status = 'RUNNING'`); n != 0 {
		t.Errorf("%d runs left RUNNING", n)
	}
	if n := query[int](t, pool, `SELECT count(*)::int FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation JOIN pg_stat_activity AS s USING (pid)
		WHERE c.relname LIKE 'batch\_job\_%' AND s.datname = current_database() AND s.backend_type = 'client backend'`); n != 0 {
		t.Errorf("%d locks left", n)
	}
}

// A service in another language does what the README tells it, in plain SQL. psql stands for it.
func TestPsqlAndRunnerShareKeys(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	path, err := osexec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not on PATH")
	}
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	cmd := osexec.CommandContext(t.Context(), path, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", db.URL)
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	answers := bufio.NewScanner(out)
	// claim sends the claim, and what follows if it is won, and returns what psql says about it.
	claim := func(key string) func() bool {
		_, err := fmt.Fprintf(in, `
INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('%[1]s', 'RUNNING', 'node-7') ON CONFLICT (job_key) DO NOTHING;
\if :ROW_COUNT
UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = '%[1]s';
\echo won
\else
\echo lost
\endif
`, key)
		if err != nil {
			t.Fatal(err)
		}
		return func() bool {
			if !answers.Scan() {
				t.Fatalf("psql ended: %v", answers.Err())
			}
			return answers.Text() == "won"
		}
	}
	const keys, decided = 50, 10
	winners := map[string]bool{} // true: psql
	for n := range keys {
		var executions atomic.Int64
		job := jobrun.Job{Name: fmt.Sprintf("shared-%02d", n), Func: func(context.Context, *jobrun.Run) error { executions.Add(1); return nil }}
		var theirs bool
		var res jobrun.Result
		var err error
		switch {
		case n < decided: // psql first
			theirs = claim(job.Key(date))()
			res, err = r.RunDate(t.Context(), job, date)
		case n < 2*decided: // jobrun first
			res, err = r.RunDate(t.Context(), job, date)
			theirs = claim(job.Key(date))()
		default:
			answer := claim(job.Key(date))
			res, err = r.RunDate(t.Context(), job, date)
			theirs = answer()
		}
		if err != nil || res.Ran() == theirs || (executions.Load() == 1) == theirs {
			t.Fatalf("%s: psql won: %t; jobrun: %+v, %v, executed %d times", job.Name, theirs, res, err, executions.Load())
		}
		if n < decided && (!theirs || res.Decision != jobrun.AlreadySucceeded) || n >= decided && n < 2*decided && theirs {
			t.Errorf("%s: psql won: %t; jobrun: %+v", job.Name, theirs, res)
		}
		winners[job.Key(date)] = theirs
	}
	_ = in.Close()
	if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
		t.Errorf("psql also said %q, %v", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	list, err := r.List(t.Context(), jobrun.Filter{From: date, To: date})
	if err != nil || len(list) != keys {
		t.Fatalf("%d records, %v", len(list), err)
	}
	for _, rec := range list {
		theirs := winners[rec.Key]
		got, err := r.Get(t.Context(), rec.Key)
		if err != nil || got != rec || rec.Status != jobrun.Succeeded || rec.Attempt != 1 || rec.Date != date || rec.Job+":"+date.String() != rec.Key ||
			rec.FinishedAt.Before(rec.StartedAt) || (rec.WorkerID == "node-7") != theirs || (rec.Trigger == "") != theirs || rec.HeartbeatAt.IsZero() != theirs {
			t.Errorf("psql won: %t: %+v, %+v, %v", theirs, rec, got, err)
		}
		history, err := r.History(t.Context(), rec.Key)
		if err != nil || len(history) != 1 || history[0].Outcome != jobrun.Succeeded || history[0].WorkerID != rec.WorkerID {
			t.Errorf("%s: history %+v, %v", rec.Key, history, err)
		}
	}
}
