/* cpu_avx512bf16.c - which ops the cpu backend has tuned for this instruction set:
 * those with a product of weights. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_avx512bf16(struct ns_backend_ops *ops)
{
    ops->linear = linear_avx512bf16;
    ops->gated = gated_avx512bf16;
    ops->experts = experts_avx512bf16;
    ops->head = head_avx512bf16;
}
