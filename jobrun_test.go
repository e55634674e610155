package jobrun_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	osexec "os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// seoul is the business zone of most tests.
var seoul = func() *time.Location {
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		panic(err)
	}
	return zone
}()

// newRunner returns a Runner on the pool whose log lines go to the test's log.
func newRunner(t testing.TB, pool *pgxpool.Pool, opts jobrun.Options) *jobrun.Runner {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := jobrun.New(pool, seoul, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return r
}

// query returns the single value of a query.
func query[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	rows, _ := pool.Query(context.Background(), sql, args...)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// exec executes a statement.
func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

var date = jobrun.MustParseDate("2026-09-15")

var noop = func(context.Context, *jobrun.Run) error { return nil }

func TestRunSucceedsOncePerDate(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	ctx := t.Context()
	executions := 0
	job := jobrun.Job{Name: "daily-settlement", Func: func(ctx context.Context, run *jobrun.Run) error {
		executions++
		run.AddProcessed(7)
		run.AddFailed(1)
		return nil
	}}
	first, err := r.RunDate(ctx, job, date)
	if err != nil {
		t.Fatal(err)
	}
	if !first.Ran() || first.Record.Status != jobrun.Succeeded || first.Record.Attempt != 1 || first.Record.ItemsProcessed != 7 || first.Record.ItemsFailed != 1 {
		t.Errorf("first call: %+v", first)
	}
	for range 3 {
		again, err := r.RunDate(ctx, job, date)
		if err != nil || again.Decision != jobrun.AlreadySucceeded || again.Record != first.Record {
			t.Errorf("later call: %+v, %v; want AlreadySucceeded with %+v", again, err, first.Record)
		}
	}
	if executions != 1 {
		t.Errorf("executed %d times", executions)
	}
	got, err := r.Get(ctx, "daily-settlement:2026-09-15")
	if err != nil || got != first.Record {
		t.Errorf("Get: %+v, %v; want %+v", got, err, first.Record)
	}
}

// The binary executes itself. Each child claims one key after the other and
// waits before each for a byte on its standard input: the barrier, which the
// test opens when all of them have asked for it on their standard output.
func init() {
	pgtest.RegisterChild("claim-all", func() int {
		if err := claimAll(context.Background(), os.Getenv("CHILD_DATABASE_URL")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	})
}

const raceKeys, raceProcesses = 200, 4

func claimAll(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	for n := range raceKeys {
		if _, err := os.Stdout.Write([]byte{'?'}); err != nil {
			return err
		}
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return err
		}
		job := jobrun.Job{Name: fmt.Sprintf("race-%d", n), Func: func(ctx context.Context, run *jobrun.Run) error {
			_, err := pool.Exec(ctx, `INSERT INTO execution VALUES ($1, $2)`, run.Key(), os.Getpid())
			return err
		}}
		res, err := r.RunDate(ctx, job, date)
		if err != nil {
			return err
		}
		switch res.Decision {
		case jobrun.Ran, jobrun.AlreadyRunning, jobrun.AlreadySucceeded:
		default:
			return fmt.Errorf("unexpected decision %s", res.Decision)
		}
	}
	return nil
}

// raceInRounds starts the child in several processes and opens the barrier once a
// round, when all of them wait at it.
func raceInRounds(t *testing.T, name string, rounds int, env func(process int) []string) {
	t.Helper()
	type child struct {
		cmd *osexec.Cmd
		in  io.WriteCloser
		out io.ReadCloser
		err bytes.Buffer
	}
	var children []*child
	for n := range raceProcesses {
		c := &child{cmd: pgtest.Reexec(t, name, env(n)...)}
		c.in, _ = c.cmd.StdinPipe()
		c.out, _ = c.cmd.StdoutPipe()
		c.cmd.Stderr = &c.err
		if err := c.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		children = append(children, c)
	}
race:
	for range rounds {
		for _, c := range children {
			if _, err := io.ReadFull(c.out, make([]byte, 1)); err != nil {
				t.Errorf("a child ended early: %v", err)
				break race
			}
		}
		for _, c := range children {
			_, _ = c.in.Write([]byte{'!'})
		}
	}
	for _, c := range children {
		_ = c.in.Close()
		if err := c.cmd.Wait(); err != nil {
			t.Errorf("child: %v: %s", err, &c.err)
		}
	}
}

func TestProcessesOneExecutionPerKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE TABLE execution (key text, pid int)`)
	raceInRounds(t, "claim-all", raceKeys, func(int) []string { return []string{"CHILD_DATABASE_URL=" + db.URL} })
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM execution`); n != raceKeys {
		t.Errorf("%d executions of %d keys", n, raceKeys)
	}
	if n := query[int](t, db.Pool, `SELECT count(DISTINCT key)::int FROM execution`); n != raceKeys {
		t.Errorf("%d keys executed, want %d", n, raceKeys)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_attempt WHERE attempt = 1 AND outcome = 'SUCCEEDED'`); n != raceKeys {
		t.Errorf("%d history rows, want %d", n, raceKeys)
	}
}

func TestGoroutinesOneExecutionPerKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var runners []*jobrun.Runner
	for range 5 {
		runners = append(runners, newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 6 }), jobrun.Options{}))
	}
	for round := range 20 {
		var executions, ran, lost atomic.Int64
		job := jobrun.Job{Name: fmt.Sprintf("race-%d", round), Func: func(context.Context, *jobrun.Run) error { executions.Add(1); return nil }}
		start := make(chan struct{})
		var wg sync.WaitGroup
		for g := range 50 {
			wg.Go(func() {
				<-start
				res, err := runners[g%5].RunDate(context.Background(), job, date)
				switch {
				case err != nil:
					t.Error(err)
				case res.Ran():
					ran.Add(1)
				default:
					lost.Add(1)
				}
			})
		}
		close(start)
		wg.Wait()
		if executions.Load() != 1 || ran.Load() != 1 || lost.Load() != 49 {
			t.Fatalf("round %d: %d executions, %d ran, %d lost", round, executions.Load(), ran.Load(), lost.Load())
		}
	}
}

func TestFailureIsRecordedAndReturned(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	theirs := errors.New("ledger out of balance")
	job := jobrun.Job{Name: "daily-settlement", Func: func(context.Context, *jobrun.Run) error { return theirs }}
	res, err := r.RunDate(t.Context(), job, date)
	var failed *jobrun.RunError
	if !errors.As(err, &failed) || !errors.Is(err, theirs) || failed.Attempt != 1 || res.Record.Status != jobrun.Failed || res.Record.Error != theirs.Error() {
		t.Fatalf("got %+v, %v", res, err)
	}
	res, err = r.RunDate(t.Context(), job, date)
	if err != nil || res.Decision != jobrun.AlreadyFailed {
		t.Fatalf("second call: %+v, %v", res, err)
	}
}
