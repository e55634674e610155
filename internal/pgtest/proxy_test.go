package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// throughProxy returns a database with the table t, a proxy for it and a pool of one connection through the proxy.
func throughProxy(t *testing.T, mode pgx.QueryExecMode) (*DB, *Proxy, *pgxpool.Pool) {
	t.Helper()
	db := Empty(t)
	mustExec(t, db.Pool, "CREATE TABLE t (n int)")
	p := NewProxy(t, db.URL)
	pool := (&DB{URL: p.URL()}).PoolWith(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.DefaultQueryExecMode = mode
	})
	return db, p, pool
}

const insert = "INSERT INTO t VALUES ($1::int)"

func insertRow(t *testing.T, pool *pgxpool.Pool, n int) error {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := pool.Exec(ctx, insert, n)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("the connection was not cut")
	}
	return err
}

func TestCutsInEveryExecMode(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db, p, pool := throughProxy(t, mode)
			for _, c := range []struct {
				name string
				warm bool // the statement was executed, hence prepared, on this connection before
				arm  func(string)
				rows int
			}{
				{"before", false, p.CutBefore, 0},
				{"before, warm", true, p.CutBefore, 0},
				{"after", false, p.CutAfter, 1},
				{"after, warm", true, p.CutAfter, 1},
			} {
				t.Run(c.name, func(t *testing.T) {
					if c.warm {
						if err := insertRow(t, pool, 0); err != nil {
							t.Fatal(err)
						}
					}
					mustExec(t, db.Pool, "TRUNCATE t")
					cuts, executed := p.Cuts(), p.Statements("insert")
					c.arm("insert into T")
					if err := insertRow(t, pool, 1); err == nil {
						t.Error("the client got no error")
					}
					if n := p.Cuts() - cuts; n != 1 {
						t.Errorf("%d cuts, want 1", n)
					}
					if n := p.Statements("insert") - executed; n != c.rows {
						t.Errorf("%d executions passed on, want %d", n, c.rows)
					}
					if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != c.rows {
						t.Errorf("%d rows, want %d", n, c.rows)
					}
					if err := insertRow(t, pool, 2); err != nil {
						t.Errorf("the fault struck twice: %v", err)
					}
				})
			}
		})
	}
}

func TestCutCommit(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	for i, c := range []struct {
		arm  func(string)
		rows int
	}{{p.CutBefore, 0}, {p.CutAfter, 1}} {
		mustExec(t, db.Pool, "TRUNCATE t")
		c.arm("commit")
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), insert, 1)
			return err
		})
		if err == nil {
			t.Error("the client got no error")
		}
		if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != c.rows {
			t.Errorf("%d: %d rows, want %d", i, n, c.rows)
		}
	}
}

// What the client has sent behind the statement does not reach the server.
func TestCutAfterInAPipeline(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeExec)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	p.CutAfter("insert")
	pipeline := conn.Conn().PgConn().StartPipeline(t.Context())
	for n := range 3 {
		pipeline.SendQueryParams(fmt.Sprintf("INSERT INTO t VALUES (%d)", n), nil, nil, nil, nil)
		if err := pipeline.Sync(); err != nil {
			break // already cut
		}
	}
	if err := pipeline.Close(); err == nil {
		t.Error("the client got no error")
	}
	if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}

func TestCutAfterCopy(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	p.CutAfter("copy")
	rows := make([][]any, 1000)
	for i := range rows {
		rows[i] = []any{int32(i)}
	}
	if _, err := pool.CopyFrom(t.Context(), pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows(rows)); err == nil {
		t.Error("the client got no error")
	}
	if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != len(rows) {
		t.Errorf("%d rows, want %d", n, len(rows))
	}
}

func TestCutAfterN(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeExec)
	p.CutAfterN("insert", 3)
	failed := 0
	for n := range 5 {
		if insertRow(t, pool, n) != nil {
			failed++
		}
	}
	if rows := count(t, db.Pool, "SELECT count(*) FROM t"); failed != 3 || p.Cuts() != 3 || rows != 5 {
		t.Errorf("%d failed, %d cuts, %d rows, want 3, 3, 5", failed, p.Cuts(), rows)
	}
}

func TestHoldUntilRelease(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	p.Hold("insert")
	done := make(chan error, 1)
	go func() {
		_, err := pool.Exec(t.Context(), insert, 1)
		done <- err
	}()
	waitFor(t, "held", func() bool { return p.Held() == 1 })
	if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != 0 {
		t.Errorf("%d rows while held", n)
	}
	select {
	case err := <-done:
		t.Errorf("the client heard something: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	p.Release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := count(t, db.Pool, "SELECT count(*) FROM t"); n != 1 || p.Held() != 0 {
		t.Errorf("%d rows, %d held after Release", n, p.Held())
	}
}

// The server does not learn that the client of a held connection has gone, nor the client that the server has.
func TestHoldHidesTheEndOfTheOtherSide(t *testing.T) {
	t.Parallel()
	db, p, pool := throughProxy(t, pgx.QueryExecModeExec)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	backend := conn.Conn().PgConn().PID()
	p.Hold("insert")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := conn.Exec(ctx, insert, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	conn.Release()
	alive := fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", backend)
	if n := count(t, db.Pool, alive); n != 1 {
		t.Errorf("%d sessions while held, want 1", n)
	}
	p.CutAll()
	waitFor(t, "the session ends", func() bool { return count(t, db.Pool, alive) == 0 })
}

func TestRefuseNew(t *testing.T) {
	t.Parallel()
	_, p, pool := throughProxy(t, pgx.QueryExecModeExec)
	if err := insertRow(t, pool, 1); err != nil {
		t.Fatal(err)
	}
	p.RefuseNew(true)
	if err := insertRow(t, pool, 2); err != nil {
		t.Errorf("an old connection was cut: %v", err)
	}
	if conn, err := pgx.Connect(t.Context(), p.URL()); err == nil {
		conn.Close(t.Context())
		t.Error("a new connection was accepted")
	}
	p.CutAll()
	if p.Cuts() != 1 {
		t.Errorf("%d cuts, want 1", p.Cuts())
	}
	if err := insertRow(t, pool, 3); err == nil {
		t.Error("the pool found another way")
	}
	p.RefuseNew(false)
	if err := insertRow(t, pool, 4); err != nil {
		t.Error(err)
	}
	if n := p.Statements("insert"); n != 3 {
		t.Errorf("%d inserts passed on, want 3", n)
	}
}

func TestCancelRequestPasses(t *testing.T) {
	t.Parallel()
	_, p, _ := throughProxy(t, pgx.QueryExecModeExec)
	conn, err := pgx.Connect(t.Context(), p.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), "SELECT pg_sleep(60)")
		done <- err
	}()
	waitFor(t, "the statement is under way", func() bool { return p.Statements("pg_sleep") == 1 })
	for { // a request that is there before the statement has no effect
		if err := conn.PgConn().CancelRequest(t.Context()); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			var pgErr *pgconn.PgError
			if !errors.As(err, &pgErr) || pgErr.Code != "57014" {
				t.Errorf("got %v, want query_canceled", err)
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func TestLargeMessagesPass(t *testing.T) {
	t.Parallel()
	_, _, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	large := strings.Repeat("x", 3<<20)
	var back string
	if err := pool.QueryRow(t.Context(), "SELECT $1::text", large).Scan(&back); err != nil || back != large {
		t.Errorf("%d bytes came back, %v", len(back), err)
	}
}

func TestDelayAndDisarm(t *testing.T) {
	t.Parallel()
	_, p, pool := throughProxy(t, pgx.QueryExecModeSimpleProtocol)
	p.CutAfter("select 1")
	p.CutBeforeN("select 1", 3)
	p.Disarm()
	slow := func() time.Duration {
		t.Helper()
		begin := time.Now()
		if _, err := pool.Exec(t.Context(), "SELECT 1"); err != nil {
			t.Fatal(err)
		}
		return time.Since(begin)
	}
	slow()
	p.Delay(100 * time.Millisecond) // there and back
	if took := slow(); took < 200*time.Millisecond {
		t.Errorf("the answer took only %s", took)
	}
	p.Delay(0)
	slow()
	if len(p.Struck()) != 0 {
		t.Errorf("struck: %v", p.Struck())
	}
	p.CutAfter("Select 1")
	if _, err := pool.Exec(t.Context(), "SELECT 1"); err == nil || p.Struck()["cut after select 1"] != 1 {
		t.Errorf("%v, struck: %v", err, p.Struck())
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after 60 s: %s", what)
		}
	}
}

func FuzzMessages(f *testing.F) {
	f.Add([]byte("Q\x00\x00\x00\x0dSELECT 1\x00"))
	f.Add([]byte("P\x00\x00\x00\x10s\x00SELECT 1\x00\x00\x00B\x00\x00\x00\x08p\x00s\x00E\x00\x00\x00\x06p\x00"))
	f.Add([]byte("E\x00\x00\x00\x03"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &proxyConn{prepared: map[string]string{}, portals: map[string]string{}}
		var whole []byte
		for r := bufio.NewReader(bytes.NewReader(data)); ; {
			msg, err := readMessage(r)
			if err != nil {
				break
			}
			whole = append(whole, msg...)
			c.statement(msg)
		}
		if !bytes.HasPrefix(data, whole) {
			t.Errorf("messages %q are not what was sent", whole)
		}
	})
}

func TestRequestsAreCounted(t *testing.T) {
	t.Parallel()
	for mode, want := range map[pgx.QueryExecMode]int{
		pgx.QueryExecModeExec: 3, pgx.QueryExecModeSimpleProtocol: 3, pgx.QueryExecModeCacheStatement: 3,
		pgx.QueryExecModeDescribeExec: 6, // asks for the types of the parameters each time
	} {
		_, p, pool := throughProxy(t, mode)
		if err := insertRow(t, pool, 1); err != nil {
			t.Fatal(err)
		}
		before := p.Requests()
		for n := range 3 {
			if err := insertRow(t, pool, n+2); err != nil {
				t.Fatal(err)
			}
		}
		if got := p.Requests() - before; got != want {
			t.Errorf("%s: %d requests for 3 inserts, want %d", mode, got, want)
		}
	}
}
