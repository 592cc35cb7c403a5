/* Pages under random histories: what a sequence reads is what belongs there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/kvcache.h"
#include "engine/rng.h"
#include "tests/fault.h"

enum { WINDOW = 100, CHUNK = 150, N_SLOTS = 5, N_HOLDS = 9, LONGEST = 900 };

/* A model of two layers, one of each kind, of one value a head. */
static const struct ns_config config = {
    .n_layers = 2,
    .layer = { { false, 2, 1 }, { true, 8, 1 } },
    .sliding_window = WINDOW,
};

struct user {
    struct ns_kv_hold *hold;
    int32_t ids[LONGEST];
    uint32_t n_prompt, n_known, n_cached;
    struct ns_whole whole[2]; /* pictures: one across the fork, one behind */
    bool running;
};

struct world {
    struct ns_backend *be;
    struct ns_kvcache *kv;
    struct user user[N_HOLDS];
    /* What each page holds: a hash of all tokens up to its last row, [pool]. */
    uint64_t content[2][4096];
    uint64_t seed, n_draws;
    uint32_t n_adopted, n_short, n_shared, n_finished;
};

static uint32_t
pick(struct world *w, uint32_t below)
{
    return (uint32_t)ns_draw_token(
        ns_draw(w->seed, 0, 0, NS_DRAW_CANVAS, w->n_draws++), below);
}

static uint64_t
hash_of(const int32_t *ids, uint32_t n)
{
    uint64_t h = 7;

    for (uint32_t i = 0; i < n; i++)
        h = ns_mix(h ^ (uint64_t)ids[i]);
    return h;
}

static int32_t
page_of(const struct world *w, const struct user *user, bool full,
        uint32_t index)
{
    return ns_kvcache_table(w->kv, full)[(size_t)ns_kvcache_slot(user->hold) *
                                             ns_kvcache_table_stride(w->kv) +
                                         index];
}

/* Rows n_cached .. n-1 are written, as a pass would. */
static void
write_rows(struct world *w, struct user *user, uint32_t n)
{
    for (uint32_t i = user->n_cached; i < n; i++) {
        uint64_t h = hash_of(user->ids, i + 1);

        for (int full = 0; full < 2; full++) {
            int32_t page = page_of(w, user, full, i / NS_PAGE);

            assert_in_range(page, 0, 4095);
            w->content[full][page] = h;
        }
    }
}

/* Every page that the next query reads holds this sequence's rows. */
static void
check_rows(const struct world *w, const struct user *user)
{
    uint32_t n = user->n_cached;
    uint32_t from = n + 1 > WINDOW ? n + 1 - WINDOW : 0;

    for (uint32_t i = 0; i < n; i += NS_PAGE) {
        uint32_t end = i + NS_PAGE < n ? i + NS_PAGE : n;
        uint64_t h = hash_of(user->ids, end);

        assert_true(w->content[1][page_of(w, user, true, i / NS_PAGE)] == h);
        if (end > from)
            assert_true(w->content[0][page_of(w, user, false, i / NS_PAGE)] ==
                        h);
    }
}

/* Prompts branch off each other at few places, so that they share. */
static void
make_prompt(struct world *w, struct user *user)
{
    uint32_t family = pick(w, 2), fork = pick(w, 5) * 130;

    user->n_prompt = 20 + pick(w, LONGEST - 200);
    for (uint32_t i = 0; i < LONGEST; i++)
        user->ids[i] = i < fork ? (int32_t)(family * 1000 + i)
                                : (int32_t)pick(w, 3);
    /* No fork cuts a picture, so both are wholly before or behind it. */
    user->whole[0] = (struct ns_whole){ fork > 70 ? fork - 70 : fork + 3,
                                        fork > 70 ? fork - 1 : fork + 70 };
    user->whole[1] = (struct ns_whole){ fork + 100, fork + 180 };
    user->n_known = user->n_prompt;
    user->n_cached = 0;
    user->running = false;
}

static void
drop(struct world *w, struct user *user)
{
    ns_kvcache_drop(w->kv, user->hold);
    memset(user, 0, sizeof(*user));
}

static void
admit(struct world *w, struct user *user)
{
    uint32_t cached;

    switch (ns_kvcache_admit(w->kv, user->hold, user->n_known + 50,
                             &cached)) {
    case NS_ADMITTED:
        user->running = true;
        user->n_cached = cached;
        w->n_adopted += cached > 0;
        assert_in_range(cached, 0, user->n_prompt - 1);
        for (int i = 0; i < 2; i++)
            assert_false(user->whole[i].first < cached &&
                         cached < user->whole[i].end);
        check_rows(w, user);
        break;
    case NS_ADMIT_LATER:
        w->n_short++;
        break;
    case NS_ADMIT_SHARED:
        w->n_shared++;
        break;
    }
}

static void
advance(struct world *w, struct user *user)
{
    uint32_t n = 1 + pick(w, CHUNK);

    if (user->n_cached == user->n_known) {
        if (user->n_known + 40 > LONGEST || pick(w, 6) == 0) {
            w->n_finished++;
            drop(w, user);
            return;
        }
        user->n_known += 1 + pick(w, 40);
    }
    if (n > user->n_known - user->n_cached)
        n = user->n_known - user->n_cached;
    if (!ns_kvcache_extend(w->kv, user->hold, user->n_cached + n)) {
        w->n_short++;
        ns_kvcache_release(w->kv, user->hold); /* put back */
        user->running = false;
        user->n_cached = 0;
        return;
    }
    write_rows(w, user, user->n_cached + n);
    /* A draft may be kept in part only: what was written behind is dropped. */
    if (user->n_cached >= user->n_prompt && pick(w, 3) == 0)
        n = 1 + pick(w, n);
    user->n_cached += n;
    if (user->n_cached < user->n_known && user->n_cached >= user->n_prompt)
        user->n_known = user->n_cached;
    user->n_cached--; /* what lies behind is garbage: the last row counts */
    write_rows(w, user, user->n_cached + 1);
    user->n_cached++;
    ns_kvcache_settle(w->kv, user->hold, user->n_cached);
}

static void
open_world(struct world *w, uint64_t seed, uint32_t full, uint32_t sliding)
{
    const struct ns_backend_options backend = { .n_threads = 1 };
    const struct ns_kvcache_options options = {
        .full_pages = full, .sliding_pages = sliding, .n_slots = N_SLOTS,
        .max_positions = 1024, .chunk = CHUNK,
    };
    struct ns_error err;

    memset(w, 0, sizeof(*w));
    w->seed = seed;
    assert_int_equal(ns_backend_open(&backend, &w->be, &err), NS_OK);
    assert_int_equal(ns_kvcache_create(&config, 2, w->be, &options, &w->kv,
                                       &err), NS_OK);
}

static void
close_world(struct world *w)
{
    struct ns_kv_counts counts;

    for (int i = 0; i < N_HOLDS; i++)
        drop(w, &w->user[i]);
    counts = ns_kvcache_counts(w->kv);
    assert_int_equal(counts.full_free, counts.full_pages);
    assert_int_equal(counts.sliding_free, counts.sliding_pages);
    assert_int_equal(counts.slots_free, N_SLOTS);
    assert_true(ns_kvcache_check(w->kv));
    ns_kvcache_destroy(w->kv);
    ns_backend_close(w->be);
}

static void
random_histories_read_only_their_own_rows(void **state)
{
    struct world *w = malloc(sizeof(*w));
    uint32_t n_adopted = 0, n_short = 0, n_shared = 0, n_finished = 0;

    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        open_world(w, seed, 16 + (uint32_t)seed * 3, 10 + (uint32_t)seed * 2);
        for (int step = 0; step < 1500; step++) {
            struct user *user = &w->user[pick(w, N_HOLDS)];
            struct ns_error err;

            if (!user->hold) {
                make_prompt(w, user);
                assert_int_equal(ns_kvcache_declare(w->kv, user->ids,
                                                    user->n_prompt,
                                                    user->whole, 2,
                                                    &user->hold, &err),
                                 NS_OK);
            } else if (!user->running) {
                admit(w, user);
            } else if (pick(w, 40) == 0) {
                drop(w, user);
            } else {
                advance(w, user);
            }
            if (user->running)
                check_rows(w, user);
            assert_true(ns_kvcache_check(w->kv));
        }
        n_adopted += w->n_adopted;
        n_short += w->n_short;
        n_shared += w->n_shared;
        n_finished += w->n_finished;
        close_world(w);
    }
    /* The histories did meet what they are there to meet. */
    assert_true(n_adopted > 50);
    assert_true(n_short > 50);
    assert_true(n_shared > 50);
    assert_true(n_finished > 100);
    free(w);
}

static void
a_declared_fork_keeps_what_the_window_has_left(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct user *first, *second;
    struct ns_error err;
    uint32_t cached;

    (void)state;
    open_world(w, 1, 64, 64);
    first = &w->user[0];
    second = &w->user[1];
    for (uint32_t i = 0; i < LONGEST; i++)
        first->ids[i] = second->ids[i] = (int32_t)i;
    for (uint32_t i = 400; i < LONGEST; i++)
        second->ids[i] = 7;
    first->n_prompt = second->n_prompt = first->n_known = 800;
    assert_int_equal(ns_kvcache_declare(w->kv, first->ids, 800, NULL, 0, &first->hold,
                                        &err), NS_OK);
    assert_int_equal(ns_kvcache_declare(w->kv, second->ids, 800, NULL, 0,
                                        &second->hold, &err), NS_OK);
    assert_int_equal(ns_kvcache_admit(w->kv, first->hold, 850, &cached),
                     NS_ADMITTED);
    assert_int_equal(cached, 0);
    first->running = true;
    /* While the first computes the prefix, the second waits for it. */
    for (uint32_t n = 100; n <= 800; n += 100) {
        if (n <= 400)
            assert_int_equal(ns_kvcache_admit(w->kv, second->hold, 850,
                                              &cached), NS_ADMIT_SHARED);
        assert_true(ns_kvcache_extend(w->kv, first->hold, n));
        write_rows(w, first, n);
        first->n_cached = n;
        ns_kvcache_settle(w->kv, first->hold, n);
    }
    assert_int_equal(ns_kvcache_admit(w->kv, second->hold, 850, &cached),
                     NS_ADMITTED);
    assert_int_equal(cached, 384); /* six whole pages of the common 400 */
    second->n_cached = cached;
    second->running = true;
    check_rows(w, second);
    close_world(w);
    free(w);
}

static void
admission_never_promises_more_than_there_is(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct ns_error err;
    uint32_t cached, n_running = 0;

    (void)state;
    open_world(w, 1, 20, 20);
    for (uint32_t u = 0; u < 4; u++) {
        struct user *user = &w->user[u];

        for (uint32_t i = 0; i < LONGEST; i++)
            user->ids[i] = (int32_t)(u * 1000 + i);
        user->n_prompt = user->n_known = 200;
        assert_int_equal(ns_kvcache_declare(w->kv, user->ids, 200, NULL, 0,
                                            &user->hold, &err), NS_OK);
        /* 8 pages each: two fit into 20, three do not. */
        user->running = ns_kvcache_admit(w->kv, user->hold, 512, &cached) ==
                        NS_ADMITTED;
        n_running += user->running;
    }
    assert_int_equal(n_running, 2);
    for (uint32_t u = 0; u < 4; u++)
        if (w->user[u].running)
            assert_true(ns_kvcache_extend(w->kv, w->user[u].hold, 512));
    close_world(w);
    free(w);
}

static void
every_failed_allocation_leaves_the_counts_right(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct ns_error err;

    (void)state;
    for (int n = 0;; n++) {
        struct ns_kv_hold *hold = NULL, *other = NULL;
        enum ns_status status;
        bool fired;

        open_world(w, 1, 20, 20);
        make_prompt(w, &w->user[0]);
        assert_int_equal(ns_kvcache_declare(w->kv, w->user[0].ids, 300, NULL, 0,
                                            &other, &err), NS_OK);
        w->user[0].ids[200] = 9;
        fault_arm(n);
        status = ns_kvcache_declare(w->kv, w->user[0].ids, 300, NULL, 0, &hold, &err);
        fired = fault_fired();
        assert_int_equal(status, fired ? NS_FATAL : NS_OK);
        ns_kvcache_drop(w->kv, hold);
        ns_kvcache_drop(w->kv, other);
        close_world(w);
        if (!fired)
            break;
    }
    free(w);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_histories_read_only_their_own_rows),
        cmocka_unit_test(a_declared_fork_keeps_what_the_window_has_left),
        cmocka_unit_test(admission_never_promises_more_than_there_is),
        cmocka_unit_test(every_failed_allocation_leaves_the_counts_right),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
