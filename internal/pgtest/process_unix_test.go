//go:build unix

package pgtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

var (
	_ = RegisterChild("server", serverChild)
	_ = RegisterChild("exit", func() int { return 42 })
)

// serverChild starts a server, says where, and ends in the way it is told on standard input.
func serverChild() int {
	acc, err := serverAccount()
	if err != nil {
		return fail(err)
	}
	bin, err := findPrograms(acc)
	if err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s, err := launch(ctx, bin, acc, Options{Keep: os.Getenv("CHILD_KEEP") != ""})
	if err != nil {
		return fail(err)
	}
	fmt.Println(s.PID(), filepath.Dir(s.DataDir()), s.URL("postgres"))
	end, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	switch strings.TrimSpace(end) {
	case "stop":
		s.Stop()
	case "panic":
		panic("as told")
	case "exit":
		os.Exit(3)
	}
	return 0
}

func fail(err error) int {
	fmt.Println("error:", err)
	return 1
}

type child struct {
	cmd   *exec.Cmd
	stdin io.Writer
	pid   int // of the postmaster
	dir   string
	url   string
}

// startServerChild starts the process and waits until its server answers.
func startServerChild(t *testing.T, env ...string) *child {
	t.Helper()
	programs(t)
	c := &child{cmd: Reexec(t, "server", env...)}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // like the job of a shell that Ctrl-C interrupts
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.stdin = stdin
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	if _, err := fmt.Sscan(line, &c.pid, &c.dir, &c.url); err != nil {
		t.Fatalf("child said %q: %v", line, err)
	}
	return c
}

func (c *child) waitGone(t *testing.T) {
	t.Helper()
	waitFor(t, "process "+strconv.Itoa(c.pid)+" is gone", func() bool {
		return errors.Is(syscall.Kill(c.pid, 0), syscall.ESRCH)
	})
	waitFor(t, c.dir+" is gone", func() bool {
		_, err := os.Stat(c.dir)
		return os.IsNotExist(err)
	})
	waitFor(t, "no process is about "+c.dir, func() bool {
		out, err := exec.Command("ps", "-A", "-o", "args").Output()
		return err == nil && !strings.Contains(string(out), c.dir)
	})
}

func TestKilledProcessLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*child) error
	}{
		{"kill -9", func(c *child) error { return c.cmd.Process.Kill() }},
		{"kill -9 with a client", func(c *child) error {
			conn, err := pgx.Connect(context.Background(), c.url)
			if err != nil {
				return err
			}
			go func() { _, _ = conn.Exec(context.Background(), "SELECT pg_sleep(600)") }() // ends with the server
			return c.cmd.Process.Kill()
		}},
		{"Ctrl-C", func(c *child) error { return syscall.Kill(-c.cmd.Process.Pid, syscall.SIGINT) }},
		{"panic", func(c *child) error { return say(c, "panic") }},
		{"os.Exit", func(c *child) error { return say(c, "exit") }},
		{"return", func(c *child) error { return say(c, "return") }},
		{"Stop", func(c *child) error { return say(c, "stop") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			child := startServerChild(t)
			if err := c.end(child); err != nil {
				t.Fatal(err)
			}
			_ = child.cmd.Wait() // most of the ways are not a success
			child.waitGone(t)
		})
	}
}

// The children of the test process must not hold the pipe that tells of its end.
func TestGrandchildDoesNotKeepTheServer(t *testing.T) {
	s := ownServer(t, Options{})
	sleeper := exec.CommandContext(t.Context(), "sleep", "60")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	s.Stop() // waits for the end of the pipe to have arrived
	if _, err := os.Stat(filepath.Dir(s.LogFile())); !os.IsNotExist(err) {
		t.Error("the directory is still there")
	}
	_ = sleeper.Process.Kill()
	_ = sleeper.Wait()
}

func TestTwoProcessesTwoServers(t *testing.T) {
	first := startServerChild(t)
	own := ownServer(t, Options{})
	second := startServerChild(t)
	seen := map[string]bool{}
	for _, url := range []string{first.url, own.URL("postgres"), second.url} {
		seen[scan[string](t, url, "SHOW data_directory")] = true
	}
	if len(seen) != 3 {
		t.Errorf("three servers serve %v", seen)
	}
	_ = say(first, "return")
	first.waitGone(t)
	if scan[int](t, second.url, "SELECT 1") != 1 {
		t.Error("the end of one process took the other's server")
	}
}

func say(c *child, word string) error {
	_, err := fmt.Fprintln(c.stdin, word)
	return err
}

func TestKeptServerOutlivesTheProcess(t *testing.T) {
	for _, end := range []string{"stop", "exit"} {
		t.Run(end, func(t *testing.T) {
			c := startServerChild(t, "CHILD_KEEP=yes")
			t.Cleanup(func() { _ = syscall.Kill(c.pid, syscall.SIGQUIT) })
			if err := say(c, end); err != nil {
				t.Fatal(err)
			}
			_ = c.cmd.Wait()
			time.Sleep(200 * time.Millisecond) // for a supervisor that would stop it
			if scan[int](t, c.url, "SELECT 1") != 1 {
				t.Error("it does not answer")
			}
			if err := syscall.Kill(c.pid, syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			c.waitGone(t)
		})
	}
}

func TestReexecRunsTheChild(t *testing.T) {
	err := Reexec(t, "exit").Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 42 {
		t.Errorf("got %v, want exit code 42", err)
	}
}

// rerun runs some tests of this package in a new process of the test binary.
func rerun(t *testing.T, tests string, prepare func(*exec.Cmd)) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.v", "-test.run=^("+tests+")$")
	cmd.Env = os.Environ()
	prepare(cmd)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("all tests of this run are such")
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Skip(err)
	}
	uid, _ := strconv.ParseInt(nobody.Uid, 10, 64)
	gid, _ := strconv.ParseInt(nobody.Gid, 10, 64)

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	dir := programsDir(t, nil)
	theirs := filepath.Join(dir, "pgtest.test")
	if err := os.WriteFile(theirs, binary, 0o755); err != nil {
		t.Fatal(err)
	}
	rerun(t, "TestDatabasesAreIsolated|TestRole|TestStopRemovesAll|TestPrivateTempDirectory", func(cmd *exec.Cmd) {
		cmd.Path, cmd.Dir = theirs, "/"
		cmd.Env = append(cmd.Env, "TMPDIR=/tmp", "HOME=/nonexistent")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	})
}

// On a server that was running already nothing is left behind, and no superuser is needed.
func TestExistingServerIsLeftAsItWas(t *testing.T) {
	s := ownServer(t, Options{})
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), "CREATE ROLE ci LOGIN CREATEDB CREATEROLE"); err != nil {
		t.Fatal(err)
	}
	u := s.url
	u.User = nil
	q := u.Query()
	q.Set("user", "ci")
	u.RawQuery = q.Encode()
	for _, variable := range []string{"JOBRUN_TEST_DATABASE_URL", "DATABASE_URL"} {
		rerun(t, "TestDatabasesAreIsolated|TestEmpty.*|TestRole.*|TestDatabaseIsDropped", func(cmd *exec.Cmd) {
			cmd.Env = append(cmd.Env, "JOBRUN_TEST_PG_BINDIR=", "JOBRUN_TEST_DATABASE_URL=", "DATABASE_URL=", variable+"="+u.String())
		})
		var left int
		err = conn.QueryRow(t.Context(), `
			SELECT (SELECT count(*) FROM pg_database WHERE datname LIKE 'jobrun%')
			     + (SELECT count(*) FROM pg_roles WHERE rolname LIKE 'jobrun%')`).Scan(&left)
		if err != nil || left != 0 {
			t.Errorf("%s: %d databases and roles are left, %v", variable, left, err)
		}
	}
}
