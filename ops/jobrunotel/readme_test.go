package jobrunotel_test

import (
	"context"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/ops/jobrunotel"
)

// What the README shows.
func readme(settleDate func(context.Context, jobrun.Date) error) jobrun.Job {
	job := jobrun.Job{Name: "daily-settlement", Func: jobrunotel.Trace(func(ctx context.Context, run *jobrun.Run) error {
		return settleDate(ctx, run.Date())
	})}
	return job
}

var _ = readme
