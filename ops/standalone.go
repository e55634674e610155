package ops

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// Standalone is the command without a service around it: flags and environment
// name the database (--database-url, DATABASE_URL), the business zone (--zone,
// JOBRUN_ZONE, required) and the schema (--schema). It knows no jobs, so it cannot
// judge missed dates. The program jobrunctl is nothing more.
func Standalone(ctx context.Context, args []string) int {
	c := newCommand(args)
	url, zone, schema := os.Getenv("DATABASE_URL"), os.Getenv("JOBRUN_ZONE"), ""
	c.settings = func(fs *flag.FlagSet) {
		fs.Func("database-url", "`URL` of the database; better in DATABASE_URL, where ps does not show it", func(s string) error { url = s; return nil })
		fs.StringVar(&zone, "zone", zone, "business time `ZONE` such as Asia/Seoul, required; or JOBRUN_ZONE")
		fs.StringVar(&schema, "schema", schema, "`SCHEMA` of the tables; \"\": what the search_path says")
	}
	c.open = func(ctx context.Context, talk bool) (*jobrun.Runner, func(), error) {
		if url == "" {
			return nil, nil, usage("no database: set DATABASE_URL, or give --database-url")
		}
		if zone == "" {
			return nil, nil, usage("no business zone: set JOBRUN_ZONE, or give --zone, such as Asia/Seoul")
		}
		location, err := time.LoadLocation(zone)
		if err != nil {
			return nil, nil, usage("--zone is %q, wanted: the name of a time zone such as Asia/Seoul", zone)
		}
		config, err := pgxpool.ParseConfig(url)
		if err != nil || misread(url, config.ConnConfig) {
			return nil, nil, usage("DATABASE_URL or --database-url cannot be read (it is not shown, because it may hold a password): want postgres://user:password@host:5432/database, with @ / # : %% and spaces of a password written as %%40 %%2F %%23 %%3A %%25 %%20")
		}
		if _, known := config.ConnConfig.RuntimeParams["application_name"]; !known {
			config.ConnConfig.RuntimeParams["application_name"] = "jobrunctl"
		}
		if config.ConnConfig.ConnectTimeout == 0 {
			config.ConnConfig.ConnectTimeout = 10 * time.Second
		}
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return nil, nil, err
		}
		log := slog.New(slog.NewTextHandler(io.Discard, nil))
		if talk {
			log = slog.New(slog.NewTextHandler(c.err, nil))
		}
		r, err := jobrun.New(pool, location, &jobrun.Options{Schema: schema, Logger: log})
		if err != nil {
			pool.Close()
			return nil, nil, err
		}
		return r, pool.Close, nil
	}
	c.pass = func() (args, env []string) { // a password on a command line is seen by everybody on the host
		return []string{"--schema", schema}, []string{"DATABASE_URL=" + url, "JOBRUN_ZONE=" + zone}
	}
	return c.main(ctx, args)
}

// misread reports whether parts of a connection string have become a name that errors
// show and look-ups send: as those of other libraries do, "Host=h;Password=p", and
// passwords with characters that end a part of a URL.
func misread(url string, c *pgx.ConnConfig) bool {
	hosts := []string{c.Host}
	for _, f := range c.Fallbacks {
		hosts = append(hosts, f.Host)
	}
	return strings.Contains(url, "://") && strings.Contains(url, "#") ||
		slices.ContainsFunc(hosts, func(host string) bool {
			return strings.ContainsAny(host, ";=@ ") || strings.Contains(host, "/") && !strings.HasPrefix(host, "/")
		}) ||
		slices.ContainsFunc([]string{c.Database, c.User}, func(name string) bool { return strings.ContainsAny(name, ";=@/") })
}
