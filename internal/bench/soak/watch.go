package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// sample is how everything is at a moment.
type sample struct {
	at          time.Duration // since the start
	heap        float64       // MB, of the worker that has most
	goroutines  float64       // of the worker that has most
	connections float64       // of all workers
	runs        float64
	table       float64 // bytes of the tables of runs and attempts, for each run
	index       float64 // bytes of their indexes, for each run
	dead        float64 // rows of both that wait for autovacuum, in % of those that live
	hot         float64 // % of the updates of attempts since the start
}

// series are what is drawn and judged, by their names.
var series = []struct {
	name  string
	value func(sample) float64
	slack float64 // how far the median of the last third may be above that of the middle one; 0: it is not judged
	fine  float64 // below it nothing is judged
}{
	{"heap of a worker, MB", func(s sample) float64 { return s.heap }, 1.15, 0},
	{"goroutines of a worker", func(s sample) float64 { return s.goroutines }, 1.15, 0},
	{"connections of all workers", func(s sample) float64 { return s.connections }, 1.15, 0},
	{"dead rows, % of live ones", func(s sample) float64 { return s.dead }, 1.15, 20}, // autovacuum comes when they are 20 (autovacuum_vacuum_scale_factor)
	{"bytes of tables per run", func(s sample) float64 { return s.table }, 0, 0},      // a table grows by many pages at once where many wait for one
	{"bytes of indexes per run", func(s sample) float64 { return s.index }, 1.05, 0},
}

// watch looks every 5 seconds until the time has come.
func watch(ctx context.Context, c config, pool *pgxpool.Pool, workers []*worker) (all []sample, err error) {
	start := time.Now()
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	fmt.Println("minute  heap MB  goroutines  connections    runs  table B/run  index B/run  dead %   HOT %")
	for time.Since(start) < c.time {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		s := sample{at: time.Since(start)}
		for _, w := range workers {
			h, err := w.ask()
			if err != nil {
				return nil, fmt.Errorf("a worker does not answer: %w", err)
			}
			s.heap, s.goroutines = max(s.heap, float64(h.Heap)/1e6), max(s.goroutines, float64(h.Goroutines))
		}
		err := pool.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()),
				runs, (pg_table_size('batch_job_run') + pg_table_size('batch_job_attempt')) / greatest(runs, 1)::float8,
				(pg_indexes_size('batch_job_run') + pg_indexes_size('batch_job_attempt')) / greatest(runs, 1)::float8,
				(SELECT 100.0 * sum(n_dead_tup) / greatest(sum(n_live_tup), 1) FROM pg_stat_user_tables WHERE relname IN ('batch_job_run', 'batch_job_attempt'))::float8,
				(SELECT 100.0 * n_tup_hot_upd / greatest(n_tup_upd, 1) FROM pg_stat_user_tables WHERE relname = 'batch_job_attempt')::float8
			FROM (SELECT count(*) AS runs FROM batch_job_run) AS r`).Scan(&s.connections, &s.runs, &s.table, &s.index, &s.dead, &s.hot)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
		if len(all)%12 == 0 {
			fmt.Printf("%6.0f  %7.1f  %10.0f  %11.0f  %6.0f  %11.0f  %11.0f  %6.1f  %6.1f\n", s.at.Minutes(), s.heap, s.goroutines, s.connections, s.runs, s.table, s.index, s.dead, s.hot)
		}
	}
	return all, nil
}

// judgeRuns asks the tables whether every slot of the time was executed to its end once.
func judgeRuns(ctx context.Context, c config, pool *pgxpool.Pool) error {
	var runs, attempts, retried, slots, unfinished, twice, missing int
	err := pool.QueryRow(ctx, `
		WITH slot AS (SELECT scheduled_for FROM batch_job_run GROUP BY 1)
		SELECT (SELECT count(*) FROM batch_job_run), (SELECT count(*) FROM batch_job_attempt), (SELECT count(*) FROM batch_job_run WHERE attempt > 1),
			(SELECT count(*) FROM slot), (SELECT count(*) FROM batch_job_run WHERE status <> 'SUCCEEDED'),
			(SELECT count(*) FROM (SELECT FROM execution WHERE finished GROUP BY job_key HAVING count(*) > 1) AS e)
				+ (SELECT count(*) FROM (SELECT FROM execution GROUP BY job_key, attempt HAVING count(*) > 1) AS e),
			(SELECT count(*) FROM generate_series((SELECT min(scheduled_for) FROM slot), (SELECT max(scheduled_for) FROM slot), '1 min') AS at,
				generate_series(0, $1 - 1) AS n
				WHERE NOT EXISTS (SELECT FROM batch_job_run AS r JOIN execution AS e USING (job_key)
					WHERE r.job_name = 'job-' || to_char(n, 'FM000') AND r.scheduled_for = at AND e.finished))`, c.jobs).
		Scan(&runs, &attempts, &retried, &slots, &unfinished, &twice, &missing)
	if err != nil {
		return err
	}
	fmt.Printf("\n%d runs of %d jobs in %d minutes, %d attempts, %d runs retried; not SUCCEEDED %d, twice %d, missing %d\n", runs, c.jobs, slots, attempts, retried, unfinished, twice, missing)
	if unfinished+twice+missing > 0 || runs != slots*c.jobs || retried == 0 {
		return errors.New("runs: a violation")
	}
	return nil
}

// judgeGrowth compares the last third of the time with the middle one: the first is that
// of filling pools and first pages. Medians are compared, as what grows raises them, and a
// look that falls into the first second of a minute sees more of everything.
func judgeGrowth(all []sample) (err error) {
	third := len(all) / 3
	fmt.Printf("\n| | first third | middle third | last third |\n|---|---|---|---|\n")
	for _, s := range series {
		var medians, greatest [3]float64
		for i := range medians {
			var values []float64
			for _, sample := range all[i*third : (i+1)*third] {
				values = append(values, s.value(sample))
			}
			slices.Sort(values)
			medians[i], greatest[i] = values[len(values)/2], values[len(values)-1]
		}
		fmt.Printf("| %s: median, at most |", s.name)
		for i := range medians {
			fmt.Printf(" %.4g, %.4g |", medians[i], greatest[i])
		}
		fmt.Println()
		if s.slack > 0 && medians[2] > s.fine && medians[2] > medians[1]*s.slack {
			err = errors.Join(err, fmt.Errorf("%s grew from %.4g to %.4g", s.name, medians[1], medians[2]))
		}
	}
	last := all[len(all)-1]
	fmt.Printf("| HOT, %% of the updates of attempts | | | %.4g |\n", last.hot)
	if last.hot < 99 {
		err = errors.Join(err, fmt.Errorf("heartbeats do not stay HOT: %.4g %%", last.hot))
	}
	return err
}

// chart writes each series over the minutes, without the first tenth, in which there is
// hardly a run to divide by.
func chart(name string, all []sample) error {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	canvas := vgsvg.New(20*vg.Centimeter, 16*vg.Centimeter)
	tiles := draw.Tiles{Rows: len(series), Cols: 1, PadY: vg.Centimeter / 3, PadRight: vg.Centimeter / 2, PadLeft: vg.Centimeter / 4, PadTop: vg.Centimeter / 4, PadBottom: vg.Centimeter / 4}
	plots := make([][]*plot.Plot, len(series))
	for i, s := range series {
		p := plot.New()
		p.Title.Text, p.Y.Min = s.name, 0
		if i == len(series)-1 {
			p.X.Label.Text = "minutes"
		}
		var points plotter.XYs
		for _, sample := range all[len(all)/10:] {
			points = append(points, plotter.XY{X: sample.at.Minutes(), Y: s.value(sample)})
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return err
		}
		p.Add(line)
		p.Y.Min = 0
		plots[i] = []*plot.Plot{p}
	}
	for i, row := range plot.Align(plots, tiles, draw.New(canvas)) {
		plots[i][0].Draw(row[0])
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	_, err = canvas.WriteTo(f)
	return errors.Join(err, f.Close())
}
