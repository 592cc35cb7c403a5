/* ref.h - the reference ops: the definition of every operation.
 *
 * Formula order, sums in double, rounded to fp32 where a tensor of the model
 * ends; no cleverness. They are parallel over rows (or panels) so that tests
 * are bearable, and each row is computed by itself. Arguments: backend.h.
 */
#ifndef NS_KERNELS_CPU_REF_H
#define NS_KERNELS_CPU_REF_H

#include <string.h>

#include "kernels/cpu/cpu.h"

void embed_ref(struct ns_backend *be, struct ns_rows y,
               const struct ns_weight *table, const int32_t *ids, float scale);
void gather_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                const uint32_t *index);
void scatter_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                 const uint32_t *index);
void rmsnorm_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                 const float *w, float eps);
void add_norm_ref(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                  const float *w, float eps);
void add_then_norm_ref(struct ns_backend *be, struct ns_rows x,
                       struct ns_rows a, float eps);
void branch_norms_ref(struct ns_backend *be, struct ns_rows y[3],
                      struct ns_rows x, const float *const w[3], float eps);
void layer_end_ref(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
                   struct ns_rows e, const float *w_m, const float *w_e,
                   const float *w, float eps, const float scalar[2],
                   const uint8_t *decoder);
void linear_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                const struct ns_weight *w);
void gated_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
               const struct ns_weight *w);
void qkv_ref(struct ns_backend *be, const struct ns_pass *pass,
             const struct ns_qkv *args);
void attention_ref(struct ns_backend *be, const struct ns_pass *pass,
                   const struct ns_attention *args);
void route_ref(struct ns_backend *be, int32_t *index, float *weight,
               float *probs, struct ns_rows logits, const float *expert_scale,
               uint32_t top_k);
void experts_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                 const int32_t *index, const float *weight, uint32_t top_k,
                 const struct ns_weight *gate_up,
                 const struct ns_weight *down);
void head_ref(struct ns_backend *be, const struct ns_head *args);
void patch_place_ref(struct ns_backend *be, struct ns_rows rows,
                     const float *table, uint32_t n_positions,
                     const int32_t *x, const int32_t *y);
void patch_qkv_ref(struct ns_backend *be, const struct ns_patch_qkv *args);
void patch_pool_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                    const uint32_t *corner, const uint32_t *columns,
                    uint32_t side, float scale, const float *bias,
                    const float *std);
void clamp_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
               float least, float most);
void gelu_times_ref(struct ns_backend *be, struct ns_rows y,
                    struct ns_rows up);
void logits_ref(struct ns_backend *be, struct ns_rows h,
                const struct ns_weight *table, float softcap, float *out);

/* Thread scratch that the ops above need. */
size_t ref_thread_scratch_bytes(const struct ns_backend_sizes *sizes);

/* ---- what they share -------------------------------------------------- */

static inline float *
row_of(struct ns_rows rows, uint32_t i)
{
    return rows.data + i * rows.stride;
}

static inline uint32_t
panels_over(uint32_t n)
{
    return (n + PANEL - 1) / PANEL;
}

static inline float
bf16_to_float(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* To the nearest bf16, ties to even, kept as a float; NaN stays NaN. */
static inline float
round_to_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits |= 0x00400000u;
    else
        bits += 0x7fffu + (bits >> 16 & 1u);
    bits &= 0xffff0000u;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* out[c] = sum over k of x[k] * w[output c of the panel][k]. */
void panel_dot(double out[PANEL], const float *x, const void *panel,
               enum ns_dtype dtype, uint32_t k);

/* A row as a product with `w` takes it: rounded to E4M3 into `buffer`, which
 * holds w->k, where the arithmetic asks for that; else x itself. */
const float *product_row(const struct cpu *cpu, const struct ns_weight *w,
                         const float *x, float *buffer);

double gelu_tanh(double x);

/* 1 / sqrt(mean(x^2) + eps) */
double inverse_rms(const float *x, uint32_t n, float eps);

#endif
