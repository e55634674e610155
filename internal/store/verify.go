package store

import (
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
)

// created finds the columns that a migration file creates.
var created = regexp.MustCompile(`(?m)^CREATE TABLE (?:IF NOT EXISTS )?(batch_job_\w+) \(\n((?:  .*\n)+)\)|^ALTER TABLE (batch_job_\w+)\n((?:  ADD COLUMN .*\n)+)`)

var columnName = regexp.MustCompile(`(?m)^  (?:ADD COLUMN (?:IF NOT EXISTS )?)?([a-z_]+) `)

// expected lists the columns that the migrations create.
func expected(all []Migration) (columns []column) {
	for _, m := range all {
		for _, table := range created.FindAllStringSubmatch(m.SQL, -1) {
			for _, c := range columnName.FindAllStringSubmatch(table[2]+table[4], -1) {
				columns = append(columns, column{Table: table[1] + table[3], Name: c[1]})
			}
		}
	}
	return columns
}

// Server is what Verify learns about the other side.
type Server struct {
	TimeZone string    // of the session
	Clock    time.Time // clock_timestamp()
}

// Verify judges the tables as they are: every column, the keys that claims rest
// on, the privileges of the current user, a server that takes writes. It returns
// what is wrong, in words.
func (s *Store) Verify(ctx context.Context, db DB, all []Migration) (problems []string, err error) {
	if _, err := s.applied(ctx, db, all); err != nil {
		return nil, err
	}
	have, err := s.columns(ctx, db)
	if err != nil {
		return nil, err
	}
	if len(have) == 0 {
		return []string{"no tables: run Migrate first"}, nil
	}
	problems = seedProblems(have)
	present := map[column]bool{}
	for _, c := range have {
		present[column{Table: c.Table, Name: c.Name}] = true
	}
	for _, c := range seed {
		present[column{Table: c.Table, Name: c.Name}] = true // reported above
	}
	for _, c := range expected(all) {
		if !present[c] {
			problems = append(problems, fmt.Sprintf("column %s.%s is missing: run Migrate", c.Table, c.Name))
		}
	}
	for table, key := range map[string][]string{"batch_job_run": {"job_key"}, "batch_job_attempt": {"attempt", "job_key"}} {
		keyed, err := s.keyed(ctx, db, table, key...)
		if err != nil {
			return nil, err
		}
		if !keyed {
			problems = append(problems, fmt.Sprintf("%s has no primary key or unique index on (%s): the same key could be claimed twice", table, key))
		}
	}
	rows, err := db.Query(ctx, `
SELECT c.relname::text || ': ' || p.privilege
FROM (VALUES ('batch_job_run', 'SELECT'), ('batch_job_run', 'INSERT'), ('batch_job_run', 'UPDATE'),
  ('batch_job_attempt', 'SELECT'), ('batch_job_attempt', 'INSERT'), ('batch_job_attempt', 'UPDATE'),
  ('batch_job_action', 'SELECT'), ('batch_job_migration', 'SELECT')) AS p (name, privilege)
JOIN pg_catalog.pg_class AS c ON c.relname = p.name
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND NOT pg_catalog.has_table_privilege(c.oid, p.privilege)`, s.Schema)
	if err != nil {
		return nil, err
	}
	missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	for _, m := range missing {
		problems = append(problems, "missing privilege on "+m)
	}
	return problems, nil
}

// Server asks whether the server takes writes, and for its clock.
func (s *Store) Server(ctx context.Context, db DB) (server Server, problems []string, err error) {
	rows, err := db.Query(ctx, `
SELECT current_setting('TimeZone'), clock_timestamp(), pg_catalog.pg_is_in_recovery(),
  current_setting('transaction_read_only') = 'on'`)
	_, _, err = one(rows, err, func(row pgx.CollectableRow) (_ bool, err error) {
		var standby, readOnly bool
		err = row.Scan(&server.TimeZone, &server.Clock, &standby, &readOnly)
		if standby {
			problems = append(problems, "the server is a standby: connect to the primary (target_session_attrs=read-write)")
		} else if readOnly {
			problems = append(problems, "the session is read-only (default_transaction_read_only)")
		}
		return false, err
	})
	return server, problems, err
}
