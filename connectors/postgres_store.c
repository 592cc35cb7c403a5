#include "connectors/postgres.h"

#include <inttypes.h>
#include <lz4frame.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/reader.h"
#include "connectors/postgres_link.h"

enum {
    LEASE_MS = 30000,
    LIMIT = 3,         /* of retries, and of stalls in a row */
    SOON_MS = 50,      /* asked again when a claim met a change */
    PLAIN_BYTES = 256 << 10, /* longer texts stand in response_lz4 alone */
    CHUNK_BYTES = 16 << 20,  /* of results in one statement */
};

static const size_t max_line = (size_t)256 << 20;

struct postgres {
    struct ns_store store; /* first */
    struct ns_pg_link link;
    char *model_rev, *engine_rev;
    char owner[96];
    int64_t lease_ms;
    uint64_t known_fence; /* the highest that an answer has named */
    _Atomic uint64_t unrolled, sanitised, unstorable, resolved, batches_ended;
};

static struct postgres *
of_store(const struct ns_store *store)
{
    return (struct postgres *)(uintptr_t)store;
}

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory storing results");
}

/* ---- statements over columns ------------------------------------------ */

enum { MOST_COLUMNS = 34 };

struct columns {
    size_t n;
    struct ns_pg_array array[MOST_COLUMNS];
};

/* "tti8": t text, b bytea, i int4, 8 int8, o bool. */
static void
columns_init(struct columns *columns, const char *kinds)
{
    columns->n = strlen(kinds);
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_array_init(&columns->array[i],
                         kinds[i] == 't'   ? NS_PG_TEXT
                         : kinds[i] == 'b' ? NS_PG_BYTEA
                         : kinds[i] == 'i' ? NS_PG_INT4
                         : kinds[i] == 'o' ? NS_PG_BOOL
                                           : NS_PG_INT8);
}

static void
columns_fini(struct columns *columns)
{
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_array_fini(&columns->array[i]);
    columns->n = 0;
}

static enum ns_status
columns_check(const struct columns *columns, struct ns_error *err)
{
    enum ns_status status = NS_OK;

    for (size_t i = 0; i < columns->n && status == NS_OK; i++)
        status = ns_pg_array_check(&columns->array[i], err);
    return status;
}

/* A call whose first parameters are the columns. */
static void
columns_call(const struct columns *columns, const char *sql,
             struct ns_pg_call *call)
{
    memset(call, 0, sizeof(*call));
    call->sql = sql;
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_call_array(call, &columns->array[i]);
}

/* ---- JSON of our own -------------------------------------------------- */

static void
put_string(struct ns_buf *out, const char *text)
{
    ns_buf_byte(out, '"');
    ns_result_text(out, text, strlen(text));
    ns_buf_byte(out, '"');
}

static void
add_source(struct ns_pg_array *array, const struct ns_job *job)
{
    struct ns_buf json;

    ns_buf_init(&json, 1 << 20);
    ns_buf_text(&json, "{\"origin\":");
    put_string(&json, job->origin ? job->origin : "");
    ns_buf_printf(&json, ",\"offset\":%" PRIu64 "}", job->position.offset);
    ns_pg_add_bytes(array, json.data, json.length);
    array->buf.failed |= json.failed;
    ns_buf_fini(&json);
}

static void
add_warnings(struct ns_pg_array *array, const struct ns_job *job)
{
    struct ns_buf json;

    ns_buf_init(&json, 1 << 20);
    ns_buf_byte(&json, '[');
    for (size_t i = 0; i < job->n_warnings; i++) {
        ns_buf_text(&json, i ? "," : "");
        put_string(&json, job->warnings[i]);
    }
    ns_buf_byte(&json, ']');
    ns_pg_add_bytes(array, json.data, json.length);
    array->buf.failed |= json.failed;
    ns_buf_fini(&json);
}

/* ---- LZ4 -------------------------------------------------------------- */

/* Adds the bytes as one frame with their size and a checksum. */
static void
add_lz4(struct ns_pg_array *array, const char *bytes, size_t length)
{
    LZ4F_preferences_t preferences = {
        .frameInfo = { .contentChecksumFlag = LZ4F_contentChecksumEnabled,
                       .contentSize = length },
    };
    size_t bound = LZ4F_compressFrameBound(length, &preferences), n;
    char *frame = malloc(bound);

    n = frame ? LZ4F_compressFrame(frame, bound, bytes, length, &preferences)
              : 0;
    if (!frame || LZ4F_isError(n))
        array->buf.failed = true;
    else
        ns_pg_add_bytes(array, frame, n);
    free(frame);
}

/* ---- claim ------------------------------------------------------------ */

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
    "RETURNING job_id, fence, attempt, stalls, mode, seed";

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
    " j.state "
    "FROM unnest($1, $2) AS x (id, sha)"
    " JOIN nightshift.job j ON j.job_id = x.id";

/* Adds final rows `r` (batch, status, tokens) to their batches. `ended` has
 * those that this statement has made whole: exactly one does, because the row
 * of the batch is locked and only grows. */
#define COUNT_BATCHES                                                        \
    "t AS (SELECT batch, count(*) FILTER (WHERE status = 'ok') AS ok,"       \
    "  count(*) FILTER (WHERE status <> 'ok') AS failed,"                    \
    "  coalesce(sum(tokens), 0)::bigint AS tokens"                           \
    " FROM r WHERE batch IS NOT NULL GROUP BY batch ORDER BY batch),"        \
    "u AS (INSERT INTO nightshift.batch AS b (batch, ok, failed, tokens,"    \
    "   last_at) SELECT batch, ok, failed, tokens, clock_timestamp() FROM t" \
    " ON CONFLICT (batch) DO UPDATE SET ok = b.ok + excluded.ok,"            \
    "  failed = b.failed + excluded.failed,"                                 \
    "  tokens = b.tokens + excluded.tokens, last_at = excluded.last_at,"     \
    "  ended_at = CASE WHEN b.ok + b.failed + excluded.ok + excluded.failed" \
    "   >= b.expected THEN coalesce(b.ended_at, clock_timestamp()) END"      \
    " RETURNING b.batch, b.expected, b.ok, b.failed),"                       \
    "ended AS (SELECT u.batch, u.ok, u.failed FROM u JOIN t USING (batch)"   \
    " WHERE u.ok + u.failed >= u.expected"                                   \
    "  AND u.ok + u.failed - t.ok - t.failed < u.expected) "
/* Rows of kind 0 name jobs, of kind 1 batches that have ended. */
#define REPORT(notify)                                                       \
    "SELECT 0, job_id, 0::bigint, 0::bigint,"                                \
    " CASE WHEN " notify " THEN pg_notify('nightshift_result', job_id)::text" \
    " END FROM r WHERE job_id IS NOT NULL UNION ALL "                        \
    "SELECT 1, batch, ok, failed,"                                           \
    " CASE WHEN " notify " THEN pg_notify('nightshift_batch',"               \
    "  json_build_object('batch', batch, 'ok', ok, 'failed', failed,"        \
    "   'outcome', CASE WHEN ok = 0 AND failed > 0 THEN 'all_failed'"        \
    "    WHEN failed > 0 THEN 'some_failed' ELSE 'ok' END)::text)::text"     \
    " END FROM ended"

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
    COUNT_BATCHES REPORT("$3");

/* Reads what `REPORT` says: logs batches that ended, and calls `visit` for
 * each job. */
static void
read_report(struct postgres *pg, const PGresult *report,
            void (*visit)(void *context, const char *job_id), void *context)
{
    for (int row = 0; row < PQntuples(report); row++) {
        const char *name = ns_pg_text(report, row, 1);
        int64_t ok = ns_pg_int(report, row, 2);
        int64_t failed = ns_pg_int(report, row, 3);
        char shown[160];

        if (ns_pg_int(report, row, 0) == 0) {
            if (visit)
                visit(context, name);
            continue;
        }
        ns_log_escape(name, strlen(name), shown, sizeof(shown));
        pg->batches_ended++;
        if (ok == 0 && failed > 0)
            ns_log_error("batch.ended", "batch=%s outcome=all_failed ok=0 "
                         "failed=%" PRId64, shown, failed);
        else
            ns_log_info("batch.ended", "batch=%s outcome=%s ok=%" PRId64
                        " failed=%" PRId64, shown,
                        failed ? "some_failed" : "ok", ok, failed);
    }
}

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
fill_claims(struct columns *columns, struct ns_claim *const *claims, size_t n,
            struct ns_error *err)
{
    columns_init(columns, "ttttbi8t8t");
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
        add_source(&array[9], job);
    }
    return columns_check(columns, err);
}

static void
call_claim(const struct postgres *pg, const struct columns *columns,
           struct ns_pg_call *call)
{
    columns_call(columns, claim_sql, call);
    ns_pg_call_text(call, pg->owner);
    ns_pg_call_int(call, (int64_t)pg->known_fence);
    ns_pg_call_int(call, pg->lease_ms);
    ns_pg_call_int(call, LIMIT);
}

static void
read_claims(struct postgres *pg, const PGresult *answer,
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
        if (claim->fence > pg->known_fence)
            pg->known_fence = claim->fence;
    }
}

/* Claims one by one, after a claim of all was refused for one's values. */
static enum ns_status
unroll_claims(struct postgres *pg, struct ns_claim *const *claims, size_t n,
              struct ns_error *err)
{
    enum ns_status status = NS_OK;

    pg->unrolled++;
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        struct ns_pg_call call;
        struct columns columns;

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
        columns_fini(&columns);
    }
    return status;
}

static void
set_final(void *context, const char *job_id)
{
    struct ns_claim *claim = context;

    if (strcmp(claim->job->id, job_id) == 0)
        claim->outcome = NS_CLAIM_FINAL;
}

static enum ns_status
give_up(struct postgres *pg, struct ns_claim *claim, struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;

    set_wait(claim, SOON_MS); /* someone may have been faster */
    columns_init(&columns, "t");
    ns_pg_add_text(&columns.array[0], claim->job->id);
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, give_up_sql, &call);
        ns_pg_call_int(&call, LIMIT);
        ns_pg_call_bool(&call, pg->link.options.notify);
        status = ns_pg_ask(&pg->link, &call, err);
        if (status == NS_OK)
            read_report(pg, call.result, set_final, claim);
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
    return status;
}

/* What a claim that got no row means, from what stands there now. */
static enum ns_status
judge(struct postgres *pg, const PGresult *answer, int row,
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

static enum ns_status
ask_why(struct postgres *pg, struct ns_claim *const *claims, size_t n,
        struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;
    size_t n_open = 0;

    for (size_t i = 0; i < n; i++)
        n_open += claims[i]->outcome == 0;
    if (n_open == 0)
        return NS_OK;
    columns_init(&columns, "tb");
    for (size_t i = 0; i < n; i++)
        if (claims[i]->outcome == 0) {
            ns_pg_add_text(&columns.array[0], claims[i]->job->id);
            ns_pg_add_bytes(&columns.array[1], claims[i]->job->sha256,
                            sizeof(claims[i]->job->sha256));
        }
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, why_sql, &call);
        ns_pg_call_int(&call, LIMIT);
        status = ns_pg_ask(&pg->link, &call, err);
        for (int row = 0; status == NS_OK && row < PQntuples(call.result);
             row++) {
            struct ns_claim *claim = claim_of(claims, n,
                                              ns_pg_text(call.result, row, 0));

            if (claim && claim->outcome == 0)
                status = judge(pg, call.result, row, claim, err);
        }
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
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
        return no_memory(err);
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
take_blocks(struct postgres *pg, const PGresult *answer,
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
read_blocks(struct postgres *pg, struct ns_claim *const *claims, size_t n,
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
        status = no_memory(err);
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
claim_all(struct postgres *pg, struct ns_claim *const *claims, size_t n,
          struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;

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
    columns_fini(&columns);
    if (status == NS_OK)
        status = ask_why(pg, claims, n, err);
    if (status == NS_OK)
        status = read_blocks(pg, claims, n, err);
    return status;
}

static enum ns_status
postgres_claim(struct ns_store *store, struct ns_claim *claims, size_t n,
               struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    struct ns_claim **first = calloc(n ? n : 1, sizeof(struct ns_claim *));
    enum ns_status status = NS_OK;
    uint64_t known = pg->known_fence;
    size_t n_first = 0;

    if (!first)
        return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        claims[i].outcome = 0;
        claims[i].tokens = NULL;
        claims[i].block_tokens = NULL;
        claims[i].n_tokens = claims[i].n_blocks = 0;
        claims[i].resumed_across = false;
        if (is_second(claims, i))
            set_wait(&claims[i], 1000);
        else
            first[n_first++] = &claims[i];
    }
    if (n_first > 0)
        status = claim_all(pg, first, n_first, err);
    /* The caller hears of none of these claims, and will ask again: their
     * numbers are as good as not known. */
    if (status != NS_OK)
        pg->known_fence = known;
    free(first);
    return status;
}

/* ---- while it runs ---------------------------------------------------- */

/* Locked in the order of their ids, as everywhere: no deadlocks. */
static const char heartbeat_sql[] =
    "WITH l AS (SELECT j.job_id FROM nightshift.job j"
    "  JOIN unnest($1, $2) AS x (id, fence)"
    "   ON j.job_id = x.id AND j.fence = x.fence"
    "  WHERE j.state = 'running' ORDER BY j.job_id FOR NO KEY UPDATE OF j) "
    "UPDATE nightshift.job j SET"
    " lease_until = clock_timestamp() + $3 * interval '1 ms' "
    "FROM l WHERE j.job_id = l.job_id "
    "RETURNING j.job_id, j.fence, j.cancel_requested";

static enum ns_status
postgres_heartbeat(struct ns_store *store, struct ns_heartbeat *beats,
                   size_t n, struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;

    if (n == 0)
        return NS_OK;
    columns_init(&columns, "t8");
    for (size_t i = 0; i < n; i++) {
        ns_pg_add_text(&columns.array[0], beats[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)beats[i].fence);
        beats[i].outcome = NS_STORE_FENCED;
        beats[i].cancel = false;
    }
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, heartbeat_sql, &call);
        ns_pg_call_int(&call, pg->lease_ms);
        status = ns_pg_ask(&pg->link, &call, err);
        for (int row = 0; status == NS_OK && row < PQntuples(call.result);
             row++)
            for (size_t i = 0; i < n; i++)
                if ((uint64_t)ns_pg_int(call.result, row, 1) ==
                        beats[i].fence &&
                    strcmp(ns_pg_text(call.result, row, 0),
                           beats[i].job->id) == 0) {
                    beats[i].outcome = NS_STORE_DONE;
                    beats[i].cancel = ns_pg_bool(call.result, row, 2);
                }
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
    return status;
}

/* FOR SHARE, since a takeover changes no key: KEY SHARE would let a block of
 * the former holder in after the new one has read them. */
static const char checkpoint_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5)"
    "  AS x (id, fence, block, tokens, hash)),"
    "l AS (SELECT j.job_id, j.fence FROM nightshift.job j"
    "  WHERE (j.job_id, j.fence) IN (SELECT id, fence FROM x)"
    "   AND j.state = 'running' ORDER BY j.job_id FOR SHARE OF j),"
    "i AS (INSERT INTO nightshift.block (job_id, block_no, model_rev,"
    "   engine_rev, tokens, hash)"
    "  SELECT x.id, x.block, $6, $7, x.tokens, x.hash FROM x"
    "  JOIN l ON l.job_id = x.id AND l.fence = x.fence"
    "  ORDER BY x.id, x.block ON CONFLICT DO NOTHING) "
    "SELECT job_id, fence FROM l";

static enum ns_status
postgres_checkpoint(struct ns_store *store, struct ns_checkpoint *points,
                    size_t n, struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;

    if (n == 0)
        return NS_OK;
    columns_init(&columns, "t8ib8");
    for (size_t i = 0; i < n; i++) {
        size_t bytes = points[i].n_tokens * sizeof(int32_t);

        ns_pg_add_text(&columns.array[0], points[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)points[i].fence);
        ns_pg_add_int(&columns.array[2], points[i].block);
        ns_pg_add_bytes(&columns.array[3],
                        bytes ? (const void *)points[i].tokens : "", bytes);
        ns_pg_add_int(&columns.array[4],
                      (int64_t)XXH3_64bits(points[i].tokens, bytes));
        points[i].outcome = NS_STORE_FENCED;
    }
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, checkpoint_sql, &call);
        ns_pg_call_text(&call, pg->model_rev);
        ns_pg_call_text(&call, pg->engine_rev);
        status = ns_pg_ask(&pg->link, &call, err);
        for (int row = 0; status == NS_OK && row < PQntuples(call.result);
             row++)
            for (size_t i = 0; i < n; i++)
                if ((uint64_t)ns_pg_int(call.result, row, 1) ==
                        points[i].fence &&
                    strcmp(ns_pg_text(call.result, row, 0),
                           points[i].job->id) == 0)
                    points[i].outcome = NS_STORE_DONE;
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
    return status;
}

/* ---- the end ---------------------------------------------------------- */

/* State, row and blocks in one statement: whole or not at all. */
static const char finish_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
    "  $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,"
    "  $25, $26, $27) AS x (id, fence, status, content, reasoning, tool_calls,"
    "  response, finish_reason, code, param, message, mode, seed, blocks,"
    "  passes, steps, prompt_tokens, cached_tokens, completion_tokens,"
    "  reasoning_tokens, queued_ms, run_ms, model_rev, engine_rev, warnings,"
    "  sanitised, trace)),"
    "l AS (SELECT j.job_id FROM nightshift.job j JOIN x ON j.job_id = x.id"
    "   AND j.fence = x.fence WHERE j.state = 'running'"
    "  ORDER BY j.job_id FOR NO KEY UPDATE OF j),"
    "f AS (UPDATE nightshift.job j SET"
    "  state = CASE x.status WHEN 'ok' THEN 'done' ELSE x.status END,"
    "  finished_at = clock_timestamp(), owner = NULL, lease_until = NULL,"
    "  error_code = x.code FROM x, l WHERE j.job_id = x.id"
    "   AND l.job_id = x.id AND j.fence = x.fence AND j.state = 'running'"
    "  RETURNING j.job_id, j.batch, j.custom_id, j.tenant, j.body_sha256),"
    "d AS (DELETE FROM nightshift.block b USING f WHERE b.job_id = f.job_id),"
    "r AS (INSERT INTO nightshift.result (job_id, batch, custom_id, tenant,"
    "   fence, status, content, reasoning, tool_calls, response_lz4,"
    "   finish_reason, error_code, error_param, error_message, mode, seed,"
    "   blocks, passes, denoise_steps, prompt_tokens, cached_tokens,"
    "   completion_tokens, reasoning_tokens, queued_ms, run_ms, input_sha256,"
    "   model_rev, engine_rev, warnings, sanitised, trace_parent)"
    "  SELECT f.job_id, f.batch, f.custom_id, f.tenant, x.fence, x.status,"
    "   x.content, x.reasoning, x.tool_calls, x.response, x.finish_reason,"
    "   x.code, x.param, x.message, x.mode, x.seed, x.blocks, x.passes,"
    "   x.steps, x.prompt_tokens, x.cached_tokens, x.completion_tokens,"
    "   x.reasoning_tokens, x.queued_ms, x.run_ms, f.body_sha256,"
    "   x.model_rev, x.engine_rev, x.warnings::jsonb, x.sanitised,"
    "   x.trace FROM f JOIN x ON x.id = f.job_id"
    "  RETURNING job_id, batch, status, completion_tokens AS tokens),"
    COUNT_BATCHES REPORT("$28");

static const char resolve_sql[] =
    "SELECT r.job_id, r.fence FROM nightshift.result r"
    " JOIN unnest($1, $2) AS x (id, fence)"
    "  ON r.job_id = x.id AND r.fence = x.fence";

/* Adds readable text, or NULL where there is none or too much. */
static uint32_t
add_readable(struct ns_pg_array *array, const char *text, size_t length)
{
    uint32_t replaced = 0;
    struct ns_buf plain;

    if (!text || length > PLAIN_BYTES) {
        ns_pg_add_null(array);
        return 0;
    }
    ns_buf_init(&plain, 3 * (size_t)PLAIN_BYTES + 1);
    replaced = ns_result_plain(&plain, text, length);
    ns_pg_add_bytes(array, plain.data ? plain.data : "", plain.length);
    array->buf.failed |= plain.failed;
    ns_buf_fini(&plain);
    return replaced;
}

static void
add_c_text(struct ns_pg_array *array, const char *text)
{
    if (text && *text)
        (void)add_readable(array, text, strlen(text));
    else
        ns_pg_add_null(array);
}

/* How much of a result is sent: the columns for people are left out when the
 * server would not have them, which is a bug of ours, and the exact line of
 * the answer still stands. */
enum measure { WHOLE, LINE_ONLY };

static void
add_answer(struct columns *columns, const struct ns_finished *end,
           enum measure measure, uint32_t *sanitised)
{
    const struct ns_result *result = end->result;
    struct ns_pg_array *array = columns->array;

    *sanitised = 0;
    if (measure == LINE_ONLY) {
        for (int i = 3; i < 6; i++)
            ns_pg_add_null(&array[i]);
        return;
    }
    *sanitised += add_readable(&array[3], result->content,
                               result->content_length);
    *sanitised += add_readable(&array[4], result->reasoning,
                               result->reasoning_length);
    if (result->tool_calls) {
        char *json = json_dumps(result->tool_calls, JSON_COMPACT);

        if (json)
            add_c_text(&array[5], json);
        else
            array[5].buf.failed = true;
        free(json);
    } else {
        ns_pg_add_null(&array[5]);
    }
}

static void
add_figures(struct columns *columns, const struct ns_result *result)
{
    struct ns_pg_array *array = columns->array;

    ns_pg_add_int(&array[12], (int64_t)result->seed);
    ns_pg_add_int(&array[13], result->blocks);
    ns_pg_add_int(&array[14], result->passes);
    ns_pg_add_int(&array[15], result->denoise_steps);
    ns_pg_add_int(&array[16], result->prompt_tokens);
    ns_pg_add_int(&array[17], result->cached_tokens);
    ns_pg_add_int(&array[18], result->completion_tokens);
    ns_pg_add_int(&array[19], result->reasoning_tokens);
    ns_pg_add_int(&array[20], result->queued_ms);
    ns_pg_add_int(&array[21], result->run_ms);
}

static void
add_result(struct columns *columns, const struct ns_finished *end,
           enum measure measure, const struct ns_buf *line)
{
    const struct ns_result *result = end->result;
    struct ns_pg_array *array = columns->array;
    bool bad = result->status != NS_RESULT_OK;
    uint32_t sanitised;

    ns_pg_add_text(&array[0], end->job->id);
    ns_pg_add_int(&array[1], (int64_t)end->fence);
    ns_pg_add_text(&array[2], ns_result_status_name(result->status));
    add_answer(columns, end, measure, &sanitised);
    add_lz4(&array[6], line->data, line->length);
    add_c_text(&array[7], bad ? NULL : result->finish_reason);
    add_c_text(&array[8], !bad                 ? NULL
                          : result->error.code ? result->error.code
                                               : "internal");
    add_c_text(&array[9], bad ? result->error.param : NULL);
    add_c_text(&array[10], bad ? result->error.text : NULL);
    ns_pg_add_text(&array[11], ns_job_mode_name(result->mode));
    add_figures(columns, result);
    add_c_text(&array[22], result->model_rev);
    add_c_text(&array[23], result->engine_rev);
    add_warnings(&array[24], end->job);
    ns_pg_add_int(&array[25], sanitised);
    add_c_text(&array[26], end->job->trace_parent);
}

/* The line; of a result too large to be said, one that says so. */
static enum ns_status
say_line(struct ns_finished *end, struct ns_result *error,
         struct ns_buf *line, struct ns_error *err)
{
    enum ns_status status = ns_result_line(end->job, end->result, line, err);

    if (status != NS_REJECT)
        return status;
    err->code = "result_too_large";
    *error = ns_result_of_error(NS_RESULT_FAILED, err);
    end->result = error;
    ns_buf_reset(line);
    return ns_result_line(end->job, error, line, err);
}

struct ends {
    struct ns_finished *ends;
    size_t n;
};

static void
set_done(void *context, const char *job_id)
{
    struct ends *ends = context;

    for (size_t i = 0; i < ends->n; i++)
        if (strcmp(ends->ends[i].job->id, job_id) == 0)
            ends->ends[i].outcome = NS_STORE_DONE;
}

/* Fills the columns from `ends`, as many as fit a statement: `*taken`. */
static enum ns_status
fill_finish(struct columns *columns, const struct ns_finished *ends, size_t n,
            enum measure measure, size_t *taken, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct ns_buf line;
    size_t bytes = 0;

    columns_init(columns, "t8tttt" "bttttt8" "iiiiiii88" "tttit");
    ns_buf_init(&line, max_line);
    *taken = 0;
    while (*taken < n && (*taken == 0 || bytes < CHUNK_BYTES) &&
           status == NS_OK) {
        struct ns_finished end = ends[*taken];
        struct ns_result error;

        ns_buf_reset(&line);
        status = say_line(&end, &error, &line, err);
        if (status == NS_OK)
            add_result(columns, &end, measure, &line);
        bytes += line.length;
        (*taken)++;
    }
    ns_buf_fini(&line);
    return status == NS_OK ? columns_check(columns, err) : status;
}

static enum ns_status
send_finish(struct postgres *pg, struct ns_finished *ends, size_t n,
            enum measure measure, size_t *taken, struct ns_pg_call *call,
            struct ns_error *err)
{
    struct ends context = { ends, 0 };
    enum ns_status status;
    struct columns columns;

    memset(call, 0, sizeof(*call));
    status = fill_finish(&columns, ends, n, measure, taken, err);
    context.n = *taken;
    if (status == NS_OK) {
        columns_call(&columns, finish_sql, call);
        ns_pg_call_bool(call, pg->link.options.notify);
        status = ns_pg_run(&pg->link, call, 1, err);
    }
    if (status == NS_OK && call->result)
        read_report(pg, call->result, set_done, &context);
    columns_fini(&columns);
    return status;
}

/* One result that the server refuses: without the readable columns, and if
 * even so it does not go in, as a failure that says why. */
static enum ns_status
force_finish(struct postgres *pg, struct ns_finished *end,
             const struct ns_pg_call *why, struct ns_error *err)
{
    struct ns_error reason;
    struct ns_pg_call call;
    struct ns_result error;
    struct ns_finished plain = *end;
    enum ns_status status;
    size_t taken;

    pg->unstorable++;
    ns_log_error("result.unstorable", "state=%s error=\"%s\"", why->state,
                 why->text);
    status = send_finish(pg, end, 1, LINE_ONLY, &taken, &call, err);
    ns_refuse(&reason, "unstorable", NULL, "the database refuses it: %s %s",
              why->state, why->text);
    if (status == NS_OK && !call.result) {
        ns_pg_call_fini(&call);
        error = ns_result_of_error(NS_RESULT_FAILED, &reason);
        plain.result = &error;
        status = send_finish(pg, &plain, 1, LINE_ONLY, &taken, &call, err);
        end->outcome = plain.outcome;
        if (status == NS_OK && !call.result)
            status = ns_fail(err, NS_FATAL, "postgres: %s %s", call.state,
                             call.text);
    }
    ns_pg_call_fini(&call);
    return status;
}

static enum ns_status
unroll_finish(struct postgres *pg, struct ns_finished *ends, size_t n,
              struct ns_error *err)
{
    enum ns_status status = NS_OK;
    size_t taken;

    pg->unrolled++;
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        struct ns_pg_call call;

        status = send_finish(pg, &ends[i], 1, WHOLE, &taken, &call, err);
        if (status == NS_OK && !call.result)
            status = force_finish(pg, &ends[i], &call, err);
        ns_pg_call_fini(&call);
    }
    return status;
}

/* Those without a row of this statement: stored by an earlier one whose answer
 * was lost, or no longer ours. */
static enum ns_status
resolve(struct postgres *pg, struct ns_finished *ends, size_t n,
        struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;
    size_t n_open = 0;

    for (size_t i = 0; i < n; i++)
        n_open += ends[i].outcome == NS_STORE_FENCED;
    if (n_open == 0)
        return NS_OK;
    columns_init(&columns, "t8");
    for (size_t i = 0; i < n; i++)
        if (ends[i].outcome == NS_STORE_FENCED) {
            ns_pg_add_text(&columns.array[0], ends[i].job->id);
            ns_pg_add_int(&columns.array[1], (int64_t)ends[i].fence);
        }
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, resolve_sql, &call);
        status = ns_pg_ask(&pg->link, &call, err);
        for (int row = 0; status == NS_OK && row < PQntuples(call.result);
             row++)
            for (size_t i = 0; i < n; i++)
                if (ends[i].outcome == NS_STORE_FENCED &&
                    (uint64_t)ns_pg_int(call.result, row, 1) ==
                        ends[i].fence &&
                    strcmp(ns_pg_text(call.result, row, 0),
                           ends[i].job->id) == 0) {
                    ends[i].outcome = NS_STORE_DONE;
                    pg->resolved++;
                }
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
    return status;
}

static void
count_sanitised(struct postgres *pg, const struct ns_finished *ends, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct ns_result *result = ends[i].result;

        if (ends[i].outcome == NS_STORE_DONE &&
            ((result->content &&
              (memchr(result->content, 0, result->content_length) ||
               ns_utf8_span(result->content, result->content_length) <
                   result->content_length)) ||
             (result->reasoning &&
              (memchr(result->reasoning, 0, result->reasoning_length) ||
               ns_utf8_span(result->reasoning, result->reasoning_length) <
                   result->reasoning_length))))
            pg->sanitised++;
    }
}

static enum ns_status
postgres_finish(struct ns_store *store, struct ns_finished *ends, size_t n,
                struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    enum ns_status status = NS_OK;
    size_t taken;

    for (size_t i = 0; i < n; i++)
        ends[i].outcome = NS_STORE_FENCED; /* until a row says else */
    for (size_t at = 0; at < n && status == NS_OK; at += taken) {
        struct ns_pg_call call;

        status = send_finish(pg, ends + at, n - at, WHOLE, &taken, &call, err);
        if (status == NS_OK && !call.result)
            status = unroll_finish(pg, ends + at, taken, err);
        ns_pg_call_fini(&call);
    }
    if (status == NS_OK)
        status = resolve(pg, ends, n, err);
    if (status == NS_OK)
        count_sanitised(pg, ends, n);
    return status;
}

/* A dead letter; and if its id is usable and nobody had it, a job that is dead
 * with a result that says why, so that the sender finds an answer by the id.
 * A batch counts a letter once: by its job, or by itself if it has none. */
static const char refuse_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
    "  $11, $12, $13, $14, $15) AS x (key, id, batch, custom_id, tenant, sha,"
    "  code, param, message, payload, bytes, source, response, warnings,"
    "  headers)),"
    "d AS (INSERT INTO nightshift.dead_letter (source_key, job_id, batch,"
    "   tenant, reason, param, detail, headers, payload_lz4, payload_bytes,"
    "   payload_sha256)"
    "  SELECT key, id, batch, tenant, code, param, message, headers::jsonb,"
    "   payload, bytes, sha FROM x ORDER BY key ON CONFLICT DO NOTHING RETURNING source_key),"
    "o AS (SELECT DISTINCT ON (id) * FROM x WHERE id IS NOT NULL"
    "  ORDER BY id, key),"
    "j AS (INSERT INTO nightshift.job (job_id, batch, custom_id, tenant,"
    "   body_sha256, state, fence, source, error_code, finished_at)"
    "  SELECT id, batch, custom_id, tenant, sha, 'dead',"
    "   nextval('nightshift.fence_seq'), source::jsonb, code,"
    "   clock_timestamp() FROM o ORDER BY id ON CONFLICT DO NOTHING"
    "  RETURNING job_id, fence),"
    "a AS (INSERT INTO nightshift.result (job_id, batch, custom_id, tenant,"
    "   fence, status, error_code, error_param, error_message, response_lz4,"
    "   input_sha256, warnings)"
    "  SELECT o.id, o.batch, o.custom_id, o.tenant, j.fence, 'dead', o.code,"
    "   o.param, o.message, o.response, o.sha, o.warnings::jsonb"
    "  FROM j JOIN o ON o.id = j.job_id RETURNING job_id),"
    "r AS (SELECT a.job_id, x.batch, 'dead' AS status, 0 AS tokens"
    "  FROM d JOIN x ON x.key = d.source_key"
    "  LEFT JOIN a ON a.job_id = x.id"
    "  LEFT JOIN nightshift.job p ON p.job_id = x.id"
    "  WHERE p.job_id IS NULL OR p.body_sha256 <> x.sha),"
    COUNT_BATCHES REPORT("$16");

static bool
has_usable_id(const struct ns_job *job, const struct ns_error *error)
{
    return job->id && *job->id && strlen(job->id) <= 301 &&
           !(error->code && (strcmp(error->code, "bad_id") == 0 ||
                             strcmp(error->code, "unstorable") == 0));
}

static enum ns_status
fill_refusal(struct columns *columns, const struct ns_refusal *refusal,
             struct ns_error *err)
{
    const struct ns_job *job = refusal->job;
    const struct ns_error *error = &refusal->error;
    bool usable = has_usable_id(job, error);
    struct ns_result result = ns_result_of_error(NS_RESULT_DEAD, error);
    struct ns_pg_array *array = columns->array;
    enum ns_status status;
    struct ns_buf key, line;

    ns_buf_init(&key, 64 << 10);
    ns_buf_init(&line, max_line);
    ns_result_plain(&key, job->origin ? job->origin : "",
                    job->origin ? strlen(job->origin) : 0);
    ns_buf_printf(&key, ":%" PRIu64 "@", job->position.offset);
    for (int i = 0; i < 8; i++)
        ns_buf_printf(&key, "%02x", job->sha256[i]);
    ns_pg_add_bytes(&array[0], key.data, key.length);
    array[0].buf.failed |= key.failed;
    ns_pg_add_text(&array[1], usable ? job->id : NULL);
    add_c_text(&array[2], job->batch);
    ns_pg_add_text(&array[3], usable ? job->custom_id : NULL);
    ns_pg_add_text(&array[4], job->tenant ? job->tenant : "default");
    ns_pg_add_bytes(&array[5], job->sha256, sizeof(job->sha256));
    ns_pg_add_text(&array[6], error->code ? error->code : "internal");
    add_c_text(&array[7], error->param);
    add_c_text(&array[8], error->text);
    if (refusal->payload)
        add_lz4(&array[9], refusal->payload, refusal->payload_length);
    else
        ns_pg_add_null(&array[9]);
    ns_pg_add_int(&array[10], (int64_t)job->length);
    add_source(&array[11], job);
    status = ns_result_line(job, &result, &line, err);
    if (status == NS_OK)
        add_lz4(&array[12], line.data, line.length);
    else
        ns_pg_add_null(&array[12]);
    add_warnings(&array[13], job);
    ns_pg_add_text(&array[14], job->headers);
    ns_buf_fini(&line);
    ns_buf_fini(&key);
    return status == NS_FATAL ? status : NS_OK;
}

/* A tombstone that cancels is no refusal: it asks for something. */
static bool
is_cancel(const struct ns_refusal *refusal)
{
    return refusal->error.code && strcmp(refusal->error.code, "cancel") == 0 &&
           refusal->job->id;
}

static const char cancel_sql[] = "SELECT nightshift.cancel($1, $2)";

static enum ns_status
cancel(struct postgres *pg, const struct ns_job *job, struct ns_error *err)
{
    struct ns_pg_call call = { .sql = cancel_sql };
    enum ns_status status;

    ns_pg_call_text(&call, job->id);
    ns_pg_call_text(&call, job->batch);
    status = ns_pg_run(&pg->link, &call, 1, err);
    if (status == NS_OK && !call.result)
        pg->unstorable++;
    ns_pg_call_fini(&call);
    return status;
}

static enum ns_status
send_refusals(struct postgres *pg, const struct ns_refusal *refusals, size_t n,
              struct ns_pg_call *call, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct columns columns;

    memset(call, 0, sizeof(*call));
    columns_init(&columns, "tttttbtttb8tbtt");
    for (size_t i = 0; i < n && status == NS_OK; i++)
        if (!is_cancel(&refusals[i]))
            status = fill_refusal(&columns, &refusals[i], err);
    if (status == NS_OK)
        status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, refuse_sql, call);
        ns_pg_call_bool(call, pg->link.options.notify);
        status = ns_pg_run(&pg->link, call, 1, err);
    }
    if (status == NS_OK && call->result)
        read_report(pg, call->result, NULL, NULL);
    columns_fini(&columns);
    return status;
}

/* One that the server refuses becomes a letter by its place alone. */
static enum ns_status
force_refusal(struct postgres *pg, const struct ns_refusal *refusal,
              struct ns_error *err)
{
    struct ns_refusal bare = *refusal;
    struct ns_job job = *refusal->job;
    struct ns_pg_call call;
    enum ns_status status;

    pg->unstorable++;
    job.id = job.custom_id = job.batch = job.tenant = job.headers = NULL;
    job.n_warnings = 0;
    bare.job = &job;
    bare.error.param[0] = '\0';
    status = send_refusals(pg, &bare, 1, &call, err);
    if (status == NS_OK && !call.result)
        status = ns_fail(err, NS_FATAL, "postgres: %s %s", call.state,
                         call.text);
    ns_pg_call_fini(&call);
    return status;
}

static enum ns_status
postgres_refuse(struct ns_store *store, struct ns_refusal *refusals, size_t n,
                struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    enum ns_status status = NS_OK;
    size_t taken, bytes;

    for (size_t at = 0; at < n && status == NS_OK; at += taken) {
        struct ns_pg_call call;

        for (taken = 0, bytes = 0; at + taken < n && bytes < CHUNK_BYTES;
             taken++)
            bytes += refusals[at + taken].payload_length;
        status = send_refusals(pg, refusals + at, taken, &call, err);
        if (status == NS_OK && !call.result) {
            pg->unrolled++;
            for (size_t i = at; i < at + taken && status == NS_OK; i++) {
                ns_pg_call_fini(&call);
                status = send_refusals(pg, &refusals[i], 1, &call, err);
                if (status == NS_OK && !call.result)
                    status = force_refusal(pg, &refusals[i], err);
            }
        }
        ns_pg_call_fini(&call);
    }
    for (size_t i = 0; i < n && status == NS_OK; i++) {
        if (is_cancel(&refusals[i]))
            status = cancel(pg, refusals[i].job, err);
        refusals[i].outcome = NS_STORE_DONE;
    }
    return status;
}

/* `given` are those given back now, `before` those by a call whose answer was
 * lost: the number is still ours, and only a claim would change it. */
static const char retry_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5)"
    "  AS x (id, fence, delay, code, own)),"
    "l AS (SELECT j.job_id, j.state FROM nightshift.job j JOIN x"
    "   ON j.job_id = x.id AND j.fence = x.fence"
    "  WHERE j.state IN ('running', 'retry') ORDER BY j.job_id"
    "  FOR NO KEY UPDATE OF j),"
    "u AS (UPDATE nightshift.job j SET state = 'retry', owner = NULL,"
    "  lease_until = NULL,"
    "  not_before = clock_timestamp() + x.delay * interval '1 ms',"
    "  error_code = x.code, retries = j.retries + x.own"
    "  FROM x, l WHERE j.job_id = x.id AND l.job_id = x.id"
    "   AND j.fence = x.fence AND j.state = 'running') "
    "SELECT job_id FROM l";

static enum ns_status
postgres_retry(struct ns_store *store, struct ns_give_back *backs, size_t n,
               struct ns_error *err)
{
    struct postgres *pg = of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct columns columns;

    if (n == 0)
        return NS_OK;
    columns_init(&columns, "t88ti");
    for (size_t i = 0; i < n; i++) {
        ns_pg_add_text(&columns.array[0], backs[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)backs[i].fence);
        ns_pg_add_int(&columns.array[2], backs[i].delay_ms);
        ns_pg_add_text(&columns.array[3], backs[i].code);
        ns_pg_add_int(&columns.array[4], backs[i].own_fault);
        backs[i].outcome = NS_STORE_FENCED;
    }
    status = columns_check(&columns, err);
    if (status == NS_OK) {
        columns_call(&columns, retry_sql, &call);
        status = ns_pg_ask(&pg->link, &call, err);
        for (int row = 0; status == NS_OK && row < PQntuples(call.result);
             row++)
            for (size_t i = 0; i < n; i++)
                if (strcmp(ns_pg_text(call.result, row, 0),
                           backs[i].job->id) == 0)
                    backs[i].outcome = NS_STORE_DONE;
        ns_pg_call_fini(&call);
    }
    columns_fini(&columns);
    return status;
}

/* ---- open and close --------------------------------------------------- */

static void
postgres_close(struct ns_store *store)
{
    struct postgres *pg = of_store(store);

    if (!pg)
        return;
    ns_pg_link_fini(&pg->link);
    free(pg->model_rev);
    free(pg->engine_rev);
    free(pg);
}

static int64_t
postgres_heartbeat_ms(const struct ns_store *store)
{
    return of_store(store)->lease_ms / 3;
}

static const struct ns_store_ops ops = {
    .name = "postgres",
    .claim = postgres_claim,
    .heartbeat = postgres_heartbeat,
    .checkpoint = postgres_checkpoint,
    .finish = postgres_finish,
    .refuse = postgres_refuse,
    .retry = postgres_retry,
    .close = postgres_close,
    .heartbeat_ms = postgres_heartbeat_ms,
};

/* Unique to this start of this process, whatever is cloned or restored. */
static void
make_owner(char *out, size_t out_size)
{
    uint64_t nonce = 0;
    char host[60] = "";

    (void)gethostname(host, sizeof(host) - 1);
    if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
        nonce = (uint64_t)(uintptr_t)&nonce ^ (uint64_t)getpid() << 32;
    snprintf(out, out_size, "%s:%ld:%016" PRIx64, host, (long)getpid(), nonce);
}

enum ns_status
ns_postgres_store_open(const struct ns_postgres_options *options,
                       struct ns_store **out, struct ns_error *err)
{
    struct postgres *pg = calloc(1, sizeof(*pg));
    enum ns_status status;

    if (!pg)
        return no_memory(err);
    pg->store.ops = &ops;
    ns_pg_link_init(&pg->link, options);
    pg->lease_ms = options->lease_ms ? options->lease_ms : LEASE_MS;
    pg->model_rev = strdup(options->model_rev ? options->model_rev : "");
    pg->engine_rev = strdup(options->engine_rev ? options->engine_rev : "");
    make_owner(pg->owner, sizeof(pg->owner));
    if (!pg->model_rev || !pg->engine_rev)
        status = no_memory(err);
    else
        status = ns_pg_connect(&pg->link, err);
    if (status != NS_OK) {
        postgres_close(&pg->store);
        return status;
    }
    *out = &pg->store;
    return NS_OK;
}

struct ns_postgres_counts
ns_postgres_counts(const struct ns_store *store)
{
    const struct postgres *pg = of_store(store);

    return (struct ns_postgres_counts){
        .connects = pg->link.connects,
        .statements = pg->link.statements,
        .unrolled = pg->unrolled,
        .sanitised = pg->sanitised,
        .unstorable = pg->unstorable,
        .resolved = pg->resolved,
        .batches_ended = pg->batches_ended,
    };
}
