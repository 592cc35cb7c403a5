#include "base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"

enum { FIRST_BLOCK = 4096, ALIGN = 16 };

struct block {
    struct block *next;
    size_t size, used;
    _Alignas(ALIGN) unsigned char data[];
};

struct handler {
    struct handler *next;
    void (*release)(void *);
    void *data;
};

struct ns_arena {
    struct block *blocks; /* the newest first; only it is bumped */
    struct handler *handlers;
    size_t limit, used;
};

enum ns_status
ns_arena_create(size_t limit_bytes, struct ns_arena **out,
                struct ns_error *err)
{
    struct ns_arena *arena = calloc(1, sizeof(*arena));

    if (!arena)
        return ns_fail(err, NS_FATAL, "out of memory creating an arena");
    arena->limit = limit_bytes ? limit_bytes : SIZE_MAX;
    *out = arena;
    return NS_OK;
}

static struct block *
add_block(struct ns_arena *arena, size_t least)
{
    size_t size = arena->blocks ? arena->blocks->size * 2 : FIRST_BLOCK;
    struct block *block;

    if (size > (size_t)8 << 20)
        size = (size_t)8 << 20; /* past 8 MB growing by doubling only wastes */
    if (size < least)
        size = least;
    if (size > SIZE_MAX - sizeof(*block))
        return NULL;
    block = malloc(sizeof(*block) + size);
    if (!block)
        return NULL;
    block->size = size;
    block->used = 0;
    block->next = arena->blocks;
    arena->blocks = block;
    return block;
}

void *
ns_arena_take(struct ns_arena *arena, size_t bytes)
{
    struct block *block = arena->blocks;
    void *at;

    if (!ns_size_align(bytes ? bytes : 1, ALIGN, &bytes) ||
        bytes > arena->limit - arena->used)
        return NULL;
    if (!block || block->size - block->used < bytes)
        block = add_block(arena, bytes);
    if (!block)
        return NULL;
    at = block->data + block->used;
    block->used += bytes;
    arena->used += bytes;
    return memset(at, 0, bytes);
}

void *
ns_arena_array(struct ns_arena *arena, size_t n, size_t size)
{
    size_t bytes;

    return ns_size_mul(n, size, &bytes) ? ns_arena_take(arena, bytes) : NULL;
}

char *
ns_arena_text(struct ns_arena *arena, const char *text, size_t length)
{
    size_t bytes;
    char *copy;

    if (!ns_size_add(length, 1, &bytes))
        return NULL;
    copy = ns_arena_take(arena, bytes);
    if (copy && length)
        memcpy(copy, text, length);
    return copy;
}

enum ns_status
ns_arena_on_reset(struct ns_arena *arena, void (*release)(void *), void *data,
                  struct ns_error *err)
{
    struct handler *handler = ns_arena_take(arena, sizeof(*handler));

    if (!handler) {
        release(data);
        return ns_fail(err, NS_FATAL, "out of memory in an arena");
    }
    handler->release = release;
    handler->data = data;
    handler->next = arena->handlers;
    arena->handlers = handler;
    return NS_OK;
}

size_t
ns_arena_used(const struct ns_arena *arena)
{
    return arena->used;
}

void
ns_arena_reset(struct ns_arena *arena)
{
    while (arena->handlers) {
        struct handler *handler = arena->handlers;

        arena->handlers = handler->next;
        handler->release(handler->data);
    }
    while (arena->blocks) {
        struct block *block = arena->blocks;

        arena->blocks = block->next;
        free(block);
    }
    arena->used = 0;
}

void
ns_arena_destroy(struct ns_arena *arena)
{
    if (!arena)
        return;
    ns_arena_reset(arena);
    free(arena);
}
