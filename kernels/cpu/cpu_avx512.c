/* cpu_avx512.c - which ops the cpu backend has tuned for this instruction set. */
#include "kernels/cpu/cpu.h"

void
cpu_ops_avx512(struct ns_backend_ops *ops)
{
    (void)ops; /* filled as kernels land */
}
