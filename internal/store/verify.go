package store

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// created finds the columns that a migration file creates.
var created = regexp.MustCompile(`(?m)^CREATE TABLE (?:IF NOT EXISTS )?(batch_job_\w+) \(\n((?:  .*\n)+)\)|^ALTER TABLE (batch_job_\w+)\n((?:  ADD COLUMN .*\n)+)`)

// columnDefinition finds name, type and constraints of a column.
var columnDefinition = regexp.MustCompile(`(?m)^  (?:ADD COLUMN (?:IF NOT EXISTS )?)?([a-z_]+) +([a-z]+(?:\(\d+\))?)(.*)$`)

// catalogName turns the types of the files into the catalog's names.
var catalogName = strings.NewReplacer("varchar", "character varying", "timestamptz", "timestamp with time zone")

// expected lists the columns that the migrations create.
func expected(all []Migration) (columns []column) {
	for _, m := range all {
		for _, table := range created.FindAllStringSubmatch(m.SQL, -1) {
			for _, c := range columnDefinition.FindAllStringSubmatch(table[2]+table[4], -1) {
				columns = append(columns, column{
					Table: table[1] + table[3], Name: c[1], Type: catalogName.Replace(c[2]),
					NotNull: strings.Contains(c[3], "NOT NULL") || strings.Contains(c[3], "PRIMARY KEY"),
				})
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
// on, the privileges of the current user. It returns what is wrong, in words, and
// changes nothing.
func (s *Store) Verify(ctx context.Context, db DB, all []Migration) (problems []string, err error) {
	have, err := s.columns(ctx, db)
	if err != nil {
		return nil, err
	}
	if len(have) == 0 {
		return []string{"no tables: run Migrate first"}, nil
	}
	present := map[string]bool{}
	for _, c := range have {
		present[c.Table] = true
	}
	problems, missing := misfits(expected(all), have)
	reported := map[string]bool{}
	for _, c := range missing {
		switch {
		case present[c.Table]:
			problems = append(problems, fmt.Sprintf("column %s.%s is missing: run Migrate", c.Table, c.Name))
		case !reported[c.Table]:
			problems = append(problems, fmt.Sprintf("table %s is missing: run Migrate", c.Table))
			reported[c.Table] = true
		}
	}
	for _, key := range [][]string{
		{"batch_job_run", "job_key"},
		{"batch_job_attempt", "attempt", "job_key"},
		{"batch_job_item", "item", "job_key"},
		{"batch_job_item_failure", "item", "job_key"},
		{"batch_job_checkpoint", "job_key"},
	} {
		keyed, err := s.keyed(ctx, db, key[0], key[1:]...)
		if err != nil {
			return nil, err
		}
		if present[key[0]] && !keyed {
			problems = append(problems, fmt.Sprintf("%s has no primary key or unique index on (%s): the same key or item could be claimed twice", key[0], strings.Join(key[1:], ", ")))
		}
	}
	unlogged, err := s.unlogged(ctx, db)
	if err != nil {
		return nil, err
	}
	problems = append(problems, unlogged...)
	rows, err := db.Query(ctx, `
SELECT c.relname::text, p.privilege
FROM (VALUES ('batch_job_run', 'SELECT'), ('batch_job_run', 'INSERT'), ('batch_job_run', 'UPDATE'),
  ('batch_job_attempt', 'SELECT'), ('batch_job_attempt', 'INSERT'), ('batch_job_attempt', 'UPDATE'),
  ('batch_job_item', 'SELECT'), ('batch_job_item', 'INSERT'),
  ('batch_job_item_failure', 'SELECT'), ('batch_job_item_failure', 'INSERT'), ('batch_job_item_failure', 'UPDATE'),
  ('batch_job_checkpoint', 'SELECT'), ('batch_job_checkpoint', 'INSERT'), ('batch_job_checkpoint', 'UPDATE'),
  ('batch_job_action', 'SELECT'), ('batch_job_migration', 'SELECT')) AS p (name, privilege)
JOIN pg_catalog.pg_class AS c ON c.relname = p.name
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND NOT pg_catalog.has_table_privilege(c.oid, p.privilege)
ORDER BY c.relname, p.privilege`, s.Schema)
	if err != nil {
		return nil, err
	}
	denied, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Table, Privilege string }])
	if err != nil {
		return nil, err
	}
	readable := true
	for _, d := range denied {
		problems = append(problems, fmt.Sprintf("missing privilege on %s: %s", d.Table, d.Privilege))
		readable = readable && d.Table != "batch_job_migration"
	}
	if readable {
		_, _, err = s.applied(ctx, db, all)
	}
	return problems, err
}

// Server asks whether the server takes writes, and for its clock.
func (s *Store) Server(ctx context.Context, db DB) (server Server, problems []string, err error) {
	rows, err := db.Query(ctx, `
SELECT current_setting('TimeZone'), clock_timestamp(), pg_catalog.pg_is_in_recovery(),
  current_setting('transaction_read_only') = 'on', current_setting('DateStyle'),
  current_setting('client_encoding')`)
	_, _, err = one(rows, err, func(row pgx.CollectableRow) (_ bool, err error) {
		var standby, readOnly bool
		var style, encoding string
		// These first: in another style the clock may not be readable.
		err = row.Scan(nil, nil, nil, nil, &style, &encoding)
		if err == nil && encoding != "UTF8" && encoding != "SQL_ASCII" {
			problems = append(problems, "the session's client_encoding is "+encoding+": pgx sends UTF-8, set client_encoding=UTF8")
		}
		if err == nil && !strings.HasPrefix(style, "ISO") {
			problems = append(problems, "the session's DateStyle is "+style+": pgx reads times as text in ISO only")
			return false, nil
		}
		err = row.Scan(&server.TimeZone, &server.Clock, &standby, &readOnly, nil, nil)
		if standby {
			problems = append(problems, "the server is a standby: connect to the primary (target_session_attrs=read-write)")
		} else if readOnly {
			problems = append(problems, "the session is read-only (default_transaction_read_only)")
		}
		return false, err
	})
	return server, problems, err
}
