package jobrun

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/schema"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Tx calls fn in a transaction on a connection of the Runner's pool and commits
// it only while this attempt holds its run; else all is rolled back and the error
// is ErrLeaseLost. The check is the transaction's last statement: it locks the run
// until the commit, so that nobody can supersede the attempt in between. A later
// attempt repeats the work, unless a checkpoint or a unique key of your own is in
// the same transaction; see Once.
//
// fn may be called again: after a serialization failure or a deadlock (SQLSTATE
// 40001, 40P01) and when it is certain that a COMMIT whose answer was lost did not
// happen, at most 8 times in all; once more after its connection was lost or its
// server had become read-only (25006), as in a failover. What it does outside the
// transaction must bear that. While no server can be reached, Tx waits as long as
// the attempt holds its run; for a connection of a pool that is used up, 30 s
// (Options.Lease if that is shorter). The first statement of fn may set the
// isolation level. It returns nil to commit; its error rolls back and comes back as
// it is. It must not end the transaction, and must return before Tx can: statements
// on tx from other goroutines are not waited for.
//
// A transaction waits for a lock, and the server waits for the process, no longer
// than Options.Lease: a process that stands still cannot hold what it has locked.
// If the answer to COMMIT is lost, its fate is read from the server;
// ErrOutcomeUnknown if that is impossible too.
func (r *Run) Tx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	if fn == nil {
		return &InvalidError{"fn", nil, "a function"}
	}
	_, err := r.runner.book.Tx(ctx, r.held, lease.Tx{
		Work: func(_ context.Context, _ *store.Store, tx pgx.Tx) (bool, error) { return true, fn(tx) },
	})
	return err
}

// Once calls fn in a transaction like Tx's (but with the session's isolation
// level), unless the run's ledger says that the item is done. The item is entered
// in the ledger in the same transaction, so that fn's writes take effect exactly
// once per run, across crashes, retries and re-runs; its error rolls both back. ran
// reports whether this call committed them. There is one ledger per run: what Each
// has done under the same key is done. The item is any text of 1 to 1024 bytes
// without NUL that is valid UTF-8, compared byte by byte; else an [*InvalidError].
func (r *Run) Once(ctx context.Context, item string, fn func(tx pgx.Tx) error) (ran bool, err error) {
	if fn == nil {
		return false, &InvalidError{"fn", nil, "a function"}
	}
	if err := validItem("item", item); err != nil {
		return false, err
	}
	return r.take(ctx, []string{item}, func(_ context.Context, tx pgx.Tx, _ []string) error { return fn(tx) })
}

// take calls fn in a fenced transaction with those of the items that are not done,
// and enters them in the ledger; did is false when all of them are done.
func (r *Run) take(ctx context.Context, items []string, fn func(ctx context.Context, tx pgx.Tx, taken []string) error) (did bool, err error) {
	row := r.held.Row
	var taken []string
	_, err = r.runner.book.Tx(ctx, r.held, lease.Tx{
		Entered: func() int { return len(taken) },
		Work: func(ctx context.Context, s *store.Store, tx pgx.Tx) (bool, error) {
			start := time.Now()
			limited, cancel := context.WithTimeout(ctx, r.runner.opts.Lease+lease.StatementLimit)
			defer cancel()
			var all bool
			var err error
			taken, all, err = s.Take(limited, tx, row, items)
			switch {
			case store.Code(err) == "55P03":
				return false, r.heldBy(ctx, err, time.Since(start))
			case store.Unencodable(err):
				return false, fmt.Errorf("ledger of %s: %w", row.Key, err)
			case err != nil:
				return false, lease.Ours(fmt.Errorf("ledger of %s: %w", row.Key, schema.Explain(err)))
			case all:
				taken = items
			}
			if did = len(taken) > 0; !did {
				return false, nil
			}
			return true, fn(ctx, tx, taken)
		},
		Proof: func(ctx context.Context, s *store.Store, conn *pgx.Conn) (bool, error) {
			return s.AllDone(ctx, conn, row.Key, taken) // some of them may be another transaction's, after this one was undone
		},
	})
	return did && err == nil, err
}

// allDone reports whether the ledger has all of the items; not when it could not
// be read.
func (r *Run) allDone(ctx context.Context, items []string) bool {
	if r.held.Unsure() { // a transaction that finds the same waits for the standby
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := r.runner.tables.Open(ctx, r.runner.pool)
	if err != nil {
		return false
	}
	all, err := s.AllDone(ctx, r.runner.pool, r.Key(), items)
	return all && err == nil
}

// heldBy names the sessions that may hold the item for which a statement has
// waited in vain.
func (r *Run) heldBy(ctx context.Context, err error, waited time.Duration) error {
	var holders []store.Holder
	readErr := r.runner.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		holders, err = s.Holders(ctx, r.runner.pool, waited*9/10)
		return err
	})
	text := "no session with a transaction that old was found"
	switch {
	case readErr != nil:
		text = "who holds the items could not be read: " + errorText(readErr)
	case len(holders) > 0:
		var all []string
		for _, h := range holders {
			all = append(all, fmt.Sprintf("pid %d (user %q, application %q, client %s, %s, transaction open for %s)",
				h.PID, h.User, h.Application, h.Client, h.State, h.Age.Round(time.Millisecond)))
		}
		text = "the items may be held by " + strings.Join(all, ", ")
	}
	return fmt.Errorf("waited %s for the ledger of %s; %s: %w", waited.Round(time.Millisecond), r.Key(), text, err)
}

// Complete is Tx and the end of the run in one commit: fn's writes and SUCCEEDED
// happen together or not at all. fn may be nil. Under REPEATABLE READ and
// SERIALIZABLE it must take less than Options.Lease/4, because a heartbeat in
// between is a serialization failure. Afterwards the Runner writes nothing more:
// fences and further calls return ErrCompleted, and an error that the function
// returns later is reported by Run but does not change the outcome.
func (r *Run) Complete(ctx context.Context, fn func(tx pgx.Tx) error) error {
	if err := r.unfinished(nil); err != nil {
		return err
	}
	row, err := r.runner.book.Tx(ctx, r.held, lease.Tx{
		Work: func(_ context.Context, _ *store.Store, tx pgx.Tx) (bool, error) {
			if fn == nil {
				return true, nil
			}
			return true, fn(tx)
		},
		End: func() store.Outcome {
			return store.Outcome{Status: string(Succeeded), Next: -1, Processed: r.held.Processed.Load(), Failed: r.held.Failed.Load()}
		},
		Proof: func(ctx context.Context, s *store.Store, conn *pgx.Conn) (bool, error) {
			standing, err := s.Standing(ctx, conn, r.held.Row)
			return standing.EndedBy == "WORKER" && standing.Outcome == string(Succeeded), err
		},
	})
	if err == nil {
		r.runner.emit(ctx, Event{Record: r.runner.record(row), Previous: Running})
	}
	return err
}

// Fence is the last statement of a transaction that the caller owns: when it
// returns nil, the transaction can commit, and until then nobody can supersede
// this attempt. After any error the transaction must be rolled back. ErrLeaseLost
// says that the attempt may not act any more, under every isolation level; a
// serialization failure (SQLSTATE 40001) is returned only while it still holds
// its run. It needs the outermost transaction, in the database of the Runner's
// pool: a ROLLBACK TO a savepoint after it would release what it has locked. If you
// end the transaction with a statement of your own, know that COMMIT of a failed
// one rolls back without an error.
//
// From here to the commit, the server waits for the process no longer than 10 s
// (Options.Lease if that is shorter). Set idle_in_transaction_session_timeout and
// lock_timeout at the beginning, as Tx does, so that a process that stands still
// cannot hold locks.
func (r *Run) Fence(ctx context.Context, tx pgx.Tx) error {
	switch {
	case missing(tx):
		return &InvalidError{"tx", nil, "an open transaction"}
	case lease.Nested(tx):
		return &InvalidError{"tx", "a nested transaction", "the outermost one: ROLLBACK TO would release the fence"}
	}
	err := r.runner.book.Fence(ctx, r.held, func(s *store.Store, lock, idle time.Duration) (bool, error) {
		return s.FenceTheirs(ctx, tx, r.held.Row, lock, idle)
	})
	return r.fenced(err)
}

// SQLTx is a transaction of database/sql or of what is built on it: *sql.Tx,
// *sqlx.Tx, and GORM's tx.Statement.ConnPool (tx.ConnPool is the pool beside it).
type SQLTx = store.SQLTx

// FenceSQL is Fence for a transaction of database/sql, with a driver for
// PostgreSQL that takes $1 as a placeholder. A *sql.DB is no transaction: an
// error. When the answer to COMMIT is lost, nobody looks what became of it:
// return the driver's error, and let a unique key of your own tell the next attempt.
func (r *Run) FenceSQL(ctx context.Context, tx SQLTx) error {
	if missing(tx) {
		return &InvalidError{"tx", nil, "an open transaction"}
	}
	err := r.runner.book.Fence(ctx, r.held, func(s *store.Store, lock, idle time.Duration) (bool, error) {
		return s.FenceSQL(ctx, tx, r.held.Row, lock, idle)
	})
	return r.fenced(err)
}

func (r *Run) fenced(err error) error {
	if err == nil {
		return nil
	}
	if store.Code(err) == "42501" {
		err = fmt.Errorf("%w (a fence needs SELECT and UPDATE on batch_job_run)", err)
	}
	return fmt.Errorf("fence of %s attempt %d: %w", r.Key(), r.Attempt(), schema.Explain(err))
}

// missing reports a nil, or an interface that holds one.
func missing(tx any) bool {
	v := reflect.ValueOf(tx)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// maxCheckpoint bounds a checkpoint's JSON text.
const maxCheckpoint = 1 << 20

// Checkpoint decodes the JSON value that SetCheckpoint saved last, in this attempt
// or one before, into v, as [json.Unmarshal] does. It is found until the run
// succeeds: a re-run of a run that had succeeded finds none. A value that does
// not decode into v is an error, and v may then hold a part of it.
func (r *Run) Checkpoint(ctx context.Context, v any) (found bool, err error) {
	var value json.RawMessage
	var attempt int
	err = r.runner.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		value, attempt, found, err = s.Checkpoint(ctx, r.runner.pool, r.Key())
		return err
	})
	if err == nil && r.held.Unsure() {
		err = r.runner.book.Replicated(ctx)
	}
	if err != nil {
		return false, fmt.Errorf("checkpoint of %s: %w", r.Key(), err)
	}
	if !found {
		return false, nil
	}
	if err := json.Unmarshal(value, v); err != nil {
		return false, fmt.Errorf("checkpoint of %s, saved by attempt %d, does not decode into %T: %w", r.Key(), attempt, v, err)
	}
	return true, nil
}

// SetCheckpoint saves v as JSON, at most 1 MiB, in the caller's transaction, in
// place of the value before: that of Tx, Once, Each or Complete, or one that ends
// with Fence. The checkpoint and the work before it commit together.
func (r *Run) SetCheckpoint(ctx context.Context, tx pgx.Tx, v any) error {
	if missing(tx) {
		return &InvalidError{"tx", nil, "an open transaction"}
	}
	value, err := json.Marshal(v)
	switch {
	case err != nil:
		return fmt.Errorf("checkpoint of %s: %w", r.Key(), err)
	case len(value) > maxCheckpoint:
		return &InvalidError{"checkpoint", fmt.Sprintf("%d bytes of JSON", len(value)), fmt.Sprintf("at most %d bytes", maxCheckpoint)}
	}
	err = r.runner.book.Fence(ctx, r.held, func(s *store.Store, _, _ time.Duration) (bool, error) {
		return s.SaveCheckpoint(ctx, tx, r.held.Row, value)
	})
	if err != nil {
		return fmt.Errorf("checkpoint of %s: %w", r.Key(), schema.Explain(err))
	}
	return nil
}

// idempotency is the namespace of IdempotencyKey.
var idempotency = uuid.MustParse("6f1d6a52-3f0b-4c0e-9d0a-5c6f3a1e7b84")

// IdempotencyKey is a UUID to send with calls to the outside for an item, so that
// the receiver can drop a repeat: the same for every attempt and re-run of this
// run, also after ResetItems, when the receiver will drop what it has seen. Nothing
// else is in it: two kinds of calls for one item need two texts, and services that
// share a receiver other names of jobs. It is version 5 (RFC 9562) of the run's key, a zero
// byte and the item, in the namespace 6f1d6a52-3f0b-4c0e-9d0a-5c6f3a1e7b84.
func (r *Run) IdempotencyKey(item string) uuid.UUID {
	return uuid.NewSHA1(idempotency, []byte(r.Key()+"\x00"+item))
}
