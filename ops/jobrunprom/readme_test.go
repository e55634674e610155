package jobrunprom_test

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/ops/jobrunprom"
)

// What the README shows.
func readme(pool *pgxpool.Pool, zone *time.Location, job jobrun.Job) error {
	metrics := jobrunprom.New(nil)
	runner, err := jobrun.New(pool, zone, &jobrun.Options{OnEvent: metrics.OnEvent})
	if err != nil {
		return err
	}
	metrics.Watch(runner, job) // the jobs whose missed dates and last success are told
	prometheus.MustRegister(metrics)
	return nil
}

var _ = readme
