package checker

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Names of the rules.
const (
	ruleRecord     = "record"
	ruleClaim      = "claim"
	ruleEnd        = "end"
	ruleOther      = "no other change"
	ruleExecution  = "one execution"
	ruleNever      = "never started"
	ruleLimit      = "retry limit"
	ruleApproval   = "one execution per approval"
	ruleSuccess    = "one success"
	ruleOutcome    = "outcome"
	ruleOwner      = "effects are the holder's"
	ruleLate       = "nothing after the end"
	ruleCounted    = "nothing more than at the end"
	ruleOnce       = "items once"
	ruleCheckpoint = "items once by checkpoint"
	ruleComplete   = "items complete"
	ruleCommit     = "one commit with SUCCEEDED"
	ruleLedger     = "ledger"
	ruleAnswer     = "answers"
	ruleDecision   = "decisions"
	rulePeople     = "people's changes"
	ruleAsked      = "people's answers"
	ruleActions    = "actions"
	ruleHistory    = "history"
	ruleTrigger    = "triggers"
	ruleClosed     = "history stays"
	rulePeace      = "nothing left behind"
	ruleStale      = "stale"
	ruleFinal      = "come to an end"
)

// Rule is what must hold.
type Rule struct{ Name, Text string }

// Rules are all that Check judges, in the order in which a reader needs them.
var Rules = []Rule{
	{ruleRecord, "every change of a run's row begins where the one before has ended, and the last one has left the row as it is"},
	{ruleClaim, "a worker claims only a run without a row, one that FAILED and is due, or one with an approval that still holds; under a number above all before, with a new token (or that of the same call's claim, if its answer was lost and somebody has ended it before it was executed), in its own name"},
	{ruleEnd, "an attempt is ended from RUNNING, under its number, token and worker, by the process that claimed it or by a person, and by no other process"},
	{ruleOther, "workers change no row in another way, except that they record a date as SKIPPED; and nobody unknown changes one"},
	{ruleExecution, "every attempt is executed at most once, after its claim, by the worker that made it"},
	{ruleNever, "a claim closed as never started has no execution and no effect, and is due at once"},
	{ruleLimit, "an attempt that FAILED is to be tried again while executions remain, and only then; approved ones and those never started do not count"},
	{ruleApproval, "an approval is executed once: what then FAILED is not tried again by itself"},
	{ruleSuccess, "between two attempts that SUCCEEDED, a person has forced it or something outside has changed the row"},
	{ruleOutcome, "the end that a worker recorded is what the function has returned"},
	{ruleOwner, "every effect is of an attempt that was claimed and executed, and by its process"},
	{ruleLate, "no effect was committed before the claim of its attempt or after what ended it, by the times of the commits"},
	{ruleCounted, "an attempt has no more effects than could be seen when it was ended"},
	{ruleOnce, "items of each and once take effect once, until a person empties the ledger"},
	{ruleCheckpoint, "items with a checkpoint take effect once, until the run SUCCEEDED or a person discards the checkpoint"},
	{ruleComplete, "when a run SUCCEEDED, all its items had taken effect"},
	{ruleCommit, "the effect of complete is in the transaction that made the run SUCCEEDED, and there is one for each"},
	{ruleLedger, "the ledger of items is what took effect since it was emptied last, item by item and attempt by attempt"},
	{ruleAnswer, "what a worker was told about an attempt is what became of it"},
	{ruleDecision, "a worker was told of a state only if the run had been in it"},
	{rulePeople, "every change by a person has one action of its own that allows it, and every action one change"},
	{ruleAsked, "an action that was confirmed is there once and as it was asked for, one that was refused is not, and none is there unasked"},
	{ruleActions, "actions take no change, and their order is the order of what they did"},
	{ruleHistory, "every attempt has its row, closed as it ended and by whom, in the order of their starts; those of other programs when the library came by; none is there without a claim"},
	{ruleTrigger, "an attempt's trigger tells why it was claimed: a retry, a re-run or a call"},
	{ruleClosed, "nobody changes or deletes history that was closed"},
	{rulePeace, "a process that was shut down while nothing went wrong has ended every attempt that was still its own, unless it told that it could not"},
	{ruleStale, "what was left RUNNING is listed as stale, and nothing else"},
	{ruleFinal, "every run that was wanted is SUCCEEDED or SKIPPED in the end, and no approval is left that nobody has executed"},
}

// judge counts a case of the rule.
func (c *check) judge(rule string) { c.report.Judged[rule]++ }

// broken notes a case in which the rule does not hold.
func (c *check) broken(rule, key, format string, args ...any) {
	c.report.Violations = append(c.report.Violations, Violation{rule, key, fmt.Sprintf(format, args...)})
}

// rules judges what does not follow from a walk through the changes alone.
func (c *check) rules() {
	for _, r := range c.runs {
		c.executions(r)
		c.effects(r)
		c.items(r)
		c.answers(r)
		c.history(r)
		c.ordered(r)
		c.end(r)
		c.peace(r)
		c.count(r)
	}
	c.people()
	c.judge(ruleActions)
	if !c.guarded {
		c.broken(ruleActions, "", "no trigger refuses UPDATE, DELETE and TRUNCATE of batch_job_action")
	}
	for _, h := range c.rewritten {
		after := h.after
		if after == "" {
			after = "nothing"
		}
		c.broken(ruleClosed, "", "%s made %s of %s", h.session, after, h.before)
	}
	c.listed()
}

// executions judges the calls of the job's function, and the ends that their
// workers recorded by what they returned.
func (c *check) executions(r *run) {
	for _, e := range r.executions {
		c.judge(ruleExecution)
		a := r.byNumber[e.attempt]
		switch {
		case a == nil:
			c.broken(ruleExecution, r.key, "attempt %d was executed by %s, and nobody had claimed it", e.attempt, e.worker)
			continue
		case a.worker != e.worker || a.session != e.session:
			c.broken(ruleExecution, r.key, "attempt %d was executed by %s (%s), and claimed by %s (%s)", a.number, e.worker, e.session, a.worker, a.session)
		case e.at.Before(a.claim.at):
			c.broken(ruleExecution, r.key, "attempt %d was executed at %s, before its claim", a.number, clock(e.at))
		case len(a.execs) > 0:
			c.broken(ruleExecution, r.key, "attempt %d was executed again at %s", a.number, clock(e.at))
		case len(e.outcomes) > 1:
			c.broken(ruleExecution, r.key, "attempt %d returned more than once: %s", a.number, strings.Join(e.outcomes, ", "))
		}
		a.execs = append(a.execs, e)
	}
	for _, a := range r.attempts {
		if a.repeats != nil && len(a.repeats.execs) > 0 {
			c.broken(ruleClaim, r.key, "attempt %d has the token of attempt %d, which was executed", a.number, a.repeats.number)
		}
		if a.never && len(a.execs) > 0 {
			c.broken(ruleNever, r.key, "attempt %d was executed at %s", a.number, clock(a.execs[0].at))
		}
		if a.finished() && !a.never {
			c.outcome(r, a)
		}
	}
}

// outcome judges an end that the attempt's own worker recorded.
func (c *check) outcome(r *run, a *attempt) {
	c.judge(ruleOutcome)
	status := a.end.after.Status
	if len(a.execs) == 0 {
		c.broken(ruleOutcome, r.key, "attempt %d %s, and was not executed", a.number, status)
		return
	}
	e, returned := a.execs[0], ""
	if len(e.outcomes) > 0 {
		returned = e.outcomes[0]
	}
	completed := status == "SUCCEEDED" && r.completedIn(a)
	ok := false
	switch returned {
	case "nil":
		ok = status == "SUCCEEDED"
	case "skip":
		ok = status == "SKIPPED" || completed
	case "error", "panic", "goexit":
		ok = status == "FAILED" || completed // whatever the function did after its Complete
	case "":
		ok = status == "FAILED" || completed // it may have been unable to write down what it returns
	}
	if !ok {
		c.broken(ruleOutcome, r.key, "attempt %d %s, and its function returned %q", a.number, status, returned)
	} else if returned != "" && !completed && e.returned.After(a.end.at) {
		c.broken(ruleOutcome, r.key, "attempt %d %s at %s, before its function returned", a.number, status, clock(a.end.at))
	}
}

// completedIn tells whether the work of complete was committed together with the
// attempt's end.
func (r *run) completedIn(a *attempt) bool {
	return r.job.way == "complete" && slices.ContainsFunc(r.effects, func(e *effect) bool {
		return e.attempt == a.number && e.xid == a.end.xid
	})
}

// end judges how a run that was wanted has ended.
func (c *check) end(r *run) {
	if !c.final || !r.wanted {
		return
	}
	c.judge(ruleFinal)
	if r.now == nil || r.now.Status != "SUCCEEDED" && r.now.Status != "SKIPPED" || pending(r.now) {
		c.broken(ruleFinal, r.key, "it is %s", r.now.brief())
	}
}

// peace judges what processes that were shut down in peace have left behind.
func (c *check) peace(r *run) {
	for _, a := range r.attempts {
		if c.ended[a.session] != "in peace" {
			continue
		}
		c.judge(rulePeace)
		told := slices.ContainsFunc(r.answers, func(an *answer) bool { return an.kind == "unknown" && an.attempt == a.number && a.by(an) })
		if a.end == nil && !told {
			c.broken(rulePeace, r.key, "attempt %d is RUNNING, and %s was shut down", a.number, a.session)
		}
	}
}

// listed judges what Stale told at one moment, which the commit of its list tells.
// Nobody was at work then.
func (c *check) listed() {
	if len(c.stale) == 0 && !c.final {
		return // it was not asked yet
	}
	moment := time.Time{} // zero: now
	named := map[string]bool{}
	for _, s := range c.stale {
		named[s.key] = true
		if earlier(s.committed, moment) {
			moment = s.committed
		}
	}
	for _, r := range c.runs {
		var then *row
		for _, ch := range r.changes {
			if !earlier(moment, ch.committed) {
				then = ch.after
			}
		}
		running := then != nil && then.Status == "RUNNING"
		if running || named[r.key] {
			c.judge(ruleStale)
		}
		switch {
		case running && !named[r.key]:
			c.broken(ruleStale, r.key, "it was left %s, and not listed", then.brief())
		case named[r.key] && !running:
			c.broken(ruleStale, r.key, "it was listed, and was %s", then.brief())
		case c.final && !named[r.key] && r.now != nil && r.now.Status == "RUNNING":
			c.broken(ruleStale, r.key, "it is left %s, and was not listed", r.now.brief())
		}
	}
}

// count adds up what became of the run's attempts.
func (c *check) count(r *run) {
	n := &c.report.Counts
	n.Executions += len(r.executions)
	for _, a := range r.attempts {
		n.Attempts++
		switch a.grounds {
		case due:
			n.Retries++
		case approved:
			n.Reruns++
		}
		switch {
		case a.never:
			n.NeverStarted++
		case a.end == nil:
			n.Open++
		case !a.finished():
			n.Superseded++
		case a.end.after.Status == "SUCCEEDED":
			n.Succeeded++
		case a.end.after.Status == "SKIPPED":
			n.Skipped++
		default:
			n.Failed++
		}
	}
}
