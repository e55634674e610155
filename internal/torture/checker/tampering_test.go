package checker

import (
	"fmt"
	"strings"
)

// set updates a column of the nth change of a key's row.
func set(key string, n int, column, value string) string {
	return fmt.Sprintf(`UPDATE torture.change SET %s = %s WHERE seq = %s`, column, value, nth(key, n))
}

// on puts a key where the statement has %s.
func on(key, sql string) string { return strings.ReplaceAll(sql, "%s", "'"+key+"'") }

// approve makes the nth change of a key leave an approval, which the change numbered
// last finds.
func approve(key string, n, last int) string {
	return edit(key, n, last, "approved_at", `'"2026-01-01T00:00:00Z"'`) + ";" +
		edit(key, n, last, "approved_attempt", "'1'") + ";" +
		edit(key, n, last, "approved_status", `'"FAILED"'`) + ";" +
		edit(key, n, last, "approved_worker", `'"w1-00000001"'`) + ";" +
		fmt.Sprintf(`
			UPDATE torture.change SET after = jsonb_set(after, '{approved_finished_at}', after->'finished_at') WHERE seq = %s;
			UPDATE torture.change SET before = jsonb_set(before, '{approved_finished_at}', before->'finished_at') WHERE seq = %s`, nth(key, n), nth(key, last))
}

// xid is the transaction of the nth change of a key.
func xid(key string, n int) string {
	return fmt.Sprintf(`(SELECT xid FROM torture.change WHERE seq = %s)`, nth(key, n))
}

// tamperings are made to the sound history, each in a transaction that is rolled
// back: what they break must be seen, and nothing else.
var tamperings = []struct {
	name string
	sql  string
	want []string
}{
	{
		"a row that no change has left so", on(completed, `UPDATE batch_job_run SET error_message = 'x' WHERE job_key = %s`),
		[]string{ruleRecord},
	},
	{
		"a row that no change has made", `INSERT INTO batch_job_run (job_key, status, worker_id) VALUES ('plain:2026-02-02', 'FAILED', 'w1')`,
		[]string{ruleRecord},
	},
	{
		"a change that was not written down", on(holiday, `DELETE FROM torture.change WHERE job_key = %s`),
		[]string{ruleRecord, ruleDecision},
	},
	{
		"an acknowledged success that a crash has undone", fmt.Sprintf(`
			DELETE FROM torture.change WHERE seq = %s;
			UPDATE batch_job_run SET status = 'RUNNING', finished_at = NULL, error_message = NULL WHERE job_key = '%s';
			UPDATE batch_job_attempt SET finished_at = NULL, outcome = NULL, ended_by = NULL WHERE job_key = '%s' AND attempt = 2`, nth(deleted, 3), deleted, deleted),
		[]string{ruleAnswer, rulePeace, ruleFinal, ruleStale},
	},

	{
		"a retry before its time", set(retried, 2, "at", "at - interval '1 hour'"),
		[]string{ruleClaim},
	},
	{
		"a retry that was not allowed", edit(retried, 1, 2, "next_attempt_at", "'null'"),
		[]string{ruleClaim, ruleLimit, ruleDecision},
	},
	{
		"a run taken over because it is old", edit(killed, 1, 3, "status", `'"RUNNING"'`) + `;` + set(killed, 3, "effects", "1"),
		[]string{ruleClaim, rulePeople, ruleHistory},
	},
	{
		"a claim on an approval of another attempt", edit(killed, 2, 3, "approved_attempt", "'7'"),
		[]string{ruleClaim, rulePeople},
	},
	{
		"a retry at a time that a hand wrote", edit(unsucceeded, 4, 5, "approved_attempt", "'7'"),
		[]string{ruleClaim, rulePeople},
	},
	{
		"a claim on an approval before something else ran", edit(killed, 2, 3, "approved_finished_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{ruleClaim, rulePeople},
	},
	{
		"a token again", fmt.Sprintf(`
			UPDATE torture.change AS c
			SET before = CASE WHEN c.seq > %[2]s THEN jsonb_set(c.before, '{token}', f.after->'token') ELSE c.before END,
			  after = jsonb_set(c.after, '{token}', f.after->'token')
			FROM torture.change AS f
			WHERE f.seq = %[1]s AND c.job_key = '%[3]s' AND c.seq >= %[2]s;
			UPDATE batch_job_run SET token = (SELECT (after->>'token')::uuid FROM torture.change WHERE seq = %[1]s) WHERE job_key = '%[3]s';
			UPDATE batch_job_attempt SET token = (SELECT (after->>'token')::uuid FROM torture.change WHERE seq = %[1]s) WHERE job_key = '%[3]s' AND attempt = 2`,
			nth(unsucceeded, 0), nth(unsucceeded, 5), unsucceeded),
		[]string{ruleClaim},
	},
	{
		"a token again, and both attempts executed", on(repeated, `
			INSERT INTO torture.execution (id, session, worker, job_key, attempt, trigger)
			SELECT gen_random_uuid(), session, worker, job_key, 1, trigger FROM torture.execution WHERE job_key = %s`),
		[]string{ruleClaim},
	},
	{
		"a number again", fmt.Sprintf(`
			UPDATE torture.change
			SET before = jsonb_set(before, '{attempt}', '1'), after = jsonb_set(after, '{attempt}', '1')
			WHERE job_key = '%[1]s' AND seq >= %[2]s;
			UPDATE torture.execution SET attempt = 1 WHERE job_key = '%[1]s';
			UPDATE torture.answer SET attempt = 1 WHERE job_key = '%[1]s';
			UPDATE torture.change SET after = jsonb_set(after, '{attempt}', '1') WHERE seq = %[2]s;
			UPDATE torture.effect SET attempt = 1 WHERE job_key = '%[1]s';
			UPDATE batch_job_run SET attempt = 1 WHERE job_key = '%[1]s'`, deleted, nth(deleted, 2)),
		[]string{ruleClaim, ruleExecution, ruleOutcome, ruleOwner, ruleLate, ruleCounted, ruleAnswer, ruleHistory},
	},
	{
		"a claim in another's name", set(reskipped, 0, "session", "'w2'"),
		[]string{ruleClaim, ruleEnd, ruleExecution, ruleAnswer},
	},
	{
		"a re-claim that keeps the old end", edit(retried, 2, 3, "finished_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{ruleClaim},
	},
	{
		"a number that was left out", on(taken, `DELETE FROM batch_job_attempt WHERE job_key = %s AND attempt = 2`),
		[]string{ruleClaim, rulePeople},
	},
	{
		"an approval by a worker", approve(reskipped, 1, 2),
		[]string{ruleEnd, rulePeople},
	},

	{
		"an end by another process", set(reskipped, 1, "session", "'w2'"),
		[]string{ruleEnd, ruleAnswer},
	},
	{
		"an end by another attempt", edit(retried, 1, 2, "token", `'"00000000-0000-0000-0000-000000000000"'`),
		[]string{ruleEnd},
	},
	{
		"an end of another program's run", set(neighbours, 1, "session", "'w1'"),
		[]string{ruleEnd},
	},
	{
		"an end before its start", edit(retried, 1, 2, "finished_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{ruleEnd},
	},

	{
		"a worker that deletes", set(deleted, 1, "session", "'w2'"),
		[]string{ruleOther, ruleAnswer, ruleHistory},
	},
	{
		"a worker that approves", set(killed, 2, "session", "'w2'"),
		[]string{ruleOther, rulePeople},
	},
	{
		"a row made by nobody known", set(left, 0, "session", "'stranger'"),
		[]string{ruleOther},
	},
	{
		"a skipped date with an execution", on(holiday, `
			UPDATE torture.change SET after = jsonb_set(after, '{attempt}', '3') WHERE job_key = %s;
			UPDATE torture.answer SET attempt = 3 WHERE job_key = %s;
			UPDATE batch_job_run SET attempt = 3 WHERE job_key = %s`),
		[]string{ruleOther},
	},

	{
		"a second execution", on(retried, `
			INSERT INTO torture.execution SELECT gen_random_uuid(), clock_timestamp(), session, worker, job_key, attempt, trigger
			FROM torture.execution WHERE job_key = %s AND attempt = 2`),
		[]string{ruleExecution},
	},
	{
		"an execution by another process", on(killed, `UPDATE torture.execution SET session = 'w9', worker = 'w9-00000009' WHERE job_key = %s AND attempt = 1`),
		[]string{ruleExecution},
	},
	{
		"an execution before its claim", on(killed, `UPDATE torture.execution SET at = at - interval '1 hour' WHERE job_key = %s AND attempt = 1`),
		[]string{ruleExecution},
	},
	{
		"an execution without a claim", `
			INSERT INTO torture.execution (id, session, worker, job_key, attempt, trigger)
			VALUES (gen_random_uuid(), 'w1', 'w1-00000001', 'plain:2026-02-02', 1, 'MANUAL')`,
		[]string{ruleExecution},
	},
	{
		"an execution that returned twice", on(retried, `
			INSERT INTO torture.returned (execution, outcome, error) SELECT id, 'error', '' FROM torture.execution WHERE job_key = %s AND attempt = 2`),
		[]string{ruleExecution},
	},
	{
		"a return of no execution", `INSERT INTO torture.returned (execution, outcome, error) VALUES (gen_random_uuid(), 'nil', '')`,
		[]string{ruleExecution},
	},
	{
		"an execution of a claim that was never started", on(unstarted, `
			INSERT INTO torture.execution (id, session, worker, job_key, attempt, trigger) VALUES (gen_random_uuid(), 'w1', 'w1-00000001', %s, 1, 'SCHEDULE')`),
		[]string{ruleNever},
	},
	{
		"a claim that was never started and is not due", edit(unstarted, 1, 2, "next_attempt_at", "'null'"),
		[]string{ruleNever, ruleClaim},
	},
	{
		"an effect of a claim that was never started", fmt.Sprintf(`
			UPDATE torture.job SET way = 'fence' WHERE job = 'plain';
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item) VALUES (%s, 'w1', 'fence', '%s', 1, 'item-1');
			UPDATE torture.change SET effects = 1 WHERE seq = %s`, xid(unstarted, 0), unstarted, nth(unstarted, 1)),
		[]string{ruleNever},
	},

	{
		"a retry too many", `UPDATE torture.job SET max_attempts = 1 WHERE job = 'each'`,
		[]string{ruleLimit},
	},
	{
		"a re-run that is tried again", edit(killed, 4, 6, "next_attempt_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{ruleApproval},
	},
	{
		"a re-run that was never started at first and is tried again", edit(reskipped, 7, 8, "next_attempt_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{ruleApproval},
	},
	{
		"two successes on the word of no one", set(blind, 5, "session", "'w2'"),
		[]string{ruleSuccess, ruleOther, rulePeople},
	},

	{
		"a success of a function that failed", on(retried, `
			UPDATE torture.returned SET outcome = 'error' WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s AND attempt = 2)`),
		[]string{ruleOutcome},
	},
	{
		"a failure of a function that had none", on(retried, `
			UPDATE torture.returned SET outcome = 'nil' WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s AND attempt = 1)`),
		[]string{ruleOutcome},
	},
	{
		"a failure of a function that skipped", on(retried, `
			UPDATE torture.returned SET outcome = 'skip' WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s AND attempt = 1)`),
		[]string{ruleOutcome},
	},
	{
		"a success of a function that has not returned", on(retried, `
			DELETE FROM torture.returned WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s AND attempt = 2)`),
		[]string{ruleOutcome},
	},
	{
		"a success before the function returned", on(retried, `
			UPDATE torture.returned SET at = at + interval '1 hour' WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s AND attempt = 2)`),
		[]string{ruleOutcome},
	},
	{
		"a success without an execution", on(neighbours, `DELETE FROM torture.execution WHERE job_key = %s;
			DELETE FROM torture.returned WHERE NOT EXISTS (SELECT FROM torture.execution WHERE id = execution)`),
		[]string{ruleOutcome},
	},

	{
		"an effect by another process", on(deleted, `UPDATE torture.effect SET session = 'w9' WHERE job_key = %s AND attempt = 1`),
		[]string{ruleOwner},
	},
	{
		"an effect of an attempt that nobody claimed", on(deleted, `UPDATE torture.effect SET attempt = 9 WHERE job_key = %s AND attempt = 1`),
		[]string{ruleOwner, ruleCounted},
	},
	{
		"an effect of an attempt that was not executed", on(killed, `DELETE FROM torture.execution WHERE job_key = %s AND attempt = 1`),
		[]string{ruleOwner},
	},
	{
		"an effect of a plain job", fmt.Sprintf(`
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item) VALUES (%s, 'w1', 'plain', '%s', 1, 'item-1');
			UPDATE torture.change SET effects = 1 WHERE seq = %s`, xid(reskipped, 0), reskipped, nth(reskipped, 1)),
		[]string{ruleOwner},
	},

	{
		"an effect committed after its attempt was superseded", on(deleted, `UPDATE torture.effect SET xid = `+xid(deleted, 3)+` WHERE job_key = %s AND attempt = 1`),
		[]string{ruleLate},
	},
	{
		"an effect committed before the claim", on(deleted, `UPDATE torture.effect SET xid = `+xid(retried, 0)+` WHERE job_key = %s AND attempt = 1`),
		[]string{ruleLate},
	},
	{
		"an effect while the run was taken away", on(givenBack, `UPDATE torture.effect SET xid = (
			SELECT xid FROM torture.change WHERE job_key = %s AND session = 'psql' ORDER BY seq LIMIT 1)::text::xid8 WHERE job_key = %s AND item = 'item-2';
			UPDATE torture.change SET xid = `+xid(retried, 3)+` WHERE seq = `+nth(givenBack, 1)),
		[]string{ruleLate},
	},
	{
		"more effects than at the end", set(deleted, 1, "effects", "0"),
		[]string{ruleCounted},
	},

	{
		"an item twice in one attempt", on(retried, `
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item)
			SELECT xid, session, way, job_key, attempt, item FROM torture.effect WHERE job_key = %s AND attempt = 3 AND item = 'item-2';
			UPDATE torture.change SET effects = effects + 1 WHERE seq = `+nth(retried, 6)),
		[]string{ruleOnce},
	},
	{
		"an item again in a retry", on(retried, `
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item)
			SELECT xid, session, way, job_key, attempt, 'item-1' FROM torture.effect WHERE job_key = %s AND attempt = 2;
			UPDATE torture.change SET effects = effects + 1 WHERE seq = `+nth(retried, 3)),
		[]string{ruleOnce},
	},
	{
		"an item that there is not", on(retried, `
			UPDATE torture.effect SET item = 'item-9' WHERE job_key = %s AND attempt = 3 AND item = 'item-2';
			UPDATE batch_job_item SET item = 'item-9' WHERE job_key = %s AND item = 'item-2'`),
		[]string{ruleOnce, ruleComplete},
	},
	{
		"an item again although a checkpoint was there", on(blind, `
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item)
			SELECT xid, session, way, job_key, attempt, 'item-1' FROM torture.effect WHERE job_key = %s AND attempt = 2;
			UPDATE torture.change SET effects = effects + 1 WHERE seq = `+nth(blind, 4)),
		[]string{ruleCheckpoint},
	},
	{
		"a success without an item", on(retried, `
			DELETE FROM torture.effect WHERE job_key = %s AND attempt = 3 AND item = 'item-2';
			DELETE FROM batch_job_item WHERE job_key = %s AND item = 'item-2';
			UPDATE torture.change SET effects = effects - 1 WHERE seq = `+nth(retried, 6)),
		[]string{ruleComplete},
	},
	{
		"a success behind a fence with an item of the attempt before", on(deleted, `
			DELETE FROM torture.effect WHERE job_key = %s AND attempt = 2 AND item = 'item-1';
			UPDATE torture.change SET effects = effects - 1 WHERE seq = `+nth(deleted, 3)),
		[]string{ruleComplete},
	},
	{
		"more items behind a fence", `UPDATE torture.job SET items = 3 WHERE job = 'fence'`,
		[]string{ruleComplete},
	},
	{
		"the last item after the success", on(deleted, `UPDATE torture.effect SET xid = `+xid(unsucceeded, 5)+` WHERE job_key = %s AND attempt = 2 AND item = 'item-2'`),
		[]string{ruleComplete, ruleLate},
	},
	{
		"the work of complete in a commit of its own", on(completed, `UPDATE torture.effect SET xid = `+xid(completed, 0)+` WHERE job_key = %s`),
		[]string{ruleCommit, ruleOutcome, ruleAnswer},
	},
	{
		"a success without the work of complete", on(completed, `
			DELETE FROM torture.effect WHERE job_key = %s;
			UPDATE torture.change SET effects = 0 WHERE seq = `+nth(completed, 1)+`;
			UPDATE torture.returned SET outcome = 'nil', at = at - interval '1 hour' WHERE execution = (SELECT id FROM torture.execution WHERE job_key = %s);
			UPDATE torture.answer SET kind = '' WHERE job_key = %s`),
		[]string{ruleCommit},
	},
	{
		"the work of complete twice", on(completed, `
			INSERT INTO torture.effect (xid, session, way, job_key, attempt, item) SELECT xid, session, way, job_key, attempt, item FROM torture.effect WHERE job_key = %s;
			UPDATE torture.change SET effects = 2 WHERE seq = `+nth(completed, 1)),
		[]string{ruleCommit},
	},
	{
		"an item missing in the ledger", on(killed, `DELETE FROM batch_job_item WHERE job_key = %s AND item = 'item-1'`),
		[]string{ruleLedger},
	},
	{
		"an item in the ledger that took no effect", on(killed, `INSERT INTO batch_job_item (job_key, item, attempt) VALUES (%s, 'item-3', 3)`),
		[]string{ruleLedger},
	},
	{
		"an item of another attempt in the ledger", on(killed, `UPDATE batch_job_item SET attempt = 3 WHERE job_key = %s AND item = 'item-1'`),
		[]string{ruleLedger},
	},
	{
		"a ledger that was not emptied", on(retried, `
			UPDATE batch_job_item SET attempt = 2 WHERE job_key = %s AND item = 'item-3'`),
		[]string{ruleLedger},
	},

	{
		"a failure told as a success", on(retried, `UPDATE torture.answer SET status = 'SUCCEEDED', kind = '' WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"a failure told without an error", on(retried, `UPDATE torture.answer SET kind = '' WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"a recorded result told as a lost lease", on(retried, `UPDATE torture.answer SET kind = 'lost' WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"a success told as a lost lease, where an attempt before was lost", on(deleted, `UPDATE torture.answer SET kind = 'lost' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleAnswer},
	},
	{
		"a run that failed among others, told as what it never was", on(retried, `
			UPDATE torture.answer SET kind = 'other', status = 'SKIPPED' WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"a lost lease told as a failure", on(blind, `UPDATE torture.answer SET kind = 'run' WHERE job_key = %s AND kind = 'lost'`),
		[]string{ruleAnswer},
	},
	{
		"one attempt told twice", on(retried, `
			INSERT INTO torture.answer SELECT gen_random_uuid(), at, session, worker, job_key, attempt, decision, status, kind, error
			FROM torture.answer WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"another's attempt told", on(retried, `UPDATE torture.answer SET session = 'w2', worker = 'w2-00000002' WHERE job_key = %s AND attempt = 1 AND decision = 'RAN'`),
		[]string{ruleAnswer},
	},
	{
		"a success told before it was", on(retried, `UPDATE torture.answer SET at = at - interval '1 hour' WHERE job_key = %s AND decision = 'ALREADY_SUCCEEDED'`),
		[]string{ruleDecision},
	},
	{
		"a success told of another attempt", on(retried, `UPDATE torture.answer SET attempt = 1 WHERE job_key = %s AND decision = 'ALREADY_SUCCEEDED'`),
		[]string{ruleDecision},
	},
	{
		"no attempt left, told of a run to be tried again", on(retried, `UPDATE torture.answer SET decision = 'ALREADY_FAILED' WHERE job_key = %s AND decision = 'RETRY_LATER'`),
		[]string{ruleDecision},
	},
	{
		"an answer of nothing", on(unstarted, `UPDATE torture.answer SET kind = '' WHERE job_key = %s AND decision = ''`),
		[]string{ruleDecision},
	},
	{
		"an error with a decision", on(skipped, `UPDATE torture.answer SET kind = 'other' WHERE job_key = %s`),
		[]string{ruleDecision},
	},

	{
		"MARK_FAILED of an attempt that was alive", set(killed, 1, "silent", "false"),
		[]string{rulePeople},
	},
	{
		"an action that is gone", on(killed, `DELETE FROM batch_job_action WHERE job_key = %s AND action = 'MARK_FAILED'`),
		[]string{rulePeople, ruleAsked},
	},
	{
		"an action that was rewritten", on(killed, `UPDATE batch_job_action SET acted_by = 'somebody else' WHERE job_key = %s AND action = 'MARK_FAILED'`),
		[]string{rulePeople},
	},
	{
		"a person's change of a worker", set(killed, 1, "session", "'psql'"),
		[]string{rulePeople, ruleHistory},
	},
	{
		"an approval while one is pending", approve(killed, 1, 2),
		[]string{rulePeople},
	},
	{
		"a MARK_FAILED that leaves a retry", edit(killed, 1, 3, "next_attempt_at", `'"2026-01-01T00:00:00Z"'`),
		[]string{rulePeople},
	},
	{
		"a skip of a run that SUCCEEDED", edit(reskipped, 1, 2, "status", `'"SUCCEEDED"'`),
		[]string{ruleEnd, rulePeople, ruleOutcome, ruleAnswer, ruleDecision, ruleHistory},
	},
	{
		"a confirmed action that was refused", `UPDATE torture.action SET answer = 'done' WHERE answer = 'conflict'`,
		[]string{ruleAsked},
	},
	{
		"a refused action that was done", on(killed, `UPDATE torture.action SET answer = 'conflict' WHERE job_key = %s AND action = 'MARK_FAILED'`),
		[]string{ruleAsked},
	},
	{
		"an action that nobody asked for", on(killed, `DELETE FROM torture.action WHERE job_key = %s AND action = 'MARK_FAILED'`),
		[]string{ruleAsked},
	},
	{
		"an action other than asked for", on(retried, `UPDATE torture.action SET reset = false WHERE job_key = %s AND reset`),
		[]string{ruleAsked},
	},
	{
		"alive, although forced", `UPDATE torture.action SET forced = true WHERE answer = 'alive'`,
		[]string{ruleAsked},
	},
	{
		"actions that can be changed", `ALTER TABLE batch_job_action DISABLE TRIGGER USER`,
		[]string{ruleActions},
	},
	{
		"actions in another order", on(killed, `UPDATE batch_job_action SET acted_at = acted_at - interval '1 hour' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleActions, rulePeople},
	},

	{
		"an attempt without history", on(killed, `DELETE FROM batch_job_attempt WHERE job_key = %s AND attempt = 2`),
		[]string{ruleHistory},
	},
	{
		"another program's attempt without history", on(neighbours, `DELETE FROM batch_job_attempt WHERE job_key = %s AND attempt = 1`),
		[]string{ruleHistory},
	},
	{
		"history without an attempt", on(killed, `
			INSERT INTO batch_job_attempt (job_key, attempt, token, worker_id, started_at) VALUES (%s, 7, gen_random_uuid(), 'w1-00000001', now())`),
		[]string{ruleHistory},
	},
	{
		"history of another worker", on(killed, `UPDATE batch_job_attempt SET worker_id = 'w9-00000009' WHERE job_key = %s AND attempt = 1`),
		[]string{ruleHistory},
	},
	{
		"history with another outcome", on(killed, `UPDATE batch_job_attempt SET outcome = 'SUCCEEDED' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleHistory},
	},
	{
		"history that says a person was it", on(killed, `UPDATE batch_job_attempt SET ended_by = 'PERSON' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleHistory},
	},
	{
		"history of another program that nobody saw", on(killed, `
			INSERT INTO batch_job_attempt (job_key, attempt, worker_id, started_at, finished_at, outcome, ended_by)
			VALUES (%s, 7, 'node', now(), now(), 'FAILED', 'OUTSIDE')`),
		[]string{ruleHistory},
	},
	{
		"history of a run that was taken over, left open", on(taken, `
			UPDATE batch_job_attempt SET finished_at = NULL, outcome = NULL, ended_by = NULL WHERE job_key = %s AND attempt = 1`),
		[]string{ruleHistory},
	},
	{
		"history that says nobody outside was it", on(blind, `UPDATE batch_job_attempt SET ended_by = 'WORKER' WHERE job_key = %s AND attempt = 1`),
		[]string{ruleHistory},
	},
	{
		"an end of something that is RUNNING again", on(unsucceeded, `
			DELETE FROM torture.change WHERE job_key = %s AND seq > `+nth(unsucceeded, 2)+`;
			UPDATE torture.change SET after = jsonb_set(before, '{status}', '"RUNNING"') WHERE seq = `+nth(unsucceeded, 2)+`;
			DELETE FROM torture.execution WHERE job_key = %s AND attempt = 2;
			DELETE FROM torture.returned WHERE NOT EXISTS (SELECT FROM torture.execution WHERE id = execution);
			DELETE FROM torture.answer WHERE job_key = %s AND (attempt = 2 OR decision <> 'RAN');
			DELETE FROM batch_job_action WHERE job_key = %s;
			DELETE FROM torture.action WHERE job_key = %s;
			DELETE FROM batch_job_attempt WHERE job_key = %s AND attempt = 2`),
		[]string{ruleRecord},
	},
	{
		"history left open", on(blind, `UPDATE batch_job_attempt SET finished_at = NULL, outcome = NULL, ended_by = NULL WHERE job_key = %s AND attempt = 1`),
		[]string{ruleHistory},
	},
	{
		"history that ends before it starts", on(killed, `UPDATE batch_job_attempt SET finished_at = started_at - interval '1 hour' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleHistory},
	},
	{
		"history out of order", on(killed, `UPDATE batch_job_attempt SET started_at = started_at - interval '1 hour' WHERE job_key = %s AND attempt = 3`),
		[]string{ruleHistory},
	},
	{
		"a retry called a re-run", on(retried, `
			UPDATE batch_job_attempt SET trigger = 'RERUN' WHERE job_key = %s AND attempt = 2;
			UPDATE torture.execution SET trigger = 'RERUN' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleTrigger},
	},
	{
		"an execution with another trigger", on(killed, `UPDATE torture.execution SET trigger = 'MANUAL' WHERE job_key = %s AND attempt = 2`),
		[]string{ruleTrigger},
	},
	{
		"history that was changed", `INSERT INTO torture.rewritten (before) VALUES ('{}')`,
		[]string{ruleClosed},
	},

	{
		"a run left RUNNING and not listed", on(killed, `DELETE FROM torture.stale WHERE job_key = %s`),
		[]string{ruleStale},
	},
	{
		"a run listed that was done", on(retried, `INSERT INTO torture.stale VALUES (%s)`),
		[]string{ruleStale},
	},
	{
		"a wanted run that did not come", `INSERT INTO torture.wanted VALUES ('plain:2026-02-02')`,
		[]string{ruleFinal},
	},
	{
		"an approval that nobody executed", on(neighbours, `
			DELETE FROM torture.change WHERE job_key = %s AND seq > `+nth(neighbours, 2)+`;
			DELETE FROM batch_job_run WHERE job_key = %s;
			INSERT INTO batch_job_run
			SELECT r.* FROM torture.change, jsonb_populate_record(NULL::batch_job_run, after) AS r WHERE seq = `+nth(neighbours, 2)+`;
			DELETE FROM batch_job_attempt WHERE job_key = %s AND attempt = 2;
			DELETE FROM torture.execution WHERE job_key = %s AND attempt = 2;
			DELETE FROM torture.returned WHERE NOT EXISTS (SELECT FROM torture.execution WHERE id = execution);
			DELETE FROM torture.answer WHERE job_key = %s AND attempt = 2`),
		[]string{ruleFinal},
	},
	{
		"a wanted run that is RUNNING", on(left, `INSERT INTO torture.wanted VALUES (%s)`),
		[]string{ruleFinal},
	},
}
