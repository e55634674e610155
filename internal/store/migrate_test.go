package store

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// released are the files as they are, and further ones by their names.
func released(t *testing.T, more map[string]string) []Migration {
	t.Helper()
	files := fstest.MapFS{}
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: text}
	}
	for name, text := range more {
		files[name] = &fstest.MapFile{Data: []byte(text)}
	}
	all, err := Migrations(files)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// next is the name and the text of the file that could follow the released ones.
func next(t *testing.T, sql string, incompatible bool) (name string, file map[string]string) {
	t.Helper()
	version := len(released(t, nil)) + 1
	name = fmt.Sprintf("%04d_next.sql", version)
	return name, map[string]string{name: fmt.Sprintf("%s;\nINSERT INTO batch_job_migration (version, name, incompatible) VALUES (%d, '%s', %t);\n", sql, version, name, incompatible)}
}

// up applies what is missing of all and returns the names of what it applied.
func up(t *testing.T, pool *pgxpool.Pool, all []Migration) (names []string, err error) {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for {
		name, err := New("public").MigrateNext(t.Context(), conn.Conn(), all, time.Second)
		if err != nil || name == "" {
			return names, err
		}
		names = append(names, name)
	}
}

// mustUp applies all of all.
func mustUp(t *testing.T, pool *pgxpool.Pool, all []Migration) {
	t.Helper()
	if names, err := up(t, pool, all); err != nil || len(names) != len(all) {
		t.Fatalf("applied %v, %v", names, err)
	}
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func query[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	rows, err := pool.Query(t.Context(), sql, args...)
	v, found, err := one(rows, err, pgx.RowTo[T])
	if err != nil || !found {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// versions is the table of migrations as text.
func versions(t *testing.T, pool *pgxpool.Pool) string {
	return query[string](t, pool, `
SELECT string_agg(concat_ws(' ', version, name, incompatible, coalesce(checksum, 'unsigned'), applied_at), ', ' ORDER BY version)
FROM batch_job_migration`)
}

// refused expects an error that says so, and that no repetition would help.
func refused(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("got %v, want %q", err, want)
	}
	if Transient(err) {
		t.Errorf("%q would be repeated", err)
	}
}

func TestMigrationFilesAreNumberedWithoutGaps(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		names []string
		want  string // "": no error
	}{
		{[]string{"0001_runs.sql"}, ""},
		{[]string{"0001_runs.sql", "0002_items.sql", "0003_more_items2.sql", "README.md", "old/0001_x.sql"}, ""},
		{[]string{"0001_runs.sql", "0003_items.sql"}, "number 2 is missing"},
		{[]string{"0002_items.sql"}, "number 1 is missing"},
		{[]string{"0000_runs.sql", "0001_items.sql"}, "number 1 is missing"},
		{[]string{"0001_runs.sql", "0001_items.sql"}, "number 2 is missing"},
		{[]string{"0001_runs.sql", "2_items.sql"}, "2_items.sql: the name must be"},
		{[]string{"0001_runs.sql", "00002_items.sql"}, "the name must be"},
		{[]string{"0001-runs.sql"}, "the name must be"},
		{[]string{"0001_Runs.sql"}, "the name must be"},
		{[]string{"0001_.sql"}, "the name must be"},
	} {
		files := fstest.MapFS{}
		for _, name := range c.names {
			files[name] = &fstest.MapFile{Data: []byte("SELECT 1")}
		}
		all, err := Migrations(files)
		switch {
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%v: got %v, want %q", c.names, err, c.want)
		case c.want == "" && (err != nil || all[0].Version != 1 || all[0].Name != "0001_runs.sql" || all[0].SQL != "SELECT 1" || len(all[0].Checksum) != 64):
			t.Errorf("%v: got %+v, %v", c.names, all, err)
		}
	}
}

func TestMigrationsAreAppliedOnceInOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	name, file := next(t, "ALTER TABLE batch_job_run ADD COLUMN later integer", false)
	all := released(t, file)
	applied, err := up(t, db.Pool, all)
	if err != nil || len(applied) != len(all) || applied[len(all)-1] != name || !slices.IsSorted(applied) {
		t.Fatalf("applied %v, %v", applied, err)
	}
	before := versions(t, db.Pool)
	for _, m := range all {
		if !strings.Contains(before, m.Name+" f "+m.Checksum) {
			t.Errorf("%s is not recorded with its checksum: %s", m.Name, before)
		}
	}
	if again, err := up(t, db.Pool, all); err != nil || again != nil {
		t.Errorf("again: %v, %v", again, err)
	}
	if after := versions(t, db.Pool); after != before {
		t.Errorf("the second time changed %s to %s", before, after)
	}
}

func TestEditedMigrationIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	all := released(t, nil)
	mustUp(t, db.Pool, all)
	before := versions(t, db.Pool)
	edited, err := Migrations(fstest.MapFS{all[0].Name: &fstest.MapFile{Data: []byte(all[0].SQL + "-- a remark\n")}})
	if err != nil {
		t.Fatal(err)
	}
	_, file := next(t, "CREATE TABLE never (x int)", false)
	edited = append(edited, released(t, file)[1:]...)
	_, err = up(t, db.Pool, edited)
	refused(t, err, all[0].Name+" was applied with other contents")
	_, err = New("public").Verify(t.Context(), db.Pool, edited)
	refused(t, err, all[0].Name+" was applied with other contents")
	if after := versions(t, db.Pool); after != before {
		t.Errorf("changed %s to %s", before, after)
	}
}

func TestGapInTheAppliedVersionsIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	all := released(t, nil)
	mustUp(t, db.Pool, all)
	exec(t, db.Pool, fmt.Sprintf(`INSERT INTO batch_job_migration (version, name, incompatible) VALUES (%d, 'x', false)`, len(all)+2))
	want := fmt.Sprintf("migration %d is applied but %d is not", len(all)+2, len(all)+1)
	_, err := up(t, db.Pool, all)
	refused(t, err, want)
	_, err = New("public").Verify(t.Context(), db.Pool, all)
	refused(t, err, want)
}

func TestOldBinaryAcceptsACompatibleNewerSchemaOnly(t *testing.T) {
	t.Parallel()
	for _, incompatible := range []bool{false, true} {
		t.Run(fmt.Sprintf("incompatible=%t", incompatible), func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			name, file := next(t, "ALTER TABLE batch_job_run ADD COLUMN later integer", incompatible)
			mustUp(t, db.Pool, released(t, file))
			before := versions(t, db.Pool)

			old := released(t, nil)
			applied, err := up(t, db.Pool, old)
			problems, verr := New("public").Verify(t.Context(), db.Pool, old)
			if incompatible {
				refused(t, err, name+" is incompatible with this binary")
				refused(t, verr, name+" is incompatible with this binary")
			} else if err != nil || applied != nil || verr != nil || problems != nil {
				t.Errorf("migrate %v, %v; verify %v, %v", applied, err, problems, verr)
			}
			if after := versions(t, db.Pool); after != before {
				t.Errorf("changed %s to %s", before, after)
			}
		})
	}
}

func TestFailedMigrationLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, sql, want string }{
		{"error", "CREATE TABLE half (x int); SELECT 1/0", "division by zero"},
		{"no record", "CREATE TABLE half (x int); DELETE FROM batch_job_migration; SELECT 1", "does not record itself"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			name, file := next(t, c.sql, false)
			if c.name == "no record" {
				file[name] = "CREATE TABLE half (x int)"
			}
			applied, err := up(t, db.Pool, released(t, file))
			refused(t, err, c.want)
			if !strings.Contains(err.Error(), name) {
				t.Errorf("%q does not name %s", err, name)
			}
			if n := len(released(t, nil)); len(applied) != n || query[int](t, db.Pool, `SELECT count(*)::int FROM batch_job_migration`) != n {
				t.Errorf("applied %v: %s", applied, versions(t, db.Pool))
			}
			if query[bool](t, db.Pool, `SELECT to_regclass('half') IS NOT NULL`) {
				t.Error("a half of the file is left")
			}
			// The corrected file goes through.
			_, file = next(t, "CREATE TABLE half (x int)", false)
			if applied, err := up(t, db.Pool, released(t, file)); err != nil || len(applied) != 1 {
				t.Errorf("corrected: %v, %v", applied, err)
			}
		})
	}
}

// A file that another migrator applied gets its checksum from MigrateNext, not from Verify.
func TestFilesOfOtherMigratorsAreSignedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t) // plain SQL
	all := released(t, nil)
	before := versions(t, db.Pool)
	if problems, err := New("public").Verify(t.Context(), db.Pool, all); err != nil || problems != nil {
		t.Errorf("verify: %v, %v", problems, err)
	}
	if after := versions(t, db.Pool); after != before || !strings.Contains(before, "unsigned") {
		t.Errorf("verify changed %s to %s", before, after)
	}
	if applied, err := up(t, db.Pool, all); err != nil || applied != nil {
		t.Errorf("migrate: %v, %v", applied, err)
	}
	want := before
	for _, m := range all {
		want = strings.Replace(want, "unsigned", m.Checksum, 1)
	}
	if after := versions(t, db.Pool); after != want {
		t.Errorf("migrate changed %s to %s", before, after)
	}
}

// What Verify expects is read from the text of the files: it must be all there is.
func TestVerifyExpectsEveryColumn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	have, err := New("public").columns(t.Context(), db.Pool)
	if err != nil {
		t.Fatal(err)
	}
	want := expected(released(t, nil))
	order := func(a, b column) int { return strings.Compare(a.Table+" "+a.Name, b.Table+" "+b.Name) }
	slices.SortFunc(have, order)
	slices.SortFunc(want, order)
	if !slices.Equal(have, want) {
		t.Errorf("the database has\n%v\nVerify expects\n%v", have, want)
	}
	for _, c := range seed {
		if !slices.Contains(have, c) {
			t.Errorf("the tables do not have %v", c)
		}
	}
}

// A process that falls silent inside a migration, paused or cut off, does not
// keep the table from its neighbours: the server ends its transaction.
func TestSilentMigrationIsEndedByTheServer(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	proxy := pgtest.NewProxy(t, db.URL)
	proxy.Hold("set checksum")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conn, err := pgx.Connect(ctx, proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	all := released(t, nil)
	const lock = 50 * time.Millisecond
	go func() {
		_, err := New("public").MigrateNext(ctx, conn, all, lock)
		done <- err
	}()
	inside := func() bool {
		return query[int](t, db.Pool, `SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) > 0
	}
	wait := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	wait("the migration is inside", func() bool { return proxy.Held() == 1 && inside() })

	other, err := db.Pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, err = New("public").MigrateNext(ctx, other.Conn(), all, lock)
	other.Release()
	if err == nil || !strings.Contains(err.Error(), "another migration of schema public is under way") || !Transient(err) {
		t.Errorf("beside a silent migration: %v", err)
	}

	wait("the server ends the silent migration", func() bool { return !inside() })
	if applied, err := up(t, db.Pool, all); err != nil || len(applied) != len(all) {
		t.Errorf("after it: %v, %v", applied, err)
	}
	proxy.Release()
	if err := <-done; err == nil || !Transient(err) {
		t.Errorf("the silent one: %v", err)
	}
}
