//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-ccb5b62c/jobrun"
)

// A disturbance is somebody who goes on all the time, on a goroutine of its own.
type disturbance struct {
	name, what string
	pause      time.Duration // on average
	act        func(t *torture, rng *rand.Rand)
}

var disturbances = []disturbance{
	{"operator", "a person acts on what a list or Stale shows, or showed a while ago, with and without Force", 30 * time.Millisecond, (*torture).operate},
	{"second-operator", "a second person does so at the same time", 30 * time.Millisecond, (*torture).operate},
	{"neighbour", "another program claims keys with plain SQL, and finishes them, or does not", 250 * time.Millisecond, (*torture).neighbour},
	{"hand", "somebody edits rows in psql: blind UPDATEs, DELETE, a takeover", 400 * time.Millisecond, (*torture).hand},
}

// operate acts on one run as a person, and notes what the library answered.
func (t *torture) operate(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rec, ok := t.look(ctx, rng)
	if !ok {
		return
	}
	switch match := statements[len(statements)-1].match; rng.IntN(20) {
	case 0:
		t.people.CutBefore(match)
	case 1:
		t.people.CutAfter(match)
	}
	a := jobrun.Action{By: "operator"}
	p := rng.IntN(100)
	switch rec.Status {
	case jobrun.Running:
		a.Force = p < 8
		t.act(ctx, "MARK_FAILED", rec, a)
	case jobrun.Failed:
		switch {
		case p < 10:
			t.act(ctx, "SKIP", rec, a)
		case p < 60:
			a.ResetItems = p < 20
			t.act(ctx, "APPROVE_RERUN", rec, a)
		case p < 63: // refused
			t.act(ctx, "MARK_FAILED", rec, a)
		}
	case jobrun.Skipped:
		if p < 10 {
			a.ResetItems = p < 2
			t.act(ctx, "APPROVE_RERUN", rec, a)
		}
	case jobrun.Succeeded:
		if p < 6 {
			a.Force, a.ResetItems = p < 3, p < 1
			t.act(ctx, "APPROVE_RERUN", rec, a)
		}
	default: // no run yet
		t.act(ctx, "SKIP", rec, a)
	}
}

// look finds a run to act on: a stale one, one of the last dates, one that was seen
// some time ago, or a key that nobody has run yet.
func (t *torture) look(ctx context.Context, rng *rand.Rand) (rec jobrun.Record, ok bool) {
	k := kinds[rng.IntN(len(kinds))]
	now := today(t.begin, t.every)
	switch p := rng.IntN(100); {
	case p < 40:
		stale, err := t.r.Stale(ctx)
		if err != nil || len(stale) == 0 {
			return rec, false
		}
		return stale[rng.IntN(len(stale))].Record, true
	case p < 43:
		return jobrun.Record{Key: jobrun.Job{Name: kinds[rng.IntN(byDate)].name}.Key(date(now + rng.IntN(3)))}, true
	case p < 50:
		t.mu.Lock()
		defer t.mu.Unlock()
		if len(t.seen) == 0 {
			return rec, false
		}
		return t.seen[rng.IntN(len(t.seen))], true
	}
	f := jobrun.Filter{Job: k.name, Limit: 40}
	if k.every == 0 && k.name != "nightly" {
		f.From, f.To = date(max(0, now-30)), date(now)
	}
	all, err := t.r.List(ctx, f)
	if err != nil || len(all) == 0 {
		return rec, false
	}
	rec = all[rng.IntN(len(all))]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.seen = append(t.seen, rec); len(t.seen) > 50 {
		t.seen = t.seen[1:]
	}
	return rec, true
}

// act is one action of a person. The reason, which is unique, finds it again.
func (t *torture) act(ctx context.Context, kind string, rec jobrun.Record, a jobrun.Action) {
	a.Reason = fmt.Sprintf("reason %d", t.reasons.Add(1))
	var err error
	switch kind {
	case "MARK_FAILED":
		_, err = t.r.MarkFailed(ctx, rec, a)
	case "APPROVE_RERUN":
		_, err = t.r.ApproveRerun(ctx, rec, a)
	case "SKIP":
		_, err = t.r.Skip(ctx, rec.Key, a)
	}
	answer := "other"
	switch {
	case err == nil:
		answer = "done"
	case errors.Is(err, jobrun.ErrConflict):
		answer = "conflict"
	case errors.Is(err, jobrun.ErrAlive):
		answer = "alive"
	}
	if _, err := t.notes.write(ctx, `
		INSERT INTO torture.action (reason, action, job_key, attempt, status, forced, reset, answer)
		SELECT $2, $3, $4, $5, $6, $7, $8, $9
		WHERE $1::uuid IS NOT NULL
		ON CONFLICT (reason) DO NOTHING`, a.Reason, kind, rec.Key, rec.Attempt, string(rec.Status), a.Force, a.ResetItems, answer); err != nil {
		t.wrong("server", rec.Key, err.Error())
	}
}

// key is one of the last dates' keys.
func (t *torture) key(rng *rand.Rand) string {
	return jobrun.Job{Name: kinds[rng.IntN(byDate)].name}.Key(date(max(0, today(t.begin, t.every)-rng.IntN(4))))
}

// neighbour is a program in another language: it uses the six columns only.
func (t *torture) neighbour(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := t.connect(ctx, "neighbour")
	if err != nil {
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	key, worker := t.key(rng), fmt.Sprintf("node-%d", rng.IntN(3))
	tag, err := conn.Exec(ctx, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ($1, 'RUNNING', $2) ON CONFLICT (job_key) DO NOTHING`, key, worker)
	if err != nil || tag.RowsAffected() == 0 {
		return
	}
	t.noteFault("neighbour", key)
	sleep(t.faulty, time.Duration(rng.ExpFloat64()*float64(lease)/4))
	status := []string{"SUCCEEDED", "FAILED", "FAILED", ""}[rng.IntN(4)]
	if status != "" {
		_, _ = conn.Exec(ctx, `UPDATE batch_job_run SET status = $3, finished_at = now() WHERE job_key = $1 AND worker_id = $2 AND status = 'RUNNING'`, key, worker, status)
	}
}

// hand is somebody who edits a row, whoever is at it.
func (t *torture) hand(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := t.connect(ctx, "psql")
	if err != nil {
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	var edit, key string
	switch edit = []string{"blind SUCCEEDED", "blind FAILED", "DELETE", "takeover"}[rng.IntN(4)]; edit {
	case "blind SUCCEEDED":
		key, err = t.edit(ctx, conn, rng, `UPDATE batch_job_run SET status = 'SUCCEEDED', finished_at = now() WHERE job_key = $1`)
	case "blind FAILED":
		key, err = t.edit(ctx, conn, rng, `UPDATE batch_job_run SET status = 'FAILED', finished_at = now(), error_message = 'by hand' WHERE job_key = $1`)
	case "DELETE":
		key, err = t.edit(ctx, conn, rng, `DELETE FROM batch_job_run WHERE job_key = $1`)
	case "takeover":
		key, err = t.edit(ctx, conn, rng, `UPDATE batch_job_run SET status = 'RUNNING', worker_id = 'somebody', started_at = now(), finished_at = NULL WHERE job_key = $1`)
	}
	if err == nil && key != "" {
		t.noteFault("hand", edit+" "+key)
	}
}

// edit executes an edit of one row, preferably one that is RUNNING.
func (t *torture) edit(ctx context.Context, conn *pgx.Conn, rng *rand.Rand, sql string) (key string, err error) {
	key = t.key(rng)
	if rng.IntN(2) == 0 {
		if err := conn.QueryRow(ctx, `SELECT job_key FROM batch_job_run WHERE status = 'RUNNING' AND job_key !~ '^(nightly|slot):' ORDER BY started_at DESC LIMIT 1`).Scan(&key); err != nil {
			return "", err
		}
	}
	tag, err := conn.Exec(ctx, sql, key)
	if tag.RowsAffected() == 0 {
		key = ""
	}
	return key, err
}

// connect opens a session straight to the server.
func (t *torture) connect(ctx context.Context, name string) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(t.url)
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["application_name"] = name
	return pgx.ConnectConfig(ctx, config)
}
