/* schema_check.h - a check under way: what schema.c and its two files of
 * keywords share.
 *
 * Private to schema.c and schema_members.c.
 */
#ifndef NS_ENGINE_SCHEMA_CHECK_H
#define NS_ENGINE_SCHEMA_CHECK_H

#include "engine/schema.h"
#include "engine/schema_private.h"

/* BROKEN: the schema, or memory; the error stands. */
enum ns_verdict { NS_VALID, NS_INVALID, NS_BROKEN };

/* Where in the instance we are, from the inside out. */
struct ns_place {
    const struct ns_place *up;
    const char *name; /* a member's, or NULL: then an item */
    size_t index;
};

struct ns_check {
    struct ns_schema_doc *doc; /* borrowed */
    struct ns_error *err;
    enum ns_status status; /* what NS_BROKEN stands for */
    unsigned depth;
    uint32_t n_steps;
};

/* A keyword with its value and the schema around it, and what it is asked
 * of. */
struct ns_asked {
    const json_t *schema, *value, *instance;
    const struct ns_place *place;
    const char *keyword;
};

enum ns_verdict ns_check_schema(struct ns_check *c, const json_t *schema,
                                const json_t *instance,
                                const struct ns_place *place);

/* The verdict of a keyword; of one that is not well formed; of a member that
 * is missing at `place`. */
enum ns_verdict ns_check_when(struct ns_check *c, const struct ns_asked *q,
                              bool valid);
enum ns_verdict ns_check_malformed(struct ns_check *c,
                                   const struct ns_asked *q);
enum ns_verdict ns_check_missing(struct ns_check *c, const struct ns_asked *q,
                                 const struct ns_place *place);

/* False: too much work; the error stands. */
bool ns_check_step(struct ns_check *c);

/* The machine of a pattern; NULL: broken. */
const struct ns_language *ns_check_pattern(struct ns_check *c,
                                           const char *keyword,
                                           const char *pattern, size_t length);

/* Keywords of arrays and objects. */
enum ns_verdict ns_check_prefix_items(struct ns_check *c,
                                      const struct ns_asked *q);
enum ns_verdict ns_check_items(struct ns_check *c, const struct ns_asked *q);
enum ns_verdict ns_check_contains(struct ns_check *c, const struct ns_asked *q);
enum ns_verdict ns_check_unique(struct ns_check *c, const struct ns_asked *q);
enum ns_verdict ns_check_required(struct ns_check *c, const struct ns_asked *q);
enum ns_verdict ns_check_properties(struct ns_check *c,
                                    const struct ns_asked *q);
enum ns_verdict ns_check_pattern_properties(struct ns_check *c,
                                            const struct ns_asked *q);
enum ns_verdict ns_check_additional(struct ns_check *c,
                                    const struct ns_asked *q);
enum ns_verdict ns_check_names(struct ns_check *c, const struct ns_asked *q);
enum ns_verdict ns_check_dependent_required(struct ns_check *c,
                                            const struct ns_asked *q);
enum ns_verdict ns_check_dependent_schemas(struct ns_check *c,
                                           const struct ns_asked *q);

#endif
