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

// Kill ends the server by SIGKILL of all its processes, so that none can write anything more; what they have written is
// in the hands of the system, which goes on. It returns when they have ended; Restart starts the server again. It is for
// a server that Start started, and must not be called at the same time as Quit, Restart or Stop.
func (s *Server) Kill() error {
	if err := s.running(); err != nil {
		return err
	}
	if err := syscall.Kill(s.pid, syscall.SIGSTOP); err != nil { // so that it forks nothing more
		return fmt.Errorf("stop postmaster %d: %w", s.pid, err)
	}
	for end := time.Now().Add(startTimeout); ; time.Sleep(time.Millisecond) {
		all, err := processes()
		if err != nil || time.Now().After(end) {
			return errors.Join(err, fmt.Errorf("processes of postmaster %d go on", s.pid), s.end(syscall.SIGKILL))
		}
		stopped, left := false, 0
		for _, p := range all {
			switch {
			case p.pid == s.pid:
				stopped = strings.HasPrefix(p.state, "T") // a signal takes a moment: it may be forking
			case p.parent == s.pid && !strings.HasPrefix(p.state, "Z"):
				left++
				_ = syscall.Kill(p.pid, syscall.SIGKILL) // it may have ended by itself
			}
		}
		if stopped && left == 0 {
			return s.end(syscall.SIGKILL)
		}
	}
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
	all, err := processes()
	for _, p := range all {
		if p.pid == pid && p.parent == s.pid {
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

type process struct {
	pid, parent int
	state       string // as ps tells it: T stopped, Z ended and not waited for
}

// processes lists those of the system.
func processes() (all []process, err error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,stat=").Output()
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		var p process
		if _, err := fmt.Sscan(line, &p.pid, &p.parent, &p.state); err == nil {
			all = append(all, p)
		}
	}
	return all, nil
}
