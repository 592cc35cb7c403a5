#include "engine/schema.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/json.h"
#include "engine/language.h"
#include "engine/schema_check.h"

static enum ns_verdict
broken(struct ns_check *c, const char *code, const char *keyword,
       const char *what)
{
    char shown[48];

    snprintf(shown, sizeof(shown), "%s", keyword);
    ns_schema_clean(shown);
    c->status = ns_refuse(c->err, code, shown, "schema: %s: %s", shown, what);
    return NS_BROKEN;
}

static void
write_pointer(const struct ns_place *place, char *out, size_t size)
{
    size_t length;

    if (!place) {
        out[0] = '\0';
        return;
    }
    write_pointer(place->up, out, size);
    length = strlen(out);
    if (!place->name) {
        snprintf(out + length, size - length, "/%zu", place->index);
        return;
    }
    snprintf(out + length, size - length, "/");
    for (const char *at = place->name; *at; at++) {
        length = strlen(out);
        if (*at == '~' || *at == '/')
            snprintf(out + length, size - length, "~%c",
                     *at == '/' ? '1' : '0');
        else
            snprintf(out + length, size - length, "%c", *at);
    }
}

static enum ns_verdict
invalid(struct ns_check *c, const struct ns_place *place, const char *keyword,
        const json_t *wanted, const json_t *instance)
{
    char pointer[120], shown[2][60];

    write_pointer(place, pointer, sizeof(pointer));
    ns_schema_clean(pointer);
    ns_refuse(c->err, "schema", NULL, "%s: %s: %s wanted, it is %s",
              pointer[0] ? pointer : "the document", keyword,
              ns_json_show(wanted, shown[0], sizeof(shown[0])),
              ns_json_show(instance, shown[1], sizeof(shown[1])));
    return NS_INVALID;
}

bool
ns_check_step(struct ns_check *c)
{
    if (c->n_steps++ < NS_SCHEMA_STEPS)
        return true;
    broken(c, "grammar_limit", "it", "takes too many steps to check");
    return false;
}

/* --- what values are */

static bool
is_whole(const json_t *value)
{
    return json_is_integer(value) ||
           (json_is_real(value) &&
            json_real_value(value) == floor(json_real_value(value)));
}

static bool
is_of_type(const json_t *value, const char *type)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return strcmp(type, "object") == 0;
    case JSON_ARRAY:
        return strcmp(type, "array") == 0;
    case JSON_STRING:
        return strcmp(type, "string") == 0;
    case JSON_INTEGER:
    case JSON_REAL:
        return strcmp(type, "number") == 0 ||
               (strcmp(type, "integer") == 0 && is_whole(value));
    case JSON_TRUE:
    case JSON_FALSE:
        return strcmp(type, "boolean") == 0;
    case JSON_NULL:
        return strcmp(type, "null") == 0;
    }
    return false;
}

/* Code points; the text is well-formed, as jansson lets in no other. */
static size_t
length_of(const json_t *string)
{
    const char *text = json_string_value(string);
    size_t n = 0;

    for (size_t i = 0; i < json_string_length(string); i++)
        n += (text[i] & 0xc0) != 0x80;
    return n;
}

/* --- keywords */

enum ns_verdict
ns_check_malformed(struct ns_check *c, const struct ns_asked *q)
{
    return broken(c, "bad_param", q->keyword, "it has a value of another kind");
}

enum ns_verdict
ns_check_missing(struct ns_check *c, const struct ns_asked *q,
                 const struct ns_place *place)
{
    return invalid(c, place, q->keyword, json_true(), NULL);
}

enum ns_verdict
ns_check_when(struct ns_check *c, const struct ns_asked *q, bool valid)
{
    return valid ? NS_VALID
                 : invalid(c, q->place, q->keyword, q->value, q->instance);
}

static enum ns_verdict
check_type(struct ns_check *c, const struct ns_asked *q)
{
    static const char *const known[] = { "object", "array",   "string",
                                         "number", "integer", "boolean",
                                         "null" };
    bool list = json_is_array(q->value);
    bool any = json_is_null(q->instance) && ns_schema_is_nullable(q->schema);
    size_t n = list ? json_array_size(q->value) : 1;

    for (size_t i = 0; i < n; i++) {
        const char *type =
            json_string_value(list ? json_array_get(q->value, i) : q->value);
        bool is_known = false;

        for (size_t k = 0; type && k < sizeof(known) / sizeof(*known); k++)
            is_known |= strcmp(known[k], type) == 0;
        if (!is_known)
            return ns_check_malformed(c, q);
        any |= is_of_type(q->instance, type);
    }
    return ns_check_when(c, q, any);
}

static enum ns_verdict
check_enum(struct ns_check *c, const struct ns_asked *q)
{
    if (!json_is_array(q->value))
        return ns_check_malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        if (!ns_check_step(c))
            return NS_BROKEN;
        if (ns_json_same(json_array_get(q->value, i), q->instance))
            return NS_VALID;
    }
    return ns_check_when(c, q, false);
}

static enum ns_verdict
check_const(struct ns_check *c, const struct ns_asked *q)
{
    return ns_check_when(c, q, ns_json_same(q->value, q->instance));
}

/* One function for bounds of one kind: the keyword's name says which. */
static enum ns_verdict
check_bound(struct ns_check *c, const struct ns_asked *q)
{
    bool low = strstr(q->keyword, "inimum") != NULL;
    bool open = q->keyword[0] == 'e';
    int order;

    if (!json_is_number(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_number(q->instance))
        return NS_VALID;
    order = ns_json_compare(q->instance, q->value);
    if (order == 0)
        return ns_check_when(c, q, !open);
    return ns_check_when(c, q, low ? order > 0 : order < 0);
}

static enum ns_verdict
check_size(struct ns_check *c, const struct ns_asked *q)
{
    const json_t *instance = q->instance;
    const char *of = q->keyword + 3; /* behind min or max */
    size_t size;
    uint32_t bound;

    if (!ns_json_count(q->value, &bound))
        return ns_check_malformed(c, q);
    if (strcmp(of, "Length") == 0 && json_is_string(instance))
        size = length_of(instance);
    else if (strcmp(of, "Items") == 0 && json_is_array(instance))
        size = json_array_size(instance);
    else if (strcmp(of, "Properties") == 0 && json_is_object(instance))
        size = json_object_size(instance);
    else
        return NS_VALID;
    return ns_check_when(c, q,
                         q->keyword[1] == 'i' ? size >= bound : size <= bound);
}

static enum ns_verdict
check_multiple(struct ns_check *c, const struct ns_asked *q)
{
    bool is_multiple;

    if (!json_is_number(q->value) || json_number_value(q->value) <= 0)
        return ns_check_malformed(c, q);
    if (!json_is_number(q->instance))
        return NS_VALID;
    if (!ns_json_multiple(q->instance, q->value, &is_multiple))
        return broken(c, "unsupported", q->keyword,
                      "too many digits between it and a value");
    return ns_check_when(c, q, is_multiple);
}

const struct ns_language *
ns_check_pattern(struct ns_check *c, const char *keyword, const char *pattern,
                 size_t length)
{
    const struct ns_language *language;

    c->status = ns_language_pattern(&c->doc->languages, pattern, length,
                                    &language, c->err);
    if (c->status == NS_OK)
        return language;
    ns_context(c->err, "schema: %s", keyword);
    snprintf(c->err->param, sizeof(c->err->param), "%s", keyword);
    return NULL;
}

static enum ns_verdict
check_pattern(struct ns_check *c, const struct ns_asked *q)
{
    const struct ns_language *language;

    if (!json_is_string(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_string(q->instance))
        return NS_VALID;
    language = ns_check_pattern(c, q->keyword, json_string_value(q->value),
                                json_string_length(q->value));
    if (!language)
        return NS_BROKEN;
    return ns_check_when(c, q,
                         ns_language_has(language,
                                         json_string_value(q->instance),
                                         json_string_length(q->instance)));
}

static enum ns_verdict
check_format(struct ns_check *c, const struct ns_asked *q)
{
    const struct ns_language *language;
    const char *pattern;
    uint32_t most;

    if (!json_is_string(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_string(q->instance))
        return NS_VALID; /* whatever it may be */
    pattern = ns_schema_format(json_string_value(q->value), &most);
    if (!pattern)
        return broken(c, "unsupported", q->keyword, "it is not known here");
    language = ns_check_pattern(c, q->keyword, pattern, strlen(pattern));
    if (!language)
        return NS_BROKEN;
    return ns_check_when(c, q,
                         length_of(q->instance) <= most &&
                             ns_language_has(language,
                                             json_string_value(q->instance),
                                             json_string_length(q->instance)));
}

/* --- schemas of the same value */

static enum ns_verdict
check_all(struct ns_check *c, const struct ns_asked *q)
{
    enum ns_verdict verdict = NS_VALID;

    if (!json_is_array(q->value))
        return ns_check_malformed(c, q);
    for (size_t i = 0; verdict == NS_VALID && i < json_array_size(q->value);
         i++)
        verdict = ns_check_schema(c, json_array_get(q->value, i), q->instance,
                                  q->place);
    return verdict;
}

/* anyOf and oneOf: how many hold. */
static enum ns_verdict
check_some(struct ns_check *c, const struct ns_asked *q)
{
    size_t n = 0;

    if (!json_is_array(q->value))
        return ns_check_malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        switch (ns_check_schema(c, json_array_get(q->value, i), q->instance,
                                q->place)) {
        case NS_VALID:
            n++;
            break;
        case NS_BROKEN:
            return NS_BROKEN;
        case NS_INVALID:
            break;
        }
        if (n == 1 && q->keyword[0] == 'a')
            return NS_VALID;
    }
    return ns_check_when(c, q, n == 1);
}

static enum ns_verdict
check_not(struct ns_check *c, const struct ns_asked *q)
{
    enum ns_verdict verdict =
        ns_check_schema(c, q->value, q->instance, q->place);

    return verdict == NS_BROKEN ? NS_BROKEN
                                : ns_check_when(c, q, verdict == NS_INVALID);
}

static enum ns_verdict
check_if(struct ns_check *c, const struct ns_asked *q)
{
    enum ns_verdict verdict =
        ns_check_schema(c, q->value, q->instance, q->place);
    const json_t *branch =
        json_object_get(q->schema, verdict == NS_VALID ? "then" : "else");

    if (verdict == NS_BROKEN)
        return NS_BROKEN;
    return branch ? ns_check_schema(c, branch, q->instance, q->place)
                  : NS_VALID;
}

static enum ns_verdict
check_ref(struct ns_check *c, const struct ns_asked *q)
{
    const json_t *target;

    c->status = ns_schema_resolve(c->doc, q->value, &target, c->err);
    return c->status == NS_OK
               ? ns_check_schema(c, target, q->instance, q->place)
               : NS_BROKEN;
}

/* An `$id` inside would change what references mean. */
static enum ns_verdict
check_id(struct ns_check *c, const struct ns_asked *q)
{
    if (q->schema == c->doc->root)
        return NS_VALID;
    return broken(c, "unsupported", q->keyword, "it stands inside a schema");
}

static enum ns_verdict
check_draft(struct ns_check *c, const struct ns_asked *q)
{
    return ns_schema_is_draft(q->value)
               ? NS_VALID
               : broken(c, "unsupported", q->keyword,
                        "it is no draft of JSON Schema");
}

static const struct keyword {
    const char *name;
    enum ns_verdict (*check)(struct ns_check *, const struct ns_asked *);
} keywords[] = {
    { "type", check_type },
    { "nullable", NULL }, /* read beside `type` */
    { "properties", ns_check_properties },
    { "required", ns_check_required },
    { "additionalProperties", ns_check_additional },
    { "items", ns_check_items },
    { "enum", check_enum },
    { "const", check_const },
    { "$ref", check_ref },
    { "anyOf", check_some },
    { "oneOf", check_some },
    { "allOf", check_all },
    { "not", check_not },
    { "if", check_if },
    { "then", NULL }, /* read beside `if`; by itself it says nothing */
    { "else", NULL },
    { "minimum", check_bound },
    { "maximum", check_bound },
    { "exclusiveMinimum", check_bound },
    { "exclusiveMaximum", check_bound },
    { "multipleOf", check_multiple },
    { "minLength", check_size },
    { "maxLength", check_size },
    { "minItems", check_size },
    { "maxItems", check_size },
    { "minProperties", check_size },
    { "maxProperties", check_size },
    { "pattern", check_pattern },
    { "format", check_format },
    { "prefixItems", ns_check_prefix_items },
    { "contains", ns_check_contains },
    { "minContains", NULL }, /* read beside `contains` */
    { "maxContains", NULL },
    { "uniqueItems", ns_check_unique },
    { "patternProperties", ns_check_pattern_properties },
    { "propertyNames", ns_check_names },
    { "dependentRequired", ns_check_dependent_required },
    { "dependentSchemas", ns_check_dependent_schemas },
    { "$id", check_id },
    { "$schema", check_draft },
};

static enum ns_verdict
check_keyword(struct ns_check *c, const struct ns_asked *q)
{
    if (!ns_check_step(c))
        return NS_BROKEN;
    for (size_t i = 0; i < sizeof(keywords) / sizeof(*keywords); i++)
        if (strcmp(keywords[i].name, q->keyword) == 0)
            return keywords[i].check ? keywords[i].check(c, q) : NS_VALID;
    if (ns_schema_is_note(q->keyword))
        return NS_VALID;
    return broken(c, "unsupported", q->keyword, "it is not known here");
}

enum ns_verdict
ns_check_schema(struct ns_check *c, const json_t *schema,
                const json_t *instance, const struct ns_place *place)
{
    struct ns_asked q = { schema, NULL, instance, place, NULL };
    enum ns_verdict verdict = NS_VALID;
    void *iter;

    if (json_is_true(schema))
        return NS_VALID;
    if (json_is_false(schema))
        return invalid(c, place, "false", schema, instance);
    if (!json_is_object(schema))
        return broken(c, "bad_param", "a schema",
                      "it is neither an object nor true or false");
    if (c->depth >= NS_SCHEMA_DEPTH)
        return broken(c, "grammar_limit", "a schema",
                      "more than 1000 of them inside each other");
    c->depth++;
    for (iter = json_object_iter((json_t *)schema); iter && verdict == NS_VALID;
         iter = json_object_iter_next((json_t *)schema, iter)) {
        q.keyword = json_object_iter_key(iter);
        q.value = json_object_iter_value(iter);
        verdict = check_keyword(c, &q);
    }
    c->depth--;
    return verdict;
}

enum ns_status
ns_schema_check_part(struct ns_schema_doc *doc, const json_t *schema,
                     const json_t *instance, struct ns_error *err)
{
    struct ns_check c = { .doc = doc, .err = err, .status = NS_OK };
    enum ns_verdict verdict = ns_check_schema(&c, schema, instance, NULL);

    return verdict == NS_VALID     ? NS_OK
           : verdict == NS_INVALID ? NS_REJECT
                                   : c.status;
}

enum ns_status
ns_schema_check(const json_t *schema, const json_t *instance,
                struct ns_error *err)
{
    struct ns_schema_doc doc = { .root = schema };
    enum ns_status status = ns_schema_check_part(&doc, schema, instance, err);

    ns_schema_doc_fini(&doc);
    return status;
}
