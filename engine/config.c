/* config.c - config.json and generation_config.json: tables of what is read,
 * between which limits, and what stands for a missing field. Shapes have no
 * default: a file that leaves them out is not taken for the released model. */
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/json.h"
#include "engine/model.h"

enum {
    MAX_VOCAB = 1 << 22,
    MAX_HIDDEN = 1 << 16,
    MAX_INNER = 1 << 20, /* intermediate sizes */
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 1024,
    MAX_EXPERTS = 4096,
    MAX_TOP_K = 64,
    MAX_CANVAS = 4096,
    MAX_POSITION = 1 << 24, /* positions are exact in fp32 up to here */
    MAX_STEPS = 10000,
    REQUIRED = -1,
    DEFAULT_GLOBAL_HEAD_DIM = 512,
    FULL_EVERY = 6, /* where layer_types is absent */
};
/* With these limits the largest tensor, the experts' gate_up of one layer, has
 * 2^12 * 2^21 * 2^16 elements, and all sums of sizes stay below 2^60. */

/* One object of a file, as errors name it: "config.json: text_config.x". */
struct section {
    const json_t *object;
    const char *file, *prefix;
    struct ns_error *err;
};

static enum ns_status
refuse(const struct section *s, const char *key, const char *supported)
{
    char shown[64];

    return ns_refuse(s->err, "bad_model", key, "%s: %s%s is %s, supported: %s",
                     s->file, s->prefix, key,
                     ns_json_show(json_object_get(s->object, key), shown,
                                  sizeof(shown)),
                     supported);
}

/* NULL for a missing and for a null field. */
static const json_t *
given(const struct section *s, const char *key)
{
    const json_t *value = json_object_get(s->object, key);

    return json_is_null(value) ? NULL : value;
}

/* The object under `key`; absent (NULL) if it is missing or null. */
static enum ns_status
enter(const struct section *s, const char *key, const char *prefix,
      struct section *out)
{
    *out = *s;
    out->prefix = prefix;
    out->object = given(s, key);
    if (out->object && !json_is_object(out->object))
        return refuse(s, key, "an object");
    return NS_OK;
}

struct count {
    const char *key;
    size_t at; /* of a uint32_t in the struct that is filled in */
    uint32_t least, most;
    int64_t absent; /* the value of a missing or null field, or REQUIRED */
};

struct number {
    const char *key;
    size_t at; /* of a float */
    double least, most;
    double absent; /* NAN: required */
};

#define CONFIG(field) offsetof(struct ns_config, field)
#define VISION(field) offsetof(struct ns_vision_config, field)
#define GENERATION(field) offsetof(struct ns_generation, field)

static const struct count top_counts[] = {
    { "canvas_length", CONFIG(canvas_length), 1, MAX_CANVAS, 256 },
};

static const struct count text_counts[] = {
    { "vocab_size", CONFIG(vocab), 2, MAX_VOCAB, REQUIRED },
    { "hidden_size", CONFIG(hidden), 1, MAX_HIDDEN, REQUIRED },
    { "intermediate_size", CONFIG(intermediate), 1, MAX_INNER, REQUIRED },
    { "num_hidden_layers", CONFIG(n_layers), 1, NS_MAX_LAYERS, REQUIRED },
    { "num_attention_heads", CONFIG(n_heads), 1, MAX_HEADS, REQUIRED },
    { "num_experts", CONFIG(n_experts), 1, MAX_EXPERTS, REQUIRED },
    { "top_k_experts", CONFIG(top_k), 1, MAX_TOP_K, REQUIRED },
    { "moe_intermediate_size", CONFIG(expert_dim), 1, MAX_INNER, REQUIRED },
    { "sliding_window", CONFIG(sliding_window), 2, MAX_POSITION, REQUIRED },
    { "max_position_embeddings", CONFIG(max_position), 2, MAX_POSITION,
      262144 },
};

static const struct number text_numbers[] = {
    { "rms_norm_eps", CONFIG(eps), 1e-12, 0.1, 1e-6 },
    { "final_logit_softcapping", CONFIG(softcap), 1e-3, 1e6, 30.0 },
};

static const struct count vision_counts[] = {
    { "hidden_size", VISION(hidden), 1, MAX_HIDDEN, REQUIRED },
    { "intermediate_size", VISION(intermediate), 1, MAX_INNER, REQUIRED },
    { "num_hidden_layers", VISION(n_layers), 1, NS_MAX_LAYERS, REQUIRED },
    { "num_attention_heads", VISION(n_heads), 1, MAX_HEADS, REQUIRED },
    { "head_dim", VISION(head_dim), 4, MAX_HEAD_DIM, REQUIRED },
    { "patch_size", VISION(patch), 1, 64, REQUIRED },
    { "pooling_kernel_size", VISION(pooling), 1, 16, REQUIRED },
    { "position_embedding_size", VISION(n_positions), 1, 1 << 20, REQUIRED },
};

static const struct number vision_numbers[] = {
    { "rms_norm_eps", VISION(eps), 1e-12, 0.1, 1e-6 },
};

static const struct count generation_counts[] = {
    { "max_denoising_steps", GENERATION(max_denoising_steps), 1, MAX_STEPS,
      48 },
    { "stability_threshold", GENERATION(stability_threshold), 0, MAX_STEPS,
      1 },
};

static const struct number generation_numbers[] = {
    { "t_min", GENERATION(t_min), 0.0, 1e3, 0.4 },
    { "t_max", GENERATION(t_max), 1e-3, 1e3, 0.8 },
    { "confidence_threshold", GENERATION(confidence_threshold), 0.0, 1e6,
      0.005 },
};

#define N(table) (sizeof(table) / sizeof((table)[0]))

static enum ns_status
read_count(const struct section *s, const struct count *count, uint32_t *out)
{
    const json_t *value = given(s, count->key);
    char supported[64];
    json_int_t i;

    if (!value && count->absent != REQUIRED) {
        *out = (uint32_t)count->absent;
        return NS_OK;
    }
    i = json_integer_value(value);
    if (!json_is_integer(value) || i < count->least || i > count->most) {
        snprintf(supported, sizeof(supported), "%u to %u", count->least,
                 count->most);
        return refuse(s, count->key, supported);
    }
    *out = (uint32_t)i;
    return NS_OK;
}

static enum ns_status
read_number(const struct section *s, const struct number *number, double *out)
{
    const json_t *value = given(s, number->key);
    char supported[64];
    double d;

    if (!value && !isnan(number->absent)) {
        *out = number->absent;
        return NS_OK;
    }
    d = json_number_value(value);
    if (!json_is_number(value) || !(d >= number->least && d <= number->most)) {
        snprintf(supported, sizeof(supported), "%g to %g", number->least,
                 number->most);
        return refuse(s, number->key, supported);
    }
    *out = d;
    return NS_OK;
}

static enum ns_status
read_tables(const struct section *s, const struct count *counts,
            size_t n_counts, const struct number *numbers, size_t n_numbers,
            void *out)
{
    enum ns_status status;

    for (size_t i = 0; i < n_counts; i++) {
        uint32_t value;

        status = read_count(s, &counts[i], &value);
        if (status != NS_OK)
            return status;
        memcpy((char *)out + counts[i].at, &value, sizeof(value));
    }
    for (size_t i = 0; i < n_numbers; i++) {
        double value;
        float rounded;

        status = read_number(s, &numbers[i], &value);
        if (status != NS_OK)
            return status;
        rounded = (float)value;
        memcpy((char *)out + numbers[i].at, &rounded, sizeof(rounded));
    }
    return NS_OK;
}

/* A field that may be left out, but if given is this text. */
static enum ns_status
fixed_text(const struct section *s, const char *key, const char *wanted)
{
    const json_t *value = given(s, key);

    if (value && (!json_is_string(value) ||
                  strcmp(json_string_value(value), wanted) != 0))
        return refuse(s, key, wanted);
    return NS_OK;
}

static enum ns_status
required_text(const struct section *s, const char *key, const char *wanted)
{
    return given(s, key) ? fixed_text(s, key, wanted)
                         : refuse(s, key, wanted);
}

static enum ns_status
fixed_bool(const struct section *s, const char *key, bool wanted)
{
    const json_t *value = given(s, key);

    if (value && (!json_is_boolean(value) ||
                  json_boolean_value(value) != wanted))
        return refuse(s, key, wanted ? "true" : "false");
    return NS_OK;
}

static enum ns_status
read_bool(const struct section *s, const char *key, bool absent, bool *out)
{
    const json_t *value = given(s, key);

    if (value && !json_is_boolean(value))
        return refuse(s, key, "true or false");
    *out = value ? json_boolean_value(value) : absent;
    return NS_OK;
}

static enum ns_status
read_id(const struct section *s, const char *key, uint32_t vocab,
        int32_t absent, int32_t *out)
{
    const struct count id = { key, 0, 0, vocab - 1, absent };
    uint32_t value;
    enum ns_status status = read_count(s, &id, &value);

    if (status == NS_OK)
        *out = (int32_t)value;
    return status;
}

/* Writers name the image markers of the family even where the vocabulary is
 * too small to hold them; such a model has no images. */
static enum ns_status
read_image_id(const struct section *s, const char *key, uint32_t vocab,
              uint32_t absent, int32_t *out)
{
    const struct count id = { key, 0, 0, INT32_MAX, absent };
    uint32_t value;
    enum ns_status status = read_count(s, &id, &value);

    if (status == NS_OK)
        *out = value < vocab ? (int32_t)value : -1;
    return status;
}

/* One id or a list of them. Leaves *n alone when the field is not there. */
static enum ns_status
read_ids(const struct section *s, const char *key, uint32_t vocab,
         int32_t ids[NS_MAX_EOS], uint32_t *n)
{
    const json_t *value = given(s, key);
    size_t length = json_is_array(value) ? json_array_size(value) : 1;
    char supported[80];

    if (!value)
        return NS_OK;
    snprintf(supported, sizeof(supported),
             "an id below %u or a list of 1 to %d", vocab, NS_MAX_EOS);
    if (length == 0 || length > NS_MAX_EOS)
        return refuse(s, key, supported);
    for (size_t i = 0; i < length; i++) {
        const json_t *id =
            json_is_array(value) ? json_array_get(value, i) : value;

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= vocab)
            return refuse(s, key, supported);
        ids[i] = (int32_t)json_integer_value(id);
    }
    *n = (uint32_t)length;
    return NS_OK;
}

static enum ns_status
read_layer_types(const struct section *text, struct ns_config *config)
{
    const json_t *types = given(text, "layer_types");

    if (types && (!json_is_array(types) ||
                  json_array_size(types) != config->n_layers))
        return refuse(text, "layer_types",
                      "a list with one entry for each of num_hidden_layers");
    for (uint32_t i = 0; i < config->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));

        if (!types)
            config->layer[i].full = (i + 1) % FULL_EVERY == 0;
        else if (type && strcmp(type, "full_attention") == 0)
            config->layer[i].full = true;
        else if (!type || strcmp(type, "sliding_attention") != 0)
            return refuse(text, "layer_types",
                          "entries sliding_attention and full_attention");
    }
    /* The reference forces this whatever the list says. */
    config->layer[config->n_layers - 1].full = true;
    return NS_OK;
}

static const struct count head_dim = { "head_dim", 0, 2, MAX_HEAD_DIM,
                                       REQUIRED };
static const struct count n_kv_heads = { "num_key_value_heads", 0, 1,
                                         MAX_HEADS, REQUIRED };

/* The newer form: widths of single layers, over those of the whole. */
static enum ns_status
read_per_layer(const struct section *per_layer, struct ns_config *config)
{
    int width = snprintf(NULL, 0, "%u", config->n_layers - 1);
    const char *key, *field;
    json_t *value, *unused;

    json_object_foreach ((json_t *)per_layer->object, key, value) {
        char prefix[64], name[16], padded[16];
        struct section layer = *per_layer;
        enum ns_status status;
        uint32_t i;

        for (i = 0; i < config->n_layers; i++) {
            /* The reference writes "05" where layers have two digits. */
            snprintf(name, sizeof(name), "%u", i);
            snprintf(padded, sizeof(padded), "%0*u", width, i);
            if (strcmp(name, key) == 0 || strcmp(padded, key) == 0)
                break;
        }
        if (i == config->n_layers || !json_is_object(value) ||
            (strcmp(name, key) != 0 &&
             json_object_get(per_layer->object, name)))
            return ns_refuse(per_layer->err, "bad_model", "per_layer_config",
                             "%s: text_config.per_layer_config: entries must "
                             "be objects under the numbers 0 to %u",
                             per_layer->file, config->n_layers - 1);
        snprintf(prefix, sizeof(prefix), "text_config.per_layer_config.%u.",
                 i);
        layer.object = value;
        layer.prefix = prefix;
        json_object_foreach (value, field, unused)
            if (strcmp(field, head_dim.key) != 0 &&
                strcmp(field, n_kv_heads.key) != 0)
                return ns_refuse(per_layer->err, "bad_model",
                                 "per_layer_config",
                                 "%s: text_config.per_layer_config.%u: only "
                                 "head_dim and num_key_value_heads are "
                                 "supported", per_layer->file, i);
        status = NS_OK;
        if (given(&layer, head_dim.key))
            status = read_count(&layer, &head_dim, &config->layer[i].head_dim);
        if (status == NS_OK && given(&layer, n_kv_heads.key))
            status = read_count(&layer, &n_kv_heads,
                                &config->layer[i].n_kv_heads);
        if (status != NS_OK)
            return status;
    }
    return NS_OK;
}

/* What one cache pool and one table of frequencies a kind of layer need. */
static enum ns_status
check_layers(const struct section *text, const struct ns_config *config)
{
    const struct ns_layer_config *first[2] = { NULL, NULL };

    for (uint32_t i = 0; i < config->n_layers; i++) {
        const struct ns_layer_config *layer = &config->layer[i];

        if (layer->head_dim % 2 != 0)
            return ns_refuse(text->err, "bad_model", "head_dim",
                             "%s: layer %u: head size %u is odd", text->file,
                             i, layer->head_dim);
        if (config->n_heads % layer->n_kv_heads != 0)
            return ns_refuse(text->err, "bad_model", "num_key_value_heads",
                             "%s: layer %u: %u key heads do not divide %u "
                             "heads", text->file, i, layer->n_kv_heads,
                             config->n_heads);
        if (!first[layer->full])
            first[layer->full] = layer;
        if (layer->head_dim != first[layer->full]->head_dim ||
            layer->n_kv_heads != first[layer->full]->n_kv_heads)
            return ns_refuse(text->err, "bad_model", "per_layer_config",
                             "%s: layer %u has %u key heads of size %u, the "
                             "first of its kind %u of %u; one shape for each "
                             "kind is supported", text->file, i,
                             layer->n_kv_heads, layer->head_dim,
                             first[layer->full]->n_kv_heads,
                             first[layer->full]->head_dim);
    }
    return NS_OK;
}

static enum ns_status
read_layers(const struct section *text, struct ns_config *config)
{
    const struct count global_dim = { "global_head_dim", 0, 2, MAX_HEAD_DIM,
                                      DEFAULT_GLOBAL_HEAD_DIM };
    struct count global_kv = { "num_global_key_value_heads", 0, 1, MAX_HEADS,
                               0 };
    struct ns_layer_config base = { 0 }, full = { .full = true };
    struct section per_layer;
    enum ns_status status;

    status = read_layer_types(text, config);
    if (status == NS_OK)
        status = read_count(text, &head_dim, &base.head_dim);
    if (status == NS_OK)
        status = read_count(text, &n_kv_heads, &base.n_kv_heads);
    if (status == NS_OK)
        status = enter(text, "per_layer_config",
                       "text_config.per_layer_config.", &per_layer);
    if (status != NS_OK)
        return status;

    full.head_dim = base.head_dim;
    full.n_kv_heads = base.n_kv_heads;
    if (!per_layer.object) {
        global_kv.absent = base.n_kv_heads;
        status = read_count(text, &global_dim, &full.head_dim);
        if (status == NS_OK)
            status = read_count(text, &global_kv, &full.n_kv_heads);
        if (status != NS_OK)
            return status;
    }
    for (uint32_t i = 0; i < config->n_layers; i++)
        config->layer[i] = config->layer[i].full ? full : base;
    if (per_layer.object) {
        status = read_per_layer(&per_layer, config);
        if (status != NS_OK)
            return status;
    }
    return check_layers(text, config);
}

static enum ns_status
read_rope(const struct section *text, struct ns_config *config)
{
    static const struct number theta = { "rope_theta", 0, 1.0, 1e12, NAN };
    static const struct number whole = { "partial_rotary_factor", 0, 1.0, 1.0,
                                         1.0 };
    static const struct number part = { "partial_rotary_factor", 0, 1e-6, 1.0,
                                        NAN };
    static const struct number none = { "factor", 0, 1.0, 1.0, 1.0 };
    static const struct number factor = { "factor", 0, 1e-6, 1e6, 1.0 };
    double theta_sliding = 1e4, theta_full = 1e6, unused, divisor = 1.0;
    struct section rope, sliding, full;
    enum ns_status status;

    config->partial_rotary = 0.25;
    status = enter(text, "rope_parameters", "text_config.rope_parameters.",
                   &rope);
    if (status != NS_OK)
        return status;
    if (rope.object) {
        status = enter(&rope, "sliding_attention",
                       "text_config.rope_parameters.sliding_attention.",
                       &sliding);
        if (status == NS_OK)
            status = enter(&rope, "full_attention",
                           "text_config.rope_parameters.full_attention.",
                           &full);
        if (status != NS_OK)
            return status;
        if (!sliding.object)
            return refuse(&rope, "sliding_attention", "an object");
        if (!full.object)
            return refuse(&rope, "full_attention", "an object");
        if (!given(&sliding, "rope_type"))
            return refuse(&sliding, "rope_type", "default");
        if (!given(&full, "rope_type"))
            return refuse(&full, "rope_type", "proportional");
        status = fixed_text(&sliding, "rope_type", "default");
        if (status == NS_OK)
            status = fixed_text(&full, "rope_type", "proportional");
        if (status == NS_OK)
            status = read_number(&sliding, &theta, &theta_sliding);
        if (status == NS_OK)
            status = read_number(&sliding, &whole, &unused);
        if (status == NS_OK)
            status = read_number(&sliding, &none, &unused);
        if (status == NS_OK)
            status = read_number(&full, &theta, &theta_full);
        if (status == NS_OK)
            status = read_number(&full, &part, &config->partial_rotary);
        if (status == NS_OK)
            status = read_number(&full, &factor, &divisor);
        if (status != NS_OK)
            return status;
    }
    config->theta_sliding = (float)theta_sliding;
    config->theta_full = (float)theta_full;
    config->rope_factor = (float)divisor;
    for (uint32_t i = 0; i < config->n_layers; i++)
        if (config->layer[i].full &&
            config->partial_rotary * config->layer[i].head_dim < 2.0)
            return ns_refuse(text->err, "bad_model", "partial_rotary_factor",
                             "%s: partial_rotary_factor %g of head size %u "
                             "turns no pair", text->file,
                             config->partial_rotary,
                             config->layer[i].head_dim);
    return NS_OK;
}

static enum ns_status
read_text(const struct section *text, struct ns_config *config)
{
    const json_t *bidirectional = given(text, "use_bidirectional_attention");
    enum ns_status status;

    status = fixed_bool(text, "attention_bias", false);
    if (status == NS_OK)
        status = fixed_bool(text, "tie_word_embeddings", true);
    if (status == NS_OK)
        status = fixed_text(text, "hidden_activation", "gelu_pytorch_tanh");
    if (status == NS_OK)
        status = fixed_text(text, "use_bidirectional_attention", "vision");
    if (status == NS_OK)
        status = read_tables(text, text_counts, N(text_counts), text_numbers,
                             N(text_numbers), config);
    if (status != NS_OK)
        return status;
    config->vision_groups = bidirectional != NULL;
    if (config->top_k > config->n_experts)
        return refuse(text, "top_k_experts", "at most num_experts");

    status = read_layers(text, config);
    if (status == NS_OK)
        status = read_rope(text, config);
    if (status == NS_OK)
        status = read_id(text, "pad_token_id", config->vocab, 0,
                         &config->pad_id);
    if (status == NS_OK)
        status = read_id(text, "bos_token_id", config->vocab,
                         config->vocab > 2 ? 2 : 1, &config->bos_id);
    config->eos_id[0] = 1;
    config->n_eos = 1;
    if (status == NS_OK)
        status = read_ids(text, "eos_token_id", config->vocab,
                          config->eos_id, &config->n_eos);
    return status;
}

static enum ns_status
read_vision(const struct section *vision, struct ns_vision_config *config)
{
    static const struct number theta = { "rope_theta", 0, 1.0, 1e12, 100.0 };
    struct section rope;
    enum ns_status status;
    double base = 100.0;
    uint32_t n_kv;

    status = fixed_text(vision, "model_type", "gemma4_vision");
    if (status == NS_OK)
        status = fixed_bool(vision, "attention_bias", false);
    if (status == NS_OK)
        status = fixed_text(vision, "hidden_activation", "gelu_pytorch_tanh");
    if (status == NS_OK)
        status = read_tables(vision, vision_counts, N(vision_counts),
                             vision_numbers, N(vision_numbers), config);
    if (status != NS_OK)
        return status;
    if (config->head_dim % 4 != 0) /* two halves that turn in pairs */
        return refuse(vision, "head_dim", "multiples of 4");
    if (given(vision, n_kv_heads.key)) {
        status = read_count(vision, &n_kv_heads, &n_kv);
        if (status != NS_OK)
            return status;
        if (n_kv != config->n_heads)
            return refuse(vision, n_kv_heads.key,
                          "the same as num_attention_heads");
    }
    status = enter(vision, "rope_parameters", "vision_config.rope_parameters.",
                   &rope);
    if (status != NS_OK)
        return status;
    if (rope.object) {
        const char *type = json_string_value(given(&rope, "rope_type"));

        if (given(&rope, "rope_type") &&
            (!type ||
             (strcmp(type, "default") != 0 && strcmp(type, "axial") != 0)))
            return refuse(&rope, "rope_type", "default or axial");
        status = read_number(&rope, &theta, &base);
        if (status != NS_OK)
            return status;
    }
    config->rope_theta = (float)base;
    status = read_bool(vision, "standardize", false, &config->standardize);
    if (status == NS_OK)
        status = read_bool(vision, "use_clipped_linears", false,
                           &config->clipped);
    return status;
}

/* One side of a scheme: E4M3 without zero points, a scale by `strategy`. */
static enum ns_status
check_codes(const struct section *codes, const char *strategy, bool dynamic)
{
    enum ns_status status;

    if (json_integer_value(given(codes, "num_bits")) != 8)
        return refuse(codes, "num_bits", "8");
    status = required_text(codes, "type", "float");
    if (status == NS_OK)
        status = required_text(codes, "strategy", strategy);
    if (status == NS_OK)
        status = fixed_bool(codes, "symmetric", true);
    if (status == NS_OK && dynamic && !given(codes, "dynamic"))
        status = refuse(codes, "dynamic", "true");
    if (status == NS_OK)
        status = fixed_bool(codes, "dynamic", dynamic);
    if (status == NS_OK && given(codes, "group_size"))
        status = refuse(codes, "group_size", "null");
    if (status == NS_OK && given(codes, "block_structure"))
        status = refuse(codes, "block_structure", "null");
    return status;
}

/* Which matrices are stored so, the tensors say themselves: `targets` and
 * `ignore` are not needed. */
static enum ns_status
read_quantization(const struct section *top, struct ns_config *config)
{
    struct section q, groups, group, weights, rows;
    enum ns_status status;
    const char *name;
    json_t *value;

    status = enter(top, "quantization_config", "quantization_config.", &q);
    if (status != NS_OK || !q.object)
        return status;
    status = required_text(&q, "quant_method", "compressed-tensors");
    if (status == NS_OK)
        status = required_text(&q, "format", "float-quantized");
    if (status == NS_OK)
        status = fixed_text(&q, "quantization_status", "compressed");
    if (status == NS_OK && given(&q, "kv_cache_scheme"))
        status = refuse(&q, "kv_cache_scheme", "null");
    if (status == NS_OK && json_object_size(given(&q, "sparsity_config")) > 0)
        status = refuse(&q, "sparsity_config", "none");
    if (status == NS_OK)
        status = enter(&q, "config_groups",
                       "quantization_config.config_groups.", &groups);
    if (status == NS_OK && json_object_size(groups.object) == 0)
        status = refuse(&q, "config_groups", "an object of at least one group");
    if (status != NS_OK)
        return status;
    json_object_foreach((json_t *)groups.object, name, value)
    {
        char at[96], prefix[3][128];

        if (strlen(name) > 32)
            return refuse(&groups, "group_0", "names of at most 32 bytes");
        snprintf(at, sizeof(at), "quantization_config.config_groups.%s.",
                 name);
        snprintf(prefix[0], sizeof(prefix[0]), "%s", at);
        snprintf(prefix[1], sizeof(prefix[1]), "%sweights.", at);
        snprintf(prefix[2], sizeof(prefix[2]), "%sinput_activations.", at);
        status = enter(&groups, name, prefix[0], &group);
        if (status == NS_OK)
            status = enter(&group, "weights", prefix[1], &weights);
        if (status == NS_OK)
            status = enter(&group, "input_activations", prefix[2], &rows);
        if (status == NS_OK && !weights.object)
            status = refuse(&group, "weights", "an object");
        if (status == NS_OK && !rows.object)
            status = refuse(&group, "input_activations", "an object");
        if (status == NS_OK)
            status = check_codes(&weights, "channel", false);
        if (status == NS_OK)
            status = check_codes(&rows, "token", true);
        if (status == NS_OK && given(&group, "output_activations"))
            status = refuse(&group, "output_activations", "null");
        if (status == NS_OK)
            status = fixed_text(&group, "format", "float-quantized");
        if (status != NS_OK)
            return status;
    }
    config->fp8 = true;
    return NS_OK;
}

static enum ns_status
read_top(const struct section *top, struct ns_config *config)
{
    const json_t *architectures = given(top, "architectures");
    struct section text, vision;
    enum ns_status status;

    if (!json_is_object(top->object))
        return ns_refuse(top->err, "bad_model", NULL, "%s: not an object",
                         top->file);
    if (!given(top, "model_type"))
        return refuse(top, "model_type", "diffusion_gemma");
    status = fixed_text(top, "model_type", "diffusion_gemma");
    if (status != NS_OK)
        return status;
    if (architectures) {
        const char *name =
            json_string_value(json_array_get(architectures, 0));

        char shown[64];

        if (!name || strcmp(name, "DiffusionGemmaForBlockDiffusion") != 0)
            return ns_refuse(top->err, "bad_model", "architectures",
                             "%s: architectures[0] is %s, supported: "
                             "DiffusionGemmaForBlockDiffusion", top->file,
                             ns_json_show(json_array_get(architectures, 0),
                                          shown, sizeof(shown)));
    }
    status = read_quantization(top, config);
    if (status == NS_OK)
        status = fixed_bool(top, "tie_word_embeddings", true);
    if (status == NS_OK)
        status = enter(top, "text_config", "text_config.", &text);
    if (status == NS_OK)
        status = enter(top, "vision_config", "vision_config.", &vision);
    if (status != NS_OK)
        return status;
    if (!text.object)
        return refuse(top, "text_config", "an object");

    status = read_tables(top, top_counts, N(top_counts), NULL, 0, config);
    if (status == NS_OK)
        status = read_text(&text, config);
    if (status != NS_OK)
        return status;
    if (config->canvas_length >= config->max_position)
        return refuse(top, "canvas_length",
                      "less than text_config.max_position_embeddings");
    status = read_ids(top, "eos_token_id", config->vocab, config->eos_id,
                      &config->n_eos);
    if (status == NS_OK)
        status = read_image_id(top, "boi_token_id", config->vocab, 255999,
                               &config->image_begin_id);
    if (status == NS_OK)
        status = read_image_id(top, "image_token_id", config->vocab, 258880,
                               &config->image_id);
    if (status == NS_OK)
        status = read_image_id(top, "eoi_token_id", config->vocab, 258882,
                               &config->image_end_id);
    if (status == NS_OK && vision.object)
        status = read_vision(&vision, &config->vision);
    return status;
}

enum ns_status
ns_config_parse(const char *json, size_t length, const char *name,
                struct ns_config *out, struct ns_error *err)
{
    struct section top = { .file = name, .prefix = "", .err = err };
    struct ns_config config = { 0 };
    json_t *root = NULL;
    enum ns_status status;

    status = ns_json_parse(json, length, name, &root, err);
    if (status != NS_OK)
        return status;
    top.object = root;
    status = read_top(&top, &config);
    json_decref(root);
    if (status == NS_OK)
        *out = config;
    return status;
}

static enum ns_status
read_generation(const struct section *top, const struct ns_config *config,
                struct ns_generation *generation)
{
    static const struct number bound = { "entropy_bound", 0, 0.0, 1e6, 0.1 };
    struct section sampler;
    enum ns_status status;
    double value = bound.absent;

    if (!json_is_object(top->object))
        return ns_refuse(top->err, "bad_model", NULL, "%s: not an object",
                         top->file);
    status = read_tables(top, generation_counts, N(generation_counts),
                         generation_numbers, N(generation_numbers),
                         generation);
    if (status == NS_OK)
        status = enter(top, "sampler_config", "sampler_config.", &sampler);
    if (status == NS_OK && sampler.object) {
        status = fixed_text(&sampler, "_cls_name",
                            "EntropyBoundSamplerConfig");
        if (status == NS_OK)
            status = read_number(&sampler, &bound, &value);
    }
    if (status != NS_OK)
        return status;
    generation->entropy_bound = (float)value;
    if (generation->t_min > generation->t_max)
        return refuse(top, "t_min", "at most t_max");
    status = read_ids(top, "eos_token_id", config->vocab, generation->eos_id,
                      &generation->n_eos);
    if (status == NS_OK)
        status = read_id(top, "pad_token_id", config->vocab, config->pad_id,
                         &generation->pad_id);
    if (status == NS_OK)
        status = read_bool(top, "nightshift_ar_capable", true,
                           &generation->ar_capable);
    return status;
}

enum ns_status
ns_generation_parse(const char *json, size_t length, const char *name,
                    const struct ns_config *config,
                    struct ns_generation *out, struct ns_error *err)
{
    struct section top = { .file = name, .prefix = "", .err = err };
    struct ns_generation generation = { 0 };
    json_t *root = NULL;
    enum ns_status status;

    if (json) {
        status = ns_json_parse(json, length, name, &root, err);
    } else { /* no file: what an empty one gives */
        root = json_object();
        status = root ? NS_OK
                      : ns_fail(err, NS_FATAL, "out of memory reading %s",
                                name);
    }
    if (status != NS_OK)
        return status;
    memcpy(generation.eos_id, config->eos_id, sizeof(generation.eos_id));
    generation.n_eos = config->n_eos;
    top.object = root;
    status = read_generation(&top, config, &generation);
    json_decref(root);
    if (status == NS_OK)
        *out = generation;
    return status;
}
