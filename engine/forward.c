#include "engine/forward.h"

#include <stdlib.h>
#include <string.h>

#include "engine/vision.h"

struct ns_forward {
    const struct ns_model *model;
    struct ns_kvcache *kv;
    struct ns_backend *be;
    uint32_t max_rows;
    float *work, *soft_store; /* device */
    /* work rows, carved out of `work` */
    struct ns_rows x;           /* the residual stream            */
    struct ns_rows branch[3];   /* normed x: dense, experts, router */
    struct ns_rows qkv, q, k, v;
    struct ns_rows attended;    /* [nq * d]                       */
    struct ns_rows out;         /* [H]: attention's, then experts' */
    struct ns_rows inner;       /* [I]                            */
    struct ns_rows mlp;         /* [H]                            */
    struct ns_rows logits;      /* [X] router                     */
    struct ns_rows index, weight, probs; /* [K], [K], [X]          */
    struct ns_rows soft;        /* [H]: of this pass's canvases   */
    struct ns_rows head;        /* [H]: rows that meet the head   */
    ns_probe *probe;
    void *probe_ctx;
};

struct widths {
    uint32_t qkv, q, kv; /* the widest of any layer */
};

static struct widths
widest(const struct ns_config *config)
{
    struct widths w = { 0, 0, 0 };

    for (uint32_t i = 0; i < config->n_layers; i++) {
        const struct ns_layer_config *layer = &config->layer[i];
        uint32_t q = config->n_heads * layer->head_dim;
        uint32_t kv = layer->n_kv_heads * layer->head_dim;
        uint32_t qkv = q + (layer->full ? 1 : 2) * kv;

        w.q = q > w.q ? q : w.q;
        w.kv = kv > w.kv ? kv : w.kv;
        w.qkv = qkv > w.qkv ? qkv : w.qkv;
    }
    return w;
}

/* Calls `each` for every work array, so that sizing and carving agree. */
static size_t
carve(struct ns_forward *fw, const struct ns_config *config, uint32_t rows,
      float *base)
{
    struct widths w = widest(config);
    struct {
        struct ns_rows *rows;
        uint32_t n_cols;
    } arrays[] = {
        { &fw->x, config->hidden },
        { &fw->branch[0], config->hidden },
        { &fw->branch[1], config->hidden },
        { &fw->branch[2], config->hidden },
        { &fw->qkv, w.qkv },
        { &fw->q, w.q },
        { &fw->k, w.kv },
        { &fw->v, w.kv },
        { &fw->attended, w.q },
        { &fw->out, config->hidden },
        { &fw->inner, config->intermediate },
        { &fw->mlp, config->hidden },
        { &fw->logits, config->n_experts },
        { &fw->index, config->top_k },
        { &fw->weight, config->top_k },
        { &fw->probs, config->n_experts },
        { &fw->soft, config->hidden },
        { &fw->head, config->hidden },
    };
    size_t used = 0;

    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        size_t stride = (arrays[i].n_cols + 15u) & ~(size_t)15;

        *arrays[i].rows = (struct ns_rows){
            .data = base ? base + used : NULL,
            .n_rows = rows,
            .n_cols = arrays[i].n_cols,
            .stride = stride,
        };
        used += stride * rows;
    }
    return used * sizeof(float);
}

static struct ns_backend_sizes
sizes_of(const struct ns_model *model, uint32_t rows)
{
    const struct ns_config *config = &model->config;
    struct ns_backend_sizes sizes = {
        .n_rows = rows,
        .n_head_rows = rows,
        .hidden = config->hidden,
        .vocab = config->vocab,
        .n_heads = config->n_heads,
        .n_experts = config->n_experts,
        .top_k = config->top_k,
        .expert_dim = config->expert_dim,
    };

    for (uint32_t i = 0; i < config->n_layers; i++) {
        const struct ns_layer_config *layer = &config->layer[i];

        if (layer->n_kv_heads > sizes.n_kv_heads)
            sizes.n_kv_heads = layer->n_kv_heads;
        if (layer->head_dim > sizes.head_dim)
            sizes.head_dim = layer->head_dim;
    }
    ns_vision_sizes(model, &sizes);
    return sizes;
}

void
ns_forward_bytes(const struct ns_model *model, uint32_t max_rows,
                 uint32_t n_slots, uint64_t *work, uint64_t *soft)
{
    struct ns_backend *be = model->backend;
    struct ns_backend_sizes sizes = sizes_of(model, max_rows);
    struct ns_forward scratch;

    *work = carve(&scratch, &model->config, max_rows, NULL) +
            be->ops->scratch_bytes(be, &sizes);
    *soft = (uint64_t)n_slots * model->config.canvas_length *
            model->config.hidden * sizeof(float);
}

enum ns_status
ns_forward_create(const struct ns_model *model, struct ns_kvcache *kv,
                  uint32_t max_rows, uint32_t n_slots,
                  struct ns_forward **out, struct ns_error *err)
{
    struct ns_backend *be = model->backend;
    struct ns_backend_sizes sizes = sizes_of(model, max_rows);
    struct ns_forward *fw = calloc(1, sizeof(*fw));
    enum ns_status status;
    void *memory;

    if (!fw)
        return ns_fail(err, NS_FATAL, "out of memory for the work rows");
    fw->model = model;
    fw->kv = kv;
    fw->be = be;
    fw->max_rows = max_rows;
    status = be->ops->alloc(be, carve(fw, &model->config, max_rows, NULL),
                            "work rows", &memory, err);
    if (status != NS_OK)
        goto out;
    fw->work = memory;
    carve(fw, &model->config, max_rows, fw->work);
    status = be->ops->alloc(be,
                            (size_t)n_slots * model->config.canvas_length *
                                model->config.hidden * sizeof(float),
                            "soft embeddings", &memory, err);
    if (status != NS_OK)
        goto out;
    fw->soft_store = memory;
    status = be->ops->reserve(be, &sizes, err);
    if (status != NS_OK)
        goto out;
    *out = fw;
    fw = NULL;
out:
    ns_forward_destroy(fw);
    return status;
}

void
ns_forward_destroy(struct ns_forward *fw)
{
    if (!fw)
        return;
    fw->be->ops->release(fw->be, fw->work);
    fw->be->ops->release(fw->be, fw->soft_store);
    free(fw);
}

void
ns_forward_set_probe(struct ns_forward *fw, ns_probe *probe, void *ctx)
{
    fw->probe = probe;
    fw->probe_ctx = ctx;
}

struct ns_rows
ns_forward_soft(struct ns_forward *fw, uint32_t slot)
{
    const struct ns_config *config = &fw->model->config;
    struct ns_rows rows = {
        .data = fw->soft_store +
                (size_t)slot * config->canvas_length * config->hidden,
        .n_rows = config->canvas_length,
        .n_cols = config->hidden,
        .stride = config->hidden,
    };

    return rows;
}

static struct ns_rows
soft_store(struct ns_forward *fw)
{
    struct ns_rows rows = ns_forward_soft(fw, 0);

    rows.n_rows = UINT32_MAX; /* all slots: indices are the batch's */
    return rows;
}

static void
probe(struct ns_forward *fw, const char *point, uint32_t layer,
      struct ns_rows rows)
{
    if (fw->probe)
        fw->probe(fw->probe_ctx, point, layer, &rows);
}

/* The first n rows, and so many of their columns. */
static struct ns_rows
some(struct ns_rows rows, uint32_t from, uint32_t n)
{
    rows.data += (size_t)from * rows.stride;
    rows.n_rows = n;
    return rows;
}

static struct ns_rows
narrow(struct ns_rows rows, uint32_t n, uint32_t n_cols)
{
    rows.n_rows = n;
    rows.n_cols = n_cols;
    return rows;
}

/* Soft tokens in the place of their placeholders' embeddings. */
static void
place_images(struct ns_forward *fw, const struct ns_batch *batch)
{
    size_t row_bytes = fw->x.n_cols * sizeof(float);

    for (uint32_t i = 0; i < batch->n_images; i++) {
        const struct ns_batch_image *image = &batch->image[i];

        for (uint32_t j = 0; j < image->n_rows; j++)
            fw->be->ops->upload(fw->be,
                                fw->x.data + (image->row0 + j) * fw->x.stride,
                                image->soft + (size_t)j * fw->x.n_cols,
                                row_bytes);
    }
}

/* x = scaled embeddings; canvases: normed sum with the gated soft embedding,
 * which is exactly zero on a first step. */
static void
embed(struct ns_forward *fw, const struct ns_batch *batch)
{
    const struct ns_backend_ops *ops = fw->be->ops;
    const struct ns_weights *w = &fw->model->weights;
    float eps = fw->model->config.eps;
    uint32_t n = batch->n_soft_in;

    ops->embed(fw->be, some(fw->x, 0, batch->n_rows), &w->embedding,
               batch->pass.ids, w->embedding_scale);
    place_images(fw, batch);
    if (n > 0) {
        struct ns_rows soft = some(fw->soft, 0, n);
        struct ns_rows inner = some(fw->inner, 0, n);
        struct ns_rows out = some(fw->out, 0, n);

        ops->gather(fw->be, soft, soft_store(fw), batch->soft_in_from);
        ops->rmsnorm(fw->be, soft, soft, w->sc_pre_norm, eps);
        ops->gated(fw->be, inner, soft, &w->sc_gated);
        ops->linear(fw->be, out, inner, &w->sc_down);
        ops->add_then_norm(fw->be, some(fw->x, 0, n), out, eps);
    }
    if (batch->n_canvas > n) {
        struct ns_rows fresh = some(fw->x, n, batch->n_canvas - n);

        ops->rmsnorm(fw->be, fresh, fresh, NULL, eps);
    }
}

/* Projections, rotation and KV for all rows; attention for the first n. */
static void
attend(struct ns_forward *fw, const struct ns_batch *batch, uint32_t layer,
       uint32_t n)
{
    const struct ns_backend_ops *ops = fw->be->ops;
    const struct ns_config *config = &fw->model->config;
    const struct ns_layer_config *shape = &config->layer[layer];
    const struct ns_weights *weights = &fw->model->weights;
    const struct ns_layer_weights *w = &weights->layer[layer];
    const struct ns_pass *pass = &batch->pass;
    uint32_t all = batch->n_rows;
    uint32_t q_cols = config->n_heads * shape->head_dim;
    uint32_t kv_cols = shape->n_kv_heads * shape->head_dim;
    struct ns_rows normed = some(fw->branch[0], 0, all);
    struct ns_rows x = some(fw->x, 0, n);
    struct ns_qkv qkv = {
        .qkv = narrow(fw->qkv, all,
                      q_cols + (shape->full ? 1 : 2) * kv_cols),
        .q = narrow(fw->q, all, q_cols),
        .k = narrow(fw->k, all, kv_cols),
        .v = narrow(fw->v, all, kv_cols),
        .q_norm = w->q_norm,
        .k_norm = w->k_norm,
        .frequency = shape->full ? weights->frequency_full
                                 : weights->frequency_sliding,
        .eps = config->eps,
        .n_heads = config->n_heads,
        .has_v = !shape->full,
        .kv = ns_kvcache_layer(fw->kv, layer),
        .pages = shape->full ? pass->page_full : pass->page_sliding,
    };
    struct ns_attention attention = {
        .out = narrow(fw->attended, n, q_cols),
        .q = some(qkv.q, 0, n),
        .k = some(qkv.k, 0, n),
        .v = some(qkv.v, 0, n),
        .n_heads = config->n_heads,
        .kv = qkv.kv,
        .pages = qkv.pages,
        .lo = shape->full ? pass->lo_full : pass->lo_sliding,
        .k_norm = w->k_norm,
    };

    ops->rmsnorm(fw->be, normed, some(fw->x, 0, all), w->input_norm,
                 config->eps);
    ops->linear(fw->be, qkv.qkv, normed, &w->qkv);
    ops->qkv(fw->be, pass, &qkv);
    if (n == 0)
        return;
    if (n == all) {
        ops->attention(fw->be, pass, &attention);
    } else {
        struct ns_pass live = *pass;

        live.n_rows = n;
        while (live.n_segments > 0 &&
               live.segments[live.n_segments - 1].row0 >= n)
            live.n_segments--;
        ops->attention(fw->be, &live, &attention);
    }
    ops->linear(fw->be, some(fw->out, 0, n), attention.out, &w->o);
    ops->add_norm(fw->be, x, some(fw->out, 0, n), w->post_attention_norm,
                  config->eps);
}

/* Dense MLP and routed experts side by side, off the same residual. */
static void
feed_forward(struct ns_forward *fw, const struct ns_batch *batch,
             uint32_t layer, uint32_t n)
{
    const struct ns_backend_ops *ops = fw->be->ops;
    const struct ns_config *config = &fw->model->config;
    const struct ns_layer_weights *w = &fw->model->weights.layer[layer];
    struct ns_rows x = some(fw->x, 0, n), mlp = some(fw->mlp, 0, n);
    struct ns_rows experts = some(fw->out, 0, n);
    struct ns_rows inner = some(fw->inner, 0, n);
    struct ns_rows logits = some(fw->logits, 0, n);
    struct ns_rows branch[3] = { some(fw->branch[0], 0, n),
                                 some(fw->branch[1], 0, n),
                                 some(fw->branch[2], 0, n) };
    const float *const norms[3] = { w->pre_mlp_norm, w->pre_experts_norm,
                                    w->router_scale };
    int32_t *index = (int32_t *)(void *)fw->index.data;

    ops->branch_norms(fw->be, branch, x, norms, config->eps);
    ops->gated(fw->be, inner, branch[0], &w->mlp_gated);
    ops->linear(fw->be, mlp, inner, &w->mlp_down);
    ops->linear(fw->be, logits, branch[2], &w->router);
    ops->route(fw->be, index, fw->weight.data,
               fw->probe ? fw->probs.data : NULL, logits, w->expert_scale,
               config->top_k);
    ops->experts(fw->be, experts, branch[1], index, fw->weight.data,
                 config->top_k, &w->experts_gated, &w->experts_down);
    if (fw->probe) {
        struct ns_rows packed = { fw->weight.data, n, config->top_k,
                                  config->top_k };

        probe(fw, "router_weights", layer, packed);
        packed.data = fw->index.data;
        probe(fw, "router_index", layer, packed);
        packed = (struct ns_rows){ fw->probs.data, n, config->n_experts,
                                   config->n_experts };
        probe(fw, "router_probs", layer, packed);
    }
    ops->layer_end(fw->be, x, mlp, experts, w->post_mlp_norm,
                   w->post_experts_norm, w->post_norm, config->eps, w->scalar,
                   batch->pass.decoder);
    probe(fw, "hidden", layer, x);
}

static void
apply_head(struct ns_forward *fw, struct ns_batch *batch)
{
    const struct ns_backend_ops *ops = fw->be->ops;
    const struct ns_config *config = &fw->model->config;
    const struct ns_weights *w = &fw->model->weights;
    struct ns_rows h = some(fw->head, 0, batch->n_head);
    struct ns_head head = {
        .h = h,
        .table = &w->embedding,
        .softcap = config->softcap,
        .inv_temperature = batch->inv_temperature,
        .uniform = batch->uniform,
        .top_p = batch->any_top_p ? batch->top_p : NULL,
        .mask = batch->any_mask ? batch->mask : NULL,
        .top = batch->any_top ? batch->top : NULL,
        .argmax = batch->argmax,
        .sampled = batch->sampled,
        .entropy = batch->entropy,
        .n_soft = batch->n_soft_out,
        .soft = some(fw->soft, 0, batch->n_soft_out),
        .soft_scale = w->embedding_scale,
    };

    if (batch->n_head == 0)
        return;
    ops->gather(fw->be, h, some(fw->x, 0, batch->n_rows), batch->head_row);
    ops->rmsnorm(fw->be, h, h, w->final_norm, config->eps);
    probe(fw, "final_hidden", 0, h);
    ops->head(fw->be, &head);
    if (batch->n_soft_out > 0)
        ops->scatter(fw->be, soft_store(fw), head.soft, batch->soft_out_to);
}

enum ns_status
ns_forward(struct ns_forward *fw, struct ns_batch *batch,
           struct ns_error *err)
{
    uint32_t n_layers = fw->model->config.n_layers;

    embed(fw, batch);
    probe(fw, "input", 0, some(fw->x, 0, batch->n_rows));
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        /* Rows that only write KV are done once the last layer has theirs.
         * A probed pass goes on, so that tests see every output. */
        bool last = layer + 1 == n_layers && !fw->probe;
        uint32_t n = last ? batch->n_live : batch->n_rows;

        attend(fw, batch, layer, n);
        if (n > 0)
            feed_forward(fw, batch, layer, n);
    }
    apply_head(fw, batch);
    return fw->be->ops->sync(fw->be, err);
}
