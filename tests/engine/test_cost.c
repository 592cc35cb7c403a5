/* The cost model against figures that were computed elsewhere, and against
 * sums by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "engine/cost.h"
#include "engine/outlook.h"
#include "engine/rng.h"

#define CLOSE(is, should, share) \
    assert_true(fabs((double)(is) / (should) - 1) < (share))

/* The physical limit of an H100: nothing lost anywhere. */
static struct ns_cost_rates
limit(double dense)
{
    return (struct ns_cost_rates){
        .flops = { dense, dense, 989e12, 989e12 },
        .bytes = 3.35e12,
    };
}

static double
denoise_ms(double weight_bytes, double dense, uint32_t batch, uint32_t prefix)
{
    struct ns_cost_rates rates = limit(dense);
    struct ns_cost_load load = { 0 };
    struct ns_cost_shape shape;

    ns_cost_shape_released(weight_bytes, &shape);
    for (uint32_t i = 0; i < batch; i++)
        ns_cost_add(&shape, &load, NS_SEGMENT_CANVAS, 256, prefix, 256, 256,
                    true);
    return 1e3 * ns_cost_seconds(&shape, &rates, &load);
}

static void
the_released_model_costs_what_the_roofline_says(void **state)
{
    struct ns_cost_shape shape;
    double backbone;

    (void)state;
    ns_cost_shape_released(2, &shape);
    backbone = shape.dense + shape.experts;
    CLOSE(backbone, 6.17e9, .01);
    CLOSE(shape.head, 1.48e9, .01);
    CLOSE(shape.full_pair, 0.164e6, .01);
    CLOSE(shape.sliding_pair * (1023 + 256), .52e9, .01);
    CLOSE(shape.full_bytes, 12800, .001);
    CLOSE(shape.weight_bytes, 50.5e9, .01); /* 51.7 with the vision tower */
    CLOSE(shape.weight_bytes / 3.35e12, 15.1e-3, .01);
    /* Denoise forwards of 16 canvases behind 8k. */
    CLOSE(denoise_ms(2, 989e12, 16, 8192), 54.0, .02);
    CLOSE(denoise_ms(1, 1979e12, 16, 8192), 40.5, .02);
}

/* Pairs counted one by one. */
static void
pairs_are_counted_as_each_row_sees_keys(void **state)
{
    struct ns_cost_shape shape = { .window = 16, .full_bytes = 3,
                                   .sliding_bytes = 5 };

    (void)state;
    for (uint32_t round = 0; round < 2000; round++) {
        uint64_t draw = ns_mix(round);
        uint32_t rows = 1 + (uint32_t)(draw % 40);
        uint32_t at = (uint32_t)(draw >> 32) % 40;
        bool canvas = draw >> 20 & 1;
        double full = 0, sliding = 0;
        struct ns_cost_load load = { 0 };

        for (uint32_t i = 0; i < rows; i++) {
            uint32_t sees = canvas ? at + rows : at + i + 1;
            uint32_t near = canvas ? (at < 16 ? at : 16) + rows
                                   : (sees < 16 ? sees : 16);

            full += sees;
            sliding += near;
        }
        ns_cost_add(&shape, &load,
                    canvas ? NS_SEGMENT_CANVAS : NS_SEGMENT_PREFILL, rows, at,
                    0, 0, false);
        assert_true(load.full_pairs == full);
        assert_true(load.sliding_pairs == sliding);
        assert_true(load.kv_bytes == 3.0 * at + 5.0 * (at < 16 ? at : 16));
        assert_true(load.writing_rows == (canvas ? 0 : rows));
    }
}

static void
draw_load(const struct ns_cost_shape *shape, uint64_t seed,
          struct ns_cost_load *load)
{
    uint32_t n = 1 + (uint32_t)(ns_mix(seed) % 12);

    memset(load, 0, sizeof(*load));
    for (uint32_t i = 0; i < n; i++) {
        uint64_t draw = ns_mix(seed * 100 + i);
        uint32_t at = (uint32_t)(draw >> 40) % 20000;

        switch (draw % 3) {
        case 0:
            ns_cost_add(shape, load, NS_SEGMENT_CANVAS, 256, at, 256, 256,
                        true);
            break;
        case 1:
            ns_cost_add(shape, load, NS_SEGMENT_PREFILL,
                        1 + (uint32_t)(draw >> 8) % 4000, at, 0, 0, false);
            break;
        default:
            ns_cost_add(shape, load, NS_SEGMENT_AR, 1, at, 1, 0, false);
        }
    }
}

static double
worst_miss(const struct ns_cost_shape *shape,
           const struct ns_cost_rates *truth,
           const struct ns_cost_rates *learnt)
{
    double worst = 0;

    for (uint64_t i = 0; i < 200; i++) {
        struct ns_cost_load load;
        double miss;

        draw_load(shape, 100000 + i, &load);
        miss = fabs(log(ns_cost_seconds(shape, learnt, &load) /
                        ns_cost_seconds(shape, truth, &load)));
        worst = miss > worst ? miss : worst;
    }
    return worst;
}

static void
rates_are_learnt_from_passes_alone(void **state)
{
    const struct ns_cost_rates truth = {
        .flops = { 700e12, 300e12, 500e12, 420e12 },
        .bytes = 2.6e12,
        .pass_s = 5e-4,
    };
    struct ns_cost_rates learnt = {
        .flops = { 200e12, 900e12, 100e12, 900e12 },
        .bytes = 1e12,
        .pass_s = 1e-4,
    };
    struct ns_cost_shape shape;

    (void)state;
    ns_cost_shape_released(2, &shape);
    assert_true(worst_miss(&shape, &truth, &learnt) > .5);
    for (uint64_t i = 0; i < 3000; i++) {
        struct ns_cost_load load;
        /* Passes vary by a tenth for no reason. */
        double noise = .9 + .2 * ns_draw_uniform(ns_mix(i * 7 + 1));

        draw_load(&shape, i, &load);
        ns_cost_learn(&shape, &learnt, &load,
                      noise * ns_cost_seconds(&shape, &truth, &load));
    }
    assert_true(worst_miss(&shape, &truth, &learnt) < .2);
}

static void
an_absurd_pass_spoils_nothing(void **state)
{
    const double times[] = { 0, -1, NAN, INFINITY, 1e30, 1e-30 };
    struct ns_cost_rates rates = limit(989e12);
    struct ns_cost_shape shape;
    struct ns_cost_load load;
    double before;

    (void)state;
    ns_cost_shape_released(2, &shape);
    draw_load(&shape, 3, &load);
    before = ns_cost_seconds(&shape, &rates, &load);
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
        struct ns_cost_rates after = rates;
        double now;

        ns_cost_learn(&shape, &after, &load, times[i]);
        now = ns_cost_seconds(&shape, &after, &load);
        assert_true(now > before / 2 && now < before * 2);
    }
}

static void
cards_are_known_by_name_and_hold_their_model(void **state)
{
    struct ns_cost_shape bf16, fp8;

    (void)state;
    ns_cost_shape_released(2, &bf16);
    ns_cost_shape_released(1, &fp8);
    assert_null(ns_cost_card("h100"));
    assert_null(ns_cost_card_at(100));
    for (uint32_t i = 0; ns_cost_card_at(i); i++) {
        const struct ns_cost_card *card = ns_cost_card_at(i);

        assert_ptr_equal(ns_cost_card(card->name), card);
        assert_true(ns_cost_card_pool(card, &bf16) > 0);
        assert_true(ns_cost_card_pool(card, &fp8) >
                    ns_cost_card_pool(card, &bf16));
    }
}

static struct ns_outlook *
make_outlook(bool ar_capable)
{
    struct ns_outlook_options options = {
        .rates = ns_cost_card("h100-80gb")->bf16,
        .pass_tokens = 8192,
        .max_sequences = 256,
        .memory_bytes = 20e9,
        .max_steps = 48,
        .ar_capable = ar_capable,
    };
    struct ns_outlook *outlook;
    struct ns_error err;

    ns_cost_shape_released(2, &options.shape);
    assert_int_equal(ns_outlook_create(&options, &outlook, &err), NS_OK);
    return outlook;
}

static void
what_jobs_take_is_learnt_class_by_class(void **state)
{
    struct ns_outlook *outlook = make_outlook(true);
    struct ns_expectation expect;

    (void)state;
    expect = ns_outlook_expect(outlook, NS_CLASS_CODE, NS_MODE_DIFFUSION,
                               100, 256);
    assert_int_equal(expect.n, 0);
    assert_true(expect.steps == 16 && expect.answer == 100);
    for (int i = 0; i < 40; i++) {
        struct ns_yield code = { 600, 3, 30 }, other = { 100, 1, 20 };

        ns_outlook_learn_job(outlook, NS_CLASS_CODE, NS_MODE_DIFFUSION,
                             &code);
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, NS_MODE_DIFFUSION,
                             &other);
    }
    expect = ns_outlook_expect(outlook, NS_CLASS_CODE, NS_MODE_DIFFUSION,
                               8192, 256);
    CLOSE(expect.answer, 600, 1e-9);
    CLOSE(expect.steps, 10, 1e-9);
    CLOSE(expect.canvases, 3, 1e-9);
    /* Of a class that has shown nothing: what all have. */
    expect = ns_outlook_expect(outlook, NS_CLASS_SUMMARY, NS_MODE_DIFFUSION,
                               8192, 256);
    CLOSE(expect.answer, 350, .1);
    ns_outlook_forget_jobs(outlook);
    expect = ns_outlook_expect(outlook, NS_CLASS_CODE, NS_MODE_DIFFUSION,
                               8192, 256);
    assert_int_equal(expect.n, 0);
    ns_outlook_destroy(outlook);
}

static void
the_faster_mode_is_chosen_by_a_clear_margin_only(void **state)
{
    struct ns_outlook *outlook = make_outlook(true);
    struct ns_outlook *diffusion_only = make_outlook(false);
    struct ns_yield slow = { 250, 1, 48 }, quick = { 250, 1, 6 };
    double gain;

    (void)state;
    /* Six steps for 256 tokens: nothing is faster. */
    for (int i = 0; i < 100; i++) {
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, NS_MODE_DIFFUSION,
                             &quick);
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, NS_MODE_HYBRID, &quick);
    }
    assert_int_equal(ns_outlook_mode(outlook, NS_CLASS_OTHER,
                                     NS_MODE_DIFFUSION, 1000, 1000, 256,
                                     &gain), NS_MODE_DIFFUSION);
    assert_true(gain == 1);
    /* Nor is what was to be verified left unverified. */
    assert_int_equal(ns_outlook_mode(outlook, NS_CLASS_OTHER, NS_MODE_HYBRID,
                                     1000, 1000, 256, &gain), NS_MODE_HYBRID);
    /* 48 steps for short prompts: token by token is. */
    for (int i = 0; i < 500; i++) {
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, NS_MODE_DIFFUSION,
                             &slow);
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, NS_MODE_HYBRID, &slow);
        ns_outlook_learn_job(diffusion_only, NS_CLASS_OTHER,
                             NS_MODE_DIFFUSION, &slow);
    }
    assert_int_equal(ns_outlook_mode(outlook, NS_CLASS_OTHER,
                                     NS_MODE_DIFFUSION, 100, 1000, 256,
                                     &gain), NS_MODE_AR);
    assert_true(gain > 1.15);
    assert_int_equal(ns_outlook_mode(diffusion_only, NS_CLASS_OTHER,
                                     NS_MODE_DIFFUSION, 100, 1000, 256,
                                     NULL), NS_MODE_DIFFUSION);
    ns_outlook_destroy(outlook);
    ns_outlook_destroy(diffusion_only);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_released_model_costs_what_the_roofline_says),
        cmocka_unit_test(pairs_are_counted_as_each_row_sees_keys),
        cmocka_unit_test(rates_are_learnt_from_passes_alone),
        cmocka_unit_test(an_absurd_pass_spoils_nothing),
        cmocka_unit_test(cards_are_known_by_name_and_hold_their_model),
        cmocka_unit_test(what_jobs_take_is_learnt_class_by_class),
        cmocka_unit_test(the_faster_mode_is_chosen_by_a_clear_margin_only),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
