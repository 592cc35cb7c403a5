#include "connectors/secret.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum ns_status
ns_secret_read(const char *path, const char *name, char out[NS_SECRET_BYTES],
               struct ns_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    ssize_t n;

    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "%s: %.200s", name, path);
    if (fstat(fd, &st) == -1 || (st.st_mode & 0037) != 0) {
        close(fd);
        return ns_fail(err, NS_REJECT, "%s: %.200s can be read by others: take "
                       "their rights away", name, path);
    }
    n = read(fd, out, NS_SECRET_BYTES);
    close(fd);
    if (n < 0)
        return ns_fail_errno(err, NS_REJECT, "%s: read %.200s", name, path);
    if (n == NS_SECRET_BYTES) {
        explicit_bzero(out, NS_SECRET_BYTES);
        return ns_fail(err, NS_REJECT, "%s: %.200s has over %d bytes", name,
                       path, NS_SECRET_BYTES - 1);
    }
    out[n] = '\0';
    out[strcspn(out, "\r\n")] = '\0';
    return NS_OK;
}
