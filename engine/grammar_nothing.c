#include "engine/grammar_schema.h"

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
