/* For how long topics keep their messages. */
#include <stdlib.h>
#include <string.h>

#include "connectors/kafka_private.h"

enum { ANSWER_MS = 30000, END_MS = 5000 };

/* Of one topic; INT64_MAX: for ever. */
static enum ns_status
read_answer(const rd_kafka_ConfigResource_t *resource, int64_t *out_ms,
            struct ns_error *err)
{
    const rd_kafka_ConfigEntry_t **entries;
    size_t n = 0;

    if (rd_kafka_ConfigResource_error(resource) != RD_KAFKA_RESP_ERR_NO_ERROR)
        return ns_fail(err, NS_RETRY, "topic %.100s: %s",
                       rd_kafka_ConfigResource_name(resource),
                       rd_kafka_err2str(
                           rd_kafka_ConfigResource_error(resource)));
    entries = rd_kafka_ConfigResource_configs(resource, &n);
    for (size_t i = 0; i < n; i++) {
        const char *name = rd_kafka_ConfigEntry_name(entries[i]);
        const char *value = rd_kafka_ConfigEntry_value(entries[i]);

        if (!value)
            continue;
        if (strcmp(name, "cleanup.policy") == 0 && !strstr(value, "delete"))
            *out_ms = INT64_MAX; /* compacted: the last of a key stays */
        if (strcmp(name, "retention.ms") == 0) {
            int64_t ms = strtoll(value, NULL, 10);

            if (ms < 0 || ms > *out_ms)
                *out_ms = ms < 0 ? INT64_MAX : ms;
        }
    }
    return NS_OK;
}

static enum ns_status
ask(rd_kafka_t *client, const char *topic, int64_t *out_ms,
    struct ns_error *err)
{
    rd_kafka_ConfigResource_t *resource =
        rd_kafka_ConfigResource_new(RD_KAFKA_RESOURCE_TOPIC, topic);
    rd_kafka_queue_t *queue = rd_kafka_queue_new(client);
    const rd_kafka_ConfigResource_t **found;
    enum ns_status status = NS_OK;
    rd_kafka_event_t *event;
    size_t n = 0;

    rd_kafka_DescribeConfigs(client, &resource, 1, NULL, queue);
    event = rd_kafka_queue_poll(queue, ANSWER_MS);
    if (!event || rd_kafka_event_error(event) != RD_KAFKA_RESP_ERR_NO_ERROR) {
        status = ns_fail(err, NS_RETRY, "kafka: the retention of %.100s is not "
                         "known: %s", topic,
                         event ? rd_kafka_event_error_string(event)
                               : "no answer");
    } else {
        found = rd_kafka_DescribeConfigs_result_resources(
            rd_kafka_event_DescribeConfigs_result(event), &n);
        if (n != 1)
            status = ns_fail(err, NS_RETRY, "kafka: no answer about %.100s",
                             topic);
        else
            status = read_answer(found[0], out_ms, err);
    }
    if (event)
        rd_kafka_event_destroy(event);
    rd_kafka_queue_destroy(queue);
    rd_kafka_ConfigResource_destroy(resource);
    return status;
}

enum ns_status
ns_kafka_retention(const struct ns_kafka_options *options, int64_t *out_ms,
                   struct ns_error *err)
{
    char *topics = strdup(options->topics), *rest, why[256];
    rd_kafka_conf_t *conf = NULL;
    rd_kafka_t *client = NULL;
    enum ns_status status;

    *out_ms = 0;
    if (!topics)
        return ns_fail(err, NS_FATAL, "out of memory for topics");
    status = ns_kafka_conf(options, RD_KAFKA_PRODUCER, &conf, err);
    if (status != NS_OK)
        goto out;
    rd_kafka_conf_set_log_cb(conf, NULL);
    client = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
    if (!client) {
        rd_kafka_conf_destroy(conf);
        status = ns_fail(err, NS_REJECT, "kafka: %s", why);
        goto out;
    }
    for (char *topic = strtok_r(topics, ", \t", &rest);
         topic && status == NS_OK; topic = strtok_r(NULL, ", \t", &rest))
        status = *topic == '^'
                     ? ns_fail(err, NS_REJECT, "%.100s: the retention of a "
                               "pattern can not be asked for", topic)
                     : ask(client, topic, out_ms, err);
out:
    ns_kafka_end(client, END_MS);
    free(topics);
    return status;
}
