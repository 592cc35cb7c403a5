/* cpu_amx.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/cpu.h"

void
cpu_ops_amx(struct ns_backend_ops *ops)
{
    (void)ops; /* filled as kernels land */
}
