/* norm_ref.c - RMS norms, alone and with the sums around them. */
#include <math.h>

#include "kernels/cpu/ref.h"

struct norm_job {
    struct ns_rows x, a, e;
    struct ns_rows y[3];
    const float *w, *w_m, *w_e;
    const float *branch_w[3];
    float eps;
    const float *scalar;
    const uint8_t *decoder;
};

double
inverse_rms(const float *x, uint32_t n, float eps)
{
    double sum = 0;

    for (uint32_t j = 0; j < n; j++)
        sum += (double)x[j] * (double)x[j];
    return 1 / sqrt(sum / n + (double)eps);
}

/* x[j] * inverse * w[j], a tensor of the model */
static float
normed(const float *x, double inverse, const float *w, uint32_t j)
{
    double y = (double)x[j] * inverse;

    return (float)(w ? y * (double)w[j] : y);
}

static void
rmsnorm_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct norm_job *job = ctx;
    const float *x = row_of(job->x, i);
    double inverse = inverse_rms(x, job->x.n_cols, job->eps);
    float *y = row_of(job->y[0], i);

    (void)thread;
    for (uint32_t j = 0; j < job->x.n_cols; j++)
        y[j] = normed(x, inverse, job->w, j);
}

void
rmsnorm_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const float *w, float eps)
{
    struct norm_job job = { .x = x, .y = { y }, .w = w, .eps = eps };

    pool_run(((struct cpu *)be)->pool, x.n_rows, rmsnorm_row, &job);
}

static void
add_norm_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct norm_job *job = ctx;
    const float *a = row_of(job->a, i);
    double inverse = inverse_rms(a, job->a.n_cols, job->eps);
    float *x = row_of(job->x, i);

    (void)thread;
    for (uint32_t j = 0; j < job->x.n_cols; j++)
        x[j] += normed(a, inverse, job->w, j);
}

void
add_norm_ref(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
             const float *w, float eps)
{
    struct norm_job job = { .x = x, .a = a, .w = w, .eps = eps };

    pool_run(((struct cpu *)be)->pool, x.n_rows, add_norm_row, &job);
}

static void
add_then_norm_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct norm_job *job = ctx;
    const float *a = row_of(job->a, i);
    float *x = row_of(job->x, i);
    double inverse;

    (void)thread;
    for (uint32_t j = 0; j < job->x.n_cols; j++)
        x[j] += a[j];
    inverse = inverse_rms(x, job->x.n_cols, job->eps);
    for (uint32_t j = 0; j < job->x.n_cols; j++)
        x[j] = normed(x, inverse, NULL, j);
}

void
add_then_norm_ref(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                  float eps)
{
    struct norm_job job = { .x = x, .a = a, .eps = eps };

    pool_run(((struct cpu *)be)->pool, x.n_rows, add_then_norm_row, &job);
}

static void
branch_norms_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct norm_job *job = ctx;
    const float *x = row_of(job->x, i);
    double inverse = inverse_rms(x, job->x.n_cols, job->eps);

    (void)thread;
    for (int branch = 0; branch < 3; branch++) {
        float *y = row_of(job->y[branch], i);

        for (uint32_t j = 0; j < job->x.n_cols; j++)
            y[j] = normed(x, inverse, job->branch_w[branch], j);
    }
}

void
branch_norms_ref(struct ns_backend *be, struct ns_rows y[3], struct ns_rows x,
                 const float *const w[3], float eps)
{
    struct norm_job job = { .x = x, .y = { y[0], y[1], y[2] },
                            .branch_w = { w[0], w[1], w[2] }, .eps = eps };

    pool_run(((struct cpu *)be)->pool, x.n_rows, branch_norms_row, &job);
}

static void
layer_end_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct norm_job *job = ctx;
    uint32_t n = job->x.n_cols;
    float *m = row_of(job->a, i), *e = row_of(job->e, i);
    float *x = row_of(job->x, i);
    float scalar = job->scalar[job->decoder[i]];
    double inverse_m = inverse_rms(m, n, job->eps);
    double inverse_e = inverse_rms(e, n, job->eps);
    double sum = 0, inverse;

#define BOTH(j) (normed(m, inverse_m, job->w_m, j) + \
                 normed(e, inverse_e, job->w_e, j))
    (void)thread;
    for (uint32_t j = 0; j < n; j++)
        sum += (double)BOTH(j) * (double)BOTH(j);
    inverse = 1 / sqrt(sum / n + (double)job->eps);
    for (uint32_t j = 0; j < n; j++) {
        float both = BOTH(j);

        x[j] = (x[j] + normed(&both, inverse, &job->w[j], 0)) * scalar;
    }
#undef BOTH
}

void
layer_end_ref(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
              struct ns_rows e, const float *w_m, const float *w_e,
              const float *w, float eps, const float scalar[2],
              const uint8_t *decoder)
{
    struct norm_job job = { .x = x, .a = m, .e = e, .w_m = w_m, .w_e = w_e,
                            .w = w, .eps = eps, .scalar = scalar,
                            .decoder = decoder };

    pool_run(((struct cpu *)be)->pool, x.n_rows, layer_end_row, &job);
}
