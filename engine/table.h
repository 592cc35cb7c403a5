/* table.h - numbers found again by what they stand for.
 *
 * An open table of (hash, number). What a number stands for lies with the
 * caller, who compares; 0 is no number.
 *
 *     hash = ns_table_hash(thing, bytes);
 *     for (i = ns_table_first(t, hash); (n = ns_table_at(t, &i, hash)) != 0;)
 *         if (is the same as thing n)
 *             return n;
 *     if (!ns_table_reserve(t))  no memory
 *     ns_table_put(t, hash, n);
 *
 * Owns: its slots. Works on the caller's struct: zeroed, then fini.
 */
#ifndef NS_ENGINE_TABLE_H
#define NS_ENGINE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct ns_table_slot {
    uint32_t hash, number;
};

struct ns_table {
    struct ns_table_slot *slot;
    size_t n_slots, n; /* slots: a power of two, or 0 */
};

static inline void
ns_table_fini(struct ns_table *t)
{
    free(t->slot);
    memset(t, 0, sizeof(*t));
}

static inline void
ns_table_reset(struct ns_table *t)
{
    if (t->slot)
        memset(t->slot, 0, t->n_slots * sizeof(*t->slot));
    t->n = 0;
}

static inline uint32_t
ns_table_hash(const void *bytes, size_t length)
{
    return (uint32_t)XXH3_64bits(bytes, length);
}

static inline size_t
ns_table_first(const struct ns_table *t, uint32_t hash)
{
    return t->n_slots ? hash & (t->n_slots - 1) : 0;
}

/* The next number of that hash from slot *at on, which moves behind it. */
static inline uint32_t
ns_table_at(const struct ns_table *t, size_t *at, uint32_t hash)
{
    while (t->n_slots && t->slot[*at].number != 0) {
        const struct ns_table_slot *slot = &t->slot[*at];

        *at = (*at + 1) & (t->n_slots - 1);
        if (slot->hash == hash)
            return slot->number;
    }
    return 0;
}

/* There must be room: reserve first. */
static inline void
ns_table_put(struct ns_table *t, uint32_t hash, uint32_t number)
{
    size_t at = hash & (t->n_slots - 1);

    while (t->slot[at].number != 0)
        at = (at + 1) & (t->n_slots - 1);
    t->slot[at] = (struct ns_table_slot){ hash, number };
    t->n++;
}

/* Slots that one more number would add; it is at most half full. */
static inline size_t
ns_table_growth(const struct ns_table *t)
{
    if (2 * (t->n + 1) <= t->n_slots)
        return 0;
    return t->n_slots ? t->n_slots : 64;
}

/* Room for one more; false when memory has run out. */
static inline bool
ns_table_reserve(struct ns_table *t)
{
    struct ns_table grown = { .n_slots = t->n_slots + ns_table_growth(t) };

    if (grown.n_slots == t->n_slots)
        return true;
    grown.slot = calloc(grown.n_slots, sizeof(*grown.slot));
    if (!grown.slot)
        return false;
    for (size_t i = 0; i < t->n_slots; i++)
        if (t->slot[i].number != 0)
            ns_table_put(&grown, t->slot[i].hash, t->slot[i].number);
    free(t->slot);
    *t = grown;
    return true;
}

#endif
