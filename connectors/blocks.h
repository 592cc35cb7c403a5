/* blocks.h - committed blocks of unfinished jobs, in a file beside the results.
 *
 * One line a block, appended as blocks are committed, each with its own hash:
 *
 *     line sha model engine mode seed block tokens(hex) hash
 *
 * A line that is torn or damaged is skipped; of a job the blocks before its
 * first hole count. Blocks of another model, mode or seed are not taken over;
 * those of another engine are, and said to be. Writes are not flushed: what a
 * power cut takes is computed again, and a killed process loses nothing.
 *
 * Owns:   its descriptor and an index of the blocks that still matter.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_BLOCKS_H
#define NS_CONNECTORS_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/error.h"
#include "connectors/io.h"

struct ns_blocks;

struct ns_blocks_key { /* what a block was made from */
    uint64_t line, sha;
    uint32_t mode;
    uint64_t seed;
};

/* `name` below `dir`, which stays the caller's; created at the first block. A
 * block of a line for which `matters` says false is forgotten. */
enum ns_status ns_blocks_open(int dir, const char *name, mode_t mode,
                              const char *model_rev, const char *engine_rev,
                              bool (*matters)(void *context, uint64_t line,
                                              uint64_t sha),
                              void *context, const struct ns_io *io,
                              struct ns_blocks **out, struct ns_error *err);
void ns_blocks_close(struct ns_blocks *blocks); /* takes NULL */

/* Adds the block's line to `out`, to be written with others. */
void ns_blocks_format(const struct ns_blocks *blocks,
                      const struct ns_blocks_key *key, uint32_t block,
                      const int32_t *tokens, uint32_t n_tokens,
                      struct ns_buf *out);

/* Whether the block stands already: it need not be written again. */
bool ns_blocks_has(const struct ns_blocks *blocks,
                   const struct ns_blocks_key *key, uint32_t block);

/* Appends formatted lines and takes note of them. NS_RETRY: none was added. */
enum ns_status ns_blocks_append(struct ns_blocks *blocks, const char *lines,
                                size_t length, struct ns_error *err);

struct ns_blocks_found {
    const int32_t *tokens;
    const uint32_t *block_tokens;
    uint32_t n_tokens, n_blocks;
    uint32_t n_dropped; /* blocks that are there and can't be read back */
    bool across; /* some were made by another engine_rev */
};

/* The blocks of the job from 0 up to the first hole, in `arena`. A block that
 * can not be read back ends them. */
enum ns_status ns_blocks_find(struct ns_blocks *blocks,
                              const struct ns_blocks_key *key,
                              struct ns_arena *arena,
                              struct ns_blocks_found *out,
                              struct ns_error *err);

/* The line's blocks matter no more. May write the file anew. */
void ns_blocks_forget(struct ns_blocks *blocks, uint64_t line);

/* What the job's last claim noted, as a line of the same form: takeovers in a
 * row that brought no new block, and the blocks there were. A job that kills
 * its process is known by it. `stalls` -1: it was given back in order. */
struct ns_blocks_begun {
    int32_t stalls, n_blocks;
};
void ns_blocks_format_begun(const struct ns_blocks *blocks,
                            const struct ns_blocks_key *key,
                            struct ns_blocks_begun begun, struct ns_buf *out);
bool ns_blocks_begun(const struct ns_blocks *blocks,
                     const struct ns_blocks_key *key,
                     struct ns_blocks_begun *out);

/* Closes, and removes the file. */
void ns_blocks_remove(struct ns_blocks *blocks);

#endif
