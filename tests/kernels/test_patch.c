/* The vision tower's own ops against the formulas of MODEL.md section 13. */
#include "tests/kernels/lab.h"

enum { N = 45, HEADS = 3, D = 72, WIDTH = HEADS * D, PLACES = 11 };

struct patches {
    struct ns_rows qkv, q, k, v;
    float *q_norm, *k_norm, *frequency;
    int32_t *x, *y;
};

static void
make_patches(struct lab *lab, struct patches *p, uint64_t seed)
{
    p->qkv = lab_rows(lab, N, 3 * WIDTH);
    p->q = lab_rows(lab, N, WIDTH);
    p->k = lab_rows(lab, N, WIDTH);
    p->v = lab_rows(lab, N, WIDTH);
    p->q_norm = lab_take(lab, D * sizeof(float));
    p->k_norm = lab_take(lab, D * sizeof(float));
    p->frequency = lab_take(lab, D / 4 * sizeof(float));
    p->x = lab_take(lab, N * sizeof(int32_t));
    p->y = lab_take(lab, N * sizeof(int32_t));
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t j = 0; j < 3 * WIDTH; j++)
            row(p->qkv, i)[j] = 3 * symmetric(&seed);
        p->x[i] = (int32_t)below(&seed, PLACES);
        p->y[i] = (int32_t)below(&seed, PLACES);
    }
    for (uint32_t j = 0; j < D; j++) {
        p->q_norm[j] = symmetric(&seed);
        p->k_norm[j] = symmetric(&seed);
    }
    for (uint32_t j = 0; j < D / 4; j++)
        p->frequency[j] = (float)pow(100, -2.0 * j / (D / 2.0));
}

/* One number of a normed and turned head; w NULL: V, which turns not. */
static double
expected(const struct patches *p, const float *raw, const float *w, uint32_t i,
         uint32_t j)
{
    uint32_t half = j / (D / 2), in_half = j % (D / 2), pair = in_half % (D / 4);
    const float *at = raw + half * (D / 2);
    double sum = 0, inverse, angle, a, b;

    for (uint32_t d = 0; d < D; d++)
        sum += (double)raw[d] * (double)raw[d];
    inverse = 1 / sqrt(sum / D + 1e-6);
    if (!w)
        return (double)raw[j] * inverse;
    w += half * (D / 2);
    angle = (half ? p->y[i] : p->x[i]) * (double)p->frequency[pair];
    a = (double)at[pair] * inverse * (double)w[pair];
    b = (double)at[pair + D / 4] * inverse * (double)w[pair + D / 4];
    return in_half < D / 4 ? a * cos(angle) - b * sin(angle)
                           : b * cos(angle) + a * sin(angle);
}

static void
check_qkv(struct lab *lab)
{
    struct patches p;
    struct ns_patch_qkv args;

    make_patches(lab, &p, 4);
    args = (struct ns_patch_qkv){
        .qkv = p.qkv, .q = p.q, .k = p.k, .v = p.v, .q_norm = p.q_norm,
        .k_norm = p.k_norm, .frequency = p.frequency, .x = p.x, .y = p.y,
        .eps = 1e-6f, .n_heads = HEADS,
    };
    lab->ops->patch_qkv(lab->be, &args);
    lab_sync(lab);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < WIDTH; j++) {
            const float *raw = row(p.qkv, i) + j / D * D;

            assert_true(fabs((double)row(p.q, i)[j] -
                             expected(&p, raw, p.q_norm, i, j % D)) < 2e-6);
            assert_true(fabs((double)row(p.k, i)[j] -
                             expected(&p, raw + WIDTH, p.k_norm, i, j % D)) <
                        2e-6);
            assert_true(fabs((double)row(p.v, i)[j] -
                             expected(&p, raw + 2 * WIDTH, NULL, i, j % D)) <
                        2e-6);
        }
    /* In its place the same. */
    args.q = args.k = args.v = p.qkv;
    args.q.n_cols = args.k.n_cols = args.v.n_cols = WIDTH;
    args.k.data += WIDTH;
    args.v.data += 2 * WIDTH;
    lab->ops->patch_qkv(lab->be, &args);
    lab_sync(lab);
    for (uint32_t i = 0; i < N; i++) {
        assert_memory_equal(row(p.q, i), row(args.q, i), WIDTH * 4);
        assert_memory_equal(row(p.k, i), row(args.k, i), WIDTH * 4);
        assert_memory_equal(row(p.v, i), row(args.v, i), WIDTH * 4);
    }
}

static void
heads_are_normed_and_turned_by_both_places(void **state)
{
    (void)state;
    on_every_isa(check_qkv);
}

static void
check_place_and_pool(struct lab *lab)
{
    /* A grid of 9 x 3 and one of 6 x 3, side by side; 3 + 2 soft tokens. */
    static const uint32_t corner[] = { 0, 3, 6, 27, 30 };
    static const uint32_t columns[] = { 9, 9, 9, 6, 6 };
    struct ns_rows x = lab_rows(lab, N, 20), y = lab_rows(lab, 5, 20);
    float *table = lab_take(lab, 2 * PLACES * 20 * sizeof(float));
    float *bias = lab_take(lab, 20 * sizeof(float));
    float *std = lab_take(lab, 20 * sizeof(float));
    int32_t *at = lab_take(lab, 2 * N * sizeof(int32_t));
    uint64_t seed = 8;
    float before[N][20];

    for (uint32_t i = 0; i < 2 * PLACES * 20; i++)
        table[i] = symmetric(&seed);
    for (uint32_t j = 0; j < 20; j++) {
        bias[j] = symmetric(&seed);
        std[j] = symmetric(&seed);
    }
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t j = 0; j < 20; j++)
            before[i][j] = row(x, i)[j] = symmetric(&seed);
        at[i] = (int32_t)below(&seed, PLACES);
        at[N + i] = (int32_t)below(&seed, PLACES);
    }
    lab->ops->patch_place(lab->be, x, table, PLACES, at, at + N);
    lab_sync(lab);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < 20; j++) {
            float want = before[i][j] + table[at[i] * 20 + (int)j] +
                         table[(PLACES + at[N + i]) * 20 + (int)j];

            assert_true(fabsf(row(x, i)[j] - want) < 1e-6f);
        }
    for (int standard = 0; standard < 2; standard++) {
        lab->ops->patch_pool(lab->be, y, x, corner, columns, 3, 4.0f,
                             standard ? bias : NULL, standard ? std : NULL);
        lab_sync(lab);
        for (uint32_t t = 0; t < 5; t++)
            for (uint32_t j = 0; j < 20; j++) {
                double want = 0;

                for (uint32_t i = 0; i < 9; i++)
                    want += (double)row(x, corner[t] + i / 3 * columns[t] +
                                               i % 3)[j] * 4 / 9;
                if (standard)
                    want = (want - (double)bias[j]) * (double)std[j];
                assert_true(fabs((double)row(y, t)[j] - want) < 1e-6);
            }
    }
}

static void
places_are_added_and_squares_pooled(void **state)
{
    (void)state;
    on_every_isa(check_place_and_pool);
}

/* The tower's attention: a picture is a canvas that has no prefix. */
static void
check_pictures_apart(struct lab *lab)
{
    struct patches p;
    struct ns_rows out = lab_rows(lab, N, WIDTH), alone;
    int32_t *zero = lab_take(lab, N * sizeof(int32_t));
    const struct ns_segment segments[] = {
        { .row0 = 0, .n_rows = 27, .kind = NS_SEGMENT_CANVAS },
        { .row0 = 27, .n_rows = 18, .kind = NS_SEGMENT_CANVAS },
    };
    struct ns_segment second = { .n_rows = 18, .kind = NS_SEGMENT_CANVAS };
    struct ns_pass pass = { .n_rows = N, .n_segments = 2,
                            .segments = segments, .hi = zero };
    struct ns_attention args;

    make_patches(lab, &p, 5);
    p.q = p.k = p.v = p.qkv;
    p.q.n_cols = p.k.n_cols = p.v.n_cols = WIDTH;
    p.k.data += WIDTH;
    p.v.data += 2 * WIDTH;
    args = (struct ns_attention){
        .out = out, .q = p.q, .k = p.k, .v = p.v, .n_heads = HEADS,
        .kv = { .n_kv_heads = HEADS, .head_dim = D, .n_rotated = D / 2 },
        .lo = zero,
    };
    lab->ops->attention(lab->be, &pass, &args);
    lab_sync(lab);
    alone = lab_rows(lab, 18, WIDTH);
    pass = (struct ns_pass){ .n_rows = 18, .n_segments = 1,
                             .segments = &second, .hi = zero };
    args.out = alone;
    args.q.data += 27 * p.qkv.stride;
    args.k.data += 27 * p.qkv.stride;
    args.v.data += 27 * p.qkv.stride;
    args.q.n_rows = args.k.n_rows = args.v.n_rows = 18;
    lab->ops->attention(lab->be, &pass, &args);
    lab_sync(lab);
    for (uint32_t i = 0; i < 18; i++)
        assert_memory_equal(row(alone, i), row(out, 27 + i), WIDTH * 4);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t first = i < 27 ? 0 : 27, end = i < 27 ? 27 : N;
        double sum = 0, value = 0;

        for (uint32_t k = first; k < end; k++) {
            double score = 0;

            for (uint32_t d = 0; d < D; d++)
                score += (double)row(p.q, i)[D + d] *
                         (double)row(p.k, k)[D + d];
            sum += exp(score);
            value += exp(score) * (double)row(p.v, k)[D + 7];
        }
        assert_true(fabs((double)row(out, i)[D + 7] - value / sum) < 1e-4);
    }
}

static void
every_patch_sees_its_own_picture_and_no_other(void **state)
{
    (void)state;
    on_every_isa(check_pictures_apart);
}

/* So many rows go through in larger blocks, of which the last is not full.
 * With its query a row takes its bits along, from block to block. */
static void
check_long_picture(struct lab *lab)
{
    enum { ROWS = 1100 };
    struct ns_rows q[2], out[2], k = lab_rows(lab, ROWS, D);
    struct ns_rows v = lab_rows(lab, ROWS, D);
    int32_t *zero = lab_take(lab, ROWS * sizeof(int32_t));
    struct ns_segment segment = { .n_rows = ROWS, .kind = NS_SEGMENT_CANVAS };
    struct ns_pass pass = { .n_rows = ROWS, .n_segments = 1,
                            .segments = &segment, .hi = zero };
    uint64_t seed = 23;

    for (int turn = 0; turn < 2; turn++) {
        q[turn] = lab_rows(lab, ROWS, D);
        out[turn] = lab_rows(lab, ROWS, D);
    }
    fill(q[0], &seed, 1);
    fill(k, &seed, 1);
    fill(v, &seed, 1);
    for (uint32_t i = 0; i < ROWS; i++)
        memcpy(row(q[1], i), row(q[0], ROWS - 1 - i), D * sizeof(float));
    for (int turn = 0; turn < 2; turn++) {
        struct ns_attention args = {
            .out = out[turn], .q = q[turn], .k = k, .v = v, .n_heads = 1,
            .kv = { .n_kv_heads = 1, .head_dim = D, .n_rotated = D / 2 },
            .lo = zero,
        };

        lab->ops->attention(lab->be, &pass, &args);
        lab_sync(lab);
        assert_gaps_whole(out[turn]);
    }
    for (uint32_t i = 0; i < ROWS; i++)
        assert_memory_equal(row(out[0], i), row(out[1], ROWS - 1 - i),
                            D * sizeof(float));
    for (uint32_t i = 0; i < ROWS; i += 91) {
        double sum = 0, value[D] = { 0 };

        for (uint32_t at = 0; at < ROWS; at++) {
            double score = 0;

            for (uint32_t d = 0; d < D; d++)
                score += (double)row(q[0], i)[d] * (double)row(k, at)[d];
            sum += exp(score);
            for (uint32_t d = 0; d < D; d++)
                value[d] += exp(score) * (double)row(v, at)[d];
        }
        for (uint32_t d = 0; d < D; d++)
            assert_true(fabs((double)row(out[0], i)[d] - value[d] / sum) <
                        1e-4);
    }
}

static void
a_row_of_a_large_picture_has_its_bits_in_any_block(void **state)
{
    (void)state;
    on_every_isa(check_long_picture);
}

static void
check_limits(struct lab *lab)
{
    enum { ROWS = 5, COLUMNS = 37 };
    size_t mark = lab->n_pieces;
    struct ns_rows x = lab_rows(lab, ROWS, COLUMNS);
    struct ns_rows y = lab_rows(lab, ROWS, COLUMNS);
    struct ns_rows up = lab_rows(lab, ROWS, COLUMNS);
    uint64_t seed = 17;

    fill(x, &seed, 2);
    fill(up, &seed, 2);
    row(x, 3)[4] = NAN;
    lab->ops->clamp(lab->be, y, x, -0.5f, 0.75f);
    lab_sync(lab);
    assert_gaps_whole(y);
    assert_true(isnan(row(y, 3)[4]));
    row(x, 3)[4] = row(y, 3)[4] = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t j = 0; j < COLUMNS; j++)
            assert_true(row(y, i)[j] ==
                        fminf(fmaxf(row(x, i)[j], -0.5f), 0.75f));
    lab->ops->clamp(lab->be, y, y, -INFINITY, 0.25f); /* in place */
    lab_sync(lab);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t j = 0; j < COLUMNS; j++)
            assert_true(row(y, i)[j] ==
                        fminf(fmaxf(row(x, i)[j], -0.5f), 0.25f));
    lab->ops->gelu_times(lab->be, y, up);
    lab_sync(lab);
    assert_gaps_whole(y);
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t j = 0; j < COLUMNS; j++) {
            double gate = fmin(fmax((double)row(x, i)[j], -0.5), 0.25);

            assert_near(lab, "gelu_times", (double)row(y, i)[j],
                        naive_gelu(gate) * (double)row(up, i)[j], 1e-6);
        }
    lab_release_to(lab, mark);
}

static void
rows_are_held_between_limits_and_gated(void **state)
{
    (void)state;
    on_every_isa(check_limits);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_normed_and_turned_by_both_places),
        cmocka_unit_test(places_are_added_and_squares_pooled),
        cmocka_unit_test(every_patch_sees_its_own_picture_and_no_other),
        cmocka_unit_test(a_row_of_a_large_picture_has_its_bits_in_any_block),
        cmocka_unit_test(rows_are_held_between_limits_and_gated),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
