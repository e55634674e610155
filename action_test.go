package jobrun_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

var operator = jobrun.Action{By: "operator", Reason: "process log ends at 01:03, no session left"}

func TestLifeOfAFailedRun(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	r := newRunner(t, db.Pool, jobrun.Options{})
	broken := true
	executions := 0
	job := jobrun.Job{Name: "daily-settlement", Func: func(context.Context, *jobrun.Run) error {
		executions++
		if broken {
			return errors.New("no rates")
		}
		return nil
	}, Retry: jobrun.Retry{MaxAttempts: 2, Backoff: func(int) time.Duration { return 0 }}}
	res, err := r.RunDate(ctx, job, date)
	if err == nil || res.Record.NextAttemptAt.IsZero() {
		t.Fatalf("first: %+v %v", res, err)
	}
	all, err := r.RetryDue(ctx, job)
	if err == nil || len(all) != 1 || all[0].Record.Attempt != 2 || all[0].Record.Trigger != jobrun.TriggerRetry || !all[0].Record.NextAttemptAt.IsZero() {
		t.Fatalf("retry: %+v %v", all, err)
	}
	if all, err = r.RetryDue(ctx, job); err != nil || len(all) != 0 {
		t.Fatalf("nothing is due: %+v %v", all, err)
	}
	problems, err := r.Attention(ctx, nil)
	if err != nil || len(problems) != 1 || problems[0].Kind != jobrun.ProblemFailed {
		t.Fatalf("attention: %+v %v", problems, err)
	}
	rec, err := r.ApproveRerun(ctx, all2(t, r, job), operator)
	if err != nil || rec.ApprovedAt.IsZero() {
		t.Fatalf("approve: %+v %v", rec, err)
	}
	if _, err = r.ApproveRerun(ctx, rec, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("second approval: %v", err)
	}
	broken = false
	if all, err = r.RetryDue(ctx, job); err != nil || len(all) != 1 || all[0].Record.Status != jobrun.Succeeded || all[0].Record.Trigger != jobrun.TriggerRerun {
		t.Fatalf("re-run: %+v %v", all, err)
	}
	if _, err = r.ApproveRerun(ctx, all[0].Record, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("approval of a SUCCEEDED run: %v", err)
	}
	if _, err = r.MarkFailed(ctx, all[0].Record, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("mark failed of a SUCCEEDED run: %v", err)
	}
	if _, err = r.Skip(ctx, rec.Key, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("skip of a SUCCEEDED run: %v", err)
	}
	if rec, err = r.Skip(ctx, "daily-settlement:2026-09-16", operator); err != nil || rec.Status != jobrun.Skipped || rec.Attempt != 0 {
		t.Fatalf("skip: %+v %v", rec, err)
	}
	history, err := r.History(ctx, "daily-settlement:2026-09-15")
	if err != nil || len(history) != 4 || history[2].Action == nil || history[2].Action.By != "operator" || history[3].Trigger != jobrun.TriggerRerun {
		t.Fatalf("history: %+v %v", history, err)
	}
	exec(t, db.Pool, `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('daily-settlement:2026-09-17', 'RUNNING', 'node-1')`)
	neighbour, err := r.Get(ctx, "daily-settlement:2026-09-17")
	if err != nil {
		t.Fatal(err)
	}
	if rec, err = r.MarkFailed(ctx, neighbour, operator); err != nil || rec.Status != jobrun.Failed || rec.FinishedAt.IsZero() {
		t.Fatalf("mark failed: %+v %v", rec, err)
	}
	if _, err = r.MarkFailed(ctx, neighbour, operator); !errors.Is(err, jobrun.ErrConflict) {
		t.Fatalf("second mark failed: %v", err)
	}
	missed, err := r.Missed(ctx, job, date, jobrun.MustParseDate("2026-09-20"))
	if err != nil || len(missed) != 3 {
		t.Fatalf("missed: %v %v", missed, err)
	}
	if all, err = r.CatchUp(ctx, job, date, jobrun.MustParseDate("2026-09-20"), 3); err != nil || len(all) != 0 {
		t.Fatalf("catch up behind a failed date: %+v %v", all, err)
	}
	if _, err = r.Skip(ctx, rec.Key, operator); err != nil {
		t.Fatal(err)
	}
	if all, err = r.CatchUp(ctx, job, date, jobrun.MustParseDate("2026-09-20"), 2); err != nil || len(all) != 2 || all[1].Record.Date.String() != "2026-09-19" {
		t.Fatalf("catch up: %+v %v", all, err)
	}
	if n, err := r.Prune(ctx, jobrun.MustParseDate("2026-09-19")); err != nil || n != 3 {
		t.Fatalf("prune: %d %v", n, err)
	}
	if stale, err := r.Stale(ctx); err != nil || len(stale) != 0 {
		t.Fatalf("stale: %+v %v", stale, err)
	}
	if problems, err = r.Attention(ctx, &jobrun.AttentionOptions{FailedSince: res.Record.StartedAt}, job); err != nil {
		t.Fatalf("attention: %v", err)
	}
	t.Log(problems)
}

func all2(t *testing.T, r *jobrun.Runner, job jobrun.Job) jobrun.Record {
	t.Helper()
	rec, err := r.Get(t.Context(), job.Key(date))
	if err != nil {
		t.Fatal(err)
	}
	return rec
}
