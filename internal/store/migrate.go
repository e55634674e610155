package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// schemaSQL finds the schema of the tables by the search_path, else where they
// would be created. A temporary table of the same name does not count.
const schemaSQL = `
SELECT coalesce(
  (SELECT p.name::text
   FROM unnest(current_schemas(false)) WITH ORDINALITY AS p (name, place)
   JOIN pg_catalog.pg_namespace AS n ON n.nspname = p.name
   JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'batch_job_run' AND c.relkind IN ('r', 'p')
   WHERE c.relpersistence <> 't'
   ORDER BY p.place
   LIMIT 1),
  current_schema()::text, '')`

// resolve asks the session's search_path; "" when it names no schema that exists.
func resolve(ctx context.Context, db DB) (string, error) {
	rows, err := db.Query(ctx, schemaSQL)
	schema, _, err := one(rows, err, pgx.RowTo[string])
	return schema, err
}

// Migration is one numbered SQL file.
type Migration struct {
	Version             int
	Name, SQL, Checksum string
}

var migrationName = regexp.MustCompile(`^([0-9]{4})_[a-z0-9_]+\.sql$`)

// Migrations reads the SQL files in the root of fsys, in order; a gap in their
// numbers is an error.
func Migrations(fsys fs.FS) ([]Migration, error) {
	names, err := fs.Glob(fsys, "*.sql")
	if err != nil {
		return nil, err
	}
	var all []Migration
	for i, name := range names { // Glob sorts
		m := migrationName.FindStringSubmatch(name)
		if m == nil {
			return nil, fmt.Errorf("migration %s: the name must be 4 digits, an underscore, lower-case words and .sql", name)
		}
		version, _ := strconv.Atoi(m[1])
		if version != i+1 {
			return nil, fmt.Errorf("migration %s: number %d is missing", name, i+1)
		}
		text, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(text)
		all = append(all, Migration{version, name, string(text), hex.EncodeToString(sum[:])})
	}
	return all, nil
}

// MigrateNext applies the first of all that is not applied yet and returns its
// name, or "" when none is left: one transaction, under a transaction-level
// advisory lock that is derived from the schema's name. It waits at most lock
// for each lock; what it then applied is undone and it may be repeated.
func (s *Store) MigrateNext(ctx context.Context, conn *pgx.Conn, all []Migration, lock time.Duration) (name string, err error) {
	// READ COMMITTED whatever the default is: what is read after the wait for the
	// advisory lock must be newer than the wait.
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// The search_path names pg_temp last: else a temporary table would be found first.
		_, err := tx.Exec(ctx, `
SELECT set_config('lock_timeout', $1::text, true), set_config('search_path', $2::text, true),
  pg_advisory_xact_lock(hashtextextended('jobrun migrate ' || $3::text, 0))`,
			millis(lock), pgx.Identifier{s.Schema}.Sanitize()+", pg_temp", s.Schema)
		if err != nil {
			return err
		}
		applied, err := s.applied(ctx, tx, all)
		if err != nil || applied == len(all) {
			return err
		}
		if applied == 0 {
			if err := s.adoptable(ctx, tx); err != nil {
				return err
			}
		}
		m := all[applied]
		if _, err := tx.Exec(ctx, m.SQL, pgx.QueryExecModeSimpleProtocol); err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		// The file may leave its own search_path; the checksum's table is named in full.
		tag, err := tx.Exec(ctx, strings.ReplaceAll(
			`UPDATE batch_job_migration SET checksum = $2::text WHERE version = $1::integer`,
			"batch_job_", pgx.Identifier{s.Schema}.Sanitize()+".batch_job_"), m.Version, m.Checksum)
		if err == nil && tag.RowsAffected() != 1 {
			err = errors.New("the file does not record itself in batch_job_migration")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		name = m.Name
		return nil
	})
	if err != nil {
		return "", err
	}
	return name, nil
}

// applied returns how many of all are applied, and writes the checksum of those
// that another migrator applied. A gap, an edited file, or a newer file that is
// marked incompatible is an error; other newer files are fine, so that an old
// binary that restarts during a rollout works.
func (s *Store) applied(ctx context.Context, db DB, all []Migration) (int, error) {
	table := pgx.Identifier{s.Schema, "batch_job_migration"}.Sanitize()
	rows, err := db.Query(ctx, `SELECT to_regclass($1::text) IS NOT NULL`, table)
	exists, _, err := one(rows, err, pgx.RowTo[bool])
	if err != nil || !exists {
		return 0, err
	}
	type applied struct {
		Version      int
		Name         string
		Incompatible bool
		Checksum     string
	}
	rows, err = db.Query(ctx, `SELECT version, name, incompatible, coalesce(checksum, '') FROM `+table+` ORDER BY version`)
	if err != nil {
		return 0, err
	}
	have, err := pgx.CollectRows(rows, pgx.RowToStructByPos[applied])
	if err != nil {
		return 0, err
	}
	for i, a := range have {
		switch {
		case a.Version != i+1:
			return 0, fmt.Errorf("schema %s: migration %d is applied but %d is not: the tables were changed by hand", s.Schema, a.Version, i+1)
		case i >= len(all) && a.Incompatible:
			return 0, fmt.Errorf("schema %s: migration %s is incompatible with this binary, which knows %d migrations: update the binary", s.Schema, a.Name, len(all))
		case i >= len(all):
			continue
		case a.Checksum == "":
			if _, err := db.Exec(ctx, `UPDATE `+table+` SET checksum = $2::text WHERE version = $1::integer AND checksum IS NULL`,
				a.Version, all[i].Checksum); err != nil {
				return 0, err
			}
		case a.Checksum != all[i].Checksum:
			return 0, fmt.Errorf("schema %s: migration %s was applied with other contents than this binary has: a released file is never edited", s.Schema, a.Name)
		}
	}
	return min(len(have), len(all)), nil
}

// column is a column as the catalog describes it.
type column struct{ Table, Name, Type string }

// columns reads the columns of all jobrun tables that exist in the schema.
func (s *Store) columns(ctx context.Context, db DB) ([]column, error) {
	rows, err := db.Query(ctx, `
SELECT c.relname::text, a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = $1::text
  AND c.relname LIKE 'batch\_job\_%'
  AND c.relkind IN ('r', 'p')
ORDER BY c.relname, a.attnum`, s.Schema)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[column])
}

// keyed reports whether a table has a unique index on exactly these columns that
// INSERT ... ON CONFLICT can use.
func (s *Store) keyed(ctx context.Context, db DB, table string, columns ...string) (bool, error) {
	rows, err := db.Query(ctx, `
SELECT count(*) > 0
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text
  AND c.relname = $2::text
  AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
  AND $3::text[] = (
    SELECT array_agg(a.attname::text ORDER BY a.attname)
    FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
    LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.attnum
    WHERE k.place <= i.indnkeyatts)`, s.Schema, table, columns)
	has, _, err := one(rows, err, pgx.RowTo[bool])
	return has, err
}

// seed are the columns that other programs may rely on, and the types they need.
var seed = []column{
	{"batch_job_run", "job_key", "character varying(120)"},
	{"batch_job_run", "status", "character varying(20)"},
	{"batch_job_run", "started_at", "timestamp with time zone"},
	{"batch_job_run", "finished_at", "timestamp with time zone"},
	{"batch_job_run", "worker_id", "character varying(80)"},
	{"batch_job_run", "error_message", "text"},
}

// seedProblems says what in the columns of batch_job_run does not fit. Wider
// texts are fine.
func seedProblems(have []column) []string {
	types := map[string]string{}
	for _, c := range have {
		if c.Table == "batch_job_run" {
			types[c.Name] = c.Type
		}
	}
	var problems []string
	for _, want := range seed {
		got, ok := types[want.Name]
		var width, needed int
		_, _ = fmt.Sscanf(got, "character varying(%d)", &width)
		_, _ = fmt.Sscanf(want.Type, "character varying(%d)", &needed)
		wide := needed > 0 && (got == "text" || got == "character varying" || width >= needed)
		switch {
		case !ok:
			problems = append(problems, fmt.Sprintf("column batch_job_run.%s is missing", want.Name))
		case got != want.Type && !wide:
			problems = append(problems, fmt.Sprintf("column batch_job_run.%s is %s, want %s", want.Name, got, want.Type))
		}
	}
	return problems
}

// adoptable checks a batch_job_run that exists before the first migration.
func (s *Store) adoptable(ctx context.Context, db DB) error {
	have, err := s.columns(ctx, db)
	if err != nil {
		return err
	}
	exists := false
	for _, c := range have {
		exists = exists || c.Table == "batch_job_run"
	}
	if !exists {
		return nil
	}
	problems := seedProblems(have)
	keyed, err := s.keyed(ctx, db, "batch_job_run", "job_key")
	if err != nil {
		return err
	}
	if !keyed {
		problems = append(problems, "batch_job_run has no primary key or unique index on (job_key)")
	}
	rows, err := db.Query(ctx, `
SELECT pg_catalog.pg_get_userbyid(c.relowner)::text, current_user::text
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relname = 'batch_job_run' AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')`, s.Schema)
	owner, foreign, err := one(rows, err, func(row pgx.CollectableRow) (o [2]string, err error) {
		return o, row.Scan(&o[0], &o[1])
	})
	if err != nil {
		return err
	}
	if foreign {
		problems = append(problems, fmt.Sprintf("batch_job_run belongs to %s and only its owner can add columns: migrate as %s, not %s", owner[0], owner[0], owner[1]))
	}
	if problems != nil {
		return fmt.Errorf("adopt %s.batch_job_run: %s", s.Schema, strings.Join(problems, "; "))
	}
	return nil
}
