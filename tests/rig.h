/* rig.h - a model on a backend without the engine around it, for tests.
 *
 * Runs single segments and catches what happens inside: layer outputs,
 * routing, whole logits, prefix KV. In tests/engine only: it links the engine
 * layer, so it is a header of static functions.
 */
#ifndef NS_TESTS_RIG_H
#define NS_TESTS_RIG_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/forward.h"
#include "engine/kvcache.h"
#include "engine/model.h"
#include "engine/vision.h"

struct rig {
    struct ns_backend *be;
    struct ns_model *model;
    struct ns_kvcache *kv;
    struct ns_batch *batch;
    struct ns_forward *fw;
    struct ns_kv_hold *hold;
    const struct ns_batch_group *group; /* of the sequence's pictures */
    uint32_t n_groups;
    /* caught by the last run; [layer][row][...] */
    float *hidden, *input, *final_hidden, *weights, *probs, *logits;
    int32_t *index;
    uint32_t n_rows;
};

enum { RIG_ROWS = 256 };

static void
rig_catch(void *ctx, const char *point, uint32_t layer,
          const struct ns_rows *rows)
{
    struct rig *rig = ctx;
    const struct ns_backend_ops *ops = rig->be->ops;
    float *to = NULL;

    if (!strcmp(point, "hidden"))
        to = rig->hidden + (size_t)layer * RIG_ROWS * rows->n_cols;
    else if (!strcmp(point, "input"))
        to = rig->input;
    else if (!strcmp(point, "final_hidden"))
        to = rig->final_hidden;
    else if (!strcmp(point, "router_weights"))
        to = rig->weights + (size_t)layer * RIG_ROWS * rows->n_cols;
    else if (!strcmp(point, "router_probs"))
        to = rig->probs + (size_t)layer * RIG_ROWS * rows->n_cols;
    else if (!strcmp(point, "router_index"))
        to = (float *)(void *)(rig->index +
                               (size_t)layer * RIG_ROWS * rows->n_cols);
    if (!to)
        return;
    for (uint32_t i = 0; i < rows->n_rows; i++)
        ops->download(rig->be, to + (size_t)i * rows->n_cols,
                      rows->data + i * rows->stride,
                      rows->n_cols * sizeof(float));
    if (!strcmp(point, "final_hidden"))
        ops->logits(rig->be, *rows, &rig->model->weights.embedding,
                    rig->model->config.softcap, rig->logits);
}

static void
rig_close(struct rig *rig)
{
    if (rig->kv)
        ns_kvcache_drop(rig->kv, rig->hold);
    ns_forward_destroy(rig->fw);
    ns_batch_destroy(rig->batch);
    ns_kvcache_destroy(rig->kv);
    ns_model_close(rig->model);
    ns_backend_close(rig->be);
    free(rig->hidden);
    free(rig->input);
    free(rig->final_hidden);
    free(rig->weights);
    free(rig->probs);
    free(rig->logits);
    free(rig->index);
    memset(rig, 0, sizeof(*rig));
}

/* Starts a new sequence: nothing is cached. */
static enum ns_status
rig_restart(struct rig *rig, struct ns_error *err)
{
    enum ns_status status;
    uint32_t cached;

    ns_kvcache_drop(rig->kv, rig->hold);
    rig->hold = NULL;
    status = ns_kvcache_declare(rig->kv, NULL, 0, NULL, 0, &rig->hold, err);
    if (status != NS_OK)
        return status;
    if (ns_kvcache_admit(rig->kv, rig->hold, 1024, &cached) != NS_ADMITTED)
        return ns_fail(err, NS_FATAL, "the rig's cache is full");
    return NS_OK;
}

static enum ns_status
rig_open(struct rig *rig, const char *directory,
         const struct ns_backend_options *backend, bool plain,
         struct ns_error *err)
{
    struct ns_kvcache_options kv = {
        .full_pages = 64, .sliding_pages = 64, .n_slots = 2,
        .max_positions = 2048, .chunk = RIG_ROWS, .plain = plain,
        .no_sharing = true,
    };
    const struct ns_config *config;
    enum ns_status status;
    size_t n;

    memset(rig, 0, sizeof(*rig));
    status = ns_backend_open(backend, &rig->be, err);
    if (status == NS_OK)
        status = ns_model_open(directory, rig->be, &rig->model, err);
    if (status != NS_OK)
        goto out;
    config = &rig->model->config;
    status = ns_kvcache_create(config, rig->model->weights.n_rotated_full,
                               rig->be, &kv, &rig->kv, err);
    if (status == NS_OK)
        status = ns_batch_create(rig->be, RIG_ROWS, 4, config->sliding_window,
                                 config->canvas_length, &rig->batch, err);
    if (status == NS_OK)
        status = ns_forward_create(rig->model, rig->kv, RIG_ROWS, 2, &rig->fw,
                                   err);
    if (status == NS_OK)
        status = rig_restart(rig, err);
    if (status != NS_OK)
        goto out;
    n = (size_t)RIG_ROWS * config->n_layers;
    rig->hidden = calloc(n * config->hidden, sizeof(float));
    rig->input = calloc((size_t)RIG_ROWS * config->hidden, sizeof(float));
    rig->final_hidden = calloc((size_t)RIG_ROWS * config->hidden,
                               sizeof(float));
    rig->weights = calloc(n * config->top_k, sizeof(float));
    rig->probs = calloc(n * config->n_experts, sizeof(float));
    rig->index = calloc(n * config->top_k, sizeof(int32_t));
    rig->logits = calloc((size_t)RIG_ROWS * config->vocab, sizeof(float));
    if (!rig->hidden || !rig->input || !rig->final_hidden || !rig->weights ||
        !rig->probs || !rig->index || !rig->logits)
        status = ns_fail(err, NS_FATAL, "out of memory for the rig");
    ns_forward_set_probe(rig->fw, rig_catch, rig);
out:
    if (status != NS_OK)
        rig_close(rig);
    return status;
}

/* One segment of `n` tokens behind `position` cached ones. `soft`: rows
 * [n][hidden] of a canvas's soft embedding, or NULL. */
static enum ns_status __attribute__((unused))
rig_run(struct rig *rig, enum ns_segment_kind kind, const int32_t *tokens,
        uint32_t n, uint32_t position, const float *soft,
        struct ns_error *err)
{
    struct ns_batch_segment segment = {
        .kind = kind, .slot = ns_kvcache_slot(rig->hold),
        .position = position, .n_tokens = n, .tokens = tokens,
        .soft_in = soft != NULL, .head = NS_HEAD_ALL,
        .inv_temperature = 1.0f, .top_p = 1.0f,
        .group = rig->group,
        .n_groups = kind == NS_SEGMENT_PREFILL ? rig->n_groups : 0,
    };

    if (soft) {
        struct ns_rows rows = ns_forward_soft(rig->fw, segment.slot);

        rig->be->ops->upload(rig->be, rows.data, soft,
                             (size_t)n * rows.n_cols * sizeof(float));
    }
    if (kind != NS_SEGMENT_CANVAS &&
        !ns_kvcache_extend(rig->kv, rig->hold, position + n))
        return ns_fail(err, NS_FATAL, "the rig has no pages left");
    rig->n_rows = n;
    ns_batch_reset(rig->batch);
    ns_batch_add(rig->batch, &segment);
    ns_batch_lay_out(rig->batch, ns_kvcache_table(rig->kv, true),
                     ns_kvcache_table(rig->kv, false),
                     ns_kvcache_table_stride(rig->kv));
    return ns_forward(rig->fw, rig->batch, err);
}

/* Key and value rows of a cached position: [kv heads][d] each. */
static void __attribute__((unused))
rig_kv(struct rig *rig, uint32_t layer, uint32_t position, float *k, float *v)
{
    struct ns_kv_layer kv = ns_kvcache_layer(rig->kv, layer);
    bool full = rig->model->config.layer[layer].full;
    const int32_t *table = ns_kvcache_table(rig->kv, full);
    uint32_t d = kv.head_dim, r = kv.n_rotated, at = position % NS_PAGE;
    float *page = malloc(kv.page_bytes), *norm = malloc(d * sizeof(float));
    int32_t index;

    rig->be->ops->download(rig->be, &index,
                           table + (size_t)ns_kvcache_slot(rig->hold) *
                                       ns_kvcache_table_stride(rig->kv) +
                               position / NS_PAGE, sizeof(index));
    rig->be->ops->download(rig->be, page,
                           (const char *)kv.base +
                               (size_t)index * kv.page_bytes, kv.page_bytes);
    rig->be->ops->download(rig->be, norm,
                           rig->model->weights.layer[layer].k_norm,
                           d * sizeof(float));
    for (uint32_t h = 0; h < kv.n_kv_heads; h++) {
        size_t width = kv.compact ? d + 2 * r : 2 * d;
        const float *head = page + (size_t)h * NS_PAGE * width;
        const float *first = head + (size_t)at * d;
        const float *second = head + (size_t)NS_PAGE * d +
                              (size_t)at * (kv.compact ? 2 * r : d);

        for (uint32_t j = 0; j < d; j++) {
            float value = kv.compact ? first[j] : second[j];
            float key = kv.compact ? first[j] * norm[j] : first[j];

            if (kv.compact && j < r)
                key = second[j];
            if (kv.compact && j >= d / 2 && j < d / 2 + r)
                key = second[r + j - d / 2];
            k[h * d + j] = key;
            v[h * d + j] = value;
        }
    }
    free(page);
    free(norm);
}

#endif
