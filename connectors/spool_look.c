#include "connectors/spool_look.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "connectors/lines.h"

static const struct {
    const char *folder;
    enum ns_spool_state state;
} folders[] = { /* in the order in which a file goes through them */
    { "in", NS_SPOOL_WAITING },
    { "work", NS_SPOOL_RUNNING },
    { "done", NS_SPOOL_DONE },
    { "dead", NS_SPOOL_DEAD },
};

static bool
ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);

    return n > m && strcmp(name + n - m, end) == 0;
}

/* --- results ------------------------------------------------------------- */

static bool
is_ok(json_t *root)
{
    return json_is_object(json_object_get(root, "response"));
}

static enum ns_status
visit_lines(int fd, bool partial,
            enum ns_status (*visit)(void *, const char *, size_t, bool,
                                    struct ns_error *),
            void *context, struct ns_error *err)
{
    const struct ns_lines_options options = { .max_line = 256 << 20,
                                              .no_hash = true };
    struct ns_lines *lines;
    struct ns_line line;
    enum ns_status status;
    bool end = false;

    status = ns_lines_create(fd, &options, NULL, &lines, err);
    if (status != NS_OK)
        return status;
    do {
        json_t *root = NULL;

        status = ns_lines_next(lines, &line, &end, err);
        if (status == NS_REJECT && partial) { /* its tail is being written */
            status = NS_OK;
            end = true;
        }
        if (status == NS_OK && !end && line.bytes)
            root = json_loadb(line.bytes, (size_t)line.length, 0, NULL);
        if (root)
            status = visit(context, line.bytes, (size_t)line.length,
                           is_ok(root), err);
        json_decref(root);
    } while (status == NS_OK && !end);
    ns_lines_destroy(lines);
    return status;
}

enum ns_status
ns_spool_results(const char *directory, const char *name,
                 enum ns_status (*visit)(void *context, const char *line,
                                         size_t length, bool ok,
                                         struct ns_error *err),
                 void *context, struct ns_error *err)
{
    char path[PATH_MAX];
    enum ns_status status;
    bool partial = false;
    int fd;

    snprintf(path, sizeof(path), "%s/out/%s", directory, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1 && errno == ENOENT) {
        partial = true;
        snprintf(path, sizeof(path), "%s/out/%s.part", directory, name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    if (fd == -1 && errno == ENOENT)
        return ns_refuse(err, "unknown", NULL, "%s: there are no results of "
                         "it", name);
    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "%s", path);
    status = visit_lines(fd, partial, visit, context, err);
    close(fd);
    return status;
}

/* --- files --------------------------------------------------------------- */

static enum ns_status
count(void *context, const char *line, size_t length, bool ok,
      struct ns_error *err)
{
    struct ns_spool_entry *entry = context;

    (void)line;
    (void)length;
    (void)err;
    if (ok)
        entry->ok++;
    else
        entry->failed++;
    return NS_OK;
}

static enum ns_status
look_at(const char *directory, const char *name, enum ns_spool_state state,
        ns_spool_visitor visit, void *context, struct ns_error *err)
{
    struct ns_spool_entry entry = { .name = name, .state = state };
    enum ns_status status = NS_OK;

    if (state == NS_SPOOL_RUNNING || state == NS_SPOOL_DONE)
        status = ns_spool_results(directory, name, count, &entry, err);
    if (status == NS_REJECT && err->code && strcmp(err->code, "unknown") == 0)
        status = NS_OK; /* none yet, or they are rows */
    return status == NS_OK ? visit(context, &entry, err) : status;
}

enum ns_status
ns_spool_look(const char *directory, const char *name, ns_spool_visitor visit,
              void *context, struct ns_error *err)
{
    enum ns_status status = NS_OK;
    char path[PATH_MAX];

    for (size_t i = 0; i < 4 && status == NS_OK; i++) {
        struct dirent **entries = NULL;
        int n;

        snprintf(path, sizeof(path), "%s/%s", directory, folders[i].folder);
        n = scandir(path, &entries, NULL, alphasort);
        if (n == -1)
            return ns_fail_errno(err, NS_REJECT, "%s: no spool", path);
        for (int k = 0; k < n; k++) {
            const char *file = entries[k]->d_name;

            if (status == NS_OK && file[0] != '.' &&
                (ends_with(file, ".jsonl") || ends_with(file, ".jsonl.lz4")) &&
                (!name || strcmp(name, file) == 0))
                status = look_at(directory, file, folders[i].state, visit,
                                 context, err);
            free(entries[k]);
        }
        free(entries);
    }
    return status;
}
