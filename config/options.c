#include "config/options.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/reader.h"
#include "base/size.h"

enum {
    FILE_LIMIT = 1 << 20,
    ARENA_LIMIT = 8 << 20,
    MAX_SETTINGS = 256, /* lines of [kafka] */
};

enum kind {
    PATH,     /* const char *: not empty */
    TEXT,     /* const char *: not empty */
    WORD,     /* const char *: one of the words of `choices` */
    CHOICE,   /* uint32_t: which of them */
    BOOL,     /* bool: yes, no, true, false, on, off, 1, 0 */
    COUNT,    /* uint32_t */
    NUMBER,   /* uint64_t */
    BYTES,    /* uint64_t: K, M, G, T are powers of 1024 */
    DURATION, /* uint64_t milliseconds: ms, s, m, h, d */
};

enum { RELOAD = 1 };

struct option {
    const char *key;
    enum kind kind;
    size_t field;
    const char *fallback; /* NULL: none */
    uint64_t least, most; /* of COUNT, NUMBER, BYTES, DURATION (ms) */
    const char *choices;  /* "a|b|c" */
    int flags;
    const char *meaning;
};

#define AT(field) offsetof(struct ns_options, field)
#define KB 1024ull
#define MB (1024 * KB)
#define GB (1024 * MB)
#define TB (1024 * GB)
#define SECOND 1000ull
#define HOUR (3600 * SECOND)

/* clang-format off */
static const struct option options_table[] = {
    { "engine.model", PATH, AT(engine.model), NULL, 0, 0, NULL, 0,
      "checkpoint folder" },
    { "engine.model_names", TEXT, AT(engine.model_names), NULL, 0, 0, NULL, 0,
      "comma list of what a job's `model` may say; unset: anything" },
    { "engine.backend", WORD, AT(engine.backend), "cpu", 0, 0, "cpu|cuda", 0,
      "where the arithmetic runs" },
    { "engine.device", COUNT, AT(engine.device), "0", 0, 63, NULL, 0,
      "which card, of those that the process sees" },
    { "engine.mode", CHOICE, AT(engine.mode), "auto", 0, 0,
      "auto|diffusion|ar|hybrid", RELOAD,
      "how to decode jobs that name no mode" },
    { "engine.auto", CHOICE, AT(engine.auto_by), "fixed", 0, 0,
      "fixed|throughput", RELOAD,
      "what resolves the mode `auto`: the job alone, or what is fastest" },
    { "engine.seed", NUMBER, AT(engine.seed), "0", 0, UINT64_MAX, NULL, RELOAD,
      "with the job id the seed of jobs that name none" },
    { "engine.pass_tokens", COUNT, AT(engine.pass_tokens), "0", 0, 1 << 20,
      NULL, 0, "rows of one pass; 0: 512 on cpu, 8192 on cuda" },
    { "engine.max_sequences", COUNT, AT(engine.max_sequences), "64", 1, 4096,
      NULL, 0, "jobs in the engine at once" },
    { "engine.reserve_tokens", COUNT, AT(engine.reserve_tokens), "2048", 1,
      1 << 20, NULL, 0, "admission reserves the prompt and this" },
    { "engine.memory", BYTES, AT(engine.memory_bytes), "0", 0, 64 * TB, NULL,
      0, "all that the engine may take; 0: 3/4 of what is available" },
    { "engine.kv_memory", BYTES, AT(engine.kv_bytes), "0", 0, 64 * TB, NULL,
      0, "of it for keys and values; 0: what is left" },
    { "engine.age_step", DURATION, AT(engine.age_step_ms), "10m", SECOND,
      240 * HOUR, NULL, 0, "waiting this long raises a job's priority by one" },
    { "engine.prefix_sharing", BOOL, AT(engine.prefix_sharing), "yes", 0, 0,
      NULL, 0, "prompts that start alike share their keys and values" },
    { "engine.compact_kv", BOOL, AT(engine.compact_kv), "yes", 0, 0, NULL, 0,
      "keep V and the rotated slice of K on full layers" },

    { "cpu.threads", COUNT, AT(cpu.threads), "0", 0, 1024, NULL, 0,
      "threads of a pass; 0: all that the process may use" },
    { "cpu.isa", WORD, AT(cpu.isa), "auto", 0, 0,
      "auto|ref|avx2|avx512|avx512bf16|amx", 0, "instruction set" },
    { "cpu.arithmetic", WORD, AT(cpu.arithmetic), "fp32", 0, 0, "fp32|fp8|bf16", 0,
      "what products are computed in; part of engine_rev" },

    { "cuda.arithmetic", WORD, AT(cuda.arithmetic), "auto", 0, 0,
      "auto|fp32|bf16|fp8", 0,
      "what products are computed in; part of engine_rev" },

    { "intake.spool", PATH, AT(intake.spool), NULL, 0, 0, NULL, 0,
      "folder with in/, work/, out/, done/, dead/" },
    { "intake.window", COUNT, AT(intake.window), "256", 1, 65536, NULL, 0,
      "jobs taken in and not yet stored" },
    { "intake.window_bytes", BYTES, AT(intake.window_bytes), "64M", KB, TB,
      NULL, 0, "of input in them; one job more may start" },
    { "intake.poll", DURATION, AT(intake.poll_ms), "1s", 10, 600 * SECOND,
      NULL, RELOAD, "how often in/ is looked at" },
    { "intake.allow_nfs", BOOL, AT(intake.allow_nfs), "no", 0, 0, NULL, 0,
      "accept a spool on NFS, where locks may lie" },
    { "intake.topics", TEXT, AT(intake.topics), NULL, 0, 0, NULL, 0,
      "comma list of Kafka topics that jobs come from" },
    { "intake.span", COUNT, AT(intake.span), "10000", 1, 10000000, NULL, 0,
      "offsets of one partition between its oldest job and its newest" },
    { "intake.id_from", TEXT, AT(intake.id_from), NULL, 0, 0, NULL, 0,
      "where a body without custom_id has it: key, or a header's name" },
    { "intake.tombstone_cancels", BOOL, AT(intake.tombstone_cancels), "no", 0,
      0, NULL, 0, "a null payload cancels the job that its key names" },
    { "intake.allow_plaintext", BOOL, AT(intake.allow_plaintext), "no", 0, 0,
      NULL, 0, "talk to brokers elsewhere without TLS" },
    { "intake.results_topic", TEXT, AT(intake.results_topic), NULL, 0, 0, NULL,
      0, "results are sent there as well" },
    { "intake.dead_letter_topic", TEXT, AT(intake.dead_letter_topic), NULL, 0,
      0, NULL, 0, "refused jobs are sent there as well" },

    { "postgres.conninfo", TEXT, AT(postgres.conninfo), NULL, 0, 0, NULL, 0,
      "where results go: host=... dbname=..., or a URI" },
    { "postgres.password_file", PATH, AT(postgres.password_file), NULL, 0, 0,
      NULL, 0, "file whose first line is the password" },
    { "postgres.connect", DURATION, AT(postgres.connect_ms), "5s", 100,
      600 * SECOND, NULL, 0, "longest wait for one address to answer" },
    { "postgres.answer", DURATION, AT(postgres.answer_ms), "30s", 100,
      600 * SECOND, NULL, 0, "longest wait for a statement" },
    { "postgres.lease", DURATION, AT(postgres.lease_ms), "30s", SECOND, HOUR,
      NULL, 0, "a job whose holder is silent this long is another's to take" },
    { "postgres.notify", BOOL, AT(postgres.notify), "no", 0, 0, NULL, 0,
      "NOTIFY nightshift_result for each result, nightshift_batch for each "
      "batch that ends" },
    { "postgres.allow_async_commit", BOOL, AT(postgres.allow_async_commit),
      "no", 0, 0, NULL, 0, "go on although the server may forget a result" },
    { "postgres.allow_plaintext", BOOL, AT(postgres.allow_plaintext), "no", 0,
      0, NULL, 0, "talk to a server elsewhere without TLS" },

    { "images.roots", TEXT, AT(images.roots), NULL, 0, 0, NULL, 0,
      "comma list of folders that jobs may name picture files in" },
    { "images.url_hosts", TEXT, AT(images.url_hosts), NULL, 0, 0, NULL, 0,
      "comma list of hosts that pictures may be fetched from" },
    { "images.url_networks", TEXT, AT(images.url_networks), NULL, 0, 0, NULL,
      0, "comma list of private networks that may be fetched from, too" },
    { "images.url_bytes", BYTES, AT(images.url_bytes), "20M", KB, GB, NULL, 0,
      "of all that is fetched for one job" },
    { "images.url_time", DURATION, AT(images.url_time_ms), "30s", 100, HOUR,
      NULL, 0, "for all that is fetched for one job" },
    { "images.url_redirects", COUNT, AT(images.url_redirects), "3", 0, 20,
      NULL, 0, "followed from one URL" },
    { "images.url_jobs", COUNT, AT(images.url_jobs), "16", 2, 256, NULL, 0,
      "jobs whose pictures are fetched at the same time" },

    { "documents.roots", TEXT, AT(documents.roots), NULL, 0, 0, NULL, 0,
      "without a database: comma list of folders of documents" },
    { "documents.limit", BYTES, AT(documents.limit_bytes), "16M", KB, GB, NULL,
      0, "one document" },
    { "documents.cache", BYTES, AT(documents.cache_bytes), "64M", 0, TB, NULL,
      0, "of documents of late, kept for the next job" },
    { "documents.wait", DURATION, AT(documents.wait_ms), "5m", 0, 24 * HOUR,
      NULL, 0, "a job waits this long for a document to be put" },

    { "validators.checks", TEXT, AT(validators.checks), NULL, 0, 0, NULL, 0,
      "comma list of control, repetition, fence, json, python, c: what an "
      "answer has to pass whose job names no validators" },
    { "validators.retries", COUNT, AT(validators.retries), "1", 0, 8, NULL, 0,
      "of an answer that a validator turns down, with another seed" },
    { "validators.python", PATH, AT(validators.python), NULL, 0, 0, NULL, 0,
      "Python that parses what a model wrote, and never runs it" },
    { "validators.cc", PATH, AT(validators.cc), NULL, 0, 0, NULL, 0,
      "C compiler that likewise parses" },

    { "limits.default_max_tokens", COUNT, AT(limits.default_max_tokens),
      "8192", 1, 1 << 20, NULL, RELOAD,
      "tokens of an answer whose job names no limit" },
    { "limits.summary_chunk", COUNT, AT(limits.summary_chunk), "32768", 0,
      1 << 20, NULL, RELOAD,
      "tokens of a part of a text that is summarised in parts; 0: what fits" },
    { "limits.message", BYTES, AT(limits.message_bytes), "16M", KB, GB, NULL,
      0, "one job, expanded" },
    { "limits.tenant_jobs", COUNT, AT(limits.tenant_jobs), "0", 0, 65536, NULL,
      RELOAD, "jobs of one tenant begun at a time; 0: any number" },

    { "daemon.drain", DURATION, AT(daemon.drain_ms), "90s", 0, 24 * HOUR,
      NULL, RELOAD, "time to finish after SIGTERM" },
    { "daemon.checkpoint", DURATION, AT(daemon.checkpoint_ms), "10s", 0, HOUR,
      NULL, RELOAD, "least time between two checkpoints of a job" },
    { "daemon.pass_limit", DURATION, AT(daemon.pass_limit_ms), "60s", SECOND,
      24 * HOUR, NULL, RELOAD,
      "a pass longer than this and ten times the longest before is stuck" },
    { "daemon.retry", DURATION, AT(daemon.retry_ms), "1s", 1, HOUR, NULL,
      RELOAD, "first delay after a failure, doubled each time up to 5m" },
    { "daemon.store_retry", DURATION, AT(daemon.store_retry_ms), "5s", 10, HOUR,
      NULL, RELOAD, "longest wait before a store that is away is asked again" },
    { "daemon.prepare_threads", COUNT, AT(daemon.prepare_threads), "2", 1, 64,
      NULL, 0, "threads that turn jobs into requests" },
    { "daemon.log_level", CHOICE, AT(daemon.log_level), "info", 0, 0,
      "error|warning|info|debug", RELOAD, "what is logged" },

    { "http.listen", TEXT, AT(http.listen), NULL, 0, 0, NULL, 0,
      "host:port of metrics, health and status page; unset: none" },
};
/* clang-format on */

static const size_t n_options =
    sizeof(options_table) / sizeof(options_table[0]);

bool
ns_option_at(size_t index, struct ns_option_info *out)
{
    const struct option *option;

    if (index >= n_options)
        return false;
    option = &options_table[index];
    *out = (struct ns_option_info){ option->key, option->fallback,
                                    option->meaning,
                                    (option->flags & RELOAD) != 0 };
    return true;
}

static const struct option *
find_option(const char *key)
{
    for (size_t i = 0; i < n_options; i++)
        if (strcmp(options_table[i].key, key) == 0)
            return &options_table[i];
    return NULL;
}

/* Index of `word` in "a|b|c", or -1. */
static int
choice_index(const char *choices, const char *word)
{
    size_t length = strlen(word);
    int index = 0;

    for (const char *at = choices;; index++) {
        size_t n = strcspn(at, "|");

        if (n == length && memcmp(at, word, n) == 0)
            return index;
        if (at[n] == '\0')
            return -1;
        at += n + 1;
    }
}

static void
choice_word(const char *choices, uint32_t index, char *out, size_t out_size)
{
    const char *at = choices;

    while (index-- > 0) {
        at += strcspn(at, "|");
        if (*at == '|')
            at++;
    }
    snprintf(out, out_size, "%.*s", (int)strcspn(at, "|"), at);
}

struct unit {
    const char *name;
    uint64_t scale;
};
static const struct unit byte_units[] = {
    { "", 1 }, { "K", KB }, { "M", MB }, { "G", GB }, { "T", TB }, { NULL, 0 },
};
static const struct unit time_units[] = {
    { "s", SECOND }, { "ms", 1 },        { "m", 60 * SECOND },
    { "h", HOUR },   { "d", 24 * HOUR }, { NULL, 0 },
};
static const struct unit no_units[] = { { "", 1 }, { NULL, 0 } };

/* Digits and a unit, nothing else: no sign, no space, no fraction. */
static bool
parse_number(const char *value, const struct unit *units, uint64_t *out)
{
    const char *end = value;
    uint64_t number = 0;

    while (isdigit((unsigned char)*end)) {
        if (__builtin_mul_overflow(number, 10u, &number) ||
            __builtin_add_overflow(number, (uint64_t)(*end - '0'), &number))
            return false;
        end++;
    }
    if (end == value)
        return false;
    for (; units->name; units++)
        if (strcmp(units->name, end) == 0)
            return !__builtin_mul_overflow(number, units->scale, out);
    /* A zero needs no unit. */
    *out = 0;
    return number == 0 && *end == '\0';
}

static const struct unit *
units_of(enum kind kind)
{
    if (kind == BYTES)
        return byte_units;
    return kind == DURATION ? time_units : no_units;
}

/* The largest unit that divides the number, so that it reads back as it was. */
static void
format_number(uint64_t number, const struct unit *units, char *out,
              size_t out_size)
{
    const struct unit *best = NULL;

    for (; units->name; units++)
        if (number % units->scale == 0 &&
            (!best || (number && units->scale > best->scale)))
            best = units;
    snprintf(out, out_size, "%llu%s",
             (unsigned long long)(number / best->scale), best->name);
}

static bool
parse_bool(const char *value, bool *out)
{
    static const char *const yes[] = { "yes", "true", "on", "1" };
    static const char *const no[] = { "no", "false", "off", "0" };

    for (size_t i = 0; i < 4; i++) {
        if (strcasecmp(value, yes[i]) == 0) {
            *out = true;
            return true;
        }
        if (strcasecmp(value, no[i]) == 0) {
            *out = false;
            return true;
        }
    }
    return false;
}

static enum ns_status
set_number(void *field, const struct option *option, const char *value,
           struct ns_error *err)
{
    const struct unit *units = units_of(option->kind);
    char least[32], most[32];
    uint64_t number;

    if (!parse_number(value, units, &number))
        return ns_fail(err, NS_REJECT, "%s: \"%.40s\" is not %s", option->key,
                       value,
                       option->kind == BYTES      ? "a size like 16M"
                       : option->kind == DURATION ? "a time like 90s"
                                                  : "a whole number");
    if (number < option->least || number > option->most) {
        format_number(option->least, units, least, sizeof(least));
        format_number(option->most, units, most, sizeof(most));
        return ns_fail(err, NS_REJECT, "%s: %.40s is not within %s and %s",
                       option->key, value, least, most);
    }
    if (option->kind == COUNT)
        *(uint32_t *)field = (uint32_t)number;
    else
        *(uint64_t *)field = number;
    return NS_OK;
}

static enum ns_status
set_option(struct ns_options *options, const struct option *option,
           const char *value, struct ns_error *err)
{
    void *field = (char *)options + option->field;
    char *text;
    int index;

    switch (option->kind) {
    case WORD:
    case CHOICE:
        index = choice_index(option->choices, value);
        if (index < 0)
            return ns_fail(err, NS_REJECT, "%s: \"%.40s\" is not one of %s",
                           option->key, value, option->choices);
        if (option->kind == CHOICE) {
            *(uint32_t *)field = (uint32_t)index;
            return NS_OK;
        }
        break;
    case PATH:
    case TEXT:
        if (*value == '\0')
            return ns_fail(err, NS_REJECT, "%s is empty", option->key);
        break;
    case BOOL:
        if (!parse_bool(value, field))
            return ns_fail(err, NS_REJECT, "%s: \"%.40s\" is not yes or no",
                           option->key, value);
        return NS_OK;
    case COUNT:
    case NUMBER:
    case BYTES:
    case DURATION:
        return set_number(field, option, value, err);
    }
    text = ns_arena_text(options->arena, value, strlen(value));
    if (!text)
        return ns_fail(err, NS_FATAL, "out of memory setting %s",
                       option->key);
    *(const char **)field = text;
    return NS_OK;
}

enum ns_status
ns_options_set(struct ns_options *options, const char *key, const char *value,
               struct ns_error *err)
{
    const struct option *option = find_option(key);

    if (!option)
        return ns_fail(err, NS_REJECT, "unknown key %.80s", key);
    return set_option(options, option, value, err);
}

void
ns_options_destroy(struct ns_options *options)
{
    if (!options)
        return;
    ns_arena_destroy(options->arena);
    free(options);
}

enum ns_status
ns_options_create(struct ns_options **out, struct ns_error *err)
{
    struct ns_options *options = calloc(1, sizeof(*options));
    enum ns_status status;

    if (!options)
        return ns_fail(err, NS_FATAL, "out of memory for options");
    status = ns_arena_create(ARENA_LIMIT, &options->arena, err);
    for (size_t i = 0; status == NS_OK && i < n_options; i++)
        if (options_table[i].fallback)
            status = set_option(options, &options_table[i],
                                options_table[i].fallback, err);
    if (status != NS_OK) {
        ns_options_destroy(options);
        return status;
    }
    *out = options;
    return NS_OK;
}

/* --- the file ---------------------------------------------------------- */

struct parse {
    struct ns_options *options;
    struct ns_reader text;
    const char *name;
    int line;   /* that inih works on: it is handed one at a time */
    bool *seen; /* [n_options] */
    struct ns_setting *settings;
    enum ns_status status;
    struct ns_error *err;
};

/* fgets over memory, for inih. It counts lines, since inih as Debian builds
 * it does not pass them on, and stops at one that inih would cut in two. */
static char *
next_line(char *line, int size, void *stream)
{
    struct parse *parse = stream;
    size_t left = ns_reader_left(&parse->text), length;
    const void *newline;

    if (left == 0 || parse->status != NS_OK)
        return NULL;
    newline = memchr(parse->text.at, '\n', left);
    length = newline
                 ? (size_t)((const unsigned char *)newline - parse->text.at) + 1
                 : left;
    parse->line++;
    if (length >= (size_t)size) {
        parse->status = ns_fail(parse->err, NS_REJECT,
                                "line is longer than %d bytes", size - 2);
        return NULL;
    }
    ns_reader_take(&parse->text, line, length);
    line[length] = '\0';
    return line;
}

static enum ns_status
add_setting(struct parse *parse, const char *key, const char *value)
{
    static const char *const refused[] = { "enable.auto.commit",
                                           "enable.auto.offset.store" };
    struct ns_options *options = parse->options;
    struct ns_setting *setting;

    /* Positions are ours to store, after the result is durable. */
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
        if (strcmp(key, refused[i]) == 0)
            return ns_fail(parse->err, NS_REJECT,
                           "kafka.%s is set by nightshift and not to be given",
                           key);
    for (size_t i = 0; i < options->n_kafka; i++)
        if (strcmp(options->kafka[i].key, key) == 0)
            return ns_fail(parse->err, NS_REJECT, "kafka.%.80s is set twice",
                           key);
    if (!parse->settings) {
        parse->settings = ns_arena_array(options->arena, MAX_SETTINGS,
                                         sizeof(*parse->settings));
        if (!parse->settings)
            return ns_fail(parse->err, NS_FATAL, "out of memory for [kafka]");
        options->kafka = parse->settings;
    }
    if (options->n_kafka == MAX_SETTINGS)
        return ns_fail(parse->err, NS_REJECT, "[kafka] has over %d keys",
                       MAX_SETTINGS);
    setting = &parse->settings[options->n_kafka];
    setting->key = ns_arena_text(options->arena, key, strlen(key));
    setting->value = ns_arena_text(options->arena, value, strlen(value));
    if (!setting->key || !setting->value)
        return ns_fail(parse->err, NS_FATAL, "out of memory for [kafka]");
    options->n_kafka++;
    return NS_OK;
}

static int
take_pair(void *user, const char *section, const char *name, const char *value)
{
    struct parse *parse = user;
    const struct option *option;
    char key[128];

    if (parse->status != NS_OK)
        return 0;
    if (strcmp(section, "kafka") == 0) {
        parse->status = add_setting(parse, name, value ? value : "");
        return parse->status == NS_OK;
    }
    snprintf(key, sizeof(key), "%s.%s", section, name);
    option = find_option(key);
    if (!option)
        parse->status = ns_fail(parse->err, NS_REJECT, "unknown key %.80s",
                                *section ? key : name);
    else if (parse->seen[option - options_table])
        parse->status = ns_fail(parse->err, NS_REJECT, "%s is set twice", key);
    else
        parse->status = set_option(parse->options, option, value ? value : "",
                                   parse->err);
    if (option)
        parse->seen[option - options_table] = true;
    return parse->status == NS_OK;
}

enum ns_status
ns_options_parse(const char *text, size_t length, const char *name,
                 struct ns_options **out, struct ns_error *err)
{
    bool seen[sizeof(options_table) / sizeof(options_table[0])] = { false };
    struct parse parse = { .text = ns_reader_over(text, length),
                           .name = name, .seen = seen, .err = err };
    enum ns_status status;
    int failed;

    if (memchr(text, '\0', length) || ns_utf8_span(text, length) != length)
        return ns_fail(err, NS_REJECT, "%s: not a text file", name);
    status = ns_options_create(&parse.options, err);
    if (status != NS_OK)
        return status;
    failed = ini_parse_stream(next_line, &parse, take_pair, &parse);
    status = parse.status;
    /* inih reads on behind a line that it cannot read: the first one counts. */
    if (status != NS_OK && (failed <= 0 || failed >= parse.line))
        ns_context(err, "%s:%d", name, parse.line);
    else if (failed > 0)
        status = ns_fail(err, NS_REJECT, "%s:%d: neither [section], "
                         "key = value nor a comment", name, failed);
    else if (failed < 0)
        status = ns_fail(err, NS_FATAL, "out of memory reading %s", name);
    if (status != NS_OK) {
        ns_options_destroy(parse.options);
        return status;
    }
    *out = parse.options;
    return NS_OK;
}

static enum ns_status
read_file(int fd, const char *path, struct ns_buf *text, struct ns_error *err)
{
    struct stat st;
    ssize_t n;

    if (fstat(fd, &st) == -1)
        return ns_fail_errno(err, NS_REJECT, "stat %s", path);
    if (!S_ISREG(st.st_mode))
        return ns_fail(err, NS_REJECT, "%s is not a file", path);
    if (st.st_mode & (S_IWGRP | S_IWOTH))
        return ns_fail(err, NS_REJECT,
                       "%s may be written by its group or by all (mode %03o): "
                       "chmod go-w it", path, (unsigned)st.st_mode & 0777);
    do {
        char *room = ns_buf_room(text, 4096);

        if (!room)
            return ns_buf_check(text, path, err);
        n = read(fd, room, 4096);
        if (n < 0 && errno != EINTR)
            return ns_fail_errno(err, NS_REJECT, "read %s", path);
        if (n > 0)
            text->length += (size_t)n;
    } while (n != 0);
    return NS_OK;
}

enum ns_status
ns_options_load(const char *path, struct ns_options **out,
                struct ns_error *err)
{
    enum ns_status status;
    struct ns_buf text;
    int fd;

    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "open %s", path);
    ns_buf_init(&text, FILE_LIMIT);
    status = read_file(fd, path, &text, err);
    if (status == NS_OK)
        status = ns_options_parse(text.data ? text.data : "", text.length,
                                  path, out, err);
    ns_buf_fini(&text);
    close(fd);
    return status;
}

/* --- out again --------------------------------------------------------- */

static void
format_option(const struct ns_options *options, const struct option *option,
              char *out, size_t out_size)
{
    const void *field = (const char *)options + option->field;
    const char *text;

    switch (option->kind) {
    case PATH:
    case TEXT:
    case WORD:
        text = *(const char *const *)field;
        snprintf(out, out_size, "%s", text ? text : "");
        break;
    case CHOICE:
        choice_word(option->choices, *(const uint32_t *)field, out, out_size);
        break;
    case BOOL:
        snprintf(out, out_size, "%s", *(const bool *)field ? "yes" : "no");
        break;
    case COUNT:
        snprintf(out, out_size, "%u", *(const uint32_t *)field);
        break;
    case NUMBER:
    case BYTES:
    case DURATION:
        format_number(*(const uint64_t *)field, units_of(option->kind), out,
                      out_size);
        break;
    }
}

enum { VALUE_SIZE = 4096 }; /* PATH_MAX: more is of no use to anyone */

enum ns_status
ns_options_adopt(struct ns_options *live, const struct ns_options *fresh,
                 void (*report)(void *data, const char *key, bool taken),
                 void *data, struct ns_error *err)
{
    struct ns_options next = *live; /* so that a failure leaves no mixture */
    char was[VALUE_SIZE], is[VALUE_SIZE];
    enum ns_status status;

    for (size_t i = 0; i < n_options; i++) {
        const struct option *option = &options_table[i];

        format_option(fresh, option, is, sizeof(is));
        if (!(option->flags & RELOAD) || *is == '\0')
            continue;
        status = set_option(&next, option, is, err);
        if (status != NS_OK)
            return status;
    }
    for (size_t i = 0; report && i < n_options; i++) {
        const struct option *option = &options_table[i];

        format_option(live, option, was, sizeof(was));
        format_option(fresh, option, is, sizeof(is));
        if (strcmp(was, is) != 0)
            report(data, option->key, (option->flags & RELOAD) != 0);
    }
    *live = next;
    return NS_OK;
}

static bool
is_secret(const char *key)
{
    static const char *const parts[] = { "password", "secret", "token", "pem",
                                         "ssl.key", "oauthbearer.config" };

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (strstr(key, parts[i]))
            return true;
    return false;
}

void
ns_options_print(const struct ns_options *options, FILE *file)
{
    char value[VALUE_SIZE];
    const char *section = "";
    size_t section_length = 0;

    for (size_t i = 0; i < n_options; i++) {
        const struct option *option = &options_table[i];
        size_t n = strcspn(option->key, ".");

        if (n != section_length || memcmp(option->key, section, n) != 0) {
            fprintf(file, "%s[%.*s]\n", i ? "\n" : "", (int)n, option->key);
            section = option->key;
            section_length = n;
        }
        format_option(options, option, value, sizeof(value));
        if (*value)
            fprintf(file, "%s = %s\n", option->key + n + 1, value);
        else
            fprintf(file, "# %s is not set\n", option->key + n + 1);
    }
    if (options->n_kafka)
        fprintf(file, "\n[kafka]\n");
    for (size_t i = 0; i < options->n_kafka; i++)
        fprintf(file, "%s = %s\n", options->kafka[i].key,
                is_secret(options->kafka[i].key) ? "***"
                                                 : options->kafka[i].value);
}
