package store

import (
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// Whatever an error says, what is stored of it is text that PostgreSQL takes, of a
// bounded size, and says what it said at its beginning and at its end.
func FuzzErrorText(f *testing.F) {
	f.Add("boom", uint16(0), "")
	f.Add("nul \x00, broken \xff\xfe, half \xe2\x82", uint16(1), "\xf0\x9f")
	f.Add("정산 실패", uint16(900), "cause: disk full")
	f.Add("a", uint16(MaxText), "")
	f.Add("a", uint16(MaxText-1), "b")
	f.Add("\x00", uint16(MaxText/3), "\u202e\x1b[31m")
	f.Add("\xed\xa0\x80\xf4\x90\x80\x80", uint16(2000), "\xc0\x80\n\\\"'")
	f.Add("✅", uint16(MaxText/3), "é")
	f.Fuzz(func(t *testing.T, part string, times uint16, end string) {
		if len(part)*int(times)+len(end) > 8*MaxText {
			return
		}
		text := strings.Repeat(part, int(times)) + end
		got := CleanText(text)
		valid := storable(text)
		checkText(t, text, got, valid)
		if again := CleanText(got); again != got {
			t.Errorf("cleaned again, %.100q becomes %.100q", got, again)
		}

		ascii := ASCII(text)
		escaped := strconv.QuoteToASCII(text)
		escaped = escaped[1 : len(escaped)-1]
		checkText(t, text, ascii, escaped)
		for i := range len(ascii) {
			if c := ascii[i]; c >= 0x7F || c < ' ' && c != '\n' {
				t.Fatalf("ASCII(%.100q) has %q", text, c)
			}
		}
		if len(escaped) <= MaxText {
			if back, err := strconv.Unquote(`"` + ascii + `"`); err != nil || back != text {
				t.Errorf("%.100q comes back from ASCII as %.100q, %v", text, back, err)
			}
		}
	})
}

// checkText judges got, what is stored of a text that is whole in whole.
func checkText(t *testing.T, text, got, whole string) {
	t.Helper()
	if !utf8.ValidString(got) || strings.ContainsRune(got, 0) || len(got) > MaxText {
		t.Fatalf("%.100q is stored as %d bytes, %.100q", text, len(got), got)
	}
	if len(whole) <= MaxText {
		if got != whole {
			t.Fatalf("%.100q is stored as %.100q, want %.100q", text, got, whole)
		}
		return
	}
	const gap = "\n[...]\n"
	least := MaxText - len(gap) - 1 - 2*(utf8.UTFMax-1) // less a byte, and the rest of a character on both sides
	for cut := range len(got) {                         // where a gap stands is for the texts on both sides to say
		if strings.HasPrefix(got[cut:], gap) {
			head, tail := got[:cut], got[cut+len(gap):]
			if len(head)+len(tail) >= least && len(head) > len(tail) && len(tail) >= MaxText/5 &&
				strings.HasPrefix(whole, head) && strings.HasSuffix(whole, tail) {
				return
			}
		}
	}
	t.Fatalf("of %d bytes, %.100q, not both ends are kept: %.100q", len(whole), whole, got)
}

// storable is text with U+FFFD for each NUL and for each run of bytes that are no
// character.
func storable(text string) string {
	var b strings.Builder
	broken := false
	for len(text) > 0 {
		c, size := utf8.DecodeRuneInString(text)
		bad := c == utf8.RuneError && size == 1
		switch {
		case bad && broken:
		case bad, c == 0:
			b.WriteRune(utf8.RuneError)
		default:
			b.WriteString(text[:size])
		}
		broken = bad
		text = text[size:]
	}
	return b.String()
}
