/* qkv.cu - head-wise norms, rotation, and the writing of prefix KV.
 *
 * Contract: cpu/qkv_ref.c. A warp for each (row, head of q, k or v). The norm
 * and its weight round apart, so that K = V * k_norm holds to the bit on full
 * layers, which compact pages count on.
 */
#include "kernels/cuda/cuda.cuh"

enum { WARPS = 4 };

struct qkv {
    struct ns_rows qkv, q, k, v;
    const float *q_norm, *k_norm, *frequency;
    float eps;
    uint32_t n_heads, n_items;
    bool has_v;
    struct ns_kv_layer kv;
    const int32_t *pages;
    uint32_t page_stride, n_segments;
    const struct ns_segment *segments;
    const int32_t *position;
};

template <class T>
__device__ static inline T *
page_of(const struct qkv &args, uint32_t slot, uint32_t position)
{
    size_t page = (size_t)args.pages[(size_t)slot * args.page_stride +
                                     position / NS_PAGE];

    return (T *)(void *)((unsigned char *)args.kv.base +
                         page * args.kv.page_bytes);
}

/* Which of K's dimensions a page keeps, and where: below zero, nowhere. */
__device__ static inline int
kept_at(const struct ns_kv_layer &kv, uint32_t j)
{
    uint32_t half = kv.head_dim / 2, r = kv.n_rotated;

    if (!kv.compact)
        return (int)j;
    if (j < r)
        return (int)j;
    return j >= half && j < half + r ? (int)(r + j - half) : -1;
}

template <class T>
__global__ void
qkv_kernel(struct qkv args)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t d = args.kv.head_dim, half = d / 2, nkv = args.kv.n_kv_heads;
    uint32_t item = blockIdx.y * WARPS + warp, row = blockIdx.x;
    float *x = ns_shared<float>(warp * d * sizeof(float));
    bool is_q = item < args.n_heads;
    bool is_k = !is_q && item < args.n_heads + nkv;
    uint32_t head = is_q ? item
                         : (item - args.n_heads) % nkv; /* of its own kind */
    uint32_t from = is_q || is_k || args.has_v ? item : item - nkv;
    const float *w = is_q ? args.q_norm : is_k ? args.k_norm : NULL;
    uint32_t position = (uint32_t)args.position[row];
    const float *raw;
    float sum = 0, inverse;
    int segment;
    float *out;

    if (item >= args.n_items)
        return;
    raw = row_at(args.qkv, row) + (size_t)from * d;
    for (uint32_t j = lane; j < d; j += 32)
        sum = fmaf(raw[j], raw[j], sum);
    inverse = 1.0f / sqrtf(warp_sum(sum) / (float)d + args.eps);
    for (uint32_t j = lane; j < d; j += 32) {
        float normed = raw[j] * inverse;

        x[j] = w ? normed * w[j] : normed;
    }
    ns_syncwarp();
    if (is_q || is_k)
        for (uint32_t j = lane; j < args.kv.n_rotated; j += 32) {
            float angle = (float)position * args.frequency[j];
            float c, s;
            float a = x[j], b = x[j + half];

            ns_turn(angle, &c, &s);
            x[j] = fmaf(a, c, -(b * s));
            x[j + half] = fmaf(b, c, a * s);
        }
    ns_syncwarp();
    out = row_at(is_q ? args.q : is_k ? args.k : args.v, row) +
          (size_t)head * d;
    for (uint32_t j = lane; j < d; j += 32)
        out[j] = x[j];
    if (is_q)
        return;

    segment = segment_of_row(args.segments, args.n_segments, row);
    if (segment < 0 || args.segments[segment].kind == NS_SEGMENT_CANVAS)
        return;
    T *page = page_of<T>(args, args.segments[segment].slot, position);
    struct kv_place place = kv_place(args.kv, head, position % NS_PAGE);

    for (uint32_t j = lane; j < d; j += 32) {
        int at = kept_at(args.kv, j);

        if (!is_k)
            page[place.v + j] = to_type<T>(x[j]);
        else if (at >= 0)
            page[place.k + (uint32_t)at] = to_type<T>(x[j]);
    }
}

void
qkv_cuda(struct ns_backend *be, const struct ns_pass *pass,
         const struct ns_qkv *args)
{
    struct cuda *cuda = cuda_of(be);
    const struct ns_kv_layer *kv = &args->kv;
    uint32_t n_items = args->n_heads + 2 * kv->n_kv_heads;
    dim3 grid(pass->n_rows, divide_up(n_items, WARPS));
    size_t shared = WARPS * kv->head_dim * sizeof(float);
    struct qkv q = {};

    q.qkv = args->qkv;
    q.q = args->q;
    q.k = args->k;
    q.v = args->v;
    q.q_norm = args->q_norm;
    q.k_norm = args->k_norm;
    q.frequency = args->frequency;
    q.eps = args->eps;
    q.n_heads = args->n_heads;
    q.n_items = n_items;
    q.has_v = args->has_v;
    q.kv = *kv;
    q.pages = args->pages;
    q.page_stride = pass->page_stride;
    q.n_segments = pass->n_segments;
    q.segments = cuda_segments(cuda, pass);
    q.position = pass->position;
    if (kv->dtype == NS_F32)
        LAUNCH(cuda, grid, WARPS * 32, shared, qkv_kernel<float>, q);
    else
        LAUNCH(cuda, grid, WARPS * 32, shared, qkv_kernel<uint16_t>, q);
}
