/* index.h - which lines of one input file are done, and who has which id.
 *
 * A line is known by its number, the first 8 bytes of its hash and a hash of
 * its custom_id: 16 bytes, and 8 more for finding it by its id. A file of
 * 100,000 lines takes 2.4 MB, however long its results are.
 *
 * Owns:   its two tables.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_INDEX_H
#define NS_CONNECTORS_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct ns_index;

enum ns_status ns_index_create(struct ns_index **out, struct ns_error *err);
void ns_index_destroy(struct ns_index *index); /* takes NULL */

/* First 8 bytes of a SHA-256, never 0. */
uint64_t ns_index_sha(const unsigned char *sha256);

/* The line stands, with this hash; an earlier entry of the line goes. `id`
 * NULL: it has none that others could repeat. */
enum ns_status ns_index_put(struct ns_index *index, uint64_t line, uint64_t sha,
                            const char *id, struct ns_error *err);

/* Line that has the id, or 0: none. */
uint64_t ns_index_line_of(const struct ns_index *index, const char *id);

bool ns_index_has(const struct ns_index *index, uint64_t line, uint64_t sha);

/* Two marks of a line that stands. Done: its result is durable. Seen: it
 * stands in the input as it is read now, and not only in former results. */
bool ns_index_is_done(const struct ns_index *index, uint64_t line);
bool ns_index_is_seen(const struct ns_index *index, uint64_t line);
void ns_index_set_done(struct ns_index *index, uint64_t line);
void ns_index_set_seen(struct ns_index *index, uint64_t line);

#endif
