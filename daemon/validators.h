/* validators.h - is an answer fit to be final?
 *
 * Pure looks at a finished text; what runs a tool is tool.h. A reason says what
 * and where, for a person, and names no more of the text than a few bytes.
 *
 * Repetition is told from two signs. The end of the text goes round: it repeats
 * a unit of at most 64 bytes at least 8 times, or one of at most 600 at least 5
 * times; over at least 200 bytes of an answer that was cut by its limit, or over
 * at least 400 bytes and half of one that ended by itself. Quotes, brackets and
 * blanks that close it do not hide it. A unit of figures alone has to go round
 * over 1,000 bytes and half of the text in either. Or words double: 24 of the
 * last 120 stand twice in a row. A table's rule, a column of zeros, a long list
 * are neither.
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_DAEMON_VALIDATORS_H
#define NS_DAEMON_VALIDATORS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "engine/tokenizer.h"

/* Each: true when there is nothing to say, else `reason` is filled. */
struct ns_reason {
    char text[200];
};

bool ns_validate_repetition(const char *text, size_t length, bool cut,
                            struct ns_reason *reason);

/* Markdown's fences: each that opens has one of its kind, as long, that closes
 * it. */
bool ns_validate_fence(const char *text, size_t length,
                       struct ns_reason *reason);

/* The control strings of the chat format that stand in any text of `value`,
 * each once, a line each. */
void ns_controls_of(const json_t *value, const struct ns_tokenizer *tokenizer,
                    struct ns_buf *out);

/* Control strings, spelt out; but for those in `spoken_of`, as ns_controls_of
 * writes them: who asks about them may be told of them. NULL: none. */
bool ns_validate_control(const char *text, size_t length,
                         const char *spoken_of,
                         const struct ns_tokenizer *tokenizer,
                         struct ns_reason *reason);

/* One JSON value and blanks around it; with a schema, one that satisfies it. */
bool ns_validate_json(const char *text, size_t length, const json_t *schema,
                      struct ns_reason *reason);

/* The next fenced block of one of the languages in `names` ("py|python"), from
 * `*at` on; the whole text, once, if it has no fence at all. False: no more. */
struct ns_code {
    const char *text; /* borrowed */
    size_t length;
    size_t line; /* of the answer, from 1: its first */
};
bool ns_next_code(const char *text, size_t length, const char *names,
                  size_t *at, struct ns_code *out);

#endif
