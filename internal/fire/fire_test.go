package fire_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/robfig/cron/v3"

	"github.com/seed-ccb5b62c/jobrun/internal/fire"
)

const patience = 20 * time.Second

func zone(t testing.TB, name string) *time.Location {
	t.Helper()
	z, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// once is a parser that makes cron fire at once, for a nominal time that is past,
// and after that in a day.
type once struct {
	nominal time.Time
	fired   bool
}

func (o *once) Parse(string) (cron.Schedule, error) { return o, nil }

func (o *once) Next(t time.Time) time.Time {
	if time.Since(t).Abs() < time.Hour && !o.fired { // cron asks; Add's question below is about another year
		o.fired = true
		return o.nominal
	}
	return t.Add(24 * time.Hour)
}

var elsewhen = time.Date(2024, time.June, 1, 0, 0, 0, 0, time.UTC)

func TestRealFireTellsItsNominalTime(t *testing.T) {
	t.Parallel()
	c := cron.New(cron.WithLocation(zone(t, "Asia/Seoul")))
	type told struct{ nominal, at time.Time }
	fires := make(chan told, 10)
	c.Start() // the entry is added to a cron that runs
	id, err := fire.Add(c, "@every 1s", time.Now(), func(nominal time.Time) { fires <- told{nominal, time.Now()} })
	if err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-fires:
		if f.nominal.Nanosecond() != 0 || f.nominal.After(f.at) || !f.nominal.Equal(c.Entry(id).Prev) || f.nominal.Location().String() != "Asia/Seoul" {
			t.Errorf("told %s at %s, entry %+v", f.nominal, f.at, c.Entry(id))
		}
	case <-time.After(patience):
		t.Fatal("no fire")
	}
	<-c.Stop().Done()
}

func TestLateStartKeepsTheNominalTime(t *testing.T) {
	t.Parallel()
	nominal := time.Date(2024, time.December, 31, 14, 59, 0, 0, time.UTC)
	let := make(chan struct{})
	held := make(chan struct{})
	c := cron.New(cron.WithParser(&once{nominal: nominal}), cron.WithChain(func(j cron.Job) cron.Job {
		return cron.FuncJob(func() { close(held); <-let; j.Run() })
	}))
	told := make(chan time.Time, 1)
	if _, err := fire.Add(c, "", elsewhen, func(nominal time.Time) { told <- nominal }); err != nil {
		t.Fatal(err)
	}
	c.Start()
	select {
	case <-held:
	case <-time.After(patience):
		t.Fatal("no fire")
	}
	stopped := c.Stop() // not even a cron that has stopped meanwhile changes it
	close(let)
	if got := <-told; !got.Equal(nominal) {
		t.Errorf("told %s, want %s", got, nominal)
	}
	<-stopped.Done()
}

func TestFireByHandHasNoNominalTimeBeforeTheFirst(t *testing.T) {
	t.Parallel()
	c := cron.New()
	var told []time.Time
	id, err := fire.Add(c, "0 0 * * *", time.Now(), func(nominal time.Time) { told = append(told, nominal) })
	if err != nil {
		t.Fatal(err)
	}
	c.Entry(id).Job.Run()
	c.Entry(id).WrappedJob.Run()
	if len(told) != 2 || !told[0].IsZero() || !told[1].IsZero() {
		t.Errorf("told %v", told)
	}
}

func TestRefusedSpecLeavesNoEntry(t *testing.T) {
	t.Parallel()
	berlin := zone(t, "Europe/Berlin")
	now := time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)
	for _, bad := range []struct {
		spec string
		now  time.Time
		want error // nil: any
	}{
		{"TZ=UTC", now, fire.ErrPanicked},
		{"CRON_TZ=Asia/Seoul", now, fire.ErrPanicked},
		{"TZ=0", now, fire.ErrPanicked},
		{"TZ=", now, fire.ErrPanicked},
		{"", now, nil},
		{" ", now, nil},
		{"CRON_TZ=Asia/Soul 0 0 * * *", now, nil},
		{"* * *", now, nil},
		{"61 0 * * *", now, nil},
		{"@sometimes", now, nil},
		{"@every soon", now, nil},
		{"0 0 30 2 *", now, fire.ErrNever},
		{"0 0 31 4,6,9,11 *", now, fire.ErrNever},
		{"0 0 29 2 *", time.Date(2096, time.March, 1, 0, 0, 0, 0, time.UTC), fire.ErrNever}, // 2100 is no leap year
	} {
		for _, running := range []bool{false, true} {
			t.Run(fmt.Sprintf("%q/running=%t", bad.spec, running), func(t *testing.T) {
				t.Parallel()
				c := cron.New(cron.WithLocation(berlin))
				if running {
					c.Start()
					defer c.Stop()
				}
				_, err := fire.Add(c, bad.spec, bad.now, func(time.Time) { t.Error("fired") })
				if err == nil || bad.want != nil && !errors.Is(err, bad.want) {
					t.Errorf("got %v, want %v", err, bad.want)
				}
				if n := len(c.Entries()); n != 0 {
					t.Errorf("%d entries", n)
				}
				// The cron is as good as before.
				id, err := fire.Add(c, "CRON_TZ=Asia/Seoul 5 0 * * *", bad.now, func(time.Time) {})
				if err != nil || len(c.Entries()) != 1 || !c.Entry(id).Valid() {
					t.Errorf("after that: %v, %v", c.Entries(), err)
				}
			})
		}
	}
}

// Where a clock change skips midnight, cron finds times on the day after the one
// that the spec names.
func TestFiresAreOnlyTimesThatTheSpecNames(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ zone, spec, from, next, after string }{
		{"America/Santiago", "0 22 * * 6", "2026-09-05T21:00:00-04:00", "2026-09-05T22:00:00-04:00", "2026-09-12T22:00:00-03:00"}, // never on Sunday 2026-09-06
		{"America/Havana", "0 22 7 3 *", "2026-03-07T23:30:00-05:00", "2027-03-07T22:00:00-05:00", "2028-03-07T22:00:00-05:00"},
		{"Asia/Beirut", "CRON_TZ=America/Santiago 0 22 * * 6", "2026-09-06T04:30:00+03:00", "2026-09-06T05:00:00+03:00", "2026-09-13T04:00:00+03:00"},
		{"America/Santiago", "0 22 * * *", "2026-09-05T21:00:00-04:00", "2026-09-05T22:00:00-04:00", "2026-09-06T22:00:00-03:00"},
	} {
		from, err := time.Parse(time.RFC3339, c.from)
		if err != nil {
			t.Fatal(err)
		}
		cr := cron.New(cron.WithLocation(zone(t, c.zone)))
		id, err := fire.Add(cr, c.spec, from, func(time.Time) {})
		if err != nil {
			t.Fatal(err)
		}
		next := fire.Next(cr, id, from)
		if after := fire.Next(cr, id, next); next.Format(time.RFC3339) != c.next || after.Format(time.RFC3339) != c.after {
			t.Errorf("%s in %s: %s, then %s; want %s, then %s", c.spec, c.zone, next, after, c.next, c.after)
		}
	}
}

// skipsMidnight is a zone whose clock, when it is about to show midnight at an
// instant, shows one o'clock instead.
func skipsMidnight(t *testing.T, at time.Time) *time.Location {
	t.Helper()
	offset := int32(24*3600 - at.Unix()%(24*3600))
	data := append([]byte("TZif"), make([]byte, 16)...)
	for _, n := range []any{
		uint32(0), uint32(0), uint32(0), uint32(1), uint32(2), uint32(8), // one change, two offsets, 8 bytes of names
		int32(at.Unix()), byte(1), offset, byte(0), byte(0), offset + 3600, byte(1), byte(4), []byte("STD\x00DST\x00"),
	} {
		var err error
		if data, err = binary.Append(data, binary.BigEndian, n); err != nil {
			t.Fatal(err)
		}
	}
	zone, err := time.LoadLocationFromTZData("Skips/Midnight", data)
	if err != nil {
		t.Fatal(err)
	}
	return zone
}

// The function is not called for such a time, although cron fires.
func TestFireThatTheSpecDoesNotNameIsLeftOut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spec func(today, tomorrow time.Time) string
		want int
	}{
		"today":        {func(today, _ time.Time) string { return fmt.Sprintf("* * 1 %d * *", today.Day()) }, 0},
		"this weekday": {func(today, _ time.Time) string { return fmt.Sprintf("* * 1 * * %d", today.Weekday()) }, 0},
		"both days": {func(today, tomorrow time.Time) string {
			return fmt.Sprintf("* * 1 %d,%d * *", today.Day(), tomorrow.Day())
		}, 1},
		"today or weekday": {func(today, tomorrow time.Time) string {
			return fmt.Sprintf("* * 1 %d * %d", today.Day(), tomorrow.Weekday())
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			midnight := time.Now().Truncate(time.Second).Add(3 * time.Second)
			today := midnight.Add(-time.Second).In(skipsMidnight(t, midnight))
			done := make(chan struct{})
			var once sync.Once
			cr := cron.New(cron.WithSeconds(), cron.WithLocation(today.Location()), cron.WithChain(func(j cron.Job) cron.Job {
				return cron.FuncJob(func() { once.Do(func() { j.Run(); close(done) }) })
			}))
			called, spec := 0, c.spec(today, midnight.In(today.Location()))
			id, err := fire.Add(cr, spec, today, func(time.Time) { called++ })
			if err != nil {
				t.Fatal(err)
			}
			cr.Start()
			defer cr.Stop()
			select {
			case <-done:
			case <-time.After(patience):
				t.Fatal("no fire")
			}
			if prev := cr.Entry(id).Prev; called != c.want || prev.Day() == today.Day() {
				t.Errorf("%s fired at %s, called %d times", spec, prev, called)
			}
		})
	}
}

func TestLeapDayWithinFiveYearsIsAFire(t *testing.T) {
	t.Parallel()
	c := cron.New(cron.WithLocation(time.UTC))
	now := time.Date(2024, time.March, 1, 0, 0, 0, 0, time.UTC)
	id, err := fire.Add(c, "0 0 29 2 *", now, func(time.Time) {})
	if err != nil {
		t.Fatal(err)
	}
	if next := fire.Next(c, id, now); !next.Equal(time.Date(2028, time.February, 29, 0, 0, 0, 0, time.UTC)) {
		t.Errorf("next %s", next)
	}
}

func TestZoneIsWhereTheSpecIsRead(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, time.September, 15, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct{ cron, spec, zone, next string }{
		{"Asia/Seoul", "5 0 * * *", "Asia/Seoul", "2026-09-15T15:05:00Z"},
		{"UTC", "5 0 * * *", "UTC", "2026-09-16T00:05:00Z"},
		{"UTC", "CRON_TZ=Asia/Seoul 5 0 * * *", "Asia/Seoul", "2026-09-15T15:05:00Z"},
		{"Asia/Seoul", "TZ=UTC 5 0 * * *", "UTC", "2026-09-16T00:05:00Z"},
		{"Asia/Seoul", "CRON_TZ=Local 5 0 * * *", "Asia/Seoul", "2026-09-15T15:05:00Z"}, // cron's word for its own zone
		{"Asia/Seoul", "@daily", "Asia/Seoul", "2026-09-15T15:00:00Z"},
		{"Asia/Seoul", "@every 90m", "", "2026-09-15T13:30:00Z"},
	} {
		cr := cron.New(cron.WithLocation(zone(t, c.cron)))
		id, err := fire.Add(cr, c.spec, now, func(time.Time) {})
		if err != nil {
			t.Fatal(err)
		}
		got, ok := fire.Zone(cr, id)
		if ok != (c.zone != "") || ok && got.String() != c.zone {
			t.Errorf("%s in %s: zone %s, %t", c.spec, c.cron, got, ok)
		}
		next := fire.Next(cr, id, now)
		if next.UTC().Format(time.RFC3339) != c.next || next.Location().String() != c.cron {
			t.Errorf("%s in %s: next %s, want %s", c.spec, c.cron, next, c.next)
		}
	}
}

func TestSameClockLooksAtTimesNotNames(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b *time.Location
		from string
		want bool
	}{
		{zone(t, "Asia/Seoul"), zone(t, "ROK"), "2026-09-15", true},
		{zone(t, "Asia/Seoul"), zone(t, "Asia/Tokyo"), "2026-09-15", true},
		{zone(t, "Asia/Seoul"), zone(t, "Asia/Tokyo"), "1950-01-01", false}, // both had a summer time of their own
		{zone(t, "Asia/Seoul"), time.FixedZone("", 9*3600), "2026-09-15", true},
		{zone(t, "Asia/Seoul"), time.FixedZone("Asia/Seoul", 8*3600), "2026-09-15", false},
		{zone(t, "Europe/Berlin"), zone(t, "Europe/Paris"), "2026-09-15", true},
		{zone(t, "Europe/Berlin"), zone(t, "Africa/Lagos"), "2026-12-15", false}, // one hour ahead until the summer
		{zone(t, "Europe/London"), time.UTC, "2026-12-15", false},
		{time.UTC, zone(t, "Etc/UTC"), "2026-12-15", true},
		{zone(t, "America/New_York"), zone(t, "America/Havana"), "2026-07-01", false}, // change at another hour
	} {
		from, err := time.Parse(time.DateOnly, c.from)
		if err != nil {
			t.Fatal(err)
		}
		if got, back := fire.SameClock(c.a, c.b, from), fire.SameClock(c.b, c.a, from); got != c.want || back != c.want {
			t.Errorf("%s, %s from %s: %t, %t", c.a, c.b, c.from, got, back)
		}
	}
}
