/* A job's bytes before they are parsed: what must not come through, and the id
 * alone. */
#include <string.h>

#include "base/reader.h"
#include "connectors/job_private.h"

static bool
hex4(const char *at, const char *end, uint32_t *out)
{
    uint32_t x = 0;

    if (end - at < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = at[i];

        if (c >= '0' && c <= '9')
            x = x << 4 | (uint32_t)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            x = x << 4 | (uint32_t)((c | 32) - 'a' + 10);
        else
            return false;
    }
    *out = x;
    return true;
}

/* Judges the escape behind a backslash. NULL: fine, or left to the parser to
 * refuse; else what is wrong. Moves `at` behind it. */
static const char *
scan_escape(const char **at, const char *end)
{
    uint32_t c, low;

    if (*at == end || **at != 'u') {
        *at += *at != end;
        return NULL;
    }
    (*at)++;
    if (!hex4(*at, end, &c))
        return NULL;
    *at += 4;
    if (c == 0)
        return "a NUL character";
    if (c >= 0xdc00 && c <= 0xdfff)
        return "a lone surrogate";
    if (c < 0xd800 || c > 0xdbff)
        return NULL;
    if (end - *at < 6 || (*at)[0] != '\\' || (*at)[1] != 'u' ||
        !hex4(*at + 2, end, &low) || low < 0xdc00 || low > 0xdfff)
        return "a lone surrogate";
    *at += 6;
    return NULL;
}

enum ns_status
ns_job_scan(const char *bytes, size_t length, struct ns_error *err)
{
    const char *at = bytes, *end = bytes + length, *bad = NULL;
    bool in_string = false;
    int depth = 0;

    if (length >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0)
        return ns_refuse(err, "bad_json", NULL,
                         "the line starts with a byte order mark");
    while (at < end) {
        const char *start = at;
        unsigned char c = (unsigned char)*at;

        if (c >= 0x80 || c == 0) {
            size_t n = c ? ns_utf8_char(at, (size_t)(end - at), NULL) : 0;

            bad = n ? NULL : c ? "invalid UTF-8" : "a NUL byte";
            at += n;
        } else if (!in_string) {
            at++;
            if (c == '"')
                in_string = true;
            else if (c == '{' || c == '[')
                depth++;
            else if (c == '}' || c == ']')
                depth--;
            if (depth > NS_JOB_DEPTH)
                return ns_refuse(err, "bad_json", NULL,
                                 "nested deeper than %d at byte %zu",
                                 NS_JOB_DEPTH, (size_t)(start - bytes));
        } else {
            at++;
            if (c == '"')
                in_string = false;
            else if (c == '\\')
                bad = scan_escape(&at, end);
            else if (c < 0x20)
                bad = "a raw control character";
        }
        if (bad)
            return ns_refuse(err, "bad_text", NULL, "%s at byte %zu", bad,
                             (size_t)(start - bytes));
    }
    return NS_OK;
}

/* ---- the id alone ---------------------------------------------------- */

static void
skip_blanks(const char **at, const char *end)
{
    while (*at < end &&
           (**at == ' ' || **at == '\t' || **at == '\r' || **at == '\n'))
        (*at)++;
}

/* Walks over a string, its quotes included. False: it does not end. */
static bool
skip_string(const char **at, const char *end)
{
    for (const char *c = *at + 1; c < end; c++) {
        if (*c == '\\')
            c++;
        else if (*c == '"') {
            *at = c + 1;
            return true;
        }
    }
    return false;
}

/* Walks to the comma or the brace behind a value of an object. */
static bool
skip_value(const char **at, const char *end)
{
    int64_t depth = 0;

    while (*at < end) {
        char c = **at;

        if (c == '"') {
            if (!skip_string(at, end))
                return false;
            continue;
        }
        if (depth == 0 && (c == ',' || c == '}'))
            return true;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        (*at)++;
    }
    return false;
}

/* The text between two quotes, escapes undone. */
static bool
copy_id(const char *quoted, size_t length, char out[NS_JOB_ID_BYTES + 1])
{
    json_t *text;
    bool fits;

    if (!memchr(quoted, '\\', length)) {
        if (length - 2 > NS_JOB_ID_BYTES)
            return false;
        memcpy(out, quoted + 1, length - 2);
        out[length - 2] = '\0';
        return strlen(out) == length - 2;
    }
    if (length > 6 * NS_JOB_ID_BYTES + 2) /* each byte an escape of six */
        return false;
    text = json_loadb(quoted, length, JSON_DECODE_ANY, NULL);
    fits = text && json_string_length(text) <= NS_JOB_ID_BYTES;
    if (fits)
        memcpy(out, json_string_value(text), json_string_length(text) + 1);
    json_decref(text);
    return fits;
}

/* Keys may be spelt with escapes too, and mean the same then. */
static bool
is_custom_id(const char *quoted, size_t length)
{
    static const char name[] = "custom_id";
    char text[NS_JOB_ID_BYTES + 1];

    if (!memchr(quoted, '\\', length))
        return length - 2 == sizeof(name) - 1 &&
               memcmp(quoted + 1, name, sizeof(name) - 1) == 0;
    return copy_id(quoted, length, text) && strcmp(text, name) == 0;
}

bool
ns_job_peek_id(const char *bytes, size_t length, char out[NS_JOB_ID_BYTES + 1])
{
    const char *at = bytes, *end = bytes + length;

    skip_blanks(&at, end);
    if (at == end || *at != '{')
        return false;
    do {
        const char *key, *value;
        bool is_id;

        at++; /* the brace or the comma */
        skip_blanks(&at, end);
        key = at;
        if (at == end || *at != '"' || !skip_string(&at, end))
            return false;
        is_id = is_custom_id(key, (size_t)(at - key));
        skip_blanks(&at, end);
        if (at == end || *at != ':')
            return false;
        at++;
        skip_blanks(&at, end);
        value = at;
        if (is_id)
            return at < end && *at == '"' && skip_string(&at, end) &&
                   copy_id(value, (size_t)(at - value), out);
        if (!skip_value(&at, end))
            return false;
    } while (*at == ',');
    return false;
}
