/* cpu_avx512.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_avx512(struct ns_backend_ops *ops)
{
    ops->rmsnorm = rmsnorm_avx512;
    ops->add_norm = add_norm_avx512;
    ops->add_then_norm = add_then_norm_avx512;
    ops->branch_norms = branch_norms_avx512;
    ops->layer_end = layer_end_avx512;
    ops->linear = linear_avx512;
    ops->gated = gated_avx512;
    ops->qkv = qkv_avx512;
    ops->patch_qkv = patch_qkv_avx512;
    ops->attention = attention_avx512;
    ops->route = route_avx512;
    ops->experts = experts_avx512;
    ops->head = head_avx512;
}
