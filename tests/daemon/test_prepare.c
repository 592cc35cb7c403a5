/* From a job to the tokens of its prompt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "connectors/job.h"
#include "daemon/prepare.h"

static struct ns_tokenizer *tokenizer;

static int
open_tokenizer(void **state)
{
    struct ns_error err;

    (void)state;
    return ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                             &tokenizer, &err);
}

static int
close_tokenizer(void **state)
{
    (void)state;
    ns_tokenizer_close(tokenizer);
    return 0;
}

static struct ns_job *
parse(const char *line)
{
    static const struct ns_job_options plain;
    struct ns_message message = { .kind = NS_MESSAGE_JOB,
                                  .position = { 1, 0, 1 },
                                  .origin = "jobs.jsonl",
                                  .bytes = line,
                                  .length = strlen(line) };
    struct ns_job *job = NULL;
    struct ns_error err;

    if (ns_job_parse(&message, &plain, &job, &err) != NS_OK)
        fail_msg("%s", err.text);
    return job;
}

#define LINE(body)                                                           \
    "{\"custom_id\":\"a\",\"method\":\"POST\","                              \
    "\"url\":\"/v1/chat/completions\",\"body\":{" body "}}"
#define CALLED(arguments, more)                                              \
    LINE("\"model\":\"m\"," more "\"messages\":["                            \
         "{\"role\":\"user\",\"content\":\"weather?\"},"                     \
         "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{"        \
         "\"id\":\"c1\",\"type\":\"function\",\"function\":{"                \
         "\"name\":\"look\",\"arguments\":" arguments "}}]},"                \
         "{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"rain\"}]")

static void
arguments_sent_as_text_are_read_as_the_object_they_hold(void **state)
{
    struct ns_job *text = parse(CALLED("\"{\\\"city\\\":\\\"Rome\\\"}\"", ""));
    struct ns_job *object = parse(CALLED("{\"city\":\"Rome\"}", ""));
    struct ns_ids a, b;
    struct ns_error err;
    bool in_thought;

    (void)state;
    for (int again = 0; again < 2; again++) { /* a second try is the same */
        assert_int_equal(ns_prepare_tokens(text, tokenizer, false, NULL, &a,
                                           &in_thought, &err), NS_OK);
        assert_false(in_thought);
        assert_int_equal(ns_prepare_tokens(object, tokenizer, false, NULL, &b,
                                           &in_thought, &err), NS_OK);
        assert_int_equal(a.n, b.n);
        assert_memory_equal(a.id, b.id, a.n * sizeof(int32_t));
        ns_ids_fini(&a);
        ns_ids_fini(&b);
    }
    ns_job_destroy(text);
    ns_job_destroy(object);
}

static void
arguments_that_hold_no_object_are_refused_by_their_field(void **state)
{
    struct ns_job *job = parse(CALLED("\"not json\"", ""));
    struct ns_ids ids;
    struct ns_error err;
    bool in_thought;

    (void)state;
    assert_int_equal(ns_prepare_tokens(job, tokenizer, false, NULL, &ids,
                                       &in_thought, &err), NS_REJECT);
    assert_memory_equal(err.param, "body.messages[1]", 16);
    ns_ids_fini(&ids);
    ns_job_destroy(job);
}

static void
a_thinking_job_behind_a_tool_result_starts_inside_its_thought(void **state)
{
    struct ns_job *job = parse(CALLED("{}", "\"reasoning_effort\":\"low\","));
    struct ns_ids ids;
    struct ns_error err;
    bool in_thought = false;

    (void)state;
    assert_int_equal(ns_prepare_tokens(job, tokenizer, false, NULL, &ids,
                                       &in_thought, &err), NS_OK);
    assert_true(in_thought);
    ns_ids_fini(&ids);
    ns_job_destroy(job);
}

static void
the_dialect_closes_an_empty_thought_where_thinking_is_off(void **state)
{
    struct ns_job *job = parse(LINE(
        "\"model\":\"m\",\"messages\":[{\"role\":\"user\","
        "\"content\":\"hello\"}]"));
    int32_t closing = ns_tokenizer_id(tokenizer, "<channel|>");
    struct ns_ids ids;
    struct ns_error err;
    bool in_thought;

    (void)state;
    for (int dialect = 0; dialect < 2; dialect++) {
        assert_int_equal(ns_prepare_tokens(job, tokenizer, dialect, NULL, &ids,
                                           &in_thought, &err), NS_OK);
        assert_int_equal(ids.id[ids.n - 1] == closing, dialect);
        assert_false(in_thought);
        ns_ids_fini(&ids);
    }
    ns_job_destroy(job);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            arguments_sent_as_text_are_read_as_the_object_they_hold),
        cmocka_unit_test(
            arguments_that_hold_no_object_are_refused_by_their_field),
        cmocka_unit_test(
            a_thinking_job_behind_a_tool_result_starts_inside_its_thought),
        cmocka_unit_test(
            the_dialect_closes_an_empty_thought_where_thinking_is_off),
    };

    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
