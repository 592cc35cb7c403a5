/* The reader of lines over any bytes, plain and LZ4, with small limits. Lines
 * rise in number, keep to the limit, and hold no newline; plain text comes out
 * whole. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "connectors/lines.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_lines_options options = { .max_line = 300,
                                        .max_expanded = 1 << 20 };
    int fd = memfd_create("lines", MFD_CLOEXEC);
    struct ns_lines *lines = NULL;
    uint64_t number = 0, total = 0;
    enum ns_status status;
    struct ns_error err;
    bool end = false;

    if (fd == -1 || write(fd, data, size) != (ssize_t)size ||
        lseek(fd, 0, SEEK_SET) == -1 ||
        ns_lines_create(fd, &options, NULL, &lines, &err) != NS_OK)
        abort();
    for (;;) {
        struct ns_line line;

        status = ns_lines_next(lines, &line, &end, &err);
        if (status != NS_OK || end)
            break;
        if (line.number <= number ||
            (line.bytes != NULL) != (line.length <= options.max_line) ||
            (line.bytes && memchr(line.bytes, '\n', (size_t)line.length)))
            abort();
        number = line.number;
        total += line.length;
    }
    if (status != NS_OK && (status != NS_REJECT || !err.code))
        abort();
    if (!ns_lines_compressed(lines) && total > size)
        abort();
    ns_lines_destroy(lines);
    close(fd);
    return 0;
}
