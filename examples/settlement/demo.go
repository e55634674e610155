package main

import (
	"context"
	"errors"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// demo is a demonstration under way.
type demo struct {
	config
	db     *database
	runner *jobrun.Runner
	out    *printer

	started, settled int // processes, and those of them that settled orders
	approved         int // re-runs
}

// demonstrate is the whole story, from an empty database to the check.
func demonstrate(ctx context.Context, c config, all []order, out *printer) (err error) {
	out.printf("Daily settlement of %s, the business date in Seoul\n", c.date)

	out.section("The database")
	db, err := openDatabase(ctx, c.databaseURL, c.keep, out)
	if err != nil {
		return err
	}
	defer func() {
		out.printf("\n")
		err = errors.Join(err, db.close(context.WithoutCancel(ctx), out))
	}()
	runner, err := newRunner(db.pool, task{Name: "demo"})
	if err != nil {
		return err
	}
	if err := runner.Migrate(ctx); err != nil {
		return err
	}
	start := time.Now()
	if err := load(ctx, db.pool, all); err != nil {
		return err
	}
	total, elsewhere := countOn(all, c.date)
	out.printf("   %s orders loaded in %s.\n", thousands(int64(len(all))), seconds(time.Since(start)))
	out.printf("   %s of them were paid on %s in Seoul. In UTC, %s of those fall on the\n"+
		"   day before: whoever takes the date from a UTC clock settles them on a wrong date.\n", thousands(total), c.date, thousands(elsewhere))

	d := &demo{config: c, db: db, runner: runner, out: out}
	out.section("The race for %s", d.key())
	out.printf("   Processes started: %d. When all are ready, one signal starts the job in each.\n\n", c.instances)
	if err := d.race(ctx, task{FailItem: c.failItem, KillAfter: c.killAfter}, names(c.instances)...); err != nil {
		return err
	}
	if c.killAfter != 0 {
		if err := d.afterKill(ctx); err != nil {
			return err
		}
	}
	if c.failItem != 0 {
		if err := d.afterFailure(ctx); err != nil {
			return err
		}
	}

	out.section("A latecomer")
	out.printf("   One more process starts the same job now that it is done.\n\n")
	if err := d.race(ctx, task{}, "latecomer"); err != nil {
		return err
	}
	if err := d.records(ctx); err != nil {
		return err
	}
	return d.check(ctx)
}

// key is that of the run.
func (d *demo) key() string { return jobrun.Job{Name: jobName}.Key(d.date) }

// race lets processes with these names do a task, and counts.
func (d *demo) race(ctx context.Context, t task, names ...string) error {
	t.Date = d.date
	settled, err := race(ctx, d.db, t, names, d.out)
	d.started, d.settled = d.started+len(names), d.settled+settled
	return err
}

// records shows what jobrun has recorded, with the history if there is one.
func (d *demo) records(ctx context.Context) error {
	d.out.section("What is on record: table batch_job_run, times in %s", seoul)
	records, err := d.runner.List(ctx, jobrun.Filter{Job: jobName})
	if err != nil {
		return err
	}
	printRuns(d.out, records)
	if d.approved == 0 {
		return nil
	}
	history, err := d.runner.History(ctx, d.key())
	if err != nil {
		return err
	}
	d.out.printf("\n   Its history: tables batch_job_attempt and batch_job_action\n\n")
	printHistory(d.out, history)
	return nil
}

// check shows what was settled, and returns errNotEqual unless it is what it should be.
func (d *demo) check(ctx context.Context) error {
	d.out.section("What was settled on %s, in won", d.date)
	totals, err := settledTotals(ctx, d.db.pool, d.date)
	if err != nil {
		return err
	}
	printTotals(d.out, totals)

	d.out.section("The check")
	differences, err := compare(ctx, d.db.pool, d.date)
	if err != nil {
		return err
	}
	twice, err := settledTwice(ctx, d.db.pool)
	if err != nil {
		return err
	}
	d.out.printf("   processes that settled: %d of %d\n", d.settled, d.started)
	if d.approved > 0 {
		d.out.printf("   re-runs that were approved: %d\n", d.approved)
	}
	d.out.printf("   orders settled twice: %s\n", thousands(twice))
	d.out.printf("   totals equal the independent SQL sum: %s\n", yesNo(len(differences) == 0))
	for _, line := range differences {
		d.out.printf("     %s\n", line)
	}
	if d.settled != 1+d.approved || twice > 0 || len(differences) > 0 {
		return errNotEqual
	}
	return nil
}
