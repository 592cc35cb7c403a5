#include "engine/prompt.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unicase.h>

#include "base/reader.h"

enum { MAX_DEPTH = 64, MAX_FIELD = 64 };

#define QUOTE "<|\"|>"

/* What has been written, and the first failure, which sticks: the functions
 * below then read as the template does. */
struct writer {
    struct ns_prompt *out;
    enum ns_status status;
    struct ns_error *err;
    char field[MAX_FIELD]; /* where we are: "messages[2]" */
};

static void refuse(struct writer *w, const char *code, const char *suffix,
                   const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Refuses `field` + `suffix`. */
static void
refuse(struct writer *w, const char *code, const char *suffix,
       const char *format, ...)
{
    char field[MAX_FIELD], why[200];
    va_list ap;

    if (w->status != NS_OK)
        return;
    va_start(ap, format);
    vsnprintf(why, sizeof(why), format, ap);
    va_end(ap);
    snprintf(field, sizeof(field), "%s%s", w->field, suffix);
    w->status = ns_refuse(w->err, code, field, "%s %s", field, why);
}

static void
out_of_memory(struct writer *w)
{
    if (w->status == NS_OK)
        w->status = ns_fail(w->err, NS_FATAL, "out of memory for the prompt");
}

/* Puts `length` bytes under a span that says whose they are. */
static void
put(struct writer *w, const char *bytes, size_t length, bool trusted,
    int32_t image)
{
    struct ns_prompt *out = w->out;
    struct ns_prompt_span *last =
        out->n_spans ? &out->spans[out->n_spans - 1] : NULL;
    size_t start = out->text.length;

    if (w->status != NS_OK || length == 0)
        return;
    ns_buf_add(&out->text, bytes, length);
    w->status = ns_buf_check(&out->text, "the prompt", w->err);
    if (w->status != NS_OK)
        return;
    if (last && last->trusted == trusted && last->image < 0 && image < 0) {
        last->length += length;
        return;
    }
    if (out->n_spans == out->capacity) {
        size_t capacity = 2 * out->capacity + 64;
        struct ns_prompt_span *grown =
            realloc(out->spans, capacity * sizeof(*grown));

        if (!grown) {
            out_of_memory(w);
            return;
        }
        out->spans = grown;
        out->capacity = capacity;
    }
    out->spans[out->n_spans++] =
        (struct ns_prompt_span){ start, length, trusted, image };
}

/* The template's own text: markers count. */
static void
mark(struct writer *w, const char *text)
{
    put(w, text, strlen(text), true, -1);
}

/* The job's text: nothing in it is a marker. */
static void
say(struct writer *w, const char *text, size_t length)
{
    put(w, text, length, false, -1);
}

static void
say_string(struct writer *w, const json_t *string)
{
    say(w, json_string_value(string), json_string_length(string));
}

static void
say_quoted(struct writer *w, const json_t *string)
{
    mark(w, QUOTE);
    say_string(w, string);
    mark(w, QUOTE);
}

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
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) ||
           c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
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
        const char *stop = memmem(text, (size_t)(end - text), close,
                                  sizeof(close) - 1);
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

/* Values ------------------------------------------------------------------- */

/* A number as Python's repr has it: the shortest digits that read back, in
 * exponent form below 1e-4 and from 1e16 on. */
static void
put_real(struct writer *w, double value)
{
    char digits[40], *mantissa = digits, text[64];
    int exponent, n = 0, precision = 0, n_digits;

    do
        snprintf(digits, sizeof(digits), "%.*e", precision, value);
    while (strtod(digits, NULL) != value && ++precision < 17);
    exponent = atoi(strchr(digits, 'e') + 1);
    if (*mantissa == '-') {
        text[n++] = '-';
        mantissa++;
    }
    if (precision > 0) /* "1.25" to "125" */
        memmove(mantissa + 1, mantissa + 2, (size_t)precision);
    n_digits = precision + 1;
    if (exponent < -4 || exponent >= 16) {
        text[n++] = mantissa[0];
        if (n_digits > 1)
            n += snprintf(text + n, 32, ".%.*s", n_digits - 1, mantissa + 1);
        snprintf(text + n, 16, "e%c%02d", exponent < 0 ? '-' : '+',
                 abs(exponent));
    } else if (exponent < 0) {
        snprintf(text + n, 48, "0.%.*s%.*s", -exponent - 1, "000",
                 n_digits, mantissa);
    } else if (n_digits > exponent + 1) {
        snprintf(text + n, 48, "%.*s.%.*s", exponent + 1, mantissa,
                 n_digits - exponent - 1, mantissa + exponent + 1);
    } else {
        snprintf(text + n, 48, "%.*s%.*s.0", n_digits, mantissa,
                 exponent + 1 - n_digits, "0000000000000000");
    }
    say(w, text, strlen(text));
}

struct member {
    const char *key;
    uint8_t *folded; /* owned: the key in lower case */
    size_t n_folded, index;
    const json_t *value;
};

static int
by_folded_key(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    size_t n = x->n_folded < y->n_folded ? x->n_folded : y->n_folded;
    int order = memcmp(x->folded, y->folded, n);

    if (order)
        return order;
    if (x->n_folded != y->n_folded)
        return x->n_folded < y->n_folded ? -1 : 1;
    return x->index < y->index ? -1 : 1; /* stable, as Python's sort */
}

static void
free_members(struct member *members, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(members[i].folded);
    free(members);
}

/* The members of a map sorted without regard to case. Byte order of UTF-8 is
 * the order of code points. */
static struct member *
sorted_members(struct writer *w, const json_t *map, size_t *out_n)
{
    size_t n = json_object_size(map), i = 0;
    struct member *members;
    void *at;

    *out_n = 0;
    if (n == 0 || w->status != NS_OK)
        return NULL;
    members = calloc(n, sizeof(*members));
    if (!members) {
        out_of_memory(w);
        return NULL;
    }
    /* jansson's iterators change nothing, but are not const */
    at = json_object_iter((json_t *)map);
    for (; at && i < n; at = json_object_iter_next((json_t *)map, at), i++) {
        const char *key = json_object_iter_key(at);

        members[i].key = key;
        members[i].index = i;
        members[i].value = json_object_iter_value(at);
        members[i].folded =
            u8_tolower((const uint8_t *)key, strlen(key), NULL, NULL, NULL,
                       &members[i].n_folded);
        if (!members[i].folded) {
            free_members(members, i);
            out_of_memory(w);
            return NULL;
        }
    }
    qsort(members, i, sizeof(*members), by_folded_key);
    *out_n = i;
    return members;
}

static bool
too_deep(struct writer *w, int depth)
{
    if (depth > MAX_DEPTH)
        refuse(w, "bad_param", "", "is nested deeper than %d", MAX_DEPTH);
    return w->status != NS_OK;
}

static void put_value(struct writer *w, const json_t *value, bool quoted_keys,
                      int depth);

static void
put_key(struct writer *w, const char *key, bool quoted)
{
    mark(w, quoted ? QUOTE : "");
    say(w, key, strlen(key));
    mark(w, quoted ? QUOTE ":" : ":");
}

static void
put_pairs(struct writer *w, const json_t *map, bool quoted_keys, int depth)
{
    size_t n;
    struct member *members = sorted_members(w, map, &n);

    for (size_t i = 0; i < n; i++) {
        mark(w, i ? "," : "");
        put_key(w, members[i].key, quoted_keys);
        put_value(w, members[i].value, quoted_keys, depth + 1);
    }
    free_members(members, n);
}

static void
put_value(struct writer *w, const json_t *value, bool quoted_keys, int depth)
{
    char text[32];

    if (too_deep(w, depth))
        return;
    switch (json_typeof(value)) {
    case JSON_NULL:
        mark(w, "null");
        break;
    case JSON_TRUE:
        mark(w, "true");
        break;
    case JSON_FALSE:
        mark(w, "false");
        break;
    case JSON_STRING:
        say_quoted(w, value);
        break;
    case JSON_INTEGER:
        snprintf(text, sizeof(text), "%" JSON_INTEGER_FORMAT,
                 json_integer_value(value));
        say(w, text, strlen(text));
        break;
    case JSON_REAL:
        put_real(w, json_real_value(value));
        break;
    case JSON_OBJECT:
        mark(w, "{");
        put_pairs(w, value, quoted_keys, depth);
        mark(w, "}");
        break;
    case JSON_ARRAY:
        mark(w, "[");
        for (size_t i = 0; i < json_array_size(value); i++) {
            mark(w, i ? "," : "");
            put_value(w, json_array_get(value, i), quoted_keys, depth + 1);
        }
        mark(w, "]");
        break;
    }
}

/* Tool declarations -------------------------------------------------------- */

/* Empty values count as absent here, as in the template. */
static bool
is_truthy(const json_t *value)
{
    switch (value ? json_typeof(value) : JSON_NULL) {
    case JSON_NULL:
    case JSON_FALSE:
        return false;
    case JSON_TRUE:
        return true;
    case JSON_STRING:
        return json_string_length(value) > 0;
    case JSON_INTEGER:
        return json_integer_value(value) != 0;
    case JSON_REAL:
        return json_real_value(value) != 0.0;
    case JSON_OBJECT:
        return json_object_size(value) > 0;
    case JSON_ARRAY:
        return json_array_size(value) > 0;
    }
    return false;
}

static void
say_upper(struct writer *w, const json_t *string)
{
    size_t n = 0;
    uint8_t *upper;

    if (w->status != NS_OK || json_string_length(string) == 0)
        return;
    upper = u8_toupper((const uint8_t *)json_string_value(string),
                       json_string_length(string), NULL, NULL, NULL, &n);
    if (upper)
        say(w, (const char *)upper, n);
    else
        out_of_memory(w);
    free(upper);
}

/* The type of a schema in capitals. A list (["string", "null"]) comes out of
 * the template as Python prints one; we give the same. */
static void
put_type(struct writer *w, const json_t *type)
{
    mark(w, QUOTE);
    if (json_is_array(type)) {
        say(w, "[", 1);
        for (size_t i = 0; i < json_array_size(type); i++) {
            say(w, i ? ", '" : "'", i ? 3 : 1);
            say_upper(w, json_array_get(type, i));
            say(w, "'", 1);
        }
        say(w, "]", 1);
    } else {
        say_upper(w, type);
    }
    mark(w, QUOTE);
}

static bool
type_is(const json_t *type, const char *name)
{
    return json_is_string(type) &&
           strcasecmp(json_string_value(type), name) == 0;
}

static void
put_required(struct writer *w, const json_t *required)
{
    mark(w, "required:[");
    for (size_t i = 0; i < json_array_size(required); i++) {
        mark(w, i ? "," : "");
        if (!json_is_string(json_array_get(required, i)))
            refuse(w, "bad_param", "", "has a `required` that is not text");
        say_quoted(w, json_array_get(required, i));
    }
    mark(w, "]");
}

static void put_properties(struct writer *w, const json_t *map, bool filtered,
                           int depth);

static void
put_items(struct writer *w, const json_t *items, int depth)
{
    size_t n;
    struct member *members = sorted_members(w, items, &n);
    bool comma = false;

    mark(w, "items:{");
    for (size_t i = 0; i < n; i++) {
        const char *key = members[i].key;
        const json_t *value = members[i].value;

        if (json_is_null(value))
            continue;
        mark(w, comma ? "," : "");
        comma = true;
        if (strcmp(key, "properties") == 0) {
            mark(w, "properties:{");
            put_properties(w, value, false, depth + 1);
            mark(w, "}");
        } else if (strcmp(key, "required") == 0) {
            put_required(w, value);
        } else if (strcmp(key, "type") == 0 && json_is_array(value)) {
            mark(w, "type:[");
            for (size_t k = 0; k < json_array_size(value); k++) {
                mark(w, k ? "," : "");
                put_type(w, json_array_get(value, k));
            }
            mark(w, "]");
        } else if (strcmp(key, "type") == 0) {
            mark(w, "type:");
            put_type(w, value);
        } else {
            put_key(w, key, false);
            put_value(w, value, true, depth + 1);
        }
    }
    mark(w, "}");
    free_members(members, n);
}

static void
next_item(struct writer *w, bool *comma)
{
    mark(w, *comma ? "," : "");
    *comma = true;
}

static void
put_property(struct writer *w, const json_t *schema, int depth)
{
    const json_t *type = json_object_get(schema, "type");
    const json_t *description = json_object_get(schema, "description");
    const json_t *values = json_object_get(schema, "enum");
    const json_t *items = json_object_get(schema, "items");
    const json_t *properties = json_object_get(schema, "properties");
    const json_t *required = json_object_get(schema, "required");
    bool comma = false;

    if (json_string_length(description)) {
        next_item(w, &comma);
        mark(w, "description:");
        say_quoted(w, description);
    }
    if (type_is(type, "string") && is_truthy(values)) {
        next_item(w, &comma);
        mark(w, "enum:");
        put_value(w, values, true, depth + 1);
    }
    if (type_is(type, "array") && json_object_size(items)) {
        next_item(w, &comma);
        put_items(w, items, depth + 1);
    }
    if (is_truthy(json_object_get(schema, "nullable"))) {
        next_item(w, &comma);
        mark(w, "nullable:true");
    }
    if (type_is(type, "object")) {
        next_item(w, &comma);
        mark(w, "properties:{");
        /* without properties: the schema's own, less the standard keys */
        put_properties(w, json_is_object(properties) ? properties : schema,
                       !json_is_object(properties), depth + 1);
        mark(w, "}");
        if (json_array_size(required)) {
            next_item(w, &comma);
            put_required(w, required);
        }
    }
    next_item(w, &comma);
    mark(w, "type:");
    put_type(w, type);
}

static bool
is_standard_key(const char *key)
{
    return !strcmp(key, "description") || !strcmp(key, "type") ||
           !strcmp(key, "properties") || !strcmp(key, "required") ||
           !strcmp(key, "nullable");
}

static void
put_properties(struct writer *w, const json_t *map, bool filtered, int depth)
{
    size_t n;
    struct member *members;
    bool comma = false;

    if (too_deep(w, depth))
        return;
    members = sorted_members(w, map, &n);
    for (size_t i = 0; i < n; i++) {
        if (filtered && is_standard_key(members[i].key))
            continue;
        next_item(w, &comma);
        put_key(w, members[i].key, false);
        mark(w, "{");
        put_property(w, members[i].value, depth + 1);
        mark(w, "}");
    }
    free_members(members, n);
}

/* The closing brace of parameters and of response comes with the type, as in
 * the template. */
static void
put_declaration(struct writer *w, const json_t *tool)
{
    const json_t *function = json_object_get(tool, "function");
    const json_t *name = json_object_get(function, "name");
    const json_t *description = json_object_get(function, "description");
    const json_t *parameters = json_object_get(function, "parameters");
    const json_t *response = json_object_get(function, "response");

    if (!json_is_object(function))
        refuse(w, "bad_param", ".function", "must be an object");
    else if (!json_string_length(name))
        refuse(w, "bad_param", ".function.name", "must be a text");
    else if (description && !json_is_null(description) &&
             !json_is_string(description))
        refuse(w, "bad_param", ".function.description", "must be a text");
    else if (parameters && !json_is_null(parameters) &&
             !json_is_object(parameters))
        refuse(w, "bad_param", ".function.parameters", "must be an object");
    if (w->status != NS_OK)
        return;

    mark(w, "<|tool>declaration:");
    say_string(w, name);
    mark(w, "{description:" QUOTE);
    if (json_is_string(description))
        say_string(w, description);
    mark(w, QUOTE);
    if (json_object_size(parameters)) {
        const json_t *properties = json_object_get(parameters, "properties");
        const json_t *required = json_object_get(parameters, "required");
        const json_t *type = json_object_get(parameters, "type");

        mark(w, ",parameters:{");
        if (json_object_size(properties)) {
            mark(w, "properties:{");
            put_properties(w, properties, false, 1);
            mark(w, "},");
        }
        if (json_array_size(required)) {
            put_required(w, required);
            mark(w, ",");
        }
        if (is_truthy(type)) {
            mark(w, "type:");
            put_type(w, type);
            mark(w, "}");
        }
    }
    if (response) {
        const json_t *type = json_object_get(response, "type");

        mark(w, ",response:{");
        if (json_string_length(json_object_get(response, "description"))) {
            mark(w, "description:");
            say_quoted(w, json_object_get(response, "description"));
            mark(w, ",");
        }
        if (type_is(type, "object")) {
            mark(w, "type:");
            put_type(w, type);
            mark(w, "}");
        }
    }
    mark(w, "}<tool|>");
}

/* Messages ----------------------------------------------------------------- */

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
        if (arguments && !json_is_null(arguments) &&
            !json_is_object(arguments))
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
        say_trimmed(w, json_string_value(content),
                    json_string_length(content));
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
        put_pairs(w, json_object_get(function, "arguments"), false, 1);
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
            put_pairs(w, response, false, 1);
        } else {
            mark(w, "value:");
            put_value(w, response, false, 1);
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

    has_content = put_content(w, json_object_get(message, "content"),
                              role == ASSISTANT);
    for (size_t i = index + 1; i < d->n && next == NO_ROLE; i++) {
        enum role behind = role_of(json_array_get(d->messages, i));

        if (behind != TOOL)
            next = behind;
    }
    if (ending == ENDS_IN_CALL)
        mark(w, "<|tool_response>");
    else if (role == ASSISTANT && next == ASSISTANT &&
             (!has_calls || answered))
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
        put_declaration(w, json_array_get(tools, i));
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
            char field[MAX_FIELD];
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
