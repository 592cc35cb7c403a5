/* Copies of what was stored, in topics. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/kafka_private.h"
#include "connectors/result.h"

enum {
    LINE_BYTES = 64 << 20,
    WAIT_MS = 1000,   /* for room in the client's queue; then it is dropped */
    FLUSH_MS = 3000,
};

struct topics {
    struct ns_store store; /* first */
    struct ns_store *inner;
    struct ns_kafka_producer *producer;
    char *results, *dead_letters; /* NULL: not sent */
    struct ns_buf line;
    uint64_t dropped; /* copies that were never sent */
    uint64_t refused; /* and those that the broker did not take, as told */
};

/* What the broker answers comes later, to the producer. */
static void
tell_refused(struct topics *topics)
{
    struct ns_kafka_sent sent = ns_kafka_producer_sent(topics->producer);

    if (sent.failed == topics->refused)
        return;
    topics->refused = sent.failed;
    ns_log_warn("kafka.copy_refused", "refused=%llu first=\"%s\"",
                (unsigned long long)sent.failed, sent.why);
}

/* The row stands, so nothing that goes wrong here is the job's. */
static void
send_copy(struct topics *topics, const char *topic, const struct ns_job *job,
          const struct ns_result *result, const char *reason)
{
    const struct ns_kafka_header headers[] = {
        { "traceparent", job->trace_parent },
        { "tracestate", job->trace_state },
        { "nightshift-status", ns_result_status_name(result->status) },
        { "nightshift-reason", reason },
    };
    struct ns_error err = { 0 };
    enum ns_status status;

    ns_buf_reset(&topics->line);
    status = ns_result_line(job, result, &topics->line, &err);
    if (status == NS_OK)
        status = ns_kafka_produce(topics->producer, topic, job->id,
                                  topics->line.data, topics->line.length - 1,
                                  headers, sizeof(headers) / sizeof(headers[0]),
                                  WAIT_MS, &err);
    if (status != NS_OK && topics->dropped++ % 1000 == 0)
        ns_log_warn("kafka.copy_dropped", "topic=%s dropped=%llu error=\"%s\"",
                    topic, (unsigned long long)topics->dropped, err.text);
}

static enum ns_status
finish(struct ns_store *store, struct ns_finished *items, size_t n,
       struct ns_error *err)
{
    struct topics *topics = (struct topics *)store;
    enum ns_status status = topics->inner->ops->finish(topics->inner, items, n,
                                                       err);

    for (size_t i = 0; status == NS_OK && topics->results && i < n; i++)
        if (items[i].outcome == NS_STORE_DONE)
            send_copy(topics, topics->results, items[i].job, items[i].result,
                      NULL);
    return status;
}

static enum ns_status
refuse(struct ns_store *store, struct ns_refusal *items, size_t n,
       struct ns_error *err)
{
    struct topics *topics = (struct topics *)store;
    enum ns_status status = topics->inner->ops->refuse(topics->inner, items, n,
                                                       err);

    for (size_t i = 0; status == NS_OK && topics->dead_letters && i < n; i++) {
        struct ns_result result = ns_result_of_error(NS_RESULT_DEAD,
                                                     &items[i].error);

        if (items[i].error.code && strcmp(items[i].error.code, "cancel") == 0)
            continue; /* asks for something, and is no dead letter */
        send_copy(topics, topics->dead_letters, items[i].job, &result,
                  items[i].error.code);
    }
    return status;
}

static enum ns_status
claim(struct ns_store *store, struct ns_claim *items, size_t n,
      struct ns_error *err)
{
    struct ns_store *inner = ((struct topics *)store)->inner;

    return inner->ops->claim(inner, items, n, err);
}

static enum ns_status
heartbeat(struct ns_store *store, struct ns_heartbeat *items, size_t n,
          struct ns_error *err)
{
    struct ns_store *inner = ((struct topics *)store)->inner;

    return inner->ops->heartbeat(inner, items, n, err);
}

static enum ns_status
checkpoint(struct ns_store *store, struct ns_checkpoint *items, size_t n,
           struct ns_error *err)
{
    struct ns_store *inner = ((struct topics *)store)->inner;

    return inner->ops->checkpoint(inner, items, n, err);
}

static enum ns_status
retry(struct ns_store *store, struct ns_give_back *items, size_t n,
      struct ns_error *err)
{
    struct ns_store *inner = ((struct topics *)store)->inner;

    return inner->ops->retry(inner, items, n, err);
}

static enum ns_status
look(struct ns_store *store, struct ns_claim *items, size_t n,
     struct ns_error *err)
{
    struct ns_store *inner = ((struct topics *)store)->inner;

    return inner->ops->look(inner, items, n, err);
}

static enum ns_status
tend(struct ns_store *store, struct ns_error *err)
{
    struct topics *topics = (struct topics *)store;

    tell_refused(topics);
    return topics->inner->ops->tend(topics->inner, err);
}

static bool
may_claim(const struct ns_store *store, const char *tenant)
{
    const struct ns_store *inner = ((const struct topics *)store)->inner;

    return !inner->ops->may_claim || inner->ops->may_claim(inner, tenant);
}

static int64_t
heartbeat_ms(const struct ns_store *store)
{
    const struct ns_store *inner = ((const struct topics *)store)->inner;

    return inner->ops->heartbeat_ms(inner);
}

static void
topics_close(struct ns_store *store)
{
    struct topics *topics = (struct topics *)store;
    struct ns_error err = { 0 };

    if (ns_kafka_flush(topics->producer, FLUSH_MS, &err) != NS_OK)
        ns_log_warn("kafka.copy_dropped", "error=\"%s\"", err.text);
    tell_refused(topics);
    ns_buf_fini(&topics->line);
    free(topics->results);
    free(topics->dead_letters);
    free(topics);
}

enum ns_status
ns_kafka_topics_open(struct ns_store *inner, struct ns_kafka_producer *producer,
                     const char *results_topic, const char *dead_letter_topic,
                     struct ns_store **out, struct ns_error *err)
{
    static const struct ns_store_ops ops = {
        .name = "postgres",
        .claim = claim,
        .look = look,
        .heartbeat = heartbeat,
        .checkpoint = checkpoint,
        .finish = finish,
        .refuse = refuse,
        .retry = retry,
        .close = topics_close,
        .heartbeat_ms = heartbeat_ms,
        .may_claim = may_claim,
        .tend = tend,
    };
    struct topics *topics = calloc(1, sizeof(*topics));

    if (!topics)
        return ns_fail(err, NS_FATAL, "out of memory for the topics");
    topics->store.ops = &ops;
    topics->inner = inner;
    topics->producer = producer;
    ns_buf_init(&topics->line, LINE_BYTES);
    if (results_topic)
        topics->results = strdup(results_topic);
    if (dead_letter_topic)
        topics->dead_letters = strdup(dead_letter_topic);
    if ((results_topic && !topics->results) ||
        (dead_letter_topic && !topics->dead_letters)) {
        free(topics->results);
        free(topics->dead_letters);
        free(topics);
        return ns_fail(err, NS_FATAL, "out of memory for the topics");
    }
    *out = &topics->store;
    return NS_OK;
}
