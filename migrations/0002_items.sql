-- +goose Up
-- The ledger of items and the checkpoints: what a run has done so far.

CREATE TABLE batch_job_item (
  job_key varchar(120) COLLATE "C" NOT NULL,
  item    text         COLLATE "C" NOT NULL,
  attempt integer      NOT NULL,
  done_at timestamptz  NOT NULL DEFAULT now(),
  PRIMARY KEY (job_key, item)
);

COMMENT ON TABLE  batch_job_item IS 'One row per item that is done, committed together with its work. An item that has a row is not done again.';
COMMENT ON COLUMN batch_job_item.job_key IS 'The run. No foreign key: its lock would make status changes wait for the work.';
COMMENT ON COLUMN batch_job_item.item IS 'The item''s key within the run, 1 to 1024 bytes, compared byte by byte.';
COMMENT ON COLUMN batch_job_item.attempt IS 'The attempt that did it.';
COMMENT ON COLUMN batch_job_item.done_at IS 'Start of the transaction that did it, by the database clock.';

CREATE TABLE batch_job_item_failure (
  job_key       varchar(120) COLLATE "C" NOT NULL,
  item          text         COLLATE "C" NOT NULL,
  attempt       integer      NOT NULL,
  failures      integer      NOT NULL DEFAULT 1,
  failed_at     timestamptz  NOT NULL DEFAULT now(),
  error_message text         NOT NULL,
  PRIMARY KEY (job_key, item)
);

COMMENT ON TABLE  batch_job_item_failure IS 'The latest failure of an item. It is open while batch_job_item has no row of the item; the next attempt tries it again.';
COMMENT ON COLUMN batch_job_item_failure.job_key IS 'The run.';
COMMENT ON COLUMN batch_job_item_failure.item IS 'The item''s key within the run.';
COMMENT ON COLUMN batch_job_item_failure.attempt IS 'The latest attempt in which it failed.';
COMMENT ON COLUMN batch_job_item_failure.failures IS 'In how many attempts it failed.';
COMMENT ON COLUMN batch_job_item_failure.failed_at IS 'When it failed last, by the database clock.';
COMMENT ON COLUMN batch_job_item_failure.error_message IS 'Why it failed last, at most 8 KiB.';

CREATE TABLE batch_job_checkpoint (
  job_key  varchar(120) COLLATE "C" PRIMARY KEY,
  attempt  integer      NOT NULL,
  value    json         NOT NULL,
  saved_at timestamptz  NOT NULL DEFAULT now()
);

COMMENT ON TABLE  batch_job_checkpoint IS 'Where a run that has not succeeded yet goes on: one value of the job''s own per run.';
COMMENT ON COLUMN batch_job_checkpoint.job_key IS 'The run.';
COMMENT ON COLUMN batch_job_checkpoint.attempt IS 'The attempt that saved it. It is void once this or a later attempt has SUCCEEDED.';
COMMENT ON COLUMN batch_job_checkpoint.value IS 'The value, as the job wrote it.';
COMMENT ON COLUMN batch_job_checkpoint.saved_at IS 'Start of the transaction that saved it, by the database clock.';

INSERT INTO batch_job_migration (version, name, incompatible)
VALUES (2, '0002_items.sql', false);
