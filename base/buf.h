/* buf.h - a growing byte buffer born with a limit.
 *
 * Appending never fails in the middle of a caller's sentence: a failure (the
 * limit, or memory) sticks, later appends do nothing, and ns_buf_check says so
 * once at the end. The bytes are always followed by a NUL that is not counted.
 *
 * Owns:   its bytes. Works on the caller's struct: init, then fini.
 * Thread: one at a time.
 */
#ifndef NS_BASE_BUF_H
#define NS_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

struct ns_buf {
    char *data; /* NULL until the first byte */
    size_t length;
    size_t capacity, limit;
    bool over;   /* the limit was met */
    bool failed; /* memory ran out */
};

void ns_buf_init(struct ns_buf *buf, size_t limit_bytes);
void ns_buf_fini(struct ns_buf *buf); /* the struct may be used again */
void ns_buf_reset(struct ns_buf *buf); /* empties, keeps the storage */

void ns_buf_add(struct ns_buf *buf, const void *bytes, size_t length);
void ns_buf_text(struct ns_buf *buf, const char *text);
void ns_buf_byte(struct ns_buf *buf, char byte);
void ns_buf_printf(struct ns_buf *buf, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Room for `length` more bytes behind the present ones, or NULL. The caller
 * writes there and then raises `length`. */
char *ns_buf_room(struct ns_buf *buf, size_t length);

/* NS_OK, or NS_REJECT (limit) or NS_FATAL (memory) naming `what`. */
enum ns_status ns_buf_check(const struct ns_buf *buf, const char *what,
                            struct ns_error *err);

#endif
