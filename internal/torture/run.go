//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/internal/torture/checker"
)

// torture is one run of the command.
type torture struct {
	out         io.Writer
	seed        uint64
	duration    time.Duration
	every       time.Duration
	pause       time.Duration
	keep        bool
	thorough    bool // long enough, with all faults, for every rule to have had cases
	disturbing  map[string]bool
	draws       *rand.Rand // of the goroutine that draws faults
	server      *pgtest.Server
	url         string
	notes       notebook
	logFile     *os.File // what the workers write
	people      *pgtest.Proxy
	r           *jobrun.Runner // the people's
	places      []*place
	begin       time.Time
	last        int // the last date
	shift       time.Duration
	processes   []*process // all that were started
	guard       *exec.Cmd  // ends them when this process ends, however it does
	guardEnds   io.Closer
	workers     sync.WaitGroup
	timers      sync.WaitGroup
	faulty      context.Context // while faults go on
	giveUp      context.CancelFunc
	reasons     atomic.Int64
	mu          sync.Mutex
	counts      map[string]int // by fault
	noted       []notedFault
	seen        []jobrun.Record
	ownFindings []checker.Violation
}

type notedFault struct {
	at           time.Time
	kind, target string
}

func (t *torture) noteFault(kind, target string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts[kind]++
	t.noted = append(t.noted, notedFault{time.Now(), kind, target})
}

// wrong notes what is wrong beside what the tables say.
func (t *torture) wrong(rule, key, what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ownFindings = append(t.ownFindings, checker.Violation{Rule: rule, Key: key, What: what})
}

func (t *torture) printf(format string, args ...any) { fmt.Fprintf(t.out, format+"\n", args...) }

func (t *torture) run(ctx context.Context, instances int, picked []fault, drained bool) (code int, err error) {
	dir, err := os.MkdirTemp("", "jobrun-torture")
	if err != nil {
		return notJudged, err
	}
	defer func() {
		if code == sound {
			_ = os.RemoveAll(dir)
		}
	}()
	if t.logFile, err = os.Create(filepath.Join(dir, "workers.log")); err != nil {
		return notJudged, err
	}
	defer t.logFile.Close()
	defer func() {
		if t.server != nil {
			t.server.Stop()
		}
	}()
	if err := t.prepare(ctx, instances); err != nil {
		_ = os.RemoveAll(dir) // no worker has written anything yet
		return notJudged, err
	}
	defer t.end()
	t.printf("seed %d, %s of faults, %d processes", t.seed, t.duration, instances)

	err = t.torment(ctx, picked)
	var report checker.Report
	if err == nil {
		report, err = t.judge(ctx, false)
	}
	if err == nil && drained && len(report.Violations) == 0 {
		before := report.Judged
		if err = t.drain(ctx); err == nil {
			report, err = t.judge(ctx, true)
		}
		for rule, cases := range before { // what was stale is no more
			if err == nil {
				report.Judged[rule] = max(report.Judged[rule], cases)
			}
		}
	}
	if err != nil {
		for _, v := range t.ownFindings {
			t.printf("%s: %s", v.Rule, v.What)
		}
		return notJudged, fmt.Errorf("%w (what the processes wrote: %s)", err, t.logFile.Name())
	}
	return t.verdict(ctx, report), nil
}

// prepare starts the server and the proxies, and makes the tables.
func (t *torture) prepare(ctx context.Context, instances int) (err error) {
	for _, name := range []string{"JOBRUN_TEST_DATABASE_URL", "DATABASE_URL"} { // a server that must not be killed
		_ = os.Unsetenv(name)
	}
	t.server, err = pgtest.Start(ctx, pgtest.Options{Durable: true, Keep: t.keep, Log: t.out, Settings: map[string]string{
		"track_commit_timestamp": "on", "deadlock_timeout": "100ms", "checkpoint_timeout": "30s",
	}})
	if err != nil {
		return err
	}
	t.url = t.server.URL("postgres")
	if t.notes, err = newNotebook(ctx, t.url); err != nil {
		return err
	}
	if t.people, err = pgtest.StartProxy(t.url); err != nil {
		return err
	}
	pool, err := open(ctx, t.people.URL(), "operator", 8, nil)
	if err != nil {
		return err
	}
	t.r, err = jobrun.New(pool, seoul, &jobrun.Options{StaleAfter: staleAfter, Schema: "public", WorkerID: "operator", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if err := t.r.Migrate(ctx); err != nil {
		return err
	}
	if err := t.notes.try(ctx, tables); err != nil {
		return err
	}
	for _, k := range kinds {
		if err := t.notes.try(ctx, `INSERT INTO torture.job VALUES ($1, $2, $3, $4)`, k.name, k.way, k.items, k.attempts); err != nil {
			return err
		}
	}
	for range instances {
		proxy, err := pgtest.StartProxy(t.url)
		if err != nil {
			return err
		}
		t.places = append(t.places, &place{proxy: proxy})
	}
	t.begin = time.Now()
	// Midnight in the business zone comes when half of the time is over: by their own
	// clocks, the processes do not agree on the date.
	half := t.begin.Add(t.duration / 2).In(seoul)
	t.shift = time.Date(half.Year(), half.Month(), half.Day()+1, 0, 0, 0, 0, seoul).Sub(half)
	return nil
}

// torment lets the workers run and everything go wrong, then ends the processes
// and waits until every lease has run out.
func (t *torture) torment(ctx context.Context, picked []fault) error {
	faulty, giveUp := context.WithTimeout(ctx, t.duration)
	defer giveUp()
	t.faulty, t.giveUp = faulty, giveUp
	if err := t.startGuard(); err != nil {
		return err
	}
	for _, p := range t.places {
		if err := t.start(ctx, p, false); err != nil {
			return err
		}
	}
	var all sync.WaitGroup
	for n, d := range disturbances {
		if t.disturbing[d.name] {
			rng := rand.New(rand.NewPCG(t.seed, uint64(10+n)))
			all.Go(func() {
				for sleep(t.faulty, time.Duration(rng.ExpFloat64()*float64(d.pause))) {
					d.act(t, rng)
				}
			})
		}
	}
	all.Go(func() { t.progress() })
	t.chaos(faulty, picked, t.draws)
	<-faulty.Done()
	t.timers.Wait()
	t.last = today(t.begin, t.every)
	t.calm()
	all.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if slices.ContainsFunc(picked, func(f fault) bool { return f.name == "kill" }) {
		t.leaveOne(ctx)
	}
	return t.stopAll(ctx)
}

// leaveOne kills a process in the middle of an attempt: people have stopped, so its
// run stays RUNNING, for Stale to list. What the process had sent already may still
// end the run: then another process is next.
func (t *torture) leaveOne(ctx context.Context) {
	running := func(p *place) (runs, sessions int) {
		err := t.notes.pool.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM public.batch_job_run WHERE status = 'RUNNING' AND worker_id LIKE $1 || '-%'),
				(SELECT count(*) FROM pg_stat_activity WHERE application_name = $1)`, p.now.Name).Scan(&runs, &sessions)
		if err != nil {
			return 0, 0
		}
		return runs, sessions
	}
	for range 100 {
		for _, p := range t.places {
			if p.now.ended != nil && isClosed(p.now.ended) {
				continue
			}
			p.now.signal(syscall.SIGSTOP)
			if runs, _ := running(p); runs == 0 {
				p.now.signal(syscall.SIGCONT)
				continue
			}
			p.now.kill()
			t.noteFault("kill", p.now.Name)
			runs, sessions := running(p)
			for range 200 { // until the server has noticed
				if sessions == 0 || !sleep(ctx, 10*time.Millisecond) {
					break
				}
				runs, sessions = running(p)
			}
			if runs > 0 {
				return
			}
		}
		if !sleep(ctx, 10*time.Millisecond) {
			return
		}
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// progress tells every ten seconds that the run goes on.
func (t *torture) progress() {
	for sleep(t.faulty, 10*time.Second) {
		var runs, attempts int
		if err := t.notes.pool.QueryRow(t.faulty, `SELECT count(*), (SELECT count(*) FROM torture.execution) FROM public.batch_job_run`).Scan(&runs, &attempts); err == nil {
			t.mu.Lock()
			t.printf("%4.0f s: %d runs, %d executions, %d faults", time.Since(t.begin).Seconds(), runs, attempts, len(t.noted))
			t.mu.Unlock()
		}
	}
}

// calm takes all faults back that have not struck.
func (t *torture) calm() {
	for _, p := range t.places {
		p.proxy.Disarm()
		p.proxy.Delay(0)
		p.proxy.Release()
		p.proxy.RefuseNew(false)
	}
	t.people.Disarm()
	t.people.Release()
}

// stopAll shuts the processes down in order, and waits until Stale lists what they
// have left RUNNING.
func (t *torture) stopAll(ctx context.Context) error {
	for _, p := range t.places {
		p.now.signal(syscall.SIGCONT)
		p.now.peace.Store(true)
		p.now.signal(syscall.SIGTERM)
	}
	ended := make(chan struct{})
	go func() { t.workers.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(90 * time.Second): // results may take 30 s, settling as long again
		for _, w := range t.processes {
			select {
			case <-w.ended:
			default:
				t.wrong("process", "", "worker process "+w.Name+" has not ended 90 s after SIGTERM")
				w.kill()
			}
		}
		<-ended
	}
	limited, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		listed, missing, err := t.listStale(ctx)
		if err == nil && missing == 0 || !sleep(limited, 100*time.Millisecond) {
			if err == nil { // also when some are missing: the checker tells which
				err = t.noteStale(ctx, listed)
			}
			return err
		}
	}
}

// noteStale writes down what Stale listed.
func (t *torture) noteStale(ctx context.Context, listed []string) error {
	return pgx.BeginFunc(ctx, t.notes.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `DELETE FROM torture.stale`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO torture.stale SELECT unnest($1::text[] || '{""}')`, listed)
		return err
	})
}

// listStale returns the keys that Stale lists, and how many RUNNING ones it does not.
func (t *torture) listStale(ctx context.Context) (listed []string, missing int, err error) {
	stale, err := t.r.Stale(ctx)
	if err != nil {
		return nil, 0, err
	}
	listed = []string{} // an empty array, not NULL
	for _, s := range stale {
		listed = append(listed, s.Key)
	}
	err = t.notes.pool.QueryRow(ctx, `SELECT count(*) FROM public.batch_job_run WHERE status = 'RUNNING' AND job_key <> ALL ($1::text[])`, listed).Scan(&missing)
	return listed, missing, err
}

// drain brings every run to its end: what is stale is marked failed, what FAILED is
// approved, what nobody has run is caught up or run.
func (t *torture) drain(ctx context.Context) error {
	const patience = time.Minute // without a run that comes to its end
	fewest, since := math.MaxInt, time.Now()
	t.printf("%4.0f s: no more faults, all runs come to an end", time.Since(t.begin).Seconds())
	for _, k := range kinds[:byDate] {
		if err := t.notes.try(ctx, `INSERT INTO torture.wanted SELECT $1::text || ':' || (date '`+firstDate+`' + n)::text FROM generate_series(0, $2::integer) AS n ON CONFLICT DO NOTHING`, k.name, t.last); err != nil {
			return err
		}
	}
	for _, p := range t.places {
		if err := t.start(ctx, p, true); err != nil {
			return err
		}
	}
	for open := 1; open > 0 && time.Since(since) < patience && sleep(ctx, 200*time.Millisecond); {
		stale, err := t.r.Stale(ctx)
		if err != nil {
			return err
		}
		failed, err := t.r.List(ctx, jobrun.Filter{Status: []jobrun.Status{jobrun.Failed}, Limit: 500})
		if err != nil {
			return err
		}
		var acts sync.WaitGroup
		turn := make(chan struct{}, 8) // so many at a time
		act := func(kind string, rec jobrun.Record) {
			turn <- struct{}{}
			acts.Go(func() {
				t.act(ctx, kind, rec, jobrun.Action{By: "operator"})
				<-turn
			})
		}
		for _, s := range stale {
			if !s.Alive {
				act("MARK_FAILED", s.Record)
			}
		}
		for _, rec := range failed {
			if rec.NextAttemptAt.IsZero() && rec.ApprovedAt.IsZero() {
				act("APPROVE_RERUN", rec)
			}
		}
		acts.Wait()
		err = t.notes.pool.QueryRow(ctx, `
			SELECT count(*)
			FROM torture.wanted AS w
			LEFT JOIN public.batch_job_run AS r ON r.job_key = w.job_key
			WHERE r.status IS NULL
				OR r.status NOT IN ('SUCCEEDED', 'SKIPPED')
				OR r.approved_at IS NOT NULL -- and as the person saw it
					AND (r.approved_attempt, r.approved_status, r.approved_worker) = (r.attempt, r.status, r.worker_id)
					AND r.approved_finished_at IS NOT DISTINCT FROM r.finished_at`).Scan(&open)
		if err != nil {
			return err
		}
		if open < fewest {
			fewest, since = open, time.Now()
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := t.stopAll(ctx); err != nil {
		return err
	}
	for _, k := range kinds[:byDate] {
		job := jobrun.Job{Name: k.name, Func: func(context.Context, *jobrun.Run) error { return nil }}
		for from, to := range stretches(t.last) {
			missed, err := t.r.Missed(context.WithoutCancel(ctx), job, from, to)
			if err != nil {
				return err
			}
			if len(missed) > 0 {
				t.wrong("missed", job.Key(missed[0]), fmt.Sprintf("%d dates without a run", len(missed)))
			}
		}
	}
	return nil
}

// judge writes down the faults and lets the checker read everything.
func (t *torture) judge(ctx context.Context, final bool) (report checker.Report, err error) {
	t.mu.Lock()
	noted := t.noted
	t.noted = nil
	t.mu.Unlock()
	conn, err := t.connect(ctx, "torture")
	if err != nil {
		return report, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	rows := make([][]any, len(noted))
	for n, f := range noted {
		rows[n] = []any{f.at, f.kind, f.target}
	}
	if _, err := conn.CopyFrom(ctx, pgx.Identifier{"torture", "fault"}, []string{"at", "kind", "target"}, pgx.CopyFromRows(rows)); err != nil {
		return report, err
	}
	report, err = checker.Check(ctx, conn, final)
	t.mu.Lock()
	defer t.mu.Unlock()
	report.Violations = append(report.Violations, t.ownFindings...)
	return report, err
}

// end ends whatever is left, however the run ended.
func (t *torture) end() {
	for _, w := range t.processes {
		w.kill()
	}
	for _, p := range t.places {
		p.proxy.Close()
	}
	t.workers.Wait()
	if t.guard != nil {
		t.guardEnds.Close()
		_ = t.guard.Wait() // it kills itself, too
	}
	t.people.Close()
}
