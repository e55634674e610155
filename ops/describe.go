package ops

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// view is a run as the command shows it, with the evidence if it is stale.
type view struct {
	Run   jobrun.Record `json:"run"`
	Stale *evidence     `json:"stale,omitempty"`
}

// evidence is a jobrun.StaleRun for JSON: seconds, and absent times left out.
type evidence struct {
	Alive        bool      `json:"alive"`
	Silent       float64   `json:"silent_seconds"`
	Overdue      float64   `json:"overdue_seconds"`
	ItemsMovedAt time.Time `json:"items_moved_at,omitzero"`
	Typical      float64   `json:"typical_seconds,omitzero"`
	Longest      float64   `json:"longest_seconds,omitzero"`
	Session      string    `json:"session"`
}

func evidenceOf(s jobrun.StaleRun) *evidence {
	return &evidence{s.Alive, s.Silent.Seconds(), s.Overdue.Seconds(), s.ItemsMovedAt, s.Typical.Seconds(), s.Longest.Seconds(), s.Session}
}

// look reads a run, and the evidence if it is stale.
func look(ctx context.Context, r *jobrun.Runner, key string) (rec jobrun.Record, stale *jobrun.StaleRun, err error) {
	if rec, err = r.Get(ctx, key); err != nil || rec.Status != jobrun.Running {
		return rec, nil, err
	}
	all, err := r.Stale(ctx)
	for _, s := range all {
		if s.Key == key && s.Attempt == rec.Attempt && s.StartedAt.Equal(rec.StartedAt) {
			return rec, &s, err
		}
	}
	return rec, nil, err
}

// describe is a run in lines of a name and a text. Only the texts are in the language.
func describe(w words, rec jobrun.Record, stale *jobrun.StaleRun) (lines [][2]string) {
	add := func(known bool, name, format string, values ...any) {
		if known {
			lines = append(lines, [2]string{name, fmt.Sprintf(w.T(format), values...)})
		}
	}
	by := rec.WorkerID
	if rec.Trigger != "" {
		by += ", " + string(rec.Trigger)
	}
	why := "error"
	if rec.Status == jobrun.Skipped {
		why = "reason"
	}
	add(true, "run", "%s", rec.Key)
	add(true, "status", "%s", rec.Status)
	add(rec.Attempt > 0, "attempt", "%d by %s", rec.Attempt, by)
	add(rec.Attempt == 0, "attempt", "none: it was never executed")
	add(!rec.ScheduledFor.IsZero(), "scheduled for", "%s", instant(rec.ScheduledFor))
	add(!rec.StartedAt.IsZero(), "started", "%s", instant(rec.StartedAt))
	add(!rec.FinishedAt.IsZero() && rec.Attempt > 0, "finished", "%s, after %s", instant(rec.FinishedAt), took(rec))
	add(rec.Status == jobrun.Running && !rec.HeartbeatAt.IsZero(), "heartbeat", "%s", instant(rec.HeartbeatAt))
	add(rec.Status == jobrun.Running && rec.HeartbeatAt.IsZero(), "heartbeat", "none: another program's run")
	add(rec.ItemsProcessed > 0 || rec.ItemsFailed > 0, "items", "%d processed, %d failed", rec.ItemsProcessed, rec.ItemsFailed)
	add(stale == nil && alive(rec, nil), "alive", "yes: its last heartbeat is younger than its lease")
	if s := stale; s != nil {
		add(!s.Alive, "alive", "no: nothing was heard of it for longer than its lease")
		add(s.Alive, "alive", "yes: it is slow, or stuck in a call")
		add(true, "silent", "%s", short(s.Silent))
		add(s.Overdue > 0, "overdue", "%s beyond its limit", short(s.Overdue))
		add(!s.ItemsMovedAt.IsZero(), "items moved", "%s", instant(s.ItemsMovedAt))
		add(s.Typical > 0, "usually", "%s, at most %s", short(s.Typical), short(s.Longest))
		add(true, "session", "%s (of the last heartbeat; proves nothing)", s.Session)
	}
	add(!rec.NextAttemptAt.IsZero(), "next attempt", "%s", instant(rec.NextAttemptAt))
	add(!rec.ApprovedAt.IsZero(), "approved", "%s, not executed yet", instant(rec.ApprovedAt))
	add(!rec.PrunedAt.IsZero(), "pruned", "%s: it can never run again", instant(rec.PrunedAt))
	add(rec.Error != "", why, "%s", rec.Error)
	return lines
}

// alive reports whether a run's attempt sends heartbeats.
func alive(rec jobrun.Record, stale *jobrun.StaleRun) bool {
	return rec.Status == jobrun.Running && !rec.HeartbeatAt.IsZero() && (stale == nil || stale.Alive)
}

// advice is what can be done about a run.
func (c *command) advice(rec jobrun.Record, stale *jobrun.StaleRun) []string {
	do := func(what, format string, values ...any) string {
		return fmt.Sprintf("%-28s %s %s", what, c.name, fmt.Sprintf(format, values...))
	}
	key := quoted(rec.Key)
	var lines []string
	switch {
	case !rec.PrunedAt.IsZero():
		return nil
	case rec.Status == jobrun.Running && stale != nil && !stale.Alive:
		lines = []string{do("If its process is dead:", "mark-failed --reason ... %s", key)}
	case rec.Status == jobrun.Running:
		lines = []string{do("If it must stop:", "mark-failed --force --reason ... %s", key)}
	case !rec.ApprovedAt.IsZero():
		lines = []string{"A re-run is approved: the service's RetryDue executes it."}
	case rec.Status == jobrun.Failed && rec.Job == "": // no job has such a key
		lines = []string{do("If nothing is left to do:", "skip --reason ... %s", key)}
	case rec.Status == jobrun.Failed && !rec.NextAttemptAt.IsZero():
		lines = []string{
			"It is tried again by itself: the service's RetryDue does so. A re-run would take the place of all attempts that are left.",
			do("When the cause is mended:", "rerun --reason ... %s", key),
			do("If it shall not happen:", "skip --reason ... %s", key),
		}
	case rec.Status == jobrun.Failed:
		lines = []string{
			do("When the cause is mended:", "rerun --reason ... %s", key),
			do("If it shall not happen:", "skip --reason ... %s", key),
		}
	case rec.Status == jobrun.Skipped && rec.Job != "":
		lines = []string{do("If it shall happen:", "rerun --reason ... %s", key)}
	}
	lines = append(lines, do("What led to this:", "history %s", key))
	return append([]string{""}, lines...)
}

// note is the one thing more that a line should say of a run.
func note(w words, rec jobrun.Record) string {
	switch {
	case !rec.ApprovedAt.IsZero():
		return fmt.Sprintf(w.T("re-run approved %s"), clock(rec.ApprovedAt))
	case !rec.NextAttemptAt.IsZero():
		return fmt.Sprintf(w.T("next attempt %s: %s"), clock(rec.NextAttemptAt), firstLine(rec.Error))
	case rec.Status == jobrun.Running:
		return fmt.Sprintf(w.T("by %s"), rec.WorkerID)
	}
	return firstLine(rec.Error)
}

// firstLine is the first line of a text, marked when there are more.
func firstLine(s string) string {
	line, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	if more {
		line += " ..."
	}
	return line
}

// clock is a time in a table, instant one that stands alone.
func clock(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Format("2006-01-02 15:04:05")
}

func instant(t time.Time) string {
	return t.Format("2006-01-02 15:04:05 -07:00 ") + t.Location().String()
}

// took is how long a run's attempt took.
func took(rec jobrun.Record) string {
	if rec.FinishedAt.IsZero() || rec.StartedAt.IsZero() || rec.Attempt == 0 {
		return "-"
	}
	return short(rec.FinishedAt.Sub(rec.StartedAt))
}

// short is a duration for people.
func short(d time.Duration) string {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Millisecond).String()
}

// items is the counts of an attempt.
func items(processed, failed int64) string {
	if processed == 0 && failed == 0 {
		return "-"
	}
	text := strconv.FormatInt(processed, 10)
	if failed > 0 {
		text += fmt.Sprintf(" (%d failed)", failed)
	}
	return text
}
