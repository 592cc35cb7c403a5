-- schema_2.sql - from version 1 to 2: documents have a type, operators can
-- pause intake and cancel whole batches, and a replayed job names its first.
INSERT INTO nightshift.schema_version (version) VALUES (2);

ALTER TABLE nightshift.document
    ADD media_type text NOT NULL DEFAULT 'text/plain'
        CHECK (octet_length(media_type) BETWEEN 3 AND 100);

ALTER TABLE nightshift.result ADD replay_of text;

-- In the order in which `nightshift results` reads it.
DROP INDEX nightshift.result_batch;
CREATE INDEX result_batch ON nightshift.result (batch, job_id)
    WHERE batch IS NOT NULL;

-- What operators ask of the daemons, which read it once a second.
CREATE TABLE nightshift.control (
    tenant text PRIMARY KEY, -- '': everyone
    paused boolean NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_by text NOT NULL DEFAULT session_user);

CREATE FUNCTION nightshift.pause(the_tenant text, on_or_off boolean)
RETURNS void LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO nightshift.control AS c (tenant, paused)
    VALUES (the_tenant, on_or_off)
    ON CONFLICT (tenant) DO UPDATE SET paused = excluded.paused,
        changed_at = excluded.changed_at, changed_by = excluded.changed_by;
$$;

-- Jobs of the batch that are yet to come meet it when they are claimed.
ALTER TABLE nightshift.batch
    ADD cancel_requested boolean NOT NULL DEFAULT false;

-- Asks for the end of all jobs of the batch, those to come too; says how many
-- of those that were seen had not ended.
CREATE FUNCTION nightshift.cancel_batch(the_batch text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    n bigint;
BEGIN
    INSERT INTO nightshift.batch AS b (batch, cancel_requested)
    VALUES (the_batch, true)
    ON CONFLICT (batch) DO UPDATE SET cancel_requested = true;
    WITH l AS (SELECT job_id FROM nightshift.job
               WHERE batch = the_batch AND finished_at IS NULL
               ORDER BY job_id FOR NO KEY UPDATE)
    UPDATE nightshift.job j SET cancel_requested = true
    FROM l WHERE j.job_id = l.job_id AND j.finished_at IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- The same text from whatever ends a batch: the daemon's statements, and the
-- two functions below, which may also be what makes it whole.
CREATE FUNCTION nightshift.tell_batch_end(the_batch text, ok bigint,
                                          failed bigint)
RETURNS void LANGUAGE sql
SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_notify('nightshift_batch', json_build_object(
        'batch', the_batch, 'ok', ok, 'failed', failed,
        'outcome', CASE WHEN ok = 0 AND failed > 0 THEN 'all_failed'
                        WHEN failed > 0 THEN 'some_failed'
                        ELSE 'ok' END)::text);
$$;

-- As in version 1; a batch that the number makes whole is told of.
CREATE OR REPLACE FUNCTION nightshift.expect_batch(the_batch text, n bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    before timestamptz;
    now_is nightshift.batch;
BEGIN
    SELECT ended_at INTO before FROM nightshift.batch
    WHERE batch = the_batch FOR UPDATE;
    INSERT INTO nightshift.batch AS b (batch, expected) VALUES (the_batch, n)
    ON CONFLICT (batch) DO UPDATE SET
        expected = excluded.expected,
        ended_at = CASE WHEN b.ok + b.failed >= excluded.expected
                        THEN coalesce(b.ended_at, clock_timestamp()) END
    RETURNING * INTO now_is;
    IF before IS NULL AND now_is.ended_at IS NOT NULL THEN
        PERFORM nightshift.tell_batch_end(the_batch, now_is.ok, now_is.failed);
    END IF;
    RETURN now_is.ended_at IS NOT NULL;
END $$;

-- As in version 1, but that the batch that a tombstone makes whole is told of.
CREATE OR REPLACE FUNCTION nightshift.cancel(the_job text,
                                             the_batch text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_state text;
    now_is nightshift.batch;
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
        IF the_batch IS NOT NULL THEN
            INSERT INTO nightshift.batch AS b (batch, failed, last_at)
            VALUES (the_batch, 1, clock_timestamp())
            ON CONFLICT (batch) DO UPDATE SET
                failed = b.failed + 1, last_at = excluded.last_at,
                ended_at = CASE WHEN b.ok + b.failed + 1 >= b.expected
                           THEN coalesce(b.ended_at, clock_timestamp()) END
            RETURNING * INTO now_is;
            IF now_is.ok + now_is.failed = now_is.expected THEN
                PERFORM nightshift.tell_batch_end(the_batch, now_is.ok,
                                                  now_is.failed);
            END IF;
        END IF;
        RETURN 'cancelled';
    END IF;
    UPDATE nightshift.job SET cancel_requested = true
    WHERE job_id = the_job AND finished_at IS NULL;
    SELECT CASE WHEN finished_at IS NULL THEN 'cancelling' ELSE state END
    INTO found_state FROM nightshift.job WHERE job_id = the_job;
    RETURN found_state;
END $$;

-- The next id under which a job that has an end may run again: ID~r1, ID~r2.
-- Of what was replayed itself, the id without that.
CREATE FUNCTION nightshift.replay_id(the_job text)
RETURNS text LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT regexp_replace(the_job, '~r[0-9]+$', '') || '~r' || (1 + coalesce(
        max(substring(j.job_id FROM '~r([0-9]+)$')::bigint), 0))
    FROM nightshift.job j
    WHERE starts_with(j.job_id,
                      regexp_replace(the_job, '~r[0-9]+$', '') || '~r')
        AND substr(j.job_id, length(regexp_replace(the_job, '~r[0-9]+$', ''))
                   + 1) ~ '^~r[0-9]{1,9}$';
$$;

REVOKE ALL ON FUNCTION nightshift.pause(text, boolean),
    nightshift.cancel_batch(text), nightshift.replay_id(text),
    nightshift.tell_batch_end(text, bigint, bigint) FROM PUBLIC;
GRANT SELECT ON nightshift.control
    TO nightshift_rw, nightshift_submit;
GRANT EXECUTE ON FUNCTION nightshift.pause(text, boolean),
    nightshift.cancel_batch(text), nightshift.replay_id(text)
    TO nightshift_submit;
