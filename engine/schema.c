#include "engine/schema.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "engine/decimal.h"
#include "engine/json.h"
#include "engine/language.h"
#include "engine/schema_private.h"

/* BROKEN: the schema, or memory; the error stands. */
enum verdict { VALID, INVALID, BROKEN };

/* Where in the instance we are, from the inside out. */
struct place {
    const struct place *up;
    const char *name; /* a member's, or NULL: then an item */
    size_t index;
};

struct check {
    const json_t *root;
    struct ns_error *err;
    enum ns_status status; /* what BROKEN stands for */
    unsigned depth;
    uint32_t n_steps;
    struct ns_languages *patterns;
};

static enum verdict check_schema(struct check *c, const json_t *schema,
                                 const json_t *instance,
                                 const struct place *place);

static enum verdict
broken(struct check *c, const char *code, const char *keyword, const char *what)
{
    c->status =
        ns_refuse(c->err, code, keyword, "schema: %s: %s", keyword, what);
    return BROKEN;
}

static void
write_pointer(const struct place *place, char *out, size_t size)
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
            snprintf(out + length, size - length, "%c",
                     (unsigned char)*at < 0x20 || *at == 0x7f ? '?' : *at);
    }
}

static enum verdict
invalid(struct check *c, const struct place *place, const char *keyword,
        const json_t *wanted, const json_t *instance)
{
    char pointer[120], shown[2][60];

    write_pointer(place, pointer, sizeof(pointer));
    ns_refuse(c->err, "schema", NULL, "%s: %s: %s wanted, it is %s",
              pointer[0] ? pointer : "the document", keyword,
              ns_json_show(wanted, shown[0], sizeof(shown[0])),
              ns_json_show(instance, shown[1], sizeof(shown[1])));
    return INVALID;
}

static bool
step(struct check *c)
{
    if (c->n_steps++ < NS_SCHEMA_STEPS)
        return true;
    broken(c, "grammar_limit", "it", "takes too many steps to check");
    return false;
}

/* --- what values are */

int
ns_json_compare(const json_t *a, const json_t *b)
{
    long double x, y;

    if (json_is_integer(a) && json_is_integer(b))
        return (json_integer_value(a) > json_integer_value(b)) -
               (json_integer_value(a) < json_integer_value(b));
    /* 64 bits of mantissa or more hold both kinds without loss. */
    x = json_is_integer(a) ? (long double)json_integer_value(a)
                           : (long double)json_real_value(a);
    y = json_is_integer(b) ? (long double)json_integer_value(b)
                           : (long double)json_real_value(b);
    return (x > y) - (x < y);
}

bool
ns_json_same(const json_t *a, const json_t *b)
{
    const char *name;
    const json_t *value;
    void *iter;

    if (json_is_number(a) && json_is_number(b))
        return ns_json_compare(a, b) == 0;
    if (json_typeof(a) != json_typeof(b))
        return false;
    if (json_is_array(a)) {
        if (json_array_size(a) != json_array_size(b))
            return false;
        for (size_t i = 0; i < json_array_size(a); i++)
            if (!ns_json_same(json_array_get(a, i), json_array_get(b, i)))
                return false;
        return true;
    }
    if (!json_is_object(a))
        return json_equal(a, b);
    if (json_object_size(a) != json_object_size(b))
        return false;
    /* jansson's iterators want it without const, and change nothing. */
    for (iter = json_object_iter((json_t *)a); iter;
         iter = json_object_iter_next((json_t *)a, iter)) {
        name = json_object_iter_key(iter);
        value = json_object_get(b, name);
        if (!value || !ns_json_same(json_object_iter_value(iter), value))
            return false;
    }
    return true;
}

bool
ns_json_count(const json_t *value, uint32_t *out)
{
    double real = json_number_value(value);

    if (!json_is_number(value) || real < 0 || real >= UINT32_MAX ||
        real != floor(real))
        return false;
    *out = (uint32_t)real;
    return true;
}

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

/* --- keywords. Each is asked with its value and the schema around it. */

struct asked {
    const json_t *schema, *value, *instance;
    const struct place *place;
    const char *keyword;
};

static enum verdict
failed(struct check *c, const struct asked *q)
{
    return invalid(c, q->place, q->keyword, q->value, q->instance);
}

static enum verdict
malformed(struct check *c, const struct asked *q)
{
    return broken(c, "bad_param", q->keyword, "it has a value of another kind");
}

static enum verdict
when(struct check *c, const struct asked *q, bool valid)
{
    return valid ? VALID : failed(c, q);
}

static enum verdict
check_type(struct check *c, const struct asked *q)
{
    static const char *const known[] = { "object", "array",   "string",
                                         "number", "integer", "boolean",
                                         "null" };
    bool list = json_is_array(q->value), any = false;
    size_t n = list ? json_array_size(q->value) : 1;

    for (size_t i = 0; i < n; i++) {
        const char *type =
            json_string_value(list ? json_array_get(q->value, i) : q->value);
        bool is_known = false;

        for (size_t k = 0; type && k < sizeof(known) / sizeof(*known); k++)
            is_known |= strcmp(known[k], type) == 0;
        if (!is_known)
            return malformed(c, q);
        any |= is_of_type(q->instance, type);
    }
    return when(c, q, any);
}

static enum verdict
check_enum(struct check *c, const struct asked *q)
{
    if (!json_is_array(q->value))
        return malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        if (!step(c))
            return BROKEN;
        if (ns_json_same(json_array_get(q->value, i), q->instance))
            return VALID;
    }
    return failed(c, q);
}

static enum verdict
check_const(struct check *c, const struct asked *q)
{
    return when(c, q, ns_json_same(q->value, q->instance));
}

/* One function for bounds of one kind: the keyword's name says which. */
static enum verdict
check_bound(struct check *c, const struct asked *q)
{
    bool low = strstr(q->keyword, "inimum") != NULL;
    bool open = q->keyword[0] == 'e';
    int order;

    if (!json_is_number(q->value))
        return malformed(c, q);
    if (!json_is_number(q->instance))
        return VALID;
    order = ns_json_compare(q->instance, q->value);
    if (order == 0)
        return when(c, q, !open);
    return when(c, q, low ? order > 0 : order < 0);
}

static enum verdict
check_size(struct check *c, const struct asked *q)
{
    const json_t *instance = q->instance;
    const char *of = q->keyword + 3; /* behind min or max */
    size_t size;
    uint32_t bound;

    if (!ns_json_count(q->value, &bound))
        return malformed(c, q);
    if (strcmp(of, "Length") == 0 && json_is_string(instance))
        size = length_of(instance);
    else if (strcmp(of, "Items") == 0 && json_is_array(instance))
        size = json_array_size(instance);
    else if (strcmp(of, "Properties") == 0 && json_is_object(instance))
        size = json_object_size(instance);
    else
        return VALID;
    return when(c, q, q->keyword[1] == 'i' ? size >= bound : size <= bound);
}

/* By their decimal digits, so that 0.0075 is a multiple of 0.0001: the
 * remainder of the one by the other, both shifted until they are whole. */
static enum verdict
check_multiple(struct check *c, const struct asked *q)
{
    struct ns_decimal value, unit;
    unsigned __int128 modulus = 0, rest = 0, most = (unsigned __int128)1 << 120;
    unsigned shift;

    if (!json_is_number(q->value) || json_number_value(q->value) <= 0)
        return malformed(c, q);
    if (!json_is_number(q->instance))
        return VALID;
    ns_decimal_of(q->instance, &value);
    ns_decimal_of(q->value, &unit);
    shift = value.n_frac > unit.n_frac ? value.n_frac : unit.n_frac;
    for (unsigned i = 0; i < unit.n_int + shift && modulus < most; i++)
        modulus = modulus * 10 + (i < unit.n_int ? unit.whole[i] - '0'
                                  : i - unit.n_int < unit.n_frac
                                      ? unit.frac[i - unit.n_int] - '0'
                                      : 0);
    if (modulus >= most)
        return broken(c, "unsupported", q->keyword,
                      "too many digits between it and a value");
    for (unsigned i = 0; i < value.n_int + shift; i++)
        rest = (rest * 10 + (i < value.n_int ? value.whole[i] - '0'
                             : i - value.n_int < value.n_frac
                                 ? value.frac[i - value.n_int] - '0'
                                 : 0)) %
               modulus;
    return when(c, q, rest == 0);
}

/* The machine of a pattern; NULL: broken. */
static const struct ns_language *
machine_of(struct check *c, const char *keyword, const char *pattern,
           size_t length)
{
    const struct ns_language *language;

    c->status =
        ns_languages_get(c->patterns, pattern, length, &language, c->err);
    if (c->status == NS_OK)
        return language;
    ns_context(c->err, "schema: %s", keyword);
    snprintf(c->err->param, sizeof(c->err->param), "%s", keyword);
    return NULL;
}

static enum verdict
check_pattern(struct check *c, const struct asked *q)
{
    const struct ns_language *language;

    if (!json_is_string(q->value))
        return malformed(c, q);
    if (!json_is_string(q->instance))
        return VALID;
    language = machine_of(c, q->keyword, json_string_value(q->value),
                          json_string_length(q->value));
    if (!language)
        return BROKEN;
    return when(c, q,
                ns_language_has(language, json_string_value(q->instance),
                                json_string_length(q->instance)));
}

static enum verdict
check_format(struct check *c, const struct asked *q)
{
    const struct ns_language *language;
    const char *pattern;
    uint32_t most;

    if (!json_is_string(q->value))
        return malformed(c, q);
    pattern = ns_schema_format(json_string_value(q->value), &most);
    if (!pattern)
        return broken(c, "unsupported", q->keyword, "it is not known here");
    if (!json_is_string(q->instance))
        return VALID;
    language = machine_of(c, q->keyword, pattern, strlen(pattern));
    if (!language)
        return BROKEN;
    return when(c, q,
                length_of(q->instance) <= most &&
                    ns_language_has(language, json_string_value(q->instance),
                                    json_string_length(q->instance)));
}

/* --- arrays */

static enum verdict
check_item(struct check *c, const struct asked *q, const json_t *schema,
           size_t index)
{
    struct place place = { q->place, NULL, index };

    return check_schema(c, schema, json_array_get(q->instance, index), &place);
}

static enum verdict
check_prefix_items(struct check *c, const struct asked *q)
{
    enum verdict verdict = VALID;

    if (!json_is_array(q->value))
        return malformed(c, q);
    if (!json_is_array(q->instance))
        return VALID;
    for (size_t i = 0; verdict == VALID && i < json_array_size(q->value) &&
                       i < json_array_size(q->instance);
         i++)
        verdict = check_item(c, q, json_array_get(q->value, i), i);
    return verdict;
}

static enum verdict
check_items(struct check *c, const struct asked *q)
{
    enum verdict verdict = VALID;

    if (!json_is_array(q->instance))
        return VALID;
    for (size_t i = json_array_size(json_object_get(q->schema, "prefixItems"));
         verdict == VALID && i < json_array_size(q->instance); i++)
        verdict = check_item(c, q, q->value, i);
    return verdict;
}

static enum verdict
check_contains(struct check *c, const struct asked *q)
{
    const json_t *min = json_object_get(q->schema, "minContains");
    const json_t *max = json_object_get(q->schema, "maxContains");
    uint32_t least = 1, most = UINT32_MAX, n = 0;

    if ((min && !ns_json_count(min, &least)) ||
        (max && !ns_json_count(max, &most)))
        return malformed(c, q);
    if (!json_is_array(q->instance))
        return VALID;
    for (size_t i = 0; i < json_array_size(q->instance); i++)
        switch (check_item(c, q, q->value, i)) {
        case VALID:
            n++;
            break;
        case BROKEN:
            return BROKEN;
        case INVALID:
            break;
        }
    return when(c, q, n >= least && n <= most);
}

static enum verdict
check_unique(struct check *c, const struct asked *q)
{
    if (!json_is_boolean(q->value))
        return malformed(c, q);
    if (!json_is_true(q->value) || !json_is_array(q->instance))
        return VALID;
    for (size_t i = 0; i < json_array_size(q->instance); i++)
        for (size_t k = 0; k < i; k++) {
            if (!step(c))
                return BROKEN;
            if (ns_json_same(json_array_get(q->instance, i),
                             json_array_get(q->instance, k)))
                return failed(c, q);
        }
    return VALID;
}

/* --- objects */

static enum verdict
check_member(struct check *c, const struct asked *q, const json_t *schema,
             const char *name)
{
    struct place place = { q->place, name, 0 };

    return check_schema(c, schema, json_object_get(q->instance, name), &place);
}

static enum verdict
check_required(struct check *c, const struct asked *q)
{
    if (!json_is_array(q->value))
        return malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        const json_t *name = json_array_get(q->value, i);
        struct place place = { q->place, json_string_value(name), 0 };

        if (!json_is_string(name))
            return malformed(c, q);
        if (json_is_object(q->instance) &&
            !json_object_getn(q->instance, json_string_value(name),
                              json_string_length(name)))
            return invalid(c, &place, q->keyword, json_true(), NULL);
    }
    return VALID;
}

/* Calls `check` for each member of the keyword's own value. */
static enum verdict
for_each(struct check *c, const struct asked *q,
         enum verdict (*check)(struct check *, const struct asked *,
                               const char *name, const json_t *value))
{
    enum verdict verdict = VALID;
    json_t *object = (json_t *)q->value; /* for its iterators */
    void *iter;

    if (!json_is_object(q->value))
        return malformed(c, q);
    if (!json_is_object(q->instance))
        return VALID;
    for (iter = json_object_iter(object); iter && verdict == VALID;
         iter = json_object_iter_next(object, iter))
        verdict = check(c, q, json_object_iter_key(iter),
                        json_object_iter_value(iter));
    return verdict;
}

static enum verdict
one_property(struct check *c, const struct asked *q, const char *name,
             const json_t *value)
{
    return json_object_get(q->instance, name) ? check_member(c, q, value, name)
                                              : VALID;
}

static enum verdict
check_properties(struct check *c, const struct asked *q)
{
    return for_each(c, q, one_property);
}

/* Whether a name is one that the pattern finds; negative: broken. */
static int
finds(struct check *c, const struct asked *q, const char *pattern,
      const char *name)
{
    const struct ns_language *language =
        machine_of(c, q->keyword, pattern, strlen(pattern));

    return language ? ns_language_has(language, name, strlen(name)) : -1;
}

static enum verdict
one_pattern(struct check *c, const struct asked *q, const char *pattern,
            const json_t *value)
{
    enum verdict verdict = VALID;
    json_t *instance = (json_t *)q->instance;

    for (void *iter = json_object_iter(instance); iter && verdict == VALID;
         iter = json_object_iter_next(instance, iter)) {
        const char *name = json_object_iter_key(iter);
        int found = finds(c, q, pattern, name);

        if (found < 0)
            return BROKEN;
        if (found)
            verdict = check_member(c, q, value, name);
    }
    return verdict;
}

static enum verdict
check_pattern_properties(struct check *c, const struct asked *q)
{
    return for_each(c, q, one_pattern);
}

static enum verdict
check_additional(struct check *c, const struct asked *q)
{
    const json_t *declared = json_object_get(q->schema, "properties");
    json_t *patterns = json_object_get(q->schema, "patternProperties");
    json_t *instance = (json_t *)q->instance;
    enum verdict verdict = VALID;

    if (!json_is_object(q->instance))
        return VALID;
    for (void *iter = json_object_iter(instance); iter && verdict == VALID;
         iter = json_object_iter_next(instance, iter)) {
        const char *name = json_object_iter_key(iter);
        int found = json_object_get(declared, name) != NULL;

        for (void *at = json_object_iter(patterns); at && !found;
             at = json_object_iter_next(patterns, at))
            found = finds(c, q, json_object_iter_key(at), name);
        if (found < 0)
            return BROKEN;
        if (!found)
            verdict = check_member(c, q, q->value, name);
    }
    return verdict;
}

static enum verdict
check_names(struct check *c, const struct asked *q)
{
    json_t *instance = (json_t *)q->instance;
    enum verdict verdict = VALID;

    if (!json_is_object(q->instance))
        return VALID;
    for (void *iter = json_object_iter(instance); iter && verdict == VALID;
         iter = json_object_iter_next(instance, iter)) {
        json_t *name = json_string(json_object_iter_key(iter));
        struct place place = { q->place, json_object_iter_key(iter), 0 };

        if (!name) {
            c->status = ns_fail(c->err, NS_FATAL, "out of memory for a name");
            return BROKEN;
        }
        verdict = check_schema(c, q->value, name, &place);
        json_decref(name);
    }
    return verdict;
}

static enum verdict
one_dependent_list(struct check *c, const struct asked *q, const char *name,
                   const json_t *value)
{
    struct asked inner = *q;

    inner.value = value;
    return json_object_get(q->instance, name) ? check_required(c, &inner)
                                              : VALID;
}

static enum verdict
check_dependent_required(struct check *c, const struct asked *q)
{
    return for_each(c, q, one_dependent_list);
}

static enum verdict
one_dependent_schema(struct check *c, const struct asked *q, const char *name,
                     const json_t *value)
{
    return json_object_get(q->instance, name)
               ? check_schema(c, value, q->instance, q->place)
               : VALID;
}

static enum verdict
check_dependent_schemas(struct check *c, const struct asked *q)
{
    return for_each(c, q, one_dependent_schema);
}

/* --- schemas of the same value */

static enum verdict
check_all(struct check *c, const struct asked *q)
{
    enum verdict verdict = VALID;

    if (!json_is_array(q->value))
        return malformed(c, q);
    for (size_t i = 0; verdict == VALID && i < json_array_size(q->value); i++)
        verdict =
            check_schema(c, json_array_get(q->value, i), q->instance, q->place);
    return verdict;
}

/* anyOf and oneOf: how many hold. */
static enum verdict
check_some(struct check *c, const struct asked *q)
{
    size_t n = 0;

    if (!json_is_array(q->value))
        return malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        switch (check_schema(c, json_array_get(q->value, i), q->instance,
                             q->place)) {
        case VALID:
            n++;
            break;
        case BROKEN:
            return BROKEN;
        case INVALID:
            break;
        }
        if (n == 1 && q->keyword[0] == 'a')
            return VALID;
    }
    return when(c, q, n == 1);
}

static enum verdict
check_not(struct check *c, const struct asked *q)
{
    enum verdict verdict = check_schema(c, q->value, q->instance, q->place);

    return verdict == BROKEN ? BROKEN : when(c, q, verdict == INVALID);
}

static enum verdict
check_if(struct check *c, const struct asked *q)
{
    enum verdict verdict = check_schema(c, q->value, q->instance, q->place);
    const json_t *branch =
        json_object_get(q->schema, verdict == VALID ? "then" : "else");

    if (verdict == BROKEN)
        return BROKEN;
    return branch ? check_schema(c, branch, q->instance, q->place) : VALID;
}

static enum verdict
check_ref(struct check *c, const struct asked *q)
{
    const json_t *target;

    c->status = ns_schema_resolve(c->root, q->value, &target, c->err);
    return c->status == NS_OK ? check_schema(c, target, q->instance, q->place)
                              : BROKEN;
}

/* An `$id` inside would change what references mean. */
static enum verdict
check_id(struct check *c, const struct asked *q)
{
    if (q->schema == c->root)
        return VALID;
    return broken(c, "unsupported", q->keyword, "it stands inside a schema");
}

static enum verdict
check_draft(struct check *c, const struct asked *q)
{
    return ns_schema_is_draft(q->value)
               ? VALID
               : broken(c, "unsupported", q->keyword,
                        "it is no draft of JSON Schema");
}

static const struct keyword {
    const char *name;
    enum verdict (*check)(struct check *, const struct asked *);
} keywords[] = {
    { "type", check_type },
    { "properties", check_properties },
    { "required", check_required },
    { "additionalProperties", check_additional },
    { "items", check_items },
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
    { "prefixItems", check_prefix_items },
    { "contains", check_contains },
    { "minContains", NULL }, /* read beside `contains` */
    { "maxContains", NULL },
    { "uniqueItems", check_unique },
    { "patternProperties", check_pattern_properties },
    { "propertyNames", check_names },
    { "dependentRequired", check_dependent_required },
    { "dependentSchemas", check_dependent_schemas },
    { "$id", check_id },
    { "$schema", check_draft },
};

static enum verdict
check_keyword(struct check *c, const struct asked *q)
{
    if (!step(c))
        return BROKEN;
    for (size_t i = 0; i < sizeof(keywords) / sizeof(*keywords); i++)
        if (strcmp(keywords[i].name, q->keyword) == 0)
            return keywords[i].check ? keywords[i].check(c, q) : VALID;
    if (ns_schema_is_note(q->keyword))
        return VALID;
    return broken(c, "unsupported", q->keyword, "it is not known here");
}

static enum verdict
check_schema(struct check *c, const json_t *schema, const json_t *instance,
             const struct place *place)
{
    struct asked q = { schema, NULL, instance, place, NULL };
    enum verdict verdict = VALID;
    void *iter;

    if (json_is_true(schema))
        return VALID;
    if (json_is_false(schema))
        return invalid(c, place, "false", schema, instance);
    if (!json_is_object(schema))
        return broken(c, "bad_param", "a schema",
                      "it is neither an object nor true or false");
    if (c->depth >= NS_SCHEMA_DEPTH)
        return broken(c, "grammar_limit", "a schema",
                      "more than 1000 of them inside each other");
    c->depth++;
    for (iter = json_object_iter((json_t *)schema); iter && verdict == VALID;
         iter = json_object_iter_next((json_t *)schema, iter)) {
        q.keyword = json_object_iter_key(iter);
        q.value = json_object_iter_value(iter);
        verdict = check_keyword(c, &q);
    }
    c->depth--;
    return verdict;
}

enum ns_status
ns_schema_check_part(const json_t *root, const json_t *schema,
                     const json_t *instance, struct ns_languages *patterns,
                     struct ns_error *err)
{
    struct check c = {
        .root = root, .err = err, .status = NS_OK, .patterns = patterns
    };
    enum verdict verdict = check_schema(&c, schema, instance, NULL);

    return verdict == VALID ? NS_OK : verdict == INVALID ? NS_REJECT : c.status;
}

enum ns_status
ns_schema_check(const json_t *schema, const json_t *instance,
                struct ns_error *err)
{
    struct ns_languages patterns = { 0 };
    enum ns_status status =
        ns_schema_check_part(schema, schema, instance, &patterns, err);

    ns_languages_fini(&patterns);
    return status;
}
