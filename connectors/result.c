#include "connectors/result.h"

#include <inttypes.h>
#include <math.h>
#include <openssl/evp.h>
#include <string.h>
#include <xxhash.h>

#include "base/reader.h"

const char *
ns_result_status_name(enum ns_result_status status)
{
    switch (status) {
    case NS_RESULT_OK:
        return "ok";
    case NS_RESULT_FAILED:
        return "failed";
    case NS_RESULT_DEAD:
        return "dead";
    case NS_RESULT_CANCELLED:
        return "cancelled";
    case NS_RESULT_EXPIRED:
        return "expired";
    }
    return "unknown";
}

struct ns_result
ns_result_of_error(enum ns_result_status status, const struct ns_error *error)
{
    struct ns_result result = { .status = status, .error = *error };

    return result;
}

/* Length of the maximal ill-formed sequence at `s`: the bytes that began a
 * character and could not end it, as Unicode advises to replace them, so that
 * half a character is one U+FFFD and not three. */
static size_t
ill_formed(const unsigned char *s, size_t left)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t more, n = 1;

    if (s[0] >= 0xc2 && s[0] <= 0xdf)
        more = 1;
    else if (s[0] >= 0xe0 && s[0] <= 0xef)
        more = 2;
    else if (s[0] >= 0xf0 && s[0] <= 0xf4)
        more = 3;
    else
        return 1;
    if (s[0] == 0xe0)
        low = 0xa0;
    else if (s[0] == 0xed)
        high = 0x9f;
    else if (s[0] == 0xf0)
        low = 0x90;
    else if (s[0] == 0xf4)
        high = 0x8f;
    while (n <= more && n < left && s[n] >= low && s[n] <= high) {
        low = 0x80;
        high = 0xbf;
        n++;
    }
    return n;
}

uint32_t
ns_result_text(struct ns_buf *out, const char *text, size_t length)
{
    static const char shorts[] = "btn_fr"; /* \b is 8, there is no \v */
    uint32_t replaced = 0;
    size_t at = 0, clean = 0;

    while (at < length) {
        unsigned char c = (unsigned char)text[at];
        size_t n;

        if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\') {
            at++;
            continue;
        }
        n = c ? ns_utf8_char(text + at, length - at, NULL) : 0;
        if (n > 1) {
            at += n;
            continue;
        }
        ns_buf_add(out, text + clean, at - clean);
        if (n == 0) {
            n = c ? ill_formed((const unsigned char *)text + at, length - at)
                  : 1;
            ns_buf_text(out, "\xef\xbf\xbd");
            replaced++;
        } else if (c == '"' || c == '\\') {
            ns_buf_byte(out, '\\');
            ns_buf_byte(out, (char)c);
        } else if (c >= 8 && c <= 13 && c != 11) {
            ns_buf_byte(out, '\\');
            ns_buf_byte(out, shorts[c - 8]);
        } else {
            ns_buf_printf(out, "\\u%04x", c);
        }
        at += n;
        clean = at;
    }
    ns_buf_add(out, text + clean, at - clean);
    return replaced;
}

uint32_t
ns_result_plain(struct ns_buf *out, const char *text, size_t length)
{
    uint32_t replaced = 0;
    size_t at = 0, clean = 0;

    while (at < length) {
        const char *nul;
        size_t n = ns_utf8_span(text + at, length - at);

        nul = memchr(text + at, '\0', n);
        at = nul ? (size_t)(nul - text) : at + n;
        if (at == length)
            break;
        ns_buf_add(out, text + clean, at - clean);
        ns_buf_text(out, "\xef\xbf\xbd");
        replaced++;
        at += nul ? 1 : ill_formed((const unsigned char *)text + at,
                                   length - at);
        clean = at;
    }
    ns_buf_add(out, text + clean, at - clean);
    return replaced;
}

static uint32_t
put_string(struct ns_buf *out, const char *text, size_t length)
{
    uint32_t replaced;

    ns_buf_byte(out, '"');
    replaced = ns_result_text(out, text, length);
    ns_buf_byte(out, '"');
    return replaced;
}

static void
put_text(struct ns_buf *out, const char *text) /* NULL: null */
{
    if (text)
        put_string(out, text, strlen(text));
    else
        ns_buf_text(out, "null");
}

static void
put_base64(struct ns_buf *out, const char *bytes, size_t length)
{
    enum { CHUNK = 3 * 1024 };
    unsigned char text[CHUNK / 3 * 4 + 1];

    ns_buf_byte(out, '"');
    for (size_t at = 0; at < length; at += CHUNK) {
        size_t n = length - at < CHUNK ? length - at : CHUNK;
        int written =
            EVP_EncodeBlock(text, (const unsigned char *)bytes + at, (int)n);

        ns_buf_add(out, text, (size_t)written);
    }
    ns_buf_byte(out, '"');
}

static int
add_json(const char *bytes, size_t length, void *out)
{
    ns_buf_add(out, bytes, length);
    return 0;
}

static void
put_json(struct ns_buf *out, const json_t *value)
{
    size_t before = out->length;

    if (json_dump_callback(value, add_json, out, JSON_COMPACT) == -1 ||
        out->length == before)
        out->failed = true; /* memory, inside the encoder */
}

static void
put_ratio(struct ns_buf *out, const char *name, double ratio)
{
    if (isfinite(ratio) && ratio > 0)
        ns_buf_printf(out, ",\"%s\":%.3f", name, ratio);
}

/* What the three ids of a line are made of: the input, not the moment. */
static void
name_of(const struct ns_job *job, char out[25])
{
    XXH128_hash_t hash = XXH3_128bits_withSeed(job->sha256, NS_SHA256_BYTES,
                                               job->position.offset);

    snprintf(out, 25, "%016" PRIx64 "%08" PRIx32, (uint64_t)hash.low64,
             (uint32_t)hash.high64);
}

struct sanitised {
    uint32_t content, reasoning;
};

static void
put_response(struct ns_buf *out, const struct ns_job *job,
             const struct ns_result *result, const char *name,
             struct sanitised *sanitised)
{
    ns_buf_printf(out,
                  "{\"status_code\":200,\"request_id\":\"req_%s\",\"body\":{"
                  "\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\","
                  "\"created\":%" PRId64 ",\"model\":",
                  name, name, result->created_s);
    put_text(out, result->model ? result->model : job->model);
    ns_buf_text(out, ",\"choices\":[{\"index\":0,\"message\":{"
                     "\"role\":\"assistant\",\"content\":");
    if (result->content)
        sanitised->content =
            put_string(out, result->content, result->content_length);
    else
        ns_buf_text(out, "null");
    if (result->reasoning) {
        ns_buf_text(out, ",\"reasoning_content\":");
        sanitised->reasoning =
            put_string(out, result->reasoning, result->reasoning_length);
    }
    if (result->tool_calls) {
        ns_buf_text(out, ",\"tool_calls\":");
        put_json(out, result->tool_calls);
    }
    ns_buf_text(out, "},\"logprobs\":null,\"finish_reason\":");
    put_text(out, result->finish_reason);
    ns_buf_printf(out,
                  "}],\"usage\":{\"prompt_tokens\":%" PRIu32
                  ",\"completion_tokens\":%" PRIu32 ",\"total_tokens\":%" PRIu64
                  ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu32,
                  result->prompt_tokens, result->completion_tokens,
                  (uint64_t)result->prompt_tokens + result->completion_tokens,
                  result->cached_tokens);
    if (result->image_tokens)
        ns_buf_printf(out, ",\"image_tokens\":%" PRIu32,
                      result->image_tokens);
    ns_buf_printf(out,
                  "},\"completion_tokens_details\":{\"reasoning_tokens\":"
                  "%" PRIu32 "}}", result->reasoning_tokens);
    if (job->metadata) {
        ns_buf_text(out, ",\"metadata\":");
        put_json(out, job->metadata);
    }
    if (result->parts) {
        ns_buf_text(out, ",\"parts\":");
        put_json(out, result->parts);
    }
    ns_buf_text(out, "}}");
}

static void
put_validators(struct ns_buf *out, uint32_t which)
{
    const char *between = ",\"validators\":[";

    for (int i = 0; i < NS_N_VALIDATORS; i++)
        if (which & 1u << i) {
            ns_buf_printf(out, "%s\"%s\"", between,
                          ns_validator_name((enum ns_validator)i));
            between = ",";
        }
    ns_buf_byte(out, ']');
}

static void
put_nightshift(struct ns_buf *out, const struct ns_job *job,
               const struct ns_result *result,
               const struct sanitised *sanitised)
{
    ns_buf_printf(out,
                  "{\"status\":\"%s\",\"line\":%" PRIu64 ",\"input_sha256\":\"",
                  ns_result_status_name(result->status), job->position.offset);
    for (int i = 0; i < NS_SHA256_BYTES; i++)
        ns_buf_printf(out, "%02x", job->sha256[i]);
    ns_buf_byte(out, '"');
    if (result->engine_rev) { /* it came as far as the engine */
        ns_buf_printf(out,
                      ",\"mode\":\"%s\",\"seed\":%" PRId64
                      ",\"blocks\":%" PRIu32 ",\"passes\":%" PRIu32
                      ",\"denoise_steps\":%" PRIu32,
                      ns_job_mode_name(result->mode), (int64_t)result->seed,
                      result->blocks, result->passes, result->denoise_steps);
        put_ratio(out, "tokens_per_pass", result->tokens_per_pass);
        put_ratio(out, "tokens_per_denoise_step",
                  result->tokens_per_denoise_step);
        if (result->drafted)
            ns_buf_printf(out, ",\"drafted\":%" PRIu32 ",\"kept\":%" PRIu32,
                          result->drafted, result->kept);
        if (result->attempts > 1)
            ns_buf_printf(out, ",\"attempts\":%" PRIu32, result->attempts);
        if (result->validators)
            put_validators(out, result->validators);
        ns_buf_printf(out,
                      ",\"queued_ms\":%" PRId64 ",\"run_ms\":%" PRId64
                      ",\"model_rev\":",
                      result->queued_ms, result->run_ms);
        put_text(out, result->model_rev);
        ns_buf_text(out, ",\"engine_rev\":");
        put_text(out, result->engine_rev);
        if (result->resumed_across)
            ns_buf_text(out, ",\"resumed_across\":true");
    }
    if (sanitised->content + sanitised->reasoning)
        ns_buf_printf(out, ",\"sanitised\":%" PRIu32,
                      sanitised->content + sanitised->reasoning);
    if (sanitised->content) {
        ns_buf_text(out, ",\"content_base64\":");
        put_base64(out, result->content, result->content_length);
    }
    if (sanitised->reasoning) {
        ns_buf_text(out, ",\"reasoning_base64\":");
        put_base64(out, result->reasoning, result->reasoning_length);
    }
    if (result->detail) {
        ns_buf_text(out, ",\"detail\":");
        put_string(out, result->detail, result->detail_length);
    }
    if (job->replay_of) {
        ns_buf_text(out, ",\"replay_of\":");
        put_text(out, job->replay_of);
    }
    ns_buf_text(out, ",\"warnings\":[");
    for (size_t i = 0; i < job->n_warnings; i++) {
        ns_buf_text(out, i ? "," : "");
        put_text(out, job->warnings[i]);
    }
    ns_buf_text(out, "]}");
}

enum ns_status
ns_result_line(const struct ns_job *job, const struct ns_result *result,
               struct ns_buf *out, struct ns_error *err)
{
    struct sanitised sanitised = { 0, 0 };
    char name[25];

    name_of(job, name);
    ns_buf_printf(out, "{\"id\":\"batch_req_%s\",\"custom_id\":", name);
    put_text(out, job->custom_id);
    ns_buf_text(out, ",\"response\":");
    if (result->status == NS_RESULT_OK) {
        put_response(out, job, result, name, &sanitised);
        ns_buf_text(out, ",\"error\":null");
    } else {
        ns_buf_text(out, "null,\"error\":{\"code\":");
        put_text(out, result->error.code ? result->error.code : "internal");
        ns_buf_text(out, ",\"message\":");
        put_text(out, result->error.text);
        ns_buf_text(out, ",\"param\":");
        put_text(out, result->error.param[0] ? result->error.param : NULL);
        ns_buf_byte(out, '}');
    }
    ns_buf_text(out, ",\"nightshift\":");
    put_nightshift(out, job, result, &sanitised);
    ns_buf_text(out, "}\n");
    return ns_buf_check(out, "a result line", err);
}
