/* postgres_private.h - what the parts of the PostgreSQL store share.
 *
 *     postgres_store.c    open and close; heartbeat, checkpoint, retry
 *     postgres_claim.c    claim: take, ask why not, read blocks, give up
 *     postgres_finish.c   finish: final rows, and in-doubt ones resolved
 *     postgres_refuse.c   refuse: dead letters, and cancels by tombstone
 *
 * Whatever writes final rows counts them into their batches in the same
 * statement, with the two macros below.
 */
#ifndef NS_CONNECTORS_POSTGRES_PRIVATE_H
#define NS_CONNECTORS_POSTGRES_PRIVATE_H

#include "connectors/postgres_columns.h"

enum {
    NS_PG_LIMIT = 3,              /* of retries, and of stalls in a row */
    NS_PG_CHUNK_BYTES = 16 << 20, /* of payloads in one statement */
    NS_PG_LINE_BYTES = 256 << 20, /* of a result's line */
};

struct ns_pg_store {
    struct ns_store store; /* first */
    struct ns_pg_link link;
    char *model_rev, *engine_rev;
    char owner[96];
    int64_t lease_ms;
    uint64_t known_fence; /* the highest that an answer has named */
    char **paused; /* owned: tenants, "" for all; sorted */
    size_t n_paused;
    _Atomic uint64_t unrolled, sanitised, unstorable, resolved, batches_ended;
};

static inline struct ns_pg_store *
ns_pg_of_store(const struct ns_store *store)
{
    return (struct ns_pg_store *)(uintptr_t)store;
}

enum ns_status ns_pg_no_memory(struct ns_error *err);

enum ns_status ns_pg_look(struct ns_store *store, struct ns_claim *claims,
                          size_t n, struct ns_error *err);
enum ns_status ns_pg_claim(struct ns_store *store, struct ns_claim *claims,
                           size_t n, struct ns_error *err);
enum ns_status ns_pg_finish(struct ns_store *store, struct ns_finished *ends,
                            size_t n, struct ns_error *err);
enum ns_status ns_pg_refuse(struct ns_store *store,
                            struct ns_refusal *refusals, size_t n,
                            struct ns_error *err);

/* Adds final rows `r` (batch, status, tokens) to their batches. `ended` has
 * those that this statement has made whole: exactly one does, because the row
 * of the batch is locked and only grows. */
#define NS_PG_COUNT_BATCHES                                                  \
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
#define NS_PG_REPORT(notify)                                                 \
    "SELECT 0, job_id, 0::bigint, 0::bigint,"                                \
    " CASE WHEN " notify " THEN pg_notify('nightshift_result', job_id)::text" \
    " END FROM r WHERE job_id IS NOT NULL UNION ALL "                        \
    "SELECT 1, batch, ok, failed,"                                           \
    " CASE WHEN " notify " THEN pg_notify('nightshift_batch',"               \
    "  json_build_object('batch', batch, 'ok', ok, 'failed', failed,"        \
    "   'outcome', CASE WHEN ok = 0 AND failed > 0 THEN 'all_failed'"        \
    "    WHEN failed > 0 THEN 'some_failed' ELSE 'ok' END)::text)::text"     \
    " END FROM ended"


/* Reads what NS_PG_REPORT says: logs batches that ended, and calls `visit`,
 * which may be NULL, for each job. Rows of further kinds are left alone. */
void ns_pg_read_report(struct ns_pg_store *pg, const PGresult *report,
                       void (*visit)(void *context, const char *job_id),
                       void *context);

#endif
