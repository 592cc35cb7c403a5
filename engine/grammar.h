/* grammar.h - what an answer may look like, as a program over bytes.
 *
 * A JSON Schema, a regular expression or a list of choices is compiled once,
 * where a request is prepared, into a small non-deterministic machine: byte
 * ranges, splits, calls and returns. Calls make recursion exact (`$ref`), at
 * any depth. A machine accepts well-formed UTF-8 alone, and from each of its
 * states an end can be reached: what could never lead to a whole document is
 * cut off here. automaton.h runs it.
 *
 * What a source asks and no machine of this kind can hold to is refused with
 * the name of the keyword, never left out: docs/STRUCTURED.md has the table.
 *
 * Owns:   its program, one block of memory; const once it is made.
 * Thread: any; nothing is shared.
 * Errors: NS_REJECT with the code `bad_param` (no source of that kind, or one
 *         that nothing satisfies), `unsupported` (understood, and not to be
 *         enforced exactly) or `grammar_limit` (too large: a limit below), the
 *         text naming place and keyword; NS_FATAL when memory runs out.
 */
#ifndef NS_ENGINE_GRAMMAR_H
#define NS_ENGINE_GRAMMAR_H

#include <jansson.h>
#include <stddef.h>

#include "base/error.h"

enum {
    NS_GRAMMAR_CODE = 1 << 18,  /* instructions of a program */
    NS_GRAMMAR_SETS = 1 << 12,  /* sets of bytes in it */
    NS_GRAMMAR_STEPS = 1 << 22, /* work of one compilation, in instructions */
    NS_GRAMMAR_BYTES = 1 << 20, /* the shortest text that satisfies it */
    NS_REGEX_BYTES = 1 << 16,   /* a pattern */
    NS_REGEX_DEPTH = 64,        /* groups inside groups */
    NS_REGEX_PROPERTIES = 8,    /* \p{...} in a pattern */
    NS_REGEX_REPEAT = 1 << 16,  /* m and n of {m,n} */
    NS_CHOICE_BYTES = 1 << 20,  /* all choices together */
};

struct ns_grammar; /* opaque */

/* A JSON text that the schema (draft 2020-12; jansson's tree, borrowed for the
 * call) accepts, and no other. Members stand in the order of `properties`,
 * those without a schema of their own behind them; white space, spelling of
 * strings and digits of numbers are bounded: docs/STRUCTURED.md. One thing is
 * not held to: a name that is not declared may come twice. */
enum ns_status ns_grammar_json_schema(const json_t *schema,
                                      struct ns_grammar **out,
                                      struct ns_error *err);

/* Any JSON object. */
enum ns_status ns_grammar_json_object(struct ns_grammar **out,
                                      struct ns_error *err);

/* A text that matches as a whole. Of ECMAScript's expressions: characters,
 * classes, `.`, \d \w \s, \p{...} (general categories and scripts) and their
 * complements, escapes, groups, alternatives, * + ? {m,n}, and ^ $ where they
 * change nothing. Look-around, references back and \b are `unsupported`. */
enum ns_status ns_grammar_regex(const char *pattern, size_t length,
                                struct ns_grammar **out, struct ns_error *err);

/* One of `n` texts, byte for byte; each is well-formed UTF-8 and not empty. */
enum ns_status ns_grammar_choice(const char *const *choice, size_t n,
                                 struct ns_grammar **out, struct ns_error *err);

void ns_grammar_destroy(struct ns_grammar *grammar); /* takes NULL */

/* Of the program: equal ones have equal hashes, whatever they came from, and
 * may share an automaton. */
void ns_grammar_hash(const struct ns_grammar *grammar, unsigned char out[16]);

#endif
