/* The producing end: what submit sends, and copies of what was stored. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/kafka_private.h"

enum { FULL_SLICE_MS = 20, END_MS = 2000 };

struct ns_kafka_producer {
    rd_kafka_t *client;
    uint64_t delivered, failed;
    char why[300];
    struct ns_error failure; /* status NS_OK: none */
};

static void
on_delivery(rd_kafka_t *client, const rd_kafka_message_t *message, void *data)
{
    struct ns_kafka_producer *producer = data;

    (void)client;
    if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR) {
        producer->delivered++;
        return;
    }
    if (producer->failed++ == 0)
        snprintf(producer->why, sizeof(producer->why), "%s",
                 rd_kafka_err2str(message->err));
}

static void
on_error(rd_kafka_t *client, int code, const char *text, void *data)
{
    struct ns_kafka_producer *producer = data;
    char why[300];

    if (code == RD_KAFKA_RESP_ERR__FATAL)
        rd_kafka_fatal_error(client, why, sizeof(why));
    else
        snprintf(why, sizeof(why), "%s", text);
    if (producer->failure.status == NS_OK &&
        (code == RD_KAFKA_RESP_ERR__FATAL ||
         ns_kafka_is_refusal((rd_kafka_resp_err_t)code))) {
        ns_fail(&producer->failure, NS_FATAL, "kafka: %s", why);
        producer->failure.code = code == RD_KAFKA_RESP_ERR__FATAL
                                     ? NULL : "not_allowed";
    }
    ns_log_warn("kafka.trouble", "producer=1 error=\"%s\"", why);
}

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

enum ns_status
ns_kafka_producer_open(const struct ns_kafka_options *options,
                       struct ns_kafka_producer **out, struct ns_error *err)
{
    struct ns_kafka_producer *producer = calloc(1, sizeof(*producer));
    rd_kafka_conf_t *conf = NULL;
    enum ns_status status;
    char why[256];

    if (!producer)
        return ns_fail(err, NS_FATAL, "out of memory for a producer");
    status = ns_kafka_conf(options, RD_KAFKA_PRODUCER, &conf, err);
    if (status != NS_OK)
        goto out;
    rd_kafka_conf_set_opaque(conf, producer);
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_conf_set_error_cb(conf, on_error);
    rd_kafka_conf_set_log_cb(conf, on_log);
    producer->client = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
    if (!producer->client) {
        rd_kafka_conf_destroy(conf);
        status = ns_fail(err, NS_REJECT, "kafka: %s", why);
        goto out;
    }
    *out = producer;
    producer = NULL;
out:
    ns_kafka_producer_close(producer);
    return status;
}

static rd_kafka_headers_t *
make_headers(const struct ns_kafka_header *headers, size_t n)
{
    rd_kafka_headers_t *list = rd_kafka_headers_new(n);

    for (size_t i = 0; list && i < n; i++)
        if (headers[i].value)
            rd_kafka_header_add(list, headers[i].name, -1, headers[i].value,
                                -1);
    return list;
}

enum ns_status
ns_kafka_produce(struct ns_kafka_producer *producer, const char *topic,
                 const char *key, const void *bytes, size_t length,
                 const struct ns_kafka_header *headers, size_t n_headers,
                 int wait_ms, struct ns_error *err)
{
    int64_t until = ns_kafka_now_ms() + wait_ms;
    rd_kafka_resp_err_t code;
    rd_kafka_headers_t *list;

    for (;;) {
        rd_kafka_poll(producer->client, 0); /* reports of delivery */
        if (producer->failure.status != NS_OK) {
            *err = producer->failure;
            return producer->failure.status;
        }
        list = make_headers(headers, n_headers);
        if (!list)
            return ns_fail(err, NS_FATAL, "out of memory for headers");
        code = rd_kafka_producev(
            producer->client, RD_KAFKA_V_TOPIC(topic),
            RD_KAFKA_V_KEY(key, key ? strlen(key) : 0),
            RD_KAFKA_V_VALUE((void *)bytes, length),
            RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
            RD_KAFKA_V_HEADERS(list), RD_KAFKA_V_END);
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR)
            return NS_OK;
        rd_kafka_headers_destroy(list); /* taken over on success alone */
        if (code != RD_KAFKA_RESP_ERR__QUEUE_FULL)
            return ns_fail(err, NS_REJECT, "topic %.100s: %s (%zu bytes)",
                           topic, rd_kafka_err2str(code), length);
        if (ns_kafka_now_ms() >= until)
            return ns_fail(err, NS_RETRY, "topic %.100s: %s", topic,
                           rd_kafka_err2str(code));
        rd_kafka_poll(producer->client, FULL_SLICE_MS);
    }
}

enum ns_status
ns_kafka_flush(struct ns_kafka_producer *producer, int wait_ms,
               struct ns_error *err)
{
    int64_t until = ns_kafka_now_ms() + wait_ms;
    int left;

    do {
        rd_kafka_flush(producer->client, FULL_SLICE_MS);
        left = rd_kafka_outq_len(producer->client);
        if (producer->failure.status != NS_OK) {
            *err = producer->failure;
            return producer->failure.status;
        }
    } while (left > 0 && ns_kafka_now_ms() < until);
    if (left > 0)
        return ns_fail(err, NS_RETRY, "%d messages were not delivered in "
                       "%d s", left, wait_ms / 1000);
    return NS_OK;
}

struct ns_kafka_sent
ns_kafka_producer_sent(const struct ns_kafka_producer *producer)
{
    return (struct ns_kafka_sent){ producer->delivered, producer->failed,
                                   producer->failed ? producer->why : NULL };
}

void
ns_kafka_producer_close(struct ns_kafka_producer *producer)
{
    if (!producer)
        return;
    if (producer->client) /* no report may come when we are gone */
        rd_kafka_purge(producer->client,
                       RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_INFLIGHT);
    if (producer->client)
        rd_kafka_poll(producer->client, 0);
    ns_kafka_end(producer->client, END_MS);
    free(producer);
}
