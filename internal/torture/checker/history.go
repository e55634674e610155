package checker

import "slices"

// history judges the rows of batch_job_attempt.
func (c *check) history(r *run) {
	var last *historic
	for _, a := range r.attempts {
		c.judge(ruleHistory)
		h := r.history[a.number]
		wrong := func(format string, args ...any) {
			c.broken(ruleHistory, r.key, "attempt %d: "+format, append([]any{a.number}, args...)...)
		}
		if h == nil || h.token != a.token || h.worker != a.worker {
			wrong("there is no row of it, or one of another claim")
			continue
		}
		if last != nil && h.started.Before(last.started) {
			wrong("started at %s, before the attempt before it", clock(h.started))
		}
		last = h
		c.closing(a, h, wrong)
		c.trigger(r, a, h)
	}
	for _, number := range r.visited {
		if number > 0 && r.history[number] == nil {
			c.broken(ruleHistory, r.key, "attempt %d: there is no row of it, although the library has come by since", number)
		}
	}
	for number, h := range r.history {
		if !h.finished.IsZero() {
			c.judge(ruleClosed)
		}
		if number > 0 && r.byNumber[number] == nil && (!r.foreign(number) || !r.madeOutside(h)) {
			c.broken(ruleHistory, r.key, "attempt %d of %s is there, closed as %q by %q, and nobody had made it", number, h.worker, h.outcome, h.endedBy)
		}
	}
}

// madeOutside tells whether the row can be of what another program has made of the
// run: it is written when the library comes by, closed as the run was found.
func (r *run) madeOutside(h *historic) bool {
	return !h.finished.IsZero() && (h.endedBy == "OUTSIDE" || h.endedBy == "PERSON") && slices.ContainsFunc(r.changes, func(ch *change) bool {
		return whoIs(ch.session) != worker && ch.after != nil && ch.after.Worker == h.worker
	})
}

// closing judges how the row of an attempt was closed.
func (c *check) closing(a *attempt, h *historic, wrong func(string, ...any)) {
	if h.finished.IsZero() {
		// The library closes what something outside has ended when it comes by.
		if h.outcome != "" || h.endedBy != "" {
			wrong("open, with the outcome %s by %s", h.outcome, h.endedBy)
		}
		if a.left || a.ends[worker] || a.ends[operator] {
			wrong("open, and it %s", a.became())
		}
		return
	}
	theirs := h.endedBy == "OUTSIDE" && a.end != nil && a.end.after != nil && whoIs(a.end.session) == outside && a.end.after.Finished.Equal(h.finished)
	if h.finished.Before(h.started) && !theirs { // a now() may be older than the claim that it waited for
		wrong("from %s to %s", clock(h.started), clock(h.finished))
	}
	switch {
	case a.end == nil:
		if len(a.live) == 1 { // else a hand gave the run back to it, and history stays
			wrong("closed as %s by %s, and it is RUNNING", h.outcome, h.endedBy)
		}
	case a.ends[outside]: // and perhaps by others
		by := h.endedBy == "OUTSIDE" || h.endedBy == "PERSON" && a.byPerson || h.endedBy == "WORKER" && a.ends[worker]
		if !ended(h.outcome) || !by {
			wrong("closed as %s by %s, and it %s", h.outcome, h.endedBy, a.became())
		}
	case a.ends[worker]:
		if h.endedBy != "WORKER" || a.end.after == nil || h.outcome != a.end.after.Status {
			wrong("closed as %s by %s, and it %s", h.outcome, h.endedBy, a.became())
		}
	case a.ends[operator]:
		if h.endedBy != "PERSON" || h.outcome != "FAILED" {
			wrong("closed as %s by %s, and it %s", h.outcome, h.endedBy, a.became())
		}
	}
}

func (c *check) trigger(r *run, a *attempt, h *historic) {
	c.judge(ruleTrigger)
	ok := false
	switch a.grounds {
	case noRow:
		ok = h.trigger == "SCHEDULE" || h.trigger == "MANUAL" || h.trigger == "CATCH_UP"
	case due:
		ok = h.trigger == "RETRY" || h.trigger == "RERUN" && a.granted
	case approved:
		ok = h.trigger == "RERUN"
	case none: // judged as a claim
		ok = true
	}
	if !ok {
		c.broken(ruleTrigger, r.key, "attempt %d has the trigger %s", a.number, h.trigger)
	}
	for _, e := range a.execs {
		if e.trigger != h.trigger {
			c.broken(ruleTrigger, r.key, "attempt %d has the trigger %s, and was executed with %s", a.number, h.trigger, e.trigger)
		}
	}
}
