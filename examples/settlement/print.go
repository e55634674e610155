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
	mu       sync.Mutex
	w        io.Writer
	sections int
}

func (p *printer) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.w, format, args...)
}

// section prints a heading with the next number.
func (p *printer) section(format string, args ...any) {
	p.sections++
	p.printf("\n%d. %s\n\n", p.sections, fmt.Sprintf(format, args...))
}

// say prints what somebody says or does.
func (p *printer) say(who, what string) { p.printf("   %-11s  %s\n", who, what) }

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

// printStale prints the evidence about a run that is silent.
func printStale(out *printer, s jobrun.StaleRun) {
	printTable(out, [][]string{
		{"STATUS", "WORKER", "ATTEMPT", "SILENT", "ALIVE", "SESSION", "ITEMS"},
		{string(s.Status), s.WorkerID, strconv.Itoa(s.Attempt), seconds(s.Silent), strconv.FormatBool(s.Alive), s.Session, thousands(s.ItemsProcessed)},
	}, "ATTEMPT", "ITEMS")
}

// printFailed prints the orders that failed and are not settled.
func printFailed(out *printer, failed []jobrun.FailedItem) {
	rows := [][]string{{"ORDER", "FAILED AT", "IN ATTEMPT", "ERROR"}}
	for _, f := range failed {
		rows = append(rows, []string{f.Item, f.FailedAt.Format("15:04:05.000"), strconv.Itoa(f.Attempt), f.Error})
	}
	printTable(out, rows, "IN ATTEMPT")
}

// printHistory prints the attempts of a run and what people did about it.
func printHistory(out *printer, history []jobrun.HistoryEntry) {
	rows := [][]string{{"AT", "WHAT", "BY", "ATTEMPT", "OUTCOME", "ITEMS", "FAILED"}}
	for _, h := range history {
		row := []string{
			h.At.Format("15:04:05.000"), string(h.Trigger), h.WorkerID, strconv.Itoa(h.Attempt),
			string(h.Outcome), thousands(h.ItemsProcessed), thousands(h.ItemsFailed),
		}
		if h.Action != nil {
			row = []string{row[0], h.Kind, h.Action.By, row[3], "", "", ""}
		}
		rows = append(rows, row)
	}
	printTable(out, rows, "ATTEMPT", "ITEMS", "FAILED")
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
