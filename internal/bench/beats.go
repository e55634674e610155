//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// heartbeats is one process with 500 running attempts.
func (b *bench) heartbeats(ctx context.Context) error {
	const running, lease = 500, 2 * time.Second
	proxy, err := pgtest.StartProxy(b.url)
	if err != nil {
		return err
	}
	defer proxy.Close()
	r, pool, err := newRunner(ctx, proxy.URL(), "beating", 8, jobrun.Options{Lease: lease})
	if err != nil {
		return err
	}
	defer pool.Close()
	memory := func() (bytes, goroutines float64) {
		for range 5 { // a stack that has grown shrinks by half in each
			runtime.GC()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc + m.StackInuse), float64(runtime.NumGoroutine())
	}
	bytes, goroutines := memory()

	end, ended, started := make(chan struct{}), make(chan error, running), make(chan struct{}, running)
	for range running {
		job := jobrun.Job{Name: fresh(), Func: func(context.Context, *jobrun.Run) error {
			started <- struct{}{}
			<-end
			return nil
		}}
		go func() {
			_, err := r.RunDate(ctx, job, date)
			ended <- err
		}()
	}
	for range running {
		select {
		case <-started:
		case err := <-ended:
			return errors.Join(err, errors.New("a run ended before its time"))
		}
	}
	bytesNow, goroutinesNow := memory()

	sizes := func() (index, updates, hot float64, err error) {
		err = pool.QueryRow(ctx, `
			SELECT pg_indexes_size(c.oid), s.n_tup_upd, s.n_tup_hot_upd
			FROM pg_class AS c
			JOIN pg_stat_user_tables AS s ON s.relid = c.oid
			WHERE c.oid = 'beating.batch_job_attempt'::regclass`).Scan(&index, &updates, &hot)
		return index, updates, hot, err
	}
	indexBefore, updatesBefore, hotBefore, err := sizes()
	if err != nil {
		return err
	}
	const beat = "unnest($1::text[], $2::integer[], $3::text[], $4::bigint[], $5::bigint[])"
	statements, cpu, begin := proxy.Statements(beat), cpuTime(), time.Now()
	wanted := (b.beats + running - 1) / running
	for proxy.Statements(beat)-statements < wanted {
		if time.Since(begin) > time.Duration(wanted)*lease {
			return errors.New("too few beats")
		}
		time.Sleep(lease / 8)
	}
	used, sent := (cpuTime() - cpu).Seconds(), proxy.Statements(beat)-statements
	close(end)
	for range running {
		err = errors.Join(err, <-ended)
	}
	if err != nil {
		return err
	}
	var indexAfter, updates, hot float64
	for range 100 { // statistics come a little later
		if indexAfter, updates, hot, err = sizes(); err != nil {
			return err
		}
		if updates-updatesBefore >= float64((sent+1)*running) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	c := b.out.counts(fmt.Sprintf("%d running attempts in one process", running), "figure")
	defer c.print()
	c.add("attempts that one statement renews", (updates-updatesBefore-running)/float64(sent)) // each was updated once more, at its end
	c.add("this process's share of a core, in %, with the default lease of 2 min", 100*used/float64(sent)/30)
	c.add("goroutines of an attempt", (goroutinesNow-goroutines)/running)
	c.add("kB of memory of an attempt, its goroutines' stacks included", (bytesNow-bytes)/running/1000)
	c.add(fmt.Sprintf("HOT updates, in %%, of %.0f", updates-updatesBefore), 100*(hot-hotBefore)/(updates-updatesBefore))
	c.add("growth of the index in bytes", indexAfter-indexBefore)
	return nil
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
