/* vectors - runs whatever golden cases a directory holds.
 *
 *     vectors [DIR [ISA [ARITHMETIC [BACKEND]]]]
 *
 * One line a case, with the largest error against its tolerance; exit status 1
 * if any failed. Groups are folders with an optional model/; what a case is
 * follows from the tensors that its manifest lists. Each forward case runs
 * with plain and with compact KV, whole and in chunks.
 */
#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine.h"
#include "engine/prompt.h"
#include "engine/rng.h"
#include "engine/safetensors.h"
#include "engine/sampler.h"
#include "engine/trace.h"
#include "tests/rig.h"

static struct ns_backend_options backend;
static unsigned n_passed, n_failed, n_left_out;
static const char *root;

/* ---- one case ----------------------------------------------------------- */

struct kase {
    char group[256], name[256], model[600];
    json_t *manifest;
    struct ns_safetensors *tensors;
    double worst;      /* largest error as a share of its tolerance */
    char worst_at[64], problem[256];
};

static void __attribute__((format(printf, 2, 3)))
wrong(struct kase *k, const char *format, ...)
{
    va_list ap;

    if (k->problem[0])
        return;
    va_start(ap, format);
    vsnprintf(k->problem, sizeof(k->problem), format, ap);
    va_end(ap);
}

static bool
has(struct kase *k, const char *name)
{
    return json_object_get(json_object_get(k->manifest, "tensors"), name);
}

static const struct ns_stored_tensor *
tensor(struct kase *k, const char *format, ...)
{
    const struct ns_stored_tensor *t;
    char name[128];
    va_list ap;

    va_start(ap, format);
    vsnprintf(name, sizeof(name), format, ap);
    va_end(ap);
    t = ns_safetensors_find(k->tensors, name);
    if (!t)
        wrong(k, "tensor %s is missing", name);
    return t;
}

/* Tensors of a case file lie at any alignment: copies that live on. */
static void *copies[4096];
static unsigned n_copies;

static const void *
copy_of(const struct ns_stored_tensor *t)
{
    static const char zeros[1 << 20];
    void *copy;

    if (!t)
        return zeros;
    if (n_copies == sizeof(copies) / sizeof(copies[0])) {
        fprintf(stderr, "vectors: too many tensors in one case\n");
        exit(2);
    }
    copy = malloc(t->bytes ? t->bytes : 1);
    memcpy(copy, t->data, t->bytes);
    copies[n_copies++] = copy;
    return copy;
}

static void
forget_copies(void)
{
    while (n_copies)
        free(copies[--n_copies]);
}

static const float *
floats(struct kase *k, const char *name)
{
    return copy_of(tensor(k, "%s", name));
}

static const int32_t *
ints(struct kase *k, const char *name)
{
    return copy_of(tensor(k, "%s", name));
}

static uint32_t
dim(struct kase *k, const char *name, uint32_t axis)
{
    const struct ns_stored_tensor *t = tensor(k, "%s", name);

    return t && axis < t->rank ? (uint32_t)t->dim[axis] : 0;
}

static void
near(struct kase *k, const char *what, const float *got, const float *want,
     size_t n, double abs)
{
    double most = 0;

    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - (double)want[i]);

        if (!(error <= most)) /* NaN is the largest */
            most = isnan(error) ? HUGE_VAL : error;
    }
    if (most / abs > k->worst) {
        k->worst = most / abs;
        snprintf(k->worst_at, sizeof(k->worst_at), "%s %.2g", what, most);
    }
    if (most > abs)
        wrong(k, "%s differs by %.3g, allowed %.3g", what, most, abs);
}

static void
same(struct kase *k, const char *what, const int32_t *got,
     const int32_t *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            wrong(k, "%s: entry %zu is %d, expected %d", what, i, got[i],
                  want[i]);
            return;
        }
}

/* ---- forward cases ------------------------------------------------------ */

static bool bf16_model; /* compare fp32.* only: bf16 tensors are loose */

static void
compare_run(struct kase *k, struct rig *rig, const char *prefix, uint32_t n,
            uint32_t from)
{
    const struct ns_config *c = &rig->model->config;
    char name[128];

#define NAME(part) (snprintf(name, sizeof(name), "%s.%s", prefix, part), name)
    if (bf16_model) {
        snprintf(name, sizeof(name), "fp32.%s.logits", prefix);
        if (has(k, name))
            near(k, name, rig->logits,
                 floats(k, name) + (size_t)from * c->vocab,
                 (size_t)n * c->vocab, 5e-4);
        return;
    }
    if (has(k, NAME("layer_input0")))
        near(k, name, rig->input, floats(k, name) + (size_t)from * c->hidden,
             (size_t)n * c->hidden, 5e-5);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        uint32_t total = has(k, NAME("hidden")) ? dim(k, name, 1) : 0;

        if (total) {
            NAME("hidden");
            near(k, name, rig->hidden + (size_t)l * RIG_ROWS * c->hidden,
                 floats(k, name) + ((size_t)l * total + from) * c->hidden,
                 (size_t)n * c->hidden, 5e-5);
            NAME("router_weights");
            near(k, name,
                 rig->weights + (size_t)l * RIG_ROWS * c->top_k,
                 floats(k, name) + ((size_t)l * total + from) * c->top_k,
                 (size_t)n * c->top_k, 5e-6);
            NAME("router_probs");
            near(k, name,
                 rig->probs + (size_t)l * RIG_ROWS * c->n_experts,
                 floats(k, name) + ((size_t)l * total + from) * c->n_experts,
                 (size_t)n * c->n_experts, 5e-6);
            NAME("router_index");
            same(k, name,
                 rig->index + (size_t)l * RIG_ROWS * c->top_k,
                 ints(k, name) + ((size_t)l * total + from) * c->top_k,
                 (size_t)n * c->top_k);
        }
    }
    if (has(k, NAME("final_hidden")))
        near(k, name, rig->final_hidden,
             floats(k, name) + (size_t)from * c->hidden,
             (size_t)n * c->hidden, 5e-4);
    if (has(k, NAME("logits")))
        near(k, name, rig->logits, floats(k, name) + (size_t)from * c->vocab,
             (size_t)n * c->vocab, 5e-4);
#undef NAME
}

static bool
run(struct kase *k, struct rig *rig, enum ns_segment_kind kind,
    const int32_t *ids, uint32_t n, uint32_t position, const float *soft)
{
    struct ns_error err;

    if (rig_run(rig, kind, ids, n, position, soft, &err) == NS_OK)
        return true;
    wrong(k, "%s", err.text);
    return false;
}

static void
compare_kv(struct kase *k, struct rig *rig, uint32_t n)
{
    const struct ns_config *c = &rig->model->config;
    char name[64];

    for (uint32_t l = 0; l < c->n_layers && !bf16_model; l++) {
        uint32_t width = c->layer[l].n_kv_heads * c->layer[l].head_dim;
        float *key = malloc(width * sizeof(float));
        float *value = malloc(width * sizeof(float));

        snprintf(name, sizeof(name), "kv.%u.k", l);
        if (has(k, name)) {
            const float *want_k = floats(k, name), *want_v;

            snprintf(name, sizeof(name), "kv.%u.v", l);
            want_v = floats(k, name);
            for (uint32_t i = 0; i < n; i++) {
                rig_kv(rig, l, i, key, value);
                near(k, "cached k", key, want_k + (size_t)i * width, width,
                     5e-5);
                near(k, "cached v", value, want_v + (size_t)i * width, width,
                     5e-5);
            }
        }
        free(key);
        free(value);
    }
}

/* softmax(Z) . E * s, as the head makes it from the step before. */
static float *
soft_of(struct kase *k, struct rig *rig, const float *z, uint32_t n)
{
    const struct ns_config *c = &rig->model->config;
    struct ns_rows table = { NULL, c->vocab, c->hidden, c->hidden };
    float *soft = calloc((size_t)n * c->hidden, sizeof(float));
    int32_t *all = malloc(c->vocab * sizeof(int32_t));
    float *e = malloc((size_t)c->vocab * c->hidden * sizeof(float));
    double *p = malloc(c->vocab * sizeof(double));
    const struct ns_backend_ops *ops = rig->be->ops;
    void *device_ids, *device_table;
    struct ns_error err;

    (void)k;
    ops->alloc(rig->be, c->vocab * sizeof(int32_t), "ids", &device_ids, &err);
    ops->alloc(rig->be, (size_t)c->vocab * c->hidden * sizeof(float), "table",
               &device_table, &err);
    for (uint32_t i = 0; i < c->vocab; i++)
        all[i] = (int32_t)i;
    ops->upload(rig->be, device_ids, all, c->vocab * sizeof(int32_t));
    table.data = device_table;
    ops->embed(rig->be, table, &rig->model->weights.embedding, device_ids,
               1.0f);
    ops->download(rig->be, e, device_table,
                  (size_t)c->vocab * c->hidden * sizeof(float));
    for (uint32_t i = 0; i < n; i++) {
        double most = -INFINITY, sum = 0;

        for (uint32_t v = 0; v < c->vocab; v++)
            most = fmax(most, (double)z[i * c->vocab + v]);
        for (uint32_t v = 0; v < c->vocab; v++)
            sum += p[v] = exp((double)z[i * c->vocab + v] - most);
        for (uint32_t h = 0; h < c->hidden; h++) {
            double total = 0;

            for (uint32_t v = 0; v < c->vocab; v++)
                total += p[v] / sum * (double)e[(size_t)v * c->hidden + h];
            soft[i * c->hidden + h] =
                (float)(total *
                        (double)rig->model->weights.embedding_scale);
        }
    }
    ops->release(rig->be, device_ids);
    ops->release(rig->be, device_table);
    free(all);
    free(e);
    free(p);
    return soft;
}

/* Prefill in chunks of `chunk`; compares each part. */
static bool
prefill(struct kase *k, struct rig *rig, const char *prefix,
        const int32_t *ids, uint32_t n, uint32_t chunk, uint32_t position)
{
    for (uint32_t at = 0; at < n; at += chunk) {
        uint32_t part = n - at < chunk ? n - at : chunk;

        if (!run(k, rig, NS_SEGMENT_PREFILL, ids + at, part, position + at,
                 NULL))
            return false;
        if (prefix)
            compare_run(k, rig, prefix, part, at);
    }
    return true;
}

static void
forward_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    uint32_t n = dim(k, "prompt_ids", 0), l = dim(k, "canvas_ids", 0);
    const int32_t *canvas = ints(k, "canvas_ids");
    float *soft;

    if (!prefill(k, rig, "enc", ints(k, "prompt_ids"), n, chunk, 0))
        return;
    compare_kv(k, rig, n);
    if (!run(k, rig, NS_SEGMENT_CANVAS, canvas, l, n, NULL))
        return;
    compare_run(k, rig, "dec0", l, 0);
    soft = soft_of(k, rig, floats(k, "sc_logits"), l);
    if (run(k, rig, NS_SEGMENT_CANVAS, canvas, l, n, soft))
        compare_run(k, rig, "dec1", l, 0);
    free(soft);
}

static void
two_blocks_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    uint32_t n = dim(k, "prompt_ids", 0), b = dim(k, "block_ids", 0);

    if (prefill(k, rig, NULL, ints(k, "prompt_ids"), n, chunk, 0) &&
        prefill(k, rig, "enc_block", ints(k, "block_ids"), b, chunk, n) &&
        run(k, rig, NS_SEGMENT_CANVAS, ints(k, "canvas_ids"),
            dim(k, "canvas_ids", 0), n + b, NULL))
        compare_run(k, rig, "dec", dim(k, "canvas_ids", 0), 0);
}

static void
batch_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    uint32_t vocab = rig->model->config.vocab;
    struct ns_error err;
    char name[64];

    for (int r = 0;; r++) {
        uint32_t n, l, last;
        const int32_t *ids, *canvas;

        snprintf(name, sizeof(name), "row%d.prompt_ids", r);
        if (!has(k, name))
            return;
        n = dim(k, name, 0);
        ids = ints(k, name);
        if (rig_restart(rig, &err) != NS_OK ||
            !prefill(k, rig, NULL, ids, n, chunk, 0))
            return;
        last = (n - 1) % chunk;
        snprintf(name, sizeof(name), "row%d.enc_last_logits", r);
        near(k, name, rig->logits + (size_t)last * vocab, floats(k, name),
             vocab, 5e-4);
        snprintf(name, sizeof(name), "row%d.canvas_ids", r);
        l = dim(k, name, 0);
        canvas = ints(k, name);
        snprintf(name, sizeof(name), "row%d.dec_logits", r);
        if (run(k, rig, NS_SEGMENT_CANVAS, canvas, l, n, NULL))
            near(k, name, rig->logits, floats(k, name), (size_t)l * vocab,
                 5e-4);
    }
}

static void
ar_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    uint32_t vocab = rig->model->config.vocab;
    struct ns_error err;
    char name[64];

    for (int r = 0;; r++) {
        uint32_t n, steps, row;
        const int32_t *ids, *tokens;
        const float *logits;

        snprintf(name, sizeof(name), "run%d.prompt_ids", r);
        if (!has(k, name))
            return;
        n = dim(k, name, 0);
        ids = ints(k, name);
        snprintf(name, sizeof(name), "run%d.tokens", r);
        steps = dim(k, name, 0);
        tokens = ints(k, name);
        snprintf(name, sizeof(name), "run%d.logits", r);
        logits = floats(k, name);
        if (rig_restart(rig, &err) != NS_OK ||
            !prefill(k, rig, NULL, ids, n, chunk, 0))
            return;
        row = (n - 1) % chunk;
        for (uint32_t i = 0; i < steps; i++) {
            near(k, name, rig->logits + (size_t)row * vocab,
                 logits + (size_t)i * vocab, vocab, 5e-4);
            same(k, "greedy token", &rig->batch->argmax[row], &tokens[i], 1);
            if (!run(k, rig, NS_SEGMENT_AR, &tokens[i], 1, n + i, NULL))
                return;
            row = 0;
        }
    }
}

static void
probe_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    const struct ns_config *c = &rig->model->config;
    uint32_t n = dim(k, "prompt_ids", 0), l = dim(k, "canvas_ids", 0);
    const char *modes[] = { "enc", "dec" };
    char name[64];

    if (bf16_model) {
        wrong(k, "left to tests/engine/test_ops_golden");
        return;
    }
    if (!run(k, rig, NS_SEGMENT_PREFILL, ints(k, "prompt_ids"), n, 0, NULL))
        return;
    (void)chunk;
    compare_kv(k, rig, n);
    for (int m = 0; m < 2; m++) {
        uint32_t rows = m ? l : n;

        if (m && !run(k, rig, NS_SEGMENT_CANVAS, ints(k, "canvas_ids"), l, n,
                      NULL))
            return;
        for (uint32_t i = 0; i < c->n_layers; i++) {
            snprintf(name, sizeof(name), "%s.%u.layer_out", modes[m], i);
            if (has(k, name))
                near(k, name, rig->hidden + (size_t)i * RIG_ROWS * c->hidden,
                     floats(k, name), (size_t)rows * c->hidden, 5e-5);
        }
    }
}

static void
model_case(struct kase *k,
           void (*body)(struct kase *, struct rig *, uint32_t chunk))
{
    const uint32_t chunks[] = { RIG_ROWS, 7, 1 };

    for (int plain = 0; plain < 2; plain++)
        for (int i = 0; i < 3 && !k->problem[0]; i++) {
            struct ns_error err;
            struct rig rig;

            if (rig_open(&rig, k->model, &backend, plain, &err) != NS_OK) {
                wrong(k, "%s", err.text);
                return;
            }
            bf16_model = rig.model->dtype != NS_F32;
            body(k, &rig, chunks[i]);
            rig_close(&rig);
        }
}

/* ---- pictures ----------------------------------------------------------- */

enum { MAX_IMAGES = 2 };

struct eyes { /* what the tower's probe compares with */
    struct kase *k;
    const struct ns_model *model;
    uint32_t n_images, n_compared;
};

/* A copy of device rows, one behind the other; the caller's. */
static float *
host_rows(struct ns_backend *be, const struct ns_rows *rows)
{
    float *copy = malloc((size_t)rows->n_rows * rows->n_cols * sizeof(float));

    if (!copy)
        abort();
    for (uint32_t i = 0; i < rows->n_rows; i++)
        be->ops->download(be, copy + (size_t)i * rows->n_cols,
                          rows->data + i * rows->stride,
                          rows->n_cols * sizeof(float));
    return copy;
}

/* Rows of all images of the run, one behind the other, against their parts. */
static void
on_vision(void *ctx, const char *point, uint32_t layer,
          const struct ns_rows *rows)
{
    static const char *const points[][2] = {
        { "patch_embed", "patch_embed" }, { "patch_hidden", "layers" },
        { "pooled", "pooled" }, { "image_soft", "soft" },
    };
    struct eyes *eyes = ctx;
    const char *part = NULL;
    uint32_t row = 0;
    char name[64];
    float *got;

    for (int i = 0; i < 4; i++)
        if (strcmp(point, points[i][0]) == 0)
            part = points[i][1];
    if (!part)
        return;
    got = host_rows(eyes->model->backend, rows);
    for (uint32_t i = 0; i < eyes->n_images; i++) {
        bool layers = strcmp(part, "layers") == 0;
        const float *want;
        uint32_t n;

        snprintf(name, sizeof(name), "image%u.%s", i, part);
        n = dim(eyes->k, name, layers);
        want = floats(eyes->k, name) +
               (layers ? (size_t)layer * n * rows->n_cols : 0);
        if (row + n > rows->n_rows)
            wrong(eyes->k, "%s: the run has %u rows", name, rows->n_rows);
        for (uint32_t j = 0; j < n && row < rows->n_rows; j++, row++)
            near(eyes->k, name, got + (size_t)row * rows->n_cols,
                 want + (size_t)j * rows->n_cols, rows->n_cols, 5e-5);
        eyes->n_compared++;
    }
    free(got);
    if (row != rows->n_rows)
        wrong(eyes->k, "%s: %u rows, expected %u", point, rows->n_rows, row);
}

/* The resized picture that the recorded patches were cut from. */
static bool
image_of_patches(struct kase *k, const struct ns_vision_config *config,
                 uint32_t index, struct ns_image *out)
{
    uint32_t p = config->patch, n, columns = 0, rows = 0;
    const int32_t *place;
    const float *values;
    char name[64];

    snprintf(name, sizeof(name), "image%u.patches", index);
    if (!has(k, name))
        return false;
    n = dim(k, name, 0);
    values = floats(k, name);
    snprintf(name, sizeof(name), "image%u.positions", index);
    place = ints(k, name);
    for (uint32_t i = 0; i < n; i++) {
        columns = (uint32_t)place[2 * i] >= columns ? place[2 * i] + 1u
                                                    : columns;
        rows = (uint32_t)place[2 * i + 1] >= rows ? place[2 * i + 1] + 1u
                                                  : rows;
    }
    out->size = (struct ns_image_size){
        columns * p, rows * p, n / config->pooling / config->pooling
    };
    out->rgb = malloc((size_t)n * p * p * 3);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < p * p * 3; j++)
            out->rgb[((place[2 * i + 1] * p + j / (p * 3)) * columns +
                      place[2 * i]) * (size_t)(p * 3) + j % (p * 3)] =
                (uint8_t)lrintf(values[(size_t)i * p * p * 3 + j] * 255);
    memset(out->digest, (int)index + 1, sizeof(out->digest));
    return true;
}

/* What each row may see, by the batch's ranges, against the recorded mask. */
static void
compare_masks(struct kase *k, struct rig *rig, uint32_t n)
{
    const int32_t *lo[] = { rig->batch->pass.lo_full,
                            rig->batch->pass.lo_sliding };
    const char *names[] = { "mask.full_attention", "mask.sliding_attention" };

    for (int m = 0; m < 2; m++) {
        const uint8_t *mask = copy_of(tensor(k, "%s", names[m]));

        for (uint32_t i = 0; i < n * n; i++) {
            int32_t key = (int32_t)(i % n);
            bool sees = key >= lo[m][i / n] &&
                        key < rig->batch->pass.hi[i / n];

            if (sees != mask[i])
                wrong(k, "%s: row %u, key %d", names[m], i / n, key);
        }
    }
}

/* Groups go whole: `chunk` only cuts the text between them. */
static bool
prefill_around(struct kase *k, struct rig *rig, const int32_t *ids, uint32_t n,
               uint32_t chunk)
{
    for (uint32_t at = 0, part; at < n; at += part) {
        part = n - at < chunk ? n - at : chunk;
        for (uint32_t g = 0; g < rig->n_groups; g++) {
            const struct ns_batch_group *group = &rig->group[g];

            if (group->first < at + part && at + part < group->end)
                part = group->first > at ? group->first - at
                                         : group->end - at;
        }
        if (!run(k, rig, NS_SEGMENT_PREFILL, ids + at, part, at, NULL))
            return false;
        compare_run(k, rig, "enc", part, at);
        if (part == n)
            compare_masks(k, rig, n);
    }
    return true;
}

static void
see(struct kase *k, struct rig *rig, uint32_t chunk, struct ns_vision *vision)
{
    struct eyes eyes = { .k = k, .model = rig->model };
    struct ns_image image[MAX_IMAGES];
    const struct ns_image *images[MAX_IMAGES];
    struct ns_batch_group group[MAX_IMAGES];
    const float *soft[MAX_IMAGES];
    const int32_t *type = ints(k, "token_type");
    uint32_t n = dim(k, "prompt_ids", 0), l = dim(k, "canvas_ids", 0);
    uint32_t n_groups = 0, n_images = 0;
    struct ns_error err;

    while (n_images < MAX_IMAGES &&
           image_of_patches(k, &rig->model->config.vision, n_images,
                            &image[n_images])) {
        images[n_images] = &image[n_images];
        n_images++;
    }
    eyes.n_images = n_images;
    ns_vision_set_probe(vision, on_vision, &eyes);
    if (ns_vision_encode(vision, images, n_images, soft, &err) != NS_OK)
        wrong(k, "%s", err.text);
    if (eyes.n_compared != n_images * (3 + rig->model->config.vision.n_layers))
        wrong(k, "%u parts of the tower were compared", eyes.n_compared);
    for (uint32_t i = 0; i < n; i++)
        if (type[i] && (i == 0 || !type[i - 1]) && n_groups < n_images) {
            group[n_groups] = (struct ns_batch_group){
                i, i + image[n_groups].size.n_tokens, soft[n_groups]
            };
            n_groups++;
        }
    if (n_groups != n_images)
        wrong(k, "%u groups, %u images", n_groups, n_images);
    rig->group = group;
    rig->n_groups = n_groups;
    if (!k->problem[0] &&
        prefill_around(k, rig, ints(k, "prompt_ids"), n, chunk) &&
        run(k, rig, NS_SEGMENT_CANVAS, ints(k, "canvas_ids"), l, n, NULL))
        compare_run(k, rig, "dec", l, 0);
    rig->group = NULL;
    rig->n_groups = 0;
    while (n_images > 0)
        ns_image_fini(&image[--n_images]);
}

static void
vision_case(struct kase *k, struct rig *rig, uint32_t chunk)
{
    struct ns_vision *vision;
    struct ns_error err;

    if (ns_vision_create(rig->model, 1 << 20, &vision, &err) != NS_OK) {
        wrong(k, "%s", err.text);
        return;
    }
    see(k, rig, chunk, vision);
    ns_vision_destroy(vision);
}

/* ---- whole generation runs ---------------------------------------------- */

struct replay {
    struct kase *k;
    uint32_t n_rows, n_steps, length;
    const int32_t *block, *cur_step, *canvas_in, *sampled, *argmax,
        *canvas_out;
    const uint8_t *accepted, *finished;
    const float *entropy; /* NULL: not recorded */
    double worst_entropy;
    struct ns_image image; /* n_tokens 0: the prompt is text */
    struct ns_request_image shown; /* of the prompt */
};

/* Step of the recording that is this row's, or -1. */
static int
recorded(const struct replay *r, uint32_t block, uint32_t n_left)
{
    for (uint32_t s = 0; s < r->n_steps; s++)
        if ((uint32_t)r->block[s] == block &&
            (uint32_t)r->cur_step[s] == n_left)
            return (int)s;
    return -1;
}

static void
on_sampled(void *ctx, uint64_t id, const struct ns_canvas *canvas,
           const int32_t *argmax, int32_t *sampled, const float *entropy)
{
    struct replay *r = ctx;
    int s = recorded(r, canvas->block, canvas->n_left);
    size_t at = ((size_t)s * r->n_rows + id) * r->length;

    if (s < 0) {
        wrong(r->k, "row %u takes step %u of block %u, never recorded",
              (unsigned)id, canvas->n_left, canvas->block);
        return;
    }
    same(r->k, "step.canvas_in", canvas->token, r->canvas_in + at, r->length);
    same(r->k, "step.argmax", argmax, r->argmax + at, r->length);
    if (r->entropy)
        near(r->k, "step.entropy", entropy, r->entropy + at, r->length, 2e-5);
    memcpy(sampled, r->sampled + at, r->length * sizeof(int32_t));
}

static void
on_stepped(void *ctx, uint64_t id, const struct ns_canvas *canvas, bool done)
{
    struct replay *r = ctx;
    int s = recorded(r, canvas->block, canvas->n_left + 1);
    size_t at = ((size_t)(s < 0 ? 0 : s) * r->n_rows + id) * r->length;

    if (s < 0)
        return;
    for (uint32_t i = 0; i < r->length; i++)
        if (canvas->accepted[i] != r->accepted[at + i])
            wrong(r->k, "step.accepted differs at position %u", i);
    same(r->k, "step.canvas_out", canvas->token, r->canvas_out + at,
         r->length);
    if (r->finished &&
        done != (r->finished[(size_t)s * r->n_rows + id] ||
                     canvas->n_left == 0))
        wrong(r->k, "row %u, block %u, step %u: done is %d", (unsigned)id,
              canvas->block, canvas->n_left + 1, done);
}

/* A model folder of its own: the case's weights, its settings, a tokenizer. */
static void
make_model(struct kase *k, char *directory, const json_t *generation)
{
    const char *files[] = { "config.json", "model.safetensors",
                            "model.safetensors.index.json" };
    char from[1200], to[1200], cwd[512];
    json_t *config = json_deep_copy(generation);
    json_t *sampler = json_object();

    if (!mkdtemp(directory) || !getcwd(cwd, sizeof(cwd))) {
        wrong(k, "no temporary directory");
        return;
    }
    for (int i = 0; i < 3; i++) {
        snprintf(from, sizeof(from), "%s%s%s/%s",
                 k->model[0] == '/' ? "" : cwd,
                 k->model[0] == '/' ? "" : "/", k->model, files[i]);
        snprintf(to, sizeof(to), "%s/%s", directory, files[i]);
        if (access(from, R_OK) == 0 && symlink(from, to) != 0)
            wrong(k, "cannot link %s", to);
    }
    snprintf(from, sizeof(from),
             "%s/tests/cases/tokenizer/tiny/tokenizer.json", cwd);
    snprintf(to, sizeof(to), "%s/tokenizer.json", directory);
    if (symlink(from, to) != 0)
        wrong(k, "cannot link %s", to);
    json_object_set_new(sampler, "_cls_name",
                        json_string("EntropyBoundSamplerConfig"));
    json_object_set(sampler, "entropy_bound",
                    json_object_get(generation, "entropy_bound"));
    json_object_set_new(config, "sampler_config", sampler);
    json_object_del(config, "entropy_bound");
    snprintf(to, sizeof(to), "%s/generation_config.json", directory);
    if (json_dump_file(config, to, 0) != 0)
        wrong(k, "cannot write %s", to);
    json_decref(config);
}

static void
remove_model(const char *directory)
{
    const char *files[] = { "config.json", "model.safetensors",
                            "model.safetensors.index.json", "tokenizer.json",
                            "generation_config.json" };
    char path[1200];

    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof(path), "%s/%s", directory, files[i]);
        unlink(path);
    }
    rmdir(directory);
}

static void
compare_row(struct kase *k, const struct ns_engine *engine, uint32_t row,
            const struct ns_event *event, uint32_t n_total)
{
    const struct ns_generation *g = &ns_engine_model(engine)->generation;
    const int32_t *want = ints(k, "new_tokens") + (size_t)row * n_total;
    const float *rate = has(k, "tokens_per_forward")
                            ? floats(k, "tokens_per_forward") : NULL;
    float got = (float)event->usage.new_tokens /
                (float)event->usage.denoise_steps;
    uint32_t end = n_total;

    for (uint32_t i = 0; i < n_total && end == n_total; i++)
        for (uint32_t e = 0; e < g->n_eos; e++)
            if (want[i] == g->eos_id[e])
                end = i;
    if (event->n_tokens != end)
        wrong(k, "row %u has %u tokens, expected %u", row, event->n_tokens,
              end);
    else
        same(k, "new_tokens", event->tokens, want, end);
    if (rate)
        near(k, "tokens_per_forward", &got, &rate[row], 1, 1e-5);
    if ((event->finish == NS_FINISH_LENGTH) != (end == n_total))
        wrong(k, "row %u: finish is %d", row, event->finish);
}

static void
run_rows(struct kase *k, struct ns_engine *engine, struct replay *r,
         uint32_t first, uint32_t n, uint32_t pass_tokens)
{
    const struct ns_generation *g = &ns_engine_model(engine)->generation;
    uint32_t n_total = dim(k, "new_tokens", 1), n_done = 0;
    const int32_t *seeds = ints(k, "seeds");
    struct ns_error err;
    char name[64];

    (void)pass_tokens;
    for (uint32_t row = first; row < first + n; row++) {
        struct ns_request request = { .id = row, .mode = NS_MODE_DIFFUSION };

        snprintf(name, sizeof(name), "row%u.prompt_ids", row);
        if (r->image.size.n_tokens > 0) {
            snprintf(name, sizeof(name), "prompt_ids");
            request.images = &r->shown;
            request.n_images = 1;
        }
        request.prompt = ints(k, name);
        request.n_prompt = dim(k, name, 0);
        request.seed = (uint64_t)(int64_t)seeds[row];
        request.max_tokens = n_total;
        request.top_p = 1.0f;
        request.sampler = (struct ns_sampler_options){
            g->t_min, g->t_max, g->entropy_bound, g->max_denoising_steps,
            g->stability_threshold, g->confidence_threshold,
        };
        if (ns_engine_submit(engine, &request, &err) != NS_OK) {
            wrong(k, "%s", err.text);
            return;
        }
    }
    for (int pass = 0; n_done < n && pass < 2000; pass++) {
        struct ns_pass_report report;
        struct ns_event event;

        if (ns_engine_pass(engine, &report, &err) != NS_OK) {
            wrong(k, "%s", err.text);
            return;
        }
        while (ns_engine_next_event(engine, &event)) {
            if (event.kind == NS_EVENT_FAILED) {
                wrong(k, "row %u: %s", (unsigned)event.id, event.error.text);
                n_done++;
            } else if (event.kind == NS_EVENT_DONE) {
                compare_row(k, engine, (uint32_t)event.id, &event, n_total);
                n_done++;
            }
        }
    }
    if (n_done < n)
        wrong(k, "%u of %u rows never ended", n - n_done, n);
    if (!ns_kvcache_check(ns_engine_kvcache(engine)))
        wrong(k, "the page counts do not add up");
    (void)r;
}

/* The picture of a recorded run, out of the case that has its patches. */
static void
find_image(struct kase *k, struct replay *r)
{
    static const struct ns_vision_config config = { .patch = 4,
                                                    .pooling = 3 };
    struct kase other = *k;
    const int32_t *ids = ints(k, "prompt_ids");
    char path[1024];
    struct ns_error err;

    snprintf(path, sizeof(path), "%s/%s/one_image.json", root, k->group);
    other.manifest = json_load_file(path, 0, NULL);
    snprintf(path, sizeof(path), "%s/%s/one_image.safetensors", root,
             k->group);
    if (ns_safetensors_open_file(path, &other.tensors, &err) != NS_OK) {
        wrong(k, "%s", err.text);
        return;
    }
    if (!image_of_patches(&other, &config, 0, &r->image))
        wrong(k, "there is no picture");
    while (ids[r->shown.position] != 502 &&
           r->shown.position < dim(k, "prompt_ids", 0))
        r->shown.position++;
    r->shown.image = &r->image;
    ns_safetensors_close(other.tensors);
    json_decref(other.manifest);
}

static void
generation_case(struct kase *k)
{
    char directory[] = "/tmp/vectors-XXXXXX";
    struct replay r = {
        .k = k,
        .n_rows = dim(k, "step.sampled", 1),
        .n_steps = dim(k, "step.sampled", 0),
        .length = dim(k, "step.sampled", 2),
        .block = ints(k, "step.block"),
        .cur_step = ints(k, "step.cur_step"),
        .canvas_in = ints(k, "step.canvas_in"),
        .sampled = ints(k, "step.sampled"),
        .argmax = ints(k, "step.argmax"),
        .canvas_out = ints(k, "step.canvas_out"),
        .accepted = copy_of(tensor(k, "step.accepted")),
        .finished = has(k, "step.finished")
                        ? copy_of(tensor(k, "step.finished")) : NULL,
        .entropy = has(k, "step.entropy") ? floats(k, "step.entropy") : NULL,
    };
    struct ns_trace trace = { .ctx = &r, .sampled = on_sampled,
                              .stepped = on_stepped };
    const uint32_t budgets[] = { 512, 37 };

    if (has(k, "prompt_ids"))
        find_image(k, &r);
    make_model(k, directory, json_object_get(k->manifest, "generation"));
    for (int i = 0; i < 4 && !k->problem[0]; i++) {
        struct ns_engine_options options = {
            .model_directory = directory,
            .backend = backend,
            .pass_tokens = budgets[i % 2],
            .max_sequences = 4,
            .kv_bytes = 32 << 20,
            .kv_plain = i / 2,
        };
        struct ns_engine *engine = NULL;
        struct ns_error err;

        if (ns_engine_open(&options, &engine, &err) != NS_OK) {
            wrong(k, "%s", err.text);
            break;
        }
        ns_engine_set_trace(engine, &trace);
        run_rows(k, engine, &r, 0, r.n_rows, budgets[i % 2]);
        for (uint32_t row = 0; row < r.n_rows && r.n_rows > 1; row++)
            run_rows(k, engine, &r, row, 1, budgets[i % 2]);
        ns_engine_close(engine);
    }
    ns_image_fini(&r.image);
    remove_model(directory);
}

/* ---- sampler, rope -------------------------------------------------------- */

static void
sampler_step_case(struct kase *k)
{
    const json_t *settings = json_object_get(k->manifest, "settings");
    uint32_t n_rows = dim(k, "logits", 0), l = dim(k, "logits", 1);
    uint32_t v = dim(k, "logits", 2);
    uint32_t n = (uint32_t)json_integer_value(
        json_object_get(k->manifest, "cur_step"));
    float t = ns_sampler_temperature(
        (float)json_real_value(json_object_get(settings, "t_min")),
        (float)json_real_value(json_object_get(settings, "t_max")), n,
        (uint32_t)json_integer_value(
            json_object_get(settings, "max_denoising_steps")));
    float bound =
        (float)json_number_value(json_object_get(settings, "entropy_bound"));
    const float *logits = floats(k, "logits"), *want = floats(k, "entropy");
    const float *noise = floats(k, "noise");
    const uint8_t *accepted = copy_of(tensor(k, "accepted"));
    float *entropy = malloc(l * sizeof(float));
    uint8_t *got = malloc(l);
    uint32_t *order = malloc(l * sizeof(uint32_t));

    near(k, "temperature", &t, floats(k, "temperature"), 1, 2e-7);
    for (uint32_t r = 0; r < n_rows; r++) {
        float mean;

        for (uint32_t i = 0; i < l; i++) {
            const float *row = logits + ((size_t)r * l + i) * v;
            const float *e = noise + ((size_t)r * l + i) * v;
            double most = -INFINITY, sum = 0, s = 0, race = -INFINITY;
            int32_t best = 0, winner = 0;

            for (uint32_t x = 0; x < v; x++) {
                if ((double)(row[x] / t) > most) {
                    most = (double)(row[x] / t);
                    best = (int32_t)x;
                }
            }
            for (uint32_t x = 0; x < v; x++) {
                double d = (double)(row[x] / t) - most;

                sum += exp(d);
                s += d * exp(d);
                if (d - log((double)e[x]) > race) {
                    race = d - log((double)e[x]);
                    winner = (int32_t)x;
                }
            }
            entropy[i] = (float)(log(sum) - s / sum);
            same(k, "argmax", &best, ints(k, "argmax") + r * l + i, 1);
            same(k, "sampled", &winner, ints(k, "sampled") + r * l + i, 1);
        }
        near(k, "entropy", entropy, want + (size_t)r * l, l, 5e-6);
        ns_sampler_accept(want + (size_t)r * l, l, bound, got, order);
        for (uint32_t i = 0; i < l; i++)
            if (got[i] != accepted[r * l + i])
                wrong(k, "row %u: acceptance differs at %u", r, i);
        mean = ns_sampler_mean(want + (size_t)r * l, l);
        near(k, "mean_entropy", &mean, floats(k, "mean_entropy") + r, 1,
             5e-6);
    }
    free(entropy);
    free(got);
    free(order);
}

static void
accept_rule_case(struct kase *k)
{
    uint32_t n = dim(k, "entropy", 0), l = dim(k, "entropy", 1);
    const float *entropy = floats(k, "entropy"), *bound = floats(k, "bound");
    const int32_t *length = ints(k, "length");
    const uint8_t *accepted = copy_of(tensor(k, "accepted"));
    uint8_t got[64];
    uint32_t order[64];

    for (uint32_t t = 0; t < n; t++) {
        ns_sampler_accept(entropy + (size_t)t * l, (uint32_t)length[t],
                          bound[t], got, order);
        for (int32_t i = 0; i < length[t]; i++)
            if (got[i] != accepted[t * l + (uint32_t)i])
                wrong(k, "test %u: acceptance differs at %d", t, i);
    }
}

/* Drives real canvases with the recorded argmax and an entropy that has the
 * recorded mean. */
static void
stop_rule_case(struct kase *k)
{
    uint32_t steps = dim(k, "argmax", 0), n_rows = dim(k, "argmax", 1);
    uint32_t l = dim(k, "argmax", 2);
    const int32_t *argmax = ints(k, "argmax");
    const float *mean = floats(k, "mean_entropy");
    const uint8_t *finished = copy_of(tensor(k, "finished"));
    struct ns_denoise_options options = {
        .t_min = 0.4f, .t_max = 0.8f, .entropy_bound = 0.1f,
        .max_steps = steps + 1, .vocab = 32,
        .stability_threshold = (uint32_t)json_integer_value(
            json_object_get(k->manifest, "stability_threshold")),
        .confidence_threshold = (float)json_number_value(
            json_object_get(k->manifest, "confidence_threshold")),
    };

    for (uint32_t r = 0; r < n_rows; r++) {
        struct ns_canvas canvas;
        struct ns_error err = { .status = NS_OK };
        float entropy[64];

        if (ns_canvas_init(&canvas, l, &err) != NS_OK)
            return;
        ns_canvas_start(&canvas, &options, l, 0, NULL, 0);
        for (uint32_t s = 0; s < steps; s++) {
            const int32_t *best = argmax + ((size_t)s * n_rows + r) * l;
            bool done;

            for (uint32_t i = 0; i < l; i++)
                entropy[i] = mean[s * n_rows + r];
            done = ns_canvas_step(&canvas, &options, best, best, entropy,
                                  &err);
            if (done != finished[s * n_rows + r])
                wrong(k, "row %u, step %u: done is %d", r, s, done);
        }
        ns_canvas_fini(&canvas);
    }
}

static void
rope_case(struct kase *k)
{
    const char *kinds[] = { "sliding_attention", "full_attention" };
    uint32_t n = dim(k, "positions", 0);
    const int32_t *positions = ints(k, "positions");
    char name[64];

    for (int i = 0; i < 2; i++) {
        uint32_t half;
        const float *f, *want_cos, *want_sin;

        snprintf(name, sizeof(name), "%s.inv_freq", kinds[i]);
        half = dim(k, name, 0);
        f = floats(k, name);
        snprintf(name, sizeof(name), "%s.cos", kinds[i]);
        want_cos = floats(k, name);
        snprintf(name, sizeof(name), "%s.sin", kinds[i]);
        want_sin = floats(k, name);
        for (uint32_t p = 0; p < n; p++)
            for (uint32_t j = 0; j < half; j++) {
                float angle = (float)positions[p] * f[j];
                float c = cosf(angle), s = sinf(angle);

                near(k, "cos", &c, &want_cos[p * half + j], 1, 2e-6);
                near(k, "sin", &s, &want_sin[p * half + j], 1, 2e-6);
            }
    }
}

/* The end-token rule, through a sequence's way of taking tokens, is asserted by
 * the whole runs; here its table against the plain rule. */
static void
finalize_case(struct kase *k)
{
    uint32_t n = dim(k, "canvas", 0), l = dim(k, "canvas", 1);
    const json_t *eos = json_object_get(k->manifest, "eos");
    const int32_t *canvas = ints(k, "canvas"), *result = ints(k, "result");
    const uint8_t *before = copy_of(tensor(k, "finished_before"));
    const uint8_t *finished = copy_of(tensor(k, "finished"));

    for (uint32_t t = 0; t < n; t++) {
        bool over = before[t];

        for (uint32_t i = 0; i < l; i++) {
            int32_t id = over ? 0 : canvas[t * l + i];
            const json_t *end;
            size_t e;

            same(k, "result", &id, &result[t * l + i], 1);
            json_array_foreach(eos, e, end)
                if (!over && json_integer_value(end) == id)
                    over = true;
        }
        if (over != finished[t])
            wrong(k, "test %u: finished is %d", t, over);
    }
}

/* ---- lines of text -------------------------------------------------------- */

static void
report(struct kase *k)
{
    bool bad = k->problem[0] != '\0';

    printf("%-6s %s/%-24s %s%s\n", bad ? "FAILED" : "ok", k->group, k->name,
           bad ? k->problem : k->worst_at[0] ? "largest error " : "identical",
           bad ? "" : k->worst_at);
    if (!bad && k->worst_at[0])
        printf("%38s %.0f %% of its tolerance\n", "", 100 * k->worst);
    bad ? n_failed++ : n_passed++;
}

static void
text_lines(const char *group, const char *path, const char *name,
           void (*body)(struct kase *, const json_t *))
{
    struct kase k = { .worst = 0 };
    FILE *file = fopen(path, "re");
    char *line = NULL;
    size_t size = 0;

    snprintf(k.group, sizeof(k.group), "%s", group);
    snprintf(k.name, sizeof(k.name), "%s", name);
    if (!file)
        return;
    while (getline(&line, &size, file) > 0) {
        json_t *json = json_loads(line, JSON_ALLOW_NUL, NULL);

        if (!json)
            wrong(&k, "a line is not JSON");
        else
            body(&k, json);
        json_decref(json);
    }
    free(line);
    fclose(file);
    report(&k);
}

static void
chat_line(struct kase *k, const json_t *line)
{
    const json_t *request = json_object_get(line, "request");
    const json_t *from = request ? request : line;
    const json_t *generation = json_object_get(from, "add_generation_prompt");
    const json_t *want = json_object_get(line, request ? "prompt" : "text");
    struct ns_prompt_options options = {
        .thinking = json_is_true(json_object_get(from, "enable_thinking")),
        .generation_prompt = generation ? json_is_true(generation) : true,
        .preserve_thinking =
            json_is_true(json_object_get(from, "preserve_thinking")),
    };
    struct ns_prompt prompt;
    struct ns_error err;
    enum ns_status status =
        ns_prompt_render(json_object_get(from, "messages"),
                         json_object_get(from, "tools"), &options,
                         (size_t)16 << 20, &prompt, &err);

    if (!json_is_string(want)) {
        if (status == NS_OK)
            wrong(k, "a case that must be refused was rendered");
    } else if (status != NS_OK) {
        wrong(k, "refused: %s", err.text);
    } else if (prompt.text.length != json_string_length(want) ||
               memcmp(prompt.text.data, json_string_value(want),
                      prompt.text.length) != 0) {
        wrong(k, "a text differs: %.60s", prompt.text.data);
    }
    ns_prompt_fini(&prompt);
}

static struct ns_tokenizer *tokenizer;

static void
tokenizer_line(struct kase *k, const json_t *line)
{
    const json_t *text = json_object_get(line, "text");
    const json_t *ids = json_object_get(line, "ids");
    const json_t *decoded = json_object_get(line, "decoded");
    struct ns_ids got = { .limit = 1 << 20 };
    struct ns_error err;
    struct ns_buf out;
    int32_t *want = calloc(json_array_size(ids) + 1, sizeof(int32_t));
    const json_t *id;
    size_t i;

    json_array_foreach(ids, i, id)
        want[i] = (int32_t)json_integer_value(id);
    if (json_is_string(text) &&
        !json_is_true(json_object_get(line, "decode_only"))) {
        struct ns_span span = { json_string_value(text),
                                json_string_length(text), true };

        if (ns_tokenizer_encode(tokenizer, &span, 1, &got, &err) != NS_OK)
            wrong(k, "%s", err.text);
        else if (got.n != json_array_size(ids))
            wrong(k, "%zu ids, expected %zu, for %.60s", got.n,
                  json_array_size(ids), json_string_value(text));
        else
            same(k, "ids", got.id, want, got.n);
    }
    ns_buf_init(&out, 1 << 24);
    ns_tokenizer_decode(tokenizer, want, json_array_size(ids), false, &out);
    if (json_is_string(decoded) &&
        (out.length != json_string_length(decoded) ||
         (out.length && memcmp(out.data, json_string_value(decoded),
                               out.length) != 0)))
        wrong(k, "decoding differs for %.60s", json_string_value(decoded));
    ns_buf_fini(&out);
    ns_ids_fini(&got);
    free(want);
}

/* ---- the directory -------------------------------------------------------- */

static bool
run_case(struct kase *k)
{
    if (has(k, "dec0.logits") && has(k, "sc_logits"))
        model_case(k, forward_case);
    else if (has(k, "image0.patches"))
        model_case(k, vision_case);
    else if (has(k, "enc_block.logits"))
        model_case(k, two_blocks_case);
    else if (has(k, "row0.enc_last_logits"))
        model_case(k, batch_case);
    else if (has(k, "run0.tokens"))
        model_case(k, ar_case);
    else if (has(k, "step.sampled") && has(k, "seeds") &&
             (has(k, "row0.prompt_ids") || has(k, "prompt_ids")))
        generation_case(k);
    else if (has(k, "enc.0.layer_in") && has(k, "kv.0.k"))
        model_case(k, probe_case);
    else if (has(k, "rgb") && has(k, "resized"))
        wrong(k, "left to tests/engine/test_image");
    else if (has(k, "noise"))
        sampler_step_case(k);
    else if (has(k, "peak_logit"))
        stop_rule_case(k);
    else if (has(k, "finished_before"))
        finalize_case(k);
    else if (has(k, "bound") && has(k, "length"))
        accept_rule_case(k);
    else if (has(k, "sliding_attention.inv_freq"))
        rope_case(k);
    else
        return false;
    return true;
}

static void
run_file(const char *group, const char *file)
{
    struct kase k = { .worst = 0 };
    char path[1024];
    struct ns_error err;
    json_error_t json_error;
    const char *tensors;

    snprintf(k.group, sizeof(k.group), "%s", group);
    snprintf(k.name, sizeof(k.name), "%.*s", (int)(strlen(file) - 5), file);
    snprintf(path, sizeof(path), "%s/%s/%s", root, group, file);
    k.manifest = json_load_file(path, 0, &json_error);
    if (!json_object_get(k.manifest, "tensors_file"))
        goto out; /* a table, not a case */
    tensors = json_string_value(json_object_get(k.manifest, "tensors_file"));
    snprintf(path, sizeof(path), "%s/%s/%s", root, group, tensors);
    snprintf(k.model, sizeof(k.model), "%s/%s/model", root, group);
    if (ns_safetensors_open_file(path, &k.tensors, &err) != NS_OK) {
        wrong(&k, "%s", err.text);
        report(&k);
        goto out;
    }
    if (!run_case(&k) || strncmp(k.problem, "left to ", 8) == 0) {
        printf("-      %s/%-24s left out: %s\n", k.group, k.name,
               k.problem[0] ? k.problem : "of no known kind");
        n_left_out++;
    } else {
        report(&k);
    }
out:
    forget_copies();
    ns_safetensors_close(k.tensors);
    json_decref(k.manifest);
}

static int
by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void
run_group(const char *group)
{
    struct dirent **entries;
    char path[1024];
    int n;

    snprintf(path, sizeof(path), "%s/%s", root, group);
    n = scandir(path, &entries, NULL, by_name);
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        size_t length = strlen(name);

        if (length > 5 && strcmp(name + length - 5, ".json") == 0)
            run_file(group, name);
        if (length > 6 && strcmp(name + length - 6, ".jsonl") == 0) {
            struct ns_error err;

            snprintf(path, sizeof(path), "%s/%s/%s", root, group, name);
            if (strncmp(group, "chat", 4) == 0)
                text_lines(group, path, name, chat_line);
            else if (strcmp(name, "tiny.jsonl") == 0 &&
                     ns_tokenizer_open("tests/cases/tokenizer/tiny/"
                                       "tokenizer.json", &tokenizer,
                                       &err) == NS_OK) {
                text_lines(group, path, name, tokenizer_line);
                ns_tokenizer_close(tokenizer);
            }
        }
        free(entries[i]);
    }
    if (n >= 0)
        free(entries);
}

int
main(int argc, char **argv)
{
    struct dirent **entries;
    int n;

    root = argc > 1 ? argv[1] : "tests/cases";
    backend.isa = argc > 2 ? argv[2] : NULL;
    backend.arithmetic = argc > 3 ? argv[3] : "fp32";
    backend.name = argc > 4 ? argv[4] : NULL;
    backend.n_threads = 2;
    n = scandir(root, &entries, NULL, by_name);
    if (n < 0) {
        fprintf(stderr, "vectors: cannot read %s\n", root);
        return 2;
    }
    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.')
            run_group(entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    printf("%u passed, %u failed, %u left out\n", n_passed, n_failed,
           n_left_out);
    return n_failed || n_passed == 0;
}
