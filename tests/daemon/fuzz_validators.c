/* The looks at an answer over any bytes: each ends, a look that turns down says
 * why, and code that is found lies in the text, block behind block. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/tool.h"
#include "daemon/validators.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(int holds)
{
    if (!holds)
        abort();
}

static bool
fit(bool good, struct ns_reason *reason)
{
    check(good == (reason->text[0] == '\0'));
    check(strlen(reason->text) < sizeof(reason->text));
    reason->text[0] = '\0';
    return good;
}

static void
check_code(const char *text, size_t length, const char *names)
{
    const char *before = text;
    struct ns_code code;
    size_t at = 0, n = 0;

    for (; ns_next_code(text, length, names, &at, &code); n++) {
        check(code.text >= before && code.line >= 1);
        check(code.length <= (size_t)(text + length - code.text));
        before = code.text + code.length;
        check(n <= length);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ns_tokenizer *tokenizer;
    const char *text = (const char *)data;
    struct ns_reason reason = { "" };
    struct ns_error err;
    bool cut, ended;
    size_t line;

    if (!tokenizer)
        check(ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                                &tokenizer, &err) == NS_OK);
    cut = fit(ns_validate_repetition(text, size, true, &reason), &reason);
    ended = fit(ns_validate_repetition(text, size, false, &reason), &reason);
    check(ended || !cut); /* what ended by itself is held to less */
    fit(ns_validate_fence(text, size, &reason), &reason);
    fit(ns_validate_json(text, size, NULL, &reason), &reason);
    fit(ns_validate_control(text, size, NULL, tokenizer, &reason), &reason);
    check_code(text, size, "c|h");
    check_code(text, size, "python|py");
    if (!ns_tool_c_is_harmless(text, size, &line))
        check(line >= 1 && line <= size + 1);
    return 0;
}
