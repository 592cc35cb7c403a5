/* attention_avx512.c - paged attention; the plan is in attention_body.h. */
#define ISA(name) name##_avx512
#define GEMM_F32 gemm_f32_avx512

#include "kernels/cpu/tuned.h"

#include "kernels/cpu/attention_body.h"
