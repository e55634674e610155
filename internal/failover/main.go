//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Exit codes of the command.
const (
	sound     = 0
	violated  = 1
	usage     = 2
	notJudged = 3 // it could not come to a verdict
)

// config is what the flags say.
type config struct {
	kills       int // of the primary
	stops       int // of the node of the primary, which comes back
	switchovers int
	seed        uint64
	async, keep bool
	ttl         int           // seconds
	lag         time.Duration // before a kill, in which nothing reaches the other nodes
}

func main() {
	switch {
	case os.Getenv(guardVariable) != "":
		guard(os.Getenv(guardVariable))
	case os.Getenv(workerVariable) != "":
		os.Exit(runWorker(os.Getenv(workerVariable)))
	default:
		os.Exit(command(os.Args[1:], os.Stdout, os.Stderr))
	}
}

func command(args []string, out, errOut io.Writer) int {
	var c config
	flags := flag.NewFlagSet("failover", flag.ContinueOnError)
	flags.SetOutput(errOut)
	flags.IntVar(&c.kills, "kills", 20, "how often the primary is killed")
	flags.IntVar(&c.stops, "stops", 4, "how often the primary's node is stopped until another leads, and continued")
	flags.IntVar(&c.switchovers, "switchovers", 4, "how often Patroni is asked to move the primary")
	flags.Uint64Var(&c.seed, "seed", rand.Uint64N(1_000_000), "draws the order and the moments of the kills; what happens differs from run to run all the same")
	flags.BoolVar(&c.async, "async", false, "asynchronous replication: losses are expected and only counted")
	flags.BoolVar(&c.keep, "keep", false, "leave the directory with all logs and notes, and say where")
	flags.IntVar(&c.ttl, "ttl", 20, "Patroni's ttl in `seconds`: how long a node that is gone stays the leader")
	flags.DurationVar(&c.lag, "lag", time.Second, "how long before a kill nothing reaches the other nodes any more, at two kills of four; 0: at none")
	flags.Usage = func() {
		fmt.Fprintf(errOut, "go run ./internal/failover [flags]\n\nKills, stops and moves the primary of a Patroni cluster while jobs run, and checks that nothing that was acknowledged is\nlost or doubled. Exit code 0: no violation; 1: violations; 2: usage, or programs are missing; 3: no verdict.\n\n")
		flags.PrintDefaults()
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return sound
	case err != nil:
		return usage
	case flags.NArg() > 0 || c.kills < 0 || c.stops < 0 || c.switchovers < 0 || c.kills+c.stops+c.switchovers == 0 || c.lag < 0 || c.lag > time.Minute || c.ttl < 9 || c.ttl > 120:
		fmt.Fprintln(errOut, "-kills, -stops and -switchovers are at least 0 and not all 0, -ttl 9 to 120, -lag 0 to 1m, and there are no further arguments")
		return usage
	}
	programs, err := findPrograms()
	if err != nil {
		fmt.Fprintln(errOut, err)
		return usage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	t := &trial{config: c, programs: programs, out: out, begun: time.Now(), draws: rand.New(rand.NewPCG(c.seed, 1))}
	code, err := t.run(ctx)
	if err != nil {
		fmt.Fprintln(errOut, "no verdict:", firstLine(err.Error()))
	}
	return code
}
