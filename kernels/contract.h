/* contract.h - what the caller of an operation must have kept to, for both
 * backends alike.
 *
 * Shapes that fit each other, no more than reserve() was told of, indices in
 * range where they lie in host memory. A breach is a bug of ours and no input
 * can bring it about: these are assertions. What only one backend can see (an
 * index in its own memory) it looks at itself.
 */
#ifndef NS_KERNELS_CONTRACT_H
#define NS_KERNELS_CONTRACT_H

#include <assert.h>

#include "kernels/backend.h"

static inline bool
ns_same_shape(struct ns_rows a, struct ns_rows b)
{
    return a.n_rows == b.n_rows && a.n_cols == b.n_cols;
}

/* Rows of a pass, or of the patches of pictures, where an op is for both. */
static inline bool
ns_reserved(const struct ns_backend_sizes *sizes, uint32_t n_rows,
            bool patches)
{
    return n_rows <= sizes->n_rows || (patches && n_rows <= sizes->n_patches);
}

static inline void
ns_contract_gather(struct ns_rows y, struct ns_rows x, const uint32_t *index)
{
    assert(y.n_cols == x.n_cols);
    for (uint32_t i = 0; i < y.n_rows; i++)
        assert(index[i] < x.n_rows);
    (void)index;
}

/* `packing`: LINEAR or GATED. */
static inline void
ns_contract_product(const struct ns_backend_sizes *sizes, struct ns_rows y,
                    struct ns_rows x, const struct ns_weight *w,
                    enum ns_packing packing)
{
    assert(w->packing == packing && w->count == 1);
    assert(y.n_rows == x.n_rows && y.n_cols == w->n && x.n_cols == w->k);
    assert(ns_reserved(sizes, x.n_rows, true));
    (void)sizes, (void)y, (void)x, (void)w, (void)packing;
}

static inline void
ns_contract_qkv(const struct ns_backend_sizes *sizes,
                const struct ns_pass *pass, const struct ns_qkv *args)
{
    const struct ns_kv_layer *kv = &args->kv;
    uint32_t kv_cols = kv->n_kv_heads * kv->head_dim;

    assert(args->q.n_cols == args->n_heads * kv->head_dim);
    assert(args->k.n_cols == kv_cols && args->v.n_cols == kv_cols);
    assert(args->qkv.n_cols ==
           args->q.n_cols + kv_cols * (args->has_v ? 2u : 1u));
    assert(args->qkv.n_rows == pass->n_rows);
    assert(ns_reserved(sizes, pass->n_rows, false));
    assert(kv->head_dim % 2 == 0 && kv->n_rotated <= kv->head_dim / 2);
    assert(!(kv->compact && args->has_v));
    (void)sizes, (void)pass, (void)kv_cols;
}

static inline void
ns_contract_attention(const struct ns_backend_sizes *sizes,
                      const struct ns_pass *pass,
                      const struct ns_attention *args)
{
    const struct ns_kv_layer *kv = &args->kv;

    assert(ns_same_shape(args->out, args->q));
    assert(args->q.n_cols == args->n_heads * kv->head_dim);
    assert(args->n_heads % kv->n_kv_heads == 0);
    assert(args->q.n_rows == pass->n_rows);
    assert(ns_reserved(sizes, pass->n_rows, true));
    assert(!kv->compact || args->k_norm);
    (void)sizes, (void)pass, (void)kv;
}

static inline void
ns_contract_experts(const struct ns_backend_sizes *sizes, struct ns_rows y,
                    struct ns_rows x, uint32_t top_k,
                    const struct ns_weight *gate_up,
                    const struct ns_weight *down)
{
    assert(gate_up->packing == NS_PACK_GATED);
    assert(down->packing == NS_PACK_LINEAR && down->count == gate_up->count);
    assert(x.n_cols == gate_up->k && y.n_cols == down->n);
    assert(gate_up->n == down->k && y.n_rows == x.n_rows);
    assert(ns_reserved(sizes, x.n_rows, false) && top_k <= sizes->top_k);
    assert(gate_up->count <= sizes->n_experts && down->k <= sizes->expert_dim);
    (void)sizes, (void)y, (void)x, (void)top_k, (void)gate_up, (void)down;
}

static inline void
ns_contract_head(const struct ns_backend_sizes *sizes,
                 const struct ns_head *args)
{
    assert(args->table->packing == NS_PACK_TABLE);
    assert(args->h.n_cols == args->table->k);
    assert(args->h.n_rows <= sizes->n_head_rows);
    assert(args->table->n <= sizes->vocab && args->table->k <= sizes->hidden);
    assert(args->n_soft <= args->h.n_rows);
    assert(args->n_soft == 0 || args->soft.n_cols == args->h.n_cols);
    for (uint32_t i = 0; args->mask && i < args->n_soft; i++)
        assert(!args->mask[i]);
    (void)sizes, (void)args;
}

static inline void
ns_contract_patch_qkv(const struct ns_patch_qkv *args)
{
    assert(ns_same_shape(args->q, args->k) && ns_same_shape(args->k, args->v));
    assert(args->qkv.n_rows == args->q.n_rows);
    assert(args->qkv.n_cols == 3 * args->q.n_cols);
    assert(args->q.n_cols % (4 * args->n_heads) == 0);
    (void)args;
}

static inline void
ns_contract_patch_pool(struct ns_rows y, struct ns_rows x,
                       const uint32_t *corner, const uint32_t *columns,
                       uint32_t side, const float *bias, const float *std)
{
    assert(side > 0 && y.n_cols == x.n_cols && !bias == !std);
    for (uint32_t i = 0; i < y.n_rows; i++)
        assert(columns[i] >= side && corner[i] < x.n_rows &&
               (side - 1) * columns[i] + side <= x.n_rows - corner[i]);
    (void)x, (void)corner, (void)columns, (void)side, (void)bias, (void)std;
}

#endif
