#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/progress.h"

static const char *
line_of(const struct ns_progress *progress,
        const struct ns_pipeline_counts *counts, double rate,
        int64_t elapsed_ms)
{
    static char line[160];

    ns_progress_line(progress, counts, rate, elapsed_ms, line, sizeof(line));
    return line;
}

static void
the_line_says_jobs_failures_rates_and_the_time_left(void **state)
{
    const struct ns_progress progress = { .total = 90, .done_before = 10 };
    const struct ns_pipeline_counts counts = {
        .ok = 29, .failed = 1, .job_tokens = 840, .job_passes = 200,
        .canvas_steps = 236, .canvas_blocks = 20,
    };

    (void)state;
    assert_string_equal(line_of(&progress, &counts, 543.4, 30000),
                        "40/100 jobs  1 failed  543 tok/s  4.2 tok/forward"
                        "  11.8 steps/canvas  1:00 left");
}

static void
what_is_not_known_is_left_out(void **state)
{
    struct ns_progress progress = { 0 };
    struct ns_pipeline_counts counts = { 0 };

    (void)state;
    assert_string_equal(line_of(&progress, &counts, 0, 0), "0 jobs");
    progress.total = 100;
    counts.ok = 2; /* too few to guess from */
    assert_string_equal(line_of(&progress, &counts, 0, 1000), "2/100 jobs");
    counts.ok = 100;
    assert_string_equal(line_of(&progress, &counts, 0, 1000), "100/100 jobs");
    counts.ok = 10;
    assert_string_equal(line_of(&progress, &counts, 0, 3600000),
                        "10/100 jobs  9:00:00 left");
}

static void
a_shorter_line_wipes_the_longer_one_before(void **state)
{
    struct ns_progress progress;
    struct ns_pipeline_counts counts = { .ok = 1000000 };
    char *text = NULL;
    size_t length;
    FILE *file = open_memstream(&text, &length);

    (void)state;
    assert_non_null(file);
    ns_progress_init(&progress, file, true, 0, 0);
    progress.shown_ms -= 1000;
    ns_progress_show(&progress, &counts);
    counts.ok = 1;
    ns_progress_show(&progress, &counts); /* too soon */
    progress.shown_ms -= 1000;
    ns_progress_show(&progress, &counts);
    ns_progress_clear(&progress);
    fclose(file);
    assert_string_equal(text, "\r1000000 jobs\r1 jobs      \r      \r");
    free(text);
}

static void
where_nobody_looks_only_the_summary_is_written(void **state)
{
    struct ns_progress progress;
    struct ns_pipeline_counts counts = { .ok = 2, .failed = 1,
                                         .new_tokens = 30 };
    char *text = NULL;
    size_t length;
    FILE *file = open_memstream(&text, &length);

    (void)state;
    assert_non_null(file);
    ns_progress_init(&progress, file, false, 3, 4);
    progress.shown_ms -= 1000;
    ns_progress_show(&progress, &counts);
    ns_progress_summary(&progress, &counts);
    fclose(file);
    assert_non_null(
        strstr(text, "2 ok, 1 failed, 4 done before in 0:00: 30 tokens"));
    assert_null(strchr(text, '\r'));
    free(text);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_line_says_jobs_failures_rates_and_the_time_left),
        cmocka_unit_test(what_is_not_known_is_left_out),
        cmocka_unit_test(a_shorter_line_wipes_the_longer_one_before),
        cmocka_unit_test(where_nobody_looks_only_the_summary_is_written),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
