package ops

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/seed-ccb5b62c/jobrun"
)

func hangul(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return unicode.Is(unicode.Hangul, r) })
}

// Every text that a template or the code of the page asks for is there in Korean, with
// the same places for values.
func TestEveryTextOfThePageIsThereInKorean(t *testing.T) {
	t.Parallel()
	files, err := os.ReadDir("page")
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"page.go", "page_views.go", "page_act.go", "describe.go"}
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".html") {
			names = append(names, "page/"+f.Name())
		}
	}
	asked := map[string]bool{}
	for name := range english {
		asked[name] = true
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("\\bT(?: |\\()\"([^\"]+)\"").FindAllStringSubmatch(string(text), -1) {
			asked[m[1]] = !strings.HasSuffix(m[1], " ") // else the beginning of a name
		}
		for _, m := range regexp.MustCompile(`\badd\(.*, "([^"]+)", "([^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			asked[m[1]], asked[m[2]] = true, m[2] != "%s"
		}
	}
	if len(asked) < 100 || !asked["%d by %s"] || !asked["skip to content"] {
		t.Fatalf("%d texts", len(asked))
	}
	places := regexp.MustCompile("%[a-z]")
	for name, whole := range asked {
		if !whole {
			continue
		}
		text := koreanWords[name]
		if name != "heartbeat" && !hangul(text) {
			t.Errorf("%q is %q in Korean", name, text)
		}
		if got, want := places.FindAllString(text, -1), places.FindAllString(name, -1); strings.Join(got, "") != strings.Join(want, "") {
			t.Errorf("%q has %q in Korean", name, got)
		}
	}
}

func TestFactsInKorean(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 9, 15, 1, 0, 0, 0, time.UTC)
	rec := jobrun.Record{Key: "payout:2026-09-15", Status: jobrun.Running, Attempt: 2, WorkerID: "node-1-0a1b2c3d", StartedAt: at, HeartbeatAt: at, ItemsProcessed: 7, ItemsFailed: 1}
	facts := words{"ko", koreanWords}.facts(rec, &jobrun.StaleRun{Record: rec, Silent: time.Hour, Typical: time.Minute, Longest: time.Hour, Session: "gone"})
	if len(facts) < 7 {
		t.Error(facts)
	}
	for _, f := range facts {
		if !hangul(f[0]) || !utf8.ValidString(f[0]) || strings.ContainsRune(f[0]+f[1], utf8.RuneError) || strings.Contains(f[1], "%!") {
			t.Errorf("%q", f)
		}
	}
	if facts := (words{"en", english}).facts(rec, nil); facts[0] != [2]string{"Attempt", "2 by node-1-0a1b2c3d"} {
		t.Errorf("%q", facts)
	}
}
