/* Heads that may choose among some tokens alone, and that name their highest;
 * on a simulated card too. */

#include "tests/kernels/lab.h"

enum { MAX_ROWS = 1030, N_SOFT = 3, HIDDEN = 40 };

static const float softcap = 30;

struct shape {
    uint32_t n_rows, vocab;
    enum ns_dtype dtype;
};

static const struct shape tails = { 37, 1300, NS_F32 };
/* Parts of more than a tile. */
static const struct shape wide = { 7, 17001, NS_BF16 };
/* More rows than a card takes at a time. */
static const struct shape many = { MAX_ROWS, 40, NS_F32 };

/* Row i's mask: none, a random half, one token, a few of the last tile, every
 * token. Rows with a soft row have none. */
enum { NONE, HALF, ONE, LAST, ALL, N_KINDS };

struct bench {
    struct lab *lab;
    const struct shape *shape;
    size_t mark; /* of the lab's pieces */
    struct ns_matrix matrix;
    struct ns_weight table;
    struct ns_head args;
    float h[MAX_ROWS][HIDDEN];
    float inv_temperature[MAX_ROWS], top_p[MAX_ROWS];
    double uniform[MAX_ROWS];
    size_t n_words;
    uint32_t *bits; /* owned, [rows][words] */
    float *z;       /* owned, [rows][vocab] */
    const uint32_t *mask[MAX_ROWS];
    struct ns_candidate list[MAX_ROWS][NS_HEAD_TOP], *top[MAX_ROWS];
    int32_t argmax[MAX_ROWS], sampled[MAX_ROWS];
    float entropy[MAX_ROWS], logsumexp[MAX_ROWS];
};

static uint32_t
kind(uint32_t i)
{
    return i < N_SOFT ? NONE : i % N_KINDS;
}

static bool
left(const struct bench *b, uint32_t i, uint32_t v)
{
    return !b->mask[i] || (b->mask[i][v / 32] >> v % 32 & 1);
}

static double
z_of(const struct bench *b, uint32_t i, uint32_t v)
{
    return (double)b->z[(size_t)i * b->shape->vocab + v];
}

static void
fill_mask(struct bench *b, uint32_t i, uint64_t *seed)
{
    uint32_t *mask = b->bits + i * b->n_words, vocab = b->shape->vocab;

    if (kind(i) != NONE)
        b->mask[i] = mask;
    for (uint32_t v = 0; v < vocab; v++)
        if (kind(i) == ALL || (kind(i) == HALF && uniform(seed) < 0.5) ||
            (kind(i) == ONE && v == i * 31 % vocab) ||
            (kind(i) == LAST && v >= vocab - 9 && v % 4 == 0))
            mask[v / 32] |= 1u << v % 32;
}

static struct ns_rows
device_rows(struct lab *lab, uint32_t n_rows)
{
    struct ns_rows rows = { .n_rows = n_rows, .n_cols = HIDDEN,
                            .stride = HIDDEN };

    rows.data = lab_take(lab, n_rows * sizeof(float[HIDDEN]));
    return rows;
}

/* The same one from the same shape, whatever the lab. */
static struct bench *
bench_create(struct lab *lab, const struct shape *shape)
{
    struct ns_backend_sizes sizes = lab_sizes;
    struct bench *b = calloc(1, sizeof(*b));
    struct ns_error err;
    uint64_t seed = 91;

    assert_non_null(b);
    b->lab = lab;
    b->shape = shape;
    b->mark = lab->n_pieces;
    b->n_words = (shape->vocab + 31) / 32;
    b->bits = calloc(shape->n_rows * b->n_words, sizeof(*b->bits));
    b->z = malloc(sizeof(*b->z) * shape->n_rows * shape->vocab);
    assert_true(b->bits && b->z);
    sizes.vocab = wide.vocab;
    sizes.n_head_rows = MAX_ROWS;
    assert_int_equal(lab->ops->reserve(lab->be, &sizes, &err), NS_OK);
    b->matrix = matrix_random(&seed, shape->dtype, shape->vocab, HIDDEN, 1);
    b->table = lab_pack(lab, NS_PACK_TABLE, &b->matrix, 1);
    b->args = (struct ns_head){
        .h = device_rows(lab, shape->n_rows), .table = &b->table,
        .softcap = softcap, .inv_temperature = b->inv_temperature,
        .uniform = b->uniform, .top_p = b->top_p, .mask = b->mask,
        .top = b->top, .argmax = b->argmax, .sampled = b->sampled,
        .entropy = b->entropy, .logsumexp = b->logsumexp,
        .soft = device_rows(lab, N_SOFT), .n_soft = N_SOFT, .soft_scale = 1,
    };
    for (uint32_t i = 0; i < shape->n_rows; i++) {
        for (uint32_t j = 0; j < HIDDEN; j++)
            b->h[i][j] = symmetric(&seed) * 3;
        b->inv_temperature[i] = i % 4 == 3 ? 50 : 1;
        b->top_p[i] = i % 7 == 6 && shape != &many ? 0.6f : 1;
        b->uniform[i] = i % 6 == 5 ? -1 : uniform(&seed);
        if (i % 3 < 2)
            b->top[i] = b->list[i];
        fill_mask(b, i, &seed);
    }
    memset(b->h[0], 0, sizeof(b->h[0])); /* equals */
    return b;
}

/* The last that was created is the first to go. */
static void
bench_destroy(struct bench *b)
{
    b->lab->ops->drop(b->lab->be, &b->table);
    lab_release_to(b->lab, b->mark);
    matrix_free(b->matrix);
    free(b->bits);
    free(b->z);
    free(b);
}

static void
run(struct bench *b)
{
    const struct ns_backend_ops *ops = b->lab->ops;

    ops->upload(b->lab->be, b->args.h.data, b->h,
                b->args.h.n_rows * sizeof(b->h[0]));
    ops->head(b->lab->be, &b->args);
    lab_sync(b->lab);
}

static void
check_choice(const struct bench *b, uint32_t i)
{
    double inverse = (double)b->inv_temperature[i], off = 1e-5 * inverse;
    double most = -INFINITY, sum = 0, entropy = 0, before = 0, higher = 0;
    double u, p;
    uint32_t token = (uint32_t)b->sampled[i];

    assert_true(left(b, i, (uint32_t)b->argmax[i]));
    assert_true(left(b, i, token));
    for (uint32_t v = 0; v < b->shape->vocab; v++)
        if (left(b, i, v))
            most = fmax(most, z_of(b, i, v));
    assert_near(b->lab, "largest logit left",
                z_of(b, i, (uint32_t)b->argmax[i]), most, 1e-5);
    for (uint32_t v = 0; v < b->shape->vocab; v++)
        if (left(b, i, v))
            sum += exp((z_of(b, i, v) - most) * inverse);
    for (uint32_t v = 0; v < b->shape->vocab; v++) {
        p = left(b, i, v) ? exp((z_of(b, i, v) - most) * inverse) / sum : 0;
        if (p > 0)
            entropy -= p * log(p);
        if (v < token)
            before += p;
        if (z_of(b, i, v) > z_of(b, i, token))
            higher += p;
    }
    assert_near(b->lab, "entropy of what is left", (double)b->entropy[i],
                entropy, 1e-5 + off);
    assert_near(b->lab, "logsumexp of what is left", (double)b->logsumexp[i],
                most * inverse + log(sum), 1e-4 + 2 * off);
    p = exp((z_of(b, i, token) - most) * inverse) / sum;
    u = b->uniform[i];
    if (u < 0)
        assert_int_equal(token, b->argmax[i]);
    else if (b->top_p[i] == 1)
        assert_true(u >= before - 1e-5 - off && u <= before + p + 1e-5 + off);
    else
        assert_true(higher < (double)b->top_p[i] + 1e-5 + off);
}

static void
check_top(const struct bench *b, uint32_t i)
{
    const struct ns_candidate *list = b->list[i];
    uint32_t n = 0, n_left = 0, n_higher = 0;

    for (uint32_t v = 0; v < b->shape->vocab; v++)
        n_left += left(b, i, v);
    for (; n < NS_HEAD_TOP && list[n].id >= 0; n++) {
        assert_true(left(b, i, (uint32_t)list[n].id));
        assert_near(b->lab, "candidate", (double)list[n].z,
                    z_of(b, i, (uint32_t)list[n].id), 1e-5);
        if (n > 0 && list[n].z == list[n - 1].z)
            assert_true(list[n].id > list[n - 1].id);
        else
            assert_true(n == 0 || list[n].z < list[n - 1].z);
    }
    assert_int_equal(n, n_left < NS_HEAD_TOP ? n_left : NS_HEAD_TOP);
    assert_int_equal(list[0].id, b->argmax[i]);
    for (uint32_t v = 0; v < b->shape->vocab && n == NS_HEAD_TOP; v++)
        n_higher += left(b, i, v) &&
                    z_of(b, i, v) > (double)list[n - 1].z + 1e-5;
    assert_true(n_higher < NS_HEAD_TOP); /* all of them are named */
    for (; n < NS_HEAD_TOP; n++)
        assert_int_equal(list[n].id, -1);
}

static void
choices_and_candidates(struct lab *lab, const struct shape *shape)
{
    struct bench *b = bench_create(lab, shape);

    run(b);
    lab->ops->logits(lab->be, b->args.h, &b->table, softcap, b->z);
    lab_sync(lab);
    for (uint32_t i = 0; i < shape->n_rows; i++) {
        check_choice(b, i);
        if (b->top[i])
            check_top(b, i);
    }
    for (int32_t i = 0; i < NS_HEAD_TOP; i++) /* equals: the lowest ids */
        assert_int_equal(b->list[0][i].id, i);
    bench_destroy(b);
}

static void
assert_same_choice(const struct bench *a, uint32_t i, const struct bench *b,
                   uint32_t j)
{
    assert_int_equal(a->argmax[i], b->argmax[j]);
    assert_int_equal(a->sampled[i], b->sampled[j]);
    assert_same_bits(a->lab, "entropy", &a->entropy[i], &b->entropy[j], 1);
    assert_same_bits(a->lab, "logsumexp", &a->logsumexp[i], &b->logsumexp[j],
                     1);
}

/* The same rows without a mask or a wish for candidates, and some that have
 * nothing left. */
static void
neighbours(struct lab *lab)
{
    struct bench *b = bench_create(lab, &tails);
    float soft[2][N_SOFT * HIDDEN];
    struct bench *plain;

    for (uint32_t i = 0; i < tails.n_rows; i++)
        if (kind(i) == ONE)
            memset(b->bits + i * b->n_words, 0, b->n_words * sizeof(*b->bits));
    run(b);
    lab->ops->download(lab->be, soft[0], b->args.soft.data, sizeof(soft[0]));
    plain = bench_create(lab, &tails);
    plain->args.mask = NULL;
    plain->args.top = NULL;
    run(plain);
    lab->ops->download(lab->be, soft[1], plain->args.soft.data,
                       sizeof(soft[1]));
    lab_sync(lab);
    assert_same_bits(lab, "soft", soft[0], soft[1], N_SOFT * HIDDEN);
    for (uint32_t i = 0; i < tails.n_rows; i++) {
        if (kind(i) == ONE) {
            assert_true(isnan(b->entropy[i]));
            assert_int_equal(b->argmax[i], 0);
            assert_int_equal(b->sampled[i], 0);
        } else if (kind(i) == NONE || kind(i) == ALL) {
            assert_same_choice(b, i, plain, i);
        }
    }
    bench_destroy(plain);
    bench_destroy(b);
}

/* Each row by itself. */
static void
alone(struct lab *lab)
{
    struct bench *all = bench_create(lab, &tails), *one;

    run(all);
    one = malloc(sizeof(*one));
    assert_non_null(one);
    *one = *all;
    one->args = (struct ns_head){
        .h = first_rows(all->args.h, 1), .table = &all->table,
        .softcap = softcap, .inv_temperature = one->inv_temperature,
        .uniform = one->uniform, .top_p = one->top_p, .mask = one->mask,
        .top = one->top, .argmax = one->argmax, .sampled = one->sampled,
        .entropy = one->entropy, .logsumexp = one->logsumexp,
    };
    for (uint32_t i = 0; i < tails.n_rows; i++) {
        memcpy(one->h[0], all->h[i], sizeof(one->h[0]));
        one->inv_temperature[0] = all->inv_temperature[i];
        one->top_p[0] = all->top_p[i];
        one->uniform[0] = all->uniform[i];
        one->mask[0] = all->mask[i];
        one->top[0] = all->top[i] ? one->list[0] : NULL;
        run(one);
        assert_same_choice(one, 0, all, i);
        if (all->top[i])
            assert_memory_equal(one->list[0], all->list[i],
                                sizeof(one->list[0]));
    }
    free(one);
    bench_destroy(all);
}

static void
several_shapes(struct lab *lab)
{
    choices_and_candidates(lab, &tails);
    choices_and_candidates(lab, &wide);
}

static void
a_mask_leaves_its_tokens_alone_and_the_highest_are_named(void **state)
{
    (void)state;
    on_every_isa(several_shapes);
}

static void
a_row_knows_nothing_of_its_neighbours_masks(void **state)
{
    (void)state;
    on_every_isa(neighbours);
    on_every_isa(alone);
}

static void
a_card_does_the_same(void **state)
{
    static const char *const arithmetics[] = { "fp32", "bf16" };

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct ns_backend_options options = { .name = "cuda",
                                              .arithmetic = arithmetics[i] };
        struct lab lab = { .isa = arithmetics[i] };
        struct ns_error err;

        if (ns_backend_open(&options, &lab.be, &err) != NS_OK)
            fail_msg("%s", err.text);
        lab.ops = lab.be->ops;
        several_shapes(&lab);
        choices_and_candidates(&lab, &many);
        neighbours(&lab);
        alone(&lab);
        lab_close(&lab);
    }
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            a_mask_leaves_its_tokens_alone_and_the_highest_are_named),
        cmocka_unit_test(a_row_knows_nothing_of_its_neighbours_masks),
        cmocka_unit_test(a_card_does_the_same),
    };

    (void)argc;
    lab_start_where_the_card_is(argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
