/* schema_private.h - what the validator and the compiler of schemas share. */
#ifndef NS_ENGINE_SCHEMA_PRIVATE_H
#define NS_ENGINE_SCHEMA_PRIVATE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/language.h"

/* A document of schemas at work: what is looked up in it again and again.
 * Zeroed but for `root`, then fini. */
struct ns_schema_doc {
    const json_t *root; /* borrowed */
    struct ns_languages languages;
    const json_t **anchor; /* schemas that have one */
    uint32_t n_anchors, anchor_capacity;
    struct ns_table anchors; /* of anchor + 1, by name */
    bool has_looked;         /* for anchors */
};
void ns_schema_doc_fini(struct ns_schema_doc *doc);

/* As ns_schema_check, by a schema that is a part of the document. */
enum ns_status ns_schema_check_part(struct ns_schema_doc *doc,
                                    const json_t *schema,
                                    const json_t *instance,
                                    struct ns_error *err);

/* Equal as JSON Schema has it: 1 and 1.0 are. */
bool ns_json_same(const json_t *a, const json_t *b);

/* Negative, zero or positive, exactly; both are numbers. */
int ns_json_compare(const json_t *a, const json_t *b);

/* A count: a whole number from 0 up, 2 or 2.0; false for anything else. */
bool ns_json_count(const json_t *value, uint32_t *out);

/* Whether `value` is a multiple of `of`, by their decimal digits: 0.0075 is one
 * of 0.0001. False when the two are too many digits apart to tell. */
bool ns_json_multiple(const json_t *value, const json_t *of, bool *out);

/* The schema that a `$ref` names: "#", "#/a/b", "#anchor", each also behind
 * the root's own "$id". NS_REJECT for all others. */
enum ns_status ns_schema_resolve(struct ns_schema_doc *doc, const json_t *ref,
                                 const json_t **out, struct ns_error *err);

/* Makes text of a schema or a value fit for an error, in place: whole
 * characters, where it was cut, and `?` for controls. */
void ns_schema_clean(char *text);

/* Says no more than it is: title, examples and the like, those of OpenAPI, and
 * whatever begins with x-. */
bool ns_schema_is_note(const char *keyword);

/* `nullable` beside `type`, as OpenAPI 3.0 has it: null is of the type too. */
bool ns_schema_is_nullable(const json_t *schema);

/* The value of a `$schema`: a draft, and not a vocabulary of someone's own. */
bool ns_schema_is_draft(const json_t *uri);

/* The pattern of a `format` and the most characters it may have; NULL for one
 * that is not known. */
const char *ns_schema_format(const char *format, uint32_t *most);

#endif
