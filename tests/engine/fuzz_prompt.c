/* fuzz_prompt.c - requests from anywhere, as JSON.
 *
 * What is rendered is tiled by its spans and is UTF-8, and its ids hold just
 * the control tokens that the template's own spans hold. */
#include "engine/prompt.h"

#include <stdint.h>
#include <stdlib.h>

#include "base/reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
require(bool good)
{
    if (!good)
        abort();
}

static size_t
n_control(const struct ns_tokenizer *tokenizer, const struct ns_ids *ids)
{
    size_t n = 0;

    for (size_t i = 0; i < ids->n; i++)
        n += ns_tokenizer_is_control(tokenizer, ids->id[i]);
    return n;
}

static void
check(const struct ns_prompt *prompt, const struct ns_tokenizer *tokenizer)
{
    struct ns_ids ids = { .limit = 1 << 20 };
    struct ns_error err;
    size_t end = 0, n_own = 0;

    require(ns_utf8_span(prompt->text.data, prompt->text.length) ==
            prompt->text.length);
    for (size_t i = 0; i < prompt->n_spans; i++) {
        const struct ns_prompt_span *span = &prompt->spans[i];
        struct ns_span part = { prompt->text.data + span->start, span->length,
                                true };

        require(span->start == end && span->length > 0);
        end += span->length;
        require(span->image < (int32_t)prompt->n_images);
        if (!span->trusted)
            continue;
        ids.n = 0;
        require(ns_tokenizer_encode(tokenizer, &part, 1, &ids, &err) == NS_OK);
        n_own += n_control(tokenizer, &ids);
    }
    require(end == prompt->text.length);
    ids.n = 0;
    if (prompt->n_images == 0) {
        require(ns_prompt_encode(prompt, tokenizer, NULL, NULL, &ids, &err) ==
                NS_OK);
        require(n_control(tokenizer, &ids) == n_own);
    }
    ns_ids_fini(&ids);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ns_tokenizer *tokenizer; /* read once, kept */
    struct ns_prompt_options options = { .generation_prompt = true };
    struct ns_prompt prompt;
    struct ns_error err;
    json_t *request;

    if (!tokenizer)
        require(ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                                  &tokenizer, &err) == NS_OK);
    request =
        json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, NULL);
    if (!request)
        return 0;
    options.thinking = json_is_true(json_object_get(request, "thinking"));
    options.preserve_thinking = json_is_true(json_object_get(request, "keep"));
    options.empty_thought = json_is_true(json_object_get(request, "empty"));
    if (ns_prompt_open_arguments(json_object_get(request, "messages"), &err) ==
        NS_OK) {
        if (ns_prompt_render(json_object_get(request, "messages"),
                             json_object_get(request, "tools"), &options,
                             1 << 20, &prompt, &err) == NS_OK)
            check(&prompt, tokenizer);
        else
            require(err.status == NS_REJECT && err.text[0]);
        ns_prompt_fini(&prompt);
    }
    json_decref(request);
    return 0;
}
