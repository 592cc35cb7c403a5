/* gemm_avx512.c - fp32 strips in tiles of 14 by 32: 28 accumulators, two
 * registers of b, one broadcast. */
#include "kernels/cpu/gemm.h"

#include <string.h>

#include "kernels/cpu/vec.h"

#define ISA(name) name##_avx512
#define WIDTH 16
#define TILE_ROWS 14
#define PAIR_ROWS 14

typedef __m512 reg;
typedef __m512i regi;

VEC_INLINE reg reg_zero(void) { return _mm512_setzero_ps(); }
VEC_INLINE reg reg_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_INLINE void reg_store(float *p, reg a) { _mm512_storeu_ps(p, a); }
VEC_INLINE reg reg_set(float a) { return _mm512_set1_ps(a); }
VEC_INLINE reg reg_fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
VEC_INLINE regi regi_load(const void *p) { return _mm512_loadu_si512(p); }
VEC_INLINE reg
reg_low_bf16(regi w)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
VEC_INLINE reg
reg_high_bf16(regi w)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)));
}

#include "kernels/cpu/gemm_body.h"
