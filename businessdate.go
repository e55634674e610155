package jobrun

import (
	"cmp"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Date is a calendar date without a time of day and without a zone: the label of a business day. Two Dates are the same
// day exactly when they are ==, so a Date can be a map key. The zero Date is not valid.
//
// Dates are labels, not spans of time: a date on which a zone has no midnight, or which the zone left out altogether,
// can be named, stored and compared like any other.
type Date struct {
	Year  int
	Month time.Month
	Day   int
}

// DateOf returns the date that the wall clock shows at t in t's own location; convert first, DateOf(t.In(zone)), when
// that is not the zone you mean. It never looks at the zone of the machine. For the date that a run belongs to, use
// [Runner.Today], which also knows when the business day starts.
func DateOf(t time.Time) Date {
	year, month, day := t.Date()
	return Date{year, month, day}
}

// ParseDate reads a date written as YYYY-MM-DD, from 0001-01-01 to 9999-12-31. It takes nothing else: ten ASCII
// characters, no spaces, no time of day, and no impossible date such as 2026-02-29 moved to one that exists.
func ParseDate(s string) (Date, error) {
	t, err := time.Parse(time.DateOnly, s)
	if d := DateOf(t); err == nil && d.IsValid() {
		return d, nil
	}
	return Date{}, fmt.Errorf("date %q: want YYYY-MM-DD, a calendar date from 0001-01-01 to 9999-12-31", s)
}

// MustParseDate is [ParseDate] for dates written in the source, such as holidays. It panics when s is not a date.
func MustParseDate(s string) Date {
	d, err := ParseDate(s)
	if err != nil {
		panic(err)
	}
	return d
}

// String returns d as YYYY-MM-DD. What it returns for a Date that is not valid is for people to read and does not parse.
func (d Date) String() string {
	return fmt.Sprintf("%04d-%02d-%02d", d.Year, int(d.Month), d.Day)
}

// IsValid reports whether d is a date of the calendar from 0001-01-01 to 9999-12-31, the years that four digits can write
// and PostgreSQL can store.
func (d Date) IsValid() bool {
	return 1 <= d.Year && d.Year <= 9999 && d.exists()
}

// AddDays returns the date n days after d, or before it when n is negative. The result may leave the range of
// [Date.IsValid]. A Date that no calendar has, such as the zero Date or a 30 February, stays as it is and so not valid.
func (d Date) AddDays(n int) Date {
	if !d.exists() {
		return d
	}
	const far = 1e12 // days: far outside the range, and no overflow below
	days := min(max(int64(n), -far), far)
	return DateOf(time.Unix(d.midnight().Unix()+days*secondsPerDay, 0).UTC())
}

// EndOfMonth returns the last day of d's month. A Date that no calendar has is returned as it is.
func (d Date) EndOfMonth() Date {
	if !d.exists() {
		return d
	}
	return DateOf(time.Date(d.Year, d.Month+1, 0, 0, 0, 0, 0, time.UTC))
}

// Weekday returns the day of the week of d, which must be valid.
func (d Date) Weekday() time.Weekday { return d.midnight().Weekday() }

// Compare returns -1 when d is before e, +1 when it is after e, and 0 when they are the same, as slices.SortFunc wants it.
func (d Date) Compare(e Date) int {
	return cmp.Or(cmp.Compare(d.Year, e.Year), cmp.Compare(d.Month, e.Month), cmp.Compare(d.Day, e.Day))
}

// MarshalText returns d as YYYY-MM-DD, which makes it a string in JSON. A Date that is not valid, the zero Date included,
// is an error; tag a JSON field that may be unset with omitzero.
func (d Date) MarshalText() ([]byte, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	return []byte(d.String()), nil
}

// UnmarshalText sets d to the date that text names, by the rules of [ParseDate]. After an error d is unchanged.
func (d *Date) UnmarshalText(text []byte) error {
	parsed, err := ParseDate(string(text))
	if err == nil {
		*d = parsed
	}
	return err
}

// Value makes Date a query argument for date and text columns: it returns the string YYYY-MM-DD, which PostgreSQL reads
// the same under every DateStyle and session time zone. A Date that is not valid, the zero Date included, is an error and
// never NULL; for NULL pass a nil *Date or an invalid sql.Null[Date].
//
// A bare $1 works in every execution mode of pgx, and through database/sql, wherever the statement itself makes the
// argument a date or a text; write $1::date where it does not. A []Date works only in the modes that ask the server for
// the type; []string with $1::date[] works in all. Do not compare a Date with a timestamptz: that makes the server put it
// at midnight of the session's time zone. (TestDateIsStoredAndReadBackInEveryExecMode)
func (d Date) Value() (driver.Value, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	return d.String(), nil
}

// Scan reads a date column, or a text column that holds YYYY-MM-DD. After an error d is unchanged.
//
// NULL is an error; scan into a *Date or a sql.Null[Date] where it can occur. So are infinity and dates outside the valid
// range. A time.Time is taken only as pgx and lib/pq hand over a date column: midnight at offset zero. A timestamptz is
// refused, since its date depends on the zone that one reads it in: cast it in the statement, (started_at AT TIME ZONE
// 'Asia/Seoul')::date, or convert it with [DateOf]. A time in time.Local is refused even where the machine runs in UTC, so
// that the answer is the same on every machine; only a driver that itself delivers timestamptz in UTC makes midnight
// pass for a date. (TestTimestamptzIsNeverReadAsDate)
func (d *Date) Scan(src any) error {
	switch src := src.(type) {
	case string:
		return d.UnmarshalText([]byte(src))
	case []byte:
		return d.UnmarshalText(src)
	case time.Time:
		_, offset := src.Zone()
		local := src.Location() == time.Local && time.Local != time.UTC
		if local || offset != 0 || timeOfDay(src) != 0 {
			return fmt.Errorf("scan %s into a Date: this is an instant, whose date depends on a time zone; "+
				"select a date column or cast with AT TIME ZONE", src.Format(time.RFC3339Nano))
		}
		return d.UnmarshalText([]byte(DateOf(src).String()))
	case nil:
		return errors.New("scan NULL into a Date: use a *Date or a sql.Null[Date]")
	default:
		return fmt.Errorf("scan %T into a Date: want a date column or text YYYY-MM-DD", src)
	}
}

// Calendar reports whether a date is one of its days: banking days, month ends, the days on which a job is due. It must
// always give the same answer for the same date, on every instance, and must be safe for concurrent use. A nil Calendar
// has every day.
type Calendar func(Date) bool

var (
	// Weekdays has Monday to Friday and knows no holidays; add them with Weekdays.Except(holidays...).
	Weekdays Calendar = func(d Date) bool { return d.Weekday() != time.Saturday && d.Weekday() != time.Sunday }
	// MonthEnds has the last day of every month.
	MonthEnds Calendar = func(d Date) bool { return d == d.EndOfMonth() }
)

// Except returns the calendar with the days of c that are not among dates. It copies dates.
func (c Calendar) Except(dates ...Date) Calendar {
	left := make(map[Date]bool, len(dates))
	for _, d := range dates {
		left[d] = true
	}
	return func(d Date) bool { return !left[d] && c.has(d) }
}

// Next returns the first day of c that is after d. It looks at 400 days at most; a calendar without a day among them, and
// a search that leaves the valid range, are errors.
func (c Calendar) Next(d Date) (Date, error) { return c.search(d, +1) }

// Prev returns the last day of c that is before d. It is limited like [Calendar.Next].
func (c Calendar) Prev(d Date) (Date, error) { return c.search(d, -1) }

// has reports whether d is a day of c, nil included.
func (c Calendar) has(d Date) bool { return c == nil || c(d) }

// search returns the day of c that is nearest to d in the direction of step, d itself not counted.
func (c Calendar) search(d Date, step int) (Date, error) {
	if err := d.check(); err != nil {
		return Date{}, err
	}
	const limit = 400 // days; a yearly calendar has its day within them
	from := d
	for range limit {
		if d = d.AddDays(step); !d.IsValid() {
			return Date{}, fmt.Errorf("calendar from %s: no day left in the range 0001-01-01 to 9999-12-31", from)
		}
		if c.has(d) {
			return d, nil
		}
	}
	return Date{}, fmt.Errorf("calendar from %s: no day up to %s, %d days away", from, d, limit)
}

// DateRule maps the business date on which a job is triggered to the date that its run is for. It must always give the
// same answer for the same date, and must be safe for concurrent use. A nil DateRule is the same day.
type DateRule func(Date) (Date, error)

// PreviousDay is the [DateRule] for work on the day that has just ended.
func PreviousDay(d Date) (Date, error) { return Calendar(nil).Prev(d) }

// PreviousMonthEnd is the [DateRule] for monthly work: the last day of the month before d's, whichever day of the month d is.
func PreviousMonthEnd(d Date) (Date, error) {
	if err := d.check(); err != nil {
		return Date{}, err
	}
	return PreviousDay(Date{d.Year, d.Month, 1})
}

// PreviousBusinessDay returns the [DateRule] for work on the last day of cal before the date of the trigger, which need not
// be a day of cal itself: on a Monday with [Weekdays] it is the Friday before.
func PreviousBusinessDay(cal Calendar) DateRule { return cal.Prev }

// businessDate returns the business date of the instant t: the date of the wall clock in zone, or the day before while
// that clock shows a time of day before dayStart. Only what the clock shows counts; subtracting dayStart from t would
// move the boundary by an hour on days with a clock change. With a dayStart inside an hour that the clock repeats, the
// date steps back for a while; the claim of a key makes that harmless.
// (TestBusinessDateComparesTheWallClock, TestBusinessDateAgreesWithASecondImplementation)
func businessDate(t time.Time, zone *time.Location, dayStart time.Duration) Date {
	t = t.In(zone)
	d := DateOf(t)
	if timeOfDay(t) < dayStart {
		return d.AddDays(-1)
	}
	return d
}

// dueDates are the dates in [from, to] that a job is due on, in order: those that
// the rule yields for a trigger date not after last and that the calendar accepts.
// A rule may move a date by at most 400 days; an error of the rule for a
// trigger date after from, up to a month after to, is returned beside the dates.
// (TestDueDates)
func dueDates(rule DateRule, cal Calendar, from, to, last Date) (due []Date, err error) {
	first, end := from, to
	if rule != nil {
		first, end = from.AddDays(-furthest), to.AddDays(furthest)
	}
	seen := map[Date]bool{}
	for t := first; t.Compare(end) <= 0 && t.Compare(last) <= 0; t = t.AddDays(1) {
		d := t
		if rule != nil {
			if !t.IsValid() {
				continue
			}
			mapped, ruleErr := rule(t)
			if ruleErr != nil {
				// A trigger then has run nothing: that must not look like nothing missed.
				if t.Compare(from) > 0 && t.Compare(to.AddDays(31)) <= 0 && err == nil {
					err = fmt.Errorf("date of the run for %s: %w", t, ruleErr)
				}
				continue
			}
			d = mapped
		}
		if d.Compare(from) >= 0 && d.Compare(to) <= 0 && !seen[d] && cal.has(d) {
			seen[d] = true
			due = append(due, d)
		}
	}
	slices.SortFunc(due, Date.Compare)
	return due, err
}

// furthest is how many days a rule may move a date.
const furthest = 400

// slotStart returns the last instant not after t, in zone, at which the wall clock of zone shows a multiple of every,
// which must be whole minutes that divide a day. Multiples that a clock change leaves out do not occur; those that it
// repeats occur twice. (TestSlotStartAgreesWithWalkingTheClock)
//
// Within a period of constant offset that instant is a remainder away. When the remainder crosses the start of the
// period, the search goes on from the end of the period before.
func slotStart(t time.Time, zone *time.Location, every time.Duration) time.Time {
	t = t.In(zone)
	start := t
	for range 100 { // two do for every real zone
		_, offset := t.Zone()
		seconds, step := t.Unix()+int64(offset), int64(every/time.Second)
		past := (seconds%step + step) % step
		start = time.Unix(t.Unix()-past, 0).In(zone)

		period, _ := t.ZoneBounds()
		if _, o := start.Zone(); o != offset && !start.Before(period) {
			// ZoneBounds names too early a start after the last change in the table of a zone that goes on by a rule.
			_, period = start.ZoneBounds()
		}
		if period.IsZero() || !start.Before(period) {
			break
		}
		t = period.Add(-time.Second)
	}
	return start
}

// slotLabel names the slot that starts at start, as in 2026-09-15T13:00+09:00. The offset is always written in digits, so
// that both passes of an hour that the clock repeats have names of their own; its seconds only when there are any.
func slotLabel(start time.Time) string {
	_, offset := start.Zone()
	sign := '+'
	if offset < 0 {
		sign, offset = '-', -offset
	}
	label := fmt.Sprintf("%sT%02d:%02d%c%02d:%02d", DateOf(start), start.Hour(), start.Minute(), sign, offset/3600, offset/60%60)
	if offset%60 != 0 {
		label += fmt.Sprintf(":%02d", offset%60)
	}
	return label
}

// parseKey takes the key of a run apart: name:2026-09-15 or, with the start of a slot, name:2026-09-15T13:00+09:00. The
// name is what stands before the first colon and is not checked otherwise; date is the one written in the key, and slot is
// the zero time when the key names none. It takes only what [Date.String] and slotLabel write; for anything else, a row
// of another program, ok is false and the rest zero.
func parseKey(key string) (job string, date Date, slot time.Time, ok bool) {
	job, label, found := strings.Cut(key, ":")
	if !found || job == "" {
		return "", Date{}, time.Time{}, false
	}
	if date, err := ParseDate(label); err == nil {
		return job, date, time.Time{}, true
	}
	if slot, ok := parseSlot(label); ok && DateOf(slot).IsValid() {
		return job, DateOf(slot), slot, true
	}
	return "", Date{}, time.Time{}, false
}

// parseSlot is the inverse of slotLabel.
func parseSlot(label string) (slot time.Time, ok bool) {
	layout := "2006-01-02T15:04-07:00"
	if len(label) > len(layout) {
		layout += ":00"
	}
	// In UTC, because time.Parse would borrow the machine's zone when the offset happens to be the same.
	slot, err := time.ParseInLocation(layout, label, time.UTC)
	if err != nil || slotLabel(slot) != label {
		return time.Time{}, false
	}
	return slot, true
}

const secondsPerDay = 24 * 60 * 60

// midnight returns the start of d in UTC, where every day has one. A Date that does not exist becomes another day.
func (d Date) midnight() time.Time { return time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, time.UTC) }

// exists reports whether the calendar, carried on in both directions, has d.
func (d Date) exists() bool { return DateOf(d.midnight()) == d }

// check returns an error that says what is allowed when d is not valid.
func (d Date) check() error {
	if !d.IsValid() {
		return fmt.Errorf("date %s: want a calendar date from 0001-01-01 to 9999-12-31", d)
	}
	return nil
}

// startOfDay is the first instant of a date in a zone: midnight, the earlier one
// where clocks go back over it, the jump where they go forward over it.
func startOfDay(d Date, zone *time.Location) time.Time {
	t := time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, zone)
	if DateOf(t).Compare(d) < 0 { // the hour before the jump
		_, t = t.ZoneBounds()
	}
	if change, _ := t.ZoneBounds(); !change.IsZero() {
		before := change.Add(-time.Second)
		if _, offset := before.Zone(); DateOf(before) == d {
			t = time.Unix(d.midnight().Unix()-int64(offset), 0).In(zone)
		}
	}
	return t
}

// timeOfDay returns what the clock on the wall shows at t, which after a clock change is not the time since midnight.
func timeOfDay(t time.Time) time.Duration {
	hour, minute, second := t.Clock()
	return time.Duration(hour)*time.Hour + time.Duration(minute)*time.Minute + time.Duration(second)*time.Second +
		time.Duration(t.Nanosecond())
}
