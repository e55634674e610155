package jobrun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"

	"github.com/seed-ccb5b62c/jobrun/internal/schema"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

// MarkFailed ends a RUNNING run that is dead, on a person's word: FAILED with the
// reason, and no retry follows by itself. It acts only if the run is still as rec
// says (ErrConflict), and not while the attempt sends heartbeats (ErrAlive). With
// Action.Force it ends a live attempt too: the job's context ends with
// ErrLeaseLost at its next heartbeat, after a quarter of the lease at most, and
// its result is refused. Beside ErrConflict and ErrAlive it returns the run as it
// is now.
func (r *Runner) MarkFailed(ctx context.Context, rec Record, a Action) (Record, error) {
	text := fmt.Sprintf("marked failed by %s: %s", a.By, a.Reason)
	return r.act(ctx, "MARK_FAILED", rec, a, text, func(ctx context.Context, s *store.Store, db store.DB, act store.Action) (store.Row, bool, error) {
		return s.MarkFailed(ctx, db, act)
	})
}

// ApproveRerun allows one more execution of a run that is FAILED or SKIPPED, with
// Action.Force of one that SUCCEEDED too, on the same key. The next Run or
// RetryDue that comes by executes it, whatever Retry says; if it fails, it is not
// retried. It acts only if the run is still as rec says, no approval is pending
// and its history was not pruned; else ErrConflict.
//
// The re-run goes on where the run stopped: items that are done stay done. With
// Action.ResetItems the ledger of items, their failures and the checkpoint are
// emptied in the same transaction, and every item takes effect once more: for
// work that really must be done again. It needs DELETE on those tables, and may
// take a while with millions of items, 5 min at most.
func (r *Runner) ApproveRerun(ctx context.Context, rec Record, a Action) (Record, error) {
	if _, _, _, ok := parseKey(rec.Key); !ok {
		return Record{}, &InvalidError{"key", rec.Key, "a job's name, a colon, and a date of the calendar or a slot: no job could execute it"}
	}
	return r.act(ctx, "APPROVE_RERUN", rec, a, "", func(ctx context.Context, s *store.Store, db store.DB, act store.Action) (store.Row, bool, error) {
		return s.Approve(ctx, db, act)
	})
}

// Skip records on a person's word that the run of a key is not to happen: there
// is no run yet, or it is FAILED without a pending approval; else ErrConflict.
func (r *Runner) Skip(ctx context.Context, key string, a Action) (Record, error) {
	if job, _, _, ok := parseKey(key); !ok || validName(job) != nil {
		return Record{}, &InvalidError{"key", key, "a job's name, a colon, and a date of the calendar or a slot"}
	}
	if err := a.validate("SKIP"); err != nil {
		return Record{}, err
	}
	rec, err := r.Get(ctx, key)
	if errors.Is(err, ErrNotFound) {
		rec, err = Record{Key: key}, nil
	}
	if err != nil {
		return Record{}, err
	}
	return r.SkipSeen(ctx, rec, a)
}

// SkipSeen is Skip for a run that is still as rec says, and ErrConflict for any
// other; a Record of nothing but a key says that there is no run yet. It is for
// people who have looked at the run before, also at one of another program under a
// key that no job can have.
func (r *Runner) SkipSeen(ctx context.Context, rec Record, a Action) (Record, error) {
	if err := a.validate("SKIP"); err != nil {
		return Record{}, err
	}
	text := fmt.Sprintf("skipped by %s: %s", a.By, a.Reason)
	if rec.Status != "" {
		return r.act(ctx, "SKIP", rec, a, text, func(ctx context.Context, s *store.Store, db store.DB, act store.Action) (store.Row, bool, error) {
			return s.SkipFailed(ctx, db, act)
		})
	}
	job, date, _, ok := parseKey(rec.Key)
	if !ok || validName(job) != nil {
		return Record{}, &InvalidError{"key", rec.Key, "a job's name, a colon, and a date of the calendar or a slot"}
	}
	return r.act(ctx, "SKIP", rec, a, text, func(ctx context.Context, s *store.Store, db store.DB, act store.Action) (store.Row, bool, error) {
		return s.SkipNew(ctx, db, r.workerID, job, date.String(), act)
	})
}

// act validates and commits a person's action, and explains a refusal.
func (r *Runner) act(ctx context.Context, kind string, rec Record, a Action, text string,
	do func(context.Context, *store.Store, store.DB, store.Action) (store.Row, bool, error),
) (Record, error) {
	if err := a.validate(kind); err != nil {
		return Record{}, err
	}
	seen := store.Row{Key: rec.Key, Status: string(rec.Status), Attempt: rec.Attempt, Token: rec.token, Worker: rec.WorkerID, StartedAt: rec.StartedAt}
	row, found, err := r.book.Act(ctx, store.Action{
		Token: uuid.NewString(), Kind: kind, By: a.By, Reason: a.Reason, Force: a.Force, ResetItems: a.ResetItems, Seen: seen, Text: text,
	}, do)
	if err == nil && found {
		after := r.record(row)
		r.log.InfoContext(ctx, "a person changed the run", append(after.attrs(), "job", after.Job, "action", kind, "force", a.Force, "reset_items", a.ResetItems)...)
		r.emit(ctx, Event{Record: after, Previous: rec.Status, Action: &a})
		return after, nil
	}
	what := strings.ToLower(strings.ReplaceAll(kind, "_", " ")) + " " + rec.Key
	if store.Code(err) == "42501" && a.ResetItems {
		return Record{}, fmt.Errorf("%s: %w (ResetItems needs SELECT and DELETE on batch_job_item, batch_job_item_failure and batch_job_checkpoint too)", what, err)
	}
	if store.Code(err) == "42501" {
		return Record{}, fmt.Errorf("%s: %w (a person's action needs INSERT on batch_job_action too)", what, err)
	}
	if err != nil {
		return Record{}, fmt.Errorf("%s: %w", what, schema.Explain(err))
	}
	now, err := r.Get(ctx, rec.Key)
	switch {
	case err != nil:
		return Record{}, fmt.Errorf("%s: %w", what, err)
	case now.Status != rec.Status || now.Attempt != rec.Attempt || now.token != rec.token || now.WorkerID != rec.WorkerID || !now.StartedAt.Equal(rec.StartedAt):
		err = fmt.Errorf("%w: it is now %s at attempt %d by %s", ErrConflict, now.Status, now.Attempt, now.WorkerID)
		if rec.token == "" && now.token != "" {
			err = fmt.Errorf("%w; if that is what you saw, the record was not as a method returned it (did it go through JSON?): read the run again", err)
		}
	case !now.PrunedAt.IsZero():
		err = fmt.Errorf("%w: its history was pruned, it can never run again", ErrConflict)
	case kind == "MARK_FAILED" && now.Status == Running && !now.HeartbeatAt.IsZero():
		err = fmt.Errorf("%w: last heartbeat %s", ErrAlive, now.HeartbeatAt.Format(time.RFC3339))
	case !now.ApprovedAt.IsZero():
		err = fmt.Errorf("%w: a re-run is approved since %s", ErrConflict, now.ApprovedAt.Format(time.RFC3339))
	case kind == "APPROVE_RERUN" && now.Status == Succeeded:
		err = fmt.Errorf("%w: it SUCCEEDED; only Force runs it again", ErrConflict)
	default:
		needs := map[string]string{"MARK_FAILED": "RUNNING", "APPROVE_RERUN": "FAILED or SKIPPED", "SKIP": "FAILED, or that there is no run"}
		err = fmt.Errorf("%w: it is %s, it needs %s", ErrConflict, now.Status, needs[kind])
	}
	return now, fmt.Errorf("%s: %w", what, err)
}

// maxActionText bounds Action.By and Action.Reason so that nothing is cut.
const maxActionText = 2000

// validate returns an *InvalidError unless the action says who and why.
func (a Action) validate(kind string) error {
	for _, f := range [...]struct{ name, value, breaks string }{{"Action.By", a.By, ""}, {"Action.Reason", a.Reason, "\n\t"}} {
		forged := strings.ContainsFunc(f.value, func(c rune) bool { return unicode.IsControl(c) && !strings.ContainsRune(f.breaks, c) })
		if strings.TrimSpace(f.value) == "" || store.CleanText(f.value) != f.value || len(f.value) > maxActionText || forged {
			return &InvalidError{f.name, f.value, fmt.Sprintf("text of 1 to %d bytes, not only spaces, without control characters (a reason may have several lines)", maxActionText)}
		}
	}
	if a.ResetItems && kind != "APPROVE_RERUN" {
		return &InvalidError{"Action.ResetItems", true, "false: only ApproveRerun can reset the items"}
	}
	return nil
}

// Prune removes the attempts, items and checkpoints of runs that are SUCCEEDED or
// SKIPPED and whose business date is before a date, in batches that hold no long
// lock, and returns how many runs that were. The row of a dated run stays for
// ever, marked: it keeps the date from being run again, and an approval of it is
// refused, so a date after today is too. Rows of jobs with Every go as well.
// RUNNING, FAILED and approved runs, those of other programs, and people's actions
// are never touched. It needs the privilege to DELETE.
func (r *Runner) Prune(ctx context.Context, before Date) (int64, error) {
	if !before.IsValid() {
		return 0, &InvalidError{"before", before.String(), "a calendar date from 0001-01-01 to 9999-12-31"}
	}
	if today := r.Today(); before.Compare(today) > 0 {
		return 0, &InvalidError{"before", before.String(), "a date up to today, " + today.String() + ": a pruned run can never run again"}
	}
	var total int64
	err := r.prune(ctx, before.String(), &total)
	if store.Code(err) == "42501" {
		err = fmt.Errorf("%w (it needs DELETE on all tables but batch_job_action and batch_job_migration)", err)
	}
	if err != nil {
		return total, fmt.Errorf("prune before %s: %w", before, err)
	}
	return total, nil
}

// prune marks runs, then removes the items of marked ones, then the rows of marked
// slots: if it stops anywhere, the next call goes on, and no run that could run
// again ever lacks its items.
func (r *Runner) prune(ctx context.Context, before string, total *int64) error {
	const runs, items = 500, 10_000
	for after, n := "", int64(1); n > 0; *total += n {
		err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
			n, after, err = s.Prune(ctx, r.pool, after, before, runs, time.Second)
			return err
		})
		if err != nil {
			return err
		}
	}
	for _, failures := range [...]bool{false, true} {
		for after := ""; ; {
			var key string
			var n int64
			err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
				key, n, err = s.PruneItems(ctx, r.pool, failures, after, items)
				return err
			})
			if err != nil {
				return err
			}
			if key == "" {
				break
			}
			if n < items {
				after = key
			}
		}
	}
	for n := int64(1); n > 0; {
		err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
			n, err = s.PruneSlots(ctx, r.pool, before, runs)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Rehearsal begins the names of jobs that only try out a database, such as those of
// the command's race: the runs of no other job can be discarded.
const Rehearsal = "jobrun-rehearsal-"

// Discard removes the run of a [Rehearsal] with its history, whatever its state;
// ErrNotFound if there is none. The row of any other run is the guard of its date:
// an error. It needs the privilege to DELETE.
func (r *Runner) Discard(ctx context.Context, key string) error {
	if job, _, _, ok := parseKey(key); !ok || !strings.HasPrefix(job, Rehearsal) {
		return &InvalidError{"key", key, "that of a job whose name begins with " + Rehearsal}
	}
	n := int64(0)
	err := r.read(ctx, func(ctx context.Context, s *store.Store) (err error) {
		n, err = s.Discard(ctx, r.pool, key, time.Second)
		return err
	})
	if err == nil && n == 0 {
		err = ErrNotFound
	}
	if store.Code(err) == "42501" {
		err = fmt.Errorf("%w (it needs DELETE on batch_job_run and batch_job_attempt)", err)
	}
	if err != nil {
		return fmt.Errorf("discard %s: %w", key, err)
	}
	return nil
}
