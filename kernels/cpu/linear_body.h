/* linear_body.h - y = x . W^T and gelu(x . gate^T) * (x . up^T).
 *
 * Contract: linear_ref.c, to the tolerance in test_linear.c.
 * Plan:     tasks are (block of rows, group of panels). A block's rows stay in
 *           L2 while panel after panel streams by; a panel meets all tiles of
 *           the block while it is warm. k is never cut.
 * Measured: Zen 4, one thread, 256 rows by [1024, 512] of fp32: 0.98 of the
 *           multiply-add peak with avx512, 0.95 with avx2, 0.94 with bf16
 *           weights; bf16 products 1.85 (build/bench/ops, 2026-12).
 */
struct linear_job {
    struct cpu *cpu;
    struct ns_rows y, x;
    const struct ns_weight *w;
    uint32_t block_rows, n_blocks;
    uint32_t n_panels, group; /* pairs of panels if gated */
};

static void
linear_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct linear_job *job = ctx;
    const struct ns_weight *w = job->w;
    uint32_t row = task % job->n_blocks * job->block_rows;
    uint32_t first = task / job->n_blocks * job->group;
    uint32_t n_rows = job->x.n_rows - row;
    struct operand a;

    if (n_rows > job->block_rows)
        n_rows = job->block_rows;
    a = operand_make(job->cpu, w, job->x.data + row * job->x.stride,
                     job->x.stride, NULL, n_rows, w->k,
                     scratch_of_thread(job->cpu, thread));
    for (uint32_t p = first; p < first + job->group && p < job->n_panels; p++) {
        float *c = job->y.data + row * job->y.stride + p * PANEL;
        uint32_t n_cols = w->n - p * PANEL;

        if (n_cols > PANEL)
            n_cols = PANEL;
        if (w->packing == NS_PACK_GATED)
            gated_product(c, job->y.stride, a, n_rows,
                          packed_panel(w, 0, 2 * p),
                          packed_panel(w, 0, 2 * p + 1), w->dtype, w->k,
                          n_cols);
        else
            product(c, job->y.stride, a, 0, n_rows, packed_panel(w, 0, p),
                    w->dtype, w->k, n_cols);
    }
}

static void
linear_run(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const struct ns_weight *w)
{
    struct cpu *cpu = (struct cpu *)be;
    struct linear_job job = { .cpu = cpu, .y = y, .x = x, .w = w };
    uint32_t most = operand_rows(w->k), wanted;

    if (x.n_rows == 0)
        return;
    job.n_panels = (w->n + PANEL - 1) / PANEL;
    job.n_blocks = (x.n_rows + most - 1) / most;
    job.block_rows = (x.n_rows + job.n_blocks - 1) / job.n_blocks;
    job.n_blocks = (x.n_rows + job.block_rows - 1) / job.block_rows;
    /* Some tasks a thread, so that the last to end is not far behind. */
    wanted = pool_threads(cpu->pool) * 6;
    job.group = (uint32_t)((uint64_t)job.n_panels * job.n_blocks / wanted);
    if (job.group < 1)
        job.group = 1;
    if (job.group > 8)
        job.group = 8;
    pool_run(cpu->pool,
             job.n_blocks * ((job.n_panels + job.group - 1) / job.group),
             linear_task, &job);
}

void
ISA(linear)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const struct ns_weight *w)
{
    linear_run(be, y, x, w);
}

void
ISA(gated)(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const struct ns_weight *w)
{
    linear_run(be, y, x, w);
}
