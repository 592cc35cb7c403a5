/* postgres_columns.h - the arrays of one statement, a column each.
 *
 *     ns_pg_columns_init(&columns, "t8");          WITH ... unnest($1, $2)
 *     for each item: ns_pg_add_...(&columns.array[0], ...), ...
 *     ns_pg_columns_call(&columns, sql, &call);    then further parameters
 *     ns_pg_columns_ask(&link, &columns, &call, err);
 *     ns_pg_call_fini(&call); ns_pg_columns_fini(&columns);
 *
 * Statements that answer for each item do so by its place in the arrays (WITH
 * ORDINALITY): ns_pg_item.
 *
 * Private to connectors/postgres_*.c. Owns: the arrays.
 */
#ifndef NS_CONNECTORS_POSTGRES_COLUMNS_H
#define NS_CONNECTORS_POSTGRES_COLUMNS_H

#include "connectors/job.h"
#include "connectors/postgres_link.h"

enum { NS_PG_COLUMNS = 34 };

struct ns_pg_columns {
    size_t n;
    struct ns_pg_array array[NS_PG_COLUMNS];
};

/* "tti8": t text, b bytea, i int4, 8 int8, o bool. */
void ns_pg_columns_init(struct ns_pg_columns *columns, const char *kinds);
void ns_pg_columns_fini(struct ns_pg_columns *columns);

/* Whether all that was added is there (memory, the limits). */
enum ns_status ns_pg_columns_check(const struct ns_pg_columns *columns,
                                   struct ns_error *err);
/* A call whose first parameters are the columns, which it borrows. */
void ns_pg_columns_call(const struct ns_pg_columns *columns, const char *sql,
                        struct ns_pg_call *call);
/* Checks, and runs the call, as ns_pg_ask. */
enum ns_status ns_pg_columns_ask(struct ns_pg_link *link,
                                 const struct ns_pg_columns *columns,
                                 struct ns_pg_call *call, struct ns_error *err);

/* The item that a row of an answer is about: column 0, counted from 1 by the
 * server. `n` or more: of none. */
static inline size_t
ns_pg_item(const PGresult *answer, int row)
{
    return (size_t)ns_pg_int(answer, row, 0) - 1;
}

/* --- values that take some making ------------------------------------- */

/* {"origin":..., "offset":...}; the list of the job's warnings. */
void ns_pg_add_source(struct ns_pg_array *array, const struct ns_job *job);
void ns_pg_add_warnings(struct ns_pg_array *array, const struct ns_job *job);
/* The bytes as one LZ4 frame with their size and a checksum. */
void ns_pg_add_lz4(struct ns_pg_array *array, const char *bytes,
                   size_t length);
/* Text that the server can hold, or NULL where there is none or too much.
 * Returns how many sequences were replaced. */
uint32_t ns_pg_add_readable(struct ns_pg_array *array, const char *text,
                            size_t length);
void ns_pg_add_c_text(struct ns_pg_array *array, const char *text);

#endif
