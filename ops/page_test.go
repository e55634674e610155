package ops_test

import (
	"context"
	"errors"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/ops"
)

// site is a service with the page under /admin/jobs/.
type site struct {
	t   testing.TB
	url string
}

// login lets the person act whom the header names.
func login(r *http.Request) (string, error) {
	if name := r.Header.Get("X-User"); name != "" {
		return name, nil
	}
	return "", errors.New("not signed in")
}

func newSite(t testing.TB, r *jobrun.Runner, opts *ops.PageOptions) site {
	t.Helper()
	opts.Logger = slog.New(slog.DiscardHandler)
	mux := http.NewServeMux()
	mux.Handle("/admin/jobs/", ops.Page(r, opts))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return site{t, server.URL + "/admin/jobs/"}
}

// get reads a page as a person who may act.
func (s site) get(path string, code int, wants ...string) string {
	s.t.Helper()
	return s.send(http.MethodGet, path, nil, code, map[string]string{"X-User": "kim"}, wants...)
}

// send sends a request and does not follow where it leads.
func (s site) send(method, path string, form url.Values, code int, head map[string]string, wants ...string) string {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		s.t.Fatal(err)
	}
	if form != nil {
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for name, value := range head {
		request.Header.Set(name, value)
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	text := html.UnescapeString(string(body)) + response.Header.Get("Location")
	if response.StatusCode != code {
		s.t.Errorf("%s %s: %s, want %d\n%s", method, path, response.Status, code, text)
	}
	for _, want := range wants {
		if !strings.Contains(text, want) {
			s.t.Errorf("%s %s: no %q in\n%s", method, path, want, text)
		}
	}
	return string(body)
}

// form is the form of a page, filled in.
func form(t testing.TB, page string, fields ...string) url.Values {
	t.Helper()
	values := url.Values{}
	for _, m := range regexp.MustCompile(`<input type="hidden" name="([^"]*)" value="([^"]*)">`).FindAllStringSubmatch(page, -1) {
		values.Set(m[1], html.UnescapeString(m[2]))
	}
	if len(values) == 0 {
		t.Fatalf("no form in\n%s", page)
	}
	for i := 0; i < len(fields); i += 2 {
		values.Set(fields[i], fields[i+1])
	}
	return values
}

func TestPageShowsEveryState(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing\nsecond line")
	today := r.Today()
	for n := range 4 {
		if n != 2 { // a hole
			run(t, r, "daily-settlement", today.AddDays(-n), jobrun.Retry{}, nil)
		}
	}
	run(t, r, "settlement", today, jobrun.Retry{}, failure)
	run(t, r, "inventory", today, jobrun.Retry{MaxAttempts: 3}, failure)
	dead(t, db, "payout", today)
	s := newSite(t, r, &ops.PageOptions{Authorize: login, Jobs: []jobrun.Job{settlement}})
	s.get("", 200, "Needs a person now", "STALE", "FAILED", "RETRYING", "MISSED", "rates are missing ...", "kim", "Asia/Seoul",
		`class="cell good"`, `class="cell bad"`, `class="cell hole"`, settlement.Key(today.AddDays(-2)))
	s.get("?to="+today.AddDays(-31).String(), 200, "Later dates")
	s.get("runs", 200, "payout:"+today.String(), "RUNNING", "120")
	s.get("runs?job=settlement&status=FAILED&from="+today.String()+"&to="+today.String(), 200, "settlement:"+today.String(), "checked")
	if page := s.get("runs?status=SKIPPED", 200, "No run is like that."); strings.Contains(page, "payout") {
		t.Error(page)
	}
	s.get("run?key=settlement:"+today.String(), 200, "second line", "confirm?do=rerun", "confirm?do=skip", "Attempt 1", "Scheduled for")
	s.get("run?key=payout:"+today.String(), 200, "evidence", "26h0m", "confirm?do=mark-failed")
	s.get("run?key="+settlement.Key(today.AddDays(-2)), 200, "There is no run yet", "confirm?do=skip")
	s.get("run?key=settlement:2020-01-01", 404, "no such run")
	s.get("runs?from=2026-02-30", 400, "2026-02-30")
	s.get("runs?job=a+b", 400, "Filter.Job")
	s.get("nosuch", 404)
	s.get("act", 405)
	s.send(http.MethodGet, "", nil, 200, map[string]string{"Accept-Language": "ko-KR,ko;q=0.9,en;q=0.8"}, "지금 사람이 봐야 할 것", "조회만 할 수 있습니다", `lang="ko"`)
	s.send(http.MethodGet, "", nil, 200, map[string]string{"Accept-Language": "de, en;q=0.5, ko;q=0.4"}, "Needs a person now")
}

func TestPageTakesActionsOnWhatWasSeen(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	failure := errors.New("rates are missing")
	dead(t, db, "payout", day)
	s := newSite(t, r, &ops.PageOptions{Authorize: login})
	post := func(f url.Values, user string, code int, wants ...string) string {
		t.Helper()
		return s.send(http.MethodPost, "act", f, code, map[string]string{"X-User": user}, wants...)
	}
	const key = "payout:2026-09-15"
	page := s.get("confirm?do=mark-failed&key="+key, 200, "26h0m", "Make sure first that its process is dead")
	post(form(t, page), "kim", 422, "A reason is required")
	post(form(t, page, "reason", "  "), "kim", 422, "A reason is required")
	other := s.get("confirm?do=mark-failed&key="+key, 200)
	post(form(t, page, "reason", "pod evicted"), "kim", 303, "run?key=payout%3A2026-09-15&done=mark-failed")
	// Somebody who has looked at the same moment, and acts later.
	post(form(t, other, "reason", "me too"), "lee", 409, "Somebody was first", "FAILED", "pod evicted")
	s.get("run?key="+key+"&done=mark-failed", 200, "The run is marked failed.", "Marked failed", "kim (role ", "pod evicted")

	page = s.get("confirm?do=rerun&key="+key, 200, "EVERY ITEM TAKES EFFECT ONCE MORE")
	post(form(t, page, "reason", "rates loaded", "reset", "on"), "lee", 303)
	history, err := r.History(t.Context(), key)
	if err != nil || len(history) != 3 || !history[2].Action.ResetItems || history[2].Action.By != "lee" {
		t.Errorf("%+v, %v", history, err)
	}
	post(form(t, page, "reason", "again"), "kim", 409, "Refused, nothing was changed", "approved since")
	post(form(t, page, "reason", "rates loaded"), "lee", 409, "approved since") // not what lee did: the items would stay
	post(form(t, page, "reason", "rates loaded", "reset", "on"), "lee", 303)    // sent twice

	// The same words on what has come of it are another decision.
	run(t, r, "reports", day, jobrun.Retry{}, failure)
	post(form(t, s.get("confirm?do=rerun&key=reports:2026-09-15", 200), "reason", "again"), "kim", 303)
	run(t, r, "reports", day, jobrun.Retry{}, nil)
	post(form(t, s.get("confirm?do=rerun&key=reports:2026-09-15", 200), "reason", "again"), "kim", 409, "only Force")

	run(t, r, "reminders", day, jobrun.Retry{}, nil)
	page = s.get("confirm?do=rerun&key=reminders:2026-09-15", 200, "although it SUCCEEDED")
	post(form(t, page, "reason", "again"), "kim", 409, "only Force")
	post(form(t, page, "reason", "again", "force", "on"), "kim", 303)
	page = s.get("confirm?do=skip&key=reminders:2026-09-16", 200, "There is no run yet")
	post(form(t, page, "reason", "no trading\r\nthat day"), "kim", 303)
	if rec, err := r.Get(t.Context(), "reminders:2026-09-16"); err != nil || rec.Status != jobrun.Skipped || !strings.Contains(rec.Error, "no trading\nthat day") {
		t.Errorf("%+v, %v", rec, err)
	}
	run(t, r, "settlement", day, jobrun.Retry{}, failure)
	page = s.get("confirm?do=skip&key=settlement:2026-09-15", 200)
	run2 := form(t, page, "reason", "x")
	for name, value := range map[string]string{"attempt": "2", "status": "SKIPPED", "worker": "w", "started": "2026-09-15T01:00:00Z", "finished": ""} {
		f := form(t, page, "reason", "x", name, value)
		post(f, "kim", 409, "Somebody was first")
	}
	for name, value := range map[string]string{"do": "delete", "key": "no key"} {
		f := form(t, page, "reason", "x", name, value)
		s.send(http.MethodPost, "act", f, map[string]int{"do": 400, "key": 404}[name], map[string]string{"X-User": "kim"})
	}
	// The reason is not lost when it cannot be stored; one that says nothing is none.
	post(form(t, page, "reason", strings.Repeat("가", 700)), "kim", 422, "660 Korean syllables", strings.Repeat("가", 700), "<form")
	post(form(t, page, "reason", "a\x00b"), "kim", 422, "without control characters")
	for _, reason := range []string{".", "\u200b", "\r\n", "\u3164 ."} {
		post(form(t, page, "reason", reason), "kim", 422, "<form")
	}
	s.send(http.MethodPost, "act", form(t, page, "reason", strings.Repeat("x", 100_000)), 413, map[string]string{"X-User": "kim"}, "too large")

	// After an error that says nothing of the run, nobody is told that nothing happened.
	execute(t, db, `ALTER TABLE batch_job_action RENAME TO gone`)
	post(run2, "kim", 503, "look at the history of the run before you repeat it")
	execute(t, db, `ALTER TABLE gone RENAME TO batch_job_action`)
	post(run2, "kim", 303)

	// A second click is the first one's success; an old link tells nothing.
	post(run2, "kim", 303, "done=skip")
	post(form(t, page, "reason", "y"), "kim", 409, "Somebody was first", "The last action:", "Skipped, kim")
	s.get("run?key=settlement:2026-09-15&done=skip", 200, "The run is skipped.")
	for _, done := range []string{"rerun", "mark-failed"} {
		if page := s.get("run?key=settlement:2026-09-15&done="+done, 200); strings.Contains(page, `role="status">The`) {
			t.Error(page)
		}
	}
	execute(t, db, `ALTER TABLE batch_job_action DISABLE TRIGGER ALL`)
	execute(t, db, `UPDATE batch_job_action SET acted_at = acted_at - interval '2 minutes'`)
	if page := s.get("run?key=settlement:2026-09-15&done=skip", 200); strings.Contains(page, "The run is skipped.") {
		t.Error(page)
	}
}

// What was ticked for one attempt is not ticked for the one that took its place.
func TestConflictOnThePageClearsWhatWasTicked(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	dead(t, db, "payout", day)
	execute(t, db, `UPDATE batch_job_attempt SET heartbeat_at = now()`) // it lives
	s := newSite(t, r, &ops.PageOptions{Authorize: login})
	page := s.get("confirm?do=mark-failed&key=payout:2026-09-15", 200, `name="force"`)
	execute(t, db, `UPDATE batch_job_run SET worker_id = E'node-2\nx'`)
	conflict := s.send(http.MethodPost, "act", form(t, page, "reason", "kill it", "force", "on"), 409, map[string]string{"X-User": "kim"}, "Somebody was first", "kill it")
	if strings.Contains(conflict, "checked") {
		t.Error(conflict)
	}
	// A name with the end of a line comes back from a browser as it was sent.
	f := form(t, s.get("confirm?do=mark-failed&key=payout:2026-09-15", 200), "reason", "kill it")
	for name, values := range f {
		f[name] = []string{strings.ReplaceAll(values[0], "\n", "\r\n")}
	}
	s.send(http.MethodPost, "act", f, 303, map[string]string{"X-User": "kim"})
}

func TestPageOfJobsThatRunSeveralTimesADay(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	slots := jobrun.Job{Name: "prices", Every: time.Hour, Func: noop}
	noon := time.Date(2026, 9, 15, 12, 0, 0, 0, seoul)
	for n := range 2 {
		if _, err := r.RunTrigger(t.Context(), slots, noon.Add(time.Duration(-n)*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	s := newSite(t, r, &ops.PageOptions{})
	s.get("run?key=prices:2026-09-15", 303, "runs?job=prices&from=2026-09-15&to=2026-09-15")
	execute(t, db, `DELETE FROM batch_job_run WHERE job_key LIKE '%T11:%'`)
	s.get("run?key=prices:2026-09-15", 303, "run?key=prices%3A2026-09-15T12%3A00%2B09%3A00")
	s.get("run?key=prices:2026-09-16", 404)
	// One of the runs of a day is stale: the day is.
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id, started_at) VALUES ('prices:2026-09-15T13:00+09:00', 'RUNNING', 'node-1', now() - interval '1 day'), ('prices:2026-09-15T14:00+09:00', 'RUNNING', 'node-1', now())`)
	s.get("?to=2026-09-15", 200, `title="prices 2026-09-15: STALE, 3"`)
}

func TestPageIsBounded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id, finished_at, error_message) SELECT 'job-' || n || ':2026-09-15', 'FAILED', 'node-1', now(), repeat('x', 8000) FROM generate_series(1, 3000) AS n`)
	execute(t, db, `INSERT INTO batch_job_item_failure (job_key, item, attempt, failures, error_message) SELECT 'job-1:2026-09-15', 'item-' || to_char(n, 'FM000'), 1, 1, 'no' FROM generate_series(1, 30) AS n`)
	s := newSite(t, r, &ops.PageOptions{})
	if page := s.get("", 200, "2900 more"); len(page) > 400_000 {
		t.Errorf("%d bytes", len(page))
	}
	if page := s.get("runs", 200); len(page) > 100_000 {
		t.Errorf("%d bytes", len(page))
	}
	page := s.get("run?key=job-1:2026-09-15", 200, "item-020", "items=item-020")
	if strings.Contains(page, "item-021") {
		t.Error("more than a page of items")
	}
	if page := s.get("run?key=job-1:2026-09-15&items=item-020", 200, "item-021", "item-030"); strings.Contains(page, "items=item") {
		t.Error("a link to nothing")
	}
}

// What the service has set wrongly hides nothing without a word, and is told to the service.
func TestPageWithWrongSettings(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	for _, opts := range []*ops.PageOptions{{Attention: &jobrun.AttentionOptions{DueBy: 25 * time.Hour}}, {Jobs: []jobrun.Job{{Name: "x y", Func: noop}}}} {
		page := newSite(t, r, opts).get("?to=2026-09-15", 200, "What needs a person cannot be told", "FAILED")
		if strings.Contains(page, "Nothing needs a person") {
			t.Error(page)
		}
	}
	fails := jobrun.Job{Name: "settlement", Func: noop, Calendar: func(jobrun.Date) bool { panic("no calendar") }}
	newSite(t, r, &ops.PageOptions{Jobs: []jobrun.Job{fails}}).get("", 200, "The missed dates of a job cannot be told", "rates are missing")
	for _, name := range []string{"kim\nlee", "  ", strings.Repeat("k", 3000), "\u202ekim", ""} {
		s := newSite(t, r, &ops.PageOptions{Authorize: func(*http.Request) (string, error) { return name, nil }})
		s.get("run?key=settlement:2026-09-15", 200, "You may look, not act")
		s.get("confirm?do=skip&key=settlement:2026-09-15", 403)
	}
	defer func() {
		if recover() == nil {
			t.Error("no panic without a Runner")
		}
	}()
	ops.Page(nil, nil)
}

func TestPageTellsKeysApart(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, worker_id, finished_at) SELECT key, 'FAILED', 'node-1', now() FROM unnest(ARRAY['settlement:2026-09-15', ' settlement:2026-09-15', 'settlement:2026-09-15 ', E'settlement:2026-09-15\n']) AS key`)
	s := newSite(t, r, &ops.PageOptions{Authorize: login})
	s.get("runs", 200, ">settlement:2026-09-15<", ">␣settlement:2026-09-15<", ">settlement:2026-09-15␣<", `>settlement:2026-09-15\n<`)
	s.get("confirm?do=skip&key=settelment:2026-09-15", 200, "is it spelt right?")
	if page := s.get("confirm?do=skip&key=settlement:2026-09-16", 200); strings.Contains(page, "spelt") {
		t.Error(page)
	}
	for _, key := range []string{"", "anything", "%ff", "settlement:2026-02-30"} {
		s.get("confirm?do=skip&key="+key, 404)
	}
	s.get("runs?status=failed", 400, "RUNNING")
	s.get("runs?from=2026-09-16&to=2026-09-15", 400, "the earlier date first")
	if page := s.get("runs?from=x", 400, "from: "); strings.Contains(page, "--from") {
		t.Error(page)
	}
	s.get("runs?after=0", 200, "First page")
}

func TestPageIsReadOnlyUnlessSomebodyMayAct(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	run(t, r, "settlement", day, jobrun.Retry{}, errors.New("rates are missing"))
	signed := newSite(t, r, &ops.PageOptions{Authorize: login})
	filled := form(t, signed.get("confirm?do=skip&key=settlement:2026-09-15", 200), "reason", "x")
	for _, s := range []site{newSite(t, r, &ops.PageOptions{}), signed} {
		page := s.send(http.MethodGet, "run?key=settlement:2026-09-15", nil, 200, nil, "You may look, not act")
		if strings.Contains(page, "confirm?") {
			t.Error("offers what is not allowed")
		}
		s.send(http.MethodGet, "confirm?do=skip&key=settlement:2026-09-15", nil, 403, nil)
		s.send(http.MethodPost, "act", filled, 403, nil)
	}
	// A form on another site, in the browser of somebody who may.
	for _, head := range []map[string]string{{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "same-site"}} {
		head["X-User"] = "kim"
		signed.send(http.MethodPost, "act", filled, 403, head)
	}
	signed.send(http.MethodGet, "act?"+filled.Encode(), nil, 405, map[string]string{"X-User": "kim"})
	if rec, err := r.Get(t.Context(), "settlement:2026-09-15"); err != nil || rec.Status != jobrun.Failed {
		t.Errorf("%+v, %v", rec, err)
	}
	signed.send(http.MethodPost, "act", filled, 303, map[string]string{"X-User": "kim", "Sec-Fetch-Site": "same-origin"})
}

// Texts that other programs wrote stay texts, and errors tell nothing of the database.
func TestPageShowsHostileTextsAndNoSecrets(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	const evil = `"><script>alert(1)</script><img src=x onerror=alert(2)>`
	execute(t, db, `INSERT INTO batch_job_run (job_key, status, finished_at, worker_id, error_message) VALUES ($1, 'FAILED', now(), $2, $3), ($4, $5, NULL, 'w', NULL)`,
		evil+":2026-09-15", "w"+evil, "javascript:alert(3)"+evil+"\u202e", "odd:2026-09-15", evil[:20])
	s := newSite(t, r, &ops.PageOptions{Authorize: func(*http.Request) (string, error) { return evil, nil }})
	for _, path := range []string{"", "runs", "runs?job=" + url.QueryEscape(evil), "run?key=" + url.QueryEscape(evil+":2026-09-15"), "run?key=odd:2026-09-15", "confirm?do=skip&key=" + url.QueryEscape(evil+":2026-09-15"), "confirm?do=" + url.QueryEscape(evil) + "&key=x", "run?key=" + url.QueryEscape(evil)} {
		response, err := http.Get(s.url + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if text := string(body); strings.Contains(text, "<script>") || strings.Contains(text, "<img") || strings.Contains(text, "\u202e") {
			t.Errorf("%s: %s", path, text)
		}
		csp := response.Header.Get("Content-Security-Policy")
		if !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") || response.Header.Get("X-Content-Type-Options") != "nosniff" || response.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %v", path, response.Header)
		}
	}
	execute(t, db, `ALTER TABLE batch_job_run RENAME TO gone`)
	for _, path := range []string{"", "runs", "run?key=odd:2026-09-15"} {
		page := s.send(http.MethodGet, path, nil, 503, nil, "does not answer")
		for _, secret := range []string{"SELECT", "batch_job", "127.0.0.1", "SQLSTATE", "postgres"} {
			if strings.Contains(page, secret) {
				t.Errorf("%s tells %q\n%s", path, secret, page)
			}
		}
	}
}

func TestPageIsMountedAnywhere(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	page := ops.Page(r, &ops.PageOptions{Authorize: login})
	mux := http.NewServeMux()
	mux.Handle("/jobs/", http.StripPrefix("/jobs", page))
	mux.Handle("/deep/er/", http.StripPrefix("/deep/er/", page))
	mux.Handle("/plain/", page)
	mux.Handle("/bare", http.StripPrefix("/bare", page))
	server := httptest.NewServer(mux)
	defer server.Close()
	for _, path := range []string{"/jobs/", "/plain/", "/bare", "/jobs/runs", "/deep/er/runs", "/plain/style.css", "/jobs/app.js", "/plain/icon.svg"} {
		request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, server.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if path == "/bare" {
			if response.StatusCode != http.StatusTemporaryRedirect || response.Header.Get("Location") != "bare/" {
				t.Errorf("%s: %s %q", path, response.Status, response.Header.Get("Location"))
			}
		} else if response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, response.Status)
		}
	}
	for n, mount := range []string{"/jobs/", "/deep/er/", "/plain/"} {
		run(t, r, "settlement", day.AddDays(n), jobrun.Retry{}, errors.New("rates are missing"))
		s := site{t, server.URL + mount}
		f := form(t, s.get("confirm?do=skip&key=settlement:"+day.AddDays(n).String(), 200), "reason", "no trading")
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"act", strings.NewReader(f.Encode()))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		request.Header.Set("X-User", "kim")
		response, err := http.DefaultClient.Do(request) // goes where it is led, as a browser does
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != 200 || !strings.HasPrefix(response.Request.URL.Path, mount+"run") || !strings.Contains(string(body), "SKIPPED") {
			t.Errorf("%s: %s at %s", mount, response.Status, response.Request.URL)
		}
	}
}
