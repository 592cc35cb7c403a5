/* result.h - one job's final answer, and the line that says it.
 *
 *     {"id":"batch_req_...","custom_id":"a","response":{"status_code":200,
 *      "request_id":"req_...","body":{chat.completion}},"error":null,
 *      "nightshift":{"status":"ok","line":1,"input_sha256":"...",...}}
 *
 * OpenAI's Batch response line with our own object beside it; a job that is
 * not ok has "response":null and "error":{"code","message","param"}. Ids are
 * made from the input's hash, so the same job gives the same line but for its
 * times.
 *
 * Text from the model may hold NUL bytes or half a character at its end. Each
 * such sequence is written as U+FFFD and counted in nightshift.sanitised; the
 * exact bytes then stand beside it as base64 (nightshift.content_base64,
 * reasoning_base64), so nothing is lost and every reader can read the line.
 */
#ifndef NS_CONNECTORS_RESULT_H
#define NS_CONNECTORS_RESULT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"
#include "connectors/job.h"

enum ns_result_status {
    NS_RESULT_OK,
    NS_RESULT_FAILED, /* the job was accepted and could not be done */
    NS_RESULT_DEAD,   /* refused, or given up */
    NS_RESULT_CANCELLED,
    NS_RESULT_EXPIRED,
};

/* Pointers are borrowed: from the job's arena, or from what outlives it. */
struct ns_result {
    enum ns_result_status status;

    /* Of an ok result; may stand in a failed one (bad_tool_call). */
    const char *content; /* NULL writes null (an answer of tool calls alone) */
    size_t content_length;
    const char *reasoning; /* NULL: none */
    size_t reasoning_length;
    const json_t *tool_calls;  /* OpenAI form, or NULL */
    const json_t *parts;       /* of a text summarised in parts; or NULL */
    const char *finish_reason; /* "stop", "length", "tool_calls" */
    const char *model;         /* the name that the body reports */
    int64_t created_s;         /* Unix time */

    struct ns_error error; /* unless ok: code, param, text */
    const char *detail;    /* what helps a person: the raw tool call; or NULL */
    size_t detail_length;

    /* What it cost. Zero everywhere for a job that never ran. */
    enum ns_job_mode mode;
    uint64_t seed;
    uint32_t prompt_tokens, cached_tokens, image_tokens;
    uint32_t completion_tokens, reasoning_tokens;
    uint32_t blocks, passes, denoise_steps;
    uint32_t validators; /* that looked at the text: bits of enum ns_validator */
    uint32_t attempts; /* above 1: a validator turned the earlier ones down */
    uint32_t drafted, kept;         /* hybrid: draft tokens judged, kept */
    double tokens_per_pass;         /* all passes but prefill; 0: not known */
    double tokens_per_denoise_step; /* 0: not known */
    int64_t queued_ms, run_ms;
    const char *model_rev, *engine_rev; /* NULL before the model is known */
    bool resumed_across; /* some blocks came from another engine_rev */
};

/* Appends the line, its newline included, to `out`. The job may be a refused
 * one. NS_FATAL or NS_REJECT as ns_buf_check; `out` then holds a torn line. */
enum ns_status ns_result_line(const struct ns_job *job,
                              const struct ns_result *result,
                              struct ns_buf *out, struct ns_error *err);

/* The result of a job that ends with `error` and was never run. */
struct ns_result ns_result_of_error(enum ns_result_status status,
                                    const struct ns_error *error);

const char *ns_result_status_name(enum ns_result_status status); /* "ok" */

/* Appends `text` as the inside of a JSON string: escaped, each NUL and each
 * maximal ill-formed sequence as U+FFFD. Returns how many of those. */
uint32_t ns_result_text(struct ns_buf *out, const char *text, size_t length);
/* The same without the escapes: text that any reader of UTF-8 can take. */
uint32_t ns_result_plain(struct ns_buf *out, const char *text, size_t length);

#endif
