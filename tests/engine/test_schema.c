/* The grammar of a schema against the validator of schemas, which knows
 * nothing of it: what one lets through the other calls valid, and the other
 * way round. And what each refuses, and why. */
#include <math.h>
#include <stdio.h>

#include "base/reader.h"
#include "engine/decimal.h"
#include "engine/schema.h"
#include "tests/engine/machine.h"
#include "tests/fault.h"

static const char *const schemas[] = {
    "{\"type\":\"object\"}",
    "{\"type\":\"null\"}",
    "{\"type\":[\"string\",\"null\",\"integer\"]}",
    "{\"type\":\"boolean\"}",
    /* objects */
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},"
    "\"b\":{\"type\":\"string\"},\"c\":{\"type\":\"null\"}},"
    "\"required\":[\"b\"],\"additionalProperties\":false}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},"
    "\"ab\":{\"type\":\"boolean\"},\"\":true},\"required\":[\"z\"]}",
    "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"},"
    "\"minProperties\":2,\"maxProperties\":3}",
    "{\"type\":\"object\",\"properties\":{\"a\":true,\"b\":true,\"c\":true,"
    "\"d\":true},\"additionalProperties\":false,\"minProperties\":2,"
    "\"maxProperties\":3}",
    "{\"type\":\"object\",\"patternProperties\":{\"^x\":{\"type\":\"integer\"},"
    "\"y$\":{\"minimum\":3}},\"additionalProperties\":{\"type\":\"null\"}}",
    "{\"type\":\"object\",\"properties\":{\"xa\":{\"maximum\":9}},"
    "\"patternProperties\":{\"^x\":{\"type\":\"integer\"}},"
    "\"additionalProperties\":false}",
    "{\"type\":\"object\",\"propertyNames\":{\"pattern\":\"^[a-c]+$\","
    "\"maxLength\":2},\"properties\":{\"a\":true,\"d\":true}}",
    "{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"p\",\"q\"]},"
    "\"additionalProperties\":{\"type\":\"boolean\"}}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"null\"},\"b\":"
    "{\"type\":\"null\"},\"c\":{\"type\":\"null\"}},\"dependentRequired\":"
    "{\"a\":[\"b\",\"c\"]},\"additionalProperties\":false}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"null\"},\"b\":"
    "{\"type\":\"integer\"}},\"dependentSchemas\":{\"a\":{\"properties\":"
    "{\"b\":{\"minimum\":5}}}},\"additionalProperties\":false}",
    "{\"type\":\"object\",\"properties\":{\"say \\\"hi\\\"\\n\":"
    "{\"const\":\"\\u0001\\\\/\"},\"\\u00e4\":{\"const\":\"\\ud83d\\ude00\"}},"
    "\"additionalProperties\":false,\"required\":[\"\\u00e4\"]}",
    /* arrays */
    "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0,"
    "\"maximum\":9}}",
    "{\"type\":\"array\",\"items\":{\"type\":\"null\"},\"minItems\":2,"
    "\"maxItems\":4}",
    "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"string\"},"
    "{\"type\":\"integer\"}],\"items\":false}",
    "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"boolean\"}],\"items\":"
    "{\"type\":\"null\"},\"minItems\":1}",
    "{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":{\"enum\":"
    "[1,\"x\",null]},\"maxItems\":2},\"maxItems\":3}",
    "{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"b\",1,1.0,[2]]},"
    "\"uniqueItems\":true,\"minItems\":1,\"maxItems\":3}",
    "{\"type\":\"array\",\"items\":{\"enum\":[\"x\",null]},\"uniqueItems\":"
    "true}",
    /* strings */
    "{\"type\":\"string\",\"minLength\":2,\"maxLength\":4}",
    "{\"type\":\"string\",\"pattern\":\"^[a-z]+-[0-9]{2}$\"}",
    "{\"type\":\"string\",\"pattern\":\"ab|^c\",\"maxLength\":5}",
    "{\"type\":\"string\",\"pattern\":\"^(\\\\\\\\|\\\"|\\n|\\u00e9)*$\"}",
    "{\"type\":\"string\",\"not\":{\"pattern\":\"a\"},\"maxLength\":3}",
    "{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"ab\"]},\"pattern\":"
    "\"^[ab]{1,2}$\"}",
    "{\"type\":\"string\",\"allOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}],"
    "\"maxLength\":6}",
    "{\"type\":\"string\",\"format\":\"date\"}",
    "{\"type\":\"string\",\"format\":\"date-time\"}",
    "{\"type\":\"string\",\"format\":\"time\"}",
    "{\"type\":\"string\",\"format\":\"duration\"}",
    "{\"type\":\"string\",\"format\":\"uuid\"}",
    "{\"type\":\"string\",\"format\":\"ipv4\"}",
    "{\"type\":\"string\",\"format\":\"ipv6\"}",
    "{\"type\":\"string\",\"format\":\"email\"}",
    "{\"type\":\"string\",\"format\":\"hostname\"}",
    "{\"type\":\"string\",\"format\":\"uri\"}",
    "{\"type\":\"string\",\"format\":\"uri-reference\",\"maxLength\":9}",
    "{\"type\":\"string\",\"format\":\"json-pointer\"}",
    /* numbers */
    "{\"type\":\"integer\"}",
    "{\"type\":\"number\"}",
    "{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":107}",
    "{\"type\":\"integer\",\"minimum\":95}",
    "{\"type\":\"integer\",\"exclusiveMaximum\":-7}",
    "{\"type\":\"integer\",\"minimum\":1.5,\"maximum\":1e3}",
    "{\"type\":\"integer\",\"multipleOf\":7,\"minimum\":-50,\"maximum\":5000}",
    "{\"type\":\"integer\",\"multipleOf\":2.5}",
    "{\"type\":\"number\",\"minimum\":-0.75,\"maximum\":12.5}",
    "{\"type\":\"number\",\"exclusiveMinimum\":0,\"exclusiveMaximum\":1}",
    "{\"type\":\"number\",\"exclusiveMinimum\":0.1}",
    "{\"type\":\"number\",\"maximum\":-3.25}",
    "{\"type\":\"number\",\"multipleOf\":0.25,\"minimum\":-2,\"maximum\":2}",
    "{\"type\":\"number\",\"multipleOf\":0.01}",
    "{\"type\":\"number\",\"allOf\":[{\"multipleOf\":0.4},"
    "{\"multipleOf\":0.6}],\"minimum\":0,\"maximum\":100}",
    /* together */
    "{\"enum\":[1,2.5,\"x\",null,[1,{\"a\":2}],{\"b\":[],\"c\":{}},true]}",
    "{\"enum\":[1,20,\"x\",null],\"type\":[\"integer\",\"null\"],"
    "\"minimum\":5}",
    "{\"const\":{\"a\":[1,{\"b\":\"c\"}],\"d\":-0.5}}",
    "{\"anyOf\":[{\"type\":\"string\",\"maxLength\":1},{\"type\":\"integer\","
    "\"minimum\":10},{\"type\":\"object\",\"required\":[\"k\"]}]}",
    "{\"oneOf\":[{\"type\":\"integer\",\"multipleOf\":2},{\"type\":"
    "\"string\"}]}",
    "{\"type\":\"integer\",\"oneOf\":[{\"minimum\":2},{\"maximum\":5}],"
    "\"minimum\":-9,\"maximum\":9}",
    "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":"
    "\"a\"},\"x\":{\"type\":\"null\"}},\"required\":[\"kind\"],"
    "\"additionalProperties\":false},{\"type\":\"object\",\"properties\":"
    "{\"kind\":{\"const\":\"b\"},\"y\":{\"type\":\"null\"}},\"required\":"
    "[\"kind\",\"y\"],\"additionalProperties\":false}]}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"null\"},\"b\":"
    "{\"type\":\"null\"}},\"oneOf\":[{\"required\":[\"a\"]},{\"required\":"
    "[\"b\"]}],\"additionalProperties\":false}",
    "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"minimum\":3}},"
    "\"required\":[\"a\"]},{\"properties\":{\"a\":{\"type\":\"integer\"},"
    "\"b\":{\"type\":\"null\"}},\"additionalProperties\":false}]}",
    "{\"type\":\"object\",\"properties\":{\"kind\":{\"enum\":[\"p\",\"q\"]},"
    "\"n\":{\"type\":\"integer\"}},\"required\":[\"kind\"],\"if\":"
    "{\"properties\":{\"kind\":{\"const\":\"p\"}}},\"then\":{\"required\":"
    "[\"n\"]},\"else\":{\"properties\":{\"n\":{\"maximum\":0}}},"
    "\"additionalProperties\":false}",
    "{\"not\":{\"type\":[\"object\",\"array\",\"string\"]}}",
    "{\"type\":\"integer\",\"not\":{\"minimum\":3,\"maximum\":5},\"minimum\":"
    "0,\"maximum\":9}",
    "{\"not\":{\"enum\":[1,\"x\",null,true,3]},\"type\":[\"integer\","
    "\"boolean\",\"null\"],\"minimum\":-2,\"maximum\":4}",
    "{\"type\":\"object\",\"not\":{\"required\":[\"a\",\"b\"]},\"properties\":"
    "{\"a\":{\"type\":\"null\"},\"b\":{\"type\":\"null\"}},"
    "\"additionalProperties\":false}",
    "{\"type\":\"integer\",\"nullable\":true,\"minimum\":3}",
    "{\"not\":{\"type\":[\"string\",\"object\",\"array\"],\"nullable\":true}}",
    /* recursion */
    "{\"$ref\":\"#/$defs/node\",\"$defs\":{\"node\":{\"type\":\"object\","
    "\"properties\":{\"value\":{\"type\":\"boolean\"},\"next\":{\"anyOf\":"
    "[{\"$ref\":\"#/$defs/node\"},{\"type\":\"null\"}]}},\"required\":"
    "[\"value\"],\"additionalProperties\":false}}}",
    "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"array\",\"items\":"
    "{\"$ref\":\"#\"}}]}",
    "{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/a~1b%25\"},\"$defs\":"
    "{\"a/b%\":{\"$ref\":\"#tail\"},\"c\":{\"$anchor\":\"tail\",\"enum\":"
    "[1,2]}}}",
};
enum { N_SCHEMAS = sizeof(schemas) / sizeof(*schemas) };

static uint64_t seed;

static uint32_t
draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static json_t *
parsed(const char *text)
{
    json_error_t fault;
    json_t *value =
        json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &fault);

    if (!value)
        fail_msg("%s: %s", text, fault.text);
    return value;
}

static struct ns_automaton *
automaton_of(const json_t *schema, const char *text)
{
    struct ns_grammar *grammar;
    struct ns_error err;

    if (ns_grammar_json_schema(schema, &grammar, &err) != NS_OK)
        fail_msg("%s: %s", text, err.text);
    return machine_over(grammar);
}

/* --- from the automaton to the validator */

enum { MAX_TEXT = 4096 };

/* Random bytes for a while, then the shortest end. Ways that go on for ever
 * are no more likely than the others. */
static size_t
random_text(struct ns_automaton *a, char text[MAX_TEXT])
{
    uint32_t state = ns_automaton_start(a), steps = draw(120);
    size_t n = 0;

    while (n < steps && !ns_automaton_ended(a, state)) {
        uint8_t byte[256];
        uint32_t n_bytes = 0, to;

        if (ns_automaton_accepts(a, state) && draw(4) == 0)
            break;
        for (unsigned i = 0; i < 256; i++)
            if (ns_automaton_next(a, state, (uint8_t)i) != NS_AUTOMATON_DEAD)
                byte[n_bytes++] = (uint8_t)i;
        /* Half of the time the end of the list of bytes is left to chance
         * among punctuation: else it would be letters and nothing more. */
        to = draw(n_bytes);
        for (uint32_t tries = 0; tries < 3 && draw(2); tries++)
            if (!strchr("\",:{}[]-.", byte[to]))
                to = draw(n_bytes);
        text[n++] = (char)byte[to];
        state = ns_automaton_next(a, state, byte[to]);
        assert_int_not_equal(state, NS_AUTOMATON_FULL);
    }
    assert_true(n + ns_automaton_rest(a, state) < MAX_TEXT);
    while (ns_automaton_rest(a, state) > 0) {
        text[n] = (char)ns_automaton_shortest(a, state);
        state = ns_automaton_next(a, state, (uint8_t)text[n++]);
    }
    assert_true(ns_automaton_accepts(a, state));
    text[n] = '\0';
    return n;
}

static void
every_walk_ends_in_a_valid_document(void **state)
{
    unsigned doubled = 0, all = 0;

    (void)state;
    seed = 1;
    for (size_t i = 0; i < N_SCHEMAS; i++) {
        json_t *schema = parsed(schemas[i]);
        struct ns_automaton *a = automaton_of(schema, schemas[i]);

        for (int k = 0; k < 200; k++) {
            char text[MAX_TEXT];
            size_t n = random_text(a, text);
            json_error_t fault;
            struct ns_error err;
            json_t *value = json_loadb(
                text, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &fault);

            all++;
            if (!value && strstr(fault.text, "duplicate object key")) {
                doubled++; /* of names that are not declared: as it says */
                continue;
            }
            if (!value)
                fail_msg("%s: %s: %s", schemas[i], text, fault.text);
            if (ns_schema_check(schema, value, &err) != NS_OK)
                fail_msg("%s: %s: %s", schemas[i], text, err.text);
            json_decref(value);
        }
        ns_automaton_destroy(a);
        json_decref(schema);
    }
    assert_true(doubled < all / 50);
}

/* --- and back: documents that were changed */

static void
put_value(char *text, json_t *value)
{
    char number[NS_NUMBER_TEXT], *spelled;
    bool list = json_is_array(value);
    size_t n = 0;

    assert_true(strlen(text) < MAX_TEXT - 300);
    if (list || json_is_object(value)) {
        strcat(text, list ? "[" : "{");
        for (size_t i = 0; i < json_array_size(value); i++) {
            strcat(text, i ? "," : "");
            put_value(text, json_array_get(value, i));
        }
        for (void *i = json_object_iter(value); i;
             i = json_object_iter_next(value, i)) {
            json_t *key = json_string(json_object_iter_key(i));

            strcat(text, n++ ? "," : "");
            put_value(text, key);
            strcat(text, ":");
            put_value(text, json_object_iter_value(i));
            json_decref(key);
        }
        strcat(text, list ? "]" : "}");
        return;
    }
    spelled = json_is_number(value)
                  ? strdup(ns_number_text(value, number))
                  : json_dumps(value, JSON_ENCODE_ANY);
    assert_true(strlen(text) + strlen(spelled) < MAX_TEXT - 100);
    strcat(text, spelled);
    free(spelled);
}

static json_t *
random_value(void)
{
    static const char *const value[] = {
        "null", "true", "0", "-1", "1", "3", "5", "7", "99", "1.5", "0.25",
        "-3.5", "\"\"", "\"a\"", "\"ab\"", "\"x\"", "[]", "{}", "[null]",
        "{\"a\":1}", "{\"k\":null}",
    };

    return parsed(value[draw(sizeof(value) / sizeof(*value))]);
}

/* A value like it (owned): something in it is another. */
static json_t *
changed(json_t *value)
{
    size_t n = json_is_array(value) ? json_array_size(value)
                                    : json_object_size(value);
    json_t *copy = json_deep_copy(value), *inner;
    size_t at = n ? draw((uint32_t)n) : 0;
    const char *name = NULL;
    char text[MAX_TEXT];

    assert_non_null(copy);
    for (void *i = json_object_iter(copy); i;
         i = json_object_iter_next(copy, i))
        if (at-- == 0)
            name = json_object_iter_key(i);
    /* Of numbers, those that have one text in every schema here. */
    if (draw(8) == 0 || json_is_null(value) || json_is_boolean(value) ||
        (json_is_number(value) && (strlen(ns_number_text(value, text)) > 10 ||
                                   strchr(text, 'e')))) {
        json_decref(copy);
        return random_value();
    }
    if (json_is_number(value)) {
        double other = floor(json_number_value(value) * 4) / 4 +
                       ((double)draw(9) - 4) / (draw(2) ? 1 : 4);

        json_decref(copy);
        return other == floor(other) ? json_integer((json_int_t)other)
                                     : json_real(other);
    }
    if (json_is_string(value)) {
        size_t length = json_string_length(value);

        json_decref(copy);
        snprintf(text, sizeof(text), "%s%s", json_string_value(value),
                 draw(2) ? "a" : "-");
        if (draw(2) && length > 0 && !(text[length - 1] & 0x80))
            text[length - 1] = '\0';
        return json_string(text);
    }
    if (json_is_array(value)) {
        if (n == 0 || draw(4) == 0)
            json_array_append_new(copy, random_value());
        else if (draw(3) == 0)
            json_array_remove(copy, draw((uint32_t)n));
        else if (draw(3) == 0)
            json_array_append(copy, json_array_get(copy, 0));
        else {
            at = draw((uint32_t)n);
            inner = changed(json_array_get(value, at));
            json_array_set_new(copy, at, inner);
        }
        return copy;
    }
    if (n == 0 || draw(4) == 0) {
        static const char *const names[] = { "zz", "xx", "zy", "k", "aa" };

        json_object_set_new(copy, names[draw(5)], random_value());
    } else if (draw(3) == 0) {
        json_object_del(copy, name);
    } else {
        inner = changed(json_object_get(value, name));
        json_object_set_new(copy, name, inner);
    }
    return copy;
}

static void
a_changed_document_is_judged_alike(void **state)
{
    unsigned valid = 0, invalid = 0;

    (void)state;
    seed = 2;
    for (size_t i = 0; i < N_SCHEMAS; i++) {
        json_t *schema = parsed(schemas[i]);
        struct ns_automaton *a = automaton_of(schema, schemas[i]);

        for (int k = 0; k < 300; k++) {
            char text[MAX_TEXT], again[MAX_TEXT] = "";
            size_t n = random_text(a, text);
            json_t *value = json_loadb(
                text, n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
            json_t *other;
            struct ns_error err;
            bool is_valid;

            if (!value)
                continue; /* a name that came twice */
            other = changed(value);
            put_value(again, other);
            is_valid = ns_schema_check(schema, other, &err) == NS_OK;
            if (is_valid != machine_accepts(a, again))
                fail_msg("%s: %s is %s", schemas[i], again,
                         is_valid ? "valid, and refused"
                                  : "not valid, and taken");
            valid += is_valid;
            invalid += !is_valid;
            json_decref(value);
            json_decref(other);
        }
        ns_automaton_destroy(a);
        json_decref(schema);
    }
    assert_true(valid > 2000 && invalid > 2000);
}

/* --- what stands in documents */

static void
white_space_is_free_and_bounded(void **state)
{
    static const char *const yes[] = {
        "{\"a\":1,\"b\":[1,2]}",
        "{\"a\": 1, \"b\": [1, 2]}",
        "{\n  \"a\": 1,\n  \"b\": [\n    1,\n    2\n  ]\n}",
        "{\n\"a\":1,\n\"b\":[]}",
        "{\n                                \"a\":1,\"b\":[]}",
    };
    static const char *const no[] = {
        " {\"a\":1,\"b\":[]}",
        "{\"a\":1,\"b\":[]} ",
        "{\"a\":1,\"b\":[]}\n",
        "{ \"a\":1,\"b\":[]}",
        "{\"a\" :1,\"b\":[]}",
        "{\"a\":  1,\"b\":[]}",
        "{\"a\":1,  \"b\":[]}",
        "{\"a\":1 ,\"b\":[]}",
        "{\n\n\"a\":1,\"b\":[]}",
        "{\n                                 \"a\":1,\"b\":[]}",
        "{\t\"a\":1,\"b\":[]}",
        "{\"a\":1,\"b\":[ ]}",
        "{\"a\":1,\"b\":[\n]}",
    };
    json_t *schema = parsed(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},"
        "\"b\":{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}},"
        "\"required\":[\"a\",\"b\"],\"additionalProperties\":false}");
    struct ns_automaton *a = automaton_of(schema, "white space");

    (void)state;
    for (size_t i = 0; i < sizeof(yes) / sizeof(*yes); i++)
        if (!machine_accepts(a, yes[i]))
            fail_msg("refused: %s", yes[i]);
    for (size_t i = 0; i < sizeof(no) / sizeof(*no); i++)
        if (machine_accepts(a, no[i]))
            fail_msg("taken: %s", no[i]);
    ns_automaton_destroy(a);
    json_decref(schema);
}

static void
strings_are_spelled_in_every_way_that_json_has(void **state)
{
    static const char *const yes[] = {
        "\"a\\u00e9\\/\"", "\"a\xc3\xa9/\"", "\"\\u0061\\u00E9\\u002f\"",
    };
    static const char *const no[] = {
        "\"a\\u00e8/\"", "\"a\\ud83d/\"", "\"a\\xe9/\"", "\"a\xe9/\"",
        "\"ae/\"", "'a'",
    };
    static const char *const whole[] = {
        "\"\\ud83d\\uDE00\"", "\"\xf0\x9f\x98\x80\"", "\"\\\"\\\\\\b\\f\"",
        "\"\\u0001\x7f\"", "\"\"",
    };
    static const char *const torn[] = {
        "\"\\ud83d\"", "\"\\ude00\"", "\"\\ud83d\\ud83d\"", "\"\\ud83dx\"",
        "\"\\u0000\"", "\"\n\"", "\"\x01\"", "\"\\\"", "\"\\u12\"", "\"\\a\"",
        "\"\xed\xa0\xbd\"", "\"\xc3\"", "\"\xf5\x80\x80\x80\"",
    };
    json_t *schema = parsed("{\"type\":\"string\",\"pattern\":"
                            "\"^a\\u00e9/$\"}");
    struct ns_automaton *a = automaton_of(schema, "a pattern");

    (void)state;
    for (size_t i = 0; i < sizeof(yes) / sizeof(*yes); i++)
        assert_true(machine_accepts(a, yes[i]));
    for (size_t i = 0; i < sizeof(no) / sizeof(*no); i++)
        assert_false(machine_accepts(a, no[i]));
    ns_automaton_destroy(a);
    json_decref(schema);
    schema = parsed("{\"type\":\"string\"}");
    a = automaton_of(schema, "any string");
    for (size_t i = 0; i < sizeof(whole) / sizeof(*whole); i++)
        assert_true(machine_accepts(a, whole[i]));
    for (size_t i = 0; i < sizeof(torn) / sizeof(*torn); i++)
        assert_false(machine_accepts(a, torn[i]));
    ns_automaton_destroy(a);
    json_decref(schema);
}

static void
whole_numbers_lie_within_64_bits(void **state)
{
    static const char *const schema[] = {
        "{\"type\":\"integer\"}",
        "{\"type\":\"integer\",\"minimum\":-1e20,\"maximum\":1e20}",
        "{\"type\":\"integer\",\"multipleOf\":1}",
        "{\"type\":\"integer\",\"exclusiveMaximum\":9.3e18}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(schema) / sizeof(*schema); i++) {
        json_t *value = parsed(schema[i]);
        struct ns_automaton *a = automaton_of(value, schema[i]);

        assert_true(machine_accepts(a, "9223372036854775807"));
        assert_true(machine_accepts(a, "-9223372036854775807"));
        assert_true(machine_accepts(a, "0"));
        assert_false(machine_accepts(a, "9223372036854775808"));
        assert_false(machine_accepts(a, "-9223372036854775808"));
        assert_false(machine_accepts(a, "9999999999999999999"));
        assert_false(machine_accepts(a, "10000000000000000000"));
        assert_false(machine_accepts(a, "-0"));
        assert_false(machine_accepts(a, "00"));
        assert_false(machine_accepts(a, "1.0"));
        ns_automaton_destroy(a);
        json_decref(value);
    }
}

static void
members_come_in_the_order_of_the_schema_and_others_behind(void **state)
{
    json_t *schema = parsed("{\"type\":\"object\",\"properties\":{\"b\":true,"
                            "\"a\":true},\"required\":[\"c\"]}");
    struct ns_automaton *a = automaton_of(schema, "order");

    (void)state;
    assert_true(machine_accepts(a, "{\"b\":1,\"a\":2,\"c\":3}"));
    assert_true(machine_accepts(a, "{\"a\":2,\"c\":3,\"z\":1,\"y\":1}"));
    assert_false(machine_accepts(a, "{\"a\":2,\"b\":1,\"c\":3}"));
    assert_false(machine_accepts(a, "{\"c\":3,\"b\":1}"));
    assert_false(machine_accepts(a, "{\"c\":3,\"c\":3}"));
    assert_false(machine_accepts(a, "{\"c\":3,\"\\u0061\":3}"));
    ns_automaton_destroy(a);
    json_decref(schema);
}

static void
any_object_is_an_object(void **state)
{
    struct ns_grammar *grammar;
    struct ns_automaton *a;
    struct ns_error err;
    char deep[2100];

    (void)state;
    assert_int_equal(ns_grammar_json_object(&grammar, &err), NS_OK);
    a = machine_over(grammar);
    assert_true(machine_accepts(a, "{}"));
    assert_true(machine_accepts(
        a, "{\"a\":[1,-2.5e-3,null,true,{\"\":\"x\"}],\"b\":{}}"));
    assert_false(machine_accepts(a, "[]"));
    assert_false(machine_accepts(a, "{\"a\":[1}"));
    assert_false(machine_accepts(a, "{\"a\":01}"));
    /* Any depth: brackets close as they were opened. */
    strcpy(deep, "{\"a\":");
    memset(deep + 5, '[', 1000);
    memset(deep + 1005, ']', 1000);
    strcpy(deep + 2005, "}");
    assert_true(machine_accepts(a, deep));
    deep[2004] = '}';
    assert_false(machine_accepts(a, deep));
    assert_int_equal(ns_automaton_rest(a, machine_run(a, deep, 1005)), 1001);
    ns_automaton_destroy(a);
}

/* --- what is refused */

static void
what_cannot_be_held_to_is_refused_by_name(void **state)
{
    static const struct {
        const char *schema, *code, *why;
    } cases[] = {
        { "7", "bad_param", "neither an object" },
        { "false", "bad_param", "no text satisfies it" },
        { "{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "bad_param",
          "no text satisfies it" },
        { "{\"type\":\"object\",\"required\":[\"a\"],\"properties\":{\"a\":"
          "false}}", "bad_param", "no text satisfies it" },
        { "{\"type\":\"strin\"}", "bad_param", "schema#: type: there is no" },
        { "{\"properties\":{\"a\":{\"type\":7}}}", "bad_param",
          "schema#/properties/a: type:" },
        { "{\"minLength\":-1}", "bad_param", "schema#: minLength:" },
        { "{\"minLength\":1.5}", "bad_param", "schema#: minLength:" },
        { "{\"required\":[1]}", "bad_param", "schema#: required:" },
        { "{\"properties\":{\"a\":1}}", "bad_param", "schema#: properties:" },
        { "{\"not\":{\"required\":[1]}}", "bad_param",
          "schema#/not: required:" },
        { "{\"if\":{\"properties\":{\"a\":{\"enum\":1}}},\"then\":true}",
          "bad_param", "schema#/if/properties/a: enum:" },
        { "{\"anyOf\":[]}", "bad_param", "schema#: anyOf:" },
        { "{\"items\":[{}]}", "bad_param", "schema#: items:" },
        { "{\"enum\":7}", "bad_param", "enum" },
        { "{\"multipleOf\":0}", "bad_param", "multipleOf: it is not above 0" },
        { "{\"pattern\":\"(\"}", "bad_param", "schema#: pattern: " },
        { "{\"$ref\":\"#/$defs/a\"}", "bad_param", "names nothing" },
        { "{\"$ref\":7}", "bad_param", "$ref" },
        { "{\"$ref\":\"http://other/\"}", "unsupported",
          "leads out of the schema" },
        { "{\"$ref\":\"#\"}", "unsupported", "refers to itself" },
        { "{\"anyOf\":[{\"type\":\"null\"},{\"$ref\":\"#\"}]}", "unsupported",
          "refers to itself" },
        { "{\"$ref\":\"#/$defs/a\",\"$defs\":{\"a\":{\"$ref\":\"#/$defs/b\"},"
          "\"b\":{\"$ref\":\"#/$defs/a\"}}}", "unsupported",
          "refers to itself" },
        { "{\"properties\":{\"a\":{\"pattern\":\"(?=a)\"}}}", "unsupported",
          "schema#/properties/a: pattern: pattern, byte 3: look-around" },
        { "{\"format\":\"color\"}", "unsupported", "schema#: format:" },
        { "{\"minLenght\":1}", "unsupported", "schema#: minLenght: it is not "
                                              "known here" },
        { "{\"items\":{\"$recursiveRef\":\"#\"}}", "unsupported",
          "schema#/items: $recursiveRef" },
        { "{\"type\":\"array\",\"uniqueItems\":true}", "unsupported",
          "schema#: uniqueItems: it can be enforced where `enum` lists" },
        { "{\"type\":\"array\",\"contains\":{}}", "unsupported", "contains" },
        { "{\"type\":\"object\",\"unevaluatedProperties\":false}",
          "unsupported", "unevaluatedProperties" },
        { "{\"oneOf\":[{\"items\":{\"type\":\"null\"}},{\"items\":{\"type\":"
          "\"null\"}}]}", "unsupported", "schema#: oneOf:" },
        { "{\"not\":{\"multipleOf\":2}}", "unsupported", "schema#: not:" },
        { "{\"type\":\"number\",\"multipleOf\":0.1234}", "unsupported",
          "multipleOf" },
        { "{\"type\":\"integer\",\"multipleOf\":1001}", "unsupported",
          "multipleOf" },
        { "{\"$schema\":\"urn:own\"}", "unsupported", "$schema" },
        { "{\"items\":{\"$id\":\"x\"}}", "unsupported", "schema#/items: $id" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        json_t *schema = parsed(cases[i].schema);
        struct ns_grammar *grammar;
        struct ns_error err;

        if (ns_grammar_json_schema(schema, &grammar, &err) != NS_REJECT)
            fail_msg("%s was not refused", cases[i].schema);
        if (strcmp(err.code, cases[i].code) || !strstr(err.text, cases[i].why))
            fail_msg("%s: %s: %s", cases[i].schema, err.code, err.text);
        json_decref(schema);
    }
}

/* A keyword that cannot be enforced is no matter where it says nothing. */
static void
what_says_nothing_of_the_kind_at_hand_is_let_by(void **state)
{
    static const char *const fine[] = {
        "{\"type\":\"string\",\"uniqueItems\":true}",
        "{\"type\":\"array\",\"uniqueItems\":false}",
        "{\"enum\":[[1,2],[1,1]],\"uniqueItems\":true}",
        "{\"enum\":[1,2,3],\"not\":{\"multipleOf\":2}}",
        "{\"$id\":\"urn:x\",\"properties\":{\"a\":{\"$ref\":\"urn:x#/$defs/b\"}"
        "},\"$defs\":{\"b\":{\"type\":\"null\"}}}",
        "{\"title\":\"t\",\"description\":\"d\",\"default\":1,\"examples\":[2],"
        "\"$comment\":\"c\",\"deprecated\":true,\"readOnly\":true,"
        "\"$schema\":\"https://json-schema.org/draft/2020-12/schema\"}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(fine) / sizeof(*fine); i++) {
        json_t *schema = parsed(fine[i]);

        ns_automaton_destroy(automaton_of(schema, fine[i]));
        json_decref(schema);
    }
}

/* --- what is too large */

static void
refused_for_its_size(json_t *schema, const char *why)
{
    struct ns_grammar *grammar;
    struct ns_error err;

    assert_non_null(schema);
    if (ns_grammar_json_schema(schema, &grammar, &err) != NS_REJECT)
        fail_msg("not refused: %s", why);
    if (strcmp(err.code, "grammar_limit") || !strstr(err.text, why))
        fail_msg("%s: %s, not %s", err.code, err.text, why);
    json_decref(schema);
}

static void
what_is_too_large_is_refused_with_the_limit(void **state)
{
    json_t *schema, *part, *list;
    char *huge = malloc((1 << 20) + 1), name[40];

    (void)state;
    assert_non_null(huge);
    refused_for_its_size(parsed("{\"type\":\"array\",\"items\":{},"
                                "\"maxItems\":1000000}"), "instructions");
    refused_for_its_size(parsed("{\"type\":\"string\",\"maxLength\":1000000}"),
                         "maxLength: it compiles to more than 262144");
    refused_for_its_size(parsed("{\"type\":\"object\",\"maxProperties\":"
                                "1000000}"), "maxProperties");
    refused_for_its_size(parsed("{\"pattern\":\"(a|b)*a(a|b){20}\"}"),
                         "schema#: pattern: a set of strings");
    refused_for_its_size(parsed("{\"pattern\":\"(a{1000}){1000}\"}"),
                         "pattern: it compiles to more than 262144");
    /* Patterns that are within it one by one. */
    schema = json_object();
    for (int i = 0; i < 2000; i++) {
        snprintf(name, sizeof(name), "^(a|b)*a(a|b){12}c{%d}$", i);
        json_object_set_new(schema, name, json_pack("{s:s,s:i}", "pattern", name,
                                                    "maxLength", 3));
    }
    refused_for_its_size(json_pack("{s:s,s:o,s:b}", "type", "object",
                                   "properties", schema,
                                   "additionalProperties", 0),
                         "patterns and names together");
    /* Alternatives that each have to be held against each other. */
    list = json_array();
    for (int i = 0; i < 3000; i++)
        json_array_append_new(
            list, json_pack("{s:s,s:{s:{s:i}},s:[s]}", "type", "object",
                            "properties", "k", "const", i, "required", "k"));
    refused_for_its_size(json_pack("{s:o}", "oneOf", list), "steps");
    /* An enum of a megabyte in one text. */
    memset(huge, 'x', 1 << 20);
    huge[1 << 20] = '\0';
    refused_for_its_size(json_pack("{s:[s]}", "enum", huge), "instructions");
    free(huge);
    /* Alternatives of alternatives: 2^12 combinations. */
    list = json_array();
    for (int i = 0; i < 12; i++) {
        snprintf(name, sizeof(name), "p%d", i);
        json_array_append_new(
            list, json_pack("{s:[{s:[s]},{s:i}]}", "anyOf", "required", name,
                            "maxProperties", i));
    }
    refused_for_its_size(json_pack("{s:o}", "allOf", list),
                         "1024 combinations");
    /* A schema inside a schema, in its place, 100 times. */
    schema = json_pack("{s:s}", "type", "null");
    for (int i = 0; i < 100; i++)
        schema = json_pack("{s:[o]}", "allOf", schema);
    refused_for_its_size(schema, "64 schemas in place");
    /* Documents that double with every level. */
    schema = json_object();
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof(name), "#/$defs/d%d", i + 1);
        part = json_pack("{s:s,s:i,s:{s:s}}", "type", "array", "minItems", 2,
                         "items", "$ref", name);
        snprintf(name, sizeof(name), "d%d", i);
        json_object_set_new(schema, name, part);
    }
    json_object_set_new(schema, "d40", json_pack("{s:s}", "type", "null"));
    refused_for_its_size(json_pack("{s:s,s:o}", "$ref", "#/$defs/d0", "$defs",
                                   schema), "1048576 bytes");
}

static void
a_deep_schema_is_no_deep_stack(void **state)
{
    json_t *schema = json_pack("{s:s}", "type", "null");
    struct ns_automaton *a;

    (void)state;
    for (int i = 0; i < 1500; i++)
        schema = json_pack("{s:s,s:o,s:i}", "type", "array", "items", schema,
                           "minItems", 1);
    a = automaton_of(schema, "1500 lists");
    assert_int_equal(ns_automaton_rest(a, ns_automaton_start(a)), 3004);
    machine_finish(a, ns_automaton_start(a));
    ns_automaton_destroy(a);
    json_decref(schema);
}

static void
a_long_enum_and_a_wide_object_are_small(void **state)
{
    json_t *list = json_array(), *named = json_object(), *schema;
    struct ns_automaton *a;
    char name[40];

    (void)state;
    for (int i = 0; i < 5000; i++) {
        snprintf(name, sizeof(name), "value number %d", i * 7919);
        json_array_append_new(list, json_string(name));
    }
    for (int i = 0; i < 1000; i++) {
        snprintf(name, sizeof(name), "property number %d", i);
        json_object_set_new(named, name,
                            json_pack("{s:s}", "$ref", "#/$defs/value"));
    }
    schema = json_pack("{s:s,s:o,s:{s:{s:o}}}", "type", "object", "properties",
                       named, "$defs", "value", "enum", list);
    a = automaton_of(schema, "wide");
    assert_true(machine_accepts(
        a, "{\"property number 7\":\"value number 7919\","
           "\"property number 999\":\"value number 0\",\"others\":[]}"));
    assert_false(machine_accepts(
        a, "{\"property number 7\":\"value number 7918\"}"));
    ns_automaton_destroy(a);
    json_decref(schema);
}

static void
one_schema_is_one_hash(void **state)
{
    unsigned char hash[2][16];

    (void)state;
    for (size_t i = 0; i < N_SCHEMAS; i++) {
        for (int k = 0; k < 2; k++) {
            json_t *schema = parsed(schemas[i]);
            struct ns_grammar *grammar;
            struct ns_error err;

            assert_int_equal(ns_grammar_json_schema(schema, &grammar, &err),
                             NS_OK);
            ns_grammar_hash(grammar, hash[k]);
            ns_grammar_destroy(grammar);
            json_decref(schema);
        }
        assert_memory_equal(hash[0], hash[1], 16);
    }
}

static void
memory_that_runs_out_is_fatal_wherever_it_does(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SCHEMAS; i++) {
        json_t *schema = parsed(schemas[i]);
        enum ns_status status;
        struct ns_error err;

        for (int n = 0;; n += 1 + n / 8) {
            struct ns_grammar *grammar = NULL;

            fault_arm(n);
            status = ns_grammar_json_schema(schema, &grammar, &err);
            if (!fault_fired()) {
                assert_int_equal(status, NS_OK);
                ns_grammar_destroy(grammar);
                break;
            }
            if (status != NS_FATAL)
                fail_msg("%s: allocation %d: %d", schemas[i], n, status);
            assert_null(grammar);
        }
        json_decref(schema);
    }
}

/* --- the validator by itself */

static void
the_validator_names_the_place_and_the_keyword(void **state)
{
    static const struct {
        const char *schema, *value, *why;
    } cases[] = {
        { "{\"type\":\"object\"}", "[]",
          "the document: type: \"object\" wanted, it is a list" },
        { "{\"properties\":{\"a\":{\"items\":{\"minimum\":3}}}}",
          "{\"a\":[5,4,2]}", "/a/2: minimum: 3 wanted, it is 2" },
        { "{\"required\":[\"a\",\"b/c~\"]}", "{\"a\":1}",
          "/b~1c~0: required: true wanted, it is missing" },
        { "{\"additionalProperties\":false}", "{\"x\":1}", "/x: false" },
        { "{\"enum\":[1,2]}", "3", "enum" },
        { "{\"oneOf\":[{},{}]}", "3", "oneOf" },
        { "{\"propertyNames\":{\"maxLength\":1}}", "{\"ab\":1}",
          "/ab: maxLength: 1 wanted, it is \"ab\"" },
        { "{\"format\":\"date\"}", "\"2023-02-29\"", "format" },
        { "{\"uniqueItems\":true}", "[1,2,1.0]", "uniqueItems" },
        { "{\"contains\":{\"const\":1},\"maxContains\":1}", "[1,1]",
          "contains" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        json_t *schema = parsed(cases[i].schema);
        json_t *value = parsed(cases[i].value);
        struct ns_error err;

        assert_int_equal(ns_schema_check(schema, value, &err), NS_REJECT);
        assert_string_equal(err.code, "schema");
        if (!strstr(err.text, cases[i].why))
            fail_msg("%s: %s", cases[i].schema, err.text);
        json_decref(schema);
        json_decref(value);
    }
}

/* A result row takes well-formed UTF-8 alone, however long a name is. */
static void
an_error_is_text_wherever_it_is_cut(void **state)
{
    (void)state;
    for (size_t shift = 0; shift < 4; shift++) {
        char name[512] = "ab\x01\n";
        json_t *schema, *value;
        struct ns_grammar *grammar;
        struct ns_error err;

        name[shift] = '\0';
        while (strlen(name) < 400)
            strcat(name, "\xf0\x9f\x98\x80");
        schema = json_pack("{s:{s:{s:i}}}", "properties", name, name, 1);
        value = json_pack("{s:i}", name, 1);
        assert_int_equal(ns_grammar_json_schema(schema, &grammar, &err),
                         NS_REJECT);
        assert_int_equal(ns_utf8_span(err.text, strlen(err.text)),
                         strlen(err.text));
        assert_int_equal(ns_utf8_span(err.param, strlen(err.param)),
                         strlen(err.param));
        assert_int_equal(ns_schema_check(schema, value, &err), NS_REJECT);
        assert_int_equal(ns_utf8_span(err.text, strlen(err.text)),
                         strlen(err.text));
        json_decref(schema);
        schema = json_pack("{s:{s:b}}", "properties", name, 0);
        assert_int_equal(ns_schema_check(schema, value, &err), NS_REJECT);
        assert_int_equal(ns_utf8_span(err.text, strlen(err.text)),
                         strlen(err.text));
        json_decref(schema);
        json_decref(value);
    }
}

static void
the_validator_refuses_schemas_that_it_cannot_judge_by(void **state)
{
    static const struct {
        const char *schema, *code, *why;
    } cases[] = {
        { "{\"minLenght\":1}", "unsupported", "minLenght" },
        { "{\"unevaluatedItems\":false}", "unsupported", "unevaluatedItems" },
        { "{\"format\":\"color\"}", "unsupported", "format" },
        { "{\"$ref\":\"other#\"}", "unsupported", "$ref" },
        { "{\"type\":\"strin\"}", "bad_param", "type" },
        { "{\"minimum\":\"a\"}", "bad_param", "minimum" },
        { "{\"allOf\":{}}", "bad_param", "allOf" },
        { "{\"allOf\":[7]}", "bad_param", "a schema" },
        { "{\"pattern\":\"[\"}", "bad_param", "pattern" },
        { "{\"$ref\":\"#/a\"}", "bad_param", "$ref" },
        { "{\"$ref\":\"#\"}", "grammar_limit", "1000" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        json_t *schema = parsed(cases[i].schema), *value = json_string("a");
        struct ns_error err;

        assert_int_equal(ns_schema_check(schema, value, &err), NS_REJECT);
        if (strcmp(err.code, cases[i].code) || !strstr(err.text, cases[i].why))
            fail_msg("%s: %s: %s", cases[i].schema, err.code, err.text);
        json_decref(schema);
        json_decref(value);
    }
}

static void
the_validator_is_bounded_in_time(void **state)
{
    json_t *list = json_array(), *schema = parsed("{\"uniqueItems\":true}");
    json_t *doubling = json_object(), *part;
    struct ns_error err;
    char name[40];

    (void)state;
    for (int i = 0; i < 10000; i++)
        json_array_append_new(list, json_integer(i));
    assert_int_equal(ns_schema_check(schema, list, &err), NS_REJECT);
    assert_string_equal(err.code, "grammar_limit");
    json_decref(schema);
    /* Each level is asked twice by the one above: 2^60. */
    for (int i = 0; i < 60; i++) {
        snprintf(name, sizeof(name), "#/$defs/d%d", i + 1);
        part = json_pack("{s:[{s:s},{s:s}]}", "allOf", "$ref", name, "$ref",
                         name);
        snprintf(name, sizeof(name), "d%d", i);
        json_object_set_new(doubling, name, part);
    }
    json_object_set_new(doubling, "d60", json_true());
    schema = json_pack("{s:s,s:o}", "$ref", "#/$defs/d0", "$defs", doubling);
    assert_int_equal(ns_schema_check(schema, list, &err), NS_REJECT);
    assert_string_equal(err.code, "grammar_limit");
    json_decref(schema);
    json_decref(list);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_walk_ends_in_a_valid_document),
        cmocka_unit_test(a_changed_document_is_judged_alike),
        cmocka_unit_test(white_space_is_free_and_bounded),
        cmocka_unit_test(strings_are_spelled_in_every_way_that_json_has),
        cmocka_unit_test(whole_numbers_lie_within_64_bits),
        cmocka_unit_test(members_come_in_the_order_of_the_schema_and_others_behind),
        cmocka_unit_test(any_object_is_an_object),
        cmocka_unit_test(what_cannot_be_held_to_is_refused_by_name),
        cmocka_unit_test(what_says_nothing_of_the_kind_at_hand_is_let_by),
        cmocka_unit_test(what_is_too_large_is_refused_with_the_limit),
        cmocka_unit_test(a_deep_schema_is_no_deep_stack),
        cmocka_unit_test(a_long_enum_and_a_wide_object_are_small),
        cmocka_unit_test(one_schema_is_one_hash),
        cmocka_unit_test(memory_that_runs_out_is_fatal_wherever_it_does),
        cmocka_unit_test(the_validator_names_the_place_and_the_keyword),
        cmocka_unit_test(an_error_is_text_wherever_it_is_cut),
        cmocka_unit_test(the_validator_refuses_schemas_that_it_cannot_judge_by),
        cmocka_unit_test(the_validator_is_bounded_in_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
