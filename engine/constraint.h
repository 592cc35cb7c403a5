/* constraint.h - a request's grammar held against tokens.
 *
 * One ns_constraints serves an engine: the tokens' bytes, an automaton for each
 * grammar in use (equal ones share it), and masks of the tokens that may follow
 * in a state. A ns_guide is a sequence's place in its grammar:
 *
 *     BEFORE --opens a thought--> THOUGHT --closes it--> the grammar's states
 *        `-----------------------------------------------^    |
 *                                            an end token: OVER
 *
 * A guide that begins neither before nor in a thought begins in the grammar. In
 * a thought all but control tokens may follow; in the grammar the tokens whose bytes
 * go on in it, and end tokens exactly where the text so far is whole. Behind an
 * end nothing counts.
 *
 * When an automaton is full it forgets its states, and its guides find their
 * places again from the tokens of their answers: all that a guide knows can be
 * found again from those.
 *
 * Owns:    its tables; all memory is bounded: NS_MASK_BYTES of masks, and
 *          NS_AUTOMATON_BYTES for each grammar of a running sequence and for
 *          NS_SPARE_AUTOMATA more.
 * Borrows: a guide its grammar; the engine its tokenizer.
 * Thread:  the engine thread.
 */
#ifndef NS_ENGINE_CONSTRAINT_H
#define NS_ENGINE_CONSTRAINT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/automaton.h"
#include "engine/grammar.h"
#include "engine/tokenizer.h"
#include "kernels/backend.h"

enum {
    NS_MASK_BYTES = 64 << 20,
    NS_AUTOMATON_BYTES = 16 << 20,
    NS_SPARE_AUTOMATA = 8,
};

struct ns_constraints; /* opaque */
struct ns_guide;       /* opaque */

struct ns_constraint_options {
    const struct ns_tokenizer *tokenizer; /* borrowed */
    uint32_t vocab;                       /* of the model */
    const int32_t *end_id;                /* what ends an answer, */
    uint32_t n_end;
    int32_t call_id; /* but for this one, which calls a tool; -1: none */
    uint32_t max_sequences; /* that run at once */
    uint32_t canvas_length; /* the longest */
    size_t automaton_bytes; /* 0: NS_AUTOMATON_BYTES */
};

enum ns_status ns_constraints_create(
    const struct ns_constraint_options *options, struct ns_constraints **out,
    struct ns_error *err);
void ns_constraints_destroy(struct ns_constraints *c); /* takes NULL */

/* Masks handed out so far may be made anew from now on. */
void ns_constraints_begin_pass(struct ns_constraints *c);

/* `thinking`: the answer may begin with a thought; `in_thought`: it begins in
 * one. */
enum ns_status ns_guide_create(struct ns_constraints *c,
                               const struct ns_grammar *grammar, bool thinking,
                               bool in_thought, struct ns_guide **out,
                               struct ns_error *err);
void ns_guide_destroy(struct ns_guide *guide); /* takes NULL */

/* Lets go of the automaton; the next ns_guide_follow takes it again. */
void ns_guide_release(struct ns_guide *guide);

/* Brings the guide to behind the answer's `n` tokens, none of them an end
 * token. They are those of the last call with more behind them, and stay where
 * they are until the next. */
void ns_guide_follow(struct ns_guide *guide, const int32_t *answer,
                     uint32_t n);

/* The text is whole, and nothing can follow. */
bool ns_guide_ended(const struct ns_guide *guide);

/* NS_OK, or why the guide can't go on: code `grammar_limit` (NS_REJECT) where
 * the grammar's states do not fit, NS_FATAL without memory. */
enum ns_status ns_guide_check(const struct ns_guide *guide,
                              struct ns_error *err);

/* Judges a whole answer's content. NS_REJECT with code `grammar_incomplete`
 * when it is not a text of the grammar; `cut` says what ended it. */
enum ns_status ns_guide_judge(struct ns_guide *guide, const char *content,
                              size_t length, const char *cut,
                              struct ns_error *err);

/* Masks for the draw behind what was followed, and (out[1..]) behind each token
 * of a draft of `n` tokens: n + 1 in all, good until the next pass begins.
 * Returns how many there are (with a draft 2 at least) unless ns_guide_check
 * fails, then 0: the rest of the draft is to be left for later. NULL in `out`: behind a token
 * that the grammar does not allow, where no draw is ever looked at. */
uint32_t ns_guide_masks(struct ns_guide *guide, const int32_t *draft,
                        uint32_t n, const uint32_t **out);

/* The likeliest text of the grammar over a canvas, behind what was followed: of
 * all paths through the positions' candidates the one of the highest sum of
 * their logits, as far as NS_PATH_BEAM states at each position can tell.
 * Where no candidate goes on, the path takes a shortest end's token, so that
 * there is always one. top: [length][NS_HEAD_TOP]. path: [length] out; behind
 * the end the likeliest tokens. False, and `path` left alone, when
 * ns_guide_check fails. */
enum { NS_PATH_BEAM = 16 };
bool ns_guide_path(struct ns_guide *guide,
                   const struct ns_candidate (*top)[NS_HEAD_TOP],
                   uint32_t length, int32_t *path);

#endif
