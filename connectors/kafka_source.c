/* The consumer's end: partitions, their queues and ledgers, stored offsets. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "connectors/kafka_private.h"
#include "connectors/ledger.h"

enum {
    DEFAULT_WINDOW = 256,
    DEFAULT_SPAN = 10000,
    TEND_MS = 5,        /* the consumer is not asked more often */
    EVENTS_A_TEND = 64,
    STORE_MS = 1000,    /* between two stores of offsets */
    STORE_LOST_MS = 30000, /* an answer that never came */
    ASK_MS = 1000,      /* a question that the loop waits for */
    GAP_CHECK_MS = 10000, /* at most one such question a partition */
    CLOSE_MS = 4000,
    CLOSE_AWAY_MS = 300, /* when no broker is in reach */
    END_MS = 1000,
    TROUBLE_MS = 60000, /* the same trouble is logged once in this time */
};

enum trouble { NONE, AWAY, TOPIC }; /* what it takes to end it rises */

struct partition {
    char *topic;
    char *origin; /* "topic/3" */
    int32_t id;
    uint32_t epoch; /* raised when it is taken and when it is given up */

    rd_kafka_queue_t *queue;  /* NULL: not ours */
    struct ns_ledger *ledger; /* NULL before its first message */
    uint64_t first, next;     /* of the ledger: where it began; newest + 1 */
    int64_t stored;           /* what the group's offset is; -1: not known */
    int64_t asked;            /* what was last sent to be stored */
    int64_t gap_checked_ms;
    int64_t head_since_ms; /* the watermark's offset has been in flight, or
                            * at the head of it, since then */
};

struct ns_kafka_source {
    struct ns_source source; /* first */
    struct ns_kafka_options options;
    char *id_from;
    rd_kafka_t *client;
    bool cooperative; /* the assignor's protocol */

    struct partition **partition; /* a position's `partition` is its index */
    uint32_t n_partitions, capacity, turn;
    uint64_t in_flight;

    struct ns_kafka_reader reader;
    rd_kafka_message_t *message; /* handed out last */

    bool joined, reached;
    int64_t tended_ms, store_at_ms, storing_since_ms; /* 0: none under way */
    uint64_t gap, rebalances, commits, commit_failures, rewinds;
    struct ns_error failure; /* status NS_OK: none */
    enum trouble trouble;
    char trouble_text[300], warned[300];
    int64_t warned_ms;
};

/* --- trouble ----------------------------------------------------------- */

static void
warn(struct ns_kafka_source *kafka, const char *text)
{
    int64_t now_ms = ns_kafka_now_ms();
    char shown[sizeof(kafka->warned)];

    if (strcmp(kafka->warned, text) == 0 &&
        now_ms - kafka->warned_ms < TROUBLE_MS)
        return;
    kafka->warned_ms = now_ms;
    snprintf(kafka->warned, sizeof(kafka->warned), "%s", text);
    ns_log_warn("kafka.trouble", "error=%s",
                ns_log_escape(text, strlen(text), shown, sizeof(shown)));
}

static void
set_trouble(struct ns_kafka_source *kafka, enum trouble trouble,
            const char *text)
{
    warn(kafka, text);
    kafka->trouble = trouble;
    snprintf(kafka->trouble_text, sizeof(kafka->trouble_text), "%s", text);
}

/* Something went well that could not have with the trouble still there. */
static void
end_trouble(struct ns_kafka_source *kafka, enum trouble trouble)
{
    kafka->reached = true;
    if (kafka->trouble == NONE || kafka->trouble > trouble)
        return;
    kafka->trouble = NONE;
    kafka->warned[0] = '\0';
    ns_log_info("kafka.back", "%s", "");
}

/* The first failure counts; polls report it from then on. */
static void
fail(struct ns_kafka_source *kafka, const char *code, const char *text)
{
    if (kafka->failure.status != NS_OK)
        return;
    ns_fail(&kafka->failure, NS_FATAL, "kafka: %s", text);
    kafka->failure.code = code;
}

static void
take_error(struct ns_kafka_source *kafka, rd_kafka_resp_err_t code,
           const char *text)
{
    char why[300];

    if (code == RD_KAFKA_RESP_ERR__FATAL) {
        code = rd_kafka_fatal_error(kafka->client, why, sizeof(why));
        fail(kafka, code == RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID ? "fenced"
                                                                  : NULL, why);
        return;
    }
    if (code == RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID) {
        fail(kafka, "fenced", text);
        return;
    }
    /* A password that was right an hour ago and a certificate that was good
     * are the other side's trouble; those that never were are ours. What a
     * topic's owner allows is looked up by the broker each time. */
    if (ns_kafka_is_refusal(code) &&
        (!kafka->reached || (code != RD_KAFKA_RESP_ERR__AUTHENTICATION &&
                             code != RD_KAFKA_RESP_ERR__SSL))) {
        fail(kafka, "not_allowed", text);
        return;
    }
    switch ((int)code) {
    case RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN:
        kafka->reached = false;
        set_trouble(kafka, AWAY, text);
        break;
    case RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART:
    case RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC:
    case RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION:
        set_trouble(kafka, TOPIC, text);
        break;
    default: /* one connection's, one request's: tried again by the client */
        warn(kafka, text);
        break;
    }
}

static void
on_error(rd_kafka_t *client, int code, const char *text, void *data)
{
    (void)client;
    take_error(data, (rd_kafka_resp_err_t)code, text);
}

/* From any of the client's threads. What matters comes as an error too. */
static void
on_log(const rd_kafka_t *client, int level, const char *topic,
       const char *text)
{
    char shown[400];

    (void)client;
    ns_log(level <= 2 ? NS_LOG_WARN : NS_LOG_DEBUG, "kafka.client",
           "topic=%s text=%s", topic,
           ns_log_escape(text, strlen(text), shown, sizeof(shown)));
}

/* Each few seconds, from consumer_poll: whether a broker is in reach again,
 * which no event tells. Only looked at while none was. */
static int
on_statistics(rd_kafka_t *client, char *json, size_t length, void *data)
{
    struct ns_kafka_source *kafka = data;

    (void)client;
    (void)length;
    if (!kafka->reached && strstr(json, "\"state\":\"UP\""))
        end_trouble(kafka, AWAY);
    return 0; /* the client frees the text */
}

/* --- partitions -------------------------------------------------------- */

static void
partition_destroy(struct partition *partition)
{
    if (!partition)
        return;
    if (partition->queue)
        rd_kafka_queue_destroy(partition->queue);
    ns_ledger_destroy(partition->ledger);
    free(partition->origin);
    free(partition->topic);
    free(partition);
}

static struct partition *
find(const struct ns_kafka_source *kafka, const char *topic, int32_t id)
{
    for (uint32_t i = 0; i < kafka->n_partitions; i++)
        if (kafka->partition[i]->id == id &&
            strcmp(kafka->partition[i]->topic, topic) == 0)
            return kafka->partition[i];
    return NULL;
}

static struct partition *
add(struct ns_kafka_source *kafka, const char *topic, int32_t id)
{
    struct partition *partition, **bigger;
    uint32_t capacity = kafka->capacity ? kafka->capacity * 2 : 16;

    if (kafka->n_partitions == kafka->capacity) {
        bigger = realloc(kafka->partition, capacity * sizeof(*bigger));
        if (!bigger)
            return NULL;
        kafka->partition = bigger;
        kafka->capacity = capacity;
    }
    partition = calloc(1, sizeof(*partition));
    if (!partition)
        return NULL;
    partition->id = id;
    partition->stored = -1;
    partition->topic = strdup(topic);
    if (!partition->topic ||
        asprintf(&partition->origin, "%s/%" PRId32, topic, id) == -1) {
        partition->origin = NULL; /* asprintf leaves it undefined */
        partition_destroy(partition);
        return NULL;
    }
    kafka->partition[kafka->n_partitions++] = partition;
    return partition;
}

/* What was handed out of it is no longer ours to acknowledge. */
static void
forget(struct ns_kafka_source *kafka, struct partition *partition)
{
    if (partition->ledger)
        kafka->in_flight -= ns_ledger_in_flight(partition->ledger);
    ns_ledger_destroy(partition->ledger);
    partition->ledger = NULL;
    partition->epoch++;
    partition->stored = partition->asked = -1;
}

static void
take(struct ns_kafka_source *kafka, rd_kafka_topic_partition_list_t *list)
{
    rd_kafka_topic_partition_list_t *offsets;

    for (int i = 0; i < list->cnt; i++) {
        const char *topic = list->elems[i].topic;
        int32_t id = list->elems[i].partition;
        struct partition *partition = find(kafka, topic, id);

        if (!partition)
            partition = add(kafka, topic, id);
        if (!partition) {
            fail(kafka, NULL, "out of memory for a partition");
            continue;
        }
        forget(kafka, partition);
        if (partition->queue)
            rd_kafka_queue_destroy(partition->queue);
        partition->queue =
            rd_kafka_queue_get_partition(kafka->client, topic, id);
        /* Before it is assigned, so that not one message passes by. */
        if (partition->queue)
            rd_kafka_queue_forward(partition->queue, NULL);
        else
            fail(kafka, NULL, "a partition has no queue");
    }
    /* Where each one stands, to see what is missing in front of its first
     * message. Without an answer that is not seen, and nothing else changes. */
    offsets = rd_kafka_topic_partition_list_copy(list);
    if (offsets && list->cnt > 0 &&
        rd_kafka_committed(kafka->client, offsets, ASK_MS) ==
            RD_KAFKA_RESP_ERR_NO_ERROR)
        for (int i = 0; i < offsets->cnt; i++) {
            struct partition *partition = find(kafka, offsets->elems[i].topic,
                                               offsets->elems[i].partition);

            if (partition && offsets->elems[i].offset >= 0)
                partition->stored = offsets->elems[i].offset;
        }
    if (offsets)
        rd_kafka_topic_partition_list_destroy(offsets);
}

static void
give_up(struct ns_kafka_source *kafka,
        const rd_kafka_topic_partition_list_t *list)
{
    for (int i = 0; i < list->cnt; i++) {
        struct partition *partition =
            find(kafka, list->elems[i].topic, list->elems[i].partition);

        if (!partition || !partition->queue)
            continue;
        forget(kafka, partition);
        rd_kafka_queue_destroy(partition->queue);
        partition->queue = NULL;
    }
}

/* --- stored offsets ---------------------------------------------------- */

/* Those of `among` (NULL: of all that are ours) whose watermark moved; NULL
 * when there are none. */
static rd_kafka_topic_partition_list_t *
moved(struct ns_kafka_source *kafka,
      const rd_kafka_topic_partition_list_t *among)
{
    rd_kafka_topic_partition_list_t *list = NULL;

    for (uint32_t i = 0; i < kafka->n_partitions; i++) {
        struct partition *partition = kafka->partition[i];
        rd_kafka_topic_partition_t *element;
        uint64_t mark;

        if (!partition->queue || !partition->ledger ||
            (among && !rd_kafka_topic_partition_list_find(
                          (rd_kafka_topic_partition_list_t *)among,
                          partition->topic, partition->id)))
            continue;
        mark = ns_ledger_watermark(partition->ledger);
        if (mark <= partition->first || (int64_t)mark == partition->stored)
            continue;
        if (!list)
            list = rd_kafka_topic_partition_list_new(8);
        if (!list)
            return NULL; /* tried again in a second */
        element = rd_kafka_topic_partition_list_add(list, partition->topic,
                                                    partition->id);
        element->offset = (int64_t)mark;
        partition->asked = (int64_t)mark;
    }
    return list;
}

static void
take_answer(struct ns_kafka_source *kafka, rd_kafka_resp_err_t code,
            const rd_kafka_topic_partition_list_t *list)
{
    bool failed = code != RD_KAFKA_RESP_ERR_NO_ERROR;

    for (int i = 0; list && i < list->cnt; i++) {
        const rd_kafka_topic_partition_t *element = &list->elems[i];
        struct partition *partition =
            find(kafka, element->topic, element->partition);

        if (!partition || !partition->queue ||
            partition->asked != element->offset)
            continue; /* of an assignment that is over */
        if (failed || element->err != RD_KAFKA_RESP_ERR_NO_ERROR) {
            partition->stored = -1; /* not known, so sent again */
            failed = true;
            if (code == RD_KAFKA_RESP_ERR_NO_ERROR)
                code = element->err;
        } else {
            partition->stored = element->offset;
        }
    }
    if (!failed) {
        kafka->commits++;
        end_trouble(kafka, AWAY);
        return;
    }
    kafka->commit_failures++;
    ns_log_info("kafka.store_failed", "error=\"%s\"", rd_kafka_err2str(code));
    take_error(kafka, code, rd_kafka_err2str(code));
}

static void
on_stored(rd_kafka_t *client, rd_kafka_resp_err_t code,
          rd_kafka_topic_partition_list_t *list, void *data)
{
    struct ns_kafka_source *kafka = data;

    (void)client;
    kafka->storing_since_ms = 0;
    if (code != RD_KAFKA_RESP_ERR__NO_OFFSET)
        take_answer(kafka, code, list);
}

/* One at a time: a slow broker is not given more to do. */
static void
store(struct ns_kafka_source *kafka, int64_t now_ms)
{
    rd_kafka_topic_partition_list_t *list;

    if (now_ms < kafka->store_at_ms ||
        (kafka->storing_since_ms &&
         now_ms - kafka->storing_since_ms < STORE_LOST_MS))
        return;
    kafka->store_at_ms = now_ms + STORE_MS;
    list = moved(kafka, NULL);
    if (!list)
        return;
    /* An explicit list: without one the client stores what it likes. */
    if (rd_kafka_commit(kafka->client, list, 1) == RD_KAFKA_RESP_ERR_NO_ERROR)
        kafka->storing_since_ms = now_ms;
    rd_kafka_topic_partition_list_destroy(list);
}

/* The last word before partitions leave: waited for, though not long. What is
 * not stored now is handed out again, and met by the store as a duplicate. */
static void
store_now(struct ns_kafka_source *kafka,
          const rd_kafka_topic_partition_list_t *among)
{
    rd_kafka_topic_partition_list_t *list = moved(kafka, among);
    rd_kafka_event_t *event = NULL;
    rd_kafka_queue_t *queue;

    if (!list)
        return;
    queue = rd_kafka_queue_new(kafka->client);
    if (queue && rd_kafka_commit_queue(kafka->client, list, queue, NULL,
                                       NULL) == RD_KAFKA_RESP_ERR_NO_ERROR)
        event = rd_kafka_queue_poll(queue, kafka->reached ? 2 * ASK_MS
                                                          : CLOSE_AWAY_MS);
    if (event &&
        rd_kafka_event_type(event) == RD_KAFKA_EVENT_OFFSET_COMMIT)
        take_answer(kafka, rd_kafka_event_error(event),
                    rd_kafka_event_topic_partition_list(event));
    if (event)
        rd_kafka_event_destroy(event);
    if (queue)
        rd_kafka_queue_destroy(queue);
    rd_kafka_topic_partition_list_destroy(list);
}

/* --- rebalances -------------------------------------------------------- */

/* Each way through answers the client, or it waits for ever. */
static void
on_rebalance(rd_kafka_t *client, rd_kafka_resp_err_t code,
             rd_kafka_topic_partition_list_t *list, void *data)
{
    struct ns_kafka_source *kafka = data;
    rd_kafka_error_t *error = NULL;
    bool lost = false;

    kafka->rebalances++;
    if (code == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS) {
        take(kafka, list);
        if (kafka->cooperative)
            error = rd_kafka_incremental_assign(client, list);
        else
            code = rd_kafka_assign(client, list);
        kafka->joined = true;
        end_trouble(kafka, list->cnt > 0 ? TOPIC : AWAY);
        ns_log_info("kafka.assigned", "partitions=%d", list->cnt);
    } else {
        lost = rd_kafka_assignment_lost(client);
        if (!lost && code == RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS)
            store_now(kafka, list);
        give_up(kafka, list);
        if (code != RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS)
            ns_log_warn("kafka.rebalance_failed", "error=\"%s\"",
                        rd_kafka_err2str(code));
        if (kafka->cooperative)
            error = rd_kafka_incremental_unassign(client, list);
        else
            code = rd_kafka_assign(client, NULL);
        ns_log_info("kafka.revoked", "partitions=%d lost=%d", list->cnt, lost);
    }
    if (error) {
        warn(kafka, rd_kafka_error_string(error));
        rd_kafka_error_destroy(error);
    } else if (!kafka->cooperative && code != RD_KAFKA_RESP_ERR_NO_ERROR) {
        warn(kafka, rd_kafka_err2str(code));
    }
}

/* --- tending ----------------------------------------------------------- */

/* What comes by the consumer's own queue: errors, and no messages. */
static void
take_event(struct ns_kafka_source *kafka, const rd_kafka_message_t *message)
{
    const char *text = rd_kafka_message_errstr(message);

    if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
        /* To pass over it would be to lose it: its offset would be stored
         * with those behind it. */
        fail(kafka, NULL, "a message came past its partition's queue");
    } else if (message->err != RD_KAFKA_RESP_ERR__PARTITION_EOF) {
        take_error(kafka, message->err, text ? text : "error without a text");
    }
}

static enum ns_status
tend(struct ns_source *source, struct ns_error *err)
{
    struct ns_kafka_source *kafka = (struct ns_kafka_source *)source;
    int64_t now_ms = ns_kafka_now_ms();
    rd_kafka_message_t *message;

    if (now_ms - kafka->tended_ms >= TEND_MS) {
        kafka->tended_ms = now_ms;
        for (int i = 0; i < EVENTS_A_TEND; i++) {
            message = rd_kafka_consumer_poll(kafka->client, 0);
            if (!message)
                break;
            take_event(kafka, message);
            rd_kafka_message_destroy(message);
        }
        store(kafka, now_ms);
    }
    if (kafka->failure.status != NS_OK) {
        *err = kafka->failure;
        return kafka->failure.status;
    }
    return NS_OK;
}

/* --- messages ---------------------------------------------------------- */

/* A jump in the offsets is normal (compaction, markers of transactions), but
 * not when the log now begins behind what we had still to read. */
static void
check_gap(struct ns_kafka_source *kafka, struct partition *partition,
          uint64_t expected, uint64_t offset)
{
    int64_t now_ms = ns_kafka_now_ms(), low = 0, high = 0;
    uint64_t lost;

    if (partition->gap_checked_ms &&
        now_ms - partition->gap_checked_ms < GAP_CHECK_MS)
        return;
    partition->gap_checked_ms = now_ms;
    if (rd_kafka_query_watermark_offsets(kafka->client, partition->topic,
                                         partition->id, &low, &high,
                                         ASK_MS) !=
            RD_KAFKA_RESP_ERR_NO_ERROR || low < 0 ||
        (uint64_t)low <= expected)
        return;
    /* The log may have moved on since: what we did read is not lost. */
    lost = ((uint64_t)low < offset ? (uint64_t)low : offset) - expected;
    kafka->gap += lost;
    ns_log_error("kafka.gap", "partition=%s from=%" PRIu64 " messages=%" PRIu64
                 " lost=retention", partition->origin, expected, lost);
}

static enum ns_status
begin_ledger(struct ns_kafka_source *kafka, struct partition *partition,
             uint64_t offset, struct ns_error *err)
{
    enum ns_status status;

    status = ns_ledger_create(kafka->options.span, offset, &partition->ledger,
                              err);
    if (status == NS_OK)
        partition->first = partition->next = offset;
    return status;
}

/* Notes the message as handed out. */
static enum ns_status
receive(struct ns_kafka_source *kafka, struct partition *partition,
        uint64_t offset, struct ns_error *err)
{
    int64_t expected = partition->ledger ? (int64_t)partition->next
                                         : partition->stored;
    enum ns_status status;

    if (expected >= 0 && offset > (uint64_t)expected)
        check_gap(kafka, partition, (uint64_t)expected, offset);
    if (expected >= 0 && offset < (uint64_t)expected) {
        /* The topic was made anew, or someone set the group back. What ran
         * until now keeps its results; its offsets mean nothing here. */
        kafka->rewinds++;
        ns_log_warn("kafka.rewound", "partition=%s from=%" PRId64
                    " to=%" PRIu64, partition->origin, expected, offset);
        forget(kafka, partition);
    }
    if (!partition->ledger) {
        status = begin_ledger(kafka, partition, offset, err);
        if (status != NS_OK)
            return status;
    }
    if (!ns_ledger_receive(partition->ledger, offset))
        return ns_fail(err, NS_FATAL, "%s: offset %" PRIu64
                       " has no room in its ledger", partition->origin,
                       offset);
    if (ns_ledger_in_flight(partition->ledger) == 1)
        partition->head_since_ms = ns_kafka_now_ms();
    partition->next = offset + 1;
    kafka->in_flight++;
    return NS_OK;
}

/* The next message of any partition with room, in turn. */
static rd_kafka_message_t *
next_message(struct ns_kafka_source *kafka, uint32_t *index)
{
    for (uint32_t i = 0; i < kafka->n_partitions; i++) {
        uint32_t at = (kafka->turn + i) % kafka->n_partitions;
        struct partition *partition = kafka->partition[at];
        rd_kafka_message_t *message;

        if (!partition->queue ||
            (partition->ledger && !ns_ledger_has_room(partition->ledger)))
            continue;
        message = rd_kafka_consume_queue(partition->queue, 0);
        if (!message)
            continue;
        if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
            kafka->turn = at + 1;
            *index = at;
            return message;
        }
        take_event(kafka, message);
        rd_kafka_message_destroy(message);
    }
    return NULL;
}

static enum ns_status
poll_once(struct ns_kafka_source *kafka, struct ns_message *out,
          struct ns_error *err)
{
    struct partition *partition;
    enum ns_status status;
    uint32_t index = 0;

    if (kafka->message)
        rd_kafka_message_destroy(kafka->message);
    kafka->message = NULL;
    *out = (struct ns_message){ .kind = NS_MESSAGE_NONE };
    status = tend(&kafka->source, err);
    if (status != NS_OK || kafka->in_flight >= kafka->options.window)
        return status;
    kafka->message = next_message(kafka, &index);
    if (!kafka->message)
        return NS_OK;
    partition = kafka->partition[index];
    status = ns_kafka_read(&kafka->reader, &kafka->options, kafka->message, out,
                           err);
    if (status == NS_OK)
        status = receive(kafka, partition, (uint64_t)kafka->message->offset,
                         err);
    if (status != NS_OK) {
        /* It is out of its queue, so nothing behind it may be handed out. */
        fail(kafka, err->code, err->text);
        return kafka->failure.status;
    }
    out->position = (struct ns_position){
        .partition = index,
        .epoch = partition->epoch,
        .offset = (uint64_t)kafka->message->offset,
    };
    out->origin = partition->origin;
    return NS_OK;
}

static enum ns_status
poll_source(struct ns_source *source, int timeout_ms, struct ns_message *out,
            struct ns_error *err)
{
    const struct timespec slice = { .tv_nsec = TEND_MS * 1000000 };
    int64_t until = ns_kafka_now_ms() + timeout_ms;
    enum ns_status status;

    /* Partitions come and go in tend, so no one queue can be slept on. */
    while ((status = poll_once((struct ns_kafka_source *)source, out, err)) ==
               NS_OK && out->kind == NS_MESSAGE_NONE &&
           ns_kafka_now_ms() < until)
        nanosleep(&slice, NULL);
    return status;
}

static struct partition *
owned(const struct ns_kafka_source *kafka, struct ns_position position)
{
    struct partition *partition;

    if (position.partition >= kafka->n_partitions)
        return NULL;
    partition = kafka->partition[position.partition];
    return partition->queue && partition->epoch == position.epoch ? partition
                                                                  : NULL;
}

static void
acknowledge(struct ns_source *source, struct ns_position position)
{
    struct ns_kafka_source *kafka = (struct ns_kafka_source *)source;
    struct partition *partition = owned(kafka, position);
    uint64_t head;

    if (!partition || !partition->ledger)
        return;
    head = ns_ledger_watermark(partition->ledger);
    if (!ns_ledger_done(partition->ledger, position.offset))
        return;
    kafka->in_flight--;
    if (ns_ledger_watermark(partition->ledger) != head)
        partition->head_since_ms = ns_kafka_now_ms();
}

static bool
owns(const struct ns_source *source, struct ns_position position)
{
    return owned((const struct ns_kafka_source *)source, position) != NULL;
}

/* Asks nobody: the log's end is what the last fetch told. */
static struct ns_kafka_partition
look_at(const struct ns_kafka_source *kafka, const struct partition *partition)
{
    struct ns_kafka_partition out = { .id = partition->id };
    int64_t low, high, at = partition->stored;

    snprintf(out.topic, sizeof(out.topic), "%s", partition->topic);
    if (partition->ledger) {
        at = (int64_t)ns_ledger_watermark(partition->ledger);
        if (ns_ledger_in_flight(partition->ledger) > 0)
            out.head_ms = ns_kafka_now_ms() - partition->head_since_ms;
    }
    if (at >= 0 &&
        rd_kafka_get_watermark_offsets(kafka->client, partition->topic,
                                       partition->id, &low, &high) ==
            RD_KAFKA_RESP_ERR_NO_ERROR && high > at)
        out.lag = (uint64_t)(high - at);
    return out;
}

struct ns_kafka_state
ns_kafka_source_state(const struct ns_kafka_source *kafka)
{
    struct ns_kafka_state state = {
        .reached = kafka->reached,
        .in_flight = kafka->in_flight,
        .gap = kafka->gap,
        .rebalances = kafka->rebalances,
        .commits = kafka->commits,
        .commit_failures = kafka->commit_failures,
        .rewinds = kafka->rewinds,
        .trouble = kafka->trouble ? kafka->trouble_text : NULL,
    };

    for (uint32_t i = 0; i < kafka->n_partitions; i++) {
        struct ns_kafka_partition one;

        if (!kafka->partition[i]->queue)
            continue;
        one = look_at(kafka, kafka->partition[i]);
        state.n_partitions++;
        state.lag += one.lag;
        if (one.head_ms > state.head_ms)
            state.head_ms = one.head_ms;
        if (state.n_shown < NS_KAFKA_SHOWN)
            state.shown[state.n_shown++] = one;
    }
    if (!kafka->joined && !state.trouble)
        state.trouble = "not in the group yet";
    state.ready = !state.trouble;
    return state;
}

/* --- open and close ---------------------------------------------------- */

static void
source_close(struct ns_source *source)
{
    ns_kafka_source_close((struct ns_kafka_source *)source);
}

static const struct ns_source_ops ops = {
    .name = "kafka",
    .poll = poll_source,
    .acknowledge = acknowledge,
    .close = source_close,
    .tend = tend,
    .owns = owns,
};

static enum ns_status
subscribe(struct ns_kafka_source *kafka, const char *topics,
          struct ns_error *err)
{
    rd_kafka_topic_partition_list_t *list =
        rd_kafka_topic_partition_list_new(4);
    char *copy = strdup(topics ? topics : ""), *rest = NULL;
    rd_kafka_resp_err_t code = RD_KAFKA_RESP_ERR_NO_ERROR;
    enum ns_status status = NS_OK;

    if (!list || !copy) {
        status = ns_fail(err, NS_FATAL, "out of memory for the topics");
        goto out;
    }
    for (char *name = strtok_r(copy, ", \t", &rest); name;
         name = strtok_r(NULL, ", \t", &rest))
        rd_kafka_topic_partition_list_add(list, name, RD_KAFKA_PARTITION_UA);
    if (list->cnt == 0)
        status = ns_fail(err, NS_REJECT, "no topic: set intake.topics");
    else
        code = rd_kafka_subscribe(kafka->client, list);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
        status = ns_fail(err, NS_REJECT, "topics \"%.200s\": %s", topics,
                         rd_kafka_err2str(code));
out:
    free(copy);
    if (list)
        rd_kafka_topic_partition_list_destroy(list);
    return status;
}

static enum ns_status
start(struct ns_kafka_source *kafka, const struct ns_kafka_options *options,
      struct ns_error *err)
{
    rd_kafka_conf_t *conf = NULL;
    char why[256], assignors[256];
    size_t size = sizeof(assignors);
    enum ns_status status;

    status = ns_kafka_conf(options, RD_KAFKA_CONSUMER, &conf, err);
    if (status != NS_OK)
        return status;
    if (rd_kafka_conf_get(conf, "partition.assignment.strategy", assignors,
                          &size) == RD_KAFKA_CONF_OK)
        kafka->cooperative = strstr(assignors, "cooperative") != NULL;
    rd_kafka_conf_set_opaque(conf, kafka);
    rd_kafka_conf_set_rebalance_cb(conf, on_rebalance);
    rd_kafka_conf_set_offset_commit_cb(conf, on_stored);
    rd_kafka_conf_set_error_cb(conf, on_error);
    rd_kafka_conf_set_stats_cb(conf, on_statistics);
    rd_kafka_conf_set_log_cb(conf, on_log);
    kafka->client = rd_kafka_new(RD_KAFKA_CONSUMER, conf, why, sizeof(why));
    if (!kafka->client) {
        rd_kafka_conf_destroy(conf);
        return ns_fail(err, NS_REJECT, "kafka: %s", why);
    }
    rd_kafka_poll_set_consumer(kafka->client);
    return subscribe(kafka, options->topics, err);
}

enum ns_status
ns_kafka_source_open(const struct ns_kafka_options *options,
                     struct ns_kafka_source **out, struct ns_error *err)
{
    struct ns_kafka_source *kafka = calloc(1, sizeof(*kafka));
    enum ns_status status;

    if (!kafka)
        return ns_fail(err, NS_FATAL, "out of memory for a source");
    kafka->source.ops = &ops;
    kafka->options = *options;
    kafka->options.settings = NULL; /* borrowed during open alone */
    kafka->options.topics = NULL;
    kafka->options.id_from = NULL;
    if (kafka->options.window == 0)
        kafka->options.window = DEFAULT_WINDOW;
    if (kafka->options.span == 0)
        kafka->options.span = DEFAULT_SPAN;
    if (options->id_from) {
        kafka->options.id_from = kafka->id_from = strdup(options->id_from);
        if (!kafka->id_from) {
            status = ns_fail(err, NS_FATAL, "out of memory for a source");
            goto out;
        }
    }
    status = ns_kafka_reader_init(&kafka->reader, err);
    if (status == NS_OK)
        status = start(kafka, options, err);
    if (status != NS_OK)
        goto out;
    *out = kafka;
    kafka = NULL;
out:
    ns_kafka_source_close(kafka);
    return status;
}

struct ns_source *
ns_kafka_source(struct ns_kafka_source *kafka)
{
    return &kafka->source;
}

/* Leaving in order gives the partitions to others at once instead of after the
 * session's time. Nothing depends on it, so it is not waited for long. */
static void
leave(struct ns_kafka_source *kafka)
{
    rd_kafka_queue_t *queue = rd_kafka_queue_new(kafka->client);
    int64_t until = ns_kafka_now_ms() +
                    (kafka->reached ? CLOSE_MS : CLOSE_AWAY_MS);
    rd_kafka_error_t *error;

    if (!queue)
        return;
    error = rd_kafka_consumer_close_queue(kafka->client, queue);
    while (!error && !rd_kafka_consumer_closed(kafka->client) &&
           ns_kafka_now_ms() < until)
        rd_kafka_queue_poll_callback(queue, 20);
    if (error)
        rd_kafka_error_destroy(error);
    else if (!rd_kafka_consumer_closed(kafka->client))
        ns_log_warn("kafka.left", "%s", "the group was not left in time");
    rd_kafka_queue_destroy(queue);
}

void
ns_kafka_source_close(struct ns_kafka_source *kafka)
{
    if (!kafka)
        return;
    if (kafka->message) /* its reference would keep the client alive */
        rd_kafka_message_destroy(kafka->message);
    kafka->message = NULL;
    if (kafka->client && kafka->failure.status == NS_OK)
        leave(kafka);
    for (uint32_t i = 0; i < kafka->n_partitions; i++)
        partition_destroy(kafka->partition[i]);
    ns_kafka_end(kafka->client, END_MS);
    free(kafka->partition);
    ns_kafka_reader_fini(&kafka->reader);
    free(kafka->id_from);
    free(kafka);
}
