/* nightshift(1) on simulated cards: several of them, one too small, one that
 * breaks. The plug-in is the real backend, its kernels run on tests/cudasim. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <regex.h>
#include <stdio.h>

#include "tests/daemon/program.h"

enum { N_JOBS = 3, LONGEST = 20 };

#define ON(device)                                                            \
    "-m", program_model, "--set", "engine.backend=cuda", "--set",             \
        "engine.device=" device, "--set", "engine.pass_tokens=64", "--set",   \
        "engine.kv_memory=4M", "--set", "engine.max_sequences=4"

static struct answers reference; /* of device 0 */

static int
prepare(void **state)
{
    char libraries[PATH_MAX];

    if (make_folder(state) != 0)
        return -1;
    snprintf(libraries, sizeof(libraries), "%s/cudasim", build_folder());
    write_jobs(in_folder("jobs.jsonl"), N_JOBS, LONGEST);
    return setenv("LD_LIBRARY_PATH", libraries, 1) |
           setenv("NS_CUDASIM_TRACK", "101", 1) |
           setenv("NS_CUDASIM_DEVICES", "2", 1);
}

static void
each_card_gives_the_same_answers(void **state)
{
    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("first.jsonl"), ON("0")), 0);
    read_answers(in_folder("first.jsonl"), &reference);
    assert_int_equal(reference.n, N_JOBS);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("second.jsonl"), ON("1")), 0);
    assert_same_answers(in_folder("second.jsonl"), &reference, N_JOBS);
}

/* One daemon a card, as nightshiftd@.service starts them: at the same time,
 * each sees its own alone. */
static void
a_process_a_card_runs_beside_the_other(void **state)
{
    pid_t pid[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        const char *const argv[] = { "nightshift", "run",
                                     in_folder("jobs.jsonl"), "-o",
                                     in_folder("beside%d.jsonl", i), ON("0"),
                                     NULL };

        setenv("CUDA_VISIBLE_DEVICES", i == 0 ? "0" : "1", 1);
        pid[i] = spawn(argv, in_folder("stdout%d", i),
                       in_folder("stderr%d", i));
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(wait_for(pid[i], LIMIT_MS), 0);
        assert_same_answers(in_folder("beside%d.jsonl", i), &reference,
                            N_JOBS);
    }
}

static void
a_card_that_is_not_there_is_configuration(void **state)
{
    (void)state;
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("none.jsonl"), ON("2")), 78);
    assert_true(file_says(in_folder("stderr"), "engine.device"));
}

static void
a_card_that_is_too_small_says_what_was_missing(void **state)
{
    int rc;

    (void)state;
    setenv("NS_CUDASIM_MEMORY", "1M", 1);
    rc = RUN("run", in_folder("jobs.jsonl"), "-o", in_folder("small.jsonl"),
             ON("0"));
    unsetenv("NS_CUDASIM_MEMORY");
    assert_true(rc > 0);
    assert_true(file_says(in_folder("stderr"), "1 MiB"));
}

/* Sticky, as a card's is: the process ends with the reason and stores nothing
 * half; on a card that is well the run carries on to the same answers. */
static void
a_card_that_breaks_ends_the_run_and_the_next_one_carries_on(void **state)
{
    static const char *const faults[][2] = {
        { "after:700:cudaErrorECCUncorrectable", "ECC" },
        { "after:1500:cudaErrorIllegalAddress", "illegal memory access" },
        { "after:2500:cudaErrorUnknown", "unknown error" },
    };

    (void)state;
    for (int i = 0; i < 3; i++) {
        int rc;

        setenv("NS_CUDASIM_FAULT", faults[i][0], 1);
        rc = RUN("run", in_folder("jobs.jsonl"), "-o",
                 in_folder("broken.jsonl"), ON("0"));
        unsetenv("NS_CUDASIM_FAULT");
        if (rc <= 1)
            fail_msg("%s: exit status %d", faults[i][0], rc);
        if (!file_says(in_folder("stderr"), faults[i][1]))
            fail_msg("%s: the reason is not named", faults[i][0]);
    }
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("broken.jsonl"), ON("0")), 0);
    assert_same_answers(in_folder("broken.jsonl"), &reference, N_JOBS);
}

/* A checkpoint of codes: its products are of codes, and an answer is the same
 * alone and among others. */
static void
codes_are_multiplied_as_codes_alone_and_together(void **state)
{
    struct tiny_recipe recipe = tiny_recipe();
    struct answers together;
    char *model, at_a_time[] = "engine.max_sequences=1";

    (void)state;
    recipe.fp8 = true;
    model = tiny_make(&recipe);
    tiny_add_tokenizer(model);
    for (int i = 0; i < 2; i++) {
        at_a_time[sizeof(at_a_time) - 2] = i == 0 ? '4' : '1';
        assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                             in_folder("codes%d.jsonl", i), "-m", model,
                             "--set", "engine.backend=cuda", "--set",
                             "engine.pass_tokens=64", "--set",
                             "engine.kv_memory=4M", "--set", at_a_time), 0);
        assert_true(file_says(in_folder("codes%d.jsonl", i), "fp8-cuda"));
    }
    read_answers(in_folder("codes0.jsonl"), &together);
    assert_int_equal(together.n, N_JOBS);
    assert_same_answers(in_folder("codes1.jsonl"), &together, N_JOBS);
    answers_fini(&together);
    tiny_remove(model);
}

#define FORM "[a-f]{4}(-[0-9]{2}){1,2}"

static const char *const modes[] = { "ar", "hybrid", "diffusion" };

/* Answers of that form in `n` modes from the first on, all in one run. */
static void
run_forms(int first, int n, char *content[])
{
    FILE *file = fopen(in_folder("forms%d.jsonl", n), "w");
    struct answers answers;

    assert_non_null(file);
    for (int i = first; i < first + n; i++)
        fprintf(file,
                "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"a word\"}],\"seed\":7,"
                "\"max_tokens\":64,\"guided_regex\":\"" FORM "\","
                "\"nightshift\":{\"mode\":\"%s\",\"canvas_length\":32,"
                "\"max_denoising_steps\":6}}}\n",
                i, modes[i]);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(RUN("run", in_folder("forms%d.jsonl", n), "-o",
                         in_folder("forms%d.out", n), "--restart", ON("0")),
                     0);
    read_answers(in_folder("forms%d.out", n), &answers);
    assert_int_equal(answers.n, n);
    for (int i = 0; i < n; i++) {
        json_t *root = json_loads(answers.text[i + 1], 0, NULL);
        json_t *choice = json_array_get(json_object_get(root, "choices"), 0);

        content[i] = strdup(json_string_value(json_object_get(
            json_object_get(choice, "message"), "content")));
        assert_non_null(content[i]);
        json_decref(root);
    }
    answers_fini(&answers);
}

/* Masks and candidates on the card: the same among others and alone. */
static void
answers_keep_to_their_form_on_a_card(void **state)
{
    char *content[3], *alone;
    regex_t regex;

    (void)state;
    run_forms(0, 3, content);
    assert_int_equal(regcomp(&regex, "^" FORM "$", REG_EXTENDED), 0);
    for (int i = 0; i < 3; i++) {
        if (regexec(&regex, content[i], 0, NULL, 0) != 0)
            fail_msg("%s: %s", modes[i], content[i]);
        run_forms(i, 1, &alone);
        assert_string_equal(alone, content[i]);
        free(alone);
    }
    assert_string_equal(content[0], content[1]); /* hybrid equals ar */
    for (int i = 0; i < 3; i++)
        free(content[i]);
    regfree(&regex);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_card_gives_the_same_answers),
        cmocka_unit_test(a_process_a_card_runs_beside_the_other),
        cmocka_unit_test(answers_keep_to_their_form_on_a_card),
        cmocka_unit_test(codes_are_multiplied_as_codes_alone_and_together),
        cmocka_unit_test(a_card_that_is_not_there_is_configuration),
        cmocka_unit_test(a_card_that_is_too_small_says_what_was_missing),
        cmocka_unit_test(
            a_card_that_breaks_ends_the_run_and_the_next_one_carries_on),
    };
    int failed = cmocka_run_group_tests(tests, prepare, remove_folder);

    answers_fini(&reference);
    return failed;
}
