/* ranges.h - sets of code points, as a pattern puts them together.
 *
 * Many sets lie behind each other in one array; `from` is where the one begins
 * that is being made, and it ends where the array does. Memory that runs out
 * is remembered in `failed`, and what comes behind it does nothing.
 *
 * Owns: its array. Works on the caller's struct: zeroed, then fini.
 */
#ifndef NS_ENGINE_RANGES_H
#define NS_ENGINE_RANGES_H

#include "engine/program.h"

struct ns_ranges {
    struct ns_range *at;
    uint32_t n, capacity;
    bool failed;
};

void ns_ranges_fini(struct ns_ranges *r);

void ns_ranges_add(struct ns_ranges *r, uint32_t first, uint32_t last);

/* Sorts the set, and joins what overlaps. */
void ns_ranges_join(struct ns_ranges *r, uint32_t from);

/* All other code points instead. */
void ns_ranges_complement(struct ns_ranges *r, uint32_t from);

/* Adds what a letter behind a backslash stands for: \d \w \s and, in capitals,
 * all but these. False for any other letter. */
bool ns_ranges_shorthand(struct ns_ranges *r, char letter);

/* Adds all that have a property of Unicode, by libunistring's tables: a general
 * category ("Lu", "Letter", "gc=Nd") or a script ("Script=Greek"). False where
 * there is none of that name. */
bool ns_ranges_property(struct ns_ranges *r, const char *name, size_t length);

#endif
