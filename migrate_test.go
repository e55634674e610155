package jobrun_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	osexec "os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// seedTable is the table as programs that know nothing of jobrun made it, with
// rows of all sorts.
const seedTable = `
CREATE TABLE batch_job_run (
  job_key       varchar(120) PRIMARY KEY,
  status        varchar(20)  NOT NULL,
  started_at    timestamptz  NOT NULL DEFAULT now(),
  finished_at   timestamptz,
  worker_id     varchar(80)  NOT NULL,
  error_message text
);
CREATE INDEX batch_job_run_status_started_idx ON batch_job_run (status, started_at);
INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id, error_message) VALUES
  ('running:2026-09-15',   'RUNNING',   now() - interval '1 hour', NULL, 'node-1', NULL),
  ('succeeded:2026-09-15', 'SUCCEEDED', '2026-09-15 01:00+09', '2026-09-15 01:05+09', 'node-2', NULL),
  ('failed:2026-09-15',    'FAILED',    '2026-09-15 01:00+09', '2026-09-15 01:05+09', 'node-1', 'connection refused'),
  ('skipped:2026-09-15',   'SKIPPED',   '2026-09-15 01:00+09', '2026-09-15 01:00+09', 'node-1', 'holiday'),
  ('archived:2026-09-15',  'archived?', '2026-09-15 01:00+09', NULL, '', ''),
  ('no date at all',       'SUCCEEDED', '2026-09-15 01:00+09', NULL, 'node-1', NULL),
  ('',                     '',          '-infinity', 'infinity', 'node-1', NULL),
  ('정산:2026-13-45',       'FAILED',    '2026-09-15 01:00+09', NULL, '노드', '실패'),
  (repeat('x', 120),       'RUNNING',   '2026-09-15 01:00+09', NULL, repeat('w', 80), repeat('e', 20000))`

// seedRows are the six columns of all rows as text.
const seedRows = `
SELECT string_agg(concat_ws('|', job_key, status, started_at, coalesce(finished_at::text, '-'), worker_id, coalesce(error_message, '-')), E'\n' ORDER BY job_key)
FROM batch_job_run`

// inSchema returns a pool whose sessions live in a new schema of that name.
func inSchema(t *testing.T, db *pgtest.DB, name string, set func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	quoted := pgx.Identifier{name}.Sanitize()
	exec(t, db.Pool, `CREATE SCHEMA `+quoted)
	return db.PoolWith(t, func(c *pgxpool.Config) {
		if set != nil {
			set(c)
		}
		c.ConnConfig.RuntimeParams["search_path"] = quoted
	})
}

// objects lists what is in the current schema: relations with their owners and files,
// columns with their types, constraints, indexes, functions, triggers, comments.
func objects(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return query[string](t, pool, `
SELECT coalesce(string_agg(o, E'\n' ORDER BY o), '')
FROM pg_namespace AS n, LATERAL (
  SELECT format('%s %s %s %s %s %s', n.nspname, c.oid, c.relname, c.relkind, c.relowner::regrole, c.relfilenode) AS o FROM pg_class AS c WHERE c.relnamespace = n.oid
  UNION ALL
  SELECT format('%s.%s %s %s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, col_description(c.oid, a.attnum))
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 WHERE c.relnamespace = n.oid
  UNION ALL
  SELECT format('%s %s', k.oid, pg_get_constraintdef(k.oid)) FROM pg_constraint AS k WHERE k.connamespace = n.oid
  UNION ALL
  SELECT format('%s %s', g.oid, pg_get_triggerdef(g.oid)) FROM pg_class AS c JOIN pg_trigger AS g ON g.tgrelid = c.oid WHERE c.relnamespace = n.oid
  UNION ALL
  SELECT format('%s %s', f.oid, f.proname) FROM pg_proc AS f WHERE f.pronamespace = n.oid
) AS all_of_it
WHERE n.nspname = current_schema()`)
}

// names are the relations and functions of a schema.
func names(t *testing.T, pool *pgxpool.Pool, schema string) string {
	t.Helper()
	return query[string](t, pool, `
SELECT coalesce(string_agg(o, ' ' ORDER BY o), '')
FROM pg_namespace AS n, LATERAL (
  SELECT c.relname::text AS o FROM pg_class AS c WHERE c.relnamespace = n.oid
  UNION ALL
  SELECT f.proname || '()' FROM pg_proc AS f WHERE f.pronamespace = n.oid
) AS all_of_it
WHERE n.nspname = $1`, schema)
}

// expectedNames are those of a database that was migrated by plain SQL.
func expectedNames(t *testing.T) string {
	t.Helper()
	plainSQL.Do(func() { plainNames = names(t, pgtest.New(t).Pool, "public") })
	return plainNames
}

var (
	plainSQL   sync.Once
	plainNames string
)

// migratedOnce expects one set of objects in the schema, and each version
// recorded once with its checksum.
func migratedOnce(t *testing.T, pool *pgxpool.Pool, schema string) {
	t.Helper()
	const extra = " batch_job_run_key_idx" // where the primary key has another order
	ordered := query[bool](t, pool, `SELECT attcollation = '"C"'::regcollation FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = 'job_key'`,
		pgx.Identifier{schema, "batch_job_run"}.Sanitize())
	got := names(t, pool, schema)
	if strings.Contains(got, extra) == ordered {
		t.Errorf("schema %s has %s, and the keys of an own order: %t", schema, got, ordered)
	}
	if got, want := strings.Replace(got, extra, "", 1), expectedNames(t); got != want {
		t.Errorf("schema %s has %s, want %s", schema, got, want)
	}
	got = query[string](t, pool, `SELECT string_agg(version || ' ' || name || ' ' || length(checksum), ', ' ORDER BY version) FROM `+pgx.Identifier{schema, "batch_job_migration"}.Sanitize())
	if want := "1 0001_runs.sql 64, 2 0002_items.sql 64"; got != want {
		t.Errorf("recorded %s, want %s", got, want)
	}
}

// usable expects that Verify is content and that a job runs once per date.
func usable(t *testing.T, r *jobrun.Runner) {
	t.Helper()
	if err := r.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	executions := 0
	job := jobrun.Job{Name: fmt.Sprintf("usable-%d", used.Add(1)), Func: func(context.Context, *jobrun.Run) error { executions++; return nil }}
	for range 2 {
		if _, err := r.RunDate(t.Context(), job, date); err != nil {
			t.Error(err)
		}
	}
	if got, err := r.Get(t.Context(), job.Key(date)); executions != 1 || err != nil || got.Status != jobrun.Succeeded {
		t.Errorf("executed %d times: %+v, %v", executions, got, err)
	}
}

var used atomic.Int64

func mustMigrate(t *testing.T, r *jobrun.Runner) {
	t.Helper()
	if err := r.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// within10s bounds a Migrate that must not wait for its own limit of a minute.
func within10s(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// with returns a URL with a further connection parameter.
func with(t *testing.T, rawURL, name, value string) string {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = q.Encode()
	return u.String()
}

var _ = pgtest.RegisterChild("migrate", func() int {
	if err := migrateChild(context.Background(), os.Getenv("CHILD_DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
})

// migrateChild migrates once a byte arrives on its standard input.
func migrateChild(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	r, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if _, err := os.Stdout.Write([]byte{'?'}); err != nil {
		return err
	}
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	return r.Migrate(ctx)
}

// migrator is a process that is about to migrate.
type migrator struct {
	name string // its application_name
	cmd  *osexec.Cmd
	in   io.WriteCloser
	err  strings.Builder
}

// migrators starts n processes and returns when all of them are connected.
func migrators(t *testing.T, dbURL string, n int) []*migrator {
	t.Helper()
	var all []*migrator
	var outs []io.Reader
	for i := range n {
		m := &migrator{name: fmt.Sprintf("migrator-%d", i)}
		m.cmd = pgtest.Reexec(t, "migrate", "CHILD_DATABASE_URL="+with(t, dbURL, "application_name", m.name))
		m.in, _ = m.cmd.StdinPipe()
		out, _ := m.cmd.StdoutPipe()
		m.cmd.Stderr = &m.err
		if err := m.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all, outs = append(all, m), append(outs, out)
	}
	for i, m := range all {
		if _, err := io.ReadFull(outs[i], make([]byte, 1)); err != nil {
			_ = m.cmd.Wait()
			t.Fatalf("%s: %v: %s", m.name, err, &m.err)
		}
	}
	return all
}

func (m *migrator) start() { _, _ = m.in.Write([]byte{'!'}) }

func (m *migrator) succeeds(t *testing.T) {
	t.Helper()
	if err := m.cmd.Wait(); err != nil {
		t.Errorf("%s: %v: %s", m.name, err, &m.err)
	}
}

const instances = 8

func TestProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	var before string
	for _, state := range []string{"empty", "up to date"} {
		all := migrators(t, db.URL, instances)
		for _, m := range all {
			m.start()
		}
		for _, m := range all {
			m.succeeds(t)
		}
		migratedOnce(t, db.Pool, "public")
		after := objects(t, db.Pool) + query[string](t, db.Pool, `SELECT string_agg(applied_at::text || xmin::text, ' ') FROM batch_job_migration`)
		if before != "" && after != before {
			t.Errorf("%s: the objects changed from\n%s\nto\n%s", state, before, after)
		}
		before = after
	}
	usable(t, newRunner(t, db.Pool, jobrun.Options{}))
}

// The one that is inside is held there by another session's uncommitted table of
// the last name that the file creates, and killed.
func TestKilledMigrationLeavesNothingInTheWay(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db.Pool, seedTable)
	holder, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.Background()) }()
	if _, err := holder.Exec(t.Context(), `CREATE TABLE batch_job_migration (x int)`); err != nil {
		t.Fatal(err)
	}
	before := query[string](t, db.Pool, seedRows)

	all := migrators(t, db.URL, instances)
	for _, m := range all {
		m.start()
	}
	var victim *migrator
	eventually(t, "a migration is held in the middle of the file", func() bool {
		name := query[string](t, db.Pool, `
SELECT coalesce(max(a.application_name), '')
FROM pg_stat_activity AS a
JOIN pg_locks AS waiting ON waiting.pid = a.pid AND NOT waiting.granted AND waiting.locktype = 'transactionid'
JOIN pg_locks AS has ON has.pid = a.pid AND has.granted AND has.mode = 'AccessExclusiveLock' AND has.relation = 'batch_job_run'::regclass
WHERE a.datname = current_database()`)
		i := slices.IndexFunc(all, func(m *migrator) bool { return m.name == name })
		if i < 0 {
			return false
		}
		victim = all[i]
		return true
	})
	if err := victim.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := victim.cmd.Wait(); err == nil {
		t.Error("the victim ended well")
	}
	if query[bool](t, db.Pool, `SELECT to_regclass('batch_job_attempt') IS NOT NULL`) {
		t.Error("a half of the file is there")
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m != victim {
			m.succeeds(t)
		}
	}
	again := migrators(t, db.URL, 1)[0]
	again.start()
	again.succeeds(t)
	migratedOnce(t, db.Pool, "public")
	if after := query[string](t, db.Pool, seedRows); after != before {
		t.Errorf("rows were\n%s\nand are\n%s", before, after)
	}
	usable(t, newRunner(t, db.Pool, jobrun.Options{}))
}

// An instance that is alone when it is killed: only the rerun is left to finish.
func TestRerunAfterAKillCompletes(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	proxy := pgtest.NewProxy(t, db.URL)
	proxy.Hold("set checksum") // everything is created, nothing committed
	victim := migrators(t, proxy.URL(), 1)[0]
	victim.start()
	eventually(t, "the migration is held before its end", func() bool { return proxy.Held() == 1 })
	if err := victim.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = victim.cmd.Wait()
	proxy.CutAll()
	proxy.Release()
	r := newRunner(t, db.Pool, jobrun.Options{})
	if err := r.Migrate(within10s(t)); err != nil {
		t.Fatal(err)
	}
	migratedOnce(t, db.Pool, "public")
	usable(t, r)
}

// A lost answer to COMMIT does not make Migrate fail, or apply a file twice.
func TestMigrateSurvivesLostAnswers(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	for _, statement := range []string{"pg_advisory_xact_lock", "create table if not exists", "set checksum", "commit"} {
		for _, arm := range []string{"before", "after"} {
			t.Run(statement+"/"+arm, func(t *testing.T) {
				t.Parallel()
				proxy := pgtest.NewProxy(t, db.URL)
				schema := arm + " " + statement
				pool := inSchema(t, db, schema, func(c *pgxpool.Config) { *c = *mustParse(t, proxy.URL()) })
				r := newRunner(t, pool, jobrun.Options{})
				if arm == "before" {
					proxy.CutBefore(statement)
				} else {
					proxy.CutAfter(statement)
				}
				if err := r.Migrate(within10s(t)); err != nil {
					t.Fatal(err)
				}
				if proxy.Cuts() != 1 {
					t.Errorf("%d cuts", proxy.Cuts())
				}
				migratedOnce(t, db.Pool, schema)
				usable(t, r)
			})
		}
	}
}

func mustParse(t *testing.T, url string) *pgxpool.Config {
	t.Helper()
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	c.MaxConns = 4
	return c
}

func TestMigrateWaitsBoundedAndSaysForWhat(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	for _, c := range []struct{ name, sql, want string }{
		{"hanging migration", `SELECT pg_advisory_xact_lock(hashtextextended('jobrun migrate ' || current_schema(), 0))`, "another migration of schema hanging migration "},
		{"neighbour that writes", `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('long', 'RUNNING', 'node-1')`, "another transaction holds batch_job_run"},
		{"neighbour that reads", `SELECT FROM batch_job_run`, "another transaction holds batch_job_run"},
		{"neighbour that creates", `CREATE TABLE batch_job_action (x int)`, "another transaction holds the tables"},
	} {
		for _, limit := range []time.Duration{900 * time.Millisecond, 2500 * time.Millisecond} { // shorter than one wait, and longer
			// One that comes to the lock at once waits through both, one that has to make tables first the longer one.
			if c.name != "hanging migration" && (limit > time.Second) != (c.name == "neighbour that creates") {
				continue
			}
			schema := fmt.Sprintf("%s %s", c.name, limit)
			t.Run(schema, func(t *testing.T) {
				t.Parallel()
				pool := inSchema(t, db, schema, nil)
				exec(t, pool, seedTable)
				before := objects(t, pool)
				holder, err := pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = holder.Rollback(context.Background()) }()
				if _, err := holder.Exec(t.Context(), c.sql); err != nil {
					t.Fatal(err)
				}
				r := newRunner(t, pool, jobrun.Options{})
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				began := time.Now()
				err = r.Migrate(ctx)
				if took := time.Since(began); took > limit+2*time.Second {
					t.Errorf("took %s", took)
				}
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q", err, c.want)
				}
				if after := objects(t, pool); after != before {
					t.Errorf("it left\n%s\nfrom\n%s", after, before)
				}
				if err := holder.Rollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := r.Migrate(within10s(t)); err != nil {
					t.Errorf("afterwards: %v", err)
				}
				migratedOnce(t, db.Pool, schema)
			})
		}
	}
}

func TestCanceledMigrateReturnsAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := newRunner(t, db.Pool, jobrun.Options{}).Migrate(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := names(t, db.Pool, "public"); got != "" {
		t.Errorf("created %s", got)
	}
}

// The statements of other programs wait about a second at most, though Migrate
// waits for a transaction that does not end; and it succeeds once that does.
func TestMigrateDoesNotStopNeighbours(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db.Pool, seedTable)
	long, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = long.Rollback(context.Background()) }()
	if _, err := long.Exec(t.Context(), `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('long', 'RUNNING', 'node-1')`); err != nil {
		t.Fatal(err)
	}
	r := newRunner(t, db.Pool, jobrun.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Migrate(ctx) }()

	var slowest time.Duration
	var waited int
	for n := 0; ; n++ {
		began := time.Now()
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'node-2')`, fmt.Sprintf("short-%d", n))
		exec(t, db.Pool, `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`, fmt.Sprintf("short-%d", n))
		if took := time.Since(began); took > 100*time.Millisecond {
			waited++
			slowest = max(slowest, took)
		}
		if len(done) > 0 {
			break
		}
	}
	if err := <-done; !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "another transaction holds batch_job_run") {
		t.Errorf("got %v", err)
	}
	if slowest > 2500*time.Millisecond || waited < 2 { // two statements, each behind a wait of a second
		t.Errorf("neighbours waited %d times, at most %s", waited, slowest)
	}
	go func() { done <- r.Migrate(within10s(t)) }()
	eventually(t, "Migrate waits", func() bool { return waiting(t, db.Pool) > 0 })
	if err := long.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	usable(t, r)
}

// waiting returns how many sessions wait for the lock on batch_job_run.
func waiting(t *testing.T, pool *pgxpool.Pool) int {
	return query[int](t, pool, `SELECT count(*)::int FROM pg_locks WHERE NOT granted AND relation = 'batch_job_run'::regclass`)
}

// A neighbour that has read the table in its transaction can go on to write while
// Migrate waits for it: no deadlock makes either of them fail.
func TestMigrateDoesNotDeadlockWithNeighbours(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db.Pool, seedTable)
	for _, steps := range [][]string{
		{`SELECT FROM batch_job_run`, `UPDATE batch_job_run SET finished_at = now() WHERE job_key = 'running:2026-09-15'`},
		{`SELECT FROM batch_job_run FOR SHARE`, `DELETE FROM batch_job_run WHERE job_key = 'no date at all'`, `LOCK TABLE batch_job_run IN SHARE ROW EXCLUSIVE MODE`},
	} {
		neighbour, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = neighbour.Rollback(context.Background()) }()
		if _, err := neighbour.Exec(t.Context(), steps[0]); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		r := newRunner(t, db.Pool, jobrun.Options{})
		ctx := within10s(t)
		go func() { done <- r.Migrate(ctx) }()
		for _, step := range steps[1:] {
			eventually(t, "Migrate waits", func() bool { return waiting(t, db.Pool) > 0 })
			if _, err := neighbour.Exec(ctx, step); err != nil {
				t.Errorf("neighbour: %s: %v", step, err)
			}
		}
		if err := neighbour.Commit(ctx); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		migratedOnce(t, db.Pool, "public")
		exec(t, db.Pool, `DROP TABLE batch_job_run, batch_job_attempt, batch_job_action, batch_job_item, batch_job_item_failure, batch_job_checkpoint, batch_job_migration; DROP FUNCTION batch_job_action_append_only; `+seedTable)
	}
}

// Another migrator that applies the same files at the same time, without our lock,
// is waited for, and what it did is accepted.
func TestMigrateBesideAnotherMigrator(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("migrations/0001_runs.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, adopt := range []bool{false, true} {
		t.Run(fmt.Sprintf("adopt=%t", adopt), func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			if adopt {
				exec(t, db.Pool, seedTable)
			}
			other, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback(context.Background()) }()
			if _, err := other.Exec(t.Context(), string(file), pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			r := newRunner(t, db.Pool, jobrun.Options{})
			ctx := within10s(t)
			go func() { done <- r.Migrate(ctx) }()
			eventually(t, "Migrate waits", func() bool {
				return query[int](t, db.Pool, `SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
			})
			if err := other.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			migratedOnce(t, db.Pool, "public")
			usable(t, r)
		})
	}
}

func TestMigrateAdoptsATableWithItsRows(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	exec(t, db.Pool, seedTable)
	const file = `SELECT relfilenode::bigint FROM pg_class WHERE oid = 'batch_job_run'::regclass`
	rows, filenode := query[string](t, db.Pool, seedRows), query[int64](t, db.Pool, file)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for range 3 {
		mustMigrate(t, r)
	}
	migratedOnce(t, db.Pool, "public")
	if after := query[string](t, db.Pool, seedRows); after != rows {
		t.Errorf("rows were\n%s\nand are\n%s", rows, after)
	}
	if after := query[int64](t, db.Pool, file); after != filenode {
		t.Errorf("the table was rewritten: file %d is now %d", filenode, after)
	}

	// What is recorded keeps jobs from running again.
	for name, want := range map[string]jobrun.Decision{
		"running": jobrun.AlreadyRunning, "succeeded": jobrun.AlreadySucceeded, "failed": jobrun.AlreadyFailed, "skipped": jobrun.AlreadySkipped,
	} {
		job := jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: 3}, Func: func(context.Context, *jobrun.Run) error {
			t.Errorf("%s ran", name)
			return nil
		}}
		if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != want {
			t.Errorf("%s: %+v, %v; want %s", name, res, err, want)
		}
	}
	archived := jobrun.Job{Name: "archived", Func: func(context.Context, *jobrun.Run) error { t.Error("archived ran"); return nil }}
	if res, _ := r.RunDate(t.Context(), archived, date); res.Ran() {
		t.Errorf("an unknown status was claimed: %+v", res)
	}
	if after := query[string](t, db.Pool, seedRows); after != rows {
		t.Errorf("calls changed the rows from\n%s\nto\n%s", rows, after)
	}

	// All rows can be read, by key and as a list.
	keys, _ := db.Pool.Query(t.Context(), `SELECT job_key FROM batch_job_run`)
	all, err := pgx.CollectRows(keys, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range all {
		if rec, err := r.Get(t.Context(), key); err != nil || rec.Key != key {
			t.Errorf("Get(%q): %+v, %v", key, rec, err)
		}
		if _, err := r.History(t.Context(), key); err != nil {
			t.Errorf("History(%q): %v", key, err)
		}
	}
	if list, err := r.List(t.Context(), jobrun.Filter{}); err != nil || len(list) != len(all) {
		t.Errorf("List: %d of %d rows, %v", len(list), len(all), err)
	}
	if stale, err := r.Stale(t.Context()); err != nil || len(stale) != 2 {
		t.Errorf("Stale: %+v, %v; want the two RUNNING rows", stale, err)
	}

	// Programs that know six columns go on with their statements.
	const insert = `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', $2) ON CONFLICT (job_key) DO NOTHING`
	const update = `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`
	exec(t, db.Pool, insert, "theirs:2026-09-15", "node-1")
	exec(t, db.Pool, insert, "theirs:2026-09-15", "node-2")
	theirs := jobrun.Job{Name: "theirs", Func: func(context.Context, *jobrun.Run) error { t.Error("theirs ran"); return nil }}
	for _, want := range []jobrun.Decision{jobrun.AlreadyRunning, jobrun.AlreadySucceeded} {
		res, err := r.RunDate(t.Context(), theirs, date)
		if err != nil || res.Decision != want || res.Record.WorkerID != "node-1" {
			t.Errorf("got %+v, %v; want %s", res, err, want)
		}
		exec(t, db.Pool, update, "theirs:2026-09-15")
	}
	usable(t, r)
	ours := jobrun.Job{Name: "ours", Func: func(context.Context, *jobrun.Run) error { return nil }}
	if _, err := r.RunDate(t.Context(), ours, date); err != nil {
		t.Error(err)
	}
	exec(t, db.Pool, insert, "ours:2026-09-15", "node-1")
	if rec, err := r.Get(t.Context(), "ours:2026-09-15"); err != nil || rec.Status != jobrun.Succeeded || rec.WorkerID == "node-1" {
		t.Errorf("a neighbour's INSERT made of our run %+v, %v", rec, err)
	}
}

func TestWiderTablesAreAdopted(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	for name, change := range map[string]string{
		"wider":            `ALTER TABLE batch_job_run ALTER job_key TYPE varchar(500), ALTER status TYPE varchar(30), ALTER worker_id TYPE varchar(255)`,
		"text":             `ALTER TABLE batch_job_run ALTER job_key TYPE text, ALTER status TYPE text, ALTER worker_id TYPE text`,
		"unlimited":        `ALTER TABLE batch_job_run ALTER job_key TYPE varchar, ALTER status TYPE varchar, ALTER worker_id TYPE varchar, ALTER error_message TYPE varchar`,
		"unique index":     `ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey; CREATE UNIQUE INDEX ON batch_job_run (job_key)`,
		"no second index":  `DROP INDEX batch_job_run_status_started_idx`,
		"no default":       `ALTER TABLE batch_job_run ALTER started_at DROP DEFAULT`,
		"one more column":  `ALTER TABLE batch_job_run ADD COLUMN team text, ADD COLUMN cost integer NOT NULL DEFAULT 0`,
		"a dropped column": `ALTER TABLE batch_job_run ADD COLUMN gone text; ALTER TABLE batch_job_run DROP COLUMN gone`,
		"other key name":   `ALTER TABLE batch_job_run RENAME CONSTRAINT batch_job_run_pkey TO the_key`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := inSchema(t, db, name, nil)
			exec(t, pool, seedTable)
			exec(t, pool, change)
			before := query[string](t, pool, seedRows)
			r := newRunner(t, pool, jobrun.Options{})
			mustMigrate(t, r)
			mustMigrate(t, r)
			if after := query[string](t, pool, seedRows); after != before {
				t.Errorf("rows were\n%s\nand are\n%s", before, after)
			}
			usable(t, r)
		})
	}
}

func TestUnfitTablesAreRefusedAndLeftAsTheyAre(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	for name, c := range map[string]struct{ change, want string }{
		"missing column":      {`ALTER TABLE batch_job_run DROP COLUMN worker_id`, "column batch_job_run.worker_id is missing"},
		"missing primary key": {`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey`, "no primary key or unique index on (job_key)"},
		"key on more columns": {`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey, ADD PRIMARY KEY (job_key, worker_id)`, "no primary key or unique index on (job_key)"},
		"partial key":         {`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey; CREATE UNIQUE INDEX ON batch_job_run (job_key) WHERE status <> 'FAILED'`, "no primary key or unique index on (job_key)"},
		"key of lower case":   {`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey; CREATE UNIQUE INDEX ON batch_job_run (lower(job_key))`, "no primary key or unique index on (job_key)"},
		"deferrable key":      {`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey, ADD PRIMARY KEY (job_key) DEFERRABLE`, "no primary key or unique index on (job_key)"},
		"no time zone":        {`ALTER TABLE batch_job_run ALTER started_at TYPE timestamp`, "column batch_job_run.started_at is timestamp without time zone, want timestamp with time zone"},
		"narrow key":          {`DELETE FROM batch_job_run WHERE length(job_key) > 50; ALTER TABLE batch_job_run ALTER job_key TYPE varchar(50)`, "column batch_job_run.job_key is character varying(50), want character varying(120)"},
		"narrow error":        {`UPDATE batch_job_run SET error_message = NULL; ALTER TABLE batch_job_run ALTER error_message TYPE varchar(500)`, "column batch_job_run.error_message is character varying(500), want text"},
		"key of a language":   {`ALTER TABLE batch_job_run ALTER job_key TYPE varchar(120) COLLATE "en-x-icu"`, `column batch_job_run.job_key has the collation "en-x-icu", want that of the database or "C": ALTER TABLE batch_job_run ALTER COLUMN job_key TYPE character varying(120) COLLATE "C"`},
		"key of all cases":    {`CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false); ALTER TABLE batch_job_run ALTER job_key TYPE varchar(120) COLLATE any_case`, `the collation "any_case"`},
		"status of all cases": {`CREATE COLLATION any_case2 (provider = icu, locale = 'und-u-ks-level2', deterministic = false); ALTER TABLE batch_job_run ALTER status TYPE varchar(20) COLLATE any_case2`, `column batch_job_run.status has the collation "any_case2"`},
		"padded key":          {`ALTER TABLE batch_job_run ALTER job_key TYPE char(120)`, "column batch_job_run.job_key is character(120)"},
		"status as a number":  {`ALTER TABLE batch_job_run ALTER status TYPE integer USING 0`, "column batch_job_run.status is integer"},
		"nullable status":     {`ALTER TABLE batch_job_run ALTER status DROP NOT NULL`, "column batch_job_run.status must be NOT NULL"},
		"obligatory end":      {`ALTER TABLE batch_job_run ALTER finished_at TYPE timestamptz USING now(), ALTER finished_at SET NOT NULL`, "column batch_job_run.finished_at must be nullable"},
		"attempt as text":     {`ALTER TABLE batch_job_run ADD COLUMN attempt text NOT NULL DEFAULT '1'`, "column batch_job_run.attempt is text, want integer"},
		"nullable attempt":    {`ALTER TABLE batch_job_run ADD COLUMN attempt integer`, "column batch_job_run.attempt must be NOT NULL"},
		"a view":              {`ALTER TABLE batch_job_run RENAME TO jobs; CREATE VIEW batch_job_run AS SELECT * FROM jobs`, "batch_job_run"},
		"two faults":          {`ALTER TABLE batch_job_run DROP COLUMN worker_id, ALTER started_at TYPE timestamp`, "worker_id is missing"},
		"their own attempts":  {`CREATE TABLE batch_job_attempt (x int)`, `relation "batch_job_attempt" already exists`},
		"their own functions": {`CREATE FUNCTION batch_job_action_append_only() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`, `function "batch_job_action_append_only" already exists`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := inSchema(t, db, name, nil)
			exec(t, pool, seedTable)
			exec(t, pool, c.change)
			before := objects(t, pool)
			err := newRunner(t, pool, jobrun.Options{}).Migrate(within10s(t))
			if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if name == "two faults" && !strings.Contains(err.Error(), "timestamp without time zone") {
				t.Errorf("%q does not name both", err)
			}
			if after := objects(t, pool); after != before {
				t.Errorf("it left\n%s\nfrom\n%s", after, before)
			}
		})
	}
}

func TestTableOfAnotherRoleIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	owner, _ := db.Role(t, "")
	migrating, url := db.Role(t, "")
	exec(t, db.Pool, seedTable)
	exec(t, db.Pool, fmt.Sprintf(`ALTER TABLE batch_job_run OWNER TO %s; GRANT ALL ON batch_job_run TO %s; GRANT CREATE ON SCHEMA public TO %[2]s`, owner, migrating))
	pool := db.PoolWith(t, func(c *pgxpool.Config) { *c = *mustParse(t, url) })
	before := objects(t, db.Pool)
	r := newRunner(t, pool, jobrun.Options{})
	err := r.Migrate(within10s(t))
	if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "belongs to "+owner) || !strings.Contains(err.Error(), "not "+migrating) {
		t.Errorf("got %v", err)
	}
	if after := objects(t, db.Pool); after != before {
		t.Errorf("it left\n%s\nfrom\n%s", after, before)
	}
	exec(t, db.Pool, fmt.Sprintf(`GRANT %s TO %s`, owner, migrating)) // a member may act as the owner
	if err := r.Migrate(within10s(t)); err != nil {
		t.Fatal(err)
	}
	usable(t, r)
}

func TestMigrateByARoleThatOwnsOnlyItsSchema(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"search_path", "Options.Schema", "schema of its own name"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			role, url := db.Role(t, "NOCREATEDB NOCREATEROLE NOINHERIT")
			schema, opts := "batch", jobrun.Options{}
			switch how {
			case "search_path":
				exec(t, db.Pool, fmt.Sprintf(`ALTER ROLE %s SET search_path = batch`, role))
			case "Options.Schema":
				opts.Schema = "batch"
			default:
				schema = role
			}
			exec(t, db.Pool, fmt.Sprintf(`REVOKE ALL ON SCHEMA public FROM PUBLIC; CREATE SCHEMA %s AUTHORIZATION %s`, schema, role))
			pool := db.PoolWith(t, func(c *pgxpool.Config) { *c = *mustParse(t, url) })
			r := newRunner(t, pool, opts)
			mustMigrate(t, r)
			mustMigrate(t, r)
			migratedOnce(t, db.Pool, schema)
			usable(t, r)
			if got := names(t, db.Pool, "public"); got != "" {
				t.Errorf("public has %s", got)
			}
		})
	}
}

func TestSchemaThatCannotBeUsedIsAClearError(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	exec(t, db.Pool, `CREATE SCHEMA closed; CREATE SCHEMA fixed`)
	role, url := db.Role(t, "")
	exec(t, db.Pool, fmt.Sprintf(`GRANT USAGE ON SCHEMA fixed TO %s; GRANT TEMPORARY ON DATABASE %s TO %[1]s`, role, db.Name))
	for _, c := range []struct{ schema, path, want string }{
		{"missing", "", "schema missing does not exist, or this role has no USAGE on it"},
		{"closed", "", "schema closed does not exist, or this role has no USAGE on it"},
		{"fixed", "", "permission denied for schema fixed"},
		{"", "", "the search_path of the session names no schema that exists: set Options.Schema"},
		{"", "missing", "the search_path of the session names no schema that exists: set Options.Schema"},
		{"", "closed, missing", "the search_path of the session names no schema that exists: set Options.Schema"},
	} {
		pool := db.PoolWith(t, func(config *pgxpool.Config) {
			*config = *mustParse(t, url)
			config.ConnConfig.RuntimeParams["search_path"] = c.path
			config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `CREATE TEMPORARY TABLE other (x int)`) // there is a schema that takes tables
				return err
			}
		})
		r := newRunner(t, pool, jobrun.Options{Schema: c.schema})
		if err := r.Migrate(within10s(t)); err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("schema %q, search_path %q: got %v, want %q", c.schema, c.path, err, c.want)
		}
		if err := r.Verify(within10s(t)); err == nil {
			t.Errorf("schema %q, search_path %q: Verify is content", c.schema, c.path)
		}
		if n := query[int](t, pool, `SELECT count(*)::int FROM pg_class WHERE relname LIKE 'batch%'`); n != 0 {
			t.Errorf("schema %q, search_path %q: %d temporary objects", c.schema, c.path, n)
		}
	}
	for _, schema := range []string{"public", "closed", "fixed"} {
		if got := names(t, db.Pool, schema); got != "" {
			t.Errorf("%s has %s", schema, got)
		}
	}
}

// Schemas in one database know nothing of each other, whatever their names.
func TestSchemasAreIndependent(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	schemas := []string{"public", "batch", "Batch", `two words`, `quo"te`, `dot.ted`, "Bücher 정산", "batch_job_", "'", `back\slash`, "$1", strings.Repeat("x", 63)}
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" })
	var runners []*jobrun.Runner
	var wg sync.WaitGroup
	for _, schema := range schemas {
		exec(t, db.Pool, `CREATE SCHEMA IF NOT EXISTS `+pgx.Identifier{schema}.Sanitize())
		r := newRunner(t, pool, jobrun.Options{Schema: schema})
		runners = append(runners, r)
		for range 3 { // at once, in sessions whose snapshots would be older than the wait
			wg.Go(func() {
				if err := r.Migrate(within10s(t)); err != nil {
					t.Errorf("schema %q: %v", schema, err)
				}
			})
		}
	}
	wg.Wait()
	for i, schema := range schemas {
		migratedOnce(t, db.Pool, schema)
		usable(t, runners[i]) // each executes the same key once
	}
	exec(t, db.Pool, `DROP TABLE batch.batch_job_run`)
	if err := runners[1].Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "batch_job_run is missing") {
		t.Errorf("batch without its table: %v", err)
	}
	if err := runners[2].Verify(t.Context()); err != nil {
		t.Errorf("Batch: %v", err)
	}
}

func TestSchemaIsFoundBySearchPath(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	for _, c := range []struct{ name, existing, path, schema, want string }{
		{name: "new tables go to the first", path: `first, second`, want: "first"},
		{name: "missing schemas are passed over", path: `missing, second, first`, want: "second"},
		{name: "a table in the second is adopted", existing: "second", path: `first, second`, want: "second"},
		{name: "a quoted one", path: `"Third Räume"`, want: "Third Räume"},
		{name: "the option wins", existing: "second", path: `first, second`, schema: "first", want: "first"},
		{name: "the option needs no path", path: ``, schema: "second", want: "second"},
		{name: "the option with a name to quote needs no path", path: ``, schema: "Third Räume", want: "Third Räume"},
		{name: "the temporary schema is passed over", path: `pg_temp, first, second`, want: "first"},
		{name: "so is a temporary table", existing: "second", path: `pg_temp, first, second`, want: "second"},
	} {
		t.Run(c.name, func(t *testing.T) {
			exec(t, db.Pool, `
SET client_min_messages = error;
DROP SCHEMA IF EXISTS first, second, "Third Räume" CASCADE;
CREATE SCHEMA first;
CREATE SCHEMA second;
CREATE SCHEMA "Third Räume"`)
			if c.existing != "" {
				exec(t, db.Pool, fmt.Sprintf(`SET search_path = %s; %s; RESET search_path`, c.existing, seedTable))
			}
			pool := db.PoolWith(t, func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams["search_path"] = c.path
				config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
					_, err := conn.Exec(ctx, `CREATE TEMPORARY TABLE batch_job_run (x int)`)
					return err
				}
			})
			r := newRunner(t, pool, jobrun.Options{Schema: c.schema})
			mustMigrate(t, r)
			mustMigrate(t, r)
			migratedOnce(t, db.Pool, c.want)
			usable(t, r)
			usable(t, newRunner(t, pool, jobrun.Options{Schema: c.schema})) // finds them again
			for _, other := range []string{"first", "second", "Third Räume", "public"} {
				if got := names(t, db.Pool, other); other != c.want && other != c.existing && got != "" {
					t.Errorf("%s has %s", other, got)
				}
			}
		})
	}
}

// Migrate, Verify and a run work in sessions of every kind.
func TestMigrateInEverySession(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.Empty(t)
	modes := []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}
	for _, mode := range modes {
		for _, adopt := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/adopt=%t", mode, adopt), func(t *testing.T) {
				t.Parallel()
				schema := fmt.Sprintf("%s %t", mode, adopt)
				if seed := inSchema(t, db, schema, nil); adopt {
					exec(t, seed, seedTable)
				}
				pool := db.PoolWith(t, func(c *pgxpool.Config) {
					c.ConnConfig.RuntimeParams["search_path"] = `"` + schema + `"`
					c.ConnConfig.DefaultQueryExecMode = mode
					c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
					c.ConnConfig.RuntimeParams["default_transaction_deferrable"] = "on"
					c.ConnConfig.RuntimeParams["client_min_messages"] = "error"
					c.ConnConfig.RuntimeParams["lock_timeout"] = "1h"
					c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
						_, err := conn.Exec(ctx, `CREATE TEMPORARY TABLE batch_job_run (x int); CREATE TEMPORARY TABLE batch_job_migration (x int)`, pgx.QueryExecModeSimpleProtocol)
						return err
					}
				})
				r := newRunner(t, pool, jobrun.Options{})
				mustMigrate(t, r)
				mustMigrate(t, r)
				migratedOnce(t, db.Pool, schema)
				usable(t, r)
				for name, want := range map[string]string{
					"search_path": `"` + schema + `"`, "lock_timeout": "1h", "idle_in_transaction_session_timeout": "0", "transaction_isolation": "serializable",
				} {
					if got := query[string](t, pool, `SELECT current_setting('`+name+`')`); got != want {
						t.Errorf("%s is left at %q", name, got)
					}
				}
			})
		}
	}
}

func TestTablesKeepTheirPromises(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	none := func(what, sql string) {
		t.Helper()
		if got := query[string](t, db.Pool, `SELECT coalesce(string_agg(x, ', '), '') FROM (`+sql+`) AS found (x)`); got != "" {
			t.Errorf("%s: %s", what, got)
		}
	}
	none("tables without a comment", `
SELECT c.relname::text FROM pg_class AS c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND coalesce(obj_description(c.oid), '') = ''`)
	none("columns without a comment", `
SELECT c.relname || '.' || a.attname
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND coalesce(col_description(c.oid, a.attnum), '') = ''`)
	none("tables without a primary key", `
SELECT c.relname::text FROM pg_class AS c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary)`)
	none("objects whose names do not begin with batch_job_", `
SELECT c.relname::text FROM pg_class AS c WHERE c.relnamespace = 'public'::regnamespace AND c.relname NOT LIKE 'batch\_job\_%'
UNION ALL SELECT f.proname::text FROM pg_proc AS f WHERE f.pronamespace = 'public'::regnamespace AND f.proname NOT LIKE 'batch\_job\_%'`)
	none("foreign keys", `SELECT conrelid::regclass || ' ' || conname FROM pg_constraint WHERE contype = 'f'`)
	none("indexes on heartbeat_at", `
SELECT i.indexrelid::regclass::text FROM pg_index AS i WHERE pg_get_indexdef(i.indexrelid) LIKE '%heartbeat_at%'`)
	none("constraints on batch_job_run besides its key and NOT NULL, which is one since PostgreSQL 18", `
SELECT conname::text FROM pg_constraint WHERE conrelid = 'batch_job_run'::regclass AND contype NOT IN ('p', 'n')`)
	none("triggers, rules and policies on batch_job_run", `
SELECT tgname::text FROM pg_trigger WHERE tgrelid = 'batch_job_run'::regclass
UNION ALL SELECT rulename::text FROM pg_rewrite WHERE ev_class = 'batch_job_run'::regclass
UNION ALL SELECT polname::text FROM pg_policy WHERE polrelid = 'batch_job_run'::regclass`)
	none("generated columns of batch_job_run", `
SELECT attname::text FROM pg_attribute WHERE attrelid = 'batch_job_run'::regclass AND (attgenerated <> '' OR attidentity <> '')`)
	none("columns of batch_job_run that a neighbour's INSERT does not fill", `
SELECT attname::text FROM pg_attribute
WHERE attrelid = 'batch_job_run'::regclass AND attnum > 0 AND attnotnull AND NOT atthasdef AND attname NOT IN ('job_key', 'status', 'worker_id')`)
	none("unique indexes of batch_job_run besides its key", `
SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'batch_job_run'::regclass AND indisunique AND NOT indisprimary`)
	if got := query[string](t, db.Pool, `
SELECT string_agg(format('%s %s%s%s', attname, format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN ' NOT NULL' END, ' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid)), ', ' ORDER BY attnum)
FROM pg_attribute LEFT JOIN pg_attrdef AS d ON d.adrelid = attrelid AND d.adnum = attnum
WHERE attrelid = 'batch_job_run'::regclass AND attnum BETWEEN 1 AND 6`); got != "job_key character varying(120) NOT NULL, status character varying(20) NOT NULL, started_at timestamp with time zone NOT NULL DEFAULT now(), "+
		"finished_at timestamp with time zone, worker_id character varying(80) NOT NULL, error_message text" {
		t.Errorf("the six columns are %s", got)
	}
}

func TestActionsCannotBeRewritten(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	owner, url := db.Role(t, "")
	exec(t, db.Pool, fmt.Sprintf(`CREATE SCHEMA audit AUTHORIZATION %s; ALTER ROLE %[1]s SET search_path = audit`, owner))
	pool := db.PoolWith(t, func(c *pgxpool.Config) { *c = *mustParse(t, url) })
	mustMigrate(t, newRunner(t, pool, jobrun.Options{}))
	exec(t, pool, `
INSERT INTO batch_job_action (job_key, attempt, action, acted_by, reason, forced, reset_items, token)
VALUES ('daily-settlement:2026-09-15', 1, 'MARK_FAILED', 'operator', 'the host is gone', false, false, gen_random_uuid())`)
	const row = `SELECT batch_job_action::text FROM batch_job_action`
	before := query[string](t, pool, row)
	for _, statement := range []string{
		`UPDATE batch_job_action SET reason = 'none'`,
		`UPDATE batch_job_action SET reason = 'none' WHERE false`,
		`DELETE FROM batch_job_action`,
		`DELETE FROM batch_job_action WHERE id = 1`,
		`TRUNCATE batch_job_action`,
		`TRUNCATE batch_job_run, batch_job_action`,
		`INSERT INTO batch_job_action (id, job_key, attempt, action, acted_by, reason, forced, reset_items, token) OVERRIDING SYSTEM VALUE
		 VALUES (1, 'x', 1, 'SKIP', 'lee', 'r', false, false, gen_random_uuid()) ON CONFLICT (id) DO UPDATE SET reason = 'none'`,
	} {
		for _, as := range []*pgxpool.Pool{pool, db.Pool} { // the owner and a superuser
			_, err := as.Exec(t.Context(), strings.ReplaceAll(statement, "batch_job_", "audit.batch_job_"))
			if err == nil || !strings.Contains(err.Error(), "batch_job_action is append-only") {
				t.Errorf("%s: %v", statement, err)
			}
		}
	}
	if after := query[string](t, pool, row); after != before {
		t.Errorf("it was %s and is %s", before, after)
	}
}

func TestVerifyFindsWhatIsMissing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	fine := func(after string) {
		t.Helper()
		if err := r.Verify(t.Context()); err != nil {
			t.Errorf("after %s: %v", after, err)
		}
	}
	finds := func(change, undo string, want ...string) {
		t.Helper()
		exec(t, db.Pool, change)
		err := r.Verify(t.Context())
		for _, part := range want {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: got %v, want %q", change, err, part)
			}
		}
		exec(t, db.Pool, undo)
	}
	fine("a migration")

	columns, _ := db.Pool.Query(t.Context(), `
SELECT c.relname::text, a.attname::text
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relname <> 'batch_job_migration'`)
	all, err := pgx.CollectRows(columns, pgx.RowToStructByPos[struct{ Table, Name string }])
	if err != nil || len(all) < 40 {
		t.Fatalf("%d columns, %v", len(all), err)
	}
	for _, c := range all {
		finds(fmt.Sprintf(`ALTER TABLE %s RENAME COLUMN %s TO gone`, c.Table, c.Name), fmt.Sprintf(`ALTER TABLE %s RENAME COLUMN gone TO %s`, c.Table, c.Name),
			fmt.Sprintf("column %s.%s is missing", c.Table, c.Name))
	}
	fine("columns")
	for _, table := range []string{"batch_job_run", "batch_job_attempt", "batch_job_action", "batch_job_migration", "batch_job_item", "batch_job_item_failure", "batch_job_checkpoint"} {
		finds(fmt.Sprintf(`ALTER TABLE %s RENAME TO gone`, table), fmt.Sprintf(`ALTER TABLE gone RENAME TO %s`, table), "table "+table+" is missing: run Migrate")
	}
	fine("tables")
	finds(`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey`, `ALTER TABLE batch_job_run ADD PRIMARY KEY (job_key)`,
		"batch_job_run has no primary key or unique index on (job_key)")
	finds(`ALTER TABLE batch_job_attempt DROP CONSTRAINT batch_job_attempt_pkey`, `ALTER TABLE batch_job_attempt ADD PRIMARY KEY (job_key, attempt)`,
		"batch_job_attempt has no primary key or unique index on (attempt, job_key)")
	finds(`ALTER TABLE batch_job_item DROP CONSTRAINT batch_job_item_pkey`, `ALTER TABLE batch_job_item ADD PRIMARY KEY (job_key, item)`,
		"batch_job_item has no primary key or unique index on (item, job_key)")
	finds(`ALTER TABLE batch_job_item_failure DROP CONSTRAINT batch_job_item_failure_pkey`, `ALTER TABLE batch_job_item_failure ADD PRIMARY KEY (job_key, item)`,
		"batch_job_item_failure has no primary key or unique index on (item, job_key)")
	finds(`ALTER TABLE batch_job_checkpoint DROP CONSTRAINT batch_job_checkpoint_pkey`, `ALTER TABLE batch_job_checkpoint ADD PRIMARY KEY (job_key)`,
		"batch_job_checkpoint has no primary key or unique index on (job_key)")
	finds(`ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey; ALTER TABLE batch_job_run ALTER job_key DROP NOT NULL, ALTER started_at TYPE timestamp, ALTER worker_id TYPE varchar(10)`,
		`ALTER TABLE batch_job_run ADD PRIMARY KEY (job_key), ALTER started_at TYPE timestamptz, ALTER worker_id TYPE varchar(80)`,
		"no primary key", "job_key must be NOT NULL", "started_at is timestamp without time zone", "worker_id is character varying(10)")
	fine("keys")

	empty := newRunner(t, pgtest.Empty(t).Pool, jobrun.Options{})
	if err := empty.Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "no tables: run Migrate first") {
		t.Errorf("an empty database: %v", err)
	}
	seeded := pgtest.Empty(t)
	exec(t, seeded.Pool, seedTable)
	if err := newRunner(t, seeded.Pool, jobrun.Options{}).Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "column batch_job_run.token is missing: run Migrate") {
		t.Errorf("a table of six columns: %v", err)
	}
}

// The privileges that Verify asks for are all that a service needs.
func TestVerifyFindsMissingPrivileges(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role, url := db.Role(t, "")
	pool := db.PoolWith(t, func(c *pgxpool.Config) { *c = *mustParse(t, url) })
	r := newRunner(t, pool, jobrun.Options{})
	grants := map[string][]string{
		"batch_job_run": {"SELECT", "INSERT", "UPDATE"}, "batch_job_attempt": {"SELECT", "INSERT", "UPDATE"},
		"batch_job_action": {"SELECT"}, "batch_job_migration": {"SELECT"}, "batch_job_item": {"SELECT", "INSERT"},
		"batch_job_item_failure": {"SELECT", "INSERT", "UPDATE"}, "batch_job_checkpoint": {"SELECT", "INSERT", "UPDATE"},
	}
	grant := func(verb, privilege, table, direction string) {
		exec(t, db.Pool, fmt.Sprintf(`%s %s ON %s %s %s`, verb, privilege, table, direction, role))
	}
	err := r.Verify(t.Context())
	for table, privileges := range grants {
		for _, privilege := range privileges {
			if want := fmt.Sprintf("missing privilege on %s: %s", table, privilege); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("without any: got %v, want %q", err, want)
			}
			grant("GRANT", privilege, table, "TO")
		}
	}
	usable(t, r)
	for table, privileges := range grants {
		for _, privilege := range privileges {
			grant("REVOKE", privilege, table, "FROM")
			want := fmt.Sprintf("missing privilege on %s: %s", table, privilege)
			if err := r.Verify(t.Context()); err == nil || !strings.HasSuffix(err.Error(), ": "+want) {
				t.Errorf("got %v, want only %q", err, want)
			}
			grant("GRANT", privilege, table, "TO")
		}
	}
	usable(t, r)
	exec(t, db.Pool, `REVOKE USAGE ON SCHEMA public FROM PUBLIC`)
	if err := newRunner(t, pool, jobrun.Options{Schema: "public"}).Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "permission denied for schema public") {
		t.Errorf("without USAGE: %v", err)
	}
}

func TestVerifyFindsAReadOnlySession(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" })
	err := newRunner(t, pool, jobrun.Options{}).Verify(t.Context())
	if err == nil || !strings.Contains(err.Error(), "the session is read-only (default_transaction_read_only)") {
		t.Errorf("got %v", err)
	}
	empty := pgtest.Empty(t)
	exec(t, empty.Pool, fmt.Sprintf(`ALTER DATABASE %s SET default_transaction_read_only = on`, empty.Name))
	pool = empty.PoolWith(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // it may pass: a server that was just promoted
	defer cancel()
	err = newRunner(t, pool, jobrun.Options{}).Migrate(ctx)
	if err == nil || !strings.Contains(err.Error(), "read-only transaction") || strings.Contains(err.Error(), "locked") {
		t.Errorf("Migrate: %v", err)
	}
}

func TestVerifyFindsAClockThatIsOff(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for off, wrong := range map[time.Duration]bool{
		0: false, 4 * time.Second: false, -4 * time.Second: false,
		7 * time.Second: true, -7 * time.Second: true, 9 * time.Hour: true,
	} {
		r := newRunner(t, db.Pool, jobrun.Options{Now: func() time.Time { return time.Now().Add(off) }})
		switch err := r.Verify(t.Context()); {
		case wrong && (err == nil || !strings.Contains(err.Error(), "this host's clock and the server's differ by")):
			t.Errorf("%s off: %v", off, err)
		case !wrong && err != nil:
			t.Errorf("%s off: %v", off, err)
		}
	}
}

func TestVerifyLogsTheTimeZones(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["timezone"] = "America/New_York" })
	logger, text := logged()
	if err := newRunner(t, pool, jobrun.Options{Logger: logger}).Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found := text.lines("level=INFO", `msg="tables verified"`, "schema=public", "problems=0", "business_zone=Asia/Seoul", "session_time_zone=America/New_York"); len(found) != 1 {
		t.Errorf("%d lines", len(found))
	}
}
