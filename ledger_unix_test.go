//go:build unix

package jobrun_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// A worker of the ledger test: it takes the run whenever it can, and makes the
// payments, each attempt with a chunk size and a number of parallel chunks of its own.
var _ = pgtest.RegisterChild("move-money", func() int {
	fmt.Fprintln(os.Stderr, "unexpected:", moveMoney(context.Background()))
	return 1
})

func moveMoney(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_DATABASE_URL")+"&pool_max_conns=8")
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(os.Getenv("CHILD_SEED"), 10, 64)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Lease: time.Second, WorkerID: os.Getenv("CHILD_LABEL"), Logger: log})
	if err != nil {
		return err
	}
	job := jobrun.Job{Name: "move-money", Func: func(ctx context.Context, run *jobrun.Run) error {
		rng := rand.New(rand.NewPCG(seed, uint64(run.Attempt())))
		opts := &jobrun.EachOptions{ChunkSize: 1 + rng.IntN(maxLedgerChunk), Parallel: 1 + rng.IntN(4)}
		_, err := jobrun.Each(ctx, run, released(ctx, pool), payment.key, func(ctx context.Context, tx pgx.Tx, p payment) error {
			return pay(ctx, tx, run.Attempt(), p)
		}, opts)
		return err
	}}
	for {
		res, err := r.RunDate(ctx, job, date)
		var failed *jobrun.RunError
		switch {
		case err != nil && !errors.As(err, &failed) && !errors.Is(err, jobrun.ErrLeaseLost):
			return err
		case !res.Ran():
			time.Sleep(20 * time.Millisecond)
		}
	}
}

const maxLedgerChunk = 40

// released yields the payments that the test has released, from a few before the
// first that is not made on, and waits for more until it has yielded the last.
func released(ctx context.Context, pool *pgxpool.Pool) iter.Seq2[payment, error] {
	return func(yield func(payment, error) bool) {
		var next, last int
		err := pool.QueryRow(ctx, `
			SELECT coalesce(min(p.item), 1) - 50, (SELECT max(item) FROM payment)
			FROM payment AS p
			WHERE NOT EXISTS (SELECT FROM batch_job_item AS i WHERE i.item = p.item::text)`).Scan(&next, &last)
		for err == nil && next <= last {
			rows, _ := pool.Query(ctx, `
				SELECT item, debit, credit, amount
				FROM payment
				WHERE item >= $1 AND item <= (SELECT max(item) FROM release)
				ORDER BY item
				LIMIT 200`, next)
			var page []payment
			page, err = pgx.CollectRows(rows, pgx.RowToStructByPos[payment])
			for _, p := range page {
				if next = p.Item + 1; !yield(p, nil) {
					return
				}
			}
			if len(page) == 0 {
				time.Sleep(2 * time.Millisecond)
			}
		}
		if err != nil {
			yield(payment{}, err)
		}
	}
}

// ledgerCounts is how much of everything the ledger test has to come to.
type ledgerCounts struct {
	payments, kills, supersedes, stops, cutsBefore, cutsAfter int
}

func (c ledgerCounts) faults() int {
	return c.kills + c.supersedes + c.stops + c.cutsBefore + c.cutsAfter
}

// divided is what is still enough of it for slower tests.
func (c ledgerCounts) divided(by int) ledgerCounts {
	return ledgerCounts{c.payments / by, c.kills / by, c.supersedes / by, max(1, c.stops/by), c.cutsBefore / by, c.cutsAfter / by}
}

// raceDetector reports whether this binary was built with it.
func raceDetector() bool {
	info, _ := debug.ReadBuildInfo()
	return info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// ledgerWorker is a process that moves money.
type ledgerWorker struct {
	label string
	cmd   *osexec.Cmd
	place int // with the proxy of this index
}

// ledgerTest is the state of a ledger test. Left is what it still has to do.
type ledgerTest struct {
	*testing.T
	db      *pgtest.DB
	r       *jobrun.Runner
	rng     *rand.Rand
	seed    uint64
	left    ledgerCounts
	proxies [2]*pgtest.Proxy // the first cuts before COMMIT has reached the server, the second after it was executed
	workers []*ledgerWorker
	log     logText
	started int
	failed  map[int]string // why attempts ended FAILED that nobody had marked so
}

const ledgerKey = "move-money:2026-09-15"

// TestLedgerSurvivesKillsAndSupersedes: whatever happens to processes,
// connections and attempts at whatever moment, every payment is made once, and an
// attempt that was superseded makes none. The faults are drawn from a seed;
// JOBRUN_TEST_SEED draws the same again, if not at the same moments.
func TestLedgerSurvivesKillsAndSupersedes(t *testing.T) {
	t.Parallel()
	counts := ledgerCounts{payments: 20_000, kills: 100, supersedes: 55, stops: 5, cutsBefore: 55, cutsAfter: 55}
	switch {
	case testing.Short():
		counts = counts.divided(10)
	case raceDetector():
		counts = counts.divided(4)
	}
	seed := rand.Uint64()
	if s := os.Getenv("JOBRUN_TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d", seed)
	l := &ledgerTest{T: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), left: counts, failed: map[int]string{}}
	l.db = commitTimes(t)
	newLedger(t, l.db, l.rng, 2000, 20, counts.payments)
	exec(t, l.db.Pool, `CREATE TABLE release (item integer NOT NULL); INSERT INTO release VALUES (0)`)
	l.r = newRunner(t, l.db.Pool, jobrun.Options{})
	l.proxies = [2]*pgtest.Proxy{pgtest.NewProxy(t, l.db.URL), pgtest.NewProxy(t, l.db.URL)}
	for n := range 4 {
		l.start(n % 2)
	}

	begin := time.Now()
	var done ledgerCounts
	for l.left.faults() > 0 || l.done() < counts.payments*9/10 {
		rec, w := l.running()
		l.release()
		cuts, cut := &l.left.cutsBefore, (*pgtest.Proxy).CutBefore
		if w.place == 1 {
			cuts, cut = &l.left.cutsAfter, (*pgtest.Proxy).CutAfter
		}
		switch n := l.rng.IntN(l.left.kills + l.left.supersedes + l.left.stops + *cuts + 1); {
		case n < *cuts:
			if l.cut(rec, l.proxies[w.place], cut) {
				*cuts--
			}
		case n < *cuts+l.left.kills:
			if l.kill(rec, w) {
				l.left.kills--
				done.kills++
			}
		case n < *cuts+l.left.kills+l.left.stops:
			if l.stop(rec, w) {
				l.left.stops--
				done.stops++
			}
		default: // also when only cuts are left, and not for this process
			if l.supersede(rec) {
				l.left.supersedes = max(0, l.left.supersedes-1)
				done.supersedes++
			}
		}
	}
	// The last attempt is not spared either: nobody makes up for what it leaves out.
	done.payments, done.cutsBefore, done.cutsAfter = counts.payments, l.proxies[0].Cuts(), l.proxies[1].Cuts()
	for _, p := range l.proxies {
		p.CutBeforeN("^commit", 2)
		p.CutAfterN("^commit", 2)
	}
	exec(t, l.db.Pool, `UPDATE release SET item = $1`, counts.payments)
	for rec := l.get(); rec.Status != jobrun.Succeeded; {
		seen := l.done()
		eventually(t, "the run goes on", func() bool {
			rec = l.get()
			return l.done() > seen || rec.Status == jobrun.Succeeded
		})
	}
	for _, w := range slices.Clone(l.workers) {
		l.end(w)
	}

	_, faulty := ledgerFaults(t, l.db.Pool)

	// Once more, with all items: nothing is left to do.
	if _, err := l.r.ApproveRerun(t.Context(), recordOf(t, l.r, ledgerKey), forced); err != nil {
		t.Fatal(err)
	}
	var again jobrun.EachResult
	res, err := l.r.RunDate(t.Context(), payAll(payments(t, l.db), &again, &jobrun.EachOptions{ChunkSize: 1000}), date)
	if err != nil || !res.Ran() || again != (jobrun.EachResult{AlreadyDone: int64(counts.payments)}) {
		t.Errorf("once more: %+v, %+v, %v", res, again, err)
	}

	_, afterwards := ledgerFaults(t, l.db.Pool)
	for _, example := range append(faulty, afterwards...) {
		t.Error(example)
	}
	deadlocks := 0
	eventually(t, "the server has counted a deadlock", func() bool {
		deadlocks = query[int](t, l.db.Pool, `SELECT deadlocks::int FROM pg_stat_database WHERE datname = current_database()`)
		return deadlocks > 0
	})
	if done.kills < counts.kills || done.supersedes < counts.supersedes || done.stops < counts.stops ||
		done.cutsBefore < counts.cutsBefore || done.cutsAfter < counts.cutsAfter {
		t.Errorf("came to %+v, want %+v", done, counts)
	}
	if n := query[int](t, l.db.Pool, `SELECT count(*)::int FROM batch_job_item_failure`); n != 0 {
		t.Errorf("%d items were blamed, such as %s", n, query[string](t, l.db.Pool, `SELECT to_jsonb(f)::text FROM batch_job_item_failure AS f LIMIT 1`))
	}
	// Everything else that they write is no log line: why they ended, a panic, a data race.
	if lines := slices.DeleteFunc(l.log.lines(), func(line string) bool { return strings.HasPrefix(line, "time=") }); len(lines) > 0 {
		t.Errorf("workers say %q", lines)
	}
	t.Logf("%+v, %d deadlocks, %d attempts, %d of them failed by themselves, %d violations, %s", done, deadlocks,
		res.Record.Attempt, len(l.failed), len(faulty), time.Since(begin).Round(time.Millisecond))
	for n, text := range l.failed {
		t.Logf("attempt %d: %.300s", n, text)
	}
}

// start starts a worker behind a proxy.
func (l *ledgerTest) start(place int) {
	l.Helper()
	l.started++
	w := &ledgerWorker{label: fmt.Sprintf("worker-%d", l.started), place: place}
	w.cmd = pgtest.Reexec(l.T, "move-money", "CHILD_DATABASE_URL="+l.proxies[place].URL(), "CHILD_LABEL="+w.label, fmt.Sprintf("CHILD_SEED=%d", l.seed))
	w.cmd.Stderr = &l.log
	if err := w.cmd.Start(); err != nil {
		l.Fatal(err)
	}
	l.workers = append(l.workers, w)
	l.Cleanup(func() { l.end(w) })
}

// end kills a worker for good.
func (l *ledgerTest) end(w *ledgerWorker) {
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
	l.workers = slices.DeleteFunc(l.workers, func(other *ledgerWorker) bool { return other == w })
}

// get reads the run, and approves a re-run of one that FAILED.
func (l *ledgerTest) get() jobrun.Record {
	l.Helper()
	rec, err := l.r.Get(l.Context(), ledgerKey)
	if err == nil && rec.Status == jobrun.Failed && rec.ApprovedAt.IsZero() {
		if !strings.HasPrefix(rec.Error, "marked failed") {
			l.failed[rec.Attempt] = rec.Error
		}
		_, err = l.r.ApproveRerun(l.Context(), rec, operator)
	}
	if err != nil && !errors.Is(err, jobrun.ErrNotFound) && !errors.Is(err, jobrun.ErrConflict) {
		l.Fatal(err)
	}
	return rec
}

// running waits until an attempt runs, and finds its process.
func (l *ledgerTest) running() (rec jobrun.Record, w *ledgerWorker) {
	l.Helper()
	eventually(l.T, "an attempt runs", func() bool {
		rec = l.get()
		i := slices.IndexFunc(l.workers, func(w *ledgerWorker) bool { return strings.HasPrefix(rec.WorkerID, w.label+"-") })
		switch {
		case rec.Status != jobrun.Running:
			return false
		case i < 0: // of a process that was killed after it had taken the run once more
			l.markFailed(rec, forced)
			return false
		}
		w = l.workers[i]
		return true
	})
	return rec, w
}

func (l *ledgerTest) done() int {
	l.Helper()
	return query[int](l.T, l.db.Pool, `SELECT count(*)::int FROM batch_job_item`)
}

// release lets the workers do a share of the payments, so that there are some left
// for each fault, at least what fills a chunk, and never the last.
func (l *ledgerTest) release() {
	l.Helper()
	exec(l.T, l.db.Pool, `
		WITH open AS (SELECT (SELECT count(*) FROM payment) AS payments, (SELECT count(*) FROM batch_job_item) AS done)
		UPDATE release
		SET item = least(payments - 1, greatest(item + 1, done + greatest($1, (payments - done) / $2)))
		FROM open`, maxLedgerChunk+10, l.left.faults()+2)
}

// moment waits for a random time, a longer one when there are enough faults.
func (l *ledgerTest) moment() {
	mean := 80 * time.Millisecond
	if l.left.faults() == 0 {
		mean = 400 * time.Millisecond
	}
	time.Sleep(time.Duration(l.rng.ExpFloat64() * float64(mean)))
}

// markFailed reports false if the run is not, or no longer, the attempt's.
func (l *ledgerTest) markFailed(rec jobrun.Record, a jobrun.Action) (marked bool) {
	l.Helper()
	eventually(l.T, "the attempt counts as dead", func() bool {
		_, err := l.r.MarkFailed(l.Context(), rec, a)
		if err != nil && !errors.Is(err, jobrun.ErrConflict) && !errors.Is(err, jobrun.ErrAlive) {
			l.Fatal(err)
		}
		marked = err == nil
		return !errors.Is(err, jobrun.ErrAlive)
	})
	return marked
}

// kill kills the process of an attempt, which a person then marks failed: at once,
// or sometimes only when it counts as dead.
func (l *ledgerTest) kill(rec jobrun.Record, w *ledgerWorker) bool {
	l.Helper()
	l.moment()
	l.end(w)
	l.start(w.place)
	if l.rng.IntN(25) == 0 {
		return l.markFailed(rec, operator)
	}
	return l.markFailed(rec, forced)
}

// supersede ends an attempt whose process goes on, and another takes its place.
func (l *ledgerTest) supersede(rec jobrun.Record) bool {
	l.Helper()
	l.moment()
	return l.markFailed(rec, forced)
}

// stop stops the process of an attempt for longer than its lease, has another
// attempt commit something, and continues it.
func (l *ledgerTest) stop(rec jobrun.Record, w *ledgerWorker) bool {
	l.Helper()
	l.moment()
	l.signal(w, syscall.SIGSTOP)
	defer l.signal(w, syscall.SIGCONT)
	if !l.markFailed(rec, operator) {
		return false
	}
	eventually(l.T, "another attempt commits", func() bool {
		l.get()
		l.release()
		return query[bool](l.T, l.db.Pool, `SELECT EXISTS (SELECT FROM transfer WHERE attempt > $1)`, rec.Attempt)
	})
	return true
}

func (l *ledgerTest) signal(w *ledgerWorker, s syscall.Signal) {
	l.Helper()
	if err := w.cmd.Process.Signal(s); err != nil {
		l.Error(err)
	}
}

// cut cuts a connection at a COMMIT of the attempt. It reports false if the attempt
// ended before that.
func (l *ledgerTest) cut(rec jobrun.Record, p *pgtest.Proxy, arm func(*pgtest.Proxy, string)) bool {
	l.Helper()
	seen := p.Cuts()
	arm(p, "^commit")
	eventually(l.T, "a connection is cut at COMMIT", func() bool {
		l.release()
		now := l.get()
		return p.Cuts() > seen || now.Attempt != rec.Attempt || now.Status != jobrun.Running
	})
	return p.Cuts() > seen
}

// A process that makes all payments in one transaction: of Each, or of its own,
// with what CHILD_MODE says. Before the end it says "open" and what limits the
// transaction has, goes on when it is told to, and says what came of it.
var _ = pgtest.RegisterChild("hold-transaction", func() int {
	if err := holdTransaction(context.Background()); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
})

func holdTransaction(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_DATABASE_URL"))
	if err != nil {
		return err
	}
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Lease: 2 * time.Second, WorkerID: "child", Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	rows, _ := pool.Query(ctx, `SELECT item, debit, credit, amount FROM payment ORDER BY item`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[payment])
	if err != nil {
		return err
	}
	work := func(ctx context.Context, tx pgx.Tx, run *jobrun.Run, p payment) error {
		err := pay(ctx, tx, run.Attempt(), p)
		if err == nil && p == all[len(all)-1] {
			var limits string
			err = tx.QueryRow(ctx, `SELECT concat('open ', current_setting('lock_timeout'), ' ', current_setting('idle_in_transaction_session_timeout'))`).Scan(&limits)
			fmt.Println(limits)
			_, _ = os.Stdin.Read(make([]byte, 1))
		}
		return err
	}
	job := jobrun.Job{Name: "move-money", Func: func(ctx context.Context, run *jobrun.Run) error {
		if os.Getenv("CHILD_MODE") == "each" {
			_, err := jobrun.Each(ctx, run, jobrun.FromSlice(all), payment.key, func(ctx context.Context, tx pgx.Tx, p payment) error {
				return work(ctx, tx, run, p)
			}, nil)
			return err
		}
		ctx = context.WithoutCancel(ctx) // as a program that does not look
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		for _, p := range all {
			if os.Getenv("CHILD_MODE") != "without ledger" {
				if _, err := tx.Exec(ctx, `INSERT INTO batch_job_item (job_key, item, attempt) VALUES ($1, $2, $3)`, run.Key(), p.key(), run.Attempt()); err != nil {
					return err
				}
			}
			if err := work(ctx, tx, run, p); err != nil {
				return err
			}
		}
		if os.Getenv("CHILD_MODE") == "with fence" {
			if err := run.Fence(ctx, tx); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	}}
	res, err := r.RunDate(ctx, job, date)
	fmt.Println(res.Decision, errors.Is(err, jobrun.ErrLeaseLost))
	return nil
}

// startHolder returns when the transaction is open.
func startHolder(t *testing.T, url, mode, open string) *leaseChild {
	t.Helper()
	c := &leaseChild{cmd: pgtest.Reexec(t, "hold-transaction", "CHILD_DATABASE_URL="+url, "CHILD_MODE="+mode)}
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
	c.says(t, open)
	return c
}

// Without the fence, or without the ledger, the check finds what they prevent; with
// them the same process at the same moment does no harm.
func TestLedgerCheckFindsAWorkerWithoutFence(t *testing.T) {
	t.Parallel()
	server := commitTimes(t)
	for mode, want := range map[string][]string{
		"with fence":     nil,
		"without fence":  {"nothing committed after it was superseded", "nothing committed later than that"},
		"without ledger": {"every item once", "ledger is the log", "nothing committed after it was superseded", "nothing committed later than that"},
	} {
		t.Run(mode, func(t *testing.T) {
			schema := strings.ReplaceAll(mode, " ", "_")
			exec(t, server.Pool, `CREATE SCHEMA `+schema)
			db := &pgtest.DB{URL: server.URL + "&search_path=" + schema}
			db.Pool = db.PoolWith(t, nil)
			newLedger(t, db, rand.New(rand.NewPCG(2, 2)), 10, 2, 5)
			r := newRunner(t, db.Pool, jobrun.Options{})
			c := startHolder(t, db.URL, mode, "open 0 0")
			c.signal(t, syscall.SIGSTOP)
			rec, err := r.MarkFailed(t.Context(), recordOf(t, r, ledgerKey), forced)
			if err != nil {
				t.Fatal(err)
			}
			c.signal(t, syscall.SIGCONT)
			_, _ = io.WriteString(c.in, "!")
			c.says(t, "RAN true")
			if _, err := r.ApproveRerun(t.Context(), rec, operator); err != nil {
				t.Fatal(err)
			}
			var got jobrun.EachResult
			if res, err := r.RunDate(t.Context(), payAll(payments(t, db), &got, nil), date); err != nil || res.Record.Attempt != 2 {
				t.Errorf("the re-run: %+v, %v", res, err)
			}
			if broken, examples := ledgerFaults(t, db.Pool); !slices.Equal(broken, want) {
				t.Errorf("found %q, want %q", examples, want)
			}
		})
	}
}

// A process that was stopped with an open chunk holds its items and accounts until
// the server ends its session, after its lease. The re-run waits for that, and what
// the process does when it goes on is refused.
func TestStoppedChunkBlocksNoLongerThanItsLease(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	newLedger(t, db, rand.New(rand.NewPCG(3, 3)), 10, 2, 5)
	r := newRunner(t, db.PoolWith(t, nil), jobrun.Options{})
	c := startHolder(t, db.URL, "each", "open 2s 2s")
	c.signal(t, syscall.SIGSTOP)
	held := query[int32](t, db.Pool, `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`)
	rec, err := r.MarkFailed(t.Context(), recordOf(t, r, ledgerKey), forced)
	if err == nil {
		_, err = r.ApproveRerun(t.Context(), rec, operator)
	}
	if err != nil {
		t.Fatal(err)
	}
	rerun := make(chan struct{})
	var got jobrun.EachResult
	go func() {
		defer close(rerun)
		if res, err := r.RunDate(t.Context(), payAll(payments(t, db), &got, nil), date); err != nil || res.Record.Attempt != 2 || got.Done != 5 {
			t.Errorf("the re-run: %+v, %+v, %v", res, got, err)
		}
	}()
	eventually(t, "the re-run waits for the process", func() bool {
		return query[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pg_blocking_pids(pid) = ARRAY[$1::integer])`, held)
	})
	within(t, "the re-run ends", rerun)
	if query[bool](t, db.Pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1::integer)`, held) {
		t.Error("the re-run went on beside the open transaction")
	}
	c.signal(t, syscall.SIGCONT)
	_, _ = io.WriteString(c.in, "!")
	c.says(t, "RAN true")
	if _, examples := ledgerFaults(t, db.Pool); examples != nil {
		t.Errorf("found %q", examples)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int FROM transfer WHERE attempt = 1`); n != 0 {
		t.Errorf("%d transfers of the attempt that was superseded", n)
	}
}

// A process that calls the outside for each of 10 items, and kills itself where the
// test says.
var _ = pgtest.RegisterChild("notify-all", func() int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_DATABASE_URL"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dieAt := func(where string) {
		if os.Getenv("CHILD_DIES") == where {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // it may take a moment
		}
	}
	items := func(yield func(int, error) bool) {
		for n := range 10 {
			if !yield(n+1, nil) {
				return
			}
			dieAt(fmt.Sprintf("after %d", n+1)) // its chunk is committed
		}
	}
	_, err = r.RunDate(ctx, jobrun.Job{Name: "notify", Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.Each(ctx, run, items, orderKey, func(ctx context.Context, tx pgx.Tx, n int) error {
			if _, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1, $2, $3)`, run.Date().String(), n, run.Attempt()); err != nil {
				return err
			}
			// What the outside gets, no rollback takes back.
			_, err := pool.Exec(ctx, `INSERT INTO receipt VALUES ($1, $2, $3, $4)`, run.Date().String(), n, run.Attempt(), run.IdempotencyKey(orderKey(n)))
			dieAt(fmt.Sprintf("within %d", n))
			return err
		}, &jobrun.EachOptions{ChunkSize: 1})
		return err
	}}, jobrun.MustParseDate(os.Getenv("CHILD_DATE")))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
})

// A crash after an item is committed repeats nothing of it; one between a call to
// the outside and the commit repeats that call, with the same key.
func TestCrashRepeatsOnlyTheCallThatWasNotCommitted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `CREATE TABLE effect (day text, item integer, attempt integer); CREATE TABLE receipt (day text, item integer, attempt integer, key uuid)`)
	r := newRunner(t, db.Pool, jobrun.Options{})
	execute := func(date, dies string) {
		t.Helper()
		cmd := pgtest.Reexec(t, "notify-all", "CHILD_DATABASE_URL="+db.URL, "CHILD_DATE="+date, "CHILD_DIES="+dies)
		var text logText
		cmd.Stderr = &text
		err := cmd.Run()
		status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if (dies == "") != (err == nil) || dies != "" && status.Signal() != syscall.SIGKILL {
			t.Fatalf("%q: %v, %q", dies, err, text.lines())
		}
	}
	const (
		effects  = `SELECT string_agg(format('%s/%s', item, attempt), ' ' ORDER BY item, attempt) FROM effect WHERE day = $1`
		receipts = `SELECT string_agg(format('%s/%s', item, attempt), ' ' ORDER BY item, attempt) FROM receipt WHERE day = $1`
		ledger   = `SELECT string_agg(format('%s/%s', split_part(item, '-', 2), attempt), ' ' ORDER BY split_part(item, '-', 2)::int) FROM batch_job_item WHERE job_key = 'notify:' || $1`
	)
	expect := func(day, done, called string) {
		t.Helper()
		for sql, want := range map[string]string{effects: done, ledger: done, receipts: called} {
			if got := query[string](t, db.Pool, sql, day); got != want {
				t.Errorf("%s: %q, want %q", sql, got, want)
			}
		}
	}
	rerun := func() {
		t.Helper()
		rec, err := r.MarkFailed(t.Context(), recordOf(t, r, "notify:2026-09-15"), forced)
		if err == nil {
			_, err = r.ApproveRerun(t.Context(), rec, operator)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	execute("2026-09-15", "after 4")
	expect("2026-09-15", "1/1 2/1 3/1 4/1", "1/1 2/1 3/1 4/1")
	rerun()
	execute("2026-09-15", "within 5")
	expect("2026-09-15", "1/1 2/1 3/1 4/1", "1/1 2/1 3/1 4/1 5/2")
	rerun()
	execute("2026-09-15", "")
	expect("2026-09-15", "1/1 2/1 3/1 4/1 5/3 6/3 7/3 8/3 9/3 10/3", "1/1 2/1 3/1 4/1 5/2 5/3 6/3 7/3 8/3 9/3 10/3")
	execute("2026-09-16", "")
	expect("2026-09-16", "1/1 2/1 3/1 4/1 5/1 6/1 7/1 8/1 9/1 10/1", "1/1 2/1 3/1 4/1 5/1 6/1 7/1 8/1 9/1 10/1")

	// One key for each item of each day, whichever attempt sent it.
	if n := query[string](t, db.Pool, `SELECT concat(count(*), ' ', count(DISTINCT key), ' ', count(DISTINCT (day, item, key))) FROM receipt`); n != "21 20 20" {
		t.Errorf("receipts, keys, items with their keys: %s", n)
	}
}
