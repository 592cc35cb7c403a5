/* io.h - the system calls that can fail under a file, behind one table.
 *
 * The real ones by default. Tests hand in a table whose n-th call fails (disk
 * full, I/O error) or never returns (the process is gone), which is how every
 * point between two calls is tried.
 *
 * Thread: any; the table is const.
 */
#ifndef NS_CONNECTORS_IO_H
#define NS_CONNECTORS_IO_H

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>

struct ns_io { /* each as its namesake in unistd.h: -1 and errno on failure */
    int (*openat)(int dir, const char *path, int flags, mode_t mode);
    ssize_t (*read)(int fd, void *bytes, size_t length);
    ssize_t (*write)(int fd, const void *bytes, size_t length);
    int (*fdatasync)(int fd);
    int (*fsync)(int fd);
    int (*ftruncate)(int fd, off_t length);
    int (*renameat)(int from_dir, const char *from, int to_dir, const char *to);
    int (*unlinkat)(int dir, const char *path, int flags);
    int (*fallocate)(int fd, int mode, off_t offset, off_t length);
};

extern const struct ns_io ns_io_system;

#endif
