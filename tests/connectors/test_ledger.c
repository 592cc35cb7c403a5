#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "connectors/ledger.h"
#include "tests/fault.h"

static struct ns_ledger *
create(uint32_t span, uint64_t next)
{
    struct ns_ledger *ledger = NULL;
    struct ns_error err;

    assert_int_equal(ns_ledger_create(span, next, &ledger, &err), NS_OK);
    return ledger;
}

static void
the_watermark_is_the_lowest_unfinished_offset(void **state)
{
    struct ns_ledger *ledger = create(8, 5);

    (void)state;
    assert_int_equal(ns_ledger_watermark(ledger), 5);
    assert_true(ns_ledger_receive(ledger, 5));
    assert_true(ns_ledger_receive(ledger, 6));
    assert_true(ns_ledger_receive(ledger, 9)); /* a gap */
    assert_true(ns_ledger_done(ledger, 6));
    assert_int_equal(ns_ledger_watermark(ledger), 5);
    assert_int_equal(ns_ledger_in_flight(ledger), 2);
    assert_true(ns_ledger_done(ledger, 5));
    assert_int_equal(ns_ledger_watermark(ledger), 9);
    assert_true(ns_ledger_done(ledger, 9));
    assert_int_equal(ns_ledger_watermark(ledger), 10);
    ns_ledger_destroy(ledger);
}

static void
unknown_and_repeated_offsets_move_nothing(void **state)
{
    struct ns_ledger *ledger = create(4, 0);

    (void)state;
    assert_false(ns_ledger_done(ledger, 0));
    assert_true(ns_ledger_receive(ledger, 3));
    assert_false(ns_ledger_receive(ledger, 3));
    assert_false(ns_ledger_receive(ledger, 2));
    assert_false(ns_ledger_done(ledger, 2));
    assert_false(ns_ledger_done(ledger, 4));
    assert_true(ns_ledger_done(ledger, 3));
    assert_false(ns_ledger_done(ledger, 3));
    assert_int_equal(ns_ledger_in_flight(ledger), 0);
    ns_ledger_destroy(ledger);
}

static void
the_span_bounds_what_one_slow_job_holds_back(void **state)
{
    struct ns_ledger *ledger = create(3, 1);

    (void)state;
    for (uint64_t i = 1; i <= 3; i++)
        assert_true(ns_ledger_receive(ledger, i));
    assert_false(ns_ledger_has_room(ledger));
    assert_false(ns_ledger_receive(ledger, 4));
    assert_true(ns_ledger_done(ledger, 2));
    assert_true(ns_ledger_done(ledger, 3));
    assert_false(ns_ledger_has_room(ledger)); /* 1 holds them */
    assert_true(ns_ledger_done(ledger, 1));
    assert_true(ns_ledger_has_room(ledger));
    assert_int_equal(ns_ledger_watermark(ledger), 4);
    ns_ledger_destroy(ledger);
}

/* Against a model: a set of offsets. */
static void
it_agrees_with_a_plain_set_over_many_orders(void **state)
{
    enum { SPAN = 37, STEPS = 200000 };
    uint64_t flying[SPAN], next = 0, lowest;
    size_t n = 0;
    struct ns_ledger *ledger = create(SPAN, 0);
    uint64_t random = 12345;

    (void)state;
    for (int i = 0; i < STEPS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        if ((random >> 33) % 2 && ns_ledger_has_room(ledger)) {
            uint64_t offset = next + (random >> 40) % 3;

            assert_true(ns_ledger_receive(ledger, offset));
            flying[n++] = offset;
            next = offset + 1;
        } else if (n) {
            size_t which = (random >> 40) % n;

            assert_true(ns_ledger_done(ledger, flying[which]));
            flying[which] = flying[--n];
        }
        lowest = next;
        for (size_t k = 0; k < n; k++)
            if (flying[k] < lowest)
                lowest = flying[k];
        assert_int_equal(ns_ledger_watermark(ledger), lowest);
        assert_int_equal(ns_ledger_in_flight(ledger), n);
    }
    ns_ledger_destroy(ledger);
}

static void
no_memory_is_an_error(void **state)
{
    struct ns_ledger *ledger = NULL;
    struct ns_error err;

    (void)state;
    fault_arm(0);
    assert_int_equal(ns_ledger_create(8, 0, &ledger, &err), NS_FATAL);
    assert_true(fault_fired());
    assert_null(ledger);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_watermark_is_the_lowest_unfinished_offset),
        cmocka_unit_test(unknown_and_repeated_offsets_move_nothing),
        cmocka_unit_test(the_span_bounds_what_one_slow_job_holds_back),
        cmocka_unit_test(it_agrees_with_a_plain_set_over_many_orders),
        cmocka_unit_test(no_memory_is_an_error),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
