package checker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// event is one line of a timeline.
type event struct {
	at   time.Time
	who  string
	what string

	// Of effects, which are put together.
	commits, effects int
	attempt          string
	items            []string
}

// Timeline tells all that is known about one key, in the order of time: what
// happened to its row and who did it, executions and what they returned, effects,
// answers, actions, the history, and the faults of that time.
func Timeline(ctx context.Context, conn *pgx.Conn, key string) (string, error) {
	t := timeline{ctx: ctx, conn: conn, key: key, sessions: map[string]bool{}}
	for _, read := range []func() error{t.changes, t.effects, t.executions, t.people, t.history, t.faults} {
		if err := read(); err != nil {
			return "", fmt.Errorf("timeline of %s: %w", key, err)
		}
	}
	return t.print(), nil
}

type timeline struct {
	ctx      context.Context
	conn     *pgx.Conn
	key      string
	events   []event
	sessions map[string]bool // that had to do with the key
	leftOut  int             // faults of other processes
}

// query adds the events that the query yields: when, who, what.
func (t *timeline) query(sql string) error {
	rows, err := t.conn.Query(t.ctx, sql, t.key)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var e event
		if err := rows.Scan(&e.at, &e.who, &e.what); err != nil {
			return err
		}
		t.add(e)
	}
	return rows.Err()
}

func (t *timeline) add(e event) {
	t.events = append(t.events, e)
	t.sessions[e.who] = true
}

func (t *timeline) changes() error {
	rows, err := t.conn.Query(t.ctx, `
		SELECT seq, at, xid::text, session, isolation, before::text, after::text, silent, effects
		FROM torture.change
		WHERE job_key = $1
		ORDER BY seq`, t.key)
	if err != nil {
		return err
	}
	defer rows.Close()
	c := check{words: map[string]string{}}
	for rows.Next() {
		var seq int64
		var e event
		var xid, isolation string
		var before, after []byte
		var silent *bool
		var effects *int64
		if err := rows.Scan(&seq, &e.at, &xid, &e.who, &isolation, &before, &after, &silent, &effects); err != nil {
			return err
		}
		b, err := c.row(before)
		if err != nil {
			return err
		}
		a, err := c.row(after)
		if err != nil {
			return err
		}
		e.what = fmt.Sprintf("change %d (transaction %s, %s): %s", seq, xid, isolation, difference(b, a))
		if silent != nil && *silent {
			e.what += "; it was silent"
		}
		if effects != nil {
			e.what += fmt.Sprintf("; %d effects by then", *effects)
		}
		t.add(e)
	}
	return rows.Err()
}

// difference tells what became of the row, as far as it matters.
func difference(b, a *row) string {
	if a == nil {
		return "DELETED " + b.brief()
	}
	kind := ""
	if b == nil {
		kind, b = "INSERTED ", new(row)
	}
	var parts []string
	part := func(name, old, new string) {
		switch {
		case old == new:
		case old == "":
			parts = append(parts, name+" "+new)
		case new == "":
			parts = append(parts, name+" "+old+" -> none")
		default:
			parts = append(parts, name+" "+old+" -> "+new)
		}
	}
	number := func(n int) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprint(n)
	}
	moment := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return clock(t)
	}
	part("", b.Status, a.Status)
	part("attempt", number(b.Attempt), number(a.Attempt))
	part("executions", number(b.Executions), number(a.Executions))
	part("worker", b.Worker, a.Worker)
	part("token", b.Token[:min(8, len(b.Token))], a.Token[:min(8, len(a.Token))])
	part("started", moment(b.Started), moment(a.Started))
	part("finished", moment(b.Finished), moment(a.Finished))
	part("next", moment(b.Next), moment(a.Next))
	part("approved", moment(b.Approved), moment(a.Approved))
	part("pruned", moment(b.Pruned), moment(a.Pruned))
	if a.Error != b.Error && a.Error != "" {
		parts = append(parts, fmt.Sprintf("error %q", a.Error))
	}
	if parts == nil {
		parts = []string{"nothing that matters here"}
	}
	return kind + strings.TrimSpace(strings.Join(parts, ", "))
}

func (t *timeline) effects() error {
	rows, err := t.conn.Query(t.ctx, `
		SELECT coalesce(pg_xact_commit_timestamp(xid::xid), max(at)), session, attempt::text, array_agg(item ORDER BY seq)
		FROM torture.effect
		WHERE job_key = $1
		GROUP BY xid, session, attempt`, t.key)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		e := event{commits: 1}
		if err := rows.Scan(&e.at, &e.who, &e.attempt, &e.items); err != nil {
			return err
		}
		e.effects = len(e.items)
		t.add(e)
	}
	return rows.Err()
}

func (t *timeline) executions() error {
	return t.query(`
		SELECT at, session, format('attempt %s executed by %s, trigger %s (%s)', attempt, worker, trigger, left(id::text, 8))
		FROM torture.execution
		WHERE job_key = $1
		UNION ALL
		SELECT r.at, e.session, format('attempt %s returns %s %s (%s)', e.attempt, r.outcome, left(r.error, 200), left(e.id::text, 8))
		FROM torture.returned AS r
		JOIN torture.execution AS e ON e.id = r.execution
		WHERE e.job_key = $1
		UNION ALL
		SELECT at, session, format('answer to %s: attempt %s, %s %s %s %s', worker, attempt, coalesce(nullif(decision, ''), 'no decision'), status, kind, left(error, 200))
		FROM torture.answer
		WHERE job_key = $1`)
}

func (t *timeline) people() error {
	return t.query(`
		SELECT acted_at, 'operator', format('action %s: %s of attempt %s, was %s%s%s (%s)', id, action, attempt, coalesce(previous_status, 'not there'),
		  CASE WHEN forced THEN ', forced' END, CASE WHEN reset_items THEN ', items reset' END, reason)
		FROM public.batch_job_action
		WHERE job_key = $1
		UNION ALL
		SELECT at, 'operator', format('answer to a person: %s of attempt %s, seen as %s%s%s: %s (%s)', action, attempt, coalesce(nullif(status, ''), 'not there'),
		  CASE WHEN forced THEN ', forced' END, CASE WHEN reset THEN ', items reset' END, answer, reason)
		FROM torture.action
		WHERE job_key = $1
		UNION ALL
		SELECT coalesce(pg_xact_commit_timestamp(xmin), now()), 'log', 'listed as stale'
		FROM torture.stale
		WHERE job_key = $1`)
}

func (t *timeline) history() error {
	return t.query(`
		SELECT a.started_at, 'history', format('attempt %s started: %s, %s', a.attempt, a.worker_id, coalesce(a.trigger, 'another program'))
		FROM public.batch_job_attempt AS a
		WHERE job_key = $1
		UNION ALL
		SELECT coalesce(a.finished_at, '9999-01-01'), 'history', format('attempt %s %s', a.attempt,
		  CASE WHEN a.finished_at IS NULL THEN 'is open' ELSE format('closed: %s by %s, last heartbeat %s. %s', a.outcome, a.ended_by,
		  coalesce(to_char(a.heartbeat_at AT TIME ZONE 'UTC', 'HH24:MI:SS.US'), 'never'), left(a.error_message, 100)) END)
		FROM public.batch_job_attempt AS a
		WHERE job_key = $1`)
}

// faults adds those of the time in which something happened to the key: of its own
// processes, and of all that are no process's.
func (t *timeline) faults() error {
	if len(t.events) == 0 {
		return nil
	}
	from, to := time.Time{}, time.Time{}
	for _, e := range t.events {
		if open(e.at) {
			continue
		}
		if from.IsZero() || e.at.Before(from) {
			from = e.at
		}
		if e.at.After(to) {
			to = e.at
		}
	}
	rows, err := t.conn.Query(t.ctx, `SELECT at, kind, target FROM torture.fault WHERE at BETWEEN $1 AND $2`,
		from.Add(-time.Second), to.Add(time.Second))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		e := event{who: "FAULT"}
		var kind, target string
		if err := rows.Scan(&e.at, &kind, &target); err != nil {
			return err
		}
		session, _, _ := strings.Cut(target, " ")
		session, _, _ = strings.Cut(session, "-")
		if whoIs(session) == worker && !t.sessions[session] {
			t.leftOut++
			continue
		}
		e.what = kind + " " + target
		t.events = append(t.events, e)
	}
	return rows.Err()
}

// open tells whether the time stands for an end that has not come.
func open(t time.Time) bool { return t.Year() == 9999 }

// print puts the lines in order and what belongs together on one.
func (t *timeline) print() string {
	if len(t.events) == 0 {
		return t.key + ": nothing is known\n"
	}
	slices.SortStableFunc(t.events, func(a, b event) int { return a.at.Compare(b.at) })
	var b strings.Builder
	fmt.Fprintf(&b, "%s, times in UTC\n", t.key)
	day := ""
	for i := 0; i < len(t.events); i++ {
		e := t.events[i]
		for e.effects > 0 && i+1 < len(t.events) {
			next := t.events[i+1]
			if next.effects == 0 || next.attempt != e.attempt || next.who != e.who {
				break
			}
			e.commits += next.commits
			e.effects += next.effects
			e.items = append(e.items, next.items...)
			i++
		}
		if e.effects > 0 {
			e.what = fmt.Sprintf("attempt %s: %d effects in %d commits: %s", e.attempt, e.effects, e.commits, condensed(e.items))
		}
		at := "open"
		if !open(e.at) {
			if d := e.at.UTC().Format("2006-01-02"); d != day {
				day = d
				fmt.Fprintf(&b, "%s\n", day)
			}
			at = clock(e.at)
		}
		for n, line := range folded(e.what, 86) {
			if n == 0 {
				fmt.Fprintf(&b, "  %-15s  %-9s  %s\n", at, e.who, line)
			} else {
				fmt.Fprintf(&b, "  %-15s  %-9s    %s\n", "", "", line)
			}
		}
	}
	if t.leftOut > 0 {
		fmt.Fprintf(&b, "  (faults of processes that had nothing to do with it, left out: %d)\n", t.leftOut)
	}
	return b.String()
}

// condensed names a few of many items.
func condensed(items []string) string {
	if len(items) <= 6 {
		return strings.Join(items, " ")
	}
	return strings.Join(items[:3], " ") + " ... " + strings.Join(items[len(items)-2:], " ")
}

// folded breaks a text into lines at spaces. A longer word gets a line of its own.
func folded(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
