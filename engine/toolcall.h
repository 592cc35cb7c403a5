/* toolcall.h - the text of one tool call to a name and JSON arguments.
 *
 *     call:get_weather{city:<|"|>Oslo<|"|>,days:2}    as the model learnt it
 *
 * Understood as well: no `call:`; parentheses, with `=` or `:`; JSON keys and
 * strings in double or single quotes; True, False and None; and one JSON
 * object with `name` and `arguments`. All else is malformed: nothing is
 * guessed, left out or cut short.
 *
 * The text comes coded, so that a marker and the same characters spelled out
 * differ: neither byte occurs in UTF-8.
 */
#ifndef NS_ENGINE_TOOLCALL_H
#define NS_ENGINE_TOOLCALL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

#define NS_TOOLCALL_QUOTE '\xff' /* the token <|"|>                         */
#define NS_TOOLCALL_OTHER '\xfe' /* another control token; its name follows */

/* False when malformed. `whole`: the closing marker was seen; without it a
 * bare name may be half a name. `name` and `arguments` (a JSON object, numbers
 * as the model wrote them) are emptied first; ask them about memory. */
bool ns_toolcall_parse(const char *coded, size_t length, bool whole,
                       struct ns_buf *name, struct ns_buf *arguments);

/* The coded text as a person reads it. */
void ns_toolcall_raw(const char *coded, size_t length, struct ns_buf *out);

#endif
