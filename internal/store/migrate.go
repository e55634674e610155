package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// schemaSQL finds the schema of the tables by the search_path, else where they
// would be created. Temporary tables of the same name do not count.
const schemaSQL = `
SELECT coalesce(
  (SELECT p.name::text
   FROM unnest(current_schemas(false)) WITH ORDINALITY AS p (name, place)
   JOIN pg_catalog.pg_namespace AS n ON n.nspname = p.name
   JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'batch_job_run' AND c.relkind IN ('r', 'p')
   WHERE c.relpersistence <> 't'
   ORDER BY p.place
   LIMIT 1),
  (SELECT p.name::text
   FROM unnest(current_schemas(false)) WITH ORDINALITY AS p (name, place)
   WHERE p.name NOT LIKE 'pg\_temp\_%'
   ORDER BY p.place
   LIMIT 1), '')`

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
// for each lock, and the server ends it when this process falls silent for ten
// times as long; what it then applied is undone and it may be repeated.
func (s *Store) MigrateNext(ctx context.Context, conn *pgx.Conn, all []Migration, lock time.Duration) (name string, err error) {
	// READ COMMITTED whatever the default is: what is read after the wait for the
	// advisory lock must be newer than the wait.
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// The search_path names pg_temp last: else a temporary table would be found first.
		_, err := tx.Exec(ctx, `
SELECT set_config('lock_timeout', $1::text, true), set_config('search_path', $2::text, true),
  set_config('idle_in_transaction_session_timeout', $4::text, true),
  pg_advisory_xact_lock(hashtextextended('jobrun migrate ' || $3::text, 0))`,
			millis(lock), pgx.Identifier{s.Schema}.Sanitize()+", pg_temp", s.Schema, millis(10*lock))
		if err != nil {
			if Code(err) == "55P03" {
				err = fmt.Errorf("another migration of schema %s is under way: %w", s.Schema, err)
			}
			return err
		}
		applied, err := s.signed(ctx, tx, all)
		if err != nil || applied == len(all) {
			return err
		}
		if applied == 0 {
			exists, err := s.adoptable(ctx, tx, all[:1])
			if err != nil {
				return err
			}
			if exists {
				// One wait, for the strongest lock: to get it by an upgrade would deadlock
				// with a neighbour that reads before it writes.
				if _, err := tx.Exec(ctx, `LOCK TABLE `+pgx.Identifier{s.Schema, "batch_job_run"}.Sanitize()+` IN ACCESS EXCLUSIVE MODE`); err != nil {
					return held(err, "batch_job_run")
				}
				if applied, err = s.signed(ctx, tx, all); err != nil || applied == len(all) {
					return err // another migrator had the lock
				}
			}
		}
		m := all[applied]
		if _, err := tx.Exec(ctx, m.SQL, pgx.QueryExecModeSimpleProtocol); err != nil {
			return fmt.Errorf("%s: %w", m.Name, held(err, "the tables"))
		}
		// The file may leave its own search_path; the checksum's table is named in full.
		tag, err := tx.Exec(ctx, s.sign(), m.Version, m.Checksum)
		if err == nil && tag.RowsAffected() != 1 {
			err = Refusal("the file does not record itself in batch_job_migration")
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

// held says in words what a lock timeout was about.
func held(err error, what string) error {
	if Code(err) == "55P03" {
		return fmt.Errorf("another transaction holds %s: %w", what, err)
	}
	return err
}

// sign is the statement that records the checksum of a file, qualified. A
// checksum that is there is never changed.
func (s *Store) sign() string {
	return `UPDATE ` + pgx.Identifier{s.Schema, "batch_job_migration"}.Sanitize() +
		` SET checksum = $2::text WHERE version = $1::integer AND checksum IS NULL`
}

// signed returns how many of all are applied, and records the checksum of those
// that another migrator applied. The first file needs the schema to be there.
func (s *Store) signed(ctx context.Context, db DB, all []Migration) (int, error) {
	rows, err := db.Query(ctx, `SELECT coalesce(current_schema()::text, '')`)
	schema, _, err := one(rows, err, pgx.RowTo[string])
	if err != nil {
		return 0, err
	}
	if schema != s.Schema { // the path goes on with pg_temp, where nothing must be created
		return 0, Refusal(fmt.Sprintf("schema %s does not exist, or this role has no USAGE on it", s.Schema))
	}
	applied, unsigned, err := s.applied(ctx, db, all)
	if err != nil || len(unsigned) == 0 {
		return applied, err
	}
	// A service's role need not own the tables: then the owner's next Migrate signs.
	rows, err = db.Query(ctx, `SELECT pg_catalog.has_table_privilege($1::text, 'UPDATE')`,
		pgx.Identifier{s.Schema, "batch_job_migration"}.Sanitize())
	may, _, err := one(rows, err, pgx.RowTo[bool])
	for _, m := range unsigned {
		if err == nil && may {
			_, err = db.Exec(ctx, s.sign(), m.Version, m.Checksum)
		}
	}
	return applied, err
}

// applied returns how many of all are applied, and which of those have no
// checksum yet because another migrator applied them. A gap, an edited file, or
// a newer file that is marked incompatible is a [Refusal]; other newer files are
// fine, so that an old binary that restarts during a rollout works.
func (s *Store) applied(ctx context.Context, db DB, all []Migration) (n int, unsigned []Migration, err error) {
	table := pgx.Identifier{s.Schema, "batch_job_migration"}.Sanitize()
	rows, err := db.Query(ctx, `SELECT to_regclass($1::text) IS NOT NULL`, table)
	exists, _, err := one(rows, err, pgx.RowTo[bool])
	if err != nil || !exists {
		return 0, nil, err
	}
	type applied struct {
		Version      int
		Name         string
		Incompatible bool
		Checksum     string
	}
	rows, err = db.Query(ctx, `SELECT version, name, incompatible, coalesce(checksum, '') FROM `+table+` ORDER BY version`)
	if err != nil {
		return 0, nil, err
	}
	have, err := pgx.CollectRows(rows, pgx.RowToStructByPos[applied])
	if err != nil {
		return 0, nil, err
	}
	for i, a := range have {
		var problem string
		switch {
		case a.Version != i+1:
			problem = fmt.Sprintf("migration %d is applied but %d is not: the tables were changed by hand", a.Version, i+1)
		case i >= len(all) && a.Incompatible:
			problem = fmt.Sprintf("migration %s is incompatible with this binary, which knows %d migrations: update the binary", a.Name, len(all))
		case i >= len(all):
		case a.Checksum == "":
			unsigned = append(unsigned, all[i])
		case a.Checksum != all[i].Checksum:
			problem = fmt.Sprintf("migration %s was applied with other contents than this binary has: a released file is never edited", a.Name)
		}
		if problem != "" {
			return 0, nil, Refusal(fmt.Sprintf("schema %s: %s", s.Schema, problem))
		}
	}
	return min(len(have), len(all)), unsigned, nil
}

// column is a column as the catalog describes it.
type column struct {
	Table, Name, Type string
	NotNull           bool
	Collation         string // one that cannot be used; "": the database's, "C", or one that does no harm
}

// columns reads the columns of all jobrun tables that exist in the schema.
func (s *Store) columns(ctx context.Context, db DB) ([]column, error) {
	rows, err := db.Query(ctx, `
SELECT c.relname::text, a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull,
  CASE WHEN coalesce(l.collname, 'C') NOT IN ('default', 'C') AND (a.attname = 'job_key' OR NOT l.collisdeterministic) THEN l.collname::text ELSE '' END
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_collation AS l ON l.oid = a.attcollation
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

// seed are the columns that other programs may rely on, and what they need to be.
var seed = []column{
	{"batch_job_run", "job_key", "character varying(120)", true, ""},
	{"batch_job_run", "status", "character varying(20)", true, ""},
	{"batch_job_run", "started_at", "timestamp with time zone", true, ""},
	{"batch_job_run", "finished_at", "timestamp with time zone", false, ""},
	{"batch_job_run", "worker_id", "character varying(80)", true, ""},
	{"batch_job_run", "error_message", "text", false, ""},
}

// misfits says what is wrong with the wanted columns among those that exist,
// missing ones apart. Wider texts are fine.
func misfits(want, have []column) (problems []string, missing []column) {
	found := map[[2]string]column{}
	for _, c := range have {
		found[[2]string{c.Table, c.Name}] = c
	}
	for _, c := range want {
		got, ok := found[[2]string{c.Table, c.Name}]
		if !ok {
			missing = append(missing, c)
			continue
		}
		if !holds(got.Type, c.Type) {
			problems = append(problems, fmt.Sprintf("column %s.%s is %s, want %s", c.Table, c.Name, got.Type, c.Type))
		}
		// Keys of two collations cannot be compared, and some collations take different texts for the same key.
		if got.Collation != "" {
			problems = append(problems, fmt.Sprintf(`column %[1]s.%[2]s has the collation %[3]q, want that of the database or "C": ALTER TABLE %[1]s ALTER COLUMN %[2]s TYPE %[4]s COLLATE "C"`, c.Table, c.Name, got.Collation, got.Type))
		}
		if got.NotNull != c.NotNull {
			problems = append(problems, fmt.Sprintf("column %s.%s must be %s", c.Table, c.Name, map[bool]string{true: "NOT NULL", false: "nullable"}[c.NotNull]))
		}
	}
	return problems, missing
}

// holds reports whether a column of the type got takes what one of the type want takes.
func holds(got, want string) bool {
	var width, needed int
	_, _ = fmt.Sscanf(got, "character varying(%d)", &width)
	_, _ = fmt.Sscanf(want, "character varying(%d)", &needed)
	unlimited := got == "text" || got == "character varying"
	return got == want || unlimited && (needed > 0 || want == "text") || needed > 0 && width >= needed
}

// unlogged says which tables a crash of the server would empty.
func (s *Store) unlogged(ctx context.Context, db DB) ([]string, error) {
	rows, err := db.Query(ctx, `
SELECT c.relname::text || ' is UNLOGGED: a crash of the server empties it, and what was done is done again'
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text
  AND c.relname LIKE 'batch\_job\_%'
  AND c.relkind IN ('r', 'p')
  AND c.relpersistence <> 'p'
ORDER BY c.relname`, s.Schema)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// adoptable checks a batch_job_run that exists before the first migration: the
// columns that it must have, and those that the migration adds if it has them
// already. It reports whether there is one.
func (s *Store) adoptable(ctx context.Context, db DB, first []Migration) (exists bool, err error) {
	have, err := s.columns(ctx, db)
	if err != nil {
		return false, err
	}
	for _, c := range have {
		exists = exists || c.Table == "batch_job_run"
	}
	if !exists {
		return false, nil
	}
	problems, missing := misfits(seed, have)
	for _, c := range missing {
		problems = append(problems, fmt.Sprintf("column %s.%s is missing", c.Table, c.Name))
	}
	for _, c := range expected(first) {
		if c.Table == "batch_job_run" && !slices.ContainsFunc(seed, func(s column) bool { return s.Name == c.Name }) {
			taken, _ := misfits([]column{c}, have)
			problems = append(problems, taken...)
		}
	}
	keyed, err := s.keyed(ctx, db, "batch_job_run", "job_key")
	if err != nil {
		return false, err
	}
	if !keyed {
		problems = append(problems, "batch_job_run has no primary key or unique index on (job_key)")
	}
	unlogged, err := s.unlogged(ctx, db)
	if err != nil {
		return false, err
	}
	problems = append(problems, unlogged...)
	rows, err := db.Query(ctx, `
SELECT pg_catalog.pg_get_userbyid(c.relowner)::text, current_user::text
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relname = 'batch_job_run' AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')`, s.Schema)
	owner, foreign, err := one(rows, err, func(row pgx.CollectableRow) (o [2]string, err error) {
		return o, row.Scan(&o[0], &o[1])
	})
	if err != nil {
		return false, err
	}
	if foreign {
		problems = append(problems, fmt.Sprintf("batch_job_run belongs to %s and only its owner can add columns: migrate as %s, not %s", owner[0], owner[0], owner[1]))
	}
	if problems != nil {
		return false, Refusal(fmt.Sprintf("adopt %s.batch_job_run: %s", s.Schema, strings.Join(problems, "; ")))
	}
	return true, nil
}
