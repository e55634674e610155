package pgtest

import (
	"os"
	"testing"
)

// NeedsSessions skips a test that has to have sessions of its own, with settings,
// temporary tables or prepared statements that stay, or that ends them by their process:
// behind a pooler in transaction mode, which JOBRUN_TEST_POOLER names, there are none.
func NeedsSessions(t testing.TB) {
	t.Helper()
	if pooler := os.Getenv("JOBRUN_TEST_POOLER"); pooler != "" {
		t.Skip("needs sessions of its own, which " + pooler + " does not give")
	}
}
