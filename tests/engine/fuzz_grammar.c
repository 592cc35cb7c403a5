/* A schema or a pattern of arbitrary bytes: a refusal has a code and a text;
 * what is accepted has a shortest document, which the validator calls valid,
 * and so are those of a few walks. The first byte says which. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/automaton.h"
#include "engine/schema.h"

enum { LIMIT = 8 << 20, MAX_TEXT = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(bool holds)
{
    if (!holds)
        abort();
}

/* `bytes` choose the way for as long as there are any. */
static size_t
walk(struct ns_automaton *a, const uint8_t *bytes, size_t n, char *text)
{
    uint32_t state = ns_automaton_start(a), to, rest;
    size_t length = 0;

    for (size_t i = 0; i < n && length < MAX_TEXT / 2; i++) {
        to = ns_automaton_next(a, state, bytes[i]);
        if (to == NS_AUTOMATON_FULL)
            return 0;
        if (to == NS_AUTOMATON_DEAD)
            continue;
        text[length++] = (char)bytes[i];
        state = to;
    }
    rest = ns_automaton_rest(a, state);
    check(rest != UINT32_MAX);
    for (; rest > 0 && length < MAX_TEXT; rest--) {
        check(ns_automaton_rest(a, state) == rest);
        text[length] = (char)ns_automaton_shortest(a, state);
        state = ns_automaton_next(a, state, (uint8_t)text[length++]);
        if (state == NS_AUTOMATON_FULL)
            return 0;
    }
    if (rest > 0)
        return 0;
    check(ns_automaton_accepts(a, state));
    return length;
}

static void
run(const struct ns_grammar *grammar, const json_t *schema,
    const uint8_t *data, size_t size)
{
    static char text[MAX_TEXT + 1];
    struct ns_automaton *a;
    struct ns_error err;

    if (ns_automaton_create(grammar, LIMIT, &a, &err) != NS_OK)
        return;
    for (size_t from = 0; from <= size; from += 1 + size / 4) {
        size_t n = walk(a, data + from, size - from, text);
        json_error_t fault;
        json_t *value;

        if (n == 0 || !schema)
            continue;
        value = json_loadb(text, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES,
                           &fault);
        /* A name that is not declared may come twice; and what is nested
         * deeper than jansson reads is JSON all the same. */
        check(value || strstr(fault.text, "duplicate object key") ||
              strstr(fault.text, "maximum parsing depth"));
        if (value && ns_schema_check(schema, value, &err) != NS_OK)
            check(strcmp(err.code, "schema") != 0);
        json_decref(value);
    }
    ns_automaton_destroy(a);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_grammar *grammar = NULL;
    json_t *schema = NULL;
    struct ns_error err = { .code = NULL };
    enum ns_status status;

    if (size == 0)
        return 0;
    if (data[0] == '/') {
        status = ns_grammar_regex((const char *)data + 1, size - 1, &grammar,
                                  &err);
    } else {
        schema = json_loadb((const char *)data, size,
                            JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
        if (!schema)
            return 0;
        status = ns_grammar_json_schema(schema, &grammar, &err);
    }
    if (status == NS_OK)
        run(grammar, schema, data, size);
    else
        check(status == NS_REJECT && err.code && err.text[0]);
    ns_grammar_destroy(grammar);
    json_decref(schema);
    return 0;
}
