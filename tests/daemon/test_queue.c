#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/queue.h"
#include "tests/fault.h"

static struct ns_error err;
static int things[1000];

static struct ns_queue *
make(size_t capacity, bool pollable)
{
    struct ns_queue *queue;

    assert_int_equal(ns_queue_create(capacity, pollable, &queue, &err), NS_OK);
    return queue;
}

static bool
readable(const struct ns_queue *queue)
{
    struct pollfd fd = { ns_queue_descriptor(queue), POLLIN, 0 };

    return poll(&fd, 1, 0) == 1;
}

static void
items_come_out_in_the_order_they_went_in(void **state)
{
    struct ns_queue *queue = make(3, false);

    (void)state;
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 3; i++)
            assert_true(ns_queue_push(queue, &things[i]));
        assert_false(ns_queue_try_push(queue, &things[3]));
        assert_int_equal(ns_queue_length(queue), 3);
        for (int i = 0; i < 3; i++)
            assert_ptr_equal(ns_queue_pop(queue, 0), &things[i]);
        assert_null(ns_queue_pop(queue, 0));
        assert_null(ns_queue_pop(queue, 5));
    }
    ns_queue_destroy(queue);
}

static void
a_closed_queue_takes_nothing_and_gives_what_it_has(void **state)
{
    struct ns_queue *queue = make(2, false);

    (void)state;
    assert_true(ns_queue_push(queue, &things[0]));
    ns_queue_close(queue);
    assert_false(ns_queue_push(queue, &things[1]));
    assert_ptr_equal(ns_queue_pop(queue, -1), &things[0]);
    assert_null(ns_queue_pop(queue, -1));
    ns_queue_destroy(queue);
}

static void
the_descriptor_is_readable_while_something_waits(void **state)
{
    struct ns_queue *queue = make(4, true);

    (void)state;
    assert_false(readable(queue));
    assert_true(ns_queue_push(queue, &things[0]));
    assert_true(ns_queue_push(queue, &things[1]));
    assert_true(readable(queue));
    assert_non_null(ns_queue_pop(queue, 0));
    assert_true(readable(queue));
    assert_non_null(ns_queue_pop(queue, 0));
    assert_false(readable(queue));
    ns_queue_close(queue);
    assert_true(readable(queue));
    ns_queue_destroy(queue);
}

struct crowd {
    struct ns_queue *queue;
    _Atomic int next;
    _Atomic int taken[1000];
};

static void *
producer(void *data)
{
    struct crowd *crowd = data;

    for (;;) {
        int i = atomic_fetch_add(&crowd->next, 1);

        if (i >= 1000)
            return NULL;
        ns_queue_push(crowd->queue, &things[i]);
    }
}

static void *
consumer(void *data)
{
    struct crowd *crowd = data;
    int *thing;

    while ((thing = ns_queue_pop(crowd->queue, -1)) != NULL)
        atomic_fetch_add(&crowd->taken[thing - things], 1);
    return NULL;
}

static void
among_many_threads_each_item_is_taken_once(void **state)
{
    struct crowd *crowd = calloc(1, sizeof(*crowd));
    pthread_t makers[4], takers[4];

    (void)state;
    assert_non_null(crowd);
    if (!crowd)
        return; /* the analyser does not know cmocka */
    crowd->queue = make(7, true);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&takers[i], NULL, consumer, crowd), 0);
        assert_int_equal(pthread_create(&makers[i], NULL, producer, crowd), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(makers[i], NULL);
    ns_queue_close(crowd->queue);
    for (int i = 0; i < 4; i++)
        pthread_join(takers[i], NULL);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(crowd->taken[i], 1);
    ns_queue_destroy(crowd->queue);
    free(crowd);
}

static void *
blocked_pusher(void *data)
{
    return ns_queue_push(data, &things[1]) ? data : NULL;
}

static void
closing_wakes_who_waits_for_room(void **state)
{
    struct ns_queue *queue = make(1, false);
    pthread_t thread;
    void *pushed = queue;

    (void)state;
    assert_true(ns_queue_push(queue, &things[0]));
    assert_int_equal(pthread_create(&thread, NULL, blocked_pusher, queue), 0);
    usleep(20000);
    ns_queue_close(queue);
    pthread_join(thread, &pushed);
    assert_null(pushed);
    ns_queue_destroy(queue);
}

static void
a_queue_that_cannot_be_made_says_so(void **state)
{
    struct ns_queue *queue = NULL;

    (void)state;
    assert_int_equal(ns_queue_create(SIZE_MAX / 4, false, &queue, &err),
                     NS_FATAL);
    assert_int_equal(ns_queue_create(0, false, &queue, &err), NS_FATAL);
    fault_arm(0);
    assert_int_equal(ns_queue_create(4, true, &queue, &err), NS_FATAL);
    assert_true(fault_fired());
    assert_null(queue);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_come_out_in_the_order_they_went_in),
        cmocka_unit_test(a_closed_queue_takes_nothing_and_gives_what_it_has),
        cmocka_unit_test(the_descriptor_is_readable_while_something_waits),
        cmocka_unit_test(among_many_threads_each_item_is_taken_once),
        cmocka_unit_test(closing_wakes_who_waits_for_room),
        cmocka_unit_test(a_queue_that_cannot_be_made_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
