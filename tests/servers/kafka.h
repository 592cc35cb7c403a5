/* kafka.h - a real Kafka broker of one's own, for the tests that need one.
 *
 * On loopback, at ports picked at run time, in a folder of its own beside the
 * test program. It dies with the program (PR_SET_PDEATHSIG) and is killed by
 * its process id alone. Jars are those of scripts/fetch-kafka.sh: build/kafka,
 * or $NS_KAFKA. Topics are made through librdkafka's admin calls, each test
 * its own.
 *
 * A header of static functions, since only connectors and daemon need them.
 */
#ifndef NS_TESTS_SERVERS_KAFKA_H
#define NS_TESTS_SERVERS_KAFKA_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <librdkafka/rdkafka.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct broker {
    char folder[PATH_MAX], jars[PATH_MAX];
    char address[32]; /* "127.0.0.1:40123" */
    char secure_address[32];  /* TLS and SASL; "" unless `secure` */
    char certificate[PATH_MAX + 32]; /* PEM file: who signed the broker's */
    int port, controller_port, secure_port;
    bool secure;          /* set before broker_make: user night, see below */
    pid_t pid;            /* 0: not running */
    rd_kafka_t *producer; /* of the helpers below */
    bool missing;         /* no jars or no java: tests fail, and say so */
};

static inline int64_t
broker_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A port that was free a moment ago; the socket stays open in `*keep` so that
 * the next call gets another one. */
static inline int
free_port(int *keep)
{
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof(address);

    *keep = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*keep == -1 ||
        bind(*keep, (struct sockaddr *)&address, sizeof(address)) == -1 ||
        getsockname(*keep, (struct sockaddr *)&address, &length) == -1)
        return 0;
    return ntohs(address.sin_port);
}

static inline bool
broker_configure(const struct broker *broker)
{
    char path[PATH_MAX + 32], secure[64];
    FILE *file;

    snprintf(path, sizeof(path), "%s/server.properties", broker->folder);
    file = fopen(path, "w");
    if (!file)
        return false;
    snprintf(secure, sizeof(secure), broker->secure
             ? ",SECURE://127.0.0.1:%d" : "", broker->secure_port);
    if (broker->secure)
        fprintf(file,
                "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,"
                "CONTROLLER:PLAINTEXT,SECURE:SASL_SSL\n"
                "listener.name.secure.sasl.enabled.mechanisms="
                "PLAIN,SCRAM-SHA-512\n"
                "listener.name.secure.ssl.keystore.type=PKCS12\n"
                "listener.name.secure.ssl.keystore.location=%s/key.p12\n"
                "listener.name.secure.ssl.keystore.password=changeit\n"
                "listener.name.secure.scram-sha-512.sasl.jaas.config="
                "org.apache.kafka.common.security.scram.ScramLoginModule "
                "required;\n"
                "listener.name.secure.plain.sasl.jaas.config="
                "org.apache.kafka.common.security.plain.PlainLoginModule "
                "required user_night=\"plain-secret\";\n",
                broker->folder);
    fprintf(file,
            "process.roles=broker,controller\nnode.id=1\n"
            "controller.quorum.voters=1@127.0.0.1:%d\n"
            "listeners=PLAINTEXT://127.0.0.1:%d,CONTROLLER://127.0.0.1:%d%s\n"
            "advertised.listeners=PLAINTEXT://127.0.0.1:%d%s\n"
            "controller.listener.names=CONTROLLER\n"
            "inter.broker.listener.name=PLAINTEXT\n"
            "log.dirs=%s/data\n"
            "auto.create.topics.enable=false\n"
            "offsets.topic.replication.factor=1\n"
            "offsets.topic.num.partitions=1\n"
            "transaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\n"
            "transaction.state.log.num.partitions=1\n"
            "share.coordinator.state.topic.replication.factor=1\n"
            "share.coordinator.state.topic.min.isr=1\n"
            "group.initial.rebalance.delay.ms=0\n"
            "group.min.session.timeout.ms=1000\n"
            "broker.session.timeout.ms=2000\n"
            "broker.heartbeat.interval.ms=300\n"
            "num.network.threads=2\nnum.io.threads=2\n"
            "log.cleaner.dedupe.buffer.size=2097152\n"
            "message.max.bytes=8388608\n",
            broker->controller_port, broker->port, broker->controller_port,
            secure, broker->port, secure, broker->folder);
    return fclose(file) == 0;
}

/* java -cp JARS CLASS ARGUMENTS...; output is appended to broker.log. */
static inline pid_t
broker_java(const struct broker *broker, const char *const *arguments)
{
    char log[PATH_MAX + 32], classes[PATH_MAX + 32];
    const char *argv[24] = { "java", "-Xms64m", "-Xmx256m", "-XX:+UseSerialGC",
                             "-XX:TieredStopAtLevel=1",
                             "-XX:MaxDirectMemorySize=64m", "-cp", classes };
    size_t n = 8;
    pid_t parent = getpid(), pid;

    snprintf(log, sizeof(log), "%s/broker.log", broker->folder);
    snprintf(classes, sizeof(classes), "%s/*", broker->jars);
    while (*arguments && n < 23)
        argv[n++] = *arguments++;
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        int null = open("/dev/null", O_RDONLY);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent || dup2(null, 0) == -1 || dup2(fd, 1) == -1 ||
            dup2(fd, 2) == -1)
            _exit(126);
        execvp("java", (char *const *)argv);
        _exit(127);
    }
    return pid;
}

/* True once the broker answers a metadata request. */
static inline bool
broker_answers(const struct broker *broker, int limit_ms)
{
    int64_t until = broker_now_ms() + limit_ms;
    const struct rd_kafka_metadata *metadata;
    bool answered = false;

    while (!answered && broker_now_ms() < until) {
        if (rd_kafka_metadata(broker->producer, 0, NULL, &metadata, 500) ==
            RD_KAFKA_RESP_ERR_NO_ERROR) {
            answered = metadata->broker_cnt == 1 &&
                       metadata->brokers[0].id == 1;
            rd_kafka_metadata_destroy(metadata);
        }
        rd_kafka_poll(broker->producer, 0);
        if (waitpid(broker->pid, NULL, WNOHANG) == broker->pid) {
            fprintf(stderr, "the broker died: %s/broker.log\n",
                    broker->folder);
            return false;
        }
        if (!answered)
            usleep(50000);
    }
    return answered;
}

static inline bool
broker_start(struct broker *broker)
{
    char path[PATH_MAX + 32];
    const char *const arguments[] = { "kafka.Kafka", path, NULL };

    snprintf(path, sizeof(path), "%s/server.properties", broker->folder);
    broker->pid = broker_java(broker, arguments);
    return broker->pid > 0;
}

static inline void
broker_kill(struct broker *broker)
{
    if (broker->pid <= 0)
        return;
    kill(broker->pid, SIGKILL);
    waitpid(broker->pid, NULL, 0);
    broker->pid = 0;
}

static inline void
broker_quiet(const rd_kafka_t *client, int level, const char *facility,
             const char *text)
{
    (void)client;
    (void)level;
    (void)facility;
    (void)text;
}

/* A key for the broker, and its certificate as the clients want it. */
static inline bool
broker_certify(struct broker *broker)
{
    char command[3 * PATH_MAX];

    snprintf(broker->certificate, sizeof(broker->certificate), "%s/ca.pem",
             broker->folder);
    snprintf(command, sizeof(command),
             "cd '%s' && exec >keytool.log 2>&1 && keytool -genkeypair -alias "
             "b -keyalg RSA -dname CN=broker -ext SAN=ip:127.0.0.1 -validity 3 "
             "-storetype PKCS12 -keystore key.p12 -storepass changeit && "
             "keytool -exportcert -rfc -alias b -keystore key.p12 -storepass "
             "changeit -file ca.pem", broker->folder);
    return system(command) == 0;
}

/* Folder, ports, format; not started. False: broken, or `missing`. All but
 * `secure` is set here: then user "night" may also come by TLS, with password
 * "scram-secret" (SCRAM-SHA-512) or "plain-secret" (PLAIN). */
static inline bool
broker_make(struct broker *broker)
{
    char path[PATH_MAX], config[PATH_MAX + 32], why[256];
    const char *given = getenv("NS_KAFKA");
    const char *const format[] = { "kafka.tools.StorageTool", "format", "-t",
                                   "NsTestClusterId000000AA", "-c", config,
                                   "--add-scram",
                                   "SCRAM-SHA-512=[name=night,"
                                   "password=scram-secret]", NULL };
    bool secure = broker->secure;
    rd_kafka_conf_t *conf;
    int keep[3], status;
    ssize_t n;
    pid_t pid;

    memset(broker, 0, sizeof(*broker));
    broker->secure = secure;
#ifdef __SANITIZE_THREAD__
    /* The client makes its threads with thrd_create, which gcc's sanitizer does
     * not see: the first allocation in one of them ends the process. */
    fprintf(stderr, "no client under the thread sanitizer\n");
    broker->missing = true;
    return false;
#endif
    if (!realpath(given ? given : "build/kafka", broker->jars) ||
        snprintf(path, sizeof(path), "%.4000s/.complete", broker->jars) < 0 ||
        access(path, R_OK) != 0 ||
        system("java -version >/dev/null 2>&1") != 0) {
        fprintf(stderr, "no broker here: scripts/fetch-kafka.sh gets one\n");
        broker->missing = true;
        return false;
    }
    n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (n <= 0)
        return false;
    path[n] = '\0';
    snprintf(broker->folder, sizeof(broker->folder), "%.4000s-kafka-XXXXXX",
             path);
    if (!mkdtemp(broker->folder))
        return false;
    broker->port = free_port(&keep[0]);
    broker->controller_port = free_port(&keep[1]);
    broker->secure_port = free_port(&keep[2]);
    for (int i = 0; i < 3; i++)
        close(keep[i]);
    if (secure)
        snprintf(broker->secure_address, sizeof(broker->secure_address),
                 "127.0.0.1:%d", broker->secure_port);
    snprintf(broker->address, sizeof(broker->address), "127.0.0.1:%d",
             broker->port);
    conf = rd_kafka_conf_new();
    rd_kafka_conf_set_log_cb(conf, broker_quiet);
    rd_kafka_conf_set(conf, "bootstrap.servers", broker->address, why,
                      sizeof(why));
    rd_kafka_conf_set(conf, "reconnect.backoff.max.ms", "200", why,
                      sizeof(why));
    rd_kafka_conf_set(conf, "topic.metadata.refresh.sparse", "true", why,
                      sizeof(why));
    broker->producer = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
    snprintf(config, sizeof(config), "%s/server.properties", broker->folder);
    if (!broker->producer || !broker_configure(broker) ||
        (secure && !broker_certify(broker)))
        return false;
    pid = broker_java(broker, format);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static inline void
broker_remove(struct broker *broker)
{
    char command[PATH_MAX + 32];

    broker_kill(broker);
    if (broker->producer)
        rd_kafka_destroy(broker->producer);
    broker->producer = NULL;
    snprintf(command, sizeof(command), "rm -rf '%s'", broker->folder);
    if (broker->folder[0] && system(command) != 0)
        fprintf(stderr, "%s stays behind\n", broker->folder);
}

/* --- topics ------------------------------------------------------------ */

/* Waits for the answer of an admin call: its error, per topic or whole. */
static inline rd_kafka_resp_err_t
admin_answer(rd_kafka_queue_t *queue)
{
    rd_kafka_event_t *event = rd_kafka_queue_poll(queue, 10000);
    rd_kafka_resp_err_t code = RD_KAFKA_RESP_ERR__TIMED_OUT;
    const rd_kafka_topic_result_t **results = NULL;
    size_t n = 0;

    if (!event)
        return code;
    code = rd_kafka_event_error(event);
    switch (rd_kafka_event_type(event)) {
    case RD_KAFKA_EVENT_CREATETOPICS_RESULT:
        results = rd_kafka_CreateTopics_result_topics(
            rd_kafka_event_CreateTopics_result(event), &n);
        break;
    case RD_KAFKA_EVENT_DELETETOPICS_RESULT:
        results = rd_kafka_DeleteTopics_result_topics(
            rd_kafka_event_DeleteTopics_result(event), &n);
        break;
    case RD_KAFKA_EVENT_CREATEPARTITIONS_RESULT:
        results = rd_kafka_CreatePartitions_result_topics(
            rd_kafka_event_CreatePartitions_result(event), &n);
        break;
    default:
        break;
    }
    for (size_t i = 0; i < n && code == RD_KAFKA_RESP_ERR_NO_ERROR; i++)
        code = rd_kafka_topic_result_error(results[i]);
    rd_kafka_event_destroy(event);
    return code;
}

static inline rd_kafka_resp_err_t
topic_admin_once(const struct broker *broker, const char *topic, int partitions)
{
    rd_kafka_queue_t *queue = rd_kafka_queue_new(broker->producer);
    rd_kafka_resp_err_t code;
    char why[256];

    if (partitions > 0) {
        rd_kafka_NewTopic_t *made =
            rd_kafka_NewTopic_new(topic, partitions, 1, why, sizeof(why));

        rd_kafka_CreateTopics(broker->producer, &made, 1, NULL, queue);
        code = admin_answer(queue);
        rd_kafka_NewTopic_destroy(made);
    } else if (partitions == 0) {
        rd_kafka_DeleteTopic_t *gone = rd_kafka_DeleteTopic_new(topic);

        rd_kafka_DeleteTopics(broker->producer, &gone, 1, NULL, queue);
        code = admin_answer(queue);
        rd_kafka_DeleteTopic_destroy(gone);
    } else {
        rd_kafka_NewPartitions_t *more = rd_kafka_NewPartitions_new(
            topic, (size_t)-partitions, why, sizeof(why));

        rd_kafka_CreatePartitions(broker->producer, &more, 1, NULL, queue);
        code = admin_answer(queue);
        rd_kafka_NewPartitions_destroy(more);
    }
    rd_kafka_queue_destroy(queue);
    return code;
}

/* One admin call on one topic. partitions 0: delete it; negative: that many
 * are to be there from now on; positive: make it. A broker that was stopped
 * or has just come up says for a moment that there is no broker. */
static inline rd_kafka_resp_err_t
topic_admin(const struct broker *broker, const char *topic, int partitions)
{
    int64_t until = broker_now_ms() + 20000;
    rd_kafka_resp_err_t code;

    while ((code = topic_admin_once(broker, topic, partitions)) !=
               RD_KAFKA_RESP_ERR_NO_ERROR &&
           code != RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS &&
           broker_now_ms() < until)
        usleep(200000);
    if (code == RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS)
        code = RD_KAFKA_RESP_ERR_NO_ERROR; /* an answer that was lost */
    return code;
}

/* A topic that refuses any message. */
static inline rd_kafka_resp_err_t
topic_that_refuses(const struct broker *broker, const char *topic)
{
    rd_kafka_queue_t *queue = rd_kafka_queue_new(broker->producer);
    rd_kafka_NewTopic_t *made;
    rd_kafka_resp_err_t code;
    char why[256];

    made = rd_kafka_NewTopic_new(topic, 1, 1, why, sizeof(why));
    rd_kafka_NewTopic_set_config(made, "max.message.bytes", "64");
    rd_kafka_CreateTopics(broker->producer, &made, 1, NULL, queue);
    code = admin_answer(queue);
    rd_kafka_NewTopic_destroy(made);
    rd_kafka_queue_destroy(queue);
    return code;
}

/* What retention does: messages below `before` are gone. */
static inline rd_kafka_resp_err_t
topic_cut(const struct broker *broker, const char *topic, int32_t partition,
          int64_t before)
{
    rd_kafka_topic_partition_list_t *list =
        rd_kafka_topic_partition_list_new(1);
    rd_kafka_queue_t *queue = rd_kafka_queue_new(broker->producer);
    rd_kafka_DeleteRecords_t *cut;
    rd_kafka_resp_err_t code;

    rd_kafka_topic_partition_list_add(list, topic, partition)->offset = before;
    cut = rd_kafka_DeleteRecords_new(list);
    rd_kafka_DeleteRecords(broker->producer, &cut, 1, NULL, queue);
    code = admin_answer(queue);
    rd_kafka_DeleteRecords_destroy(cut);
    rd_kafka_queue_destroy(queue);
    rd_kafka_topic_partition_list_destroy(list);
    return code;
}

/* Stored offset of the group, or a negative number: none. */
static inline int64_t
group_offset(const struct broker *broker, const char *group, const char *topic,
             int32_t partition)
{
    rd_kafka_topic_partition_list_t *list =
        rd_kafka_topic_partition_list_new(1);
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    int64_t offset = INT64_MIN;
    rd_kafka_t *client;
    char why[256];

    rd_kafka_conf_set_log_cb(conf, broker_quiet);
    rd_kafka_conf_set(conf, "bootstrap.servers", broker->address, why,
                      sizeof(why));
    rd_kafka_conf_set(conf, "group.id", group, why, sizeof(why));
    client = rd_kafka_new(RD_KAFKA_CONSUMER, conf, why, sizeof(why));
    rd_kafka_topic_partition_list_add(list, topic, partition);
    if (client && rd_kafka_committed(client, list, 10000) ==
                      RD_KAFKA_RESP_ERR_NO_ERROR)
        offset = list->elems[0].offset;
    rd_kafka_topic_partition_list_destroy(list);
    if (client)
        rd_kafka_destroy(client);
    return offset;
}

/* End of the partition: one past the newest message. */
static inline int64_t
topic_end(const struct broker *broker, const char *topic, int32_t partition)
{
    int64_t low = 0, high = -1;

    rd_kafka_query_watermark_offsets(broker->producer, topic, partition, &low,
                                     &high, 10000);
    return high;
}

/* Sends one message and does not wait for it; see produce_flush. A partition
 * that was just made is not known to the client at once. */
static inline bool
produce(const struct broker *broker, const char *topic, int32_t partition,
        const char *key, const void *value, size_t length,
        rd_kafka_headers_t *headers)
{
    int64_t until = broker_now_ms() + 10000;
    const struct rd_kafka_metadata *metadata;
    rd_kafka_resp_err_t code;

    do {
        code = rd_kafka_producev(
            broker->producer, RD_KAFKA_V_TOPIC(topic),
            RD_KAFKA_V_PARTITION(partition),
            RD_KAFKA_V_KEY(key, key ? strlen(key) : 0),
            RD_KAFKA_V_VALUE((void *)value, length),
            RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
            RD_KAFKA_V_HEADERS(headers), RD_KAFKA_V_END);
        if (code == RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION &&
            rd_kafka_metadata(broker->producer, 1, NULL, &metadata, 1000) ==
                RD_KAFKA_RESP_ERR_NO_ERROR)
            rd_kafka_metadata_destroy(metadata);
    } while (code == RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION &&
             broker_now_ms() < until);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR;
}

static inline bool
produce_flush(const struct broker *broker)
{
    return rd_kafka_flush(broker->producer, 20000) ==
           RD_KAFKA_RESP_ERR_NO_ERROR;
}

#endif
