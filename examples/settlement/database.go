package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// database is where the example works: a server of its own, or a schema of its
// own in somebody's database.
type database struct {
	pool   *pgxpool.Pool
	url    string
	schema string         // "" on a server of its own
	server *pgtest.Server // nil in somebody's database
	keep   bool
}

var errCleanup = errors.New("left behind")

// openDatabase starts a server if there is no URL. The caller closes the result.
func openDatabase(ctx context.Context, url string, keep bool, out *printer) (db *database, err error) {
	db = &database{url: url, keep: keep}
	if url == "" {
		out.printf("   Starting a throw-away PostgreSQL ...\n")
		if db.server, err = pgtest.Start(ctx, pgtest.Options{Keep: keep}); err != nil {
			return nil, err
		}
		db.url = db.server.URL("postgres")
		out.printf("   It is up, process %d: %s\n", db.server.PID(), db.url)
		if db.pool, err = connect(ctx, db.url, ""); err != nil {
			db.server.Stop()
		}
		return db, err
	}

	// Nothing of ours can collide with what else is in the database, and one
	// statement removes all of it.
	db.schema = fmt.Sprintf("jobrun_settlement_%d_%d", time.Now().Unix(), os.Getpid())
	if db.pool, err = connect(ctx, db.url, db.schema); err != nil {
		return nil, err
	}
	at := db.pool.Config().ConnConfig
	out.printf("   Using the database %q of %s, in a new schema: %s\n", at.Database, at.Host, db.schema)
	if _, err := db.pool.Exec(ctx, "CREATE SCHEMA "+db.schema); err != nil {
		db.pool.Close()
		return nil, fmt.Errorf("create a schema: %w", err)
	}
	return db, nil
}

// connect opens a pool whose statements find the tables in the schema.
func connect(ctx context.Context, url, schema string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 4 // 20 instances stay below what a server usually allows
	if schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = schema
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// close removes what openDatabase made, or says how to, if it is to be kept. Its
// context is not that of the run, which has ended if somebody pressed Ctrl-C.
func (db *database) close(ctx context.Context, out *printer) error {
	defer db.pool.Close()
	switch {
	case db.server != nil && db.keep:
		out.printf("Kept, as you asked. To look:    psql '%s'\n", db.url)
		out.printf("                    To remove:  kill -INT %d\n", db.server.PID())
	case db.server != nil:
		db.pool.Close()
		db.server.Stop()
		out.printf("The throw-away PostgreSQL is gone again.\n")
	case db.keep:
		out.printf("Kept, as you asked. To look:    SET search_path TO %s;\n", db.schema)
		out.printf("                    To remove:  DROP SCHEMA %s CASCADE;\n", db.schema)
	default:
		ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		if _, err := db.pool.Exec(ctx, "DROP SCHEMA "+db.schema+" CASCADE"); err != nil {
			return fmt.Errorf("%w: schema %s: %w", errCleanup, db.schema, err)
		}
		out.printf("The schema %s is dropped again.\n", db.schema)
	}
	return nil
}
