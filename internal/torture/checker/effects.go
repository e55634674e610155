package checker

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// effects judges each effect by the attempt that it names.
func (c *check) effects(r *run) {
	for _, e := range r.effects {
		c.judge(ruleOwner)
		a := r.byNumber[e.attempt]
		if a == nil {
			c.broken(ruleOwner, r.key, "%s is of attempt %d, which nobody had claimed", e.item, e.attempt)
			continue
		}
		a.effects = append(a.effects, e)
		switch {
		case e.session != a.session:
			c.broken(ruleOwner, r.key, "%s of attempt %d is by %s, and the attempt is %s's", e.item, a.number, e.session, a.session)
		case len(a.execs) == 0 && !a.never:
			c.broken(ruleOwner, r.key, "%s is of attempt %d, which was not executed", e.item, a.number)
		case e.way != r.job.way || r.job.way == "plain":
			c.broken(ruleOwner, r.key, "%s of attempt %d is by %q, and the job's way is %q", e.item, a.number, e.way, r.job.way)
		}
		if a.never {
			c.broken(ruleNever, r.key, "attempt %d has the effect %s", a.number, e.item)
		}
		c.judge(ruleLate)
		if !slices.ContainsFunc(a.live, func(s span) bool {
			return !earlier(e.committed, s.from.committed) && (s.to == nil || !earlier(s.to.committed, e.committed))
		}) {
			ended := "is RUNNING"
			if a.end != nil {
				ended = fmt.Sprintf("was ended by %s at %s", a.end.session, clock(a.end.committed))
			}
			c.broken(ruleLate, r.key, "%s of attempt %d was committed at %s; the attempt was claimed at %s and %s",
				e.item, a.number, clock(e.committed), clock(a.claim.committed), ended)
		}
	}
	for _, a := range r.attempts {
		if a.end == nil || a.end.isolation != "read committed" || r.byNumber[a.number] != a {
			continue // under the other levels, the one who ended it could not see all
		}
		c.judge(ruleCounted)
		if int64(len(a.effects)) != a.end.effects {
			c.broken(ruleCounted, r.key, "attempt %d has %d effects, and had %d when %s ended it", a.number, len(a.effects), a.end.effects, a.end.session)
		}
	}
}

// earlier compares the times of commits. What has none is not committed yet.
func earlier(t, u time.Time) bool {
	if t.IsZero() {
		return false
	}
	return u.IsZero() || t.Before(u)
}

// items judges which items took effect, and how often.
func (c *check) items(r *run) {
	switch r.job.way {
	case "each", "once":
		c.once(r, ruleOnce, r.resets)
		c.complete(r, r.resets)
		c.ledger(r)
	case "tx":
		// Something outside may have made it SUCCEEDED and something else of it
		// before the library came by: the checkpoint is void then, or still good.
		c.once(r, ruleCheckpoint, slices.Concat(r.resets, r.successes, r.closings))
		c.complete(r, slices.Concat(r.resets, r.successes))
	case "fence":
		var every []int64 // nothing of an attempt before counts
		for _, a := range r.attempts {
			every = append(every, a.claim.seq)
		}
		c.complete(r, every)
	case "complete":
		c.commit(r)
	}
}

// epoch is how many of the changes came before the attempt was claimed.
func epoch(a *attempt, changes []int64) (n int) {
	for _, seq := range changes {
		if seq < a.claim.seq {
			n++
		}
	}
	return n
}

func (c *check) once(r *run, rule string, ends []int64) {
	type in struct {
		epoch int
		item  string
	}
	first := map[in]*attempt{}
	for _, a := range r.attempts {
		n := epoch(a, ends)
		for _, e := range a.effects {
			c.judge(rule)
			number, err := strconv.Atoi(strings.TrimPrefix(e.item, "item-"))
			if err != nil || number < 1 || number > r.job.items || e.item != "item-"+strconv.Itoa(number) {
				c.broken(rule, r.key, "attempt %d did %q, and there are %d items", a.number, e.item, r.job.items)
			}
			if b := first[in{n, e.item}]; b != nil {
				c.broken(rule, r.key, "attempt %d did %s, which attempt %d had done", a.number, e.item, b.number)
			} else {
				first[in{n, e.item}] = a
			}
		}
	}
}

func (c *check) complete(r *run, ends []int64) {
	for i, a := range r.attempts {
		if !a.finished() || a.end.after.Status != "SUCCEEDED" {
			continue
		}
		c.judge(ruleComplete)
		done := map[string]bool{}
		for _, b := range r.attempts[:i+1] {
			if epoch(a, ends) != epoch(b, ends) {
				continue
			}
			for _, e := range b.effects {
				if !earlier(a.end.committed, e.committed) {
					done[e.item] = true
				}
			}
		}
		var missing []string
		for n := range r.job.items {
			if name := "item-" + strconv.Itoa(n+1); !done[name] {
				missing = append(missing, name)
			}
		}
		if missing != nil {
			c.broken(ruleComplete, r.key, "attempt %d SUCCEEDED without %d of %d items: %s", a.number, len(missing), r.job.items, strings.Join(missing[:min(len(missing), 5)], ", "))
		}
	}
}

func (c *check) ledger(r *run) {
	entered := map[string]int{} // the attempt; ledgers have no item twice
	for _, i := range r.ledger {
		entered[i.name] = i.attempt
	}
	done := map[item]bool{}
	for _, a := range r.attempts {
		if epoch(a, r.resets) < len(r.resets) {
			continue
		}
		for _, e := range a.effects {
			c.judge(ruleLedger)
			done[item{e.item, a.number}] = true
			if n, ok := entered[e.item]; !ok || n != a.number {
				c.broken(ruleLedger, r.key, "%s took effect in attempt %d, and the ledger names %d", e.item, a.number, n)
			}
		}
	}
	for _, i := range r.ledger {
		if !done[i] {
			c.broken(ruleLedger, r.key, "the ledger has %s of attempt %d, which took no effect", i.name, i.attempt)
		}
	}
}

func (c *check) commit(r *run) {
	for _, a := range r.attempts {
		succeeded := a.finished() && a.end.after.Status == "SUCCEEDED"
		together := 0
		for _, e := range a.effects {
			c.judge(ruleCommit)
			switch {
			case !succeeded || e.xid != a.end.xid:
				c.broken(ruleCommit, r.key, "attempt %d has an effect in transaction %d, which did not make it SUCCEEDED", a.number, e.xid)
			case e.item != "all":
				c.broken(ruleCommit, r.key, "attempt %d has an effect %q", a.number, e.item)
			default:
				together++
			}
		}
		if succeeded && together != 1 {
			c.broken(ruleCommit, r.key, "attempt %d SUCCEEDED with %d effects in its commit", a.number, together)
		}
	}
}
