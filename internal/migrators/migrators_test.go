package migrators

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	osexec "os/exec"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	atlas "ariga.io/atlas/sql/migrate"
	"ariga.io/atlas/sql/postgres"
	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	tern "github.com/jackc/tern/v2/migrate"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// seed is a table of a program that was there before jobrun, with a row.
const seed = `
CREATE TABLE batch_job_run (
  job_key       varchar(120) PRIMARY KEY,
  status        varchar(20)  NOT NULL,
  started_at    timestamptz  NOT NULL DEFAULT now(),
  finished_at   timestamptz,
  worker_id     varchar(80)  NOT NULL,
  error_message text
);
CREATE INDEX batch_job_run_status_started_idx ON batch_job_run (status, started_at);
INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('daily-settlement:2026-09-14', 'SUCCEEDED', 'node-1')`

// TestMigratorsApplyTheFiles proves that each tool applies the files, on an empty
// database and beside an existing batch_job_run, that Migrate then finds nothing
// to do, and that jobs run.
func TestMigratorsApplyTheFiles(t *testing.T) {
	t.Parallel()
	for name, up := range map[string]func(*testing.T, *pgtest.DB) error{
		"goose": upGoose, "golang-migrate": upGolangMigrate, "tern": upTern, "atlas": upAtlas, "atlas statements": upAtlasStatements, "psql": upPsql,
	} {
		for _, adopt := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/adopt=%t", name, adopt), func(t *testing.T) {
				t.Parallel()
				db := pgtest.Empty(t)
				if adopt {
					exec(t, db, seed)
				}
				if err := up(t, db); err != nil {
					t.Fatal(err)
				}
				if err := up(t, db); err != nil {
					t.Fatalf("again: %v", err)
				}
				use(t, db)
				if n := query[int](t, db, `SELECT count(*)::int FROM batch_job_run WHERE job_key = 'daily-settlement:2026-09-14' AND worker_id = 'node-1'`); adopt != (n == 1) {
					t.Errorf("%d rows of the other program are left", n)
				}
			})
		}
	}
}

// use checks that Migrate only adds the checksums, that Verify is content before
// and after, and that a job runs once.
func use(t *testing.T, db *pgtest.DB) {
	t.Helper()
	ctx := t.Context()
	const objects = `
SELECT string_agg(c.oid || ' ' || c.relname || ' ' || c.relfilenode, ', ' ORDER BY c.oid)
FROM pg_class AS c WHERE c.relname LIKE 'batch\_job\_%'`
	const versions = `SELECT string_agg(version || ' ' || name || ' ' || applied_at, ', ' ORDER BY version) FROM batch_job_migration`
	before, applied := query[string](t, db, objects), query[string](t, db, versions)

	r, err := jobrun.New(db.Pool, time.UTC, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Verify(ctx); err != nil {
		t.Errorf("verify before Migrate: %v", err)
	}
	for range 2 {
		if err := r.Migrate(ctx); err != nil {
			t.Fatalf("Migrate: %v", err)
		}
		if err := r.Verify(ctx); err != nil {
			t.Errorf("verify: %v", err)
		}
	}
	if after := query[string](t, db, objects); after != before {
		t.Errorf("Migrate changed the objects:\n%s\n%s", before, after)
	}
	if after := query[string](t, db, versions); after != applied {
		t.Errorf("Migrate changed the versions:\n%s\n%s", applied, after)
	}
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	if n := query[int](t, db, `SELECT count(checksum)::int FROM batch_job_migration`); n != len(files) {
		t.Errorf("%d checksums of %d files", n, len(files))
	}

	executions := 0
	job := jobrun.Job{Name: "daily-settlement", Func: func(context.Context, *jobrun.Run) error { executions++; return nil }}
	for range 2 {
		if _, err := r.RunDate(ctx, job, jobrun.MustParseDate("2026-09-15")); err != nil {
			t.Fatal(err)
		}
	}
	if executions != 1 {
		t.Errorf("executed %d times", executions)
	}
	if err := r.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	_, err = db.Pool.Exec(ctx, `DELETE FROM batch_job_action`) // the function arrived whole
	if err == nil || !strings.Contains(err.Error(), "append-only") {
		t.Errorf("DELETE FROM batch_job_action: %v", err)
	}
}

// The provider takes the files as they are; the locker is for several instances that start at once.
func upGoose(t *testing.T, db *pgtest.DB) error {
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, open(t, db), migrations.FS, goose.WithSessionLocker(locker))
	if err != nil {
		return err
	}
	_, err = provider.Up(t.Context())
	return err
}

func upGolangMigrate(t *testing.T, db *pgtest.DB) error {
	m, err := newGolangMigrate(t, db)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Up(); err != nil && !errors.Is(err, migrate.ErrNoChange) {
		return err
	}
	return nil
}

// golang-migrate wants names that end in .up.sql.
func newGolangMigrate(t *testing.T, db *pgtest.DB) (*migrate.Migrate, error) {
	renamed := fstest.MapFS{}
	for _, f := range files(t) {
		renamed[strings.TrimSuffix(f.name, ".sql")+".up.sql"] = &fstest.MapFile{Data: f.text}
	}
	source, err := iofs.New(renamed, ".")
	if err != nil {
		return nil, err
	}
	driver, err := migratepgx.WithInstance(open(t, db), &migratepgx.Config{})
	if err != nil {
		return nil, err
	}
	return migrate.NewWithInstance("iofs", source, "pgx5", driver)
}

// It calls a version dirty after an error, although the server has undone the
// file; forcing the version before makes the next Up complete.
func TestGolangMigrateCompletesAfterAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db, `CREATE TABLE batch_job_migration (x int)`) // the last table of the file
	m, err := newGolangMigrate(t, db)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Up(); err == nil || !strings.Contains(err.Error(), "already exists") {
		t.Fatalf("got %v", err)
	}
	if query[bool](t, db, `SELECT to_regclass('batch_job_run') IS NOT NULL`) {
		t.Error("a half of the file is left")
	}
	exec(t, db, `DROP TABLE batch_job_migration`)
	var dirty migrate.ErrDirty
	if err := m.Up(); !errors.As(err, &dirty) || dirty.Version != 1 {
		t.Fatalf("got %v", err)
	}
	if err := m.Force(dirty.Version - 2); err != nil { // -1: no version
		t.Fatal(err)
	}
	if err := m.Up(); err != nil {
		t.Fatal(err)
	}
	use(t, db)
}

func upTern(t *testing.T, db *pgtest.DB) error {
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, db.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	m, err := tern.NewMigrator(ctx, conn, "public.schema_version")
	if err != nil {
		return err
	}
	if err := m.LoadMigrations(migrations.FS); err != nil {
		return err
	}
	return m.Migrate(ctx)
}

// The executor and the driver are what the atlas command uses; it adds a
// transaction around each file, and the table of its revisions.
func upAtlas(t *testing.T, db *pgtest.DB) error {
	ctx := t.Context()
	pool := open(t, db)
	var applied bool
	if err := pool.QueryRowContext(ctx, `SELECT to_regclass('batch_job_migration') IS NOT NULL`).Scan(&applied); err != nil || applied {
		return err // without its table of revisions it would start again
	}
	dir := &atlas.MemDir{}
	for _, f := range files(t) {
		if err := dir.WriteFile(f.name, f.text); err != nil {
			return err
		}
	}
	sum, err := dir.Checksum()
	if err != nil {
		return err
	}
	if err := atlas.WriteSumFile(dir, sum); err != nil { // atlas migrate hash
		return err
	}
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	driver, err := postgres.Open(tx)
	if err != nil {
		return err
	}
	executor, err := atlas.NewExecutor(driver, dir, atlas.NopRevisionReadWriter{}, atlas.WithAllowDirty(true))
	if err != nil {
		return err
	}
	if err := executor.ExecuteN(ctx, 0); err != nil { // 0: all
		return err
	}
	return tx.Commit()
}

// Atlas's generic splitter, without its PostgreSQL driver.
func upAtlasStatements(t *testing.T, db *pgtest.DB) error {
	ctx := t.Context()
	pool := open(t, db)
	var applied bool
	if err := pool.QueryRowContext(ctx, `SELECT to_regclass('batch_job_migration') IS NOT NULL`).Scan(&applied); err != nil || applied {
		return err
	}
	for _, f := range files(t) {
		statements, err := atlas.NewLocalFile(f.name, f.text).Stmts()
		if err != nil {
			return err
		}
		for _, statement := range statements {
			if _, err := pool.ExecContext(ctx, statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
	}
	return nil
}

// psql in one transaction, for people without a migrator.
func upPsql(t *testing.T, db *pgtest.DB) error {
	psql, err := osexec.LookPath("psql")
	if err != nil {
		t.Skip(err)
	}
	var applied bool
	if err := open(t, db).QueryRowContext(t.Context(), `SELECT to_regclass('batch_job_migration') IS NOT NULL`).Scan(&applied); err != nil || applied {
		return err
	}
	for _, f := range files(t) {
		cmd := osexec.CommandContext(t.Context(), psql, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--single-transaction", "--file=-", db.URL)
		cmd.Stdin = bytes.NewReader(f.text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

type file struct {
	name string
	text []byte
}

// files are the SQL files in their order.
func files(t *testing.T) (all []file) {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql") // sorted
	if err != nil || len(names) == 0 {
		t.Fatalf("%d files, %v", len(names), err)
	}
	for _, name := range names {
		text, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, file{name, text})
	}
	return all
}

func open(t *testing.T, db *pgtest.DB) *sql.DB {
	t.Helper()
	pool, err := sql.Open("pgx", db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	return pool
}

func query[T any](t *testing.T, db *pgtest.DB, sql string) T {
	t.Helper()
	rows, _ := db.Pool.Query(t.Context(), sql)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func exec(t *testing.T, db *pgtest.DB, sql string) {
	t.Helper()
	if _, err := db.Pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
