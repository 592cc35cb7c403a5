/* Recovery of a results' file from any bytes, the first of which says whether
 * it is read as LZ4. Whatever stands there: what is recovered once is recovered
 * again, and a line appended behind it is found. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "connectors/journal.h"
#include "tests/connectors/folder.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct found {
    uint64_t lines, bytes;
};

static enum ns_journal_verdict
judge(void *context, const char *line, size_t length)
{
    struct found *found = context;

    if (length < 2 || line[0] != '{' || line[length - 1] != '}')
        return NS_JOURNAL_ALIEN;
    found->lines++;
    found->bytes += length;
    return NS_JOURNAL_KEEP;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_journal_options options = { .ours = true,
                                          .mode = 0600,
                                          .judge = judge };
    struct found first = { 0 }, second = { 0 };
    struct ns_journal *journal = NULL;
    enum ns_status status;
    struct ns_error err;

    if (size == 0)
        return 0;
    if (folder_fd == -1) {
        ns_log_set_level(0);
        folder_open();
        atexit(folder_close);
    }
    options.compressed = data[0] & 1;
    options.context = &first;
    folder_empty(folder_fd);
    folder_write("out", data + 1, size - 1);
    status = ns_journal_open(folder_fd, "out", &options, &journal, &err);
    if (status == NS_REJECT)
        return 0; /* a whole frame of mixed lines */
    if (status != NS_OK || ns_journal_append(journal, "{}\n", 3, &err) != NS_OK)
        abort();
    ns_journal_close(journal);
    options.context = &second;
    if (ns_journal_open(folder_fd, "out", &options, &journal, &err) != NS_OK)
        abort();
    ns_journal_close(journal);
    if (second.lines != first.lines + 1 || second.bytes != first.bytes + 2)
        abort();
    return 0;
}
