/* machine.h - a grammar and the automaton over it, as tests use them. */
#ifndef NS_TESTS_ENGINE_MACHINE_H
#define NS_TESTS_ENGINE_MACHINE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/automaton.h"
#include "engine/grammar.h"

enum { MACHINE_BYTES = 64 << 20 };

/* Takes the grammar. */
static inline struct ns_automaton *
machine_over(struct ns_grammar *grammar)
{
    struct ns_automaton *a = NULL;
    struct ns_error err;

    if (ns_automaton_create(grammar, MACHINE_BYTES, &a, &err) != NS_OK)
        fail_msg("%s", err.text);
    ns_grammar_destroy(grammar);
    return a;
}

static inline uint32_t
machine_run(struct ns_automaton *a, const char *text, size_t length)
{
    uint32_t state = ns_automaton_start(a);

    for (size_t i = 0; i < length; i++)
        state = ns_automaton_next(a, state, (uint8_t)text[i]);
    assert_int_not_equal(state, NS_AUTOMATON_FULL);
    return state;
}

static inline bool
machine_accepts(struct ns_automaton *a, const char *text)
{
    return ns_automaton_accepts(a, machine_run(a, text, strlen(text)));
}

/* From `state` by the shortest end, whose length is as was promised. */
static inline uint32_t
machine_finish(struct ns_automaton *a, uint32_t state)
{
    uint32_t rest = ns_automaton_rest(a, state);

    for (; rest > 0; rest--) {
        assert_int_equal(ns_automaton_rest(a, state), rest);
        state = ns_automaton_next(a, state, ns_automaton_shortest(a, state));
    }
    assert_true(ns_automaton_accepts(a, state));
    return state;
}

#endif
