package jobrun_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// secret is what must not be told, and its spelling survives every way of quoting.
const secret = "Xk7Secret9Q"

// A witness hears everything that jobrun says: log lines of every level as text, as
// JSON and as they are, events, and the errors that the test notes.
type witness struct {
	log        *slog.Logger
	text, json bytes.Buffer // read them when the Runner is shut down
	book       *logBook

	mu   sync.Mutex
	said []string
}

func newWitness() *witness {
	w := &witness{book: newLogBook()}
	all := &slog.HandlerOptions{Level: slog.LevelDebug}
	w.log = slog.New(slog.NewMultiHandler(slog.NewTextHandler(&w.text, all), slog.NewJSONHandler(&w.json, all), w.book))
	return w
}

// runner returns a Runner that the witness hears, and what shuts it down.
func (w *witness) runner(t testing.TB, pool *pgxpool.Pool, opts jobrun.Options) *jobrun.Runner {
	t.Helper()
	opts.Logger = w.log
	opts.OnEvent = func(_ context.Context, e jobrun.Event) {
		text, err := json.Marshal(e.Record)
		if err != nil {
			t.Error(err)
		}
		w.note(string(text), e.Err)
	}
	return newRunner(t, pool, opts)
}

// note keeps a text and an error, with all errors in it, as one may print them.
func (w *witness) note(text string, errs ...error) {
	w.mu.Lock()
	w.said = append(w.said, text)
	w.mu.Unlock()
	for _, err := range errs {
		if err == nil {
			continue
		}
		w.note(fmt.Sprintf("%v\n%+v\n%q\n%s", err, err, err, err))
		switch e := err.(type) { //nolint:errorlint // walks the tree itself
		case interface{ Unwrap() error }:
			w.note("", e.Unwrap())
		case interface{ Unwrap() []error }:
			w.note("", e.Unwrap()...)
		}
	}
}

// all is everything that was said. The Runner is shut down before.
func (w *witness) all(t testing.TB, r *jobrun.Runner) []string {
	t.Helper()
	w.note("shutdown", r.Shutdown(t.Context()))
	w.mu.Lock()
	defer w.mu.Unlock()
	return append(slices.Clone(w.said), w.text.String(), w.json.String())
}

// told reports what was said and has the secret in it.
func (w *witness) told(t testing.TB, r *jobrun.Runner) {
	t.Helper()
	for _, said := range w.all(t, r) {
		if at := strings.Index(said, secret); at >= 0 {
			t.Errorf("told: ...%.300q", said[max(0, at-200):])
		}
	}
}

// stored is everything in jobrun's tables but the values of checkpoints.
func stored(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	return query[string](t, pool, `SELECT concat_ws(E'\n', (SELECT jsonb_agg(r) FROM batch_job_run AS r), (SELECT jsonb_agg(a) FROM batch_job_attempt AS a),
		(SELECT jsonb_agg(p) FROM batch_job_action AS p), (SELECT jsonb_agg(i) FROM batch_job_item AS i), (SELECT jsonb_agg(f) FROM batch_job_item_failure AS f),
		(SELECT jsonb_agg(to_jsonb(c) - 'value') FROM batch_job_checkpoint AS c), (SELECT jsonb_agg(m) FROM batch_job_migration AS m))`)
}

// refusesPasswords is the URL's server as one that asks for a password and does
// not take it.
func refusesPasswords(t *testing.T) (host string) {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() { _ = listener.Close(); all.Wait() })
	all.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer func() { _ = conn.Close() }()
				server := pgproto3.NewBackend(conn, conn)
				if _, err := server.ReceiveStartupMessage(); err != nil {
					return
				}
				server.Send(&pgproto3.AuthenticationCleartextPassword{})
				if server.Flush() != nil || server.SetAuthType(pgproto3.AuthTypeCleartextPassword) != nil {
					return
				}
				if sent, err := server.Receive(); err != nil || !strings.Contains(sent.(*pgproto3.PasswordMessage).Password, secret) {
					t.Errorf("sent %v, %v; want the password", sent, err)
				}
				server.Send(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "28P01", Message: "password authentication failed"})
				_ = server.Flush()
			})
		}
	})
	return listener.Addr().String()
}

// secretRole is a new role's name, and its URL with a password that is the secret
// among characters that URLs and SQL escape.
func secretRole(t *testing.T, db *pgtest.DB) (role string, at *url.URL) {
	t.Helper()
	role, roleURL := db.Role(t, "")
	const password = secret + ` @/:?#'"\%`
	exec(t, db.Pool, `ALTER ROLE `+role+` PASSWORD '`+strings.ReplaceAll(password, `'`, `''`)+`'`)
	at, err := url.Parse(roleURL)
	if err != nil {
		t.Fatal(err)
	}
	at.User = url.UserPassword(role, password)
	return role, at
}

// Whatever goes wrong with a connection, nobody is told its password.
func TestPasswordsAreNotTold(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	_, at := secretRole(t, db)
	p := pgtest.NewProxy(t, at.String())
	p.RefuseNew(true)
	with := func(change func(*url.URL)) string {
		u := *at
		change(&u)
		return u.String()
	}
	set := func(name, value string) func(*url.URL) {
		return func(u *url.URL) {
			q := u.Query()
			q.Set(name, value)
			u.RawQuery = q.Encode()
		}
	}
	for name, to := range map[string]string{
		"no-privileges":  at.String(),
		"no-database":    with(func(u *url.URL) { u.Path = "/nowhere" }),
		"wrong-password": with(func(u *url.URL) { u.Host = refusesPasswords(t); set("sslmode", "disable")(u) }),
		"no-server":      with(func(u *url.URL) { u.Host = "127.0.0.1:1" }),
		"no-host":        with(func(u *url.URL) { u.Host = "nowhere.invalid" }),
		"no-socket":      with(set("host", "/nowhere")),
		"no-tls":         with(set("sslmode", "require")),
		"bad-setting":    with(set("default_transaction_isolation", "no such level")),
		"refused":        p.URL(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := (&pgtest.DB{URL: to}).PoolWith(t, nil)
			if !strings.Contains(pool.Config().ConnConfig.Password, secret) {
				t.Fatalf("the pool's password is %q", pool.Config().ConnConfig.Password)
			}
			w := newWitness()
			r := w.runner(t, pool, jobrun.Options{})
			job := jobrun.Job{Name: "daily", Func: noop}
			rec := jobrun.Record{Key: job.Key(date), Status: jobrun.Failed, Attempt: 1}
			only := func(_ any, err error) error { return err }
			for what, call := range map[string]func(ctx context.Context) error{
				"New":          func(context.Context) error { return only(jobrun.New(pool, nil, nil)) },
				"Migrate":      r.Migrate,
				"Verify":       r.Verify,
				"Run":          func(ctx context.Context) error { return only(r.Run(ctx, job)) },
				"RunDate":      func(ctx context.Context) error { return only(r.RunDate(ctx, job, date)) },
				"Schedule":     func(ctx context.Context) error { return only(r.Schedule(ctx, cron.New(), "TZ=", job)) },
				"RetryDue":     func(ctx context.Context) error { return only(r.RetryDue(ctx, job)) },
				"CatchUp":      func(ctx context.Context) error { return only(r.CatchUp(ctx, job, date, date, 1)) },
				"Missed":       func(ctx context.Context) error { return only(r.Missed(ctx, job, date, date)) },
				"Get":          func(ctx context.Context) error { return only(r.Get(ctx, rec.Key)) },
				"List":         func(ctx context.Context) error { return only(r.List(ctx, jobrun.Filter{})) },
				"History":      func(ctx context.Context) error { return only(r.History(ctx, rec.Key)) },
				"Stale":        func(ctx context.Context) error { return only(r.Stale(ctx)) },
				"Attention":    func(ctx context.Context) error { return only(r.Attention(ctx, nil, job)) },
				"FailedItems":  func(ctx context.Context) error { return only(r.FailedItems(ctx, rec.Key, "", 1)) },
				"CountItems":   func(ctx context.Context) error { _, _, err := r.CountItems(ctx, rec.Key); return err },
				"MarkFailed":   func(ctx context.Context) error { return only(r.MarkFailed(ctx, rec, operator)) },
				"ApproveRerun": func(ctx context.Context) error { return only(r.ApproveRerun(ctx, rec, operator)) },
				"Skip":         func(ctx context.Context) error { return only(r.Skip(ctx, rec.Key, operator)) },
				"Prune":        func(ctx context.Context) error { return only(r.Prune(ctx, jobrun.MustParseDate("2020-01-01"))) },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				err := call(ctx)
				cancel()
				if err == nil {
					t.Errorf("%s: no error", what)
				}
				w.note(what, err)
			}
			w.told(t, r)
		})
	}
}

// A connection that breaks under a running job is logged, returned and stored
// without its password.
func TestPasswordsAreNotToldOfRunningJobs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role, at := secretRole(t, db)
	exec(t, db.Pool, `GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO `+role)
	p := pgtest.NewProxy(t, at.String())
	w := newWitness()
	r := w.runner(t, (&pgtest.DB{URL: p.URL()}).PoolWith(t, nil), jobrun.Options{Lease: time.Second})
	res, err := r.RunDate(t.Context(), jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		p.RefuseNew(true)
		p.CutAll()
		defer p.RefuseNew(false)
		_, once := run.Once(ctx, "item", func(pgx.Tx) error { return nil })
		<-ctx.Done()
		return errors.Join(once, context.Cause(ctx))
	}}, date)
	if !errors.Is(err, jobrun.ErrLeaseLost) || res.Record.Status != jobrun.Failed {
		t.Errorf("%+v, %v", res, err)
	}
	w.note("run", err)
	if w.told(t, r); w.book.count(slog.LevelWarn) == 0 || strings.Contains(stored(t, db.Pool), secret) {
		t.Errorf("%d warnings, stored: %s", w.book.count(slog.LevelWarn), stored(t, db.Pool))
	}
}

// What the database says about rows beside an error's text (its detail, its
// context, the statement), the arguments of statements, items, checkpoints and what
// a job has read are neither logged nor stored nor part of an error's text.
func TestRowsAndItemsAreNotTold(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	exec(t, db.Pool, `CREATE TABLE customer (email text UNIQUE, later text UNIQUE DEFERRABLE INITIALLY DEFERRED, name text NOT NULL DEFAULT '');
		CREATE FUNCTION enter(email text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE format('INSERT INTO customer (email) VALUES (%L)', email); END $$;
		CREATE FUNCTION misspell(email text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE format('SELECT nothing(%L)', email); END $$;
		CREATE FUNCTION complain(email text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'declined' USING DETAIL = email, HINT = email; END $$`)
	exec(t, db.Pool, `INSERT INTO customer (email, later) VALUES ($1, $1)`, secret)
	type order struct {
		ID    int
		Email string
	}
	statements := []string{
		`SELECT $1::text`, `SELECT enter($1)`, `SELECT misspell($1)`, `SELECT complain($1)`, `INSERT INTO customer (email) VALUES ($1)`,
		`INSERT INTO customer (email, name) VALUES ($1 || '-6', NULL)`, `INSERT INTO customer (email) VALUES ($1)`,
	}
	modes := 0
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			w := newWitness()
			pool := db.PoolWith(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			modes++
			r := w.runner(t, pool, jobrun.Options{})
			orders := []order{{1, secret}, {2, secret}, {3, secret}, {4, secret}, {5, secret}, {6, secret}, {7, secret + mode.String()}}
			var mu sync.Mutex
			beside := map[string]int{} // where the server told the secret
			carries := func(err error) error {
				var pg *pgconn.PgError
				if errors.As(err, &pg) {
					mu.Lock()
					defer mu.Unlock()
					for where, text := range map[string]string{"detail": pg.Detail, "hint": pg.Hint, "where": pg.Where, "query": pg.InternalQuery} {
						beside[where] += strings.Count(text, secret)
					}
				}
				return err
			}
			for name, f := range map[string]jobrun.Func{
				"each": func(ctx context.Context, run *jobrun.Run) error {
					_, err := jobrun.Each(ctx, run, jobrun.FromSlice(orders), func(o order) string { return orderKey(o.ID) }, func(ctx context.Context, tx pgx.Tx, o order) error {
						if err := run.SetCheckpoint(ctx, tx, o); err != nil {
							return err
						}
						_, err := tx.Exec(ctx, statements[o.ID-1], o.Email)
						return carries(err)
					}, nil)
					var items *jobrun.ItemsError
					if !errors.As(err, &items) || items.Failed != 5 {
						t.Errorf("%v", err)
					} else {
						for _, item := range items.First {
							w.note(item.Item, item.Err)
						}
					}
					var wrong int
					found, decoding := run.Checkpoint(ctx, &wrong)
					if found || decoding == nil {
						t.Errorf("a checkpoint decodes into the wrong type: %v", decoding)
					}
					return errors.Join(err, decoding)
				},
				"tx": func(ctx context.Context, run *jobrun.Run) error {
					return run.Tx(ctx, func(tx pgx.Tx) error {
						_, err := tx.Exec(ctx, statements[1], secret)
						return carries(err)
					})
				},
				"once": func(ctx context.Context, run *jobrun.Run) error {
					_, err := run.Once(ctx, "payout", func(tx pgx.Tx) error {
						_, err := tx.Exec(ctx, `INSERT INTO customer (later) VALUES ($1)`, secret)
						return err // only its commit fails
					})
					return carries(err)
				},
				"complete": func(ctx context.Context, run *jobrun.Run) error {
					return carries(run.Complete(ctx, func(tx pgx.Tx) error {
						_, err := tx.Exec(ctx, `INSERT INTO customer (later) VALUES ($1)`, secret)
						return err
					}))
				},
				"read": func(ctx context.Context, run *jobrun.Run) error {
					rows, err := pool.Query(ctx, `SELECT email FROM customer WHERE email = $1`, secret)
					type none struct{ Missing string }
					_, err = jobrun.Each(ctx, run, jobrun.FromRows(rows, err, pgx.RowToStructByName[none]), func(none) string { return "" },
						func(context.Context, pgx.Tx, none) error { return nil }, nil)
					return err
				},
			} {
				job := jobrun.Job{Name: mode.String()[:5] + "-" + name, Func: f, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: atOnce}}
				for range 2 {
					res, err := r.RunDate(t.Context(), job, date)
					if err == nil || res.Record.Status != jobrun.Failed {
						t.Errorf("%s: %+v, %v", name, res, err)
					}
					w.note(fmt.Sprintf("%+v", res), err)
				}
				items, err := r.FailedItems(t.Context(), job.Key(date), "", 100)
				history, told := r.History(t.Context(), job.Key(date))
				w.note(fmt.Sprintf("%+v %+v", items, history), err, told)
			}
			for _, where := range []string{"detail", "hint", "where", "query"} {
				if beside[where] == 0 {
					t.Errorf("%s: the server did not tell it as the %s of an error: nothing is shown", mode, where)
				}
			}
			w.told(t, r)
		})
	}
	if all := stored(t, db.Pool); strings.Contains(all, secret) {
		t.Errorf("stored: %.3000s", all)
	}
	if n := query[int](t, db.Pool, `SELECT count(*) FROM batch_job_checkpoint WHERE value::text LIKE '%'||$1||'%'`, secret); n != modes {
		t.Errorf("%d checkpoints, want %d", n, modes)
	}
}

// The texts that a job itself gives, in its error, its panic or its reason to
// skip, are what is stored and logged: whoever writes them decides what they say.
func TestOwnTextsAreToldAsTheyAre(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, f := range map[string]func() error{
		"error": func() error { return errors.New(secret) },
		"panic": func() error { panic(secret) },
		"skip":  func() error { return jobrun.SkipRun(secret) },
	} {
		w := newWitness()
		r := w.runner(t, db.Pool, jobrun.Options{})
		res, _ := r.RunDate(t.Context(), jobrun.Job{Name: name, Func: func(context.Context, *jobrun.Run) error { return f() }}, date)
		w.all(t, r)
		if logged := strings.Contains(w.text.String(), secret); !strings.Contains(res.Record.Error, secret) || logged != (name != "skip") {
			t.Errorf("%s: %+v, logged %s", name, res.Record, w.text.String())
		}
	}
}

// forged is text that would write log lines of its own, paint the screen, or turn
// the reading direction round.
const forged = "x\nlevel=ERROR msg=\"all is paid\"\r\n{\"level\":\"ERROR\",\"msg\":\"all is paid\"}\n\x1b[31m\x1b]0;title\a\b\b\b\u202e\u2028\u2029\u0085\u009b31m\u200b\"\\ =,"

// printed judges the log of a witness: each record is one line that is valid UTF-8
// and reads back as what was logged, whatever that is, and of a bounded length.
func (w *witness) printed(t *testing.T, longest int) {
	t.Helper()
	lines := w.book.all()
	texts := strings.SplitAfter(w.text.String(), "\n")
	objects := strings.SplitAfter(w.json.String(), "\n")
	if len(texts) != len(lines)+1 || len(objects) != len(lines)+1 || texts[len(lines)] != "" || objects[len(lines)] != "" {
		t.Fatalf("%d records are %d lines of text and %d of JSON", len(lines), len(texts)-1, len(objects)-1)
	}
	var want, read, decoded []string
	strs := func(message string, get func(key string) (string, bool)) string {
		said := []string{message}
		for _, key := range []string{"job", "job_key", "worker_id", "run_worker_id", "status", "schema", "step", "err"} {
			if v, ok := get(key); ok {
				said = append(said, key+"="+strings.ReplaceAll(strings.ToValidUTF8(v, "\ufffd"), "\ufffd\ufffd", "\ufffd")) // one or more for broken bytes
			}
		}
		return strings.Join(said, "\x00")
	}
	for i, line := range lines {
		want = append(want, strs(line.message, func(key string) (string, bool) { v, ok := line.attrs[key]; return v.String(), ok }))
		for _, printed := range []string{texts[i], objects[i]} {
			if !utf8.ValidString(printed) || len(printed) > longest || strings.ContainsAny(printed[:len(printed)-1], "\n\r\x1b\a\b\x00\u2028\u2029") {
				t.Errorf("a line of %d bytes: %.300q", len(printed), printed)
			}
		}
		if at := strings.IndexFunc(texts[i][:len(texts[i])-1], func(c rune) bool { return !unicode.IsPrint(c) }); at >= 0 {
			t.Errorf("the line has %q: %.300q", texts[i][at:at+1], texts[i])
		}
		pairs := parseText(t, texts[i])
		read = append(read, strs(pairs["msg"], func(key string) (string, bool) { v, ok := pairs[key]; return v, ok }))
		var object map[string]any
		if err := json.Unmarshal([]byte(objects[i]), &object); err != nil {
			t.Errorf("%.300q: %v", objects[i], err)
		}
		decoded = append(decoded, strs(fmt.Sprint(object["msg"]), func(key string) (string, bool) { v, ok := object[key].(string); return v, ok }))
	}
	for _, all := range [][]string{want, read, decoded} { // the handlers may differ in the order of lines
		slices.Sort(all)
	}
	for i := range want {
		if read[i] != want[i] || decoded[i] != want[i] {
			t.Errorf("logged:\n%.1000q\nas text:\n%.1000q\nas JSON:\n%.1000q", want[i], read[i], decoded[i])
		}
	}
}

// parseText reads a line of slog.TextHandler.
func parseText(t *testing.T, line string) map[string]string {
	t.Helper()
	pairs := map[string]string{}
	for rest := strings.TrimSuffix(line, "\n"); rest != ""; {
		key, value, _ := strings.Cut(rest, "=")
		end := strings.IndexByte(value+" ", ' ')
		text := value[:end]
		if quoted, err := strconv.QuotedPrefix(value); err == nil {
			end = len(quoted)
			if text, err = strconv.Unquote(quoted); err != nil {
				t.Fatal(err)
			}
		}
		if _, twice := pairs[key]; twice || key == "" || strings.ContainsAny(key, ` "`) {
			t.Fatalf("key %q in %.300q", key, line)
		}
		pairs[key] = text
		rest = strings.TrimPrefix(value[end:], " ")
	}
	return pairs
}

// Texts from jobs, items, people, options and neighbours' rows cannot forge a log
// line, and what is stored of a job's text is bounded.
func TestLogLinesCannotBeForged(t *testing.T) {
	t.Parallel()
	db := effectDB(t)
	w := newWitness()
	r := w.runner(t, db.Pool, jobrun.Options{})
	long := forged + "\x00\xff\xfe" + strings.Repeat("ü", 1<<19) + forged
	failed := func(name string, f jobrun.Func) {
		t.Helper()
		res, err := r.RunDate(t.Context(), jobrun.Job{Name: name, Func: f}, date)
		if err == nil && res.Record.Status != jobrun.Skipped || !utf8.ValidString(res.Record.Error) || len(res.Record.Error) > 8<<10 {
			t.Errorf("%s: %.300q, %.300v", name, res.Record.Error, err)
		}
	}
	failed("error", func(context.Context, *jobrun.Run) error { return errors.New(long) })
	failed("panic", func(context.Context, *jobrun.Run) error { panic(long) })
	failed("skip", func(context.Context, *jobrun.Run) error { return jobrun.SkipRun(long) })
	failed("cause", func(ctx context.Context, run *jobrun.Run) error { return fmt.Errorf("%w", context.DeadlineExceeded) })
	failed("items", func(ctx context.Context, run *jobrun.Run) error {
		item := strings.ReplaceAll(forged, ":", "") + strings.Repeat("z", 900)
		do := func(step string, err error) error {
			_, err = jobrun.Each(ctx, run, jobrun.FromSlice([]string{item, item}), same, func(context.Context, pgx.Tx, string) error { return err }, &jobrun.EachOptions{Step: step})
			return err
		}
		return errors.Join(do("x\n\x1b[31m\u202e", nil), do("", errors.New(long)))
	})
	failed("bad-item", func(ctx context.Context, run *jobrun.Run) error {
		_, err := run.Once(ctx, long, func(pgx.Tx) error { return nil })
		return err
	})
	if got := query[int](t, db.Pool, `SELECT max(octet_length(error_message)) FROM (SELECT error_message FROM batch_job_run UNION ALL
		SELECT error_message FROM batch_job_attempt UNION ALL SELECT error_message FROM batch_job_item_failure) AS x`); got > 8<<10 || got < 8<<10-10 {
		t.Errorf("up to %d bytes are stored", got)
	}

	// Options and arguments.
	for _, bad := range []string{forged, long} {
		if _, err := r.RunDate(t.Context(), jobrun.Job{Name: bad, Func: noop}, date); err == nil {
			t.Error("no error")
		}
		if _, err := r.Schedule(t.Context(), cron.New(), "@daily", jobrun.Job{Name: bad, Func: noop}); err == nil {
			t.Error("no error")
		}
		if _, err := r.CatchUp(t.Context(), jobrun.Job{Name: bad, Func: noop}, date, date, 1); err == nil {
			t.Error("no error")
		}
		if _, err := r.Schedule(t.Context(), cron.New(), bad, jobrun.Job{Name: "daily", Func: noop}); err == nil {
			t.Error("no error")
		}
		if _, err := jobrun.New(db.Pool, seoul, &jobrun.Options{WorkerID: bad}); err == nil {
			t.Error("no error")
		}
	}
	elsewhere := w.runner(t, db.Pool, jobrun.Options{Schema: forged[:60]})
	for _, call := range []func(context.Context) error{elsewhere.Migrate, elsewhere.Verify} {
		if err := call(t.Context()); err == nil {
			t.Error("no error")
		}
	}

	// Rows of another program.
	cut := func(n int) string { return string([]rune(forged)[:n]) }
	for i, status := range []string{"RUNNING", "FAILED", cut(20)} {
		exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id, error_message, started_at) VALUES ($1, $2, $3, $4, now() - interval '1 day'),
			($5, $2, $3, $4, now() - interval '1 day'), ($6, $2, $3, $4, now() - interval '1 day')`,
			fmt.Sprintf("%d%s", i, forged[:80]), status, cut(80), strings.ReplaceAll(long, "\x00\xff\xfe", ""), fmt.Sprintf("%d\n\x1b[31m\u202e:2026-09-15", i), fmt.Sprintf("theirs-%d:2026-09-15", i))
	}
	problems, err := r.Attention(t.Context(), nil)
	if err != nil || len(problems) < 6 {
		t.Errorf("%d problems, %v", len(problems), err)
	}
	records, err := r.List(t.Context(), jobrun.Filter{})
	if err != nil || len(records) < 9 {
		t.Errorf("%d records, %v", len(records), err)
	}
	changed := 0
	for _, rec := range records {
		if len(rec.Error) > 8<<10 || !utf8.ValidString(rec.Error) {
			t.Errorf("%q has an error of %d bytes", rec.Key, len(rec.Error))
		}
		history, err := r.History(t.Context(), rec.Key)
		if err != nil {
			t.Error(err)
		}
		for _, h := range history {
			if len(h.Error) > 8<<10+100 {
				t.Errorf("the history of %q has an error of %d bytes", rec.Key, len(h.Error))
			}
		}
		for _, act := range actions {
			if after, err := act(r, t.Context(), rec, jobrun.Action{By: "operator\u202e\u2028", Reason: "x\nlevel=ERROR msg=forged\n\tand more"}); err == nil {
				rec, changed = after, changed+1
			}
		}
	}
	if changed < 8 {
		t.Errorf("%d actions", changed)
	}
	for i := range 3 {
		if _, err := r.RunDate(t.Context(), jobrun.Job{Name: fmt.Sprintf("theirs-%d", i), Func: noop}, date); err != nil {
			t.Error(err)
		}
	}

	// One takes a run over while its job runs.
	brief := w.runner(t, db.Pool, jobrun.Options{Lease: time.Second})
	if _, err := brief.RunDate(t.Context(), jobrun.Job{Name: "taken", Func: func(ctx context.Context, run *jobrun.Run) error {
		exec(t, db.Pool, `UPDATE batch_job_run SET worker_id = $2 WHERE job_key = $1`, run.Key(), cut(80))
		<-ctx.Done()
		return context.Cause(ctx)
	}}, date); !errors.Is(err, jobrun.ErrLeaseLost) {
		t.Error(err)
	}
	for _, r := range []*jobrun.Runner{r, elsewhere, brief} {
		w.all(t, r)
	}
	w.printed(t, 64<<10)
}

// Names, keys, items, texts and filters are values and never SQL: in every exec
// mode of pgx, and in a session that reads backslashes in literals.
func TestHostileNamesAreOnlyNames(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	exec(t, db.Pool, `INSERT INTO public.batch_job_run (job_key, status, worker_id) VALUES ('canary:2026-09-15', 'FAILED', 'node-1')`)
	const attack = `x\'"; DROP TABLE public.batch_job_run; --`
	const texts = attack + ` \' \\ '' "" $1 $$ %s {} E'\'' U&"\0041" /* */ ?`
	for i, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		for _, conforming := range []string{"on", "off"} {
			if mode == pgx.QueryExecModeSimpleProtocol && conforming == "off" {
				continue // pgx refuses it
			}
			t.Run(mode.String()+"/"+conforming, func(t *testing.T) {
				if mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol {
					pgtest.NeedsSessions(t)
				}
				t.Parallel()
				schema := fmt.Sprintf(`%s $1 /* %d %s`, attack, i, conforming)
				exec(t, db.Pool, `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize())
				pool := db.PoolWith(t, func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode = mode
					c.ConnConfig.RuntimeParams["standard_conforming_strings"] = conforming
				})
				hostile(t, newRunner(t, pool, jobrun.Options{Schema: schema, WorkerID: attack}), pgx.Identifier{schema, "batch_job_run"}.Sanitize(), db.Pool, attack, texts)
				if n := query[int](t, db.Pool, `SELECT count(*) FROM pg_tables WHERE schemaname = $1 AND tablename LIKE 'batch%'`, schema); n != 7 {
					t.Errorf("%d tables in the schema", n)
				}
				table := func(name string) string { return pgx.Identifier{schema, "batch_job_" + name}.Sanitize() }
				for sql, want := range map[string]string{
					`SELECT string_agg(DISTINCT acted_by || reason, '|') FROM ` + table("action"):          texts + texts,
					`SELECT string_agg(item, '|' ORDER BY item) FROM ` + table("item"):                     `step'"\:` + texts + "|" + texts,
					`SELECT string_agg(DISTINCT item || error_message, '|') FROM ` + table("item_failure"): texts + "2" + texts,
					`SELECT value #>> '{}' FROM ` + table("checkpoint"):                                    texts,
					`SELECT error_message FROM ` + table("run") + ` WHERE job_key = 'direct:2026-09-15'`:   "marked failed by " + texts + ": " + texts,
				} {
					if got := query[string](t, db.Pool, sql); got != want {
						t.Errorf("%s: %q, want %q", sql, got, want)
					}
				}
			})
		}
	}
	t.Cleanup(func() {
		if n := query[int](t, db.Pool, `SELECT count(*) FROM public.batch_job_run`); n != 1 {
			t.Errorf("%d rows in the other schema", n)
		}
	})
}

// hostile takes runs through what can happen to them, with texts of attackers
// wherever a text can be given.
func hostile(t *testing.T, r *jobrun.Runner, table string, pool *pgxpool.Pool, attack, texts string) {
	t.Helper()
	ctx := t.Context()
	by := jobrun.Action{By: texts, Reason: texts}
	if err := errors.Join(r.Migrate(ctx), r.Verify(ctx)); err != nil {
		t.Fatal(err)
	}
	job := jobrun.Job{Name: "daily", Func: func(ctx context.Context, run *jobrun.Run) error {
		var saved string
		if found, err := run.Checkpoint(ctx, &saved); err != nil || found != (run.Attempt() > 1) || found && saved != texts {
			t.Errorf("checkpoint %t %q, %v", found, saved, err)
		}
		if ran, err := run.Once(ctx, texts, func(tx pgx.Tx) error { return run.SetCheckpoint(ctx, tx, texts) }); err != nil || ran != (run.Attempt() == 1) {
			t.Errorf("once: %t, %v", ran, err)
		}
		do := func(item, step string, fails error) {
			res, err := jobrun.Each(ctx, run, jobrun.FromSlice([]string{item}), same, func(context.Context, pgx.Tx, string) error { return fails }, &jobrun.EachOptions{Step: step})
			if (err != nil) != (fails != nil) || fails == nil && (res.Done == 1) != (run.Attempt() == 1) {
				t.Errorf("each: %+v, %v", res, err)
			}
		}
		do(texts, `step'"\`, nil)
		do(texts+"2", "", errors.New(texts))
		return errors.New(texts)
	}}
	for attempt := 1; attempt <= 2; attempt++ {
		res, err := r.RunDate(ctx, job, date)
		if err == nil || res.Record.Error != texts || res.Record.Attempt != attempt || !strings.HasPrefix(res.Record.WorkerID, attack+"-") {
			t.Fatalf("%+v, %v", res, err)
		}
		if items, err := r.FailedItems(ctx, res.Record.Key, texts, 10); err != nil || len(items) != 1 || items[0].Item != texts+"2" || items[0].Error != texts {
			t.Errorf("failed: %+v, %v", items, err)
		}
		if _, err := r.ApproveRerun(ctx, res.Record, by); err != nil {
			t.Errorf("approve: %v", err)
		}
	}
	if due, err := r.RetryDue(ctx, job); err == nil || len(due) != 1 {
		t.Errorf("due: %+v, %v", due, err)
	}
	if rec, err := r.Skip(ctx, "skipped:2026-09-15", by); err != nil || rec.Error != "skipped by "+texts+": "+texts {
		t.Errorf("skip: %+v, %v", rec, err)
	}

	// Rows of another program, whose keys are attacks.
	var keys []string
	for n, key := range []string{"direct", attack, attack + `'`, `'` + attack, `\`} {
		keys = append(keys, key+":2026-09-15")
		exec(t, pool, `INSERT INTO `+table+` (job_key, status, worker_id, error_message, started_at) VALUES ($1, $2, $3, $4, now() - interval '1 day')`,
			keys[n], map[bool]string{true: "RUNNING", false: "FAILED"}[n%2 == 0], attack, texts)
	}
	for n, key := range keys {
		rec, err := r.Get(ctx, key)
		if err != nil || rec.Key != key || rec.Error != texts || rec.WorkerID != attack || rec.Job+":2026-09-15" != key {
			t.Errorf("get %q: %+v, %v", key, rec, err)
		}
		if n%2 == 0 {
			if rec, err = r.MarkFailed(ctx, rec, by); err != nil || rec.Key != key {
				t.Errorf("mark failed %q: %+v, %v", key, rec, err)
			}
		}
		if n > 0 {
			reset := by
			reset.ResetItems = true
			if _, err := r.ApproveRerun(ctx, rec, reset); err != nil {
				t.Errorf("approve %q: %v", key, err)
			}
		}
		if history, err := r.History(ctx, key); err != nil || *history[len(history)-1].Action != (jobrun.Action{By: texts, Reason: texts, ResetItems: n > 0}) {
			t.Errorf("history of %q: %+v, %v", key, history, err)
		}
	}
	slices.SortFunc(keys, func(a, b string) int { return strings.Compare(b, a) })
	for n, key := range keys[:len(keys)-1] {
		list, err := r.List(ctx, jobrun.Filter{After: key, Status: []jobrun.Status{"FAILED", jobrun.Status(attack)}})
		if err != nil || len(list) == 0 || list[0].Key != keys[n+1] && list[0].Key != job.Key(date) {
			t.Errorf("list after %q: %+v, %v", key, list, err)
		}
	}
	for _, none := range []string{texts, attack + ":2026-09-16", attack + "%", "%", "_aily:2026-09-15"} {
		if rec, err := r.Get(ctx, none); !errors.Is(err, jobrun.ErrNotFound) {
			t.Errorf("get %q: %+v, %v", none, rec, err)
		}
		if done, failed, err := r.CountItems(ctx, none); done+failed != 0 || err != nil {
			t.Errorf("count %q: %d, %d, %v", none, done, failed, err)
		}
		var invalid *jobrun.InvalidError
		if _, err := r.List(ctx, jobrun.Filter{Job: none}); !errors.As(err, &invalid) {
			t.Errorf("list %q: %v", none, err)
		}
	}
	for what, call := range map[string]func() error{
		"stale":     func() error { _, err := r.Stale(ctx); return err },
		"attention": func() error { _, err := r.Attention(ctx, nil, job); return err },
		"missed":    func() error { _, err := r.Missed(ctx, job, date, date); return err },
		"prune":     func() error { _, err := r.Prune(ctx, date); return err },
	} {
		if err := call(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
