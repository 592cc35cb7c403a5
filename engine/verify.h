/* verify.h - hybrid: how much of a draft the autoregressive model would write.
 *
 * The commit pass over a draft yields, at row i, the token that `ar` takes for
 * position i + 1; what it takes for position 0 is known from the last
 * committed row. A draft token is kept while it equals that choice; the first
 * that differs is replaced by it, and a wholly kept draft yields one token
 * more. So the output is that of `ar`, whatever the draft was.
 */
#ifndef NS_ENGINE_VERIFY_H
#define NS_ENGINE_VERIFY_H

#include <stdint.h>

struct ns_verdict {
    uint32_t n_kept; /* leading draft tokens that stand */
    int32_t next;    /* the autoregressive token behind them */
};

/* `first`: the choice for draft[0]; `row_choice[i]`: the choice behind
 * draft[i], n of them. */
static inline struct ns_verdict
ns_verify(const int32_t *draft, uint32_t n, int32_t first,
          const int32_t *row_choice)
{
    struct ns_verdict verdict = { 0, first };

    while (verdict.n_kept < n && draft[verdict.n_kept] == verdict.next)
        verdict.next = row_choice[verdict.n_kept++];
    return verdict;
}

#endif
