/* attention_avx2.c - paged attention; the plan is in attention_body.h. */
#define ISA(name) name##_avx2
#define GEMM_F32 gemm_f32_avx2

#include "kernels/cpu/tuned.h"

#include "kernels/cpu/attention_body.h"
