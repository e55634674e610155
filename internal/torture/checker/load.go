package checker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
)

// load reads the tables.
func load(ctx context.Context, conn *pgx.Conn) (*check, error) {
	c := &check{
		report: Report{Judged: map[string]int{}, Counts: Counts{
			Statuses: map[string]int{}, Changes: map[string]int{}, Answers: map[string]int{},
			Actions: map[string]int{}, Faults: map[string]int{},
		}},
		jobs: map[string]job{}, byKey: map[string]*run{}, byReason: map[string][]*action{},
		tokens: map[string]*attempt{}, ended: map[string]string{}, words: map[string]string{},
	}
	var on bool
	if err := conn.QueryRow(ctx, `SELECT current_setting('track_commit_timestamp')::boolean`).Scan(&on); err != nil {
		return nil, err
	}
	if !on {
		return nil, errors.New("the server does not keep the times of commits: track_commit_timestamp is off")
	}
	for _, read := range []func(context.Context, *pgx.Conn) error{
		c.readJobs, c.readRuns, c.readChanges, c.readActions, c.readAsked, c.readExecutions, c.readAnswers,
		c.readEffects, c.readHistory, c.readLedger, c.readRest,
	} {
		if err := read(ctx, conn); err != nil {
			return nil, err
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.byKey)) {
		c.runs = append(c.runs, c.byKey[key])
	}
	return c, nil
}

// each calls fn for every row of the query, which scans it.
func each(ctx context.Context, conn *pgx.Conn, sql string, fn func(scan func(...any) error) error) error {
	rows, err := conn.Query(ctx, sql)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// run is the one of this key, made when it is first seen.
func (c *check) run(key string) *run {
	r := c.byKey[key]
	if r == nil {
		name, _, _ := strings.Cut(key, ":")
		r = &run{key: key, job: c.jobs[name], history: map[int]*historic{}, byNumber: map[int]*attempt{}}
		c.byKey[key] = r
	}
	return r
}

// word is the one copy of s.
func (c *check) word(s string) string {
	w, ok := c.words[s]
	if !ok {
		w = strings.Clone(s)
		c.words[w] = w
	}
	return w
}

// Columns that may be NULL, which is the zero value here.
type (
	text = zeronull.Text
	when = zeronull.Timestamptz
)

func (c *check) readJobs(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `SELECT job, way, items, max_attempts FROM torture.job`, func(scan func(...any) error) error {
		var name string
		var j job
		if err := scan(&name, &j.way, &j.items, &j.maxAttempts); err != nil {
			return err
		}
		c.jobs[name] = j
		return nil
	})
}

func (c *check) readRuns(ctx context.Context, conn *pgx.Conn) error {
	err := each(ctx, conn, `SELECT job_key, to_jsonb(r)::text FROM public.batch_job_run AS r`, func(scan func(...any) error) error {
		var key string
		var text []byte
		err := scan(&key, &text)
		if err != nil {
			return err
		}
		r := c.run(key)
		r.now, err = c.row(text)
		c.report.Counts.Runs++
		if err == nil {
			c.report.Counts.Statuses[r.now.Status]++
		}
		return err
	})
	if err != nil {
		return err
	}
	return each(ctx, conn, `SELECT job_key FROM torture.wanted`, func(scan func(...any) error) error {
		var key string
		if err := scan(&key); err != nil {
			return err
		}
		c.run(key).wanted = true
		return nil
	})
}

// row reads the row of a run from its JSON. Of an error text the beginning is kept.
func (c *check) row(text []byte) (*row, error) {
	if text == nil {
		return nil, nil
	}
	r := new(row)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("row of a run: %w: %s", err, text)
	}
	for _, t := range []*time.Time{&r.Started, &r.Finished, &r.Next, &r.ScheduledFor, &r.Approved, &r.ApprovedEnd, &r.Pruned} {
		*t = t.UTC() // whatever the zone of the session: times are compared with ==
	}
	for _, s := range []*string{&r.Status, &r.Worker, &r.Job, &r.Date, &r.ApprovedAs, &r.ApprovedBy} {
		*s = c.word(*s)
	}
	r.Error = c.word(r.Error[:min(len(r.Error), 100)])
	return r, nil
}

func (c *check) readChanges(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `
		SELECT seq, at, xid::text::bigint, pg_xact_commit_timestamp(xid::xid), session, isolation, job_key,
		  before::text, after::text, coalesce(silent, false), coalesce(effects, -1)
		FROM torture.change
		ORDER BY seq`, func(scan func(...any) error) error {
		ch := new(change)
		var key string
		var before, after []byte
		err := scan(&ch.seq, &ch.at, &ch.xid, (*when)(&ch.committed), &ch.session, &ch.isolation, &key, &before, &after, &ch.silent, &ch.effects)
		if err != nil {
			return err
		}
		ch.session, ch.isolation = c.word(ch.session), c.word(ch.isolation)
		r := c.run(key)
		if last := len(r.changes) - 1; last >= 0 && before != nil && bytes.Equal(before, r.lastText) {
			ch.before = r.changes[last].after // as nearly always: not read twice, and one copy
		} else if ch.before, err = c.row(before); err != nil {
			return err
		}
		if ch.after, err = c.row(after); err != nil {
			return err
		}
		r.lastText = append(r.lastText[:0], after...)
		r.changes = append(r.changes, ch)
		return nil
	})
}

// same tells whether two rows are equal, or both not there.
func same(a, b *row) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

func (c *check) readActions(ctx context.Context, conn *pgx.Conn) error {
	err := each(ctx, conn, `
		SELECT id, xmin::text::bigint, job_key, attempt, action, reason, forced, reset_items, previous_status, acted_at
		FROM public.batch_job_action
		ORDER BY id`, func(scan func(...any) error) error {
		a := new(action)
		if err := scan(&a.id, &a.xid, &a.key, &a.attempt, &a.action, &a.reason, &a.forced, &a.reset, (*text)(&a.previous), &a.at); err != nil {
			return err
		}
		c.actions = append(c.actions, a)
		c.byReason[a.reason] = append(c.byReason[a.reason], a)
		r := c.run(a.key)
		r.actions = append(r.actions, a)
		return nil
	})
	if err != nil {
		return err
	}
	// Bits of tgtype: 1 for each row, 8 DELETE, 16 UPDATE, 32 TRUNCATE.
	return conn.QueryRow(ctx, `
		SELECT coalesce(bit_or(tgtype) & 56, 0) = 56
		FROM pg_trigger
		WHERE tgrelid = 'public.batch_job_action'::regclass
		  AND tgenabled IN ('O', 'A')
		  AND tgtype & 1 = 0
		  AND NOT tgisinternal`).Scan(&c.guarded)
}

func (c *check) readAsked(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `
		SELECT reason, action, job_key, attempt, status, forced, reset, answer
		FROM torture.action
		ORDER BY at`, func(scan func(...any) error) error {
		var a asked
		if err := scan(&a.reason, &a.action, &a.key, &a.attempt, &a.status, &a.forced, &a.reset, &a.answer); err != nil {
			return err
		}
		c.asked = append(c.asked, a)
		return nil
	})
}

func (c *check) readExecutions(ctx context.Context, conn *pgx.Conn) error {
	byID := map[string]*execution{}
	err := each(ctx, conn, `
		SELECT id::text, at, session, worker, job_key, attempt, trigger
		FROM torture.execution
		ORDER BY at`, func(scan func(...any) error) error {
		e := new(execution)
		var key string
		if err := scan(&e.id, &e.at, &e.session, &e.worker, &key, &e.attempt, &e.trigger); err != nil {
			return err
		}
		e.session, e.worker, e.trigger = c.word(e.session), c.word(e.worker), c.word(e.trigger)
		byID[e.id] = e
		r := c.run(key)
		r.executions = append(r.executions, e)
		return nil
	})
	if err != nil {
		return err
	}
	return each(ctx, conn, `SELECT execution::text, at, outcome, error LIKE '%lease lost%' FROM torture.returned ORDER BY at`, func(scan func(...any) error) error {
		var id, outcome string
		var at time.Time
		var lost bool
		if err := scan(&id, &at, &outcome, &lost); err != nil {
			return err
		}
		e := byID[id]
		if e == nil {
			c.broken(ruleExecution, "", "execution %s returned %s, and nothing was written down of its start", id, outcome)
			return nil
		}
		if e.outcomes == nil {
			e.returned, e.lost = at, lost
		}
		if !slices.Contains(e.outcomes, outcome) { // a repeated insert
			e.outcomes = append(e.outcomes, c.word(outcome))
		}
		return nil
	})
}

func (c *check) readAnswers(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `
		SELECT at, session, worker, job_key, attempt, decision, status, kind
		FROM torture.answer
		ORDER BY at`, func(scan func(...any) error) error {
		a := new(answer)
		var key string
		if err := scan(&a.at, &a.session, &a.worker, &key, &a.attempt, &a.decision, &a.status, &a.kind); err != nil {
			return err
		}
		a.session, a.worker, a.decision = c.word(a.session), c.word(a.worker), c.word(a.decision)
		a.status, a.kind = c.word(a.status), c.word(a.kind)
		c.report.Counts.Answers[strings.TrimSpace(a.decision+" "+a.kind)]++
		if a.kind == "unknown" {
			c.report.Counts.Unknown++
		}
		if key == "" {
			return nil // of no run: nothing can be judged
		}
		r := c.run(key)
		r.answers = append(r.answers, a)
		return nil
	})
}

func (c *check) readEffects(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `
		SELECT xid::text::bigint, pg_xact_commit_timestamp(xid::xid), session, way, job_key, attempt, item
		FROM torture.effect`, func(scan func(...any) error) error {
		e := new(effect)
		var key string
		if err := scan(&e.xid, (*when)(&e.committed), &e.session, &e.way, &key, &e.attempt, &e.item); err != nil {
			return err
		}
		e.session, e.way, e.item = c.word(e.session), c.word(e.way), c.word(e.item)
		r := c.run(key)
		r.effects = append(r.effects, e)
		c.report.Counts.Effects++
		return nil
	})
}

func (c *check) readHistory(ctx context.Context, conn *pgx.Conn) error {
	err := each(ctx, conn, `
		SELECT job_key, attempt, token::text, worker_id, trigger, started_at, finished_at, outcome, ended_by
		FROM public.batch_job_attempt`, func(scan func(...any) error) error {
		h := new(historic)
		var key string
		var attempt int
		err := scan(&key, &attempt, (*text)(&h.token), &h.worker, (*text)(&h.trigger), &h.started, (*when)(&h.finished), (*text)(&h.outcome), (*text)(&h.endedBy))
		if err != nil {
			return err
		}
		h.worker, h.trigger = c.word(h.worker), c.word(h.trigger)
		h.outcome, h.endedBy = c.word(h.outcome), c.word(h.endedBy)
		c.run(key).history[attempt] = h
		return nil
	})
	if err != nil {
		return err
	}
	return each(ctx, conn, `SELECT session, before::text, after::text FROM torture.rewritten ORDER BY at`, func(scan func(...any) error) error {
		var r rewritten
		if err := scan(&r.session, &r.before, (*text)(&r.after)); err != nil {
			return err
		}
		c.rewritten = append(c.rewritten, r)
		return nil
	})
}

func (c *check) readLedger(ctx context.Context, conn *pgx.Conn) error {
	return each(ctx, conn, `SELECT job_key, item, attempt FROM public.batch_job_item`, func(scan func(...any) error) error {
		var key string
		var i item
		if err := scan(&key, &i.name, &i.attempt); err != nil {
			return err
		}
		i.name = c.word(i.name)
		r := c.run(key)
		r.ledger = append(r.ledger, i)
		return nil
	})
}

func (c *check) readRest(ctx context.Context, conn *pgx.Conn) error {
	err := each(ctx, conn, `SELECT job_key, pg_xact_commit_timestamp(xmin) FROM torture.stale ORDER BY job_key`, func(scan func(...any) error) error {
		var s stale
		if err := scan(&s.key, (*when)(&s.committed)); err != nil {
			return err
		}
		c.stale = append(c.stale, s)
		if s.key != "" {
			c.run(s.key)
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = each(ctx, conn, `SELECT session, ended FROM torture.process`, func(scan func(...any) error) error {
		var session, ended string
		err := scan(&session, &ended)
		c.ended[session] = ended
		return err
	})
	if err != nil {
		return err
	}
	return each(ctx, conn, `SELECT kind, count(*) FROM torture.fault GROUP BY kind`, func(scan func(...any) error) error {
		var kind string
		var n int
		if err := scan(&kind, &n); err != nil {
			return err
		}
		c.report.Counts.Faults[kind] = n
		return nil
	})
}
