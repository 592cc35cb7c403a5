#include "engine/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

static enum ns_status
read_all(int fd, const char *path, size_t limit_bytes, struct ns_buf *out,
         struct ns_error *err)
{
    struct stat st;
    size_t left;

    if (fstat(fd, &st) == -1)
        return ns_fail_errno(err, NS_REJECT, "stat %s", path);
    if (!S_ISREG(st.st_mode))
        return ns_fail(err, NS_REJECT, "%s: not a regular file", path);
    if ((uintmax_t)st.st_size > limit_bytes)
        return ns_fail(err, NS_REJECT, "%s: %jd bytes, limit %zu", path,
                       (intmax_t)st.st_size, limit_bytes);
    left = (size_t)st.st_size;
    if (!ns_buf_room(out, left))
        return ns_buf_check(out, path, err);
    while (left > 0) {
        ssize_t n = read(fd, out->data + out->length, left);

        if (n == -1 && errno == EINTR)
            continue;
        if (n == -1)
            return ns_fail_errno(err, NS_REJECT, "read %s", path);
        if (n == 0)
            return ns_fail(err, NS_REJECT, "%s: it shrank while being read",
                           path);
        out->length += (size_t)n;
        left -= (size_t)n;
    }
    out->data[out->length] = '\0'; /* room() leaves a byte for it */
    return NS_OK;
}

enum ns_status
ns_file_read(const char *path, size_t limit_bytes, struct ns_buf *out,
             bool *absent, struct ns_error *err)
{
    /* Not blocking: a fifo under that name must not hang the start. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    enum ns_status status;

    if (fd == -1) {
        if (absent && errno == ENOENT) {
            *absent = true;
            return NS_OK;
        }
        return ns_fail_errno(err, NS_REJECT, "open %s", path);
    }
    status = read_all(fd, path, limit_bytes, out, err);
    close(fd);
    if (status == NS_OK && absent)
        *absent = false;
    return status;
}

enum ns_status
ns_json_parse(const char *text, size_t length, const char *name,
              json_t **out, struct ns_error *err)
{
    json_error_t fault;
    char shown[120];
    json_t *root;

    memset(&fault, 0, sizeof(fault));
    root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &fault);
    if (root) {
        *out = root;
        return NS_OK;
    }
    /* jansson says nothing at all when memory ran out, but for strings, which
     * it then takes for invalid tokens. */
    if (json_error_code(&fault) == json_error_out_of_memory ||
        fault.text[0] == '\0')
        return ns_fail(err, NS_FATAL, "out of memory parsing %s", name);
    return ns_fail(err, NS_REJECT, "%s: not JSON: line %d, byte %d: %s", name,
                   fault.line, fault.position,
                   ns_log_escape(fault.text, strlen(fault.text), shown,
                                 sizeof(shown)));
}

const char *
ns_json_show(const json_t *value, char *out, size_t out_size)
{
    char *text;

    if (!value) {
        snprintf(out, out_size, "missing");
        return out;
    }
    if (json_is_object(value) || json_is_array(value)) {
        snprintf(out, out_size, json_is_object(value) ? "an object"
                                                      : "a list");
        return out;
    }
    text = json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
    if (!text)
        snprintf(out, out_size, "not shown");
    else if (strlen(text) < out_size)
        memcpy(out, text, strlen(text) + 1);
    else
        snprintf(out, out_size, "%.*s...", (int)(out_size - 4), text);
    /* jansson's own allocator made it; with the default one free() is its
     * mate, and nothing here sets another. */
    free(text);
    return out;
}
