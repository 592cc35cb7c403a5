/* program.h - the instructions of a grammar, and how they are put together.
 *
 * Private to grammar*.c, program.c, language.c and automaton.c.
 *
 * A program is built from its end: each function takes the instruction that
 * comes next and returns the one that stands before it, so that there is
 * nothing to patch but loops, and two parts that end alike share their end:
 * an instruction that is already there is found again, not made twice.
 *
 *     end = ns_program_end(p, NS_OP_MATCH);
 *     at = ns_program_text(p, "true", 4, end);     now `at` accepts "true"
 *
 * A rule is a part that ends with NS_OP_RETURN and is called by its number,
 * which may be taken before its body is there. The first failure (a limit,
 * or memory) sticks: from then on all is NS_PROGRAM_FAIL, and ns_program_link
 * says why.
 *
 * Where patterns are prepared for language.c the ranges are of code points,
 * not of bytes, and NS_OP_BEGIN and NS_OP_END stand for ^ and $. Such a
 * program is not linked.
 *
 * Thread: one at a time.
 */
#ifndef NS_ENGINE_PROGRAM_H
#define NS_ENGINE_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/grammar.h"

enum ns_op {
    NS_OP_FAIL,   /* no way on: what leads here alone is cut off */
    NS_OP_RANGE,  /* one byte of a..b, then next */
    NS_OP_SET,    /* one byte of set a, then next */
    NS_OP_SPLIT,  /* both a and b */
    NS_OP_CALL,   /* rule a, then next; when linked, a is its first one */
    NS_OP_RETURN, /* to behind the call */
    NS_OP_MATCH,  /* the whole text is accepted here */
    NS_OP_BEGIN,  /* only before the first character, then next */
    NS_OP_END,    /* only behind the last one, then next */
};

struct ns_instruction {
    uint32_t op, a, b, next;
};

struct ns_byte_set {
    uint64_t word[4];
};

static inline bool
ns_byte_set_has(const struct ns_byte_set *set, unsigned byte)
{
    return set->word[byte >> 6] >> (byte & 63) & 1;
}

static inline void
ns_byte_set_add(struct ns_byte_set *set, unsigned first, unsigned last)
{
    for (unsigned byte = first; byte <= last; byte++)
        set->word[byte >> 6] |= 1ull << (byte & 63);
}

/* Linked: it begins at instruction 0; all are reachable and have an end. The
 * arrays lie behind the struct, in its block. */
struct ns_grammar {
    struct ns_instruction *code;
    struct ns_byte_set *set;
    uint32_t *rest; /* least number of bytes from each to RETURN or MATCH */
    uint32_t n_code, n_sets;
    unsigned char hash[16];
};

/* Code points or bytes, both ends included. */
struct ns_range {
    uint32_t first, last;
};

enum { NS_LAST_CODE = 0x10ffff };

enum { NS_PROGRAM_FAIL = 0 };

struct ns_program; /* opaque: one that grows */

/* NULL when memory has run out. */
struct ns_program *ns_program_create(void);
void ns_program_destroy(struct ns_program *p); /* takes NULL */

uint32_t ns_program_end(struct ns_program *p, enum ns_op op);
uint32_t ns_program_range(struct ns_program *p, uint32_t first, uint32_t last,
                          uint32_t next);
uint32_t ns_program_set(struct ns_program *p, const struct ns_byte_set *set,
                        uint32_t next);
uint32_t ns_program_text(struct ns_program *p, const char *text, size_t length,
                         uint32_t next);
/* One of `n` texts. */
uint32_t ns_program_choice(struct ns_program *p, const char *const *text,
                           size_t n, uint32_t next);
uint32_t ns_program_anchor(struct ns_program *p, enum ns_op op, uint32_t next);
/* Either; the other one where one is NS_PROGRAM_FAIL. */
uint32_t ns_program_split(struct ns_program *p, uint32_t a, uint32_t b);
/* One code point of sorted ranges, written in UTF-8. */
uint32_t ns_program_utf8(struct ns_program *p, const struct ns_range *range,
                         size_t n, uint32_t next);

/* How numbers are written digit by digit: the digit of `bits` bits from first
 * to last and then `next`; `lead` is what the first digit of a number is
 * given, the others get `trail`. */
struct ns_radix {
    unsigned bits;
    uint32_t trail;
    uint32_t (*digit)(struct ns_program *p, uint32_t lead, uint32_t first,
                      uint32_t last, uint32_t next);
};
/* All numbers from first to last; `shift`: the bits behind the first digit. */
uint32_t ns_program_span(struct ns_program *p, const struct ns_radix *radix,
                         uint32_t lead, uint32_t first, uint32_t last,
                         unsigned shift, uint32_t next);

/* A split whose first side is given later: the head of a loop. */
uint32_t ns_program_loop(struct ns_program *p, uint32_t leave);
void ns_program_close(struct ns_program *p, uint32_t loop, uint32_t body);

/* A rule's number, and then its first instruction. Nothing may call itself
 * before it has taken a byte: the caller sees to it. */
uint32_t ns_program_rule(struct ns_program *p);
void ns_program_define(struct ns_program *p, uint32_t rule, uint32_t first);
uint32_t ns_program_call(struct ns_program *p, uint32_t rule, uint32_t next);

void ns_program_no_memory(struct ns_program *p); /* a caller's own */
/* Counts work that makes no instruction; false once anything has failed. */
bool ns_program_step(struct ns_program *p);
bool ns_program_work(struct ns_program *p, size_t steps);
/* What an instruction says; valid until the next one is made. */
const struct ns_instruction *ns_program_at(const struct ns_program *p,
                                           uint32_t at);
uint32_t ns_program_size(const struct ns_program *p);
uint32_t ns_program_steps(const struct ns_program *p); /* so far */
/* NS_OK, or what has failed so far. */
enum ns_status ns_program_check(const struct ns_program *p,
                                struct ns_error *err);

/* Cuts off what has no end and makes the grammar that begins at `start`. */
enum ns_status ns_program_link(struct ns_program *p, uint32_t start,
                               struct ns_grammar **out, struct ns_error *err);

#endif
