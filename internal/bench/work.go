package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// bench is one run of the command.
type bench struct {
	url   string        // of the server's database postgres
	pairs int           // of slices for each figure
	slice time.Duration // how long one should take
	sides prefixes
	old   []int // how many old runs the long histories have
	items int
	beats int // for the share of HOT updates
	out   *report
}

// works are what is measured, in the order of the report.
var works = []struct {
	name string
	do   func(b *bench, ctx context.Context) error
}{
	{"cost", (*bench).costs}, // first: in large indexes full pages are most of the WAL
	{"run", (*bench).lifecycles},
	{"claim", (*bench).claims},
	{"lost", (*bench).losing},
	{"race", (*bench).racers},
	{"fleet", (*bench).fleet},
	{"items", (*bench).ledger},
	{"retry", (*bench).retries},
	{"beats", (*bench).heartbeats},
	{"history", (*bench).history},
}

// with starts the sides, calls fn and ends them.
func (b *bench) with(ctx context.Context, url string, conns int, names []string, fn func(all map[string]*side) error) (err error) {
	all := map[string]*side{}
	defer func() {
		for _, s := range all {
			s.end()
		}
	}()
	for _, name := range names {
		if all[name], err = newSide(ctx, name, url, conns); err != nil {
			delete(all, name)
			return err
		}
	}
	return fn(all)
}

// against compares sides with one of them by slices that make gives for each.
func (b *bench) against(table *table, base string, names []string, make func(name string) (slice, error)) error {
	reference, err := make(base)
	if err != nil {
		return fmt.Errorf("%s: %w", base, err)
	}
	for _, name := range names {
		s, err := make(name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		c, err := compare(b.pairs, s, reference)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		table.add(name, base, c)
	}
	return nil
}

// atATime says how many work at the same time.
func atATime(workers int) string {
	if workers == 1 {
		return ""
	}
	return fmt.Sprintf(", %d at a time", workers)
}

// prefixes is a list of them.
type prefixes []string

func (p *prefixes) String() string { return strings.Join(*p, ",") }

func (p *prefixes) Set(list string) error {
	*p = strings.Split(list, ",")
	for _, prefix := range *p {
		names := slices.Sorted(maps.Keys(sides))
		if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, prefix) }) {
			return fmt.Errorf("none of the sides begins with %q: %s", prefix, strings.Join(names, "; "))
		}
	}
	return nil
}

// wanted are the names of sides that begin with one of the prefixes.
func (p prefixes) wanted(names ...string) []string {
	return slices.DeleteFunc(names, func(name string) bool {
		return len(p) > 0 && !slices.ContainsFunc(p, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
}

// lifecycles is a complete run of a function that does nothing.
func (b *bench) lifecycles(ctx context.Context) error {
	peers := b.sides.wanted("by hand, with history", "jobrun's own by hand", "jobrun", "DBOS, no step", "DBOS, 1 step", "River", "pglock", "gocron, advisory lock")
	for _, workers := range []int{1, 8, 32} {
		t := b.out.table("a complete run"+atATime(workers), "time of one run")
		err := b.with(ctx, b.url, workers+2, append([]string{"bare"}, peers...), func(all map[string]*side) error {
			make := func(name string) (slice, error) {
				if all[name].bulk != nil && workers > 1 { // long enough for a pipeline to fill
					return sized(func(n int) slice { return all[name].bulk(ctx, n, workers) }, workers, 20*b.slice)
				}
				return sized(func(n int) slice { return sliceOf(ctx, n, workers, all[name].run) }, workers, b.slice)
			}
			if err := b.against(t, "bare", peers, make); err != nil {
				return err
			}
			for _, floor := range peers {
				if !strings.Contains(floor, "by hand") || !slices.Contains(peers, "jobrun") {
					continue
				}
				if err := b.against(t, floor, []string{"jobrun"}, make); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// claims is a winning claim, which nobody finishes.
func (b *bench) claims(ctx context.Context) error {
	peers := b.sides.wanted("by hand, with history", "jobrun's own by hand")
	t := b.out.table("a winning claim alone", "time of one claim")
	return b.with(ctx, b.url, 3, append([]string{"bare"}, peers...), func(all map[string]*side) error {
		return b.against(t, "bare", peers, func(name string) (slice, error) {
			return sized(func(n int) slice { return sliceOf(ctx, n, 1, all[name].claim) }, 1, b.slice)
		})
	})
}

// losing is a call for a key that somebody has finished before.
func (b *bench) losing(ctx context.Context) error {
	peers := b.sides.wanted("jobrun", "River", "DBOS, no step")
	for _, workers := range []int{1, 8} {
		t := b.out.table("a call for a run that is done"+atATime(workers), "time of one call")
		err := b.with(ctx, b.url, workers+2, append([]string{"bare"}, peers...), func(all map[string]*side) error {
			return b.against(t, "bare", peers, func(name string) (slice, error) {
				s, key := all[name], fresh()
				if err := s.run(ctx, key); err != nil {
					return nil, err
				}
				return sized(func(n int) slice {
					return sliceOf(ctx, n, workers, func(ctx context.Context, _ string) error { return s.call(ctx, key) })
				}, workers, b.slice)
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// racers is 64 calls for one key at one instant.
func (b *bench) racers(ctx context.Context) error {
	const n = 64
	peers := b.sides.wanted("jobrun", "River", "DBOS, no step")
	return b.with(ctx, b.url, n, append([]string{"bare"}, peers...), func(all map[string]*side) error {
		race := func(name string) (took []float64, err error) {
			var wg sync.WaitGroup
			took, errs, start, key := make([]float64, n), make([]error, n), make(chan struct{}), fresh()
			var begin time.Time // the instant, for all of them
			for i := range n {
				wg.Go(func() {
					<-start
					errs[i] = all[name].call(ctx, key)
					took[i] = time.Since(begin).Seconds()
				})
			}
			begin = time.Now()
			close(start)
			wg.Wait()
			return took, errors.Join(errs...)
		}
		for _, figure := range []struct {
			name string
			of   func(took []float64) float64
		}{
			{"until the median of the calls has returned", func(took []float64) float64 { return spreadOf(took).median }},
			{"until all have returned", func(took []float64) float64 { return slices.Max(took) }},
		} {
			t := b.out.table("64 calls for one key at one instant, "+figure.name, "time")
			err := b.against(t, "bare", peers, func(name string) (slice, error) {
				return func() (float64, error) {
					const times = 8 // a single race is over in an instant
					sum := 0.0
					for range times {
						took, err := race(name)
						if err != nil {
							return 0, err
						}
						sum += figure.of(took)
					}
					return sum / times, nil
				}, nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// fleet is 200 jobs that start at one instant in 8 instances, each over 4
// connections of its own, in an order of its own.
func (b *bench) fleet(ctx context.Context) error {
	const jobs, instances, conns = 200, 8, 4
	t := b.out.table("200 jobs at one instant in 8 instances of 4 connections, until all are decided", "time")
	ours, bare := make([]*side, instances), make([]*side, instances)
	for i := range instances {
		for name, all := range map[string][]*side{"jobrun": ours, "bare": bare} {
			s, err := newSide(ctx, name, b.url, conns)
			if err != nil {
				return err
			}
			defer s.end()
			all[i] = s
		}
	}
	at := map[string][]*side{"jobrun": ours, "bare": bare}
	return b.against(t, "bare", b.sides.wanted("jobrun"), func(name string) (slice, error) {
		return func() (float64, error) {
			keys := make([]string, jobs)
			for i := range keys {
				keys[i] = fresh()
			}
			var wg sync.WaitGroup
			start, errs := make(chan struct{}), make(chan error, jobs*instances)
			for _, s := range at[name] {
				for _, n := range rand.Perm(jobs) {
					wg.Go(func() {
						<-start
						errs <- s.call(ctx, keys[n])
					})
				}
			}
			begin := time.Now()
			close(start)
			wg.Wait()
			close(errs)
			took := time.Since(begin).Seconds()
			var err error
			for e := range errs {
				err = errors.Join(err, e)
			}
			return took, err
		}, nil
	})
}

// costs counts what one operation of each side takes: WAL, round trips and
// allocations.
func (b *bench) costs(ctx context.Context) error {
	const n = 200
	proxy, err := pgtest.StartProxy(b.url)
	if err != nil {
		return err
	}
	defer proxy.Close()
	admin, err := open(ctx, b.url, 1)
	if err != nil {
		return err
	}
	defer admin.Close()
	names := append([]string{"bare"}, b.sides.wanted("by hand, with history", "jobrun's own by hand", "jobrun", "DBOS, no step", "DBOS, 1 step", "River", "pglock", "gocron, advisory lock")...)
	t := b.out.counts("what one run takes, 8 at a time", "WAL in bytes", "round trips", "allocations")
	lost := b.out.counts("what a call for a run that is done takes", "WAL in bytes", "round trips", "allocations")
	defer lost.print()
	defer t.print()
	for _, name := range names {
		err := b.with(ctx, proxy.URL(), 10, []string{name}, func(all map[string]*side) error {
			s := all[name]
			count := func(rows *counts, fn func() error) error {
				// A page that is changed for the first time after a checkpoint is in the WAL as a whole.
				if _, err := admin.Exec(ctx, `CHECKPOINT`); err != nil {
					return err
				}
				for range 3 { // connections, plans, and those pages
					if err := fn(); err != nil {
						return err
					}
				}
				trips := proxy.Requests()
				var wal float64
				allocs, err := allocsOf(func() (err error) {
					wal, err = walOf(ctx, admin, fn)
					return err
				})
				if err == nil {
					rows.add(name, wal/n, float64(proxy.Requests()-trips)/n, allocs/n)
				}
				return err
			}
			err := count(t, func() error {
				if s.bulk != nil {
					_, err := s.bulk(ctx, n, 8)()
					return err
				}
				return spreadOver(8, n, func() error { return s.run(ctx, fresh()) })
			})
			if err != nil || slices.Contains([]string{"by hand, with history", "jobrun's own by hand", "DBOS, 1 step", "pglock", "gocron, advisory lock"}, name) {
				return err
			}
			key := fresh()
			if err := s.run(ctx, key); err != nil {
				return err
			}
			return count(lost, func() error { return spreadOver(1, n, func() error { return s.call(ctx, key) }) })
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
