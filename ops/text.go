package ops

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// table is lines of cells under a head. The first cell names the line and is
// never cut; the last one is free text.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) {
	for i, cell := range cells {
		cells[i] = visible(cell, "")
	}
	t.rows = append(t.rows, cells)
}

// print writes the table into so many columns of a terminal; 0: any number. If it
// is too narrow, the last cells are cut, and if that is not enough, the first and the
// last cell of each row get a line of their own.
func (t *table) print(w io.Writer, columns int) {
	const gap, least = 2, 16 // least: of the last cell
	widths := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], width(cell))
		}
	}
	last := len(widths) - 1
	room := columns
	for _, n := range widths[:last] {
		room -= n + gap
	}
	if columns == 0 {
		room = widths[last]
	}
	narrow := room < min(least, widths[last])
	for i, row := range append([][]string{t.head}, t.rows...) {
		var line strings.Builder
		cells := row[:last]
		if narrow {
			if cells = row[1:last]; i > 0 {
				fmt.Fprintln(w, row[0])
			}
			line.WriteString(strings.Repeat(" ", gap))
		}
		for n, cell := range cells {
			line.WriteString(cell + strings.Repeat(" ", widths[n+last-len(cells)]-width(cell)+gap))
		}
		if !narrow {
			line.WriteString(cut(row[last], room))
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
		if narrow && i > 0 && row[last] != "" {
			fmt.Fprintln(w, strings.Repeat(" ", gap)+cut(row[last], max(least, columns-gap)))
		}
	}
}

// fields writes names and texts; what does not fit into the columns goes on below.
func fields(w io.Writer, columns int, lines ...[2]string) {
	widest := 0
	for _, l := range lines {
		widest = max(widest, width(l[0]))
	}
	indent := strings.Repeat(" ", widest+2)
	for _, l := range lines {
		text := wrap(visible(strings.TrimRight(l[1], "\n"), "\n\t"), columns-len(indent)*min(1, columns))
		fmt.Fprintf(w, "%s%s%s\n", l[0], indent[width(l[0]):], strings.ReplaceAll(text, "\n", "\n"+indent))
	}
}

// wrap breaks lines so that none takes more than n columns, at spaces if it has
// some; of no terminal (n is 0 or less): not at all.
func wrap(text string, n int) string {
	if n <= 0 {
		return text
	}
	n = max(n, 16)
	var b strings.Builder
	for i, line := range strings.Split(text, "\n") {
		if i > 0 {
			b.WriteByte('\n')
		}
		if width(line) <= n {
			b.WriteString(line)
			continue
		}
		used := 0
		for i, word := range strings.Split(line, " ") {
			switch size := width(word); {
			case i == 0:
			case used+1+size > n:
				b.WriteByte('\n')
				used = 0
			default:
				b.WriteByte(' ')
				used++
			}
			for _, c := range word {
				if used+runeWidth(c) > n { // longer than a line
					b.WriteByte('\n')
					used = 0
				}
				b.WriteRune(c)
				used += runeWidth(c)
			}
		}
	}
	return b.String()
}

// shows reports whether a character can be seen: control characters, those that
// reorder letters, and those that take no room or are blank although they count as
// letters cannot.
func shows(c rune) bool {
	return unicode.IsPrint(c) && c != 0x2800 && !unicode.In(c, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// visible is a text that any program may have written, safe to show: what could
// move the cursor, change colours, reorder letters or hide is shown as its code. Plain
// characters named in keep stay.
func visible(s, keep string) string {
	shown := func(c rune) bool { return shows(c) || strings.ContainsRune(keep, c) }
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(c rune) bool { return !shown(c) }) {
		return s
	}
	var b strings.Builder
	for i, c := range s {
		switch {
		case c == utf8.RuneError && !strings.HasPrefix(s[i:], string(utf8.RuneError)):
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case shown(c):
			b.WriteRune(c)
		case c == '\n':
			b.WriteString(`\n`)
		case c < 0x100:
			fmt.Fprintf(&b, `\x%02x`, c)
		default:
			fmt.Fprintf(&b, `\u%04x`, c)
		}
	}
	return b.String()
}

// quoted is a key as a shell takes it, the last argument of a command.
func quoted(key string) string {
	text := key
	switch {
	case strings.ContainsFunc(key, func(c rune) bool { return !shows(c) }) || !utf8.ValidString(key):
		text = "$'"
		for _, b := range []byte(key) {
			switch {
			case b == '\'' || b == '\\':
				text += `\` + string(rune(b))
			case b >= 0x20 && b < 0x7f:
				text += string(rune(b))
			default:
				text += fmt.Sprintf(`\x%02x`, b)
			}
		}
		text += "'"
	case key == "" || strings.ContainsFunc(key, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("._-/:+", c)
	}):
		text = "'" + strings.ReplaceAll(key, "'", `'\''`) + "'"
	}
	if strings.HasPrefix(key, "-") {
		text = "-- " + text
	}
	return text
}

// cut is s in at most n columns, with a mark if something is missing.
func cut(s string, n int) string {
	if width(s) <= n {
		return s
	}
	used := 0
	for i, c := range s {
		if used += runeWidth(c); used > n-1 {
			return s[:i] + "…"
		}
	}
	return s
}

// width is how many columns of a terminal a text takes.
func width(s string) int {
	n := 0
	for _, c := range s {
		n += runeWidth(c)
	}
	return n
}

// wide are the letters that take two columns: those that Unicode's EastAsianWidth
// calls wide or full width, in whole blocks (UAX #11).
var wide = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x1100, 0x115f, 1},
		{0x231a, 0x231b, 1},
		{0x23e9, 0x23ec, 1},
		{0x2614, 0x2615, 1},
		{0x26a1, 0x26a1, 1},
		{0x2705, 0x2705, 1},
		{0x274c, 0x274c, 1},
		{0x2753, 0x2755, 1},
		{0x2e80, 0x303e, 1},
		{0x3041, 0x33ff, 1},
		{0x3400, 0x4dbf, 1},
		{0x4e00, 0xa4cf, 1},
		{0xa960, 0xa97c, 1},
		{0xac00, 0xd7a3, 1},
		{0xf900, 0xfaff, 1},
		{0xfe30, 0xfe6f, 1},
		{0xff01, 0xff60, 1},
		{0xffe0, 0xffe6, 1},
	},
	R32: []unicode.Range32{
		{0x16fe0, 0x18dff, 1},
		{0x1b000, 0x1b2ff, 1},
		{0x1f300, 0x1f64f, 1},
		{0x1f680, 0x1f6ff, 1},
		{0x1f900, 0x1f9ff, 1},
		{0x1fa70, 0x1faff, 1},
		{0x20000, 0x2fffd, 1},
		{0x30000, 0x3fffd, 1},
	},
}

func runeWidth(c rune) int {
	switch {
	case c < 0x300:
		return 1
	case unicode.In(c, unicode.Mn, unicode.Me, unicode.Cf), c >= 0x1160 && c <= 0x11ff: // combining letters
		return 0
	case unicode.Is(wide, c):
		return 2
	}
	return 1
}

// print writes JSON in which a terminal finds nothing to obey.
func (c *command) print(v any) error {
	c.told = true
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(v); err != nil {
		return err
	}
	var safe strings.Builder
	for _, r := range b.String() { // what is not printable can only be within a string
		switch {
		case shows(r) || r == '\n':
			safe.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&safe, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&safe, `\u%04x`, r)
		}
	}
	_, err := io.WriteString(c.out, safe.String())
	return err
}
