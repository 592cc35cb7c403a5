/* grow.h - an array with room for one more.
 *
 *     moved = ns_grown(list, n + 1, &capacity, sizeof(*list));
 *     if (!moved)  no memory: `list` is as it was
 *     list = moved;
 *
 * Counts here stay far below 2^31: each has a limit of its own.
 */
#ifndef NS_ENGINE_GROW_H
#define NS_ENGINE_GROW_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static inline void *
ns_grown(void *array, uint32_t needed, uint32_t *capacity, size_t size)
{
    uint32_t wanted = *capacity ? *capacity : 32;
    void *moved;

    if (needed <= *capacity)
        return array;
    while (wanted < needed)
        wanted *= 2;
    moved = realloc(array, wanted * size);
    if (moved)
        *capacity = wanted;
    return moved;
}

#endif
