/* The router's choice and the experts, against their formulas. */
#include "tests/kernels/lab.h"

#include "kernels/cpu/machine.h"

struct moe_shape {
    uint32_t n_rows, hidden, expert_dim, n_experts, top_k;
};

static const struct moe_shape shapes[] = {
    { 1, 64, 32, 8, 2 },   { 20, 64, 32, 8, 2 },  { 70, 33, 17, 5, 5 },
    { 37, 80, 40, 32, 8 }, { 3, 7, 3, 1, 1 },     { 250, 48, 31, 4, 1 },
};

static void
routes(struct lab *lab)
{
    uint64_t seed = 31;

    for (size_t s = 0; s < LENGTH(shapes); s++) {
        uint32_t rows = shapes[s].n_rows, x = shapes[s].n_experts;
        uint32_t k = shapes[s].top_k;
        size_t mark = lab->n_pieces;
        struct ns_rows logits = lab_rows(lab, rows, x);
        int32_t *index = lab_take(lab, sizeof(*index) * rows * k);
        float *weight = lab_take(lab, sizeof(*weight) * rows * k);
        float *probs = lab_take(lab, sizeof(*probs) * rows * x);
        float *again = lab_take(lab, sizeof(*again) * rows * k);
        float *scale = lab_take(lab, sizeof(*scale) * x);

        for (uint32_t e = 0; e < x; e++)
            scale[e] = 0.2f + (float)uniform(&seed) * 3;
        fill(logits, &seed, 6);
        for (uint32_t i = 0; i < rows; i += 3) /* ties */
            for (uint32_t e = 0; e < x; e++)
                row(logits, i)[e] = roundf(row(logits, i)[e] / 4);
        lab->ops->route(lab->be, index, weight, probs, logits, scale, k);
        lab_sync(lab);
        for (uint32_t i = 0; i < rows; i++) {
            const float *l = row(logits, i);
            double total = 0, kept = 0;
            bool taken[64] = { false };

            for (uint32_t e = 0; e < x; e++)
                total += exp((double)l[e]);
            for (uint32_t e = 0; e < x; e++)
                assert_near(lab, "probability", (double)probs[i * x + e],
                            exp((double)l[e]) / total, 1e-6);
            for (uint32_t slot = 0; slot < k; slot++) {
                int32_t best = -1;

                for (uint32_t e = 0; e < x; e++)
                    if (!taken[e] && (best < 0 || l[e] > l[best]))
                        best = (int32_t)e;
                assert_int_equal(index[i * k + slot], best);
                taken[best] = true;
                kept += exp((double)l[best]);
            }
            for (uint32_t slot = 0; slot < k; slot++) {
                int32_t e = index[i * k + slot];

                assert_near(lab, "routing weight",
                            (double)weight[i * k + slot],
                            exp((double)l[e]) / kept * (double)scale[e], 4e-6);
            }
        }
        /* Without probabilities, and each row alone: the same bits. */
        for (uint32_t i = 0; i < rows; i++) {
            int32_t *alone = index + (size_t)i * k;
            int32_t before[8];

            memcpy(before, alone, k * sizeof(*alone));
            lab->ops->route(lab->be, alone, again + i * k, NULL,
                            rows_from(logits, i, 1), scale, k);
            assert_memory_equal(before, alone, k * sizeof(*alone));
        }
        assert_same_bits(lab, "route, alone", again, weight, rows * k);
        lab_release_to(lab, mark);
    }
}

static void
the_router_takes_the_likeliest_lowest_index_first(void **state)
{
    (void)state;
    on_every_isa(routes);
}

static void
routes_of_nan(struct lab *lab)
{
    enum { ROWS = 9, X = 12, K = 3 };
    struct ns_rows logits = lab_rows(lab, ROWS, X);
    int32_t *index = lab_take(lab, sizeof(*index) * ROWS * K);
    float *weight = lab_take(lab, sizeof(*weight) * ROWS * K);
    float *scale = lab_take(lab, sizeof(*scale) * X);
    uint64_t seed = 32;

    for (uint32_t e = 0; e < X; e++)
        scale[e] = 1;
    fill(logits, &seed, 3);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t e = 0; e < X; e++)
            if (i == 1 || (i == 4 && e % 3 == 0) || (i == 6 && e == X - 1))
                row(logits, i)[e] = NAN;
    lab->ops->route(lab->be, index, weight, NULL, logits, scale, K);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t slot = 0; slot < K; slot++) {
            assert_in_range(index[i * K + slot], 0, X - 1);
            for (uint32_t other = 0; other < slot; other++)
                assert_int_not_equal(index[i * K + slot],
                                     index[i * K + other]);
            if (i != 1 && i != 4 && i != 6)
                assert_true(isfinite(weight[i * K + slot]));
        }
}

static void
a_row_of_nan_is_routed_inside_the_table(void **state)
{
    (void)state;
    on_every_isa(routes_of_nan);
}

struct moe {
    struct ns_matrix gate_up, down;
    struct ns_weight w_gate_up, w_down;
    struct ns_rows x, y;
    int32_t *index;
    float *weight;
};

static void
moe_init(struct moe *moe, struct lab *lab, const struct moe_shape *shape,
         enum ns_dtype dtype, uint64_t *seed)
{
    uint32_t rows = shape->n_rows, k = shape->top_k;

    moe->gate_up = matrix_random(seed, dtype, 2 * shape->expert_dim,
                                 shape->hidden, shape->n_experts);
    moe->down = matrix_random(seed, dtype, shape->hidden, shape->expert_dim,
                              shape->n_experts);
    moe->w_gate_up = lab_pack(lab, NS_PACK_GATED, &moe->gate_up, 1);
    moe->w_down = lab_pack(lab, NS_PACK_LINEAR, &moe->down, 1);
    moe->x = lab_rows(lab, rows, shape->hidden);
    moe->y = lab_rows(lab, rows, shape->hidden);
    moe->index = lab_take(lab, sizeof(*moe->index) * rows * k);
    moe->weight = lab_take(lab, sizeof(*moe->weight) * rows * k);
    fill(moe->x, seed, dtype == NS_F16 ? 0.2f : 0.7f);
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t slot = 0; slot < k; slot++) {
            bool again = true;
            int32_t e = 0;

            while (again) { /* unlike the others of the row; skewed */
                e = (int32_t)(below(seed, shape->n_experts) *
                              below(seed, 2));
                if (below(seed, 3) == 0)
                    e = (int32_t)below(seed, shape->n_experts);
                again = false;
                for (uint32_t s = 0; s < slot; s++)
                    again |= moe->index[i * k + s] == e;
            }
            moe->index[i * k + slot] = e;
            moe->weight[i * k + slot] = 2 * symmetric(seed);
        }
}

static void
moe_fini(struct moe *moe, struct lab *lab)
{
    lab->ops->drop(lab->be, &moe->w_gate_up);
    lab->ops->drop(lab->be, &moe->w_down);
    matrix_free(moe->gate_up);
    matrix_free(moe->down);
}

static void
run_experts(struct lab *lab, struct moe *moe, uint32_t top_k)
{
    lab->ops->experts(lab->be, moe->y, moe->x, moe->index, moe->weight, top_k,
                      &moe->w_gate_up, &moe->w_down);
    lab_sync(lab);
}

static void
check_experts_row(struct lab *lab, const struct moe *moe,
                  const struct moe_shape *shape, uint32_t i)
{
    double want[256] = { 0 }, bound[256] = { 0 };

    for (uint32_t slot = 0; slot < shape->top_k; slot++) {
        uint32_t e = (uint32_t)moe->index[i * shape->top_k + slot];
        double weight = (double)moe->weight[i * shape->top_k + slot];
        float middle[64];
        double off[64];

        for (uint32_t m = 0; m < shape->expert_dim; m++) {
            double e_gate, e_up;
            double gate = naive_dot(lab, row(moe->x, i), &moe->gate_up, e, m,
                                    &e_gate);
            double up = naive_dot(lab, row(moe->x, i), &moe->gate_up, e,
                                  shape->expert_dim + m, &e_up);
            double value = naive_gelu(gate) * up;

            middle[m] = (float)value;
            off[m] = 1.2 * e_gate * fabs(up) + fabs(gate) * e_up +
                     2e-6 * fabs(gate * up);
            if (lab->bf16) /* a rounding may fall the other way */
                off[m] = 0x1p-8 * fabs(value);
        }
        for (uint32_t j = 0; j < shape->hidden; j++) {
            double b;

            want[j] += weight *
                       naive_dot(lab, middle, &moe->down, e, j, &b);
            bound[j] += fabs(weight) * b + 1e-7;
            for (uint32_t m = 0; m < shape->expert_dim; m++)
                bound[j] += fabs(weight) * off[m] *
                            fabs((double)matrix_at(&moe->down, e, j, m));
        }
    }
    for (uint32_t j = 0; j < shape->hidden; j++)
        assert_near(lab, "experts", (double)row(moe->y, i)[j], want[j],
                    bound[j] + 1e-6 * fabs(want[j]));
}

static const enum ns_dtype dtypes[] = { NS_F32, NS_BF16, NS_F16 };

static void
expert_sums(struct lab *lab)
{
    uint64_t seed = 33;

    for (size_t s = 0; s < LENGTH(shapes) * LENGTH(dtypes); s++) {
        const struct moe_shape *shape = &shapes[s / LENGTH(dtypes)];
        size_t mark = lab->n_pieces;
        struct moe moe;

        moe_init(&moe, lab, shape, dtypes[s % LENGTH(dtypes)], &seed);
        run_experts(lab, &moe, shape->top_k);
        for (uint32_t i = 0; i < shape->n_rows; i++)
            check_experts_row(lab, &moe, shape, i);
        assert_gaps_whole(moe.y);
        moe_fini(&moe, lab);
        lab_release_to(lab, mark);
    }
}

static void
experts_are_summed_with_their_weights(void **state)
{
    (void)state;
    on_every_isa(expert_sums);
}

static void
experts_in_company(struct lab *lab)
{
    uint64_t seed = 34;

    for (size_t s = 0; s < LENGTH(shapes); s++) {
        const struct moe_shape *shape = &shapes[s];
        uint32_t k = shape->top_k;
        size_t mark = lab->n_pieces;
        struct moe all, one;

        moe_init(&all, lab, shape, dtypes[s % LENGTH(dtypes)], &seed);
        run_experts(lab, &all, k);
        one = all;
        one.x = lab_rows(lab, 1, shape->hidden);
        one.y = lab_rows(lab, 1, shape->hidden);
        one.index = lab_take(lab, k * sizeof(*one.index));
        one.weight = lab_take(lab, k * sizeof(*one.weight));
        for (uint32_t i = 0; i < shape->n_rows; i++) {
            copy_row(one.x, 0, all.x, i);
            /* the choice turned round: copies add up in expert order */
            for (uint32_t slot = 0; slot < k; slot++) {
                one.index[k - 1 - slot] = all.index[i * k + slot];
                one.weight[k - 1 - slot] = all.weight[i * k + slot];
            }
            run_experts(lab, &one, k);
            assert_same_bits(lab, "experts, alone", row(one.y, 0),
                             row(all.y, i), shape->hidden);
        }
        moe_fini(&all, lab);
        lab_release_to(lab, mark);
    }
}

static void
experts_give_the_same_bits_alone_and_in_company(void **state)
{
    (void)state;
    on_every_isa(experts_in_company);
}

/* The same experts on two labs. */
static void
assert_equal_labs(struct lab *one, struct lab *two)
{
    for (size_t s = 0; s < LENGTH(shapes) * LENGTH(dtypes); s++) {
        const struct moe_shape *shape = &shapes[s / LENGTH(dtypes)];
        struct lab *labs[2] = { one, two };
        size_t mark[2] = { one->n_pieces, two->n_pieces };
        struct moe moe[2];

        for (int i = 0; i < 2; i++) {
            uint64_t seed = 35;

            moe_init(&moe[i], labs[i], shape, dtypes[s % LENGTH(dtypes)],
                     &seed);
            run_experts(labs[i], &moe[i], shape->top_k);
        }
        for (uint32_t r = 0; r < shape->n_rows; r++)
            assert_same_bits(two, "experts", row(moe[0].y, r),
                             row(moe[1].y, r), shape->hidden);
        for (int i = 0; i < 2; i++) {
            moe_fini(&moe[i], labs[i]);
            lab_release_to(labs[i], mark[i]);
        }
    }
}

static void
avx2_and_avx512_run_experts_to_the_same_bits(void **state)
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
        cmocka_unit_test(the_router_takes_the_likeliest_lowest_index_first),
        cmocka_unit_test(a_row_of_nan_is_routed_inside_the_table),
        cmocka_unit_test(experts_are_summed_with_their_weights),
        cmocka_unit_test(experts_give_the_same_bits_alone_and_in_company),
        cmocka_unit_test(avx2_and_avx512_run_experts_to_the_same_bits),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
