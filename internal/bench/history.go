package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
)

// history is the same calls on a table with few old runs and on those with many.
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
	var many []string
	for _, runs := range append([]int{few}, b.old...) {
		name := strconv.Itoa(runs)
		if runs != few {
			many = append(many, name)
		}
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
		{"List, a page of 20 of one job", func(p place, _ string) error {
			_, err := p.r.List(ctx, jobrun.Filter{Job: "job-007", Limit: 20})
			return err
		}},
	} {
		t := b.out.table(work.name+" beside old runs", "time of one call")
		err := b.against(t, strconv.Itoa(few), many, func(name string) (slice, error) {
			p := places[name]
			return sized(func(n int) slice {
				return sliceOf(ctx, n, 1, func(_ context.Context, key string) error { return work.do(p, key) })
			}, 1, b.slice)
		})
		if err != nil {
			return err
		}
	}
	if len(many) == 0 {
		return nil
	}
	most := many[len(many)-1]
	rows, _ := places[most].pool.Query(ctx, `
		SELECT c.relname, pg_relation_size(c.oid) / 1e6
		FROM pg_class AS c
		JOIN pg_namespace AS n ON n.oid = c.relnamespace
		WHERE n.nspname = 'jobrun' AND c.relkind IN ('r', 'i') AND c.relname ~ '^batch_job_(run|attempt)'
		ORDER BY c.relkind DESC, c.relname`)
	c := b.out.counts("size of tables and indexes with "+most+" old runs", "MB")
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
