#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/result.h"
#include "tests/fault.h"

static const char job_line[] =
    "{\"custom_id\":\"a\\\"b\",\"body\":{\"model\":\"m\",\"user\":\"u\","
    "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
    "\"metadata\":{\"k\":\"v\"}}}";

static struct ns_job *
make_job(const char *line)
{
    static const struct ns_job_options options;
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .partition = 1, .offset = 12 },
        .origin = "jobs.jsonl",
        .bytes = line,
        .length = strlen(line),
        .sha256 = { 0x00, 0x01, 0xfe, 0xff },
    };
    struct ns_job *job = NULL;
    struct ns_error err;

    ns_job_parse(&message, &options, &job, &err);
    assert_non_null(job);
    return job;
}

static struct ns_result
ok_result(const char *content, size_t length)
{
    return (struct ns_result){
        .status = NS_RESULT_OK,
        .content = content,
        .content_length = length,
        .finish_reason = "stop",
        .model = "demo",
        .created_s = 1764547200,
        .mode = NS_JOB_HYBRID,
        .seed = 42,
        .prompt_tokens = 10,
        .cached_tokens = 4,
        .completion_tokens = 7,
        .reasoning_tokens = 2,
        .blocks = 1,
        .passes = 9,
        .denoise_steps = 8,
        .drafted = 256,
        .kept = 200,
        .tokens_per_pass = 28.4444,
        .tokens_per_denoise_step = 32,
        .queued_ms = 5,
        .run_ms = 900,
        .model_rev = "mrev",
        .engine_rev = "erev",
    };
}

static json_t *
line_of(const struct ns_job *job, const struct ns_result *result)
{
    struct ns_error err;
    json_error_t why;
    struct ns_buf buf;
    json_t *root;

    ns_buf_init(&buf, 1 << 20);
    assert_int_equal(ns_result_line(job, result, &buf, &err), NS_OK);
    assert_int_equal(buf.data[buf.length - 1], '\n');
    assert_null(memchr(buf.data, '\n', buf.length - 1));
    root = json_loadb(buf.data, buf.length, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        fail_msg("%s\n%s", buf.data, why.text);
    ns_buf_fini(&buf);
    return root;
}

/* "response.body.usage.total_tokens"; a number is an index. */
static const json_t *
at(const json_t *root, const char *path)
{
    char name[64];

    while (root && *path) {
        size_t n = strcspn(path, ".");

        memcpy(name, path, n);
        name[n] = '\0';
        root = json_is_array(root) ? json_array_get(root, (size_t)atoi(name))
                                   : json_object_get(root, name);
        path += n + (path[n] == '.');
    }
    return root;
}

static const char *
text(const json_t *root, const char *path)
{
    const char *value = json_string_value(at(root, path));

    if (!value)
        fail_msg("%s is no text", path);
    return value;
}

static int64_t
number(const json_t *root, const char *path)
{
    if (!json_is_integer(at(root, path)))
        fail_msg("%s is no whole number", path);
    return json_integer_value(at(root, path));
}

static void
an_ok_line_is_the_batch_form_with_our_object_beside_it(void **state)
{
    struct ns_job *job = make_job(job_line);
    struct ns_result result = ok_result("Hello", 5);
    json_t *root;

    (void)state;
    result.reasoning = "Hm\n";
    result.reasoning_length = 3;
    root = line_of(job, &result);
    assert_int_equal(strncmp(text(root, "id"), "batch_req_", 10), 0);
    assert_string_equal(text(root, "custom_id"), "a\"b");
    assert_true(json_is_null(at(root, "error")));
    assert_int_equal(number(root, "response.status_code"), 200);
    assert_int_equal(strncmp(text(root, "response.request_id"), "req_", 4), 0);
    assert_string_equal(text(root, "response.body.object"), "chat.completion");
    assert_string_equal(text(root, "response.body.model"), "demo");
    assert_int_equal(number(root, "response.body.created"), 1764547200);
    assert_string_equal(text(root, "response.body.choices.0.message.content"),
                        "Hello");
    assert_string_equal(text(root, "response.body.choices.0.message.role"),
                        "assistant");
    assert_string_equal(
        text(root, "response.body.choices.0.message.reasoning_content"),
        "Hm\n");
    assert_string_equal(text(root, "response.body.choices.0.finish_reason"),
                        "stop");
    assert_int_equal(number(root, "response.body.usage.prompt_tokens"), 10);
    assert_int_equal(number(root, "response.body.usage.completion_tokens"), 7);
    assert_int_equal(number(root, "response.body.usage.total_tokens"), 17);
    assert_int_equal(number(root, "response.body.usage.prompt_tokens_details."
                                  "cached_tokens"),
                     4);
    assert_int_equal(number(root, "response.body.usage."
                                  "completion_tokens_details."
                                  "reasoning_tokens"),
                     2);
    assert_string_equal(text(root, "response.body.metadata.k"), "v");
    assert_string_equal(text(root, "nightshift.status"), "ok");
    assert_int_equal(number(root, "nightshift.line"), 12);
    assert_string_equal(text(root, "nightshift.input_sha256"),
                        "0001feff000000000000000000000000"
                        "00000000000000000000000000000000");
    assert_string_equal(text(root, "nightshift.mode"), "hybrid");
    assert_int_equal(number(root, "nightshift.seed"), 42);
    assert_int_equal(number(root, "nightshift.blocks"), 1);
    assert_int_equal(number(root, "nightshift.passes"), 9);
    assert_int_equal(number(root, "nightshift.denoise_steps"), 8);
    assert_true(fabs(json_real_value(at(root, "nightshift.tokens_per_pass")) -
                     28.444) < 1e-9);
    assert_int_equal(number(root, "nightshift.drafted"), 256);
    assert_int_equal(number(root, "nightshift.kept"), 200);
    assert_int_equal(number(root, "nightshift.queued_ms"), 5);
    assert_int_equal(number(root, "nightshift.run_ms"), 900);
    assert_string_equal(text(root, "nightshift.model_rev"), "mrev");
    assert_string_equal(text(root, "nightshift.engine_rev"), "erev");
    assert_string_equal(text(root, "nightshift.warnings.0"),
                        "body.user: ignored");
    assert_null(at(root, "nightshift.sanitised"));
    assert_null(at(root, "nightshift.resumed_across"));
    json_decref(root);
    ns_job_destroy(job);
}

static void
an_error_line_names_code_field_and_line(void **state)
{
    struct ns_job *job = make_job("{\"custom_id\":\"x\",\"body\":{}}");
    struct ns_result result;
    json_t *root;

    (void)state;
    result = ns_result_of_error(NS_RESULT_DEAD, &job->refusal);
    root = line_of(job, &result);
    assert_true(json_is_null(at(root, "response")));
    assert_string_equal(text(root, "custom_id"), "x");
    assert_string_equal(text(root, "error.code"), "bad_param");
    assert_string_equal(text(root, "error.param"), "body.messages");
    assert_non_null(strstr(text(root, "error.message"), "missing"));
    assert_string_equal(text(root, "nightshift.status"), "dead");
    assert_int_equal(number(root, "nightshift.line"), 12);
    assert_null(at(root, "nightshift.mode")); /* it never ran */
    json_decref(root);
    ns_job_destroy(job);

    job = make_job("nonsense");
    result = ns_result_of_error(NS_RESULT_DEAD, &job->refusal);
    root = line_of(job, &result);
    assert_true(json_is_null(at(root, "custom_id")));
    assert_true(json_is_null(at(root, "error.param")));
    assert_string_equal(text(root, "error.code"), "bad_json");
    json_decref(root);
    ns_job_destroy(job);
}

static void
a_failed_job_that_ran_says_what_it_cost_and_what_it_wrote(void **state)
{
    struct ns_job *job = make_job(job_line);
    struct ns_result result = ok_result(NULL, 0);
    json_t *root;

    (void)state;
    result.status = NS_RESULT_FAILED;
    ns_refuse(&result.error, "bad_tool_call", NULL, "a call did not parse");
    result.detail = "call:f{";
    result.detail_length = 7;
    result.tokens_per_pass = NAN;
    root = line_of(job, &result);
    assert_string_equal(text(root, "error.code"), "bad_tool_call");
    assert_string_equal(text(root, "nightshift.detail"), "call:f{");
    assert_int_equal(number(root, "nightshift.passes"), 9);
    assert_null(at(root, "nightshift.tokens_per_pass"));
    json_decref(root);
    ns_job_destroy(job);
}

static void
tool_calls_alone_leave_content_null(void **state)
{
    struct ns_job *job = make_job(job_line);
    struct ns_result result = ok_result(NULL, 0);
    json_t *calls =
        json_pack("[{s:s,s:s,s:{s:s,s:s}}]", "id", "call_1", "type", "function",
                  "function", "name", "f", "arguments", "{\"x\":\"\\n\"}");
    json_t *root;

    (void)state;
    result.tool_calls = calls;
    result.finish_reason = "tool_calls";
    root = line_of(job, &result);
    assert_true(
        json_is_null(at(root, "response.body.choices.0.message.content")));
    assert_string_equal(text(root, "response.body.choices.0.message."
                                   "tool_calls.0.function.arguments"),
                        "{\"x\":\"\\n\"}");
    json_decref(root);
    json_decref(calls);
    ns_job_destroy(job);
}

static void
bad_sequences_become_one_replacement_each(void **state)
{
    static const struct {
        const char *bytes;
        size_t length;
        const char *out;
        uint32_t n;
    } texts[] = {
        { "plain", 5, "plain", 0 },
        { "a\0b", 3,
          "a\xef\xbf\xbd"
          "b",
          1 },
        { "\xe2\x82\xac", 3, "\xe2\x82\xac", 0 },
        { "\xe2\x82", 2, "\xef\xbf\xbd", 1 }, /* half a character */
        { "x\xf0\x9f\x98", 4, "x\xef\xbf\xbd", 1 },
        { "\xf0\x9f\x98z", 4, "\xef\xbf\xbdz", 1 },
        { "\xc0\xaf", 2, "\xef\xbf\xbd\xef\xbf\xbd", 2 }, /* overlong */
        { "\xed\xa0\x80", 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd",
          3 }, /* a surrogate */
        { "\xf4\x90\x80\x80", 4,
          "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 4 },
        { "\xe2\xe2\x82\xac", 4, "\xef\xbf\xbd\xe2\x82\xac", 1 },
        { "\x80\xff", 2, "\xef\xbf\xbd\xef\xbf\xbd", 2 },
        { "\"\\\b\f\n\r\t\v\x1f\x7f", 10,
          "\\\"\\\\\\b\\f\\n\\r\\t\\u000b\\u001f\x7f", 0 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        struct ns_buf buf;

        ns_buf_init(&buf, 1000);
        assert_int_equal(ns_result_text(&buf, texts[i].bytes, texts[i].length),
                         texts[i].n);
        assert_string_equal(buf.data, texts[i].out);
        ns_buf_fini(&buf);
    }
}

static void
what_was_replaced_is_counted_and_the_bytes_are_kept(void **state)
{
    struct ns_job *job = make_job(job_line);
    struct ns_result result = ok_result("a\0b\xe2\x82", 5);
    json_t *root;

    (void)state;
    result.reasoning = "\xff";
    result.reasoning_length = 1;
    root = line_of(job, &result);
    assert_string_equal(text(root, "response.body.choices.0.message.content"),
                        "a\xef\xbf\xbd"
                        "b\xef\xbf\xbd");
    assert_int_equal(number(root, "nightshift.sanitised"), 3);
    assert_string_equal(text(root, "nightshift.content_base64"), "YQBi4oI=");
    assert_string_equal(text(root, "nightshift.reasoning_base64"), "/w==");
    json_decref(root);
    ns_job_destroy(job);
}

static void
a_long_text_that_needs_keeping_is_kept_whole(void **state)
{
    enum { LENGTH = 10001 };
    struct ns_job *job = make_job(job_line);
    struct ns_result result;
    char *content = calloc(1, LENGTH);
    json_t *root;

    (void)state;
    memset(content, 'x', LENGTH - 1); /* its last byte is a NUL */
    result = ok_result(content, LENGTH);
    root = line_of(job, &result);
    assert_int_equal(strlen(text(root, "nightshift.content_base64")),
                     (LENGTH + 2) / 3 * 4);
    json_decref(root);
    free(content);
    ns_job_destroy(job);
}

static void
the_same_job_makes_the_same_line(void **state)
{
    struct ns_job *job = make_job(job_line), *again = make_job(job_line);
    struct ns_result result = ok_result("Hello", 5);
    struct ns_buf one, two;
    struct ns_error err;

    (void)state;
    ns_buf_init(&one, 1 << 16);
    ns_buf_init(&two, 1 << 16);
    assert_int_equal(ns_result_line(job, &result, &one, &err), NS_OK);
    assert_int_equal(ns_result_line(again, &result, &two, &err), NS_OK);
    assert_string_equal(one.data, two.data);
    ns_buf_fini(&one);
    ns_buf_fini(&two);
    ns_job_destroy(job);
    ns_job_destroy(again);
}

static void
limits_and_memory_are_errors(void **state)
{
    struct ns_job *job = make_job(job_line);
    struct ns_result result = ok_result("Hello", 5);
    json_t *calls = json_pack("[{s:s}]", "id", "c");
    struct ns_buf buf;
    struct ns_error err;
    enum ns_status status;

    (void)state;
    result.tool_calls = calls;
    ns_buf_init(&buf, 100);
    assert_int_equal(ns_result_line(job, &result, &buf, &err), NS_REJECT);
    assert_string_equal(err.code, "too_large");
    ns_buf_fini(&buf);
    for (int n = 0;; n++) {
        ns_buf_init(&buf, 1 << 16);
        fault_arm(n);
        status = ns_result_line(job, &result, &buf, &err);
        if (!fault_fired())
            break;
        ns_buf_fini(&buf);
        assert_int_equal(status, NS_FATAL);
    }
    assert_int_equal(status, NS_OK);
    ns_buf_fini(&buf);
    json_decref(calls);
    ns_job_destroy(job);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            an_ok_line_is_the_batch_form_with_our_object_beside_it),
        cmocka_unit_test(an_error_line_names_code_field_and_line),
        cmocka_unit_test(
            a_failed_job_that_ran_says_what_it_cost_and_what_it_wrote),
        cmocka_unit_test(tool_calls_alone_leave_content_null),
        cmocka_unit_test(bad_sequences_become_one_replacement_each),
        cmocka_unit_test(what_was_replaced_is_counted_and_the_bytes_are_kept),
        cmocka_unit_test(a_long_text_that_needs_keeping_is_kept_whole),
        cmocka_unit_test(the_same_job_makes_the_same_line),
        cmocka_unit_test(limits_and_memory_are_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
