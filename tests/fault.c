#include "tests/fault.h"

#include <stddef.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);

static _Thread_local int left = -1; /* allocations before the failing one */
static _Thread_local bool fired;

void
fault_arm(int n)
{
    left = n;
    fired = false;
}

bool
fault_fired(void)
{
    left = -1;
    return fired;
}

static bool
fails(void)
{
    if (left < 0 || left-- > 0)
        return false;
    fired = true;
    return true;
}

void *
__wrap_malloc(size_t size)
{
    return fails() ? NULL : __real_malloc(size);
}

void *
__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *
__wrap_realloc(void *old, size_t size)
{
    return fails() ? NULL : __real_realloc(old, size);
}
