#include <string.h>

#include "engine/grammar_schema.h"

/* Whether the pattern of a patternProperties finds a name. */
static bool
finds(struct ns_compile *c, const json_t *schema, const char *pattern,
      const char *name, bool *out)
{
    const struct ns_language *language;

    if (!ns_compile_language(c, schema, "patternProperties",
                             ns_language_pattern(&c->doc.languages, pattern,
                                                 strlen(pattern), &language,
                                                 c->err)))
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
    c->status = ns_schema_check_part(&c->doc, names, value, c->err);
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
    if (fine && !ns_program_work(c->p, *n)) {
        c->status = ns_program_check(c->p, c->err);
        fine = false;
    }
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

            fine = ns_compile_language(
                c, schema, "patternProperties",
                ns_language_combine(&c->doc.languages, cell[i].names, half[k],
                                    pattern, &part->names, c->err));
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
    const json_t *first = option->of.n ? option->of.schema[0] : c->doc.root;
    struct ns_language *all = NULL, *other = NULL;
    bool fine;

    if (!text)
        return false;
    for (uint32_t i = 0; i < n_names; i++)
        text[i] = name[i].name;
    fine = ns_compile_language(c, first, "properties",
                               ns_language_length(&c->doc.languages, 0,
                                                  UINT32_MAX, &all, c->err)) &&
           ns_compile_language(c, first, "properties",
                               ns_language_texts(&c->doc.languages, text,
                                                 n_names, &other, c->err)) &&
           ns_compile_cut(c, &all, NS_LANGUAGE_FIRST_ONLY, other, first,
                          "properties");
    for (uint32_t i = 0; i < option->of.n && fine; i++) {
        const json_t *names =
            json_object_get(option->of.schema[i], "propertyNames");
        struct ns_goal goal = { 0 };

        if (!names)
            continue;
        ns_language_destroy(other);
        other = NULL;
        fine = ns_goal_add(c, &goal, names) &&
               ns_goal_strings(c, &goal, &other) &&
               ns_compile_cut(c, &all, NS_LANGUAGE_BOTH, other,
                              option->of.schema[i], "propertyNames");
    }
    ns_language_destroy(other);
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

        fine = ns_compile_language(c, schema, "patternProperties",
                                   ns_language_pattern(&c->doc.languages,
                                                       pattern[k].text,
                                                       strlen(pattern[k].text),
                                                       &language, c->err)) &&
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
