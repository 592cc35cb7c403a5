#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/postgres_link.h"

enum { PURGE_BATCH = 1000 };

/* What brings a schema of version `from` to the next one, in order. */
static const struct step {
    int from;
    const char *sql;
} steps[] = {
    { 0, ns_pg_schema_sql },
    { 1, ns_pg_schema_2_sql },
};

static enum ns_status
open_admin(struct ns_pg_link *link, const struct ns_postgres_options *options,
           struct ns_error *err)
{
    ns_pg_link_init(link, options);
    link->admin = true;
    return ns_pg_connect(link, err);
}

/* Scripts of many statements go without a pipeline, and without a time-out
 * but the server's: building an index may take as long as it takes. */
static enum ns_status
run_script(struct ns_pg_link *link, const char *sql, struct ns_error *err)
{
    PGresult *result;
    enum ns_status status = NS_OK;
    const char *state;

    if (PQexitPipelineMode(link->conn) != 1 ||
        PQsetnonblocking(link->conn, 0) != 0)
        return ns_fail(err, NS_FATAL, "postgres: %s",
                       PQerrorMessage(link->conn));
    result = PQexec(link->conn, sql);
    if (PQresultStatus(result) != PGRES_COMMAND_OK &&
        PQresultStatus(result) != PGRES_TUPLES_OK) {
        const char *text = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);

        state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
        status = ns_fail(err, ns_pg_classify(state) <= NS_PG_AWAY ? NS_RETRY
                                                                  : NS_REJECT,
                         "postgres: %s %s", state ? state : "",
                         text ? text : PQerrorMessage(link->conn));
        if (status == NS_REJECT)
            err->code = "postgres_setup";
        if (PQtransactionStatus(link->conn) == PQTRANS_INERROR)
            PQclear(PQexec(link->conn, "ROLLBACK"));
    }
    PQclear(result);
    if (PQsetnonblocking(link->conn, 1) != 0 ||
        PQenterPipelineMode(link->conn) != 1)
        return status == NS_OK ? ns_fail(err, NS_FATAL, "postgres: %s",
                                         PQerrorMessage(link->conn))
                               : status;
    return status;
}

/* 0: there is none. */
static enum ns_status
find_version(struct ns_pg_link *link, int *out, struct ns_error *err)
{
    struct ns_pg_call there = {
        .sql = "SELECT to_regclass('nightshift.schema_version') IS NOT NULL,"
               " to_regnamespace('nightshift') IS NOT NULL"
    };
    struct ns_pg_call version = {
        .sql = "SELECT coalesce(max(version), 0)"
               " FROM nightshift.schema_version"
    };
    enum ns_status status = ns_pg_ask(link, &there, err);

    if (status == NS_OK && !ns_pg_bool(there.result, 0, 0)) {
        if (ns_pg_bool(there.result, 0, 1))
            status = ns_refuse(err, "postgres_setup", NULL, "postgres: there "
                               "is a schema nightshift that is not ours");
        else
            *out = 0;
    } else if (status == NS_OK) {
        status = ns_pg_ask(link, &version, err);
        if (status == NS_OK)
            *out = (int)ns_pg_int(version.result, 0, 0);
    }
    ns_pg_call_fini(&version);
    ns_pg_call_fini(&there);
    return status;
}

/* Runs the steps from `from` on as one transaction. Only one at a time: the
 * second finds the table changed, or waits and fails. */
static enum ns_status
run_steps(struct ns_pg_link *link, int from, struct ns_error *err)
{
    enum ns_status status;
    struct ns_buf script;

    ns_buf_init(&script, 4 << 20);
    ns_buf_text(&script, "BEGIN;\n");
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
        if (steps[i].from >= from)
            ns_buf_text(&script, steps[i].sql);
    ns_buf_text(&script, "\nCOMMIT;\n");
    status = ns_buf_check(&script, "the schema", err);
    if (status == NS_OK)
        status = run_script(link, script.data, err);
    ns_buf_fini(&script);
    return status;
}

enum ns_status
ns_postgres_init(const struct ns_postgres_options *options,
                 struct ns_error *err)
{
    struct ns_pg_link link;
    enum ns_status status = open_admin(&link, options, err);
    int version = 0;

    if (status == NS_OK)
        status = find_version(&link, &version, err);
    if (status == NS_OK && version > 0)
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: the schema "
                           "is there already, of version %d", version);
    if (status == NS_OK)
        status = run_steps(&link, 0, err);
    ns_pg_link_fini(&link);
    return status;
}

enum ns_status
ns_postgres_migrate(const struct ns_postgres_options *options, int *from,
                    struct ns_error *err)
{
    struct ns_pg_link link;
    enum ns_status status = open_admin(&link, options, err);
    int version = 0;

    if (status == NS_OK)
        status = find_version(&link, &version, err);
    if (status == NS_OK && version == 0)
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: there is "
                           "no schema; run `nightshift db init`");
    if (status == NS_OK && version > NS_POSTGRES_SCHEMA)
        status = ns_refuse(err, "postgres_setup", NULL, "postgres: the schema "
                           "is of version %d, newer than this build's %d",
                           version, NS_POSTGRES_SCHEMA);
    if (status == NS_OK && version < NS_POSTGRES_SCHEMA)
        status = run_steps(&link, version, err);
    if (status == NS_OK)
        *from = version;
    ns_pg_link_fini(&link);
    return status;
}

/* ---- purge ------------------------------------------------------------ */

/* Jobs and results go together, a thousand at a time: short transactions, and
 * an answer that a reader sees is whole until it is gone. */
static const char purge_jobs_sql[] =
    "WITH o AS (SELECT job_id FROM nightshift.job WHERE finished_at"
    "   < clock_timestamp() - $1 * interval '1 ms' LIMIT $2),"
    "r AS (DELETE FROM nightshift.result r USING o"
    "  WHERE r.job_id = o.job_id) "
    "DELETE FROM nightshift.job j USING o WHERE j.job_id = o.job_id"
    " RETURNING 1";
static const char purge_letters_sql[] =
    "DELETE FROM nightshift.dead_letter WHERE source_key IN (SELECT"
    " source_key FROM nightshift.dead_letter WHERE created_at"
    "  < clock_timestamp() - $1 * interval '1 ms' LIMIT $2) RETURNING 1";
static const char purge_batches_sql[] =
    "DELETE FROM nightshift.batch WHERE batch IN (SELECT b.batch"
    " FROM nightshift.batch b WHERE coalesce(b.last_at, b.created_at)"
    "  < clock_timestamp() - $1 * interval '1 ms' AND NOT EXISTS (SELECT"
    "  FROM nightshift.job j WHERE j.batch = b.batch) LIMIT $2) RETURNING 1";
static const char purge_documents_sql[] =
    "DELETE FROM nightshift.document WHERE id IN (SELECT id"
    " FROM nightshift.document WHERE created_at"
    "  < clock_timestamp() - $1 * interval '1 ms' LIMIT $2) RETURNING 1";

static enum ns_status
purge_all(struct ns_pg_link *link, const char *sql, int64_t age_ms,
          uint64_t *out, struct ns_error *err)
{
    enum ns_status status;
    int n;

    do {
        struct ns_pg_call call = { .sql = sql };

        ns_pg_call_int(&call, age_ms);
        ns_pg_call_int(&call, PURGE_BATCH);
        status = ns_pg_ask(link, &call, err);
        n = status == NS_OK ? PQntuples(call.result) : 0;
        *out += (uint64_t)n;
        ns_pg_call_fini(&call);
    } while (n == PURGE_BATCH);
    return status;
}

enum ns_status
ns_postgres_purge(const struct ns_postgres_options *options, int64_t age_ms,
                  struct ns_postgres_purged *out, struct ns_error *err)
{
    struct ns_pg_link link;
    enum ns_status status;

    memset(out, 0, sizeof(*out));
    if (age_ms < NS_POSTGRES_PURGE_DAYS * INT64_C(86400000))
        return ns_fail(err, NS_REJECT, "results younger than %d days are not "
                       "purged: a message that is read again must find its "
                       "row", NS_POSTGRES_PURGE_DAYS);
    status = open_admin(&link, options, err);
    /* Whoever runs it, it can do no more than that role can. */
    if (status == NS_OK)
        status = run_script(&link, "SET ROLE nightshift_purge", err);
    if (status == NS_OK)
        status = purge_all(&link, purge_jobs_sql, age_ms, &out->jobs, err);
    if (status == NS_OK)
        status = purge_all(&link, purge_letters_sql, age_ms,
                           &out->dead_letters, err);
    if (status == NS_OK)
        status = purge_all(&link, purge_batches_sql, age_ms, &out->batches,
                           err);
    if (status == NS_OK)
        status = purge_all(&link, purge_documents_sql, age_ms,
                           &out->documents, err);
    ns_pg_link_fini(&link);
    return status;
}
