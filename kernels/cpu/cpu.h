/* cpu.h - private to the cpu backend: its state, pool and packed layouts.
 *
 * Packed layouts (one for all instruction sets, so that dispatch is free):
 *
 * panel    32 outputs by k. bf16: [ceil(k/2)][32][2], pairs of k side by side
 *          (what VDPBF16 and AMX eat; fp32 arithmetic widens one 32-bit lane
 *          into two floats with a shift and a mask). fp32: [k][32]. Outputs and
 *          an odd k are padded with zeros.
 * LINEAR   panels of outputs 0..31, 32..63, ...; `count` such lists.
 * GATED    panels alternate: gate 0..31, up 0..31, gate 32..63, ...; so that
 *          gelu(gate) * up is formed while both are in registers or L1.
 * TABLE    the rows as stored [V][H] (lookup, and P x E where the vocabulary
 *          is the k axis), then LINEAR panels of the same (logits). Two copies
 *          on purpose: each side streams in its own order.
 *
 * fp32 arithmetic: each output is one chain of fused multiply-adds over k in
 * rising order from +0, whatever the vector width: avx2 and avx512 give the
 * same bits. `_ref` accumulates in double and is the definition.
 */
#ifndef NS_KERNELS_CPU_H
#define NS_KERNELS_CPU_H

#include "kernels/backend.h"

enum { PANEL = 32 };

/* The pool: run(ctx, task) for task 0..n_tasks-1 on all threads, the caller's
 * included; returns when all are done. Tasks must not depend on each other,
 * and what one computes must not depend on n_threads. */
struct pool;
enum ns_status pool_create(uint32_t n_threads, struct pool **out,
                           struct ns_error *err);
void pool_destroy(struct pool *pool);
uint32_t pool_threads(const struct pool *pool);
/* run gets the index of its thread, for per-thread scratch. */
void pool_run(struct pool *pool, uint32_t n_tasks,
              void (*run)(void *ctx, uint32_t task, uint32_t thread),
              void *ctx);

struct cpu {
    struct ns_backend base; /* first */
    struct ns_backend_ops ops; /* the table of the chosen instruction set */
    struct pool *pool;
    bool bf16_products; /* arithmetic bf16: activations are rounded to bf16 in
                         * front of each product, sums in fp32 */
    bool fp8_rows; /* arithmetic fp8: in front of products with weights that
                    * were stored as E4M3, activations are rounded to it */
    struct ns_error sticky; /* status NS_OK while all is well */
    struct ns_backend_sizes sizes;
    unsigned char *scratch;      /* shared, from reserve() */
    unsigned char *thread_scratch; /* [threads][thread_scratch_bytes] */
    size_t scratch_bytes, thread_scratch_bytes;
    size_t bytes_in_use; /* of all that memory_take() handed out */
};

/* What backend.c opens. */
enum ns_status cpu_open(const struct ns_backend_options *options,
                        struct ns_backend **out, struct ns_error *err);

/* Memory aligned to 64, counted; zeroed, which touches every page, or for the
 * caller to fill. */
enum ns_status memory_take(struct cpu *cpu, size_t bytes, bool zero,
                           const char *what, void **out, struct ns_error *err);
void memory_drop(struct cpu *cpu, void *memory); /* takes NULL */

/* The first failure of an op sticks until sync() reports it. */
void cpu_fail(struct cpu *cpu, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* pack.c: see backend.h. packed_bytes is 0 for sources that do not fit
 * together; pack says why. */
size_t cpu_packed_bytes(const struct ns_backend *be, enum ns_packing packing,
                        const struct ns_matrix *sources, uint32_t n_sources);
enum ns_status cpu_pack(struct ns_backend *be, enum ns_packing packing,
                        const struct ns_matrix *sources, uint32_t n_sources,
                        struct ns_weight *out, struct ns_error *err);
void cpu_drop(struct ns_backend *be, struct ns_weight *weight);

/* Where things lie in a packed weight. */
size_t packed_panel_bytes(enum ns_dtype dtype, uint32_t k);
const void *packed_panel(const struct ns_weight *w, uint32_t expert,
                         uint32_t panel); /* GATED: 2i gate, 2i + 1 up */
const void *packed_table_row(const struct ns_weight *w, uint32_t row);

/* Each fills in the ops that it has faster than the table holds so far; cpu.c
 * calls ref, then what the machine and the options allow, in rising order. */
void cpu_ops_ref(struct ns_backend_ops *ops);
void cpu_ops_avx2(struct ns_backend_ops *ops);
void cpu_ops_avx512(struct ns_backend_ops *ops);
void cpu_ops_avx512bf16(struct ns_backend_ops *ops); /* bf16 arithmetic only */
void cpu_ops_amx(struct ns_backend_ops *ops);        /* bf16 arithmetic only */

/* What scratch the ops of any instruction set need, shared and per thread. */
size_t cpu_scratch_bytes(const struct ns_backend_sizes *sizes);
size_t cpu_thread_scratch_bytes(const struct ns_backend_sizes *sizes);

#endif
