#include "engine/json_scan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/fault.h"

static void
a_text_is_walked_value_by_value(void **state)
{
    static const char json[] =
        " {\"a\" : [1, 22,333 ] ,\"\":{},\n\"b\\u0000\":\"\\ud83d\\ude00\\n\""
        ",\"c\":[[],[{}],-1.5e3,true]\t} ";
    struct ns_scan scan;
    struct ns_reader slice;
    struct ns_error err;
    uint64_t number, sum = 0;

    (void)state;
    ns_scan_init(&scan, json, sizeof(json) - 1);
    assert_true(ns_scan_open(&scan, '{'));
    assert_true(ns_scan_member(&scan));
    assert_string_equal(scan.text.data, "a");
    assert_true(ns_scan_open(&scan, '['));
    while (ns_scan_element(&scan)) {
        assert_true(ns_scan_uint(&scan, &number));
        sum += number;
    }
    assert_int_equal(sum, 356);
    assert_true(ns_scan_member(&scan));
    assert_int_equal(scan.text.length, 0);
    assert_true(ns_scan_open(&scan, '{'));
    assert_false(ns_scan_member(&scan));
    assert_true(ns_scan_member(&scan));
    assert_int_equal(scan.text.length, 2);
    assert_memory_equal(scan.text.data, "b\0", 2);
    assert_int_equal(ns_scan_peek(&scan), '"');
    assert_true(ns_scan_string(&scan));
    assert_string_equal(scan.text.data, "\U0001f600\n");
    assert_true(ns_scan_member(&scan));
    assert_true(ns_scan_skip(&scan, &slice));
    assert_int_equal(ns_reader_left(&slice), strlen("[[],[{}],-1.5e3,true]"));
    assert_memory_equal(slice.at, "[[],[{}],-1.5e3,true]",
                        ns_reader_left(&slice));
    assert_false(ns_scan_member(&scan));
    assert_true(ns_scan_end(&scan));
    assert_int_equal(ns_scan_check(&scan, "text", &err), NS_OK);
    ns_scan_fini(&scan);
}

/* Reads an object of strings, numbers and whatever else. */
static const char *
problem_of(const char *json, size_t length, size_t *at)
{
    struct ns_scan scan;
    struct ns_error err;
    uint64_t number;
    const char *problem;

    ns_scan_init(&scan, json, length);
    if (ns_scan_open(&scan, '{'))
        while (ns_scan_member(&scan)) {
            if (ns_scan_peek(&scan) == '"')
                ns_scan_string(&scan);
            else if (ns_scan_peek(&scan) == '[')
                ns_scan_skip(&scan, NULL);
            else
                ns_scan_uint(&scan, &number);
        }
    ns_scan_end(&scan);
    problem = scan.problem;
    *at = (size_t)(scan.in.at - scan.begin);
    assert_int_equal(ns_scan_check(&scan, "text", &err),
                     problem ? NS_REJECT : NS_OK);
    ns_scan_fini(&scan);
    return problem;
}

static void
what_is_no_json_is_refused_where_it_stands(void **state)
{
    static const struct {
        const char *json, *why;
        size_t at;
    } cases[] = {
        { "", "an object", 0 },
        { "  7", "an object", 2 },
        { "{", "a string", 1 },
        { "{\"a\"", "colon", 4 },
        { "{\"a\" 1}", "colon", 5 },
        { "{\"a\":}", "whole number", 5 },
        { "{\"a\":1", "comma", 6 },
        { "{\"a\":1 \"b\":2}", "comma", 7 },
        { "{\"a\":1,}", "a string", 7 },
        { "{\"a\":01}", "whole number", 7 },
        { "{\"a\":1.5}", "whole number", 6 },
        { "{\"a\":1e3}", "whole number", 6 },
        { "{\"a\":-1}", "whole number", 5 },
        { "{\"a\":18446744073709551616}", "too large", 24 },
        { "{\"a\":\"x", "inside a string", 7 },
        { "{\"a\":\"\\", "inside a string", 7 },
        { "{\"a\":\"\\x\"}", "unknown escape", 7 },
        { "{\"a\":\"\\u12g4\"}", "hex digits", 8 },
        { "{\"a\":\"\\ud800\"}", "surrogate", 12 },
        { "{\"a\":\"\\ud800\\u0041\"}", "surrogate", 18 },
        { "{\"a\":\"\\udc00\"}", "surrogate", 12 },
        { "{\"a\":\"\x01\"}", "control character", 6 },
        { "{\"a\":\"\xff\"}", "UTF-8", 6 },
        { "{\"a\":\"\xe4\xbd\"}", "UTF-8", 6 },
        { "{\"a\":[\"x]}", "inside a string", 10 },
        { "{\"a\":[,]}", "a value", 6 },
        { "{\"a\":[1 2]}", "comma", 8 },
        { "{\"a\":1}}", "more text", 7 },
        { "{\"a\":1} x", "more text", 8 },
    };
    size_t at;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const char *why = problem_of(cases[i].json, strlen(cases[i].json), &at);

        if (!why || !strstr(why, cases[i].why) || at != cases[i].at)
            fail_msg("%s: %s at byte %zu", cases[i].json, why ? why : "nothing",
                     at);
    }
    assert_non_null(problem_of("{}\0", 3, &at)); /* a NUL is no white space */
    assert_non_null(problem_of("{\0}", 3, &at));
    assert_null(problem_of("{\"a\":18446744073709551615,\"b\":0}", 32, &at));
}

static void
nesting_is_bounded(void **state)
{
    char json[200] = "{\"a\":";
    size_t at, n = strlen(json);

    (void)state;
    memset(json + n, '[', 31); /* with the object: 32 */
    memset(json + n + 31, ']', 31);
    json[n + 62] = '}';
    assert_null(problem_of(json, n + 63, &at));
    memset(json + n, '[', 32);
    memset(json + n + 32, ']', 32);
    json[n + 64] = '}';
    assert_non_null(strstr(problem_of(json, n + 65, &at), "nested"));
}

static void
a_string_is_bounded(void **state)
{
    size_t n = NS_SCAN_STRING, at;
    char *json = malloc(n + 10);

    (void)state;
    assert_non_null(json);
    memcpy(json, "{\"a\":\"", 6);
    memset(json + 6, 'x', n + 1);
    memcpy(json + 6 + n, "\"}", 2);
    assert_null(problem_of(json, n + 8, &at));
    memcpy(json + 6 + n, "x\"}", 3);
    assert_non_null(strstr(problem_of(json, n + 9, &at), "1 MiB"));
    free(json);
}

static void
memory_that_runs_out_is_fatal(void **state)
{
    struct ns_scan scan;
    struct ns_error err;

    (void)state;
    ns_scan_init(&scan, "\"abc\"", 5);
    fault_arm(0);
    assert_false(ns_scan_string(&scan));
    assert_true(fault_fired());
    assert_int_equal(ns_scan_check(&scan, "text", &err), NS_FATAL);
    ns_scan_fini(&scan);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_is_walked_value_by_value),
        cmocka_unit_test(what_is_no_json_is_refused_where_it_stands),
        cmocka_unit_test(nesting_is_bounded),
        cmocka_unit_test(a_string_is_bounded),
        cmocka_unit_test(memory_that_runs_out_is_fatal),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
