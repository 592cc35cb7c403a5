/* The pool under short runs, long runs, sleeping workers and too many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "tests/fault.h"

enum { MAX_TASKS = 1000 };

struct count {
    atomic_uint done[MAX_TASKS];
    atomic_uint running[16]; /* of each thread: never two at once */
    atomic_uint wrong;
    uint32_t n_tasks, n_threads;
};

static void
count_task(void *ctx, uint32_t task, uint32_t thread)
{
    struct count *count = ctx;

    if (task >= count->n_tasks || thread >= count->n_threads) {
        atomic_fetch_add(&count->wrong, 1);
        return;
    }
    if (atomic_fetch_add(&count->running[thread], 1) != 0)
        atomic_fetch_add(&count->wrong, 1);
    atomic_fetch_add(&count->done[task], 1);
    atomic_fetch_sub(&count->running[thread], 1);
}

static void
run_counted(struct pool *pool, uint32_t n_tasks)
{
    static struct count count;

    memset(&count, 0, sizeof(count));
    count.n_tasks = n_tasks;
    count.n_threads = pool_threads(pool);
    pool_run(pool, n_tasks, count_task, &count);
    assert_int_equal(atomic_load(&count.wrong), 0);
    for (uint32_t i = 0; i < n_tasks; i++)
        assert_int_equal(atomic_load(&count.done[i]), 1);
}

static void
every_task_runs_once_and_is_done_when_run_returns(void **state)
{
    (void)state;
    for (uint32_t n_threads = 1; n_threads <= 9; n_threads += 2) {
        struct ns_error err;
        struct pool *pool;

        assert_int_equal(pool_create(n_threads, &pool, &err), NS_OK);
        assert_int_equal(pool_threads(pool), n_threads);
        for (int round = 0; round < 2000; round++)
            run_counted(pool, (uint32_t)round % 23);
        run_counted(pool, MAX_TASKS);
        pool_destroy(pool);
    }
}

static void
workers_that_fell_asleep_wake_up_for_the_next_run(void **state)
{
    struct ns_error err;
    struct pool *pool;

    (void)state;
    assert_int_equal(pool_create(4, &pool, &err), NS_OK);
    for (int round = 0; round < 50; round++) {
        usleep(1000); /* far longer than they spin */
        run_counted(pool, 40);
    }
    pool_destroy(pool);
}

struct meeting {
    atomic_uint arrived;
    atomic_bool gave_up;
};

/* Waits until the other task runs too: only another thread can do that. */
static void
meet(void *ctx, uint32_t task, uint32_t thread)
{
    struct meeting *meeting = ctx;
    time_t start = time(NULL);

    (void)task;
    (void)thread;
    atomic_fetch_add(&meeting->arrived, 1);
    while (atomic_load(&meeting->arrived) < 2 &&
           !atomic_load(&meeting->gave_up)) {
        usleep(100);
        if (time(NULL) - start > 20)
            atomic_store(&meeting->gave_up, true);
    }
}

static void
two_tasks_run_at_the_same_time(void **state)
{
    struct meeting meeting = { 0 };
    struct ns_error err;
    struct pool *pool;

    (void)state;
    assert_int_equal(pool_create(2, &pool, &err), NS_OK);
    pool_run(pool, 2, meet, &meeting);
    assert_false(atomic_load(&meeting.gave_up));
    pool_destroy(pool);
}

static void
a_pool_that_is_never_used_ends(void **state)
{
    struct ns_error err;
    struct pool *pool;

    (void)state;
    for (int i = 0; i < 100; i++) {
        assert_int_equal(pool_create(3, &pool, &err), NS_OK);
        pool_destroy(pool);
    }
    pool_destroy(NULL);
}

static void
creating_fails_cleanly_at_every_allocation(void **state)
{
    enum ns_status status;
    struct ns_error err;

    (void)state;
    for (int n = 0;; n++) {
        struct pool *pool = NULL;

        fault_arm(n);
        status = pool_create(3, &pool, &err);
        if (!fault_fired()) {
            assert_int_equal(status, NS_OK);
            assert_true(n >= 2);
            pool_destroy(pool);
            return;
        }
        assert_int_equal(status, NS_FATAL);
        assert_null(pool);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once_and_is_done_when_run_returns),
        cmocka_unit_test(workers_that_fell_asleep_wake_up_for_the_next_run),
        cmocka_unit_test(two_tasks_run_at_the_same_time),
        cmocka_unit_test(a_pool_that_is_never_used_ends),
        cmocka_unit_test(creating_fails_cleanly_at_every_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
