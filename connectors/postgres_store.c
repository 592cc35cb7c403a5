#include "connectors/postgres.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "connectors/postgres_private.h"

enum { LEASE_MS = 30000 };

enum ns_status
ns_pg_no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory storing results");
}

void
ns_pg_read_report(struct ns_pg_store *pg, const PGresult *report,
                  void (*visit)(void *context, const char *job_id),
                  void *context)
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
        if (ns_pg_int(report, row, 0) != 1)
            continue;
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

/* ---- while it runs ---------------------------------------------------- */

/* Locked in the order of their ids, as everywhere: no deadlocks. */
static const char heartbeat_sql[] =
    "WITH l AS (SELECT j.job_id, x.i FROM nightshift.job j"
    "  JOIN unnest($1, $2) WITH ORDINALITY AS x (id, fence, i)"
    "   ON j.job_id = x.id AND j.fence = x.fence"
    "  WHERE j.state = 'running' ORDER BY j.job_id FOR NO KEY UPDATE OF j) "
    "UPDATE nightshift.job j SET"
    " lease_until = clock_timestamp() + $3 * interval '1 ms' "
    "FROM l WHERE j.job_id = l.job_id "
    "RETURNING l.i, j.cancel_requested OR coalesce((SELECT"
    " b.cancel_requested FROM nightshift.batch b WHERE b.batch = j.batch),"
    " false)";

static enum ns_status
postgres_heartbeat(struct ns_store *store, struct ns_heartbeat *beats,
                   size_t n, struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;
    size_t item;

    if (n == 0)
        return NS_OK;
    ns_pg_columns_init(&columns, "t8");
    for (size_t i = 0; i < n; i++) {
        ns_pg_add_text(&columns.array[0], beats[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)beats[i].fence);
        beats[i].outcome = NS_STORE_FENCED;
        beats[i].cancel = false;
    }
    ns_pg_columns_call(&columns, heartbeat_sql, &call);
    ns_pg_call_int(&call, pg->lease_ms);
    status = ns_pg_columns_ask(&pg->link, &columns, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        item = ns_pg_item(call.result, row);
        if (item >= n)
            continue;
        beats[item].outcome = NS_STORE_DONE;
        beats[item].cancel = ns_pg_bool(call.result, row, 1);
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    return status;
}

/* FOR SHARE, since a takeover changes no key: KEY SHARE would let a block of
 * the former holder in after the new one has read them. */
static const char checkpoint_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY"
    "  AS x (id, fence, block, tokens, hash, i)),"
    "l AS (SELECT j.job_id, j.fence FROM nightshift.job j"
    "  WHERE (j.job_id, j.fence) IN (SELECT id, fence FROM x)"
    "   AND j.state = 'running' ORDER BY j.job_id FOR SHARE OF j),"
    "i AS (INSERT INTO nightshift.block (job_id, block_no, model_rev,"
    "   engine_rev, tokens, hash)"
    "  SELECT x.id, x.block, $6, $7, x.tokens, x.hash FROM x"
    "  JOIN l ON l.job_id = x.id AND l.fence = x.fence"
    "  ORDER BY x.id, x.block ON CONFLICT DO NOTHING) "
    "SELECT x.i FROM x JOIN l ON l.job_id = x.id AND l.fence = x.fence";

static enum ns_status
postgres_checkpoint(struct ns_store *store, struct ns_checkpoint *points,
                    size_t n, struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;
    size_t item;

    if (n == 0)
        return NS_OK;
    ns_pg_columns_init(&columns, "t8ib8");
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
    ns_pg_columns_call(&columns, checkpoint_sql, &call);
    ns_pg_call_text(&call, pg->model_rev);
    ns_pg_call_text(&call, pg->engine_rev);
    status = ns_pg_columns_ask(&pg->link, &columns, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        item = ns_pg_item(call.result, row);
        if (item < n)
            points[item].outcome = NS_STORE_DONE;
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    return status;
}

/* `given` are those given back now, `before` those by a call whose answer was
 * lost: the number is still ours, and only a claim would change it. */
static const char retry_sql[] =
    "WITH x AS (SELECT * FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY"
    "  AS x (id, fence, delay, code, own, i)),"
    "l AS (SELECT j.job_id, x.i FROM nightshift.job j JOIN x"
    "   ON j.job_id = x.id AND j.fence = x.fence"
    "  WHERE j.state IN ('running', 'retry') ORDER BY j.job_id"
    "  FOR NO KEY UPDATE OF j),"
    "u AS (UPDATE nightshift.job j SET state = 'retry', owner = NULL,"
    "  lease_until = NULL,"
    "  not_before = clock_timestamp() + x.delay * interval '1 ms',"
    "  error_code = x.code, retries = j.retries + x.own"
    "  FROM x, l WHERE j.job_id = x.id AND l.job_id = x.id"
    "   AND j.fence = x.fence AND j.state = 'running') "
    "SELECT i FROM l";

static enum ns_status
postgres_retry(struct ns_store *store, struct ns_give_back *backs, size_t n,
               struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_pg_call call;
    enum ns_status status;
    struct ns_pg_columns columns;
    size_t item;

    if (n == 0)
        return NS_OK;
    ns_pg_columns_init(&columns, "t88ti");
    for (size_t i = 0; i < n; i++) {
        ns_pg_add_text(&columns.array[0], backs[i].job->id);
        ns_pg_add_int(&columns.array[1], (int64_t)backs[i].fence);
        ns_pg_add_int(&columns.array[2], backs[i].delay_ms);
        ns_pg_add_text(&columns.array[3], backs[i].code);
        ns_pg_add_int(&columns.array[4], backs[i].own_fault);
        backs[i].outcome = NS_STORE_FENCED;
    }
    ns_pg_columns_call(&columns, retry_sql, &call);
    status = ns_pg_columns_ask(&pg->link, &columns, &call, err);
    for (int row = 0; status == NS_OK && row < PQntuples(call.result); row++) {
        item = ns_pg_item(call.result, row);
        if (item < n)
            backs[item].outcome = NS_STORE_DONE;
    }
    ns_pg_call_fini(&call);
    ns_pg_columns_fini(&columns);
    return status;
}

/* ---- what operators ask ----------------------------------------------- */

static void
forget_paused(char **paused, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(paused[i]);
    free(paused);
}

static int
by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static const char paused_sql[] =
    "SELECT tenant FROM nightshift.control WHERE paused";

/* Also what tells whether the server is there at all. */
static enum ns_status
postgres_tend(struct ns_store *store, struct ns_error *err)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);
    struct ns_pg_call call = { .sql = paused_sql };
    enum ns_status status = ns_pg_ask(&pg->link, &call, err);
    size_t n = status == NS_OK ? (size_t)PQntuples(call.result) : 0, kept = 0;
    char **paused = n ? calloc(n, sizeof(*paused)) : NULL;

    for (; paused && kept < n; kept++) {
        char *tenant = strdup(ns_pg_text(call.result, (int)kept, 0));

        if (!tenant)
            break;
        paused[kept] = tenant;
    }
    if (status == NS_OK && kept < n)
        status = ns_pg_no_memory(err);
    ns_pg_call_fini(&call);
    if (status != NS_OK) {
        forget_paused(paused, kept);
        return status;
    }
    if (paused)
        qsort(paused, n, sizeof(*paused), by_text);
    forget_paused(pg->paused, pg->n_paused);
    pg->paused = paused;
    pg->n_paused = n;
    return NS_OK;
}

static bool
postgres_may_claim(const struct ns_store *store, const char *tenant)
{
    const struct ns_pg_store *pg = ns_pg_of_store(store);

    return pg->n_paused == 0 ||
           (pg->paused[0][0] != '\0' &&
            !bsearch(&tenant, pg->paused, pg->n_paused, sizeof(*pg->paused),
                     by_text));
}

/* ---- open and close --------------------------------------------------- */

static void
postgres_close(struct ns_store *store)
{
    struct ns_pg_store *pg = ns_pg_of_store(store);

    if (!pg)
        return;
    ns_pg_link_fini(&pg->link);
    forget_paused(pg->paused, pg->n_paused);
    free(pg->model_rev);
    free(pg->engine_rev);
    free(pg);
}

static int64_t
postgres_heartbeat_ms(const struct ns_store *store)
{
    return ns_pg_of_store(store)->lease_ms / 3;
}

static const struct ns_store_ops ops = {
    .name = "postgres",
    .claim = ns_pg_claim,
    .look = ns_pg_look,
    .heartbeat = postgres_heartbeat,
    .checkpoint = postgres_checkpoint,
    .finish = ns_pg_finish,
    .refuse = ns_pg_refuse,
    .retry = postgres_retry,
    .close = postgres_close,
    .heartbeat_ms = postgres_heartbeat_ms,
    .may_claim = postgres_may_claim,
    .tend = postgres_tend,
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
    struct ns_pg_store *pg = calloc(1, sizeof(*pg));
    enum ns_status status;

    if (!pg)
        return ns_pg_no_memory(err);
    pg->store.ops = &ops;
    ns_pg_link_init(&pg->link, options);
    pg->lease_ms = options->lease_ms ? options->lease_ms : LEASE_MS;
    pg->model_rev = strdup(options->model_rev ? options->model_rev : "");
    pg->engine_rev = strdup(options->engine_rev ? options->engine_rev : "");
    make_owner(pg->owner, sizeof(pg->owner));
    if (!pg->model_rev || !pg->engine_rev)
        status = ns_pg_no_memory(err);
    else
        status = ns_pg_connect(&pg->link, err);
    if (status == NS_OK) /* before the first claim */
        status = postgres_tend(&pg->store, err);
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
    const struct ns_pg_store *pg = ns_pg_of_store(store);

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

