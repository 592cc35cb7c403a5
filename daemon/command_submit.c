/* nightshift submit: the jobs of a file into a topic, or the file into a spool.
 *
 * To a topic each line goes as it stands, keyed by its job's id, with the batch in a
 * header: the bytes, and with them the input's hash, are those of the file. A
 * batch is named after its file and what is in it, so submitting a file again
 * sends jobs that are known by then, and changes nothing.
 */
#include "daemon/command.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/evp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/lines.h"
#include "connectors/operator.h"
#include "connectors/spool.h"
#include "daemon/arguments.h"
#include "daemon/ends.h"
#include "daemon/setup.h"
#include "daemon/work.h"

static const char about[] =
    "Sends the jobs of a file (.jsonl, .jsonl.lz4) to a Kafka topic, as one\n"
    "batch. All are checked first; with a bad one among them none is sent.\n"
    "Prints the batch's name. Sending a file again changes nothing.\n"
    "\n"
    "With --spool (or intake.spool and no topics) the file goes there, whole.\n";

enum {
    NAME_BYTES = NS_JOB_BATCH_BYTES - 13, /* of the file's, in the batch's */
    COMPLAINTS = 20,                      /* shown */
    PATIENCE_MS = 60000, /* for room in the client's queue */
    FLUSH_MS = 330000,   /* past the client's own limit for a message */
};

struct submit {
    struct ns_arguments arguments;
    struct ns_options *options;
    const char *input, *topic, *batch;
    bool send_bad;
    const char *spool; /* NULL: to a topic */

    char topic_text[256], batch_text[NS_JOB_BATCH_BYTES + 1];
    struct ns_kafka_setting *settings;
    struct ns_kafka_producer *producer;
    unsigned char sha256[EVP_MAX_MD_SIZE]; /* of the file */
    uint64_t n_jobs, n_bad;
    uint64_t n_expected; /* of them in this batch: a job may name another */
};

static int
read_arguments(struct submit *s, int argc, char **argv)
{
    const struct ns_argument table[] = {
        { "topic", 't', "NAME", "default: the first of intake.topics",
          .text = &s->topic },
        { "batch", 'b', "NAME", "default: the file's name and a part of its "
          "hash", .text = &s->batch },
        { "spool", 0, "DIR", "into in/ of this spool instead of a topic",
          .key = "intake.spool" },
        { "send-bad", 0, NULL, "send bad lines too: each becomes a dead "
          "letter", .flag = &s->send_bad },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift submit", "FILE [options]", about, table, 1, 1, false,
    };
    int status;

    s->arguments.fallback_config = NS_ETC_CONFIG;
    status = ns_arguments_parse(&s->arguments, &usage, argc, argv);
    if (status == -1)
        s->input = argv[optind];
    return status;
}

static bool
ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);

    return n > m && strcmp(name + n - m, end) == 0;
}

/* Where to, and which brokers. */
static enum ns_status
settle(struct submit *s, struct ns_error *err)
{
    const char *topics = s->options->intake.topics;
    struct ns_kafka_options kafka;
    size_t n = topics ? strcspn(topics, ", \t") : 0;

    if (!s->topic && !topics && s->options->intake.spool) {
        s->spool = s->options->intake.spool;
        if (s->batch)
            return ns_fail(err, NS_REJECT, "--batch: in a spool the file is "
                           "the batch");
        if (!ends_with(s->input, ".jsonl") && !ends_with(s->input,
                                                         ".jsonl.lz4"))
            return ns_fail(err, NS_REJECT, "%.200s: a spool takes .jsonl and "
                           ".jsonl.lz4", s->input);
        return NS_OK;
    }
    if (!s->topic) {
        if (n == 0 || *topics == '^' || n >= sizeof(s->topic_text))
            return ns_fail(err, NS_REJECT, "no topic to send to: give --topic, "
                           "or a name first in intake.topics");
        memcpy(s->topic_text, topics, n);
        s->topic = s->topic_text;
    }
    s->settings = calloc(s->options->n_kafka + 1, sizeof(*s->settings));
    if (!s->settings)
        return ns_fail(err, NS_FATAL, "out of memory for [kafka]");
    kafka = ns_ends_kafka(s->options, s->settings);
    kafka.topics = NULL;
    return ns_kafka_producer_open(&kafka, &s->producer, err);
}

/* "jobs.jsonl-0a1b2c3d4e5f": the same for the same bytes under that name. */
static enum ns_status
name_batch(struct submit *s, int fd, struct ns_error *err)
{
    const char *slash = strrchr(s->input, '/');
    const char *name = slash ? slash + 1 : s->input;
    unsigned char *hash = s->sha256, chunk[65536];
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool ok = context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) == 1;
    ssize_t n;

    while (ok && (n = read(fd, chunk, sizeof(chunk))) != 0) {
        if (n == -1 && errno == EINTR)
            continue;
        ok = n > 0 && EVP_DigestUpdate(context, chunk, (size_t)n) == 1;
    }
    ok = ok && EVP_DigestFinal_ex(context, hash, NULL) == 1;
    EVP_MD_CTX_free(context);
    if (!ok || lseek(fd, 0, SEEK_SET) == -1)
        return ns_fail_errno(err, NS_REJECT, "read %.200s (a file is needed)",
                             s->input);
    if (s->spool) {
        ns_spool_batch(name, hash, s->batch_text);
        s->batch = s->batch_text;
    } else if (!s->batch) {
        snprintf(s->batch_text, sizeof(s->batch_text),
                 "%.*s-%02x%02x%02x%02x%02x%02x", NAME_BYTES, name, hash[0],
                 hash[1], hash[2], hash[3], hash[4], hash[5]);
        s->batch = s->batch_text;
    }
    return NS_OK;
}

static enum ns_status
parse_line(struct submit *s, const struct ns_line *line, struct ns_job **job,
           struct ns_error *err)
{
    struct ns_job_options options = {
        .max_bytes = s->options->limits.message_bytes,
        .id_from_position = s->spool != NULL,
        .images = true, /* the daemon knows whether its model sees, */
        .documents = true, /* and has the database */
        .now_ms = ns_unix_now_ms(),
    };
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .offset = line->number },
        .origin = s->spool ? s->batch : s->input, /* as the daemon has it */
        .bytes = line->bytes,
        .length = line->length,
        .batch = s->spool && !s->options->postgres.conninfo ? NULL : s->batch,
    };

    memcpy(message.sha256, line->sha256, sizeof(message.sha256));
    return ns_job_parse(&message, &options, job, err);
}

static enum ns_status
check_line(struct submit *s, const struct ns_line *line, struct ns_error *err)
{
    struct ns_job *job = NULL;
    enum ns_status status;

    s->n_jobs++;
    if (!line->bytes) /* not even as a dead letter */
        return ns_fail(err, NS_REJECT, "%s:%" PRIu64 ": a line of %" PRIu64
                       " bytes, over limits.message", s->input, line->number,
                       line->length);
    status = parse_line(s, line, &job, err);
    if (status == NS_REJECT && s->n_bad++ < COMPLAINTS)
        fprintf(stderr, "%s:%" PRIu64 ": %s: %s\n", s->input, line->number,
                err->code ? err->code : "invalid", err->text);
    s->n_expected += job && (!job->batch || strcmp(job->batch, s->batch) == 0);
    ns_job_destroy(job);
    return status == NS_REJECT ? NS_OK : status;
}

static enum ns_status
send_line(struct submit *s, const struct ns_line *line, struct ns_error *err)
{
    const struct ns_kafka_header headers[] = {
        { "nightshift-batch", s->batch },
        { "traceparent", getenv("TRACEPARENT") },
        { "tracestate", getenv("TRACESTATE") },
    };
    struct ns_job *job = NULL;
    enum ns_status status = parse_line(s, line, &job, err);

    if (status == NS_OK || status == NS_REJECT) /* checked before: --send-bad */
        status = ns_kafka_produce(s->producer, s->topic, job->id, line->bytes,
                                  (size_t)line->length, headers,
                                  sizeof(headers) / sizeof(headers[0]),
                                  PATIENCE_MS, err);
    ns_job_destroy(job);
    return status;
}

static enum ns_status
each_line(struct submit *s, int fd,
          enum ns_status (*take)(struct submit *, const struct ns_line *,
                                 struct ns_error *),
          struct ns_error *err)
{
    const struct ns_lines_options options = {
        .max_line = s->options->limits.message_bytes,
    };
    struct ns_lines *lines;
    struct ns_line line;
    enum ns_status status;
    bool end = false;

    if (lseek(fd, 0, SEEK_SET) == -1)
        return ns_fail_errno(err, NS_REJECT, "seek in %.200s", s->input);
    status = ns_lines_create(fd, &options, NULL, &lines, err);
    if (status != NS_OK)
        return status;
    do {
        status = ns_lines_next(lines, &line, &end, err);
        if (status == NS_OK && !end)
            status = take(s, &line, err);
    } while (status == NS_OK && !end);
    ns_lines_destroy(lines);
    return status;
}

/* So that the batch's end can be told. Without a database it just can not. */
static enum ns_status
expect(struct submit *s, struct ns_error *err)
{
    struct ns_postgres_options postgres;
    struct ns_operator *op = NULL;
    enum ns_status status;

    if (!s->options->postgres.conninfo)
        return NS_OK;
    postgres = ns_ends_postgres(s->options);
    status = ns_operator_create(&postgres, &op, err);
    if (status == NS_OK)
        status = ns_operator_expect(op, s->batch, s->n_expected, NULL, err);
    ns_operator_destroy(op);
    return status;
}

static int
send_all(struct submit *s, int fd, struct ns_error *err)
{
    enum ns_status status = expect(s, err);
    struct ns_kafka_sent sent;

    if (status == NS_OK)
        status = each_line(s, fd, send_line, err);
    if (status == NS_OK)
        status = ns_kafka_flush(s->producer, FLUSH_MS, err);
    sent = ns_kafka_producer_sent(s->producer);
    if (status == NS_OK && sent.failed == 0) {
        printf("%s\n", s->batch);
        fprintf(stderr, "%" PRIu64 " jobs sent to %s\n", sent.delivered,
                s->topic);
        return NS_EXIT_OK;
    }
    if (status == NS_OK)
        return ns_command_fail(NS_EXIT_AGAIN, "%" PRIu64 " of %" PRIu64
                               " jobs were not taken (%s); submit the file "
                               "again: those that were are known by their ids",
                               sent.failed, s->n_jobs, sent.why);
    return ns_command_fail(ns_exit_of(err, NS_EXIT_CONFIG), "%s (%" PRIu64
                           " of %" PRIu64 " jobs were sent; to go on, submit "
                           "the file again)", err->text, sent.delivered,
                           s->n_jobs);
}

/* In, by the name it has, once it is there as a whole. */
static enum ns_status
copy_in(const struct submit *s, int fd, struct ns_error *err)
{
    const char *slash = strrchr(s->input, '/');
    const char *name = slash ? slash + 1 : s->input;
    char part[PATH_MAX], whole[PATH_MAX], chunk[65536];
    enum ns_status status = NS_OK;
    ssize_t n = 0;
    int out;

    snprintf(whole, sizeof(whole), "%s/in/%s", s->spool, name);
    if ((size_t)snprintf(part, sizeof(part), "%s/in/.%s.%ld.part", s->spool,
                         name, (long)getpid()) >= sizeof(part))
        return ns_fail(err, NS_REJECT, "%.200s: the path is too long", name);
    if (lseek(fd, 0, SEEK_SET) == -1)
        return ns_fail_errno(err, NS_REJECT, "seek in %.200s", s->input);
    out = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
    if (out == -1)
        return ns_fail_errno(err, NS_REJECT, "%s", part);
    while (status == NS_OK && (n = read(fd, chunk, sizeof(chunk))) > 0)
        for (ssize_t at = 0, m; at < n && status == NS_OK; at += m)
            if ((m = write(out, chunk + at, (size_t)(n - at))) == -1)
                status = ns_fail_errno(err, NS_RETRY, "write %s", part);
    if (status == NS_OK && (n == -1 || fsync(out) == -1))
        status = ns_fail_errno(err, NS_RETRY, "copy %.200s", s->input);
    close(out);
    /* A file of that name that still waits is not to be written over. */
    if (status == NS_OK && linkat(AT_FDCWD, part, AT_FDCWD, whole, 0) == -1)
        status = ns_fail_errno(err, NS_RETRY, "%s", whole);
    unlink(part);
    return status;
}

static int
hand_in(struct submit *s, int fd, struct ns_error *err)
{
    enum ns_status status = expect(s, err);

    if (status == NS_OK)
        status = copy_in(s, fd, err);
    if (status != NS_OK)
        return ns_command_fail(ns_exit_of(err, NS_EXIT_CONFIG), "%s",
                               err->text);
    printf("%s\n", s->options->postgres.conninfo ? s->batch
                   : strrchr(s->input, '/')      ? strrchr(s->input, '/') + 1
                                                 : s->input);
    fprintf(stderr, "%" PRIu64 " jobs handed in at %s\n", s->n_jobs,
            s->spool);
    return NS_EXIT_OK;
}

static int
submit(struct submit *s)
{
    struct ns_error err = { 0 };
    enum ns_status status;
    int fd, exit_status;

    if (ns_arguments_load(&s->arguments, &s->options, &err) != NS_OK)
        return ns_command_fail(NS_EXIT_CONFIG, "%s", err.text);
    ns_setup_log(s->options);
    if (settle(s, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    fd = open(s->input, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return ns_command_fail(NS_EXIT_INPUT, "%s: %s", s->input,
                               strerror(errno));
    status = name_batch(s, fd, &err);
    if (status == NS_OK)
        status = each_line(s, fd, check_line, &err);
    if (status != NS_OK)
        exit_status = ns_command_fail(ns_exit_of(&err, NS_EXIT_INPUT), "%s",
                                      err.text);
    else if (s->n_jobs == 0)
        exit_status = ns_command_fail(NS_EXIT_INPUT, "%s holds no job",
                                      s->input);
    else if (s->n_bad > 0 && !s->send_bad)
        exit_status = ns_command_fail(NS_EXIT_INPUT, "%" PRIu64 " of %" PRIu64
                                      " jobs are bad; none was sent", s->n_bad,
                                      s->n_jobs);
    else
        exit_status = s->spool ? hand_in(s, fd, &err) : send_all(s, fd, &err);
    close(fd);
    return exit_status;
}

int
ns_command_submit(int argc, char **argv)
{
    struct submit s = { 0 };
    int status = read_arguments(&s, argc, argv);

    signal(SIGPIPE, SIG_IGN);
    if (status == -1)
        status = submit(&s);
    ns_kafka_producer_close(s.producer);
    free(s.settings);
    ns_options_destroy(s.options);
    return status;
}
