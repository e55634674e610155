// Package pgtest gives tests, examples and benchmarks a throw-away PostgreSQL, with nothing running beforehand.
//
// A test package that uses it says so once,
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
// and each test asks for a database of its own:
//
//	db := pgtest.New(t) // db.Pool, db.URL; dropped when the test ends
//
// # Where the server comes from
//
// If JOBRUN_TEST_PG_BINDIR is set, a server is started from the programs initdb and postgres in that directory.
//
// Else if JOBRUN_TEST_DATABASE_URL is set, or DATABASE_URL, that server is used: databases (and roles, if a test asks
// for them) are created on it and dropped again; nothing else on it is touched. Its user needs CREATEDB (and
// CREATEROLE). A test process that is killed cannot drop what it made there; the names begin with "jobrun_test_".
//
// Else a server is started from the first programs that run among PATH, pg_config --bindir and the places where Debian, Fedora, Homebrew and Postgres.app
// put them.
//
// A server that is started needs PostgreSQL 13 or newer, listens on a free port of 127.0.0.1 only, trusts every connection, and
// lives in a temporary directory. A process of root's starts it as the user postgres or nobody, because PostgreSQL
// refuses to run as root.
//
// # How it goes away
//
// The server is a child of a small shell script that reads from a pipe whose other end only the test process holds.
// However that process ends (return, os.Exit, panic, kill -9), the pipe reaches its end, and the script stops the
// server and removes the directory. TestKilledProcessLeavesNothing proves it.
package pgtest
