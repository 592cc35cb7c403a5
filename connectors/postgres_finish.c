#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/reader.h"
#include "connectors/postgres_private.h"

/* State, row and blocks in one statement: whole or not at all. */
static const char finish_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
    "  $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,"
    "  $25, $26, $27, $28) AS x (id, fence, status, content, reasoning, tool_calls,"
    "  response, finish_reason, code, param, message, mode, seed, blocks,"
    "  passes, steps, prompt_tokens, cached_tokens, completion_tokens,"
    "  reasoning_tokens, queued_ms, run_ms, model_rev, engine_rev, warnings,"
    "  sanitised, trace, replay_of)),"
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
    "   model_rev, engine_rev, warnings, sanitised, trace_parent,"
    "   replay_of)"
    "  SELECT f.job_id, f.batch, f.custom_id, f.tenant, x.fence, x.status,"
    "   x.content, x.reasoning, x.tool_calls, x.response, x.finish_reason,"
    "   x.code, x.param, x.message, x.mode, x.seed, x.blocks, x.passes,"
    "   x.steps, x.prompt_tokens, x.cached_tokens, x.completion_tokens,"
    "   x.reasoning_tokens, x.queued_ms, x.run_ms, f.body_sha256,"
    "   x.model_rev, x.engine_rev, x.warnings::jsonb, x.sanitised,"
    "   x.trace, x.replay_of FROM f JOIN x ON x.id = f.job_id"
    "  RETURNING job_id, batch, status, completion_tokens AS tokens),"
    NS_PG_COUNT_BATCHES NS_PG_REPORT("$29");

static const char resolve_sql[] =
    "SELECT x.i FROM nightshift.result r"
    " JOIN unnest($1, $2) WITH ORDINALITY AS x (id, fence, i)"
    "  ON r.job_id = x.id AND r.fence = x.fence";

enum measure { WHOLE, LINE_ONLY };

static void
add_answer(struct ns_pg_columns *columns, const struct ns_finished *end,
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
    *sanitised += ns_pg_add_readable(&array[3], result->content,
                               result->content_length);
    *sanitised += ns_pg_add_readable(&array[4], result->reasoning,
                               result->reasoning_length);
    if (result->tool_calls) {
        char *json = json_dumps(result->tool_calls, JSON_COMPACT);

        if (json)
            ns_pg_add_c_text(&array[5], json);
        else
            array[5].buf.failed = true;
        free(json);
    } else {
        ns_pg_add_null(&array[5]);
    }
}

static void
add_figures(struct ns_pg_columns *columns, const struct ns_result *result)
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
add_result(struct ns_pg_columns *columns, const struct ns_finished *end,
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
    ns_pg_add_lz4(&array[6], line->data, line->length);
    ns_pg_add_c_text(&array[7], bad ? NULL : result->finish_reason);
    ns_pg_add_c_text(&array[8], !bad                 ? NULL
                          : result->error.code ? result->error.code
                                               : "internal");
    ns_pg_add_c_text(&array[9], bad ? result->error.param : NULL);
    ns_pg_add_c_text(&array[10], bad ? result->error.text : NULL);
    ns_pg_add_text(&array[11], ns_job_mode_name(result->mode));
    add_figures(columns, result);
    ns_pg_add_c_text(&array[22], result->model_rev);
    ns_pg_add_c_text(&array[23], result->engine_rev);
    ns_pg_add_warnings(&array[24], end->job);
    ns_pg_add_int(&array[25], sanitised);
    ns_pg_add_c_text(&array[26], end->job->trace_parent);
    ns_pg_add_c_text(&array[27], end->job->replay_of);
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
fill_finish(struct ns_pg_columns *columns, const struct ns_finished *ends,
            size_t n, enum measure measure, size_t *taken, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct ns_buf line;
    size_t bytes = 0;

    ns_pg_columns_init(columns, "t8tttt" "bttttt8" "iiiiiii88" "tttitt");
    ns_buf_init(&line, NS_PG_LINE_BYTES);
    *taken = 0;
    while (*taken < n && (*taken == 0 || bytes < NS_PG_CHUNK_BYTES) &&
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
    return status == NS_OK ? ns_pg_columns_check(columns, err) : status;
}

static enum ns_status
send_finish(struct ns_pg_store *pg, struct ns_finished *ends, size_t n,
            enum measure measure, size_t *taken, struct ns_pg_call *call,
            struct ns_error *err)
{
    struct ends context = { ends, 0 };
    enum ns_status status;
    struct ns_pg_columns columns;

    memset(call, 0, sizeof(*call));
    status = fill_finish(&columns, ends, n, measure, taken, err);
    context.n = *taken;
    if (status == NS_OK) {
        ns_pg_columns_call(&columns, finish_sql, call);
        ns_pg_call_bool(call, pg->link.options.notify);
        status = ns_pg_run(&pg->link, call, 1, err);
    }
    if (status == NS_OK && call->result)
        ns_pg_read_report(pg, call->result, set_done, &context);
    ns_pg_columns_fini(&columns);
    return status;
}

/* One result that the server refuses: without the readable columns, and if
 * even so it does not go in, as a failure that says why. */
static enum ns_status
force_finish(struct ns_pg_store *pg, struct ns_finished *end,
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
unroll_finish(struct ns_pg_store *pg, struct ns_finished *ends, size_t n,
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
resolve(struct ns_pg_store *pg, struct ns_finished *ends, size_t n,
        struct ns_error *err)
{
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;
    size_t n_open = 0, item;

    for (size_t i = 0; i < n; i++)
        n_open += ends[i].outcome == NS_STORE_FENCED;
    if (n_open == 0)
        return NS_OK;
    ns_pg_columns_init(&columns, "t8");
    for (size_t i = 0; i < n; i++) {
        ns_pg_add_text(&columns.array[0], ends[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)ends[i].fence);
    }
    ns_pg_columns_call(&columns, resolve_sql, &call);
    status = ns_pg_columns_ask(&pg->link, &columns, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        item = ns_pg_item(call.result, row);
        if (item >= n || ends[item].outcome != NS_STORE_FENCED)
            continue;
        ends[item].outcome = NS_STORE_DONE;
        pg->resolved++;
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    return status;
}

static void
count_sanitised(struct ns_pg_store *pg, const struct ns_finished *ends,
                size_t n)
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

enum ns_status
ns_pg_finish(struct ns_store *store, struct ns_finished *ends, size_t n,
             struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
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
