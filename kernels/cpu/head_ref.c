/* head_ref.c - the vocabulary: statistics, the draw, the soft embedding.
 *
 * One row at a time holds its logits whole, in the thread's scratch. The draw
 * is the inverse CDF as all instruction sets do it: tiles of HEAD_TILE tokens,
 * each with its own maximum and sum, tile sums added in order in double, then
 * the tokens of the tile that u falls into. A row with a NaN among its logits
 * says so in its entropy and is otherwise token 0: its job fails, no other.
 */
#include <math.h>
#include <stdlib.h>

#include "kernels/candidates.h"
#include "kernels/cpu/ref.h"

enum { HEAD_TILE = 256 };

struct head_job {
    struct cpu *cpu;
    const struct ns_head *args;
};

struct logits_job {
    struct cpu *cpu;
    struct ns_rows h;
    const struct ns_weight *table;
    float softcap;
    float *out;
};

/* What a row keeps, carved from the thread's scratch. */
struct row {
    uint32_t n;       /* vocabulary */
    double *soft;     /* [H] */
    double *p;        /* [n] e^(l - max), unnormalised */
    float *l;         /* [n] */
    uint32_t *order;  /* [n] for the nucleus */
    uint8_t *nucleus; /* [n] */
};

/* z of one row: softcap * tanh(h . e / softcap), fp32 */
static void
row_logits(float *z, const float *h, const struct ns_weight *table,
           float softcap)
{
    double sum[PANEL];

    for (uint32_t n = 0; n < table->n; n += PANEL) {
        panel_dot(sum, h, packed_panel(table, 0, n / PANEL), table->dtype,
                  table->k);
        for (uint32_t c = 0; c < PANEL && n + c < table->n; c++) {
            double raw = (double)(float)sum[c], cap = (double)softcap;

            z[n + c] = (float)(softcap > 0 ? cap * tanh(raw / cap) : raw);
        }
    }
}

/* p of one token; tokens that `keep` (may be NULL) leaves out have none. */
static double
share(const struct row *row, const uint8_t *keep, uint32_t v)
{
    return keep && !keep[v] ? 0 : row->p[v];
}

static double
tile_sum(const struct row *row, const uint8_t *keep, uint32_t tile)
{
    double sum = 0;

    for (uint32_t v = tile; v < tile + HEAD_TILE && v < row->n; v++)
        sum += share(row, keep, v);
    return sum;
}

/* The token that u in [0, 1) falls on; if rounding leaves u behind all of
 * them, the last that can be drawn. */
static int32_t
draw(const struct row *row, const uint8_t *keep, double u)
{
    double total = 0, sum = 0, before = 0, rest;
    uint32_t start = 0;
    int32_t token = 0;

    for (uint32_t tile = 0; tile < row->n; tile += HEAD_TILE)
        total += tile_sum(row, keep, tile);
    for (uint32_t tile = 0; tile < row->n; tile += HEAD_TILE) {
        double part = tile_sum(row, keep, tile);

        if (part > 0) {
            start = tile;
            before = sum;
            if (sum + part > u * total)
                break;
        }
        sum += part;
    }
    rest = u * total - before;
    for (uint32_t v = start; v < start + HEAD_TILE && v < row->n; v++) {
        double p = share(row, keep, v);

        if (p > 0)
            token = (int32_t)v;
        rest -= p;
        if (rest < 0)
            break;
    }
    return token;
}

static int
by_falling_logit(const void *a, const void *b, void *ctx)
{
    const float *l = ctx;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    if (l[x] != l[y])
        return l[x] > l[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

/* The smallest set of the likeliest tokens with a mass of at least top_p,
 * never empty; the lowest index first among equals. */
static void
find_nucleus(struct row *row, double total, float top_p)
{
    double mass = 0;

    for (uint32_t v = 0; v < row->n; v++)
        row->order[v] = v;
    qsort_r(row->order, row->n, sizeof(*row->order), by_falling_logit, row->l);
    memset(row->nucleus, 0, row->n);
    for (uint32_t i = 0; i < row->n; i++) {
        row->nucleus[row->order[i]] = 1;
        mass += row->p[row->order[i]];
        if (mass >= (double)top_p * total)
            break;
    }
}

static void
soft_row(const struct ns_head *args, const struct row *row, double total,
         float *out)
{
    const struct ns_weight *table = args->table;

    memset(row->soft, 0, table->k * sizeof(*row->soft));
    for (uint32_t v = 0; v < table->n; v++) {
        const void *e = packed_table_row(table, v);
        const uint16_t *as_bf16 = e;
        const float *as_float = e;
        double p = row->p[v] / total;

        if (!(p > 0))
            continue;
        for (uint32_t j = 0; j < table->k; j++)
            row->soft[j] += p * (double)(table->dtype == NS_F32
                                             ? as_float[j]
                                             : bf16_to_float(as_bf16[j]));
    }
    for (uint32_t j = 0; j < table->k; j++) {
        out[j] = (float)(row->soft[j] * (double)args->soft_scale);
        if (table->dtype == NS_BF16)
            out[j] = round_to_bf16(out[j]);
    }
}

static struct row
carve(const struct ns_weight *table, unsigned char *scratch)
{
    struct row row = { .n = table->n };

    row.soft = (double *)(void *)scratch;
    row.p = row.soft + table->k;
    row.l = (float *)(void *)(row.p + row.n);
    row.order = (uint32_t *)(void *)(row.l + row.n);
    row.nucleus = (uint8_t *)(row.order + row.n);
    return row;
}

static void
no_answer(const struct ns_head *args, uint32_t i)
{
    args->argmax[i] = 0;
    args->sampled[i] = 0;
    args->entropy[i] = NAN;
    if (args->logsumexp)
        args->logsumexp[i] = NAN;
    if (args->top && args->top[i])
        candidates_end(args->top[i], args->top[i], 0);
    if (i < args->n_soft)
        memset(row_of(args->soft, i), 0, args->soft.n_cols * sizeof(float));
}

static void
leave(struct row *row, const uint32_t *mask)
{
    for (uint32_t v = 0; v < row->n; v++)
        if (!(mask[v / 32] >> v % 32 & 1))
            row->l[v] = -INFINITY;
}

static void
find_top(const struct row *row, struct ns_candidate *top)
{
    struct ns_candidate list[NS_HEAD_TOP];
    uint32_t n = 0;

    for (uint32_t v = 0; v < row->n; v++)
        n = candidate_add(list, n, (int32_t)v, row->l[v]);
    candidates_end(top, list, n);
}

static void
head_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct head_job *job = ctx;
    const struct ns_head *args = job->args;
    struct row row = carve(args->table,
                           job->cpu->thread_scratch +
                               thread * job->cpu->thread_scratch_bytes);
    double most, total = 0, weighted = 0;
    uint32_t best = 0;

    row_logits(row.l, row_of(args->h, i), args->table, args->softcap);
    if (args->mask && args->mask[i])
        leave(&row, args->mask[i]);
    for (uint32_t v = 0; v < row.n; v++) {
        if (row.l[v] > row.l[best])
            best = v;
        if (isnan(row.l[v])) {
            no_answer(args, i);
            return;
        }
    }
    if (row.l[best] == -INFINITY) { /* nothing is left */
        no_answer(args, i);
        return;
    }
    if (args->top && args->top[i])
        find_top(&row, args->top[i]);
    args->argmax[i] = (int32_t)best;

    for (uint32_t v = 0; v < row.n; v++)
        row.l[v] *= args->inv_temperature[i];
    most = (double)row.l[best];
    for (uint32_t v = 0; v < row.n; v++) {
        double below = (double)row.l[v] - most;

        row.p[v] = exp(below);
        total += row.p[v];
        if (row.p[v] > 0) /* 0 log 0 is 0 */
            weighted += row.p[v] * below;
    }
    args->entropy[i] = (float)(log(total) - weighted / total);
    if (args->logsumexp)
        args->logsumexp[i] = (float)(most + log(total));

    if (args->uniform[i] < 0) {
        args->sampled[i] = (int32_t)best;
    } else if (args->top_p && args->top_p[i] < 1) {
        find_nucleus(&row, total, args->top_p[i]);
        args->sampled[i] = draw(&row, row.nucleus, args->uniform[i]);
    } else {
        args->sampled[i] = draw(&row, NULL, args->uniform[i]);
    }
    if (i < args->n_soft)
        soft_row(args, &row, total, row_of(args->soft, i));
}

void
head_ref(struct ns_backend *be, const struct ns_head *args)
{
    struct head_job job = { (struct cpu *)be, args };

    pool_run(job.cpu->pool, args->h.n_rows, head_row, &job);
}

static void
logits_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct logits_job *job = ctx;
    const struct cpu *cpu = job->cpu;
    const float *h = row_of(job->h, i);

    /* No instruction set has a faster one of this op, and its rows must be
     * those that the head of the same arithmetic sees. */
    if (cpu->bf16_products) {
        float *rounded = (float *)(void *)(cpu->thread_scratch +
                                           thread * cpu->thread_scratch_bytes);

        for (uint32_t k = 0; k < job->table->k; k++)
            rounded[k] = round_to_bf16(h[k]);
        h = rounded;
    }
    row_logits(job->out + (size_t)i * job->table->n, h, job->table,
               job->softcap);
}

void
logits_ref(struct ns_backend *be, struct ns_rows h,
           const struct ns_weight *table, float softcap, float *out)
{
    struct logits_job job = { (struct cpu *)be, h, table, softcap, out };

    pool_run(job.cpu->pool, h.n_rows, logits_row, &job);
}
