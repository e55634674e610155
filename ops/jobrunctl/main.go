// Command jobrunctl shows what the tables of jobrun say and takes the decisions of
// people: "jobrunctl help" says how.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // --zone works where the system has no zone data

	"github.com/seed-ccb5b62c/jobrun/ops"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := ops.Standalone(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}
