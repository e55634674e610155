package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
)

// work is a service with all the jobs, until it is told to stop. For each line on its
// input it prints how it is.
func work(ctx context.Context, url string, jobs int) error {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	config.MaxConns, config.MaxConnIdleTime, config.HealthCheckPeriod = 30, 15*time.Second, 5*time.Second // so that those in use are seen
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	runner, err := jobrun.New(pool, time.UTC, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	always := context.WithoutCancel(ctx)
	c := cron.New(cron.WithLocation(time.UTC))
	for n := range jobs {
		job := jobrun.Job{
			Name: fmt.Sprintf("job-%03d", n), Every: time.Minute, Func: func(ctx context.Context, run *jobrun.Run) error { return once(ctx, pool, run) },
			Retry: jobrun.Retry{MaxAttempts: 3, Backoff: func(int) time.Duration { return 2 * time.Second }},
		}
		if _, err := runner.Schedule(always, c, "* * * * *", job); err != nil {
			return err
		}
	}
	if _, err := c.AddFunc("@every 1s", func() { _, _ = runner.RetryDue(always) }); err != nil {
		return err
	}
	c.Start()
	asked := make(chan struct{})
	go func() {
		defer close(asked) // by the end of the input
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			_ = json.NewEncoder(os.Stdout).Encode(health{Heap: m.HeapAlloc, Goroutines: runtime.NumGoroutine()})
		}
	}()
	select {
	case <-ctx.Done():
	case <-asked:
	}
	c.Stop()
	limit, cancel := context.WithTimeout(always, 2*time.Minute)
	defer cancel()
	return runner.Shutdown(limit)
}

// once is the work of every job: by its key it is short, or long enough for heartbeats,
// fails the first time, or has items.
func once(ctx context.Context, pool *pgxpool.Pool, run *jobrun.Run) error {
	if _, err := pool.Exec(ctx, `INSERT INTO execution (job_key, attempt) VALUES ($1, $2)`, run.Key(), run.Attempt()); err != nil {
		return err
	}
	h := fnv.New32a()
	_, _ = io.WriteString(h, run.Key())
	kind, length := h.Sum32()%100, time.Duration(h.Sum32()/100%2000)*time.Millisecond
	switch {
	case kind < 10 && run.Attempt() == 1:
		return errors.New("fails the first time")
	case kind < 20:
		length += 35 * time.Second // longer than the interval of heartbeats
	case kind < 30:
		items := make([]int, 50)
		for i := range items {
			items[i] = i
		}
		if _, err := jobrun.Each(ctx, run, jobrun.FromSlice(items), strconv.Itoa, func(context.Context, pgx.Tx, int) error { return nil }, nil); err != nil {
			return err
		}
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(length):
	}
	_, err := pool.Exec(ctx, `UPDATE execution SET finished = true WHERE job_key = $1 AND attempt = $2`, run.Key(), run.Attempt())
	return err
}

// health is what a worker says of itself, after a collection of garbage.
type health struct {
	Heap       uint64
	Goroutines int
}

// worker is a process that the parent started.
type worker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func startWorker(c config, url string) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	w := &worker{cmd: exec.Command(self, "-jobs", strconv.Itoa(c.jobs))}
	w.cmd.Env, w.cmd.Stderr = append(os.Environ(), "SOAK_WORKER="+url), os.Stderr
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the parent, whose end is theirs
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.out = json.NewDecoder(out)
	return w, w.cmd.Start()
}

func (w *worker) ask() (h health, err error) {
	if _, err := io.WriteString(w.in, "how\n"); err != nil {
		return h, err
	}
	return h, w.out.Decode(&h)
}

// stop lets a worker come to its end.
func (w *worker) stop() error {
	_ = w.in.Close()
	return w.cmd.Wait()
}

func (w *worker) kill() {
	if w.cmd.ProcessState == nil {
		_ = w.cmd.Process.Kill()
		_ = w.cmd.Wait()
	}
}
