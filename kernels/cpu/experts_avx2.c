/* experts_avx2.c - the mixture of experts; the plan is in experts_body.h. */
#define ISA(name) name##_avx2
#define GEMM_F32 gemm_f32_avx2
#define GEMM_PAIRS gemm_pairs_avx2

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/experts_body.h"
