/* history.h - what former results tell of jobs to come.
 *
 * Reads a results file as `nightshift run` writes it and teaches an outlook how
 * long answers are and what canvases take, mode by mode. Lines that are not
 * results, or of jobs that failed, are counted and passed by.
 */
#ifndef NS_DAEMON_HISTORY_H
#define NS_DAEMON_HISTORY_H

#include "engine/outlook.h"

struct ns_history {
    uint64_t used, skipped; /* lines */
};

/* `canvas_length`: the model's. NS_REJECT: the file cannot be opened, or what
 * ns_lines_next says. */
enum ns_status ns_history_read(const char *path, uint32_t canvas_length,
                               struct ns_outlook *outlook,
                               struct ns_history *out, struct ns_error *err);

#endif
