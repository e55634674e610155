package main

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A slice is a short stretch of work of one side. It returns the seconds that one
// operation took: of its wall time, or as the work defines it.
type slice func() (float64, error)

// spread is the median of some figures, with the least and the greatest.
type spread struct{ median, least, greatest float64 }

func spreadOf(figures []float64) spread {
	sorted := slices.Sorted(slices.Values(figures))
	if len(sorted) == 0 {
		return spread{math.NaN(), math.NaN(), math.NaN()}
	}
	middle := sorted[len(sorted)/2]
	if len(sorted)%2 == 0 {
		middle = (middle + sorted[len(sorted)/2-1]) / 2
	}
	return spread{middle, sorted[0], sorted[len(sorted)-1]}
}

// comparison is one side against another in adjacent slices.
type comparison struct {
	ratio   spread // a to b, pair by pair
	control spread // b to b: what the ratio would be if nothing were different
	base    spread // seconds of one operation of b
	pairs   int
}

// compare lets two sides work in turn, b a b', for as many pairs: the ratio is that of
// a to the mean of its neighbours, so that what changes slowly touches both, and what
// one leaves behind for the next is not to the advantage of the one side only.
func compare(pairs int, a, b slice) (c comparison, err error) {
	var ratios, controls, bases []float64
	timed := func(s slice) (seconds float64) {
		if err == nil {
			seconds, err = s()
		}
		return seconds
	}
	timed(a) // connections, plans
	timed(b)
	for range pairs {
		before, one, after := timed(b), timed(a), timed(b)
		if err != nil {
			return c, err
		}
		base := (before + after) / 2
		ratios, controls, bases = append(ratios, one/base), append(controls, after/before), append(bases, base)
	}
	return comparison{spreadOf(ratios), spreadOf(controls), spreadOf(bases), pairs}, nil
}

// operation is one piece of work, of a worker. Its key is fresh.
type operation func(ctx context.Context, key string) error

var keys atomic.Int64

// fresh is a key of the usual length that was never used.
func fresh() string { return fmt.Sprintf("settlement-%08d", keys.Add(1)) }

// sliceOf is n operations spread over so many workers; its figure is their wall
// time by n.
func sliceOf(ctx context.Context, n, workers int, op operation) slice {
	return func() (float64, error) {
		begin := time.Now()
		err := spreadOver(workers, n, func() error { return op(ctx, fresh()) })
		return time.Since(begin).Seconds() / float64(n), err
	}
}

// spreadOver calls fn n times, by so many workers, and returns the first error.
func spreadOver(workers, n int, fn func() error) error {
	var all sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		share := n / workers
		if w < n%workers {
			share++
		}
		all.Go(func() {
			for range share {
				if errs[w] = fn(); errs[w] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// sized makes the slice so long that it takes about the wanted time.
func sized(make func(n int) slice, least int, wanted time.Duration) (slice, error) {
	n := least
	for {
		s := make(n)
		begin := time.Now()
		if _, err := s(); err != nil {
			return nil, err
		}
		took := time.Since(begin)
		if took >= wanted*2/3 || n >= 1<<20 {
			return s, nil
		}
		n = max(n+1, min(n*8, int(float64(n)*float64(wanted)/float64(max(took, time.Microsecond)))))
	}
}

// walOf is the WAL in bytes that fn made the server write.
func walOf(ctx context.Context, pool *pgxpool.Pool, fn func() error) (bytes float64, err error) {
	var before string
	if err := pool.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&before); err != nil {
		return 0, err
	}
	if err := fn(); err != nil {
		return 0, err
	}
	err = pool.QueryRow(ctx, `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::text::pg_lsn)::float8`, before).Scan(&bytes)
	return bytes, err
}

// allocsOf is how often fn allocates memory in this process.
func allocsOf(fn func() error) (allocs float64, err error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err = fn()
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs - before.Mallocs), err
}
