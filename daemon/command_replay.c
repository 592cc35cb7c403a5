/* nightshift dlq, replay: what was refused, or may be missing, once more.
 *
 * A dead letter holds its message. Sent again it runs under its own id, or,
 * where something ended under that, as ID~r1 (then ~r2), with replay_of in the
 * result. `replay --since` reads topics again: every job that has a row is known
 * by its id, and only those without one run.
 */
#include "daemon/command.h"

#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "connectors/operator.h"
#include "daemon/arguments.h"
#include "daemon/ends.h"
#include "daemon/setup.h"
#include "daemon/work.h"

enum {
    PATIENCE_MS = 60000,
    FLUSH_MS = 330000, /* past the client's own limit for a message */
    PAYLOAD_BYTES = 1 << 30,
};

struct dlq {
    struct ns_arguments arguments;
    struct ns_options *options;
    struct ns_operator *op;
    const char *batch, *reason, *limit, *output, *topic;
    bool all;

    FILE *out; /* of --output; NULL: to Kafka */
    struct ns_kafka_setting *settings;
    struct ns_kafka_producer *producer;
    char **keys; /* owned: letters to be sent, found before the first goes */
    size_t n_keys, n_sent, n_skipped;
};

static int
fail(const struct ns_error *err)
{
    return ns_command_fail(err->code && strcmp(err->code, "unknown") == 0
                               ? NS_EXIT_INPUT
                               : ns_exit_of(err, NS_EXIT_CONFIG),
                           "%s", err->text);
}

static enum ns_status
open_database(struct dlq *dlq, struct ns_error *err)
{
    struct ns_postgres_options postgres;
    enum ns_status status;

    status = ns_arguments_load(&dlq->arguments, &dlq->options, err);
    if (status != NS_OK)
        return status;
    ns_setup_log(dlq->options);
    if (!dlq->options->postgres.conninfo)
        return ns_fail(err, NS_REJECT, "no database: give --conninfo or "
                       "postgres.conninfo");
    postgres = ns_ends_postgres(dlq->options);
    return ns_operator_create(&postgres, &dlq->op, err);
}

/* --- list and show -------------------------------------------------------- */

static enum ns_status
list_letter(void *context, const struct ns_letter *letter,
            struct ns_error *err)
{
    (void)context;
    (void)err;
    printf("%s\t%s\t%s%s%s\t%s\t%s\n", letter->key, letter->created_at,
           letter->reason, *letter->param ? " " : "", letter->param,
           *letter->job_id ? letter->job_id : "-", letter->detail);
    return NS_OK;
}

static enum ns_status
list(struct dlq *dlq, struct ns_error *err)
{
    struct ns_letter_filter filter = { .batch = dlq->batch,
                                       .reason = dlq->reason,
                                       .limit = 100 };
    char *end;

    if (dlq->limit) {
        unsigned long n = strtoul(dlq->limit, &end, 10);

        if (!isdigit((unsigned char)*dlq->limit) || *end || n > UINT32_MAX)
            return ns_refuse(err, "usage", NULL, "--limit is a number");
        filter.limit = (uint32_t)n;
    }
    return ns_operator_letters(dlq->op, &filter, list_letter, NULL, err);
}

static enum ns_status
show(struct dlq *dlq, const char *key, struct ns_error *err)
{
    struct ns_buf payload;
    enum ns_status status;

    ns_buf_init(&payload, PAYLOAD_BYTES);
    status = ns_operator_payload(dlq->op, key, &payload, err);
    if (status == NS_OK)
        fwrite(payload.data, 1, payload.length, stdout);
    ns_buf_fini(&payload);
    return status;
}

/* --- replay --------------------------------------------------------------- */

/* "topic/3:12@0a1b..." came from a topic; what came from a file has no part
 * number in front of the colon. */
static bool
topic_of(const char *key, char *out, size_t out_size)
{
    const char *colon = strrchr(key, ':');
    size_t n = colon ? (size_t)(colon - key) : 0, digits = 0;

    while (digits < n && isdigit((unsigned char)key[n - 1 - digits]))
        digits++;
    if (digits == 0 || digits + 1 >= n || key[n - digits - 1] != '/' ||
        n - digits - 1 >= out_size)
        return false;
    memcpy(out, key, n - digits - 1);
    out[n - digits - 1] = '\0';
    return true;
}

/* The custom_id of a job's id: without its batch. */
static const char *
custom_of(const char *job_id, const char *batch)
{
    size_t n = strlen(batch);

    return n > 0 && strncmp(job_id, batch, n) == 0 && job_id[n] == '/'
               ? job_id + n + 1
               : job_id;
}

/* The object that holds our fields; made if the job has none. Borrowed. */
static json_t *
ours(json_t *root)
{
    json_t *found = json_object_get(root, "nightshift");

    if (!json_is_object(found))
        found = json_object_get(json_object_get(root, "body"), "nightshift");
    if (!json_is_object(found)) {
        found = json_object();
        if (json_object_set_new(root, "nightshift", found) == -1)
            return NULL;
    }
    return found;
}

/* Puts the new id into the message. */
static enum ns_status
rename_job(const struct ns_letter *letter, const char *id,
           const struct ns_buf *payload, char **out, struct ns_error *err)
{
    json_error_t why;
    json_t *root = json_loadb(payload->data, payload->length,
                              JSON_REJECT_DUPLICATES, &why);
    json_t *fields;

    if (!json_is_object(root)) {
        json_decref(root);
        return ns_refuse(err, "not_a_job", NULL, "%s is no JSON object: its "
                         "sender must mend it", letter->key);
    }
    fields = ours(root);
    if (fields &&
        json_object_set_new(root, "custom_id",
                            json_string(custom_of(id, letter->batch))) == 0 &&
        json_object_set_new(fields, "replay_of",
                            json_string(letter->job_id)) == 0)
        *out = json_dumps(root, JSON_COMPACT | JSON_PRESERVE_ORDER);
    else
        *out = NULL;
    json_decref(root);
    return *out ? NS_OK : ns_fail(err, NS_FATAL, "out of memory for %s",
                                  letter->key);
}

static enum ns_status
send(struct dlq *dlq, const struct ns_letter *letter, const char *id,
     const char *bytes, size_t length, struct ns_error *err)
{
    const struct ns_kafka_header headers[] = {
        { "nightshift-batch", *letter->batch ? letter->batch : NULL },
    };
    char topic[256];

    if (dlq->out) {
        if (fwrite(bytes, 1, length, dlq->out) != length ||
            fputc('\n', dlq->out) == EOF)
            return ns_fail_errno(err, NS_RETRY, "write %s", dlq->output);
        return NS_OK;
    }
    if (dlq->topic)
        snprintf(topic, sizeof(topic), "%s", dlq->topic);
    else if (!topic_of(letter->key, topic, sizeof(topic)))
        return ns_refuse(err, "not_a_job", NULL, "%s came from a file: give "
                         "--topic, or --output for a new file", letter->key);
    return ns_kafka_produce(dlq->producer, topic, *id ? id : NULL, bytes,
                            length, headers, 1, PATIENCE_MS, err);
}

static enum ns_status
replay_letter(void *context, const struct ns_letter *letter,
              struct ns_error *err)
{
    struct dlq *dlq = context;
    struct ns_buf payload;
    char id[320] = "", *renamed = NULL;
    enum ns_status status;

    ns_buf_init(&payload, PAYLOAD_BYTES);
    status = ns_operator_payload(dlq->op, letter->key, &payload, err);
    if (status == NS_OK && *letter->job_id)
        status = ns_operator_replay_id(dlq->op, letter->job_id, id, err);
    if (status == NS_OK && strcmp(id, letter->job_id) != 0)
        status = rename_job(letter, id, &payload, &renamed, err);
    if (status == NS_OK && dlq->out && memchr(payload.data, '\n',
                                              payload.length))
        status = ns_refuse(err, "not_a_job", NULL, "%s is of several lines",
                           letter->key);
    if (status == NS_OK)
        status = send(dlq, letter, id, renamed ? renamed : payload.data,
                      renamed ? strlen(renamed) : payload.length, err);
    if (status == NS_OK) {
        dlq->n_sent++;
        printf("%s\t%s\n", letter->key, *id ? id : "-");
    }
    free(renamed);
    ns_buf_fini(&payload);
    /* One that can not be sent keeps none of the others. */
    if (status == NS_REJECT && err->code && (!strcmp(err->code, "not_a_job") ||
                                             !strcmp(err->code, "no_payload"))) {
        fprintf(stderr, "nightshift: %s\n", err->text);
        dlq->n_skipped++;
        return NS_OK;
    }
    return status;
}

static enum ns_status
keep_key(void *context, const struct ns_letter *letter, struct ns_error *err)
{
    struct dlq *dlq = context;
    char **bigger = realloc(dlq->keys, (dlq->n_keys + 1) * sizeof(*bigger));

    if (bigger)
        dlq->keys = bigger;
    if (!bigger || !(bigger[dlq->n_keys] = strdup(letter->key)))
        return ns_fail(err, NS_FATAL, "out of memory for dead letters");
    dlq->n_keys++;
    return NS_OK;
}

static enum ns_status
open_sink(struct dlq *dlq, struct ns_error *err)
{
    struct ns_kafka_options kafka;

    if (dlq->output) {
        dlq->out = fopen(dlq->output, "we");
        return dlq->out ? NS_OK : ns_fail_errno(err, NS_REJECT, "%s",
                                                dlq->output);
    }
    dlq->settings = calloc(dlq->options->n_kafka + 1, sizeof(*dlq->settings));
    if (!dlq->settings)
        return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
    kafka = ns_ends_kafka(dlq->options, dlq->settings);
    kafka.topics = NULL;
    return ns_kafka_producer_open(&kafka, &dlq->producer, err);
}

static enum ns_status
close_sink(struct dlq *dlq, struct ns_error *err)
{
    struct ns_kafka_sent sent;
    enum ns_status status;

    if (dlq->out) {
        FILE *file = dlq->out;
        bool good = fflush(file) == 0 && fsync(fileno(file)) == 0;

        dlq->out = NULL;
        good = fclose(file) == 0 && good;
        return good ? NS_OK : ns_fail_errno(err, NS_RETRY, "write %s",
                                            dlq->output);
    }
    status = ns_kafka_flush(dlq->producer, FLUSH_MS, err);
    sent = ns_kafka_producer_sent(dlq->producer);
    if (status == NS_OK && sent.failed > 0)
        status = ns_fail(err, NS_RETRY, "%" PRIu64 " messages were not taken "
                         "(%s)", sent.failed, sent.why);
    return status;
}

static enum ns_status
replay(struct dlq *dlq, char **names, int n, struct ns_error *err)
{
    struct ns_letter_filter filter = { .batch = dlq->batch,
                                       .reason = dlq->reason };
    enum ns_status status = NS_OK;
    size_t before;

    if (n == 0 && !dlq->all && !dlq->batch && !dlq->reason)
        return ns_refuse(err, "usage", NULL, "say which: keys, --batch, "
                         "--reason or --all");
    if (n == 0)
        status = ns_operator_letters(dlq->op, &filter, keep_key, dlq, err);
    for (int i = 0; i < n && status == NS_OK; i++) {
        filter.key = names[i];
        before = dlq->n_keys;
        status = ns_operator_letters(dlq->op, &filter, keep_key, dlq, err);
        if (status == NS_OK && dlq->n_keys == before)
            status = ns_refuse(err, "unknown", NULL, "there is no dead letter "
                               "%s", names[i]);
    }
    if (status == NS_OK)
        status = open_sink(dlq, err);
    for (size_t i = 0; i < dlq->n_keys && status == NS_OK; i++) {
        filter = (struct ns_letter_filter){ .key = dlq->keys[i] };
        status = ns_operator_letters(dlq->op, &filter, replay_letter, dlq,
                                     err);
    }
    if (status == NS_OK)
        status = close_sink(dlq, err);
    if (status == NS_OK)
        fprintf(stderr, "%zu sent again, %zu not\n", dlq->n_sent,
                dlq->n_skipped);
    return status;
}

/* --- the command ----------------------------------------------------------- */

static int
run_dlq(struct dlq *dlq, const struct ns_synopsis *usage, int argc,
        char **argv)
{
    const char *what = argv[optind];
    char **names = argv + optind + 1;
    int n = argc - optind - 1;
    struct ns_error err = { 0 };
    enum ns_status status;

    if (!(strcmp(what, "list") == 0 && n == 0) &&
        !(strcmp(what, "show") == 0 && n == 1) && strcmp(what, "replay") != 0)
        return ns_arguments_misused(usage, "list, show KEY or replay");
    status = open_database(dlq, &err);
    if (status == NS_OK)
        status = strcmp(what, "list") == 0   ? list(dlq, &err)
                 : strcmp(what, "show") == 0 ? show(dlq, names[0], &err)
                                             : replay(dlq, names, n, &err);
    if (status == NS_OK)
        return dlq->n_skipped == 0 ? NS_EXIT_OK
               : dlq->n_sent > 0   ? NS_EXIT_SOME
                                   : NS_EXIT_NONE;
    if (err.code && strcmp(err.code, "usage") == 0)
        return ns_arguments_misused(usage, err.text);
    return fail(&err);
}

int
ns_command_dlq(int argc, char **argv)
{
    static const char about[] =
        "  list        dead letters, the latest first: key, time, reason, id\n"
        "  show KEY    the message, as it came\n"
        "  replay      send messages again, to the topics they came from. One\n"
        "              whose id has an end runs as ID~r1\n";
    struct dlq dlq = { .arguments.fallback_config = NS_ETC_CONFIG };
    const struct ns_argument table[] = {
        { "batch", 'b', "NAME", "those of this batch", .text = &dlq.batch },
        { "reason", 0, "CODE", "those refused for this", .text = &dlq.reason },
        { "limit", 'n', "N", "list: at most so many; default 100; 0: all",
          .text = &dlq.limit },
        { "all", 0, NULL, "replay: all of them", .flag = &dlq.all },
        { "topic", 't', "NAME", "replay: to this topic", .text = &dlq.topic },
        { "output", 'o', "FILE", "replay: into a new job file instead",
          .text = &dlq.output },
        { "conninfo", 0, "TEXT", "the database; default: postgres.conninfo",
          .key = "postgres.conninfo" },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift dlq", "list|show KEY|replay [KEY...] [options]", about,
        table, 1, INT_MAX, false,
    };
    int status = ns_arguments_parse(&dlq.arguments, &usage, argc, argv);

    if (status != -1)
        return status;
    status = run_dlq(&dlq, &usage, argc, argv);
    if (dlq.out)
        fclose(dlq.out);
    ns_kafka_producer_close(dlq.producer);
    free(dlq.settings);
    for (size_t i = 0; i < dlq.n_keys; i++)
        free(dlq.keys[i]);
    free(dlq.keys);
    ns_operator_destroy(dlq.op);
    ns_options_destroy(dlq.options);
    return status;
}

/* --- replay --since --------------------------------------------------------- */

/* "90m", "24h", "3d" ago, or "2026-11-30T22:00:00Z". */
static bool
parse_since(const char *text, int64_t *out_ms)
{
    static const struct {
        char unit;
        int64_t ms;
    } units[] = { { 'm', 60000 }, { 'h', 3600000 }, { 'd', 86400000 } };
    struct tm tm = { 0 };
    char *end;
    long long n;

    end = strptime(text, "%Y-%m-%dT%H:%M:%SZ", &tm);
    if (end && *end == '\0') {
        *out_ms = (int64_t)timegm(&tm) * 1000;
        return true;
    }
    if (!isdigit((unsigned char)*text))
        return false;
    n = strtoll(text, &end, 10);
    for (size_t i = 0; i < 3; i++)
        if (end[0] == units[i].unit && end[1] == '\0' && n < 1000000) {
            *out_ms = ns_unix_now_ms() - n * units[i].ms;
            return true;
        }
    return false;
}

static void
print_rewound(void *context, const char *topic, int32_t partition,
              int64_t from, int64_t to)
{
    uint64_t *n = context;

    *n += (uint64_t)(from - to);
    printf("%s/%" PRId32 ": from %" PRId64 " back to %" PRId64 "\n", topic,
           partition, from, to);
}

static enum ns_status
rewind_topics(const struct ns_options *options, int64_t since_ms, uint64_t *n,
              struct ns_error *err)
{
    struct ns_kafka_setting *settings;
    struct ns_kafka_options kafka;
    enum ns_status status;

    if (!options->intake.topics)
        return ns_fail(err, NS_REJECT, "intake.topics is not set: there is "
                       "nothing to read again");
    settings = calloc(options->n_kafka + 1, sizeof(*settings));
    if (!settings)
        return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
    kafka = ns_ends_kafka(options, settings);
    status = ns_kafka_rewind(&kafka, since_ms, print_rewound, n, err);
    free(settings);
    return status;
}

int
ns_command_replay(int argc, char **argv)
{
    static const char about[] =
        "Takes the group's positions in intake.topics back to a time, while no\n"
        "daemon of it runs. Started again, they read all from there: jobs that\n"
        "have a row are known, those that lost theirs run.\n";
    struct ns_arguments arguments = { .fallback_config = NS_ETC_CONFIG };
    struct ns_options *options = NULL;
    const char *since = NULL;
    const struct ns_argument table[] = {
        { "since", 0, "TIME", "90m, 24h or 3d ago, or 2026-11-30T22:00:00Z",
          .text = &since },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift replay", "--since TIME [options]", about, table, 0, 0,
        false,
    };
    int status = ns_arguments_parse(&arguments, &usage, argc, argv);
    struct ns_error err = { 0 };
    int64_t since_ms;
    uint64_t n = 0;

    if (status != -1)
        return status;
    if (!since || !parse_since(since, &since_ms))
        return ns_arguments_misused(&usage, "--since TIME is needed");
    status = NS_EXIT_OK;
    if (ns_arguments_load(&arguments, &options, &err) != NS_OK ||
        rewind_topics(options, since_ms, &n, &err) != NS_OK)
        status = fail(&err);
    else
        fprintf(stderr, "%" PRIu64 " messages will be read again\n", n);
    ns_options_destroy(options);
    return status;
}
