/* The fields of a job's body: one handler each, listed in a table. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/reader.h"
#include "connectors/job_private.h"
#include "connectors/sha256.h"

/* What the engine takes too, and in floats. */
static const double TOP_P_LEAST = 1e-6;

/* What thinking may cost by reasoning_effort. */
static const struct {
    const char *name;
    uint32_t tokens;
} efforts[] = {
    { "none", 0 },      { "minimal", 512 }, { "low", 1024 },
    { "medium", 4096 }, { "high", 16384 },
};

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

enum ns_status
ns_job_wrong_kind(struct ns_parse *p, const json_t *value, const char *path,
                  const char *needed)
{
    char shown[NS_JOB_SHOWN];

    return ns_refuse(p->err, "bad_param", path, "%s: %s, not %s", path,
                     show(value, shown, sizeof(shown)), needed);
}

enum ns_status
ns_job_unsupported(struct ns_parse *p, const char *path, const char *what)
{
    return ns_refuse(p->err, "unsupported", path, "%s: %s is not supported",
                     path, what);
}

enum ns_status
ns_job_take_integer(struct ns_parse *p, const json_t *value, const char *path,
                    int64_t least, int64_t most, int64_t *out)
{
    int64_t n = 0;

    if (!json_is_integer(value))
        return ns_job_wrong_kind(p, value, path, "a whole number");
    n = json_integer_value(value);
    if (n < least || n > most)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %" PRId64 " is outside %" PRId64 " to %" PRId64,
                         path, n, least, most);
    *out = n;
    return NS_OK;
}

enum ns_status
ns_job_take_u32(struct ns_parse *p, const json_t *value, const char *path,
                uint32_t least, uint32_t most, uint32_t *out)
{
    enum ns_status status;
    int64_t n = 0;

    status = ns_job_take_integer(p, value, path, least, most, &n);
    if (status == NS_OK)
        *out = (uint32_t)n;
    return status;
}

/* `above`: the least value itself is excluded. */
enum ns_status
ns_job_take_number(struct ns_parse *p, const json_t *value, const char *path,
                   double least, bool above, double most, double *out)
{
    double x;

    if (!json_is_number(value))
        return ns_job_wrong_kind(p, value, path, "a number");
    x = json_number_value(value);
    if (!(above ? x > least : x >= least) || !(x <= most))
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %.17g is not %s %g and at most %g", path, x,
                         above ? "above" : "at least", least, most);
    *out = x;
    return NS_OK;
}

const char *
ns_job_bad_name(const char *text, size_t length, size_t most)
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

enum ns_status
ns_job_take_name(struct ns_parse *p, const json_t *value, const char *path,
                 const char **out)
{
    const char *why;

    if (!json_is_string(value))
        return ns_job_wrong_kind(p, value, path, "a text");
    why = ns_job_bad_name(json_string_value(value), json_string_length(value),
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
take_model(struct ns_parse *p, const json_t *value, const char *path)
{
    const struct ns_job_options *options = p->options;
    char shown[NS_JOB_SHOWN];

    if (!json_is_string(value))
        return ns_job_wrong_kind(p, value, path, "a text");
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
        ns_job_warn(p->job, "%s: %s ran instead", path, options->model_warning);
    return NS_OK;
}

/* {"url": "data:...", "detail": "auto"}, or the url alone. What the url leads
 * to is looked at when the job is prepared. */
static enum ns_status
check_image(struct ns_parse *p, const json_t *part, const char *path)
{
    const json_t *image = json_object_get(part, "image_url"), *url, *detail;
    const char *word;
    char at[80];

    if (!p->options->images)
        return ns_job_unsupported(p, path, "an image");
    url = json_is_string(image) ? image : json_object_get(image, "url");
    snprintf(at, sizeof(at), "%s.image_url.url", path);
    if (!json_is_string(url) || json_string_length(url) == 0)
        return ns_refuse(p->err, "bad_param", at, "%s: a text is needed", at);
    detail = json_object_get(image, "detail");
    word = json_string_value(detail);
    snprintf(at, sizeof(at), "%s.image_url.detail", path);
    if (detail && !json_is_null(detail) &&
        (!word || (strcmp(word, "auto") != 0 && strcmp(word, "low") != 0 &&
                   strcmp(word, "high") != 0)))
        return ns_job_wrong_kind(p, detail, at, "one of auto, low, high");
    if (++p->job->n_images > NS_JOB_IMAGES)
        return ns_refuse(p->err, "image_limit", path,
                         "%s: more than %d images", path, NS_JOB_IMAGES);
    return NS_OK;
}

/* {"id": ..., "sha256": ...}. The hash is what makes the same job say the same:
 * without it another document under the id would go unnoticed. */
static enum ns_status
check_document(struct ns_parse *p, const json_t *part, const char *path)
{
    const json_t *document = json_object_get(part, "document"), *id, *sha256;
    unsigned char bytes[NS_SHA256_BYTES];
    const char *key, *why;
    json_t *value;
    char at[80];

    if (!p->options->documents)
        return ns_refuse(p->err, "unsupported", path, "%s: a document by "
                         "reference needs a database or documents.roots to "
                         "look in", path);
    snprintf(at, sizeof(at), "%s.document", path);
    if (!json_is_object(document))
        return ns_refuse(p->err, "bad_param", at, "%s: an object with id and "
                         "sha256 is needed", at);
    json_object_foreach((json_t *)document, key, value)
        if (strcmp(key, "id") != 0 && strcmp(key, "sha256") != 0)
            return ns_refuse(p->err, "unknown_field", at, "%s: holds more than "
                             "id and sha256", at);
    id = json_object_get(document, "id");
    snprintf(at, sizeof(at), "%s.document.id", path);
    why = json_is_string(id) ? ns_job_bad_name(json_string_value(id),
                                               json_string_length(id),
                                               NS_JOB_ID_BYTES)
                             : "a text is needed";
    if (why)
        return ns_refuse(p->err, "bad_param", at, "%s: %s", at, why);
    sha256 = json_object_get(document, "sha256");
    snprintf(at, sizeof(at), "%s.document.sha256", path);
    if (!json_is_string(sha256) ||
        !ns_sha256_from(json_string_value(sha256), bytes))
        return ns_refuse(p->err, "bad_param", at, "%s: 64 hex digits are "
                         "needed", at);
    if (++p->job->n_documents > NS_JOB_DOCUMENTS)
        return ns_refuse(p->err, "document_limit", path,
                         "%s: more than %d documents", path, NS_JOB_DOCUMENTS);
    return NS_OK;
}

/* A part of a message's content. `*says` is raised when it holds any text. */
static enum ns_status
check_part(struct ns_parse *p, const json_t *part, const char *path, bool *says)
{
    const json_t *type, *text;
    char at[64];

    if (!json_is_object(part))
        return ns_job_wrong_kind(p, part, path, "a content part");
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
    if (strcmp(json_string_value(type), "image_url") == 0) {
        *says = true;
        return check_image(p, part, path);
    }
    if (strcmp(json_string_value(type), "document") == 0) {
        *says = true;
        return check_document(p, part, path);
    }
    if (strcmp(json_string_value(type), "input_audio") == 0)
        return ns_job_unsupported(p, path, "audio");
    if (strcmp(json_string_value(type), "file") == 0)
        return ns_job_unsupported(p, path, "a file");
    return ns_job_wrong_kind(p, type, at, "a kind of content part");
}

static enum ns_status
check_message(struct ns_parse *p, const json_t *message, size_t index,
              bool *says)
{
    static const char *const roles[] = { "system", "developer", "user",
                                         "assistant", "tool" };
    const json_t *role, *content, *calls;
    enum ns_status status;
    char at[64];

    snprintf(at, sizeof(at), "body.messages[%zu]", index);
    if (!json_is_object(message))
        return ns_job_wrong_kind(p, message, at, "a message");

    role = json_object_get(message, "role");
    snprintf(at, sizeof(at), "body.messages[%zu].role", index);
    if (!json_is_string(role))
        return ns_refuse(p->err, "bad_param", at, "%s: a text is needed", at);
    for (size_t i = 0;; i++) {
        if (i == sizeof(roles) / sizeof(roles[0]))
            return ns_job_wrong_kind(
                p, role, at, "one of system, developer, user, assistant, tool");
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
        return ns_job_wrong_kind(p, content, at, "a text or a list of parts");
    for (size_t i = 0; i < json_array_size(content); i++) {
        snprintf(at, sizeof(at), "body.messages[%zu].content[%zu]", index, i);
        status = check_part(p, json_array_get(content, i), at, says);
        if (status != NS_OK)
            return status;
    }
    return NS_OK;
}

static enum ns_status
take_messages(struct ns_parse *p, const json_t *value, const char *path)
{
    size_t n = json_array_size(value);
    enum ns_status status;
    bool says = false;

    if (!json_is_array(value))
        return ns_job_wrong_kind(p, value, path, "a list of messages");
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
take_max_tokens(struct ns_parse *p, const json_t *value, const char *path)
{
    uint32_t limit = p->options->max_tokens_limit;
    enum ns_status status;
    uint32_t n;

    status = ns_job_take_u32(p, value, path, 1,
                             limit ? limit : NS_JOB_MOST_TOKENS, &n);
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
take_temperature(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_temperature = true;
    return ns_job_take_number(p, value, path, 0, false, 2,
                              &p->job->temperature);
}

static enum ns_status
take_top_p(struct ns_parse *p, const json_t *value, const char *path)
{
    enum ns_status status;

    p->job->has_top_p = true;
    status = ns_job_take_number(p, value, path, 0, true, 1, &p->job->top_p);
    /* Below it the likeliest token is alone all the same. */
    if (status == NS_OK && p->job->top_p < TOP_P_LEAST)
        p->job->top_p = TOP_P_LEAST;
    return status;
}

static enum ns_status
take_seed(struct ns_parse *p, const json_t *value, const char *path)
{
    if (!json_is_integer(value))
        return ns_job_wrong_kind(p, value, path, "a whole number");
    p->job->has_seed = true;
    p->job->seed = (uint64_t)json_integer_value(value);
    return NS_OK;
}

static enum ns_status
take_stop(struct ns_parse *p, const json_t *value, const char *path)
{
    size_t n = json_is_array(value) ? json_array_size(value) : 1;
    const char **stop;

    if (!json_is_array(value) && !json_is_string(value))
        return ns_job_wrong_kind(p, value, path, "a text or a list of texts");
    if (n > NS_JOB_STOPS)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %zu stop strings, at most %d", path, n,
                         NS_JOB_STOPS);
    stop = ns_arena_array(p->job->arena, n, sizeof(*stop));
    if (!stop)
        return ns_job_no_memory(p->err);
    for (size_t i = 0; i < n; i++) {
        const json_t *one =
            json_is_array(value) ? json_array_get(value, i) : value;
        size_t length = json_string_length(one);

        if (!json_is_string(one))
            return ns_job_wrong_kind(p, one, path, "a text");
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
take_tools(struct ns_parse *p, const json_t *value, const char *path)
{
    size_t n = json_array_size(value);
    char at[64];

    if (!json_is_array(value))
        return ns_job_wrong_kind(p, value, path, "a list of tools");
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
            return ns_job_wrong_kind(p, tool, at, "a tool");
        snprintf(at, sizeof(at), "body.tools[%zu].type", i);
        if (!json_is_string(type))
            return ns_refuse(p->err, "bad_param", at, "%s: a text is needed",
                             at);
        if (strcmp(json_string_value(type), "function") != 0)
            return ns_job_unsupported(p, at, "a tool other than a function");
        snprintf(at, sizeof(at), "body.tools[%zu].function.name", i);
        if (!json_is_string(name))
            return ns_refuse(p->err, "bad_param", at, "%s: a text is needed",
                             at);
        if (!is_tool_name(json_string_value(name)))
            return ns_job_wrong_kind(
                p, name, at, "a name of 1 to 64 letters, digits, _ - .");
        snprintf(at, sizeof(at), "body.tools[%zu].function.parameters", i);
        if (parameters && !json_is_object(parameters) &&
            !json_is_null(parameters))
            return ns_job_wrong_kind(p, parameters, at, "a JSON schema");
    }
    p->job->tools = n ? value : NULL;
    return NS_OK;
}

static enum ns_status
take_tool_choice(struct ns_parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    if (word && strcmp(word, "none") == 0) {
        p->tools_off = true;
        return NS_OK;
    }
    if (word && strcmp(word, "auto") == 0)
        return NS_OK;
    if (json_is_object(value) || (word && strcmp(word, "required") == 0))
        return ns_job_unsupported(p, path, "forcing a tool call");
    return ns_job_wrong_kind(p, value, path, "auto or none");
}

static enum ns_status
take_effort(struct ns_parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    for (size_t i = 0; word && i < sizeof(efforts) / sizeof(efforts[0]); i++)
        if (strcmp(word, efforts[i].name) == 0) {
            p->has_effort = true;
            p->effort_tokens = efforts[i].tokens;
            return NS_OK;
        }
    return ns_job_wrong_kind(p, value, path,
                             "one of none, minimal, low, medium, high");
}

static enum ns_status
take_metadata(struct ns_parse *p, const json_t *value, const char *path)
{
    const char *key;
    json_t *text;

    if (!json_is_object(value))
        return ns_job_wrong_kind(p, value, path, "an object of texts");
    if (json_object_size(value) > 16)
        return ns_refuse(p->err, "bad_param", path, "%s: %zu keys, at most 16",
                         path, json_object_size(value));
    json_object_foreach((json_t *)value, key, text)
    {
        if (!json_is_string(text) || strlen(key) > 64 ||
            json_string_length(text) > 512)
            return ns_refuse(p->err, "bad_param", path,
                             "%s: keys of at most 64 bytes and texts of at "
                             "most 512 are needed",
                             path);
    }
    p->job->metadata = value;
    return NS_OK;
}

static enum ns_status
take_n(struct ns_parse *p, const json_t *value, const char *path)
{
    int64_t n = 0;

    if (ns_job_take_integer(p, value, path, 1, INT32_MAX, &n) != NS_OK)
        return NS_REJECT;
    return n == 1 ? NS_OK : ns_job_unsupported(p, path, "more than one choice");
}

/* logprobs, top_logprobs: off is fine. */
static enum ns_status
take_logprobs(struct ns_parse *p, const json_t *value, const char *path)
{
    if (json_is_false(value) ||
        (json_is_integer(value) && json_integer_value(value) == 0))
        return NS_OK;
    return ns_job_unsupported(p, path, "reporting log probabilities");
}

static enum ns_status
take_penalty(struct ns_parse *p, const json_t *value, const char *path)
{
    if (!json_is_number(value))
        return ns_job_wrong_kind(p, value, path, "a number");
    if (json_number_value(value) == 0)
        return NS_OK;
    return ns_job_unsupported(p, path, "a penalty");
}

static enum ns_status
take_logit_bias(struct ns_parse *p, const json_t *value, const char *path)
{
    if (json_is_object(value) && json_object_size(value) == 0)
        return NS_OK;
    return ns_job_unsupported(p, path, "a bias on tokens");
}

static enum ns_status
take_modalities(struct ns_parse *p, const json_t *value, const char *path)
{
    const char *only = json_string_value(json_array_get(value, 0));

    if (json_array_size(value) == 1 && only && strcmp(only, "text") == 0)
        return NS_OK;
    return ns_job_unsupported(p, path, "an answer other than text");
}

static enum ns_status
take_audio(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)value;
    return ns_job_unsupported(p, path, "audio");
}

static enum ns_status
take_functions(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)value;
    return ns_job_unsupported(p, path, "the old form of tools");
}

static enum ns_status
take_ignored(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)value;
    ns_job_warn(p->job, "%s: ignored", path);
    return NS_OK;
}

static enum ns_status
take_nightshift(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)p, (void)value, (void)path; /* find_nightshift took it */
    return NS_OK;
}

static const struct ns_job_field body_fields[] = {
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
    { "response_format", ns_job_take_response_format },
    { "structured_outputs", ns_job_take_structured },
    { "guided_json", ns_job_take_schema },
    { "guided_regex", ns_job_take_regex },
    { "guided_choice", ns_job_take_choice },
    { "guided_grammar", ns_job_take_grammar },
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

enum ns_status
ns_job_take_fields(struct ns_parse *p, const json_t *object, const char *prefix,
                   const struct ns_job_field *fields, bool strict)
{
    enum ns_status status;
    const char *key;
    json_t *value;
    char path[64];

    json_object_foreach((json_t *)object, key, value)
    {
        const struct ns_job_field *field = fields;
        char shown[NS_JOB_SHOWN];

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

enum ns_status
ns_job_take_body(struct ns_parse *p, const json_t *body)
{
    return ns_job_take_fields(p, body, "body.", body_fields, false);
}
