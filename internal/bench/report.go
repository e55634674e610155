package main

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

var (
	blue = color.NRGBA{0x2b, 0x6c, 0xb0, 0xff}
	grey = color.NRGBA{0xa0, 0xa0, 0xa0, 0xff}
)

// report is what was measured, written as it comes.
type report struct {
	out    io.Writer
	tables []*table
}

// table compares sides with each other in one work.
type table struct {
	*report
	work string
	rows []entry
}

type entry struct {
	side, base string
	comparison
}

func (r *report) table(work, figure string) *table {
	t := &table{report: r, work: work}
	r.tables = append(r.tables, t)
	fmt.Fprintf(r.out, "\n**%s**\n\n| side | against | ratio of the %s, median (least to greatest) | against itself | base |\n|---|---|---|---|---|\n", work, figure)
	return t
}

func (t *table) add(side, base string, c comparison) {
	t.rows = append(t.rows, entry{side, base, c})
	fmt.Fprintf(t.out, "| %s | %s | %s | %s | %s |\n", side, base, c.ratio, c.control, duration(c.base.median))
}

func (s spread) String() string {
	return fmt.Sprintf("%s (%s to %s)", figure(s.median), figure(s.least), figure(s.greatest))
}

// figure is a number with three significant digits.
func figure(f float64) string {
	if f == 0 || math.IsNaN(f) || math.IsInf(f, 0) {
		return fmt.Sprint(f)
	}
	digits := max(0, 2-int(math.Floor(math.Log10(math.Abs(f)))))
	return fmt.Sprintf("%.*f", min(digits, 4), f)
}

func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d >= time.Second:
		return figure(d.Seconds()) + " s"
	case d >= time.Millisecond:
		return figure(float64(d)/1e6) + " ms"
	default:
		return figure(float64(d)/1e3) + " µs"
	}
}

// counts is a table of plain figures, which is printed when it is whole.
type counts struct {
	out  io.Writer
	text strings.Builder
}

func (r *report) counts(what string, columns ...string) *counts {
	c := &counts{out: r.out}
	fmt.Fprintf(&c.text, "\n**%s**\n\n| | %s |\n|---|%s\n", what, strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	return c
}

func (c *counts) add(name string, figures ...float64) {
	texts := make([]string, len(figures))
	for i, f := range figures {
		if texts[i] = figure(f); math.Abs(f) >= 100 {
			texts[i] = fmt.Sprintf("%.0f", f)
		}
	}
	fmt.Fprintf(&c.text, "| %s | %s |\n", name, strings.Join(texts, " | "))
}

func (c *counts) print() { _, _ = io.WriteString(c.out, c.text.String()) }

// ticks are 1, 2 and 5 times the powers of ten.
func ticks(least, greatest float64) (all []plot.Tick) {
	for power := math.Pow(10, math.Floor(math.Log10(least))); power <= greatest; power *= 10 {
		for _, digit := range []float64{1, 2, 5} {
			if v := digit * power; v >= least && v <= greatest {
				all = append(all, plot.Tick{Value: v, Label: strconv.FormatFloat(v, 'g', 4, 64)})
			}
		}
	}
	return all
}

// chart draws the medians of a table against its first base, with what lies
// between the least and the greatest, on a logarithmic axis.
func chart(out io.Writer, t *table) error {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	p := plot.New()
	p.Title.Text, p.X.Label.Text = t.work, "times what "+strings.ReplaceAll(t.rows[0].base, "`", "")+" takes (logarithmic)"
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.TickerFunc(ticks)
	var names []string
	least, greatest := 0.5, 2.0
	for _, row := range slices.Backward(t.rows) { // the axis goes up
		if row.base != t.rows[0].base {
			continue
		}
		y, r := float64(len(names)), row.ratio
		names = append(names, row.side)
		least, greatest = min(least, r.least), max(greatest, r.greatest)
		from, to := min(1, r.median), max(1, r.median)
		bar, err := plotter.NewPolygon(plotter.XYs{{X: from, Y: y - 0.35}, {X: to, Y: y - 0.35}, {X: to, Y: y + 0.35}, {X: from, Y: y + 0.35}})
		if err != nil {
			return err
		}
		bar.Color, bar.Width = grey, 0
		if row.side == "jobrun" || strings.HasPrefix(row.side, "jobrun,") {
			bar.Color = blue
		}
		whisker, err := plotter.NewLine(plotter.XYs{{X: r.least, Y: y}, {X: r.greatest, Y: y}})
		if err != nil {
			return err
		}
		p.Add(bar, whisker)
	}
	one, err := plotter.NewLine(plotter.XYs{{X: 1, Y: -0.5}, {X: 1, Y: float64(len(names)) - 0.5}})
	if err != nil {
		return err
	}
	p.Add(one)
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = least/1.2, greatest*1.2, -0.6, float64(len(names))-0.4
	p.NominalY(names...)
	canvas := vgsvg.New(20*vg.Centimeter, vg.Length(2.5+0.7*float64(len(names)))*vg.Centimeter)
	p.Draw(draw.Crop(draw.New(canvas), vg.Centimeter/2, -vg.Centimeter/2, 0, 0))
	_, err = canvas.WriteTo(out)
	return err
}
