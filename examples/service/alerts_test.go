package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// posts is a webhook that keeps what it was sent, and refuses the first so many.
type posts struct {
	mu     sync.Mutex
	refuse int
	all    []string // event and key of the run
	ids    []string
}

func (p *posts) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var a alert
	body, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(body, &a)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ids = append(p.ids, r.Header.Get("Idempotency-Key"))
	if p.refuse > 0 {
		p.refuse--
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	p.all = append(p.all, a.Event+" "+a.Key)
}

// version is an instance of the service that schedules these jobs.
func version(t *testing.T, db *pgtest.DB, hook string, jobs ...jobrun.Job) *alerter {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	r, err := jobrun.New(db.Pool, time.UTC, &jobrun.Options{Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	for _, job := range jobs {
		if _, err := r.Schedule(t.Context(), cron.New(cron.WithLocation(time.UTC)), "0 1 * * *", job); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Pool.Exec(t.Context(), alertTables); err != nil {
		t.Fatal(err)
	}
	return newAlerter(r, db.Pool, hook, log)
}

// During a deployment one version does not know the jobs of the other: that their
// dates are not listed by it does not mean that they are not missed any more.
func TestAlertsOfTwoVersionsSideBySide(t *testing.T) {
	t.Parallel()
	db, hook := pgtest.New(t), &posts{}
	server := httptest.NewServer(hook)
	defer server.Close()
	job := jobrun.Job{Name: "new-report", Func: func(context.Context, *jobrun.Run) error { return nil }}
	before, after := version(t, db, server.URL), version(t, db, server.URL, job)
	today := after.runner.Today()
	for _, d := range []int{-3, -1, 0} {
		if _, err := after.runner.RunDate(t.Context(), job, today.AddDays(d)); err != nil {
			t.Fatal(err)
		}
	}
	hole := job.Key(today.AddDays(-2))
	looks := func() {
		t.Helper()
		for range 3 {
			for _, a := range []*alerter{after, before} {
				if err := a.look(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	looks()
	if want := []string{"problem " + hole}; !slices.Equal(hook.all, want) {
		t.Errorf("%q, want %q", hook.all, want)
	}
	if _, err := after.runner.RunDate(t.Context(), job, today.AddDays(-2)); err != nil {
		t.Fatal(err)
	}
	looks()
	if want := []string{"problem " + hole, "resolved " + hole}; !slices.Equal(hook.all, want) {
		t.Errorf("%q, want %q", hook.all, want)
	}
}

// A job whose calendar fails hides no problem of the others, and ends none.
func TestAlertsWithACalendarThatFails(t *testing.T) {
	t.Parallel()
	db, hook := pgtest.New(t), &posts{}
	server := httptest.NewServer(hook)
	defer server.Close()
	failure := errors.New("no paper")
	report := jobrun.Job{Name: "report", Func: func(context.Context, *jobrun.Run) error { return failure }}
	broken := jobrun.Job{Name: "broken", Func: report.Func, Calendar: func(jobrun.Date) bool { panic("no holidays loaded") }}
	a := version(t, db, server.URL, report, broken)
	today := a.runner.Today()
	var want []string
	for _, job := range []jobrun.Job{broken, report} {
		for _, d := range []jobrun.Date{today.AddDays(-1), today} {
			if _, err := a.runner.RunDate(t.Context(), job, d); !errors.Is(err, failure) {
				t.Fatal(err)
			}
			want = append(want, "problem "+job.Key(d))
		}
	}
	for range 2 {
		if err := a.look(t.Context()); err == nil {
			t.Error("the error is not told")
		}
	}
	slices.Sort(hook.all)
	if !slices.Equal(hook.all, want) {
		t.Errorf("%q, want %q", hook.all, want)
	}
}

// A repeated post has the key of the first one; the next event about the same attempt
// has another, or the receiver would drop it.
func TestAlertsHaveKeysOfTheirOwn(t *testing.T) {
	t.Parallel()
	db, hook := pgtest.New(t), &posts{refuse: 1}
	server := httptest.NewServer(hook)
	defer server.Close()
	a := version(t, db, server.URL)
	p := problem{Kind: jobrun.ProblemStale, Key: "report:2026-09-15", Attempt: 1}
	if err := a.tell(t.Context(), alert{"problem", p, ""}); err == nil {
		t.Error("a refused post is no error")
	}
	for _, event := range []string{"problem", "problem", "resolved", "problem"} { // silent, beats again, silent again
		if err := a.tell(t.Context(), alert{event, p, ""}); err != nil {
			t.Fatal(err)
		}
	}
	if len(hook.ids) != 4 || hook.ids[0] != hook.ids[1] || hook.ids[1] == hook.ids[2] || hook.ids[1] == hook.ids[3] || hook.ids[2] == hook.ids[3] {
		t.Errorf("%q", hook.ids)
	}
}
