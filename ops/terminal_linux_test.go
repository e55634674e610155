package ops_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

// onTerminal runs a command on a terminal of so many columns, types the answer at
// the question, and returns all that the terminal showed.
func onTerminal(t *testing.T, cmd *exec.Cmd, columns int, answer string) said {
	t.Helper()
	return onTerminalAsked(t, cmd, columns, func() string { return answer })
}

func onTerminalAsked(t *testing.T, cmd *exec.Cmd, columns int, asked func() string) said {
	t.Helper()
	control := func(f *os.File, request uintptr, value unsafe.Pointer) {
		t.Helper()
		if _, _, err := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(value)); err != 0 {
			t.Fatal(err)
		}
	}
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var number, lock int32
	control(master, syscall.TIOCGPTN, unsafe.Pointer(&number))
	control(master, syscall.TIOCSPTLCK, unsafe.Pointer(&lock))
	size := [4]uint16{24, uint16(columns)}
	control(master, syscall.TIOCSWINSZ, unsafe.Pointer(&size))
	screen, err := os.OpenFile("/dev/pts/"+strconv.Itoa(int(number)), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Start()
	screen.Close()
	if err != nil {
		t.Fatal(err)
	}
	var seen strings.Builder
	for buffer, typed := make([]byte, 4096), false; ; {
		n, err := master.Read(buffer)
		seen.Write(buffer[:n])
		if !typed && strings.Contains(seen.String(), `Type "yes"`) {
			typed = true
			if _, err := io.WriteString(master, asked()); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil { // EIO: the other end is closed
			break
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said{strings.ReplaceAll(seen.String(), "\r\n", "\n"), "", cmd.ProcessState.ExitCode()}
}

func TestTerminalShowsTheEvidenceAndAsks(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	dead(t, db, "payout", day)
	const key = "payout:2026-09-15"
	args := []string{"mark-failed", key, "--reason", "pod evicted"}
	evidence := []string{key, "RUNNING", "26h0m", "alive", "session", "pod evicted", "nothing follows by itself"}
	for _, answer := range []string{"no\n", "\n", "y\n", "\x04"} { // the last one: end of input
		s := onTerminal(t, alone(t, db.URL, args...), 80, answer)
		s.check(t, ops.ExitError, append(evidence, "not confirmed, nothing was changed"), args)
	}
	if rec, err := r.Get(t.Context(), key); err != nil || rec.Status != jobrun.Running {
		t.Fatalf("%+v, %v", rec, err)
	}
	s := onTerminal(t, alone(t, db.URL, args...), 80, "yes\n")
	s.check(t, ops.ExitFine, append(evidence, key+" is FAILED."), args)
	if rec, err := r.Get(t.Context(), key); err != nil || rec.Status != jobrun.Failed {
		t.Fatalf("%+v, %v", rec, err)
	}
	// What was seen before needs no question, here neither.
	s = onTerminal(t, alone(t, db.URL, "rerun", key, "--reason", "x", "--yes", "--attempt", "1"), 80, "")
	s.check(t, ops.ExitFine, []string{"approved"}, nil)
	s = onTerminal(t, alone(t, db.URL, "rerun", key, "--reason", "x", "--yes"), 80, "")
	s.check(t, ops.ExitUsage, []string{"--yes needs --attempt"}, nil)
	s = onTerminal(t, alone(t, db.URL, "skip", "payout:2026-09-16", "--reason", "no trading"), 80, "yes\n")
	s.check(t, ops.ExitFine, []string{"there is none yet", "is SKIPPED"}, nil)
}

// What a person has confirmed is what was shown: a run that has moved on meanwhile is
// a conflict.
func TestConfirmedIsWhatWasShown(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing")
	for _, verb := range []string{"skip", "rerun"} {
		run(t, r, verb, day, jobrun.Retry{}, failure)
		key := verb + ":2026-09-15"
		cmd := alone(t, db.URL, verb, key, "--reason", "no trading")
		s := onTerminalAsked(t, cmd, 80, func() string { // somebody else re-runs it while the question stands
			rec, err := r.Get(t.Context(), key)
			if err == nil {
				_, err = r.ApproveRerun(t.Context(), rec, jobrun.Action{By: "lee", Reason: "rates loaded"})
			}
			if err != nil {
				t.Error(err)
			}
			run(t, r, verb, day, jobrun.Retry{}, failure)
			return "yes\n"
		})
		s.check(t, ops.ExitConflict, []string{"attempt 2"}, cmd.Args)
	}
	cmd := alone(t, db.URL, "skip", "new:2026-09-15", "--reason", "no trading")
	s := onTerminalAsked(t, cmd, 80, func() string {
		run(t, r, "new", day, jobrun.Retry{}, failure)
		return "yes\n"
	})
	s.check(t, ops.ExitConflict, []string{"there is none yet", "it is now FAILED"}, cmd.Args)
}

// Ctrl-C at the question ends the command, and changes nothing.
func TestInterruptAtTheQuestion(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	for _, args := range [][]string{{"skip", "settlement:2026-09-15", "--reason", "x"}, {"prune", "--before", "2026-01-01"}} {
		s := onTerminal(t, alone(t, db.URL, args...), 80, "\x03")
		s.check(t, ops.ExitError, []string{"not confirmed, nothing was changed"}, args)
	}
	if rec, err := r.Get(t.Context(), "settlement:2026-09-15"); err != nil || rec.Status != jobrun.Failed {
		t.Errorf("%+v, %v", rec, err)
	}
}

// No text reaches the first column, where the command's own names stand.
func TestLongWordsStayInTheirColumn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id, finished_at, error_message) VALUES ('a:2026-09-15', 'FAILED', 'w', now(), $1)`,
		strings.Repeat(".", 65)+"status"+strings.Repeat(".", 60)+"SUCCEEDED")
	for _, columns := range []int{40, 80, 200} {
		s := onTerminal(t, alone(t, db.URL, "show", "a:2026-09-15"), columns, "")
		for line := range strings.SplitSeq(s.out, "\n") {
			if len(line) > columns && !strings.Contains(line, "jobrunctl") {
				t.Errorf("%d columns: %q", columns, line)
			}
		}
	}
}

// What lives is refused before anybody is asked.
func TestTheLivingAreNotAskedAbout(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = r.RunDate(context.WithoutCancel(t.Context()), jobrun.Job{Name: "payout", Func: func(context.Context, *jobrun.Run) error {
			close(started)
			<-end
			return nil
		}}, day)
	}()
	<-started
	defer func() { close(end); <-ended }()
	s := onTerminal(t, alone(t, db.URL, "mark-failed", "payout:2026-09-15", "--reason", "x"), 80, "yes\n")
	s.check(t, ops.ExitConflict, []string{"alive", "--force"}, nil)
	if strings.Contains(s.out, `Type "yes"`) {
		t.Error(s)
	}
	s = onTerminal(t, alone(t, db.URL, "show", "payout:2026-09-15"), 80, "")
	s.check(t, ops.ExitFine, []string{"alive", "yes: its last heartbeat"}, nil)
	s = onTerminal(t, alone(t, db.URL, "mark-failed", "payout:2026-09-15", "--reason", "stuck", "--force"), 80, "yes\n")
	s.check(t, ops.ExitFine, []string{"FORCE", "is FAILED"}, nil)
}
