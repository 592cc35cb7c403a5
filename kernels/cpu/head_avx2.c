/* head_avx2.c - the fused head; the plan is in head_body.h. */
#define ISA(name) name##_avx2
#define GEMM_F32 gemm_f32_avx2
#define GEMM_PAIRS gemm_pairs_avx2

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/head_body.h"
