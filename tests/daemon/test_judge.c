/* nightshift(1) with validators: answers that are turned down, made again, and
 * given up, and the same after a kill. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 40 };

/* Of two forms, one is JSON: which of them comes is the seed's choice. */
#define COIN                                                                  \
    "\"guided_regex\":\"\\\\{\\\"a\\\": \\\"[0-9]{30}\\\"\\\\}|"              \
    "<\\\"a\\\": \\\"[0-9]{30}\\\">\""

static void
write_coins(const char *path, const char *more)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < N_JOBS; i++)
        fprintf(file,
                "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"number %d\"}],\"max_tokens\":64,"
                "\"temperature\":2,%s,\"nightshift\":{\"mode\":\"%s\","
                "\"validators\":[\"json\"],\"retries\":%d}}}\n",
                i, i, COIN, i % 2 ? "ar" : "hybrid", i % 4 < 2 ? 8 : 0);
    fputs(more, file);
    assert_int_equal(fclose(file), 0);
}

static void
write_text_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static json_t *
line_of(const char *text, int number)
{
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        json_t *root = json_loads(line, JSON_DISABLE_EOF_CHECK, NULL);
        const json_t *ours = json_object_get(root, "nightshift");

        if (json_integer_value(json_object_get(ours, "line")) == number)
            return root;
        json_decref(root);
    }
    fail_msg("no line %d", number);
    return NULL;
}

static const char *
content_of(const json_t *line)
{
    const json_t *choices = json_object_get(
        json_object_get(json_object_get(line, "response"), "body"), "choices");

    return json_string_value(json_object_get(
        json_object_get(json_array_get(choices, 0), "message"), "content"));
}

static struct answers reference;

static void
an_answer_turned_down_is_made_again_and_given_up_behind_the_limit(void **state)
{
    int n_again = 0, n_failed = 0, n_at_once = 0;
    char *text;

    (void)state;
    write_coins(in_folder("jobs.jsonl"), "");
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("whole.jsonl"), "-m", program_model), 1);
    read_answers(in_folder("whole.jsonl"), &reference);
    text = slurp(in_folder("whole.jsonl"));
    for (int i = 0; i < N_JOBS; i++) {
        json_t *line = line_of(text, i + 1);
        const json_t *ours = json_object_get(line, "nightshift");
        const json_t *error = json_object_get(line, "error");
        json_int_t attempts =
            json_integer_value(json_object_get(ours, "attempts"));
        size_t n_warnings =
            json_array_size(json_object_get(ours, "warnings"));

        assert_string_equal(
            json_string_value(json_array_get(
                json_object_get(ours, "validators"), 0)), "json");
        if (json_is_null(error)) {
            assert_int_equal(content_of(line)[0], '{');
            assert_true(n_warnings == (attempts ? (size_t)attempts - 1 : 0));
            n_again += attempts > 1;
            n_at_once += attempts == 0;
            assert_true(attempts <= 9 && (i % 4 < 2 || attempts == 0));
        } else {
            assert_string_equal(
                json_string_value(json_object_get(error, "code")),
                "invalid_output");
            assert_non_null(strstr(
                json_string_value(json_object_get(error, "message")),
                "json: "));
            assert_int_equal(
                json_string_value(json_object_get(ours, "detail"))[0], '<');
            assert_true(json_integer_value(json_object_get(ours, "passes")) >
                        0);
            n_failed++;
        }
        json_decref(line);
    }
    free(text);
    assert_true(n_again > 2 && n_failed > 2 && n_at_once > 2);
}

/* The seed that a result names gives its text in one attempt. */
static void
the_seed_of_an_attempt_gives_its_text_again(void **state)
{
    char *text = slurp(in_folder("whole.jsonl")), *again;
    FILE *file = fopen(in_folder("seeds.jsonl"), "w");
    int asked[N_JOBS], n = 0;

    (void)state;
    assert_non_null(file);
    for (int i = 0; i < N_JOBS; i++) {
        json_t *line = line_of(text, i + 1);
        const json_t *ours = json_object_get(line, "nightshift");

        if (json_is_null(json_object_get(line, "error"))) {
            fprintf(file,
                    "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                    "\"user\",\"content\":\"number %d\"}],\"max_tokens\":64,"
                    "\"seed\":%lld,\"temperature\":2,%s,\"nightshift\":"
                    "{\"mode\":\"%s\"}}}\n",
                    i, i, (long long)json_integer_value(
                              json_object_get(ours, "seed")),
                    COIN, i % 2 ? "ar" : "hybrid");
            asked[n++] = i;
        }
        json_decref(line);
    }
    assert_int_equal(fclose(file), 0);
    assert_int_equal(RUN("run", in_folder("seeds.jsonl"), "-o",
                         in_folder("seeds.out"), "-m", program_model), 0);
    again = slurp(in_folder("seeds.out"));
    for (int i = 0; i < n; i++) {
        json_t *first = line_of(text, asked[i] + 1);
        json_t *second = line_of(again, i + 1);

        assert_string_equal(content_of(first), content_of(second));
        json_decref(first);
        json_decref(second);
    }
    free(text);
    free(again);
}

static int
lines_of(const char *path)
{
    char *text = exists(path) ? slurp(path) : NULL;
    int n = 0;

    for (const char *at = text; at && (at = strchr(at, '\n')) != NULL; at++)
        n++;
    free(text);
    return n;
}

/* In the midst of the work each time, as results come; no more deaths in a row
 * than a job is granted. */
static void
killed_at_any_point_attempts_and_answers_are_the_same(void **state)
{
    static const int at_lines[] = { 1, 9, 20 };
    const char *out = in_folder("broken.jsonl");
    const char *const argv[] = { "nightshift", "run", in_folder("jobs.jsonl"),
                                 "-o", out, "-m", program_model, NULL };
    int n_hit = 0;

    (void)state;
    for (int i = 0; i < 3; i++) {
        pid_t pid = spawn(argv, in_folder("stdout"), in_folder("stderr"));
        int64_t until = now_ms() + LIMIT_MS;

        while (lines_of(out) < at_lines[i] && now_ms() < until)
            usleep(500);
        kill(pid, SIGKILL);
        n_hit += wait_for(pid, LIMIT_MS) == -SIGKILL && lines_of(out) < N_JOBS;
    }
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o", out, "-m",
                         program_model), 1);
    assert_same_answers(out, &reference, N_JOBS);
    assert_true(n_hit > 0);
    answers_fini(&reference);
}

static void
where_a_seed_changes_nothing_there_is_one_attempt(void **state)
{
    char *text;

    (void)state;
    write_text_file(in_folder("fixed.jsonl"),
                    "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":"
                    "\"user\",\"content\":\"x\"}],\"max_tokens\":8,"
                    "\"guided_choice\":[\"<\"],\"nightshift\":{\"mode\":\"ar\","
                    "\"validators\":[\"json\"],\"retries\":8}}}\n");
    assert_int_equal(RUN("run", in_folder("fixed.jsonl"), "-o",
                         in_folder("fixed.out"), "-m", program_model), 2);
    text = slurp(in_folder("fixed.out"));
    assert_non_null(strstr(text, "another seed would change nothing"));
    assert_null(strstr(text, "\"attempts\""));
    free(text);
}

static void
who_asks_about_a_control_string_may_be_told(void **state)
{
    static const char form[] =
        "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":\"user\","
        "\"content\":\"%s\"}],\"max_tokens\":32,\"guided_choice\":"
        "[\"it is <eos>\"],\"nightshift\":{\"validators\":[\"control\"],"
        "\"retries\":0}}}\n";
    FILE *file = fopen(in_folder("control.jsonl"), "w");
    json_t *asked, *leaked;
    char *text;

    (void)state;
    assert_non_null(file);
    fprintf(file, form, 1, "what ends a \\\"text\\\": <eos>?");
    fprintf(file, form, 2, "what ends a text?");
    assert_int_equal(fclose(file), 0);
    assert_int_equal(RUN("run", in_folder("control.jsonl"), "-o",
                         in_folder("control.out"), "-m", program_model), 1);
    text = slurp(in_folder("control.out"));
    asked = line_of(text, 1);
    leaked = line_of(text, 2);
    assert_string_equal(content_of(asked), "it is <eos>");
    assert_non_null(strstr(
        json_string_value(json_object_get(json_object_get(leaked, "error"),
                                          "message")),
        "control: <eos> stands at byte 6"));
    json_decref(asked);
    json_decref(leaked);
    free(text);
}

static void
what_can_not_be_checked_here_is_refused_and_what_is_configured_runs(
    void **state)
{
    static const char job[] =
        "{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
        "\"content\":\"x\"}],\"max_tokens\":8,\"guided_choice\":[\"x = (\"],"
        "\"nightshift\":{\"validators\":[\"python\"],\"retries\":0}}}\n";
    char *text;

    (void)state;
    write_text_file(in_folder("tool.jsonl"), job);
    assert_int_equal(RUN("validate", in_folder("tool.jsonl"), "-m",
                         program_model), 2);
    text = slurp(in_folder("stdout"));
    assert_non_null(strstr(text, "validators.python"));
    free(text);
    assert_int_equal(RUN("run", in_folder("tool.jsonl"), "-o",
                         in_folder("tool.out"), "-m", program_model, "--set",
                         "validators.python=/usr/bin/python3"), 2);
    text = slurp(in_folder("tool.out"));
    assert_non_null(strstr(text, "invalid_output"));
    assert_non_null(strstr(text, "in line 1"));
    free(text);
    assert_int_equal(RUN("run", in_folder("tool.jsonl"), "-o",
                         in_folder("tool2.out"), "-m", program_model, "--set",
                         "validators.checks=spelling"), 78);
    text = slurp(in_folder("stderr"));
    assert_non_null(strstr(text, "spelling"));
    free(text);
    assert_int_equal(RUN("run", in_folder("tool.jsonl"), "-o",
                         in_folder("tool3.out"), "-m", program_model, "--set",
                         "validators.python=/no/python"), 78);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            an_answer_turned_down_is_made_again_and_given_up_behind_the_limit),
        cmocka_unit_test(the_seed_of_an_attempt_gives_its_text_again),
        cmocka_unit_test(killed_at_any_point_attempts_and_answers_are_the_same),
        cmocka_unit_test(where_a_seed_changes_nothing_there_is_one_attempt),
        cmocka_unit_test(who_asks_about_a_control_string_may_be_told),
        cmocka_unit_test(
            what_can_not_be_checked_here_is_refused_and_what_is_configured_runs),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
