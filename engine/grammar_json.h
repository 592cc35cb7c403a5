/* grammar_json.h - the pieces of a JSON text, as parts of a program.
 *
 * Each function takes the instruction that follows and returns the one that
 * stands before the piece (program.h).
 *
 * White space is bounded, so that none can go on for ever: nothing, or behind
 * { [ and , and before ] } a newline and up to NS_JSON_INDENT spaces; behind
 * , and : one space. A string is spelled in any way that JSON has (raw, short
 * escapes, \u in either case, surrogates in pairs), a name and a given text in
 * the shortest. U+0000 stands nowhere: PostgreSQL and many readers refuse it.
 *
 * Private to grammar_*.c and schema.c.
 *
 * Thread: one at a time, with the program.
 */
#ifndef NS_ENGINE_GRAMMAR_JSON_H
#define NS_ENGINE_GRAMMAR_JSON_H

#include <jansson.h>

#include "engine/decimal.h"
#include "engine/language.h"
#include "engine/program.h"
#include "engine/table.h"

enum { NS_JSON_INDENT = 32 };

enum ns_spelling { NS_SPELL_ANY, NS_SPELL_SHORTEST };

/* A class of characters as it was once written: a rule to call. */
struct ns_json_class {
    uint32_t first, n; /* its ranges, in `range` */
    uint32_t rule;
    enum ns_spelling spelling;
};

struct ns_json_writer {
    struct ns_program *p; /* borrowed */
    enum ns_spelling spelling;
    struct ns_json_class *class;
    struct ns_range *range;
    uint32_t n_classes, class_capacity, n_ranges, range_capacity;
    struct ns_table known; /* class + 1 */
    uint32_t line, item;   /* rules of white space */
};

void ns_json_writer_init(struct ns_json_writer *w, struct ns_program *p);
void ns_json_writer_fini(struct ns_json_writer *w);

/* Behind a bracket or before one; behind a comma; behind a colon. */
uint32_t ns_json_line(struct ns_json_writer *w, uint32_t next);
uint32_t ns_json_comma(struct ns_json_writer *w, uint32_t next);
uint32_t ns_json_colon(struct ns_json_writer *w, uint32_t next);

/* A string of `language`, quotes and all. */
uint32_t ns_json_string(struct ns_json_writer *w,
                        const struct ns_language *language,
                        enum ns_spelling spelling, uint32_t next);

/* A given text of well-formed UTF-8 without U+0000. */
uint32_t ns_json_text(struct ns_json_writer *w, const char *text,
                      uint32_t next);

/* A given value; it holds no U+0000. */
uint32_t ns_json_value(struct ns_json_writer *w, const json_t *value,
                       uint32_t next);

/* The one text of a value that is no array or object, as the two above write
 * it; malloc's, NULL when memory has run out. */
char *ns_json_spell(const json_t *value);
uint32_t ns_json_scalar(struct ns_json_writer *w, const json_t *value,
                        uint32_t next);

/* What a number must keep to. Without bound or step it has at most
 * NS_DECIMAL_DIGITS digits before the point, as many behind, and an exponent
 * of two; with, it has that many in all and no exponent, so that each text is
 * a double of its own and the bounds hold for the doubles too. Whole numbers
 * are written without a point and lie within 64 bits. */
struct ns_number_limits {
    bool whole;
    const struct ns_decimal *low, *high; /* or NULL */
    bool low_open, high_open;            /* the bound itself is outside */
    uint32_t step; /* a multiple of step * 10^-step_digits; or 0 */
    uint32_t step_digits;
};

enum { NS_NUMBER_STEP = 1000 }; /* the largest step */

uint32_t ns_json_number(struct ns_json_writer *w,
                        const struct ns_number_limits *limits, uint32_t next);

#endif
