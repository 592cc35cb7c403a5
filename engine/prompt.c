#include "engine/prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/prompt_writer.h"

static void
put_image(struct writer *w)
{
    put(w, "<|image|>", 9, true, (int32_t)w->out->n_images);
    w->out->n_images++;
}

/* White space as Python's str.strip() has it. */
static bool
is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 ||
           c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}

static void
trim(const char **text, size_t *length)
{
    const char *at = *text, *end = at + *length;
    uint32_t code;

    while (at < end) {
        size_t n = ns_utf8_char(at, (size_t)(end - at), &code);

        if (n == 0 || !is_space(code))
            break;
        at += n;
    }
    while (at < end) {
        const char *back = end - 1;

        while (back > at && (*back & 0xc0) == 0x80)
            back--;
        if (ns_utf8_char(back, (size_t)(end - back), &code) == 0 ||
            !is_space(code))
            break;
        end = back;
    }
    *text = at;
    *length = (size_t)(end - at);
}

static void
say_trimmed(struct writer *w, const char *text, size_t length)
{
    trim(&text, &length);
    say(w, text, length);
}

/* An earlier answer without the thoughts in it: cut at every <channel|>, keep
 * of each piece what stands before its first <|channel>, join, trim. */
static void
say_unthought(struct writer *w, const char *text, size_t length)
{
    static const char open[] = "<|channel>", close[] = "<channel|>";
    const char *end = text + length;
    struct ns_buf kept;

    if (w->status != NS_OK)
        return;
    ns_buf_init(&kept, length);
    for (;;) {
        const char *stop =
            memmem(text, (size_t)(end - text), close, sizeof(close) - 1);
        size_t n = (size_t)((stop ? stop : end) - text);
        const char *cut = memmem(text, n, open, sizeof(open) - 1);

        ns_buf_add(&kept, text, cut ? (size_t)(cut - text) : n);
        if (!stop)
            break;
        text = stop + sizeof(close) - 1;
    }
    if (kept.failed)
        out_of_memory(w);
    else if (kept.length)
        say_trimmed(w, kept.data, kept.length);
    ns_buf_fini(&kept);
}

enum role { SYSTEM, USER, ASSISTANT, TOOL, NO_ROLE };

static enum role
role_of(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));

    if (!role)
        return NO_ROLE;
    if (!strcmp(role, "system") || !strcmp(role, "developer"))
        return SYSTEM;
    if (!strcmp(role, "user"))
        return USER;
    if (!strcmp(role, "assistant"))
        return ASSISTANT;
    return strcmp(role, "tool") ? NO_ROLE : TOOL;
}

static bool
is_image_part(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));

    return type && (!strcmp(type, "image") || !strcmp(type, "image_url"));
}

static void
check_content(struct writer *w, const json_t *content)
{
    char at[40];

    if (!content || json_is_null(content) || json_is_string(content))
        return;
    if (!json_is_array(content))
        refuse(w, "bad_param", ".content", "must be a text or a list");
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(part, "type"));

        snprintf(at, sizeof(at), ".content[%zu].type", i);
        if (!type)
            refuse(w, "bad_param", at, "is missing");
        else if (!is_image_part(part) && strcmp(type, "text") != 0)
            refuse(w, "unsupported", at, "\"%.32s\" is not supported", type);
        snprintf(at, sizeof(at), ".content[%zu].text", i);
        if (type && !strcmp(type, "text") &&
            !json_is_string(json_object_get(part, "text")))
            refuse(w, "bad_param", at, "must be a text");
    }
}

static void
check_calls(struct writer *w, const json_t *message)
{
    const json_t *calls = json_object_get(message, "tool_calls");
    const json_t *responses = json_object_get(message, "tool_responses");
    char at[48];

    if (calls && !json_is_null(calls) && !json_is_array(calls))
        refuse(w, "bad_param", ".tool_calls", "must be a list");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *function =
            json_object_get(json_array_get(calls, i), "function");
        const json_t *arguments = json_object_get(function, "arguments");

        snprintf(at, sizeof(at), ".tool_calls[%zu].function.name", i);
        if (!json_string_length(json_object_get(function, "name")))
            refuse(w, "bad_param", at, "must be a text");
        snprintf(at, sizeof(at), ".tool_calls[%zu].function.arguments", i);
        if (arguments && !json_is_null(arguments) && !json_is_object(arguments))
            refuse(w, "bad_param", at, "must be an object");
    }
    if (responses && !json_is_null(responses) && !json_is_array(responses))
        refuse(w, "bad_param", ".tool_responses", "must be a list");
    for (size_t i = 0; i < json_array_size(responses); i++) {
        snprintf(at, sizeof(at), ".tool_responses[%zu].response", i);
        if (!json_object_get(json_array_get(responses, i), "response"))
            refuse(w, "bad_param", at, "is missing");
    }
}

/* Everything that a message could be refused for, before a byte is written. */
static void
check_message(struct writer *w, const json_t *message)
{
    static const char *const thoughts[] = { "reasoning", "reasoning_content" };
    char at[40];

    if (!json_is_object(message))
        refuse(w, "bad_param", "", "must be an object");
    else if (role_of(message) == NO_ROLE)
        refuse(w, "bad_param", ".role",
               "must be system, developer, user, assistant or tool");
    check_content(w, json_object_get(message, "content"));
    check_calls(w, message);
    for (int i = 0; i < 2; i++) {
        const json_t *thought = json_object_get(message, thoughts[i]);

        snprintf(at, sizeof(at), ".%s", thoughts[i]);
        if (thought && !json_is_null(thought) && !json_is_string(thought))
            refuse(w, "bad_param", at, "must be a text");
    }
}

static void
at_message(struct writer *w, size_t index)
{
    snprintf(w->field, sizeof(w->field), "messages[%zu]", index);
}

static const json_t *
thought_of(const json_t *message)
{
    const json_t *thought = json_object_get(message, "reasoning");

    return json_string_length(thought)
               ? thought
               : json_object_get(message, "reasoning_content");
}

static void
put_system_content(struct writer *w, const json_t *content)
{
    if (json_is_string(content))
        say_trimmed(w, json_string_value(content), json_string_length(content));
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *text =
            json_object_get(json_array_get(content, i), "text");

        if (!json_is_string(text))
            continue; /* the template passes pictures over here */
        say_trimmed(w, json_string_value(text), json_string_length(text));
        mark(w, " ");
    }
}

static void
put_text(struct writer *w, const json_t *text, bool is_model)
{
    (is_model ? say_unthought : say_trimmed)(w, json_string_value(text),
                                             json_string_length(text));
}

/* Whether anything but white space was written. */
static bool
put_content(struct writer *w, const json_t *content, bool is_model)
{
    size_t start = w->out->text.length, length;
    const char *written;

    if (json_is_string(content))
        put_text(w, content, is_model);
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i);

        if (is_image_part(part))
            put_image(w);
        else
            put_text(w, json_object_get(part, "text"), is_model);
    }
    length = w->out->text.length - start;
    if (length == 0)
        return false;
    written = w->out->text.data + start;
    trim(&written, &length);
    return length > 0;
}

static void
put_calls(struct writer *w, const json_t *calls)
{
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *function =
            json_object_get(json_array_get(calls, i), "function");

        mark(w, "<|tool_call>call:");
        say_string(w, json_object_get(function, "name"));
        mark(w, "{");
        ns_prompt_put_pairs(w, json_object_get(function, "arguments"), false,
                            1);
        mark(w, "}<tool_call|>");
    }
}

static void
open_response(struct writer *w, const json_t *name)
{
    mark(w, "<|tool_response>response:");
    if (json_is_string(name))
        say_string(w, name);
    else
        mark(w, "unknown");
    mark(w, "{");
}

static void
close_response(struct writer *w)
{
    mark(w, "}<tool_response|>");
}

static void
put_own_responses(struct writer *w, const json_t *responses)
{
    for (size_t i = 0; i < json_array_size(responses); i++) {
        const json_t *entry = json_array_get(responses, i);
        const json_t *name = json_object_get(entry, "name");
        const json_t *response = json_object_get(entry, "response");

        open_response(w, json_string_length(name) ? name : NULL);
        if (json_is_object(response)) {
            ns_prompt_put_pairs(w, response, false, 1);
        } else {
            mark(w, "value:");
            ns_prompt_put_value(w, response, false, 1);
        }
        close_response(w);
    }
}

static const json_t *
answered_name(const json_t *calls, const json_t *message)
{
    const json_t *id = json_object_get(message, "tool_call_id");
    const json_t *name = json_object_get(message, "name");

    for (size_t i = 0; id && i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);

        if (json_equal(json_object_get(call, "id"), id))
            name = json_object_get(json_object_get(call, "function"), "name");
    }
    return name;
}

/* A tool's answer: its texts as one value, its pictures behind it. */
static void
put_tool_message(struct writer *w, const json_t *calls, const json_t *message)
{
    const json_t *content = json_object_get(message, "content");

    open_response(w, answered_name(calls, message));
    mark(w, "value:");
    if (json_is_array(content)) {
        mark(w, QUOTE);
        for (size_t i = 0; i < json_array_size(content); i++) {
            const json_t *part = json_array_get(content, i);

            if (!is_image_part(part))
                say_string(w, json_object_get(part, "text"));
        }
        mark(w, QUOTE);
    } else if (json_is_string(content)) {
        say_quoted(w, content);
    } else {
        mark(w, "null");
    }
    close_response(w);
    for (size_t i = 0; i < json_array_size(content); i++)
        if (is_image_part(json_array_get(content, i)))
            put_image(w);
}

/* What the last message that is not a tool's ended with. */
enum ending { ENDS_PLAIN, ENDS_IN_CALL, ENDS_IN_RESPONSE };

struct dialogue {
    const json_t *messages;
    size_t n, first;  /* the system message, if any, stands before `first` */
    size_t last_user; /* n: none */
};

static enum ending
put_message(struct writer *w, const struct dialogue *d, size_t index,
            const struct ns_prompt_options *options)
{
    const json_t *message = json_array_get(d->messages, index);
    const json_t *calls = json_object_get(message, "tool_calls");
    const json_t *responses = json_object_get(message, "tool_responses");
    const json_t *thought = thought_of(message);
    bool has_calls = json_array_size(calls) > 0, answered = false;
    enum role role = role_of(message), next = NO_ROLE, previous = NO_ROLE;
    enum ending ending = ENDS_PLAIN;
    bool has_content;

    if (index > d->first)
        previous = role_of(json_array_get(d->messages, index - 1));
    if (role != ASSISTANT || previous != ASSISTANT) {
        mark(w, "<|turn>");
        mark(w, role == ASSISTANT
                    ? "model"
                    : json_string_value(json_object_get(message, "role")));
        mark(w, "\n");
    }
    if (json_string_length(thought) &&
        (d->last_user == d->n || index > d->last_user ||
         (options->preserve_thinking && has_calls))) {
        mark(w, "<|channel>thought\n");
        say_string(w, thought);
        mark(w, "\n<channel|>");
    }
    put_calls(w, calls);
    if (has_calls)
        ending = ENDS_IN_CALL;
    if (json_array_size(responses) > 0) {
        put_own_responses(w, responses);
        answered = true;
    } else if (has_calls) {
        for (size_t i = index + 1; i < d->n; i++) {
            const json_t *behind = json_array_get(d->messages, i);

            if (role_of(behind) != TOOL)
                break;
            put_tool_message(w, calls, behind);
            answered = true;
        }
    }
    if (answered)
        ending = ENDS_IN_RESPONSE;

    has_content =
        put_content(w, json_object_get(message, "content"), role == ASSISTANT);
    for (size_t i = index + 1; i < d->n && next == NO_ROLE; i++) {
        enum role behind = role_of(json_array_get(d->messages, i));

        if (behind != TOOL)
            next = behind;
    }
    if (ending == ENDS_IN_CALL)
        mark(w, "<|tool_response>");
    else if (role == ASSISTANT && next == ASSISTANT && (!has_calls || answered))
        ; /* the turn goes on */
    else if (!answered || has_content || next != NO_ROLE)
        mark(w, "<turn|>\n");
    return ending;
}

static void
put_system_turn(struct writer *w, const json_t *system, const json_t *tools,
                bool thinking)
{
    mark(w, "<|turn>system\n");
    mark(w, thinking ? "<|think|>\n" : "");
    put_system_content(w, json_object_get(system, "content"));
    for (size_t i = 0; i < json_array_size(tools); i++) {
        snprintf(w->field, sizeof(w->field), "tools[%zu]", i);
        ns_prompt_put_declaration(w, json_array_get(tools, i));
    }
    mark(w, "<turn|>\n");
}

static void
put_all(struct writer *w, const json_t *messages, const json_t *tools,
        const struct ns_prompt_options *options)
{
    struct dialogue d = { .messages = messages };
    const json_t *system = NULL;
    enum ending ending = ENDS_PLAIN;

    d.n = d.last_user = json_array_size(messages);
    if (d.n && role_of(json_array_get(messages, 0)) == SYSTEM)
        system = json_array_get(messages, d.first++);
    for (size_t i = d.first; i < d.n; i++)
        if (role_of(json_array_get(messages, i)) == USER)
            d.last_user = i;

    mark(w, "<bos>");
    if (options->thinking || json_array_size(tools) || system)
        put_system_turn(w, system, tools, options->thinking);
    for (size_t i = d.first; i < d.n && w->status == NS_OK; i++) {
        at_message(w, i);
        /* a tool's message is written with the call that it answers */
        if (role_of(json_array_get(messages, i)) != TOOL)
            ending = put_message(w, &d, i, options);
    }
    if (!options->generation_prompt)
        return;
    if (ending == ENDS_PLAIN) {
        mark(w, "<|turn>model\n");
        if (options->empty_thought && !options->thinking)
            mark(w, "<|channel>thought\n<channel|>");
    } else if (ending == ENDS_IN_RESPONSE && options->thinking) {
        mark(w, "<|channel>thought\n");
        w->out->in_thought = true;
    }
}

enum ns_status
ns_prompt_render(const json_t *messages, const json_t *tools,
                 const struct ns_prompt_options *options, size_t limit_bytes,
                 struct ns_prompt *out, struct ns_error *err)
{
    struct writer w = { .out = out, .err = err };

    memset(out, 0, sizeof(*out));
    ns_buf_init(&out->text, limit_bytes);
    if (!json_array_size(messages))
        return ns_refuse(err, "bad_param", "messages",
                         "messages must be a list of at least one message");
    if (tools && !json_is_null(tools) && !json_is_array(tools))
        return ns_refuse(err, "bad_param", "tools", "tools must be a list");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        at_message(&w, i);
        check_message(&w, json_array_get(messages, i));
    }
    put_all(&w, messages, tools, options);
    return w.status;
}

enum ns_status
ns_prompt_open_arguments(json_t *messages, struct ns_error *err)
{
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *calls =
            json_object_get(json_array_get(messages, i), "tool_calls");

        for (size_t k = 0; k < json_array_size(calls); k++) {
            json_t *function =
                json_object_get(json_array_get(calls, k), "function");
            const json_t *text = json_object_get(function, "arguments");
            char field[PROMPT_MAX_FIELD];
            json_error_t why;
            json_t *value;

            if (!json_is_string(text))
                continue;
            snprintf(field, sizeof(field),
                     "messages[%zu].tool_calls[%zu].function.arguments", i, k);
            if (json_string_length(text) == 0) {
                value = json_object(); /* a call without arguments */
                why.text[0] = '\0';
            } else {
                value = json_loadb(json_string_value(text),
                                   json_string_length(text),
                                   JSON_REJECT_DUPLICATES, &why);
            }
            if (value && !json_is_object(value)) {
                json_decref(value);
                return ns_refuse(err, "bad_param", field,
                                 "%s must hold a JSON object", field);
            }
            if (!value)
                return ns_refuse(err, "bad_param", field,
                                 "%s is not JSON: %.100s", field, why.text);
            if (json_object_set_new(function, "arguments", value) != 0)
                return ns_fail(err, NS_FATAL,
                               "out of memory for the arguments of a call");
        }
    }
    return NS_OK;
}

/* Ids ---------------------------------------------------------------------- */

static enum ns_status
add_image(const struct ns_image_ids *image_ids, uint32_t n_tokens,
          struct ns_ids *out, struct ns_error *err)
{
    enum ns_status status = ns_ids_add(out, image_ids->begin, err);

    for (uint32_t i = 0; i < n_tokens && status == NS_OK; i++)
        status = ns_ids_add(out, image_ids->placeholder, err);
    return status == NS_OK ? ns_ids_add(out, image_ids->end, err) : status;
}

/* A slot is a control token, which cuts the text anyway: so the stretches
 * between slots are encoded each by itself. */
enum ns_status
ns_prompt_encode(const struct ns_prompt *prompt,
                 const struct ns_tokenizer *tokenizer,
                 const struct ns_image_ids *image_ids,
                 const uint32_t *image_tokens, struct ns_ids *out,
                 struct ns_error *err)
{
    struct ns_span *spans;
    enum ns_status status = NS_OK;
    size_t n = 0;

    if (prompt->n_images && (!image_ids || !image_tokens))
        return ns_refuse(err, "unsupported", "messages",
                         "the prompt has %u images and none was prepared",
                         prompt->n_images);
    spans = calloc(prompt->n_spans + 1, sizeof(*spans));
    if (!spans)
        return ns_fail(err, NS_FATAL, "out of memory for %zu spans",
                       prompt->n_spans);
    for (size_t i = 0; i <= prompt->n_spans && status == NS_OK; i++) {
        const struct ns_prompt_span *span =
            i < prompt->n_spans ? &prompt->spans[i] : NULL;

        if (span && span->image < 0) {
            spans[n++] = (struct ns_span){ prompt->text.data + span->start,
                                           span->length, span->trusted };
            continue;
        }
        status = ns_tokenizer_encode(tokenizer, spans, n, out, err);
        n = 0;
        if (status == NS_OK && span)
            status = add_image(image_ids, image_tokens[span->image], out, err);
    }
    free(spans);
    return status;
}

void
ns_prompt_fini(struct ns_prompt *prompt)
{
    ns_buf_fini(&prompt->text);
    free(prompt->spans);
    prompt->spans = NULL;
    prompt->n_spans = prompt->capacity = 0;
    prompt->n_images = 0;
}

bool
ns_prompt_wants_empty_thought(const char *directory)
{
    static const char *const literals[] = {
        "<|channel>thought\\n<channel|>", "<|channel>thought\n<channel|>",
    };
    enum { MAX_TEMPLATE = 1 << 20 };
    char path[4096], *text;
    bool found = false;
    size_t n;
    FILE *file;

    snprintf(path, sizeof(path), "%s/chat_template.jinja", directory);
    file = fopen(path, "re");
    if (!file)
        return false;
    text = malloc(MAX_TEMPLATE);
    n = text ? fread(text, 1, MAX_TEMPLATE, file) : 0;
    for (int i = 0; i < 2; i++)
        found = found ||
                (text &&
                 memmem(text, n, literals[i], strlen(literals[i])) != NULL);
    free(text);
    fclose(file);
    return found;
}
