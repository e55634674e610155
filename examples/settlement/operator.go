package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// afterKill is what a person does about the run of a process that was killed.
func (d *demo) afterKill(ctx context.Context) error {
	d.out.section("The winner was killed")
	d.out.printf("   Its run is left RUNNING, and age never starts it again: a person looks at the\n"+
		"   evidence, which jobrun has as soon as the lease of %s has passed, and decides.\n\n", shortLease)
	stale, err := d.stale(ctx)
	if err != nil {
		return err
	}
	printStale(d.out, stale)

	d.out.printf("\n")
	a := jobrun.Action{By: "operator", Reason: "the process was killed"}
	rec, err := d.runner.MarkFailed(ctx, stale.Record, a)
	if err != nil {
		return err
	}
	d.out.say(a.By, "MarkFailed: "+a.Reason)
	return d.rerun(ctx, rec, "settle the rest", task{Rerun: true, FailItem: d.failItem})
}

// afterFailure is what a person does about a run in which one order failed.
func (d *demo) afterFailure(ctx context.Context) error {
	d.out.section("One order failed")
	rec, err := d.runner.Get(ctx, d.key())
	if err != nil {
		return err
	}
	failed, err := d.runner.FailedItems(ctx, d.key(), "", 1000)
	if err != nil {
		return err
	}
	d.out.printf("   The run is %s. All orders are settled but those that failed:\n\n", rec.Status)
	printFailed(d.out, failed)
	if rec.Status != jobrun.Failed || len(failed) != 1 || failed[0].Item != (order{ID: d.failItem}).key() {
		return fmt.Errorf("%w: order %d should have failed, no other, and the run with it", errNotEqual, d.failItem)
	}

	d.out.printf("\n")
	return d.rerun(ctx, rec, "the account is open again", task{Rerun: true})
}

// rerun approves one more execution of the run, which another process does.
func (d *demo) rerun(ctx context.Context, rec jobrun.Record, why string, t task) error {
	a := jobrun.Action{By: "operator", Reason: why}
	if _, err := d.runner.ApproveRerun(ctx, rec, a); err != nil {
		return err
	}
	d.approved++
	d.out.say(a.By, "ApproveRerun: "+a.Reason)
	return d.race(ctx, t, "re-run")
}

// stale waits until jobrun lists the run of the process that is gone.
func (d *demo) stale(ctx context.Context) (run jobrun.StaleRun, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("the killed process left no run that is stale"))
	defer cancel()
	err = waitFor(ctx, func() (bool, error) {
		runs, err := d.runner.Stale(ctx)
		if len(runs) > 0 { // there is no other run in this schema
			run = runs[0]
		}
		return len(runs) > 0, err
	})
	return run, err
}
