package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/migrations"
)

// Bounds of tidying up after a test: for what the server does, and for the test's own connections to come back.
const (
	cleanupTimeout = 60 * time.Second
	closeTimeout   = 10 * time.Second
)

// A DB is a database of one test's own.
type DB struct {
	Name string
	URL  string
	Pool *pgxpool.Pool // up to 16 connections, opened as they are needed
}

// New returns a database with all migrations applied. It is dropped when the test ends. Tests that call it may run in
// parallel.
func New(t testing.TB) *DB {
	t.Helper()
	c := sharedCluster(t)
	template, err := c.template()
	if err != nil {
		t.Fatalf("pgtest: template database: %v", err)
	}
	return c.newDB(t, template)
}

// Empty returns a database without the migrations. It is dropped when the test ends.
func Empty(t testing.TB) *DB {
	t.Helper()
	return sharedCluster(t).newDB(t, "template0")
}

// PoolWith returns a further pool on the database, closed when the test ends. Set, which may be nil, changes its
// configuration: its size, its user, its exec mode. Behind a pooler in transaction mode it skips t if that mode
// prepares statements.
func (db *DB) PoolWith(t testing.TB, set func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	config.MaxConns = 16
	if set != nil {
		set(config)
	}
	if mode := config.ConnConfig.DefaultQueryExecMode; mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol {
		NeedsSessions(t)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatalf("pgtest: pool: %v", err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

// Role creates a role that can log in, with further attributes such as "NOINHERIT" or "", and returns its name and the
// URL under which it connects to the database. When the test ends it is dropped with all that it owns there.
func (db *DB) Role(t testing.TB, attrs string) (name, roleURL string) {
	t.Helper()
	c := sharedCluster(t)
	name, password := uniqueName("role"), uniqueName("password") // a server that was running already may ask for one
	sql := fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s' %s; GRANT %s TO CURRENT_USER", name, password, attrs, name)
	if _, err := c.admin.Exec(t.Context(), sql); err != nil { // without the GRANT only a superuser can drop what it owns
		t.Fatalf("pgtest: create role: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := dropRole(ctx, db.URL, name); err != nil {
			t.Errorf("pgtest: drop role %s: %v", name, err)
		}
	})
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	u.User = url.UserPassword(name, password)
	return name, withoutParameters(u, "user", "password")
}

// withoutParameters returns the URL without parameters that would override its other parts.
func withoutParameters(u *url.URL, names ...string) string {
	query := u.Query()
	for _, name := range names {
		query.Del(name)
	}
	u.RawQuery = query.Encode()
	return u.String()
}

func dropRole(ctx context.Context, dbURL, name string) error {
	conn, err := pgx.Connect(ctx, dbURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	sql := fmt.Sprintf(`
		SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '%[1]s';
		DROP OWNED BY %[1]s;
		DROP ROLE %[1]s`, name)
	return conn.PgConn().Exec(ctx, sql).Close()
}

// A cluster is the server that all tests of this process share.
type cluster struct {
	server   *Server
	admin    *pgxpool.Pool
	template func() (string, error) // creates it at the first call
	created  string                 // the template, once there is one
}

// shared starts the cluster at the first call; started is that cluster, for Main to stop.
var (
	shared  = sync.OnceValues(startCluster)
	started *cluster
)

func sharedCluster(t testing.TB) *cluster {
	t.Helper()
	c, err := shared()
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return c
}

func startCluster() (*cluster, error) {
	ctx := context.Background()
	server, err := Start(ctx, Options{})
	if err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(server.url.String())
	if err != nil {
		server.Stop()
		return nil, err
	}
	config.MaxConns = 8
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // nothing here is worth preparing
	admin, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		server.Stop()
		return nil, err
	}
	c := &cluster{server: server, admin: admin}
	c.template = sync.OnceValues(c.createTemplate)
	started = c
	return c, nil
}

// stop removes what the cluster has left once all tests have ended.
func (c *cluster) stop() error {
	var err error
	if c.created != "" && c.server.cmd == nil { // else it goes with the server
		err = c.drop(c.created)
	}
	c.admin.Close()
	c.server.Stop()
	return err
}

// createTemplate creates the database that New clones.
func (c *cluster) createTemplate() (name string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	name = uniqueName("template")
	if err := c.create(ctx, name, "template0"); err != nil {
		return "", err
	}
	if err := migrate(ctx, c.server.URL(name)); err != nil {
		return "", errors.Join(err, c.drop(name))
	}
	c.created = name
	return name, nil
}

// migrate executes the files in the order of their numbers, each whole: the server makes one transaction of it.
func migrate(ctx context.Context, dbURL string) error {
	conn, err := pgx.Connect(ctx, dbURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }() // nobody can clone the database before that
	files, err := fs.Glob(migrations.FS, "[0-9]*.sql")
	if err != nil {
		return err
	}
	for _, file := range files {
		sql, err := fs.ReadFile(migrations.FS, file)
		if err != nil {
			return err
		}
		if err := conn.PgConn().Exec(ctx, string(sql)).Close(); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func (c *cluster) newDB(t testing.TB, template string) *DB {
	t.Helper()
	name := uniqueName("db")
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := c.create(ctx, name, template); err != nil {
		t.Fatalf("pgtest: create database: %v", err)
	}
	t.Cleanup(func() {
		if err := c.drop(name); err != nil {
			t.Errorf("pgtest: drop database: %v", err)
		}
	})
	db := &DB{Name: name, URL: c.server.URL(name)}
	if pooler() != "" {
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
			defer cancel()
			if err := db.nothingLeft(ctx); err != nil && !t.Skipped() {
				t.Errorf("pgtest: %v", err)
			}
		})
	}
	db.Pool = db.PoolWith(t, nil)
	return db
}

func (c *cluster) create(ctx context.Context, name, template string) error {
	_, err := c.admin.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
	return err
}

// drop drops a database. A user who is no superuser may not terminate the sessions of another's (autovacuum, a role that
// was dropped): those end by themselves.
func (c *cluster) drop(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	for {
		_, err := c.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != "42501" { // insufficient_privilege
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// closePool closes the pool. A connection that the test still holds would make Close wait for ever: that fails the test.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
		t.Errorf("pgtest: the test ended with %d connections of its pool in use", pool.Stat().AcquiredConns())
	}
}
