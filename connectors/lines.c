#include "connectors/lines.h"

#include <errno.h>
#include <inttypes.h>
#include <lz4frame.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

enum { CHUNK = 64 << 10, MAX_LINE = 16 << 20 };

static const uint64_t max_expanded = (uint64_t)64 << 30;

struct ns_lines {
    int fd;
    const struct ns_io *io;
    struct ns_lines_options options;
    LZ4F_dctx *lz4;
    EVP_MD_CTX *hash;
    EVP_MD *sha256;
    struct ns_error failed; /* sticky: the file ends there */

    bool started, compressed, frame_open, at_end; /* at_end: of the file */
    uint64_t bytes_read, bytes_expanded;
    size_t in_at, in_length;   /* of `in`: what the file gave */
    size_t out_at, out_length; /* of `out`: what it means; plain: `in` */
    char *in, *out;

    /* The line being put together. A line that outgrows max_line goes on as
     * its length and its hash alone; a \r at its end is held back from both
     * until it is known not to belong to the line's end. */
    struct ns_buf line;
    uint64_t length, number;
    bool over, held_cr, begun;
};

enum ns_status
ns_lines_create(int fd, const struct ns_lines_options *options,
                const struct ns_io *io, struct ns_lines **out,
                struct ns_error *err)
{
    struct ns_lines *lines = calloc(1, sizeof(*lines));
    enum ns_status status = NS_OK;

    if (!lines)
        return ns_fail(err, NS_FATAL, "out of memory for a reader of lines");
    lines->fd = fd;
    lines->io = io ? io : &ns_io_system;
    lines->options = *options;
    if (!lines->options.max_line)
        lines->options.max_line = MAX_LINE;
    if (!lines->options.max_expanded)
        lines->options.max_expanded = max_expanded;
    ns_buf_init(&lines->line, lines->options.max_line + 1);
    lines->in = malloc(CHUNK);
    lines->out = malloc(CHUNK);
    lines->hash = EVP_MD_CTX_new();
    lines->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (!lines->in || !lines->out || !lines->hash || !lines->sha256 ||
        LZ4F_isError(
            LZ4F_createDecompressionContext(&lines->lz4, LZ4F_VERSION))) {
        status = ns_fail(err, NS_FATAL, "out of memory for a reader of lines");
        goto out;
    }
    *out = lines;
    lines = NULL;
out:
    ns_lines_destroy(lines);
    return status;
}

void
ns_lines_destroy(struct ns_lines *lines)
{
    if (!lines)
        return;
    ns_buf_fini(&lines->line);
    LZ4F_freeDecompressionContext(lines->lz4);
    EVP_MD_CTX_free(lines->hash);
    EVP_MD_free(lines->sha256);
    free(lines->in);
    free(lines->out);
    free(lines);
}

bool
ns_lines_compressed(const struct ns_lines *lines)
{
    return lines->compressed;
}

uint64_t
ns_lines_bytes_read(const struct ns_lines *lines)
{
    return lines->bytes_read;
}

/* Appends one read to `in`. A pipe is looked at first: its reader has other
 * things to do than to wait for its writer. */
static enum ns_status
read_some(struct ns_lines *lines, bool *read_once, struct ns_error *err)
{
    struct pollfd pollfd = { .fd = lines->fd, .events = POLLIN };
    ssize_t n;

    if (lines->options.single_read && poll(&pollfd, 1, 0) == 0) {
        *read_once = true;
        return NS_OK;
    }
    do
        n = lines->io->read(lines->fd, lines->in + lines->in_length,
                            CHUNK - lines->in_length);
    while (n == -1 && errno == EINTR && !lines->options.single_read);
    *read_once = true;
    if (n == -1 && (errno == EINTR || errno == EAGAIN) &&
        lines->options.single_read)
        return NS_OK;
    if (n == -1)
        return ns_fail_errno(err, NS_RETRY, "read");
    lines->at_end = n == 0;
    lines->in_length += (size_t)n;
    lines->bytes_read += (size_t)n;
    return NS_OK;
}

/* Whether a read may be made in this call. */
static bool
may_read(const struct ns_lines *lines, bool read_once)
{
    return !lines->at_end && !(lines->options.single_read && read_once);
}

static bool
starts_with(const struct ns_lines *lines, const char *bytes, size_t length)
{
    return lines->in_length >= length && memcmp(lines->in, bytes, length) == 0;
}

/* The first bytes decide what the file is. `*ready` false: too few as yet. */
static enum ns_status
start(struct ns_lines *lines, bool *read_once, bool *ready,
      struct ns_error *err)
{
    enum ns_status status;

    while (lines->in_length < 4 && may_read(lines, *read_once)) {
        status = read_some(lines, read_once, err);
        if (status != NS_OK)
            return status;
    }
    *ready = lines->in_length >= 4 || lines->at_end;
    if (!*ready)
        return NS_OK;
    if (starts_with(lines, "\x02\x21\x4c\x18", 4))
        return ns_refuse(err, "bad_lz4", NULL,
                         "an LZ4 file of the legacy format; lz4 -d and lz4 "
                         "write it anew");
    lines->compressed = starts_with(lines, "\x04\x22\x4d\x18", 4);
    lines->started = true;
    return NS_OK;
}

/* Expands into `out` what `in` holds; refills `in` as needed. */
static enum ns_status
expand(struct ns_lines *lines, bool *read_once, struct ns_error *err)
{
    enum ns_status status;

    lines->out_at = lines->out_length = 0;
    while (lines->out_length == 0) {
        size_t produced = CHUNK, taken, hint;

        if (lines->in_at == lines->in_length) {
            lines->in_at = lines->in_length = 0;
            if (may_read(lines, *read_once)) {
                status = read_some(lines, read_once, err);
                if (status != NS_OK)
                    return status;
            }
            if (lines->in_length == 0 && !lines->at_end)
                return NS_OK;
        }
        taken = lines->in_length - lines->in_at;
        if (taken == 0 && !lines->frame_open)
            return NS_OK; /* the end, between two frames */
        hint = LZ4F_decompress(lines->lz4, lines->out, &produced,
                               lines->in + lines->in_at, &taken, NULL);
        if (LZ4F_isError(hint))
            return ns_refuse(err, "bad_lz4", NULL,
                             "the LZ4 frame is damaged before byte %" PRIu64
                             ": %s",
                             lines->bytes_read, LZ4F_getErrorName(hint));
        lines->in_at += taken;
        lines->frame_open = hint != 0;
        lines->out_length = produced;
        lines->bytes_expanded += produced;
        if (lines->bytes_expanded > lines->options.max_expanded)
            return ns_refuse(err, "too_large", NULL,
                             "expands to more than %" PRIu64 " bytes",
                             lines->options.max_expanded);
        if (produced == 0 && taken == 0 && lines->at_end)
            return ns_refuse(err, "bad_lz4", NULL,
                             "the LZ4 frame ends in the middle, at byte "
                             "%" PRIu64,
                             lines->bytes_read);
    }
    return NS_OK;
}

/* More text in `out`, if there is any. */
static enum ns_status
refill(struct ns_lines *lines, bool *read_once, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    bool ready = true;
    char *swap;

    if (!lines->started)
        status = start(lines, read_once, &ready, err);
    if (status != NS_OK || !ready)
        return status;
    if (lines->compressed)
        return expand(lines, read_once, err);

    if (lines->in_length == 0 && may_read(lines, *read_once)) {
        status = read_some(lines, read_once, err);
        if (status != NS_OK)
            return status;
    }
    swap = lines->out;
    lines->out = lines->in;
    lines->in = swap;
    lines->out_at = 0;
    lines->out_length = lines->in_length;
    lines->in_length = 0;
    return NS_OK;
}

static enum ns_status
check_mark(const char *text, size_t length, struct ns_error *err)
{
    if ((length >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) ||
        (length >= 2 && (memcmp(text, "\xff\xfe", 2) == 0 ||
                         memcmp(text, "\xfe\xff", 2) == 0)))
        return ns_refuse(err, "bad_encoding", NULL,
                         "the file starts with a byte order mark; UTF-8 "
                         "without one is needed");
    return NS_OK;
}

static bool
hash_begin(struct ns_lines *lines)
{
    return EVP_DigestInit_ex2(lines->hash, lines->sha256, NULL) == 1;
}

static bool
hash_add(struct ns_lines *lines, const char *bytes, size_t length)
{
    return EVP_DigestUpdate(lines->hash, bytes, length) == 1;
}

/* Takes a piece of an overlong line, which ends in no newline. */
static bool
skip_piece(struct ns_lines *lines, const char *bytes, size_t length)
{
    if (length == 0)
        return true;
    if (lines->held_cr) {
        lines->length++;
        if (!hash_add(lines, "\r", 1))
            return false;
    }
    lines->held_cr = bytes[length - 1] == '\r';
    length -= lines->held_cr;
    lines->length += length;
    return hash_add(lines, bytes, length);
}

/* Takes a piece of the line that ends in no newline. */
static enum ns_status
take_piece(struct ns_lines *lines, const char *bytes, size_t length,
           struct ns_error *err)
{
    /* One byte over is let in: it may be the \r of the line's end. */
    size_t room = lines->options.max_line + 1 - lines->line.length;

    lines->begun |= length > 0;
    if (!lines->over && length <= room) {
        ns_buf_add(&lines->line, bytes, length);
        return ns_buf_check(&lines->line, "a line", err);
    }
    if (!lines->over) {
        lines->over = true;
        lines->length = 0;
        lines->held_cr = false;
        if (!hash_begin(lines) ||
            !skip_piece(lines, lines->line.data ? lines->line.data : "",
                        lines->line.length))
            return ns_fail(err, NS_FATAL, "SHA-256 failed");
        ns_buf_fini(&lines->line);
    }
    if (!skip_piece(lines, bytes, length))
        return ns_fail(err, NS_FATAL, "SHA-256 failed");
    return NS_OK;
}

static bool
is_blank(const char *text, size_t length)
{
    while (length && strchr(" \t\r", text[length - 1]) && text[length - 1])
        length--;
    return length == 0;
}

/* The line is whole. `*blank`: it says nothing and is not to be handed out. */
static enum ns_status
end_line(struct ns_lines *lines, struct ns_line *out, bool *blank,
         struct ns_error *err)
{
    struct ns_line line = { .number = lines->number + 1 };
    size_t length = lines->line.length;
    bool ok = true;

    if (!lines->over && length && lines->line.data[length - 1] == '\r')
        length--;
    if (!lines->over && length > lines->options.max_line) {
        /* Just one byte over, and it was no \r. */
        lines->over = true;
        lines->length = length;
        ok = hash_begin(lines) && hash_add(lines, lines->line.data, length);
    }
    if (lines->over) {
        line.length = lines->length;
        *blank = false;
        ok = ok && EVP_DigestFinal_ex(lines->hash, line.sha256, NULL) == 1;
    } else {
        line.bytes = lines->line.data ? lines->line.data : "";
        line.length = length;
        *blank = is_blank(line.bytes, length);
        if (!*blank && !lines->options.no_hash)
            ok = hash_begin(lines) && hash_add(lines, line.bytes, length) &&
                 EVP_DigestFinal_ex(lines->hash, line.sha256, NULL) == 1;
    }
    if (!ok)
        return ns_fail(err, NS_FATAL, "SHA-256 failed");
    lines->number++;
    lines->begun = false;
    *out = line;
    return NS_OK;
}

static enum ns_status
next(struct ns_lines *lines, struct ns_line *out, bool *end,
     struct ns_error *err)
{
    enum ns_status status;
    bool read_once = false, blank, fresh = !lines->begun;

    if (fresh) { /* the last line has been read by now */
        ns_buf_reset(&lines->line);
        lines->over = false;
    }
    for (;;) {
        const char *text, *newline;
        size_t left, piece;

        if (lines->out_at == lines->out_length) {
            bool first = lines->number == 0 && !lines->begun;

            lines->out_at = lines->out_length = 0;
            status = refill(lines, &read_once, err);
            if (status == NS_OK && first)
                status = check_mark(lines->out, lines->out_length, err);
            if (status != NS_OK)
                return status;
        }
        text = lines->out + lines->out_at;
        left = lines->out_length - lines->out_at;
        if (left == 0 && !(lines->at_end && lines->started)) {
            *out = (struct ns_line){ 0 };
            *end = false;
            return NS_OK; /* a pipe that has no more just now */
        }
        newline = left ? memchr(text, '\n', left) : NULL;
        piece = newline ? (size_t)(newline - text) : left;
        status = take_piece(lines, text, piece, err);
        if (status != NS_OK)
            return status;
        lines->out_at += piece + (newline != NULL);
        if (!newline && left)
            continue;
        if (!newline && !lines->begun) {
            *end = true;
            return NS_OK;
        }
        status = end_line(lines, out, &blank, err);
        if (status != NS_OK)
            return status;
        *end = false;
        if (!blank)
            return NS_OK;
        ns_buf_reset(&lines->line);
        lines->over = false;
    }
}

enum ns_status
ns_lines_next(struct ns_lines *lines, struct ns_line *out, bool *end,
              struct ns_error *err)
{
    enum ns_status status;

    if (lines->failed.status != NS_OK) {
        *err = lines->failed;
        return err->status;
    }
    status = next(lines, out, end, err);
    if (status == NS_REJECT || status == NS_FATAL)
        lines->failed = *err;
    return status;
}
