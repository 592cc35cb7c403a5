/* picture_private.h - between picture.c and the three formats. */
#ifndef NS_DAEMON_PICTURE_PRIVATE_H
#define NS_DAEMON_PICTURE_PRIVATE_H

#include "daemon/picture.h"

/* Each format's reader fills in a picture of these; `rgb` may be left set on
 * failure, for picture.c to free. */
struct decoding {
    const uint8_t *bytes;
    size_t length;
    struct ns_picture picture;
    uint32_t orientation; /* EXIF, 1 to 8 */
    struct ns_error *err;
};

/* Judges the header, then makes room for the pixels. */
enum ns_status ns_picture_room(struct decoding *d, uint64_t width,
                               uint64_t height);
enum ns_status ns_picture_bad(struct decoding *d, const char *format,
                              const char *why);
enum ns_status ns_picture_animated(struct decoding *d, const char *format);

/* Orientation out of a TIFF structure; 1 where it says nothing usable. */
uint32_t ns_picture_orientation(const uint8_t *tiff, size_t length);

/* A value of 0..255 over white. */
static inline uint8_t
over_white(uint8_t value, uint8_t alpha)
{
    uint32_t sum = (uint32_t)value * alpha + 255u * (255u - alpha) + 128u;

    return (uint8_t)(((sum >> 8) + sum) >> 8);
}

enum ns_status ns_picture_jpeg(struct decoding *d);
enum ns_status ns_picture_png(struct decoding *d);
enum ns_status ns_picture_webp(struct decoding *d);

#endif
