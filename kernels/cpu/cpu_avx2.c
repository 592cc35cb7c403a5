/* cpu_avx2.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_avx2(struct ns_backend_ops *ops)
{
    ops->linear = linear_avx2;
    ops->gated = gated_avx2;
    ops->experts = experts_avx2;
    ops->head = head_avx2;
    ops->attention = attention_avx2;
}
