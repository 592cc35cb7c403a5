/* prompt_tools.c - values, calls' arguments and tool declarations as text.
 *
 * Where the template has quirks (a brace that comes with the type, a list of
 * types printed as Python prints it) they are kept: the model learnt them. */
#include <unicase.h>

#include "engine/prompt_writer.h"

enum { MAX_DEPTH = 64 };

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
        snprintf(text + n, 48, "0.%.*s%.*s", -exponent - 1, "000", n_digits,
                 mantissa);
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
        members[i].folded = u8_tolower((const uint8_t *)key, strlen(key), NULL,
                                       NULL, NULL, &members[i].n_folded);
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

static void
put_key(struct writer *w, const char *key, bool quoted)
{
    mark(w, quoted ? QUOTE : "");
    say(w, key, strlen(key));
    mark(w, quoted ? QUOTE ":" : ":");
}

void
ns_prompt_put_pairs(struct writer *w, const json_t *map, bool quoted_keys,
                    int depth)
{
    size_t n;
    struct member *members = sorted_members(w, map, &n);

    for (size_t i = 0; i < n; i++) {
        mark(w, i ? "," : "");
        put_key(w, members[i].key, quoted_keys);
        ns_prompt_put_value(w, members[i].value, quoted_keys, depth + 1);
    }
    free_members(members, n);
}

void
ns_prompt_put_value(struct writer *w, const json_t *value, bool quoted_keys,
                    int depth)
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
        ns_prompt_put_pairs(w, value, quoted_keys, depth);
        mark(w, "}");
        break;
    case JSON_ARRAY:
        mark(w, "[");
        for (size_t i = 0; i < json_array_size(value); i++) {
            mark(w, i ? "," : "");
            ns_prompt_put_value(w, json_array_get(value, i), quoted_keys,
                                depth + 1);
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
            ns_prompt_put_value(w, value, true, depth + 1);
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
        ns_prompt_put_value(w, values, true, depth + 1);
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
void
ns_prompt_put_declaration(struct writer *w, const json_t *tool)
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
