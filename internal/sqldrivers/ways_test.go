package sqldrivers

import (
	"context"
	"database/sql"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/internal/sqldrivers/sqlcpgx"
	"github.com/seed-ccb5b62c/jobrun/internal/sqldrivers/sqlcsql"
)

// way is how a service has its transactions. Its pool has one connection: a fence
// needs no other.
type way struct {
	name string
	open func(t *testing.T, url string) transact
	own  bool // Run.Tx, which fences and commits by itself
}

// transact calls fn in a transaction, and commits it unless fn returns an error.
type transact func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error

// tx is an open transaction.
type tx struct {
	write func(ctx context.Context, order int64) (fresh bool, err error) // the item and its effect; not fresh: it was there
	fence func(ctx context.Context) error
}

var ways = []way{
	{name: "database-sql/pgx", open: overSQL("pgx")},
	{name: "database-sql/pgx/cache_describe", open: overSQL("pgx", "default_query_exec_mode", "cache_describe")},
	{name: "database-sql/pgx/describe_exec", open: overSQL("pgx", "default_query_exec_mode", "describe_exec")},
	{name: "database-sql/pgx/exec", open: overSQL("pgx", "default_query_exec_mode", "exec")},
	{name: "database-sql/pgx/simple_protocol", open: overSQL("pgx", "default_query_exec_mode", "simple_protocol")},
	{name: "database-sql/pgxpool", open: overPool},
	{name: "database-sql/pq", open: overSQL("postgres")},
	{name: "database-sql/pq/binary_parameters", open: overSQL("postgres", "binary_parameters", "yes")},
	{name: "Conn/pgx", open: overConn("pgx")},
	{name: "Conn/pq", open: overConn("postgres")},
	{name: "sqlx/pgx", open: overSqlx("pgx")},
	{name: "sqlx/pq", open: overSqlx("postgres")},
	{name: "gorm", open: overGORM(postgres.Config{}, gorm.Config{})},
	{name: "gorm/PrepareStmt", open: overGORM(postgres.Config{}, gorm.Config{PrepareStmt: true})},
	{name: "gorm/SkipDefaultTransaction", open: overGORM(postgres.Config{}, gorm.Config{SkipDefaultTransaction: true})},
	{name: "gorm/PrepareStmt/SkipDefaultTransaction", open: overGORM(postgres.Config{}, gorm.Config{PrepareStmt: true, SkipDefaultTransaction: true})},
	{name: "gorm/PreferSimpleProtocol", open: overGORM(postgres.Config{PreferSimpleProtocol: true}, gorm.Config{})},
	{name: "gorm/pq/PrepareStmt", open: overGORM(postgres.Config{DriverName: "postgres"}, gorm.Config{PrepareStmt: true})},
	{name: "sqlc/database-sql/pgx", open: overSqlcSQL("pgx")},
	{name: "sqlc/database-sql/pq", open: overSqlcSQL("postgres")},
	{name: "sqlc/pgx", open: overSqlcPgx},
	{name: "sqlc/Run.Tx", open: overRunTx, own: true},
}

// eachWay runs fn in a parallel subtest per way, on a database of its own. Those
// of Run.Tx are left out where fn needs to act between the fence and the commit.
func eachWay(t *testing.T, own bool, fn func(t *testing.T, db *pgtest.DB, w way)) {
	t.Parallel()
	for _, w := range ways {
		if w.own && !own {
			continue
		}
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			fn(t, newDB(t), w)
		})
	}
}

// with returns a URL with a further parameter.
func with(t *testing.T, rawURL string, params ...string) string {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	for i := 0; i < len(params); i += 2 {
		q.Set(params[i], params[i+1])
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// openSQL opens a pool with one connection.
func openSQL(t *testing.T, driver, url string) *sql.DB {
	t.Helper()
	if driver == "postgres" {
		url = with(t, url, "sslmode", "disable") // lib/pq asks for TLS
	}
	db, err := sql.Open(driver, url)
	if err != nil {
		t.Fatal(err)
	}
	return single(t, db)
}

func single(t *testing.T, db *sql.DB) *sql.DB {
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func overSQL(driver string, params ...string) func(*testing.T, string) transact {
	return func(t *testing.T, url string) transact { return sqlTx(openSQL(t, driver, with(t, url, params...))) }
}

// overPool shares the connections of a pgxpool.Pool with database/sql.
func overPool(t *testing.T, url string) transact {
	return sqlTx(single(t, stdlib.OpenDBFromPool(openPgx(t, url))))
}

func openPgx(t *testing.T, url string) *pgxpool.Pool {
	return (&pgtest.DB{URL: url}).PoolWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
}

// execer is what database/sql's handles have in common.
type execer interface {
	jobrun.SQLTx
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// payout is that of every order.
const payout = 100

func write(ctx context.Context, db execer, order int64) (fresh bool, err error) {
	res, err := db.ExecContext(ctx, `INSERT INTO settlement_item (order_id, payout) VALUES ($1, $2) ON CONFLICT DO NOTHING`, order, payout)
	if err != nil {
		return false, err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return false, err
	}
	_, err = db.ExecContext(ctx, `UPDATE merchant SET balance = balance + $1 WHERE id = 1`, payout)
	return true, err
}

func sqlTx(db *sql.DB) transact {
	return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
		t, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
		if err != nil {
			return err
		}
		defer t.Rollback()
		if err := fn(tx{
			write: func(ctx context.Context, order int64) (bool, error) { return write(ctx, t, order) },
			fence: func(ctx context.Context) error { return run.FenceSQL(ctx, t) },
		}); err != nil {
			return err
		}
		return t.Commit()
	}
}

// overConn begins and ends its transactions by statements.
func overConn(driver string) func(*testing.T, string) transact {
	return func(t *testing.T, url string) transact {
		db := openSQL(t, driver, url)
		return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
			conn, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			begin := "BEGIN"
			if level != sql.LevelDefault {
				begin += " ISOLATION LEVEL " + level.String()
			}
			if _, err := conn.ExecContext(ctx, begin); err != nil {
				return err
			}
			if err := fn(tx{
				write: func(ctx context.Context, order int64) (bool, error) { return write(ctx, conn, order) },
				fence: func(ctx context.Context) error { return run.FenceSQL(ctx, conn) },
			}); err != nil {
				_, _ = conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
				return err
			}
			_, err = conn.ExecContext(ctx, "COMMIT")
			return err
		}
	}
}

func overSqlx(driver string) func(*testing.T, string) transact {
	return func(t *testing.T, url string) transact {
		db := sqlx.NewDb(openSQL(t, driver, url), driver)
		return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
			t, err := db.BeginTxx(ctx, &sql.TxOptions{Isolation: level})
			if err != nil {
				return err
			}
			defer t.Rollback()
			if err := fn(tx{
				write: func(ctx context.Context, order int64) (bool, error) { return write(ctx, t, order) },
				fence: func(ctx context.Context) error { return run.FenceSQL(ctx, t) },
			}); err != nil {
				return err
			}
			return t.Commit()
		}
	}
}

// SettlementItem is a row, for GORM.
type SettlementItem struct {
	OrderID int64 `gorm:"primaryKey;autoIncrement:false"`
	Payout  int64
}

// TableName is for GORM, which would take the plural.
func (SettlementItem) TableName() string { return "settlement_item" }

// openGORM opens a pool with one connection.
func openGORM(t *testing.T, url string, dialect postgres.Config, config gorm.Config) *gorm.DB {
	t.Helper()
	if dialect.DSN = url; dialect.DriverName == "postgres" {
		dialect.DSN = with(t, url, "sslmode", "disable")
	}
	config.Logger = logger.Discard
	db, err := gorm.Open(postgres.New(dialect), &config)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	single(t, pool)
	return db
}

func overGORM(dialect postgres.Config, config gorm.Config) func(*testing.T, string) transact {
	return func(t *testing.T, url string) transact {
		db := openGORM(t, url, dialect, config)
		return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
			return db.WithContext(ctx).Transaction(func(t *gorm.DB) error {
				return fn(tx{
					write: func(ctx context.Context, order int64) (bool, error) {
						created := t.Clauses(clause.OnConflict{DoNothing: true}).Create(&SettlementItem{OrderID: order, Payout: payout})
						if created.Error != nil || created.RowsAffected == 0 {
							return false, created.Error
						}
						return true, t.Exec(`UPDATE merchant SET balance = balance + ? WHERE id = 1`, payout).Error
					},
					fence: func(ctx context.Context) error { return run.FenceSQL(ctx, t.Statement.ConnPool) },
				})
			}, &sql.TxOptions{Isolation: level})
		}
	}
}

func overSqlcSQL(driver string) func(*testing.T, string) transact {
	return func(t *testing.T, url string) transact {
		db := openSQL(t, driver, url)
		queries := sqlcsql.New(db)
		return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
			t, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
			if err != nil {
				return err
			}
			defer t.Rollback()
			q := queries.WithTx(t)
			if err := fn(tx{
				write: func(ctx context.Context, order int64) (bool, error) {
					n, err := q.EnterItem(ctx, sqlcsql.EnterItemParams{OrderID: order, Payout: payout})
					if err != nil || n == 0 {
						return false, err
					}
					return true, q.Credit(ctx, payout)
				},
				fence: func(ctx context.Context) error { return run.FenceSQL(ctx, t) },
			}); err != nil {
				return err
			}
			return t.Commit()
		}
	}
}

// pgxTx is the transaction of sqlc's code for pgx.
func pgxTx(queries *sqlcpgx.Queries, t pgx.Tx, fence func(context.Context) error) tx {
	q := queries.WithTx(t)
	return tx{fence: fence, write: func(ctx context.Context, order int64) (bool, error) {
		n, err := q.EnterItem(ctx, sqlcpgx.EnterItemParams{OrderID: order, Payout: payout})
		if err != nil || n == 0 {
			return false, err
		}
		return true, q.Credit(ctx, payout)
	}}
}

func overSqlcPgx(t *testing.T, url string) transact {
	pool := openPgx(t, url)
	queries := sqlcpgx.New(pool)
	return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
		var options pgx.TxOptions
		if level != sql.LevelDefault {
			options.IsoLevel = pgx.TxIsoLevel(strings.ToLower(level.String()))
		}
		return pgx.BeginTxFunc(ctx, pool, options, func(t pgx.Tx) error {
			return fn(pgxTx(queries, t, func(ctx context.Context) error { return run.Fence(ctx, t) }))
		})
	}
}

func overRunTx(t *testing.T, url string) transact {
	queries := sqlcpgx.New(openPgx(t, url))
	return func(ctx context.Context, run *jobrun.Run, level sql.IsolationLevel, fn func(tx) error) error {
		return run.Tx(ctx, func(t pgx.Tx) error {
			if level != sql.LevelDefault {
				if _, err := t.Exec(ctx, "SET TRANSACTION ISOLATION LEVEL "+level.String()); err != nil {
					return err
				}
			}
			return fn(pgxTx(queries, t, func(context.Context) error { return nil }))
		})
	}
}
