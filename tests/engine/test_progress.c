/* What an onlooker is told of running sequences, in every mode. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "engine/engine.h"
#include "tests/tiny.h"

enum { PROMPT = 600, CHUNK = 128, N_MODES = 3 };

static const enum ns_mode modes[N_MODES] = { NS_MODE_DIFFUSION, NS_MODE_AR,
                                             NS_MODE_HYBRID };

struct fixture {
    char *directory;
    struct ns_engine *engine;
    int32_t prompt[PROMPT];
};

static int
set_up(void **state)
{
    static struct fixture f;
    struct tiny_recipe recipe = tiny_recipe();
    struct ns_engine_options options = { .backend = { .n_threads = 1 },
                                         .pass_tokens = CHUNK,
                                         .no_prefix_sharing = true,
                                         .kv_bytes = 64 << 20 };
    struct ns_error err;

    f.directory = tiny_make(&recipe);
    tiny_add_tokenizer(f.directory);
    options.model_directory = f.directory;
    for (int i = 0; i < PROMPT; i++)
        f.prompt[i] = 130 + i * 37 % 300;
    *state = &f;
    return ns_engine_open(&options, &f.engine, &err) == NS_OK ? 0 : -1;
}

static int
tear_down(void **state)
{
    struct fixture *f = *state;

    ns_engine_close(f->engine);
    tiny_remove(f->directory);
    return 0;
}

static void
submit(struct fixture *f, uint64_t id, enum ns_mode mode)
{
    const struct ns_generation *g = &ns_engine_model(f->engine)->generation;
    struct ns_request request = {
        .id = id,
        .prompt = f->prompt,
        .n_prompt = PROMPT,
        .mode = mode,
        .seed = id + 5,
        .max_tokens = 100,
        .top_p = 1,
        .sampler = { g->t_min, g->t_max, g->entropy_bound,
                     g->max_denoising_steps, g->stability_threshold,
                     g->confidence_threshold },
    };
    struct ns_error err;

    if (ns_engine_submit(f->engine, &request, &err) != NS_OK)
        fail_msg("%s", err.text);
}

static uint32_t
bits(const struct ns_engine_progress *progress)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < NS_PROGRESS_CELLS; i++)
        n += progress->accepted[i / 8] >> i % 8 & 1;
    return n;
}

/* Never back: prompt, then answer, block after block, step after step. */
static void
check_step(const struct ns_engine_progress *before,
           const struct ns_engine_progress *now)
{
    assert_int_equal(now->n_prompt, PROMPT);
    assert_true(now->n_read <= PROMPT);
    assert_true(now->n_tokens <= now->max_tokens);
    assert_true(now->n_accepted <= now->canvas_length);
    assert_int_equal(bits(now), now->n_accepted);
    assert_true((now->stage == NS_STAGE_DENOISE) == (now->canvas_length > 0));
    assert_true((now->stage == NS_STAGE_PREFILL) == (now->n_read < PROMPT));
    assert_true(now->step <= now->max_steps);
    assert_true(now->n_read >= before->n_read);
    assert_true(now->n_tokens >= before->n_tokens);
    assert_true(now->block >= before->block);
    if (now->stage == NS_STAGE_DENOISE && before->stage == NS_STAGE_DENOISE &&
        now->n_tokens == before->n_tokens)
        assert_true(now->step >= before->step);
}

static void
each_mode_is_seen_to_read_and_to_write_and_never_goes_back(void **state)
{
    struct fixture *f = *state;
    struct ns_engine_progress before, now;
    struct ns_pass_report report;
    struct ns_event event;
    struct ns_error err;

    for (int i = 0; i < N_MODES; i++) {
        bool seen[NS_STAGE_AR + 1] = { false }, done = false;
        uint32_t most_accepted = 0;

        memset(&before, 0, sizeof(before));
        submit(f, (uint64_t)i + 1, modes[i]);
        assert_int_equal(ns_engine_progress(f->engine, &now, 1), 0);
        while (!done) {
            if (ns_engine_pass(f->engine, &report, &err) != NS_OK)
                fail_msg("%s", err.text);
            while (ns_engine_next_event(f->engine, &event))
                done = done || event.kind == NS_EVENT_DONE;
            if (ns_engine_progress(f->engine, &now, 1) == 0)
                continue;
            assert_int_equal(now.id, i + 1);
            assert_int_equal(now.mode, modes[i]);
            check_step(&before, &now);
            seen[now.stage] = true;
            if (now.n_accepted > most_accepted)
                most_accepted = now.n_accepted;
            before = now;
        }
        assert_true(seen[NS_STAGE_PREFILL]); /* more than a pass holds */
        assert_int_equal(seen[NS_STAGE_DENOISE], modes[i] != NS_MODE_AR);
        assert_true(seen[NS_STAGE_AR] || modes[i] != NS_MODE_AR);
        assert_true(most_accepted > 0 || modes[i] == NS_MODE_AR);
        assert_int_equal(ns_engine_progress(f->engine, &now, 1), 0);
    }
}

static void
no_more_are_told_of_than_there_is_room_for(void **state)
{
    struct fixture *f = *state;
    struct ns_engine_progress two[3];
    struct ns_pass_report report;
    struct ns_error err;

    memset(two, 0, sizeof(two));
    for (uint64_t id = 11; id < 14; id++)
        submit(f, id, NS_MODE_AR);
    while (ns_engine_load(f->engine).running < 3) {
        assert_int_equal(ns_engine_pass(f->engine, &report, &err), NS_OK);
        assert_true(report.n_rows > 0); /* until nothing is left to hope for */
    }
    assert_int_equal(ns_engine_progress(f->engine, two, 2), 2);
    assert_int_not_equal(two[0].id, two[1].id);
    assert_int_equal(two[2].id, 0);
    assert_int_equal(ns_engine_progress(f->engine, two, 0), 0);
    assert_int_equal(ns_engine_progress(f->engine, two, 3), 3);
    for (uint64_t id = 11; id < 14; id++)
        ns_engine_cancel(f->engine, id);
    assert_int_equal(ns_engine_progress(f->engine, two, 3), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            each_mode_is_seen_to_read_and_to_write_and_never_goes_back),
        cmocka_unit_test(no_more_are_told_of_than_there_is_room_for),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
