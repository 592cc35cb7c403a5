/* vec.h - sixteen lanes of float, the same on AVX2 and AVX-512.
 *
 * The tuned files share their bodies through this type: one zmm register where
 * AVX-512 is on, two ymm registers elsewhere. Every operation is elementwise
 * or has a fixed order, and the two halves are always treated alike, so that
 * both instruction sets give the same bits. Include only from files whose
 * suffix turns the instructions on.
 */
#ifndef NS_KERNELS_CPU_VEC_H
#define NS_KERNELS_CPU_VEC_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

#define VEC_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

typedef __m512 vf;  /* 16 floats */
typedef __m512i vi; /* 16 int32 */
typedef __mmask16 vm;

VEC_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
VEC_INLINE vf vf_set(float a) { return _mm512_set1_ps(a); }
VEC_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VEC_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VEC_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
VEC_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC_INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
VEC_INLINE vf
vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT |
                                       _MM_FROUND_NO_EXC);
}
VEC_INLINE vi vf_to_int(vf a) { return _mm512_cvtps_epi32(a); }
VEC_INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
VEC_INLINE vi vi_set(int32_t a) { return _mm512_set1_epi32(a); }
VEC_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
VEC_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
VEC_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
VEC_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
VEC_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
VEC_INLINE vf vi_as_float(vi a) { return _mm512_castsi512_ps(a); }
VEC_INLINE vi vf_as_int(vf a) { return _mm512_castps_si512(a); }
VEC_INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC_INLINE vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
/* m ? b : a, lane by lane */
VEC_INLINE vf vf_pick(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, a, b); }
VEC_INLINE vi vi_pick(vm m, vi a, vi b) { return _mm512_mask_blend_epi32(m, a, b); }
VEC_INLINE vm vm_and(vm a, vm b) { return a & b; }
VEC_INLINE int vm_all(vm m) { return m == 0xffff; }

#else

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef struct { __m256 a, b; } vm;

#define VEC_PAIR(type, x, y) ((type){ (x), (y) })

VEC_INLINE vf
vf_load(const float *p)
{
    return VEC_PAIR(vf, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}
VEC_INLINE void
vf_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a.a);
    _mm256_storeu_ps(p + 8, a.b);
}
VEC_INLINE vf
vf_set(float a)
{
    return VEC_PAIR(vf, _mm256_set1_ps(a), _mm256_set1_ps(a));
}

#define VEC_BINARY(name, op)                                                  \
    VEC_INLINE vf name(vf x, vf y)                                            \
    {                                                                         \
        return VEC_PAIR(vf, op(x.a, y.a), op(x.b, y.b));                      \
    }
VEC_BINARY(vf_add, _mm256_add_ps)
VEC_BINARY(vf_sub, _mm256_sub_ps)
VEC_BINARY(vf_mul, _mm256_mul_ps)
VEC_BINARY(vf_div, _mm256_div_ps)
VEC_BINARY(vf_max, _mm256_max_ps)
VEC_BINARY(vf_min, _mm256_min_ps)
#undef VEC_BINARY

VEC_INLINE vf
vf_fma(vf x, vf y, vf z)
{
    return VEC_PAIR(vf, _mm256_fmadd_ps(x.a, y.a, z.a),
                    _mm256_fmadd_ps(x.b, y.b, z.b));
}
VEC_INLINE vf
vf_fnma(vf x, vf y, vf z)
{
    return VEC_PAIR(vf, _mm256_fnmadd_ps(x.a, y.a, z.a),
                    _mm256_fnmadd_ps(x.b, y.b, z.b));
}
#define VEC_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
VEC_INLINE vf
vf_round(vf x)
{
    return VEC_PAIR(vf, _mm256_round_ps(x.a, VEC_NEAREST),
                    _mm256_round_ps(x.b, VEC_NEAREST));
}
VEC_INLINE vi
vf_to_int(vf x)
{
    return VEC_PAIR(vi, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
}
VEC_INLINE vf
vi_to_float(vi x)
{
    return VEC_PAIR(vf, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b));
}
VEC_INLINE vi
vi_set(int32_t a)
{
    return VEC_PAIR(vi, _mm256_set1_epi32(a), _mm256_set1_epi32(a));
}
VEC_INLINE vi
vi_load(const void *p)
{
    const __m256i *q = p;

    return VEC_PAIR(vi, _mm256_loadu_si256(q), _mm256_loadu_si256(q + 1));
}
VEC_INLINE void
vi_store(void *p, vi x)
{
    __m256i *q = p;

    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}

#define VEC_BINARY(name, op)                                                  \
    VEC_INLINE vi name(vi x, vi y)                                            \
    {                                                                         \
        return VEC_PAIR(vi, op(x.a, y.a), op(x.b, y.b));                      \
    }
VEC_BINARY(vi_add, _mm256_add_epi32)
VEC_BINARY(vi_and, _mm256_and_si256)
VEC_BINARY(vi_or, _mm256_or_si256)
#undef VEC_BINARY

#define vi_shl(x, n)                                                          \
    VEC_PAIR(vi, _mm256_slli_epi32((x).a, n), _mm256_slli_epi32((x).b, n))
#define vi_shr(x, n)                                                          \
    VEC_PAIR(vi, _mm256_srli_epi32((x).a, n), _mm256_srli_epi32((x).b, n))
VEC_INLINE vf
vi_as_float(vi x)
{
    return VEC_PAIR(vf, _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b));
}
VEC_INLINE vi
vf_as_int(vf x)
{
    return VEC_PAIR(vi, _mm256_castps_si256(x.a), _mm256_castps_si256(x.b));
}
VEC_INLINE vm
vf_lt(vf x, vf y)
{
    return VEC_PAIR(vm, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ),
                    _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ));
}
VEC_INLINE vm
vi_gt(vi x, vi y)
{
    return VEC_PAIR(vm, _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)),
                    _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b)));
}
VEC_INLINE vf
vf_pick(vm m, vf x, vf y)
{
    return VEC_PAIR(vf, _mm256_blendv_ps(x.a, y.a, m.a),
                    _mm256_blendv_ps(x.b, y.b, m.b));
}
VEC_INLINE vi
vi_pick(vm m, vi x, vi y)
{
    return vf_as_int(vf_pick(m, vi_as_float(x), vi_as_float(y)));
}
VEC_INLINE vm
vm_and(vm x, vm y)
{
    return VEC_PAIR(vm, _mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b));
}
VEC_INLINE int
vm_all(vm m)
{
    return _mm256_movemask_ps(_mm256_and_ps(m.a, m.b)) == 0xff;
}

#endif

/* The first n lanes from memory, n <= 16; the rest are 0 and never read. */
VEC_INLINE vf
vf_load_some(const float *p, uint32_t n)
{
    if (n == LANES)
        return vf_load(p);
#ifdef __AVX512F__
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float some[LANES] = { 0 };

    memcpy(some, p, n * sizeof(float));
    return vf_load(some);
#endif
}

VEC_INLINE void
vf_store_some(float *p, vf a, uint32_t n)
{
    if (n == LANES) {
        vf_store(p, a);
        return;
    }
#ifdef __AVX512F__
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
#else
    float some[LANES];

    vf_store(some, a);
    memcpy(p, some, n * sizeof(float));
#endif
}

/* Lanes first..end - 1 stay, the others become -inf. */
VEC_INLINE vf
vf_between(vf x, int32_t first, int32_t end)
{
    vi lane = vi_load((const int32_t[]){ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                         12, 13, 14, 15 });
    vm inside = vm_and(vi_gt(vi_set(end), lane), vi_gt(lane, vi_set(first - 1)));

    return vf_pick(inside, vf_set(-__builtin_inff()), x);
}

#ifndef __AVX512F__
VEC_INLINE void
transpose_8(__m256 r[8])
{
    __m256 t[8];

    for (int i = 0; i < 8; i += 4) {
        __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]);
        __m256 b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
        __m256 d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);

        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
#endif

/* Sixteen rows of sixteen change places with sixteen columns. */
VEC_INLINE void
vf_transpose(vf r[LANES])
{
#ifdef __AVX512F__
    __m512 t[LANES];

#define LOW(a, b) _mm512_unpacklo_ps(a, b)
#define HIGH(a, b) _mm512_unpackhi_ps(a, b)
#define LOW2(a, b)                                                            \
    _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a),                  \
                                        _mm512_castps_pd(b)))
#define HIGH2(a, b)                                                           \
    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a),                  \
                                        _mm512_castps_pd(b)))
    /* 4 by 4 within each 128-bit quarter, then the quarters. */
    for (int i = 0; i < LANES; i += 4) {
        vf a = LOW(r[i], r[i + 1]), b = HIGH(r[i], r[i + 1]);
        vf c = LOW(r[i + 2], r[i + 3]), d = HIGH(r[i + 2], r[i + 3]);

        t[i] = LOW2(a, c);
        t[i + 1] = HIGH2(a, c);
        t[i + 2] = LOW2(b, d);
        t[i + 3] = HIGH2(b, d);
    }
    for (int i = 0; i < 4; i++) {
        vf a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
        vf b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        vf c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        vf d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);

        r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
#else
    __m256 a[8], b[8], c[8], d[8];

    for (int i = 0; i < 8; i++) {
        a[i] = r[i].a;
        b[i] = r[i].b;
        c[i] = r[i + 8].a;
        d[i] = r[i + 8].b;
    }
    transpose_8(a);
    transpose_8(b);
    transpose_8(c);
    transpose_8(d);
    for (int i = 0; i < 8; i++) {
        r[i] = VEC_PAIR(vf, a[i], c[i]);
        r[i + 8] = VEC_PAIR(vf, b[i], d[i]);
    }
#endif
}

/* How many lanes are left of n from i on. */
VEC_INLINE uint32_t
lanes_left(uint32_t n, uint32_t i)
{
    return n - i < LANES ? n - i : LANES;
}

/* Lane j is added to lane j + 8, then + 4, + 2, + 1: the one order of sums. */
VEC_INLINE float
vf_sum(vf x)
{
#ifdef __AVX512F__
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x),
                             _mm512_extractf32x8_ps(x, 1));
#else
    __m256 a = _mm256_add_ps(x.a, x.b);
#endif
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a),
                          _mm256_extractf128_ps(a, 1));

    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
}

VEC_INLINE float
vf_highest(vf x)
{
#ifdef __AVX512F__
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x),
                             _mm512_extractf32x8_ps(x, 1));
#else
    __m256 a = _mm256_max_ps(x.a, x.b);
#endif
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a),
                          _mm256_extractf128_ps(a, 1));

    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    s = _mm_max_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
}

/* Two floats in one 32-bit lane of bf16: the first of the pair is low. */
VEC_INLINE vf vi_low_bf16(vi pair) { return vi_as_float(vi_shl(pair, 16)); }
VEC_INLINE vf
vi_high_bf16(vi pair)
{
    return vi_as_float(vi_and(pair, vi_set((int32_t)0xffff0000)));
}

/* Sixteen bf16 numbers one after the other. */
VEC_INLINE vf
vf_widen(const uint16_t *p)
{
#ifdef __AVX512F__
    vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
    const __m128i *q = (const __m128i *)p;
    vi wide = VEC_PAIR(vi, _mm256_cvtepu16_epi32(_mm_loadu_si128(q)),
                       _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)));
#endif
    return vi_low_bf16(wide);
}

/* Rounds to the nearest bf16, ties to even, and leaves it as a float. NaN
 * stays NaN: its mantissa is kept from overflowing by the quiet bit. */
VEC_INLINE vf
vf_to_bf16(vf x)
{
    vi bits = vf_as_int(x);
    vi odd = vi_and(vi_shr(bits, 16), vi_set(1));
    vi rounded = vi_add(bits, vi_add(odd, vi_set(0x7fff)));
    vm nan = vi_gt(vi_and(bits, vi_set(0x7fffffff)), vi_set(0x7f800000));

    rounded = vi_pick(nan, rounded, vi_or(bits, vi_set(0x00400000)));
    return vi_as_float(vi_and(rounded, vi_set((int32_t)0xffff0000)));
}

/* e^x to 1 unit in the last place; 0 below -87.3, so that -inf is a mask. */
VEC_INLINE vf
vf_exp(vf x)
{
    vf lowest = vf_set(-87.33f);
    vf y = vf_max(lowest, vf_min(vf_set(88.37f), x)); /* NaN goes through */
    vf n = vf_round(vf_mul(y, vf_set(1.44269504f)));
    /* ln 2 in two parts: the first times any n here is exact */
    vf r = vf_fnma(n, vf_set(0.693359375f), y);
    vf p = vf_set(0x1.6a2252p-10f);

    r = vf_fnma(n, vf_set(-2.12194440e-4f), r);
    p = vf_fma(p, r, vf_set(0x1.123b04p-7f));
    p = vf_fma(p, r, vf_set(0x1.5558f8p-5f));
    p = vf_fma(p, r, vf_set(0x1.555490p-3f));
    p = vf_fma(p, r, vf_set(0x1.fffffcp-2f));
    p = vf_fma(vf_mul(r, r), p, r);
    p = vf_add(p, vf_set(1.0f));
    p = vf_mul(p, vi_as_float(vi_shl(vi_add(vf_to_int(n), vi_set(127)), 23)));
    return vf_pick(vf_lt(x, lowest), p, vf_set(0.0f));
}

/* Odd polynomial near 0, 1 - 2 / (e^2|x| + 1) elsewhere. */
VEC_INLINE vf
vf_tanh(vf x)
{
    vi sign = vi_and(vf_as_int(x), vi_set((int32_t)0x80000000));
    vf a = vi_as_float(vi_and(vf_as_int(x), vi_set(0x7fffffff)));
    vf t = vf_mul(x, x);
    vf p = vf_set(-0.005717037f);
    vm near = vf_lt(a, vf_set(0.625f));
    vf e;

    p = vf_fma(p, t, vf_set(0.020650579f));
    p = vf_fma(p, t, vf_set(-0.053743497f));
    p = vf_fma(p, t, vf_set(0.13331491f));
    p = vf_fma(p, t, vf_set(-0.33333284f));
    p = vf_fma(vf_mul(a, t), p, a);
    if (vm_all(near))
        return vi_as_float(vi_or(vf_as_int(p), sign));
    e = vf_add(vf_exp(vf_add(a, a)), vf_set(1.0f));
    e = vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), e));
    p = vf_pick(near, e, p);
    return vi_as_float(vi_or(vf_as_int(p), sign));
}

/* 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3):
 * the second form loses nothing where tanh u is near -1. */
VEC_INLINE vf
vf_gelu_tanh(vf x)
{
    vf x2 = vf_mul(x, x);
    vf inner = vf_fma(vf_mul(x2, vf_set(0.044715f)), x, x);
    vf e = vf_exp(vf_mul(inner, vf_set(-1.5957691216f)));

    return vf_div(x, vf_add(vf_set(1.0f), e));
}

#endif
