#include "engine/draft.h"

enum {
    LONGEST_MATCH = 32,
    SHORTEST_MATCH = 2, /* elsewhere than where it is expected */
    MOST_REPLACED = 6,  /* last tokens of the answer that stand nowhere */
    REACH = 12,         /* how far from where it should be `next` is sought */
};

static uint32_t
distance(uint32_t a, uint32_t b)
{
    return a > b ? a - b : b - a;
}

/* Behind the longest match of the answer's last tokens, the nearest to where
 * the answer is of equals; 0 where there is none. */
static uint32_t
behind_match(const int32_t *draft, uint32_t n_draft, const int32_t *answer,
             uint32_t n_answer)
{
    uint32_t best = 0, longest = 0;

    for (uint32_t at = 1; at <= n_draft; at++) {
        uint32_t match = 0;

        while (match < LONGEST_MATCH && match < at && match < n_answer &&
               draft[at - 1 - match] == answer[n_answer - 1 - match])
            match++;
        if (match == 0 || (match < SHORTEST_MATCH && at != n_answer))
            continue;
        if (match > longest || (match == longest &&
                                distance(at, n_answer) <
                                    distance(best, n_answer))) {
            longest = match;
            best = at;
        }
    }
    return best;
}

/* The nearest to `at` that is `next`, ahead first; n_draft: none near. */
static uint32_t
nearest(const int32_t *draft, uint32_t n_draft, uint32_t at, int32_t next)
{
    for (uint32_t d = 0; d <= REACH; d++) {
        if (at + d < n_draft && draft[at + d] == next)
            return at + d;
        if (d <= at && at - d < n_draft && draft[at - d] == next)
            return at - d;
    }
    return n_draft;
}

uint32_t
ns_draft_place(const int32_t *draft, uint32_t n_draft, const int32_t *answer,
               uint32_t n_answer, int32_t next)
{
    uint32_t at = 0;

    for (uint32_t n = 0; at == 0 && n <= MOST_REPLACED && n < n_answer; n++) {
        at = behind_match(draft, n_draft, answer, n_answer - n);
        if (at > 0)
            at += n;
    }
    if (at == 0 && n_answer > MOST_REPLACED)
        return n_draft;
    if (at == 0) /* nothing of a short answer stands anywhere */
        at = n_answer;
    if (next >= 0)
        return nearest(draft, n_draft, at, next);
    return at < n_draft ? at : n_draft;
}
