package ops

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/seed-ccb5b62c/jobrun"
)

// The calendar shows so many days and jobs at a time.
const (
	calendarDays = 31
	calendarJobs = 50
	runsPage     = 50
	problemsPage = 100
	itemsPage    = 20
)

// overview is what needs a person, and the calendar.
type overview struct {
	Problems       []problemLine
	NotTold        string // what cannot be told
	More           int    // problems that are not listed
	Days           []dayHead
	Jobs           []jobLine
	Before, After  string // links to other days and jobs; "": none
	MoreJobs, Back string
}

type problemLine struct {
	jobrun.Problem
	Link, Note string
}

type dayHead struct {
	Date    jobrun.Date
	Weekend bool
	Month   string // of the first day of each
}

type jobLine struct {
	Name, Link string
	Cells      []cell
}

// cell is a job's runs on a day.
type cell struct {
	badge
	Link  string
	Count int // of a job that runs several times a day
	Date  jobrun.Date
}

func (p *pages) overview(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	to := s.Today
	if text := query.Get("to"); text != "" {
		var err error
		if to, err = jobrun.ParseDate(text); err != nil {
			return usage("to: %v", err)
		}
	}
	from := to.AddDays(1 - calendarDays)
	if !from.IsValid() {
		return usage("to is %s: too early", to)
	}
	var o overview
	if before := from.AddDays(-1); before.AddDays(1 - calendarDays).IsValid() {
		o.Before = "?to=" + before.String()
	}
	if to.Compare(s.Today) < 0 {
		o.After = "?to=" + to.AddDays(calendarDays).String()
	}
	problems, err := p.runner.Attention(ctx, p.opts.Attention, p.opts.Jobs...)
	if err != nil {
		if _, answers := p.runner.List(ctx, jobrun.Filter{Limit: 1}); answers != nil {
			return err
		}
		o.NotTold = s.T("nothing told")
		if _, ok := err.(interface{ Unwrap() []error }); ok { // of some jobs only: the rest is there
			o.NotTold = s.T("not told")
		}
		p.opts.Logger.ErrorContext(ctx, "admin page: what needs a person", "err", err)
	}
	slices.SortStableFunc(problems, func(a, b jobrun.Problem) int {
		return slices.Index(severity, a.Kind) - slices.Index(severity, b.Kind)
	})
	type place struct {
		job  string
		date jobrun.Date
	}
	wrong := map[place]jobrun.ProblemKind{} // the worst of each
	for _, problem := range problems {
		at := place{problem.Job, problem.Date}
		if _, worse := wrong[at]; !worse && problem.Kind != jobrun.ProblemAttempt { // which was followed by another
			wrong[at] = problem.Kind
		}
		s.Refresh = 30
		if len(o.Problems) == problemsPage {
			o.More++
			continue
		}
		note := note(s.words, problem.Record)
		if note == "" {
			note = s.T(string(problem.Kind))
		}
		o.Problems = append(o.Problems, problemLine{problem, runLink(problem.Key), note})
	}
	names, err := p.runner.Jobs(ctx)
	if err != nil {
		return err
	}
	for _, job := range p.jobs() {
		if job.Validate() == nil { // else there can be no run of it
			names = append(names, job.Name)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	first, _ := slices.BinarySearch(names, query.Get("job"))
	if first > 0 {
		o.Back = "?to=" + to.String() + "&job=" + url.QueryEscape(names[max(0, first-calendarJobs)])
	}
	if names = names[first:]; len(names) > calendarJobs {
		o.MoreJobs = "?to=" + to.String() + "&job=" + url.QueryEscape(names[calendarJobs])
		names = names[:calendarJobs]
	}
	days, err := p.runner.Days(ctx, from, to, names...)
	if err != nil {
		return err
	}
	there := map[place]jobrun.Day{}
	for _, d := range days {
		there[place{d.Job, d.Date}] = d
	}
	for d := from; d.Compare(to) <= 0; d = d.AddDays(1) {
		head := dayHead{Date: d, Weekend: d.Weekday() == time.Saturday || d.Weekday() == time.Sunday}
		if d == from && d.AddDays(3).Month == d.Month || d.Day == 1 { // else there is no room for it
			head.Month = fmt.Sprintf("%d-%02d", d.Year, int(d.Month))
		}
		o.Days = append(o.Days, head)
	}
	for _, name := range names {
		line := jobLine{Name: name, Link: "runs?job=" + url.QueryEscape(name)}
		for _, head := range o.Days {
			key := jobrun.Job{Name: name}.Key(head.Date)
			c := cellOf(there[place{name, head.Date}], wrong[place{name, head.Date}])
			c.Date = head.Date
			switch {
			case c.Count > 1:
				c.Link = fmt.Sprintf("runs?job=%s&from=%s&to=%s", url.QueryEscape(name), head.Date, head.Date)
			case c.Sign != "":
				c.Link = runLink(key)
			}
			if c.Class == "busy" {
				s.Refresh = 5
			}
			line.Cells = append(line.Cells, c)
		}
		o.Jobs = append(o.Jobs, line)
	}
	s.Title, s.Body = s.T("overview"), o
	return p.render(w, http.StatusOK, "overview", s)
}

// statuses are those that runs can be filtered by.
var statuses = []jobrun.Status{jobrun.Running, jobrun.Succeeded, jobrun.Failed, jobrun.Skipped}

// cellOf is the worst of the runs of a day, or what is wrong with it.
func cellOf(d jobrun.Day, wrong jobrun.ProblemKind) (c cell) {
	for _, n := range d.Runs {
		c.Count += n
	}
	if wrong != "" {
		c.badge = mark(wrong)
		return c
	}
	for _, status := range []jobrun.Status{jobrun.Failed, jobrun.Running, jobrun.Succeeded, jobrun.Skipped} {
		if d.Runs[status] > 0 {
			c.badge = mark(status)
			return c
		}
	}
	if c.Count > 0 {
		c.badge = mark("UNKNOWN")
	}
	return c
}

func runLink(key string) string { return "run?key=" + url.QueryEscape(key) }

// runList is a page of runs.
type runList struct {
	Job, From, To string
	Status        []statusChoice
	Runs          []runLine
	Next, First   string // links
}

type statusChoice struct {
	jobrun.Status
	Chosen bool
}

type runLine struct {
	jobrun.Record
	Badges                  []badge
	Link, Took, Items, Note string
}

func (p *pages) runs(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	f := jobrun.Filter{Job: strings.TrimSpace(query.Get("job")), After: query.Get("after"), Limit: runsPage}
	var err error
	if f.From, f.To, err = dates(query.Get("from"), query.Get("to")); err != nil {
		return usage("%s", strings.TrimPrefix(err.Error(), "--"))
	}
	if f.From.IsValid() && f.To.IsValid() && f.To.Compare(f.From) < 0 {
		return usage("from %s to %s: want the earlier date first", f.From, f.To)
	}
	for _, status := range query["status"] {
		if !slices.Contains(statuses, jobrun.Status(status)) {
			return usage("status is %q, allowed: %q", status, statuses)
		}
	}
	l := runList{Job: f.Job, From: query.Get("from"), To: query.Get("to")}
	for _, status := range statuses {
		chosen := slices.Contains(query["status"], string(status))
		if l.Status = append(l.Status, statusChoice{status, chosen}); chosen {
			f.Status = append(f.Status, status)
		}
	}
	runs, err := p.runner.List(ctx, f)
	if err != nil {
		return err
	}
	for _, rec := range runs {
		l.Runs = append(l.Runs, runLine{rec, badges(rec, nil), runLink(rec.Key), took(rec), s.items(rec.ItemsProcessed, rec.ItemsFailed), note(s.words, rec)})
		if rec.Status == jobrun.Running {
			s.Refresh = 5
		}
	}
	if query.Has("after") {
		query.Del("after")
		l.First = "?" + query.Encode()
	}
	if len(runs) == runsPage {
		query.Set("after", runs[len(runs)-1].Key)
		l.Next = "?" + query.Encode()
	}
	s.Title, s.Body = s.T("runs"), l
	return p.render(w, http.StatusOK, "runs", s)
}

// oneRun is a run with all that is known of it.
type oneRun struct {
	jobrun.Record
	Facts       [][2]string
	Stale       bool
	Elapsed     time.Duration // of a RUNNING one
	Typical     time.Duration
	Done        int64 // items in the ledger
	ItemsFailed int64
	FailedItems []jobrun.FailedItem
	NextItems   string // link
	Badges      []badge
	Approved    bool
	NotOurs     bool // the service has no such job
	History     []historyLine
	Actions     []actionLink
}

type historyLine struct {
	At                   time.Time
	What, Who, Note, Why string
	badge
	Person bool
}

type actionLink struct{ Do, Link string }

func (p *pages) run(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	key := r.URL.Query().Get("key")
	rec, stale, err := look(ctx, p.runner, key)
	if errors.Is(err, jobrun.ErrNotFound) {
		rec, err = jobrun.Record{Key: key}, nil
	}
	if err != nil {
		return err
	}
	one := oneRun{Record: rec, Stale: stale != nil, Badges: badges(rec, stale), Approved: !rec.ApprovedAt.IsZero()}
	one.NotOurs = one.Approved && len(p.jobs()) > 0 && !p.has(rec.Job)
	history, err := p.runner.History(ctx, key)
	if err != nil && !errors.Is(err, jobrun.ErrNotFound) {
		return err
	}
	if rec.Status == "" && len(history) == 0 && !p.due(ctx, key) {
		return p.slots(ctx, w, key)
	}
	if rec.Status != "" {
		one.Facts = s.facts(rec, stale)
		if one.Done, one.ItemsFailed, err = p.runner.CountItems(ctx, key); err == nil && one.ItemsFailed > 0 {
			one.FailedItems, err = p.runner.FailedItems(ctx, key, r.URL.Query().Get("items"), itemsPage)
			if len(one.FailedItems) == itemsPage {
				one.NextItems = runLink(key) + "&items=" + url.QueryEscape(one.FailedItems[itemsPage-1].Item)
			}
		}
		if err != nil {
			return err
		}
	}
	for _, h := range slices.Backward(history) {
		one.History = append(one.History, s.historyLine(h, rec))
	}
	if rec.Status == jobrun.Running {
		s.Refresh = 5
		if !rec.StartedAt.IsZero() { // another program may have written an infinite one
			one.Elapsed = max(0, time.Since(rec.StartedAt)) // by two clocks
		}
		if stale != nil {
			one.Typical = stale.Typical
		}
	}
	if !rec.ApprovedAt.IsZero() {
		s.Refresh = 5
	}
	for _, do := range possible(rec) {
		one.Actions = append(one.Actions, actionLink{do, "confirm?do=" + do + "&key=" + url.QueryEscape(key)})
	}
	s.Title, s.Body = key, one
	if done := r.URL.Query().Get("done"); slices.Contains(acts, done) && justDone(lastAction(history), done, s.Actor) { // else it is an old link
		s.Done = s.T("done " + done)
	}
	return p.render(w, http.StatusOK, "run", s)
}

// badges are the status of a run, and what is to come of it.
func badges(rec jobrun.Record, stale *jobrun.StaleRun) (all []badge) {
	if rec.Status != "" {
		all = append(all, mark(rec.Status))
	}
	switch {
	case stale != nil:
		all = append(all, mark(jobrun.ProblemStale))
	case !rec.ApprovedAt.IsZero():
		all = append(all, mark(jobrun.ProblemApproved))
	case !rec.NextAttemptAt.IsZero():
		all = append(all, mark(jobrun.ProblemRetrying))
	}
	return all
}

// slots sends a browser that asks for a job's date to the runs of that day, if there are
// some: those of a job that runs several times a day have keys of their own.
func (p *pages) slots(ctx context.Context, w http.ResponseWriter, key string) error {
	name, label, _ := strings.Cut(key, ":")
	date, err := jobrun.ParseDate(label)
	if err != nil {
		return jobrun.ErrNotFound
	}
	runs, err := p.runner.List(ctx, jobrun.Filter{Job: name, From: date, To: date, Limit: 2})
	switch {
	case errors.As(err, new(*jobrun.InvalidError)) || err == nil && len(runs) == 0:
		return jobrun.ErrNotFound
	case err != nil:
		return err
	case len(runs) == 1:
		redirect(w, runLink(runs[0].Key), http.StatusSeeOther)
	default:
		redirect(w, fmt.Sprintf("runs?job=%s&from=%s&to=%[2]s", url.QueryEscape(name), date), http.StatusSeeOther)
	}
	return nil
}

// due reports whether a key without a run is one that a person may skip: that of a
// date that a known job misses.
func (p *pages) due(ctx context.Context, key string) bool {
	name, label, _ := strings.Cut(key, ":")
	date, err := jobrun.ParseDate(label)
	if err != nil {
		return false
	}
	for _, job := range p.jobs() {
		if job.Name == name && job.Every == 0 {
			missed, _ := p.runner.Missed(ctx, job, date, date)
			return len(missed) == 1
		}
	}
	return false
}

// facts are the lines of describe, with names in the reader's language.
func (w words) facts(rec jobrun.Record, stale *jobrun.StaleRun) [][2]string {
	lines := describe(w, rec, stale)
	for i := range lines {
		name := lines[i][0]
		if name == "reason" {
			name = "why skipped" // "reason" is the label of a form
		}
		first, size := utf8.DecodeRuneInString(w.T(name))
		lines[i][0] = string(unicode.ToUpper(first)) + w.T(name)[size:]
	}
	return lines[2:] // key and status are the page's head
}

// items is the counts of an attempt.
func (w words) items(processed, failed int64) string {
	if failed == 0 {
		return items(processed, 0)
	}
	return fmt.Sprintf(w.T("%d (%d failed)"), processed, failed)
}

func (w words) historyLine(h jobrun.HistoryEntry, now jobrun.Record) historyLine {
	if a := h.Action; a != nil {
		l := historyLine{At: h.At, Person: true, What: w.T(h.Kind), Who: a.By + " (" + w.T("role") + " " + h.DBUser + ")", Why: a.Reason}
		if a.Force {
			l.What += ", Force"
		}
		if a.ResetItems {
			l.What += ", " + w.T("items reset")
		}
		if l.Note = w.T("was") + " " + string(h.Previous); h.Previous == "" {
			l.Note = w.T("there was no run")
		}
		return l
	}
	l := historyLine{At: h.At, What: w.T("attempt") + " " + strconv.Itoa(h.Attempt), Who: h.WorkerID, Why: h.Error, badge: mark(h.Outcome), Note: string(h.Trigger)}
	if h.Attempt == 0 {
		l.What, l.Note = w.T("not executed"), ""
		return l
	}
	if h.Trigger == "" {
		l.Note = w.T(source(h, now))
	}
	if !h.FinishedAt.IsZero() {
		l.Note += ", " + short(h.FinishedAt.Sub(h.At))
	}
	if h.ItemsProcessed > 0 || h.ItemsFailed > 0 {
		l.Note += ", " + fmt.Sprintf(w.T("%s items"), w.items(h.ItemsProcessed, h.ItemsFailed))
	}
	return l
}
