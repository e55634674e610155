package jobrun_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// The benchmarks of items compare with the bare statements by hand, over an own pool
// of the same size, on a server with default durability; runs, claims and other
// libraries are in internal/bench. One iteration is two adjacent slices, A then B or B
// then A; what is reported is the median of the slices' ratios with its quartiles, and
// the same for A against A: the resolution of the measurement.

// benchServer is a durable server with the tables of jobrun, never analyzed, and
// those of the bare statements in a schema of their own.
func benchServer(b *testing.B, conns int32) (runner *jobrun.Runner, ours, bare *pgxpool.Pool) {
	b.Helper()
	ctx := context.Background()
	server, err := pgtest.Start(ctx, pgtest.Options{Durable: true, Settings: map[string]string{"autovacuum": "off"}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(server.Stop)
	pool := func() *pgxpool.Pool {
		config, err := pgxpool.ParseConfig(server.URL("postgres"))
		if err != nil {
			b.Fatal(err)
		}
		config.MaxConns = conns
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(pool.Close)
		return pool
	}
	ours, bare = pool(), pool()
	exec(b, bare, `CREATE SCHEMA bare`)
	runner = newRunner(b, ours, jobrun.Options{})
	if err := runner.Migrate(ctx); err != nil {
		b.Fatal(err)
	}
	return runner, ours, bare
}

// compare alternates slices of ours and bare and reports the ratio ours/bare.
func compare(b *testing.B, ours, bare func()) {
	b.Helper()
	timed := func(f func()) float64 {
		start := time.Now()
		f()
		return time.Since(start).Seconds()
	}
	for range 3 { // connections and plans
		ours()
		bare()
	}
	var ratios, control []float64
	for n := 0; b.Loop(); n++ {
		var a, c float64
		if n%2 == 0 {
			a, c = timed(ours), timed(bare)
		} else {
			c, a = timed(bare), timed(ours)
		}
		ratios = append(ratios, a/c)
		control = append(control, timed(bare)/c)
	}
	quantile := func(v []float64, q float64) float64 {
		slices.Sort(v)
		return v[int(q*float64(len(v)-1))]
	}
	b.ReportMetric(quantile(ratios, 0.5), "ratio")
	b.ReportMetric(quantile(ratios, 0.25), "ratio-q1")
	b.ReportMetric(quantile(ratios, 0.75), "ratio-q3")
	b.ReportMetric(quantile(control, 0.5), "A/A")
}

// walPer is the WAL that one of the n operations of a slice writes, in bytes.
func walPer(b *testing.B, pool *pgxpool.Pool, n int, slice func()) float64 {
	b.Helper()
	const lsn = `SELECT pg_current_wal_insert_lsn()::text`
	before := query[string](b, pool, lsn)
	slice()
	return float64(query[int64](b, pool, `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::text::pg_lsn)::bigint`, before)) / float64(n)
}

// allocsPer is how often one of the n operations of a slice allocates memory, in
// this process.
func allocsPer(n int, slice func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	slice()
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(n)
}

// name is a fresh name of a job, of a usual length.
func name() string { return fmt.Sprintf("settlement-%06d", jobNames.Add(1)) }

var jobNames atomic.Int64

func fail(b *testing.B, err error) {
	if err != nil {
		b.Error(err)
	}
}

// itemKeys are the keys of so many items.
func itemKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("order-%08d", i)
	}
	return keys
}

func same(s string) string { return s }

// eachSlice is a run of a fresh job that does the items by Each.
func eachSlice(b *testing.B, runner *jobrun.Runner, keys []string, fn func(context.Context, pgx.Tx, string) error, opts *jobrun.EachOptions) func() {
	return func() {
		_, err := runner.RunDate(context.Background(), jobrun.Job{Name: name(), Func: func(ctx context.Context, run *jobrun.Run) error {
			res, err := jobrun.Each(ctx, run, jobrun.FromSlice(keys), same, fn, opts)
			if res.Done != int64(len(keys)) {
				b.Errorf("%+v", res)
			}
			return err
		}}, date)
		fail(b, err)
	}
}

const (
	bareLedger = `CREATE TABLE bare.item (job_key varchar(120) NOT NULL, item text COLLATE "C" NOT NULL, attempt integer NOT NULL,
  done_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (job_key, item))`
	bareTake = `INSERT INTO bare.item (job_key, item, attempt) SELECT $1, unnest($2::text[]), 1 ON CONFLICT DO NOTHING`
)

// BenchmarkEachUpdate is Each with one UPDATE for each item, against the same
// UPDATEs in plain transactions of as many items.
func BenchmarkEachUpdate(b *testing.B) {
	const size, n = 1000, 4000
	runner, _, bare := benchServer(b, 4)
	ctx := context.Background()
	keys := itemKeys(n)
	exec(b, bare, `CREATE TABLE bare.account (id text PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50)`)
	exec(b, bare, `INSERT INTO bare.account SELECT unnest($1::text[]), 0`, keys)
	const update = `UPDATE bare.account SET balance = balance + 1 WHERE id = $1`
	ours := eachSlice(b, runner, keys, func(ctx context.Context, tx pgx.Tx, key string) error {
		_, err := tx.Exec(ctx, update, key)
		return err
	}, &jobrun.EachOptions{ChunkSize: size})
	compare(b, ours, func() {
		for part := range slices.Chunk(keys, size) {
			fail(b, pgx.BeginFunc(ctx, bare, func(tx pgx.Tx) error {
				for _, key := range part {
					if _, err := tx.Exec(ctx, update, key); err != nil {
						return err
					}
				}
				return nil
			}))
		}
	})
	b.ReportMetric(allocsPer(n, ours), "allocs/item")
}

// BenchmarkEachAllDone is a re-run over 100,000 items that are all done, against
// the bare statements that find that out in chunks of 1000.
func BenchmarkEachAllDone(b *testing.B) {
	runner, ours, bare := benchServer(b, 4)
	exec(b, bare, bareLedger)
	keys, ctx := itemKeys(100_000), context.Background()
	job := jobrun.Job{Name: "settlement", Func: func(ctx context.Context, run *jobrun.Run) error {
		_, err := jobrun.Each(ctx, run, jobrun.FromSlice(keys), same, func(context.Context, pgx.Tx, string) error { return nil }, nil)
		return err
	}}
	again := func() {
		exec(b, ours, `UPDATE batch_job_run SET status = 'FAILED', next_attempt_at = now(), token = NULL`)
		res, err := runner.RunDate(ctx, job, date)
		if fail(b, err); !res.Ran() {
			b.Error(res.Decision)
		}
	}
	_, err := runner.RunDate(ctx, job, date)
	fail(b, err)
	check := func() {
		for part := range slices.Chunk(keys, 1000) {
			_, err := bare.Exec(ctx, bareTake, "settlement:2026-09-15", part)
			fail(b, err)
		}
	}
	check()
	compare(b, again, check)
	b.ReportMetric(allocsPer(len(keys), again), "allocs/item")
}

// BenchmarkOnce is Once with one INSERT, against a bare transaction with that
// INSERT and the ledger's.
func BenchmarkOnce(b *testing.B) {
	runner, _, bare := benchServer(b, 4)
	exec(b, bare, bareLedger+`; CREATE TABLE bare.effect (item text NOT NULL)`)
	ctx := context.Background()
	const work = `INSERT INTO bare.effect (item) VALUES ($1)`
	const n = 200
	_, err := runner.RunDate(ctx, jobrun.Job{Name: "settlement", Func: func(ctx context.Context, run *jobrun.Run) error {
		ours := func() {
			for range n {
				item := name()
				ran, err := run.Once(ctx, item, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, work, item)
					return err
				})
				if fail(b, err); !ran {
					b.Error("not run")
				}
			}
		}
		compare(b, ours, func() {
			for range n {
				item := name()
				fail(b, pgx.BeginFunc(ctx, bare, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, `INSERT INTO bare.item (job_key, item, attempt) VALUES ($1, $2, 1)`, "settlement:2026-09-15", item); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, work, item)
					return err
				}))
			}
		})
		b.ReportMetric(allocsPer(n, ours), "allocs/item")
		b.ReportMetric(walPer(b, bare, n, ours), "WAL-B/item")
		return nil
	}}, date)
	fail(b, err)
}
