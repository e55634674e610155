package checker

import (
	"fmt"
	"strings"
	"time"
)

// who made a change, by the name of the session.
type who int

const (
	unknown who = iota
	worker
	operator
	outside // another program with plain SQL, or a hand: free to do anything
)

func whoIs(session string) who {
	switch session {
	case "operator":
		return operator
	case "neighbour", "psql":
		return outside
	}
	if number, ok := strings.CutPrefix(session, "w"); ok && number != "" && strings.Trim(number, "0123456789") == "" {
		return worker
	}
	return unknown
}

// grounds on which a claim was made.
type grounds int

const (
	noRow grounds = iota
	due
	approved
	none // there were none
)

// attempt is a claim by a worker, and what became of it.
type attempt struct {
	number  int
	token   string
	worker  string
	session string
	claim   *change
	grounds grounds
	repeats *attempt // the claim before of the same call, if its answer was lost and somebody ended it; nil: none
	granted bool     // it executes an approval: its own, or that of a claim before which was never started

	live  []span // when it held its run: more than one if a hand gave it back
	ends  map[who]bool
	end   *change // the latest one; nil: it is RUNNING
	never bool    // closed as never started

	left     bool // the library has changed the row that this attempt had left, so its history is closed
	byPerson bool // a person has marked it failed, also after something outside had taken it over
	execs    []*execution
	effects  []*effect
}

// span is a time in which an attempt held its run. A nil to has not come yet.
type span struct{ from, to *change }

// holds tells whether the row says that this attempt is RUNNING.
func (a *attempt) holds(r *row) bool {
	return r != nil && r.Status == "RUNNING" && a.made(r)
}

// made tells whether the row is of this attempt.
func (a *attempt) made(r *row) bool {
	return r.Attempt == a.number && r.Token == a.token && r.Worker == a.worker
}

// foreign tells whether the history has the attempt as another program's.
func (r *run) foreign(number int) bool {
	h := r.history[number]
	return h != nil && h.trigger == "" && r.byNumber[number] == nil
}

// renumbered tells whether the history has what the row says under this number
// and not under the row's own: another program leaves the number of the attempt
// that it found, or begins with 1.
func (r *run) renumbered(b *row, number int) bool {
	return b != nil && number > b.Attempt && r.foreign(number) && r.history[number].worker == b.Worker
}

// finished tells whether its own worker has recorded its end.
func (a *attempt) finished() bool {
	return a.end != nil && a.end.session == a.session && a.end.after != nil
}

// pending tells whether the row has an approval that still holds: nothing has
// become of the run since the person saw it.
func pending(r *row) bool {
	return !r.Approved.IsZero() && r.ApprovedN == r.Attempt && r.ApprovedAs == r.Status &&
		r.ApprovedBy == r.Worker && r.ApprovedEnd.Equal(r.Finished)
}

// walk is where the replay of one run's changes stands.
type walk struct {
	c *check
	r *run

	holder    *attempt  // that the row names as RUNNING
	lowest    int       // highest number that history must have
	highest   int       // highest number that history may have: outside rows are written there only when the library comes by
	executed  int       // attempts that count against MaxAttempts since the row was made
	succeeded *attempt  // SUCCEEDED by its worker, and no forced approval and no outside change since
	recorded  time.Time // the end that the library wrote last, as FAILED; zero: none or another
	again     bool      // the row says FAILED, to be tried again, and is as the library left it or another program's
	carry     bool      // the approval of a claim that was never started is still to be executed, whether or not the row has it again
}

// replay walks through the changes of a run's row and judges each by the row that
// it found.
func (c *check) replay(r *run) {
	if len(r.changes) == 0 {
		if r.now != nil {
			c.broken(ruleRecord, r.key, "there is a row, and no change has made it")
		}
		return
	}
	c.report.Counts.Keys++
	for _, a := range r.actions {
		for _, ch := range r.changes {
			if uint32(ch.xid) != a.xid {
				continue
			}
			if a.change != nil {
				a.moreChange = true
			}
			a.change = ch
		}
	}
	w := walk{c: c, r: r}
	var last *row
	for _, ch := range r.changes {
		c.judge(ruleRecord)
		if !same(ch.before, last) {
			c.broken(ruleRecord, r.key, "change %d found a row that the one before it has not left: %s, not %s", ch.seq, ch.before.brief(), last.brief())
		}
		w.step(ch)
		last = ch.after
	}
	if !same(r.now, last) {
		c.broken(ruleRecord, r.key, "the row is %s, and its last change has left %s", r.now.brief(), last.brief())
	}
}

func (w *walk) step(ch *change) {
	by := whoIs(ch.session)
	w.count(by, ch.session)
	var claimed *attempt
	carry := w.carry
	w.carry = false
	switch by {
	case worker:
		w.c.judge(ruleOther)
		switch {
		case ch.after == nil:
			w.c.broken(ruleOther, w.r.key, "change %d: %s deleted the row %s", ch.seq, ch.session, ch.before.brief())
		case ch.after.Status == "RUNNING" && (ch.before == nil || ch.before.Status != "RUNNING" || ch.before.Token != ch.after.Token):
			claimed = w.claim(ch, carry)
		case ch.before != nil && ch.before.Status == "RUNNING" && ended(ch.after.Status):
			w.finish(ch)
		case ch.before == nil && ch.after.Status == "SKIPPED": // not due by the calendar
			if ch.after.Attempt > w.highest {
				w.c.broken(ruleOther, w.r.key, "change %d: skipped as attempt %d, nothing was executed", ch.seq, ch.after.Attempt)
			}
		default:
			w.c.broken(ruleOther, w.r.key, "change %d: %s changed %s to %s", ch.seq, ch.session, ch.before.brief(), ch.after.brief())
		}
	case operator:
		w.person(ch)
	case outside:
		w.succeeded = nil
		if ch.after != nil && ch.after.Status == "SUCCEEDED" {
			w.r.closings = append(w.r.closings, ch.seq)
		}
	case unknown:
		w.c.judge(ruleOther)
		w.c.broken(ruleOther, w.r.key, "change %d: by %q, which is nobody", ch.seq, ch.session)
	}
	if n := ch.after; n != nil && ended(n.Status) && (by == worker || by == operator && (ch.before == nil || ch.before.Status != n.Status)) {
		if w.recorded = n.Finished; n.Status != "FAILED" {
			w.recorded = time.Time{}
		}
	}
	w.again = ch.after.again(w.recorded)
	ch.again = w.again
	w.settle(ch, by, claimed)
}

// again tells whether the row is to be tried again by itself, if the library wrote
// FAILED at this time: when somebody else has written another end over it,
// that is for a person to judge.
func (r *row) again(recorded time.Time) bool {
	return r != nil && r.Status == "FAILED" && !r.Next.IsZero() && (r.Token == "" || !recorded.IsZero() && r.Finished.Equal(recorded))
}

// settle notes what the change means for the attempts of the run.
func (w *walk) settle(ch *change, by who, claimed *attempt) {
	if ch.before == nil {
		w.executed = 0
	} else {
		if by == worker && claimed != nil || by == operator { // it writes and closes what is missing of the history
			w.lowest = max(w.lowest, ch.before.Attempt)
			w.r.visited = append(w.r.visited, ch.before.Attempt)
			if a := w.r.byNumber[ch.before.Attempt]; a != nil && a.token == ch.before.Token {
				a.left = true
				a.byPerson = a.byPerson || by == operator && ch.before.Status == "RUNNING"
			}
		}
		w.highest = max(w.highest, ch.before.Attempt)
	}
	if h := w.holder; h != nil && !h.holds(ch.after) {
		h.live[len(h.live)-1].to = ch
		h.end = ch
		h.ends[by] = true
		w.holder = nil
	}
	if claimed != nil {
		w.holder = claimed
		w.r.attempts = append(w.r.attempts, claimed)
		w.r.byNumber[claimed.number] = claimed
		w.lowest = max(w.lowest, claimed.number)
		if !claimed.granted {
			w.executed++ // unless it turns out that it was never started
		}
	} else if ch.after != nil && w.holder == nil {
		if a := w.r.byNumber[ch.after.Attempt]; a != nil && a.holds(ch.after) { // a hand gave the run back to it
			a.live = append(a.live, span{from: ch})
			a.end, a.never = nil, false
			w.holder = a
		}
	}
	if ch.after != nil {
		w.highest = max(w.highest, ch.after.Attempt)
	}
}

func (w *walk) count(by who, session string) {
	if by == worker {
		session = "worker" // all of them
	}
	w.c.report.Counts.Changes[session]++
}

func ended(status string) bool {
	return status == "SUCCEEDED" || status == "FAILED" || status == "SKIPPED"
}

// claim judges a change from anything else to RUNNING by a worker.
func (w *walk) claim(ch *change, carry bool) *attempt {
	c, key, b, n := w.c, w.r.key, ch.before, ch.after
	c.judge(ruleClaim)
	a := &attempt{
		number: n.Attempt, token: n.Token, worker: n.Worker, session: ch.session,
		claim: ch, live: []span{{from: ch}}, ends: map[who]bool{},
	}
	wrong := func(format string, args ...any) {
		c.broken(ruleClaim, key, "change %d, claim of attempt %d by %s: "+format, append([]any{ch.seq, n.Attempt, ch.session}, args...)...)
	}
	low := w.lowest
	switch {
	case b == nil:
		a.grounds = noRow
	case pending(b):
		a.grounds, a.granted = approved, true
		low = max(low, b.Attempt)
	case w.again && !ch.at.Before(b.Next):
		a.grounds, a.granted = due, carry
		low = max(low, b.Attempt)
	default:
		a.grounds = none
		wrong("the row was %s, which nobody may claim", b.brief())
	}
	if n.Attempt <= low {
		wrong("there was an attempt %d", low)
	}
	for skipped := max(low, w.highest) + 1; skipped < n.Attempt; skipped++ {
		if !w.r.foreign(skipped) { // what another program has made of the run may have got a number in the history alone
			wrong("there was no attempt %d", skipped)
			break
		}
	}
	if w.r.byNumber[n.Attempt] != nil {
		wrong("there was an attempt of this number")
	}
	if first := c.tokens[n.Token]; n.Token == "" || first != nil && !w.repeats(a, first) {
		wrong("its token %q is not a new one", n.Token)
	} else {
		a.repeats = first
	}
	c.tokens[n.Token] = a
	if !strings.HasPrefix(n.Worker, ch.session+"-") {
		wrong("it names the worker %s", n.Worker)
	}
	if !n.Approved.IsZero() || !n.Next.IsZero() || !n.Finished.IsZero() || n.Error != "" {
		wrong("something of before is left: %s", n.brief())
	}
	if n.Started.After(ch.at) {
		wrong("started at %s, later than its claim", n.Started)
	}
	if b != nil {
		if !b.Pruned.IsZero() {
			wrong("the history of this run was pruned")
		}
		if b.Date != "" && n.Date != b.Date || !b.ScheduledFor.IsZero() && n.ScheduledFor != b.ScheduledFor {
			wrong("date or slot became %s %s, was %s %s", n.Date, n.ScheduledFor, b.Date, b.ScheduledFor)
		}
		if n.Started.Before(b.Started) {
			wrong("started before the attempt before it")
		}
	}
	return a
}

// repeats tells whether a claim may be the repeat of one whose answer was lost: of the
// same run by the same worker, which somebody else had ended before. That the first
// one was not executed is judged with the executions.
func (w *walk) repeats(a, first *attempt) bool {
	return w.r.byNumber[first.number] == first && first.worker == a.worker && first.session == a.session &&
		first.end != nil && !first.ends[worker]
}

// neverStarted is how the end of a claim reads whose job was not called. Jobs of a
// torture run do not return this text themselves.
const neverStarted = "never started"

// finish judges a change from RUNNING to an end by a worker.
func (w *walk) finish(ch *change) {
	c, key, b, n := w.c, w.r.key, ch.before, ch.after
	c.judge(ruleEnd)
	wrong := func(format string, args ...any) {
		c.broken(ruleEnd, key, "change %d, %s by %s: "+format, append([]any{ch.seq, n.Status, ch.session}, args...)...)
	}
	a := w.holder
	if a == nil {
		wrong("no worker's attempt held the run, which was %s", b.brief())
		return
	}
	if a.session != ch.session {
		wrong("attempt %d was claimed by %s", a.number, a.session)
	}
	if !a.made(n) {
		wrong("the row names another attempt: %s", n.brief())
	}
	if n.Finished.IsZero() || n.Finished.Before(n.Started) || n.Started != b.Started {
		wrong("from %s to %s, started at %s", n.Started, n.Finished, b.Started)
	}
	if n.Status != "FAILED" && !n.Next.IsZero() {
		wrong("and yet due again at %s", n.Next)
	}
	a.never = n.Status == "FAILED" && strings.Contains(n.Error, neverStarted)
	if back := a.never && a.granted; pending(n) && !back { // what was not executed may be given back
		wrong("and approves a re-run")
	}
	switch {
	case a.never:
		c.judge(ruleNever)
		if n.Next.IsZero() || n.Next.After(ch.at) {
			c.broken(ruleNever, key, "attempt %d is not due at once: %s", a.number, n.brief())
		}
		w.carry = a.granted
		if !a.granted {
			w.executed--
		}
	case a.granted:
		c.judge(ruleApproval)
		if !n.Next.IsZero() {
			c.broken(ruleApproval, key, "attempt %d executed an approval, and is to be tried again at %s", a.number, n.Next)
		}
	case n.Status == "FAILED":
		c.judge(ruleLimit)
		if !n.Next.IsZero() && w.executed >= w.r.job.maxAttempts {
			c.broken(ruleLimit, key, "attempt %d was execution %d of at most %d, and is to be tried again at %s", a.number, w.executed, w.r.job.maxAttempts, n.Next)
		}
		if n.Next.IsZero() && w.executed < w.r.job.maxAttempts { // the jobs of a torture run return no Permanent
			c.broken(ruleLimit, key, "attempt %d was execution %d of at most %d, and is not to be tried again", a.number, w.executed, w.r.job.maxAttempts)
		}
	}
	if n.Status == "SUCCEEDED" {
		c.judge(ruleSuccess)
		if w.succeeded != nil {
			c.broken(ruleSuccess, key, "attempt %d SUCCEEDED after attempt %d had, and nobody forced it", a.number, w.succeeded.number)
		}
		w.succeeded = a
		w.r.successes = append(w.r.successes, ch.seq)
	}
}

// person judges a change by a person who uses the library.
func (w *walk) person(ch *change) {
	c, key, b, n := w.c, w.r.key, ch.before, ch.after
	c.judge(rulePeople)
	wrong := func(format string, args ...any) {
		c.broken(rulePeople, key, "change %d, %s to %s: "+format, append([]any{ch.seq, b.brief(), n.brief()}, args...)...)
	}
	var act *action
	for _, a := range w.r.actions {
		if a.change != ch {
			continue
		}
		if act != nil {
			wrong("two actions, %d and %d", act.id, a.id)
		}
		act = a
	}
	if act == nil {
		wrong("no action that is its own")
		return
	}
	seen, status := 0, ""
	if b != nil {
		seen, status = b.Attempt, b.Status
	}
	if act.attempt != seen && !w.r.renumbered(b, act.attempt) || act.previous != status {
		wrong("action %d names attempt %d, %q", act.id, act.attempt, act.previous)
	}
	if n == nil {
		wrong("no action deletes a row")
		return
	}
	if b != nil && (n.Attempt != b.Attempt || n.Token != b.Token || n.Worker != b.Worker && act.action != "SKIP" || n.Started != b.Started && act.action != "SKIP") {
		wrong("%s makes another attempt of it", act.action)
	}
	switch act.action {
	case "MARK_FAILED":
		switch {
		case b == nil || b.Status != "RUNNING" || n.Status != "FAILED":
			wrong("MARK_FAILED is from RUNNING to FAILED")
		case !act.forced && !ch.silent:
			wrong("MARK_FAILED of an attempt that was alive, without force")
		case !n.Next.IsZero():
			wrong("MARK_FAILED, and to be tried again at %s", n.Next)
		case n.Finished.IsZero() || n.Finished.Before(n.Started):
			wrong("MARK_FAILED, from %s to %s", n.Started, n.Finished)
		}
	case "APPROVE_RERUN":
		ended := b != nil && (b.Status == "FAILED" || b.Status == "SKIPPED" || b.Status == "SUCCEEDED" && act.forced)
		switch {
		case !ended || b.Status != n.Status:
			wrong("APPROVE_RERUN (forced: %t) of such a run", act.forced)
		case pending(b):
			wrong("APPROVE_RERUN, and one was pending")
		case !b.Pruned.IsZero():
			wrong("APPROVE_RERUN, and its history was pruned")
		case !pending(n):
			wrong("APPROVE_RERUN, and none is pending")
		}
		if act.forced {
			w.succeeded = nil
		}
		if act.reset {
			w.r.resets = append(w.r.resets, ch.seq)
		}
	case "SKIP":
		switch {
		case b != nil && b.Status != "FAILED" || n.Status != "SKIPPED":
			wrong("SKIP is from FAILED or no row to SKIPPED")
		case b != nil && pending(b):
			wrong("SKIP, and an approval was pending")
		case b == nil && n.Attempt > w.highest:
			wrong("SKIP as attempt %d, nothing was executed", n.Attempt)
		}
	default:
		wrong("unknown action %q", act.action)
	}
}

// brief is the row in a few words.
func (r *row) brief() string {
	if r == nil {
		return "(no row)"
	}
	var b strings.Builder
	b.WriteString(r.Status)
	fmt.Fprintf(&b, " attempt %d of %s", r.Attempt, r.Worker)
	if r.Token == "" {
		b.WriteString(" without token")
	}
	if !r.Next.IsZero() {
		b.WriteString(" due " + clock(r.Next))
	}
	if !r.Approved.IsZero() {
		b.WriteString(" approved " + clock(r.Approved))
		if !pending(r) {
			b.WriteString(" (void)")
		}
	}
	return b.String()
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05.000000") }
