package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"
)

// names of n instances.
func names(n int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("instance-%d", i+1))
	}
	return all
}

// race starts one process for each name, gives the starting signal when all are
// ready, shows what they say, and returns how many of them settled orders.
func race(ctx context.Context, db *database, t task, names []string, out *printer) (settled int, err error) {
	// One pipe is the standard input of all of them, and each reads one byte: a
	// single write starts them together, and its end, if we fail first, ends them.
	signal, give, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var started []*process
	defer func() {
		cancel()
		_, _ = signal.Close(), give.Close()
		for _, p := range started {
			_, _ = p.wait() // no process outlives the race; those that have ended answer at once
		}
	}()
	for _, name := range names {
		p, err := start(ctx, db, t, name, signal)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		started = append(started, p)
	}
	for _, p := range started {
		if !p.lines.Scan() {
			_, err := p.wait()
			return 0, fmt.Errorf("%s ended before the race: %w", p.name, err)
		}
		out.say(p.name, p.lines.Text())
	}
	if _, err := give.Write(make([]byte, len(started))); err != nil {
		return 0, err
	}

	var wg sync.WaitGroup
	var mu sync.Mutex // of settled and failures
	var failures []error
	for _, p := range started {
		wg.Go(func() {
			for p.lines.Scan() {
				out.say(p.name, p.lines.Text())
			}
			did, err := p.wait()
			if killed(p.cmd) {
				out.say(p.name, p.cmd.ProcessState.String()) // "signal: killed"
			}
			mu.Lock()
			defer mu.Unlock()
			if did {
				settled++
			}
			if err != nil {
				failures = append(failures, fmt.Errorf("%s: %w", p.name, err))
			}
		})
	}
	wg.Wait()
	return settled, errors.Join(failures...)
}

// process is an instance as the program that started it sees it.
type process struct {
	name  string
	lines *bufio.Scanner
	cmd   *exec.Cmd
	wait  func() (settled bool, err error) // may be called more than once
}

func start(ctx context.Context, db *database, t task, name string, signal *os.File) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	t.Name, t.DatabaseURL, t.Schema = name, db.url, db.schema
	told, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), instanceVar+"="+string(told))
	cmd.Stdin, cmd.Stderr = signal, os.Stderr
	// Interrupted, an instance still records what became of its run.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	wait := sync.OnceValues(func() (bool, error) {
		err := cmd.Wait()
		switch code := cmd.ProcessState.ExitCode(); {
		case code == instanceSettled, code == instanceOpen:
			return true, nil
		case code == instanceIdle:
			return false, nil
		case t.KillAfter != 0 && killed(cmd): // as it was told
			return true, nil
		}
		return false, err
	})
	return &process{name, bufio.NewScanner(stdout), cmd, wait}, nil
}

// killed reports whether a signal ended the process.
func killed(cmd *exec.Cmd) bool { return cmd.ProcessState.ExitCode() == -1 }
