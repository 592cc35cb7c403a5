#include <stdlib.h>
#include <string.h>

#include "engine/grammar_schema.h"
#include "engine/schema_private.h"

/* --- values that are listed */

/* The first enum or const in a schema or in what it joins; *where: the schema
 * that has it. */
static bool
find_list(struct ns_compile *c, const json_t *schema, unsigned depth,
          json_t **out, const json_t **where)
{
    const json_t *all = json_object_get(schema, "allOf");
    const json_t *ref = json_object_get(schema, "$ref");
    json_t *list = json_object_get(schema, "enum");
    json_t *value = list ? NULL : json_object_get(schema, "const");
    struct ns_error err;

    if (*out || depth == 0)
        return true;
    if (value || list) {
        *where = schema;
        *out = value ? json_pack("[O]", value) : json_incref(list);
        return *out || ns_compile_no_memory(c);
    }
    /* A reference that leads nowhere is refused where it is followed. */
    if (ref && ns_schema_resolve(c->root, ref, &ref, &err) == NS_OK &&
        !find_list(c, ref, depth - 1, out, where))
        return false;
    for (size_t i = 0; i < json_array_size(all); i++)
        if (!find_list(c, json_array_get(all, i), depth - 1, out, where))
            return false;
    return true;
}

static bool
holds_nul(const json_t *value)
{
    json_t *object = (json_t *)value; /* for its iterators */
    bool found = json_is_string(value) &&
                 strlen(json_string_value(value)) != json_string_length(value);

    for (size_t i = 0; i < json_array_size(value) && !found; i++)
        found = holds_nul(json_array_get(value, i));
    for (void *i = json_object_iter(object); i && !found;
         i = json_object_iter_next(object, i))
        found = holds_nul(json_object_iter_value(i));
    return found;
}

/* Whether all schemas of a goal let the value through; where they do not is
 * no failure. The list that the value is from is not asked again. */
static bool
is_let_through(struct ns_compile *c, const struct ns_goal *goal,
               const json_t *value, const json_t *listed, json_t *unlisted,
               bool *out)
{
    enum ns_status status = NS_OK;

    for (uint32_t k = 0; k < goal->n && status == NS_OK; k++)
        status = ns_schema_check_part(
            c->root, goal->schema[k] == listed ? unlisted : goal->schema[k],
            value, &c->patterns, c->err);
    *out = status == NS_OK;
    if (status != NS_REJECT || strcmp(c->err->code, "schema") != 0)
        c->status = status;
    if (*out && holds_nul(value))
        return ns_compile_refuse(c, "unsupported", goal->schema[0], "enum",
                                 "a text with U+0000 in it");
    return c->status == NS_OK;
}

/* What is left of a list. */
static bool
filter(struct ns_compile *c, const struct ns_goal *goal, const json_t *list,
       const json_t *listed, json_t **out)
{
    json_t *unlisted = json_copy((json_t *)listed), *left = json_array();
    bool fine = (unlisted && left) || ns_compile_no_memory(c), direct = false;

    for (uint32_t k = 0; k < goal->n; k++)
        direct |= goal->schema[k] == listed;
    if (fine && json_object_del(unlisted, "enum") != 0)
        json_object_del(unlisted, "const");
    for (size_t i = 0; i < json_array_size(list) && fine; i++) {
        json_t *value = json_array_get(list, i);
        bool is_left;

        if (!ns_program_work(c->p, direct ? 1 : json_array_size(list))) {
            c->status = ns_program_check(c->p, c->err);
            fine = false;
            break;
        }
        fine = is_let_through(c, goal, value, listed, unlisted, &is_left);
        if (fine && is_left && json_array_append(left, value) != 0)
            fine = ns_compile_no_memory(c);
    }
    json_decref(unlisted);
    if (fine)
        *out = left;
    else
        json_decref(left);
    return fine;
}

bool
ns_goal_values(struct ns_compile *c, const struct ns_goal *goal, json_t **out)
{
    const json_t *where = NULL;
    json_t *list = NULL;
    bool fine = true;

    *out = NULL;
    for (uint32_t i = 0; i < goal->n && fine; i++)
        fine = find_list(c, goal->schema[i], NS_SCHEMA_IN_PLACE, &list, &where);
    if (!fine || !list)
        return fine;
    fine = json_is_array(list)
               ? filter(c, goal, list, where, out)
               : ns_compile_refuse(c, "bad_param", where, "enum",
                                   "it has a value of another kind");
    json_decref(list);
    return fine;
}

/* --- kinds and numbers */

static unsigned
kinds_of(const char *type)
{
    static const struct {
        const char *name;
        unsigned kinds;
    } types[] = {
        { "null", NS_KIND_NULL },     { "boolean", NS_KIND_BOOLEAN },
        { "integer", NS_KIND_WHOLE }, { "number", NS_KIND_NUMBER },
        { "string", NS_KIND_STRING }, { "array", NS_KIND_ARRAY },
        { "object", NS_KIND_OBJECT },
    };

    for (size_t i = 0; type && i < sizeof(types) / sizeof(*types); i++)
        if (strcmp(types[i].name, type) == 0)
            return types[i].kinds;
    return 0;
}

bool
ns_option_kinds(struct ns_compile *c, const struct ns_option *option,
                unsigned *out)
{
    *out = NS_KIND_ALL;
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *schema = option->of.schema[i];
        const json_t *type = json_object_get(schema, "type");
        bool list = json_is_array(type);
        unsigned all = 0;

        if (!type)
            continue;
        for (size_t k = 0; k < (list ? json_array_size(type) : 1); k++) {
            unsigned kinds = kinds_of(
                json_string_value(list ? json_array_get(type, k) : type));

            if (kinds == 0)
                return ns_compile_refuse(c, "bad_param", schema, "type",
                                         "there is no such type");
            all |= kinds;
        }
        *out &= all;
    }
    return true;
}

/* The nearer of two bounds from one side; of equal ones the open one. */
static void
take_bound(struct ns_decimal *bound, const struct ns_decimal **in_use,
           bool *open, const json_t *value, bool is_open, int side)
{
    struct ns_decimal other;
    int order;

    ns_decimal_of(value, &other);
    order = *in_use ? ns_decimal_compare(&other, bound) * side : 1;
    if (order == 0)
        *open |= is_open;
    if (order <= 0)
        return;
    *bound = other;
    *in_use = bound;
    *open = is_open;
}

static uint64_t
common_multiple(uint64_t a, uint64_t b)
{
    uint64_t x = a, y = b;

    while (y != 0) {
        uint64_t rest = x % y;

        x = y;
        y = rest;
    }
    return a / x * b;
}

/* step * 10^-step_digits, as one that both this and the last divide. */
static bool
take_step(struct ns_compile *c, struct ns_number_limits *limits,
          const json_t *schema, const json_t *value)
{
    struct ns_decimal unit;
    uint64_t step = 0, last = limits->step;
    uint32_t digits, size;

    if (json_number_value(value) <= 0)
        return ns_compile_refuse(c, "bad_param", schema, "multipleOf",
                                 "it is not above 0");
    ns_decimal_of(value, &unit);
    digits = unit.n_frac;
    if (unit.n_int + digits <= NS_DECIMAL_DIGITS + 1) {
        for (size = 0; size < unit.n_int; size++)
            step = step * 10 + (uint64_t)(unit.whole[size] - '0');
        for (size = 0; size < digits; size++)
            step = step * 10 + (uint64_t)(unit.frac[size] - '0');
    }
    if (last) { /* to one number of digits: at most 15 zeros behind 1000 */
        for (; digits < limits->step_digits && step; digits++)
            step *= step <= NS_NUMBER_STEP ? 10 : 0;
        for (; limits->step_digits < digits; limits->step_digits++)
            last *= last <= NS_NUMBER_STEP ? 10 : 0;
        step = step && last ? common_multiple(step, last) : 0;
    }
    if (step == 0 || step > NS_NUMBER_STEP)
        return ns_compile_refuse(c, "unsupported", schema, "multipleOf",
                                 "its digits, without the point, are more "
                                 "than 1000");
    limits->step = (uint32_t)step;
    limits->step_digits = digits;
    return true;
}

bool
ns_option_numbers(struct ns_compile *c, const struct ns_option *option,
                  unsigned kinds, struct ns_option_numbers *out)
{
    struct ns_number_limits *limits = &out->limits;

    memset(limits, 0, sizeof(*limits));
    limits->whole = !(kinds & NS_KIND_FRACTION);
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *schema = option->of.schema[i], *value;

        for (int open = 0; open < 2; open++) {
            value =
                json_object_get(schema, open ? "exclusiveMinimum" : "minimum");
            if (value)
                take_bound(&out->low, &limits->low, &limits->low_open, value,
                           open, 1);
            value =
                json_object_get(schema, open ? "exclusiveMaximum" : "maximum");
            if (value)
                take_bound(&out->high, &limits->high, &limits->high_open, value,
                           open, -1);
        }
        value = json_object_get(schema, "multipleOf");
        if (value && !take_step(c, limits, schema, value))
            return false;
    }
    if (limits->whole && limits->step == 1 && limits->step_digits == 0)
        limits->step = 0;
    return true;
}

/* --- strings */

void
ns_option_sizes(const struct ns_option *option, const char *least,
                const char *most, uint32_t *min, uint32_t *max)
{
    *min = 0;
    *max = UINT32_MAX;
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *low = json_object_get(option->of.schema[i], least);
        const json_t *high = json_object_get(option->of.schema[i], most);
        uint32_t count;

        if (low && ns_json_count(low, &count) && count > *min)
            *min = count;
        if (high && ns_json_count(high, &count) && count < *max)
            *max = count;
    }
}

static bool
in_pattern(struct ns_compile *c, const json_t *schema, const char *keyword,
           enum ns_status status)
{
    char what[sizeof(c->err->text)];

    if (status == NS_OK)
        return true;
    if (status == NS_FATAL) {
        c->status = status;
        return false;
    }
    memcpy(what, c->err->text, sizeof(what));
    return ns_compile_refuse(c, c->err->code, schema, keyword, what);
}

/* Cuts *all down by another language; takes that one. */
static bool
cut(struct ns_compile *c, struct ns_language **all, enum ns_language_op op,
    struct ns_language *other, const json_t *schema, const char *keyword)
{
    struct ns_language *both = NULL;
    enum ns_status status;

    if (!*all) {
        *all = other;
        return true;
    }
    status = ns_language_combine(*all, op, other, &both, c->err);
    ns_language_destroy(other);
    if (status != NS_OK)
        return in_pattern(c, schema, keyword, status);
    ns_language_destroy(*all);
    *all = both;
    return true;
}

static bool
texts_of(struct ns_compile *c, const json_t *list, struct ns_language **out)
{
    size_t n = 0;
    const char **text =
        ns_compile_array(c, json_array_size(list) + 1, sizeof(*text));

    if (!text)
        return false;
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_is_string(json_array_get(list, i)))
            text[n++] = json_string_value(json_array_get(list, i));
    return in_pattern(c, c->root, "enum",
                      ns_language_texts(text, n, out, c->err));
}

/* By `pattern`, `format` or `enum` of `schema`, which stands in `around`. */
static bool
cut_by(struct ns_compile *c, struct ns_language **all, enum ns_language_op op,
       const json_t *schema, const json_t *around)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const json_t *format = json_object_get(schema, "format");
    const json_t *list = json_object_get(schema, "enum");
    struct ns_language *other = NULL;
    const char *text;
    uint32_t most;

    if (pattern) {
        if (!in_pattern(c, around, "pattern",
                        ns_language_pattern(json_string_value(pattern),
                                            json_string_length(pattern), &other,
                                            c->err)) ||
            !cut(c, all, op, other, around, "pattern"))
            return false;
    }
    if (format) {
        struct ns_language *length;

        text = ns_schema_format(json_string_value(format), &most);
        if (!text)
            return ns_compile_refuse(c, "unsupported", around, "format",
                                     "it is not known here");
        if (!in_pattern(
                c, around, "format",
                ns_language_pattern(text, strlen(text), &other, c->err)))
            return false;
        if (most != UINT32_MAX) {
            if (!in_pattern(c, around, "format",
                            ns_language_length(0, most, &length, c->err)) ||
                !cut(c, &other, NS_LANGUAGE_BOTH, length, around, "format")) {
                ns_language_destroy(other);
                return false;
            }
        }
        if (!cut(c, all, op, other, around, "format"))
            return false;
    }
    /* Only what is turned around lists texts here: an enum of the schema
     * itself would have been taken value by value. */
    if (list && op == NS_LANGUAGE_FIRST_ONLY)
        return texts_of(c, list, &other) &&
               cut(c, all, op, other, around, "not");
    return true;
}

bool
ns_option_strings(struct ns_compile *c, const struct ns_option *option,
                  struct ns_language **out)
{
    struct ns_language *all = NULL;
    uint32_t min, max;
    bool fine = true;

    ns_option_sizes(option, "minLength", "maxLength", &min, &max);
    for (uint32_t i = 0; i < option->of.n && fine; i++)
        fine = cut_by(c, &all, NS_LANGUAGE_BOTH, option->of.schema[i],
                      option->of.schema[i]);
    if (fine && (!all || min > 0 || max != UINT32_MAX)) {
        struct ns_language *length = NULL;

        fine = in_pattern(c, option->of.n ? option->of.schema[0] : c->root,
                          "maxLength",
                          ns_language_length(min, max, &length, c->err)) &&
               cut(c, &all, NS_LANGUAGE_BOTH, length,
                   option->of.n ? option->of.schema[0] : c->root, "maxLength");
    }
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        const json_t *not = json_object_get(option->of.schema[i], "not");

        /* Others were turned into options. */
        if (json_object_size(not ) == 1)
            fine = cut_by(c, &all, NS_LANGUAGE_FIRST_ONLY, not,
                          option->of.schema[i]);
    }
    if (fine)
        *out = all;
    else
        ns_language_destroy(all);
    return fine;
}

bool
ns_goal_strings(struct ns_compile *c, const struct ns_goal *goal,
                struct ns_language **out)
{
    struct ns_language *all = NULL;
    struct ns_options options;
    bool fine = ns_compile_options(c, goal, &options);

    if (fine) /* none, so far */
        fine = in_pattern(c, c->root, "propertyNames",
                          ns_language_texts(NULL, 0, &all, c->err));
    for (uint32_t i = 0; i < options.n && fine; i++) {
        const struct ns_option *option = &options.option[i];
        struct ns_language *one = NULL;
        json_t *values = NULL;
        unsigned kinds = 0;

        fine = ns_goal_values(c, &option->of, &values) &&
               (values || ns_option_kinds(c, option, &kinds));
        if (fine && !values && option->unsure)
            fine = ns_compile_refuse(c, "unsupported", option->unsure,
                                     option->unsure_keyword,
                                     "it cannot be enforced exactly");
        if (fine && values)
            fine = texts_of(c, values, &one);
        else if (fine && (kinds & NS_KIND_STRING))
            fine = ns_option_strings(c, option, &one);
        if (fine && one)
            fine =
                cut(c, &all, NS_LANGUAGE_EITHER, one, c->root, "propertyNames");
        json_decref(values);
    }
    if (fine)
        *out = all;
    else
        ns_language_destroy(all);
    return fine;
}

/* --- arrays */

uint32_t
ns_option_prefix(const struct ns_option *option)
{
    size_t most = 0;

    for (uint32_t i = 0; i < option->of.n; i++) {
        size_t n = json_array_size(
            json_object_get(option->of.schema[i], "prefixItems"));

        if (n > most)
            most = n;
    }
    return (uint32_t)most;
}

bool
ns_option_item(struct ns_compile *c, const struct ns_option *option,
               uint32_t index, struct ns_goal *out)
{
    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *schema = option->of.schema[i];
        const json_t *prefix = json_object_get(schema, "prefixItems");
        const json_t *item = json_object_get(schema, "items");

        if (index < json_array_size(prefix))
            item = json_array_get(prefix, index);
        if (item && !ns_goal_add(c, out, item))
            return false;
    }
    return true;
}

/* --- objects */

/* Whether the pattern of a patternProperties finds a name. */
static bool
finds(struct ns_compile *c, const json_t *schema, const char *pattern,
      const char *name, bool *out)
{
    const struct ns_language *language;

    if (!in_pattern(c, schema, "patternProperties",
                    ns_languages_get(&c->patterns, pattern, strlen(pattern),
                                     &language, c->err)))
        return false;
    *out = ns_language_has(language, name, strlen(name));
    return true;
}

/* What one schema asks of the value under a name. */
static bool
add_member(struct ns_compile *c, struct ns_goal *goal, const json_t *schema,
           const char *name)
{
    json_t *patterns = json_object_get(schema, "patternProperties");
    const json_t *own =
        json_object_get(json_object_get(schema, "properties"), name);
    const json_t *other = json_object_get(schema, "additionalProperties");
    bool spoken_of = own != NULL;

    if (own && !ns_goal_add(c, goal, own))
        return false;
    for (void *i = json_object_iter(patterns); i;
         i = json_object_iter_next(patterns, i)) {
        bool found;

        if (!finds(c, schema, json_object_iter_key(i), name, &found))
            return false;
        spoken_of |= found;
        if (found && !ns_goal_add(c, goal, json_object_iter_value(i)))
            return false;
    }
    return spoken_of || !other || ns_goal_add(c, goal, other);
}

static bool
is_a_name(struct ns_compile *c, const json_t *schema, const char *name,
          bool *allowed)
{
    const json_t *names = json_object_get(schema, "propertyNames");
    json_t *value;

    if (!names || !*allowed)
        return true;
    value = json_string(name);
    if (!value)
        return ns_compile_no_memory(c);
    c->status =
        ns_schema_check_part(c->root, names, value, &c->patterns, c->err);
    json_decref(value);
    if (c->status == NS_REJECT && strcmp(c->err->code, "schema") == 0) {
        c->status = NS_OK;
        *allowed = false;
    }
    return c->status == NS_OK;
}

static struct ns_name *
find_name(struct ns_compile *c, struct ns_table *known, struct ns_name *all,
          uint32_t *n, const char *name)
{
    uint32_t hash = ns_table_hash(name, strlen(name)), number;
    size_t i;

    for (i = ns_table_first(known, hash);
         (number = ns_table_at(known, &i, hash)) != 0;)
        if (strcmp(all[number - 1].name, name) == 0)
            return &all[number - 1];
    if (!ns_table_reserve(known)) {
        ns_compile_no_memory(c);
        return NULL;
    }
    all[*n] = (struct ns_name){ .name = name, .allowed = true };
    ns_table_put(known, hash, ++*n);
    return &all[*n - 1];
}

bool
ns_option_names(struct ns_compile *c, const struct ns_option *option,
                struct ns_name **out, uint32_t *n)
{
    struct ns_table known = { 0 };
    struct ns_name *all, *one;
    size_t most = 0;
    bool fine = true;

    *n = 0;
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *schema = option->of.schema[i];

        most += json_object_size(json_object_get(schema, "properties")) +
                json_array_size(json_object_get(schema, "required"));
    }
    all = *out = ns_compile_array(c, most + 1, sizeof(*all));
    if (!all)
        return false;
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        json_t *named = json_object_get(option->of.schema[i], "properties");

        for (void *k = json_object_iter(named); k && fine;
             k = json_object_iter_next(named, k))
            fine =
                find_name(c, &known, all, n, json_object_iter_key(k)) != NULL;
    }
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        const json_t *names = json_object_get(option->of.schema[i], "required");

        for (size_t k = 0; k < json_array_size(names) && fine; k++) {
            one = find_name(c, &known, all, n,
                            json_string_value(json_array_get(names, k)));
            fine = one != NULL;
            if (one)
                one->required = true;
        }
    }
    ns_table_fini(&known);
    for (uint32_t k = 0; k < *n && fine; k++)
        for (uint32_t i = 0; i < option->of.n && fine; i++)
            fine = add_member(c, &all[k].goal, option->of.schema[i],
                              all[k].name) &&
                   is_a_name(c, option->of.schema[i], all[k].name,
                             &all[k].allowed);
    for (uint32_t k = 0; k < *n && fine; k++)
        all[k].allowed &= !all[k].goal.nothing;
    return fine;
}

/* A pattern of a patternProperties, and the schema that has it. */
struct pattern {
    uint32_t schema;
    const char *text;
    const json_t *value;
};

/* Names by which of the patterns they match, as bits. */
struct cell {
    struct ns_language *names;
    uint32_t matched;
};

/* Halves every cell by one pattern; what is empty goes. */
static bool
split_cells(struct ns_compile *c, struct cell *cell, uint32_t *n,
            uint32_t number, const struct ns_language *pattern,
            const json_t *schema)
{
    static const enum ns_language_op half[] = { NS_LANGUAGE_BOTH,
                                                NS_LANGUAGE_FIRST_ONLY };
    struct cell parts[2 * NS_OTHERS] = { 0 };
    uint32_t n_parts = 0;
    bool fine = true;

    for (uint32_t i = 0; i < *n; i++)
        for (uint32_t k = 0; k < 2 && fine; k++) {
            struct cell *part = &parts[n_parts];

            fine =
                in_pattern(c, schema, "patternProperties",
                           ns_language_combine(cell[i].names, half[k], pattern,
                                               &part->names, c->err));
            part->matched = cell[i].matched | (k == 0) << number;
            if (fine && ns_language_is_empty(part->names))
                ns_language_destroy(part->names);
            else if (fine)
                n_parts++;
        }
    for (uint32_t i = 0; i < *n; i++)
        ns_language_destroy(cell[i].names);
    *n = n_parts < NS_OTHERS ? n_parts : NS_OTHERS;
    memcpy(cell, parts, *n * sizeof(*cell));
    for (uint32_t i = *n; i < n_parts; i++)
        ns_language_destroy(parts[i].names);
    if (fine && n_parts > NS_OTHERS)
        fine =
            ns_compile_refuse(c, "grammar_limit", schema, "patternProperties",
                              "its patterns meet in more than 64 ways");
    return fine;
}

/* All names but the declared ones, that `propertyNames` lets through. */
static bool
other_names(struct ns_compile *c, const struct ns_option *option,
            const struct ns_name *name, uint32_t n_names,
            struct ns_language **out)
{
    const char **text = ns_compile_array(c, n_names + 1, sizeof(*text));
    struct ns_language *all = NULL, *other = NULL;
    bool fine = text != NULL;

    for (uint32_t i = 0; i < n_names && fine; i++)
        text[i] = name[i].name;
    fine = fine &&
           in_pattern(c, c->root, "properties",
                      ns_language_length(0, UINT32_MAX, &all, c->err)) &&
           (n_names == 0 ||
            (in_pattern(c, option->of.schema[0], "properties",
                        ns_language_texts(text, n_names, &other, c->err)) &&
             cut(c, &all, NS_LANGUAGE_FIRST_ONLY, other, option->of.schema[0],
                 "properties")));
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        const json_t *names =
            json_object_get(option->of.schema[i], "propertyNames");
        struct ns_goal goal = { 0 };

        if (names)
            fine = ns_goal_add(c, &goal, names) &&
                   (goal.nothing
                        ? in_pattern(c, c->root, "propertyNames",
                                     ns_language_texts(NULL, 0, &other, c->err))
                        : ns_goal_strings(c, &goal, &other)) &&
                   cut(c, &all, NS_LANGUAGE_BOTH, other, option->of.schema[i],
                       "propertyNames");
    }
    if (fine)
        *out = all;
    else
        ns_language_destroy(all);
    return fine;
}

/* What all schemas ask of a value whose name matches those patterns. */
static bool
cell_goal(struct ns_compile *c, const struct ns_option *option,
          const struct pattern *pattern, uint32_t n_patterns, uint32_t matched,
          struct ns_goal *goal)
{
    memset(goal, 0, sizeof(*goal));
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *other =
            json_object_get(option->of.schema[i], "additionalProperties");
        bool spoken_of = false;

        for (uint32_t k = 0; k < n_patterns; k++) {
            if (pattern[k].schema != i || !(matched >> k & 1))
                continue;
            spoken_of = true;
            if (!ns_goal_add(c, goal, pattern[k].value))
                return false;
        }
        if (!spoken_of && other && !ns_goal_add(c, goal, other))
            return false;
    }
    return true;
}

bool
ns_option_others(struct ns_compile *c, const struct ns_option *option,
                 const struct ns_name *name, uint32_t n_names,
                 struct ns_others *out, uint32_t *n)
{
    struct pattern pattern[NS_SCHEMA_PATTERNS] = { 0 };
    struct cell cell[NS_OTHERS] = { 0 };
    uint32_t n_patterns = 0, n_cells = 0;
    struct ns_goal plain;
    bool fine = true;

    *n = 0;
    for (uint32_t i = 0; i < option->of.n; i++) {
        json_t *patterns =
            json_object_get(option->of.schema[i], "patternProperties");

        for (void *k = json_object_iter(patterns); k;
             k = json_object_iter_next(patterns, k)) {
            if (n_patterns == NS_SCHEMA_PATTERNS)
                return ns_compile_refuse(
                    c, "grammar_limit", option->of.schema[i],
                    "patternProperties", "more than 12 patterns");
            pattern[n_patterns++] =
                (struct pattern){ i, json_object_iter_key(k),
                                  json_object_iter_value(k) };
        }
    }
    if (!cell_goal(c, option, pattern, 0, 0, &plain))
        return false;
    if (n_patterns == 0 && plain.nothing)
        return true; /* none but the declared: the usual case */
    fine = other_names(c, option, name, n_names, &cell[0].names);
    n_cells = fine;
    for (uint32_t k = 0; k < n_patterns && fine; k++) {
        const struct ns_language *language;
        const json_t *schema = option->of.schema[pattern[k].schema];

        fine = in_pattern(c, schema, "patternProperties",
                          ns_languages_get(&c->patterns, pattern[k].text,
                                           strlen(pattern[k].text), &language,
                                           c->err)) &&
               split_cells(c, cell, &n_cells, k, language, schema);
    }
    for (uint32_t i = 0; i < n_cells; i++) {
        struct ns_others *one = &out[*n];

        fine = fine && cell_goal(c, option, pattern, n_patterns,
                                 cell[i].matched, &one->goal);
        if (fine && !one->goal.nothing &&
            !ns_language_is_empty(cell[i].names)) {
            one->names = cell[i].names;
            ++*n;
        } else {
            ns_language_destroy(cell[i].names);
        }
    }
    if (!fine)
        while (*n > 0)
            ns_language_destroy(out[--*n].names);
    return fine;
}

/* --- is there anything at all? */

static bool
numbers_are_none(struct ns_compile *c, const struct ns_option *option,
                 unsigned kinds)
{
    struct ns_option_numbers numbers;
    int order;

    if (!ns_option_numbers(c, option, kinds, &numbers) || !numbers.limits.low ||
        !numbers.limits.high)
        return false;
    order = ns_decimal_compare(&numbers.low, &numbers.high);
    return order > 0 || (order == 0 &&
                         (numbers.limits.low_open || numbers.limits.high_open));
}

static bool
strings_are_none(struct ns_compile *c, const struct ns_option *option)
{
    struct ns_language *language = NULL;
    bool none;

    if (!ns_option_strings(c, option, &language))
        return false;
    none = ns_language_is_empty(language);
    ns_language_destroy(language);
    return none;
}

static bool
arrays_are_none(struct ns_compile *c, const struct ns_option *option,
                unsigned depth)
{
    uint32_t min, max, prefix = ns_option_prefix(option);
    struct ns_goal goal;

    ns_option_sizes(option, "minItems", "maxItems", &min, &max);
    if (min > max)
        return true;
    for (uint32_t i = 0; i < min && i <= prefix && depth > 0; i++)
        if (ns_option_item(c, option, i, &goal) &&
            ns_goal_is_nothing(c, &goal, depth - 1))
            return true;
    return false;
}

static bool
objects_are_none(struct ns_compile *c, const struct ns_option *option,
                 unsigned depth)
{
    uint32_t min, max, n;
    struct ns_name *name;

    ns_option_sizes(option, "minProperties", "maxProperties", &min, &max);
    if (min > max)
        return true;
    if (!ns_option_names(c, option, &name, &n))
        return false;
    for (uint32_t i = 0; i < n; i++)
        if (name[i].required &&
            (!name[i].allowed ||
             (depth > 0 && ns_goal_is_nothing(c, &name[i].goal, depth - 1))))
            return true;
    return false;
}

static bool
option_is_nothing(struct ns_compile *c, const struct ns_option *option,
                  unsigned depth)
{
    json_t *values = NULL;
    unsigned kinds;
    bool none;

    if (!ns_goal_values(c, &option->of, &values))
        return false;
    if (values) {
        none = json_array_size(values) == 0;
        json_decref(values);
        return none;
    }
    if (!ns_option_kinds(c, option, &kinds) ||
        (kinds & (NS_KIND_NULL | NS_KIND_BOOLEAN)))
        return false;
    return (!(kinds & NS_KIND_NUMBER) || numbers_are_none(c, option, kinds)) &&
           (!(kinds & NS_KIND_STRING) || strings_are_none(c, option)) &&
           (!(kinds & NS_KIND_ARRAY) || arrays_are_none(c, option, depth)) &&
           (!(kinds & NS_KIND_OBJECT) || objects_are_none(c, option, depth));
}

bool
ns_goal_is_nothing(struct ns_compile *c, const struct ns_goal *goal,
                   unsigned depth)
{
    struct ns_options options;
    struct ns_error *err = c->err, own;
    bool nothing = true;

    if (goal->nothing)
        return true;
    /* What cannot be told is no failure: it is not known to be nothing. */
    c->err = &own;
    if (ns_compile_options(c, goal, &options))
        for (uint32_t i = 0; i < options.n && nothing; i++)
            nothing = option_is_nothing(c, &options.option[i], depth) &&
                      c->status == NS_OK;
    c->err = err;
    if (c->status == NS_REJECT) {
        c->status = NS_OK;
        return false;
    }
    if (c->status != NS_OK)
        *err = own;
    return nothing;
}
