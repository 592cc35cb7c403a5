/* head_avx512.c - the fused head; the plan is in head_body.h. */
#define ISA(name) name##_avx512
#define GEMM_F32 gemm_f32_avx512
#define GEMM_PAIRS gemm_pairs_avx512

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/head_body.h"
