/* grammar_schema.h - a JSON Schema on its way into a program.
 *
 * A *goal* is a set of schemas that one value has to satisfy together: what
 * `properties` of two schemas under one allOf say of one name, say. Each goal
 * becomes one rule of the program, made once however often it is met, which is
 * what makes recursion by `$ref` finite.
 *
 * A goal is taken apart (grammar_expand.c) into *options*: allOf and `$ref`
 * join schemas, anyOf makes one option of each of its own, and oneOf, not and
 * if are turned into those by negation (grammar_negate.c) where a schema has
 * one. An option is a list of schemas of which only the keywords that speak of
 * the value itself are left to look at; grammar_shape.c and grammar_members.c
 * read them by kind of value, and grammar_schema.c writes the program.
 *
 * A function that returns false has failed: ns_compile.status says how.
 *
 * Private to grammar_schema.c, _expand.c, _negate.c, _shape.c, _members.c and
 * _nothing.c.
 */
#ifndef NS_ENGINE_GRAMMAR_SCHEMA_H
#define NS_ENGINE_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "base/arena.h"
#include "engine/grammar_json.h"
#include "engine/schema_private.h"

enum {
    NS_SCHEMA_OPTIONS = 1 << 10, /* of one goal */
    NS_SCHEMA_GOALS = 1 << 14,   /* of one document */
    NS_SCHEMA_IN_PLACE = 64,     /* allOf in anyOf in $ref in ... */
    NS_SCHEMA_NESTED = 8,        /* oneOf in oneOf, while it is decided */
    NS_SCHEMA_PATTERNS = 12,     /* patternProperties of one goal */
    NS_SCHEMA_UNIQUE = 10,       /* values of which a list has each once */
    NS_SCHEMA_MEMORY = 64 << 20, /* of one compilation */
};

/* Kinds of values, as bits. Numbers are whole or not. */
enum ns_kind {
    NS_KIND_NULL = 1,
    NS_KIND_BOOLEAN = 2,
    NS_KIND_WHOLE = 4,
    NS_KIND_FRACTION = 8,
    NS_KIND_STRING = 16,
    NS_KIND_ARRAY = 32,
    NS_KIND_OBJECT = 64,
    NS_KIND_NUMBER = NS_KIND_WHOLE | NS_KIND_FRACTION,
    NS_KIND_ALL = 127,
};

/* Schemas that hold together, in the order in which they were met. */
struct ns_goal {
    const json_t **schema; /* of the document, or of `made` */
    uint32_t n, capacity;
    bool nothing; /* one of them is `false` */
};

struct ns_option {
    struct ns_goal of;
    /* A keyword in place that could not be turned into options, and where:
     * only values that are listed can be held to it. */
    const json_t *unsure;
    const char *unsure_keyword;
};

struct ns_options {
    struct ns_option *option;
    uint32_t n, capacity;
};

/* A schema that was made from one of the document: what refuses all that it
 * accepts and accepts the rest; it without what stands in place of others; its
 * dependents as alternatives. */
enum ns_made_kind { NS_MADE_NEGATION, NS_MADE_BARE, NS_MADE_DEPENDENT };

struct ns_made {
    const json_t *from;
    enum ns_made_kind kind;
    json_t *schema; /* owned, NULL: there is none */
};

struct ns_compile {
    struct ns_schema_doc doc;
    struct ns_program *p;
    struct ns_json_writer w;
    struct ns_arena *arena, *scratch;
    struct ns_goal *goal; /* rule by rule */
    uint32_t *rule;
    uint32_t n_goals;
    struct ns_table goals; /* of goal + 1 */
    struct ns_made *made;
    uint32_t n_made, made_capacity;
    struct ns_table made_index;             /* of made + 1 */
    const json_t *open[NS_SCHEMA_IN_PLACE]; /* being taken apart */
    unsigned n_open, n_nested;
    struct ns_error *err;
    enum ns_status status; /* the first failure; all ends behind it */
};

/* Fails with "PLACE: keyword: what"; returns false. */
bool ns_compile_refuse(struct ns_compile *c, const char *code,
                       const json_t *schema, const char *keyword,
                       const char *what);
bool ns_compile_no_memory(struct ns_compile *c);
void *ns_compile_array(struct ns_compile *c, size_t n, size_t size);

/* Puts a schema into a goal; references that stand alone are followed first,
 * so that all ways to one definition are one. */
bool ns_goal_add(struct ns_compile *c, struct ns_goal *goal,
                 const json_t *schema);

/* --- grammar_expand.c */

bool ns_compile_options(struct ns_compile *c, const struct ns_goal *goal,
                        struct ns_options *out);

/* Every keyword of a schema is known, and has a value of its form: what comes
 * later relies on it. */
bool ns_compile_keywords(struct ns_compile *c, const json_t *schema);

/* --- grammar_negate.c: each is made once, so that goals stay few */

/* NULL the first time. Good until the next one is kept. */
struct ns_made *ns_made_find(struct ns_compile *c, const json_t *from,
                             enum ns_made_kind kind);
/* Takes `schema`; NULL: there is none. */
bool ns_made_keep(struct ns_compile *c, const json_t *from,
                  enum ns_made_kind kind, json_t *schema);
/* A schema of all that `schema` refuses; *out is NULL where there is none. */
bool ns_made_negation(struct ns_compile *c, const json_t *schema,
                      const json_t **out);
void ns_made_fini(struct ns_compile *c);

/* Takes `part`; false when memory has run out. */
bool ns_json_append(json_t *list, json_t *part);

/* --- grammar_shape.c */

/* Kinds of values that all schemas of an option allow. */
bool ns_option_kinds(struct ns_compile *c, const struct ns_option *option,
                     unsigned *out);

/* The values that are left of an enum or a const, in the schemas or in what
 * they join: *out (a list, the caller's) is NULL where there is neither. */
bool ns_goal_values(struct ns_compile *c, const struct ns_goal *goal,
                    json_t **out);

struct ns_option_numbers {
    struct ns_number_limits limits;
    struct ns_decimal low, high;
};
bool ns_option_numbers(struct ns_compile *c, const struct ns_option *option,
                       unsigned kinds, struct ns_option_numbers *out);

/* What strings it allows; the caller destroys it. */
bool ns_option_strings(struct ns_compile *c, const struct ns_option *option,
                       struct ns_language **out);
/* The same of all options of a goal. */
bool ns_goal_strings(struct ns_compile *c, const struct ns_goal *goal,
                     struct ns_language **out);

/* Passes on how making a language went: a failure names the keyword. */
bool ns_compile_language(struct ns_compile *c, const json_t *schema,
                         const char *keyword, enum ns_status status);
/* Puts another in place of *all: of what the two have together. */
bool ns_compile_cut(struct ns_compile *c, struct ns_language **all,
                    enum ns_language_op op, const struct ns_language *other,
                    const json_t *schema, const char *keyword);

/* min... and max... of arrays and objects; UINT32_MAX is no limit. */
void ns_option_sizes(const struct ns_option *option, const char *least,
                     const char *most, uint32_t *min, uint32_t *max);

/* How many items have schemas of their own; what item `index` has to be. */
uint32_t ns_option_prefix(const struct ns_option *option);
bool ns_option_item(struct ns_compile *c, const struct ns_option *option,
                    uint32_t index, struct ns_goal *out);

/* --- grammar_members.c */

struct ns_name {
    const char *name;
    bool required;
    bool allowed; /* else no object may have it */
    struct ns_goal goal;
};

/* The names that a schema speaks of: `properties` in order, then those that
 * are only required. */
bool ns_option_names(struct ns_compile *c, const struct ns_option *option,
                     struct ns_name **out, uint32_t *n);

/* Names that were not declared, and what their values have to be. */
struct ns_others {
    struct ns_language *names;
    struct ns_goal goal;
};
bool ns_option_others(struct ns_compile *c, const struct ns_option *option,
                      const struct ns_name *name, uint32_t n_names,
                      struct ns_others *out, uint32_t *n);
enum { NS_OTHERS = 64 }; /* room that `out` has */

/* --- grammar_nothing.c */

/* Nothing satisfies it, for certain; false means no more than that it was
 * not seen. Looks `depth` levels into arrays and objects. */
bool ns_goal_is_nothing(struct ns_compile *c, const struct ns_goal *goal,
                        unsigned depth);

#endif
