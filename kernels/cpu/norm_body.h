/* norm_body.h - RMS norms, alone and with the sums around them.
 *
 * Contract: norm_ref.c, to the tolerance in test_rows.c.
 * Plan:     tasks of a few rows; a row is read from L1 after its first pass.
 *           Squares are summed in 16 lanes, then vf_sum: one order for all.
 */
#include <math.h>

enum { NORM_ROWS = 16 };

struct norm_job {
    struct ns_rows x, a, e;
    struct ns_rows y[3];
    const float *w, *w_m, *w_e;
    const float *branch_w[3];
    float eps;
    const float *scalar;
    const uint8_t *decoder;
    void (*row)(const struct norm_job *job, uint32_t i);
};

/* The row, walked 16 columns at a time. */
#define EACH_LANES(n)                                                         \
    for (uint32_t j = 0, some; j < (n) && (some = lanes_left(n, j), 1);       \
         j += LANES)

static inline float *
row_at(struct ns_rows rows, uint32_t i)
{
    return rows.data + i * rows.stride;
}

VEC_INLINE float
inverse_of(vf squares, uint32_t n, float eps)
{
    return 1.0f / sqrtf(vf_sum(squares) / (float)n + eps);
}

VEC_INLINE float
inverse_rms(const float *x, uint32_t n, float eps)
{
    vf squares = vf_set(0.0f);

    EACH_LANES(n)
    {
        vf v = vf_load_some(x + j, some);

        squares = vf_fma(v, v, squares);
    }
    return inverse_of(squares, n, eps);
}

VEC_INLINE vf
normed(const float *x, float inverse, const float *w, uint32_t j,
       uint32_t some)
{
    vf y = vf_mul(vf_load_some(x + j, some), vf_set(inverse));

    return w ? vf_mul(y, vf_load_some(w + j, some)) : y;
}

static void
rmsnorm_row(const struct norm_job *job, uint32_t i)
{
    const float *x = row_at(job->x, i);
    float *y = row_at(job->y[0], i);
    uint32_t n = job->x.n_cols;
    float inverse = inverse_rms(x, n, job->eps);

    EACH_LANES(n)
        vf_store_some(y + j, normed(x, inverse, job->w, j, some), some);
}

static void
add_norm_row(const struct norm_job *job, uint32_t i)
{
    const float *a = row_at(job->a, i);
    float *x = row_at(job->x, i);
    uint32_t n = job->x.n_cols;
    float inverse = inverse_rms(a, n, job->eps);

    EACH_LANES(n)
        vf_store_some(x + j,
                      vf_add(vf_load_some(x + j, some),
                             normed(a, inverse, job->w, j, some)),
                      some);
}

static void
add_then_norm_row(const struct norm_job *job, uint32_t i)
{
    const float *a = row_at(job->a, i);
    float *x = row_at(job->x, i), inverse;
    uint32_t n = job->x.n_cols;
    vf squares = vf_set(0.0f);

    EACH_LANES(n)
    {
        vf v = vf_add(vf_load_some(x + j, some), vf_load_some(a + j, some));

        squares = vf_fma(v, v, squares);
        vf_store_some(x + j, v, some);
    }
    inverse = inverse_of(squares, n, job->eps);
    EACH_LANES(n)
        vf_store_some(x + j, normed(x, inverse, NULL, j, some), some);
}

static void
branch_norms_row(const struct norm_job *job, uint32_t i)
{
    const float *x = row_at(job->x, i);
    uint32_t n = job->x.n_cols;
    float inverse = inverse_rms(x, n, job->eps);

    for (int branch = 0; branch < 3; branch++) {
        float *y = row_at(job->y[branch], i);

        EACH_LANES(n)
            vf_store_some(y + j,
                          normed(x, inverse, job->branch_w[branch], j, some),
                          some);
    }
}

static void
layer_end_row(const struct norm_job *job, uint32_t i)
{
    const float *m = row_at(job->a, i), *e = row_at(job->e, i);
    float *x = row_at(job->x, i);
    uint32_t n = job->x.n_cols;
    float inverse_m = inverse_rms(m, n, job->eps);
    float inverse_e = inverse_rms(e, n, job->eps), inverse;
    vf squares = vf_set(0.0f), scalar = vf_set(job->scalar[job->decoder[i]]);

#define BOTH                                                                  \
    vf_add(normed(m, inverse_m, job->w_m, j, some),                           \
           normed(e, inverse_e, job->w_e, j, some))
    EACH_LANES(n)
    {
        vf both = BOTH;

        squares = vf_fma(both, both, squares);
    }
    inverse = inverse_of(squares, n, job->eps);
    EACH_LANES(n)
    {
        vf y = vf_mul(vf_mul(BOTH, vf_set(inverse)),
                      vf_load_some(job->w + j, some));

        y = vf_mul(vf_add(vf_load_some(x + j, some), y), scalar);
        vf_store_some(x + j, y, some);
    }
#undef BOTH
}

static void
norm_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct norm_job *job = ctx;
    uint32_t end = (task + 1) * NORM_ROWS;

    (void)thread;
    for (uint32_t i = task * NORM_ROWS; i < end && i < job->x.n_rows; i++)
        job->row(job, i);
}

static void
norm_run(struct ns_backend *be, struct norm_job *job)
{
    pool_run(((struct cpu *)be)->pool,
             (job->x.n_rows + NORM_ROWS - 1) / NORM_ROWS, norm_task, job);
}

void
ISA(rmsnorm)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
             const float *w, float eps)
{
    struct norm_job job = { .x = x, .y = { y }, .w = w, .eps = eps,
                            .row = rmsnorm_row };

    norm_run(be, &job);
}

void
ISA(add_norm)(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
              const float *w, float eps)
{
    struct norm_job job = { .x = x, .a = a, .w = w, .eps = eps,
                            .row = add_norm_row };

    norm_run(be, &job);
}

void
ISA(add_then_norm)(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                   float eps)
{
    struct norm_job job = { .x = x, .a = a, .eps = eps,
                            .row = add_then_norm_row };

    norm_run(be, &job);
}

void
ISA(branch_norms)(struct ns_backend *be, struct ns_rows y[3],
                  struct ns_rows x, const float *const w[3], float eps)
{
    struct norm_job job = { .x = x, .y = { y[0], y[1], y[2] },
                            .branch_w = { w[0], w[1], w[2] }, .eps = eps,
                            .row = branch_norms_row };

    norm_run(be, &job);
}

void
ISA(layer_end)(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
               struct ns_rows e, const float *w_m, const float *w_e,
               const float *w, float eps, const float scalar[2],
               const uint8_t *decoder)
{
    struct norm_job job = { .x = x, .a = m, .e = e, .w_m = w_m, .w_e = w_e,
                            .w = w, .eps = eps, .scalar = scalar,
                            .decoder = decoder, .row = layer_end_row };

    norm_run(be, &job);
}
