package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

// withFaults is settle with what the flags want to go wrong. The job knows nothing of it.
func withFaults(t task, runner *jobrun.Runner) settleFunc {
	work := settle
	if t.FailItem != 0 {
		work = failItem(t.FailItem, work)
	}
	if t.KillAfter != 0 {
		work = killAfter(t.KillAfter, runner, work)
	}
	return work
}

// failItem is work that does not succeed with one order. It fails after the rows
// of the chunk are written, so that they have to go again.
func failItem(id int64, work settleFunc) settleFunc {
	return func(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) error {
		if err := work(ctx, tx, date, chunk); err != nil {
			return err
		}
		for _, o := range chunk {
			if o.ID == id {
				return fmt.Errorf("the account of %s is closed (simulated)", o.Merchant)
			}
		}
		return nil
	}
}

// killAfter is work in whose middle this process is killed: once n orders are
// committed, with a chunk written and its transaction open.
func killAfter(n int64, runner *jobrun.Runner, work settleFunc) settleFunc {
	return func(ctx context.Context, tx pgx.Tx, date jobrun.Date, chunk []order) error {
		var committed int64 // of this date; nothing is written yet in this transaction
		err := tx.QueryRow(ctx, `SELECT count(*) FROM settlement_item WHERE business_date = $1`, date).Scan(&committed)
		if err != nil {
			return err
		}
		if err := work(ctx, tx, date, chunk); err != nil || committed < n {
			return err
		}
		if err := beaten(ctx, runner, date, committed); err != nil {
			return err
		}
		fmt.Printf("%s orders committed, %s more written and not committed: kill -9 %d\n", thousands(committed), thousands(int64(len(chunk))), os.Getpid())
		self, err := os.FindProcess(os.Getpid())
		if err != nil {
			return err
		}
		if err := self.Kill(); err != nil {
			return err
		}
		select {} // the signal is on its way
	}
}

// beaten waits for a heartbeat that tells of what is committed. A real job runs
// for longer than its first one, so that a person finds it among the evidence.
func beaten(ctx context.Context, runner *jobrun.Runner, date jobrun.Date, committed int64) error {
	return waitFor(ctx, func() (bool, error) {
		rec, err := runner.Get(ctx, jobrun.Job{Name: jobName}.Key(date))
		return rec.ItemsProcessed >= committed, err
	})
}

// waitFor asks again and again until the answer is yes.
func waitFor(ctx context.Context, ask func() (bool, error)) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
