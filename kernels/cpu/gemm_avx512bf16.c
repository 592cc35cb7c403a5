/* gemm_avx512bf16.c - bf16 strips in tiles of 14 by 32. */
#include "kernels/cpu/gemm.h"

#include <string.h>

#include "kernels/cpu/vec.h"

#define ISA(name) name##_avx512bf16
#define BF16_PRODUCTS
#define WIDTH 16
#define TILE_ROWS 14

typedef __m512 reg; /* of fp32 sums, or of bf16 pairs */

VEC_INLINE reg reg_zero(void) { return _mm512_setzero_ps(); }
VEC_INLINE reg reg_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_INLINE void reg_store(float *p, reg a) { _mm512_storeu_ps(p, a); }
VEC_INLINE reg
reg_set(float pair)
{
    return _mm512_set1_ps(pair);
}
VEC_INLINE reg
reg_fma(reg a, reg b, reg c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

#include "kernels/cpu/gemm_body.h"
