/* model_weights.c - the tensors of the model, as MODEL.md section 1 lists them,
 * and where each of them goes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model_bind.h"

static void
norm(struct ns_binder *b, const char *suffix, uint32_t n, float **out)
{
    ns_bind_vector(b, suffix, true, n, 1.0, out);
}

static void
attention_weights(struct ns_binder *b, const struct ns_layer_config *layer,
                  struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    uint64_t nq = (uint64_t)c->n_heads * layer->head_dim;
    uint64_t nkv = (uint64_t)layer->n_kv_heads * layer->head_dim;
    const struct ns_stored_tensor *qkv[NS_BIND_SOURCES] = { NULL };

    b->part = NS_PART_ATTENTION;
    qkv[0] = ns_bind_tensor(b, "self_attn.q_proj.weight", true,
                            ns_shape2(nq, c->hidden));
    qkv[1] = ns_bind_tensor(b, "self_attn.k_proj.weight", true,
                            ns_shape2(nkv, c->hidden));
    if (!layer->full) /* full layers make V from the key projection */
        qkv[2] = ns_bind_tensor(b, "self_attn.v_proj.weight", true,
                                ns_shape2(nkv, c->hidden));
    ns_bind_weight(b, NS_PACK_LINEAR, qkv, layer->full ? 2 : 3, &w->qkv);
    ns_bind_linear(b, "self_attn.o_proj.weight", true, ns_shape2(c->hidden, nq),
                   &w->o);
    norm(b, "self_attn.q_norm.weight", layer->head_dim, &w->q_norm);
    norm(b, "self_attn.k_norm.weight", layer->head_dim, &w->k_norm);
}

/* Writers of quantised checkpoints take the experts apart. */
static bool
experts_apart(const struct ns_binder *b)
{
    char name[NS_BIND_NAME];

    snprintf(name, sizeof(name), "%sexperts.0.gate_proj.weight", b->prefix);
    return ns_safetensors_find(b->st, name) != NULL;
}

/* One projection of all experts, each a tensor of its own. */
static void
gather_experts(struct ns_binder *b, const char *projection,
               struct ns_bind_shape shape, const struct ns_stored_tensor **part,
               struct ns_bind_source *out)
{
    uint32_t n = b->model->config.n_experts;
    char suffix[64];

    for (uint32_t i = 0; i < n; i++) {
        snprintf(suffix, sizeof(suffix), "experts.%u.%s_proj.weight", i,
                 projection);
        part[i] = ns_bind_tensor(b, suffix, true, shape);
    }
    *out = (struct ns_bind_source){ part[0], part, n };
}

static void
apart_weights(struct ns_binder *b, struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    struct ns_bind_shape inner = ns_shape2(c->expert_dim, c->hidden);
    const struct ns_stored_tensor **parts =
        calloc(2 * (size_t)c->n_experts, sizeof(const void *));
    struct ns_bind_source source[NS_BIND_SOURCES];

    if (!parts) {
        ns_bind_fail(b, NS_FATAL, "out of memory for %u experts", c->n_experts);
        return;
    }
    gather_experts(b, "gate", inner, parts, &source[0]);
    gather_experts(b, "up", inner, parts + c->n_experts, &source[1]);
    ns_bind_sources(b, NS_PACK_GATED, source, 2, &w->experts_gated);
    gather_experts(b, "down", ns_shape2(c->hidden, c->expert_dim), parts,
                   &source[0]);
    ns_bind_sources(b, NS_PACK_LINEAR, source, 1, &w->experts_down);
    free(parts);
}

static void
expert_weights(struct ns_binder *b, struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    const struct ns_stored_tensor *gate_up[NS_BIND_SOURCES] = { NULL };

    b->part = NS_PART_ROUTER;
    ns_bind_linear(b, "router.proj.weight", true,
                   ns_shape2(c->n_experts, c->hidden), &w->router);
    /* The reference multiplies by the scale and then by H^(-1/2), each rounded
     * to fp32; the product of both, rounded once, is nearer to the formula
     * and within an ulp of it. */
    ns_bind_vector(b, "router.scale", true, c->hidden, 1.0 / sqrt(c->hidden),
                   &w->router_scale);
    ns_bind_vector(b, "router.per_expert_scale", true, c->n_experts, 1.0,
                   &w->expert_scale);

    b->part = NS_PART_EXPERTS;
    if (experts_apart(b)) {
        apart_weights(b, w);
        return;
    }
    gate_up[0] = ns_bind_tensor(
        b, "experts.gate_up_proj", true,
        ns_shape3(c->n_experts, 2ull * c->expert_dim, c->hidden));
    ns_bind_weight(b, NS_PACK_GATED, gate_up, 1, &w->experts_gated);
    ns_bind_linear(b, "experts.down_proj", true,
                   ns_shape3(c->n_experts, c->hidden, c->expert_dim),
                   &w->experts_down);
}

static void
layer_scalar(struct ns_binder *b, const char *mode, uint32_t i, float *out)
{
    const struct ns_stored_tensor *tensor;

    snprintf(b->prefix, sizeof(b->prefix), "%slayers.%u.", mode, i);
    tensor = ns_bind_tensor(b, "layer_scalar", false, ns_shape1(1));
    if (!tensor)
        return;
    ns_bind_count(b, tensor, NS_PART_VECTORS);
    ns_bind_floats(b, tensor, 1.0, out);
}

static void
layer_weights(struct ns_binder *b, uint32_t i)
{
    const struct ns_config *c = &b->model->config;
    struct ns_layer_weights *w = &b->model->weights.layer[i];

    layer_scalar(b, ENCODER, i, &w->scalar[0]);
    layer_scalar(b, DECODER, i, &w->scalar[1]); /* leaves its prefix */
    norm(b, "input_layernorm.weight", c->hidden, &w->input_norm);
    attention_weights(b, &c->layer[i], w);
    norm(b, "post_attention_layernorm.weight", c->hidden,
         &w->post_attention_norm);

    b->part = NS_PART_MLP;
    norm(b, "pre_feedforward_layernorm.weight", c->hidden, &w->pre_mlp_norm);
    ns_bind_gated(b, "mlp.gate_proj.weight", "mlp.up_proj.weight", true,
                  ns_shape2(c->intermediate, c->hidden), &w->mlp_gated);
    ns_bind_linear(b, "mlp.down_proj.weight", true,
                   ns_shape2(c->hidden, c->intermediate), &w->mlp_down);
    norm(b, "post_feedforward_layernorm_1.weight", c->hidden,
         &w->post_mlp_norm);

    norm(b, "pre_feedforward_layernorm_2.weight", c->hidden,
         &w->pre_experts_norm);
    expert_weights(b, w);
    norm(b, "post_feedforward_layernorm_2.weight", c->hidden,
         &w->post_experts_norm);
    norm(b, "post_feedforward_layernorm.weight", c->hidden, &w->post_norm);
}

/* f_j = 1 / theta^(2j/d), each step rounded to fp32 as the reference has it;
 * 0 for the pairs that do not turn. */
static float *
frequencies(struct ns_binder *b, uint32_t head_dim, uint32_t n_turning,
            float theta, float factor)
{
    float *host, *device;

    if (b->status != NS_OK)
        return NULL;
    device = ns_bind_room(b, head_dim / 2, &host);
    if (!host)
        return NULL;
    for (uint32_t j = 0; j < head_dim / 2; j++) {
        float x = (float)(2 * j) / (float)head_dim;
        float p = (float)pow((double)theta, (double)x);

        host[j] = j < n_turning ? 1.0f / p / factor : 0.0f;
    }
    return device;
}

static void
rope_tables(struct ns_binder *b)
{
    const struct ns_config *c = &b->model->config;
    struct ns_weights *w = &b->model->weights;
    const struct ns_layer_config *full = &c->layer[c->n_layers - 1];

    w->n_rotated_full = (uint32_t)(c->partial_rotary * full->head_dim / 2.0);
    w->frequency_full = frequencies(b, full->head_dim, w->n_rotated_full,
                                    c->theta_full, c->rope_factor);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        uint32_t d = c->layer[i].head_dim; /* the same on all of a kind */

        if (c->layer[i].full)
            continue;
        w->frequency_sliding = frequencies(b, d, d / 2, c->theta_sliding, 1.0f);
        return;
    }
}

/* sqrt(H) in fp32, then with the bits of the weights' type. */
static float
embedding_scale(uint32_t hidden, enum ns_dtype dtype)
{
    int bits = dtype == NS_BF16 ? 8 : dtype == NS_F16 ? 11 : 24;
    int exponent;
    double fraction = frexp((double)sqrtf((float)hidden), &exponent);

    return (float)ldexp(rint(ldexp(fraction, bits)), exponent - bits);
}

static void
text_weights(struct ns_binder *b)
{
    const struct ns_config *c = &b->model->config;
    struct ns_weights *w = &b->model->weights;
    const struct ns_stored_tensor *embedding[NS_BIND_SOURCES] = { NULL };

    b->n_floats = 0;
    snprintf(b->prefix, sizeof(b->prefix), DECODER);
    b->part = NS_PART_EMBEDDING;
    embedding[0] = ns_bind_tensor(b, "embed_tokens.weight", true,
                                  ns_shape2(c->vocab, c->hidden));
    ns_bind_weight(b, NS_PACK_TABLE, embedding, 1, &w->embedding);
    if (!embedding[0])
        return;
    (void)ns_bind_type(embedding[0]->dtype, &b->model->dtype);
    w->embedding_scale = embedding_scale(c->hidden, b->model->dtype);
    norm(b, "norm.weight", c->hidden, &w->final_norm);

    /* The decoder's own: there is nothing of it in the encoder. */
    snprintf(b->prefix, sizeof(b->prefix), DECODER "self_conditioning.");
    b->part = NS_PART_SELF_CONDITIONING;
    ns_bind_vector(b, "pre_norm.weight", false, c->hidden, 1.0,
                   &w->sc_pre_norm);
    ns_bind_gated(b, "gate_proj.weight", "up_proj.weight", false,
                  ns_shape2(c->intermediate, c->hidden), &w->sc_gated);
    ns_bind_linear(b, "down_proj.weight", false,
                   ns_shape2(c->hidden, c->intermediate), &w->sc_down);
    rope_tables(b);
    for (uint32_t i = 0; i < c->n_layers && b->status == NS_OK; i++)
        layer_weights(b, i);
}

/* The four limits of one projection; infinite is none. */
static void
read_limits(struct ns_binder *b, const char *module, struct ns_clip *clip)
{
    static const char *const names[] = { "input_min", "input_max", "output_min",
                                         "output_max" };
    float *const to[] = { &clip->input_min, &clip->input_max, &clip->output_min,
                          &clip->output_max };
    char name[64];

    for (int i = 0; i < 4; i++) {
        const struct ns_stored_tensor *tensor;

        snprintf(name, sizeof(name), "%s.%s", module, names[i]);
        tensor = ns_bind_tensor(b, name, false, ns_scalar_shape());
        if (!tensor)
            return;
        ns_bind_count(b, tensor, b->part);
        *to[i] = ns_bind_value(tensor, 0);
        if (isnan(*to[i]) || (i % 2 == 1 && *to[i] < *to[i - 1])) {
            ns_bind_fail(b, NS_REJECT,
                         "%s: tensor %s is %g: not a limit above %g",
                         ns_bind_shard(b, tensor), tensor->name, (double)*to[i],
                         i % 2 == 1 ? (double)*to[i - 1] : -HUGE_VAL);
            return;
        }
    }
}

static const struct ns_stored_tensor *
vision_matrix(struct ns_binder *b, const char *module, uint64_t n, uint64_t k,
              struct ns_clip *clip)
{
    char name[64];

    if (b->model->config.vision.clipped)
        read_limits(b, module, clip);
    snprintf(name, sizeof(name), "%s.linear.weight", module);
    return ns_bind_tensor(b, name, false, ns_shape2(n, k));
}

static void
vision_layer(struct ns_binder *b, struct ns_vision_layer_weights *w)
{
    const struct ns_vision_config *v = &b->model->config.vision;
    uint32_t nq = v->n_heads * v->head_dim;
    const struct {
        const char *module;
        uint32_t n, k;
    } shapes[NS_N_CLIPPED] = {
        [NS_CLIPPED_Q] = { "self_attn.q_proj", nq, v->hidden },
        [NS_CLIPPED_K] = { "self_attn.k_proj", nq, v->hidden },
        [NS_CLIPPED_V] = { "self_attn.v_proj", nq, v->hidden },
        [NS_CLIPPED_O] = { "self_attn.o_proj", v->hidden, nq },
        [NS_CLIPPED_GATE] = { "mlp.gate_proj", v->intermediate, v->hidden },
        [NS_CLIPPED_UP] = { "mlp.up_proj", v->intermediate, v->hidden },
        [NS_CLIPPED_DOWN] = { "mlp.down_proj", v->hidden, v->intermediate },
    };
    struct ns_weight *const apart[NS_N_CLIPPED] = {
        &w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down,
    };
    const struct ns_stored_tensor *t[NS_N_CLIPPED];

    for (int i = 0; i < NS_N_CLIPPED; i++)
        t[i] = vision_matrix(b, shapes[i].module, shapes[i].n, shapes[i].k,
                             &w->clip[i]);
    if (v->clipped) { /* each takes its input through limits of its own */
        for (int i = 0; i < NS_N_CLIPPED; i++)
            ns_bind_weight(b, NS_PACK_LINEAR, &t[i], 1, apart[i]);
    } else {
        ns_bind_weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_Q], 3, &w->qkv);
        ns_bind_weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_O], 1, &w->o);
        ns_bind_weight(b, NS_PACK_GATED, &t[NS_CLIPPED_GATE], 2, &w->gated);
        ns_bind_weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_DOWN], 1, &w->down);
    }
    ns_bind_vector(b, "self_attn.q_norm.weight", false, v->head_dim, 1.0,
                   &w->q_norm);
    ns_bind_vector(b, "self_attn.k_norm.weight", false, v->head_dim, 1.0,
                   &w->k_norm);
    ns_bind_vector(b, "input_layernorm.weight", false, v->hidden, 1.0,
                   &w->input_norm);
    ns_bind_vector(b, "post_attention_layernorm.weight", false, v->hidden, 1.0,
                   &w->post_attention_norm);
    ns_bind_vector(b, "pre_feedforward_layernorm.weight", false, v->hidden, 1.0,
                   &w->pre_mlp_norm);
    ns_bind_vector(b, "post_feedforward_layernorm.weight", false, v->hidden,
                   1.0, &w->post_mlp_norm);
}

/* The table of places is looked up, not multiplied: it lies with the norms. */
static void
vision_positions(struct ns_binder *b, struct ns_vision_weights *w)
{
    const struct ns_vision_config *v = &b->model->config.vision;
    const struct ns_stored_tensor *tensor =
        ns_bind_tensor(b, "patch_embedder.position_embedding_table", false,
                       ns_shape3(2, v->n_positions, v->hidden));
    float *host;

    if (!tensor)
        return;
    w->position = ns_bind_room(b, (size_t)ns_bind_elements(tensor), &host);
    ns_bind_count(b, tensor, b->part);
    ns_bind_floats(b, tensor, 1.0, host);
}

/* Everything counts as the tower's own, vectors too. */
static void
vision_weights(struct ns_binder *b)
{
    const struct ns_config *c = &b->model->config;
    const struct ns_vision_config *v = &c->vision;
    struct ns_vision_weights *w = &b->model->weights.vision;

    b->part = NS_N_PARTS;
    b->in_tower = true;
    snprintf(b->prefix, sizeof(b->prefix), "model.encoder.embed_vision.");
    ns_bind_linear(b, "embedding_projection.weight", false,
                   ns_shape2(c->hidden, v->hidden), &w->projection);
    snprintf(b->prefix, sizeof(b->prefix), TOWER);
    ns_bind_linear(b, "patch_embedder.input_proj.weight", false,
                   ns_shape2(v->hidden, 3ull * v->patch * v->patch), &w->patch);
    vision_positions(b, w);
    if (v->standardize) {
        ns_bind_vector(b, "std_bias", false, v->hidden, 1.0, &w->std_bias);
        ns_bind_vector(b, "std_scale", false, v->hidden, 1.0, &w->std_scale);
    }
    w->frequency =
        frequencies(b, v->head_dim / 2, v->head_dim / 4, v->rope_theta, 1.0f);
    for (uint32_t i = 0; i < v->n_layers && b->status == NS_OK; i++) {
        snprintf(b->prefix, sizeof(b->prefix), TOWER "encoder.layers.%u.", i);
        vision_layer(b, &w->layer[i]);
    }
    b->in_tower = false;
}

static bool
has_tower(const struct ns_binder *b)
{
    size_t n;
    const struct ns_stored_tensor *all = ns_safetensors_all(b->st, &n);

    for (size_t i = 0; i < n; i++)
        if (strncmp(all[i].name, TOWER, strlen(TOWER)) == 0)
            return true;
    return false;
}

static void
list_unused(struct ns_binder *b)
{
    struct ns_model *model = b->model;
    size_t n, n_unused = 0;
    const struct ns_stored_tensor *all = ns_safetensors_all(b->st, &n);

    for (size_t i = 0; i < n; i++)
        n_unused += !all[i].used;
    if (n_unused == 0)
        return;
    model->unused = calloc(n_unused, sizeof(*model->unused));
    for (size_t i = 0; i < n && model->unused; i++) {
        char *name;

        if (all[i].used)
            continue;
        name = malloc(strlen(all[i].name) + 1);
        if (!name)
            break;
        model->unused[model->n_unused++] = strcpy(name, all[i].name);
    }
    if (model->n_unused != n_unused)
        ns_bind_fail(b, NS_FATAL, "out of memory listing unused tensors");
}

void
ns_bind_survey(struct ns_binder *b)
{
    struct ns_model *model = b->model;
    struct ns_config *c = &model->config;
    uint64_t *parameters = model->part_parameters;
    size_t n_text_floats;

    text_weights(b);
    n_text_floats = b->n_floats;
    if (b->status == NS_OK && c->vision.hidden > 0 && has_tower(b)) {
        c->vision.present = true;
        if (c->image_id < 0 || c->image_begin_id < 0 || c->image_end_id < 0)
            ns_bind_fail(
                b, NS_REJECT,
                "config.json: the image token ids are outside the vocabulary "
                "of %u, and the checkpoint has a vision tower",
                c->vocab);
        model->weights.vision.layer =
            calloc(c->vision.n_layers, sizeof(*model->weights.vision.layer));
        if (!model->weights.vision.layer)
            ns_bind_fail(b, NS_FATAL, "out of memory opening a model");
        vision_weights(b);
        model->vision_bytes += (b->n_floats - n_text_floats) * sizeof(float);
    }
    if (b->status != NS_OK)
        return;
    list_unused(b);

    model->part_bytes[NS_PART_VECTORS] = n_text_floats * sizeof(float);
    model->weight_bytes = model->vision_bytes;
    for (int i = 0; i < NS_N_PARTS; i++) {
        model->n_parameters += parameters[i];
        model->weight_bytes += model->part_bytes[i];
    }
    model->n_active = model->n_parameters - parameters[NS_PART_EXPERTS] +
                      parameters[NS_PART_EXPERTS] / c->n_experts * c->top_k;
    model->n_shards = ns_safetensors_n_shards(b->st);
    for (uint32_t i = 0; i < model->n_shards; i++) {
        size_t header_bytes, file_bytes;

        (void)ns_safetensors_header(b->st, i, &header_bytes, &file_bytes);
        model->file_bytes += file_bytes;
    }
}

void
ns_bind_pack(struct ns_binder *b)
{
    size_t n_floats = b->n_floats;
    void *vectors = NULL;

    b->host = calloc(n_floats, sizeof(float));
    if (!b->host) {
        ns_bind_fail(b, NS_FATAL, "out of memory for %zu norm weights",
                     n_floats);
        return;
    }
    b->status = b->be->ops->alloc(b->be, n_floats * sizeof(float),
                                  "norm weights", &vectors, b->err);
    if (b->status != NS_OK)
        return;
    b->model->weights.vectors = vectors;
    b->packing = true;
    text_weights(b);
    if (ns_model_sees(b->model))
        vision_weights(b);
    if (b->status != NS_OK)
        return;
    b->be->ops->upload(b->be, vectors, b->host, n_floats * sizeof(float));
    b->status = b->be->ops->sync(b->be, b->err);
}
