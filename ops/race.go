package ops

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/seed-ccb5b62c/jobrun"
)

func (c *command) raceFlags(fs *flag.FlagSet) {
	fs.IntVar(&c.processes, "processes", 8, "`N` processes, 2 to 64")
	fs.StringVar(&c.child, "child", "", "-") // what a process of the race is started with
	fs.StringVar(&c.at, "date", "", "-")
}

func (c *command) checkRace() error {
	switch {
	case c.processes < 2 || c.processes > 64:
		return usage("--processes is %d, allowed: 2 to 64", c.processes)
	case c.child == "" && c.before == nil:
		return usage("race starts this program again, and cannot: the arguments that ops.Main was given are not the end of the program's own")
	}
	return nil
}

const (
	raceLimit  = time.Minute
	racePrefix = "jobrun race: " // of the lines that are for the parent, whatever else the service prints
)

// answer is what one process of the race says.
type answer struct {
	Decision jobrun.Decision `json:"decision,omitempty"`
	Executed int64           `json:"executed"`
	Status   jobrun.Status   `json:"status,omitempty"`
	WorkerID string          `json:"worker_id,omitempty"`
	Error    string          `json:"error,omitempty"`
}

// race starts processes that call RunDate for one key at one moment.
func (c *command) race(ctx context.Context, r *jobrun.Runner) (int, error) {
	if c.child != "" {
		return c.racer(ctx, r)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, raceLimit, fmt.Errorf("the race was not over within %s", raceLimit))
	defer cancel()
	job, date := jobrun.Rehearsal+uuid.NewString()[:8], r.Today()
	key := jobrun.Job{Name: job}.Key(date)
	started, answers, err := c.runRacers(ctx, job, date.String())
	if err == nil {
		err = judge(answers)
	}
	var history []jobrun.HistoryEntry
	if err == nil {
		if history, err = r.History(ctx, key); err == nil && (len(history) != 1 || history[0].Outcome != jobrun.Succeeded) {
			err = fmt.Errorf("the history of %s has %d lines, wanted one attempt that SUCCEEDED", key, len(history))
		}
	}
	if err != nil {
		err = fmt.Errorf("race: %w", err)
	}
	if started { // else there is no run
		limited, end := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer end()
		left := r.Discard(limited, key)
		if _, none := r.Get(limited, key); left != nil && !errors.Is(none, jobrun.ErrNotFound) {
			fmt.Fprintf(c.err, "%s: the throw-away run %s is left in the tables: %s\n", c.name, key, visible(left.Error(), ""))
			fmt.Fprintf(c.err, "A role that may removes it: DELETE FROM batch_job_attempt WHERE job_key = '%[1]s'; DELETE FROM batch_job_run WHERE job_key = '%[1]s';\n", key)
		}
	}
	if c.json {
		return ExitFine, errors.Join(c.print(struct {
			Processes int      `json:"processes"`
			Fine      bool     `json:"fine"`
			Answers   []answer `json:"answers"`
			Error     string   `json:"error,omitempty"`
		}{c.processes, err == nil, answers, errorText(err)}), err)
	}
	if err != nil {
		return 0, err
	}
	fmt.Fprintf(c.out, "%d processes raced for one key: exactly one executed it, and %d were told.\n", c.processes, len(answers)-1)
	return ExitFine, nil
}

// judge returns nil if exactly one process has executed the job, once, and every
// other one was told.
func judge(answers []answer) error {
	var executed int64
	decisions := map[jobrun.Decision]int{}
	for _, a := range answers {
		if a.Error != "" {
			return fmt.Errorf("a process got no decision: %s", a.Error)
		}
		executed += a.Executed
		decisions[a.Decision]++
	}
	if told := decisions[jobrun.AlreadyRunning] + decisions[jobrun.AlreadySucceeded]; executed != 1 || decisions[jobrun.Ran] != 1 || told != len(answers)-1 {
		return fmt.Errorf("the job was executed %d times, wanted 1; decisions %v", executed, decisions)
	}
	return nil
}

// runRacers starts the processes, lets them go at one moment and collects their
// answers. Started tells whether any was let go.
func (c *command) runRacers(ctx context.Context, job, date string) (started bool, answers []answer, err error) {
	answers = []answer{}
	program, err := os.Executable()
	if err != nil {
		return false, answers, err
	}
	settings, env := c.pass()
	args := slices.Concat(c.before, []string{"race", "--child", job, "--date", date, "--processes", strconv.Itoa(c.processes)}, settings)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // and kill what still runs
	type racer struct {
		cmd   *exec.Cmd
		start io.WriteCloser
		out   *bufio.Scanner
		log   *tail
	}
	racers := make([]racer, 0, c.processes)
	defer func() {
		cancel()
		for _, p := range racers {
			_ = p.cmd.Wait()
		}
	}()
	for range c.processes {
		p := racer{cmd: exec.CommandContext(ctx, program, args...), log: &tail{}}
		p.cmd.WaitDelay = 5 * time.Second
		p.cmd.Stderr, p.cmd.Env = p.log, append(os.Environ(), env...)
		out, err := p.cmd.StdoutPipe()
		if err == nil {
			p.start, err = p.cmd.StdinPipe()
		}
		if err == nil {
			err = p.cmd.Start()
		}
		if err != nil {
			return false, answers, err
		}
		p.out = bufio.NewScanner(out)
		racers = append(racers, p)
	}
	line := func(p racer) (string, error) {
		for p.out.Scan() {
			if text, ours := strings.CutPrefix(p.out.Text(), racePrefix); ours {
				return text, nil
			}
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		_ = p.cmd.Wait() // until all of its log is there
		return "", fmt.Errorf("a process ended without an answer: %s", p.log)
	}
	for _, p := range racers {
		if text, err := line(p); err != nil {
			return false, answers, err
		} else if text != "ready" {
			return false, answers, fmt.Errorf("a process is not ready: %s", text)
		}
	}
	for _, p := range racers {
		if _, err := io.WriteString(p.start, "go\n"); err != nil {
			return true, answers, err
		}
	}
	for _, p := range racers {
		text, err := line(p)
		if err != nil {
			return true, answers, err
		}
		var a answer
		if err := json.Unmarshal([]byte(text), &a); err != nil {
			return true, answers, fmt.Errorf("a process answers %q: %w", text, err)
		}
		answers = append(answers, a)
	}
	return true, answers, nil
}

// tail is the end of what a process writes.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	t.b = t.b[max(0, len(t.b)-4<<10):]
	return len(p), nil
}

func (t *tail) String() string { return strings.TrimSpace(string(t.b)) }

// racer is one process of the race.
func (c *command) racer(ctx context.Context, r *jobrun.Runner) (int, error) {
	date, err := jobrun.ParseDate(c.at)
	if err != nil || !strings.HasPrefix(c.child, jobrun.Rehearsal) {
		return 0, usage("a process of a race is started by \"race\" alone")
	}
	if _, err := r.Get(ctx, c.child); err != nil && !errors.Is(err, jobrun.ErrNotFound) { // connects
		return 0, err
	}
	fmt.Fprintln(c.out, racePrefix+"ready")
	if _, err := c.in.ReadString('\n'); err != nil {
		return 0, errors.New("the race was called off")
	}
	var executed atomic.Int64
	res, err := r.RunDate(ctx, jobrun.Job{Name: c.child, Func: func(context.Context, *jobrun.Run) error {
		executed.Add(1)
		return nil
	}}, date)
	a := answer{Decision: res.Decision, Executed: executed.Load(), Status: res.Record.Status, WorkerID: res.Record.WorkerID}
	if err != nil {
		a.Error = err.Error()
	}
	text, err := json.Marshal(a)
	if err != nil {
		return 0, err
	}
	fmt.Fprintln(c.out, racePrefix+string(text))
	return ExitFine, nil
}
