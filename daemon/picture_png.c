/* picture_png.c - PNG by libpng: every colour type and depth. */
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <png.h>

#include "daemon/picture_private.h"

enum { CHUNK_BYTES = 8 << 20, CHUNKS = 1000 }; /* that are not pixels */

struct png {
    png_structp read;
    png_infop info;
    const uint8_t *at, *end;
    char why[160];
    uint8_t *rgba;   /* owned */
    uint8_t **rows;  /* owned */
};

static void
give_up(png_structp read, png_const_charp why)
{
    struct png *png = png_get_error_ptr(read);
    size_t n = strlen(why);

    if (n >= sizeof(png->why))
        n = sizeof(png->why) - 1;
    memcpy(png->why, why, n);
    png->why[n] = '\0';
    longjmp(png_jmpbuf(read), 1);
}

static void
ignore(png_structp read, png_const_charp why)
{
    (void)read;
    (void)why;
}

static void
take(png_structp read, png_bytep out, png_size_t n)
{
    struct png *png = png_get_io_ptr(read);

    if ((size_t)(png->end - png->at) < n)
        png_error(read, "it ends too early");
    memcpy(out, png->at, n);
    png->at += n;
}

/* Whether an acTL chunk stands in front of the pixels. */
static int
is_animated(const struct decoding *d)
{
    for (size_t at = 8; at + 12 <= d->length;) {
        const uint8_t *chunk = d->bytes + at;
        size_t n = (size_t)chunk[0] << 24 | (size_t)chunk[1] << 16 |
                   (size_t)chunk[2] << 8 | chunk[3];

        if (memcmp(chunk + 4, "acTL", 4) == 0)
            return 1;
        if (memcmp(chunk + 4, "IDAT", 4) == 0 || n > d->length - at - 12)
            return 0;
        at += n + 12;
    }
    return 0;
}

static void
find_orientation(struct decoding *d, struct png *png)
{
    png_bytep exif;
    png_uint_32 n;

    if (png_get_eXIf_1(png->read, png->info, &n, &exif))
        d->orientation = ns_picture_orientation(exif, n);
}

/* Everything becomes 8-bit RGBA. */
static void
ask_for_rgba(struct png *png)
{
    png_set_expand(png->read);
    png_set_strip_16(png->read);
    png_set_gray_to_rgb(png->read);
    png_set_add_alpha(png->read, 0xff, PNG_FILLER_AFTER);
    (void)png_set_interlace_handling(png->read);
    png_read_update_info(png->read, png->info);
}

static enum ns_status
read_rows(struct decoding *d, struct png *png)
{
    uint32_t width, height;
    enum ns_status status;
    size_t row_bytes;

    png_read_info(png->read, png->info);
    width = png_get_image_width(png->read, png->info);
    height = png_get_image_height(png->read, png->info);
    status = ns_picture_room(d, width, height);
    if (status != NS_OK)
        return status;
    ask_for_rgba(png);
    row_bytes = (size_t)width * 4;
    if (png_get_rowbytes(png->read, png->info) != row_bytes)
        png_error(png->read, "its rows have another length");
    png->rgba = malloc(row_bytes * height);
    png->rows = malloc(height * sizeof(*png->rows));
    if (!png->rgba || !png->rows)
        return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    for (uint32_t y = 0; y < height; y++)
        png->rows[y] = png->rgba + y * row_bytes;
    png_read_image(png->read, png->rows);
    png_read_end(png->read, png->info);
    find_orientation(d, png);
    for (size_t i = 0; i < (size_t)width * height; i++)
        for (int c = 0; c < 3; c++)
            d->picture.rgb[3 * i + c] = over_white(png->rgba[4 * i + c],
                                                   png->rgba[4 * i + 3]);
    return NS_OK;
}

enum ns_status
ns_picture_png(struct decoding *d)
{
    struct png *png;
    enum ns_status status;

    if (is_animated(d))
        return ns_picture_animated(d, "PNG");
    png = calloc(1, sizeof(*png));
    if (!png)
        return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    png->at = d->bytes;
    png->end = d->bytes + d->length;
    png->read = png_create_read_struct(PNG_LIBPNG_VER_STRING, png, give_up,
                                       ignore);
    if (png->read)
        png->info = png_create_info_struct(png->read);
    if (!png->info) {
        status = ns_fail(d->err, NS_FATAL, "out of memory for a picture");
        goto out;
    }
    if (setjmp(png_jmpbuf(png->read)) == 0) {
        png_set_user_limits(png->read, 0x7fffffff, 0x7fffffff);
        png_set_chunk_malloc_max(png->read, CHUNK_BYTES);
        png_set_chunk_cache_max(png->read, CHUNKS);
        png_set_read_fn(png->read, png, take);
        status = read_rows(d, png);
    } else {
        status = ns_picture_bad(d, "PNG", png->why);
    }
out:
    png_destroy_read_struct(&png->read, &png->info, NULL);
    free(png->rgba);
    free(png->rows);
    free(png);
    return status;
}
