package jobrun_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-ccb5b62c/jobrun"
	"github.com/seed-ccb5b62c/jobrun/internal/pgtest"
)

// dateSession is a connection in one pgx execution mode and one session time zone, used as pgx or through database/sql.
type dateSession struct {
	exec         func(sql string, args ...any) error
	queryRow     func(sql string, args ...any) interface{ Scan(...any) error }
	conn         *pgx.Conn // nil through database/sql
	asksForTypes bool      // the mode asks the server for the types of the arguments
}

// eachDateSession runs fn in a subtest for every pgx execution mode, through pgx and through database/sql, in sessions
// whose time zones are on either side of Greenwich. Each has a table dates of its own.
func eachDateSession(t *testing.T, fn func(t *testing.T, s dateSession)) {
	t.Helper()
	db := pgtest.New(t)
	ctx := context.Background()
	const table = "CREATE TEMPORARY TABLE dates (d date, s text, at timestamptz, plain timestamp)"
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		for _, zone := range []string{"UTC", "America/New_York", "Asia/Tokyo"} {
			config, err := pgx.ParseConfig(db.URL)
			if err != nil {
				t.Fatal(err)
			}
			config.DefaultQueryExecMode = mode
			config.RuntimeParams["timezone"] = zone
			asksForTypes := mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol

			t.Run(fmt.Sprintf("pgx/%s/%s", mode, zone), func(t *testing.T) {
				conn, err := pgx.ConnectConfig(ctx, config)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close(ctx)
				s := dateSession{conn: conn, asksForTypes: asksForTypes}
				s.exec = func(sql string, args ...any) error { _, err := conn.Exec(ctx, sql, args...); return err }
				s.queryRow = func(sql string, args ...any) interface{ Scan(...any) error } { return conn.QueryRow(ctx, sql, args...) }
				if err := s.exec(table); err != nil {
					t.Fatal(err)
				}
				fn(t, s)
			})
			t.Run(fmt.Sprintf("sql/%s/%s", mode, zone), func(t *testing.T) {
				pool := stdlib.OpenDB(*config)
				defer pool.Close()
				conn, err := pool.Conn(ctx) // one session, for the temporary table
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				s := dateSession{asksForTypes: asksForTypes}
				s.exec = func(sql string, args ...any) error { _, err := conn.ExecContext(ctx, sql, args...); return err }
				s.queryRow = func(sql string, args ...any) interface{ Scan(...any) error } {
					return conn.QueryRowContext(ctx, sql, args...)
				}
				if err := s.exec(table); err != nil {
					t.Fatal(err)
				}
				fn(t, s)
			})
		}
	}
}

func TestDateIsStoredAndReadBackInEveryExecMode(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		for _, text := range []string{
			"0001-01-01", "0099-12-31", "1582-10-10", "1899-12-31", "1969-12-31", "2000-02-29", "2011-12-30", "2026-03-08", "2026-09-06",
			"2026-09-15", "9999-12-31",
		} {
			want := jobrun.MustParseDate(text)
			if err := s.exec("INSERT INTO dates (d, s) VALUES ($1, $2)", want, want); err != nil {
				t.Fatalf("insert %s: %v", want, err)
			}
			var date, label jobrun.Date
			var stored string
			err := s.queryRow("SELECT d, s, to_char(d, 'YYYY-MM-DD') FROM dates WHERE d = $1 AND s = $2", want, &want).Scan(&date, &label, &stored)
			if err != nil || date != want || label != want || stored != text {
				t.Errorf("%s: read %v and %v, %v; stored as %s", want, date, label, err, stored)
			}
			// Where the statement does not say what $1 is, a cast does.
			err = s.queryRow("SELECT $1::date, ($1::date)::text", want).Scan(&date, &stored)
			if err != nil || date != want || stored != text {
				t.Errorf("%s: $1::date is %v, %s, %v", want, date, stored, err)
			}
			var found int
			if err := s.queryRow("SELECT count(*) FROM dates WHERE d BETWEEN $1 AND $2", want, want).Scan(&found); err != nil || found != 1 {
				t.Errorf("%s: BETWEEN finds %d, %v", want, found, err)
			}
			if err := s.exec("UPDATE dates SET d = $1 WHERE d = $1", want); err != nil {
				t.Errorf("%s: update: %v", want, err)
			}
			for _, list := range []any{[]jobrun.Date{want}, []string{want.String()}} {
				if _, typed := list.([]jobrun.Date); typed && !s.asksForTypes {
					continue
				}
				if err := s.queryRow("SELECT count(*) FROM dates WHERE d = ANY ($1::date[])", list).Scan(&found); err != nil || found != 1 {
					t.Errorf("%s: ANY of %T finds %d, %v", want, list, found, err)
				}
			}
		}
	})
}

func TestDateOutsideTheRangeIsNeverSentOrRead(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		for _, bad := range []jobrun.Date{{}, {Year: 2026, Month: 2, Day: 29}, {Year: 10000, Month: 1, Day: 1}, {Month: 12, Day: 31}} {
			if err := s.exec("INSERT INTO dates (d) VALUES ($1)", bad); err == nil || !strings.Contains(err.Error(), "0001-01-01") {
				t.Errorf("insert %v: %v; want an error that says what is allowed", bad, err)
			}
		}
		var rows int
		if err := s.queryRow("SELECT count(*) FROM dates").Scan(&rows); err != nil || rows != 0 {
			t.Errorf("%d rows after refused inserts, %v", rows, err)
		}
		for _, expr := range []string{
			"'infinity'::date", "'-infinity'::date", "'0001-12-31 BC'::date", "'10000-01-01'::date", "'5874897-12-31'::date", "'infinity'::text",
			"'2026-02-29'::text", "''::text", "20260915", "true",
		} {
			date := jobrun.Date{Year: 2026, Month: 9, Day: 15}
			if err := s.queryRow("SELECT " + expr).Scan(&date); err == nil || date != (jobrun.Date{Year: 2026, Month: 9, Day: 15}) {
				t.Errorf("%s was read as %v, %v; want an error and the date unchanged", expr, date, err)
			}
		}
	})
}

func TestNullIsNeverADate(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		want := jobrun.MustParseDate("2026-09-15")
		date := want
		for _, expr := range []string{"NULL::date", "NULL::text"} {
			err := s.queryRow("SELECT " + expr).Scan(&date)
			if err == nil || date != want || !strings.Contains(err.Error(), "sql.Null[Date]") || !strings.Contains(err.Error(), "*Date") {
				t.Errorf("%s was read as %v, %v; want an error that names the types to use", expr, date, err)
			}
		}
		for _, tt := range []struct {
			arg  any
			null bool
		}{
			{(*jobrun.Date)(nil), true},
			{sql.Null[jobrun.Date]{}, true},
			{nil, true},
			{&want, false},
			{sql.Null[jobrun.Date]{V: want, Valid: true}, false},
			{want, false},
		} {
			if err := s.exec("INSERT INTO dates (d, s) VALUES ($1, $1::date::text)", tt.arg); err != nil {
				t.Errorf("insert %#v: %v", tt.arg, err)
				continue
			}
			pointer, value := &date, sql.Null[jobrun.Date]{V: date, Valid: true}
			textPointer, textValue := pointer, value
			if tt.null {
				pointer, textPointer = new(jobrun.Date), new(jobrun.Date)
			} else {
				pointer, textPointer, value, textValue = nil, nil, sql.Null[jobrun.Date]{}, sql.Null[jobrun.Date]{}
			}
			err := s.queryRow("DELETE FROM dates RETURNING d, d, s, s").Scan(&pointer, &value, &textPointer, &textValue)
			if err != nil || (pointer == nil) != tt.null || (textPointer == nil) != tt.null || value.Valid == tt.null || textValue.Valid == tt.null {
				t.Errorf("%#v came back as %v, %v, %v, %v, %v", tt.arg, pointer, value, textPointer, textValue, err)
				continue
			}
			if !tt.null && (*pointer != want || *textPointer != want || value.V != want || textValue.V != want) {
				t.Errorf("%#v came back as %v, %v, %v, %v", tt.arg, pointer, value, textPointer, textValue)
			}
		}
	})
}

func TestTimestamptzIsNeverReadAsDate(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		before := jobrun.MustParseDate("2000-01-01")
		for _, at := range []string{
			"2026-09-15 00:00:00+00", "2026-09-15 00:00:00+09", "2026-09-15 00:00:00-04", "2026-09-15 00:00:00", "2026-07-26 16:00:00+00", "infinity",
		} {
			if err := s.exec("INSERT INTO dates (at, plain) VALUES ($1::text::timestamptz, '2026-09-15 16:00')", at); err != nil {
				t.Fatal(err)
			}
			date := before
			if err := s.queryRow("SELECT at FROM dates").Scan(&date); err == nil || date != before {
				t.Errorf("timestamptz %s was read as %v, %v", at, date, err)
			}
			var null sql.Null[jobrun.Date]
			if err := s.queryRow("SELECT at FROM dates").Scan(&null); err == nil {
				t.Errorf("timestamptz %s was read as %v", at, null)
			}
			if err := s.queryRow("SELECT plain FROM dates").Scan(&date); err == nil || date != before {
				t.Errorf("a timestamp with a time of day was read as %v, %v", date, err)
			}
			if err := s.exec("DELETE FROM dates"); err != nil {
				t.Fatal(err)
			}
		}
		// What to write instead.
		var date jobrun.Date
		err := s.queryRow("SELECT ('2026-07-26 16:00+00'::timestamptz AT TIME ZONE 'Asia/Seoul')::date").Scan(&date)
		if err != nil || date != jobrun.MustParseDate("2026-07-27") {
			t.Errorf("cast in a zone: %v, %v", date, err)
		}
	})
}

// PostgreSQL has zone data and calendar arithmetic of its own.
func TestDatesAgreeWithPostgreSQLInEverySessionZone(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	var instants []time.Time
	for _, text := range []string{
		"2026-07-26T14:59:59.999999Z", "2026-07-26T15:00:00Z", "2026-07-26T16:00:00Z", "2026-07-27T00:00:00Z", "2026-09-06T03:59:59Z",
		"2026-09-06T04:00:00Z", "2026-03-08T05:00:00Z", "2011-12-30T09:59:59Z", "2011-12-30T10:00:00Z", "2017-10-28T21:30:00Z", "2017-10-28T22:00:00Z",
		"2026-05-10T18:15:00Z", "2026-04-04T13:00:00Z", "2024-10-31T21:30:00Z", "1988-05-07T17:00:00Z", "2028-02-28T15:00:00Z",
	} {
		at, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			t.Fatal(err)
		}
		instants = append(instants, at)
	}
	eachDateSession(t, func(t *testing.T, s dateSession) {
		for _, name := range []string{
			"UTC", "Asia/Seoul", "America/New_York", "America/Santiago", "America/Havana", "Asia/Beirut", "Africa/Cairo", "Pacific/Apia",
			"Asia/Kathmandu", "Pacific/Chatham", "Australia/Lord_Howe",
		} {
			zone, err := time.LoadLocation(name)
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range instants {
				want := jobrun.DateOf(at.In(zone))
				var date, end, next jobrun.Date
				var weekday int
				err := s.queryRow(`SELECT d, (date_trunc('month', d) + interval '1 month - 1 day')::date, d + 1, extract(isodow FROM d)::int
					FROM (SELECT ($1::timestamptz AT TIME ZONE $2::text)::date) AS q (d)`, at, name).Scan(&date, &end, &next, &weekday)
				if err != nil || date != want || end != want.EndOfMonth() || next != want.AddDays(1) || time.Weekday(weekday%7) != want.Weekday() {
					t.Errorf("%s in %s: PostgreSQL says %v, month end %v, next day %v, day of the week %d, %v; want %v", at, name, date, end, next, weekday, err, want)
				}
				if err := s.exec("INSERT INTO dates (d) VALUES ($1)", want); err != nil {
					t.Fatal(err)
				}
			}
		}
		var date jobrun.Date
		var label string
		if err := s.queryRow("SELECT max(d), max(to_char(d, 'YYYY-MM-DD')) FROM dates").Scan(&date, &label); err != nil || date.String() != label {
			t.Errorf("latest date %v, %s, %v", date, label, err)
		}
	})
}

func TestDateStyleDoesNotChangeWhatIsStored(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		want := jobrun.MustParseDate("2026-02-03")
		for _, style := range []string{"ISO, MDY", "ISO, DMY", "SQL, DMY", "German, DMY", "Postgres, YMD"} {
			if err := s.exec("SELECT set_config('datestyle', $1, false)", style); err != nil {
				t.Fatal(err)
			}
			var stored string
			if err := s.queryRow("SELECT to_char($1::date, 'YYYY-MM-DD')", want).Scan(&stored); err != nil || stored != "2026-02-03" {
				t.Errorf("%s: stored as %s, %v", style, stored, err)
			}
			// Reading is right or refused: in the modes with text results pgx reads ISO only.
			var date jobrun.Date
			if err := s.queryRow("SELECT $1::date", want).Scan(&date); err == nil && date != want || err != nil && strings.HasPrefix(style, "ISO") {
				t.Errorf("%s: read %v, %v", style, date, err)
			}
		}
	})
}

func TestDateInBatchesAndCopies(t *testing.T) {
	t.Parallel()
	pgtest.NeedsSessions(t)
	eachDateSession(t, func(t *testing.T, s dateSession) {
		if s.conn == nil {
			t.Skip("pgx only")
		}
		ctx := t.Context()
		want := jobrun.MustParseDate("2026-09-15")
		batch := &pgx.Batch{}
		batch.Queue("INSERT INTO dates (d, s) VALUES ($1, $2)", want, want)
		batch.Queue("INSERT INTO dates (d) VALUES ($1)", (*jobrun.Date)(nil))
		if err := s.conn.SendBatch(ctx, batch).Close(); err != nil {
			t.Fatal(err)
		}
		n, err := s.conn.CopyFrom(ctx, pgx.Identifier{"dates"}, []string{"d", "s"}, pgx.CopyFromRows([][]any{{want, want}, {&want, nil}, {nil, &want}}))
		if err != nil || n != 3 {
			t.Fatalf("copied %d, %v", n, err)
		}
		if _, err := s.conn.CopyFrom(ctx, pgx.Identifier{"dates"}, []string{"d"}, pgx.CopyFromRows([][]any{{jobrun.Date{}}})); err == nil {
			t.Error("a zero Date was copied")
		}
		rows, _ := s.conn.Query(ctx, "SELECT coalesce(d, s::date) FROM dates WHERE coalesce(d, s::date) IS NOT NULL")
		dates, err := pgx.CollectRows(rows, pgx.RowTo[jobrun.Date])
		if err != nil || len(dates) != 4 {
			t.Errorf("read %v, %v", dates, err)
		}
		for _, date := range dates {
			if date != want {
				t.Errorf("read %v", date)
			}
		}
	})
}
