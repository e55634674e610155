/*
 * The protocol of one run: its row, the history of its attempts, its ledger, and
 * those who act on them: instances that call Run or RetryDue, a person, the
 * database server and, if asked for, another program's plain SQL. doc.go says how
 * to run it; README.md says which step stands for which statement of the code.
 *
 * One database statement is one atomic step, as the lock on the run's row makes
 * it. Any steps of others may come between two steps of a process: one that stands
 * still for longer than its lease is such an interleaving. An answer may be lost
 * before the statement took effect or after, and a process may die at every step.
 */

/* The settings, and their values without -DCALLS=3 and so on. They do not change;
   they are variables so that the tests can use one checker with many values. */
#ifndef CALLS
#define CALLS 2
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 2
#endif
#ifndef ACTIONS
#define ACTIONS 2
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef TX
#define TX 0
#endif
#ifndef PLAINSQL
#define PLAINSQL 0
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef FIND
#define FIND 0
#endif
#define INSTANCES 2
hidden byte
	calls = CALLS,       /* of all instances together */
	attempts = ATTEMPTS, /* of the run, at most 3; there may be more than calls, or fewer */
	actions = ACTIONS,   /* of the person */
	items = ITEMS,       /* that the job does by Once or Each, 1 or 2 */
	tx = TX,             /* 1: the job begins with a Tx */
	plainsql = PLAINSQL, /* 1: another program ends the run by a blind UPDATE; 2: deletes its row */
	late = LATE;         /* 1: the server may execute a claim's statement after its repeat */

/* Mutants: -DMUTANT=name leaves a guard out, and the checker must notice. */
#define without(guard) (mutant == guard)
#define FENCE_RUNNING     1 /* the fence does not ask for RUNNING */
#define FENCE_HOLDER      2 /* the fence asks for neither attempt nor token */
#define FENCE_ATTEMPT     3 /* the fence asks for no attempt */
#define FENCE_TOKEN       4 /* the fence asks for no token */
#define FENCE_LOCK        5 /* the fence holds no lock until the commit */
#define FINISH_RUNNING    6 /* finish does not ask for RUNNING */
#define FINISH_HOLDER     7 /* finish asks for neither attempt nor token */
#define FINISH_ATTEMPT    8 /* finish asks for no attempt */
#define FINISH_TOKEN      9 /* finish asks for no token */
#define FINISH_LOST      10 /* a repeated finish that finds nothing is taken for a lost lease */
#define FINISH_DONE      11 /* a repeated finish that finds nothing is taken for recorded */
#define CLAIM_ABSENT     12 /* a first claim does not ask whether there is a row */
#define CLAIM_UNSEEN     13 /* "no row in the answer" is taken for "not mine" */
#define CLAIM_SETTLE     14 /* a claim whose answer was lost is given up and not closed */
#define CLAIM_HOLDER     15 /* a RUNNING row is taken for the own claim, whatever its token */
#define CLAIM_TOKEN      16 /* the repeat of a claim has another token */
#define CLAIM_NUMBER     17 /* the first attempt is 1, whatever the history says */
#define RECLAIM_AGE      18 /* a RUNNING row whose lease has ended is claimed */
#define RECLAIM_NOW      19 /* a re-claim does not ask whether the run is still due or approved */
#define RECLAIM_SEEN     20 /* a re-claim does not ask whether the run is the attempt that was seen */
#define RECLAIM_STATUS   21 /* a re-claim asks neither for the status nor for the end that was seen */
#define RECLAIM_BLIND    22 /* a re-claim asks for nothing of what was seen, nor whether it is claimable */
#define RECLAIM_AS_LEFT  23 /* next_attempt_at counts although plain SQL has ended the run since */
#define APPROVAL_FITS    24 /* an approval counts whatever has become of the row */
#define APPROVAL_CLEARED 25 /* a re-claim does not clear it */
#define APPROVAL_ONCE    26 /* neither of the two */
#define ABANDON_HOLDER   27 /* "never started" is written whoever holds the run */
#define ABANDON_APPROVAL 28 /* "never started" does not give the approval back */
#define RERUN_RETRIED    29 /* an approved re-run that fails is retried */
#define COMMIT_DONE      30 /* a COMMIT without an answer is taken for done */
#define COMMIT_AGAIN     31 /* a COMMIT without an answer is taken for undone */
#define COMPLETE_SPLIT   32 /* Complete's work and SUCCEEDED are two commits */
#define LEDGER_SPLIT     33 /* an item is entered in the ledger by a commit before its work */
#define LEDGER_IGNORED   34 /* an item's work is done whether the ledger has it or not */
#define ACT_SEEN         35 /* an action does not ask whether the run is as the person saw it */
#define ACT_ALIVE        36 /* MarkFailed without Force does not ask for heartbeats */
#define ACT_FORCE        37 /* ApproveRerun accepts SUCCEEDED without Force */
#define ACT_PENDING      38 /* a second approval is accepted while one is pending */
#define ACT_SKIP         39 /* Skip is accepted while an approval is pending */
#define ACT_AGAIN        40 /* a repeated action that is refused is a conflict, whoever was first */

/* Witnesses: -DFIND=name makes an error of something that must be possible. */
#define witness(what) if :: find == what -> assert(found) :: else fi
#define AFTER_CRASH       1 /* a process died, a person acted, attempt 2 SUCCEEDED */
#define AFTER_FAILURE     2 /* attempt 1 failed, attempt 2 was due and SUCCEEDED */
#define AFTER_NOTHING     3 /* attempt 1 was closed as never started, attempt 2 SUCCEEDED */
#define AFTER_SUCCESS     4 /* both SUCCEEDED, the second with Force */
#define RERUN_DONE        5 /* an approved re-run SUCCEEDED */
#define ZOMBIE_FENCED     6 /* the fence of a superseded attempt is refused while the next one runs */
#define ZOMBIE_ENDED      7 /* its result is refused */
#define CLAIM_FOUND       8 /* a claim whose answer was lost is found by its token */
#define CLAIM_RACED       9 /* a re-claim finds that the run was changed since it was read */
#define FATE_COMMITTED   10 /* the answer to COMMIT was lost, and it had been committed */
#define FATE_ABORTED     11 /* the answer to COMMIT was lost, and it had not */
#define FATE_PROVED      12 /* the server that knew it is gone, and the ledger tells */
#define FATE_COMPLETE    13 /* a Complete in doubt is found SUCCEEDED when the result is recorded */
#define ACT_FOUND        14 /* an action whose answer was lost is found by its token */

hidden byte
	mutant = MUTANT, /* the guard that is left out */
	find = FIND;     /* the witness that is looked for */

/* The rules. Their names are variables that stay 0: an assertion of one always
   fails, is reached only when the rule is broken, and is named by the checker. */
hidden byte
	one_live_attempt,        /* RUNNING, and one open attempt in the history, its own: both or neither */
	executed_once,           /* an attempt's function is called at most once */
	numbers_never_repeat,    /* attempt numbers */
	one_success,             /* at most one attempt without Force reaches SUCCEEDED */
	success_is_whole,        /* SUCCEEDED: the work of every item is committed, once */
	item_once,               /* the work of an item is committed at most once, until its ledger is reset */
	work_once,               /* the work of one call of Tx is committed at most once */
	complete_once,           /* the work of Complete is committed with SUCCEEDED or not at all */
	nothing_when_superseded, /* what an attempt commits it commits while it holds the run */
	nothing_by_age,          /* a claim: the first, or after a worker's FAILED that is due, or an approval */
	one_approval_one_run,    /* an approval lasts until one claim uses it up, and that is marked as a re-run */
	unstarted_only,          /* "never started" closes an own claim that was not executed */
	told_as_recorded,        /* the outcome that a call returns is the one in the attempt's history */
	lost_only_if_ended,      /* ErrLeaseLost is returned only if somebody else has ended the attempt */
	acted_as_seen,           /* an action takes effect on the run as the person saw it */
	acted_as_told,           /* and if it did, the person is not told otherwise */
	alive_needs_force,       /* MarkFailed without Force ends no attempt whose lease lasts */
	no_orphan,               /* at the end, the process of a RUNNING attempt has died or told ErrOutcomeUnknown */
	found;
#define must(rule, condition) if :: condition :: else -> assert(rule) fi

/* The tables. */
mtype = { RUNNING, SUCCEEDED, FAILED, SKIPPED }; /* a status or an outcome; 0: no row, or none */
mtype = { WORKER, PERSON, OUTSIDE };             /* who ended an attempt */

typedef Row {
	mtype status;
	byte attempt, token;
	bit due;             /* next_attempt_at is set, and reached */
	bit changed;         /* ended by plain SQL: finished_at is not the attempt's */
	bit approved;        /* with what was approved: */
	byte onAttempt;
	mtype onStatus;
	bit onChanged
};
Row row;

typedef Attempt {
	bit open, rerun;
	byte token;
	mtype outcome, by;
	bit executed         /* not in the table: the function was called */
};
Attempt history[4]; /* from 1 */
byte last;                  /* the highest number in it */
byte openAttempts;
bit alive;                  /* the newest attempt's heartbeat is younger than its lease */

bit ledger[2];          /* the item's row is committed */
byte done[2];           /* not in the tables: its work is committed so often */
byte holder[2];         /* 1 + the instance whose open transaction has entered the item; 0: none */

/* Not in the tables: what the rules need to know of the past. */
mtype = { CLAIM, RERUN };   /* what may be claimed: by anybody, as the approved re-run */
mtype right = CLAIM;        /* 0: nothing */
byte successes = 1;         /* how often it may still SUCCEED: with Force once more */
bit loose;                  /* Complete's work was committed without SUCCEEDED */
bit orphan;                 /* the process of the RUNNING attempt died, or returned ErrOutcomeUnknown */
bit crashed;                /* only if FIND asks for it */

/* The transaction of work in a session of each instance, as the server has it: when
   the process dies, the server ends it at once, unless a COMMIT is under way. */
mtype = { ITEM, PLAIN, COMPLETE }; /* Once or Each; Tx; Complete */
mtype = { OPEN, FENCED };
typedef Transaction {
	mtype state;         /* 0: none */
	mtype kind;
	byte attempt, token, item;
	bit flying;          /* the answer to COMMIT was lost, and the server is still at it */
	bit left             /* nobody asks what became of it any more */
};
Transaction session[INSTANCES];
byte worked[INSTANCES];      /* not in the tables: commits of the work of the present call of Tx */

/* A claim's statement that the client has given up and the server not. */
typedef Statement {
	bit sent;
	byte token;
	bit take;            /* a re-claim, of the run as seen: */
	mtype seenStatus;
	byte seenAttempt, seenToken;
	bit seenChanged;
	bit died             /* so did its process */
};
Statement delayed[INSTANCES];

byte called, acted;
bit ok; /* the answer of the last statement: it found what it asked for */

/* The guards. (A parameter must not be the beginning of a field's name: spin would
   replace that too.) */
#define fits(nr, key) (row.attempt == nr && row.token == key)
#define holds(nr, key) (row.status == RUNNING && fits(nr, key))
#define stillOurs(nr, key) ((row.status == RUNNING || without(FENCE_RUNNING)) \
	&& (row.attempt == nr || without(FENCE_ATTEMPT) || without(FENCE_HOLDER)) \
	&& (row.token == key || without(FENCE_TOKEN) || without(FENCE_HOLDER)))
#define mayFinish(nr, key) ((row.status == RUNNING || without(FINISH_RUNNING)) \
	&& (row.attempt == nr || without(FINISH_ATTEMPT) || without(FINISH_HOLDER)) \
	&& (row.token == key || without(FINISH_TOKEN) || without(FINISH_HOLDER)))
#define approvalFits (row.onAttempt == row.attempt && row.onStatus == row.status && row.onChanged == row.changed)
#define approvedNow (row.approved && row.status != RUNNING && row.status != 0 \
	&& (approvalFits || without(APPROVAL_FITS) || without(APPROVAL_ONCE)))
#define dueNow (row.due && row.status == FAILED && (!row.changed || without(RECLAIM_AS_LEFT)))
#define outlived (row.status == RUNNING && !alive)
#define claimable (last < attempts && (approvedNow || dueNow || without(RECLAIM_AGE) && outlived))

/* locked: a transaction between its fence and the end of its commit keeps
   everybody from changing the row. */
#define locks(p) (session[p].state == FENCED && !without(FENCE_LOCK))
#define locked (locks(0) || locks(1))
#define sealed(p) (locks(p) && session[p].kind == COMPLETE)

inline noApproval() {
	row.approved = 0; row.onAttempt = 0; row.onStatus = 0; row.onChanged = 0
}

/* ended: nobody holds the run any more. */
inline ended() {
	row.due = 0; right = 0; alive = 0; orphan = 0
}

/* close ends the open attempt n in the history. */
inline close(n, how, who) {
	if
	:: history[n].open -> openAttempts--; history[n].open = 0; history[n].outcome = how; history[n].by = who
	:: else
	fi
}

/* begin makes the run RUNNING as attempt n, and enters that in the history. */
inline begin(n, key, anew) {
	must(nothing_by_age, right != 0);
	must(one_approval_one_run, (right == RERUN) == anew);
	must(numbers_never_repeat, n > last);
	right = 0;
	row.status = RUNNING; row.attempt = n; row.token = key; row.due = 0; row.changed = 0;
	openAttempts++; history[n].token = key; history[n].open = 1; history[n].rerun = anew;
	history[n].outcome = 0; history[n].by = 0;
	last = (n > last -> n : last);
	alive = 1; orphan = 0
}

/* claimSQL */
inline insert(key) {
	d_step {
		if
		:: (row.status == 0 || without(CLAIM_ABSENT)) && last < attempts ->
			begin((without(CLAIM_NUMBER) -> 1 : last + 1), key, 0)
		:: else ->
			if
			:: holds(last, key) -> witness(CLAIM_FOUND)
			:: else
			fi
		fi
	}
}

/* reclaimSQL: of the run as seen, if it is due or approved at this moment. */
inline reclaim(key, was, nr, old, mark) {
	d_step {
		if
		:: without(RECLAIM_BLIND) && row.status != 0 && last < attempts ||
			(claimable || without(RECLAIM_NOW) && row.status != 0 && last < attempts) &&
			(fits(nr, old) || without(RECLAIM_SEEN)) &&
			(row.status == was && row.changed == mark || without(RECLAIM_STATUS)) ->
			close(row.attempt, row.status, OUTSIDE);
			if
			:: approvedNow -> begin(last + 1, key, 1)
			:: else -> begin(last + 1, key, 0)
			fi;
			if
			:: without(APPROVAL_CLEARED) || without(APPROVAL_ONCE)
			:: else -> noApproval()
			fi
		:: else -> witness(CLAIM_RACED)
		fi
	}
}

/* abandonSQL */
inline abandon(nr, key) {
	d_step {
		if
		:: holds(nr, key) || without(ABANDON_HOLDER) ->
			must(unstarted_only, fits(nr, key) && history[nr].executed == 0);
			row.status = FAILED; ended(); row.due = 1; right = (history[nr].rerun -> RERUN : CLAIM);
			if
			:: history[nr].rerun && !without(ABANDON_APPROVAL) ->
				row.approved = 1; row.onAttempt = nr; row.onStatus = FAILED
			:: else
			fi;
			close(nr, FAILED, WORKER)
		:: else
		fi
	}
}

/* record is what finishSQL writes. */
inline record(n, how, next) {
	row.status = how; ended(); row.due = next; right = (next && !history[n].rerun -> CLAIM : 0);
	close(n, how, WORKER);
	if
	:: how == SUCCEEDED -> must(one_success, successes > 0); successes--
	:: else
	fi
}

/* finishSQL */
inline finish(nr, key, how, next) {
	d_step {
		if
		:: mayFinish(nr, key) ->
			ok = 1; record(nr, how, next)
		:: else
		fi
	}
}

/* fenceSQL, or sealSQL with what finishSQL writes: nobody sees that before the commit. */
inline fence(p) {
	d_step {
		if
		:: stillOurs(session[p].attempt, session[p].token) -> session[p].state = FENCED
		:: else ->
			if
			:: row.status == RUNNING && row.attempt > session[p].attempt -> witness(ZOMBIE_FENCED)
			:: else
			fi
		fi
	}
}

/* COMMIT */
inline commit(p) {
	d_step {
		must(nothing_when_superseded, holds(session[p].attempt, session[p].token));
		if
		:: session[p].kind == ITEM -> ledger[session[p].item] = 1; done[session[p].item]++; holder[session[p].item] = 0
		:: session[p].kind == PLAIN -> worked[p]++
		:: session[p].kind == COMPLETE ->
			must(complete_once, !loose);
			if
			:: without(COMPLETE_SPLIT) -> loose = 1
			:: else -> record(session[p].attempt, SUCCEEDED, 0)
			fi
		fi;
		must(work_once, worked[p] <= 1);
		session[p].state = 0
	}
}

/* leave ends the client's interest in its transaction: it knows what became of it,
   or gives up, or has died. If no COMMIT was sent, that is a ROLLBACK. */
inline leave(p) {
	d_step {
		if
		:: session[p].flying -> session[p].left = 1
		:: else ->
			if
			:: session[p].state != 0 && session[p].kind == ITEM -> holder[session[p].item] = 0
			:: else
			fi;
			session[p].state = 0; session[p].kind = 0; session[p].attempt = 0; session[p].token = 0;
			session[p].item = 0; session[p].left = 0
		fi
	}
}

/* start begins a transaction, whose first statements are the work. */
inline start(p, what, nr, key, which) {
	session[p].state = OPEN; session[p].kind = what; session[p].attempt = nr; session[p].token = key; session[p].item = which
}

/* die ends the process that made the call. */
inline die() {
	leave(_pid);
	d_step {
		delayed[_pid].died = delayed[_pid].sent;
		if
		:: row.status == RUNNING && row.token == token ->
			orphan = 1; crashed = (find == AFTER_CRASH && history[row.attempt].executed)
		:: else
		fi
	}
}

/* told: the call returns this outcome. */
inline told(nr, how) {
	must(told_as_recorded, history[nr].by == WORKER && history[nr].outcome == how)
}

/* fail: the function returns an error; Retry allows another attempt, or not. */
inline fail() {
	leave(_pid); outcome = FAILED;
	if
	:: !history[attempt].rerun || without(RERUN_RETRIED) -> again = 1
	:: skip
	fi
}

/* bye ends a call. What the history says of its attempt nobody reads any more, but
   for witnesses: forgetting it leaves fewer states. */
inline bye() {
	d_step {
		if
		:: !find && attempt != 0 && !history[attempt].open ->
			history[attempt].token = 0; history[attempt].rerun = 0; history[attempt].executed = 0;
			history[attempt].outcome = 0; history[attempt].by = 0
		:: else
		fi;
		token = 0; attempt = 0; step = 0; closing = 0; sealing = 0; again = 0; outcome = 0;
		seenStatus = 0; seenAttempt = 0; seenToken = 0; seenChanged = 0
	}
}

/* An instance makes calls one after the other; when its process dies, by a new one.
   The job is: Tx, Once for every item, then Complete or return nil; or it ends
   before that with an error or SkipRun. */
active [INSTANCES] proctype Instance() {
	byte token, attempt, step, seenAttempt, seenToken;
	bit closing; /* the claim will not be executed, only closed */
	bit sealing; /* Complete has sent the end of the attempt */
	bit again;   /* the failed attempt may be followed by another */
	mtype outcome, seenStatus;
	bit seenChanged;

call:
	atomic { bye() };
end:
	atomic { /* the instances are alike: that 0 makes the first call leaves out nothing */
		called < calls && (_pid == 0 || called > 0) && session[_pid].state == 0 && !delayed[_pid].sent ->
		called++; token = called; worked[_pid] = 0
	}

establish: /* makes the run's row, or reads it */
	if
	:: atomic {
		insert(token);
		if
		:: skip -> /* the answer is lost: repeat */
			if
			:: without(CLAIM_SETTLE) -> goto call
			:: without(CLAIM_TOKEN) && called < calls -> called++; token = called
			:: else
			fi
		:: without(CLAIM_UNSEEN) -> goto call /* "no row in the answer": a commit was not visible yet */
		:: row.status == RUNNING && (row.token == token || without(CLAIM_HOLDER)) -> attempt = row.attempt; goto won
		:: row.token == token && row.status != RUNNING -> goto call
		:: row.token != token && claimable ->
			seenStatus = row.status; seenAttempt = row.attempt; seenToken = row.token; seenChanged = row.changed; goto take
		:: row.token != token && !claimable -> goto call
		fi
	}
	:: atomic { late && !delayed[_pid].sent -> delayed[_pid].sent = 1; delayed[_pid].token = token }
	:: atomic { !closing -> closing = 1 } /* an answer is lost, and the call gives up */
	:: atomic { die(); goto call }
	fi;
	goto establish;

take: /* takes the run over, if it still is as it was read */
	if
	:: atomic {
		!locked -> reclaim(token, seenStatus, seenAttempt, seenToken, seenChanged);
		seenStatus = 0; seenAttempt = 0; seenToken = 0; seenChanged = 0;
		if
		:: skip /* the answer is lost, or that it found nothing: look again */
		:: row.status == RUNNING && row.token == token -> attempt = row.attempt; goto won
		fi
	}
	:: atomic {
		late && !delayed[_pid].sent ->
		delayed[_pid].sent = 1; delayed[_pid].token = token; delayed[_pid].take = 1;
		delayed[_pid].seenStatus = seenStatus; delayed[_pid].seenAttempt = seenAttempt;
		delayed[_pid].seenToken = seenToken; delayed[_pid].seenChanged = seenChanged;
		seenStatus = 0; seenAttempt = 0; seenToken = 0; seenChanged = 0
	}
	:: atomic { die(); goto call }
	fi;
	goto establish;

won: /* the claim is certain: calls the function, or closes the claim as never started */
	if
	:: atomic {
		!closing -> must(executed_once, !history[attempt].executed);
		history[attempt].executed = 1; step = 1 - tx; goto work
	}
	:: atomic {
		!locked -> abandon(attempt, token);
		if
		:: closing = 1; goto won /* the answer is lost: repeat */
		:: goto call
		fi
	}
	:: atomic { die(); goto call }
	fi;

work: /* the function between its transactions */
	if
	:: d_step { holds(attempt, token) && !alive -> alive = 1 } /* a heartbeat; what is answered only ends it sooner */
	:: atomic { step == 0 && session[_pid].state == 0 -> start(_pid, PLAIN, attempt, token, 0); goto transaction }
	:: atomic {
		step > 0 && step <= items && session[_pid].state == 0 ->
		if
		:: ledger[step - 1] && !without(LEDGER_IGNORED) -> step++
		:: (!ledger[step - 1] || without(LEDGER_IGNORED)) && holder[step - 1] == 0 ->
			holder[step - 1] = _pid + 1; start(_pid, ITEM, attempt, token, step - 1);
			ledger[step - 1] = ledger[step - 1] || without(LEDGER_SPLIT); goto transaction
		fi
	}
	:: atomic { step > items && session[_pid].state == 0 -> start(_pid, COMPLETE, attempt, token, 0); goto transaction }
	:: atomic { step > items -> outcome = SUCCEEDED; goto ending } /* it returns nil */
	:: atomic { step == 1 - tx -> outcome = SKIPPED; goto ending } /* or SkipRun */
	:: atomic { fail(); goto ending }
	:: atomic { die(); goto call }
	fi;
	goto work;

transaction: /* its work is done: the fence */
	if
	:: atomic {
		!sealed(1 - _pid) && !(locks(1 - _pid) && session[_pid].kind == COMPLETE) -> fence(_pid);
		if
		:: session[_pid].state == FENCED -> sealing = (sealing || session[_pid].kind == COMPLETE); goto committing
		:: else -> fail(); goto ending
		fi
	}
	:: atomic { fail(); goto ending } /* the work fails, or the server ends the transaction */
	:: atomic { die(); goto call }
	fi;

committing: /* fenced: the COMMIT */
	if
	:: atomic { commit(_pid); leave(_pid); goto committed }
	:: atomic { session[_pid].flying = 1; goto fate } /* the answer is lost */
	:: atomic { fail(); goto ending } /* it was not sent */
	:: atomic { die(); goto call }
	fi;

fate: /* what became of the COMMIT: asks until the server knows */
	if
	:: atomic {
		if
		:: commit(_pid); ok = 1
		:: skip
		fi;
		session[_pid].flying = 0; leave(_pid);
		if
		:: ok -> witness(FATE_COMMITTED); ok = 0; goto committed
		:: !ok -> witness(FATE_ABORTED); goto work
		:: ok = 0; goto proof /* the server that knew it is gone */
		fi
	}
	:: atomic { fail(); goto ending } /* it cannot be read: ErrOutcomeUnknown */
	:: atomic { die(); goto call }
	:: atomic { without(COMMIT_DONE) -> leave(_pid); goto committed }
	:: atomic { without(COMMIT_AGAIN) -> leave(_pid); goto work }
	fi;

proof: /* read from the tables */
	if
	:: atomic { step > 0 && step <= items && ledger[step - 1] -> witness(FATE_PROVED); goto committed }
	:: atomic { step > 0 && step <= items && !ledger[step - 1] -> goto work }
	:: atomic { step > items && history[attempt].by == WORKER -> goto committed }
	:: atomic { step > items && history[attempt].by != WORKER -> goto work }
	:: atomic { fail(); goto ending } /* there is none of Tx, or it cannot be read: ErrOutcomeUnknown */
	:: atomic { die(); goto call }
	fi;

committed: /* goes on with the next part of the job */
	atomic {
		if
		:: step <= items -> step++; worked[_pid] = 0; goto work
		:: step > items && without(COMPLETE_SPLIT) -> outcome = SUCCEEDED; goto ending
		:: step > items && !without(COMPLETE_SPLIT) -> told(attempt, SUCCEEDED); goto call
		fi
	}

ending: /* records the outcome; if the statement finds nothing, looks where the attempt stands */
	if
	:: atomic {
		!locked -> finish(attempt, token, outcome, again);
		if
		:: skip -> ok = 0 /* the answer is lost: repeat */
		:: ok -> ok = 0; told(attempt, outcome); goto call
		:: !ok && without(FINISH_LOST) ->
			must(lost_only_if_ended, history[attempt].by != WORKER || history[attempt].outcome != outcome); goto call
		:: !ok && without(FINISH_DONE) -> told(attempt, outcome); goto call
		:: !ok && !without(FINISH_LOST) && !without(FINISH_DONE) && !holds(attempt, token) ->
			if
			:: history[attempt].by == WORKER && history[attempt].outcome == SUCCEEDED && sealing ->
				witness(FATE_COMPLETE); told(attempt, SUCCEEDED)
			:: history[attempt].by == WORKER && history[attempt].outcome == outcome -> told(attempt, outcome)
			:: else ->
				must(lost_only_if_ended, history[attempt].by != WORKER);
				if
				:: row.status == RUNNING && row.attempt > attempt -> witness(ZOMBIE_ENDED)
				:: else
				fi
			fi;
			goto call
		fi
	}
	:: atomic { die(); goto call } /* or the time for it is over: ErrOutcomeUnknown */
	fi;
	goto ending
}

/* The server, apart from statements that are answered: COMMITs and claims that
   nobody waits for any more, and time. */
active proctype Server() {
	byte p;
end:
	do
	:: atomic {
		session[0].left || session[1].left ->
		if
		:: session[0].left
		:: session[1].left -> p = 1
		fi;
		if
		:: commit(p)
		:: skip
		fi;
		session[p].flying = 0; leave(p); p = 0
	}
	:: atomic {
		(delayed[0].sent || delayed[1].sent) && !locked ->
		if
		:: delayed[0].sent
		:: delayed[1].sent -> p = 1
		fi;
		if
		:: !delayed[p].take -> insert(delayed[p].token)
		:: delayed[p].take ->
			reclaim(delayed[p].token, delayed[p].seenStatus, delayed[p].seenAttempt, delayed[p].seenToken, delayed[p].seenChanged)
		:: skip /* it never arrives */
		fi;
		if
		:: delayed[p].died && row.status == RUNNING && row.token == delayed[p].token -> orphan = 1
		:: else
		fi;
		delayed[p].sent = 0; delayed[p].died = 0; delayed[p].token = 0; delayed[p].take = 0;
		delayed[p].seenStatus = 0; delayed[p].seenAttempt = 0; delayed[p].seenToken = 0; delayed[p].seenChanged = 0;
		p = 0
	}
	:: d_step { alive -> alive = 0 } /* the lease ends without a heartbeat */
	od
}

/* A person looks at the run, and acts on what that showed, some time later. */
mtype = { MARK_FAILED, APPROVE_RERUN, SKIP };

#define asSeen (row.status == seenStatus && fits(seenAttempt, seenToken))

/* markFailedSQL, approveSQL, approveResetSQL, skipNewSQL, skipFailedSQL */
inline act() {
	d_step {
		if
		:: action == MARK_FAILED && (asSeen || without(ACT_SEEN)) && row.status == RUNNING &&
			(force || !alive || without(ACT_ALIVE)) ->
			ok = 1;
			must(acted_as_seen, asSeen); must(alive_needs_force, force || !alive);
			row.status = FAILED; ended(); noApproval();
			close(row.attempt, FAILED, PERSON)
		:: action == APPROVE_RERUN && (asSeen || without(ACT_SEEN)) && (!approvedNow || without(ACT_PENDING)) &&
			(row.status == FAILED || row.status == SKIPPED || row.status == SUCCEEDED && (force || without(ACT_FORCE))) ->
			ok = 1;
			must(acted_as_seen, asSeen); must(one_approval_one_run, right != RERUN);
			if
			:: row.status == SUCCEEDED && force -> successes++
			:: else
			fi;
			close(row.attempt, row.status, OUTSIDE);
			row.approved = 1; row.onAttempt = row.attempt; row.onStatus = row.status; row.onChanged = row.changed;
			right = RERUN;
			if
			:: reset -> for (i : 0 .. items - 1) { ledger[i] = 0; done[i] = 0 } i = 0
			:: else
			fi
		:: action == SKIP && seenStatus == 0 && row.status == 0 ->
			ok = 1;
			row.status = SKIPPED; row.attempt = last; row.token = 0; right = 0
		:: action == SKIP && seenStatus != 0 && (asSeen || without(ACT_SEEN)) && row.status == FAILED &&
			(!approvedNow || without(ACT_SKIP)) ->
			ok = 1;
			must(acted_as_seen, asSeen); must(one_approval_one_run, right != RERUN);
			close(row.attempt, row.status, OUTSIDE);
			row.status = SKIPPED; ended(); noApproval()
		:: else
		fi
	}
}

active proctype Person() {
	byte seenAttempt, seenToken, i;
	mtype seenStatus, action;
	bit force, reset;

look:
	if
	:: atomic {
		acted < actions -> acted++;
		seenStatus = row.status; seenAttempt = row.attempt; seenToken = row.token
	}
	:: goto stopped
	fi;

	atomic {
		!locked ->
		if
		:: seenStatus == RUNNING -> action = MARK_FAILED
		:: seenStatus == RUNNING -> action = MARK_FAILED; force = 1
		:: seenStatus != RUNNING && seenStatus != 0 -> action = APPROVE_RERUN
		:: seenStatus != RUNNING && seenStatus != 0 -> action = APPROVE_RERUN; reset = 1
		:: seenStatus == SUCCEEDED -> action = APPROVE_RERUN; force = 1
		:: seenStatus == FAILED || seenStatus == 0 -> action = SKIP
		fi;
		act();
		if
		:: skip /* it is answered, or the person gives up */
		:: ok -> /* the answer is lost, and the repeat refused, because it was first: its token tells */
			must(acted_as_told, !without(ACT_AGAIN)); witness(ACT_FOUND)
		fi;
		ok = 0; action = 0; force = 0; reset = 0;
		seenStatus = 0; seenAttempt = 0; seenToken = 0
	}
	goto look;

stopped:
	skip
}

/* Another program's plain SQL, once or not at all: it waits for the row's lock, and
   asks for nothing. */
active proctype Neighbour() {
end:
	if
	:: atomic {
		plainsql == 1 && row.status != 0 && !locked ->
		row.changed = 1; right = 0; alive = 0; orphan = 0;
		if
		:: row.status != SUCCEEDED -> row.status = SUCCEEDED
		:: row.status == SUCCEEDED -> row.status = FAILED; successes++ /* says that it did not */
		:: row.status != SUCCEEDED -> row.status = FAILED
		:: row.status == SUCCEEDED
		fi
	}
	:: d_step {
		plainsql == 2 && row.status != 0 && !locked ->
		if
		:: row.status == SUCCEEDED -> successes++
		:: else
		fi;
		row.status = 0; row.attempt = 0; row.token = 0; row.changed = 0; noApproval(); ended(); right = CLAIM
	}
	:: plainsql -> skip
	fi
}

/* The rules about the tables at any moment, and about the end. */
#define succeeded (find && row.status == SUCCEEDED && history[row.attempt].by == WORKER)
#define second (succeeded && row.attempt == 2)

active proctype Monitor() {
	do
	:: row.status == RUNNING && !(history[row.attempt].open && history[row.attempt].token == row.token)
		-> assert(one_live_attempt)
	:: !plainsql && openAttempts > (row.status == RUNNING -> 1 : 0) -> assert(one_live_attempt)
	:: (right == RERUN) != approvedNow -> assert(one_approval_one_run)
	:: done[0] > 1 || done[items - 1] > 1 -> assert(item_once)
	:: row.status == SUCCEEDED && !row.approved && !row.changed && !(done[0] == 1 && done[items - 1] == 1)
		-> assert(success_is_whole)
	:: find == AFTER_CRASH && second && crashed && history[1].by == PERSON -> assert(found)
	:: find == AFTER_FAILURE && second && !history[2].rerun && history[1].executed && history[1].by == WORKER
		-> assert(found)
	:: find == AFTER_NOTHING && second && !history[1].executed && history[1].by == WORKER -> assert(found)
	:: find == AFTER_SUCCESS && second && history[1].outcome == SUCCEEDED -> assert(found)
	:: find == RERUN_DONE && succeeded && history[row.attempt].rerun -> assert(found)
	:: timeout -> must(no_orphan, row.status != RUNNING || orphan); break
	od
}
