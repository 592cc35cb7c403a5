/* product_body.h - how the tuned bodies multiply rows with a packed weight.
 *
 * The rows of a block are first put into the form that the arithmetic wants
 * (an operand), then meet one panel after the other. Its forms:
 *
 *   fp32                       the rows themselves, or a gathered copy
 *   fp8                        a copy rounded to E4M3 and a scale, still floats
 *   bf16 on fp32 instructions  a copy rounded to bf16, still floats
 *   bf16 on bf16 instructions  a copy in bf16, rows padded with zeros to 32
 *
 * Included by the bodies only. An includer for an instruction set with bf16
 * products defines GEMM_BF16.
 */
#ifndef NS_KERNELS_CPU_PRODUCT_BODY_H
#define NS_KERNELS_CPU_PRODUCT_BODY_H

#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/vec.h"
#include "kernels/float8.h"

struct operand {
    const void *data;
    size_t ld; /* elements */
    bool bf16;
};

/* Rows of a block for inputs of k numbers, within OPERAND_BYTES. Depends on
 * neither threads nor rows, not that any bit would depend on it. */
static inline uint32_t
operand_rows(uint32_t k)
{
    uint32_t fit = (uint32_t)(OPERAND_BYTES / sizeof(float)) / operand_ld(k);

    return fit < 1 ? 1 : fit > BLOCK_ROWS ? BLOCK_ROWS : fit;
}

VEC_INLINE void
round_row(float *to, const float *from, uint32_t k)
{
    for (uint32_t i = 0; i < k; i += LANES) {
        uint32_t n = lanes_left(k, i);

        vf_store_some(to + i, vf_to_bf16(vf_load_some(from + i, n)), n);
    }
}

#ifdef GEMM_BF16
VEC_INLINE __m256i
narrow(__m512 x)
{
    return _mm512_cvtepi32_epi16(vi_shr(vf_as_int(vf_to_bf16(x)), 16));
}

VEC_INLINE void
narrow_row(uint16_t *to, const float *from, uint32_t k)
{
    for (uint32_t i = 0; i < operand_ld(k); i += LANES) {
        uint32_t n = i < k ? lanes_left(k, i) : 0;

        _mm256_storeu_si256((__m256i *)(to + i),
                            narrow(vf_load_some(from + i, n)));
    }
}
#endif

/* Rows index[0..n-1] of x, or its first n. `buffer` holds operand_ld(k) floats
 * a row; it is left alone where x serves as it is: not where its rows lie a
 * page apart, which leaves a tile's rows one set of L1 to share. */
VEC_INLINE struct operand
operand_make(const struct cpu *cpu, const struct ns_weight *w, const float *x,
             size_t ldx, const uint32_t *index, uint32_t n_rows, uint32_t k,
             void *buffer)
{
    struct operand operand = { x, ldx, false };
    bool fp8 = cpu->fp8_rows && w->e4m3;

    if (!cpu->bf16_products && !fp8 && !index && (ldx % 1024 || n_rows < 8))
        return operand;
    operand.data = buffer;
    operand.ld = operand_ld(k);
#ifdef GEMM_BF16
    operand.bf16 = cpu->bf16_products && w->dtype == NS_BF16;
#endif
    for (uint32_t i = 0; i < n_rows; i++) {
        const float *from = x + (index ? index[i] : i) * ldx;
        float *to = (float *)buffer + i * operand.ld;

#ifdef GEMM_BF16
        if (operand.bf16) {
            narrow_row((uint16_t *)buffer + i * operand.ld, from, k);
            continue;
        }
#endif
        if (fp8)
            ns_e4m3_round_row(to, from, k);
        else if (cpu->bf16_products)
            round_row(to, from, k);
        else
            memcpy(to, from, k * sizeof(float));
    }
    return operand;
}

/* c = rows row0.. of the operand times one panel. */
VEC_INLINE void
product(float *c, size_t ldc, struct operand a, uint32_t row0, uint32_t n_rows,
        const void *panel, enum ns_dtype weights, uint32_t k, uint32_t n_cols)
{
    struct strip strip = {
        .c = c,
        .ldc = ldc,
        .a = (const char *)a.data +
             row0 * a.ld * (a.bf16 ? sizeof(uint16_t) : sizeof(float)),
        .lda = a.ld,
        .n_rows = n_rows,
        .b = panel,
        .ldb = PANEL,
        .k = k,
        .n_cols = n_cols,
        .ahead = (const char *)panel + packed_panel_bytes(weights, k),
    };

#ifdef GEMM_BF16
    if (a.bf16) {
        GEMM_BF16(&strip);
        return;
    }
#endif
    if (weights == NS_BF16)
        GEMM_PAIRS(&strip);
    else
        GEMM_F32(&strip);
}

/* c = gelu(rows . gate) * (rows . up) for one pair of panels. */
static inline void
gated_product(float *c, size_t ldc, struct operand a, uint32_t n_rows,
              const void *gate, const void *up, enum ns_dtype weights,
              uint32_t k, uint32_t n_cols)
{
    enum { ROWS = 56 };
    float g[ROWS * PANEL] __attribute__((aligned(64)));
    float u[ROWS * PANEL] __attribute__((aligned(64)));

    for (uint32_t row = 0; row < n_rows; row += ROWS) {
        uint32_t n = n_rows - row < ROWS ? n_rows - row : ROWS;

        product(g, PANEL, a, row, n, gate, weights, k, PANEL);
        product(u, PANEL, a, row, n, up, weights, k, PANEL);
        for (uint32_t i = 0; i < n * PANEL; i += LANES)
            vf_store(g + i, vf_mul(vf_gelu_tanh(vf_load(g + i)),
                                   vf_load(u + i)));
        for (uint32_t i = 0; i < n; i++)
            memcpy(c + (row + i) * ldc, g + i * PANEL, n_cols * sizeof(float));
    }
}

#endif
