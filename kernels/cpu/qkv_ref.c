/* qkv_ref.c - head-wise norms, rotation, and the writing of prefix KV. */
#include <math.h>

#include "kernels/cpu/kv.h"
#include "kernels/cpu/ref.h"

struct qkv_job {
    const struct ns_pass *pass;
    const struct ns_qkv *args;
};

/* out = x / rms(x) * w. Norm and weight round apart, so that K = V * k_norm
 * holds to the bit on full layers: compact pages count on it. */
static void
norm_head(float *out, const float *x, const float *w, uint32_t d, float eps)
{
    double inverse = inverse_rms(x, d, eps);

    for (uint32_t j = 0; j < d; j++) {
        out[j] = (float)((double)x[j] * inverse);
        if (w)
            out[j] *= w[j];
    }
}

/* Pair (j, j + d/2) turns by position * frequency[j]: fp32 numbers, an fp32
 * product, then accurate cosine and sine of that. */
static void
rotate_head(float *x, const struct ns_qkv *args, int32_t position)
{
    uint32_t half = args->kv.head_dim / 2;

    for (uint32_t j = 0; j < args->kv.n_rotated; j++) {
        float angle = (float)position * args->frequency[j];
        double c = (double)cosf(angle), s = (double)sinf(angle);
        double a = (double)x[j], b = (double)x[j + half];

        x[j] = (float)(a * c - b * s);
        x[j + half] = (float)(b * c + a * s);
    }
}

static void
qkv_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct qkv_job *job = ctx;
    const struct ns_qkv *args = job->args;
    const struct ns_segment *segment = segment_of_row(job->pass, i);
    int32_t position = job->pass->position[i];
    uint32_t d = args->kv.head_dim;
    const float *raw = row_of(args->qkv, i);
    float *q = row_of(args->q, i);
    float *k = row_of(args->k, i), *v = row_of(args->v, i);

    (void)thread;
    for (uint32_t head = 0; head < args->n_heads; head++, raw += d, q += d) {
        norm_head(q, raw, args->q_norm, d, args->eps);
        rotate_head(q, args, position);
    }
    for (uint32_t head = 0; head < args->kv.n_kv_heads; head++) {
        const float *raw_k = raw + (size_t)head * d;
        const float *raw_v = args->has_v
                                 ? raw_k + (size_t)args->kv.n_kv_heads * d
                                 : raw_k;

        norm_head(k, raw_k, args->k_norm, d, args->eps);
        rotate_head(k, args, position);
        norm_head(v, raw_v, NULL, d, args->eps);
        if (segment && segment->kind != NS_SEGMENT_CANVAS)
            kv_store(&args->kv, kv_page(job->pass, &args->kv, args->pages,
                                        segment->slot, (uint32_t)position),
                     head, (uint32_t)position % NS_PAGE, k, v);
        k += d;
        v += d;
    }
}

void
qkv_ref(struct ns_backend *be, const struct ns_pass *pass,
        const struct ns_qkv *args)
{
    struct qkv_job job = { pass, args };

    pool_run(((struct cpu *)be)->pool, pass->n_rows, qkv_row, &job);
}
