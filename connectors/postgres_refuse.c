#include <inttypes.h>
#include <string.h>

#include "connectors/postgres_private.h"

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
    "   payload, bytes, sha FROM x ORDER BY key ON CONFLICT DO NOTHING"
    "  RETURNING source_key),"
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
    NS_PG_COUNT_BATCHES NS_PG_REPORT("$16");

static bool
has_usable_id(const struct ns_job *job, const struct ns_error *error)
{
    return job->id && *job->id && strlen(job->id) <= 301 &&
           !(error->code && (strcmp(error->code, "bad_id") == 0 ||
                             strcmp(error->code, "unstorable") == 0));
}

static enum ns_status
fill_refusal(struct ns_pg_columns *columns, const struct ns_refusal *refusal,
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
    ns_buf_init(&line, NS_PG_LINE_BYTES);
    ns_result_plain(&key, job->origin ? job->origin : "",
                    job->origin ? strlen(job->origin) : 0);
    ns_buf_printf(&key, ":%" PRIu64 "@", job->position.offset);
    for (int i = 0; i < 8; i++)
        ns_buf_printf(&key, "%02x", job->sha256[i]);
    ns_pg_add_bytes(&array[0], key.data, key.length);
    array[0].buf.failed |= key.failed;
    ns_pg_add_text(&array[1], usable ? job->id : NULL);
    ns_pg_add_c_text(&array[2], job->batch);
    ns_pg_add_text(&array[3], usable ? job->custom_id : NULL);
    ns_pg_add_text(&array[4], job->tenant ? job->tenant : "default");
    ns_pg_add_bytes(&array[5], job->sha256, sizeof(job->sha256));
    ns_pg_add_text(&array[6], error->code ? error->code : "internal");
    ns_pg_add_c_text(&array[7], error->param);
    ns_pg_add_c_text(&array[8], error->text);
    if (refusal->payload)
        ns_pg_add_lz4(&array[9], refusal->payload, refusal->payload_length);
    else
        ns_pg_add_null(&array[9]);
    ns_pg_add_int(&array[10], (int64_t)job->length);
    ns_pg_add_source(&array[11], job);
    status = ns_result_line(job, &result, &line, err);
    if (status == NS_OK)
        ns_pg_add_lz4(&array[12], line.data, line.length);
    else
        ns_pg_add_null(&array[12]);
    ns_pg_add_warnings(&array[13], job);
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
cancel(struct ns_pg_store *pg, const struct ns_job *job, struct ns_error *err)
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
send_refusals(struct ns_pg_store *pg, const struct ns_refusal *refusals,
              size_t n, struct ns_pg_call *call, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    struct ns_pg_columns columns;

    memset(call, 0, sizeof(*call));
    ns_pg_columns_init(&columns, "tttttbtttb8tbtt");
    for (size_t i = 0; i < n && status == NS_OK; i++)
        if (!is_cancel(&refusals[i]))
            status = fill_refusal(&columns, &refusals[i], err);
    if (status == NS_OK)
        status = ns_pg_columns_check(&columns, err);
    if (status == NS_OK) {
        ns_pg_columns_call(&columns, refuse_sql, call);
        ns_pg_call_bool(call, pg->link.options.notify);
        status = ns_pg_run(&pg->link, call, 1, err);
    }
    if (status == NS_OK && call->result)
        ns_pg_read_report(pg, call->result, NULL, NULL);
    ns_pg_columns_fini(&columns);
    return status;
}

/* One that the server refuses becomes a letter by its place alone. */
static enum ns_status
force_refusal(struct ns_pg_store *pg, const struct ns_refusal *refusal,
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

enum ns_status
ns_pg_refuse(struct ns_store *store, struct ns_refusal *refusals, size_t n,
             struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    enum ns_status status = NS_OK;
    size_t taken, bytes;

    for (size_t at = 0; at < n && status == NS_OK; at += taken) {
        struct ns_pg_call call;

        for (taken = 0, bytes = 0; at + taken < n && bytes < NS_PG_CHUNK_BYTES;
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
