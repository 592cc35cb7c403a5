/* regex.h - ECMAScript's regular expressions, read into a tree.
 *
 * What the tree holds is regular; what is not (look-around, references back)
 * is refused by the reader. One tree can be put into a program of bytes, for
 * a text that matches as a whole, or into one of code points, where language.c
 * makes a deterministic machine of it.
 *
 * Private to grammar*.c and language.c.
 *
 * Owns:   its nodes. Thread: any; const once it is read.
 */
#ifndef NS_ENGINE_REGEX_H
#define NS_ENGINE_REGEX_H

#include "engine/program.h"

struct ns_regex; /* opaque */

/* Errors as grammar.h says. */
enum ns_status ns_regex_parse(const char *pattern, size_t length,
                              struct ns_regex **out, struct ns_error *err);
void ns_regex_destroy(struct ns_regex *regex); /* takes NULL */

/* What reading it took beyond its length, in steps of language.h. */
uint64_t ns_regex_steps(const struct ns_regex *regex);

/* Bytes that match as a whole, then `next`. ^ and $ are refused where they
 * could change anything: not at an end of the pattern. */
enum ns_status ns_regex_bytes(const struct ns_regex *regex,
                              struct ns_program *p, uint32_t next,
                              uint32_t *out, struct ns_error *err);

/* Code points that match as a whole, anchors as instructions, then `next`. */
uint32_t ns_regex_code_points(const struct ns_regex *regex,
                              struct ns_program *p, uint32_t next);

#endif
