/* linear_avx2.c - the plain and the gated product; the plan is in linear_body.h. */
#define ISA(name) name##_avx2
#define GEMM_F32 gemm_f32_avx2
#define GEMM_PAIRS gemm_pairs_avx2

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/linear_body.h"
