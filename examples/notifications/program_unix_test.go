//go:build unix

package main

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestProgram(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "notifications")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	// command runs the program on the database of a URL, on a throw-away server without one.
	command := func(t *testing.T, url string, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), bin, args...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.Contains(kv, "DATABASE_URL=") })
		if url != "" {
			cmd.Env = append(cmd.Env, "DATABASE_URL="+url)
		}
		return cmd
	}

	for _, c := range []struct {
		name     string
		args     []string
		code     int
		stderr   string
		output   []string
		messages string // as the receiver named them, in the transactions of the ledger's entries
	}{
		{
			name: "with the key", code: exitOK,
			output: []string{
				"process-3  customer-3: answered message-3\n",
				"customer-2        1         1        0         1  yes\n",
				"customer-3        2         2        1         1  yes\n",
				"customer-4        2         1        0         1  yes\n",
				"All 6                       7        1         6  yes\n",
			},
			messages: "customer-1 message-1, customer-2 message-2, customer-3 message-3, customer-4 message-4, customer-5 message-5, customer-6 message-6",
		},
		{
			name: "without the key", args: []string{"-without-key"}, code: exitTwice,
			stderr: "notifications: customer-3 got two messages\n",
			output: []string{
				"process-3  customer-3: answered message-4\n",
				"customer-2        1         1        0         1  yes\n",
				"customer-3        2         2        0         2  NO\n",
				"customer-4        2         1        0         1  yes\n",
				"All 6                       7        0         7  NO\n",
				"customer-3 got two messages.",
			},
			messages: "customer-1 message-1, customer-2 message-2, customer-3 message-4, customer-4 message-5, customer-5 message-6, customer-6 message-7",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			out := ends(t, command(t, db.URL, append(c.args, "-keep")...), c.code, c.stderr)
			for _, want := range append(c.output,
				"process-1  customer-3: answered message-3\n   process-1  signal: killed\n",
				"process-2  ALREADY_RUNNING: sent nothing\n",
				"Stale         customer-notices:2026-09-15 RUNNING, attempt 1 of process-1-",
				"2 customers done, silent for ",
				"alive: false, its database session: gone\n",
				"MarkFailed    FAILED, marked failed by operator: the process was killed\n",
				"ApproveRerun  approved, the next trigger executes it\n",
				"process-3  RAN: attempt 2 SUCCEEDED, 4 customers\n",
			) {
				if !strings.Contains(out, want) {
					t.Errorf("the output lacks %q", want)
				}
			}
			dropped := regexp.MustCompile(`DROP SCHEMA (\w+) CASCADE;`).FindStringSubmatch(out)
			if dropped == nil {
				t.Fatalf("no schema to look into:\n%s", out)
			}
			for _, read := range []struct{ sql, want string }{
				{
					`SELECT string_agg(item || ' ' || attempt, ', ' ORDER BY item) FROM batch_job_item WHERE job_key = 'customer-notices:2026-09-15'`,
					"customer-1 1, customer-2 1, customer-3 2, customer-4 2, customer-5 2, customer-6 2",
				},
				{`SELECT count(*)::text FROM batch_job_item_failure`, "0"},
				{`SELECT string_agg(customer || ' ' || message, ', ' ORDER BY customer) FROM notice`, c.messages},
				{`SELECT string_agg(status || ' ' || attempt, ', ') FROM batch_job_run`, "SUCCEEDED 2"},
				{
					`SELECT string_agg(outcome || ' by ' || ended_by, ', ' ORDER BY attempt) FROM batch_job_attempt`,
					"FAILED by PERSON, SUCCEEDED by WORKER",
				},
				{
					`SELECT string_agg(action || ' by ' || acted_by, ', ' ORDER BY id) FROM batch_job_action`,
					"MARK_FAILED by operator, APPROVE_RERUN by operator",
				},
			} {
				ctx := t.Context()
				var got string
				err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "SET LOCAL search_path = "+dropped[1]); err != nil {
						return err
					}
					return tx.QueryRow(ctx, read.sql).Scan(&got)
				})
				if err != nil || got != read.want {
					t.Errorf("%s: %q, %v; want %q", read.sql, got, err, read.want)
				}
			}
			if t.Failed() {
				t.Log(out)
			}
		})
	}

	t.Run("throw-away server", func(t *testing.T) {
		if os.Getenv("JOBRUN_TEST_DATABASE_URL") != "" {
			t.Skip("the tests were given a server, so there may be no programs to start one")
		}
		t.Parallel()
		ends(t, command(t, ""), exitOK, "")
	})

	t.Run("interrupted", func(t *testing.T) {
		t.Parallel()
		db := pgtest.Empty(t)
		cmd := command(t, db.URL)
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(stdout)
		for lines.Scan() && !strings.Contains(lines.Text(), "customer-3: answered") {
		}
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, stdout)
		_ = cmd.Wait()
		// On a slow day the signal may come after the end.
		if code := cmd.ProcessState.ExitCode(); code != exitFailed && code != exitOK {
			t.Errorf("exit code %d", code)
		}
		var left int
		err = db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'jobrun%'`).Scan(&left)
		if err != nil || left > 0 {
			t.Errorf("schemas left behind: %d, %v", left, err)
		}
	})
}

// ends runs the program to its end and returns its output.
func ends(t *testing.T, cmd *exec.Cmd, code int, stderr string) string {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState.ExitCode() != code || errs.String() != stderr {
		t.Errorf("%v, on standard error %q; want exit code %d and %q\n%s", err, &errs, code, stderr, &out)
	}
	return out.String()
}

func TestBadFlagsAreRefusedBeforeAnythingStarts(t *testing.T) {
	t.Setenv("JOBRUN_TEST_DATABASE_URL", "")
	for _, c := range []struct{ args, url, want string }{
		{"-without-kee", "postgres://nowhere.invalid/x", "not defined: -without-kee"}, // reaching for it would be exitFailed
		{"-without-key=perhaps", "postgres://nowhere.invalid/x", `invalid boolean value "perhaps" for -without-key`},
		{"-without-key 3", "postgres://nowhere.invalid/x", `unexpected argument "3"`},
		{"-keep", "", "-keep needs DATABASE_URL"},
	} {
		t.Setenv("DATABASE_URL", c.url)
		var out, errs bytes.Buffer
		code := run(t.Context(), strings.Fields(c.args), &out, &errs)
		if code != exitUsage || !strings.Contains(errs.String(), c.want) || out.Len() > 0 {
			t.Errorf("%s: exit code %d, said %q %q; want %d and %q", c.args, code, &out, &errs, exitUsage, c.want)
		}
	}
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"-help"}, &out, &errs); code != exitOK || !strings.Contains(errs.String(), "Exit codes") {
		t.Errorf("-help: exit code %d, said %s", code, &errs)
	}
	t.Setenv("DATABASE_URL", "host=127.0.0.1 password=secret")
	if code := run(t.Context(), nil, &out, &errs); code != exitFailed || strings.Contains(errs.String(), "secret") {
		t.Errorf("no URL: exit code %d, said %s", code, &errs)
	}
}
