package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Held is an attempt that this process executes.
type Held struct {
	Row               store.Row
	Processed, Failed atomic.Int64

	log    *slog.Logger
	unsure atomic.Bool // see Unsure
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	renewed  time.Time  // monotonic, before sending the last beat that was answered
	missed   bool       // the last beat was not answered
	returned bool       // the function has returned: its result shows where it stands
	lost     error      // why the lease was lost; nil: held
	sealed   bool       // Complete has sent the end of the attempt
	ended    *store.Row // the run after Complete; nil: not completed
	entered  int64      // items that this attempt was told are in the ledger
	server   string     // the start of the server that said so; "": of several
}

// keeper is the running attempts, and the timer of their next heartbeat while
// there are any. A short attempt costs no goroutine; the call that removes the
// last attempt waits for a heartbeat that is under way.
type keeper struct {
	mu      sync.Mutex
	held    map[*Held]struct{}
	timer   *time.Timer
	beating chan struct{} // closed at the end of the heartbeat under way; nil: none
}

// Hold keeps the attempt's lease alive until Release. When the lease is lost, it
// calls cancel with a cause that wraps ErrLost. After Interrupt it refuses with
// that cause.
func (b *Book) Hold(row store.Row, sent time.Time, cancel context.CancelCauseFunc, log *slog.Logger) (*Held, error) {
	h := &Held{Row: row, renewed: sent, cancel: cancel, log: log}
	k := &b.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	if b.going.Err() != nil {
		return nil, context.Cause(b.going)
	}
	if k.held == nil {
		k.held = map[*Held]struct{}{}
	}
	if k.held[h] = struct{}{}; len(k.held) == 1 {
		if k.timer == nil {
			k.timer = time.AfterFunc(b.Lease/4, b.keep)
		} else {
			k.timer.Reset(b.Lease / 4)
		}
	}
	return h, nil
}

// Returned notes that the function has returned: from now on a lease that is not
// held any more is no news, and the result will show it. It returns why the lease
// was lost before, or nil.
func (h *Held) Returned() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.returned = true
	return h.lost
}

// Release ends the heartbeats of the attempt.
func (b *Book) Release(h *Held) {
	k := &b.keeper
	k.mu.Lock()
	delete(k.held, h)
	var beating chan struct{}
	if len(k.held) == 0 {
		k.timer.Stop()
		beating = k.beating
	}
	k.mu.Unlock()
	if beating != nil {
		<-beating
	}
}

// Interrupt cancels every running attempt with the cause, ends claims that are
// under way, refuses new ones from now on, and names what is running.
func (b *Book) Interrupt(cause error) (names []string) {
	b.interrupt(cause)
	for _, h := range b.held() {
		h.cancel(cause)
		names = append(names, fmt.Sprintf("%s attempt %d", h.Row.Key, h.Row.Attempt))
	}
	return names
}

// held lists the attempts in the order of their keys.
func (b *Book) held() []*Held {
	k := &b.keeper
	k.mu.Lock()
	all := make([]*Held, 0, len(k.held))
	for h := range k.held {
		all = append(all, h)
	}
	k.mu.Unlock()
	slices.SortFunc(all, func(x, y *Held) int { return cmp.Compare(x.Row.Key, y.Row.Key) })
	return all
}

// keep beats, and sets the timer for the next time: every Lease/4, sooner after a
// beat that was not answered, and when a lease ends. Its times are monotonic:
// jumps of the wall clock do not matter.
func (b *Book) keep() {
	k := &b.keeper
	k.mu.Lock()
	if len(k.held) == 0 || k.beating != nil { // too late, or the one under way sets the timer
		k.mu.Unlock()
		return
	}
	beating := make(chan struct{})
	k.beating = beating
	k.mu.Unlock()
	wait := b.Lease / 4
	if !b.beat() {
		wait = b.Lease / 16
		for _, h := range b.held() {
			if left, open := h.left(b.Lease); open {
				wait = min(wait, left)
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.beating = nil
	close(beating)
	if len(k.held) > 0 {
		k.timer.Reset(max(wait, 100*time.Millisecond))
	}
}

// beat renews all leases with one statement and reports whether it was answered.
// An attempt that the answer leaves out is read alone: somebody may just have had
// its row locked. An attempt whose lease has ended gets this one renewal.
func (b *Book) beat() bool {
	held := slices.DeleteFunc(b.held(), func(h *Held) bool { _, ended := h.Ended(); return ended })
	if len(held) == 0 {
		return true
	}
	pulses := make([]store.Pulse, len(held))
	for i, h := range held {
		pulses[i] = store.Pulse{Row: h.Row, Processed: h.Processed.Load(), Failed: h.Failed.Load()}
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(StatementLimit, b.Lease/4))
	defer cancel()
	sent := time.Now()
	reached := map[string]bool{}
	standings := map[string]store.Standing{}
	err := b.Reserve.Do(ctx, func(conn *pgx.Conn) error {
		s, err := b.Tables.Open(ctx, conn)
		if err != nil {
			return err
		}
		var tokens []string
		for range 3 { // under REPEATABLE READ one attempt that ends fails the beat of all
			if tokens, err = s.Beat(ctx, conn, pulses); store.Code(err) != "40001" {
				break
			}
		}
		for _, token := range tokens {
			reached[token] = true
		}
		for _, p := range pulses {
			if err == nil && !reached[p.Token] {
				standings[p.Token], err = s.Standing(ctx, conn, p.Row)
			}
		}
		return err
	})
	for _, h := range held {
		standing, read := standings[h.Row.Token]
		switch {
		case reached[h.Row.Token]:
			h.renew(sent, b.Lease)
		case err != nil:
			h.miss(err, sent, b.Lease)
		case read && !standing.Holds && standing.EndedBy == "WORKER" && h.sealing(): // the answer is on its way
		case read && !standing.Holds:
			h.lose(errors.New(superseded(standing)))
		default:
			h.renew(sent, b.Lease)
		}
	}
	return err == nil
}

// left is how long the attempt may go on without a beat; open is false when its
// lease is lost, or no longer matters.
func (h *Held) left(lease time.Duration) (left time.Duration, open bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Until(h.renewed.Add(lease)), h.lost == nil && !h.returned
}

// renew notes a beat that was sent at this time and answered.
func (h *Held) renew(sent time.Time, lease time.Duration) {
	h.mu.Lock()
	gap := sent.Sub(h.renewed)
	tell := h.missed || gap > lease
	h.renewed, h.missed = sent, false
	h.mu.Unlock()
	if tell {
		h.log.Warn("heartbeat answered again, the attempt still holds its run", "gap", gap, "lease", lease)
	}
}

// miss notes a beat without an answer. If it was sent after the end of the lease,
// it was the one renewal, and the attempt may no longer act. One that was sent
// before and given up after it, because the process stood still, was not.
func (h *Held) miss(err error, sent time.Time, lease time.Duration) {
	h.mu.Lock()
	end := h.renewed.Add(lease)
	h.missed = true
	h.mu.Unlock()
	if !sent.Before(end) {
		h.lose(fmt.Errorf("no heartbeat for the length of the lease: %w", err))
		return
	}
	h.log.Warn("heartbeat missed", "err", err.Error(), "lease_left", max(0, time.Until(end)))
}

// lose cancels the attempt's context, once, unless its function has returned.
func (h *Held) lose(why error) {
	h.mu.Lock()
	ignore := h.lost != nil || h.returned
	if !ignore {
		h.lost = why
	}
	h.mu.Unlock()
	if ignore {
		return
	}
	h.log.Warn("lease lost, the job's context is cancelled", "err", why.Error())
	h.cancel(fmt.Errorf("%w: %w", ErrLost, why))
}
