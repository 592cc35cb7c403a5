/* constraint_private.h - what the halves of a constraint share.
 *
 * Private to constraint.c (automata, masks, guides) and path.c (canvases).
 */
#ifndef NS_ENGINE_CONSTRAINT_PRIVATE_H
#define NS_ENGINE_CONSTRAINT_PRIVATE_H

#include "engine/constraint.h"
#include "engine/vocabulary.h"

/* Places that no automaton has. */
#define BEFORE (UINT32_MAX - 1)
#define THOUGHT (UINT32_MAX - 2)
#define OVER (UINT32_MAX - 3)

/* An automaton and who runs it. */
struct held {
    struct ns_automaton *automaton;
    unsigned char hash[16];
    uint64_t serial; /* its states are those of this number; of all helds */
    uint32_t n_guides;
    uint64_t used; /* when it was last taken, for who leaves first */
    struct held *next;
};

struct mask {
    uint32_t *bits;
    uint64_t serial; /* of the automaton; 0: none */
    uint32_t state;
    uint64_t pass;   /* that last used it */
    struct mask *next; /* in its bucket */
};

struct step { /* a place on a path, and how it was reached */
    uint32_t place;
    int32_t token;
    uint32_t from; /* in the position before */
    float score;
};

struct ns_constraints {
    struct ns_constraint_options options;
    struct ns_vocabulary *vocabulary; /* made with the first guide */
    int32_t open_id, close_id;        /* of a thought; -1: none */
    int32_t *end_id;                  /* [n_end] what ends a text */
    uint32_t n_end;
    struct held *held;
    uint64_t n_serials, n_takes, pass;
    struct mask *mask; /* [n_masks] */
    uint32_t n_masks, next_mask, masks_each;
    struct mask **bucket; /* [n_masks] */
    struct step *step;    /* [canvas_length + 1][NS_PATH_BEAM] */
};

struct ns_guide {
    struct ns_constraints *c;
    const struct ns_grammar *grammar;
    uint32_t first; /* place; 0: the automaton's start */
    struct held *held;
    uint64_t serial; /* under which `place` was found */
    uint32_t place;
    const int32_t *answer; /* borrowed: what was followed last */
    uint32_t n_answer, n_followed; /* tokens; of them up to `place` */
    struct ns_error failure; /* status NS_OK while it goes on */
};

/* The place behind a token; NS_AUTOMATON_DEAD, or NS_AUTOMATON_FULL. */
uint32_t ns_guide_next(struct ns_guide *guide, uint32_t place, int32_t id);

/* Runs `work` behind what was followed; it returns false when the automaton is
 * full. Then the automaton forgets its states, the guide finds its place again,
 * and the work begins anew. Full a second time, the guide has failed. */
bool ns_guide_work(struct ns_guide *guide, bool (*work)(void *ctx), void *ctx);

/* The tokenizer lacks what the grammar needs. */
void ns_guide_fail_unspeakable(struct ns_guide *guide);

#endif
