/* route.cu - the router's choice; a warp a row.
 *
 * Contract: cpu/moe_ref.c. Choosing by falling logit is choosing by falling
 * probability; each round takes the best that lies behind the one before.
 */
#include <assert.h>

#include "kernels/cuda/cuda.cuh"

enum { WARPS = 4 };

struct routing {
    int32_t *index;
    float *weight, *probs;
    struct ns_rows logits;
    const float *expert_scale;
    uint32_t top_k;
};

/* A NaN is never chosen while there is a number. */
__device__ static inline float
rank_of(float logit)
{
    return logit == logit ? logit : -INFINITY;
}

/* Whether (a, i) comes in front of (b, j): the lowest index among equals. */
__device__ static inline bool
in_front(float a, uint32_t i, float b, uint32_t j)
{
    return a > b || (a == b && i < j);
}

__global__ void
route_kernel(struct routing args)
{
    uint32_t lane = threadIdx.x % 32, n = args.logits.n_cols;
    uint32_t row = blockIdx.x * WARPS + threadIdx.x / 32;
    uint32_t last = 0, k = args.top_k;
    float most = -INFINITY, sum = 0, last_rank = 0, kept = 0;
    const float *logits;

    if (row >= args.logits.n_rows)
        return;
    logits = row_at(args.logits, row);
    for (uint32_t x = lane; x < n; x += 32)
        most = fmaxf(most, logits[x]);
    most = warp_max(most);
    for (uint32_t x = lane; x < n; x += 32)
        sum += expf(logits[x] - most);
    sum = warp_sum(sum);
    if (args.probs)
        for (uint32_t x = lane; x < n; x += 32)
            args.probs[(size_t)row * n + x] = expf(logits[x] - most) / sum;
    for (uint32_t slot = 0; slot < k; slot++) {
        float best_rank = -INFINITY, p;
        uint32_t best = UINT32_MAX;

        for (uint32_t x = lane; x < n; x += 32) {
            float rank = rank_of(logits[x]);

            if ((slot == 0 || in_front(last_rank, last, rank, x)) &&
                in_front(rank, x, best_rank, best)) {
                best_rank = rank;
                best = x;
            }
        }
        for (int step = 16; step > 0; step /= 2) {
            float rank = ns_shfl_xor(best_rank, step);
            uint32_t x = ns_shfl_xor(best, step);

            if (in_front(rank, x, best_rank, best)) {
                best_rank = rank;
                best = x;
            }
        }
        last = best;
        last_rank = best_rank;
        p = expf(logits[best] - most) / sum;
        kept += p;
        if (lane == 0) {
            args.index[(size_t)row * k + slot] = (int32_t)best;
            args.weight[(size_t)row * k + slot] = p;
        }
    }
    /* Lane 0 wrote these, and lane 0 reads them. */
    for (uint32_t slot = 0; lane == 0 && slot < k; slot++) {
        float *weight = &args.weight[(size_t)row * k + slot];

        *weight = *weight / kept *
                  args.expert_scale[args.index[(size_t)row * k + slot]];
    }
}

void
route_cuda(struct ns_backend *be, int32_t *index, float *weight, float *probs,
           struct ns_rows logits, const float *expert_scale, uint32_t top_k)
{
    struct routing args = { index, weight, probs, logits, expert_scale,
                            top_k };

    LAUNCH(cuda_of(be), divide_up(logits.n_rows, WARPS), WARPS * 32, 0,
           route_kernel, args);
}
