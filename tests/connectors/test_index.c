#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

#include "connectors/index.h"
#include "tests/fault.h"

static struct ns_index *
create(void)
{
    struct ns_index *index = NULL;
    struct ns_error err;

    assert_int_equal(ns_index_create(&index, &err), NS_OK);
    return index;
}

static void
put(struct ns_index *index, uint64_t line, uint64_t sha, const char *id)
{
    struct ns_error err;

    assert_int_equal(ns_index_put(index, line, sha, id, &err), NS_OK);
}

static void
lines_ids_and_marks_are_found_again(void **state)
{
    struct ns_index *index = create();

    (void)state;
    assert_int_equal(ns_index_line_of(index, "a"), 0);
    assert_false(ns_index_has(index, 1, 5));
    put(index, 3, 5, "a");
    put(index, 1, 6, NULL);
    assert_int_equal(ns_index_line_of(index, "a"), 3);
    assert_true(ns_index_has(index, 3, 5));
    assert_false(ns_index_has(index, 3, 6));
    assert_false(ns_index_has(index, 2, 0));
    assert_false(ns_index_is_done(index, 3));
    ns_index_set_done(index, 3);
    ns_index_set_seen(index, 1);
    assert_true(ns_index_is_done(index, 3));
    assert_false(ns_index_is_seen(index, 3));
    assert_true(ns_index_is_seen(index, 1));
    assert_int_equal(ns_index_line_of(index, "a"), 3); /* marks aside */
    ns_index_set_done(index, 99);                      /* no such line */
    assert_false(ns_index_is_done(index, 99));
    ns_index_destroy(index);
}

static void
a_line_put_again_is_new_and_others_stay(void **state)
{
    struct ns_index *index = create();

    (void)state;
    put(index, 1, 5, "a");
    put(index, 2, 6, "b");
    ns_index_set_done(index, 1);
    put(index, 1, 7, "c");
    assert_false(ns_index_is_done(index, 1));
    assert_int_equal(ns_index_line_of(index, "a"), 0);
    assert_int_equal(ns_index_line_of(index, "b"), 2);
    assert_int_equal(ns_index_line_of(index, "c"), 1);
    ns_index_destroy(index);
}

static void
many_lines_are_all_found_and_no_others(void **state)
{
    enum { LINES = 50000 };
    struct ns_index *index = create();
    char id[32];

    (void)state;
    for (int i = LINES; i > 0; i--) { /* from behind: the table grows at once */
        snprintf(id, sizeof(id), "id-%d", i);
        put(index, (uint64_t)i, (uint64_t)i * 7, id);
    }
    for (int i = 1; i <= LINES; i++) {
        snprintf(id, sizeof(id), "id-%d", i);
        assert_int_equal(ns_index_line_of(index, id), i);
        assert_true(ns_index_has(index, (uint64_t)i, (uint64_t)i * 7));
        snprintf(id, sizeof(id), "no-%d", i);
        assert_int_equal(ns_index_line_of(index, id), 0);
    }
    ns_index_destroy(index);
}

static void
lines_that_can_not_be_and_memory_are_errors(void **state)
{
    struct ns_index *index = create();
    struct ns_error err;
    enum ns_status status = NS_FATAL;

    (void)state;
    assert_int_equal(ns_index_put(index, 0, 1, NULL, &err), NS_REJECT);
    assert_int_equal(ns_index_put(index, (uint64_t)1 << 32, 1, NULL, &err),
                     NS_REJECT);
    for (int n = 0; status != NS_OK; n++) {
        fault_arm(n);
        status = ns_index_put(index, 5000, 1, "a", &err);
        assert_int_equal(status, fault_fired() ? NS_FATAL : NS_OK);
    }
    assert_int_equal(ns_index_line_of(index, "a"), 5000);
    ns_index_destroy(index);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_ids_and_marks_are_found_again),
        cmocka_unit_test(a_line_put_again_is_new_and_others_stay),
        cmocka_unit_test(many_lines_are_all_found_and_no_others),
        cmocka_unit_test(lines_that_can_not_be_and_memory_are_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
