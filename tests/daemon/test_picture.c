/* Pictures of all kinds against what the reference made of them, broken ones,
 * and the helper processes that decode them. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <fcntl.h>

#include <jpeglib.h>
#include <png.h>
#include <webp/encode.h>

#include "daemon/decoder.h"
#include "daemon/picture_private.h"
#include "engine/safetensors.h"

#define CASES "tests/cases/vision_fp32/"

struct file {
    uint8_t *bytes;
    size_t n;
};

static struct file
read_file(const char *path)
{
    struct file file = { malloc(1 << 20), 0 };
    FILE *f = fopen(path, "rb");

    assert_non_null(f);
    file.n = fread(file.bytes, 1, 1 << 20, f);
    fclose(f);
    return file;
}

static struct ns_picture
decode(struct file file)
{
    struct ns_picture picture = { 0 };
    struct ns_error err;

    if (ns_picture_decode(file.bytes, file.n, &picture, &err) != NS_OK)
        fail_msg("%s", err.text);
    return picture;
}

static void
refused(struct file file, const char *code, const char *words)
{
    struct ns_picture picture = { 0 };
    struct ns_error err = { 0 };

    assert_int_equal(ns_picture_decode(file.bytes, file.n, &picture, &err),
                     NS_REJECT);
    assert_string_equal(err.code, code);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" says nothing of %s", err.text, words);
    assert_null(picture.rgb);
}

/* ---- the reference's pictures ---------------------------------------------- */

static void
check_case(const json_t *manifest)
{
    char path[300];
    struct ns_safetensors *st;
    const struct ns_stored_tensor *rgb;
    struct ns_picture picture;
    struct ns_error err;
    struct file file;
    size_t n_far = 0, sum = 0;

    snprintf(path, sizeof(path), CASES "%s",
             json_string_value(json_object_get(manifest, "file")));
    file = read_file(path);
    picture = decode(file);
    snprintf(path, sizeof(path), CASES "%s",
             json_string_value(json_object_get(manifest, "tensors_file")));
    assert_int_equal(ns_safetensors_open_file(path, &st, &err), NS_OK);
    rgb = ns_safetensors_find(st, "rgb");
    assert_non_null(rgb);
    assert_int_equal(picture.height, rgb->dim[0]);
    assert_int_equal(picture.width, rgb->dim[1]);
    for (size_t i = 0; i < rgb->bytes; i++) {
        int off = abs(picture.rgb[i] - ((const uint8_t *)rgb->data)[i]);

        sum += (size_t)off;
        n_far += off > 2;
    }
    if (json_is_true(json_object_get(manifest, "source_is_jpeg"))) {
        assert_true(n_far * 100 <= rgb->bytes);
        assert_true(sum <= 2 * rgb->bytes);
    } else {
        assert_int_equal(sum, 0);
    }
    ns_picture_fini(&picture);
    ns_safetensors_close(st);
    free(file.bytes);
}

static void
the_references_pictures_come_out_as_there(void **state)
{
    DIR *dir = opendir(CASES);
    struct dirent *entry;
    int n = 0;

    (void)state;
    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        char path[300];
        json_t *manifest;

        if (strncmp(entry->d_name, "pre", 3) != 0 ||
            !strstr(entry->d_name, ".json"))
            continue;
        snprintf(path, sizeof(path), CASES "%s", entry->d_name);
        manifest = json_load_file(path, 0, NULL);
        check_case(manifest);
        json_decref(manifest);
        n++;
    }
    closedir(dir);
    assert_int_equal(n, 13);
}

/* ---- pictures made here ----------------------------------------------------- */

/* Four fields of plain colours, so that coding loses next to nothing. */
static void
colour(uint32_t x, uint32_t y, uint32_t w, uint32_t h, uint8_t rgb[3])
{
    static const uint8_t fields[4][3] = { { 250, 20, 20 }, { 20, 220, 30 },
                                          { 30, 30, 240 }, { 200, 200, 10 } };

    memcpy(rgb, fields[(y * 2 >= h) * 2 + (x * 2 >= w)], 3);
}

/* Space: JCS_RGB, or JCS_CMYK / JCS_YCCK with the inks inverted as Adobe's. */
static struct file
make_jpeg(uint32_t w, uint32_t h, J_COLOR_SPACE space, const uint8_t *exif,
          unsigned n_exif)
{
    struct jpeg_compress_struct info;
    struct jpeg_error_mgr errors;
    unsigned long n = 0;
    struct file file = { NULL, 0 };
    bool ink = space == JCS_CMYK || space == JCS_YCCK;

    info.err = jpeg_std_error(&errors);
    jpeg_create_compress(&info);
    jpeg_mem_dest(&info, &file.bytes, &n);
    info.image_width = w;
    info.image_height = h;
    info.input_components = ink ? 4 : 3;
    info.in_color_space = ink ? JCS_CMYK : JCS_RGB;
    jpeg_set_defaults(&info);
    jpeg_set_colorspace(&info, ink ? space : JCS_YCbCr);
    jpeg_set_quality(&info, 98, TRUE);
    jpeg_start_compress(&info, TRUE);
    if (exif)
        jpeg_write_marker(&info, JPEG_APP0 + 1, exif, n_exif);
    while (info.next_scanline < h) {
        uint8_t line[4 * 64], rgb[3];
        JSAMPROW row = line;

        for (uint32_t x = 0; x < w; x++) {
            colour(x, info.next_scanline, w, h, rgb);
            for (int c = 0; c < 3; c++)
                line[x * (ink ? 4u : 3u) + c] = rgb[c];
            if (ink)
                line[x * 4 + 3] = 255; /* inverted: no black */
        }
        jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    file.n = n;
    return file;
}

static void
check_fields(const struct ns_picture *picture, int tolerance)
{
    for (uint32_t y = 2; y < picture->height; y += 5)
        for (uint32_t x = 2; x < picture->width; x += 5) {
            uint8_t want[3];

            colour(x, y, picture->width, picture->height, want);
            /* next to an edge the chroma of both fields mix */
            if (abs((int)x * 2 - (int)picture->width) < 8 ||
                abs((int)y * 2 - (int)picture->height) < 8)
                continue;
            for (int c = 0; c < 3; c++)
                assert_in_range(
                    abs(picture->rgb[(y * picture->width + x) * 3 + c] -
                        want[c]), 0, tolerance);
        }
}

static void
cmyk_and_ycck_become_the_same_colours(void **state)
{
    static const J_COLOR_SPACE spaces[] = { JCS_RGB, JCS_CMYK, JCS_YCCK };

    (void)state;
    for (int i = 0; i < 3; i++) {
        struct file file = make_jpeg(60, 40, spaces[i], NULL, 0);
        struct ns_picture picture = decode(file);

        assert_int_equal(picture.width, 60);
        check_fields(&picture, 6);
        ns_picture_fini(&picture);
        free(file.bytes);
    }
}

/* An EXIF block with one orientation entry behind another. */
static unsigned
make_exif(bool big, uint32_t orientation, uint8_t out[64])
{
    static const uint8_t little[] = {
        'E', 'x', 'i', 'f', 0, 0, 'I', 'I', 42, 0, 8, 0, 0, 0, 2, 0,
        0x00, 0x01, 4, 0, 1, 0, 0, 0, 9, 0, 0, 0,
        0x12, 0x01, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    static const uint8_t large[] = {
        'E', 'x', 'i', 'f', 0, 0, 'M', 'M', 0, 42, 0, 0, 0, 8, 0, 2,
        0x01, 0x00, 0, 4, 0, 0, 0, 1, 0, 0, 0, 9,
        0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0 };

    memcpy(out, big ? large : little, sizeof(little));
    out[big ? 37 : 36] = (uint8_t)orientation;
    return sizeof(little);
}

/* Which field of the stored picture each corner shows: of the upper left, the
 * upper right, the lower left and the lower right one. */
static void
every_orientation_turns_in_both_byte_orders(void **state)
{
    static const int corners[9][4] = {
        { 0 },          { 0, 1, 2, 3 }, { 1, 0, 3, 2 },
        { 3, 2, 1, 0 }, { 2, 3, 0, 1 }, { 0, 2, 1, 3 },
        { 2, 0, 3, 1 }, { 3, 1, 2, 0 }, { 1, 3, 0, 2 },
    };

    (void)state;
    for (uint32_t o = 1; o <= 8; o++)
        for (int big = 0; big < 2; big++) {
            uint8_t exif[64];
            unsigned n = make_exif(big, o, exif);
            struct file file = make_jpeg(60, 40, JCS_RGB, exif, n);
            struct ns_picture p = decode(file);

            assert_int_equal(p.width, o >= 5 ? 40 : 60);
            assert_int_equal(p.height, o >= 5 ? 60 : 40);
            for (int corner = 0; corner < 4; corner++) {
                uint32_t x = corner & 1 ? p.width - 3 : 2;
                uint32_t y = corner & 2 ? p.height - 3 : 2;
                int field = corners[o][corner];
                uint8_t want[3];

                colour(field & 1 ? 59 : 0, field & 2 ? 39 : 0, 60, 40, want);
                for (int c = 0; c < 3; c++)
                    assert_in_range(abs(p.rgb[(y * p.width + x) * 3 + c] -
                                        want[c]), 0, 6);
            }
            ns_picture_fini(&p);
            free(file.bytes);
        }
}

static void
broken_exif_turns_nothing(void **state)
{
    (void)state;
    for (int what = 0; what < 200; what++) {
        uint8_t exif[64];
        unsigned n = make_exif(what & 1, 6, exif);
        uint64_t seed = 0x9E3779B97F4A7C15u * (uint64_t)(what + 1);
        struct ns_picture p;
        struct file file;

        if (what < 44)
            n = 6 + (unsigned)what * 38 / 44; /* cut short, inside it */
        else
            exif[6 + seed % (n - 6)] ^= (uint8_t)(1 + (seed >> 32) % 255);
        file = make_jpeg(60, 40, JCS_RGB, exif, n);
        p = decode(file);
        assert_true(p.width == 60 || p.height == 60);
        if (what < 44 && n < 38) /* the entry itself is cut */
            assert_int_equal(p.width, 60);
        ns_picture_fini(&p);
        free(file.bytes);
    }
}

/* ---- PNG --------------------------------------------------------------------- */

static void
png_write(png_structp png, png_bytep bytes, png_size_t n)
{
    struct file *file = png_get_io_ptr(png);

    file->bytes = realloc(file->bytes, file->n + n);
    memcpy(file->bytes + file->n, bytes, n);
    file->n += n;
}

/* A row of 8 columns, all rows equal: sample s of column x. */
static uint32_t
sample(int depth, uint32_t x, int s)
{
    return (x * 31 + (uint32_t)s * 57 + 9) % (1u << (depth > 8 ? 8 : depth)) *
           (depth == 16 ? 257 : 1);
}

static struct file
make_png(int type, int depth, bool interlaced, bool transparent)
{
    struct file file = { NULL, 0 };
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL,
                                              NULL, NULL);
    png_infop info = png_create_info_struct(png);
    int channels = type == PNG_COLOR_TYPE_RGB         ? 3
                   : type == PNG_COLOR_TYPE_RGB_ALPHA ? 4
                   : type == PNG_COLOR_TYPE_GRAY_ALPHA ? 2
                                                      : 1;
    uint8_t line[64] = { 0 }, *rows[8];
    png_color palette[256];
    uint8_t alpha[256];
    png_color_16 key = { .red = (png_uint_16)sample(depth, 3, 0),
                         .green = (png_uint_16)sample(depth, 3, 1),
                         .blue = (png_uint_16)sample(depth, 3, 2),
                         .gray = (png_uint_16)sample(depth, 3, 0) };

    png_set_write_fn(png, &file, png_write, NULL);
    png_set_IHDR(png, info, 8, 8, depth, type,
                 interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    for (int i = 0; i < 256; i++) {
        palette[i] = (png_color){ (png_byte)(255 - i), (png_byte)i,
                                  (png_byte)(i / 2) };
        alpha[i] = (uint8_t)(i * 3);
    }
    if (type == PNG_COLOR_TYPE_PALETTE)
        png_set_PLTE(png, info, palette, 1 << depth);
    if (transparent)
        png_set_tRNS(png, info, alpha,
                     type == PNG_COLOR_TYPE_PALETTE ? 1 << depth : 0, &key);
    png_write_info(png, info);
    for (uint32_t x = 0; x < 8; x++)
        for (int s = 0; s < channels; s++) {
            uint32_t value = sample(depth, x, s), at = x * channels + s;

            if (depth == 16) {
                line[2 * at] = (uint8_t)(value >> 8);
                line[2 * at + 1] = (uint8_t)value;
            } else {
                line[at * depth / 8] |=
                    (uint8_t)(value << (8 - depth - at * depth % 8));
            }
        }
    for (int y = 0; y < 8; y++)
        rows[y] = line;
    png_write_image(png, rows);
    png_write_end(png, info);
    png_destroy_write_struct(&png, &info);
    return file;
}

static void
check_png(int type, int depth, bool transparent,
          const struct ns_picture *picture)
{
    for (uint32_t x = 0; x < 8; x++)
        for (int c = 0; c < 3; c++) {
            bool gray = type == PNG_COLOR_TYPE_GRAY ||
                        type == PNG_COLOR_TYPE_GRAY_ALPHA;
            uint32_t first = sample(depth, x, 0), value, a = 255;
            int alpha_at = type == PNG_COLOR_TYPE_GRAY_ALPHA ? 1 : 3;

            value = gray ? first : sample(depth, x, c);
            if (depth == 16)
                value >>= 8;
            else if (depth < 8 && gray)
                value = value * 255 / ((1u << depth) - 1);
            if (type == PNG_COLOR_TYPE_PALETTE)
                value = c == 0 ? 255 - first : c == 1 ? first : first / 2;
            if (type & PNG_COLOR_MASK_ALPHA)
                a = sample(depth, x, alpha_at) >> (depth == 16 ? 8 : 0);
            else if (transparent && type == PNG_COLOR_TYPE_PALETTE)
                a = first * 3 & 255;
            else if (transparent && first == sample(depth, 3, 0))
                a = 0;
            value = over_white((uint8_t)value, (uint8_t)a);
            for (uint32_t y = 0; y < 8; y += 7)
                if (picture->rgb[(y * 8 + x) * 3 + c] != value)
                    fail_msg("type %d depth %d: %u at %u,%u, not %u", type,
                             depth, picture->rgb[(y * 8 + x) * 3 + c], x, y,
                             value);
        }
}

static void
png_of_every_type_and_depth_lies_over_white(void **state)
{
    static const struct {
        int type, depths[6];
    } kinds[] = {
        { PNG_COLOR_TYPE_GRAY, { 1, 2, 4, 8, 16, 0 } },
        { PNG_COLOR_TYPE_PALETTE, { 1, 2, 4, 8, 0 } },
        { PNG_COLOR_TYPE_RGB, { 8, 16, 0 } },
        { PNG_COLOR_TYPE_GRAY_ALPHA, { 8, 16, 0 } },
        { PNG_COLOR_TYPE_RGB_ALPHA, { 8, 16, 0 } },
    };

    (void)state;
    for (int k = 0; k < 5; k++)
        for (const int *depth = kinds[k].depths; *depth; depth++)
            for (int how = 0; how < 4; how++) {
                bool transparent = how & 1 &&
                                   !(kinds[k].type & PNG_COLOR_MASK_ALPHA);
                struct file file = make_png(kinds[k].type, *depth, how & 2,
                                            transparent);
                struct ns_picture picture = decode(file);

                check_png(kinds[k].type, *depth, transparent, &picture);
                ns_picture_fini(&picture);
                free(file.bytes);
            }
}

/* ---- WebP -------------------------------------------------------------------- */

static struct file
make_webp(bool lossless, bool alpha)
{
    uint8_t pixels[60 * 40 * 4];
    struct file file = { NULL, 0 };
    uint8_t *bytes = NULL;

    for (uint32_t i = 0; i < 60 * 40; i++) {
        colour(i % 60, i / 60, 60, 40, pixels + 4 * i);
        pixels[4 * i + 3] = alpha && i % 60 < 30 ? 128 : 255;
    }
    file.n = lossless ? WebPEncodeLosslessRGBA(pixels, 60, 40, 240, &bytes)
                      : WebPEncodeRGBA(pixels, 60, 40, 240, 98, &bytes);
    assert_true(file.n > 0);
    file.bytes = malloc(file.n);
    memcpy(file.bytes, bytes, file.n);
    WebPFree(bytes);
    return file;
}

static void
webp_comes_out_with_alpha_over_white(void **state)
{
    (void)state;
    for (int how = 0; how < 4; how++) {
        struct file file = make_webp(how & 1, how & 2);
        struct ns_picture p = decode(file);

        if (how & 2) {
            assert_in_range(p.rgb[3 * 62 + 1], 134, 141); /* 20 at one half */
        } else {
            check_fields(&p, how & 1 ? 0 : 12);
        }
        ns_picture_fini(&p);
        free(file.bytes);
    }
}

/* ---- what is refused ------------------------------------------------------------ */

static void
other_kinds_and_animations_are_named(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
        const char *code, *words;
    } others[] = {
        { "GIF89a\1\0\1\0", 10, "image_type", "GIF" },
        { "II*\0\10\0\0\0", 8, "image_type", "TIFF" },
        { "<svg xmlns=", 11, "image_type", "SVG" },
        { "%PDF-1.4", 8, "image_type", "PDF" },
        { "BM123456", 8, "image_type", "BMP" },
        { "\0\0\0\40ftypavif", 12, "image_type", "AVIF" },
        { "hello", 5, "bad_image", "no picture" },
        { "", 0, "bad_image", "no picture" },
        { "\xff\xd8\xff", 3, "bad_image", "JPEG" },
        { "\x89PNG\r\n\x1a\n", 8, "bad_image", "PNG" },
        { "RIFF\4\0\0\0WEBP", 12, "bad_image", "WebP" },
    };
    struct file file = make_png(PNG_COLOR_TYPE_RGB, 8, false, false);
    uint8_t actl[20] = { 0, 0, 0, 8, 'a', 'c', 'T', 'L' };

    (void)state;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        refused((struct file){ (uint8_t *)(uintptr_t)others[i].bytes,
                               others[i].n }, others[i].code,
                others[i].words);
    file.bytes = realloc(file.bytes, file.n + 20);
    memmove(file.bytes + 33 + 20, file.bytes + 33, file.n - 33);
    memcpy(file.bytes + 33, actl, 20);
    file.n += 20;
    refused(file, "image_type", "animated");
    free(file.bytes);
    file = make_webp(true, false); /* made an extended file with the flag */
    file.bytes = realloc(file.bytes, file.n + 18);
    memmove(file.bytes + 30, file.bytes + 12, file.n - 12);
    memcpy(file.bytes + 12, "VP8X\12\0\0\0\2\0\0\0\73\0\0\47\0\0", 18);
    file.n += 18;
    file.bytes[4] = (uint8_t)(file.n - 8);
    file.bytes[5] = (uint8_t)((file.n - 8) >> 8);
    refused(file, "image_type", "animated");
    free(file.bytes);
}

static void
sizes_are_judged_by_the_header_alone(void **state)
{
    struct file file = make_png(PNG_COLOR_TYPE_RGB, 8, false, false);
    static const uint32_t sizes[][2] = { { 65536, 1 }, { 1, 70000 },
                                         { 5000, 4001 } };

    (void)state;
    for (int i = 0; i < 3; i++) {
        png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL,
                                                  NULL, NULL);
        png_infop info = png_create_info_struct(png);
        struct file header = { NULL, 0 };

        png_set_write_fn(png, &header, png_write, NULL);
        png_set_IHDR(png, info, sizes[i][0], sizes[i][1], 8,
                     PNG_COLOR_TYPE_RGB, 0, 0, 0);
        png_write_info(png, info);
        png_destroy_write_struct(&png, &info);
        header.bytes = realloc(header.bytes, header.n + file.n - 33);
        memcpy(header.bytes + header.n, file.bytes + 33, file.n - 33);
        header.n += file.n - 33;
        refused(header, "image_limit", i < 2 ? "a side" : "megapixels");
        free(header.bytes);
    }
    free(file.bytes);
}

static void
what_is_cut_short_or_damaged_is_refused_or_decoded(void **state)
{
    struct file files[4] = { make_jpeg(60, 40, JCS_RGB, NULL, 0),
                             make_png(PNG_COLOR_TYPE_RGB, 8, true, false),
                             make_webp(true, true), make_webp(false, true) };
    uint64_t seed = 11;

    (void)state;
    for (int f = 0; f < 4; f++) {
        uint8_t *copy = malloc(files[f].n);

        for (size_t n = 0; n < files[f].n; n += 1 + files[f].n / 97) {
            struct ns_picture picture = { 0 };
            struct ns_error err;

            /* JPEG's end marker may be missing, its pixels may not. */
            if (ns_picture_decode(files[f].bytes, n, &picture, &err) == NS_OK)
                assert_true(n + 16 >= files[f].n);
            ns_picture_fini(&picture);
        }
        for (int i = 0; i < 300; i++) {
            struct ns_picture picture = { 0 };
            struct ns_error err;

            memcpy(copy, files[f].bytes, files[f].n);
            for (int j = 0; j < 4; j++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                copy[(seed >> 20) % files[f].n] = (uint8_t)(seed >> 56);
            }
            (void)ns_picture_decode(copy, files[f].n, &picture, &err);
            ns_picture_fini(&picture);
        }
        free(copy);
        free(files[f].bytes);
    }
}

/* ---- helpers --------------------------------------------------------------------- */

static void
helpers_give_the_same_pixels_and_refusals(void **state)
{
    struct ns_decoder *decoder = NULL;
    struct file file = read_file(CASES "images/photo.jpg");
    struct ns_picture want = decode(file), got = { 0 };
    struct ns_error err = { 0 };

    (void)state;
    assert_int_equal(ns_decoder_create(2, &decoder, &err), NS_OK);
    for (int i = 0; i < 20; i++) {
        if (ns_decoder_decode(decoder, file.bytes, file.n, &got, &err) !=
            NS_OK)
            fail_msg("%s", err.text);
        assert_int_equal(got.width, want.width);
        assert_int_equal(got.height, want.height);
        assert_memory_equal(got.rgb, want.rgb,
                            (size_t)want.width * want.height * 3);
        ns_picture_fini(&got);
        assert_int_equal(ns_decoder_decode(decoder, "GIF89a", 6, &got, &err),
                         NS_REJECT);
        assert_string_equal(err.code, "image_type");
        assert_int_equal(ns_decoder_decode(decoder, file.bytes, file.n / 2,
                                           &got, &err), NS_REJECT);
        assert_string_equal(err.code, "bad_image");
    }
    assert_int_equal(ns_decoder_decode(decoder, file.bytes,
                                       NS_PICTURE_BYTES + 1, &got, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "image_limit");
    assert_int_equal(ns_decoder_deaths(decoder), 0);
    ns_decoder_destroy(decoder);
    ns_picture_fini(&want);
    free(file.bytes);
}

/* Bytes that make this test's helper do what a captured decoder would. */
static const char *const attacks[] = { "die: segv", "die: open", "die: exec",
                                       "die: memory", "die: socket" };

static enum ns_status
decode_or_die(const void *bytes, size_t length, struct ns_picture *out,
              struct ns_error *err)
{
    const char *how = bytes;

    if (length < 9 || memcmp(how, "die: ", 5) != 0)
        return ns_picture_decode(bytes, length, out, err);
    if (how[5] == 's' && how[6] == 'e')
        raise(SIGSEGV); /* not let through either */
    else if (how[5] == 'o')
        (void)open("/etc/passwd", O_RDONLY);
    else if (how[5] == 'e')
        (void)execl("/bin/true", "true", (char *)NULL);
    else if (how[5] == 'm')
        memset(malloc((size_t)2 << 30), 1, (size_t)2 << 30);
    else
        (void)socket(AF_INET, SOCK_STREAM, 0);
    /* Where a sanitizer leaves the calls open. */
    _exit(9);
}

static void
a_helper_that_dies_costs_one_picture(void **state)
{
    struct ns_decoder *decoder = NULL;
    struct file file = read_file(CASES "images/a.png");
    struct ns_picture got = { 0 };
    struct ns_error err = { 0 };
    uint64_t n_deaths = 0;

    (void)state;
    assert_int_equal(ns_decoder_create(1, &decoder, &err), NS_OK);
    for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]); i++) {
        assert_int_equal(ns_decoder_decode(decoder, attacks[i],
                                           strlen(attacks[i]), &got, &err),
                         NS_REJECT);
        assert_string_equal(err.code, "bad_image");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        if (!strstr(attacks[i], "memory") &&
            !strstr(err.text, "what no decoder should"))
            fail_msg("%s: %s", attacks[i], err.text);
#endif
        n_deaths += 2; /* it was tried once more */
        assert_int_equal(ns_decoder_deaths(decoder), n_deaths);
        if (ns_decoder_decode(decoder, file.bytes, file.n, &got, &err) !=
            NS_OK)
            fail_msg("%s", err.text);
        ns_picture_fini(&got);
    }
    ns_decoder_destroy(decoder);
    free(file.bytes);
}

/* The pid of the only child of this process. */
static pid_t
only_child(void)
{
    char path[64], pid[32] = "";
    FILE *file;

    snprintf(path, sizeof(path), "/proc/self/task/%d/children",
             (int)getpid());
    file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(pid, sizeof(pid), file));
    fclose(file);
    return (pid_t)atoi(pid);
}

static void
a_helper_that_was_killed_costs_no_picture(void **state)
{
    struct ns_decoder *decoder = NULL;
    struct file file = read_file(CASES "images/a.png");
    struct ns_picture got = { 0 };
    struct ns_error err = { 0 };

    (void)state;
    assert_int_equal(ns_decoder_create(1, &decoder, &err), NS_OK);
    for (uint64_t i = 1; i < 5; i++) {
        assert_int_equal(kill(only_child(), SIGKILL), 0);
        if (ns_decoder_decode(decoder, file.bytes, file.n, &got, &err) !=
            NS_OK)
            fail_msg("%s", err.text);
        ns_picture_fini(&got);
        assert_int_equal(ns_decoder_deaths(decoder), i);
    }
    ns_decoder_destroy(decoder);
    free(file.bytes);
}

enum { WIDTH = 5000, HEIGHT = 4000 };

static struct file
make_large_jpeg(uint8_t *line)
{
    struct jpeg_compress_struct info;
    struct jpeg_error_mgr errors;
    struct file file = { NULL, 0 };
    unsigned long n = 0;
    uint8_t exif[64];

    info.err = jpeg_std_error(&errors);
    jpeg_create_compress(&info);
    jpeg_mem_dest(&info, &file.bytes, &n);
    info.image_width = WIDTH;
    info.image_height = HEIGHT;
    info.input_components = 4;
    info.in_color_space = JCS_CMYK;
    jpeg_set_defaults(&info);
    jpeg_simple_progression(&info);
    jpeg_start_compress(&info, TRUE);
    jpeg_write_marker(&info, JPEG_APP0 + 1, exif, make_exif(true, 6, exif));
    while (info.next_scanline < HEIGHT)
        jpeg_write_scanlines(&info, &line, 1);
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    file.n = n;
    return file;
}

static struct file
make_large_png(uint8_t *line)
{
    struct file file = { NULL, 0 };
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL,
                                              NULL, NULL);
    png_infop info = png_create_info_struct(png);

    png_set_write_fn(png, &file, png_write, NULL);
    png_set_compression_level(png, 1);
    png_set_IHDR(png, info, WIDTH, HEIGHT, 8, PNG_COLOR_TYPE_RGB_ALPHA,
                 PNG_INTERLACE_NONE, 0, 0);
    png_write_info(png, info);
    for (int y = 0; y < HEIGHT; y++)
        png_write_row(png, line);
    png_write_end(png, info);
    png_destroy_write_struct(&png, &info);
    return file;
}

/* 20 megapixels in the ways that take the most memory, one of them turned. */
static void
the_largest_pictures_fit_into_a_helper(void **state)
{
    uint8_t *line = calloc(1, WIDTH * 4);
    struct file files[2];
    struct ns_decoder *decoder = NULL;
    struct ns_error err = { 0 };

    (void)state;
    memset(line, 90, WIDTH * 4);
    files[0] = make_large_jpeg(line);
    files[1] = make_large_png(line);
    assert_int_equal(ns_decoder_create(1, &decoder, &err), NS_OK);
    for (int i = 0; i < 2; i++) {
        struct ns_picture got = { 0 };

        if (ns_decoder_decode(decoder, files[i].bytes, files[i].n, &got,
                              &err) != NS_OK)
            fail_msg("%s", err.text);
        assert_int_equal(got.width, i ? WIDTH : HEIGHT);
        assert_int_equal(got.height, i ? HEIGHT : WIDTH);
        ns_picture_fini(&got);
        free(files[i].bytes);
    }
    assert_int_equal(ns_decoder_deaths(decoder), 0);
    ns_decoder_destroy(decoder);
    free(line);
}

struct caller {
    struct ns_decoder *decoder;
    struct file file;
    int n_good;
};

static void *
call(void *data)
{
    struct caller *caller = data;
    struct ns_picture picture;
    struct ns_error err;

    for (int i = 0; i < 20; i++)
        if (ns_decoder_decode(caller->decoder, caller->file.bytes,
                              caller->file.n, &picture, &err) == NS_OK) {
            caller->n_good++;
            ns_picture_fini(&picture);
        }
    return NULL;
}

static void
many_threads_share_few_helpers(void **state)
{
    struct file file = read_file(CASES "images/a.png");
    struct caller caller[5];
    pthread_t thread[5];
    struct ns_decoder *decoder = NULL;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_decoder_create(2, &decoder, &err), NS_OK);
    for (int i = 0; i < 5; i++) {
        caller[i] = (struct caller){ decoder, file, 0 };
        pthread_create(&thread[i], NULL, call, &caller[i]);
    }
    for (int i = 0; i < 5; i++) {
        pthread_join(thread[i], NULL);
        assert_int_equal(caller[i].n_good, 20);
    }
    ns_decoder_destroy(decoder);
    free(file.bytes);
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_references_pictures_come_out_as_there),
        cmocka_unit_test(cmyk_and_ycck_become_the_same_colours),
        cmocka_unit_test(every_orientation_turns_in_both_byte_orders),
        cmocka_unit_test(broken_exif_turns_nothing),
        cmocka_unit_test(png_of_every_type_and_depth_lies_over_white),
        cmocka_unit_test(webp_comes_out_with_alpha_over_white),
        cmocka_unit_test(other_kinds_and_animations_are_named),
        cmocka_unit_test(sizes_are_judged_by_the_header_alone),
        cmocka_unit_test(what_is_cut_short_or_damaged_is_refused_or_decoded),
        cmocka_unit_test(helpers_give_the_same_pixels_and_refusals),
        cmocka_unit_test(a_helper_that_dies_costs_one_picture),
        cmocka_unit_test(a_helper_that_was_killed_costs_no_picture),
        cmocka_unit_test(the_largest_pictures_fit_into_a_helper),
        cmocka_unit_test(many_threads_share_few_helpers),
    };

    if (ns_decoder_is_helper(argc, argv))
        return ns_decoder_main(decode_or_die, NS_DECODER_CPU_SECONDS);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
