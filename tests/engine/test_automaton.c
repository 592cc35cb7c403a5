#include "tests/engine/machine.h"
#include "tests/fault.h"

static struct ns_grammar *
grammar_of(const char *pattern)
{
    struct ns_grammar *grammar = NULL;
    struct ns_error err;

    if (ns_grammar_regex(pattern, strlen(pattern), &grammar, &err) != NS_OK)
        fail_msg("%s: %s", pattern, err.text);
    return grammar;
}

/* Deterministic, it has a state for each set of the last 13 letters. */
static const char wide[] = "[ab]*a[ab]{12}";

static void
a_state_knows_its_shortest_end(void **state)
{
    struct ns_automaton *a = machine_over(grammar_of("a(b{3}|cde?)f*"));
    uint32_t at = ns_automaton_start(a);

    (void)state;
    assert_int_equal(ns_automaton_rest(a, at), 3);
    assert_int_equal(ns_automaton_shortest(a, at), 'a');
    assert_int_equal(machine_finish(a, at), machine_run(a, "acd", 3));
    at = machine_run(a, "ab", 2);
    assert_int_equal(ns_automaton_rest(a, at), 2);
    assert_false(ns_automaton_accepts(a, at));
    at = machine_run(a, "acd", 3);
    assert_true(ns_automaton_accepts(a, at));
    assert_false(ns_automaton_ended(a, at));
    assert_int_equal(ns_automaton_rest(a, at), 0);
    assert_int_equal(ns_automaton_shortest(a, at), 0);
    ns_automaton_destroy(a);
    a = machine_over(grammar_of("ab"));
    assert_true(ns_automaton_ended(a, machine_run(a, "ab", 2)));
    ns_automaton_destroy(a);
}

static void
from_the_dead_and_the_full_there_is_no_way(void **state)
{
    struct ns_automaton *a = machine_over(grammar_of("a"));

    (void)state;
    assert_int_equal(machine_run(a, "b", 1), NS_AUTOMATON_DEAD);
    for (unsigned byte = 0; byte < 256; byte++) {
        assert_int_equal(ns_automaton_next(a, NS_AUTOMATON_DEAD,
                                           (uint8_t)byte), NS_AUTOMATON_DEAD);
        assert_int_equal(ns_automaton_next(a, NS_AUTOMATON_FULL,
                                           (uint8_t)byte), NS_AUTOMATON_FULL);
    }
    for (int i = 0; i < 2; i++) {
        uint32_t at = i ? NS_AUTOMATON_FULL : NS_AUTOMATON_DEAD;

        assert_false(ns_automaton_accepts(a, at));
        assert_false(ns_automaton_ended(a, at));
        assert_int_equal(ns_automaton_rest(a, at), UINT32_MAX);
        assert_int_equal(ns_automaton_shortest(a, at), 0);
    }
    ns_automaton_destroy(a);
}

static void
one_set_of_places_is_one_state(void **state)
{
    struct ns_automaton *a = machine_over(grammar_of("(ab|cd)*"));

    (void)state;
    assert_int_equal(machine_run(a, "ababcd", 6), machine_run(a, "cd", 2));
    assert_int_equal(ns_automaton_n_states(a), 3);
    ns_automaton_destroy(a);
}

static void
the_program_is_its_own(void **state)
{
    struct ns_grammar *grammar = grammar_of("[a-f]{3}");
    struct ns_automaton *a;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_automaton_create(grammar, 1 << 16, &a, &err), NS_OK);
    ns_grammar_destroy(grammar);
    assert_true(machine_accepts(a, "fed"));
    ns_automaton_destroy(a);
}

/* Runs 4,096 texts of 13 letters; how many found no room. */
static uint32_t
run_all(struct ns_automaton *a)
{
    uint32_t full = 0;

    for (uint32_t number = 0; number < 1u << 12; number++) {
        uint32_t at = ns_automaton_start(a);

        for (uint32_t bit = 0; bit < 13; bit++)
            at = ns_automaton_next(a, at, number >> bit & 1 ? 'a' : 'b');
        if (at == NS_AUTOMATON_FULL)
            full++;
        else
            assert_int_equal(ns_automaton_accepts(a, at), number & 1);
    }
    return full;
}

static void
it_stays_within_its_limit_and_goes_on_after_a_reset(void **state)
{
    struct ns_grammar *grammar = grammar_of(wide);
    struct ns_automaton *a;
    struct ns_error err;
    uint32_t start;

    (void)state;
    assert_int_equal(ns_automaton_create(grammar, 100000, &a, &err), NS_OK);
    start = ns_automaton_start(a);
    assert_true(run_all(a) > 0);
    assert_true(ns_automaton_bytes(a) <= 100000);
    for (int i = 0; i < 3; i++) {
        ns_automaton_reset(a);
        assert_int_equal(ns_automaton_start(a), start);
        assert_int_equal(ns_automaton_n_states(a), 1);
        assert_true(machine_accepts(a, "bbbbbabbbbbbbbbbbb"));
        assert_false(machine_accepts(a, "bbbbbbabbbbbbbbbbb"));
        assert_true(run_all(a) > 0); /* whatever stands there is right */
        assert_true(ns_automaton_bytes(a) <= 100000);
    }
    ns_automaton_destroy(a);
    a = machine_over(grammar);
    assert_int_equal(run_all(a), 0);
    assert_true(ns_automaton_n_states(a) > 1 << 12);
    ns_automaton_destroy(a);
}

static void
a_limit_below_the_program_is_refused(void **state)
{
    struct ns_grammar *grammar = grammar_of(wide);
    struct ns_automaton *a;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_automaton_create(grammar, 100, &a, &err), NS_REJECT);
    assert_string_equal(err.code, "grammar_limit");
    assert_non_null(strstr(err.text, "limit 100"));
    assert_int_equal(ns_automaton_create(grammar, 1500, &a, &err), NS_REJECT);
    assert_string_equal(err.code, "grammar_limit");
    assert_non_null(strstr(err.text, "first state"));
    ns_grammar_destroy(grammar);
}

static void
memory_that_runs_out_is_no_room_and_leaves_what_was_right(void **state)
{
    struct ns_grammar *grammar = grammar_of(wide);
    uint32_t full = 0;
    int n;

    (void)state;
    for (n = 0;; n++) {
        struct ns_automaton *a = NULL;
        struct ns_error err;
        enum ns_status status;

        fault_arm(n);
        status = ns_automaton_create(grammar, 1 << 24, &a, &err);
        if (status == NS_OK) {
            full = run_all(a);
            if (fault_fired()) {
                assert_int_equal(run_all(a), 0);
                ns_automaton_destroy(a);
                continue;
            }
            ns_automaton_destroy(a);
            break;
        }
        assert_true(fault_fired());
        assert_int_equal(status, NS_FATAL);
        assert_null(a);
    }
    assert_int_equal(full, 0);
    assert_true(n > 30);
    ns_grammar_destroy(grammar);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_state_knows_its_shortest_end),
        cmocka_unit_test(from_the_dead_and_the_full_there_is_no_way),
        cmocka_unit_test(one_set_of_places_is_one_state),
        cmocka_unit_test(the_program_is_its_own),
        cmocka_unit_test(it_stays_within_its_limit_and_goes_on_after_a_reset),
        cmocka_unit_test(a_limit_below_the_program_is_refused),
        cmocka_unit_test(memory_that_runs_out_is_no_room_and_leaves_what_was_right),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
