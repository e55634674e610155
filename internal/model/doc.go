// Package model checks the protocol of jobrun itself, apart from its code and from
// PostgreSQL: protocol.pml is a model of it in Promela, and the checker of spin
// goes through every order in which two instances, a person and a server that loses
// answers can take their steps. The tests elsewhere try some of these orders against a
// real server; here are all of them, of a protocol that is reduced to its decisions.
//
// The model has the row of one run, the history of its attempts, its approvals and
// its ledger. Instances claim, beat, work in fenced transactions and record their
// result; processes die at any step or go on after their lease has ended; answers
// are lost before or after the server has acted; a person ends, approves and skips
// what was seen some time ago. The rules at the top of the file say what must hold in every
// state, and that at the end no run stays RUNNING while its process lives. A mutant
// leaves one guard out, and must be found out; a witness is something that must be
// able to happen, so that the rules do not hold for want of events. README.md says which
// step stands for which statement of the code, and the tests compare the two.
//
// # By hand
//
//	spin -a -DCALLS=3 protocol.pml
//	gcc -O1 -DSAFETY -o pan pan.c
//	./pan -m100000
//
// "errors: 0" without "max search depth too small" and without "out of memory" means
// that nothing was left out. After an error, spin -t -p -DCALLS=3 protocol.pml shows
// the steps that led there. -DMUTANT=FENCE_LOCK and -DFIND=ZOMBIE_FENCED choose a mutant
// and a witness; the first definitions in the file are the other settings and their
// defaults. The package's tests do all this with one checker, which takes its settings
// from the environment, when spin and gcc are installed. They are skipped without them,
// unless JOBRUN_REQUIRE_SPIN is set.
//
// # What is left out, and why that hides nothing
//
//   - Other keys. No statement decides about one run by the rows of another, and a
//     heartbeat that is about many passes over rows that are locked.
//   - Clocks. A lease may end at any moment, and a retry is due as soon as it is
//     allowed: a process that comes too early does nothing, like one that does not come.
//   - What a heartbeat answers. It only ends the function's context, and the function
//     may return an error at any moment anyway.
//   - Isolation levels and lock timeouts. A statement waits for the lock on the run's row and then
//     decides by what the row says, which is READ COMMITTED; the stricter levels and
//     a timeout make it fail instead, and a process may stop trying at any moment.
//     "No row in the answer" only leads to a repeat.
//   - Workers and start times, which tell the rows of other programs apart. Of those
//     programs there is one UPDATE or one DELETE that asks for nothing.
//   - RetryDue, CatchUp and a calendar that leaves a date out: they take some of the
//     branches of a claim, or make the row that Skip makes.
//   - Checkpoints and failures of items: they are rows written in a fenced transaction.
//   - Chunks of Each side by side. One attempt has one transaction at a time here;
//     several share the fence, and the ledger's primary key keeps them apart.
//   - Prune, which passes over runs that may run again.
//   - More instances, calls, attempts and actions than the sizes say.
//   - Progress. That something good happens in the end is only checked for states
//     in which nobody can take a step any more.
package model
