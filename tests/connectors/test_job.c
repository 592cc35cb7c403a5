#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/job.h"
#include "tests/fault.h"

static const struct ns_job_options plain;

static enum ns_status
parse_bytes(const char *bytes, size_t length,
            const struct ns_job_options *options, struct ns_job **out,
            struct ns_error *err)
{
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .partition = 1, .offset = 7 },
        .origin = "jobs.jsonl",
        .bytes = bytes,
        .length = length,
        .sha256 = { 0xab, 0xcd, 0xef, 0x01, 0x23, 0x45 },
    };

    memset(err, 0, sizeof(*err));
    return ns_job_parse(&message, options, out, err);
}

static struct ns_job *
accept_with(const char *line, const struct ns_job_options *options)
{
    struct ns_job *job = NULL;
    struct ns_error err;
    enum ns_status status;

    status = parse_bytes(line, strlen(line), options, &job, &err);
    if (status != NS_OK)
        fail_msg("%s\n%s: %s", line, err.code ? err.code : "-", err.text);
    assert_int_equal(job->refusal.status, NS_OK);
    return job;
}

static struct ns_job *
accept(const char *line)
{
    return accept_with(line, &plain);
}

/* A line with `body` fields behind the messages, and `beside` it. */
static const char *
line_of(const char *body, const char *beside)
{
    static char line[4096];

    snprintf(line, sizeof(line),
             "{\"custom_id\":\"a\",\"method\":\"POST\","
             "\"url\":\"/v1/chat/completions\",\"body\":{\"model\":\"m\","
             "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s%s}%s%s}",
             body[0] ? "," : "", body, beside[0] ? "," : "", beside);
    return line;
}

/* RELIABILITY's table of bad input, the rows that need no server: what comes
 * in, the code, the field, and what the text must name: the value that was
 * wrong and the limit that it broke. */
#define MSG          "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define LINE(body)   "{\"custom_id\":\"a\",\"body\":{" MSG "," body "}}"
#define OURS(fields) LINE("\"nightshift\":{" fields "}")
#define TWENTY       "aaaaaaaaaaaaaaaaaaaa"
#define HUNDRED      TWENTY TWENTY TWENTY TWENTY TWENTY

static const struct bad {
    const char *line, *code, *param, *named, *limit;
} bad_jobs[] = {
    /* not JSON, or not a job */
    { "", "tombstone", "", "empty", NULL },
    { "{", "bad_json", "", "line 1", NULL },
    { "  ", "bad_json", "", "line 1", NULL },
    { "{}x", "bad_json", "", "line 1", NULL },
    { "{} {}", "bad_json", "", "line 1", NULL },
    { "[]", "bad_json", "", "array", "object" },
    { "17", "bad_json", "", "line 1", NULL },
    { "\"text\"", "bad_json", "", "line 1", NULL },
    { "null", "bad_json", "", "line 1", NULL },
    { "\xef\xbb\xbf{}", "bad_json", "", "byte order mark", NULL },
    { "{\"a\":NaN}", "bad_json", "", "line 1", NULL },
    { "{\"a\":-Infinity}", "bad_json", "", "line 1", NULL },
    { "{\"a\":1e999}", "bad_json", "", "overflow", NULL },
    { "{\"a\":123456789012345678901}", "bad_json", "", "integer", NULL },
    { "{\"a\":1,\"a\":2}", "bad_json", "", "duplicate", "a" },
    { "{\"custom_id\":\"a\",\"body\":{\"x\":{\"b\":1,\"b\":1}}}", "bad_json",
      "", "duplicate", "b" },
    { "{\"a\":1,}", "bad_json", "", "column", NULL },
    { "{'a':1}", "bad_json", "", "column", NULL },
    { "{\"a\":01}", "bad_json", "", "column", NULL },
    { "{\"a\":\"x", "bad_json", "", "column", NULL },
    { "{\"a\":\"\\q\"}", "bad_json", "", "escape", NULL },
    { "{\"a\":\"\\u12g4\"}", "bad_json", "", "escape", NULL },
    { "{\"a\":\xc3\xa9}", "bad_json", "", "column", NULL },
    /* text that must not come through */
    { "{\"a\":\"\\u0000\"}", "bad_text", "", "NUL", "byte 6" },
    { "{\"\\u0000\":1}", "bad_text", "", "NUL", NULL },
    { "{\"a\":\"\\ud800\"}", "bad_text", "", "surrogate", NULL },
    { "{\"a\":\"\\udc00\"}", "bad_text", "", "surrogate", NULL },
    { "{\"a\":\"\\ud800\\u0041\"}", "bad_text", "", "surrogate", NULL },
    { "{\"a\":\"\xff\"}", "bad_text", "", "UTF-8", "byte 6" },
    { "{\"a\":\"\xc0\xaf\"}", "bad_text", "", "UTF-8", NULL },
    { "{\"a\":\"\xed\xa0\x80\"}", "bad_text", "", "UTF-8", NULL },
    { "{\"a\":\"\xe2\x82\"}", "bad_text", "", "UTF-8", NULL },
    { "{\"a\":\"x\ty\"}", "bad_text", "", "control", NULL },
    { "{\"a\":\xff}", "bad_text", "", "UTF-8", "byte 5" },
    /* ids */
    { "{\"body\":{" MSG "}}", "missing_id", "custom_id", "missing", NULL },
    { "{\"custom_id\":null,\"body\":{" MSG "}}", "missing_id", "custom_id",
      "missing", NULL },
    { "{\"custom_id\":7,\"body\":{" MSG "}}", "bad_id", "custom_id", "text",
      NULL },
    { "{\"custom_id\":\"\",\"body\":{" MSG "}}", "bad_id", "custom_id", "empty",
      "200" },
    { "{\"custom_id\":\"a\\nb\",\"body\":{" MSG "}}", "bad_id", "custom_id",
      "control", NULL },
    { "{\"custom_id\":\"a\\u0085b\",\"body\":{" MSG "}}", "bad_id", "custom_id",
      "control", NULL },
    { "{\"custom_id\":\"" HUNDRED HUNDRED "b\",\"body\":{" MSG "}}", "bad_id",
      "custom_id", "201", "200" },
    { "{\"custom_id\":\"" HUNDRED "b\",\"body\":{" MSG
      ",\"nightshift\":{\"batch\":\"" HUNDRED "\"}}}",
      "bad_id", "custom_id", "202", "200" },
    { OURS("\"batch\":\"" HUNDRED "b\""), "bad_param", "nightshift.batch",
      "101", "100" },
    { OURS("\"batch\":\"a/b\""), "bad_param", "nightshift.batch", "/", NULL },
    { OURS("\"batch\":7"), "bad_param", "nightshift.batch", "7", "text" },
    { OURS("\"tenant\":\"\""), "bad_param", "nightshift.tenant", "empty",
      "100" },
    /* the line around the body */
    { "{\"custom_id\":\"a\"}", "bad_param", "body", "missing", NULL },
    { "{\"custom_id\":\"a\",\"body\":[]}", "bad_param", "body", "array",
      "object" },
    { "{\"custom_id\":\"a\",\"method\":\"GET\",\"body\":{" MSG "}}",
      "bad_param", "method", "GET", "POST" },
    { "{\"custom_id\":\"a\",\"url\":\"/v1/embeddings\",\"body\":{" MSG "}}",
      "unsupported", "url", "/v1/chat/completions", NULL },
    { "{\"custom_id\":\"a\",\"url\":3,\"body\":{" MSG "}}", "bad_param", "url",
      "3", NULL },
    { "{\"custom_id\":\"a\",\"nightshift\":{},\"body\":{" MSG
      ",\"nightshift\":{}}}",
      "bad_param", "nightshift", "beside", NULL },
    /* messages */
    { "{\"custom_id\":\"a\",\"body\":{}}", "bad_param", "body.messages",
      "missing", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":\"hi\"}}", "bad_param",
      "body.messages", "hi", "list" },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[]}}", "empty_prompt",
      "body.messages", "0", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":\"\"}]}}",
      "empty_prompt", "body.messages", "1", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[]}]}}",
      "empty_prompt", "body.messages", "1", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[7]}}", "bad_param",
      "body.messages[0]", "7", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"content\":\"hi\"}]}}",
      "bad_param", "body.messages[0].role", "text", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"model\","
      "\"content\":\"hi\"}]}}",
      "bad_param", "body.messages[0].role", "model", "assistant" },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":7}]}}",
      "bad_param", "body.messages[0].content", "7", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]}}",
      "unsupported", "body.messages[0].content[0]", "image", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[{\"type\":\"document\"}]}]}}",
      "unsupported", "body.messages[0].content[0]", "document", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[{\"type\":\"input_audio\"}]}]}}",
      "unsupported", "body.messages[0].content[0]", "audio", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[{\"type\":\"smell\"}]}]}}",
      "bad_param", "body.messages[0].content[0].type", "smell", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":[{\"type\":\"text\"}]}]}}",
      "bad_param", "body.messages[0].content[0].text", "text", NULL },
    /* numbers */
    { LINE("\"max_tokens\":0"), "bad_param", "body.max_tokens", "0", "262144" },
    { LINE("\"max_tokens\":-5"), "bad_param", "body.max_tokens", "-5", "1" },
    { LINE("\"max_tokens\":262145"), "bad_param", "body.max_tokens", "262145",
      "262144" },
    { LINE("\"max_tokens\":9223372036854775807"), "bad_param",
      "body.max_tokens", "9223372036854775807", "262144" },
    { LINE("\"max_tokens\":1.5"), "bad_param", "body.max_tokens", "1.5",
      "whole" },
    { LINE("\"max_tokens\":\"9\""), "bad_param", "body.max_tokens", "\"9\"",
      "whole" },
    { LINE("\"max_completion_tokens\":true"), "bad_param",
      "body.max_completion_tokens", "true", "whole" },
    { LINE("\"max_tokens\":5,\"max_completion_tokens\":6"), "bad_param",
      "body.max_completion_tokens", "5", "6" },
    { LINE("\"temperature\":-0.1"), "bad_param", "body.temperature", "-0.1",
      "2" },
    { LINE("\"temperature\":2.5"), "bad_param", "body.temperature", "2.5",
      "2" },
    { LINE("\"temperature\":\"hot\""), "bad_param", "body.temperature", "hot",
      "number" },
    { LINE("\"top_p\":0"), "bad_param", "body.top_p", "0", "1" },
    { LINE("\"top_p\":1.1"), "bad_param", "body.top_p", "1.1", "1" },
    { LINE("\"seed\":1.5"), "bad_param", "body.seed", "1.5", "whole" },
    { LINE("\"stop\":\"\""), "bad_param", "body.stop", "0 bytes", "256" },
    { LINE("\"stop\":[\"a\",7]"), "bad_param", "body.stop", "7", "text" },
    { LINE("\"stop\":[\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
           "\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\"]"),
      "bad_param", "body.stop", "17", "16" },
    { LINE("\"stop\":\"" HUNDRED HUNDRED HUNDRED "\""), "bad_param",
      "body.stop", "300", "256" },
    /* what is not built, or never will be */
    { LINE("\"n\":2"), "unsupported", "body.n", "more than one", NULL },
    { LINE("\"n\":0"), "bad_param", "body.n", "0", "1" },
    { LINE("\"logprobs\":true"), "unsupported", "body.logprobs", "log prob",
      NULL },
    { LINE("\"top_logprobs\":3"), "unsupported", "body.top_logprobs",
      "log prob", NULL },
    { LINE("\"logit_bias\":{\"5\":1}"), "unsupported", "body.logit_bias",
      "bias", NULL },
    { LINE("\"presence_penalty\":0.5"), "unsupported", "body.presence_penalty",
      "penalty", NULL },
    { LINE("\"frequency_penalty\":-1"), "unsupported", "body.frequency_penalty",
      "penalty", NULL },
    { LINE("\"audio\":{}"), "unsupported", "body.audio", "audio", NULL },
    { LINE("\"modalities\":[\"text\",\"audio\"]"), "unsupported",
      "body.modalities", "text", NULL },
    { LINE("\"functions\":[]"), "unsupported", "body.functions", "tools",
      NULL },
    { LINE("\"response_format\":{\"type\":\"grammar\"}"), "unsupported",
      "body.response_format", "json_schema", "choice" },
    { LINE("\"response_format\":{\"type\":\"json_schema\"}"), "bad_param",
      "body.response_format.json_schema", "missing", NULL },
    { LINE("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":"
           "{\"schema\":3}}"),
      "bad_param", "body.response_format.json_schema.schema", "Schema", NULL },
    { LINE("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":"
           "{\"name\":\"n\"}}"),
      "bad_param", "body.response_format.json_schema.schema", "missing", NULL },
    { LINE("\"response_format\":{\"type\":\"regex\"}"), "bad_param",
      "body.response_format.regex", "missing", NULL },
    { LINE("\"response_format\":{\"type\":\"choice\",\"choice\":[]}"),
      "bad_param", "body.response_format.choice", "1 to 4096", NULL },
    { LINE("\"guided_choice\":[\"a\",\"\"]"), "bad_param",
      "body.guided_choice", "[1]", "empty" },
    { LINE("\"guided_regex\":\"a\",\"guided_json\":{}"), "bad_param",
      "body.guided_json", "guided_regex", "one" },
    { LINE("\"structured_outputs\":{\"grammar\":\"root ::= x\"}"),
      "unsupported", "body.structured_outputs.grammar", "notation", NULL },
    { LINE("\"structured_outputs\":[]"), "bad_param",
      "body.structured_outputs", "object", NULL },
    { LINE("\"response_format\":{\"type\":\"json_object\"},\"tools\":"
           "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"),
      "unsupported", "body.response_format", "tools", NULL },
    { LINE("\"response_format\":\"text\""), "bad_param", "body.response_format",
      "text", "object" },
    { LINE("\"tool_choice\":\"required\""), "unsupported", "body.tool_choice",
      "forcing", NULL },
    { LINE("\"tool_choice\":{\"type\":\"function\"}"), "unsupported",
      "body.tool_choice", "forcing", NULL },
    { LINE("\"tool_choice\":\"maybe\""), "bad_param", "body.tool_choice",
      "maybe", "auto" },
    { LINE("\"tools\":{}"), "bad_param", "body.tools", "object", "list" },
    { LINE("\"tools\":[{\"type\":\"web_search\"}]"), "unsupported",
      "body.tools[0].type", "function", NULL },
    { LINE("\"tools\":[{\"type\":\"function\",\"function\":{}}]"), "bad_param",
      "body.tools[0].function.name", "text", NULL },
    { LINE("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":"
           "\"a b\"}}]"),
      "bad_param", "body.tools[0].function.name", "a b", "64" },
    { LINE("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
           "\"parameters\":7}}]"),
      "bad_param", "body.tools[0].function.parameters", "7", "schema" },
    { LINE("\"reasoning_effort\":\"extreme\""), "bad_param",
      "body.reasoning_effort", "extreme", "high" },
    { LINE("\"metadata\":[]"), "bad_param", "body.metadata", "array",
      "object" },
    { LINE("\"metadata\":{\"a\":1}"), "bad_param", "body.metadata", "512",
      NULL },
    { LINE("\"model\":7"), "bad_param", "body.model", "7", "text" },
    /* our own object */
    { LINE("\"nightshift\":[]"), "bad_param", "nightshift", "array", "object" },
    { OURS("\"thinking_bugdet\":5"), "unknown_field",
      "nightshift.thinking_bugdet", "thinking_bugdet", NULL },
    { OURS("\"mode\":\"fast\""), "bad_param", "nightshift.mode", "fast",
      "hybrid" },
    { OURS("\"mode\":3"), "bad_param", "nightshift.mode", "3", "hybrid" },
    { OURS("\"priority\":101"), "bad_param", "nightshift.priority", "101",
      "100" },
    { OURS("\"priority\":-101"), "bad_param", "nightshift.priority", "-101",
      "-100" },
    { OURS("\"deadline\":\"tomorrow\""), "bad_param", "nightshift.deadline",
      "tomorrow", "RFC 3339" },
    { OURS("\"deadline\":\"2026-02-29T00:00:00Z\""), "bad_param",
      "nightshift.deadline", "2026-02-29", "RFC 3339" },
    { OURS("\"deadline\":\"2026-12-01T06:00:00\""), "bad_param",
      "nightshift.deadline", "2026-12-01", "RFC 3339" },
    { OURS("\"deadline\":\"2026-12-01T24:00:00Z\""), "bad_param",
      "nightshift.deadline", "24", "RFC 3339" },
    { OURS("\"deadline\":\"2026-12-01T06:00:00.Z\""), "bad_param",
      "nightshift.deadline", "2026", "RFC 3339" },
    { OURS("\"deadline\":\"2026-12-01T06:00:00Zx\""), "bad_param",
      "nightshift.deadline", "2026", "RFC 3339" },
    { OURS("\"deadline\":1767225600"), "bad_param", "nightshift.deadline",
      "1767225600", "RFC 3339" },
    { OURS("\"thinking_budget\":-1"), "bad_param", "nightshift.thinking_budget",
      "-1", "0" },
    { LINE("\"reasoning_effort\":\"none\",\"nightshift\":{"
           "\"thinking_budget\":9}"),
      "bad_param", "nightshift.thinking_budget", "9", "reasoning_effort" },
    { OURS("\"canvas_length\":48"), "bad_param", "nightshift.canvas_length",
      "48", "64" },
    { OURS("\"canvas_length\":272"), "bad_param", "nightshift.canvas_length",
      "272", "256" },
    { OURS("\"canvas_length\":72"), "bad_param", "nightshift.canvas_length",
      "72", "16" },
    { OURS("\"t_min\":0"), "bad_param", "nightshift.t_min", "0", "10" },
    { OURS("\"t_min\":1e-300"), "bad_param", "nightshift.t_min", "1", "0.001" },
    { OURS("\"t_min\":0.9,\"t_max\":0.5"), "bad_param", "nightshift.t_min",
      "0.9", "0.5" },
    { OURS("\"entropy_bound\":-1"), "bad_param", "nightshift.entropy_bound",
      "-1", "0" },
    { OURS("\"max_denoising_steps\":0"), "bad_param",
      "nightshift.max_denoising_steps", "0", "1" },
    { OURS("\"stability_threshold\":-1"), "bad_param",
      "nightshift.stability_threshold", "-1", "0" },
    { OURS("\"confidence_threshold\":\"x\""), "bad_param",
      "nightshift.confidence_threshold", "x", "number" },
    { OURS("\"task\":\"cook\""), "bad_param", "nightshift.task", "cook",
      "summarize" },
    { OURS("\"task\":{}"), "bad_param", "nightshift.task", "object",
      "summarize" },
    { OURS("\"task\":{\"type\":\"summarize\",\"chunk_tokens\":5}"),
      "bad_param", "nightshift.task.chunk_tokens", "5", "128" },
    { OURS("\"task\":{\"type\":\"code\",\"chunk_tokens\":500}"),
      "unsupported", "nightshift.task", "chunk_tokens", NULL },
    { OURS("\"draft\":\"x\",\"task\":{\"type\":\"summarize\","
           "\"chunk_tokens\":500}"),
      "unsupported", "nightshift.task.chunk_tokens", "draft", NULL },
    { OURS("\"thinking_budget\":64,\"task\":{\"type\":\"summarize\","
           "\"chunk_tokens\":500}"),
      "unsupported", "nightshift.task.chunk_tokens", "thought", NULL },
    { "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
      "\"content\":\"x\"},{\"role\":\"assistant\",\"content\":\"y\"},"
      "{\"role\":\"user\",\"content\":\"z\"}]},\"nightshift\":{\"task\":"
      "{\"type\":\"summarize\",\"chunk_tokens\":500}}}",
      "unsupported", "nightshift.task.chunk_tokens", "turns", NULL },
    { OURS("\"task\":{\"type\":\"summarize\",\"overlap\":5}"),
      "unsupported", "nightshift.task.overlap", "option", NULL },
    { OURS("\"image_tokens\":280"), "unsupported", "nightshift.image_tokens",
      "image_tokens", NULL },
    { OURS("\"draft\":\"\""), "bad_param", "nightshift.draft", "draft",
      "empty" },
    { OURS("\"draft\":[\"x\"]"), "bad_param", "nightshift.draft", "array",
      "text" },
    { OURS("\"validators\":\"json\""), "bad_param", "nightshift.validators",
      "json", "a list" },
    { OURS("\"validators\":[\"json\",\"spelling\"]"), "bad_param",
      "nightshift.validators[1]", "spelling", "fence" },
    { OURS("\"validators\":[{\"schema\":7}]"), "bad_param",
      "nightshift.validators[0]", "an object", "schema" },
    { OURS("\"validators\":[\"schema\"]"), "bad_param",
      "nightshift.validators", "schema", "response_format" },
    { OURS("\"retries\":9"), "bad_param", "nightshift.retries", "9", "8" },
    { LINE("\"top_p\":0.5,\"nightshift\":{\"mode\":\"diffusion\"}"),
      "unsupported", "body.top_p", "top_p", "diffusion" },
};

static void
every_bad_job_is_refused_with_its_code_field_value_and_limit(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(bad_jobs) / sizeof(bad_jobs[0]); i++) {
        const struct bad *bad = &bad_jobs[i];
        struct ns_job *job = NULL;
        struct ns_error err;
        enum ns_status status;

        status = parse_bytes(bad->line, strlen(bad->line), &plain, &job, &err);
        if (status != NS_REJECT || !job || strcmp(err.code, bad->code) ||
            strcmp(err.param, bad->param) || !strstr(err.text, bad->named) ||
            (bad->limit && !strstr(err.text, bad->limit)))
            fail_msg("%s\n got %s (%s): %s\n want %s (%s): ... %s ... %s",
                     bad->line, err.code ? err.code : "-", err.param, err.text,
                     bad->code, bad->param, bad->named,
                     bad->limit ? bad->limit : "");
        assert_int_equal(job->refusal.status, NS_REJECT);
        assert_string_equal(job->refusal.code, bad->code);
        /* What names the refused line survives. */
        assert_int_equal(job->position.offset, 7);
        assert_int_equal(job->sha256[0], 0xab);
        if (strncmp(bad->line, "{\"custom_id\":\"a\"", 16) == 0 &&
            strncmp(bad->code, "bad_json", 8) != 0)
            assert_string_equal(job->custom_id ? job->custom_id : "", "a");
        ns_job_destroy(job);
    }
}

static void
depth_is_bounded_before_anything_recurses(void **state)
{
    static char deep[1 << 20];
    struct ns_job *job = NULL;
    struct ns_error err;
    char line[600];
    int n = 0;

    (void)state;
    memset(deep, '[', sizeof(deep));
    assert_int_equal(parse_bytes(deep, sizeof(deep), &plain, &job, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "bad_json");
    assert_non_null(strstr(err.text, "64"));
    ns_job_destroy(job);

    /* Braces inside a string are no depth. */
    n = snprintf(line, sizeof(line),
                 "{\"custom_id\":\"a\",\"body\":{" MSG ",\"user\":\"");
    memset(line + n, '[', 100);
    snprintf(line + n + 100, sizeof(line) - (size_t)n - 100, "\"}}");
    ns_job_destroy(accept(line));
}

static void
a_message_over_the_limit_is_refused_before_parsing(void **state)
{
    struct ns_job_options options = { .max_bytes = 64 };
    const char *line = line_of("", "");
    struct ns_message gone = { .kind = NS_MESSAGE_JOB, .length = 99999999 };
    struct ns_job *job = NULL;
    struct ns_error err;

    (void)state;
    assert_int_equal(parse_bytes(line, strlen(line), &options, &job, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "too_large");
    assert_non_null(strstr(err.text, "64"));
    ns_job_destroy(job);
    /* A line that its reader did not keep comes without bytes. */
    assert_int_equal(ns_job_parse(&gone, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "too_large");
    assert_non_null(strstr(err.text, "99999999"));
    ns_job_destroy(job);
}

static void
a_form_arrives_by_any_of_its_names(void **state)
{
    static const struct {
        const char *fields, *path;
        enum ns_job_form form;
    } forms[] = {
        { "\"response_format\":{\"type\":\"json_object\"}",
          "body.response_format", NS_JOB_FORM_OBJECT },
        { "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":"
          "{\"name\":\"n\",\"strict\":true,\"schema\":{\"type\":\"null\"}}}",
          "body.response_format.json_schema.schema", NS_JOB_FORM_SCHEMA },
        { "\"response_format\":{\"type\":\"regex\",\"regex\":\"a+\"}",
          "body.response_format.regex", NS_JOB_FORM_REGEX },
        { "\"response_format\":{\"type\":\"choice\",\"choice\":[\"a\"]}",
          "body.response_format.choice", NS_JOB_FORM_CHOICE },
        { "\"guided_json\":{}", "body.guided_json", NS_JOB_FORM_SCHEMA },
        { "\"guided_regex\":\"x\"", "body.guided_regex",
          NS_JOB_FORM_REGEX },
        { "\"guided_choice\":[\"x\",\"y\"]", "body.guided_choice",
          NS_JOB_FORM_CHOICE },
        { "\"structured_outputs\":{\"json\":true}",
          "body.structured_outputs.json", NS_JOB_FORM_SCHEMA },
        { "\"structured_outputs\":{\"regex\":\"x\"}",
          "body.structured_outputs.regex", NS_JOB_FORM_REGEX },
        { "\"structured_outputs\":{\"json_object\":true}",
          "body.structured_outputs.json_object", NS_JOB_FORM_OBJECT },
        { "\"response_format\":{\"type\":\"text\"},\"tools\":[]", NULL,
          NS_JOB_FORM_ANY },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        struct ns_job *job = accept(line_of(forms[i].fields, ""));

        assert_int_equal(job->form, forms[i].form);
        if (forms[i].path)
            assert_string_equal(job->form_path, forms[i].path);
        else
            assert_null(job->form_path);
        assert_int_equal(!!job->form_of, job->form > NS_JOB_FORM_OBJECT);
        ns_job_destroy(job);
    }
}

static void
every_field_arrives(void **state)
{
    struct ns_job *job;

    (void)state;
    job = accept(line_of(
        "\"max_tokens\":100,\"max_completion_tokens\":100,"
        "\"temperature\":0.5,\"top_p\":0.9,\"seed\":-3,\"stop\":[\"x\",\"yz\"],"
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
        "\"tool_choice\":\"auto\",\"response_format\":{\"type\":\"text\"},"
        "\"reasoning_effort\":\"low\",\"metadata\":{\"k\":\"v\"},\"n\":1,"
        "\"logprobs\":false,\"logit_bias\":{},\"presence_penalty\":0",
        "\"nightshift\":{\"mode\":\"hybrid\",\"batch\":\"b\",\"tenant\":\"t\","
        "\"priority\":-7,\"deadline\":\"2026-12-01T06:00:00.25+01:30\","
        "\"canvas_length\":128,\"t_min\":0.3,\"t_max\":0.9,"
        "\"entropy_bound\":0.2,\"max_denoising_steps\":20,"
        "\"stability_threshold\":0,\"confidence_threshold\":0.01,"
        "\"task\":\"code\"}"));
    assert_string_equal(job->custom_id, "a");
    assert_string_equal(job->id, "b/a");
    assert_string_equal(job->batch, "b");
    assert_string_equal(job->tenant, "t");
    assert_string_equal(job->model, "m");
    assert_string_equal(job->origin, "jobs.jsonl");
    assert_true(job->has_max_tokens);
    assert_int_equal(job->max_tokens, 100);
    assert_true(job->has_temperature && job->temperature == 0.5);
    assert_true(job->has_top_p && job->top_p == 0.9);
    assert_true(job->has_seed && job->seed == (uint64_t)-3);
    assert_int_equal(job->n_stop, 2);
    assert_string_equal(job->stop[1], "yz");
    assert_int_equal(json_array_size(job->tools), 1);
    assert_true(job->has_thinking && job->thinking);
    assert_int_equal(job->thinking_budget, 1024);
    assert_int_equal(json_object_size(job->metadata), 1);
    assert_int_equal(job->mode, NS_JOB_HYBRID);
    assert_int_equal(job->task, NS_JOB_TASK_CODE);
    assert_int_equal(job->priority, -7);
    assert_true(job->has_deadline);
    assert_true(job->deadline_ms == 1796099400250); /* 04:30:00.25 UTC */
    assert_int_equal(job->canvas_length, 128);
    assert_true(job->has_t_min && job->t_min == 0.3);
    assert_true(job->has_t_max && job->t_max == 0.9);
    assert_true(job->has_entropy_bound && job->entropy_bound == 0.2);
    assert_int_equal(job->max_denoising_steps, 20);
    assert_true(job->has_stability_threshold);
    assert_int_equal(job->stability_threshold, 0);
    assert_true(job->has_confidence_threshold);
    assert_int_equal(json_array_size(job->messages), 1);
    assert_int_equal(job->n_warnings, 0);
    ns_job_destroy(job);
}

/* The engine counts in floats, where 1e-300 is 0 and would be refused. */
static void
a_tiny_top_p_is_still_one_in_floats(void **state)
{
    const char *line = line_of("\"top_p\":1e-300", "");
    struct ns_job *job = NULL;
    struct ns_error err;

    (void)state;
    assert_int_equal(parse_bytes(line, strlen(line), &plain, &job, &err),
                     NS_OK);
    assert_true((float)job->top_p > 0 && job->top_p < 1e-5);
    ns_job_destroy(job);
}

static void
what_is_absent_or_null_is_not_there(void **state)
{
    struct ns_job *job;

    (void)state;
    job = accept(line_of("\"max_tokens\":null,\"temperature\":null,"
                         "\"tools\":null,\"stop\":null,\"logprobs\":null,"
                         "\"response_format\":null,\"nightshift\":null",
                         "\"nightshift\":{\"mode\":null,\"batch\":null}"));
    assert_false(job->has_max_tokens || job->has_temperature ||
                 job->has_top_p || job->has_seed || job->has_thinking ||
                 job->has_deadline || job->has_t_min);
    assert_null(job->tools);
    assert_null(job->metadata);
    assert_int_equal(job->mode, NS_JOB_AUTO);
    assert_string_equal(job->id, "a");
    assert_string_equal(job->tenant, "default");
    ns_job_destroy(job);
}

static void
harmless_extras_are_warned_of(void **state)
{
    static const char *const words[] = { "body.user", "body.stream",
                                         "body.\"top_k\"", "\"colour\"" };
    struct ns_job *job;

    (void)state;
    job = accept(
        line_of("\"user\":\"u\",\"stream\":true,\"top_k\":40", "\"colour\":1"));
    assert_int_equal(job->n_warnings, 4);
    for (size_t i = 0; i < 4; i++) {
        bool found = false;

        for (size_t k = 0; k < job->n_warnings; k++)
            found |= strstr(job->warnings[k], words[i]) != NULL;
        assert_true(found);
    }
    ns_job_destroy(job);
}

static void
a_flood_of_extras_is_cut_and_said_to_be(void **state)
{
    struct ns_job *job;
    char body[3000] = "\"user\":1";
    size_t used = strlen(body);

    (void)state;
    for (int i = 0; i < 100; i++)
        used += (size_t)snprintf(body + used, sizeof(body) - used,
                                 ",\"extra%d\":1", i);
    job = accept(line_of(body, ""));
    assert_int_equal(job->n_warnings, NS_JOB_WARNINGS);
    assert_string_equal(job->warnings[NS_JOB_WARNINGS - 1],
                        "and further warnings");
    ns_job_destroy(job);
}

static void
the_budget_of_thinking_follows_effort_or_is_said(void **state)
{
    static const struct {
        const char *effort;
        uint32_t tokens;
    } efforts[] = { { "none", 0 },
                    { "minimal", 512 },
                    { "low", 1024 },
                    { "medium", 4096 },
                    { "high", 16384 } };
    struct ns_job *job;
    char body[200];

    (void)state;
    for (size_t i = 0; i < 5; i++) {
        snprintf(body, sizeof(body), "\"reasoning_effort\":\"%s\"",
                 efforts[i].effort);
        job = accept(line_of(body, ""));
        assert_true(job->has_thinking);
        assert_int_equal(job->thinking, efforts[i].tokens > 0);
        assert_int_equal(job->thinking_budget, efforts[i].tokens);
        ns_job_destroy(job);
    }
    job = accept(line_of("\"reasoning_effort\":\"high\"",
                         "\"nightshift\":{\"thinking_budget\":77}"));
    assert_true(job->thinking);
    assert_int_equal(job->thinking_budget, 77);
    ns_job_destroy(job);
}

static void
models_are_served_warned_of_or_unknown(void **state)
{
    static const char *const names[] = { "x", "m" };
    struct ns_job_options served = { .model_names = names, .n_model_names = 2 };
    struct ns_job_options other = { .model_names = names, .n_model_names = 1 };
    struct ns_job_options run = { .model_warning = "demo" };
    const char *line = line_of("", "");
    struct ns_job *job;
    struct ns_error err;

    (void)state;
    ns_job_destroy(accept_with(line, &served));
    assert_int_equal(parse_bytes(line, strlen(line), &other, &job, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "unknown_model");
    assert_string_equal(err.param, "body.model");
    assert_non_null(strstr(err.text, "\"m\""));
    ns_job_destroy(job);
    job = accept_with(line, &run);
    assert_int_equal(job->n_warnings, 1);
    assert_non_null(strstr(job->warnings[0], "demo"));
    ns_job_destroy(job);
}

static void
a_line_of_a_file_without_an_id_gets_one_that_stays(void **state)
{
    struct ns_job_options options = { .id_from_position = true };
    struct ns_job *job;

    (void)state;
    job = accept_with("{\"body\":{" MSG "}}", &options);
    assert_string_equal(job->custom_id, "jobs.jsonl:7:abcdef012345");
    assert_int_equal(job->n_warnings, 1);
    ns_job_destroy(job);
}

static void
a_deadline_too_far_off_is_cut_with_a_warning(void **state)
{
    struct ns_job_options options = { .now_ms = 1764547200000 };
    struct ns_job *job;

    (void)state;
    job = accept_with(
        line_of("", "\"nightshift\":{\"deadline\":\"9999-12-31T00:00:00Z\"}"),
        &options);
    assert_true(job->deadline_ms ==
                options.now_ms + (int64_t)30 * 24 * 3600 * 1000);
    assert_int_equal(job->n_warnings, 1);
    ns_job_destroy(job);
}

static void
times_of_every_form_are_read(void **state)
{
    static const struct {
        const char *text;
        int64_t ms;
    } times[] = {
        { "1970-01-01T00:00:00Z", 0 },
        { "1969-12-31T23:59:59.999Z", -1 },
        { "2000-02-29T12:00:00z", 951825600000 },
        { "2024-02-29 00:00:00-00:00", 1709164800000 },
        { "2026-12-01t06:00:00.123456789Z", 1796104800123 },
        { "2016-12-31T23:59:60Z", 1483228800000 },
        { "0000-03-01T00:00:00Z", -62162035200000 },
    };
    char beside[120];

    (void)state;
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
        struct ns_job *job;

        snprintf(beside, sizeof(beside), "\"nightshift\":{\"deadline\":\"%s\"}",
                 times[i].text);
        job = accept(line_of("", beside));
        if (job->deadline_ms != times[i].ms)
            fail_msg("%s: %lld", times[i].text, (long long)job->deadline_ms);
        ns_job_destroy(job);
    }
}

static const char *
message_text(const struct ns_job *job, size_t index, const char *key)
{
    return json_string_value(
        json_object_get(json_array_get(job->messages, index), key));
}

static void
a_summary_carries_its_instruction_and_the_body_stays(void **state)
{
    struct ns_job *job;

    (void)state;
    job = accept(line_of("", "\"nightshift\":{\"task\":\"summarize\"}"));
    assert_int_equal(json_array_size(job->messages), 2);
    assert_string_equal(message_text(job, 0, "role"), "system");
    assert_non_null(strstr(message_text(job, 0, "content"), "Summarise"));
    assert_string_equal(message_text(job, 1, "content"), "hi");
    assert_int_equal(json_array_size(json_object_get(job->body, "messages")),
                     1);
    ns_job_destroy(job);

    job = accept("{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":"
                 "\"system\",\"content\":\"In German.\"},{\"role\":\"user\","
                 "\"content\":\"text\"}],\"nightshift\":{\"task\":{\"type\":"
                 "\"summarize\"}}}}");
    assert_int_equal(json_array_size(job->messages), 2);
    assert_non_null(strstr(message_text(job, 0, "content"), "In German.\n\n"));
    assert_non_null(strstr(message_text(job, 0, "content"), "Summarise"));
    ns_job_destroy(job);
}

static void
tools_that_may_not_be_called_are_not_there(void **state)
{
    struct ns_job *job;

    (void)state;
    job = accept(line_of("\"tools\":[{\"type\":\"function\",\"function\":"
                         "{\"name\":\"f\"}}],\"tool_choice\":\"none\"",
                         ""));
    assert_null(job->tools);
    ns_job_destroy(job);
}

static void
seeds_depend_on_id_and_base_and_fit_any_reader(void **state)
{
    struct ns_job *job = accept(line_of("", ""));
    struct ns_job *other = accept("{\"custom_id\":\"b\",\"body\":{" MSG "}}");

    (void)state;
    assert_true(ns_job_seed(job, 1) == ns_job_seed(job, 1));
    assert_true(ns_job_seed(job, 1) != ns_job_seed(job, 2));
    assert_true(ns_job_seed(job, 1) != ns_job_seed(other, 1));
    assert_true(ns_job_seed(job, 1) < (uint64_t)1 << 53);
    ns_job_destroy(job);
    ns_job_destroy(other);
}

static void
the_id_alone_is_found_wherever_it_stands(void **state)
{
    static const struct {
        const char *line, *id;
    } lines[] = {
        { "{\"custom_id\":\"a\"}", "a" },
        { " { \"body\" : {\"custom_id\":\"no\",\"x\":[1,{\"y\":\"}\"}]} , "
          "\"custom_id\" : \"b\\u00e9\\\"\" }",
          "b\xc3\xa9\"" },
        { "{\"a\":-1.5e3,\"b\":true,\"custom_id\":\"c\"", "c" },
        { "{\"custom\\u005fid\":\"d\"}", "d" },
        { "{\"custom\\u005Fid2\":\"d\",\"\\u0063ustom_id\":\"e\"}", "e" },
        { "{\"custom\\u00\":\"d\"}", NULL },
        { "{\"custom_id\":7}", NULL },
        { "{\"custom_id\":\"a", NULL },
        { "{\"x\":\"\\\"custom_id\\\":\\\"a\\\"\"}", NULL },
        { "[\"custom_id\",\"a\"]", NULL },
        { "{}", NULL },
        { "", NULL },
    };
    char id[NS_JOB_ID_BYTES + 1];

    (void)state;
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        bool found = ns_job_peek_id(lines[i].line, strlen(lines[i].line), id);

        if (found != (lines[i].id != NULL) ||
            (found && strcmp(id, lines[i].id) != 0))
            fail_msg("%s", lines[i].line);
    }
}

static void
memory_running_out_anywhere_is_an_error_and_no_leak(void **state)
{
    const char *line = line_of(
        "\"stop\":[\"x\"],\"user\":\"u\",\"tools\":[{\"type\":\"function\","
        "\"function\":{\"name\":\"f\"}}]",
        "\"nightshift\":{\"batch\":\"b\",\"task\":\"summarize\"}");
    struct ns_job *job = NULL;
    struct ns_error err;
    enum ns_status status;
    int n;

    (void)state;
    for (n = 0;; n++) {
        job = NULL;
        fault_arm(n);
        status = parse_bytes(line, strlen(line), &plain, &job, &err);
        if (!fault_fired())
            break;
        if (status != NS_FATAL) /* never mistaken for the job's fault */
            fail_msg("allocation %d: %s: %s", n, err.code, err.text);
        assert_null(job);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n > 50); /* those inside the JSON parser are among them */
    ns_job_destroy(job);
}

#define PART(image) \
    "{\"type\":\"image_url\",\"image_url\":" image "}"
#define SHOWN(parts, ours) \
    "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\"," \
    "\"content\":[" parts "]}]},\"nightshift\":{" ours "}}"

static void
pictures_are_counted_and_their_wishes_checked(void **state)
{
    static const struct ns_job_options options = { .images = true };
    static const struct {
        const char *line, *code, *param;
    } bad[] = {
        { SHOWN(PART("{}"), ""), "bad_param",
          "body.messages[0].content[0].image_url.url" },
        { SHOWN(PART("7"), ""), "bad_param",
          "body.messages[0].content[0].image_url.url" },
        { SHOWN(PART("\"\""), ""), "bad_param",
          "body.messages[0].content[0].image_url.url" },
        { SHOWN(PART("{\"url\":\"a\",\"detail\":\"most\"}"), ""), "bad_param",
          "body.messages[0].content[0].image_url.detail" },
        { SHOWN(PART("\"a\""), "\"image_tokens\":100"), "bad_param",
          "nightshift.image_tokens" },
        { SHOWN(PART("\"a\""), "\"image_tokens\":2240"), "bad_param",
          "nightshift.image_tokens" },
    };
    struct ns_job *job;
    char line[2000] = "", parts[1200] = "";

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ns_error err;

        assert_int_equal(parse_bytes(bad[i].line, strlen(bad[i].line),
                                     &options, &job, &err), NS_REJECT);
        assert_string_equal(err.code, bad[i].code);
        assert_string_equal(err.param, bad[i].param);
        ns_job_destroy(job);
    }
    job = accept_with(SHOWN(PART("{\"url\":\"a\",\"detail\":\"low\"}") ","
                            PART("\"b\""), "\"image_tokens\":560"), &options);
    assert_int_equal(job->n_images, 2);
    assert_int_equal(job->image_tokens, 560);
    ns_job_destroy(job);
    for (int i = 0; i < NS_JOB_IMAGES + 1; i++) {
        struct ns_error err;

        snprintf(parts + strlen(parts), sizeof(parts) - strlen(parts), "%s%s",
                 i ? "," : "", PART("\"a\""));
        snprintf(line, sizeof(line), SHOWN("%s", ""), parts);
        if (i < NS_JOB_IMAGES) {
            job = accept_with(line, &options);
        } else {
            assert_int_equal(parse_bytes(line, strlen(line), &options, &job,
                                         &err), NS_REJECT);
            assert_string_equal(err.code, "image_limit");
        }
        ns_job_destroy(job);
    }
}

static void
what_stands_beside_the_bytes_names_the_job(void **state)
{
    static const char bare[] =
        "{\"body\":{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}}";
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB, .bytes = bare, .length = strlen(bare),
        .id = "outer", .batch = "night", .headers = "{\"a\":\"b\"}",
        .trace_parent = "00-a-b-01",
    };
    const char *named = line_of("", "");
    struct ns_job *job = NULL;
    struct ns_error err = { 0 };

    (void)state;
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_OK);
    assert_string_equal(job->id, "night/outer");
    assert_string_equal(job->batch, "night");
    assert_string_equal(job->headers, "{\"a\":\"b\"}");
    assert_string_equal(job->trace_parent, "00-a-b-01");
    ns_job_destroy(job);

    message.bytes = named; /* what the body says wins */
    message.length = strlen(named);
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_OK);
    assert_int_equal(strncmp(job->id, "night/", 6), 0);
    assert_string_not_equal(job->id, "night/outer");
    ns_job_destroy(job);

    message.batch = "a/b";
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    ns_job_destroy(job);
    message.batch = "a\nb";
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_id");
    ns_job_destroy(job);
    message.batch = NULL;
    message.id = "a\nb"; /* of no use, and not the sender's answer */
    message.bytes = bare;
    message.length = strlen(bare);
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "missing_id");
    assert_null(job->id);
    ns_job_destroy(job);
}

static void
no_bytes_cancel_the_job_of_the_key_where_that_is_meant(void **state)
{
    struct ns_message message = { .kind = NS_MESSAGE_JOB, .id = "night/7" };
    struct ns_job *job = NULL;
    struct ns_error err = { 0 };

    (void)state;
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "tombstone");
    assert_string_equal(job->id, "night/7");
    ns_job_destroy(job);
    message.cancels = true;
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "cancel");
    assert_string_equal(job->id, "night/7");
    ns_job_destroy(job);
    message.id = NULL; /* whom? */
    assert_int_equal(ns_job_parse(&message, &plain, &job, &err), NS_REJECT);
    assert_string_equal(err.code, "tombstone");
    ns_job_destroy(job);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            every_bad_job_is_refused_with_its_code_field_value_and_limit),
        cmocka_unit_test(what_stands_beside_the_bytes_names_the_job),
        cmocka_unit_test(no_bytes_cancel_the_job_of_the_key_where_that_is_meant),
        cmocka_unit_test(depth_is_bounded_before_anything_recurses),
        cmocka_unit_test(a_message_over_the_limit_is_refused_before_parsing),
        cmocka_unit_test(a_form_arrives_by_any_of_its_names),
        cmocka_unit_test(every_field_arrives),
        cmocka_unit_test(a_tiny_top_p_is_still_one_in_floats),
        cmocka_unit_test(what_is_absent_or_null_is_not_there),
        cmocka_unit_test(harmless_extras_are_warned_of),
        cmocka_unit_test(a_flood_of_extras_is_cut_and_said_to_be),
        cmocka_unit_test(the_budget_of_thinking_follows_effort_or_is_said),
        cmocka_unit_test(models_are_served_warned_of_or_unknown),
        cmocka_unit_test(a_line_of_a_file_without_an_id_gets_one_that_stays),
        cmocka_unit_test(a_deadline_too_far_off_is_cut_with_a_warning),
        cmocka_unit_test(times_of_every_form_are_read),
        cmocka_unit_test(a_summary_carries_its_instruction_and_the_body_stays),
        cmocka_unit_test(tools_that_may_not_be_called_are_not_there),
        cmocka_unit_test(seeds_depend_on_id_and_base_and_fit_any_reader),
        cmocka_unit_test(the_id_alone_is_found_wherever_it_stands),
        cmocka_unit_test(memory_running_out_anywhere_is_an_error_and_no_leak),
        cmocka_unit_test(pictures_are_counted_and_their_wishes_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
