/* patch_ref.c - what the vision tower does besides products and attention.
 *
 * patch_qkv has a faster form (qkv_body.h), as it runs in each layer. The
 * others run once a picture, and the limits in clipped towers only: below a
 * hundredth of the tower's products.
 */
#include <math.h>

#include "kernels/cpu/ref.h"

struct place_job {
    struct ns_rows rows;
    const float *table;
    uint32_t n_positions;
    const int32_t *x, *y;
};

static void
place_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct place_job *job = ctx;
    uint32_t n = job->rows.n_cols;
    const float *by_x = job->table + (size_t)job->x[i] * n;
    const float *by_y = job->table +
                        ((size_t)job->n_positions + (size_t)job->y[i]) * n;
    float *row = row_of(job->rows, i);

    (void)thread;
    for (uint32_t j = 0; j < n; j++)
        row[j] += by_x[j] + by_y[j];
}

void
patch_place_ref(struct ns_backend *be, struct ns_rows rows,
                const float *table, uint32_t n_positions, const int32_t *x,
                const int32_t *y)
{
    struct place_job job = { rows, table, n_positions, x, y };

    pool_run(((struct cpu *)be)->pool, rows.n_rows, place_row, &job);
}

/* out = x / rms(x) * w; out may be x */
static void
norm_head(float *out, const float *x, const float *w, uint32_t d, float eps)
{
    double inverse = inverse_rms(x, d, eps);

    for (uint32_t j = 0; j < d; j++)
        out[j] = (float)((double)x[j] * inverse * (w ? (double)w[j] : 1));
}

/* Pair (j, j + d/4) of half a head, by one coordinate. */
static void
turn_half(float *x, const float *frequency, uint32_t n_pairs, int32_t at)
{
    for (uint32_t j = 0; j < n_pairs; j++) {
        float angle = (float)at * frequency[j];
        double c = (double)cosf(angle), s = (double)sinf(angle);
        double a = (double)x[j], b = (double)x[j + n_pairs];

        x[j] = (float)(a * c - b * s);
        x[j + n_pairs] = (float)(b * c + a * s);
    }
}

static void
norm_and_turn(const struct ns_patch_qkv *args, uint32_t i, float *out,
              const float *x, const float *w, uint32_t d)
{
    norm_head(out, x, w, d, args->eps);
    turn_half(out, args->frequency, d / 4, args->x[i]);
    turn_half(out + d / 2, args->frequency, d / 4, args->y[i]);
}

static void
qkv_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct ns_patch_qkv *args = ctx;
    uint32_t n = args->q.n_cols, d = n / args->n_heads;
    const float *raw = row_of(args->qkv, i);

    (void)thread;
    for (uint32_t at = 0; at < n; at += d) {
        norm_and_turn(args, i, row_of(args->q, i) + at, raw + at,
                      args->q_norm, d);
        norm_and_turn(args, i, row_of(args->k, i) + at, raw + n + at,
                      args->k_norm, d);
        norm_head(row_of(args->v, i) + at, raw + (size_t)2 * n + at, NULL, d,
                  args->eps);
    }
}

void
patch_qkv_ref(struct ns_backend *be, const struct ns_patch_qkv *args)
{
    struct ns_patch_qkv job = *args;

    pool_run(((struct cpu *)be)->pool, args->q.n_rows, qkv_row, &job);
}

struct pool_job {
    struct ns_rows y, x;
    const uint32_t *corner, *columns;
    uint32_t side;
    float scale;
    const float *bias, *std;
};

static void
pool_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct pool_job *job = ctx;
    float *y = row_of(job->y, i);
    uint32_t side = job->side;

    (void)thread;
    for (uint32_t j = 0; j < job->y.n_cols; j++) {
        double sum = 0;

        for (uint32_t line = 0; line < side; line++)
            for (uint32_t column = 0; column < side; column++)
                sum += (double)row_of(job->x, job->corner[i] +
                                                  line * job->columns[i] +
                                                  column)[j];
        y[j] = (float)(sum / (side * side) * (double)job->scale);
        if (job->bias)
            y[j] = (y[j] - job->bias[j]) * job->std[j];
    }
}

void
patch_pool_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
               const uint32_t *corner, const uint32_t *columns, uint32_t side,
               float scale, const float *bias, const float *std)
{
    struct pool_job job = { y, x, corner, columns, side, scale, bias, std };

    pool_run(((struct cpu *)be)->pool, y.n_rows, pool_row, &job);
}

struct limits_job {
    struct ns_rows y, x;
    float least, most;
};

static void
clamp_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct limits_job *job = ctx;
    const float *x = row_of(job->x, i);
    float *y = row_of(job->y, i);

    (void)thread;
    for (uint32_t j = 0; j < job->y.n_cols; j++)
        y[j] = x[j] < job->least  ? job->least
               : x[j] > job->most ? job->most
                                  : x[j];
}

void
clamp_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          float least, float most)
{
    struct limits_job job = { y, x, least, most };

    pool_run(((struct cpu *)be)->pool, y.n_rows, clamp_row, &job);
}

static void
gelu_times_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct limits_job *job = ctx;
    const float *up = row_of(job->x, i);
    float *y = row_of(job->y, i);

    (void)thread;
    for (uint32_t j = 0; j < job->y.n_cols; j++)
        y[j] = (float)(gelu_tanh((double)y[j]) * (double)up[j]);
}

void
gelu_times_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows up)
{
    struct limits_job job = { y, up, 0, 0 };

    pool_run(((struct cpu *)be)->pool, y.n_rows, gelu_times_row, &job);
}
