#include "engine/grammar_schema.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- failures and memory */

/* The JSON pointer of a schema inside `at`; false where it is not there. */
static bool
find_place(const json_t *at, const json_t *schema, char *out, size_t size,
           size_t length)
{
    json_t *object = (json_t *)at; /* for its iterators */
    int n;

    if (at == schema)
        return true;
    for (void *i = json_object_iter(object); i;
         i = json_object_iter_next(object, i)) {
        n = snprintf(out + length, size - length, "/%s",
                     json_object_iter_key(i));
        if ((size_t)n < size - length &&
            find_place(json_object_iter_value(i), schema, out, size,
                       length + (size_t)n))
            return true;
    }
    for (size_t i = 0; i < json_array_size(at); i++) {
        n = snprintf(out + length, size - length, "/%zu", i);
        if ((size_t)n < size - length &&
            find_place(json_array_get(at, i), schema, out, size,
                       length + (size_t)n))
            return true;
    }
    out[length] = '\0';
    return false;
}

bool
ns_compile_refuse(struct ns_compile *c, const char *code, const json_t *schema,
                  const char *keyword, const char *what)
{
    char place[160] = "", shown[48];

    /* Of a schema that was made on the way there is no place. */
    find_place(c->doc.root, schema, place, sizeof(place), 0);
    snprintf(shown, sizeof(shown), "%s", keyword);
    ns_schema_clean(place);
    ns_schema_clean(shown);
    c->status = ns_refuse(c->err, code, shown, "schema#%s: %s: %.160s", place,
                          shown, what);
    return false;
}

bool
ns_compile_no_memory(struct ns_compile *c)
{
    c->status = ns_fail(c->err, NS_FATAL, "out of memory compiling a schema");
    return false;
}

void *
ns_compile_array(struct ns_compile *c, size_t n, size_t size)
{
    void *array = ns_arena_array(c->arena, n, size);

    if (array)
        return array;
    if (ns_arena_used(c->arena) + n * size > NS_SCHEMA_MEMORY)
        ns_compile_refuse(c, "grammar_limit", c->doc.root, "it",
                          "compiling takes more than 64 MiB");
    else
        ns_compile_no_memory(c);
    return NULL;
}

/* --- goals */

/* Nothing but a reference, and notes. */
static const json_t *
only_ref(const json_t *schema)
{
    json_t *object = (json_t *)schema; /* for its iterators */
    const json_t *ref = json_object_get(schema, "$ref");

    for (void *i = json_object_iter(object); i && ref;
         i = json_object_iter_next(object, i))
        if (strcmp(json_object_iter_key(i), "$ref") != 0 &&
            !ns_schema_is_note(json_object_iter_key(i)))
            return NULL;
    return ref;
}

bool
ns_goal_add(struct ns_compile *c, struct ns_goal *goal, const json_t *schema)
{
    const json_t *ref;

    for (int i = 0; (ref = only_ref(schema)) != NULL; i++) {
        if (i == NS_SCHEMA_IN_PLACE)
            return ns_compile_refuse(c, "unsupported", schema, "$ref",
                                     "it refers to itself with nothing in "
                                     "between");
        c->status = ns_schema_resolve(&c->doc, ref, &schema, c->err);
        if (c->status != NS_OK)
            return false;
    }
    if (json_is_true(schema))
        return true;
    if (json_is_false(schema))
        goal->nothing = true;
    for (uint32_t i = 0; i < goal->n; i++)
        if (goal->schema[i] == schema)
            return true;
    if (goal->n == goal->capacity) {
        uint32_t wanted = goal->capacity ? 2 * goal->capacity : 2;
        const json_t **moved = ns_compile_array(c, wanted, sizeof(*moved));

        if (!moved)
            return false;
        if (goal->n > 0)
            memcpy(moved, goal->schema, goal->n * sizeof(*moved));
        goal->schema = moved;
        goal->capacity = wanted;
    }
    goal->schema[goal->n++] = schema;
    return true;
}

/* The rule of a goal: it is written when its turn comes. */
static bool
rule_of(struct ns_compile *c, const struct ns_goal *goal, uint32_t *rule)
{
    size_t bytes = goal->n * sizeof(*goal->schema), i;
    uint32_t hash = ns_table_hash(goal->schema, bytes), number;

    for (i = ns_table_first(&c->goals, hash);
         (number = ns_table_at(&c->goals, &i, hash)) != 0;) {
        const struct ns_goal *other = &c->goal[number - 1];

        if (other->n == goal->n &&
            (bytes == 0 || memcmp(other->schema, goal->schema, bytes) == 0)) {
            *rule = c->rule[number - 1];
            return true;
        }
    }
    if (c->n_goals >= NS_SCHEMA_GOALS)
        return ns_compile_refuse(c, "grammar_limit", c->doc.root, "it",
                                 "more than 16384 kinds of values");
    if (!ns_table_reserve(&c->goals))
        return ns_compile_no_memory(c);
    c->goal[c->n_goals] = *goal;
    c->rule[c->n_goals] = *rule = ns_program_rule(c->p);
    ns_table_put(&c->goals, hash, ++c->n_goals);
    return true;
}

/* --- arrays. N: an item follows; D: one has been written. Both are known for
 * the larger numbers of items first. */

static bool
write_array(struct ns_compile *c, const struct ns_option *option, uint32_t next,
            uint32_t *out)
{
    uint32_t min, max, prefix = ns_option_prefix(option), rule, close, top;
    uint32_t done, item = NS_PROGRAM_FAIL, first = NS_PROGRAM_FAIL;
    struct ns_program *p = c->p;
    struct ns_goal goal;

    ns_option_sizes(option, "minItems", "maxItems", &min, &max);
    if (min > max) {
        *out = NS_PROGRAM_FAIL;
        return true;
    }
    close = ns_json_line(&c->w, ns_program_text(p, "]", 1, next));
    top = max != UINT32_MAX ? max : min > prefix ? min : prefix;
    if (max != UINT32_MAX) {
        done = close;
    } else { /* any number more */
        if (!ns_option_item(c, option, prefix, &goal) ||
            !rule_of(c, &goal, &rule))
            return false;
        done = ns_program_loop(p, close);
        item = ns_program_call(p, rule, done);
        ns_program_close(p, done, ns_json_comma(&c->w, item));
    }
    for (uint32_t i = top; i > 0 && ns_program_step(p); i--) {
        if (i > prefix && i < top) {
            /* Of one kind with the one behind it: its rule is known. */
        } else if (!ns_option_item(c, option, i - 1, &goal) ||
                   !rule_of(c, &goal, &rule)) {
            return false;
        }
        item = ns_program_call(p, rule, done);
        done = ns_program_split(p, i - 1 >= min ? close : NS_PROGRAM_FAIL,
                                ns_json_comma(&c->w, item));
    }
    if (max > 0)
        first = ns_json_line(&c->w, item);
    if (min == 0)
        first = ns_program_split(p, ns_program_text(p, "]", 1, next), first);
    *out = ns_program_text(p, "[", 1, first);
    return true;
}

/* The schema that says that no item comes twice; NULL: none does. */
static const json_t *
unique_in(const struct ns_option *option)
{
    for (uint32_t i = 0; i < option->of.n; i++)
        if (json_is_true(json_object_get(option->of.schema[i], "uniqueItems")))
            return option->of.schema[i];
    return NULL;
}

/* Of values that are listed, each once. */
static bool
find_items(struct ns_compile *c, const struct ns_option *option,
           const json_t *unique, json_t **out)
{
    json_t *values = NULL, *each;
    struct ns_goal goal;
    bool fine = true;

    if (!ns_option_item(c, option, 0, &goal) ||
        !ns_goal_values(c, &goal, &values))
        return false;
    each = json_array();
    for (size_t i = 0; i < json_array_size(values) && each && fine &&
                       json_array_size(each) <= NS_SCHEMA_UNIQUE;
         i++) {
        const json_t *value = json_array_get(values, i);
        bool is_new = true;

        for (size_t k = 0; k < json_array_size(each); k++)
            is_new &= !ns_json_same(value, json_array_get(each, k));
        if (is_new)
            fine = json_array_append(each, (json_t *)value) == 0;
    }
    if (!each || !fine)
        fine = ns_compile_no_memory(c);
    else if (!values || ns_option_prefix(option) > 0 ||
             json_array_size(each) > NS_SCHEMA_UNIQUE)
        fine = ns_compile_refuse(c, "unsupported", unique, "uniqueItems",
                                 "it can be enforced where `enum` lists the "
                                 "items, up to 10 of them");
    json_decref(values);
    if (fine)
        *out = each;
    else
        json_decref(each);
    return fine;
}

/* One place for each set of items that have been written, the larger sets
 * first. */
static bool
write_unique(struct ns_compile *c, const struct ns_option *option,
             const json_t *unique, uint32_t next, uint32_t *out)
{
    uint32_t min, max, n, rule[NS_SCHEMA_UNIQUE], first = NS_PROGRAM_FAIL;
    uint32_t done[1 << NS_SCHEMA_UNIQUE], item = NS_PROGRAM_FAIL, close;
    struct ns_program *p = c->p;
    json_t *values;

    if (!find_items(c, option, unique, &values))
        return false;
    ns_option_sizes(option, "minItems", "maxItems", &min, &max);
    n = (uint32_t)json_array_size(values);
    for (uint32_t i = 0; i < n; i++) {
        rule[i] = ns_program_rule(p);
        ns_program_define(p, rule[i],
                          ns_json_value(&c->w, json_array_get(values, i),
                                        ns_program_end(p, NS_OP_RETURN)));
    }
    json_decref(values);
    close = ns_json_line(&c->w, ns_program_text(p, "]", 1, next));
    for (uint32_t set = 1u << n; set-- > 0;) {
        uint32_t size = (uint32_t)__builtin_popcount(set);

        item = NS_PROGRAM_FAIL;
        for (uint32_t i = 0; i < n && size < max; i++)
            if (!(set >> i & 1))
                item = ns_program_split(
                    p, item, ns_program_call(p, rule[i], done[set | 1u << i]));
        done[set] = ns_program_split(p, size >= min ? close : NS_PROGRAM_FAIL,
                                     ns_json_comma(&c->w, item));
    }
    if (max > 0) /* the last was the empty set */
        first = ns_json_line(&c->w, item);
    if (min == 0)
        first = ns_program_split(p, ns_program_text(p, "]", 1, next), first);
    *out = ns_program_text(p, "[", 1, first);
    return true;
}

/* --- objects */

struct members {
    struct ns_name *name;
    uint32_t *rule; /* per name */
    uint32_t n_names;
    struct ns_others others[NS_OTHERS];
    uint32_t other_name[NS_OTHERS], other_rule[NS_OTHERS], n_others;
    uint32_t min, max; /* members; max UINT32_MAX for any number */
    uint32_t close;
};

/* Takes what no object can have out of the list; *possible: one can be. */
static bool
find_members(struct ns_compile *c, const struct ns_option *option,
             struct members *m, bool *possible)
{
    uint32_t kept = 0, n_required = 0;

    ns_option_sizes(option, "minProperties", "maxProperties", &m->min, &m->max);
    *possible = m->min <= m->max;
    if (!ns_option_names(c, option, &m->name, &m->n_names) ||
        !ns_option_others(c, option, m->name, m->n_names, m->others,
                          &m->n_others))
        return false;
    for (uint32_t i = 0; i < m->n_names; i++) {
        if (m->name[i].required && !m->name[i].allowed)
            *possible = false;
        n_required += m->name[i].required;
        if (m->name[i].allowed)
            m->name[kept++] = m->name[i];
    }
    m->n_names = kept;
    /* Bounds that hold by themselves are none to count for. */
    if (m->min <= n_required)
        m->min = 0;
    if (m->n_others == 0 && m->max >= kept)
        m->max = UINT32_MAX;
    m->rule = ns_compile_array(c, kept + 1, sizeof(*m->rule));
    if (!m->rule)
        return false;
    for (uint32_t i = 0; i < kept; i++)
        if (!rule_of(c, &m->name[i].goal, &m->rule[i]))
            return false;
    for (uint32_t i = 0; i < m->n_others; i++) {
        m->other_name[i] = ns_program_rule(c->p);
        ns_program_define(c->p, m->other_name[i],
                          ns_json_string(&c->w, m->others[i].names,
                                         NS_SPELL_SHORTEST,
                                         ns_program_end(c->p, NS_OP_RETURN)));
        if (!rule_of(c, &m->others[i].goal, &m->other_rule[i]))
            return false;
    }
    return true;
}

/* A member with a name that was not declared, then `done`. */
static uint32_t
write_others(struct ns_compile *c, const struct members *m, uint32_t done)
{
    uint32_t at = NS_PROGRAM_FAIL;

    for (uint32_t i = 0; i < m->n_others; i++)
        at = ns_program_split(
            c->p, at,
            ns_program_call(
                c->p, m->other_name[i],
                ns_json_colon(&c->w,
                              ns_program_call(c->p, m->other_rule[i], done))));
    return at;
}

/* N[i][k]: a member follows, of the names from i on, behind k others; D[i][k]:
 * one has just been written. k stays at the last of them where more make no
 * difference. */
struct lattice {
    uint32_t *follow, *done; /* N and D, (n_names + 1) rows */
    uint32_t width;          /* values of k */
};

static uint32_t
one_more(const struct members *m, const struct lattice *l, uint32_t i,
         uint32_t k)
{
    if (k + 1 < l->width)
        return l->done[i * l->width + k + 1];
    return m->max == UINT32_MAX ? l->done[i * l->width + k] : NS_PROGRAM_FAIL;
}

static void
write_last_row(struct ns_compile *c, const struct members *m, struct lattice *l)
{
    uint32_t *done = l->done + (size_t)m->n_names * l->width;
    uint32_t *follow = l->follow + (size_t)m->n_names * l->width;

    for (uint32_t k = l->width; k-- > 0 && ns_program_step(c->p);) {
        uint32_t end = k >= m->min ? m->close : NS_PROGRAM_FAIL;

        if (k + 1 == l->width && m->max == UINT32_MAX) {
            done[k] = ns_program_loop(c->p, end);
            follow[k] = write_others(c, m, done[k]);
            ns_program_close(c->p, done[k], ns_json_comma(&c->w, follow[k]));
            continue;
        }
        follow[k] = write_others(c, m, one_more(m, l, m->n_names, k));
        done[k] = ns_program_split(c->p, end, ns_json_comma(&c->w, follow[k]));
    }
}

static void
write_rows(struct ns_compile *c, const struct members *m, struct lattice *l)
{
    bool optional = true; /* all names from i on */

    for (uint32_t i = m->n_names; i-- > 0;) {
        optional &= !m->name[i].required;
        for (uint32_t k = l->width; k-- > 0 && ns_program_step(c->p);) {
            size_t at = (size_t)i * l->width + k;
            uint32_t member = ns_json_text(
                &c->w, m->name[i].name,
                ns_json_colon(&c->w,
                              ns_program_call(c->p, m->rule[i],
                                              one_more(m, l, i + 1, k))));

            l->follow[at] = ns_program_split(c->p, member,
                                             m->name[i].required
                                                 ? NS_PROGRAM_FAIL
                                                 : l->follow[at + l->width]);
            l->done[at] = ns_program_split(
                c->p, optional && k >= m->min ? m->close : NS_PROGRAM_FAIL,
                ns_json_comma(&c->w, l->follow[at]));
        }
    }
}

static bool
write_members(struct ns_compile *c, const struct ns_option *option,
              struct members *m, uint32_t next, uint32_t *out)
{
    struct ns_program *p = c->p;
    struct lattice l = { .width = 1 };
    bool empty = m->min == 0;
    size_t cells;
    uint32_t first;

    if (m->max != UINT32_MAX)
        l.width += m->max;
    else
        l.width += m->min;
    if (l.width > NS_GRAMMAR_CODE || /* no sum or product below overflows */
        (m->n_names + 1ull) * l.width > NS_GRAMMAR_CODE)
        return ns_compile_refuse(c, "grammar_limit", option->of.schema[0],
                                 "maxProperties",
                                 "too many numbers of too many members");
    cells = (m->n_names + (size_t)1) * l.width;
    l.follow = ns_compile_array(c, 2 * cells, sizeof(*l.follow));
    if (!l.follow)
        return false;
    l.done = l.follow + cells;
    m->close = ns_json_line(&c->w, ns_program_text(p, "}", 1, next));
    write_last_row(c, m, &l);
    write_rows(c, m, &l);
    for (uint32_t i = 0; i < m->n_names; i++)
        empty &= !m->name[i].required;
    first = m->max > 0 ? ns_json_line(&c->w, l.follow[0]) : NS_PROGRAM_FAIL;
    if (empty)
        first = ns_program_split(p, ns_program_text(p, "}", 1, next), first);
    *out = ns_program_text(p, "{", 1, first);
    return true;
}

static bool
write_object(struct ns_compile *c, const struct ns_option *option,
             uint32_t next, uint32_t *out)
{
    struct members *m = ns_compile_array(c, 1, sizeof(*m));
    bool possible = false, fine;

    if (!m)
        return false;
    fine = find_members(c, option, m, &possible);
    *out = NS_PROGRAM_FAIL;
    if (fine && possible)
        fine = write_members(c, option, m, next, out);
    for (uint32_t i = 0; i < m->n_others; i++)
        ns_language_destroy(m->others[i].names);
    return fine;
}

/* --- an option */

/* Keywords of a kind of values that no program here can hold to. */
static bool
check_enforceable(struct ns_compile *c, const struct ns_option *option,
                  unsigned kinds)
{
    for (uint32_t i = 0; i < option->of.n; i++) {
        const json_t *schema = option->of.schema[i];
        const char *keyword = NULL;

        if ((kinds & NS_KIND_ARRAY) && json_object_get(schema, "contains"))
            keyword = "contains";
        if ((kinds & NS_KIND_ARRAY) &&
            json_object_get(schema, "unevaluatedItems"))
            keyword = "unevaluatedItems";
        if ((kinds & NS_KIND_OBJECT) &&
            json_object_get(schema, "unevaluatedProperties"))
            keyword = "unevaluatedProperties";
        if (keyword)
            return ns_compile_refuse(c, "unsupported", schema, keyword,
                                     "it cannot be enforced exactly");
    }
    return !option->unsure ||
           ns_compile_refuse(c, "unsupported", option->unsure,
                             option->unsure_keyword,
                             "it cannot be enforced exactly");
}

/* Scalars in one tree, the others side by side. */
static bool
write_values(struct ns_compile *c, const json_t *values, uint32_t next,
             uint32_t *out)
{
    size_t n = json_array_size(values), n_texts = 0;
    char **text = ns_compile_array(c, n + 1, sizeof(*text));
    bool fine = text != NULL;

    *out = NS_PROGRAM_FAIL;
    for (size_t i = 0; i < n && fine; i++) {
        const json_t *value = json_array_get(values, i);

        if (json_is_array(value) || json_is_object(value)) {
            *out =
                ns_program_split(c->p, *out, ns_json_value(&c->w, value, next));
            continue;
        }
        text[n_texts] = ns_json_spell(value);
        fine = text[n_texts] != NULL || ns_compile_no_memory(c);
        n_texts += fine;
    }
    if (fine)
        *out = ns_program_split(
            c->p, *out,
            ns_program_choice(c->p, (const char *const *)text, n_texts, next));
    while (n_texts > 0)
        free(text[--n_texts]);
    return fine;
}

static bool
write_kinds(struct ns_compile *c, const struct ns_option *option, uint32_t next,
            uint32_t *out)
{
    struct ns_program *p = c->p;
    struct ns_language *language = NULL;
    struct ns_option_numbers numbers;
    uint32_t at = NS_PROGRAM_FAIL, part;
    unsigned kinds;

    if (!ns_option_kinds(c, option, &kinds) ||
        !check_enforceable(c, option, kinds))
        return false;
    if (kinds & NS_KIND_NULL)
        at = ns_program_text(p, "null", 4, next);
    if (kinds & NS_KIND_BOOLEAN) {
        at = ns_program_split(p, at, ns_program_text(p, "true", 4, next));
        at = ns_program_split(p, at, ns_program_text(p, "false", 5, next));
    }
    if (kinds & NS_KIND_NUMBER) {
        if (!ns_option_numbers(c, option, kinds, &numbers))
            return false;
        at = ns_program_split(p, at,
                              ns_json_number(&c->w, &numbers.limits, next));
    }
    if (kinds & NS_KIND_STRING) {
        if (!ns_option_strings(c, option, &language))
            return false;
        at = ns_program_split(
            p, at, ns_json_string(&c->w, language, NS_SPELL_ANY, next));
        ns_language_destroy(language);
    }
    if (kinds & NS_KIND_ARRAY) {
        const json_t *unique = unique_in(option);

        if (!(unique ? write_unique(c, option, unique, next, &part)
                     : write_array(c, option, next, &part)))
            return false;
        at = ns_program_split(p, at, part);
    }
    if (kinds & NS_KIND_OBJECT) {
        if (!write_object(c, option, next, &part))
            return false;
        at = ns_program_split(p, at, part);
    }
    *out = at;
    return true;
}

/* --- a document */

static bool
write_goal(struct ns_compile *c, const struct ns_goal *goal, uint32_t rule)
{
    uint32_t end = ns_program_end(c->p, NS_OP_RETURN), at = NS_PROGRAM_FAIL;
    struct ns_options options = { 0 };
    json_t *values = NULL;
    bool fine = true;

    if (goal->nothing)
        return true;
    if (!ns_goal_values(c, goal, &values))
        return false;
    if (values)
        fine = write_values(c, values, end, &at);
    else
        fine = ns_compile_options(c, goal, &options);
    json_decref(values);
    for (uint32_t i = 0; i < options.n && fine; i++) {
        const struct ns_option *option = &options.option[i];
        uint32_t part = NS_PROGRAM_FAIL;

        fine = ns_goal_values(c, &option->of, &values) &&
               (values ? write_values(c, values, end, &part)
                       : write_kinds(c, option, end, &part));
        json_decref(values);
        at = ns_program_split(c->p, at, part);
    }
    ns_program_define(c->p, rule, at);
    return fine;
}

static bool
write_document(struct ns_compile *c, uint32_t *start)
{
    struct ns_goal goal = { 0 };
    uint32_t rule;

    if (!ns_goal_add(c, &goal, c->doc.root) || !rule_of(c, &goal, &rule))
        return false;
    *start = ns_program_call(c->p, rule, ns_program_end(c->p, NS_OP_MATCH));
    /* A program that has failed says so when it is linked. */
    for (uint32_t i = 0; i < c->n_goals && ns_program_step(c->p); i++)
        if (!write_goal(c, &c->goal[i], c->rule[i]))
            return false;
    return true;
}

enum ns_status
ns_grammar_json_schema(const json_t *schema, struct ns_grammar **out,
                       struct ns_error *err)
{
    struct ns_compile c = { .doc = { .root = schema },
                            .err = err,
                            .status = NS_OK };
    uint32_t start = NS_PROGRAM_FAIL;

    if (!json_is_object(schema) && !json_is_boolean(schema))
        return ns_refuse(err, "bad_param", NULL,
                         "schema: it is neither an object nor true or false");
    c.status = ns_arena_create(NS_SCHEMA_MEMORY, &c.arena, err);
    if (c.status == NS_OK)
        c.status = ns_arena_create(NS_SCHEMA_MEMORY, &c.scratch, err);
    if (c.status != NS_OK)
        goto out;
    c.p = ns_program_create();
    c.goal = malloc(NS_SCHEMA_GOALS * sizeof(*c.goal));
    c.rule = malloc(NS_SCHEMA_GOALS * sizeof(*c.rule));
    if (!c.p || !c.goal || !c.rule) {
        ns_compile_no_memory(&c);
        goto out;
    }
    ns_json_writer_init(&c.w, c.p);
    write_document(&c, &start);
    ns_json_writer_fini(&c.w);
    /* What a limit of the program cuts short is no other failure. */
    if (c.status == NS_OK)
        c.status = ns_program_link(c.p, start, out, err);
    if (c.status == NS_REJECT && !strstr(err->text, "schema"))
        ns_context(err, "schema");
out:
    ns_made_fini(&c);
    ns_schema_doc_fini(&c.doc);
    ns_table_fini(&c.goals);
    free(c.goal);
    free(c.rule);
    ns_program_destroy(c.p);
    ns_arena_destroy(c.scratch);
    ns_arena_destroy(c.arena);
    return c.status;
}

enum ns_status
ns_grammar_json_object(struct ns_grammar **out, struct ns_error *err)
{
    json_t *schema = json_pack("{s:s}", "type", "object");
    enum ns_status status;

    if (!schema)
        return ns_fail(err, NS_FATAL, "out of memory compiling a schema");
    status = ns_grammar_json_schema(schema, out, err);
    json_decref(schema);
    return status;
}
