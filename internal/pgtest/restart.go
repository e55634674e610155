//go:build unix

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Kill ends the server as a power cut would: the postmaster and all its children get SIGKILL, before any of them can
// write anything more. It returns when they have ended; Restart starts the server again. It is for a server that Start
// started, and must not be called at the same time as Quit, Restart or Stop.
func (s *Server) Kill() error {
	if err := s.running(); err != nil {
		return err
	}
	if err := syscall.Kill(s.pid, syscall.SIGSTOP); err != nil { // so that it forks nothing more
		return fmt.Errorf("stop postmaster %d: %w", s.pid, err)
	}
	children, err := childrenOf(s.pid)
	for _, pid := range children {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
	}
	return errors.Join(err, s.end(syscall.SIGKILL))
}

// Quit ends the server by an immediate shutdown: it writes no checkpoint, and recovers when it starts again. See Kill.
func (s *Server) Quit() error {
	if err := s.running(); err != nil {
		return err
	}
	return s.end(syscall.SIGQUIT)
}

// KillBackend kills one server process, known by its id in pg_stat_activity, with SIGKILL. The postmaster then ends all
// others and recovers, without being restarted itself.
func (s *Server) KillBackend(pid int) error {
	if err := s.running(); err != nil {
		return err
	}
	children, err := childrenOf(s.pid)
	for _, child := range children {
		if child == pid {
			return syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return errors.Join(err, fmt.Errorf("process %d is none of the server's", pid))
}

// Restart starts a server that Kill or Quit ended, at the same port, with the same data and settings. It returns when
// the server has recovered and answers.
func (s *Server) Restart(ctx context.Context) error {
	if s.cmd == nil || s.pid != 0 {
		return errors.New("Restart is for a server that Start started, after Kill or Quit")
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	port, err := strconv.Atoi(s.url.Port())
	if err != nil {
		return err
	}
	for { // a client's connection may have been given the port meanwhile, and a child of the old server not be gone yet
		up, err := s.serveAt(ctx, port)
		if up {
			return nil
		}
		if err != nil && !strings.Contains(err.Error(), "shared memory block") {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *Server) running() error {
	if s.cmd == nil || s.pid == 0 {
		return errors.New("the server is not running, or Start did not start it")
	}
	return nil
}

// end sends the postmaster a signal and waits until the supervisor says that it has ended.
func (s *Server) end(signal syscall.Signal) error {
	if err := syscall.Kill(s.pid, signal); err != nil {
		return fmt.Errorf("signal postmaster %d: %w", s.pid, err)
	}
	limit := time.After(startTimeout)
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return errors.New("the supervisor ended with the server")
			}
			if strings.HasPrefix(line, "exit ") {
				s.pid = 0
				return nil
			}
		case <-limit:
			return fmt.Errorf("postmaster %d has not ended", s.pid)
		}
	}
}

// childrenOf lists the children of a process.
func childrenOf(parent int) (pids []int, err error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		var pid, ppid int
		if _, err := fmt.Sscan(line, &pid, &ppid); err == nil && ppid == parent {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
