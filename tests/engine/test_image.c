/* Target sizes, the resize and patches, against the recorded ones. The cases
 * carry the decoded pictures, so that no decoder is needed here. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/image.h"
#include "engine/safetensors.h"
#include "tests/fault.h"

#define CASES "tests/cases/vision_fp32/"

static uint32_t
number(const json_t *object, const char *key)
{
    return (uint32_t)json_integer_value(json_object_get(object, key));
}

static void
every_recorded_size_comes_out(void **state)
{
    json_t *table = json_load_file(CASES "sizes.json", 0, NULL);
    const json_t *rows = json_object_get(table, "rows"), *row;
    size_t i;

    (void)state;
    assert_true(json_array_size(rows) > 50);
    json_array_foreach(rows, i, row) {
        struct ns_vision_config vision = { .patch = number(row, "patch"),
                                           .pooling = number(row, "pool") };
        struct ns_image_size size;
        struct ns_error err;
        enum ns_status status =
            ns_image_target(&vision, number(row, "w"), number(row, "h"),
                            number(row, "max_soft"), &size, &err);

        if (json_object_get(row, "error")) {
            assert_int_equal(status, NS_REJECT);
            continue;
        }
        assert_int_equal(status, NS_OK);
        assert_int_equal(size.width, number(row, "out_w"));
        assert_int_equal(size.height, number(row, "out_h"));
        assert_int_equal(size.n_tokens, number(row, "soft_tokens"));
    }
    json_decref(table);
}

static void
check_size(uint32_t w, uint32_t h, uint32_t budget)
{
    static const struct ns_vision_config released = { .patch = 16,
                                                      .pooling = 3 };
    struct ns_image_size size;
    struct ns_error err;

    if (ns_image_target(&released, w, h, budget, &size, &err) != NS_OK)
        fail_msg("%u x %u: %s", w, h, err.text);
    assert_in_range(size.n_tokens, 1, budget);
    assert_int_equal(size.width % 48, 0);
    assert_int_equal(size.height % 48, 0);
    /* placeholders: n_tokens; features: pooled patches of the grid */
    assert_int_equal(size.width / 16 * (size.height / 16),
                     size.n_tokens * 9);
}

static void
any_size_has_as_many_features_as_placeholders(void **state)
{
    static const uint32_t budgets[] = { 70, 140, 280, 560, 1120 };
    uint64_t seed = 6;

    (void)state;
    for (int i = 0; i < 10000; i++) {
        uint32_t side[2];

        for (int s = 0; s < 2; s++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            side[s] = 1 + (uint32_t)(seed >> 33) % (1u << (seed >> 60));
        }
        check_size(side[0], side[1], budgets[i % 5]);
    }
    for (int i = 0; i < 5; i++) {
        check_size(3, 900, budgets[i]);
        check_size(900, 3, budgets[i]);
        check_size(1, 1, budgets[i]);
        check_size(20000, 1, budgets[i]);
        check_size(1, 20000, budgets[i]);
    }
}

static void
empty_and_endless_pictures_are_refused(void **state)
{
    static const struct ns_vision_config vision = { .patch = 16,
                                                    .pooling = 3 };
    static const uint32_t sides[][2] = { { 0, 5 }, { 5, 0 }, { 65536, 1 },
                                         { 1, 65536 } };
    struct ns_image_size size;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(ns_image_target(&vision, sides[i][0], sides[i][1],
                                         280, &size, &err), NS_REJECT);
        assert_string_equal(err.code, "image_limit");
    }
}

static const struct ns_stored_tensor *
tensor(struct ns_safetensors *st, const char *name)
{
    return ns_safetensors_find(st, name);
}

static void
check_picture(const json_t *manifest)
{
    struct ns_vision_config vision = {
        .patch = number(manifest, "patch_size"),
        .pooling = number(manifest, "pooling"),
    };
    const struct ns_stored_tensor *rgb, *resized, *positions, *patches;
    uint32_t n, width = 3 * vision.patch * vision.patch;
    struct ns_safetensors *st;
    struct ns_image image;
    struct ns_error err;
    char path[300];
    int32_t *x, *y, xy[2];
    float *values, value;

    snprintf(path, sizeof(path), CASES "%s",
             json_string_value(json_object_get(manifest, "tensors_file")));
    assert_int_equal(ns_safetensors_open_file(path, &st, &err), NS_OK);
    rgb = tensor(st, "rgb");
    resized = tensor(st, "resized");
    positions = tensor(st, "positions");
    patches = tensor(st, "patches");
    assert_non_null(rgb);
    assert_int_equal(ns_image_prepare(&vision, rgb->data,
                                      (uint32_t)rgb->dim[1],
                                      (uint32_t)rgb->dim[0],
                                      number(manifest, "max_soft_tokens"),
                                      &image, &err), NS_OK);
    assert_int_equal(image.size.n_tokens, number(manifest, "soft_tokens"));
    assert_int_equal(image.size.height, resized->dim[0]);
    assert_int_equal(image.size.width, resized->dim[1]);
    assert_memory_equal(image.rgb, resized->data, resized->bytes);

    n = image.size.n_tokens * vision.pooling * vision.pooling;
    assert_int_equal(n, positions->dim[0]);
    values = calloc((size_t)n * width, sizeof(float));
    x = calloc(n, sizeof(int32_t));
    y = calloc(n, sizeof(int32_t));
    ns_image_patches(&image, vision.patch, values, width, x, y);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(xy, (const char *)positions->data + i * sizeof(xy),
               sizeof(xy));
        assert_int_equal(x[i], xy[0]);
        assert_int_equal(y[i], xy[1]);
    }
    for (size_t i = 0; patches && i < (size_t)n * width; i++) {
        memcpy(&value, (const char *)patches->data + i * sizeof(value),
               sizeof(value));
        assert_true(fabsf(values[i] - value) <= 1e-7f);
    }
    free(values);
    free(x);
    free(y);
    ns_image_fini(&image);
    ns_safetensors_close(st);
}

static void
every_recorded_picture_is_resized_bit_for_bit(void **state)
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
        assert_non_null(manifest);
        check_picture(manifest);
        json_decref(manifest);
        n++;
    }
    closedir(dir);
    assert_int_equal(n, 13);
}

static void
the_digest_tells_pixels_and_sizes_apart(void **state)
{
    static const struct ns_vision_config vision = { .patch = 2,
                                                    .pooling = 1 };
    uint8_t rgb[12 * 24 * 3] = { 0 };
    struct ns_image a, b, c;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_image_prepare(&vision, rgb, 12, 24, 70, &a, &err),
                     NS_OK);
    assert_int_equal(ns_image_prepare(&vision, rgb, 24, 12, 70, &b, &err),
                     NS_OK);
    assert_memory_not_equal(a.digest, b.digest, 32);
    rgb[500] = 9;
    assert_int_equal(ns_image_prepare(&vision, rgb, 12, 24, 70, &c, &err),
                     NS_OK);
    assert_memory_not_equal(a.digest, c.digest, 32);
    ns_image_fini(&a);
    ns_image_fini(&b);
    ns_image_fini(&c);
}

static void
lost_memory_is_an_error_and_no_leak(void **state)
{
    static const struct ns_vision_config vision = { .patch = 2,
                                                    .pooling = 2 };
    uint8_t rgb[40 * 30 * 3] = { 7 };
    bool fired = true;
    int n;

    (void)state;
    for (n = 0; fired; n++) {
        struct ns_image image = { 0 };
        enum ns_status status;
        struct ns_error err;

        fault_arm(n);
        status = ns_image_prepare(&vision, rgb, 40, 30, 70, &image, &err);
        fired = fault_fired();
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
        ns_image_fini(&image);
    }
    assert_true(n > 8); /* pixels, two axes of four, what lies between */
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_recorded_size_comes_out),
        cmocka_unit_test(any_size_has_as_many_features_as_placeholders),
        cmocka_unit_test(empty_and_endless_pictures_are_refused),
        cmocka_unit_test(every_recorded_picture_is_resized_bit_for_bit),
        cmocka_unit_test(the_digest_tells_pixels_and_sizes_apart),
        cmocka_unit_test(lost_memory_is_an_error_and_no_leak),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
