/* float8.h - E4M3: eight bits, as FP8 checkpoints and FP8 products have them.
 *
 *     s eeee mmm    value = (-1)^s * 2^(e - 7) * (1 + m / 8), e > 0
 *                           (-1)^s * 2^-6 * (m / 8),          e = 0
 *
 * No infinities; 0x7f and 0xff are the only NaNs, so the largest is 448. This
 * is the definition that every backend's own conversion is tested against.
 *
 * A row is quantised as dynamic per-token schemes do it: one scale, so that its
 * largest magnitude becomes 448; a product of such rows is the sum over the
 * codes, times both scales. Division, not a product with the inverse: the two
 * differ in the last bit, and with it in the code at a midpoint.
 */
#ifndef NS_KERNELS_FLOAT8_H
#define NS_KERNELS_FLOAT8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define NS_E4M3_MAX 448.0f

static inline float
ns_e4m3_value(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t exponent = code >> 3 & 0xfu, mantissa = code & 0x7u, bits;
    float value;

    if ((code & 0x7fu) == 0x7fu)
        bits = 0x7fc00000u;
    else if (exponent == 0) { /* m * 2^-9, exactly */
        value = (float)mantissa * 0x1p-9f;
        memcpy(&bits, &value, sizeof(bits));
    } else {
        bits = (exponent + 120u) << 23 | mantissa << 20;
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The nearest code, to even between two; what lies beyond 448, infinities too,
 * becomes 448. NaN stays NaN. */
static inline uint8_t
ns_e4m3_code(float value)
{
    uint32_t bits, sign, magnitude;
    float size;

    memcpy(&bits, &value, sizeof(bits));
    sign = bits >> 24 & 0x80u;
    magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    memcpy(&size, &magnitude, sizeof(size));
    if (size >= NS_E4M3_MAX)
        return (uint8_t)(sign | 0x7eu);
    if (size < 0x1p-6f) { /* at the grain of the smallest: 8 is 2^-6 itself */
        size = size * 0x1p9f + 0x1p23f; /* rounds as the processor does */
        memcpy(&bits, &size, sizeof(bits));
        return (uint8_t)(sign | (bits & 0xfu));
    }
    /* Three bits of mantissa stay; a carry moves into the exponent. */
    magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
    return (uint8_t)(sign | ((magnitude >> 20) - (120u << 3)));
}

/* A row's scale, by which its codes' values are to be multiplied: 1 for a row
 * of zeros, NaN for one that holds NaN or an infinity, which has none. */
static inline float
ns_e4m3_scale(const float *row, uint32_t n)
{
    float largest = 0.0f, scale;

    for (uint32_t i = 0; i < n; i++) {
        float size = fabsf(row[i]);

        if (!isfinite(size))
            return NAN;
        if (size > largest)
            largest = size;
    }
    scale = largest / NS_E4M3_MAX;
    if (scale < 0x1p-126f) /* its inverse would not be finite */
        scale = largest > 0.0f ? 0x1p-126f : 1.0f;
    return scale;
}

/* Codes of a row; returns its scale. */
static inline float
ns_e4m3_row(uint8_t *code, const float *row, uint32_t n)
{
    float scale = ns_e4m3_scale(row, n);

    for (uint32_t i = 0; i < n; i++)
        code[i] = ns_e4m3_code(row[i] / scale); /* by NaN: NaN */
    return scale;
}

/* What the codes of a row stand for. `to` may be `row`. */
static inline void
ns_e4m3_round_row(float *to, const float *row, uint32_t n)
{
    float scale = ns_e4m3_scale(row, n);

    for (uint32_t i = 0; i < n; i++)
        to[i] = ns_e4m3_value(ns_e4m3_code(row[i] / scale)) * scale;
}

#endif
