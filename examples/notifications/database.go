package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

const tables = `
CREATE TABLE customer (customer text PRIMARY KEY);
INSERT INTO customer SELECT 'customer-' || n FROM generate_series(1, 6) AS n;
CREATE TABLE notice (customer text PRIMARY KEY, message text NOT NULL);`

// database is a new schema in the database of DATABASE_URL, or on a throw-away
// server, which goes with this process however that ends.
type database struct {
	pool        *pgxpool.Pool
	url, schema string
}

func openDatabase(ctx context.Context, databaseURL string) (*database, error) {
	if databaseURL == "" {
		server, err := pgtest.Start(ctx, pgtest.Options{})
		if err != nil {
			return nil, err
		}
		databaseURL = server.URL("postgres")
	}
	u, err := url.Parse(databaseURL)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return nil, errors.New("DATABASE_URL must begin with postgres://") // its text may hold a password
	}
	db := &database{schema: fmt.Sprintf("jobrun_notifications_%d_%d", time.Now().Unix(), os.Getpid())}
	query := u.Query()
	query.Set("search_path", db.schema)
	u.RawQuery = query.Encode()
	db.url = u.String()
	if db.pool, err = pgxpool.New(ctx, db.url); err != nil {
		return nil, err
	}
	if _, err = db.pool.Exec(ctx, "CREATE SCHEMA "+db.schema); err != nil {
		db.pool.Close()
	}
	return db, err
}

// close drops the schema. Ctx must not end with Ctrl-C.
func (db *database) close(ctx context.Context, keep bool, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	defer db.pool.Close()
	drop := "DROP SCHEMA " + db.schema + " CASCADE"
	if keep {
		fmt.Fprintf(out, "\nKept, as you asked. To remove it: %s;\n", drop)
		return nil
	}
	if _, err := db.pool.Exec(ctx, drop); err != nil {
		return fmt.Errorf("left behind, schema %s: %w", db.schema, err)
	}
	return nil
}
