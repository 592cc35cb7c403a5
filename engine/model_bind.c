#include "engine/model_bind.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VECTOR_ALIGN = 16 }; /* floats: each vector starts on its own line */

void
ns_bind_fail(struct ns_binder *b, enum ns_status status, const char *format,
             ...)
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

const char *
ns_bind_shard(const struct ns_binder *b, const struct ns_stored_tensor *tensor)
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

bool
ns_bind_type(enum ns_stored stored, enum ns_dtype *out)
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

/* Matrices that are multiplied by; not tables, nor anything of the tower, whose
 * products no scheme leaves to FP8. */
static bool
may_be_codes(const struct ns_binder *b, const struct ns_stored_tensor *tensor)
{
    return b->model->config.fp8 && tensor->rank >= 2 && !b->in_tower &&
           b->part != NS_PART_EMBEDDING;
}

static void
check_tensor(struct ns_binder *b, const struct ns_stored_tensor *tensor,
             struct ns_bind_shape shape)
{
    char found[80], wanted[80];
    enum ns_dtype dtype;

    if (tensor->rank != shape.rank ||
        memcmp(tensor->dim, shape.dim, shape.rank * sizeof(shape.dim[0])) != 0)
        ns_bind_fail(
            b, NS_REJECT,
            "%s: tensor %s has shape [%s], config.json asks for [%s]",
            ns_bind_shard(b, tensor), tensor->name,
            show_shape(tensor->rank, tensor->dim, found, sizeof(found)),
            show_shape(shape.rank, shape.dim, wanted, sizeof(wanted)));
    else if (!ns_bind_type(tensor->dtype, &dtype) ||
             (dtype == NS_E4M3 && !may_be_codes(b, tensor)))
        ns_bind_fail(
            b, NS_REJECT,
            "%s: tensor %s is stored as %s, supported: BF16, F16, F32%s",
            ns_bind_shard(b, tensor), tensor->name,
            ns_stored_name(tensor->dtype),
            tensor->dtype != NS_STORED_F8_E4M3 ? ""
            : b->model->config.fp8
                ? " (FP8 is for the matrices of layers)"
                : " (FP8 needs a quantization_config in config.json)");
}

/* `copy` is another name that the same weight may be stored under. Returns
 * the tensor to use: the first if it is there. */
static const struct ns_stored_tensor *
join_copy(struct ns_binder *b, const struct ns_stored_tensor *tensor,
          const char *copy, struct ns_bind_shape shape)
{
    const struct ns_stored_tensor *other = ns_safetensors_find(b->st, copy);

    if (!other)
        return tensor;
    check_tensor(b, other, shape);
    if (!tensor || b->status != NS_OK)
        return other;
    if (other->dtype != tensor->dtype) {
        ns_bind_fail(
            b, NS_REJECT, "%s: tensor %s is stored as %s, its copy %s as %s",
            ns_bind_shard(b, tensor), tensor->name,
            ns_stored_name(tensor->dtype), copy, ns_stored_name(other->dtype));
    } else if (!b->packing) {
        b->model->n_copies++;
    } else { /* once, and while the pages are wanted anyway */
        if (memcmp(tensor->data, other->data, tensor->bytes) != 0)
            ns_bind_fail(
                b, NS_REJECT,
                "%s: tensor %s differs from its copy %s: untied weights are "
                "not supported",
                ns_bind_shard(b, tensor), tensor->name, copy);
        ns_safetensors_drop(b->st, other);
    }
    return tensor;
}

/* The tensor prefix + suffix, checked; NULL once the walk has failed. */
const struct ns_stored_tensor *
ns_bind_tensor(struct ns_binder *b, const char *suffix, bool shared,
               struct ns_bind_shape shape)
{
    char name[NS_BIND_NAME], copy[NS_BIND_NAME];
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
        ns_bind_fail(b, NS_REJECT, "tensor %s is needed and is in no shard",
                     name);
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

float
ns_bind_value(const struct ns_stored_tensor *tensor, uint64_t i)
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
float *
ns_bind_room(struct ns_binder *b, size_t n, float **host)
{
    size_t at = b->n_floats;

    b->n_floats += (n + VECTOR_ALIGN - 1) / VECTOR_ALIGN * VECTOR_ALIGN;
    *host = b->packing ? b->host + at : NULL;
    return b->packing ? b->model->weights.vectors + at : NULL;
}

void
ns_bind_count(struct ns_binder *b, const struct ns_stored_tensor *tensor,
              enum ns_part part)
{
    if (b->packing)
        return;
    if (b->in_tower)
        b->model->n_vision_parameters += ns_bind_elements(tensor);
    else
        b->model->part_parameters[part] += ns_bind_elements(tensor);
}

/* A small tensor, every value of it finite, times `factor` in fp32. */
void
ns_bind_floats(struct ns_binder *b, const struct ns_stored_tensor *tensor,
               double factor, float *out)
{
    uint64_t n = ns_bind_elements(tensor);

    for (uint64_t i = 0; i < n; i++) {
        float value = ns_bind_value(tensor, i);

        if (!isfinite(value)) {
            ns_bind_fail(b, NS_REJECT, "%s: tensor %s: value %llu is %s",
                         ns_bind_shard(b, tensor), tensor->name,
                         (unsigned long long)i,
                         isnan(value) ? "NaN" : "infinite");
            return;
        }
        if (out)
            out[i] = (float)((double)value * factor);
    }
}

void
ns_bind_vector(struct ns_binder *b, const char *suffix, bool shared, uint32_t n,
               double factor, float **out)
{
    const struct ns_stored_tensor *tensor =
        ns_bind_tensor(b, suffix, shared, ns_shape1(n));
    float *host;

    if (!tensor)
        return;
    *out = ns_bind_room(b, n, &host);
    ns_bind_count(b, tensor, NS_PART_VECTORS);
    ns_bind_floats(b, tensor, factor, host);
}

static struct ns_matrix
as_matrix(const struct ns_stored_tensor *tensor)
{
    struct ns_matrix matrix = { .data = tensor->data, .count = 1 };
    uint32_t n_at = tensor->rank == 3;

    (void)ns_bind_type(tensor->dtype,
                       &matrix.dtype); /* ns_bind_tensor() checked it */
    if (n_at == 1)
        matrix.count = (uint32_t)tensor->dim[0];
    matrix.n = (uint32_t)tensor->dim[n_at];
    matrix.k = (uint32_t)tensor->dim[n_at + 1];
    return matrix;
}

static const struct ns_stored_tensor *
part_of(const struct ns_bind_source *source, uint32_t i)
{
    return source->part ? source->part[i] : source->tensor;
}

/* The scales of a tensor of codes: "NAME_scale", one an output, in the order
 * of its outputs; into `out` unless NULL. */
static void
read_scales(struct ns_binder *b, const struct ns_stored_tensor *codes,
            float *out)
{
    struct ns_bind_shape shape = { codes->rank, { 0 } };
    char name[NS_BIND_NAME], copy[NS_BIND_NAME];
    const struct ns_stored_tensor *scales;
    bool in_tower = b->in_tower;

    for (uint32_t i = 0; i + 1 < codes->rank; i++)
        shape.dim[i] = codes->dim[i];
    shape.dim[codes->rank - 1] = 1;
    snprintf(name, sizeof(name), "%s_scale", codes->name);
    scales = ns_safetensors_find(b->st, name);
    if (!scales) {
        ns_bind_fail(b, NS_REJECT,
                     "%s: tensor %s is stored as F8_E4M3, and there is "
                     "no %s",
                     ns_bind_shard(b, codes), codes->name, name);
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
        ns_bind_floats(b, scales, 1.0, out);
}

/* What ns_matrix points to, for the time of one pack(). */
struct sources {
    struct ns_matrix matrix[NS_BIND_SOURCES];
    const void **parts[NS_BIND_SOURCES]; /* owned */
    float *scales[NS_BIND_SOURCES];      /* owned */
};

static void
drop_sources(struct sources *s)
{
    for (uint32_t i = 0; i < NS_BIND_SOURCES; i++) {
        free(s->parts[i]);
        free(s->scales[i]);
    }
}

/* One source's matrix, its parts checked to be of one type and counted. */
static void
lay_out(struct ns_binder *b, const struct ns_bind_source *source,
        struct sources *s, uint32_t at)
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
        ns_bind_fail(b, NS_FATAL, "out of memory for the scales of %s",
                     source->tensor->name);
        return;
    }
    for (uint32_t i = 0; i < n_parts && b->status == NS_OK; i++) {
        const struct ns_stored_tensor *part = part_of(source, i);

        ns_bind_count(b, part, b->part);
        if (s->parts[at])
            s->parts[at][i] = part->data;
        if (matrix->dtype == NS_E4M3) {
            if (!b->packing)
                b->model->n_codes += ns_bind_elements(part);
            read_scales(b, part, s->scales[at] + (size_t)i * matrix->n);
        }
    }
}

void
ns_bind_sources(struct ns_binder *b, enum ns_packing packing,
                const struct ns_bind_source *source, uint32_t n_sources,
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
                ns_bind_fail(b, NS_REJECT,
                             "tensor %s is stored as %s, %s as %s: what is "
                             "multiplied together has one type",
                             part->name, ns_stored_name(part->dtype),
                             first->name, ns_stored_name(first->dtype));
                return;
            }
        }
    for (uint32_t i = 0; i < n_sources && b->status == NS_OK; i++)
        lay_out(b, &source[i], &s, i);
    if (b->status == NS_OK && !b->packing) {
        size_t bytes =
            b->be->ops->packed_bytes(b->be, packing, s.matrix, n_sources);

        if (b->in_tower)
            b->model->vision_bytes += bytes;
        else
            b->model->part_bytes[b->part] += bytes;
    } else if (b->status == NS_OK) {
        for (uint32_t i = 0; i < n_sources; i++)
            for (uint32_t j = 0;
                 j < s.matrix[i].count && (source[i].part || j == 0); j++)
                ns_safetensors_want(b->st, part_of(&source[i], j));
        b->status =
            b->be->ops->pack(b->be, packing, s.matrix, n_sources, out, b->err);
        if (b->status != NS_OK)
            ns_context(b->err, "packing %s", first->name);
        for (uint32_t i = 0; i < n_sources; i++)
            for (uint32_t j = 0;
                 j < s.matrix[i].count && (source[i].part || j == 0); j++)
                ns_safetensors_drop(b->st, part_of(&source[i], j));
    }
    drop_sources(&s);
}

void
ns_bind_weight(struct ns_binder *b, enum ns_packing packing,
               const struct ns_stored_tensor *const *tensors,
               uint32_t n_tensors, struct ns_weight *out)
{
    struct ns_bind_source source[NS_BIND_SOURCES] = { 0 };

    for (uint32_t i = 0; i < n_tensors; i++)
        source[i].tensor = tensors[i];
    ns_bind_sources(b, packing, source, n_tensors, out);
}

void
ns_bind_linear(struct ns_binder *b, const char *suffix, bool shared,
               struct ns_bind_shape shape, struct ns_weight *out)
{
    const struct ns_stored_tensor *const tensors[NS_BIND_SOURCES] = {
        ns_bind_tensor(b, suffix, shared, shape),
    };

    ns_bind_weight(b, NS_PACK_LINEAR, tensors, 1, out);
}

void
ns_bind_gated(struct ns_binder *b, const char *gate, const char *up,
              bool shared, struct ns_bind_shape shape, struct ns_weight *out)
{
    const struct ns_stored_tensor *const tensors[NS_BIND_SOURCES] = {
        ns_bind_tensor(b, gate, shared, shape),
        ns_bind_tensor(b, up, shared, shape),
    };

    ns_bind_weight(b, NS_PACK_GATED, tensors, 2, out);
}
