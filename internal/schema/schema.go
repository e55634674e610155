// Package schema creates, checks and opens the tables.
package schema

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
	"github.com/seed-ccb5b62c/jobrun/migrations"
)

// readLimit bounds one reading call, acquiring a connection included.
const readLimit = 10 * time.Second

// Read calls fn, bounded, with the statements; a transient error is repeated once.
func Read(ctx context.Context, pool *pgxpool.Pool, tables *store.Tables, fn func(context.Context, *store.Store) error) error {
	var err error
	for range 2 {
		limited, cancel := context.WithTimeout(ctx, readLimit)
		var s *store.Store
		if s, err = tables.Open(limited, pool); err == nil {
			err = fn(limited, s)
		}
		cancel()
		if err == nil || ctx.Err() != nil || !store.Transient(err) {
			break
		}
	}
	return Explain(err)
}

// Explain adds the remedy to the error of a missing table.
func Explain(err error) error {
	switch store.Code(err) {
	case "42P01", "42703", "3F000":
		return fmt.Errorf("%w (the tables are missing or older than this library: run Migrate)", err)
	case "42P05", "26000":
		return fmt.Errorf("%w (is there a pooler in between? In transaction mode it needs default_query_exec_mode=exec in the URL)", err)
	}
	return err
}

// Migrate applies what is missing of the SQL files, one transaction each. It waits
// at most a second for a lock and then tries again, for a minute in all.
func Migrate(ctx context.Context, pool *pgxpool.Pool, tables *store.Tables, log *slog.Logger) error {
	all, err := store.Migrations(migrations.FS)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	limited, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("gave up after a minute"))
	defer cancel()
	var last error // the latest one that says more than that the time is up
	for try := 0; ; {
		name, err := migrateNext(limited, pool, tables, all)
		if last == nil || store.Code(err) != "" || limited.Err() == nil {
			last = err
		}
		switch {
		case err == nil && name == "":
			return nil
		case err == nil:
			log.InfoContext(ctx, "migration applied", "name", name)
			try = 0
		case store.Code(err) == "42501":
			return fmt.Errorf("migrate: %w (run it once as a role that may create tables in the schema and owns those that exist)", err)
		case !store.Transient(err):
			return fmt.Errorf("migrate: %w", err)
		case !store.Pause(limited, try):
			return fmt.Errorf("migrate: %w (last error: %w)", context.Cause(limited), last)
		default:
			if try == 0 {
				log.WarnContext(ctx, "migration waits and tries again for a minute", "err", err.Error())
			}
			try++
		}
	}
}

// migrateNext waits for locks at most a second, and less than ctx allows, so that
// the server can say what the wait was for.
func migrateNext(ctx context.Context, pool *pgxpool.Pool, tables *store.Tables, all []store.Migration) (string, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Release()
	s, err := tables.Open(ctx, conn)
	if err != nil {
		return "", err
	}
	lock := time.Second
	if end, ok := ctx.Deadline(); ok {
		lock = min(lock, time.Until(end)/2)
	}
	return s.MigrateNext(ctx, conn.Conn(), all, lock)
}

// Verify judges the tables, the session and the clocks, and logs both time zones.
func Verify(ctx context.Context, pool *pgxpool.Pool, tables *store.Tables, log *slog.Logger, zone *time.Location, now func() time.Time) error {
	all, err := store.Migrations(migrations.FS)
	if err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	var problems []string
	var server store.Server
	var name string
	err = Read(ctx, pool, tables, func(ctx context.Context, s *store.Store) (err error) {
		name = s.Schema
		if problems, err = s.Verify(ctx, pool, all); err != nil {
			return err
		}
		before := now()
		var more []string
		server, more, err = s.Server(ctx, pool)
		problems = append(problems, more...)
		after := now()
		// The server read its clock between the two: the difference is at least this.
		if skew := max(before.Sub(server.Clock), server.Clock.Sub(after)); err == nil && !server.Clock.IsZero() && skew > 5*time.Second {
			problems = append(problems, fmt.Sprintf("this host's clock and the server's differ by %s", skew.Round(time.Millisecond)))
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	level, message := slog.LevelInfo, "tables verified"
	if problems != nil {
		level, message = slog.LevelWarn, "tables not as needed"
	}
	log.Log(ctx, level, message, "schema", name, "problems", len(problems), "business_zone", zone.String(), "session_time_zone", server.TimeZone)
	if problems != nil {
		return fmt.Errorf("verify schema %s: %s", name, strings.Join(problems, "; "))
	}
	return nil
}
