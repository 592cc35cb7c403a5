/* linear_amx.c - the plain and the gated product; the plan is in linear_body.h. */
#define ISA(name) name##_amx
#define GEMM_F32 gemm_f32_avx512
#define GEMM_PAIRS gemm_pairs_avx512
#define GEMM_BF16 gemm_bf16_amx

#include "kernels/cpu/product_body.h"
#include "kernels/cpu/tuned.h"

#include "kernels/cpu/linear_body.h"
