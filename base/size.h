/* size.h - checked arithmetic on sizes: the only place where they combine.
 *
 * Each function returns false when the result does not fit a size_t and then
 * leaves `out` alone.
 */
#ifndef NS_BASE_SIZE_H
#define NS_BASE_SIZE_H

#include <stdbool.h>
#include <stddef.h>

static inline bool
ns_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;

    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool
ns_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;

    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

/* Rounds up to a multiple of `align`, a power of two. */
static inline bool
ns_size_align(size_t a, size_t align, size_t *out)
{
    size_t sum;

    if (__builtin_add_overflow(a, align - 1, &sum))
        return false;
    *out = sum & ~(align - 1);
    return true;
}

#endif
