/* attention_body.h - attention over pages and own rows, a key tile at a time.
 *
 * Contract: attention_ref.c, to the tolerance in test_attention.c.
 * Plan:     a task is (segment, kv head, block of rows) with all query heads of
 *           that kv head: up to attention_pairs() of (row, head) share each
 *           tile. K is turned so that keys are lanes (scores are chains over
 *           d), V is read where it lies (sums are chains over keys). The
 *           softmax is online: a tile that raises a row's maximum scales what
 *           the row has. Queries and sums are kept side by side meanwhile: the
 *           engine's rows lie so far apart that they would share a few sets of
 *           the caches.
 * Bits:     tiles are NS_PAGE positions aligned to absolute positions, then
 *           NS_PAGE own rows counted from the canvas's start. What a row may
 *           not see has weight exactly 0 and moves neither maximum nor sums,
 *           so a row's bits do not depend on which rows share its block.
 * Measured: Zen 4, one thread, 256 rows by 511 keys of 128 and by 1,280 of 256
 *           (compact): 0.81 and 0.80 of the multiply-add peak.
 */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/kv.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/vec.h"

#include <math.h>

enum { LONG_CANVAS = 1024 }; /* rows, from which on it is a picture */

struct attention_job {
    const struct cpu *cpu;
    const struct ns_pass *pass;
    const struct ns_attention *args;
    uint32_t n_group;    /* query heads of a kv head */
    const uint32_t *first_task; /* [n_segments + 1] */
};

/* What a task works on. Pair head * n_rows + i is query head `head` of the kv
 * head and row row0 + i. */
struct block {
    const struct ns_segment *segment;
    uint32_t kv_head, row0, n_rows, n_pairs;
    struct attention_thread s;
};

/* K of one tile: position i at k + i * k_stride; V likewise. */
struct key_tile {
    const float *k, *v;
    size_t k_stride, v_stride;
    bool compact;
    uint32_t first, end; /* the tile's keys that any row of the block sees */
    const float *next_k, *next_v; /* of the next page, to fetch; or NULL */
};

/* 16 keys of n <= 16 dims into [n][PANEL], each dim times its own factor. */
VEC_INLINE void
turn_16(const float *from, size_t stride, uint32_t n, const float *times,
        float *to)
{
    vf r[LANES];

    for (uint32_t i = 0; i < LANES; i++)
        r[i] = vf_load_some(from + i * stride, n);
    vf_transpose(r);
    for (uint32_t i = 0; i < n; i++)
        vf_store(to + i * PANEL,
                 times ? vf_mul(r[i], vf_set(times[i])) : r[i]);
}

/* Where 16 dims of K from j on lie, of 16 keys that are all seen. On compact
 * pages: in the rotated slice, or in V, then times k_norm; NULL where the dims
 * are of both kinds. */
static const float *
sixteen_dims(const struct attention_job *job, const struct key_tile *tile,
             uint32_t key, uint32_t j, size_t *stride, const float **times)
{
    const struct ns_kv_layer *kv = &job->args->kv;
    uint32_t d = kv->head_dim, r = kv->n_rotated;
    const float *k = tile->k + key * tile->k_stride;

    *times = NULL;
    *stride = tile->k_stride;
    if (!tile->compact)
        return k + j;
    if (r % LANES || d % (2 * LANES))
        return NULL;
    if (j < r)
        return k + j;
    if (j >= d / 2 && j < d / 2 + r)
        return k + r + j - d / 2;
    *times = job->args->k_norm + j;
    *stride = tile->v_stride;
    return tile->v + key * tile->v_stride + j;
}

/* The same for any keys and dims, number by number. Keys outside first..end - 1
 * are zeros: their memory may hold anything. */
static void
any_dims(const struct attention_job *job, const struct key_tile *tile,
         uint32_t first_key, uint32_t j, float key[LANES][LANES])
{
    const struct ns_kv_layer *kv = &job->args->kv;
    uint32_t d = kv->head_dim, r = kv->n_rotated;

    memset(key, 0, LANES * sizeof(key[0]));
    for (uint32_t l = 0; l < LANES; l++) {
        uint32_t at = first_key + l;
        const float *k = tile->k + at * tile->k_stride;
        const float *v = tile->v + at * tile->v_stride;

        if (at < tile->first || at >= tile->end)
            continue;
        for (uint32_t dim = j; dim < d && dim < j + LANES; dim++) {
            if (!tile->compact || dim < r)
                key[l][dim - j] = k[dim];
            else if (dim >= d / 2 && dim < d / 2 + r)
                key[l][dim - j] = k[r + dim - d / 2];
            else
                key[l][dim - j] = v[dim] * job->args->k_norm[dim];
        }
    }
}

/* K [NS_PAGE][d] into two panels [d][32 keys]. */
static void
turn_keys(const struct attention_job *job, const struct key_tile *tile,
          float *panels)
{
    uint32_t d = job->args->kv.head_dim;
    float key[LANES][LANES];
    const float *times;

    for (uint32_t i = 0; i < NS_PAGE; i += LANES) {
        float *to = panels + i / PANEL * (size_t)d * PANEL + i % PANEL;
        bool whole = tile->first <= i && tile->end >= i + LANES;

        for (uint32_t j = 0; j < d; j += LANES, to += LANES * PANEL) {
            uint32_t n = lanes_left(d, j);
            const float *from = NULL;
            size_t stride;

            times = NULL;
            if (whole)
                from = sixteen_dims(job, tile, i, j, &stride, &times);
            if (!from) {
                any_dims(job, tile, i, j, key);
                from = key[0];
                stride = LANES;
            }
            turn_16(from, stride, n, times, to);
        }
    }
}

/* One row of scores to weights. first..end - 1 is what the row sees. */
static void
softmax_row(float *s, uint32_t first, uint32_t end, float *most, float *total,
            float *out, uint32_t d)
{
    vf score[NS_PAGE / LANES], high = vf_set(-INFINITY), sum;
    float highest;

    if (first >= end) {
        memset(s, 0, NS_PAGE * sizeof(*s));
        return;
    }
    for (uint32_t i = 0; i < NS_PAGE / LANES; i++) {
        score[i] = vf_load(s + i * LANES);
        if (first > i * LANES || end < (i + 1) * LANES)
            score[i] = vf_between(score[i], (int32_t)first - (int32_t)(i * LANES),
                                  (int32_t)end - (int32_t)(i * LANES));
        high = vf_max(score[i], high);
    }
    highest = vf_highest(high);
    if (*total == 0.0f) { /* the first tile that it sees */
        *most = highest;
    } else if (highest > *most) {
        float lanes[LANES];
        vf factor = vf_exp(vf_set(*most - highest));

        vf_store(lanes, factor);
        *total *= lanes[0];
        for (uint32_t i = 0; i < d; i += LANES) {
            uint32_t n = lanes_left(d, i);

            vf_store_some(out + i, vf_mul(vf_load_some(out + i, n), factor),
                          n);
        }
        *most = highest;
    }
    sum = vf_set(0.0f);
    for (uint32_t i = 0; i < NS_PAGE / LANES; i++) {
        score[i] = vf_exp(vf_sub(score[i], vf_set(*most)));
        vf_store(s + i * LANES, score[i]);
        sum = vf_add(sum, score[i]);
    }
    *total += vf_sum(sum);
}

/* How many rows are a task. Pictures have rows enough for all threads in
 * larger ones, in which a tile is turned for more of them. */
static uint32_t
block_rows(const struct attention_job *job, const struct ns_segment *segment)
{
    uint32_t rows = attention_pairs(job->args->kv.head_dim) / job->n_group;
    uint32_t most = NS_PAGE;

    if (segment->kind == NS_SEGMENT_CANVAS && segment->n_rows >= LONG_CANVAS)
        most = ATTENTION_ROWS;
    return rows < 1 ? 1 : rows > most ? most : rows;
}

/* d numbers, and zeros up to whole panels. */
VEC_INLINE void
pad_row(float *to, const float *from, uint32_t d)
{
    for (uint32_t j = 0; j < operand_ld(d); j += LANES)
        vf_store(to + j, j < d ? vf_load_some(from + j, lanes_left(d, j))
                               : vf_set(0.0f));
}

static void
attend_tile(const struct attention_job *job, struct block *b,
            const struct key_tile *tile, const struct span *span)
{
    uint32_t d = job->args->kv.head_dim;
    const float *v = tile->v + tile->first * tile->v_stride;
    size_t v_stride = tile->v_stride, ld = attention_ld(d);
    uint32_t n_keys = tile->end - tile->first;

    turn_keys(job, tile, b->s.k);
    if (d % PANEL) { /* a product reads b in whole panels */
        v_stride = operand_ld(d);
        for (uint32_t i = 0; i < n_keys; i++)
            pad_row(b->s.v + i * v_stride, v + i * tile->v_stride, d);
        v = b->s.v;
    }

    for (uint32_t half = 0; half < NS_PAGE / PANEL; half++)
        GEMM_F32(&(struct strip){
            .c = b->s.score + half * PANEL,
            .ldc = NS_PAGE,
            .a = b->s.q,
            .lda = ld,
            .n_rows = b->n_pairs,
            .b = b->s.k + half * (size_t)d * PANEL,
            .ldb = PANEL,
            .k = d,
            .n_cols = PANEL,
            .ahead = tile->next_k ? tile->next_k + half * (size_t)d * PANEL
                                  : NULL,
        });
    for (uint32_t pair = 0; pair < b->n_pairs; pair++) {
        const struct span *seen = &span[pair % b->n_rows];

        softmax_row(b->s.score + pair * NS_PAGE, seen->first, seen->end,
                    &b->s.most[pair], &b->s.total[pair], b->s.sum + pair * ld,
                    d);
    }
    for (uint32_t col = 0; col < d; col += PANEL)
        GEMM_F32(&(struct strip){
            .c = b->s.sum + col,
            .ldc = ld,
            .a = b->s.score + tile->first,
            .lda = NS_PAGE,
            .n_rows = b->n_pairs,
            .b = v + col,
            .ldb = v_stride,
            .k = n_keys,
            .n_cols = d - col > LANES ? PANEL : LANES, /* sums are padded */
            .more = true,
            .ahead = tile->next_v ? tile->next_v + (size_t)col * n_keys : NULL,
        });
}

/* The cached positions lo..hi - 1 of the block's rows. */
static void
attend_pages(const struct attention_job *job, struct block *b)
{
    const struct ns_attention *args = job->args;
    const struct ns_kv_layer *kv = &args->kv;
    uint32_t lowest = UINT32_MAX, highest = 0;
    struct span span[ATTENTION_ROWS];

    for (uint32_t i = 0; i < b->n_rows; i++) {
        uint32_t lo = (uint32_t)args->lo[b->row0 + i];
        uint32_t hi = (uint32_t)job->pass->hi[b->row0 + i];

        if (lo >= hi)
            continue;
        lowest = lo < lowest ? lo : lowest;
        highest = hi > highest ? hi : highest;
    }
    for (uint32_t at = lowest / NS_PAGE * NS_PAGE; at < highest;
         at += NS_PAGE) {
        unsigned char *page = kv_page(job->pass, kv, args->pages,
                                      b->segment->slot, at);
        struct key_tile tile = {
            .k = kv_k(kv, page, b->kv_head, 0),
            .v = kv_v(kv, page, b->kv_head, 0),
            .k_stride = kv_k_floats(kv),
            .v_stride = kv->head_dim,
            .compact = kv->compact,
            .first = NS_PAGE,
        };

        if (at + NS_PAGE < highest) {
            page = kv_page(job->pass, kv, args->pages, b->segment->slot,
                           at + NS_PAGE);
            if (!kv->compact)
                tile.next_k = kv_k(kv, page, b->kv_head, 0);
            tile.next_v = kv_v(kv, page, b->kv_head, 0);
        }
        for (uint32_t i = 0; i < b->n_rows; i++) {
            uint32_t lo = (uint32_t)args->lo[b->row0 + i];
            uint32_t hi = (uint32_t)job->pass->hi[b->row0 + i];

            span[i].first = lo <= at ? 0 : lo - at;
            span[i].end = hi <= at ? 0 : hi - at;
            if (span[i].end > NS_PAGE)
                span[i].end = NS_PAGE;
            if (span[i].first >= span[i].end)
                continue;
            if (span[i].first < tile.first)
                tile.first = span[i].first;
            if (span[i].end > tile.end)
                tile.end = span[i].end;
        }
        if (tile.first < tile.end)
            attend_tile(job, b, &tile, span);
    }
}

/* All rows of a canvas, by each of its rows. */
static void
attend_own(const struct attention_job *job, struct block *b)
{
    const struct ns_attention *args = job->args;
    size_t column = (size_t)b->kv_head * args->kv.head_dim;
    struct span span[ATTENTION_ROWS];

    for (uint32_t at = 0; at < b->segment->n_rows; at += NS_PAGE) {
        uint32_t row = b->segment->row0 + at, left = b->segment->n_rows - at;
        struct key_tile tile = {
            .k = args->k.data + row * args->k.stride + column,
            .v = args->v.data + row * args->v.stride + column,
            .k_stride = args->k.stride,
            .v_stride = args->v.stride,
            .end = left < NS_PAGE ? left : NS_PAGE,
        };

        for (uint32_t i = 0; i < b->n_rows; i++)
            span[i] = (struct span){ 0, tile.end };
        attend_tile(job, b, &tile, span);
    }
}

static void
attention_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct attention_job *job = ctx;
    const struct ns_attention *args = job->args;
    uint32_t segment = 0, d = args->kv.head_dim, rows, left, first_head;
    size_t ld = attention_ld(d);
    struct block b = { 0 };

    while (job->first_task[segment + 1] <= task)
        segment++;
    task -= job->first_task[segment];
    b.segment = &job->pass->segments[segment];
    b.kv_head = task % args->kv.n_kv_heads;
    rows = block_rows(job, b.segment);
    task = task / args->kv.n_kv_heads * rows;
    left = b.segment->n_rows - task;
    b.row0 = b.segment->row0 + task;
    b.n_rows = left < rows ? left : rows;
    b.n_pairs = b.n_rows * job->n_group;
    first_head = b.kv_head * job->n_group;
    attention_thread_carve(&b.s, scratch_of_thread(job->cpu, thread), d,
                           args->n_heads);

    memset(b.s.total, 0, b.n_pairs * sizeof(*b.s.total));
    memset(b.s.sum, 0, b.n_pairs * ld * sizeof(*b.s.sum));
    for (uint32_t pair = 0; pair < b.n_pairs; pair++)
        memcpy(b.s.q + pair * ld,
               args->q.data + (b.row0 + pair % b.n_rows) * args->q.stride +
                   (first_head + pair / b.n_rows) * (size_t)d,
               d * sizeof(float));

    attend_pages(job, &b);
    if (b.segment->kind == NS_SEGMENT_CANVAS)
        attend_own(job, &b);

    for (uint32_t pair = 0; pair < b.n_pairs; pair++) {
        const float *sum = b.s.sum + pair * ld;
        float *out = args->out.data +
                     (b.row0 + pair % b.n_rows) * args->out.stride +
                     (first_head + pair / b.n_rows) * (size_t)d;
        vf total = vf_set(b.s.total[pair]);

        if (b.s.total[pair] == 0.0f) { /* sees nothing */
            memset(out, 0, d * sizeof(*out));
            continue;
        }
        for (uint32_t j = 0; j < d; j += LANES) {
            uint32_t n = lanes_left(d, j);

            vf_store_some(out + j, vf_div(vf_load(sum + j), total), n);
        }
    }
}

void
ISA(attention)(struct ns_backend *be, const struct ns_pass *pass,
               const struct ns_attention *args)
{
    struct cpu *cpu = (struct cpu *)be;
    uint32_t *first_task = (uint32_t *)(void *)cpu->scratch;
    struct attention_job job = {
        .cpu = cpu, .pass = pass, .args = args,
        .n_group = args->n_heads / args->kv.n_kv_heads,
        .first_task = first_task,
    };

    first_task[0] = 0;
    for (uint32_t s = 0; s < pass->n_segments; s++) {
        uint32_t rows = block_rows(&job, &pass->segments[s]);

        first_task[s + 1] =
            first_task[s] + (pass->segments[s].n_rows + rows - 1) / rows *
                                args->kv.n_kv_heads;
    }
    pool_run(cpu->pool, first_task[pass->n_segments], attention_task, &job);
}
