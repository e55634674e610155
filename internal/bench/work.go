package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// bench is one run of the command.
type bench struct {
	url   string        // of the server's database postgres
	pairs int           // of slices for each figure
	slice time.Duration // how long one should take
	sides prefixes
	old   int // how many old runs the long history has
	items int
	beats int // for the share of HOT updates
	out   *report
}

// works are what is measured, in the order of the report.
var works = []struct {
	name string
	do   func(b *bench, ctx context.Context) error
}{
	{"run", (*bench).lifecycles},
	{"lost", (*bench).losing},
	{"race", (*bench).racers},
	{"fleet", (*bench).fleet},
	{"items", (*bench).ledger},
	{"retry", (*bench).retries},
	{"cost", (*bench).costs},
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
				return sized(func(n int) slice {
					if all[name].bulk != nil && workers > 1 {
						return all[name].bulk(ctx, n)
					}
					return sliceOf(ctx, n, workers, all[name].run)
				}, workers, b.slice)
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
			for i := range n {
				wg.Go(func() {
					<-start
					begin := time.Now()
					errs[i] = all[name].call(ctx, key)
					took[i] = time.Since(begin).Seconds()
				})
			}
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
	return b.against(t, "bare", []string{"jobrun"}, func(name string) (slice, error) {
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

const (
	bareLedger = `
CREATE TABLE IF NOT EXISTS bare.item (
  job_key varchar(120) NOT NULL, item text COLLATE "C" NOT NULL, attempt integer NOT NULL, done_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (job_key, item)
)`
	bareTake = `INSERT INTO bare.item (job_key, item, attempt) SELECT $1, unnest($2::text[]), 1 ON CONFLICT DO NOTHING`
)

// ledger is items whose work does nothing.
func (b *bench) ledger(ctx context.Context) error {
	t := b.out.table(fmt.Sprintf("%d items whose work does nothing", b.items), "time of one item")
	pool, err := open(ctx, b.url, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, ours, err := newRunner(ctx, b.url, "jobrun", 4, jobrun.Options{})
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := script(ctx, pool, bareSchema+`;`+bareLedger); err != nil {
		return err
	}
	items := make([]string, b.items)
	for i := range items {
		items[i] = fmt.Sprintf("order-%08d", i)
	}
	each := func(size int) slice {
		return func() (float64, error) {
			begin := time.Now()
			_, err := r.RunDate(ctx, jobrun.Job{Name: fresh(), Func: func(ctx context.Context, run *jobrun.Run) error {
				_, err := jobrun.Each(ctx, run, jobrun.FromSlice(items), func(s string) string { return s },
					func(context.Context, pgx.Tx, string) error { return nil }, &jobrun.EachOptions{ChunkSize: size})
				return err
			}}, date)
			return time.Since(begin).Seconds() / float64(len(items)), err
		}
	}
	bare := func() (float64, error) {
		begin, key := time.Now(), fresh()
		for part := range slices.Chunk(items, 1000) {
			if _, err := pool.Exec(ctx, bareTake, key, part); err != nil {
				return 0, err
			}
		}
		return time.Since(begin).Seconds() / float64(len(items)), nil
	}
	err = b.with(ctx, b.url, 10, []string{"River", "DBOS, no step"}, func(all map[string]*side) error {
		// A job of River's and a workflow of DBOS's for each: of fewer, which are as many a second.
		few := func(name string) (slice, error) {
			return sized(func(n int) slice {
				if all[name].bulk != nil {
					return all[name].bulk(ctx, n)
				}
				return sliceOf(ctx, n, 8, all[name].run)
			}, 200, 5*b.slice)
		}
		return b.against(t, "bare, `unnest` in chunks of 1000", []string{"jobrun, chunks of 1000", "jobrun, the default", "River", "DBOS, no step"}, func(name string) (slice, error) {
			switch name {
			case "jobrun, chunks of 1000":
				return each(1000), nil
			case "jobrun, the default":
				return each(0), nil
			case "River", "DBOS, no step":
				return few(name)
			default:
				return bare, nil
			}
		})
	})
	return err
}

// retries is a run that fails once and is tried again: two attempts.
func (b *bench) retries(ctx context.Context) error {
	t := b.out.table("a run that fails once, and its retry", "time of both attempts")
	r, ours, err := newRunner(ctx, b.url, "jobrun", 4, jobrun.Options{})
	if err != nil {
		return err
	}
	defer ours.Close()
	pool, err := open(ctx, b.url, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := script(ctx, pool, bareSchema); err != nil {
		return err
	}
	failure := errors.New("once")
	again := func(ctx context.Context, key string) error {
		job := jobrun.Job{
			Name: key, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return time.Nanosecond }},
			Func: func(_ context.Context, run *jobrun.Run) error {
				if run.Attempt() == 1 {
					return failure
				}
				return nil
			},
		}
		if _, err := r.RunDate(ctx, job, date); !errors.Is(err, failure) {
			return fmt.Errorf("the first attempt: %w", err)
		}
		results, err := r.RetryDue(ctx, job)
		if err == nil && (len(results) != 1 || !results[0].Ran()) {
			err = fmt.Errorf("the retry: %v", results)
		}
		return err
	}
	byHand := func(ctx context.Context, key string) error {
		for _, sql := range []string{
			`INSERT INTO bare.batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'bench-00000000') ON CONFLICT (job_key) DO NOTHING`,
			`UPDATE bare.batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'once' WHERE job_key = $1`,
			`SELECT status FROM bare.batch_job_run WHERE job_key = $1 AND status = 'FAILED'`,
			`UPDATE bare.batch_job_run SET status = 'RUNNING', started_at = now(), finished_at = NULL, error_message = NULL WHERE job_key = $1 AND status = 'FAILED'`,
			bareFinish,
		} {
			if _, err := pool.Exec(ctx, sql, key+suffix); err != nil {
				return err
			}
		}
		return nil
	}
	return b.against(t, "bare", []string{"jobrun"}, func(name string) (slice, error) {
		op := byHand
		if name == "jobrun" {
			op = again
		}
		return sized(func(n int) slice { return sliceOf(ctx, n, 1, op) }, 1, b.slice)
	})
}

// costs counts what one operation of each side takes: WAL, statements, round trips
// and allocations.
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
	names := []string{"bare", "by hand, with history", "jobrun's own by hand", "jobrun", "DBOS, no step", "DBOS, 1 step", "River", "pglock", "gocron, advisory lock"}
	t := b.out.counts("what one run takes, 8 at a time", "WAL in bytes", "round trips", "allocations")
	lost := b.out.counts("what a call for a run that is done takes", "WAL in bytes", "round trips", "allocations")
	defer lost.print()
	defer t.print()
	for _, name := range names {
		err := b.with(ctx, proxy.URL(), 10, []string{name}, func(all map[string]*side) error {
			s := all[name]
			count := func(rows *counts, fn func() error) error {
				if err := fn(); err != nil { // connections, plans
					return err
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
					_, err := s.bulk(ctx, n)()
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

	sizes := func() (table, index, updates, hot float64, err error) {
		err = pool.QueryRow(ctx, `
			SELECT pg_table_size(c.oid), pg_indexes_size(c.oid), s.n_tup_upd, s.n_tup_hot_upd
			FROM pg_class AS c
			JOIN pg_stat_user_tables AS s ON s.relid = c.oid
			WHERE c.oid = 'beating.batch_job_attempt'::regclass`).Scan(&table, &index, &updates, &hot)
		return table, index, updates, hot, err
	}
	_, indexBefore, updatesBefore, hotBefore, err := sizes()
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
		if _, indexAfter, updates, hot, err = sizes(); err != nil {
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

// history is the same calls on a table with few old runs and on one with many.
func (b *bench) history(ctx context.Context) error {
	admin, err := open(ctx, b.url, 1)
	if err != nil {
		return err
	}
	defer admin.Close()
	const few = 10_000
	type place struct {
		r    *jobrun.Runner
		pool *pgxpool.Pool
		job  jobrun.Job
	}
	places := map[string]place{}
	for name, runs := range map[string]int{"few": few, "many": b.old} {
		if _, err := admin.Exec(ctx, `CREATE DATABASE old_`+name); err != nil {
			return err
		}
		url := strings.Replace(b.url, "/postgres?", "/old_"+name+"?", 1)
		r, pool, err := newRunner(ctx, url, "jobrun", 4, jobrun.Options{})
		if err != nil {
			return err
		}
		defer pool.Close()
		if err := fill(ctx, pool, runs); err != nil {
			return err
		}
		job := jobrun.Job{Name: "job-007", Func: noop, Retry: jobrun.Retry{MaxAttempts: 3}}
		places[name] = place{r, pool, job}
	}
	for _, work := range []struct {
		name string
		do   func(p place, key string) error
	}{
		{"a complete run", func(p place, key string) error {
			_, err := p.r.RunDate(ctx, jobrun.Job{Name: key, Func: noop}, date)
			return err
		}},
		{"Stale", func(p place, _ string) error { _, err := p.r.Stale(ctx); return err }},
		{"RetryDue, nothing due", func(p place, _ string) error { _, err := p.r.RetryDue(ctx, p.job); return err }},
		{"Attention, 20 failed runs", func(p place, _ string) error { _, err := p.r.Attention(ctx, nil); return err }},
		{"List, a page of 100 of one job", func(p place, _ string) error {
			_, err := p.r.List(ctx, jobrun.Filter{Job: "job-007", Limit: 100})
			return err
		}},
	} {
		t := b.out.table(fmt.Sprintf("%s, %d old runs against %d", work.name, b.old, few), "time of one call")
		err := b.against(t, "few", []string{"many"}, func(name string) (slice, error) {
			p := places[name]
			return sized(func(n int) slice {
				return sliceOf(ctx, n, 1, func(_ context.Context, key string) error { return work.do(p, key) })
			}, 1, b.slice)
		})
		if err != nil {
			return err
		}
	}
	rows, _ := places["many"].pool.Query(ctx, `
		SELECT c.relname, pg_relation_size(c.oid) / 1e6
		FROM pg_class AS c
		JOIN pg_namespace AS n ON n.oid = c.relnamespace
		WHERE n.nspname = 'jobrun' AND c.relkind IN ('r', 'i') AND c.relname ~ '^batch_job_(run|attempt)'
		ORDER BY c.relkind DESC, c.relname`)
	c := b.out.counts(fmt.Sprintf("size of tables and indexes with %d old runs", b.old), "MB")
	defer c.print()
	var name string
	var size float64
	_, err = pgx.ForEachRow(rows, []any{&name, &size}, func() error {
		c.add("`"+name+"`", size)
		return nil
	})
	return err
}

// fill writes old runs of 500 jobs with their attempts, 20 of them FAILED for good.
func fill(ctx context.Context, pool *pgxpool.Pool, runs int) error {
	for _, sql := range []string{
		fmt.Sprintf(`
			INSERT INTO jobrun.batch_job_run
			  (job_key, status, started_at, finished_at, worker_id, job_name, business_date, scheduled_for, attempt, executions, token)
			SELECT format('job-%%s:%%s', to_char(n %% 500, 'FM000'), d), CASE WHEN n > %[1]d - 20 THEN 'FAILED' ELSE 'SUCCEEDED' END,
			  d + interval '1 hour', d + interval '62 minutes', 'worker-' || to_char(n %% 4, 'FM00000000'),
			  format('job-%%s', to_char(n %% 500, 'FM000')), d, d + interval '1 hour', 1, 1, gen_random_uuid()
			FROM generate_series(1, %[1]d) AS n, LATERAL (SELECT date '1999-01-01' + (n / 500)::integer) AS t (d)`, runs),
		`INSERT INTO jobrun.batch_job_attempt
		  (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, finished_at, outcome, ended_by)
		SELECT job_key, 1, token, worker_id, 'SCHEDULE', started_at, finished_at, interval '2 minutes', interval '20 minutes', finished_at, status, 'WORKER'
		FROM jobrun.batch_job_run`,
		`VACUUM ANALYZE`,
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}
