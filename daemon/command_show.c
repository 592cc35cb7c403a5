#include "daemon/command.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/reader.h"
#include "connectors/lines.h"
#include "daemon/arguments.h"
#include "daemon/setup.h"

static const char about[] =
    "Prints a results file for reading, in the order of its jobs.\n";

struct entry {
    uint64_t line; /* of the job */
    char sha256[65];
    json_t *value; /* owned: the result line, or the job's metadata */
};

struct entries {
    struct entry *entry; /* owned */
    size_t n, capacity;
    uint64_t n_lines; /* looked at, kept or not */
};

struct show {
    const char *results, *jobs, *answers;
    int width;
    bool thoughts;
};

/* --- reading ----------------------------------------------------------- */

static enum ns_status
add(struct entries *entries, uint64_t line, json_t *value,
    struct ns_error *err)
{
    if (entries->n == entries->capacity) {
        size_t capacity = entries->capacity ? entries->capacity * 2 : 64;
        struct entry *bigger =
            realloc(entries->entry, capacity * sizeof(*bigger));

        if (!bigger) {
            json_decref(value);
            return ns_fail(err, NS_FATAL, "out of memory");
        }
        entries->entry = bigger;
        entries->capacity = capacity;
    }
    entries->entry[entries->n] = (struct entry){ .line = line, .value = value };
    entries->n++;
    return NS_OK;
}

/* What of a line is kept, and the job's line in `*line`. NULL: nothing. */
typedef json_t *(*keep_fn)(json_t *root, uint64_t *line);

static json_t *
keep_result(json_t *root, uint64_t *line)
{
    json_t *number =
        json_object_get(json_object_get(root, "nightshift"), "line");

    if (!json_is_object(root) || !json_is_integer(number))
        return NULL;
    *line = (uint64_t)json_integer_value(number);
    return json_incref(root);
}

static json_t *
keep_metadata(json_t *root, uint64_t *line)
{
    (void)line; /* is the number of the line itself */
    return json_incref(
        json_object_get(json_object_get(root, "body"), "metadata"));
}

static json_t *
keep_answer(json_t *root, uint64_t *line)
{
    (void)line; /* they go by custom_id */
    return json_is_string(json_object_get(root, "answer")) ? json_incref(root)
                                                           : NULL;
}

static enum ns_status
read_lines(const char *path, int fd, keep_fn keep, struct entries *out,
           struct ns_error *err)
{
    const struct ns_lines_options options = { .max_line = 256u << 20 };
    struct ns_lines *lines;
    struct ns_line line;
    enum ns_status status;
    bool end = false;

    status = ns_lines_create(fd, &options, NULL, &lines, err);
    if (status != NS_OK)
        return status;
    while ((status = ns_lines_next(lines, &line, &end, err)) == NS_OK &&
           !end) {
        json_t *root = line.bytes ? json_loadb(line.bytes, line.length,
                                               JSON_ALLOW_NUL, NULL)
                                  : NULL;
        uint64_t number = line.number;
        json_t *kept = keep(root, &number);

        out->n_lines++;
        json_decref(root);
        if (!kept)
            continue; /* a torn last line, a bad job */
        status = add(out, number, kept, err);
        if (status != NS_OK)
            break;
        for (int i = 0; i < NS_SHA256_BYTES; i++)
            snprintf(out->entry[out->n - 1].sha256 + 2 * i, 3, "%02x",
                     line.sha256[i]);
    }
    ns_lines_destroy(lines);
    if (status != NS_OK)
        ns_context(err, "%s", path);
    return status;
}

static enum ns_status
read_file(const char *path, keep_fn keep, struct entries *out,
          struct ns_error *err)
{
    enum ns_status status;
    int fd;

    if (!path)
        return NS_OK;
    fd = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC) : 0;
    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "%s", path);
    status = read_lines(path, fd, keep, out, err);
    if (fd != 0)
        close(fd);
    return status;
}

static void
entries_fini(struct entries *entries)
{
    for (size_t i = 0; i < entries->n; i++)
        json_decref(entries->entry[i].value);
    free(entries->entry);
}

static int
by_line(const void *a, const void *b)
{
    uint64_t one = ((const struct entry *)a)->line;
    uint64_t two = ((const struct entry *)b)->line;

    return one < two ? -1 : one > two;
}

/* --- printing ---------------------------------------------------------- */

/* Bytes and columns of the next word, blanks not included. */
static size_t
word_length(const char *text, size_t length, int *columns)
{
    size_t at = 0;

    *columns = 0;
    while (at < length && text[at] != ' ' && text[at] != '\n') {
        size_t n = ns_utf8_char(text + at, length - at, NULL);

        at += n ? n : 1;
        (*columns)++;
    }
    return at;
}

/* The text may be anything: no byte of it drives the terminal. */
static void
put_word(const char *word, size_t length)
{
    for (size_t at = 0; at < length;) {
        uint32_t code;
        size_t n = ns_utf8_char(word + at, length - at, &code);

        if (n == 0 || code == 0x7f || (code >= 0x80 && code < 0xa0) ||
            (code < 0x20 && code != '\t'))
            fputs("\xef\xbf\xbd", stdout);
        else
            fwrite(word + at, 1, n, stdout);
        at += n ? n : 1;
    }
}

static void
put_text(const char *text, size_t length, int width, const char *indent)
{
    int used = 0, columns;
    size_t at = 0;
    bool begun = false;

    while (length > 0 && text[length - 1] == '\n')
        length--;
    while (at < length && text[at] == '\n')
        at++;
    while (at < length) {
        size_t blanks = 0, n;

        while (at + blanks < length && text[at + blanks] == ' ')
            blanks++;
        n = word_length(text + at + blanks, length - at - blanks, &columns);
        if (begun && used > 0 && used + (int)blanks + columns > width) {
            printf("\n");
            begun = false;
            used = 0;
            at += blanks;
            blanks = 0;
        }
        if (!begun && n + blanks > 0)
            fputs(indent, stdout);
        begun = begun || n + blanks > 0;
        printf("%*s", (int)blanks, "");
        put_word(text + at + blanks, n);
        used += (int)blanks + columns;
        at += blanks + n;
        if (at < length && text[at] == '\n') {
            printf("\n");
            begun = false;
            used = 0;
            at++;
        }
    }
    printf("\n");
}

static void
put_json_text(const json_t *text, int width, const char *indent)
{
    if (json_is_string(text))
        put_text(json_string_value(text), json_string_length(text), width,
                 indent);
}

static const char *
text_of(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

static void
put_cost(const json_t *body, const json_t *ours)
{
    const json_t *tokens = json_object_get(body, "usage");
    const json_t *choice =
        json_array_get(json_object_get(body, "choices"), 0);
    const json_t *per_pass = json_object_get(ours, "tokens_per_pass");
    json_int_t blocks =
        json_integer_value(json_object_get(ours, "blocks"));
    json_int_t steps =
        json_integer_value(json_object_get(ours, "denoise_steps"));
    json_int_t run_ms = json_integer_value(json_object_get(ours, "run_ms"));
    const char *mode = text_of(ours, "mode");
    const char *reason = text_of(choice, "finish_reason");

    printf("   %s, %" JSON_INTEGER_FORMAT " tokens of %" JSON_INTEGER_FORMAT,
           mode ? mode : "?",
           json_integer_value(json_object_get(tokens, "completion_tokens")),
           json_integer_value(json_object_get(tokens, "prompt_tokens")));
    if (json_is_number(per_pass))
        printf(", %.1f tokens per forward", json_number_value(per_pass));
    if (blocks > 0 && steps > 0)
        printf(", %.1f steps per canvas", (double)steps / (double)blocks);
    printf(", %.1f s, %s\n\n", (double)run_ms / 1000,
           reason ? reason : "?");
}

static void
put_answer(const struct show *show, const json_t *result)
{
    const json_t *ours = json_object_get(result, "nightshift");
    const json_t *body =
        json_object_get(json_object_get(result, "response"), "body");
    const json_t *message = json_object_get(
        json_array_get(json_object_get(body, "choices"), 0), "message");
    const json_t *calls = json_object_get(message, "tool_calls");
    const json_t *call;
    size_t i;

    put_cost(body, ours);
    if (show->thoughts && json_object_get(message, "reasoning_content")) {
        put_json_text(json_object_get(message, "reasoning_content"),
                      show->width - 5, "   ~ ");
        printf("\n");
    }
    put_json_text(json_object_get(message, "content"), show->width - 3, "   ");
    json_array_foreach(calls, i, call)
    {
        const json_t *function = json_object_get(call, "function");
        const char *name = text_of(function, "name");

        printf("   calls ");
        put_word(name ? name : "?", name ? strlen(name) : 1);
        printf("\n");
        put_json_text(json_object_get(function, "arguments"), show->width - 6,
                      "      ");
    }
}

static void
put_error(const struct show *show, const json_t *result)
{
    const json_t *error = json_object_get(result, "error");
    const char *code = text_of(error, "code");
    const char *param = text_of(error, "param");
    const char *status =
        text_of(json_object_get(result, "nightshift"), "status");

    printf("   %s: %s%s%s\n\n", status ? status : "failed", code ? code : "?",
           param ? ", " : "", param ? param : "");
    put_json_text(json_object_get(error, "message"), show->width - 3, "   ");
}

static const json_t *
metadata_of(const struct entries *jobs, const struct entry *result)
{
    const char *sha256 = text_of(
        json_object_get(result->value, "nightshift"), "input_sha256");
    const struct entry key = { .line = result->line };
    const struct entry *job = NULL;

    if (jobs->n > 0)
        job = bsearch(&key, jobs->entry, jobs->n, sizeof(key), by_line);
    /* An edited line is another job. */
    if (job && sha256 && strcmp(job->sha256, sha256) == 0)
        return job->value;
    return json_object_get(
        json_object_get(json_object_get(result->value, "response"), "body"),
        "metadata");
}

static const json_t *
reference_of(const struct entries *answers, const char *id,
             const json_t *metadata)
{
    for (size_t i = 0; id && i < answers->n; i++) {
        const json_t *answer = answers->entry[i].value;
        const char *whose = text_of(answer, "custom_id");

        if (whose && strcmp(whose, id) == 0)
            return json_object_get(answer, "answer");
    }
    return json_object_get(metadata, "reference");
}

static void
put_result(const struct show *show, const struct entry *entry,
           const json_t *metadata, const struct entries *answers)
{
    const char *id = text_of(entry->value, "custom_id");
    const char *title = text_of(metadata, "title");
    const json_t *reference = reference_of(answers, id, metadata);

    for (int i = 0; i < show->width; i++)
        fputs("-", stdout);
    printf("\n%" PRIu64 "  ", entry->line);
    put_word(title ? title : id ? id : "(no id)",
             strlen(title ? title : id ? id : "(no id)"));
    if (title && id) {
        printf("  (");
        put_word(id, strlen(id));
        printf(")");
    }
    printf("\n");
    if (json_is_object(json_object_get(entry->value, "response")))
        put_answer(show, entry->value);
    else
        put_error(show, entry->value);
    if (json_is_string(reference)) {
        printf("\n   reference:\n");
        put_json_text(reference, show->width - 3, "   ");
    }
    printf("\n");
}

static enum ns_status
show_results(const struct show *show, struct ns_error *err)
{
    struct entries results = { 0 }, jobs = { 0 }, answers = { 0 };
    enum ns_status status;

    status = read_file(show->results, keep_result, &results, err);
    if (status == NS_OK && results.n == 0 && results.n_lines > 0)
        status = ns_fail(err, NS_REJECT, "%s: no line of it is a result",
                         show->results);
    if (status == NS_OK)
        status = read_file(show->jobs, keep_metadata, &jobs, err);
    if (status == NS_OK)
        status = read_file(show->answers, keep_answer, &answers, err);
    if (status == NS_OK) {
        if (results.n > 0)
            qsort(results.entry, results.n, sizeof(struct entry), by_line);
        for (size_t i = 0; i < results.n; i++)
            put_result(show, &results.entry[i],
                       metadata_of(&jobs, &results.entry[i]), &answers);
    }
    entries_fini(&results);
    entries_fini(&jobs);
    entries_fini(&answers);
    return status;
}

static int
default_width(void)
{
    struct winsize size;

    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 20 &&
        size.ws_col < 80)
        return size.ws_col;
    return 80;
}

int
ns_command_show(int argc, char **argv)
{
    struct show show = { .width = default_width() };
    const char *width = NULL;
    const struct ns_argument table[] = {
        { "jobs", 'j', "FILE", "the job file: titles and reference answers "
          "come\nfrom metadata.title and metadata.reference of a job",
          .text = &show.jobs },
        { "answers", 'a', "FILE", "lines with custom_id and answer: reference "
          "answers", .text = &show.answers },
        { "width", 'w', "N", "of the text; default: the terminal's, at most "
          "80", .text = &width },
        { "thoughts", 0, NULL, "print thoughts as well",
          .flag = &show.thoughts },
        { 0 },
    };
    const struct ns_synopsis usage = {
        "nightshift show", "OUT [options]", about, table, 1, 1, true,
    };
    struct ns_arguments arguments = { 0 };
    struct ns_error err = { 0 };
    int status = ns_arguments_parse(&arguments, &usage, argc, argv);

    if (status != -1)
        return status;
    if (width) {
        show.width = atoi(width);
        if (show.width < 20 || show.width > 1000)
            return ns_command_fail(NS_EXIT_USAGE,
                                   "--width is within 20 and 1000");
    }
    show.results = argv[optind];
    if (show_results(&show, &err) != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_INPUT), "%s",
                               err.text);
    return NS_EXIT_OK;
}
