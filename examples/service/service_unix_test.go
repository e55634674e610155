//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestProgram runs the program as it is deployed: a process that is sent signals.
func TestProgram(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "service")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	for name, test := range map[string]func(*testing.T, string){
		"running job finishes within the grace":      testFinishesWithinGrace,
		"job is interrupted at the end of the grace": testInterruptedAtEndOfGrace,
		"one alert per problem and one at its end":   testAlerts,
		"nothing is told twice after a restart":      testAlertsAfterRestart,
		"failed settlement is retried":               testRetry,
		"health follows the runs":                    testHealth,
		"throw-away database":                        testThrowAwayDatabase,
		"demonstration of every state":               testDemo,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, bin)
		})
	}
}

func testFinishesWithinGrace(t *testing.T, bin string) {
	db := pgtest.Empty(t)
	release := holdSettlement(t, db.Pool)
	runner := observer(t, db.Pool)
	s := start(t, bin, "-fast", "-database-url", db.URL, "-grace", "1m")
	eventually(t, "the service is healthy", func() bool { return s.health() == http.StatusOK })
	eventually(t, "the settlement runs", func() bool { return latest(t, runner).Status == jobrun.Running })

	s.signal(t, syscall.SIGTERM)
	eventually(t, "the service takes no requests any more", func() bool { return s.health() == 0 })
	if rec := latest(t, runner); rec.Status != jobrun.Running {
		t.Fatalf("after SIGTERM, within the grace: %+v", rec)
	}
	release()
	if code := s.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if rec := latest(t, runner); rec.Status != jobrun.Succeeded || rec.Attempt != 1 || rec.ItemsProcessed != 8 {
		t.Errorf("%+v", rec)
	}
}

func testInterruptedAtEndOfGrace(t *testing.T, bin string) {
	db := pgtest.Empty(t)
	release := holdSettlement(t, db.Pool)
	runner := observer(t, db.Pool)
	s := start(t, bin, "-fast", "-database-url", db.URL, "-grace", "100ms")
	eventually(t, "the settlement runs", func() bool { return latest(t, runner).Status == jobrun.Running })

	s.signal(t, os.Interrupt)
	if code := s.wait(t); code != 1 {
		t.Errorf("exit code %d, want 1: a job was interrupted", code)
	}
	rec := latest(t, runner)
	if rec.Status != jobrun.Failed || !strings.Contains(rec.Error, jobrun.ErrShutdown.Error()) {
		t.Errorf("%+v, want FAILED because of %q", rec, jobrun.ErrShutdown)
	}
	if rec.NextAttemptAt.IsZero() || rec.NextAttemptAt.After(rec.FinishedAt) {
		t.Errorf("finished at %s, next attempt at %s; want it due at once", rec.FinishedAt, rec.NextAttemptAt)
	}

	release()
	start(t, bin, "-fast", "-database-url", db.URL)
	eventually(t, "the next instance settles the date", func() bool { return latest(t, runner).Status == jobrun.Succeeded })
	if rec := latest(t, runner); rec.Attempt != 2 || rec.Trigger != jobrun.TriggerRetry || rec.ItemsProcessed != 8 {
		t.Errorf("%+v", rec)
	}
}

func testAlerts(t *testing.T, bin string) {
	db := pgtest.New(t)
	runner := observer(t, db.Pool)
	hook := newWebhook(t)
	start(t, bin, "-fast", "-database-url", db.URL, "-webhook", hook.url)
	date := jobrun.MustParseDate("2026-09-15")
	errReport := errors.New("no paper")
	report := func(name string, err error) jobrun.Result {
		res, _ := runner.RunDate(t.Context(), jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { return err }}, date)
		return res
	}
	// fail makes a new problem. Once its alert has come, the alerter has gone over
	// every older problem once more.
	fail := func(name string) {
		t.Helper()
		report(name, errReport)
		eventually(t, "the alert for "+name, func() bool { return hook.count(name, "problem") > 0 })
	}

	fail("report-1") // the webhook refuses it at first
	fail("report-2")
	fail("report-3")
	if n := hook.count("report-1", "problem"); n != 1 {
		t.Errorf("%d alerts for a problem that did not change", n)
	}
	got := hook.first("report-1")
	if got.Kind != jobrun.ProblemFailed || got.Key != "report-1:2026-09-15" || got.Date != date || got.Attempt != 1 ||
		got.Status != jobrun.Failed || got.Since.IsZero() || got.Error != errReport.Error() {
		t.Errorf("the alert: %+v", got)
	}

	rec, err := runner.Get(t.Context(), "report-1:2026-09-15")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := runner.ApproveRerun(t.Context(), rec, jobrun.Action{By: "operator", Reason: "paper is back"}); err != nil {
		t.Fatal(err)
	}
	fail("report-4")
	if n := hook.count("report-1", "resolved"); n != 0 {
		t.Error("an approved re-run that nobody has executed is called resolved")
	}
	if res := report("report-1", nil); res.Record.Status != jobrun.Succeeded {
		t.Fatalf("the re-run: %+v", res)
	}
	eventually(t, "the end of the problem", func() bool { return hook.count("report-1", "resolved") > 0 })
	fail("report-5")
	fail("report-6")
	for event, want := range map[string]int{"problem": 1, "resolved": 1} {
		if n := hook.count("report-1", event); n != want {
			t.Errorf("%d alerts %q, want %d", n, event, want)
		}
	}
	for _, name := range []string{"report-2", "report-3", "report-4"} {
		if hook.count(name, "problem") != 1 || hook.count(name, "resolved") != 0 {
			t.Errorf("alerts of %s: %d and %d", name, hook.count(name, "problem"), hook.count(name, "resolved"))
		}
	}
}

// What was told is not told again by a process that is started later, nor by another
// instance; what changed meanwhile is.
func testAlertsAfterRestart(t *testing.T, bin string) {
	db := pgtest.New(t)
	runner := observer(t, db.Pool)
	hook := newWebhook(t)
	args := []string{"-fast", "-database-url", db.URL, "-webhook", hook.url}
	date := jobrun.MustParseDate("2026-09-15")
	report := func(name string, err error) {
		_, _ = runner.RunDate(t.Context(), jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { return err }}, date)
	}
	told := func(name, event string) { // once more than that, everything older was looked at again
		t.Helper()
		eventually(t, "the alert for "+name, func() bool { return hook.count(name, event) > 0 })
	}
	errReport := errors.New("no paper")
	first := start(t, bin, args...)
	for _, name := range []string{"report-1", "report-2"} {
		report(name, errReport)
		told(name, "problem")
	}
	if err := first.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-first.ended
	if _, err := runner.Skip(t.Context(), "report-2:2026-09-15", jobrun.Action{By: "operator", Reason: "printed by hand"}); err != nil {
		t.Fatal(err)
	}
	start(t, bin, args...)
	start(t, bin, args...)
	told("report-2", "resolved") // by a process that has not seen it begin
	for i := range 4 {
		name := fmt.Sprintf("report-%d", 3+i)
		report(name, errReport)
		told(name, "problem")
	}
	for _, c := range []struct {
		name, event string
		want        int
	}{{"report-1", "problem", 1}, {"report-1", "resolved", 0}, {"report-2", "problem", 1}, {"report-2", "resolved", 1}, {"report-3", "problem", 1}, {"report-4", "problem", 1}} {
		if n := hook.count(c.name, c.event); n != c.want {
			t.Errorf("%s: %d alerts %q, want %d", c.name, n, c.event, c.want)
		}
	}
}

func testRetry(t *testing.T, bin string) {
	db := pgtest.Empty(t)
	runner := observer(t, db.Pool)
	hook := newWebhook(t)
	execute(t, db.Pool, demoTables)
	execute(t, db.Pool, `ALTER TABLE demo_settlement ADD CONSTRAINT broken CHECK (false)`)
	s := start(t, bin, "-fast", "-database-url", db.URL, "-webhook", hook.url)
	eventually(t, "the settlement fails", func() bool { return latest(t, runner).Status == jobrun.Failed })
	eventually(t, "an alert", func() bool { return hook.count("daily-settlement", "problem") > 0 })
	if got := hook.first("daily-settlement"); got.Kind != jobrun.ProblemRetrying || got.NextAttemptAt.IsZero() || !strings.Contains(got.Error, "broken") {
		t.Errorf("the alert: %+v", got)
	}
	execute(t, db.Pool, `ALTER TABLE demo_settlement DROP CONSTRAINT broken`)
	eventually(t, "the settlement succeeds", func() bool { return latest(t, runner).Status == jobrun.Succeeded })
	if rec := latest(t, runner); rec.Attempt < 2 || rec.Trigger != jobrun.TriggerRetry || rec.ItemsProcessed != 8 {
		t.Errorf("%+v", rec)
	}
	eventually(t, "the end of the problem", func() bool { return hook.count("daily-settlement", "resolved") == 1 })
	s.signal(t, syscall.SIGTERM)
	if code := s.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func testHealth(t *testing.T, bin string) {
	db := pgtest.Empty(t)
	release := holdSettlement(t, db.Pool)
	runner := observer(t, db.Pool)
	s := start(t, bin, "-fast", "-database-url", db.URL)
	eventually(t, "the settlement runs", func() bool { return latest(t, runner).Status == jobrun.Running })
	if code := s.health(); code != http.StatusOK {
		t.Errorf("while a job runs: %d", code)
	}

	var body string
	eventually(t, "/healthz shows the stale run", func() bool {
		execute(t, db.Pool, `
			UPDATE batch_job_attempt
			SET heartbeat_at = heartbeat_at - interval '1 hour'
			WHERE job_key LIKE 'daily-settlement:%'`) // again, should it beat meanwhile
		code := 0
		code, body = s.get("/healthz")
		return code == http.StatusServiceUnavailable
	})
	var answer struct{ Problems []problem }
	if err := json.Unmarshal([]byte(body), &answer); err != nil || len(answer.Problems) != 1 ||
		answer.Problems[0].Kind != jobrun.ProblemStale || answer.Problems[0].Key != latest(t, runner).Key {
		t.Errorf("%s: %v", body, err)
	}
	execute(t, db.Pool, `UPDATE batch_job_attempt SET heartbeat_at = clock_timestamp() WHERE job_key LIKE 'daily-settlement:%'`)
	eventually(t, "/healthz is well again", func() bool { return s.health() == http.StatusOK })
	release()
	eventually(t, "the settlement succeeds", func() bool { return latest(t, runner).Status == jobrun.Succeeded })
	if code, body := s.get("/"); code != http.StatusOK || !settled.MatchString(body) {
		t.Errorf("/: %d\n%s", code, body)
	}

	execute(t, db.Pool, `ALTER TABLE batch_job_run RENAME TO elsewhere`)
	for _, path := range []string{"/healthz", "/"} {
		code, body := s.get(path)
		if code != http.StatusServiceUnavailable || regexp.MustCompile(`(?i)batch_job|select|postgres|SQLSTATE|42P01`).MatchString(body) {
			t.Errorf("%s without the table: %d\n%s", path, code, body)
		}
	}
	execute(t, db.Pool, `ALTER TABLE elsewhere RENAME TO batch_job_run`)
	eventually(t, "/healthz is well again", func() bool { return s.health() == http.StatusOK })
}

func testThrowAwayDatabase(t *testing.T, bin string) {
	if os.Getenv("JOBRUN_TEST_DATABASE_URL") != "" {
		t.Skip("the tests were given a server, so there may be no programs to start one")
	}
	s := start(t, bin, "-fast")
	eventually(t, "the settlement succeeds", func() bool {
		_, body := s.get("/")
		return settled.MatchString(body)
	})
	s.signal(t, syscall.SIGTERM)
	if code := s.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if out := s.out.String(); !strings.Contains(out, "listening on http://127.0.0.1:") {
		t.Errorf("it printed %q", out)
	}
}

// The page shows every state, and the re-run that is approved there is executed.
func testDemo(t *testing.T, bin string) {
	if os.Getenv("JOBRUN_TEST_DATABASE_URL") != "" {
		t.Skip("the tests were given a server, so there may be no programs to start one")
	}
	s := start(t, bin, "-demo")
	if want := "admin page: " + s.url + "/admin/jobs/\n"; !strings.Contains(s.out.String(), want) {
		t.Errorf("it printed %q, want %q", s.out.String(), want)
	}
	var missing []string
	eventually(t, "every state is on the page", func() bool {
		_, overview := s.get("/admin/jobs/")
		overview, _, _ = strings.Cut(overview, `class="legend"`) // which names them all
		missing = nil
		for _, state := range []string{"STALE", "MISSED", "FAILED", "RETRYING", "RUNNING", "SKIPPED", "SUCCEEDED", "no run"} {
			if !strings.Contains(overview, state) {
				missing = append(missing, state)
			}
		}
		return len(missing) == 0
	})
	_, list := s.get("/admin/jobs/runs?job=customer-notices&status=FAILED")
	link := regexp.MustCompile(`run\?key=(customer-notices%3A[0-9-]+)`).FindStringSubmatch(list)
	if link == nil {
		t.Fatal(list)
	}
	if _, page := s.get("/admin/jobs/run?key=" + link[1]); !strings.Contains(page, "no address of customer 1008") {
		t.Error(page)
	}
	_, question := s.get("/admin/jobs/confirm?do=rerun&key=" + link[1])
	form := url.Values{"reason": {"the addresses are there"}}
	for _, m := range regexp.MustCompile(`<input type="hidden" name="([^"]*)" value="([^"]*)">`).FindAllStringSubmatch(question, -1) {
		form.Set(m[1], html.UnescapeString(m[2]))
	}
	response, err := client.PostForm(s.url+"/admin/jobs/act", form)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()
	eventually(t, "the approved re-run succeeds", func() bool {
		_, page := s.get("/admin/jobs/run?key=" + link[1])
		return strings.Contains(page, "SUCCEEDED") && strings.Contains(page, "the addresses are there")
	})
	s.signal(t, syscall.SIGTERM)
	if code := s.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// settled is the line of the status page.
var settled = regexp.MustCompile(`daily-settlement:\S+ +SUCCEEDED`)

// holdSettlement lets the service's settlement wait in the database until release.
func holdSettlement(t *testing.T, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	execute(t, pool, demoTables)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(release)
	if _, err := tx.Exec(t.Context(), `LOCK TABLE demo_settlement IN SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	return release
}

// observer is a Runner of the test's own on the service's tables.
func observer(t *testing.T, pool *pgxpool.Pool) *jobrun.Runner {
	t.Helper()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		t.Fatal(err)
	}
	runner, err := jobrun.New(pool, zone, &jobrun.Options{WorkerID: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return runner
}

// latest is the settlement's latest run; the zero Record: there is none yet, or
// the service has not created the tables yet.
func latest(t *testing.T, runner *jobrun.Runner) jobrun.Record {
	t.Helper()
	records, err := runner.List(t.Context(), jobrun.Filter{Job: "daily-settlement", Limit: 1})
	if err != nil || len(records) == 0 {
		return jobrun.Record{}
	}
	return records[0]
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// eventually fails the test if the condition does not come true.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(45 * time.Second)
	for !condition() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not within 45 s: %s", what)
		}
	}
}

// service is a process of the program.
type service struct {
	cmd       *exec.Cmd
	url       string
	out, errs buffer
	ended     chan struct{}
}

// start returns when the service is listening. It is killed when the test ends.
func start(t *testing.T, bin string, args ...string) *service {
	t.Helper()
	s := &service{cmd: exec.Command(bin, args...), ended: make(chan struct{})}
	s.cmd.Dir = "/"
	s.cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains([]string{"DATABASE_URL", "JOBRUN_TEST_DATABASE_URL", "BUSINESS_ZONE", "ALERT_WEBHOOK"}, name)
	})
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.errs
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait() // the test looks at the exit code
		close(s.ended)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.ended
		if t.Failed() {
			t.Logf("%q printed\n%s%s", args, s.out.String(), s.errs.String())
		}
	})
	eventually(t, "the service is listening", func() bool {
		if m := regexp.MustCompile(`(?m)^listening on (http://.*)$`).FindStringSubmatch(s.out.String()); m != nil {
			s.url = m[1]
		}
		select {
		case <-s.ended:
			t.Fatal("the service ended")
		default:
		}
		return s.url != ""
	})
	return s
}

func (s *service) signal(t *testing.T, sig os.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// wait returns the exit code of a service that was told to stop.
func (s *service) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-s.ended:
	case <-time.After(45 * time.Second):
		t.Fatal("the service does not end")
	}
	return s.cmd.ProcessState.ExitCode()
}

// client keeps no connections, so that none outlives the service.
var client = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// get returns 0 if there is no answer.
func (s *service) get(path string) (code int, body string) {
	response, err := client.Get(s.url + path)
	if err != nil {
		return 0, ""
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(text)
}

func (s *service) health() int {
	code, _ := s.get("/healthz")
	return code
}

// webhook keeps the alerts that it has accepted: all but the very first.
type webhook struct {
	url     string
	mu      sync.Mutex
	refused bool
	alerts  []alert
}

func newWebhook(t *testing.T) *webhook {
	h := &webhook{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		var a alert
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
			t.Errorf("an alert that is not JSON: %v", err)
		}
		if !h.refused {
			h.refused = true
			http.Error(w, "not yet", http.StatusServiceUnavailable)
			return
		}
		h.alerts = append(h.alerts, a)
	}))
	t.Cleanup(server.Close)
	h.url = server.URL
	return h
}

func (h *webhook) count(job, event string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.alerts {
		if a.Job == job && a.Event == event {
			n++
		}
	}
	return n
}

func (h *webhook) first(job string) alert {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.alerts[slices.IndexFunc(h.alerts, func(a alert) bool { return a.Job == job })]
}

// buffer may be read while a process writes to it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
