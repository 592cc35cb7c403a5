/* config.json and generation_config.json of arbitrary bytes: a refusal names
 * the file, and what is accepted holds to the limits that later sizes trust. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(bool holds)
{
    if (!holds)
        abort();
}

static void
check_config(const struct ns_config *c)
{
    uint64_t gate_up = 2ull * c->n_experts * c->expert_dim * c->hidden;

    check(c->n_layers >= 1 && c->n_layers <= NS_MAX_LAYERS);
    check(c->layer[c->n_layers - 1].full);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const struct ns_layer_config *layer = &c->layer[i];

        check(layer->head_dim >= 2 && layer->head_dim % 2 == 0);
        check(layer->n_kv_heads >= 1 &&
              c->n_heads % layer->n_kv_heads == 0);
        check((uint64_t)c->n_heads * layer->head_dim <= 1u << 20);
    }
    check(c->vocab >= 2 && c->hidden >= 1);
    check((uint64_t)c->vocab * c->hidden < 1ull << 40);
    check(gate_up < 1ull << 50);
    check(c->top_k >= 1 && c->top_k <= c->n_experts);
    check(c->canvas_length >= 1 && c->canvas_length < c->max_position);
    check(isfinite(c->eps) && c->eps > 0.0f);
    check(isfinite(c->softcap) && c->softcap > 0.0f);
    check(c->theta_full >= 1.0f && c->rope_factor > 0.0f);
    check(c->partial_rotary > 0.0 && c->partial_rotary <= 1.0);
    check(c->n_eos >= 1 && c->n_eos <= NS_MAX_EOS);
    check(c->pad_id >= 0 && (uint32_t)c->pad_id < c->vocab);
    check(c->image_id < (int32_t)c->vocab);
}

static void
check_generation(const struct ns_generation *g, const struct ns_config *c)
{
    check(g->max_denoising_steps >= 1);
    check(g->t_max > 0.0f && g->t_min >= 0.0f && g->t_min <= g->t_max);
    check(isfinite(g->entropy_bound) && isfinite(g->confidence_threshold));
    check(g->n_eos >= 1 && g->n_eos <= NS_MAX_EOS);
    for (uint32_t i = 0; i < g->n_eos; i++)
        check(g->eos_id[i] >= 0 && (uint32_t)g->eos_id[i] < c->vocab);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    struct ns_config config = { .vocab = 512, .eos_id = { 1 }, .n_eos = 1 };
    struct ns_generation generation;
    struct ns_error err;

    if (ns_config_parse(text, size, "fuzz", &config, &err) == NS_OK)
        check_config(&config);
    else
        check(strstr(err.text, "fuzz") != NULL);
    if (ns_generation_parse(text, size, "fuzz", &config, &generation, &err) ==
        NS_OK)
        check_generation(&generation, &config);
    else
        check(strstr(err.text, "fuzz") != NULL);
    return 0;
}
