// Package ops is what operators use, on the public API of jobrun alone: the whole
// command as a function, so that a service ships it with its own jobs.
//
//	if len(os.Args) > 1 && os.Args[1] == "jobs" {
//		os.Exit(ops.Main(ctx, runner, os.Args[2:], settlement, reminders))
//	}
//
// Who has no service at hand uses the stand-alone command, ops/jobrunctl.
package ops

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/seed-ccb5b62c/jobrun"
)

// The exit codes of [Main].
const (
	ExitFine      = 0 // done, and nothing needs a person
	ExitError     = 1 // it could not be done or found, or was not confirmed
	ExitUsage     = 2 // the arguments make no sense; nothing was done
	ExitAttention = 3 // something needs a person: attention, stale, missed, and a re-run that failed
	ExitConflict  = 4 // the run is not as it was seen, or its state does not allow the action; nothing was changed
)

// Main is the operator's command for the runs that runner's tables hold: args are
// what follows the command's own words, such as {"show", "daily-settlement:2026-09-15"}.
// It reads standard input when it asks on a terminal, writes to standard output and
// standard error, and returns the exit code. The jobs are those whose missed dates
// it judges; none: those registered by Runner.Schedule. It executes no job.
//
// "race" starts this program again with the same arguments before args, so Main has
// to be called with the end of os.Args.
func Main(ctx context.Context, runner *jobrun.Runner, args []string, jobs ...jobrun.Job) int {
	c := newCommand(args)
	c.jobs, c.knowsJobs = jobs, true
	c.open = func(context.Context, bool) (*jobrun.Runner, func(), error) { return runner, func() {}, nil }
	return c.main(ctx, args)
}

// command is one call of the command: its surroundings and, by parse, its flags.
type command struct {
	name      string                      // as a person types it: "jobrunctl", "myservice jobs"
	before    []string                    // the arguments of this process before those of the command; nil: unknown
	pass      func() (args, env []string) // what another process of this command needs beside that
	jobs      []jobrun.Job
	knowsJobs bool
	in        *bufio.Reader
	out, err  io.Writer
	asks      bool // standard input and standard error are a terminal
	width     int  // of the terminal that shows the output; 0: no terminal, no limit
	settings  func(*flag.FlagSet)
	open      func(ctx context.Context, talk bool) (*jobrun.Runner, func(), error)

	json bool
	told bool     // JSON was printed
	args []string // what is no flag

	job, status, from, to, after string // list, missed
	limit                        int
	dueBy, since                 time.Duration // attention, missed
	by, reason                   string        // actions
	force, reset, yes, wait      bool
	attempt                      int
	timeout                      time.Duration
	pruneBefore                  string // prune
	processes                    int    // race
	child                        string
	at                           string
}

// newCommand is a command of this process that was given these arguments.
func newCommand(args []string) *command {
	c := &command{name: filepath.Base(os.Args[0]), in: bufio.NewReader(io.LimitReader(os.Stdin, 64<<10)), out: os.Stdout, err: os.Stderr}
	if n := len(os.Args) - len(args); n > 0 && slices.Equal(os.Args[n:], args) {
		c.before = os.Args[1:n]
		c.name = strings.Join(append([]string{c.name}, c.before...), " ")
	}
	_, in := terminal(os.Stdin)
	_, shown := terminal(os.Stderr)
	c.asks = in && shown
	c.width, _ = terminal(os.Stdout)
	c.out = &checked{w: c.out}
	c.pass = func() (args, env []string) { return nil, nil }
	return c
}

// usageError is what is wrong with the arguments.
type usageError struct{ what string }

func (e *usageError) Error() string { return e.what }

func usage(format string, values ...any) error { return &usageError{fmt.Sprintf(format, values...)} }

// errNotConfirmed: the person did not say yes.
var errNotConfirmed = errors.New("not confirmed, nothing was changed")

// verb is one of the commands.
type verb struct {
	name, args string // args as the help shows them; "": none
	needs      string // flags that are required
	about      string
	examples   []string
	talk       bool // what the library logs at INFO is part of the answer
	flags      func(c *command, fs *flag.FlagSet)
	do         func(c *command, ctx context.Context, r *jobrun.Runner) (int, error)
}

// verbs are the commands in the order of the help.
func verbs() []verb {
	return []verb{
		{
			name: "attention", about: "what needs a person now: stale, failed, waiting and missed runs",
			examples: []string{"attention --due-by 2h", "attention --since 24h --json"}, flags: (*command).attentionFlags, do: (*command).attention,
		},
		{
			name: "stale", about: "RUNNING runs that are silent or over their limit, with the evidence",
			examples: []string{"stale"}, do: (*command).stale,
		},
		{
			name: "missed", about: "due dates without a run, by the rules of the service's jobs",
			examples: []string{"missed --from 2026-09-01 --to 2026-09-30", "missed --job daily-settlement"}, flags: (*command).missedFlags, do: (*command).missed,
		},
		{
			name: "list", about: "runs, by key from the last to the first",
			examples: []string{"list --job daily-settlement --limit 10", "list --status FAILED,RUNNING --from 2026-09-01"}, flags: (*command).listFlags, do: (*command).list,
		},
		{
			name: "show", args: "KEY", about: "one run, with the evidence if it is RUNNING, and what can be done",
			examples: []string{"show daily-settlement:2026-09-15"}, do: (*command).show,
		},
		{
			name: "history", args: "KEY", about: "the attempts of a run and what people did about it",
			examples: []string{"history daily-settlement:2026-09-15"}, do: (*command).history,
		},
		{
			name: "mark-failed", args: "KEY", needs: "--reason TEXT", about: "end a RUNNING run that is dead",
			examples: []string{
				`mark-failed daily-settlement:2026-09-15 --reason "pod evicted at 01:03, no session left"`,
				`mark-failed daily-settlement:2026-09-15 --reason "pod evicted" --yes --attempt 2`,
			}, flags: (*command).actFlags, do: (*command).markFailed,
		},
		{
			name: "rerun", args: "KEY", needs: "--reason TEXT", about: "approve one more execution on the same key",
			examples: []string{
				`rerun daily-settlement:2026-09-15 --reason "rates loaded" --wait`,
				`rerun daily-settlement:2026-09-15 --reason "rates loaded" --yes --attempt 1`,
			}, flags: (*command).rerunFlags, do: (*command).rerun,
		},
		{
			name: "skip", args: "KEY", needs: "--reason TEXT", about: "record that a run is not to happen: there is none yet, or it FAILED",
			examples: []string{`skip daily-settlement:2026-09-24 --reason "no trading"`}, flags: (*command).actFlags, do: (*command).skip,
		},
		{name: "verify", about: "judge the tables, the privileges and the clock", talk: true, examples: []string{"verify"}, do: (*command).verify},
		{name: "migrate", about: "create or complete the tables", talk: true, examples: []string{"migrate"}, do: (*command).migrate},
		{
			name: "prune", needs: "--before DATE", about: "remove the attempts and items of runs that are over; the dated runs stay and can never run again",
			examples: []string{"prune --before 2025-01-01"}, flags: (*command).pruneFlags, do: (*command).prune,
		},
		{
			name: "race", about: "start real processes for one throw-away key on this database: exactly one must win",
			examples: []string{"race", "race --processes 16"}, flags: (*command).raceFlags, do: (*command).race,
		},
	}
}

// main finds the verb, parses its flags and does it.
func (c *command) main(ctx context.Context, args []string) int {
	global := c.flagSet("")
	if err := global.Parse(args); errors.Is(err, flag.ErrHelp) {
		c.help()
		return ExitFine
	} else if err != nil {
		return c.fail(&usageError{misused(err)})
	}
	if global.NArg() == 0 {
		c.help()
		return ExitUsage
	}
	name, args := global.Arg(0), global.Args()[1:]
	all := verbs()
	if name == "help" && len(args) == 1 {
		name, args = args[0], []string{"--help"}
	}
	i := slices.IndexFunc(all, func(v verb) bool { return v.name == name })
	if i < 0 {
		if name == "help" {
			c.help()
			return ExitFine
		}
		return c.fail(usage("no command %q: %q lists them", name, c.name+" help"))
	}
	v := all[i]
	fs := c.flagSet(v.name)
	if v.flags != nil {
		v.flags(c, fs)
	}
	rest, err := interleaved(fs, args)
	wanted := strings.Fields(v.args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		c.helpOf(v, fs)
		return ExitFine
	case err != nil:
		return c.fail(usage("%s: %s", v.name, misused(err)))
	case len(rest) < len(wanted):
		return c.fail(usage("%s needs %s", v.name, v.args))
	case len(rest) > len(wanted):
		return c.fail(usage("%s: unexpected argument %q", v.name, rest[len(wanted)]))
	}
	c.args = rest
	if err := c.check(v.name, fs); err != nil {
		return c.fail(err)
	}
	r, done, err := c.open(ctx, v.talk)
	if err != nil {
		return c.fail(err)
	}
	defer done()
	code, err := v.do(c, ctx, r)
	if out, ok := c.out.(*checked); ok && err == nil {
		err = out.err
	}
	if err != nil {
		return c.fail(err)
	}
	return code
}

// checked remembers the first error of a writer.
type checked struct {
	w   io.Writer
	err error
}

func (c *checked) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.err = cmp.Or(c.err, err)
	return n, err
}

// flagSet is a new set of the flags that every command has.
func (c *command) flagSet(name string) *flag.FlagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	fs.BoolVar(&c.json, "json", c.json, "print JSON")
	if c.settings != nil {
		c.settings(fs)
	}
	return fs
}

// interleaved parses flags that stand before and behind other arguments, and
// returns those. Behind "--" nothing is a flag.
func interleaved(fs *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		if n := len(args) - fs.NArg(); n > 0 && args[n-1] == "--" {
			return append(rest, fs.Args()...), nil
		}
		if args = fs.Args(); len(args) == 0 {
			return rest, nil
		}
		rest, args = append(rest, args[0]), args[1:]
	}
}

// fail prints an error and returns its exit code. Further lines of its text, which
// may be another program's, are indented: they cannot pass for lines of the command.
func (c *command) fail(err error) int {
	text := flagNames.Replace(err.Error())
	switch {
	case errors.Is(err, jobrun.ErrNotFound):
		text += "; a key is a job's name, a colon, and a date or a slot: \"" + c.name + " list\" has them"
	case errors.Is(err, context.DeadlineExceeded):
		text += " (the database did not answer in time)"
	}
	text = strings.ReplaceAll(text, "run Migrate)", "run \""+c.name+" migrate\")")
	text = strings.ReplaceAll(visible(strings.ReplaceAll(text, "\t", " "), "\n"), "\n", "\n    ")
	fmt.Fprintf(c.err, "%s: %s\n", c.name, text)
	code := ExitError
	switch {
	case errors.As(err, new(*usageError)), errors.As(err, new(*jobrun.InvalidError)):
		code = ExitUsage
	case errors.Is(err, jobrun.ErrConflict), errors.Is(err, jobrun.ErrAlive):
		code = ExitConflict
	}
	if c.json && !c.told {
		_ = c.print(struct {
			Error string `json:"error"`
			Code  int    `json:"exit_code"`
		}{err.Error(), code})
	}
	return code
}

// flagNames are the words of the library's errors that the command has flags for.
var flagNames = strings.NewReplacer(
	"jobrun: Filter.Limit", "--limit", "jobrun: Filter.Job", "--job", "jobrun: Filter.After", "--after", "jobrun: Filter.Status", "--status",
	"jobrun: AttentionOptions.DueBy", "--due-by", "jobrun: Action.By", "--by", "jobrun: Action.Reason", "--reason", "jobrun: Options.Schema", "--schema",
	"jobrun: zone is \"time.Local\"", "--zone is \"Local\"", "only Force runs it again", "only --force runs it again",
	"jobrun: before is", "--before is", "1 to 1000, or 0 for 100", "1 to 1000",
)

// misused is what is wrong with a flag, with what is wanted.
func misused(err error) string {
	text := strings.NewReplacer("not defined: -", "not defined: --", "flag -", "flag --", "argument: -", "argument: --").Replace(err.Error())
	for flag, want := range map[string]string{"since": "a duration such as 24h", "timeout": "a duration such as 30m", "attempt": "a number", "limit": "a number", "processes": "a number"} {
		if before, found := strings.CutSuffix(text, "flag --"+flag+": parse error"); found {
			return before + "flag --" + flag + ", wanted: " + want
		}
	}
	return text
}

// help prints what there is.
func (c *command) help() {
	fmt.Fprintf(c.out, "Usage: %s COMMAND [KEY] [--flag value ...]\n\nThe runs of batch jobs: what needs a person, and what people decide.\n\n", c.name)
	for _, v := range verbs() {
		fmt.Fprintf(c.out, "  %-18s %s\n", strings.TrimSpace(v.name+" "+v.args), v.about)
	}
	fmt.Fprintf(c.out, "\nFlags of every command:\n")
	c.flagHelp(c.flagSet(""))
	fmt.Fprintf(c.out, `
Exit codes:
  0  done, and nothing needs a person
  1  it could not be done or found, or was not confirmed
  2  the arguments make no sense; nothing was done
  3  something needs a person: attention, stale, missed, and a re-run that failed
  4  the run is not as it was seen, or its state does not allow the action; nothing was changed

"%[1]s COMMAND --help" has the flags of a command and examples.
`, c.name)
}

// helpOf prints what there is to know about one command.
func (c *command) helpOf(v verb, fs *flag.FlagSet) {
	fmt.Fprintf(c.out, "Usage: %s\n\n%s%s.\n\nFlags:\n", strings.Join(strings.Fields(c.name+" "+v.name+" "+v.args+" "+v.needs+" [--flag value ...]"), " "), strings.ToUpper(v.about[:1]), v.about[1:])
	c.flagHelp(fs)
	fmt.Fprintf(c.out, "\nExamples:\n")
	for _, e := range v.examples {
		fmt.Fprintf(c.out, "  %s %s\n", c.name, e)
	}
}

func (c *command) flagHelp(fs *flag.FlagSet) {
	fs.VisitAll(func(f *flag.Flag) {
		if strings.HasPrefix(f.Usage, "-") { // not for people
			return
		}
		kind, about := flag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "true" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "0s" && f.DefValue != "-1" {
			about += fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(c.out, "  %-24s %s\n", strings.TrimSpace("--"+f.Name+" "+kind), about)
	})
}

// check refuses values before anything is opened.
func (c *command) check(name string, fs *flag.FlagSet) error {
	switch name {
	case "mark-failed", "rerun", "skip":
		return c.checkAct(fs)
	case "prune":
		if c.pruneBefore == "" {
			return usage("prune needs --before, a date")
		}
	case "race":
		return c.checkRace()
	case "missed":
		if !c.knowsJobs {
			return usage("missed needs the rules of the jobs, which only the service knows: its own command has it (ops.Main)")
		}
	}
	return nil
}
