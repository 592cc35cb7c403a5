/* kafka.h - jobs from topics: a consumer group's source, and a producer.
 *
 *     broker --> partition queue --(room in its ledger?)--> poll
 *     acknowledge --> ledger --> watermark --(once a second)--> group offset
 *
 * Positions are stored by us alone: the lowest unfinished offset of each
 * partition, as an explicit list, once its job's outcome is durable. A killed
 * process is handed everything above it again.
 *
 * Back-pressure is per partition. Each one's messages stay in its own queue,
 * which is asked only while its ledger has room, so an hour-long job at the
 * head stops its partition alone and costs no membership: the consumer itself
 * is polled all the time (tend). Nothing is paused or resumed.
 *
 * A partition that leaves does not stop the jobs it brought. Their leases in
 * the store keep others away and their results count; only acknowledging them
 * is now the next owner's part. The epoch in each position tells.
 *
 * Keys of [kafka] go to librdkafka as they stand, and what it says about one
 * is the check. Two are refused, since they would store positions behind our
 * back; some have other defaults here (kafka_conf.c).
 *
 * Owns:    the client and its threads, ledgers, the message handed out last.
 * Borrows: the options' texts during open alone.
 * Thread:  source: the event loop. Producer: one at a time.
 */
#ifndef NS_CONNECTORS_KAFKA_H
#define NS_CONNECTORS_KAFKA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/source.h"
#include "connectors/store.h"

struct ns_kafka_setting {
    const char *key, *value;
};

struct ns_kafka_options {
    const struct ns_kafka_setting *settings;
    size_t n_settings;
    bool allow_plaintext; /* to hosts other than this one */
    size_t max_message;   /* longer ones are told, not kept; 0: 16 MB */

    /* Of a source. */
    const char *topics;     /* comma list; "^..." is a pattern */
    uint32_t window;        /* messages handed out; 0: 256 */
    uint32_t span;          /* of one partition's ledger; 0: 10,000 */
    const char *id_from;    /* custom_id of a body without one: "key", or the
                             * name of a header; NULL: the body must have it */
    bool tombstone_cancels; /* a null payload cancels the job of its key */
};

/* What is wrong with the settings, without touching the network. NS_REJECT. */
enum ns_status ns_kafka_check(const struct ns_kafka_options *options,
                              struct ns_error *err);

/* --- source ------------------------------------------------------------ */

struct ns_kafka_source;

/* Does not wait for a broker: one that is away is waited for while polling.
 * Errors: NS_REJECT as ns_kafka_check; NS_FATAL. In polls, NS_FATAL with code
 * "fenced" (another process has our group.instance.id) or "not_allowed" (the
 * broker does not know us or keeps the topic from us). */
enum ns_status ns_kafka_source_open(const struct ns_kafka_options *options,
                                    struct ns_kafka_source **out,
                                    struct ns_error *err);
struct ns_source *ns_kafka_source(struct ns_kafka_source *kafka);

/* One of ours. Lag and age as in struct ns_kafka_state, of it alone. */
struct ns_kafka_partition {
    char topic[250]; /* Kafka's longest is 249 */
    int32_t id;
    uint64_t lag;
    int64_t head_ms;
};

enum { NS_KAFKA_SHOWN = 64 }; /* bounds what a scrape may grow to */

struct ns_kafka_state {
    bool ready;   /* in the group, every topic there, brokers in reach */
    bool reached; /* a broker has answered, and not all are down since */
    uint32_t n_partitions; /* ours now */
    uint64_t in_flight;    /* handed out, ours, not acknowledged */
    uint64_t lag;          /* messages not acknowledged, as far as known */
    int64_t head_ms; /* for how long one unfinished message has held up its
                      * partition's watermark: the longest */
    uint64_t gap;          /* messages that retention took before we read them */
    uint64_t rebalances, commits, commit_failures, rewinds;
    const char *trouble; /* why it is not ready; NULL. Until the next poll */

    /* The first of ours, in the order in which they were first taken. */
    struct ns_kafka_partition shown[NS_KAFKA_SHOWN];
    uint32_t n_shown;
};
struct ns_kafka_state
ns_kafka_source_state(const struct ns_kafka_source *kafka);

/* Stores what is acknowledged and leaves the group, within 5 s; brokers that
 * do not answer are not waited for. The source is gone then. Takes NULL. */
void ns_kafka_source_close(struct ns_kafka_source *kafka);

/* Takes the group's stored positions back to where the topics were at a time,
 * where they are behind it; what was not read yet stays so. `visit`, which may
 * be NULL, is told of each partition before. NS_RETRY: brokers are away, or
 * members of the group are there. NS_REJECT: settings, or a pattern of topics. */
typedef void (*ns_kafka_rewound)(void *context, const char *topic,
                                 int32_t partition, int64_t from, int64_t to);
enum ns_status ns_kafka_rewind(const struct ns_kafka_options *options,
                               int64_t since_ms, ns_kafka_rewound visit,
                               void *context, struct ns_error *err);

/* For how long options->topics keep a message, the longest of them; INT64_MAX:
 * for ever. NS_RETRY: brokers are away. */
enum ns_status ns_kafka_retention(const struct ns_kafka_options *options,
                                  int64_t *out_ms, struct ns_error *err);

/* --- producer: idempotent ---------------------------------------------- */

struct ns_kafka_producer;

struct ns_kafka_header {
    const char *name, *value; /* texts; a NULL value is left out */
};

enum ns_status ns_kafka_producer_open(const struct ns_kafka_options *options,
                                      struct ns_kafka_producer **out,
                                      struct ns_error *err);

/* Hands a message to the client, which copies it. Waits up to `wait_ms` while
 * the client's queue is full. NS_RETRY: still full. NS_REJECT: this message
 * can not be sent (too long). */
enum ns_status ns_kafka_produce(struct ns_kafka_producer *producer,
                                const char *topic, const char *key,
                                const void *bytes, size_t length,
                                const struct ns_kafka_header *headers,
                                size_t n_headers, int wait_ms,
                                struct ns_error *err);

/* Waits until all are delivered or refused. NS_RETRY: time is up. */
enum ns_status ns_kafka_flush(struct ns_kafka_producer *producer, int wait_ms,
                              struct ns_error *err);

struct ns_kafka_sent {
    uint64_t delivered, failed;
    const char *why; /* of the first failure; NULL */
};
struct ns_kafka_sent
ns_kafka_producer_sent(const struct ns_kafka_producer *producer);

void ns_kafka_producer_close(struct ns_kafka_producer *producer); /* NULL */

/* --- result and dead-letter topics ------------------------------------- */

/* A store that also sends what it stored: result lines to one topic, dead
 * letters to another (NULL: not), keyed by job id, with the trace context. The
 * row in `inner` is the truth: what is sent is a copy, sent after it, and a
 * crash in between loses the copy alone. Borrows both; close leaves them. */
enum ns_status ns_kafka_topics_open(struct ns_store *inner,
                                    struct ns_kafka_producer *producer,
                                    const char *results_topic,
                                    const char *dead_letter_topic,
                                    struct ns_store **out,
                                    struct ns_error *err);

#endif
