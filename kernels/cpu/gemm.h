/* gemm.h - the product that all tuned ops are made of.
 *
 * A strip is c = a . b (or c += a . b) for any number of rows and at most 32
 * columns. Each output is one chain over k in rising order, so that a row's
 * bits depend neither on the rows beside it nor on where callers cut rows or
 * columns; a caller that cuts k goes on with the same chain (`more`).
 *
 * gemm_f32    b is [k][ldb] floats: a panel (ldb 32), a tile of V, ...
 * gemm_pairs  b is a bf16 panel of pairs [ceil(k/2)][32][2], widened on the
 *             way; a is float: fp32 arithmetic on bf16 weights
 * gemm_bf16   b as in gemm_pairs, a is bf16 with rows of whole pairs (an odd k
 *             ends in a zero): bf16 products, fp32 sums
 *
 * b must be readable for whole registers: 32 columns from `b` on, whatever
 * n_cols is. c is written in n_cols columns only. The fp32 forms give the same
 * bits on every instruction set.
 */
#ifndef NS_KERNELS_CPU_GEMM_H
#define NS_KERNELS_CPU_GEMM_H

#include "kernels/cpu/cpu.h"

struct strip {
    float *c;
    size_t ldc; /* in floats */
    const void *a;
    size_t lda; /* in elements */
    uint32_t n_rows;
    const void *b;
    size_t ldb; /* in floats; gemm_f32 only */
    uint32_t k;
    uint32_t n_cols; /* 1..32 */
    bool more;       /* c holds the chain so far */
    const void *ahead; /* what the next strip will read in b's place, so large
                        * as this one, to fetch meanwhile; or NULL */
};

void gemm_f32_avx2(const struct strip *strip);
void gemm_pairs_avx2(const struct strip *strip);
void gemm_f32_avx512(const struct strip *strip);
void gemm_pairs_avx512(const struct strip *strip);
void gemm_bf16_avx512bf16(const struct strip *strip);
void gemm_bf16_amx(const struct strip *strip);

#endif
