/* lab.h - a backend of one instruction set and what tests put on it.
 *
 * Header only: the support files in tests/ serve layers that have no kernels.
 */
#ifndef NS_TESTS_KERNELS_LAB_H
#define NS_TESTS_KERNELS_LAB_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/float8.h"

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define UNUSED __attribute__((unused))

enum { LAB_PIECES = 256 };

struct lab {
    struct ns_backend *be;
    const struct ns_backend_ops *ops;
    const char *isa;
    bool bf16; /* activations are rounded in front of products */
    bool ref;
    void *piece[LAB_PIECES];
    size_t n_pieces;
};

/* Upper bounds that all tests keep to. */
static const struct ns_backend_sizes lab_sizes = {
    .n_rows = 512, .n_head_rows = 320, .hidden = 640, .vocab = 4096,
    .n_heads = 8, .n_kv_heads = 8, .head_dim = 512,
    .n_experts = 32, .top_k = 8, .expert_dim = 256, .n_patches = 1100,
};

/* False if the machine lacks `isa`. */
UNUSED static bool
lab_open(struct lab *lab, const char *isa, uint32_t n_threads)
{
    struct ns_backend_options options = { .isa = isa, .n_threads = n_threads };
    struct ns_error err;

    memset(lab, 0, sizeof(*lab));
    if (ns_backend_open(&options, &lab->be, &err) != NS_OK) {
        assert_int_equal(err.status, NS_REJECT);
        assert_non_null(strstr(err.text, "this machine has no"));
        return false;
    }
    lab->ops = lab->be->ops;
    lab->isa = isa;
    lab->bf16 = strncmp(lab->be->arithmetic, "bf16", 4) == 0;
    lab->ref = strcmp(isa, "ref") == 0;
    assert_int_equal(lab->ops->reserve(lab->be, &lab_sizes, &err), NS_OK);
    return true;
}

/* The plug-in is found where the loader looks when a program starts. */
UNUSED static void
lab_start_where_the_card_is(char **argv)
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

/* A simulated card. */
UNUSED static void
lab_open_card(struct lab *lab, const char *arithmetic)
{
    struct ns_backend_options options = { .name = "cuda",
                                          .arithmetic = arithmetic };
    struct ns_error err;

    memset(lab, 0, sizeof(*lab));
    if (ns_backend_open(&options, &lab->be, &err) != NS_OK)
        fail_msg("%s", err.text);
    lab->ops = lab->be->ops;
    lab->isa = arithmetic;
    lab->bf16 = strcmp(arithmetic, "fp32") != 0;
    assert_int_equal(lab->ops->reserve(lab->be, &lab_sizes, &err), NS_OK);
}

/* Gives back what was taken since n_pieces was `mark`. */
UNUSED static void
lab_release_to(struct lab *lab, size_t mark)
{
    while (lab->n_pieces > mark)
        lab->ops->release(lab->be, lab->piece[--lab->n_pieces]);
}

/* Fails the test if an op failed. */
UNUSED static void
lab_sync(struct lab *lab)
{
    struct ns_error err = { 0 };

    if (lab->ops->sync(lab->be, &err) != NS_OK)
        fail_msg("%s: %s", lab->isa, err.text);
}

UNUSED static void
lab_close(struct lab *lab)
{
    lab_sync(lab);
    lab_release_to(lab, 0);
    ns_backend_close(lab->be);
}

/* Runs `check` on every instruction set of this machine. */
UNUSED static void
on_every_isa(void (*check)(struct lab *lab))
{
    static const char *const isas[] = { "ref", "avx2", "avx512", "avx512bf16",
                                        "amx" };
    int n = 0;

    for (size_t i = 0; i < LENGTH(isas); i++)
        for (uint32_t n_threads = 1; n_threads <= 3; n_threads += 2) {
            struct lab lab;

            if (!lab_open(&lab, isas[i], n_threads))
                continue;
            check(&lab);
            lab_close(&lab);
            n++;
        }
    assert_true(n >= 2); /* ref is everywhere */
}

/* Opens `isa` with one thread and with five; false if the machine lacks it. */
UNUSED static bool
lab_open_twice(struct lab lab[2], const char *isa)
{
    if (!lab_open(&lab[0], isa, 1))
        return false;
    assert_true(lab_open(&lab[1], isa, 5));
    return true;
}

UNUSED static void *
lab_take(struct lab *lab, size_t bytes)
{
    struct ns_error err;
    void *memory;

    assert_true(lab->n_pieces < LAB_PIECES);
    if (lab->ops->alloc(lab->be, bytes, "a test", &memory, &err) != NS_OK)
        fail_msg("%s", err.text);
    lab->piece[lab->n_pieces++] = memory;
    lab_sync(lab); /* a card clears it in its own time */
    return memory;
}

/* ---- numbers ----------------------------------------------------------- */

UNUSED static uint64_t
next_random(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

UNUSED static double
uniform(uint64_t *state)
{
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

/* In [-1, 1). */
UNUSED static float
symmetric(uint64_t *state)
{
    return (float)(2 * uniform(state) - 1);
}

UNUSED static uint32_t
below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(next_random(state) % n);
}

UNUSED static float
to_bf16(float value)
{
    uint32_t bits;
    uint32_t low;

    memcpy(&bits, &value, sizeof(bits));
    low = bits & 0xffffu;
    bits &= 0xffff0000u;
    if (low > 0x8000u || (low == 0x8000u && (bits & 0x10000u)))
        bits += 0x10000u;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* ---- rows -------------------------------------------------------------- */

/* The gap behind each row holds a mark that no op may touch. */
#define GAP 12345.678f

UNUSED static struct ns_rows
lab_rows(struct lab *lab, uint32_t n_rows, uint32_t n_cols)
{
    struct ns_rows rows = { .n_rows = n_rows, .n_cols = n_cols,
                            .stride = n_cols + 5 };

    rows.data = lab_take(lab, n_rows * rows.stride * sizeof(float));
    for (size_t i = 0; i < n_rows * rows.stride; i++)
        rows.data[i] = GAP;
    return rows;
}

UNUSED static float *
row(struct ns_rows rows, uint32_t i)
{
    return rows.data + i * rows.stride;
}

UNUSED static void
fill(struct ns_rows rows, uint64_t *state, float scale)
{
    for (uint32_t i = 0; i < rows.n_rows; i++)
        for (uint32_t j = 0; j < rows.n_cols; j++)
            row(rows, i)[j] = symmetric(state) * scale;
}

UNUSED static void
assert_gaps_whole(struct ns_rows rows)
{
    for (uint32_t i = 0; i < rows.n_rows; i++)
        for (size_t j = rows.n_cols; j < rows.stride; j++)
            assert_true(row(rows, i)[j] == GAP);
}

UNUSED static struct ns_rows
first_rows(struct ns_rows rows, uint32_t n)
{
    rows.n_rows = n;
    return rows;
}

UNUSED static struct ns_rows
rows_from(struct ns_rows rows, uint32_t i, uint32_t n)
{
    rows.data = row(rows, i);
    rows.n_rows = n;
    return rows;
}

UNUSED static void
copy_row(struct ns_rows to, uint32_t i, struct ns_rows from, uint32_t j)
{
    assert_int_equal(to.n_cols, from.n_cols);
    memcpy(row(to, i), row(from, j), to.n_cols * sizeof(float));
}

UNUSED static void
assert_same_bits(const struct lab *lab, const char *what, const float *a,
                 const float *b, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        if (memcmp(&a[j], &b[j], sizeof(*a)) != 0)
            fail_msg("%s: %s: column %u is %a and %a", lab->isa, what, j,
                     (double)a[j], (double)b[j]);
}

UNUSED static void
assert_near(const struct lab *lab, const char *what, double got, double want,
            double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s: %s: %.9g, should be %.9g within %.3g", lab->isa, what,
                 got, want, tolerance);
}

/* ---- matrices ---------------------------------------------------------- */

/* A matrix as a file holds it, one byte off any alignment. Free with
 * matrix_free. */
UNUSED static struct ns_matrix
matrix_random(uint64_t *state, enum ns_dtype dtype, uint32_t n, uint32_t k,
              uint32_t count)
{
    size_t each = ns_dtype_bytes(dtype), total = (size_t)n * k * count;
    unsigned char *data = malloc(total * each + 1);
    float *scale = NULL;

    assert_non_null(data);
    if (dtype == NS_E4M3) {
        scale = malloc((size_t)n * count * sizeof(float));
        assert_non_null(scale);
        for (size_t i = 0; i < (size_t)n * count; i++)
            scale[i] = to_bf16(0.5f + symmetric(state) / 4) / NS_E4M3_MAX;
    }
    for (size_t i = 0; i < total; i++) {
        float value = symmetric(state);
        uint32_t bits;
        uint16_t half;

        if (dtype == NS_F32) {
            memcpy(data + 1 + i * each, &value, each);
        } else if (dtype == NS_BF16) {
            value = to_bf16(value);
            memcpy(&bits, &value, sizeof(bits));
            half = (uint16_t)(bits >> 16);
            memcpy(data + 1 + i * each, &half, each);
        } else if (dtype == NS_E4M3) { /* any but NaN */
            data[1 + i] = (unsigned char)(next_random(state) & 0xff);
            if ((data[1 + i] & 0x7f) == 0x7f)
                data[1 + i] ^= 1;
        } else { /* any finite half: subnormals and both zeros among them */
            half = (uint16_t)(next_random(state) & 0xbfffu);
            if (i == 0)
                half = 0x8001u; /* the smallest subnormal, negative */
            if (i == 1)
                half = 0x3c00u; /* 1 */
            memcpy(data + 1 + i * each, &half, each);
        }
    }
    return (struct ns_matrix){ .data = data + 1, .scale = scale,
                               .dtype = dtype, .n = n, .k = k,
                               .count = count };
}

UNUSED static void
matrix_free(struct ns_matrix m)
{
    free((unsigned char *)(uintptr_t)m.data - 1);
    free((float *)(uintptr_t)m.scale);
}

/* Element [n][k] of matrix `i` of the count. */
UNUSED static float
matrix_at(const struct ns_matrix *m, uint32_t i, uint32_t n, uint32_t k)
{
    size_t each = ns_dtype_bytes(m->dtype);
    const unsigned char *at = (const unsigned char *)m->data +
                              (((size_t)i * m->n + n) * m->k + k) * each;
    uint16_t half;
    uint32_t bits;
    float value;

    if (m->dtype == NS_F32) {
        memcpy(&value, at, sizeof(value));
        return value;
    }
    if (m->dtype == NS_E4M3)
        return ns_e4m3_value(*at) * m->scale[(size_t)i * m->n + n];
    memcpy(&half, at, sizeof(half));
    if (m->dtype == NS_BF16) {
        bits = (uint32_t)half << 16;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    value = ldexpf((float)(half & 0x3ffu) / 1024 + ((half >> 10 & 31) != 0),
                   (half >> 10 & 31) ? (half >> 10 & 31) - 15 : -14);
    return half & 0x8000u ? -value : value;
}

UNUSED static struct ns_weight
lab_pack(struct lab *lab, enum ns_packing packing,
         const struct ns_matrix *sources, uint32_t n_sources)
{
    struct ns_weight weight;
    struct ns_error err;

    if (lab->ops->pack(lab->be, packing, sources, n_sources, &weight, &err) !=
        NS_OK)
        fail_msg("%s", err.text);
    return weight;
}

/* What a product makes of one number of a row. */
UNUSED static double
product_input(const struct lab *lab, float x)
{
    return (double)(lab->bf16 ? to_bf16(x) : x);
}

/* sum over k of x[k] * m[n][k], with the most that fp32 sums may be off. */
UNUSED static double
naive_dot(const struct lab *lab, const float *x, const struct ns_matrix *m,
          uint32_t i, uint32_t n, double *bound)
{
    double sum = 0, size = 0;

    for (uint32_t k = 0; k < m->k; k++) {
        double term = product_input(lab, x[k]) *
                      (double)matrix_at(m, i, n, k);

        sum += term;
        size += fabs(term);
    }
    *bound = size * (m->k + 2) * 0x1p-24 + 1e-30;
    return sum;
}

UNUSED static double
naive_gelu(double x)
{
    return 0.5 * x *
           (1 + tanh(sqrt(2 / 3.14159265358979323846) *
                     (x + 0.044715 * x * x * x)));
}

#endif
