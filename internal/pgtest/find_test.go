package pgtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// programsDir returns a directory with shell scripts in place of the programs, which the server's account can reach.
func programsDir(t *testing.T, scripts map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func testAccount(t *testing.T) account {
	t.Helper()
	acc, err := serverAccount()
	if err != nil {
		t.Fatal(err)
	}
	return acc
}

func TestMissingProgramsNamesPlacesAndCommands(t *testing.T) {
	empty := programsDir(t, nil)
	lone := programsDir(t, map[string]string{"initdb": "echo initdb 15.1"})
	_, err := firstPrograms([]place{
		{"PATH", []string{empty, lone}},
		{"/nowhere/*/bin", newestFirst("/nowhere/*/bin")},
	}, testAccount(t))
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"PATH: " + empty + ": no initdb",
		"PATH: " + lone + ": no postgres",
		"/nowhere/*/bin: nothing there",
		"sudo apt-get install -y postgresql",
		"sudo dnf install -y postgresql-server",
		"brew install postgresql",
		"JOBRUN_TEST_PG_BINDIR",
		"JOBRUN_TEST_DATABASE_URL",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
}

func TestProgramsMustRun(t *testing.T) {
	acc := testAccount(t)
	good := map[string]string{"initdb": "echo 'initdb (PostgreSQL) 15.1'", "postgres": "echo 'postgres (PostgreSQL) 15.1'"}
	for _, c := range []struct{ name, program, script, want string }{
		{"both run", "postgres", good["postgres"], ""},
		{"one fails", "postgres", "echo no library >&2; exit 127", "no library"},
		{"too old", "initdb", "echo 'initdb (PostgreSQL) 12.9'", "version 13 or newer"},
		{"not PostgreSQL", "initdb", "echo hello", "version 13 or newer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := programsDir(t, good)
			if err := os.WriteFile(filepath.Join(dir, c.program), []byte("#!/bin/sh\n"+c.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			err := tryPrograms(dir, acc)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestFirstPlaceWins(t *testing.T) {
	good := map[string]string{"initdb": "echo 'initdb (PostgreSQL) 15.1'", "postgres": "echo 'postgres (PostgreSQL) 15.1'"}
	lone, first, second := programsDir(t, map[string]string{"initdb": good["initdb"]}), programsDir(t, good), programsDir(t, good)
	dir, err := firstPrograms([]place{{"a", []string{lone}}, {"b", []string{first, second}}}, testAccount(t))
	if err != nil || dir != first {
		t.Errorf("got %q, %v, want %q", dir, err, first)
	}
}

func TestExplicitDirectoryHasNoFallback(t *testing.T) {
	t.Setenv("JOBRUN_TEST_PG_BINDIR", t.TempDir())
	_, err := Start(t.Context(), Options{})
	if err == nil || !strings.Contains(err.Error(), "JOBRUN_TEST_PG_BINDIR") {
		t.Errorf("got %v", err)
	}
}

func TestNewestVersionFirst(t *testing.T) {
	root := t.TempDir()
	for _, v := range []string{"9.6", "15", "latest", "17", "13"} {
		if err := os.MkdirAll(filepath.Join(root, v, "bin"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, dir := range newestFirst(root + "/*/bin") {
		got = append(got, filepath.Base(filepath.Dir(dir)))
	}
	if want := []string{"17", "15", "13", "9.6", "latest"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestRelativePathEntriesAreSkipped(t *testing.T) {
	list := strings.Join([]string{"", ".", "/usr/bin", "bin"}, string(os.PathListSeparator))
	if got := pathDirs(list); !slices.Equal(got, []string{"/usr/bin"}) {
		t.Errorf("got %v", got)
	}
}
