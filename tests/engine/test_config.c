#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model.h"
#include "tests/fault.h"
#include "tests/tiny.h"

#define NAME "config.json"

/* --- good ones --------------------------------------------------------- */

static struct ns_config
parse_file(const char *directory)
{
    struct ns_config config;
    struct ns_error err;
    size_t length;
    char *text = tiny_read_file(directory, NAME, &length);

    if (ns_config_parse(text, length, NAME, &config, &err) != NS_OK)
        fail_msg("%s: %s", directory, err.text);
    free(text);
    return config;
}

static void
the_older_form_is_read(void **state)
{
    struct ns_config c = parse_file("tests/cases/text_fp32/model");

    (void)state;
    assert_int_equal(c.vocab, 512);
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.intermediate, 96);
    assert_int_equal(c.n_layers, 7);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.n_experts, 8);
    assert_int_equal(c.top_k, 2);
    assert_int_equal(c.expert_dim, 24);
    assert_int_equal(c.sliding_window, 16);
    assert_int_equal(c.canvas_length, 32);
    assert_int_equal(c.max_position, 4096);
    assert_true(c.eps == 1e-6f && c.softcap == 30.0f);
    assert_true(c.theta_sliding == 1e4f && c.theta_full == 1e6f);
    assert_true(c.partial_rotary == 0.25 && c.rope_factor == 1.0f);
    assert_true(c.vision_groups);
    assert_int_equal(c.pad_id, 0);
    assert_int_equal(c.bos_id, 2);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos_id[0], 1);
    assert_int_equal(c.eos_id[1], 106);
    assert_int_equal(c.image_begin_id, 500);
    assert_int_equal(c.image_end_id, 501);
    assert_int_equal(c.image_id, 502);
    for (uint32_t i = 0; i < 7; i++) {
        bool full = i == 2 || i == 6;

        assert_int_equal(c.layer[i].full, full);
        assert_int_equal(c.layer[i].head_dim, full ? 32 : 16);
        assert_int_equal(c.layer[i].n_kv_heads, full ? 1 : 2);
    }
    assert_int_equal(c.vision.hidden, 16);
    assert_int_equal(c.vision.n_positions, 32);
    assert_int_equal(c.vision.patch, 4);
    assert_int_equal(c.vision.pooling, 3);
    assert_true(c.vision.rope_theta == 100.0f);
    assert_true(c.vision.standardize);
    assert_false(c.vision.clipped);
    assert_false(c.vision.present); /* the tensors say that */
}

static void
the_newer_form_is_read(void **state)
{
    struct ns_config c = parse_file("tests/cases/text_bf16_sharded/model");

    (void)state;
    assert_int_equal(c.n_layers, 6);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(c.layer[i].full, i == 5);
        assert_int_equal(c.layer[i].head_dim, i == 5 ? 32 : 16);
        assert_int_equal(c.layer[i].n_kv_heads, i == 5 ? 1 : 2);
    }
}

static void
both_forms_of_one_model_give_one_configuration(void **state)
{
    struct tiny_recipe recipe = tiny_recipe();
    struct ns_config a, b;
    char *older = tiny_directory(), *newer = tiny_directory();

    (void)state;
    recipe.vision = true;
    tiny_write(&recipe, older);
    recipe.per_layer_config = true;
    tiny_write(&recipe, newer);
    a = parse_file(older);
    b = parse_file(newer);
    assert_memory_equal(&a, &b, sizeof(a));
    tiny_remove(older);
    tiny_remove(newer);
}

/* As transformers writes it once there are ten layers: "05", "11". */
static void
padded_layer_numbers_are_read_and_none_stands_twice(void **state)
{
    struct tiny_recipe recipe = tiny_recipe();
    char *directory = tiny_directory(), *text;
    struct ns_config a, b;
    struct ns_error err;
    json_t *root, *layers, *five;
    size_t length;

    (void)state;
    recipe.n_layers = 12;
    recipe.full_every = 6;
    recipe.per_layer_config = true;
    tiny_write(&recipe, directory);
    a = parse_file(directory);
    text = tiny_read_file(directory, NAME, &length);
    root = json_loadb(text, length, 0, NULL);
    free(text);
    layers = json_object_get(json_object_get(root, "text_config"),
                             "per_layer_config");
    five = json_object_get(layers, "5");
    assert_non_null(five);
    json_object_set(layers, "05", five);
    text = json_dumps(root, 0);
    assert_int_equal(ns_config_parse(text, strlen(text), NAME, &b, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "per_layer_config"));
    free(text);
    json_object_del(layers, "5");
    text = json_dumps(root, 0);
    assert_int_equal(ns_config_parse(text, strlen(text), NAME, &b, &err),
                     NS_OK);
    assert_memory_equal(&a, &b, sizeof(a));
    free(text);
    json_decref(root);
    tiny_remove(directory);
}

/* config.json as published for 26B-A4B (MODEL.md section 2): no layer types,
 * no rope, no ids beyond what the table there gives. */
static const char released[] =
    "{\"architectures\": [\"DiffusionGemmaForBlockDiffusion\"],"
    " \"model_type\": \"diffusion_gemma\", \"dtype\": \"bfloat16\","
    " \"text_config\": {\"vocab_size\": 262144, \"hidden_size\": 2816,"
    "  \"intermediate_size\": 2112, \"num_hidden_layers\": 30,"
    "  \"num_attention_heads\": 16, \"num_key_value_heads\": 8,"
    "  \"num_global_key_value_heads\": 2, \"head_dim\": 256,"
    "  \"sliding_window\": 1024, \"num_experts\": 128, \"top_k_experts\": 8,"
    "  \"moe_intermediate_size\": 704,"
    "  \"use_bidirectional_attention\": \"vision\"},"
    " \"vision_config\": {\"model_type\": \"gemma4_vision\","
    "  \"hidden_size\": 1152, \"intermediate_size\": 4304,"
    "  \"num_hidden_layers\": 27, \"num_attention_heads\": 16,"
    "  \"num_key_value_heads\": 16, \"head_dim\": 72, \"patch_size\": 16,"
    "  \"pooling_kernel_size\": 3, \"position_embedding_size\": 10240,"
    "  \"standardize\": true}}";

static void
the_released_model_is_read_with_its_defaults(void **state)
{
    struct ns_config c;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_config_parse(released, strlen(released), NAME, &c,
                                     &err), NS_OK);
    assert_int_equal(c.canvas_length, 256);
    assert_int_equal(c.max_position, 262144);
    assert_int_equal(c.image_begin_id, 255999);
    assert_int_equal(c.image_id, 258880);
    assert_int_equal(c.image_end_id, 258882);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_id[0], 1);
    assert_true(c.eps == 1e-6f && c.softcap == 30.0f);
    assert_true(c.theta_sliding == 1e4f && c.theta_full == 1e6f);
    assert_true(c.partial_rotary == 0.25);
    for (uint32_t i = 0; i < 30; i++) {
        bool full = i % 6 == 5;

        assert_int_equal(c.layer[i].full, full);
        assert_int_equal(c.layer[i].head_dim, full ? 512 : 256);
        assert_int_equal(c.layer[i].n_kv_heads, full ? 2 : 8);
    }
    assert_true(c.vision.rope_theta == 100.0f && c.vision.eps == 1e-6f);
}

/* --- one field changed ------------------------------------------------- */

/* The tiny configuration with `value` at a path like "text_config.head_dim"
 * (NULL: taken out). The caller frees. */
static char *
with(const char *path, json_t *value)
{
    struct tiny_recipe recipe = tiny_recipe();
    char *directory = tiny_directory(), *text, step[64];
    json_t *root, *at;
    const char *dot;
    size_t length;

    recipe.vision = true;
    tiny_write(&recipe, directory);
    text = tiny_read_file(directory, NAME, &length);
    root = json_loadb(text, length, 0, NULL);
    assert_non_null(root);
    free(text);
    tiny_remove(directory);
    for (at = root; (dot = strchr(path, '.')); path = dot + 1) {
        snprintf(step, sizeof(step), "%.*s", (int)(dot - path), path);
        if (!json_object_get(at, step))
            json_object_set_new(at, step, json_object());
        at = json_object_get(at, step);
    }
    if (value)
        json_object_set_new(at, path, value);
    else
        json_object_del(at, path);
    text = json_dumps(root, 0);
    assert_non_null(text);
    json_decref(root);
    return text;
}

/* The sentence holds all of `words`, separated by '|', and the file's name. */
static void
check_words(const struct ns_error *err, const char *words)
{
    char copy[400], *word, *rest = NULL;

    snprintf(copy, sizeof(copy), "%s|%s", NAME, words);
    for (word = strtok_r(copy, "|", &rest); word;
         word = strtok_r(NULL, "|", &rest))
        if (!strstr(err->text, word))
            fail_msg("\"%s\" does not say \"%s\"", err->text, word);
}

static void
expect(const char *path, json_t *value, const char *words)
{
    struct ns_config config, before;
    struct ns_error err = { 0 };
    char *text = with(path, value);

    memset(&config, 0x5a, sizeof(config));
    before = config;
    assert_int_equal(ns_config_parse(text, strlen(text), NAME, &config, &err),
                     NS_REJECT);
    assert_memory_equal(&config, &before, sizeof(config));
    check_words(&err, words);
    free(text);
}

static struct ns_config
accept(const char *path, json_t *value)
{
    struct ns_config config;
    struct ns_error err;
    char *text = with(path, value);

    if (ns_config_parse(text, strlen(text), NAME, &config, &err) != NS_OK)
        fail_msg("%s", err.text);
    free(text);
    return config;
}

static void
another_model_is_refused(void **state)
{
    (void)state;
    expect("model_type", json_string("gemma4"), "model_type is \"gemma4\"");
    expect("model_type", NULL, "model_type is missing");
    expect("model_type", json_integer(3), "model_type is 3");
    expect("architectures", json_pack("[s]", "Gemma4ForCausalLM"),
           "architectures[0] is \"Gemma4ForCausalLM\"");
    expect("architectures", json_pack("[]"), "architectures[0] is missing");
    expect("text_config", NULL, "text_config is missing");
    expect("text_config", json_pack("[]"), "text_config is a list");
    (void)accept("architectures", NULL);
}

static void
what_is_not_supported_is_refused_by_field_and_value(void **state)
{
    (void)state;
    expect("tie_word_embeddings", json_false(),
           "tie_word_embeddings is false|supported: true");
    expect("text_config.tie_word_embeddings", json_false(),
           "text_config.tie_word_embeddings is false");
    expect("text_config.attention_bias", json_true(),
           "text_config.attention_bias is true|supported: false");
    expect("text_config.hidden_activation", json_string("silu"),
           "text_config.hidden_activation is \"silu\"|gelu_pytorch_tanh");
    expect("text_config.use_bidirectional_attention", json_string("all"),
           "text_config.use_bidirectional_attention is \"all\"|vision");
    expect("vision_config.model_type", json_string("siglip"),
           "vision_config.model_type is \"siglip\"");
    expect("vision_config.num_key_value_heads", json_integer(1),
           "vision_config.num_key_value_heads is 1");
    expect("vision_config.head_dim", json_integer(6),
           "vision_config.head_dim is 6");
}

static json_t *
fp8_scheme(void)
{
    return json_pack(
        "{s:s, s:s, s:s, s:n, s:{}, s:[s], s:{s:{s:[s], s:n,"
        " s:{s:i, s:s, s:b, s:s, s:b, s:n}, s:{s:i, s:s, s:b, s:s, s:b}}}}",
        "quant_method", "compressed-tensors", "format", "float-quantized",
        "quantization_status", "compressed", "kv_cache_scheme",
        "sparsity_config", "ignore", "lm_head", "config_groups", "group_0",
        "targets", "Linear", "output_activations", "weights", "num_bits", 8,
        "type", "float", "symmetric", 1, "strategy", "channel", "dynamic", 0,
        "group_size", "input_activations", "num_bits", 8, "type", "float",
        "symmetric", 1, "strategy", "token", "dynamic", 1);
}

static void
fp8_is_read_and_every_other_scheme_refused_by_field(void **state)
{
#define Q "quantization_config."
    static const struct {
        const char *path, *value; /* NULL: taken out */
    } cases[] = {
        { "quant_method", "\"fp8\"" },
        { "quant_method", NULL },
        { "format", "\"pack-quantized\"" },
        { "format", NULL },
        { "quantization_status", "\"frozen\"" },
        { "kv_cache_scheme", "{\"num_bits\":8}" },
        { "sparsity_config", "{\"format\":\"sparse-24-bitmask\"}" },
        { "config_groups", NULL },
        { "config_groups", "{}" },
        { "config_groups", "[]" },
        { "config_groups.group_0.weights", NULL },
        { "config_groups.group_0.weights.num_bits", "4" },
        { "config_groups.group_0.weights.num_bits", "\"8\"" },
        { "config_groups.group_0.weights.type", "\"int\"" },
        { "config_groups.group_0.weights.strategy", "\"tensor\"" },
        { "config_groups.group_0.weights.strategy", "\"block\"" },
        { "config_groups.group_0.weights.symmetric", "false" },
        { "config_groups.group_0.weights.dynamic", "true" },
        { "config_groups.group_0.weights.group_size", "128" },
        { "config_groups.group_0.weights.block_structure", "[128, 128]" },
        { "config_groups.group_0.input_activations", NULL },
        { "config_groups.group_0.input_activations.dynamic", "false" },
        { "config_groups.group_0.input_activations.dynamic", "\"local\"" },
        { "config_groups.group_0.input_activations.dynamic", NULL },
        { "config_groups.group_0.input_activations.strategy", "\"tensor\"" },
        { "config_groups.group_0.output_activations", "{\"num_bits\":8}" },
        { "config_groups.group_0.format", "\"nvfp4-pack-quantized\"" },
        { "config_groups.group_1", "{}" },
    };
    struct ns_config config = accept("quantization_config", fp8_scheme());

    (void)state;
    assert_true(config.fp8);
    assert_false(accept("quantization_config", NULL).fp8);
    assert_false(accept("quantization_config", json_null()).fp8);
    expect("quantization_config", json_object(),
           Q "quant_method is missing|compressed-tensors");
    expect("quantization_config", json_true(),
           "quantization_config is true|an object");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *scheme = fp8_scheme(), *at = scheme;
        const char *path = cases[i].path, *dot;
        char step[64];

        for (; (dot = strchr(path, '.')) != NULL; path = dot + 1) {
            snprintf(step, sizeof(step), "%.*s", (int)(dot - path), path);
            at = json_object_get(at, step);
        }
        if (cases[i].value)
            json_object_set_new(at, path,
                                json_loads(cases[i].value, JSON_DECODE_ANY,
                                           NULL));
        else
            json_object_del(at, path);
        expect("quantization_config", scheme, Q);
    }
#undef Q
}

static void
rope_of_another_kind_is_refused(void **state)
{
#define ROPE "text_config.rope_parameters."
    (void)state;
    expect(ROPE "full_attention.rope_type", json_string("yarn"),
           ROPE "full_attention.rope_type is \"yarn\"|proportional");
    expect(ROPE "full_attention.rope_type", NULL,
           "full_attention.rope_type is missing");
    expect(ROPE "sliding_attention.rope_type", json_string("linear"),
           "sliding_attention.rope_type is \"linear\"");
    expect(ROPE "sliding_attention.rope_type", NULL,
           "sliding_attention.rope_type is missing");
    expect(ROPE "full_attention.partial_rotary_factor", NULL,
           "full_attention.partial_rotary_factor is missing");
    expect(ROPE "full_attention.partial_rotary_factor", json_real(1.5),
           "partial_rotary_factor is 1.5");
    expect(ROPE "full_attention.partial_rotary_factor", json_real(0.01),
           "turns no pair");
    expect(ROPE "sliding_attention.partial_rotary_factor", json_real(0.5),
           "sliding_attention.partial_rotary_factor is 0.5");
    expect(ROPE "sliding_attention.factor", json_real(2.0),
           "sliding_attention.factor is 2.0");
    expect(ROPE "full_attention.rope_theta", NULL, "rope_theta is missing");
    expect(ROPE "full_attention.rope_theta", json_real(-1.0),
           "rope_theta is -1.0");
    expect(ROPE "full_attention.factor", json_integer(0), "factor is 0");
    expect(ROPE "full_attention", NULL, "full_attention is missing");
    /* the flat form of other models */
    expect("text_config.rope_parameters",
           json_pack("{s:s, s:f}", "rope_type", "default", "rope_theta", 1e4),
           "sliding_attention is missing");
    assert_true(accept(ROPE "full_attention.factor",
                       json_real(8.0)).rope_factor == 8.0f);
    assert_true(accept("text_config.rope_parameters",
                       json_null()).theta_full == 1e6f);
}

static void
counts_outside_their_limits_are_refused(void **state)
{
    static const char *const required[] = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_experts", "top_k_experts", "moe_intermediate_size",
        "sliding_window",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        char path[64], words[64];

        snprintf(path, sizeof(path), "text_config.%s", required[i]);
        snprintf(words, sizeof(words), "%s is missing", path);
        expect(path, NULL, words);
        snprintf(words, sizeof(words), "%s is null", path);
        expect(path, json_null(), words);
        snprintf(words, sizeof(words), "%s is 0", path);
        expect(path, json_integer(0), words);
        snprintf(words, sizeof(words), "%s is -1", path);
        expect(path, json_integer(-1), words);
        snprintf(words, sizeof(words), "%s is 4294967297", path);
        expect(path, json_integer(4294967297), words);
        snprintf(words, sizeof(words), "%s is 1.5", path);
        expect(path, json_real(1.5), words);
        snprintf(words, sizeof(words), "%s is \"8\"", path);
        expect(path, json_string("8"), words);
    }
    expect("canvas_length", json_integer(0), "canvas_length is 0");
    expect("canvas_length", json_integer(4096), "canvas_length is 4096");
    expect("text_config.max_position_embeddings", json_integer(1 << 25),
           "33554432|supported: 2 to 16777216");
    expect("text_config.num_hidden_layers", json_integer(257), "257");
    expect("text_config.rms_norm_eps", json_integer(0), "rms_norm_eps is 0");
    expect("text_config.rms_norm_eps", json_true(), "rms_norm_eps is true");
    expect("text_config.final_logit_softcapping", json_real(-30.0), "-30.0");
    expect("text_config.top_k_experts", json_integer(9),
           "top_k_experts is 9|at most num_experts");
    expect("vision_config.patch_size", json_integer(65), "patch_size is 65");
}

static void
head_shapes_that_do_not_fit_are_refused(void **state)
{
#define PER_LAYER "text_config.per_layer_config"
    (void)state;
    expect("text_config.head_dim", json_integer(15), "head size 15 is odd");
    expect("text_config.global_head_dim", json_integer(33),
           "head size 33 is odd");
    expect("text_config.num_key_value_heads", json_integer(3),
           "3 key heads do not divide 4");
    expect("text_config.num_global_key_value_heads", json_integer(8),
           "8 key heads do not divide 4");
    expect(PER_LAYER, json_pack("{s:{s:i}}", "7", "head_dim", 32),
           "per_layer_config|0 to 6");
    expect(PER_LAYER, json_pack("{s:{s:i}}", "02", "head_dim", 32),
           "per_layer_config|0 to 6");
    expect(PER_LAYER, json_pack("{s:i}", "2", 32), "per_layer_config");
    expect(PER_LAYER, json_pack("{s:{s:i}}", "2", "sliding_window", 32),
           "per_layer_config.2|head_dim and num_key_value_heads");
    expect(PER_LAYER, json_pack("{s:{s:i}}", "2", "head_dim", 0),
           "per_layer_config.2.head_dim is 0");
    /* full layers of two shapes: layer 6 has the base's */
    expect(PER_LAYER, json_pack("{s:{s:i}}", "3", "head_dim", 32),
           "layer 6 has 2 key heads of size 16|first of its kind 2 of 32");
    /* when present it rules, whatever the older fields say */
    assert_int_equal(accept(PER_LAYER, json_object()).layer[6].head_dim, 16);
    assert_int_equal(accept("text_config.num_global_key_value_heads",
                            NULL).layer[6].n_kv_heads, 2);
    assert_int_equal(accept("text_config.global_head_dim",
                            NULL).layer[6].head_dim, 512);
}

static void
layer_types_are_checked_and_the_last_is_full(void **state)
{
    struct ns_config c;

    (void)state;
    expect("text_config.layer_types", json_pack("[s]", "full_attention"),
           "layer_types is a list|num_hidden_layers");
    expect("text_config.layer_types",
           json_pack("[sssssss]", "full_attention", "full_attention",
                     "linear_attention", "full_attention", "full_attention",
                     "full_attention", "full_attention"),
           "layer_types");
    expect("text_config.layer_types",
           json_pack("[sssssis]", "full_attention", "full_attention",
                     "full_attention", "full_attention", "full_attention", 1,
                     "full_attention"),
           "layer_types");
    c = accept("text_config.layer_types",
               json_pack("[sssssss]", "sliding_attention",
                         "sliding_attention", "sliding_attention",
                         "sliding_attention", "sliding_attention",
                         "sliding_attention", "sliding_attention"));
    assert_false(c.layer[5].full);
    assert_true(c.layer[6].full);
}

static void
ids_outside_the_vocabulary_are_refused_or_mean_none(void **state)
{
    (void)state;
    expect("eos_token_id", json_integer(512), "eos_token_id is 512|below 512");
    expect("eos_token_id", json_pack("[i, i]", 1, -1), "eos_token_id");
    expect("eos_token_id", json_pack("[]"), "eos_token_id");
    expect("text_config.pad_token_id", json_integer(512), "pad_token_id");
    expect("boi_token_id", json_integer(-1), "boi_token_id is -1");
    assert_int_equal(accept("image_token_id", json_integer(258880)).image_id,
                     -1);
    assert_int_equal(accept("image_token_id", NULL).image_id, -1);
    assert_int_equal(accept("image_token_id", json_integer(511)).image_id,
                     511);
}

static void
optional_parts_may_be_missing(void **state)
{
    struct ns_config c = accept("vision_config", NULL);

    (void)state;
    assert_int_equal(c.vision.hidden, 0);
    c = accept("vision_config", json_null());
    assert_int_equal(c.vision.hidden, 0);
    assert_false(accept("text_config.use_bidirectional_attention",
                        json_null()).vision_groups);
    assert_false(accept("text_config.use_bidirectional_attention",
                        NULL).vision_groups);
    (void)accept("text_config.some_new_field", json_integer(1));
}

static void
what_is_no_configuration_is_refused(void **state)
{
    static const char *const texts[] = {
        "", "[]", "7", "{", "{} x", "{\"model_type\": \"diffusion_gemma\"}",
        "{\"a\": 1, \"a\": 1}", "\xff",
    };
    struct ns_config config;
    struct ns_error err;

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        assert_int_equal(ns_config_parse(texts[i], strlen(texts[i]), NAME,
                                         &config, &err), NS_REJECT);
        check_words(&err, NAME);
    }
}

/* --- generation_config.json -------------------------------------------- */

static enum ns_status
generate(const char *text, struct ns_generation *out, struct ns_error *err)
{
    struct ns_config config = parse_file("tests/cases/text_fp32/model");

    return ns_generation_parse(text, text ? strlen(text) : 0, NAME, &config,
                               out, err);
}

static void
check_defaults(const struct ns_generation *g)
{
    assert_int_equal(g->max_denoising_steps, 48);
    assert_int_equal(g->stability_threshold, 1);
    assert_true(g->entropy_bound == 0.1f);
    assert_true(g->t_min == 0.4f && g->t_max == 0.8f);
    assert_true(g->confidence_threshold == 0.005f);
    assert_int_equal(g->pad_id, 0);
    assert_true(g->ar_capable);
    assert_int_equal(g->n_eos, 2); /* config.json's */
    assert_int_equal(g->eos_id[1], 106);
}

static void
missing_and_null_generation_fields_take_the_defaults(void **state)
{
    struct ns_generation g;
    struct ns_error err;

    (void)state;
    assert_int_equal(generate(NULL, &g, &err), NS_OK);
    check_defaults(&g);
    assert_int_equal(generate("{}", &g, &err), NS_OK);
    check_defaults(&g);
    assert_int_equal(
        generate("{\"max_denoising_steps\": null, \"sampler_config\": null,"
                 " \"t_min\": null, \"t_max\": null, \"pad_token_id\": null,"
                 " \"stability_threshold\": null, \"eos_token_id\": null,"
                 " \"confidence_threshold\": null}", &g, &err), NS_OK);
    check_defaults(&g);
    assert_int_equal(generate("{\"sampler_config\": {\"entropy_bound\":"
                              " null}}", &g, &err), NS_OK);
    check_defaults(&g);
}

static void
generation_fields_are_read(void **state)
{
    struct ns_generation g;
    struct ns_error err;

    (void)state;
    assert_int_equal(
        generate("{\"max_denoising_steps\": 7, \"sampler_config\": {"
                 "\"_cls_name\": \"EntropyBoundSamplerConfig\","
                 " \"entropy_bound\": 2}, \"t_min\": 0, \"t_max\": 1.5,"
                 " \"stability_threshold\": 0, \"confidence_threshold\": 0.5,"
                 " \"eos_token_id\": [1, 106, 50], \"pad_token_id\": 3,"
                 " \"nightshift_ar_capable\": false}", &g, &err), NS_OK);
    assert_int_equal(g.max_denoising_steps, 7);
    assert_true(g.entropy_bound == 2.0f);
    assert_true(g.t_min == 0.0f && g.t_max == 1.5f);
    assert_int_equal(g.stability_threshold, 0);
    assert_true(g.confidence_threshold == 0.5f);
    assert_int_equal(g.n_eos, 3);
    assert_int_equal(g.eos_id[2], 50);
    assert_int_equal(g.pad_id, 3);
    assert_false(g.ar_capable);
    assert_int_equal(generate("{\"eos_token_id\": 5}", &g, &err), NS_OK);
    assert_int_equal(g.n_eos, 1);
    assert_int_equal(g.eos_id[0], 5);
}

static void
generation_fields_out_of_range_are_refused(void **state)
{
    static const char *const bad[][2] = {
        { "{\"max_denoising_steps\": 0}", "max_denoising_steps is 0" },
        { "{\"max_denoising_steps\": 1e3}", "max_denoising_steps is 1000.0" },
        { "{\"t_max\": 0}", "t_max is 0" },
        { "{\"t_min\": -0.1}", "t_min is -0.1" },
        { "{\"t_min\": 0.9}", "t_min is 0.9|at most t_max" },
        { "{\"stability_threshold\": -1}", "stability_threshold is -1" },
        { "{\"confidence_threshold\": \"x\"}", "confidence_threshold is" },
        { "{\"sampler_config\": 3}", "sampler_config is 3" },
        { "{\"sampler_config\": {\"_cls_name\": \"TopK\"}}", "\"TopK\"" },
        { "{\"sampler_config\": {\"entropy_bound\": -1}}",
          "sampler_config.entropy_bound is -1" },
        { "{\"eos_token_id\": [1, 512]}", "eos_token_id is a list|below 512" },
        { "{\"eos_token_id\": \"1\"}", "eos_token_id" },
        { "{\"eos_token_id\": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}",
          "list of 1 to 16" },
        { "{\"pad_token_id\": 512}", "pad_token_id is 512" },
        { "{\"nightshift_ar_capable\": 1}", "nightshift_ar_capable is 1" },
        { "[]", "not an object" },
        { "{", "not JSON" },
    };
    struct ns_generation g;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ns_error err = { 0 };

        assert_int_equal(generate(bad[i][0], &g, &err), NS_REJECT);
        check_words(&err, bad[i][1]);
    }
}

static void
every_allocation_may_fail(void **state)
{
    struct ns_config config;
    struct ns_generation generation;
    struct ns_error err;

    (void)state;
    /* All that is allocated here is jansson's, and that fails as it likes:
     * no more is asked than that nothing leaks (make asan). */
    json_set_alloc_funcs(malloc, free);
    for (int n = 0;; n++) {
        enum ns_status status;

        fault_arm(n);
        status = ns_config_parse(released, strlen(released), NAME, &config,
                                 &err);
        if (!fault_fired()) {
            assert_int_equal(status, NS_OK);
            assert_true(n > 50);
            break;
        }
    }
    fault_arm(0);
    assert_int_equal(ns_generation_parse(NULL, 0, NAME, &config, &generation,
                                         &err), NS_FATAL);
    assert_true(fault_fired());
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_older_form_is_read),
        cmocka_unit_test(the_newer_form_is_read),
        cmocka_unit_test(both_forms_of_one_model_give_one_configuration),
        cmocka_unit_test(padded_layer_numbers_are_read_and_none_stands_twice),
        cmocka_unit_test(the_released_model_is_read_with_its_defaults),
        cmocka_unit_test(another_model_is_refused),
        cmocka_unit_test(what_is_not_supported_is_refused_by_field_and_value),
        cmocka_unit_test(fp8_is_read_and_every_other_scheme_refused_by_field),
        cmocka_unit_test(rope_of_another_kind_is_refused),
        cmocka_unit_test(counts_outside_their_limits_are_refused),
        cmocka_unit_test(head_shapes_that_do_not_fit_are_refused),
        cmocka_unit_test(layer_types_are_checked_and_the_last_is_full),
        cmocka_unit_test(ids_outside_the_vocabulary_are_refused_or_mean_none),
        cmocka_unit_test(optional_parts_may_be_missing),
        cmocka_unit_test(what_is_no_configuration_is_refused),
        cmocka_unit_test(missing_and_null_generation_fields_take_the_defaults),
        cmocka_unit_test(generation_fields_are_read),
        cmocka_unit_test(generation_fields_out_of_range_are_refused),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
