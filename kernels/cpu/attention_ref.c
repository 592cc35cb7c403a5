/* attention_ref.c - softmax attention over prefix pages and own rows.
 *
 * A row sees the cached positions lo <= k < hi through its page table, rising,
 * and then, in a canvas, all rows of its own segment. Scores are taken twice,
 * once for their maximum and once for the sums, so that nothing has to be
 * kept. A row that sees nothing gives zeros.
 */
#include <math.h>

#include "kernels/cpu/kv.h"
#include "kernels/cpu/ref.h"

struct attention_job {
    struct cpu *cpu;
    const struct ns_pass *pass;
    const struct ns_attention *args;
};

/* q . k over a whole K */
static double
score_plain(const float *q, const float *k, uint32_t d)
{
    double sum = 0;

    for (uint32_t j = 0; j < d; j++)
        sum += (double)q[j] * (double)k[j];
    return sum;
}

/* The same where only the rotated slice of K is kept: elsewhere it is
 * v * k_norm, rounded as qkv rounds it. */
static double
score_compact(const float *q, const float *slice, const float *v,
              const float *k_norm, uint32_t d, uint32_t r)
{
    double sum = 0;

    for (uint32_t j = 0; j < d; j++) {
        float k;

        if (j < r)
            k = slice[j];
        else if (j >= d / 2 && j < d / 2 + r)
            k = slice[r + j - d / 2];
        else
            k = v[j] * k_norm[j];
        sum += (double)q[j] * (double)k;
    }
    return sum;
}

/* What one query row and head looks at. */
struct view {
    const struct attention_job *job;
    const struct ns_segment *segment;
    const float *q;
    uint32_t kv_head;
    uint32_t lo, hi;  /* cached positions */
    uint32_t own_end; /* own rows: 0 or the segment's n_rows */
};

/* Key number i of the view, cached ones first: its score and its V. */
static double
look(const struct view *view, uint32_t i, const float **v)
{
    const struct ns_attention *args = view->job->args;
    const struct ns_kv_layer *kv = &args->kv;
    uint32_t d = kv->head_dim, position = view->lo + i, at;
    unsigned char *page;

    if (position >= view->hi) {
        uint32_t row = view->segment->row0 + position - view->hi;
        size_t column = (size_t)view->kv_head * d;

        *v = row_of(args->v, row) + column;
        return score_plain(view->q, row_of(args->k, row) + column, d);
    }
    at = position % NS_PAGE;
    page = kv_page(view->job->pass, kv, args->pages, view->segment->slot,
                   position);
    *v = kv_v(kv, page, view->kv_head, at);
    if (kv->compact)
        return score_compact(view->q, kv_k(kv, page, view->kv_head, at), *v,
                             args->k_norm, d, kv->n_rotated);
    return score_plain(view->q, kv_k(kv, page, view->kv_head, at), d);
}

static void
attention_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct attention_job *job = ctx;
    const struct ns_attention *args = job->args;
    uint32_t row = task / args->n_heads, head = task % args->n_heads;
    uint32_t d = args->kv.head_dim, n;
    double *sum = (double *)(void *)(job->cpu->thread_scratch +
                                     thread *
                                         job->cpu->thread_scratch_bytes);
    float *out = row_of(args->out, row) + (size_t)head * d;
    double most = -INFINITY, total = 0;
    const float *v;
    struct view view = {
        .job = job,
        .segment = segment_of_row(job->pass, row),
        .q = row_of(args->q, row) + (size_t)head * d,
        .kv_head = head / (args->n_heads / args->kv.n_kv_heads),
        .lo = (uint32_t)args->lo[row],
        .hi = (uint32_t)job->pass->hi[row],
    };

    if (view.lo > view.hi)
        view.lo = view.hi;
    if (view.segment && view.segment->kind == NS_SEGMENT_CANVAS)
        view.own_end = view.segment->n_rows;
    n = view.segment ? view.hi - view.lo + view.own_end : 0;

    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, look(&view, i, &v));
    memset(sum, 0, d * sizeof(*sum));
    for (uint32_t i = 0; i < n; i++) {
        double p = exp(look(&view, i, &v) - most);

        total += p;
        for (uint32_t j = 0; j < d; j++)
            sum[j] += p * (double)v[j];
    }
    for (uint32_t j = 0; j < d; j++)
        out[j] = n > 0 ? (float)(sum[j] / total) : 0;
}

void
attention_ref(struct ns_backend *be, const struct ns_pass *pass,
              const struct ns_attention *args)
{
    struct attention_job job = { (struct cpu *)be, pass, args };

    pool_run(job.cpu->pool, pass->n_rows * args->n_heads, attention_task,
             &job);
}
