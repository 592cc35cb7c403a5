/* faulty_io.h - a table of system calls whose n-th one fails.
 *
 * faulty_arm(n, errno, for_ever) lets n calls pass (of those that change or
 * read files; failing ones counted too) and fails the next, or all from there
 * on. A failing write first writes half of what it was given, as a full disk
 * does. One process, one thread: a header of static functions.
 */
#ifndef NS_TESTS_FAULTY_IO_H
#define NS_TESTS_FAULTY_IO_H

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/io.h"

static struct {
    int left; /* -1: never */
    int error;
    bool for_ever, fired;
    bool no_read;     /* reads never fail */
    const char *only; /* name of the one call that fails, or NULL: any */
} faulty = { .left = -1 };

static void
faulty_arm(int n, int error, bool for_ever)
{
    faulty.left = n;
    faulty.error = error;
    faulty.for_ever = for_ever;
    faulty.fired = false;
}

static bool
faulty_fired(void)
{
    faulty.left = -1;
    return faulty.fired;
}

static bool
faulty_fails(const char *call)
{
    if (faulty.left < 0 || (faulty.only && strcmp(faulty.only, call) != 0))
        return false;
    if (faulty.left > 0) {
        faulty.left--;
        return false;
    }
    if (faulty.fired && !faulty.for_ever)
        return false;
    faulty.fired = true;
    errno = faulty.error;
    return true;
}

static int
faulty_openat(int dir, const char *path, int flags, mode_t mode)
{
    return faulty_fails("openat") ? -1
                                  : ns_io_system.openat(dir, path, flags, mode);
}

static ssize_t
faulty_read(int fd, void *bytes, size_t length)
{
    return !faulty.no_read && faulty_fails("read")
               ? -1
               : ns_io_system.read(fd, bytes, length);
}

static ssize_t
faulty_write(int fd, const void *bytes, size_t length)
{
    if (faulty_fails("write")) {
        int error = errno;

        if (length > 1 && ns_io_system.write(fd, bytes, length / 2) < 0)
            abort();
        errno = error;
        return -1;
    }
    return ns_io_system.write(fd, bytes, length);
}

static int
faulty_fdatasync(int fd)
{
    return faulty_fails("fdatasync") ? -1 : ns_io_system.fdatasync(fd);
}

static int
faulty_fsync(int fd)
{
    return faulty_fails("fsync") ? -1 : ns_io_system.fsync(fd);
}

static int
faulty_ftruncate(int fd, off_t length)
{
    return faulty_fails("ftruncate") ? -1 : ns_io_system.ftruncate(fd, length);
}

static int
faulty_renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    return faulty_fails("renameat")
               ? -1
               : ns_io_system.renameat(from_dir, from, to_dir, to);
}

static int
faulty_unlinkat(int dir, const char *path, int flags)
{
    return faulty_fails("unlinkat") ? -1
                                    : ns_io_system.unlinkat(dir, path, flags);
}

static int
faulty_fallocate(int fd, int mode, off_t offset, off_t length)
{
    return faulty_fails("fallocate")
               ? -1
               : ns_io_system.fallocate(fd, mode, offset, length);
}

static const struct ns_io faulty_io = {
    .openat = faulty_openat,
    .read = faulty_read,
    .write = faulty_write,
    .fdatasync = faulty_fdatasync,
    .fsync = faulty_fsync,
    .ftruncate = faulty_ftruncate,
    .renameat = faulty_renameat,
    .unlinkat = faulty_unlinkat,
    .fallocate = faulty_fallocate,
};

#endif
