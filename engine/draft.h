/* draft.h - where an answer stands in a text that was given to start from.
 *
 * A job may bring yesterday's summary or the file to edit. It is tokens like
 * any, tried and never trusted: a diffusion canvas starts from what follows in
 * it in the place of noise, hybrid has it judged before it denoises. Where the
 * answer has left the text, it is found again by its own last tokens, so that
 * insertions and deletions shift what follows and do not lose it; a few last
 * tokens that stand nowhere are taken to have replaced as many.
 *
 * A function of draft and answer alone: a resumed job finds the same place.
 */
#ifndef NS_ENGINE_DRAFT_H
#define NS_ENGINE_DRAFT_H

#include <stdint.h>

/* Index of the draft's token that would be answer[n_answer]; n_draft: it is
 * nowhere, or the draft is at its end. `next`: that token, where it is known;
 * < 0: it is not. */
uint32_t ns_draft_place(const int32_t *draft, uint32_t n_draft,
                        const int32_t *answer, uint32_t n_answer,
                        int32_t next);

#endif
