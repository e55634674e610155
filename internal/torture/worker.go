//go:build unix

package main

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-ccb5b62c/jobrun"
)

// Short enough that leases run out and runs go stale while one looks on.
const (
	lease      = time.Second
	staleAfter = 3 * time.Second
)

// settings are what the command tells a worker process, drawn for each.
type settings struct {
	Name        string        // its session and the label of its worker id
	URL, LogURL string        // through its proxy; straight to the server
	Begin       time.Time     // of the first date
	Every       time.Duration // a new date begins
	Shift, Skew time.Duration // of its clock: the command's, its own
	Mode        pgx.QueryExecMode
	Isolation   string // default of its sessions
	Async       bool   // its sessions do not wait for the disk
	Conns       int
	Calm        bool // nothing goes wrong in the jobs any more
	Last        int  // with Calm: the last date
	Seed        uint64
}

// workerVariable holds the settings of a process that is a worker.
const workerVariable = "JOBRUN_TORTURE_WORKER"

type worker struct {
	settings
	pool *pgxpool.Pool // the library's and the jobs'
	db   *sql.DB       // the same for database/sql

	notes notebook
	r     *jobrun.Runner
	jobs  []jobrun.Job
	calm  atomic.Bool
}

// runWorker runs jobs until SIGTERM, or the command's end. Its exit code is 0
// after an orderly shutdown.
func runWorker(text string) int {
	var w worker
	err := json.Unmarshal([]byte(text), &w.settings)
	if err == nil {
		err = w.run()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker %s: %v\n", w.Name, err)
		return 1
	}
	return 0
}

func (w *worker) run() error {
	go func() { // the command holds the other end
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(4)
	}()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	w.calm.Store(w.Calm)
	var err error
	if w.pool, err = open(ctx, w.URL, w.Name, w.Conns, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = w.Mode
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = w.Isolation
		if w.Async {
			c.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
		}
	}); err != nil {
		return err
	}
	w.db = stdlib.OpenDBFromPool(w.pool)
	if w.notes, err = newNotebook(ctx, w.LogURL); err != nil {
		return err
	}
	w.r, err = jobrun.New(w.pool, seoul, &jobrun.Options{
		Lease: lease, StaleAfter: staleAfter, WorkerID: w.Name, Schema: "public",
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Now:    w.now,
	})
	if err != nil {
		return err
	}
	for _, k := range kinds {
		w.jobs = append(w.jobs, w.job(k))
	}
	go w.exhaust()
	var loops sync.WaitGroup
	for n := range 4 {
		loops.Go(func() {
			rng := rand.New(rand.NewPCG(w.Seed, uint64(n)))
			for ctx.Err() == nil {
				w.call(context.WithoutCancel(ctx), rng)
				w.pause(ctx, time.Duration(rng.ExpFloat64()*float64(10*time.Millisecond)))
			}
		})
	}
	<-ctx.Done()
	limit, cancel := context.WithTimeout(context.Background(), 2*lease)
	defer cancel()
	err = w.r.Shutdown(limit) // interrupts what takes longer
	loops.Wait()
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// open opens a pool under a name for its sessions.
func open(ctx context.Context, url, name string, conns int, set func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	c.MaxConns = int32(conns)
	c.ConnConfig.RuntimeParams["application_name"] = name
	c.ConnConfig.ConnectTimeout = 5 * time.Second
	if set != nil {
		set(c)
	}
	return pgxpool.NewWithConfig(ctx, c)
}

// now is the process's clock.
func (w *worker) now() time.Time { return time.Now().Add(w.Shift + w.Skew) }

// date is a date of the run, from 0. All of them are past: Missed and CatchUp leave out
// those that are not due yet.
func date(n int) jobrun.Date { return jobrun.MustParseDate(firstDate).AddDays(n) }

const (
	firstDate = "1900-01-01"
	mostDates = 45_000
)

// stretches are all dates up to the number last, in parts that one call takes.
func stretches(last int) iter.Seq2[jobrun.Date, jobrun.Date] {
	const longest = 4000
	return func(yield func(from, to jobrun.Date) bool) {
		for n := 0; n <= last; n += longest {
			if !yield(date(n), date(min(last, n+longest-1))) {
				return
			}
		}
	}
}

// today is the number of the date that the command's clock has come to.
func today(begin time.Time, every time.Duration) int { return max(0, int(time.Since(begin)/every)) }

// executed is how a call learns which attempt it has executed, if any: the answer to
// one that was superseded tells of another.
type executed struct {
	execution string
	attempt   int
}

type executedKey struct{}

// call makes one call of the library, as cron callbacks, catch-ups and people do.
func (w *worker) call(ctx context.Context, rng *rand.Rand) {
	last := today(w.Begin, w.Every)
	n := max(0, last-rng.IntN(8))
	k := rng.IntN(byDate)
	if w.Calm { // until everything has come to an end
		all, err := w.r.RetryDue(ctx, w.jobs...)
		w.answered(ctx, all, err)
		for from, to := range stretches(w.Last) {
			all, err = w.r.CatchUp(ctx, w.jobs[k], from, to, 3)
			w.answered(ctx, all, err)
			// In an order of its own: all would come to the same date at the same time.
			missed, _ := w.r.Missed(ctx, w.jobs[k], from, to)
			for _, n := range rng.Perm(len(missed))[:min(200, len(missed))] {
				var e executed
				res, err := w.r.RunDate(context.WithValue(ctx, executedKey{}, &e), w.jobs[k], missed[n])
				w.answer(ctx, res, e, err)
			}
		}
		return
	}
	if rng.IntN(20) == 0 { // a caller that loses patience, be it with the claim or with the job
		var cancel context.CancelFunc
		patience := []time.Duration{5 * time.Millisecond, 100 * time.Millisecond}[rng.IntN(2)]
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.ExpFloat64()*float64(patience)))
		defer cancel()
	}
	var e executed
	one := context.WithValue(ctx, executedKey{}, &e)
	switch p := rng.IntN(100); {
	case p < 8:
		all, err := w.r.RetryDue(ctx, w.jobs...)
		w.answered(ctx, all, err)
	case p < 12:
		all, err := w.r.CatchUp(ctx, w.jobs[k], date(max(0, last-12)), date(last), 3)
		w.answered(ctx, all, err)
	case p < 16:
		res, err := w.r.Run(one, w.jobs[byDate+rng.IntN(2)])
		w.answer(ctx, res, e, err)
	default:
		res, err := w.r.RunDate(one, w.jobs[k], date(n))
		w.answer(ctx, res, e, err)
	}
}

// answer notes what a call has answered.
func (w *worker) answer(ctx context.Context, res jobrun.Result, e executed, err error) {
	kind := "other"
	switch _, failed := err.(*jobrun.RunError); { //nolint:errorlint // what the call says, not what the job says
	case err == nil:
		kind = ""
	case failed:
		kind = "run"
	case res.Ran() && errors.Is(err, jobrun.ErrLeaseLost):
		kind = "lost"
	case res.Ran() && errors.Is(err, jobrun.ErrOutcomeUnknown):
		kind = "unknown"
	case errors.Is(err, jobrun.ErrShutdown):
		kind = "shutdown"
	}
	w.noteAnswer(ctx, res, e, kind, err)
}

// answered notes what a call about several runs has answered: its error does not
// say which run it is about.
func (w *worker) answered(ctx context.Context, all []jobrun.Result, err error) {
	for _, res := range all {
		if err == nil {
			w.noteAnswer(ctx, res, executed{}, "", nil)
		} else if res.Ran() && res.Record.Status != jobrun.Running {
			w.noteAnswer(ctx, res, executed{}, "other", err)
		}
	}
}

func (w *worker) noteAnswer(ctx context.Context, res jobrun.Result, e executed, kind string, err error) {
	if kind == "" && !res.Ran() && rand.IntN(10) > 0 {
		return // most calls find nothing to do; some of them are enough
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	w.note(ctx, `
		INSERT INTO torture.answer (id, session, worker, job_key, attempt, decision, status, kind, error)
		SELECT $1, $2, coalesce((SELECT worker FROM torture.execution WHERE id::text = $10), $3), $4, $5, $6, $7, $8, $9
		ON CONFLICT (id) DO NOTHING`, w.Name,
		res.Record.WorkerID, res.Record.Key, cmp.Or(e.attempt, res.Record.Attempt), string(res.Decision), string(res.Record.Status), kind, text, e.execution)
	if res.Decision != "" {
		w.note(ctx, `INSERT INTO torture.wanted (job_key) SELECT $2 WHERE $1::uuid IS NOT NULL ON CONFLICT DO NOTHING`, res.Record.Key)
	}
}

// note writes a line for the checker; a process that cannot do so ends.
func (w *worker) note(ctx context.Context, sql string, args ...any) string {
	id, err := w.notes.write(ctx, sql, args...)
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker %s: cannot write for the checker: %v\n", w.Name, err)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	return id
}

// exhaust takes all connections of the pool for a while at each SIGUSR1.
func (w *worker) exhaust() {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	for range asked {
		ctx, cancel := context.WithTimeout(context.Background(), 2*lease)
		var all []*pgxpool.Conn
		for range w.Conns {
			conn, err := w.pool.Acquire(ctx)
			if err != nil {
				break
			}
			all = append(all, conn)
		}
		if len(all) == w.Conns {
			w.note(ctx, `INSERT INTO torture.fault (at, kind, target) SELECT clock_timestamp(), 'exhaust', $2 WHERE $1::uuid IS NOT NULL`, w.Name)
		}
		w.pause(ctx, 2*lease)
		cancel()
		for _, conn := range all {
			conn.Release()
		}
	}
}

// pause waits, or until ctx ends.
func (*worker) pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
