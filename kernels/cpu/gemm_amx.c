/* gemm_amx.c - bf16 strips in tiles of 32 by 32.
 *
 * Plan:     two tiles of 16 rows of a against two of 16 columns of the panel,
 *           four tiles of sums, 32 inputs a step. A panel's rows of pairs are
 *           what a tile of b wants, 128 bytes apart. a is padded with zeros to
 *           whole steps; the last pairs of a panel that ends within one are
 *           copied, so that nothing behind the panel is read.
 * Rows:     a last block has tiles of fewer rows. Each row of a tile is summed
 *           by itself, so that no bit depends on it.
 */
#include "kernels/cpu/gemm.h"

#include <immintrin.h>
#include <string.h>

enum {
    STEP = 32, /* inputs of a tile of a */
    TILE = 16, /* rows of a tile, columns of sums */
    BLOCK = 2 * TILE,
    PAIR_ROW = PANEL * 2 * sizeof(uint16_t), /* bytes */
};

/* What LDTILECFG reads. */
struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Sums in 0..3, a in 4 and 5, b in 6 and 7; rows of the upper and lower half
 * of the block, the lower one of which may have none. */
static void
configure(uint32_t upper, uint32_t lower)
{
    struct config config = { .palette = 1 };

    for (int tile = 0; tile < 8; tile++) {
        uint32_t rows = tile >= 6              ? TILE
                        : tile < 2 || tile == 4 ? upper
                                                : lower;

        if (rows == 0)
            continue;
        config.row_bytes[tile] = 64;
        config.rows[tile] = (uint8_t)rows;
    }
    _tile_loadconfig(&config);
}

static void
block_of_two(float *c, size_t ldc, const uint16_t *a, size_t lda,
             const char *panel, const char *rest, uint32_t k, bool more)
{
    size_t c_stride = ldc * sizeof(float), a_stride = lda * sizeof(*a);
    float *c1 = c + TILE * ldc;
    const uint16_t *a1 = a + TILE * lda;

    if (more) {
        _tile_loadd(0, c, c_stride);
        _tile_loadd(1, c + TILE, c_stride);
        _tile_loadd(2, c1, c_stride);
        _tile_loadd(3, c1 + TILE, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (uint32_t i = 0; i < k; i += STEP) {
        const char *b = k - i < STEP ? rest : panel + i / 2 * PAIR_ROW;

        _tile_loadd(6, b, PAIR_ROW);
        _tile_loadd(4, a + i, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 64, PAIR_ROW);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + i, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + TILE, c_stride);
    _tile_stored(2, c1, c_stride);
    _tile_stored(3, c1 + TILE, c_stride);
}

static void
block_of_one(float *c, size_t ldc, const uint16_t *a, size_t lda,
             const char *panel, const char *rest, uint32_t k, bool more)
{
    size_t c_stride = ldc * sizeof(float), a_stride = lda * sizeof(*a);

    if (more) {
        _tile_loadd(0, c, c_stride);
        _tile_loadd(1, c + TILE, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (uint32_t i = 0; i < k; i += STEP) {
        const char *b = k - i < STEP ? rest : panel + i / 2 * PAIR_ROW;

        _tile_loadd(6, b, PAIR_ROW);
        _tile_loadd(4, a + i, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 64, PAIR_ROW);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + TILE, c_stride);
}

/* Columns of a block between c and a whole tile beside it. */
static void
copy_block(float *to, size_t ld_to, const float *from, size_t ld_from,
           uint32_t n_rows, uint32_t n_cols)
{
    for (uint32_t i = 0; i < n_rows; i++)
        memcpy(to + i * ld_to, from + i * ld_from, n_cols * sizeof(float));
}

void
gemm_bf16_amx(const struct strip *s)
{
    char rest[TILE * PAIR_ROW] __attribute__((aligned(64)));
    float edge[BLOCK * PANEL] __attribute__((aligned(64)));
    uint32_t tail = s->k % STEP, upper = 0, lower = 0;
    bool narrow = s->n_cols < PANEL;

    if (tail > 0) {
        memset(rest, 0, sizeof(rest));
        memcpy(rest, (const char *)s->b + (s->k - tail) / 2 * PAIR_ROW,
               (tail + 1) / 2 * PAIR_ROW);
    }
    for (uint32_t row = 0; row < s->n_rows; row += BLOCK) {
        uint32_t left = s->n_rows - row, n = left < BLOCK ? left : BLOCK;
        uint32_t n_upper = n < TILE ? n : TILE, n_lower = n - n_upper;
        const uint16_t *a = (const uint16_t *)s->a + row * s->lda;
        float *c = s->c + row * s->ldc, *to = narrow ? edge : c;
        size_t ld_to = narrow ? PANEL : s->ldc;

        if (n_upper != upper || n_lower != lower) {
            upper = n_upper;
            lower = n_lower;
            configure(upper, lower);
        }
        if (narrow && s->more)
            copy_block(edge, PANEL, c, s->ldc, n, s->n_cols);
        (lower > 0 ? block_of_two : block_of_one)(to, ld_to, a, s->lda, s->b,
                                                  rest, s->k, s->more);
        if (narrow)
            copy_block(c, s->ldc, edge, PANEL, n, s->n_cols);
    }
    _tile_release();
}
