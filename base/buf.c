#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void
ns_buf_init(struct ns_buf *buf, size_t limit_bytes)
{
    memset(buf, 0, sizeof(*buf));
    buf->limit = limit_bytes;
}

void
ns_buf_fini(struct ns_buf *buf)
{
    free(buf->data);
    ns_buf_init(buf, buf->limit);
}

void
ns_buf_reset(struct ns_buf *buf)
{
    buf->length = 0;
    buf->over = buf->failed = false;
    if (buf->data)
        buf->data[0] = '\0';
}

char *
ns_buf_room(struct ns_buf *buf, size_t length)
{
    if (buf->over || buf->failed)
        return NULL;
    if (length > buf->limit - buf->length) {
        buf->over = true;
        return NULL;
    }
    if (buf->length + length + 1 > buf->capacity) {
        size_t capacity = buf->capacity ? buf->capacity : 256;
        char *data;

        while (capacity < buf->length + length + 1)
            capacity *= 2; /* bounded: limit is far below SIZE_MAX / 2 */
        data = realloc(buf->data, capacity);
        if (!data) {
            buf->failed = true;
            return NULL;
        }
        buf->data = data;
        buf->capacity = capacity;
    }
    return buf->data + buf->length;
}

void
ns_buf_add(struct ns_buf *buf, const void *bytes, size_t length)
{
    char *room = ns_buf_room(buf, length);

    if (!room)
        return;
    if (length)
        memcpy(room, bytes, length);
    buf->length += length;
    buf->data[buf->length] = '\0';
}

void
ns_buf_text(struct ns_buf *buf, const char *text)
{
    ns_buf_add(buf, text, strlen(text));
}

void
ns_buf_byte(struct ns_buf *buf, char byte)
{
    ns_buf_add(buf, &byte, 1);
}

void
ns_buf_printf(struct ns_buf *buf, const char *format, ...)
{
    va_list ap;
    char *room;
    int n;

    va_start(ap, format);
    n = vsnprintf(NULL, 0, format, ap);
    va_end(ap);
    room = ns_buf_room(buf, (size_t)n);
    if (!room)
        return;
    va_start(ap, format);
    vsnprintf(room, (size_t)n + 1, format, ap);
    va_end(ap);
    buf->length += (size_t)n;
}

enum ns_status
ns_buf_check(const struct ns_buf *buf, const char *what, struct ns_error *err)
{
    if (buf->over)
        return ns_refuse(err, "too_large", NULL, "%s is over %zu bytes", what,
                         buf->limit);
    if (buf->failed)
        return ns_fail(err, NS_FATAL, "out of memory for %s", what);
    return NS_OK;
}
