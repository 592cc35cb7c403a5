/* E4M3 by its definition: every code, every midpoint, rows, and products. */
#include <stdbool.h>

#include "tests/kernels/lab.h"

/* The definition, in doubles. */
static double
defined(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double size = exponent == 0 ? ldexp(mantissa / 8.0, -6)
                                : ldexp(1 + mantissa / 8.0, exponent - 7);

    return code & 0x80 ? -size : size;
}

static void
every_code_has_the_value_of_its_definition_and_comes_back(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        float value = ns_e4m3_value((uint8_t)code);

        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(value));
            assert_int_equal(ns_e4m3_code(value) & 0x7f, 0x7f);
            continue;
        }
        assert_true((double)value == defined((uint8_t)code));
        assert_int_equal(signbit(value) != 0, code >> 7);
        assert_int_equal(ns_e4m3_code(value), code);
    }
    assert_true(ns_e4m3_value(0x7e) == NS_E4M3_MAX);
}

static void
between_two_codes_the_nearest_is_taken_and_the_even_one_at_the_middle(
    void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++) {
        float below = ns_e4m3_value((uint8_t)code);
        float above = ns_e4m3_value((uint8_t)(code + 1));
        float middle = below + (above - below) / 2; /* exact */

        for (int sign = 0; sign < 256; sign += 128) {
            float s = sign ? -1.0f : 1.0f;

            assert_int_equal(ns_e4m3_code(s * middle),
                             sign | (code % 2 == 0 ? code : code + 1));
            assert_int_equal(ns_e4m3_code(s * nextafterf(middle, 0)),
                             sign | code);
            assert_int_equal(ns_e4m3_code(s * nextafterf(middle, above)),
                             sign | (code + 1));
        }
    }
}

static void
what_is_too_large_becomes_the_largest_and_what_is_too_small_zero(void **state)
{
    static const float large[] = { 448, 448.0001f, 464, 465, 480, 1e30f,
                                   INFINITY };

    (void)state;
    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        assert_int_equal(ns_e4m3_code(large[i]), 0x7e);
        assert_int_equal(ns_e4m3_code(-large[i]), 0xfe);
    }
    assert_int_equal(ns_e4m3_code(0x1p-10f), 0); /* halfway: to even */
    assert_int_equal(ns_e4m3_code(nextafterf(0x1p-10f, 1)), 1);
    assert_int_equal(ns_e4m3_code(0x1p-149f), 0);
    assert_int_equal(ns_e4m3_code(-0x1p-149f), 0x80);
    assert_int_equal(ns_e4m3_code(-0.0f), 0x80);
}

static void
no_value_lies_nearer_to_another_code(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 98317) { /* a prime */
        float value;
        double best = INFINITY, got;

        memcpy(&value, &bits, sizeof(value));
        for (int code = 0; code < 0x7f; code++)
            best = fmin(best, fabs(defined((uint8_t)code) - (double)value));
        got = fabs((double)ns_e4m3_value(ns_e4m3_code(value)) - (double)value);
        assert_true(got == best);
    }
}

static void
a_row_has_its_largest_at_448_and_all_else_within_half_a_step(void **state)
{
    float row[67], rounded[67];
    uint8_t code[67];

    (void)state;
    for (int power = -140; power <= 120; power += 10) {
        float scale;
        bool met = false;

        for (int i = 0; i < 67; i++)
            row[i] = ldexpf(sinf((float)(i * i)), power);
        scale = ns_e4m3_row(code, row, 67);
        ns_e4m3_round_row(rounded, row, 67);
        assert_true(scale >= 0x1p-126f && isfinite(scale));
        for (int i = 0; i < 67; i++) {
            double size = fabs((double)row[i]) / (double)scale;
            double back = (double)ns_e4m3_value(code[i]);
            /* 1/16 of it, or half of the smallest step; and the rounding of
             * the division itself */
            double most = fmax(size / 16, 0x1p-10) * (1 + 1e-6);

            assert_true(fabs(back - (double)row[i] / (double)scale) <= most);
            assert_true(rounded[i] == (float)back * scale);
            met |= (code[i] & 0x7f) == 0x7e;
        }
        if (power > -110)
            assert_true(met);
    }
}

static void
rows_without_a_scale_are_told(void **state)
{
    float row[5] = { 0 };
    uint8_t code[5];

    (void)state;
    assert_true(ns_e4m3_row(code, row, 5) == 1.0f);
    for (int i = 0; i < 5; i++)
        assert_int_equal(code[i], 0);
    for (int bad = 0; bad < 2; bad++)
        for (int at = 0; at < 5; at++) {
            for (int i = 0; i < 5; i++)
                row[i] = (float)i;
            row[at] = bad ? NAN : -INFINITY;
            assert_true(isnan(ns_e4m3_row(code, row, 5)));
            for (int i = 0; i < 5; i++)
                assert_true(isnan(ns_e4m3_value(code[i])));
        }
}

/* ---- products ------------------------------------------------------------ */

/* The backends whose products take rows in E4M3. */
static void
on_every_fp8(void (*check)(struct lab *lab))
{
    static const char *const isas[] = { "ref", "avx2", "avx512" };
    int n = 0;

    for (size_t i = 0; i < LENGTH(isas); i++) {
        struct ns_backend_options options = { .isa = isas[i], .n_threads = 3,
                                              .arithmetic = "fp8" };
        struct lab lab = { .isa = isas[i], .ref = i == 0 };
        struct ns_error err;

        if (ns_backend_open(&options, &lab.be, &err) != NS_OK)
            continue;
        lab.ops = lab.be->ops;
        assert_string_equal(lab.be->arithmetic, i == 0 ? "fp8-ref" : "fp8");
        assert_int_equal(lab.ops->reserve(lab.be, &lab_sizes, &err), NS_OK);
        check(&lab);
        lab_close(&lab);
        n++;
    }
    assert_true(n >= 1); /* ref is everywhere */
}

/* sum over the codes, times both scales: what a GPU computes. */
static double
product_of_codes(const float *x, const struct ns_matrix *m, uint32_t i,
                 uint32_t n)
{
    const uint8_t *codes = (const uint8_t *)m->data +
                           ((size_t)i * m->n + n) * m->k;
    uint8_t *mine = malloc(m->k);
    double sum = 0;
    float scale;

    assert_non_null(mine);
    scale = ns_e4m3_row(mine, x, m->k);
    for (uint32_t k = 0; k < m->k; k++)
        sum += (double)ns_e4m3_value(mine[k]) *
               (double)ns_e4m3_value(codes[k]);
    free(mine);
    return sum * (double)scale * (double)m->scale[(size_t)i * m->n + n];
}

static void
products_of_codes(struct lab *lab)
{
    enum { ROWS = 37, N = 70, K = 131 };
    size_t mark = lab->n_pieces;
    uint64_t seed = 11;
    struct ns_matrix m = matrix_random(&seed, NS_E4M3, 2 * N, K, 1);
    struct ns_matrix plain = matrix_random(&seed, NS_BF16, N, K, 1);
    struct ns_weight linear = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    struct ns_weight gated = lab_pack(lab, NS_PACK_GATED, &m, 1);
    struct ns_weight other = lab_pack(lab, NS_PACK_LINEAR, &plain, 1);
    struct ns_rows x = lab_rows(lab, ROWS, K);
    struct ns_rows y = lab_rows(lab, ROWS, 2 * N);
    struct ns_rows z = lab_rows(lab, ROWS, N);
    struct ns_rows p = lab_rows(lab, ROWS, N);
    double bound;

    fill(x, &seed, 3);
    for (uint32_t k = 0; k < K; k++)
        row(x, 5)[k] = 0; /* a row without a scale of its own */
    lab->ops->linear(lab->be, y, x, &linear);
    lab->ops->gated(lab->be, z, x, &gated);
    lab->ops->linear(lab->be, p, x, &other);
    lab_sync(lab);
    assert_true(row(x, 0)[0] != 0 && row(y, 0)[0] != 0);
    for (uint32_t i = 0; i < ROWS; i++) {
        for (uint32_t j = 0; j < 2 * N; j++)
            assert_near(lab, "linear", (double)row(y, i)[j],
                        product_of_codes(row(x, i), &m, 0, j), 2e-4);
        for (uint32_t j = 0; j < N; j++) {
            double gate = product_of_codes(row(x, i), &m, 0, j);
            double up = product_of_codes(row(x, i), &m, 0, N + j);
            double want = naive_dot(lab, row(x, i), &plain, 0, j, &bound);

            assert_near(lab, "gated", (double)row(z, i)[j],
                        naive_gelu(gate) * up, 2e-3);
            /* Weights that were not codes take rows as they are. */
            assert_near(lab, "bf16", (double)row(p, i)[j], want, bound);
        }
    }
    lab->ops->drop(lab->be, &linear);
    lab->ops->drop(lab->be, &gated);
    lab->ops->drop(lab->be, &other);
    lab_release_to(lab, mark);
    matrix_free(m);
    matrix_free(plain);
}

static void
in_fp8_a_product_is_that_of_codes_times_both_scales(void **state)
{
    (void)state;
    on_every_fp8(products_of_codes);
}

/* Experts that lie apart, against the same by plain products. */
static void
experts_of_codes(struct lab *lab)
{
    enum { ROWS = 9, X = 4, M = 35, H = 66, TOP = 2 };
    size_t mark = lab->n_pieces;
    uint64_t seed = 12;
    struct ns_matrix gate = matrix_random(&seed, NS_E4M3, M, H, X);
    struct ns_matrix up = matrix_random(&seed, NS_E4M3, M, H, X);
    struct ns_matrix down = matrix_random(&seed, NS_E4M3, H, M, X);
    struct ns_matrix apart[3] = { gate, up, down };
    const void *part[3][X];
    struct ns_weight gate_up, w;
    struct ns_rows x = lab_rows(lab, ROWS, H), y = lab_rows(lab, ROWS, H);
    int32_t *index = lab_take(lab, sizeof(int32_t) * ROWS * TOP);
    float *weight = lab_take(lab, sizeof(float) * ROWS * TOP), inner[M];

    for (uint32_t s = 0; s < 3; s++) {
        for (uint32_t i = 0; i < X; i++)
            part[s][i] = (const uint8_t *)apart[s].data +
                         (size_t)i * apart[s].n * apart[s].k;
        apart[s].parts = part[s];
        apart[s].data = NULL;
    }
    gate_up = lab_pack(lab, NS_PACK_GATED, apart, 2);
    w = lab_pack(lab, NS_PACK_LINEAR, apart + 2, 1);
    assert_true(gate_up.count == X && gate_up.n == M && gate_up.e4m3);
    fill(x, &seed, 2);
    for (uint32_t i = 0; i < ROWS * TOP; i++) {
        index[i] = (int32_t)((i / TOP + i % TOP * (1 + i / 5)) % X);
        if (i % TOP == 1 && index[i] == index[i - 1])
            index[i] = (index[i] + 1) % X;
        weight[i] = 0.25f + (float)(i % 3) / 4;
    }
    lab->ops->experts(lab->be, y, x, index, weight, TOP, &gate_up, &w);
    lab_sync(lab);
    for (uint32_t i = 0; i < ROWS; i++) {
        double want[H] = { 0 };

        for (uint32_t slot = 0; slot < TOP; slot++) {
            uint32_t e = (uint32_t)index[i * TOP + slot];

            for (uint32_t j = 0; j < M; j++)
                inner[j] = (float)(naive_gelu(product_of_codes(
                                       row(x, i), &gate, e, j)) *
                                   product_of_codes(row(x, i), &up, e, j));
            for (uint32_t j = 0; j < H; j++)
                want[j] += (double)weight[i * TOP + slot] *
                           product_of_codes(inner, &down, e, j);
        }
        /* A code may round the other way where the inner value differs by a
         * bit: one step of 1/16 of one of M terms. */
        for (uint32_t j = 0; j < H; j++)
            assert_near(lab, "experts", (double)row(y, i)[j], want[j], 0.05);
    }
    lab->ops->drop(lab->be, &gate_up);
    lab->ops->drop(lab->be, &w);
    lab_release_to(lab, mark);
    matrix_free(gate);
    matrix_free(up);
    matrix_free(down);
}

static void
experts_that_lie_apart_are_one_weight(void **state)
{
    (void)state;
    on_every_fp8(experts_of_codes);
}

static void
codes_go_with_scales_and_into_no_table(void **state)
{
    uint64_t seed = 13;
    struct ns_matrix m = matrix_random(&seed, NS_E4M3, 4, 4, 1), bare = m;
    struct ns_matrix scaled = matrix_random(&seed, NS_F32, 4, 4, 1);
    struct ns_weight w;
    struct ns_error err;
    struct lab lab;

    (void)state;
    assert_true(lab_open(&lab, "ref", 1));
    bare.scale = NULL;
    assert_int_equal(lab.ops->pack(lab.be, NS_PACK_LINEAR, &bare, 1, &w, &err),
                     NS_REJECT);
    scaled.scale = m.scale;
    assert_int_equal(lab.ops->pack(lab.be, NS_PACK_LINEAR, &scaled, 1, &w,
                                   &err), NS_REJECT);
    assert_int_equal(lab.ops->pack(lab.be, NS_PACK_TABLE, &m, 1, &w, &err),
                     NS_REJECT);
    scaled.scale = NULL;
    matrix_free(m);
    matrix_free(scaled);
    lab_close(&lab);
}

/* A row of products and of experts alone, in a tile of 32 and in one of 128. */
static void
rows_of_codes_alone_and_together(struct lab *lab)
{
    enum { ROWS = 300, X = 4, M = 136, H = 264, TOP = 2 };
    static const uint32_t counts[] = { 1, 5, 33, 129 };
    size_t mark = lab->n_pieces;
    uint64_t seed = 14;
    struct ns_matrix both = matrix_random(&seed, NS_E4M3, 2 * M, H, X);
    struct ns_matrix back = matrix_random(&seed, NS_E4M3, H, M, X);
    struct ns_matrix dense = matrix_random(&seed, NS_E4M3, M, H, 1);
    struct ns_weight gate_up = lab_pack(lab, NS_PACK_GATED, &both, 1);
    struct ns_weight down = lab_pack(lab, NS_PACK_LINEAR, &back, 1);
    struct ns_weight w = lab_pack(lab, NS_PACK_LINEAR, &dense, 1);
    struct ns_rows x = lab_rows(lab, ROWS, H);
    struct ns_rows y[2] = { lab_rows(lab, ROWS, M), lab_rows(lab, ROWS, M) };
    struct ns_rows z[2] = { lab_rows(lab, ROWS, H), lab_rows(lab, ROWS, H) };
    int32_t *index = lab_take(lab, sizeof(int32_t) * ROWS * TOP);
    float *weight = lab_take(lab, sizeof(float) * ROWS * TOP);

    fill(x, &seed, 2);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t slot = 0; slot < TOP; slot++) {
            index[i * TOP + slot] = (int32_t)((i + slot) % X);
            weight[i * TOP + slot] = 0.5f + (float)(i % 4) / 8;
        }
    lab->ops->linear(lab->be, y[0], x, &w);
    lab->ops->experts(lab->be, z[0], x, index, weight, TOP, &gate_up, &down);
    lab_sync(lab);
    for (size_t c = 0; c < LENGTH(counts); c++)
        for (uint32_t at = 0; at + counts[c] <= ROWS; at += 97) {
            struct ns_rows from = x, dense_to = y[1], to = z[1];

            from.data = row(x, at);
            from.n_rows = dense_to.n_rows = to.n_rows = counts[c];
            lab->ops->linear(lab->be, dense_to, from, &w);
            lab->ops->experts(lab->be, to, from, index + at * TOP,
                              weight + at * TOP, TOP, &gate_up, &down);
            lab_sync(lab);
            for (uint32_t i = 0; i < counts[c]; i++) {
                assert_memory_equal(row(dense_to, i), row(y[0], at + i),
                                    M * sizeof(float));
                assert_memory_equal(row(to, i), row(z[0], at + i),
                                    H * sizeof(float));
            }
        }
    lab->ops->drop(lab->be, &gate_up);
    lab->ops->drop(lab->be, &down);
    lab->ops->drop(lab->be, &w);
    lab_release_to(lab, mark);
    matrix_free(both);
    matrix_free(back);
    matrix_free(dense);
}

/* One NaN costs its row, and no other. */
static void
a_row_without_a_scale(struct lab *lab)
{
    enum { ROWS = 3, N = 20, K = 40 };
    size_t mark = lab->n_pieces;
    uint64_t seed = 15;
    struct ns_matrix m = matrix_random(&seed, NS_E4M3, N, K, 1);
    struct ns_weight w = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    struct ns_rows x = lab_rows(lab, ROWS, K), y = lab_rows(lab, ROWS, N);

    fill(x, &seed, 2);
    row(x, 1)[7] = NAN;
    lab->ops->linear(lab->be, y, x, &w);
    lab_sync(lab);
    for (uint32_t j = 0; j < N; j++) {
        assert_true(isnan(row(y, 1)[j]));
        assert_true(isfinite(row(y, 0)[j]) && isfinite(row(y, 2)[j]));
    }
    lab->ops->drop(lab->be, &w);
    lab_release_to(lab, mark);
    matrix_free(m);
}

static void
a_card_multiplies_codes_and_a_row_stands_alone(void **state)
{
    struct lab lab;

    (void)state;
    lab_open_card(&lab, "auto");
    assert_string_equal(lab.be->arithmetic, "fp8-cuda");
    products_of_codes(&lab);
    experts_of_codes(&lab);
    rows_of_codes_alone_and_together(&lab);
    a_row_without_a_scale(&lab);
    lab_close(&lab);
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_has_the_value_of_its_definition_and_comes_back),
        cmocka_unit_test(between_two_codes_the_nearest_is_taken_and_the_even_one_at_the_middle),
        cmocka_unit_test(what_is_too_large_becomes_the_largest_and_what_is_too_small_zero),
        cmocka_unit_test(no_value_lies_nearer_to_another_code),
        cmocka_unit_test(a_row_has_its_largest_at_448_and_all_else_within_half_a_step),
        cmocka_unit_test(rows_without_a_scale_are_told),
        cmocka_unit_test(in_fp8_a_product_is_that_of_codes_times_both_scales),
        cmocka_unit_test(experts_that_lie_apart_are_one_weight),
        cmocka_unit_test(codes_go_with_scales_and_into_no_table),
        cmocka_unit_test(a_card_multiplies_codes_and_a_row_stands_alone),
    };

    (void)argc;
    lab_start_where_the_card_is(argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
