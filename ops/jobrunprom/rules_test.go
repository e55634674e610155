package jobrunprom_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// expressions are those of the dashboard, with its variables replaced.
func expressions(t *testing.T) (all []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title, Description string
			Targets            []struct{ Expr string }
		}
	}
	text, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	for _, p := range dashboard.Panels {
		if p.Title == "" || p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("a panel says too little: %+v", p)
		}
		for _, target := range p.Targets {
			all = append(all, strings.NewReplacer("$job_name", ".*", "$__rate_interval", "5m").Replace(target.Expr))
		}
	}
	return all
}

// The rules and the dashboard name only metrics and labels that there are.
func TestRulesAndDashboardNameOurMetrics(t *testing.T) {
	t.Parallel()
	settle := jobrun.Job{Name: "settlement", Func: func(_ context.Context, run *jobrun.Run) error { run.AddFailed(1); return nil }}
	r, page := service(t, pgtest.New(t), settle)
	if _, err := r.RunDate(t.Context(), settle, r.Today()); err != nil {
		t.Fatal(err)
	}
	shown := page()
	rules, err := os.ReadFile("alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	used := regexp.MustCompile(`(jobrun_[a-z_]+)\{?([^}\s]*)\}?`)
	labels := regexp.MustCompile(`([a-z_]+)=`)
	found := used.FindAllStringSubmatch(strings.Join(append(expressions(t), string(rules)), "\n"), -1)
	if len(found) < 15 {
		t.Fatalf("only %d uses", len(found))
	}
	for _, use := range found {
		lines := regexp.MustCompile(`(?m)^`+use[1]+`(\{.*)? .*$`).FindAllString(shown, -1)
		if len(lines) == 0 {
			t.Errorf("no metric %s", use[1])
			continue
		}
		for _, label := range labels.FindAllStringSubmatch(use[2], -1) {
			if !strings.Contains(lines[0], label[1]+"=") {
				t.Errorf("%s has no label %s: %s", use[1], label[1], lines[0])
			}
		}
	}
}

// What Prometheus itself says of the rules and of the dashboard's expressions.
func TestPromtool(t *testing.T) {
	t.Parallel()
	tool, err := exec.LookPath("promtool")
	if err != nil {
		if os.Getenv("JOBRUN_REQUIRE_PROMTOOL") != "" {
			t.Fatal(err)
		}
		t.Skip("no promtool")
	}
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for i, e := range expressions(t) {
		fmt.Fprintf(&rules, "  - record: panel:%d\n    expr: %q\n", i, e)
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"check", "rules", file}, {"test", "rules", "alerts_test.yaml"}} {
		if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %q: %v\n%s", args, err, out)
		}
	}
}
