package integrationtest_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/examples/integrationtest"
)

// The run of a date, started by hand. Neither the clock nor Job.Date has a say.
func TestRunForADate(t *testing.T) {
	t.Parallel()
	db, mailer := newDatabase(t), &fakeMailer{}
	runner := newRunner(t, db, nil)

	res, err := runner.RunDate(t.Context(), integrationtest.Reminders(db.pool, mailer), date)
	if err != nil {
		t.Fatal(err)
	}
	if !res.Ran() || res.Record.Status != jobrun.Succeeded || res.Record.Key != "invoice-reminders:2026-09-15" || res.Record.ItemsProcessed != 3 {
		t.Errorf("%+v", res)
	}
	mailer.wantSent(t, "a@example.com", "b@example.com", "c@example.com")
}

// The scheduler's way in, with a time in place of a scheduler: at 01:00 the job is
// for the day before, also when the 16th has not begun yet in UTC.
func TestTriggerAfterMidnightIsForTheDayBefore(t *testing.T) {
	t.Parallel()
	db, mailer := newDatabase(t), &fakeMailer{}
	runner := newRunner(t, db, nil)

	oneOClock := time.Date(2026, time.September, 16, 1, 0, 0, 0, seoul)
	res, err := runner.RunTrigger(t.Context(), integrationtest.Reminders(db.pool, mailer), oneOClock)
	if err != nil || res.Record.Date != date {
		t.Errorf("%+v, %v", res, err)
	}
}

// Run takes the time from Options.Now: a date without invoices is recorded as one
// on which there was nothing to do.
func TestNothingToDo(t *testing.T) {
	t.Parallel()
	db, mailer := newDatabase(t), &fakeMailer{}
	runner := newRunner(t, db, func() time.Time { return time.Date(2026, time.October, 1, 1, 0, 0, 0, seoul) })

	res, err := runner.Run(t.Context(), integrationtest.Reminders(db.pool, mailer))
	if err != nil || res.Record.Status != jobrun.Skipped || res.Record.Key != "invoice-reminders:2026-09-30" {
		t.Errorf("%+v, %v", res, err)
	}
	mailer.wantSent(t)
}

// A second run of a date that is done is no error and does nothing.
func TestSecondRunDoesNothing(t *testing.T) {
	t.Parallel()
	db, mailer := newDatabase(t), &fakeMailer{}
	runner := newRunner(t, db, nil)
	job := integrationtest.Reminders(db.pool, mailer)

	for i, want := range []jobrun.Decision{jobrun.Ran, jobrun.AlreadySucceeded} {
		res, err := runner.RunDate(t.Context(), job, date)
		if err != nil || res.Decision != want || res.Record.Attempt != 1 {
			t.Errorf("call %d: %+v, %v; want %s", i+1, res, err, want)
		}
	}
	mailer.wantSent(t, "a@example.com", "b@example.com", "c@example.com")
}

// A dependency fails half-way. The retry does the rest, and no more than that.
func TestFailedMailerIsRetried(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	errDown := errors.New("connection refused")
	mailer := &fakeMailer{fail: map[string]error{"b@example.com": errDown}}
	runner := newRunner(t, db, nil)
	job := integrationtest.Reminders(db.pool, mailer)

	// In production the next attempt comes after minutes. A test does not wait for
	// them: the run is due at once. The times are those of the database, so there
	// is no clock to turn. A job whose Func returns jobrun.RetryAfter(err, 0) says
	// the same for one error.
	job.Retry.Backoff = func(int) time.Duration { return 0 }

	res, err := runner.RunDate(t.Context(), job, date)
	var failed *jobrun.RunError
	if !errors.As(err, &failed) || failed.Attempt != 1 || !errors.Is(err, errDown) { // the job's own error is inside
		t.Fatalf("first attempt: %v", err)
	}
	if res.Record.Status != jobrun.Failed || res.Record.NextAttemptAt.IsZero() || res.Record.ItemsProcessed != 1 {
		t.Fatalf("first attempt: %+v", res)
	}
	mailer.wantSent(t, "a@example.com")

	mailer.repair()
	results, err := runner.RetryDue(t.Context(), job)
	if err != nil || len(results) != 1 || results[0].Record.Status != jobrun.Succeeded || results[0].Record.Attempt != 2 {
		t.Fatalf("the retry: %+v, %v", results, err)
	}
	mailer.wantSent(t, "a@example.com", "b@example.com", "c@example.com")
	wantHistory(t, runner, job.Key(date),
		"attempt 1 by MANUAL: FAILED, 1 items: invoice 2: connection refused",
		"attempt 2 by RETRY: SUCCEEDED, 2 items")

	if results, err := runner.RetryDue(t.Context(), job); err != nil || len(results) != 0 {
		t.Errorf("another retry: %+v, %v; want none", results, err)
	}
}

// No retry mends a wrong address. A person does, and then approves the re-run: of
// the same key, so that it stays one run with one history.
func TestRejectedMailWaitsForAPerson(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	mailer := &fakeMailer{fail: map[string]error{"b@example.com": integrationtest.ErrRejected}}
	runner := newRunner(t, db, nil)
	job := integrationtest.Reminders(db.pool, mailer)

	res, err := runner.RunDate(t.Context(), job, date)
	if !errors.Is(err, integrationtest.ErrRejected) || !res.Record.NextAttemptAt.IsZero() {
		t.Fatalf("%+v, %v; want no next attempt", res, err)
	}
	if res, err := runner.RunDate(t.Context(), job, date); err != nil || res.Decision != jobrun.AlreadyFailed {
		t.Errorf("called again: %+v, %v", res, err)
	}

	mailer.repair()
	if _, err := runner.ApproveRerun(t.Context(), res.Record, jobrun.Action{By: "operator", Reason: "address corrected"}); err != nil {
		t.Fatal(err)
	}
	if res, err := runner.RunDate(t.Context(), job, date); err != nil || res.Record.Status != jobrun.Succeeded {
		t.Errorf("the re-run: %+v, %v", res, err)
	}
	wantHistory(t, runner, job.Key(date),
		"attempt 1 by MANUAL: FAILED, 1 items: invoice 2: mail rejected",
		"APPROVE_RERUN of attempt 1 by operator: address corrected",
		"attempt 2 by RERUN: SUCCEEDED, 2 items")
}

// Two servers fire at the same moment. Each has its own pool and Runner, as two
// processes would; the database decides.
func TestTwoInstancesOneRun(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	mailer := &fakeMailer{hold: make(chan struct{})} // the winner is at work until the other has its answer
	type answer struct {
		res jobrun.Result
		err error
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // should both run, the test is to fail, not to hang
	defer cancel()
	answers, start := make(chan answer, 2), make(chan struct{})
	for range 2 {
		pool := connect(t, db.schema)
		runner, job := newRunner(t, &database{pool, db.schema}, nil), integrationtest.Reminders(pool, mailer)
		go func() {
			<-start
			res, err := runner.RunDate(ctx, job, date)
			answers <- answer{res, err}
		}()
	}
	close(start)
	loser := <-answers
	close(mailer.hold)
	winner := <-answers

	if loser.err != nil || loser.res.Decision != jobrun.AlreadyRunning {
		t.Errorf("the one: %+v, %v; want that it does nothing", loser.res, loser.err)
	}
	if winner.err != nil || winner.res.Decision != jobrun.Ran || winner.res.Record.Status != jobrun.Succeeded {
		t.Errorf("the other: %+v, %v", winner.res, winner.err)
	}
	if loser.res.Record.WorkerID != winner.res.Record.WorkerID {
		t.Errorf("%s is said to run it, %s did", loser.res.Record.WorkerID, winner.res.Record.WorkerID)
	}
	mailer.wantSent(t, "a@example.com", "b@example.com", "c@example.com")
	wantHistory(t, newRunner(t, db, nil), winner.res.Record.Key, "attempt 1 by MANUAL: SUCCEEDED, 3 items")
}

var (
	date  = jobrun.MustParseDate("2026-09-15")
	seoul = time.FixedZone("KST", 9*60*60) // fixed, so that the test needs no zone data
)

// database is a schema of one test's own: tests run in parallel in one database,
// and find neither each other's runs nor those of yesterday.
type database struct {
	pool   *pgxpool.Pool
	schema string
}

// newDatabase returns a schema with the service's tables and three invoices. It
// is dropped when the test ends.
func newDatabase(t *testing.T) *database {
	t.Helper()
	schema := "test_" + strings.ToLower(rand.Text())
	pool := connect(t, schema)
	if _, err := pool.Exec(t.Context(), "CREATE SCHEMA "+schema); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the pool is closed; t.Context has ended by then
		if _, err := pool.Exec(context.Background(), "DROP SCHEMA "+schema+" CASCADE"); err != nil {
			t.Error(err)
		}
	})
	if _, err := pool.Exec(t.Context(), integrationtest.Tables+`
		INSERT INTO invoice (invoice_id, email, due_on) VALUES
		  (1, 'a@example.com', '2026-09-15'),
		  (2, 'b@example.com', '2026-09-15'),
		  (3, 'c@example.com', '2026-09-15'),
		  (4, 'd@example.com', '2026-09-16')`); err != nil {
		t.Fatal(err)
	}
	db := &database{pool, schema}
	if err := newRunner(t, db, nil).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return db
}

// connect returns a pool that is closed when the test ends. The job's own
// statements find their tables by the search_path.
func connect(t *testing.T, schema string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 4
	config.ConnConfig.RuntimeParams["search_path"] = schema
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// newRunner is set up like that of the service, but in the test's schema. now may
// be nil.
func newRunner(t *testing.T, db *database, now func() time.Time) *jobrun.Runner {
	t.Helper()
	runner, err := jobrun.New(db.pool, seoul, &jobrun.Options{
		Schema: db.schema,
		Now:    now,
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), // shown if the test fails
	})
	if err != nil {
		t.Fatal(err)
	}
	return runner
}

// wantHistory compares what is on record for a run: attempts and what people did.
func wantHistory(t *testing.T, runner *jobrun.Runner, key string, want ...string) {
	t.Helper()
	entries, err := runner.History(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		line := fmt.Sprintf("attempt %d by %s: %s, %d items", e.Attempt, e.Trigger, e.Outcome, e.ItemsProcessed)
		if e.Action != nil {
			line = fmt.Sprintf("%s of attempt %d by %s: %s", e.Kind, e.Attempt, e.Action.By, e.Action.Reason)
		}
		if e.Error != "" {
			line += ": " + e.Error
		}
		got = append(got, line)
	}
	if !slices.Equal(got, want) {
		t.Errorf("history of %s:\n%s\nwant:\n%s", key, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// fakeMailer stands in for the service that mails are sent through.
type fakeMailer struct {
	hold chan struct{} // if not nil, Send waits until it is closed

	mu   sync.Mutex
	fail map[string]error  // by address
	sent map[string]string // key to address
}

func (m *fakeMailer) Send(ctx context.Context, key, email string) error {
	if m.hold != nil {
		select {
		case <-m.hold:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail[email]; err != nil {
		return err
	}
	if m.sent == nil {
		m.sent = map[string]string{}
	}
	if m.sent[key] != "" {
		return fmt.Errorf("%s was sent before", key) // the real one would drop it
	}
	m.sent[key] = email
	return nil
}

// repair ends all failures.
func (m *fakeMailer) repair() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = nil
}

func (m *fakeMailer) wantSent(t *testing.T, want ...string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if got := slices.Sorted(maps.Values(m.sent)); !slices.Equal(got, want) {
		t.Errorf("sent to %q, want %q", got, want)
	}
}
