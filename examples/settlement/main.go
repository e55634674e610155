// Settlement shows jobrun at work: several processes are told to settle the same
// business date at the same moment, and exactly one of them does.
//
//	go run ./examples/settlement
//
// It needs no running server: it starts a PostgreSQL of its own, loads the orders
// of orders.csv, lets processes race for one date, starts one more when they are
// done, and compares what was settled with a sum that plain SQL makes of the
// orders. The job itself is in settle.go, what a process does with jobrun in
// instance.go.
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
once and shows that exactly one of them does it.

Without -database-url and DATABASE_URL it starts a throw-away PostgreSQL, which
needs the server programs (initdb, postgres) to be installed. With one of them
it works in a new schema of that database and drops it at the end.

Flags:
`

const exitCodes = `
Exit codes ("go run" answers 1 for all but 0):
  0    exactly one process settled the date, and the totals are right
  1    something failed
  2    wrong flags
  3    not exactly one process settled, or the totals are wrong
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
	if total, _ := countOn(all, c.date); total == 0 {
		return c, "", fmt.Errorf("-date: no orders were paid on %s; there are some on %s", c.date, datesOf(all))
	}
	// The last one is where this module's tests find a server; pgtest would use it too.
	c.databaseURL = cmp.Or(c.databaseURL, os.Getenv("DATABASE_URL"), os.Getenv("JOBRUN_TEST_DATABASE_URL"))
	return c, "", nil
}

// demonstrate is the whole story, from an empty database to the check.
func demonstrate(ctx context.Context, c config, all []order, out *printer) (err error) {
	out.printf("Daily settlement of %s, the business date in Seoul\n", c.date)

	out.printf("\n1. The database\n\n")
	db, err := openDatabase(ctx, c.databaseURL, c.keep, out)
	if err != nil {
		return err
	}
	defer func() {
		out.printf("\n")
		err = errors.Join(err, db.close(context.WithoutCancel(ctx), out))
	}()
	runner, err := newRunner(db.pool, "demo")
	if err != nil {
		return err
	}
	if err := runner.Migrate(ctx); err != nil {
		return err
	}
	start := time.Now()
	if err := load(ctx, db.pool, all); err != nil {
		return err
	}
	total, elsewhere := countOn(all, c.date)
	out.printf("   %s orders loaded in %s.\n", thousands(int64(len(all))), seconds(time.Since(start)))
	out.printf("   %s of them were paid on %s in Seoul. In UTC, %s of those fall on the\n"+
		"   day before: whoever takes the date from a UTC clock settles them on a wrong date.\n", thousands(total), c.date, thousands(elsewhere))

	out.printf("\n2. The race for %s\n\n", jobrun.Job{Name: jobName}.Key(c.date))
	out.printf("   Processes started: %d. When all are ready, one signal starts the job in each.\n\n", c.instances)
	settled, err := race(ctx, db, c.date, names(c.instances), out)
	if err != nil {
		return err
	}

	out.printf("\n3. A latecomer\n\n   One more process starts the same job now that it is done.\n\n")
	again, err := race(ctx, db, c.date, []string{"latecomer"}, out)
	if err != nil {
		return err
	}

	out.printf("\n4. What is on record: table batch_job_run, times in %s\n\n", seoul)
	records, err := runner.List(ctx, jobrun.Filter{Job: jobName})
	if err != nil {
		return err
	}
	printRuns(out, records)

	out.printf("\n5. What was settled on %s, in won\n\n", c.date)
	totals, err := settledTotals(ctx, db.pool, c.date)
	if err != nil {
		return err
	}
	printTotals(out, totals)

	out.printf("\n6. The check\n\n")
	differences, err := compare(ctx, db.pool, c.date)
	if err != nil {
		return err
	}
	out.printf("   processes that settled: %d of %d\n", settled+again, c.instances+1)
	out.printf("   totals equal the independent SQL sum: %s\n", yesNo(len(differences) == 0))
	for _, d := range differences {
		out.printf("     %s\n", d)
	}
	if settled+again != 1 || len(differences) > 0 {
		return errNotEqual
	}
	return nil
}
