/* model.h - the one supported family: configuration, weights, revision.
 *
 * Reads a Hugging Face directory (config.json in both forms the reference
 * writes, generation_config.json, safetensors, tokenizer.json), checks each
 * tensor's shape and type against the configuration, and packs the weights on
 * a backend. Const once open, but for the device memory it owns.
 *
 * The encoder shares all weights with the decoder but its layer scalars, and
 * the head is the embedding. Where a file stores such a tensor twice
 * (lm_head.weight, model.encoder.language_model.*), the copies are compared
 * byte by byte at open, and a file in which they differ is refused.
 *
 * The files are mapped while they are packed and let go of tensor by tensor:
 * what stays resident is the packed copy alone.
 *
 * Thread: open and close on one thread; reading from any.
 */
#ifndef NS_ENGINE_MODEL_H
#define NS_ENGINE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "kernels/backend.h"

enum { NS_MAX_LAYERS = 256, NS_MAX_EOS = 16 };

struct ns_layer_config {
    bool full; /* full_attention; else sliding */
    uint32_t head_dim, n_kv_heads;
};

struct ns_vision_config {
    bool present; /* tensors of the tower are in the checkpoint */
    uint32_t hidden, intermediate, n_layers, n_heads, head_dim;
    uint32_t patch, pooling, n_positions;
    float eps, rope_theta;
    bool standardize, clipped;
};

struct ns_config { /* config.json */
    uint32_t vocab, hidden, intermediate, n_layers, n_heads;
    uint32_t n_experts, top_k, expert_dim; /* X, K, M */
    struct ns_layer_config layer[NS_MAX_LAYERS];
    uint32_t sliding_window; /* W */
    uint32_t canvas_length;  /* L */
    uint32_t max_position;   /* the context's limit */
    float eps, softcap;
    float theta_sliding, theta_full, rope_factor;
    double partial_rotary; /* share of the pairs that turn on full layers */
    bool fp8; /* quantization_config: E4M3 with a scale an output channel, rows
               * to be quantised by themselves, as they come */
    bool vision_groups; /* use_bidirectional_attention: "vision"; null: false */
    int32_t pad_id, bos_id;
    int32_t eos_id[NS_MAX_EOS]; /* where generation_config names none */
    uint32_t n_eos;
    int32_t image_begin_id, image_id, image_end_id; /* -1: outside the
                                                     * vocabulary, no images */
    struct ns_vision_config vision;
};

struct ns_generation { /* generation_config.json; missing or null: defaults */
    uint32_t max_denoising_steps; /* N, 48 */
    float entropy_bound;          /* 0.1 */
    float t_min, t_max;           /* 0.4, 0.8 */
    uint32_t stability_threshold; /* 1 */
    float confidence_threshold;   /* 0.005 */
    int32_t eos_id[NS_MAX_EOS];
    uint32_t n_eos;
    int32_t pad_id;
    bool ar_capable; /* our key "nightshift_ar_capable"; absent: true */
};

struct ns_layer_weights {
    struct ns_weight qkv, o, mlp_gated, mlp_down, router, experts_gated,
        experts_down;
    /* device, fp32 */
    float *input_norm, *q_norm, *k_norm, *post_attention_norm;
    float *pre_mlp_norm, *pre_experts_norm;
    float *router_scale; /* times H^(-1/2): the weight of the router's norm */
    float *post_mlp_norm, *post_experts_norm, *post_norm;
    float *expert_scale; /* [X] */
    float scalar[2];     /* layer_scalar: [0] encoder, [1] decoder */
};

enum ns_clipped { /* projections of a layer of the tower */
    NS_CLIPPED_Q, NS_CLIPPED_K, NS_CLIPPED_V, NS_CLIPPED_O, NS_CLIPPED_GATE,
    NS_CLIPPED_UP, NS_CLIPPED_DOWN, NS_N_CLIPPED,
};

struct ns_clip { /* what goes into a projection and what comes out of it */
    float input_min, input_max, output_min, output_max;
};

struct ns_vision_layer_weights {
    struct ns_weight qkv, gated; /* where nothing is clipped; else apart: */
    struct ns_weight q, k, v, gate, up;
    struct ns_weight o, down;
    struct ns_clip clip[NS_N_CLIPPED];
    /* device, fp32 */
    float *input_norm, *q_norm, *k_norm, *post_attention_norm;
    float *pre_mlp_norm, *post_mlp_norm;
};

struct ns_vision_weights { /* zero where ns_model_sees is false */
    struct ns_weight patch;      /* patch values to Hv */
    struct ns_weight projection; /* Hv to H */
    float *position;             /* device: [2][n_positions][Hv], x then y */
    float *std_bias, *std_scale; /* device; NULL: not standardized */
    float *frequency;            /* device: [d / 4] */
    struct ns_vision_layer_weights *layer; /* [vision.n_layers] */
};

struct ns_weights {
    struct ns_weight embedding;
    float *final_norm, *sc_pre_norm; /* device */
    struct ns_weight sc_gated, sc_down;
    float *frequency_sliding, *frequency_full; /* device, [d / 2] */
    uint32_t n_rotated_full; /* pairs that turn on full layers */
    float embedding_scale;   /* sqrt(H) rounded to the weight type */
    struct ns_layer_weights *layer; /* [n_layers] */
    struct ns_vision_weights vision;
    float *vectors; /* device: all the float pointers above point into it */
};

enum ns_part { /* of the text model, for sums */
    NS_PART_EMBEDDING,
    NS_PART_ATTENTION,
    NS_PART_MLP,
    NS_PART_ROUTER,
    NS_PART_EXPERTS,
    NS_PART_SELF_CONDITIONING,
    NS_PART_VECTORS, /* norms, scales, scalars, frequencies */
    NS_N_PARTS,
};

struct ns_model {
    struct ns_config config;
    struct ns_generation generation;
    struct ns_weights weights;
    enum ns_dtype dtype;  /* of the checkpoint's matrices, codes aside */
    uint64_t n_codes;     /* parameters that are stored as E4M3 */
    uint64_t n_parameters; /* of the text model */
    uint64_t n_active;     /* of them, what one token goes through */
    uint64_t n_vision_parameters, vision_bytes; /* bytes: packed */
    uint64_t weight_bytes; /* packed, on the backend */
    uint64_t part_parameters[NS_N_PARTS], part_bytes[NS_N_PARTS]; /* packed */
    uint64_t file_bytes;   /* all shards */
    uint32_t n_shards;
    /* model_rev: hex SHA-256 of config, generation config, tokenizer, index,
     * shard headers and sizes, and all stored vectors (norms, scales): the
     * last tell two trainings of one configuration apart. */
    char revision[65];
    char **unused; /* names of stored tensors that nothing uses; owned */
    size_t n_unused;
    uint32_t n_copies; /* stored copies of shared tensors: see above */
    struct ns_backend *backend; /* borrowed */
};

/* config.json and generation_config.json alone; `name` stands in errors. The
 * second may be NULL. Refuses what is not this family, naming the field. */
enum ns_status ns_config_parse(const char *json, size_t length,
                               const char *name, struct ns_config *out,
                               struct ns_error *err);
enum ns_status ns_generation_parse(const char *json, size_t length,
                                   const char *name,
                                   const struct ns_config *config,
                                   struct ns_generation *out,
                                   struct ns_error *err);

/* What is in `directory`, without packing: for inspect and the memory plan.
 * Weights stay zero, `weight_bytes` is what pack would take on `be`. */
enum ns_status ns_model_describe(const char *directory, struct ns_backend *be,
                                 struct ns_model **out, struct ns_error *err);
enum ns_status ns_model_open(const char *directory, struct ns_backend *be,
                             struct ns_model **out, struct ns_error *err);
/* Takes NULL; before the backend is closed. */
void ns_model_close(struct ns_model *model);

/* Whether pictures can be encoded: there is a tower. */
static inline bool
ns_model_sees(const struct ns_model *model)
{
    return model->config.vision.present;
}

/* For people: what it is, shapes, parameters, bytes by part, what is unused. */
void ns_model_print(const struct ns_model *model, FILE *file);

#endif
