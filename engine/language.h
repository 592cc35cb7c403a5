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
#include "engine/table.h"

enum {
    NS_LANGUAGE_STATES = 1 << 17,
    NS_LANGUAGE_CELLS = 1 << 22,
    NS_LANGUAGE_STEPS = 1 << 26, /* work of all that one struct makes */
};

struct ns_language; /* opaque */

/* Where languages are made: those of patterns are kept, to be asked for again,
 * and the work of all together has a limit, so that a schema of many patterns
 * takes no longer than one. Zeroed, then fini. */
struct ns_languages {
    struct ns_kept_language {
        char *pattern;
        struct ns_language *language;
    } * kept;
    uint32_t n, capacity;
    struct ns_table known; /* of kept + 1 */
    uint64_t n_steps;
};
void ns_languages_fini(struct ns_languages *in);

/* All strings in which the pattern is found (ECMAScript's; regex.h). *out
 * stays with `in`. */
enum ns_status ns_language_pattern(struct ns_languages *in, const char *pattern,
                                   size_t length,
                                   const struct ns_language **out,
                                   struct ns_error *err);

/* The other three make one that is the caller's: all strings of `least` to
 * `most` code points (UINT32_MAX is no limit); these texts, in UTF-8; what two
 * have together. */
enum ns_status ns_language_length(struct ns_languages *in, uint32_t least,
                                  uint32_t most, struct ns_language **out,
                                  struct ns_error *err);

enum ns_status ns_language_texts(struct ns_languages *in,
                                 const char *const *text, size_t n,
                                 struct ns_language **out,
                                 struct ns_error *err);

enum ns_language_op {
    NS_LANGUAGE_BOTH,
    NS_LANGUAGE_EITHER,
    NS_LANGUAGE_FIRST_ONLY, /* in a, and not in b */
};

enum ns_status
ns_language_combine(struct ns_languages *in, const struct ns_language *a,
                    enum ns_language_op op, const struct ns_language *b,
                    struct ns_language **out, struct ns_error *err);

void ns_language_destroy(struct ns_language *language); /* takes NULL */

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
