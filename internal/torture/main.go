//go:build unix

package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	_ "time/tzdata"
)

//go:embed tables.sql
var tables string

var seoul = func() *time.Location {
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		panic(err) // time/tzdata has it
	}
	return zone
}()

func main() {
	if text := os.Getenv(workerVariable); text != "" {
		os.Exit(runWorker(text))
	}
	os.Exit(command(os.Args[1:], os.Stdout, os.Stderr))
}

// Exit codes of the command.
const (
	sound     = 0
	violated  = 1
	usage     = 2
	notJudged = 3 // it could not come to a verdict
)

func command(args []string, out, errOut io.Writer) int {
	flags := flag.NewFlagSet("torture", flag.ContinueOnError)
	flags.SetOutput(errOut)
	seed := flags.Uint64("seed", rand.Uint64N(1_000_000), "draws the faults and what the jobs do; the moments differ from run to run all the same")
	duration := flags.Duration("time", 2*time.Minute, "how long the faults go on; the end of all runs and the check come after it")
	instances := flags.Int("instances", 4, "worker processes at a time")
	list := flags.String("faults", "all", "what goes wrong: all, none, cut, or names with commas: "+strings.Join(faultNames(), ", "))
	pause := flags.Duration("pause", 120*time.Millisecond, "between faults, on average")
	every := flags.Duration("every", 300*time.Millisecond, "after which each job has a new date to run")
	quick := flags.Bool("quick", false, "check once, when the faults end, and leave out the end of all runs")
	keep := flags.Bool("keep", false, "leave the server and its tables for a look, and say where")
	damage := flags.String("mutants", "", "damage the library in known ways, one after the other, and see whether the checker finds it: all, or names with commas: "+strings.Join(mutantNames(), ", "))
	flags.Usage = func() {
		fmt.Fprintf(errOut, "go run ./internal/torture [flags]\n\nRuns worker processes against a PostgreSQL of its own, breaks everything that can break, and checks\nwhat is in the tables afterwards. Exit code 0: no rule is violated; 1: one is; 2: usage; 3: no verdict.\n\n")
		flags.PrintDefaults()
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return sound
	case err != nil:
		return usage
	case flags.NArg() > 0:
		fmt.Fprintf(errOut, "unexpected argument %q\n", flags.Arg(0))
		return usage
	}
	picked, people, err := chosen(*list)
	some, mutantErr := chosenMutants(*damage)
	switch {
	case err != nil:
	case mutantErr != nil:
		err = mutantErr
	case *duration < time.Second:
		err = fmt.Errorf("-time is %s; allowed: 1s or more", *duration)
	case *instances < 1 || *instances > 20:
		err = fmt.Errorf("-instances is %d; allowed: 1 to 20", *instances)
	case *pause < time.Millisecond || *every < 10*time.Millisecond:
		err = errors.New("-pause has to be 1ms or more, -every 10ms or more")
	case *duration / *every > mostDates:
		err = fmt.Errorf("-time %s has %d dates of -every %s; allowed: %d", *duration, *duration / *every, *every, mostDates)
	case *damage != "":
		flags.Visit(func(f *flag.Flag) {
			if f.Name != "mutants" && f.Name != "seed" {
				err = fmt.Errorf("-mutants chooses the faults and times itself; allowed beside it: -seed, not -%s", f.Name)
			}
		})
	}
	if err != nil {
		fmt.Fprintln(errOut, err)
		return usage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *damage != "" {
		return runMutants(ctx, out, some, *seed)
	}
	t := &torture{
		out: out, seed: *seed, duration: *duration, every: *every, pause: *pause, disturbing: people, keep: *keep,
		thorough: *list == "all" && !*quick && *duration >= time.Minute,
		draws:    rand.New(rand.NewPCG(*seed, 1)), counts: map[string]int{},
	}
	code, err := t.run(ctx, *instances, picked, !*quick)
	if err != nil {
		fmt.Fprintln(errOut, "no verdict:", err)
	}
	return code
}
