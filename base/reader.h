/* reader.h - a bounded cursor over bytes that may lie.
 *
 * Every take is checked: on success it moves, on failure it returns false and
 * nothing has moved. Also the UTF-8 rules that all parsers share.
 *
 * Borrows: the bytes, for as long as the reader is used.
 */
#ifndef NS_BASE_READER_H
#define NS_BASE_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct ns_reader {
    const unsigned char *at, *end;
};

static inline struct ns_reader
ns_reader_over(const void *bytes, size_t length)
{
    struct ns_reader reader = { bytes, (const unsigned char *)bytes + length };

    return reader;
}

static inline size_t
ns_reader_left(const struct ns_reader *reader)
{
    return (size_t)(reader->end - reader->at);
}

static inline bool
ns_reader_take(struct ns_reader *reader, void *out, size_t length)
{
    if (length > ns_reader_left(reader))
        return false;
    memcpy(out, reader->at, length);
    reader->at += length;
    return true;
}

static inline bool
ns_reader_skip(struct ns_reader *reader, size_t length)
{
    if (length > ns_reader_left(reader))
        return false;
    reader->at += length;
    return true;
}

static inline bool
ns_reader_u64le(struct ns_reader *reader, uint64_t *out)
{
    unsigned char raw[8];

    if (!ns_reader_take(reader, raw, sizeof(raw)))
        return false;
    *out = 0;
    for (int i = 7; i >= 0; i--)
        *out = *out << 8 | raw[i];
    return true;
}

/* Length in bytes (1..4) of the well-formed UTF-8 character at `text`, its
 * code point in `code` (may be NULL); 0 if there is none: truncated, overlong,
 * a surrogate, or above U+10FFFF. */
static inline size_t
ns_utf8_char(const char *text, size_t left, uint32_t *code)
{
    const unsigned char *s = (const unsigned char *)text;
    uint32_t c, least;
    size_t n;

    if (left == 0)
        return 0;
    if (s[0] < 0x80) {
        if (code)
            *code = s[0];
        return 1;
    }
    if (s[0] >= 0xc2 && s[0] <= 0xdf)
        n = 2, c = s[0] & 0x1fu, least = 0x80;
    else if ((s[0] & 0xf0) == 0xe0)
        n = 3, c = s[0] & 0x0fu, least = 0x800;
    else if (s[0] >= 0xf0 && s[0] <= 0xf4)
        n = 4, c = s[0] & 0x07u, least = 0x10000;
    else
        return 0;
    if (n > left)
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    if (c < least || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
        return 0;
    if (code)
        *code = c;
    return n;
}

/* Number of leading bytes that are well-formed UTF-8: `length` if all are. */
static inline size_t
ns_utf8_span(const char *text, size_t length)
{
    size_t i = 0;

    while (i < length) {
        size_t n = ns_utf8_char(text + i, length - i, NULL);

        if (n == 0)
            break;
        i += n;
    }
    return i;
}

#endif
