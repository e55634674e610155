package pgtest

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// childVariable holds the name of the registered function that a re-executed test binary runs.
const childVariable = "JOBRUN_TEST_CHILD"

var children = map[string]func() int{}

// Main runs the tests of a package and exits with their code, after it has stopped the server if one was started.
// In a process that Reexec prepared it runs the registered function instead.
func Main(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		fn := children[name]
		if fn == nil {
			fmt.Fprintf(os.Stderr, "pgtest: no child %q is registered\n", name)
			os.Exit(2)
		}
		_ = os.Unsetenv(childVariable) // not for what the child starts
		os.Exit(fn())
	}
	code := m.Run()
	if started != nil {
		if err := started.stop(); err != nil {
			fmt.Fprintf(os.Stderr, "pgtest: %v\n", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// RegisterChild names a function that a re-executed test binary can run in place of the tests; its result is the exit
// code. It is for package-level variables, var _ = pgtest.RegisterChild("worker", worker), and panics if the name is
// taken.
func RegisterChild(name string, fn func() int) bool {
	if children[name] != nil {
		panic("pgtest: child " + name + " is registered twice")
	}
	children[name] = fn
	return true
}

// Reexec returns a command, not yet started, that runs the registered function in a new process of the test binary.
// Its environment is ours and env; the function learns the URL of its database that way. Its output is discarded
// unless the caller says otherwise. If it still runs when the test ends, it is killed.
func Reexec(t testing.TB, name string, env ...string) *exec.Cmd {
	t.Helper()
	if children[name] == nil {
		t.Fatalf("pgtest: no child %q is registered", name)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(append(os.Environ(), env...), childVariable+"="+name)
	return cmd
}
