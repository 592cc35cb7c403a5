/* nightshift(1) end to end, on a small checkpoint: run, be killed, carry on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 40, LONGEST = 150 };

#define OPTIONS "-m", program_model, "--threads", "2"

static struct answers reference; /* of an unbroken run over jobs.jsonl */

static void
an_unbroken_run_answers_every_job_once_and_says_that_some_failed(void **state)
{
    (void)state;
    write_jobs(in_folder("jobs.jsonl"), N_JOBS, LONGEST);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("whole.jsonl"), OPTIONS), 1);
    read_answers(in_folder("whole.jsonl"), &reference);
    assert_int_equal(reference.n, N_JOBS);
    for (int i = 1; i <= N_JOBS; i++) {
        assert_int_equal(reference.count[i], 1);
        if (i % 20 == 8)
            assert_non_null(strstr(reference.text[i], "\"bad_param\""));
        else if (i % 20 == 18)
            assert_non_null(strstr(reference.text[i], "\"bad_json\""));
        else
            assert_non_null(strstr(reference.text[i], "\"seed\":"));
    }
    /* Quiet where nobody looks. */
    assert_false(file_says(in_folder("stderr"), "tok/s"));
}

static void
running_again_repeats_and_changes_nothing(void **state)
{
    char *before = slurp(in_folder("whole.jsonl")), *after;

    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("whole.jsonl"), OPTIONS), 1);
    after = slurp(in_folder("whole.jsonl"));
    assert_string_equal(before, after);
    free(before);
    free(after);
}

static void
answers_do_not_depend_on_threads_packing_or_chunks(void **state)
{
    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("one.jsonl"), "-m", program_model,
                         "--threads", "1", "--set", "engine.pass_tokens=96",
                         "--set", "engine.max_sequences=3", "--set",
                         "daemon.prepare_threads=1"),
                     1);
    assert_same_answers(in_folder("one.jsonl"), &reference, N_JOBS);
}

/* Sum of what a run has written: changes when it writes more. */
static int64_t
traces(void)
{
    const char *const names[] = { "broken.jsonl", "broken.jsonl.blocks" };
    int64_t sum = 0;

    for (int i = 0; i < 2; i++) {
        struct stat st;

        if (stat(in_folder("%s", names[i]), &st) == 0)
            sum += st.st_size + st.st_mtim.tv_sec + st.st_mtim.tv_nsec + 1;
    }
    return sum;
}

/* Lets a run begin to write, waits a little more, and ends it. True when it
 * was not through by then. */
static bool
kill_run(int delay_ms, int signal, int expected)
{
    const char *const argv[] = {
        "nightshift", "run", in_folder("jobs.jsonl"), "-o",
        in_folder("broken.jsonl"), OPTIONS, "--set", "daemon.checkpoint=0",
        "--set", "intake.window=6", "--set", "engine.max_sequences=4", NULL,
    };
    int64_t before = traces();
    pid_t pid = spawn(argv, in_folder("stdout"), in_folder("stderr"));
    siginfo_t ended = { 0 };
    int status;

    while (traces() == before && ended.si_pid == 0) {
        usleep(2000);
        waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT);
    }
    usleep((useconds_t)delay_ms * 1000);
    kill(pid, signal);
    status = wait_for(pid, LIMIT_MS);
    /* It may have been through by then; or written, and not yet ready. */
    if (status != expected && status != 1 && status != -signal)
        fail_msg("status %d behind signal %d", status, signal);
    return status == expected;
}

static int
finish_run(void)
{
    return RUN("run", in_folder("jobs.jsonl"), "-o", in_folder("broken.jsonl"),
               OPTIONS);
}

/* Passes of all jobs, each since it was last begun. */
static int64_t
passes_of(const char *path)
{
    char *text = slurp(path), *rest, *line;
    int64_t sum = 0;

    for (line = strtok_r(text, "\n", &rest); line;
         line = strtok_r(NULL, "\n", &rest)) {
        json_t *root = json_loads(line, 0, NULL);

        sum += json_integer_value(json_object_get(
            json_object_get(root, "nightshift"), "passes"));
        json_decref(root);
    }
    free(text);
    return sum;
}

static void
killed_at_any_point_and_run_again_gives_each_job_once_as_if_unbroken(
    void **state)
{
    unsigned seed = 7;
    int n_hit = 0, n_with_blocks = 0;
    int64_t saved = 0;

    (void)state;
    for (int round = 0; round < 3; round++) {
        unlink(in_folder("broken.jsonl"));
        for (int kills = 0; kills < 8; kills++) {
            n_hit += kill_run((int)(rand_r(&seed) % 60), SIGKILL,
                              -SIGKILL);
            n_with_blocks += exists(in_folder("broken.jsonl.blocks"));
        }
        assert_int_equal(finish_run(), 1);
        assert_same_answers(in_folder("broken.jsonl"), &reference, N_JOBS);
        assert_false(exists(in_folder("broken.jsonl.blocks")));
        saved += passes_of(in_folder("whole.jsonl")) -
                 passes_of(in_folder("broken.jsonl"));
    }
    assert_true(saved > 0); /* blocks were taken up, not made again */
    /* The loop above proves nothing if the runs were through before. */
    assert_true(n_hit >= 3);
    assert_true(n_with_blocks >= 1);
}

static void
an_interrupt_stops_cleanly_and_a_second_run_carries_on(void **state)
{
    struct answers answers;
    int n_hit = 0;

    (void)state;
    unlink(in_folder("broken.jsonl"));
    for (int i = 0; i < 4; i++)
        n_hit += kill_run(20 + 60 * i, i == 1 ? SIGTERM : SIGINT, 130);
    assert_true(n_hit >= 1);
    read_answers(in_folder("broken.jsonl"), &answers); /* whole lines only */
    answers_fini(&answers);
    assert_int_equal(finish_run(), 1);
    assert_same_answers(in_folder("broken.jsonl"), &reference, N_JOBS);
}

/* The name comes a moment before the lock does. */
static void
wait_until_locked(const char *path)
{
    char inode[32];
    struct stat st;

    wait_until_exists(path);
    assert_int_equal(stat(path, &st), 0);
    snprintf(inode, sizeof(inode), ":%ju ", (uintmax_t)st.st_ino);
    wait_until_says("/proc/locks", inode);
}

static void
a_second_run_on_the_same_output_is_refused(void **state)
{
    const char *const argv[] = {
        "nightshift", "run", in_folder("jobs.jsonl"), "-o",
        in_folder("held.jsonl"), OPTIONS, NULL,
    };
    pid_t pid = spawn(argv, in_folder("first.out"), in_folder("first.err"));

    (void)state;
    wait_until_locked(in_folder("held.jsonl"));
    kill(pid, SIGSTOP);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("held.jsonl"), OPTIONS), 75);
    kill(pid, SIGCONT);
    assert_int_equal(wait_for(pid, LIMIT_MS), 1);
    assert_same_answers(in_folder("held.jsonl"), &reference, N_JOBS);
}

static void
write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

#define JOB(id, text, more) \
    "{\"custom_id\":\"" id "\",\"method\":\"POST\",\"url\":" \
    "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":\"user\"," \
    "\"content\":\"" text "\"}],\"max_tokens\":12" more "}}\n"

static void
the_exit_status_tells_all_some_and_none(void **state)
{
    const char *jobs = in_folder("few.jsonl");

    (void)state;
    write_text(jobs, JOB("a", "one", "") JOB("b", "two", ""));
    assert_int_equal(RUN("run", jobs, "-o", in_folder("few.out"), OPTIONS), 0);
    write_text(jobs, "[]\n{}\n");
    assert_int_equal(RUN("run", jobs, "-o", in_folder("none.out"), OPTIONS),
                     2);
    assert_int_equal(RUN("run", jobs, "-o", in_folder("none.out"), OPTIONS),
                     2);
    assert_int_equal(RUN("run"), 64);
    assert_int_equal(RUN("run", jobs, "--no-such-option"), 64);
    assert_int_equal(RUN("sing"), 64);
    assert_int_equal(RUN("run", jobs, "--mode", "foo"), 64);
    assert_true(file_says(in_folder("stderr"), "auto|diffusion|ar|hybrid"));
    assert_int_equal(RUN("run", in_folder("missing.jsonl"), OPTIONS), 65);
    assert_int_equal(RUN("run", jobs, "-m", in_folder("no-model")), 78);
    assert_true(file_says(in_folder("stderr"), "config.json"));
    assert_int_equal(RUN("run", jobs, OPTIONS, "--set", "engine.modle=x"), 78);
    assert_true(file_says(in_folder("stderr"), "unknown key engine.modle"));
    assert_int_equal(RUN("--help"), 0);
    assert_int_equal(RUN("--version"), 0);
    assert_int_equal(RUN("run", "--help"), 0);
}

static void
without_an_output_results_go_to_standard_output(void **state)
{
    struct answers answers;

    (void)state;
    write_text(in_folder("few.jsonl"), JOB("a", "one", "") JOB("b", "two", ""));
    assert_int_equal(RUN("run", in_folder("few.jsonl"), OPTIONS), 0);
    read_answers(in_folder("stdout"), &answers);
    assert_int_equal(answers.n, 2);
    answers_fini(&answers);
}

static void
an_edited_line_stops_the_run_until_it_is_told_to_restart(void **state)
{
    const char *jobs = in_folder("edit.jsonl"), *out = in_folder("edit.out");
    struct answers answers;

    (void)state;
    write_text(jobs, JOB("a", "one", "") JOB("b", "two", ""));
    assert_int_equal(RUN("run", jobs, "-o", out, OPTIONS), 0);
    assert_int_equal(RUN("show", out), 0);
    assert_int_equal(RUN("show", jobs), 65); /* the wrong one of the two */
    write_text(jobs, JOB("a", "one", "") JOB("b", "three", ""));
    assert_int_equal(RUN("run", jobs, "-o", out, OPTIONS), 65);
    assert_true(file_says(in_folder("stderr"), "restart"));
    assert_true(file_says(in_folder("stderr"), "edit.jsonl: line 2"));
    assert_int_equal(RUN("run", jobs, "-o", out, OPTIONS, "--restart"), 0);
    read_answers(out, &answers);
    assert_int_equal(answers.n, 2);
    answers_fini(&answers);
}

static void
failed_lines_run_again_when_asked(void **state)
{
    const char *jobs = in_folder("again.jsonl"), *out = in_folder("again.out");
    struct answers answers;

    (void)state;
    write_text(jobs, JOB("a", "one", "") JOB("b", "", ""));
    assert_int_equal(RUN("run", jobs, "-o", out, OPTIONS), 1);
    assert_int_equal(RUN("run", jobs, "-o", out, OPTIONS, "--retry-failed"),
                     1);
    read_answers(out, &answers);
    assert_int_equal(answers.n, 2);
    assert_int_equal(answers.count[2], 1);
    answers_fini(&answers);
}

static void
validate_names_line_code_and_field_and_counts_tokens(void **state)
{
    const char *jobs = in_folder("check.jsonl");

    (void)state;
    write_text(jobs, JOB("a", "one", "") JOB("b", "two", ",\"n\":2")
               "{\"custom_id\":\"c\"\n" JOB("a", "other", "")
               JOB("e", "five", ",\"max_tokens\":100000"));
    assert_int_equal(RUN("validate", jobs), 1);
    assert_true(file_says(in_folder("stdout"), ":2: unsupported: body.n"));
    assert_true(file_says(in_folder("stdout"), ":3: bad_json: "));
    assert_true(file_says(in_folder("stdout"), ":4: duplicate_id: "));
    write_text(jobs, JOB("a", "one", "") JOB("b", "two", ""));
    assert_int_equal(RUN("validate", jobs, "-m", program_model), 0);
    assert_true(file_says(in_folder("stdout"), "2 jobs, 0 bad"));
    assert_true(file_says(in_folder("stdout"), "prompt tokens"));
    assert_int_equal(RUN("validate", in_folder("missing.jsonl")), 65);
}

static void
what_validate_accepts_runs_and_what_it_refuses_does_not(void **state)
{
    const char *jobs = in_folder("limits.jsonl");
    struct answers answers;

    (void)state;
    /* The context is 4,096 and a canvas 32. */
    write_text(jobs,
               "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":"
               "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
               "\"user\",\"content\":\"x\"}],\"max_tokens\":4090}}\n"
               JOB("b", "fits", ""));
    assert_int_equal(RUN("validate", jobs, "-m", program_model), 1);
    assert_true(file_says(in_folder("stdout"), ":1: over_context: "));
    assert_int_equal(RUN("run", jobs, "-o", in_folder("limits.out"), OPTIONS),
                     1);
    read_answers(in_folder("limits.out"), &answers);
    assert_non_null(strstr(answers.text[1], "over_context"));
    assert_non_null(strstr(answers.text[2], "\"error\":null"));
    answers_fini(&answers);
}

/* What only the checkpoint's defaults, or the mode that auto comes to, make
 * wrong: both say the same of every line, in the same words. */
static void
validate_and_run_agree_on_what_the_model_allows(void **state)
{
    static const char *const bodies[] = {
        ",\"nightshift\":{\"t_min\":1}", /* the default t_max is 0.8 */
        ",\"nightshift\":{\"t_max\":0.1}",
        ",\"top_p\":0.5", /* auto comes to diffusion */
        ",\"top_p\":0.5,\"nightshift\":{\"mode\":\"hybrid\"}",
        ",\"top_p\":0.5,\"nightshift\":{\"task\":\"code\"}",
        ",\"nightshift\":{\"canvas_length\":48}",
        ",\"max_tokens\":4080,\"nightshift\":{\"mode\":\"ar\"}",
        ",\"max_tokens\":4080",
    };
    enum { N = sizeof(bodies) / sizeof(bodies[0]) };
    const char *jobs = in_folder("agree.jsonl");
    struct answers answers;
    char text[8192] = "", where[64];
    uint32_t n_bad = 0;

    (void)state;
    for (int i = 0; i < N; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text),
                 "{\"custom_id\":\"%d\",\"method\":\"POST\",\"url\":"
                 "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
                 "\"user\",\"content\":\"x\"}]%s}}\n", i, bodies[i]);
    write_text(jobs, text);
    assert_int_equal(RUN("validate", jobs, "-m", program_model), 1);
    assert_int_equal(RUN("run", jobs, "-o", in_folder("agree.out"), OPTIONS),
                     1);
    read_answers(in_folder("agree.out"), &answers);
    assert_int_equal(answers.n, N);
    assert_int_equal(RUN("validate", jobs, "-m", program_model), 1);
    for (int i = 0; i < N; i++) {
        json_t *root = json_loads(answers.text[i + 1], 0, NULL);
        const json_t *error = json_object_get(root, "error");
        const char *code = json_string_value(json_object_get(error, "code"));
        bool refused = code && strcmp(code, "bad_tool_call") != 0;

        if (refused)
            snprintf(where, sizeof(where), ":%d: %s: ", i + 1, code);
        else
            snprintf(where, sizeof(where), ":%d: ", i + 1);
        assert_int_equal(file_says(in_folder("stdout"), where), refused);
        n_bad += refused;
        json_decref(root);
    }
    assert_in_range(n_bad, 4, N - 2);
    answers_fini(&answers);
}

/* The first line of an id has it, also when that line is refused; batches make
 * no second one of it in one file. */
static void
validate_and_run_agree_on_who_has_an_id(void **state)
{
    const char *jobs = in_folder("ids.jsonl");
    struct answers answers;

    (void)state;
    write_text(jobs, JOB("a", "one", ",\"n\":2") JOB("a", "two", "")
               JOB("b", "x", ",\"nightshift\":{\"batch\":\"p\"}")
               JOB("b", "x", ",\"nightshift\":{\"batch\":\"q\"}")
               JOB("c", "x", ",\"nightshift\":{\"deadline\":"
                             "\"2020-01-01T00:00:00Z\"}"));
    assert_int_equal(RUN("validate", jobs), 1);
    assert_true(file_says(in_folder("stdout"), ":1: unsupported: "));
    assert_true(file_says(in_folder("stdout"), ":2: duplicate_id: "));
    assert_true(file_says(in_folder("stdout"), ":4: duplicate_id: "));
    assert_true(file_says(in_folder("stdout"), ":5: expired: "));
    assert_true(file_says(in_folder("stdout"), "5 jobs, 4 bad"));
    assert_int_equal(RUN("run", jobs, "-o", in_folder("ids.out"), OPTIONS), 1);
    read_answers(in_folder("ids.out"), &answers);
    assert_non_null(strstr(answers.text[1], "\"unsupported\""));
    assert_non_null(strstr(answers.text[2], "\"duplicate_id\""));
    assert_non_null(strstr(answers.text[3], "\"error\":null"));
    assert_non_null(strstr(answers.text[4], "\"duplicate_id\""));
    assert_non_null(strstr(answers.text[5], "\"expired\""));
    answers_fini(&answers);
}

static void
tokenize_goes_there_and_back(void **state)
{
    char *ids, *text;

    (void)state;
    assert_int_equal(RUN("tokenize", "-m", program_model, "good old text"), 0);
    ids = slurp(in_folder("stdout"));
    ids[strcspn(ids, "\n")] = '\0';
    assert_int_equal(RUN("tokenize", "-m", program_model, "--decode", ids), 0);
    text = slurp(in_folder("stdout"));
    assert_string_equal(text, "good old text\n");
    free(ids);
    free(text);
    assert_int_equal(RUN("tokenize", "-m", program_model, "--chat", "--text",
                         "[{\"role\":\"user\",\"content\":\"hi\"}]"), 0);
    assert_true(file_says(in_folder("stdout"), "<|turn>user\nhi<turn|>"));
    assert_int_equal(RUN("tokenize", "-m", program_model, "\xff"), 65);
    assert_int_equal(RUN("tokenize", "-m", program_model, "--chat",
                         "[{\"role\":\"cook\",\"content\":\"x\"}]"), 65);
    /* What a job sends as text is an object to the template. */
    assert_int_equal(RUN("tokenize", "-m", program_model, "--chat", "--text",
                         "[{\"role\":\"user\",\"content\":\"x\"},{\"role\":"
                         "\"assistant\",\"tool_calls\":[{\"function\":{\"name\":"
                         "\"f\",\"arguments\":\"{\\\"a\\\":1}\"}}]}]"), 0);
    assert_true(file_says(in_folder("stdout"), "call:f{a:1}"));
    assert_int_equal(RUN("tokenize", "-m", program_model, "--decode", "9999"),
                     65);
    /* What would change nothing is refused, not ignored. */
    assert_int_equal(RUN("tokenize", "-m", program_model, "--text", "hi"), 64);
    assert_true(file_says(in_folder("stderr"), "--text and --thinking go"));
    assert_int_equal(RUN("tokenize", "-m", program_model, "--thinking", "hi"),
                     64);
    assert_int_equal(RUN("tokenize", "-m", program_model, "--decode", "--count",
                         "5"), 64);
    assert_int_equal(RUN("tokenize", "-m", program_model, "--count", "hi"), 0);
}

static void
inspect_says_what_it_is_and_where_memory_goes(void **state)
{
    (void)state;
    assert_int_equal(RUN("inspect", program_model), 0);
    assert_true(file_says(in_folder("stdout"), "DiffusionGemma"));
    assert_true(file_says(in_folder("stdout"), "pages of 64 positions"));
    assert_int_equal(RUN("inspect", in_folder("nothing")), 78);
}

static void
show_prints_titles_and_references_and_no_control_bytes(void **state)
{
    char *text;

    (void)state;
    write_text(in_folder("t.jsonl"),
               JOB("a", "one", ",\"metadata\":{\"title\":\"A \\u001b[31m title"
                   "\",\"reference\":\"the right answer\"}") "{}\n");
    assert_int_equal(RUN("run", in_folder("t.jsonl"), "-o",
                         in_folder("t.out"), OPTIONS), 1);
    assert_int_equal(RUN("show", in_folder("t.out")), 0);
    text = slurp(in_folder("stdout"));
    assert_non_null(strstr(text, "title  (a)"));
    assert_non_null(strstr(text, "reference:\n   the right answer"));
    assert_non_null(strstr(text, "dead: "));
    for (char *at = text; *at; at++)
        assert_true((unsigned char)*at >= 0x20 || *at == '\n' || *at == '\t');
    free(text);
    write_text(in_folder("t.answers"),
               "{\"custom_id\":\"a\",\"answer\":\"another one\"}\n");
    assert_int_equal(RUN("show", in_folder("t.out"), "--answers",
                         in_folder("t.answers")), 0);
    assert_true(file_says(in_folder("stdout"), "reference:\n   another one"));
    assert_int_equal(RUN("show", in_folder("missing")), 65);
}

/* Help comes of the table that parses, so this asks every command for it. */
static void
each_command_says_what_it_takes(void **state)
{
    static const char *const commands[] = {
        "run", "validate", "show", "submit", "inspect", "plan", "db",
        "tokenize",
    };
    char head[64];

    (void)state;
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        assert_int_equal(RUN(commands[i], "--help"), 0);
        snprintf(head, sizeof(head), "usage: nightshift %s ", commands[i]);
        assert_true(file_says(in_folder("stdout"), head));
        assert_int_equal(RUN(commands[i], "--nothing"), 64);
        assert_true(file_says(in_folder("stderr"), head));
    }
    assert_int_equal(RUN("show", "--help"), 0); /* it needs no settings */
    assert_false(file_says(in_folder("stdout"), "--config"));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            an_unbroken_run_answers_every_job_once_and_says_that_some_failed),
        cmocka_unit_test(running_again_repeats_and_changes_nothing),
        cmocka_unit_test(answers_do_not_depend_on_threads_packing_or_chunks),
        cmocka_unit_test(
            killed_at_any_point_and_run_again_gives_each_job_once_as_if_unbroken),
        cmocka_unit_test(an_interrupt_stops_cleanly_and_a_second_run_carries_on),
        cmocka_unit_test(a_second_run_on_the_same_output_is_refused),
        cmocka_unit_test(the_exit_status_tells_all_some_and_none),
        cmocka_unit_test(each_command_says_what_it_takes),
        cmocka_unit_test(without_an_output_results_go_to_standard_output),
        cmocka_unit_test(
            an_edited_line_stops_the_run_until_it_is_told_to_restart),
        cmocka_unit_test(failed_lines_run_again_when_asked),
        cmocka_unit_test(validate_names_line_code_and_field_and_counts_tokens),
        cmocka_unit_test(
            what_validate_accepts_runs_and_what_it_refuses_does_not),
        cmocka_unit_test(validate_and_run_agree_on_what_the_model_allows),
        cmocka_unit_test(validate_and_run_agree_on_who_has_an_id),
        cmocka_unit_test(tokenize_goes_there_and_back),
        cmocka_unit_test(inspect_says_what_it_is_and_where_memory_goes),
        cmocka_unit_test(
            show_prints_titles_and_references_and_no_control_bytes),
    };
    int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);

    answers_fini(&reference);
    return failed;
}
