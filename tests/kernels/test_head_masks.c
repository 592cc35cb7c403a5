/* Heads that may choose among some tokens alone, and that name their highest. */
#include <limits.h>
#include <unistd.h>

#include "tests/kernels/lab.h"

enum { ROWS = 37, VOCAB = 1300, WORDS = (VOCAB + 31) / 32, HIDDEN = 40 };

static const float softcap = 30;

/* Row i's mask: 0 none, 1 a random half, 2 one token, 3 a few of the last
 * tile, 4 every token. */
enum { NONE, HALF, ONE, LAST, ALL, N_KINDS };

struct bench {
    struct lab *lab;
    struct ns_matrix matrix;
    struct ns_weight table;
    struct ns_head args;
    float inv_temperature[ROWS], top_p[ROWS];
    double uniform[ROWS];
    uint32_t bits[ROWS][WORDS];
    const uint32_t *mask[ROWS];
    struct ns_candidate top[ROWS][NS_HEAD_TOP], *to[ROWS];
    int32_t argmax[ROWS], sampled[ROWS];
    float entropy[ROWS], logsumexp[ROWS];
    float z[ROWS][VOCAB];
};

static bool
left(const struct bench *b, uint32_t i, uint32_t v)
{
    return !b->mask[i] || (b->bits[i][v / 32] >> v % 32 & 1);
}

static void
allow(struct bench *b, uint32_t i, uint32_t v)
{
    b->bits[i][v / 32] |= 1u << v % 32;
}

static void
bench_init(struct bench *b, struct lab *lab)
{
    uint64_t seed = 91;

    memset(b, 0, sizeof(*b));
    b->lab = lab;
    b->matrix = matrix_random(&seed, NS_F32, VOCAB, HIDDEN, 1);
    b->table = lab_pack(lab, NS_PACK_TABLE, &b->matrix, 1);
    b->args = (struct ns_head){
        .h = lab_rows(lab, ROWS, HIDDEN), .table = &b->table,
        .softcap = softcap, .inv_temperature = b->inv_temperature,
        .uniform = b->uniform, .top_p = b->top_p, .mask = b->mask,
        .top = b->to, .argmax = b->argmax, .sampled = b->sampled,
        .entropy = b->entropy, .logsumexp = b->logsumexp,
        .soft = lab_rows(lab, ROWS, HIDDEN), .soft_scale = 1,
    };
    fill(b->args.h, &seed, 3);
    for (uint32_t i = 0; i < ROWS; i++) {
        b->inv_temperature[i] = i % 4 == 3 ? 50 : 1;
        b->top_p[i] = i % 7 == 6 ? 0.6f : 1;
        b->uniform[i] = i % 6 == 5 ? -1 : uniform(&seed);
        if (i % 3 < 2)
            b->to[i] = b->top[i];
        if (i % N_KINDS == NONE)
            continue;
        b->mask[i] = b->bits[i];
        for (uint32_t v = 0; v < VOCAB; v++)
            if (i % N_KINDS == ALL ||
                (i % N_KINDS == HALF && uniform(&seed) < 0.5))
                allow(b, i, v);
        if (i % N_KINDS == ONE)
            allow(b, i, i * 31);
        for (uint32_t v = VOCAB - 9; i % N_KINDS == LAST && v < VOCAB; v += 4)
            allow(b, i, v);
    }
}

static void
run(struct bench *b)
{
    b->lab->ops->head(b->lab->be, &b->args);
    b->lab->ops->logits(b->lab->be, b->args.h, &b->table, softcap, b->z[0]);
    lab_sync(b->lab);
}

static void
check_choice(const struct bench *b, uint32_t i)
{
    double inverse = (double)b->inv_temperature[i], off = 1e-5 * inverse;
    double most = -INFINITY, sum = 0, entropy = 0, before = 0, u, p;
    uint32_t token = (uint32_t)b->sampled[i];

    assert_true(left(b, i, (uint32_t)b->argmax[i]));
    assert_true(left(b, i, token));
    for (uint32_t v = 0; v < VOCAB; v++)
        if (left(b, i, v))
            most = fmax(most, (double)b->z[i][v]);
    assert_near(b->lab, "largest logit left", (double)b->z[i][b->argmax[i]],
                most, 1e-5);
    for (uint32_t v = 0; v < VOCAB; v++)
        if (left(b, i, v))
            sum += exp(((double)b->z[i][v] - most) * inverse);
    for (uint32_t v = 0; v < VOCAB; v++) {
        p = left(b, i, v) ? exp(((double)b->z[i][v] - most) * inverse) / sum
                          : 0;
        if (p > 0)
            entropy -= p * log(p);
        if (v < token)
            before += p;
    }
    assert_near(b->lab, "entropy of what is left", (double)b->entropy[i],
                entropy, 1e-5 + off);
    assert_near(b->lab, "logsumexp of what is left", (double)b->logsumexp[i],
                most * inverse + log(sum), 1e-4 + 2 * off);
    p = exp(((double)b->z[i][token] - most) * inverse) / sum;
    u = b->uniform[i];
    if (u < 0)
        assert_int_equal(token, b->argmax[i]);
    else if (b->top_p[i] == 1)
        assert_true(u >= before - 1e-5 - off && u <= before + p + 1e-5 + off);
}

static void
check_top(const struct bench *b, uint32_t i)
{
    bool named[VOCAB] = { false };
    uint32_t n = 0, n_left = 0;

    for (uint32_t v = 0; v < VOCAB; v++)
        n_left += left(b, i, v);
    for (; n < NS_HEAD_TOP && b->top[i][n].id >= 0; n++) {
        const struct ns_candidate *c = &b->top[i][n];

        assert_true(left(b, i, (uint32_t)c->id) && !named[c->id]);
        named[c->id] = true;
        assert_near(b->lab, "candidate", (double)c->z,
                    (double)b->z[i][c->id], 1e-5);
        if (n > 0 && c->z == c[-1].z)
            assert_true(c->id > c[-1].id);
        else
            assert_true(n == 0 || c->z < c[-1].z);
    }
    assert_int_equal(n, n_left < NS_HEAD_TOP ? n_left : NS_HEAD_TOP);
    assert_int_equal(b->top[i][0].id, b->argmax[i]);
    for (uint32_t v = 0; v < VOCAB && n == NS_HEAD_TOP; v++)
        if (left(b, i, v) && !named[v])
            assert_true(b->z[i][v] <= b->top[i][n - 1].z + 1e-5f);
    for (; n < NS_HEAD_TOP; n++)
        assert_int_equal(b->top[i][n].id, -1);
}

static void
choices_and_candidates(struct lab *lab)
{
    struct bench *b = malloc(sizeof(*b));

    assert_non_null(b);
    bench_init(b, lab);
    for (uint32_t j = 0; j < HIDDEN; j++) /* equals: the lowest ids */
        row(b->args.h, 0)[j] = row(b->args.h, 1)[j] = 0;
    run(b);
    for (uint32_t i = 0; i < ROWS; i++) {
        check_choice(b, i);
        if (b->to[i])
            check_top(b, i);
    }
    for (int32_t i = 0; i < NS_HEAD_TOP; i++)
        assert_int_equal(b->top[0][i].id, i);
    lab->ops->drop(lab->be, &b->table);
    matrix_free(b->matrix);
    free(b);
}

static void
a_mask_leaves_its_tokens_alone_and_the_highest_are_named(void **state)
{
    (void)state;
    on_every_isa(choices_and_candidates);
}

/* The same rows without a mask or a wish for candidates, and some that have
 * nothing left. */
static void
neighbours(struct lab *lab)
{
    struct bench *b = malloc(2 * sizeof(*b)), *plain = b + 1;

    assert_non_null(b);
    bench_init(b, lab);
    for (uint32_t i = 0; i < ROWS; i++)
        if (i % N_KINDS == ONE)
            memset(b->bits[i], 0, sizeof(b->bits[i]));
    run(b);
    bench_init(plain, lab);
    plain->args.mask = NULL;
    plain->args.top = NULL;
    run(plain);
    for (uint32_t i = 0; i < ROWS; i++) {
        if (i % N_KINDS == ONE) {
            assert_true(isnan(b->entropy[i]));
            assert_int_equal(b->argmax[i], 0);
            assert_int_equal(b->sampled[i], 0);
        } else if (i % N_KINDS == NONE || i % N_KINDS == ALL) {
            assert_int_equal(b->argmax[i], plain->argmax[i]);
            assert_int_equal(b->sampled[i], plain->sampled[i]);
            assert_true(b->entropy[i] == plain->entropy[i]);
            assert_true(b->logsumexp[i] == plain->logsumexp[i]);
        }
    }
    lab->ops->drop(lab->be, &b->table);
    lab->ops->drop(lab->be, &plain->table);
    matrix_free(b->matrix);
    matrix_free(plain->matrix);
    free(b);
}

static void
a_row_knows_nothing_of_its_neighbours_masks(void **state)
{
    (void)state;
    on_every_isa(neighbours);
}

/* The same on a simulated card. */
static void
on_a_card(void (*check)(struct lab *lab))
{
    struct ns_backend_options options = { .name = "cuda",
                                          .arithmetic = "fp32" };
    struct lab lab = { .isa = "cuda" };
    struct ns_error err;

    if (ns_backend_open(&options, &lab.be, &err) != NS_OK)
        fail_msg("%s", err.text);
    lab.ops = lab.be->ops;
    assert_int_equal(lab.ops->reserve(lab.be, &lab_sizes, &err), NS_OK);
    check(&lab);
    lab_close(&lab);
}

static void
a_card_does_the_same(void **state)
{
    (void)state;
    on_a_card(choices_and_candidates);
    on_a_card(neighbours);
}

/* The plug-in is found where the loader looks when a program starts. */
static void
start_where_the_card_is(char **argv)
{
    char path[PATH_MAX], *end;

    if (getenv("NS_CUDASIM_DEVICES"))
        return;
    snprintf(path, sizeof(path), "%s", argv[0]);
    end = strstr(path, "tests/kernels/");
    if (!end)
        return;
    strcpy(end, "cudasim");
    setenv("LD_LIBRARY_PATH", path, 1);
    setenv("NS_CUDASIM_DEVICES", "1", 1);
    execv(argv[0], argv);
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
    start_where_the_card_is(argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
