/* What is said about a batch from outside the daemon. */
#include "connectors/postgres_link.h"

enum ns_status
ns_postgres_expect_batch(const struct ns_postgres_options *options,
                         const char *batch, uint64_t n_jobs,
                         struct ns_error *err)
{
    struct ns_pg_call call = {
        .sql = "SELECT nightshift.expect_batch($1, $2)",
    };
    struct ns_pg_link link;
    enum ns_status status;

    ns_pg_link_init(&link, options);
    link.admin = true; /* the schema says so itself: the function is there */
    ns_pg_call_text(&call, batch);
    ns_pg_call_int(&call, (int64_t)n_jobs);
    status = ns_pg_ask(&link, &call, err);
    ns_pg_call_fini(&call);
    ns_pg_link_fini(&link);
    return status;
}
