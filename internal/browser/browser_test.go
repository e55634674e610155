// Package browser looks at the admin page with a real Chromium.
package browser

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const hostile = `<script>document.title='owned'</script><img src=x onerror="document.title='owned'">`

// site is a service with runs in every state, and the page in it.
type site struct {
	url    string
	runner *jobrun.Runner
	db     *pgtest.DB
	gone   atomic.Bool // it answers 503
	today  jobrun.Date
}

func newSite(t *testing.T) *site {
	t.Helper()
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		t.Fatal(err)
	}
	s := &site{db: pgtest.New(t)}
	if s.runner, err = jobrun.New(s.db.Pool, zone, &jobrun.Options{Logger: slog.New(slog.DiscardHandler), Lease: 24 * time.Hour, WorkerID: "web-1"}); err != nil {
		t.Fatal(err)
	}
	s.today = s.runner.Today()
	failure := errors.New("rates are missing: " + hostile)
	run := func(name string, days int, retries int, fails error) {
		t.Helper()
		_, err := s.runner.RunDate(t.Context(), jobrun.Job{Name: name, Retry: jobrun.Retry{MaxAttempts: retries}, Func: func(_ context.Context, run *jobrun.Run) error {
			run.AddProcessed(1234)
			return fails
		}}, s.today.AddDays(days))
		if !errors.Is(err, fails) && jobrun.Skipped == "" {
			t.Fatal(err)
		}
	}
	for n := range 29 {
		for _, name := range []string{"daily-settlement", "재고동기화", "notices/customers-and-partners"} {
			switch {
			case n == 6 && name == "daily-settlement": // a hole
			case n == 3 && name == "재고동기화":
				run(name, -n, 0, failure)
			case n%7 == 5:
				run(name, -n, 0, jobrun.SkipRun("no trading"))
			default:
				run(name, -n, 0, nil)
			}
		}
	}
	run("settlement", 0, 0, failure)
	run("inventory", 0, 3, failure)
	slots := jobrun.Job{Name: "prices", Every: time.Hour, Func: func(context.Context, *jobrun.Run) error { return nil }}
	for n := range 24 {
		if _, err := s.runner.RunTrigger(t.Context(), slots, time.Now().Add(-time.Duration(n)*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = s.runner.RunDate(context.WithoutCancel(t.Context()), jobrun.Job{Name: "payout", Func: func(context.Context, *jobrun.Run) error { close(started); <-end; return nil }}, s.today)
	}()
	<-started
	t.Cleanup(func() { close(end); <-ended })
	for _, sql := range []string{
		`UPDATE batch_job_attempt SET heartbeat_at = now() - interval '26 hours', started_at = now() - interval '27 hours', items_processed = 120, items_moved_at = now() - interval '26 hours' WHERE job_key LIKE 'payout:%'`,
		`UPDATE batch_job_run SET started_at = now() - interval '27 hours' WHERE job_key LIKE 'payout:%'`,
	} {
		if _, err := s.db.Pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	handler := ops.Page(s.runner, &ops.PageOptions{
		Jobs: []jobrun.Job{{Name: "daily-settlement", Func: slots.Func}}, Logger: slog.New(slog.DiscardHandler),
		Authorize: func(r *http.Request) (string, error) {
			user, err := r.Cookie("user")
			if err != nil {
				return "", err
			}
			return user.Value, nil
		},
	})
	mux := http.NewServeMux()
	mux.HandleFunc("/admin/jobs/", func(w http.ResponseWriter, r *http.Request) {
		if s.gone.Load() {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		handler.ServeHTTP(w, r)
	})
	mux.HandleFunc("/login", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "user", Value: r.URL.Query().Get("name"), Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
		fmt.Fprintln(w, "signed in")
	})
	mux.HandleFunc("/favicon.ico", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }) // of /login
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

// person is somebody at a browser of their own.
type person struct {
	t    *testing.T
	ctx  context.Context
	site *site

	mu  sync.Mutex
	bad []string // what the console said, and where else than to the site requests went
}

func sit(t *testing.T, s *site, name string) *person {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("JOBRUN_REQUIRE_CHROMIUM") != "" {
			t.Fatal(err)
		}
		t.Skip("no chromium")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium), chromedp.NoSandbox, chromedp.UserDataDir(profile(t)),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("lang", "en"))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	ctx, stop := chromedp.NewExecAllocator(ctx, opts...)
	t.Cleanup(stop)
	ctx, end := chromedp.NewContext(ctx)
	t.Cleanup(end)
	t.Cleanup(func() { // it closes itself, and its process has ended
		if err := chromedp.Cancel(ctx); err != nil {
			t.Error(err)
		}
	})
	p := &person{t: t, ctx: ctx, site: s}
	wrong := func(format string, args ...any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.bad = append(p.bad, fmt.Sprintf(format, args...))
	}
	chromedp.ListenTarget(ctx, func(e any) {
		switch e := e.(type) {
		case *runtime.EventConsoleAPICalled:
			wrong("console: %s %v", e.Type, e.Args)
		case *runtime.EventExceptionThrown:
			wrong("exception: %v", e.ExceptionDetails)
		case *log.EventEntryAdded:
			if !strings.Contains(e.Entry.Text, "409 (Conflict)") && !strings.Contains(e.Entry.Text, "422 (Unprocessable") { // which are told on the page
				wrong("log: %s %s", e.Entry.Text, e.Entry.URL)
			}
		case *network.EventRequestWillBeSent:
			if !strings.HasPrefix(e.Request.URL, s.url+"/") && !strings.HasPrefix(e.Request.URL, "data:") { // the browser's own icon of a date field
				wrong("a request to %s", e.Request.URL)
			}
		}
	})
	p.do(network.Enable(), log.Enable(), chromedp.Navigate(s.url+"/login?name="+url.QueryEscape(name)))
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, b := range p.bad {
			t.Error(b)
		}
	})
	return p
}

// profile is a directory for a browser. Its processes, which end after the first of
// them, still write there: it is removed again until it is gone.
func profile(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "jobrun-browser-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); ; {
			err := os.RemoveAll(dir)
			if err == nil {
				return
			}
			if time.Now().After(end) {
				t.Error(err)
				return
			}
		}
	})
	return dir
}

func (p *person) do(actions ...chromedp.Action) {
	p.t.Helper()
	if err := chromedp.Run(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// at opens a page.
func (p *person) at(path string) {
	p.t.Helper()
	p.do(chromedp.Navigate(p.site.url+"/admin/jobs/"+path), chromedp.WaitReady("footer"))
}

// text is what the page shows.
func (p *person) text() (text string) {
	p.t.Helper()
	p.do(chromedp.Evaluate(`document.body.innerText`, &text))
	return text
}

func (p *person) sees(wants ...string) {
	p.t.Helper()
	text := p.text()
	for _, want := range wants {
		if !strings.Contains(text, want) {
			p.t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func (s *site) pages() map[string]string {
	key := func(job string) string { return url.QueryEscape(job + ":" + s.today.String()) }
	return map[string]string{
		"overview": "", "runs": "runs", "runs-failed": "runs?status=FAILED", "run-stale": "run?key=" + key("payout"), "run-failed": "run?key=" + key("settlement"),
		"run-missing": "run?key=" + url.QueryEscape("daily-settlement:"+s.today.AddDays(-6).String()), "confirm": "confirm?do=rerun&key=" + key("settlement"),
		"confirm-stale": "confirm?do=mark-failed&key=" + key("payout"),
	}
}

// Every page at the widths of a telephone and a desk, light and dark: nothing sticks
// out sideways, and nothing is said on the console. JOBRUN_SCREENSHOTS names a
// directory for pictures.
func TestPagesAtEveryWidth(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, "kim")
	dir := os.Getenv("JOBRUN_SCREENSHOTS")
	for name, path := range s.pages() {
		for _, width := range []int64{390, 1280} {
			for _, scheme := range []string{"light", "dark"} {
				p.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}), chromedp.EmulateViewport(width, 800))
				p.at(path)
				var sticksOut bool
				p.do(chromedp.Evaluate(`document.documentElement.scrollWidth > innerWidth`, &sticksOut))
				if sticksOut {
					t.Errorf("%s sticks out at %d", name, width)
				}
				if dir == "" {
					continue
				}
				var picture []byte
				p.do(chromedp.FullScreenshot(&picture, 100))
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d-%s.png", name, width, scheme)), picture, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestHostileTextsStayText(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, hostile[:8])
	for name, path := range s.pages() {
		p.at(path)
		var title string
		var scripts int
		p.do(chromedp.Title(&title), chromedp.Evaluate(`document.querySelectorAll("main script, main img").length`, &scripts))
		if title == "owned" || scripts > 0 {
			t.Errorf("%s obeys what another program wrote", name)
		}
	}
	p.at("run?key=" + url.QueryEscape("settlement:"+s.today.String()))
	p.sees(hostile)
}

// Every action through the pages, with the keyboard's order of things.
func TestActionsByClicks(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, "kim")
	act := func(job, link, reason, done string) {
		t.Helper()
		p.at("run?key=" + url.QueryEscape(job+":"+s.today.String()))
		p.do(chromedp.Click(`//a[contains(@class,"button") and contains(., "`+link+`")]`, chromedp.BySearch), chromedp.WaitVisible(`textarea`))
		p.do(chromedp.SendKeys(`textarea`, reason), chromedp.Click(`form.act button`), chromedp.WaitVisible(`.good[role=status]`))
		p.sees(done, reason, "kim")
	}
	act("payout", "Mark failed", "pod evicted", "The run is marked failed.")
	act("payout", "Approve a re-run", "rates loaded", "The re-run is approved.")
	act("settlement", "Skip", "no trading", "The run is skipped.")
	history, err := s.runner.History(t.Context(), "payout:"+s.today.String())
	if err != nil || len(history) != 3 || history[1].Action.By != "kim" || history[2].Action.Reason != "rates loaded" {
		t.Errorf("%+v, %v", history, err)
	}
	// A filter, and a page behind it.
	p.at("runs")
	p.do(chromedp.Click(`input[value=FAILED]`), chromedp.Click(`form.filter button`), chromedp.WaitReady(`input[value=FAILED][checked]`))
	p.sees("payout:"+s.today.String(), "재고동기화:"+s.today.AddDays(-3).String())
	if strings.Contains(p.text(), "settlement:"+s.today.String()+"\t") {
		t.Error("a skipped run is shown among the failed")
	}
}

// Two people restart the same settlement: the second one is told plainly.
func TestConflictOfTwoPeople(t *testing.T) {
	s := newSite(t)
	kim, lee := sit(t, s, "kim"), sit(t, s, "lee")
	confirm := s.pages()["confirm"]
	for _, p := range []*person{kim, lee} {
		p.at(confirm)
		p.do(chromedp.SendKeys(`textarea`, "rates loaded"))
	}
	kim.do(chromedp.Click(`form.act button`), chromedp.WaitVisible(`.good[role=status]`))
	lee.do(chromedp.Click(`form.act button`), chromedp.WaitVisible(`[role=alert]`))
	lee.sees("nothing was changed", "approved since")
	history, err := s.runner.History(t.Context(), "settlement:"+s.today.String())
	if err != nil || len(history) != 2 || history[1].Action.By != "kim" {
		t.Errorf("%+v, %v", history, err)
	}
}

// The page of a running run is read again by itself, and keeps the reader's place.
func TestRunningRunIsReadAgain(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, "kim")
	p.at(s.pages()["run-stale"])
	p.do(chromedp.Focus(`main a.button`))
	rec, err := s.runner.Get(t.Context(), "payout:"+s.today.String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.db.Pool.Exec(t.Context(), `UPDATE batch_job_attempt SET items_processed = 4321 WHERE job_key = $1`, rec.Key); err != nil {
		t.Fatal(err)
	}
	p.do(chromedp.WaitVisible(`//p[contains(., "4321")]`, chromedp.BySearch))
	var focused string
	p.do(chromedp.Evaluate(`document.activeElement.className`, &focused))
	if focused != "button" {
		t.Errorf("the focus is at %q", focused)
	}
}

// What somebody types into the filter, ticks, or selects to copy stays while the page is
// read again, and a page that could not be read says so.
func TestReadingAgainTakesNothingAway(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, "kim")
	// The page's clock runs ten times as fast, and its looks are counted.
	p.do(chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(`{ const real = setTimeout; window.looks = 0; window.setTimeout = (f, ms) => real(() => { f(); window.looks++; }, ms / 10); }`).Do(ctx)
		return err
	}))
	p.at("runs?job=payout")
	p.do(chromedp.SendKeys(`input[name=job]`, "-new"), chromedp.Click(`input[value=FAILED]`), chromedp.Focus(`input[name=job]`))
	if _, err := s.db.Pool.Exec(t.Context(), `UPDATE batch_job_attempt SET items_processed = 4321 WHERE job_key = $1`, "payout:"+s.today.String()); err != nil {
		t.Fatal(err)
	}
	p.do(chromedp.WaitVisible(`//td[contains(., "4321")]`, chromedp.BySearch))
	var typed string
	p.do(chromedp.Evaluate(`document.activeElement.value + " " + document.querySelector("input[value=FAILED]").checked`, &typed))
	if typed != "-newpayout true" {
		t.Errorf("%q is left", typed)
	}

	p.at("run?key=" + url.QueryEscape("payout:"+s.today.String()))
	var clock, selected string
	p.do(chromedp.Evaluate(`getSelection().selectAllChildren(document.querySelector("main dl")); document.querySelector("footer p").textContent`, &clock))
	p.do(chromedp.Poll(`looks > 2`, nil), chromedp.Evaluate(`getSelection().toString()`, &selected))
	if !strings.Contains(selected, "4321") {
		t.Errorf("%q is selected", selected)
	}
	p.do(chromedp.Evaluate(`getSelection().removeAllRanges()`, nil), chromedp.Poll(`document.querySelector("footer p").textContent !== `+strconv.Quote(clock), nil))

	s.gone.Store(true)
	p.do(chromedp.WaitVisible(`#not-refreshed`))
	p.sees("could not be read again", "4321")
	s.gone.Store(false)
	p.do(chromedp.WaitNotVisible(`#not-refreshed`), chromedp.Click(`#pause`))
	p.sees("Go on")
	p.mu.Lock()
	p.bad = nil // the browser's own lines of the answers 503
	p.mu.Unlock()
}

// Two quick clicks are one action, and its success is told.
func TestDoubleClickIsOneAction(t *testing.T) {
	s := newSite(t)
	p := sit(t, s, "kim")
	p.at("confirm?do=mark-failed&key=" + url.QueryEscape("payout:"+s.today.String()))
	p.do(chromedp.SendKeys(`textarea`, "pod evicted"), chromedp.DoubleClick(`form.act button`), chromedp.WaitVisible(`.good[role=status]`))
	p.sees("The run is marked failed.")
	history, err := s.runner.History(t.Context(), "payout:"+s.today.String())
	if err != nil || len(history) != 2 {
		t.Errorf("%+v, %v", history, err)
	}
}

// axe-core finds nothing serious on any page, light and dark.
func TestAxe(t *testing.T) {
	axe, err := os.ReadFile("node_modules/axe-core/axe.min.js")
	if err != nil {
		if os.Getenv("JOBRUN_REQUIRE_CHROMIUM") != "" {
			t.Fatal(err)
		}
		t.Skip("no axe-core: npm ci")
	}
	s := newSite(t)
	p := sit(t, s, "kim")
	for name, path := range s.pages() {
		for _, scheme := range []string{"light", "dark"} {
			p.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}), chromedp.EmulateViewport(1280, 800))
			p.at(path)
			var findings []string
			p.do(chromedp.Evaluate(string(axe)+";0", nil), chromedp.Evaluate(`axe.run().then(r => r.violations.map(v => v.impact + " " + v.id + ": " + v.nodes.slice(0, 3).map(n => n.html + " " + n.failureSummary).join(" | ")))`, &findings,
				func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
			for _, f := range findings {
				t.Errorf("%s, %s: %s", name, scheme, f)
			}
		}
	}
}
