// Package lease is the protocol of one right to run: it establishes claims whose
// answers may be lost, keeps the leases of running attempts alive, and records
// results until they are certain. What a result means is the caller's business.
package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun/internal/reserve"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Limits on the client's side. The server's are shorter, so that it answers first.
const (
	StatementLimit = 5 * time.Second  // one statement, acquiring a connection included
	AnswerLimit    = 30 * time.Second // claim, result or action, repeats included; for the first two, the default
	ResetLimit     = 5 * time.Minute  // emptying a ledger, which may be large
)

// Errors, public by other names.
var (
	ErrLost    = errors.New("jobrun: lease lost")
	ErrUnknown = errors.New("jobrun: outcome not recorded")
	ErrDone    = errors.New("jobrun: the run is already completed")
)

// errUnseen: somebody's change was committed after the statement's snapshot, or
// between two statements.
var errUnseen = errors.New("the run was changed at the same moment")

// Book claims, keeps and ends the attempts of one process. It is safe for
// concurrent use.
type Book struct {
	Tables   *store.Tables
	Reserve  *reserve.Reserve
	Lease    time.Duration
	Patience time.Duration // a claim or a result, repeats included
	Log      *slog.Logger
	Settled  func(context.Context, store.Row) // after a claim whose answer was lost was closed; may be nil

	keeper keeper

	going     context.Context // ended by Interrupt, with its cause: nothing is claimed any more
	interrupt context.CancelCauseFunc

	settling sync.WaitGroup
	open     context.Context // ended by Settle: what is settling tries once more and ends
	cease    context.CancelFunc
}

// NewBook returns a Book for a pool's connections.
func NewBook(tables *store.Tables, r *reserve.Reserve, lease, patience time.Duration, log *slog.Logger) *Book {
	b := &Book{Tables: tables, Reserve: r, Lease: lease, Patience: patience, Log: log}
	b.going, b.interrupt = context.WithCancelCause(context.Background())
	b.open, b.cease = context.WithCancel(context.Background())
	return b
}

// Settle ends the settling of claims after one more try each, and waits for it:
// the statement under way and that try, each at most StatementLimit.
func (b *Book) Settle() {
	b.cease()
	b.settling.Wait()
}

// Open keeps a connection back for heartbeats and results until Close; it repeats
// what may pass.
func (b *Book) Open(ctx context.Context) error {
	ctx, cancel := b.claiming(ctx)
	defer cancel()
	for try := 0; ; try++ {
		err := b.Reserve.Open(ctx)
		if err == nil || !store.Transient(err) || !store.Pause(ctx, try) {
			return err
		}
	}
}

// claiming bounds ctx for a claim, by Patience and by Interrupt.
func (b *Book) claiming(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(b.going, func() { cancel(context.Cause(b.going)) })
	ctx, end := context.WithTimeout(ctx, b.Patience)
	return ctx, func() { end(); stop(); cancel(nil) }
}

// Claimed is whose a run is.
type Claimed struct {
	store.Row           // ours to execute if it is RUNNING and the claim has Won it
	Previous  string    // status before our claim; "": there was no row
	Sent      time.Time // monotonic, before sending the first statement
}

// Claim establishes whose the run is; of a claim that is only for an existing run
// the Key is "" when there is none. After an error the claim may have been
// committed all the same; then the Book closes it as never started as soon as it
// can.
func (b *Book) Claim(ctx context.Context, c store.Claim) (Claimed, error) {
	ctx, cancel := b.claiming(ctx)
	defer cancel()
	claimed, undecided, err := b.establish(ctx, c)
	if undecided {
		b.settle(c) //nolint:contextcheck // outlives the call
	}
	return claimed, err
}

// establish repeats the claim's statements with the same token until an answer is
// certain. A repeated insert queues behind one that is still in flight, so
// finding the row under another token is certain, finding no row is not.
func (b *Book) establish(ctx context.Context, c store.Claim) (got Claimed, undecided bool, err error) {
	got.Sent = time.Now()
	undecided, err = b.repeat(ctx, borrow, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) error {
		var row store.Row
		var found bool
		var err error
		if c.Again {
			row, found, err = s.Get(ctx, conn, c.Key)
		} else if row, found, err = s.Claim(ctx, conn, c, lock); err == nil && !found {
			err = errUnseen
		}
		if err == nil && found && !c.First && !c.Won(row) && row.Pruned.IsZero() && (row.Due || !row.ApprovedAt.IsZero()) {
			got.Previous = row.Status
			if row, found, err = s.Reclaim(ctx, conn, c, row, lock); err == nil && !found {
				err = errUnseen
			}
		}
		got.Row = row
		return err
	})
	return got, undecided, err
}

// Record is Claim for a run that is SKIPPED without an execution.
func (b *Book) Record(ctx context.Context, c store.Claim, reason string) (row store.Row, err error) {
	ctx, cancel := b.claiming(ctx)
	defer cancel()
	_, err = b.repeat(ctx, borrow, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) error {
		found := false
		if row, found, err = s.Skip(ctx, conn, c, reason, lock); err == nil && !found {
			err = errUnseen
		}
		return err
	})
	return row, err
}

// NeverStarted closes a claim that was won but will not be executed: FAILED, due
// at once, not counted. It returns the run after that; if it cannot close it, the
// run as it was, and the Book goes on trying.
func (b *Book) NeverStarted(ctx context.Context, c store.Claim, row store.Row, why string) store.Row {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Patience)
	defer cancel()
	after, err := b.abandon(ctx, row, why)
	if err != nil {
		b.settle(c) //nolint:contextcheck // outlives the call
	}
	return after
}

// abandon closes a claim as never started. If the run is no longer RUNNING under
// its token, there is nothing to do. It returns the run as it is then.
func (b *Book) abandon(ctx context.Context, row store.Row, why string) (after store.Row, err error) {
	after = row
	_, err = b.repeat(ctx, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) error {
		why := "never started: " + why
		now, found, err := s.Abandon(ctx, conn, row, why, lock)
		if store.Unencodable(err) {
			now, found, err = s.Abandon(ctx, conn, row, store.ASCII(why), lock)
		}
		if err == nil && !found {
			now, found, err = s.Get(ctx, conn, row.Key)
		}
		if found {
			after = now
		}
		return err
	})
	return after, err
}

// settle makes sure, in the background, that a claim whose answer was lost does
// not stay RUNNING: it makes the claim certain with the same token and closes it.
func (b *Book) settle(c store.Claim) {
	b.settling.Add(1)
	go func() {
		defer b.settling.Done()
		for pause := time.Second; ; pause = min(2*pause, time.Minute) {
			wait := time.NewTimer(pause)
			ctx, limit := b.open, AnswerLimit
			select {
			case <-wait.C:
			case <-b.open.Done(): // the last try
				wait.Stop()
				ctx, limit = context.Background(), StatementLimit
			}
			last := b.open.Err() != nil
			ctx, cancel := context.WithTimeout(ctx, limit)
			got, _, err := b.establish(ctx, c)
			if err == nil && c.Won(got.Row) {
				got.Row, err = b.abandon(ctx, got.Row, "the answer to the claim was lost")
			}
			cancel()
			if err == nil && c.Won(got.Row) && got.Status == "RUNNING" {
				// It is gone, with a server that had not replicated it. Others may have seen it
				// and left the run to us: it has to be there again, to be tried again.
				err = errUnseen
			}
			if err == nil {
				if c.Won(got.Row) && b.Settled != nil {
					b.Settled(context.WithoutCancel(ctx), got.Row)
				}
				return
			}
			if last {
				b.Log.Error("a claim may be left RUNNING although nothing was executed", "job_key", c.Key, "err", err.Error())
				return
			}
		}
	}()
}

// Finish records the outcome of a held attempt, with a context detached from the
// caller's. It repeats what may pass, then looks where the attempt stands: an
// earlier try whose answer was lost is found by its token. The error is ErrLost
// when somebody else has ended the attempt, ErrGone when only a failure can be
// recorded, else ErrUnknown.
func (b *Book) Finish(ctx context.Context, h *Held, o store.Outcome) (after store.Row, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Patience)
	defer cancel()
	row := h.Row
	_, err = b.repeat(ctx, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) error {
		if o.Status != "FAILED" {
			if err := b.kept(ctx, h, s, conn); err != nil {
				return err
			}
		}
		next, written, err := s.Finish(ctx, conn, row, o, lock)
		if store.Unencodable(err) { // better an escaped text than no outcome
			o.Error = store.ASCII(o.Error)
			next, written, err = s.Finish(ctx, conn, row, o, lock)
		}
		if err != nil {
			return err
		}
		if written {
			after = next
			return nil
		}
		standing, err := s.Standing(ctx, conn, row)
		switch {
		case err != nil:
			return err
		case standing.Holds:
			return errUnseen // changed between the two statements: look again
		case standing.EndedBy == "WORKER" && standing.Outcome == "SUCCEEDED" && h.sealing(): // by a Complete whose fate nobody knew
			after = standing.Ended(row, store.Outcome{Status: standing.Outcome, Next: -1, Processed: o.Processed, Failed: o.Failed})
			return s.Replicated(ctx, conn)
		case standing.EndedBy == "WORKER" && standing.Outcome == o.Status,
			standing.Gone && standing.Ours && standing.Status == o.Status: // by an earlier try
			after = standing.Ended(row, o)
			return s.Replicated(ctx, conn)
		}
		return fmt.Errorf("%w: attempt %d ended %s, not recorded: %s", ErrLost, row.Attempt, o.Status, superseded(standing))
	})
	if err != nil && !errors.Is(err, ErrLost) && !errors.Is(err, ErrGone) {
		err = fmt.Errorf("%w: attempt %d ended %s: %w", ErrUnknown, row.Attempt, o.Status, err)
	}
	return after, err
}

// superseded says in words who ended an attempt that is no longer the holder.
func superseded(s store.Standing) string {
	switch {
	case s.EndedBy == "PERSON":
		return "a person marked it failed"
	case s.EndedBy == "WORKER":
		return "the attempt has ended " + s.Outcome
	case s.Status == "":
		return "the row was deleted"
	case s.Status == "RUNNING":
		return fmt.Sprintf("attempt %d by %s is running", s.Attempt, s.Worker)
	}
	return fmt.Sprintf("the run is %s, changed by another program or attempt", s.Status)
}

// What a statement is to the connection that is kept back.
type share int

const (
	own    share = iota // for heartbeats and results: theirs
	borrow              // for claims and actions: only while nobody needs it, and briefly
	leave               // for what may take long: never
)

// repeat is repeatFor, for statements that are short.
func (b *Book) repeat(ctx context.Context, kept share, fn func(context.Context, *store.Store, *pgx.Conn, time.Duration) error) (undecided bool, err error) {
	return b.repeatFor(ctx, StatementLimit, kept, fn)
}

// repeatFor calls fn with a connection, bounded by limit each time, until
// it succeeds, its error will not pass, or ctx ends. A statement that is under
// way is not cut off by a cancellation of ctx, only by its deadline. Undecided
// reports that the last word on what was committed is missing.
func (b *Book) repeatFor(ctx context.Context, limit time.Duration, kept share, fn func(context.Context, *store.Store, *pgx.Conn, time.Duration) error) (undecided bool, err error) {
	for try := 0; ; try++ {
		deadline := time.Now().Add(limit)
		if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
			deadline = d
		}
		limited, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
		use := func(conn *pgx.Conn, borrowed bool) error {
			s, err := b.Tables.Open(limited, conn)
			if err != nil {
				return err
			}
			left := min(time.Until(deadline), StatementLimit)
			if borrowed { // a heartbeat may be waiting for it
				left = min(left, b.Lease/8)
			}
			err = fn(limited, s, conn, lockLimit(left))
			if err == nil && undecided {
				// It may have found what an earlier try has committed, but not yet on the standby.
				return s.Replicated(limited, conn)
			}
			undecided = undecided || !errors.Is(err, errUnseen) && store.Undecided(err)
			return err
		}
		switch kept {
		case own:
			err = b.Reserve.Do(limited, func(conn *pgx.Conn) error { return use(conn, false) })
		case borrow:
			err = b.Reserve.Borrow(limited, use)
		case leave:
			var conn *pgxpool.Conn
			if conn, err = b.Reserve.Acquire(limited, StatementLimit); err == nil {
				err = use(conn.Conn(), false)
				conn.Release()
			}
		}
		cancel()
		if err == nil {
			return false, nil
		}
		if errors.Is(err, ErrLost) || !errors.Is(err, errUnseen) && !store.Transient(err) {
			return undecided, err
		}
		if d, ok := ctx.Deadline(); ok && time.Until(d) < 2*answerTime {
			// A try that is cut off would leave open what it did.
			return undecided, fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
		}
		if try == 0 && errors.Is(err, errUnseen) && ctx.Err() == nil {
			continue // what changed is committed in most cases: the next snapshot sees it
		}
		if !store.Pause(ctx, try) {
			return undecided, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// answerTime is what a statement gets beside the wait for its lock.
const answerTime = 100 * time.Millisecond

// lockLimit is how long a statement may wait for a lock, so that the server gives
// up before its client does after left.
func lockLimit(left time.Duration) time.Duration {
	return max(left/2, min(left*4/5, left-answerTime))
}
