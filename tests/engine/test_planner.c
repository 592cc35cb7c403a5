/* The planner is pure: its promises hold for any wants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

#include "engine/planner.h"
#include "engine/rng.h"

static uint64_t n_draws;

static uint32_t
pick(uint32_t below)
{
    return (uint32_t)ns_draw_token(
        ns_draw(5, 0, 0, NS_DRAW_CANVAS, n_draws++), below);
}

enum { MOST = 40 };

enum { PICTURES = 3 };

static struct ns_whole whole[MOST][PICTURES];

/* Pictures of a prompt of which `at` tokens are done, of up to 300 tokens. */
static uint32_t
make_pictures(struct ns_whole *pictures, uint32_t at, uint32_t end)
{
    uint32_t n = 0, next = pick(2) ? at : at + pick(400);

    while (n < PICTURES) {
        pictures[n].first = next;
        pictures[n].end = next + 1 + pick(300);
        if (pictures[n].end > end)
            break;
        next = pictures[n++].end + 1 + pick(200);
    }
    return n;
}

static uint32_t
make_wants(struct ns_want *want)
{
    uint32_t n = pick(MOST + 1);

    for (uint32_t i = 0; i < n; i++) {
        want[i].prefill = pick(3) == 0;
        want[i].n_encode = want[i].prefill ? 1 + pick(3000)
                           : pick(3) == 0  ? 1 + pick(256)
                                           : pick(2);
        want[i].n_canvas = pick(2) ? 16 * (1 + pick(16)) : 0;
        want[i].at = pick(1000);
        want[i].whole = whole[i];
        want[i].n_whole = want[i].prefill
                              ? make_pictures(whole[i], want[i].at,
                                              want[i].at + want[i].n_encode)
                              : 0;
    }
    return n;
}

static void
a_pass_never_exceeds_its_budget_or_its_segments(void **state)
{
    struct ns_want want[MOST];
    struct ns_grant grant[MOST];

    (void)state;
    for (int round = 0; round < 20000; round++) {
        uint32_t n = make_wants(want), budget = 1 + pick(2000);
        uint32_t most_segments = 1 + pick(2 * MOST);
        uint32_t used = ns_planner_fill(want, n, budget, most_segments,
                                        grant);
        uint32_t rows = 0, segments = 0, largest = 0;

        for (uint32_t i = 0; i < n; i++) {
            assert_true(grant[i].n_encode <= want[i].n_encode);
            if (!want[i].prefill)
                assert_true(grant[i].n_encode == 0 ||
                            grant[i].n_encode == want[i].n_encode);
            if (grant[i].canvas) {
                assert_true(want[i].n_canvas > 0);
                /* A canvas looks at a prefix that is all there. */
                assert_int_equal(grant[i].n_encode, want[i].n_encode);
                rows += want[i].n_canvas;
                segments++;
                largest = want[i].n_canvas > largest ? want[i].n_canvas
                                                     : largest;
            }
            rows += grant[i].n_encode;
            segments += grant[i].n_encode > 0;
            largest = grant[i].n_encode > largest ? grant[i].n_encode
                                                  : largest;
        }
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < want[i].n_whole; j++) {
                uint32_t end = want[i].at + grant[i].n_encode;

                assert_false(whole[i][j].first < end &&
                             end < whole[i][j].end);
            }
        assert_int_equal(rows, used);
        assert_true(segments <= most_segments);
        if (segments > 1)
            assert_true(rows <= budget || largest > budget);
        /* Prefill never goes over: only a whole segment that is alone may. */
        if (rows > budget)
            assert_int_equal(segments, 1);
    }
}

static void
something_is_granted_whenever_something_is_wanted(void **state)
{
    struct ns_want want[MOST];
    struct ns_grant grant[MOST];

    (void)state;
    for (int round = 0; round < 5000; round++) {
        uint32_t n = make_wants(want), wanted = 0;

        for (uint32_t i = 0; i < n; i++)
            wanted += want[i].n_encode + want[i].n_canvas;
        assert_int_equal(ns_planner_fill(want, n, 1 + pick(100), 2 * MOST,
                                         grant) > 0, wanted > 0);
    }
}

static void
commits_go_before_canvases_and_canvases_before_prefill(void **state)
{
    const struct ns_want want[] = {
        { .n_encode = 1000, .prefill = true, .n_canvas = 32 },
        { .n_canvas = 64 }, { .n_encode = 64, .n_canvas = 64 },
        { .n_canvas = 64 },
    };
    struct ns_grant grant[4];

    (void)state;
    assert_int_equal(ns_planner_fill(want, 4, 64, 8, grant), 64);
    assert_int_equal(grant[2].n_encode, 64);
    assert_int_equal(ns_planner_fill(want, 4, 200, 8, grant), 200);
    assert_true(grant[1].canvas && grant[2].canvas && !grant[3].canvas);
    assert_int_equal(grant[0].n_encode, 8); /* what is left over */
    assert_int_equal(ns_planner_fill(want, 4, 2000, 8, grant),
                     1000 + 32 + 64 + 128 + 64);
    assert_true(grant[0].canvas);
}

static void
a_picture_that_finds_no_room_behind_others_goes_first(void **state)
{
    static const struct ns_whole picture = { 10, 290 };
    const struct ns_want want[] = {
        { .n_canvas = 256 },
        { .n_encode = 300, .prefill = true, .n_canvas = 64, .whole = &picture,
          .n_whole = 1 },
        { .n_encode = 280, .prefill = true, .at = 10, .whole = &picture,
          .n_whole = 1 },
    };
    struct ns_grant grant[3];

    (void)state;
    /* Text in front of a picture goes alone; the picture goes whole, and what
     * is left of the pass is for others. */
    assert_int_equal(ns_planner_fill(want, 2, 300, 8, grant), 256 + 10);
    assert_int_equal(grant[1].n_encode, 10);
    assert_int_equal(ns_planner_fill(want, 3, 300, 8, grant), 280 + 10);
    assert_int_equal(grant[2].n_encode, 280);
    assert_false(grant[0].canvas);
    assert_int_equal(ns_planner_fill(want, 3, 536, 8, grant), 280 + 256);
    assert_true(grant[0].canvas);
    assert_int_equal(ns_planner_fill(want + 2, 1, 100, 8, grant), 280);
}

static struct ns_rank
random_rank(uint64_t number)
{
    struct ns_rank rank = {
        .priority = (int32_t)pick(5) - 2, .waited_ms = pick(5000),
        .deadline_ms = pick(2) ? 1 + pick(3) : 0, .prefix_ready = pick(2),
        .length = pick(3), .number = number,
    };

    return rank;
}

static void
rank_is_a_total_order(void **state)
{
    struct ns_rank rank[30];

    (void)state;
    for (int round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < 30; i++)
            rank[i] = random_rank(i);
        for (int a = 0; a < 30; a++)
            for (int b = 0; b < 30; b++) {
                int ab = ns_rank_compare(&rank[a], &rank[b], 1000);
                int ba = ns_rank_compare(&rank[b], &rank[a], 1000);

                assert_int_equal(ab == 0, a == b);
                assert_int_equal(ab < 0, ba > 0);
                for (int c = 0; c < 30 && ab < 0; c++)
                    if (ns_rank_compare(&rank[b], &rank[c], 1000) < 0)
                        assert_true(ns_rank_compare(&rank[a], &rank[c],
                                                    1000) < 0);
            }
    }
}

static void
rank_follows_priority_age_deadline_prefix_and_length(void **state)
{
    struct ns_rank a = { .number = 1 }, b = { .number = 0 };

    (void)state;
    assert_true(ns_rank_compare(&a, &b, 1000) > 0); /* first come */
    a.length = 5;
    assert_true(ns_rank_compare(&a, &b, 1000) < 0); /* longest */
    b.prefix_ready = true;
    assert_true(ns_rank_compare(&a, &b, 1000) > 0);
    a.deadline_ms = 99;
    assert_true(ns_rank_compare(&a, &b, 1000) < 0);
    b.priority = 2;
    assert_true(ns_rank_compare(&a, &b, 1000) > 0);
    a.waited_ms = 3500; /* three steps older */
    assert_true(ns_rank_compare(&a, &b, 1000) < 0);
}

static void
the_oldest_is_never_put_back(void **state)
{
    struct ns_rank rank[20];

    (void)state;
    for (int round = 0; round < 2000; round++) {
        uint32_t n = 1 + pick(20), oldest = 0, victim;

        for (uint32_t i = 0; i < n; i++) {
            rank[i] = random_rank(pick(1000) * 32 + i);
            if (rank[i].number < rank[oldest].number)
                oldest = i;
        }
        victim = ns_planner_victim(rank, n);
        if (n == 1) {
            assert_int_equal(victim, n);
            continue;
        }
        assert_in_range(victim, 0, n - 1);
        assert_int_not_equal(victim, oldest);
        for (uint32_t i = 0; i < n; i++)
            if (i != oldest)
                assert_true(rank[i].priority > rank[victim].priority ||
                            (rank[i].priority == rank[victim].priority &&
                             rank[i].number <= rank[victim].number));
    }
}

static void
a_higher_level_gets_all_it_wants_before_a_lower_one(void **state)
{
    struct ns_want want[MOST];
    struct ns_grant grant[MOST];
    struct ns_want plain[] = {
        { .level = 0, .prefill = true, .n_encode = 300 },
        { .level = 1, .n_canvas = 256 },
        { .level = 1, .n_canvas = 256 },
    };

    (void)state;
    /* Canvases would go first, were they its equals. */
    assert_int_equal(ns_planner_fill(plain, 3, 512, 8, grant), 300);
    assert_int_equal(grant[0].n_encode, 300);
    assert_false(grant[1].canvas || grant[2].canvas);
    plain[0].level = 1;
    assert_int_equal(ns_planner_fill(plain, 3, 512, 8, grant), 512);
    assert_int_equal(grant[0].n_encode, 0);
    assert_true(grant[1].canvas && grant[2].canvas);
    /* What a level gets does not depend on those below it. Whole pictures
     * aside: one that got stuck goes in front of all. */
    for (int round = 0; round < 20000; round++) {
        struct ns_grant alone[MOST];
        uint32_t n = make_wants(want), upper = n ? pick(n) : 0;
        uint32_t budget = 1 + pick(2000);

        for (uint32_t i = 0; i < n; i++) {
            want[i].level = i >= upper;
            want[i].n_whole = 0;
        }
        ns_planner_fill(want, n, budget, 2 * MOST, grant);
        ns_planner_fill(want, upper, budget, 2 * MOST, alone);
        for (uint32_t i = 0; i < upper; i++) {
            assert_int_equal(grant[i].n_encode, alone[i].n_encode);
            assert_int_equal(grant[i].canvas, alone[i].canvas);
        }
    }
}

static void
priority_and_deadline_make_levels_and_ties_do_not(void **state)
{
    struct ns_rank a = { .priority = 1, .number = 5 };
    struct ns_rank b = { .number = 1, .length = 900, .prefix_ready = true };

    (void)state;
    assert_true(ns_rank_presses(&a, &b, 1000));
    assert_false(ns_rank_presses(&b, &a, 1000));
    b.waited_ms = 1000;
    assert_false(ns_rank_presses(&a, &b, 1000));
    assert_false(ns_rank_presses(&b, &a, 1000));
    a.deadline_ms = 7;
    assert_true(ns_rank_presses(&a, &b, 1000));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pass_never_exceeds_its_budget_or_its_segments),
        cmocka_unit_test(something_is_granted_whenever_something_is_wanted),
        cmocka_unit_test(commits_go_before_canvases_and_canvases_before_prefill),
        cmocka_unit_test(a_picture_that_finds_no_room_behind_others_goes_first),
        cmocka_unit_test(rank_is_a_total_order),
        cmocka_unit_test(rank_follows_priority_age_deadline_prefix_and_length),
        cmocka_unit_test(the_oldest_is_never_put_back),
        cmocka_unit_test(a_higher_level_gets_all_it_wants_before_a_lower_one),
        cmocka_unit_test(priority_and_deadline_make_levels_and_ties_do_not),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
