#include <stdlib.h>
#include <string.h>

#include "engine/grammar_schema.h"

/* --- values that are listed */

/* How deep a list is looked for in what schemas join. One that lies deeper is
 * found as well, when they are taken apart. */
enum { LIST_DEPTH = 4 };

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
    if (!ns_program_step(c->p)) {
        c->status = ns_program_check(c->p, c->err);
        return false;
    }
    if (value || list) {
        *where = schema;
        *out = value ? json_pack("[O]", value) : json_incref(list);
        return *out || ns_compile_no_memory(c);
    }
    /* A reference that leads nowhere is refused where it is followed. */
    if (ref && ns_schema_resolve(&c->doc, ref, &ref, &err) == NS_OK &&
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
            &c->doc, goal->schema[k] == listed ? unlisted : goal->schema[k],
            value, c->err);
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
        fine = find_list(c, goal->schema[i], LIST_DEPTH, &list, &where);
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
        unsigned all = ns_schema_is_nullable(schema) ? NS_KIND_NULL : 0;

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

bool
ns_compile_language(struct ns_compile *c, const json_t *schema,
                    const char *keyword, enum ns_status status)
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

bool
ns_compile_cut(struct ns_compile *c, struct ns_language **all,
               enum ns_language_op op, const struct ns_language *other,
               const json_t *schema, const char *keyword)
{
    struct ns_language *both = NULL;

    if (!ns_compile_language(c, schema, keyword,
                             ns_language_combine(&c->doc.languages, *all, op,
                                                 other, &both, c->err)))
        return false;
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
    return ns_compile_language(
        c, c->doc.root, "enum",
        ns_language_texts(&c->doc.languages, text, n, out, c->err));
}

/* By `pattern`, `format` or `enum` of `schema`, which stands in `around`. */
static bool
cut_by(struct ns_compile *c, struct ns_language **all, enum ns_language_op op,
       const json_t *schema, const json_t *around)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const json_t *format = json_object_get(schema, "format");
    const json_t *list = json_object_get(schema, "enum");
    const struct ns_language *found;
    struct ns_language *other = NULL;
    const char *text;
    uint32_t most;
    bool fine = true;

    if (pattern)
        fine =
            ns_compile_language(c, around, "pattern",
                                ns_language_pattern(&c->doc.languages,
                                                    json_string_value(pattern),
                                                    json_string_length(pattern),
                                                    &found, c->err)) &&
            ns_compile_cut(c, all, op, found, around, "pattern");
    if (format && fine) {
        text = ns_schema_format(json_string_value(format), &most);
        if (!text)
            return ns_compile_refuse(c, "unsupported", around, "format",
                                     "it is not known here");
        fine = ns_compile_language(c, around, "format",
                                   ns_language_length(&c->doc.languages, 0,
                                                      most, &other, c->err)) &&
               ns_compile_language(c, around, "format",
                                   ns_language_pattern(&c->doc.languages, text,
                                                       strlen(text), &found,
                                                       c->err)) &&
               ns_compile_cut(c, &other, NS_LANGUAGE_BOTH, found, around,
                              "format") &&
               ns_compile_cut(c, all, op, other, around, "format");
    }
    /* Only what is turned around lists texts here: an enum of the schema
     * itself would have been taken value by value. */
    if (list && op == NS_LANGUAGE_FIRST_ONLY && fine) {
        ns_language_destroy(other);
        other = NULL;
        fine = texts_of(c, list, &other) &&
               ns_compile_cut(c, all, op, other, around, "not");
    }
    ns_language_destroy(other);
    return fine;
}

bool
ns_option_strings(struct ns_compile *c, const struct ns_option *option,
                  struct ns_language **out)
{
    const json_t *first = option->of.n ? option->of.schema[0] : c->doc.root;
    struct ns_language *all = NULL;
    uint32_t min, max;
    bool fine;

    ns_option_sizes(option, "minLength", "maxLength", &min, &max);
    fine = ns_compile_language(
        c, first, "maxLength",
        ns_language_length(&c->doc.languages, min, max, &all, c->err));
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        const json_t *schema = option->of.schema[i];
        const json_t *not = json_object_get(schema, "not");

        fine = cut_by(c, &all, NS_LANGUAGE_BOTH, schema, schema) &&
               /* Any other `not` was turned into options. */
               (json_object_size(not ) != 1 ||
                cut_by(c, &all, NS_LANGUAGE_FIRST_ONLY, not, schema));
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
    struct ns_options options = { 0 };
    bool fine = ns_compile_language(
        c, c->doc.root, "propertyNames", /* none, so far */
        ns_language_texts(&c->doc.languages, NULL, 0, &all, c->err));

    if (fine && !goal->nothing)
        fine = ns_compile_options(c, goal, &options);
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
            fine = ns_compile_cut(c, &all, NS_LANGUAGE_EITHER, one, c->doc.root,
                                  "propertyNames");
        ns_language_destroy(one);
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
