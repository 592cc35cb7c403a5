/* nightshift plan: what it says of files, machines and cards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 40, LONGEST = 150 };

static void
a_plan_of_this_machine_counts_what_run_would_run(void **state)
{
    (void)state;
    write_jobs(in_folder("jobs.jsonl"), N_JOBS, LONGEST);
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--jobs"), 0);
    assert_true(file_says(in_folder("stdout"),
                          "36 jobs (4 more are bad"));
    assert_true(file_says(in_folder("stdout"), "on this machine: "));
    assert_true(file_says(in_folder("stdout"), "which is a guess"));
    assert_true(file_says(in_folder("stdout"), "begins s"));
}

static void
former_results_replace_the_guess(void **state)
{
    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("out.jsonl"), "-m", program_model), 1);
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--history",
                         in_folder("out.jsonl")), 0);
    assert_true(file_says(in_folder("stdout"), " former results\n"));
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--history",
                         in_folder("none.jsonl")), 78);
    assert_true(file_says(in_folder("stderr"), "none.jsonl"));
    /* Lines that are no results teach nothing. */
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--history",
                         in_folder("jobs.jsonl")), 0);
    assert_true(file_says(in_folder("stdout"), "which is a guess"));
}

static void
a_card_is_planned_for_without_being_there(void **state)
{
    (void)state;
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--card", "h100-80gb", "--fp8",
                         "--price", "2.5"), 0);
    assert_true(file_says(in_folder("stdout"), "on h100-80gb"));
    assert_true(file_says(in_folder("stdout"), "in FP8"));
    assert_true(file_says(in_folder("stdout"), "  cost "));
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--card", "h200"), 0);
    assert_true(file_says(in_folder("stdout"), "in bf16"));
}

static void
mistakes_are_named(void **state)
{
    (void)state;
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--card", "abacus"), 64);
    assert_true(file_says(in_folder("stderr"), "abacus"));
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--price", "cheap"), 64);
    assert_true(file_says(in_folder("stderr"), "--price cheap"));
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model, "--fp8"), 64);
    assert_int_equal(RUN("plan", in_folder("none.jsonl"), "-m",
                         program_model), 65);
    assert_int_equal(RUN("plan"), 64);
    assert_int_equal(RUN("plan", "--help"), 0);
}

static void
modes_chosen_for_throughput_are_told_in_the_result(void **state)
{
    char *out;

    (void)state;
    /* A tiny model's canvases take many steps: token by token is faster. */
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("fast.jsonl"), "-m", program_model, "--set",
                         "engine.auto=throughput"), 1);
    out = slurp(in_folder("fast.jsonl"));
    assert_non_null(strstr(out, "chosen for throughput in the place of "
                                "diffusion"));
    assert_non_null(strstr(out, "\"mode\":\"ar\""));
    free(out);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("fixed.jsonl"), "-m", program_model), 1);
    assert_false(file_says(in_folder("fixed.jsonl"), "throughput"));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_of_this_machine_counts_what_run_would_run),
        cmocka_unit_test(former_results_replace_the_guess),
        cmocka_unit_test(a_card_is_planned_for_without_being_there),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(modes_chosen_for_throughput_are_told_in_the_result),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
