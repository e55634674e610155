//go:build unix

package main

import (
	"bufio"
	"bytes"
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
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &stdout, &stderr)
	}
	out := stdout.String()
	already := strings.Count(out, "ALREADY_RUNNING: did nothing") + strings.Count(out, "ALREADY_SUCCEEDED: did nothing")
	if n := strings.Count(out, "RAN: won the claim"); n != 1 || already != instances {
		t.Errorf("%d processes say that they settled, %d that they did nothing", n, already)
	}
	for _, want := range []string{
		"daily-settlement:" + date + "  SUCCEEDED",
		"latecomer    ALREADY_SUCCEEDED: did nothing",
		"processes that settled: 1 of " + strconv.Itoa(instances+1) + "\n",
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
