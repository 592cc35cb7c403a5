/* fuzz_reply.c - whatever a model may generate.
 *
 * The first byte picks the options; then ASCII is text, written out as single
 * characters, and each byte above is a marker or a byte token. Whatever comes
 * out is UTF-8, its calls are JSON objects, and it comes out twice alike. */
#include "engine/reply.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
require(bool good)
{
    if (!good)
        abort();
}

static int32_t
id_of(const struct ns_tokenizer *tokenizer, uint8_t byte)
{
    static const char *const markers[] = {
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
        "<|\"|>",     "<mask>",     "<|image|>",    "<|turn>",
    };
    char text[8] = { (char)byte };

    if (byte == ' ')
        return ns_tokenizer_id(tokenizer, "\u2581");
    if (byte >= 0xf8)
        return ns_tokenizer_id(tokenizer, markers[byte - 0xf8]);
    if (byte < 0x80 && ns_tokenizer_id(tokenizer, text) >= 0)
        return ns_tokenizer_id(tokenizer, text);
    snprintf(text, sizeof(text), "<0x%02X>", byte);
    return ns_tokenizer_id(tokenizer, text);
}

static struct ns_reply *
fed(const struct ns_tokenizer *tokenizer, const uint8_t *data, size_t size)
{
    static const char *const stop[] = { "stop", "\n\n", "op}" };
    struct ns_reply_options options = {
        .tokenizer = tokenizer,
        .in_thought = data[0] & 1,
        .stop = stop,
        .n_stop = (data[0] >> 1) % 4,
        .limit_bytes = data[0] & 8 ? 64 : 1 << 20,
    };
    struct ns_reply *reply = NULL;
    struct ns_error err;

    require(ns_reply_create(&options, &reply, &err) == NS_OK);
    for (size_t i = 1; i < size; i++)
        if (ns_reply_push(reply, id_of(tokenizer, data[i])))
            break;
    return reply;
}

static void
check(const struct ns_reply_text *text)
{
    require(ns_utf8_span(text->content, text->content_length) ==
            text->content_length);
    if (text->thought)
        require(ns_utf8_span(text->thought, text->thought_length) ==
                text->thought_length);
    require(text->bad_tool_call == (text->bad_call_text != NULL));
    for (size_t i = 0; i < json_array_size(text->tool_calls); i++) {
        const json_t *function =
            json_object_get(json_array_get(text->tool_calls, i), "function");
        const json_t *arguments = json_object_get(function, "arguments");
        json_t *opened = json_loadb(
            json_string_value(arguments), json_string_length(arguments),
            JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL,
            NULL);

        require(json_is_object(opened));
        require(json_string_length(json_object_get(function, "name")) > 0);
        json_decref(opened);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ns_tokenizer *tokenizer; /* read once, kept */
    struct ns_reply_text text, again;
    struct ns_reply *reply, *second;
    struct ns_error err;
    enum ns_status status;

    if (!tokenizer)
        require(ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                                  &tokenizer, &err) == NS_OK);
    if (size == 0)
        return 0;
    reply = fed(tokenizer, data, size);
    second = fed(tokenizer, data, size);
    status = ns_reply_finish(reply, &text, &err);
    require(ns_reply_finish(second, &again, &err) == status);
    require(status == NS_OK || status == NS_REJECT);
    if (status == NS_OK) {
        check(&text);
        require(text.content_length == again.content_length);
        require(memcmp(text.content, again.content, text.content_length) == 0);
        require(json_array_size(text.tool_calls) ==
                json_array_size(again.tool_calls));
    }
    ns_reply_destroy(reply);
    ns_reply_destroy(second);
    return 0;
}
