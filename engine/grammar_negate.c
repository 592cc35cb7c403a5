#include <stdlib.h>
#include <string.h>

#include "engine/grammar_schema.h"
#include "engine/grow.h"

struct ns_made *
ns_made_find(struct ns_compile *c, const json_t *from, enum ns_made_kind kind)
{
    uint32_t hash = ns_table_hash(&from, sizeof(from)) + (uint32_t)kind, number;
    size_t i;

    for (i = ns_table_first(&c->made_index, hash);
         (number = ns_table_at(&c->made_index, &i, hash)) != 0;)
        if (c->made[number - 1].from == from &&
            c->made[number - 1].kind == kind)
            return &c->made[number - 1];
    return NULL;
}

bool
ns_made_keep(struct ns_compile *c, const json_t *from, enum ns_made_kind kind,
             json_t *schema)
{
    uint32_t hash = ns_table_hash(&from, sizeof(from)) + (uint32_t)kind;
    struct ns_made *moved;

    moved = ns_grown(c->made, c->n_made + 1, &c->made_capacity, sizeof(*moved));
    if (moved)
        c->made = moved;
    if (!moved || !ns_table_reserve(&c->made_index)) {
        json_decref(schema);
        return ns_compile_no_memory(c);
    }
    c->made[c->n_made++] = (struct ns_made){ from, kind, schema };
    ns_table_put(&c->made_index, hash, c->n_made);
    return true;
}

void
ns_made_fini(struct ns_compile *c)
{
    for (uint32_t i = 0; i < c->n_made; i++)
        json_decref(c->made[i].schema);
    free(c->made);
    ns_table_fini(&c->made_index);
}

/* --- negation: a schema of all values that another one refuses */

bool
ns_json_append(json_t *list, json_t *part)
{
    return part && json_array_append_new(list, part) == 0;
}

static const char *const kind_name[] = { "null",   "boolean", "number",
                                         "string", "array",   "object" };
enum { N_KINDS = sizeof(kind_name) / sizeof(*kind_name) };

static size_t
kind_of(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_NULL:
        return 0;
    case JSON_TRUE:
    case JSON_FALSE:
        return 1;
    case JSON_INTEGER:
    case JSON_REAL:
        return 2;
    case JSON_STRING:
        return 3;
    case JSON_ARRAY:
        return 4;
    case JSON_OBJECT:
        return 5;
    }
    return 0;
}

/* Appends {"type": all kinds but those marked}. */
static bool
append_kinds(json_t *parts, const bool *but)
{
    json_t *kinds = json_array();
    bool fine = kinds != NULL;

    for (size_t i = 0; i < N_KINDS && fine; i++)
        if (!but[i])
            fine = ns_json_append(kinds, json_string(kind_name[i]));
    if (!fine || json_array_size(kinds) == 0) {
        json_decref(kinds);
        return fine;
    }
    return ns_json_append(parts, json_pack("{s:o}", "type", kinds));
}

static bool
negate_type(json_t *parts, const json_t *type, bool nullable, bool *known)
{
    bool but[N_KINDS] = { nullable };
    bool list = json_is_array(type);
    bool whole = false;

    for (size_t i = 0; i < (list ? json_array_size(type) : 1); i++) {
        const char *name =
            json_string_value(list ? json_array_get(type, i) : type);

        whole |= name && strcmp(name, "integer") == 0;
        for (size_t k = 0; k < N_KINDS; k++)
            but[k] |= name && strcmp(name, kind_name[k]) == 0;
    }
    *known = !whole || but[2]; /* no schema asks for fractions alone */
    return !*known || append_kinds(parts, but);
}

static int
by_value(const void *a, const void *b)
{
    return ns_json_compare(*(json_t *const *)a, *(json_t *const *)b);
}

/* The gaps between numbers. */
static bool
append_gaps(json_t *parts, const json_t *values)
{
    size_t n = 0;
    json_t **number = calloc(json_array_size(values) + 1, sizeof(*number));
    bool fine = number != NULL;

    for (size_t i = 0; i < json_array_size(values) && fine; i++)
        if (json_is_number(json_array_get(values, i)))
            number[n++] = json_array_get(values, i);
    if (n > 0)
        qsort(number, n, sizeof(json_t *), by_value);
    for (size_t i = 0; i <= n && n > 0 && fine; i++) {
        json_t *gap = json_pack("{s:s}", "type", "number");

        if (gap && i > 0 &&
            json_object_set(gap, "exclusiveMinimum", number[i - 1]) != 0)
            fine = false;
        if (gap && i < n &&
            json_object_set(gap, "exclusiveMaximum", number[i]) != 0)
            fine = false;
        fine = ns_json_append(parts, gap) && fine;
    }
    free(number);
    return fine;
}

static bool
negate_values(json_t *parts, const json_t *values, bool *known)
{
    bool but[N_KINDS] = { false }, truth[2] = { false };
    json_t *strings = json_array();
    bool fine = strings != NULL;

    *known = true;
    for (size_t i = 0; i < json_array_size(values) && fine; i++) {
        json_t *value = json_array_get(values, i);

        but[kind_of(value)] = true;
        if (json_is_boolean(value))
            truth[json_is_true(value)] = true;
        if (json_is_array(value) || json_is_object(value))
            *known = false;
        if (json_is_string(value))
            fine = json_array_append(strings, value) == 0;
    }
    if (fine && *known) {
        fine = append_kinds(parts, but) && append_gaps(parts, values);
        if (fine && but[1] && truth[0] != truth[1])
            fine =
                ns_json_append(parts, json_pack("{s:[b]}", "enum", !truth[1]));
        if (fine && but[3])
            fine = ns_json_append(parts,
                                  json_pack("{s:s,s:{s:O}}", "type", "string",
                                            "not", "enum", strings));
    }
    json_decref(strings);
    return fine;
}

/* A keyword that bounds one kind from one side, and the one that says the
 * opposite: by `shift` more or less where it counts. */
static const struct {
    const char *keyword, *kind, *opposite;
    int shift;
} opposites[] = {
    { "minimum", "number", "exclusiveMaximum", 0 },
    { "maximum", "number", "exclusiveMinimum", 0 },
    { "exclusiveMinimum", "number", "maximum", 0 },
    { "exclusiveMaximum", "number", "minimum", 0 },
    { "minLength", "string", "maxLength", -1 },
    { "maxLength", "string", "minLength", 1 },
    { "minItems", "array", "maxItems", -1 },
    { "maxItems", "array", "minItems", 1 },
    { "minProperties", "object", "maxProperties", -1 },
    { "maxProperties", "object", "minProperties", 1 },
};

static bool
negate_bound(json_t *parts, size_t i, json_t *value)
{
    uint32_t count;

    if (opposites[i].shift == 0)
        return ns_json_append(parts,
                              json_pack("{s:s,s:O}", "type", opposites[i].kind,
                                        opposites[i].opposite, value));
    if (!ns_json_count(value, &count) || (count == 0 && opposites[i].shift < 0))
        return true; /* at least none: nothing fails that */
    return ns_json_append(parts,
                          json_pack("{s:s,s:I}", "type", opposites[i].kind,
                                    opposites[i].opposite,
                                    (json_int_t)count + opposites[i].shift));
}

/* {"anyOf" or "allOf": the negations of a list}. */
static bool
negate_list(struct ns_compile *c, json_t *parts, const json_t *list,
            const char *joined, bool *known)
{
    json_t *all = json_array();
    bool fine = all != NULL;

    for (size_t i = 0; i < json_array_size(list) && fine && *known; i++) {
        const json_t *part;

        fine = ns_made_negation(c, json_array_get(list, i), &part);
        *known = part != NULL;
        if (fine && part)
            fine = json_array_append(all, (json_t *)part) == 0;
    }
    if (!fine || !*known) {
        json_decref(all);
        return fine;
    }
    return ns_json_append(parts, json_pack("{s:o}", joined, all));
}

static bool
negate_members(struct ns_compile *c, json_t *parts, const char *keyword,
               const json_t *value, bool *known)
{
    json_t *object = (json_t *)value; /* for its iterators */

    if (strcmp(keyword, "required") == 0) {
        for (size_t i = 0; i < json_array_size(value); i++)
            if (!ns_json_append(
                    parts,
                    json_pack("{s:s,s:{s:b}}", "type", "object", "properties",
                              json_string_value(json_array_get(value, i)), 0)))
                return false;
        return true;
    }
    for (void *i = json_object_iter(object); i && *known;
         i = json_object_iter_next(object, i)) {
        const char *name = json_object_iter_key(i);
        const json_t *part;

        if (!ns_made_negation(c, json_object_iter_value(i), &part))
            return false;
        *known = part != NULL;
        if (part &&
            !ns_json_append(parts, json_pack("{s:s,s:[s],s:{s:O}}", "type",
                                             "object", "required", name,
                                             "properties", name, part)))
            return false;
    }
    return true;
}

/* Appends what a value fails this keyword by; *known: false where no schema
 * says it. False: failed, or out of memory. */
static bool
negate_keyword(struct ns_compile *c, json_t *parts, const json_t *schema,
               const char *keyword, json_t *value, bool *known)
{
    const json_t *target;
    json_t *one;
    bool fine;

    if (ns_schema_is_note(keyword) || strcmp(keyword, "nullable") == 0)
        return true;
    for (size_t i = 0; i < sizeof(opposites) / sizeof(*opposites); i++)
        if (strcmp(keyword, opposites[i].keyword) == 0)
            return negate_bound(parts, i, value);
    if (strcmp(keyword, "type") == 0)
        return negate_type(parts, value, ns_schema_is_nullable(schema), known);
    if (strcmp(keyword, "enum") == 0)
        return negate_values(parts, value, known);
    if (strcmp(keyword, "const") == 0) {
        one = json_pack("[O]", value);
        fine = one && negate_values(parts, one, known);
        json_decref(one);
        return fine;
    }
    if (strcmp(keyword, "pattern") == 0 || strcmp(keyword, "format") == 0)
        return ns_json_append(parts,
                              json_pack("{s:s,s:{s:O}}", "type", "string",
                                        "not", keyword, value));
    if (strcmp(keyword, "required") == 0 || strcmp(keyword, "properties") == 0)
        return negate_members(c, parts, keyword, value, known);
    if (strcmp(keyword, "allOf") == 0)
        return negate_list(c, parts, value, "anyOf", known);
    if (strcmp(keyword, "anyOf") == 0)
        return negate_list(c, parts, value, "allOf", known);
    if (strcmp(keyword, "not") == 0)
        return json_array_append(parts, value) == 0;
    if (strcmp(keyword, "$ref") == 0) {
        if (ns_schema_resolve(&c->doc, value, &target, c->err) != NS_OK) {
            *known = false;
            return true;
        }
        fine = ns_made_negation(c, target, &target);
        *known = target != NULL;
        return fine &&
               (!target || json_array_append(parts, (json_t *)target) == 0);
    }
    *known = false;
    return true;
}

static json_t *
negate(struct ns_compile *c, const json_t *schema, bool *known)
{
    json_t *object = (json_t *)schema, *parts; /* for its iterators */
    bool fine = true;

    *known = true;
    if (json_is_boolean(schema))
        return json_boolean(json_is_false(schema));
    parts = json_array();
    if (!parts)
        return NULL;
    for (void *i = json_object_iter(object); i && fine && *known;
         i = json_object_iter_next(object, i))
        fine = negate_keyword(c, parts, schema, json_object_iter_key(i),
                              json_object_iter_value(i), known);
    if (!fine || !*known) {
        json_decref(parts);
        return NULL;
    }
    if (json_array_size(parts) == 0) { /* it refuses nothing */
        json_decref(parts);
        return json_false();
    }
    return json_pack("{s:o}", "anyOf", parts);
}

bool
ns_made_negation(struct ns_compile *c, const json_t *schema, const json_t **out)
{
    struct ns_made *made = ns_made_find(c, schema, NS_MADE_NEGATION);
    json_t *negation;
    bool is_known;

    if (made) {
        *out = made->schema; /* of one that is being made there is none yet */
        return true;
    }
    if (!ns_compile_keywords(c, schema) ||
        !ns_made_keep(c, schema, NS_MADE_NEGATION, NULL))
        return false;
    negation = negate(c, schema, &is_known);
    if (!negation && is_known) /* it failed inside, or there was no room */
        return c->status == NS_OK && ns_compile_no_memory(c);
    ns_made_find(c, schema, NS_MADE_NEGATION)->schema = negation;
    *out = negation;
    return true;
}
