/* fuzz_tokenizer.c - tokenizer.json from anywhere, then text through it.
 *
 * The input is the file; whatever is taken must encode, and what it encodes
 * must come back and hold no control token. */
#include "engine/tokenizer.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = "he <|turn>  <mask>\n\n\u00e9\U0001f600<0x41>";
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_span span = { text, sizeof(text), false }; /* NUL and all */
    struct ns_ids ids = { .limit = 1000 };
    struct ns_error err;
    struct ns_buf out;

    if (ns_tokenizer_parse((const char *)data, size, "fuzz", &tokenizer,
                           &err) != NS_OK)
        return 0;
    if (ns_tokenizer_encode(tokenizer, &span, 1, &ids, &err) != NS_OK)
        abort();
    for (size_t i = 0; i < ids.n; i++)
        if (ns_tokenizer_is_control(tokenizer, ids.id[i]))
            abort();
    ns_buf_init(&out, 1 << 16);
    ns_tokenizer_decode(tokenizer, ids.id, ids.n, true, &out);
    if (out.length != sizeof(text) || memcmp(out.data, text, out.length))
        abort();
    ns_buf_fini(&out);
    ns_ids_fini(&ids);
    ns_tokenizer_close(tokenizer);
    return 0;
}
