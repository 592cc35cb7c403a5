/* postgres_array.h - columns of values, sent to PostgreSQL as arrays.
 *
 * One statement handles many items by unnest()ing one array a column. They
 * travel in the binary format, where every value has its length: the text
 * format cuts a text at its first NUL and says nothing.
 *
 * A failure (memory, the limit) sticks to the column, as in buf.h, and comes
 * out in ns_pg_array_check.
 *
 * Owns:   the bytes. Works on the caller's struct: init, then fini.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_POSTGRES_ARRAY_H
#define NS_CONNECTORS_POSTGRES_ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"

enum ns_pg_kind { /* element types: their numbers in the server's catalogue */
    NS_PG_BOOL = 16,
    NS_PG_BYTEA = 17,
    NS_PG_INT8 = 20,
    NS_PG_INT4 = 23,
    NS_PG_TEXT = 25,
};

struct ns_pg_array {
    enum ns_pg_kind kind;
    struct ns_buf buf;
};

void ns_pg_array_init(struct ns_pg_array *array, enum ns_pg_kind kind);
void ns_pg_array_fini(struct ns_pg_array *array);

void ns_pg_add_null(struct ns_pg_array *array);
/* Of NS_PG_TEXT or NS_PG_BYTEA. NULL bytes add a NULL. */
void ns_pg_add_bytes(struct ns_pg_array *array, const void *bytes,
                     size_t length);
void ns_pg_add_text(struct ns_pg_array *array, const char *text);
void ns_pg_add_int(struct ns_pg_array *array, int64_t value); /* 4 or 8 */
void ns_pg_add_bool(struct ns_pg_array *array, bool value);

/* Type number of the array, for the parameter. */
uint32_t ns_pg_array_type(const struct ns_pg_array *array);

enum ns_status ns_pg_array_check(const struct ns_pg_array *array,
                                 struct ns_error *err);

#endif
