#include "connectors/journal.h"

#include <errno.h>
#include <inttypes.h>
#include <lz4frame.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/log.h"

enum {
    CHUNK = 256 << 10,
    TAIL = 256,    /* bytes compared before a file is trusted again */
    NAME = 300,    /* of a path below dir, with a suffix of ours */
    ASIDE = 10000, /* highest number of a file put aside */
};

static const size_t max_unit = (size_t)1 << 30; /* a line, a frame's text */
static const char line_start[] = "{\"id\":\"batch_req_";
static const char frame_start[] = "\x04\x22\x4d\x18";

struct ns_journal {
    int dir, fd; /* dir borrowed */
    char name[NAME];
    struct ns_journal_options options;
    const struct ns_io *io;
    bool stream;
    bool dirty;   /* bytes behind `length` may stand: cut before writing */
    bool suspect; /* a flush failed: open the file anew first */
    uint64_t length, reserved; /* of the file: durable; allocated */
    unsigned char tail[TAIL];  /* the last bytes of what is durable */
    size_t n_tail;
    struct ns_buf frame; /* scratch for compression */
};

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for the results' file");
}

/* A failed call of the system on our file, as a status with a code. */
static enum ns_status
io_failed(struct ns_error *err, const char *call, const char *name)
{
    bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    enum ns_status status =
        ns_fail_errno(err, NS_RETRY, "%s %.200s", call, name);

    err->code = full ? "storage_full" : "io";
    return status;
}

static bool
write_all(const struct ns_io *io, int fd, const char *bytes, size_t length)
{
    while (length) {
        ssize_t n = io->write(fd, bytes, length);

        if (n == -1 && errno == EINTR)
            continue;
        if (n == 0)
            errno = EIO;
        if (n <= 0)
            return false;
        bytes += n;
        length -= (size_t)n;
    }
    return true;
}

static ssize_t
read_some(const struct ns_io *io, int fd, char *bytes, size_t length)
{
    ssize_t n;

    do
        n = io->read(fd, bytes, length);
    while (n == -1 && errno == EINTR);
    return n;
}

/* ---- finding a name that is free ------------------------------------- */

static bool
stands(int dir, const char *name)
{
    struct stat st;

    return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

static bool
free_name(int dir, const char *name, const char *suffix, char out[NAME])
{
    for (int i = 1; i < ASIDE; i++) {
        int n = i == 1 && suffix[0]
                    ? snprintf(out, NAME, "%s%s", name, suffix)
                    : snprintf(out, NAME, "%s%s.~%d~", name, suffix, i);

        if (n >= NAME)
            return false;
        if (!stands(dir, out))
            return true;
    }
    return false;
}

enum ns_status
ns_journal_put_aside(int dir, const char *name, const struct ns_io *io,
                     struct ns_error *err)
{
    char aside[NAME];

    if (!io)
        io = &ns_io_system;
    if (!free_name(dir, name, "", aside))
        return ns_fail(err, NS_REJECT, "no free name to put %.200s aside",
                       name);
    if (io->renameat(dir, name, dir, aside) == -1)
        return io_failed(err, "rename", name);
    ns_log_info("output.put_aside", "name=%s", aside);
    return NS_OK;
}

/* A copy of the file as it stands, before what can not be read is cut. */
static enum ns_status
keep_copy(struct ns_journal *journal, struct ns_error *err)
{
    char name[NAME], *chunk = malloc(CHUNK);
    enum ns_status status = NS_OK;
    ssize_t n = 0;
    int fd = -1;

    if (!chunk)
        return no_memory(err);
    if (!free_name(journal->dir, journal->name, ".corrupt", name)) {
        status = ns_fail(err, NS_REJECT, "no free name to keep %.200s",
                         journal->name);
        goto out;
    }
    fd = journal->io->openat(journal->dir, name,
                             O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                             journal->options.mode);
    if (fd == -1 || lseek(journal->fd, 0, SEEK_SET) == -1) {
        status = io_failed(err, "open", name);
        goto out;
    }
    while ((n = read_some(journal->io, journal->fd, chunk, CHUNK)) > 0)
        if (!write_all(journal->io, fd, chunk, (size_t)n))
            break;
    if (n != 0 || journal->io->fsync(fd) == -1) {
        status = io_failed(err, "copy", name);
        journal->io->unlinkat(journal->dir, name, 0);
        goto out;
    }
    ns_log_warn("output.damaged", "kept_as=%s readable_bytes=%" PRIu64, name,
                journal->length);
out:
    if (fd != -1)
        close(fd);
    free(chunk);
    return status;
}

/* ---- reading back ---------------------------------------------------- */

struct recovery {
    struct ns_journal *journal;
    struct ns_buf unit; /* the line, or the frame's text, at hand */
    struct ns_buf kept; /* rewrite: lines to keep, not yet in the new file */
    struct ns_journal *rewritten; /* NULL: nothing is rewritten */
    LZ4F_dctx *lz4;
    char *in, *out;
    size_t in_at, in_length;
    uint64_t offset; /* of in[in_at] in the file */
    bool at_end, dropped, alien;
    char head[sizeof(line_start)]; /* how the unread rest begins */
    size_t n_head;
};

static enum ns_status
more(struct recovery *r, struct ns_error *err)
{
    ssize_t n;

    if (r->in_at < r->in_length || r->at_end)
        return NS_OK;
    n = read_some(r->journal->io, r->journal->fd, r->in, CHUNK);
    if (n == -1)
        return io_failed(err, "read", r->journal->name);
    r->in_at = 0;
    r->in_length = (size_t)n;
    r->at_end = n == 0;
    return NS_OK;
}

static void
note_head(struct recovery *r, const char *bytes, size_t length)
{
    size_t room = sizeof(line_start) - 1 - r->n_head;

    memcpy(r->head + r->n_head, bytes, length < room ? length : room);
    r->n_head += length < room ? length : room;
}

static enum ns_status
flush_kept(struct recovery *r, size_t least, struct ns_error *err)
{
    enum ns_status status;

    status = ns_buf_check(&r->kept, "results to keep", err);
    if (status != NS_OK || !r->rewritten || r->kept.length <= least)
        return status;
    status = ns_journal_append(r->rewritten, r->kept.data, r->kept.length, err);
    ns_buf_reset(&r->kept);
    return status;
}

/* Judges the lines of a unit, which ends with a newline. `*good` false: one of
 * them is alien, and the unit does not count. */
static enum ns_status
judge_unit(struct recovery *r, bool *good, struct ns_error *err)
{
    const struct ns_journal_options *options = &r->journal->options;
    const char *at = r->unit.data, *end = at + r->unit.length;

    *good = r->unit.length == 0 || end[-1] == '\n';
    while (*good && at < end) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t length = (size_t)(newline - at);

        switch (options->judge(options->context, at, length)) {
        case NS_JOURNAL_KEEP:
            if (r->rewritten)
                ns_buf_add(&r->kept, at, length + 1);
            break;
        case NS_JOURNAL_DROP:
            r->dropped = true;
            break;
        case NS_JOURNAL_ALIEN:
            if (at > r->unit.data) /* a whole frame, and mixed: no torn one */
                return ns_refuse(err, "not_ours", NULL,
                                 "%.200s holds something else than results",
                                 r->journal->name);
            *good = false;
            break;
        case NS_JOURNAL_FAILED:
            return no_memory(err);
        }
        at = newline + 1;
    }
    return flush_kept(r, CHUNK, err);
}

static enum ns_status
read_line_units(struct recovery *r, struct ns_error *err)
{
    enum ns_status status;
    bool good = true;

    for (;;) {
        const char *at, *newline;
        size_t left;

        status = more(r, err);
        if (status != NS_OK)
            return status;
        at = r->in + r->in_at;
        left = r->in_length - r->in_at;
        if (left == 0)
            return NS_OK; /* what is in `unit` is the torn tail */
        newline = memchr(at, '\n', left);
        if (newline)
            left = (size_t)(newline - at) + 1;
        note_head(r, at, left);
        ns_buf_add(&r->unit, at, left);
        status = ns_buf_check(&r->unit, "a line of the results' file", err);
        if (status != NS_OK)
            return status;
        r->in_at += left;
        r->offset += left;
        if (!newline)
            continue;
        status = judge_unit(r, &good, err);
        if (status != NS_OK)
            return status;
        if (!good) {
            r->alien = true;
            return NS_OK;
        }
        r->journal->length = r->offset;
        r->n_head = 0;
        ns_buf_reset(&r->unit);
    }
}

static enum ns_status
read_frame_units(struct recovery *r, struct ns_error *err)
{
    enum ns_status status;
    bool good = true, open = false;

    for (;;) {
        size_t taken, produced = CHUNK, hint;

        status = more(r, err);
        if (status != NS_OK)
            return status;
        taken = r->in_length - r->in_at;
        if (taken == 0 && !open)
            return NS_OK;
        if (!open)
            r->n_head = 0;
        hint = LZ4F_decompress(r->lz4, r->out, &produced, r->in + r->in_at,
                               &taken, NULL);
        if (LZ4F_isError(hint)) {
            note_head(r, r->in + r->in_at, r->in_length - r->in_at);
            r->alien = true;
            return NS_OK;
        }
        note_head(r, r->in + r->in_at, taken);
        ns_buf_add(&r->unit, r->out, produced);
        status = ns_buf_check(&r->unit, "a frame of the results' file", err);
        if (status != NS_OK)
            return status;
        if (taken == 0 && produced == 0 && r->at_end)
            return NS_OK; /* the file ends in this frame: torn */
        r->in_at += taken;
        r->offset += taken;
        open = hint != 0;
        if (open)
            continue;
        status = judge_unit(r, &good, err);
        if (status != NS_OK)
            return status;
        if (!good) {
            r->alien = true;
            return NS_OK;
        }
        r->journal->length = r->offset;
        ns_buf_reset(&r->unit);
    }
}

/* Cuts what is behind the last good byte, if that is right to do. */
static enum ns_status
cut_tail(struct recovery *r, struct ns_error *err)
{
    struct ns_journal *journal = r->journal;
    const char *start = journal->options.compressed ? frame_start : line_start;
    size_t n = strlen(start);
    enum ns_status status;
    struct stat st;

    if (fstat(journal->fd, &st) == -1)
        return io_failed(err, "stat", journal->name);
    if ((uint64_t)st.st_size == journal->length)
        return NS_OK;
    if (r->n_head < n)
        n = r->n_head;
    if (journal->length == 0 && !journal->options.ours &&
        (r->alien || memcmp(r->head, start, n) != 0))
        return ns_refuse(err, "not_ours", NULL,
                         "%.200s exists and holds something else than results;"
                         " name another output",
                         journal->name);
    if (r->alien) {
        status = keep_copy(journal, err);
        if (status != NS_OK)
            return status;
    }
    ns_log_info("output.tail_cut", "bytes=%" PRIu64,
                (uint64_t)st.st_size - journal->length);
    if (journal->io->ftruncate(journal->fd, (off_t)journal->length) == -1)
        return io_failed(err, "truncate", journal->name);
    return NS_OK;
}

static enum ns_status
remember_tail(struct ns_journal *journal, struct ns_error *err)
{
    journal->n_tail = journal->length < TAIL ? (size_t)journal->length : TAIL;
    if (pread(journal->fd, journal->tail, journal->n_tail,
              (off_t)(journal->length - journal->n_tail)) !=
        (ssize_t)journal->n_tail)
        return io_failed(err, "read", journal->name);
    return NS_OK;
}

static void
extend_tail(struct ns_journal *journal, const char *bytes, size_t length)
{
    size_t keep;

    if (length >= TAIL) {
        memcpy(journal->tail, bytes + length - TAIL, TAIL);
        journal->n_tail = TAIL;
        return;
    }
    keep = TAIL - length < journal->n_tail ? TAIL - length : journal->n_tail;
    memmove(journal->tail, journal->tail + journal->n_tail - keep, keep);
    memcpy(journal->tail + keep, bytes, length);
    journal->n_tail = keep + length;
}

static enum ns_status
lock(int fd, const char *name, struct ns_error *err)
{
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        return NS_OK;
    if (errno != EWOULDBLOCK)
        return io_failed(err, "lock", name);
    ns_fail(err, NS_RETRY, "%.200s is being written by another nightshift",
            name);
    err->code = "locked";
    return NS_RETRY;
}

/* Rights and names do not mend by waiting: who named the output has to know.
 * In a spool it is the operator's folder, and no reason to give a file up. */
static enum ns_status
open_failed(const struct ns_journal *journal, struct ns_error *err)
{
    bool lasting = errno == EACCES || errno == EPERM || errno == EROFS ||
                   errno == EISDIR || errno == ENAMETOOLONG || errno == ELOOP;

    if (!lasting || journal->options.ours)
        return io_failed(err, "open", journal->name);
    ns_fail_errno(err, NS_REJECT, "open %.200s", journal->name);
    err->code = "bad_output";
    return NS_REJECT;
}

/* Opens the file under its name and locks it; that the name still leads to
 * what was locked is looked at afterwards, because a rewrite renames. */
static enum ns_status
open_locked(struct ns_journal *journal, int flags, struct ns_error *err)
{
    enum ns_status status;
    struct stat mine, named;

    for (;;) {
        journal->fd = journal->io->openat(journal->dir, journal->name,
                                          O_RDWR | O_APPEND | O_CREAT |
                                              O_CLOEXEC | O_NOCTTY | flags,
                                          journal->options.mode);
        if (journal->fd == -1)
            return open_failed(journal, err);
        if (!journal->options.lock)
            return NS_OK;
        status = lock(journal->fd, journal->name, err);
        if (status != NS_OK)
            return status;
        if (fstat(journal->fd, &mine) == 0 &&
            fstatat(journal->dir, journal->name, &named, 0) == 0 &&
            mine.st_ino == named.st_ino && mine.st_dev == named.st_dev)
            return NS_OK;
        close(journal->fd);
        journal->fd = -1;
    }
}

static enum ns_status
create(int dir, const char *name, const struct ns_journal_options *options,
       struct ns_journal **out, struct ns_error *err)
{
    struct ns_journal *journal = calloc(1, sizeof(*journal));

    if (!journal)
        return no_memory(err);
    journal->dir = dir;
    journal->fd = -1;
    journal->options = *options;
    journal->io = options->io ? options->io : &ns_io_system;
    ns_buf_init(&journal->frame, max_unit);
    if (snprintf(journal->name, sizeof(journal->name), "%s", name) >=
        (int)sizeof(journal->name) - 24) {
        ns_journal_close(journal);
        return ns_fail(err, NS_REJECT, "the name %.200s is too long", name);
    }
    *out = journal;
    return NS_OK;
}

/* The new file of a rewrite: NAME.new, locked before it gets the name. */
static enum ns_status
begin_rewrite(struct ns_journal *journal, struct ns_journal **out,
              struct ns_error *err)
{
    struct ns_journal_options options = journal->options;
    struct ns_journal *fresh = NULL;
    char name[NAME];
    enum ns_status status;

    options.rewrite = false;
    snprintf(name, sizeof(name), "%.280s.new", journal->name);
    status = create(journal->dir, name, &options, &fresh, err);
    if (status == NS_OK)
        status = open_locked(fresh, O_TRUNC, err);
    if (status == NS_OK) {
        *out = fresh;
        return NS_OK;
    }
    ns_journal_close(fresh);
    return status;
}

static enum ns_status
end_rewrite(struct recovery *r, struct ns_error *err)
{
    struct ns_journal *journal = r->journal, *fresh = r->rewritten;
    enum ns_status status;
    struct stat st;
    int old;

    if (!r->dropped) {
        journal->io->unlinkat(journal->dir, fresh->name, 0);
        return NS_OK;
    }
    status = flush_kept(r, 0, err);
    if (status != NS_OK)
        return status;
    if (fstat(journal->fd, &st) == 0)
        (void)fchmod(fresh->fd, st.st_mode & 07777);
    if (journal->io->fsync(fresh->fd) == -1 ||
        journal->io->renameat(journal->dir, fresh->name, journal->dir,
                              journal->name) == -1)
        return io_failed(err, "rewrite", journal->name);
    (void)journal->io->fsync(journal->dir);
    old = journal->fd;
    journal->fd = fresh->fd; /* with its lock */
    journal->length = fresh->length;
    fresh->fd = old;
    return NS_OK;
}

static enum ns_status
recover(struct ns_journal *journal, struct ns_error *err)
{
    struct recovery r = { .journal = journal };
    enum ns_status status = NS_OK;

    ns_buf_init(&r.unit, max_unit);
    ns_buf_init(&r.kept, max_unit);
    r.in = malloc(CHUNK);
    r.out = malloc(CHUNK);
    if (!r.in || !r.out ||
        LZ4F_isError(LZ4F_createDecompressionContext(&r.lz4, LZ4F_VERSION)))
        status = no_memory(err);
    if (status == NS_OK && journal->options.rewrite)
        status = begin_rewrite(journal, &r.rewritten, err);
    if (status == NS_OK)
        status = journal->options.compressed ? read_frame_units(&r, err)
                                             : read_line_units(&r, err);
    if (status == NS_OK)
        status = cut_tail(&r, err);
    if (status == NS_OK && r.rewritten)
        status = end_rewrite(&r, err);
    if (status == NS_OK)
        status = remember_tail(journal, err);
    if (status != NS_OK && r.rewritten)
        journal->io->unlinkat(journal->dir, r.rewritten->name, 0);
    ns_journal_close(r.rewritten);
    LZ4F_freeDecompressionContext(r.lz4);
    ns_buf_fini(&r.unit);
    ns_buf_fini(&r.kept);
    free(r.in);
    free(r.out);
    return status;
}

/* Disk is taken ahead of need, so that what is computed can be stored even
 * while others fill the disk. A file system that can not is no error. */
static void
reserve(struct ns_journal *journal)
{
    if (!journal->options.reserve_bytes || journal->length < journal->reserved)
        return;
    if (journal->io->fallocate(journal->fd, FALLOC_FL_KEEP_SIZE,
                               (off_t)journal->length,
                               (off_t)journal->options.reserve_bytes) == -1)
        return;
    journal->reserved = journal->length + journal->options.reserve_bytes;
}

enum ns_status
ns_journal_open(int dir, const char *name,
                const struct ns_journal_options *options,
                struct ns_journal **out, struct ns_error *err)
{
    struct ns_journal *journal = NULL;
    enum ns_status status;

    status = create(dir, name, options, &journal, err);
    if (status == NS_OK)
        status = open_locked(journal, 0, err);
    if (status == NS_OK)
        status = recover(journal, err);
    if (status == NS_OK) {
        reserve(journal);
        *out = journal;
        journal = NULL;
    }
    ns_journal_close(journal);
    return status;
}

enum ns_status
ns_journal_stream(int fd, const struct ns_io *io, struct ns_journal **out,
                  struct ns_error *err)
{
    struct ns_journal_options options = { .io = io };
    enum ns_status status;

    status = create(-1, "standard output", &options, out, err);
    if (status != NS_OK)
        return status;
    (*out)->fd = fd;
    (*out)->stream = true;
    return NS_OK;
}

void
ns_journal_close(struct ns_journal *journal)
{
    if (!journal)
        return;
    if (journal->fd != -1 && !journal->stream)
        close(journal->fd);
    ns_buf_fini(&journal->frame);
    free(journal);
}

/* ---- writing --------------------------------------------------------- */

static enum ns_status
compress(struct ns_journal *journal, const char *lines, size_t length,
         struct ns_error *err)
{
    LZ4F_preferences_t preferences = {
        .frameInfo = { .blockSizeID = LZ4F_max256KB,
                       .blockMode = LZ4F_blockLinked,
                       .contentChecksumFlag = LZ4F_contentChecksumEnabled,
                       .contentSize = length,
                       .blockChecksumFlag = LZ4F_blockChecksumEnabled },
    };
    size_t bound = LZ4F_compressFrameBound(length, &preferences), n;
    char *room;

    ns_buf_reset(&journal->frame);
    room = ns_buf_room(&journal->frame, bound);
    if (!room)
        return ns_buf_check(&journal->frame, "a frame of results", err);
    n = LZ4F_compressFrame(room, bound, lines, length, &preferences);
    if (LZ4F_isError(n))
        return ns_fail(err, NS_FATAL, "lz4: %s", LZ4F_getErrorName(n));
    journal->frame.length = n;
    return NS_OK;
}

/* Cuts the file to what is durable. What can not be cut now is cut before the
 * next write, or by the next open, which finds a torn tail. */
static bool
cut_back(struct ns_journal *journal)
{
    int saved = errno;

    journal->dirty =
        journal->io->ftruncate(journal->fd, (off_t)journal->length) == -1;
    errno = saved;
    return !journal->dirty;
}

/* A new descriptor for the file whose flush failed. What was flushed before is
 * safe by those flushes; that it is still the same file is compared. */
static enum ns_status
reopen(struct ns_journal *journal, struct ns_error *err)
{
    unsigned char tail[TAIL];
    enum ns_status status;
    struct stat old, new;
    int fd;

    fd = journal->io->openat(journal->dir, journal->name,
                             O_RDWR | O_APPEND | O_CLOEXEC, 0);
    if (fd == -1)
        return io_failed(err, "open", journal->name);
    if (fstat(journal->fd, &old) == -1 || fstat(fd, &new) == -1 ||
        old.st_ino != new.st_ino || old.st_dev != new.st_dev ||
        (uint64_t) new.st_size < journal->length ||
        pread(fd, tail, journal->n_tail,
              (off_t)(journal->length - journal->n_tail)) !=
            (ssize_t)journal->n_tail ||
        memcmp(tail, journal->tail, journal->n_tail) != 0) {
        close(fd);
        return ns_fail(err, NS_FATAL,
                       "%.200s is not what was written to it, after a flush "
                       "failed",
                       journal->name);
    }
    /* The new lock can not be had while the old descriptor holds its own; in
     * between no one can have it for long enough to write: whoever opens the
     * file reads it through first. */
    close(journal->fd);
    journal->fd = fd;
    journal->suspect = false;
    journal->dirty = true;
    if (!journal->options.lock)
        return NS_OK;
    status = lock(fd, journal->name, err);
    journal->suspect = status != NS_OK; /* asks for the lock again */
    return status;
}

static enum ns_status
write_and_flush(struct ns_journal *journal, const char *bytes, size_t length,
                struct ns_error *err)
{
    enum ns_status status;

    if (journal->suspect) {
        status = reopen(journal, err);
        if (status != NS_OK)
            return status;
    }
    if (journal->dirty && !cut_back(journal))
        return io_failed(err, "truncate", journal->name);
    reserve(journal);
    if (!write_all(journal->io, journal->fd, bytes, length)) {
        cut_back(journal);
        return io_failed(err, "write", journal->name);
    }
    if (journal->io->fdatasync(journal->fd) == -1) {
        journal->suspect = true;
        cut_back(journal);
        return io_failed(err, "flush", journal->name);
    }
    return NS_OK;
}

enum ns_status
ns_journal_append(struct ns_journal *journal, const char *lines, size_t length,
                  struct ns_error *err)
{
    enum ns_status status;

    if (length == 0)
        return NS_OK;
    if (journal->stream) {
        if (!write_all(journal->io, journal->fd, lines, length))
            return ns_fail_errno(err, NS_FATAL, "write %s", journal->name);
        return NS_OK;
    }
    if (journal->options.compressed) {
        status = compress(journal, lines, length, err);
        if (status != NS_OK)
            return status;
        lines = journal->frame.data;
        length = journal->frame.length;
    }
    status = write_and_flush(journal, lines, length, err);
    if (status == NS_RETRY && journal->suspect)
        status = write_and_flush(journal, lines, length, err);
    if (status != NS_OK)
        return status;
    extend_tail(journal, lines, length);
    journal->length += length;
    return NS_OK;
}

enum ns_status
ns_journal_finish(struct ns_journal *journal, struct ns_error *err)
{
    enum ns_status status;

    if (journal->stream)
        return NS_OK;
    if (journal->options.compressed && journal->length == 0) {
        /* A file of no bytes is no LZ4 file. */
        status = compress(journal, "", 0, err);
        if (status == NS_OK)
            status = write_and_flush(journal, journal->frame.data,
                                     journal->frame.length, err);
        if (status != NS_OK)
            return status;
        journal->length = journal->frame.length;
    }
    if (journal->reserved || journal->dirty) {
        if (!cut_back(journal))
            return io_failed(err, "truncate", journal->name);
        journal->reserved = 0;
    }
    if (journal->io->fsync(journal->fd) == -1)
        return io_failed(err, "flush", journal->name);
    return NS_OK;
}
