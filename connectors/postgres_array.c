#include "connectors/postgres_array.h"

#include <string.h>

enum { HEADER = 20, AT_FLAGS = 4, AT_COUNT = 12 };

/* The server takes messages below 1 GB. */
static const size_t most_bytes = (size_t)512 << 20;

static void
put32(unsigned char *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (unsigned char)(value >> (24 - 8 * i));
}

static void
add32(struct ns_buf *buf, uint32_t value)
{
    unsigned char bytes[4];

    put32(bytes, value);
    ns_buf_add(buf, bytes, sizeof(bytes));
}

/* Header: dimensions, whether there are NULLs, type; then of the only
 * dimension how many, and the number of the first. */
void
ns_pg_array_init(struct ns_pg_array *array, enum ns_pg_kind kind)
{
    array->kind = kind;
    ns_buf_init(&array->buf, most_bytes);
    add32(&array->buf, 1);
    add32(&array->buf, 0);
    add32(&array->buf, (uint32_t)kind);
    add32(&array->buf, 0);
    add32(&array->buf, 1);
}

void
ns_pg_array_fini(struct ns_pg_array *array)
{
    ns_buf_fini(&array->buf);
}

static void
count(struct ns_pg_array *array)
{
    unsigned char *at = (unsigned char *)array->buf.data;
    uint32_t n = 0;

    if (array->buf.failed || array->buf.over || array->buf.length < HEADER)
        return;
    for (int i = 0; i < 4; i++)
        n = n << 8 | at[AT_COUNT + i];
    put32(at + AT_COUNT, n + 1);
}

void
ns_pg_add_null(struct ns_pg_array *array)
{
    add32(&array->buf, UINT32_MAX);
    count(array);
    if (!array->buf.failed && !array->buf.over)
        put32((unsigned char *)array->buf.data + AT_FLAGS, 1);
}

void
ns_pg_add_bytes(struct ns_pg_array *array, const void *bytes, size_t length)
{
    if (!bytes) {
        ns_pg_add_null(array);
        return;
    }
    if (length > most_bytes) {
        array->buf.over = true;
        return;
    }
    add32(&array->buf, (uint32_t)length);
    ns_buf_add(&array->buf, bytes, length);
    count(array);
}

void
ns_pg_add_text(struct ns_pg_array *array, const char *text)
{
    ns_pg_add_bytes(array, text, text ? strlen(text) : 0);
}

void
ns_pg_add_int(struct ns_pg_array *array, int64_t value)
{
    uint32_t size = array->kind == NS_PG_INT4 ? 4 : 8;

    add32(&array->buf, size);
    if (size == 8)
        add32(&array->buf, (uint32_t)((uint64_t)value >> 32));
    add32(&array->buf, (uint32_t)value);
    count(array);
}

void
ns_pg_add_bool(struct ns_pg_array *array, bool value)
{
    add32(&array->buf, 1);
    ns_buf_byte(&array->buf, (char)value);
    count(array);
}

uint32_t
ns_pg_array_type(const struct ns_pg_array *array)
{
    switch (array->kind) {
    case NS_PG_BOOL:
        return 1000;
    case NS_PG_BYTEA:
        return 1001;
    case NS_PG_INT8:
        return 1016;
    case NS_PG_INT4:
        return 1007;
    case NS_PG_TEXT:
        break;
    }
    return 1009;
}

enum ns_status
ns_pg_array_check(const struct ns_pg_array *array, struct ns_error *err)
{
    return ns_buf_check(&array->buf, "a statement's values", err);
}
