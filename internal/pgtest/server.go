package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// startTimeout bounds Start, whatever its context allows.
const startTimeout = 90 * time.Second

// Options are the choices of Start. The zero value is right for tests.
type Options struct {
	// Durable leaves fsync, synchronous_commit and full_page_writes on, as benchmarks need. Off by default: a throw-away
	// server need not survive a power cut.
	Durable bool

	// Settings are further server settings, for example {"max_prepared_transactions": "5"}.
	Settings map[string]string

	// Keep leaves the server running after Stop and after the end of the process, to look at. It ends, and its
	// directory goes, with "kill -INT" of its process.
	Keep bool

	// Log receives a line on what was started and what was kept. Nothing by default.
	Log io.Writer
}

// A Server is a PostgreSQL for tests: one that Start started, or one that was running already.
type Server struct {
	url  url.URL // of a database to be in while creating others
	opts Options

	// The rest is zero for a server that was running already.
	name  string // its cluster_name
	dir   string
	pid   int // of the postmaster; 0: it does not run
	cmd   *exec.Cmd
	pipe  *os.File    // to the supervisor; its end is the order to stop
	lines chan string // from the supervisor; closed when it has ended

	stop sync.Once
}

// Start returns a server that accepts connections, as the package comment says: one that was running already, or one
// started for the caller, who calls Stop at the end. If the caller does not come to that, the server still goes with
// the process. A server that was running already cannot be given Settings, and must be durable if Durable is set.
func Start(ctx context.Context, opts Options) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if name, value := existingURL(); value != "" {
		s, err := existing(ctx, value, opts)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		s.logf("PostgreSQL of %s at %s", name, s.url.Redacted())
		return s, nil
	}
	acc, err := serverAccount()
	if err != nil {
		return nil, err
	}
	bin, err := findPrograms(acc)
	if err != nil {
		return nil, err
	}
	s, err := launch(ctx, bin, acc, opts)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL of %s: %w", bin, err)
	}
	s.logf("PostgreSQL of %s as %s, process %d in %s at %s", bin, acc.name, s.pid, s.dir, s.url.String())
	return s, nil
}

// URL returns the connection URL of a database of the server.
func (s *Server) URL(dbname string) string {
	u := s.url
	u.Path, u.RawPath = "/"+dbname, ""
	return withoutParameters(&u, "dbname")
}

// Stop stops the server and removes its directory, unless Keep was asked for or it was running before Start.
// It returns when all is gone, and may be called more than once.
func (s *Server) Stop() {
	if s.cmd == nil {
		return
	}
	if s.opts.Keep && s.pid != 0 {
		s.stop.Do(func() { s.logf("kept PostgreSQL at %s; to remove it: kill -INT %d", s.url.String(), s.pid) })
		return
	}
	s.stop.Do(s.shutdown)
}

// PID returns the process id of the postmaster, 0 for a server that was running already.
func (s *Server) PID() int { return s.pid }

// DataDir returns the data directory, "" for a server that was running already.
func (s *Server) DataDir() string { return s.file("data") }

// LogFile returns the file of the server's log, "" for a server that was running already.
func (s *Server) LogFile() string { return s.file("log") }

func (s *Server) file(name string) string {
	if s.dir == "" {
		return ""
	}
	return filepath.Join(s.dir, name)
}

func (s *Server) logf(format string, args ...any) {
	if s.opts.Log != nil {
		fmt.Fprintf(s.opts.Log, format+"\n", args...)
	}
}

// existingURL returns the variable that names a running server to use, and its value, "" if there is none.
func existingURL() (name, value string) {
	if os.Getenv("JOBRUN_TEST_PG_BINDIR") != "" {
		return "", "" // an explicit wish for a server of one's own
	}
	for _, name := range []string{"JOBRUN_TEST_DATABASE_URL", "DATABASE_URL"} {
		if value := os.Getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// existing checks that a server which was running before can be used.
func existing(ctx context.Context, rawURL string, opts Options) (*Server, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return nil, errors.New("must be a URL that begins with postgres://") // the value may hold a password
	}
	if len(opts.Settings) > 0 {
		return nil, errors.New("a server that was running already cannot be given settings; unset the variable to start one")
	}
	conn, err := pgx.Connect(ctx, rawURL)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(ctx) }()
	var durable bool
	err = conn.QueryRow(ctx, `
		SELECT current_setting('fsync') = 'on'
		   AND current_setting('full_page_writes') = 'on'
		   AND current_setting('synchronous_commit') <> 'off'`).Scan(&durable)
	if err == nil && opts.Durable && !durable {
		err = errors.New("this server is not durable: fsync, full_page_writes or synchronous_commit is off")
	}
	if err != nil {
		return nil, err
	}
	return &Server{url: *u, opts: opts}, nil
}

// uniqueName returns a name that no other process on a shared server makes up.
func uniqueName(kind string) string {
	b := make([]byte, 5)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf("jobrun_test_%s_%d_%x", kind, os.Getpid(), b)
}
