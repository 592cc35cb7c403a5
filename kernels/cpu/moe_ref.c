/* moe_ref.c - the router's choice, and the experts behind it. */
#include <math.h>

#include "kernels/cpu/ref.h"

struct route_job {
    int32_t *index;
    float *weight, *probs;
    struct ns_rows logits;
    const float *expert_scale;
    uint32_t top_k;
};

struct experts_job {
    struct cpu *cpu;
    struct ns_rows y, x;
    const int32_t *index;
    const float *weight;
    uint32_t top_k;
    const struct ns_weight *gate_up, *down;
};

/* Whether expert x is already among the first n of a row's choice. */
static bool
chosen(const int32_t *index, uint32_t n, uint32_t x)
{
    for (uint32_t i = 0; i < n; i++)
        if (index[i] == (int32_t)x)
            return true;
    return false;
}

static void
route_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct route_job *job = ctx;
    uint32_t n = job->logits.n_cols, k = job->top_k;
    const float *logits = row_of(job->logits, i);
    int32_t *index = job->index + (size_t)i * k;
    float *weight = job->weight + (size_t)i * k;
    double most = -INFINITY, sum = 0, kept = 0;

    (void)thread;
    for (uint32_t x = 0; x < n; x++)
        most = fmax(most, (double)logits[x]);
    for (uint32_t x = 0; x < n; x++)
        sum += exp((double)logits[x] - most);
    if (job->probs)
        for (uint32_t x = 0; x < n; x++)
            job->probs[(size_t)i * n + x] =
                (float)(exp((double)logits[x] - most) / sum);

    /* By falling logit is by falling probability. A NaN is never larger, so
     * a row of them takes the lowest indices and stays inside the table. */
    for (uint32_t slot = 0; slot < k; slot++) {
        int32_t best = -1;

        for (uint32_t x = 0; x < n; x++)
            if (!chosen(index, slot, x) &&
                (best < 0 || logits[x] > logits[best]))
                best = (int32_t)x;
        index[slot] = best;
        kept += exp((double)logits[best] - most) / sum;
    }
    for (uint32_t slot = 0; slot < k; slot++) {
        double p = exp((double)logits[index[slot]] - most) / sum;

        weight[slot] = (float)(p / kept *
                               (double)job->expert_scale[index[slot]]);
    }
}

void
route_ref(struct ns_backend *be, int32_t *index, float *weight, float *probs,
          struct ns_rows logits, const float *expert_scale, uint32_t top_k)
{
    struct route_job job = { index, weight, probs, logits, expert_scale,
                             top_k };

    pool_run(((struct cpu *)be)->pool, logits.n_rows, route_row, &job);
}

/* sum += weight * down(gelu(gate(x)) * up(x)) of one expert */
static void
add_expert(const struct experts_job *job, uint32_t expert, double weight,
           const float *row, float *middle, float *buffer, double *sum)
{
    const struct ns_weight *gate_up = job->gate_up, *down = job->down;
    const float *x = product_row(job->cpu, gate_up, row, buffer), *inner;
    double gate[PANEL], up[PANEL];

    for (uint32_t n = 0; n < gate_up->n; n += PANEL) {
        uint32_t pair = n / PANEL * 2;

        panel_dot(gate, x, packed_panel(gate_up, expert, pair),
                  gate_up->dtype, gate_up->k);
        panel_dot(up, x, packed_panel(gate_up, expert, pair + 1),
                  gate_up->dtype, gate_up->k);
        for (uint32_t c = 0; c < PANEL && n + c < gate_up->n; c++)
            middle[n + c] = (float)(gelu_tanh(gate[c]) * up[c]);
    }
    inner = product_row(job->cpu, down, middle, buffer);
    for (uint32_t n = 0; n < down->n; n += PANEL) {
        double *out = gate;

        panel_dot(out, inner, packed_panel(down, expert, n / PANEL),
                  down->dtype, down->k);
        for (uint32_t c = 0; c < PANEL && n + c < down->n; c++)
            sum[n + c] += weight * (double)(float)out[c];
    }
}

static void
experts_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct experts_job *job = ctx;
    const int32_t *index = job->index + (size_t)i * job->top_k;
    const float *weight = job->weight + (size_t)i * job->top_k;
    double *sum = (double *)(void *)(job->cpu->thread_scratch +
                                     thread *
                                         job->cpu->thread_scratch_bytes);
    float *middle = (float *)(void *)(sum + job->down->n);
    float *buffer = middle + job->gate_up->n; /* for either input */
    float *y = row_of(job->y, i);

    memset(sum, 0, job->down->n * sizeof(*sum));
    /* In rising order of experts, whatever the order of the choice. */
    for (uint32_t expert = 0; expert < job->gate_up->count; expert++)
        for (uint32_t slot = 0; slot < job->top_k; slot++)
            if (index[slot] == (int32_t)expert)
                add_expert(job, expert, (double)weight[slot],
                           row_of(job->x, i), middle, buffer, sum);
    for (uint32_t j = 0; j < job->down->n; j++)
        y[j] = (float)sum[j];
}

void
experts_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const int32_t *index, const float *weight, uint32_t top_k,
            const struct ns_weight *gate_up, const struct ns_weight *down)
{
    struct experts_job job = { (struct cpu *)be, y, x, index, weight, top_k,
                               gate_up, down };

    pool_run(job.cpu->pool, x.n_rows, experts_row, &job);
}
