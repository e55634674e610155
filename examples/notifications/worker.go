package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// workerVar tells the program, when it starts itself again, which worker to be: an
// argument would show a password to everybody on the host.
const workerVar = "NOTIFICATIONS_WORKER"

// worker is a process of the service.
type worker struct {
	Name, DatabaseURL, Receiver string
	WithoutKey                  bool
	StopAt                      string // the customer after whose answer it waits to be killed; "": none
}

// newRunner is all that a service needs to set up.
func newRunner(pool *pgxpool.Pool, name string) (*jobrun.Runner, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return jobrun.New(pool, time.UTC, &jobrun.Options{WorkerID: name, Lease: lease, Logger: log})
}

// work is what the process does: it triggers the job and says what came of it.
func work(ctx context.Context, task string) error {
	var w worker
	if err := json.Unmarshal([]byte(task), &w); err != nil {
		return fmt.Errorf("%s: %w", workerVar, err)
	}
	pool, err := pgxpool.New(ctx, w.DatabaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	runner, err := newRunner(pool, w.Name)
	if err != nil {
		return err
	}
	job := notices(pool, newSender(w.Receiver, w.WithoutKey), func(customer, message string) {
		fmt.Printf("%s: answered %s\n", customer, message)
		if customer == w.StopAt { // here, between the answer and the commit, comes the SIGKILL
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(exitFailed) // or, instead of it, the end of the process that should have sent it
		}
	})
	// A service calls Run, for today. It starts the date, or leaves it to the process that
	// has it, or executes a re-run that was approved.
	res, err := runner.RunDate(ctx, job, date)
	switch {
	case err != nil:
		return err
	case !res.Ran():
		fmt.Printf("%s: sent nothing\n", res.Decision)
	default:
		fmt.Printf("%s: attempt %d %s, %d customers\n", res.Decision, res.Record.Attempt, res.Record.Status, res.Record.ItemsProcessed)
	}
	return nil
}

// run starts the process, passes on what it says, and waits for its end. At StopAt it
// gets a SIGKILL, once ready has returned.
func (w worker) run(ctx context.Context, out io.Writer, ready func(context.Context) error) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	task, err := json.Marshal(w)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, self)
	defer func() { // no process outlives this call; after the Wait below, this one answers at once
		cancel()
		_ = cmd.Wait()
	}()
	cmd.Env, cmd.Stderr = append(os.Environ(), workerVar+"="+string(task)), os.Stderr
	if _, err = cmd.StdinPipe(); err != nil { // nothing is sent through it, but it ends with this process
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	killed := false
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		fmt.Fprintf(out, "   %s  %s\n", w.Name, lines.Text())
		if w.StopAt != "" && strings.HasPrefix(lines.Text(), w.StopAt+": ") {
			if err := ready(ctx); err != nil {
				return err
			}
			if err := cmd.Process.Kill(); err != nil {
				return err
			}
			killed = true
		}
	}
	err = cmd.Wait()
	switch {
	case killed && err != nil:
		fmt.Fprintf(out, "   %s  %s\n", w.Name, cmd.ProcessState)
		return nil
	case err != nil:
		return fmt.Errorf("%s: %w", w.Name, err)
	case w.StopAt != "":
		return fmt.Errorf("%s came to its end before it could be killed", w.Name)
	}
	return nil
}
