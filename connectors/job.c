#include "connectors/job.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "connectors/job_private.h"
#include "connectors/json.h"

enum { MAX_BYTES = 16 << 20 };

static const char *const summarize_instruction =
    "Summarise the text that the user gives you. Keep to what it says, name "
    "its main points, and write nothing else.";

enum ns_status
ns_job_no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory parsing a job");
}

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

/* A copy in the job's arena; NULL stays NULL. */
static enum ns_status
copy_text(struct ns_parse *p, const char *text, const char **out)
{
    if (!text)
        return NS_OK;
    *out = ns_arena_text(p->job->arena, text, strlen(text));
    return *out ? NS_OK : ns_job_no_memory(p->err);
}

static void
drop_json(void *json)
{
    json_decref(json);
}

static enum ns_status
parse_text(struct ns_parse *p, const struct ns_message *message, json_t **out)
{
    size_t most = p->options->max_bytes ? p->options->max_bytes : MAX_BYTES;
    char shown[120];
    json_error_t why;
    json_t *root;
    enum ns_status status;

    if (message->length == 0 && message->cancels && p->job->id)
        return ns_refuse(p->err, "cancel", NULL, "cancelled by a tombstone");
    if (message->length == 0)
        return ns_refuse(p->err, "tombstone", NULL, "the message is empty");
    if (!message->bytes || message->length > most)
        return ns_refuse(p->err, "too_large", NULL,
                         "%" PRIu64 " bytes, at most %zu", message->length,
                         most);
    if (message->bad_frame)
        return ns_refuse(p->err, "bad_lz4", NULL, "it begins as an LZ4 frame "
                         "and is broken");
    status = ns_job_scan(message->bytes, (size_t)message->length, p->err);
    if (status != NS_OK)
        return status;

    ns_json_watch();
    root = json_loadb(message->bytes, (size_t)message->length,
                      JSON_REJECT_DUPLICATES, &why);
    if (ns_json_starved()) { /* also when it says that all is well */
        json_decref(root);
        return ns_job_no_memory(p->err);
    }
    if (!root)
        return ns_refuse(
            p->err, "bad_json", NULL, "%s (line %d, column %d)",
            ns_log_escape(why.text, strlen(why.text), shown, sizeof(shown)),
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

/* `nightshift` stands in the body, where SDKs put extra fields, or beside it.
 * Looked up early: its batch is part of the id that a refusal names. */
static enum ns_status
find_nightshift(struct ns_parse *p, const json_t *root)
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
        return ns_job_wrong_kind(p, p->nightshift, "nightshift", "an object");
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

    if (length > 100 || ns_job_bad_name(name, length, 100))
        name = "line";
    snprintf(id, sizeof(id), "%s:%" PRIu64 ":%02x%02x%02x%02x%02x%02x", name,
             job->position.offset, h[0], h[1], h[2], h[3], h[4], h[5]);
    return ns_arena_text(job->arena, id, strlen(id));
}

/* Key or header name the job where the body does not, or can not: a message
 * that is refused unread is then still known by its sender's id. */
static enum ns_status
take_outer_id(struct ns_parse *p, const struct ns_message *message)
{
    struct ns_job *job = p->job;
    const char *id = message->id;
    const char *batch = message->batch;
    enum ns_status status = NS_OK;

    if (batch && !ns_job_bad_name(batch, strlen(batch), NS_JOB_BATCH_BYTES) &&
        !strchr(batch, '/'))
        status = copy_text(p, batch, &job->batch); /* counts it, at least */
    if (!id || ns_job_bad_name(id, strlen(id), NS_JOB_ID_BYTES))
        return status; /* then the body must have one */
    if (status == NS_OK)
        status = copy_text(p, id, &job->custom_id);
    if (!message->batch) /* else it is only a part of the id */
        job->id = job->custom_id;
    return status;
}

static enum ns_status
take_custom_id(struct ns_parse *p, const json_t *root)
{
    const json_t *id = json_object_get(root, "custom_id");
    struct ns_job *job = p->job;
    const char *why;

    if (id && !json_is_null(id)) {
        if (!json_is_string(id))
            return ns_refuse(p->err, "bad_id", "custom_id",
                             "custom_id: a text is needed");
        why = ns_job_bad_name(json_string_value(id), json_string_length(id),
                              NS_JOB_ID_BYTES);
        if (why)
            return ns_refuse(p->err, "bad_id", "custom_id",
                             "custom_id: %s (%zu bytes, at most %d)", why,
                             json_string_length(id), NS_JOB_ID_BYTES);
        job->custom_id = json_string_value(id);
    } else if (job->custom_id) {
        /* by key or header */
    } else if (p->options->id_from_position) {
        job->custom_id = id_from_position(job);
        if (!job->custom_id)
            return ns_job_no_memory(p->err);
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
take_id(struct ns_parse *p, const struct ns_message *message)
{
    const json_t *batch = json_object_get(p->nightshift, "batch");
    struct ns_job *job = p->job;
    enum ns_status status = NS_OK;
    size_t bytes;
    char *joined;

    if (batch && !json_is_null(batch))
        status = ns_job_take_name(p, batch, "nightshift.batch", &job->batch);
    else if (!message->batch)
        return NS_OK;
    else if (ns_job_bad_name(message->batch, strlen(message->batch),
                             NS_JOB_BATCH_BYTES))
        return ns_refuse(p->err, "bad_id", "nightshift-batch",
                         "header nightshift-batch: not usable as a name");
    else
        status = copy_text(p, message->batch, &job->batch);
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
        return ns_job_no_memory(p->err);
    snprintf(joined, bytes + 1, "%s/%s", job->batch, job->custom_id);
    job->id = joined;
    return NS_OK;
}

static enum ns_status
take_line(struct ns_parse *p, const json_t *root)
{
    const json_t *method = json_object_get(root, "method");
    const json_t *url = json_object_get(root, "url");
    const json_t *body = json_object_get(root, "body");
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)root, key, value)
    {
        char shown[NS_JOB_SHOWN];

        if (strcmp(key, "custom_id") && strcmp(key, "method") &&
            strcmp(key, "url") && strcmp(key, "body") &&
            strcmp(key, "nightshift"))
            ns_job_warn(p->job, "%s: unknown, ignored",
                        ns_log_escape(key, strlen(key), shown, sizeof(shown)));
    }
    if (method && !json_is_null(method) &&
        (!json_is_string(method) ||
         strcmp(json_string_value(method), "POST") != 0))
        return ns_job_wrong_kind(p, method, "method", "POST");
    if (url && !json_is_null(url) && !json_is_string(url))
        return ns_job_wrong_kind(p, url, "url", "a text");
    if (json_is_string(url) &&
        strcmp(json_string_value(url), "/v1/chat/completions") != 0)
        return ns_job_unsupported(p, "url", "a url but /v1/chat/completions");
    if (!body)
        return ns_refuse(p->err, "bad_param", "body", "body: missing");
    if (!json_is_object(body))
        return ns_job_wrong_kind(p, body, "body", "an object");
    p->job->body = body;
    return NS_OK;
}

/* Whether the messages are a text to summarise, and not a conversation. */
static bool
is_one_turn(const json_t *messages)
{
    size_t n_turns = 0;

    for (size_t i = 0; i < json_array_size(messages); i++) {
        const char *role = json_string_value(
            json_object_get(json_array_get(messages, i), "role"));

        n_turns += role && strcmp(role, "system") != 0 &&
                   strcmp(role, "developer") != 0;
    }
    return n_turns <= 1;
}

/* What single fields can not judge: those that bear on each other. */
static enum ns_status
check_together(struct ns_parse *p)
{
    struct ns_job *job = p->job;

    if (!job->messages)
        return ns_refuse(p->err, "bad_param", "body.messages",
                         "body.messages: missing");
    if (p->tools_off)
        job->tools = NULL;
    if ((job->validators & 1u << NS_VALIDATOR_SCHEMA) && !job->answer_schema) {
        if (job->form != NS_JOB_FORM_SCHEMA)
            return ns_refuse(p->err, "bad_param", "nightshift.validators",
                             "nightshift.validators: schema needs one: "
                             "{\"schema\": {...}}, or response_format");
        job->answer_schema = job->form_of;
    }
    if (job->form != NS_JOB_FORM_ANY && job->tools)
        return ns_job_unsupported(p, job->form_path,
                                  "a form of the answer beside tools");
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
    if (job->chunk_tokens &&
        (job->thinking || job->tools || job->draft || job->n_images > 0 ||
         !is_one_turn(job->messages)))
        return ns_job_unsupported(p, "nightshift.task.chunk_tokens",
                                  "a size of parts beside a thought, tools, a "
                                  "draft, pictures or several turns");
    if (job->mode == NS_JOB_DIFFUSION && job->has_top_p && job->top_p < 1)
        return ns_job_unsupported(p, "body.top_p",
                                  "top_p below 1 in diffusion");
    return NS_OK;
}

/* The messages with the task's instruction behind what the system message
 * says, or as one of its own. The body itself stays as it stood. */
static enum ns_status
instruct(struct ns_parse *p)
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
        return ns_job_no_memory(p->err);
    status = ns_arena_on_reset(p->job->arena, drop_json, messages, p->err);
    if (status != NS_OK)
        return status;
    system =
        json_pack("{s:s, s:s++}", "role", own ? "system" : role, "content",
                  own ? "" : text, own ? "" : "\n\n", summarize_instruction);
    if (!system || ns_json_starved() ||
        (own ? json_array_insert_new(messages, 0, system)
             : json_array_set_new(messages, 0, system)) == -1)
        return ns_job_no_memory(p->err);
    p->job->messages = messages;
    return NS_OK;
}

static enum ns_status
parse(struct ns_parse *p, const struct ns_message *message)
{
    enum ns_status status;
    json_t *root = NULL;

    status = take_outer_id(p, message);
    if (status == NS_OK)
        status = parse_text(p, message, &root);
    if (status == NS_OK)
        status = take_custom_id(p, root);
    if (status == NS_OK)
        status = find_nightshift(p, root);
    if (status == NS_OK)
        status = take_id(p, message);
    if (status == NS_OK)
        status = take_line(p, root);
    if (status == NS_OK)
        status = ns_job_take_body(p, p->job->body);
    if (status == NS_OK && p->nightshift)
        status = ns_job_take_ours(p, p->nightshift);
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
    struct ns_parse p = { .options = options, .err = err };

    status = ns_arena_create(0, &arena, err);
    if (status != NS_OK)
        return status;
    p.job = ns_arena_take(arena, sizeof(*p.job));
    if (!p.job) {
        status = ns_job_no_memory(err);
        goto out;
    }
    p.job->arena = arena;
    p.job->position = message->position;
    p.job->length = message->length;
    memcpy(p.job->sha256, message->sha256, sizeof(p.job->sha256));
    p.job->tenant = "default";
    p.job->origin = ns_arena_text(arena, origin, strlen(origin));
    if (!p.job->origin) {
        status = ns_job_no_memory(err);
        goto out;
    }
    status = copy_text(&p, message->headers, &p.job->headers);
    if (status == NS_OK)
        status = copy_text(&p, message->trace_parent, &p.job->trace_parent);
    if (status == NS_OK)
        status = copy_text(&p, message->trace_state, &p.job->trace_state);
    if (status == NS_OK)
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

static const char *const validator_names[NS_N_VALIDATORS] = {
    "control", "repetition", "fence", "json", "schema", "python", "c",
};

const char *
ns_validator_name(enum ns_validator validator)
{
    return validator_names[validator];
}

bool
ns_validator_from(const char *name, enum ns_validator *out)
{
    for (int i = 0; i < NS_N_VALIDATORS; i++)
        if (strcmp(name, validator_names[i]) == 0) {
            *out = (enum ns_validator)i;
            return true;
        }
    return false;
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
