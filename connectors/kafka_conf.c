/* Settings: ours, then the operator's, then what must hold whatever he says. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/log.h"
#include "connectors/kafka_private.h"
#include "connectors/secret.h"

/* clang-format off */
static const struct ns_kafka_setting for_both[] = {
    { "client.id",                          "nightshift" },
    { "socket.keepalive.enable",            "true" },
    { "topic.metadata.refresh.interval.ms", "30000" },
    { "reconnect.backoff.max.ms",           "5000" },
    { "statistics.interval.ms",             "5000" }, /* says who is in reach */
};

static const struct ns_kafka_setting for_source[] = {
    { "group.id",                      "nightshift" },
    { "auto.offset.reset",             "earliest" }, /* latest would skip jobs */
    /* The cooperative assignors of librdkafka before 2.10 lose partitions when
     * positions are stored during a rebalance. A full rebalance costs a refetch
     * and no job, since running ones go on. */
    { "partition.assignment.strategy", "range" },
    /* Of each partition, which has a queue of its own: its share of memory. */
    { "queued.min.messages",           "1000" },
    { "queued.max.messages.kbytes",    "4096" },
};

static const struct ns_kafka_setting for_producer[] = {
    { "enable.idempotence", "true" },
    { "compression.type",   "lz4" },
    { "linger.ms",          "5" },
    { "partitioner",        "murmur2_random" }, /* as Java's: one id, one place */
};
/* clang-format on */

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

int64_t
ns_kafka_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static enum ns_status
set(rd_kafka_conf_t *conf, const char *key, const char *value,
    struct ns_error *err)
{
    char why[256];

    if (rd_kafka_conf_set(conf, key, value, why, sizeof(why)) ==
        RD_KAFKA_CONF_OK)
        return NS_OK;
    /* Its text quotes the value, which may be a secret, for some keys only:
     * those that are checked against a list. */
    return ns_fail(err, NS_REJECT, "kafka.%.80s: %s", key, why);
}

/* "@/path": the value is the first line of that file, a credential perhaps.
 * None of librdkafka's own values begins so. */
static enum ns_status
set_given(rd_kafka_conf_t *conf, const struct ns_kafka_setting *setting,
          struct ns_error *err)
{
    char secret[NS_SECRET_BYTES], name[96];
    enum ns_status status;

    if (strncmp(setting->value, "@/", 2) != 0)
        return set(conf, setting->key, setting->value, err);
    snprintf(name, sizeof(name), "kafka.%.80s", setting->key);
    status = ns_secret_read(setting->value + 1, name, secret, err);
    if (status != NS_OK)
        return status;
    status = set(conf, setting->key, secret, err);
    if (status != NS_OK) /* whatever librdkafka quotes of it */
        status = ns_fail(err, NS_REJECT, "%s: what %.200s holds is not a value "
                         "of it", name, setting->value + 1);
    explicit_bzero(secret, sizeof(secret));
    return status;
}

static enum ns_status
set_all(rd_kafka_conf_t *conf, const struct ns_kafka_setting *settings,
        size_t n, struct ns_error *err)
{
    enum ns_status status = NS_OK;

    for (size_t i = 0; i < n && status == NS_OK; i++)
        status = set_given(conf, &settings[i], err);
    return status;
}

static enum ns_status
check_refused(const struct ns_kafka_options *options, struct ns_error *err)
{
    static const char *const refused[] = {
        "enable.auto.commit", "enable.auto.offset.store",
        "auto.commit.enable", /* its alias */
    };

    for (size_t i = 0; i < options->n_settings; i++)
        for (size_t k = 0; k < COUNT(refused); k++)
            if (strcmp(options->settings[i].key, refused[k]) == 0)
                return ns_fail(err, NS_REJECT,
                               "kafka.%s is set by nightshift and not to be "
                               "given", refused[k]);
    return NS_OK;
}

static bool
is_here(const char *host, size_t length)
{
    return (length > 4 && strncmp(host, "127.", 4) == 0) ||
           (length == 9 && strncasecmp(host, "localhost", 9) == 0) ||
           (length == 5 && strncmp(host, "[::1]", 5) == 0) ||
           (length == 3 && strncmp(host, "::1", 3) == 0);
}

/* "PLAINTEXT://kafka:9092,127.0.0.1": each one's host. */
static enum ns_status
check_hosts(const char *list, struct ns_error *err)
{
    while (*list) {
        size_t length = strcspn(list, ","), host = length;
        const char *from = list, *scheme;

        while (host > 0 && *from == ' ') {
            from++;
            host--;
        }
        scheme = memmem(from, host, "://", 3);
        if (scheme) {
            host -= (size_t)(scheme + 3 - from);
            from = scheme + 3;
        }
        if (host > 0 && *from == '[')
            host = strcspn(from, "]") + 1;
        else if (memchr(from, ':', host))
            host = (size_t)((const char *)memchr(from, ':', host) - from);
        if (host > 0 && !is_here(from, host))
            return ns_fail(err, NS_REJECT,
                           "%.*s would be talked to in plain text: set "
                           "kafka.security.protocol to ssl or sasl_ssl, or "
                           "intake.allow_plaintext",
                           (int)(host < 200 ? host : 200), from);
        list += length;
        list += *list == ',';
    }
    return NS_OK;
}

static enum ns_status
check_network(const struct ns_kafka_options *options,
              const rd_kafka_conf_t *conf, struct ns_error *err)
{
    char value[4096];
    size_t size = sizeof(value);

    if (rd_kafka_conf_get(conf, "bootstrap.servers", value, &size) !=
            RD_KAFKA_CONF_OK || value[0] == '\0')
        return ns_fail(err, NS_REJECT, "kafka.bootstrap.servers is not set");
    if (options->allow_plaintext)
        return NS_OK;
    size = sizeof(value);
    if (rd_kafka_conf_get(conf, "security.protocol", value, &size) !=
        RD_KAFKA_CONF_OK)
        return ns_fail(err, NS_FATAL, "librdkafka has no security.protocol");
    if (strcasecmp(value, "plaintext") && strcasecmp(value, "sasl_plaintext"))
        return NS_OK;
    size = sizeof(value);
    if (rd_kafka_conf_get(conf, "bootstrap.servers", value, &size) !=
        RD_KAFKA_CONF_OK)
        return ns_fail(err, NS_REJECT, "kafka.bootstrap.servers is too long");
    return check_hosts(value, err);
}

enum ns_status
ns_kafka_conf(const struct ns_kafka_options *options, rd_kafka_type_t type,
              rd_kafka_conf_t **out, struct ns_error *err)
{
    bool produces = type == RD_KAFKA_PRODUCER;
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    enum ns_status status;
    char bytes[32];

    status = set_all(conf, for_both, COUNT(for_both), err);
    if (status == NS_OK)
        status = produces ? set_all(conf, for_producer, COUNT(for_producer), err)
                          : set_all(conf, for_source, COUNT(for_source), err);
    if (status == NS_OK && produces && options->max_message > 900000) {
        snprintf(bytes, sizeof(bytes), "%zu", options->max_message + 65536);
        status = set(conf, "message.max.bytes", bytes, err);
    }
    if (status == NS_OK)
        status = check_refused(options, err);
    if (status == NS_OK)
        status = set_all(conf, options->settings, options->n_settings, err);
    if (status == NS_OK)
        status = check_network(options, conf, err);
    if (status == NS_OK && !produces) {
        status = set(conf, "enable.auto.commit", "false", err);
        if (status == NS_OK)
            status = set(conf, "enable.auto.offset.store", "false", err);
    }
    if (status != NS_OK) {
        rd_kafka_conf_destroy(conf);
        return status;
    }
    *out = conf;
    return NS_OK;
}

enum ns_status
ns_kafka_check(const struct ns_kafka_options *options, struct ns_error *err)
{
    rd_kafka_conf_t *conf = NULL;
    enum ns_status status;
    char why[256];
    rd_kafka_t *client;

    status = ns_kafka_conf(options, options->topics ? RD_KAFKA_CONSUMER
                                                    : RD_KAFKA_PRODUCER,
                           &conf, err);
    if (status != NS_OK)
        return status;
    /* What keys say together (a certificate that can not be read, a mechanism
     * without its user) is judged only by making a client. */
    if (rd_kafka_conf_set(conf, "bootstrap.servers", "127.0.0.1:1", why,
                          sizeof(why)) != RD_KAFKA_CONF_OK) {
        rd_kafka_conf_destroy(conf);
        return ns_fail(err, NS_REJECT, "kafka: %s", why);
    }
    rd_kafka_conf_set_log_cb(conf, NULL);
    client = rd_kafka_new(options->topics ? RD_KAFKA_CONSUMER
                                          : RD_KAFKA_PRODUCER,
                          conf, why, sizeof(why));
    if (!client) {
        rd_kafka_conf_destroy(conf);
        return ns_fail(err, NS_REJECT, "kafka: %s", why);
    }
    rd_kafka_destroy_flags(client, RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE);
    return NS_OK;
}

bool
ns_kafka_is_refusal(rd_kafka_resp_err_t code)
{
    switch ((int)code) {
    case RD_KAFKA_RESP_ERR__AUTHENTICATION:
    case RD_KAFKA_RESP_ERR__SSL:
    case RD_KAFKA_RESP_ERR_SASL_AUTHENTICATION_FAILED:
    case RD_KAFKA_RESP_ERR_UNSUPPORTED_SASL_MECHANISM:
    case RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED:
    case RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED:
    case RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED:
    case RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return true;
    default:
        return false;
    }
}

static void *
destroy(void *client)
{
    /* Leaving the group is what close did, or did not have the time for. */
    rd_kafka_destroy_flags(client, RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE);
    return NULL;
}

void
ns_kafka_end(rd_kafka_t *client, int wait_ms)
{
    struct timespec until;
    pthread_t thread;

    if (!client)
        return;
    if (pthread_create(&thread, NULL, destroy, client) != 0) {
        destroy(client);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += wait_ms / 1000;
    until.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    if (pthread_timedjoin_np(thread, NULL, &until) != 0) {
        ns_log_warn("kafka.left", "%s", "the client did not end in time");
        pthread_detach(thread);
    }
}
