/* experts_avx512.c - the mixture of experts; the plan is in experts_body.h. */
#define ISA(name) name##_avx512
#define GEMM_F32 gemm_f32_avx512
#define GEMM_PAIRS gemm_pairs_avx512

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/experts_body.h"
