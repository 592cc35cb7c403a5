/* linear_ref.c - products of rows with packed weights. */
#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/scratch.h"
#include "kernels/float8.h"

struct linear_job {
    struct cpu *cpu;
    struct ns_rows y, x;
    const struct ns_weight *w;
};

void
panel_dot(double out[PANEL], const float *x, const void *panel,
          enum ns_dtype dtype, uint32_t k)
{
    for (uint32_t c = 0; c < PANEL; c++)
        out[c] = 0;
    if (dtype == NS_F32) {
        const float *w = panel;

        for (uint32_t i = 0; i < k; i++)
            for (uint32_t c = 0; c < PANEL; c++)
                out[c] += (double)x[i] * (double)w[i * (size_t)PANEL + c];
    } else {
        const uint16_t *w = panel;

        for (uint32_t i = 0; i < k; i++) {
            const uint16_t *pairs = w + i / 2 * (size_t)(2 * PANEL) + i % 2;

            for (uint32_t c = 0; c < PANEL; c++)
                out[c] += (double)x[i] * (double)bf16_to_float(pairs[2 * c]);
        }
    }
}

double
gelu_tanh(double x)
{
    double root = 0.79788456080286535588; /* sqrt(2 / pi) */

    return 0.5 * x * (1 + tanh(root * (x + 0.044715 * x * x * x)));
}

const float *
product_row(const struct cpu *cpu, const struct ns_weight *w, const float *x,
            float *buffer)
{
    if (!cpu->fp8_rows || !w->e4m3)
        return x;
    ns_e4m3_round_row(buffer, x, w->k);
    return buffer;
}

static void
linear_panel(void *ctx, uint32_t task, uint32_t thread)
{
    const struct linear_job *job = ctx;
    const struct ns_weight *w = job->w;
    const void *panel = packed_panel(w, 0, task);
    float *buffer = scratch_of_thread(job->cpu, thread);
    double sum[PANEL];

    for (uint32_t i = 0; i < job->x.n_rows; i++) {
        float *y = row_of(job->y, i) + task * PANEL;

        panel_dot(sum, product_row(job->cpu, w, row_of(job->x, i), buffer),
                  panel, w->dtype, w->k);
        for (uint32_t c = 0; c < PANEL && task * PANEL + c < w->n; c++)
            y[c] = (float)sum[c];
    }
}

void
linear_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const struct ns_weight *w)
{
    struct linear_job job = { (struct cpu *)be, y, x, w };

    pool_run(job.cpu->pool, panels_over(w->n), linear_panel, &job);
}

static void
gated_panel(void *ctx, uint32_t task, uint32_t thread)
{
    const struct linear_job *job = ctx;
    const struct ns_weight *w = job->w;
    const void *gate_panel = packed_panel(w, 0, 2 * task);
    const void *up_panel = packed_panel(w, 0, 2 * task + 1);
    float *buffer = scratch_of_thread(job->cpu, thread);
    double gate[PANEL], up[PANEL];

    for (uint32_t i = 0; i < job->x.n_rows; i++) {
        const float *x = product_row(job->cpu, w, row_of(job->x, i), buffer);
        float *y = row_of(job->y, i) + task * PANEL;

        panel_dot(gate, x, gate_panel, w->dtype, w->k);
        panel_dot(up, x, up_panel, w->dtype, w->k);
        for (uint32_t c = 0; c < PANEL && task * PANEL + c < w->n; c++)
            y[c] = (float)(gelu_tanh(gate[c]) * up[c]);
    }
}

void
gated_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          const struct ns_weight *w)
{
    struct linear_job job = { (struct cpu *)be, y, x, w };

    pool_run(job.cpu->pool, panels_over(w->n), gated_panel, &job);
}
