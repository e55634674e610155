package integrationtest_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// Put your own pool here: this file is the only one that another module cannot
// copy as it is. All that the tests ask for is the URL of a database in which they
// may create schemas: that of your compose file or CI service, or of a container
// that TestMain starts. In reminders_test.go, change the import of
// examples/integrationtest to your own package: else you test ours.
var databaseURL string

func TestMain(m *testing.M) {
	server, err := pgtest.Start(context.Background(), pgtest.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	databaseURL = server.URL("postgres")
	code := m.Run()
	server.Stop()
	os.Exit(code)
}
