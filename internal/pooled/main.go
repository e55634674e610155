// Pooled runs the tests of the public API through PgBouncer in transaction mode, in the
// two execution modes of pgx that it allows:
//
//	go run ./internal/pooled
//
// It starts a PostgreSQL and a PgBouncer of its own. Tests that need sessions of their own
// are skipped, and listed with -v. At the end it asks the server what is left.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

func main() {
	modes := flag.String("modes", "exec,simple_protocol", "execution modes of pgx, a list with commas")
	verbose := flag.Bool("v", false, "print what the tests say")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "Usage: pooled [flags] [package...]   (default: . ./ops)")
		flag.PrintDefaults()
	}
	flag.Parse()
	packages := flag.Args()
	if len(packages) == 0 {
		packages = []string{".", "./ops"}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, strings.Split(*modes, ","), packages, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "pooled:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, modes, packages []string, verbose bool) error {
	for _, mode := range modes {
		if mode != "exec" && mode != "simple_protocol" {
			return fmt.Errorf("mode %q, allowed: exec, simple_protocol: the others keep prepared statements in the session", mode)
		}
	}
	bouncer, err := exec.LookPath("pgbouncer")
	if err != nil {
		bouncer, err = exec.LookPath("/usr/sbin/pgbouncer")
	}
	if err != nil {
		return fmt.Errorf("%w: apt-get install pgbouncer", err)
	}
	server, err := pgtest.Start(ctx, pgtest.Options{Log: os.Stderr, Settings: map[string]string{"max_connections": "500", "max_prepared_transactions": "10"}})
	if err != nil {
		return err
	}
	defer server.Stop()
	direct, err := pgx.Connect(ctx, server.URL("postgres"))
	if err != nil {
		return err
	}
	defer func() { _ = direct.Close(context.WithoutCancel(ctx)) }()
	url, end, err := startBouncer(ctx, bouncer, direct.Config().Port)
	if err != nil {
		return err
	}
	defer end()
	version, err := exec.Command(bouncer, "--version").Output()
	if err != nil {
		return err
	}
	name, _, _ := strings.Cut(string(version), "\n")
	for _, mode := range modes {
		fmt.Printf("\n== %s, transaction mode, %s\n", name, mode)
		args := append([]string{"test", "-json", "-count=1", "-timeout=20m"}, packages...)
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Env = append(os.Environ(), "JOBRUN_TEST_POOLER="+name+" in transaction mode", "JOBRUN_TEST_DATABASE_URL="+url+"&default_query_exec_mode="+mode)
		cmd.Stderr = os.Stderr
		if err := tell(cmd, verbose); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
		if err := nothingLeft(ctx, direct); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
	}
	return nil
}

// tell runs a "go test -json" and prints how many tests passed, were skipped and failed,
// with what those said that failed; verbose: with what all said.
func tell(cmd *exec.Cmd, verbose bool) error {
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	count := map[string]int{}
	said := map[string]string{} // by package and test
	var line struct{ Action, Package, Test, Output string }
	decoder := json.NewDecoder(out)
	for err = decoder.Decode(&line); err == nil; err = decoder.Decode(&line) {
		test := line.Package + " " + line.Test
		switch line.Action {
		case "output":
			if said[test] += line.Output; verbose {
				fmt.Print(line.Output)
			}
		case "pass", "skip", "fail":
			if line.Test != "" && !strings.Contains(line.Test, "/") {
				count[line.Action]++
			}
			if line.Action == "fail" && !verbose {
				fmt.Print(said[test])
			}
			delete(said, test)
		}
		line.Test, line.Output = "", "" // which a line may not have
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	fmt.Printf("%d tests passed, %d need sessions of their own and were skipped, %d failed\n", count["pass"], count["skip"], count["fail"])
	if count["pass"] == 0 {
		err = errors.Join(err, errors.New("no test has passed"))
	}
	return errors.Join(err, cmd.Wait())
}

// startBouncer starts a PgBouncer in front of the server at the port, for all of its
// databases and roles, which need no password.
func startBouncer(ctx context.Context, program string, serverPort uint16) (url string, end func(), err error) {
	dir, err := os.MkdirTemp("", "jobrun-pgbouncer-")
	if err != nil {
		return "", nil, err
	}
	gone := func() { _ = os.RemoveAll(dir) }
	port, err := freePort()
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755),
			os.WriteFile(filepath.Join(dir, "users"), []byte(`"postgres" ""`+"\n"), 0o644),
			os.WriteFile(filepath.Join(dir, "pgbouncer.ini"), []byte(fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
auth_user = postgres
pool_mode = transaction
max_client_conn = 3000
default_pool_size = 60
server_idle_timeout = 3
ignore_startup_parameters = extra_float_digits
`, serverPort, port, filepath.Join(dir, "users"))), 0o644))
	}
	if err != nil {
		gone()
		return "", nil, err
	}
	args := []string{"-q"}
	if os.Getuid() == 0 { // which it refuses to be
		args = append(args, "-u", "nobody")
	}
	cmd := exec.Command(program, append(args, filepath.Join(dir, "pgbouncer.ini"))...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		gone()
		return "", nil, err
	}
	end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		gone()
	}
	url = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
	limit, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(limit, url+"&default_query_exec_mode=exec")
		if err == nil {
			return url, end, conn.Close(limit)
		}
		select {
		case <-limit.Done():
			end()
			return "", nil, fmt.Errorf("PgBouncer does not answer: %w", err)
		case <-tick.C:
		}
	}
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return listener.Addr().(*net.TCPAddr).Port, listener.Close()
}

// nothingLeft asks the server itself.
func nothingLeft(ctx context.Context, direct *pgx.Conn) error {
	rows, err := direct.Query(ctx, `
		SELECT 'an advisory lock in database ' || coalesce(d.datname, l.database::text) FROM pg_locks AS l LEFT JOIN pg_database AS d ON d.oid = l.database WHERE l.locktype = 'advisory'
		UNION ALL SELECT 'a transaction of ' || coalesce(application_name, '') || ': ' || left(query, 100) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'
		UNION ALL SELECT 'a prepared transaction: ' || gid FROM pg_prepared_xacts`)
	if err != nil {
		return err
	}
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("left on the server: %s", strings.Join(left, "; "))
	}
	return err
}
