package sqldrivers

import (
	"context"
	"errors"
	"testing"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/seed-ccb5b62c/jobrun"
)

type entry struct{ ID int64 }

// GORM begins a savepoint for what it calls a nested transaction, and for batches,
// and never releases it: no obstacle to a fence at the end of the outermost one.
func TestGORMAfterNestedTransactions(t *testing.T) {
	for name, work := range map[string]func(tx *gorm.DB) error{
		"plain": func(tx *gorm.DB) error { return tx.Create(&entry{ID: 1}).Error },
		"nested": func(tx *gorm.DB) error {
			return tx.Transaction(func(in *gorm.DB) error { return in.Create(&entry{ID: 1}).Error })
		},
		"nested and undone": func(tx *gorm.DB) error {
			_ = tx.Transaction(func(in *gorm.DB) error { return errors.New("not this one") })
			return tx.Create(&entry{ID: 1}).Error
		},
		"in batches": func(tx *gorm.DB) error { return tx.CreateInBatches([]entry{{1}, {2}, {3}}, 2).Error },
	} {
		t.Run(name, func(t *testing.T) {
			db := newDB(t)
			exec(t, db, `CREATE TABLE entries (id bigint PRIMARY KEY)`)
			g, err := gorm.Open(postgres.Open(db.URL), &gorm.Config{})
			if err != nil {
				t.Fatal(err)
			}
			s, _ := g.DB()
			defer func() { _ = s.Close() }()
			r := newRunner(t, db.Pool)
			if _, err := execute(r, "job", func(ctx context.Context, run *jobrun.Run) error {
				return g.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
					if err := work(tx); err != nil {
						return err
					}
					return run.FenceSQL(ctx, tx.Statement.ConnPool.(jobrun.SQLTx)) // the last statement of the outermost transaction
				})
			}); err != nil {
				t.Error(err)
			}
		})
	}
}
