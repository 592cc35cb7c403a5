#include "engine/json_scan.h"

#include <string.h>

void
ns_scan_init(struct ns_scan *scan, const char *json, size_t length)
{
    memset(scan, 0, sizeof(*scan));
    scan->in = ns_reader_over(json, length);
    scan->begin = scan->in.at;
    ns_buf_init(&scan->text, NS_SCAN_STRING);
}

void
ns_scan_fini(struct ns_scan *scan)
{
    ns_buf_fini(&scan->text);
}

static bool
bad(struct ns_scan *scan, const char *problem)
{
    if (!scan->problem)
        scan->problem = problem;
    return false;
}

enum ns_status
ns_scan_check(const struct ns_scan *scan, const char *name,
              struct ns_error *err)
{
    if (scan->text.failed)
        return ns_fail(err, NS_FATAL, "out of memory reading %s", name);
    if (!scan->problem)
        return NS_OK;
    return ns_refuse(err, "bad_model", NULL, "%s: byte %zu: %s", name,
                     (size_t)(scan->in.at - scan->begin), scan->problem);
}

char
ns_scan_peek(struct ns_scan *scan)
{
    struct ns_reader *in = &scan->in;

    if (scan->problem)
        return 0;
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\n' ||
                                *in->at == '\t' || *in->at == '\r'))
        in->at++;
    return in->at < in->end ? (char)*in->at : 0;
}

/* Takes the byte if it comes next, behind white space. */
static bool
take(struct ns_scan *scan, char byte)
{
    if (ns_scan_peek(scan) != byte)
        return false;
    scan->in.at++;
    return true;
}

bool
ns_scan_open(struct ns_scan *scan, char bracket)
{
    if (!take(scan, bracket))
        return bad(scan, bracket == '{' ? "an object must stand here"
                                        : "an array must stand here");
    if (++scan->depth > NS_SCAN_DEPTH)
        return bad(scan, "nested deeper than 32");
    scan->fresh = true;
    return true;
}

static bool
another(struct ns_scan *scan, char bracket)
{
    bool first = scan->fresh;

    scan->fresh = false;
    if (scan->problem)
        return false;
    if (take(scan, bracket)) {
        scan->depth--;
        return false;
    }
    if (!first && !take(scan, ','))
        return bad(scan, "a comma or the closing bracket must stand here");
    return true;
}

bool
ns_scan_element(struct ns_scan *scan)
{
    return another(scan, ']');
}

bool
ns_scan_member(struct ns_scan *scan)
{
    if (!another(scan, '}') || !ns_scan_string(scan))
        return false;
    return take(scan, ':') || bad(scan, "a colon must stand here");
}

static bool
hex4(struct ns_reader *in, uint32_t *out)
{
    uint32_t value = 0;

    if (ns_reader_left(in) < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        unsigned c = in->at[i];

        if (c >= '0' && c <= '9')
            c -= '0';
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            c = (c | 32) - 'a' + 10;
        else
            return false;
        value = value << 4 | c;
    }
    in->at += 4;
    *out = value;
    return true;
}

static void
put_code(struct ns_buf *out, uint32_t c)
{
    char raw[4];
    size_t n = 0;

    if (c < 0x80) {
        raw[n++] = (char)c;
    } else {
        if (c < 0x800) {
            raw[n++] = (char)(0xc0 | c >> 6);
        } else {
            if (c < 0x10000) {
                raw[n++] = (char)(0xe0 | c >> 12);
            } else {
                raw[n++] = (char)(0xf0 | c >> 18);
                raw[n++] = (char)(0x80 | (c >> 12 & 0x3f));
            }
            raw[n++] = (char)(0x80 | (c >> 6 & 0x3f));
        }
        raw[n++] = (char)(0x80 | (c & 0x3f));
    }
    ns_buf_add(out, raw, n);
}

static bool
escape(struct ns_scan *scan)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    struct ns_reader *in = &scan->in;
    uint32_t code, low;
    const char *name;

    if (in->at == in->end)
        return bad(scan, "the text ends inside a string");
    if (*in->at != 'u') {
        name = memchr(names, *in->at, sizeof(names) - 1);
        if (!name)
            return bad(scan, "an unknown escape");
        in->at++;
        ns_buf_byte(&scan->text, values[name - names]);
        return true;
    }
    in->at++;
    if (!hex4(in, &code))
        return bad(scan, "\\u without four hex digits");
    if (code >= 0xd800 && code <= 0xdfff) {
        if (code >= 0xdc00 || ns_reader_left(in) < 2 || in->at[0] != '\\' ||
            in->at[1] != 'u')
            return bad(scan, "half of a surrogate pair");
        in->at += 2;
        if (!hex4(in, &low) || low < 0xdc00 || low > 0xdfff)
            return bad(scan, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    put_code(&scan->text, code);
    return true;
}

bool
ns_scan_string(struct ns_scan *scan)
{
    struct ns_reader *in = &scan->in;

    if (!take(scan, '"'))
        return bad(scan, "a string must stand here");
    ns_buf_reset(&scan->text);
    for (;;) {
        const unsigned char *from = in->at;

        while (in->at < in->end && *in->at >= 0x20 && *in->at < 0x80 &&
               *in->at != '"' && *in->at != '\\')
            in->at++;
        ns_buf_add(&scan->text, from, (size_t)(in->at - from));
        if (in->at == in->end)
            return bad(scan, "the text ends inside a string");
        if (*in->at == '"') {
            in->at++;
            break;
        }
        if (*in->at == '\\') {
            in->at++;
            if (!escape(scan))
                return false;
        } else {
            size_t n =
                ns_utf8_char((const char *)in->at, ns_reader_left(in), NULL);

            if (n == 0 || *in->at < 0x20)
                return bad(scan, "a string holds a raw control character or "
                                 "is not UTF-8");
            ns_buf_add(&scan->text, in->at, n);
            in->at += n;
        }
    }
    if (scan->text.over)
        return bad(scan, "a string is over 1 MiB");
    if (scan->text.failed)
        return bad(scan, "out of memory");
    return true;
}

bool
ns_scan_uint(struct ns_scan *scan, uint64_t *out)
{
    struct ns_reader *in = &scan->in;
    const unsigned char *from;
    uint64_t value = 0;

    ns_scan_peek(scan);
    from = in->at;
    if (scan->problem)
        return false;
    for (; in->at < in->end && *in->at >= '0' && *in->at <= '9'; in->at++)
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*in->at - '0'), &value))
            return bad(scan, "a number is too large");
    if (in->at == from || (*from == '0' && in->at - from > 1) ||
        (in->at < in->end && strchr(".eE+-", *in->at) && *in->at))
        return bad(scan, "a whole number of at least 0 must stand here");
    *out = value;
    return true;
}

/* Literals and numbers are only passed over here: the slices that matter are
 * read again by those who want them. */
static bool
skip_word(struct ns_scan *scan)
{
    struct ns_reader *in = &scan->in;
    const unsigned char *from = in->at;

    while (in->at < in->end && *in->at &&
           strchr("abcdefghijklmnopqrstuvwxyzE+-.0123456789", *in->at))
        in->at++;
    return in->at > from || bad(scan, "a value must stand here");
}

/* Only finds the end: what a string holds matters to those who read it. */
static bool
skip_string(struct ns_scan *scan)
{
    struct ns_reader *in = &scan->in;

    for (in->at++; in->at < in->end; in->at++) {
        if (*in->at == '"') {
            in->at++;
            return true;
        }
        if (*in->at == '\\' && ++in->at == in->end)
            break;
    }
    return bad(scan, "the text ends inside a string");
}

/* Recursion is bounded: open refuses what is nested deeper than the limit. */
static bool
skip_value(struct ns_scan *scan)
{
    switch (ns_scan_peek(scan)) {
    case '{':
        if (ns_scan_open(scan, '{'))
            while (ns_scan_member(scan) && skip_value(scan))
                ;
        return !scan->problem;
    case '[':
        if (ns_scan_open(scan, '['))
            while (ns_scan_element(scan) && skip_value(scan))
                ;
        return !scan->problem;
    case '"':
        return skip_string(scan);
    default:
        return !scan->problem && skip_word(scan);
    }
}

bool
ns_scan_skip(struct ns_scan *scan, struct ns_reader *out)
{
    const unsigned char *from;

    ns_scan_peek(scan);
    from = scan->in.at;
    if (!skip_value(scan))
        return false;
    if (out)
        *out = ns_reader_over(from, (size_t)(scan->in.at - from));
    return true;
}

bool
ns_scan_end(struct ns_scan *scan)
{
    if (ns_scan_peek(scan) || scan->in.at != scan->in.end)
        return bad(scan, "more text stands behind the value");
    return !scan->problem;
}
