/* cpu_avx2.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_avx2(struct ns_backend_ops *ops)
{
    ops->rmsnorm = rmsnorm_avx2;
    ops->add_norm = add_norm_avx2;
    ops->add_then_norm = add_then_norm_avx2;
    ops->branch_norms = branch_norms_avx2;
    ops->layer_end = layer_end_avx2;
    ops->linear = linear_avx2;
    ops->gated = gated_avx2;
    ops->qkv = qkv_avx2;
    ops->patch_qkv = patch_qkv_avx2;
    ops->attention = attention_avx2;
    ops->route = route_avx2;
    ops->experts = experts_avx2;
    ops->head = head_avx2;
}
