/* progress.h - one live line on a terminal, and the summary at the end.
 *
 *     12/100 jobs  1 failed  543 tok/s  4.2 tok/forward  11.8 steps/canvas
 *     0:42 left
 *
 * Jobs are counted when they are stored, in whatever order they end, so that
 * one slow job hides nothing. Rates are over the last ten seconds.
 *
 * Thread: the event loop.
 */
#ifndef NS_DAEMON_PROGRESS_H
#define NS_DAEMON_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "daemon/pipeline.h"

enum { NS_PROGRESS_SAMPLES = 64 };

struct ns_progress {
    FILE *file;
    bool live;             /* rewrite one line; else nothing but the summary */
    uint64_t total;        /* jobs to do in this run; 0: not known */
    uint64_t done_before;  /* found done at the start */
    int64_t started_ms, shown_ms;
    struct {
        int64_t at_ms;
        uint64_t tokens;
    } sample[NS_PROGRESS_SAMPLES];
    uint32_t n_samples;
    uint32_t shown_width;
};

void ns_progress_init(struct ns_progress *progress, FILE *file, bool live,
                      uint64_t total, uint64_t done_before);
/* Writes at most four times a second. */
void ns_progress_show(struct ns_progress *progress,
                      const struct ns_pipeline_counts *counts);
/* Takes the line away, so that something else can be written. */
void ns_progress_clear(struct ns_progress *progress);
void ns_progress_summary(struct ns_progress *progress,
                         const struct ns_pipeline_counts *counts);

/* The line itself, for tests. `rate` is in tokens a second, 0: not known. */
int ns_progress_line(const struct ns_progress *progress,
                     const struct ns_pipeline_counts *counts, double rate,
                     int64_t elapsed_ms, char *out, size_t out_size);

#endif
