/* The tower over many pictures at once, and what it keeps. That it computes
 * what the reference does, the vectors say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/vision.h"
#include "tests/fault.h"
#include "tests/rig.h"

enum { N = 40 };

static const struct ns_backend_options backend = { .n_threads = 2 };
static struct rig rig;
static struct ns_image image[N];

/* Pictures of all sizes of up to 70 tokens; 30 and up are those from 0 on. */
static int
open_all(void **state)
{
    const struct ns_vision_config *config;
    uint8_t *rgb = malloc(60 * 60 * 3);
    struct ns_error err;

    (void)state;
    if (rig_open(&rig, "tests/cases/vision_fp32/model", &backend, false,
                 &err) != NS_OK)
        return -1;
    config = &rig.model->config.vision;
    for (uint32_t i = 0; i < N; i++) {
        uint32_t which = i % 30;

        for (uint32_t j = 0; j < 60 * 60 * 3; j++)
            rgb[j] = (uint8_t)((j / 7 + which * 31) * 2654435761u >> 24);
        if (ns_image_prepare(config, rgb, 3 + which * 13 % 50,
                             3 + which * 29 % 50, 70, &image[i], &err) !=
            NS_OK)
            return -1;
    }
    free(rgb);
    return 0;
}

static int
close_all(void **state)
{
    (void)state;
    for (int i = 0; i < N; i++)
        ns_image_fini(&image[i]);
    rig_close(&rig);
    return 0;
}

static struct ns_vision *
open_vision(uint64_t cache_bytes)
{
    struct ns_vision *vision = NULL;
    struct ns_error err;

    if (ns_vision_create(rig.model, cache_bytes, &vision, &err) != NS_OK)
        fail_msg("%s", err.text);
    return vision;
}

static size_t
soft_bytes(const struct ns_image *picture)
{
    return (size_t)picture->size.n_tokens * rig.model->config.hidden *
           sizeof(float);
}

static const float *
encode_one(struct ns_vision *vision, const struct ns_image *picture)
{
    const float *soft = NULL;
    struct ns_error err;

    if (ns_vision_encode(vision, &picture, 1, &soft, &err) != NS_OK)
        fail_msg("%s", err.text);
    return soft;
}

static void
pictures_together_are_as_each_alone_to_the_bit(void **state)
{
    struct ns_vision *many = open_vision(1 << 20), *one = open_vision(0);
    const struct ns_image *images[N];
    const float *soft[N];
    uint32_t n_tokens = 0;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < N; i++) {
        images[i] = &image[i];
        n_tokens += image[i].size.n_tokens;
    }
    assert_true(n_tokens > NS_IMAGE_MAX_TOKENS); /* more than one run */
    assert_int_equal(ns_vision_encode(many, images, N, soft, &err), NS_OK);
    assert_int_equal(ns_vision_counts(many).n_asked, N);
    assert_int_equal(ns_vision_counts(many).n_encoded, 30);
    for (int i = 0; i < N; i++)
        assert_memory_equal(soft[i], encode_one(one, &image[i]),
                            soft_bytes(&image[i]));
    /* Without a cache nothing is kept from call to call. */
    assert_int_equal(ns_vision_counts(one).n_encoded, N);
    ns_vision_destroy(many);
    ns_vision_destroy(one);
}

static void
the_longest_unused_goes_first_and_the_bound_holds(void **state)
{
    uint64_t bound = soft_bytes(&image[0]) + soft_bytes(&image[1]) +
                     soft_bytes(&image[2]);
    struct ns_vision *vision = open_vision(bound);

    (void)state;
    for (int i = 0; i < 3; i++)
        encode_one(vision, &image[i]);
    encode_one(vision, &image[0]); /* kept */
    assert_int_equal(ns_vision_counts(vision).n_encoded, 3);
    encode_one(vision, &image[3]); /* over the bound: 1 will go */
    encode_one(vision, &image[0]);
    assert_int_equal(ns_vision_counts(vision).n_encoded, 4);
    assert_true(ns_vision_counts(vision).kept_bytes <= bound);
    encode_one(vision, &image[1]);
    assert_int_equal(ns_vision_counts(vision).n_encoded, 5);
    for (int i = 0; i < N; i++) {
        encode_one(vision, &image[i]);
        assert_true(ns_vision_counts(vision).kept_bytes <=
                    bound + soft_bytes(&image[i]));
    }
    ns_vision_destroy(vision);
}

static void
lost_memory_costs_a_call_and_nothing_more(void **state)
{
    const struct ns_image *images[] = { &image[4], &image[5], &image[4] };
    struct ns_vision *vision = NULL, *whole = open_vision(1 << 20);
    const float *soft[3];
    struct ns_error err;
    bool fired = true;
    int n;

    (void)state;
    for (n = 0; fired; n++) {
        enum ns_status status;

        fault_arm(n);
        status = ns_vision_create(rig.model, 0, &vision, &err);
        fired = fault_fired();
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
    }
    assert_true(n > 6);
    fired = true;
    for (n = 0; fired; n++) {
        enum ns_status status;

        fault_arm(n);
        status = ns_vision_encode(vision, images, 3, soft, &err);
        fired = fault_fired();
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
    }
    assert_int_equal(n, 3); /* one for each of two pictures, and through */
    for (int i = 0; i < 3; i++)
        assert_memory_equal(soft[i], encode_one(whole, images[i]),
                            soft_bytes(images[i]));
    ns_vision_destroy(vision);
    ns_vision_destroy(whole);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pictures_together_are_as_each_alone_to_the_bit),
        cmocka_unit_test(the_longest_unused_goes_first_and_the_bound_holds),
        cmocka_unit_test(lost_memory_costs_a_call_and_nothing_more),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
