package ops

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/seed-ccb5b62c/jobrun"
)

func (c *command) actFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.by, "by", login(), "`NAME` of the person who decides")
	fs.StringVar(&c.reason, "reason", "", "`TEXT`, required: why")
	fs.IntVar(&c.attempt, "attempt", -1, "`N`, the attempt that was seen (0: there was no run): anything else is a conflict")
	fs.StringVar(&c.status, "status", "", "`STATUS` that was seen with --attempt; \"\": the usual one, which is RUNNING for mark-failed, else FAILED")
	fs.BoolVar(&c.yes, "yes", false, "do not ask; needs --attempt")
	if fs.Name() == "mark-failed" {
		fs.BoolVar(&c.force, "force", false, "also while it sends heartbeats: its context ends and its result is refused")
	}
}

func (c *command) rerunFlags(fs *flag.FlagSet) {
	c.actFlags(fs)
	fs.BoolVar(&c.force, "force", false, "also if it SUCCEEDED: everything but its done items happens twice")
	fs.BoolVar(&c.reset, "reset-items", false, "forget which items are done: EVERY ITEM TAKES EFFECT ONCE MORE")
	fs.BoolVar(&c.wait, "wait", false, "wait until the re-run has ended")
	fs.DurationVar(&c.timeout, "timeout", 0, "with --wait: at most this `DURATION`; 0: no limit")
}

// login is the name under which the person has logged in, also behind sudo.
func login() string {
	u, err := user.Current()
	if err != nil {
		return ""
	}
	if before := os.Getenv("SUDO_USER"); u.Uid == "0" && before != "" {
		return before
	}
	return u.Username
}

// checkAct refuses an action that does not say who, why and what was seen.
func (c *command) checkAct(fs *flag.FlagSet) error {
	set := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { set[f.Name] = true })
	switch {
	case wordless(c.reason):
		return usage("%s needs --reason, in words: it is stored with the change", fs.Name())
	case set["by"] && strings.TrimSpace(c.by) == "":
		return usage("--by is empty, wanted: the name of the person who decides")
	case c.status != "" && !slices.Contains([]string{"RUNNING", "SUCCEEDED", "FAILED", "SKIPPED"}, strings.ToUpper(c.status)):
		return usage("--status is %q, allowed: RUNNING, SUCCEEDED, FAILED, SKIPPED", c.status)
	case strings.TrimSpace(c.by) == "":
		return usage("%s needs --by: this system does not say who is logged in", fs.Name())
	case set["attempt"] && c.attempt < 0:
		return usage("--attempt is %d, allowed: 0 or more", c.attempt)
	case !c.yes && !c.asks:
		return usage("not on a terminal: %s needs --yes --attempt N, the attempt that you saw in \"show %s\"", fs.Name(), c.args[0])
	case c.yes && !set["attempt"]:
		return usage("--yes needs --attempt N, the attempt that you saw in \"show %s\"", c.args[0])
	case c.timeout < 0:
		return usage("--timeout is %s, allowed: 0 or more", c.timeout)
	case c.timeout > 0 && !c.wait:
		return usage("--timeout is for --wait")
	}
	return nil
}

// confirm shows what there is and what is about to happen, and returns nil if the
// person agrees, or has seen just this before: a script has seen the attempt in the
// usual state of the action, or in --status. A state in which the action is not allowed
// is left to the library, which refuses it with the reason.
func (c *command) confirm(ctx context.Context, rec jobrun.Record, stale *jobrun.StaleRun, what string, usual jobrun.Status, allowed ...jobrun.Status) error {
	now := fmt.Sprintf("it is now %s at attempt %d by %s", rec.Status, rec.Attempt, rec.WorkerID)
	if rec.Status == "" {
		now = "there is no run"
	}
	seen := jobrun.Status(strings.ToUpper(c.status))
	switch {
	case c.attempt >= 0 && c.attempt != rec.Attempt:
		return fmt.Errorf("%s: %w: you saw attempt %d, %s", rec.Key, jobrun.ErrConflict, c.attempt, now)
	case seen != "" && seen != rec.Status:
		return fmt.Errorf("%s: %w: you saw %s, %s", rec.Key, jobrun.ErrConflict, seen, now)
	case rec.Status != usual && !slices.Contains(allowed, rec.Status):
		return nil
	case c.yes && seen == "" && rec.Status != usual && rec.Status != "":
		return fmt.Errorf("%s: %w: %s; if that is what you saw, say so with --status %s", rec.Key, jobrun.ErrConflict, now, rec.Status)
	case c.yes:
		return nil
	case rec.Status == "":
		fields(c.err, c.width, [2]string{"run", rec.Key}, [2]string{"status", "there is none yet"})
	default:
		fields(c.err, c.width, describe(words{}, rec, stale)...)
	}
	return c.ask(ctx, what)
}

// ask returns nil if the person types yes, and does not wait longer than ctx.
func (c *command) ask(ctx context.Context, what string) error {
	fmt.Fprintf(c.err, "\n%s\nType \"yes\" to do it: ", wrap(what, c.width))
	line := make(chan string, 1)
	go func() { // ends with the process: nothing else ends a read of a terminal
		answer, _ := c.in.ReadString('\n')
		line <- answer
	}()
	select {
	case <-ctx.Done():
		fmt.Fprintln(c.err)
		return errNotConfirmed
	case answer := <-line:
		if !strings.HasSuffix(answer, "\n") {
			fmt.Fprintln(c.err)
		}
		if strings.TrimSpace(answer) != "yes" {
			return errNotConfirmed
		}
		return nil
	}
}

// says is what is about to be stored.
func (c *command) says() string {
	return fmt.Sprintf("\nBy %s, reason: %s", visible(c.by, ""), visible(c.reason, ""))
}

func (c *command) action() jobrun.Action {
	return jobrun.Action{By: c.by, Reason: c.reason, Force: c.force, ResetItems: c.reset}
}

// markFailed ends a run that is dead.
func (c *command) markFailed(ctx context.Context, r *jobrun.Runner) (int, error) {
	rec, stale, err := look(ctx, r, c.args[0])
	if err != nil {
		return 0, err
	}
	what := "This ends the attempt: the run is FAILED, and nothing follows by itself." + c.says()
	if c.force {
		what = "FORCE: this ends the attempt even if it lives; its function may go on until it looks at its context.\n" + what
	}
	if alive(rec, stale) && !c.force {
		return 0, fmt.Errorf("%s: %w: last heartbeat %s; if it must stop all the same: --force", rec.Key, jobrun.ErrAlive, instant(rec.HeartbeatAt))
	}
	if err := c.confirm(ctx, rec, stale, what, jobrun.Running); err != nil {
		return 0, err
	}
	after, err := r.MarkFailed(ctx, rec, c.action())
	if errors.Is(err, jobrun.ErrAlive) {
		return 0, fmt.Errorf("%w; if it must stop all the same: --force", err)
	}
	if err != nil {
		return 0, err
	}
	return c.acted(after, "is FAILED")
}

// skip records that a run is not to happen.
func (c *command) skip(ctx context.Context, r *jobrun.Runner) (int, error) {
	rec, stale, err := look(ctx, r, c.args[0])
	what := "This makes the run SKIPPED: no retry follows." + c.says()
	if errors.Is(err, jobrun.ErrNotFound) {
		rec, err = jobrun.Record{Key: c.args[0]}, c.tellUnknown(ctx, r, c.args[0])
		what = "This records the run as SKIPPED: no trigger executes it any more." + c.says()
	}
	if err == nil {
		err = c.confirm(ctx, rec, stale, what, jobrun.Failed, "")
	}
	if err != nil {
		return 0, err
	}
	after, err := r.SkipSeen(ctx, rec, c.action())
	if err != nil {
		return 0, err
	}
	return c.acted(after, "is SKIPPED")
}

// wordless reports whether a reason says nothing: it is empty, or of dots and what nobody can see.
func wordless(reason string) bool {
	return !strings.ContainsFunc(reason, func(c rune) bool { return shows(c) && c != '.' && !unicode.IsSpace(c) })
}

// tellUnknown warns of a key whose job nobody has ever run: its row stays for ever.
func (c *command) tellUnknown(ctx context.Context, r *jobrun.Runner, key string) error {
	name, _, _ := strings.Cut(key, ":")
	names, err := r.Jobs(ctx)
	for _, job := range c.judged(r) {
		names = append(names, job.Name)
	}
	if err == nil && !slices.Contains(names, name) {
		fmt.Fprintf(c.err, "Note: no run of a job %q was ever seen.\n", visible(name, ""))
	}
	return err
}

// rerun approves one more execution.
func (c *command) rerun(ctx context.Context, r *jobrun.Runner) (int, error) {
	rec, stale, err := look(ctx, r, c.args[0])
	if err != nil {
		return 0, err
	}
	gives := ""
	if !rec.NextAttemptAt.IsZero() {
		gives = " It takes the place of all attempts that are left: if it fails, it is not retried."
	}
	what := "This approves one more execution on the same key; items that are done stay done." + gives + c.says()
	if c.reset {
		what = "RESET ITEMS: every item takes effect once more, those that are done too.\nThis approves one more execution on the same key." + gives + c.says()
	}
	if c.force && rec.Status == jobrun.Succeeded {
		what = "FORCE: the run SUCCEEDED. What it does outside the ledger of items happens twice unless it was undone.\n" + what
	}
	allowed := []jobrun.Status{jobrun.Skipped}
	if c.force {
		allowed = append(allowed, jobrun.Succeeded)
	}
	if err := c.confirm(ctx, rec, stale, what, jobrun.Failed, allowed...); err != nil {
		return 0, err
	}
	after, err := r.ApproveRerun(ctx, rec, c.action())
	if err != nil {
		return 0, err
	}
	if !c.wait {
		return c.acted(after, "is approved to run once more.\nThe next RetryDue of an instance that knows the job executes it; --wait would have waited for it")
	}
	fmt.Fprintf(c.err, "%s is approved to run once more; waiting for the service's RetryDue to execute it\n", visible(after.Key, ""))
	return c.await(ctx, r, after)
}

// acted prints the run after an action.
func (c *command) acted(after jobrun.Record, what string) (int, error) {
	if c.json {
		return ExitFine, c.print(view{Run: after})
	}
	fmt.Fprintf(c.out, "%s %s.\n", visible(after.Key, ""), what)
	if after.Status == jobrun.Failed && after.ApprovedAt.IsZero() {
		for _, line := range c.advice(after, nil) {
			fmt.Fprintln(c.out, line)
		}
	}
	return ExitFine, nil
}

// await follows an approved run until its execution has ended.
func (c *command) await(ctx context.Context, r *jobrun.Runner, approved jobrun.Record) (int, error) {
	const pause, patience = time.Second, 10 * time.Minute
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("not ended within %s", c.timeout))
		defer cancel()
	}
	tick := time.NewTicker(pause)
	defer tick.Stop()
	begin, told, shown := time.Now(), false, ""
	for {
		rec, err := r.Get(ctx, approved.Key)
		switch {
		case err != nil && ctx.Err() != nil:
		case err != nil:
			return 0, err
		case rec.Attempt > approved.Attempt && rec.Status != jobrun.Running:
			if c.json {
				err = c.print(view{Run: rec})
			} else {
				fields(c.out, c.width, describe(words{}, rec, nil)...)
			}
			if rec.Status == jobrun.Failed {
				return ExitAttention, err
			}
			return ExitFine, err
		case rec.Attempt > approved.Attempt:
			if now := fmt.Sprintf("attempt %d by %s is running, items %s", rec.Attempt, rec.WorkerID, items(rec.ItemsProcessed, rec.ItemsFailed)); now != shown {
				fmt.Fprintln(c.err, visible(now, ""))
				shown = now
			}
		case rec.ApprovedAt.IsZero() || rec.Status != approved.Status:
			return 0, fmt.Errorf("%s: %w: the approval is gone, it is now %s at attempt %d by %s", rec.Key, jobrun.ErrConflict, rec.Status, rec.Attempt, rec.WorkerID)
		case !told && time.Since(begin) > patience:
			fmt.Fprintf(c.err, "nobody has executed it for %s: does any instance call RetryDue with this job?\n", patience)
			told = true
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%s: %w; the approval stands: a RetryDue of an instance that knows the job executes it, with or without this command", approved.Key, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// verify judges the tables.
func (c *command) verify(ctx context.Context, r *jobrun.Runner) (int, error) {
	if err := r.Verify(ctx); err != nil {
		return 0, fmt.Errorf("%w\n(judged for the role of a service that runs jobs; a role that only acts or looks needs less)", err)
	}
	return c.done("The tables are as jobrun needs them.")
}

// migrate creates or completes the tables.
func (c *command) migrate(ctx context.Context, r *jobrun.Runner) (int, error) {
	if err := r.Migrate(ctx); err != nil {
		return 0, err
	}
	return c.done("The tables are complete.")
}

func (c *command) pruneFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.pruneBefore, "before", "", "`DATE`, required: runs of earlier business dates, YYYY-MM-DD")
	fs.BoolVar(&c.yes, "yes", false, "do not ask")
}

// prune removes what old runs have left.
func (c *command) prune(ctx context.Context, r *jobrun.Runner) (int, error) {
	before, err := jobrun.ParseDate(c.pruneBefore)
	if err != nil {
		return 0, usage("--before: %v", err)
	}
	switch {
	case !c.yes && !c.asks:
		return 0, usage("not on a terminal: prune needs --yes")
	case !c.yes:
		if err := c.ask(ctx, fmt.Sprintf("This removes attempts, items and checkpoints of runs before %s that SUCCEEDED or were SKIPPED; those runs can never run again.", before)); err != nil {
			return 0, err
		}
	}
	n, err := r.Prune(ctx, before)
	if err != nil {
		return 0, err
	}
	if c.json {
		return ExitFine, c.print(struct {
			Pruned int64 `json:"pruned"`
		}{n})
	}
	fmt.Fprintf(c.out, "%d runs pruned.\n", n)
	return ExitFine, nil
}

// done prints that all is well.
func (c *command) done(text string) (int, error) {
	if c.json {
		return ExitFine, c.print(struct {
			OK bool `json:"ok"`
		}{true})
	}
	fmt.Fprintln(c.out, text)
	return ExitFine, nil
}
