#include "engine/model.h"

#include <limits.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/size.h"
#include "engine/json.h"
#include "engine/safetensors.h"

enum {
    MAX_CONFIG_BYTES = 4 << 20,
    MAX_TOKENIZER_BYTES = 256 << 20,
    VECTOR_ALIGN = 16,  /* floats: each vector starts on its own cache line */
    MAX_TENSOR_NAME = 160,
    PRINTED_UNUSED = 20,
    MAX_SOURCES = 3, /* matrices that are packed side by side */
};

#define DECODER "model.decoder."
#define ENCODER "model.encoder.language_model."
#define TOWER "model.encoder.vision_tower."

/* The walk over all weights. It is done twice by the same code: first to check
 * the whole file and to add up sizes, then to pack, so that nothing is packed
 * of a file that is refused for its shapes. A failure sticks: what follows
 * does nothing, and the walk reads as the list of the model's tensors. */
struct binder {
    struct ns_safetensors *st;
    struct ns_backend *be;
    struct ns_model *model;
    struct ns_error *err;
    enum ns_status status;
    bool packing;       /* the second walk */
    enum ns_part part;  /* that sizes are added to */
    bool in_tower;      /* they are the vision tower's, no part of the text */
    char prefix[64];    /* of the names that follow */
    float *host;        /* the vectors, on their way to the device */
    size_t n_floats;    /* of the vectors so far */
};

static void
fail(struct binder *b, enum ns_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void
fail(struct binder *b, enum ns_status status, const char *format, ...)
{
    char text[sizeof(b->err->text)];
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    if (status == NS_REJECT)
        b->status = ns_refuse(b->err, "bad_model", NULL, "%s", text);
    else
        b->status = ns_fail(b->err, status, "%s", text);
}

static const char *
shard_of(const struct binder *b, const struct ns_stored_tensor *tensor)
{
    return ns_safetensors_shard_name(b->st, tensor->shard);
}

/* "[128, 1408, 2816]" */
static const char *
show_shape(uint32_t rank, const uint64_t *dim, char *out, size_t out_size)
{
    size_t used = 0;

    out[0] = '\0';
    for (uint32_t i = 0; i < rank && used < out_size; i++)
        used += (size_t)snprintf(out + used, out_size - used, "%s%llu",
                                 i ? ", " : "", (unsigned long long)dim[i]);
    return out;
}

static bool
float_type(enum ns_stored stored, enum ns_dtype *out)
{
    switch (stored) {
    case NS_STORED_F8_E4M3:
        *out = NS_E4M3;
        return true;
    case NS_STORED_F32:
        *out = NS_F32;
        return true;
    case NS_STORED_BF16:
        *out = NS_BF16;
        return true;
    case NS_STORED_F16:
        *out = NS_F16;
        return true;
    default:
        return false;
    }
}

static uint64_t
elements(const struct ns_stored_tensor *tensor)
{
    uint64_t n = 1; /* fits: the header's check multiplied it already */

    for (uint32_t i = 0; i < tensor->rank; i++)
        n *= tensor->dim[i];
    return n;
}

struct shape {
    uint32_t rank;
    uint64_t dim[3];
};

static struct shape
scalar_shape(void)
{
    return (struct shape){ 0, { 0 } };
}

static struct shape
shape1(uint64_t n)
{
    return (struct shape){ 1, { n } };
}

static struct shape
shape2(uint64_t n, uint64_t k)
{
    return (struct shape){ 2, { n, k } };
}

static struct shape
shape3(uint64_t count, uint64_t n, uint64_t k)
{
    return (struct shape){ 3, { count, n, k } };
}

/* Matrices that are multiplied by; not tables, nor anything of the tower, whose
 * products no scheme leaves to FP8. */
static bool
may_be_codes(const struct binder *b, const struct ns_stored_tensor *tensor)
{
    return b->model->config.fp8 && tensor->rank >= 2 && !b->in_tower &&
           b->part != NS_PART_EMBEDDING;
}

static void
check_tensor(struct binder *b, const struct ns_stored_tensor *tensor,
             struct shape shape)
{
    char found[80], wanted[80];
    enum ns_dtype dtype;

    if (tensor->rank != shape.rank ||
        memcmp(tensor->dim, shape.dim, shape.rank * sizeof(shape.dim[0])) != 0)
        fail(b, NS_REJECT,
             "%s: tensor %s has shape [%s], config.json asks for [%s]",
             shard_of(b, tensor), tensor->name,
             show_shape(tensor->rank, tensor->dim, found, sizeof(found)),
             show_shape(shape.rank, shape.dim, wanted, sizeof(wanted)));
    else if (!float_type(tensor->dtype, &dtype) ||
             (dtype == NS_E4M3 && !may_be_codes(b, tensor)))
        fail(b, NS_REJECT,
             "%s: tensor %s is stored as %s, supported: BF16, F16, F32%s",
             shard_of(b, tensor), tensor->name,
             ns_stored_name(tensor->dtype),
             tensor->dtype != NS_STORED_F8_E4M3 ? ""
             : b->model->config.fp8
                 ? " (FP8 is for the matrices of layers)"
                 : " (FP8 needs a quantization_config in config.json)");
}

/* `copy` is another name that the same weight may be stored under. Returns
 * the tensor to use: the first if it is there. */
static const struct ns_stored_tensor *
join_copy(struct binder *b, const struct ns_stored_tensor *tensor,
          const char *copy, struct shape shape)
{
    const struct ns_stored_tensor *other = ns_safetensors_find(b->st, copy);

    if (!other)
        return tensor;
    check_tensor(b, other, shape);
    if (!tensor || b->status != NS_OK)
        return other;
    if (other->dtype != tensor->dtype) {
        fail(b, NS_REJECT,
             "%s: tensor %s is stored as %s, its copy %s as %s",
             shard_of(b, tensor), tensor->name, ns_stored_name(tensor->dtype),
             copy, ns_stored_name(other->dtype));
    } else if (!b->packing) {
        b->model->n_copies++;
    } else { /* once, and while the pages are wanted anyway */
        if (memcmp(tensor->data, other->data, tensor->bytes) != 0)
            fail(b, NS_REJECT,
                 "%s: tensor %s differs from its copy %s: untied weights are "
                 "not supported", shard_of(b, tensor), tensor->name, copy);
        ns_safetensors_drop(b->st, other);
    }
    return tensor;
}

/* The tensor prefix + suffix, checked; NULL once the walk has failed. */
static const struct ns_stored_tensor *
need(struct binder *b, const char *suffix, bool shared, struct shape shape)
{
    char name[MAX_TENSOR_NAME], copy[MAX_TENSOR_NAME];
    const struct ns_stored_tensor *tensor;

    if (b->status != NS_OK)
        return NULL;
    snprintf(name, sizeof(name), "%s%s", b->prefix, suffix);
    tensor = ns_safetensors_find(b->st, name);
    if (tensor)
        check_tensor(b, tensor, shape);
    if (shared && b->status == NS_OK) {
        snprintf(copy, sizeof(copy), ENCODER "%s%s",
                 b->prefix + strlen(DECODER), suffix);
        tensor = join_copy(b, tensor, copy, shape);
        if (strcmp(suffix, "embed_tokens.weight") == 0 && b->status == NS_OK)
            tensor = join_copy(b, tensor, "lm_head.weight", shape);
    }
    if (!tensor)
        fail(b, NS_REJECT, "tensor %s is needed and is in no shard", name);
    return b->status == NS_OK ? tensor : NULL;
}

static float
widen_f16(uint16_t h)
{
    int exponent = h >> 10 & 0x1f;
    float mantissa = (float)(h & 0x3ff);
    float value;

    if (exponent == 0x1f)
        value = mantissa != 0.0f ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexpf(mantissa, -24);
    else
        value = ldexpf(mantissa + 1024.0f, exponent - 25);
    return h & 0x8000 ? -value : value;
}

static float
stored_float(const struct ns_stored_tensor *tensor, uint64_t i)
{
    const unsigned char *data = tensor->data; /* at any alignment */
    uint32_t word = 0;
    uint16_t half;
    float value;

    if (tensor->dtype == NS_STORED_F32) {
        memcpy(&value, data + i * 4, sizeof(value));
        return value;
    }
    memcpy(&half, data + i * 2, sizeof(half));
    if (tensor->dtype == NS_STORED_F16)
        return widen_f16(half);
    word = (uint32_t)half << 16;
    memcpy(&value, &word, sizeof(value));
    return value;
}

/* Room for n floats of the device's vectors; the host side is written through
 * *host, which is NULL in the first walk. */
static float *
vector_room(struct binder *b, size_t n, float **host)
{
    size_t at = b->n_floats;

    b->n_floats += (n + VECTOR_ALIGN - 1) / VECTOR_ALIGN * VECTOR_ALIGN;
    *host = b->packing ? b->host + at : NULL;
    return b->packing ? b->model->weights.vectors + at : NULL;
}

static void
count(struct binder *b, const struct ns_stored_tensor *tensor,
      enum ns_part part)
{
    if (b->packing)
        return;
    if (b->in_tower)
        b->model->n_vision_parameters += elements(tensor);
    else
        b->model->part_parameters[part] += elements(tensor);
}

/* A small tensor, every value of it finite, times `factor` in fp32. */
static void
read_floats(struct binder *b, const struct ns_stored_tensor *tensor,
            double factor, float *out)
{
    uint64_t n = elements(tensor);

    for (uint64_t i = 0; i < n; i++) {
        float value = stored_float(tensor, i);

        if (!isfinite(value)) {
            fail(b, NS_REJECT, "%s: tensor %s: value %llu is %s",
                 shard_of(b, tensor), tensor->name, (unsigned long long)i,
                 isnan(value) ? "NaN" : "infinite");
            return;
        }
        if (out)
            out[i] = (float)((double)value * factor);
    }
}

static void
vector(struct binder *b, const char *suffix, bool shared, uint32_t n,
       double factor, float **out)
{
    const struct ns_stored_tensor *tensor =
        need(b, suffix, shared, shape1(n));
    float *host;

    if (!tensor)
        return;
    *out = vector_room(b, n, &host);
    count(b, tensor, NS_PART_VECTORS);
    read_floats(b, tensor, factor, host);
}

static void
norm(struct binder *b, const char *suffix, uint32_t n, float **out)
{
    vector(b, suffix, true, n, 1.0, out);
}

static struct ns_matrix
as_matrix(const struct ns_stored_tensor *tensor)
{
    struct ns_matrix matrix = { .data = tensor->data, .count = 1 };
    uint32_t n_at = tensor->rank == 3;

    (void)float_type(tensor->dtype, &matrix.dtype); /* need() checked it */
    if (n_at == 1)
        matrix.count = (uint32_t)tensor->dim[0];
    matrix.n = (uint32_t)tensor->dim[n_at];
    matrix.k = (uint32_t)tensor->dim[n_at + 1];
    return matrix;
}

/* A matrix, or several that belong together: one tensor, or one a part. */
struct source {
    const struct ns_stored_tensor *tensor; /* the first, where parts */
    const struct ns_stored_tensor **part;  /* [n_parts]; NULL: the tensor */
    uint32_t n_parts;
};

static const struct ns_stored_tensor *
part_of(const struct source *source, uint32_t i)
{
    return source->part ? source->part[i] : source->tensor;
}

/* The scales of a tensor of codes: "NAME_scale", one an output, in the order
 * of its outputs; into `out` unless NULL. */
static void
read_scales(struct binder *b, const struct ns_stored_tensor *codes, float *out)
{
    struct shape shape = { codes->rank, { 0 } };
    char name[MAX_TENSOR_NAME], copy[MAX_TENSOR_NAME];
    const struct ns_stored_tensor *scales;
    bool in_tower = b->in_tower;

    for (uint32_t i = 0; i + 1 < codes->rank; i++)
        shape.dim[i] = codes->dim[i];
    shape.dim[codes->rank - 1] = 1;
    snprintf(name, sizeof(name), "%s_scale", codes->name);
    scales = ns_safetensors_find(b->st, name);
    if (!scales) {
        fail(b, NS_REJECT, "%s: tensor %s is stored as F8_E4M3, and there is "
             "no %s", shard_of(b, codes), codes->name, name);
        return;
    }
    b->in_tower = true; /* scales are not codes themselves */
    check_tensor(b, scales, shape);
    if (b->status == NS_OK && strncmp(name, DECODER, strlen(DECODER)) == 0) {
        snprintf(copy, sizeof(copy), ENCODER "%s", name + strlen(DECODER));
        scales = join_copy(b, scales, copy, shape);
    }
    b->in_tower = in_tower;
    if (b->status == NS_OK)
        read_floats(b, scales, 1.0, out);
}

/* What ns_matrix points to, for the time of one pack(). */
struct sources {
    struct ns_matrix matrix[MAX_SOURCES];
    const void **parts[MAX_SOURCES]; /* owned */
    float *scales[MAX_SOURCES];      /* owned */
};

static void
drop_sources(struct sources *s)
{
    for (uint32_t i = 0; i < MAX_SOURCES; i++) {
        free(s->parts[i]);
        free(s->scales[i]);
    }
}

/* One source's matrix, its parts checked to be of one type and counted. */
static void
lay_out(struct binder *b, const struct source *source, struct sources *s,
        uint32_t at)
{
    struct ns_matrix *matrix = &s->matrix[at];
    uint32_t n_parts = source->part ? source->n_parts : 1;
    size_t n_scales;

    *matrix = as_matrix(source->tensor);
    if (source->part) {
        matrix->count = n_parts;
        s->parts[at] = calloc(n_parts, sizeof(*s->parts[at]));
        matrix->parts = s->parts[at];
    }
    n_scales = (size_t)matrix->count * matrix->n;
    if (matrix->dtype == NS_E4M3) {
        s->scales[at] = calloc(n_scales, sizeof(float));
        matrix->scale = s->scales[at];
    }
    if ((source->part && !matrix->parts) ||
        (matrix->dtype == NS_E4M3 && !matrix->scale)) {
        fail(b, NS_FATAL, "out of memory for the scales of %s",
             source->tensor->name);
        return;
    }
    for (uint32_t i = 0; i < n_parts && b->status == NS_OK; i++) {
        const struct ns_stored_tensor *part = part_of(source, i);

        count(b, part, b->part);
        if (s->parts[at])
            s->parts[at][i] = part->data;
        if (matrix->dtype == NS_E4M3) {
            if (!b->packing)
                b->model->n_codes += elements(part);
            read_scales(b, part, s->scales[at] + (size_t)i * matrix->n);
        }
    }
}

static void
weight_of(struct binder *b, enum ns_packing packing,
          const struct source *source, uint32_t n_sources,
          struct ns_weight *out)
{
    const struct ns_stored_tensor *first = source[0].tensor;
    struct sources s = { 0 };

    for (uint32_t i = 0; i < n_sources; i++)
        for (uint32_t j = 0; j < (source[i].part ? source[i].n_parts : 1);
             j++) {
            const struct ns_stored_tensor *part = part_of(&source[i], j);

            if (!part)
                return; /* the walk has failed */
            if (part->dtype != first->dtype) {
                fail(b, NS_REJECT,
                     "tensor %s is stored as %s, %s as %s: what is "
                     "multiplied together has one type", part->name,
                     ns_stored_name(part->dtype), first->name,
                     ns_stored_name(first->dtype));
                return;
            }
        }
    for (uint32_t i = 0; i < n_sources && b->status == NS_OK; i++)
        lay_out(b, &source[i], &s, i);
    if (b->status == NS_OK && !b->packing) {
        size_t bytes = b->be->ops->packed_bytes(b->be, packing, s.matrix,
                                                n_sources);

        if (b->in_tower)
            b->model->vision_bytes += bytes;
        else
            b->model->part_bytes[b->part] += bytes;
    } else if (b->status == NS_OK) {
        for (uint32_t i = 0; i < n_sources; i++)
            for (uint32_t j = 0; j < s.matrix[i].count &&
                                 (source[i].part || j == 0); j++)
                ns_safetensors_want(b->st, part_of(&source[i], j));
        b->status = b->be->ops->pack(b->be, packing, s.matrix, n_sources, out,
                                     b->err);
        if (b->status != NS_OK)
            ns_context(b->err, "packing %s", first->name);
        for (uint32_t i = 0; i < n_sources; i++)
            for (uint32_t j = 0; j < s.matrix[i].count &&
                                 (source[i].part || j == 0); j++)
                ns_safetensors_drop(b->st, part_of(&source[i], j));
    }
    drop_sources(&s);
}

static void
weight(struct binder *b, enum ns_packing packing,
       const struct ns_stored_tensor *const *tensors, uint32_t n_tensors,
       struct ns_weight *out)
{
    struct source source[MAX_SOURCES] = { 0 };

    for (uint32_t i = 0; i < n_tensors; i++)
        source[i].tensor = tensors[i];
    weight_of(b, packing, source, n_tensors, out);
}

static void
linear(struct binder *b, const char *suffix, bool shared, struct shape shape,
       struct ns_weight *out)
{
    const struct ns_stored_tensor *const tensors[MAX_SOURCES] = {
        need(b, suffix, shared, shape),
    };

    weight(b, NS_PACK_LINEAR, tensors, 1, out);
}

static void
gated(struct binder *b, const char *gate, const char *up, bool shared,
      struct shape shape, struct ns_weight *out)
{
    const struct ns_stored_tensor *const tensors[MAX_SOURCES] = {
        need(b, gate, shared, shape),
        need(b, up, shared, shape),
    };

    weight(b, NS_PACK_GATED, tensors, 2, out);
}

static void
attention_weights(struct binder *b, const struct ns_layer_config *layer,
                  struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    uint64_t nq = (uint64_t)c->n_heads * layer->head_dim;
    uint64_t nkv = (uint64_t)layer->n_kv_heads * layer->head_dim;
    const struct ns_stored_tensor *qkv[MAX_SOURCES] = { NULL };

    b->part = NS_PART_ATTENTION;
    qkv[0] = need(b, "self_attn.q_proj.weight", true, shape2(nq, c->hidden));
    qkv[1] = need(b, "self_attn.k_proj.weight", true, shape2(nkv, c->hidden));
    if (!layer->full) /* full layers make V from the key projection */
        qkv[2] = need(b, "self_attn.v_proj.weight", true,
                      shape2(nkv, c->hidden));
    weight(b, NS_PACK_LINEAR, qkv, layer->full ? 2 : 3, &w->qkv);
    linear(b, "self_attn.o_proj.weight", true, shape2(c->hidden, nq), &w->o);
    norm(b, "self_attn.q_norm.weight", layer->head_dim, &w->q_norm);
    norm(b, "self_attn.k_norm.weight", layer->head_dim, &w->k_norm);
}

/* Writers of quantised checkpoints take the experts apart. */
static bool
experts_apart(const struct binder *b)
{
    char name[MAX_TENSOR_NAME];

    snprintf(name, sizeof(name), "%sexperts.0.gate_proj.weight", b->prefix);
    return ns_safetensors_find(b->st, name) != NULL;
}

/* One projection of all experts, each a tensor of its own. */
static void
gather_experts(struct binder *b, const char *projection, struct shape shape,
               const struct ns_stored_tensor **part, struct source *out)
{
    uint32_t n = b->model->config.n_experts;
    char suffix[64];

    for (uint32_t i = 0; i < n; i++) {
        snprintf(suffix, sizeof(suffix), "experts.%u.%s_proj.weight", i,
                 projection);
        part[i] = need(b, suffix, true, shape);
    }
    *out = (struct source){ part[0], part, n };
}

static void
apart_weights(struct binder *b, struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    struct shape inner = shape2(c->expert_dim, c->hidden);
    const struct ns_stored_tensor **parts =
        calloc(2 * (size_t)c->n_experts, sizeof(const void *));
    struct source source[MAX_SOURCES];

    if (!parts) {
        fail(b, NS_FATAL, "out of memory for %u experts", c->n_experts);
        return;
    }
    gather_experts(b, "gate", inner, parts, &source[0]);
    gather_experts(b, "up", inner, parts + c->n_experts, &source[1]);
    weight_of(b, NS_PACK_GATED, source, 2, &w->experts_gated);
    gather_experts(b, "down", shape2(c->hidden, c->expert_dim), parts,
                   &source[0]);
    weight_of(b, NS_PACK_LINEAR, source, 1, &w->experts_down);
    free(parts);
}

static void
expert_weights(struct binder *b, struct ns_layer_weights *w)
{
    const struct ns_config *c = &b->model->config;
    const struct ns_stored_tensor *gate_up[MAX_SOURCES] = { NULL };

    b->part = NS_PART_ROUTER;
    linear(b, "router.proj.weight", true, shape2(c->n_experts, c->hidden),
           &w->router);
    /* The reference multiplies by the scale and then by H^(-1/2), each rounded
     * to fp32; the product of both, rounded once, is nearer to the formula
     * and within an ulp of it. */
    vector(b, "router.scale", true, c->hidden, 1.0 / sqrt(c->hidden),
           &w->router_scale);
    vector(b, "router.per_expert_scale", true, c->n_experts, 1.0,
           &w->expert_scale);

    b->part = NS_PART_EXPERTS;
    if (experts_apart(b)) {
        apart_weights(b, w);
        return;
    }
    gate_up[0] = need(b, "experts.gate_up_proj", true,
                      shape3(c->n_experts, 2ull * c->expert_dim, c->hidden));
    weight(b, NS_PACK_GATED, gate_up, 1, &w->experts_gated);
    linear(b, "experts.down_proj", true,
           shape3(c->n_experts, c->hidden, c->expert_dim), &w->experts_down);
}

static void
layer_scalar(struct binder *b, const char *mode, uint32_t i, float *out)
{
    const struct ns_stored_tensor *tensor;

    snprintf(b->prefix, sizeof(b->prefix), "%slayers.%u.", mode, i);
    tensor = need(b, "layer_scalar", false, shape1(1));
    if (!tensor)
        return;
    count(b, tensor, NS_PART_VECTORS);
    read_floats(b, tensor, 1.0, out);
}

static void
layer_weights(struct binder *b, uint32_t i)
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
    gated(b, "mlp.gate_proj.weight", "mlp.up_proj.weight", true,
          shape2(c->intermediate, c->hidden), &w->mlp_gated);
    linear(b, "mlp.down_proj.weight", true,
           shape2(c->hidden, c->intermediate), &w->mlp_down);
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
frequencies(struct binder *b, uint32_t head_dim, uint32_t n_turning,
            float theta, float factor)
{
    float *host, *device;

    if (b->status != NS_OK)
        return NULL;
    device = vector_room(b, head_dim / 2, &host);
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
rope_tables(struct binder *b)
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
        w->frequency_sliding =
            frequencies(b, d, d / 2, c->theta_sliding, 1.0f);
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
text_weights(struct binder *b)
{
    const struct ns_config *c = &b->model->config;
    struct ns_weights *w = &b->model->weights;
    const struct ns_stored_tensor *embedding[MAX_SOURCES] = { NULL };

    b->n_floats = 0;
    snprintf(b->prefix, sizeof(b->prefix), DECODER);
    b->part = NS_PART_EMBEDDING;
    embedding[0] = need(b, "embed_tokens.weight", true,
                        shape2(c->vocab, c->hidden));
    weight(b, NS_PACK_TABLE, embedding, 1, &w->embedding);
    if (!embedding[0])
        return;
    (void)float_type(embedding[0]->dtype, &b->model->dtype);
    w->embedding_scale = embedding_scale(c->hidden, b->model->dtype);
    norm(b, "norm.weight", c->hidden, &w->final_norm);

    /* The decoder's own: there is nothing of it in the encoder. */
    snprintf(b->prefix, sizeof(b->prefix), DECODER "self_conditioning.");
    b->part = NS_PART_SELF_CONDITIONING;
    vector(b, "pre_norm.weight", false, c->hidden, 1.0, &w->sc_pre_norm);
    gated(b, "gate_proj.weight", "up_proj.weight", false,
          shape2(c->intermediate, c->hidden), &w->sc_gated);
    linear(b, "down_proj.weight", false, shape2(c->hidden, c->intermediate),
           &w->sc_down);
    rope_tables(b);
    for (uint32_t i = 0; i < c->n_layers && b->status == NS_OK; i++)
        layer_weights(b, i);
}

/* The four limits of one projection; infinite is none. */
static void
read_limits(struct binder *b, const char *module, struct ns_clip *clip)
{
    static const char *const names[] = { "input_min", "input_max",
                                         "output_min", "output_max" };
    float *const to[] = { &clip->input_min, &clip->input_max,
                          &clip->output_min, &clip->output_max };
    char name[64];

    for (int i = 0; i < 4; i++) {
        const struct ns_stored_tensor *tensor;

        snprintf(name, sizeof(name), "%s.%s", module, names[i]);
        tensor = need(b, name, false, scalar_shape());
        if (!tensor)
            return;
        count(b, tensor, b->part);
        *to[i] = stored_float(tensor, 0);
        if (isnan(*to[i]) || (i % 2 == 1 && *to[i] < *to[i - 1])) {
            fail(b, NS_REJECT, "%s: tensor %s is %g: not a limit above %g",
                 shard_of(b, tensor), tensor->name, (double)*to[i],
                 i % 2 == 1 ? (double)*to[i - 1] : -HUGE_VAL);
            return;
        }
    }
}

static const struct ns_stored_tensor *
vision_matrix(struct binder *b, const char *module, uint64_t n, uint64_t k,
              struct ns_clip *clip)
{
    char name[64];

    if (b->model->config.vision.clipped)
        read_limits(b, module, clip);
    snprintf(name, sizeof(name), "%s.linear.weight", module);
    return need(b, name, false, shape2(n, k));
}

static void
vision_layer(struct binder *b, struct ns_vision_layer_weights *w)
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
            weight(b, NS_PACK_LINEAR, &t[i], 1, apart[i]);
    } else {
        weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_Q], 3, &w->qkv);
        weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_O], 1, &w->o);
        weight(b, NS_PACK_GATED, &t[NS_CLIPPED_GATE], 2, &w->gated);
        weight(b, NS_PACK_LINEAR, &t[NS_CLIPPED_DOWN], 1, &w->down);
    }
    vector(b, "self_attn.q_norm.weight", false, v->head_dim, 1.0, &w->q_norm);
    vector(b, "self_attn.k_norm.weight", false, v->head_dim, 1.0, &w->k_norm);
    vector(b, "input_layernorm.weight", false, v->hidden, 1.0,
           &w->input_norm);
    vector(b, "post_attention_layernorm.weight", false, v->hidden, 1.0,
           &w->post_attention_norm);
    vector(b, "pre_feedforward_layernorm.weight", false, v->hidden, 1.0,
           &w->pre_mlp_norm);
    vector(b, "post_feedforward_layernorm.weight", false, v->hidden, 1.0,
           &w->post_mlp_norm);
}

/* The table of places is looked up, not multiplied: it lies with the norms. */
static void
vision_positions(struct binder *b, struct ns_vision_weights *w)
{
    const struct ns_vision_config *v = &b->model->config.vision;
    const struct ns_stored_tensor *tensor =
        need(b, "patch_embedder.position_embedding_table", false,
             shape3(2, v->n_positions, v->hidden));
    float *host;

    if (!tensor)
        return;
    w->position = vector_room(b, (size_t)elements(tensor), &host);
    count(b, tensor, b->part);
    read_floats(b, tensor, 1.0, host);
}

/* Everything counts as the tower's own, vectors too. */
static void
vision_weights(struct binder *b)
{
    const struct ns_config *c = &b->model->config;
    const struct ns_vision_config *v = &c->vision;
    struct ns_vision_weights *w = &b->model->weights.vision;

    b->part = NS_N_PARTS;
    b->in_tower = true;
    snprintf(b->prefix, sizeof(b->prefix), "model.encoder.embed_vision.");
    linear(b, "embedding_projection.weight", false,
           shape2(c->hidden, v->hidden), &w->projection);
    snprintf(b->prefix, sizeof(b->prefix), TOWER);
    linear(b, "patch_embedder.input_proj.weight", false,
           shape2(v->hidden, 3ull * v->patch * v->patch), &w->patch);
    vision_positions(b, w);
    if (v->standardize) {
        vector(b, "std_bias", false, v->hidden, 1.0, &w->std_bias);
        vector(b, "std_scale", false, v->hidden, 1.0, &w->std_scale);
    }
    w->frequency = frequencies(b, v->head_dim / 2, v->head_dim / 4,
                               v->rope_theta, 1.0f);
    for (uint32_t i = 0; i < v->n_layers && b->status == NS_OK; i++) {
        snprintf(b->prefix, sizeof(b->prefix), TOWER "encoder.layers.%u.", i);
        vision_layer(b, &w->layer[i]);
    }
    b->in_tower = false;
}

static bool
has_tower(const struct binder *b)
{
    size_t n;
    const struct ns_stored_tensor *all = ns_safetensors_all(b->st, &n);

    for (size_t i = 0; i < n; i++)
        if (strncmp(all[i].name, TOWER, strlen(TOWER)) == 0)
            return true;
    return false;
}

static void
list_unused(struct binder *b)
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
        fail(b, NS_FATAL, "out of memory listing unused tensors");
}

/* The first walk: all is checked, all sizes are known, nothing is packed. */
static void
survey(struct binder *b)
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
            fail(b, NS_REJECT,
                 "config.json: the image token ids are outside the vocabulary "
                 "of %u, and the checkpoint has a vision tower", c->vocab);
        model->weights.vision.layer =
            calloc(c->vision.n_layers, sizeof(*model->weights.vision.layer));
        if (!model->weights.vision.layer)
            fail(b, NS_FATAL, "out of memory opening a model");
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

/* The second walk. */
static void
pack(struct binder *b)
{
    size_t n_floats = b->n_floats;
    void *vectors = NULL;

    b->host = calloc(n_floats, sizeof(float));
    if (!b->host) {
        fail(b, NS_FATAL, "out of memory for %zu norm weights", n_floats);
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

struct texts { /* the small files, as they lie on disk */
    struct ns_buf config, generation, tokenizer;
    bool no_generation, no_tokenizer;
};

static enum ns_status
read_text(const char *directory, const char *name, size_t limit,
          struct ns_buf *out, bool *absent, struct ns_error *err)
{
    char path[PATH_MAX];

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", directory, name) >=
        sizeof(path))
        return ns_refuse(err, "bad_model", NULL, "%s: path too long",
                         directory);
    return ns_file_read(path, limit, out, absent, err);
}

static enum ns_status
read_texts(const char *directory, struct texts *texts, struct ns_error *err)
{
    enum ns_status status;

    status = read_text(directory, "config.json", MAX_CONFIG_BYTES,
                       &texts->config, NULL, err);
    if (status == NS_OK)
        status = read_text(directory, "generation_config.json",
                           MAX_CONFIG_BYTES, &texts->generation,
                           &texts->no_generation, err);
    if (status == NS_OK)
        status = read_text(directory, "tokenizer.json", MAX_TOKENIZER_BYTES,
                           &texts->tokenizer, &texts->no_tokenizer, err);
    return status;
}

/* Each part with its label and length, so that no two sets of parts give the
 * same bytes. An absent part differs from an empty one. */
static bool
hash_part(EVP_MD_CTX *hash, const char *label, const void *bytes,
          size_t length, bool absent)
{
    unsigned char prefix[9];
    uint64_t n = length;

    prefix[0] = absent ? 0 : 1;
    for (int i = 1; i < 9; i++, n >>= 8)
        prefix[i] = (unsigned char)n;
    return EVP_DigestUpdate(hash, label, strlen(label) + 1) == 1 &&
           EVP_DigestUpdate(hash, prefix, sizeof(prefix)) == 1 &&
           (length == 0 || EVP_DigestUpdate(hash, bytes, length) == 1);
}

/* Two trainings of one configuration have the same headers and sizes. Their
 * norms and scales tell them apart, and are a thousandth of the file. */
static bool
hash_vectors(EVP_MD_CTX *hash, const struct ns_safetensors *st)
{
    size_t n;
    const struct ns_stored_tensor *all = ns_safetensors_all(st, &n);

    for (size_t i = 0; i < n; i++)
        if (all[i].rank <= 1 && !hash_part(hash, all[i].name, all[i].data,
                                           all[i].bytes, false))
            return false;
    return true;
}

static bool
hash_all(EVP_MD_CTX *hash, const struct texts *texts,
         const struct ns_safetensors *st)
{
    size_t length, file_bytes;
    const void *bytes;

    if (EVP_DigestInit_ex(hash, EVP_sha256(), NULL) != 1 ||
        !hash_part(hash, "config", texts->config.data, texts->config.length,
                   false) ||
        !hash_part(hash, "generation", texts->generation.data,
                   texts->generation.length, texts->no_generation) ||
        !hash_part(hash, "tokenizer", texts->tokenizer.data,
                   texts->tokenizer.length, texts->no_tokenizer))
        return false;
    bytes = ns_safetensors_index(st, &length);
    if (!hash_part(hash, "index", bytes, length, bytes == NULL))
        return false;
    for (uint32_t i = 0; i < ns_safetensors_n_shards(st); i++) {
        char size[32];

        bytes = ns_safetensors_header(st, i, &length, &file_bytes);
        snprintf(size, sizeof(size), "%zu", file_bytes);
        if (!hash_part(hash, "header", bytes, length, false) ||
            !hash_part(hash, "size", size, strlen(size), false))
            return false;
    }
    return hash_vectors(hash, st);
}

static enum ns_status
hash_revision(const struct texts *texts, const struct ns_safetensors *st,
              char out[65], struct ns_error *err)
{
    unsigned char digest[32];
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool done = hash && hash_all(hash, texts, st) &&
                EVP_DigestFinal_ex(hash, digest, NULL) == 1;

    EVP_MD_CTX_free(hash);
    if (!done)
        return ns_fail(err, NS_FATAL, "SHA-256 of the model failed");
    for (size_t i = 0; i < sizeof(digest); i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    return NS_OK;
}

static enum ns_status
load(const char *directory, struct ns_backend *be, bool packed,
     struct ns_model **out, struct ns_error *err)
{
    struct texts texts = { .no_generation = false };
    struct binder b = { .be = be, .err = err };
    struct ns_model *model = NULL;
    enum ns_status status;

    ns_buf_init(&texts.config, MAX_CONFIG_BYTES);
    ns_buf_init(&texts.generation, MAX_CONFIG_BYTES);
    ns_buf_init(&texts.tokenizer, MAX_TOKENIZER_BYTES);
    model = calloc(1, sizeof(*model));
    if (!model) {
        status = ns_fail(err, NS_FATAL, "out of memory opening a model");
        goto out;
    }
    model->backend = be;
    status = read_texts(directory, &texts, err);
    if (status != NS_OK)
        goto out;
    status = ns_config_parse(texts.config.data, texts.config.length,
                             "config.json", &model->config, err);
    if (status == NS_OK)
        status = ns_generation_parse(
            texts.no_generation ? NULL : texts.generation.data,
            texts.generation.length, "generation_config.json", &model->config,
            &model->generation, err);
    if (status != NS_OK) {
        ns_context(err, "%s", directory);
        goto out;
    }
    model->weights.layer =
        calloc(model->config.n_layers, sizeof(*model->weights.layer));
    if (!model->weights.layer) {
        status = ns_fail(err, NS_FATAL, "out of memory opening a model");
        goto out;
    }
    status = ns_safetensors_open(directory, &b.st, err);
    if (status == NS_OK)
        status = hash_revision(&texts, b.st, model->revision, err);
    if (status != NS_OK)
        goto out;

    b.model = model;
    survey(&b);
    if (b.status == NS_OK && packed)
        pack(&b);
    status = b.status;
    if (status != NS_OK) {
        ns_context(err, "%s", directory);
        goto out;
    }
    *out = model;
    model = NULL;
out:
    free(b.host);
    ns_safetensors_close(b.st);
    ns_model_close(model);
    ns_buf_fini(&texts.tokenizer);
    ns_buf_fini(&texts.generation);
    ns_buf_fini(&texts.config);
    return status;
}

enum ns_status
ns_model_describe(const char *directory, struct ns_backend *be,
                  struct ns_model **out, struct ns_error *err)
{
    return load(directory, be, false, out, err);
}

enum ns_status
ns_model_open(const char *directory, struct ns_backend *be,
              struct ns_model **out, struct ns_error *err)
{
    return load(directory, be, true, out, err);
}

static void
drop(struct ns_backend *be, struct ns_weight *weight_)
{
    if (weight_->data)
        be->ops->drop(be, weight_);
}

void
ns_model_close(struct ns_model *model)
{
    struct ns_weights *w;

    if (!model)
        return;
    w = &model->weights;
    for (uint32_t i = 0; w->layer && i < model->config.n_layers; i++) {
        drop(model->backend, &w->layer[i].qkv);
        drop(model->backend, &w->layer[i].o);
        drop(model->backend, &w->layer[i].mlp_gated);
        drop(model->backend, &w->layer[i].mlp_down);
        drop(model->backend, &w->layer[i].router);
        drop(model->backend, &w->layer[i].experts_gated);
        drop(model->backend, &w->layer[i].experts_down);
    }
    for (uint32_t i = 0; w->vision.layer && i < model->config.vision.n_layers;
         i++) {
        struct ns_vision_layer_weights *v = &w->vision.layer[i];
        struct ns_weight *const all[] = { &v->qkv, &v->gated, &v->q, &v->k,
                                          &v->v, &v->gate, &v->up, &v->o,
                                          &v->down };

        for (size_t j = 0; j < sizeof(all) / sizeof(all[0]); j++)
            drop(model->backend, all[j]);
    }
    drop(model->backend, &w->vision.projection);
    drop(model->backend, &w->vision.patch);
    drop(model->backend, &w->sc_down);
    drop(model->backend, &w->sc_gated);
    drop(model->backend, &w->embedding);
    if (w->vectors)
        model->backend->ops->release(model->backend, w->vectors);
    free(w->vision.layer);
    free(w->layer);
    for (size_t i = 0; i < model->n_unused; i++)
        free(model->unused[i]);
    free(model->unused);
    free(model);
}

static void
print_shapes(const struct ns_config *c, FILE *file)
{
    const struct ns_layer_config *full = &c->layer[c->n_layers - 1];
    const struct ns_layer_config *sliding = NULL;
    uint32_t n_full = 0;

    for (uint32_t i = 0; i < c->n_layers; i++) {
        n_full += c->layer[i].full;
        if (!c->layer[i].full)
            sliding = &c->layer[i];
    }
    fprintf(file,
            "family      DiffusionGemma, text%s\n"
            "layers      %u: %u sliding (window %u), %u full\n"
            "shapes      hidden %u, dense %u, vocabulary %u\n"
            "experts     %u of %u, top %u in each layer\n",
            c->vision.present ? " and images" : "", c->n_layers,
            c->n_layers - n_full, c->sliding_window, n_full, c->hidden,
            c->intermediate, c->vocab, c->n_experts, c->expert_dim, c->top_k);
    fprintf(file, "attention   %u heads;", c->n_heads);
    if (sliding)
        fprintf(file, " sliding %u key heads of %u;", sliding->n_kv_heads,
                sliding->head_dim);
    fprintf(file,
            " full %u key heads of %u\n"
            "canvas      %u tokens\n"
            "context     %u tokens\n",
            full->n_kv_heads, full->head_dim, c->canvas_length,
            c->max_position);
}

void
ns_model_print(const struct ns_model *model, FILE *file)
{
    static const char *const parts[NS_N_PARTS] = {
        [NS_PART_EMBEDDING] = "embedding",
        [NS_PART_ATTENTION] = "attention",
        [NS_PART_MLP] = "dense MLP",
        [NS_PART_ROUTER] = "router",
        [NS_PART_EXPERTS] = "experts",
        [NS_PART_SELF_CONDITIONING] = "self-conditioning",
        [NS_PART_VECTORS] = "norms and scales",
    };
    static const char *const types[] = {
        [NS_F32] = "f32", [NS_BF16] = "bf16", [NS_F16] = "f16",
    };
    const struct ns_generation *g = &model->generation;

    print_shapes(&model->config, file);
    fprintf(file,
            "sampling    at most %u steps, entropy bound %g, temperature %g "
            "to %g, stable %u, confident below %g\n"
            "modes       diffusion%s\n"
            "revision    %s\n"
            "files       %u, %.3f GB, weights in %s\n",
            g->max_denoising_steps, (double)g->entropy_bound,
            (double)g->t_max, (double)g->t_min, g->stability_threshold,
            (double)g->confidence_threshold,
            g->ar_capable ? ", ar, hybrid" : "", model->revision,
            model->n_shards, (double)model->file_bytes / 1e9,
            types[model->dtype]);
    if (model->n_codes > 0)
        fprintf(file, "quantised   %.1f %% of the parameters in FP8 (E4M3), a "
                "scale an output\n", 100.0 * (double)model->n_codes /
                                         (double)model->n_parameters);

    fprintf(file, "\n%-20s %15s %12s\n", "part", "parameters", "packed MB");
    for (int i = 0; i < NS_N_PARTS; i++)
        fprintf(file, "%-20s %15llu %12.1f\n", parts[i],
                (unsigned long long)model->part_parameters[i],
                (double)model->part_bytes[i] / 1e6);
    fprintf(file, "%-20s %15llu %12.1f\n", "all",
            (unsigned long long)model->n_parameters,
            (double)(model->weight_bytes - model->vision_bytes) / 1e6);
    fprintf(file, "%-20s %15llu\n", "active for a token",
            (unsigned long long)model->n_active);
    if (model->config.vision.present)
        fprintf(file, "%-20s %15llu %12.1f%s\n", "vision tower",
                (unsigned long long)model->n_vision_parameters,
                (double)model->vision_bytes / 1e6,
                model->config.vision.clipped ? "   clipped" : "");

    if (model->n_copies > 0)
        fprintf(file, "\n%u stored copies of shared tensors, read from one\n",
                model->n_copies);
    if (model->n_unused > 0)
        fprintf(file, "\nunused tensors: %zu\n", model->n_unused);
    for (size_t i = 0; i < model->n_unused && i < PRINTED_UNUSED; i++)
        fprintf(file, "    %s\n", model->unused[i]);
    if (model->n_unused > PRINTED_UNUSED)
        fprintf(file, "    and %zu more\n", model->n_unused - PRINTED_UNUSED);
}
