/* attachment.c - bytes that a job brings or names: base64, allowed files. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/pictures.h"

enum { MAX_PATH = 4096 };

static bool
is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static int
base64_value(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

enum ns_status
ns_base64_decode(const char *text, size_t length, size_t limit, void **out,
                 size_t *n, struct ns_error *err)
{
    size_t n_digits = 0, n_pads = 0, used = 0;
    uint32_t bits = 0, n_bits = 0;
    unsigned char *bytes;

    for (size_t i = 0; i < length; i++) {
        if (is_space(text[i]))
            continue;
        if (text[i] == '=')
            n_pads++;
        else if (base64_value(text[i]) < 0)
            return ns_refuse(err, "bad_base64", NULL,
                             "byte %zu is no base64", i);
        else if (n_pads > 0)
            return ns_refuse(err, "bad_base64", NULL,
                             "padding in front of byte %zu", i);
        else
            n_digits++;
    }
    if (n_digits == 0 || n_pads > 2 || (n_digits + n_pads) % 4 != 0)
        return ns_refuse(err, "bad_base64", NULL,
                         "%zu digits and %zu of padding do not end",
                         n_digits, n_pads);
    if (n_digits / 4 * 3 > limit)
        return ns_refuse(err, "image_limit", NULL, "it has about %zu bytes, "
                         "at most %zu are read", n_digits / 4 * 3, limit);
    bytes = malloc(n_digits / 4 * 3 + 3);
    if (!bytes)
        return ns_fail(err, NS_FATAL, "out of memory for a picture");
    for (size_t i = 0; i < length; i++) {
        if (is_space(text[i]) || text[i] == '=')
            continue;
        bits = bits << 6 | (uint32_t)base64_value(text[i]);
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            bytes[used++] = (unsigned char)(bits >> n_bits);
        }
    }
    *out = bytes;
    *n = used;
    return NS_OK;
}

/* ---- files ------------------------------------------------------------ */

static enum ns_status
deny(struct ns_error *err, const char *why)
{
    return ns_refuse(err, "path_denied", NULL, "%s", why);
}

/* "file:///a%20b" or a plain path, into `out`. */
static bool
plain_path(const char *url, char out[MAX_PATH])
{
    bool encoded = strncmp(url, "file://", 7) == 0;
    const char *at = encoded ? url + 7 : url;
    size_t n = 0;

    while (*at) {
        unsigned value = (unsigned char)*at;
        char digits[3] = { 0 }, *end;

        if (encoded && *at == '%') {
            if (!at[1] || !at[2])
                return false;
            memcpy(digits, at + 1, 2);
            value = (unsigned)strtoul(digits, &end, 16);
            if (end != digits + 2 || value == 0)
                return false;
            at += 2;
        }
        at++;
        if (n + 1 >= MAX_PATH)
            return false;
        out[n++] = (char)value;
    }
    out[n] = '\0';
    return n > 0;
}

/* What of the path is to be looked up below `root`; NULL: it does not lie
 * there. */
static const char *
below(const char *root, const char *path)
{
    size_t n = strlen(root);

    if (path[0] != '/')
        return path;
    while (n > 1 && root[n - 1] == '/')
        n--;
    if (strncmp(path, root, n) != 0 || path[n] != '/')
        return NULL;
    return path + n + strspn(path + n, "/");
}

/* The kernel walks the path and lets no part of it be a link or lead up and
 * out; -1 with errno. */
static int
open_below(const char *root, const char *rest)
{
    const struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS |
                   RESOLVE_NO_MAGICLINKS,
    };
    int folder = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC), fd, error;

    if (folder == -1)
        return -1;
    fd = (int)syscall(SYS_openat2, folder, rest, &how, sizeof(how));
    error = errno;
    close(folder);
    errno = error;
    return fd;
}

static enum ns_status
read_open_file(int fd, size_t limit, void **out, size_t *n,
               struct ns_error *err)
{
    struct stat stat;
    size_t used = 0, size;
    char *bytes;

    if (fstat(fd, &stat) == -1)
        return ns_fail_errno(err, NS_RETRY, "looking at a picture's file");
    if (!S_ISREG(stat.st_mode))
        return deny(err, "the path is no regular file");
    if (stat.st_size < 0 || (uint64_t)stat.st_size > limit)
        return ns_refuse(err, "image_limit", NULL, "the file has %lld bytes, "
                         "at most %zu are read", (long long)stat.st_size,
                         limit);
    size = (size_t)stat.st_size;
    bytes = malloc(size + 1);
    if (!bytes)
        return ns_fail(err, NS_FATAL, "out of memory for a picture");
    while (used < size) {
        ssize_t part = read(fd, bytes + used, size - used);

        if (part == -1 && errno == EINTR)
            continue;
        if (part == -1) {
            free(bytes);
            return ns_fail_errno(err, NS_RETRY, "reading a picture's file");
        }
        if (part == 0)
            break; /* it became shorter: its decoder will say so */
        used += (size_t)part;
    }
    *out = bytes;
    *n = used;
    return NS_OK;
}

enum ns_status
ns_attachment_read(const char *roots, const char *url, size_t limit,
                   void **out, size_t *n, struct ns_error *err)
{
    char path[MAX_PATH], root[MAX_PATH];
    int fd = -1, error = EACCES;
    enum ns_status status;

    if (!roots || !*roots)
        return deny(err, "no folder is allowed for files (images.roots)");
    if (!plain_path(url, path))
        return deny(err, "the path is empty, too long or badly encoded");
    for (const char *at = roots; *at && fd == -1;) {
        size_t length = strcspn(at, ",");
        const char *rest;

        while (length > 0 && is_space(*at))
            at++, length--;
        if (length > 0 && length < sizeof(root)) {
            size_t end = length;

            memcpy(root, at, length);
            while (end > 0 && is_space(root[end - 1]))
                end--;
            root[end] = '\0';
            rest = below(root, path);
            if (rest && *rest) {
                fd = open_below(root, rest);
                error = fd == -1 ? errno : 0;
            }
        }
        at += length;
        at += *at == ',';
    }
    if (fd == -1) {
        if (error == EMFILE || error == ENFILE || error == ENOMEM ||
            error == EIO || error == EINTR) {
            errno = error;
            return ns_fail_errno(err, NS_RETRY, "opening a picture's file");
        }
        return deny(err, error == ENOENT
                             ? "there is no such file in an allowed folder"
                             : "the file does not lie in an allowed folder, "
                               "or may not be read");
    }
    status = read_open_file(fd, limit, out, n, err);
    close(fd);
    return status;
}
