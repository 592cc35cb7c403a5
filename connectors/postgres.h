/* postgres.h - results in PostgreSQL, and the schema that holds them.
 *
 * The store of store.h over libpq. Fences are numbers of a sequence, leases
 * live on the server's clock, and every operation is one statement over an
 * array of items: nothing is left open when a session is cut, and it works
 * behind a pooler in transaction mode. An operation whose answer was lost is
 * asked again by its caller; each says then what the first one did:
 *
 *     claim       takes back a claim whose number we never heard
 *     finish      looks for the row under our own fence
 *     checkpoint, refuse    insert what is not there
 *     retry       finds the job given back under our own fence
 *
 * Errors, by SQLSTATE: the world's (connection, resources, locks, time,
 * read-only after a failover) are NS_RETRY; those of rights, schema and
 * authentication are NS_REJECT with code "postgres_setup", which no restart
 * helps; a value the server can not take is that item's, after the batch was
 * unrolled and sent one by one.
 *
 * Owns:   one connection, made anew whenever it is lost.
 * Thread: one at a time (the sink thread).
 */
#ifndef NS_CONNECTORS_POSTGRES_H
#define NS_CONNECTORS_POSTGRES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "connectors/store.h"

enum { NS_POSTGRES_SCHEMA = 2 }; /* the version this build works with */

struct ns_postgres_options {
    const char *conninfo;      /* libpq's "host=a,b ..." or URI; borrowed */
    const char *password_file; /* read at each connect; NULL: none */
    int64_t connect_ms;        /* of each address; 0: 5 s */
    int64_t answer_ms;         /* longest wait for a statement; 0: 30 s */
    bool allow_async_commit;   /* go on although the server may forget */
    bool allow_plaintext;      /* to hosts other than this one */

    /* The store's. */
    int64_t lease_ms;      /* 0: 30 s */
    bool notify;           /* NOTIFY nightshift_result, nightshift_batch */
    const char *model_rev; /* blocks of another one are not resumed; copied */
    const char *engine_rev;
};

/* Connects, and checks that schema, rights and durability are as needed.
 * NS_RETRY: the server can not be reached now. NS_REJECT: see above. */
enum ns_status ns_postgres_store_open(const struct ns_postgres_options *options,
                                      struct ns_store **out,
                                      struct ns_error *err);

struct ns_postgres_counts { /* since open; any thread, may be torn */
    uint64_t connects;    /* the first one counted */
    uint64_t statements;
    uint64_t unrolled;    /* batches sent one by one after an error */
    uint64_t sanitised;   /* results that hold U+FFFD for what can not stand */
    uint64_t unstorable;  /* items the server refused even alone */
    uint64_t resolved;    /* finishes found done when asked again */
    uint64_t batches_ended;
};
struct ns_postgres_counts ns_postgres_counts(const struct ns_store *store);

/* --- the schema; each connects as conninfo says, and leaves --- */

/* Installs it. NS_REJECT when any is there. */
enum ns_status ns_postgres_init(const struct ns_postgres_options *options,
                                struct ns_error *err);

/* Brings it to this build's version. `*from` is what was found. NS_REJECT: it
 * is newer, or there is none. */
enum ns_status ns_postgres_migrate(const struct ns_postgres_options *options,
                                   int *from, struct ns_error *err);

enum { NS_POSTGRES_PURGE_DAYS = 7 }; /* least age of what may be purged */

struct ns_postgres_purged {
    uint64_t jobs, dead_letters, batches, documents;
};
/* Removes jobs with their results that ended longer ago than `age_ms`, and
 * dead letters, batches and documents of that age, as role nightshift_purge.
 * NS_REJECT below NS_POSTGRES_PURGE_DAYS: a message that is read again must
 * find its row. */
enum ns_status ns_postgres_purge(const struct ns_postgres_options *options,
                                 int64_t age_ms,
                                 struct ns_postgres_purged *out,
                                 struct ns_error *err);

#endif
