package jobrun

import (
	"context"
	"crypto/sha1"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
	"github.com/seed-ccb5b62c/jobrun/internal/store"
)

func idle(context.Context, *Run) error { return nil }

// refusal judges the error about a value: it says which, in one bounded line that
// a log can hold.
func refusal(t *testing.T, err error, field, value string) {
	t.Helper()
	var invalid *InvalidError
	if !errors.As(err, &invalid) || invalid.Field != field || invalid.Value != value {
		t.Fatalf("%s %.100q: %v", field, value, err)
	}
	text := err.Error()
	if len(text) > 200*len(`\U0001f600`)+300 || !utf8.ValidString(text) || strings.ContainsFunc(text, func(c rune) bool { return !unicode.IsPrint(c) }) {
		t.Errorf("%s: the error is no plain line: %q", field, text)
	}
}

var nameShape = regexp.MustCompile(`\A[\pL\p{Nd}._/-]{1,80}\z`)

// A name is taken exactly when it has the shape that the documentation says, and
// then its keys are the name's and the date's alone, fit the column, and say both.
func FuzzJobName(f *testing.F) {
	for i, name := range []string{
		"daily-settlement", "정산/일별", "a.b_c-d/e", "", " ", "a:b", "a b", "a\x00", "a\xff", "a\u202e", "a\u3164", "a\u1160", "\u0301", "a\u0301", "a\u200d", "a\u200b",
		"\U0001F600", "٣", "Ⅷ", "²", "ª", "'; DROP TABLE batch_job_run; --", `a\`, `a"`, "a%", "a$1", "a\n", "\ufeff", "\ufffd", strings.Repeat("a", 80), strings.Repeat("a", 81),
		strings.Repeat("\U00020000", 80), strings.Repeat("\U00020000", 81), strings.Repeat("a", 79) + "\xed\xa0\x80",
	} {
		f.Add(name, 1+i*300, 1+i, i*17, int64(i*1_000_000_007))
	}
	f.Fuzz(func(t *testing.T, name string, year, month, day int, unix int64) {
		job := Job{Name: name, Func: idle}
		err := job.Validate()
		want := utf8.ValidString(name) && nameShape.MatchString(name) && !strings.ContainsAny(name, "\u115F\u1160\u3164\uFFA0")
		if (err == nil) != want {
			t.Fatalf("Validate of %q: %v; allowed: %t", name, err, want)
		}
		if err != nil {
			refusal(t, err, "Job.Name", name)
			return
		}
		d := Date{1 + mod(year, 9999), time.Month(1 + mod(month, 12)), 1 + mod(day, 28)}
		key := job.Key(d)
		if gotName, got, slot, ok := parseKey(key); !ok || gotName != name || got != d || !slot.IsZero() {
			t.Errorf("key %q says %q, %s, %s, %t", key, gotName, got, slot, ok)
		}
		const first, last = -62_135_596_800 + 2*secondsPerDay, 253_402_300_799 - 2*secondsPerDay
		offset := mod(year, 2*25*3600-1) - (25*3600 - 1) // as far as a time can be written
		start := time.Unix(first+int64(mod(int(unix), last-first)), 0).In(time.FixedZone("", offset)).Truncate(time.Minute)
		start = start.Add(-time.Duration(start.Second()) * time.Second) // whole minutes of its own clock
		slotKey := name + ":" + slotLabel(start)
		if gotName, got, slot, ok := parseKey(slotKey); !ok || gotName != name || got != DateOf(start) || !slot.Equal(start) {
			t.Errorf("key %q says %q, %s, %s, %t; want %s", slotKey, gotName, got, slot, ok, start)
		}
		for _, k := range []string{key, slotKey} {
			if utf8.RuneCountInString(k) > 120 || !utf8.ValidString(k) || strings.ContainsRune(k, 0) || store.CleanText(k) != k {
				t.Errorf("key %q does not fit varchar(120)", k)
			}
		}
	})
}

// mod is n modulo m, never negative.
func mod(n, m int) int { return (n%m + m) % m }

// Every character that a name may have is one character to PostgreSQL and comes
// back as the same, also in names of the greatest length.
func TestNamesFitTheirColumns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var names []string
	var name []rune
	for c := rune(0); c <= unicode.MaxRune; c++ {
		if utf8.ValidRune(c) && validName(string(c)) == nil {
			name = append(name, c)
		}
		if len(name) == maxName || c == unicode.MaxRune && len(name) > 0 {
			names = append(names, string(name))
			name = name[:0]
		}
	}
	var keys []string
	for _, name := range names {
		if err := validName(name); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, name+":9999-12-31T23:59+24:59:59")
	}
	if len(names) < 1000 {
		t.Fatalf("%d names", len(names))
	}
	if _, err := db.Pool.Exec(t.Context(), `INSERT INTO batch_job_run (job_key, status, worker_id, job_name)
		SELECT k, 'FAILED', 'node-1', n FROM unnest($1::text[], $2::text[]) AS u (k, n)`, keys, names); err != nil {
		t.Fatal(err)
	}
	var same int
	if err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM unnest($1::text[], $2::text[]) AS u (k, n) JOIN batch_job_run
		ON job_key = k AND convert_to(job_key, 'UTF8') = convert_to(k, 'UTF8') AND convert_to(job_name, 'UTF8') = convert_to(n, 'UTF8')`, keys, names).Scan(&same); err != nil || same != len(names) {
		t.Errorf("%d of %d names came back: %v", same, len(names), err)
	}
}

// An item's key is taken exactly when a text column and an index hold it, and
// its idempotency key is that of RFC 9562 for this run and item alone.
func FuzzItemKey(f *testing.F) {
	for _, s := range [][4]string{
		{"pay", "order-1", "pay", "order-1"},
		{"pay", "order-1", "pay", "order-2"},
		{"pay", "order-1", "paid", "order-1"},
		{"pay", "", "pay", "\x00"},
		{"pay", "\x00a", "pay", "a"},
		{"a", "b:2026-09-15", "a.b", ":2026-09-15"},
		{"pay", "\xff", "pay", "\xfe"},
		{"정산", "주문 1", "정산", "주문\u00a01"},
		{"pay", "é", "pay", "e\u0301"},
		{"pay", strings.Repeat("a", 1024), "pay", strings.Repeat("a", 1025)},
		{"pay", strings.Repeat("한", 341) + "a", "pay", strings.Repeat("한", 342)},
		{"pay", `'; DROP TABLE batch_job_item; --`, "pay", `\`},
	} {
		f.Add(s[0], s[1], s[2], s[3])
	}
	f.Fuzz(func(t *testing.T, job, item, otherJob, otherItem string) {
		for _, item := range []string{item, otherItem} {
			err := validItem("item", item)
			want := len(item) >= 1 && len(item) <= 1024 && item == store.CleanText(item)
			if (err == nil) != want {
				t.Fatalf("item %.100q of %d bytes: %v", item, len(item), err)
			}
			if err != nil {
				refusal(t, err, "item", item)
			}
		}
		if validName(job) != nil || validName(otherJob) != nil {
			return
		}
		d := Date{2026, time.September, 15}
		one := &Run{record: Record{Key: Job{Name: job}.Key(d), Attempt: 1}}
		later := &Run{record: Record{Key: one.Key(), Attempt: 2, Trigger: TriggerRerun}}
		other := &Run{record: Record{Key: Job{Name: otherJob}.Key(d), Attempt: 1}}
		key := one.IdempotencyKey(item)
		if again := later.IdempotencyKey(item); again != key {
			t.Errorf("attempt 2 has %s for %q, attempt 1 %s", again, item, key)
		}
		if same := other.IdempotencyKey(otherItem) == key; same != (job == otherJob && item == otherItem) {
			t.Errorf("%s %q and %s %q: the same: %t", one.Key(), item, other.Key(), otherItem, same)
		}
		sum := sha1.Sum(append(append([]byte("\x6f\x1d\x6a\x52\x3f\x0b\x4c\x0e\x9d\x0a\x5c\x6f\x3a\x1e\x7b\x84"+one.Key()), 0), item...))
		sum[6], sum[8] = sum[6]&0x0F|0x50, sum[8]&0x3F|0x80
		if want := uuid.UUID(sum[:16]); key != want {
			t.Errorf("%s %q has %s, want %s", one.Key(), item, key, want)
		}
	})
}
