#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "connectors/postgres_private.h"

enum { SOON_MS = 50 }; /* asked again when a claim met a change */

/* A claim whose answer was lost is ours and has a number above all that we
 * were ever told: it is taken again. No other of our claims is: a second
 * message of a job that we run must not steal it from ourselves. */
#define TAKEN_BACK "(j.state = 'running' AND j.owner = excluded.owner" \
                   " AND j.fence > $12)"
#define BLOCKS "(SELECT count(*) FROM nightshift.block b" \
               " WHERE b.job_id = j.job_id)"
/* A holder that died after it had added a block has moved the job on. */
#define EXHAUSTED(limit) "(j.retries >= " limit " OR (j.stalls >= " limit \
                         " AND " BLOCKS " <= j.blocks_seen))"
#define ENDING(limit) "(j.cancel_requested OR" \
                      " coalesce(j.deadline <= clock_timestamp(), false) OR " \
                      EXHAUSTED(limit) ")"

static const char claim_sql[] =
    "INSERT INTO nightshift.job AS j (job_id, batch, custom_id, tenant,"
    " body_sha256, state, priority, deadline, mode, seed, source, attempt,"
    " fence, owner, lease_until, started_at) "
    "SELECT x.id, x.batch, x.custom_id, x.tenant, x.sha, 'running',"
    " x.priority, to_timestamp(x.deadline / 1000.0), x.mode, x.seed,"
    " x.source::jsonb, 1, nextval('nightshift.fence_seq'), $11,"
    " clock_timestamp() + $13 * interval '1 ms', clock_timestamp() "
    "FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) AS x (id, batch,"
    " custom_id, tenant, sha, priority, deadline, mode, seed, source) "
    "ORDER BY x.id "
    "ON CONFLICT (job_id) DO UPDATE SET state = 'running',"
    " attempt = j.attempt + 1, fence = nextval('nightshift.fence_seq'),"
    " stalls = CASE WHEN j.state = 'retry' THEN 0"
    "  WHEN " TAKEN_BACK " THEN j.stalls"
    "  WHEN " BLOCKS " > j.blocks_seen THEN 1 ELSE j.stalls + 1 END,"
    " blocks_seen = " BLOCKS ","
    " owner = excluded.owner, not_before = NULL,"
    " lease_until = clock_timestamp() + $13 * interval '1 ms' "
    "WHERE j.body_sha256 = excluded.body_sha256"
    " AND (" TAKEN_BACK " OR (NOT " ENDING("$14")
    "  AND ((j.state = 'retry'"
    "        AND coalesce(j.not_before, '-infinity') <= clock_timestamp())"
    "   OR (j.state = 'running' AND j.lease_until < clock_timestamp())))) "
    "RETURNING job_id, fence, attempt, stalls, mode, seed,"
    " (SELECT b.cancel_requested FROM nightshift.batch b"
    "  WHERE b.batch = j.batch),"
    " (extract(epoch FROM clock_timestamp()) * 1000)::bigint";

/* Why a claim was not had. A hash of zeros is that of a job which was
 * cancelled before it was seen: it fits any body. */
static const char why_sql[] =
    "SELECT j.job_id, j.finished_at IS NOT NULL,"
    " j.body_sha256 = x.sha OR j.body_sha256 = decode(repeat('00', 32),"
    " 'hex'),"
    " " ENDING("$3") ","
    " coalesce((extract(epoch FROM CASE j.state WHEN 'running'"
    "  THEN j.lease_until ELSE j.not_before END - clock_timestamp())"
    "  * 1000)::bigint, 0),"
    " j.state, x.i "
    "FROM unnest($1, $2) WITH ORDINALITY AS x (id, sha, i)"
    " JOIN nightshift.job j ON j.job_id = x.id";

/* Ends jobs that nobody holds and nobody may run any more. The reason is
 * looked at again here, under the row's lock. */
static const char give_up_sql[] =
    "WITH g AS (UPDATE nightshift.job j SET"
    " state = CASE WHEN j.cancel_requested THEN 'cancelled'"
    "  WHEN j.deadline <= clock_timestamp() THEN 'expired' ELSE 'dead' END,"
    " error_code = CASE WHEN j.cancel_requested THEN 'cancelled'"
    "  WHEN j.deadline <= clock_timestamp() THEN 'expired'"
    "  WHEN j.retries >= $2 THEN coalesce(j.error_code, 'retries_exhausted')"
    "  ELSE 'stalled' END,"
    " fence = nextval('nightshift.fence_seq'),"
    " finished_at = clock_timestamp(), owner = NULL, lease_until = NULL,"
    " not_before = NULL "
    "WHERE j.job_id = ANY ($1) AND " ENDING("$2")
    " AND (j.state = 'retry'"
    "  OR (j.state = 'running' AND j.lease_until < clock_timestamp())) "
    "RETURNING j.*),"
    "d AS (DELETE FROM nightshift.block b USING g WHERE b.job_id = g.job_id),"
    "r AS (INSERT INTO nightshift.result (job_id, batch, custom_id, tenant,"
    " fence, status, error_code, error_message, mode, seed, input_sha256) "
    "SELECT job_id, batch, custom_id, tenant, fence, state, error_code,"
    " CASE WHEN state = 'cancelled' THEN 'cancelled'"
    "  WHEN state = 'expired' THEN 'the deadline has passed'"
    "  WHEN error_code = 'stalled'"
    "   THEN 'given up after ' || stalls || ' takeovers without a new block'"
    "  ELSE 'given up after ' || retries || ' failures' END,"
    " mode, seed, body_sha256 FROM g"
    " RETURNING job_id, batch, status, completion_tokens AS tokens),"
    NS_PG_COUNT_BATCHES NS_PG_REPORT("$3")
    " UNION ALL SELECT 2, job_id, array_position(ARRAY['ok', 'failed',"
    " 'dead', 'cancelled', 'expired'], state)::bigint - 1, 0, error_code"
    " FROM g";

static struct ns_claim *
claim_of(struct ns_claim *const *claims, size_t n, const char *job_id)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(claims[i]->job->id, job_id) == 0)
            return claims[i];
    return NULL;
}

static void
set_wait(struct ns_claim *claim, int64_t wait_ms)
{
    claim->outcome = NS_CLAIM_WAIT;
    claim->wait_ms = wait_ms > SOON_MS ? wait_ms : SOON_MS;
}

static enum ns_status
fill_claims(struct ns_pg_columns *columns, struct ns_claim *const *claims,
            size_t n, struct ns_error *err)
{
    ns_pg_columns_init(columns, "ttttbi8t8t");
    for (size_t i = 0; i < n; i++) {
        const struct ns_job *job = claims[i]->job;
        struct ns_pg_array *array = columns->array;

        ns_pg_add_text(&array[0], job->id);
        ns_pg_add_text(&array[1], job->batch);
        ns_pg_add_text(&array[2], job->custom_id);
        ns_pg_add_text(&array[3], job->tenant ? job->tenant : "default");
        ns_pg_add_bytes(&array[4], job->sha256, sizeof(job->sha256));
        ns_pg_add_int(&array[5], job->priority);
        if (job->has_deadline)
            ns_pg_add_int(&array[6], job->deadline_ms);
        else
            ns_pg_add_null(&array[6]);
        ns_pg_add_text(&array[7], ns_job_mode_name(claims[i]->mode));
        ns_pg_add_int(&array[8], (int64_t)claims[i]->seed);
        ns_pg_add_source(&array[9], job);
    }
    return ns_pg_columns_check(columns, err);
}

static void
call_claim(const struct ns_pg_store *pg, const struct ns_pg_columns *columns,
           struct ns_pg_call *call)
{
    ns_pg_columns_call(columns, claim_sql, call);
    ns_pg_call_text(call, pg->owner);
    ns_pg_call_int(call, (int64_t)pg->known_fence);
    ns_pg_call_int(call, pg->lease_ms);
    ns_pg_call_int(call, NS_PG_LIMIT);
}

static void
read_claims(struct ns_pg_store *pg, const PGresult *answer,
            struct ns_claim *const *claims, size_t n)
{
    for (int row = 0; row < PQntuples(answer); row++) {
        struct ns_claim *claim = claim_of(claims, n,
                                          ns_pg_text(answer, row, 0));

        if (!claim)
            continue;
        claim->outcome = NS_CLAIM_RUN;
        claim->fence = (uint64_t)ns_pg_int(answer, row, 1);
        claim->attempt = (uint32_t)ns_pg_int(answer, row, 2);
        claim->stalls = (uint32_t)ns_pg_int(answer, row, 3);
        claim->stored_mode = claim->mode;
        (void)ns_job_mode_from(ns_pg_text(answer, row, 4),
                               &claim->stored_mode);
        claim->stored_seed = (uint64_t)ns_pg_int(answer, row, 5);
        claim->cancel = ns_pg_bool(answer, row, 6);
        claim->clock_ms = ns_pg_int(answer, row, 7);
        if (claim->fence > pg->known_fence)
            pg->known_fence = claim->fence;
    }
}

/* Claims one by one, after a claim of all was refused for one's values. */
static enum ns_status
unroll_claims(struct ns_pg_store *pg, struct ns_claim *const *claims, size_t n,
              struct ns_error *err)
{
    enum ns_status status = NS_OK;

    pg->unrolled++;
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        struct ns_pg_call call;
        struct ns_pg_columns columns;

        status = fill_claims(&columns, &claims[i], 1, err);
        if (status == NS_OK) {
            call_claim(pg, &columns, &call);
            status = ns_pg_run(&pg->link, &call, 1, err);
            if (status == NS_OK && call.result) {
                read_claims(pg, call.result, &claims[i], 1);
            } else if (status == NS_OK) {
                pg->unstorable++;
                claims[i]->outcome = NS_CLAIM_CONFLICT;
                ns_refuse(&claims[i]->error, "unstorable", NULL,
                          "the database refuses it: %s %s", call.state,
                          call.text);
            }
            ns_pg_call_fini(&call);
        }
        ns_pg_columns_fini(&columns);
    }
    return status;
}

/* How it ended, from the row that give_up_sql adds to the report. */
static void
read_end(const PGresult *report, struct ns_claim *claim)
{
    for (int row = 0; row < PQntuples(report); row++)
        if (ns_pg_int(report, row, 0) == 2) {
            claim->outcome = NS_CLAIM_FINAL;
            claim->given_up = true;
            claim->ended = (enum ns_result_status)ns_pg_int(report, row, 2);
            snprintf(claim->ended_code, sizeof(claim->ended_code), "%s",
                     ns_pg_text(report, row, 4));
        }
}

static enum ns_status
give_up(struct ns_pg_store *pg, struct ns_claim *claim, struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;

    set_wait(claim, SOON_MS); /* someone may have been faster */
    ns_pg_columns_init(&columns, "t");
    ns_pg_add_text(&columns.array[0], claim->job->id);
    ns_pg_columns_call(&columns, give_up_sql, &call);
    ns_pg_call_int(&call, NS_PG_LIMIT);
    ns_pg_call_bool(&call, pg->link.options.notify);
    status = ns_pg_columns_ask(&pg->link, &columns, &call, err);
    if (status == NS_OK) {
        ns_pg_read_report(pg, call.result, NULL, NULL);
        read_end(call.result, claim);
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    return status;
}

/* What a claim that got no row means, from what stands there now. */
static enum ns_status
judge(struct ns_pg_store *pg, const PGresult *answer, int row,
      struct ns_claim *claim, struct ns_error *err)
{
    bool final = ns_pg_bool(answer, row, 1), same = ns_pg_bool(answer, row, 2);
    bool ending = ns_pg_bool(answer, row, 3);
    int64_t wait_ms = ns_pg_int(answer, row, 4);
    bool retry = strcmp(ns_pg_text(answer, row, 5), "retry") == 0;
    char shown[160];

    if (!same) {
        claim->outcome = NS_CLAIM_CONFLICT;
        ns_refuse(&claim->error, "id_conflict", "custom_id",
                  "custom_id: %s was taken for another body",
                  ns_log_escape(claim->job->id, strlen(claim->job->id), shown,
                                sizeof(shown)));
        return NS_OK;
    }
    if (final) {
        claim->outcome = NS_CLAIM_FINAL;
        return NS_OK;
    }
    if (ending && (retry || wait_ms <= 0))
        return give_up(pg, claim, err);
    set_wait(claim, wait_ms);
    return NS_OK;
}

/* What stands of those whose outcome is open, to be read with judge's columns.
 * The caller ends `call`. */
static enum ns_status
ask_states(struct ns_pg_store *pg, struct ns_claim *const *claims, size_t n,
           struct ns_pg_call *call, struct ns_error *err)
{
    enum ns_status status;
    struct ns_pg_columns columns;

    ns_pg_columns_init(&columns, "tb");
    for (size_t i = 0; i < n; i++)
        if (claims[i]->outcome == 0) {
            ns_pg_add_text(&columns.array[0], claims[i]->job->id);
            ns_pg_add_bytes(&columns.array[1], claims[i]->job->sha256,
                            sizeof(claims[i]->job->sha256));
        }
    ns_pg_columns_call(&columns, why_sql, call);
    ns_pg_call_int(call, NS_PG_LIMIT);
    status = ns_pg_columns_ask(&pg->link, &columns, call, err);
    ns_pg_columns_fini(&columns);
    return status;
}

static enum ns_status
ask_why(struct ns_pg_store *pg, struct ns_claim *const *claims, size_t n,
        struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    size_t n_open = 0;

    for (size_t i = 0; i < n; i++)
        n_open += claims[i]->outcome == 0;
    if (n_open == 0)
        return NS_OK;
    status = ask_states(pg, claims, n, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        struct ns_claim *claim = claim_of(claims, n,
                                          ns_pg_text(call.result, row, 0));

        if (claim && claim->outcome == 0)
            status = judge(pg, call.result, row, claim, err);
    }
    ns_pg_call_fini(&call);
    /* A row that is gone again: purged, or never there. */
    for (size_t i = 0; i < n && status == NS_OK; i++)
        if (claims[i]->outcome == 0)
            set_wait(claims[i], SOON_MS);
    return status;
}

static const char blocks_sql[] =
    "SELECT block_no, model_rev = $2, engine_rev = $3, tokens, hash "
    "FROM nightshift.block WHERE job_id = $1 AND part = 0 ORDER BY block_no";

/* Blocks that can not be used go before the new holder writes its own. */
static const char cut_sql[] =
    "WITH l AS (SELECT job_id FROM nightshift.job WHERE job_id = $1"
    "  AND fence = $2 AND state = 'running' FOR NO KEY UPDATE),"
    "d AS (DELETE FROM nightshift.block b USING l WHERE b.job_id = l.job_id"
    "  AND b.part = 0 AND b.block_no >= $3) "
    "UPDATE nightshift.job j SET blocks_seen = $3 FROM l"
    " WHERE j.job_id = l.job_id";

static bool
is_sound(const PGresult *answer, int row)
{
    const char *tokens = PQgetvalue(answer, row, 3);
    size_t n = (size_t)PQgetlength(answer, row, 3);

    return ns_pg_int(answer, row, 0) == row && ns_pg_bool(answer, row, 1) &&
           n % sizeof(int32_t) == 0 &&
           (int64_t)XXH3_64bits(tokens, n) == ns_pg_int(answer, row, 4);
}

/* The sound ones from 0 up to the first hole, into the job's arena. */
static enum ns_status
keep_blocks(const PGresult *answer, int n_blocks, struct ns_claim *claim,
            struct ns_error *err)
{
    size_t bytes = 0;
    int32_t *tokens;
    uint32_t *lengths;

    for (int row = 0; row < n_blocks; row++)
        bytes += (size_t)PQgetlength(answer, row, 3);
    if (bytes / sizeof(int32_t) > INT32_MAX)
        return ns_fail(err, NS_REJECT, "blocks of %zu bytes", bytes);
    tokens = ns_arena_take(claim->job->arena, bytes);
    lengths = ns_arena_array(claim->job->arena, (size_t)n_blocks,
                             sizeof(*lengths));
    if (!tokens || !lengths)
        return ns_pg_no_memory(err);
    claim->tokens = tokens;
    claim->block_tokens = lengths;
    claim->n_blocks = (uint32_t)n_blocks;
    claim->n_tokens = (uint32_t)(bytes / sizeof(int32_t));
    for (int row = 0; row < n_blocks; row++) {
        size_t n = (size_t)PQgetlength(answer, row, 3);

        memcpy(tokens, PQgetvalue(answer, row, 3), n);
        tokens += n / sizeof(int32_t);
        lengths[row] = (uint32_t)(n / sizeof(int32_t));
        claim->resumed_across |= !ns_pg_bool(answer, row, 2);
    }
    return NS_OK;
}

static enum ns_status
take_blocks(struct ns_pg_store *pg, const PGresult *answer,
            struct ns_claim *claim, struct ns_error *err)
{
    struct ns_pg_call call = { .sql = cut_sql };
    enum ns_status status = NS_OK;
    int n = 0, n_rows = PQntuples(answer);

    while (n < n_rows && is_sound(answer, n))
        n++;
    if (n > 0)
        status = keep_blocks(answer, n, claim, err);
    if (status != NS_OK || n == n_rows)
        return status;
    claim->n_dropped = (uint32_t)(n_rows - n);
    ns_log_warn("blocks.dropped", "kept=%d of=%d", n, n_rows);
    ns_pg_call_text(&call, claim->job->id);
    ns_pg_call_int(&call, (int64_t)claim->fence);
    ns_pg_call_int(&call, n);
    status = ns_pg_ask(&pg->link, &call, err);
    ns_pg_call_fini(&call);
    return status;
}

/* Of claims that are not the first of their jobs. Asked after the claim was
 * answered: only then is every block of the former holder either there or
 * never will be. All are asked for at once, so that a daemon that takes over
 * a hundred jobs waits for one round trip. */
static enum ns_status
read_blocks(struct ns_pg_store *pg, struct ns_claim *const *claims, size_t n,
            struct ns_error *err)
{
    struct ns_claim **resumed = calloc(n, sizeof(struct ns_claim *));
    struct ns_pg_call *calls = NULL;
    enum ns_status status = NS_OK;
    size_t n_resumed = 0;

    for (size_t i = 0; resumed && i < n; i++)
        if (claims[i]->outcome == NS_CLAIM_RUN && claims[i]->attempt > 1)
            resumed[n_resumed++] = claims[i];
    calls = calloc(n_resumed + 1, sizeof(*calls));
    if (!resumed || !calls) {
        n_resumed = 0;
        status = ns_pg_no_memory(err);
    }
    for (size_t i = 0; i < n_resumed; i++) {
        calls[i].sql = blocks_sql;
        ns_pg_call_text(&calls[i], resumed[i]->job->id);
        ns_pg_call_text(&calls[i], pg->model_rev);
        ns_pg_call_text(&calls[i], pg->engine_rev);
    }
    if (n_resumed > 0)
        status = ns_pg_run(&pg->link, calls, n_resumed, err);
    for (size_t i = 0; i < n_resumed && status == NS_OK; i++) {
        if (calls[i].result)
            status = take_blocks(pg, calls[i].result, resumed[i], err);
        else
            status = ns_fail(err, NS_FATAL, "postgres: %s %s", calls[i].state,
                             calls[i].text);
    }
    for (size_t i = 0; i < n_resumed; i++)
        ns_pg_call_fini(&calls[i]);
    free(calls);
    free(resumed);
    return status;
}

/* One row can not be claimed twice in one statement: a second message of a
 * job in the same batch asks again. */
static bool
is_second(const struct ns_claim *claims, size_t at)
{
    for (size_t i = 0; i < at; i++)
        if (strcmp(claims[i].job->id, claims[at].job->id) == 0)
            return true;
    return false;
}

static enum ns_status
claim_all(struct ns_pg_store *pg, struct ns_claim *const *claims, size_t n,
          struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;

    status = fill_claims(&columns, claims, n, err);
    if (status == NS_OK) {
        call_claim(pg, &columns, &call);
        status = ns_pg_run(&pg->link, &call, 1, err);
        if (status == NS_OK && call.result)
            read_claims(pg, call.result, claims, n);
        else if (status == NS_OK)
            status = unroll_claims(pg, claims, n, err);
        ns_pg_call_fini(&call);
    }
    ns_pg_columns_fini(&columns);
    if (status == NS_OK)
        status = ask_why(pg, claims, n, err);
    if (status == NS_OK)
        status = read_blocks(pg, claims, n, err);
    return status;
}

/* Where the job of the first one is done, so is that of its copies: a flood of
 * them would wait for each other by the second. */
static void
end_seconds(struct ns_claim *claims, size_t n)
{
    for (size_t i = 1; i < n; i++)
        for (size_t j = 0; j < i; j++)
            if (claims[i].outcome == NS_CLAIM_WAIT &&
                claims[j].outcome == NS_CLAIM_FINAL &&
                strcmp(claims[i].job->id, claims[j].job->id) == 0 &&
                memcmp(claims[i].job->sha256, claims[j].job->sha256,
                       sizeof(claims[j].job->sha256)) == 0)
                claims[i].outcome = NS_CLAIM_FINAL;
}

enum ns_status
ns_pg_claim(struct ns_store *store, struct ns_claim *claims, size_t n,
            struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_claim **first = calloc(n ? n : 1, sizeof(struct ns_claim *));
    enum ns_status status = NS_OK;
    uint64_t known = pg->known_fence;
    size_t n_first = 0;

    if (!first)
        return ns_pg_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        claims[i].outcome = 0;
        claims[i].tokens = NULL;
        claims[i].block_tokens = NULL;
        claims[i].n_tokens = claims[i].n_blocks = claims[i].n_dropped = 0;
        claims[i].resumed_across = claims[i].cancel = false;
        claims[i].given_up = false;
        claims[i].clock_ms = 0;
        if (is_second(claims, i))
            set_wait(&claims[i], 1000);
        else
            first[n_first++] = &claims[i];
    }
    if (n_first > 0)
        status = claim_all(pg, first, n_first, err);
    if (status == NS_OK)
        end_seconds(claims, n);
    /* The caller hears of none of these claims, and will ask again: their
     * numbers are as good as not known. */
    if (status != NS_OK)
        pg->known_fence = known;
    free(first);
    return status;
}

enum ns_status
ns_pg_look(struct ns_store *store, struct ns_claim *claims, size_t n,
           struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_claim **all = calloc(n ? n : 1, sizeof(struct ns_claim *));
    struct ns_pg_call call;
    enum ns_status status;

    if (!all)
        return ns_pg_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        claims[i].outcome = 0;
        claims[i].given_up = false;
        all[i] = &claims[i];
    }
    status = ask_states(pg, all, n, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        int64_t at = ns_pg_int(call.result, row, 6) - 1;
        bool final = ns_pg_bool(call.result, row, 1);
        bool same = ns_pg_bool(call.result, row, 2);

        if (final && same && at >= 0 && at < (int64_t)n)
            claims[at].outcome = NS_CLAIM_FINAL;
    }
    ns_pg_call_fini(&call);
    free(all);
    return status;
}
