/* json.h - small files and JSON texts, read under a limit.
 *
 * What config.c, model.c and safetensors.c share: a whole file into memory, a
 * JSON text into a tree (repeated keys refused), and values shown in errors
 * with nothing in them that a terminal would obey.
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_ENGINE_JSON_H
#define NS_ENGINE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/error.h"

/* Appends the whole of a regular file to `out`. `absent` may be NULL; if not,
 * a file that is not there is NS_OK with *absent set, else it is refused. */
enum ns_status ns_file_read(const char *path, size_t limit_bytes,
                            struct ns_buf *out, bool *absent,
                            struct ns_error *err);

/* `name` stands in errors. The caller owns the tree: json_decref. */
enum ns_status ns_json_parse(const char *text, size_t length,
                             const char *name, json_t **out,
                             struct ns_error *err);

/* The value as short ASCII JSON in `out`, cut to fit; "missing" for NULL.
 * Returns `out`. */
const char *ns_json_show(const json_t *value, char *out, size_t out_size);

#endif
