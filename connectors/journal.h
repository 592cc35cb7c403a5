/* journal.h - the file of results: appended, flushed, and read back.
 *
 * Result lines, plain or as a row of LZ4 frames. One append is one write and
 * one fdatasync, and for LZ4 one complete frame with block and content
 * checksums and its content size; only then do its lines count. Whatever stops
 * an append in between leaves a torn tail, which the next open cuts: the
 * journal is its own record of what is done.
 *
 * A write that fails (the disk is full) is taken back by cutting the file to
 * its last good length. A flush that fails is final for its descriptor, as
 * Linux then forgets the pages: the file is opened anew, its tail compared and
 * the batch written again.
 *
 * Owns:   its descriptor, and the lock on it when `lock` is set.
 * Thread: one at a time.
 */
#ifndef NS_CONNECTORS_JOURNAL_H
#define NS_CONNECTORS_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/io.h"

enum ns_journal_verdict {
    NS_JOURNAL_KEEP,
    NS_JOURNAL_DROP,   /* honoured when `rewrite` is set */
    NS_JOURNAL_ALIEN,  /* no line of ours: the readable part ends here */
    NS_JOURNAL_FAILED, /* memory: open fails */
};

struct ns_journal_options {
    bool compressed;
    bool lock;    /* flock, or fail with code "locked" */
    bool rewrite; /* lines judged DROP leave the file, in one rename */
    bool ours;    /* a file that starts with alien bytes is damaged, not
                   * somebody else's: set it aside instead of refusing it */
    uint64_t reserve_bytes; /* of disk kept allocated ahead; 0: none */
    mode_t mode;
    const struct ns_io *io; /* NULL: the system's */
    /* Judges each line (without its newline) that the file holds. */
    enum ns_journal_verdict (*judge)(void *context, const char *line,
                                     size_t length);
    void *context;
};

struct ns_journal;

/* Opens or creates `name` below `dir`, a descriptor that stays the caller's
 * and open. A torn tail is cut; lines behind damage are cut too, once a copy of
 * the whole file stands beside it as NAME.corrupt. NS_REJECT "not_ours": the
 * file starts with something else than results. NS_RETRY: "locked", or the
 * world's fault. */
enum ns_status ns_journal_open(int dir, const char *name,
                               const struct ns_journal_options *options,
                               struct ns_journal **out, struct ns_error *err);

/* A journal over a descriptor that can not be taken back: a pipe, a terminal.
 * Nothing is read, locked or flushed. `fd` stays the caller's. */
enum ns_status ns_journal_stream(int fd, const struct ns_io *io,
                                 struct ns_journal **out, struct ns_error *err);

/* Whole lines, all or none. NS_RETRY: nothing was added, the code says
 * "storage_full" or "io"; call again later with the same or other lines. */
enum ns_status ns_journal_append(struct ns_journal *journal, const char *lines,
                                 size_t length, struct ns_error *err);

/* Nothing more will come: gives back what was reserved and flushes all, so
 * that the file may be renamed. May be called again after NS_RETRY. */
enum ns_status ns_journal_finish(struct ns_journal *journal,
                                 struct ns_error *err);

void ns_journal_close(struct ns_journal *journal); /* takes NULL */

/* Renames `name` to the first free NAME.~N~ below `dir`. */
enum ns_status ns_journal_put_aside(int dir, const char *name,
                                    const struct ns_io *io,
                                    struct ns_error *err);

#endif
