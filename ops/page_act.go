package ops

import (
	"context"
	"errors"
	"net/http"
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

func seenOf(rec jobrun.Record) seen {
	at := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.UTC().Format(time.RFC3339Nano)
	}
	return seen{strconv.Itoa(rec.Attempt), string(rec.Status), rec.WorkerID, at(rec.StartedAt), at(rec.FinishedAt)}
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
	Missing      bool // of the reason
}

func (p *pages) confirm(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	if !s.CanAct() {
		p.tell(s, w, http.StatusForbidden, s.T("may not act"), "")
		return nil
	}
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
	if !slices.Contains(possible(rec), c.Do) && c.Conflict == "" {
		c.Conflict = s.T("not possible")
	}
	c.Seen = seenOf(rec)
	c.Alive, c.Retries = alive(rec, stale), !rec.NextAttemptAt.IsZero()
	s.Title, s.Body = s.T(c.Do)+": "+c.Key, c
	return p.render(w, code, "confirm", s)
}

// act takes an action on what the person was shown, or shows what is there instead.
func (p *pages) act(ctx context.Context, s *shell, w http.ResponseWriter, r *http.Request) error {
	r.Body = http.MaxBytesReader(w, r.Body, formLimit)
	if err := r.ParseForm(); err != nil {
		return usage("the form cannot be read")
	}
	form := r.PostForm
	c := confirmation{
		Record: jobrun.Record{Key: form.Get("key")}, Do: form.Get("do"), Reason: strings.ReplaceAll(form.Get("reason"), "\r\n", "\n"),
		Force: form.Has("force"), Reset: form.Has("reset"),
	}
	shown := seen{form.Get("attempt"), form.Get("status"), form.Get("worker"), form.Get("started"), form.Get("finished")}
	if strings.TrimSpace(c.Reason) == "" {
		c.Missing = true
		return p.question(ctx, s, w, http.StatusUnprocessableEntity, c)
	}
	rec, err := p.runner.Get(ctx, c.Key)
	if errors.Is(err, jobrun.ErrNotFound) {
		rec, err = jobrun.Record{Key: c.Key}, nil
	}
	if err != nil {
		return err
	}
	if seenOf(rec) != shown {
		c.Conflict = s.T("somebody was first")
		return p.question(ctx, s, w, http.StatusConflict, c)
	}
	a := jobrun.Action{By: s.Actor, Reason: c.Reason, Force: c.Force, ResetItems: c.Reset && c.Do == "rerun"}
	switch c.Do {
	case "mark-failed":
		_, err = p.runner.MarkFailed(ctx, rec, a)
	case "rerun":
		_, err = p.runner.ApproveRerun(ctx, rec, a)
	case "skip":
		_, err = p.runner.SkipSeen(ctx, rec, a)
	default:
		return usage("do is %q, allowed: %q", c.Do, acts)
	}
	switch {
	case errors.Is(err, jobrun.ErrAlive):
		c.Conflict = s.T("it beats")
	case errors.Is(err, jobrun.ErrConflict): // its text is the library's own
		c.Conflict = s.T("refused") + " " + err.Error()
	case errors.As(err, new(*jobrun.InvalidError)): // refused before anything happened
		return err
	case err != nil:
		p.opts.Logger.ErrorContext(ctx, "admin page: what became of an action is not known", "job_key", c.Key, "action", c.Do, "err", err)
		p.tell(s, w, http.StatusServiceUnavailable, s.T("no answer"), s.T("fate unknown"))
		return nil
	default:
		http.Redirect(w, r, runLink(c.Key)+"&done="+c.Do, http.StatusSeeOther)
		return nil
	}
	return p.question(ctx, s, w, http.StatusConflict, c)
}
