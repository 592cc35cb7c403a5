/* nightshift on texts that are summarised in parts, on the tiny model: what it
 * writes is noise, but the same noise however the work went. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 6 };

static const char *const modes[] = { "diffusion", "ar", "hybrid" };

static void
write_documents(const char *path)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < N_JOBS; i++) {
        fprintf(file, "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                      "\"user\",\"content\":", i);
        fprintf(file, i == 5 ? "[{\"type\":\"text\",\"text\":\"For a child:\"},"
                               "{\"type\":\"text\",\"text\":\"" : "\"");
        for (int p = 0; p < 5 + 3 * i; p++) {
            if (i == 5 && p == 9) /* a second text */
                fprintf(file, "\"},{\"type\":\"text\",\"text\":\"");
            fprintf(file, "# Chapter %d\\n\\nIt is told here what %d of them "
                          "did when they had come home.\\n\\n", p, p * i);
        }
        fprintf(file, i == 5 ? "\"}]" : "\"");
        /* Of a form, as noise may be half of a tool call. */
        fprintf(file, "}],\"max_tokens\":%d,\"temperature\":1,"
                      "\"guided_regex\":\"[a-z ]{10,30}\"},\"nightshift\":"
                      "{\"mode\":\"%s\",\"task\":{\"type\":\"summarize\","
                      "\"chunk_tokens\":128}}}\n",
                40 + i, modes[i % 3]);
    }
    assert_int_equal(fclose(file), 0);
}

static struct answers reference;

static json_int_t
line_of(const json_t *root)
{
    return json_integer_value(
        json_object_get(json_object_get(root, "nightshift"), "line"));
}

static void
a_long_text_is_one_result_with_its_parts(void **state)
{
    char *text;
    int n = 0;

    (void)state;
    write_documents(in_folder("jobs.jsonl"));
    if (RUN("validate", in_folder("jobs.jsonl"), "-m", program_model) != 0)
        fail_msg("%s", slurp(in_folder("stdout")));
    assert_int_equal(RUN("plan", in_folder("jobs.jsonl"), "-m",
                         program_model), 0);
    text = slurp(in_folder("stdout"));
    assert_memory_equal(text, "6 jobs in ", 10);
    assert_true(atoi(text + 10) >= N_JOBS * 3);
    free(text);
    if (RUN("run", in_folder("jobs.jsonl"), "-o", in_folder("whole.jsonl"),
            "-m", program_model) != 0)
        fail_msg("%s", slurp(in_folder("whole.jsonl")));
    read_answers(in_folder("whole.jsonl"), &reference);
    assert_int_equal(reference.n, N_JOBS);
    text = slurp(in_folder("whole.jsonl"));
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        json_t *root = json_loads(line, JSON_DISABLE_EOF_CHECK, NULL);
        const json_t *body =
            json_object_get(json_object_get(root, "response"), "body");
        const json_t *parts = json_object_get(body, "parts");
        json_int_t at = 0;
        int n_texts = 0;

        assert_true(json_array_size(parts) >= 2);
        for (size_t i = 0; i < json_array_size(parts); i++) {
            const json_t *part = json_array_get(parts, i);
            const json_t *bytes = json_object_get(part, "bytes");

            /* Two texts: the second begins anew. */
            if (line_of(root) == 6 &&
                json_integer_value(json_array_get(bytes, 0)) == 0)
                at = 0;
            n_texts += json_integer_value(json_array_get(bytes, 0)) == 0;
            assert_int_equal(json_integer_value(json_array_get(bytes, 0)), at);
            at = json_integer_value(json_array_get(bytes, 1));
            assert_memory_equal(
                json_string_value(json_array_get(
                    json_object_get(part, "headings"), 0)), "Chapter ", 8);
        }
        assert_int_equal(n_texts, line_of(root) == 6 ? 2 : 1);
        /* All that was read counts. */
        assert_true(json_integer_value(json_object_get(
                        json_object_get(body, "usage"), "prompt_tokens")) >
                    (json_int_t)json_array_size(parts) * 60);
        json_decref(root);
        n++;
    }
    assert_int_equal(n, N_JOBS);
    free(text);
}

/* Over all lines. Passes are those of the last process, tokens of the job. */
static int64_t
passes_of(const char *path, int64_t *n_tokens)
{
    char *text = slurp(path);
    int64_t sum = 0;

    *n_tokens = 0;
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        json_t *root = json_loads(line, JSON_DISABLE_EOF_CHECK, NULL);

        sum += json_integer_value(json_object_get(
            json_object_get(root, "nightshift"), "passes"));
        *n_tokens += json_integer_value(json_object_get(
            json_object_get(json_object_get(json_object_get(root, "response"),
                                            "body"), "usage"),
            "total_tokens"));
        json_decref(root);
    }
    free(text);
    return sum;
}

static off_t
size_of(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? st.st_size : 0;
}

/* Until one more block lies in the file, or the process has ended by itself. */
static void
wait_for_block(pid_t pid, const char *path)
{
    off_t before = size_of(path);
    int64_t until = now_ms() + LIMIT_MS;
    siginfo_t ended = { 0 };

    while (size_of(path) <= before && now_ms() < until &&
           waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ended.si_pid == 0)
        usleep(500);
}

/* In the middle of nodes, between rounds, in the last answer. */
static void
killed_at_any_point_it_comes_to_the_same_end(void **state)
{
    unsigned seed = 5;
    int n_hit = 0;
    int64_t saved = 0, n_tokens, n_whole, n_passes;

    (void)state;
    n_passes = passes_of(in_folder("whole.jsonl"), &n_whole);
    for (int round = 0; round < 3; round++) {
        unlink(in_folder("broken.jsonl"));
        for (int i = 0; i < 8; i++) {
            const char *const argv[] = {
                "nightshift", "run", in_folder("jobs.jsonl"), "-o",
                in_folder("broken.jsonl"), "-m", program_model, "--set",
                "daemon.checkpoint=0ms", NULL
            };
            pid_t pid = spawn(argv, in_folder("stdout"), in_folder("stderr"));

            wait_for_block(pid, in_folder("broken.jsonl.blocks"));
            usleep((useconds_t)(rand_r(&seed) % 10) * 1000);
            kill(pid, i % 4 == 3 ? SIGINT : SIGKILL);
            n_hit += wait_for(pid, LIMIT_MS) != 0;
        }
        if (RUN("run", in_folder("jobs.jsonl"), "-o",
                in_folder("broken.jsonl"), "-m", program_model) != 0)
            fail_msg("%s", slurp(in_folder("stderr")));
        assert_same_answers(in_folder("broken.jsonl"), &reference, N_JOBS);
        saved += n_passes - passes_of(in_folder("broken.jsonl"), &n_tokens);
        assert_int_equal(n_tokens, n_whole);
    }
    assert_true(n_hit > 3);
    assert_true(saved > 0); /* nodes were taken up, not made again */
}

/* A part size that changes between two runs makes other parts, not a mixture. */
static void
another_part_size_begins_anew(void **state)
{
    struct answers other;

    (void)state;
    unlink(in_folder("broken.jsonl"));
    for (int i = 0; i < 6; i++) {
        const char *const argv[] = {
            "nightshift", "run", in_folder("plain.jsonl"), "-o",
            in_folder("broken.jsonl"), "-m", program_model, "--set",
            i % 2 ? "limits.summary_chunk=130" : "limits.summary_chunk=400",
            "--set", "daemon.checkpoint=0ms", NULL
        };
        pid_t pid;

        if (i == 0) { /* the same jobs without a size of their own */
            char *text = slurp(in_folder("jobs.jsonl")), *at;
            FILE *file = fopen(in_folder("plain.jsonl"), "w");

            while ((at = strstr(text, ",\"chunk_tokens\":128")) != NULL)
                memmove(at, at + 19, strlen(at + 19) + 1);
            fputs(text, file);
            assert_int_equal(fclose(file), 0);
            free(text);
        }
        pid = spawn(argv, in_folder("stdout"), in_folder("stderr"));
        usleep(60000);
        kill(pid, SIGKILL);
        wait_for(pid, LIMIT_MS);
    }
    assert_int_equal(RUN("run", in_folder("plain.jsonl"), "-o",
                         in_folder("broken.jsonl"), "-m", program_model,
                         "--set", "limits.summary_chunk=0"), 0);
    read_answers(in_folder("broken.jsonl"), &other);
    assert_int_equal(other.n, N_JOBS);
    answers_fini(&other);
    answers_fini(&reference);
}

static void
what_can_not_be_split_says_so(void **state)
{
    FILE *file = fopen(in_folder("bad.jsonl"), "w");
    char *text;

    (void)state;
    assert_non_null(file);
    fputs("{\"custom_id\":\"a\",\"body\":{\"messages\":[{\"role\":\"user\","
          "\"content\":\"x\"}]},\"nightshift\":{\"task\":{\"type\":"
          "\"summarize\",\"chunk_tokens\":12}}}\n"
          "{\"custom_id\":\"b\",\"body\":{\"messages\":[{\"role\":\"user\","
          "\"content\":\"x\"}]},\"nightshift\":{\"task\":{\"type\":\"code\","
          "\"chunk_tokens\":1200}}}\n"
          "{\"custom_id\":\"c\",\"body\":{\"messages\":[{\"role\":\"user\","
          "\"content\":\"x\"}]},\"nightshift\":{\"task\":{\"type\":"
          "\"summarize\",\"overlap\":12}}}\n",
          file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(RUN("validate", in_folder("bad.jsonl"), "-m",
                         program_model), 2);
    text = slurp(in_folder("stdout"));
    assert_non_null(strstr(text, "nightshift.task.chunk_tokens: 12"));
    assert_non_null(strstr(text, "chunk_tokens but of summarize"));
    assert_non_null(strstr(text, "nightshift.task.overlap"));
    free(text);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_text_is_one_result_with_its_parts),
        cmocka_unit_test(killed_at_any_point_it_comes_to_the_same_end),
        cmocka_unit_test(another_part_size_begins_anew),
        cmocka_unit_test(what_can_not_be_split_says_so),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
