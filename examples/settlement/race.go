package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
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
// ready, shows what they say, and returns how many of them settled.
func race(ctx context.Context, db *database, date jobrun.Date, names []string, out *printer) (settled int, err error) {
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
		p, err := start(ctx, db, date, name, signal)
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
		p.say(out)
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
				p.say(out)
			}
			did, err := p.wait()
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
	wait  func() (settled bool, err error) // may be called more than once
}

func start(ctx context.Context, db *database, date jobrun.Date, name string, signal *os.File) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), instanceVar+"="+name, databaseVar+"="+db.url, schemaVar+"="+db.schema, dateVar+"="+date.String())
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
	return &process{name, bufio.NewScanner(stdout), sync.OnceValues(func() (bool, error) {
		err := cmd.Wait()
		switch cmd.ProcessState.ExitCode() {
		case instanceSettled:
			return true, nil
		case instanceIdle:
			return false, nil
		}
		return false, err
	})}, nil
}

// say passes on the line that was read last.
func (p *process) say(out *printer) { out.printf("   %-11s  %s\n", p.name, p.lines.Text()) }
