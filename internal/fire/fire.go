// Package fire adds functions to a robfig/cron scheduler that are told the nominal
// time of each fire, and guards against what its v3.0.1 does with odd specs.
package fire

import (
	"errors"
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
)

// Errors of Add about specs that the parser does not refuse by itself.
var (
	ErrPanicked = errors.New("the parser of cron specs panicked: a zone without fields?")
	ErrNever    = errors.New("it does not fire within 5 years")
)

// Add adds fn to c. It is called with the nominal time of the fire, or the zero
// time when the entry is started by hand before its first fire. A fire at a time
// that the spec does not name is left out.
func Add(c *cron.Cron, spec string, now time.Time, fn func(nominal time.Time)) (id cron.EntryID, err error) {
	added := make(chan struct{}) // c may be running: the entry can fire before its ID is known
	id, err = add(c, spec, func() {
		<-added
		if e := c.Entry(id); e.Prev.IsZero() || named(e.Schedule, e.Prev) {
			fn(e.Prev)
		}
	})
	close(added)
	if err == nil && Next(c, id, now).IsZero() {
		c.Remove(id)
		err = ErrNever
	}
	return id, err
}

// add is c.AddFunc without its panic: "TZ=UTC" indexes past the spec's end.
func add(c *cron.Cron, spec string, fn func()) (id cron.EntryID, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%w (%v)", ErrPanicked, v)
		}
	}()
	return c.AddFunc(spec, fn)
}

// Next is the first fire of an entry after t, in the zone of c; zero: none.
func Next(c *cron.Cron, id cron.EntryID, t time.Time) time.Time {
	schedule := c.Entry(id).Schedule
	t = t.In(c.Location())
	for range 100 { // two do for every real zone
		if t = schedule.Next(t); t.IsZero() || named(schedule, t) {
			return t
		}
	}
	return time.Time{}
}

// named reports whether the spec of a schedule names a time. Where a clock change
// skips midnight, cron goes over into the next day without looking whether the
// spec names that day: in Santiago, "0 22 * * 6" fires on a Sunday of September too.
func named(schedule cron.Schedule, t time.Time) bool {
	spec, ok := schedule.(*cron.SpecSchedule)
	if !ok {
		return true // an interval
	}
	if spec.Location != time.Local { // which stands for the zone of c, and t's
		t = t.In(spec.Location)
	}
	const star = 1 << 63 // cron's mark of a field that is not restricted
	has := func(field uint64, value int) bool { return field&(1<<value) != 0 }
	day, weekday := has(spec.Dom, t.Day()), has(spec.Dow, int(t.Weekday()))
	today := day && weekday
	if (spec.Dom|spec.Dow)&star == 0 {
		today = day || weekday
	}
	return today && has(spec.Month, int(t.Month())) && has(spec.Hour, t.Hour()) && has(spec.Minute, t.Minute()) && has(spec.Second, t.Second())
}

// Zone is the zone in which an entry's spec is read; ok is false for @every,
// which has none.
func Zone(c *cron.Cron, id cron.EntryID) (zone *time.Location, ok bool) {
	spec, ok := c.Entry(id).Schedule.(*cron.SpecSchedule)
	if !ok {
		return nil, false
	}
	if spec.Location == time.Local { // stands for the zone of c
		return c.Location(), true
	}
	return spec.Location, true // CRON_TZ=
}

// SameClock reports whether two zones, whatever their names, show the same time
// for 5 years from a moment on.
func SameClock(a, b *time.Location, from time.Time) bool {
	for t, end := from, from.AddDate(5, 0, 0); t.Before(end); {
		_, offset := t.In(a).Zone()
		if _, other := t.In(b).Zone(); other != offset {
			return false
		}
		next := end
		for _, zone := range []*time.Location{a, b} {
			if _, change := t.In(zone).ZoneBounds(); change.After(t) && change.Before(next) {
				next = change
			}
		}
		t = next
	}
	return true
}
