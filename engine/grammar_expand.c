#include <stdlib.h>
#include <string.h>

#include "engine/grammar_schema.h"

/* How far a discriminator may lie inside alternatives that have to exclude
 * each other. */
enum { DISJOINT_DEPTH = 3 };

static bool conjoin(struct ns_compile *c, struct ns_options *all,
                    const json_t *schema);

/* --- options */

static bool
add_option(struct ns_compile *c, struct ns_options *all,
           const struct ns_option *option)
{
    struct ns_option *moved;

    if (all->n >= NS_SCHEMA_OPTIONS)
        return ns_compile_refuse(
            c, "grammar_limit",
            option->of.n ? option->of.schema[0] : c->doc.root, "anyOf",
            "more than 1024 combinations of alternatives");
    if (all->n == all->capacity) {
        uint32_t wanted = all->capacity ? 2 * all->capacity : 4;

        moved = ns_compile_array(c, wanted, sizeof(*moved));
        if (!moved)
            return false;
        if (all->n > 0)
            memcpy(moved, all->option, all->n * sizeof(*moved));
        all->option = moved;
        all->capacity = wanted;
    }
    all->option[all->n++] = *option;
    return true;
}

static bool
has(const struct ns_goal *goal, const json_t *schema)
{
    for (uint32_t i = 0; i < goal->n; i++)
        if (goal->schema[i] == schema)
            return true;
    return false;
}

/* A list of its own: options that part from here do not share it. */
static bool
append_schema(struct ns_compile *c, struct ns_goal *goal, const json_t *schema)
{
    const json_t **moved = ns_compile_array(c, goal->n + 1, sizeof(*moved));

    if (!moved)
        return false;
    if (goal->n > 0)
        memcpy(moved, goal->schema, goal->n * sizeof(*moved));
    moved[goal->n++] = schema;
    goal->schema = moved;
    return true;
}

/* `all` as it is, with each branch in turn. */
static bool
branch(struct ns_compile *c, struct ns_options *all, const json_t *list)
{
    struct ns_options joined = { 0 };

    for (size_t i = 0; i < json_array_size(list); i++) {
        struct ns_options copy = { 0 };

        for (uint32_t k = 0; k < all->n; k++)
            if (!add_option(c, &copy, &all->option[k]))
                return false;
        if (!conjoin(c, &copy, json_array_get(list, i)))
            return false;
        for (uint32_t k = 0; k < copy.n; k++)
            if (!add_option(c, &joined, &copy.option[k]))
                return false;
    }
    *all = joined;
    return true;
}

static void
mark(struct ns_options *all, const json_t *schema, const char *keyword)
{
    for (uint32_t i = 0; i < all->n; i++)
        if (!all->option[i].unsure) {
            all->option[i].unsure = schema;
            all->option[i].unsure_keyword = keyword;
        }
}

static bool
conjoin_negation(struct ns_compile *c, struct ns_options *all,
                 const json_t *schema, const json_t *around,
                 const char *keyword)
{
    const json_t *negation;

    if (!ns_made_negation(c, schema, &negation))
        return false;
    if (negation)
        return conjoin(c, all, negation);
    mark(all, around, keyword);
    return true;
}

/* The schema without what stands in its place for others. */
static bool
bare(struct ns_compile *c, const json_t *schema, const json_t **out)
{
    static const char *const in_place[] = {
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
        "dependentRequired",
        "dependentSchemas",
    };
    struct ns_made *made = ns_made_find(c, schema, NS_MADE_BARE);
    json_t *copy = made ? made->schema : NULL;

    if (!made) {
        copy = json_copy((json_t *)schema);
        if (!copy)
            return ns_compile_no_memory(c);
        for (size_t i = 0; i < sizeof(in_place) / sizeof(*in_place); i++)
            json_object_del(copy, in_place[i]);
        if (!ns_made_keep(c, schema, NS_MADE_BARE, copy))
            return false;
    }
    *out = copy;
    return true;
}

static bool
are_disjoint(struct ns_compile *c, const json_t *a, const json_t *b,
             const json_t *around, bool *out)
{
    struct ns_arena *arena = c->arena;
    struct ns_goal goal = { 0 };
    const json_t *siblings = NULL;

    /* Of each of so many pairs nothing is left but the answer. */
    c->arena = c->scratch;
    *out = bare(c, around, &siblings) && ns_goal_add(c, &goal, siblings) &&
           ns_goal_add(c, &goal, a) && ns_goal_add(c, &goal, b) &&
           ns_goal_is_nothing(c, &goal, DISJOINT_DEPTH);
    c->arena = arena;
    if (arena != c->scratch)
        ns_arena_reset(c->scratch);
    return c->status == NS_OK;
}

/* Each alternative without those others that it can meet. */
static bool
conjoin_one(struct ns_compile *c, struct ns_options *all, const json_t *schema,
            const json_t *list)
{
    struct ns_options joined = { 0 };

    for (size_t i = 0; i < json_array_size(list); i++) {
        struct ns_options copy = { 0 };

        for (uint32_t k = 0; k < all->n; k++)
            if (!add_option(c, &copy, &all->option[k]))
                return false;
        if (!conjoin(c, &copy, json_array_get(list, i)))
            return false;
        for (size_t k = 0; k < json_array_size(list) && copy.n > 0; k++) {
            bool disjoint;

            if (k == i)
                continue;
            if (!are_disjoint(c, json_array_get(list, i),
                              json_array_get(list, k), schema, &disjoint))
                return false;
            if (!disjoint &&
                !conjoin_negation(c, &copy, json_array_get(list, k), schema,
                                  "oneOf"))
                return false;
        }
        for (uint32_t k = 0; k < copy.n; k++)
            if (!add_option(c, &joined, &copy.option[k]))
                return false;
    }
    *all = joined;
    return true;
}

static bool
conjoin_if(struct ns_compile *c, struct ns_options *all, const json_t *schema)
{
    const json_t *then = json_object_get(schema, "then");
    const json_t *other = json_object_get(schema, "else");
    struct ns_options holds = { 0 };

    if (!then && !other)
        return true;
    for (uint32_t k = 0; k < all->n; k++)
        if (!add_option(c, &holds, &all->option[k]))
            return false;
    if (!conjoin(c, &holds, json_object_get(schema, "if")) ||
        (then && !conjoin(c, &holds, then)) ||
        !conjoin_negation(c, all, json_object_get(schema, "if"), schema,
                          "if") ||
        (other && !conjoin(c, all, other)))
        return false;
    for (uint32_t k = 0; k < holds.n; k++)
        if (!add_option(c, all, &holds.option[k]))
            return false;
    return true;
}

/* One of them: the object does not have the name, or it keeps to what hangs
 * on it. */
static bool
append_dependents(json_t *list, json_t *dependents, bool names)
{
    for (void *i = json_object_iter(dependents); i;
         i = json_object_iter_next(dependents, i)) {
        const char *name = json_object_iter_key(i);
        json_t *value = json_object_iter_value(i);
        json_t *holds =
            names ? json_pack("{s:O}", "required", value) : json_incref(value);

        if (!ns_json_append(list, json_pack("{s:[{s:{s:b}},{s:[{s:[s]},o]}]}",
                                            "anyOf", "properties", name, 0,
                                            "allOf", "required", name, holds)))
            return false;
    }
    return true;
}

static bool
conjoin_dependents(struct ns_compile *c, struct ns_options *all,
                   const json_t *schema)
{
    struct ns_made *made = ns_made_find(c, schema, NS_MADE_DEPENDENT);
    json_t *list = made ? made->schema : NULL;

    if (!made) {
        list = json_array();
        if (!list ||
            !append_dependents(
                list, json_object_get(schema, "dependentRequired"), true) ||
            !append_dependents(
                list, json_object_get(schema, "dependentSchemas"), false)) {
            json_decref(list);
            return ns_compile_no_memory(c);
        }
        if (!ns_made_keep(c, schema, NS_MADE_DEPENDENT, list))
            return false;
    }
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!conjoin(c, all, json_array_get(list, i)))
            return false;
    return true;
}

/* The parts of `not` that strings can be cut by (grammar_shape.c). */
static bool
is_string_cut(const json_t *schema)
{
    const json_t *cut = json_object_get(schema, "not");
    const char *type = json_string_value(json_object_get(schema, "type"));

    return type && strcmp(type, "string") == 0 && json_object_size(cut) == 1 &&
           (json_object_get(cut, "pattern") || json_object_get(cut, "format") ||
            json_object_get(cut, "enum"));
}

/* What the value of a keyword has to be like. */
enum form {
    ANY,
    SCHEMA,
    SCHEMAS, /* a list, not empty */
    NAMED,   /* an object of schemas */
    NUMBER,
    COUNT,
    STRING,
    NAMES, /* a list of strings */
    LISTS, /* an object of those */
    TRUTH,
    LIST,
};

/* clang-format off */
static const struct {
    const char *keyword;
    enum form form;
} known[] = {
    { "type",                  ANY },
    { "const",                 ANY },
    { "additionalProperties",  SCHEMA },
    { "items",                 SCHEMA },
    { "not",                   SCHEMA },
    { "if",                    SCHEMA },
    { "then",                  SCHEMA },
    { "else",                  SCHEMA },
    { "contains",              SCHEMA },
    { "propertyNames",         SCHEMA },
    { "unevaluatedItems",      SCHEMA },
    { "unevaluatedProperties", SCHEMA },
    { "anyOf",                 SCHEMAS },
    { "oneOf",                 SCHEMAS },
    { "allOf",                 SCHEMAS },
    { "prefixItems",           SCHEMAS },
    { "properties",            NAMED },
    { "patternProperties",     NAMED },
    { "dependentSchemas",      NAMED },
    { "minimum",               NUMBER },
    { "maximum",               NUMBER },
    { "exclusiveMinimum",      NUMBER },
    { "exclusiveMaximum",      NUMBER },
    { "multipleOf",            NUMBER },
    { "minLength",             COUNT },
    { "maxLength",             COUNT },
    { "minItems",              COUNT },
    { "maxItems",              COUNT },
    { "minProperties",         COUNT },
    { "maxProperties",         COUNT },
    { "minContains",           COUNT },
    { "maxContains",           COUNT },
    { "$ref",                  STRING },
    { "pattern",               STRING },
    { "format",                STRING },
    { "required",              NAMES },
    { "dependentRequired",     LISTS },
    { "nullable",              TRUTH },
    { "uniqueItems",           TRUTH },
    { "enum",                  LIST },
};
/* clang-format on */

static bool
is_schema(const json_t *value)
{
    return json_is_object(value) || json_is_boolean(value);
}

static bool
are_names(const json_t *list)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!json_is_string(json_array_get(list, i)))
            return false;
    return json_is_array(list);
}

static bool
is_of_form(const json_t *value, enum form form)
{
    json_t *object = (json_t *)value; /* for its iterators */
    bool fine = true;
    uint32_t count;

    switch (form) {
    case ANY:
        return true;
    case SCHEMA:
        return is_schema(value);
    case NUMBER:
        return json_is_number(value);
    case COUNT:
        return ns_json_count(value, &count);
    case STRING:
        return json_is_string(value);
    case NAMES:
        return are_names(value);
    case TRUTH:
        return json_is_boolean(value);
    case LIST:
        return json_is_array(value);
    case SCHEMAS:
        for (size_t i = 0; i < json_array_size(value); i++)
            fine &= is_schema(json_array_get(value, i));
        return fine && json_array_size(value) > 0;
    case NAMED:
    case LISTS:
        for (void *i = json_object_iter(object); i;
             i = json_object_iter_next(object, i))
            fine &= form == NAMED ? is_schema(json_object_iter_value(i))
                                  : are_names(json_object_iter_value(i));
        return fine && json_is_object(value);
    }
    return false;
}

bool
ns_compile_keywords(struct ns_compile *c, const json_t *schema)
{
    json_t *object = (json_t *)schema; /* for its iterators */

    for (void *i = json_object_iter(object); i;
         i = json_object_iter_next(object, i)) {
        const char *keyword = json_object_iter_key(i);
        size_t k = 0, n = sizeof(known) / sizeof(*known);

        while (k < n && strcmp(known[k].keyword, keyword) != 0)
            k++;
        if (k < n && !is_of_form(json_object_iter_value(i), known[k].form))
            return ns_compile_refuse(c, "bad_param", schema, keyword,
                                     "it has a value of another kind");
        if (strcmp(keyword, "$schema") == 0 &&
            !ns_schema_is_draft(json_object_iter_value(i)))
            return ns_compile_refuse(c, "unsupported", schema, keyword,
                                     "it is no draft of JSON Schema");
        if (k < n || ns_schema_is_note(keyword))
            continue;
        if (strcmp(keyword, "$id") != 0)
            return ns_compile_refuse(c, "unsupported", schema, keyword,
                                     "it is not known here");
        if (schema != c->doc.root)
            return ns_compile_refuse(c, "unsupported", schema, keyword,
                                     "it stands inside a schema");
    }
    return true;
}

static bool
conjoin_keyword(struct ns_compile *c, struct ns_options *all,
                const json_t *schema, const char *keyword, const json_t *value)
{
    const json_t *target;

    if (strcmp(keyword, "$ref") == 0) {
        c->status = ns_schema_resolve(&c->doc, value, &target, c->err);
        return c->status == NS_OK && conjoin(c, all, target);
    }
    if (strcmp(keyword, "allOf") == 0) {
        for (size_t i = 0; i < json_array_size(value); i++)
            if (!conjoin(c, all, json_array_get(value, i)))
                return false;
        return true;
    }
    if (strcmp(keyword, "anyOf") == 0)
        return branch(c, all, value);
    if (strcmp(keyword, "oneOf") == 0)
        return conjoin_one(c, all, schema, value);
    if (strcmp(keyword, "not") == 0 && !is_string_cut(schema))
        return conjoin_negation(c, all, value, schema, keyword);
    if (strcmp(keyword, "if") == 0)
        return conjoin_if(c, all, schema);
    if (strcmp(keyword, "dependentRequired") == 0 ||
        (strcmp(keyword, "dependentSchemas") == 0 &&
         !json_object_get(schema, "dependentRequired")))
        return conjoin_dependents(c, all, schema);
    return true;
}

/* Every option has to keep to `schema` as well. */
static bool
conjoin(struct ns_compile *c, struct ns_options *all, const json_t *schema)
{
    json_t *object = (json_t *)schema; /* for its iterators */
    bool fine = true, known_to_all = true;

    if (!ns_program_step(c->p)) {
        c->status = ns_program_check(c->p, c->err);
        return false;
    }
    if (json_is_true(schema) || all->n == 0)
        return true;
    if (json_is_false(schema)) {
        all->n = 0;
        return true;
    }
    if (!json_is_object(schema))
        return ns_compile_refuse(c, "bad_param", c->doc.root, "$ref",
                                 "what it names is no schema");
    for (unsigned i = 0; i < c->n_open; i++)
        if (c->open[i] == schema)
            return ns_compile_refuse(c, "unsupported", schema, "$ref",
                                     "it refers to itself with nothing in "
                                     "between");
    if (c->n_open == NS_SCHEMA_IN_PLACE)
        return ns_compile_refuse(c, "grammar_limit", schema, "allOf",
                                 "more than 64 schemas in place of each "
                                 "other");
    for (uint32_t i = 0; i < all->n; i++)
        known_to_all &= has(&all->option[i].of, schema);
    if (known_to_all)
        return true;
    if (!ns_compile_keywords(c, schema))
        return false;
    for (uint32_t i = 0; i < all->n; i++)
        if (!has(&all->option[i].of, schema) &&
            !append_schema(c, &all->option[i].of, schema))
            return false;
    c->open[c->n_open++] = schema;
    for (void *i = json_object_iter(object); i && fine;
         i = json_object_iter_next(object, i))
        fine = conjoin_keyword(c, all, schema, json_object_iter_key(i),
                               json_object_iter_value(i));
    c->n_open--;
    return fine;
}

bool
ns_compile_options(struct ns_compile *c, const struct ns_goal *goal,
                   struct ns_options *out)
{
    struct ns_options all = { 0 };
    struct ns_option none = { 0 };
    const json_t *open[NS_SCHEMA_IN_PLACE];
    unsigned n_open = c->n_open;
    bool fine;

    /* Whether alternatives are disjoint is asked in the middle of another
     * goal, and may ask again. */
    if (c->n_nested == NS_SCHEMA_NESTED)
        return ns_compile_refuse(c, "grammar_limit",
                                 goal->n ? goal->schema[0] : c->doc.root,
                                 "oneOf",
                                 "alternatives inside alternatives, more "
                                 "than 8 deep");
    memcpy(open, c->open, sizeof(open));
    c->n_open = 0;
    c->n_nested++;
    fine = add_option(c, &all, &none);
    for (uint32_t i = 0; i < goal->n && fine; i++)
        fine = conjoin(c, &all, goal->schema[i]);
    c->n_nested--;
    memcpy(c->open, open, sizeof(open));
    c->n_open = n_open;
    *out = all;
    return fine;
}
