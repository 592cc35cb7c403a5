/* attention.cu - softmax attention over prefix pages and own rows.
 *
 * Contract: cpu/attention_ref.c. A block for each (row, kv head), a warp for
 * each query head of it. Keys go by in tiles of NS_PAGE positions aligned to
 * absolute positions, the segment's own rows in tiles behind them; a tile's
 * K is brought into shared memory once for all warps, V is read where it lies.
 * Sums are rescaled when a tile raises the maximum, so what a row gets depends
 * on its own keys alone.
 */
#include <assert.h>

#include "kernels/cuda/cuda.cuh"

enum { KEYS = NS_PAGE };

struct attention {
    struct ns_rows out, q, k, v;
    struct ns_kv_layer kv;
    const int32_t *pages, *lo, *hi;
    const float *k_norm;
    const struct ns_segment *segments;
    uint32_t n_segments, page_stride, n_heads;
};

/* One query head's sums; N columns a lane. */
template <int N>
struct sums {
    float most, total;
    float v[N];
};

/* Floats from one staged key to the next: lanes read keys side by side. */
__device__ static inline uint32_t
key_stride(uint32_t d)
{
    return d | 1;
}

/* Whole warp: keys 0..KEYS - 1 of a staged tile, of which those from..to - 1
 * are seen. v: of key 0. */
template <int N, class V>
__device__ static inline void
add_tile(struct sums<N> *sums, const float *q, const float *k, float *p,
         uint32_t d, uint32_t from, uint32_t to, const V *v, size_t v_stride)
{
    uint32_t lane = threadIdx.x % 32;
    float score[KEYS / 32], most = -INFINITY, scale, total = 0;

    for (uint32_t half = 0; half < KEYS / 32; half++) {
        uint32_t key = lane + 32 * half;
        float sum = 0;

        score[half] = -INFINITY;
        if (key < from || key >= to)
            continue;
        for (uint32_t j = 0; j < d; j++)
            sum = fmaf(q[j], k[key * key_stride(d) + j], sum);
        score[half] = sum;
        most = fmaxf(most, sum);
    }
    most = fmaxf(warp_max(most), sums->most);
    scale = sums->most == -INFINITY ? 0 : expf(sums->most - most);
    ns_syncwarp(); /* p may still be read from the tile before */
    for (uint32_t half = 0; half < KEYS / 32; half++) {
        uint32_t key = lane + 32 * half;

        p[key] = key < from || key >= to ? 0 : expf(score[half] - most);
        total += p[key];
    }
    ns_syncwarp();
    sums->most = most;
    sums->total = fmaf(sums->total, scale, warp_sum(total));
    for (int i = 0; i < N; i++)
        sums->v[i] *= scale;
    for (uint32_t key = from; key < to; key++) {
        const V *row = v + key * v_stride;

        for (int i = 0; i < N; i++) {
            uint32_t j = lane + 32 * (uint32_t)i;

            if (j < d)
                sums->v[i] = fmaf(p[key], as_float<V>(row[j]), sums->v[i]);
        }
    }
}

/* Brings K of one page to shared memory, as far as position `to` of it. */
template <class T>
__device__ static inline void
stage_page(float *k, const struct ns_kv_layer &kv, const T *page,
           uint32_t head, uint32_t to, const float *k_norm)
{
    uint32_t d = kv.head_dim, half = d / 2, r = kv.n_rotated;

    for (uint32_t i = threadIdx.x; i < to * d; i += blockDim.x) {
        uint32_t at = i / d, j = i % d;
        struct kv_place place = kv_place(kv, head, at);
        float value;

        if (!kv.compact)
            value = as_float<T>(page[place.k + j]);
        else if (j < r)
            value = as_float<T>(page[place.k + j]);
        else if (j >= half && j < half + r)
            value = as_float<T>(page[place.k + r + j - half]);
        else
            value = as_float<T>(page[place.v + j]) * k_norm[j];
        k[at * key_stride(d) + j] = value;
    }
}

template <class T, int N>
__global__ void
attention_kernel(struct attention args)
{
    const struct ns_kv_layer &kv = args.kv;
    uint32_t d = kv.head_dim, group = blockDim.x / 32;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t row = blockIdx.x, kv_head = blockIdx.y;
    uint32_t head = kv_head * group + warp;
    float *q = ns_shared<float>(0) + warp * d;
    float *p = ns_shared<float>(0) + group * d + warp * KEYS;
    float *k = ns_shared<float>(0) + group * (d + KEYS);
    uint32_t hi = (uint32_t)args.hi[row], lo = (uint32_t)args.lo[row];
    uint32_t own = 0, row0 = 0, slot = 0;
    struct sums<N> sums;
    float *out;
    int at;

    at = segment_of_row(args.segments, args.n_segments, row);
    if (at < 0) {
        lo = hi;
    } else {
        const struct ns_segment &segment = args.segments[at];

        slot = segment.slot;
        row0 = segment.row0;
        own = segment.kind == NS_SEGMENT_CANVAS ? segment.n_rows : 0;
    }
    sums.most = -INFINITY;
    sums.total = 0;
    for (int i = 0; i < N; i++)
        sums.v[i] = 0;
    for (uint32_t j = lane; j < d; j += 32)
        q[j] = row_at(args.q, row)[(size_t)head * d + j];

    for (uint32_t tile = lo / KEYS; tile * KEYS < hi && lo < hi; tile++) {
        uint32_t first = tile * KEYS;
        uint32_t to = hi - first < KEYS ? hi - first : KEYS;
        size_t number = (size_t)args.pages[(size_t)slot * args.page_stride +
                                           tile];
        const T *page = (const T *)(const void *)((unsigned char *)kv.base +
                                                  number * kv.page_bytes);

        __syncthreads(); /* k may still be read from the tile before */
        stage_page<T>(k, kv, page, kv_head, to, args.k_norm);
        __syncthreads();
        add_tile<N, T>(&sums, q, k, p, d, lo > first ? lo - first : 0, to,
                       page + kv_place(kv, kv_head, 0).v, d);
    }
    for (uint32_t first = 0; first < own; first += KEYS) {
        uint32_t to = own - first < KEYS ? own - first : KEYS;

        __syncthreads();
        for (uint32_t i = threadIdx.x; i < to * d; i += blockDim.x)
            k[i / d * key_stride(d) + i % d] =
                row_at(args.k, row0 + first + i / d)[kv_head * d + i % d];
        __syncthreads();
        add_tile<N, float>(&sums, q, k, p, d, 0, to,
                           row_at(args.v, row0 + first) + kv_head * d,
                           args.v.stride);
    }
    out = row_at(args.out, row) + (size_t)head * d;
    for (int i = 0; i < N; i++) {
        uint32_t j = lane + 32 * (uint32_t)i;

        if (j < d)
            out[j] = sums.total > 0 || sums.total != sums.total
                         ? sums.v[i] / sums.total : 0;
    }
}

template <class T>
static void
launch(struct cuda *cuda, const struct attention *args, dim3 grid,
       uint32_t threads, size_t shared)
{
    uint32_t columns = divide_up(args->kv.head_dim, 32);

    assert(columns <= 16);
    if (columns <= 2)
        LAUNCH(cuda, grid, threads, shared, (attention_kernel<T, 2>), *args);
    else if (columns <= 4)
        LAUNCH(cuda, grid, threads, shared, (attention_kernel<T, 4>), *args);
    else if (columns <= 8)
        LAUNCH(cuda, grid, threads, shared, (attention_kernel<T, 8>), *args);
    else
        LAUNCH(cuda, grid, threads, shared, (attention_kernel<T, 16>), *args);
}

void
attention_cuda(struct ns_backend *be, const struct ns_pass *pass,
               const struct ns_attention *args)
{
    struct cuda *cuda = cuda_of(be);
    const struct ns_kv_layer *kv = &args->kv;
    uint32_t group = args->n_heads / kv->n_kv_heads, d = kv->head_dim;
    size_t shared = ((size_t)group * (d + KEYS) + (size_t)KEYS * (d | 1)) *
                    sizeof(float);
    dim3 grid(pass->n_rows, kv->n_kv_heads);
    struct attention a = {};

    assert(group <= 32 && shared <= NS_SHARED_MAX);
    a.out = args->out;
    a.q = args->q;
    a.k = args->k;
    a.v = args->v;
    a.kv = *kv;
    a.pages = args->pages;
    a.lo = args->lo;
    a.hi = pass->hi;
    a.k_norm = args->k_norm;
    a.segments = cuda_segments(cuda, pass);
    a.n_segments = pass->n_segments;
    a.page_stride = pass->page_stride;
    a.n_heads = args->n_heads;
    if (kv->dtype == NS_F32)
        launch<float>(cuda, &a, grid, group * 32, shared);
    else
        launch<uint16_t>(cuda, &a, grid, group * 32, shared);
}
