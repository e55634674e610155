package reserve

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// gate holds the first release of a connection until it is opened.
type gate struct {
	armed       atomic.Bool
	in, through chan struct{}
}

func (g *gate) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (g *gate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (g *gate) TraceRelease(*pgxpool.Pool, pgxpool.TraceReleaseData) {
	if g.armed.Swap(false) {
		close(g.in)
		<-g.through
	}
}

func TestOpenBesideTheLastCloseKeepsAConnection(t *testing.T) {
	db := pgtest.New(t)
	g := &gate{in: make(chan struct{}), through: make(chan struct{})}
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 2; c.ConnConfig.Tracer = g })
	r := New(pool)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := r.Open(ctx); err != nil {
		t.Fatal(err)
	}
	g.armed.Store(true)
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }()
	<-g.in
	opened := make(chan error)
	go func() { opened <- r.Open(ctx) }()
	close(g.through)
	<-closed
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	one, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if n := pool.Stat().AcquiredConns(); n != 2 {
		t.Errorf("%d connections in use, want the kept one and ours", n)
	}
	if err := r.Do(ctx, func(conn *pgx.Conn) error { return conn.Ping(ctx) }); err != nil {
		t.Errorf("the kept connection: %v", err)
	}
	one.Release()
	r.Close()
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections not returned", n)
	}
}

// The kept connection dies while the job holds the rest of the pool, and the
// first attempt to replace it is refused: the next one must not queue behind the
// job.
func TestKeptConnectionIsReplacedAfterARefusedAttempt(t *testing.T) {
	db := pgtest.New(t)
	p := pgtest.NewProxy(t, db.URL)
	config, err := pgxpool.ParseConfig(p.URL())
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 2
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	r := New(pool)
	if err := r.Open(ctx); err != nil {
		t.Fatal(err)
	}
	job, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ping := func(conn *pgx.Conn) error { return conn.Ping(ctx) }
	p.RefuseNew(true)
	p.CutAll()
	for range 2 { // the first finds the connection dead, the second cannot have another
		if err := r.Do(ctx, ping); err == nil {
			t.Fatal("a refused server answered")
		}
	}
	job.Release() // dead too: its place is free
	p.RefuseNew(false)
	for range 2 { // and the job takes all places there are
		conn, err := pool.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	if err := r.Do(ctx, ping); err != nil {
		t.Errorf("beside the exhausted pool: %v", err)
	}
	r.Close()
	if n := pool.Stat().AcquiredConns(); n != 2 {
		t.Errorf("%d connections in use, want the job's 2", n)
	}
}
