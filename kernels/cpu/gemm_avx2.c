/* gemm_avx2.c - fp32 strips in tiles of 6 by 16: 12 accumulators, two registers
 * of b, one broadcast. */
#include "kernels/cpu/gemm.h"

#include <string.h>

#include "kernels/cpu/vec.h"

#define ISA(name) name##_avx2
#define WIDTH 8
#define TILE_ROWS 6
#define PAIR_ROWS 5

typedef __m256 reg;
typedef __m256i regi;

VEC_INLINE reg reg_zero(void) { return _mm256_setzero_ps(); }
VEC_INLINE reg reg_load(const float *p) { return _mm256_loadu_ps(p); }
VEC_INLINE void reg_store(float *p, reg a) { _mm256_storeu_ps(p, a); }
VEC_INLINE reg reg_set(float a) { return _mm256_set1_ps(a); }
VEC_INLINE reg reg_fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
VEC_INLINE regi
regi_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
VEC_INLINE reg
reg_low_bf16(regi w)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
VEC_INLINE reg
reg_high_bf16(regi w)
{
    return _mm256_castsi256_ps(
        _mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)));
}

#include "kernels/cpu/gemm_body.h"
