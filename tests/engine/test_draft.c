/* A text to start from saves steps and changes no verified answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/draft.h"
#include "engine/engine.h"
#include "engine/rng.h"
#include "tests/tiny.h"

enum { N = 16, LONGEST = 160, PROMPT = 40 };

/* ---- the place in the text ----------------------------------------------- */

static void
the_place_is_found_again_behind_insertions_and_deletions(void **state)
{
    const int32_t draft[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 };
    const int32_t plain[] = { 1, 2, 3 };
    const int32_t inserted[] = { 1, 2, 90, 91, 3, 4 };
    const int32_t deleted[] = { 1, 2, 6, 7 };
    const int32_t elsewhere[] = { 50, 51, 52, 53, 54, 55, 56, 57, 58 };
    const int32_t twice[] = { 1, 2, 1, 2, 1, 2, 1, 2 };

    const int32_t replaced[] = { 1, 2, 3, 70, 71 };

    (void)state;
    assert_int_equal(ns_draft_place(draft, 10, plain, 0, -1), 0);
    assert_int_equal(ns_draft_place(draft, 10, plain, 3, -1), 3);
    assert_int_equal(ns_draft_place(draft, 10, inserted, 6, -1), 4);
    assert_int_equal(ns_draft_place(draft, 10, deleted, 4, -1), 7);
    assert_int_equal(ns_draft_place(draft, 10, draft, 10, -1), 10);
    /* What stands nowhere has replaced as much, or what `next` says. */
    assert_int_equal(ns_draft_place(draft, 10, replaced, 5, -1), 5);
    assert_int_equal(ns_draft_place(draft, 10, replaced, 5, 6), 5);
    assert_int_equal(ns_draft_place(draft, 10, replaced, 5, 8), 7);
    assert_int_equal(ns_draft_place(draft, 10, replaced, 5, 5), 4);
    assert_int_equal(ns_draft_place(draft, 10, replaced, 5, 99), 10);
    /* Too much of it: the text has been left. */
    assert_int_equal(ns_draft_place(draft, 10, elsewhere, 9, -1), 10);
    /* One token alone is a match only where it is expected. */
    assert_int_equal(ns_draft_place(draft, 10, (int32_t[]){ 60, 2 }, 2, -1),
                     2);
    /* Of equals the nearest to where the answer is. */
    assert_int_equal(ns_draft_place(twice, 8, (int32_t[]){ 9, 9, 1, 2 }, 4,
                                    -1), 4);
    assert_int_equal(ns_draft_place(NULL, 0, plain, 3, -1), 0);
    assert_int_equal(ns_draft_place(NULL, 0, plain, 3, 5), 0);
}

/* ---- in the engine ------------------------------------------------------- */

struct job {
    struct ns_request request;
    int32_t prompt[PROMPT], draft[2 * LONGEST];
    int32_t answer[LONGEST + 1];
    uint32_t n_answer;
    struct ns_usage usage;
};

struct fixture {
    char *directory;
    struct ns_engine *engine;
};

static int
set_up(void **state)
{
    static struct fixture f;
    struct tiny_recipe recipe = tiny_recipe();
    struct ns_engine_options options = { .backend = { .n_threads = 1 },
                                         .kv_bytes = 64 << 20 };
    struct ns_error err;

    f.directory = tiny_make(&recipe);
    tiny_add_tokenizer(f.directory);
    options.model_directory = f.directory;
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
make_job(struct job *job, struct ns_engine *engine, uint32_t i,
         enum ns_mode mode, float temperature)
{
    const struct ns_generation *g = &ns_engine_model(engine)->generation;

    memset(job, 0, sizeof(*job));
    for (uint32_t j = 0; j < PROMPT; j++)
        job->prompt[j] = 130 + ns_draw_token(ns_mix(i * 1000 + j), 300);
    job->request = (struct ns_request){
        .id = i,
        .prompt = job->prompt,
        .n_prompt = PROMPT,
        .mode = mode,
        .seed = i + 5,
        .max_tokens = 40 + i * 7,
        .top_p = 1,
        .has_temperature = temperature >= 0,
        .temperature = temperature,
        .sampler = { g->t_min, g->t_max, g->entropy_bound,
                     g->max_denoising_steps, g->stability_threshold,
                     g->confidence_threshold },
    };
}

static void
run(struct ns_engine *engine, struct job *jobs, uint32_t n)
{
    struct ns_pass_report report;
    struct ns_event event;
    struct ns_error err;
    uint32_t left = n;

    for (uint32_t i = 0; i < n; i++)
        if (ns_engine_submit(engine, &jobs[i].request, &err) != NS_OK)
            fail_msg("%s", err.text);
    while (left > 0) {
        if (ns_engine_pass(engine, &report, &err) != NS_OK)
            fail_msg("%s", err.text);
        assert_true(report.n_rows > 0);
        while (ns_engine_next_event(engine, &event)) {
            if (event.kind == NS_EVENT_BLOCK)
                continue;
            assert_int_equal(event.kind, NS_EVENT_DONE);
            for (uint32_t i = 0; i < n; i++) {
                if (jobs[i].request.id != event.id)
                    continue;
                jobs[i].n_answer = event.n_tokens;
                memcpy(jobs[i].answer, event.tokens,
                       event.n_tokens * sizeof(int32_t));
                jobs[i].usage = event.usage;
                left--;
            }
        }
    }
}

/* `kind` 0: the answer itself; 1: some tokens replaced; 2: some left out; 3:
 * some put in; 4: something else. */
static void
give_draft(struct job *job, const struct job *from, int kind)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < from->n_answer; i++) {
        bool hit = ns_mix(i * 17 + from->request.id) % 12 == 0;

        if (kind == 2 && hit)
            continue;
        if (kind == 3 && hit)
            job->draft[n++] = 200;
        job->draft[n++] = kind == 4 || (kind == 1 && hit)
                              ? (int32_t)(130 + ns_mix(i) % 300)
                              : from->answer[i];
    }
    job->request.draft = job->draft;
    job->request.n_draft = n;
}

static void
hybrid_equals_ar_whatever_it_starts_from(void **state)
{
    static const float temperature[] = { -1, 0, 1 };
    struct fixture *f = *state;
    static struct job ar[N], hybrid[N], bare[N];

    for (int t = 0; t < 3; t++) {
        for (uint32_t i = 0; i < N; i++) {
            make_job(&ar[i], f->engine, i, NS_MODE_AR, temperature[t]);
            make_job(&bare[i], f->engine, i, NS_MODE_HYBRID, temperature[t]);
        }
        run(f->engine, ar, N);
        run(f->engine, bare, N);
        for (int kind = 0; kind < 5; kind++) {
            uint32_t passes = 0, passes_bare = 0;

            for (uint32_t i = 0; i < N; i++) {
                make_job(&hybrid[i], f->engine, i, NS_MODE_HYBRID,
                         temperature[t]);
                give_draft(&hybrid[i], &ar[i], kind);
            }
            run(f->engine, hybrid, N);
            for (uint32_t i = 0; i < N; i++) {
                assert_int_equal(hybrid[i].n_answer, ar[i].n_answer);
                assert_memory_equal(hybrid[i].answer, ar[i].answer,
                                    ar[i].n_answer * sizeof(int32_t));
                passes += hybrid[i].usage.passes;
                passes_bare += bare[i].usage.passes;
                /* Its own answer is judged and never denoised, but for what
                 * an end token leaves behind. */
                if (kind == 0 && ar[i].n_answer == ar[i].request.max_tokens)
                    assert_int_equal(hybrid[i].usage.denoise_steps, 0);
            }
            /* Edits cost a few passes each, another text next to nothing. */
            if (kind == 0)
                assert_true(passes * 10 < passes_bare);
            else
                assert_true(passes < passes_bare + (kind == 4 ? 4 * N : 0));
        }
    }
}

static void
a_canvas_that_starts_from_its_own_answer_takes_fewer_steps(void **state)
{
    struct fixture *f = *state;
    static struct job first[N], again[N];
    uint32_t steps = 0, steps_again = 0;

    for (uint32_t i = 0; i < N; i++)
        make_job(&first[i], f->engine, i, NS_MODE_DIFFUSION, 0);
    run(f->engine, first, N);
    for (uint32_t i = 0; i < N; i++) {
        make_job(&again[i], f->engine, i, NS_MODE_DIFFUSION, 0);
        give_draft(&again[i], &first[i], 0);
    }
    run(f->engine, again, N);
    for (uint32_t i = 0; i < N; i++) {
        steps += first[i].usage.denoise_steps;
        steps_again += again[i].usage.denoise_steps;
    }
    assert_true(steps_again * 4 < steps * 3);
}

static void
a_resumed_job_finds_the_same_place(void **state)
{
    struct fixture *f = *state;
    static struct job whole[N], resumed[N];

    for (uint32_t i = 0; i < N; i++) {
        make_job(&whole[i], f->engine, i, NS_MODE_DIFFUSION, -1);
        whole[i].request.max_tokens = LONGEST;
    }
    run(f->engine, whole, N);
    for (uint32_t i = 0; i < N; i++) { /* of another's answer, edited */
        memset(&resumed[i], 0, sizeof(resumed[i]));
        resumed[i] = whole[i];
        give_draft(&whole[i], &resumed[(i + 1) % N], (int)i % 4);
    }
    run(f->engine, whole, N);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t length =
            ns_engine_model(f->engine)->config.canvas_length;

        resumed[i] = whole[i];
        resumed[i].request.prompt = resumed[i].prompt;
        resumed[i].request.draft = resumed[i].draft;
        if (whole[i].n_answer > length) {
            resumed[i].request.resume = whole[i].answer;
            resumed[i].request.n_resume = length;
            resumed[i].request.resume_blocks = 1;
        }
    }
    run(f->engine, resumed, N);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(resumed[i].n_answer, whole[i].n_answer);
        assert_memory_equal(resumed[i].answer, whole[i].answer,
                            whole[i].n_answer * sizeof(int32_t));
    }
}

static void
what_cannot_start_from_a_text_is_refused(void **state)
{
    struct fixture *f = *state;
    static struct job job;
    struct ns_error err;

    make_job(&job, f->engine, 0, NS_MODE_AR, -1);
    job.request.draft = job.prompt;
    job.request.n_draft = 4;
    assert_int_equal(ns_engine_submit(f->engine, &job.request, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "unsupported");
    assert_string_equal(err.param, "nightshift.draft");
    job.request.mode = NS_MODE_HYBRID;
    job.draft[0] = 100000;
    job.request.draft = job.draft;
    assert_int_equal(ns_engine_submit(f->engine, &job.request, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "bad_param");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            the_place_is_found_again_behind_insertions_and_deletions),
        cmocka_unit_test(hybrid_equals_ar_whatever_it_starts_from),
        cmocka_unit_test(
            a_canvas_that_starts_from_its_own_answer_takes_fewer_steps),
        cmocka_unit_test(a_resumed_job_finds_the_same_place),
        cmocka_unit_test(what_cannot_start_from_a_text_is_refused),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
