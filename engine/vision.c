#include "engine/vision.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_RUN_IMAGES = 16,  /* in one run of the tower */
    INNER_ROWS = 512,     /* of the MLP's inner rows at a time */
    MAX_KEPT = 4096,      /* soft token runs */
};

struct kept {
    uint8_t digest[32];
    uint32_t n_tokens;
    uint64_t used; /* the call that last asked for it */
    float *soft;   /* owned: [n_tokens][H] */
};

struct ns_vision {
    const struct ns_model *model;
    struct ns_backend *be;
    uint32_t max_patches, max_tokens; /* of one run */
    float *work;    /* device */
    int32_t *place; /* device: x, then y, then zeros: nothing is cached */
    /* work rows, carved out of `work` */
    struct ns_rows x, normed, wide, attended, inner, pooled, soft;
    struct ns_rows clipped, up; /* of a clipped tower: a projection's input
                                 * within its limits; the second of gated's
                                 * products */
    /* host, of a run */
    float *values; /* [max_patches][stride of wide] */
    int32_t *host_place;
    uint32_t *corner, *columns; /* [max_tokens] */

    struct kept *kept;
    uint32_t n_kept;
    uint64_t cache_bytes, n_calls;
    struct ns_vision_counts counts;
    ns_probe *probe;
    void *probe_ctx;
};

static uint32_t
patch_values(const struct ns_vision_config *config)
{
    return 3 * config->patch * config->patch;
}

static uint32_t
max_patches(const struct ns_vision_config *config)
{
    return NS_IMAGE_MAX_TOKENS * config->pooling * config->pooling;
}

static size_t
carve(struct ns_vision *v, const struct ns_model *model, float *base)
{
    const struct ns_vision_config *config = &model->config.vision;
    uint32_t nq = config->n_heads * config->head_dim;
    uint32_t values = patch_values(config), rows = max_patches(config);
    bool clips = config->clipped;
    struct {
        struct ns_rows *rows;
        uint32_t n_rows, n_cols;
    } arrays[] = {
        { &v->x, rows, config->hidden },
        { &v->normed, rows, config->hidden },
        { &v->wide, rows, 3 * nq > values ? 3 * nq : values },
        { &v->attended, rows, nq },
        { &v->inner, INNER_ROWS, config->intermediate },
        { &v->clipped, clips ? rows : 0, config->hidden },
        { &v->up, clips ? INNER_ROWS : 0, config->intermediate },
        { &v->pooled, NS_IMAGE_MAX_TOKENS, config->hidden },
        { &v->soft, NS_IMAGE_MAX_TOKENS, model->config.hidden },
    };
    size_t used = 0;

    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        size_t stride = (arrays[i].n_cols + 15u) & ~(size_t)15;

        *arrays[i].rows = (struct ns_rows){
            .data = base ? base + used : NULL,
            .n_rows = arrays[i].n_rows,
            .n_cols = arrays[i].n_cols,
            .stride = stride,
        };
        used += stride * arrays[i].n_rows;
    }
    return used * sizeof(float);
}

uint64_t
ns_vision_bytes(const struct ns_model *model)
{
    struct ns_vision scratch;
    uint64_t rows;

    if (!ns_model_sees(model))
        return 0;
    rows = max_patches(&model->config.vision);
    return carve(&scratch, model, NULL) + rows * 5 * sizeof(int32_t) +
           rows * patch_values(&model->config.vision) * sizeof(float) +
           (uint64_t)NS_IMAGE_MAX_TOKENS * 2 * sizeof(uint32_t) +
           MAX_KEPT * sizeof(struct kept);
}

static uint32_t
larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

void
ns_vision_sizes(const struct ns_model *model, struct ns_backend_sizes *sizes)
{
    const struct ns_vision_config *config = &model->config.vision;

    if (!ns_model_sees(model))
        return;
    sizes->n_patches = max_patches(config);
    sizes->n_heads = larger(sizes->n_heads, config->n_heads);
    sizes->n_kv_heads = larger(sizes->n_kv_heads, config->n_heads);
    sizes->head_dim = larger(sizes->head_dim, config->head_dim);
    sizes->n_rows = larger(sizes->n_rows, MAX_RUN_IMAGES);
}

enum ns_status
ns_vision_create(const struct ns_model *model, uint64_t cache_bytes,
                 struct ns_vision **out, struct ns_error *err)
{
    const struct ns_vision_config *config = &model->config.vision;
    struct ns_backend *be = model->backend;
    struct ns_vision *v = calloc(1, sizeof(*v));
    enum ns_status status;
    void *memory;

    if (!v)
        return ns_fail(err, NS_FATAL, "out of memory for the vision tower");
    v->model = model;
    v->be = be;
    v->cache_bytes = cache_bytes;
    v->max_patches = max_patches(config);
    v->max_tokens = NS_IMAGE_MAX_TOKENS;
    v->values = calloc((size_t)v->max_patches * patch_values(config),
                       sizeof(float));
    v->host_place = calloc((size_t)v->max_patches * 2, sizeof(int32_t));
    v->corner = calloc(v->max_tokens, sizeof(uint32_t));
    v->columns = calloc(v->max_tokens, sizeof(uint32_t));
    v->kept = calloc(MAX_KEPT, sizeof(*v->kept));
    if (!v->values || !v->host_place || !v->corner || !v->columns ||
        !v->kept) {
        status = ns_fail(err, NS_FATAL, "out of memory for the vision tower");
        goto out;
    }
    status = be->ops->alloc(be, carve(v, model, NULL), "patches", &memory,
                            err);
    if (status != NS_OK)
        goto out;
    v->work = memory;
    carve(v, model, v->work);
    status = be->ops->alloc(be,
                            (size_t)v->max_patches * 3 * sizeof(int32_t),
                            "places of patches", &memory, err);
    if (status != NS_OK)
        goto out;
    v->place = memory;
    *out = v;
    v = NULL;
out:
    ns_vision_destroy(v);
    return status;
}

void
ns_vision_destroy(struct ns_vision *v)
{
    if (!v)
        return;
    v->be->ops->release(v->be, v->work);
    v->be->ops->release(v->be, v->place);
    for (uint32_t i = 0; i < v->n_kept; i++)
        free(v->kept[i].soft);
    free(v->kept);
    free(v->values);
    free(v->host_place);
    free(v->corner);
    free(v->columns);
    free(v);
}

void
ns_vision_set_probe(struct ns_vision *v, ns_probe *probe, void *ctx)
{
    v->probe = probe;
    v->probe_ctx = ctx;
}

struct ns_vision_counts
ns_vision_counts(const struct ns_vision *v)
{
    return v->counts;
}

/* ---- the tower --------------------------------------------------------- */

/* Pictures side by side. */
struct run {
    uint32_t n_images, n_patches, n_tokens;
    const struct ns_image *image[MAX_RUN_IMAGES];
    struct kept *into[MAX_RUN_IMAGES];
    struct ns_segment segment[MAX_RUN_IMAGES];
};

static void
probe(struct ns_vision *v, const char *point, uint32_t layer,
      struct ns_rows rows)
{
    if (v->probe)
        v->probe(v->probe_ctx, point, layer, &rows);
}

static struct ns_rows
some(struct ns_rows rows, uint32_t from, uint32_t n)
{
    rows.data += (size_t)from * rows.stride;
    rows.n_rows = n;
    return rows;
}

static struct ns_rows
columns(struct ns_rows rows, uint32_t from, uint32_t n)
{
    rows.data += from;
    rows.n_cols = n;
    return rows;
}

/* Patch values between -1 and 1, places, and the corner of each soft token. */
static void
lay_out(struct ns_vision *v, const struct run *run)
{
    const struct ns_vision_config *config = &v->model->config.vision;
    uint32_t width = patch_values(config), token = 0;
    int32_t *x = v->host_place, *y = x + v->max_patches;

    for (uint32_t i = 0; i < run->n_images; i++) {
        const struct ns_image_size *size = &run->image[i]->size;
        uint32_t row0 = run->segment[i].row0;
        uint32_t grid = size->width / config->patch;
        uint32_t across = grid / config->pooling;

        ns_image_patches(run->image[i], config->patch,
                         v->values + (size_t)row0 * width, width, x + row0,
                         y + row0);
        for (uint32_t t = 0; t < size->n_tokens; t++, token++) {
            v->columns[token] = grid;
            v->corner[token] = row0 + t / across * config->pooling * grid +
                               t % across * config->pooling;
        }
    }
    for (size_t i = 0; i < (size_t)run->n_patches * width; i++)
        v->values[i] = 2 * (v->values[i] - 0.5f);
}

static void
embed(struct ns_vision *v, const struct run *run)
{
    const struct ns_backend_ops *ops = v->be->ops;
    const struct ns_vision_weights *w = &v->model->weights.vision;
    const struct ns_vision_config *config = &v->model->config.vision;
    uint32_t n = run->n_patches, width = patch_values(config);
    struct ns_rows x = some(v->x, 0, n), values = some(v->wide, 0, n);

    values.n_cols = width;
    values.stride = width;
    ops->upload(v->be, values.data, v->values,
                (size_t)n * width * sizeof(float));
    for (int axis = 0; axis < 2; axis++)
        ops->upload(v->be, v->place + (size_t)axis * v->max_patches,
                    v->host_place + (size_t)axis * v->max_patches,
                    n * sizeof(int32_t));
    ops->linear(v->be, x, values, &w->patch);
    ops->patch_place(v->be, x, w->position, config->n_positions, v->place,
                     v->place + v->max_patches);
    probe(v, "patch_embed", 0, x);
}

/* y = x . W^T of a clipped tower; x is left as it is. */
static void
clipped_linear(struct ns_vision *v, struct ns_rows y, struct ns_rows x,
               const struct ns_weight *w, const struct ns_clip *clip)
{
    const struct ns_backend_ops *ops = v->be->ops;
    struct ns_rows within = some(v->clipped, 0, x.n_rows);

    ops->clamp(v->be, within, x, clip->input_min, clip->input_max);
    ops->linear(v->be, y, within, w);
    ops->clamp(v->be, y, y, clip->output_min, clip->output_max);
}

static void
project_qkv(struct ns_vision *v, const struct ns_patch_qkv *qkv,
            struct ns_rows normed, const struct ns_vision_layer_weights *w)
{
    if (!v->model->config.vision.clipped) {
        v->be->ops->linear(v->be, qkv->qkv, normed, &w->qkv);
        return;
    }
    clipped_linear(v, qkv->q, normed, &w->q, &w->clip[NS_CLIPPED_Q]);
    clipped_linear(v, qkv->k, normed, &w->k, &w->clip[NS_CLIPPED_K]);
    clipped_linear(v, qkv->v, normed, &w->v, &w->clip[NS_CLIPPED_V]);
}

/* attended, where rows are as wide as the heads; done with behind this. */
static void
project_back(struct ns_vision *v, struct ns_rows y, struct ns_rows attended,
             const struct ns_vision_layer_weights *w)
{
    const struct ns_backend_ops *ops = v->be->ops;
    const struct ns_clip *clip = &w->clip[NS_CLIPPED_O];
    bool clips = v->model->config.vision.clipped;

    if (clips)
        ops->clamp(v->be, attended, attended, clip->input_min,
                   clip->input_max);
    ops->linear(v->be, y, attended, &w->o);
    if (clips)
        ops->clamp(v->be, y, y, clip->output_min, clip->output_max);
}

/* Every patch of a picture sees every patch of the same picture: to the
 * backend they are canvases without a prefix. */
static void
attend(struct ns_vision *v, const struct run *run,
       const struct ns_vision_layer_weights *w)
{
    const struct ns_backend_ops *ops = v->be->ops;
    const struct ns_vision_config *config = &v->model->config.vision;
    uint32_t n = run->n_patches, nq = config->n_heads * config->head_dim;
    struct ns_rows x = some(v->x, 0, n), normed = some(v->normed, 0, n);
    struct ns_rows wide = columns(some(v->wide, 0, n), 0, 3 * nq);
    struct ns_patch_qkv qkv = {
        .qkv = wide,
        .q = columns(wide, 0, nq),
        .k = columns(wide, nq, nq),
        .v = columns(wide, 2 * nq, nq),
        .q_norm = w->q_norm,
        .k_norm = w->k_norm,
        .frequency = v->model->weights.vision.frequency,
        .x = v->place,
        .y = v->place + v->max_patches,
        .eps = config->eps,
        .n_heads = config->n_heads,
    };
    const int32_t *nothing = v->place + (size_t)2 * v->max_patches;
    struct ns_pass pass = {
        .n_rows = n,
        .n_segments = run->n_images,
        .segments = run->segment,
        .hi = nothing,
    };
    struct ns_attention attention = {
        .out = some(v->attended, 0, n),
        .q = qkv.q,
        .k = qkv.k,
        .v = qkv.v,
        .n_heads = config->n_heads,
        .kv = { .n_kv_heads = config->n_heads,
                .head_dim = config->head_dim,
                .n_rotated = config->head_dim / 2 },
        .lo = nothing,
    };

    ops->rmsnorm(v->be, normed, x, w->input_norm, config->eps);
    project_qkv(v, &qkv, normed, w);
    ops->patch_qkv(v->be, &qkv);
    ops->attention(v->be, &pass, &attention);
    project_back(v, normed, attention.out, w);
    ops->add_norm(v->be, x, normed, w->post_attention_norm, config->eps);
}

/* A part of the MLP's rows: rows = down(gelu(gate(rows)) * up(rows)). */
static void
clipped_mlp(struct ns_vision *v, struct ns_rows rows,
            const struct ns_vision_layer_weights *w)
{
    const struct ns_backend_ops *ops = v->be->ops;
    const struct ns_clip *clip = &w->clip[NS_CLIPPED_DOWN];
    struct ns_rows inner = some(v->inner, 0, rows.n_rows);
    struct ns_rows up = some(v->up, 0, rows.n_rows);

    clipped_linear(v, inner, rows, &w->gate, &w->clip[NS_CLIPPED_GATE]);
    clipped_linear(v, up, rows, &w->up, &w->clip[NS_CLIPPED_UP]);
    ops->gelu_times(v->be, inner, up);
    ops->clamp(v->be, inner, inner, clip->input_min, clip->input_max);
    ops->linear(v->be, rows, inner, &w->down);
    ops->clamp(v->be, rows, rows, clip->output_min, clip->output_max);
}

static void
feed_forward(struct ns_vision *v, const struct run *run,
             const struct ns_vision_layer_weights *w)
{
    const struct ns_backend_ops *ops = v->be->ops;
    float eps = v->model->config.vision.eps;
    uint32_t n = run->n_patches;
    struct ns_rows x = some(v->x, 0, n), normed = some(v->normed, 0, n);

    ops->rmsnorm(v->be, normed, x, w->pre_mlp_norm, eps);
    for (uint32_t at = 0; at < n; at += INNER_ROWS) {
        uint32_t part = n - at < INNER_ROWS ? n - at : INNER_ROWS;
        struct ns_rows inner = some(v->inner, 0, part);
        struct ns_rows rows = some(normed, at, part);

        if (v->model->config.vision.clipped) {
            clipped_mlp(v, rows, w);
            continue;
        }
        ops->gated(v->be, inner, rows, &w->gated);
        ops->linear(v->be, rows, inner, &w->down);
    }
    ops->add_norm(v->be, x, normed, w->post_mlp_norm, eps);
}

static enum ns_status
run_tower(struct ns_vision *v, const struct run *run, struct ns_error *err)
{
    const struct ns_backend_ops *ops = v->be->ops;
    const struct ns_vision_weights *w = &v->model->weights.vision;
    const struct ns_vision_config *config = &v->model->config.vision;
    struct ns_rows x = some(v->x, 0, run->n_patches);
    struct ns_rows pooled = some(v->pooled, 0, run->n_tokens);
    struct ns_rows soft = some(v->soft, 0, run->n_tokens);
    size_t row_bytes = soft.n_cols * sizeof(float);
    uint32_t row = 0;

    lay_out(v, run);
    embed(v, run);
    for (uint32_t layer = 0; layer < config->n_layers; layer++) {
        attend(v, run, &w->layer[layer]);
        feed_forward(v, run, &w->layer[layer]);
        probe(v, "patch_hidden", layer, x);
    }
    ops->patch_pool(v->be, pooled, x, v->corner, v->columns, config->pooling,
                    sqrtf((float)config->hidden), w->std_bias, w->std_scale);
    probe(v, "pooled", 0, pooled);
    ops->rmsnorm(v->be, pooled, pooled, NULL, config->eps);
    ops->linear(v->be, soft, pooled, &w->projection);
    probe(v, "image_soft", 0, soft);
    for (uint32_t i = 0; i < run->n_images; i++)
        for (uint32_t t = 0; t < run->into[i]->n_tokens; t++, row++)
            ops->download(v->be,
                          run->into[i]->soft + (size_t)t * soft.n_cols,
                          soft.data + row * soft.stride, row_bytes);
    return ops->sync(v->be, err);
}

/* ---- what is kept ------------------------------------------------------ */

static uint64_t
soft_bytes(const struct ns_vision *v, uint32_t n_tokens)
{
    return (uint64_t)n_tokens * v->model->config.hidden * sizeof(float);
}

static struct kept *
find(struct ns_vision *v, const uint8_t digest[32])
{
    for (uint32_t i = 0; i < v->n_kept; i++)
        if (memcmp(v->kept[i].digest, digest, 32) == 0)
            return &v->kept[i];
    return NULL;
}

static void
let_go(struct ns_vision *v, uint32_t index)
{
    v->counts.kept_bytes -= soft_bytes(v, v->kept[index].n_tokens);
    free(v->kept[index].soft);
    v->kept[index] = v->kept[--v->n_kept];
}

/* Down to the bound, the longest unused first; what the call before handed
 * out may go now. */
static void
trim(struct ns_vision *v)
{
    while (v->n_kept > 0 && (v->counts.kept_bytes > v->cache_bytes ||
                             v->n_kept > MAX_KEPT / 2)) {
        uint32_t oldest = 0;

        for (uint32_t i = 1; i < v->n_kept; i++)
            if (v->kept[i].used < v->kept[oldest].used)
                oldest = i;
        let_go(v, oldest);
    }
}

static enum ns_status
make_room(struct ns_vision *v, const struct ns_image *image,
          struct kept **out, struct ns_error *err)
{
    struct kept *kept;
    float *soft;

    if (v->n_kept == MAX_KEPT)
        return ns_fail(err, NS_FATAL, "more than %d pictures in one pass",
                       MAX_KEPT / 2);
    soft = malloc(soft_bytes(v, image->size.n_tokens));
    if (!soft)
        return ns_fail(err, NS_FATAL, "out of memory for image soft tokens");
    kept = &v->kept[v->n_kept++];
    memcpy(kept->digest, image->digest, sizeof(kept->digest));
    kept->n_tokens = image->size.n_tokens;
    kept->used = v->n_calls;
    kept->soft = soft;
    v->counts.kept_bytes += soft_bytes(v, kept->n_tokens);
    *out = kept;
    return NS_OK;
}

/* What was not encoded is not kept: a run's pictures are the last ones. */
static void
forget_run(struct ns_vision *v, const struct run *run)
{
    for (uint32_t i = 0; i < run->n_images; i++)
        let_go(v, v->n_kept - 1);
}

/* Runs what has been gathered. */
static enum ns_status
finish_run(struct ns_vision *v, struct run *run, struct ns_error *err)
{
    enum ns_status status = NS_OK;

    if (run->n_images > 0)
        status = run_tower(v, run, err);
    if (status == NS_OK)
        v->counts.n_encoded += run->n_images;
    else
        forget_run(v, run);
    run->n_images = run->n_patches = run->n_tokens = 0;
    return status;
}

static enum ns_status
add_to_run(struct ns_vision *v, struct run *run, const struct ns_image *image,
           struct ns_error *err)
{
    uint32_t side = v->model->config.vision.pooling;
    uint32_t n_tokens = image->size.n_tokens;
    uint32_t n_patches = n_tokens * side * side, i;
    enum ns_status status;

    if (run->n_images == MAX_RUN_IMAGES ||
        run->n_tokens + n_tokens > v->max_tokens) {
        status = finish_run(v, run, err);
        if (status != NS_OK)
            return status;
    }
    i = run->n_images;
    status = make_room(v, image, &run->into[i], err);
    if (status != NS_OK)
        return status;
    run->image[i] = image;
    run->segment[i] = (struct ns_segment){
        .row0 = run->n_patches,
        .n_rows = n_patches,
        .kind = NS_SEGMENT_CANVAS,
    };
    run->n_images++;
    run->n_tokens += n_tokens;
    run->n_patches += n_patches;
    return NS_OK;
}

enum ns_status
ns_vision_encode(struct ns_vision *v, const struct ns_image *const *images,
                 uint32_t n, const float **soft, struct ns_error *err)
{
    struct run run = { 0 };
    enum ns_status status = NS_OK;

    v->n_calls++;
    trim(v);
    v->counts.n_asked += n;
    for (uint32_t i = 0; i < n && status == NS_OK; i++) {
        struct kept *kept = find(v, images[i]->digest);

        if (kept)
            kept->used = v->n_calls;
        else
            status = add_to_run(v, &run, images[i], err);
    }
    if (status == NS_OK)
        status = finish_run(v, &run, err);
    else
        forget_run(v, &run);
    for (uint32_t i = 0; i < n && status == NS_OK; i++)
        soft[i] = find(v, images[i]->digest)->soft;
    return status;
}
