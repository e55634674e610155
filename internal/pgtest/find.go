package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// oldest is the first major version with DROP DATABASE ... WITH (FORCE).
const oldest = 13

// installHint ends the error about missing server programs.
const installHint = `install them:
  Debian, Ubuntu:  sudo apt-get install -y postgresql
  Fedora:          sudo dnf install -y postgresql-server
  macOS:           brew install postgresql@17
or set JOBRUN_TEST_PG_BINDIR to the directory that holds them,
or set JOBRUN_TEST_DATABASE_URL to a server that is already running`

// A place is one entry of the search: where, in the words of the error, and the directories to try, best first.
type place struct {
	name string
	dirs []string
}

// findPrograms returns the directory of the first initdb and postgres that run, as the user of acc.
func findPrograms(acc account) (string, error) {
	if dir := os.Getenv("JOBRUN_TEST_PG_BINDIR"); dir != "" {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return "", err
		}
		if err := tryPrograms(dir, acc); err != nil {
			return "", fmt.Errorf("JOBRUN_TEST_PG_BINDIR is %s: %w; set it to the directory that holds initdb and postgres, or unset it to search the usual places", dir, err)
		}
		return dir, nil
	}
	return firstPrograms(places(), acc)
}

// firstPrograms goes through the places in order. Its error lists every directory with the reason it was passed over.
func firstPrograms(places []place, acc account) (string, error) {
	var looked strings.Builder
	for _, p := range places {
		if len(p.dirs) == 0 {
			fmt.Fprintf(&looked, "  %s: nothing there\n", p.name)
		}
		for _, dir := range p.dirs {
			err := tryPrograms(dir, acc)
			if err == nil {
				return dir, nil
			}
			fmt.Fprintf(&looked, "  %s: %s: %v\n", p.name, dir, err)
		}
	}
	return "", fmt.Errorf("no PostgreSQL server programs (initdb and postgres in one directory); looked in\n%s%s", looked.String(), installHint)
}

// places lists where the programs may be, in the order of the search.
func places() []place {
	glob := func(pattern string) place { return place{pattern, newestFirst(pattern)} }
	return []place{
		{"PATH", pathDirs(os.Getenv("PATH"))},
		pgConfig(),
		glob("/usr/lib/postgresql/*/bin"),         // Debian, Ubuntu
		glob("/usr/bin"),                          // Fedora
		glob("/usr/pgsql-*/bin"),                  // Fedora, RHEL: packages of postgresql.org
		glob("/opt/homebrew/opt/postgresql*/bin"), // Homebrew, Apple silicon
		glob("/usr/local/opt/postgresql*/bin"),    // Homebrew, Intel
		glob("/Applications/Postgres.app/Contents/Versions/*/bin"),
	}
}

// pathDirs splits PATH and drops relative entries, which name another directory for each working directory.
func pathDirs(path string) []string {
	return slices.DeleteFunc(filepath.SplitList(path), func(dir string) bool { return !filepath.IsAbs(dir) })
}

func pgConfig() place {
	out, err := exec.Command("pg_config", "--bindir").Output()
	dir := strings.TrimSpace(string(out))
	if err != nil || dir == "" {
		return place{name: "pg_config --bindir"}
	}
	return place{"pg_config --bindir", []string{dir}}
}

var number = regexp.MustCompile(`[0-9]+`)

// newestFirst returns the directories that match, the highest version number first.
func newestFirst(pattern string) []string {
	dirs, _ := filepath.Glob(pattern) // the only error is a bad pattern
	prefix, _, _ := strings.Cut(pattern, "*")
	version := func(dir string) int {
		n, _ := strconv.Atoi(number.FindString(strings.TrimPrefix(dir, prefix))) // no number sorts last
		return n
	}
	slices.SortStableFunc(dirs, func(a, b string) int { return version(b) - version(a) })
	return dirs
}

// tryPrograms reports why the programs in dir cannot be used, or nil. Both must be there (a lone wrapper of initdb on
// PATH is of no use) and both must run as the user who will run the server.
func tryPrograms(dir string, acc account) error {
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("no %s", name)
			}
			return err
		}
	}
	for _, name := range []string{"initdb", "postgres"} {
		cmd := exec.Command(filepath.Join(dir, name), "--version")
		cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", serverEnv(), acc.attr()
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s --version as %s: %w %s", name, acc.name, err, strings.TrimSpace(string(out)))
		}
		if major, _ := strconv.Atoi(number.FindString(string(out))); major < oldest {
			return fmt.Errorf("%s is too old, version %d or newer is needed", strings.TrimSpace(string(out)), oldest)
		}
	}
	return nil
}
