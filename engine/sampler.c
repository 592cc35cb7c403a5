#include "engine/sampler.h"

#include <math.h>

float
ns_sampler_temperature(float t_min, float t_max, uint32_t n, uint32_t n_steps)
{
    double share = (double)n / (double)n_steps;

    return (float)((double)t_min + ((double)t_max - (double)t_min) * share);
}

static bool
before(const float *entropy, uint32_t a, uint32_t b)
{
    float x = isnan(entropy[a]) ? INFINITY : entropy[a];
    float y = isnan(entropy[b]) ? INFINITY : entropy[b];

    return x < y || (x == y && a < b);
}

/* Heap sort: no allocation, no recursion, and the order is total. */
static void
sort(const float *entropy, uint32_t *order, uint32_t n)
{
    for (uint32_t start = n / 2, end = n; end > 1;) {
        uint32_t root, child;

        if (start > 0) {
            start--;
        } else {
            uint32_t top = order[0];

            end--;
            order[0] = order[end];
            order[end] = top;
        }
        for (root = start; (child = 2 * root + 1) < end; root = child) {
            uint32_t held = order[root];

            if (child + 1 < end &&
                before(entropy, order[child], order[child + 1]))
                child++;
            if (!before(entropy, held, order[child]))
                break;
            order[root] = order[child];
            order[child] = held;
        }
    }
}

uint32_t
ns_sampler_accept(const float *entropy, uint32_t length, float bound,
                  uint8_t *accepted, uint32_t *order)
{
    double sum = 0;
    uint32_t n = 0;

    for (uint32_t i = 0; i < length; i++) {
        order[i] = i;
        accepted[i] = 0;
    }
    sort(entropy, order, length);
    for (uint32_t i = 0; i < length; i++) {
        float own = entropy[order[i]];
        float running;

        sum += (double)own;
        running = (float)sum;
        /* Written so that a NaN stops here. The first is always accepted. */
        if (i > 0 && !(running - own <= bound))
            break;
        accepted[order[i]] = 1;
        n++;
    }
    return n;
}

float
ns_sampler_mean(const float *entropy, uint32_t length)
{
    double sum = 0;

    for (uint32_t i = 0; i < length; i++)
        sum += (double)entropy[i];
    return (float)(sum / (double)length);
}
