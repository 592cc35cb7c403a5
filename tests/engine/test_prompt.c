#include "engine/prompt.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/fault.h"
#include "tests/lines.h"

#define TINY "tests/cases/tokenizer/tiny/tokenizer.json"

static struct ns_tokenizer *tiny, *real;

static json_t *
json_of(const char *text)
{
    json_error_t why;
    json_t *value = json_loads(text, JSON_DECODE_ANY, &why);

    if (!value)
        fail_msg("%s in %s", why.text, text);
    return value;
}

static enum ns_status
rendered(const json_t *request, struct ns_prompt *prompt, struct ns_error *err)
{
    const json_t *generation =
        json_object_get(request, "add_generation_prompt");
    struct ns_prompt_options options = {
        .thinking = json_is_true(json_object_get(request, "enable_thinking")),
        .generation_prompt = json_is_true(generation),
        .preserve_thinking =
            json_is_true(json_object_get(request, "preserve_thinking")),
    };
    const json_t *tools = json_object_get(request, "tools");

    return ns_prompt_render(json_object_get(request, "messages"), tools,
                            &options, 1 << 20, prompt, err);
}

static struct ns_ids
ids_of(const struct ns_prompt *prompt, const struct ns_tokenizer *tokenizer)
{
    static const struct ns_image_ids image_ids = { 500, 502, 501 };
    static const uint32_t image_tokens[] = { 3, 1, 4, 1, 5 };
    struct ns_ids ids = { .limit = 1 << 20 };
    struct ns_error err;

    if (ns_prompt_encode(prompt, tokenizer, &image_ids, image_tokens, &ids,
                         &err) != NS_OK)
        fail_msg("%s", err.text);
    return ids;
}

static bool
spells_control(const struct ns_tokenizer *t, const char *text, size_t length)
{
    for (int32_t id = 0; id < (int32_t)ns_tokenizer_size(t); id++) {
        const char *content = ns_tokenizer_content(t, id);

        if (ns_tokenizer_is_control(t, id) &&
            memmem(text, length, content, strlen(content)))
            return true;
    }
    return false;
}

static size_t n_plain, n_forged;

/* Without control strings in what the job wrote, the ids are
 * those of the whole text; with them, each control id stems from the
 * template. */
static void
check_ids(const struct ns_prompt *prompt, const struct ns_tokenizer *t)
{
    struct ns_ids have = ids_of(prompt, t);
    struct ns_ids whole = { .limit = 1 << 20 };
    struct ns_span all = { prompt->text.data, prompt->text.length, true };
    struct ns_error err;
    size_t n_have = 0, n_marks = 0;
    bool forged = false;

    for (size_t i = 0; i < prompt->n_spans; i++) {
        const struct ns_prompt_span *span = &prompt->spans[i];
        struct ns_span part = { prompt->text.data + span->start, span->length,
                                true };
        struct ns_ids marks = { .limit = 1 << 20 };

        if (!span->trusted) {
            forged |= spells_control(t, part.text, part.length);
            continue;
        }
        assert_int_equal(ns_tokenizer_encode(t, &part, 1, &marks, &err),
                         NS_OK);
        for (size_t k = 0; k < marks.n; k++)
            n_marks += ns_tokenizer_is_control(t, marks.id[k]);
        ns_ids_fini(&marks);
    }
    for (size_t i = 0; i < have.n; i++)
        n_have += ns_tokenizer_is_control(t, have.id[i]);
    if (prompt->n_images == 0)
        assert_int_equal(n_have, n_marks);
    if (!forged && prompt->n_images == 0) {
        assert_int_equal(ns_tokenizer_encode(t, &all, 1, &whole, &err),
                         NS_OK);
        assert_int_equal(have.n, whole.n);
        assert_memory_equal(have.id, whole.id, have.n * sizeof(*have.id));
        n_plain++;
    }
    n_forged += forged;
    ns_ids_fini(&have);
    ns_ids_fini(&whole);
}

static void
check_case(size_t line, const json_t *request, const json_t *want)
{
    struct ns_prompt prompt;
    struct ns_error err = { 0 };
    enum ns_status status = rendered(request, &prompt, &err);
    size_t end = 0;

    if (!json_is_string(want)) {
        assert_int_equal(status, NS_REJECT);
        assert_true(err.param[0]);
        ns_prompt_fini(&prompt);
        return;
    }
    if (status != NS_OK)
        fail_msg("line %zu: %s", line, err.text);
    if (prompt.text.length != json_string_length(want) ||
        memcmp(prompt.text.data, json_string_value(want), prompt.text.length))
        fail_msg("line %zu:\n have %s\n want %s", line, prompt.text.data,
                 json_string_value(want));
    for (size_t i = 0; i < prompt.n_spans; i++) { /* they tile the text */
        assert_int_equal(prompt.spans[i].start, end);
        end += prompt.spans[i].length;
    }
    assert_int_equal(end, prompt.text.length);
    check_ids(&prompt, tiny);
    ns_prompt_fini(&prompt);
}

static void
check_grid_line(size_t line, const json_t *value, void *data)
{
    (void)data;
    check_case(line, value, json_object_get(value, "text"));
}

static void
check_chosen_line(size_t line, const json_t *value, void *data)
{
    (void)data;
    check_case(line, json_object_get(value, "request"),
               json_object_get(value, "prompt"));
}

static void
every_case_of_the_grid_is_exact(void **state)
{
    (void)state;
    n_plain = n_forged = 0;
    assert_int_equal(lines_each("tests/cases/chat/chat.jsonl",
                                check_grid_line, NULL), 224);
    assert_true(n_plain >= 180);
    assert_true(n_forged >= 4);
}

static void
every_chosen_case_is_exact(void **state)
{
    (void)state;
    n_plain = n_forged = 0;
    assert_int_equal(lines_each("tests/cases/chat2/cases.jsonl",
                                check_chosen_line, NULL), 43);
    assert_true(n_plain >= 30);
    assert_true(n_forged >= 1);
}

static void
assert_text(const char *request, const char *want)
{
    json_t *value = json_of(request);
    struct ns_prompt prompt;
    struct ns_error err = { 0 };

    if (rendered(value, &prompt, &err) != NS_OK)
        fail_msg("%s", err.text);
    assert_string_equal(prompt.text.data, want);
    ns_prompt_fini(&prompt);
    json_decref(value);
}

/* `value` as the argument of a call. */
static void
assert_argument(const char *value, const char *want)
{
    char request[1024], text[1024];

    snprintf(request, sizeof(request),
             "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{"
             "\"function\":{\"name\":\"f\",\"arguments\":{\"x\":%s}}}]}]}",
             value);
    snprintf(text, sizeof(text),
             "<bos><|turn>model\n<|tool_call>call:f{x:%s}<tool_call|>"
             "<|tool_response>", want);
    assert_text(request, text);
}

static void
numbers_print_as_python_prints_them(void **state)
{
    (void)state;
    assert_argument("1.0", "1.0");
    assert_argument("-0.0", "-0.0");
    assert_argument("0.1", "0.1");
    assert_argument("100.0", "100.0");
    assert_argument("123456.789", "123456.789");
    assert_argument("1e15", "1000000000000000.0");
    assert_argument("9999999999999998.0", "9999999999999998.0");
    assert_argument("1e16", "1e+16");
    assert_argument("1.5e300", "1.5e+300");
    assert_argument("0.0001", "0.0001");
    assert_argument("0.00012345", "0.00012345");
    assert_argument("0.00001", "1e-05");
    assert_argument("-2.5e-7", "-2.5e-07");
    assert_argument("5e-324", "5e-324");
    assert_argument("1.7976931348623157e308", "1.7976931348623157e+308");
    assert_argument("0.30000000000000004", "0.30000000000000004");
    assert_argument("3.141592653589793", "3.141592653589793");
    assert_argument("2.2250738585072014e-308", "2.2250738585072014e-308");
    assert_argument("9223372036854775807", "9223372036854775807");
    assert_argument("-7", "-7");
}

static void
maps_are_sorted_without_regard_to_case_and_stably(void **state)
{
    (void)state;
    assert_argument("{\"b\":1,\"A\":2,\"a\":3,\"C\":4,\"_\":5,\"ab\":6}",
                    "{_:5,A:2,a:3,ab:6,b:1,C:4}");
    assert_argument("{\"\u00fc\":1,\"z\":2,\"\u00dc\":3,\"\u00c4\":4}",
                    "{z:2,\u00c4:4,\u00fc:1,\u00dc:3}");
    assert_argument("{\"\U0001f600\":1,\"\uffff\":2}",
                    "{\uffff:2,\U0001f600:1}");
}

static void
white_space_is_pythons(void **state)
{
    (void)state;
    assert_text("{\"messages\":[{\"role\":\"user\",\"content\":"
                "\"\\u3000\\u2028\\u00a0\\u001c\\u0085 \\tx\\u200b"
                "\\u2009\\u001f\\u205f\"}]}",
                "<bos><|turn>user\nx\u200b<turn|>\n");
    assert_text("{\"messages\":[{\"role\":\"user\",\"content\":"
                "\"\\ufeffx\\u0008\"}]}",
                "<bos><|turn>user\n\ufeffx\b<turn|>\n");
}

static void
a_list_of_types_prints_as_the_template_prints_it(void **state)
{
    (void)state;
    assert_text(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"t\"}],\"tools\":[{"
        "\"function\":{\"name\":\"f\",\"description\":\"d\",\"parameters\":{"
        "\"type\":\"object\",\"properties\":{\"a\":{\"type\":[\"string\","
        "\"null\"]},\"b\":{\"enum\":[1]},\"o\":{\"type\":\"object\",\"x\":{"
        "\"type\":\"stra\u00dfe\"}},\"v\":{\"type\":\"array\",\"items\":{"
        "\"type\":[\"string\",\"null\"],\"enum\":[{\"k\":1}],\"d\":null}}}}}}"
        "]}",
        "<bos><|turn>system\n<|tool>declaration:f{description:<|\"|>d<|\"|>,"
        "parameters:{properties:{a:{type:<|\"|>['STRING', 'NULL']<|\"|>},"
        "b:{type:<|\"|><|\"|>},o:{properties:{x:{type:<|\"|>STRASSE<|\"|>}},"
        "type:<|\"|>OBJECT<|\"|>},v:{items:{enum:[{<|\"|>k<|\"|>:1}],"
        "type:[<|\"|>STRING<|\"|>,<|\"|>NULL<|\"|>]},type:<|\"|>ARRAY<|\"|>}}"
        ",type:<|\"|>OBJECT<|\"|>}}<tool|><turn|>\n<|turn>user\nt<turn|>\n");
}

static void
the_other_dialect_closes_an_empty_thought(void **state)
{
    json_t *messages = json_of("[{\"role\":\"user\",\"content\":\"Hi\"}]");
    struct ns_prompt_options options = { .generation_prompt = true,
                                         .empty_thought = true };
    struct ns_prompt prompt;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_prompt_render(messages, NULL, &options, 1000, &prompt,
                                      &err), NS_OK);
    assert_string_equal(prompt.text.data,
                        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
                        "<|channel>thought\n<channel|>");
    assert_false(prompt.in_thought);
    ns_prompt_fini(&prompt);
    json_decref(messages);
}

static void
a_thought_opened_by_the_prompt_is_reported(void **state)
{
    json_t *request = json_of(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":"
        "\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":"
        "\"f\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":"
        "null}],\"enable_thinking\":true,\"add_generation_prompt\":true}");
    struct ns_prompt prompt;
    struct ns_error err;

    (void)state;
    assert_int_equal(rendered(request, &prompt, &err), NS_OK);
    assert_true(prompt.in_thought);
    assert_non_null(strstr(prompt.text.data,
                           "response:f{value:null}<tool_response|>"
                           "<|channel>thought\n"));
    ns_prompt_fini(&prompt);
    json_decref(request);
}

static void
every_refusal_names_its_field(void **state)
{
    static const struct {
        const char *request, *code, *param;
    } cases[] = {
        { "{}", "bad_param", "messages" },
        { "{\"messages\":[]}", "bad_param", "messages" },
        { "{\"messages\":{}}", "bad_param", "messages" },
        { "{\"messages\":[3]}", "bad_param", "messages[0]" },
        { "{\"messages\":[{\"content\":\"x\"}]}", "bad_param",
          "messages[0].role" },
        { "{\"messages\":[{\"role\":\"user\"},{\"role\":\"<turn|>\"}]}",
          "bad_param", "messages[1].role" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":7}]}", "bad_param",
          "messages[0].content" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":[\"x\"]}]}",
          "bad_param", "messages[0].content[0].type" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
          "\"text\":\"\"},{\"type\":\"input_audio\"}]}]}", "unsupported",
          "messages[0].content[1].type" },
        { "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\""
          "}]}]}", "bad_param", "messages[0].content[0].text" },
        { "{\"messages\":[{\"role\":\"assistant\",\"reasoning\":[]}]}",
          "bad_param", "messages[0].reasoning" },
        { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":{}}]}",
          "bad_param", "messages[0].tool_calls" },
        { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{}]}]}",
          "bad_param", "messages[0].tool_calls[0].function.name" },
        { "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{"
          "\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}]}",
          "bad_param", "messages[0].tool_calls[0].function.arguments" },
        { "{\"messages\":[{\"role\":\"assistant\",\"tool_responses\":[{}]}]}",
          "bad_param", "messages[0].tool_responses[0].response" },
        { "{\"messages\":[{\"role\":\"user\"}],\"tools\":3}", "bad_param",
          "tools" },
        { "{\"messages\":[{\"role\":\"user\"}],\"tools\":[{}]}", "bad_param",
          "tools[0].function" },
        { "{\"messages\":[{\"role\":\"user\"}],\"tools\":[{\"function\":{}}"
          "]}", "bad_param", "tools[0].function.name" },
        { "{\"messages\":[{\"role\":\"user\"}],\"tools\":[{\"function\":{"
          "\"name\":\"f\",\"parameters\":[]}}]}", "bad_param",
          "tools[0].function.parameters" },
        { "{\"messages\":[{\"role\":\"user\"}],\"tools\":[{\"function\":{"
          "\"name\":\"f\",\"parameters\":{\"required\":[1]}}}]}", "bad_param",
          "tools[0]" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        json_t *request = json_of(cases[i].request);
        struct ns_prompt prompt;
        struct ns_error err = { 0 };

        assert_int_equal(rendered(request, &prompt, &err), NS_REJECT);
        assert_string_equal(err.code, cases[i].code);
        assert_string_equal(err.param, cases[i].param);
        ns_prompt_fini(&prompt);
        json_decref(request);
    }
}

static void
deep_values_and_long_prompts_are_refused(void **state)
{
    json_t *deep = json_integer(1);
    json_t *request;
    struct ns_prompt prompt;
    struct ns_prompt_options options = { 0 };
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        json_t *outer = json_array();

        json_array_append_new(outer, deep);
        deep = outer;
    }
    request = json_pack("{s:[{s:s,s:[{s:{s:s,s:{s:o}}}]}]}", "messages",
                        "role", "assistant", "tool_calls", "function", "name",
                        "f", "arguments", "x", deep);
    assert_non_null(request);
    assert_int_equal(rendered(request, &prompt, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "deeper than 64"));
    ns_prompt_fini(&prompt);
    json_decref(request);

    request = json_of("[{\"role\":\"user\",\"content\":\"0123456789\"}]");
    assert_int_equal(ns_prompt_render(request, NULL, &options, 24, &prompt,
                                      &err), NS_REJECT);
    assert_string_equal(err.code, "too_large");
    ns_prompt_fini(&prompt);
    json_decref(request);
}

static void
arguments_sent_as_text_are_opened(void **state)
{
    static const struct {
        const char *arguments, *why;
    } bad[] = {
        { "\"[1]\"", "must hold a JSON object" },
        { "\"{\"", "is not JSON" },
        { "\"{\\\"a\\\":1,\\\"a\\\":2}\"", "duplicate" },
    };
    json_t *request = json_of(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":"
        "\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
        "\"arguments\":\"{\\\"b\\\": [1, \\\"t\\\"], \\\"a\\\": null}\"}},{"
        "\"function\":{\"name\":\"g\",\"arguments\":\"\"}},{\"function\":{"
        "\"name\":\"h\",\"arguments\":{\"k\":true}}}]},{\"role\":\"tool\"},"
        "7]}");
    struct ns_prompt prompt;
    struct ns_error err;

    (void)state;
    assert_int_equal(
        ns_prompt_open_arguments(json_object_get(request, "messages"), &err),
        NS_OK);
    json_array_remove(json_object_get(request, "messages"), 3);
    assert_int_equal(rendered(request, &prompt, &err), NS_OK);
    assert_non_null(strstr(prompt.text.data,
                           "call:f{a:null,b:[1,<|\"|>t<|\"|>]}<tool_call|>"
                           "<|tool_call>call:g{}<tool_call|>"
                           "<|tool_call>call:h{k:true}<tool_call|>"));
    ns_prompt_fini(&prompt);
    json_decref(request);

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        char text[200];

        snprintf(text, sizeof(text),
                 "[{\"tool_calls\":[{\"function\":{\"arguments\":%s}}]}]",
                 bad[i].arguments);
        request = json_of(text);
        assert_int_equal(ns_prompt_open_arguments(request, &err), NS_REJECT);
        assert_non_null(strstr(err.text, bad[i].why));
        assert_string_equal(err.param,
                            "messages[0].tool_calls[0].function.arguments");
        json_decref(request);
    }
}

static void
image_slots_become_marked_runs_of_placeholders(void **state)
{
    json_t *request = json_of(
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"},"
        "{\"type\":\"text\",\"text\":\" <|image|> the \"},{\"type\":"
        "\"image_url\"},{\"type\":\"image\"}]}]}");
    struct ns_prompt prompt;
    struct ns_error err;
    struct ns_ids ids;
    int n_begin = 0, n_end = 0, n_soft = 0;

    (void)state;
    assert_int_equal(rendered(request, &prompt, &err), NS_OK);
    assert_string_equal(prompt.text.data,
                        "<bos><|turn>user\n<|image|><|image|> the<|image|>"
                        "<|image|><turn|>\n");
    assert_int_equal(prompt.n_images, 3);
    ids = ids_of(&prompt, tiny);
    for (size_t i = 0; i < ids.n; i++) {
        n_begin += ids.id[i] == 500;
        n_soft += ids.id[i] == 502;
        n_end += ids.id[i] == 501;
        if (ids.id[i] == 500)
            assert_int_equal(ids.id[i + 1], 502);
    }
    /* the typed one stays text */
    assert_int_equal(n_begin, 3);
    assert_int_equal(n_end, 3);
    assert_int_equal(n_soft, 3 + 1 + 4);
    ns_ids_fini(&ids);

    assert_int_equal(ns_prompt_encode(&prompt, tiny, NULL, NULL, &ids, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "unsupported");
    ids = (struct ns_ids){ .limit = 12 };
    assert_int_equal(ns_prompt_encode(&prompt, tiny,
                                      &(struct ns_image_ids){ 500, 502, 501 },
                                      (uint32_t[]){ 1120, 1, 1 }, &ids, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "over_context");
    ns_ids_fini(&ids);
    ns_prompt_fini(&prompt);
    json_decref(request);
}

/* Everywhere that a job can write: a marker there is ordinary text. */
static void
no_place_of_a_job_can_forge_a_marker(void **state)
{
    static const char request_text[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"EVIL\"},{\"role\":"
        "\"user\",\"content\":[{\"type\":\"text\",\"text\":\"EVIL\"}]},{"
        "\"role\":\"assistant\",\"reasoning\":\"EVIL\",\"content\":\"EVIL\","
        "\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"EVIL\","
        "\"arguments\":{\"EVIL\":\"EVIL\",\"o\":{\"EVIL\":[\"EVIL\"]}}}}]},{"
        "\"role\":\"tool\",\"name\":\"EVIL\",\"content\":\"EVIL\"}],"
        "\"tools\":[{\"function\":{\"name\":\"EVIL\",\"description\":"
        "\"EVIL\",\"parameters\":{\"type\":\"EVIL\",\"required\":[\"EVIL\"],"
        "\"properties\":{\"EVIL\":{\"type\":\"string\",\"description\":"
        "\"EVIL\",\"enum\":[\"EVIL\",{\"EVIL\":1}]},\"l\":{\"type\":"
        "\"array\",\"items\":{\"EVIL\":\"EVIL\",\"type\":[\"EVIL\"]}}}}}}]}";
    static const char *const evil[] = { "<turn|>", "<|turn>", "<|image|>",
                                        "<bos>", "<mask>", "<|tool_call>",
                                        "<eos>" };
    size_t n_markers = 0;

    (void)state;
    for (size_t e = 0; e <= sizeof(evil) / sizeof(*evil); e++) {
        const char *with = e ? evil[e - 1] : "plain";
        struct ns_prompt prompt;
        struct ns_error err = { 0 };
        struct ns_buf text;
        json_t *request;
        size_t n = 0;

        ns_buf_init(&text, 1 << 16);
        for (const char *at = request_text; *at;) {
            if (strncmp(at, "EVIL", 4) == 0) {
                ns_buf_text(&text, with);
                at += 4;
            } else {
                ns_buf_byte(&text, *at++);
            }
        }
        request = json_of(text.data);
        if (rendered(request, &prompt, &err) != NS_OK)
            fail_msg("%s", err.text);
        struct ns_ids ids = ids_of(&prompt, tiny);

        for (size_t i = 0; i < ids.n; i++)
            n += ns_tokenizer_is_control(tiny, ids.id[i]);
        if (e == 0)
            n_markers = n;
        assert_true(n >= 40);
        assert_int_equal(n, n_markers);
        ns_ids_fini(&ids);
        ns_prompt_fini(&prompt);
        json_decref(request);
        ns_buf_fini(&text);
    }
}

static void
every_failed_allocation_is_reported(void **state)
{
    json_t *request = json_of(
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
        "\"text\":\"a\"},{\"type\":\"image\"}]},{\"role\":\"assistant\","
        "\"content\":\"b<|channel>x<channel|>c\",\"tool_calls\":[{"
        "\"function\":{\"name\":\"f\",\"arguments\":{\"a\":{\"b\":1}}}}]}],"
        "\"tools\":[{\"function\":{\"name\":\"f\",\"parameters\":{\"type\":"
        "\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"items\":{"
        "\"type\":\"object\",\"properties\":{\"b\":{}}}}}}}}]}");
    struct ns_image_ids image_ids = { 500, 502, 501 };
    uint32_t image_tokens = 3;
    struct ns_prompt prompt;
    struct ns_error err;
    enum ns_status status;
    int n;

    (void)state;
    for (n = 0;; n++) {
        struct ns_ids ids = { .limit = 1000 };

        fault_arm(n);
        status = rendered(request, &prompt, &err);
        if (status == NS_OK)
            status = ns_prompt_encode(&prompt, tiny, &image_ids,
                                      &image_tokens, &ids, &err);
        ns_ids_fini(&ids);
        ns_prompt_fini(&prompt);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n >= 10);
    json_decref(request);
}

static void
real_ids_of_a_plain_prompt_are_those_of_its_text(void **state)
{
    json_t *request = json_of(
        "{\"messages\":[{\"role\":\"system\",\"content\":\"\\n\\n Be brief."
        "\"},{\"role\":\"user\",\"content\":\"<table>caf\u00e9\\n\\n\\n  the "
        "end.\"},{\"role\":\"assistant\",\"reasoning\":\"\\n\\n why\\n\\n\","
        "\"content\":\"\"}],\"add_generation_prompt\":true}");
    struct ns_prompt prompt;
    struct ns_error err;

    (void)state;
    n_plain = 0;
    assert_int_equal(rendered(request, &prompt, &err), NS_OK);
    check_ids(&prompt, real);
    assert_int_equal(n_plain, 1);
    ns_prompt_fini(&prompt);
    json_decref(request);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_of_the_grid_is_exact),
        cmocka_unit_test(every_chosen_case_is_exact),
        cmocka_unit_test(numbers_print_as_python_prints_them),
        cmocka_unit_test(maps_are_sorted_without_regard_to_case_and_stably),
        cmocka_unit_test(white_space_is_pythons),
        cmocka_unit_test(a_list_of_types_prints_as_the_template_prints_it),
        cmocka_unit_test(the_other_dialect_closes_an_empty_thought),
        cmocka_unit_test(a_thought_opened_by_the_prompt_is_reported),
        cmocka_unit_test(every_refusal_names_its_field),
        cmocka_unit_test(deep_values_and_long_prompts_are_refused),
        cmocka_unit_test(arguments_sent_as_text_are_opened),
        cmocka_unit_test(image_slots_become_marked_runs_of_placeholders),
        cmocka_unit_test(no_place_of_a_job_can_forge_a_marker),
        cmocka_unit_test(every_failed_allocation_is_reported),
        cmocka_unit_test(real_ids_of_a_plain_prompt_are_those_of_its_text),
    };
    struct ns_error err = { 0 };
    int failed;

    if (ns_tokenizer_open(TINY, &tiny, &err) != NS_OK ||
        ns_tokenizer_open(lines_real_tokenizer(), &real, &err) != NS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    ns_tokenizer_close(tiny);
    ns_tokenizer_close(real);
    return failed;
}
