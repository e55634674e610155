package sqldrivers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jmoiron/sqlx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/seed-ccb5b62c/jobrun"
)

// handle is something with QueryContext.
type handle struct {
	name string
	open func(t *testing.T, url string) jobrun.SQLTx
}

// autocommit is what looks like a transaction to the compiler and is none. Where it
// does not say otherwise there is one connection, so that each statement finds the
// session of the one before.
func autocommit() (all []handle) {
	drivers := map[string][]string{
		"pgx": nil, "pgx/cache_describe": {"default_query_exec_mode", "cache_describe"},
		"pgx/describe_exec":   {"default_query_exec_mode", "describe_exec"},
		"pgx/exec":            {"default_query_exec_mode", "exec"},
		"pgx/simple_protocol": {"default_query_exec_mode", "simple_protocol"},
		"postgres":            nil, "postgres/binary_parameters": {"binary_parameters", "yes"},
	}
	for name, params := range drivers {
		driver, _, _ := strings.Cut(name, "/")
		open := func(t *testing.T, url string) *sql.DB { return openSQL(t, driver, with(t, url, params...)) }
		all = append(
			all,
			handle{"DB/" + name, func(t *testing.T, url string) jobrun.SQLTx { return open(t, url) }},
			handle{"DB of many/" + name, func(t *testing.T, url string) jobrun.SQLTx {
				db := open(t, url)
				db.SetMaxOpenConns(0)
				return db
			}},
			handle{"Conn/" + name, func(t *testing.T, url string) jobrun.SQLTx { return openConn(t, open(t, url)) }},
			handle{"Conn after a transaction/" + name, func(t *testing.T, url string) jobrun.SQLTx {
				conn := openConn(t, open(t, url))
				statements(t, conn, "BEGIN", "UPDATE merchant SET balance = 0", "COMMIT")
				return conn
			}},
			handle{"sqlx/" + name, func(t *testing.T, url string) jobrun.SQLTx { return sqlx.NewDb(open(t, url), driver) }},
		)
	}
	for name, config := range map[string]gorm.Config{"": {}, "/PrepareStmt": {PrepareStmt: true}, "/SkipDefaultTransaction": {SkipDefaultTransaction: true}} {
		all = append(
			all,
			handle{"gorm" + name, func(t *testing.T, url string) jobrun.SQLTx {
				return openGORM(t, url, postgres.Config{}, config).Statement.ConnPool
			}},
			handle{"gorm after a transaction" + name, func(t *testing.T, url string) jobrun.SQLTx {
				db := openGORM(t, url, postgres.Config{}, config)
				if err := db.Transaction(func(tx *gorm.DB) error { return tx.Exec("UPDATE merchant SET balance = 0").Error }); err != nil {
					t.Fatal(err)
				}
				return db.WithContext(t.Context()).Statement.ConnPool
			}},
			handle{"gorm's tx.ConnPool, the pool beside the transaction" + name, func(t *testing.T, url string) jobrun.SQLTx {
				db := openGORM(t, url, postgres.Config{}, config)
				pool, err := db.DB()
				if err != nil {
					t.Fatal(err)
				}
				pool.SetMaxOpenConns(2)
				tx := db.Begin()
				t.Cleanup(func() { tx.Rollback() })
				return tx.ConnPool
			}},
		)
	}
	return all
}

// TestNoTransactionIsNoFence proves that a fence outside a transaction, which
// would protect nothing, is an error that says so, however often it is repeated.
func TestNoTransactionIsNoFence(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := newRunner(t, db.Pool)
	for i, h := range autocommit() {
		t.Run(h.name, func(t *testing.T) {
			tx := h.open(t, db.URL)
			_, err := execute(r, fmt.Sprintf("job-%d", i), func(ctx context.Context, run *jobrun.Run) error {
				for range 7 { // database/sql, pgx and the server change their plans after 2 to 6 times
					if err := run.FenceSQL(ctx, tx); err == nil || !strings.Contains(err.Error(), "needs an open transaction") || errors.Is(err, jobrun.ErrLeaseLost) {
						t.Errorf("got %v", err)
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// TestTransactionThatCannotCommitIsNotFenced proves that a transaction that is
// over, has failed or may not lock is an error, and no lost lease.
func TestTransactionThatCannotCommitIsNotFenced(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := newRunner(t, db.Pool)
	for _, driver := range []string{"pgx", "postgres"} {
		for name, end := range map[string]func(*testing.T, *sql.Tx){
			"committed":   func(t *testing.T, tx *sql.Tx) { _ = tx.Commit() },
			"rolled back": func(t *testing.T, tx *sql.Tx) { _ = tx.Rollback() },
			"failed": func(t *testing.T, tx *sql.Tx) {
				if _, err := tx.Exec("SELECT 1/0"); err == nil {
					t.Error("no error")
				}
			},
			"read-only": func(t *testing.T, tx *sql.Tx) { statements(t, tx, "SET TRANSACTION READ ONLY") },
			"ended by a statement": func(t *testing.T, tx *sql.Tx) {
				statements(t, tx, "UPDATE merchant SET balance = 0", "COMMIT")
			},
		} {
			t.Run(driver+"/"+name, func(t *testing.T) {
				tx, err := openSQL(t, driver, db.URL).BeginTx(t.Context(), nil)
				if err != nil {
					t.Fatal(err)
				}
				end(t, tx)
				_, err = execute(r, strings.ReplaceAll(t.Name(), "_", "-")[len("TestTransactionThatCannotCommitIsNotFenced/"):], func(ctx context.Context, run *jobrun.Run) error {
					if err := run.FenceSQL(ctx, tx); err == nil || errors.Is(err, jobrun.ErrLeaseLost) {
						t.Errorf("got %v", err)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func openConn(t *testing.T, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func statements(t *testing.T, db execer, all ...string) {
	t.Helper()
	for _, sql := range all {
		if _, err := db.ExecContext(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}
