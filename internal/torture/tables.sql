-- What the torture run writes down beside the library's tables, append-only. The
-- checker judges by it. Sessions are told apart by application_name: "w7" is worker
-- process 7, "operator" a person using the library, "neighbour" another program
-- with plain SQL, "psql" a hand that edits rows, "log" what writes these tables.
CREATE SCHEMA torture;

-- The jobs, their kind of work and how many items each run has to do.
CREATE TABLE torture.job (
  job          text    PRIMARY KEY,
  way          text    NOT NULL,  -- each, once, complete, tx (with a checkpoint), fence (a transaction of its own), plain (no effects)
  items        integer NOT NULL,  -- every SUCCEEDED run has the effects item-1 .. item-<items>; complete: one, "all"; plain: none
  max_attempts integer NOT NULL
);

-- What happened to every row of batch_job_run. A trigger writes it in the
-- transaction that changes the row, while that has the row locked: per key, the
-- order of seq is the order of the changes.
CREATE TABLE torture.change (
  seq       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at        timestamptz NOT NULL DEFAULT clock_timestamp(),
  xid       xid8        NOT NULL DEFAULT pg_current_xact_id(),
  session   text        NOT NULL DEFAULT current_setting('application_name'),
  isolation text        NOT NULL DEFAULT current_setting('transaction_isolation'),
  job_key   text        NOT NULL,
  before    jsonb,                -- the whole row before; NULL: inserted
  after     jsonb,                -- the whole row after; NULL: deleted
  silent    boolean,              -- of a row that was RUNNING: its attempt's lease had run out (true also without heartbeats)
  effects   bigint                -- of an attempt that was RUNNING and is not any more: its effects committed by then, as this
                                  -- transaction sees them, its own included; exact under read committed only
);

-- What became of rows that nobody may change: history that was closed, and its end.
CREATE TABLE torture.rewritten (
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  session text        NOT NULL DEFAULT current_setting('application_name'),
  before  jsonb       NOT NULL,
  after   jsonb
);

-- The effects of the jobs: no key refuses a second one. Written by the work's own transaction.
CREATE TABLE torture.effect (
  seq     bigint      GENERATED ALWAYS AS IDENTITY,
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  xid     xid8        NOT NULL DEFAULT pg_current_xact_id(), -- the transaction; pg_xact_commit_timestamp(xid::text::xid) tells when it was committed
  session text        NOT NULL DEFAULT current_setting('application_name'),
  way     text        NOT NULL,
  job_key text        NOT NULL,
  attempt integer     NOT NULL,
  item    text        NOT NULL
);
CREATE INDEX ON torture.effect (job_key, attempt);

-- One row per call of a job's function, written on another connection before
-- anything else is done in it; and what it returned, before it returned it. The
-- session is the process's own word; the other columns are what the library told it.
CREATE TABLE torture.execution (
  id      uuid        PRIMARY KEY, -- drawn by the call itself: a repeated insert is no second execution
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  session text        NOT NULL,   -- of the worker process
  worker  text        NOT NULL,   -- its worker_id
  job_key text        NOT NULL,
  attempt integer     NOT NULL,
  trigger text        NOT NULL
);
CREATE TABLE torture.returned (
  id        uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
  execution uuid        NOT NULL,
  at        timestamptz NOT NULL DEFAULT clock_timestamp(),
  outcome   text        NOT NULL,  -- nil, skip, error, panic, goexit
  error     text        NOT NULL
);

-- What the library answered to a worker's call of Run, RunDate or RetryDue.
CREATE TABLE torture.answer (
  id       uuid        PRIMARY KEY,
  at       timestamptz NOT NULL DEFAULT clock_timestamp(),
  session  text        NOT NULL,
  worker   text        NOT NULL,
  job_key  text        NOT NULL,  -- "" when the answer named none
  attempt  integer     NOT NULL,
  decision text        NOT NULL,  -- RAN, ALREADY_RUNNING, ...; "" with an error before that
  status   text        NOT NULL,  -- of the run in the answer
  kind     text        NOT NULL,  -- "" no error, run (the job failed), lost (ErrLeaseLost), unknown (ErrOutcomeUnknown), shutdown, other
  error    text        NOT NULL
);

-- What the library answered to a person. The reason is unique: it finds the row of batch_job_action.
CREATE TABLE torture.action (
  reason  text        PRIMARY KEY,
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  action  text        NOT NULL,   -- MARK_FAILED, APPROVE_RERUN, SKIP
  job_key text        NOT NULL,
  attempt integer     NOT NULL,   -- as the person saw it
  status  text        NOT NULL,   -- as the person saw it; "": no run
  forced  boolean     NOT NULL,
  reset   boolean     NOT NULL,
  answer  text        NOT NULL    -- done, conflict, alive, other (nobody knows whether it was committed)
);

-- What Stale listed once all processes had ended and every lease had run out, and a
-- row without a key: it was asked.
CREATE TABLE torture.stale (
  job_key text PRIMARY KEY
);

-- The keys that some process was told to run.
CREATE TABLE torture.wanted (
  job_key text PRIMARY KEY
);

-- The worker processes that have ended, and how.
CREATE TABLE torture.process (
  session text        PRIMARY KEY,
  at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  ended   text        NOT NULL   -- killed, in disorder, in order (after SIGTERM), in peace (likewise, and nothing went wrong any more)
);

-- What was done to processes, connections and the server.
CREATE TABLE torture.fault (
  at     timestamptz NOT NULL,
  kind   text        NOT NULL,
  target text        NOT NULL
);

CREATE FUNCTION torture.note_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  was_running boolean := TG_OP <> 'INSERT' AND OLD.status = 'RUNNING';
  ends        boolean := was_running AND (TG_OP = 'DELETE' OR (NEW.status, NEW.attempt, NEW.token, NEW.worker_id)
                           IS DISTINCT FROM (OLD.status, OLD.attempt, OLD.token, OLD.worker_id));
BEGIN
  INSERT INTO torture.change (job_key, before, after, silent, effects)
  SELECT
    CASE TG_OP WHEN 'DELETE' THEN OLD.job_key ELSE NEW.job_key END,
    CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END,
    CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END,
    CASE WHEN was_running THEN coalesce((
      SELECT a.heartbeat_at + a.lease < clock_timestamp()
      FROM public.batch_job_attempt AS a
      WHERE a.job_key = OLD.job_key AND a.attempt = OLD.attempt AND a.token = OLD.token AND a.worker_id = OLD.worker_id
    ), true) END,
    CASE WHEN ends THEN (
      SELECT count(*) FROM torture.effect AS e WHERE e.job_key = OLD.job_key AND e.attempt = OLD.attempt
    ) END;
  RETURN NULL;
END $$;
CREATE TRIGGER note_change AFTER INSERT OR UPDATE OR DELETE ON public.batch_job_run
  FOR EACH ROW EXECUTE FUNCTION torture.note_change();

CREATE FUNCTION torture.note_rewritten() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO torture.rewritten (before, after)
  SELECT to_jsonb(OLD), CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END;
  RETURN NULL;
END $$;
CREATE TRIGGER note_rewritten AFTER UPDATE ON public.batch_job_attempt
  FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL) EXECUTE FUNCTION torture.note_rewritten();
CREATE TRIGGER note_deleted AFTER DELETE ON public.batch_job_attempt
  FOR EACH ROW EXECUTE FUNCTION torture.note_rewritten();
