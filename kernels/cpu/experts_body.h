/* experts_body.h - the mixture: gather, gated, down, weighted sum.
 *
 * Contract: experts_ref.c, to the tolerance in test_experts.c.
 * Plan:     copies (row, slot) are counting-sorted by expert, stably. A task is
 *           up to EXPERT_ROWS copies of one expert: its rows are gathered, go
 *           through gate and up and then down while all is in L2, and land at
 *           their place in the sorted order. Tasks start with the heaviest. A
 *           second round adds each row's copies by rising expert.
 */
struct experts_job {
    struct cpu *cpu;
    struct ns_rows y, x;
    const float *weight;
    uint32_t top_k;
    const struct ns_weight *gate_up, *down;
    struct expert_scratch s;
};

enum { SUM_ROWS = 16 };

static void
experts_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct experts_job *job = ctx;
    const struct expert_task *t = &job->s.tasks[task];
    const struct ns_weight *gu = job->gate_up, *down = job->down;
    unsigned char *scratch = scratch_of_thread(job->cpu, thread);
    size_t operand_bytes =
        EXPERT_ROWS * (size_t)operand_ld(gu->k) * sizeof(float);
    float *inner = (float *)(scratch + operand_bytes);
    size_t ld = operand_ld(gu->n);
    float *out = job->s.copies + t->first * (size_t)down->n;
    struct operand a;

    a = operand_make(job->cpu, gu->dtype, job->x.data, job->x.stride,
                     job->s.row + t->first, t->n_copies, gu->k, scratch);
    for (uint32_t col = 0; col < gu->n; col += PANEL) {
        uint32_t p = 2 * (col / PANEL);
        uint32_t n_cols = gu->n - col < PANEL ? gu->n - col : PANEL;

        gated_product(inner + col, ld, a, t->n_copies,
                      packed_panel(gu, t->expert, p),
                      packed_panel(gu, t->expert, p + 1), gu->dtype, gu->k,
                      n_cols);
    }
    a = operand_make(job->cpu, down->dtype, inner, ld, NULL, t->n_copies,
                     down->k, inner + EXPERT_ROWS * ld);
    for (uint32_t col = 0; col < down->n; col += PANEL) {
        uint32_t n_cols = down->n - col < PANEL ? down->n - col : PANEL;

        product(out + col, down->n, a, 0, t->n_copies,
                packed_panel(down, t->expert, col / PANEL), down->dtype,
                down->k, n_cols);
    }
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
                         down->n);
    n_tasks = expert_scratch_sort(&job.s, index, x.n_rows, top_k,
                                  gate_up->count);
    pool_run(cpu->pool, n_tasks, experts_task, &job);
    pool_run(cpu->pool, (x.n_rows + SUM_ROWS - 1) / SUM_ROWS, experts_sum,
             &job);
}
