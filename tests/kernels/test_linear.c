/* Products on every instruction set, against a double loop over the source. */
#include "tests/kernels/lab.h"

#include "kernels/cpu/machine.h"

static const enum ns_dtype dtypes[] = { NS_F32, NS_BF16, NS_F16,
                                        NS_E4M3 };

static void
check_linear(struct lab *lab, uint64_t *seed, enum ns_dtype dtype,
             uint32_t n_rows, uint32_t n, uint32_t k)
{
    size_t mark = lab->n_pieces;
    struct ns_matrix m = matrix_random(seed, dtype, n, k, 1);
    struct ns_weight w = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    struct ns_rows x = lab_rows(lab, n_rows, k);
    struct ns_rows y = lab_rows(lab, n_rows, n);
    double bound;

    fill(x, seed, 3);
    lab->ops->linear(lab->be, y, x, &w);
    lab_sync(lab);
    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t j = 0; j < n; j++) {
            double want = naive_dot(lab, row(x, i), &m, 0, j, &bound);

            assert_near(lab, "linear", (double)row(y, i)[j], want, bound);
        }
    assert_gaps_whole(y);
    lab->ops->drop(lab->be, &w);
    lab_release_to(lab, mark);
    matrix_free(m);
}

static void
linear_of_all_shapes(struct lab *lab)
{
    static const uint32_t ns[] = { 1, 2, 31, 32, 33, 64, 70, 129 };
    static const uint32_t ks[] = { 1, 2, 3, 16, 31, 64, 65, 130 };
    uint64_t seed = 5;

    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        for (size_t i = 0; i < LENGTH(ns); i++)
            for (size_t j = 0; j < LENGTH(ks); j++)
                check_linear(lab, &seed, dtypes[d], 1 + below(&seed, 20),
                             ns[i], ks[j]);
        for (uint32_t n_rows = 1; n_rows <= 70; n_rows++)
            check_linear(lab, &seed, dtypes[d], n_rows, 37, 19);
    }
    check_linear(lab, &seed, NS_BF16, 300, 35, 33); /* more than one block */
}

static void
linear_is_the_product_for_every_shape(void **state)
{
    (void)state;
    on_every_isa(linear_of_all_shapes);
}

static void
gated_of_all_shapes(struct lab *lab)
{
    static const uint32_t ns[] = { 1, 31, 32, 33, 70 };
    static const uint32_t ks[] = { 1, 2, 31, 64, 65 };
    uint64_t seed = 6;

    for (size_t s = 0; s < LENGTH(dtypes) * LENGTH(ns) * LENGTH(ks); s++) {
        enum ns_dtype dtype = dtypes[s % LENGTH(dtypes)];
        uint32_t n = ns[s / LENGTH(dtypes) % LENGTH(ns)];
        uint32_t k = ks[s / LENGTH(dtypes) / LENGTH(ns)];
        uint32_t n_rows = 1 + below(&seed, 40);
        size_t mark = lab->n_pieces;
        struct ns_matrix m[2] = { matrix_random(&seed, dtype, n, k, 1),
                                  matrix_random(&seed, dtype, n, k, 1) };
        struct ns_weight w = lab_pack(lab, NS_PACK_GATED, m, 2);
        struct ns_rows x = lab_rows(lab, n_rows, k);
        struct ns_rows y = lab_rows(lab, n_rows, n);

        /* Half sources reach 2, so that gates pass where gelu is curved. */
        fill(x, &seed, dtype == NS_F16 ? 0.3f : 1.0f);
        lab->ops->gated(lab->be, y, x, &w);
        lab_sync(lab);
        for (uint32_t i = 0; i < n_rows; i++)
            for (uint32_t j = 0; j < n; j++) {
                double e_gate, e_up;
                double gate = naive_dot(lab, row(x, i), &m[0], 0, j, &e_gate);
                double up = naive_dot(lab, row(x, i), &m[1], 0, j, &e_up);
                double want = naive_gelu(gate) * up;

                assert_near(lab, "gated", (double)row(y, i)[j], want,
                            1.2 * e_gate * fabs(up) + fabs(gate) * e_up +
                                2e-6 * fabs(gate * up) + 1e-12);
            }
        assert_gaps_whole(y);
        lab->ops->drop(lab->be, &w);
        lab_release_to(lab, mark);
        matrix_free(m[0]);
        matrix_free(m[1]);
    }
}

static void
gated_is_gelu_of_gate_times_up(void **state)
{
    (void)state;
    on_every_isa(gated_of_all_shapes);
}

/* A row's bits: alone, first, last, and amid others. */
static void
rows_in_company(struct lab *lab)
{
    uint64_t seed = 7;

    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        enum { ROWS = 301, N = 67, K = 131 }; /* over the edges of blocks */
        struct ns_matrix m = matrix_random(&seed, dtypes[d], 2 * N, K, 1);
        struct ns_weight linear = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
        struct ns_weight gated = lab_pack(lab, NS_PACK_GATED, &m, 1);
        struct ns_rows x = lab_rows(lab, ROWS, K);
        struct ns_rows turned = lab_rows(lab, ROWS, K);
        struct ns_rows y[4] = { lab_rows(lab, ROWS, 2 * N),
                                lab_rows(lab, ROWS, 2 * N),
                                lab_rows(lab, ROWS, N),
                                lab_rows(lab, ROWS, N) };

        fill(x, &seed, 1);
        for (uint32_t i = 0; i < ROWS; i++)
            copy_row(turned, ROWS - 1 - i, x, i);
        lab->ops->linear(lab->be, y[0], x, &linear);
        lab->ops->linear(lab->be, y[1], turned, &linear);
        lab->ops->gated(lab->be, y[2], x, &gated);
        lab->ops->gated(lab->be, y[3], turned, &gated);
        for (uint32_t i = 0; i < ROWS; i++) {
            assert_same_bits(lab, "linear, turned", row(y[0], i),
                             row(y[1], ROWS - 1 - i), 2 * N);
            assert_same_bits(lab, "gated, turned", row(y[2], i),
                             row(y[3], ROWS - 1 - i), N);
        }
        for (uint32_t i = 0; i < ROWS; i += 9) {
            lab->ops->linear(lab->be, first_rows(y[1], 1),
                             rows_from(x, i, 1), &linear);
            lab->ops->gated(lab->be, first_rows(y[3], 1), rows_from(x, i, 1),
                            &gated);
            assert_same_bits(lab, "linear, alone", row(y[0], i),
                             row(y[1], 0), 2 * N);
            assert_same_bits(lab, "gated, alone", row(y[2], i), row(y[3], 0),
                             N);
        }
        lab->ops->drop(lab->be, &linear);
        lab->ops->drop(lab->be, &gated);
        matrix_free(m);
    }
}

static void
a_row_has_the_same_bits_alone_and_in_company(void **state)
{
    (void)state;
    on_every_isa(rows_in_company);
}

/* The same product on two labs. */
static void
assert_equal_labs(struct lab *one, struct lab *two)
{
    for (size_t d = 0; d < LENGTH(dtypes); d++)
        for (int gated = 0; gated < 2; gated++) {
            enum { ROWS = 29, N = 70, K = 257 };
            struct lab *labs[2] = { one, two };
            struct ns_rows y[2];
            uint32_t n = gated ? N : 2 * N;

            for (int i = 0; i < 2; i++) {
                struct lab *lab = labs[i];
                uint64_t seed = 8;
                struct ns_matrix m = matrix_random(&seed, dtypes[d], 2 * N, K,
                                                   1);
                struct ns_weight w = lab_pack(
                    lab, gated ? NS_PACK_GATED : NS_PACK_LINEAR, &m, 1);
                struct ns_rows x = lab_rows(lab, ROWS, K);

                y[i] = lab_rows(lab, ROWS, n);
                fill(x, &seed, 1);
                if (gated)
                    lab->ops->gated(lab->be, y[i], x, &w);
                else
                    lab->ops->linear(lab->be, y[i], x, &w);
                lab_sync(lab);
                lab->ops->drop(lab->be, &w);
                matrix_free(m);
            }
            for (uint32_t i = 0; i < ROWS; i++)
                assert_same_bits(two, gated ? "gated" : "linear",
                                 row(y[0], i), row(y[1], i), n);
        }
}

static void
avx2_and_avx512_give_the_same_bits(void **state)
{
    struct lab avx2, avx512;

    (void)state;
    if (!machine_has(ISA_AVX512))
        skip();
    assert_true(lab_open(&avx2, "avx2", 2));
    assert_true(lab_open(&avx512, "avx512", 2));
    assert_equal_labs(&avx2, &avx512);
    lab_close(&avx2);
    lab_close(&avx512);
}

static void
the_number_of_threads_changes_no_bit(void **state)
{
    (void)state;
    for (enum isa isa = ISA_REF; isa < N_ISA; isa++) {
        struct lab lab[2];

        if (!lab_open_twice(lab, isa_name(isa)))
            continue;
        assert_equal_labs(&lab[0], &lab[1]);
        lab_close(&lab[0]);
        lab_close(&lab[1]);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_is_the_product_for_every_shape),
        cmocka_unit_test(gated_is_gelu_of_gate_times_up),
        cmocka_unit_test(a_row_has_the_same_bits_alone_and_in_company),
        cmocka_unit_test(avx2_and_avx512_give_the_same_bits),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
