/* JSON-Schema-Test-Suite, draft 2020-12, against the validator and against
 * the grammars. A schema that is refused as unsupported is counted by its
 * keyword; the counts stand below, so that one more is a failure. */
#include <stdio.h>
#include <unistd.h>

#include "engine/decimal.h"
#include "engine/schema.h"
#include "tests/engine/machine.h"

enum { MAX_ORDERS = 5040, N_KEYWORDS = 40, TEXT_BYTES = 1 << 16 };

/* --- a value as a document, its members in every order */

struct writer {
    char text[TEXT_BYTES];
    size_t length;
    unsigned order; /* which one: taken apart digit by digit */
};

static void
put(struct writer *w, const char *text)
{
    size_t n = strlen(text);

    assert_true(w->length + n < TEXT_BYTES);
    memcpy(w->text + w->length, text, n + 1);
    w->length += n;
}

static void
put_value(struct writer *w, json_t *value)
{
    char number[NS_NUMBER_TEXT], *spelled;
    const char *name[64];
    size_t n = 0;

    if (json_is_array(value)) {
        put(w, "[");
        for (size_t i = 0; i < json_array_size(value); i++) {
            put(w, i ? "," : "");
            put_value(w, json_array_get(value, i));
        }
        put(w, "]");
    } else if (json_is_object(value)) {
        for (void *i = json_object_iter(value); i;
             i = json_object_iter_next(value, i)) {
            assert_true(n < 64);
            name[n++] = json_object_iter_key(i);
        }
        put(w, "{");
        for (size_t left = n; left > 0; left--) {
            size_t at = w->order % left;
            json_t *key = json_string(name[at]);

            w->order /= (unsigned)left;
            put(w, left < n ? "," : "");
            put_value(w, key);
            put(w, ":");
            put_value(w, json_object_get(value, name[at]));
            json_decref(key);
            memmove(name + at, name + at + 1,
                    (left - at - 1) * sizeof(*name));
        }
        put(w, "}");
    } else if (json_is_number(value)) {
        put(w, ns_number_text(value, number));
    } else {
        spelled = json_dumps(value, JSON_ENCODE_ANY);
        assert_non_null(spelled);
        put(w, spelled);
        free(spelled);
    }
}

static unsigned
orders_of(json_t *value)
{
    unsigned all = 1;
    size_t n = json_object_size(value);

    for (size_t i = 0; i < json_array_size(value) && all < MAX_ORDERS; i++)
        all *= orders_of(json_array_get(value, i));
    for (void *i = json_object_iter(value); i && all < MAX_ORDERS;
         i = json_object_iter_next(value, i), n--)
        all *= (unsigned)n * orders_of(json_object_iter_value(i));
    return all < MAX_ORDERS ? all : MAX_ORDERS;
}

/* In some order of its members. */
static bool
takes(struct ns_automaton *a, json_t *value)
{
    static struct writer w;
    unsigned n = orders_of(value);

    for (unsigned i = 0; i < n; i++) {
        w.length = 0;
        w.order = i;
        put_value(&w, value);
        if (machine_accepts(a, w.text))
            return true;
    }
    return false;
}

/* --- counting */

struct count {
    const char *keyword;
    unsigned schemas;
};

struct score {
    unsigned schemas, refused, instances, limits;
    struct count by_keyword[N_KEYWORDS];
    unsigned n_keywords;
};

static void
count_refusal(struct score *score, const struct ns_error *err)
{
    unsigned i = 0;

    score->refused++;
    while (i < score->n_keywords &&
           strcmp(score->by_keyword[i].keyword, err->param) != 0)
        i++;
    if (i == score->n_keywords) {
        assert_true(i < N_KEYWORDS);
        score->by_keyword[score->n_keywords++].keyword = strdup(err->param);
    }
    score->by_keyword[i].schemas++;
}

/* Fails with the whole table where one count is another. */
static void
compare_counts(struct score *score, const struct count *wanted, size_t n)
{
    bool same = n == score->n_keywords;

    for (unsigned i = 0; i < score->n_keywords; i++) {
        bool found = false;

        for (size_t k = 0; k < n; k++)
            found |= strcmp(wanted[k].keyword,
                            score->by_keyword[i].keyword) == 0 &&
                     wanted[k].schemas == score->by_keyword[i].schemas;
        same &= found;
    }
    if (!same)
        for (unsigned i = 0; i < score->n_keywords; i++)
            print_message("        { \"%s\", %u },\n",
                          score->by_keyword[i].keyword,
                          score->by_keyword[i].schemas);
    for (unsigned i = 0; i < score->n_keywords; i++)
        free((char *)score->by_keyword[i].keyword);
    if (!same)
        fail_msg("other schemas were refused than those counted here");
}

/* --- the suite */

static const char *const files[] = {
    "additionalProperties", "allOf", "anchor", "anyOf", "boolean_schema",
    "const", "contains", "content", "default", "defs", "dependentRequired",
    "dependentSchemas", "dynamicRef", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "if-then-else", "infinite-loop-detection", "items",
    "maxContains", "maxItems", "maxLength", "maxProperties", "maximum",
    "minContains", "minItems", "minLength", "minProperties", "minimum",
    "multipleOf", "not", "oneOf", "pattern", "patternProperties",
    "prefixItems", "properties", "propertyNames", "ref", "refRemote",
    "required", "type", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems", "vocabulary",
    /* `format` is held to here: the draft has that as an option. */
    "optional/format/date", "optional/format/date-time",
    "optional/format/time", "optional/format/duration",
    "optional/format/uuid", "optional/format/ipv4", "optional/format/ipv6",
    "optional/format/hostname", "optional/format/email",
    "optional/format/uri", "optional/format/uri-reference",
    "optional/format/json-pointer", "optional/format/relative-json-pointer",
    "optional/non-bmp-regex", "optional/ecmascript-regex",
};

#define DATE_TIME "optional/format/date-time: validation of date-time strings"
#define TIME "optional/format/time: validation of time strings"

/* Valid in the suite, and not here; docs/STRUCTURED.md says why. */
static const struct {
    const char *group, *test;
} exceptions[] = {
    { DATE_TIME, "a valid date-time with a leap second, UTC" },
    { DATE_TIME, "a valid date-time with a leap second, with minus offset" },
    { TIME, "a valid time string with leap second, Zulu" },
    { TIME, "valid leap second, zero time-offset" },
    { TIME, "valid leap second, positive time-offset" },
    { TIME, "valid leap second, large positive time-offset" },
    { TIME, "valid leap second, negative time-offset" },
    { TIME, "valid leap second, large negative time-offset" },
};

static bool
is_exception(const char *group, const char *test)
{
    for (size_t i = 0; i < sizeof(exceptions) / sizeof(*exceptions); i++)
        if (strcmp(exceptions[i].group, group) == 0 &&
            strcmp(exceptions[i].test, test) == 0)
            return true;
    return false;
}

typedef void judge(struct score *score, json_t *schema, json_t *tests,
                   const char *group);

static unsigned failures;

static void
walk(struct score *score, judge *with)
{
    failures = 0;
    for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
        char path[200];
        json_error_t fault;
        json_t *groups;

        snprintf(path, sizeof(path), "build/schema-suite/draft2020-12/%s.json",
                 files[i]);
        groups = json_load_file(path, JSON_ALLOW_NUL, &fault);
        if (!groups)
            fail_msg("%s: %s (scripts/fetch-schema-suite.sh gets it)", path,
                     fault.text);
        for (size_t k = 0; k < json_array_size(groups); k++) {
            json_t *group = json_array_get(groups, k);
            json_t *schema = json_object_get(group, "schema");
            char name[300];

            snprintf(name, sizeof(name), "%s: %s", files[i],
                     json_string_value(json_object_get(group, "description")));
            score->schemas++;
            with(score, schema, json_object_get(group, "tests"), name);
        }
        json_decref(groups);
    }
    assert_int_equal(failures, 0);
}

static void
complain(const char *group, json_t *test, const char *what)
{
    print_error("%s: %s: %s\n", group,
                json_string_value(json_object_get(test, "description")), what);
    failures++;
}

static void
judge_validator(struct score *score, json_t *schema, json_t *tests,
                const char *group)
{
    for (size_t i = 0; i < json_array_size(tests); i++) {
        json_t *test = json_array_get(tests, i);
        bool valid = json_is_true(json_object_get(test, "valid"));
        struct ns_error err;
        enum ns_status status =
            ns_schema_check(schema, json_object_get(test, "data"), &err);

        if (status == NS_REJECT && strcmp(err.code, "schema") != 0) {
            count_refusal(score, &err);
            if (strcmp(err.code, "unsupported") != 0)
                complain(group, test, err.text);
            return;
        }
        score->instances++;
        if ((status == NS_OK) != valid &&
            !is_exception(group, json_string_value(
                                     json_object_get(test, "description"))))
            complain(group, test, valid ? err.text : "it is taken for valid");
    }
}

static void
the_validator_agrees_with_the_suite(void **state)
{
    static const struct count refused[] = {
        { "$ref", 45 },
        { "$dynamicRef", 3 },
        { "$id", 4 },
        { "$schema", 2 },
        { "pattern", 1 },
        { "patternProperties", 1 },
        { "unevaluatedItems", 26 },
        { "unevaluatedProperties", 41 },
    };
    struct score score = { 0 };

    (void)state;
    walk(&score, judge_validator);
    print_message("%u schemas, %u refused, %u instances\n", score.schemas,
                  score.refused, score.instances);
    compare_counts(&score, refused, sizeof(refused) / sizeof(*refused));
}

static void
judge_grammar(struct score *score, json_t *schema, json_t *tests,
              const char *group)
{
    struct ns_automaton *a = NULL;
    struct ns_grammar *grammar;
    struct ns_error err;

    if (ns_grammar_json_schema(schema, &grammar, &err) == NS_OK) {
        a = machine_over(grammar);
    } else if (strcmp(err.code, "unsupported") == 0) {
        count_refusal(score, &err);
        return;
    } else if (!strstr(err.text, "no text satisfies it")) {
        complain(group, NULL, err.text);
        return;
    }
    for (size_t i = 0; i < json_array_size(tests); i++) {
        json_t *test = json_array_get(tests, i);
        bool valid = json_is_true(json_object_get(test, "valid"));

        score->instances++;
        if ((a && takes(a, json_object_get(test, "data"))) != valid &&
            !is_exception(group, json_string_value(
                                     json_object_get(test, "description"))))
            complain(group, test, valid ? "it is refused" : "it is taken");
    }
    if (a)
        machine_finish(a, ns_automaton_start(a));
    ns_automaton_destroy(a);
}

static void
grammars_take_what_the_suite_calls_valid_and_nothing_else(void **state)
{
    static const struct count refused[] = {
        { "$ref", 47 },
        { "$dynamicRef", 3 },
        { "$id", 2 },
        { "$schema", 2 },
        { "contains", 17 },
        { "enum", 2 },
        { "multipleOf", 1 },
        { "not", 3 },
        { "oneOf", 2 },
        { "pattern", 1 },
        { "patternProperties", 1 },
        { "unevaluatedItems", 26 },
        { "unevaluatedProperties", 40 },
        { "uniqueItems", 3 },
    };
    struct score score = { 0 };

    (void)state;
    walk(&score, judge_grammar);
    print_message("%u schemas, %u refused, %u instances\n", score.schemas,
                  score.refused, score.instances);
    compare_counts(&score, refused, sizeof(refused) / sizeof(*refused));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_validator_agrees_with_the_suite),
        cmocka_unit_test(grammars_take_what_the_suite_calls_valid_and_nothing_else),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
