/* The reading end of a spool: lines to messages. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "connectors/spool_private.h"

enum { SCAN_MS = 1000, LINES_A_POLL = 4096 };

/* Whether the file is still what was opened: a file that is written while it
 * is read would give answers to questions nobody asked. */
static bool
is_unchanged(struct ns_spool *spool, const struct ns_spool_file *file)
{
    const struct stat *old = &file->stat;
    struct stat st, named;

    if (!file->regular)
        return true;
    if (fstat(file->fd, &st) == -1 || st.st_size != old->st_size ||
        st.st_mtim.tv_sec != old->st_mtim.tv_sec ||
        st.st_mtim.tv_nsec != old->st_mtim.tv_nsec)
        return false;
    if (!spool->is_directory)
        return true; /* `run` may be given a path that has since moved */
    return fstatat(spool->dirs[WORK], file->name, &named,
                   AT_SYMLINK_NOFOLLOW) == 0 &&
           named.st_ino == old->st_ino && named.st_dev == old->st_dev;
}

/* A line for which results stand that were made from other bytes: its own
 * (`id` NULL), or those of its id. To go on would mix answers to two inputs in
 * one file. */
static enum ns_status
edited(struct ns_spool *spool, struct ns_spool_file *file, uint64_t line,
       uint64_t other, const char *id, struct ns_error *err)
{
    if (id)
        ns_refuse(err, "edited", "custom_id",
                  "line %" PRIu64 " was edited since: the result %s (of line "
                  "%" PRIu64 ") was made from other bytes; give the input "
                  "another output, or begin anew",
                  line, id, other);
    else
        ns_refuse(err, "edited", "custom_id",
                  "line %" PRIu64 " is not the line whose result stands in the "
                  "output; give the input another output, or begin anew",
                  line);
    return ns_spool_condemn(spool, file, err);
}

/* Takes note of a line that is new, and of its id. This is done here, in the
 * order of lines, because claims come in any: the first line of an id has it,
 * on every run. */
static enum ns_status
admit(struct ns_spool *spool, struct ns_spool_file *file,
      const struct ns_line *line, struct ns_error *err)
{
    char text[NS_JOB_ID_BYTES + 1], shown[120];
    const char *id = NULL;
    enum ns_status status;
    uint64_t other = 0;

    if (line->bytes &&
        ns_job_peek_id(line->bytes, (size_t)line->length, text)) {
        id = text;
        other = ns_index_line_of(file->index, id);
    }
    if (other && !ns_index_is_seen(file->index, other)) {
        ns_log_escape(id, strlen(id), shown, sizeof(shown));
        return edited(spool, file, line->number, other, shown, err);
    }
    if (ns_index_is_done(file->index, line->number))
        return edited(spool, file, line->number, line->number, NULL, err);
    if (other)
        id = NULL; /* a second line of the id: the claim says so */
    status = ns_index_put(file->index, line->number, ns_index_sha(line->sha256),
                          id, err);
    if (status == NS_OK)
        ns_index_set_seen(file->index, line->number);
    return status == NS_REJECT ? ns_spool_condemn(spool, file, err) : status;
}

/* The next line that is not done yet. `*got` false: none just now, or none at
 * all any more (file->at_end, file->dead). */
static enum ns_status
next_line(struct ns_spool *spool, struct ns_spool_file *file,
          struct ns_line *line, bool *got, struct ns_error *err)
{
    enum ns_status status;
    bool end = false;

    *got = false;
    for (int i = 0; i < LINES_A_POLL; i++) {
        uint64_t before = ns_lines_bytes_read(file->lines), sha;

        status = ns_lines_next(file->lines, line, &end, err);
        spool->progress.bytes_read += ns_lines_bytes_read(file->lines) - before;
        if (status == NS_REJECT)
            return ns_spool_condemn(spool, file, err);
        if (status != NS_OK)
            return status;
        if ((end || ns_lines_bytes_read(file->lines) != file->looked) &&
            !is_unchanged(spool, file)) {
            ns_refuse(err, "input_changed", NULL,
                      "the file was changed while it was read");
            return ns_spool_condemn(spool, file, err);
        }
        file->looked = ns_lines_bytes_read(file->lines);
        file->at_end = end;
        if (end || line->number == 0)
            return NS_OK;
        sha = ns_index_sha(line->sha256);
        if (!ns_index_has(file->index, line->number, sha) ||
            !ns_index_is_done(file->index, line->number)) {
            status = admit(spool, file, line, err);
            *got = status == NS_OK && !file->dead;
            return status;
        }
        ns_index_set_seen(file->index, line->number);
    }
    return NS_OK;
}

static enum ns_status
retire_files(struct ns_spool *spool, struct ns_error *err)
{
    struct ns_spool_file *file = spool->files, *next;
    enum ns_status status = NS_OK;

    for (; file && status == NS_OK; file = next) {
        next = file->next;
        if ((file->at_end || file->dead) &&
            ns_ledger_in_flight(file->ledger) == 0)
            status = ns_spool_retire(spool, file, err);
    }
    return status;
}

static struct ns_spool_file *
readable_file(struct ns_spool *spool)
{
    struct ns_spool_file *file = spool->files;

    while (file &&
           (file->at_end || file->dead || !ns_ledger_has_room(file->ledger)))
        file = file->next;
    return file;
}

/* One attempt at a message. `*wait`: there is nothing, and not at once again.
 * `*wait_fd`: the pipe that may bring something, or -1. */
static enum ns_status
poll_once(struct ns_spool *spool, struct ns_message *out, bool *wait,
          int *wait_fd, struct ns_error *err)
{
    struct ns_spool_file *file;
    enum ns_status status = NS_OK;
    struct ns_line line;
    bool got, taken;

    *out = (struct ns_message){ .kind = NS_MESSAGE_NONE };
    *wait = true;
    *wait_fd = -1;
    if (spool->is_directory)
        status = retire_files(spool, err);
    /* A full disk shows its end to whoever waits to write: without anyone, it
     * is tried. */
    if (status != NS_OK || spool->in_flight >= spool->options.window ||
        (spool->progress.storage_full && spool->in_flight > 0))
        return status;

    file = readable_file(spool);
    if (!file && spool->is_directory &&
        ns_spool_now_ms() >= spool->scan_due_ms) {
        status = ns_spool_take(spool, &taken, err);
        if (status == NS_OK && !taken)
            spool->scan_due_ms = ns_spool_now_ms() + SCAN_MS;
        file = readable_file(spool);
    }
    if (status != NS_OK)
        return status;
    if (!file) {
        if (!spool->is_directory && spool->files->at_end)
            out->kind = NS_MESSAGE_END;
        return NS_OK;
    }

    status = next_line(spool, file, &line, &got, err);
    if (status != NS_OK)
        return status;
    if (!got) {
        if (file->at_end && !spool->is_directory)
            out->kind = NS_MESSAGE_END;
        *wait = !file->regular && !file->at_end;
        *wait_fd = *wait ? file->fd : -1;
        if (!*wait && out->kind == NS_MESSAGE_NONE)
            out->kind = NS_MESSAGE_SKIPPED;
        return NS_OK;
    }
    ns_ledger_receive(file->ledger, line.number); /* there was room */
    spool->in_flight++;
    spool->progress.lines_handed_out++;
    out->kind = NS_MESSAGE_JOB;
    out->position.partition = file->number;
    out->position.offset = line.number;
    out->origin = file->name;
    if (file->batch[0]) /* so that ids and letters do not depend on a ~2 */
        out->origin = out->batch = file->batch;
    out->bytes = line.bytes;
    out->length = line.length;
    memcpy(out->sha256, line.sha256, sizeof(out->sha256));
    return NS_OK;
}

static enum ns_status
spool_poll(struct ns_source *source, int timeout_ms, struct ns_message *out,
           struct ns_error *err)
{
    struct ns_spool *spool = (struct ns_spool *)source;
    enum ns_status status;
    struct pollfd pollfd = { .events = POLLIN };
    bool wait;

    pthread_mutex_lock(&spool->mutex);
    status = poll_once(spool, out, &wait, &pollfd.fd, err);
    pthread_mutex_unlock(&spool->mutex);
    if (status == NS_OK && out->kind == NS_MESSAGE_NONE && wait &&
        timeout_ms > 0)
        (void)poll(&pollfd, pollfd.fd != -1, timeout_ms);
    return status;
}

static void
spool_acknowledge(struct ns_source *source, struct ns_position position)
{
    struct ns_spool *spool = (struct ns_spool *)source;
    struct ns_spool_file *file;

    pthread_mutex_lock(&spool->mutex);
    file = ns_spool_find(spool, position.partition);
    if (file && ns_ledger_done(file->ledger, position.offset))
        spool->in_flight--;
    pthread_mutex_unlock(&spool->mutex);
}

static void
spool_close(struct ns_source *source)
{
    (void)source; /* ns_spool_close ends both */
}

const struct ns_source_ops ns_spool_source_ops = {
    .name = "spool",
    .poll = spool_poll,
    .acknowledge = spool_acknowledge,
    .close = spool_close,
};
