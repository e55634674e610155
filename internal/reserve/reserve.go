// Package reserve keeps one connection of a pool back while jobs run, so that
// jobs that use up the pool cannot starve the heartbeats and results that prove
// them alive.
package reserve

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// patience is how long Do waits for a connection of the pool while the kept one
// is busy, before it queues for the kept one.
const patience = 100 * time.Millisecond

// Reserve is a pool together with the connection that is kept back. Between the
// first Open and the last Close it holds that connection.
type Reserve struct {
	pool  *pgxpool.Pool
	users atomic.Int64
	ready atomic.Bool   // conn is set
	turn  chan struct{} // holds one token; whoever has taken it owns conn
	conn  *pgx.Conn
	free  func() // gives conn back
	had   bool   // there was one since the first Open: jobs may have its place by now
}

// New returns a Reserve that holds nothing yet.
func New(pool *pgxpool.Pool) *Reserve {
	r := &Reserve{pool: pool, turn: make(chan struct{}, 1)}
	r.turn <- struct{}{}
	return r
}

// Open returns when a connection is kept back; it stays so until the matching
// Close. After an error there is nothing to close.
func (r *Reserve) Open(ctx context.Context) error {
	r.users.Add(1)
	if r.ready.Load() {
		return nil
	}
	select {
	case <-r.turn:
	case <-ctx.Done():
		r.Close()
		return r.exhausted(ctx.Err())
	}
	_, err := r.kept(ctx)
	r.pass()
	if err != nil {
		r.Close()
	}
	return err
}

// Close ends one Open. The last one gives the connection back to the pool.
func (r *Reserve) Close() {
	if r.users.Add(-1) == 0 {
		r.release()
	}
}

// Do calls fn with a connection: the kept one if it is idle, else one of the
// pool, else the kept one when its turn comes. It waits no longer than ctx.
func (r *Reserve) Do(ctx context.Context, fn func(*pgx.Conn) error) error {
	select {
	case <-r.turn:
		return r.doKept(ctx, fn)
	default:
	}
	if tried, err := r.doPool(ctx, fn); tried {
		return err
	}
	select {
	case <-r.turn:
		return r.doKept(ctx, fn)
	case <-ctx.Done():
		return r.exhausted(ctx.Err())
	}
}

// Borrow is Do for what must not delay heartbeats and results: it takes the kept
// connection, and tells fn so, only at a moment when nobody has it or waits for
// it.
func (r *Reserve) Borrow(ctx context.Context, fn func(conn *pgx.Conn, kept bool) error) error {
	for {
		select {
		case <-r.turn:
			return r.doKept(ctx, func(conn *pgx.Conn) error { return fn(conn, true) })
		default:
		}
		if tried, err := r.doPool(ctx, func(conn *pgx.Conn) error { return fn(conn, false) }); tried {
			return err
		}
		if ctx.Err() != nil {
			return r.exhausted(ctx.Err())
		}
	}
}

// Acquire takes a connection of the pool for work that may last, never the kept
// one, and waits for it at most limit.
func (r *Reserve) Acquire(ctx context.Context, limit time.Duration) (*pgxpool.Conn, error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := r.pool.Acquire(limited)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("%w (one is kept free for heartbeats; an open query, such as that of FromRows, holds another)", r.exhausted(err))
	}
	return conn, err
}

// doPool calls fn with a connection of the pool, if one can be had soon.
func (r *Reserve) doPool(ctx context.Context, fn func(*pgx.Conn) error) (tried bool, err error) {
	short, cancel := context.WithTimeout(ctx, patience)
	conn, err := r.pool.Acquire(short)
	cancel()
	if err == nil {
		defer conn.Release()
		return true, use(ctx, conn.Conn(), fn)
	}
	// Not exhausted: the database cannot be reached.
	return ctx.Err() == nil && short.Err() == nil, err
}

// doKept calls fn with the kept connection; the caller has taken the turn.
func (r *Reserve) doKept(ctx context.Context, fn func(*pgx.Conn) error) error {
	defer r.pass()
	conn, err := r.kept(ctx)
	if err != nil {
		return err
	}
	return use(ctx, conn, fn)
}

// use calls fn and closes a connection whose session turned out to be read-only:
// it leads to a server that was demoted, or keeps that setting for ever, so the
// next try needs another one.
func use(ctx context.Context, conn *pgx.Conn, fn func(*pgx.Conn) error) error {
	err := fn(conn)
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "25006" {
		_ = conn.Close(ctx)
	}
	return err
}

// kept returns the kept connection, or a new one if it is missing or broken. The
// caller has taken the turn. If jobs have used up the pool meanwhile, the new one
// is made beside it: the place of the broken one went to whoever waited first.
func (r *Reserve) kept(ctx context.Context) (*pgx.Conn, error) {
	if r.conn != nil && !r.conn.IsClosed() {
		return r.conn, nil
	}
	r.had = r.had || r.conn != nil
	r.drop()
	replace := r.had
	wait, cancel := ctx, context.CancelFunc(func() {})
	if replace {
		wait, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	pooled, err := r.pool.Acquire(wait)
	switch {
	case err == nil:
		r.conn, r.free = pooled.Conn(), pooled.Release
	case replace && wait.Err() != nil && ctx.Err() == nil:
		if r.conn, err = r.dial(ctx); err != nil {
			return nil, err
		}
		conn := r.conn
		r.free = func() { _ = conn.Close(context.Background()) } //nolint:contextcheck // outlives the call
	case ctx.Err() != nil:
		return nil, r.exhausted(err)
	default:
		return nil, err
	}
	r.ready.Store(true)
	return r.conn, nil
}

// dial connects as the pool does.
func (r *Reserve) dial(ctx context.Context) (*pgx.Conn, error) {
	config := r.pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err == nil && config.AfterConnect != nil {
		if err = config.AfterConnect(ctx, conn); err != nil {
			_ = conn.Close(ctx)
		}
	}
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// drop gives the kept connection back, if there is one. The caller has taken the
// turn. The pool destroys a closed connection.
func (r *Reserve) drop() {
	r.ready.Store(false)
	if r.conn != nil {
		r.free()
		r.conn, r.free = nil, nil
	}
}

// pass gives the turn back, and the connection too when nobody needs it any more.
func (r *Reserve) pass() {
	r.turn <- struct{}{}
	if r.users.Load() == 0 {
		r.release()
	}
}

// release gives the kept connection back to the pool unless somebody has the
// turn, who then does it in pass.
func (r *Reserve) release() {
	select {
	case <-r.turn:
	default:
		return
	}
	// In this order: an Open from now on either is counted here, or finds that
	// nothing is kept and waits for the turn.
	r.ready.Store(false)
	if r.users.Load() == 0 {
		r.drop()
		r.had = false
	} else {
		r.ready.Store(r.conn != nil)
	}
	r.turn <- struct{}{}
	if r.users.Load() == 0 && r.ready.Load() { // somebody came and went meanwhile
		r.release()
	}
}

// ErrExhausted says that all connections of the pool were in use for too long.
var ErrExhausted = errors.New("no connection in time")

// exhausted says why no connection could be had, unless the caller gave up: all are in
// use, or the server is silent.
func (r *Reserve) exhausted(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	s := r.pool.Stat()
	if s.AcquiredConns() < s.MaxConns() {
		return fmt.Errorf("no answer from the database in time: %w", err)
	}
	return fmt.Errorf("%w, %d of at most %d in use: %w", ErrExhausted, s.AcquiredConns(), s.MaxConns(), err)
}
