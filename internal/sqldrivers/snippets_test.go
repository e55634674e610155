package sqldrivers

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jmoiron/sqlx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/sqldrivers/sqlcpgx"
	"github.com/seed-ccb5b62c/jobrun/internal/sqldrivers/sqlcsql"
)

// The functions of this file are the README's: what a service writes for an item.

func settleSQL(ctx context.Context, run *jobrun.Run, db *sql.DB, item SettlementItem) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	res, err := tx.ExecContext(ctx, `INSERT INTO settlement_item (order_id, payout) VALUES ($1, $2) ON CONFLICT DO NOTHING`, item.OrderID, item.Payout)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 { // an earlier attempt has done it
		return err
	}
	if _, err := tx.ExecContext(ctx, `UPDATE merchant SET balance = balance + $1 WHERE id = 1`, item.Payout); err != nil {
		return err
	}
	if err := run.FenceSQL(ctx, tx); err != nil { // the last statement
		return err
	}
	return tx.Commit()
}

func settleSqlx(ctx context.Context, run *jobrun.Run, db *sqlx.DB, item SettlementItem) error {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	res, err := tx.NamedExecContext(ctx, `INSERT INTO settlement_item (order_id, payout) VALUES (:orderid, :payout) ON CONFLICT DO NOTHING`, item)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 { // an earlier attempt has done it
		return err
	}
	if _, err := tx.NamedExecContext(ctx, `UPDATE merchant SET balance = balance + :payout WHERE id = 1`, item); err != nil {
		return err
	}
	if err := run.FenceSQL(ctx, tx); err != nil { // the last statement
		return err
	}
	return tx.Commit()
}

func settleGORM(ctx context.Context, run *jobrun.Run, db *gorm.DB, item SettlementItem) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		created := tx.Clauses(clause.OnConflict{DoNothing: true}).Create(&item)
		if created.Error != nil || created.RowsAffected == 0 { // an earlier attempt has done it
			return created.Error
		}
		if err := tx.Exec(`UPDATE merchant SET balance = balance + ? WHERE id = 1`, item.Payout).Error; err != nil {
			return err
		}
		return run.FenceSQL(ctx, tx.Statement.ConnPool) // the last statement
	})
}

func settleSqlc(ctx context.Context, run *jobrun.Run, queries *sqlcpgx.Queries, item SettlementItem) error {
	return run.Tx(ctx, func(tx pgx.Tx) error {
		q := queries.WithTx(tx)
		n, err := q.EnterItem(ctx, sqlcpgx.EnterItemParams{OrderID: item.OrderID, Payout: item.Payout})
		if err != nil || n == 0 { // an earlier attempt has done it
			return err
		}
		return q.Credit(ctx, item.Payout)
	})
}

func settleSqlcSQL(ctx context.Context, run *jobrun.Run, db *sql.DB, queries *sqlcsql.Queries, item SettlementItem) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	q := queries.WithTx(tx)
	n, err := q.EnterItem(ctx, sqlcsql.EnterItemParams{OrderID: item.OrderID, Payout: item.Payout})
	if err != nil || n == 0 { // an earlier attempt has done it
		return err
	}
	if err := q.Credit(ctx, item.Payout); err != nil {
		return err
	}
	if err := run.FenceSQL(ctx, tx); err != nil { // the last statement
		return err
	}
	return tx.Commit()
}

// settle does the same with a way.
func settle(ctx context.Context, run *jobrun.Run, begin transact, order int64) error {
	return begin(ctx, run, sql.LevelDefault, func(x tx) error {
		if fresh, err := x.write(ctx, order); err != nil || !fresh {
			return err
		}
		return x.fence(ctx)
	})
}

type settleFunc func(ctx context.Context, run *jobrun.Run, order int64) error

// snippets are the functions of this file, ready to be called.
var snippets = map[string]func(t *testing.T, url string) settleFunc{
	"database-sql": func(t *testing.T, url string) settleFunc {
		db := openSQL(t, "pgx", url)
		return func(ctx context.Context, run *jobrun.Run, order int64) error {
			return settleSQL(ctx, run, db, SettlementItem{order, payout})
		}
	},
	"sqlx": func(t *testing.T, url string) settleFunc {
		db := sqlx.NewDb(openSQL(t, "pgx", url), "pgx")
		return func(ctx context.Context, run *jobrun.Run, order int64) error {
			return settleSqlx(ctx, run, db, SettlementItem{order, payout})
		}
	},
	"gorm": func(t *testing.T, url string) settleFunc {
		db := openGORM(t, url, postgres.Config{}, gorm.Config{})
		return func(ctx context.Context, run *jobrun.Run, order int64) error {
			return settleGORM(ctx, run, db, SettlementItem{order, payout})
		}
	},
	"sqlc": func(t *testing.T, url string) settleFunc {
		queries := sqlcpgx.New(openPgx(t, url))
		return func(ctx context.Context, run *jobrun.Run, order int64) error {
			return settleSqlc(ctx, run, queries, SettlementItem{order, payout})
		}
	},
	"sqlc over database-sql": func(t *testing.T, url string) settleFunc {
		db := openSQL(t, "pgx", url)
		queries := sqlcsql.New(db)
		return func(ctx context.Context, run *jobrun.Run, order int64) error {
			return settleSqlcSQL(ctx, run, db, queries, SettlementItem{order, payout})
		}
	},
}
