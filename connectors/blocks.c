#include "connectors/blocks.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"

enum {
    CHUNK = 256 << 10,
    NAME = 300,
    MAX_TOKENS = 4096, /* of a block */
    MAX_LINE = 8 * MAX_TOKENS + 256,
    SMALL = 1 << 20, /* a file not worth shrinking */
};

static const uint32_t begun_block = UINT32_MAX; /* the number of no block */

static const size_t max_batch = (size_t)64 << 20;

struct entry { /* a block that matters: where its line stands in the file */
    struct ns_blocks_key key;
    uint64_t offset;
    uint32_t length, block, n_tokens;
    bool across;
    struct ns_blocks_begun begun; /* of the line that is no block */
};

struct ns_blocks {
    int dir, fd; /* fd -1: no block was ever written */
    char name[NAME];
    mode_t mode;
    const struct ns_io *io;
    uint64_t model, engine; /* hashes of the revisions */
    bool dirty;             /* bytes behind `length` may stand */
    uint64_t length, live;  /* of the file; of the lines that matter */
    struct entry *entries;
    size_t n, capacity;
    bool (*matters)(void *context, uint64_t line, uint64_t sha);
    void *context;
};

/* ---- the line -------------------------------------------------------- */

static uint64_t
hash_text(const char *text)
{
    return XXH64(text, strlen(text), 0);
}

void
ns_blocks_format(const struct ns_blocks *blocks,
                 const struct ns_blocks_key *key, uint32_t block,
                 const int32_t *tokens, uint32_t n_tokens, struct ns_buf *out)
{
    static const char digits[] = "0123456789abcdef";
    size_t start = out->length;
    char *room;

    ns_buf_printf(out,
                  "%" PRIu64 " %016" PRIx64 " %016" PRIx64 " %016" PRIx64
                  " %" PRIu32 " %016" PRIx64 " %" PRIu32 " ",
                  key->line, key->sha, blocks->model, blocks->engine, key->mode,
                  key->seed, block);
    room = ns_buf_room(out, (size_t)n_tokens * 8);
    if (!room)
        return;
    for (uint32_t i = 0; i < n_tokens; i++)
        for (int shift = 28; shift >= 0; shift -= 4)
            *room++ = digits[(uint32_t)tokens[i] >> shift & 15];
    out->length += (size_t)n_tokens * 8;
    ns_buf_printf(out, " %016" PRIx64 "\n",
                  XXH64(out->data + start, out->length - start, 0));
}

/* A field: decimal or hex digits up to the blank behind them. */
static bool
take_field(const char **at, const char *end, unsigned base, uint64_t *out)
{
    uint64_t x = 0;
    const char *c = *at;

    for (; c < end && *c != ' '; c++) {
        unsigned digit;

        if (*c >= '0' && *c <= '9')
            digit = (unsigned)(*c - '0');
        else if (*c >= 'a' && *c <= 'f')
            digit = (unsigned)(*c - 'a' + 10);
        else
            return false;
        if (digit >= base || __builtin_mul_overflow(x, base, &x) ||
            __builtin_add_overflow(x, digit, &x))
            return false;
    }
    if (c == *at || c == end)
        return false;
    *at = c + 1;
    *out = x;
    return true;
}

/* Reads a line (without its newline). The tokens' hex digits are left where
 * they stand. */
static bool
parse_line(const struct ns_blocks *blocks, const char *line, size_t length,
           struct entry *out, const char **hex)
{
    enum { HASH = 17 }; /* the blank and 16 digits */
    const char *at = line, *end;
    uint64_t model, engine, mode, block;
    char hash[HASH + 1];

    if (length < HASH || length > MAX_LINE)
        return false;
    end = line + length - HASH;
    snprintf(hash, sizeof(hash), " %016" PRIx64, XXH64(line, length - HASH, 0));
    if (memcmp(hash, end, HASH) != 0)
        return false;
    if (!take_field(&at, end, 10, &out->key.line) ||
        !take_field(&at, end, 16, &out->key.sha) ||
        !take_field(&at, end, 16, &model) ||
        !take_field(&at, end, 16, &engine) ||
        !take_field(&at, end, 10, &mode) ||
        !take_field(&at, end, 16, &out->key.seed) ||
        !take_field(&at, end, 10, &block) || mode > UINT8_MAX ||
        block > UINT32_MAX || (end - at) % 8 != 0 ||
        strspn(at, "0123456789abcdef") != (size_t)(end - at))
        return false;
    if (model != blocks->model)
        return false; /* another model: starts anew */
    out->key.mode = (uint32_t)mode;
    out->block = (uint32_t)block;
    out->across = engine != blocks->engine;
    out->n_tokens = (uint32_t)((end - at) / 8);
    *hex = at;
    return true;
}

static int32_t
from_hex(const char *hex)
{
    uint32_t x = 0;

    for (const char *c = hex; c < hex + 8; c++)
        x = x << 4 | (uint32_t)(*c <= '9' ? *c - '0' : *c - 'a' + 10);
    return (int32_t)x;
}

/* ---- the index ------------------------------------------------------- */

static bool
same_key(const struct ns_blocks_key *a, const struct ns_blocks_key *b)
{
    return a->line == b->line && a->sha == b->sha && a->mode == b->mode &&
           a->seed == b->seed;
}

static struct entry *
find(struct ns_blocks *blocks, const struct ns_blocks_key *key, uint32_t block)
{
    for (size_t i = 0; i < blocks->n; i++)
        if (blocks->entries[i].block == block &&
            same_key(&blocks->entries[i].key, key))
            return &blocks->entries[i];
    return NULL;
}

static const struct entry *
entry_of(const struct ns_blocks *blocks, const struct ns_blocks_key *key,
         uint32_t block)
{
    return find((struct ns_blocks *)blocks, key, block);
}

bool
ns_blocks_has(const struct ns_blocks *blocks, const struct ns_blocks_key *key,
              uint32_t block)
{
    return entry_of(blocks, key, block) != NULL;
}

/* Takes note of the lines in `bytes`, which stand in the file at `offset`.
 * Returns the length of the whole lines among them, or -1: no memory. */
static ssize_t
note_lines(struct ns_blocks *blocks, const char *bytes, size_t length,
           uint64_t offset)
{
    const char *at = bytes, *end = bytes + length, *newline;

    for (; at < end; at = newline + 1) {
        struct entry entry = { 0 }, *old;
        const char *hex;
        size_t n;

        newline = memchr(at, '\n', (size_t)(end - at));
        if (!newline)
            break;
        n = (size_t)(newline - at);
        if (!parse_line(blocks, at, n, &entry, &hex) ||
            !blocks->matters(blocks->context, entry.key.line, entry.key.sha))
            continue;
        old = find(blocks, &entry.key, entry.block);
        if (old && entry.block != begun_block)
            continue; /* a block never changes */
        if (entry.block == begun_block && entry.n_tokens == 2) {
            entry.begun.stalls = from_hex(hex);
            entry.begun.n_blocks = from_hex(hex + 8);
        }
        entry.offset = offset + (uint64_t)(at - bytes);
        entry.length = (uint32_t)n + 1;
        if (old) {
            blocks->live += entry.length - (uint64_t)old->length;
            *old = entry;
            continue;
        }
        if (blocks->n == blocks->capacity) {
            size_t capacity = blocks->capacity ? blocks->capacity * 2 : 64;
            struct entry *entries =
                realloc(blocks->entries, capacity * sizeof(*entries));

            if (!entries)
                return -1;
            blocks->entries = entries;
            blocks->capacity = capacity;
        }
        blocks->entries[blocks->n++] = entry;
        blocks->live += entry.length;
    }
    return at - bytes;
}

void
ns_blocks_format_begun(const struct ns_blocks *blocks,
                       const struct ns_blocks_key *key,
                       struct ns_blocks_begun begun, struct ns_buf *out)
{
    int32_t values[] = { begun.stalls, begun.n_blocks };

    ns_blocks_format(blocks, key, begun_block, values, 2, out);
}

bool
ns_blocks_begun(const struct ns_blocks *blocks, const struct ns_blocks_key *key,
                struct ns_blocks_begun *out)
{
    const struct entry *entry = entry_of(blocks, key, begun_block);

    if (entry)
        *out = entry->begun;
    return entry != NULL;
}

/* ---- the file -------------------------------------------------------- */

static enum ns_status
io_failed(struct ns_error *err, const char *call, const char *name)
{
    bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    enum ns_status status =
        ns_fail_errno(err, NS_RETRY, "%s %.200s", call, name);

    err->code = full ? "storage_full" : "io";
    return status;
}

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for committed blocks");
}

/* Reads the whole file through; a tail without newline is cut. */
static enum ns_status
recover(struct ns_blocks *blocks, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    char *bytes = malloc(CHUNK);
    size_t held = 0;
    ssize_t n, whole;

    if (!bytes)
        return no_memory(err);
    for (;;) {
        do
            n = blocks->io->read(blocks->fd, bytes + held, CHUNK - held);
        while (n == -1 && errno == EINTR);
        if (n == -1) {
            status = io_failed(err, "read", blocks->name);
            break;
        }
        if (n == 0)
            break;
        held += (size_t)n;
        whole = note_lines(blocks, bytes, held, blocks->length);
        if (whole == -1) {
            status = no_memory(err);
            break;
        }
        if (whole == 0 && held == CHUNK)
            whole = CHUNK; /* no line is that long: damage, walk past it */
        memmove(bytes, bytes + whole, held - (size_t)whole);
        held -= (size_t)whole;
        blocks->length += (uint64_t)whole;
    }
    blocks->dirty = held > 0;
    free(bytes);
    return status;
}

enum ns_status
ns_blocks_open(int dir, const char *name, mode_t mode, const char *model_rev,
               const char *engine_rev,
               bool (*matters)(void *context, uint64_t line, uint64_t sha),
               void *context, const struct ns_io *io, struct ns_blocks **out,
               struct ns_error *err)
{
    struct ns_blocks *blocks = calloc(1, sizeof(*blocks));
    enum ns_status status = NS_OK;

    if (!blocks)
        return no_memory(err);
    blocks->io = io ? io : &ns_io_system;
    blocks->dir = dir;
    blocks->mode = mode;
    blocks->model = hash_text(model_rev);
    blocks->engine = hash_text(engine_rev);
    blocks->matters = matters;
    blocks->context = context;
    snprintf(blocks->name, sizeof(blocks->name), "%s", name);
    blocks->fd =
        blocks->io->openat(dir, blocks->name, O_RDWR | O_APPEND | O_CLOEXEC, 0);
    if (blocks->fd == -1 && errno != ENOENT)
        status = io_failed(err, "open", blocks->name);
    if (blocks->fd != -1)
        status = recover(blocks, err);
    if (status != NS_OK) {
        ns_blocks_close(blocks);
        return status;
    }
    *out = blocks;
    return NS_OK;
}

void
ns_blocks_close(struct ns_blocks *blocks)
{
    if (!blocks)
        return;
    if (blocks->fd != -1)
        close(blocks->fd);
    free(blocks->entries);
    free(blocks);
}

void
ns_blocks_remove(struct ns_blocks *blocks)
{
    if (blocks && blocks->fd != -1)
        blocks->io->unlinkat(blocks->dir, blocks->name, 0);
    ns_blocks_close(blocks);
}

static bool
cut_back(struct ns_blocks *blocks)
{
    int saved = errno;

    blocks->dirty =
        blocks->io->ftruncate(blocks->fd, (off_t)blocks->length) == -1;
    errno = saved;
    return !blocks->dirty;
}

enum ns_status
ns_blocks_append(struct ns_blocks *blocks, const char *lines, size_t length,
                 struct ns_error *err)
{
    size_t written = 0;

    if (length == 0)
        return NS_OK;
    if (blocks->fd == -1) {
        blocks->fd = blocks->io->openat(blocks->dir, blocks->name,
                                        O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC,
                                        blocks->mode);
        if (blocks->fd == -1)
            return io_failed(err, "open", blocks->name);
    }
    if (blocks->dirty && !cut_back(blocks))
        return io_failed(err, "truncate", blocks->name);
    while (written < length) {
        ssize_t n =
            blocks->io->write(blocks->fd, lines + written, length - written);

        if (n == -1 && errno == EINTR)
            continue;
        if (n <= 0) {
            cut_back(blocks);
            return io_failed(err, "write", blocks->name);
        }
        written += (size_t)n;
    }
    if (note_lines(blocks, lines, length, blocks->length) == -1)
        return no_memory(err);
    blocks->length += length;
    return NS_OK;
}

/* Reads one block's line back into `line`, and its tokens. */
static bool
read_tokens(struct ns_blocks *blocks, const struct entry *entry, char *line,
            int32_t *out)
{
    struct entry again;
    const char *hex;

    if (entry->length > MAX_LINE + 1 ||
        pread(blocks->fd, line, entry->length, (off_t)entry->offset) !=
            (ssize_t)entry->length)
        return false;
    line[entry->length - 1] = '\0';
    if (!parse_line(blocks, line, entry->length - 1, &again, &hex) ||
        !same_key(&again.key, &entry->key) || again.block != entry->block ||
        again.n_tokens != entry->n_tokens)
        return false;
    for (uint32_t i = 0; i < entry->n_tokens; i++)
        out[i] = from_hex(hex + 8 * (size_t)i);
    return true;
}

enum ns_status
ns_blocks_find(struct ns_blocks *blocks, const struct ns_blocks_key *key,
               struct ns_arena *arena, struct ns_blocks_found *out,
               struct ns_error *err)
{
    struct ns_blocks_found found = { 0 };
    const struct entry *entry;
    uint32_t n_blocks = 0, n_tokens = 0;
    uint32_t *block_tokens;
    int32_t *tokens;
    char *line;

    while ((entry = entry_of(blocks, key, n_blocks)) != NULL) {
        n_tokens += entry->n_tokens;
        n_blocks++;
    }
    if (n_blocks == 0) {
        *out = found;
        return NS_OK;
    }
    tokens = ns_arena_array(arena, n_tokens, sizeof(*tokens));
    block_tokens = ns_arena_array(arena, n_blocks, sizeof(*block_tokens));
    line = malloc(MAX_LINE + 1);
    if (!tokens || !block_tokens || !line) {
        free(line);
        return no_memory(err);
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        entry = entry_of(blocks, key, i);
        if (!read_tokens(blocks, entry, line, tokens + found.n_tokens)) {
            ns_log_warn("blocks.damaged", "line=%" PRIu64 " block=%" PRIu32,
                        key->line, i);
            break;
        }
        block_tokens[i] = entry->n_tokens;
        found.n_tokens += entry->n_tokens;
        found.n_blocks++;
        found.across |= entry->across;
    }
    free(line);
    found.n_dropped = n_blocks - found.n_blocks;
    found.tokens = tokens;
    found.block_tokens = block_tokens;
    *out = found;
    return NS_OK;
}

/* Writes the lines that matter into a new file, and takes its name over. Any
 * failure leaves the old file as it stands: shrinking is a courtesy. */
static void
shrink(struct ns_blocks *blocks)
{
    char name[NAME + 4], *line = malloc(MAX_LINE + 1);
    struct ns_buf out;
    int fd = -1;
    bool ok;

    ns_buf_init(&out, max_batch);
    snprintf(name, sizeof(name), "%s.new", blocks->name);
    if (!line)
        goto out;
    for (size_t i = 0; i < blocks->n; i++) {
        const struct entry *entry = &blocks->entries[i];

        if (pread(blocks->fd, line, entry->length, (off_t)entry->offset) !=
            (ssize_t)entry->length)
            goto out;
        ns_buf_add(&out, line, entry->length);
    }
    if (out.over || out.failed)
        goto out;
    fd = blocks->io->openat(blocks->dir, name,
                            O_RDWR | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC,
                            blocks->mode);
    if (fd == -1)
        goto out;
    ok = out.length == 0 ||
         blocks->io->write(fd, out.data, out.length) == (ssize_t)out.length;
    if (!ok || blocks->io->renameat(blocks->dir, name, blocks->dir,
                                    blocks->name) == -1) {
        blocks->io->unlinkat(blocks->dir, name, 0);
        goto out;
    }
    blocks->length = 0;
    for (size_t i = 0; i < blocks->n; i++) {
        blocks->entries[i].offset = blocks->length;
        blocks->length += blocks->entries[i].length;
    }
    blocks->dirty = false;
    close(blocks->fd);
    blocks->fd = fd;
    fd = -1;
out:
    if (fd != -1)
        close(fd);
    ns_buf_fini(&out);
    free(line);
}

void
ns_blocks_forget(struct ns_blocks *blocks, uint64_t line)
{
    size_t kept = 0;

    for (size_t i = 0; i < blocks->n; i++) {
        if (blocks->entries[i].key.line == line)
            blocks->live -= blocks->entries[i].length;
        else
            blocks->entries[kept++] = blocks->entries[i];
    }
    blocks->n = kept;
    if (blocks->fd != -1 && blocks->length > SMALL &&
        blocks->live < blocks->length / 4)
        shrink(blocks);
}
