#include "engine/image.h"

#include <math.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"

enum { FRACTION_BITS = 22 }; /* of a resize weight */

bool
ns_image_budget_known(uint32_t max_tokens)
{
    return max_tokens == 70 || max_tokens == 140 || max_tokens == 280 ||
           max_tokens == 560 || max_tokens == 1120;
}

static uint64_t
at_most(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

enum ns_status
ns_image_target(const struct ns_vision_config *vision, uint32_t width,
                uint32_t height, uint32_t max_tokens,
                struct ns_image_size *out, struct ns_error *err)
{
    uint64_t q = (uint64_t)vision->patch * vision->pooling;
    uint64_t budget = max_tokens * q * q, w, h;
    double f;

    if (width == 0 || height == 0)
        return ns_refuse(err, "image_limit", NULL,
                         "the picture is %u x %u pixels", width, height);
    if (width > NS_IMAGE_MAX_SIDE || height > NS_IMAGE_MAX_SIDE)
        return ns_refuse(err, "image_limit", NULL,
                         "the picture is %u x %u pixels, a side has at most "
                         "%d", width, height, NS_IMAGE_MAX_SIDE);
    f = sqrt((double)budget / (double)((uint64_t)width * height));
    w = (uint64_t)floor(f * width / (double)q) * q;
    h = (uint64_t)floor(f * height / (double)q) * q;
    /* A strip: one pooled patch across, and along it what the ratio asks. Both
     * cannot be 0: f * width * f * height is the budget, at least q * q. */
    if (h == 0) {
        h = q;
        w = at_most((uint64_t)(width / height) * q, max_tokens * q);
    } else if (w == 0) {
        w = q;
        h = at_most((uint64_t)(height / width) * q, max_tokens * q);
    }
    if (w == 0 || h == 0 || w * h > budget)
        return ns_refuse(err, "image_limit", NULL,
                         "a picture of %u x %u pixels has no size within %u "
                         "soft tokens", width, height, max_tokens);
    *out = (struct ns_image_size){ (uint32_t)w, (uint32_t)h,
                                   (uint32_t)(w / q * (h / q)) };
    return NS_OK;
}

/* ---- resize ----------------------------------------------------------- */

/* For each of n outputs along one axis: its first input and its weights. */
struct axis {
    uint32_t n, taps; /* taps: room for one output's weights */
    uint32_t *first, *count;
    int32_t *weight; /* [n][taps] */
};

static void
axis_fini(struct axis *axis)
{
    free(axis->first);
    free(axis->count);
    free(axis->weight);
}

static double
cubic(double t)
{
    t = fabs(t);
    if (t < 1)
        return (1.5 * t - 2.5) * t * t + 1;
    if (t < 2)
        return ((-0.5 * t + 2.5) * t - 4) * t + 2;
    return 0;
}

static void
weigh(struct axis *axis, uint32_t i, uint32_t in, double scale, double fs,
      double *w)
{
    double c = (i + 0.5) * scale, support = 2 * fs, sum = 0;
    double from = c - support + 0.5, to = c + support + 0.5;
    uint32_t lo = from > 0 ? (uint32_t)from : 0;
    uint32_t hi = to < in ? (uint32_t)to : in;

    for (uint32_t x = lo; x < hi; x++) {
        w[x - lo] = cubic((x - c + 0.5) / fs);
        sum += w[x - lo];
    }
    axis->first[i] = lo;
    axis->count[i] = hi - lo;
    for (uint32_t x = 0; x < hi - lo; x++)
        axis->weight[(size_t)i * axis->taps + x] =
            (int32_t)round(w[x] / sum * (1 << FRACTION_BITS));
}

static enum ns_status
axis_init(struct axis *axis, uint32_t in, uint32_t n, struct ns_error *err)
{
    double scale = (double)in / n, fs = scale > 1 ? scale : 1;
    size_t room;
    double *w;

    memset(axis, 0, sizeof(*axis));
    axis->n = n;
    axis->taps = (uint32_t)ceil(2 * fs) * 2 + 1;
    if (!ns_size_mul(n, axis->taps, &room))
        return ns_fail(err, NS_FATAL, "a resize of %u to %u overflows", in, n);
    axis->first = calloc(n, sizeof(*axis->first));
    axis->count = calloc(n, sizeof(*axis->count));
    axis->weight = calloc(room, sizeof(*axis->weight));
    w = calloc(axis->taps, sizeof(*w));
    if (!axis->first || !axis->count || !axis->weight || !w) {
        free(w);
        return ns_fail(err, NS_FATAL, "out of memory resizing a picture");
    }
    for (uint32_t i = 0; i < n; i++)
        weigh(axis, i, in, scale, fs, w);
    free(w);
    return NS_OK;
}

static uint8_t
clip(int32_t sum)
{
    int32_t value = sum >> FRACTION_BITS;

    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void
resize_row(const struct axis *axis, const uint8_t *in, uint8_t *out)
{
    for (uint32_t i = 0; i < axis->n; i++) {
        const int32_t *weight = axis->weight + (size_t)i * axis->taps;
        const uint8_t *pixel = in + (size_t)axis->first[i] * 3;
        int32_t half = 1 << (FRACTION_BITS - 1);
        int32_t sum[3] = { half, half, half };

        for (uint32_t x = 0; x < axis->count[i]; x++, pixel += 3)
            for (int c = 0; c < 3; c++)
                sum[c] += weight[x] * pixel[c];
        for (int c = 0; c < 3; c++)
            *out++ = clip(sum[c]);
    }
}

/* Row i of the output from the rows of `in`, `bytes` each; sum: [bytes]. */
static void
resize_column(const struct axis *axis, uint32_t i, const uint8_t *in,
              size_t bytes, int32_t *sum, uint8_t *out)
{
    const int32_t *weight = axis->weight + (size_t)i * axis->taps;

    for (size_t b = 0; b < bytes; b++)
        sum[b] = 1 << (FRACTION_BITS - 1);
    for (uint32_t y = 0; y < axis->count[i]; y++) {
        const uint8_t *row = in + (axis->first[i] + y) * bytes;

        for (size_t b = 0; b < bytes; b++)
            sum[b] += weight[y] * row[b];
    }
    for (size_t b = 0; b < bytes; b++)
        out[b] = clip(sum[b]);
}

/* First along x, rounded to 8 bits, then along y. */
static enum ns_status
resize(const uint8_t *rgb, uint32_t width, uint32_t height,
       const struct ns_image_size *to, uint8_t *out, struct ns_error *err)
{
    size_t bytes = (size_t)to->width * 3, between_bytes;
    struct axis x, y = { 0 };
    uint8_t *between = NULL;
    int32_t *sum = NULL;
    enum ns_status status = axis_init(&x, width, to->width, err);

    if (status == NS_OK)
        status = axis_init(&y, height, to->height, err);
    if (status != NS_OK)
        goto out;
    if (ns_size_mul(bytes, height, &between_bytes))
        between = malloc(between_bytes);
    sum = malloc(bytes * sizeof(*sum));
    if (!between || !sum) {
        status = ns_fail(err, NS_FATAL, "out of memory resizing a picture");
        goto out;
    }
    for (uint32_t row = 0; row < height; row++)
        resize_row(&x, rgb + (size_t)row * width * 3, between + row * bytes);
    for (uint32_t row = 0; row < to->height; row++)
        resize_column(&y, row, between, bytes, sum, out + row * bytes);
out:
    free(sum);
    free(between);
    axis_fini(&x);
    axis_fini(&y);
    return status;
}

/* ---- the prepared image ------------------------------------------------ */

static enum ns_status
digest(struct ns_image *image, size_t bytes, struct ns_error *err)
{
    uint32_t size[2] = { image->size.width, image->size.height };
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool done = hash && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1 &&
                EVP_DigestUpdate(hash, size, sizeof(size)) == 1 &&
                EVP_DigestUpdate(hash, image->rgb, bytes) == 1 &&
                EVP_DigestFinal_ex(hash, image->digest, NULL) == 1;

    EVP_MD_CTX_free(hash);
    return done ? NS_OK
                : ns_fail(err, NS_FATAL, "SHA-256 of a picture failed");
}

enum ns_status
ns_image_prepare(const struct ns_vision_config *vision, const uint8_t *rgb,
                 uint32_t width, uint32_t height, uint32_t max_tokens,
                 struct ns_image *out, struct ns_error *err)
{
    struct ns_image image = { 0 };
    enum ns_status status;
    size_t bytes;

    status = ns_image_target(vision, width, height, max_tokens, &image.size,
                             err);
    if (status != NS_OK)
        return status;
    bytes = (size_t)image.size.width * image.size.height * 3;
    image.rgb = malloc(bytes);
    if (!image.rgb)
        return ns_fail(err, NS_FATAL, "out of memory for a picture");
    if (width == image.size.width && height == image.size.height)
        memcpy(image.rgb, rgb, bytes);
    else
        status = resize(rgb, width, height, &image.size, image.rgb, err);
    if (status == NS_OK)
        status = digest(&image, bytes, err);
    if (status == NS_OK)
        *out = image;
    else
        ns_image_fini(&image);
    return status;
}

void
ns_image_fini(struct ns_image *image)
{
    free(image->rgb);
    image->rgb = NULL;
}

void
ns_image_patches(const struct ns_image *image, uint32_t patch, float *values,
                 size_t stride, int32_t *x, int32_t *y)
{
    uint32_t columns = image->size.width / patch;
    uint32_t rows = image->size.height / patch;
    size_t row_bytes = (size_t)image->size.width * 3;
    float scaled[256];

    for (int i = 0; i < 256; i++)
        scaled[i] = (float)(i * (1.0 / 255));
    for (uint32_t i = 0; i < columns * rows; i++) {
        uint32_t column = i % columns, row = i / columns;
        const uint8_t *from = image->rgb + row * patch * row_bytes +
                              (size_t)column * patch * 3;
        float *to = values + i * stride;

        x[i] = (int32_t)column;
        y[i] = (int32_t)row;
        for (uint32_t line = 0; line < patch; line++, from += row_bytes)
            for (uint32_t b = 0; b < patch * 3; b++)
                *to++ = scaled[from[b]];
    }
}
