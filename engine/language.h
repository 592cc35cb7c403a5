/* language.h - sets of strings that can be joined, cut and turned around.
 *
 * A program over bytes can say "this or that"; "this and that" and "all but
 * this" need a deterministic machine. A language is one, over code points:
 * what a string of a JSON document may be (a pattern within a length, a format
 * without some texts), and what a name may be that is none of those declared.
 * Once it is known it is written into a program, code point by code point, as
 * the caller spells them.
 *
 * Owns:   its table. Thread: any; const once it is made.
 * Errors: as grammar.h; `grammar_limit` above NS_LANGUAGE_STATES states or
 *         NS_LANGUAGE_CELLS entries of the table.
 */
#ifndef NS_ENGINE_LANGUAGE_H
#define NS_ENGINE_LANGUAGE_H

#include "engine/program.h"

enum {
    NS_LANGUAGE_STATES = 1 << 17,
    NS_LANGUAGE_CELLS = 1 << 22,
    NS_LANGUAGE_STEPS = 1 << 26, /* work of making one */
};

struct ns_language; /* opaque */

/* All strings in which the pattern is found (ECMAScript's; regex.h). */
enum ns_status ns_language_pattern(const char *pattern, size_t length,
                                   struct ns_language **out,
                                   struct ns_error *err);

/* All strings of `least` to `most` code points; UINT32_MAX is no limit. */
enum ns_status ns_language_length(uint32_t least, uint32_t most,
                                  struct ns_language **out,
                                  struct ns_error *err);

/* These texts, in UTF-8. */
enum ns_status ns_language_texts(const char *const *text, size_t n,
                                 struct ns_language **out,
                                 struct ns_error *err);

enum ns_language_op {
    NS_LANGUAGE_BOTH,
    NS_LANGUAGE_EITHER,
    NS_LANGUAGE_FIRST_ONLY, /* in a, and not in b */
};

enum ns_status ns_language_combine(const struct ns_language *a,
                                   enum ns_language_op op,
                                   const struct ns_language *b,
                                   struct ns_language **out,
                                   struct ns_error *err);

void ns_language_destroy(struct ns_language *language); /* takes NULL */

/* Patterns that were made once: zeroed, then fini. */
struct ns_languages {
    struct ns_named_language {
        char *pattern;
        struct ns_language *language;
    } * at;
    size_t n;
};
/* As ns_language_pattern; *out stays with `known`. */
enum ns_status ns_languages_get(struct ns_languages *known, const char *pattern,
                                size_t length, const struct ns_language **out,
                                struct ns_error *err);
void ns_languages_fini(struct ns_languages *known);

bool ns_language_is_empty(const struct ns_language *language);
bool ns_language_has(const struct ns_language *language, const char *text,
                     size_t length);

/* One code point of `range`, sorted, and then `next`: an instruction. */
typedef uint32_t ns_spell(void *with, struct ns_program *p,
                          const struct ns_range *range, size_t n,
                          uint32_t next);

/* Writes the language into a program, then `next`. */
uint32_t ns_language_write(const struct ns_language *language,
                           struct ns_program *p, ns_spell *spell, void *with,
                           uint32_t next);

#endif
