/* sequence.h - one request in flight: its tokens, its phase, its answer.
 *
 * A sequence is a list of known tokens, of which the first n_cached stand in
 * the prefix KV. Whatever becomes known (the prompt, a finished block, an
 * autoregressive token, forced tokens) is encoded behind the prefix by the
 * next passes; once all is encoded, more becomes known in the way of its mode:
 *
 *     diffusion   a canvas is denoised; its argmax becomes known
 *     ar          the head of the last row draws the next token
 *     hybrid      a canvas is denoised; its argmax is a draft. A commit pass
 *                 judges it; what is kept is encoded by then
 *
 * Tokens are taken one by one, so that end tokens, stop strings, the thinking
 * budget and max_tokens cut exactly, in every mode alike.
 *
 * Owns:    copies of what changes. Borrows what the request borrows.
 * Thread:  engine thread.
 */
#ifndef NS_ENGINE_SEQUENCE_H
#define NS_ENGINE_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/batch.h"
#include "engine/canvas.h"
#include "engine/constraint.h"
#include "engine/engine.h"
#include "engine/kvcache.h"
#include "engine/planner.h"
#include "engine/reply.h"

/* What all sequences of an engine share; const. */
struct ns_answer_rules {
    uint32_t vocab, max_position;
    int32_t pad_id;
    const int32_t *eos_id;
    uint32_t n_eos;
    int32_t tool_response_id; /* ends with finish tool_calls; -1: none */
    int32_t thought_end[8];   /* forced when the thinking budget is spent */
    uint32_t n_thought_end;
    const struct ns_tokenizer *tokenizer;
    struct ns_constraints *constraints;
    bool ar_capable; /* the checkpoint */
};

struct ns_sequence {
    struct ns_request request;
    const struct ns_answer_rules *rules;
    struct ns_kv_hold *hold;
    struct ns_reply *reply;
    struct ns_rank rank;
    int64_t submitted_ms;

    int32_t *known; /* prompt, then the answer */
    uint32_t n_known, capacity;
    uint32_t n_cached;
    uint32_t block_start; /* first answer token of the block being reported */
    uint32_t next_block;  /* index of that block */

    struct ns_whole *whole; /* [n_images]: the placeholders of each picture */
    struct ns_batch_group *group; /* [n_images]: the same, for the batch */

    struct ns_canvas canvas;
    struct ns_denoise_options denoise;
    bool canvas_open; /* a canvas is being denoised */
    bool drafted;     /* hybrid: canvas.argmax waits for its verdict */
    bool has_choice;  /* hybrid: `choice` is ar's token at n_known */
    int32_t choice;
    int32_t *carry; /* hybrid: the rest of the last draft */
    uint32_t n_carry;
    bool as_ar; /* hybrid that goes on as ar: its drafts do not pay */
    bool tail;  /* diffusion under a grammar whose canvas ran out of steps: the
                 * rest of the block is drawn, as ar does */
    struct ns_guide *guide; /* NULL: any answer will do */
    struct ns_candidate *top; /* [canvas length][NS_HEAD_TOP] of this pass */
    const uint32_t **mask;    /* [canvas length + 1] of this pass */
    bool from_text;         /* hybrid: what is judged is the request's draft */
    uint32_t text_credit;   /* verdicts on it that may yet go wrong */
    struct {
        uint32_t passes, tokens;
    } before_trial; /* of canvases: what was spent and gained before */

    bool running, finished;
    bool ended; /* by an end token, which counts as a token of the answer */
    enum ns_finish finish;
    struct ns_usage usage;
    double *uniform;    /* [canvas length]: of head rows this pass */
    struct ns_sequence *next; /* in the engine's lists */
};

enum ns_status ns_sequence_create(const struct ns_request *request,
                                  const struct ns_answer_rules *rules,
                                  struct ns_sequence **out,
                                  struct ns_error *err);
/* Takes NULL. The hold is the engine's to drop, before. */
void ns_sequence_destroy(struct ns_sequence *seq);

uint32_t ns_sequence_n_answer(const struct ns_sequence *seq);
const int32_t *ns_sequence_answer(const struct ns_sequence *seq);

/* What it wants of the next pass; opens a canvas where one is due. */
struct ns_want ns_sequence_want(struct ns_sequence *seq);

/* Whether drawing the next token is its way to go on: ar, or hybrid as ar. */
bool ns_sequence_is_ar(const struct ns_sequence *seq);

/* Takes a token into the answer. False when nothing may follow in this block:
 * the sequence has finished, or its thought was closed by force. */
bool ns_sequence_take(struct ns_sequence *seq, int32_t id);

/* The keyed uniform of ar's draw at answer position `at`; -1: argmax. */
double ns_sequence_ar_uniform(const struct ns_sequence *seq, uint32_t at);

/* Under a grammar: puts the likeliest path through this step's candidates in
 * the place of the argmax, and of the samples. */
void ns_sequence_keep_to_grammar(struct ns_sequence *seq, int32_t *argmax,
                                 int32_t *sampled);
/* Under a grammar: what may be drawn behind the known tokens, or, of a draft,
 * behind each of its tokens; the draft is cut to as many as there is room for
 * masks. NULL without a grammar. */
const uint32_t *const *ns_sequence_masks(struct ns_sequence *seq);
/* A canvas is done: its tokens become known (diffusion) or a draft (hybrid). */
void ns_sequence_canvas_done(struct ns_sequence *seq);
/* hybrid: the rows of the draft gave these choices. Sets n_cached. */
void ns_sequence_judge(struct ns_sequence *seq, const int32_t *row_choice);
/* ar and hybrid: the last encoded row gave this choice for n_known. */
void ns_sequence_choose(struct ns_sequence *seq, int32_t choice);

/* Judges what the answer has come to under its grammar, if it has one. */
enum ns_status ns_sequence_check_content(struct ns_sequence *seq,
                                         const struct ns_reply_text *reply,
                                         struct ns_error *err);

struct ns_engine_progress ns_sequence_progress(const struct ns_sequence *seq);

/* Back to the last reported block: what was cached is gone. */
void ns_sequence_put_back(struct ns_sequence *seq);

#endif
