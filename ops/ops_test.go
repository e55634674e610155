package ops_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	_ "time/tzdata"
	"unicode"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// service is a program with a command of its own, as the documentation of ops shows it.
var _ = pgtest.RegisterChild("service", func() int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if slices.Contains(os.Args, "race") {
		fmt.Println("the service prints something of its own")
	}
	runner, err := jobrun.New(pool, seoul, &jobrun.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	if err := os.Setenv("JOBRUN_TEST_CHILD", "service"); err != nil { // for the processes of a race
		panic(err)
	}
	if os.Getenv("SCHEDULED") != "" {
		if _, err := runner.Schedule(ctx, cron.New(cron.WithLocation(seoul)), "0 1 * * *", settlement); err != nil {
			panic(err)
		}
	}
	if os.Getenv("WITHOUT_JOBS") != "" {
		return ops.Main(ctx, runner, os.Args[2:])
	}
	return ops.Main(ctx, runner, os.Args[2:], settlement)
})

var (
	seoul = func() *time.Location {
		zone, err := time.LoadLocation("Asia/Seoul")
		if err != nil {
			panic(err)
		}
		return zone
	}()
	noop       = func(context.Context, *jobrun.Run) error { return nil }
	settlement = jobrun.Job{Name: "daily-settlement", Func: noop}
	day        = jobrun.MustParseDate("2026-09-15")
)

// jobrunctl is the stand-alone command, built once, beside the test binary: "go test"
// removes both.
var jobrunctl = sync.OnceValues(func() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(filepath.Dir(self), "jobrunctl")
	if out, err := exec.Command("go", "build", "-o", bin, "./jobrunctl").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return bin, nil
})

// said is what a process of the command wrote, and its exit code.
type said struct {
	out, err string
	code     int
}

func (s said) String() string { return fmt.Sprintf("exit %d\n%s%s", s.code, s.out, s.err) }

// alone prepares the stand-alone command for a database.
func alone(t testing.TB, url string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := jobrunctl()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+url, "JOBRUN_ZONE=Asia/Seoul")
	return cmd
}

// embedded prepares the service's own command.
func embedded(t testing.TB, url string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := pgtest.Reexec(t, "service", "DATABASE_URL="+url)
	cmd.Args = append(append(cmd.Args, "jobs"), args...)
	return cmd
}

// listen runs a command without a terminal.
func listen(t testing.TB, cmd *exec.Cmd) said {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// expect runs the stand-alone command and checks its exit code and what it says.
func expect(t testing.TB, url string, code int, wants []string, args ...string) said {
	t.Helper()
	s := listen(t, alone(t, url, args...))
	s.check(t, code, wants, args)
	return s
}

func (s said) check(t testing.TB, code int, wants []string, args []string) {
	t.Helper()
	if s.code != code {
		t.Errorf("%q: exit %d, want %d\n%s", args, s.code, code, s)
	}
	for _, want := range wants {
		if !strings.Contains(s.out+s.err, want) {
			t.Errorf("%q: no %q\n%s", args, want, s)
		}
	}
}

func newRunner(t testing.TB, pool *pgxpool.Pool, opts jobrun.Options) *jobrun.Runner {
	t.Helper()
	opts.Logger = slog.New(slog.DiscardHandler)
	r, err := jobrun.New(pool, seoul, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Shutdown(context.WithoutCancel(t.Context())) })
	return r
}

func execute(t testing.TB, db *pgtest.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// run executes a job for a date.
func run(t testing.TB, r *jobrun.Runner, name string, d jobrun.Date, retry jobrun.Retry, fails error) {
	t.Helper()
	_, err := r.RunDate(t.Context(), jobrun.Job{Name: name, Retry: retry, Func: func(_ context.Context, run *jobrun.Run) error {
		run.AddProcessed(120)
		return fails
	}}, d)
	if !errors.Is(err, fails) {
		t.Fatal(err)
	}
}

// dead is an attempt whose process is not heard of any more: a real one, whose
// heartbeats are hours apart, made older by hand.
func dead(t testing.TB, db *pgtest.DB, name string, d jobrun.Date) {
	t.Helper()
	r := newRunner(t, db.Pool, jobrun.Options{Lease: 24 * time.Hour, WorkerID: "web-1"})
	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = r.RunDate(context.WithoutCancel(t.Context()), jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error {
			close(started)
			<-end
			return nil
		}}, d)
	}()
	<-started
	t.Cleanup(func() { close(end); <-ended })
	execute(t, db, `UPDATE batch_job_attempt SET heartbeat_at = now() - interval '26 hours', started_at = now() - interval '27 hours' WHERE job_key = $1`, name+":"+d.String())
	execute(t, db, `UPDATE batch_job_run SET started_at = now() - interval '27 hours' WHERE job_key = $1`, name+":"+d.String())
}

// The whole way of an operator, by exit codes.
func TestOperatorsWay(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	expect(t, db.URL, ops.ExitError, []string{`run "jobrunctl migrate"`}, "list")
	expect(t, db.URL, ops.ExitFine, []string{"The tables are complete.", "migration applied"}, "migrate")
	expect(t, db.URL, ops.ExitFine, []string{"as jobrun needs them", "session_time_zone"}, "verify")
	expect(t, db.URL, ops.ExitFine, []string{"Nothing needs a person.", "Missed dates are not judged"}, "attention")
	expect(t, db.URL, ops.ExitFine, []string{"No run is stale."}, "stale")

	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "reminders", day, jobrun.Retry{}, nil)
	run(t, r, "inventory", day, jobrun.Retry{MaxAttempts: 3}, errors.New("no stock file"))
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing\nsecond line"))
	dead(t, db, "payout", day)

	expect(t, db.URL, ops.ExitAttention, []string{"STALE", "payout:2026-09-15", "FAILED", "settlement:2026-09-15", "RETRYING", "no stock file", "Asia/Seoul"}, "attention")
	expect(t, db.URL, ops.ExitAttention, []string{"payout:2026-09-15", "web-1-", "26h0m", "alive", "session"}, "stale")
	expect(t, db.URL, ops.ExitFine, []string{"rates are missing ...", "120", "SUCCEEDED"}, "list")
	expect(t, db.URL, ops.ExitFine, []string{"second line", "jobrunctl rerun --reason ... settlement:2026-09-15"}, "show", "settlement:2026-09-15")
	expect(t, db.URL, ops.ExitError, []string{"no such run"}, "show", "settlement:2026-09-16")

	expect(t, db.URL, ops.ExitFine, []string{"is FAILED"}, "mark-failed", "payout:2026-09-15", "--reason", "pod evicted", "--by", "kim", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitConflict, []string{"RUNNING"}, "mark-failed", "payout:2026-09-15", "--reason", "pod evicted", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitConflict, []string{"you saw attempt 2, it is now FAILED at attempt 1"}, "rerun", "payout:2026-09-15", "--reason", "again", "--yes", "--attempt", "2")
	expect(t, db.URL, ops.ExitFine, []string{"RetryDue"}, "rerun", "payout:2026-09-15", "--reason", "again", "--by", "lee", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitConflict, []string{"approved since"}, "rerun", "payout:2026-09-15", "--reason", "again", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitConflict, []string{"only --force"}, "rerun", "reminders:2026-09-15", "--reason", "again", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitFine, nil, "skip", "settlement:2026-09-15", "--reason", "no trading", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitFine, []string{"is SKIPPED"}, "skip", "settlement:2026-09-16", "--reason", "no trading", "--yes", "--attempt", "0")
	expect(t, db.URL, ops.ExitConflict, nil, "skip", "reminders:2026-09-15", "--reason", "no trading", "--yes", "--attempt", "1")
	expect(t, db.URL, ops.ExitFine, []string{"MARK_FAILED", "kim (role ", "pod evicted", "which was RUNNING", "APPROVE_RERUN", "lee"}, "history", "payout:2026-09-15")
	s := expect(t, db.URL, ops.ExitFine, []string{"It is tried again by itself", "rerun --reason"}, "show", "inventory:2026-09-15")
	expect(t, db.URL, ops.ExitFine, []string{"2 runs pruned"}, "prune", "--before", "2026-09-16", "--yes")
	expect(t, db.URL, ops.ExitFine, []string{"can never run again"}, "show", "reminders:2026-09-15")

	// Neither a run whose history is pruned nor one that was never executed is another program's.
	for _, c := range []struct{ key, want string }{
		{"reminders:2026-09-15", "attempt 1, its history was pruned, SUCCEEDED"},
		{"settlement:2026-09-16", "recorded without an execution, SKIPPED"},
	} {
		for _, args := range [][]string{{"history", c.key}, {"history", c.key, "--json"}, {"show", c.key}} {
			s = expect(t, db.URL, ops.ExitFine, nil, args...)
			if args[0] == "history" && len(args) == 2 && !strings.Contains(s.out, c.want) || strings.Contains(s.out, "another program") || strings.Contains(s.out, "outside jobrun") {
				t.Errorf("%q: %s", args, s)
			}
		}
	}
	expect(t, db.URL, ops.ExitFine, []string{"reason ", "none: it was never executed"}, "show", "settlement:2026-09-16")
	expect(t, db.URL, ops.ExitFine, []string{`no run of a job "remindres" was ever seen`}, "skip", "remindres:2026-09-16", "--reason", "typo", "--yes", "--attempt", "0")
	expect(t, db.URL, ops.ExitError, []string{"a key is a job's name, a colon, and a date"}, "show", "settlement")
}

// Every answer as JSON, and the same facts in it.
func TestJSON(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	dead(t, db, "payout", day)
	answer := func(code int, args ...string) (v map[string]any) {
		t.Helper()
		s := listen(t, alone(t, db.URL, append(args, "--json")...))
		if s.code != code || s.err != "" {
			t.Errorf("%q: %s", args, s)
		}
		if err := json.Unmarshal([]byte(s.out), &v); err != nil {
			t.Errorf("%q: %v\n%s", args, err, s)
		}
		return v
	}
	at := func(v any, path ...any) any {
		for _, p := range path {
			switch p := p.(type) {
			case string:
				m, _ := v.(map[string]any)
				v = m[p]
			case int:
				l, _ := v.([]any)
				if p >= len(l) {
					return nil
				}
				v = l[p]
			}
		}
		return v
	}
	for _, c := range []struct {
		code int
		args []string
		path []any
		want any
	}{
		{3, []string{"attention"}, []any{"problems", 0, "key"}, "settlement:2026-09-15"},
		{3, []string{"attention"}, []any{"missed_judged"}, false},
		{3, []string{"stale"}, []any{"stale", 0, "stale", "alive"}, false},
		{3, []string{"stale"}, []any{"stale", 0, "run", "key"}, "payout:2026-09-15"},
		{0, []string{"list", "--limit", "1"}, []any{"next"}, "settlement:2026-09-15"},
		{0, []string{"list", "--after", "settlement:2026-09-15"}, []any{"runs", 0, "key"}, "payout:2026-09-15"},
		{0, []string{"list", "--job", "none"}, []any{"runs"}, []any{}},
		{0, []string{"list", "--status", "failed", "--from", "2026-09-15", "--to", "2026-09-15"}, []any{"runs", 0, "error"}, "rates are missing"},
		{0, []string{"show", "settlement:2026-09-15"}, []any{"run", "attempt"}, 1.0},
		{0, []string{"show", "payout:2026-09-15"}, []any{"stale", "session"}, "unknown"},
		{0, []string{"skip", "settlement:2026-09-15", "--reason", "none", "--yes", "--attempt=1"}, []any{"run", "status"}, "SKIPPED"},
		{0, []string{"history", "settlement:2026-09-15"}, []any{"history", 1, "reason"}, "none"},
		{0, []string{"prune", "--before", "2026-01-01", "--yes"}, []any{"pruned"}, 0.0},
		{0, []string{"race", "--processes", "2"}, []any{"fine"}, true},
	} {
		if got := at(answer(c.code, c.args...), c.path...); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%q: %v is %v, want %v", c.args, c.path, got, c.want)
		}
	}
}

func TestMistakesAreRefusedBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	const nowhere = "postgres://u:hunter2@127.0.0.1:1/db" // an attempt to connect would be exit 1
	for _, c := range []struct{ args, want string }{
		{"", "Usage:"},
		{"lst", `no command "lst"`},
		{"show", "show needs KEY"},
		{"show a:2026-09-15 b:2026-09-15", `unexpected argument "b:2026-09-15"`},
		{"list --limit 0", "--limit is 0"},
		{"list --limit 2000", "--limit is 2000, allowed: 1 to 1000"},
		{"list --from 2026-02-30", "--from"},
		{"list --colour", "-colour"},
		{"list --zone=Local", "zone"},
		{"list --zone=Mars/Base", `--zone is "Mars/Base"`},
		{"list --zone=", "no business zone"},
		{"list --database-url=", "no database"},
		{"list --database-url=postgres://u:hunter2@host:port/db", "--database-url"},
		{"attention --since -1h", "--since is -1h"},
		{"attention --due-by 25h", "--due-by is 25h"},
		{"missed", "ops.Main"},
		{"attention --due-by 2", "want a time of day such as 02:30"},
		{"rerun a:2026-09-15", "rerun needs --reason"},
		{"rerun a:2026-09-15 --reason x", "needs --yes --attempt N"},
		{"rerun a:2026-09-15 --reason x --yes", "--yes needs --attempt N"},
		{"rerun a:2026-09-15 --reason x --yes --attempt -1", "--attempt is -1"},
		{"rerun a:2026-09-15 --reason x --yes --attempt 1 --timeout 5s", "--timeout is for --wait"},
		{"rerun a:2026-09-15 --by= --reason x --yes --attempt 1", "--by is empty"},
		{"mark-failed a:2026-09-15 --reason x --reset-items", "--reset-items"},
		{"rerun a:2026-09-15 --reason ... --yes --attempt 1", "needs --reason, in words"},
		{"rerun a:2026-09-15 --reason x --yes --attempt one", "--attempt, wanted: a number"},
		{"rerun a:2026-09-15 --reason x --yes --attempt 1 --status BROKEN", `--status is "BROKEN"`},
		{"attention --since yesterday", "--since, wanted: a duration such as 24h"},
		{"prune", "prune needs --before"},
		{"prune --before yesterday --yes", "--before"},
		{"prune --before 2026-01-01", "needs --yes"},
		{"race --processes 1", "--processes is 1"},
		{"race --child daily-settlement --date 2026-09-15", "started by"},
	} {
		s := listen(t, alone(t, nowhere, strings.Fields(c.args)...))
		s.check(t, ops.ExitUsage, []string{c.want}, []string{c.args})
		if strings.Contains(s.String(), "hunter2") {
			t.Errorf("%s prints the password\n%s", c.args, s)
		}
	}
	s := expect(t, nowhere, ops.ExitError, nil, "list")
	if strings.Contains(s.String(), "hunter2") {
		t.Errorf("prints the password\n%s", s)
	}
}

// Whatever is wrong with it, a connection string is not shown.
func TestNoPasswordIsEverShown(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"host=x password = geheim port=abc", `host=x password=geheim\ zwei port=abc`, "host=x password='unterminated geheim", "host=localhost;password=geheim",
		"host=h user=u PASSWORD=geheim sslmode=x", "postgres://u:geheim@heim:x@h:1x/db", "postgres://u:geheim@127.0.0.1:1/db", "Host=127.0.0.1;Port=1;Password=geheim",
		"host=127.0.0.1 port=1 dbname=a;password=geheim", "host=127.0.0.1 port=1 user=a;password=geheim", "host=127.0.0.1,b;password=geheim port=1",
		"postgres://u:ge@heim/geheim@127.0.0.1:1/db", "postgres://u:ge@heim#geheim/x@127.0.0.1:1/db", "postgres://u:geheim@12/geheim@127.0.0.1:1/app",
		"jdbc:postgresql://127.0.0.1:1/db?user=u&password=geheim", "host=postgres://u:geheim@h/db",
	} {
		for _, args := range [][]string{{"list"}, {"list", "--json"}, {"race", "--processes", "2"}} {
			s := listen(t, alone(t, url, args...))
			if s.code != ops.ExitUsage && s.code != ops.ExitError || strings.Contains(s.String(), "geheim") {
				t.Errorf("%s: %s", url, s)
			}
			s = listen(t, alone(t, "", append(args, "--database-url", url)...))
			if s.code != ops.ExitUsage && s.code != ops.ExitError || strings.Contains(s.String(), "geheim") {
				t.Errorf("%s: %s", url, s)
			}
		}
	}
}

// A script acts on the state that a person saw, and not on another person's decision.
func TestScriptsActOnWhatWasSeen(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	const key = "settlement:2026-09-15"
	act := func(code int, want string, args ...string) {
		t.Helper()
		expect(t, db.URL, code, []string{want}, append(args, "--reason", "x", "--yes")...)
	}
	act(ops.ExitFine, "is SKIPPED", "skip", key, "--attempt", "1")
	act(ops.ExitConflict, "it is now SKIPPED at attempt 1", "rerun", key, "--attempt", "1")
	act(ops.ExitConflict, "you saw FAILED", "rerun", key, "--attempt", "1", "--status", "failed")
	act(ops.ExitFine, "approved", "rerun", key, "--attempt", "1", "--status", "skipped")
	act(ops.ExitConflict, "there is no run", "skip", "settlement:2026-09-16", "--attempt", "1")
	act(ops.ExitFine, "is SKIPPED", "skip", "settlement:2026-09-16", "--attempt", "0")
	act(ops.ExitConflict, "it is now SKIPPED", "skip", "settlement:2026-09-16", "--attempt", "0", "--status", "FAILED")

	// A run of another program, under a key that no job has.
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id) VALUES ('no key', 'FAILED', now(), 'node-1')`)
	s := expect(t, db.URL, ops.ExitFine, []string{"jobrunctl skip --reason ... 'no key'"}, "show", "no key")
	if strings.Contains(s.out, "rerun") {
		t.Errorf("advises what cannot be: %s", s)
	}
	act(ops.ExitFine, "is SKIPPED", "skip", "no key", "--attempt", "1")
}

// Errors are JSON too, and never beside an answer that says that all is well.
func TestErrorsAsJSON(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, c := range []struct {
		code int
		args []string
	}{
		{ops.ExitError, []string{"show", "nosuch:2026-09-15"}},
		{ops.ExitUsage, []string{"rerun", "nosuch:2026-09-15"}},
		{ops.ExitUsage, []string{"list", "--limit", "0"}},
		{ops.ExitError, []string{"race", "--processes", "2", "--schema", "nosuch"}},
		{ops.ExitConflict, []string{"skip", "a:2026-09-15", "--reason", "x", "--yes", "--attempt", "3"}},
	} {
		s := listen(t, alone(t, db.URL, append(c.args, "--json")...))
		var answer map[string]any
		if err := json.Unmarshal([]byte(s.out), &answer); err != nil || s.code != c.code || answer["error"] == nil {
			t.Errorf("%q: %v\n%s", c.args, err, s)
		}
	}
	s := listen(t, embedded(t, db.URL, "missed", "--from", "2026-11-29", "--to", "2026-11-01", "--json"))
	if s.code != ops.ExitUsage || strings.Contains(s.out, `"missed"`) || !strings.Contains(s.out, `"error"`) {
		t.Errorf("%s", s)
	}
	if out, err := os.OpenFile("/dev/full", os.O_WRONLY, 0); err == nil {
		for _, args := range [][]string{{"list"}, {"list", "--json"}} {
			cmd := alone(t, db.URL, args...)
			cmd.Stdout = out
			if err := cmd.Run(); cmd.ProcessState.ExitCode() != ops.ExitError {
				t.Errorf("%q into a full disk: %v", args, err)
			}
		}
		out.Close()
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	s := expect(t, "", ops.ExitFine, []string{"mark-failed KEY", "Exit codes:", "--zone ZONE"}, "help")
	for line := range strings.SplitSeq(s.out, "\n") {
		name := strings.Fields(line + " .")[0]
		if strings.HasPrefix(line, "  ") && !strings.HasPrefix(name, "-") && !unicode.IsDigit(rune(name[0])) {
			expect(t, "", ops.ExitFine, []string{"Usage: jobrunctl " + name, "Examples:", "  jobrunctl " + name}, name, "--help")
		}
	}
	if help := expect(t, "", ops.ExitFine, nil, "race", "--help"); strings.Contains(help.out, "--child") {
		t.Errorf("shows what is not for people:\n%s", help)
	}
}

// Two operators restart the same settlement at the same moment.
func TestTwoOperatorsAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	const key = "settlement:2026-09-15"
	var wg sync.WaitGroup
	answers := make([]said, 4)
	for i := range answers {
		cmd := alone(t, db.URL, "rerun", key, "--reason", "rates loaded", "--by", fmt.Sprintf("operator %d", i), "--yes", "--attempt", "1")
		wg.Go(func() { answers[i] = listen(t, cmd) })
	}
	wg.Wait()
	codes := map[int]int{}
	for _, s := range answers {
		codes[s.code]++
	}
	if codes[ops.ExitFine] != 1 || codes[ops.ExitConflict] != len(answers)-1 {
		t.Errorf("%v\n%v", codes, answers)
	}
	history, err := r.History(t.Context(), key)
	if err != nil || len(history) != 2 {
		t.Errorf("%v, %v", history, err)
	}
}

// The service executes the re-run that the command waits for.
func TestRerunWaitsForTheOutcome(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing")
	for _, c := range []struct {
		job  string
		err  error
		code int
		want string
	}{{"settlement", nil, ops.ExitFine, "SUCCEEDED"}, {"payout", failure, ops.ExitAttention, failure.Error()}} {
		run(t, r, c.job, day, jobrun.Retry{}, failure)
		waits := make(chan said)
		cmd := alone(t, db.URL, "rerun", c.job+":2026-09-15", "--reason", "rates loaded", "--yes", "--attempt", "1", "--wait", "--timeout", "1m")
		go func() { waits <- listen(t, cmd) }()
		job := jobrun.Job{Name: c.job, Func: func(context.Context, *jobrun.Run) error { return c.err }}
		var s said
		for done := false; !done; { // the approval comes some time
			if _, err := r.RetryDue(t.Context(), job); !errors.Is(err, c.err) && err != nil {
				t.Fatal(err)
			}
			select {
			case s = <-waits:
				done = true
			case <-time.After(50 * time.Millisecond):
			}
		}
		s.check(t, c.code, []string{c.want, "waiting for the service's RetryDue"}, cmd.Args)
	}
	run(t, r, "reminders", day, jobrun.Retry{}, failure)
	expect(t, db.URL, ops.ExitError, []string{"not ended within 1s"}, "rerun", "reminders:2026-09-15", "--reason", "x", "--yes", "--attempt", "1", "--wait", "--timeout", "1s")
}

// What another program has written cannot make a terminal do anything.
func TestHostileTextsAreShownNotObeyed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const title, clear, csi, bidi = "\x1b]0;owned\x07", "\x1b[2J", "\u009b31m", "\u202e"
	hostile := "evil" + title + clear + csi + bidi
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, started_at, worker_id, error_message) VALUES ($1, 'RUNNING', now() - interval '1 day', $2, $3)`,
		hostile+":2026-09-15", "w"+clear, "line 1\r\nline 2"+title)
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id, error_message) VALUES ($1, 'FAILED', now(), $2, $3)`,
		"plain:2026-09-15", "w"+clear, "line 1\r\nline 2"+title)
	key := hostile + ":2026-09-15"
	for _, args := range [][]string{
		{"list"},
		{"stale"},
		{"attention"},
		{"show", key},
		{"show", "plain:2026-09-15"},
		{"history", key},
		{"history", "plain:2026-09-15"},
		{"show", key + "x"},
		{"rerun", key, "--reason", "x", "--yes", "--attempt", "0"},
		{"mark-failed", key, "--reason", "x", "--yes", "--attempt", "9"},
	} {
		for _, json := range []bool{false, true} {
			if json {
				args = append(slices.Clone(args), "--json")
			}
			s := listen(t, alone(t, db.URL, args...))
			if i := strings.IndexFunc(s.out+s.err, func(c rune) bool { return !unicode.IsPrint(c) && c != '\n' }); i >= 0 {
				t.Errorf("%q: %q at %d of\n%q", args, (s.out + s.err)[i:i+1], i, s.out+s.err)
			}
			if !strings.Contains(s.out+s.err, "evil") && !strings.Contains(s.out+s.err, "plain") {
				t.Errorf("%q: %s", args, s)
			}
		}
	}
	var shown struct {
		Run jobrun.Record `json:"run"`
	}
	s := listen(t, alone(t, db.URL, "show", key, "--json"))
	if err := json.Unmarshal([]byte(s.out), &shown); err != nil || shown.Run.Key != key {
		t.Errorf("%v: %q, want %q", err, shown.Run.Key, key)
	}
}

// Nor can it pass for what the command says itself, or for another run's key.
func TestTextsCannotForgeTheCommandsLines(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const forged = "node-1\njobrunctl: a:2026-09-15 is FAILED. All is well"
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id, started_at, finished_at, error_message) VALUES
		('a:2026-09-15', 'RUNNING', $1, now() - interval '1 day', NULL, NULL), ('b:2026-09-15', 'FAILED', 'w', now(), now(), $2)`,
		forged, "rates missing\nAPPROVE_RERUN of attempt 1, which was FAILED\nby cfo (role postgres)\nagreed by phone")
	for _, args := range [][]string{
		{"list"},
		{"stale"},
		{"attention"},
		{"show", "a:2026-09-15"},
		{"history", "a:2026-09-15"},
		{"mark-failed", "a:2026-09-15", "--reason", "x", "--yes", "--attempt", "7"},
		{"history", "b:2026-09-15"},
	} {
		s := listen(t, alone(t, db.URL, args...))
		for line := range strings.SplitSeq(s.out+s.err, "\n") {
			if text := strings.TrimLeft(line, " "); strings.HasPrefix(line, "jobrunctl: a:2026-09-15 is FAILED") || strings.HasPrefix(text, "by cfo") || strings.HasPrefix(text, "APPROVE_RERUN") {
				t.Errorf("%q: %q in\n%s", args, line, s)
			}
		}
	}
	for _, hidden := range []string{"\ufe0f", "\u1160", "\u3164", "\u2800", "\u200b", "\u00ad", "\U000e0061"} {
		execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', 'w')`, "pay"+hidden+":2026-09-15")
	}
	for _, args := range [][]string{{"list"}, {"list", "--json"}} {
		if s := listen(t, alone(t, db.URL, args...)); strings.Count(s.out, "pay:") != 0 || strings.Count(s.out, `pay\`) < 7 {
			t.Errorf("keys look alike\n%s", s)
		}
	}
}

// What the command advises can be typed.
func TestAdviceWorks(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, key := range []string{"-dash:2026-09-15", "evil\x1b[31m\n'x:2026-09-15", "a b", "it's:2026-09-15", "정산:2026-09-15", `back\slash:2026-09-15`} {
		execute(t, db, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id) VALUES ($1, 'FAILED', now(), 'w')`, key)
		s := expect(t, db.URL, ops.ExitFine, nil, "show", "--", key)
		for line := range strings.SplitSeq(s.out, "\n") {
			_, advice, found := strings.Cut(line, "  jobrunctl ")
			if !found {
				continue
			}
			bin, _ := jobrunctl()
			shell := exec.CommandContext(t.Context(), "bash", "-c", strings.Replace(bin+" "+advice, "--reason ...", "--reason x --yes --attempt 7", 1))
			shell.Env = append(os.Environ(), "DATABASE_URL="+db.URL, "JOBRUN_ZONE=Asia/Seoul")
			if s := listen(t, shell); strings.HasPrefix(advice, "history") && s.code != ops.ExitFine || !strings.HasPrefix(advice, "history") && !strings.Contains(s.err, "you saw attempt 7, it is now FAILED") {
				t.Errorf("%s: %s", advice, s)
			}
		}
	}
	s := expect(t, db.URL, ops.ExitFine, nil, "list", "--limit", "6")
	_, more, found := strings.Cut(s.out, "More: ")
	if !found {
		t.Fatal(s)
	}
	expect(t, db.URL, ops.ExitFine, nil, "list", strings.TrimSpace(more))
}

func TestServicesOwnCommandJudgesMissedDates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "daily-settlement", r.Today().AddDays(-3), jobrun.Retry{}, nil)
	run(t, r, "daily-settlement", r.Today().AddDays(-1), jobrun.Retry{}, nil)
	hole := settlement.Key(r.Today().AddDays(-2))
	s := listen(t, embedded(t, db.URL, "missed", "--json")) // as attention judges: from the first run on, and not today
	if want := `{"missed":[{"job":"daily-settlement","key":"` + hole + `","date":"` + r.Today().AddDays(-2).String() + `"}]}`; strings.Join(strings.Fields(s.out), "") != want {
		t.Errorf("%s\nwant %s", s, want)
	}
	for _, args := range [][]string{
		{"missed", "--from", r.Today().AddDays(-3).String(), "--to", r.Today().AddDays(-1).String()},
		{"missed", "--job", "daily-settlement", "--json"},
		{"attention"},
	} {
		s := listen(t, embedded(t, db.URL, args...))
		s.check(t, ops.ExitAttention, []string{hole}, args)
		if strings.Contains(s.out, "not judged") || args[0] == "missed" && len(args) == 5 && strings.Contains(s.out, settlement.Key(r.Today().AddDays(-1))) {
			t.Errorf("%q: %s", args, s)
		}
	}
	s = listen(t, embedded(t, db.URL, "missed", "--job", "payout"))
	s.check(t, ops.ExitUsage, []string{`"payout"`, "daily-settlement"}, nil)
	s = listen(t, embedded(t, db.URL, "show", hole))
	s.check(t, ops.ExitError, []string{" jobs: ", "no such run"}, nil)
	s = listen(t, embedded(t, db.URL, "help"))
	s.check(t, ops.ExitFine, []string{" jobs COMMAND"}, nil)
}

// Without jobs of its own, the command judges those that Schedule has registered; and
// says so when there are none.
func TestJobsOfSchedule(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "daily-settlement", r.Today().AddDays(-3), jobrun.Retry{}, nil)
	for _, c := range []struct {
		scheduled string
		code      int
		want      string
	}{{"yes", ops.ExitAttention, `"missed_judged": true`}, {"", ops.ExitFine, `"missed_judged": false`}} {
		cmd := embedded(t, db.URL, "attention", "--json")
		cmd.Env = append(cmd.Env, "WITHOUT_JOBS=1", "SCHEDULED="+c.scheduled)
		listen(t, cmd).check(t, c.code, []string{c.want}, cmd.Args)
	}
	cmd := embedded(t, db.URL, "missed")
	cmd.Env = append(cmd.Env, "WITHOUT_JOBS=1", "SCHEDULED=yes")
	listen(t, cmd).check(t, ops.ExitAttention, []string{settlement.Key(r.Today().AddDays(-2))}, cmd.Args)
}

func TestRace(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	left := func() (n int) {
		if err := db.Pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM batch_job_run) + (SELECT count(*) FROM batch_job_attempt)`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	expect(t, db.URL, ops.ExitFine, []string{"8 processes raced for one key: exactly one executed it, and 7 were told."}, "race")
	s := listen(t, embedded(t, db.URL, "race", "--processes", "4"))
	s.check(t, ops.ExitFine, []string{"4 processes raced", "3 were told"}, nil)
	if n := left(); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	// Flags reach the processes too, and not by a command line that shows a password.
	cmd := alone(t, "", "--database-url", db.URL, "--schema", "public", "race", "--processes", "2")
	s = listen(t, cmd)
	s.check(t, ops.ExitFine, []string{"2 processes raced"}, cmd.Args)

	name, url := db.Role(t, "")
	execute(t, db, `GRANT USAGE ON SCHEMA public TO `+name+`; GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO `+name)
	expect(t, url, ops.ExitFine, []string{"exactly one", "is left in the tables", "DELETE"}, "race", "--processes", "2")

	// Who may only look has left nothing there.
	reader, url := db.Role(t, "")
	execute(t, db, `GRANT USAGE ON SCHEMA public TO `+reader+`; GRANT SELECT ON ALL TABLES IN SCHEMA public TO `+reader)
	if s := expect(t, url, ops.ExitError, []string{"permission denied"}, "race", "--processes", "2"); strings.Contains(s.String(), "is left") {
		t.Error(s)
	}

	execute(t, db, `ALTER TABLE batch_job_run DROP CONSTRAINT batch_job_run_pkey`)
	expect(t, db.URL, ops.ExitError, []string{"a process got no decision", "42P10"}, "race")
}
