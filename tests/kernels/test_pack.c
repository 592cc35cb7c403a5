/* Packed layouts, read back element by element as kernels/cpu/cpu.h says. */
#include "tests/kernels/lab.h"

#include "kernels/cpu/cpu.h"

/* Element k of output c of a panel. */
static float
panel_at(const struct ns_weight *w, const void *panel, uint32_t c, uint32_t k)
{
    const float *as_float = panel;
    const uint16_t *as_bf16 = panel;
    uint32_t bits;
    float value;

    if (w->dtype == NS_F32)
        return as_float[k * PANEL + c];
    bits = (uint32_t)as_bf16[k / 2 * 2 * PANEL + 2 * c + k % 2] << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void
assert_panel(const struct ns_weight *w, uint32_t expert, uint32_t panel,
             const struct ns_matrix *m, uint32_t first, uint32_t n)
{
    const void *data = packed_panel(w, expert, panel);

    assert_int_equal((uintptr_t)data % 64, 0);
    for (uint32_t c = 0; c < PANEL; c++)
        for (uint32_t k = 0; k < m->k; k++) {
            float want = c < n ? matrix_at(m, expert, first + c, k) : 0;
            float got = panel_at(w, data, c, k);

            assert_memory_equal(&got, &want, sizeof(got));
        }
    if (w->dtype == NS_BF16 && m->k % 2 != 0)
        for (uint32_t c = 0; c < PANEL; c++)
            assert_true(panel_at(w, data, c, m->k) == 0);
}

static const enum ns_dtype dtypes[] = { NS_F32, NS_BF16, NS_F16 };

static void
every_element_lands_in_its_panel_and_padding_is_zero(void **state)
{
    struct lab lab;
    uint64_t seed = 1;

    (void)state;
    assert_true(lab_open(&lab, "ref", 2));
    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        static const uint32_t shapes[][3] = { { 1, 1, 1 }, { 32, 2, 1 },
                                              { 33, 7, 1 }, { 70, 130, 3 } };

        for (size_t s = 0; s < LENGTH(shapes); s++) {
            uint32_t n = shapes[s][0], k = shapes[s][1], count = shapes[s][2];
            struct ns_matrix m = matrix_random(&seed, dtypes[d], n, k, count);
            struct ns_weight w = lab_pack(&lab, NS_PACK_LINEAR, &m, 1);

            assert_int_equal(w.dtype, dtypes[d] == NS_BF16 ? NS_BF16 : NS_F32);
            assert_int_equal(w.n, n);
            assert_int_equal(w.bytes, lab.ops->packed_bytes(
                                          lab.be, NS_PACK_LINEAR, &m, 1));
            for (uint32_t i = 0; i < count; i++)
                for (uint32_t p = 0; p * PANEL < n; p++)
                    assert_panel(&w, i, p, &m, p * PANEL, n - p * PANEL);
            lab.ops->drop(lab.be, &w);
            assert_null(w.data);
            matrix_free(m);
        }
    }
    lab_close(&lab);
}

static void
sources_of_a_product_stand_side_by_side_without_a_gap(void **state)
{
    struct lab lab;
    uint64_t seed = 2;

    (void)state;
    assert_true(lab_open(&lab, "ref", 2));
    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        struct ns_matrix m[3] = { matrix_random(&seed, dtypes[d], 40, 9, 1),
                                  matrix_random(&seed, dtypes[d], 5, 9, 1),
                                  matrix_random(&seed, dtypes[d], 30, 9, 1) };
        struct ns_weight w = lab_pack(&lab, NS_PACK_LINEAR, m, 3);
        uint32_t n = 0;

        assert_int_equal(w.n, 75);
        for (int i = 0; i < 3; i++)
            for (uint32_t j = 0; j < m[i].n; j++, n++)
                for (uint32_t k = 0; k < 9; k++)
                    assert_true(panel_at(&w, packed_panel(&w, 0, n / PANEL),
                                         n % PANEL, k) ==
                                matrix_at(&m[i], 0, j, k));
        lab.ops->drop(lab.be, &w);
        for (int i = 0; i < 3; i++)
            matrix_free(m[i]);
    }
    lab_close(&lab);
}

static void
gate_and_up_alternate_from_one_source_or_from_two(void **state)
{
    struct lab lab;
    uint64_t seed = 3;

    (void)state;
    assert_true(lab_open(&lab, "ref", 2));
    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        struct ns_matrix both = matrix_random(&seed, dtypes[d], 90, 11, 4);
        struct ns_matrix two[2] = { matrix_random(&seed, dtypes[d], 45, 11, 1),
                                    matrix_random(&seed, dtypes[d], 45, 11,
                                                  1) };
        struct ns_weight w = lab_pack(&lab, NS_PACK_GATED, &both, 1);

        assert_int_equal(w.n, 45);
        assert_int_equal(w.count, 4);
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t p = 0; p < 2; p++) {
                assert_panel(&w, i, 2 * p, &both, p * PANEL, 45 - p * PANEL);
                assert_panel(&w, i, 2 * p + 1, &both, 45 + p * PANEL,
                             45 - p * PANEL);
            }
        lab.ops->drop(lab.be, &w);
        w = lab_pack(&lab, NS_PACK_GATED, two, 2);
        assert_int_equal(w.n, 45);
        for (uint32_t p = 0; p < 2; p++) {
            assert_panel(&w, 0, 2 * p, &two[0], p * PANEL, 45 - p * PANEL);
            assert_panel(&w, 0, 2 * p + 1, &two[1], p * PANEL, 45 - p * PANEL);
        }
        lab.ops->drop(lab.be, &w);
        matrix_free(both);
        matrix_free(two[0]);
        matrix_free(two[1]);
    }
    lab_close(&lab);
}

static void
a_table_holds_its_rows_and_its_panels(void **state)
{
    struct lab lab;
    uint64_t seed = 4;

    (void)state;
    assert_true(lab_open(&lab, "ref", 3));
    for (size_t d = 0; d < LENGTH(dtypes); d++) {
        struct ns_matrix m = matrix_random(&seed, dtypes[d], 203, 15, 1);
        struct ns_weight w = lab_pack(&lab, NS_PACK_TABLE, &m, 1);

        for (uint32_t i = 0; i < m.n; i++)
            for (uint32_t k = 0; k < m.k; k++) {
                const void *at = packed_table_row(&w, i);
                float got;

                if (w.dtype == NS_F32) {
                    got = ((const float *)at)[k];
                } else {
                    uint32_t bits =
                        (uint32_t)((const uint16_t *)at)[k] << 16;

                    memcpy(&got, &bits, sizeof(got));
                }
                assert_true(got == matrix_at(&m, 0, i, k));
            }
        for (uint32_t p = 0; p * PANEL < m.n; p++)
            assert_panel(&w, 0, p, &m, p * PANEL, m.n - p * PANEL);
        lab.ops->drop(lab.be, &w);
        matrix_free(m);
    }
    lab_close(&lab);
}

#define M(type, n_, k_, count_)                                               \
    { .dtype = type, .n = n_, .k = k_, .count = count_ }

static void
sources_that_do_not_fit_together_are_refused(void **state)
{
    static const struct {
        enum ns_packing packing;
        uint32_t n_sources;
        struct ns_matrix m[3];
        const char *says;
    } bad[] = {
        { NS_PACK_LINEAR, 0, { { 0 } }, "nothing to pack" },
        { NS_PACK_LINEAR, 1, { M(NS_F32, 0, 4, 1) }, "empty" },
        { NS_PACK_LINEAR, 1, { M(NS_F32, 4, 4, 0) }, "empty" },
        { NS_PACK_LINEAR, 2,
          { M(NS_F32, 4, 4, 1), M(NS_BF16, 4, 4, 1) },
          "differ in type" },
        { NS_PACK_LINEAR, 2,
          { M(NS_F32, 4, 4, 1), M(NS_F32, 4, 5, 1) },
          "differ" },
        { NS_PACK_LINEAR, 2,
          { M(NS_F32, 4, 4, 1), M(NS_F32, 4, 4, 2) },
          "differ" },
        { NS_PACK_GATED, 1, { M(NS_F32, 7, 4, 1) }, "gate and up" },
        { NS_PACK_GATED, 2,
          { M(NS_F32, 4, 4, 1), M(NS_F32, 6, 4, 1) },
          "gate and up" },
        { NS_PACK_GATED, 3,
          { M(NS_F32, 4, 4, 1), M(NS_F32, 4, 4, 1),
            M(NS_F32, 4, 4, 1) },
          "gate and up" },
        { NS_PACK_TABLE, 1, { M(NS_F32, 4, 4, 2) }, "a table is one" },
        { NS_PACK_LINEAR, 1,
          { M(NS_F32, 0x7fffffff, 0x7fffffff, 0xffffffff) },
          "too large" },
        { NS_PACK_LINEAR, 1, { M(NS_F32, 0x80000000, 4, 1) },
          "too large" },
    };
    struct lab lab;

    (void)state;
    assert_true(lab_open(&lab, "ref", 1));
    for (size_t i = 0; i < LENGTH(bad); i++) {
        struct ns_weight w = { .n = 77 };
        struct ns_error err;

        assert_int_equal(lab.ops->pack(lab.be, bad[i].packing, bad[i].m,
                                       bad[i].n_sources, &w, &err),
                         NS_REJECT);
        if (!strstr(err.text, bad[i].says))
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, err.text,
                     bad[i].says);
        assert_int_equal(w.n, 77); /* left alone */
        assert_int_equal(lab.ops->packed_bytes(lab.be, bad[i].packing,
                                               bad[i].m, bad[i].n_sources),
                         0);
    }
    lab_close(&lab);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_lands_in_its_panel_and_padding_is_zero),
        cmocka_unit_test(sources_of_a_product_stand_side_by_side_without_a_gap),
        cmocka_unit_test(gate_and_up_alternate_from_one_source_or_from_two),
        cmocka_unit_test(a_table_holds_its_rows_and_its_panels),
        cmocka_unit_test(sources_that_do_not_fit_together_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
