//go:build linux

package main

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// history makes facts in which nothing is wrong: a key of each kind, one failover that a
// long job ran through, and an attempt that failed and was followed by another.
type history struct {
	facts
	now time.Time
}

const me = "worker1-00000001"

func soundFacts() *history {
	h := &history{now: time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)}
	h.runs, h.attempts, h.effects = map[string]runRow{}, map[attemptID]attemptRow{}, map[string]map[int]int{}
	for n := range turns {
		kind, _ := keyNumber(n)
		key := keyText(n)
		attempt := 1
		if kind == flaky {
			h.execute(key, 1, "FAILED", time.Second)
			attempt = 2
		}
		h.execute(key, attempt, "SUCCEEDED", map[string]time.Duration{long: 40 * time.Second}[kind]+time.Second)
		h.note(note{What: seen, Key: key, Attempt: attempt})
		switch kind {
		case itemised:
			for item := 1; item <= itemCount; item++ {
				h.effect(key, item)
			}
			h.note(note{What: items, Key: key, Attempt: 1, First: 1, Last: itemCount})
		case sealed:
			h.effect(key, sealItem)
			h.effect(key, onceItem)
			h.note(note{What: items, Key: key, Attempt: 1, First: sealItem, Last: onceItem})
		}
	}
	start := h.first(started, keyOf(long)).At
	h.failovers = []failover{{How: serverAlone, At: start.Add(10 * time.Second), Back: start.Add(20 * time.Second), Whole: start.Add(30 * time.Second)}}
	h.note(note{What: tried, Number: len(turns)})
	return h
}

func (h *history) note(n note) {
	if n.Worker == "" {
		n.Worker = me
	}
	h.now = h.now.Add(time.Millisecond)
	n.At = h.now
	h.notes = append(h.notes, n)
}

func (h *history) execute(key string, attempt int, status string, took time.Duration) {
	h.note(note{What: started, Key: key, Attempt: attempt})
	h.now = h.now.Add(took)
	h.note(note{What: returned, Key: key, Attempt: attempt})
	h.note(note{What: outcome, Key: key, Attempt: attempt, Status: status})
	h.attempts[attemptID{key, attempt}] = attemptRow{me, status, "WORKER", false}
	h.runs[key] = runRow{status, attempt}
}

func (h *history) effect(key string, item int) {
	if h.effects[key] == nil {
		h.effects[key] = map[int]int{}
	}
	h.effects[key][item]++
}

// first is the first note of a key.
func (h *history) first(what, key string) *note {
	return &h.notes[slices.IndexFunc(h.notes, func(n note) bool { return n.What == what && n.Key == key })]
}

func keyOf(kind string) string { return keyText(slices.Index(turns, kind)) }

func TestNothingIsFoundWhereNothingIsWrong(t *testing.T) {
	h := soundFacts()
	found, n := judge(h.facts)
	if len(found) > 0 {
		t.Errorf("found %v", found)
	}
	want := figures{
		keys: 10, runs: 10, attempts: 11, effects: 3*itemCount + 2,
		claims: 11, outcomes: 11, answers: 10, items: 3*itemCount + 2, through: 1, open: map[string]int{},
	}
	if !reflect.DeepEqual(n, want) {
		t.Errorf("figures %+v, want %+v", n, want)
	}
}

// TestEachRuleCanBreak tampers with sound facts in one place and wants exactly the rules
// that this breaks.
func TestEachRuleCanBreak(t *testing.T) {
	key := keyOf(brief)
	one := attemptID{key, 1}
	tests := []struct {
		name   string
		tamper func(h *history)
		want   []rule
	}{
		{"the row of a claim is gone", func(h *history) {
			h.note(note{What: started, Key: key, Attempt: 2})
			h.note(note{What: returned, Key: key, Attempt: 2})
		}, []rule{claimKept}},
		{"the row of a claim is another worker's", func(h *history) {
			h.first(started, key).Worker = "worker2-00000002"
		}, []rule{claimKept, executed}},
		{"nobody has started the attempt", func(h *history) {
			h.first(started, key).What = "nothing"
		}, []rule{executed}},
		{"an attempt is started by two workers", func(h *history) {
			h.note(note{What: started, Key: key, Attempt: 1})
			h.note(note{What: returned, Key: key, Attempt: 1})
		}, []rule{startedOnce}},
		{"the second attempt is started before the first returned", func(h *history) {
			h.first(returned, keyOf(flaky)).At = h.now
		}, []rule{oneAtATime}},
		{"the second attempt is started though the first did not return", func(h *history) {
			h.first(returned, keyOf(flaky)).What = "nothing"
		}, []rule{oneAtATime}},
		{"the attempt has another outcome", func(h *history) {
			h.first(outcome, key).Status = "FAILED"
		}, []rule{outcomeKept}},
		{"the attempt is open", func(h *history) {
			h.attempts[one] = attemptRow{Worker: me}
		}, []rule{outcomeKept}},
		{"the attempt was ended by somebody else", func(h *history) {
			h.attempts[one] = attemptRow{me, "SUCCEEDED", "OUTSIDE", false}
		}, []rule{outcomeKept}},
		{"the outcome was another worker's", func(h *history) {
			h.first(outcome, key).Worker = "worker2-00000002"
		}, []rule{outcomeKept}},
		{"the run is not what its attempt is", func(h *history) {
			h.runs[key] = runRow{"RUNNING", 1}
		}, []rule{outcomeKept, answerKept, endsWell}},
		{"the run that was seen is another attempt's", func(h *history) {
			h.first(seen, keyOf(flaky)).Attempt = 1
		}, []rule{answerKept}},
		{"an item has no effect", func(h *history) {
			delete(h.effects[keyOf(itemised)], 7)
		}, []rule{itemKept, successFull}},
		{"what Complete wrote is gone", func(h *history) {
			delete(h.effects, keyOf(sealed))
		}, []rule{itemKept, successFull}},
		{"an item has its effect twice", func(h *history) {
			h.effect(keyOf(itemised), 7)
		}, []rule{effectOnce}},
		{"a run succeeded without an item that nobody was told of", func(h *history) {
			h.first(items, keyOf(itemised)).Last = itemCount - 1
			delete(h.effects[keyOf(itemised)], itemCount)
		}, []rule{successFull}},
		{"a key was tried and has no run", func(h *history) {
			h.note(note{What: tried, Number: len(turns) + 1})
		}, []rule{endsWell}},
		{"a long job fails of the failover", func(h *history) {
			key := keyOf(long)
			h.first(outcome, key).Status = "FAILED"
			h.attempts[attemptID{key, 1}] = attemptRow{me, "FAILED", "WORKER", false}
			h.first(seen, key).What = "nothing"
			h.execute(key, 2, "SUCCEEDED", time.Second)
		}, []rule{survived}},
		{"no job ran through the failover", func(h *history) {
			h.failovers[0].Back = h.now
		}, []rule{survived}},
	}
	broken := map[string]bool{}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := soundFacts()
			test.tamper(h)
			found, n := judge(h.facts)
			var got []string
			for _, v := range found {
				got = append(got, v.rule.name)
				broken[v.rule.name] = true
			}
			var want []string
			for _, r := range test.want {
				want = append(want, r.name)
			}
			if got = slices.Compact(got); !slices.Equal(got, want) {
				t.Errorf("broken: %q, want %q; found %v", got, want, found)
			}
			var out bytes.Buffer
			if verdict(&out, h.facts, found, n, false, 0) != len(found) {
				t.Error("a finding does not count as a violation")
			}
		})
	}
	for _, r := range rules {
		if !broken[r.name] {
			t.Errorf("no test breaks %q", r.name)
		}
	}
}

func TestAnOutcomeThatWasSaidNotToBeRecordedIsLeftToAPerson(t *testing.T) {
	h := soundFacts()
	key := keyOf(brief)
	h.first(outcome, key).What = unknown
	h.first(seen, key).What = "nothing"
	h.runs[key], h.attempts[attemptID{key, 1}] = runRow{"RUNNING", 1}, attemptRow{Worker: me}
	if found, n := judge(h.facts); len(found) > 0 || n.unknown != 1 || n.person != 1 {
		t.Errorf("found %v; %d unknown, %d for a person", found, n.unknown, n.person)
	}
	h.first(unknown, key).What = "nothing"
	if found, _ := judge(h.facts); len(found) != 1 || found[0].rule != endsWell {
		t.Errorf("a run that nobody knows of: found %v", found)
	}
}

func TestLossesAreOnlyCountedWithoutSynchronousReplication(t *testing.T) {
	h := soundFacts()
	key := keyOf(itemised)
	delete(h.runs, key)
	delete(h.attempts, attemptID{key, 1})
	delete(h.effects, key)
	found, n := judge(h.facts)
	var out bytes.Buffer
	if violations := verdict(&out, h.facts, found, n, true, 0); violations > 0 {
		t.Errorf("%d violations:\n%s", violations, out.String())
	}
	for _, want := range []string{"claims: acknowledged, lost | 11, 1 |", "outcomes: acknowledged, lost | 11, 1 |", "items: acknowledged, lost | 602, 200 |", "without a worker, FAILED | 1, 0, 0 |"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
	h.effect(keyOf(sealed), sealItem)
	found, n = judge(h.facts)
	if violations := verdict(&out, h.facts, found, n, true, 0); violations != 1 {
		t.Errorf("an effect that is there twice: %d violations", violations)
	}
}

func TestTheStoryOfAViolationIsPrinted(t *testing.T) {
	h := soundFacts()
	h.effect(keyOf(itemised), 7)
	found, n := judge(h.facts)
	var out bytes.Buffer
	verdict(&out, h.facts, found, n, false, 0)
	for _, want := range []string{`VIOLATION of "effect once": ` + keyOf(itemised), "started attempt 1 by " + me, "items attempt 1", "the row of attempt 1: SUCCEEDED", `the run: "SUCCEEDED"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("lacks %q:\n%s", want, out.String())
		}
	}
}
