/* AMX is on few machines, so its strips are also run on a model of the tile
 * instructions: the same source, with the intrinsics replaced by plain loops
 * that check shapes and bounds the way the processor would. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define gemm_bf16_amx gemm_bf16_model
#include "kernels/cpu/gemm.h"

static struct {
    uint8_t rows[8];
    uint16_t row_bytes[8];
    unsigned char data[8][16][64];
    int configured;
} model;

static void
model_config(const void *memory)
{
    const unsigned char *bytes = memory;

    assert_int_equal(bytes[0], 1); /* palette */
    for (int i = 1; i < 16; i++)
        assert_int_equal(bytes[i], 0);
    for (int tile = 0; tile < 16; tile++) {
        uint16_t row_bytes;

        memcpy(&row_bytes, bytes + 16 + 2 * tile, sizeof(row_bytes));
        assert_true(row_bytes <= 64 && bytes[48 + tile] <= 16);
        assert_int_equal(row_bytes == 0, bytes[48 + tile] == 0);
        if (tile >= 8) {
            assert_int_equal(row_bytes, 0);
            continue;
        }
        model.rows[tile] = bytes[48 + tile];
        model.row_bytes[tile] = row_bytes;
    }
    memset(model.data, 0, sizeof(model.data));
    model.configured = 1;
}

static void
model_zero(int tile)
{
    assert_true(model.configured && model.rows[tile] > 0);
    memset(model.data[tile], 0, sizeof(model.data[tile]));
}

static void
model_load(int tile, const void *from, size_t stride)
{
    model_zero(tile);
    for (int i = 0; i < model.rows[tile]; i++)
        memcpy(model.data[tile][i], (const char *)from + i * stride,
               model.row_bytes[tile]);
}

static void
model_store(int tile, void *to, size_t stride)
{
    assert_true(model.configured && model.rows[tile] > 0);
    for (int i = 0; i < model.rows[tile]; i++)
        memcpy((char *)to + i * stride, model.data[tile][i],
               model.row_bytes[tile]);
}

static float
widen(const unsigned char *bf16)
{
    uint16_t half;
    uint32_t bits;
    float value;

    memcpy(&half, bf16, sizeof(half));
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void
model_dot(int c, int a, int b)
{
    assert_int_equal(model.rows[c], model.rows[a]);
    assert_int_equal(model.row_bytes[c], model.row_bytes[b]);
    assert_int_equal(model.row_bytes[a], 4 * model.rows[b]);
    for (int i = 0; i < model.rows[c]; i++)
        for (int k = 0; k < model.rows[b]; k++)
            for (int j = 0; j < model.row_bytes[c] / 4; j++)
                for (int half = 0; half < 2; half++) {
                    float sum;

                    memcpy(&sum, &model.data[c][i][4 * j], sizeof(sum));
                    sum += widen(&model.data[a][i][4 * k + 2 * half]) *
                           widen(&model.data[b][k][4 * j + 2 * half]);
                    memcpy(&model.data[c][i][4 * j], &sum, sizeof(sum));
                }
}

static void
model_release(void)
{
    model.configured = 0;
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig model_config
#define _tile_zero model_zero
#define _tile_loadd model_load
#define _tile_stored model_store
#define _tile_dpbf16ps model_dot
#define _tile_release model_release
#include "kernels/cpu/gemm_amx.c"

/* Small whole numbers: sums are exact in any order. */
static uint16_t
small(uint32_t i)
{
    float value = (float)((int)(i * 2654435761u >> 28) - 8);
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

static void
check(uint32_t n_rows, uint32_t k, uint32_t n_cols, bool more)
{
    enum { LD_C = 40 };
    uint32_t lda = (k + 31) / 32 * 32, n_pairs = (k + 1) / 2;
    uint16_t *a = calloc((size_t)n_rows * lda, sizeof(*a));
    uint16_t *b = calloc((size_t)n_pairs * 2 * PANEL, sizeof(*b));
    float *c = calloc((size_t)n_rows * LD_C, sizeof(*c));
    float *before = calloc((size_t)n_rows * LD_C, sizeof(*c));
    struct strip strip = { .c = c, .ldc = LD_C, .a = a, .lda = lda,
                           .n_rows = n_rows, .b = b, .k = k,
                           .n_cols = n_cols, .more = more };

    assert_true(a && b && c && before);
    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t x = 0; x < k; x++)
            a[i * lda + x] = small(i * 1000 + x);
    for (uint32_t x = 0; x < k; x++)
        for (uint32_t j = 0; j < PANEL; j++)
            b[(x / 2 * PANEL + j) * 2 + x % 2] = small(7 + x * 77 + j);
    for (uint32_t i = 0; i < n_rows * LD_C; i++)
        before[i] = c[i] = (float)(i % 13);

    gemm_bf16_model(&strip);
    assert_int_equal(model.configured, 0);
    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t j = 0; j < LD_C; j++) {
            float want = before[i * LD_C + j];

            if (j < n_cols) {
                if (!more)
                    want = 0;
                for (uint32_t x = 0; x < k; x++)
                    want += widen((unsigned char *)&a[i * lda + x]) *
                            widen((unsigned char *)&b[(x / 2 * PANEL + j) * 2 +
                                                      x % 2]);
            }
            if (c[i * LD_C + j] != want)
                fail_msg("%u rows, k %u, %u columns: c[%u][%u] is %g, not %g",
                         n_rows, k, n_cols, i, j, (double)c[i * LD_C + j],
                         (double)want);
        }
    free(a);
    free(b);
    free(c);
    free(before);
}

static void
amx_strips_are_the_product_for_every_number_of_rows(void **state)
{
    (void)state;
    for (uint32_t n_rows = 1; n_rows <= 70; n_rows++)
        check(n_rows, 64, PANEL, false);
}

static void
amx_strips_end_inside_a_step_and_inside_a_panel(void **state)
{
    static const uint32_t k[] = { 1, 2, 31, 32, 33, 63, 95, 128 };

    (void)state;
    for (size_t i = 0; i < sizeof(k) / sizeof(k[0]); i++)
        for (uint32_t n_cols = 1; n_cols <= PANEL; n_cols += 5)
            for (uint32_t n_rows = 15; n_rows <= 49; n_rows += 17)
                check(n_rows, k[i], n_cols, (n_cols + i) % 2);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(amx_strips_are_the_product_for_every_number_of_rows),
        cmocka_unit_test(amx_strips_end_inside_a_step_and_inside_a_panel),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
