#include "connectors/io.h"

#include <stdio.h>
#include <unistd.h>

static int
system_openat(int dir, const char *path, int flags, mode_t mode)
{
    return openat(dir, path, flags, mode); /* openat itself is variadic */
}

const struct ns_io ns_io_system = {
    .openat = system_openat,
    .read = read,
    .write = write,
    .fdatasync = fdatasync,
    .fsync = fsync,
    .ftruncate = ftruncate,
    .renameat = renameat,
    .unlinkat = unlinkat,
    .fallocate = fallocate,
};
