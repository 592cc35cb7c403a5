#include "connectors/job.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/reader.h"
#include "base/size.h"
#include "connectors/json.h"

enum {
    MAX_BYTES = 16 << 20,
    MAX_TOKENS = 262144, /* the longest context of the family */
    CANVAS = 256,
    CANVAS_LEAST = 64,
    CANVAS_STEP = 16,
    SHOWN = 48, /* bytes of a value that an error quotes */
};

/* What thinking may cost by reasoning_effort. */
static const struct {
    const char *name;
    uint32_t tokens;
} efforts[] = {
    { "none", 0 },      { "minimal", 512 }, { "low", 1024 },
    { "medium", 4096 }, { "high", 16384 },
};

static const char *const summarize_instruction =
    "Summarise the text that the user gives you. Keep to what it says, name "
    "its main points, and write nothing else.";

/* One parse: what the handlers of single fields share. */
struct parse {
    struct ns_job *job;
    const struct ns_job_options *options;
    struct ns_error *err;
    const json_t *nightshift; /* NULL: none */
    bool has_effort, has_budget;
    uint32_t effort_tokens;
    bool tools_off; /* tool_choice none */
};

/* A field of an object: its name, and what takes its value. `path` is the
 * field's full name. A null is an absent field: SDKs send it for that. */
struct field {
    const char *name;
    enum ns_status (*take)(struct parse *p, const json_t *value,
                           const char *path);
};

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory parsing a job");
}

/* ---- warnings -------------------------------------------------------- */

void
ns_job_warn(struct ns_job *job, const char *format, ...)
{
    const char **list = (const char **)job->warnings;
    char text[256];
    va_list ap;
    char *copy;
    int n;

    if (!list) {
        list = ns_arena_array(job->arena, NS_JOB_WARNINGS, sizeof(*list));
        if (!list)
            return;
        job->warnings = list;
    }
    if (job->n_warnings == NS_JOB_WARNINGS) {
        list[NS_JOB_WARNINGS - 1] = "and further warnings";
        return;
    }
    va_start(ap, format);
    n = vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    if (n < 0)
        return;
    copy = ns_arena_text(job->arena, text, strlen(text));
    if (copy)
        list[job->n_warnings++] = copy;
}

/* ---- values ---------------------------------------------------------- */

/* The value as an error quotes it: short, and safe in a log. */
static const char *
show(const json_t *value, char *out, size_t size)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        snprintf(out, size, "an object");
        break;
    case JSON_ARRAY:
        snprintf(out, size, "an array");
        break;
    case JSON_STRING:
        ns_log_escape(json_string_value(value), json_string_length(value), out,
                      size);
        break;
    case JSON_INTEGER:
        snprintf(out, size, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(out, size, "%.17g", json_real_value(value));
        break;
    case JSON_TRUE:
        snprintf(out, size, "true");
        break;
    case JSON_FALSE:
        snprintf(out, size, "false");
        break;
    case JSON_NULL:
        snprintf(out, size, "null");
        break;
    }
    return out;
}

static enum ns_status
wrong_kind(struct parse *p, const json_t *value, const char *path,
           const char *needed)
{
    char shown[SHOWN];

    return ns_refuse(p->err, "bad_param", path, "%s: %s, not %s", path,
                     show(value, shown, sizeof(shown)), needed);
}

static enum ns_status
unsupported(struct parse *p, const char *path, const char *what)
{
    return ns_refuse(p->err, "unsupported", path, "%s: %s is not supported",
                     path, what);
}

static enum ns_status
take_integer(struct parse *p, const json_t *value, const char *path,
             int64_t least, int64_t most, int64_t *out)
{
    int64_t n = 0;

    if (!json_is_integer(value))
        return wrong_kind(p, value, path, "a whole number");
    n = json_integer_value(value);
    if (n < least || n > most)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %" PRId64 " is outside %" PRId64 " to %" PRId64,
                         path, n, least, most);
    *out = n;
    return NS_OK;
}

static enum ns_status
take_u32(struct parse *p, const json_t *value, const char *path,
         uint32_t least, uint32_t most, uint32_t *out)
{
    enum ns_status status;
    int64_t n = 0;

    status = take_integer(p, value, path, least, most, &n);
    if (status == NS_OK)
        *out = (uint32_t)n;
    return status;
}

/* `above`: the least value itself is excluded. */
static enum ns_status
take_number(struct parse *p, const json_t *value, const char *path,
            double least, bool above, double most, double *out)
{
    double x;

    if (!json_is_number(value))
        return wrong_kind(p, value, path, "a number");
    x = json_number_value(value);
    if (!(above ? x > least : x >= least) || !(x <= most))
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %.17g is outside %s%g to %g", path, x,
                         above ? "above " : "", least, most);
    *out = x;
    return NS_OK;
}

/* Why `text` can not be an id or a name, or NULL. */
static const char *
bad_name(const char *text, size_t length, size_t most)
{
    if (length == 0)
        return "is empty";
    if (length > most)
        return "is too long";
    for (size_t i = 0; i < length;) {
        uint32_t c;
        size_t n = ns_utf8_char(text + i, length - i, &c);

        if (n == 0)
            return "is not UTF-8";
        if (c < 0x20 || (c >= 0x7f && c < 0xa0))
            return "holds a control character";
        i += n;
    }
    return NULL;
}

static enum ns_status
take_name(struct parse *p, const json_t *value, const char *path,
          const char **out)
{
    const char *why;

    if (!json_is_string(value))
        return wrong_kind(p, value, path, "a text");
    why = bad_name(json_string_value(value), json_string_length(value),
                   NS_JOB_BATCH_BYTES);
    if (why)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %s (%zu bytes, at most %d)", path, why,
                         json_string_length(value), NS_JOB_BATCH_BYTES);
    *out = json_string_value(value);
    return NS_OK;
}

/* ---- fields of the body ---------------------------------------------- */

static enum ns_status
take_model(struct parse *p, const json_t *value, const char *path)
{
    const struct ns_job_options *options = p->options;
    char shown[SHOWN];

    if (!json_is_string(value))
        return wrong_kind(p, value, path, "a text");
    p->job->model = json_string_value(value);
    if (options->model_names) {
        for (size_t i = 0; i < options->n_model_names; i++)
            if (strcmp(p->job->model, options->model_names[i]) == 0)
                return NS_OK;
        return ns_refuse(p->err, "unknown_model", path,
                         "%s: no model %s is served here", path,
                         show(value, shown, sizeof(shown)));
    }
    if (options->model_warning &&
        strcmp(p->job->model, options->model_warning) != 0)
        ns_job_warn(p->job, "%s: %s ran instead", path,
                    options->model_warning);
    return NS_OK;
}

/* A part of a message's content. `*says` is raised when it holds any text. */
static enum ns_status
check_part(struct parse *p, const json_t *part, const char *path, bool *says)
{
    const json_t *type, *text;
    char at[64];

    if (!json_is_object(part))
        return wrong_kind(p, part, path, "a content part");
    type = json_object_get(part, "type");
    snprintf(at, sizeof(at), "%s.type", path);
    if (!json_is_string(type))
        return ns_refuse(p->err, "bad_param", at, "%s: a text is needed", at);
    if (strcmp(json_string_value(type), "text") == 0) {
        text = json_object_get(part, "text");
        snprintf(at, sizeof(at), "%s.text", path);
        if (!json_is_string(text))
            return ns_refuse(p->err, "bad_param", at, "%s: a text is needed",
                             at);
        *says |= json_string_length(text) > 0;
        return NS_OK;
    }
    if (strcmp(json_string_value(type), "image_url") == 0)
        return unsupported(p, path, "an image");
    if (strcmp(json_string_value(type), "document") == 0)
        return unsupported(p, path, "a document by reference");
    if (strcmp(json_string_value(type), "input_audio") == 0)
        return unsupported(p, path, "audio");
    if (strcmp(json_string_value(type), "file") == 0)
        return unsupported(p, path, "a file");
    return wrong_kind(p, type, at, "a kind of content part");
}

static enum ns_status
check_message(struct parse *p, const json_t *message, size_t index, bool *says)
{
    static const char *const roles[] = { "system", "developer", "user",
                                         "assistant", "tool" };
    const json_t *role, *content, *calls;
    enum ns_status status;
    char at[64];

    snprintf(at, sizeof(at), "body.messages[%zu]", index);
    if (!json_is_object(message))
        return wrong_kind(p, message, at, "a message");

    role = json_object_get(message, "role");
    snprintf(at, sizeof(at), "body.messages[%zu].role", index);
    if (!json_is_string(role))
        return ns_refuse(p->err, "bad_param", at, "%s: a text is needed", at);
    for (size_t i = 0;; i++) {
        if (i == sizeof(roles) / sizeof(roles[0]))
            return wrong_kind(
                p, role, at,
                "one of system, developer, user, assistant, tool");
        if (strcmp(json_string_value(role), roles[i]) == 0)
            break;
    }

    calls = json_object_get(message, "tool_calls");
    *says |= json_array_size(calls) > 0;
    content = json_object_get(message, "content");
    snprintf(at, sizeof(at), "body.messages[%zu].content", index);
    if (!content || json_is_null(content))
        return NS_OK; /* an assistant's tool calls; else it says nothing */
    if (json_is_string(content)) {
        *says |= json_string_length(content) > 0;
        return NS_OK;
    }
    if (!json_is_array(content))
        return wrong_kind(p, content, at, "a text or a list of parts");
    for (size_t i = 0; i < json_array_size(content); i++) {
        snprintf(at, sizeof(at), "body.messages[%zu].content[%zu]", index, i);
        status = check_part(p, json_array_get(content, i), at, says);
        if (status != NS_OK)
            return status;
    }
    return NS_OK;
}

static enum ns_status
take_messages(struct parse *p, const json_t *value, const char *path)
{
    size_t n = json_array_size(value);
    enum ns_status status;
    bool says = false;

    if (!json_is_array(value))
        return wrong_kind(p, value, path, "a list of messages");
    if (n > NS_JOB_MESSAGES)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %zu messages, at most %d", path, n,
                         NS_JOB_MESSAGES);
    for (size_t i = 0; i < n; i++) {
        status = check_message(p, json_array_get(value, i), i, &says);
        if (status != NS_OK)
            return status;
    }
    if (!says)
        return ns_refuse(p->err, "empty_prompt", path,
                         "%s: %zu messages, and none says anything", path, n);
    p->job->messages = value;
    return NS_OK;
}

/* max_tokens and max_completion_tokens are one thing under two names. */
static enum ns_status
take_max_tokens(struct parse *p, const json_t *value, const char *path)
{
    uint32_t limit = p->options->max_tokens_limit;
    enum ns_status status;
    uint32_t n;

    status = take_u32(p, value, path, 1, limit ? limit : MAX_TOKENS, &n);
    if (status != NS_OK)
        return status;
    if (p->job->has_max_tokens && p->job->max_tokens != n)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: max_tokens and max_completion_tokens say %u and "
                         "%u",
                         path, p->job->max_tokens, n);
    p->job->has_max_tokens = true;
    p->job->max_tokens = n;
    return NS_OK;
}

static enum ns_status
take_temperature(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_temperature = true;
    return take_number(p, value, path, 0, false, 2, &p->job->temperature);
}

static enum ns_status
take_top_p(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_top_p = true;
    return take_number(p, value, path, 0, true, 1, &p->job->top_p);
}

static enum ns_status
take_seed(struct parse *p, const json_t *value, const char *path)
{
    if (!json_is_integer(value))
        return wrong_kind(p, value, path, "a whole number");
    p->job->has_seed = true;
    p->job->seed = (uint64_t)json_integer_value(value);
    return NS_OK;
}

static enum ns_status
take_stop(struct parse *p, const json_t *value, const char *path)
{
    size_t n = json_is_array(value) ? json_array_size(value) : 1;
    const char **stop;

    if (!json_is_array(value) && !json_is_string(value))
        return wrong_kind(p, value, path, "a text or a list of texts");
    if (n > NS_JOB_STOPS)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %zu stop strings, at most %d", path, n,
                         NS_JOB_STOPS);
    stop = ns_arena_array(p->job->arena, n, sizeof(*stop));
    if (!stop)
        return no_memory(p->err);
    for (size_t i = 0; i < n; i++) {
        const json_t *one =
            json_is_array(value) ? json_array_get(value, i) : value;
        size_t length = json_string_length(one);

        if (!json_is_string(one))
            return wrong_kind(p, one, path, "a text");
        if (length == 0 || length > NS_JOB_STOP_BYTES)
            return ns_refuse(p->err, "bad_param", path,
                             "%s: a stop string of %zu bytes, 1 to %d allowed",
                             path, length, NS_JOB_STOP_BYTES);
        stop[i] = json_string_value(one);
    }
    p->job->stop = stop;
    p->job->n_stop = n;
    return NS_OK;
}

static bool
is_tool_name(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz"
                            "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.");

    return n > 0 && n <= 64 && name[n] == '\0';
}

static enum ns_status
take_tools(struct parse *p, const json_t *value, const char *path)
{
    size_t n = json_array_size(value);
    char at[64];

    if (!json_is_array(value))
        return wrong_kind(p, value, path, "a list of tools");
    if (n > NS_JOB_TOOLS)
        return ns_refuse(p->err, "bad_param", path, "%s: %zu tools, at most %d",
                         path, n, NS_JOB_TOOLS);
    for (size_t i = 0; i < n; i++) {
        const json_t *tool = json_array_get(value, i);
        const json_t *type = json_object_get(tool, "type");
        const json_t *function = json_object_get(tool, "function");
        const json_t *name = json_object_get(function, "name");
        const json_t *parameters = json_object_get(function, "parameters");

        snprintf(at, sizeof(at), "body.tools[%zu]", i);
        if (!json_is_object(tool))
            return wrong_kind(p, tool, at, "a tool");
        snprintf(at, sizeof(at), "body.tools[%zu].type", i);
        if (!json_is_string(type))
            return ns_refuse(p->err, "bad_param", at, "%s: a text is needed",
                             at);
        if (strcmp(json_string_value(type), "function") != 0)
            return unsupported(p, at, "a tool other than a function");
        snprintf(at, sizeof(at), "body.tools[%zu].function.name", i);
        if (!json_is_string(name))
            return ns_refuse(p->err, "bad_param", at, "%s: a text is needed",
                             at);
        if (!is_tool_name(json_string_value(name)))
            return wrong_kind(p, name, at,
                              "a name of 1 to 64 letters, digits, _ - .");
        snprintf(at, sizeof(at), "body.tools[%zu].function.parameters", i);
        if (parameters && !json_is_object(parameters) &&
            !json_is_null(parameters))
            return wrong_kind(p, parameters, at, "a JSON schema");
    }
    p->job->tools = n ? value : NULL;
    return NS_OK;
}

static enum ns_status
take_tool_choice(struct parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    if (word && strcmp(word, "none") == 0) {
        p->tools_off = true;
        return NS_OK;
    }
    if (word && strcmp(word, "auto") == 0)
        return NS_OK;
    if (json_is_object(value) || (word && strcmp(word, "required") == 0))
        return unsupported(p, path, "forcing a tool call");
    return wrong_kind(p, value, path, "auto or none");
}

static enum ns_status
take_response_format(struct parse *p, const json_t *value, const char *path)
{
    const json_t *type = json_object_get(value, "type");

    if (!json_is_object(value) || !json_is_string(type))
        return wrong_kind(p, value, path, "an object with a type");
    if (strcmp(json_string_value(type), "text") == 0)
        return NS_OK;
    return unsupported(p, path, "an answer in a given form");
}

static enum ns_status
take_effort(struct parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    for (size_t i = 0; word && i < sizeof(efforts) / sizeof(efforts[0]); i++)
        if (strcmp(word, efforts[i].name) == 0) {
            p->has_effort = true;
            p->effort_tokens = efforts[i].tokens;
            return NS_OK;
        }
    return wrong_kind(p, value, path,
                      "one of none, minimal, low, medium, high");
}

static enum ns_status
take_metadata(struct parse *p, const json_t *value, const char *path)
{
    const char *key;
    json_t *text;

    if (!json_is_object(value))
        return wrong_kind(p, value, path, "an object of texts");
    if (json_object_size(value) > 16)
        return ns_refuse(p->err, "bad_param", path, "%s: %zu keys, at most 16",
                         path, json_object_size(value));
    json_object_foreach((json_t *)value, key, text)
        if (!json_is_string(text) || strlen(key) > 64 ||
            json_string_length(text) > 512)
            return ns_refuse(p->err, "bad_param", path,
                             "%s: keys of at most 64 bytes and texts of at "
                             "most 512 are needed",
                             path);
    p->job->metadata = value;
    return NS_OK;
}

static enum ns_status
take_n(struct parse *p, const json_t *value, const char *path)
{
    int64_t n = 0;

    if (take_integer(p, value, path, 1, INT32_MAX, &n) != NS_OK)
        return NS_REJECT;
    return n == 1 ? NS_OK : unsupported(p, path, "more than one choice");
}

/* logprobs, top_logprobs: off is fine. */
static enum ns_status
take_logprobs(struct parse *p, const json_t *value, const char *path)
{
    if (json_is_false(value) ||
        (json_is_integer(value) && json_integer_value(value) == 0))
        return NS_OK;
    return unsupported(p, path, "reporting log probabilities");
}

static enum ns_status
take_penalty(struct parse *p, const json_t *value, const char *path)
{
    if (!json_is_number(value))
        return wrong_kind(p, value, path, "a number");
    if (json_number_value(value) == 0)
        return NS_OK;
    return unsupported(p, path, "a penalty");
}

static enum ns_status
take_logit_bias(struct parse *p, const json_t *value, const char *path)
{
    if (json_is_object(value) && json_object_size(value) == 0)
        return NS_OK;
    return unsupported(p, path, "a bias on tokens");
}

static enum ns_status
take_modalities(struct parse *p, const json_t *value, const char *path)
{
    const char *only = json_string_value(json_array_get(value, 0));

    if (json_array_size(value) == 1 && only && strcmp(only, "text") == 0)
        return NS_OK;
    return unsupported(p, path, "an answer other than text");
}

static enum ns_status
take_audio(struct parse *p, const json_t *value, const char *path)
{
    (void)value;
    return unsupported(p, path, "audio");
}

static enum ns_status
take_functions(struct parse *p, const json_t *value, const char *path)
{
    (void)value;
    return unsupported(p, path, "the old form of tools");
}

static enum ns_status
take_ignored(struct parse *p, const json_t *value, const char *path)
{
    (void)value;
    ns_job_warn(p->job, "%s: ignored", path);
    return NS_OK;
}

static enum ns_status
take_nightshift(struct parse *p, const json_t *value, const char *path)
{
    (void)p, (void)value, (void)path; /* find_nightshift took it */
    return NS_OK;
}

static const struct field body_fields[] = {
    { "model", take_model },
    { "messages", take_messages },
    { "max_tokens", take_max_tokens },
    { "max_completion_tokens", take_max_tokens },
    { "temperature", take_temperature },
    { "top_p", take_top_p },
    { "seed", take_seed },
    { "stop", take_stop },
    { "tools", take_tools },
    { "tool_choice", take_tool_choice },
    { "response_format", take_response_format },
    { "reasoning_effort", take_effort },
    { "metadata", take_metadata },
    { "nightshift", take_nightshift },
    { "n", take_n },
    { "logprobs", take_logprobs },
    { "top_logprobs", take_logprobs },
    { "frequency_penalty", take_penalty },
    { "presence_penalty", take_penalty },
    { "logit_bias", take_logit_bias },
    { "modalities", take_modalities },
    { "audio", take_audio },
    { "functions", take_functions },
    { "function_call", take_functions },
    { "user", take_ignored },
    { "store", take_ignored },
    { "service_tier", take_ignored },
    { "stream", take_ignored },
    { "stream_options", take_ignored },
    { "parallel_tool_calls", take_ignored },
    { NULL, NULL },
};

/* ---- fields of `nightshift` ------------------------------------------ */

static enum ns_status
take_mode(struct parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    if (word && ns_job_mode_from(word, &p->job->mode))
        return NS_OK;
    return wrong_kind(p, value, path, "one of auto, diffusion, ar, hybrid");
}

static enum ns_status
take_batch(struct parse *p, const json_t *value, const char *path)
{
    (void)p, (void)value, (void)path; /* taken before, with the id */
    return NS_OK;
}

static enum ns_status
take_tenant(struct parse *p, const json_t *value, const char *path)
{
    return take_name(p, value, path, &p->job->tenant);
}

static enum ns_status
take_priority(struct parse *p, const json_t *value, const char *path)
{
    enum ns_status status;
    int64_t n = 0;

    status = take_integer(p, value, path, -100, 100, &n);
    if (status == NS_OK)
        p->job->priority = (int32_t)n;
    return status;
}

static bool
take_digits(struct ns_reader *reader, int n, int least, int most, int *out)
{
    char digits[4];
    int x = 0;

    if (!ns_reader_take(reader, digits, (size_t)n))
        return false;
    for (int i = 0; i < n; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return false;
        x = x * 10 + (digits[i] - '0');
    }
    *out = x;
    return x >= least && x <= most;
}

static bool
take_one_of(struct ns_reader *reader, const char *set, char *out)
{
    if (ns_reader_left(reader) == 0 || *reader->at == '\0' ||
        !strchr(set, *reader->at))
        return false;
    return ns_reader_take(reader, out, 1);
}

/* Days from 1970-01-01, for years 0 to 9999 of the civil calendar: the year is
 * begun in March, so that the leap day comes last. */
static int64_t
days_from_civil(int year, int month, int day)
{
    int y = month <= 2 ? year - 1 : year;
    int era = (y >= 0 ? y : y - 399) / 400;
    int of_era = y - era * 400;
    int of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    int64_t days = (int64_t)of_era * 365 + of_era / 4 - of_era / 100 + of_year;

    return (int64_t)era * 146097 + days - 719468;
}

/* RFC 3339: "2026-12-01T06:00:00.5+01:00" to Unix milliseconds. */
static bool
parse_time(const char *text, size_t length, int64_t *out_ms)
{
    static const int month_days[] = { 31, 28, 31, 30, 31, 30,
                                      31, 31, 30, 31, 30, 31 };
    struct ns_reader reader = ns_reader_over(text, length);
    int year, month, day, hour, minute, second;
    int zone_hour = 0, zone_minute = 0, most;
    int64_t ms = 0, minutes;
    char mark;

    if (!take_digits(&reader, 4, 0, 9999, &year) ||
        !take_one_of(&reader, "-", &mark) ||
        !take_digits(&reader, 2, 1, 12, &month) ||
        !take_one_of(&reader, "-", &mark) ||
        !take_digits(&reader, 2, 1, 31, &day) ||
        !take_one_of(&reader, "Tt ", &mark) ||
        !take_digits(&reader, 2, 0, 23, &hour) ||
        !take_one_of(&reader, ":", &mark) ||
        !take_digits(&reader, 2, 0, 59, &minute) ||
        !take_one_of(&reader, ":", &mark) ||
        !take_digits(&reader, 2, 0, 60, &second))
        return false;
    most = month_days[month - 1];
    if (month == 2 && year % 4 == 0 && (year % 100 != 0 || year % 400 == 0))
        most++;
    if (day > most)
        return false;

    if (take_one_of(&reader, ".", &mark)) {
        int64_t unit = 100;
        const unsigned char *first = reader.at;

        for (; reader.at < reader.end && *reader.at >= '0' &&
               *reader.at <= '9';
             reader.at++) {
            ms += (*reader.at - '0') * unit;
            unit /= 10; /* digits behind the third weigh nothing */
        }
        if (reader.at == first)
            return false;
    }
    if (!take_one_of(&reader, "Zz+-", &mark))
        return false;
    if (mark == '+' || mark == '-') {
        char colon;

        if (!take_digits(&reader, 2, 0, 23, &zone_hour) ||
            !take_one_of(&reader, ":", &colon) ||
            !take_digits(&reader, 2, 0, 59, &zone_minute))
            return false;
    }
    if (ns_reader_left(&reader))
        return false;

    minutes = days_from_civil(year, month, day) * 1440 + hour * 60 + minute;
    minutes -= (mark == '-' ? -1 : 1) * (zone_hour * 60 + zone_minute);
    *out_ms = (minutes * 60 + second) * 1000 + ms;
    return true;
}

static enum ns_status
take_deadline(struct parse *p, const json_t *value, const char *path)
{
    int64_t ms, most;

    if (!json_is_string(value) ||
        !parse_time(json_string_value(value), json_string_length(value), &ms))
        return wrong_kind(p, value, path,
                          "a time like 2026-12-01T06:00:00Z (RFC 3339)");
    most = p->options->now_ms + (int64_t)NS_JOB_DEADLINE_DAYS * 86400000;
    if (p->options->now_ms && ms > most) {
        ns_job_warn(p->job, "%s: cut to %d days from now", path,
                    NS_JOB_DEADLINE_DAYS);
        ms = most;
    }
    p->job->has_deadline = true;
    p->job->deadline_ms = ms;
    return NS_OK;
}

static enum ns_status
take_budget(struct parse *p, const json_t *value, const char *path)
{
    p->has_budget = true;
    return take_u32(p, value, path, 0, MAX_TOKENS, &p->job->thinking_budget);
}

static enum ns_status
take_canvas(struct parse *p, const json_t *value, const char *path)
{
    uint32_t most = p->options->canvas_length;
    enum ns_status status;
    uint32_t n;

    if (!most)
        most = CANVAS;
    status = take_u32(p, value, path, CANVAS_LEAST < most ? CANVAS_LEAST : most,
                      most, &n);
    if (status != NS_OK)
        return status;
    if (n % CANVAS_STEP)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %u is not a multiple of %d", path, n,
                         CANVAS_STEP);
    p->job->canvas_length = n;
    return NS_OK;
}

static enum ns_status
take_t_min(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_t_min = true;
    return take_number(p, value, path, 0, true, 10, &p->job->t_min);
}

static enum ns_status
take_t_max(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_t_max = true;
    return take_number(p, value, path, 0, true, 10, &p->job->t_max);
}

static enum ns_status
take_entropy_bound(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_entropy_bound = true;
    return take_number(p, value, path, 0, false, 1000, &p->job->entropy_bound);
}

static enum ns_status
take_steps(struct parse *p, const json_t *value, const char *path)
{
    return take_u32(p, value, path, 1, 1000, &p->job->max_denoising_steps);
}

static enum ns_status
take_stability(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_stability_threshold = true;
    return take_u32(p, value, path, 0, 1000, &p->job->stability_threshold);
}

static enum ns_status
take_confidence(struct parse *p, const json_t *value, const char *path)
{
    p->job->has_confidence_threshold = true;
    return take_number(p, value, path, 0, false, 1000,
                       &p->job->confidence_threshold);
}

/* A word, or an object {"type": word} with options of the task's own. Of
 * those none is built: a long document is summarised in one pass. */
static enum ns_status
take_task(struct parse *p, const json_t *value, const char *path)
{
    const json_t *type = value;
    const char *key, *word;
    json_t *option;
    char at[64];

    if (json_is_object(value)) {
        type = json_object_get(value, "type");
        json_object_foreach((json_t *)value, key, option) {
            if (strcmp(key, "type") == 0)
                continue;
            snprintf(at, sizeof(at), "%s.%.32s", path, key);
            return unsupported(p, at, "an option of a task");
        }
    }
    word = json_string_value(type);
    if (word && strcmp(word, "code") == 0)
        p->job->task = NS_JOB_TASK_CODE;
    else if (word && strcmp(word, "summarize") == 0)
        p->job->task = NS_JOB_TASK_SUMMARIZE;
    else
        return wrong_kind(p, type ? type : value, path,
                          "one of code, summarize");
    return NS_OK;
}

static enum ns_status
take_unbuilt(struct parse *p, const json_t *value, const char *path)
{
    (void)value;
    return unsupported(p, path, "the field");
}

static const struct field nightshift_fields[] = {
    { "mode", take_mode },
    { "batch", take_batch },
    { "tenant", take_tenant },
    { "priority", take_priority },
    { "deadline", take_deadline },
    { "thinking_budget", take_budget },
    { "canvas_length", take_canvas },
    { "t_min", take_t_min },
    { "t_max", take_t_max },
    { "entropy_bound", take_entropy_bound },
    { "max_denoising_steps", take_steps },
    { "stability_threshold", take_stability },
    { "confidence_threshold", take_confidence },
    { "task", take_task },
    { "image_tokens", take_unbuilt },
    { "draft", take_unbuilt },
    { "validators", take_unbuilt },
    { "retries", take_unbuilt },
    { NULL, NULL },
};

/* Takes every field of `object`. A field that the table lacks is an error
 * when `strict`, else a warning. */
static enum ns_status
take_fields(struct parse *p, const json_t *object, const char *prefix,
            const struct field *fields, bool strict)
{
    enum ns_status status;
    const char *key;
    json_t *value;
    char path[64];

    json_object_foreach((json_t *)object, key, value) {
        const struct field *field = fields;
        char shown[SHOWN];

        while (field->name && strcmp(field->name, key) != 0)
            field++;
        if (!field->name) {
            ns_log_escape(key, strlen(key), shown, sizeof(shown));
            if (!strict) {
                ns_job_warn(p->job, "%s%s: unknown, ignored", prefix, shown);
                continue;
            }
            snprintf(path, sizeof(path), "%s%.40s", prefix, key);
            return ns_refuse(p->err, "unknown_field", path,
                             "%s%s: there is no such field", prefix, shown);
        }
        if (json_is_null(value))
            continue;
        snprintf(path, sizeof(path), "%s%s", prefix, field->name);
        status = field->take(p, value, path);
        if (status != NS_OK)
            return status;
    }
    return NS_OK;
}

/* ---- the text, before it is parsed ----------------------------------- */

static bool
hex4(const char *at, const char *end, uint32_t *out)
{
    uint32_t x = 0;

    if (end - at < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = at[i];

        if (c >= '0' && c <= '9')
            x = x << 4 | (uint32_t)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            x = x << 4 | (uint32_t)((c | 32) - 'a' + 10);
        else
            return false;
    }
    *out = x;
    return true;
}

/* Judges the escape behind a backslash. NULL: fine, or left to the parser to
 * refuse; else what is wrong. Moves `at` behind it. */
static const char *
scan_escape(const char **at, const char *end)
{
    uint32_t c, low;

    if (*at == end || **at != 'u') {
        *at += *at != end;
        return NULL;
    }
    (*at)++;
    if (!hex4(*at, end, &c))
        return NULL;
    *at += 4;
    if (c == 0)
        return "a NUL character";
    if (c >= 0xdc00 && c <= 0xdfff)
        return "a lone surrogate";
    if (c < 0xd800 || c > 0xdbff)
        return NULL;
    if (end - *at < 6 || (*at)[0] != '\\' || (*at)[1] != 'u' ||
        !hex4(*at + 2, end, &low) || low < 0xdc00 || low > 0xdfff)
        return "a lone surrogate";
    *at += 6;
    return NULL;
}

/* One look over the bytes for what must be told apart from a plain mistake in
 * the grammar, and for the depth, which bounds the parser's recursion. */
static enum ns_status
scan(const char *bytes, size_t length, struct ns_error *err)
{
    const char *at = bytes, *end = bytes + length, *bad = NULL;
    bool in_string = false;
    int depth = 0;

    if (length >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0)
        return ns_refuse(err, "bad_json", NULL,
                         "the line starts with a byte order mark");
    while (at < end) {
        const char *start = at;
        unsigned char c = (unsigned char)*at;

        if (c >= 0x80 || c == 0) {
            size_t n = c ? ns_utf8_char(at, (size_t)(end - at), NULL) : 0;

            bad = n ? NULL : c ? "invalid UTF-8" : "a NUL byte";
            at += n;
        } else if (!in_string) {
            at++;
            if (c == '"')
                in_string = true;
            else if (c == '{' || c == '[')
                depth++;
            else if (c == '}' || c == ']')
                depth--;
            if (depth > NS_JOB_DEPTH)
                return ns_refuse(err, "bad_json", NULL,
                                 "nested deeper than %d at byte %zu",
                                 NS_JOB_DEPTH, (size_t)(start - bytes));
        } else {
            at++;
            if (c == '"')
                in_string = false;
            else if (c == '\\')
                bad = scan_escape(&at, end);
            else if (c < 0x20)
                bad = "a raw control character";
        }
        if (bad)
            return ns_refuse(err, "bad_text", NULL, "%s at byte %zu", bad,
                             (size_t)(start - bytes));
    }
    return NS_OK;
}

static void
drop_json(void *json)
{
    json_decref(json);
}

static enum ns_status
parse_text(struct parse *p, const struct ns_message *message, json_t **out)
{
    size_t most = p->options->max_bytes ? p->options->max_bytes : MAX_BYTES;
    char shown[120];
    json_error_t why;
    json_t *root;
    enum ns_status status;

    if (message->length == 0)
        return ns_refuse(p->err, "tombstone", NULL, "the message is empty");
    if (!message->bytes || message->length > most)
        return ns_refuse(p->err, "too_large", NULL,
                         "%" PRIu64 " bytes, at most %zu", message->length,
                         most);
    status = scan(message->bytes, (size_t)message->length, p->err);
    if (status != NS_OK)
        return status;

    ns_json_watch();
    root = json_loadb(message->bytes, (size_t)message->length,
                      JSON_REJECT_DUPLICATES, &why);
    if (ns_json_starved()) { /* also when it says that all is well */
        json_decref(root);
        return no_memory(p->err);
    }
    if (!root)
        return ns_refuse(p->err, "bad_json", NULL, "%s (line %d, column %d)",
                         ns_log_escape(why.text, strlen(why.text), shown,
                                       sizeof(shown)),
                         why.line, why.column);
    status = ns_arena_on_reset(p->job->arena, drop_json, root, p->err);
    if (status != NS_OK)
        return status;
    if (!json_is_object(root))
        return ns_refuse(p->err, "bad_json", NULL,
                         "the line is an array, not an object");
    *out = root;
    return NS_OK;
}

/* ---- the whole ------------------------------------------------------- */

/* `nightshift` stands in the body, where SDKs put extra fields, or beside it.
 * Looked up early: its batch is part of the id that a refusal names. */
static enum ns_status
find_nightshift(struct parse *p, const json_t *root)
{
    const json_t *beside = json_object_get(root, "nightshift");
    const json_t *inside =
        json_object_get(json_object_get(root, "body"), "nightshift");

    if (json_is_null(beside))
        beside = NULL;
    if (json_is_null(inside))
        inside = NULL;
    if (beside && inside)
        return ns_refuse(p->err, "bad_param", "nightshift",
                         "nightshift: stands in the body and beside it");
    p->nightshift = beside ? beside : inside;
    if (p->nightshift && !json_is_object(p->nightshift))
        return wrong_kind(p, p->nightshift, "nightshift", "an object");
    return NS_OK;
}

/* "jobs.jsonl:12:0a1b2c3d4e5f": the same for the same line of the same file. */
static const char *
id_from_position(struct ns_job *job)
{
    char id[NS_JOB_ID_BYTES];
    const char *name = job->origin;
    size_t length = strlen(name);
    const unsigned char *h = job->sha256;

    if (length > 100 || bad_name(name, length, 100))
        name = "line";
    snprintf(id, sizeof(id), "%s:%" PRIu64 ":%02x%02x%02x%02x%02x%02x", name,
             job->position.offset, h[0], h[1], h[2], h[3], h[4], h[5]);
    return ns_arena_text(job->arena, id, strlen(id));
}

static enum ns_status
take_custom_id(struct parse *p, const json_t *root)
{
    const json_t *id = json_object_get(root, "custom_id");
    struct ns_job *job = p->job;
    const char *why;

    if (id && !json_is_null(id)) {
        if (!json_is_string(id))
            return ns_refuse(p->err, "bad_id", "custom_id",
                             "custom_id: a text is needed");
        why = bad_name(json_string_value(id), json_string_length(id),
                       NS_JOB_ID_BYTES);
        if (why)
            return ns_refuse(p->err, "bad_id", "custom_id",
                             "custom_id: %s (%zu bytes, at most %d)", why,
                             json_string_length(id), NS_JOB_ID_BYTES);
        job->custom_id = json_string_value(id);
    } else if (p->options->id_from_position) {
        job->custom_id = id_from_position(job);
        if (!job->custom_id)
            return no_memory(p->err);
        ns_job_warn(job, "custom_id: missing, made from the position");
    } else {
        return ns_refuse(p->err, "missing_id", "custom_id",
                         "custom_id: missing");
    }
    job->id = job->custom_id;
    return NS_OK;
}

/* The job's id: its batch, if it has one, and its custom_id. */
static enum ns_status
take_id(struct parse *p)
{
    const json_t *batch = json_object_get(p->nightshift, "batch");
    struct ns_job *job = p->job;
    enum ns_status status;
    size_t bytes;
    char *joined;

    if (!batch || json_is_null(batch))
        return NS_OK;
    status = take_name(p, batch, "nightshift.batch", &job->batch);
    if (status != NS_OK)
        return status;
    if (strchr(job->batch, '/')) {
        job->batch = NULL;
        return ns_refuse(p->err, "bad_param", "nightshift.batch",
                         "nightshift.batch: holds a '/', which parts it from "
                         "custom_id in the job's id");
    }
    bytes = strlen(job->batch) + 1 + strlen(job->custom_id);
    if (bytes > NS_JOB_ID_BYTES)
        return ns_refuse(p->err, "bad_id", "custom_id",
                         "custom_id: with its batch %zu bytes, at most %d",
                         bytes, NS_JOB_ID_BYTES);
    joined = ns_arena_take(job->arena, bytes + 1);
    if (!joined)
        return no_memory(p->err);
    snprintf(joined, bytes + 1, "%s/%s", job->batch, job->custom_id);
    job->id = joined;
    return NS_OK;
}

static enum ns_status
take_line(struct parse *p, const json_t *root)
{
    const json_t *method = json_object_get(root, "method");
    const json_t *url = json_object_get(root, "url");
    const json_t *body = json_object_get(root, "body");
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)root, key, value) {
        char shown[SHOWN];

        if (strcmp(key, "custom_id") && strcmp(key, "method") &&
            strcmp(key, "url") && strcmp(key, "body") &&
            strcmp(key, "nightshift"))
            ns_job_warn(p->job, "%s: unknown, ignored",
                        ns_log_escape(key, strlen(key), shown, sizeof(shown)));
    }
    if (method && !json_is_null(method) &&
        (!json_is_string(method) ||
         strcmp(json_string_value(method), "POST") != 0))
        return wrong_kind(p, method, "method", "POST");
    if (url && !json_is_null(url) && !json_is_string(url))
        return wrong_kind(p, url, "url", "a text");
    if (json_is_string(url) &&
        strcmp(json_string_value(url), "/v1/chat/completions") != 0)
        return unsupported(p, "url", "a url but /v1/chat/completions");
    if (!body)
        return ns_refuse(p->err, "bad_param", "body", "body: missing");
    if (!json_is_object(body))
        return wrong_kind(p, body, "body", "an object");
    p->job->body = body;
    return NS_OK;
}

/* What single fields can not judge: those that bear on each other. */
static enum ns_status
check_together(struct parse *p)
{
    struct ns_job *job = p->job;

    if (!job->messages)
        return ns_refuse(p->err, "bad_param", "body.messages",
                         "body.messages: missing");
    if (p->tools_off)
        job->tools = NULL;
    if (p->has_effort && p->has_budget &&
        (p->effort_tokens == 0) != (job->thinking_budget == 0))
        return ns_refuse(p->err, "bad_param", "nightshift.thinking_budget",
                         "nightshift.thinking_budget: %u contradicts "
                         "reasoning_effort",
                         job->thinking_budget);
    if (p->has_effort && !p->has_budget)
        job->thinking_budget = p->effort_tokens;
    job->has_thinking = p->has_effort || p->has_budget;
    job->thinking = job->has_thinking && job->thinking_budget > 0;
    if (job->has_t_min && job->has_t_max && job->t_min > job->t_max)
        return ns_refuse(p->err, "bad_param", "nightshift.t_min",
                         "nightshift.t_min: %g is above t_max, %g", job->t_min,
                         job->t_max);
    if (job->mode == NS_JOB_DIFFUSION && job->has_top_p && job->top_p < 1)
        return unsupported(p, "body.top_p", "top_p below 1 in diffusion");
    return NS_OK;
}

/* The messages with the task's instruction behind what the system message
 * says, or as one of its own. The body itself stays as it stood. */
static enum ns_status
instruct(struct parse *p)
{
    const json_t *first = json_array_get(p->job->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    const char *text = json_string_value(json_object_get(first, "content"));
    json_t *messages, *system;
    enum ns_status status;
    bool own;

    own = !role || !text ||
          (strcmp(role, "system") != 0 && strcmp(role, "developer") != 0);
    ns_json_watch();
    messages = json_copy((json_t *)p->job->messages);
    if (!messages)
        return no_memory(p->err);
    status = ns_arena_on_reset(p->job->arena, drop_json, messages, p->err);
    if (status != NS_OK)
        return status;
    system = json_pack("{s:s, s:s++}", "role", own ? "system" : role,
                       "content", own ? "" : text, own ? "" : "\n\n",
                       summarize_instruction);
    if (!system || ns_json_starved() ||
        (own ? json_array_insert_new(messages, 0, system)
             : json_array_set_new(messages, 0, system)) == -1)
        return no_memory(p->err);
    p->job->messages = messages;
    return NS_OK;
}

static enum ns_status
parse(struct parse *p, const struct ns_message *message)
{
    enum ns_status status;
    json_t *root = NULL;

    status = parse_text(p, message, &root);
    if (status == NS_OK)
        status = take_custom_id(p, root);
    if (status == NS_OK)
        status = find_nightshift(p, root);
    if (status == NS_OK)
        status = take_id(p);
    if (status == NS_OK)
        status = take_line(p, root);
    if (status == NS_OK)
        status = take_fields(p, p->job->body, "body.", body_fields, false);
    if (status == NS_OK && p->nightshift)
        status = take_fields(p, p->nightshift, "nightshift.",
                             nightshift_fields, true);
    if (status == NS_OK)
        status = check_together(p);
    if (status == NS_OK && p->job->task == NS_JOB_TASK_SUMMARIZE)
        status = instruct(p);
    return status;
}

enum ns_status
ns_job_parse(const struct ns_message *message,
             const struct ns_job_options *options, struct ns_job **out,
             struct ns_error *err)
{
    const char *origin = message->origin ? message->origin : "";
    struct ns_arena *arena = NULL;
    enum ns_status status;
    struct parse p = { .options = options, .err = err };

    status = ns_arena_create(0, &arena, err);
    if (status != NS_OK)
        return status;
    p.job = ns_arena_take(arena, sizeof(*p.job));
    if (!p.job) {
        status = no_memory(err);
        goto out;
    }
    p.job->arena = arena;
    p.job->position = message->position;
    p.job->length = message->length;
    memcpy(p.job->sha256, message->sha256, sizeof(p.job->sha256));
    p.job->tenant = "default";
    p.job->origin = ns_arena_text(arena, origin, strlen(origin));
    if (!p.job->origin) {
        status = no_memory(err);
        goto out;
    }

    status = parse(&p, message);
    if (status != NS_OK && status != NS_REJECT)
        goto out;
    if (status == NS_REJECT)
        p.job->refusal = *err;
    *out = p.job;
    arena = NULL;
out:
    ns_arena_destroy(arena);
    return status;
}

/* ---- the id alone ---------------------------------------------------- */

static void
skip_blanks(const char **at, const char *end)
{
    while (*at < end &&
           (**at == ' ' || **at == '\t' || **at == '\r' || **at == '\n'))
        (*at)++;
}

/* Walks over a string, its quotes included. False: it does not end. */
static bool
skip_string(const char **at, const char *end)
{
    for (const char *c = *at + 1; c < end; c++) {
        if (*c == '\\')
            c++;
        else if (*c == '"') {
            *at = c + 1;
            return true;
        }
    }
    return false;
}

/* Walks to the comma or the brace behind a value of an object. */
static bool
skip_value(const char **at, const char *end)
{
    int64_t depth = 0;

    while (*at < end) {
        char c = **at;

        if (c == '"') {
            if (!skip_string(at, end))
                return false;
            continue;
        }
        if (depth == 0 && (c == ',' || c == '}'))
            return true;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        (*at)++;
    }
    return false;
}

/* The text between two quotes, escapes undone. */
static bool
copy_id(const char *quoted, size_t length, char out[NS_JOB_ID_BYTES + 1])
{
    json_t *text;
    bool fits;

    if (!memchr(quoted, '\\', length)) {
        if (length - 2 > NS_JOB_ID_BYTES)
            return false;
        memcpy(out, quoted + 1, length - 2);
        out[length - 2] = '\0';
        return strlen(out) == length - 2;
    }
    if (length > 6 * NS_JOB_ID_BYTES + 2) /* each byte an escape of six */
        return false;
    text = json_loadb(quoted, length, JSON_DECODE_ANY, NULL);
    fits = text && json_string_length(text) <= NS_JOB_ID_BYTES;
    if (fits)
        memcpy(out, json_string_value(text), json_string_length(text) + 1);
    json_decref(text);
    return fits;
}

bool
ns_job_peek_id(const char *bytes, size_t length,
               char out[NS_JOB_ID_BYTES + 1])
{
    static const char name[] = "\"custom_id\"";
    const char *at = bytes, *end = bytes + length;

    skip_blanks(&at, end);
    if (at == end || *at != '{')
        return false;
    do {
        const char *key, *value;
        bool is_id;

        at++; /* the brace or the comma */
        skip_blanks(&at, end);
        key = at;
        if (at == end || *at != '"' || !skip_string(&at, end))
            return false;
        is_id = (size_t)(at - key) == sizeof(name) - 1 &&
                memcmp(key, name, sizeof(name) - 1) == 0;
        skip_blanks(&at, end);
        if (at == end || *at != ':')
            return false;
        at++;
        skip_blanks(&at, end);
        value = at;
        if (is_id)
            return at < end && *at == '"' && skip_string(&at, end) &&
                   copy_id(value, (size_t)(at - value), out);
        if (!skip_value(&at, end))
            return false;
    } while (*at == ',');
    return false;
}

void
ns_job_destroy(struct ns_job *job)
{
    if (job)
        ns_arena_destroy(job->arena); /* takes the struct with it */
}

uint64_t
ns_job_seed(const struct ns_job *job, uint64_t base)
{
    return XXH64(job->id, strlen(job->id), base) >> 11;
}

static const char *const mode_names[] = { "auto", "diffusion", "ar", "hybrid" };

const char *
ns_job_mode_name(enum ns_job_mode mode)
{
    return mode_names[mode];
}

bool
ns_job_mode_from(const char *name, enum ns_job_mode *out)
{
    for (int i = 0; i < 4; i++)
        if (strcmp(name, mode_names[i]) == 0) {
            *out = (enum ns_job_mode)i;
            return true;
        }
    return false;
}
