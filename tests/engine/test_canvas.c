/* Sampler rules, canvases, verdicts: properties beyond the vectors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/canvas.h"
#include "engine/rng.h"
#include "engine/sampler.h"
#include "engine/verify.h"
#include "tests/fault.h"

static uint64_t n_draws;

static double
uniform(void)
{
    return ns_draw_uniform(ns_draw(9, 0, 0, NS_DRAW_CANVAS, n_draws++));
}

static void
acceptance_takes_the_lowest_entropies_within_the_bound(void **state)
{
    float entropy[64];
    uint8_t accepted[64];
    uint32_t order[64];

    (void)state;
    for (int round = 0; round < 3000; round++) {
        uint32_t n = 1 + (uint32_t)(uniform() * 64), got, count = 0;
        float bound = (float)(uniform() * 2);
        float largest_in = -1, smallest_out = INFINITY;
        double sum = 0;

        for (uint32_t i = 0; i < n; i++)
            entropy[i] = uniform() < 0.2 ? 0.25f
                                         : (float)pow(uniform(), 4);
        got = ns_sampler_accept(entropy, n, bound, accepted, order);
        assert_in_range(got, 1, n);
        for (uint32_t i = 0; i < n; i++) {
            count += accepted[i];
            if (accepted[i]) {
                sum += (double)entropy[i];
                largest_in = fmaxf(largest_in, entropy[i]);
            } else {
                smallest_out = fminf(smallest_out, entropy[i]);
            }
        }
        assert_int_equal(count, got);
        assert_true(largest_in <= smallest_out);
        /* All but the largest stay within; one more would not. */
        assert_true(sum - (double)largest_in <= (double)bound + 1e-5);
        if (got < n)
            assert_true(sum > (double)bound - 1e-5);
        /* Among equals the lowest position goes first. */
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < i; j++)
                if (entropy[i] == entropy[j])
                    assert_true(accepted[j] >= accepted[i]);
    }
}

static void
entropies_that_are_no_numbers_are_never_accepted_before_others(void **state)
{
    const float entropy[] = { NAN, 0.01f, NAN, 0.02f };
    uint8_t accepted[4];
    uint32_t order[4];

    (void)state;
    assert_int_equal(ns_sampler_accept(entropy, 4, 10, accepted, order), 2);
    assert_true(accepted[1] && accepted[3] && !accepted[0] && !accepted[2]);
}

static void
temperature_falls_from_t_max_and_never_reaches_t_min(void **state)
{
    float before = INFINITY;

    (void)state;
    assert_true(ns_sampler_temperature(0.4f, 0.8f, 48, 48) == 0.8f);
    for (uint32_t n = 48; n >= 1; n--) {
        float t = ns_sampler_temperature(0.4f, 0.8f, n, 48);

        assert_true(t < before && t > 0.4f);
        before = t;
    }
}

static void
draws_are_uniform_and_keyed_by_everything(void **state)
{
    uint32_t count[16] = { 0 };
    double chi = 0;

    (void)state;
    for (uint32_t i = 0; i < 160000; i++)
        count[ns_draw_token(ns_draw(1, 2, 3, NS_DRAW_RENOISE, i), 16)]++;
    for (int i = 0; i < 16; i++)
        chi += pow((double)count[i] - 10000, 2) / 10000;
    assert_true(chi < 37.7); /* 15 degrees of freedom, p = 0.001 */
    assert_true(ns_draw(1, 2, 3, NS_DRAW_AR, 4) !=
                ns_draw(2, 2, 3, NS_DRAW_AR, 4));
    assert_true(ns_draw(1, 2, 3, NS_DRAW_AR, 4) !=
                ns_draw(1, 3, 3, NS_DRAW_AR, 4));
    assert_true(ns_draw(1, 2, 3, NS_DRAW_AR, 4) !=
                ns_draw(1, 2, 4, NS_DRAW_AR, 4));
    assert_true(ns_draw(1, 2, 3, NS_DRAW_AR, 4) !=
                ns_draw(1, 2, 3, NS_DRAW_SAMPLE, 4));
    assert_true(ns_draw(1, 2, 3, NS_DRAW_AR, 4) !=
                ns_draw(1, 2, 3, NS_DRAW_AR, 5));
    for (uint32_t i = 0; i < 1000; i++) {
        double u = ns_draw_uniform(ns_draw(1, 2, 3, NS_DRAW_AR, i));

        assert_true(u >= 0 && u < 1);
    }
}

static const struct ns_denoise_options options = {
    .t_min = 0.4f, .t_max = 0.8f, .entropy_bound = 0.1f,
    .confidence_threshold = 0.005f, .max_steps = 10,
    .stability_threshold = 1, .seed = 4, .vocab = 100,
};

static void
a_canvas_ends_by_its_steps_when_it_never_settles(void **state)
{
    struct ns_canvas canvas;
    struct ns_error err = { .status = NS_OK };
    int32_t argmax[32], sampled[32];
    float entropy[32];
    uint32_t steps = 0;
    bool done = false;

    (void)state;
    assert_int_equal(ns_canvas_init(&canvas, 32, &err), NS_OK);
    ns_canvas_start(&canvas, &options, 32, 7, NULL, 0);
    while (!done) {
        ns_canvas_prepare(&canvas, &options);
        for (int i = 0; i < 32; i++) {
            argmax[i] = (int32_t)(steps + (uint32_t)i) % 100;
            sampled[i] = 50;
            entropy[i] = 1.0f;
        }
        done = ns_canvas_step(&canvas, &options, argmax, sampled, entropy,
                              &err);
        steps++;
        assert_int_equal(canvas.n_accepted, 1); /* the lowest position */
        assert_int_equal(canvas.token[0], 50);
        for (int i = 1; i < 32; i++) /* new noise, keyed */
            assert_int_equal(canvas.token[i],
                             ns_draw_token(ns_draw(4, 7, 11 - steps,
                                                   NS_DRAW_RENOISE,
                                                   (uint64_t)i), 100));
    }
    assert_int_equal(steps, 10);
    assert_int_equal(err.status, NS_OK);
    assert_memory_equal(canvas.argmax, argmax, sizeof(argmax));
    ns_canvas_fini(&canvas);
}

static void
given_tokens_start_a_canvas_and_noise_fills_the_rest(void **state)
{
    const int32_t given[] = { 3, 1, 4 };
    struct ns_canvas canvas;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_canvas_init(&canvas, 8, &err), NS_OK);
    ns_canvas_start(&canvas, &options, 8, 2, given, 3);
    assert_memory_equal(canvas.token, given, sizeof(given));
    for (uint32_t i = 3; i < 8; i++)
        assert_int_equal(canvas.token[i],
                         ns_draw_token(ns_draw(4, 2, 0, NS_DRAW_CANVAS, i),
                                       100));
    ns_canvas_fini(&canvas);
}

static void
a_verdict_keeps_the_longest_prefix_and_names_the_next(void **state)
{
    const int32_t draft[] = { 5, 6, 7, 8 };
    const int32_t agree[] = { 6, 7, 8, 9 }, differ[] = { 6, 1, 8, 9 };
    struct ns_verdict v;

    (void)state;
    v = ns_verify(draft, 4, 5, agree);
    assert_int_equal(v.n_kept, 4);
    assert_int_equal(v.next, 9); /* one token more */
    v = ns_verify(draft, 4, 5, differ);
    assert_int_equal(v.n_kept, 2);
    assert_int_equal(v.next, 1);
    v = ns_verify(draft, 4, 4, agree);
    assert_int_equal(v.n_kept, 0);
    assert_int_equal(v.next, 4);
}

static void
every_failed_allocation_of_a_canvas_is_clean(void **state)
{
    (void)state;
    for (int n = 0;; n++) {
        struct ns_canvas canvas;
        struct ns_error err;
        enum ns_status status;
        bool fired;

        fault_arm(n);
        status = ns_canvas_init(&canvas, 16, &err);
        fired = fault_fired();
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
        ns_canvas_fini(&canvas);
        if (!fired)
            break;
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(acceptance_takes_the_lowest_entropies_within_the_bound),
        cmocka_unit_test(entropies_that_are_no_numbers_are_never_accepted_before_others),
        cmocka_unit_test(temperature_falls_from_t_max_and_never_reaches_t_min),
        cmocka_unit_test(draws_are_uniform_and_keyed_by_everything),
        cmocka_unit_test(a_canvas_ends_by_its_steps_when_it_never_settles),
        cmocka_unit_test(given_tokens_start_a_canvas_and_noise_fills_the_rest),
        cmocka_unit_test(a_verdict_keeps_the_longest_prefix_and_names_the_next),
        cmocka_unit_test(every_failed_allocation_of_a_canvas_is_clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
