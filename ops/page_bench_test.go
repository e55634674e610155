package ops_test

import (
	"errors"
	"fmt"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

// BenchmarkPage is one request for each page, with 1 million runs of 200 jobs in the
// table: "go test -run '^$' -bench Page ./ops". It fails if a table was read from its
// beginning to its end.
func BenchmarkPage(b *testing.B) {
	db := pgtest.New(b)
	execute(b, db, `
		INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id, job_name, business_date, attempt, executions, token)
		SELECT format('job-%s:%s', to_char(n % 200, 'FM000'), d), CASE WHEN n % 40000 = 0 THEN 'FAILED' WHEN n % 7 = 0 THEN 'SKIPPED' ELSE 'SUCCEEDED' END,
			d + interval '1 hour', d + interval '62 minutes', 'node-1', format('job-%s', to_char(n % 200, 'FM000')), d, 1, 1, gen_random_uuid()
		FROM generate_series(1, 1000000) AS n, LATERAL (SELECT current_date - 1 - n / 200) AS t (d)`)
	execute(b, db, `
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, finished_at, outcome, ended_by)
		SELECT job_key, 1, token, worker_id, 'SCHEDULE', started_at, finished_at, '2 minutes', '20 minutes', finished_at, status, 'WORKER'
		FROM batch_job_run`)
	execute(b, db, `VACUUM ANALYZE`)
	pool := db.PoolWith(b, func(c *pgxpool.Config) { c.MaxConns = 2 })
	r := newRunner(b, pool, jobrun.Options{})
	key := fmt.Sprintf("job-007:%s", r.Today().AddDays(-100))
	run(b, r, "settlement", r.Today(), jobrun.Retry{}, errors.New("rates are missing"))
	dead(b, db, "job-008", r.Today())
	s := newSite(b, r, &ops.PageOptions{Authorize: login, Jobs: []jobrun.Job{{Name: "job-007", Func: noop}}})
	var before int64
	scans := func() (n int64) {
		if err := db.Pool.QueryRow(b.Context(), `SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname IN ('batch_job_run', 'batch_job_attempt')`).Scan(&n); err != nil {
			b.Fatal(err)
		}
		return n
	}
	before = scans()
	for _, page := range []struct{ name, path string }{
		{"overview", ""},
		{"runs", "runs"},
		{"runs of a job", "runs?job=job-007"},
		{"runs of a job in a month", "runs?job=job-007&from=2020-01-01&to=2020-01-31"},
		{"runs that failed", "runs?status=FAILED"},
		{"runs that succeeded or not", "runs?status=FAILED&status=SUCCEEDED"},
		{"runs that are running", "runs?status=RUNNING"},
		{"runs of a job that failed", "runs?job=job-007&status=FAILED"},
		{"later runs", "runs?after=" + url.QueryEscape("job-100:2020-01-01")},
		{"a run", "run?key=" + url.QueryEscape(key)},
		{"a stale run", "run?key=" + url.QueryEscape("job-008:"+r.Today().String())},
		{"a confirmation", "confirm?do=rerun&key=" + url.QueryEscape(key)},
	} {
		b.Run(page.name, func(b *testing.B) {
			for b.Loop() {
				s.get(page.path, 200)
			}
		})
	}
	pool.Close() // its sessions tell the server what they have read
	if after := scans(); after != before {
		b.Errorf("%d times a table was read from its beginning to its end", after-before)
	}
}
