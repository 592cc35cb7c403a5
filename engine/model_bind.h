/* model_bind.h - the walk over a checkpoint's tensors, one weight at a time.
 *
 * The walk is done twice by the same code (model_weights.c): first to check the
 * whole file and to add up sizes, then to pack, so that nothing is packed of a
 * file that is refused for its shapes. A failure sticks: what follows does
 * nothing, and the walk reads as the list of the model's tensors.
 *
 * Private to engine/model*.c. Thread: the opener's.
 */
#ifndef NS_ENGINE_MODEL_BIND_H
#define NS_ENGINE_MODEL_BIND_H

#include "engine/model.h"
#include "engine/safetensors.h"

#define DECODER "model.decoder."
#define ENCODER "model.encoder.language_model."
#define TOWER "model.encoder.vision_tower."

enum {
    NS_BIND_NAME = 160,  /* bytes of a tensor's name */
    NS_BIND_SOURCES = 3, /* matrices that are packed side by side */
};

struct ns_binder {
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

struct ns_bind_shape {
    uint32_t rank;
    uint64_t dim[3];
};

static inline struct ns_bind_shape
ns_scalar_shape(void)
{
    return (struct ns_bind_shape){ 0, { 0 } };
}

static inline struct ns_bind_shape
ns_shape1(uint64_t n)
{
    return (struct ns_bind_shape){ 1, { n } };
}

static inline struct ns_bind_shape
ns_shape2(uint64_t n, uint64_t k)
{
    return (struct ns_bind_shape){ 2, { n, k } };
}

static inline struct ns_bind_shape
ns_shape3(uint64_t count, uint64_t n, uint64_t k)
{
    return (struct ns_bind_shape){ 3, { count, n, k } };
}

static inline uint64_t
ns_bind_elements(const struct ns_stored_tensor *tensor)
{
    uint64_t n = 1; /* fits: the header's check multiplied it already */

    for (uint32_t i = 0; i < tensor->rank; i++)
        n *= tensor->dim[i];
    return n;
}

/* A matrix, or several that belong together: one tensor, or one a part. */
struct ns_bind_source {
    const struct ns_stored_tensor *tensor; /* the first, where parts */
    const struct ns_stored_tensor **part;  /* [n_parts]; NULL: the tensor */
    uint32_t n_parts;
};

void ns_bind_fail(struct ns_binder *b, enum ns_status status,
                  const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The file that a tensor stands in, for sentences. */
const char *ns_bind_shard(const struct ns_binder *b,
                          const struct ns_stored_tensor *tensor);
/* The kernels' name of a stored type; false for those they do not take. */
bool ns_bind_type(enum ns_stored stored, enum ns_dtype *out);

/* The tensor prefix + suffix, its shape and type checked; NULL once the walk
 * has failed. `shared`: it may be stored under the encoder's name too. */
const struct ns_stored_tensor *
ns_bind_tensor(struct ns_binder *b, const char *suffix, bool shared,
               struct ns_bind_shape shape);
/* Its elements are parameters, of the part or of the tower. */
void ns_bind_count(struct ns_binder *b, const struct ns_stored_tensor *tensor,
                   enum ns_part part);
/* Element i of a tensor of floats. */
float ns_bind_value(const struct ns_stored_tensor *tensor, uint64_t i);
/* A small tensor, every value of it finite, times `factor` in fp32, into `out`
 * unless NULL. */
void ns_bind_floats(struct ns_binder *b, const struct ns_stored_tensor *tensor,
                    double factor, float *out);
/* Room for n floats of the device's vectors; the host side is written through
 * *host, which is NULL in the first walk. */
float *ns_bind_room(struct ns_binder *b, size_t n, float **host);
/* The last two at once, by name. */
void ns_bind_vector(struct ns_binder *b, const char *suffix, bool shared,
                    uint32_t n, double factor, float **out);

/* What is multiplied by: counted, checked to be of one type, and in the second
 * walk packed. A NULL tensor (the walk has failed) makes it do nothing. */
void ns_bind_sources(struct ns_binder *b, enum ns_packing packing,
                     const struct ns_bind_source *source, uint32_t n_sources,
                     struct ns_weight *out);
void ns_bind_weight(struct ns_binder *b, enum ns_packing packing,
                    const struct ns_stored_tensor *const *tensors,
                    uint32_t n_tensors, struct ns_weight *out);
/* The same by name: one matrix, or gate and up. */
void ns_bind_linear(struct ns_binder *b, const char *suffix, bool shared,
                    struct ns_bind_shape shape, struct ns_weight *out);
void ns_bind_gated(struct ns_binder *b, const char *gate, const char *up,
                   bool shared, struct ns_bind_shape shape,
                   struct ns_weight *out);

/* The first walk: all is checked, all sizes are known, nothing is packed. Then
 * the second. */
void ns_bind_survey(struct ns_binder *b);
void ns_bind_pack(struct ns_binder *b);

#endif
