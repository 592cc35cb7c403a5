/* route_body.h - softmax over the experts, the largest of them, their weights.
 *
 * Contract: moe_ref.c, to the tolerance in test_moe.c.
 * Plan:     tasks of a few rows. The choice is by logit, as it is in the
 *           reference: rounding of the exponential moves no expert. It is made
 *           by insertion into a short sorted list, best first.
 */
#include <math.h>

enum { ROUTE_ROWS = 16 };

struct route_job {
    int32_t *index;
    float *weight, *probs;
    struct ns_rows logits;
    const float *expert_scale;
    uint32_t top_k;
};

static float
exp_one(float x)
{
    float lanes[LANES];

    vf_store(lanes, vf_exp(vf_set(x)));
    return lanes[0];
}

/* The top_k largest, the lowest index first among equals. A NaN is never
 * larger: a row of them takes the lowest indices. */
static void
choose(const float *logits, uint32_t n, int32_t *index, uint32_t top_k)
{
    uint32_t n_kept = 0;

    for (uint32_t x = 0; x < n; x++) {
        uint32_t at = n_kept;

        if (n_kept == top_k) {
            if (!(logits[x] > logits[index[top_k - 1]]))
                continue;
            at--;
        } else {
            n_kept++;
        }
        for (; at > 0 && logits[x] > logits[index[at - 1]]; at--)
            index[at] = index[at - 1];
        index[at] = (int32_t)x;
    }
}

static void
route_row(const struct route_job *job, uint32_t i)
{
    uint32_t n = job->logits.n_cols, k = job->top_k;
    const float *logits = job->logits.data + i * job->logits.stride;
    int32_t *index = job->index + (size_t)i * k;
    float *weight = job->weight + (size_t)i * k;
    float kept = 0.0f, most;

    choose(logits, n, index, k);
    most = logits[index[0]];
    for (uint32_t slot = 0; slot < k; slot++) {
        weight[slot] = exp_one(logits[index[slot]] - most);
        kept += weight[slot];
    }
    for (uint32_t slot = 0; slot < k; slot++)
        weight[slot] = weight[slot] / kept * job->expert_scale[index[slot]];

    if (job->probs) {
        float *probs = job->probs + (size_t)i * n;
        vf sum = vf_set(0.0f), total;

        for (uint32_t x = 0; x < n; x += LANES) {
            uint32_t some = lanes_left(n, x);
            vf e = vf_exp(vf_between(vf_sub(vf_load_some(logits + x, some),
                                            vf_set(most)),
                                     0, (int32_t)some));

            sum = vf_add(sum, e);
            vf_store_some(probs + x, e, some);
        }
        total = vf_set(vf_sum(sum));
        for (uint32_t x = 0; x < n; x += LANES) {
            uint32_t some = lanes_left(n, x);

            vf_store_some(probs + x,
                          vf_div(vf_load_some(probs + x, some), total), some);
        }
    }
}

static void
route_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct route_job *job = ctx;
    uint32_t end = (task + 1) * ROUTE_ROWS;

    (void)thread;
    for (uint32_t i = task * ROUTE_ROWS; i < end && i < job->logits.n_rows;
         i++)
        route_row(job, i);
}

void
ISA(route)(struct ns_backend *be, int32_t *index, float *weight, float *probs,
           struct ns_rows logits, const float *expert_scale, uint32_t top_k)
{
    struct route_job job = { index, weight, probs, logits, expert_scale,
                             top_k };

    pool_run(((struct cpu *)be)->pool,
             (logits.n_rows + ROUTE_ROWS - 1) / ROUTE_ROWS, route_task, &job);
}
