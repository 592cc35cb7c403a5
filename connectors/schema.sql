-- schema.sql - version 1 of what nightshift keeps in PostgreSQL 14 or newer.
--
-- Embedded into the programs and run by `nightshift db init`, as one
-- transaction with the steps to later versions (schema_2.sql), by the role
-- that shall own it. The daemon never changes it.
--
-- job is a lease with a fence: who runs what, until when. result is the one
-- final row; no role of ours can change it, so that a second one is refused
-- by the server and not by our care. Both live in one schema by one owner.

CREATE SCHEMA nightshift;

CREATE TABLE nightshift.schema_version (
    version int NOT NULL,
    installed_at timestamptz NOT NULL DEFAULT clock_timestamp());
INSERT INTO nightshift.schema_version (version) VALUES (1);

-- Every claim takes the next number, and every later write names it.
CREATE SEQUENCE nightshift.fence_seq;

CREATE TABLE nightshift.job (
    job_id text PRIMARY KEY
        CHECK (octet_length(job_id) BETWEEN 1 AND 301), -- batch/custom_id
    batch text,
    custom_id text,
    tenant text NOT NULL DEFAULT 'default',
    body_sha256 bytea NOT NULL CHECK (octet_length(body_sha256) = 32),
    state text NOT NULL CHECK (state IN ('running', 'retry', 'done', 'failed',
                                         'dead', 'cancelled', 'expired')),
    priority int NOT NULL DEFAULT 0,
    deadline timestamptz,
    mode text, -- of the first claim, as the seed: later ones run in them
    seed bigint,
    not_before timestamptz,
    attempt int NOT NULL DEFAULT 0, -- executions begun; information only
    retries int NOT NULL DEFAULT 0, -- failures that were the job's own
    stalls int NOT NULL DEFAULT 0,  -- takeovers in a row without a new block
    blocks_seen int NOT NULL DEFAULT 0,
    fence bigint NOT NULL,
    owner text,                     -- host:pid:nonce, one for each start
    lease_until timestamptz,        -- of the server's own clock
    cancel_requested boolean NOT NULL DEFAULT false,
    source jsonb,                   -- where it was first seen
    error_code text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    finished_at timestamptz,
    CHECK ((state = 'running')
           = (owner IS NOT NULL AND lease_until IS NOT NULL)),
    CHECK ((state IN ('done', 'failed', 'dead', 'cancelled', 'expired'))
           = (finished_at IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
-- No index on lease_until or state: a heartbeat must stay within its page.
-- Nothing looks for leases that ran out; the message that was not
-- acknowledged brings the job back.
CREATE INDEX job_batch ON nightshift.job (batch) WHERE batch IS NOT NULL;

CREATE TABLE nightshift.result (
    job_id text PRIMARY KEY REFERENCES nightshift.job,
    batch text,
    custom_id text,
    tenant text NOT NULL,
    fence bigint NOT NULL,
    status text NOT NULL
        CHECK (status IN ('ok', 'failed', 'dead', 'cancelled', 'expired')),
    content text,       -- valid UTF-8 without U+0000: see sanitised
    reasoning text,     -- NULL also when too long: response_lz4 has it
    tool_calls text,    -- JSON, as the model wrote its strings
    response_lz4 bytea, -- the exact result line, one LZ4 frame
    finish_reason text,
    error_code text,
    error_param text,
    error_message text,
    mode text,
    seed bigint,
    blocks int,
    passes int,
    denoise_steps int,
    prompt_tokens int,
    cached_tokens int,
    completion_tokens int,
    reasoning_tokens int,
    queued_ms bigint,
    run_ms bigint,
    input_sha256 bytea,
    model_rev text,
    engine_rev text,
    warnings jsonb,
    trace_parent text, -- W3C, as the message had it
    sanitised int NOT NULL DEFAULT 0, -- replaced in content and reasoning
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (status <> 'ok' OR response_lz4 IS NOT NULL)
);
-- It is compressed as it comes.
ALTER TABLE nightshift.result ALTER response_lz4 SET STORAGE EXTERNAL;
CREATE INDEX result_batch ON nightshift.result (batch)
    WHERE batch IS NOT NULL;
CREATE INDEX result_created ON nightshift.result (created_at);

-- Blocks of unfinished jobs: appended, never changed, gone with the result.
CREATE TABLE nightshift.block (
    job_id text NOT NULL REFERENCES nightshift.job ON DELETE CASCADE,
    part int NOT NULL DEFAULT 0, -- of a job that is split and joined
    block_no int NOT NULL,
    model_rev text NOT NULL,
    engine_rev text NOT NULL,
    tokens bytea NOT NULL,       -- int32, little-endian
    hash bigint NOT NULL,        -- XXH3 of them
    PRIMARY KEY (job_id, part, block_no));
ALTER TABLE nightshift.block ALTER tokens SET STORAGE EXTERNAL;

CREATE TABLE nightshift.dead_letter (
    source_key text PRIMARY KEY, -- origin:offset@sha256
    job_id text,                 -- as far as it could be read
    batch text,
    tenant text,
    reason text NOT NULL,
    param text,
    detail text,
    headers jsonb,               -- of the message
    payload_lz4 bytea,           -- one LZ4 frame; NULL: too long to be kept
    payload_bytes bigint,
    payload_sha256 bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX dead_letter_created ON nightshift.dead_letter (created_at);

-- What jobs refer to instead of carrying it.
CREATE TABLE nightshift.document (
    id text PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 200),
    sha256 bytea NOT NULL CHECK (octet_length(sha256) = 32),
    content_lz4 bytea NOT NULL,
    content_bytes bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp());
ALTER TABLE nightshift.document ALTER content_lz4 SET STORAGE EXTERNAL;

-- Counted in the statements that write final rows, so that its end is seen
-- once, by the one that writes the last.
CREATE TABLE nightshift.batch (
    batch text PRIMARY KEY,
    expected bigint,             -- jobs in it; NULL: nobody said
    ok bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    tokens bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at timestamptz,
    ended_at timestamptz
) WITH (fillfactor = 50);

CREATE VIEW nightshift.batch_status AS
SELECT b.batch, b.expected, b.ok + b.failed AS total, b.ok, b.failed,
       j.running, j.waiting, b.tokens, j.first_at, b.last_at, b.ended_at,
       b.ended_at IS NOT NULL AS done,
       CASE WHEN b.ended_at IS NULL THEN 'running'
            WHEN b.ok = 0 AND b.failed > 0 THEN 'all_failed'
            WHEN b.failed > 0 THEN 'some_failed'
            ELSE 'ok' END AS outcome
FROM nightshift.batch b, LATERAL (
    SELECT count(*) FILTER (WHERE state = 'running') AS running,
           count(*) FILTER (WHERE state = 'retry') AS waiting,
           min(created_at) AS first_at
    FROM nightshift.job j WHERE j.batch = b.batch) j;

-- What submitters may do beyond reading is these functions.

-- Says how many jobs the batch has, also after they came. True: it has ended.
CREATE FUNCTION nightshift.expect_batch(the_batch text, n bigint)
RETURNS boolean LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO nightshift.batch AS b (batch, expected) VALUES (the_batch, n)
    ON CONFLICT (batch) DO UPDATE SET
        expected = excluded.expected,
        ended_at = CASE WHEN b.ok + b.failed >= excluded.expected
                        THEN coalesce(b.ended_at, clock_timestamp()) END
    RETURNING ended_at IS NOT NULL;
$$;

-- Asks for a job's end, and says how it then stands: the state of one that has
-- ended, else 'cancelling'. One that was never seen is written down as
-- cancelled, under a hash of zeros that its message is then met with, whatever
-- that says. A column and no signal: whoever claims the job later sees it.
CREATE FUNCTION nightshift.cancel(the_job text, the_batch text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_state text;
BEGIN
    INSERT INTO nightshift.job (job_id, batch, body_sha256, state, fence,
                                cancel_requested, finished_at, error_code)
    VALUES (the_job, the_batch, decode(repeat('00', 32), 'hex'), 'cancelled',
            nextval('nightshift.fence_seq'), true, clock_timestamp(),
            'cancelled')
    ON CONFLICT (job_id) DO NOTHING;
    IF FOUND THEN
        INSERT INTO nightshift.result (job_id, batch, tenant, fence, status,
                                       error_code, error_message)
        SELECT job_id, batch, tenant, fence, 'cancelled', 'cancelled',
               'cancelled before it was seen'
        FROM nightshift.job WHERE job_id = the_job;
        INSERT INTO nightshift.batch AS b (batch, failed, last_at)
        SELECT the_batch, 1, clock_timestamp() WHERE the_batch IS NOT NULL
        ON CONFLICT (batch) DO UPDATE SET
            failed = b.failed + 1, last_at = excluded.last_at,
            ended_at = CASE WHEN b.ok + b.failed + 1 >= b.expected
                       THEN coalesce(b.ended_at, clock_timestamp()) END;
        RETURN 'cancelled';
    END IF;
    UPDATE nightshift.job SET cancel_requested = true
    WHERE job_id = the_job AND finished_at IS NULL;
    SELECT CASE WHEN finished_at IS NULL THEN 'cancelling' ELSE state END
    INTO found_state FROM nightshift.job WHERE job_id = the_job;
    RETURN found_state;
END $$;

REVOKE ALL ON FUNCTION nightshift.expect_batch(text, bigint),
                       nightshift.cancel(text, text) FROM PUBLIC;

-- Roles are the whole server's, and may stand from another database.
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['nightshift_rw', 'nightshift_submit',
                                'nightshift_purge'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles
                       WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA nightshift
    TO nightshift_rw, nightshift_submit, nightshift_purge;
GRANT SELECT ON nightshift.schema_version
    TO nightshift_rw, nightshift_submit, nightshift_purge;

-- The daemon: it cannot change or remove a final row, nor a dead letter.
GRANT USAGE ON SEQUENCE nightshift.fence_seq TO nightshift_rw;
GRANT SELECT, INSERT, UPDATE ON nightshift.job TO nightshift_rw;
GRANT SELECT, INSERT ON nightshift.result, nightshift.dead_letter
    TO nightshift_rw;
GRANT SELECT, INSERT, DELETE ON nightshift.block TO nightshift_rw;
GRANT SELECT, INSERT, UPDATE ON nightshift.batch TO nightshift_rw;
GRANT SELECT ON nightshift.document, nightshift.batch_status
    TO nightshift_rw;
GRANT EXECUTE ON FUNCTION nightshift.cancel(text, text) TO nightshift_rw;

-- Who sends jobs and reads answers.
GRANT SELECT ON nightshift.job, nightshift.result, nightshift.dead_letter,
                nightshift.batch, nightshift.batch_status
    TO nightshift_submit;
GRANT SELECT, INSERT ON nightshift.document TO nightshift_submit;
GRANT EXECUTE ON FUNCTION nightshift.expect_batch(text, bigint),
                          nightshift.cancel(text, text) TO nightshift_submit;

-- Who removes what is old, and does nothing else.
GRANT SELECT, DELETE ON nightshift.job, nightshift.result,
                        nightshift.dead_letter, nightshift.batch,
                        nightshift.document
    TO nightshift_purge;
