/* schema.h - whether a JSON value is what a JSON Schema describes.
 *
 * A plain walk over the value with the schema beside it, after draft 2020-12's
 * core, applicator and validation vocabularies; `format` is held to, not only
 * noted. It knows nothing of grammars, so each checks the other
 * (docs/STRUCTURED.md has the table of keywords). What it does not know and
 * could change the answer is refused, as are references out of the document.
 *
 * Borrows: both values, for the call. Thread: any; nothing is shared.
 */
#ifndef NS_ENGINE_SCHEMA_H
#define NS_ENGINE_SCHEMA_H

#include <jansson.h>

#include "base/error.h"

enum {
    NS_SCHEMA_DEPTH = 1000,    /* schemas inside schemas, as they are met */
    NS_SCHEMA_STEPS = 1 << 24, /* keywords looked at, values compared */
};

/* NS_OK: it is. NS_REJECT with code
 *   `schema`         it is not; the text has the value's JSON pointer and the
 *                    keyword: "/items/3/price: minimum: 0 or more, it is -1"
 *   `unsupported`, `bad_param`, `grammar_limit`
 *                    the schema: a keyword that is not known here, one that is
 *                    malformed, or more work than the limits above allow.
 * NS_FATAL when memory runs out. */
enum ns_status ns_schema_check(const json_t *schema, const json_t *instance,
                               struct ns_error *err);

#endif
