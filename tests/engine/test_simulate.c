/* Schedules that were not run: against the engine itself, and their promises
 * for jobs of any kind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/measure.h"
#include "engine/outlook.h"
#include "engine/rng.h"
#include "engine/simulate.h"
#include "tests/fault.h"
#include "tests/tiny.h"

enum { MOST = 300 };

static const struct ns_sim_policy ours = {
    .name = "ours", .ranked = true, .sharing = true, .expires = true,
    .sated = true, .riders = 32, .max_sequences = 64,
};

static struct ns_sim_machine
card(void)
{
    struct ns_sim_machine machine = {
        .rates = ns_cost_card("h100-80gb")->bf16,
        .pass_tokens = 8192,
        .age_step_ms = 600000,
    };

    ns_cost_shape_released(2, &machine.shape);
    machine.memory_bytes = ns_cost_card_pool(ns_cost_card("h100-80gb"),
                                             &machine.shape);
    return machine;
}

static struct ns_sim_job
plain_job(uint32_t prompt, uint32_t answer)
{
    return (struct ns_sim_job){ .mode = NS_MODE_DIFFUSION, .prompt = prompt,
                                .answer = answer, .canvas_length = 256,
                                .steps = 10, .kept = 100 };
}

static struct ns_sim_report
play(const struct ns_sim_machine *machine, const struct ns_sim_policy *policy,
     struct ns_sim_job *jobs, size_t n)
{
    struct ns_sim_report report;
    struct ns_error err;

    if (ns_simulate(machine, policy, jobs, n, &report, &err) != NS_OK)
        fail_msg("%s", err.text);
    return report;
}

/* ---- against the engine ------------------------------------------------- */

enum { N_REAL = 24, LONGEST = 200 };

struct real {
    struct ns_engine *engine;
    int32_t prompt[N_REAL][LONGEST];
    struct ns_sim_job job[N_REAL];
    uint32_t passes, canvas_steps, rows;
};

/* Runs jobs of one canvas each and notes what each of them took. */
static void
run_really(struct real *real, enum ns_mode mode)
{
    const struct ns_model *model = ns_engine_model(real->engine);
    struct ns_pass_report report;
    struct ns_event event;
    struct ns_error err;
    uint32_t left = N_REAL;

    real->passes = real->canvas_steps = real->rows = 0;
    for (uint32_t i = 0; i < N_REAL; i++) {
        struct ns_request request = {
            .id = i + 1,
            .prompt = real->prompt[i],
            .n_prompt = 8 + (uint32_t)(ns_mix(i) % (LONGEST - 8)),
            .mode = mode,
            .seed = i,
            .max_tokens = mode == NS_MODE_AR ? 12
                                             : model->config.canvas_length,
            .top_p = 1,
            .has_temperature = true,
            .temperature = 1,
            .sampler = { .4f, .8f, .1f, 12, 1, .005f },
        };

        for (uint32_t j = 0; j < request.n_prompt; j++)
            real->prompt[i][j] = 130 + ns_draw_token(ns_mix(i << 10 | j), 300);
        real->job[i] = (struct ns_sim_job){
            .mode = mode,
            .prompt = request.n_prompt,
            .canvas_length = model->config.canvas_length,
        };
        if (ns_engine_submit(real->engine, &request, &err) != NS_OK)
            fail_msg("%s", err.text);
    }
    while (left > 0) {
        if (ns_engine_pass(real->engine, &report, &err) != NS_OK)
            fail_msg("%s", err.text);
        assert_true(report.n_rows > 0);
        assert_true(report.plan_ns <= report.ns);
        real->passes++;
        real->canvas_steps += report.n_canvases;
        real->rows += report.n_rows;
        while (ns_engine_next_event(real->engine, &event)) {
            if (event.kind == NS_EVENT_BLOCK)
                continue;
            assert_int_equal(event.kind, NS_EVENT_DONE);
            real->job[event.id - 1].answer = event.usage.new_tokens;
            real->job[event.id - 1].steps =
                (float)event.usage.denoise_steps;
            left--;
        }
    }
}

static void
the_engine_does_what_was_simulated_pass_by_pass(void **state)
{
    static const enum ns_mode modes[] = { NS_MODE_DIFFUSION, NS_MODE_AR };
    struct tiny_recipe recipe = tiny_recipe();
    char *directory = tiny_make(&recipe);
    struct ns_engine_options options = {
        .model_directory = directory,
        .backend = { .n_threads = 1 },
        .pass_tokens = 160,
        .max_sequences = 8,
        .kv_bytes = 64 << 20,
        .no_prefix_sharing = true, /* each mode has the same prompts */
    };
    static struct real real;
    struct ns_error err;

    (void)state;
    tiny_add_tokenizer(directory);
    if (ns_engine_open(&options, &real.engine, &err) != NS_OK)
        fail_msg("%s", err.text);
    for (size_t m = 0; m < 2; m++) {
        const struct ns_outlook_options *outlook =
            ns_outlook_options(ns_engine_outlook(real.engine));
        struct ns_sim_policy policy = ours;
        struct ns_sim_machine machine = {
            .shape = outlook->shape,
            .rates = outlook->rates,
            .memory_bytes = 1e12,
            .pass_tokens = options.pass_tokens,
        };
        struct ns_sim_report report;

        policy.max_sequences = options.max_sequences;
        run_really(&real, modes[m]);
        report = play(&machine, &policy, real.job, N_REAL);
        assert_int_equal(report.done, N_REAL);
        assert_int_equal(report.canvas_steps, real.canvas_steps);
        /* Ties go by what is left of a prompt here, by when it came there. */
        assert_in_range(report.passes, real.passes * .93, real.passes * 1.07);
        assert_in_range(report.mean_rows * (double)report.passes,
                        real.rows * .98, real.rows * 1.02);
    }
    ns_engine_close(real.engine);
    tiny_remove(directory);
}

static void
the_engine_learns_what_its_passes_take(void **state)
{
    struct tiny_recipe recipe = tiny_recipe();
    char *directory = tiny_make(&recipe);
    struct ns_engine_options options = {
        .model_directory = directory,
        .backend = { .n_threads = 1 },
        .kv_bytes = 64 << 20,
    };
    struct ns_pass_report report;
    struct ns_cost_rates before, after;
    struct ns_engine *engine;
    struct ns_event event;
    struct ns_error err;

    (void)state;
    tiny_add_tokenizer(directory);
    if (ns_engine_open(&options, &engine, &err) != NS_OK)
        fail_msg("%s", err.text);
    before = ns_outlook_rates(ns_engine_outlook(engine));
    if (ns_measure(engine, 2000, &err) != NS_OK)
        fail_msg("%s", err.text);
    after = ns_outlook_rates(ns_engine_outlook(engine));
    assert_memory_not_equal(&before, &after, sizeof(before));
    /* Nothing is left behind: nothing to run, nothing that was learnt. */
    if (ns_engine_pass(engine, &report, &err) != NS_OK)
        fail_msg("%s", err.text);
    assert_int_equal(report.n_rows, 0);
    assert_false(ns_engine_next_event(engine, &event));
    for (int mode = NS_MODE_DIFFUSION; mode <= NS_MODE_HYBRID; mode++)
        assert_int_equal(ns_outlook_expect(ns_engine_outlook(engine),
                                           NS_CLASS_OTHER,
                                           (enum ns_mode)mode, 100, 32).n, 0);
    ns_engine_close(engine);
    tiny_remove(directory);
}

/* ---- promises ----------------------------------------------------------- */

static void
a_job_alone_takes_what_its_passes_cost(void **state)
{
    struct ns_sim_machine machine = card();
    struct ns_sim_job job = plain_job(1000, 300);
    struct ns_sim_report report = play(&machine, &ours, &job, 1);
    struct ns_cost_load first = { 0 }, next = { 0 }, commit = { 0 };
    double seconds;

    (void)state;
    /* Prompt and first step; 9 more; the block's commit with the next canvas's
     * first step; 9 more: the second block ends the answer uncommitted. */
    ns_cost_add(&machine.shape, &first, NS_SEGMENT_PREFILL, 1000, 0, 0, 0,
                false);
    ns_cost_add(&machine.shape, &first, NS_SEGMENT_CANVAS, 256, 1000, 256, 256,
                false);
    ns_cost_add(&machine.shape, &next, NS_SEGMENT_CANVAS, 256, 1000, 256, 256,
                true);
    ns_cost_add(&machine.shape, &commit, NS_SEGMENT_COMMIT, 256, 1000, 0, 0,
                false);
    ns_cost_add(&machine.shape, &commit, NS_SEGMENT_CANVAS, 256, 1256, 256,
                256, false);
    seconds = ns_cost_seconds(&machine.shape, &machine.rates, &first) +
              9 * ns_cost_seconds(&machine.shape, &machine.rates, &next) +
              ns_cost_seconds(&machine.shape, &machine.rates, &commit);
    memset(&next, 0, sizeof(next));
    ns_cost_add(&machine.shape, &next, NS_SEGMENT_CANVAS, 256, 1256, 256, 256,
                true);
    seconds += 9 * ns_cost_seconds(&machine.shape, &machine.rates, &next);
    assert_int_equal(report.passes, 20);
    assert_true(job.end_s > seconds * .999999 && job.end_s < seconds * 1.000001);
    assert_int_equal(report.answer_tokens, 300);
}

static void
draw_jobs(struct ns_sim_job *jobs, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t draw = ns_mix(seed * 1000 + i);

        jobs[i] = plain_job(16 + (uint32_t)(draw % 30000),
                            1 + (uint32_t)(draw >> 20) % 2000);
        jobs[i].mode = NS_MODE_DIFFUSION + draw % 3;
        jobs[i].steps = 1 + (float)(draw >> 8 & 31);
        jobs[i].kept = 1 + (float)(draw >> 13 & 127);
        jobs[i].arrival_s = (double)(draw >> 30 & 63);
        jobs[i].priority = (int32_t)(draw >> 40 & 3);
        if (draw >> 42 & 1) {
            jobs[i].group = 1 + (draw >> 43 & 7);
            jobs[i].shared = 512 * (uint32_t)jobs[i].group;
            jobs[i].prompt += jobs[i].shared;
        }
        if (draw >> 50 & 1)
            jobs[i].deadline_s = jobs[i].arrival_s + 1 +
                                 (double)(draw >> 51 & 63);
    }
}

static void
every_job_ends_once_and_memory_holds_under_every_policy(void **state)
{
    static const struct ns_sim_policy others[] = {
        { .name = "first come", .max_sequences = 64 },
        { .name = "cap 4", .sharing = true, .max_sequences = 4 },
        { .name = "static", .whole = true, .max_sequences = 8 },
        { .name = "ranked", .ranked = true, .sharing = true, .riders = 3,
          .max_sequences = 3 },
    };
    struct ns_sim_machine machine = card();
    struct ns_sim_job jobs[MOST];

    (void)state;
    machine.memory_bytes = 3e9; /* of 30,000 tokens: 0.8 GB */
    for (uint64_t round = 0; round < 40; round++) {
        const struct ns_sim_policy *policy =
            round % 5 == 0 ? &ours : &others[round % 5 - 1];
        uint32_t n = 1 + (uint32_t)(ns_mix(round) % MOST), missed = 0;
        struct ns_sim_report report;
        uint64_t tokens = 0;

        draw_jobs(jobs, n, round);
        report = play(&machine, policy, jobs, n);
        for (uint32_t i = 0; i < n; i++) {
            const struct ns_sim_job *job = &jobs[i];

            missed += job->missed;
            if (job->end_s == 0) {
                assert_true(policy->expires && job->missed);
                continue;
            }
            tokens += job->answer;
            assert_true(job->start_s >= job->arrival_s);
            assert_true(job->end_s > job->start_s);
            assert_true(job->end_s <= report.seconds + 64);
            assert_true(job->cached == 0 ||
                        (policy->sharing && job->cached <= job->shared));
            assert_int_equal(job->missed, job->deadline_s > 0 &&
                                              job->end_s > job->deadline_s);
        }
        assert_int_equal(report.missed, missed);
        assert_int_equal(report.refused, 0);
        assert_int_equal(report.answer_tokens, tokens);
        assert_true(report.peak_bytes <= machine.memory_bytes);
        assert_true(report.peak_sequences <= policy->max_sequences);
        assert_true(report.busy_s <= report.seconds * 1.000001);
    }
}

static void
what_never_fits_is_refused_and_the_rest_runs(void **state)
{
    struct ns_sim_machine machine = card();
    struct ns_sim_job jobs[3] = { plain_job(1000, 100),
                                  plain_job(200000, 100),
                                  plain_job(2000, 100) };
    struct ns_sim_report report;

    (void)state;
    machine.memory_bytes = 1e9;
    report = play(&machine, &ours, jobs, 3);
    assert_int_equal(report.refused, 1);
    assert_int_equal(report.done, 2);
    assert_true(jobs[1].end_s == 0 && !jobs[1].missed);
}

static void
a_shared_document_is_computed_once(void **state)
{
    struct ns_sim_machine machine = card();
    struct ns_sim_policy apart = ours;
    struct ns_sim_job jobs[32];
    struct ns_sim_report shared, separate;

    (void)state;
    for (int i = 0; i < 32; i++) {
        jobs[i] = plain_job(32768 + 50, 200);
        jobs[i].group = 7;
        jobs[i].shared = 32768;
    }
    shared = play(&machine, &ours, jobs, 32);
    assert_int_equal(shared.cached_tokens, 31 * 32768);
    apart.sharing = false;
    separate = play(&machine, &apart, jobs, 32);
    assert_int_equal(separate.cached_tokens, 0);
    assert_true(separate.seconds > 4 * shared.seconds);
}

static void
priority_goes_first_and_waiting_raises_it(void **state)
{
    struct ns_sim_machine machine = card();
    struct ns_sim_policy one = ours;
    struct ns_sim_job jobs[4];

    (void)state;
    one.max_sequences = 1;
    machine.age_step_ms = 1000;
    for (int i = 0; i < 4; i++)
        jobs[i] = plain_job(20000, 200);
    jobs[0].arrival_s = 0; /* runs first: it is alone */
    jobs[1].arrival_s = .01;
    jobs[2].arrival_s = .02;
    jobs[2].priority = 5;
    jobs[3].arrival_s = .03;
    jobs[3].priority = 1;
    play(&machine, &one, jobs, 4);
    assert_true(jobs[2].start_s < jobs[3].start_s);
    assert_true(jobs[3].start_s < jobs[1].start_s);
    /* Two seconds of waiting outweigh one of priority. */
    jobs[0].answer = 8000;
    jobs[2].arrival_s = 2.1;
    jobs[2].priority = 1;
    jobs[3].arrival_s = .5;
    jobs[3].priority = 0;
    play(&machine, &one, jobs, 4);
    assert_true(jobs[0].end_s > 2.1);
    assert_true(jobs[1].start_s < jobs[2].start_s);
}

static void
a_failed_allocation_is_said(void **state)
{
    struct ns_sim_machine machine = card();
    struct ns_sim_job jobs[20];
    struct ns_sim_report report;
    struct ns_error err;
    enum ns_status status;
    bool fired;

    (void)state;
    draw_jobs(jobs, 20, 1);
    for (int n = 0;; n++) {
        fault_arm(n);
        status = ns_simulate(&machine, &ours, jobs, 20, &report, &err);
        fired = fault_fired();
        if (!fired)
            break;
        assert_true(status == NS_FATAL || status == NS_OK);
    }
    assert_int_equal(status, NS_OK);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_engine_does_what_was_simulated_pass_by_pass),
        cmocka_unit_test(the_engine_learns_what_its_passes_take),
        cmocka_unit_test(a_job_alone_takes_what_its_passes_cost),
        cmocka_unit_test(
            every_job_ends_once_and_memory_holds_under_every_policy),
        cmocka_unit_test(what_never_fits_is_refused_and_the_rest_runs),
        cmocka_unit_test(a_shared_document_is_computed_once),
        cmocka_unit_test(priority_goes_first_and_waiting_raises_it),
        cmocka_unit_test(a_failed_allocation_is_said),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
