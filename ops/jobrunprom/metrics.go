// Package jobrunprom shows the runs of jobrun to Prometheus.
//
//	metrics := jobrunprom.New(nil)
//	runner, err := jobrun.New(pool, zone, &jobrun.Options{OnEvent: metrics.OnEvent})
//	...
//	metrics.Watch(runner, settlement, reminders)
//	prometheus.MustRegister(metrics)
//
// What happened in this process comes from OnEvent, what needs a person and the last
// success of each job from the database, so that a run whose process was killed and a
// date that nothing started are seen too: every instance tells the same of those. The
// label of the job is job_name, because Prometheus puts a label job of its own on all
// that it reads.
package jobrunprom

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-ccb5b62c/jobrun"
)

// Options are the settings of a Metrics. nil or zero fields: the defaults.
type Options struct {
	Attention *jobrun.AttentionOptions // what counts as a problem; FailedSince is of no use here
	Buckets   []float64                // upper bounds of the attempts' durations in seconds; nil: 1 s to 4 h
	MaxAge    time.Duration            // how long an answer of the database is shown again; 0: 15 s
	Timeout   time.Duration            // of the questions of one scrape; 0: 5 s
	Logger    *slog.Logger             // nil: slog.Default()
}

// Metrics is a [prometheus.Collector]. It is safe for concurrent use.
type Metrics struct {
	opts Options

	runs, processed, failed *prometheus.CounterVec
	running                 *prometheus.GaugeVec
	duration                *prometheus.HistogramVec
	problems, success, age  *prometheus.Desc
	up, judged              *prometheus.Desc

	mu     sync.Mutex
	open   map[string]jobrun.Record // that run in this process, by key
	runner *jobrun.Runner
	jobs   []jobrun.Job
	asked  time.Time
	answer facts
}

// facts are the answers of the database.
type facts struct {
	ok       bool // it has answered to the end
	judged   bool // the missed dates of every job
	problems map[problem]int
	success  map[string]time.Time // by job
}

type problem struct{ kind, job string }

// newest is how many dates are looked at for the last success: one that was run too
// early, by a slip, does not hide the others.
const newest = 50

// mostOpen is how many running attempts one scrape looks up.
const mostOpen = 100

// kinds are those that a scrape shows for every job, also when there is none: an
// alert needs the zero to be over.
var kinds = []jobrun.ProblemKind{jobrun.ProblemStale, jobrun.ProblemFailed, jobrun.ProblemRetrying, jobrun.ProblemMissed, jobrun.ProblemApproved}

// New returns Metrics that have seen nothing yet.
func New(opts *Options) *Metrics {
	m := &Metrics{open: map[string]jobrun.Record{}}
	if opts != nil {
		m.opts = *opts
	}
	if m.opts.Buckets == nil {
		m.opts.Buckets = []float64{1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400}
	}
	m.opts.MaxAge = cmp.Or(m.opts.MaxAge, 15*time.Second)
	m.opts.Timeout = cmp.Or(m.opts.Timeout, 5*time.Second)
	m.opts.Logger = cmp.Or(m.opts.Logger, slog.Default())
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m.runs = counter("jobrun_attempts_total", "Attempts that ended in this process, and runs that people or the calendar ended through it.", "job_name", "status")
	m.processed = counter("jobrun_items_processed_total", "Items that attempts which ended in this process have counted as processed.", "job_name")
	m.failed = counter("jobrun_items_failed_total", "Items that attempts which ended in this process have counted as failed.", "job_name")
	m.running = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "jobrun_running_attempts", Help: "Attempts of this process that are RUNNING in the tables; one whose result could not be recorded stays so until a person decides."}, []string{"job_name"})
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "jobrun_attempt_duration_seconds", Help: "Durations of attempts that ended in this process, by the database clock.", Buckets: m.opts.Buckets,
	}, []string{"job_name", "status"})
	m.problems = prometheus.NewDesc("jobrun_problems", "Runs and dates that need a person, by what is wrong with them; the same from every instance.", []string{"kind", "job_name"}, nil)
	m.success = prometheus.NewDesc("jobrun_last_success_timestamp_seconds", "Latest end among the 50 newest dates or slots that SUCCEEDED; the same from every instance.", []string{"job_name"}, nil)
	m.age = prometheus.NewDesc("jobrun_last_success_age_seconds", "Time since jobrun_last_success_timestamp_seconds.", []string{"job_name"}, nil)
	m.judged = prometheus.NewDesc("jobrun_missed_judged", "1 if the missed dates of every job could be told, 0 if a job's Date or Calendar fails.", nil, nil)
	m.up = prometheus.NewDesc("jobrun_up", "1 if the database has answered the questions of this scrape.", nil, nil)
	return m
}

// Watch names the Runner whose tables are asked, and the jobs whose missed dates and
// last success are told; none: those registered by Runner.Schedule by then. Problems
// of runs that are there are told of every job.
func (m *Metrics) Watch(runner *jobrun.Runner, jobs ...jobrun.Job) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(jobs) == 0 {
		jobs = runner.Scheduled()
	}
	m.runner, m.jobs, m.asked = runner, jobs, time.Time{}
	for _, job := range jobs { // there from the first scrape on, so that an increase is seen
		m.runs.WithLabelValues(job.Name, string(jobrun.Succeeded))
		m.runs.WithLabelValues(job.Name, string(jobrun.Failed))
		m.running.WithLabelValues(job.Name)
	}
}

// OnEvent counts a change of a run. It is for jobrun.Options.OnEvent; who has one
// already calls it there.
func (m *Metrics) OnEvent(_ context.Context, e jobrun.Event) {
	job, status := e.Record.Job, string(e.Record.Status)
	m.mu.Lock()
	m.asked = time.Time{} // what was asked is old now
	if e.Record.Status == jobrun.Running {
		m.start(e.Record)
	} else if e.Action == nil {
		m.end(e.Record.Key)
	}
	m.mu.Unlock()
	if e.Record.Status == jobrun.Running {
		return
	}
	if e.Action != nil && e.Action.By != "" && e.Record.Status == e.Previous {
		return // an approval ends nothing
	}
	m.runs.WithLabelValues(job, status).Inc()
	if e.Action != nil || e.Previous != jobrun.Running {
		return
	}
	if strings.HasPrefix(e.Record.Error, "never started: ") { // it was not executed
		return
	}
	m.duration.WithLabelValues(job, status).Observe(e.Record.FinishedAt.Sub(e.Record.StartedAt).Seconds())
	m.processed.WithLabelValues(job).Add(float64(e.Record.ItemsProcessed))
	m.failed.WithLabelValues(job).Add(float64(e.Record.ItemsFailed))
}

// start notes an attempt that runs here; end that it does not any more. m.mu is held.
func (m *Metrics) start(rec jobrun.Record) {
	m.end(rec.Key)
	m.open[rec.Key] = rec
	m.running.WithLabelValues(rec.Job).Inc()
}

func (m *Metrics) end(key string) {
	if rec, ok := m.open[key]; ok {
		delete(m.open, key)
		m.running.WithLabelValues(rec.Job).Dec()
	}
}

// Describe implements [prometheus.Collector].
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, c := range m.counted() {
		c.Describe(to)
	}
	for _, d := range []*prometheus.Desc{m.problems, m.success, m.age, m.up, m.judged} {
		to <- d
	}
}

func (m *Metrics) counted() []prometheus.Collector {
	return []prometheus.Collector{m.runs, m.processed, m.failed, m.running, m.duration}
}

// Collect implements [prometheus.Collector]. It asks the database, at most once in
// Options.MaxAge; if that does not answer, jobrun_up is 0 and what it would have
// told is left out: no problem becomes 0 because nobody could look.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	f := m.ask()
	for _, c := range m.counted() {
		c.Collect(to)
	}
	flag := func(d *prometheus.Desc, set bool) {
		v := 0.0
		if set {
			v = 1
		}
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v)
	}
	flag(m.up, f.ok)
	if f.ok {
		flag(m.judged, f.judged)
	}
	for p, n := range f.problems {
		to <- prometheus.MustNewConstMetric(m.problems, prometheus.GaugeValue, float64(n), p.kind, p.job)
	}
	for job, at := range f.success {
		to <- prometheus.MustNewConstMetric(m.success, prometheus.GaugeValue, float64(at.UnixMicro())/1e6, job)
		to <- prometheus.MustNewConstMetric(m.age, prometheus.GaugeValue, max(0, time.Since(at).Seconds()), job)
	}
}

// ask asks the database, unless it has answered a moment ago.
func (m *Metrics) ask() facts {
	m.mu.Lock()
	runner, jobs := m.runner, m.jobs
	if runner == nil {
		m.mu.Unlock()
		return facts{}
	}
	if m.answer.ok && time.Since(m.asked) < m.opts.MaxAge {
		defer m.mu.Unlock()
		return m.answer
	}
	asked := time.Now()
	m.asked = asked
	var open []jobrun.Record
	for _, rec := range m.open {
		if open = append(open, rec); len(open) == mostOpen { // others the next time
			break
		}
	}
	m.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), m.opts.Timeout)
	defer cancel()
	f := facts{problems: map[problem]int{}, success: map[string]time.Time{}}
	found, err := runner.Attention(ctx, m.opts.Attention, jobs...)
	if f.judged = err == nil; err != nil {
		m.opts.Logger.Error("jobrun metrics: what needs a person is not told to the end", "err", err)
		_, err = runner.List(ctx, jobrun.Filter{Limit: 1}) // nil: the database answers, a job's rule fails
	}
	if err == nil { // no zero that nobody knows
		for _, job := range jobs {
			for _, kind := range kinds {
				if kind != jobrun.ProblemMissed || job.Every == 0 && f.judged {
					f.problems[problem{string(kind), job.Name}] = 0
				}
			}
		}
	}
	for _, p := range found {
		f.problems[problem{string(p.Kind), p.Job}]++
	}
	for _, job := range jobs {
		if err != nil {
			break
		}
		var last []jobrun.Record
		last, err = runner.List(ctx, jobrun.Filter{Job: job.Name, Status: []jobrun.Status{jobrun.Succeeded}, Limit: newest})
		for _, rec := range last { // by date: an older one may have succeeded later
			if rec.FinishedAt.After(f.success[job.Name]) {
				f.success[job.Name] = rec.FinishedAt
			}
		}
	}
	// An attempt that has lost its run to a person tells nothing at its end.
	for _, rec := range open {
		if err != nil {
			break
		}
		var now jobrun.Record
		now, err = runner.Get(ctx, rec.Key)
		if gone := errors.Is(err, jobrun.ErrNotFound); gone || err == nil && (now.Status != jobrun.Running || now.Attempt != rec.Attempt || now.WorkerID != rec.WorkerID) {
			err = nil
			m.mu.Lock()
			if m.open[rec.Key].Attempt == rec.Attempt {
				m.end(rec.Key)
			}
			m.mu.Unlock()
		}
	}
	if f.ok = err == nil; err != nil {
		m.opts.Logger.Error("jobrun metrics: the database was not asked to the end", "err", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.asked.Equal(asked) || m.asked.IsZero() { // else a later one has asked
		m.answer = f
	}
	return f
}
