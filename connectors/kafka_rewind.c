/* A group's positions taken back to a time, while no member of it is there. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/kafka_private.h"

enum { ANSWER_MS = 30000, END_MS = 5000 };

static enum ns_status
fail(struct ns_error *err, const char *what, rd_kafka_resp_err_t code)
{
    enum ns_status status =
        ns_fail(err, ns_kafka_is_refusal(code) ? NS_REJECT : NS_RETRY,
                "kafka: %s: %s", what, rd_kafka_err2str(code));

    if (status == NS_REJECT)
        err->code = "not_allowed";
    return status;
}

/* All partitions of one topic. */
static enum ns_status
add_topic(rd_kafka_t *client, const char *topic, int64_t since_ms,
          rd_kafka_topic_partition_list_t *list, struct ns_error *err)
{
    rd_kafka_topic_t *handle = rd_kafka_topic_new(client, topic, NULL);
    const struct rd_kafka_metadata *metadata = NULL;
    rd_kafka_resp_err_t code = RD_KAFKA_RESP_ERR__FAIL;

    if (!handle)
        return ns_fail(err, NS_FATAL, "topic %.100s: %s", topic,
                       rd_kafka_err2str(rd_kafka_last_error()));
    code = rd_kafka_metadata(client, 0, handle, &metadata, ANSWER_MS);
    rd_kafka_topic_destroy(handle);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR && metadata->topic_cnt == 1)
        code = metadata->topics[0].err;
    for (int i = 0; code == RD_KAFKA_RESP_ERR_NO_ERROR &&
                    i < metadata->topics[0].partition_cnt; i++)
        rd_kafka_topic_partition_list_add(
            list, topic, metadata->topics[0].partitions[i].id)
            ->offset = since_ms;
    if (metadata)
        rd_kafka_metadata_destroy(metadata);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? NS_OK : fail(err, topic, code);
}

static enum ns_status
add_topics(rd_kafka_t *client, const char *topics, int64_t since_ms,
           rd_kafka_topic_partition_list_t *list, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    char *copy = strdup(topics), *rest;

    if (!copy)
        return ns_fail(err, NS_FATAL, "out of memory for topics");
    for (char *topic = strtok_r(copy, ", \t", &rest);
         topic && status == NS_OK; topic = strtok_r(NULL, ", \t", &rest))
        status = *topic == '^'
                     ? ns_fail(err, NS_REJECT, "%.100s: give the topics "
                               "themselves, not a pattern", topic)
                     : add_topic(client, topic, since_ms, list, err);
    free(copy);
    return status;
}

/* Only back: what was not read yet is not to be left out. `list` holds the
 * places of that time, from here on those that are further back than what the
 * group has. */
static enum ns_status
keep_earlier(rd_kafka_t *client, rd_kafka_topic_partition_list_t *list,
             ns_kafka_rewound visit, void *context, struct ns_error *err)
{
    rd_kafka_topic_partition_list_t *now =
        rd_kafka_topic_partition_list_copy(list);
    rd_kafka_resp_err_t code = rd_kafka_committed(client, now, ANSWER_MS);

    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) {
        rd_kafka_topic_partition_list_destroy(now);
        return fail(err, "the group's positions", code);
    }
    for (int i = now->cnt - 1; i >= 0; i--) {
        int64_t to = list->elems[i].offset, from = now->elems[i].offset;

        if (to < 0 || from < 0 || to >= from)
            rd_kafka_topic_partition_list_del_by_idx(list, i);
        else if (visit)
            visit(context, list->elems[i].topic, list->elems[i].partition,
                  from, to);
    }
    rd_kafka_topic_partition_list_destroy(now);
    return NS_OK;
}

static enum ns_status
store(rd_kafka_t *client, const rd_kafka_topic_partition_list_t *list,
      struct ns_error *err)
{
    rd_kafka_queue_t *queue = rd_kafka_queue_new(client);
    rd_kafka_resp_err_t code =
        rd_kafka_commit_queue(client, list, queue, NULL, NULL);
    rd_kafka_event_t *event;

    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        event = rd_kafka_queue_poll(queue, ANSWER_MS);
        code = event ? rd_kafka_event_error(event)
                     : RD_KAFKA_RESP_ERR__TIMED_OUT;
        if (event)
            rd_kafka_event_destroy(event);
    }
    rd_kafka_queue_destroy(queue);
    switch ((int)code) {
    case RD_KAFKA_RESP_ERR_NO_ERROR:
        return NS_OK;
    case RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID:
    case RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION:
    case RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS:
        ns_fail(err, NS_RETRY, "daemons of the group are running: stop them, "
                "take it back, and start them again");
        return NS_RETRY;
    default:
        return fail(err, "storing positions", code);
    }
}

static enum ns_status
rewind_group(rd_kafka_t *client, const char *topics, int64_t since_ms,
             ns_kafka_rewound visit, void *context, struct ns_error *err)
{
    rd_kafka_topic_partition_list_t *list =
        rd_kafka_topic_partition_list_new(16);
    rd_kafka_resp_err_t code;
    enum ns_status status;

    status = add_topics(client, topics, since_ms, list, err);
    if (status == NS_OK) {
        code = rd_kafka_offsets_for_times(client, list, ANSWER_MS);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
            status = fail(err, "looking for the time", code);
    }
    if (status == NS_OK)
        status = keep_earlier(client, list, visit, context, err);
    if (status == NS_OK && list->cnt > 0)
        status = store(client, list, err);
    rd_kafka_topic_partition_list_destroy(list);
    return status;
}

enum ns_status
ns_kafka_rewind(const struct ns_kafka_options *options, int64_t since_ms,
                ns_kafka_rewound visit, void *context, struct ns_error *err)
{
    rd_kafka_conf_t *conf = NULL;
    enum ns_status status;
    rd_kafka_t *client;
    char why[256];

    status = ns_kafka_conf(options, RD_KAFKA_CONSUMER, &conf, err);
    if (status != NS_OK)
        return status;
    rd_kafka_conf_set_log_cb(conf, NULL);
    client = rd_kafka_new(RD_KAFKA_CONSUMER, conf, why, sizeof(why));
    if (!client) {
        rd_kafka_conf_destroy(conf);
        return ns_fail(err, NS_REJECT, "kafka: %s", why);
    }
    status = rewind_group(client, options->topics, since_ms, visit, context,
                          err);
    ns_kafka_end(client, END_MS);
    return status;
}
