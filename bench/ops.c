/* ops.c - each op of the cpu backend against the machine's limit.
 *
 *     build/bench/ops [ISA] [THREADS] [ROWS] [f32|bf16]
 *
 * With one thread times are processor times, which neighbours disturb less.
 * Shapes are those of nightshift-mid-1: one line an op with the milliseconds of
 * its best run, GFLOP/s and the share of the multiply-add peak measured right
 * before; then the sum over the twelve layers of a denoising pass.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/limit.h"
#include "kernels/backend.h"

enum {
    V = 32768, H = 512, I = 384, M = 128, X = 64, K = 4, HEADS = 4,
    PREFIX = 1024, WINDOW = 256, CANVAS = 256, LAYERS = 12, RUNS = 7,
};

struct bench {
    struct ns_backend *be;
    enum ns_dtype dtype;
    double peak, total_ms, total_gflop;
    uint32_t rng;
    bool one; /* thread: timed by the processor time it got */
};

static void
need(enum ns_status status, const struct ns_error *err)
{
    if (status == NS_OK)
        return;
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

static float
uniform(struct bench *b)
{
    b->rng = b->rng * 1664525u + 1013904223u;
    return (float)(int32_t)b->rng * 0x1p-31f;
}

static float *
numbers(struct bench *b, size_t n, float scale)
{
    struct ns_error err;
    void *memory;

    need(b->be->ops->alloc(b->be, n * sizeof(float), "numbers", &memory, &err),
         &err);
    for (size_t i = 0; i < n; i++)
        ((float *)memory)[i] = uniform(b) * scale;
    return memory;
}

static struct ns_rows
rows(struct bench *b, uint32_t n_rows, uint32_t n_cols, float scale)
{
    return (struct ns_rows){ numbers(b, (size_t)n_rows * n_cols, scale),
                             n_rows, n_cols, n_cols };
}

static struct ns_weight
weight(struct bench *b, enum ns_packing packing, uint32_t n, uint32_t k,
       uint32_t count)
{
    size_t size = (size_t)n * k * count;
    float *wide = malloc(size * sizeof(*wide));
    uint16_t *narrow = malloc(size * sizeof(*narrow));
    struct ns_matrix matrix = {
        .data = b->dtype == NS_BF16 ? (void *)narrow : wide,
        .dtype = b->dtype,
        .n = n,
        .k = k,
        .count = count,
    };
    struct ns_weight out;
    struct ns_error err;

    if (!wide || !narrow) {
        fprintf(stderr, "out of memory for weights\n");
        exit(1);
    }
    for (size_t i = 0; i < size; i++) {
        uint32_t bits;

        wide[i] = uniform(b) * 1.7f / sqrtf((float)k);
        memcpy(&bits, &wide[i], sizeof(bits));
        narrow[i] = (uint16_t)(bits >> 16);
    }
    need(b->be->ops->pack(b->be, packing, &matrix, 1, &out, &err), &err);
    free(wide);
    free(narrow);
    return out;
}

static void
report(struct bench *b, const char *name, double ms, double gflop,
       double times)
{
    if (gflop > 0)
        printf("%-24s %9.3f ms %8.1f GFLOP/s %5.2f of peak\n", name, ms,
               gflop / ms * 1e3, gflop / ms * 1e3 / b->peak);
    else
        printf("%-24s %9.3f ms\n", name, ms);
    b->total_ms += ms * times;
    b->total_gflop += gflop * times;
}

/* The best of a few runs of `call`, which counts `times` times in a pass. */
#define MEASURE(b, name, gflop, times, call)                                  \
    do {                                                                      \
        double best_ = 1e30;                                                  \
                                                                              \
        for (int run_ = 0; run_ < RUNS; run_++) {                             \
            double start_ = seconds((b)->one);                                         \
                                                                              \
            (b)->be->ops->call;                                               \
            best_ = fmin(best_, (seconds((b)->one) - start_) * 1e3);          \
        }                                                                     \
        report(b, name, best_, gflop, times);                                 \
    } while (0)

static double
product_gflop(double m, double n, double k)
{
    return 2e-9 * m * n * k;
}

/* Canvases of CANVAS rows behind PREFIX positions each. */
static void
bench_attention(struct bench *b, uint32_t n_rows, bool full)
{
    uint32_t n_canvases = (n_rows + CANVAS - 1) / CANVAS, d = full ? 256 : 128;
    uint32_t n_kv = full ? 1 : 2, n_pages = PREFIX / NS_PAGE;
    uint32_t span = full ? PREFIX : WINDOW - 1;
    struct ns_segment *segments = calloc(n_canvases, sizeof(*segments));
    int32_t *pages = calloc((size_t)n_canvases * n_pages, sizeof(*pages));
    int32_t *lo = calloc(n_rows, sizeof(*lo));
    int32_t *hi = calloc(n_rows, sizeof(*hi));
    int32_t *position = calloc(n_rows, sizeof(*position));
    struct ns_qkv qkv = { 0 };
    struct ns_attention attention = { 0 };
    struct ns_pass pass = { 0 };
    double pairs = 0;

    if (!segments || !pages || !lo || !hi || !position)
        exit(1);
    for (uint32_t i = 0; i < n_canvases; i++) {
        uint32_t row0 = i * CANVAS, left = n_rows - row0;

        segments[i] = (struct ns_segment){ row0, left < CANVAS ? left : CANVAS,
                                           i, PREFIX, NS_SEGMENT_CANVAS };
        pairs += (double)segments[i].n_rows * (span + segments[i].n_rows);
        for (uint32_t p = 0; p < n_pages; p++)
            pages[i * n_pages + p] = (int32_t)(i * n_pages + p);
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        hi[i] = PREFIX;
        lo[i] = (int32_t)(PREFIX - span);
        position[i] = (int32_t)(PREFIX + i % CANVAS);
    }
    pass = (struct ns_pass){
        .n_rows = n_rows, .n_segments = n_canvases, .segments = segments,
        .position = position, .lo_full = lo, .lo_sliding = lo, .hi = hi,
        .page_full = pages, .page_sliding = pages, .page_stride = n_pages,
    };
    qkv.qkv = rows(b, n_rows, (HEADS + (full ? 1 : 2) * n_kv) * d, 1);
    qkv.q = rows(b, n_rows, HEADS * d, 1);
    qkv.k = rows(b, n_rows, n_kv * d, 1);
    qkv.v = rows(b, n_rows, n_kv * d, 1);
    qkv.q_norm = numbers(b, d, 0.1f);
    qkv.k_norm = numbers(b, d, 1);
    qkv.frequency = numbers(b, d / 2, 1);
    qkv.eps = 1e-6f;
    qkv.n_heads = HEADS;
    qkv.has_v = !full;
    qkv.kv = (struct ns_kv_layer){
        .n_kv_heads = n_kv, .head_dim = d, .compact = full,
        .n_rotated = full ? d / 8 : d / 2,
    };
    qkv.kv.page_bytes = sizeof(float) * NS_PAGE * n_kv *
                        (d + (full ? 2 * qkv.kv.n_rotated : d));
    qkv.kv.base = numbers(b, qkv.kv.page_bytes * n_canvases * n_pages /
                                 sizeof(float), 1);
    qkv.pages = pages;
    attention = (struct ns_attention){
        .out = rows(b, n_rows, HEADS * d, 1), .q = qkv.q, .k = qkv.k,
        .v = qkv.v, .n_heads = HEADS, .kv = qkv.kv, .pages = pages, .lo = lo,
        .k_norm = qkv.k_norm,
    };
    MEASURE(b, full ? "qkv full" : "qkv sliding", 0, full ? 2 : 10,
            qkv(b->be, &pass, &qkv));
    MEASURE(b, full ? "attention full" : "attention sliding",
            4e-9 * pairs * HEADS * d, full ? 2 : 10,
            attention(b->be, &pass, &attention));
    free(segments);
    free(pages);
    free(lo);
    free(hi);
    free(position);
}

static void
bench_linear(struct bench *b, const char *name, uint32_t n_rows, uint32_t n,
             uint32_t k, double times)
{
    struct ns_weight w = weight(b, NS_PACK_LINEAR, n, k, 1);
    struct ns_rows x = rows(b, n_rows, k, 1), y = rows(b, n_rows, n, 1);

    MEASURE(b, name, product_gflop(n_rows, n, k), times,
            linear(b->be, y, x, &w));
}

static void
bench_experts(struct bench *b, uint32_t n_rows)
{
    struct ns_weight gate_up = weight(b, NS_PACK_GATED, 2 * M, H, X);
    struct ns_weight down = weight(b, NS_PACK_LINEAR, H, M, X);
    struct ns_weight router = weight(b, NS_PACK_LINEAR, X, H, 1);
    struct ns_rows x = rows(b, n_rows, H, 1), y = rows(b, n_rows, H, 1);
    struct ns_rows logits = rows(b, n_rows, X, 1);
    int32_t *index = (int32_t *)(void *)numbers(b, (size_t)n_rows * K, 1);
    float *mix = numbers(b, (size_t)n_rows * K, 1);
    float *scale = numbers(b, X, 1);

    MEASURE(b, "router", product_gflop(n_rows, X, H), LAYERS,
            linear(b->be, logits, x, &router));
    MEASURE(b, "route", 0, LAYERS,
            route(b->be, index, mix, NULL, logits, scale, K));
    MEASURE(b, "experts", product_gflop((double)n_rows * K, 3 * M, H), LAYERS,
            experts(b->be, y, x, index, mix, K, &gate_up, &down));
}

static void
bench_norms(struct bench *b, uint32_t n_rows)
{
    struct ns_rows x = rows(b, n_rows, H, 1), a = rows(b, n_rows, H, 1);
    struct ns_rows e = rows(b, n_rows, H, 1), y = rows(b, n_rows, H, 1);
    struct ns_rows branch[3] = { a, e, y };
    float *w = numbers(b, H, 1), scalar[2] = { 0.5f, 0.5f };
    const float *const three[3] = { w, w, w };
    uint8_t *decoder = calloc(n_rows, 1);

    MEASURE(b, "rmsnorm", 0, LAYERS, rmsnorm(b->be, y, x, w, 1e-6f));
    MEASURE(b, "add_norm", 0, LAYERS, add_norm(b->be, x, a, w, 1e-6f));
    MEASURE(b, "branch_norms", 0, LAYERS,
            branch_norms(b->be, branch, x, three, 1e-6f));
    MEASURE(b, "layer_end", 0, LAYERS,
            layer_end(b->be, x, a, e, w, w, w, 1e-6f, scalar, decoder));
    free(decoder);
}

static void
bench_head(struct bench *b, uint32_t n_rows)
{
    struct ns_weight table = weight(b, NS_PACK_TABLE, V, H, 1);
    struct ns_head head = {
        .h = rows(b, n_rows, H, 4), .table = &table, .softcap = 30,
        .inv_temperature = malloc(n_rows * sizeof(float)),
        .uniform = malloc(n_rows * sizeof(double)),
        .argmax = malloc(n_rows * sizeof(int32_t)),
        .sampled = malloc(n_rows * sizeof(int32_t)),
        .entropy = malloc(n_rows * sizeof(float)),
        .soft = rows(b, n_rows, H, 1), .soft_scale = 22.625f,
    };

    for (uint32_t i = 0; i < n_rows; i++) {
        ((float *)head.inv_temperature)[i] = 1.5f;
        ((double *)head.uniform)[i] = fabs((double)uniform(b));
    }
    MEASURE(b, "head, sample only", product_gflop(n_rows, V, H), 0,
            head(b->be, &head));
    head.n_soft = n_rows;
    MEASURE(b, "head", 2 * product_gflop(n_rows, V, H), 1,
            head(b->be, &head));
    free((void *)head.inv_temperature);
    free((void *)head.uniform);
    free(head.argmax);
    free(head.sampled);
    free(head.entropy);
}

int
main(int argc, char **argv)
{
    struct ns_backend_options options = {
        .isa = argc > 1 ? argv[1] : "avx512",
        .n_threads = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2,
        .arithmetic = "auto",
    };
    uint32_t n_rows = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : CANVAS;
    struct ns_backend_sizes sizes = {
        .n_rows = n_rows, .n_head_rows = n_rows, .hidden = H, .vocab = V,
        .n_heads = HEADS, .n_kv_heads = 2, .head_dim = 256, .n_experts = X,
        .top_k = K, .expert_dim = M,
    };
    struct bench b = { .rng = 1, .dtype = NS_F32,
                       .one = options.n_threads == 1 };
    struct ns_error err;

    if (argc > 4 && strcmp(argv[4], "bf16") == 0)
        b.dtype = NS_BF16;
    need(ns_backend_open(&options, &b.be, &err), &err);
    need(b.be->ops->reserve(b.be, &sizes, &err), &err);
    b.peak = cpu_limit(LIMIT_AVX512, options.n_threads);
    if (b.peak == 0)
        b.peak = cpu_limit(LIMIT_AVX2, options.n_threads);
    printf("%s, %u threads, %u rows, %s weights: fp32 peak %.1f GFLOP/s, "
           "reads %.1f GB/s\n",
           b.be->arithmetic, options.n_threads, n_rows,
           b.dtype == NS_F32 ? "fp32" : "bf16", b.peak,
           cpu_limit(LIMIT_READ, options.n_threads));

    bench_linear(&b, "qkv_proj", n_rows, 1024, H, 10);
    bench_linear(&b, "qkv_proj full", n_rows, 1280, H, 2);
    bench_linear(&b, "o_proj", n_rows, H, 512, 10);
    bench_linear(&b, "o_proj full", n_rows, H, 1024, 2);
    {
        struct ns_weight w = weight(&b, NS_PACK_GATED, 2 * I, H, 1);
        struct ns_rows x = rows(&b, n_rows, H, 1), y = rows(&b, n_rows, I, 1);

        MEASURE(&b, "mlp gated", product_gflop(n_rows, 2 * I, H), LAYERS + 1,
                gated(b.be, y, x, &w));
    }
    bench_linear(&b, "mlp down", n_rows, H, I, LAYERS + 1);
    bench_experts(&b, n_rows);
    bench_norms(&b, n_rows);
    bench_attention(&b, n_rows, false);
    bench_attention(&b, n_rows, true);
    bench_head(&b, n_rows);
    report(&b, "denoising pass", b.total_ms, b.total_gflop, 0);
    ns_backend_close(b.be);
    return 0;
}
