//go:build unix

package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
)

func connect(t *testing.T, s *Server) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func execute(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// However the server goes down, what was committed is there when it is back, at the
// same URL, and what was not is gone.
func TestServerComesBack(t *testing.T) {
	for _, c := range []struct {
		name string
		down func(*Server) error
	}{{"killed", (*Server).Kill}, {"immediate shutdown", (*Server).Quit}} {
		t.Run(c.name, func(t *testing.T) {
			s := ownServer(t, Options{Durable: true})
			conn := connect(t, s)
			execute(t, conn, `CREATE TABLE kept (n integer)`)
			for n := range 3 {
				execute(t, conn, `INSERT INTO kept VALUES (1)`)
				execute(t, conn, `BEGIN; INSERT INTO kept VALUES (100)`)
				before := s.PID()
				if err := c.down(s); err != nil {
					t.Fatal(err)
				}
				if _, err := conn.Exec(t.Context(), `SELECT`); err == nil {
					t.Error("the connection survived")
				}
				if _, err := pgx.Connect(t.Context(), s.URL("postgres")); err == nil {
					t.Error("the server still accepts connections")
				}
				if err := s.Kill(); err == nil {
					t.Error("no error of Kill while it is down")
				}
				if err := s.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				if s.PID() == before {
					t.Errorf("still process %d", before)
				}
				conn = connect(t, s)
				var sum int
				if err := conn.QueryRow(t.Context(), `SELECT sum(n) FROM kept`).Scan(&sum); err != nil || sum != n+1 {
					t.Errorf("sum %d, %v", sum, err)
				}
			}
			if err := s.Restart(t.Context()); err == nil {
				t.Error("no error of Restart while it runs")
			}
		})
	}
}

func TestKilledBackendTakesAllSessionsDown(t *testing.T) {
	s := ownServer(t, Options{Durable: true})
	conn := connect(t, s)
	other := connect(t, s)
	execute(t, conn, `CREATE TABLE kept (n integer)`)
	if err := s.KillBackend(s.PID()); err == nil {
		t.Error("no error for the postmaster")
	}
	if err := s.KillBackend(int(other.PgConn().PID())); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the other session has ended", func() bool { _, err := conn.Exec(t.Context(), `SELECT`); return err != nil })
	waitFor(t, "the server has recovered", func() bool {
		again, err := pgx.Connect(t.Context(), s.URL("postgres"))
		if err != nil {
			return false
		}
		defer again.Close(context.Background())
		_, err = again.Exec(t.Context(), `INSERT INTO kept VALUES (1)`)
		return err == nil
	})
}
