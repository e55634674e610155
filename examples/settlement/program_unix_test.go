//go:build unix

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestProgram(t *testing.T) {
	dir, err := os.MkdirTemp("", "settlement")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // an ordinary user is to run what is in it
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "settlement")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	// command runs the program with these variables and none of those that choose a database.
	command := func(args []string, env ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), bin, args...)
		cmd.Dir = "/"
		cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.Contains(kv, "DATABASE_URL=") })
		cmd.Env = append(cmd.Env, env...)
		return cmd
	}

	t.Run("given database, kept", func(t *testing.T) {
		db := pgtest.Empty(t)
		out := succeed(t, command([]string{"-database-url", db.URL, "-keep", "-date", "2026-09-14", "-instances", "4"}), "2026-09-14", 4)
		name := schemas(t, db.Pool)
		if len(name) != 1 || !strings.Contains(out, "DROP SCHEMA "+name[0]+" CASCADE") {
			t.Fatalf("schemas left: %q; the program said\n%s", name, out)
		}
		pool, err := connect(t.Context(), db.URL, name[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		for sql, want := range map[string]int64{
			`SELECT count(*) FROM batch_job_attempt`: 1,
			`SELECT count(*) FROM batch_job_run WHERE job_key = 'daily-settlement:2026-09-14' AND status = 'SUCCEEDED' AND attempt = 1`: 1,
			`SELECT items_processed FROM batch_job_attempt`:                                              5130,
			`SELECT count(*) FROM settlement_item`:                                                       5130,
			`SELECT count(*) FROM settlement_item WHERE business_date <> '2026-09-14'`:                   0,
			`SELECT count(*) FROM orders WHERE (paid_at AT TIME ZONE 'Asia/Seoul')::date = '2026-09-14'`: 5130,
		} {
			rows, _ := pool.Query(t.Context(), sql)
			if got, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64]); err != nil || got != want {
				t.Errorf("%s: %d, %v; want %d", sql, got, err, want)
			}
		}
		if d, err := compare(t.Context(), pool, jobrun.MustParseDate("2026-09-14")); err != nil || len(d) > 0 {
			t.Errorf("totals differ: %q, %v", d, err)
		}
	})

	for _, c := range []struct {
		name, flags      string
		settled, started int
		says             []string // beside what every run says
		attempts         string   // outcome, done and failed items of each, and what people did after it
	}{
		{
			"an order fails", "-fail-item 10012345", 2, 4,
			[]string{
				"settled 5,379 of 5,380 orders in ", "; failed: 1\n", "The run is FAILED.", "is closed (simulated)",
				"settled 1 of 5,380 orders in ", "; settled before: 5,379\n", "re-runs that were approved: 1\n",
			},
			"FAILED 5379 1 APPROVE_RERUN, SUCCEEDED 1 0",
		},
		{
			"the winner is killed", "-kill-after 700", 2, 4,
			[]string{
				"1,000 orders committed, 500 more written and not committed: kill -9 ", "signal: killed\n", "false  gone",
				"settled 4,380 of 5,380 orders in ", "; settled before: 1,000\n", "re-runs that were approved: 1\n",
			},
			"FAILED 1000 0 MARK_FAILED APPROVE_RERUN, SUCCEEDED 4380 0",
		},
		{
			"an order fails, then the winner is killed", "-kill-after 1500 -fail-item 10012345 -instances 1", 3, 4,
			[]string{"signal: killed\n", "settled 1 of 5,380 orders in ", "re-runs that were approved: 2\n"},
			"FAILED 1999 1 MARK_FAILED APPROVE_RERUN, FAILED 3380 1 APPROVE_RERUN, SUCCEEDED 1 0",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			db := pgtest.Empty(t)
			out := finish(t, command(append(strings.Fields(c.flags), "-keep"), "DATABASE_URL="+db.URL), c.settled, c.started)
			for _, want := range c.says {
				if !strings.Contains(out, want) {
					t.Errorf("the output lacks %q", want)
				}
			}
			pool, err := connect(t.Context(), db.URL, schemas(t, db.Pool)[0])
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			rows, _ := pool.Query(t.Context(), `
				SELECT string_agg(concat_ws(' ', outcome, done, items_failed, acted), ', ' ORDER BY attempt)
				FROM (SELECT a.*,
				        (SELECT count(*) FROM batch_job_item AS i WHERE i.attempt = a.attempt) AS done,
				        (SELECT string_agg(action, ' ' ORDER BY id) FROM batch_job_action AS p
				         WHERE p.attempt = a.attempt AND acted_by = 'operator') AS acted
				      FROM batch_job_attempt AS a) AS a`)
			if got, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string]); err != nil || got != c.attempts {
				t.Errorf("attempts: %q, %v; want %q", got, err, c.attempts)
			}
			correct(t, pool)
			if t.Failed() {
				t.Log(out)
			}
		})
	}

	t.Run("DATABASE_URL", func(t *testing.T) {
		db := pgtest.Empty(t)
		succeed(t, command([]string{"-date", "2026-09-16"}, "DATABASE_URL="+db.URL), "2026-09-16", 2)
		if left := schemas(t, db.Pool); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})

	t.Run("database out of reach", func(t *testing.T) {
		cmd := command(nil, "DATABASE_URL=postgres://someone:secret@127.0.0.1:1/x")
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != exitFailed || strings.Contains(string(out), "secret") {
			t.Errorf("%v, said %s", err, out)
		}
	})

	t.Run("interrupted", func(t *testing.T) {
		db := pgtest.Empty(t)
		cmd := command([]string{"-instances", "3"}, "DATABASE_URL="+db.URL)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(stdout)
		for lines.Scan() && !strings.Contains(lines.Text(), "instance-1") {
		}
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, stdout)
		_ = cmd.Wait()
		// On a slow day the signal may come after the end.
		if code := cmd.ProcessState.ExitCode(); code != exitInterrupted && code != exitOK {
			t.Errorf("exit code %d, said %s", code, &errs)
		}
		if left := schemas(t, db.Pool); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})

	t.Run("throw-away server, as an ordinary user", func(t *testing.T) {
		if os.Getenv("JOBRUN_TEST_DATABASE_URL") != "" {
			t.Skip("the tests were given a server, so there may be no programs to start one")
		}
		cmd := command(nil)
		if os.Geteuid() == 0 {
			nobody, err := user.Lookup("nobody")
			if err != nil {
				t.Skip(err)
			}
			uid, _ := strconv.Atoi(nobody.Uid)
			gid, _ := strconv.Atoi(nobody.Gid)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
		}
		out := succeed(t, cmd, "2026-09-15", 2)
		at, err := url.Parse(regexp.MustCompile(`postgres://\S+`).FindString(out))
		if err != nil || at.Host == "" {
			t.Fatalf("no URL of the server in\n%s", out)
		}
		if conn, err := net.Dial("tcp", at.Host); err == nil {
			_ = conn.Close()
			t.Errorf("the server at %s is still up", at.Host)
		}
	})
}

// succeed runs the program to a good end, in which one of its processes settled
// the date, and returns its output.
func succeed(t *testing.T, cmd *exec.Cmd, date string, instances int) string {
	t.Helper()
	out := finish(t, cmd, 1, instances+1)
	if n := strings.Count(out, "RAN: won the claim"); n != 1 || !strings.Contains(out, "daily-settlement:"+date+"  SUCCEEDED") {
		t.Errorf("%d processes say that they settled\n%s", n, out)
	}
	return out
}

// finish runs the program to a good end, in which so many of the processes that it
// started settled orders, and returns its output.
func finish(t *testing.T, cmd *exec.Cmd, settled, started int) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &stdout, &stderr)
	}
	out := stdout.String()
	if n := strings.Count(out, ": did nothing, "); n != started-settled {
		t.Errorf("%d of %d processes say that they did nothing, want all but %d", n, started, settled)
	}
	for _, want := range []string{
		"latecomer    ALREADY_SUCCEEDED: did nothing",
		fmt.Sprintf("processes that settled: %d of %d\n", settled, started),
		"orders settled twice: 0\n",
		"totals equal the independent SQL sum: yes\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if stderr.Len() > 0 {
		t.Errorf("on standard error: %s", &stderr)
	}
	if t.Failed() {
		t.Log(out)
	}
	return out
}

// schemas lists what the program has left in a database.
func schemas(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT nspname::text FROM pg_namespace WHERE nspname LIKE 'jobrun\_settlement\_%'`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return names
}
