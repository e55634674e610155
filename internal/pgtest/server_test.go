package pgtest

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestMain(m *testing.M) { Main(m) }

// programs returns the server programs and their account. A test that needs them is skipped where there are none and
// the other tests use a server that was running already.
func programs(t *testing.T) (bin string, acc account) {
	t.Helper()
	acc = testAccount(t)
	bin, err := findPrograms(acc)
	if _, url := existingURL(); err != nil && url != "" {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	return bin, acc
}

// ownServer starts a server of the test's own, whatever server the other tests use.
func ownServer(t *testing.T, opts Options) *Server {
	t.Helper()
	bin, acc := programs(t)
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	s, err := launch(ctx, bin, acc, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func scan[T any](t *testing.T, url, sql string) (value T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if err := conn.QueryRow(t.Context(), sql).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func TestSettings(t *testing.T) {
	common := map[string]string{
		"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "300",
		"TimeZone": "UTC", "log_timezone": "UTC", "server_encoding": "UTF8",
	}
	for _, c := range []struct {
		name string
		opts Options
		want map[string]string
	}{
		{"default", Options{}, map[string]string{"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}},
		{
			"durable",
			Options{Durable: true, Settings: map[string]string{"max_prepared_transactions": "5", "max_connections": "20"}},
			map[string]string{
				"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
				"max_prepared_transactions": "5", "max_connections": "20",
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := ownServer(t, c.opts)
			for _, want := range []map[string]string{common, c.want} {
				for name, value := range want {
					if override, ok := c.want[name]; ok {
						value = override
					}
					if got := scan[string](t, s.URL("postgres"), "SELECT current_setting('"+name+"')"); got != value {
						t.Errorf("%s is %q, want %q", name, got, value)
					}
				}
			}
		})
	}
}

func TestStopRemovesAll(t *testing.T) {
	s := ownServer(t, Options{})
	dir := filepath.Dir(s.DataDir())
	if _, err := os.Stat(s.LogFile()); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), s.URL("postgres")) // a client does not keep it up
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	s.Stop()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", dir, err)
	}
	if conn.Ping(t.Context()) == nil {
		t.Error("the server still answers")
	}
	s.Stop() // again: nothing to do
}

func TestTakenPortIsRetried(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	original, calls := freePort, 0
	defer func() { freePort = original }()
	freePort = func() (int, error) {
		if calls++; calls <= 2 {
			return taken.Addr().(*net.TCPAddr).Port, nil
		}
		return original()
	}
	s := ownServer(t, Options{})
	if calls != 3 {
		t.Errorf("asked for %d ports, want 3", calls)
	}
	if pid := scan[int](t, s.URL("postgres"), "SELECT pg_backend_pid()"); pid == 0 {
		t.Error("no backend")
	}
}

// A server that is already at the port must not be mistaken for the one that failed to start there.
func TestAnotherServerAtThePortIsNotOurs(t *testing.T) {
	other := ownServer(t, Options{})
	original, calls := freePort, 0
	defer func() { freePort = original }()
	freePort = func() (int, error) {
		if calls++; calls == 1 {
			_, port, _ := net.SplitHostPort(other.url.Host)
			return net.LookupPort("tcp", port)
		}
		return original()
	}
	s := ownServer(t, Options{})
	if s.url.Host == other.url.Host || s.PID() == other.PID() {
		t.Errorf("two servers at %s", s.url.Host)
	}
	if got := scan[string](t, s.URL("postgres"), "SHOW data_directory"); got != s.DataDir() {
		t.Errorf("serves %s, want %s", got, s.DataDir())
	}
}

func TestBadSettingFailsWithTheLog(t *testing.T) {
	bin, acc := programs(t)
	_, err := launch(t.Context(), bin, acc, Options{Settings: map[string]string{"no_such_setting": "1"}})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("got %v", err)
	}
}

func TestFailedInitdbFailsWithItsOutput(t *testing.T) {
	bin := programsDir(t, map[string]string{"initdb": "echo no space; exit 1"})
	tmp := programsDir(t, nil)
	if err := os.Chmod(tmp, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	_, err := launch(t.Context(), bin, testAccount(t), Options{})
	if err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestCanceledStartLeavesNothing(t *testing.T) {
	bin, acc := programs(t)
	tmp := programsDir(t, nil)
	if err := os.Chmod(tmp, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := launch(ctx, bin, acc, Options{}); err == nil {
		t.Error("no error")
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestPrivateTempDirectory(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // its parent is ours alone: a server of root's goes elsewhere
	s := ownServer(t, Options{})
	if got := scan[string](t, s.URL("postgres"), "SHOW data_directory"); got != s.DataDir() {
		t.Errorf("serves %s, want %s", got, s.DataDir())
	}
}

func TestExistingServerRefusals(t *testing.T) {
	s := ownServer(t, Options{})
	t.Setenv("JOBRUN_TEST_PG_BINDIR", "")
	for _, c := range []struct {
		name, url string
		opts      Options
		want      string // "": no error
	}{
		{"plain", s.URL("postgres"), Options{}, ""},
		{"settings", s.URL("postgres"), Options{Settings: map[string]string{"work_mem": "8MB"}}, "settings"},
		{"not durable", s.URL("postgres"), Options{Durable: true}, "not durable"},
		{"no URL", "host=127.0.0.1 password=hush", Options{}, "must be a URL"},
		{"nobody there", "postgres://postgres@127.0.0.1:1/postgres", Options{}, "JOBRUN_TEST_DATABASE_URL"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("JOBRUN_TEST_DATABASE_URL", c.url)
			var log bytes.Buffer
			c.opts.Log = &log
			got, err := Start(t.Context(), c.opts)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hush") {
					t.Errorf("got %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got.Stop() // not ours to stop
			if got.PID() != 0 || got.DataDir() != "" || got.LogFile() != "" {
				t.Errorf("it is not ours, but has process %d, %q, %q", got.PID(), got.DataDir(), got.LogFile())
			}
			if scan[int](t, got.URL("template1"), "SELECT 1") != 1 || !strings.Contains(log.String(), "JOBRUN_TEST_DATABASE_URL") {
				t.Errorf("log %q", log.String())
			}
		})
	}
}
