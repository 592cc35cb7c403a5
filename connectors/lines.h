/* lines.h - the lines of a plain or LZ4 compressed file, in bounded memory.
 *
 * The first bytes decide: an LZ4 frame's magic number means LZ4, whatever the
 * name says. Frames may follow one another and need no content size (the lz4
 * tool writes none); checksums are verified where the frame has them. Limits
 * hold while streaming: a frame that expands beyond `max_expanded` is refused
 * when it gets there, not after.
 *
 * A line ends at \n or \r\n or at the end of the file. A byte order mark is a
 * mistake of the file and refused. Blank lines are counted and skipped. A line
 * over `max_line` bytes is reported with its length and hash, not kept.
 *
 * Owns:   its buffers: max_line bytes at most, 64 KB at first.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_LINES_H
#define NS_CONNECTORS_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/io.h"
#include "connectors/message.h"

struct ns_lines_options {
    size_t max_line;       /* 0: 16 MB */
    uint64_t max_expanded; /* of a whole LZ4 file; 0: 64 GB */
    bool no_hash;          /* leave sha256 zero */
    bool single_read;      /* a pipe: at most one read a call, see below */
};

struct ns_line {
    const char *bytes; /* without its end; NULL when over max_line; borrowed
                        * until the next call */
    uint64_t length;
    uint64_t number; /* from 1, blank ones counted */
    unsigned char sha256[NS_SHA256_BYTES];
};

struct ns_lines;

/* Reads from `fd`, which stays the caller's. `io` NULL: the system's. */
enum ns_status ns_lines_create(int fd, const struct ns_lines_options *options,
                               const struct ns_io *io, struct ns_lines **out,
                               struct ns_error *err);
void ns_lines_destroy(struct ns_lines *lines); /* takes NULL */

/* NS_OK and a line; NS_OK and `*end` true when there is none left; NS_OK and a
 * line numbered 0 when a single_read brought no whole one: wait for the
 * descriptor and call again. NS_REJECT: bad_lz4, too_large (expanded),
 * bad_encoding (byte order mark): the file ends there, and every later call
 * says the same. NS_RETRY: a read failed; nothing is lost, call again. */
enum ns_status ns_lines_next(struct ns_lines *lines, struct ns_line *out,
                             bool *end, struct ns_error *err);

bool ns_lines_compressed(const struct ns_lines *lines);
uint64_t ns_lines_bytes_read(const struct ns_lines *lines); /* of the file */

#endif
