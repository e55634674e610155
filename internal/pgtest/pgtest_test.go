package pgtest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func mustExec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t *testing.T, pool *pgxpool.Pool, sql string) int {
	t.Helper()
	var n int
	if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

const userTables = "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"

func TestDatabasesAreIsolated(t *testing.T) {
	var mu sync.Mutex
	names := map[string]bool{}
	t.Run("all", func(t *testing.T) {
		for i := range 6 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				db := New(t)
				if count(t, db.Pool, userTables) == 0 {
					t.Error("the migrations are missing")
				}
				mustExec(t, db.Pool, "CREATE TABLE mine (n int)") // fails where another test's is
				mustExec(t, db.Pool, "INSERT INTO mine VALUES (1)")
				if n := count(t, db.Pool, "SELECT count(*) FROM mine"); n != 1 {
					t.Errorf("%d rows, want 1", n)
				}
				mu.Lock()
				defer mu.Unlock()
				names[db.Name] = true
			})
		}
	})
	if len(names) != 6 {
		t.Errorf("6 tests had the databases %v", names)
	}
}

func TestEmptyHasNoTables(t *testing.T) {
	t.Parallel()
	if n := count(t, Empty(t).Pool, userTables); n != 0 {
		t.Errorf("%d tables", n)
	}
}

func TestDatabaseIsDropped(t *testing.T) {
	var db *DB
	t.Run("user", func(t *testing.T) {
		db = New(t)
		mustExec(t, db.PoolWith(t, nil), "SELECT 1")
		forgotten, err := pgx.Connect(t.Context(), db.URL)
		if err != nil {
			t.Fatal(err)
		}
		_ = forgotten // the drop does not wait for it
	})
	if n := count(t, Empty(t).Pool, "SELECT count(*) FROM pg_database WHERE datname = '"+db.Name+"'"); n != 0 {
		t.Errorf("%s is still there", db.Name)
	}
	if err := db.Pool.Ping(t.Context()); err == nil {
		t.Error("the pool is still open")
	}
}

func TestPoolWith(t *testing.T) {
	t.Parallel()
	db := New(t)
	pool := db.PoolWith(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.RuntimeParams["application_name"] = "second"
	})
	var name string
	if err := pool.QueryRow(t.Context(), "SHOW application_name").Scan(&name); err != nil || name != "second" {
		t.Errorf("application_name is %q, %v", name, err)
	}
	if got := pool.Config().MaxConns; got != 1 {
		t.Errorf("%d connections at most, want 1", got)
	}
}

func TestRole(t *testing.T) {
	db := New(t)
	var name string
	t.Run("user", func(t *testing.T) {
		var url string
		name, url = db.Role(t, "NOINHERIT CONNECTION LIMIT 3")
		mustExec(t, db.Pool, "GRANT CREATE ON SCHEMA public TO "+name)
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		var user string
		if err := conn.QueryRow(t.Context(), "SELECT current_user").Scan(&user); err != nil || user != name {
			t.Errorf("connected as %q, %v, want %q", user, err, name)
		}
		if _, err := conn.Exec(t.Context(), "CREATE TABLE public.theirs (n int)"); err != nil {
			t.Error(err)
		}
	})
	if n := count(t, db.Pool, "SELECT count(*) FROM pg_roles WHERE rolname = '"+name+"'"); n != 0 {
		t.Errorf("%s is still there", name)
	}
	if n := count(t, db.Pool, "SELECT count(*) FROM pg_class WHERE relname = 'theirs'"); n != 0 {
		t.Error("its table is still there")
	}
}

func BenchmarkNew(b *testing.B) {
	New(b) // the server and the template
	for b.Loop() {
		sharedCluster(b).newDBThenDrop(b)
	}
}

func (c *cluster) newDBThenDrop(b *testing.B) {
	name, template := uniqueName("db"), c.created
	if err := c.create(b.Context(), name, template); err != nil {
		b.Fatal(err)
	}
	if err := c.drop(name); err != nil {
		b.Fatal(err)
	}
}
