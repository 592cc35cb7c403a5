#include "connectors/index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { DONE = 1, SEEN = 2, MARKS = 3, FIRST = 1024 };

struct entry {
    uint64_t sha; /* 0: the line does not stand */
    uint64_t id;  /* hash without its two low bits, which are the marks; the
                   * hash part is 0 when the line has no id */
};

struct ns_index {
    struct entry *entries; /* by line - 1 */
    uint64_t capacity;
    uint32_t *by_id; /* lines, open addressing; 0: free */
    uint64_t slots, used;
};

enum ns_status
ns_index_create(struct ns_index **out, struct ns_error *err)
{
    struct ns_index *index = calloc(1, sizeof(*index));

    if (!index)
        return ns_fail(err, NS_FATAL, "out of memory for an index of lines");
    *out = index;
    return NS_OK;
}

void
ns_index_destroy(struct ns_index *index)
{
    if (!index)
        return;
    free(index->entries);
    free(index->by_id);
    free(index);
}

uint64_t
ns_index_sha(const unsigned char *sha256)
{
    uint64_t sha;

    memcpy(&sha, sha256, sizeof(sha));
    return sha ? sha : 1;
}

static uint64_t
hash_of(const char *id)
{
    uint64_t hash = XXH3_64bits(id, strlen(id)) & ~(uint64_t)MARKS;

    return hash ? hash : MARKS + 1;
}

static const struct entry *
entry_of(const struct ns_index *index, uint64_t line)
{
    if (line == 0 || line > index->capacity ||
        index->entries[line - 1].sha == 0)
        return NULL;
    return &index->entries[line - 1];
}

static enum ns_status
grow_entries(struct ns_index *index, uint64_t line, struct ns_error *err)
{
    uint64_t capacity = index->capacity ? index->capacity : FIRST;
    struct entry *entries;

    while (capacity < line)
        capacity += capacity / 2;
    entries = realloc(index->entries, capacity * sizeof(*entries));
    if (!entries)
        return ns_fail(err, NS_FATAL, "out of memory for %" PRIu64 " lines",
                       line);
    memset(entries + index->capacity, 0,
           (capacity - index->capacity) * sizeof(*entries));
    index->entries = entries;
    index->capacity = capacity;
    return NS_OK;
}

/* The slot of the id, or the free one where it belongs. */
static uint64_t
slot_of(const struct ns_index *index, uint64_t hash)
{
    uint64_t slot = (hash >> 2) & (index->slots - 1);

    while (index->by_id[slot]) {
        const struct entry *entry = &index->entries[index->by_id[slot] - 1];

        if ((entry->id & ~(uint64_t)MARKS) == hash)
            break;
        slot = (slot + 1) & (index->slots - 1);
    }
    return slot;
}

static enum ns_status
grow_ids(struct ns_index *index, struct ns_error *err)
{
    struct ns_index bigger = *index;

    bigger.slots = index->slots ? index->slots * 2 : FIRST;
    bigger.by_id = calloc(bigger.slots, sizeof(*bigger.by_id));
    if (!bigger.by_id)
        return ns_fail(err, NS_FATAL, "out of memory for %" PRIu64 " ids",
                       bigger.slots);
    for (uint64_t i = 0; i < index->slots; i++)
        if (index->by_id[i]) {
            uint64_t id = index->entries[index->by_id[i] - 1].id;

            bigger.by_id[slot_of(&bigger, id & ~(uint64_t)MARKS)] =
                index->by_id[i];
        }
    free(index->by_id);
    *index = bigger;
    return NS_OK;
}

enum ns_status
ns_index_put(struct ns_index *index, uint64_t line, uint64_t sha,
             const char *id, struct ns_error *err)
{
    uint64_t hash = id ? hash_of(id) : 0;
    enum ns_status status = NS_OK;

    if (line == 0 || line > UINT32_MAX)
        return ns_fail(err, NS_REJECT,
                       "line %" PRIu64 ": a file may have %" PRIu32 " lines",
                       line, UINT32_MAX);
    if (line > index->capacity)
        status = grow_entries(index, line, err);
    if (status == NS_OK && index->used * 2 >= index->slots)
        status = grow_ids(index, err);
    if (status != NS_OK)
        return status;
    /* An id that the line had before stays taken by it: the slot then leads
     * to an entry of another id, and a search walks past it. */
    index->entries[line - 1] = (struct entry){ .sha = sha, .id = hash };
    if (hash) {
        uint64_t slot = slot_of(index, hash);

        index->used += index->by_id[slot] == 0;
        index->by_id[slot] = (uint32_t)line;
    }
    return NS_OK;
}

uint64_t
ns_index_line_of(const struct ns_index *index, const char *id)
{
    return index->slots ? index->by_id[slot_of(index, hash_of(id))] : 0;
}

bool
ns_index_has(const struct ns_index *index, uint64_t line, uint64_t sha)
{
    const struct entry *entry = entry_of(index, line);

    return entry && entry->sha == sha;
}

static bool
is_marked(const struct ns_index *index, uint64_t line, uint64_t mark)
{
    const struct entry *entry = entry_of(index, line);

    return entry && (entry->id & mark);
}

bool
ns_index_is_done(const struct ns_index *index, uint64_t line)
{
    return is_marked(index, line, DONE);
}

bool
ns_index_is_seen(const struct ns_index *index, uint64_t line)
{
    return is_marked(index, line, SEEN);
}

void
ns_index_set_done(struct ns_index *index, uint64_t line)
{
    if (entry_of(index, line))
        index->entries[line - 1].id |= DONE;
}

void
ns_index_set_seen(struct ns_index *index, uint64_t line)
{
    if (entry_of(index, line))
        index->entries[line - 1].id |= SEEN;
}
