// Gen writes orders.csv, the input of the settlement example:
//
//	go generate ./examples/settlement
//
// The orders are made up, but shaped like a shopping platform's: few merchants
// sell most, most amounts are small, and the busiest hours lie on both sides of
// midnight in Seoul, which is in the middle of a UTC day.
//
// The output is the same byte for byte on every machine: the seed is fixed, and
// the arithmetic is in integers because floating point may differ in its last bit
// between processors.
package main

import (
	"bytes"
	"encoding/csv"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"
)

func main() {
	file := flag.String("o", "orders.csv", "`file` to write")
	flag.Parse()
	if err := os.WriteFile(*file, orders(), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

const firstOrder = 10_000_001

// perDate are the numbers of orders of the business dates, from the first day on.
var perDate = []int{6_240, 5_130, 5_380, 5_250}

// Korea has had no clock change since 1988: an offset says all about these dates.
var firstDay = time.Date(2026, time.September, 13, 0, 0, 0, 0, time.FixedZone("KST", 9*60*60))

// merchant sells for min to max won, mostly near min, at a fee of rate basis points.
type merchant struct {
	name     string
	min, max int
	rate     int
}

// merchants, the biggest first.
var merchants = []merchant{
	{"새벽시장", 4_900, 180_000, 180},
	{"Night Owl Grocery", 3_500, 150_000, 180},
	{"달빛분식", 6_000, 48_000, 80},
	{"초록마켓", 2_900, 210_000, 195},
	{"Blue Gate Coffee", 3_800, 32_000, 80},
	{"한강서점", 9_000, 96_000, 150},
	{"가온전자", 19_000, 2_890_000, 230},
	{"Moonlight Noodles", 7_500, 52_000, 80},
	{"햇살베이커리", 2_500, 64_000, 125},
	{"Lantern Electronics", 12_000, 1_980_000, 230},
	{"너울수산", 15_000, 260_000, 160},
	{"카페 Blue Hour", 4_200, 38_000, 80},
	{"Seventh Street Shoes", 29_000, 420_000, 275},
	{"구름상회", 1_900, 88_000, 180},
	{"Harbor Books", 8_500, 120_000, 150},
	{"파란대문국수", 8_000, 45_000, 80},
	{"Field Day Sports", 14_000, 690_000, 260},
	{"남산꽃집", 18_000, 240_000, 210},
	{"Juniper Pharmacy", 3_200, 76_000, 140},
	{"은하수문구", 900, 58_000, 125},
	{"Rice, Salt & Co.", 5_500, 130_000, 165},
	{"산들바람자전거", 9_900, 3_400_000, 250},
	{"Corner Records", 16_000, 185_000, 220},
	{"다람쥐완구", 6_900, 160_000, 240},
	{"Studio 온도", 22_000, 330_000, 290},
	{"Copper Kettle Tea", 7_000, 95_000, 155},
	{"섬마을건어물", 11_000, 140_000, 160},
	{"Paper Crane Toys", 5_900, 175_000, 240},
	{"봄날스튜디오", 35_000, 880_000, 310},
	{"Granite Peak Outdoor", 25_000, 1_250_000, 270},
	{"골목사진관", 12_000, 220_000, 200},
	{"Tiger Cycle Works", 8_000, 2_700_000, 250},
	{"도토리공방", 14_000, 310_000, 285},
	{"Little Kiln Ceramics", 17_000, 270_000, 285},
	{"서점 Page 31", 9_500, 84_000, 150},
	{"Stone Bridge Hardware", 1_200, 460_000, 205},
	{"느티나무한의원", 20_000, 380_000, 145},
	{"Quiet Room Furniture", 49_000, 4_800_000, 300},
	{"한결 Hardware", 1_500, 350_000, 205},
	{"Pine & Paper", 2_400, 69_000, 125},
}

// hours are the weights of the 24 hours of a day in Seoul. Deals start and end at
// midnight, and those are the orders that a wrong time zone puts on a wrong date.
var hours = []int{14, 5, 2, 1, 1, 1, 2, 3, 4, 4, 5, 6, 8, 6, 5, 5, 5, 6, 8, 9, 9, 9, 9, 15}

type order struct {
	paidAt       time.Time
	merchant     string
	amount, rate int
}

// orders returns the file.
func orders() []byte {
	r := rand.New(rand.NewPCG(2026, 9))
	var all []order
	for n, orders := range perDate {
		day := firstDay.AddDate(0, 0, n)
		// The first and the last second of the day are those that an off-by-one loses.
		all = append(all, sale(r, day), sale(r, day.AddDate(0, 0, 1).Add(-time.Second)))
		for range orders - 2 {
			hour := pick(r, hours)
			all = append(all, sale(r, day.Add(time.Duration(hour)*time.Hour+time.Duration(r.IntN(3600))*time.Second)))
		}
	}
	slices.SortStableFunc(all, func(a, b order) int { return a.paidAt.Compare(b.paidAt) })

	var file bytes.Buffer
	w := csv.NewWriter(&file)
	_ = w.Write([]string{"order_id", "merchant", "paid_at", "amount_won", "fee_bp"}) // a Buffer takes everything
	for i, o := range all {
		_ = w.Write([]string{
			strconv.Itoa(firstOrder + i), o.merchant, o.paidAt.UTC().Format(time.RFC3339),
			strconv.Itoa(o.amount), strconv.Itoa(o.rate),
		})
	}
	w.Flush()
	return file.Bytes()
}

// sale returns an order of some merchant at a time.
func sale(r *rand.Rand, at time.Time) order {
	m := merchants[pick(r, weights)]
	u := r.IntN(1000)
	amount := m.min + (m.max-m.min)/1000*(u*u/1000*u/1000) // the cube of u: mostly small
	if r.IntN(4) > 0 {
		amount -= amount % 100 // a price; the others were paid in part with points
	} else {
		amount -= r.IntN(100)
	}
	rate := m.rate
	if r.IntN(5) == 0 {
		rate += 45 // paid through a wallet
	}
	return order{at, m.name, amount, rate}
}

// weights of the merchants: the n-th sells about 1/n of what the first does.
var weights = func() []int {
	w := make([]int, len(merchants))
	for i := range w {
		w[i] = 1000 / (i + 1)
	}
	return w
}()

// pick returns an index, each as often as its weight says.
func pick(r *rand.Rand, weights []int) int {
	sum := 0
	for _, w := range weights {
		sum += w
	}
	n := r.IntN(sum)
	for i, w := range weights {
		if n -= w; n < 0 {
			return i
		}
	}
	panic("unreachable: n is less than the sum of the weights")
}
