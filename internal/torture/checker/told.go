package checker

import (
	"fmt"
	"slices"
)

// answers judges what workers were told.
func (c *check) answers(r *run) {
	told := map[int]bool{}
	for _, an := range r.answers {
		if an.decision != "RAN" {
			c.decision(r, an)
			continue
		}
		wrong := func(format string, args ...any) {
			c.broken(ruleAnswer, r.key, "%s was told at %s of attempt %d: RAN %s %q: "+format, append([]any{an.worker, clock(an.at), an.attempt, an.status, an.kind}, args...)...)
		}
		switch an.kind {
		case "lost":
			c.judge(ruleAnswer)
			if a := r.byNumber[an.attempt]; a == nil || !a.by(an) || !a.lost() {
				wrong("nobody had taken it away")
			}
			continue // the status is what the run is now
		case "", "run":
		case "other": // one of several runs, and one of them failed
			c.judge(ruleAnswer)
			if !r.was(an) {
				wrong("the run was not in that state before")
			}
			continue
		default:
			continue // it tells of no end
		}
		c.judge(ruleAnswer)
		a := r.byNumber[an.attempt]
		if a == nil || !a.by(an) {
			wrong("it had not claimed it")
			continue
		}
		if told[an.attempt] {
			wrong("the second time")
		}
		told[an.attempt] = true
		failed := an.kind == "run" && !r.completedIn(a) // after Complete an error of the function changes nothing, and is told
		if !a.recorded(an.status) || a.never || (an.status == "FAILED") != failed {
			wrong("the attempt %s", a.became())
		}
	}
}

// by tells whether the attempt is of the worker that was answered.
func (a *attempt) by(an *answer) bool { return a.worker == an.worker && a.session == an.session }

// lost tells whether the attempt may be called lost: it was taken away, or its end
// was recorded and the function had returned that very error.
func (a *attempt) lost() bool {
	return a.ends[operator] || a.ends[outside] ||
		a.finished() && a.end.after.Status == "FAILED" && len(a.execs) > 0 && a.execs[0].lost
}

// recorded tells whether the attempt's own worker has recorded this end. A hand
// may have given the run back to it afterwards.
func (a *attempt) recorded(status string) bool {
	return slices.ContainsFunc(a.live, func(s span) bool {
		return s.to != nil && s.to.session == a.session && s.to.after != nil && s.to.after.Status == status
	})
}

// became says in words how the attempt ended.
func (a *attempt) became() string {
	switch {
	case a.end == nil:
		return "is RUNNING"
	case a.end.after == nil:
		return "was deleted by " + a.end.session
	case a.never:
		return "was closed as never started"
	}
	return fmt.Sprintf("was made %s by %s", a.end.after.Status, a.end.session)
}

// states that the run must have been in, by the decision.
var states = map[string]func(*change) bool{
	"RAN":               func(*change) bool { return true },
	"ALREADY_RUNNING":   func(ch *change) bool { return ch.after.Status == "RUNNING" },
	"ALREADY_SUCCEEDED": func(ch *change) bool { return ch.after.Status == "SUCCEEDED" },
	"ALREADY_SKIPPED":   func(ch *change) bool { return ch.after.Status == "SKIPPED" },
	"ALREADY_FAILED":    func(ch *change) bool { return ch.after.Status == "FAILED" && !ch.again },
	"RETRY_LATER":       func(ch *change) bool { return ch.again },
	"NOT_DUE":           func(*change) bool { return true },
	"UNKNOWN_STATUS":    func(ch *change) bool { return ch.after.Status != "RUNNING" && !ended(ch.after.Status) },
}

// decision judges an answer that is not RAN.
func (c *check) decision(r *run, an *answer) {
	c.judge(ruleDecision)
	wrong := func(format string, args ...any) {
		c.broken(ruleDecision, r.key, "%s was told at %s of attempt %d: %q %s %q: "+format, append([]any{an.worker, clock(an.at), an.attempt, an.decision, an.status, an.kind}, args...)...)
	}
	if an.decision == "" {
		if an.kind == "" {
			wrong("neither a decision nor an error")
		}
		return
	}
	if an.kind != "" {
		wrong("an error, although nothing was done")
	}
	if states[an.decision] == nil {
		wrong("unknown decision")
	} else if !r.was(an) {
		wrong("the run was not in that state before")
	}
}

// was tells whether the run had been in the state that an answer tells of.
func (r *run) was(an *answer) bool {
	state := states[an.decision]
	return slices.ContainsFunc(r.changes, func(ch *change) bool {
		return ch.after != nil && !ch.at.After(an.at) && state(ch) &&
			(an.status == "" || ch.after.Status == an.status && ch.after.Attempt == an.attempt)
	})
}

// people judges what people asked for by what is there.
func (c *check) people() {
	unasked := map[string]bool{}
	for _, a := range c.actions {
		unasked[a.reason] = true
	}
	for _, q := range c.asked {
		c.report.Counts.Actions[q.action+" "+q.answer]++
		c.judge(ruleAsked)
		delete(unasked, q.reason)
		wrong := func(format string, args ...any) {
			c.broken(ruleAsked, q.key, "%s (%s) was answered %s: "+format, append([]any{q.action, q.reason, q.answer}, args...)...)
		}
		there := c.byReason[q.reason]
		switch {
		case len(there) > 1:
			wrong("it is there %d times", len(there))
		case q.answer == "done" && len(there) == 0:
			wrong("it is not there")
		case q.answer != "done" && q.answer != "other" && len(there) > 0:
			wrong("it is there")
		case q.answer == "alive" && (q.action != "MARK_FAILED" || q.forced):
			wrong("only MARK_FAILED without force can be")
		}
		for _, a := range there {
			if a.action != q.action || a.key != q.key || a.forced != q.forced || a.reset != q.reset ||
				a.action != "SKIP" && (!a.names(q.attempt) || a.previous != q.status) { // Skip is asked for by the key alone
				wrong("it is there as %s of %s, attempt %d, %q, forced %t, reset %t", a.action, a.key, a.attempt, a.previous, a.forced, a.reset)
			}
		}
	}
	if !c.final {
		return // the answer may not have been written down yet
	}
	for _, a := range c.actions {
		if unasked[a.reason] {
			c.broken(ruleAsked, a.key, "action %d, %s (%s) is there, and nobody asked for it", a.id, a.action, a.reason)
		}
	}
}

// names tells whether the action names the attempt that the person saw, under its
// number or the one that the history gave it; that it may is judged with the change.
func (a *action) names(seen int) bool {
	return a.attempt == seen || a.change != nil && a.change.before != nil && a.change.before.Attempt == seen
}

// ordered judges the actions on a run among themselves.
func (c *check) ordered(r *run) {
	var last *action
	for _, a := range r.actions {
		c.judge(rulePeople)
		if a.change == nil || a.change.session != "operator" {
			c.broken(rulePeople, r.key, "action %d, %s (%s), changed nothing", a.id, a.action, a.reason)
		} else if a.moreChange {
			c.broken(rulePeople, r.key, "action %d, %s (%s), made more than one change", a.id, a.action, a.reason)
		}
		c.judge(ruleActions)
		if last != nil && (a.at.Before(last.at) || a.change != nil && last.change != nil && a.change.seq <= last.change.seq) {
			c.broken(ruleActions, r.key, "action %d came before action %d", a.id, last.id)
		}
		last = a
	}
}
