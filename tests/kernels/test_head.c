/* The fused head against a plain softmax over whole logits. */
#include "tests/kernels/lab.h"

#include "kernels/cpu/machine.h"

enum { MAX_ROWS = 300, MAX_VOCAB = 4096 };

static const float softcap = 30;

struct head_shape {
    uint32_t n_rows, vocab, hidden;
    enum ns_dtype dtype;
};

static const struct head_shape shapes[] = {
    { 3, 1, 7, NS_F32 },      { 5, 31, 64, NS_F32 },   { 9, 255, 33, NS_F32 },
    { 17, 256, 64, NS_BF16 }, { 40, 257, 80, NS_F32 }, { 1, 513, 81, NS_BF16 },
    { 33, 1000, 16, NS_F16 }, { 7, 4096, 72, NS_BF16 },
    { MAX_ROWS, 520, 24, NS_F32 }, /* more than one group of rows */
};

/* A head, its table, and all that comes out. */
struct bench {
    struct lab *lab;
    struct ns_matrix matrix;
    struct ns_weight table;
    struct ns_head args;
    float inv_temperature[MAX_ROWS], top_p[MAX_ROWS];
    double uniform[MAX_ROWS];
    int32_t argmax[MAX_ROWS], sampled[MAX_ROWS];
    float entropy[MAX_ROWS], logsumexp[MAX_ROWS];
};

static void
bench_init(struct bench *b, struct lab *lab, const struct head_shape *shape,
           uint64_t *seed)
{
    static const float temperature[] = { 1, 0.8f, 0.4f, 3, 0.02f };

    memset(b, 0, sizeof(*b));
    b->lab = lab;
    b->matrix = matrix_random(seed, shape->dtype, shape->vocab, shape->hidden,
                              1);
    b->table = lab_pack(lab, NS_PACK_TABLE, &b->matrix, 1);
    b->args = (struct ns_head){
        .h = lab_rows(lab, shape->n_rows, shape->hidden),
        .table = &b->table, .softcap = softcap,
        .inv_temperature = b->inv_temperature, .uniform = b->uniform,
        .argmax = b->argmax, .sampled = b->sampled, .entropy = b->entropy,
        .logsumexp = b->logsumexp, .n_soft = shape->n_rows - 1,
        .soft = lab_rows(lab, shape->n_rows, shape->hidden),
        .soft_scale = 8.9f,
    };
    fill(b->args.h, seed, 3);
    for (uint32_t i = 0; i < shape->n_rows; i++) {
        b->inv_temperature[i] = 1 / temperature[i % LENGTH(temperature)];
        b->uniform[i] = uniform(seed);
    }
}

static void
bench_fini(struct bench *b)
{
    b->lab->ops->drop(b->lab->be, &b->table);
    matrix_free(b->matrix);
}

static void
run_head(struct bench *b)
{
    b->lab->ops->head(b->lab->be, &b->args);
    lab_sync(b->lab);
}

/* z of every row from the backend's own logits, [rows][vocab]. */
static float *
logits_of(struct bench *b)
{
    uint32_t rows = b->args.h.n_rows, vocab = b->table.n;
    float *z = malloc(sizeof(*z) * rows * vocab);

    assert_non_null(z);
    b->lab->ops->logits(b->lab->be, b->args.h, &b->table, softcap, z);
    lab_sync(b->lab);
    return z;
}

/* p of one row in double, unnormalised, maximum 1; returns the sum. */
static double
plain_softmax(const float *z, uint32_t n, float inv_temperature, double *p)
{
    double most = -INFINITY, sum = 0;

    for (uint32_t v = 0; v < n; v++)
        most = fmax(most, (double)(z[v] * inv_temperature));
    for (uint32_t v = 0; v < n; v++) {
        p[v] = exp((double)(z[v] * inv_temperature) - most);
        sum += p[v];
    }
    return sum;
}

/* How far fp32 logits, a chain of products each, may be off in l. */
static double
slack(const struct bench *b, uint32_t i)
{
    return 5e-6 * (double)b->inv_temperature[i];
}

static void
assert_drawn_at(const struct bench *b, uint32_t i, const double *p, double sum)
{
    uint32_t token = (uint32_t)b->sampled[i];
    double before = 0, u = b->uniform[i], off = 1e-6 + slack(b, i);

    assert_in_range(token, 0, b->table.n - 1);
    for (uint32_t v = 0; v < token; v++)
        before += p[v] / sum;
    if (!(p[token] > 0 && u >= before - off &&
          u <= before + p[token] / sum + off))
        fail_msg("%s: row %u: u %.9g drew token %u of [%.9g, +%.9g]",
                 b->lab->isa, i, u, token, before, p[token] / sum);
}

static void
check_row(struct bench *b, uint32_t i, const float *z)
{
    uint32_t n = b->table.n, hidden = b->table.k;
    double p[MAX_VOCAB], sum, entropy = 0, most = -INFINITY, bound;
    float inverse = b->inv_temperature[i];

    for (uint32_t v = 0; v < n; v++) {
        double raw = naive_dot(b->lab, row(b->args.h, i), &b->matrix, 0, v,
                               &bound);

        assert_near(b->lab, "logit", (double)z[v],
                    (double)softcap * tanh(raw / (double)softcap),
                    bound + 4e-6);
        most = fmax(most, (double)z[v]);
    }
    assert_in_range(b->argmax[i], 0, n - 1);
    assert_near(b->lab, "largest logit", (double)z[b->argmax[i]], most, 5e-6);

    sum = plain_softmax(z, n, inverse, p);
    for (uint32_t v = 0; v < n; v++)
        if (p[v] > 0)
            entropy -= p[v] / sum * log(p[v] / sum);
    assert_near(b->lab, "entropy", (double)b->entropy[i], entropy,
                5e-6 + slack(b, i));
    most = (double)((float)most * inverse);
    assert_near(b->lab, "logsumexp", (double)b->logsumexp[i], most + log(sum),
                2e-6 + slack(b, i) + 2e-7 * fabs(most));
    assert_drawn_at(b, i, p, sum);

    for (uint32_t j = 0; j < hidden && i < b->args.n_soft; j++) {
        double want = 0, size = 0, off = 5e-6 + 2 * slack(b, i);
        float got = row(b->args.soft, i)[j];

        for (uint32_t v = 0; v < n; v++) {
            double e = (double)matrix_at(&b->matrix, 0, v, j);

            want += p[v] / sum * e;
            size += p[v] / sum * fabs(e);
        }
        want *= (double)b->args.soft_scale;
        size *= (double)b->args.soft_scale;
        if (b->table.dtype == NS_BF16) {
            assert_true(got == to_bf16(got));
            assert_near(b->lab, "soft", (double)got, want,
                        0x1p-8 * (fabs(want) + (b->lab->bf16 ? size : 0)) +
                            off * size);
        } else {
            assert_near(b->lab, "soft", (double)got, want,
                        (off + (b->lab->bf16 ? 0x1p-7 : 0)) * size);
        }
    }
}

static void
all_shapes(struct lab *lab)
{
    uint64_t seed = 51;

    for (size_t s = 0; s < LENGTH(shapes); s++) {
        size_t mark = lab->n_pieces;
        struct bench b;
        float *z;

        bench_init(&b, lab, &shapes[s], &seed);
        run_head(&b);
        z = logits_of(&b);
        for (uint32_t i = 0; i < shapes[s].n_rows; i++)
            check_row(&b, i, z + (size_t)i * shapes[s].vocab);
        assert_gaps_whole(b.args.soft);
        for (uint32_t j = 0; j < shapes[s].hidden; j++) /* not asked for */
            assert_true(row(b.args.soft, shapes[s].n_rows - 1)[j] == GAP);
        free(z);
        bench_fini(&b);
        lab_release_to(lab, mark);
    }
}

static void
statistics_draw_and_soft_embedding_are_those_of_the_whole_softmax(void **state)
{
    (void)state;
    on_every_isa(all_shapes);
}

static void
extremes(struct lab *lab)
{
    static const struct head_shape shape = { 8, 700, 24, NS_F32 };
    uint64_t seed = 52;
    struct bench b;
    double p[MAX_VOCAB], sum;
    float *z;

    bench_init(&b, lab, &shape, &seed);
    for (uint32_t i = 0; i < shape.n_rows; i++)
        b.inv_temperature[i] = 1;
    b.inv_temperature[0] = 2000; /* nearly every p is exactly 0 */
    for (uint32_t j = 0; j < shape.hidden; j++) {
        row(b.args.h, 1)[j] = 0;     /* all logits equal */
        row(b.args.h, 2)[j] *= 1e4f; /* all at the cap, one way or other */
    }
    b.uniform[1] = 0;
    b.uniform[2] = -1; /* the argmax is the sample */
    b.uniform[3] = 0;
    b.uniform[4] = 1 - 0x1p-53;
    b.uniform[5] = 1 - 0x1p-53;
    b.inv_temperature[5] = 2000;
    run_head(&b);
    z = logits_of(&b);
    for (uint32_t i = 0; i < shape.n_rows; i++)
        if (i != 2)
            check_row(&b, i, z + (size_t)i * shape.vocab);
    assert_true(b.entropy[0] > -1e-6f && b.entropy[0] < 0.1f);
    assert_int_equal(b.argmax[1], 0);
    assert_int_equal(b.sampled[1], 0);
    assert_near(lab, "entropy of equals", (double)b.entropy[1], log(700),
                1e-5);
    assert_int_equal(b.sampled[2], b.argmax[2]);
    assert_true(z[2 * 700 + b.argmax[2]] == softcap);
    for (int32_t v = 0; v < b.argmax[2]; v++)
        assert_true(z[2 * 700 + v] < softcap);
    assert_int_equal(b.sampled[3], 0);
    assert_int_equal(b.sampled[4], 699);
    sum = plain_softmax(z + 5 * 700, 700, 2000, p);
    assert_true(sum > 0 && p[b.sampled[5]] > 0);
    free(z);

    /* No logsumexp and no soft embedding wanted. */
    b.args.logsumexp = NULL;
    b.args.n_soft = 0;
    run_head(&b);
    bench_fini(&b);
}

static void
equal_capped_and_vanishing_logits_give_sane_numbers(void **state)
{
    (void)state;
    on_every_isa(extremes);
}

/* Chi-square of n draws against p; -1 if a token without share was drawn.
 * Tokens expected fewer than 8 times are counted together. */
static double
chi_square(const uint32_t *count, const double *p, double sum, uint32_t n,
           uint32_t draws, uint32_t *cells)
{
    double rest = 0, chi = 0;
    uint32_t in_rest = 0;

    *cells = 0;
    for (uint32_t v = 0; v < n; v++) {
        double want = p[v] / sum * draws;

        if (want < 1e-9 && count[v] > 0)
            return -1;
        if (want < 8) {
            rest += want;
            in_rest += count[v];
            continue;
        }
        chi += (count[v] - want) * (count[v] - want) / want;
        (*cells)++;
    }
    if (rest > 1) {
        chi += (in_rest - rest) * (in_rest - rest) / rest;
        (*cells)++;
    }
    return chi;
}

static void
draw_often(struct lab *lab, float top_p)
{
    static const struct head_shape shape = { MAX_ROWS, 600, 16, NS_F32 };
    uint32_t count[600] = { 0 }, cells, draws = 0;
    uint64_t seed = 53;
    double p[MAX_VOCAB], sum, chi, kept = 0;
    struct bench b;
    float *z;

    bench_init(&b, lab, &shape, &seed);
    b.args.n_soft = 0;
    if (top_p < 1)
        b.args.top_p = b.top_p;
    for (uint32_t j = 0; j < shape.hidden; j++)
        row(b.args.h, 0)[j] *= 0.3f; /* many tokens have a share */
    for (uint32_t i = 0; i < shape.n_rows; i++) {
        if (i > 0)
            copy_row(b.args.h, i, b.args.h, 0);
        b.inv_temperature[i] = 1;
        b.top_p[i] = top_p;
    }
    for (int round = 0; round < 60; round++) {
        for (uint32_t i = 0; i < shape.n_rows; i++)
            b.uniform[i] = uniform(&seed);
        run_head(&b);
        for (uint32_t i = 0; i < shape.n_rows; i++, draws++)
            count[b.sampled[i]]++;
    }
    z = logits_of(&b);
    sum = plain_softmax(z, shape.vocab, 1, p);
    if (top_p < 1) { /* the nucleus: by falling p until the mass is met */
        bool in[600] = { false };

        while (kept < (double)top_p * sum) {
            uint32_t best = 600;

            for (uint32_t v = 0; v < 600; v++)
                if (!in[v] && (best == 600 || p[v] > p[best]))
                    best = v;
            in[best] = true;
            kept += p[best];
        }
        for (uint32_t v = 0; v < 600; v++)
            p[v] = in[v] ? p[v] : 0;
        sum = kept;
    }
    chi = chi_square(count, p, sum, shape.vocab, draws, &cells);
    /* mean = cells - 1, deviation = sqrt(2 mean): six of them off is a bug */
    assert_true(cells > 5);
    if (chi < 0 || chi > cells + 6 * sqrt(2.0 * cells))
        fail_msg("%s: top_p %g: chi-square %g over %u cells", lab->isa,
                 (double)top_p, chi, cells);
    free(z);
    bench_fini(&b);
}

static void
whole_draws(struct lab *lab)
{
    draw_often(lab, 1);
}

static void
nucleus_draws(struct lab *lab)
{
    draw_often(lab, 0.6f);
}

static void
draws_follow_the_distribution(void **state)
{
    (void)state;
    on_every_isa(whole_draws);
}

static void
draws_with_top_p_follow_the_nucleus(void **state)
{
    (void)state;
    on_every_isa(nucleus_draws);
}

/* Four logits of 2.9 and four of 1.45 in a vocabulary of 600 whose
 * others are far below; equal rows of the table give equal logits. */
static void
small_nuclei(struct lab *lab)
{
    static const uint32_t high[4] = { 3, 255, 256, 580 };
    static const uint32_t low[4] = { 0, 300, 511, 599 };
    struct ns_matrix m = { .dtype = NS_F32, .n = 600, .k = 2, .count = 1 };
    static float data[600][2];
    struct ns_weight table;
    struct lab *l = lab;
    uint64_t seed = 54;
    enum { ROWS = 64 };
    float inverse[ROWS], top_p[ROWS], entropy[ROWS];
    double u[ROWS];
    int32_t argmax[ROWS], sampled[ROWS];
    struct ns_head args = {
        .h = lab_rows(l, ROWS, 2), .table = &table, .softcap = softcap,
        .inv_temperature = inverse, .uniform = u, .top_p = top_p,
        .argmax = argmax, .sampled = sampled, .entropy = entropy,
    };
    /* p of a high one: e^2.9 / (4 e^2.9 + 4 e^1.45), of a low one the rest */
    static const struct {
        float top_p;
        uint32_t n_high, n_low;
    } cases[] = {
        { 0, 1, 0 },       { 0.1f, 1, 0 },    { 0.25f, 2, 0 },
        { 0.5f, 3, 0 },    { 0.8f, 4, 0 },    { 0.82f, 4, 1 },
        { 0.9f, 4, 2 },    { 0.9999f, 4, 4 }, { 1, 4, 4 },
    };

    for (uint32_t v = 0; v < 600; v++)
        data[v][0] = -10;
    for (int i = 0; i < 4; i++) {
        data[high[i]][0] = 1;
        data[low[i]][0] = 0.5f;
    }
    m.data = data;
    table = lab_pack(lab, NS_PACK_TABLE, &m, 1);
    for (size_t c = 0; c < LENGTH(cases); c++) {
        bool seen[600] = { false };

        for (int round = 0; round < 8; round++) {
            for (uint32_t i = 0; i < ROWS; i++) {
                row(args.h, i)[0] = 2.9f;
                row(args.h, i)[1] = 0;
                inverse[i] = 1;
                top_p[i] = cases[c].top_p;
                u[i] = i == 0 ? 0 : i == 1 ? 1 - 0x1p-53 : uniform(&seed);
            }
            lab->ops->head(lab->be, &args);
            lab_sync(lab);
            for (uint32_t i = 0; i < ROWS; i++) {
                assert_int_equal(argmax[i], 3);
                seen[sampled[i]] = true;
            }
        }
        for (uint32_t v = 0; v < 600; v++) {
            bool want = false;

            for (uint32_t i = 0; i < cases[c].n_high; i++)
                want |= v == high[i];
            for (uint32_t i = 0; i < cases[c].n_low; i++)
                want |= v == low[i];
            if (seen[v] != want)
                fail_msg("%s: top_p %g: token %u %s", lab->isa,
                         (double)cases[c].top_p, v,
                         want ? "never drawn" : "drawn");
        }
    }
    lab->ops->drop(lab->be, &table);
}

static void
a_nucleus_is_the_smallest_set_with_the_lowest_index_first(void **state)
{
    (void)state;
    on_every_isa(small_nuclei);
}

static void
assert_same_head(const struct lab *lab, const struct bench *a, uint32_t i,
                 const struct bench *b, uint32_t j)
{
    assert_int_equal(a->argmax[i], b->argmax[j]);
    assert_int_equal(a->sampled[i], b->sampled[j]);
    assert_same_bits(lab, "entropy", &a->entropy[i], &b->entropy[j], 1);
    assert_same_bits(lab, "logsumexp", &a->logsumexp[i], &b->logsumexp[j], 1);
    if (i < a->args.n_soft && j < b->args.n_soft)
        assert_same_bits(lab, "soft", row(a->args.soft, i),
                         row(b->args.soft, j), a->table.k);
}

static void
spoilt_rows(struct lab *lab)
{
    static const struct head_shape shape = { 21, 900, 40, NS_F32 };
    struct bench clean, spoilt;

    for (int with_top_p = 0; with_top_p < 2; with_top_p++) {
        for (int i = 0; i < 2; i++) {
            struct bench *b = i ? &spoilt : &clean;
            uint64_t seed = 55;

            bench_init(b, lab, &shape, &seed);
            for (uint32_t r = 0; r < shape.n_rows; r++)
                b->top_p[r] = r % 2 ? 0.7f : 1;
            b->args.top_p = with_top_p ? b->top_p : NULL;
        }
        row(spoilt.args.h, 0)[3] = NAN;
        row(spoilt.args.h, 7)[39] = -NAN;
        row(spoilt.args.h, 8)[0] = NAN;
        spoilt.uniform[8] = -1;
        row(spoilt.args.h, 20)[1] = NAN; /* no soft row */
        run_head(&clean);
        run_head(&spoilt);
        for (uint32_t r = 0; r < shape.n_rows; r++) {
            if (r != 0 && r != 7 && r != 8 && r != 20) {
                assert_same_head(lab, &clean, r, &spoilt, r);
                continue;
            }
            assert_int_equal(spoilt.argmax[r], 0);
            assert_int_equal(spoilt.sampled[r], 0);
            assert_true(isnan(spoilt.entropy[r]));
        }
        bench_fini(&clean);
        bench_fini(&spoilt);
    }
}

static void
a_row_of_nan_has_nan_entropy_and_token_zero_and_spoils_no_other(void **state)
{
    (void)state;
    on_every_isa(spoilt_rows);
}

static void
one_spoilt_token(struct lab *lab)
{
    static const struct head_shape shape = { 4, 600, 12, NS_F32 };
    uint64_t seed = 56;
    float bad = NAN;
    struct bench b;

    bench_init(&b, lab, &shape, &seed);
    lab->ops->drop(lab->be, &b.table);
    memcpy((unsigned char *)(uintptr_t)b.matrix.data + 4 * (599 * 12 + 5),
           &bad, sizeof(bad)); /* the last token's embedding */
    b.table = lab_pack(lab, NS_PACK_TABLE, &b.matrix, 1);
    run_head(&b);
    for (uint32_t i = 0; i < shape.n_rows; i++) {
        assert_int_equal(b.argmax[i], 0);
        assert_int_equal(b.sampled[i], 0);
        assert_true(isnan(b.entropy[i]));
    }
    bench_fini(&b);
}

static void
a_single_nan_logit_is_noticed_wherever_it_stands(void **state)
{
    (void)state;
    on_every_isa(one_spoilt_token);
}

static void
heads_in_company(struct lab *lab)
{
    for (size_t s = 0; s < LENGTH(shapes); s++) {
        uint32_t n = shapes[s].n_rows;
        size_t mark = lab->n_pieces;
        struct bench all, turned, one;
        uint64_t seed = 57;

        bench_init(&all, lab, &shapes[s], &seed);
        turned = one = all;
        for (uint32_t i = 0; i < n; i++)
            all.top_p[i] = i % 3 ? 1 : 0.8f;
        all.args.top_p = all.top_p;
        all.args.n_soft = n;
        run_head(&all);

        bench_fini(&all);
        seed = 57;
        bench_init(&turned, lab, &shapes[s], &seed);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = n - 1 - i;

            copy_row(turned.args.h, j, all.args.h, i);
            turned.inv_temperature[j] = all.inv_temperature[i];
            turned.uniform[j] = all.uniform[i];
            turned.top_p[j] = all.top_p[i];
        }
        turned.args.top_p = turned.top_p;
        turned.args.n_soft = n / 2;
        run_head(&turned);
        for (uint32_t i = 0; i < n; i++)
            assert_same_head(lab, &turned, n - 1 - i, &all, i);
        bench_fini(&turned);

        seed = 57;
        bench_init(&one, lab, &shapes[s], &seed);
        for (uint32_t i = 0; i < n; i += 3) {
            one.args.h = rows_from(all.args.h, i, 1);
            one.args.n_soft = 1;
            one.args.top_p = one.top_p;
            one.top_p[0] = all.top_p[i];
            one.inv_temperature[0] = all.inv_temperature[i];
            one.uniform[0] = all.uniform[i];
            run_head(&one);
            assert_same_head(lab, &one, 0, &all, i);
        }
        bench_fini(&one);
        lab_release_to(lab, mark);
    }
}

static void
a_row_has_the_same_head_alone_and_in_company(void **state)
{
    (void)state;
    on_every_isa(heads_in_company);
}

/* The same heads on two labs. */
static void
assert_equal_labs(struct lab *one, struct lab *two)
{
    for (size_t s = 0; s < LENGTH(shapes); s++) {
        struct lab *labs[2] = { one, two };
        size_t mark[2] = { one->n_pieces, two->n_pieces };
        static struct bench b[2];

        for (int i = 0; i < 2; i++) {
            uint64_t seed = 58;

            bench_init(&b[i], labs[i], &shapes[s], &seed);
            for (uint32_t r = 0; r < shapes[s].n_rows; r++)
                b[i].top_p[r] = r % 2 ? 1 : 0.5f;
            b[i].args.top_p = b[i].top_p;
            run_head(&b[i]);
        }
        for (uint32_t r = 0; r < shapes[s].n_rows; r++)
            assert_same_head(two, &b[0], r, &b[1], r);
        for (int i = 0; i < 2; i++) {
            bench_fini(&b[i]);
            lab_release_to(labs[i], mark[i]);
        }
    }
}

static void
avx2_and_avx512_give_the_same_heads(void **state)
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
        cmocka_unit_test(
            statistics_draw_and_soft_embedding_are_those_of_the_whole_softmax),
        cmocka_unit_test(equal_capped_and_vanishing_logits_give_sane_numbers),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(draws_with_top_p_follow_the_nucleus),
        cmocka_unit_test(
            a_nucleus_is_the_smallest_set_with_the_lowest_index_first),
        cmocka_unit_test(
            a_row_of_nan_has_nan_entropy_and_token_zero_and_spoils_no_other),
        cmocka_unit_test(a_single_nan_logit_is_noticed_wherever_it_stands),
        cmocka_unit_test(a_row_has_the_same_head_alone_and_in_company),
        cmocka_unit_test(avx2_and_avx512_give_the_same_heads),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
