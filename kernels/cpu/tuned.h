/* tuned.h - the ops that exist for more than one instruction set.
 *
 * A body (NAME_body.h) is written once over vec.h and gemm.h, and compiled by
 * NAME_<isa>.c with the flags of its suffix. avx2 and avx512 give the same
 * bits. avx512bf16 and amx differ in the products only, so they have the
 * bodies that contain a product of weights and nothing else.
 */
#ifndef NS_KERNELS_CPU_TUNED_H
#define NS_KERNELS_CPU_TUNED_H

#include "kernels/cpu/cpu.h"

#define TUNED_PRODUCTS(isa)                                                   \
    void linear_##isa(struct ns_backend *be, struct ns_rows y,                \
                      struct ns_rows x, const struct ns_weight *w);           \
    void gated_##isa(struct ns_backend *be, struct ns_rows y,                 \
                     struct ns_rows x, const struct ns_weight *w);            \
    void experts_##isa(struct ns_backend *be, struct ns_rows y,               \
                       struct ns_rows x, const int32_t *index,                \
                       const float *weight, uint32_t top_k,                   \
                       const struct ns_weight *gate_up,                       \
                       const struct ns_weight *down);                         \
    void head_##isa(struct ns_backend *be, const struct ns_head *args);

#define TUNED_VECTORS(isa)                                                    \
    void rmsnorm_##isa(struct ns_backend *be, struct ns_rows y,               \
                       struct ns_rows x, const float *w, float eps);          \
    void add_norm_##isa(struct ns_backend *be, struct ns_rows x,              \
                        struct ns_rows a, const float *w, float eps);         \
    void add_then_norm_##isa(struct ns_backend *be, struct ns_rows x,         \
                             struct ns_rows a, float eps);                    \
    void branch_norms_##isa(struct ns_backend *be, struct ns_rows y[3],       \
                            struct ns_rows x, const float *const w[3],        \
                            float eps);                                       \
    void layer_end_##isa(struct ns_backend *be, struct ns_rows x,             \
                         struct ns_rows m, struct ns_rows e,                  \
                         const float *w_m, const float *w_e, const float *w,  \
                         float eps, const float scalar[2],                    \
                         const uint8_t *decoder);                             \
    void qkv_##isa(struct ns_backend *be, const struct ns_pass *pass,         \
                   const struct ns_qkv *args);                                \
    void patch_qkv_##isa(struct ns_backend *be,                               \
                         const struct ns_patch_qkv *args);                    \
    void attention_##isa(struct ns_backend *be, const struct ns_pass *pass,   \
                         const struct ns_attention *args);                    \
    void route_##isa(struct ns_backend *be, int32_t *index, float *weight,    \
                     float *probs, struct ns_rows logits,                     \
                     const float *expert_scale, uint32_t top_k);

TUNED_PRODUCTS(avx2)
TUNED_PRODUCTS(avx512)
TUNED_PRODUCTS(avx512bf16)
TUNED_PRODUCTS(amx)
TUNED_VECTORS(avx2)
TUNED_VECTORS(avx512)

#endif
