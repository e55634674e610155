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

	"github.com/seed-ccb5b62c/jobrun"
)

// acts are the actions of people.
var acts = []string{"mark-failed", "rerun", "skip"}

// possible are the actions that the state of a run allows.
func possible(rec jobrun.Record) []string {
	switch {
	case !rec.PrunedAt.IsZero() || !rec.ApprovedAt.IsZero():
		return nil
	case rec.Status == "":
		return []string{"skip"}
	case rec.Status == jobrun.Running:
		return []string{"mark-failed"}
	case rec.Status == jobrun.Failed && rec.Job != "":
		return []string{"rerun", "skip"}
	case rec.Status == jobrun.Failed:
		return []string{"skip"}
	case (rec.Status == jobrun.Skipped || rec.Status == jobrun.Succeeded) && rec.Job != "":
		return []string{"rerun"}
	}
	return nil
}

// seen is what a person was shown of a run, as the form sends it back.
type seen struct{ Attempt, Status, Worker, Started, Finished string }

// seenOf is quoted where a text of another program could hold what a form does not send
// back as it was, such as the end of a line.
func seenOf(rec jobrun.Record) seen {
	at := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.UTC().Format(time.RFC3339Nano)
	}
	return seen{strconv.Itoa(rec.Attempt), url.QueryEscape(string(rec.Status)), url.QueryEscape(rec.WorkerID), at(rec.StartedAt), at(rec.FinishedAt)}
}

// confirmation is an action before it is taken, and after it was refused.
type confirmation struct {
	jobrun.Record
	Do, Reason   string
	Force, Reset bool
	Facts        [][2]string
	Seen         seen
	Alive        bool // RUNNING, with heartbeats
	Retries      bool // it would be tried again by itself
	Conflict     string
	Last         string // the last action of a person, beside a conflict
	Possible     bool
	Unknown      bool   // no run of this job was ever seen
	NotOurs      bool   // the service has no such job
	Wrong        string // the reason
	FormKey      string
}

func (p *pages) confirm(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	return p.question(ctx, s, w, http.StatusOK, confirmation{Do: query.Get("do"), Record: jobrun.Record{Key: query.Get("key")}})
}

// question shows what there is now, what is about to happen, and the form.
func (p *pages) question(ctx context.Context, s *shell, w http.ResponseWriter, code int, c confirmation) error {
	if !slices.Contains(acts, c.Do) {
		return usage("do is %q, allowed: %q", c.Do, acts)
	}
	rec, stale, err := look(ctx, p.runner, c.Key)
	if errors.Is(err, jobrun.ErrNotFound) && c.Do == "skip" {
		rec, err = jobrun.Record{Key: c.Key}, nil
	}
	if err != nil {
		return err
	}
	if c.Record = rec; rec.Status != "" {
		c.Facts = s.facts(rec, stale)
	}
	if c.Possible = slices.Contains(possible(rec), c.Do); !c.Possible && c.Conflict == "" {
		c.Conflict = s.T("not possible")
	}
	if c.Conflict != "" { // what was ticked was meant for what is no longer there
		c.Force, c.Reset = false, false
	}
	name, label, _ := strings.Cut(c.Key, ":")
	if rec.Status == "" {
		if _, err := jobrun.ParseDate(label); err != nil { // nothing that a date of a job could have
			return jobrun.ErrNotFound
		}
		names, err := p.runner.Jobs(ctx)
		if err != nil {
			return err
		}
		c.Unknown = !slices.Contains(names, name) && !p.has(name)
	}
	c.NotOurs = c.Do == "rerun" && len(p.jobs()) > 0 && !p.has(name)
	c.Seen, c.FormKey = seenOf(rec), url.QueryEscape(c.Key)
	c.Alive, c.Retries = alive(rec, stale), !rec.NextAttemptAt.IsZero()
	s.Title, s.Body = s.T(c.Do)+": "+c.Key, c
	return p.render(w, code, "confirm", s)
}

// act takes an action on what the person was shown, or shows what is there instead.
func (p *pages) act(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	r.Body = http.MaxBytesReader(w, r.Body, formLimit)
	if err := r.ParseForm(); err != nil {
		if errors.As(err, new(*http.MaxBytesError)) {
			p.tell(s, w, http.StatusRequestEntityTooLarge, "too large", "")
			return nil
		}
		return usage("the form cannot be read")
	}
	form := r.PostForm
	key, err := url.QueryUnescape(form.Get("key"))
	if err != nil {
		return usage("the form cannot be read")
	}
	c := confirmation{
		Record: jobrun.Record{Key: key}, Do: form.Get("do"), Reason: strings.ReplaceAll(form.Get("reason"), "\r\n", "\n"),
		Force: form.Has("force"), Reset: form.Has("reset"),
	}
	shown := seen{form.Get("attempt"), form.Get("status"), form.Get("worker"), form.Get("started"), form.Get("finished")}
	if !slices.Contains(acts, c.Do) {
		return usage("do is %q, allowed: %q", c.Do, acts)
	}
	if wordless(c.Reason) {
		c.Wrong = s.T("reason missing")
		return p.question(ctx, s, w, http.StatusUnprocessableEntity, c)
	}
	rec, err := p.runner.Get(ctx, c.Key)
	if errors.Is(err, jobrun.ErrNotFound) {
		rec, err = jobrun.Record{Key: c.Key}, nil
	}
	if err != nil {
		return err
	}
	a := jobrun.Action{By: s.Actor, Reason: c.Reason, Force: c.Force, ResetItems: c.Reset && c.Do == "rerun"}
	if seenOf(rec) != shown {
		last, is, err := p.repeated(ctx, c, shown, a)
		if err != nil {
			return err
		}
		if is { // a second click, or the same form again
			redirect(w, runLink(key)+"&done="+c.Do, http.StatusSeeOther)
			return nil
		}
		if c.Conflict = s.T("somebody was first"); last != nil {
			l := s.historyLine(*last, rec)
			c.Last = fmt.Sprintf("%s %s, %s, %s", s.T("last was"), clock(l.At), l.What, l.Who)
		}
		return p.question(ctx, s, w, http.StatusConflict, c)
	}
	switch c.Do {
	case "mark-failed":
		_, err = p.runner.MarkFailed(ctx, rec, a)
	case "rerun":
		_, err = p.runner.ApproveRerun(ctx, rec, a)
	case "skip":
		_, err = p.runner.SkipSeen(ctx, rec, a)
	}
	invalid := (*jobrun.InvalidError)(nil)
	switch {
	case errors.Is(err, jobrun.ErrAlive):
		c.Conflict = s.T("it beats")
	case errors.Is(err, jobrun.ErrConflict): // its text is the library's own
		if _, is, unread := p.repeated(ctx, c, shown, a); is && unread == nil {
			redirect(w, runLink(key)+"&done="+c.Do, http.StatusSeeOther)
			return nil
		}
		c.Conflict = s.T("refused") + " " + err.Error()
	case errors.As(err, &invalid) && invalid.Field == "Action.Reason":
		c.Wrong = s.T("reason invalid")
		return p.question(ctx, s, w, http.StatusUnprocessableEntity, c)
	case errors.As(err, &invalid): // refused before anything happened
		return err
	case err != nil:
		p.opts.Logger.ErrorContext(ctx, "admin page: what became of an action is not known", "job_key", c.Key, "action", c.Do, "err", err)
		p.tell(s, w, http.StatusServiceUnavailable, "no answer", s.T("fate unknown"))
		return nil
	default:
		redirect(w, runLink(key)+"&done="+c.Do, http.StatusSeeOther)
		return nil
	}
	return p.question(ctx, s, w, http.StatusConflict, c)
}

// lastAction is the last action of a person in a history; nil: there is none.
func lastAction(history []jobrun.HistoryEntry) *jobrun.HistoryEntry {
	for _, h := range slices.Backward(history) {
		if h.Action != nil {
			return &h
		}
	}
	return nil
}

// justDone reports whether an action is this person's of the last minute, by two clocks.
func justDone(h *jobrun.HistoryEntry, do, actor string) bool {
	kind := map[string]string{"mark-failed": "MARK_FAILED", "rerun": "APPROVE_RERUN", "skip": "SKIP"}[do]
	return h != nil && h.Kind == kind && h.Action.By == actor && time.Since(h.At).Abs() < time.Minute
}

// repeated reads the last action on a run, and reports whether it is this form's, sent
// twice: the same words and ticks, on the same attempt in the same state.
func (p *pages) repeated(ctx context.Context, c confirmation, shown seen, a jobrun.Action) (last *jobrun.HistoryEntry, is bool, err error) {
	history, err := p.runner.History(ctx, c.Key)
	if err != nil && !errors.Is(err, jobrun.ErrNotFound) {
		return nil, false, err
	}
	last = lastAction(history)
	is = justDone(last, c.Do, a.By) && last.Action.Reason == a.Reason && last.Action.Force == a.Force && last.Action.ResetItems == a.ResetItems &&
		strconv.Itoa(last.Attempt) == shown.Attempt && url.QueryEscape(string(last.Previous)) == shown.Status
	return last, is, nil
}

// has reports whether the service has a job of this name, as far as the page knows.
func (p *pages) has(name string) bool {
	return slices.ContainsFunc(p.jobs(), func(job jobrun.Job) bool { return job.Name == name })
}
