#include "daemon/progress.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "daemon/work.h"

enum {
    SHOW_EVERY_MS = 250,
    RATE_OVER_MS = 10000,
    GUESS_FROM = 5, /* jobs done, before the time left is more than noise */
};

void
ns_progress_init(struct ns_progress *progress, FILE *file, bool live,
                 uint64_t total, uint64_t done_before)
{
    memset(progress, 0, sizeof(*progress));
    progress->file = file;
    progress->live = live;
    progress->total = total;
    progress->done_before = done_before;
    progress->started_ms = ns_now_ms();
}

static double
ratio(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0;
}

static void
add(char *out, size_t out_size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void
add(char *out, size_t out_size, const char *format, ...)
{
    size_t used = strlen(out);
    va_list ap;

    va_start(ap, format);
    vsnprintf(out + used, out_size - used, format, ap);
    va_end(ap);
}

static void
add_time(char *out, size_t out_size, int64_t ms, const char *behind)
{
    int64_t s = (ms + 500) / 1000;

    if (s >= 3600)
        add(out, out_size, "%" PRId64 ":%02d:%02d%s", s / 3600,
            (int)(s / 60 % 60), (int)(s % 60), behind);
    else
        add(out, out_size, "%d:%02d%s", (int)(s / 60), (int)(s % 60), behind);
}

int
ns_progress_line(const struct ns_progress *progress,
                 const struct ns_pipeline_counts *counts, double rate,
                 int64_t elapsed_ms, char *out, size_t out_size)
{
    uint64_t done = counts->ok + counts->failed + counts->duplicates;
    uint64_t all = progress->total + progress->done_before;

    out[0] = '\0';
    add(out, out_size, "%" PRIu64, progress->done_before + done);
    if (progress->total)
        add(out, out_size, "/%" PRIu64, all);
    add(out, out_size, " jobs");
    if (counts->failed)
        add(out, out_size, "  %" PRIu64 " failed", counts->failed);
    if (rate > 0)
        add(out, out_size, "  %.0f tok/s", rate);
    if (counts->job_passes)
        add(out, out_size, "  %.1f tok/forward",
            ratio(counts->job_tokens, counts->job_passes));
    if (counts->canvas_steps && counts->canvas_blocks)
        add(out, out_size, "  %.1f steps/canvas",
            ratio(counts->canvas_steps, counts->canvas_blocks));
    if (done >= GUESS_FROM && progress->total > done) {
        add(out, out_size, "  ");
        add_time(out, out_size,
                 (int64_t)((double)elapsed_ms / (double)done *
                           (double)(progress->total - done)),
                 " left");
    }
    return (int)strlen(out);
}

/* Tokens a second since the oldest sample within the last ten seconds. */
static double
rate_now(struct ns_progress *progress, uint64_t tokens, int64_t now_ms)
{
    uint32_t n = progress->n_samples, first = 0;
    int64_t span_ms;

    while (first < n && now_ms - progress->sample[first].at_ms > RATE_OVER_MS)
        first++;
    if (first == 0 && n == NS_PROGRESS_SAMPLES)
        first = 1;
    memmove(progress->sample, progress->sample + first,
            (n - first) * sizeof(progress->sample[0]));
    n -= first;
    progress->sample[n].at_ms = now_ms;
    progress->sample[n].tokens = tokens;
    progress->n_samples = n + 1;
    span_ms = now_ms - progress->sample[0].at_ms;
    if (span_ms < 500)
        return 0;
    return (double)(tokens - progress->sample[0].tokens) * 1000 /
           (double)span_ms;
}

void
ns_progress_show(struct ns_progress *progress,
                 const struct ns_pipeline_counts *counts)
{
    int64_t now_ms = ns_now_ms();
    char line[160];
    double rate;
    int width;

    if (!progress->live || now_ms - progress->shown_ms < SHOW_EVERY_MS)
        return;
    progress->shown_ms = now_ms;
    rate = rate_now(progress, counts->new_tokens, now_ms);
    width = ns_progress_line(progress, counts, rate,
                             now_ms - progress->started_ms, line,
                             sizeof(line));
    /* Blanks wipe the rest of a longer line before. */
    fprintf(progress->file, "\r%-*s", (int)progress->shown_width, line);
    fflush(progress->file);
    progress->shown_width = (uint32_t)width;
}

void
ns_progress_clear(struct ns_progress *progress)
{
    if (progress->shown_width == 0)
        return;
    fprintf(progress->file, "\r%*s\r", (int)progress->shown_width, "");
    fflush(progress->file);
    progress->shown_width = 0;
}

void
ns_progress_summary(struct ns_progress *progress,
                    const struct ns_pipeline_counts *counts)
{
    int64_t elapsed_ms = ns_now_ms() - progress->started_ms;
    char text[320] = "";

    ns_progress_clear(progress);
    add(text, sizeof(text), "%" PRIu64 " ok, %" PRIu64 " failed", counts->ok,
        counts->failed);
    if (progress->done_before)
        add(text, sizeof(text), ", %" PRIu64 " done before",
            progress->done_before);
    add(text, sizeof(text), " in ");
    add_time(text, sizeof(text), elapsed_ms, "");
    add(text, sizeof(text), ": %" PRIu64 " tokens", counts->new_tokens);
    if (elapsed_ms > 0)
        add(text, sizeof(text), ", %.0f tok/s",
            (double)counts->new_tokens * 1000 / (double)elapsed_ms);
    if (counts->job_passes)
        add(text, sizeof(text), ", %.1f tok/forward",
            ratio(counts->job_tokens, counts->job_passes));
    if (counts->canvas_steps && counts->canvas_blocks)
        add(text, sizeof(text), ", %.1f steps/canvas",
            ratio(counts->canvas_steps, counts->canvas_blocks));
    fprintf(progress->file, "%s\n", text);
    fflush(progress->file);
}
