package checker

import (
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The rules would be worth little if they used what they judge.
func TestCheckerSharesNothingWithTheLibrary(t *testing.T) {
	t.Parallel()
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f.Name(), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range parsed.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			first, _, _ := strings.Cut(path, "/")
			if strings.Contains(first, ".") && path != "github.com/jackc/pgx/v5" && !strings.HasPrefix(path, "github.com/jackc/pgx/v5/") {
				t.Errorf("%s imports %s", f.Name(), path)
			}
		}
	}
}

// story is a history told in plain SQL, each step a transaction of the session
// that it is by.
type story struct {
	t     *testing.T
	url   string
	conns map[string]*pgx.Conn
	ways  map[string]string // by job
	asked int
}

func (s *story) as(session string) *pgx.Conn {
	s.t.Helper()
	conn := s.conns[session]
	if conn == nil {
		config, err := pgx.ParseConfig(s.url)
		if err != nil {
			s.t.Fatal(err)
		}
		config.RuntimeParams["application_name"] = session
		conn, err = pgx.ConnectConfig(s.t.Context(), config)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = conn.Close(context.Background()) })
		s.conns[session] = conn
	}
	return conn
}

// do runs the statements in one transaction. $1 is the key, the others the arguments.
func (s *story) do(session, key string, statements ...string) {
	s.t.Helper()
	err := pgx.BeginFunc(s.t.Context(), s.as(session), func(tx pgx.Tx) error {
		for _, sql := range statements {
			sql = strings.ReplaceAll(sql, "$key", "'"+key+"'")
			if _, err := tx.Exec(s.t.Context(), sql); err != nil {
				return fmt.Errorf("%w: %s", err, sql)
			}
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *story) one(sql string, args ...any) (value string) {
	s.t.Helper()
	if err := s.as("log").QueryRow(s.t.Context(), sql, args...).Scan(&value); err != nil {
		s.t.Fatalf("%v: %s", err, sql)
	}
	return value
}

func workerID(session string) string { return session + "-0000000" + session[1:] }

// writeHistory writes or closes the row of an attempt that something outside has made
// or ended.
const writeHistory = `
	INSERT INTO batch_job_attempt AS a (job_key, attempt, token, worker_id, started_at, finished_at, outcome, ended_by)
	SELECT job_key, attempt, token, worker_id, started_at, coalesce(finished_at, clock_timestamp()), status, 'OUTSIDE'
	FROM batch_job_run
	WHERE job_key = $key AND status <> 'RUNNING' AND attempt > 0
	ON CONFLICT (job_key, attempt) DO UPDATE
	SET finished_at = excluded.finished_at, outcome = excluded.outcome, ended_by = 'OUTSIDE'
	WHERE a.finished_at IS NULL`

// claim makes the next attempt and says its number.
func (s *story) claim(session, key, trigger string) string {
	s.t.Helper()
	s.do(session, key, writeHistory, fmt.Sprintf(`
		INSERT INTO batch_job_run AS r (job_key, status, worker_id, started_at, attempt, token)
		SELECT $key, 'RUNNING', '%s', clock_timestamp(), 1 + coalesce(max(attempt), 0), gen_random_uuid()
		FROM batch_job_attempt
		WHERE job_key = $key
		ON CONFLICT (job_key) DO UPDATE
		SET status = 'RUNNING', worker_id = excluded.worker_id, started_at = excluded.started_at, finished_at = NULL, error_message = NULL,
		  attempt = excluded.attempt, token = excluded.token, executions = r.executions + 1, next_attempt_at = NULL,
		  approved_at = NULL, approved_attempt = NULL, approved_status = NULL, approved_worker = NULL, approved_finished_at = NULL`, workerID(session)), fmt.Sprintf(`
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease)
		SELECT job_key, attempt, token, worker_id, '%s', started_at, started_at, '1 hour'
		FROM batch_job_run
		WHERE job_key = $key`, trigger))
	return s.one(`SELECT attempt::text FROM batch_job_run WHERE job_key = $1`, key)
}

// finish records the end of the latest attempt.
func (s *story) finish(session, key, status string, again bool, text string, before ...string) {
	s.t.Helper()
	next := "NULL"
	if again {
		next = "clock_timestamp()"
	}
	s.do(session, key, append(before, fmt.Sprintf(`
		UPDATE batch_job_run
		SET status = '%s', finished_at = clock_timestamp(), next_attempt_at = %s, error_message = '%s'
		WHERE job_key = $key`, status, next, text), `
		UPDATE batch_job_attempt AS a
		SET finished_at = r.finished_at, outcome = r.status, ended_by = 'WORKER'
		FROM batch_job_run AS r
		WHERE r.job_key = $key AND a.job_key = r.job_key AND a.attempt = r.attempt`)...)
}

func (s *story) execute(session, key, attempt string) {
	s.t.Helper()
	s.do("log", key, fmt.Sprintf(`
		INSERT INTO torture.execution (id, session, worker, job_key, attempt, trigger)
		SELECT gen_random_uuid(), '%s', '%s', job_key, attempt, trigger FROM batch_job_attempt WHERE job_key = $key AND attempt = %s`,
		session, workerID(session), attempt))
}

func (s *story) returns(key, attempt, outcome string) {
	s.t.Helper()
	s.do("log", key, fmt.Sprintf(`
		INSERT INTO torture.returned (execution, outcome, error)
		SELECT id, '%s', '' FROM torture.execution WHERE job_key = $key AND attempt = %s`, outcome, attempt))
}

func (s *story) insertEffect(key, attempt, item string) string {
	job, _, _ := strings.Cut(key, ":")
	return fmt.Sprintf(`INSERT INTO torture.effect (way, job_key, attempt, item) VALUES ('%s', $key, %s, '%s')`, s.ways[job], attempt, item)
}

// effect does the items, each in a transaction.
func (s *story) effect(session, key, attempt string, items ...string) {
	s.t.Helper()
	job, _, _ := strings.Cut(key, ":")
	for _, item := range items {
		statements := []string{s.insertEffect(key, attempt, item)}
		if way := s.ways[job]; way == "each" || way == "once" {
			statements = append(statements, fmt.Sprintf(`INSERT INTO batch_job_item (job_key, item, attempt) VALUES ($key, '%s', %s)`, item, attempt))
		}
		s.do(session, key, statements...)
	}
}

func (s *story) answer(session, key, attempt, decision, status, kind string) {
	s.t.Helper()
	s.do("log", key, fmt.Sprintf(`
		INSERT INTO torture.answer (id, session, worker, job_key, attempt, decision, status, kind, error)
		VALUES (gen_random_uuid(), '%s', '%s', $key, %s, '%s', '%s', '%s', '')`, session, workerID(session), attempt, decision, status, kind))
}

// attempt is a whole one: claimed, executed, with its items done, ended.
func (s *story) attempt(session, key, trigger, outcome string, again bool, items ...string) {
	s.t.Helper()
	n := s.claim(session, key, trigger)
	s.execute(session, key, n)
	s.effect(session, key, n, items...)
	s.returns(key, n, outcome)
	status, kind := map[string]string{"nil": "SUCCEEDED", "skip": "SKIPPED", "error": "FAILED"}[outcome], ""
	if status == "FAILED" {
		kind = "run"
	}
	s.finish(session, key, status, again, "it "+outcome)
	s.answer(session, key, n, "RAN", status, kind)
}

// person acts, or is refused.
func (s *story) person(action, key, flags, answer string) {
	s.t.Helper()
	s.asked++
	reason := fmt.Sprintf("reason %d", s.asked)
	forced, reset := strings.Contains(flags, "forced"), strings.Contains(flags, "reset")
	seen := `coalesce((SELECT attempt FROM batch_job_run WHERE job_key = $key), 0)`
	status := s.one(`SELECT coalesce((SELECT status FROM batch_job_run WHERE job_key = $1), '')`, key)
	attempt := s.one(`SELECT coalesce((SELECT attempt FROM batch_job_run WHERE job_key = $1), 0)::text`, key)
	if answer == "done" {
		statements := []string{writeHistory, fmt.Sprintf(`
			INSERT INTO batch_job_action (job_key, attempt, action, acted_by, reason, forced, reset_items, previous_status, token)
			VALUES ($key, %s, '%s', 'somebody', '%s', %t, %t, nullif('%s', ''), gen_random_uuid())`, seen, action, reason, forced, reset, status)}
		switch {
		case action == "MARK_FAILED":
			statements = append(statements, `
				UPDATE batch_job_run SET status = 'FAILED', finished_at = clock_timestamp() WHERE job_key = $key`, `
				UPDATE batch_job_attempt AS a
				SET finished_at = r.finished_at, outcome = 'FAILED', ended_by = 'PERSON'
				FROM batch_job_run AS r
				WHERE r.job_key = $key AND a.job_key = r.job_key AND a.attempt = r.attempt AND a.finished_at IS NULL`)
		case action == "APPROVE_RERUN":
			statements = append(statements, `
				UPDATE batch_job_run
				SET approved_at = clock_timestamp(), approved_attempt = attempt, approved_status = status, approved_worker = worker_id, approved_finished_at = finished_at
				WHERE job_key = $key`)
			if reset {
				statements = append(statements, `DELETE FROM batch_job_item WHERE job_key = $key`)
			}
		case status == "":
			statements = append(statements, `
				INSERT INTO batch_job_run (job_key, status, finished_at, worker_id, attempt, executions)
				VALUES ($key, 'SKIPPED', now(), 'somebody', 0, 0)`)
		default:
			statements = append(statements, `UPDATE batch_job_run SET status = 'SKIPPED', finished_at = clock_timestamp() WHERE job_key = $key`)
		}
		s.do("operator", key, statements...)
	}
	s.do("log", key, fmt.Sprintf(`
		INSERT INTO torture.action (reason, action, job_key, attempt, status, forced, reset, answer)
		VALUES ('%s', '%s', $key, %s, '%s', %t, %t, '%s')`, reason, action, attempt, status, forced, reset, answer))
}

// Keys of the story, by what happens to them.
const (
	retried     = "each:2026-01-01"     // FAILED, tried again, done; all of it once more by force
	killed      = "once:2026-01-02"     // its process died; a person ended it, two re-runs
	blind       = "tx:2026-01-03"       // another program's UPDATE ended it; two re-runs
	completed   = "complete:2026-01-04" // at the first attempt
	deleted     = "fence:2026-01-05"    // its row, by hand; claimed anew
	repeated    = "plain:2026-01-19"    // the same, by the repeat of a claim whose answer was lost
	neighbours  = "plain:2026-01-06"    // made and done by another program; run again by force
	unstarted   = "plain:2026-01-07"    // its first claim was never executed; then it skipped
	skipped     = "plain:2026-01-08"    // by a person, before its run
	holiday     = "plain:2026-01-09"    // left out by the calendar
	reskipped   = "plain:2026-01-10"    // FAILED, skipped, approved: never started, then FAILED, skipped
	givenBack   = "once:2026-01-11"     // ended by a person, and given back by a hand
	left        = "plain:2026-01-12"    // RUNNING in the end, another program's
	taken       = "fence:2026-01-14"    // by another program's UPDATE, which kept its number; ended by a person, run again
	unsucceeded = "plain:2026-01-13"    // made SUCCEEDED and FAILED again by hand
)

// tell writes the whole story down.
func (s *story) tell() {
	s.ways = map[string]string{}
	for _, job := range []struct {
		way             string
		items, attempts int
	}{{"each", 3, 3}, {"once", 2, 1}, {"tx", 2, 1}, {"complete", 1, 1}, {"fence", 2, 1}, {"plain", 0, 2}} {
		s.ways[job.way] = job.way
		s.do("log", "", fmt.Sprintf(`INSERT INTO torture.job VALUES ('%s', '%s', %d, %d)`, job.way, job.way, job.items, job.attempts))
	}

	s.attempt("w1", retried, "MANUAL", "error", true, "item-1", "item-2")
	s.answer("w2", retried, "1", "RETRY_LATER", "FAILED", "")
	s.attempt("w2", retried, "RETRY", "nil", false, "item-3")
	s.answer("w1", retried, "2", "ALREADY_SUCCEEDED", "SUCCEEDED", "")
	s.person("MARK_FAILED", retried, "", "conflict")
	s.person("APPROVE_RERUN", retried, "forced reset", "done")
	s.attempt("w1", retried, "RERUN", "nil", false, "item-1", "item-2", "item-3")

	n := s.claim("w1", killed, "SCHEDULE")
	s.execute("w1", killed, n)
	s.effect("w1", killed, n, "item-1")
	s.do("log", killed, `INSERT INTO torture.fault VALUES (clock_timestamp(), 'kill', 'w1'), (clock_timestamp(), 'kill', 'w77'), (clock_timestamp(), 'crash', 'server')`)
	s.do("log", killed, `INSERT INTO torture.process (session, ended) VALUES ('w1', 'killed'), ('w2', 'in peace')`)
	s.do("neighbour", left, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($key, 'RUNNING', 'node')`)
	s.do("log", killed, `INSERT INTO torture.stale SELECT job_key FROM batch_job_run WHERE status = 'RUNNING'`,
		`UPDATE batch_job_attempt SET lease = '0' WHERE job_key = $key`)
	s.person("MARK_FAILED", killed, "", "done")
	s.person("APPROVE_RERUN", killed, "", "done")
	s.attempt("w2", killed, "RERUN", "error", false)
	s.person("APPROVE_RERUN", killed, "", "done")
	s.attempt("w2", killed, "RERUN", "nil", false, "item-2")

	n = s.claim("w1", blind, "CATCH_UP")
	s.execute("w1", blind, n)
	s.effect("w1", blind, n, "item-1")
	s.do("neighbour", blind, `UPDATE batch_job_run SET status = 'FAILED', finished_at = started_at - interval '1 ms' WHERE job_key = $key`)
	s.returns(blind, n, "error")
	s.answer("w1", blind, n, "RAN", "FAILED", "lost")
	s.person("APPROVE_RERUN", blind, "", "done")
	s.attempt("w2", blind, "RERUN", "nil", false, "item-2")
	s.person("APPROVE_RERUN", blind, "forced", "done")
	s.attempt("w2", blind, "RERUN", "nil", false, "item-1", "item-2")

	n = s.claim("w3", completed, "SCHEDULE")
	s.execute("w3", completed, n)
	s.finish("w3", completed, "SUCCEEDED", false, "", s.insertEffect(completed, n, "all"))
	s.returns(completed, n, "error") // after Complete it changes nothing
	s.answer("w3", completed, n, "RAN", "SUCCEEDED", "run")

	n = s.claim("w1", deleted, "SCHEDULE")
	s.execute("w1", deleted, n)
	s.effect("w1", deleted, n, "item-1")
	s.do("psql", deleted, `DELETE FROM batch_job_run WHERE job_key = $key`)
	s.answer("w1", deleted, n, "RAN", "", "lost")
	s.attempt("w2", deleted, "MANUAL", "nil", false, "item-1", "item-2")

	s.claim("w1", repeated, "SCHEDULE")
	s.do("psql", repeated, `DELETE FROM batch_job_run WHERE job_key = $key`)
	s.do("w1", repeated, `
		INSERT INTO batch_job_run (job_key, status, worker_id, started_at, attempt, token)
		SELECT job_key, 'RUNNING', worker_id, clock_timestamp(), 2, token FROM batch_job_attempt WHERE job_key = $key`, `
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, trigger, started_at, heartbeat_at, lease)
		SELECT job_key, attempt, token, worker_id, 'SCHEDULE', started_at, started_at, '1 hour' FROM batch_job_run WHERE job_key = $key`)
	s.execute("w1", repeated, "2")
	s.returns(repeated, "2", "nil")
	s.finish("w1", repeated, "SUCCEEDED", false, "")

	s.do("neighbour", neighbours, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($key, 'RUNNING', 'node')`)
	s.answer("w1", neighbours, "1", "ALREADY_RUNNING", "RUNNING", "")
	s.do("neighbour", neighbours, `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $key`)
	s.person("APPROVE_RERUN", neighbours, "forced", "done")
	s.attempt("w1", neighbours, "RERUN", "nil", false)

	s.claim("w1", unstarted, "SCHEDULE")
	s.finish("w1", unstarted, "FAILED", true, neverStarted)
	s.answer("w1", unstarted, "0", "", "", "other")
	s.attempt("w2", unstarted, "RETRY", "skip", false)

	s.person("SKIP", skipped, "", "done")
	s.answer("w1", skipped, "0", "ALREADY_SKIPPED", "SKIPPED", "")
	s.do("w1", holiday, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id, attempt, executions) VALUES ($key, 'SKIPPED', now(), 'w1-00000001', 0, 0)`)
	s.answer("w1", holiday, "0", "NOT_DUE", "SKIPPED", "")

	s.attempt("w1", reskipped, "SCHEDULE", "error", true)
	s.answer("w3", reskipped, "1", "RETRY_LATER", "FAILED", "")
	s.person("SKIP", reskipped, "", "done")
	s.person("APPROVE_RERUN", reskipped, "", "done")
	s.claim("w1", reskipped, "RERUN")
	s.do("w1", reskipped, `
		UPDATE batch_job_attempt SET finished_at = clock_timestamp(), outcome = 'FAILED', ended_by = 'WORKER' WHERE job_key = $key AND attempt = 2`, `
		UPDATE batch_job_run
		SET status = 'FAILED', finished_at = clock_timestamp(), next_attempt_at = now(), error_message = 'never started', approved_at = now(),
		  approved_attempt = attempt, approved_status = 'FAILED', approved_worker = worker_id
		WHERE job_key = $key`) // its approval is given back, but void: the next claim is made because it is due
	s.attempt("w2", reskipped, "RERUN", "error", false)
	s.person("SKIP", reskipped, "", "done")

	n = s.claim("w1", givenBack, "SCHEDULE")
	s.execute("w1", givenBack, n)
	s.effect("w1", givenBack, n, "item-1")
	s.person("MARK_FAILED", givenBack, "", "alive")
	s.do("psql", givenBack, `UPDATE batch_job_run SET status = 'FAILED' WHERE job_key = $key`)
	s.do("psql", givenBack, `UPDATE batch_job_run SET status = 'RUNNING', finished_at = NULL WHERE job_key = $key`)
	s.effect("w1", givenBack, n, "item-2")
	s.returns(givenBack, n, "nil")
	s.finish("w1", givenBack, "SUCCEEDED", false, "")
	s.answer("w1", givenBack, n, "RAN", "SUCCEEDED", "")

	n = s.claim("w1", taken, "SCHEDULE")
	s.execute("w1", taken, n)
	s.effect("w1", taken, n, "item-1")
	s.do("neighbour", taken, `UPDATE batch_job_run SET worker_id = 'node', started_at = clock_timestamp() WHERE job_key = $key`)
	s.answer("w1", taken, "1", "RAN", "RUNNING", "lost")
	writeTaken := `
		INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, started_at, finished_at, outcome, ended_by)
		SELECT job_key, 2, token, worker_id, started_at, clock_timestamp(), 'FAILED', 'PERSON' FROM batch_job_run WHERE job_key = $key;
		UPDATE batch_job_attempt SET finished_at = clock_timestamp(), outcome = 'FAILED', ended_by = 'OUTSIDE' WHERE job_key = $key AND attempt = 1`
	s.do("operator", taken, writeTaken, `
		INSERT INTO batch_job_action (job_key, attempt, action, acted_by, reason, forced, reset_items, previous_status, token)
		VALUES ($key, 2, 'MARK_FAILED', 'somebody', 'taken', false, false, 'RUNNING', gen_random_uuid())`, `
		UPDATE batch_job_run SET status = 'FAILED', finished_at = clock_timestamp() WHERE job_key = $key`)
	s.do("log", taken, `INSERT INTO torture.action VALUES ('taken', now(), 'MARK_FAILED', $key, 1, 'RUNNING', false, false, 'done')`)
	s.person("APPROVE_RERUN", taken, "", "done")
	s.attempt("w2", taken, "RERUN", "nil", false, "item-1", "item-2")

	s.attempt("w1", unsucceeded, "SCHEDULE", "nil", false)
	s.do("psql", unsucceeded, `UPDATE batch_job_run SET status = 'STRANGE' WHERE job_key = $key`)
	s.answer("w1", unsucceeded, "1", "UNKNOWN_STATUS", "STRANGE", "")
	s.do("psql", unsucceeded, `UPDATE batch_job_run SET status = 'FAILED', next_attempt_at = clock_timestamp() WHERE job_key = $key`)
	s.answer("w1", unsucceeded, "1", "ALREADY_FAILED", "FAILED", "") // whatever time the hand wrote
	s.person("APPROVE_RERUN", unsucceeded, "", "done")
	s.attempt("w3", unsucceeded, "RERUN", "nil", false)

	s.do("log", "", `INSERT INTO torture.wanted SELECT job_key FROM batch_job_run WHERE status <> 'RUNNING'`)
}

// newStory tells it on a server of its own, which keeps the times of commits.
func newStory(t *testing.T) *story {
	t.Helper()
	server, err := pgtest.Start(t.Context(), pgtest.Options{Settings: map[string]string{"track_commit_timestamp": "on"}})
	if err != nil {
		t.Skipf("no server of one's own: %v", err)
	}
	t.Cleanup(server.Stop)
	s := &story{t: t, url: server.URL("postgres"), conns: map[string]*pgx.Conn{}}
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			t.Fatal(err)
		}
		s.do("log", "", string(text))
	}
	text, err := os.ReadFile("../tables.sql")
	if err != nil {
		t.Fatal(err)
	}
	s.do("log", "", string(text))
	s.tell()
	return s
}

// brokenRules names the rules that the report says do not hold, in their order.
func brokenRules(r Report) (names, examples []string) {
	for _, rule := range Rules {
		found := slices.IndexFunc(r.Violations, func(v Violation) bool { return v.Rule == rule.Name })
		if found >= 0 {
			names = append(names, rule.Name)
			examples = append(examples, fmt.Sprintf("%+v", r.Violations[found]))
		}
	}
	return names, examples
}

// change is the nth change of a key's row, from 0, as a subquery.
func nth(key string, n int) string {
	return fmt.Sprintf(`(SELECT seq FROM torture.change WHERE job_key = '%s' ORDER BY seq OFFSET %d LIMIT 1)`, key, n)
}

// edit sets a column of the row that the nth change of a key has left, up to the
// change numbered last, which then finds it.
func edit(key string, n, last int, column, value string) string {
	return fmt.Sprintf(`
		UPDATE torture.change
		SET after = CASE WHEN seq < %[2]s THEN jsonb_set(after, '{%[3]s}', %[4]s) ELSE after END,
		  before = CASE WHEN seq > %[1]s THEN jsonb_set(before, '{%[3]s}', %[4]s) ELSE before END
		WHERE job_key = '%[5]s' AND seq BETWEEN %[1]s AND %[2]s`, nth(key, n), nth(key, last), column, value, key)
}

func TestSoundHistoryAndEveryTampering(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	conn := s.as("checker")

	report, err := Check(t.Context(), conn, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range report.Violations {
		t.Errorf("%+v", v)
	}
	for _, rule := range Rules {
		if report.Judged[rule.Name] == 0 {
			t.Errorf("%s: nothing was judged", rule.Name)
		}
	}
	t.Logf("%+v", report.Counts)
	if t.Failed() {
		return
	}

	provoked := map[string]bool{}
	rollback := errors.New("roll back")
	for _, c := range tamperings {
		t.Run(c.name, func(t *testing.T) {
			err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), `SET LOCAL session_replication_role = replica`); err != nil {
					return err
				}
				if tag, err := tx.Exec(t.Context(), c.sql); err != nil || tag.RowsAffected() == 0 && !strings.HasPrefix(c.sql, "ALTER") {
					return fmt.Errorf("%w, %s: %s", err, tag, c.sql)
				}
				report, err := Check(t.Context(), conn, true)
				if err != nil {
					return err
				}
				want := []string{}
				for _, rule := range Rules { // in their order
					if slices.Contains(c.want, rule.Name) {
						want = append(want, rule.Name)
					}
				}
				if got, examples := brokenRules(report); !slices.Equal(got, want) {
					t.Errorf("broken: %q, want %q\n%s", got, want, strings.Join(examples, "\n"))
				}
				return rollback
			})
			if !errors.Is(err, rollback) {
				t.Fatal(err)
			}
		})
		for _, rule := range c.want {
			provoked[rule] = true
		}
	}
	for _, rule := range Rules {
		if !provoked[rule.Name] {
			t.Errorf("no tampering breaks %q", rule.Name)
		}
	}
	if len(provoked) != len(Rules) {
		t.Errorf("tamperings name %d rules, there are %d: %q", len(provoked), len(Rules), slices.Sorted(maps.Keys(provoked)))
	}

	// Without final, nobody has to have come to an end, and an answer may be missing.
	s.do("log", "", `INSERT INTO torture.wanted VALUES ('plain:2026-12-31')`, `DELETE FROM torture.action WHERE action = 'SKIP'`)
	if report, err = Check(t.Context(), conn, false); err != nil || len(report.Violations) > 0 {
		t.Errorf("%+v, %v", report.Violations, err)
	}
	if report, err = Check(t.Context(), conn, true); err != nil || len(report.Violations) < 2 {
		t.Errorf("%+v, %v", report.Violations, err)
	}
}

func TestTimelineTellsAll(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	for _, key := range []string{retried, killed, blind, deleted, "plain:2026-12-31"} {
		text, err := Timeline(t.Context(), s.as("checker"), key)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s", text)
		for line := range strings.Lines(text) {
			if len(line) > 120 {
				t.Errorf("%d columns: %s", len(line), line)
			}
		}
		for _, want := range map[string][]string{
			retried: {"INSERTED RUNNING", "RUNNING -> FAILED", "attempt 1: 2 effects in 2 commits: item-1 item-2", "executed by w2-00000002, trigger RETRY", "returns nil", "left out: 1"},
			killed:  {"FAULT", "crash server", "kill w1", "listed as stale", "MARK_FAILED", "closed: FAILED by PERSON"},
			deleted: {"DELETED", "is open"},
		}[key] {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q", key, want)
			}
		}
	}
}
