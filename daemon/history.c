#include "daemon/history.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "connectors/lines.h"
#include "engine/request.h"

enum { MAX_COUNT = 1 << 24 }; /* of tokens and steps: more is a mistake */

static bool
take_count(const json_t *object, const char *key, uint32_t *out)
{
    const json_t *value = json_object_get(object, key);

    *out = 0;
    if (!value)
        return true;
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > MAX_COUNT)
        return false;
    *out = (uint32_t)json_integer_value(value);
    return true;
}

static bool
learn(const json_t *root, uint32_t canvas_length, struct ns_outlook *outlook)
{
    const json_t *ours = json_object_get(root, "nightshift");
    const json_t *usage = json_object_get(
        json_object_get(json_object_get(root, "response"), "body"), "usage");
    const char *mode = json_string_value(json_object_get(ours, "mode"));
    struct ns_yield yield = { 0 };
    uint32_t drafted;

    if (!json_is_object(ours) || !json_is_object(usage) || !mode ||
        !take_count(usage, "completion_tokens", &yield.answer) ||
        !take_count(ours, "blocks", &yield.canvases) ||
        !take_count(ours, "denoise_steps", &yield.steps) ||
        !take_count(ours, "drafted", &drafted))
        return false;
    for (int m = NS_MODE_DIFFUSION; m <= NS_MODE_HYBRID; m++) {
        if (strcmp(mode, ns_request_mode_name((enum ns_mode)m)) != 0)
            continue;
        if (m == NS_MODE_AR)
            yield.canvases = 0;
        else if (m == NS_MODE_HYBRID)
            yield.canvases = drafted / canvas_length;
        ns_outlook_learn_job(outlook, NS_CLASS_OTHER, (enum ns_mode)m,
                             &yield);
        return true;
    }
    return false;
}

enum ns_status
ns_history_read(const char *path, uint32_t canvas_length,
                struct ns_outlook *outlook, struct ns_history *out,
                struct ns_error *err)
{
    const struct ns_lines_options options = { .no_hash = true };
    struct ns_lines *lines = NULL;
    struct ns_line line;
    enum ns_status status;
    bool end = false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    *out = (struct ns_history){ 0 };
    if (fd == -1)
        return ns_fail(err, NS_REJECT, "%s: %s", path, strerror(errno));
    status = ns_lines_create(fd, &options, NULL, &lines, err);
    while (status == NS_OK && !end) {
        status = ns_lines_next(lines, &line, &end, err);
        if (status == NS_OK && !end) {
            json_t *root = NULL;

            if (line.bytes)
                root = json_loadb(line.bytes, (size_t)line.length, 0, NULL);
            if (learn(root, canvas_length, outlook))
                out->used++;
            else
                out->skipped++;
            json_decref(root);
        }
    }
    ns_lines_destroy(lines);
    close(fd);
    return status;
}
