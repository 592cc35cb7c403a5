/* The picture decoder over any bytes, without its helper: what it accepts has
 * pixels within the limits, what it refuses has one of three codes. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/picture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(int holds)
{
    if (!holds)
        abort();
}

/* Large pictures are for a time limit, not for a fuzzer. */
static int
is_large(const uint8_t *data, size_t size)
{
    return size > 24 && memcmp(data, "\x89PNG", 4) == 0 &&
           (data[16] | data[17] | data[20] | data[21] | (data[18] & 0xf0) |
            (data[22] & 0xf0)) != 0;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_picture picture = { 0 };
    struct ns_error err = { 0 };
    volatile uint8_t sum = 0;

    if (is_large(data, size))
        return 0;
    if (ns_picture_decode(data, size, &picture, &err) != NS_OK) {
        check(!picture.rgb && err.text[0]);
        check(err.status == NS_FATAL ||
              (err.code && (!strcmp(err.code, "image_limit") ||
                            !strcmp(err.code, "image_type") ||
                            !strcmp(err.code, "bad_image"))));
        return 0;
    }
    check(picture.width > 0 && picture.height > 0);
    check((uint64_t)picture.width * picture.height <= NS_PICTURE_PIXELS);
    for (size_t i = 0; i < (size_t)picture.width * picture.height * 3; i++)
        sum ^= picture.rgb[i]; /* every pixel was written */
    ns_picture_fini(&picture);
    return 0;
}
