/* The shipped model against transformers: examples/demo-transformers.jsonl
 * holds the prompt ids that the chat template gives for each demo job, pictures
 * included, and transformers' own greedy answer. training/vectors.py makes it
 * again, and `make bench` compares. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <png.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/prompt.h"

enum { MOST = 64, SOFT_TOKENS = 70 /* what detail low asks for */ };

struct demo {
    json_t *job, *peer;
    struct ns_ids ids;
    struct ns_image image; /* of a job with a picture, else zeroes */
    struct ns_request_image place;
    char *content;
};

static uint32_t
load(struct demo *demo)
{
    FILE *jobs = fopen("examples/demo-jobs.jsonl", "re");
    FILE *peers = fopen("examples/demo-transformers.jsonl", "re");
    uint32_t n = 0;

    assert_non_null(jobs);
    assert_non_null(peers);
    memset(demo, 0, MOST * sizeof(*demo));
    while (n < MOST) {
        demo[n].job = json_loadf(jobs, JSON_DISABLE_EOF_CHECK, NULL);
        demo[n].peer = json_loadf(peers, JSON_DISABLE_EOF_CHECK, NULL);
        if (!demo[n].job || !demo[n].peer)
            break;
        assert_string_equal(
            json_string_value(json_object_get(demo[n].job, "custom_id")),
            json_string_value(json_object_get(demo[n].peer, "custom_id")));
        n++;
    }
    json_decref(demo[n < MOST ? n : 0].job);
    fclose(jobs);
    fclose(peers);
    assert_in_range(n, 12, MOST);
    return n;
}

/* The picture of a job's first content part, from its file. */
static void
see(struct demo *demo, const json_t *messages,
    const struct ns_vision_config *vision)
{
    const json_t *part = json_array_get(
        json_object_get(json_array_get(messages, 0), "content"), 0);
    const json_t *url =
        json_object_get(json_object_get(part, "image_url"), "url");
    png_image png = { .version = PNG_IMAGE_VERSION };
    struct ns_error err;
    char path[256];
    uint8_t *rgb;

    if (!url)
        return;
    snprintf(path, sizeof(path), "examples/%s", json_string_value(url));
    assert_true(png_image_begin_read_from_file(&png, path));
    png.format = PNG_FORMAT_RGB;
    rgb = malloc(PNG_IMAGE_SIZE(png));
    assert_non_null(rgb);
    assert_true(png_image_finish_read(&png, NULL, rgb, 0, NULL));
    if (ns_image_prepare(vision, rgb, png.width, png.height, SOFT_TOKENS,
                         &demo->image, &err) != NS_OK)
        fail_msg("%s: %s", path, err.text);
    free(rgb);
}

static void
encode(struct demo *demo, const struct ns_model *model,
       const struct ns_tokenizer *tokenizer)
{
    const struct ns_prompt_options options = { .generation_prompt = true };
    const struct ns_image_ids marks = {
        model->config.image_begin_id, model->config.image_id,
        model->config.image_end_id
    };
    struct ns_prompt prompt;
    struct ns_error err;
    const json_t *messages = json_object_get(
        json_object_get(demo->job, "body"), "messages");

    see(demo, messages, &model->config.vision);
    demo->ids = (struct ns_ids){ .limit = 4096 };
    assert_int_equal(ns_prompt_render(messages, NULL, &options, 1 << 20,
                                      &prompt, &err), NS_OK);
    assert_int_equal(ns_prompt_encode(&prompt, tokenizer, &marks,
                                      &demo->image.size.n_tokens, &demo->ids,
                                      &err), NS_OK);
    demo->place.image = &demo->image;
    while (demo->image.rgb &&
           demo->ids.id[demo->place.position] != marks.placeholder)
        demo->place.position++;
    ns_prompt_fini(&prompt);
}

/* Runs all in one mode; keeps each one's content. Tokens per denoise step. */
static double
run(struct ns_engine *engine, struct demo *demo, uint32_t n,
    enum ns_mode mode)
{
    const struct ns_generation *g = &ns_engine_model(engine)->generation;
    uint32_t n_over = 0, tokens = 0, steps = 0;
    struct ns_error err;

    for (uint32_t i = 0; i < n; i++) {
        struct ns_request request = {
            .id = i, .prompt = demo[i].ids.id,
            .n_prompt = (uint32_t)demo[i].ids.n, .mode = mode, .seed = 1,
            .images = &demo[i].place, .n_images = demo[i].image.rgb != NULL,
            .max_tokens = 128, .top_p = 1.0f,
            .sampler = { g->t_min, g->t_max, g->entropy_bound,
                         g->max_denoising_steps, g->stability_threshold,
                         g->confidence_threshold },
        };

        if (ns_engine_submit(engine, &request, &err) != NS_OK)
            fail_msg("%s", err.text);
    }
    for (int pass = 0; n_over < n && pass < 10000; pass++) {
        struct ns_pass_report report;
        struct ns_event event;

        assert_int_equal(ns_engine_pass(engine, &report, &err), NS_OK);
        while (ns_engine_next_event(engine, &event)) {
            if (event.kind == NS_EVENT_BLOCK)
                continue;
            assert_int_equal(event.kind, NS_EVENT_DONE);
            free(demo[event.id].content);
            demo[event.id].content = strdup(event.reply.content);
            tokens += event.usage.new_tokens;
            steps += event.usage.denoise_steps;
            n_over++;
        }
    }
    assert_int_equal(n_over, n);
    return steps ? (double)tokens / steps : 0;
}

static uint32_t
count_equal(const struct demo *demo, uint32_t n, const char *field)
{
    uint32_t n_equal = 0;

    for (uint32_t i = 0; i < n; i++)
        n_equal += strcmp(demo[i].content,
                          json_string_value(json_object_get(demo[i].peer,
                                                            field))) == 0;
    return n_equal;
}

/* The jobs, ready to run, and the model on one instruction set (NULL: the
 * machine's best). */
static struct ns_engine *
open_demo(const char *isa, struct demo *demo, uint32_t *n)
{
    const struct ns_engine_options options = {
        .model_directory = "models/demo",
        .backend.isa = isa,
        .kv_bytes = 64 << 20,
    };
    struct ns_engine *engine = NULL;
    struct ns_error err;

    *n = load(demo);
    if (ns_engine_open(&options, &engine, &err) != NS_OK)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < *n; i++)
        encode(&demo[i], ns_engine_model(engine), ns_engine_tokenizer(engine));
    return engine;
}

static void
close_demo(struct ns_engine *engine, struct demo *demo, uint32_t n)
{
    ns_engine_close(engine);
    for (uint32_t i = 0; i < n; i++) {
        json_decref(demo[i].job);
        json_decref(demo[i].peer);
        ns_ids_fini(&demo[i].ids);
        ns_image_fini(&demo[i].image);
        free(demo[i].content);
    }
}

static void
prompts_of_texts_and_pictures_have_the_ids_of_transformers(void **state)
{
    struct demo demo[MOST];
    uint32_t n, n_pictures = 0;
    struct ns_engine *engine = open_demo(NULL, demo, &n);

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        const json_t *want = json_object_get(demo[i].peer, "prompt_ids");

        n_pictures += demo[i].image.rgb != NULL;
        assert_int_equal(demo[i].ids.n, json_array_size(want));
        for (size_t t = 0; t < demo[i].ids.n; t++)
            assert_int_equal(demo[i].ids.id[t],
                             json_integer_value(json_array_get(want, t)));
    }
    assert_int_equal(n_pictures, 2);
    close_demo(engine, demo, n);
}

static void
greedy_answers_are_those_of_transformers_to_the_byte(void **state)
{
    struct demo demo[MOST];
    uint32_t n;
    struct ns_engine *engine = open_demo(NULL, demo, &n);

    (void)state;
    run(engine, demo, n, NS_MODE_AR);
    assert_int_equal(count_equal(demo, n, "ar"), n);
    run(engine, demo, n, NS_MODE_HYBRID);
    assert_int_equal(count_equal(demo, n, "ar"), n);
    close_demo(engine, demo, n);
}

/* Its draws are not those of transformers, so this is about quality. */
static void
most_denoised_answers_are_the_greedy_ones_in_far_fewer_passes(void **state)
{
    struct demo demo[MOST];
    uint32_t n;
    struct ns_engine *engine = open_demo(NULL, demo, &n);
    double rate = run(engine, demo, n, NS_MODE_DIFFUSION);

    (void)state;
    assert_in_range(count_equal(demo, n, "ar"), n / 2, n);
    assert_true(rate > 3.0);
    close_demo(engine, demo, n);
}

static void
avx2_and_avx512_denoise_to_the_same_bytes(void **state)
{
    struct demo a[MOST], b[MOST];
    struct ns_engine *engine;
    uint32_t n;

    (void)state;
    if (!__builtin_cpu_supports("avx512f"))
        return;
    engine = open_demo("avx2", a, &n);
    run(engine, a, n, NS_MODE_DIFFUSION);
    ns_engine_close(engine);
    engine = open_demo("avx512", b, &n);
    run(engine, b, n, NS_MODE_DIFFUSION);
    for (uint32_t i = 0; i < n; i++)
        assert_string_equal(a[i].content, b[i].content);
    close_demo(NULL, a, n);
    close_demo(engine, b, n);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            prompts_of_texts_and_pictures_have_the_ids_of_transformers),
        cmocka_unit_test(greedy_answers_are_those_of_transformers_to_the_byte),
        cmocka_unit_test(
            most_denoised_answers_are_the_greedy_ones_in_far_fewer_passes),
        cmocka_unit_test(avx2_and_avx512_denoise_to_the_same_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
