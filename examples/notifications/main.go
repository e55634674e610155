// Notifications shows what a job needs that calls somebody outside, such as a
// provider of mail or payments, whom no transaction includes: a key that is the same
// whenever a call is repeated.
//
//	go run ./examples/notifications
//	go run ./examples/notifications -without-key
//
// It needs no running server: it starts a PostgreSQL and an HTTP receiver of its own,
// kills a process between a call and its commit, has an operator approve a re-run,
// and counts what the receiver sent. The job is in notices.go, the other side in
// receiver.go, what a process does with jobrun in worker.go, what happens in story.go.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Exit codes. "go run" answers 1 for all but the first.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	exitWrong  = 3
	exitTwice  = 4
)

const usage = `Usage: notifications [flags]

Sends each customer one message, although the process is killed half-way. Without
DATABASE_URL it starts a throw-away PostgreSQL, which needs the server programs
(initdb, postgres) to be installed. With it, it works in a new schema of that
database and drops it at the end.

Exit codes ("go run" answers 1 for all but 0):
  0  every customer got one message
  1  something failed, or was interrupted
  2  wrong flags
  3  the receiver's count or the ledger is not what it should be
  4  -without-key: a customer got two messages, as was to be shown

Flags:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if task := os.Getenv(workerVar); task != "" {
		if err := work(ctx, task); err != nil {
			fmt.Fprintf(os.Stderr, "notifications: %v\n", err)
			os.Exit(exitFailed)
		}
		return
	}
	context.AfterFunc(ctx, stop)   // a second Ctrl-C ends the process at once
	signal.Ignore(syscall.SIGPIPE) // "| head" must not end it before it has cleaned up
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	f := flag.NewFlagSet("notifications", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, "%s", usage)
		f.PrintDefaults()
	}
	withoutKey := f.Bool("without-key", false, "send no Idempotency-Key, to see what goes wrong then")
	keep := f.Bool("keep", false, "leave the schema in the database of DATABASE_URL, and print how to remove it")
	// The last one is where this module's tests find a server; pgtest would use it too.
	databaseURL := cmp.Or(os.Getenv("DATABASE_URL"), os.Getenv("JOBRUN_TEST_DATABASE_URL"))
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil: // Parse has said it
		return exitUsage
	case f.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", f.Arg(0))
	case *keep && databaseURL == "":
		err = errors.New("-keep needs DATABASE_URL: the throw-away server goes with the program")
	}
	if err != nil {
		fmt.Fprintf(stderr, "notifications: %v\n", err)
		return exitUsage
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("two minutes have passed"))
	defer cancel()
	if err = tell(ctx, databaseURL, *withoutKey, *keep, stdout); err == nil {
		return exitOK
	}
	fmt.Fprintf(stderr, "notifications: %v\n", err)
	switch {
	case errors.Is(err, errWrong):
		return exitWrong
	case errors.Is(err, errTwice):
		return exitTwice
	}
	return exitFailed
}
