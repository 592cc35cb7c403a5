/* picture_jpeg.c - JPEG by libjpeg-turbo: baseline, progressive, CMYK, YCCK. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#include "daemon/picture_private.h"

/* Scans of a progressive picture: each goes over all of it, so a few bytes
 * each could ask for hours. */
enum { MAX_SCANS = 200 };

struct jpeg {
    struct jpeg_decompress_struct info;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf out;
    char why[JMSG_LENGTH_MAX];
    uint8_t *row; /* owned: of CMYK */
};

static void
give_up(j_common_ptr info)
{
    struct jpeg *jpeg = info->client_data;

    info->err->format_message(info, jpeg->why);
    longjmp(jpeg->out, 1);
}

/* The library fills what is missing with gray and goes on; a picture that is
 * cut short or damaged inside is refused instead. */
static void
on_message(j_common_ptr info, int level)
{
    int code = info->err->msg_code;

    if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER ||
                      code == JWRN_HUFF_BAD_CODE ||
                      code == JWRN_MUST_RESYNC ||
                      code == JWRN_NOT_SEQUENTIAL))
        give_up(info);
}

static void
on_progress(j_common_ptr info)
{
    struct jpeg *jpeg = info->client_data;

    if (jpeg->info.input_scan_number > MAX_SCANS) {
        snprintf(jpeg->why, sizeof(jpeg->why), "more than %d scans",
                 MAX_SCANS);
        longjmp(jpeg->out, 1);
    }
}

static void
find_orientation(struct decoding *d, const struct jpeg *jpeg)
{
    for (const struct jpeg_marker_struct *m = jpeg->info.marker_list; m;
         m = m->next)
        if (m->marker == JPEG_APP0 + 1 && m->data_length > 6 &&
            memcmp(m->data, "Exif\0\0", 6) == 0) {
            d->orientation = ns_picture_orientation(m->data + 6,
                                                    m->data_length - 6);
            return;
        }
}

/* Adobe's files hold the inks inverted. */
static void
ink_to_rgb(const uint8_t *ink, uint32_t width, int inverted, uint8_t *rgb)
{
    for (uint32_t x = 0; x < width; x++, ink += 4) {
        uint32_t white = inverted ? ink[3] : 255u - ink[3];

        for (int c = 0; c < 3; c++) {
            uint32_t amount = inverted ? 255u - ink[c] : ink[c];
            uint32_t part = amount * white + 128;

            *rgb++ = (uint8_t)(white - (((part >> 8) + part) >> 8));
        }
    }
}

/* All that may jump. What is looked at after a jump lies in `jpeg` and `d`. */
static enum ns_status
read_rows(struct decoding *d, struct jpeg *jpeg)
{
    struct jpeg_decompress_struct *info = &jpeg->info;
    enum ns_status status;
    int ink;

    jpeg_read_header(info, TRUE);
    find_orientation(d, jpeg);
    status = ns_picture_room(d, info->image_width, info->image_height);
    if (status != NS_OK)
        return status;
    ink = info->jpeg_color_space == JCS_CMYK ||
          info->jpeg_color_space == JCS_YCCK;
    info->out_color_space = ink ? JCS_CMYK : JCS_RGB;
    info->dct_method = JDCT_ISLOW;
    if (ink) {
        jpeg->row = malloc((size_t)info->image_width * 4);
        if (!jpeg->row)
            return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    }
    jpeg_start_decompress(info);
    while (info->output_scanline < info->output_height) {
        uint8_t *to = d->picture.rgb +
                      (size_t)info->output_scanline * d->picture.width * 3;
        JSAMPROW row = ink ? jpeg->row : to;

        if (jpeg_read_scanlines(info, &row, 1) == 1 && ink)
            ink_to_rgb(row, d->picture.width, info->saw_Adobe_marker, to);
    }
    jpeg_finish_decompress(info);
    return NS_OK;
}

enum ns_status
ns_picture_jpeg(struct decoding *d)
{
    struct jpeg *jpeg = calloc(1, sizeof(*jpeg));
    enum ns_status status;

    if (!jpeg)
        return ns_fail(d->err, NS_FATAL, "out of memory for a picture");
    jpeg->info.err = jpeg_std_error(&jpeg->errors);
    jpeg->errors.error_exit = give_up;
    jpeg->errors.emit_message = on_message;
    jpeg->progress.progress_monitor = on_progress;
    jpeg->info.client_data = jpeg;
    if (setjmp(jpeg->out) == 0) {
        jpeg_create_decompress(&jpeg->info);
        jpeg->info.progress = &jpeg->progress;
        jpeg_save_markers(&jpeg->info, JPEG_APP0 + 1, 0xffff);
        jpeg_mem_src(&jpeg->info, d->bytes, (unsigned long)d->length);
        status = read_rows(d, jpeg);
    } else {
        status = ns_picture_bad(d, "JPEG", jpeg->why);
    }
    jpeg_destroy_decompress(&jpeg->info);
    free(jpeg->row);
    free(jpeg);
    return status;
}
