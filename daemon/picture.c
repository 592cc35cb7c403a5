#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "daemon/picture_private.h"

void
ns_picture_fini(struct ns_picture *picture)
{
    free(picture->rgb);
    picture->rgb = NULL;
}

enum ns_status
ns_picture_bad(struct decoding *d, const char *format, const char *why)
{
    return ns_refuse(d->err, "bad_image", NULL, "the %s picture is damaged: "
                     "%.200s", format, why);
}

enum ns_status
ns_picture_animated(struct decoding *d, const char *format)
{
    return ns_refuse(d->err, "image_type", NULL, "an animated %s is not "
                     "supported", format);
}

enum ns_status
ns_picture_room(struct decoding *d, uint64_t width, uint64_t height)
{
    size_t bytes;

    if (width == 0 || height == 0)
        return ns_refuse(d->err, "image_limit", NULL, "the picture is empty: "
                         "%llu x %llu pixels", (unsigned long long)width,
                         (unsigned long long)height);
    if (width > NS_PICTURE_SIDE || height > NS_PICTURE_SIDE)
        return ns_refuse(d->err, "image_limit", NULL,
                         "the picture is %llu x %llu pixels, a side has at "
                         "most %d", (unsigned long long)width,
                         (unsigned long long)height, NS_PICTURE_SIDE);
    if (width * height > NS_PICTURE_PIXELS)
        return ns_refuse(d->err, "image_limit", NULL,
                         "the picture has %.1f megapixels (%llu x %llu), at "
                         "most %.0f are read", (double)(width * height) / 1e6,
                         (unsigned long long)width,
                         (unsigned long long)height,
                         (double)NS_PICTURE_PIXELS / 1e6);
    if (!ns_size_mul((size_t)(width * height), 3, &bytes))
        return ns_fail(d->err, NS_FATAL, "a picture's size overflows");
    d->picture.rgb = malloc(bytes);
    if (!d->picture.rgb)
        return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    d->picture.width = (uint32_t)width;
    d->picture.height = (uint32_t)height;
    return NS_OK;
}

/* ---- EXIF ------------------------------------------------------------- */

struct tiff {
    const uint8_t *bytes;
    size_t length;
    bool big_endian;
};

static bool
tiff_number(const struct tiff *t, size_t at, uint32_t n_bytes, uint32_t *out)
{
    uint32_t value = 0;

    if (at > t->length || t->length - at < n_bytes)
        return false;
    for (uint32_t i = 0; i < n_bytes; i++) {
        uint32_t shift = 8 * (t->big_endian ? n_bytes - 1 - i : i);

        value |= (uint32_t)t->bytes[at + i] << shift;
    }
    *out = value;
    return true;
}

uint32_t
ns_picture_orientation(const uint8_t *bytes, size_t length)
{
    enum { TAG = 0x0112, SHORT = 3, ENTRY = 12 };
    struct tiff t = { bytes, length, false };
    uint32_t magic, at, n, tag, type, count, value;

    if (length < 8)
        return 1;
    t.big_endian = bytes[0] == 'M';
    if (memcmp(bytes, t.big_endian ? "MM" : "II", 2) != 0 ||
        !tiff_number(&t, 2, 2, &magic) || magic != 42 ||
        !tiff_number(&t, 4, 4, &at) || !tiff_number(&t, at, 2, &n))
        return 1;
    for (uint32_t i = 0; i < n; i++) {
        size_t entry = (size_t)at + 2 + (size_t)i * ENTRY;

        if (!tiff_number(&t, entry, 2, &tag) ||
            !tiff_number(&t, entry + 2, 2, &type) ||
            !tiff_number(&t, entry + 4, 4, &count) ||
            !tiff_number(&t, entry + 8, 2, &value))
            return 1;
        if (tag == TAG)
            return type == SHORT && count == 1 && value >= 1 && value <= 8
                       ? value : 1;
    }
    return 1;
}

/* Where the pixel of row y, column x of the turned picture comes from. From 5
 * on sides are exchanged. */
static size_t
source_of(uint32_t orientation, uint32_t width, uint32_t height, uint32_t x,
          uint32_t y)
{
    uint32_t from_x = orientation >= 5 ? y : x;
    uint32_t from_y = orientation >= 5 ? x : y;

    if (orientation == 2 || orientation == 3 || orientation == 7 ||
        orientation == 8)
        from_x = width - 1 - from_x;
    if (orientation == 3 || orientation == 4 || orientation == 6 ||
        orientation == 7)
        from_y = height - 1 - from_y;
    return (size_t)from_y * width + from_x;
}

static enum ns_status
turn(struct decoding *d)
{
    uint32_t width = d->picture.width, height = d->picture.height;
    bool sideways = d->orientation >= 5;
    uint32_t to_width = sideways ? height : width;
    uint32_t to_height = sideways ? width : height;
    uint8_t *rgb, *to;

    if (d->orientation <= 1)
        return NS_OK;
    rgb = to = malloc((size_t)width * height * 3);
    if (!rgb)
        return ns_fail(d->err, NS_FATAL, "out of memory turning a picture");
    for (uint32_t y = 0; y < to_height; y++)
        for (uint32_t x = 0; x < to_width; x++, to += 3)
            memcpy(to, d->picture.rgb + 3 * source_of(d->orientation, width,
                                                      height, x, y), 3);
    free(d->picture.rgb);
    d->picture = (struct ns_picture){ to_width, to_height, rgb };
    return NS_OK;
}

/* ---- what it is ------------------------------------------------------- */

struct kind {
    const char *name;
    size_t at, length;
    const char *magic;
    enum ns_status (*decode)(struct decoding *d); /* NULL: not supported */
};

static const struct kind kinds[] = {
    { "JPEG", 0, 3, "\xff\xd8\xff", ns_picture_jpeg },
    { "PNG", 0, 8, "\x89PNG\r\n\x1a\n", ns_picture_png },
    { "WebP", 8, 4, "WEBP", ns_picture_webp },
    { "GIF", 0, 4, "GIF8", NULL },
    { "TIFF", 0, 4, "II*\0", NULL },
    { "TIFF", 0, 4, "MM\0*", NULL },
    { "BMP", 0, 2, "BM", NULL },
    { "PDF", 0, 5, "%PDF-", NULL },
    { "HEIF or AVIF", 4, 4, "ftyp", NULL },
    { "JPEG XL", 0, 2, "\xff\x0a", NULL },
    { "SVG or XML", 0, 4, "<svg", NULL },
    { "SVG or XML", 0, 5, "<?xml", NULL },
};

static const struct kind *
find_kind(const uint8_t *bytes, size_t length)
{
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (length >= kinds[i].at + kinds[i].length &&
            memcmp(bytes + kinds[i].at, kinds[i].magic, kinds[i].length) == 0)
            return &kinds[i];
    return NULL;
}

const char *
ns_picture_kind(const void *bytes, size_t length)
{
    const struct kind *kind = find_kind(bytes, length);

    return kind && kind->decode ? kind->name : NULL;
}

enum ns_status
ns_picture_decode(const void *bytes, size_t length, struct ns_picture *out,
                  struct ns_error *err)
{
    struct decoding d = { .bytes = bytes, .length = length, .orientation = 1,
                          .err = err };
    const struct kind *kind = find_kind(bytes, length);
    enum ns_status status;

    if (!kind)
        return ns_refuse(err, "bad_image", NULL, "%zu bytes that are no "
                         "picture of a known kind", length);
    if (!kind->decode)
        return ns_refuse(err, "image_type", NULL, "it is %s; JPEG, PNG and "
                         "WebP are read", kind->name);
    status = kind->decode(&d);
    if (status == NS_OK)
        status = turn(&d);
    if (status == NS_OK)
        *out = d.picture;
    else
        ns_picture_fini(&d.picture);
    return status;
}
