package ops

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

func (c *command) listFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.job, "job", "", "only the runs of this job `NAME`")
	fs.StringVar(&c.status, "status", "", "only runs with one of these `STATUSES`, separated by commas")
	fs.StringVar(&c.from, "from", "", "only runs of this `DATE` or later, YYYY-MM-DD")
	fs.StringVar(&c.to, "to", "", "only runs of this `DATE` or earlier")
	fs.StringVar(&c.after, "after", "", "go on behind this `KEY`, the last of the page before")
	fs.IntVar(&c.limit, "limit", 100, "at most `N` runs, up to 1000")
}

// list prints one page of runs.
func (c *command) list(ctx context.Context, r *jobrun.Runner) (int, error) {
	f := jobrun.Filter{Job: c.job, After: c.after, Limit: c.limit}
	var err error
	if f.From, f.To, err = dates(c.from, c.to); err != nil {
		return 0, err
	}
	if c.limit < 1 {
		return 0, usage("--limit is %d, allowed: 1 to 1000", c.limit)
	}
	for s := range strings.SplitSeq(c.status, ",") {
		if s = strings.ToUpper(strings.TrimSpace(s)); s != "" {
			f.Status = append(f.Status, jobrun.Status(s))
		}
	}
	runs, err := r.List(ctx, f)
	if err != nil {
		return 0, err
	}
	for _, s := range f.Status {
		if known := []jobrun.Status{jobrun.Running, jobrun.Succeeded, jobrun.Failed, jobrun.Skipped}; len(runs) == 0 && !slices.Contains(known, s) {
			return 0, usage("--status is %s, and there is no such run; jobrun's are %v", s, known)
		}
	}
	next := ""
	if len(runs) == c.limit {
		next = runs[len(runs)-1].Key
	}
	if c.json {
		return ExitFine, c.print(struct {
			Runs []jobrun.Record `json:"runs"`
			Next string          `json:"next,omitempty"`
		}{runs, next})
	}
	t := table{head: []string{"KEY", "STATUS", "ATTEMPT", "STARTED", "TOOK", "ITEMS", "NOTE"}}
	for _, rec := range runs {
		t.add(rec.Key, string(rec.Status), strconv.Itoa(rec.Attempt), clock(rec.StartedAt), took(rec), items(rec.ItemsProcessed, rec.ItemsFailed), note(words{}, rec))
	}
	if len(runs) == 0 {
		fmt.Fprintln(c.out, "No run is like that.")
		return ExitFine, nil
	}
	t.print(c.out, c.width)
	c.zone(runs...)
	if next != "" {
		fmt.Fprintf(c.out, "More: --after=%s\n", strings.TrimPrefix(quoted(next), "-- "))
	}
	return ExitFine, nil
}

// dates are the dates of two flags; "": none.
func dates(from, to string) (a, b jobrun.Date, err error) {
	if from != "" {
		if a, err = jobrun.ParseDate(from); err != nil {
			return a, b, usage("--from: %v", err)
		}
	}
	if to != "" {
		if b, err = jobrun.ParseDate(to); err != nil {
			return a, b, usage("--to: %v", err)
		}
	}
	return a, b, nil
}

// show prints one run.
func (c *command) show(ctx context.Context, r *jobrun.Runner) (int, error) {
	rec, stale, err := look(ctx, r, c.args[0])
	if err != nil {
		return 0, err
	}
	if c.json {
		v := view{Run: rec}
		if stale != nil {
			v.Stale = evidenceOf(*stale)
		}
		return ExitFine, c.print(v)
	}
	fields(c.out, c.width, describe(words{}, rec, stale)...)
	for _, line := range c.advice(rec, stale) {
		fmt.Fprintln(c.out, line)
	}
	return ExitFine, nil
}

// stale prints the evidence about every stale run.
func (c *command) stale(ctx context.Context, r *jobrun.Runner) (int, error) {
	all, err := r.Stale(ctx)
	if err != nil {
		return 0, err
	}
	code := ExitFine
	if len(all) > 0 {
		code = ExitAttention
	}
	if c.json {
		views := make([]view, len(all))
		for i, s := range all {
			views[i] = view{s.Record, evidenceOf(s)}
		}
		return code, c.print(struct {
			Stale []view `json:"stale"`
		}{views})
	}
	if len(all) == 0 {
		fmt.Fprintln(c.out, "No run is stale.")
	}
	for i, s := range all {
		if i > 0 {
			fmt.Fprintln(c.out)
		}
		fields(c.out, c.width, describe(words{}, s.Record, &s)...)
	}
	if len(all) > 0 {
		fmt.Fprintln(c.out, "\n"+wrap(fmt.Sprintf("Look at the processes before \"%s mark-failed KEY --reason ...\".", c.name), c.width))
	}
	return code, nil
}

func (c *command) attentionFlags(fs *flag.FlagSet) {
	c.dueByFlag(fs)
	fs.DurationVar(&c.since, "since", 0, "report attempts too that failed in this `DURATION` and were followed by another")
}

func (c *command) dueByFlag(fs *flag.FlagSet) {
	fs.Func("due-by", "`TIME` of day such as 02:30 (or 2h30m) from which a run of today is missed; \"\": today is not judged", func(s string) (err error) {
		if t, e := time.Parse("15:04", s); e == nil {
			c.dueBy = t.Sub(t.Truncate(24 * time.Hour))
			return nil
		}
		if c.dueBy, err = time.ParseDuration(s); err != nil {
			return errors.New("want a time of day such as 02:30")
		}
		return nil
	})
}

// judged are the jobs whose missed dates can be told.
func (c *command) judged(r *jobrun.Runner) []jobrun.Job {
	if c.knowsJobs && len(c.jobs) == 0 {
		return r.Scheduled()
	}
	return c.jobs
}

// attention prints what needs a person.
func (c *command) attention(ctx context.Context, r *jobrun.Runner) (int, error) {
	opts := &jobrun.AttentionOptions{DueBy: c.dueBy}
	switch {
	case c.since < 0:
		return 0, usage("--since is %s, allowed: 0 or more", c.since)
	case c.since > 0:
		opts.FailedSince = time.Now().Add(-c.since)
	}
	problems, failed := r.Attention(ctx, opts, c.jobs...)
	if failed != nil && problems == nil {
		return 0, failed
	}
	code := ExitFine
	if len(problems) > 0 {
		code = ExitAttention
	}
	if c.json {
		if problems == nil {
			problems = []jobrun.Problem{}
		}
		return code, cmp.Or(c.print(struct {
			Problems []jobrun.Problem `json:"problems"`
			Judged   bool             `json:"missed_judged"` // of all jobs
			Error    string           `json:"error,omitempty"`
		}{problems, failed == nil && len(c.judged(r)) > 0, errorText(failed)}), failed)
	}
	slices.SortStableFunc(problems, func(a, b jobrun.Problem) int {
		return cmp.Compare(slices.Index(severity, a.Kind), slices.Index(severity, b.Kind))
	})
	t := table{head: []string{"KEY", "PROBLEM", "SINCE", "ATTEMPT", "NOTE"}}
	var runs []jobrun.Record
	for _, p := range problems {
		attempt := "-"
		if p.Record.Key != "" {
			attempt = strconv.Itoa(p.Record.Attempt)
		}
		runs = append(runs, jobrun.Record{StartedAt: p.Since})
		t.add(p.Key, string(p.Kind), clock(p.Since), attempt, cmp.Or(note(words{}, p.Record), meaning[p.Kind]))
	}
	if len(problems) == 0 && failed == nil {
		fmt.Fprintln(c.out, "Nothing needs a person.")
	} else {
		t.print(c.out, c.width)
		c.zone(runs...)
		fmt.Fprintf(c.out, "\"%s show KEY\" says what can be done.\n", c.name)
	}
	if len(c.judged(r)) == 0 {
		fmt.Fprintln(c.out, "Missed dates are not judged: only the service's own command knows its jobs.")
	}
	return code, failed
}

// severity is the order in which a person wants to see problems.
var severity = []jobrun.ProblemKind{jobrun.ProblemStale, jobrun.ProblemFailed, jobrun.ProblemMissed, jobrun.ProblemApproved, jobrun.ProblemRetrying, jobrun.ProblemAttempt}

// meaning says of a problem what its run does not.
var meaning = map[jobrun.ProblemKind]string{
	jobrun.ProblemStale:  "RUNNING, but silent or over its limit",
	jobrun.ProblemMissed: "no run",
}

func (c *command) missedFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.job, "job", "", "only the dates of this job `NAME`")
	fs.StringVar(&c.from, "from", "", "from this `DATE` on, YYYY-MM-DD; \"\": from the job's first run on, as attention judges them")
	fs.StringVar(&c.to, "to", "", "with --from: up to this `DATE`; \"\": today")
	c.dueByFlag(fs)
}

// missed prints the due dates of the jobs that have no run.
func (c *command) missed(ctx context.Context, r *jobrun.Runner) (int, error) {
	from, to, err := dates(c.from, c.to)
	switch {
	case err != nil:
		return 0, err
	case c.from == "" && c.to != "":
		return 0, usage("--to is for --from")
	case c.from != "" && c.dueBy != 0:
		return 0, usage("--due-by is for the dates from the job's first run on, without --from")
	case c.to == "":
		to = r.Today()
	}
	var jobs []jobrun.Job
	var names []string
	for _, job := range c.judged(r) {
		if names = append(names, job.Name); c.job == "" || job.Name == c.job {
			jobs = append(jobs, job)
		}
	}
	if len(jobs) == 0 {
		return 0, usage("no job to judge: --job is %q, this command knows %q", c.job, names)
	}
	type date struct {
		Job  string      `json:"job"`
		Key  string      `json:"key"`
		Date jobrun.Date `json:"date"`
	}
	missed := []date{}
	var failed error
	if c.from == "" {
		var problems []jobrun.Problem
		problems, failed = r.Attention(ctx, &jobrun.AttentionOptions{DueBy: c.dueBy}, jobs...)
		for _, p := range problems {
			if p.Kind == jobrun.ProblemMissed {
				missed = append(missed, date{p.Job, p.Key, p.Date})
			}
		}
	} else {
		for _, job := range jobs {
			if job.Every != 0 {
				if c.job != "" {
					return 0, usage("%s runs several times a day: it has no run per date", job.Name)
				}
				continue
			}
			days, err := r.Missed(ctx, job, from, to)
			failed = errors.Join(failed, err)
			for _, d := range days {
				missed = append(missed, date{job.Name, job.Key(d), d})
			}
		}
	}
	if failed != nil && len(missed) == 0 {
		return 0, failed
	}
	code := ExitFine
	if len(missed) > 0 {
		code = ExitAttention
	}
	if c.json {
		return code, cmp.Or(c.print(struct {
			Missed []date `json:"missed"`
			Error  string `json:"error,omitempty"`
		}{missed, errorText(failed)}), failed)
	}
	if len(missed) == 0 {
		fmt.Fprintln(c.out, "No due date is missed.")
	}
	for _, m := range missed {
		fmt.Fprintln(c.out, visible(m.Key, ""))
	}
	return code, failed
}

// errorText is the text of an error; "": none.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// entry is a line of the history for JSON.
type entry struct {
	At             time.Time      `json:"at"`
	Attempt        int            `json:"attempt"`
	Trigger        jobrun.Trigger `json:"trigger,omitempty"`
	WorkerID       string         `json:"worker_id,omitempty"`
	HeartbeatAt    time.Time      `json:"heartbeat_at,omitzero"`
	FinishedAt     time.Time      `json:"finished_at,omitzero"`
	Outcome        jobrun.Status  `json:"outcome,omitempty"`
	ItemsProcessed int64          `json:"items_processed,omitzero"`
	ItemsFailed    int64          `json:"items_failed,omitzero"`
	Error          string         `json:"error,omitempty"`
	Action         string         `json:"action,omitempty"`
	By             string         `json:"by,omitempty"`
	Reason         string         `json:"reason,omitempty"`
	Force          bool           `json:"force,omitzero"`
	ResetItems     bool           `json:"reset_items,omitzero"`
	Previous       jobrun.Status  `json:"previous,omitempty"`
	DBUser         string         `json:"db_user,omitempty"`
}

// history prints the attempts and actions of a run.
func (c *command) history(ctx context.Context, r *jobrun.Runner) (int, error) {
	all, err := r.History(ctx, c.args[0])
	if err != nil {
		return 0, err
	}
	now, err := r.Get(ctx, c.args[0])
	if err != nil && !errors.Is(err, jobrun.ErrNotFound) { // its row may be gone
		return 0, err
	}
	entries := make([]entry, len(all))
	var lines [][2]string
	for i, h := range all {
		e := entry{
			At: h.At, Attempt: h.Attempt, Trigger: h.Trigger, WorkerID: h.WorkerID, HeartbeatAt: h.HeartbeatAt, FinishedAt: h.FinishedAt,
			Outcome: h.Outcome, ItemsProcessed: h.ItemsProcessed, ItemsFailed: h.ItemsFailed, Error: h.Error,
			Action: h.Kind, Previous: h.Previous, DBUser: h.DBUser,
		}
		what, who, why := fmt.Sprintf("attempt %d, %s, %s", h.Attempt, cmp.Or(string(h.Trigger), source(h, now)), h.Outcome), h.WorkerID, h.Error
		if h.Attempt == 0 {
			what = "recorded without an execution, " + string(h.Outcome)
		} else if !h.FinishedAt.IsZero() {
			what += " after " + short(h.FinishedAt.Sub(h.At))
		}
		if h.ItemsProcessed > 0 || h.ItemsFailed > 0 {
			what += ", items " + items(h.ItemsProcessed, h.ItemsFailed)
		}
		if a := h.Action; a != nil {
			e.By, e.Reason, e.Force, e.ResetItems = a.By, a.Reason, a.Force, a.ResetItems
			what, who, why = h.Kind, fmt.Sprintf("%s (role %s)", a.By, h.DBUser), a.Reason
			if a.Force {
				what += " FORCE"
			}
			if a.ResetItems {
				what += " RESET_ITEMS"
			}
			what += fmt.Sprintf(" of attempt %d, which was %s", h.Attempt, h.Previous)
			if h.Previous == "" {
				what = h.Kind + ", there was no run"
			}
		}
		lines = append(lines, [2]string{clock(h.At), what}, [2]string{"", "by " + visible(who, "")})
		if why != "" { // somebody's text, marked: it could be written like one of these lines
			lines = append(lines, [2]string{"", "| " + strings.ReplaceAll(wrap(visible(why, "\n\t"), (c.width-23)*min(1, c.width)), "\n", "\n| ")})
		}
		entries[i] = e
	}
	if c.json {
		return ExitFine, c.print(struct {
			Key     string  `json:"key"`
			History []entry `json:"history"`
		}{c.args[0], entries})
	}
	fmt.Fprintln(c.out, visible(c.args[0], ""))
	fields(c.out, c.width, lines...)
	c.zone(jobrun.Record{StartedAt: all[0].At})
	return ExitFine, nil
}

// source says what made an attempt that has no trigger.
func source(h jobrun.HistoryEntry, now jobrun.Record) string {
	if !now.PrunedAt.IsZero() && h.Attempt == now.Attempt {
		return "its history was pruned"
	}
	return "by another program"
}

// zone says once which zone the times of a table are in.
func (c *command) zone(runs ...jobrun.Record) {
	for _, rec := range runs {
		if !rec.StartedAt.IsZero() {
			fmt.Fprintf(c.out, "Times are those of %s.\n", rec.StartedAt.Location())
			return
		}
	}
}
