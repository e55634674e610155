//go:build unix

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
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// The child executes one run and tells on its standard output how it goes.
var _ = pgtest.RegisterChild("hold-lease", func() int {
	pool, err := pgxpool.New(context.Background(), os.Getenv("CHILD_DATABASE_URL"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer pool.Close()
	span, _ := time.ParseDuration(os.Getenv("CHILD_LEASE"))
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Lease: span, WorkerID: "child", Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	res, err := r.RunDate(context.Background(), jobrun.Job{Name: "nightly", Func: func(ctx context.Context, _ *jobrun.Run) error {
		defer context.AfterFunc(ctx, func() { fmt.Println("context ended:", errors.Is(context.Cause(ctx), jobrun.ErrLeaseLost)) })()
		fmt.Println("running")
		_, err := os.Stdin.Read(make([]byte, 1))
		return err
	}}, date)
	switch {
	case err == nil:
		fmt.Println(res.Decision, res.Record.Status)
	case errors.Is(err, jobrun.ErrLeaseLost):
		fmt.Println(res.Decision, "and lost the lease")
	default:
		fmt.Println(err)
	}
	return 0
})

// leaseChild is a process that holds a lease.
type leaseChild struct {
	cmd *osexec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	log logText
}

// startLeaseChild returns when its job runs.
func startLeaseChild(t *testing.T, url string, span time.Duration) *leaseChild {
	t.Helper()
	c := &leaseChild{cmd: pgtest.Reexec(t, "hold-lease", "CHILD_DATABASE_URL="+url, "CHILD_LEASE="+span.String())}
	c.in, _ = c.cmd.StdinPipe()
	out, _ := c.cmd.StdoutPipe()
	c.out, c.cmd.Stderr = bufio.NewReader(out), &c.log
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	})
	c.says(t, "running")
	return c
}

// says reads the child's next line.
func (c *leaseChild) says(t *testing.T, want string) {
	t.Helper()
	line := make(chan string, 1)
	go func() {
		text, err := c.out.ReadString('\n')
		if err != nil {
			text = err.Error()
		}
		line <- strings.TrimSuffix(text, "\n")
	}()
	select {
	case got := <-line:
		if got != want {
			t.Fatalf("the child says %q, want %q; its log: %q", got, want, c.log.lines())
		}
	case <-time.After(patience):
		t.Fatalf("the child never said %q; its log: %q", want, c.log.lines())
	}
}

// signal sends the child alone a signal.
func (c *leaseChild) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// silence waits until the attempt has been silent for longer than its lease.
func silence(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, "silent for longer than the lease", func() bool {
		return query[bool](t, pool, `SELECT heartbeat_at + lease * 1.2 < clock_timestamp() FROM batch_job_attempt`)
	})
}

func TestStoppedProcessThatIsStillTheHolderGoesOn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := startLeaseChild(t, db.URL, time.Second)
	beaten(t, db.Pool, "nightly:2026-09-15", 1)
	c.signal(t, syscall.SIGSTOP)
	silence(t, db.Pool)
	r := newRunner(t, db.Pool, jobrun.Options{})
	if stale, err := r.Stale(t.Context()); err != nil || len(stale) != 1 || stale[0].Alive || stale[0].Silent < time.Second {
		t.Errorf("stale while it is stopped: %+v, %v", stale, err)
	}
	c.signal(t, syscall.SIGCONT)
	beaten(t, db.Pool, "nightly:2026-09-15", 2)
	if stale, err := r.Stale(t.Context()); err != nil || len(stale) != 0 {
		t.Errorf("stale after it went on: %+v, %v", stale, err)
	}
	_, _ = c.in.Write([]byte{'!'})
	c.says(t, "RAN SUCCEEDED")
	if len(c.log.lines("level=WARN", "the attempt still holds its run", "gap=")) != 1 || c.log.lines("lease lost") != nil {
		t.Errorf("logged %q", c.log.lines())
	}
	oneSuccess(t, db.Pool, "nightly:2026-09-15")
}

// TestStoppedDuringABeatIsStillTheHolder: the beat that was under way when the
// process was stopped was sent before the end of the lease, so it is not the one
// renewal that the end of the lease calls for.
func TestStoppedDuringABeatIsStillTheHolder(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := pgtest.NewProxy(t, db.URL)
	c := startLeaseChild(t, p.URL(), 3*time.Second) // the renewal after the stop has a part of it
	beaten(t, db.Pool, "nightly:2026-09-15", 1)
	p.Hold(beatStatement)
	eventually(t, "a beat is under way", func() bool { return p.Held() == 1 })
	c.signal(t, syscall.SIGSTOP)
	silence(t, db.Pool)
	c.signal(t, syscall.SIGCONT)
	eventually(t, "that beat is missed", func() bool { return c.log.lines("heartbeat missed") != nil || c.log.lines("lease lost") != nil })
	p.Release()
	beaten(t, db.Pool, "nightly:2026-09-15", 2)
	_, _ = c.in.Write([]byte{'!'})
	c.says(t, "RAN SUCCEEDED")
	if c.log.lines("lease lost") != nil {
		t.Errorf("logged %q", c.log.lines())
	}
	oneSuccess(t, db.Pool, "nightly:2026-09-15")
}

func TestStoppedProcessThatWasSupersededLosesItsLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := startLeaseChild(t, db.URL, time.Second)
	c.signal(t, syscall.SIGSTOP)
	silence(t, db.Pool)
	exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), approved_at = now(),
		approved_attempt = attempt, approved_status = 'FAILED', approved_worker = worker_id, approved_finished_at = now()`)
	f := launch(t, t.Context(), newRunner(t, db.Pool, jobrun.Options{Lease: time.Second}), jobrun.Job{Name: "nightly"})
	c.signal(t, syscall.SIGCONT)
	c.says(t, "context ended: true")
	_, _ = c.in.Write([]byte{'!'})
	c.says(t, "RAN and lost the lease")
	beaten(t, db.Pool, f.run.Key(), 1)
	f.succeeds(t, 2)
	if f.run.Trigger() != jobrun.TriggerRerun || !query[bool](t, db.Pool, `SELECT status = 'SUCCEEDED' AND attempt = 2 AND worker_id NOT LIKE 'child%' FROM batch_job_run`) {
		t.Error(query[string](t, db.Pool, `SELECT to_jsonb(r)::text FROM batch_job_run AS r`))
	}
}

func TestKilledProcessLeavesTheRunToAPerson(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := startLeaseChild(t, db.URL, 2*time.Minute)
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{Name: "nightly", Retry: jobrun.Retry{MaxAttempts: 5}, Func: func(context.Context, *jobrun.Run) error { panic("executed") }}
	for _, age := range []struct {
		shift string
		stale bool
	}{{"1 minute", false}, {"58 s", false}, {"3 s", true}, {"100 days", true}} {
		exec(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = heartbeat_at - $1::text::interval, started_at = started_at - $1::text::interval`, age.shift)
		exec(t, db.Pool, `UPDATE batch_job_run SET started_at = started_at - $1::text::interval`, age.shift)
		stale, err := r.Stale(t.Context())
		if err != nil || (len(stale) == 1) != age.stale || age.stale && (stale[0].Alive || stale[0].Silent < 2*time.Minute || stale[0].Attempt != 1 || !strings.HasPrefix(stale[0].WorkerID, "child-")) {
			t.Errorf("%s further: stale %+v, %v", age.shift, stale, err)
		}
		if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyRunning {
			t.Errorf("%s further: %+v, %v", age.shift, res, err)
		}
	}
	if !query[bool](t, db.Pool, `SELECT status = 'RUNNING' AND finished_at IS NULL AND attempt = 1 FROM batch_job_run`) {
		t.Error("something changed the row")
	}
}

func TestForceEndsAnAttemptOfAnotherProcess(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := startLeaseChild(t, db.URL, time.Second)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const key = "nightly:2026-09-15"
	beaten(t, db.Pool, key, 1)
	if _, err := r.MarkFailed(t.Context(), recordOf(t, r, key), operator); !errors.Is(err, jobrun.ErrAlive) {
		t.Errorf("it beats: %v", err)
	}
	marked, err := r.MarkFailed(t.Context(), recordOf(t, r, key), forced)
	if err != nil {
		t.Fatal(err)
	}
	c.says(t, "context ended: true")
	_, _ = c.in.Write([]byte{'!'})
	c.says(t, "RAN and lost the lease")
	eventually(t, "its log says who ended it", func() bool { return c.log.lines("level=ERROR", "a person marked it failed") != nil })
	if now := recordOf(t, r, key); now.Status != jobrun.Failed || now.Error != marked.Error || now.FinishedAt != marked.FinishedAt {
		t.Errorf("it was %+v and is %+v", marked, now)
	}
}
