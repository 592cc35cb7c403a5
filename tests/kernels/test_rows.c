/* Row ops: embedding, gather and scatter, norms and the sums around them. */
#include "tests/kernels/lab.h"

#include "kernels/cpu/machine.h"

enum { ROWS = 23 };

static const uint32_t widths[] = { 1, 7, 16, 31, 80, 258 };
static const float eps = 1e-6f;

/* Norms in fp32 with the sum in double: rounding of the few factors, and of
 * sums that may run in lanes. */
static const double tolerance = 3e-6;

static double
rms(const float *x, uint32_t n)
{
    double sum = 0;

    for (uint32_t j = 0; j < n; j++)
        sum += (double)x[j] * (double)x[j];
    return sqrt(sum / n + (double)eps);
}

static float *
lab_weights(struct lab *lab, uint64_t *seed, uint32_t n)
{
    float *w = lab_take(lab, n * sizeof(float));

    for (uint32_t j = 0; j < n; j++)
        w[j] = 1.5f * symmetric(seed); /* some negative, as in the vectors */
    return w;
}

/* Rows of very different sizes, one all zeros. */
static void
fill_uneven(struct ns_rows rows, uint64_t *seed)
{
    fill(rows, seed, 1);
    for (uint32_t i = 0; i < rows.n_rows; i++)
        for (uint32_t j = 0; j < rows.n_cols; j++)
            row(rows, i)[j] *= i == 3 ? 0 : ldexpf(1, (int)i % 12 - 6);
}

static void
norms(struct lab *lab)
{
    uint64_t seed = 11;

    for (size_t s = 0; s < LENGTH(widths); s++) {
        uint32_t n = widths[s];
        size_t mark = lab->n_pieces;
        struct ns_rows x = lab_rows(lab, ROWS, n), y = lab_rows(lab, ROWS, n);
        struct ns_rows a = lab_rows(lab, ROWS, n), z = lab_rows(lab, ROWS, n);
        struct ns_rows branch[3] = { lab_rows(lab, ROWS, n),
                                     lab_rows(lab, ROWS, n),
                                     lab_rows(lab, ROWS, n) };
        float *w = lab_weights(lab, &seed, n);
        const float *const ws[3] = { w, lab_weights(lab, &seed, n),
                                     lab_weights(lab, &seed, n) };

        fill_uneven(x, &seed);
        fill_uneven(a, &seed);
        lab->ops->rmsnorm(lab->be, y, x, w, eps);
        lab->ops->rmsnorm(lab->be, z, x, NULL, eps);
        lab->ops->branch_norms(lab->be, branch, x, ws, eps);
        lab_sync(lab);
        for (uint32_t i = 0; i < ROWS; i++)
            for (uint32_t j = 0; j < n; j++) {
                double want = (double)row(x, i)[j] / rms(row(x, i), n);
                double off = tolerance * fabs(want);

                assert_near(lab, "rmsnorm", (double)row(y, i)[j],
                            want * (double)w[j], off * fabs((double)w[j]));
                assert_near(lab, "rmsnorm without weight",
                            (double)row(z, i)[j], want, off);
                for (int b = 0; b < 3; b++)
                    assert_near(lab, "branch_norms",
                                (double)row(branch[b], i)[j],
                                want * (double)ws[b][j],
                                off * fabs((double)ws[b][j]));
            }

        /* in place */
        for (uint32_t i = 0; i < ROWS; i++)
            copy_row(z, i, x, i);
        lab->ops->rmsnorm(lab->be, z, z, w, eps);
        for (uint32_t i = 0; i < ROWS; i++)
            assert_same_bits(lab, "rmsnorm in place", row(z, i), row(y, i), n);

        for (uint32_t i = 0; i < ROWS; i++)
            copy_row(y, i, x, i), copy_row(z, i, x, i);
        lab->ops->add_norm(lab->be, y, a, w, eps);
        lab->ops->add_then_norm(lab->be, z, a, eps);
        lab_sync(lab);
        for (uint32_t i = 0; i < ROWS; i++) {
            float sum[300];

            for (uint32_t j = 0; j < n; j++)
                sum[j] = row(x, i)[j] + row(a, i)[j];
            for (uint32_t j = 0; j < n; j++) {
                double add = (double)row(a, i)[j] / rms(row(a, i), n) *
                             (double)w[j];
                double want = (double)row(x, i)[j] + add;

                assert_near(lab, "add_norm", (double)row(y, i)[j], want,
                            tolerance * (fabs((double)row(x, i)[j]) +
                                         fabs(add)));
                want = (double)sum[j] / rms(sum, n);
                assert_near(lab, "add_then_norm", (double)row(z, i)[j], want,
                            tolerance * fabs(want));
            }
        }
        assert_gaps_whole(y);
        assert_gaps_whole(z);
        assert_gaps_whole(branch[2]);
        lab_release_to(lab, mark);
    }
}

static void
norms_divide_by_the_root_of_the_mean_square(void **state)
{
    (void)state;
    on_every_isa(norms);
}

static void
layer_ends(struct lab *lab)
{
    static const float scalar[2] = { 0.75f, -1.25f };
    uint64_t seed = 12;

    for (size_t s = 0; s < LENGTH(widths); s++) {
        uint32_t n = widths[s];
        size_t mark = lab->n_pieces;
        struct ns_rows x = lab_rows(lab, ROWS, n), y = lab_rows(lab, ROWS, n);
        struct ns_rows m = lab_rows(lab, ROWS, n), e = lab_rows(lab, ROWS, n);
        float *w = lab_weights(lab, &seed, n);
        float *w_m = lab_weights(lab, &seed, n);
        float *w_e = lab_weights(lab, &seed, n);
        uint8_t *decoder = lab_take(lab, ROWS);

        fill_uneven(x, &seed);
        fill_uneven(m, &seed);
        fill(e, &seed, 4);
        for (uint32_t i = 0; i < ROWS; i++) {
            copy_row(y, i, x, i);
            decoder[i] = i % 3 == 1;
        }
        lab->ops->layer_end(lab->be, y, m, e, w_m, w_e, w, eps, scalar,
                            decoder);
        lab_sync(lab);
        for (uint32_t i = 0; i < ROWS; i++) {
            double rms_m = rms(row(m, i), n), rms_e = rms(row(e, i), n);
            double sum = 0, size = 0, rms_both;

            for (int round = 0; round < 2; round++) {
                rms_both = sqrt(sum / n + (double)eps);
                for (uint32_t j = 0; j < n; j++) {
                    double from_m = (double)row(m, i)[j] / rms_m *
                                    (double)w_m[j];
                    double from_e = (double)row(e, i)[j] / rms_e *
                                    (double)w_e[j];
                    double both = from_m + from_e, want;

                    if (round == 0) {
                        sum += both * both;
                        continue;
                    }
                    /* m and e may cancel: the error is of their size */
                    size = fabs(from_m) + fabs(from_e) + 1e-3;
                    size = fabs((double)row(x, i)[j]) +
                           (size + fabs(both)) / rms_both *
                               fabs((double)w[j]);
                    want = ((double)row(x, i)[j] +
                            both / rms_both * (double)w[j]) *
                           (double)scalar[decoder[i]];
                    assert_near(lab, "layer_end", (double)row(y, i)[j], want,
                                2 * tolerance * size + 1e-9);
                }
            }
        }
        assert_gaps_whole(y);
        lab_release_to(lab, mark);
    }
}

static void
a_layer_ends_with_both_branches_normed_and_the_scalar_of_its_mode(void **state)
{
    (void)state;
    on_every_isa(layer_ends);
}

static void
indexed_rows(struct lab *lab)
{
    static const enum ns_dtype dtypes[] = { NS_F32, NS_BF16, NS_F16 };
    uint64_t seed = 13;

    for (size_t s = 0; s < LENGTH(widths); s++) {
        enum { VOCAB = 77 };
        uint32_t n = widths[s], index[ROWS];
        size_t mark = lab->n_pieces;
        struct ns_rows y = lab_rows(lab, ROWS, n);
        struct ns_rows x = lab_rows(lab, ROWS + 9, n);
        int32_t *ids = lab_take(lab, ROWS * sizeof(*ids));

        for (uint32_t i = 0; i < ROWS; i++)
            ids[i] = (int32_t)below(&seed, VOCAB);
        ids[0] = VOCAB - 1;
        ids[1] = 0;
        for (size_t d = 0; d < LENGTH(dtypes); d++) {
            struct ns_matrix m = matrix_random(&seed, dtypes[d], VOCAB, n, 1);
            struct ns_weight table = lab_pack(lab, NS_PACK_TABLE, &m, 1);

            lab->ops->embed(lab->be, y, &table, ids, 1.7f);
            lab_sync(lab);
            for (uint32_t i = 0; i < ROWS; i++)
                for (uint32_t j = 0; j < n; j++)
                    assert_true(row(y, i)[j] ==
                                matrix_at(&m, 0, (uint32_t)ids[i], j) * 1.7f);
            lab->ops->drop(lab->be, &table);
            matrix_free(m);
        }

        fill(x, &seed, 1);
        for (uint32_t i = 0; i < ROWS; i++)
            index[i] = ROWS + 8 - i; /* all different */
        lab->ops->gather(lab->be, y, x, index);
        for (uint32_t i = 0; i < ROWS; i++)
            assert_same_bits(lab, "gather", row(y, i), row(x, index[i]), n);
        fill(y, &seed, 1);
        lab->ops->scatter(lab->be, x, y, index);
        for (uint32_t i = 0; i < ROWS; i++)
            assert_same_bits(lab, "scatter", row(y, i), row(x, index[i]), n);
        assert_gaps_whole(y);
        assert_gaps_whole(x);
        lab_release_to(lab, mark);
    }
}

static void
rows_are_taken_and_put_by_index(void **state)
{
    (void)state;
    on_every_isa(indexed_rows);
}

static void
norms_in_company(struct lab *lab)
{
    enum { N = 93 };
    static const float scalar[2] = { 0.5f, 2 };
    struct ns_rows x = lab_rows(lab, ROWS, N), a = lab_rows(lab, ROWS, N);
    struct ns_rows e = lab_rows(lab, ROWS, N);
    struct ns_rows all[4], one[4];
    uint8_t *decoder = lab_take(lab, ROWS);
    uint64_t seed = 14;
    float *w = lab_weights(lab, &seed, N);

    fill_uneven(x, &seed);
    fill_uneven(a, &seed);
    fill_uneven(e, &seed);
    for (int op = 0; op < 4; op++) {
        all[op] = lab_rows(lab, ROWS, N);
        one[op] = lab_rows(lab, 1, N);
        for (uint32_t i = 0; i < ROWS; i++)
            copy_row(all[op], i, x, i);
    }
    lab->ops->rmsnorm(lab->be, all[0], all[0], w, eps);
    lab->ops->add_norm(lab->be, all[1], a, w, eps);
    lab->ops->add_then_norm(lab->be, all[2], a, eps);
    lab->ops->layer_end(lab->be, all[3], a, e, w, w, w, eps, scalar, decoder);
    for (uint32_t i = 0; i < ROWS; i++) {
        struct ns_rows a1 = rows_from(a, i, 1), e1 = rows_from(e, i, 1);

        for (int op = 0; op < 4; op++)
            copy_row(one[op], 0, x, i);
        lab->ops->rmsnorm(lab->be, one[0], one[0], w, eps);
        lab->ops->add_norm(lab->be, one[1], a1, w, eps);
        lab->ops->add_then_norm(lab->be, one[2], a1, eps);
        lab->ops->layer_end(lab->be, one[3], a1, e1, w, w, w, eps, scalar,
                            decoder);
        for (int op = 0; op < 4; op++)
            assert_same_bits(lab, "a norm, alone", row(one[op], 0),
                             row(all[op], i), N);
    }
}

static void
a_norm_has_the_same_bits_alone_and_in_company(void **state)
{
    (void)state;
    on_every_isa(norms_in_company);
}

static void
avx2_and_avx512_norm_to_the_same_bits(void **state)
{
    static const float scalar[2] = { 0.5f, 2 };
    struct ns_rows y[2][5];
    struct lab lab[2];

    (void)state;
    if (!machine_has(ISA_AVX512))
        skip();
    for (size_t s = 0; s < LENGTH(widths); s++) {
        uint32_t n = widths[s];

        for (int i = 0; i < 2; i++) {
            uint64_t seed = 15;
            struct ns_rows x, a;
            uint8_t *decoder;
            float *w;

            assert_true(lab_open(&lab[i], i ? "avx512" : "avx2", 2));
            x = lab_rows(&lab[i], ROWS, n);
            a = lab_rows(&lab[i], ROWS, n);
            w = lab_weights(&lab[i], &seed, n);
            decoder = lab_take(&lab[i], ROWS);
            fill_uneven(x, &seed);
            fill_uneven(a, &seed);
            for (int op = 0; op < 5; op++) {
                y[i][op] = lab_rows(&lab[i], ROWS, n);
                for (uint32_t r = 0; r < ROWS; r++)
                    copy_row(y[i][op], r, x, r);
            }
            lab[i].ops->rmsnorm(lab[i].be, y[i][0], x, w, eps);
            lab[i].ops->add_norm(lab[i].be, y[i][1], a, w, eps);
            lab[i].ops->add_then_norm(lab[i].be, y[i][2], a, eps);
            lab[i].ops->layer_end(lab[i].be, y[i][3], a, x, w, w, w, eps,
                                  scalar, decoder);
            lab[i].ops->branch_norms(
                lab[i].be,
                (struct ns_rows[3]){ y[i][4], lab_rows(&lab[i], ROWS, n),
                                     lab_rows(&lab[i], ROWS, n) },
                x, (const float *const[3]){ w, w, w }, eps);
        }
        for (int op = 0; op < 5; op++)
            for (uint32_t r = 0; r < ROWS; r++)
                assert_same_bits(&lab[1], "a norm", row(y[0][op], r),
                                 row(y[1][op], r), n);
        lab_close(&lab[0]);
        lab_close(&lab[1]);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_divide_by_the_root_of_the_mean_square),
        cmocka_unit_test(
            a_layer_ends_with_both_branches_normed_and_the_scalar_of_its_mode),
        cmocka_unit_test(rows_are_taken_and_put_by_index),
        cmocka_unit_test(a_norm_has_the_same_bits_alone_and_in_company),
        cmocka_unit_test(avx2_and_avx512_norm_to_the_same_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
