//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// trial is one run of the command.
type trial struct {
	config
	programs programs
	out      io.Writer
	begun    time.Time
	draws    *rand.Rand

	cluster *cluster
	workers []*process
	facts   facts
}

// How a primary is lost.
const (
	serverAlone = "PostgreSQL killed" // all its processes; Patroni sees it and says so
	wholeNode   = "node killed"       // Patroni too: the others have to find out
	stopped     = "node stopped"      // the same, but it comes back when another leads
	switchover  = "switchover"        // as planned: it is shut down before another leads
)

var hows = []string{serverAlone, wholeNode, stopped, switchover}

// plan is how the primary is lost, in a drawn order.
func (t *trial) plan() (all []failover) {
	for n := range t.kills {
		all = append(all, failover{How: hows[n%2], Lag: []time.Duration{0, t.lag}[n/2%2]})
	}
	for range t.stops {
		all = append(all, failover{How: stopped})
	}
	for range t.switchovers {
		all = append(all, failover{How: switchover})
	}
	t.draws.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// process is a worker.
type process struct {
	settings
	log   string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan error
}

func (t *trial) printf(format string, args ...any) { fmt.Fprintf(t.out, format+"\n", args...) }

// run returns the exit code.
func (t *trial) run(ctx context.Context) (code int, err error) {
	dir, err := os.MkdirTemp("", "jobrun-failover-")
	if err != nil {
		return notJudged, err
	}
	if err := t.programs.folder(dir); err != nil {
		return notJudged, err
	}
	end, err := startGuard(dir, t.keep)
	if err != nil {
		return notJudged, errors.Join(err, os.RemoveAll(dir))
	}
	defer end()
	if t.keep {
		defer t.printf("logs and notes: %s", dir)
	}
	t.printf("three nodes, %d kills, %d stops, %d switchovers, seed %d, ttl %d s", t.kills, t.stops, t.switchovers, t.seed, t.ttl)
	if t.cluster, err = startCluster(ctx, t.programs, dir, t.config); err != nil {
		return notJudged, err
	}
	if err := t.prepare(ctx); err != nil {
		return notJudged, err
	}
	begin := time.Now()
	for n := range 3 {
		if err := t.startWorker(dir, fmt.Sprintf("worker%d", n+1), begin); err != nil {
			return notJudged, err
		}
	}
	for n, f := range t.plan() {
		if err := t.failOver(ctx, f); err != nil {
			return notJudged, fmt.Errorf("failover %d: %w", n+1, err)
		}
	}
	if err := t.finish(ctx); err != nil {
		return notJudged, err
	}
	if err := t.readFacts(ctx); err != nil {
		return notJudged, err
	}
	found, n := judge(t.facts)
	if verdict(t.out, t.facts, found, n, t.async, time.Since(t.begun)) > 0 {
		return violated, nil
	}
	return sound, nil
}

// prepare makes the tables.
func (t *trial) prepare(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, t.cluster.url())
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := jobrun.New(pool, time.UTC, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if err := r.Migrate(ctx); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, `
		CREATE TABLE probe (at timestamptz);
		CREATE TABLE effect (job_key text, item integer) -- no key: a second time shows`)
	return err
}

func (t *trial) startWorker(dir, name string, begin time.Time) error {
	w := &process{settings: settings{Name: name, URL: t.cluster.url(), Notes: filepath.Join(dir, name+".notes"), Begin: begin}, log: filepath.Join(dir, name+".log"), ended: make(chan error, 1)}
	text, err := json.Marshal(w.settings)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(w.log)
	if err != nil {
		return err
	}
	defer log.Close() // the child has it
	w.cmd = exec.Command(self)
	w.cmd.Dir, w.cmd.Stdout, w.cmd.Stderr = dir, log, log
	w.cmd.Env = append(os.Environ(), workerVariable+"="+string(text))
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := w.cmd.Start(); err != nil {
		return err
	}
	go func() { w.ended <- w.cmd.Wait() }()
	t.workers = append(t.workers, w)
	return nil
}

// failOver makes the cluster lose its primary, which may have replicated nothing for a
// time, and waits until all is well again.
func (t *trial) failOver(ctx context.Context, f failover) error {
	leader, err := t.cluster.waitWhole(ctx)
	if err != nil {
		return err
	}
	if !sleep(ctx, 3*time.Second+time.Duration(t.draws.Int64N(int64(5*time.Second)))) {
		return context.Cause(ctx)
	}
	if err := t.cluster.holdBack(ctx, leader, f.Lag); err != nil {
		return err
	}
	f.From, f.At = leader.name, time.Now()
	lose := map[string]func(context.Context, *node) error{
		serverAlone: t.cluster.killServer, wholeNode: t.cluster.killNode, stopped: t.cluster.stopNode, switchover: t.cluster.switchOver,
	}[f.How]
	if err := lose(ctx, leader); err != nil {
		return err
	}
	if err := t.cluster.waitWritable(ctx); err != nil {
		return err
	}
	f.Back = time.Now()
	switch f.How {
	case wholeNode:
		err = t.cluster.startPatroni(leader)
	case stopped:
		err = t.cluster.continueNode(leader)
	}
	if err != nil {
		return err
	}
	next, err := t.cluster.waitWhole(ctx)
	if err != nil {
		return err
	}
	if f.To, f.Whole = next.name, time.Now(); f.To == f.From {
		t.printf("     %s  %-17s %s, which leads again: not counted, once more", clock(f.At), f.How, f.From)
		return t.failOver(ctx, failover{How: f.How, Lag: f.Lag})
	}
	t.facts.failovers = append(t.facts.failovers, f)
	t.printf("%3d  %s  %-17s %s, %s behind; %s leads; a write succeeds after %4.1f s, whole after %4.1f s",
		len(t.facts.failovers), clock(f.At), f.How, f.From, f.Lag, f.To, f.Back.Sub(f.At).Seconds(), f.Whole.Sub(f.At).Seconds())
	return nil
}

// finish lets all runs come to their end.
func (t *trial) finish(ctx context.Context) error {
	for _, w := range t.workers {
		_, _ = fmt.Fprintln(w.stdin, wordFinish) // one that has ended says why below
	}
	limit := time.After(5 * time.Minute)
	for _, w := range t.workers {
		select {
		case err := <-w.ended:
			if err != nil {
				return fmt.Errorf("%s: %w: %s", w.Name, err, w.lastWord())
			}
		case <-limit:
			return fmt.Errorf("%s does not come to an end", w.Name)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// lastWord is the last line that a worker has logged.
func (w *process) lastWord() string {
	text, err := os.ReadFile(w.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// readFacts reads the workers' files and the tables.
func (t *trial) readFacts(ctx context.Context) error {
	for _, w := range t.workers {
		notes, err := readNotes(w.Notes)
		if err != nil {
			return err
		}
		t.facts.notes = append(t.facts.notes, notes...)
	}
	conn, err := pgx.Connect(ctx, t.cluster.url())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return t.facts.readTables(ctx, conn)
}
