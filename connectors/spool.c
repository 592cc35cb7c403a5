#include "connectors/spool.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "connectors/json.h"
#include "connectors/spool_private.h"

enum {
    WINDOW = 256,
    SPAN = 10000,
    FILES = 8,            /* open at once */
    NAME_MOST = 220,      /* leaves room for the endings that we add */
    LINES_MOST = 1 << 26, /* of an input whose size does not tell */
    PRIVATE = 0640,       /* mode of what nightshiftd writes */
    NFS_MAGIC = 0x6969,
};

static const uint64_t reserve_bytes = (uint64_t)64 << 20;
static const char *const dir_names[N_DIRS] = { "in", "work", "out", "done",
                                               "dead" };

int64_t
ns_spool_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool
ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n >= m && strcmp(text + n - m, end) == 0;
}

static bool
stands(int dir, const char *name)
{
    struct stat st;

    return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

static enum ns_status
io_failed(struct ns_error *err, const char *call, const char *name)
{
    enum ns_status status =
        ns_fail_errno(err, NS_RETRY, "%s %.200s", call, name);

    err->code = "io";
    return status;
}

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory opening a spool");
}

struct ns_spool_file *
ns_spool_find(struct ns_spool *spool, uint32_t number)
{
    struct ns_spool_file *file = spool->files;

    while (file && file->number != number)
        file = file->next;
    return file;
}

void
ns_spool_drop_claim(struct ns_spool_file *file, uint64_t line)
{
    struct ns_spool_claim **at = &file->claims;

    while (*at && (*at)->line != line)
        at = &(*at)->next;
    if (*at) {
        struct ns_spool_claim *claim = *at;

        *at = claim->next;
        free(claim);
    }
}

/* ---- one file's state ------------------------------------------------ */

static void
close_file(struct ns_spool_file *file)
{
    if (!file)
        return;
    while (file->claims)
        ns_spool_drop_claim(file, file->claims->line);
    ns_lines_destroy(file->lines);
    ns_ledger_destroy(file->ledger);
    ns_journal_close(file->journal);
    ns_blocks_close(file->blocks);
    ns_index_destroy(file->index);
    if (file->fd > STDIN_FILENO)
        close(file->fd);
    free(file);
}

static bool
from_hex(const char *hex, size_t n, unsigned char *out)
{
    for (size_t i = 0; i < 2 * n; i++) {
        char c = hex[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;

        if (digit < 0)
            return false;
        out[i / 2] = (unsigned char)(i % 2 ? out[i / 2] << 4 | digit : digit);
    }
    return true;
}

struct judging {
    struct ns_spool *spool;
    struct ns_spool_file *file;
};

/* A line of former results: whose it is, and whether it still counts. */
static enum ns_journal_verdict
judge(void *context, const char *line, size_t length)
{
    struct judging *judging = context;
    struct ns_spool_file *file = judging->file;
    unsigned char sha256[NS_SHA256_BYTES];
    enum ns_journal_verdict verdict = NS_JOURNAL_ALIEN;
    const json_t *ours, *number, *id;
    const char *hex, *word, *code;
    struct ns_error err;
    json_t *root;
    uint64_t n;

    ns_json_watch();
    root = json_loadb(line, length, 0, NULL);
    if (ns_json_starved()) {
        json_decref(root);
        return NS_JOURNAL_FAILED;
    }
    if (!root)
        return NS_JOURNAL_ALIEN;
    ours = json_object_get(root, "nightshift");
    number = json_object_get(ours, "line");
    hex = json_string_value(json_object_get(ours, "input_sha256"));
    word = json_string_value(json_object_get(ours, "status"));
    code = json_string_value(
        json_object_get(json_object_get(root, "error"), "code"));
    id = json_object_get(root, "custom_id");
    if (!json_is_integer(number) || json_integer_value(number) < 1 || !word ||
        !hex || strlen(hex) != 2 * NS_SHA256_BYTES ||
        !from_hex(hex, NS_SHA256_BYTES, sha256))
        goto out;
    verdict = NS_JOURNAL_DROP;
    if (judging->spool->options.retry_failed && strcmp(word, "ok") != 0)
        goto out;
    verdict = NS_JOURNAL_KEEP;
    n = (uint64_t)json_integer_value(number);
    if (n > file->max_line)
        goto out;
    /* A second line of one id does not own it: the first one may still be
     * running when this result is read again. */
    if (code && strcmp(code, "duplicate_id") == 0)
        id = NULL;
    if (ns_index_put(file->index, n, ns_index_sha(sha256),
                     json_string_value(id), &err) != NS_OK)
        verdict = NS_JOURNAL_FAILED;
    ns_index_set_done(file->index, n);
    judging->spool->progress.lines_done_before++;
    if (strcmp(word, "ok") != 0)
        judging->spool->progress.failed_before++;
out:
    json_decref(root);
    return verdict;
}

static bool
matters(void *context, uint64_t line, uint64_t sha)
{
    const struct ns_spool_file *file = context;

    return !(ns_index_has(file->index, line, sha) &&
             ns_index_is_done(file->index, line));
}

/* What every file has, over a descriptor that is open. */
static enum ns_status
prepare_file(struct ns_spool *spool, struct ns_spool_file *file,
             struct ns_error *err)
{
    struct ns_lines_options lines = {
        .max_line = spool->options.max_line,
        .max_expanded = spool->options.max_expanded,
    };
    enum ns_status status;

    if (fstat(file->fd, &file->stat) == -1)
        return io_failed(err, "stat", file->name);
    file->regular = S_ISREG(file->stat.st_mode);
    file->number = ++spool->next_number;
    file->max_line = LINES_MOST;
    if (file->regular && file->stat.st_size < LINES_MOST / 256)
        file->max_line = (uint64_t)file->stat.st_size * 256 + 1;
    if (file->regular)
        spool->progress.bytes_total += (uint64_t)file->stat.st_size;
    lines.single_read = !file->regular;
    status = ns_lines_create(file->fd, &lines, spool->io, &file->lines, err);
    if (status == NS_OK)
        status = ns_ledger_create(spool->options.span, 1, &file->ledger, err);
    if (status == NS_OK)
        status = ns_index_create(&file->index, err);
    return status;
}

static struct ns_spool_file *
create_file(const char *name)
{
    struct ns_spool_file *file = calloc(1, sizeof(*file));

    if (file) {
        file->fd = -1;
        snprintf(file->name, sizeof(file->name), "%s", name);
    }
    return file;
}

/* Files are looked at in the order in which they came. */
static void
enlist(struct ns_spool *spool, struct ns_spool_file *file)
{
    struct ns_spool_file **at = &spool->files;

    while (*at)
        at = &(*at)->next;
    *at = file;
}

/* ---- `run`: one file ------------------------------------------------- */

/* Splits a path into the descriptor of its folder and its last part. */
static enum ns_status
open_parent(const struct ns_io *io, const char *path, int *dir,
            const char **name, struct ns_error *err)
{
    const char *slash = strrchr(path, '/');
    char folder[4096];

    *name = slash ? slash + 1 : path;
    if (!**name || strlen(*name) >= NS_SPOOL_NAME ||
        (slash && (size_t)(slash - path) >= sizeof(folder)))
        return ns_refuse(err, "bad_output", NULL, "%.200s is no file name",
                         path);
    snprintf(folder, sizeof(folder), "%.*s",
             slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    *dir = io->openat(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (*dir == -1) {
        ns_fail_errno(err, NS_REJECT, "open %.200s", folder);
        err->code = "bad_output";
        return NS_REJECT;
    }
    return NS_OK;
}

/* Puts former results aside, unless someone is writing them. */
static enum ns_status
put_aside(struct ns_spool *spool, const char *name, const char *blocks,
          struct ns_error *err)
{
    enum ns_status status = NS_OK;
    int fd = spool->io->openat(spool->out_dir, name, O_RDWR | O_CLOEXEC, 0);
    struct stat st;

    if (fd == -1)
        return errno == ENOENT ? NS_OK : io_failed(err, "open", name);
    if (flock(fd, LOCK_EX | LOCK_NB) == -1) {
        ns_fail(err, NS_RETRY, "%.200s is being written by another nightshift",
                name);
        err->code = "locked";
        status = NS_RETRY;
    } else if (fstat(fd, &st) == 0 && st.st_size > 0) {
        status = ns_journal_put_aside(spool->out_dir, name, spool->io, err);
    }
    if (status == NS_OK)
        spool->io->unlinkat(spool->out_dir, blocks, 0);
    close(fd);
    return status;
}

static enum ns_status
open_output(struct ns_spool *spool, struct ns_spool_file *file,
            struct ns_error *err)
{
    const char *path = spool->options.output, *name;
    struct judging judging = { spool, file };
    struct ns_journal_options options = {
        .lock = true,
        .rewrite = spool->options.retry_failed,
        .mode = 0666, /* less the umask, as any tool's output */
        .io = spool->io,
        .judge = judge,
        .context = &judging,
    };
    char blocks[NS_SPOOL_NAME + 8];
    enum ns_status status;
    struct stat st;

    if (strcmp(path, "-") == 0)
        return ns_journal_stream(STDOUT_FILENO, spool->io, &file->journal, err);
    status = open_parent(spool->io, path, &spool->out_dir, &name, err);
    if (status != NS_OK)
        return status;
    if (fstatat(spool->out_dir, name, &st, 0) == 0) {
        if (st.st_dev == file->stat.st_dev && st.st_ino == file->stat.st_ino)
            return ns_refuse(err, "bad_output", NULL,
                             "%.200s is the input itself", path);
        if (S_ISDIR(st.st_mode))
            return ns_refuse(err, "bad_output", NULL,
                             "%.200s is a folder, not a file", path);
        if (!S_ISREG(st.st_mode)) { /* a pipe, /dev/null */
            spool->lock = spool->io->openat(spool->out_dir, name,
                                            O_WRONLY | O_CLOEXEC, 0);
            if (spool->lock == -1)
                return io_failed(err, "open", path);
            return ns_journal_stream(spool->lock, spool->io, &file->journal,
                                     err);
        }
    }
    options.compressed = ends_with(name, ".lz4");
    snprintf(blocks, sizeof(blocks), "%s.blocks", name);
    if (spool->options.restart) {
        status = put_aside(spool, name, blocks, err);
        if (status != NS_OK)
            return status;
    }
    status =
        ns_journal_open(spool->out_dir, name, &options, &file->journal, err);
    if (status != NS_OK)
        return status;
    return ns_blocks_open(spool->out_dir, blocks, 0666, spool->model_rev,
                          spool->engine_rev, matters, file, spool->io,
                          &file->blocks, err);
}

static enum ns_status
open_run(struct ns_spool *spool, struct ns_error *err)
{
    const char *path = spool->options.input;
    const char *slash = strrchr(path, '/');
    struct ns_spool_file *file;
    enum ns_status status;

    file = create_file(strcmp(path, "-") == 0 ? "stdin"
                       : slash                ? slash + 1
                                              : path);
    if (!file)
        return no_memory(err);
    enlist(spool, file);
    file->fd = strcmp(path, "-") == 0
                   ? STDIN_FILENO
                   : spool->io->openat(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file->fd == -1) {
        ns_fail_errno(err, NS_REJECT, "open %.200s", path);
        err->code = "unreadable_input";
        return NS_REJECT;
    }
    status = prepare_file(spool, file, err);
    if (status == NS_OK && S_ISDIR(file->stat.st_mode))
        status = ns_refuse(err, "unreadable_input", NULL, "%.200s is a folder",
                           path);
    if (status == NS_OK)
        status = open_output(spool, file, err);
    return status;
}

/* Without the ~2 of a second one. */
void
ns_spool_batch(const char *file, const unsigned char sha256[NS_SHA256_BYTES],
               char out[NS_JOB_BATCH_BYTES + 1])
{
    enum { NAME_BYTES = 40 }; /* leaves the ids room */
    size_t n = strcspn(file, "."), digits;
    char name[NAME_BYTES + 1];

    for (digits = 0; digits < n; digits++)
        if (!strchr("0123456789", file[n - 1 - digits]))
            break;
    if (digits > 0 && digits < n && file[n - 1 - digits] == '~')
        n -= digits + 1;
    n = n < NAME_BYTES ? n : NAME_BYTES;
    for (size_t i = 0; i < n; i++)
        name[i] = file[i] > ' ' && file[i] < 0x7f ? file[i] : '_';
    name[n] = '\0';
    snprintf(out, NS_JOB_BATCH_BYTES + 1,
             "%s-%02x%02x%02x%02x%02x%02x", name, sha256[0], sha256[1],
             sha256[2], sha256[3], sha256[4], sha256[5]);
}

/* A file is its batch: the same file dropped in again is the same one, and
 * another file of the same name is not. */
static enum ns_status
name_batch(struct ns_spool *spool, struct ns_spool_file *file,
           struct ns_error *err)
{
    unsigned char chunk[64 << 10], sha256[NS_SHA256_BYTES];
    EVP_MD_CTX *digest = EVP_MD_CTX_new();
    ssize_t n = 0;
    bool good;

    good = digest && EVP_DigestInit_ex(digest, EVP_sha256(), NULL) == 1;
    while (good && (n = spool->io->read(file->fd, chunk, sizeof(chunk))) > 0)
        good = EVP_DigestUpdate(digest, chunk, (size_t)n) == 1;
    good = good && EVP_DigestFinal_ex(digest, sha256, NULL) == 1;
    EVP_MD_CTX_free(digest);
    if (n < 0 || lseek(file->fd, 0, SEEK_SET) == -1)
        return io_failed(err, "read", file->name);
    if (!good)
        return no_memory(err);
    ns_spool_batch(file->name, sha256, file->batch);
    return NS_OK;
}

/* ---- nightshiftd: a directory ---------------------------------------- */

/* Opens a file of work/ with its journal and blocks. NS_REJECT: it can not be
 * read, and stands in the list as dead. */
static enum ns_status
open_work(struct ns_spool *spool, const char *name, struct ns_error *err)
{
    struct ns_spool_file *file = create_file(name);
    struct judging judging = { spool, file };
    struct ns_journal_options options = {
        .compressed = ends_with(name, ".lz4"),
        .ours = true,
        .reserve_bytes = reserve_bytes,
        .mode = PRIVATE,
        .io = spool->io,
        .judge = judge,
        .context = &judging,
    };
    char part[NS_SPOOL_NAME + 8], blocks[NS_SPOOL_NAME + 8];
    enum ns_status status;

    if (!file)
        return no_memory(err);
    snprintf(part, sizeof(part), "%s.part", name);
    snprintf(blocks, sizeof(blocks), "%s.blocks", name);
    file->fd = spool->io->openat(spool->dirs[WORK], name,
                                 O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (file->fd == -1)
        status = io_failed(err, "open", name);
    else
        status = prepare_file(spool, file, err);
    if (status == NS_OK && spool->options.answers_elsewhere)
        status = name_batch(spool, file, err);
    if (status == NS_OK && !spool->options.answers_elsewhere)
        status = ns_journal_open(spool->dirs[OUT], part, &options,
                                 &file->journal, err);
    if (status == NS_OK && !spool->options.answers_elsewhere)
        status = ns_blocks_open(spool->dirs[WORK], blocks, PRIVATE,
                                spool->model_rev, spool->engine_rev, matters,
                                file, spool->io, &file->blocks, err);
    if (status == NS_REJECT) {
        enlist(spool, file);
        return ns_spool_condemn(spool, file, err);
    }
    if (status != NS_OK) {
        close_file(file);
        return status;
    }
    enlist(spool, file);
    return NS_OK;
}

static enum ns_status
write_reason(struct ns_spool *spool, const struct ns_spool_file *file,
             struct ns_error *err)
{
    char name[NS_SPOOL_NAME + 8], text[600];
    int fd, n;

    snprintf(name, sizeof(name), "%s.reason", file->name);
    n = snprintf(text, sizeof(text), "%s: %s\n",
                 file->reason.code ? file->reason.code : "unreadable",
                 file->reason.text);
    fd = spool->io->openat(spool->dirs[DEAD], name,
                           O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, PRIVATE);
    if (fd == -1)
        return io_failed(err, "open", name);
    if (spool->io->write(fd, text, (size_t)n) != n ||
        spool->io->fsync(fd) == -1) {
        io_failed(err, "write", name);
        close(fd);
        return NS_RETRY;
    }
    close(fd);
    return NS_OK;
}

static enum ns_status
move(struct ns_spool *spool, enum ns_spool_dir from, const char *name,
     enum ns_spool_dir to, const char *new_name, struct ns_error *err)
{
    if (spool->io->renameat(spool->dirs[from], name, spool->dirs[to],
                            new_name) == -1)
        return io_failed(err, "rename", name);
    if (spool->io->fsync(spool->dirs[to]) == -1 ||
        (from != to && spool->io->fsync(spool->dirs[from]) == -1))
        return io_failed(err, "flush the folder of", new_name);
    return NS_OK;
}

enum ns_status
ns_spool_retire(struct ns_spool *spool, struct ns_spool_file *file,
                struct ns_error *err)
{
    struct ns_spool_file **at = &spool->files;
    char part[NS_SPOOL_NAME + 8], shown[160];
    enum ns_status status = NS_OK;

    /* The reason stands first: with it, a restart in the middle of what
     * follows knows where the input belongs. */
    if (file->dead && stands(spool->dirs[WORK], file->name))
        status = write_reason(spool, file, err);
    if (status == NS_OK && file->journal) {
        snprintf(part, sizeof(part), "%s.part", file->name);
        status = ns_journal_finish(file->journal, err);
        if (status == NS_OK)
            status = move(spool, OUT, part, OUT, file->name, err);
        if (status != NS_OK && stands(spool->dirs[OUT], part))
            return status;
        ns_journal_close(file->journal);
        file->journal = NULL;
    }
    if (status == NS_OK && stands(spool->dirs[WORK], file->name))
        status = move(spool, WORK, file->name, file->dead ? DEAD : DONE,
                      file->name, err);
    if (status != NS_OK)
        return status;
    ns_blocks_remove(file->blocks);
    file->blocks = NULL;
    ns_log_escape(file->name, strlen(file->name), shown, sizeof(shown));
    if (file->dead)
        ns_log_warn("file.dead", "name=%s code=%s", shown,
                    file->reason.code ? file->reason.code : "unreadable");
    else
        ns_log_info("file.finished", "name=%s", shown);
    spool->progress.files_finished += !file->dead;
    spool->progress.files_dead += file->dead;
    while (*at != file)
        at = &(*at)->next;
    *at = file->next;
    close_file(file);
    return NS_OK;
}

enum ns_status
ns_spool_condemn(struct ns_spool *spool, struct ns_spool_file *file,
                 struct ns_error *err)
{
    file->dead = true;
    file->reason = *err;
    while (file->claims)
        ns_spool_drop_claim(file, file->claims->line);
    return spool->is_directory ? NS_OK : NS_REJECT;
}

/* A name for the file that none of the folders has seen: results that stand
 * are never overwritten by a second file of the same name. */
static bool
fresh_name(struct ns_spool *spool, const char *name, char out[NS_SPOOL_NAME])
{
    const char *end = ends_with(name, ".lz4") ? ".jsonl.lz4" : ".jsonl";
    char part[NS_SPOOL_NAME + 8];

    for (int i = 1; i < 100000; i++) {
        if (i == 1)
            snprintf(out, NS_SPOOL_NAME, "%s", name);
        else
            snprintf(out, NS_SPOOL_NAME, "%.*s~%d%s",
                     (int)(strlen(name) - strlen(end)), name, i, end);
        snprintf(part, sizeof(part), "%s.part", out);
        if (!stands(spool->dirs[WORK], out) && !stands(spool->dirs[OUT], out) &&
            !stands(spool->dirs[OUT], part) &&
            !stands(spool->dirs[DONE], out) && !stands(spool->dirs[DEAD], out))
            return true;
    }
    return false;
}

/* Says once of a file in in/ that it is not for us. */
static void
report_ignored(struct ns_spool *spool, const char *name)
{
    enum { MOST = sizeof(spool->ignored) / sizeof(spool->ignored[0]) };
    uint64_t hash = XXH3_64bits(name, strlen(name));
    char shown[160];

    for (uint32_t i = 0; i < spool->n_ignored; i++)
        if (spool->ignored[i] == hash)
            return;
    if (spool->n_ignored == MOST)
        return;
    spool->ignored[spool->n_ignored++] = hash;
    ns_log_warn("file.ignored",
                "name=%s why=\"a regular file that ends in "
                ".jsonl or .jsonl.lz4 is needed\"",
                ns_log_escape(name, strlen(name), shown, sizeof(shown)));
}

static bool
is_job_file(int dir, const char *name)
{
    struct stat st;

    return (ends_with(name, ".jsonl") || ends_with(name, ".jsonl.lz4")) &&
           strlen(name) <= NAME_MOST &&
           fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISREG(st.st_mode);
}

/* The first job file of a folder by name, above `after`; false: none. */
static bool
first_file(struct ns_spool *spool, enum ns_spool_dir which, const char *after,
           char out[NS_SPOOL_NAME], struct ns_error *err,
           enum ns_status *status)
{
    int fd =
        openat(spool->dirs[which], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd == -1 ? NULL : fdopendir(fd);
    struct dirent *entry;
    bool found = false;

    *status = NS_OK;
    if (!dir) {
        *status = io_failed(err, "read the folder", dir_names[which]);
        if (fd != -1)
            close(fd);
        return false;
    }
    while ((entry = readdir(dir)) != NULL) {
        const char *name = entry->d_name;

        if (name[0] == '.' || ends_with(name, ".tmp") ||
            ends_with(name, ".part"))
            continue;
        if (!is_job_file(spool->dirs[which], name)) {
            if (which == IN)
                report_ignored(spool, name);
            continue;
        }
        if (strcmp(name, after) <= 0 || (found && strcmp(name, out) >= 0))
            continue;
        snprintf(out, NS_SPOOL_NAME, "%s", name);
        found = true;
    }
    closedir(dir);
    return found;
}

enum ns_status
ns_spool_take(struct ns_spool *spool, bool *taken, struct ns_error *err)
{
    char name[NS_SPOOL_NAME], fresh[NS_SPOOL_NAME];
    enum ns_status status;
    int n = 0;

    *taken = false;
    for (struct ns_spool_file *file = spool->files; file; file = file->next)
        n++;
    if (n >= FILES || !first_file(spool, IN, "", name, err, &status))
        return n >= FILES ? NS_OK : status;
    if (!fresh_name(spool, name, fresh))
        return ns_fail(err, NS_RETRY, "no free name for %.200s", name);
    status = move(spool, IN, name, WORK, fresh, err);
    if (status == NS_OK)
        status = open_work(spool, fresh, err);
    *taken = status == NS_OK;
    return status;
}

/* A file that a former process left in work/. */
static enum ns_status
resume(struct ns_spool *spool, const char *name, struct ns_error *err)
{
    char part[NS_SPOOL_NAME + 8], other[NS_SPOOL_NAME + 8];
    enum ns_status status = NS_OK;
    bool condemned, is_part;

    snprintf(part, sizeof(part), "%s.part", name);
    snprintf(other, sizeof(other), "%s.reason", name);
    condemned = stands(spool->dirs[DEAD], other);
    is_part = stands(spool->dirs[OUT], part);
    if (!condemned && (is_part || spool->options.answers_elsewhere ||
                       !stands(spool->dirs[OUT], name)))
        return open_work(spool, name, err);

    /* It ended between two renames: do the rest of them. */
    if (is_part)
        status = move(spool, OUT, part, OUT, name, err);
    if (status == NS_OK)
        status = move(spool, WORK, name, condemned ? DEAD : DONE, name, err);
    if (status == NS_OK) {
        snprintf(other, sizeof(other), "%s.blocks", name);
        spool->io->unlinkat(spool->dirs[WORK], other, 0);
    }
    return status;
}

static enum ns_status
lock_directory(struct ns_spool *spool, struct ns_error *err)
{
    const char *path = spool->options.directory;
    char pid[32] = "";
    ssize_t n;
    int length;

    spool->lock = spool->io->openat(spool->root, ".lock",
                                    O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (spool->lock == -1)
        return io_failed(err, "open the lock of", path);
    if (flock(spool->lock, LOCK_EX | LOCK_NB) == -1) {
        if (errno != EWOULDBLOCK)
            return io_failed(err, "lock", path);
        n = pread(spool->lock, pid, sizeof(pid) - 1, 0);
        pid[n > 0 ? strspn(pid, "0123456789") : 0] = '\0';
        ns_fail(err, NS_RETRY, "the spool %.200s is held by process %s", path,
                pid[0] ? pid : "unknown");
        err->code = "locked";
        return NS_RETRY;
    }
    length = snprintf(pid, sizeof(pid), "%ld\n", (long)getpid());
    if (ftruncate(spool->lock, 0) == -1 ||
        pwrite(spool->lock, pid, (size_t)length, 0) != length)
        ns_log_warn("spool.lock", "cannot write the pid: errno=%d", errno);
    return NS_OK;
}

static enum ns_status
open_dirs(struct ns_spool *spool, struct ns_error *err)
{
    const char *path = spool->options.directory;
    struct statfs fs;
    struct stat root, st;

    spool->root = spool->io->openat(AT_FDCWD, path,
                                    O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (spool->root == -1) {
        ns_fail_errno(err, NS_REJECT, "open the spool %.200s", path);
        err->code = "bad_spool";
        return NS_REJECT;
    }
    if (fstatfs(spool->root, &fs) == 0 && fs.f_type == NFS_MAGIC &&
        !spool->options.allow_nfs)
        return ns_refuse(err, "bad_spool", NULL,
                         "the spool %.200s is on NFS, where locks and renames "
                         "promise less",
                         path);
    if (fstat(spool->root, &root) == -1)
        return io_failed(err, "stat", path);
    for (int i = 0; i < N_DIRS; i++) {
        if (mkdirat(spool->root, dir_names[i], 0750) == -1 && errno != EEXIST)
            return io_failed(err, "create the folder", dir_names[i]);
        spool->dirs[i] = spool->io->openat(
            spool->root, dir_names[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
        if (spool->dirs[i] == -1 || fstat(spool->dirs[i], &st) == -1)
            return io_failed(err, "open the folder", dir_names[i]);
        if (st.st_dev != root.st_dev)
            return ns_refuse(err, "bad_spool", NULL,
                             "%.200s/%s is on another filesystem: files could "
                             "not be renamed into it",
                             path, dir_names[i]);
    }
    return NS_OK;
}

static enum ns_status
open_directory(struct ns_spool *spool, struct ns_error *err)
{
    char name[NS_SPOOL_NAME] = "", next[NS_SPOOL_NAME];
    enum ns_status status;

    status = open_dirs(spool, err);
    if (status == NS_OK)
        status = lock_directory(spool, err);
    while (status == NS_OK &&
           first_file(spool, WORK, name, next, err, &status)) {
        memcpy(name, next, sizeof(name));
        status = resume(spool, name, err);
    }
    return status;
}

/* ---- the whole ------------------------------------------------------- */

static char *
copy_text(const char *text)
{
    return strdup(text ? text : "");
}

enum ns_status
ns_spool_open(const struct ns_spool_options *options, struct ns_spool **out,
              struct ns_error *err)
{
    struct ns_spool *spool = calloc(1, sizeof(*spool));
    enum ns_status status;

    if (!spool)
        return no_memory(err);
    pthread_mutex_init(&spool->mutex, NULL);
    spool->source.ops = &ns_spool_source_ops;
    spool->store.ops = &ns_spool_store_ops;
    spool->options = *options;
    spool->io = options->io ? options->io : &ns_io_system;
    if (!spool->options.window)
        spool->options.window = WINDOW;
    if (!spool->options.span)
        spool->options.span = SPAN;
    spool->is_directory = options->directory != NULL;
    spool->root = spool->lock = spool->out_dir = -1;
    for (int i = 0; i < N_DIRS; i++)
        spool->dirs[i] = -1;
    spool->options.input = copy_text(options->input);
    spool->options.output = copy_text(options->output);
    spool->options.directory = copy_text(options->directory);
    spool->model_rev = copy_text(options->model_rev);
    spool->engine_rev = copy_text(options->engine_rev);
    if (!spool->options.input || !spool->options.output ||
        !spool->options.directory || !spool->model_rev || !spool->engine_rev)
        status = no_memory(err);
    else
        status = spool->is_directory ? open_directory(spool, err)
                                     : open_run(spool, err);
    if (status == NS_OK) {
        *out = spool;
        spool = NULL;
    }
    ns_spool_close(spool);
    return status;
}

struct ns_source *
ns_spool_source(struct ns_spool *spool)
{
    return &spool->source;
}

struct ns_store *
ns_spool_store(struct ns_spool *spool)
{
    return &spool->store;
}

struct ns_spool_progress
ns_spool_progress(struct ns_spool *spool)
{
    struct ns_spool_progress progress;

    pthread_mutex_lock(&spool->mutex);
    progress = spool->progress;
    pthread_mutex_unlock(&spool->mutex);
    return progress;
}

void
ns_spool_close(struct ns_spool *spool)
{
    if (!spool)
        return;
    while (spool->files) {
        struct ns_spool_file *file = spool->files;

        spool->files = file->next;
        if (!spool->is_directory && file->at_end && !file->dead &&
            ns_ledger_in_flight(file->ledger) == 0) {
            ns_blocks_remove(file->blocks);
            file->blocks = NULL;
        }
        close_file(file);
    }
    for (int i = 0; i < N_DIRS; i++)
        if (spool->dirs[i] != -1)
            close(spool->dirs[i]);
    if (spool->out_dir != -1)
        close(spool->out_dir);
    if (spool->root != -1)
        close(spool->root);
    if (spool->lock != -1)
        close(spool->lock);
    free((char *)spool->options.input);
    free((char *)spool->options.output);
    free((char *)spool->options.directory);
    free(spool->model_rev);
    free(spool->engine_rev);
    pthread_mutex_destroy(&spool->mutex);
    free(spool);
}
