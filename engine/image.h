/* image.h - a decoded picture, made what the vision tower reads.
 *
 *     RGB pixels --> target size --> bicubic resize --> patches
 *
 * The size is the largest of the budget that keeps the ratio and is whole in
 * pooled patches, so small pictures are enlarged too; it says how many soft
 * tokens the picture has, before any pixel is looked at. The resize is the
 * two-pass 8-bit method of the model's own pipeline, bit for bit. A prepared
 * image is kept as pixels, a quarter of its patches, until it is encoded.
 *
 * Owns:   its pixels; fini gives them back.
 * Thread: any; nothing is shared.
 */
#ifndef NS_ENGINE_IMAGE_H
#define NS_ENGINE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/model.h"

enum {
    NS_IMAGE_MAX_TOKENS = 1120, /* the largest budget there is */
    NS_IMAGE_MAX_SIDE = 65535,  /* pixels of a decoded picture's side */
};

struct ns_image_size {
    uint32_t width, height; /* pixels, multiples of patch * pooling */
    uint32_t n_tokens;      /* soft tokens: width * height / (patch * pooling)^2 */
};

struct ns_image {
    struct ns_image_size size;
    uint8_t *rgb; /* owned: [height][width][3] */
    /* SHA-256 of size and pixels: equal digests are equal soft tokens. */
    uint8_t digest[32];
};

/* One of 70, 140, 280, 560, 1120. */
bool ns_image_budget_known(uint32_t max_tokens);

/* Refuses (image_limit) an empty picture and sides over the limit. */
enum ns_status ns_image_target(const struct ns_vision_config *vision,
                               uint32_t width, uint32_t height,
                               uint32_t max_tokens, struct ns_image_size *out,
                               struct ns_error *err);

/* `rgb`: [height][width][3], borrowed for the call. */
enum ns_status ns_image_prepare(const struct ns_vision_config *vision,
                                const uint8_t *rgb, uint32_t width,
                                uint32_t height, uint32_t max_tokens,
                                struct ns_image *out, struct ns_error *err);
void ns_image_fini(struct ns_image *image); /* takes zeroes, and twice */

/* Patches of a prepared image, in the row-major order of their grid:
 * n_tokens * pooling^2 rows. `values` [n][stride]: row, column, channel of the
 * patch, 0..1; `x`, `y` [n]: its column and row in the grid. */
void ns_image_patches(const struct ns_image *image, uint32_t patch,
                      float *values, size_t stride, int32_t *x, int32_t *y);

#endif
