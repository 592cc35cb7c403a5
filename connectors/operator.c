#include "connectors/operator.h"

#include <stdlib.h>
#include <string.h>

#include "connectors/frame.h"
#include "connectors/postgres_private.h"

enum {
    PIECE_ROWS = 200,
    PIECE_BYTES = 8 << 20, /* of compressed lines in one answer */
    PAYLOAD_BYTES = 1 << 30,
};

struct ns_operator {
    struct ns_pg_link link;
};

enum ns_status
ns_operator_create(const struct ns_postgres_options *options,
                   struct ns_operator **out, struct ns_error *err)
{
    struct ns_operator *op = calloc(1, sizeof(*op));

    if (!op)
        return ns_fail(err, NS_FATAL, "out of memory for a connection");
    ns_pg_link_init(&op->link, options);
    op->link.admin = true; /* its role stores nothing: not to be checked so */
    *out = op;
    return NS_OK;
}

void
ns_operator_destroy(struct ns_operator *op)
{
    if (!op)
        return;
    ns_pg_link_fini(&op->link);
    free(op);
}

/* --- batches ------------------------------------------------------------ */

/* What has begun and has no final row yet is a batch, too. */
static const char batches_sql[] =
    "SELECT s.batch, coalesce(s.expected, -1), s.ok, s.failed, s.running,"
    " s.waiting, s.tokens, s.outcome,"
    " coalesce(to_char(s.first_at, 'YYYY-MM-DD HH24:MI:SS'), ''),"
    " coalesce(to_char(s.last_at, 'YYYY-MM-DD HH24:MI:SS'), ''), s.done,"
    " b.cancel_requested "
    "FROM nightshift.batch b JOIN nightshift.batch_status s USING (batch) "
    "WHERE b.batch = coalesce($1, b.batch) "
    "ORDER BY coalesce(b.last_at, b.created_at) DESC, b.batch LIMIT $2";

enum ns_status
ns_operator_batches(struct ns_operator *op, const char *batch, uint32_t limit,
                    ns_batch_visitor visit, void *context,
                    struct ns_error *err)
{
    struct ns_pg_call call = { .sql = batches_sql };
    enum ns_status status;

    ns_pg_call_text(&call, batch);
    ns_pg_call_int(&call, limit);
    status = ns_pg_ask(&op->link, &call, err);
    for (int i = 0; status == NS_OK && i < PQntuples(call.result); i++) {
        const struct ns_batch_status row = {
            .batch = ns_pg_text(call.result, i, 0),
            .expected = ns_pg_int(call.result, i, 1),
            .ok = ns_pg_int(call.result, i, 2),
            .failed = ns_pg_int(call.result, i, 3),
            .running = ns_pg_int(call.result, i, 4),
            .waiting = ns_pg_int(call.result, i, 5),
            .tokens = ns_pg_int(call.result, i, 6),
            .outcome = ns_pg_text(call.result, i, 7),
            .first_at = ns_pg_text(call.result, i, 8),
            .last_at = ns_pg_text(call.result, i, 9),
            .done = ns_pg_bool(call.result, i, 10),
            .cancelled = ns_pg_bool(call.result, i, 11),
        };

        status = visit(context, &row, err);
    }
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_expect(struct ns_operator *op, const char *batch, uint64_t n_jobs,
                   bool *done, struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT nightshift.expect_batch($1, $2)",
    };
    enum ns_status status;

    ns_pg_call_text(&call, batch);
    ns_pg_call_int(&call, (int64_t)n_jobs);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK && done)
        *done = ns_pg_bool(call.result, 0, 0);
    ns_pg_call_fini(&call);
    return status;
}

/* A piece is bounded in rows and in bytes, of which the server knows the sum
 * without reading them; one row always comes. */
static const char results_sql[] =
    "SELECT r.job_id, r.status, r.response_lz4, coalesce(r.custom_id, ''),"
    " coalesce(r.error_code, 'internal'), coalesce(r.error_param, ''),"
    " coalesce(r.error_message, ''), r.input_sha256,"
    " coalesce((j.source->>'offset')::bigint, 0) "
    "FROM (SELECT *, sum(coalesce(octet_length(response_lz4), 0)) OVER"
    "   (ORDER BY job_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    "    AS before"
    "  FROM (SELECT * FROM nightshift.result WHERE batch = $1 AND job_id > $2"
    "   ORDER BY job_id LIMIT $3) p) r"
    " JOIN nightshift.job j ON j.job_id = r.job_id "
    "WHERE coalesce(r.before, 0) < $4 ORDER BY r.job_id";

/* Rows of jobs that ended outside of any daemon's hands hold no line: one is
 * made of their columns. */
static enum ns_status
make_line(const PGresult *rows, int i, const char *batch, struct ns_buf *line,
          struct ns_error *err)
{
    const char *status = ns_pg_text(rows, i, 1);
    const char *custom_id = ns_pg_text(rows, i, 3);
    size_t skip = strlen(batch) + 1;
    struct ns_job job = { .position.offset = (uint64_t)ns_pg_int(rows, i, 8) };
    struct ns_error why;
    struct ns_result result;

    job.id = ns_pg_text(rows, i, 0);
    job.custom_id = *custom_id                          ? custom_id
                    : strncmp(job.id, batch, skip - 1) == 0 &&
                              job.id[skip - 1] == '/'
                        ? job.id + skip
                        : job.id;
    if (PQgetlength(rows, i, 7) == NS_SHA256_BYTES)
        memcpy(job.sha256, PQgetvalue(rows, i, 7), NS_SHA256_BYTES);
    ns_refuse(&why, ns_pg_text(rows, i, 4), ns_pg_text(rows, i, 5), "%s",
              ns_pg_text(rows, i, 6));
    result = ns_result_of_error(strcmp(status, "dead") == 0 ? NS_RESULT_DEAD
                                : strcmp(status, "cancelled") == 0
                                    ? NS_RESULT_CANCELLED
                                : strcmp(status, "expired") == 0
                                    ? NS_RESULT_EXPIRED
                                    : NS_RESULT_FAILED,
                                &why);
    return ns_result_line(&job, &result, line, err);
}

static enum ns_status
visit_result(const PGresult *rows, int i, const char *batch,
             ns_result_visitor visit, void *context, struct ns_buf *line,
             struct ns_error *err)
{
    struct ns_batch_result result = {
        .job_id = ns_pg_text(rows, i, 0),
        .ok = strcmp(ns_pg_text(rows, i, 1), "ok") == 0,
    };
    enum ns_status status;

    ns_buf_reset(line);
    if (PQgetisnull(rows, i, 2))
        status = make_line(rows, i, batch, line, err);
    else
        status = ns_frame_unpack(PQgetvalue(rows, i, 2),
                                 (size_t)PQgetlength(rows, i, 2), line, err);
    if (status != NS_OK) {
        ns_context(err, "job %s", result.job_id);
        return status;
    }
    result.line = line->data;
    result.length = line->length;
    while (result.length > 0 && result.line[result.length - 1] == '\n')
        result.length--;
    return visit(context, &result, err);
}

static enum ns_status
count_letters(struct ns_operator *op, const char *batch, uint64_t *out,
              struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT count(*) FROM nightshift.dead_letter d WHERE d.batch ="
               " $1 AND NOT EXISTS (SELECT FROM nightshift.result r"
               " WHERE r.job_id = d.job_id)",
    };
    enum ns_status status;

    ns_pg_call_text(&call, batch);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK)
        *out = (uint64_t)ns_pg_int(call.result, 0, 0);
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_results(struct ns_operator *op, const char *batch,
                    ns_result_visitor visit, void *context,
                    uint64_t *n_letters, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    char after[512] = "";
    struct ns_buf line;
    int n;

    ns_buf_init(&line, NS_PG_LINE_BYTES);
    do {
        struct ns_pg_call call = { .sql = results_sql };

        ns_pg_call_text(&call, batch);
        ns_pg_call_text(&call, after);
        ns_pg_call_int(&call, PIECE_ROWS);
        ns_pg_call_int(&call, PIECE_BYTES);
        status = ns_pg_ask(&op->link, &call, err);
        n = status == NS_OK ? PQntuples(call.result) : 0;
        for (int i = 0; i < n && status == NS_OK; i++)
            status = visit_result(call.result, i, batch, visit, context, &line,
                                  err);
        if (n > 0)
            snprintf(after, sizeof(after), "%s",
                     ns_pg_text(call.result, n - 1, 0));
        ns_pg_call_fini(&call);
    } while (status == NS_OK && n > 0);
    ns_buf_fini(&line);
    return status == NS_OK ? count_letters(op, batch, n_letters, err) : status;
}

/* --- jobs --------------------------------------------------------------- */

enum ns_status
ns_operator_find(struct ns_operator *op, const char *name, bool *is_batch,
                 bool *is_job, struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT EXISTS (SELECT FROM nightshift.batch WHERE batch = $1)"
               " OR EXISTS (SELECT FROM nightshift.job WHERE batch = $1),"
               " EXISTS (SELECT FROM nightshift.job WHERE job_id = $1)",
    };
    enum ns_status status;

    ns_pg_call_text(&call, name);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK) {
        *is_batch = ns_pg_bool(call.result, 0, 0);
        *is_job = ns_pg_bool(call.result, 0, 1);
    }
    ns_pg_call_fini(&call);
    return status;
}

/* The batch is a part of the id: "batch/custom_id". */
enum ns_status
ns_operator_cancel_job(struct ns_operator *op, const char *job, char state[16],
                       struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT nightshift.cancel($1, CASE WHEN $1 LIKE '%/%'"
               " THEN split_part($1, '/', 1) END)",
    };
    enum ns_status status;

    ns_pg_call_text(&call, job);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK)
        snprintf(state, 16, "%s", ns_pg_text(call.result, 0, 0));
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_cancel_batch(struct ns_operator *op, const char *batch,
                         uint64_t *n, struct ns_error *err)
{
    struct ns_pg_call call = { .sql = "SELECT nightshift.cancel_batch($1)" };
    enum ns_status status;

    ns_pg_call_text(&call, batch);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK)
        *n = (uint64_t)ns_pg_int(call.result, 0, 0);
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_pause(struct ns_operator *op, const char *tenant, bool paused,
                  struct ns_error *err)
{
    struct ns_pg_call call = { .sql = "SELECT nightshift.pause($1, $2)" };
    enum ns_status status;

    ns_pg_call_text(&call, tenant);
    ns_pg_call_bool(&call, paused);
    status = ns_pg_ask(&op->link, &call, err);
    ns_pg_call_fini(&call);
    return status;
}

/* --- dead letters -------------------------------------------------------- */

static const char letters_sql[] =
    "SELECT source_key, job_id, batch, reason, param, detail,"
    " to_char(created_at, 'YYYY-MM-DD HH24:MI:SS'), payload_lz4 IS NOT NULL,"
    " payload_bytes FROM nightshift.dead_letter "
    "WHERE source_key = coalesce($1, source_key)"
    " AND batch IS NOT DISTINCT FROM coalesce($2, batch)"
    " AND reason = coalesce($3, reason) "
    "ORDER BY created_at DESC, source_key LIMIT $4";

enum ns_status
ns_operator_letters(struct ns_operator *op,
                    const struct ns_letter_filter *filter,
                    ns_letter_visitor visit, void *context,
                    struct ns_error *err)
{
    struct ns_pg_call call = { .sql = letters_sql };
    enum ns_status status;

    ns_pg_call_text(&call, filter->key);
    ns_pg_call_text(&call, filter->batch);
    ns_pg_call_text(&call, filter->reason);
    ns_pg_call_int(&call, filter->limit ? filter->limit : INT64_MAX);
    status = ns_pg_ask(&op->link, &call, err);
    for (int i = 0; status == NS_OK && i < PQntuples(call.result); i++) {
        const struct ns_letter letter = {
            .key = ns_pg_text(call.result, i, 0),
            .job_id = ns_pg_text(call.result, i, 1),
            .batch = ns_pg_text(call.result, i, 2),
            .reason = ns_pg_text(call.result, i, 3),
            .param = ns_pg_text(call.result, i, 4),
            .detail = ns_pg_text(call.result, i, 5),
            .created_at = ns_pg_text(call.result, i, 6),
            .has_payload = ns_pg_bool(call.result, i, 7),
            .payload_bytes = ns_pg_int(call.result, i, 8),
        };

        status = visit(context, &letter, err);
    }
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_payload(struct ns_operator *op, const char *key,
                    struct ns_buf *out, struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT payload_lz4 FROM nightshift.dead_letter"
               " WHERE source_key = $1",
    };
    enum ns_status status;

    ns_pg_call_text(&call, key);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK && PQntuples(call.result) == 0)
        status = ns_refuse(err, "unknown", NULL, "there is no dead letter %s",
                           key);
    else if (status == NS_OK && PQgetisnull(call.result, 0, 0))
        status = ns_refuse(err, "no_payload", NULL, "dead letter %s: the "
                           "message was not kept", key);
    else if (status == NS_OK)
        status = ns_frame_unpack(PQgetvalue(call.result, 0, 0),
                                 (size_t)PQgetlength(call.result, 0, 0), out,
                                 err);
    ns_pg_call_fini(&call);
    return status;
}

enum ns_status
ns_operator_replay_id(struct ns_operator *op, const char *job, char out[320],
                      struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT CASE WHEN EXISTS (SELECT FROM nightshift.job"
               " WHERE job_id = $1 AND finished_at IS NOT NULL)"
               " THEN nightshift.replay_id($1) ELSE $1 END",
    };
    enum ns_status status;

    ns_pg_call_text(&call, job);
    status = ns_pg_ask(&op->link, &call, err);
    if (status == NS_OK)
        snprintf(out, 320, "%s", ns_pg_text(call.result, 0, 0));
    ns_pg_call_fini(&call);
    return status;
}
