package store

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Refusal is a judgement that stays the same however often it is asked for.
type Refusal string

func (r Refusal) Error() string { return string(r) }

// Transient reports whether the same statement may succeed if it is repeated:
// the connection broke, or the server answered with a condition that passes.
// Classes and codes: PostgreSQL documentation, appendix A.
func Transient(err error) bool {
	var refusal Refusal
	if errors.As(err, &refusal) {
		return false
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		var connect *pgconn.ConnectError
		var parse *pgconn.ParseConfigError
		var scan pgx.ScanArgError // such as a time in a DateStyle that pgx does not read
		return err != nil && (errors.As(err, &connect) || !errors.As(err, &parse) && !errors.As(err, &scan) && !settingRefused(err))
	}
	switch pg.Code {
	case "40001", "40P01", // serialization failure, deadlock
		"55P03", "57014", // lock timeout, statement timeout or cancel
		"57P01", "57P02", "57P03", "57P05", // server or session going away, server starting, idle timeout
		"25006", "25P03", "25P04", // read-only: a server that was demoted; idle in transaction timeout
		"26000", "42P05", "0A000", // prepared statement gone or there already, plan changed by a migration
		"23505": // somebody inserted the same history row
		return true
	}
	return strings.HasPrefix(pg.Code, "08") || strings.HasPrefix(pg.Code, "53")
}

// settingRefused reports that pgx has sent nothing because of a setting of the session:
// the simple protocol needs client_encoding UTF8 and standard_conforming_strings. The
// error has no type of its own (pgx v5.12.0).
func settingRefused(err error) bool {
	return strings.Contains(err.Error(), "simple protocol queries must be run with")
}

// Undecided reports whether the statement may have been committed although it
// returned this error: it was sent, and no answer says that it was undone. pgx says
// "conn closed" and that it is safe to retry not only before it sends a statement,
// but in the simple protocol also after it has lost the answer (v5.12.0,
// TestLostAnswerIsUndecidedInEveryMode).
func Undecided(err error) bool {
	if err == nil || pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed) {
		return false
	}
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) {
		return false
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.SeverityUnlocalized == "FATAL" || pg.SeverityUnlocalized == "PANIC" || strings.HasPrefix(pg.Code, "57P") || strings.HasPrefix(pg.Code, "08")
	}
	return true
}

// Pause waits before try number try+1: about 10 ms, doubling to 2 s, each between
// half and one and a half of that, so that two that got in each other's way do not
// do so again. It reports false when ctx ends first.
func Pause(ctx context.Context, try int) bool {
	pause := min(10*time.Millisecond<<min(try, 10), 2*time.Second)
	timer := time.NewTimer(pause/2 + rand.N(pause))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Unencodable reports that the server's or the session's encoding has no place for
// a character of a text: it stores what pgx sends as UTF-8 only if it is told so.
func Unencodable(err error) bool {
	code := Code(err)
	return code == "22021" || code == "22P05"
}

// ASCII is text with every other character escaped, storable in any encoding, and
// bounded as [CleanText] bounds it.
func ASCII(text string) string {
	quoted := strconv.QuoteToASCII(text)
	return CleanText(quoted[1 : len(quoted)-1])
}

// Code is the SQLSTATE of err, or "". Errors of other drivers have the method too.
func Code(err error) string {
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}

// MaxText is how many bytes of an error text are stored.
const MaxText = 8 << 10

// CleanText makes any text storable: NUL and invalid UTF-8 become U+FFFD, and of
// an over-long text the head and the tail are kept, cut between characters,
// because the cause often stands at the end.
func CleanText(s string) string {
	const gap = "\n[...]\n"
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= MaxText {
		return s
	}
	head, tail := (MaxText-len(gap))*3/4, len(s)-(MaxText-len(gap))/4
	for !utf8.RuneStart(s[head]) {
		head--
	}
	for tail < len(s) && !utf8.RuneStart(s[tail]) {
		tail++
	}
	return s[:head] + gap + s[tail:]
}
