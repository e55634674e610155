package jobrun

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// FromSlice yields the elements of a slice.
func FromSlice[T any](s []T) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for _, v := range s {
			if !yield(v, nil) {
				return
			}
		}
	}
}

// FromRows yields the rows of a query as it is read, and closes it:
//
//	rows, err := pool.Query(ctx, sql)
//	orders := jobrun.FromRows(rows, err, pgx.RowToStructByName[Order])
//
// It can be read once, and must be within the session's statement_timeout.
// The open query holds a connection beside those that Each works with: if it is
// one of the Runner's pool, that pool needs 3 and one more for each further
// parallel chunk; else Each ends with an error that says so.
func FromRows[T any](rows pgx.Rows, err error, scan pgx.RowToFunc[T]) iter.Seq2[T, error] {
	read := false
	return func(yield func(T, error) bool) {
		var none T
		switch {
		case err != nil:
			yield(none, err)
			return
		case rows == nil || scan == nil:
			yield(none, &InvalidError{"rows or scan", nil, "both"})
			return
		case read:
			yield(none, errors.New("the rows were read before: make the query again"))
			return
		}
		read = true
		defer rows.Close()
		for rows.Next() {
			v, err := scan(rows)
			if !yield(v, err) || err != nil {
				return
			}
		}
		if err := rows.Err(); err != nil {
			yield(none, err)
		}
	}
}

// ItemError is an item that failed.
type ItemError struct {
	Item string
	Err  error // a *PanicError if fn panicked
}

// ItemsError is what Each returns when items failed and nothing else went wrong.
// It does not unwrap to the items' errors, so that one item's Permanent does not
// decide about the run.
type ItemsError struct {
	EachResult
	Stopped bool        // EachOptions.MaxFailures was reached: items may be left that nobody has read, and the run cannot succeed
	First   []ItemError // the first failures, at most 10; FailedItems lists all
}

func (e *ItemsError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d items failed", e.Failed, e.Done+e.AlreadyDone+e.Failed)
	if e.Stopped {
		b.WriteString(", stopped at the limit of failures")
	}
	for i, f := range e.First {
		sep := "; "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%s%.200q: %.400s", sep, f.Item, errorText(f.Err))
	}
	if more := e.Failed - int64(len(e.First)); more > 0 {
		fmt.Fprintf(&b, "; and %d more", more)
	}
	return b.String()
}

// FailedItem is an item of a run that failed and is not done.
type FailedItem struct {
	Item     string
	Attempt  int       // the latest in which it failed
	Failures int       // in how many attempts it failed
	FailedAt time.Time // the latest time, by the database clock, in the business zone
	Error    string    // of the latest failure, at most 8 KiB
}

// FailedItems lists the items that failed in Each and are not done yet, in the
// byte order of their keys: the first limit (1 to 1000) after an item, "" for the
// first page.
func (r *Runner) FailedItems(ctx context.Context, key, after string, limit int) ([]FailedItem, error) {
	if limit < 1 || limit > 1000 {
		return nil, &InvalidError{"limit", limit, "1 to 1000"}
	}
	if store.CleanText(key) != key || store.CleanText(after) != after {
		return nil, &InvalidError{"key or item", key + " " + after, "valid UTF-8 without NUL"}
	}
	var rows []store.FailedItem
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		rows, err = s.FailedItems(ctx, r.pool, key, after, limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("failed items of %q: %w", key, err)
	}
	items := make([]FailedItem, len(rows))
	for i, f := range rows {
		items[i] = FailedItem{f.Item, f.Attempt, f.Failures, f.At.In(r.zone), f.Error}
	}
	return items, nil
}

// CountItems counts the items of a run that the ledger has as done, and those that
// failed and are not done. Unlike the counts of a Record they are exact at this
// moment, and of all attempts together. Its cost grows with their number.
func (r *Runner) CountItems(ctx context.Context, key string) (done, failed int64, err error) {
	if store.CleanText(key) != key {
		return 0, 0, &InvalidError{"key", key, "valid UTF-8 without NUL"}
	}
	err = r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		done, failed, err = s.CountItems(ctx, r.pool, key)
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("items of %q: %w", key, err)
	}
	return done, failed, nil
}

// maxItem is how many bytes the key of an item may have: with the key of the run
// it fits in an entry of a PostgreSQL index, at most 2704 bytes.
const maxItem = 1024

// validItem judges the key of an item.
func validItem(field, item string) error {
	if item == "" || len(item) > maxItem || strings.ContainsRune(item, 0) || !utf8.ValidString(item) {
		return &InvalidError{field, item, fmt.Sprintf("1 to %d bytes of valid UTF-8 without NUL; these are %d bytes", maxItem, len(item))}
	}
	return nil
}
