/* qkv and attention over random segments, against naive double loops.
 *
 * A world has sequences whose prefix was written by passes of prefill, ar and
 * commit segments, through page tables that point anywhere, and then a pass
 * of all kinds. The pool starts full of NaN: who reads a position that no one
 * wrote, or that the row may not see, spoils the result.
 */
#include "tests/kernels/lab.h"

#include "kernels/cpu/machine.h"

enum { SEQUENCES = 5, POSITIONS = 640, TABLE = POSITIONS / NS_PAGE,
       PAGES = SEQUENCES * TABLE + 3, MAX_ROWS = 400 };

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, n_rotated;
    bool has_v, compact;
    uint32_t window;
};

static const struct shape shapes[] = {
    { 4, 2, 16, 8, true, false, 16 },    /* sliding, as the vectors have it */
    { 4, 1, 32, 4, false, true, 0 },     /* full */
    { 4, 1, 32, 4, false, false, 0 },    /* full, K and V apart */
    { 3, 3, 20, 10, true, false, 100 },  /* no multiple of any register */
    { 6, 2, 44, 5, false, true, 0 },
    { 8, 4, 256, 128, true, false, 300 }, /* as released */
    { 8, 1, 512, 64, false, true, 0 },
};

#ifdef __SANITIZE_THREAD__
enum { N_SHAPES = 4 }; /* ten times slower, and races do not care for sizes */
#else
enum { N_SHAPES = LENGTH(shapes) };
#endif

struct world {
    struct lab *lab;
    struct shape shape;
    uint64_t seed;
    struct ns_kv_layer kv;
    int32_t *pages; /* [SEQUENCES][TABLE] */
    float *q_norm, *k_norm, *frequency;
    uint32_t length[SEQUENCES];     /* written positions */
    float *k[SEQUENCES], *v[SEQUENCES]; /* what they hold: [POSITIONS][cols] */
    /* the pass */
    struct ns_segment segment[SEQUENCES];
    struct ns_pass pass;
    int32_t *position, *lo_full, *lo_sliding, *hi;
    struct ns_rows qkv, q, k_rows, v_rows, out;
};

static uint32_t
kv_cols(const struct world *w)
{
    return w->shape.n_kv_heads * w->shape.head_dim;
}

static void
world_init(struct world *w, struct lab *lab, struct shape shape, uint64_t seed)
{
    uint32_t d = shape.head_dim, r = shape.n_rotated;
    uint32_t k_floats = shape.compact ? 2 * r : d, order[PAGES];
    size_t floats;

    *w = (struct world){ .lab = lab, .shape = shape, .seed = seed };
    w->kv = (struct ns_kv_layer){
        .n_kv_heads = shape.n_kv_heads, .head_dim = d, .n_rotated = r,
        .compact = shape.compact,
        .page_bytes = (size_t)NS_PAGE * shape.n_kv_heads * (d + k_floats) *
                          sizeof(float) + 64, /* pages may lie apart */
    };
    floats = PAGES * w->kv.page_bytes / sizeof(float);
    w->kv.base = lab_take(lab, floats * sizeof(float));
    for (size_t i = 0; i < floats; i++)
        ((float *)w->kv.base)[i] = NAN;

    w->pages = lab_take(lab, sizeof(*w->pages) * SEQUENCES * TABLE);
    for (uint32_t i = 0; i < PAGES; i++) {
        uint32_t j = below(&w->seed, i + 1);

        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < SEQUENCES * TABLE; i++)
        w->pages[i] = (int32_t)order[i];

    w->q_norm = lab_take(lab, d * sizeof(float));
    w->k_norm = lab_take(lab, d * sizeof(float));
    w->frequency = lab_take(lab, d / 2 * sizeof(float));
    for (uint32_t j = 0; j < d; j++) {
        w->q_norm[j] = (0.3f + symmetric(&w->seed)) * 3 / sqrtf((float)d);
        w->k_norm[j] = 0.2f + symmetric(&w->seed);
    }
    for (uint32_t j = 0; j < r; j++)
        w->frequency[j] = powf(10000, -2.0f * (float)j / (float)d);
    for (int s = 0; s < SEQUENCES; s++) {
        w->k[s] = malloc(sizeof(float) * POSITIONS * kv_cols(w));
        w->v[s] = malloc(sizeof(float) * POSITIONS * kv_cols(w));
        assert_true(w->k[s] && w->v[s]);
    }
    w->qkv = lab_rows(lab, MAX_ROWS, shape.n_heads * d +
                                         kv_cols(w) * (shape.has_v ? 2 : 1));
    w->q = lab_rows(lab, MAX_ROWS, shape.n_heads * d);
    w->k_rows = lab_rows(lab, MAX_ROWS, kv_cols(w));
    w->v_rows = lab_rows(lab, MAX_ROWS, kv_cols(w));
    w->out = lab_rows(lab, MAX_ROWS, shape.n_heads * d);
    w->position = lab_take(lab, MAX_ROWS * sizeof(int32_t));
    w->lo_full = lab_take(lab, MAX_ROWS * sizeof(int32_t));
    w->lo_sliding = lab_take(lab, MAX_ROWS * sizeof(int32_t));
    w->hi = lab_take(lab, MAX_ROWS * sizeof(int32_t));
}

static void
world_fini(struct world *w)
{
    for (int s = 0; s < SEQUENCES; s++) {
        free(w->k[s]);
        free(w->v[s]);
    }
}

/* A pass with a segment of every sequence that has room, in random order. */
static void
plan_pass(struct world *w, bool canvases)
{
    uint32_t n_rows = 0, n = 0, first = below(&w->seed, SEQUENCES);

    for (uint32_t i = 0; i < SEQUENCES; i++) {
        uint32_t slot = (i + first) % SEQUENCES;
        struct ns_segment *s = &w->segment[n];
        bool canvas, group;
        uint32_t lo = 0;

        s->kind = (enum ns_segment_kind)below(&w->seed, 4);
        if (!canvases && s->kind == NS_SEGMENT_CANVAS)
            s->kind = NS_SEGMENT_PREFILL;
        canvas = s->kind == NS_SEGMENT_CANVAS;
        /* large heads in short runs, or the naive loops take minutes */
        s->n_rows = 1 + below(&w->seed, w->shape.head_dim < 256 ? 79 : 23);
        if (s->kind == NS_SEGMENT_AR)
            s->n_rows = 1;
        s->slot = slot;
        s->row0 = n_rows;
        s->position = w->length[slot];
        if (s->position + s->n_rows > POSITIONS)
            continue;
        group = s->kind == NS_SEGMENT_PREFILL && below(&w->seed, 2);
        for (uint32_t j = 0; j < s->n_rows; j++, n_rows++) {
            uint32_t at = s->position + j, from = canvas ? s->position : at;
            uint32_t window = w->shape.window;

            /* A group of images: rows 2..9 of the segment see each other. */
            bool in_group = group && j >= 2 && j < 10 && s->n_rows >= 10;

            w->position[n_rows] = (int32_t)at;
            w->hi[n_rows] = (int32_t)(canvas     ? s->position
                                      : in_group ? s->position + 10
                                                 : at + 1);
            if (window > 0)
                lo = from + 1 > window ? from + 1 - window : 0;
            if (in_group && lo > s->position + 2)
                lo = s->position + 2;
            w->lo_full[n_rows] = 0;
            w->lo_sliding[n_rows] = (int32_t)lo;
        }
        n++;
    }
    w->pass = (struct ns_pass){
        .n_rows = n_rows, .n_segments = n, .segments = w->segment,
        .position = w->position, .lo_full = w->lo_full,
        .lo_sliding = w->lo_sliding, .hi = w->hi,
        .page_full = w->pages, .page_sliding = w->pages, .page_stride = TABLE,
    };
}

static struct ns_rows
of_pass(const struct world *w, struct ns_rows rows)
{
    return first_rows(rows, w->pass.n_rows);
}

static void
run_qkv(struct world *w)
{
    struct ns_qkv args = {
        .qkv = of_pass(w, w->qkv), .q = of_pass(w, w->q),
        .k = of_pass(w, w->k_rows), .v = of_pass(w, w->v_rows),
        .q_norm = w->q_norm, .k_norm = w->k_norm, .frequency = w->frequency,
        .eps = 1e-6f, .n_heads = w->shape.n_heads, .has_v = w->shape.has_v,
        .kv = w->kv, .pages = w->pages,
    };

    w->lab->ops->qkv(w->lab->be, &w->pass, &args);
    lab_sync(w->lab);
}

static void
run_attention(struct world *w, const struct ns_pass *pass, struct ns_rows out)
{
    struct ns_attention args = {
        .out = first_rows(out, pass->n_rows),
        .q = first_rows(w->q, pass->n_rows),
        .k = first_rows(w->k_rows, pass->n_rows),
        .v = first_rows(w->v_rows, pass->n_rows),
        .n_heads = w->shape.n_heads, .kv = w->kv, .pages = w->pages,
        .lo = w->shape.window ? pass->lo_sliding : pass->lo_full,
        .k_norm = w->k_norm,
    };

    w->lab->ops->attention(w->lab->be, pass, &args);
    lab_sync(w->lab);
}

/* One head of q, k or v as MODEL.md section 4 has it. */
static void
assert_head(const struct world *w, const char *what, const float *got,
            const float *raw, const float *norm, bool turns, int32_t position)
{
    uint32_t d = w->shape.head_dim, half = d / 2;
    double sum = 0, x[512];

    for (uint32_t j = 0; j < d; j++)
        sum += (double)raw[j] * (double)raw[j];
    for (uint32_t j = 0; j < d; j++)
        x[j] = (double)raw[j] / sqrt(sum / d + (double)1e-6f) *
               (norm ? (double)norm[j] : 1);
    for (uint32_t j = 0; j < half && turns; j++) {
        float angle = (float)position * w->frequency[j];
        double a = x[j], b = x[j + half];

        x[j] = a * cos((double)angle) - b * sin((double)angle);
        x[j + half] = b * cos((double)angle) + a * sin((double)angle);
    }
    for (uint32_t j = 0; j < d; j++)
        assert_near(w->lab, what, (double)got[j], x[j],
                    1e-6 * (2 + fabs(x[j]) +
                            (turns ? fabs(x[(j + half) % d]) : 0)));
}

static void
check_qkv(struct world *w)
{
    uint32_t d = w->shape.head_dim;

    for (uint32_t i = 0; i < w->pass.n_rows; i++) {
        const float *raw = row(w->qkv, i);
        int32_t at = w->position[i];

        for (uint32_t h = 0; h < w->shape.n_heads; h++, raw += d)
            assert_head(w, "q", row(w->q, i) + h * d, raw, w->q_norm, true,
                        at);
        for (uint32_t h = 0; h < w->shape.n_kv_heads; h++) {
            const float *raw_k = raw + h * d;
            const float *raw_v = w->shape.has_v ? raw_k + kv_cols(w) : raw_k;

            assert_head(w, "k", row(w->k_rows, i) + h * d, raw_k, w->k_norm,
                        true, at);
            assert_head(w, "v", row(w->v_rows, i) + h * d, raw_v, NULL, false,
                        at);
        }
    }
    assert_gaps_whole(w->q);
    assert_gaps_whole(w->k_rows);
    assert_gaps_whole(w->v_rows);
}

/* What the pass's writing segments have left in the cache. */
static void
remember(struct world *w)
{
    for (uint32_t s = 0; s < w->pass.n_segments; s++) {
        const struct ns_segment *segment = &w->segment[s];

        if (segment->kind == NS_SEGMENT_CANVAS)
            continue;
        for (uint32_t j = 0; j < segment->n_rows; j++) {
            size_t at = (size_t)(segment->position + j) * kv_cols(w);

            memcpy(w->k[segment->slot] + at, row(w->k_rows, segment->row0 + j),
                   kv_cols(w) * sizeof(float));
            memcpy(w->v[segment->slot] + at, row(w->v_rows, segment->row0 + j),
                   kv_cols(w) * sizeof(float));
        }
    }
}

static void
check_attention(struct world *w)
{
    uint32_t d = w->shape.head_dim;
    uint32_t group = w->shape.n_heads / w->shape.n_kv_heads;

    for (uint32_t s = 0; s < w->pass.n_segments; s++) {
        const struct ns_segment *segment = &w->segment[s];
        uint32_t own = segment->kind == NS_SEGMENT_CANVAS ? segment->n_rows
                                                          : 0;

        for (uint32_t t = 0; t < segment->n_rows * w->shape.n_heads; t++) {
            uint32_t i = segment->row0 + t / w->shape.n_heads;
            uint32_t h = t % w->shape.n_heads;
            uint32_t lo = (uint32_t)(w->shape.window ? w->lo_sliding[i]
                                                     : w->lo_full[i]);
            uint32_t hi = (uint32_t)w->hi[i], n = hi - lo + own;
            const float *q = row(w->q, i) + h * d;
            double score[POSITIONS + 80], most = -INFINITY, total = 0;
            double sum[512] = { 0 };

            for (int round = 0; round < 2; round++)
                for (uint32_t key = 0; key < n; key++) {
                    size_t column = (size_t)(h / group) * d;
                    const float *k, *v;

                    if (key < hi - lo) {
                        size_t at = (size_t)(lo + key) * kv_cols(w) + column;

                        k = w->k[segment->slot] + at;
                        v = w->v[segment->slot] + at;
                    } else {
                        uint32_t r = segment->row0 + key - (hi - lo);

                        k = row(w->k_rows, r) + column;
                        v = row(w->v_rows, r) + column;
                    }
                    if (round == 0) {
                        score[key] = 0;
                        for (uint32_t j = 0; j < d; j++)
                            score[key] += (double)q[j] * (double)k[j];
                        most = fmax(most, score[key]);
                    } else {
                        double p = exp(score[key] - most);

                        total += p;
                        for (uint32_t j = 0; j < d; j++)
                            sum[j] += p * (double)v[j];
                    }
                }
            for (uint32_t j = 0; j < d; j++)
                assert_near(w->lab, "attention",
                            (double)row(w->out, i)[h * d + j],
                            n ? sum[j] / total : 0, 3e-5);
        }
    }
    assert_gaps_whole(w->out);
}

static void
grow(struct world *w)
{
    for (uint32_t s = 0; s < w->pass.n_segments; s++)
        if (w->segment[s].kind != NS_SEGMENT_CANVAS)
            w->length[w->segment[s].slot] += w->segment[s].n_rows;
}

static void
random_worlds(struct lab *lab)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        size_t mark = lab->n_pieces;
        struct world w;

        world_init(&w, lab, shapes[i], 21 + i);
        for (int pass = 0; pass < (shapes[i].head_dim < 256 ? 12 : 3);
             pass++) {
            plan_pass(&w, pass % 3 == 2);
            fill(of_pass(&w, w.qkv), &w.seed, 2);
            run_qkv(&w);
            if (pass % 3 == 2)
                check_qkv(&w);
            remember(&w);
            if (pass % 3 == 2) {
                run_attention(&w, &w.pass, w.out);
                check_attention(&w);
            }
            grow(&w);
        }
        world_fini(&w);
        lab_release_to(lab, mark);
    }
}

static void
every_row_sees_what_its_segment_says_and_nothing_else(void **state)
{
    (void)state;
    on_every_isa(random_worlds);
}

/* The pass of one segment's rows from..from + n - 1 alone, as rows 0.. */
static struct ns_pass
cut_pass(struct world *w, const struct world *whole, uint32_t s, uint32_t from,
         uint32_t n)
{
    const struct ns_segment *segment = &whole->segment[s];
    uint32_t row0 = segment->row0 + from;

    w->segment[0] = *segment;
    w->segment[0].row0 = 0;
    w->segment[0].n_rows = n;
    w->segment[0].position += from;
    for (uint32_t i = 0; i < n; i++) {
        w->position[i] = whole->position[row0 + i];
        w->lo_full[i] = whole->lo_full[row0 + i];
        w->lo_sliding[i] = whole->lo_sliding[row0 + i];
        w->hi[i] = whole->hi[row0 + i];
        copy_row(w->q, i, whole->q, row0 + i);
        copy_row(w->k_rows, i, whole->k_rows, row0 + i);
        copy_row(w->v_rows, i, whole->v_rows, row0 + i);
        copy_row(w->qkv, i, whole->qkv, row0 + i);
    }
    return (struct ns_pass){
        .n_rows = n, .n_segments = 1, .segments = w->segment,
        .position = w->position, .lo_full = w->lo_full,
        .lo_sliding = w->lo_sliding, .hi = w->hi,
        .page_full = w->pages, .page_sliding = w->pages, .page_stride = TABLE,
    };
}

static void
worlds_cut_apart(struct lab *lab)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        size_t mark = lab->n_pieces;
        struct world whole, part;

        world_init(&whole, lab, shapes[i], 41 + i);
        world_init(&part, lab, shapes[i], 1);
        part.kv = whole.kv; /* the same cache */
        memcpy(part.pages, whole.pages,
               sizeof(*part.pages) * SEQUENCES * TABLE);
        memcpy(part.q_norm, whole.q_norm,
               shapes[i].head_dim * sizeof(float));
        memcpy(part.k_norm, whole.k_norm,
               shapes[i].head_dim * sizeof(float));
        for (int pass = 0; pass < 5; pass++) {
            plan_pass(&whole, pass == 4);
            fill(of_pass(&whole, whole.qkv), &whole.seed, 2);
            run_qkv(&whole);
            grow(&whole);
        }
        run_attention(&whole, &whole.pass, whole.out);
        for (uint32_t s = 0; s < whole.pass.n_segments; s++) {
            const struct ns_segment *segment = &whole.segment[s];
            bool canvas = segment->kind == NS_SEGMENT_CANVAS;
            uint32_t step = shapes[i].head_dim < 256 ? 1 : 11;

            for (; step <= segment->n_rows; step = step * 3 + 8) {
                for (uint32_t from = 0; from < segment->n_rows;) {
                    uint32_t n = segment->n_rows - from;

                    /* a canvas cannot be cut, a causal run anywhere */
                    if (!canvas && n > step)
                        n = step;
                    part.pass = cut_pass(&part, &whole, s, from, n);
                    run_qkv(&part);
                    run_attention(&part, &part.pass, part.out);
                    for (uint32_t j = 0; j < n; j++) {
                        uint32_t r = segment->row0 + from + j;

                        assert_same_bits(lab, "q", row(part.q, j),
                                         row(whole.q, r), part.q.n_cols);
                        assert_same_bits(lab, "k", row(part.k_rows, j),
                                         row(whole.k_rows, r), kv_cols(&part));
                        assert_same_bits(lab, "v", row(part.v_rows, j),
                                         row(whole.v_rows, r), kv_cols(&part));
                        assert_same_bits(lab, "attention", row(part.out, j),
                                         row(whole.out, r), part.out.n_cols);
                    }
                    from += n;
                }
            }
        }
        world_fini(&whole);
        world_fini(&part);
        lab_release_to(lab, mark);
    }
}

static void
a_row_attends_to_the_same_bits_however_its_pass_is_cut(void **state)
{
    (void)state;
    on_every_isa(worlds_cut_apart);
}

/* Runs the same passes in two worlds and compares the last one's bits. */
static void
assert_worlds_agree(struct lab *one, struct lab *two, struct shape a,
                    struct shape b)
{
    struct world w[2];

    world_init(&w[0], one, a, 77);
    world_init(&w[1], two, b, 77);
    for (int pass = 0; pass < 9; pass++)
        for (int i = 0; i < 2; i++) {
            plan_pass(&w[i], pass % 4 == 0);
            fill(of_pass(&w[i], w[i].qkv), &w[i].seed, 2);
            run_qkv(&w[i]);
            run_attention(&w[i], &w[i].pass, w[i].out);
            grow(&w[i]);
            if (i == 0)
                continue;
            assert_int_equal(w[0].pass.n_rows, w[1].pass.n_rows);
            for (uint32_t r = 0; r < w[0].pass.n_rows; r++) {
                assert_same_bits(two, "q", row(w[0].q, r), row(w[1].q, r),
                                 w[0].q.n_cols);
                assert_same_bits(two, "attention", row(w[0].out, r),
                                 row(w[1].out, r), w[0].out.n_cols);
            }
        }
    world_fini(&w[0]);
    world_fini(&w[1]);
}

static void
compact_against_plain(struct lab *lab)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        struct shape plain = shapes[i];
        size_t mark = lab->n_pieces;

        if (!plain.compact)
            continue;
        plain.compact = false;
        assert_worlds_agree(lab, lab, plain, shapes[i]);
        lab_release_to(lab, mark);
    }
}

static void
compact_pages_give_the_bits_of_plain_ones(void **state)
{
    (void)state;
    on_every_isa(compact_against_plain);
}

static void
avx2_and_avx512_attend_to_the_same_bits(void **state)
{
    (void)state;
    if (!machine_has(ISA_AVX512))
        skip();
    for (size_t i = 0; i < N_SHAPES; i++) {
        struct lab avx2, avx512;

        assert_true(lab_open(&avx2, "avx2", 2));
        assert_true(lab_open(&avx512, "avx512", 3));
        assert_worlds_agree(&avx2, &avx512, shapes[i], shapes[i]);
        lab_close(&avx2);
        lab_close(&avx512);
    }
}

static void
the_number_of_threads_changes_no_bit(void **state)
{
    (void)state;
    for (enum isa isa = ISA_REF; isa < N_ISA; isa++)
        for (size_t i = 0; i < 4; i++) {
            struct lab lab[2];

            if (!lab_open_twice(lab, isa_name(isa)))
                continue;
            assert_worlds_agree(&lab[0], &lab[1], shapes[i], shapes[i]);
            lab_close(&lab[0]);
            lab_close(&lab[1]);
        }
}

static void
nothing_to_see(struct lab *lab)
{
    struct world w;

    world_init(&w, lab, shapes[0], 5);
    w.segment[0] = (struct ns_segment){ .n_rows = 3,
                                        .kind = NS_SEGMENT_PREFILL };
    w.pass = (struct ns_pass){
        .n_rows = 3, .n_segments = 1, .segments = w.segment,
        .position = w.position, .lo_full = w.lo_full,
        .lo_sliding = w.lo_sliding, .hi = w.hi,
        .page_full = w.pages, .page_sliding = w.pages, .page_stride = TABLE,
    };
    for (int i = 0; i < 3; i++) {
        w.position[i] = i;
        w.hi[i] = i == 1 ? 2 : 0; /* rows 0 and 2 see nothing */
    }
    fill(of_pass(&w, w.qkv), &w.seed, 2);
    run_qkv(&w);
    run_attention(&w, &w.pass, w.out);
    for (uint32_t j = 0; j < w.out.n_cols; j++) {
        assert_true(row(w.out, 0)[j] == 0);
        assert_true(row(w.out, 2)[j] == 0);
        assert_true(isfinite(row(w.out, 1)[j]));
    }
    world_fini(&w);
}

static void
a_row_that_sees_nothing_gets_zeros(void **state)
{
    (void)state;
    on_every_isa(nothing_to_see);
}

static void
spoilt_neighbour(struct lab *lab)
{
    struct world w, clean;

    world_init(&w, lab, shapes[0], 9);
    world_init(&clean, lab, shapes[0], 9);
    for (int pass = 0; pass < 3; pass++) {
        plan_pass(&w, pass == 2);
        plan_pass(&clean, pass == 2);
        fill(of_pass(&w, w.qkv), &w.seed, 2);
        fill(of_pass(&clean, clean.qkv), &clean.seed, 2);
        for (uint32_t s = 0; s < w.pass.n_segments; s++) /* sequence 2 */
            for (uint32_t j = 0;
                 w.segment[s].slot == 2 && j < w.segment[s].n_rows; j++)
                for (uint32_t c = 0; c < w.qkv.n_cols; c++)
                    row(w.qkv, w.segment[s].row0 + j)[c] =
                        pass % 2 ? NAN : INFINITY;
        run_qkv(&w);
        run_qkv(&clean);
        run_attention(&w, &w.pass, w.out);
        run_attention(&clean, &clean.pass, clean.out);
        for (uint32_t s = 0; s < w.pass.n_segments; s++)
            for (uint32_t j = 0; j < w.segment[s].n_rows; j++) {
                uint32_t r = w.segment[s].row0 + j;

                if (w.segment[s].slot != 2)
                    assert_same_bits(lab, "beside NaN", row(w.out, r),
                                     row(clean.out, r), w.out.n_cols);
                else
                    assert_false(isfinite(row(w.out, r)[0]));
            }
        grow(&w);
        grow(&clean);
    }
    world_fini(&w);
    world_fini(&clean);
}

static void
a_sequence_full_of_nan_spoils_no_other(void **state)
{
    (void)state;
    on_every_isa(spoilt_neighbour);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_sees_what_its_segment_says_and_nothing_else),
        cmocka_unit_test(
            a_row_attends_to_the_same_bits_however_its_pass_is_cut),
        cmocka_unit_test(compact_pages_give_the_bits_of_plain_ones),
        cmocka_unit_test(avx2_and_avx512_attend_to_the_same_bits),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(a_row_that_sees_nothing_gets_zeros),
        cmocka_unit_test(a_sequence_full_of_nan_spoils_no_other),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
