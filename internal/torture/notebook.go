//go:build unix

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A notebook writes what the checker reads, straight to the server and never in the
// way of a fault that is aimed at the library.
type notebook struct{ pool *pgxpool.Pool }

func newNotebook(ctx context.Context, url string) (notebook, error) {
	pool, err := open(ctx, url, "log", 4, nil)
	return notebook{pool}, err
}

// write executes a statement whose first argument is a fresh id, which it returns:
// the statement must do nothing when a line of that id is there. It goes on while the
// server is down, for a minute, also when ctx has ended, and is certain of the line
// when it returns.
func (n notebook) write(ctx context.Context, sql string, args ...any) (id string, err error) {
	id = uuid.NewString()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = n.try(ctx, sql, append([]any{id}, args...)...); err == nil {
			return id, nil
		}
	}
	return id, fmt.Errorf("write for the checker: %w", err)
}

// try executes a statement once, also when ctx has ended.
func (n notebook) try(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	_, err := n.pool.Exec(ctx, sql, args...)
	return err
}
