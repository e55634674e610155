package jobrun

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestStartOfDayIsItsFirstInstant(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ zone, date, want string }{
		{"Asia/Seoul", "2026-09-15", "2026-09-14T15:00:00Z"},
		{"UTC", "2026-09-15", "2026-09-15T00:00:00Z"},
		{"America/New_York", "2026-03-08", "2026-03-08T05:00:00Z"}, // a change later that day
		{"America/New_York", "2026-03-09", "2026-03-09T04:00:00Z"},
		{"America/New_York", "2026-11-01", "2026-11-01T04:00:00Z"},
		{"America/New_York", "2026-11-02", "2026-11-02T05:00:00Z"},
		{"America/Santiago", "2026-09-06", "2026-09-06T04:00:00Z"}, // no midnight, west of Greenwich
		{"America/Santiago", "2026-09-07", "2026-09-07T03:00:00Z"},
		{"America/Havana", "2026-03-08", "2026-03-08T05:00:00Z"},
		{"America/Asuncion", "2024-10-06", "2024-10-06T04:00:00Z"},
		{"Asia/Beirut", "2017-03-26", "2017-03-25T22:00:00Z"}, // no midnight, east of it
		{"Africa/Cairo", "2024-04-26", "2024-04-25T22:00:00Z"},
		{"Asia/Gaza", "2021-10-29", "2021-10-28T21:00:00Z"}, // 00:00 to 01:00 twice: the earlier
		{"America/Havana", "2026-11-01", "2026-11-01T04:00:00Z"},
		{"Asia/Beirut", "2017-10-29", "2017-10-28T22:00:00Z"}, // from midnight back to 23:00: only one midnight
		{"Africa/Cairo", "2024-11-01", "2024-10-31T22:00:00Z"},
		{"Pacific/Apia", "2011-12-29", "2011-12-29T10:00:00Z"},
		{"Pacific/Apia", "2011-12-30", "2011-12-30T10:00:00Z"}, // a date that never was: where it would have been
		{"Pacific/Apia", "2011-12-31", "2011-12-30T10:00:00Z"},
		{"Asia/Kathmandu", "2026-05-11", "2026-05-10T18:15:00Z"},
	} {
		d, zone := MustParseDate(c.date), loadZone(t, c.zone)
		got := startOfDay(d, zone)
		if got.UTC().Format(time.RFC3339Nano) != c.want || got.Location() != zone {
			t.Errorf("%s in %s: %s, want %s", c.date, c.zone, got, c.want)
		}
		if c.date == "2011-12-30" {
			continue
		}
		if before := got.Add(-1); DateOf(got) != d || DateOf(before).Compare(d) >= 0 {
			t.Errorf("%s in %s: %s, and before that %s", c.date, c.zone, got, before)
		}
	}
}

func TestStartOfDayAtEveryClockChange(t *testing.T) {
	t.Parallel()
	for _, name := range manyZones {
		zone := loadZone(t, name)
		changes := clockChanges(zone)
		for n, change := range changes {
			for days := -1; days <= 2; days++ {
				d := DateOf(change.In(zone)).AddDays(days)
				// A date begins at a change or when the clock, by one of the offsets of these days, shows midnight.
				var begins []time.Time
				for _, c := range changes[max(0, n-2):min(len(changes), n+3)] {
					begins = append(begins, c)
					for _, t := range []time.Time{c.Add(-time.Second), c} {
						_, offset := t.In(zone).Zone()
						begins = append(begins, time.Unix(d.midnight().Unix()-int64(offset), 0))
					}
				}
				slices.SortFunc(begins, time.Time.Compare)
				i := slices.IndexFunc(begins, func(t time.Time) bool {
					return DateOf(t.In(zone)).Compare(d) >= 0 && DateOf(t.Add(-time.Second).In(zone)).Compare(d) < 0
				})
				if got := startOfDay(d, zone); i < 0 || !got.Equal(begins[i]) {
					t.Errorf("%s in %s: %s; by change and midnight: %v", d, name, got, begins)
				}
			}
		}
	}
}

func TestDueDates(t *testing.T) {
	t.Parallel()
	dates := func(all ...string) (ds []Date) {
		for _, s := range all {
			ds = append(ds, MustParseDate(s))
		}
		return ds
	}
	shift := func(n int) DateRule { return func(d Date) (Date, error) { return d.AddDays(n), nil } }
	backwards := func(d Date) (Date, error) { return Date{2026, time.September, 31 - d.Day}, nil }
	for _, c := range []struct {
		what           string
		rule           DateRule
		calendar       Calendar
		from, to, last string
		want           []Date
	}{
		{"every day", nil, nil, "2026-02-27", "2026-03-02", "2026-12-31", dates("2026-02-27", "2026-02-28", "2026-03-01", "2026-03-02")},
		{"until the last trigger", nil, nil, "2026-02-27", "2026-03-02", "2026-02-28", dates("2026-02-27", "2026-02-28")},
		{"no trigger yet", nil, nil, "2026-02-27", "2026-03-02", "2026-02-26", nil},
		{"reversed", nil, nil, "2026-03-02", "2026-02-27", "2026-12-31", nil},
		{"previous day", PreviousDay, nil, "2026-02-27", "2026-03-02", "2026-03-01", dates("2026-02-27", "2026-02-28")},
		{"previous day of the day after", PreviousDay, nil, "2026-02-27", "2026-02-27", "2026-02-28", dates("2026-02-27")},
		{"month ends", PreviousMonthEnd, nil, "2026-01-31", "2026-03-31", "2026-12-31", dates("2026-01-31", "2026-02-28", "2026-03-31")},
		{"month ends of a leap year", PreviousMonthEnd, nil, "2028-02-01", "2028-02-29", "2028-12-31", dates("2028-02-29")},
		{"each date once", PreviousBusinessDay(Weekdays), nil, "2026-09-11", "2026-09-14", "2026-09-15", dates("2026-09-11", "2026-09-14")},
		{"rule, then calendar", shift(1), Weekdays, "2026-09-11", "2026-09-14", "2026-12-31", dates("2026-09-11", "2026-09-14")},
		{"as far as a rule may go", shift(-400), nil, "2026-09-15", "2026-09-15", "2099-12-31", dates("2026-09-15")},
		{"too far", shift(-401), nil, "2026-09-15", "2026-09-15", "2099-12-31", nil},
		{"as far ahead", shift(400), nil, "2026-09-15", "2026-09-15", "2099-12-31", dates("2026-09-15")},
		{"too far ahead", shift(401), nil, "2026-09-15", "2026-09-15", "2099-12-31", nil},
		{"in order, whatever the rule's", backwards, nil, "2026-09-01", "2026-09-03", "2026-09-30", dates("2026-09-01", "2026-09-02", "2026-09-03")},
		{"rule without a date", func(d Date) (Date, error) { return d, errors.New("none") }, nil, "2026-09-01", "2026-09-03", "2026-09-30", nil},
		{"leap day", nil, func(d Date) bool { return d.Day == 29 }, "2028-02-01", "2028-03-01", "2028-12-31", dates("2028-02-29")},
		{"beginning of time", shift(-1), nil, "0001-01-01", "0001-01-02", "9999-12-31", dates("0001-01-01", "0001-01-02")},
		{"end of time", shift(1), nil, "9999-12-30", "9999-12-31", "9999-12-31", dates("9999-12-30", "9999-12-31")},
	} {
		got, err := dueDates(c.rule, c.calendar, MustParseDate(c.from), MustParseDate(c.to), MustParseDate(c.last))
		if !slices.Equal(got, c.want) || (err != nil) != (c.what == "rule without a date") {
			t.Errorf("%s: %v, %v, want %v", c.what, fmt.Sprint(got), err, fmt.Sprint(c.want))
		}
	}
}
