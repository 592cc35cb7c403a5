/* The tower over many pictures at once, and what it keeps. That it computes
 * what the reference does, the vectors say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>

#include "engine/safetensors.h"
#include "engine/vision.h"
#include "tests/fault.h"
#include "tests/rig.h"
#include "tests/tiny.h"

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

/* ---- clipped linears ------------------------------------------------------- */

enum { WIDTH = 36, HEIGHT = 24, N_SOFT = 6, HIDDEN = 64 };

static char *
make_clipped(void)
{
    struct tiny_recipe recipe = tiny_recipe();

    recipe.vision = recipe.clipped = true;
    return tiny_make(&recipe);
}

/* The picture of tests/tools/clipped.py on a checkpoint's tower. */
static void
soft_of(const char *directory, const char *isa, float out[N_SOFT * HIDDEN])
{
    struct ns_backend_options options = { .n_threads = 2, .isa = isa };
    uint8_t rgb[WIDTH * HEIGHT * 3];
    const struct ns_image picture = { { WIDTH, HEIGHT, N_SOFT }, rgb, { 1 } };
    const struct ns_image *images[] = { &picture };
    struct ns_vision *vision = NULL;
    const float *soft;
    struct ns_error err;
    struct rig clipped;

    for (uint32_t i = 0; i < sizeof(rgb); i++)
        rgb[i] = (uint8_t)(i * 2654435761u >> 24);
    if (rig_open(&clipped, directory, &options, false, &err) != NS_OK ||
        ns_vision_create(clipped.model, 0, &vision, &err) != NS_OK ||
        ns_vision_encode(vision, images, 1, &soft, &err) != NS_OK)
        fail_msg("%s", err.text);
    assert_int_equal(clipped.model->config.hidden, HIDDEN);
    memcpy(out, soft, sizeof(float) * N_SOFT * HIDDEN);
    ns_vision_destroy(vision);
    rig_close(&clipped);
}

static double
furthest(const float *a, const float *b)
{
    double most = 0;

    for (int i = 0; i < N_SOFT * HIDDEN; i++)
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    return most;
}

static void
a_clipped_tower_gives_what_transformers_gives(void **state)
{
    static const char *const isas[] = { "ref", NULL };
    json_t *golden = json_load_file("tests/engine/golden/clipped_soft.json", 0, NULL);
    float want[N_SOFT * HIDDEN], got[N_SOFT * HIDDEN];
    char *directory = make_clipped();

    (void)state;
    assert_int_equal(json_array_size(golden), N_SOFT);
    for (size_t i = 0; i < N_SOFT * HIDDEN; i++)
        want[i] = (float)json_number_value(json_array_get(
            json_array_get(golden, i / HIDDEN), i % HIDDEN));
    json_decref(golden);
    for (int i = 0; i < 2; i++) {
        soft_of(directory, isas[i], got);
        assert_true(furthest(got, want) < 5e-5);
    }
    tiny_remove(directory);
}

/* The checkpoint with one limit replaced. */
static char *
with_limit(const char *name, float value)
{
    char *directory = make_clipped(), *bytes;
    struct ns_safetensors *st = NULL;
    const struct ns_stored_tensor *tensor;
    size_t length, header, file_bytes;
    const char *start;
    struct ns_error err;

    assert_int_equal(ns_safetensors_open(directory, &st, &err), NS_OK);
    start = ns_safetensors_header(st, 0, &header, &file_bytes);
    tensor = ns_safetensors_find(st, name);
    assert_true(tensor && tensor->bytes == sizeof(value));
    bytes = tiny_read_file(directory, "model.safetensors", &length);
    memcpy(bytes + ((const char *)tensor->data - start), &value,
           sizeof(value));
    ns_safetensors_close(st);
    tiny_write_file(directory, "model.safetensors", bytes, length);
    free(bytes);
    return directory;
}

static void
every_limit_is_where_it_belongs_and_infinite_is_none(void **state)
{
    static const char *const modules[] = {
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
        "mlp.gate", "mlp.up", "mlp.down",
    };
    static const char *const limits[] = { "input_min", "input_max",
                                          "output_min", "output_max" };
    float as_it_is[N_SOFT * HIDDEN], got[N_SOFT * HIDDEN];
    float open_ended[N_SOFT * HIDDEN];
    char *directory = make_clipped(), name[128];

    (void)state;
    soft_of(directory, NULL, as_it_is);
    tiny_remove(directory);
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 4; j++) {
            float end = j % 2 ? INFINITY : -INFINITY;

            snprintf(name, sizeof(name), "model.encoder.vision_tower.encoder."
                     "layers.0.%s_proj.%s", modules[i], limits[j]);
            directory = with_limit(name, 0.0f);
            soft_of(directory, NULL, got);
            tiny_remove(directory);
            if (furthest(got, as_it_is) < 1e-4)
                fail_msg("%s is not looked at", name);
            directory = with_limit(name, end);
            soft_of(directory, NULL, open_ended);
            tiny_remove(directory);
            assert_true(furthest(open_ended, got) > 1e-4);
        }
}

static void
limits_that_are_none_are_refused(void **state)
{
#define UP "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj."
    static const struct {
        const char *name;
        float value;
    } cases[] = {
        { UP "input_min", NAN }, { UP "output_max", NAN },
        { UP "input_max", -1 },  { UP "output_max", -INFINITY },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *directory = with_limit(cases[i].name, cases[i].value);
        struct ns_model *model = NULL;
        struct ns_error err;

        assert_int_equal(ns_model_describe(directory, rig.be, &model, &err),
                         NS_REJECT);
        assert_non_null(strstr(err.text, cases[i].name));
        tiny_remove(directory);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pictures_together_are_as_each_alone_to_the_bit),
        cmocka_unit_test(the_longest_unused_goes_first_and_the_bound_holds),
        cmocka_unit_test(lost_memory_costs_a_call_and_nothing_more),
        cmocka_unit_test(a_clipped_tower_gives_what_transformers_gives),
        cmocka_unit_test(every_limit_is_where_it_belongs_and_infinite_is_none),
        cmocka_unit_test(limits_that_are_none_are_refused),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
