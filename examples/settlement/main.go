// Settlement shows jobrun at work: several processes are told to settle the same
// business date at the same moment, and exactly one of them does.
//
//	go run ./examples/settlement
//
// It needs no running server: it starts a PostgreSQL of its own, loads the orders
// of orders.csv, lets processes race for one date, starts one more when they are
// done, and compares what was settled with a sum that plain SQL makes of the
// orders. The job itself is in settle.go, what a process does with jobrun in
// instance.go, the story in demo.go.
//
// Two flags let things go wrong, together if you like: one order fails, and the
// winner of the race is killed in the middle of its work. Then a person acts, and
// another process does the rest:
//
//	go run ./examples/settlement -fail-item 10012345
//	go run ./examples/settlement -kill-after 2000
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
	"slices"
	"strings"
	"syscall"
	"time"
	_ "time/tzdata" // the machine may have no zone data

	"github.com/seed-ccb5b62c/jobrun"
)

// Exit codes. "go run" answers 1 for all but the first.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotEqual    = 3
	exitInterrupted = 130
)

const usage = `Usage: settlement [flags]

Settles the orders of one business date (in Seoul) from several processes at
once and shows that exactly one of them does it. With -fail-item or -kill-after
it shows what a person does when that one fails or dies, and that no order is
settled twice.

Without -database-url and DATABASE_URL it starts a throw-away PostgreSQL, which
needs the server programs (initdb, postgres) to be installed. With one of them
it works in a new schema of that database and drops it at the end.

Flags:
`

const exitCodes = `
Exit codes ("go run" answers 1 for all but 0):
  0    every order was settled exactly once, and the totals are right
  1    something failed
  2    wrong flags
  3    a process too many settled, an order twice, or the totals are wrong
  130  interrupted, and cleaned up
`

var seoul = func() *time.Location {
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		panic(err) // impossible with time/tzdata
	}
	return zone
}()

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if os.Getenv(instanceVar) != "" {
		// Ctrl-C reaches an instance twice, from the terminal and from its parent.
		os.Exit(runInstance(ctx))
	}
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	// When nobody reads the output any more ("| head"), writing to it must not end
	// the process before it has cleaned up.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// config is what the flags say.
type config struct {
	date        jobrun.Date
	instances   int
	databaseURL string
	keep        bool
	failItem    int64 // 0: none
	killAfter   int64 // 0: not at all
}

// errNotEqual: the run went through, but the result is not what jobrun promises.
var errNotEqual = errors.New("the result is wrong")

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	out, errs := &printer{w: stdout}, &printer{w: stderr}
	all, err := readOrders()
	if err != nil {
		errs.printf("settlement: %v\n", err)
		return exitFailed
	}
	c, help, err := parseFlags(args, all)
	switch {
	case errors.Is(err, flag.ErrHelp):
		errs.printf("%s", help)
		return exitOK
	case err != nil:
		errs.printf("settlement: %v\nsettlement -help lists the flags.\n", err)
		return exitUsage
	}
	if err = demonstrate(ctx, c, all, out); err == nil {
		return exitOK
	}
	errs.printf("settlement: %v\n", err)
	switch {
	case errors.Is(err, errCleanup):
		return exitFailed
	case ctx.Err() != nil:
		errs.printf("settlement: interrupted, and cleaned up\n")
		return exitInterrupted
	case errors.Is(err, errNotEqual):
		return exitNotEqual
	}
	return exitFailed
}

// parseFlags refuses everything that cannot work before anything is started. With
// flag.ErrHelp it returns the text that was asked for.
func parseFlags(args []string, all []order) (c config, help string, err error) {
	f := flag.NewFlagSet("settlement", flag.ContinueOnError)
	f.Usage = func() {} // the caller prints what is to be printed
	f.SetOutput(io.Discard)
	date := f.String("date", "2026-09-15", "business `date` to settle: "+datesOf(all))
	f.IntVar(&c.instances, "instances", 2, "`number` of processes that race, 1 to 20")
	f.StringVar(&c.databaseURL, "database-url", "", "`URL` of a PostgreSQL database to use; empty: DATABASE_URL, and without that a throw-away server")
	f.BoolVar(&c.keep, "keep", false, "leave the server (or the schema) to look at, and print how to remove it")
	f.Int64Var(&c.failItem, "fail-item", 0, "number of an `order` that fails until a person has acted, such as 10012345")
	f.Int64Var(&c.killAfter, "kill-after", 0, "kill the winner in the middle of its work, once this `number` of orders is committed")
	if err := f.Parse(args); err != nil {
		var flags strings.Builder
		f.SetOutput(&flags)
		f.PrintDefaults()
		return c, usage + flags.String() + exitCodes, err
	}
	if f.NArg() > 0 {
		return c, "", fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if c.instances < 1 || c.instances > 20 {
		return c, "", fmt.Errorf("-instances is %d, allowed: 1 to 20", c.instances)
	}
	if c.date, err = jobrun.ParseDate(*date); err != nil {
		return c, "", fmt.Errorf("-date: %w", err)
	}
	total, _ := countOn(all, c.date)
	if total == 0 {
		return c, "", fmt.Errorf("-date: no orders were paid on %s; there are some on %s", c.date, datesOf(all))
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if given["fail-item"] {
		if err := checkFailItem(c, all); err != nil {
			return c, "", err
		}
	}
	// One order may fail, and a chunk must be left in whose middle the process dies.
	if most := total - chunkSize - 1; given["kill-after"] && (c.killAfter < 1 || c.killAfter > most) {
		return c, "", fmt.Errorf("-kill-after is %d, allowed on %s: 1 to %d", c.killAfter, c.date, most)
	}
	// The last one is where this module's tests find a server; pgtest would use it too.
	c.databaseURL = cmp.Or(c.databaseURL, os.Getenv("DATABASE_URL"), os.Getenv("JOBRUN_TEST_DATABASE_URL"))
	return c, "", nil
}

// checkFailItem refuses an order that is not of the date: it would never fail.
func checkFailItem(c config, all []order) error {
	var ofDate []int64
	what := "there is no such order"
	for _, o := range all {
		if o.date() == c.date {
			ofDate = append(ofDate, o.ID)
		}
		if o.ID == c.failItem {
			what = "this order was paid on " + o.date().String()
		}
	}
	if slices.Contains(ofDate, c.failItem) {
		return nil
	}
	return fmt.Errorf("-fail-item is %d, allowed on %s: %d to %d; %s", c.failItem, c.date, slices.Min(ofDate), slices.Max(ofDate), what)
}
