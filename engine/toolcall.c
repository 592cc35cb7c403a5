#include "engine/toolcall.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"

enum { MAX_DEPTH = 64, MAX_NAME = 256 };

static const char quote_text[] = "<|\"|>";

static bool
is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void
skip_blanks(struct ns_reader *in)
{
    while (in->at < in->end && is_blank((char)*in->at))
        in->at++;
}

/* The next byte, or 0 at the end (a NUL in the text fits nowhere either). */
static char
peek(const struct ns_reader *in)
{
    return in->at < in->end ? (char)*in->at : '\0';
}

static bool
take(struct ns_reader *in, char c)
{
    if (in->at == in->end || (char)*in->at != c)
        return false;
    in->at++;
    return true;
}

static bool
take_text(struct ns_reader *in, const char *text)
{
    size_t n = strlen(text);

    if (ns_reader_left(in) < n || memcmp(in->at, text, n) != 0)
        return false;
    in->at += n;
    return true;
}

static bool
is_sentinel(char c)
{
    return c == NS_TOOLCALL_QUOTE || c == NS_TOOLCALL_OTHER;
}

static void
put_escaped(struct ns_buf *out, char c)
{
    if (c == '"' || c == '\\')
        ns_buf_byte(out, '\\');
    if ((unsigned char)c < 0x20)
        ns_buf_printf(out, "\\u%04x", (unsigned)c);
    else
        ns_buf_byte(out, c);
}

/* A string behind its opening quote, up to and with `end`, taken as it is. */
static bool
plain_string(struct ns_reader *in, const char *end, struct ns_buf *out)
{
    ns_buf_byte(out, '"');
    while (in->at < in->end) {
        if (take_text(in, end)) {
            ns_buf_byte(out, '"');
            return true;
        }
        if (is_sentinel((char)*in->at))
            return false;
        put_escaped(out, (char)*in->at++);
    }
    return false;
}

/* The same with backslashes: JSON's escapes go through, to be judged with the
 * whole; \' is an apostrophe. */
static bool
escaped_string(struct ns_reader *in, char end, struct ns_buf *out)
{
    ns_buf_byte(out, '"');
    while (in->at < in->end) {
        char c = (char)*in->at++;

        if (is_sentinel(c))
            return false;
        if (c == end) {
            ns_buf_byte(out, '"');
            return true;
        }
        if (c != '\\') {
            put_escaped(out, c);
            continue;
        }
        if (in->at == in->end)
            return false;
        c = (char)*in->at++;
        if (is_sentinel(c))
            return false;
        if (c != '\'')
            ns_buf_byte(out, '\\');
        ns_buf_byte(out, c);
    }
    return false;
}

/* False also when no string starts here; then nothing was taken. */
static bool
string(struct ns_reader *in, struct ns_buf *out)
{
    static const char quote_token[] = { NS_TOOLCALL_QUOTE, '\0' };

    if (take(in, NS_TOOLCALL_QUOTE))
        return plain_string(in, quote_token, out);
    if (take_text(in, quote_text))
        return plain_string(in, quote_text, out);
    if (take(in, '"'))
        return escaped_string(in, '"', out);
    return take(in, '\'') && escaped_string(in, '\'', out);
}

static bool
starts_string(const struct ns_reader *in)
{
    struct ns_reader probe = *in;

    return peek(in) == NS_TOOLCALL_QUOTE || peek(in) == '"' ||
           peek(in) == '\'' || take_text(&probe, quote_text);
}

static size_t
digits(struct ns_reader *in)
{
    const unsigned char *from = in->at;

    while (peek(in) >= '0' && peek(in) <= '9')
        in->at++;
    return (size_t)(in->at - from);
}

/* JSON's grammar; the digits are kept as written, however many. */
static bool
number(struct ns_reader *in, struct ns_buf *out)
{
    const unsigned char *from = in->at;

    take(in, '-');
    if (!take(in, '0') && digits(in) == 0)
        return false;
    if (take(in, '.') && digits(in) == 0)
        return false;
    if (take(in, 'e') || take(in, 'E')) {
        if (!take(in, '+'))
            take(in, '-');
        if (digits(in) == 0)
            return false;
    }
    ns_buf_add(out, from, (size_t)(in->at - from));
    return true;
}

static bool
word(struct ns_reader *in, struct ns_buf *out)
{
    static const char *const words[][2] = {
        { "true", "true" }, { "false", "false" }, { "null", "null" },
        { "True", "true" }, { "False", "false" }, { "None", "null" },
    };

    for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
        if (take_text(in, words[i][0])) {
            ns_buf_text(out, words[i][1]);
            return true;
        }
    return false;
}

static bool map(struct ns_reader *in, char closer, struct ns_buf *out,
                int depth);

static bool
value(struct ns_reader *in, struct ns_buf *out, int depth)
{
    bool first = true;

    if (depth > MAX_DEPTH)
        return false;
    if (starts_string(in))
        return string(in, out);
    if (take(in, '{'))
        return map(in, '}', out, depth);
    if (take(in, '[')) {
        ns_buf_byte(out, '[');
        for (;; first = false) {
            skip_blanks(in);
            if (take(in, ']'))
                break;
            if (!first) {
                if (!take(in, ','))
                    return false;
                ns_buf_byte(out, ',');
                skip_blanks(in);
            }
            if (!value(in, out, depth + 1))
                return false;
        }
        ns_buf_byte(out, ']');
        return true;
    }
    if (peek(in) == '-' || (peek(in) >= '0' && peek(in) <= '9'))
        return number(in, out);
    return word(in, out);
}

/* A key in quotes, or bare up to its colon (or `=`, in parentheses). */
static bool
key(struct ns_reader *in, bool equals, struct ns_buf *out)
{
    const unsigned char *from, *to;

    if (starts_string(in)) {
        if (!string(in, out))
            return false;
        skip_blanks(in);
    } else {
        from = in->at;
        while (in->at < in->end && *in->at != ':' &&
               !(equals && *in->at == '=')) {
            if (*in->at < 0x20 || is_sentinel((char)*in->at) ||
                strchr("{}[],\"", *in->at))
                return false;
            in->at++;
        }
        for (to = in->at; to > from && is_blank((char)to[-1]); to--)
            ;
        if (to == from)
            return false;
        ns_buf_byte(out, '"');
        for (; from < to; from++)
            put_escaped(out, (char)*from);
        ns_buf_byte(out, '"');
    }
    ns_buf_byte(out, ':');
    return take(in, ':') || (equals && take(in, '='));
}

/* Members behind the opening bracket, up to and with `closer`. */
static bool
map(struct ns_reader *in, char closer, struct ns_buf *out, int depth)
{
    bool first = true;

    ns_buf_byte(out, '{');
    for (;; first = false) {
        skip_blanks(in);
        if (take(in, closer))
            break;
        if (!first) {
            if (!take(in, ','))
                return false;
            ns_buf_byte(out, ',');
            skip_blanks(in);
        }
        if (!key(in, closer == ')', out))
            return false;
        skip_blanks(in);
        if (!value(in, out, depth + 1))
            return false;
    }
    ns_buf_byte(out, '}');
    return true;
}

static bool
take_name(struct ns_reader *in, struct ns_buf *name)
{
    const unsigned char *from = in->at;

    while (in->at<in->end && * in->at> 0x20 && *in->at != 0x7f &&
           !is_sentinel((char)*in->at) && !strchr("{}()[],:;\"'=<>", *in->at))
        in->at++;
    if (in->at == from || in->at - from > MAX_NAME)
        return false;
    ns_buf_add(name, from, (size_t)(in->at - from));
    return true;
}

/* What was written must be JSON, and no key may stand there twice. */
static json_t *
checked(const struct ns_buf *json)
{
    if (json->over || json->failed || !json->data)
        return NULL;
    return json_loadb(json->data, json->length,
                      JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL |
                          JSON_DECODE_INT_AS_REAL,
                      NULL);
}

/* {"name": "f", "arguments": {...}}, where the arguments may be a text. */
static bool
whole_object(struct ns_reader *in, struct ns_buf *name,
             struct ns_buf *arguments)
{
    json_t *root = NULL, *given, *opened = NULL;
    const json_t *called;
    char *dumped = NULL;
    bool good = false;

    if (!take(in, '{') || !map(in, '}', arguments, 0))
        return false;
    if (arguments->failed || arguments->over)
        return false;
    root = json_loadb(arguments->data, arguments->length,
                      JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    called = json_object_get(root, "name");
    given = json_object_get(root, "arguments");
    if (!given)
        given = json_object_get(root, "parameters");
    if (json_is_string(given)) {
        opened = json_loadb(json_string_value(given), json_string_length(given),
                            JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
        given = opened;
    }
    if (json_is_object(given) && json_string_length(called) > 0 &&
        json_string_length(called) <= MAX_NAME)
        dumped = json_dumps(given, JSON_COMPACT);
    if (dumped) {
        ns_buf_add(name, json_string_value(called), json_string_length(called));
        ns_buf_reset(arguments);
        ns_buf_text(arguments, dumped);
        good = true;
    }
    free(dumped);
    json_decref(opened);
    json_decref(root);
    return good;
}

static bool
named_call(struct ns_reader *in, bool whole, struct ns_buf *name,
           struct ns_buf *arguments)
{
    take_text(in, "call:");
    skip_blanks(in);
    if (!take_name(in, name))
        return false;
    skip_blanks(in);
    if (in->at == in->end) {
        ns_buf_text(arguments, "{}");
        return whole;
    }
    if (take(in, '{'))
        return map(in, '}', arguments, 0);
    if (!take(in, '('))
        return false;
    skip_blanks(in);
    if (!take(in, '{'))
        return map(in, ')', arguments, 0);
    if (!map(in, '}', arguments, 0))
        return false;
    skip_blanks(in);
    return take(in, ')');
}

bool
ns_toolcall_parse(const char *coded, size_t length, bool whole,
                  struct ns_buf *name, struct ns_buf *arguments)
{
    struct ns_reader in = ns_reader_over(coded, length);
    json_t *root;
    bool good;

    ns_buf_reset(name);
    ns_buf_reset(arguments);
    skip_blanks(&in);
    good = peek(&in) == '{' ? whole_object(&in, name, arguments)
                            : named_call(&in, whole, name, arguments);
    skip_blanks(&in);
    if (!good || in.at != in.end)
        return false;
    root = checked(arguments);
    good = json_is_object(root);
    json_decref(root);
    return good;
}

void
ns_toolcall_raw(const char *coded, size_t length, struct ns_buf *out)
{
    for (size_t i = 0; i < length; i++) {
        if (coded[i] == NS_TOOLCALL_QUOTE)
            ns_buf_text(out, quote_text);
        else if (coded[i] != NS_TOOLCALL_OTHER)
            ns_buf_byte(out, coded[i]);
    }
}
