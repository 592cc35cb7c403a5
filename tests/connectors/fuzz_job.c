/* The job parser over any bytes. What it accepts has messages and an id, the
 * id that a look at the line alone finds too; what it refuses has a code, and
 * its error line is JSON. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "connectors/job.h"
#include "connectors/result.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check_line(const struct ns_job *job)
{
    struct ns_result result = ns_result_of_error(NS_RESULT_DEAD, &job->refusal);
    struct ns_error err;
    struct ns_buf buf;
    json_t *root;

    ns_buf_init(&buf, 1 << 24);
    if (ns_result_line(job, &result, &buf, &err) != NS_OK)
        abort();
    root = json_loadb(buf.data, buf.length, JSON_REJECT_DUPLICATES, NULL);
    if (!root)
        abort();
    json_decref(root);
    ns_buf_fini(&buf);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct ns_job_options options = { .max_bytes = 1 << 20,
                                                   .images = true,
                                                   .now_ms = 1764547200000 };
    struct ns_message message = {
        .kind = NS_MESSAGE_JOB,
        .position = { .offset = 1 },
        .origin = "fuzz",
        .bytes = (const char *)data,
        .length = size,
    };
    char id[NS_JOB_ID_BYTES + 1];
    struct ns_job *job = NULL;
    struct ns_error err = { 0 };
    enum ns_status status;
    bool peeked;

    peeked = ns_job_peek_id((const char *)data, size, id);
    status = ns_job_parse(&message, &options, &job, &err);
    if (!job)
        abort();
    if (status == NS_OK) {
        if (!json_array_size(job->messages) || !peeked ||
            strcmp(job->custom_id, id) != 0)
            abort();
    } else if (status != NS_REJECT || !err.code || !err.text[0]) {
        abort();
    }
    check_line(job);
    ns_job_destroy(job);
    return 0;
}
