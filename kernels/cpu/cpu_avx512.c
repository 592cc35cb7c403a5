/* cpu_avx512.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_avx512(struct ns_backend_ops *ops)
{
    ops->linear = linear_avx512;
    ops->gated = gated_avx512;
    ops->experts = experts_avx512;
    ops->head = head_avx512;
    ops->attention = attention_avx512;
}
