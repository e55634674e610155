package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pooler names the pooler in transaction mode in front of the server; empty: there is none.
func pooler() string { return os.Getenv("JOBRUN_TEST_POOLER") }

// NeedsSessions skips a test that has to have sessions of its own, with settings,
// temporary tables or prepared statements that stay, or that ends them by their process:
// behind a pooler in transaction mode, which JOBRUN_TEST_POOLER names, there are none.
func NeedsSessions(t testing.TB) {
	t.Helper()
	if pooler := pooler(); pooler != "" {
		t.Skip("needs sessions of its own, which " + pooler + " does not give")
	}
}

// Leftovers lists what is left in a session that whoever gets it next would find. The
// settings that it leaves out are those that PgBouncer makes as its clients say, and those
// of a transaction, which PostgreSQL resets at the next one.
func Leftovers(ctx context.Context, session interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
},
) ([]string, error) {
	rows, err := session.Query(ctx, `
		SELECT 'setting ' || name || ' = ' || setting FROM pg_settings
		WHERE source = 'session' AND name NOT LIKE 'transaction_%' AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')
		UNION ALL SELECT 'lock on ' || objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
		UNION ALL SELECT 'listens to ' || l FROM pg_listening_channels() AS l
		UNION ALL SELECT 'cursor ' || name FROM pg_cursors WHERE name <> ''
		UNION ALL SELECT 'prepared ' || name FROM pg_prepared_statements WHERE from_sql
		UNION ALL SELECT 'temporary ' || relname FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// nothingLeft looks into all sessions of a database that the pooler has, by as many
// transactions at the same time.
func (db *DB) nothingLeft(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, db.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	var sessions int
	if err := pool.QueryRow(ctx, `SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'`).Scan(&sessions); err != nil {
		return err
	}
	var left []string
	for range sessions {
		conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(ctx) }() // which ends its transaction, after all have begun
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		all, err := Leftovers(ctx, tx)
		if err != nil {
			return err
		}
		left = append(left, all...)
	}
	if len(left) > 0 {
		return fmt.Errorf("left in sessions: %s", strings.Join(left, "; "))
	}
	if sessions == 0 {
		return errors.New("no session was found")
	}
	return nil
}
