package ops

import (
	"bytes"
	"strings"
	"testing"
)

func TestWidth(t *testing.T) {
	for text, want := range map[string]int{
		"settlement": 10, "정산": 4, "日次精算": 8, "e\u0301": 1, "\u1112\u1161\u11ab": 2, "ＡＢ": 4, "…": 1, "": 0, "✅ ok": 5, "🙂": 2, "|é|": 3,
	} {
		if got := width(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

func TestCutNeverSplitsAWideLetter(t *testing.T) {
	for n := 1; n < 12; n++ {
		if got := cut("정산 settlement", n); width(got) > n {
			t.Errorf("%d: %q takes %d", n, got, width(got))
		}
	}
	if got := cut("정산", 4); got != "정산" {
		t.Error(got)
	}
	if got := cut("정산정산", 4); got != "정…" {
		t.Error(got)
	}
}

func TestTableFits(t *testing.T) {
	fill := func() *table {
		tb := &table{head: []string{"KEY", "STATUS", "NOTE"}}
		tb.add("daily-settlement:2026-09-15", "SUCCEEDED", "")
		tb.add("일일정산:2026-09-15", "FAILED", "환율 표가 아직 없습니다: "+strings.Repeat("rates are missing ", 10))
		return tb
	}
	for columns, lines := range map[int]int{200: 3, 80: 3, 50: 6, 30: 6} {
		var out bytes.Buffer
		fill().print(&out, columns)
		all := strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
		if len(all) != lines {
			t.Errorf("%d columns: %d lines, want %d\n%s", columns, len(all), lines, out.String())
		}
		for _, line := range all {
			if width(line) > columns && !strings.HasPrefix(line, "daily-settlement") {
				t.Errorf("%d columns: %d in %q", columns, width(line), line)
			}
		}
		if !strings.Contains(out.String(), "daily-settlement:2026-09-15") || !strings.Contains(out.String(), "일일정산:2026-09-15") {
			t.Errorf("%d columns: a key is cut\n%s", columns, out.String())
		}
	}
	var out bytes.Buffer
	fill().print(&out, 0)
	if strings.Contains(out.String(), "…") || strings.Count(out.String(), "rates are missing") != 10 {
		t.Errorf("cut without a terminal\n%s", out.String())
	}
	first := strings.Split(out.String(), "\n")
	if at := strings.Index(first[1], "SUCCEEDED"); width(first[2][:strings.Index(first[2], "FAILED")]) != at {
		t.Errorf("columns are not aligned\n%s", out.String())
	}
}

func TestVisible(t *testing.T) {
	for text, want := range map[string]string{
		"정산 ok": "정산 ok", "\x1b[2J": `\x1b[2J`, "\u009b": `\x9b`, "\u202e": `\u202e`, "a\nb": `a\nb`, "\xff": `\xff`, "\ufffd": "\ufffd", "\u200b": `\u200b`,
	} {
		if got := visible(text, ""); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	if got := visible("a\n\tb\r", "\n\t"); got != "a\n\tb\\x0d" {
		t.Errorf("%q", got)
	}
}

func TestQuoted(t *testing.T) {
	for key, want := range map[string]string{
		"daily-settlement:2026-09-15": "daily-settlement:2026-09-15", "정산:2026-09-15T13:00+09:00": "정산:2026-09-15T13:00+09:00",
		"a b": "'a b'", "it's": `'it'\''s'`, "-x:2026-09-15": "-- -x:2026-09-15", "": "''",
	} {
		if got := quoted(key); got != want {
			t.Errorf("%q: %s, want %s", key, got, want)
		}
	}
}

func TestWrapKeepsEveryWord(t *testing.T) {
	const text = "환율 표가 아직 없습니다: rates are missing\n\tsecond  line of some length"
	for n := range 60 {
		got := wrap(text, n)
		if strings.Join(strings.Fields(got), " ") != strings.Join(strings.Fields(text), " ") {
			t.Errorf("%d: %q", n, got)
		}
		for line := range strings.SplitSeq(got, "\n") {
			if n > 16 && width(line) > n {
				t.Errorf("%d: %d columns in %q", n, width(line), line)
			}
		}
	}
}
