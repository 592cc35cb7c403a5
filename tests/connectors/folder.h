/* folder.h - a folder of a test's own, and files in it.
 *
 * A header of static functions: only some are used in each test. */
#ifndef NS_TESTS_FOLDER_H
#define NS_TESTS_FOLDER_H

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];
static int folder_fd = -1;

static __attribute__((unused)) void
folder_open(void)
{
    const char *base = getenv("TMPDIR");

    /* In memory where that can be had: how long a disk takes for a thousand
     * flushes is not what is tested. */
    if (!base)
        base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(folder, sizeof(folder), "%.40s/ns-XXXXXX", base);
    if (!mkdtemp(folder))
        abort();
    folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static __attribute__((unused)) void
folder_empty(int fd)
{
    DIR *dir = fdopendir(dup(fd));
    struct dirent *entry;

    rewinddir(dir);
    while ((entry = readdir(dir)) != NULL) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (unlinkat(fd, entry->d_name, 0) == -1) {
            int below = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY);

            folder_empty(below);
            close(below);
            unlinkat(fd, entry->d_name, AT_REMOVEDIR);
        }
    }
    closedir(dir);
}

static __attribute__((unused)) void
folder_close(void)
{
    folder_empty(folder_fd);
    close(folder_fd);
    rmdir(folder);
}

static __attribute__((unused)) const char *
folder_path(const char *name)
{
    static char paths[16][256];
    static int next;
    char *path = paths[next++ % 16];

    snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
    return path;
}

static __attribute__((unused)) void
folder_write(const char *name, const void *bytes, size_t length)
{
    int fd = openat(folder_fd, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);

    if (fd == -1 || write(fd, bytes, length) != (ssize_t)length)
        abort();
    close(fd);
}

static __attribute__((unused)) bool
folder_has(const char *name)
{
    return faccessat(folder_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* The file with a NUL behind it, or NULL. The caller frees it. */
static __attribute__((unused)) char *
folder_read(const char *name, size_t *length)
{
    int fd = openat(folder_fd, name, O_RDONLY);
    struct stat st;
    char *bytes;

    if (fd == -1 || fstat(fd, &st) == -1)
        return NULL;
    bytes = malloc((size_t)st.st_size + 1);
    if (read(fd, bytes, (size_t)st.st_size) != st.st_size)
        abort();
    bytes[st.st_size] = '\0';
    if (length)
        *length = (size_t)st.st_size;
    close(fd);
    return bytes;
}

#endif
