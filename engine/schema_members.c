#include <string.h>

#include "engine/schema_check.h"

/* --- arrays */

static enum ns_verdict
check_item(struct ns_check *c, const struct ns_asked *q, const json_t *schema,
           size_t index)
{
    struct ns_place place = { q->place, NULL, index };

    return ns_check_schema(c, schema, json_array_get(q->instance, index),
                           &place);
}

enum ns_verdict
ns_check_prefix_items(struct ns_check *c, const struct ns_asked *q)
{
    enum ns_verdict verdict = NS_VALID;

    if (!json_is_array(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_array(q->instance))
        return NS_VALID;
    for (size_t i = 0; verdict == NS_VALID && i < json_array_size(q->value) &&
                       i < json_array_size(q->instance);
         i++)
        verdict = check_item(c, q, json_array_get(q->value, i), i);
    return verdict;
}

enum ns_verdict
ns_check_items(struct ns_check *c, const struct ns_asked *q)
{
    enum ns_verdict verdict = NS_VALID;

    if (!json_is_array(q->instance))
        return NS_VALID;
    for (size_t i = json_array_size(json_object_get(q->schema, "prefixItems"));
         verdict == NS_VALID && i < json_array_size(q->instance); i++)
        verdict = check_item(c, q, q->value, i);
    return verdict;
}

enum ns_verdict
ns_check_contains(struct ns_check *c, const struct ns_asked *q)
{
    const json_t *min = json_object_get(q->schema, "minContains");
    const json_t *max = json_object_get(q->schema, "maxContains");
    uint32_t least = 1, most = UINT32_MAX, n = 0;

    if ((min && !ns_json_count(min, &least)) ||
        (max && !ns_json_count(max, &most)))
        return ns_check_malformed(c, q);
    if (!json_is_array(q->instance))
        return NS_VALID;
    for (size_t i = 0; i < json_array_size(q->instance); i++)
        switch (check_item(c, q, q->value, i)) {
        case NS_VALID:
            n++;
            break;
        case NS_BROKEN:
            return NS_BROKEN;
        case NS_INVALID:
            break;
        }
    return ns_check_when(c, q, n >= least && n <= most);
}

enum ns_verdict
ns_check_unique(struct ns_check *c, const struct ns_asked *q)
{
    if (!json_is_boolean(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_true(q->value) || !json_is_array(q->instance))
        return NS_VALID;
    for (size_t i = 0; i < json_array_size(q->instance); i++)
        for (size_t k = 0; k < i; k++) {
            if (!ns_check_step(c))
                return NS_BROKEN;
            if (ns_json_same(json_array_get(q->instance, i),
                             json_array_get(q->instance, k)))
                return ns_check_when(c, q, false);
        }
    return NS_VALID;
}

/* --- objects */

static enum ns_verdict
check_member(struct ns_check *c, const struct ns_asked *q, const json_t *schema,
             const char *name)
{
    struct ns_place place = { q->place, name, 0 };

    return ns_check_schema(c, schema, json_object_get(q->instance, name),
                           &place);
}

enum ns_verdict
ns_check_required(struct ns_check *c, const struct ns_asked *q)
{
    if (!json_is_array(q->value))
        return ns_check_malformed(c, q);
    for (size_t i = 0; i < json_array_size(q->value); i++) {
        const json_t *name = json_array_get(q->value, i);
        struct ns_place place = { q->place, json_string_value(name), 0 };

        if (!json_is_string(name))
            return ns_check_malformed(c, q);
        if (json_is_object(q->instance) &&
            !json_object_getn(q->instance, json_string_value(name),
                              json_string_length(name)))
            return ns_check_missing(c, q, &place);
    }
    return NS_VALID;
}

/* Calls `check` for each member of the keyword's own value. */
static enum ns_verdict
for_each(struct ns_check *c, const struct ns_asked *q,
         enum ns_verdict (*check)(struct ns_check *, const struct ns_asked *,
                                  const char *name, const json_t *value))
{
    enum ns_verdict verdict = NS_VALID;
    json_t *object = (json_t *)q->value; /* for its iterators */
    void *iter;

    if (!json_is_object(q->value))
        return ns_check_malformed(c, q);
    if (!json_is_object(q->instance))
        return NS_VALID;
    for (iter = json_object_iter(object); iter && verdict == NS_VALID;
         iter = json_object_iter_next(object, iter))
        verdict = check(c, q, json_object_iter_key(iter),
                        json_object_iter_value(iter));
    return verdict;
}

static enum ns_verdict
one_property(struct ns_check *c, const struct ns_asked *q, const char *name,
             const json_t *value)
{
    return json_object_get(q->instance, name) ? check_member(c, q, value, name)
                                              : NS_VALID;
}

enum ns_verdict
ns_check_properties(struct ns_check *c, const struct ns_asked *q)
{
    return for_each(c, q, one_property);
}

/* Whether a name is one that the pattern finds; negative: broken. */
static int
finds(struct ns_check *c, const struct ns_asked *q, const char *pattern,
      const char *name)
{
    const struct ns_language *language =
        ns_check_pattern(c, q->keyword, pattern, strlen(pattern));

    return language ? ns_language_has(language, name, strlen(name)) : -1;
}

static enum ns_verdict
one_pattern(struct ns_check *c, const struct ns_asked *q, const char *pattern,
            const json_t *value)
{
    enum ns_verdict verdict = NS_VALID;
    json_t *instance = (json_t *)q->instance;

    for (void *iter = json_object_iter(instance); iter && verdict == NS_VALID;
         iter = json_object_iter_next(instance, iter)) {
        const char *name = json_object_iter_key(iter);
        int found = finds(c, q, pattern, name);

        if (found < 0)
            return NS_BROKEN;
        if (found)
            verdict = check_member(c, q, value, name);
    }
    return verdict;
}

enum ns_verdict
ns_check_pattern_properties(struct ns_check *c, const struct ns_asked *q)
{
    return for_each(c, q, one_pattern);
}

enum ns_verdict
ns_check_additional(struct ns_check *c, const struct ns_asked *q)
{
    const json_t *declared = json_object_get(q->schema, "properties");
    json_t *patterns = json_object_get(q->schema, "patternProperties");
    json_t *instance = (json_t *)q->instance;
    enum ns_verdict verdict = NS_VALID;

    if (!json_is_object(q->instance))
        return NS_VALID;
    for (void *iter = json_object_iter(instance); iter && verdict == NS_VALID;
         iter = json_object_iter_next(instance, iter)) {
        const char *name = json_object_iter_key(iter);
        int found = json_object_get(declared, name) != NULL;

        for (void *at = json_object_iter(patterns); at && !found;
             at = json_object_iter_next(patterns, at))
            found = finds(c, q, json_object_iter_key(at), name);
        if (found < 0)
            return NS_BROKEN;
        if (!found)
            verdict = check_member(c, q, q->value, name);
    }
    return verdict;
}

enum ns_verdict
ns_check_names(struct ns_check *c, const struct ns_asked *q)
{
    json_t *instance = (json_t *)q->instance;
    enum ns_verdict verdict = NS_VALID;

    if (!json_is_object(q->instance))
        return NS_VALID;
    for (void *iter = json_object_iter(instance); iter && verdict == NS_VALID;
         iter = json_object_iter_next(instance, iter)) {
        json_t *name = json_string(json_object_iter_key(iter));
        struct ns_place place = { q->place, json_object_iter_key(iter), 0 };

        if (!name) {
            c->status = ns_fail(c->err, NS_FATAL, "out of memory for a name");
            return NS_BROKEN;
        }
        verdict = ns_check_schema(c, q->value, name, &place);
        json_decref(name);
    }
    return verdict;
}

static enum ns_verdict
one_dependent_list(struct ns_check *c, const struct ns_asked *q,
                   const char *name, const json_t *value)
{
    struct ns_asked inner = *q;

    inner.value = value;
    return json_object_get(q->instance, name) ? ns_check_required(c, &inner)
                                              : NS_VALID;
}

enum ns_verdict
ns_check_dependent_required(struct ns_check *c, const struct ns_asked *q)
{
    return for_each(c, q, one_dependent_list);
}

static enum ns_verdict
one_dependent_schema(struct ns_check *c, const struct ns_asked *q,
                     const char *name, const json_t *value)
{
    return json_object_get(q->instance, name)
               ? ns_check_schema(c, value, q->instance, q->place)
               : NS_VALID;
}

enum ns_verdict
ns_check_dependent_schemas(struct ns_check *c, const struct ns_asked *q)
{
    return for_each(c, q, one_dependent_schema);
}
