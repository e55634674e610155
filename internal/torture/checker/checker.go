// Package checker judges what a torture run has left behind. It shares no code
// with the library: it reads the library's tables and those that the run wrote
// beside them, and derives every rule anew from what the library promises.
//
//   - checker.go: the report
//   - load.go: the reading of the tables
//   - replay.go: the changes of one run's row, walked through in their order
//   - rules.go: the rules, and those about executions and about how runs end
//   - effects.go: what took effect, when, how often, and the ledger
//   - told.go: what workers and people were told
//   - history.go: the attempts as batch_job_attempt has them
//   - timeline.go: all that is known about one key, for people
package checker

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Report is what Check has found.
type Report struct {
	Violations []Violation
	Judged     map[string]int // by the name of each of Rules: a rule that judged nothing proves nothing
	Counts     Counts
}

// Violation is one case in which a rule does not hold.
type Violation struct {
	Rule string // name of one of Rules
	Key  string // of the run; "" when it is none's
	What string
}

// Counts tells how much happened.
type Counts struct {
	Keys         int            // keys whose row was changed at least once
	Runs         int            // rows of batch_job_run now
	Statuses     map[string]int // of these rows
	Changes      map[string]int // of rows, by worker, operator, neighbour, psql
	Attempts     int            // claims by workers
	Retries      int            // of these, because they were due
	Reruns       int            // of these, because a person approved
	NeverStarted int            // of these, closed without an execution
	Superseded   int            // of these, ended by somebody else than their worker
	Open         int            // of these, RUNNING now
	Succeeded    int            // of these, ended by their worker
	Failed       int            // likewise, those never started left out
	Skipped      int            // likewise
	Executions   int
	Effects      int
	Answers      map[string]int // to workers, by decision, and its kind of error if there is one: "RAN", "RAN lost", "shutdown"
	Unknown      int            // of these, with an unknown outcome
	Actions      map[string]int // of people, by action and answer: "SKIP done"
	Faults       map[string]int // by kind
}

// Check reads everything and tells what is wrong. With final it judges a run that
// was drained: no process is alive, and every key that was wanted must have come
// to an end. Without, processes may be at work: all is read in one snapshot. In a
// transaction that is open already, Check reads in that one. The server must keep
// the times of commits (track_commit_timestamp).
func Check(ctx context.Context, conn *pgx.Conn, final bool) (Report, error) {
	if conn.PgConn().TxStatus() == 'I' {
		tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
		if err != nil {
			return Report{}, err
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	}
	c, err := load(ctx, conn)
	if err != nil {
		return Report{}, fmt.Errorf("check: %w", err)
	}
	c.final = final
	for _, r := range c.runs {
		c.replay(r)
	}
	c.rules()
	return c.report, nil
}

// check is one reading of the tables, and what was found in it.
type check struct {
	report    Report
	final     bool
	jobs      map[string]job
	byKey     map[string]*run
	runs      []*run // in the order of their keys
	asked     []asked
	actions   []*action // by id
	byReason  map[string][]*action
	tokens    map[string]*attempt // of all claims, the latest with each
	rewritten []rewritten
	stale     []stale
	ended     map[string]string // how worker processes have ended, by their session
	guarded   bool              // batch_job_action refuses UPDATE, DELETE and TRUNCATE

	words map[string]string // strings that occur often, one copy of each
}

type job struct {
	way         string
	items       int
	maxAttempts int
}

// run is all that is known about one key.
type run struct {
	key        string
	job        job
	now        *row // nil: there is none
	wanted     bool
	changes    []*change
	lastText   []byte // the row that the latest of them has left
	actions    []*action
	executions []*execution
	answers    []*answer
	effects    []*effect
	history    map[int]*historic
	ledger     []item

	// What the replay finds.
	attempts  []*attempt       // claims by workers, in their order
	byNumber  map[int]*attempt // the latest one with that number
	successes []int64          // seq of the changes to SUCCEEDED by a worker
	closings  []int64          // seq of the changes to SUCCEEDED by anybody else
	resets    []int64          // seq of the approvals that emptied the ledger
	visited   []int            // attempts that the row named when the library claimed it again, or a person acted
}

// row is a row of batch_job_run. NULL is the zero value. Rows can be compared.
type row struct {
	Status       string    `json:"status"`
	Attempt      int       `json:"attempt"`
	Executions   int       `json:"executions"`
	Token        string    `json:"token"`
	Worker       string    `json:"worker_id"`
	Started      time.Time `json:"started_at"`
	Finished     time.Time `json:"finished_at"`
	Next         time.Time `json:"next_attempt_at"`
	Error        string    `json:"error_message"`
	Job          string    `json:"job_name"`
	Date         string    `json:"business_date"`
	ScheduledFor time.Time `json:"scheduled_for"`
	Approved     time.Time `json:"approved_at"`
	ApprovedN    int       `json:"approved_attempt"`
	ApprovedAs   string    `json:"approved_status"`
	ApprovedBy   string    `json:"approved_worker"`
	ApprovedEnd  time.Time `json:"approved_finished_at"`
	Pruned       time.Time `json:"pruned_at"`
}

type change struct {
	seq       int64
	at        time.Time
	xid       uint64
	committed time.Time // zero: not yet
	session   string
	isolation string
	before    *row // nil: inserted
	after     *row // nil: deleted
	silent    bool
	effects   int64 // -1: no attempt ended
	again     bool  // what it left is to be tried again
}

// action is a row of batch_job_action.
type action struct {
	id         int64
	xid        uint32
	key        string
	attempt    int
	action     string
	reason     string
	forced     bool
	reset      bool
	previous   string
	at         time.Time
	change     *change // nil: none was found
	moreChange bool    // there was another one
}

// asked is what a person asked for, and the answer.
type asked struct {
	reason, action, key string
	attempt             int
	status              string
	forced, reset       bool
	answer              string
}

type execution struct {
	id       string
	at       time.Time
	session  string
	worker   string
	attempt  int
	trigger  string
	outcomes []string // what was written down of its return, without repetition
	returned time.Time
	lost     bool // the error that it returned speaks of a lost lease
}

type answer struct {
	at       time.Time
	session  string
	worker   string
	attempt  int
	decision string
	status   string
	kind     string
}

type effect struct {
	xid       uint64
	committed time.Time // zero: not yet
	session   string
	way       string
	attempt   int
	item      string
}

// historic is a row of batch_job_attempt.
type historic struct {
	token, worker, trigger string
	started, finished      time.Time
	outcome, endedBy       string
}

type item struct {
	name    string
	attempt int
}

type rewritten struct{ session, before, after string }

type stale struct {
	key       string
	committed time.Time
}
