/* arena.h - a bump allocator: all that lives as long as one job, in one place.
 *
 * Blocks are taken from malloc as needed, up to a limit that is given at the
 * start, and all go at once. A handler may be hung on the arena to release
 * what memory alone does not hold (a json_t, a descriptor); handlers run in
 * the reverse of the order in which they were added.
 *
 * Owns:   its blocks. What it returns is valid until reset or destroy.
 * Thread: one at a time; the holder of the job holds its arena.
 */
#ifndef NS_BASE_ARENA_H
#define NS_BASE_ARENA_H

#include <stddef.h>

#include "base/error.h"

struct ns_arena;

/* `limit_bytes` bounds the sum of all that is taken; 0 means none. */
enum ns_status ns_arena_create(size_t limit_bytes, struct ns_arena **out,
                               struct ns_error *err);

/* Zeroed memory aligned to 16. NULL when the limit or the memory is reached:
 * the caller turns that into an error that names its field. */
void *ns_arena_take(struct ns_arena *arena, size_t bytes);

/* As above for an array; NULL also when n * size does not fit. */
void *ns_arena_array(struct ns_arena *arena, size_t n, size_t size);

/* A copy of `length` bytes with a NUL behind it. */
char *ns_arena_text(struct ns_arena *arena, const char *text, size_t length);

/* Runs release(data) at reset or destroy; on failure runs it at once. */
enum ns_status ns_arena_on_reset(struct ns_arena *arena,
                                 void (*release)(void *), void *data,
                                 struct ns_error *err);

size_t ns_arena_used(const struct ns_arena *arena);

void ns_arena_reset(struct ns_arena *arena);
void ns_arena_destroy(struct ns_arena *arena); /* takes NULL */

#endif
