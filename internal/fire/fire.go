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
// time when the entry is started by hand before its first fire.
func Add(c *cron.Cron, spec string, now time.Time, fn func(nominal time.Time)) (id cron.EntryID, err error) {
	added := make(chan struct{}) // c may be running: the entry can fire before its ID is known
	id, err = add(c, spec, func() {
		<-added
		fn(c.Entry(id).Prev)
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
	return c.Entry(id).Schedule.Next(t.In(c.Location()))
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
