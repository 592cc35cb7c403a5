#include "engine/reply.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/reader.h"
#include "engine/prompt.h"
#include "tests/fault.h"
#include "tests/lines.h"

#define TINY "tests/cases/tokenizer/tiny/tokenizer.json"

static struct ns_tokenizer *tiny;

/* Three ways to write the same text: as the tokenizer would, a character a
 * token, and a byte a token. Markers are single tokens in all of them. */
enum spelling { MERGED, CHARACTERS, BYTES, N_SPELLINGS };

static void
add(struct ns_ids *ids, int32_t id)
{
    struct ns_error err;

    assert_int_equal(ns_ids_add(ids, id, &err), NS_OK);
}

static int32_t
byte_id(unsigned char byte)
{
    char name[8];

    snprintf(name, sizeof(name), "<0x%02X>", byte);
    return ns_tokenizer_id(tiny, name);
}

static struct ns_ids
spelled(const char *text, enum spelling how)
{
    struct ns_span span = { text, strlen(text), true };
    struct ns_ids merged = { .limit = 1 << 20 }, ids = { .limit = 1 << 20 };
    struct ns_error err;

    assert_int_equal(ns_tokenizer_encode(tiny, &span, 1, &merged, &err),
                     NS_OK);
    for (size_t i = 0; i < merged.n; i++) {
        struct ns_buf part;

        if (how == MERGED || ns_tokenizer_is_control(tiny, merged.id[i])) {
            add(&ids, merged.id[i]);
            continue;
        }
        if (byte_id(0) <= merged.id[i] &&
            ns_tokenizer_content(tiny, merged.id[i])[0] == '<' &&
            ns_tokenizer_content(tiny, merged.id[i])[1]) {
            add(&ids, merged.id[i]); /* a byte already */
            continue;
        }
        ns_buf_init(&part, 1000);
        ns_tokenizer_decode(tiny, &merged.id[i], 1, false, &part);
        for (size_t at = 0, n; at < part.length; at += n) {
            char one[5] = "";
            int32_t id;

            n = ns_utf8_char(part.data + at, part.length - at, NULL);
            memcpy(one, part.data + at, n);
            id = ns_tokenizer_id(tiny, one[0] == ' ' ? "\u2581" : one);
            if (how == CHARACTERS && id >= 0)
                add(&ids, id);
            else
                for (size_t k = 0; k < n; k++)
                    add(&ids, byte_id((unsigned char)one[k]));
        }
        ns_buf_fini(&part);
    }
    ns_ids_fini(&merged);
    return ids;
}

static struct ns_reply *
fed(const struct ns_ids *ids, bool in_thought, const char *const *stop,
    size_t n_stop)
{
    struct ns_reply_options options = {
        .tokenizer = tiny, .in_thought = in_thought, .stop = stop,
        .n_stop = n_stop, .limit_bytes = 1 << 16,
    };
    struct ns_reply *reply = NULL;
    struct ns_error err;

    assert_int_equal(ns_reply_create(&options, &reply, &err), NS_OK);
    for (size_t i = 0; i < ids->n; i++)
        if (ns_reply_push(reply, ids->id[i]))
            break;
    return reply;
}

struct want {
    const char *text;
    const char *thought, *content;
    const char *calls; /* [["name", {arguments}], ...] */
    const char *bad;
    bool in_thought, open_thought;
};

static void
assert_calls(const json_t *have, const char *want)
{
    json_t *calls = want ? json_loads(want, JSON_DECODE_INT_AS_REAL, NULL)
                         : NULL;

    if (!want) {
        assert_null(have);
        return;
    }
    assert_non_null(calls);
    assert_int_equal(json_array_size(have), json_array_size(calls));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(have, i);
        const json_t *function = json_object_get(call, "function");
        const json_t *pair = json_array_get(calls, i);
        const char *text =
            json_string_value(json_object_get(function, "arguments"));
        json_t *arguments = json_loads(text, JSON_DECODE_INT_AS_REAL, NULL);
        char id[32];

        snprintf(id, sizeof(id), "call_%zu", i);
        assert_string_equal(json_string_value(json_object_get(call, "id")),
                            id);
        assert_string_equal(json_string_value(json_object_get(call, "type")),
                            "function");
        assert_string_equal(
            json_string_value(json_object_get(function, "name")),
            json_string_value(json_array_get(pair, 0)));
        if (!json_equal(arguments, json_array_get(pair, 1)))
            fail_msg("arguments are %s", text);
        json_decref(arguments);
    }
    json_decref(calls);
}

static void
assert_reply(const struct want *want, const char *const *stop, size_t n_stop)
{
    for (int how = 0; how < N_SPELLINGS; how++) {
        struct ns_ids ids = spelled(want->text, (enum spelling)how);
        struct ns_reply *reply = fed(&ids, want->in_thought, stop, n_stop);
        struct ns_reply_text text;
        struct ns_error err = { 0 };

        if (ns_reply_finish(reply, &text, &err) != NS_OK)
            fail_msg("%s: %s", want->text, err.text);
        if (strcmp(text.content, want->content))
            fail_msg("%s (%d): content is \"%s\"", want->text, how,
                     text.content);
        assert_int_equal(text.content_length, strlen(want->content));
        if (want->thought) {
            if (!text.thought)
                fail_msg("%s: no thought", want->text);
            assert_string_equal(text.thought, want->thought);
            assert_int_equal(text.thought_length, strlen(want->thought));
        } else {
            assert_null(text.thought);
        }
        if (text.bad_tool_call != (want->bad != NULL))
            fail_msg("%s (%d): bad_tool_call is %d", want->text, how,
                     text.bad_tool_call);
        if (want->bad)
            assert_string_equal(text.bad_call_text, want->bad);
        assert_calls(text.tool_calls, want->calls);
        assert_int_equal(text.open_thought, want->open_thought);
        ns_reply_destroy(reply);
        ns_ids_fini(&ids);
    }
}

static void
assert_all(const struct want *cases, size_t n)
{
    for (size_t i = 0; i < n; i++)
        assert_reply(&cases[i], NULL, 0);
}

#define ALL(cases) assert_all(cases, sizeof(cases) / sizeof(*(cases)))

static void
thought_and_content_are_separated(void **state)
{
    static const struct want cases[] = {
        { .text = "", .content = "" },
        { .text = "hello the\n\n end ", .content = "hello the\n\n end " },
        { .text = "<|channel>thought\nsome reason\n<channel|>the answer",
          .thought = "some reason", .content = "the answer" },
        { .text = "<|channel>thought\n<channel|>the answer",
          .content = "the answer" },
        { .text = "<|channel>thought<channel|>the answer",
          .content = "the answer" },
        { .text = "<|channel><channel|>x", .content = "x" },
        { .text = "<|channel>thought\none\n<channel|>a<|channel>thought\n"
                  "two<channel|>b", .thought = "one\n\ntwo", .content = "ab" },
        { .text = "<|channel>thought\nnever closed", .content = "",
          .thought = "never closed", .open_thought = true },
        { .text = "<|channel>thoughts of mine<channel|>x", .content = "x",
          .thought = "thoughts of mine" },
        { .text = "some reason\n<channel|>the answer", .in_thought = true,
          .thought = "some reason", .content = "the answer" },
        { .text = "thought\nsome<channel|>the", .in_thought = true,
          .thought = "some", .content = "the" },
        { .text = "thought experiments<channel|>the", .in_thought = true,
          .thought = "thought experiments", .content = "the" },
        { .text = "<|channel>thought\nsome<channel|>the", .in_thought = true,
          .thought = "some", .content = "the" },
        { .text = "\u00e9\U0001f600 \u4f60\u597d<|channel>thought\n\u4f60"
                  "<channel|>\u597d", .thought = "\u4f60",
          .content = "\u00e9\U0001f600 \u4f60\u597d\u597d" },
    };

    (void)state;
    ALL(cases);
}

static void
the_word_thought_never_leads_content(void **state)
{
    static const struct want cases[] = {
        /* the model left the marker out, or it was stripped on the way */
        { .text = "thought\nsome reason<channel|>the answer",
          .thought = "some reason", .content = "the answer" },
        { .text = "thought\nthe answer", .content = "the answer" },
        { .text = "thought\n", .content = "" },
        { .text = "<|channel>thought\na<channel|>thought\nb", .thought = "a",
          .content = "b" },
        /* but a word is a word */
        { .text = "thought", .content = "thought" },
        { .text = "thoughtful", .content = "thoughtful" },
        { .text = "thought is free", .content = "thought is free" },
        { .text = "a thought\n", .content = "a thought\n" },
        { .text = "tho<|tool_call>call:f{}<tool_call|>ught\nx",
          .content = "thought\nx", .calls = "[[\"f\",{}]]" },
    };

    (void)state;
    ALL(cases);
}

static void
no_control_string_is_left_in_content(void **state)
{
    static const struct want cases[] = {
        { .text = "a<mask>b<|image|>c<bos><pad>d<unk><|\"|>e<|think|>"
                  "<|tool><tool|><tool_response|><channel|>f",
          .content = "abcdef" },
        { .text = "<|channel>thought\na<|\"|>b<mask><channel|>c",
          .thought = "ab", .content = "c" },
    };

    (void)state;
    ALL(cases);
}

static void
tool_calls_are_read_in_every_spelling(void **state)
{
#define CALL(text_, calls_)                                                   \
    { .text = "<|tool_call>" text_ "<tool_call|>", .content = "",             \
      .calls = calls_ }
    static const struct want cases[] = {
        CALL("call:f{}", "[[\"f\",{}]]"),
        CALL("call:get_weather{city:<|\"|>Oslo<|\"|>,days:2}",
             "[[\"get_weather\",{\"city\":\"Oslo\",\"days\":2}]]"),
        CALL("call:f{a:1.5,b:-2,c:1e+20,d:true,e:false,f:null}",
             "[[\"f\",{\"a\":1.5,\"b\":-2,\"c\":1e20,\"d\":true,"
             "\"e\":false,\"f\":null}]]"),
        CALL("call:f{o:{b:[1,<|\"|>two<|\"|>,[],{}]},l:[]}",
             "[[\"f\",{\"o\":{\"b\":[1,\"two\",[],{}]},\"l\":[]}]]"),
        CALL("call:f{s:<|\"|>a \"b\" {c}, 'd' \\n<|\"|>}",
             "[[\"f\",{\"s\":\"a \\\"b\\\" {c}, 'd' \\\\n\"}]]"),
        CALL("call:f{s:<|\"|>two\nlines\t\u00e9\U0001f600<|\"|>}",
             "[[\"f\",{\"s\":\"two\\nlines\\t\u00e9\U0001f600\"}]]"),
        /* white space */
        CALL(" call: f {\n  a : 1 ,\n  b : [ 1 , 2 ]\n} \n",
             "[[\"f\",{\"a\":1,\"b\":[1,2]}]]"),
        /* no prefix; no arguments at all */
        CALL("f{a:1}", "[[\"f\",{\"a\":1}]]"),
        CALL("call:f", "[[\"f\",{}]]"),
        CALL("f", "[[\"f\",{}]]"),
        /* JSON */
        CALL("call:f{\"a\": \"x\\n\\u00e9\", \"b\": [\"y\"]}",
             "[[\"f\",{\"a\":\"x\\n\u00e9\",\"b\":[\"y\"]}]]"),
        CALL("{\"name\": \"f\", \"arguments\": {\"a\": 1.5}}",
             "[[\"f\",{\"a\":1.5}]]"),
        CALL("{\"name\": \"f\", \"parameters\": {}}", "[[\"f\",{}]]"),
        CALL("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}",
             "[[\"f\",{\"a\":1}]]"),
        /* other quotes */
        CALL("call:f{a:\"x\",b:'it\\'s \"q\"',<|\"|>c<|\"|>:'y'}",
             "[[\"f\",{\"a\":\"x\",\"b\":\"it's \\\"q\\\"\",\"c\":\"y\"}]]"),
        /* parentheses */
        CALL("call:f()", "[[\"f\",{}]]"),
        CALL("call:f(city=\"Oslo\", days=2, deep=True, x=None)",
             "[[\"f\",{\"city\":\"Oslo\",\"days\":2,\"deep\":true,"
             "\"x\":null}]]"),
        CALL("f(a: <|\"|>x<|\"|>)", "[[\"f\",{\"a\":\"x\"}]]"),
        CALL("call:f({\"a\": 1})", "[[\"f\",{\"a\":1}]]"),
        /* keys with odd characters */
        CALL("call:f{a b.c-d(e)=:1,\u00fc:2}",
             "[[\"f\",{\"a b.c-d(e)=\":1,\"\u00fc\":2}]]"),
        CALL("call:ns.f-g_2{}", "[[\"ns.f-g_2\",{}]]"),
    };
    static const struct want around[] = {
        { .text = "<|channel>thought\nwhy\n<channel|>I look.<|tool_call>"
                  "call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>",
          .thought = "why", .content = "I look.",
          .calls = "[[\"f\",{\"a\":1}],[\"g\",{}]]" },
        { .text = "\n<|tool_call>call:f{}<tool_call|>\n", .content = "",
          .calls = "[[\"f\",{}]]" },
        /* the thought was not closed; the closing marker left out */
        { .text = "<|channel>thought\nwhy<|tool_call>call:f{}<tool_call|>",
          .thought = "why", .content = "", .calls = "[[\"f\",{}]]" },
        { .text = "<|tool_call>call:f{a:1}", .content = "",
          .calls = "[[\"f\",{\"a\":1}]]" },
        { .text = "<|tool_call>call:f{a:1}<|tool_call>call:g{}<tool_call|>",
          .content = "", .calls = "[[\"f\",{\"a\":1}],[\"g\",{}]]" },
    };

    (void)state;
    ALL(cases);
    ALL(around);
}

static void
a_malformed_call_is_marked_and_kept(void **state)
{
#define BAD(text_)                                                            \
    { .text = "<|tool_call>" text_ "<tool_call|>", .content = "",             \
      .bad = text_ }
    static const struct want cases[] = {
        BAD(""), BAD(" "), BAD("call:"), BAD("call:{}"), BAD("{}"),
        BAD("call:f{"), BAD("call:f{a}"), BAD("call:f{a:}"),
        BAD("call:f{a:1"), BAD("call:f{a:1}}"), BAD("call:f{a:1} b"),
        BAD("call:f{a:<|\"|>x}"), BAD("call:f{a:<|\"|>"), BAD("call:f{a:'x}"),
        BAD("call:f{a:\"x}"), BAD("call:f{a:\"\\q\"}"),
        BAD("call:f{a:\"\\ud800\"}"), BAD("call:f{a:1,a:2}"),
        BAD("call:f{:1}"), BAD("call:f{a:01}"), BAD("call:f{a:1.}"),
        BAD("call:f{a:1e999}"), BAD("call:f{a:Oslo}"), BAD("call:f{a:1,}"),
        BAD("call:f{,}"), BAD("call:f{a:[1,]}"), BAD("call:f{a:[1}"),
        BAD("call:f{a:truex}"), BAD("call:f(a)"), BAD("call:f(a=1"),
        BAD("call:f({a:1}"),
        BAD("call:f g{}"), BAD("{\"name\":\"f\"}"),
        BAD("{\"arguments\":{}}"), BAD("{\"name\":\"f\",\"arguments\":[]}"),
        BAD("the weather"),
    };
    static const struct want around[] = {
        { .text = "a<|tool_call>call:f{<tool_call|>b<|tool_call>call:g{}"
                  "<tool_call|>", .content = "ab", .bad = "call:f{",
          .calls = "[[\"g\",{}]]" },
        { .text = "<|tool_call>call:f{<tool_call|><|tool_call>x y"
                  "<tool_call|>", .content = "", .bad = "call:f{" },
        /* cut by max_tokens: half a name is no call */
        { .text = "<|tool_call>call:get_wea", .content = "",
          .bad = "call:get_wea" },
        { .text = "<|tool_call>call:f{a:<|\"|>Osl", .content = "",
          .bad = "call:f{a:<|\"|>Osl" },
        /* an opening marker that got lost */
        { .text = "call:f{a:1}<tool_call|>", .content = "call:f{a:1}",
          .bad = "call:f{a:1}" },
        { .text = "<tool_call|>", .content = "", .bad = "" },
        { .text = "<|tool_call>call:f{a:<|channel>1}<channel|>b",
          .thought = "1}", .content = "b", .bad = "call:f{a:" },
        { .text = "<|tool_call>call:f{a:<mask>1}<tool_call|>", .content = "",
          .bad = "call:f{a:<mask>1}" },
    };

    (void)state;
    ALL(cases);
    ALL(around);
}

/* The characters of a marker, typed one by one, are text. */
static void
spelled_markers_are_text(void **state)
{
    static const char text[] = "<|turn>a<|tool_call>b<|\"|>";
    struct ns_span span = { text, sizeof(text) - 1, false };
    struct ns_ids ids = { .limit = 1000 };
    struct ns_reply_text out;
    struct ns_reply *reply;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_tokenizer_encode(tiny, &span, 1, &ids, &err), NS_OK);
    reply = fed(&ids, false, NULL, 0);
    assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
    assert_string_equal(out.content, text);
    assert_null(out.tool_calls);
    ns_reply_destroy(reply);
    ns_ids_fini(&ids);
}

static void
stop_strings_cut_content_across_tokens(void **state)
{
    static const struct {
        const char *text, *stop[3], *content, *thought;
    } cases[] = {
        { "one two three", { "two" }, "one ", NULL },
        { "one two three", { "o t" }, "one tw", NULL },
        { "one two three", { "xx", "three", "two" }, "one ", NULL },
        /* the first to be complete, of several the longest */
        { "abcdef", { "bcd", "cd", "bcdef" }, "a", NULL },
        { "abcdef", { "bcdef", "c" }, "ab", NULL },
        { "abababac", { "abac" }, "abab", NULL },
        { "aaab", { "aab" }, "a", NULL },
        { "half a sto", { "stop" }, "half a sto", NULL },
        { "a\n\nb", { "\n" }, "a", NULL },
        { "x\U0001f600y", { "\U0001f600" }, "x", NULL },
        { "\u4f60\u597d", { "\u597d" }, "\u4f60", NULL },
        /* of content only, and not across what stands between */
        { "<|channel>thought\nstop it<channel|>go stop on", { "stop" },
          "go ", "stop it" },
        { "ab<|channel>thought\nx<channel|>cd", { "bc" }, "abcd", "x" },
        { "thought\nthe end", { "thought" }, "the end", NULL },
        { "though", { "though" }, "", NULL },
        { "thoughtless", { "ght" }, "thou", NULL },
        { "", { "x" }, "", NULL },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct want want = { .text = cases[i].text,
                             .content = cases[i].content,
                             .thought = cases[i].thought };
        size_t n = 0;

        while (n < 3 && cases[i].stop[n])
            n++;
        assert_reply(&want, cases[i].stop, n);
    }
}

static void
a_completed_stop_string_is_told_at_once(void **state)
{
    static const char *const stop[] = { "end" };
    struct ns_ids ids = spelled("the end of", CHARACTERS);
    struct ns_reply_options options = { .tokenizer = tiny, .stop = stop,
                                        .n_stop = 1, .limit_bytes = 1000 };
    struct ns_reply *reply;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_reply_create(&options, &reply, &err), NS_OK);
    for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(ns_reply_push(reply, ids.id[i]), i >= 6);
    ns_reply_destroy(reply);
    ns_ids_fini(&ids);
}

static void
thought_tokens_are_counted_as_they_come(void **state)
{
    struct ns_ids ids =
        spelled("<|channel>thought\nabc<channel|>de", CHARACTERS);
    struct ns_reply_options options = { .tokenizer = tiny,
                                        .limit_bytes = 1000 };
    struct ns_reply *reply;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_reply_create(&options, &reply, &err), NS_OK);
    assert_false(ns_reply_in_thought(reply));
    for (size_t i = 0; i < ids.n; i++) {
        bool inside = i < 12; /* marker, name and newline, three letters */

        ns_reply_push(reply, ids.id[i]);
        assert_int_equal(ns_reply_in_thought(reply), inside);
        assert_int_equal(ns_reply_thought_tokens(reply), inside ? i : 11);
    }
    ns_reply_destroy(reply);
    ns_ids_fini(&ids);
}

/* A torn character shows as U+FFFD, and only once nothing can mend it. */
static void
half_characters_never_come_out(void **state)
{
    struct ns_ids ids = { .limit = 10 };
    struct ns_reply_text out;
    struct ns_reply *reply;
    struct ns_error err;

    (void)state;
    add(&ids, ns_tokenizer_id(tiny, "a"));
    add(&ids, byte_id(0xe4));
    add(&ids, byte_id(0xbd));
    reply = fed(&ids, false, NULL, 0);
    assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
    assert_string_equal(out.content, "a\ufffd\ufffd");
    ns_reply_destroy(reply);
    add(&ids, byte_id(0xa0));
    reply = fed(&ids, false, NULL, 0);
    assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
    assert_string_equal(out.content, "a\u4f60");
    ns_reply_destroy(reply);

    /* a NUL is a character like others */
    ids.n = 1;
    add(&ids, byte_id(0));
    add(&ids, ns_tokenizer_id(tiny, "b"));
    reply = fed(&ids, false, NULL, 0);
    assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
    assert_int_equal(out.content_length, 3);
    assert_memory_equal(out.content, "a\0b", 4);
    ns_reply_destroy(reply);
    ns_ids_fini(&ids);
}

static void
a_reply_over_its_limit_is_refused(void **state)
{
    struct ns_reply_options options = { .tokenizer = tiny, .limit_bytes = 8 };
    const char *const texts[] = {
        "123456789", "<|channel>123456789<channel|>",
        "<|tool_call>call:f{}   <tool_call|>",
    };

    (void)state;
    for (int i = 0; i < 3; i++) {
        struct ns_ids ids = spelled(texts[i], MERGED);
        struct ns_reply_text out;
        struct ns_reply *reply;
        struct ns_error err;

        assert_int_equal(ns_reply_create(&options, &reply, &err), NS_OK);
        for (size_t k = 0; k < ids.n; k++)
            ns_reply_push(reply, ids.id[k]);
        assert_int_equal(ns_reply_finish(reply, &out, &err), NS_REJECT);
        assert_string_equal(err.code, "too_large");
        ns_reply_destroy(reply);
        ns_ids_fini(&ids);
    }
}

/* What prompt.c writes, this reads: names, keys, numbers, quotes and all. */
static void
calls_come_back_as_they_were_rendered(void **state)
{
    static const char *const arguments[] = {
        "{}",
        "{\"city\":\"Oslo\",\"days\":2}",
        "{\"b\":1.5,\"a\":-2,\"C\":1e20,\"d\":false,\"e\":null,\"f\":0.1}",
        "{\"s\":\"a {b}, \\\"c\\\" 'd' \\\\n \\n\\t<|\\\"\"}",
        "{\"o\":{\"z\":{\"y\":[[],{},[{\"x\":\"\"}]]}},\"l\":[1,\"two\"]}",
        "{\"u\":\"\u00e9\u4f60\U0001f600\",\"\u00fc k\":true}",
        "{\"n\":9007199254740991,\"m\":-1e-7,\"k\":5e-324}",
        "{\"t\":\"<turn|><|tool_call>call:x{}<tool_call|>\"}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(arguments) / sizeof(*arguments); i++) {
        char request[1000], want[1000];
        struct ns_prompt_options options = { 0 };
        struct ns_ids ids = { .limit = 10000 };
        struct ns_reply_text out;
        struct ns_prompt prompt;
        struct ns_reply *reply;
        struct ns_error err = { 0 };
        json_t *messages;
        size_t first = 0;

        snprintf(request, sizeof(request),
                 "[{\"role\":\"assistant\",\"reasoning\":\"why\",\"content\":"
                 "\"so\",\"tool_calls\":[{\"function\":{\"name\":\"f_1\","
                 "\"arguments\":%s}},{\"function\":{\"name\":\"g\","
                 "\"arguments\":%s}}]}]", arguments[i], arguments[i]);
        snprintf(want, sizeof(want), "[[\"f_1\",%s],[\"g\",%s]]",
                 arguments[i], arguments[i]);
        messages = json_loads(request, 0, NULL);
        assert_non_null(messages);
        assert_int_equal(ns_prompt_render(messages, NULL, &options, 10000,
                                          &prompt, &err), NS_OK);
        assert_int_equal(ns_prompt_encode(&prompt, tiny, NULL, NULL, &ids,
                                          &err), NS_OK);
        while (ids.id[first] != ns_tokenizer_id(tiny, "<|channel>"))
            first++;
        for (size_t k = first; k < ids.n; k++) /* the engine ends there */
            if (ids.id[k] == ns_tokenizer_id(tiny, "<|tool_response>"))
                ids.n = k;
        memmove(ids.id, ids.id + first, (ids.n - first) * sizeof(*ids.id));
        ids.n -= first;
        reply = fed(&ids, false, NULL, 0);
        assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
        if (out.bad_tool_call)
            fail_msg("%s: bad: %s", arguments[i], out.bad_call_text);
        assert_calls(out.tool_calls, want);
        assert_string_equal(out.thought, "why");
        assert_string_equal(out.content, "so");
        ns_reply_destroy(reply);
        ns_prompt_fini(&prompt);
        ns_ids_fini(&ids);
        json_decref(messages);
    }
}

static void
check_case_calls(size_t line, const json_t *value, void *data)
{
    const json_t *messages = json_object_get(value, "messages");
    struct ns_prompt_options options = { 0 };
    struct ns_prompt prompt;
    struct ns_error err;
    size_t *n_calls = data;

    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *message = json_array_get(messages, i);
        const json_t *calls = json_object_get(message, "tool_calls");
        struct ns_ids ids = { .limit = 100000 };
        struct ns_reply_text out;
        struct ns_reply *reply;
        json_t *alone;

        if (!json_array_size(calls))
            continue;
        alone = json_pack("[{s:s, s:O}]", "role", "assistant", "tool_calls",
                          calls);
        if (ns_prompt_render(alone, NULL, &options, 100000, &prompt, &err) !=
            NS_OK) {
            ns_prompt_fini(&prompt);
            json_decref(alone);
            continue; /* arguments that are a text */
        }
        assert_int_equal(ns_prompt_encode(&prompt, tiny, NULL, NULL, &ids,
                                          &err), NS_OK);
        reply = fed(&ids, false, NULL, 0);
        assert_int_equal(ns_reply_finish(reply, &out, &err), NS_OK);
        if (out.bad_tool_call ||
            json_array_size(out.tool_calls) != json_array_size(calls))
            fail_msg("line %zu: the calls do not come back", line);
        for (size_t k = 0; k < json_array_size(calls); k++) {
            const json_t *have = json_object_get(
                json_array_get(out.tool_calls, k), "function");
            const json_t *want =
                json_object_get(json_array_get(calls, k), "function");
            json_t *arguments = json_object_get(want, "arguments");
            json_t *opened = json_loads(
                json_string_value(json_object_get(have, "arguments")), 0,
                NULL);

            assert_true(json_equal(json_object_get(have, "name"),
                                   json_object_get(want, "name")));
            if (json_is_object(arguments))
                assert_true(json_equal(opened, arguments));
            else
                assert_int_equal(json_object_size(opened), 0);
            json_decref(opened);
            ++*n_calls;
        }
        ns_reply_destroy(reply);
        ns_prompt_fini(&prompt);
        ns_ids_fini(&ids);
        json_decref(alone);
    }
}

static void
every_call_of_the_chat_cases_comes_back(void **state)
{
    size_t n_calls = 0;

    (void)state;
    lines_each("tests/cases/chat/chat.jsonl", check_case_calls, &n_calls);
    assert_true(n_calls > 80);
}

static void
every_failed_allocation_is_reported(void **state)
{
    static const char *const stop[] = { "zzz" };
    struct ns_ids ids = spelled(
        "<|channel>thought\nwhy<channel|>so \u4f60<|tool_call>call:f{a:1}"
        "<tool_call|><|tool_call>{\"name\":\"f\",\"arguments\":{}}"
        "<tool_call|><|tool_call>bad bad<tool_call|>", MERGED);
    struct ns_reply_options options = { .tokenizer = tiny, .stop = stop,
                                        .n_stop = 1, .limit_bytes = 1000 };
    struct ns_reply_text out;
    struct ns_error err;
    enum ns_status status;
    int n;

    (void)state;
    for (n = 0;; n++) {
        struct ns_reply *reply = NULL;

        fault_arm(n);
        status = ns_reply_create(&options, &reply, &err);
        if (status == NS_OK) {
            for (size_t i = 0; i < ids.n; i++)
                ns_reply_push(reply, ids.id[i]);
            status = ns_reply_finish(reply, &out, &err);
        }
        ns_reply_destroy(reply);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n >= 7);
    ns_ids_fini(&ids);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thought_and_content_are_separated),
        cmocka_unit_test(the_word_thought_never_leads_content),
        cmocka_unit_test(no_control_string_is_left_in_content),
        cmocka_unit_test(tool_calls_are_read_in_every_spelling),
        cmocka_unit_test(a_malformed_call_is_marked_and_kept),
        cmocka_unit_test(spelled_markers_are_text),
        cmocka_unit_test(stop_strings_cut_content_across_tokens),
        cmocka_unit_test(a_completed_stop_string_is_told_at_once),
        cmocka_unit_test(thought_tokens_are_counted_as_they_come),
        cmocka_unit_test(half_characters_never_come_out),
        cmocka_unit_test(a_reply_over_its_limit_is_refused),
        cmocka_unit_test(calls_come_back_as_they_were_rendered),
        cmocka_unit_test(every_call_of_the_chat_cases_comes_back),
        cmocka_unit_test(every_failed_allocation_is_reported),
    };
    struct ns_error err = { 0 };
    int failed;

    if (ns_tokenizer_open(TINY, &tiny, &err) != NS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    ns_tokenizer_close(tiny);
    return failed;
}
