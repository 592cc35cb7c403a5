/* cuda.cuh - private to the cuda backend: its state, and what its files share.
 *
 * The files are C in spirit: kernels, a host function a file that launches
 * them, and one table. All kernels run on one stream in the order of the
 * calls; none allocates, none waits. What differs between nvcc and the
 * simulator of tests/cudasim is in device.cuh and nowhere else.
 *
 * Weights  [n][ld]: rows as stored, padded with zeros to ld = round64(k), so
 *          that products need no tail over k. `count` such matrices.
 * GATED    rows of gate and up in turns of eight (gate 0..7, up 0..7, gate
 *          8..15, ...), so that one thread holds both; n padded to eights.
 * TABLE    as LINEAR: the one copy serves lookup, logits and P x E.
 *
 * Arithmetic "fp32": each output is one chain of fused multiply-adds over k in
 * rising order, the cpu backend's "fp32" to the bit. "bf16": activations are
 * rounded to bf16 in front of each product with a bf16 weight, and multiplied
 * by mma.sync, sixteen k at a time in rising order, accumulated in fp32. "fp8":
 * that, and weights stored as E4M3 stay codes; rows in front of them are
 * quantised (float8.h) and multiplied 32 k at a time. A card adds those with
 * fewer bits than a float has, so each 128 k start from zero and are added to
 * the sum as floats. What an output is does not depend on the tile it lies in,
 * so tiles are chosen by the number of rows and the row contract holds.
 */
#ifndef NS_KERNELS_CUDA_CUH
#define NS_KERNELS_CUDA_CUH

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "kernels/backend.h"
}
#include "kernels/cuda/device.cuh"

enum {
    PAD = 64,          /* weights and operands: k is padded to this */
    PAD_E4M3 = 128,    /* of codes: 128 bytes as well */
    MAX_SEGMENTS = 4096,
    RING_BYTES = 16 << 20, /* pinned, for what a pass uploads */
    STAGE_BYTES = 16 << 20, /* pinned, twice: weights on their way */
    HEAD_TILE = 256,   /* vocabulary rows with a sum of their own */
    HEAD_PARTS = 32,   /* at most: parts of the vocabulary */
    HEAD_ROWS = 1024,  /* rows against one part */
    NUCLEUS_ROWS = 32, /* rows whose logits are held whole */
};

static inline size_t
round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static inline uint32_t
divide_up(size_t n, size_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* cos and sin of an angle of up to the context's length. sinf and cosf reduce a
 * large one in local memory; in double, 2^18 radians lose nothing that a float
 * holds. */
__device__ static inline void
ns_turn(float angle, float *c, float *s)
{
    double turns = (double)angle * 0.15915494309189533577;
    float half = (float)(2 * (turns - rint(turns)));

    *c = ns_cospi(half);
    *s = ns_sinpi(half);
}

/* What a kernel saw that it must not see; the first one stays. */
struct fault {
    int32_t kind; /* 0: none; 1: a token outside the vocabulary */
    int32_t row, value;
};

/* Rows of one weight that meet rows of one operand. */
struct product_tile {
    uint32_t w_row;  /* first row of the weight */
    uint32_t first;  /* first row of the operand (through gather), and of y */
    uint32_t n_rows;
};

enum epilogue {
    STORE,    /* y = sum                            */
    GATED,    /* y = gelu(sum of gate) * sum of up  */
    WEIGHTED, /* y = sum * factor[row]              */
    ADD,      /* y = y * factor[row] + sum          */
};

/* y = a . w^T, or a . w where the weight's rows are the k axis. */
struct product {
    const void *a; /* operand: fp32, or bf16 or codes, zeros up to lda */
    size_t lda;    /* elements */
    const float *a_scale, *w_scale; /* of codes: a row of a, a row of w */
    const int32_t *gather; /* row i of the product is a[gather[i]]; or NULL */
    uint32_t m;
    const void *w;
    enum ns_dtype w_type;
    size_t ldw;
    uint32_t n, k; /* outputs (GATED: of gate); inputs, not padded */
    bool k_rows;   /* w is [k][ldw] */
    enum epilogue epilogue;
    void *y;
    bool y_operand; /* y is an operand of the next product: padded to ldy */
    size_t ldy;
    const float *factor;
    const struct product_tile *tiles; /* NULL: all rows meet all of w */
    const uint32_t *n_tiles;          /* device */
    uint32_t max_tiles, rows_per_tile;
};

/* Where a pass's tables lie on the device. */
struct segment_table {
    struct ns_segment *mirror; /* host: what was uploaded last */
    uint32_t n;
    struct ns_segment *device;
};

/* What experts() keeps. Copies are sorted by expert, then by row. */
struct expert_scratch {
    int32_t *row;    /* [copies] row of x                    */
    float *weight;   /* [copies]                             */
    int32_t *place;  /* [rows][top_k] copies, experts rising */
    uint32_t *start; /* [n_experts + 1]                      */
    struct product_tile *tiles;
    uint32_t *n_tiles;
    void *inner; /* [copies][round64(expert_dim)] operand */
    float *out;  /* [copies][hidden] weighted */
};

/* Of one tile of one row, l being the logit times the inverse temperature. */
struct head_tile {
    float reference; /* the highest l */
    float sum;       /* of e^(l - reference) */
    float weighted;  /* of (l - reference) e^(l - reference) */
};

struct head_row {
    double total; /* of e^(l - highest) */
    double rest;  /* what the draw has left when its tile starts */
    float highest; /* l so far */
    float best;    /* the highest logit */
    int32_t argmax;
    int32_t nan; /* there was one */
    uint32_t tile; /* drawn */
};

struct head_scratch {
    float *logits;       /* [HEAD_ROWS][part] */
    void *p;             /* [HEAD_ROWS][part] operand */
    struct head_row *row; /* [HEAD_ROWS] */
    struct head_tile *tile; /* [HEAD_ROWS][tiles of the vocabulary] */
    float *factor;       /* [HEAD_ROWS]: what earlier sums are worth now */
    float *drawn;        /* [HEAD_ROWS][HEAD_TILE] logits of the drawn tile */
    struct product_tile *draw; /* [HEAD_ROWS] */
    uint32_t *n_draw;
    float *inv_temperature, *top_p;
    double *uniform;
    float *whole; /* [NUCLEUS_ROWS][vocab] */
    uint32_t *mask;   /* [HEAD_ROWS][words]: as many as differ */
    int32_t *mask_of; /* [HEAD_ROWS]: which is a row's; -1: none */
    uint8_t *wants_top;       /* [HEAD_ROWS] */
    struct ns_candidate *top; /* [HEAD_ROWS][NS_HEAD_TOP] so far */
    int32_t *argmax, *sampled;   /* [HEAD_ROWS] answers, as these three */
    float *entropy, *logsumexp;
};

struct answer { /* what sync() hands to the caller */
    void *to;
    const void *from; /* in the ring */
    size_t bytes;
};

enum { MAX_ANSWERS = 1024 };

struct cuda {
    struct ns_backend base; /* first */
    cudaStream_t stream;
    int device;
    bool bf16, fp8; /* fp8: and bf16 */
    struct ns_error sticky; /* status NS_OK while all is well */
    struct ns_backend_sizes sizes;
    size_t bytes_in_use;
    uint64_t started_ns; /* 0: nothing is enqueued */

    unsigned char *ring; /* pinned */
    size_t ring_used;    /* since the stream was last known to be empty */
    unsigned char *stage[2]; /* pinned */
    cudaEvent_t stage_free[2];
    struct answer answer[MAX_ANSWERS];
    uint32_t n_answers;

    struct fault *fault; /* device */
    struct segment_table segments;

    unsigned char *scratch; /* device, from reserve() */
    size_t scratch_bytes;
    /* carved out of it */
    void *operand;
    size_t operand_bytes;
    float *operand_scale; /* [operand_scales]: of its rows, if codes */
    size_t operand_scales;
    uint32_t *index; /* what gather, scatter and the pooling read */
    size_t index_count;
    struct expert_scratch experts;
    struct head_scratch head;
};

static inline struct cuda *
cuda_of(struct ns_backend *be)
{
    return (struct cuda *)be;
}

/* The first failure sticks until sync() reports it; false if there is one. */
bool cuda_ok(struct cuda *cuda, cudaError_t error, const char *what);
void cuda_fail(struct cuda *cuda, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The runtime's current device is the thread's: ops of any thread set it. */
void cuda_enter(struct cuda *cuda);
/* Enqueues a copy; `host` is free again on return. */
void cuda_put(struct cuda *cuda, void *device, const void *host, size_t bytes);
/* Enqueues a copy that is in `host` once sync() has returned. */
void cuda_answer(struct cuda *cuda, void *host, const void *device,
                 size_t bytes);

/* Launches unless a failure sticks. */
#define LAUNCH(cuda, grid, block, shared, kernel, ...)                        \
    do {                                                                      \
        if ((cuda)->sticky.status == NS_OK)                                   \
            cuda_ok(cuda,                                                     \
                    ns_launch((cuda)->stream, dim3(grid), dim3(block),        \
                              shared, kernel, __VA_ARGS__),                   \
                    #kernel);                                                 \
    } while (0)

/* The pass's segments on the device. */
const struct ns_segment *cuda_segments(struct cuda *cuda,
                                       const struct ns_pass *pass);

/* Threads for a block that works on one row of n columns. */
static inline uint32_t
row_threads(uint32_t n)
{
    return n <= 128 ? 32 : n <= 512 ? 64 : n <= 2048 ? 128 : 256;
}

/* ---- products (product.cu) --------------------------------------------- */

/* Whether a weight's products take bf16 operands. */
static inline bool
takes_bf16(const struct cuda *cuda, enum ns_dtype w_type)
{
    return cuda->bf16 && w_type == NS_BF16;
}

/* Whether they are made by mma.sync: of bf16, or of codes. */
static inline bool
takes_mma(const struct cuda *cuda, enum ns_dtype w_type)
{
    return takes_bf16(cuda, w_type) || w_type == NS_E4M3;
}

static inline size_t
operand_bytes(const struct cuda *cuda, enum ns_dtype w_type)
{
    return takes_bf16(cuda, w_type) ? 2 : 4;
}

/* x as an operand of products with weights of the type: x itself, or its
 * rounded or quantised copy in cuda->operand, which must hold it; the scales
 * of codes are in cuda->operand_scale. */
const void *cuda_operand(struct cuda *cuda, struct ns_rows x,
                         enum ns_dtype w_type, size_t *lda);
void cuda_product(struct cuda *cuda, const struct product *product);

/* ---- the ops, a file each ----------------------------------------------- */

size_t cuda_packed_bytes(const struct ns_backend *be, enum ns_packing packing,
                         const struct ns_matrix *sources, uint32_t n_sources);
enum ns_status cuda_pack(struct ns_backend *be, enum ns_packing packing,
                         const struct ns_matrix *sources, uint32_t n_sources,
                         struct ns_weight *out, struct ns_error *err);
void cuda_drop(struct ns_backend *be, struct ns_weight *weight);

/* Elements from one row of a packed weight to the next, rows of one matrix. */
static inline size_t
weight_ld(const struct ns_weight *w)
{
    return round_up(w->k, w->dtype == NS_E4M3 ? PAD_E4M3 : PAD);
}

static inline uint32_t
weight_rows(const struct ns_weight *w)
{
    return w->packing == NS_PACK_GATED ? 2 * (uint32_t)round_up(w->n, 8)
                                       : w->n;
}

/* Of codes: a scale a packed row, behind the rows of all matrices. */
static inline size_t
weight_scales_at(const struct ns_weight *w)
{
    return (size_t)w->count * weight_rows(w) * weight_ld(w);
}

static inline const float *
weight_scales(const struct ns_weight *w)
{
    return w->dtype == NS_E4M3
               ? (const float *)(const void *)((const unsigned char *)w->data +
                                               weight_scales_at(w))
               : NULL;
}

void embed_cuda(struct ns_backend *be, struct ns_rows y,
                const struct ns_weight *table, const int32_t *ids,
                float scale);
void gather_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                 const uint32_t *index);
void scatter_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                  const uint32_t *index);
void rmsnorm_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                  const float *w, float eps);
void add_norm_cuda(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                   const float *w, float eps);
void add_then_norm_cuda(struct ns_backend *be, struct ns_rows x,
                        struct ns_rows a, float eps);
void branch_norms_cuda(struct ns_backend *be, struct ns_rows y[3],
                       struct ns_rows x, const float *const w[3], float eps);
void layer_end_cuda(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
                    struct ns_rows e, const float *w_m, const float *w_e,
                    const float *w, float eps, const float scalar[2],
                    const uint8_t *decoder);
void linear_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                 const struct ns_weight *w);
void gated_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                const struct ns_weight *w);
void qkv_cuda(struct ns_backend *be, const struct ns_pass *pass,
              const struct ns_qkv *args);
void attention_cuda(struct ns_backend *be, const struct ns_pass *pass,
                    const struct ns_attention *args);
void route_cuda(struct ns_backend *be, int32_t *index, float *weight,
                float *probs, struct ns_rows logits, const float *expert_scale,
                uint32_t top_k);
void experts_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                  const int32_t *index, const float *weight, uint32_t top_k,
                  const struct ns_weight *gate_up,
                  const struct ns_weight *down);
void head_cuda(struct ns_backend *be, const struct ns_head *args);
void logits_cuda(struct ns_backend *be, struct ns_rows h,
                 const struct ns_weight *table, float softcap, float *out);
void patch_place_cuda(struct ns_backend *be, struct ns_rows rows,
                      const float *table, uint32_t n_positions,
                      const int32_t *x, const int32_t *y);
void patch_qkv_cuda(struct ns_backend *be, const struct ns_patch_qkv *args);
void patch_pool_cuda(struct ns_backend *be, struct ns_rows y,
                     struct ns_rows x, const uint32_t *corner,
                     const uint32_t *columns, uint32_t side, float scale,
                     const float *bias, const float *std);

void clamp_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                float least, float most);
void gelu_times_cuda(struct ns_backend *be, struct ns_rows y,
                     struct ns_rows up);

/* Vocabulary rows of a part: whole tiles, by the vocabulary's size alone. */
static inline uint32_t
head_part(uint32_t vocab)
{
    return (uint32_t)round_up(divide_up(vocab, HEAD_PARTS), HEAD_TILE);
}

/* ---- what kernels share -------------------------------------------------- */

__device__ static inline float *
row_at(struct ns_rows rows, uint32_t i)
{
    return rows.data + i * rows.stride;
}

/* Of a whole warp; every lane gets the same bits. */
__device__ static inline float
warp_sum(float v)
{
    for (int step = 16; step > 0; step /= 2)
        v += ns_shfl_xor(v, step);
    return v;
}

__device__ static inline float
warp_max(float v)
{
    for (int step = 16; step > 0; step /= 2)
        v = fmaxf(v, ns_shfl_xor(v, step));
    return v;
}

/* Of a whole block, in a fixed order; `part` is shared, a float a warp. */
__device__ static inline float
block_sum(float v, float *part)
{
    uint32_t warp = threadIdx.x / 32, n = blockDim.x / 32;

    v = warp_sum(v);
    if (n == 1)
        return v;
    __syncthreads(); /* part may still be read from the sum before */
    if (threadIdx.x % 32 == 0)
        part[warp] = v;
    __syncthreads();
    v = part[0];
    for (uint32_t i = 1; i < n; i++)
        v += part[i];
    return v;
}

__device__ static inline float
block_max(float v, float *part)
{
    uint32_t warp = threadIdx.x / 32, n = blockDim.x / 32;

    v = warp_max(v);
    if (n == 1)
        return v;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        part[warp] = v;
    __syncthreads();
    v = part[0];
    for (uint32_t i = 1; i < n; i++)
        v = fmaxf(v, part[i]);
    return v;
}

__device__ static inline float
gelu_tanh(float x)
{
    const float root = 0.79788456080286535588f; /* sqrt(2 / pi) */

    return 0.5f * x * (1.0f + tanhf(root * (x + 0.044715f * x * x * x)));
}

/* A key or value of the prefix, whatever the cache keeps. */
template <class T> __device__ static inline float as_float(T v);
template <>
__device__ inline float
as_float<float>(float v)
{
    return v;
}
template <>
__device__ inline float
as_float<uint16_t>(uint16_t v)
{
    return ns_bf16_to_float(v);
}

template <class T> __device__ static inline T to_type(float v);
template <>
__device__ inline float
to_type<float>(float v)
{
    return v;
}
template <>
__device__ inline uint16_t
to_type<uint16_t>(float v)
{
    return ns_bf16_of(v);
}

/* Where a position's K and V lie in a page: see backend.h. Counted in
 * elements of the cache. */
struct kv_place {
    size_t v, k; /* k: K, or its rotated slice */
};

__host__ __device__ static inline struct kv_place
kv_place(const struct ns_kv_layer &kv, uint32_t head, uint32_t at)
{
    uint32_t d = kv.head_dim, width = kv.compact ? 2 * kv.n_rotated : d;
    size_t front = (size_t)head * NS_PAGE * (d + width);
    struct kv_place place;

    place.v = front + (kv.compact ? 0 : (size_t)NS_PAGE * d) + (size_t)at * d;
    place.k = front + (kv.compact ? (size_t)NS_PAGE * d : 0) +
              (size_t)at * width;
    return place;
}

/* The segment that holds the row, or -1; called by a whole warp. Segments lie
 * in row order. */
__device__ static inline int
segment_of_row(const struct ns_segment *segments, uint32_t n, uint32_t row)
{
    for (uint32_t from = 0; from < n; from += 32) {
        uint32_t s = from + threadIdx.x % 32;
        bool here = s < n && row - segments[s].row0 < segments[s].n_rows;
        unsigned found = ns_ballot(here);

        if (found)
            return (int)from + __ffs((int)found) - 1;
    }
    return -1;
}

#endif
