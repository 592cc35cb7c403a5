#include "connectors/json.h"

#include <jansson.h>
#include <stdlib.h>

static _Thread_local bool starved;

static void *
take_memory(size_t bytes)
{
    void *memory = malloc(bytes);

    starved |= !memory;
    return memory;
}

/* Before main, because no thread may be using the allocator when it is set. */
__attribute__((constructor)) static void
set_allocator(void)
{
    json_set_alloc_funcs(take_memory, free);
}

void
ns_json_watch(void)
{
    starved = false;
}

bool
ns_json_starved(void)
{
    return starved;
}
