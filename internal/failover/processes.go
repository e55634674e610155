//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// inside lists the processes whose working directory is dir or below it. Whatever the
// test starts stands in the test's own directory, and so does all that those start:
// PostgreSQL, whose processes leave every group and session, works in its data directory.
func inside(dir string) (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		at, err := os.Readlink(link)
		if err != nil { // it has ended, or is somebody else's
			continue
		}
		at = strings.TrimSuffix(at, " (deleted)")
		if at != dir && !strings.HasPrefix(at, dir+"/") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link))); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killInside kills those processes, and those that they have started meanwhile, until
// there are none.
func killInside(dir string) error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		pids := inside(dir)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return fmt.Errorf("processes in %s do not end", dir)
}

// signalInside sends those processes a signal.
func signalInside(dir string, signal syscall.Signal) (err error) {
	for range 2 { // those that were started meanwhile
		for _, pid := range inside(dir) {
			if failed := syscall.Kill(pid, signal); failed != nil && !errors.Is(failed, syscall.ESRCH) {
				err = errors.Join(err, failed)
			}
		}
	}
	return err
}

// guardVariable holds the directory of a process that is the guard; a "-" before it
// says to leave the directory.
const guardVariable = "JOBRUN_FAILOVER_GUARD"

// guard waits for the end of its input, which only the command's process holds: when
// that ends, however it does, the guard kills what is left and removes the directory.
func guard(dir string) {
	_, _ = io.Copy(io.Discard, os.Stdin)
	dir, keep := strings.CutPrefix(dir, "-")
	if err := killInside(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if !keep {
		_ = os.RemoveAll(dir)
	}
}

// startGuard starts the guard of a directory; end makes it do its work and waits.
func startGuard(dir string, keep bool) (end func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if keep {
		dir = "-" + dir
	}
	cmd := exec.Command(self)
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.Env = append(os.Environ(), guardVariable+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() { in.Close(); _ = cmd.Wait() }, nil
}
