/* picture.h - a picture file to RGB pixels, within limits.
 *
 * JPEG, PNG and WebP, told by their first bytes and by nothing else. Headers
 * are read and judged before anything of the picture's size is allocated. The
 * result is what the model's own pipeline sees: turned by EXIF, gray as three
 * equal channels, CMYK as RGB, transparency over white, 16 bits cut to 8.
 *
 * Runs in the helper process (decoder.h): here the libraries meet the bytes.
 * Errors are NS_REJECT with the code image_limit (pixels, sides), image_type
 * (another kind, or animated) or bad_image (damaged, or cut short).
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_DAEMON_PICTURE_H
#define NS_DAEMON_PICTURE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum {
    NS_PICTURE_BYTES = 20 * 1000 * 1000,
    NS_PICTURE_PIXELS = 20 * 1000 * 1000,
    NS_PICTURE_SIDE = 65535,
};

struct ns_picture {
    uint32_t width, height;
    uint8_t *rgb; /* owned: [height][width][3] */
};

enum ns_status ns_picture_decode(const void *bytes, size_t length,
                                 struct ns_picture *out, struct ns_error *err);
/* "JPEG", ...: what the first bytes say, of those that are read; or NULL. */
const char *ns_picture_kind(const void *bytes, size_t length);
void ns_picture_fini(struct ns_picture *picture); /* takes zeroes, and twice */

#endif
