package pgtest

import (
	"bufio"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

//go:embed supervisor.sh
var supervisor string

// running keeps the servers of this process reachable: a collected Server would close its pipe, which stops it.
var running sync.Map

// launch starts the supervisor, and through it a server at a free port.
func launch(ctx context.Context, bin string, acc account, opts Options) (*Server, error) {
	name := uniqueName("server")
	read, write, err := os.Pipe() // both close on exec: no other child of this process holds the write end
	if err != nil {
		return nil, err
	}
	out, outWrite, err := os.Pipe()
	if err != nil {
		read.Close()
		write.Close()
		return nil, err
	}
	args := []string{"-c", supervisor, "pgtest", filepath.Clean(os.TempDir()), bin, strconv.FormatBool(opts.Keep)}
	cmd := exec.Command("/bin/sh", append(args, serverArgs(name, opts)...)...)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", serverEnv(), acc.attr() // "/": the account may not reach our directory
	cmd.ExtraFiles = []*os.File{read}                                // descriptor 3
	cmd.Stdout, cmd.Stderr = outWrite, outWrite                      // not ours: "go test" waits for the end of those
	err = cmd.Start()
	read.Close()
	outWrite.Close()
	if err != nil {
		write.Close()
		out.Close()
		return nil, fmt.Errorf("as %s: %w", acc.name, err)
	}

	s := &Server{name: name, opts: opts, cmd: cmd, pipe: write, lines: make(chan string)}
	running.Store(s, nil)
	go func() {
		defer close(s.lines)
		defer out.Close()
		for scan := bufio.NewScanner(out); scan.Scan(); {
			s.lines <- scan.Text()
		}
	}()
	if err := s.serve(ctx); err != nil {
		s.stop.Do(s.shutdown)
		return nil, err
	}
	return s, nil
}

// serverArgs are the arguments of postgres, except for the directory and the port.
func serverArgs(name string, opts Options) []string {
	settings := map[string]string{
		"cluster_name":            name,
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "",
		"max_connections":         "300",
		"timezone":                "UTC",
		"log_timezone":            "UTC",
	}
	if !opts.Durable {
		for _, setting := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
			settings[setting] = "off"
		}
	}
	maps.Copy(settings, opts.Settings)
	var args []string
	for _, setting := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", setting+"="+settings[setting])
	}
	return args
}

// serverEnv is the environment of this process without what would change a server or its messages. A TZ that is set
// spares initdb the search for the zone of the system.
func serverEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	})
	return append(env, "LC_ALL=C", "TZ=UTC")
}

// freePort finds a port that is free now; somebody may still take it before the server does. It is below those that
// systems give to outgoing connections (from 32768 on Linux): a server that is restarted must find it free again, though
// programs connect in vain meanwhile, each from a port of its own.
var freePort = func() (int, error) {
	var err error
	for range 100 {
		var l net.Listener
		if l, err = net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", 15000+rand.IntN(17000))); err == nil {
			l.Close()
			return l.Addr().(*net.TCPAddr).Port, nil
		}
	}
	return 0, err
}

// serve waits for the supervisor to have made the data directory, then tries ports until one serves.
func (s *Server) serve(ctx context.Context) error {
	var said []string // what we do not understand is an error message
	for ready := false; !ready; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("initdb: %w", ctx.Err())
		case line, ok := <-s.lines:
			word, rest, _ := strings.Cut(line, " ")
			switch {
			case !ok:
				return errors.New(strings.Join(said, "; "))
			case word == "dir":
				s.dir = rest
			case word == "ready":
				ready = true
			case word == "failed":
				return fmt.Errorf("initdb:\n%s", s.logTail())
			default:
				said = append(said, line)
			}
		}
	}
	for range 20 {
		port, err := freePort()
		if err != nil {
			return err
		}
		up, err := s.serveAt(ctx, port)
		if up || err != nil {
			return err
		}
	}
	return fmt.Errorf("20 ports tried, all taken:\n%s", s.logTail())
}

// serveAt starts the server at the port and waits until it answers. It returns false if somebody else has the port.
func (s *Server) serveAt(ctx context.Context, port int) (bool, error) {
	s.url = url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}
	if _, err := fmt.Fprintln(s.pipe, port); err != nil {
		return false, err
	}
	trying, cancel := context.WithCancel(ctx)
	up := make(chan struct{}, 1)
	var wait sync.WaitGroup
	wait.Go(func() {
		if s.answers(trying) {
			up <- struct{}{}
		}
	})
	defer wait.Wait()
	defer cancel() // whoever has our port may accept connections and say nothing
	for answered := false; !answered || s.pid == 0; {
		select {
		case <-up:
			answered = true
		case <-ctx.Done():
			return false, fmt.Errorf("%w:\n%s", ctx.Err(), s.logTail())
		case line, ok := <-s.lines:
			word, rest, _ := strings.Cut(line, " ")
			switch {
			case word == "pid":
				s.pid, _ = strconv.Atoi(rest)
			case word == "exit" && bindFailed(s.logTail()):
				s.pid = 0
				return false, nil
			case word == "exit" || !ok:
				s.pid = 0
				return false, fmt.Errorf("it ended at once, %s:\n%s", cmp.Or(line, "with its supervisor"), s.logTail())
			}
		}
	}
	return true, nil
}

// answers connects again and again until our server, not another one that won the race for the port, accepts.
// It returns false when the context is done.
func (s *Server) answers(ctx context.Context) bool {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		if cluster, err := clusterName(ctx, s.url.String()); err == nil && cluster == s.name {
			return true
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return false
}

func clusterName(ctx context.Context, url string) (name string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	err = conn.QueryRow(ctx, "SHOW cluster_name").Scan(&name)
	return name, err
}

func bindFailed(log string) bool {
	return strings.Contains(log, "could not bind") || strings.Contains(log, "Address already in use") ||
		strings.Contains(log, "could not create any TCP/IP sockets")
}

// logTail returns the last lines of the server's log, or why there are none.
func (s *Server) logTail() string {
	text, err := os.ReadFile(s.LogFile())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// shutdown ends the pipe and waits for the supervisor to have stopped the server and removed the directory.
func (s *Server) shutdown() {
	s.pipe.Close()
	for range s.lines {
	}
	_ = s.cmd.Wait() // its status says nothing about the server
	running.Delete(s)
}
