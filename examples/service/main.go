// Service is a whole program around jobrun, to copy from: an HTTP service with two
// scheduled jobs, retries, alerts, a health check and a graceful stop.
//
//	go run ./examples/service -fast
//
// Without a database it starts a PostgreSQL of its own. main.go is what every
// service needs; jobs.go, alerts.go and demo.go are what differs between services.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
	_ "time/tzdata" // the image may have no zone data

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

const exitCodes = `
Exit codes ("go run" answers 1 for all but 0):
  0  stopped by SIGTERM or Ctrl-C, and every running job came to its end
  1  something failed, or a job had to be interrupted at the end of the grace
  2  wrong flags
`

// config is what the flags and the environment say.
type config struct {
	addr        string
	databaseURL string
	zone        *time.Location
	grace       time.Duration
	webhook     string
	fast        bool
	demo        bool
}

func main() {
	c, err := parseFlags(os.Args[1:], os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(0)
	case err != nil:
		fmt.Fprintf(os.Stderr, "service: %v\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	if err := run(ctx, c, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "service: %v\n", err)
		os.Exit(1)
	}
}

func parseFlags(args []string, out io.Writer) (c config, err error) {
	f := flag.NewFlagSet("service", flag.ContinueOnError)
	f.SetOutput(out)
	f.Usage = func() {
		fmt.Fprintln(out, "Usage: service [flags]")
		f.PrintDefaults()
		fmt.Fprintf(out, "%s", exitCodes)
	}
	f.StringVar(&c.addr, "addr", "127.0.0.1:0", "`address` to listen on; port 0: any free one, printed at the start")
	f.StringVar(&c.databaseURL, "database-url", "", "`URL` of the PostgreSQL database; empty: DATABASE_URL, and without that a throw-away server")
	// Not TZ: that is the zone of the host, and the business has its own.
	zone := f.String("zone", cmp.Or(os.Getenv("BUSINESS_ZONE"), "Asia/Seoul"), "business time `zone`; its default comes from BUSINESS_ZONE")
	f.DurationVar(&c.grace, "grace", 20*time.Second, "`time` that running jobs have to finish after SIGTERM")
	f.StringVar(&c.webhook, "webhook", os.Getenv("ALERT_WEBHOOK"), "`URL` to post alerts to; empty: ALERT_WEBHOOK, and without that a receiver of the example's own")
	f.BoolVar(&c.fast, "fast", false, "for a look: trigger the jobs every 2 s")
	f.BoolVar(&c.demo, "demo", false, "for a look at the admin page: runs in every state, and whoever opens it may act; only on the throw-away server")
	if err := f.Parse(args); err != nil {
		return c, err
	}
	if f.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if c.grace < 0 {
		return c, fmt.Errorf("-grace is %s, allowed: 0 or more", c.grace)
	}
	c.databaseURL = cmp.Or(c.databaseURL, os.Getenv("DATABASE_URL"))
	if c.demo && c.databaseURL != "" {
		return c, errors.New("-demo writes runs that never happened: it takes no database, neither by -database-url nor by DATABASE_URL")
	}
	c.zone, err = time.LoadLocation(*zone)
	if err != nil || *zone == "" || c.zone == time.Local { // "" would be UTC, Local that of the host
		return c, fmt.Errorf("-zone %q: want the name of a time zone, such as Asia/Seoul", *zone)
	}
	return c, nil
}

// run starts the service, and stops it when ctx ends.
func run(ctx context.Context, c config, stdout, stderr io.Writer) error {
	var level slog.Level
	if c.demo { // else the address of the page is lost among the lines of its runs
		level = slog.LevelError
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level})) // in production NewJSONHandler
	if c.databaseURL == "" {
		url, stop, err := throwAwayDatabase(ctx, stderr)
		if err != nil {
			return err
		}
		defer stop()
		c.databaseURL = url
	}

	// The size comes from pool_max_conns in the URL. jobrun keeps one connection
	// for heartbeats while jobs run; the health check should find one too.
	pool, err := pgxpool.New(ctx, c.databaseURL)
	if err != nil {
		return err
	}
	defer closePool(pool)
	if err := ping(ctx, pool); err != nil {
		return err
	}
	runner, err := jobrun.New(pool, c.zone, &jobrun.Options{Logger: log})
	if err != nil {
		return err
	}
	// Both are safe from every instance at once. Verify finds what would make the
	// promises void (a missing key, a wrong clock) before the first run, not at 01:00.
	if err := runner.Migrate(ctx); err != nil {
		return err
	}
	if err := runner.Verify(ctx); err != nil {
		return err
	}
	if err := prepareDemo(ctx, pool, c.zone); err != nil {
		return err
	}

	// The jobs must not end with ctx: SIGTERM would interrupt them on the spot, and
	// there would be no grace. Runner.Shutdown ends them when it has run out.
	jobCtx := context.WithoutCancel(ctx)
	scheduler := cron.New(cron.WithLocation(c.zone)) // else "0 1 * * *" is 01:00 of the host
	jobs := []scheduledJob{settlement(pool, c), inventorySync(pool, c)}
	if c.demo {
		jobs = append(jobs, demoJobs()...)
		if err := fillDemo(ctx, runner, pool, jobs); err != nil {
			return err
		}
	}
	for _, j := range jobs {
		if _, err := runner.Schedule(jobCtx, scheduler, j.spec, j.Job); err != nil {
			return err
		}
	}
	retrySpec, lookEvery := "@every 1m", 30*time.Second
	if c.fast || c.demo {
		retrySpec, lookEvery = "@every 2s", time.Second
	}
	// cron calls this on a goroutine of its own each time. A slow retry does not
	// delay the next call, and calls that overlap, here or on another instance,
	// execute a run once. Errors of runs have been logged.
	if _, err := scheduler.AddFunc(retrySpec, func() { _, _ = runner.RetryDue(jobCtx) }); err != nil {
		return err
	}

	if c.webhook == "" {
		url, stop, err := startReceiver(stdout)
		if err != nil {
			return err
		}
		defer stop()
		c.webhook = url
	}
	listener, err := net.Listen("tcp", c.addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler(runner, jobs, c, log), ReadHeaderTimeout: 5 * time.Second}

	var background sync.WaitGroup
	defer background.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	background.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			cancel(err)
		}
	})
	background.Go(func() { newAlerter(runner, pool, c.webhook, log).watch(ctx, lookEvery) })
	scheduler.Start()
	fmt.Fprintf(stdout, "listening on http://%s\n", listener.Addr())
	fmt.Fprintf(stdout, "admin page: http://%s/admin/jobs/\n", listener.Addr())

	<-ctx.Done()
	err = stop(jobCtx, c.grace, scheduler, server, runner, log) // ctx has ended
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(fmt.Errorf("serve: %w", cause), err)
	}
	return err
}

// stop ends what brings new work first and then waits for the work that is there.
// It takes at most the grace and the 35 s that jobrun allows itself for recording
// the results of interrupted jobs in a slow database; usually that takes
// milliseconds. With the pool's 5 s, allow the process the grace and 40 s: an
// orchestrator that kills it earlier (terminationGracePeriodSeconds,
// TimeoutStopSec) leaves RUNNING rows, and a person has to look at each.
func stop(ctx context.Context, grace time.Duration, scheduler *cron.Cron, server *http.Server, runner *jobrun.Runner, log *slog.Logger) error {
	log.Info("stopping", "grace", grace)
	limit, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	callbacks := scheduler.Stop()

	short, cancelShort := context.WithTimeout(limit, 5*time.Second) // the jobs go on meanwhile; a slow client may not delay the end further
	defer cancelShort()
	if err := server.Shutdown(short); err != nil {
		log.Warn("requests were cut off", "err", err)
		_ = server.Close()
	}
	// A job that is interrupted here is recorded FAILED. With attempts left it is due
	// at once, so that the instance that replaces this one goes on with it.
	if err := runner.Shutdown(limit); err != nil {
		return err
	}
	<-callbacks.Done() // they have nothing to do any more
	log.Info("stopped")
	return nil
}

// ping tells a wrong URL within seconds: Migrate would try for a minute.
func ping(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return pool.Ping(ctx)
}

// closePool does not wait for ever for a connection that a job keeps although its
// context has ended: the end of the process closes it.
func closePool(pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(5 * time.Second):
	}
}

// handler answers /healthz, / and the admin page. Whoever reaches the port reads the answers, so
// they hold no error text: that may name hosts, users and data. It is in the log.
func handler(runner *jobrun.Runner, jobs []scheduledJob, c config, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	page := &ops.PageOptions{Attention: attention, Logger: log}
	if c.demo {
		// A real one reads the session of the service's own login, and whether the
		// person may do this. Without Authorize the page only shows. Either way it
		// belongs behind whatever lets only colleagues in.
		page.Authorize = func(*http.Request) (string, error) { return "demo", nil }
	}
	// Its pattern has no method, as actions are POST requests.
	mux.Handle("/admin/jobs/", ops.Page(runner, page))
	// For the monitoring, not for a liveness probe: no restart mends a FAILED run.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
		defer cancel()
		answer := struct {
			Status   string    `json:"status"`
			Problems []problem `json:"problems,omitempty"`
		}{Status: "ok"}
		problems, err := runner.Attention(ctx, attention)
		switch {
		case err != nil:
			log.Error("health check", "err", err)
			answer.Status = "unavailable: the database did not answer as expected"
		case len(problems) > 0:
			answer.Status = "problems"
		}
		for _, p := range problems { // some come although a job's calendar fails
			answer.Problems = append(answer.Problems, describe(p))
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if answer.Status != "ok" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(answer)
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
		defer cancel()
		var records []jobrun.Record
		for _, j := range jobs {
			latest, err := runner.List(ctx, jobrun.Filter{Job: j.Name, Limit: 5})
			if err != nil {
				log.Error("status page", "err", err)
				http.Error(w, "the database did not answer as expected", http.StatusServiceUnavailable)
				return
			}
			records = append(records, latest...)
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "business date %s in %s\n\n", runner.Today(), c.zone)
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "RUN\tSTATUS\tATTEMPT\tSTARTED\tITEMS\tWORKER")
		for _, rec := range records {
			fmt.Fprintf(table, "%s\t%s\t%d\t%s\t%d\t%s\n", rec.Key, rec.Status, rec.Attempt, rec.StartedAt.Format(time.DateTime), rec.ItemsProcessed, rec.WorkerID)
		}
		_ = table.Flush()
	})
	return mux
}
