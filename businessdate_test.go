package jobrun

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	_ "time/tzdata" // the same zones on every machine, with or without zone files
)

func TestParseDateTakesOnlyCalendarDates(t *testing.T) {
	for _, s := range []string{
		"2026-09-15", "2028-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "0099-12-31", "2026-04-30", "2025-12-29", "2027-01-01",
	} {
		d, err := ParseDate(s)
		if err != nil || d.String() != s || !d.IsValid() {
			t.Errorf("ParseDate(%q) = %v, %v; want the same date", s, d, err)
		}
		if MustParseDate(s) != d {
			t.Errorf("MustParseDate(%q) differs from ParseDate", s)
		}
	}
	for _, s := range []string{
		"2026-02-29", "2100-02-29", "1900-02-29", "2026-04-31", "2026-13-01", "2026-00-01", "2026-01-00", "2026-01-32", "2026-2-9",
		"2026-2-09", "2026/01/01", "20260101", " 2026-01-01", "2026-01-01 ", "2026-01-01\n", "2026-01-01\x00", "2026-01-01T00:00:00Z",
		"2026-01-01 00:00:00", "２０２６-０１-０１", "٢٠٢٦-٠١-٠١", "10000-01-01", "0000-01-01", "0000-12-31", "-001-01-01", "+2026-1-1",
		"+202-01-01", "2026-+1-01", "2026-01- 1", "2026-W53-1", "2026-259", "26-01-01", "infinity", "-infinity", "today", "", "          ",
		"01-01-2026", "2026-01-01 BC", "2026‐01‐01", "\xff\xfe26-01-01",
	} {
		d, err := ParseDate(s)
		if err == nil {
			t.Errorf("ParseDate(%q) = %v; want an error", s, d)
			continue
		}
		for _, want := range []string{fmt.Sprintf("%q", s), "YYYY-MM-DD", "0001-01-01", "9999-12-31"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("ParseDate(%q): error %q does not contain %s", s, err, want)
			}
		}
		if d != (Date{}) {
			t.Errorf("ParseDate(%q) = %v beside the error; want the zero Date", s, d)
		}
	}
}

func TestMustParseDatePanicsWithTheReason(t *testing.T) {
	defer func() {
		if err, ok := recover().(error); !ok || !strings.Contains(err.Error(), `"2026-02-29"`) {
			t.Errorf("recovered %v; want the error of ParseDate", err)
		}
	}()
	MustParseDate("2026-02-29")
}

// Goes through every month of the range with a table of its own.
func TestEveryMonthHasItsDays(t *testing.T) {
	t.Parallel()
	day := Date{1, 1, 1}
	number := 0 // of days since 0001-01-01, a Monday
	for year := 1; year <= 9999; year++ {
		for month := time.January; month <= time.December; month++ {
			first, days := Date{year, month, 1}, daysIn(year, month)
			last := Date{year, month, days}
			if day != first {
				t.Fatalf("the day after the last month is %v; want %v", day, first)
			}
			if end := first.EndOfMonth(); end != last || last.EndOfMonth() != last {
				t.Fatalf("%v.EndOfMonth() = %v; want %v", first, end, last)
			}
			if !last.IsValid() || (Date{year, month, days + 1}).IsValid() || (Date{year, month, 0}).IsValid() {
				t.Fatalf("%04d-%02d does not have exactly %d days", year, month, days)
			}
			if got := first.Weekday(); got != time.Weekday((number+1)%7) {
				t.Fatalf("%v is a %v; want %v", first, got, time.Weekday((number+1)%7))
			}
			if back := first.AddDays(-number); back != (Date{1, 1, 1}) {
				t.Fatalf("%v less %d days is %v", first, number, back)
			}
			if parsed, err := ParseDate(last.String()); err != nil || parsed != last {
				t.Fatalf("%v reads back as %v, %v", last, parsed, err)
			}
			day = last.AddDays(1)
			number += days
		}
	}
	if day.IsValid() || day != (Date{10000, 1, 1}) || day.AddDays(-1) != (Date{9999, 12, 31}) {
		t.Errorf("the day after 9999-12-31 is %v, valid %v; want 10000-01-01, not valid", day, day.IsValid())
	}
}

func TestAddDaysNeverComesBackIntoTheRange(t *testing.T) {
	for _, d := range []Date{{1, 1, 1}, {2026, 9, 15}, {9999, 12, 31}} {
		for _, n := range []int{3_652_059, 1 << 24, math.MaxInt32, math.MaxInt - 1, math.MaxInt} {
			for _, n := range []int{n, -n, -n - 1} {
				if got := d.AddDays(n); got.IsValid() {
					t.Errorf("%v.AddDays(%d) = %v, which is valid", d, n, got)
				}
			}
		}
	}
	if got := (Date{1, 1, 1}).AddDays(3_652_058); got != (Date{9999, 12, 31}) {
		t.Errorf("the range ends at %v", got)
	}
	impossible := []Date{
		{},
		{2026, 2, 29},
		{2026, 2, 30},
		{2026, 13, 1},
		{2026, 0, 1},
		{2026, 1, 0},
		{2026, 1, -5},
		{2026, 1, 32},
		{math.MaxInt, 1, 1},
		{math.MinInt, 1, 1},
		{2026, math.MaxInt, 1},
		{2026, 1, math.MaxInt},
	}
	for _, d := range impossible {
		if d.IsValid() {
			t.Errorf("%#v is valid", d)
		}
		for _, n := range []int{0, 1, -1, 400, -400, math.MaxInt, math.MinInt} {
			if got := d.AddDays(n); got.IsValid() {
				t.Errorf("%#v.AddDays(%d) = %v, which is valid", d, n, got)
			}
		}
		if got := d.EndOfMonth(); got.IsValid() {
			t.Errorf("%#v.EndOfMonth() = %v, which is valid", d, got)
		}
	}
}

func TestCompareOrdersDates(t *testing.T) {
	sorted := []Date{
		{}, {1, 1, 1}, {2025, 12, 31}, {2026, 1, 1}, {2026, 1, 31}, {2026, 2, 1}, {2026, 12, 1}, {2027, 1, 1}, {9999, 12, 31}, {10000, 1, 1},
	}
	for i, a := range sorted {
		for j, b := range sorted {
			if got, want := a.Compare(b), min(max(i-j, -1), 1); got != want {
				t.Errorf("%v.Compare(%v) = %d; want %d", a, b, got, want)
			}
		}
	}
	shuffled := slices.Clone(sorted)
	rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	slices.SortFunc(shuffled, Date.Compare)
	if !slices.Equal(shuffled, sorted) {
		t.Errorf("sorted to %v", shuffled)
	}
}

// The dates are those on which some zone has no midnight, two of them, or nothing at all.
func TestDatesWithoutMidnightAreDatesLikeOthers(t *testing.T) {
	for _, s := range []string{
		"2026-09-06", "2026-03-08", "2024-10-06", "2017-03-26", "2024-04-26", "2017-10-28", "2017-10-29", "2024-10-31", "2011-12-30",
	} {
		d := MustParseDate(s)
		if d.String() != s || d.AddDays(1).AddDays(-1) != d || d.AddDays(-1).AddDays(1) != d {
			t.Errorf("%s does not survive a round trip", s)
		}
		if next := d.AddDays(1); next.Compare(d) != 1 || next == d {
			t.Errorf("the day after %s is %v", s, next)
		}
		if next, err := Calendar(nil).Next(d); err != nil || next != d.AddDays(1) {
			t.Errorf("next day of %s is %v, %v", s, next, err)
		}
		if prev, err := PreviousDay(d); err != nil || prev != d.AddDays(-1) {
			t.Errorf("previous day of %s is %v, %v", s, prev, err)
		}
		text, err := d.MarshalText()
		var back Date
		if err != nil || back.UnmarshalText(text) != nil || back != d {
			t.Errorf("%s as text is %q, %v, and back %v", s, text, err, back)
		}
	}
}

func TestDateIsAStringInJSON(t *testing.T) {
	type doc struct {
		Date  Date         `json:"date"`
		Unset Date         `json:"unset,omitzero"`
		Ptr   *Date        `json:"ptr"`
		Count map[Date]int `json:"count"`
	}
	d := Date{2026, 9, 15}
	text, err := json.Marshal(doc{Date: d, Count: map[Date]int{d: 1}})
	if want := `{"date":"2026-09-15","ptr":null,"count":{"2026-09-15":1}}`; err != nil || string(text) != want {
		t.Errorf("Marshal = %s, %v; want %s", text, err, want)
	}
	var back doc
	if err := json.Unmarshal(text, &back); err != nil || back.Date != d || back.Unset != (Date{}) || back.Ptr != nil || back.Count[d] != 1 {
		t.Errorf("Unmarshal = %+v, %v", back, err)
	}
	if _, err := json.Marshal(doc{}); err == nil {
		t.Error("a zero Date was marshalled")
	}
	for _, bad := range []string{`"2026-02-29"`, `""`, `"2026-09-15T00:00:00Z"`, `20260915`, `{}`} {
		got := d
		if err := json.Unmarshal([]byte(bad), &got); err == nil || got != d {
			t.Errorf("Unmarshal(%s) = %v, %v; want an error and the date unchanged", bad, got, err)
		}
	}
}

func TestValueIsNeverNull(t *testing.T) {
	if v, err := (Date{2026, 9, 15}).Value(); err != nil || v != "2026-09-15" {
		t.Errorf("Value() = %v, %v", v, err)
	}
	for _, d := range []Date{{}, {2026, 2, 29}, {10000, 1, 1}, {0, 12, 31}} {
		if v, err := d.Value(); err == nil || v != nil {
			t.Errorf("%v.Value() = %v, %v; want an error", d, v, err)
		}
		if text, err := d.MarshalText(); err == nil {
			t.Errorf("%v.MarshalText() = %s; want an error", d, text)
		}
	}
}

func TestScanTakesOnlyWhatIsADate(t *testing.T) {
	want := Date{2026, 9, 15}
	seoul := loadZone(t, "Asia/Seoul")
	for _, src := range []any{
		"2026-09-15", []byte("2026-09-15"),
		time.Date(2026, 9, 15, 0, 0, 0, 0, time.UTC),
		time.Date(2026, 9, 15, 0, 0, 0, 0, time.FixedZone("", 0)), // as lib/pq does
	} {
		var d Date
		if err := d.Scan(src); err != nil || d != want {
			t.Errorf("Scan(%v) = %v, %v", src, d, err)
		}
	}
	for _, tt := range []struct {
		src  any
		says string
	}{
		{nil, "sql.Null[Date]"},
		{"infinity", `"infinity"`},
		{"-infinity", `"-infinity"`},
		{[]byte("infinity"), `"infinity"`},
		{"2026-02-29", `"2026-02-29"`},
		{"", `""`},
		{[]byte(nil), `""`},
		{"2026-09-15 00:00:00+00", "YYYY-MM-DD"},
		{"15.09.2026", "YYYY-MM-DD"},
		{time.Date(2026, 9, 15, 0, 0, 0, 0, seoul), "2026-09-15T00:00:00+09:00"},
		{time.Date(2026, 9, 15, 9, 0, 0, 0, seoul), "AT TIME ZONE"}, // midnight UTC
		{time.Date(2026, 9, 15, 9, 0, 0, 0, time.UTC), "AT TIME ZONE"},
		{time.Date(2026, 9, 15, 0, 0, 0, 1, time.UTC), "AT TIME ZONE"},
		{time.Date(2026, 9, 15, 0, 0, 0, 0, time.FixedZone("", 1)), "AT TIME ZONE"},
		{time.Date(2026, 9, 15, 0, 0, 0, 0, time.Local), "AT TIME ZONE"},
		{time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC), "0001-01-01"},
		{time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), "9999-12-31"},
		{int64(20260915), "int64"},
		{3.14, "float64"},
		{true, "bool"},
		{want, "jobrun.Date"},
	} {
		d := want
		if err := d.Scan(tt.src); err == nil || d != want || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("Scan(%#v) = %v, %v; want the date unchanged and an error with %s", tt.src, d, err, tt.says)
		}
	}
}

func TestMonthEnds(t *testing.T) {
	for _, tt := range []struct{ date, end, before, after string }{
		{"2026-03-31", "2026-03-31", "2026-02-28", "2026-04-30"},
		{"2028-03-31", "2028-03-31", "2028-02-29", "2028-04-30"},
		{"2026-01-31", "2026-01-31", "2025-12-31", "2026-02-28"},
		{"2028-02-29", "2028-02-29", "2028-01-31", "2028-03-31"},
		{"2026-03-01", "2026-03-31", "2026-02-28", "2026-04-30"},
		{"2100-03-01", "2100-03-31", "2100-02-28", "2100-04-30"},
		{"2000-03-15", "2000-03-31", "2000-02-29", "2000-04-30"},
		{"9999-11-30", "9999-11-30", "9999-10-31", "9999-12-31"},
	} {
		d := MustParseDate(tt.date)
		if got := d.EndOfMonth().String(); got != tt.end {
			t.Errorf("%s.EndOfMonth() = %s; want %s", d, got, tt.end)
		}
		if got, err := PreviousMonthEnd(d); err != nil || got.String() != tt.before {
			t.Errorf("PreviousMonthEnd(%s) = %s, %v; want %s", d, got, err, tt.before)
		}
		if got := d.EndOfMonth().AddDays(1).EndOfMonth().String(); got != tt.after {
			t.Errorf("the month after %s ends %s; want %s", d, got, tt.after)
		}
	}
	// The days of 2026 that are the 31st of a month.
	var months []time.Month
	for d := (Date{2026, 1, 1}); d.Year == 2026; d = d.AddDays(1) {
		if MonthEnds(d) && d.Day == 31 {
			months = append(months, d.Month)
		}
	}
	if !slices.Equal(months, []time.Month{1, 3, 5, 7, 8, 10, 12}) {
		t.Errorf("months with a 31st: %v", months)
	}
}

func TestCalendarFindsTheNearestDay(t *testing.T) {
	holidays := []Date{{2026, 9, 24}, {2026, 9, 25}}
	banking := Weekdays.Except(holidays...)
	never := Calendar(func(Date) bool { return false })
	yearly := Calendar(func(d Date) bool { return d.Month == 2 && d.Day == 28 })
	leapDays := Calendar(func(d Date) bool { return d.Month == 2 && d.Day == 29 })
	for _, tt := range []struct {
		name             string
		cal              Calendar
		date, next, prev string // "": an error
	}{
		{"nil", nil, "2026-09-15", "2026-09-16", "2026-09-14"},
		{"nil at the end", nil, "9999-12-31", "", "9999-12-30"},
		{"nil at the start", nil, "0001-01-01", "0001-01-02", ""},
		{"weekdays on Monday", Weekdays, "2026-09-14", "2026-09-15", "2026-09-11"},
		{"weekdays on Friday", Weekdays, "2026-09-11", "2026-09-14", "2026-09-10"},
		{"weekdays on Sunday", Weekdays, "2026-09-13", "2026-09-14", "2026-09-11"},
		{"month ends", MonthEnds, "2026-02-28", "2026-03-31", "2026-01-31"},
		{"month ends within", MonthEnds, "2028-02-28", "2028-02-29", "2028-01-31"},
		{"month ends at the end", MonthEnds, "9999-12-31", "", "9999-11-30"},
		{"banking over holidays", banking, "2026-09-23", "2026-09-28", "2026-09-22"},
		{"banking back over holidays", banking, "2026-09-28", "2026-09-29", "2026-09-23"},
		{"nil but one", Calendar(nil).Except(Date{2026, 9, 16}), "2026-09-15", "2026-09-17", "2026-09-14"},
		{"except nothing", Weekdays.Except(), "2026-09-11", "2026-09-14", "2026-09-10"},
		{"never", never, "2026-09-15", "", ""},
		{"yearly", yearly, "2026-02-28", "2027-02-28", "2025-02-28"},
		{"leap days", leapDays, "2026-09-15", "", ""},
		{"leap days in reach", leapDays, "2027-09-15", "2028-02-29", ""},
	} {
		d := MustParseDate(tt.date)
		for i, find := range []func(Date) (Date, error){tt.cal.Next, tt.cal.Prev} {
			want := []string{tt.next, tt.prev}[i]
			got, err := find(d)
			if want == "" && (err == nil || got != (Date{}) || !strings.Contains(err.Error(), tt.date)) {
				t.Errorf("%s: direction %d from %s = %v, %v; want an error that names the date", tt.name, i, d, got, err)
			}
			if want != "" && (err != nil || got.String() != want) {
				t.Errorf("%s: direction %d from %s = %v, %v; want %s", tt.name, i, d, got, err, want)
			}
		}
	}
	for _, d := range []Date{{}, {2026, 2, 29}, {10000, 1, 1}, {0, 12, 31}} {
		if got, err := Calendar(nil).Next(d); err == nil {
			t.Errorf("Next(%v) = %v; want an error", d, got)
		}
		if got, err := Calendar(nil).Prev(d); err == nil {
			t.Errorf("Prev(%v) = %v; want an error", d, got)
		}
	}
}

func TestCalendarLooksAt400DaysAtMost(t *testing.T) {
	start := Date{2026, 1, 1}
	for _, step := range []int{1, -1} {
		for _, days := range []int{1, 399, 400, 401} {
			asked := 0
			cal := Calendar(func(d Date) bool { asked++; return d == start.AddDays(step*days) })
			find := map[int]func(Date) (Date, error){1: cal.Next, -1: cal.Prev}[step]
			got, err := find(start)
			if found := err == nil && got == start.AddDays(step*days); found != (days <= 400) || asked != min(days, 400) {
				t.Errorf("step %d, %d days away: %v, %v after %d days", step, days, got, err, asked)
			}
		}
	}
}

func TestExceptCopiesItsDates(t *testing.T) {
	dates := []Date{{2026, 9, 15}}
	cal := Weekdays.Except(dates...)
	dates[0] = Date{2026, 9, 16}
	if cal(Date{2026, 9, 15}) || !cal(Date{2026, 9, 16}) {
		t.Error("a later change of the slice changed the calendar")
	}
	if more := cal.Except(Date{2026, 9, 16}); more(Date{2026, 9, 15}) || more(Date{2026, 9, 16}) || !cal(Date{2026, 9, 16}) {
		t.Error("Except does not add up, or changes its receiver")
	}
}

func TestDateRules(t *testing.T) {
	afterHolidays := PreviousBusinessDay(Weekdays.Except(Date{2026, 9, 24}, Date{2026, 9, 25}))
	for _, tt := range []struct {
		name       string
		rule       DateRule
		date, want string // "": an error
	}{
		{"day", PreviousDay, "2026-01-01", "2025-12-31"},
		{"day", PreviousDay, "2028-03-01", "2028-02-29"},
		{"day", PreviousDay, "0001-01-02", "0001-01-01"},
		{"day", PreviousDay, "0001-01-01", ""},
		{"month end", PreviousMonthEnd, "2026-03-31", "2026-02-28"},
		{"month end", PreviousMonthEnd, "2028-03-01", "2028-02-29"},
		{"month end", PreviousMonthEnd, "2026-01-15", "2025-12-31"},
		{"month end", PreviousMonthEnd, "0001-02-01", "0001-01-31"},
		{"month end", PreviousMonthEnd, "0001-01-31", ""},
		{"business day", PreviousBusinessDay(Weekdays), "2026-09-14", "2026-09-11"},
		{"business day", PreviousBusinessDay(Weekdays), "2026-09-13", "2026-09-11"},
		{"business day", PreviousBusinessDay(nil), "2026-09-14", "2026-09-13"},
		{"business day", PreviousBusinessDay(MonthEnds), "2026-03-31", "2026-02-28"},
		{"business day", PreviousBusinessDay(func(Date) bool { return false }), "2026-09-14", ""},
		{"holidays", afterHolidays, "2026-09-28", "2026-09-23"},
	} {
		got, err := tt.rule(MustParseDate(tt.date))
		if tt.want == "" && (err == nil || got != (Date{})) || tt.want != "" && (err != nil || got.String() != tt.want) {
			t.Errorf("%s of %s = %v, %v; want %s", tt.name, tt.date, got, err, cmp.Or(tt.want, "an error"))
		}
	}
	for _, rule := range []DateRule{PreviousDay, PreviousMonthEnd, PreviousBusinessDay(Weekdays)} {
		for _, d := range []Date{{}, {2026, 2, 30}, {2026, 3, 0}, {2026, 13, 1}, {10000, 1, 1}, {0, 12, 31}} {
			if got, err := rule(d); err == nil {
				t.Errorf("a rule maps %#v to %v; want an error", d, got)
			}
		}
	}
}

// The instants of TestBusinessDateComparesTheWallClock. Each line is a zone, the wall-clock time at which the business day
// starts, an instant and the business date.
const businessDates = `
	Asia/Seoul           00:00 2026-07-26T14:59:59.999999999Z 2026-07-26
	Asia/Seoul           00:00 2026-07-26T15:00:00Z           2026-07-27
	Asia/Seoul           00:00 2026-07-26T16:00:00Z           2026-07-27
	Asia/Seoul           00:00 2026-07-27T00:00:00Z           2026-07-27
	Asia/Seoul           00:00 2026-07-26T16:00:00-09:00      2026-07-27
	UTC                  00:00 2026-07-26T16:00:00Z           2026-07-26

	no midnight
	America/Santiago     00:00 2026-09-06T03:59:59Z           2026-09-05
	America/Santiago     00:00 2026-09-06T04:00:00Z           2026-09-06
	America/Havana       00:00 2026-03-08T04:59:59Z           2026-03-07
	America/Havana       00:00 2026-03-08T05:00:00Z           2026-03-08
	America/Asuncion     00:00 2024-10-06T03:59:59Z           2024-10-05
	America/Asuncion     00:00 2024-10-06T04:00:00Z           2024-10-06
	Asia/Beirut          00:00 2017-03-25T21:59:59Z           2017-03-25
	Asia/Beirut          00:00 2017-03-25T22:00:00Z           2017-03-26
	Africa/Cairo         00:00 2024-04-25T21:59:59Z           2024-04-25
	Africa/Cairo         00:00 2024-04-25T22:00:00Z           2024-04-26

	back over midnight
	Asia/Beirut          00:00 2017-10-28T20:30:00Z           2017-10-28
	Asia/Beirut          00:00 2017-10-28T21:30:00Z           2017-10-28
	Asia/Beirut          00:00 2017-10-28T22:00:00Z           2017-10-29
	Africa/Cairo         00:00 2024-10-31T20:30:00Z           2024-10-31
	Africa/Cairo         00:00 2024-10-31T21:30:00Z           2024-10-31
	Africa/Cairo         00:00 2024-10-31T22:00:00Z           2024-11-01

	a whole day left out
	Pacific/Apia         00:00 2011-12-30T09:59:59Z           2011-12-29
	Pacific/Apia         00:00 2011-12-30T10:00:00Z           2011-12-31
	Pacific/Apia         06:00 2011-12-30T10:00:00Z           2011-12-30
	Pacific/Apia         06:00 2011-12-30T16:00:00Z           2011-12-31

	a late start on days with a clock change
	America/New_York     06:00 2026-03-08T09:59:59Z           2026-03-07
	America/New_York     06:00 2026-03-08T09:59:59.999999999Z 2026-03-07
	America/New_York     06:00 2026-03-08T10:00:00Z           2026-03-08
	America/New_York     06:00 2026-11-01T10:30:00Z           2026-10-31
	America/New_York     06:00 2026-11-01T10:59:59Z           2026-10-31
	America/New_York     06:00 2026-11-01T11:00:00Z           2026-11-01
	America/New_York     02:30 2026-03-08T06:59:59Z           2026-03-07
	America/New_York     02:30 2026-03-08T07:00:00Z           2026-03-08
	America/New_York     01:30 2026-11-01T05:29:59Z           2026-10-31
	America/New_York     01:30 2026-11-01T05:30:00Z           2026-11-01
	America/New_York     01:30 2026-11-01T06:00:00Z           2026-10-31
	America/New_York     01:30 2026-11-01T06:30:00Z           2026-11-01
	Asia/Seoul           23:59 2026-07-26T14:58:59.999999999Z 2026-07-25
	Asia/Seoul           23:59 2026-07-26T14:59:00Z           2026-07-26
	Asia/Seoul           06:00 2026-12-31T20:59:59.999999999Z 2026-12-31
	Asia/Seoul           06:00 2026-12-31T21:00:00Z           2027-01-01

	both passes of an hour
	Europe/Berlin        00:00 2024-10-27T00:05:00Z           2024-10-27
	Europe/Berlin        00:00 2024-10-27T01:05:00Z           2024-10-27
	Europe/Berlin        00:00 2024-10-28T01:05:00Z           2024-10-28

	off the full hour
	Asia/Kathmandu       00:00 2026-05-10T18:14:59Z           2026-05-10
	Asia/Kathmandu       00:00 2026-05-10T18:15:00Z           2026-05-11
	Asia/Katmandu        00:00 2026-05-10T18:14:59Z           2026-05-10
	Asia/Katmandu        00:00 2026-05-10T18:15:00Z           2026-05-11
	Asia/Kolkata         00:00 2026-05-10T18:29:59Z           2026-05-10
	Asia/Kolkata         00:00 2026-05-10T18:30:00Z           2026-05-11
	Pacific/Chatham      00:00 2026-05-10T11:14:59Z           2026-05-10
	Pacific/Chatham      00:00 2026-05-10T11:15:00Z           2026-05-11
	Australia/Lord_Howe  00:00 2026-04-04T12:59:59Z           2026-04-04
	Australia/Lord_Howe  00:00 2026-04-04T13:00:00Z           2026-04-05

	labels around New Year
	Asia/Seoul           00:00 2025-12-29T03:00:00Z           2025-12-29
	Asia/Seoul           00:00 2027-01-01T03:00:00Z           2027-01-01
	Asia/Seoul           00:00 2028-02-28T15:00:00Z           2028-02-29

	around the end of a year
	Asia/Seoul           00:00 2026-12-31T14:59:59.9Z         2026-12-31
	Asia/Seoul           00:00 2026-12-31T14:59:59.977Z       2026-12-31
	Asia/Seoul           00:00 2026-12-31T15:00:00Z           2027-01-01
	Asia/Seoul           00:00 2026-12-31T15:00:01.9Z         2027-01-01
	Asia/Seoul           00:00 2026-12-31T14:50:00Z           2026-12-31

	other names
	ROK                  00:00 2026-07-26T16:00:00Z           2026-07-27
	Etc/GMT-9            00:00 2026-07-26T16:00:00Z           2026-07-27
	Etc/UTC              00:00 2026-07-26T16:00:00Z           2026-07-26
`

type businessDateCase struct {
	zone     *time.Location
	dayStart time.Duration
	instant  time.Time
	want     string
}

func businessDateCases(t testing.TB) (cases []businessDateCase) {
	t.Helper()
	for line := range strings.Lines(businessDates) {
		f := strings.Fields(line)
		if len(f) != 4 || !strings.Contains(f[1], ":") {
			continue // a heading
		}
		clock, err1 := time.Parse("15:04", f[1])
		instant, err2 := time.Parse(time.RFC3339Nano, f[2])
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		start := time.Duration(clock.Hour())*time.Hour + time.Duration(clock.Minute())*time.Minute
		cases = append(cases, businessDateCase{loadZone(t, f[0]), start, instant, f[3]})
	}
	if len(cases) < 50 {
		t.Fatalf("read only %d cases", len(cases))
	}
	return cases
}

func TestBusinessDateComparesTheWallClock(t *testing.T) {
	for _, tt := range businessDateCases(t) {
		if got := businessDate(tt.instant, tt.zone, tt.dayStart); got.String() != tt.want {
			t.Errorf("business date of %s in %s from %s = %s; want %s", tt.instant.Format(time.RFC3339Nano), tt.zone, tt.dayStart, got, tt.want)
		}
		if tt.dayStart == 0 && DateOf(tt.instant.In(tt.zone)).String() != tt.want {
			t.Errorf("DateOf %s in %s differs from the business date", tt.instant.Format(time.RFC3339Nano), tt.zone)
		}
	}
	// The location that an instant comes with is of no account.
	instant := time.Date(2026, 7, 26, 16, 0, 0, 0, time.UTC)
	for _, name := range []string{"UTC", "Asia/Seoul", "America/New_York", "Pacific/Kiritimati"} {
		if got := businessDate(instant.In(loadZone(t, name)), loadZone(t, "Asia/Seoul"), 0); got != (Date{2026, 7, 27}) {
			t.Errorf("from an instant in %s: %s", name, got)
		}
	}
}

func TestZoneNamesThatAreNotZonesAreErrors(t *testing.T) {
	for _, name := range []string{"KST", "KST-9", "GMT+9", "+09:00", "Asia/Soul", "../etc/passwd"} {
		if zone, err := time.LoadLocation(name); err == nil {
			t.Errorf("LoadLocation(%q) = %v; want an error", name, zone)
		}
	}
	// "" is UTC and "Local" is whatever the machine says, by the rules of LoadLocation: callers must not pass on an unset name.
	zone, err := time.LoadLocation("")
	if err != nil {
		t.Fatal(err)
	}
	if got := businessDate(time.Date(2026, 7, 26, 16, 0, 0, 0, time.UTC), zone, 0); got != (Date{2026, 7, 26}) {
		t.Errorf(`in zone "": %s`, got)
	}
}

// The child prints what it finds; every process zone must give the same.
func TestDatesAreTheSameInEveryProcessZone(t *testing.T) {
	const variable = "JOBRUN_TEST_PRINT_DATES"
	if os.Getenv(variable) != "" {
		printDates(t)
		return
	}
	var want string
	for _, tz := range []string{"UTC", "Asia/Seoul", "America/New_York", "America/Santiago", ""} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1", "-test.v=false")
		cmd.Env = append(os.Environ(), variable+"=1", "TZ="+tz, "GORACE=atexit_sleep_ms=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("TZ=%s: %v\n%s", tz, err, out)
		}
		local, got, _ := strings.Cut(string(out), "\n")
		if name := map[string]string{"": "UTC"}[tz]; local != "local "+cmp.Or(name, tz) {
			t.Fatalf("TZ=%q did not set the zone of the child: %q", tz, local)
		}
		got, _, _ = strings.Cut(got, "end\n")
		if want == "" {
			want = got
		}
		if got != want || strings.Count(got, "\n") < 50 || !strings.HasSuffix(got, "\nlocal is UTC <nil> 2026-07-26\n") {
			t.Errorf("TZ=%q gives\n%s\nwant\n%s", tz, got, want)
		}
	}
}

func printDates(t *testing.T) {
	local := time.Local.String()
	if local == "Local" {
		name, _ := time.Unix(0, 0).Zone()
		local = map[string]string{"UTC": "UTC", "KST": "Asia/Seoul", "EST": "America/New_York"}[name]
		if name == "-03" || name == "-04" {
			local = "America/Santiago"
		}
	}
	fmt.Println("local", local)
	for _, tt := range businessDateCases(t) {
		date := businessDate(tt.instant, tt.zone, tt.dayStart)
		if date.String() != tt.want {
			t.Errorf("business date of %v in %s = %s; want %s", tt.instant, tt.zone, date, tt.want)
		}
		key := "settle/" + tt.zone.String() + ":" + slotLabel(slotStart(tt.instant, tt.zone, time.Hour))
		_, slotDate, slot, ok := parseKey(key)
		var fromColumn Date
		err := fromColumn.Scan(time.Date(date.Year, date.Month, date.Day, 0, 0, 0, 0, time.UTC))
		localErr := new(Date).Scan(time.Date(2026, 7, 26, 0, 0, 0, 0, time.Local))
		fmt.Println(date, key, slotDate, slot.Format(time.RFC3339), slot.Location() != time.Local, ok, fromColumn == date, err, localErr != nil)
	}
	// Truncate rounds elapsed time since year 1, so it can never stand in for the start of a day.
	seoul := loadZone(t, "Asia/Seoul")
	trap := time.Date(2026, 7, 26, 16, 0, 0, 0, time.UTC).In(seoul).Truncate(24 * time.Hour)
	fmt.Println("trap", trap.Format(time.RFC3339), DateOf(trap))
	// Services that set time.Local to UTC still read date columns.
	time.Local = time.UTC
	var date Date
	fmt.Println("local is UTC", date.Scan(time.Date(2026, 7, 26, 0, 0, 0, 0, time.UTC)), date)
	fmt.Println("end")
}

// Every zone of the list that has had clock changes, at instants around them and at random, against arithmetic that
// shares nothing with the code under test but the offset.
func TestBusinessDateAgreesWithASecondImplementation(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	dayStarts := []time.Duration{0, 1, 90 * time.Minute, 6 * time.Hour, 24*time.Hour - 1}
	checked := 0
	for _, name := range manyZones {
		zone := loadZone(t, name)
		instants := slices.Clone(clockChanges(zone))
		for range 50 {
			instants = append(instants, time.Unix(rng.Int64N(8e9)-4e9, rng.Int64N(1e9)))
		}
		for _, instant := range instants {
			for _, shift := range []time.Duration{
				-6 * time.Hour, -time.Hour, -1, 0, 1, 30 * time.Minute, 2 * time.Hour, 6 * time.Hour,
			} {
				at := instant.Add(shift)
				for _, dayStart := range dayStarts {
					want := secondBusinessDate(at, zone, dayStart)
					if got := businessDate(at, zone, dayStart); got != want {
						t.Fatalf("business date of %s in %s from %s = %s; want %s", at.In(zone), name, dayStart, got, want)
					}
					checked++
				}
			}
		}
	}
	t.Logf("%d instants", checked)
}

// secondBusinessDate counts days by arithmetic on the offset.
func secondBusinessDate(t time.Time, zone *time.Location, dayStart time.Duration) Date {
	_, offset := t.In(zone).Zone()
	seconds := t.Unix() + int64(offset)
	days, rest := seconds/86400, seconds%86400
	if rest < 0 {
		days, rest = days-1, rest+86400
	}
	if rest*1e9+int64(t.Nanosecond()) < dayStart.Nanoseconds() {
		days--
	}
	return dateOfNumber(days)
}

// dateOfNumber returns the date a number of days after 1970-01-01, counted in years that begin in March.
func dateOfNumber(days int64) Date {
	days += 719468
	era := days / 146097
	if days < 0 {
		era = (days - 146096) / 146097
	}
	dayOfEra := days - era*146097
	yearOfEra := (dayOfEra - dayOfEra/1460 + dayOfEra/36524 - dayOfEra/146096) / 365
	dayOfYear := dayOfEra - (365*yearOfEra + yearOfEra/4 - yearOfEra/100)
	month := (5*dayOfYear + 2) / 153
	d := Date{int(yearOfEra + era*400), time.Month(month + 3), int(dayOfYear - (153*month+2)/5 + 1)}
	if month >= 10 {
		d.Month, d.Year = d.Month-12, d.Year+1
	}
	return d
}

func TestSlotStartOnDaysWithAClockChange(t *testing.T) {
	for _, tt := range []struct {
		zone    string
		every   time.Duration
		instant string
		want    string
	}{
		{"Asia/Seoul", time.Hour, "2026-09-15T04:59:59.999999999Z", "2026-09-15T13:00+09:00"},
		{"Asia/Seoul", time.Hour, "2026-09-15T05:00:00Z", "2026-09-15T14:00+09:00"},
		{"Asia/Seoul", 24 * time.Hour, "2026-09-15T04:30:00Z", "2026-09-15T00:00+09:00"},
		{"Asia/Seoul", time.Minute, "2026-09-15T04:30:59.5Z", "2026-09-15T13:30+09:00"},
		{"UTC", time.Hour, "2026-09-15T13:30:00Z", "2026-09-15T13:00+00:00"},
		{"Asia/Kathmandu", time.Hour, "2026-09-15T13:30:00Z", "2026-09-15T19:00+05:45"},
		{"Asia/Kolkata", 30 * time.Minute, "2026-09-15T13:29:59Z", "2026-09-15T18:30+05:30"},
		{"Pacific/Marquesas", 6 * time.Hour, "2026-09-15T09:29:59Z", "2026-09-14T18:00-09:30"},
		// the hour that is left out
		{"America/New_York", time.Hour, "2026-03-08T06:59:59Z", "2026-03-08T01:00-05:00"},
		{"America/New_York", time.Hour, "2026-03-08T07:00:00Z", "2026-03-08T03:00-04:00"},
		{"America/New_York", 2 * time.Hour, "2026-03-08T07:30:00Z", "2026-03-08T00:00-05:00"}, // 02:00 does not occur
		{"America/New_York", 2 * time.Hour, "2026-03-08T08:00:00Z", "2026-03-08T04:00-04:00"},
		{"America/New_York", 30 * time.Minute, "2026-03-08T07:00:00Z", "2026-03-08T03:00-04:00"},
		// the hour that occurs twice
		{"America/New_York", time.Hour, "2026-11-01T05:30:00Z", "2026-11-01T01:00-04:00"},
		{"America/New_York", time.Hour, "2026-11-01T06:30:00Z", "2026-11-01T01:00-05:00"},
		{"America/New_York", 2 * time.Hour, "2026-11-01T06:30:00Z", "2026-11-01T00:00-04:00"},
		{"Europe/Berlin", time.Hour, "2024-10-27T00:05:00Z", "2024-10-27T02:00+02:00"},
		{"Europe/Berlin", time.Hour, "2024-10-27T01:05:00Z", "2024-10-27T02:00+01:00"},
		{"Asia/Beirut", 24 * time.Hour, "2017-10-28T20:59:59Z", "2017-10-28T00:00+03:00"}, // back from 24:00 to 23:00
		{"Asia/Beirut", 24 * time.Hour, "2017-10-28T21:30:00Z", "2017-10-28T00:00+03:00"},
		{"America/Havana", 24 * time.Hour, "2026-11-01T04:30:00Z", "2026-11-01T00:00-04:00"}, // back from 01:00 to 00:00
		{"America/Havana", 24 * time.Hour, "2026-11-01T05:00:00Z", "2026-11-01T00:00-05:00"},
		// half an hour
		{"Australia/Lord_Howe", time.Hour, "2026-10-03T15:29:59Z", "2026-10-04T01:00+10:30"},
		{"Australia/Lord_Howe", time.Hour, "2026-10-03T15:30:00Z", "2026-10-04T01:00+10:30"}, // 02:00 is 02:30
		{"Australia/Lord_Howe", 30 * time.Minute, "2026-10-03T15:30:00Z", "2026-10-04T02:30+11:00"},
		{"Australia/Lord_Howe", 30 * time.Minute, "2026-04-04T14:45:00Z", "2026-04-05T01:30+11:00"},
		{"Australia/Lord_Howe", 30 * time.Minute, "2026-04-04T15:00:00Z", "2026-04-05T01:30+10:30"},
		{"Australia/Lord_Howe", time.Hour, "2026-04-04T15:15:00Z", "2026-04-05T01:00+11:00"},
		// no midnight, no day
		{"America/Santiago", 24 * time.Hour, "2026-09-06T12:00:00Z", "2026-09-05T00:00-04:00"},
		{"America/Santiago", time.Hour, "2026-09-06T04:00:00Z", "2026-09-06T01:00-03:00"},
		{"Pacific/Apia", 12 * time.Hour, "2011-12-30T09:59:59Z", "2011-12-29T12:00-10:00"},
		{"Pacific/Apia", 12 * time.Hour, "2011-12-30T10:00:00Z", "2011-12-31T00:00+14:00"},
		// offsets with seconds
		{"Asia/Seoul", time.Hour, "1900-01-01T00:00:00Z", "1900-01-01T08:00+08:27:52"},
		{"Africa/Monrovia", time.Hour, "1971-12-31T23:59:59Z", "1971-12-31T23:00-00:44:30"},
		// a table that ends within the year
		{"America/Ciudad_Juarez", 24 * time.Hour, "2022-11-30T06:30:00Z", "2022-11-29T00:00-06:00"},
	} {
		instant, err := time.Parse(time.RFC3339Nano, tt.instant)
		if err != nil {
			t.Fatal(err)
		}
		zone := loadZone(t, tt.zone)
		got := slotStart(instant, zone, tt.every)
		if slotLabel(got) != tt.want {
			t.Errorf("slot of %s every %s in %s = %s; want %s", tt.instant, tt.every, tt.zone, slotLabel(got), tt.want)
		}
		if got.Location() != zone {
			t.Errorf("the slot of %s is in %s; want %s", tt.instant, got.Location(), zone)
		}
		if again := slotStart(got, zone, tt.every); !again.Equal(got) {
			t.Errorf("the slot that starts at %s starts at %s", slotLabel(got), slotLabel(again))
		}
	}
}

// Walks the clock minute by minute, or second by second where offsets have seconds, and remembers the last reading that is
// a multiple.
func TestSlotStartAgreesWithWalkingTheClock(t *testing.T) {
	t.Parallel()
	checked := 0
	for _, tt := range []struct {
		zone string
		days []string
	}{
		{"Asia/Seoul", []string{"1954-03-21", "1961-08-10", "1988-05-08", "1988-10-09", "2026-09-15"}},
		{"America/New_York", []string{"2026-03-08", "2026-11-01"}},
		{"Europe/Berlin", []string{"1945-05-24", "2024-10-27", "2026-03-29"}},
		{"Australia/Lord_Howe", []string{"2026-04-05", "2026-10-04"}},
		{"Pacific/Chatham", []string{"2026-04-05", "2026-09-27"}},
		{"America/Santiago", []string{"2026-04-05", "2026-09-06"}},
		{"Asia/Beirut", []string{"2017-03-26", "2017-10-29"}},
		{"Africa/Cairo", []string{"2024-04-26", "2024-11-01"}},
		{"America/Havana", []string{"2026-03-08", "2026-11-01"}},
		{"Pacific/Apia", []string{"2011-12-30"}},
		{"Pacific/Kwajalein", []string{"1993-08-21"}},
		{"Asia/Kathmandu", []string{"1986-01-01", "2026-09-15"}},
		{"Antarctica/Troll", []string{"2026-03-29", "2026-10-25"}},
		{"Antarctica/Casey", []string{"2010-03-05", "2023-03-09"}},
		{"Africa/Casablanca", []string{"2026-02-15", "2026-03-22"}},
		{"America/St_Johns", []string{"1987-10-25", "1988-04-03", "2006-10-29"}},
		{"America/Ciudad_Juarez", []string{"2022-11-06", "2022-11-30"}},
		{"America/Nuuk", []string{"2023-03-26", "2023-10-29", "2024-03-31"}},
		{"Asia/Pyongyang", []string{"2015-08-15", "2018-05-05"}},
		{"America/Caracas", []string{"2007-12-09", "2016-05-01"}},
		{"Europe/Lisbon", []string{"2026-03-29", "2050-10-30"}},
		{"UTC", []string{"2026-09-15"}},
		{"Africa/Monrovia", []string{"1972-01-07"}},
		{"Asia/Seoul", []string{"1908-04-01"}},
		{"America/New_York", []string{"1883-11-18"}},
		{"Asia/Manila", []string{"1844-12-31"}},
	} {
		for _, day := range tt.days {
			checked += walkClock(t, loadZone(t, tt.zone), MustParseDate(day))
		}
	}
	t.Logf("%d instants", checked)
}

func walkClock(t *testing.T, zone *time.Location, day Date) (checked int) {
	t.Helper()
	noon := time.Date(day.Year, day.Month, day.Day, 12, 0, 0, 0, time.UTC)
	from, to := noon.Add(-36*time.Hour), noon.Add(36*time.Hour)
	step := time.Minute
	for at := from.Add(-72 * time.Hour); at.Before(to); at = at.Add(15 * time.Minute) {
		if _, offset := at.In(zone).Zone(); offset%60 != 0 {
			step = time.Second
		}
	}
	everies := []int{1, 5, 30, 48, 60, 90, 120, 180, 360, 720, 1440} // minutes
	last := make([]time.Time, len(everies))
	for at := from.Add(-72 * time.Hour); at.Before(to); at = at.Add(step) {
		hour, minute, second := at.In(zone).Clock()
		for i, every := range everies {
			if second == 0 && (hour*60+minute)%every == 0 {
				last[i] = at
			}
		}
		switch {
		case at.Before(from):
			continue
		case step == time.Minute && minute%10 != 0 && minute%10 != 9:
			continue
		case step == time.Second && (minute%10 != 0 || second != 0) && (minute%10 != 9 || second != 59) && at.Unix()%311 != 0:
			continue
		}
		for i, every := range everies {
			for _, instant := range []time.Time{at, at.Add(step - 1)} {
				got := slotStart(instant, zone, time.Duration(every)*time.Minute)
				if !got.Equal(last[i]) || got.Nanosecond() != 0 {
					t.Fatalf("slot of %s every %d min = %s; want %s", instant.In(zone), every, got, last[i].In(zone))
				}
				checked++
			}
		}
	}
	return checked
}

// Fewer instants than the walk above, but every clock change of every zone in the list over two centuries.
func TestSlotStartAtEveryClockChange(t *testing.T) {
	t.Parallel()
	for _, name := range manyZones {
		zone := loadZone(t, name)
		changes := clockChanges(zone)
		for _, change := range changes {
			for _, every := range []time.Duration{15 * time.Minute, time.Hour, 3 * time.Hour, 24 * time.Hour} {
				for _, shift := range []time.Duration{-1, 0, 1, 20 * time.Minute, 40 * time.Minute, 90 * time.Minute, 25 * time.Hour} {
					at := change.Add(shift)
					got, want := slotStart(at, zone, every), secondSlotStart(at, zone, every, changes)
					if got.Unix() != want || got.Nanosecond() != 0 {
						t.Fatalf("slot of %s every %s = %s; want %s", at.In(zone), every, got, time.Unix(want, 0).In(zone))
					}
				}
			}
		}
	}
}

// secondSlotStart goes back through the periods between changes that were found by looking at the clock.
func secondSlotStart(t time.Time, zone *time.Location, every time.Duration, changes []time.Time) int64 {
	seconds, step := t.Unix(), int64(every/time.Second)
	for _, change := range slices.Backward(changes) {
		if change.Unix() > seconds {
			continue
		}
		_, offset := time.Unix(seconds, 0).In(zone).Zone()
		for last := seconds; last >= change.Unix() && last > seconds-step; last-- {
			if (last+int64(offset))%step == 0 {
				return last
			}
			if last%60 == 0 && offset%60 == 0 {
				last -= 59 // the minutes alone can be multiples
			}
		}
		seconds = change.Unix() - 1
	}
	_, offset := time.Unix(seconds, 0).In(zone).Zone()
	for (seconds+int64(offset))%step != 0 {
		seconds--
	}
	return seconds
}

// A zone file in short form ends its table with the last irregular change and goes on by a rule. In the year of that
// change, time.Time.ZoneBounds names the change that the rule would have made before it.
func TestSlotStartWhereARuleContinuesATable(t *testing.T) {
	t.Parallel()
	change := time.Date(2022, 11, 30, 6, 0, 0, 0, time.UTC) // 00:00 -06:00 becomes 23:00 -07:00
	zone := zoneWithRule(t, -6*3600, change, -7*3600, "MST7MDT,M3.2.0,M11.1.0")
	for _, day := range []Date{{2022, 11, 6}, {2022, 11, 29}, {2022, 11, 30}, {2022, 12, 31}, {2023, 1, 1}, {2023, 3, 12}, {2023, 11, 5}, {2024, 12, 31}} {
		walkClock(t, zone, day)
	}
	bounds, _ := change.In(zone).ZoneBounds()
	t.Logf("ZoneBounds at the change: %s", bounds)
}

// zoneWithRule builds a zone that has one offset, changes to another, and from then on follows a POSIX rule.
func zoneWithRule(t *testing.T, before int32, change time.Time, after int32, rule string) *time.Location {
	t.Helper()
	header := func(transitions, types, chars uint32) []byte {
		b := append([]byte("TZif2"), make([]byte, 15)...)
		for _, n := range []uint32{0, 0, 0, transitions, types, chars} {
			b = binary.BigEndian.AppendUint32(b, n)
		}
		return b
	}
	b := append(header(0, 1, 4), 0, 0, 0, 0, 0, 0, 'U', 'T', 'C', 0) // version 1, not read
	b = append(b, header(1, 2, 8)...)
	b = binary.BigEndian.AppendUint64(b, uint64(change.Unix()))
	b = append(b, 1) // the change is to the second type
	for i, offset := range []int32{before, after} {
		b = append(binary.BigEndian.AppendUint32(b, uint32(offset)), 0, byte(4*i))
	}
	b = append(b, "OLD\x00NEW\x00\n"+rule+"\n"...)
	zone, err := time.LoadLocationFromTZData("Test/Rule", b)
	if err != nil {
		t.Fatal(err)
	}
	return zone
}

func TestSlotLabelsTellRepeatedHoursApart(t *testing.T) {
	zone := loadZone(t, "Europe/Berlin")
	seen := map[string]bool{}
	for at := time.Date(2024, 10, 26, 22, 0, 0, 0, time.UTC); at.Before(time.Date(2024, 10, 27, 23, 0, 0, 0, time.UTC)); at = at.Add(15 * time.Minute) {
		seen[slotLabel(slotStart(at, zone, time.Hour))] = true
	}
	if len(seen) != 25 || !seen["2024-10-27T02:00+02:00"] || !seen["2024-10-27T02:00+01:00"] {
		t.Errorf("the day of 25 hours has %d slots: %v", len(seen), seen)
	}
}

func TestKeysComeApart(t *testing.T) {
	for _, tt := range []struct {
		key, job, date, slot string // slot in RFC 3339 with seconds of the offset, "" for none
	}{
		{"daily-settlement:2026-09-15", "daily-settlement", "2026-09-15", ""},
		{"정산/일별:2026-09-15", "정산/일별", "2026-09-15", ""},
		{"a:0001-01-01", "a", "0001-01-01", ""},
		{"a:9999-12-31", "a", "9999-12-31", ""},
		{"inventory-sync:2026-09-15T13:00+09:00", "inventory-sync", "2026-09-15", "2026-09-15T04:00:00Z"},
		{"a:2026-09-15T00:00+00:00", "a", "2026-09-15", "2026-09-15T00:00:00Z"},
		{"a:2026-11-01T01:00-04:00", "a", "2026-11-01", "2026-11-01T05:00:00Z"},
		{"a:2026-11-01T01:00-05:00", "a", "2026-11-01", "2026-11-01T06:00:00Z"},
		{"a:2026-09-15T18:30+05:45", "a", "2026-09-15", "2026-09-15T12:45:00Z"},
		{"a:1971-12-31T23:00-00:44:30", "a", "1971-12-31", "1971-12-31T23:44:30Z"},
		{"a:1900-01-01T08:00-00:00:52", "a", "1900-01-01", "1900-01-01T08:00:52Z"},
	} {
		job, date, slot, ok := parseKey(tt.key)
		if !ok || job != tt.job || date.String() != tt.date || slot.IsZero() != (tt.slot == "") {
			t.Errorf("parseKey(%q) = %q, %v, %v, %v", tt.key, job, date, slot, ok)
		}
		if tt.slot != "" {
			if got := slot.UTC().Format(time.RFC3339); got != tt.slot {
				t.Errorf("the slot of %q is %s; want %s", tt.key, got, tt.slot)
			}
			if got := job + ":" + slotLabel(slot); got != tt.key {
				t.Errorf("%q is written back as %q", tt.key, got)
			}
		}
	}
	for _, key := range []string{
		"", ":", "a", "a:", ":2026-09-15", "a:2026-09-15 ", " a", "a:2026-02-29", "a:2026-9-15", "a:b:2026-09-15", "a::2026-09-15", "a:2026-09-15:",
		"a:2026-09-15T", "a:2026-09-15T13:00", "a:2026-09-15T13:00Z", "a:2026-09-15T13:00+0900", "a:2026-09-15T13:00+09", "a:2026-09-15T13:00:00+09:00",
		"a:2026-09-15T13:00+09:00:00", "a:2026-09-15T13:00-00:00", "a:2026-09-15T24:00+09:00", "a:2026-09-15T13:60+09:00", "a:2026-09-15T13:00+09:60",
		"a:2026-09-15T13:00+25:00", "a:2026-02-29T13:00+09:00", "a:0000-12-31T13:00+09:00", "a:10000-01-01T13:00+09:00", "a:2026-09-15t13:00+09:00",
		"a:2026-09-15 13:00+09:00", "a:2026-09-15T13:00+09:00 ", "a:2026-09-15T13:00+09:00+", "a:2026-09-15T3:00+09:000", "a:2026-09-15T13:00−09:00",
		"a:２０２６-０９-１５", "a:2026-09-15T13:00.5+09:0", "a:2026-09-15T13:00+09:00:60", "20260915-settle",
	} {
		if job, date, slot, ok := parseKey(key); ok || job != "" || date != (Date{}) || !slot.IsZero() {
			t.Errorf("parseKey(%q) = %q, %v, %v, %v; want nothing", key, job, date, slot, ok)
		}
	}
}

func TestEverySlotLabelReadsBack(t *testing.T) {
	t.Parallel()
	for _, name := range append([]string{"UTC"}, manyZones...) {
		zone := loadZone(t, name)
		for _, change := range clockChanges(zone) {
			for _, shift := range []time.Duration{-time.Hour, 0, time.Hour} {
				start := slotStart(change.Add(shift), zone, 15*time.Minute)
				job, date, slot, ok := parseKey("j:" + slotLabel(start))
				if !ok || job != "j" || date != DateOf(start) || !slot.Equal(start) || slotLabel(slot) != slotLabel(start) {
					t.Fatalf("%s reads back as %q, %v, %v, %v", slotLabel(start), job, date, slot, ok)
				}
			}
		}
	}
}

// A program in an image without zone data either carries the data or is told so: it never goes on in UTC.
func TestImageWithoutZoneData(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds two programs")
	}
	chroot, err := exec.LookPath("chroot")
	if err != nil || os.Geteuid() != 0 || runtime.GOOS != "linux" {
		t.Skip("needs chroot, and root, on Linux")
	}
	image := t.TempDir()
	for _, tt := range []struct{ name, imports, want string }{
		{"with", `_ "time/tzdata"`, "2026-07-27\n"},
		{"without", ``, "unknown time zone Asia/Seoul\n"},
	} {
		source := filepath.Join(t.TempDir(), "main.go")
		program := `package main

import (
	"fmt"
	"time"
	` + tt.imports + `

	"github.com/seed-ccb5b62c/jobrun"
)

func main() {
	zone, err := time.LoadLocation("Asia/Seoul")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(jobrun.DateOf(time.Date(2026, 7, 26, 15, 0, 0, 0, time.UTC).In(zone)))
}
`
		if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
			t.Fatal(err)
		}
		build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(image, tt.name), source)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
		run := exec.CommandContext(t.Context(), chroot, image, "/"+tt.name)
		run.Env = []string{"TZ="}
		if out, err := run.CombinedOutput(); err != nil || string(out) != tt.want {
			t.Errorf("%s zone data: %q, %v; want %q", tt.name, out, err, tt.want)
		}
	}
	if _, err := os.Stat(filepath.Join(image, "usr")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image is not empty: %v", err)
	}
}

func FuzzParseDate(f *testing.F) {
	for _, s := range []string{
		"2026-09-15", "2028-02-29", "2026-02-29", "2000-02-29", "2100-02-29", "0001-01-01", "0000-01-01", "9999-12-31", "10000-01-01", "2026-2-9",
		"２０２６-０１-０１", "2026-01-01T00:00:00Z", "infinity", "", "2026-01-01\x00", "-001-01-01", "+026-01-01",
	} {
		f.Add(s)
	}
	shape := regexp.MustCompile(`\A([0-9]{4})-([0-9]{2})-([0-9]{2})\z`)
	f.Fuzz(func(t *testing.T, s string) {
		d, err := ParseDate(s)
		var year, month, day int
		want := shape.MatchString(s)
		if want {
			if _, err := fmt.Sscanf(s, "%d-%d-%d", &year, &month, &day); err != nil {
				t.Fatal(err)
			}
			want = year >= 1 && month >= 1 && month <= 12 && day >= 1 && day <= daysIn(year, time.Month(month))
		}
		if (err == nil) != want {
			t.Fatalf("ParseDate(%q) = %v, %v; want a date: %v", s, d, err, want)
		}
		if err == nil && (d != Date{year, time.Month(month), day} || d.String() != s || !d.IsValid()) {
			t.Fatalf("ParseDate(%q) = %#v", s, d)
		}
		if err != nil && (d != Date{} || !strings.Contains(err.Error(), fmt.Sprintf("%q", s))) {
			t.Fatalf("ParseDate(%q) = %v, %v", s, d, err)
		}
	})
}

func FuzzParseKey(f *testing.F) {
	for _, s := range []string{
		"daily-settlement:2026-09-15", "inventory-sync:2026-09-15T13:00+09:00", "a:1971-12-31T23:00-00:44:30", "a:2026-09-15T13:00Z",
		"a:2026-09-15T13:00-00:00", "정산:2026-09-15", "a:b:2026-09-15", ":2026-09-15", "a:", "", "a:2026-09-15T13:00+09:00:00", "a:0001-01-01T00:00+00:00",
		"a:2026-09-15T13:00+24:00", "a:2026-09-15T13:00-00:00:52",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, key string) {
		job, date, slot, ok := parseKey(key)
		if want := isKey(key); ok != want {
			t.Fatalf("parseKey(%q): %t, want %t", key, ok, want)
		}
		if !ok {
			if job != "" || date != (Date{}) || !slot.IsZero() {
				t.Fatalf("parseKey(%q) = %q, %v, %v beside false", key, job, date, slot)
			}
			return
		}
		if job == "" || strings.Contains(job, ":") || !date.IsValid() {
			t.Fatalf("parseKey(%q) = %q, %v, %v", key, job, date, slot)
		}
		label := date.String()
		if len(key) > len(job)+1+len(label) {
			label = slotLabel(slot)
			if DateOf(slot) != date || slot.Second() != 0 || slot.Nanosecond() != 0 {
				t.Fatalf("parseKey(%q): slot %v, date %v", key, slot, date)
			}
		}
		if got := job + ":" + label; got != key {
			t.Fatalf("parseKey(%q) is written back as %q", key, got)
		}
	})
}

var keyShape = regexp.MustCompile(`\A([0-9]{4})-([0-9]{2})-([0-9]{2})(?:T([0-9]{2}):([0-9]{2})([+-])([0-9]{2}):([0-9]{2})(?::([0-9]{2}))?)?\z`)

// isKey judges a key by its shape and the ranges of its numbers.
func isKey(key string) bool {
	job, label, _ := strings.Cut(key, ":")
	m := keyShape.FindStringSubmatch(label)
	if job == "" || m == nil {
		return false
	}
	n := make([]int, len(m)) // those that are no number, or not there, are 0
	for i := range m {
		n[i], _ = strconv.Atoi(m[i])
	}
	year, month, day, hour, minute, ahead, hours, minutes, seconds := n[1], n[2], n[3], n[4], n[5], m[6] == "+", n[7], n[8], n[9]
	if year < 1 || month < 1 || month > 12 || day < 1 || day > daysIn(year, time.Month(month)) {
		return false
	}
	utc := m[6] == "" || ahead || hours+minutes+seconds > 0 // zero is written +00:00
	return hour <= 23 && minute <= 59 && hours <= 24 && minutes <= 59 && seconds <= 59 && utc && (m[9] == "" || seconds > 0)
}

// manyZones have had changes of many kinds: by half hours, by 20 minutes, over midnight, of a whole day, and offsets with
// minutes or seconds.
var manyZones = []string{
	"Asia/Seoul", "Asia/Pyongyang", "Asia/Tokyo", "America/New_York", "Europe/Berlin", "Europe/London", "Europe/Dublin", "Europe/Amsterdam",
	"Australia/Lord_Howe", "Pacific/Chatham", "America/Santiago", "America/Asuncion", "America/Havana", "Asia/Beirut", "Africa/Cairo", "Pacific/Apia",
	"Pacific/Kiritimati", "Pacific/Kwajalein", "Pacific/Marquesas", "Asia/Kathmandu", "Asia/Kolkata", "Asia/Tehran", "Asia/Kabul", "Asia/Gaza",
	"Africa/Monrovia", "Africa/Casablanca", "America/St_Johns", "America/Caracas", "America/Ciudad_Juarez", "America/Nuuk", "America/Sao_Paulo",
	"America/Juneau", "Antarctica/Troll", "Antarctica/Casey", "Asia/Manila", "Asia/Singapore", "Europe/Moscow", "Europe/Lisbon", "Atlantic/Azores",
	"Etc/GMT-14", "Etc/GMT+12",
}

// clockChanges returns the instants from 1840 to 2060 at which zone changes its offset. No two are within two days.
func clockChanges(zone *time.Location) []time.Time {
	found, _ := clockChangesByZone.LoadOrStore(zone.String(), sync.OnceValue(func() (changes []time.Time) {
		const step = 2 * 24 * time.Hour
		at := time.Date(1840, 1, 1, 0, 0, 0, 0, time.UTC)
		offsetAt := func(t time.Time) int { _, offset := t.In(zone).Zone(); return offset }
		for before := offsetAt(at); at.Year() < 2060; at = at.Add(step) {
			if offset := offsetAt(at); offset != before {
				low, high := at.Add(-step).Unix(), at.Unix()
				for high-low > 1 {
					if middle := (low + high) / 2; offsetAt(time.Unix(middle, 0)) == before {
						low = middle
					} else {
						high = middle
					}
				}
				changes = append(changes, time.Unix(high, 0))
				before = offset
			}
		}
		return changes
	}))
	return found.(func() []time.Time)()
}

var clockChangesByZone sync.Map // of func() []time.Time

func daysIn(year int, month time.Month) int {
	switch month {
	case time.April, time.June, time.September, time.November:
		return 30
	case time.February:
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

func loadZone(t testing.TB, name string) *time.Location {
	t.Helper()
	zone, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return zone
}
