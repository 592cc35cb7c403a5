#include "connectors/postgres_columns.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/frame.h"
#include "connectors/result.h"

enum {
    PLAIN_BYTES = 256 << 10, /* longer texts stand in response_lz4 alone */
    LZ4_BYTES = 1 << 30,
};

void
ns_pg_columns_init(struct ns_pg_columns *columns, const char *kinds)
{
    columns->n = strlen(kinds);
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_array_init(&columns->array[i],
                         kinds[i] == 't'   ? NS_PG_TEXT
                         : kinds[i] == 'b' ? NS_PG_BYTEA
                         : kinds[i] == 'i' ? NS_PG_INT4
                         : kinds[i] == 'o' ? NS_PG_BOOL
                                           : NS_PG_INT8);
}

void
ns_pg_columns_fini(struct ns_pg_columns *columns)
{
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_array_fini(&columns->array[i]);
    columns->n = 0;
}

enum ns_status
ns_pg_columns_check(const struct ns_pg_columns *columns, struct ns_error *err)
{
    enum ns_status status = NS_OK;

    for (size_t i = 0; i < columns->n && status == NS_OK; i++)
        status = ns_pg_array_check(&columns->array[i], err);
    return status;
}

void
ns_pg_columns_call(const struct ns_pg_columns *columns, const char *sql,
                   struct ns_pg_call *call)
{
    memset(call, 0, sizeof(*call));
    call->sql = sql;
    for (size_t i = 0; i < columns->n; i++)
        ns_pg_call_array(call, &columns->array[i]);
}

enum ns_status
ns_pg_columns_ask(struct ns_pg_link *link, const struct ns_pg_columns *columns,
                  struct ns_pg_call *call, struct ns_error *err)
{
    enum ns_status status = ns_pg_columns_check(columns, err);

    return status == NS_OK ? ns_pg_ask(link, call, err) : status;
}

/* ---- JSON of our own -------------------------------------------------- */

static void
put_string(struct ns_buf *out, const char *text)
{
    ns_buf_byte(out, '"');
    ns_result_text(out, text, strlen(text));
    ns_buf_byte(out, '"');
}

void
ns_pg_add_source(struct ns_pg_array *array, const struct ns_job *job)
{
    struct ns_buf json;

    ns_buf_init(&json, 1 << 20);
    ns_buf_text(&json, "{\"origin\":");
    put_string(&json, job->origin ? job->origin : "");
    ns_buf_printf(&json, ",\"offset\":%" PRIu64 "}", job->position.offset);
    ns_pg_add_bytes(array, json.data, json.length);
    array->buf.failed |= json.failed;
    ns_buf_fini(&json);
}

void
ns_pg_add_warnings(struct ns_pg_array *array, const struct ns_job *job)
{
    struct ns_buf json;

    ns_buf_init(&json, 1 << 20);
    ns_buf_byte(&json, '[');
    for (size_t i = 0; i < job->n_warnings; i++) {
        ns_buf_text(&json, i ? "," : "");
        put_string(&json, job->warnings[i]);
    }
    ns_buf_byte(&json, ']');
    ns_pg_add_bytes(array, json.data, json.length);
    array->buf.failed |= json.failed;
    ns_buf_fini(&json);
}

/* ---- LZ4 -------------------------------------------------------------- */

void
ns_pg_add_lz4(struct ns_pg_array *array, const char *bytes, size_t length)
{
    struct ns_buf frame;

    ns_buf_init(&frame, LZ4_BYTES);
    ns_frame_pack(bytes, length, &frame);
    ns_pg_add_bytes(array, frame.data, frame.length);
    array->buf.failed |= frame.failed || frame.over;
    ns_buf_fini(&frame);
}

/* ---- text for people -------------------------------------------------- */

uint32_t
ns_pg_add_readable(struct ns_pg_array *array, const char *text, size_t length)
{
    uint32_t replaced = 0;
    struct ns_buf plain;

    if (!text || length > PLAIN_BYTES) {
        ns_pg_add_null(array);
        return 0;
    }
    ns_buf_init(&plain, 3 * (size_t)PLAIN_BYTES + 1);
    replaced = ns_result_plain(&plain, text, length);
    ns_pg_add_bytes(array, plain.data ? plain.data : "", plain.length);
    array->buf.failed |= plain.failed;
    ns_buf_fini(&plain);
    return replaced;
}

void
ns_pg_add_c_text(struct ns_pg_array *array, const char *text)
{
    if (text && *text)
        (void)ns_pg_add_readable(array, text, strlen(text));
    else
        ns_pg_add_null(array);
}
