package jobrun_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// A logBook is a slog.Handler that keeps what it is given.
type logBook struct {
	shared *logPages
	bound  []slog.Attr
}

type logPages struct {
	mu    sync.Mutex
	lines []logLine
}

type logLine struct {
	level   slog.Level
	message string
	attrs   map[string]slog.Value
}

func newLogBook() *logBook { return &logBook{shared: new(logPages)} }

func (b *logBook) Enabled(context.Context, slog.Level) bool { return true }

func (b *logBook) Handle(_ context.Context, r slog.Record) error {
	line := logLine{r.Level, r.Message, map[string]slog.Value{}}
	add := func(a slog.Attr) bool {
		if _, twice := line.attrs[a.Key]; twice {
			a.Key += " twice"
		}
		line.attrs[a.Key] = a.Value
		return true
	}
	for _, a := range b.bound {
		add(a)
	}
	r.Attrs(add)
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	b.shared.lines = append(b.shared.lines, line)
	return nil
}

func (b *logBook) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &logBook{b.shared, append(slices.Clip(b.bound), attrs...)}
}

func (b *logBook) WithGroup(string) slog.Handler { panic("jobrun's attributes are in no group") }

func (b *logBook) all() []logLine {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	return slices.Clone(b.shared.lines)
}

// take returns the lines and forgets them.
func (b *logBook) take() []logLine {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	lines := b.shared.lines
	b.shared.lines = nil
	return lines
}

func (b *logBook) count(level slog.Level) (n int) {
	for _, line := range b.all() {
		if line.level == level {
			n++
		}
	}
	return n
}

func TestGetOfNoRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for _, key := range []string{"daily:2026-09-15", "", "daily", "a\x00b", "\xff", strings.Repeat("한", 1000), strings.Repeat("a", 1<<20)} {
		if rec, err := r.Get(t.Context(), key); !errors.Is(err, jobrun.ErrNotFound) || rec != (jobrun.Record{}) {
			t.Errorf("Get %.20q: %+v, %v", key, rec, err)
		}
		if entries, err := r.History(t.Context(), key); !errors.Is(err, jobrun.ErrNotFound) || entries != nil {
			t.Errorf("History %.20q: %+v, %v", key, entries, err)
		}
	}
}

func TestRecordSaysWhatTheRowSays(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id, error_message, job_name, business_date, scheduled_for,
			attempt, executions, token, next_attempt_at, approved_at, approved_attempt, approved_status, approved_worker, approved_finished_at, pruned_at)
		VALUES ('정산:2026-09-15', 'FAILED', '2026-09-15 00:10:01Z', '2026-09-15 00:12:03.5Z', 'node-1-00c0ffee', '장부 불일치', '정산', '2026-09-15', '2026-09-15 00:10Z',
			3, 3, '6f1c2f0e-7d0f-4a53-9d3b-0d8c4b1c2a10', '2026-09-15 01:00Z', '2026-09-15 00:50Z', 3, 'FAILED', 'node-1-00c0ffee', '2026-09-15 00:12:03.5Z', '2027-01-01 00:00Z')`)
	exec(t, db.Pool, `INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, items_processed, items_failed, finished_at, outcome)
		VALUES ('정산:2026-09-15', 3, '6f1c2f0e-7d0f-4a53-9d3b-0d8c4b1c2a10', 'node-1-00c0ffee', 'RETRY', '2026-09-15 00:10:01Z', '2026-09-15 00:12:00Z', 41, 1,
			'2026-09-15 00:12:03.5Z', 'FAILED')`)
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, started_at, worker_id) VALUES ('주문 대사', 'PAUSED', '2026-09-15 00:00Z', '노드')`)
	at := func(clock string) time.Time { return instant("2026-09-15T" + clock + "+09:00").In(seoul) }
	for _, c := range []struct {
		want jobrun.Record
		json string
	}{
		{
			jobrun.Record{
				Key: "정산:2026-09-15", Job: "정산", Date: date, Status: jobrun.Failed, Attempt: 3, Trigger: jobrun.TriggerRetry, WorkerID: "node-1-00c0ffee",
				ScheduledFor: at("09:10:00"), StartedAt: at("09:10:01"), FinishedAt: at("09:12:03.5"), HeartbeatAt: at("09:12:00"), NextAttemptAt: at("10:00:00"),
				ApprovedAt: at("09:50:00"), PrunedAt: instant("2027-01-01T00:00:00Z").In(seoul), ItemsProcessed: 41, ItemsFailed: 1, Error: "장부 불일치",
			},
			`{"key":"정산:2026-09-15","job":"정산","date":"2026-09-15","status":"FAILED","attempt":3,"trigger":"RETRY","worker_id":"node-1-00c0ffee",` +
				`"scheduled_for":"2026-09-15T09:10:00+09:00","started_at":"2026-09-15T09:10:01+09:00","finished_at":"2026-09-15T09:12:03.5+09:00",` +
				`"heartbeat_at":"2026-09-15T09:12:00+09:00","next_attempt_at":"2026-09-15T10:00:00+09:00","approved_at":"2026-09-15T09:50:00+09:00",` +
				`"pruned_at":"2027-01-01T09:00:00+09:00","items_processed":41,"items_failed":1,"error":"장부 불일치"}`,
		},
		{
			jobrun.Record{Key: "주문 대사", Status: "PAUSED", Attempt: 1, WorkerID: "노드", StartedAt: at("09:00:00")},
			`{"key":"주문 대사","status":"PAUSED","attempt":1,"worker_id":"노드","started_at":"2026-09-15T09:00:00+09:00","items_processed":0,"items_failed":0}`,
		},
	} {
		got, err := r.Get(t.Context(), c.want.Key)
		text, jsonErr := json.Marshal(got)
		if err != nil || jsonErr != nil || string(text) != c.json {
			t.Errorf("got %s, %v, %v\nwant %s", text, err, jsonErr, c.json)
		}
		var back jobrun.Record
		if err := json.Unmarshal(text, &back); err != nil || back.Date != c.want.Date || !back.StartedAt.Equal(c.want.StartedAt) {
			t.Errorf("read back: %+v, %v", back, err)
		}
		for field, times := range map[string][2]time.Time{
			"ScheduledFor": {got.ScheduledFor, c.want.ScheduledFor}, "StartedAt": {got.StartedAt, c.want.StartedAt}, "FinishedAt": {got.FinishedAt, c.want.FinishedAt},
			"HeartbeatAt": {got.HeartbeatAt, c.want.HeartbeatAt}, "NextAttemptAt": {got.NextAttemptAt, c.want.NextAttemptAt},
			"ApprovedAt": {got.ApprovedAt, c.want.ApprovedAt}, "PrunedAt": {got.PrunedAt, c.want.PrunedAt},
		} {
			if times[0] != times[1] { // the zone too
				t.Errorf("%s: %s is %s, want %s", c.want.Key, field, times[0], times[1])
			}
		}
	}
}

// readKey takes a key apart, as an implementation of its own: name:date or name:slot, every other key is unreadable.
var keyShape = regexp.MustCompile(`^([^:]+):(\d{4}-\d\d-\d\d)(T\d\d:\d\d)?([+-]\d\d:\d\d)?$`)

func readKey(key string) (job, day string) {
	m := keyShape.FindStringSubmatch(key)
	if m == nil || (m[3] == "") != (m[4] == "") {
		return "", ""
	}
	if _, err := time.Parse("2006-01-02 T15:04 -07:00", m[2]+" "+m[3]+" "+m[4]); m[3] != "" && err != nil {
		return "", ""
	}
	if _, err := time.Parse("2006-01-02", m[2]); err != nil || m[2] < "0001" {
		return "", ""
	}
	return m[1], m[2]
}

func TestListAgreesWithAFilterOverAllRows(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	// Runs of ours, slots, and what neighbours may have written.
	exec(t, db.Pool, `
INSERT INTO batch_job_run (job_key, status, worker_id, job_name, business_date)
SELECT job || ':' || day, (ARRAY['RUNNING', 'SUCCEEDED', 'FAILED', 'SKIPPED', 'PAUSED'])[1 + (n * 7 + length(job)) % 5], 'node-1', job, day
FROM unnest(ARRAY['a', 'ab', 'a-b', 'a/b', 'A', 'a.', '정산', '정산-월말', 'zz']) AS job,
  (SELECT n, ('2026-09-10'::date + n) AS day FROM generate_series(0, 9) AS n) AS days`)
	exec(t, db.Pool, `
INSERT INTO batch_job_run (job_key, status, worker_id)
SELECT 'slots:' || '2026-09-1' || n || 'T' || clock, (ARRAY['RUNNING', 'SUCCEEDED', 'FAILED'])[1 + n % 3], 'node-1'
FROM generate_series(1, 7) AS n, unnest(ARRAY['00:00+09:00', '13:00+09:00', '23:30+09:00', '02:00-02:30']) AS clock`)
	for n, key := range []string{
		"", ":", "nokey", "a", "a:", "a:garbage", "a:2026-02-30", "a:2026-13-01", "a:2026-9-15", "a:2026-09-15 ", "a: 2026-09-15", "a:20260915", "a:2026-09-15Z", "a:2026-09-15T25:00+09:00",
		"a:2026-09-15T13:00", "a:2026-09-15T13:00Z", "a:b:2026-09-15", "a:2026-09-15:b", ":2026-09-15", "a b:2026-09-15", "a;2026-09-15", "a;", "정산:어제", "정산:", "정산",
		"zz:9999-12-31", "zz:0001-01-01", "zz:0000-01-01", "zz:２０２６-09-15", "\U0010FFFF:2026-09-15", "\U0010FFFF", "~", "zz:zz",
	} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, $2, '노드')`, key, []string{"RUNNING", "SUCCEEDED", "FAILED", "paused"}[n%4])
	}
	rows, _ := db.Pool.Query(t.Context(), `SELECT job_key, status FROM batch_job_run ORDER BY job_key COLLATE "C" DESC`)
	type row struct{ Key, Status string }
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		t.Fatal(err)
	}
	day := func(s string) jobrun.Date {
		if s == "" {
			return jobrun.Date{}
		}
		return jobrun.MustParseDate(s)
	}
	combinations := 0
	for _, job := range []string{"", "a", "ab", "a-b", "A", "정산", "slots", "zz", "nobody"} {
		for _, status := range [][]jobrun.Status{nil, {jobrun.Failed}, {jobrun.Running, jobrun.Skipped}, {"PAUSED", "paused"}, {"NOBODY'S"}} {
			for _, from := range []string{"", "0001-01-01", "2026-09-13", "2026-09-15"} {
				for _, to := range []string{"", "2026-09-12", "2026-09-15", "9999-12-31"} {
					var want []string
					for _, row := range all {
						name, date := readKey(row.Key)
						if job != "" && name != job || len(status) > 0 && !slices.Contains(status, jobrun.Status(row.Status)) ||
							(from != "" || to != "") && date == "" || from != "" && date < from || to != "" && date > to {
							continue
						}
						want = append(want, row.Key)
					}
					for _, limit := range []int{7, 1000} {
						var got []string
						f := jobrun.Filter{Job: job, Status: status, From: day(from), To: day(to), Limit: limit}
						for {
							page, err := r.List(t.Context(), f)
							if err != nil || len(page) > limit {
								t.Fatalf("%+v: %d records, %v", f, len(page), err)
							}
							for _, rec := range page {
								got = append(got, rec.Key)
								if name, date := readKey(rec.Key); rec.Job != name || rec.Date != day(date) {
									t.Errorf("%q is of job %q, date %s", rec.Key, rec.Job, rec.Date)
								}
							}
							if len(page) < limit {
								break
							}
							f.After = page[len(page)-1].Key
						}
						if !slices.Equal(got, want) {
							more := slices.DeleteFunc(slices.Clone(got), func(key string) bool { return slices.Contains(want, key) })
							t.Errorf("job %q, %q, %s to %s, limit %d: %d records instead of %d, too many: %q", job, status, from, to, limit, len(got), len(want), more)
						}
					}
					combinations++
				}
			}
		}
	}
	t.Logf("%d combinations over %d rows", combinations, len(all))
	if page, err := r.List(t.Context(), jobrun.Filter{}); err != nil || len(page) != 100 {
		t.Errorf("without a limit: %d records, %v; want 100", len(page), err)
	}
	// A page does not shift when rows are added, and may begin after a key that is not there.
	page, err := r.List(t.Context(), jobrun.Filter{Job: "ab", After: "ab:2026-09-15T"})
	if err != nil || len(page) != 6 || page[0].Key != "ab:2026-09-15" {
		t.Errorf("after a key between: %+v, %v", page, err)
	}
	for _, after := range []string{"a:2026-09-15", "", "ac"} { // before, none, behind the job's keys
		page, err := r.List(t.Context(), jobrun.Filter{Job: "ab", After: after})
		if want := map[string]int{"a:2026-09-15": 0, "": 10, "ac": 10}[after]; err != nil || len(page) != want {
			t.Errorf("after %q: %d records, %v; want %d", after, len(page), err, want)
		}
	}
}

// A queryTrace keeps the last query of a connection and its arguments.
type queryTrace struct {
	sql  string
	args []any
}

func (q *queryTrace) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	q.sql, q.args = data.SQL, slices.Clone(data.Args)
	return ctx
}

func (*queryTrace) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Not only by the first few plans, which know the values, but also by the one that is kept.
func TestListReadsOnlyTheRowsOfItsPage(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t) // it prepares statements
	t.Run("tables of Migrate", func(t *testing.T) { listReadsItsPage(t, pgtest.New(t), "batch_job_run_pkey") })
	t.Run("adopted", func(t *testing.T) { listReadsItsPage(t, newAdopted(t), "batch_job_run_key_idx") })
}

// newAdopted is a database whose table of runs was another service's before: its
// keys have the order of the database's collation.
func newAdopted(t *testing.T) *pgtest.DB {
	t.Helper()
	db := pgtest.Empty(t)
	exec(t, db.Pool, seedTable)
	if err := newRunner(t, db.Pool, jobrun.Options{}).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if query[bool](t, db.Pool, `SELECT to_regclass('batch_job_run_key_idx') IS NULL`) {
		t.Fatal("it has no index for the order of keys")
	}
	exec(t, db.Pool, `DELETE FROM batch_job_run`)
	return db
}

func listReadsItsPage(t *testing.T, db *pgtest.DB, index string) {
	exec(t, db.Pool, `
INSERT INTO batch_job_run (job_key, status, worker_id, finished_at, token)
SELECT 'job-' || job || ':' || ('2000-01-01'::date + n), 'SUCCEEDED', 'node-1', now(), gen_random_uuid() FROM generate_series(10, 29) AS job, generate_series(1, 5000) AS n`)
	exec(t, db.Pool, `
INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, started_at, finished_at, outcome)
SELECT job_key, attempt, token, worker_id, started_at, finished_at, status FROM batch_job_run`) // an empty table is joined in another way
	exec(t, db.Pool, `ANALYZE batch_job_run, batch_job_attempt`)
	trace := &queryTrace{}
	r := newRunner(t, db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = trace }), jobrun.Options{})
	session, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Release()
	do := func(sql string) []string {
		rows, _ := session.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return lines
	}
	removed := regexp.MustCompile(`Rows Removed by (?:Join )?Filter: (\d+)`)
	for _, f := range []jobrun.Filter{
		{Job: "job-15", Limit: 50},
		{Job: "job-15", From: jobrun.MustParseDate("2010-01-01"), To: jobrun.MustParseDate("2010-02-01")},
		{Job: "job-15", After: "job-15:2001-01-01", Status: []jobrun.Status{jobrun.Failed, jobrun.Succeeded}, Limit: 50},
		{After: "job-15:2001-01-01", Limit: 50},
		{Limit: 50},
	} {
		if _, err := r.List(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		do(`DEALLOCATE ALL`)
		if err := session.Conn().PgConn().Exec(t.Context(), `PREPARE list AS `+trace.sql).Close(); err != nil {
			t.Fatal(err)
		}
		var args []string
		for _, arg := range trace.args {
			literal := strings.ReplaceAll(strings.NewReplacer("[", "{", "]", "}", " ", ",").Replace(fmt.Sprint(arg)), "'", "''")
			args = append(args, "'"+literal+"'")
		}
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			do(`SET plan_cache_mode = ` + mode)
			plan := strings.Join(do(`EXPLAIN (ANALYZE, COSTS off, TIMING off) EXECUTE list (`+strings.Join(args, ", ")+`)`), "\n")
			wasted := 0
			for _, m := range removed.FindAllStringSubmatch(plan, -1) {
				n, _ := strconv.Atoi(m[1])
				wasted += n
			}
			if !strings.Contains(plan, index) || strings.Contains(plan, "Seq Scan on batch_job_run") || strings.Contains(plan, "Sort") || wasted > 0 {
				t.Errorf("%+v, %s: %d rows read in vain\n%s", f, mode, wasted, plan)
			}
		}
	}
}

func TestHistoryKeepsEveryAttempt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{WorkerID: "batch"})
	job := jobrun.Job{
		Name: "daily", Retry: jobrun.Retry{MaxAttempts: 9, Backoff: func(int) time.Duration { return 0 }},
		Func: func(_ context.Context, run *jobrun.Run) error {
			run.AddProcessed(int64(run.Attempt()))
			if run.Attempt() < 3 {
				return fmt.Errorf("broken %d", run.Attempt())
			}
			return nil
		},
	}
	key := job.Key(date)
	// A neighbour begins: it fails, somebody allows a retry, and jobrun takes over.
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, started_at, finished_at, worker_id, error_message, next_attempt_at)
		VALUES ($1, 'FAILED', now() - interval '2 hours', now() - interval '1 hour', 'node-7', 'out of memory', now())`, key)
	alone, err := r.History(t.Context(), key)
	if err != nil || len(alone) != 1 || alone[0].Attempt != 1 || alone[0].WorkerID != "node-7" || alone[0].Outcome != jobrun.Failed || alone[0].Error != "out of memory" || alone[0].Trigger != "" {
		t.Errorf("the neighbour's alone: %+v, %v", alone, err)
	}
	var records []jobrun.Record
	for range 2 {
		res, _ := r.RunDate(t.Context(), job, date)
		if !res.Ran() {
			t.Fatalf("%+v", res)
		}
		records = append(records, res.Record)
	}
	check := func(attempts ...int) []jobrun.HistoryEntry {
		t.Helper()
		history, err := r.History(t.Context(), key)
		var got []int
		for _, e := range history {
			got = append(got, e.Attempt)
			if e.Action != nil || e.Kind != "" || e.At.Location() != seoul {
				t.Errorf("entry %+v", e)
			}
		}
		if err != nil || !slices.Equal(got, attempts) || !slices.IsSortedFunc(history, func(a, b jobrun.HistoryEntry) int { return a.At.Compare(b.At) }) {
			t.Fatalf("attempts %v, %v; want %v", got, err, attempts)
		}
		return history
	}
	history := check(1, 2, 3)
	if history[0] != alone[0] {
		t.Errorf("the neighbour's entry is now %+v, was %+v", history[0], alone[0])
	}
	if by := query[string](t, db.Pool, `SELECT ended_by FROM batch_job_attempt WHERE job_key = $1 AND attempt = 1`, key); by != "OUTSIDE" {
		t.Errorf("ended by %s", by)
	}
	for i, rec := range records {
		want := jobrun.HistoryEntry{
			At: rec.StartedAt, Attempt: rec.Attempt, Trigger: jobrun.TriggerRetry, WorkerID: rec.WorkerID, HeartbeatAt: rec.HeartbeatAt, FinishedAt: rec.FinishedAt,
			Outcome: rec.Status, ItemsProcessed: rec.ItemsProcessed, ItemsFailed: rec.ItemsFailed, Error: rec.Error,
		}
		if history[i+1] != want {
			t.Errorf("entry %+v\n want %+v", history[i+1], want)
		}
	}
	// A re-run over an outcome keeps it.
	exec(t, db.Pool, approve, key)
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 4 || res.Record.Trigger != jobrun.TriggerRerun {
		t.Fatalf("%+v, %v", res, err)
	}
	if again := check(1, 2, 3, 4); !slices.Equal(again[:3], history) {
		t.Errorf("the old entries are now %+v, were %+v", again[:3], history)
	}
	// A row that was deleted by hand does not bring a number back, whoever inserts the next one.
	exec(t, db.Pool, `DELETE FROM batch_job_run WHERE job_key = $1`, key)
	if _, err := r.Get(t.Context(), key); !errors.Is(err, jobrun.ErrNotFound) {
		t.Errorf("deleted: %v", err)
	}
	check(1, 2, 3, 4)
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 5 || res.Record.Trigger != jobrun.TriggerManual {
		t.Fatalf("%+v, %v", res, err)
	}
	check(1, 2, 3, 4, 5)
	exec(t, db.Pool, `DELETE FROM batch_job_run WHERE job_key = $1`, key)
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, next_attempt_at, error_message) VALUES ($1, 'FAILED', 'node-8', now(), 'disk full')`, key)
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 7 {
		t.Fatalf("%+v, %v", res, err)
	}
	if last := check(1, 2, 3, 4, 5, 6, 7)[5]; last.WorkerID != "node-8" || last.Error != "disk full" || last.Outcome != jobrun.Failed {
		t.Errorf("the second neighbour's entry: %+v", last)
	}
	// A skipped date has no attempt, and still a line.
	exec(t, db.Pool, `DELETE FROM batch_job_run WHERE job_key = $1`, key)
	job.Calendar = func(jobrun.Date) bool { return false }
	if res, err := r.RunTrigger(t.Context(), job, time.Date(2026, 9, 15, 9, 0, 0, 0, seoul)); err != nil || res.Decision != jobrun.NotDue || res.Record.Attempt != 7 {
		t.Fatalf("%+v, %v", res, err)
	}
	exec(t, db.Pool, approve, key)
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt <= 7 {
		t.Fatalf("%+v, %v", res, err)
	}
	if n := query[int](t, db.Pool, `SELECT count(*)::int - count(DISTINCT attempt)::int FROM batch_job_attempt WHERE job_key = $1`, key); n != 0 {
		t.Errorf("%d numbers were given twice", n)
	}
}

func TestHistoryTellsWhoChangedAnAttemptFromOutside(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{
		Name: "daily", Retry: jobrun.Retry{MaxAttempts: 2},
		Func: func(ctx context.Context, run *jobrun.Run) error {
			if entries, err := r.History(ctx, run.Key()); err != nil || entries[len(entries)-1].Outcome != jobrun.Running || entries[len(entries)-1].Error != "" {
				t.Errorf("while it runs: %+v, %v", entries, err)
			}
			if run.Attempt() == 1 { // the neighbour's blind update
				exec(t, db.Pool, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'by hand' WHERE job_key = $1`, run.Key())
			}
			return nil
		},
	}
	if res, err := r.RunDate(t.Context(), job, date); !errors.Is(err, jobrun.ErrLeaseLost) || !res.Ran() {
		t.Fatalf("%+v, %v", res, err)
	}
	before, err := r.History(t.Context(), job.Key(date))
	if err != nil || len(before) != 1 || before[0].Outcome != jobrun.Failed || before[0].Error != "changed outside jobrun" && before[0].Error != "changed outside jobrun: by hand" {
		t.Errorf("history %+v, %v", before, err)
	}
	exec(t, db.Pool, approve, job.Key(date))
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Record.Attempt != 2 {
		t.Fatalf("%+v, %v", res, err)
	}
	after, err := r.History(t.Context(), job.Key(date))
	if err != nil || len(after) != 2 || after[0].Outcome != jobrun.Failed || after[0].Error != "changed outside jobrun: by hand" || after[0].FinishedAt.IsZero() || after[1].Outcome != jobrun.Succeeded {
		t.Errorf("history %+v, %v", after, err)
	}
}

func TestStaleListsEvidenceAndChangesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{Lease: time.Hour, StaleAfter: 30 * time.Minute})
	own := func(key string, started, beat, lease, staleAfter string, status string) {
		exec(t, db.Pool, `WITH run AS (
			INSERT INTO batch_job_run (job_key, status, started_at, worker_id, token) VALUES ($1, $6, now() - $2::interval, 'node-1', gen_random_uuid()) RETURNING *)
			INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease, stale_after, items_processed, items_moved_at)
			SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, now() - $3::interval, $4::interval, $5::interval, 7, now() - interval '90 s' FROM run`,
			key, started, beat, lease, staleAfter, status)
	}
	own("fresh:2026-09-15", "10 s", "1 s", "2 min", "20 min", "RUNNING")
	own("silent:2026-09-15", "10 min", "3 min", "2 min", "20 min", "RUNNING")
	own("just-not-silent:2026-09-15", "10 min", "60 s", "2 min", "20 min", "RUNNING")
	own("slow:2026-09-15", "3 hours", "1 s", "2 min", "20 min", "RUNNING")
	own("slow-as-expected:2026-09-15", "3 hours", "1 s", "2 min", "4 hours", "RUNNING") // its own limit, not the reader's
	own("both:2026-09-15", "1 hour", "50 min", "2 min", "20 min", "RUNNING")
	own("finished:2026-09-15", "5 hours", "5 hours", "2 min", "20 min", "SUCCEEDED")
	own("paused:2026-09-15", "5 hours", "5 hours", "2 min", "20 min", "PAUSED")
	for _, n := range []struct{ key, started string }{{"neighbour:2026-09-15", "31 min"}, {"young neighbour", "29 min"}, {"old neighbour", "2 hours"}} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, started_at, worker_id) VALUES ($1, 'RUNNING', now() - $2::interval, 'node-7')`, n.key, n.started)
	}
	snapshot := func() string {
		return query[string](t, db.Pool, `SELECT string_agg(concat_ws(' ', r.ctid, r.xmin, r, a.ctid, a.xmin, a), E'\n' ORDER BY r.job_key)
			FROM batch_job_run AS r LEFT JOIN batch_job_attempt AS a USING (job_key)`)
	}
	before := snapshot()
	type line struct {
		key             string
		silent, overdue time.Duration
		alive           bool
	}
	want := []line{
		{"slow:2026-09-15", time.Second, 160 * time.Minute, true},
		{"old neighbour", 2 * time.Hour, 90 * time.Minute, false},
		{"both:2026-09-15", 50 * time.Minute, 40 * time.Minute, false},
		{"neighbour:2026-09-15", 31 * time.Minute, time.Minute, false},
		{"silent:2026-09-15", 3 * time.Minute, 0, false},
	}
	for range 3 {
		stale, err := r.Stale(t.Context())
		if err != nil || len(stale) != len(want) {
			t.Fatalf("%d runs, %v: %+v", len(stale), err, stale)
		}
		for i, s := range stale {
			// The rows age while the test runs.
			near := func(got, want time.Duration) bool { return got >= want && got < want+50*time.Second }
			if w := want[i]; s.Key != w.key || s.Alive != w.alive || !near(s.Silent, w.silent) || w.overdue == 0 != (s.Overdue == 0) || w.overdue != 0 && !near(s.Overdue, w.overdue) {
				t.Errorf("line %d: %s, silent %s, overdue %s, alive %t; want %+v", i, s.Key, s.Silent, s.Overdue, s.Alive, w)
			}
			if neighbours := strings.Contains(s.Key, "neighbour"); neighbours != s.HeartbeatAt.IsZero() || neighbours != s.ItemsMovedAt.IsZero() || neighbours != (s.ItemsProcessed == 0) {
				t.Errorf("line %d: %+v", i, s)
			}
			if s.StartedAt.Location() != seoul || s.Status != jobrun.Running || !s.ItemsMovedAt.IsZero() && s.ItemsMovedAt.Location() != seoul {
				t.Errorf("line %d: %+v", i, s)
			}
		}
	}
	if after := snapshot(); after != before {
		t.Errorf("rows were written to:\n%s\n%s", before, after)
	}
	job, executions := countingJob("silent")
	if res, err := r.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyRunning || executions.Load() != 0 { // age starts nothing
		t.Errorf("%+v, %v", res, err)
	}
}

func TestLogLinesOfARun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	logs := newLogBook()
	r := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(logs)})
	fired := time.Date(2026, 9, 15, 0, 10, 0, 0, seoul)
	job := jobrun.Job{Name: "daily", Func: func(_ context.Context, run *jobrun.Run) error {
		run.AddProcessed(3)
		run.AddFailed(1)
		run.Logger().Info("in the job")
		return nil
	}}
	res, err := r.RunTrigger(t.Context(), job, fired)
	if err != nil {
		t.Fatal(err)
	}
	rec := res.Record
	about := map[string]string{
		"job": "daily", "job_key": "daily:2026-09-15", "business_date": "2026-09-15", "attempt": "1", "worker_id": rec.WorkerID, "trigger": "SCHEDULE",
	}
	with := func(more ...string) map[string]string {
		m := maps.Clone(about)
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return m
	}
	expect := func(name string, got []logLine, want ...any) { // level, message, attributes of each line
		t.Helper()
		if len(got) != len(want)/3 {
			t.Errorf("%s: logged %+v", name, got)
			return
		}
		for i, line := range got {
			attrs := map[string]string{}
			for k, v := range line.attrs {
				attrs[k] = v.String()
			}
			if line.level != want[3*i] || line.message != want[3*i+1] || !maps.Equal(attrs, want[3*i+2].(map[string]string)) {
				t.Errorf("%s: line %d:\n got %s %s %v\nwant %v", name, i, line.level, line.message, attrs, want[3*i:3*i+3])
			}
		}
	}
	ended := []string{
		"status", "SUCCEEDED", "started_at", rec.StartedAt.String(), "finished_at", rec.FinishedAt.String(),
		"duration", rec.FinishedAt.Sub(rec.StartedAt).String(), "items_processed", "3", "items_failed", "1",
	}
	expect("the winner", logs.take(),
		slog.LevelInfo, "run started", with("started_at", rec.StartedAt.String()),
		slog.LevelInfo, "in the job", with(),
		slog.LevelInfo, "run finished", with(ended...))
	if _, err := r.RunTrigger(t.Context(), job, fired); err != nil {
		t.Fatal(err)
	}
	expect("the loser", logs.take(), slog.LevelInfo, "run not started", with(append(ended, "decision", "ALREADY_SUCCEEDED", "run_worker_id", rec.WorkerID)...))
}

func TestEveryReturnedErrorIsLoggedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	logs := newLogBook()
	r := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(logs)})
	pool := db.PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
	for range 2 {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	exhausted := newRunner(t, pool, jobrun.Options{Logger: slog.New(logs)})
	closed := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(logs)})
	if err := closed.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	empty := newRunner(t, pgtest.Empty(t).Pool, jobrun.Options{Logger: slog.New(logs)})
	theirs := errors.New("ledger out of balance")
	failing := func(err error) jobrun.Func { return func(context.Context, *jobrun.Run) error { return err } }
	retry := jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	brief, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	type attrs = []string
	run, refused := attrs{"job", "worker_id", "job_key", "business_date", "err"}, attrs{"job", "worker_id", "err"}
	ended := append(slices.Clone(run), "attempt", "trigger", "status", "started_at", "finished_at", "duration", "items_processed", "items_failed")
	for _, c := range []struct {
		name    string
		runner  *jobrun.Runner
		ctx     context.Context
		job     jobrun.Job
		level   slog.Level
		message string
		has     attrs
	}{
		{"final failure", r, t.Context(), jobrun.Job{Name: "final", Func: failing(theirs)}, slog.LevelError, "run finished", ended},
		{"panic", r, t.Context(), jobrun.Job{Name: "panics", Func: func(context.Context, *jobrun.Run) error { panic(theirs) }}, slog.LevelError, "run finished", ended},
		{"a retry follows", r, t.Context(), jobrun.Job{Name: "retried", Func: failing(theirs), Retry: retry}, slog.LevelWarn, "run finished", append(slices.Clone(ended), "next_attempt_at")},
		{"the last retry", r, t.Context(), jobrun.Job{Name: "retried", Func: failing(theirs), Retry: retry}, slog.LevelError, "run finished", ended},
		{"permanent", r, t.Context(), jobrun.Job{Name: "permanent", Func: failing(jobrun.Permanent(theirs)), Retry: retry}, slog.LevelError, "run finished", ended},
		{"invalid job", r, t.Context(), jobrun.Job{Name: "in valid", Func: failing(nil)}, slog.LevelError, "run not started", refused},
		{"date rule", r, t.Context(), jobrun.Job{Name: "rule", Func: failing(nil), Date: func(jobrun.Date) (jobrun.Date, error) { return date, theirs }}, slog.LevelError, "run not started", refused},
		{"calendar panics", r, t.Context(), jobrun.Job{Name: "calendar", Func: failing(nil), Calendar: func(jobrun.Date) bool { panic(theirs) }}, slog.LevelError, "run not started", refused},
		{"shut down", closed, t.Context(), jobrun.Job{Name: "late", Func: failing(nil)}, slog.LevelInfo, "run not started", refused},
		{"cancelled before", r, cancelled, jobrun.Job{Name: "cancelled", Func: failing(nil)}, slog.LevelError, "run not started", run},
		{"no tables", empty, t.Context(), jobrun.Job{Name: "no-tables", Func: failing(nil)}, slog.LevelError, "run not started", run},
		{"no tables, not due", empty, t.Context(), jobrun.Job{Name: "no-tables", Func: failing(nil), Calendar: func(jobrun.Date) bool { return false }}, slog.LevelError, "run not started", run},
		{"exhausted pool", exhausted, brief, jobrun.Job{Name: "exhausted", Func: failing(nil)}, slog.LevelError, "run not started", run},
		{"lease lost", r, t.Context(), jobrun.Job{Name: "lost", Func: func(_ context.Context, run *jobrun.Run) error {
			exec(t, db.Pool, `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`, run.Key())
			return nil
		}}, slog.LevelError, "run finished", append(slices.Clone(run), "attempt", "trigger")},
	} {
		logs.take()
		_, err := c.runner.RunTrigger(c.ctx, c.job, time.Date(2026, 9, 15, 9, 0, 0, 0, seoul))
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		var told []logLine
		for _, line := range logs.take() {
			if _, has := line.attrs["err"]; has || line.level > slog.LevelInfo {
				told = append(told, line)
			}
		}
		if len(told) != 1 {
			t.Errorf("%s: logged %+v", c.name, told)
			continue
		}
		if line := told[0]; line.level != c.level || line.message != c.message || line.attrs["err"].String() == "" || !strings.HasPrefix(err.Error(), line.attrs["err"].String()[:20]) {
			t.Errorf("%s: returned %v, logged %+v", c.name, err, line)
		}
		for _, key := range c.has {
			if _, has := told[0].attrs[key]; !has {
				t.Errorf("%s: no attribute %s in %+v", c.name, key, told[0])
			}
		}
	}
}
