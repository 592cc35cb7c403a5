/* experts_body.h - the mixture: gather, gated, down, weighted sum.
 *
 * Contract: moe_ref.c, to the tolerance in test_moe.c.
 * Plan:     copies (row, slot) are counting-sorted by expert, stably. A task is
 *           up to EXPERT_ROWS copies of one expert: its rows are gathered, go
 *           through gate and up and then down while all is in L2, and land at
 *           their place in the sorted order. Tasks start with the heaviest. Where
 *           they are too few for the threads (a few rows, many threads), the
 *           panels of each are dealt out too, first gate and up, then down. A
 *           last round adds each row's copies by rising expert.
 * Measured: Zen 4, one thread, 256 rows, 4 of 64 experts of 128, fp32: 0.80 of
 *           the multiply-add peak (avx2 0.67): 50 MB of weights for 16 copies an
 *           expert, read at 11 of the 20 GB/s that memory gives.
 */
struct experts_job {
    struct cpu *cpu;
    struct ns_rows y, x;
    const float *weight;
    uint32_t top_k;
    const struct ns_weight *gate_up, *down;
    struct expert_scratch s;
    uint32_t n_cuts; /* of a task's columns, where tasks are fewer than threads */
};

enum { SUM_ROWS = 16 };

/* inner = gelu(x . gate) * (x . up) of a task's rows, panels first..end - 1 */
static void
expert_inner(const struct experts_job *job, const struct expert_task *t,
             uint32_t first, uint32_t end, void *buffer, float *inner,
             size_t ld)
{
    const struct ns_weight *w = job->gate_up;
    struct operand a = operand_make(
        job->cpu, w, job->x.data, job->x.stride,
        job->s.row + t->first, t->n_copies, w->k, buffer);

    for (uint32_t p = first; p < end; p++) {
        uint32_t col = p * PANEL;

        gated_product(inner + col, ld, a, t->n_copies,
                      packed_panel(w, t->expert, 2 * p),
                      packed_panel(w, t->expert, 2 * p + 1), w->dtype, w->k,
                      w->n - col < PANEL ? w->n - col : PANEL);
    }
}

/* copies = inner . down of a task's rows, panels first..end - 1 */
static void
expert_outer(const struct experts_job *job, const struct expert_task *t,
             uint32_t first, uint32_t end, void *buffer, const float *inner,
             size_t ld)
{
    const struct ns_weight *w = job->down;
    float *out = job->s.copies + t->first * (size_t)w->n;
    struct operand a = operand_make(job->cpu, w, inner, ld, NULL,
                                    t->n_copies, w->k, buffer);

    for (uint32_t p = first; p < end; p++) {
        uint32_t col = p * PANEL;

        product(out + col, w->n, a, 0, t->n_copies,
                packed_panel(w, t->expert, p), w->dtype, w->k,
                w->n - col < PANEL ? w->n - col : PANEL);
    }
}

static uint32_t
panels_of(const struct ns_weight *w)
{
    return (w->n + PANEL - 1) / PANEL;
}

static void
experts_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct experts_job *job = ctx;
    const struct expert_task *t = &job->s.tasks[task];
    unsigned char *buffer = scratch_of_thread(job->cpu, thread);
    size_t ld = operand_ld(job->gate_up->n);
    float *inner = (float *)(void *)(buffer + EXPERT_ROWS * sizeof(float) *
                                                  operand_ld(job->gate_up->k));

    expert_inner(job, t, 0, panels_of(job->gate_up), buffer, inner, ld);
    expert_outer(job, t, 0, panels_of(job->down), inner + EXPERT_ROWS * ld,
                 inner, ld);
}

/* The cut'th of n_cuts parts of n panels. */
static uint32_t
cut_of(uint32_t n, uint32_t cut, uint32_t n_cuts)
{
    return (uint32_t)((uint64_t)n * cut / n_cuts);
}

static void
experts_inner_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct experts_job *job = ctx;
    const struct expert_task *t = &job->s.tasks[task / job->n_cuts];
    uint32_t cut = task % job->n_cuts, n = panels_of(job->gate_up);
    size_t ld = operand_ld(job->gate_up->n);

    expert_inner(job, t, cut_of(n, cut, job->n_cuts),
                 cut_of(n, cut + 1, job->n_cuts),
                 scratch_of_thread(job->cpu, thread),
                 job->s.inner + t->first * ld, ld);
}

static void
experts_outer_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct experts_job *job = ctx;
    const struct expert_task *t = &job->s.tasks[task / job->n_cuts];
    uint32_t cut = task % job->n_cuts, n = panels_of(job->down);
    size_t ld = operand_ld(job->gate_up->n);

    expert_outer(job, t, cut_of(n, cut, job->n_cuts),
                 cut_of(n, cut + 1, job->n_cuts),
                 scratch_of_thread(job->cpu, thread),
                 job->s.inner + t->first * ld, ld);
}

static void
experts_sum(void *ctx, uint32_t task, uint32_t thread)
{
    const struct experts_job *job = ctx;
    uint32_t end = (task + 1) * SUM_ROWS, n = job->down->n;

    (void)thread;
    if (end > job->x.n_rows)
        end = job->x.n_rows;
    for (uint32_t row = task * SUM_ROWS; row < end; row++) {
        const uint32_t *place = job->s.place + row * job->top_k;
        float *y = job->y.data + row * job->y.stride;

        for (uint32_t col = 0; col < n; col += LANES) {
            uint32_t lanes = lanes_left(n, col);
            vf sum = vf_set(0.0f);

            for (uint32_t j = 0; j < job->top_k; j++)
                sum = vf_fma(vf_set(job->weight[job->s.slot[place[j]]]),
                             vf_load_some(job->s.copies +
                                              place[j] * (size_t)n + col,
                                          lanes),
                             sum);
            vf_store_some(y + col, sum, lanes);
        }
    }
}

void
ISA(experts)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
             const int32_t *index, const float *weight, uint32_t top_k,
             const struct ns_weight *gate_up, const struct ns_weight *down)
{
    struct cpu *cpu = (struct cpu *)be;
    struct experts_job job = {
        .cpu = cpu, .y = y, .x = x, .weight = weight, .top_k = top_k,
        .gate_up = gate_up, .down = down,
    };
    uint32_t n_tasks;

    if (x.n_rows == 0)
        return;
    expert_scratch_carve(&job.s, cpu->scratch, x.n_rows, top_k, gate_up->count,
                         down->n, gate_up->n);
    n_tasks = expert_scratch_sort(&job.s, index, x.n_rows, top_k,
                                  gate_up->count);
    if (n_tasks < 2 * pool_threads(cpu->pool)) {
        job.n_cuts = 4 * pool_threads(cpu->pool) / n_tasks;
        pool_run(cpu->pool, n_tasks * job.n_cuts, experts_inner_task, &job);
        pool_run(cpu->pool, n_tasks * job.n_cuts, experts_outer_task, &job);
    } else {
        pool_run(cpu->pool, n_tasks, experts_task, &job);
    }
    pool_run(cpu->pool, (x.n_rows + SUM_ROWS - 1) / SUM_ROWS, experts_sum,
             &job);
}
