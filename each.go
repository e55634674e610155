package jobrun

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/lease"
	"github.com/seed-ccb5b62c/jobrun/internal/schema"
)

// EachOptions are the settings of Each and EachChunk. nil or zero fields: the
// documented defaults.
type EachOptions struct {
	ChunkSize   int   // items of one transaction, 1 to 10,000; 0: 1000
	Parallel    int   // chunks at the same time, each with a connection of its own, 1 to 100; 0: 1
	MaxFailures int64 // failed items after which no more are read, and the run cannot succeed; 0: no limit

	// Step tells apart the items of several Each of one run, which share its ledger:
	// Step, a colon and the key are entered, as they could be for Once. At most 100
	// bytes, no colon. "": the key alone. IdempotencyKey knows nothing of it: pass it
	// a text with the step.
	Step string

	// Progress is called after each chunk, and after each item of a chunk that
	// failed, with the counts so far; one call at a time. nil: nobody hears of it.
	Progress func(EachResult)
}

// EachResult counts the items of one call.
type EachResult struct {
	Done        int64 // by this call
	AlreadyDone int64 // by an earlier attempt, or earlier in this one
	Failed      int64
}

// Each calls fn once for every item whose key is not in the run's ledger, and
// enters it there in the same transaction: what fn writes through tx takes effect
// exactly once per item and run, across crashes, retries and re-runs. Items are
// done in chunks, one transaction like Tx's for each, in the order in which they
// come; memory does not grow with their number. Done and failed items are added to
// AddProcessed and AddFailed as they are committed.
//
// The ledger is the run's: two items with one key take effect once, and a second
// Each over the same keys does nothing unless EachOptions.Step tells them apart. It
// logs a warning when it passes over items in a run's first attempt.
//
// If fn returns an error or panics, its chunk is rolled back and the items of the
// chunk are done one by one, each in a transaction of its own, so that only the
// bad ones fail. So fn may be called several times for one item. For calls to the
// outside, send [Run.IdempotencyKey] with them, set ChunkSize to 1, so that a crash
// leaves one call in doubt and not a chunk of them, and bound each call well below
// Options.Lease: the server ends a transaction whose process is silent for longer,
// and with it Each.
//
// A failure is noted in the ledger with its text, Each goes on, and returns an
// [*ItemsError] at the end; return it, and the run is FAILED and the next attempt
// tries those items again. With an ItemsError that is not returned, the run can
// succeed. A run whose Each ended before the last item cannot, whatever the
// function returns, unless a further Each of the same Step has come to its end.
//
// Every error that is not an item's ends Each at once, and no item is marked failed
// for it: the lease is lost (ErrLeaseLost), ctx ended, items yielded an error or an
// item with a bad key ([*InvalidError]; see Once), the connection broke twice in a
// transaction or none of the pool's could be had, or the server answered with
// SQLSTATE 40001 or 40P01 to the last try, 55P03 (a lock could not be had; for the
// items themselves the error names the sessions that hold them), 25006, 25P03,
// 25P04, 26000, 42P05 or class 08, 53, 57 or 58. The error names the first item of
// the transaction that it ended. A context of fn's own that ends is the item's
// failure, also when it breaks the connection. What was committed before stays done.
// Each ends when the next item comes: a sequence that waits for items has to look at
// ctx.
//
// A chunk waits for a connection of the Runner's pool, and for a lock, at most
// Options.Lease (for the connection 30 s if that is less).
//
// fn must not use tx from other goroutines, nor end the transaction, and should
// take no connection of the pool: what it writes there is not the item's, and when
// all connections do the same they wait for each other. With EachOptions.Parallel
// it is called from several goroutines at once.
func Each[T any](ctx context.Context, run *Run, items iter.Seq2[T, error], key func(T) string, fn func(ctx context.Context, tx pgx.Tx, item T) error, opts *EachOptions) (EachResult, error) {
	var chunk func(context.Context, pgx.Tx, []T) error
	if fn != nil {
		chunk = func(ctx context.Context, tx pgx.Tx, part []T) error {
			for _, item := range part {
				if err := fn(ctx, tx, item); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return EachChunk(ctx, run, items, key, chunk, opts)
}

// EachChunk is Each with one call of fn for the items of a chunk that are not
// done, for work that one statement does for many. When it fails, it is called
// for each of them alone. The slice is fn's.
func EachChunk[T any](ctx context.Context, run *Run, items iter.Seq2[T, error], key func(T) string, fn func(ctx context.Context, tx pgx.Tx, items []T) error, opts *EachOptions) (EachResult, error) {
	if items == nil {
		return EachResult{}, &InvalidError{"items", nil, "a sequence, such as FromSlice or FromRows"}
	}
	e, err := newEach(run, opts, key != nil, fn != nil)
	if err != nil {
		items(func(T, error) bool { return false }) // gives back what it holds, such as an open query
		if run != nil {
			run.leftUnread("", err)
		}
		return EachResult{}, err
	}
	defer e.wait()
	run.leftUnread(e.opts.Step, errors.New("Each did not return")) // unless result says otherwise
	var c chunk[T]
	n := 0
	for item, err := range items {
		if n++; err != nil {
			e.end(fmt.Errorf("reading item %d of %s: %w", n, run.Key(), err))
			break
		}
		k := e.prefix + key(item)
		if err := validItem("", k); err != nil {
			e.end(validItem(fmt.Sprintf("key of item %d", n), k))
			break
		}
		c.keys, c.items = append(c.keys, k), append(c.items, item)
		if len(c.keys) == e.opts.ChunkSize {
			if !e.do(ctx, c.work(fn), c.keys) {
				break
			}
			c = c.next(e.opts.Parallel > 1)
		}
	}
	if len(c.keys) > 0 && !e.ended() {
		e.do(ctx, c.work(fn), c.keys)
	}
	if ctx.Err() != nil { // the sequence may have ended for the same reason
		e.end(fmt.Errorf("items of %s: %w", run.Key(), context.Cause(ctx)))
	}
	return e.result()
}

// chunk is items with their keys.
type chunk[T any] struct {
	keys  []string
	items []T
}

// next is an empty chunk; a new one while others still work on this one.
func (c chunk[T]) next(fresh bool) chunk[T] {
	if fresh {
		return chunk[T]{make([]string, 0, cap(c.keys)), make([]T, 0, cap(c.items))}
	}
	clear(c.items)
	return chunk[T]{c.keys[:0], c.items[:0]}
}

// work is fn for those items of the chunk from from to till that were taken; of
// several with one key, for the first.
func (c chunk[T]) work(fn func(context.Context, pgx.Tx, []T) error) chunkWork {
	return func(ctx context.Context, tx pgx.Tx, from, till int, taken []string) error {
		if len(taken) == till-from {
			return fn(ctx, tx, slices.Clone(c.items[from:till])) // it may sort them, and be called again
		}
		open := make(map[string]struct{}, len(taken))
		for _, k := range taken {
			open[k] = struct{}{}
		}
		part := make([]T, 0, len(taken))
		for i := from; i < till; i++ {
			if _, ok := open[c.keys[i]]; ok {
				part = append(part, c.items[i])
				delete(open, c.keys[i])
			}
		}
		for k := range open { // an encoding that has one character for two
			return lease.Ours(fmt.Errorf("the database stores the key of another item as %.200q", k))
		}
		return fn(ctx, tx, part)
	}
}

// chunkWork is the work of a chunk, whatever its items are.
type chunkWork func(ctx context.Context, tx pgx.Tx, from, till int, taken []string) error

// each is one call of Each.
type each struct {
	run    *Run
	opts   EachOptions
	prefix string        // of keys
	slots  chan struct{} // one for each chunk under way
	wg     sync.WaitGroup

	passing atomic.Bool // the last chunk was all done: look before the next begins a transaction

	mu    sync.Mutex
	res   EachResult
	first []ItemError
	fatal error
}

func newEach(run *Run, opts *EachOptions, hasKey, hasFn bool) (*each, error) {
	var o EachOptions
	if opts != nil {
		o = *opts
	}
	switch {
	case run == nil:
		return nil, &InvalidError{"run", nil, "the run that the job's function was given"}
	case !hasKey:
		return nil, &InvalidError{"key", nil, "a function"}
	case !hasFn:
		return nil, &InvalidError{"fn", nil, "a function"}
	case o.ChunkSize < 0 || o.ChunkSize > 10_000:
		return nil, &InvalidError{"EachOptions.ChunkSize", o.ChunkSize, "1 to 10000, or 0 for 1000"}
	case o.Parallel < 0 || o.Parallel > 100:
		return nil, &InvalidError{"EachOptions.Parallel", o.Parallel, "1 to 100, or 0 for 1"}
	case len(o.Step) > 100 || strings.Contains(o.Step, ":") || o.Step != "" && validItem("", o.Step) != nil:
		return nil, &InvalidError{"EachOptions.Step", o.Step, "at most 100 bytes of valid UTF-8 without NUL and colon"}
	case o.MaxFailures < 0:
		return nil, &InvalidError{"EachOptions.MaxFailures", o.MaxFailures, "1 or more, or 0 for no limit"}
	}
	if o.ChunkSize == 0 {
		o.ChunkSize = 1000
	}
	o.Parallel = max(o.Parallel, 1)
	e := &each{run: run, opts: o, slots: make(chan struct{}, o.Parallel)}
	if o.Step != "" {
		e.prefix = o.Step + ":"
	}
	return e, nil
}

// do does a chunk, on a goroutine of its own if there may be several, and reports
// whether there may be more.
func (e *each) do(ctx context.Context, work chunkWork, keys []string) bool {
	if e.ended() {
		return false
	}
	if e.opts.Parallel == 1 {
		e.chunk(ctx, work, keys)
		return !e.ended()
	}
	e.slots <- struct{}{}
	e.wg.Go(func() {
		returned := false
		defer func() {
			if v := recover(); v != nil {
				e.end(&PanicError{Value: v, Stack: stack()})
			} else if !returned {
				e.end(errors.New("fn ended its goroutine with runtime.Goexit"))
			}
			<-e.slots
		}()
		e.chunk(ctx, work, keys)
		returned = true
	})
	return !e.ended()
}

// chunk does the items of a chunk together, and if that fails, one by one.
func (e *each) chunk(ctx context.Context, work chunkWork, keys []string) {
	if e.passing.Load() && e.run.allDone(ctx, keys) {
		e.add(0, len(keys))
		return
	}
	done, err := e.part(ctx, work, keys, 0, len(keys))
	if err == nil {
		e.passing.Store(done == 0)
		e.add(done, len(keys)-done)
		return
	}
	if e.heldUp(ctx, keys, err) {
		return
	}
	for i := range keys {
		done, err := 0, err
		if len(keys) > 1 {
			done, err = e.part(ctx, work, keys, i, i+1)
		}
		switch {
		case err == nil:
			e.add(done, 1-done)
		case e.heldUp(ctx, keys[i:i+1], err):
		default:
			e.fail(ctx, keys[i], err)
		}
		if e.ended() {
			return
		}
	}
}

// part does some items of a chunk in one transaction and returns how many of them
// were not done before. A panic is an error of the work.
func (e *each) part(ctx context.Context, work chunkWork, keys []string, from, till int) (done int, err error) {
	did, err := e.run.take(ctx, keys[from:till], func(ctx context.Context, tx pgx.Tx, taken []string) error {
		done = len(taken)
		return contain(func() error { return harmless(work(ctx, tx, from, till, taken)) })
	})
	if !did {
		done = 0
	}
	return done, err
}

// heldUp ends Each for an error that says nothing about the items.
func (e *each) heldUp(ctx context.Context, keys []string, err error) bool {
	if ctx.Err() == nil && !lease.HeldUp(err) {
		return false
	}
	which := fmt.Sprintf("item %.200q", keys[0])
	if len(keys) > 1 {
		which = fmt.Sprintf("%d items from %.200q on", len(keys), keys[0])
	}
	e.end(fmt.Errorf("%s of %s: %w", which, e.run.Key(), err))
	return true
}

// fail notes an item's failure in the ledger.
func (e *each) fail(ctx context.Context, item string, err error) {
	if noted := e.run.runner.book.FailItem(ctx, e.run.held, item, errorText(err)); noted != nil {
		e.end(fmt.Errorf("failure of item %.200q of %s could not be noted: %w (it failed with: %s)", item, e.run.Key(), schema.Explain(noted), errorText(err)))
		return
	}
	e.run.AddFailed(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.res.Failed++
	if len(e.first) < 10 {
		e.first = append(e.first, ItemError{item, err})
	}
	e.tell()
}

func (e *each) add(done, already int) {
	e.run.AddProcessed(int64(done))
	e.mu.Lock()
	defer e.mu.Unlock()
	e.res.Done += int64(done)
	e.res.AlreadyDone += int64(already)
	e.tell()
}

// tell tells how far it is. e.mu is held.
func (e *each) tell() {
	if e.opts.Progress != nil {
		e.opts.Progress(e.res)
	}
}

// end stops Each with an error; the first one counts.
func (e *each) end(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fatal == nil {
		e.fatal = err
	}
}

// ended reports whether no more items are to be done.
func (e *each) ended() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.fatal != nil || e.stopped()
}

// stopped reports whether there are too many failures. e.mu is held.
func (e *each) stopped() bool { return e.opts.MaxFailures > 0 && e.res.Failed >= e.opts.MaxFailures }

func (e *each) wait() { e.wg.Wait() }

// result waits for all chunks.
func (e *each) result() (EachResult, error) {
	e.wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.res.AlreadyDone > 0 && e.run.Attempt() == 1 {
		e.run.log.Warn("items passed over, their keys were done earlier in this first attempt", "already_done", e.res.AlreadyDone, "step", e.opts.Step)
	}
	var err error
	failed := &ItemsError{e.res, e.stopped(), e.first}
	switch {
	case e.fatal != nil:
		err = e.fatal
	case failed.Failed > 0:
		err = failed
	}
	unread := err
	if e.fatal == nil && !failed.Stopped {
		unread = nil
	}
	e.run.leftUnread(e.opts.Step, unread)
	return e.res, err
}
