#include "engine/memory.h"

#include <string.h>

#include "engine/forward.h"
#include "engine/kvcache.h"
#include "engine/vision.h"

/* What the cache of pictures holds by default, at the usual budget each. */
enum { KEPT_IMAGES = 32 };

static uint64_t
at_most(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Of a card what it has left, but for a sixteenth for the driver, and what the
 * weights have taken of it; of a machine three quarters of what is left. */
static uint64_t
default_bytes(const struct ns_model *model, bool cuda)
{
    uint64_t left = model->backend->ops->available_bytes(model->backend);

    if (!cuda)
        return left / 4 * 3;
    return left - left / 16 +
           (model->weights.embedding.data ? model->weight_bytes : 0);
}

struct ns_engine_options
ns_memory_defaults(const struct ns_model *model,
                   const struct ns_engine_options *options)
{
    bool cuda = strcmp(model->backend->ops->name, "cuda") == 0;
    struct ns_engine_options o = *options;

    if (o.pass_tokens == 0)
        o.pass_tokens = cuda ? 8192 : 512;
    if (o.max_sequences == 0)
        o.max_sequences = cuda ? 64 : 16;
    if (o.memory_bytes == 0)
        o.memory_bytes = default_bytes(model, cuda);
    if (o.reserve_tokens == 0)
        o.reserve_tokens = 2048;
    if (o.age_step_s == 0)
        o.age_step_s = 600;
    if (o.image_cache_bytes == 0)
        o.image_cache_bytes = at_most((uint64_t)128 << 20,
                                      (uint64_t)KEPT_IMAGES * 280 *
                                          model->config.hidden *
                                          sizeof(float));
    return o;
}

uint32_t
ns_memory_chunk(const struct ns_model *model,
                const struct ns_engine_options *options)
{
    uint32_t length = model->config.canvas_length;

    return options->pass_tokens > length ? options->pass_tokens : length;
}

uint32_t
ns_memory_rows(const struct ns_model *model,
               const struct ns_engine_options *options)
{
    uint32_t rows = ns_memory_chunk(model, options);

    /* A picture goes into one pass whole. */
    return ns_model_sees(model) && rows < NS_IMAGE_MAX_TOKENS
               ? NS_IMAGE_MAX_TOKENS : rows;
}

enum ns_status
ns_memory_plan(const struct ns_model *model,
               const struct ns_engine_options *options,
               struct ns_memory_plan *out, struct ns_error *err)
{
    const struct ns_config *config = &model->config;
    uint32_t rows = ns_memory_rows(model, options);
    /* The last layer is always a full one. */
    uint32_t full_dim = config->layer[config->n_layers - 1].head_dim;
    uint32_t rotated = (uint32_t)((double)config->partial_rotary *
                                  (double)full_dim / 2);
    uint64_t context = (config->max_position + NS_PAGE - 1) / NS_PAGE;
    uint64_t window = (config->sliding_window - 1 +
                       ns_memory_chunk(model, options) + NS_PAGE - 1) /
                          NS_PAGE + 1;
    struct ns_memory_plan plan = { .weight_bytes = model->weight_bytes };
    uint64_t fixed, kv, wanted;

    ns_forward_bytes(model, rows, options->max_sequences,
                     &plan.workspace_bytes, &plan.canvas_bytes);
    if (ns_model_sees(model))
        plan.workspace_bytes += ns_vision_bytes(model) +
                                options->image_cache_bytes;
    plan.full_page_bytes = ns_kvcache_full_page_bytes(
        config, model->backend->kv_type, rotated, options->kv_plain);
    plan.sliding_page_bytes =
        ns_kvcache_sliding_page_bytes(config, model->backend->kv_type);
    fixed = plan.weight_bytes + plan.workspace_bytes + plan.canvas_bytes;
    window = at_most(window, context);

    /* Sliding layers: a window each, and a quarter more for shared prefixes;
     * full layers: the rest, up to every sequence at its longest. */
    wanted = options->kv_bytes;
    if (wanted == 0) {
        uint64_t one = context * plan.full_page_bytes +
                       window * plan.sliding_page_bytes;
        uint64_t usual = (uint64_t)256 << 20;

        wanted = one > usual ? one : usual;
        if (fixed < options->memory_bytes)
            wanted = at_most(wanted, options->memory_bytes - fixed);
    }
    plan.sliding_pages = (uint32_t)at_most(
        window * options->max_sequences * 5 / 4,
        plan.sliding_page_bytes ? wanted / 2 / plan.sliding_page_bytes
                                : 1);
    if (plan.sliding_page_bytes == 0)
        plan.sliding_pages = (uint32_t)(context * options->max_sequences);
    plan.sliding_bytes = plan.sliding_pages * plan.sliding_page_bytes;
    kv = wanted - at_most(wanted, plan.sliding_bytes);
    plan.full_pages = (uint32_t)at_most(
        context * options->max_sequences,
        plan.full_page_bytes ? kv / plan.full_page_bytes
                             : context * options->max_sequences);
    plan.full_bytes = plan.full_pages * plan.full_page_bytes;
    plan.total_bytes = fixed + plan.full_bytes + plan.sliding_bytes;
    if (plan.total_bytes > options->memory_bytes || plan.full_pages == 0 ||
        plan.sliding_pages == 0)
        return ns_refuse(err, "over_memory", "engine.memory",
                         "the model needs %.2f GB (weights %.2f, work %.2f, "
                         "prefix KV at least %.3f), %.2f GB are allowed",
                         (double)plan.total_bytes / 1e9,
                         (double)plan.weight_bytes / 1e9,
                         (double)(plan.workspace_bytes + plan.canvas_bytes) /
                             1e9,
                         (double)(plan.full_page_bytes +
                                  plan.sliding_page_bytes) / 1e9,
                         (double)options->memory_bytes / 1e9);
    *out = plan;
    return NS_OK;
}

enum ns_status
ns_engine_plan_memory(const struct ns_model *model,
                      const struct ns_engine_options *options,
                      struct ns_memory_plan *out, struct ns_error *err)
{
    struct ns_engine_options o = ns_memory_defaults(model, options);

    return ns_memory_plan(model, &o, out, err);
}
