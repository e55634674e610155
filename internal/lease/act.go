package lease

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// Act commits a person's action and returns the run after it; found is false
// when the run is not, or no longer, in a state that allows it. An earlier try
// whose answer was lost is found by its token, so that it is no conflict.
func (b *Book) Act(ctx context.Context, a store.Action, do func(context.Context, *store.Store, store.DB, store.Action) (store.Row, bool, error)) (after store.Row, found bool, err error) {
	total, each, kept := AnswerLimit, StatementLimit, borrow
	if a.ResetItems {
		total, each, kept = ResetLimit, ResetLimit, leave
	}
	ctx, cancel := context.WithTimeout(ctx, total)
	defer cancel()
	again := false
	_, err = b.repeatFor(ctx, each, kept, func(ctx context.Context, s *store.Store, conn *pgx.Conn, lock time.Duration) error {
		a.Lock = lock
		after, found, err = do(ctx, s, conn, a)
		if err == nil && !found && again { // the earlier try may have been first
			acted := false
			if acted, err = s.Acted(ctx, conn, a.Token); err == nil && acted {
				after, found, err = s.Get(ctx, conn, a.Seen.Key)
			}
		}
		again = true
		return err
	})
	return after, found, err
}
