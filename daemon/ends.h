/* ends.h - the two ends of the daemon's pipeline, as the configuration says.
 *
 *     intake.spool                    files      -->  files
 *     intake.spool + [postgres]       files      -->  PostgreSQL
 *     intake.topics + [postgres]      Kafka      -->  PostgreSQL
 *
 * Kafka to files is refused: two daemons of a group could answer one message
 * twice, and no file's lock keeps them apart. Only one pair is open at a time.
 *
 * Owns:   source, store, and the producer of copies.
 * Thread: the event loop; the store is the sink thread's while a pipeline runs.
 */
#ifndef NS_DAEMON_ENDS_H
#define NS_DAEMON_ENDS_H

#include <stdbool.h>

#include "base/error.h"
#include "config/options.h"
#include "connectors/kafka.h"
#include "connectors/postgres.h"
#include "connectors/spool.h"

struct ns_ends {
    struct ns_source *source; /* borrowed from one of those below */
    struct ns_store *store;   /* likewise */
    bool keep_payloads;

    struct ns_spool *spool;
    struct ns_kafka_source *kafka;
    struct ns_kafka_producer *producer;
    struct ns_store *postgres, *topics;
};

/* What is wrong with the options, without opening anything. NS_REJECT. */
enum ns_status ns_ends_check(const struct ns_options *options,
                             struct ns_error *err);

/* NS_RETRY: a server is away, or a lock is held (code "locked"): nothing is
 * open then. `ends` is all zero before. */
enum ns_status ns_ends_open(const struct ns_options *options,
                            const char *model_rev, const char *engine_rev,
                            struct ns_ends *ends, struct ns_error *err);

/* Whether jobs can come and go; `*why` says why not, until the next turn. */
bool ns_ends_ready(const struct ns_ends *ends, const char **why);

void ns_ends_close(struct ns_ends *ends); /* what is open of it */

/* Of the options, for others who talk to the same servers. `settings` has room
 * for options->n_kafka. */
struct ns_postgres_options ns_ends_postgres(const struct ns_options *options);
struct ns_kafka_options ns_ends_kafka(const struct ns_options *options,
                                      struct ns_kafka_setting *settings);

#endif
