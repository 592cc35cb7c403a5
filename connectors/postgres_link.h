/* postgres_link.h - one connection to PostgreSQL that mends itself.
 *
 * Statements go in pipeline mode, each with a sync of its own behind it: each
 * is its own transaction, many travel at once, and one that fails takes no
 * other with it. Every wait ends: connecting after connect_ms an address, an
 * answer after answer_ms; the connection is then dropped, and what was asked
 * is in doubt until it is asked again.
 *
 * Whoever loses the connection hears NS_RETRY; the next statement connects
 * anew. How long to wait in between is the caller's business (deliver.c).
 *
 * Private to connectors/postgres_*.c.
 *
 * Owns:   the connection. Thread: one at a time.
 */
#ifndef NS_CONNECTORS_POSTGRES_LINK_H
#define NS_CONNECTORS_POSTGRES_LINK_H

#include <libpq-fe.h>
#include <stdatomic.h>

#include "connectors/postgres.h"
#include "connectors/postgres_array.h"

enum { NS_PG_PARAMS = 48 };

enum ns_pg_class { /* of an error */
    NS_PG_WORLD, /* may pass */
    NS_PG_AWAY,  /* may pass, on another connection */
    NS_PG_SETUP, /* authentication, rights, schema: a person is needed */
    NS_PG_DATA,  /* the values sent */
    NS_PG_BROKEN,
};
/* `sqlstate` NULL: the connection itself. */
enum ns_pg_class ns_pg_classify(const char *sqlstate);

struct ns_pg_link {
    struct ns_postgres_options options; /* texts borrowed */
    PGconn *conn; /* NULL: to be connected */
    bool admin;   /* neither schema nor durability are looked at */
    _Atomic uint64_t connects, statements;
};

void ns_pg_link_init(struct ns_pg_link *link,
                     const struct ns_postgres_options *options);
void ns_pg_link_fini(struct ns_pg_link *link);

/* Connects if there is no connection. */
enum ns_status ns_pg_connect(struct ns_pg_link *link, struct ns_error *err);

struct ns_pg_call {
    const char *sql;
    int n_params;
    Oid type[NS_PG_PARAMS];
    const char *value[NS_PG_PARAMS]; /* borrowed, in binary format */
    int length[NS_PG_PARAMS];
    unsigned char word[NS_PG_PARAMS][8]; /* of integers */

    PGresult *result; /* out, in binary format; owned: ns_pg_call_fini */
    enum ns_pg_class fault; /* out, where there is no result */
    char state[6];          /* its SQLSTATE */
    char text[200];
};

void ns_pg_call_array(struct ns_pg_call *call, const struct ns_pg_array *array);
void ns_pg_call_text(struct ns_pg_call *call, const char *text); /* or NULL */
void ns_pg_call_int(struct ns_pg_call *call, int64_t value);     /* int8 */
void ns_pg_call_bool(struct ns_pg_call *call, bool value);
void ns_pg_call_fini(struct ns_pg_call *call);

/* Runs the calls in order, each a transaction. NS_OK: each has its result, or
 * a fault of NS_PG_DATA. NS_RETRY, NS_REJECT, NS_FATAL: what the first other
 * fault means; some of the calls may have taken place. */
enum ns_status ns_pg_run(struct ns_pg_link *link, struct ns_pg_call *calls,
                         size_t n, struct ns_error *err);

/* One call, for which a fault of NS_PG_DATA is an error of ours: NS_FATAL. */
enum ns_status ns_pg_ask(struct ns_pg_link *link, struct ns_pg_call *call,
                         struct ns_error *err);

/* Values of a result. A NULL reads as 0, false, "". */
int64_t ns_pg_int(const PGresult *result, int row, int column); /* int2,4,8 */
bool ns_pg_bool(const PGresult *result, int row, int column);
const char *ns_pg_text(const PGresult *result, int row, int column);

extern const char ns_pg_schema_sql[];   /* schema.sql */
extern const char ns_pg_schema_2_sql[]; /* schema_2.sql */

#endif
