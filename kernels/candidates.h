/* candidates.h - the highest logits of a row, kept while they go by.
 *
 * A short list in falling order, the lowest id first among equals. Ids are
 * offered in rising order, or lists are merged in that of their ids: then an
 * equal one always goes behind, and the list is the same however the vocabulary
 * was cut.
 */
#ifndef NS_KERNELS_CANDIDATES_H
#define NS_KERNELS_CANDIDATES_H

#include <math.h>

#include "kernels/backend.h"

/* Offers a token to a list of `n`; returns how many it then has. Tokens that a
 * mask has taken are not candidates. */
static inline uint32_t
candidate_add(struct ns_candidate list[NS_HEAD_TOP], uint32_t n, int32_t id,
              float z)
{
    uint32_t at;

    if (!(z > -INFINITY) ||
        (n == NS_HEAD_TOP && !(z > list[NS_HEAD_TOP - 1].z)))
        return n;
    if (n < NS_HEAD_TOP)
        n++;
    for (at = n - 1; at > 0 && z > list[at - 1].z; at--)
        list[at] = list[at - 1];
    list[at] = (struct ns_candidate){ id, z };
    return n;
}

/* Copies a list of `n` out, and says where it ends. */
static inline void
candidates_end(struct ns_candidate out[NS_HEAD_TOP],
               const struct ns_candidate *list, uint32_t n)
{
    for (uint32_t i = 0; i < NS_HEAD_TOP; i++)
        out[i] = i < n ? list[i] : (struct ns_candidate){ -1, -INFINITY };
}

#endif
