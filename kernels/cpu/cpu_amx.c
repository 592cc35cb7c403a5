/* cpu_amx.c - which ops the cpu backend has tuned for this instruction set:
 * those with a product of weights. */
#include "kernels/cpu/tuned.h"

void
cpu_ops_amx(struct ns_backend_ops *ops)
{
    ops->linear = linear_amx;
    ops->gated = gated_amx;
    ops->experts = experts_amx;
    ops->head = head_amx;
}
