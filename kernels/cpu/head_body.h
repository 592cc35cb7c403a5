/* head_body.h - logits, their statistics and the soft embedding in one pass.
 *
 * Contract: head_ref.c, to the tolerance in test_head.c.
 * Plan:     a task is (block of rows, part of the vocabulary). For each tile of
 *           HEAD_TILE tokens: logits by panels, then row by row soft-cap,
 *           maximum, sums and e^(l - m) in place of the logits, then those times
 *           the tile's rows of the table while both are in L2, onto the
 *           block's sums. m is the highest l of the row in this part so far;
 *           when a tile raises it, what was summed is scaled. A second round
 *           merges the parts of a row in rising order and draws its sample:
 *           the tile by the tiles' sums, the token by that tile's logits,
 *           formed again.
 * Measured: Zen 4, one thread, 256 rows by [32768, 512] of fp32: 0.87 of the
 *           multiply-add peak, statistics and soft embedding included (avx2
 *           0.80); bf16 products 1.48.
 */
#include <float.h>
#include <math.h>

#include "kernels/candidates.h"

struct head_job {
    struct cpu *cpu;
    const struct ns_head *args;
    struct head_scratch s;
    uint32_t row0, n_rows;  /* the group */
    uint32_t n_blocks, block_rows;
};

VEC_INLINE vf
soft_cap(vf z, float cap)
{
    if (!(cap > 0.0f))
        return z;
    return vf_mul(vf_set(cap), vf_tanh(vf_mul(z, vf_set(1.0f / cap))));
}

VEC_INLINE float
exp_one(float x)
{
    float lanes[LANES];

    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

/* Logits of one tile, before the soft-cap. Whole panels: padded outputs are
 * written too, as zeros. */
static void
tile_logits(const struct ns_weight *table, struct operand a, uint32_t n_rows,
            uint32_t tile, uint32_t n_cols, float *l)
{
    for (uint32_t col = 0; col < n_cols; col += PANEL)
        product(l + col, HEAD_TILE, a, 0, n_rows,
                packed_panel(table, 0, (tile * HEAD_TILE + col) / PANEL),
                table->dtype, table->k, PANEL);
}

/* Soft-caps one tile of a row that has a mask. False: nothing is left of it. */
static bool
tile_leave(float *l, uint32_t n_cols, float cap, const uint32_t *mask)
{
    bool some = false;

    for (uint32_t i = 0; i < n_cols; i += LANES)
        vf_store(l + i, soft_cap(vf_load(l + i), cap));
    for (uint32_t i = 0; i < n_cols; i++) {
        if (mask[i / 32] >> i % 32 & 1)
            some = true;
        else
            l[i] = -INFINITY;
    }
    return some;
}

/* From raw logits to e^(l - m), with the statistics on the way. Returns the
 * factor for what was summed in front of this tile. */
static float
tile_row(float *l, uint32_t n_cols, float cap, float inv_temperature,
         uint32_t first_token, struct head_part *part, struct head_tile *tile,
         struct ns_candidate *top)
{
    vi lane = vi_load((const int32_t[]){ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                         12, 13, 14, 15 });
    vf best = vf_set(-INFINITY), sum = vf_set(0.0f), weighted = sum, m;
    vi best_at = vi_set(0);
    float lanes[LANES], highest = -INFINITY, factor = 1.0f, tile_sum;
    int32_t at[LANES], argmax = INT32_MAX;

    for (uint32_t i = 0; i < n_cols; i += LANES) {
        vf c = soft_cap(vf_load(l + i), cap);
        vm better;

        if (n_cols - i < LANES)
            c = vf_pick(vi_gt(vi_set((int32_t)(n_cols - i)), lane),
                        vf_set(-INFINITY), c);
        better = vf_lt(best, c);
        best = vf_pick(better, best, c);
        best_at = vi_pick(better, best_at, vi_add(lane, vi_set((int32_t)i)));
        vf_store(l + i, c);
    }
    vf_store(lanes, best);
    vi_store(at, best_at);
    for (int i = 0; i < LANES; i++) {
        if (lanes[i] > highest || (lanes[i] == highest && at[i] < argmax)) {
            highest = lanes[i];
            argmax = at[i];
        }
    }
    if (highest > part->best) {
        part->best = highest;
        part->argmax = (int32_t)first_token + argmax;
    }
    if (top && (part->n_top < NS_HEAD_TOP || highest > top[NS_HEAD_TOP - 1].z))
        for (uint32_t i = 0; i < n_cols; i++)
            part->n_top = candidate_add(top, part->n_top,
                                        (int32_t)(first_token + i), l[i]);

    highest *= inv_temperature;
    if (part->sum == 0.0) {
        part->highest = highest;
        factor = 0.0f;
    } else if (highest > part->highest) {
        float down = part->highest - highest;

        factor = exp_one(down);
        part->weighted = (part->weighted + (double)down * part->sum) *
                         (double)factor;
        part->sum *= (double)factor;
        part->highest = highest;
    }
    m = vf_set(part->highest);

    for (uint32_t i = 0; i < n_cols; i += LANES) {
        vf t = vf_sub(vf_mul(vf_load(l + i), vf_set(inv_temperature)), m);
        vf e;

        t = vf_max(vf_set(-1e4f), t); /* -inf * 0 would be NaN */
        e = vf_exp(t);
        sum = vf_add(sum, e);
        weighted = vf_fma(t, e, weighted);
        vf_store(l + i, e);
    }
    tile_sum = vf_sum(sum);
    part->sum += (double)tile_sum;
    part->weighted += (double)vf_sum(weighted);
    *tile = (struct head_tile){ tile_sum, part->highest };
    return factor;
}

/* n_cols <= 32 columns of a tile's rows of the table as a panel [k][32]. The
 * rows lie so far apart that no hardware foresees them: what the next panel
 * will take is fetched on the way. */
static void
panel_of_rows(const struct ns_weight *table, uint32_t token, uint32_t n_tokens,
              uint32_t col, uint32_t n_cols, float *panel)
{
    for (uint32_t i = 0; i < n_tokens; i++) {
        float *to = panel + i * PANEL;

        if (table->dtype == NS_F32) {
            const float *from =
                (const float *)packed_table_row(table, token + i) + col;

            _mm_prefetch(from + PANEL, _MM_HINT_T1);
            _mm_prefetch(from + PANEL + LANES, _MM_HINT_T1);
            if (n_cols == PANEL) {
                vf_store(to, vf_load(from));
                vf_store(to + LANES, vf_load(from + LANES));
            } else {
                memset(to, 0, PANEL * sizeof(float));
                memcpy(to, from, n_cols * sizeof(float));
            }
        } else {
            const uint16_t *from =
                (const uint16_t *)packed_table_row(table, token + i) + col;
            uint16_t some[PANEL];

            _mm_prefetch(from + PANEL, _MM_HINT_T1);
            if (n_cols < PANEL) {
                memset(some, 0, sizeof(some));
                memcpy(some, from, n_cols * sizeof(*some));
                from = some;
            }
            vf_store(to, vf_widen(from));
            vf_store(to + LANES, vf_widen(from + LANES));
        }
    }
}

#ifdef GEMM_BF16
/* The same in pairs of tokens. */
static void
pairs_of_rows(const struct ns_weight *table, uint32_t token, uint32_t n_tokens,
              uint32_t col, uint32_t n_cols, uint32_t *panel)
{
    __mmask32 some = n_cols == PANEL ? ~0u : (1u << n_cols) - 1;

    for (uint32_t i = 0; i < n_tokens; i += 2) {
        __m512i low, high = _mm512_setzero_si512();

        _mm_prefetch((const uint16_t *)packed_table_row(table, token + i) +
                         col + PANEL,
                     _MM_HINT_T1);
        low = _mm512_maskz_loadu_epi16(
            some, (const uint16_t *)packed_table_row(table, token + i) + col);
        if (i + 1 < n_tokens)
            high = _mm512_maskz_loadu_epi16(
                some,
                (const uint16_t *)packed_table_row(table, token + i + 1) + col);
        for (int half = 0; half < 2; half++) {
            __m256i a = half ? _mm512_extracti32x8_epi32(low, 1)
                             : _mm512_castsi512_si256(low);
            __m256i b = half ? _mm512_extracti32x8_epi32(high, 1)
                             : _mm512_castsi512_si256(high);

            vi_store(panel + (i / 2) * PANEL + half * LANES,
                     vi_or(_mm512_cvtepu16_epi32(a),
                           vi_shl(_mm512_cvtepu16_epi32(b), 16)));
        }
    }
}
#endif

/* soft (+)= p . the tile's rows of the table. */
static void
tile_soft(const struct head_job *job, float *soft, const float *p,
          uint32_t n_rows, uint32_t token, uint32_t n_tokens, bool more,
          float *panel, void *rounded)
{
    const struct ns_weight *table = job->args->table;
    struct operand a = operand_make(job->cpu, table, p, HEAD_TILE, NULL,
                                    n_rows, n_tokens, rounded);

    for (uint32_t col = 0; col < table->k; col += PANEL) {
        struct strip strip = {
            .c = soft + col,
            .ldc = table->k,
            .a = a.data,
            .lda = a.ld,
            .n_rows = n_rows,
            .b = panel,
            .ldb = PANEL,
            .k = n_tokens,
            .n_cols = table->k - col < PANEL ? table->k - col : PANEL,
            .more = more,
        };

#ifdef GEMM_BF16
        if (a.bf16) {
            pairs_of_rows(table, token, n_tokens, col, strip.n_cols,
                          (uint32_t *)(void *)panel);
            GEMM_BF16(&strip);
            continue;
        }
#endif
        panel_of_rows(table, token, n_tokens, col, strip.n_cols, panel);
        GEMM_F32(&strip);
    }
}

static void
scale_row(float *x, uint32_t n, float factor)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = lanes_left(n, i);

        vf_store_some(x + i, vf_mul(vf_load_some(x + i, lanes),
                                    vf_set(factor)), lanes);
    }
}

static void
head_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct head_job *job = ctx;
    const struct ns_head *args = job->args;
    const struct ns_weight *table = args->table;
    const struct head_scratch *s = &job->s;
    uint32_t part = task / job->n_blocks, hidden = table->k;
    uint32_t row0 = task % job->n_blocks * job->block_rows; /* of the group */
    uint32_t n_rows = job->n_rows - row0, first = job->row0 + row0, n_soft;
    float *soft = s->soft + ((size_t)part * s->n_rows + row0) * hidden;
    uint32_t tile = part * s->part_tiles, end = tile + s->part_tiles;
    struct head_thread scratch;
    struct operand a;

    head_thread_carve(&scratch, scratch_of_thread(job->cpu, thread), table->n,
                      hidden);
    if (n_rows > job->block_rows)
        n_rows = job->block_rows;
    n_soft = args->n_soft > first ? args->n_soft - first : 0;
    if (n_soft > n_rows)
        n_soft = n_rows;
    a = operand_make(job->cpu, table,
                     args->h.data + first * args->h.stride, args->h.stride,
                     NULL, n_rows, hidden, scratch.operand);
    for (uint32_t i = 0; i < n_rows; i++)
        s->parts[(row0 + i) * s->n_parts + part] = (struct head_part){
            .highest = -INFINITY, .best = -INFINITY,
            .argmax = (int32_t)(tile * HEAD_TILE),
        };

    for (uint32_t t = tile; t < end && t < s->n_tiles; t++) {
        uint32_t token = t * HEAD_TILE, n_cols = table->n - token;

        if (n_cols > HEAD_TILE)
            n_cols = HEAD_TILE;
        tile_logits(table, a, n_rows, t, n_cols, scratch.l);
        for (uint32_t i = 0; i < n_rows; i++) {
            const uint32_t *mask = args->mask ? args->mask[first + i] : NULL;
            size_t at = (row0 + i) * s->n_parts + part;
            struct head_tile *sums =
                &s->tiles[(row0 + i) * (size_t)s->n_tiles + t];
            float *l = scratch.l + i * HEAD_TILE, factor;

            if (mask && !tile_leave(l, n_cols, args->softcap,
                                    mask + token / 32)) {
                *sums = (struct head_tile){ 0.0f, -INFINITY };
                continue;
            }
            factor = tile_row(l, n_cols, mask ? 0.0f : args->softcap,
                              args->inv_temperature[first + i], token,
                              &s->parts[at], sums,
                              args->top && args->top[first + i]
                                  ? s->top + at * NS_HEAD_TOP
                                  : NULL);
            if (i < n_soft && t > tile && factor != 1.0f)
                scale_row(soft + i * (size_t)hidden, hidden, factor);
        }
        if (n_soft > 0)
            tile_soft(job, soft, scratch.l, n_soft, token, n_cols, t > tile,
                      scratch.panel, scratch.rounded);
    }
}

/* l of one tile of one row, as the first round saw it. */
static uint32_t
one_row(const struct head_job *job, uint32_t row, uint32_t tile,
        struct head_thread *scratch, float *l)
{
    const struct ns_head *args = job->args;
    const struct ns_weight *table = args->table;
    uint32_t n_cols = table->n - tile * HEAD_TILE;
    float cap = args->softcap;
    struct operand a = operand_make(
        job->cpu, table, args->h.data + row * args->h.stride,
        args->h.stride, NULL, 1, table->k, scratch->operand);

    if (n_cols > HEAD_TILE)
        n_cols = HEAD_TILE;
    tile_logits(table, a, 1, tile, n_cols, l);
    if (args->mask && args->mask[row]) {
        tile_leave(l, n_cols, cap, args->mask[row] + tile * HEAD_TILE / 32);
        cap = 0.0f;
    }
    for (uint32_t i = 0; i < n_cols; i += LANES)
        vf_store(l + i, vf_mul(soft_cap(vf_load(l + i), cap),
                               vf_set(args->inv_temperature[row])));
    return n_cols;
}

/* The token at `target` of the sum of e^(l - highest) over all tokens. */
static int32_t
draw(const struct head_job *job, uint32_t row, double highest, double target,
     int32_t otherwise, struct head_thread *scratch)
{
    const struct head_scratch *s = &job->s;
    const struct head_tile *tiles =
        s->tiles + (size_t)(row - job->row0) * s->n_tiles;
    double before = 0.0, factor = 0.0;
    float reference = NAN;
    uint32_t tile = 0, last = 0, n_cols;
    int32_t token = otherwise;

    for (;; tile++) {
        double sum;

        if (tile == s->n_tiles) { /* rounding: the last tile with a sum */
            tile = last;
            target = before;
            before = 0.0;
            for (uint32_t t = 0; t < last; t++)
                before += (double)tiles[t].sum *
                          exp((double)tiles[t].reference - highest);
            break;
        }
        if (!(tiles[tile].reference == reference)) {
            reference = tiles[tile].reference;
            factor = exp((double)reference - highest);
        }
        sum = (double)tiles[tile].sum * factor;
        if (before + sum > target)
            break;
        before += sum;
        if (sum > 0.0)
            last = tile;
    }

    n_cols = one_row(job, row, tile, scratch, scratch->l);
    for (uint32_t i = 0; i < n_cols; i++) {
        double e = exp((double)scratch->l[i] - highest);

        if (e > 0.0)
            token = (int32_t)(tile * HEAD_TILE + i);
        before += e;
        if (before > target)
            break;
    }
    return token;
}

/* Floats in their order as integers, and back. */
static int32_t
rank_of(float x)
{
    int32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits ^ (bits >> 31 & INT32_MAX);
}

static float
of_rank(int32_t rank)
{
    float x;

    rank ^= rank >> 31 & INT32_MAX;
    memcpy(&x, &rank, sizeof(x));
    return x;
}

/* The mass of the tokens with l >= least. */
static double
mass_from(const float *l, const float *e, uint32_t n_whole, float least)
{
    double mass = 0.0;

    for (uint32_t tile = 0; tile < n_whole; tile += HEAD_TILE) {
        vf sum = vf_set(0.0f), bound = vf_set(least);

        for (uint32_t i = tile; i < tile + HEAD_TILE; i += LANES)
            sum = vf_add(sum, vf_pick(vf_lt(vf_load(l + i), bound),
                                      vf_load(e + i), vf_set(0.0f)));
        mass += (double)vf_sum(sum);
    }
    return mass;
}

/* A draw from the smallest set of the likeliest tokens with a mass of at least
 * top_p, never empty, the lowest index first among equals. The set's least l
 * is found by halving: no sort over the vocabulary. */
static int32_t
draw_nucleus(const struct head_job *job, uint32_t row, double highest,
             int32_t otherwise, struct head_thread *scratch)
{
    const struct ns_head *args = job->args;
    uint32_t n = args->table->n, n_whole = job->s.n_tiles * HEAD_TILE;
    float *l = scratch->row, *e = scratch->row_e, least;
    int64_t low = rank_of(-FLT_MAX), high = rank_of((float)highest);
    double wanted, mass = 0.0, target, before = 0.0;
    uint32_t n_equal = 0;
    int32_t token = otherwise;

    for (uint32_t t = 0; t < job->s.n_tiles; t++)
        one_row(job, row, t, scratch, l + t * HEAD_TILE);
    for (uint32_t i = n; i < n_whole; i++)
        l[i] = -INFINITY;
    for (uint32_t i = 0; i < n_whole; i += LANES)
        vf_store(e + i, vf_exp(vf_sub(vf_load(l + i),
                                      vf_set((float)highest))));

    wanted = (double)args->top_p[row] * mass_from(l, e, n_whole, -INFINITY);
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;

        if (mass_from(l, e, n_whole, of_rank((int32_t)middle)) >= wanted)
            low = middle;
        else
            high = middle - 1;
    }
    least = of_rank((int32_t)low);
    /* All above `least`, and so many of its equals as it takes. */
    for (uint32_t i = 0; i < n; i++)
        if (l[i] > least)
            mass += (double)e[i];
    for (uint32_t i = 0; i < n; i++) {
        if (l[i] < least)
            e[i] = 0.0f;
        if (l[i] != least)
            continue;
        if (mass >= wanted && (mass > 0.0 || n_equal > 0))
            e[i] = 0.0f;
        mass += (double)e[i];
        n_equal++;
    }

    target = args->uniform[row] * mass;
    for (uint32_t i = 0; i < n; i++) {
        if (e[i] > 0.0f)
            token = (int32_t)i;
        before += (double)e[i];
        if (before > target)
            break;
    }
    return token;
}

/* One list of a row's parts. */
static void
merge_top(const struct head_scratch *s, uint32_t task,
          struct ns_candidate out[NS_HEAD_TOP])
{
    const struct head_part *parts = s->parts + task * s->n_parts;
    struct ns_candidate list[NS_HEAD_TOP];
    uint32_t n = 0;

    for (uint32_t p = 0; p < s->n_parts; p++) {
        const struct ns_candidate *top =
            s->top + ((size_t)task * s->n_parts + p) * NS_HEAD_TOP;

        for (uint32_t i = 0; i < parts[p].n_top; i++)
            n = candidate_add(list, n, top[i].id, top[i].z);
    }
    candidates_end(out, list, n);
}

static void
head_merge(void *ctx, uint32_t task, uint32_t thread)
{
    const struct head_job *job = ctx;
    const struct ns_head *args = job->args;
    const struct head_scratch *s = &job->s;
    const struct head_part *parts = s->parts + task * s->n_parts;
    uint32_t row = job->row0 + task, hidden = args->table->k;
    double highest = -INFINITY, sum = 0.0, weighted = 0.0;
    float best = -INFINITY, share[HEAD_PARTS];
    int32_t argmax = 0;
    struct head_thread scratch;

    head_thread_carve(&scratch, scratch_of_thread(job->cpu, thread),
                      args->table->n, hidden);
    for (uint32_t p = 0; p < s->n_parts; p++) {
        if ((double)parts[p].highest > highest)
            highest = (double)parts[p].highest;
        if (parts[p].best > best) {
            best = parts[p].best;
            argmax = parts[p].argmax;
        }
    }
    for (uint32_t p = 0; p < s->n_parts; p++) {
        double down = (double)parts[p].highest - highest, factor = exp(down);

        if (parts[p].sum == 0.0) /* a mask left nothing of it */
            continue;
        sum += parts[p].sum * factor;
        weighted += (parts[p].weighted + down * parts[p].sum) * factor;
    }
    args->argmax[row] = argmax;
    args->entropy[row] = (float)(log(sum) - weighted / sum);
    if (args->logsumexp)
        args->logsumexp[row] = (float)(highest + log(sum));

    if (args->top && args->top[row])
        merge_top(s, task, args->top[row]);
    if (isnan(args->entropy[row])) { /* its job fails, and no other */
        args->argmax[row] = 0;
        args->sampled[row] = 0;
        if (row < args->n_soft)
            memset(args->soft.data + row * args->soft.stride, 0,
                   hidden * sizeof(float));
        return;
    }
    args->sampled[row] = argmax;
    if (args->uniform[row] >= 0.0) {
        float top_p = args->top_p ? args->top_p[row] : 1.0f;

        args->sampled[row] =
            top_p < 1.0f ? draw_nucleus(job, row, highest, argmax, &scratch)
                         : draw(job, row, highest, args->uniform[row] * sum,
                                argmax, &scratch);
    }

    if (row >= args->n_soft)
        return;
    for (uint32_t p = 0; p < s->n_parts; p++)
        share[p] = (float)(exp((double)parts[p].highest - highest) / sum);
    for (uint32_t col = 0; col < hidden; col += LANES) {
        uint32_t lanes = lanes_left(hidden, col);
        vf y = vf_set(0.0f);

        for (uint32_t p = 0; p < s->n_parts; p++)
            y = vf_fma(vf_set(share[p]),
                       vf_load_some(s->soft +
                                        ((size_t)p * s->n_rows + task) *
                                            hidden + col,
                                    lanes),
                       y);
        y = vf_mul(y, vf_set(args->soft_scale));
        if (args->table->dtype == NS_BF16)
            y = vf_to_bf16(y);
        vf_store_some(args->soft.data + row * args->soft.stride + col, y,
                      lanes);
    }
}

void
ISA(head)(struct ns_backend *be, const struct ns_head *args)
{
    struct cpu *cpu = (struct cpu *)be;
    struct head_job job = { .cpu = cpu, .args = args };
    uint32_t n = args->h.n_rows;

    head_scratch_carve(&job.s, cpu->scratch, n, args->table->n,
                       args->table->k);
    for (job.row0 = 0; job.row0 < n; job.row0 += HEAD_GROUP) {
        job.n_rows = n - job.row0 < HEAD_GROUP ? n - job.row0 : HEAD_GROUP;
        job.n_blocks = (job.n_rows + HEAD_ROWS - 1) / HEAD_ROWS;
        job.block_rows = (job.n_rows + job.n_blocks - 1) / job.n_blocks;
        job.n_blocks = (job.n_rows + job.block_rows - 1) / job.block_rows;
        pool_run(cpu->pool, job.n_blocks * job.s.n_parts, head_task, &job);
        pool_run(cpu->pool, job.n_rows, head_merge, &job);
    }
}
