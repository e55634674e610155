//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// A place is where one worker process runs at a time, behind a proxy of its own.
type place struct {
	proxy *pgtest.Proxy
	now   *process
}

// A process is one worker.
type process struct {
	settings
	cmd   *exec.Cmd
	stdin io.Closer     // its end ends the process
	dies  atomic.Bool   // it was sent SIGKILL
	peace atomic.Bool   // it was sent SIGTERM after the faults
	ended chan struct{} // closed when it has ended
}

// A fault is something that goes wrong, and how often compared with the others.
type fault struct {
	name, what string
	weight     float64
	strike     func(t *torture, p *place) bool // false: it met nothing
}

// statements are what cuts are aimed at, by a part of their SQL that no other has.
var statements = []struct{ name, match string }{
	{"claim", "on conflict (job_key) do nothing"},
	{"re-claim", "as highest"},
	{"beat", "of a skip locked"},
	{"fence", "for share of r"},
	{"commit", "^commit"},
	{"finish", "ended_by = 'worker'"},
	{"action", "batch_job_action"}, // of a person
}

// faults are all that can be chosen. They are drawn with the run's own numbers, one
// after the other.
func faults() []fault {
	all := []fault{
		{"kill", "SIGKILL of a process", 8, (*torture).kill},
		{"stop", "SIGSTOP of a process, longer than its lease, then SIGCONT", 6, (*torture).stop},
		{"term", "SIGTERM of a process, its successor starting at the same time", 4, (*torture).term},
		{"exhaust", "a process takes all connections of its pool", 4, (*torture).exhaust},
		{"terminate", "pg_terminate_backend of a session", 8, (*torture).terminate},
		{"hold", "a half-open connection, silent for seconds", 8, (*torture).hold},
		{"delay", "every message of a process delayed", 4, (*torture).delay},
		{"partition", "no connection of a process for longer than its lease, in some cases", 3, (*torture).partition},
		{"crash", "kill -9 of the postmaster and all its children, restart", 0.8, (*torture).crash},
		{"quit", "immediate shutdown of the server, restart", 0.6, (*torture).quit},
		{"backend", "kill -9 of one server process: the server recovers by itself", 0.8, (*torture).backend},
	}
	for _, s := range statements[:len(statements)-1] {
		all = append(all,
			fault{"cut-before-" + s.name, "connection cut before a " + s.name + " reaches the server", 3, func(_ *torture, p *place) bool {
				p.proxy.CutBefore(s.match)
				return true // the proxy counts
			}},
			fault{"cut-after-" + s.name, "answer to a " + s.name + " dropped and the connection cut", 3, func(_ *torture, p *place) bool {
				p.proxy.CutAfter(s.match)
				return true
			}})
	}
	return all
}

// chaos draws faults until ctx ends.
func (t *torture) chaos(ctx context.Context, chosen []fault, rng *rand.Rand) {
	sum := 0.0
	for _, f := range chosen {
		sum += f.weight
	}
	for len(chosen) > 0 && sleep(ctx, time.Duration(rng.ExpFloat64()*float64(t.pause))) {
		n, draw := 0, rng.Float64()*sum
		for ; n < len(chosen)-1 && draw >= chosen[n].weight; n++ {
			draw -= chosen[n].weight
		}
		p := t.places[rng.IntN(len(t.places))]
		t.replaceEnded(ctx, p)
		if name := p.now.Name; chosen[n].strike(t, p) {
			t.noteFault(chosen[n].name, name)
		}
	}
}

// sleep waits and reports whether ctx is still going on.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// start starts a worker at a place.
func (t *torture) start(ctx context.Context, p *place, calm bool) error {
	s := settings{
		Name: fmt.Sprintf("w%d", len(t.processes)+1), URL: p.proxy.URL(), LogURL: t.url, Begin: t.begin, Every: t.every, Shift: t.shift,
		Skew: time.Duration(t.draws.Int64N(int64(20*time.Minute))) - 10*time.Minute,
		Mode: pgx.QueryExecMode([]pgx.QueryExecMode{
			pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
		}[t.draws.IntN(5)]),
		Isolation: []string{"read committed", "read committed", "read committed", "repeatable read", "serializable"}[t.draws.IntN(5)],
		Async:     t.draws.IntN(3) == 0, Conns: 5 + t.draws.IntN(8), Calm: calm, Last: t.last, Seed: t.draws.Uint64(),
	}
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	w := &process{settings: s, cmd: exec.Command(self), ended: make(chan struct{})}
	w.cmd.Env = append(os.Environ(), workerVariable+"="+string(text))
	w.cmd.Stderr = t.logFile
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: t.guard.Process.Pid}
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := w.cmd.Start(); err != nil {
		return err
	}
	p.now, t.processes = w, append(t.processes, w)
	t.workers.Go(func() {
		err := w.cmd.Wait()
		how := "in order"
		status, _ := w.cmd.ProcessState.Sys().(syscall.WaitStatus)
		switch {
		case w.dies.Load(), status.Signaled() && status.Signal() != syscall.SIGKILL: // by a signal that it was not ready for yet
			how = "killed"
		case err != nil:
			how = "in disorder"
			t.wrong("process", "", fmt.Sprintf("worker process %s ended by itself: %v", w.Name, err))
		case w.peace.Load():
			how = "in peace"
		}
		if _, err := t.notes.write(ctx, `INSERT INTO torture.process (session, ended) SELECT $2, $3 WHERE $1::uuid IS NOT NULL ON CONFLICT DO NOTHING`, w.Name, how); err != nil {
			t.wrong("server", "", err.Error())
		}
		close(w.ended)
	})
	return nil
}

// startGuard starts the process whose group the workers join. It reads from a pipe
// that only this process holds, and kills the group when that ends: a worker that is
// stopped cannot see its own end of anything.
func (t *torture) startGuard() (err error) {
	t.guard = exec.Command("/bin/sh", "-c", "read -r _; kill -KILL 0")
	t.guard.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if t.guardEnds, err = t.guard.StdinPipe(); err == nil {
		err = t.guard.Start()
	}
	if err != nil {
		t.guard = nil
	}
	return err
}

// replace starts a worker in place of the one that was there.
func (t *torture) replace(ctx context.Context, p *place) {
	p.proxy.Disarm()
	p.proxy.Delay(0)
	if err := t.start(context.WithoutCancel(ctx), p, false); err != nil {
		t.wrong("process", "", err.Error())
	}
}

// replaceEnded replaces a worker that has ended, by a signal that it was not ready for.
func (t *torture) replaceEnded(ctx context.Context, p *place) {
	select {
	case <-p.now.ended:
		t.replace(ctx, p)
	default:
	}
}

func (w *process) signal(s syscall.Signal) { _ = w.cmd.Process.Signal(s) } // it may have ended

func (w *process) kill() {
	w.dies.Store(true)
	w.signal(syscall.SIGKILL)
}

func (t *torture) kill(p *place) bool {
	p.now.kill()
	t.replace(context.Background(), p)
	return true
}

func (t *torture) stop(p *place) bool {
	w := p.now
	w.signal(syscall.SIGSTOP)
	t.later(time.Duration((1.2+2*t.draws.Float64())*float64(lease)), func() { w.signal(syscall.SIGCONT) })
	return true
}

func (t *torture) term(p *place) bool {
	p.now.signal(syscall.SIGCONT)
	p.now.signal(syscall.SIGTERM)
	t.replace(context.Background(), p)
	return true
}

// exhaust asks a process to take all connections; it notes when it has them.
func (t *torture) exhaust(p *place) bool {
	p.now.signal(syscall.SIGUSR1)
	return false
}

func (t *torture) terminate(*place) (struck bool) {
	_ = t.notes.pool.QueryRow(context.Background(), `
		SELECT pg_terminate_backend(pid)
		FROM pg_stat_activity
		WHERE application_name ~ '^w[0-9]|operator'
		ORDER BY random()
		LIMIT 1`).Scan(&struck) // perhaps there is none now
	return struck
}

func (t *torture) hold(p *place) bool {
	p.proxy.Hold("") // whatever comes next
	t.later(time.Duration(4*t.draws.Float64()*float64(lease)), p.proxy.Release)
	return true // the proxy counts
}

func (t *torture) delay(p *place) bool {
	p.proxy.Delay(time.Duration(1+t.draws.IntN(40)) * time.Millisecond)
	t.later(2*lease, func() { p.proxy.Delay(0) })
	return true
}

func (t *torture) partition(p *place) bool {
	p.proxy.RefuseNew(true)
	p.proxy.CutAll()
	t.later(time.Duration(2*t.draws.Float64()*float64(lease)), func() { p.proxy.RefuseNew(false) })
	return true
}

func (t *torture) crash(*place) bool { return t.serverDown(t.server.Kill) }
func (t *torture) quit(*place) bool  { return t.serverDown(t.server.Quit) }

func (t *torture) serverDown(down func() error) bool {
	err := down()
	if err == nil {
		err = t.server.Restart(context.Background())
	}
	if err != nil {
		t.wrong("server", "", err.Error())
		t.giveUp()
	}
	return err == nil
}

func (t *torture) backend(*place) bool {
	var pid int
	err := t.notes.pool.QueryRow(context.Background(), `SELECT pid FROM pg_stat_activity WHERE application_name ~ '^w[0-9]' ORDER BY random() LIMIT 1`).Scan(&pid)
	if err == nil {
		err = t.server.KillBackend(pid)
	}
	return err == nil // else nobody is connected just now, or not any more
}

// later calls fn after a while, or at the end of the faults.
func (t *torture) later(d time.Duration, fn func()) {
	t.timers.Go(func() {
		sleep(t.faulty, d)
		fn()
	})
}

// struck is how often each fault has happened. Cuts that were armed and met no such
// statement do not count.
func (t *torture) struck() map[string]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts := maps.Clone(t.counts)
	maps.DeleteFunc(counts, func(name string, _ int) bool { return strings.HasPrefix(name, "cut-") || name == "hold" })
	for _, p := range append(t.places, &place{proxy: t.people}) {
		struck := p.proxy.Struck()
		counts["hold"] += struck["hold "]
		for _, s := range statements {
			counts["cut-before-"+s.name] += struck["cut before "+s.match]
			counts["cut-after-"+s.name] += struck["cut after "+s.match]
		}
	}
	return counts
}

// chosen are the faults and disturbances of a list of names, with commas; "all" and
// "none" are lists too.
func chosen(list string) (picked []fault, people map[string]bool, err error) {
	people = map[string]bool{}
	all := faults()
	names := map[string]bool{}
	for _, name := range strings.Split(list, ",") {
		names[strings.TrimSpace(name)] = true
	}
	for _, f := range all {
		if names["all"] || names[f.name] || names["cut"] && strings.HasPrefix(f.name, "cut-") {
			picked = append(picked, f)
		}
		delete(names, f.name)
	}
	for _, d := range disturbances {
		if names["all"] || names[d.name] {
			people[d.name] = true
		}
		delete(names, d.name)
	}
	delete(names, "all")
	delete(names, "none")
	delete(names, "cut")
	for name := range names {
		return nil, nil, fmt.Errorf("-faults: %q is none; allowed: all, none, cut, %s", name, strings.Join(faultNames(), ", "))
	}
	return picked, people, nil
}

func faultNames() (names []string) {
	for _, f := range faults() {
		names = append(names, f.name)
	}
	for _, d := range disturbances {
		names = append(names, d.name)
	}
	return names
}
