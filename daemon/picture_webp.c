/* picture_webp.c - still WebP by libwebp: lossy, lossless, with alpha. */
#include <stdlib.h>
#include <string.h>

#include <webp/decode.h>

#include "daemon/picture_private.h"

/* The EXIF chunk of the container, if there is one. */
static void
find_orientation(struct decoding *d)
{
    for (size_t at = 12; d->length >= 8 && at <= d->length - 8;) {
        const uint8_t *chunk = d->bytes + at;
        size_t n = (size_t)chunk[7] << 24 | (size_t)chunk[6] << 16 |
                   (size_t)chunk[5] << 8 | chunk[4];

        if (n > d->length - at - 8)
            return;
        if (memcmp(chunk, "EXIF", 4) == 0) {
            /* Some writers keep JPEG's prefix. */
            size_t skip = n > 6 && memcmp(chunk + 8, "Exif\0\0", 6) == 0
                              ? 6 : 0;

            d->orientation = ns_picture_orientation(chunk + 8 + skip,
                                                    n - skip);
            return;
        }
        at += 8 + n + (n & 1);
    }
}

static enum ns_status
read_alpha(struct decoding *d)
{
    uint32_t width = d->picture.width, height = d->picture.height;
    size_t n = (size_t)width * height;
    uint8_t *rgba = malloc(n * 4);
    enum ns_status status = NS_OK;

    if (!rgba)
        return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    if (!WebPDecodeRGBAInto(d->bytes, d->length, rgba, n * 4,
                            (int)width * 4))
        status = ns_picture_bad(d, "WebP", "its pixels cannot be decoded");
    for (size_t i = 0; i < n && status == NS_OK; i++)
        for (int c = 0; c < 3; c++)
            d->picture.rgb[3 * i + c] = over_white(rgba[4 * i + c],
                                                   rgba[4 * i + 3]);
    free(rgba);
    return status;
}

enum ns_status
ns_picture_webp(struct decoding *d)
{
    WebPBitstreamFeatures features;
    enum ns_status status;

    if (WebPGetFeatures(d->bytes, d->length, &features) != VP8_STATUS_OK)
        return ns_picture_bad(d, "WebP", "its header cannot be read");
    if (features.has_animation)
        return ns_picture_animated(d, "WebP");
    status = ns_picture_room(d, (uint64_t)features.width,
                             (uint64_t)features.height);
    if (status != NS_OK)
        return status;
    find_orientation(d);
    if (features.has_alpha)
        return read_alpha(d);
    if (!WebPDecodeRGBInto(d->bytes, d->length, d->picture.rgb,
                           (size_t)d->picture.width * d->picture.height * 3,
                           (int)d->picture.width * 3))
        return ns_picture_bad(d, "WebP", "its pixels cannot be decoded");
    return NS_OK;
}
