package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/seed-ccb5b62c/jobrun"
)

// printer prints for people, whole pieces at a time from any goroutine. That
// nobody listens any more is no reason to stop before the end.
type printer struct {
	mu sync.Mutex
	w  io.Writer
}

func (p *printer) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.w, format, args...)
}

// printRuns prints runs as they are recorded; their times are in the Runner's zone.
func printRuns(out *printer, records []jobrun.Record) {
	rows := [][]string{{"KEY", "STATUS", "WORKER", "ATTEMPT", "STARTED", "FINISHED", "ITEMS"}}
	for _, r := range records {
		finished := ""
		if !r.FinishedAt.IsZero() {
			finished = r.FinishedAt.Format("15:04:05.000")
		}
		rows = append(rows, []string{
			r.Key, string(r.Status), r.WorkerID, strconv.Itoa(r.Attempt),
			r.StartedAt.Format("2006-01-02 15:04:05.000"), finished, thousands(r.ItemsProcessed),
		})
	}
	printTable(out, rows, "ATTEMPT", "ITEMS")
}

// printTotals prints a line for each merchant, and their sum.
func printTotals(out *printer, totals []total) {
	rows := [][]string{{"MERCHANT", "ORDERS", "AMOUNT", "FEE", "PAYOUT"}}
	add := func(t total) {
		rows = append(rows, []string{t.Merchant, thousands(t.Orders), thousands(t.Amount), thousands(t.Fee), thousands(t.Payout)})
	}
	sum := total{Merchant: "Total"}
	for _, t := range totals {
		add(t)
		sum.Orders, sum.Amount = sum.Orders+t.Orders, sum.Amount+t.Amount
		sum.Fee, sum.Payout = sum.Fee+t.Fee, sum.Payout+t.Payout
	}
	add(sum)
	printTable(out, rows, "ORDERS", "AMOUNT", "FEE", "PAYOUT")
}

// printTable aligns columns, those of the given headings to the right.
// text/tabwriter counts characters, and a terminal shows Hangul twice as wide.
func printTable(out *printer, rows [][]string, right ...string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], width(cell))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-width(cell))
			if slices.Contains(right, rows[0][i]) {
				cell = pad + cell
			} else {
				cell += pad
			}
			line.WriteString("  " + cell)
		}
		out.printf(" %s\n", strings.TrimRight(line.String(), " "))
	}
}

// width is the number of columns that a terminal gives to s: two for Hangul and Han.
func width(s string) int {
	n := 0
	for _, c := range s {
		n++
		if unicode.In(c, unicode.Hangul, unicode.Han) {
			n++
		}
	}
	return n
}

// thousands writes 1234567 as 1,234,567.
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := len(s) - len(strings.TrimPrefix(s, "-"))
	for i := len(s) - 3; i > sign; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "NO"
}
