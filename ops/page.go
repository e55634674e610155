package ops

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// PageOptions are the settings of a [Page]. nil or zero fields: the defaults.
type PageOptions struct {
	// Authorize returns the name of the person who sends a request, under which actions
	// are stored, or why that person may not act. nil: nobody may, the page only shows.
	// Who may look is decided before the page, as for any other handler.
	// The error is in the log when the person tries to act, not on the page.
	Authorize func(r *http.Request) (actor string, err error)
	Jobs      []jobrun.Job             // whose missed dates are judged; none: those registered by Runner.Schedule
	Attention *jobrun.AttentionOptions // what needs a person
	Title     string                   // "": Batch jobs
	Logger    *slog.Logger             // nil: slog.Default()
}

// Page is the admin page, to be mounted under any path that ends in a slash, with or
// without [http.StripPrefix], and for all methods:
//
//	mux.Handle("/admin/jobs/", requireLogin(ops.Page(runner, &ops.PageOptions{Authorize: mayAct})))
//
// It shows what needs a person, a calendar of jobs by business dates, the runs, and one
// run with its history, evidence and items. People whom Authorize names can mark a run
// failed, approve a re-run and skip, each with a reason and on what they have seen.
// Requests that change something are refused when they come from another site; a proxy
// in front has to pass the Host header on. It panics if runner is nil.
func Page(runner *jobrun.Runner, opts *PageOptions) http.Handler {
	if runner == nil {
		panic("ops.Page: no Runner")
	}
	p := &pages{runner: runner}
	if opts != nil {
		p.opts = *opts
	}
	p.opts.Title = cmp.Or(p.opts.Title, "Batch jobs")
	p.opts.Logger = cmp.Or(p.opts.Logger, slog.Default())
	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.head(w.Header())
		p.tell(p.shell(r), w, http.StatusForbidden, "other site", "")
	}))
	return protection.Handler(p)
}

//go:embed page
var pageFiles embed.FS

// templates are the pages by the names of their files.
var templates = func() map[string]*template.Template {
	all := map[string]*template.Template{}
	for _, name := range []string{"overview", "runs", "run", "confirm", "problem"} {
		all[name] = template.Must(template.New(name).Funcs(template.FuncMap{
			"text": func(s string) string { return visible(s, "\n\t") },
			"line": func(s string) string { return visible(firstLine(s), "") },
			"key":  keyText, "cut": func(s string) string { return cut(s, cutLength) },
			"when": clock, "short": short, "mark": mark, "count": func(n int64) string { return items(n, 0) },
		}).ParseFS(pageFiles, "page/layout.html", "page/"+name+".html"))
	}
	return all
}()

// pages answers the requests of a Page.
type pages struct {
	runner *jobrun.Runner
	opts   PageOptions
}

const (
	pageLimit = 10 * time.Second
	formLimit = 64 << 10
	cutLength = 200 // columns of a note in a table
)

// shell is what every page is made of.
type shell struct {
	words
	Title, Site, Actor string
	Zone               string
	Today              jobrun.Date
	Refresh            int    // seconds until the page is read again; 0: never
	Clock              string // when it was read
	Done               string
	Body               any
}

// CanAct reports whether the person may change something.
func (s shell) CanAct() bool { return s.Actor != "" }

// shell is the frame for a request.
func (p *pages) shell(r *http.Request) *shell {
	zone := p.runner.Zone()
	return &shell{
		words: language(r.Header.Get("Accept-Language")), Site: visible(p.opts.Title, ""), Today: p.runner.Today(), Zone: zone.String(),
		Clock: time.Now().In(zone).Format("15:04:05 -07:00"),
	}
}

// head sets what every answer says.
func (*pages) head(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Vary", "Accept-Language")
	h.Set("Cache-Control", "no-store")
}

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	p.head(h)
	name := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	if uri, _, _ := strings.Cut(r.RequestURI, "?"); r.URL.Path == "" && !strings.HasSuffix(uri, "/") {
		// All of it was stripped; the page's links are relative to a directory.
		to := uri[strings.LastIndexByte(uri, '/')+1:] + "/"
		if r.URL.RawQuery != "" {
			to += "?" + r.URL.RawQuery
		}
		redirect(w, to, http.StatusTemporaryRedirect)
		return
	}
	method, answer := http.MethodGet, map[string]func(context.Context, *shell, http.ResponseWriter, *http.Request) error{
		"": p.overview, "runs": p.runs, "run": p.run, "confirm": p.confirm, "act": p.act,
	}[name]
	if name == "act" {
		method = http.MethodPost
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case reads && (name == "style.css" || name == "app.js" || name == "icon.svg"):
		h.Set("Cache-Control", "max-age=300")
		http.ServeFileFS(w, r, pageFiles, "page/"+name)
		return
	case answer == nil:
		http.NotFound(w, r)
		return
	case r.Method != method && (method != http.MethodGet || !reads):
		h.Set("Allow", method)
		http.Error(w, method+" only", http.StatusMethodNotAllowed)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), pageLimit)
	if name == "act" { // what a person has decided is not cut off: the library bounds it, ResetItems by minutes
		cancel()
		ctx, cancel = context.WithCancel(context.WithoutCancel(r.Context()))
	}
	defer cancel()
	s := p.shell(r)
	refused := errors.New("PageOptions.Authorize is nil")
	if p.opts.Authorize != nil {
		s.Actor, refused = p.opts.Authorize(r)
		switch {
		case refused != nil:
			s.Actor = ""
		case !usable(s.Actor):
			p.opts.Logger.ErrorContext(ctx, "admin page: Authorize returned a name that cannot be stored", "name", s.Actor)
			s.Actor = ""
		}
	}
	if (name == "act" || name == "confirm") && !s.CanAct() {
		p.opts.Logger.WarnContext(ctx, "admin page: somebody who may not act tried to", "page", name, "err", refused)
		p.tell(s, w, http.StatusForbidden, "may not act", "")
		return
	}
	if err := answer(ctx, s, w, r); err != nil {
		p.fail(s, w, r, err)
	}
}

// usable reports whether a name can be stored with an action, and be told from others.
func usable(name string) bool {
	return strings.TrimSpace(name) != "" && len(name) <= 200 && visible(name, "") == name
}

// redirect sends the browser to a page by a reference relative to where it is. Unlike
// [http.Redirect] it is also right when a prefix of the path was stripped before.
func redirect(w http.ResponseWriter, to string, code int) {
	w.Header().Set("Location", to)
	w.WriteHeader(code)
}

// keyText is a key as it is, with the spaces at its ends shown: two keys never look alike.
func keyText(key string) string {
	text := visible(key, "")
	inner := strings.Trim(text, " ")
	if inner == "" {
		return strings.Repeat("␣", len(text))
	}
	start := strings.Index(text, inner)
	return strings.Repeat("␣", start) + inner + strings.Repeat("␣", len(text)-start-len(inner))
}

// render writes a page. Nothing is written before all of it is made.
func (p *pages) render(w http.ResponseWriter, code int, name string, s *shell) error {
	var b bytes.Buffer
	if err := templates[name].ExecuteTemplate(&b, "layout", s); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write(b.Bytes()) // the client may be gone
	return nil
}

// tell shows a page of one message, by its name.
func (p *pages) tell(s *shell, w http.ResponseWriter, code int, name, text string) {
	s.Title, s.Body = s.T(name), text
	if err := p.render(w, code, "problem", s); err != nil {
		http.Error(w, s.Title, code)
	}
}

// fail shows an error. Only what was refused says why: other texts may name hosts,
// users and data, and are in the log.
func (p *pages) fail(s *shell, w http.ResponseWriter, r *http.Request, err error) {
	invalid := (*jobrun.InvalidError)(nil)
	bad := (*usageError)(nil)
	switch {
	case errors.As(err, &invalid):
		p.tell(s, w, http.StatusBadRequest, "not understood", invalid.Error())
	case errors.As(err, &bad):
		p.tell(s, w, http.StatusBadRequest, "not understood", bad.what)
	case errors.Is(err, jobrun.ErrNotFound):
		p.tell(s, w, http.StatusNotFound, "no such run", "")
	default:
		p.opts.Logger.ErrorContext(r.Context(), "admin page", "page", path.Base(r.URL.Path), "err", err)
		p.tell(s, w, http.StatusServiceUnavailable, "no answer", s.T("see the log"))
	}
}

// jobs are those whose missed dates are judged.
func (p *pages) jobs() []jobrun.Job {
	if len(p.opts.Jobs) > 0 {
		return p.opts.Jobs
	}
	return p.runner.Scheduled()
}

// badge is a state as a page shows it: by a sign and a word, and by a colour.
type badge struct{ Sign, Class, Word string }

// mark is the badge of a state or of what is wrong with a run.
func mark(state any) badge {
	word := fmt.Sprint(state)
	switch word {
	case string(jobrun.Succeeded):
		return badge{"✓", "good", word}
	case string(jobrun.Failed):
		return badge{"✕", "bad", word}
	case string(jobrun.Running):
		return badge{"▶", "busy", word}
	case string(jobrun.Skipped):
		return badge{"–", "none", word}
	case string(jobrun.ProblemStale):
		return badge{"!", "bad", word}
	case string(jobrun.ProblemMissed):
		return badge{"○", "bad", word}
	case string(jobrun.ProblemRetrying):
		return badge{"↻", "wait", word}
	case string(jobrun.ProblemApproved):
		return badge{"↻", "wait", word}
	case string(jobrun.ProblemAttempt):
		return badge{"✕", "wait", word}
	}
	return badge{"?", "wait", visible(word, "")}
}
