/* kv.h - where a position's K and V lie in a page (layout: backend.h). */
#ifndef NS_KERNELS_CPU_KV_H
#define NS_KERNELS_CPU_KV_H

#include <string.h>

#include "kernels/backend.h"

/* NULL for a row that no segment holds. */
static inline const struct ns_segment *
segment_of_row(const struct ns_pass *pass, uint32_t row)
{
    for (uint32_t s = 0; s < pass->n_segments; s++)
        if (row - pass->segments[s].row0 < pass->segments[s].n_rows)
            return &pass->segments[s]; /* unsigned: rows before wrap around */
    return NULL;
}

static inline unsigned char *
kv_page(const struct ns_pass *pass, const struct ns_kv_layer *kv,
        const int32_t *pages, uint32_t slot, uint32_t position)
{
    size_t at = (size_t)slot * pass->page_stride + position / NS_PAGE;

    return (unsigned char *)kv->base + (size_t)pages[at] * kv->page_bytes;
}

/* Floats of one position of one head beside V: K, or its rotated slice. */
static inline uint32_t
kv_k_floats(const struct ns_kv_layer *kv)
{
    return kv->compact ? 2 * kv->n_rotated : kv->head_dim;
}

static inline float *
kv_head(const struct ns_kv_layer *kv, unsigned char *page, uint32_t head)
{
    size_t floats = (size_t)NS_PAGE * (kv->head_dim + kv_k_floats(kv));

    return (float *)(void *)page + head * floats;
}

/* V of the page's position `at`. */
static inline float *
kv_v(const struct ns_kv_layer *kv, unsigned char *page, uint32_t head,
     uint32_t at)
{
    size_t front = kv->compact ? 0 : (size_t)NS_PAGE * kv->head_dim;

    return kv_head(kv, page, head) + front + (size_t)at * kv->head_dim;
}

/* K of the page's position `at`, or its rotated slice. */
static inline float *
kv_k(const struct ns_kv_layer *kv, unsigned char *page, uint32_t head,
     uint32_t at)
{
    size_t front = kv->compact ? (size_t)NS_PAGE * kv->head_dim : 0;

    return kv_head(kv, page, head) + front + (size_t)at * kv_k_floats(kv);
}

/* Writes one position of one head: k and v are whole, [head_dim]. */
static inline void
kv_store(const struct ns_kv_layer *kv, unsigned char *page, uint32_t head,
         uint32_t at, const float *k, const float *v)
{
    float *to = kv_k(kv, page, head, at);
    size_t slice = kv->n_rotated * sizeof(float);

    memcpy(kv_v(kv, page, head, at), v, kv->head_dim * sizeof(float));
    if (kv->compact) {
        memcpy(to, k, slice);
        memcpy(to + kv->n_rotated, k + kv->head_dim / 2, slice);
    } else {
        memcpy(to, k, kv->head_dim * sizeof(float));
    }
}

#endif
