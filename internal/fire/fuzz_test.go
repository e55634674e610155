package fire_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun/internal/fire"
)

// fuzzZones have clock changes of many kinds: none, by an hour, by half an hour,
// over midnight, and of a whole day.
var fuzzZones = []string{
	"UTC", "Asia/Seoul", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "America/Santiago", "America/Havana", "Asia/Beirut",
	"Pacific/Apia", "Asia/Kathmandu", "Africa/Casablanca", "America/Asuncion",
}

// A spec is refused and leaves nothing, or its entry fires at the times that cron
// itself finds: whole seconds that only grow, each of which the spec names, and,
// while no clock changes, every one of them. Every answer comes in time.
func FuzzSpec(f *testing.F) {
	for i, spec := range []string{
		"5 0 * * *", "*/15 9-17 * * 1-5", "0 0 29 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *", "@daily", "@every 90m", "@every 1ms", "@every -1h", "@every 2562047h",
		"TZ=UTC", "CRON_TZ=Asia/Seoul 5 0 * * *", "TZ=Asia/Seoul  0 0 1 1 ?", "TZ=../UTC 0 0 * * *", "CRON_TZ=Local 0 0 * * *", "TZ=", "",
		"0 0 * * SUN", "0 0 1 JAN *", "59 23 28-31 * MON", "0 0 13 * FRI", "*/7 */5 */3 */2 *", "30 2 * * *", "0 24 * * *", "60 * * * *", "5-1 * * * *",
		"*/0 * * * *", "*/9223372036854775807 * * * *", "18446744073709551616 * * * *", "0 0 0 * *", "- * * * *", "1,,2 * * * *", "0 0 * * 7", "@reboot",
		"\x00", "\xff * * * *", "５ 0 * * *", "0\t0\n* * *", "0 0 * * * *", "30 0 0 1 * *",
	} {
		f.Add(spec, uint8(i), int64(1_700_000_000+i*5_000_000), i%3 == 0)
	}
	zones := make([]*time.Location, len(fuzzZones))
	for i, name := range fuzzZones {
		zones[i] = zone(f, name)
	}
	f.Fuzz(func(t *testing.T, spec string, place uint8, unix int64, seconds bool) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			business := zones[int(place)%len(zones)]
			const from, span = -2_208_988_800, 6_311_433_600 // 1900 to 2100
			now := time.Unix(from+((unix%span)+span)%span, 0)
			judge(t, spec, business, now, seconds)
		}()
		select {
		case <-done:
		case <-time.After(patience):
			panic("no answer in time") // the goroutine cannot be stopped
		}
	})
}

func judge(t *testing.T, spec string, business *time.Location, now time.Time, seconds bool) {
	options := []cron.Option{cron.WithLocation(business)}
	parser := cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)
	if seconds {
		options = append(options, cron.WithSeconds())
		parser = cron.NewParser(cron.Second | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)
	}
	c := cron.New(options...)
	id, err := fire.Add(c, spec, now, func(time.Time) {})
	schedule, parsed := parse(parser, spec)
	if err != nil {
		if len(c.Entries()) != 0 || err.Error() == "" {
			t.Errorf("%q refused with %q and %d entries", spec, err, len(c.Entries()))
		}
		switch {
		case errors.Is(err, fire.ErrPanicked):
			if !strings.HasPrefix(spec, "TZ=") && !strings.HasPrefix(spec, "CRON_TZ=") {
				t.Errorf("%q: %v", spec, err)
			}
		case errors.Is(err, fire.ErrNever):
			if parsed != nil {
				t.Errorf("%q: %v, but cron: %v", spec, err, parsed)
			} else if next := schedule.Next(now.In(business)); !next.IsZero() && names(schedule.(*cron.SpecSchedule), next) {
				t.Errorf("%q: %v, but cron: %s", spec, err, next)
			}
		case parsed == nil:
			t.Errorf("%q: %v, but cron takes it", spec, err)
		}
		return
	}
	if parsed != nil || len(c.Entries()) != 1 {
		t.Fatalf("%q taken with %d entries, but cron: %v", spec, len(c.Entries()), parsed)
	}
	read, hasZone := fire.Zone(c, id)
	if _, ok := schedule.(*cron.SpecSchedule); ok != hasZone {
		t.Errorf("%q: zone %v", spec, read)
	}
	at := now
	spelled, _ := schedule.(*cron.SpecSchedule)
	for range 20 {
		next := fire.Next(c, id, at)
		want := schedule.Next(at.In(business))
		for n := 0; spelled != nil && n < 100 && !want.IsZero() && !names(spelled, want); n++ { // what cron makes of a skipped midnight
			want = schedule.Next(want)
		}
		if next.IsZero() {
			if !want.IsZero() && names(spelled, want) {
				t.Fatalf("%q after %s: no fire, cron: %s", spec, at, want)
			}
			break
		}
		if !next.Equal(want) || next.Location() != business || !next.After(at) || next.Nanosecond() != 0 {
			t.Fatalf("%q after %s: %s, cron: %s", spec, at, next, want)
		}
		if spelled != nil && !names(spelled, next) {
			t.Fatalf("%q after %s: %s is no time of it", spec, at, next)
		}
		if spelled != nil && !changes(read, at, next) {
			step, skipped := time.Minute, next.Truncate(time.Minute)
			if seconds {
				step, skipped = time.Second, next
			}
			for n := 0; n < 2000; n++ {
				if skipped = skipped.Add(-step); !skipped.After(at) {
					break
				}
				if names(spelled, skipped.In(business)) {
					t.Fatalf("%q after %s: %s, but %s was first", spec, at, next, skipped)
				}
			}
		}
		at = next
	}
}

// parse is the parser's answer, its panic an error too.
func parse(p cron.Parser, spec string) (s cron.Schedule, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = errors.New("panic")
		}
	}()
	return p.Parse(spec)
}

// changes reports whether a zone's clock changes between a day before from and a
// day after to.
func changes(zone *time.Location, from, to time.Time) bool {
	for t := from.AddDate(0, 0, -1); t.Before(to.AddDate(0, 0, 1)); {
		_, offset := t.In(zone).Zone()
		if offset%60 != 0 {
			return true // a local mean time, whose minutes are not those of the world
		}
		_, change := t.In(zone).ZoneBounds()
		if change.IsZero() {
			return false
		}
		if !change.After(to.AddDate(0, 0, 1)) {
			return true
		}
		t = change
	}
	return false
}

// names reports whether a spec names a time that is given in the zone of cron.
func names(s *cron.SpecSchedule, t time.Time) bool {
	if s.Location != time.Local {
		t = t.In(s.Location)
	}
	const star = 1 << 63
	for _, f := range []struct {
		field uint64
		value int
	}{{s.Second, t.Second()}, {s.Minute, t.Minute()}, {s.Hour, t.Hour()}, {s.Month, int(t.Month())}} {
		if f.field>>f.value&1 == 0 {
			return false
		}
	}
	day, weekday := s.Dom>>t.Day()&1 == 1, s.Dow>>int(t.Weekday())&1 == 1
	if s.Dom&star != 0 || s.Dow&star != 0 {
		return day && weekday
	}
	return day || weekday
}
