/* vision.h - the vision tower: prepared pictures to image soft tokens.
 *
 *     patches --> + place --> layers --> pooling --> projector --> rows [H]
 *
 * One call encodes pictures of any number of requests: they stand side by side
 * as flat rows, and each sees itself alone. What was encoded is kept, least
 * recently used out first, under its digest, so that a picture that stands in
 * many jobs goes through the tower once.
 *
 * Owns:   its work rows on the device, the kept soft tokens in host memory.
 * Thread: engine thread.
 */
#ifndef NS_ENGINE_VISION_H
#define NS_ENGINE_VISION_H

#include "base/error.h"
#include "engine/forward.h"
#include "engine/image.h"
#include "engine/model.h"

struct ns_vision;

/* Only for a model that ns_model_sees. `cache_bytes` bounds what is kept
 * between calls. */
enum ns_status ns_vision_create(const struct ns_model *model,
                                uint64_t cache_bytes, struct ns_vision **out,
                                struct ns_error *err);
void ns_vision_destroy(struct ns_vision *vision); /* takes NULL */

/* What create() takes, and the bounds of its ops for reserve(). 0 and no
 * change where the model does not see. */
uint64_t ns_vision_bytes(const struct ns_model *model);
void ns_vision_sizes(const struct ns_model *model,
                     struct ns_backend_sizes *sizes);

/* soft[i] gets the rows [n_tokens][H] of images[i], good until the next call.
 * Equal digests are encoded once. */
enum ns_status ns_vision_encode(struct ns_vision *vision,
                                const struct ns_image *const *images,
                                uint32_t n, const float **soft,
                                struct ns_error *err);

struct ns_vision_counts {
    uint64_t n_asked, n_encoded; /* pictures, since create */
    uint64_t kept_bytes;
};
struct ns_vision_counts ns_vision_counts(const struct ns_vision *vision);

/* For tests: "patch_embed", "patch_hidden" (a layer's output), "pooled",
 * "image_soft"; rows of the images of one run, side by side. */
void ns_vision_set_probe(struct ns_vision *vision, ns_probe *probe, void *ctx);

#endif
