/* The shipped model against transformers: examples/demo-transformers.jsonl
 * holds the prompt ids that the chat template gives for each demo job, and
 * transformers' own greedy answer. training/vectors.py makes it again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/prompt.h"

enum { MOST = 64 };

struct demo {
    json_t *job, *peer;
    struct ns_ids ids;
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

static void
encode(struct demo *demo, const struct ns_tokenizer *tokenizer)
{
    const struct ns_prompt_options options = { .generation_prompt = true };
    struct ns_prompt prompt;
    struct ns_error err;
    const json_t *messages = json_object_get(
        json_object_get(demo->job, "body"), "messages");

    demo->ids = (struct ns_ids){ .limit = 4096 };
    assert_int_equal(ns_prompt_render(messages, NULL, &options, 1 << 20,
                                      &prompt, &err), NS_OK);
    assert_int_equal(ns_prompt_encode(&prompt, tokenizer, NULL, NULL,
                                      &demo->ids, &err), NS_OK);
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

static void
the_shipped_model_writes_what_transformers_makes_it_write(void **state)
{
    struct ns_engine_options options = {
        .model_directory = "models/demo",
        .kv_bytes = 64 << 20,
    };
    struct ns_engine *engine = NULL;
    struct demo demo[MOST];
    uint32_t n = load(demo);
    struct ns_error err;
    double rate;

    (void)state;
    if (ns_engine_open(&options, &engine, &err) != NS_OK)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < n; i++) {
        const json_t *want = json_object_get(demo[i].peer, "prompt_ids");

        encode(&demo[i], ns_engine_tokenizer(engine));
        assert_int_equal(demo[i].ids.n, json_array_size(want));
        for (size_t t = 0; t < demo[i].ids.n; t++)
            assert_int_equal(demo[i].ids.id[t],
                             json_integer_value(json_array_get(want, t)));
    }
    /* Greedy: the same bytes, on every instruction set. */
    run(engine, demo, n, NS_MODE_AR);
    assert_int_equal(count_equal(demo, n, "ar"), n);
    run(engine, demo, n, NS_MODE_HYBRID);
    assert_int_equal(count_equal(demo, n, "ar"), n);
    /* Diffusion draws its own samples: quality, not bytes. */
    rate = run(engine, demo, n, NS_MODE_DIFFUSION);
    assert_in_range(count_equal(demo, n, "ar"), n / 2, n);
    assert_true(rate > 2.0);
    ns_engine_close(engine);
    for (uint32_t i = 0; i < n; i++) {
        json_decref(demo[i].job);
        json_decref(demo[i].peer);
        ns_ids_fini(&demo[i].ids);
        free(demo[i].content);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            the_shipped_model_writes_what_transformers_makes_it_write),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
