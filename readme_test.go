package jobrun_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"os"
	osexec "os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/internal/torture/checker"
)

// The READMEs are tested as they are. A Go block that begins with "package" is a
// complete program; every other Go block is a fragment, the body of a function
// that is given readmeContext and may return an error. SQL blocks: see
// TestReadmeSQL.

var readmes = []string{"README.md", "README.ko.md"}

// readmeContext is what fragments may use without declaring it.
const readmeContext = `
	ctx context.Context, pool *pgxpool.Pool, zone *time.Location, runner *jobrun.Runner, job jobrun.Job, c *cron.Cron,
	settle func(), settleDate func(context.Context, jobrun.Date) error, errBadInput error,
	run *jobrun.Run, archiveAfter func(context.Context, pgx.Tx, int64) (int64, error), mux *http.ServeMux, userOf func(*http.Request) string,
	requireLogin func(http.Handler) http.Handler,
`

// readmeImports are the packages that fragments may use without importing them.
var readmeImports = map[string]string{
	"context": "context", "errors": "errors", "fmt": "fmt", "http": "net/http", "log": "log", "os": "os", "strconv": "strconv", "time": "time",
	"pgx":     "github.com/jackc/pgx/v5",
	"pgxpool": "github.com/jackc/pgx/v5/pgxpool", "cron": "github.com/robfig/cron/v3", "jobrun": "github.com/seed-ccb5b62c/jobrun",
	"ops": "github.com/seed-ccb5b62c/jobrun/ops",
}

func readFile(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// block is a fenced block of a README.
type block struct {
	file string
	line int // of its first line
	text string
}

func (b block) String() string { return fmt.Sprintf("%s:%d", b.file, b.line) }

// blocks returns the blocks of a language, in order.
func blocks(t testing.TB, language string) (all []block) {
	t.Helper()
	for _, file := range readmes {
		var open *block
		for i, line := range strings.Split(readFile(t, file), "\n") {
			fence, isFence := strings.CutPrefix(line, "```")
			switch {
			case isFence && open != nil:
				if open.file != "" {
					all = append(all, *open)
				}
				open = nil
			case isFence && fence == language:
				open = &block{file: file, line: i + 2}
			case isFence:
				open = &block{}
			case open != nil:
				open.text += line + "\n"
			}
		}
		if open != nil {
			t.Fatalf("%s: a block has no end", file)
		}
	}
	return all
}

// blockWith returns the first block of a language that contains a text.
func blockWith(t testing.TB, language, text string) block {
	t.Helper()
	for _, b := range blocks(t, language) {
		if strings.Contains(b.text, text) {
			return b
		}
	}
	t.Fatalf("no %s block contains %q", language, text)
	return block{}
}

// fragment wraps a fragment into a file of its own.
func fragment(t testing.TB, b block, n int) string {
	t.Helper()
	wrap := func(imports string) string {
		return fmt.Sprintf("package fragments\n\n%s\nfunc fragment%d(%s) error {\n\t{\n//line %s:%d\n%s\t}\n\treturn nil\n}\n\nvar _ = fragment%d\n",
			imports, n, readmeContext, b.file, b.line, b.text, n)
	}
	file, err := parser.ParseFile(token.NewFileSet(), "", wrap(""), parser.SkipObjectResolution)
	if err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	used := map[string]bool{}
	ast.Inspect(file, func(node ast.Node) bool {
		if s, ok := node.(*ast.SelectorExpr); ok {
			if x, ok := s.X.(*ast.Ident); ok && readmeImports[x.Name] != "" {
				used[x.Name] = true
			}
		}
		return true
	})
	var imports strings.Builder
	for _, name := range slices.Sorted(maps.Keys(used)) {
		fmt.Fprintf(&imports, "import %s %q\n", name, readmeImports[name])
	}
	return wrap(imports.String())
}

// buildBlocks builds all Go blocks in a module outside this one, offline, and
// returns the directory of the programs: program1 is the first of README.md.
func buildBlocks(t *testing.T) string {
	t.Helper()
	const module = "github.com/seed-ccb5b62c/jobrun"
	repo, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"go.mod": strings.Replace(readFile(t, "go.mod"), "module "+module, "module readme", 1) +
			fmt.Sprintf("\nrequire %s v0.0.0\n\nreplace %s => %q\n", module, module, repo),
		"go.sum":             readFile(t, "go.sum"),
		"fragments/types.go": "package fragments\n\ntype Order struct{ ID, Amount int64 }\n",
	}
	programs := map[string]bool{}
	elsewhere := readFile(t, "internal/sqldrivers/snippets_test.go")
	for i, b := range blocks(t, "go") {
		if module := regexp.MustCompile(`\b(jobrunprom|jobrunotel)\.`).FindStringSubmatch(b.text); module != nil {
			indented := "\t" + strings.ReplaceAll(strings.TrimSuffix(b.text, "\n"), "\n", "\n\t") + "\n"
			if file := "ops/" + module[1] + "/readme_test.go"; !strings.Contains(readFile(t, file), indented) {
				t.Errorf("%s is not in %s", b, file)
			}
		} else if strings.HasPrefix(b.text, "func ") {
			if !strings.Contains(elsewhere, b.text) {
				t.Errorf("%s is not in internal/sqldrivers", b)
			}
		} else if !strings.HasPrefix(b.text, "package ") {
			files[fmt.Sprintf("fragments/block%d.go", i)] = fragment(t, b, i)
		} else if !programs[b.text] { // a translation repeats it
			programs[b.text] = true
			files[fmt.Sprintf("program%d/main.go", len(programs))] = fmt.Sprintf("//line %s:%d\n%s", b.file, b.line, b.text)
		}
	}
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"vet", "-unreachable=false", "./..."}, {"build", "-o", bin + string(filepath.Separator), "./..."}} { // build -o leaves the fragments out
		cmd := osexec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod -buildvcs=false", "GOPROXY=off", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", args[0], err, out)
		}
	}
	return bin
}

// TestReadmeGo compiles every Go block and executes the complete programs.
func TestReadmeGo(t *testing.T) {
	t.Parallel()
	bin := buildBlocks(t)
	start := func(t *testing.T, program, url string) (*osexec.Cmd, *bytes.Buffer) {
		t.Helper()
		var out bytes.Buffer
		cmd := osexec.CommandContext(t.Context(), filepath.Join(bin, program))
		cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), "DATABASE_URL="+url, "TZ=America/New_York"), &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, &out
	}
	execute := func(t *testing.T, program, url string) (code int, output string) {
		t.Helper()
		cmd, out := start(t, program, url)
		if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), out.String()
	}

	t.Run("first program", func(t *testing.T) {
		db := pgtest.Empty(t)
		r := newRunner(t, db.Pool, jobrun.Options{})
		shown := readFile(t, "README.md")
		today := r.Today()
		for i, want := range []string{
			"settling 2026-09-15\nRAN daily-settlement:2026-09-15 SUCCEEDED\n",
			"ALREADY_SUCCEEDED daily-settlement:2026-09-15 SUCCEEDED\n",
		} {
			if !strings.Contains(shown, "```\n"+want+"```\n") {
				t.Fatalf("README.md does not show the output %q", want)
			}
			code, out := execute(t, "program1", db.URL)
			if r.Today() != today {
				t.Skip("midnight in Seoul")
			}
			for line := range strings.Lines(strings.ReplaceAll(want, "2026-09-15", today.String())) {
				if code != 0 || !strings.Contains(out, line) {
					t.Errorf("start %d: exit code %d, output without %q:\n%s", i+1, code, line, out)
				}
			}
		}
	})

	t.Run("one-shot main", func(t *testing.T) {
		db := pgtest.New(t)
		r := newRunner(t, db.Pool, jobrun.Options{})
		today := r.Today()
		key := "daily-settlement:" + today.AddDays(-1).String()
		procedure := func(body string) {
			exec(t, db.Pool, "CREATE OR REPLACE PROCEDURE settle_orders(d date) LANGUAGE plpgsql AS $$ BEGIN "+body+"; END $$")
		}
		step := func(what string, code, wantCode int, status jobrun.Status, attempt int, out string) jobrun.Record {
			t.Helper()
			if r.Today() != today {
				t.Skip("midnight in Seoul")
			}
			rec, err := r.Get(t.Context(), key)
			if err != nil || code != wantCode || rec.Status != status || rec.Attempt != attempt {
				t.Fatalf("%s: exit code %d, %+v, %v; want %d and attempt %d %s\n%s", what, code, rec, err, wantCode, attempt, status, out)
			}
			return rec
		}

		procedure("PERFORM pg_sleep(60)")
		cmd, out := start(t, "program2", db.URL)
		eventually(t, "the procedure runs", func() bool {
			return query[bool](t, db.Pool, `SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE 'CALL settle_orders%'`)
		})
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		rec := step("SIGTERM", cmd.ProcessState.ExitCode(), 1, jobrun.Failed, 1, out.String())
		if rec.NextAttemptAt.IsZero() || rec.NextAttemptAt.Sub(rec.FinishedAt) > time.Second {
			t.Errorf("SIGTERM: %+v is not due at once", rec)
		}

		procedure("RAISE EXCEPTION 'ledger out of balance'")
		code, text := execute(t, "program2", db.URL)
		step("the replacement fails", code, 1, jobrun.Failed, 2, text)
		code, text = execute(t, "program2", db.URL)
		step("too early", code, 1, jobrun.Failed, 2, text)
		if !strings.Contains(text, "RETRY_LATER") {
			t.Errorf("too early: %s", text)
		}

		procedure("NULL")
		exec(t, db.Pool, `UPDATE batch_job_run SET next_attempt_at = now()`)
		code, text = execute(t, "program2", db.URL)
		step("attempt 3", code, 0, jobrun.Succeeded, 3, text)
		code, text = execute(t, "program2", db.URL)
		step("again", code, 0, jobrun.Succeeded, 3, text)
	})
}

// parameters stand for $1 and $2 of SQL blocks.
var parameters = strings.NewReplacer("$1", "'daily-settlement:2026-09-15'", "$2", "'node-2-77aa01cd'")

// script executes a whole SQL block and returns the tags of its statements.
func script(t testing.TB, pool *pgxpool.Pool, sql string) (tags []string) {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	results, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%v in\n%s", err, sql)
	}
	for _, result := range results {
		tags = append(tags, result.CommandTag.String())
	}
	return tags
}

// TestReadmeSQL executes every SQL block. The table of the six columns comes
// first and is adopted by Migrate; the others follow in the order of the README,
// each in a transaction that is rolled back.
func TestReadmeSQL(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	script(t, db.Pool, blockWith(t, "sql", "CREATE TABLE batch_job_run (").text)
	r := newRunner(t, db.Pool, jobrun.Options{})
	for range 2 {
		if err := errors.Join(r.Migrate(t.Context()), r.Verify(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"settlement_service", "settlement_operator", "settlement_reader"}
	roles := map[string]string{}
	pools := map[string]*pgxpool.Pool{}
	var renamed []string
	for _, name := range names {
		role, url := db.Role(t, "")
		roles[name], renamed = role, append(renamed, name, role)
		pools[name] = db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig = mustConfig(t, url).ConnConfig })
	}
	rename := strings.NewReplacer(renamed...)
	grants := rename.Replace(blockWith(t, "sql", "GRANT USAGE").text)
	for _, b := range blocks(t, "sql") {
		if strings.Contains(b.text, "CREATE TABLE batch_job_run (") {
			continue
		}
		sql := parameters.Replace(rename.Replace(b.text))
		if strings.HasPrefix(sql, "SELECT") { // for people who look: the reader's privileges do
			sql = grants + "SET LOCAL ROLE " + roles["settlement_reader"] + ";" + sql
		}
		tags := script(t, db.Pool, "BEGIN;"+sql+";ROLLBACK")
		if len(tags) < 3 {
			t.Errorf("%s: nothing was executed: %q", b, tags)
		}
	}

	// What the README says of the roles. TestRolesCanDoWhatTheyAreGranted tries each
	// grant; it must be those that are shown.
	if shown := blockWith(t, "sql", "GRANT USAGE").text; strings.TrimSpace(shown) != strings.TrimSpace(recipe) {
		t.Errorf("README.md shows\n%s\nand tried is\n%s", shown, recipe)
	}
	script(t, db.Pool, grants)
	service := newRunner(t, pools["settlement_service"], jobrun.Options{})
	fails := jobrun.Job{Name: "fails", Func: func(context.Context, *jobrun.Run) error { return errors.New("no") }}
	res, err := service.RunDate(t.Context(), fails, date)
	if !res.Ran() || res.Record.Status != jobrun.Failed {
		t.Errorf("as the service: %+v, %v", res, err)
	}
	_, err = service.ApproveRerun(t.Context(), res.Record, jobrun.Action{By: "service", Reason: "try"})
	if err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("as the service: ApproveRerun: %v", err)
	}
	acting := newRunner(t, pools["settlement_operator"], jobrun.Options{})
	if _, err := acting.ApproveRerun(t.Context(), res.Record, jobrun.Action{By: "operator", Reason: "try"}); err != nil {
		t.Errorf("as the operator: ApproveRerun: %v", err)
	}
	if res, err = service.RunDate(t.Context(), fails, date); res.Record.Trigger != jobrun.TriggerRerun {
		t.Errorf("as the service: the re-run: %+v, %v", res, err)
	}
	if err := acting.Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "missing privilege on batch_job_migration: SELECT") {
		t.Errorf("as the operator: Verify: %v", err)
	}
	if _, err := acting.Skip(t.Context(), fails.Key(date), jobrun.Action{By: "operator", Reason: "done by hand"}); err != nil {
		t.Fatal(err)
	}
	before := date.AddDays(1)
	if n, err := acting.Prune(t.Context(), before); err == nil {
		t.Errorf("as the operator, without DELETE: pruned %d", n)
	}
	script(t, db.Pool, rename.Replace(blockWith(t, "sql", "GRANT SELECT, DELETE").text))
	if n, err := acting.Prune(t.Context(), before); err != nil || n != 1 {
		t.Errorf("as the operator: pruned %d, %v", n, err)
	}
}

func mustConfig(t testing.TB, url string) *pgxpool.Config {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// TestReadmeNeighbour: the statements for other programs, with the conditions
// that keep them from ending somebody else's attempt.
func TestReadmeNeighbour(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	sql := parameters.Replace(blockWith(t, "sql", "VALUES ($1, 'RUNNING', $2)").text)
	if tags := script(t, db.Pool, sql); !slices.Equal(tags, []string{"INSERT 0 1", "UPDATE 1"}) {
		t.Errorf("a free key: %q", tags)
	}
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily-settlement", Func: noop}, date)
	if err != nil || res.Decision != jobrun.AlreadySucceeded {
		t.Errorf("jobrun after the other program: %+v, %v", res, err)
	}

	exec(t, db.Pool, `DELETE FROM batch_job_run`)
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily-settlement"})
	if tags := script(t, db.Pool, sql); !slices.Equal(tags, []string{"INSERT 0 0", "UPDATE 0"}) {
		t.Errorf("a key that jobrun holds: %q", tags)
	}
	f.succeeds(t, 1)
}

// TestReadmeConflicts: what the operator's page says of ErrConflict and ErrAlive.
func TestReadmeConflicts(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	by := jobrun.Action{By: "operator", Reason: "try"}
	f := launch(t, t.Context(), r, jobrun.Job{Name: "daily-settlement"})
	seen := recordOf(t, r, "daily-settlement:2026-09-15")
	if now, err := r.MarkFailed(t.Context(), seen, by); !errors.Is(err, jobrun.ErrAlive) || now.Status != jobrun.Running {
		t.Errorf("it sends heartbeats: %+v, %v", now, err)
	}
	f.succeeds(t, 1)
	if now, err := r.MarkFailed(t.Context(), seen, by); !errors.Is(err, jobrun.ErrConflict) || now.Status != jobrun.Succeeded {
		t.Errorf("it has ended by itself: %+v, %v", now, err)
	}
	by.Force = true
	var copied jobrun.Record
	text, err := json.Marshal(recordOf(t, r, seen.Key))
	if err := errors.Join(err, json.Unmarshal(text, &copied)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ApproveRerun(t.Context(), copied, by); !errors.Is(err, jobrun.ErrConflict) {
		t.Errorf("after a way through JSON: %v", err)
	}
	if _, err := r.ApproveRerun(t.Context(), recordOf(t, r, seen.Key), by); err != nil {
		t.Error(err)
	}
}

// cells returns the words in backticks in the first column of the table of
// README.md that begins with this heading.
func cells(t testing.TB, heading string) (words []string) {
	t.Helper()
	_, table, found := strings.Cut(readFile(t, "README.md"), "\n"+heading)
	if !found {
		t.Fatalf("README.md has no table %q", heading)
	}
	_, table, _ = strings.Cut(table, "\n")
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") {
			break
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(strings.Split(line, "|")[1], -1) {
			words = append(words, m[1])
		}
	}
	return words
}

func TestReadmeNamesEveryField(t *testing.T) {
	for heading, v := range map[string]any{"| `Options` |": jobrun.Options{}, "| `Job` |": jobrun.Job{}} {
		var fields []string
		for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
			fields = append(fields, f.Name)
		}
		if got := cells(t, heading); !slices.Equal(got, fields) {
			t.Errorf("table %s has %q, the struct %q", heading, got, fields)
		}
	}
}

// constants returns the values of the constants of a type, in the order of the source.
func constants(t testing.TB, file, typ string) (values []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(parsed, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok {
			if name, ok := spec.Type.(*ast.Ident); ok && name.Name == typ {
				for _, v := range spec.Values {
					if literal, ok := v.(*ast.BasicLit); ok {
						values = append(values, strings.Trim(literal.Value, `"`))
					}
				}
			}
		}
		return true
	})
	if len(values) == 0 {
		t.Fatalf("%s has no constants of type %s", file, typ)
	}
	return values
}

func TestReadmeNamesEveryConstant(t *testing.T) {
	for _, c := range []struct{ heading, file, typ string }{
		{"| decision |", "status.go", "Decision"},
		{"| kind |", "attention.go", "ProblemKind"},
	} {
		want := constants(t, c.file, c.typ)
		got := cells(t, c.heading)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("table %s has %q, the code %q", c.heading, got, want)
		}
	}
	shown := readFile(t, "README.md")
	for _, trigger := range constants(t, "status.go", "Trigger") {
		if !regexp.MustCompile(`trigger is .*\b` + trigger + `\b`).MatchString(shown) {
			t.Errorf("the table of attributes has no trigger %s", trigger)
		}
	}
	for _, status := range constants(t, "status.go", "Status") {
		if !regexp.MustCompile(`(?m)^\| ` + status + `\b`).MatchString(shown) {
			t.Errorf("the table of states has no %s", status)
		}
	}
}

// TestReadmeNamesAllEvidence: what Stale adds to a record.
func TestReadmeNamesAllEvidence(t *testing.T) {
	named := cells(t, "| evidence |")
	for i := range reflect.TypeFor[jobrun.StaleRun]().NumField() {
		if f := reflect.TypeFor[jobrun.StaleRun]().Field(i); !f.Anonymous && !slices.Contains(named, f.Name) {
			t.Errorf("the table has no %s", f.Name)
		}
	}
	for _, name := range named {
		if _, ok := reflect.TypeFor[jobrun.StaleRun]().FieldByName(name); !ok {
			t.Errorf("there is no %s", name)
		}
	}
}

// TestReadmeNamesEveryLogMessage reads the messages from the source, because some
// of them take a fault to be written.
func TestReadmeNamesEveryLogMessage(t *testing.T) {
	var files []string
	for _, pattern := range []string{"*.go", "internal/lease/*.go", "internal/schema/*.go"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	call := regexp.MustCompile(`[lL]og\.(Info|Warn|Error)(?:Context)?\((?:ctx, )?"([^"]+)"`)
	shown, n := readFile(t, "README.md"), 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, m := range call.FindAllStringSubmatch(readFile(t, file), -1) {
			n++
			if !regexp.MustCompile(`(?m)^\| ` + strings.ToUpper(m[1]) + ` \|.*` + regexp.QuoteMeta("`"+m[2]+"`")).MatchString(shown) {
				t.Errorf("README.md has no %s line %q of %s", m[1], m[2], file)
			}
		}
	}
	if n < 10 {
		t.Errorf("found only %d messages", n)
	}
}

// TestReadmeNamesEveryExample: each directory of examples.
func TestReadmeNamesEveryExample(t *testing.T) {
	entries, err := os.ReadDir("examples")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{}
	for _, e := range entries {
		want = append(want, "examples/"+e.Name())
	}
	got := cells(t, "| example |")
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("README.md lists %q, there are %q", got, want)
	}
}

// TestReadmeNamesEveryLogAttribute compares the tables of log lines with what is
// written.
func TestReadmeNamesEveryLogAttribute(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var text logText
	r := newRunner(t, db.Pool, jobrun.Options{Logger: slog.New(slog.NewJSONHandler(&text, nil))})
	theirs := errors.New("ledger out of balance")
	for _, job := range []jobrun.Job{
		{Name: "good", Func: func(_ context.Context, run *jobrun.Run) error { run.AddProcessed(1); return nil }},
		{Name: "bad", Func: func(context.Context, *jobrun.Run) error { return theirs }},
		{Name: "twice", Func: func(ctx context.Context, run *jobrun.Run) error {
			_, err := jobrun.Each(ctx, run, jobrun.FromSlice([]int{1, 1}), orderKey, func(context.Context, pgx.Tx, int) error { return nil }, &jobrun.EachOptions{Step: "pay"})
			return err
		}},
		{Name: "later", Retry: jobrun.Retry{MaxAttempts: 2}, Func: func(context.Context, *jobrun.Run) error { return theirs }},
	} {
		for range 2 {
			_, err := r.RunDate(t.Context(), job, date)
			if err != nil && !errors.Is(err, theirs) {
				t.Error(err)
			}
		}
	}
	if _, err := r.Run(t.Context(), jobrun.Job{Name: "no function"}); err == nil {
		t.Error("no error")
	}
	bad, err := r.Get(t.Context(), "bad:2026-09-15")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ApproveRerun(t.Context(), bad, jobrun.Action{By: "operator", Reason: "ledger mended"}); err != nil {
		t.Error(err)
	}
	elsewhere := cron.New(cron.WithLocation(time.UTC))
	if _, err := r.Schedule(t.Context(), elsewhere, "0 1 * * *", jobrun.Job{Name: "good", Func: noop}); err != nil {
		t.Error(err)
	}
	if _, err := r.Schedule(t.Context(), elsewhere, "at noon", jobrun.Job{Name: "good", Func: noop}); err == nil {
		t.Error("no error")
	}
	attributes, lines := map[string]bool{}, map[string]bool{}
	for _, line := range text.lines() {
		var values map[string]any
		if err := json.Unmarshal([]byte(line), &values); err != nil {
			t.Fatal(err)
		}
		lines[fmt.Sprintf("| %s | `%s` |", values[slog.LevelKey], values[slog.MessageKey])] = true
		for name := range values {
			attributes[name] = true
		}
	}
	for _, name := range []string{slog.TimeKey, slog.LevelKey, slog.MessageKey} {
		delete(attributes, name)
	}
	want := slices.Sorted(maps.Keys(attributes))
	if got := slices.Sorted(slices.Values(cells(t, "| attribute |"))); !slices.Equal(got, want) {
		t.Errorf("README.md names %q, written are %q", got, want)
	}
	shown := readFile(t, "README.md")
	for line := range lines {
		if !strings.Contains(shown, line) {
			t.Errorf("README.md has no row %s", line)
		}
	}
}

// TestReadmeNamesTestsThatExist: the tests that it calls as witnesses.
func TestReadmeNamesTestsThatExist(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	all := ""
	for _, file := range files {
		all += readFile(t, file)
	}
	for _, name := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(readFile(t, "README.md"), -1) {
		if !strings.Contains(all, "\nfunc "+name[1]+"(") {
			t.Errorf("there is no %s", name[1])
		}
	}
}

// TestReadmeNamesRulesThatExist: what the guarantees name in the model and in the
// checker of the torture run.
func TestReadmeNamesRulesThatExist(t *testing.T) {
	model := readFile(t, "internal/model/protocol.pml")
	named := map[string]bool{}
	_, guarantees, _ := strings.Cut(readFile(t, "README.md"), "\n## Guarantees\n")
	guarantees, _, _ = strings.Cut(guarantees, "\n## ")
	read := 0
	for line := range strings.Lines(guarantees) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 6 || strings.HasPrefix(cells[1], "-") || strings.TrimSpace(cells[1]) == "effect" {
			continue
		}
		read++
		for _, m := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(cells[4], -1) {
			if !regexp.MustCompile(`(?m)^\t` + m[1] + `, `).MatchString(model) {
				t.Errorf("the model has no rule %s", m[1])
			}
		}
		for _, m := range regexp.MustCompile(`"([^"]+)"`).FindAllStringSubmatch(cells[4], -1) {
			named[m[1]] = true
		}
	}
	if read < 20 {
		t.Errorf("read %d guarantees, there are more", read)
	}
	for _, rule := range checker.Rules {
		delete(named, rule.Name)
	}
	if len(named) > 0 {
		t.Errorf("the checker has no rules %v", slices.Collect(maps.Keys(named)))
	}
}

func TestReadmeLinks(t *testing.T) {
	anchors := map[string]bool{}
	for line := range strings.Lines(readFile(t, "README.md")) {
		if title := strings.TrimLeft(line, "#"); title != line {
			anchors["#"+strings.NewReplacer(" ", "-", ",", "", "/", "").Replace(strings.ToLower(strings.TrimSpace(title)))] = true
		}
	}
	for _, file := range append(readmes, "CHANGELOG.md") {
		for _, link := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(readFile(t, file), -1) {
			if strings.HasPrefix(link[1], "https://") {
				continue
			}
			path, anchor, _ := strings.Cut(link[1], "#")
			if _, err := os.Stat(path); path != "" && err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if anchor != "" && !anchors["#"+anchor] {
				t.Errorf("%s: README.md has no heading for #%s", file, anchor)
			}
		}
	}
}

// The README's claims about cron.
func TestCronFacts(t *testing.T) {
	t.Parallel()
	if got := cron.New().Location(); got != time.Local {
		t.Errorf("cron takes the zone %s", got)
	}
	newYork, err := time.LoadLocation("America/New_York")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ spec, after, want string }{
		{"30 2 * * *", "2026-03-07 12:00", "2026-03-09 02:30 -0400"}, // the clock leaves 02:30 out on the 8th
		{"30 1 * * *", "2026-10-31 12:00", "2026-11-01 01:30 -0400"}, // and shows 01:30 twice on the 1st
		{"30 1 * * *", "2026-11-01 01:30", "2026-11-01 01:30 -0500"},
	} {
		schedule, err := cron.ParseStandard(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		after, err := time.ParseInLocation("2006-01-02 15:04", c.after, newYork)
		if err != nil {
			t.Fatal(err)
		}
		if got := schedule.Next(after).Format("2006-01-02 15:04 -0700"); got != c.want {
			t.Errorf("%s after %s: %s, want %s", c.spec, c.after, got, c.want)
		}
	}

	panicking := pgtest.Reexec(t, "cron-panics")
	var out strings.Builder
	panicking.Stderr = &out
	if err := panicking.Run(); err == nil || !strings.Contains(out.String(), "panic: from a callback") {
		t.Errorf("a panic in a callback: %v\n%s", err, &out)
	}
}

var _ = pgtest.RegisterChild("cron-panics", func() int {
	c := cron.New()
	c.Schedule(cron.Every(time.Second), cron.FuncJob(func() { panic("from a callback") }))
	c.Start()
	time.Sleep(patience)
	return 0
})

// TestCronCallbackRecordsThePanic: the same panic, wrapped.
func TestCronCallbackRecordsThePanic(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRunner(t, db.Pool, jobrun.Options{})
	job := jobrun.Job{Name: "daily-settlement", Func: func(context.Context, *jobrun.Run) error { panic("from a callback") }}
	c := cron.New(cron.WithLocation(seoul))
	fired := make(chan time.Time, 10)
	var id cron.EntryID
	id = c.Schedule(cron.Every(time.Second), cron.FuncJob(func() {
		nominal := c.Entry(id).Prev
		_, _ = r.RunTrigger(context.Background(), job, nominal)
		fired <- nominal
	}))
	c.Start()
	var nominal time.Time
	select {
	case nominal = <-fired:
	case <-time.After(patience):
		t.Fatal("cron did not fire")
	}
	<-c.Stop().Done()
	rec, err := r.Get(t.Context(), job.Key(jobrun.DateOf(nominal.In(seoul))))
	if err != nil || rec.Status != jobrun.Failed || !rec.ScheduledFor.Equal(nominal) {
		t.Errorf("fire at %s: %+v, %v", nominal, rec, err)
	}
}

// TestEveryExecMode: what the README says about poolers, as far as it can be
// tried without one.
func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			separator := "?"
			if strings.Contains(db.URL, "?") {
				separator = "&"
			}
			url := db.URL + separator + "default_query_exec_mode=" + mode
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig = mustConfig(t, url).ConnConfig })
			r := newRunner(t, pool, jobrun.Options{Lease: time.Second})
			if err := errors.Join(r.Migrate(t.Context()), r.Verify(t.Context())); err != nil {
				t.Fatal(err)
			}
			f := launch(t, t.Context(), r, jobrun.Job{Name: "daily-settlement", Calendar: jobrun.Weekdays})
			beaten(t, db.Pool, "daily-settlement:2026-09-15", 1)
			f.succeeds(t, 1)
			_, listErr := r.List(t.Context(), jobrun.Filter{Job: "daily-settlement"})
			_, staleErr := r.Stale(t.Context())
			_, historyErr := r.History(t.Context(), "daily-settlement:2026-09-15")
			if err := errors.Join(listErr, staleErr, historyErr); err != nil {
				t.Error(err)
			}
		})
	}
}
