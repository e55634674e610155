package lease

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/reserve"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// AcquireLimit is how long work waits for a connection of the pool, if the lease
// is not shorter.
const AcquireLimit = 30 * time.Second

// How often the work of a transaction is called at most, if what it fails with passes.
const (
	txTries  = 8 // a serialization failure, a deadlock, a COMMIT that did not happen
	txBreaks = 2 // a connection that was lost: work that crashes its server is not called for ever
)

// ErrBroken says that the connection of a transaction broke before its COMMIT was sent.
var ErrBroken = errors.New("jobrun: the connection broke")

// errUnread: nobody knows where the attempt stands.
var errUnread = errors.New("whether the attempt still holds its run could not be read")

// Tx is a transaction that commits only while the attempt holds its run.
type Tx struct {
	// Work is called again after a serialization failure or a deadlock, when its
	// connection was lost, and when it is certain that the COMMIT did not happen.
	// Without commit, nothing is fenced and all is rolled back.
	Work func(ctx context.Context, s *store.Store, tx pgx.Tx) (commit bool, err error)
	// Entered is how many items Work has entered in the ledger; nil: none.
	Entered func() int
	// End ends the attempt in the same commit; nil: it goes on.
	End func() store.Outcome
	// Proof reads from the tables whether it was committed, for when the server that
	// had the transaction is gone; nil: nothing tells.
	Proof func(ctx context.Context, s *store.Store, conn *pgx.Conn) (bool, error)
}

// again tells whether another try of a transaction may succeed.
type again int

const (
	never  again = iota
	reach        // no server could be reached, nothing was done: until the lease runs out
	broke        // the connection was lost before the COMMIT: txBreaks
	passed       // all was undone: txTries
)

// Tx executes t, and waits for a server as long as the attempt holds its run. The
// error is ErrLost when the attempt no longer holds its run, ErrDone after a Tx with
// End, ErrUnknown when the answer to the COMMIT was lost and nothing tells what
// became of it.
func (b *Book) Tx(ctx context.Context, h *Held, t Tx) (store.Row, error) {
	var tries [passed + 1]int
	var told time.Time
	for pause := 0; ; pause++ {
		after, again, err := b.tx(ctx, h, t)
		tries[again]++
		switch {
		case again == never, tries[passed] == txTries, tries[broke] == txBreaks:
			return after, err
		case b.going.Err() != nil:
			return after, ours{fmt.Errorf("%w: %w", context.Cause(b.going), err)} //nolint:contextcheck // whatever ctx is
		case again == reach && time.Since(told) > time.Minute:
			told = time.Now()
			h.log.Warn("work waits for the database", "err", err.Error())
		}
		if !store.Pause(ctx, pause) {
			return after, ours{ended(ctx, err)}
		}
	}
}

// Unsure reports that the fate of a COMMIT of this attempt is unknown. What is found
// afterwards may be on the primary alone, until Replicated has returned.
func (h *Held) Unsure() bool { return h.unsure.Load() }

// Replicated returns when all that was committed before is where the server's settings
// want it, such as on a synchronous standby.
func (b *Book) Replicated(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.Patience)
	defer cancel()
	_, err := b.repeat(ctx, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, _ time.Duration) error {
		return s.Replicated(ctx, conn)
	})
	if err != nil {
		err = ours{fmt.Errorf("%w: what an earlier COMMIT left is not known to be on the standby: %w", ErrUnknown, err)}
	}
	return err
}

// tx is one try.
func (b *Book) tx(ctx context.Context, h *Held, t Tx) (after store.Row, again again, err error) {
	if err := h.Check(); err != nil {
		return after, never, err
	}
	conn, err := b.Reserve.Acquire(ctx, min(b.Lease, AcquireLimit))
	if err != nil {
		return after, unreached(ctx, err), ours{ended(ctx, err)}
	}
	defer conn.Release() // destroys one that is broken or still in a transaction
	s, err := b.Tables.Open(ctx, conn)
	if err != nil {
		return after, unreached(ctx, err), ours{ended(ctx, err)}
	}
	name := uuid.NewString()
	begin, stop := context.WithTimeout(ctx, StatementLimit)
	tx, err := s.Begin(begin, conn.Conn(), name, b.Lease)
	stop()
	if err != nil {
		return after, unreached(ctx, err), ours{ended(ctx, err)}
	}
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer func() { // also when Work panics; after a commit there is nothing to roll back
		limited, cancel := context.WithTimeout(detached, StatementLimit)
		defer cancel()
		_ = tx.Rollback(limited)
		if store.Code(err) == "25006" { // a server that was demoted
			_ = conn.Conn().Close(limited)
		}
	}()
	commit, err := t.Work(ctx, s, workTx{tx})
	broken := conn.Conn().IsClosed()
	status := conn.Conn().PgConn().TxStatus()
	switch {
	case ctx.Err() != nil:
		return after, never, ended(ctx, err)
	case broken && !errors.As(err, new(ours)) && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)):
		return after, never, err // of a context of the work's own, which pgx ends the connection for
	case broken && overdue(err):
		return after, never, fmt.Errorf("%w: %w", ErrBroken, err)
	case broken && err != nil:
		return after, broke, fmt.Errorf("%w: %w", ErrBroken, err)
	case broken:
		return after, never, fmt.Errorf("%w during the work, which did not say so", ErrBroken)
	case err != nil && passes(err):
		return b.refused(ctx, h, err)
	case store.Code(err) == "25006":
		return after, broke, err
	case err != nil:
		return after, never, err
	case conn.Conn().PgConn().IsBusy():
		return after, never, errors.New("the work left the rows of a query, or the results of a batch, open: close them before it returns")
	case status == 'E':
		return after, never, errors.New("a statement of the transaction failed, but the work returned no error")
	case status != 'T':
		return after, never, errors.New("the work ended its transaction itself: what it did so far is not protected by the lease")
	case !commit && h.Unsure():
		return after, never, b.Replicated(ctx)
	case !commit:
		return after, never, nil
	}
	return b.commit(detached, h, t, s, tx, name)
}

// commit fences and commits a transaction. Ctx is not the caller's: from here on
// only the limits end it.
func (b *Book) commit(ctx context.Context, h *Held, t Tx, s *store.Store, tx pgx.Tx, name string) (after store.Row, again again, err error) {
	limited, cancel := context.WithTimeout(ctx, AnswerLimit)
	defer cancel()
	fence := s.Fence
	if t.End != nil {
		fence = s.Seal
	}
	lock := lockLimit(StatementLimit)
	mark, found, err := fence(limited, tx, h.Row, name, lock, b.commitLimit())
	if err == nil && !found {
		err = b.lost(ctx, h)
		return after, stood(err), err
	}
	if err == nil && t.End != nil {
		if err := b.kept(limited, h, s, tx); err != nil {
			return after, never, err
		}
		h.seal()
		after, found, err = s.Finish(limited, tx, h.Row, t.End(), lock)
		if err == nil && !found { // its row is locked
			err = errUnseen
		}
	}
	if err != nil && !errors.Is(err, store.ErrAnotherTransaction) {
		err = ours{err}
	}
	if err == nil {
		err = tx.Commit(limited)
		if err == nil {
			h.committed(t, mark, after)
			return after, never, nil
		}
		if store.Undecided(err) && !errors.Is(err, pgx.ErrTxCommitRollback) {
			committed, unread := b.fate(ctx, mark, t.Proof)
			switch {
			case unread != nil:
				h.unsure.Store(true)
				return after, never, fmt.Errorf("%w: the answer to COMMIT was lost (%w), and so was what became of it: %w", ErrUnknown, err, unread)
			case committed:
				h.committed(t, mark, after)
				return after, never, nil
			}
			return after, passed, fmt.Errorf("%w: %w", ErrBroken, err)
		}
	}
	switch {
	case passes(err) && t.End != nil:
		err = fmt.Errorf("%w (under REPEATABLE READ and SERIALIZABLE, work that completes a run has to be shorter than the pause between heartbeats, a quarter of the lease)", err)
		return b.refused(ctx, h, err)
	case passes(err):
		return b.refused(ctx, h, err)
	case store.Code(err) == "25006":
		return after, broke, err
	case tx.Conn().IsClosed():
		return after, broke, fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return after, never, err
}

// commitLimit is how long the server waits for the COMMIT after a fence, which
// keeps everybody from changing the run.
func (b *Book) commitLimit() time.Duration { return min(b.Lease, 2*StatementLimit) }

// unreached decides after an error before the transaction has begun.
func unreached(ctx context.Context, err error) again {
	if ctx.Err() == nil && !errors.Is(err, reserve.ErrExhausted) && store.Transient(err) {
		return reach
	}
	return never
}

// overdue reports that the server ended the session because the work took too long.
func overdue(err error) bool {
	code := store.Code(err)
	return code == "25P03" || code == "25P04"
}

// passes reports a serialization failure or a deadlock.
func passes(err error) bool {
	code := store.Code(err)
	return code == "40001" || code == "40P01" || errors.Is(err, errUnseen)
}

// refused decides after an error that passes: under strict isolation levels a run
// that is no longer the attempt's looks like one.
func (b *Book) refused(ctx context.Context, h *Held, err error) (after store.Row, again again, _ error) {
	lost := b.lost(ctx, h)
	if errors.Is(lost, errUnseen) {
		lost = err
	}
	return after, stood(lost), lost
}

// stood tells whether to try again after a look at where the attempt stands.
func stood(lost error) again {
	switch {
	case errors.Is(lost, errUnread):
		return reach
	case passes(lost):
		return passed
	}
	return never
}

// lost looks, on another connection, why the attempt does not hold its run, and
// returns ErrLost with it; errUnseen when it does hold it.
func (b *Book) lost(ctx context.Context, h *Held) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*StatementLimit)
	defer cancel()
	var standing store.Standing
	_, err := b.repeat(ctx, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, _ time.Duration) (err error) {
		standing, err = s.Standing(ctx, conn, h.Row)
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w: %w", ErrBroken, errUnread, err)
	case standing.Holds:
		return errUnseen
	case standing.EndedBy == "WORKER" && standing.Outcome == "SUCCEEDED" && h.sealing():
		return ErrDone
	}
	why := errors.New(superseded(standing))
	h.lose(why)
	return fmt.Errorf("%w: %w", ErrLost, why)
}

// fate finds out whether a transaction was committed whose answer was lost; while
// the server is still at it, it waits.
func (b *Book) fate(ctx context.Context, mark store.Mark, proof func(context.Context, *store.Store, *pgx.Conn) (bool, error)) (committed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, b.Patience)
	defer cancel()
	_, err = b.repeat(ctx, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, _ time.Duration) error {
		fate, err := s.Fate(ctx, conn, mark)
		switch {
		case err != nil:
			return err
		case fate == "in progress":
			return errUnseen
		case fate == "aborted":
			committed = false
			return nil
		case fate == "committed" && proof == nil:
			committed = true
			return s.Replicated(ctx, conn)
		case proof == nil:
			return store.Refusal("the server was restarted or replaced since")
		}
		if committed, err = proof(ctx, s, conn); err == nil && committed {
			err = s.Replicated(ctx, conn)
		}
		return err
	})
	return committed, err
}

// Fence calls a fence on a transaction of the caller's and judges its answer.
func (b *Book) Fence(ctx context.Context, h *Held, fence func(s *store.Store, lock, idle time.Duration) (found bool, err error)) error {
	if err := h.Check(); err != nil {
		return err
	}
	s, err := b.Tables.Open(ctx, nil) // the claim has opened them
	if err != nil {
		return err
	}
	found, err := fence(s, lockLimit(StatementLimit), b.commitLimit())
	if err == nil && found {
		return nil
	}
	if err != nil && store.Code(err) != "40001" {
		return err
	}
	lost := b.lost(ctx, h)
	switch {
	case !errors.Is(lost, errUnseen):
		return lost
	case err != nil:
		return err
	}
	return fmt.Errorf("%w, or the transaction is not in the Runner's database", lost)
}

// Nested reports whether a transaction is a savepoint inside another: a ROLLBACK TO
// would release what a fence has locked.
func Nested(tx pgx.Tx) bool {
	return fmt.Sprintf("%T", tx) == "*pgx.dbSimulatedNestedTx"
}

// HeldUp reports an error that is about the server, the connection or the lease
// and says nothing about the work: it is marked by Ours, or its SQLSTATE is of
// class 08 (connection), 53 (resources), 57 (operator intervention) or 58 (system),
// that of a lock timeout or a read-only server, or of what passes, after all tries.
func HeldUp(err error) bool {
	switch code := store.Code(err); code {
	case "40001", "40P01", "55P03", "25006", "25P03", "25P04",
		"26000", "42P05": // prepared statements lost or there already: a pooler in between
		return true
	default:
		for _, class := range [...]string{"08", "53", "57", "58"} {
			if strings.HasPrefix(code, class) {
				return true
			}
		}
	}
	return errors.As(err, new(ours)) || errors.Is(err, errUnseen) || errors.Is(err, ErrBroken) || errors.Is(err, ErrLost) || errors.Is(err, ErrDone) || errors.Is(err, ErrUnknown)
}

// ours is an error of what is done around the work.
type ours struct{ error }

func (e ours) Unwrap() error { return e.error }

// Ours marks an error of a statement that is not the work's.
func Ours(err error) error { return ours{err} }

// ended adds why ctx ended to err.
func ended(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	switch {
	case cause == nil || errors.Is(err, cause):
		return err
	case err == nil || errors.Is(cause, err):
		return cause
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// workTx is a transaction in the hands of the work, which may not end it.
type workTx struct{ pgx.Tx }

var errNotYours = errors.New("jobrun: this transaction is not yours to end: return nil to commit it, an error to roll it back")

func (workTx) Commit(context.Context) error   { return errNotYours }
func (workTx) Rollback(context.Context) error { return errNotYours }

// Check returns why the attempt may not act; nil: as far as is known here, it may.
func (h *Held) Check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.ended != nil:
		return ErrDone
	case h.lost != nil:
		return fmt.Errorf("%w: %w", ErrLost, h.lost)
	}
	return nil
}

// seal notes that the end of the attempt is being sent. From here on an attempt
// that was ended by itself was ended by a Complete, even if another one failed.
func (h *Held) seal() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sealed = true
}

func (h *Held) sealing() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sealed
}

// committed notes what a commit has entered in the ledger, on which server, and that it
// has ended the attempt, with the run after it.
func (h *Held) committed(t Tx, mark store.Mark, after store.Row) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t.End != nil {
		h.ended = &after
	}
	if t.Entered == nil {
		return
	}
	if h.entered == 0 {
		h.server = mark.Server
	} else if h.server != mark.Server {
		h.server = ""
	}
	h.entered += int64(t.Entered())
}

// ErrGone says that the server is another one by now, and lacks items that the attempt
// was told are done: then the run may not succeed, and the next attempt does them again.
var ErrGone = errors.New("the database has failed over to a server that lacks items which were done")

// kept returns ErrGone if that is so.
func (b *Book) kept(ctx context.Context, h *Held, s *store.Store, db store.DB) error {
	items, server := h.ledger()
	if items == 0 {
		return nil
	}
	n, err := s.Kept(ctx, db, h.Row, items, server)
	switch {
	case err != nil:
		return ours{fmt.Errorf("whether the ledger of %s has all items: %w", h.Row.Key, err)}
	case n < items:
		return fmt.Errorf("%w: %w", ErrGone, store.Refusal(fmt.Sprintf("its ledger of %s has %d of the %d of attempt %d; the next attempt does the others again", h.Row.Key, n, items, h.Row.Attempt)))
	}
	return nil
}

func (h *Held) ledger() (items int64, server string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.entered, h.server
}

// Ended returns the run after a commit that ended the attempt, if there was one.
func (h *Held) Ended() (store.Row, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended == nil {
		return store.Row{}, false
	}
	return *h.ended, true
}

// FailItem notes the failure of an item, fenced, until that is certain.
func (b *Book) FailItem(ctx context.Context, h *Held, item, text string) error {
	if err := h.Check(); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, b.Patience)
	defer cancel()
	found := false
	_, err := b.repeat(limited, own, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) (err error) {
		if found, err = s.FailItem(ctx, conn, h.Row, item, text, lock); store.Unencodable(err) {
			found, err = s.FailItem(ctx, conn, h.Row, item, store.ASCII(text), lock)
		}
		return err
	})
	switch {
	case err != nil && store.Code(err) == "40001":
		if lost := b.lost(ctx, h); !errors.Is(lost, errUnseen) {
			return lost
		}
	case err == nil && !found:
		return b.lost(ctx, h)
	}
	return err
}
