-- +goose Up
-- Runs, their attempts and what people did about them.
-- Plain SQL: psql, jobrun's Migrate or any other migrator may apply it. The
-- tables are created in the first schema of the search_path. An existing
-- batch_job_run with its six columns is adopted together with its rows.

-- Keys are compared byte by byte: their order is that of the dates, whatever the
-- database's collation, and the primary key serves for it.

CREATE TABLE IF NOT EXISTS batch_job_run (
  job_key       varchar(120) COLLATE "C" PRIMARY KEY,
  status        varchar(20)  NOT NULL,
  started_at    timestamptz  NOT NULL DEFAULT now(),
  finished_at   timestamptz,
  worker_id     varchar(80)  NOT NULL,
  error_message text
);

-- Constant defaults: no rewrite, and a program that knows only the six columns
-- goes on inserting rows. First of all, because it takes the strongest lock: to
-- come to it from a weaker one would deadlock with programs that use the table.
ALTER TABLE batch_job_run
  ADD COLUMN IF NOT EXISTS job_name        varchar(80),
  ADD COLUMN IF NOT EXISTS business_date   date,
  ADD COLUMN IF NOT EXISTS scheduled_for   timestamptz,
  ADD COLUMN IF NOT EXISTS attempt         integer NOT NULL DEFAULT 1,
  ADD COLUMN IF NOT EXISTS executions      integer NOT NULL DEFAULT 1,
  ADD COLUMN IF NOT EXISTS token           uuid,
  ADD COLUMN IF NOT EXISTS next_attempt_at timestamptz,
  ADD COLUMN IF NOT EXISTS approved_at      timestamptz,
  ADD COLUMN IF NOT EXISTS approved_attempt integer,
  ADD COLUMN IF NOT EXISTS approved_status  varchar(20),
  ADD COLUMN IF NOT EXISTS approved_worker  varchar(80),
  ADD COLUMN IF NOT EXISTS approved_finished_at timestamptz,
  ADD COLUMN IF NOT EXISTS pruned_at       timestamptz;

CREATE INDEX IF NOT EXISTS batch_job_run_status_started_idx
  ON batch_job_run (status, started_at);

-- The primary key of an adopted table may have another order.
-- +goose StatementBegin
DO $$
BEGIN
  IF (SELECT a.attcollation <> '"C"'::regcollation FROM pg_attribute AS a WHERE a.attrelid = 'batch_job_run'::regclass AND a.attname = 'job_key') THEN
    CREATE INDEX IF NOT EXISTS batch_job_run_key_idx
      ON batch_job_run (job_key COLLATE "C");
  END IF;
END
$$;
-- +goose StatementEnd

-- Few rows: FAILED runs that will be tried again.
CREATE INDEX IF NOT EXISTS batch_job_run_next_attempt_idx
  ON batch_job_run (next_attempt_at)
  WHERE next_attempt_at IS NOT NULL;

-- Few rows: re-runs that a person approved and nobody has claimed yet.
CREATE INDEX IF NOT EXISTS batch_job_run_approved_idx
  ON batch_job_run (approved_at)
  WHERE approved_at IS NOT NULL;

COMMENT ON TABLE  batch_job_run IS 'One row per job and business date: the right to run it, and what became of it.';
COMMENT ON COLUMN batch_job_run.job_key IS 'Job name, colon, business date (YYYY-MM-DD), or the slot with its UTC offset for jobs that run several times a day.';
COMMENT ON COLUMN batch_job_run.status IS 'RUNNING, SUCCEEDED, FAILED or SKIPPED. Any other value is never claimed.';
COMMENT ON COLUMN batch_job_run.started_at IS 'Start of the latest attempt, by the database clock.';
COMMENT ON COLUMN batch_job_run.finished_at IS 'End of the latest attempt, by the database clock; NULL while RUNNING.';
COMMENT ON COLUMN batch_job_run.worker_id IS 'Who made the latest attempt: label, hyphen, 8 hexadecimal digits of the process.';
COMMENT ON COLUMN batch_job_run.error_message IS 'Why the latest attempt FAILED or was SKIPPED; at most 8 KiB when written by jobrun.';
COMMENT ON COLUMN batch_job_run.job_name IS 'Job name; NULL in rows of other programs, where the key says it.';
COMMENT ON COLUMN batch_job_run.business_date IS 'Business date of the run; NULL in rows of other programs, where the key says it.';
COMMENT ON COLUMN batch_job_run.scheduled_for IS 'Nominal time of the trigger that made the run; kept by retries and re-runs.';
COMMENT ON COLUMN batch_job_run.attempt IS 'Number of the latest attempt, from 1; 0 when nothing was executed. Never goes down or repeats.';
COMMENT ON COLUMN batch_job_run.executions IS 'Attempts that were really executed; what a retry limit counts.';
COMMENT ON COLUMN batch_job_run.token IS 'Token of the latest claim. Every later write of that attempt names it; NULL in rows of other programs.';
COMMENT ON COLUMN batch_job_run.next_attempt_at IS 'When a FAILED run may be claimed again, by the database clock; NULL: not without an approval.';
COMMENT ON COLUMN batch_job_run.approved_at IS 'When a person approved a re-run that nobody has claimed yet; NULL: none pending.';
COMMENT ON COLUMN batch_job_run.approved_attempt IS 'The attempt that the person saw; the approval holds only while it is still the latest.';
COMMENT ON COLUMN batch_job_run.approved_status IS 'The status that the person saw; the approval holds only while it is unchanged.';
COMMENT ON COLUMN batch_job_run.approved_worker IS 'The worker that the person saw; the approval holds only while it is unchanged.';
COMMENT ON COLUMN batch_job_run.approved_finished_at IS 'The end that the person saw: if another program has run it since, the approval is void.';
COMMENT ON COLUMN batch_job_run.pruned_at IS 'When attempts and items of this run were removed; such a run is never run again.';

CREATE TABLE batch_job_attempt (
  job_key         varchar(120) COLLATE "C" NOT NULL,
  attempt         integer      NOT NULL,
  token           uuid,
  worker_id       varchar(80)  NOT NULL,
  trigger         varchar(20),
  started_at      timestamptz  NOT NULL,
  heartbeat_at    timestamptz,
  lease           interval,
  stale_after     interval,
  items_processed bigint       NOT NULL DEFAULT 0,
  items_failed    bigint       NOT NULL DEFAULT 0,
  items_moved_at  timestamptz,
  backend_pid     integer,
  finished_at     timestamptz,
  outcome         varchar(20),
  ended_by        varchar(20),
  error_message   text,
  PRIMARY KEY (job_key, attempt)
) WITH (fillfactor = 70); -- room for heartbeats beside the row: they stay HOT

COMMENT ON TABLE  batch_job_attempt IS 'One row per attempt: the history of a run. Rows are closed once and not changed afterwards.';
COMMENT ON COLUMN batch_job_attempt.job_key IS 'The run. No foreign key: its lock would make status changes wait for the job.';
COMMENT ON COLUMN batch_job_attempt.attempt IS 'Number of the attempt, from 1; 0 for a run that was skipped without an execution.';
COMMENT ON COLUMN batch_job_attempt.token IS 'Token of the claim; NULL when another program made the attempt.';
COMMENT ON COLUMN batch_job_attempt.worker_id IS 'Who made the attempt.';
COMMENT ON COLUMN batch_job_attempt.trigger IS 'SCHEDULE, MANUAL, RETRY, RERUN or CATCH_UP; NULL when another program made the attempt.';
COMMENT ON COLUMN batch_job_attempt.started_at IS 'When the claim was made, by the database clock.';
COMMENT ON COLUMN batch_job_attempt.heartbeat_at IS 'Last sign of life, by the database clock. Never indexed: heartbeats stay cheap.';
COMMENT ON COLUMN batch_job_attempt.lease IS 'Silence after which the attempt counts as dead.';
COMMENT ON COLUMN batch_job_attempt.stale_after IS 'Longest expected duration; longer attempts are overdue.';
COMMENT ON COLUMN batch_job_attempt.items_processed IS 'Items processed so far, as the job reported them.';
COMMENT ON COLUMN batch_job_attempt.items_failed IS 'Items failed so far, as the job reported them.';
COMMENT ON COLUMN batch_job_attempt.items_moved_at IS 'When a heartbeat last saw an item count change, by the database clock.';
COMMENT ON COLUMN batch_job_attempt.backend_pid IS 'Server process of the last heartbeat; NULL behind a pooler, where it would say nothing.';
COMMENT ON COLUMN batch_job_attempt.finished_at IS 'When the attempt was closed, by the database clock; NULL: open.';
COMMENT ON COLUMN batch_job_attempt.outcome IS 'SUCCEEDED, FAILED or SKIPPED; NULL: open.';
COMMENT ON COLUMN batch_job_attempt.ended_by IS 'WORKER: the attempt itself; PERSON: an action; OUTSIDE: another program changed the run; NULL: open.';
COMMENT ON COLUMN batch_job_attempt.error_message IS 'Why it FAILED or was SKIPPED; at most 8 KiB when written by jobrun.';

CREATE TABLE batch_job_action (
  id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_key         varchar(120) COLLATE "C" NOT NULL,
  attempt         integer      NOT NULL,
  action          varchar(20)  NOT NULL,
  acted_by        text         NOT NULL,
  reason          text         NOT NULL,
  forced          boolean      NOT NULL,
  reset_items     boolean      NOT NULL,
  previous_status varchar(20),
  acted_at        timestamptz  NOT NULL DEFAULT clock_timestamp(),
  db_user         text         NOT NULL DEFAULT session_user,
  token           uuid         NOT NULL UNIQUE
);

CREATE INDEX batch_job_action_key_idx
  ON batch_job_action (job_key, id);

-- +goose StatementBegin
CREATE FUNCTION batch_job_action_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'batch_job_action is append-only: % refused', TG_OP USING ERRCODE = '42501';
END
$$;
-- +goose StatementEnd

CREATE TRIGGER batch_job_action_append_only
  BEFORE UPDATE OR DELETE OR TRUNCATE ON batch_job_action
  FOR EACH STATEMENT EXECUTE FUNCTION batch_job_action_append_only();

COMMENT ON TABLE  batch_job_action IS 'What people did about runs, append-only: a trigger refuses UPDATE, DELETE and TRUNCATE.';
COMMENT ON COLUMN batch_job_action.id IS 'Order of the actions.';
COMMENT ON COLUMN batch_job_action.job_key IS 'The run.';
COMMENT ON COLUMN batch_job_action.attempt IS 'The attempt that the person saw, under its number in the history; 0 when there was no run.';
COMMENT ON COLUMN batch_job_action.action IS 'MARK_FAILED, APPROVE_RERUN or SKIP.';
COMMENT ON COLUMN batch_job_action.acted_by IS 'Who, as the application named the person.';
COMMENT ON COLUMN batch_job_action.reason IS 'Why, in the words of that person.';
COMMENT ON COLUMN batch_job_action.forced IS 'Whether the person allowed a refusal to be overridden.';
COMMENT ON COLUMN batch_job_action.reset_items IS 'Whether the item ledger was emptied so that every item is done again.';
COMMENT ON COLUMN batch_job_action.previous_status IS 'Status of the run before the action; NULL when there was no run.';
COMMENT ON COLUMN batch_job_action.acted_at IS 'When, by the database clock.';
COMMENT ON COLUMN batch_job_action.db_user IS 'Role that had logged in to the database; the server says it, not the application.';
COMMENT ON COLUMN batch_job_action.token IS 'Identifies the call, so that one whose answer was lost is not taken for a conflict.';

CREATE TABLE batch_job_migration (
  version      integer     PRIMARY KEY,
  name         text        NOT NULL,
  incompatible boolean     NOT NULL,
  checksum     text,
  applied_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON TABLE  batch_job_migration IS 'Which of these files were applied. Each file records itself, whoever applies it.';
COMMENT ON COLUMN batch_job_migration.version IS 'Number at the start of the file name, from 1, without gaps.';
COMMENT ON COLUMN batch_job_migration.name IS 'File name.';
COMMENT ON COLUMN batch_job_migration.incompatible IS 'Whether binaries that do not know this file must stop using the tables.';
COMMENT ON COLUMN batch_job_migration.checksum IS 'SHA-256 of the file in hexadecimal, written by the first Migrate that sees it.';
COMMENT ON COLUMN batch_job_migration.applied_at IS 'When, by the database clock.';

INSERT INTO batch_job_migration (version, name, incompatible)
VALUES (1, '0001_runs.sql', false);
