//go:build linux

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// rule is a promise that is judged.
type rule struct {
	name, what string
	// sync: kept only because what is acknowledged is on two nodes. Without that its
	// violations are losses, which are counted. The other rules hold in any case: a
	// commit that is lost is lost as a whole, with all that came after it.
	sync bool
}

var (
	claimKept   = rule{"claim", "an acknowledged claim has the row of its attempt", true}
	startedOnce = rule{"one execution", "no attempt of a key was started twice", true}
	executed    = rule{"executed", "an attempt that a worker ended was started by it", false}
	oneAtATime  = rule{"one at a time", "no two attempts of a key ran at the same time", true}
	outcomeKept = rule{"outcome", "an acknowledged outcome is in the tables as it was told", true}
	answerKept  = rule{"answer", "a run that was said to be SUCCEEDED is", true}
	itemKept    = rule{"item", "an acknowledged item has its effect", true}
	effectOnce  = rule{"effect once", "no item has its effect twice", false}
	successFull = rule{"whole", "a run that is SUCCEEDED has all its effects", false}
	endsWell    = rule{"end", "every key that was tried ends SUCCEEDED, unless a call said that it could not record it", true}
	survived    = rule{"survival", "a long job that a failover meets does not fail of it", true}

	rules = []rule{claimKept, startedOnce, executed, oneAtATime, outcomeKept, answerKept, itemKept, effectOnce, successFull, endsWell, survived}
)

// finding is a rule that was broken for a key.
type finding struct {
	rule rule
	key  string
	what string
}

// figures are how much there was to judge.
type figures struct {
	keys, runs, attempts, effects       int
	claims, outcomes, answers, items    int            // acknowledged
	unknown, person                     int            // outcomes that a call said it could not record, and runs that so wait for a person
	through                             int            // attempts that ran through a failover and SUCCEEDED
	interrupted                         int            // attempts that were running at a kill and FAILED
	lostClaims, lostOutcomes, lostItems int            // of those acknowledged
	lostAnswers, doubleStarts, overlaps int            // what follows from them
	open                                map[string]int // keys that did not end SUCCEEDED, by status
}

// execution is the time in which an attempt's function ran.
type execution struct {
	attempt    int
	from, till time.Time // till is zero: it has not returned
}

// judge holds what the workers were told against the tables.
func judge(f facts) (found []finding, n figures) {
	say := func(r rule, key, format string, args ...any) {
		found = append(found, finding{r, key, fmt.Sprintf(format, args...)})
	}
	n.open = map[string]int{}
	n.runs, n.attempts = len(f.runs), len(f.attempts)
	executions := map[string][]execution{}
	startedBy := map[attemptID]map[string]bool{}
	acknowledged := map[string]map[int]bool{} // items by key
	undecided := map[attemptID]bool{}         // which a person has been told of
	for _, note := range f.notes {
		id := attemptID{note.Key, note.Attempt}
		row, exists := f.attempts[id]
		switch note.What {
		case started:
			n.claims++
			if !exists || row.Worker != note.Worker {
				n.lostClaims++
				say(claimKept, note.Key, "attempt %d was started by %s; its row: %s", note.Attempt, note.Worker, describe(row, exists))
			}
			if startedBy[id] == nil {
				startedBy[id] = map[string]bool{}
			}
			startedBy[id][note.Worker] = true
			executions[note.Key] = append(executions[note.Key], execution{attempt: note.Attempt, from: note.At})
		case returned:
			end(executions[note.Key], note)
		case outcome:
			n.outcomes++
			run := f.runs[note.Key]
			if !exists || row.Outcome != note.Status || row.EndedBy != "WORKER" || row.Worker != note.Worker || run.Attempt == note.Attempt && run.Status != note.Status {
				n.lostOutcomes++
				say(outcomeKept, note.Key, "attempt %d was told to be recorded %s; its row: %s; the run: %q", note.Attempt, note.Status, describe(row, exists), run.Status)
			}
		case seen:
			n.answers++
			if run := f.runs[note.Key]; run.Status != "SUCCEEDED" || run.Attempt != note.Attempt {
				n.lostAnswers++
				say(answerKept, note.Key, "it was said to be SUCCEEDED in attempt %d; the run: %q in attempt %d", note.Attempt, run.Status, run.Attempt)
			}
		case unknown:
			n.unknown++
			undecided[id] = true
		case items:
			if acknowledged[note.Key] == nil {
				acknowledged[note.Key] = map[int]bool{}
			}
			for item := note.First; item <= note.Last; item++ {
				acknowledged[note.Key][item] = true
			}
		case tried:
			n.keys = max(n.keys, note.Number)
		}
	}
	for key, all := range executions {
		starts, overlaps := together(all)
		n.doubleStarts, n.overlaps = n.doubleStarts+len(starts), n.overlaps+len(overlaps)
		for _, what := range starts {
			say(startedOnce, key, "%s", what)
		}
		for _, what := range overlaps {
			say(oneAtATime, key, "%s", what)
		}
		for _, e := range all {
			through, hit, tooLong := e.meets(f.failovers)
			switch f.attempts[attemptID{key, e.attempt}].Outcome {
			case "SUCCEEDED":
				n.through += through
			case "FAILED":
				n.interrupted += hit
				if kind := kindOf(key); hit > 0 && !tooLong && (kind == long || kind == sealed) {
					say(survived, key, "attempt %d ended FAILED", e.attempt)
				}
			}
		}
	}
	for id, row := range f.attempts {
		if row.EndedBy == "WORKER" && !row.NeverStarted && !startedBy[id][row.Worker] {
			say(executed, id.Key, "attempt %d was not started by %s; its row: %s", id.Attempt, row.Worker, describe(row, true))
		}
	}
	for key, all := range acknowledged {
		n.items += len(all)
		lost := 0
		for item := range all {
			if f.effects[key][item] == 0 {
				lost++
			}
		}
		if n.lostItems += lost; lost > 0 {
			say(itemKept, key, "%d items were told to be done and have no effect", lost)
		}
	}
	for key, all := range f.effects {
		for item, count := range all {
			if n.effects += count; count > 1 {
				say(effectOnce, key, "item %d has its effect %d times", item, count)
			}
		}
	}
	for number := range n.keys {
		key := keyText(number)
		kind, _ := keyNumber(number)
		status := f.runs[key].Status
		if status == "RUNNING" && undecided[attemptID{key, f.runs[key].Attempt}] {
			n.person++
			continue
		}
		if status != "SUCCEEDED" {
			n.open[status]++
			say(endsWell, key, "it is %q", status)
			continue
		}
		want := map[string]int{itemised: itemCount, sealed: 2}[kind]
		if got := len(f.effects[key]); got != want {
			say(successFull, key, "it is SUCCEEDED with %d of %d effects", got, want)
		}
	}
	if n.through == 0 && len(f.failovers) > 0 {
		say(survived, "", "no job ran through any of %d failovers", len(f.failovers))
	}
	slices.SortFunc(found, func(a, b finding) int { // the rules by their order, then the keys
		return cmp.Or(cmp.Compare(place(a.rule), place(b.rule)), cmp.Compare(a.key, b.key), cmp.Compare(a.what, b.what))
	})
	return found, n
}

func place(r rule) int { return slices.Index(rules, r) }

func describe(row attemptRow, exists bool) string {
	if !exists {
		return "none"
	}
	return strings.TrimSpace(fmt.Sprintf("%s by %s, ended by %s", cmp.Or(row.Outcome, "open"), row.Worker, cmp.Or(row.EndedBy, "nobody")))
}

// end notes the end of the latest execution of an attempt.
func end(all []execution, n note) {
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].attempt == n.Attempt && all[i].till.IsZero() {
			all[i].till = n.At
			return
		}
	}
}

// together tells which attempts of a key were started twice, and which ran at the same time.
func together(all []execution) (starts, overlaps []string) {
	slices.SortFunc(all, func(a, b execution) int { return a.from.Compare(b.from) })
	times := map[int]int{}
	for i, e := range all {
		if times[e.attempt]++; times[e.attempt] == 2 {
			starts = append(starts, fmt.Sprintf("attempt %d was started more than once", e.attempt))
		}
		if i == 0 {
			continue
		}
		if before := all[i-1]; before.till.IsZero() || e.from.Before(before.till) {
			overlaps = append(overlaps, fmt.Sprintf("attempt %d was started at %s, attempt %d returned at %s", e.attempt, clock(e.from), before.attempt, clock(before.till)))
		}
	}
	return starts, overlaps
}

// meets tells whether the execution ran through a failover from before the kill until
// a write succeeded again, whether it was running at a kill, and whether that was longer
// than results are tried for, replication having stopped before.
func (e execution) meets(all []failover) (through, hit int, long bool) {
	for _, f := range all {
		if e.from.Before(f.At) && e.till.After(f.At) {
			long = long || f.Back.Sub(f.At)+f.Lag > databaseTimeout
			if hit = 1; e.till.After(f.Back) {
				through = 1
			}
		}
	}
	return through, hit, long
}

func clock(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format("15:04:05.000")
}
