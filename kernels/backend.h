/* backend.h - the arithmetic, behind one table of operations.
 *
 * A backend owns a device: its memory, its threads or streams, and its packed
 * weights. The engine sees tensors of flat rows (one row a token of the pass)
 * and never asks which device it is. Ops enqueue and return void; a failure
 * sticks to the backend and comes out of sync(), once per pass, so that
 * engine/forward.c reads as the model.
 *
 * Row contract (all ops, all backends): what is computed for a row depends on
 * that row's own inputs and on the model's shapes, never on how many rows,
 * segments or threads share the pass. Products are one chain over k in rising
 * order, cut only at fixed k. Attention reads keys in tiles of NS_PAGE
 * positions aligned to absolute positions. Expert copies are added in expert
 * order. The vocabulary is cut into parts that depend on its size alone.
 *
 * Activations: fp32. Weights: fp32 or bf16 as stored; f16 is widened to fp32 when
 * it is packed, and so is E4M3 with its scales, but by cuda in "fp8", which keeps
 * the codes. Arithmetic is named by ns_backend.arithmetic. In "fp8" the rows in front of a
 * product with an E4M3 weight are quantised as ns_e4m3_row does it: the product
 * is that of the codes' values times both scales.
 *
 * Thread: the engine thread only, but for pack(), which the opener calls.
 * Pointers marked `device` are memory from alloc(); the rest are host memory,
 * borrowed for the call.
 */
#ifndef NS_KERNELS_BACKEND_H
#define NS_KERNELS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { NS_PAGE = 64 }; /* positions in a page of prefix KV, and in a key tile */

enum ns_dtype { NS_F32, NS_BF16, NS_F16, NS_E4M3 }; /* the last: float8.h */

static inline size_t
ns_dtype_bytes(enum ns_dtype dtype)
{
    return dtype == NS_F32 ? 4 : dtype == NS_E4M3 ? 1 : 2;
}

/* A view of fp32 rows in device memory: row i starts at data + i * stride. */
struct ns_rows {
    float *data; /* device */
    uint32_t n_rows, n_cols;
    size_t stride; /* in floats, >= n_cols */
};

/* A matrix [n, k] (out, in) as a checkpoint stores it, row-major, or `count`
 * such matrices one behind the other. */
struct ns_matrix {
    const void *data; /* borrowed from the mapped file, any alignment */
    enum ns_dtype dtype;
    uint32_t n, k, count;
    const void *const *parts; /* [count]: instead of data, where the matrices
                               * lie apart */
    const float *scale; /* NS_E4M3: [count][n], what an output's codes are
                         * multiplied by; else NULL */
};

enum ns_packing {
    NS_PACK_LINEAR, /* y = x . W^T; several sources stand side by side in n  */
    NS_PACK_GATED,  /* sources gate [n,k] then up [n,k]; or one source of
                     * [2n,k], gate rows first (experts: count of them)      */
    NS_PACK_TABLE,  /* the embedding [V,H]: row lookup, head, and P x E      */
};

/* A weight in the backend's own layout; the packed copy is the copy. */
struct ns_weight {
    enum ns_packing packing;
    enum ns_dtype dtype; /* NS_F32 or NS_BF16; cuda: NS_E4M3 too */
    bool e4m3;           /* it was stored as codes: see "fp8" above */
    uint32_t n, k;       /* outputs (GATED: of gate, = of up), inputs */
    uint32_t count;      /* experts; 1 otherwise */
    void *data;          /* device, owned by the backend until drop() */
    size_t bytes;
};

/* One layer's part of a pool of pages. Page p starts at base + p * page_bytes
 * and holds for each kv head: K [NS_PAGE][d] then V [NS_PAGE][d]. Compact
 * (full layers): V [NS_PAGE][d] then the rotated slice of K, [NS_PAGE][2r]:
 * dims 0..r-1 and d/2..d/2+r-1; elsewhere K = k_norm * V. */
struct ns_kv_layer {
    void *base; /* device */
    enum ns_dtype dtype; /* of K and V: the backend's kv_type */
    size_t page_bytes;
    uint32_t n_kv_heads, head_dim;
    uint32_t n_rotated; /* r: pairs that turn; head_dim / 2 on sliding layers */
    bool compact;
};

enum ns_segment_kind {
    NS_SEGMENT_PREFILL, /* causal, writes KV                              */
    NS_SEGMENT_CANVAS,  /* both ways inside, reads the prefix, writes none */
    NS_SEGMENT_COMMIT,  /* causal, writes KV                              */
    NS_SEGMENT_AR,      /* causal, one token, writes KV                   */
};

/* A run of rows of one sequence with one attention rule. */
struct ns_segment {
    uint32_t row0, n_rows; /* rows of the pass */
    uint32_t slot;         /* row of the page tables */
    uint32_t position;     /* of its first row: what the prefix holds */
    enum ns_segment_kind kind;
};

/* What all layers of a pass share. Arrays have one entry a row and lie on the
 * device; segments are kept in host memory too. */
struct ns_pass {
    uint32_t n_rows, n_segments;
    const struct ns_segment *segments; /* host */
    const int32_t *ids;      /* device: tokens                            */
    const int32_t *position; /* device: absolute                          */
    /* A row sees the cached positions lo <= k < hi, and the whole of its own
     * segment if that is a canvas. hi is the same on both kinds of layer. */
    const int32_t *lo_full, *lo_sliding, *hi; /* device */
    const int32_t *page_full;    /* device: page tables, [slot][stride]:  */
    const int32_t *page_sliding; /* page of position p at p / NS_PAGE     */
    uint32_t page_stride;
    const uint8_t *decoder; /* device: 1 for canvas rows (layer scalar)   */
};

struct ns_qkv {
    /* [rows, (nq + nkv [+ nkv]) * d]: q, k and, on sliding layers, v, as the
     * projection left them. On full layers V is made from k. */
    struct ns_rows qkv;
    struct ns_rows q;    /* out [rows, nq * d]: normed and rotated          */
    struct ns_rows k, v; /* out [rows, nkv * d]: what the cache would hold  */
    const float *q_norm, *k_norm; /* device, [d] */
    const float *frequency;       /* device, [d / 2]: 0 where nothing turns */
    float eps;
    uint32_t n_heads;
    bool has_v;
    struct ns_kv_layer kv; /* rows of writing segments go to their pages    */
    const int32_t *pages;  /* device: page_full or page_sliding             */
};

struct ns_attention {
    struct ns_rows out;     /* [rows, nq * d] */
    struct ns_rows q, k, v; /* k, v: own rows, read by canvas segments only */
    uint32_t n_heads;
    struct ns_kv_layer kv;
    const int32_t *pages; /* device */
    const int32_t *lo;    /* device: lo_full or lo_sliding */
    const float *k_norm;  /* device: for compact pages */
};

/* Rows are the patches of pictures: heads normed (q and k with their weights),
 * then the first half of a head turned by x and the second by y, each like a
 * head of its own. What sees what, attention() is told: a picture is a canvas
 * without a prefix. q, k and v may be the columns of qkv. */
struct ns_patch_qkv {
    struct ns_rows qkv;           /* [rows, 3 * n * d] */
    struct ns_rows q, k, v;       /* out [rows, n * d] */
    const float *q_norm, *k_norm; /* device, [d] */
    const float *frequency;       /* device, [d / 4] */
    const int32_t *x, *y;         /* device: place in the grid of patches */
    float eps;
    uint32_t n_heads;
};

enum { NS_HEAD_TOP = 32 };

struct ns_candidate { /* a token and its z; id -1: there are no more */
    int32_t id;
    float z;
};

/* Head: soft-capped logits z of each row against the whole table, never held
 * whole. l = z * inv_temperature. A row with a NaN among its logits gets argmax
 * and sample 0 and an entropy of NaN, by which its job is failed; its soft row
 * is unspecified, all other rows are as if it were not there.
 *
 * A mask leaves a row some tokens alone: the others have z = -infinity. Where it
 * leaves none, the row is as one with a NaN. It is for rows without a soft
 * row. */
struct ns_head {
    struct ns_rows h; /* [n, H] after the final norm */
    const struct ns_weight *table;
    float softcap; /* 0: none */
    const float *inv_temperature; /* host [n]: 1 / T of each row */
    const double *uniform;        /* host [n]: u in [0,1) of the draw; < 0: the
                                   * argmax is taken as the sample */
    const float *top_p;           /* host [n] or NULL: nucleus of the draw */
    const uint32_t *const *mask;  /* host [n] or NULL: of a row NULL (all), or
                                   * [(V + 31) / 32]: bit v % 32 of word v / 32
                                   * says whether token v is left */
    struct ns_candidate *const *top; /* host [n] or NULL: of a row NULL, or out
                                      * [NS_HEAD_TOP]: its highest z, falling,
                                      * the lowest id first among equals */
    int32_t *argmax;              /* host [n] out */
    int32_t *sampled;             /* host [n] out: inverse CDF of softmax(l) */
    float *entropy;               /* host [n] out: nats */
    float *logsumexp;             /* host [n] out: of l; may be NULL */
    uint32_t n_soft;              /* rows 0..n_soft-1 also get */
    struct ns_rows soft;          /* softmax(l) . E * soft_scale, rounded to  */
    float soft_scale;             /* the weight type                          */
};

/* Upper bounds of a pass, for the backend's own scratch. */
struct ns_backend_sizes {
    uint32_t n_rows;      /* rows of a pass */
    uint32_t n_head_rows; /* rows of one head() */
    uint32_t hidden, vocab;
    uint32_t n_heads, n_kv_heads, head_dim; /* the largest of any layer */
    uint32_t n_experts, top_k, expert_dim;
    uint32_t n_patches; /* rows of linear, gated and attention over pictures;
                         * 0: the model has no vision tower */
};

struct ns_backend;

struct ns_backend_ops {
    const char *name; /* "cpu", "cuda" */

    void (*close)(struct ns_backend *be);
    /* The sticky failure, if any, after all enqueued work is done. */
    enum ns_status (*sync)(struct ns_backend *be, struct ns_error *err);

    /* Zeroed device memory, aligned to 64; `what` names it in the error. All
     * is taken before the first pass. */
    enum ns_status (*alloc)(struct ns_backend *be, size_t bytes,
                            const char *what, void **out,
                            struct ns_error *err);
    void (*release)(struct ns_backend *be, void *memory); /* takes NULL */
    /* Bytes that alloc() may still hand out; of a cpu, what the machine has
     * left, others' share too. UINT64_MAX: not known. */
    uint64_t (*available_bytes)(const struct ns_backend *be);
    void (*upload)(struct ns_backend *be, void *device, const void *host,
                   size_t bytes);
    void (*download)(struct ns_backend *be, void *host, const void *device,
                     size_t bytes);

    /* Bytes that pack() would take, for the memory plan. */
    size_t (*packed_bytes)(const struct ns_backend *be,
                           enum ns_packing packing,
                           const struct ns_matrix *sources, uint32_t n_sources);
    enum ns_status (*pack)(struct ns_backend *be, enum ns_packing packing,
                           const struct ns_matrix *sources, uint32_t n_sources,
                           struct ns_weight *out, struct ns_error *err);
    void (*drop)(struct ns_backend *be, struct ns_weight *weight);

    /* y[i] = table[ids[i]] * scale */
    void (*embed)(struct ns_backend *be, struct ns_rows y,
                  const struct ns_weight *table, const int32_t *ids,
                  float scale);
    /* y[i] = x[index[i]]; index: host */
    void (*gather)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                   const uint32_t *index);
    /* y[index[i]] = x[i]; index: host */
    void (*scatter)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                    const uint32_t *index);
    /* y = x / rms(x) * w; w may be NULL; y may be x */
    void (*rmsnorm)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                    const float *w, float eps);
    /* x = x + a / rms(a) * w */
    void (*add_norm)(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                     const float *w, float eps);
    /* x = (x + a) / rms(x + a): the end of the self-conditioning */
    void (*add_then_norm)(struct ns_backend *be, struct ns_rows x,
                          struct ns_rows a, float eps);
    /* Three branches off one RMS: y[j] = x / rms(x) * w[j], j < 3. */
    void (*branch_norms)(struct ns_backend *be, struct ns_rows y[3],
                         struct ns_rows x, const float *const w[3], float eps);
    /* x = (x + norm(norm(m, w_m) + norm(e, w_e), w)) * scalar[decoder[i]] */
    void (*layer_end)(struct ns_backend *be, struct ns_rows x,
                      struct ns_rows m, struct ns_rows e, const float *w_m,
                      const float *w_e, const float *w, float eps,
                      const float scalar[2], const uint8_t *decoder);
    /* y = x . W^T */
    void (*linear)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                   const struct ns_weight *w);
    /* y = gelu_tanh(x . gate^T) * (x . up^T) */
    void (*gated)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                  const struct ns_weight *w);
    /* Head-wise norms, rotation, and the writing of prefix KV. */
    void (*qkv)(struct ns_backend *be, const struct ns_pass *pass,
                const struct ns_qkv *args);
    void (*attention)(struct ns_backend *be, const struct ns_pass *pass,
                      const struct ns_attention *args);
    /* logits [rows, X] = u . router^T come from linear(); softmax over all X,
     * the top_k largest (lowest index first among equals), renormalised, times
     * expert_scale. index, weight: device [rows][top_k], by falling
     * probability. probs (device [rows][X]) may be NULL. */
    void (*route)(struct ns_backend *be, int32_t *index, float *weight,
                  float *probs, struct ns_rows logits,
                  const float *expert_scale, uint32_t top_k);
    /* y[i] = sum over experts in rising order of weight * down(gated(x[i])).
     * Scratch is the backend's own, sized by reserve(). */
    void (*experts)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                    const int32_t *index, const float *weight, uint32_t top_k,
                    const struct ns_weight *gate_up,
                    const struct ns_weight *down);
    void (*head)(struct ns_backend *be, const struct ns_head *args);
    /* rows[i] += table[0][x[i]] + table[1][y[i]]; table: device, two tables of
     * n_positions rows as wide as `rows`; x, y: device, below n_positions */
    void (*patch_place)(struct ns_backend *be, struct ns_rows rows,
                        const float *table, uint32_t n_positions,
                        const int32_t *x, const int32_t *y);
    void (*patch_qkv)(struct ns_backend *be, const struct ns_patch_qkv *args);
    /* y[i] = scale * mean of the side * side rows of x whose corner is row
     * corner[i], the grid's next line `columns[i]` rows on; then, unless NULL,
     * minus bias, times std. corner, columns: host; bias, std: device. */
    void (*patch_pool)(struct ns_backend *be, struct ns_rows y,
                       struct ns_rows x, const uint32_t *corner,
                       const uint32_t *columns, uint32_t side, float scale,
                       const float *bias, const float *std);
    /* Clipped linears of a vision tower: rows between two limits, and what
     * gated() computes, of its two products: y = gelu_tanh(y) * up. */
    void (*clamp)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                  float least, float most); /* y may be x; NaN stays */
    void (*gelu_times)(struct ns_backend *be, struct ns_rows y,
                       struct ns_rows up);
    /* Whole logits of a few rows into host memory [n][V]: tests, and nothing
     * else, want these. */
    void (*logits)(struct ns_backend *be, struct ns_rows h,
                   const struct ns_weight *table, float softcap, float *out);

    /* Takes all scratch that passes of up to these sizes need; called once
     * before the first pass. */
    enum ns_status (*reserve)(struct ns_backend *be,
                              const struct ns_backend_sizes *sizes,
                              struct ns_error *err);
    size_t (*scratch_bytes)(const struct ns_backend *be,
                            const struct ns_backend_sizes *sizes);
};

struct ns_backend {
    const struct ns_backend_ops *ops;
    char arithmetic[24]; /* "fp32", "bf16-avx512", ...: equal names give equal
                          * bits; part of engine_rev */
    enum ns_dtype kv_type; /* what pages of prefix KV hold: NS_F32, NS_BF16 */
    uint64_t busy_ns;    /* time inside ops since open */
};

struct ns_backend_options {
    const char *name;       /* "cpu" or "cuda"; NULL: cpu */
    uint32_t device;        /* cuda: which, of those that the process sees */
    uint32_t n_threads;     /* cpu: 0 is all that the process may use */
    const char *isa;        /* cpu: "ref", "avx2", "avx512", "avx512bf16",
                             * "amx"; NULL: the best that arithmetic allows */
    const char *arithmetic; /* cpu: "fp32", "fp8", "bf16", "auto" (bf16 where
                             * the machine has it); NULL: what isa is for, else
                             * fp32. cuda: "fp32", "bf16", "fp8" (and bf16
                             * where weights aren't codes); NULL, "auto": fp8 */
};

/* NS_REJECT if the machine lacks what is asked for. */
enum ns_status ns_backend_open(const struct ns_backend_options *options,
                               struct ns_backend **out, struct ns_error *err);
void ns_backend_close(struct ns_backend *be); /* takes NULL */

#endif
