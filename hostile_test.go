package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"runtime"
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

// What a neighbour does that knows only the six columns.
const (
	neighbourFails = `UPDATE batch_job_run SET status = 'FAILED', finished_at = now() WHERE job_key = $1`
	neighbourTakes = `UPDATE batch_job_run SET status = 'RUNNING', started_at = now(), finished_at = NULL, error_message = NULL, worker_id = 'node-1'
		WHERE job_key = $1 AND status = 'FAILED'`
	neighbourEnds = `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'half is paid, do not repeat'
		WHERE job_key = $1 AND worker_id = 'node-1' AND status = 'RUNNING'`
)

// A neighbour that takes the run over under a live attempt leaves attempt and
// token as they are: the worker tells the two apart.
func TestNeighbourThatTakesARunOverIsNotEndedByUs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	for name, waits := range map[string]bool{"notices-by-heartbeat": true, "notices-at-the-end": false} {
		job := jobrun.Job{Name: name, Func: func(ctx context.Context, run *jobrun.Run) error {
			exec(t, db.Pool, neighbourFails, run.Key())
			exec(t, db.Pool, neighbourTakes, run.Key())
			if waits {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		}}
		res, err := r.RunDate(t.Context(), job, date)
		if !errors.Is(err, jobrun.ErrLeaseLost) {
			t.Errorf("%s: %+v, %v; want ErrLeaseLost", name, res, err)
		}
		if row := query[string](t, db.Pool, `SELECT status || ' ' || worker_id FROM batch_job_run WHERE job_key = $1`, job.Key(date)); row != "RUNNING node-1" {
			t.Errorf("%s: the neighbour's row became %s", name, row)
		}
		if res.Record.WorkerID != "node-1" {
			t.Errorf("%s: the result tells of %s, want the run as it is now", name, res.Record.WorkerID)
		}
	}
}

// A neighbour's start or end that is no moment, or Go's zero time, does not keep a
// person from approving a run, nor that from running.
func TestEndlessRowsCanBeRunAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for name, times := range map[string]string{
		"infinity": "now(), 'infinity'", "never": "now(), NULL", "before-all": "now(), '-infinity'", "zero": "now(), '0001-01-01 00:00:00+00'",
		"endless": "'infinity', 'infinity'", "since-ever": "'-infinity', NULL", "from-zero": "'0001-01-01 00:00:00+00', now()",
	} {
		job, executions := countingJob(name)
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id) VALUES ($1, 'FAILED', `+times+`, 'node-1')`, job.Key(date))
		if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, job.Key(date)), operator); err != nil {
			t.Fatal(err)
		}
		if res, err := r.RunDate(t.Context(), job, date); err != nil || !res.Ran() || executions.Load() != 1 {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
	}
}

// An attempt whose run plain SQL has taken away, or whose row it has deleted, does
// not stay open in the history for ever: the next action or re-claim closes it.
func TestAttemptThatLostItsRowIsClosed(t *testing.T) {
	t.Parallel()
	for name, taken := range map[string]string{
		"taken over": `UPDATE batch_job_run SET status = 'RUNNING', started_at = now(), worker_id = 'node-1' WHERE job_key = $1`,
		"deleted":    `DELETE FROM batch_job_run WHERE job_key = $1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			r := newRunner(t, db.Pool, jobrun.Options{})
			first := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
			key := first.run.Key()
			exec(t, db.Pool, taken, key)
			if name == "deleted" {
				if _, err := r.Skip(t.Context(), key, operator); err != nil { // a person who sees no run
					t.Fatal(err)
				}
				if row := query[string](t, db.Pool, `SELECT concat_ws(' ', r.attempt, p.attempt) FROM batch_job_run AS r, batch_job_action AS p`); row != "1 0" {
					t.Errorf("attempts of the run and of the action: %s", row)
				}
				exec(t, db.Pool, taken, key)
				second := launch(t, t.Context(), r, jobrun.Job{Name: "daily"})
				if second.run.Attempt() != 2 {
					t.Errorf("the number of the next attempt is %d", second.run.Attempt())
				}
				if _, err := first.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
					t.Errorf("the first attempt: %v", err)
				}
				second.tell <- errors.New("bank closed")
				<-second.done
			} else {
				if _, err := first.end(t, nil); !errors.Is(err, jobrun.ErrLeaseLost) {
					t.Errorf("the first attempt: %v", err)
				}
				if _, err := r.MarkFailed(t.Context(), recordOf(t, r, key), forced); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, key), operator); err != nil {
				t.Fatal(err)
			}
			if row := query[string](t, db.Pool, `
				SELECT concat_ws(' ', outcome, ended_by, finished_at >= heartbeat_at)
				FROM batch_job_attempt
				WHERE attempt = 1`); row != "FAILED OUTSIDE t" {
				t.Errorf("the first attempt's row: %s", row)
			}
			history, err := r.History(t.Context(), key)
			if err != nil || history[0].Attempt != 1 || history[0].Outcome != jobrun.Failed || history[0].Error != "changed outside jobrun" || history[0].FinishedAt.IsZero() {
				t.Errorf("history: %+v, %v", history, err)
			}
			if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE finished_at IS NULL`); n != 0 {
				t.Errorf("%d attempts are open", n)
			}
		})
	}
}

func TestNeighboursRerunIsJudgedByItsOwnStart(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Second})
	job := jobrun.Job{
		Name: "pay", Retry: jobrun.Retry{MaxAttempts: 5, Backoff: func(int) time.Duration { return 0 }},
		Func: func(context.Context, *jobrun.Run) error { return errors.New("boom") },
	}
	if _, err := r.RunDate(t.Context(), job, date); err == nil {
		t.Fatal("no error")
	}
	exec(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = heartbeat_at - interval '1 hour'`)
	exec(t, db.Pool, neighbourTakes, job.Key(date))
	if stale, err := r.Stale(t.Context()); err != nil || len(stale) != 0 {
		t.Errorf("a run that has just started is stale: %+v, %v", stale, err)
	}
	exec(t, db.Pool, neighbourEnds, job.Key(date))
	res, err := r.RunDate(t.Context(), job, date)
	if err != nil || res.Decision != jobrun.AlreadyFailed {
		t.Errorf("the neighbour's failure was retried: %+v, %v", res, err)
	}
	if due, err := r.RetryDue(t.Context(), job); err != nil || len(due) != 0 {
		t.Errorf("the neighbour's failure is due: %+v, %v", due, err)
	}
	if _, err := r.ApproveRerun(t.Context(), res.Record, operator); err != nil {
		t.Fatal(err)
	}
	if _, err := r.RunDate(t.Context(), job, date); err == nil {
		t.Error("the approved re-run did not fail")
	}
	history, err := r.History(t.Context(), job.Key(date))
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, h := range history {
		if h.Action == nil {
			told = append(told, fmt.Sprintf("%d %s", h.Attempt, h.Error))
		}
	}
	if got := strings.Join(told, ", "); got != "1 boom, 2 half is paid, do not repeat, 3 boom" {
		t.Errorf("history: %s", got)
	}
}

// Only a skip that the function returned by itself skips the run.
func TestSkipBesideAFailureIsAFailure(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	refused := errors.New("payment 17 was refused")
	for name, c := range map[string]struct {
		f    func() error
		want jobrun.Status
	}{
		"plain":         {func() error { return jobrun.SkipRun("holiday") }, jobrun.Skipped},
		"wrapped":       {func() error { return fmt.Errorf("shop 3: %w", jobrun.SkipRun("holiday")) }, jobrun.Skipped},
		"joined":        {func() error { return errors.Join(refused, jobrun.SkipRun("nothing for shop 3")) }, jobrun.Failed},
		"panic":         {func() error { panic(jobrun.SkipRun("holiday")) }, jobrun.Failed},
		"wrapped-panic": {func() error { panic(fmt.Errorf("must not happen: %w", jobrun.SkipRun("holiday"))) }, jobrun.Failed},
	} {
		res, err := r.RunDate(t.Context(), jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { return c.f() }}, date)
		if res.Record.Status != c.want || (err != nil) != (c.want == jobrun.Failed) {
			t.Errorf("%s: %s, %v; want %s", name, res.Record.Status, err, c.want)
		}
	}
}

func TestPanicValueThatCannotBePrintedIsRecorded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	endless := []any{nil}
	endless[0] = endless
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "endless", Func: func(context.Context, *jobrun.Run) error { panic(endless) }}, date)
	if err == nil || res.Record.Status != jobrun.Failed || !strings.Contains(res.Record.Error, "[]interface {}") {
		t.Errorf("%+v, %v", res.Record, err)
	}
}

func TestFailureIsRecordedInAnyServerEncoding(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	at, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	for _, encoding := range []string{"EUC_KR", "LATIN1", "SQL_ASCII"} {
		name := db.Name + "_" + strings.ToLower(encoding)
		exec(t, db.Pool, fmt.Sprintf(`CREATE DATABASE %s ENCODING '%s' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`, name, encoding))
		t.Cleanup(func() { _, _ = db.Pool.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`) })
		at.Path = "/" + name
		config, err := pgxpool.ParseConfig(at.String())
		if err != nil {
			t.Fatal(err)
		}
		if mode := &config.ConnConfig.DefaultQueryExecMode; *mode == pgx.QueryExecModeSimpleProtocol {
			*mode = pgx.QueryExecModeExec // see TestSimpleProtocolNeedsUTF8
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := r.Verify(t.Context()); (err != nil && strings.Contains(err.Error(), "client_encoding")) != (encoding != "SQL_ASCII") {
			t.Errorf("%s: Verify says %v", encoding, err)
		}
		for n, text := range []string{"plain", "broken \xff", "nul \x00", "emoji ✅", "정산 실패"} {
			job := jobrun.Job{Name: fmt.Sprint("job-", n), Func: func(context.Context, *jobrun.Run) error { return errors.New(text) }}
			res, err := r.RunDate(t.Context(), job, date)
			if failed := (*jobrun.RunError)(nil); !errors.As(err, &failed) || res.Record.Status != jobrun.Failed {
				t.Errorf("%s %q: %s, %v", encoding, text, res.Record.Status, err)
			}
		}
	}
}

// What pgx refuses before it sends anything is told at once, and not tried for a minute.
func TestSimpleProtocolNeedsUTF8(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		c.ConnConfig.RuntimeParams["client_encoding"] = "LATIN1"
	})
	r := newRunner(t, pool, jobrun.Options{})
	_, run := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(context.Context, *jobrun.Run) error { return nil }}, date)
	for what, err := range map[string]error{"Migrate": r.Migrate(t.Context()), "Verify": r.Verify(t.Context()), "RunDate": run} {
		if err == nil || !strings.Contains(err.Error(), "client_encoding=UTF8") || strings.Contains(err.Error(), "gave up") || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestTablesThatACrashWouldEmptyAreRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db.Pool, `CREATE UNLOGGED TABLE batch_job_run (job_key varchar(120) PRIMARY KEY, status varchar(20) NOT NULL,
		started_at timestamptz NOT NULL DEFAULT now(), finished_at timestamptz, worker_id varchar(80) NOT NULL, error_message text)`)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if err := r.Migrate(t.Context()); err == nil || !strings.Contains(err.Error(), "UNLOGGED") {
		t.Errorf("Migrate: %v", err)
	}
	exec(t, db.Pool, `ALTER TABLE batch_job_run SET LOGGED`)
	if err := r.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, db.Pool, `ALTER TABLE batch_job_attempt SET UNLOGGED`)
	if err := r.Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "batch_job_attempt is UNLOGGED") {
		t.Errorf("Verify: %v", err)
	}
}

// With synchronous_commit off, an acknowledged claim or result could be gone
// after a crash, and the date would run again.
func TestWhatIsAcknowledgedIsOnDisk(t *testing.T) {
	t.Parallel()
	server, err := pgtest.Start(t.Context(), pgtest.Options{Durable: true, Settings: map[string]string{"autovacuum": "off"}})
	if err != nil {
		t.Skip(err) // an existing server with other settings
	}
	t.Cleanup(server.Stop)
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := newRunner(t, pool, jobrun.Options{})
	if err := r.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	const flushed = `SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()`
	for n := range 20 {
		job := jobrun.Job{Name: fmt.Sprint("job-", n), Func: func(context.Context, *jobrun.Run) error {
			if !query[bool](t, pool, flushed) {
				t.Error("the claim was acknowledged before it was on disk")
			}
			return nil
		}}
		if _, err := r.RunDate(t.Context(), job, date); err != nil {
			t.Fatal(err)
		}
		if !query[bool](t, pool, flushed) {
			t.Error("the result was acknowledged before it was on disk")
		}
	}
}

// newWithStandby is a Runner on a server of its own, whose sessions commit as told.
// standby names a synchronous standby that there is not: who waits for it waits until it
// is named no more.
func newWithStandby(t *testing.T, commit string, opts jobrun.Options) (pool *pgxpool.Pool, r *jobrun.Runner, standby func(name string)) {
	t.Helper()
	server, err := pgtest.Start(t.Context(), pgtest.Options{Durable: true})
	if err != nil {
		t.Skip(err) // an existing server with other settings
	}
	t.Cleanup(server.Stop)
	config, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["synchronous_commit"] = commit
	pool, err = pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r = newRunner(t, pool, opts)
	if err := r.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return pool, r, func(name string) {
		for _, sql := range []string{`ALTER SYSTEM SET synchronous_standby_names = '` + name + `'`, `SELECT pg_reload_conf()`} {
			if _, err := pool.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	}
}

// With synchronous_commit local, an acknowledged claim or result could be gone after a
// fail-over to a synchronous standby: both wait for the standby all the same.
func TestWhatIsAcknowledgedIsOnTheSynchronousStandby(t *testing.T) {
	t.Parallel()
	pool, r, standby := newWithStandby(t, "local", jobrun.Options{})
	wait := func(sessions int) func() bool {
		return func() bool {
			return query[int](t, pool, `SELECT count(*)::int FROM pg_stat_activity WHERE wait_event = 'SyncRep'`) == sessions
		}
	}
	// The setting takes effect some time after it was made: when a commit of somebody else waits.
	var probes sync.WaitGroup
	effective := func() {
		standby("none")
		var done atomic.Bool
		done.Store(true)
		eventually(t, "anybody waits for the standby", func() bool {
			if done.Swap(false) {
				probes.Go(func() {
					_, err := pool.Exec(context.Background(), `WITH wait AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)) SELECT pg_logical_emit_message(true, 'probe', 'x') FROM wait`)
					if err != nil {
						t.Error(err)
					}
					done.Store(true)
				})
			}
			return wait(1)()
		})
	}
	started, goOn, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(func() { standby(""); release(); probes.Wait() })
	effective()
	go func() {
		_, err := r.RunDate(context.Background(), jobrun.Job{Name: "daily", Func: func(context.Context, *jobrun.Run) error {
			close(started)
			<-goOn
			return nil
		}}, date)
		ended <- err
	}()
	eventually(t, "the claim waits for the standby", wait(2))
	standby("")
	<-started
	effective()
	release()
	eventually(t, "the result waits for the standby", wait(2))
	standby("")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A claim whose statement is given up while it waits for the standby is committed on
// the primary, and found there: the function starts only when it is on the standby too.
func TestClaimThatIsFoundAgainIsOnTheSynchronousStandby(t *testing.T) {
	t.Parallel()
	pool, r, standby := newWithStandby(t, "on", jobrun.Options{})
	waits := func(statement string) func() bool {
		return func() bool {
			return query[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE '%'||$1||'%')`, statement)
		}
	}
	t.Cleanup(func() { standby("") })
	var started atomic.Bool
	ended := make(chan jobrun.Result, 1)
	for n := 0; ; n++ { // until the setting has taken effect
		standby("none")
		job := jobrun.Job{Name: fmt.Sprint("daily-", n), Func: func(context.Context, *jobrun.Run) error { started.Store(true); return nil }}
		started.Store(false)
		go func() {
			result, err := r.RunDate(context.Background(), job, date)
			if err != nil {
				t.Error(err)
			}
			ended <- result
		}()
		waiting := false
		eventually(t, "the claim waits, or did not have to", func() bool {
			waiting = waits("INSERT INTO")()
			return waiting || started.Load()
		})
		if waiting {
			break
		}
		standby("")
		<-ended
	}
	eventually(t, "the claim was given up, found again, and waits once more", waits("pg_logical_emit_message"))
	if started.Load() {
		t.Error("the function was started although its claim is on the primary alone")
	}
	standby("")
	if result := <-ended; result.Record.Status != jobrun.Succeeded || result.Record.Attempt != 1 {
		t.Errorf("%+v", result)
	}
}

// After a COMMIT whose fate is unknown, what a later call of the attempt finds may be on
// the primary alone: it says so only when the standby has it, and so does the end of a
// run that Complete has ended.
func TestWhatIsFoundAfterAnUnknownCommitIsOnTheSynchronousStandby(t *testing.T) {
	t.Parallel()
	calls := map[string]func(run *jobrun.Run) error{
		"once": func(run *jobrun.Run) error {
			_, err := run.Once(context.Background(), "item", func(tx pgx.Tx) error { return run.SetCheckpoint(context.Background(), tx, 7) })
			return err
		},
		"each": func(run *jobrun.Run) error {
			_, err := jobrun.Each(context.Background(), run, jobrun.FromSlice([]string{"item"}), strings.Clone,
				func(context.Context, pgx.Tx, string) error { return nil }, nil)
			return err
		},
		"checkpoint": func(run *jobrun.Run) error {
			var v int
			found, err := run.Checkpoint(context.Background(), &v)
			if err == nil && (!found || v != 7) {
				return fmt.Errorf("checkpoint %d", v)
			}
			return err
		},
		"complete": func(run *jobrun.Run) error { return run.Complete(context.Background(), nil) },
		"end":      nil, // of the run
	}
	for first, then := range map[string][]string{"once": {"once", "checkpoint"}, "each": {"each"}, "complete": {"end"}} {
		for _, second := range then {
			t.Run(first+" "+second, func(t *testing.T) {
				t.Parallel()
				pool, r, standby := newWithStandby(t, "on", jobrun.Options{DatabaseTimeout: 5 * time.Second})
				waits := func(statement string) func() bool {
					return func() bool {
						return query[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query ILIKE $1||'%')`, statement)
					}
				}
				t.Cleanup(func() { standby("") })
				var f *flight
				told := make(chan error, 1)
				for n := 0; ; n++ { // until the setting has taken effect
					standby("")
					f = launch(t, t.Context(), r, jobrun.Job{Name: fmt.Sprint("daily-", n)})
					standby("none")
					go func() { told <- calls[first](f.run) }()
					waiting := false
					var err error
					eventually(t, "the COMMIT waits, or did not have to", func() bool {
						waiting = waits("commit")()
						select {
						case err = <-told:
							return true
						default:
							return waiting
						}
					})
					if waiting {
						break
					}
					if err != nil {
						t.Error(err)
					}
					standby("")
					_, _ = f.end(t, nil)
				}
				exec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query ILIKE 'commit%'`)
				if err := <-told; !errors.Is(err, jobrun.ErrOutcomeUnknown) {
					t.Errorf("the COMMIT: %v", err)
				}
				eventually(t, "nobody waits any more", func() bool { return !waits("")() })
				if calls[second] == nil {
					f.tell <- nil
				} else {
					go func() { told <- calls[second](f.run) }()
				}
				eventually(t, "the later call waits for the standby", func() bool {
					select {
					case err := <-told:
						t.Fatalf("it did not wait: %v", err)
					case <-f.done:
						t.Fatalf("the run ended without waiting: %+v, %v", f.res, f.err)
					default:
					}
					return waits("%pg_logical_emit_message")()
				})
				standby("")
				if calls[second] == nil {
					if <-f.done; f.err != nil || f.res.Record.Status != jobrun.Succeeded {
						t.Errorf("%+v, %v", f.res, f.err)
					}
					return
				}
				if err := <-told; err != nil {
					t.Error(err)
				}
				if _, err := f.end(t, nil); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestInfiniteTimesDoNotHideStaleRuns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, started_at, finished_at) VALUES
		('odd:2026-01-01', 'RUNNING', 'node-1', '-infinity', NULL), ('odd:2026-01-05', 'RUNNING', 'node-1', '294276-12-31 23:59:59.9+00', NULL), ('odd:2026-01-06', 'RUNNING', 'node-1', '4713-01-01 00:00:00+00 BC', NULL), ('odd:2026-01-02', 'SUCCEEDED', 'node-1', now(), 'infinity'),
		('odd:2026-01-03', 'RUNNING', 'node-1', '2020-01-01', NULL), ('odd:2026-01-04', 'FAILED', 'node-1', '-infinity', 'infinity')`)
	stale, err := r.Stale(t.Context())
	if err != nil || len(stale) != 3 {
		t.Errorf("Stale: %+v, %v", stale, err)
	}
	if problems, err := r.Attention(t.Context(), nil); err != nil || len(problems) != 4 {
		t.Errorf("Attention: %+v, %v", problems, err)
	}
}

func TestCallbackThatEndsItsGoroutineLeavesNoRunBehind(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{OnEvent: func(_ context.Context, e jobrun.Event) {
		if e.Record.Status == jobrun.Running {
			runtime.Goexit()
		}
	}})
	executed := false
	job := jobrun.Job{Name: "callback", Func: func(context.Context, *jobrun.Run) error { executed = true; return nil }}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = r.RunDate(context.Background(), job, date) })
	wg.Wait()
	rec, err := r.Get(t.Context(), job.Key(date))
	if err != nil || executed || rec.Status != jobrun.Failed || rec.NextAttemptAt.IsZero() {
		t.Errorf("executed %t, %+v, %v; want FAILED, due", executed, rec, err)
	}
}

// The connection that is kept back dies, and its place in the pool goes to the
// job, which waits for one more: the heartbeats go on beside the pool.
func TestKeptConnectionIsReplacedBesideAnExhaustedPool(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	const name = "exhausted"
	pool := db.PoolWith(t, func(c *pgxpool.Config) {
		c.MaxConns = 3
		c.ConnConfig.RuntimeParams["application_name"] = name
	})
	r := newRunner(t, pool, jobrun.Options{Lease: 2 * time.Second})
	job := jobrun.Job{Name: "hog", Func: func(ctx context.Context, run *jobrun.Run) error {
		release := make(chan struct{})
		var all sync.WaitGroup
		for range 4 { // two get a connection, two wait for one
			all.Go(func() {
				if conn, err := pool.Acquire(ctx); err == nil {
					<-release
					conn.Release()
				}
			})
		}
		defer all.Wait()
		defer close(release)
		eventually(t, "the pool is used up", func() bool { return pool.Stat().AcquiredConns() == 3 })
		before := query[string](t, db.Pool, `SELECT heartbeat_at::text FROM batch_job_attempt WHERE job_key = $1`, run.Key())
		exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND query LIKE '%batch_job_%'`, name)
		eventually(t, "two heartbeats later", func() bool {
			return ctx.Err() != nil || query[bool](t, db.Pool, `SELECT heartbeat_at > $2::text::timestamptz + interval '1 second' FROM batch_job_attempt WHERE job_key = $1`, run.Key(), before)
		})
		return context.Cause(ctx)
	}}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
		t.Errorf("%+v, %v", res, err)
	}
}

// Claims that wait for a stranger's transaction do not keep the connection from
// heartbeats and results.
func TestBlockedClaimsDoNotStarveHeartbeats(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 3 })
	r := newRunner(t, pool, jobrun.Options{Lease: 2 * time.Second})
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const blocked = 8
	for n := range blocked {
		if _, err := tx.Exec(t.Context(), `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'node-1')`, fmt.Sprintf("blocked-%d:2026-09-15", n)); err != nil {
			t.Fatal(err)
		}
	}
	claims, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	job := jobrun.Job{Name: "hog", Func: func(ctx context.Context, run *jobrun.Run) error {
		for range 2 {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				return err
			}
			all.Go(func() { <-claims.Done(); conn.Release() })
		}
		for n := range blocked {
			all.Go(func() {
				_, _ = r.RunDate(claims, jobrun.Job{Name: fmt.Sprint("blocked-", n), Func: noop}, date)
			})
		}
		eventually(t, "heartbeats go on for two leases", func() bool {
			return ctx.Err() != nil || query[bool](t, db.Pool, `SELECT heartbeat_at > started_at + interval '4 seconds' FROM batch_job_attempt WHERE job_key = $1`, run.Key())
		})
		return context.Cause(ctx)
	}}
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
		t.Errorf("%+v, %v", res, err)
	}
	stop()
	_ = tx.Rollback(context.Background())
	all.Wait()
}

// What a person or a retry was allowed to do is void once somebody else has used
// the occasion, even if the run looks as before.
func TestPermissionIsVoidOnceAnotherProgramHasRunIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const (
		byHand = `UPDATE batch_job_run SET status = 'RUNNING', started_at = now(), finished_at = NULL, error_message = NULL WHERE job_key = $1`
		paid   = `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`
		half   = `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'half is paid by hand' WHERE job_key = $1`
	)
	retry := jobrun.Retry{MaxAttempts: 5, Backoff: func(int) time.Duration { return 0 }}
	for name, c := range map[string]struct {
		err      error // of the first attempt
		retry    jobrun.Retry
		approved bool
		then     []string
	}{
		"approved-taken-over":  {errors.New("boom"), jobrun.Retry{}, true, []string{neighbourTakes, neighbourEnds}},
		"approved-done-again":  {nil, jobrun.Retry{}, true, []string{byHand, paid}},
		"due-run-by-hand":      {errors.New("boom"), retry, false, []string{byHand, half}},
		"due-paid-then-failed": {errors.New("boom"), retry, false, []string{paid, half}},
	} {
		executions := 0
		job := jobrun.Job{Name: name, Retry: c.retry, Func: func(context.Context, *jobrun.Run) error { executions++; return c.err }}
		res, _ := r.RunDate(t.Context(), job, date)
		if c.approved {
			if _, err := r.ApproveRerun(t.Context(), res.Record, jobrun.Action{By: "operator", Reason: "again", Force: true}); err != nil {
				t.Fatal(err)
			}
		}
		for _, sql := range c.then {
			exec(t, db.Pool, sql, job.Key(date))
		}
		results, err := r.RetryDue(t.Context(), job)
		if again, againErr := r.RunDate(t.Context(), job, date); err != nil || len(results) != 0 || againErr != nil || again.Ran() || executions != 1 {
			t.Errorf("%s: executed %d times: %+v, %v, %+v, %v", name, executions, results, err, again, againErr)
		}
		history, err := r.History(t.Context(), job.Key(date))
		if err != nil || history[len(history)-1].Action == nil && !strings.Contains(history[len(history)-1].Error, "outside") && history[len(history)-1].WorkerID != "node-1" {
			t.Errorf("%s: the history ends with %+v, %v", name, history[len(history)-1], err)
		}
	}
}

// Every answer to the claim is lost until a neighbour has taken the run over: our
// token is still there, but the run is not ours.
func TestRepeatedClaimDoesNotAdoptANeighboursRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, r := proxied(t, db, jobrun.Options{})
	p.CutAfterN(claimStatement, 1000)
	executed := false
	job := jobrun.Job{Name: "pay", Func: func(context.Context, *jobrun.Run) error { executed = true; return nil }}
	var wg sync.WaitGroup
	wg.Go(func() {
		eventually(t, "the claim is there", func() bool {
			return query[bool](t, db.Pool, `SELECT count(*) > 0 FROM batch_job_run`)
		})
		exec(t, db.Pool, neighbourFails, job.Key(date))
		exec(t, db.Pool, neighbourTakes, job.Key(date))
		p.Disarm()
	})
	res, err := r.RunDate(t.Context(), job, date)
	wg.Wait()
	if row := query[string](t, db.Pool, `SELECT status || ' ' || worker_id FROM batch_job_run`); executed || row != "RUNNING node-1" || p.Cuts() == 0 {
		t.Errorf("executed: %t, the row is %s after %d cuts; %+v, %v", executed, row, p.Cuts(), res, err)
	}
}
