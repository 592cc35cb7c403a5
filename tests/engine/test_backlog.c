/* The order of what waits, against a plain sort; and riders. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/backlog.h"
#include "engine/rng.h"
#include "tests/fault.h"

enum { MOST = 400, STEP_MS = 1000 };

static uint64_t n_draws;

static uint32_t
pick(uint32_t below)
{
    return (uint32_t)ns_draw_token(
        ns_draw(11, 0, 0, NS_DRAW_CANVAS, n_draws++), below);
}

struct waiting {
    struct ns_backlog_key key;
    uint32_t number;
};

static struct ns_backlog *
make(uint32_t riders)
{
    struct ns_backlog *backlog;
    struct ns_error err;

    assert_int_equal(ns_backlog_create(STEP_MS, riders, &backlog, &err),
                     NS_OK);
    return backlog;
}

static void
push(struct ns_backlog *backlog, struct waiting *waiting)
{
    struct ns_error err;

    assert_int_equal(ns_backlog_push(backlog, &waiting->key, waiting, &err),
                     NS_OK);
}

static int64_t
level(const struct ns_backlog_key *key)
{
    int64_t at = key->arrived_ms;

    return (at >= 0 ? at / STEP_MS : -((-at + STEP_MS - 1) / STEP_MS)) -
           key->priority;
}

static int
in_order(const void *a, const void *b)
{
    const struct waiting *x = *(struct waiting *const *)a;
    const struct waiting *y = *(struct waiting *const *)b;
    int64_t p = x->key.deadline_ms ? x->key.deadline_ms : INT64_MAX;
    int64_t q = y->key.deadline_ms ? y->key.deadline_ms : INT64_MAX;

    if (level(&x->key) != level(&y->key))
        return level(&x->key) < level(&y->key) ? -1 : 1;
    if (p != q)
        return p < q ? -1 : 1;
    if (x->key.length != y->key.length)
        return x->key.length > y->key.length ? -1 : 1;
    return x->number < y->number ? -1 : 1;
}

static void
draw_key(struct ns_backlog_key *key)
{
    *key = (struct ns_backlog_key){
        .priority = (int32_t)pick(5) - 2,
        .arrived_ms = (int64_t)pick(6 * STEP_MS) - 2 * STEP_MS,
        .deadline_ms = pick(2) ? 1 + pick(5) : 0,
        .group = pick(3) ? 1 + pick(6) : 0,
        .length = pick(8),
    };
}

static void
what_waits_comes_out_as_a_sort_would_have_it(void **state)
{
    static struct waiting waiting[MOST];
    struct waiting *sorted[MOST];

    (void)state;
    for (int round = 0; round < 200; round++) {
        struct ns_backlog *backlog = make(0);
        uint32_t n = pick(MOST), in = 0, left = 0;

        /* Some come while others go: what is left must stay sorted. */
        while (in < n || left > 0) {
            if (in < n && (left == 0 || pick(3))) {
                draw_key(&waiting[in].key);
                waiting[in].number = in;
                push(backlog, &waiting[in]);
                sorted[left++] = &waiting[in++];
                continue;
            }
            qsort(sorted, left, sizeof(*sorted), in_order);
            assert_ptr_equal(ns_backlog_first(backlog), sorted[0]);
            assert_ptr_equal(ns_backlog_pop(backlog), sorted[0]);
            memmove(sorted, sorted + 1, --left * sizeof(*sorted));
            assert_int_equal(ns_backlog_length(backlog), left);
        }
        assert_null(ns_backlog_pop(backlog));
        ns_backlog_destroy(backlog);
    }
}

static void
riders_follow_one_of_their_group_but_never_pass_a_higher_priority(void **state)
{
    static struct waiting waiting[MOST];

    (void)state;
    for (int round = 0; round < 200; round++) {
        uint32_t riders = 1 + pick(5), n = pick(MOST), ridden = 0;
        struct ns_backlog *backlog = make(riders);
        bool gone[MOST] = { false };
        const struct waiting *last = NULL;

        for (uint32_t i = 0; i < n; i++) {
            draw_key(&waiting[i].key);
            waiting[i].number = i;
            push(backlog, &waiting[i]);
        }
        for (uint32_t i = 0; i < n; i++) {
            const struct waiting *next = ns_backlog_pop(backlog), *best = NULL;
            const struct waiting *mate = NULL;

            assert_non_null(next);
            for (uint32_t j = 0; j < n; j++) {
                const struct waiting *w = &waiting[j];

                if (gone[j])
                    continue;
                if (!best || in_order(&w, &best) < 0)
                    best = w;
                if (last && last->key.group != 0 &&
                    w->key.group == last->key.group &&
                    (!mate || in_order(&w, &mate) < 0))
                    mate = w;
            }
            if (mate && ridden < riders &&
                level(&mate->key) <= level(&best->key)) {
                assert_ptr_equal(next, mate);
                ridden++;
            } else {
                assert_ptr_equal(next, best);
                ridden = last && last->key.group != 0 &&
                                 next->key.group == last->key.group
                             ? ridden
                             : 0;
            }
            gone[next->number] = true;
            last = next;
        }
        assert_null(ns_backlog_first(backlog));
        ns_backlog_destroy(backlog);
    }
}

static void
prompts_that_begin_alike_are_one_group(void **state)
{
    int32_t a[2 * NS_GROUP_TOKENS], b[2 * NS_GROUP_TOKENS];

    (void)state;
    for (uint32_t i = 0; i < 2 * NS_GROUP_TOKENS; i++)
        a[i] = b[i] = (int32_t)pick(1000);
    b[NS_GROUP_TOKENS] ^= 1;
    assert_true(ns_backlog_group(a, 2 * NS_GROUP_TOKENS) ==
                ns_backlog_group(b, NS_GROUP_TOKENS + 1));
    assert_true(ns_backlog_group(a, NS_GROUP_TOKENS) != 0);
    assert_true(ns_backlog_group(a, NS_GROUP_TOKENS - 1) == 0);
    b[NS_GROUP_TOKENS - 1] ^= 1;
    assert_true(ns_backlog_group(a, NS_GROUP_TOKENS) !=
                ns_backlog_group(b, NS_GROUP_TOKENS));
}

static void
a_failed_allocation_loses_nothing_that_was_in(void **state)
{
    static struct waiting waiting[100];

    (void)state;
    for (int n = 0;; n++) {
        struct ns_backlog *backlog = NULL;
        uint32_t in = 0;
        struct ns_error err;
        enum ns_status status;
        bool fired;

        fault_arm(n);
        status = ns_backlog_create(STEP_MS, 2, &backlog, &err);
        for (uint32_t i = 0; status == NS_OK && i < 100; i++) {
            waiting[i].key = (struct ns_backlog_key){ .group = 1 + i };
            status = ns_backlog_push(backlog, &waiting[i].key, &waiting[i],
                                     &err);
            in += status == NS_OK;
        }
        fired = fault_fired();
        if (backlog)
            assert_int_equal(ns_backlog_length(backlog), in);
        for (; in > 0; in--)
            assert_non_null(ns_backlog_pop(backlog));
        ns_backlog_destroy(backlog);
        if (!fired)
            break;
        assert_true(status == NS_FATAL || status == NS_OK);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_waits_comes_out_as_a_sort_would_have_it),
        cmocka_unit_test(
            riders_follow_one_of_their_group_but_never_pass_a_higher_priority),
        cmocka_unit_test(prompts_that_begin_alike_are_one_group),
        cmocka_unit_test(a_failed_allocation_loses_nothing_that_was_in),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
