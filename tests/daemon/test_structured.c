/* nightshift(1) on jobs whose answers must have a form. The model knows nothing:
 * what comes out is noise, and noise of the form that was asked for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <regex.h>
#include <stdio.h>

#include "engine/schema.h"
#include "tests/daemon/program.h"

#define SCHEMA                                                                \
    "{\"type\":\"object\",\"properties\":{\"city\":{\"enum\":[\"Paris\","     \
    "\"S\\u00e3o Paulo\"]},\"n\":{\"type\":\"integer\",\"minimum\":-5,"       \
    "\"maximum\":99},\"tags\":{\"type\":\"array\",\"items\":{\"type\":"       \
    "\"string\",\"maxLength\":4},\"maxItems\":3}},\"required\":[\"city\","    \
    "\"n\",\"tags\"],\"additionalProperties\":false}"
#define PATTERN "[a-f]{4}(-[0-9]{2}){1,3}"

static const char *const modes[] = { "diffusion", "ar", "hybrid" };

enum { N_FORMS = 4, N_MODES = 3, N_JOBS = N_FORMS * N_MODES };

static const char *const forms[N_FORMS] = {
    "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":"
    "\"x\",\"strict\":true,\"schema\":" SCHEMA "}}",
    "\"response_format\":{\"type\":\"regex\",\"regex\":\"" PATTERN "\"}",
    "\"response_format\":{\"type\":\"choice\",\"choice\":[\"yes\",\"no\"]}",
    "\"guided_json\":" SCHEMA,
};

static void
write_forms(const char *path, const char *more)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < N_JOBS; i++)
        fprintf(file,
                "{\"custom_id\":\"%d\",\"body\":{\"messages\":[{\"role\":"
                "\"user\",\"content\":\"number %d\"}],\"max_tokens\":512,"
                "\"temperature\":%s,%s,\"nightshift\":{\"mode\":\"%s\","
                "\"canvas_length\":32}}}\n",
                i, i, i % 2 ? "1" : "0", forms[i / N_MODES],
                modes[i % N_MODES]);
    fputs(more, file);
    assert_int_equal(fclose(file), 0);
}

static void
assert_form(int form, const char *content)
{
    struct ns_error err;
    json_t *schema, *instance;
    regex_t regex;

    switch (form) {
    case 1:
        assert_int_equal(regcomp(&regex, "^" PATTERN "$", REG_EXTENDED), 0);
        if (regexec(&regex, content, 0, NULL, 0) != 0)
            fail_msg("%s", content);
        regfree(&regex);
        return;
    case 2:
        assert_true(!strcmp(content, "yes") || !strcmp(content, "no"));
        return;
    default:
        schema = json_loads(SCHEMA, 0, NULL);
        instance = json_loads(content, 0, NULL);
        if (!instance || ns_schema_check(schema, instance, &err) != NS_OK)
            fail_msg("%s", content);
        json_decref(schema);
        json_decref(instance);
    }
}

static void
answers_have_their_form_in_every_mode(void **state)
{
    struct answers answers;

    (void)state;
    write_forms(in_folder("jobs.jsonl"), "");
    assert_int_equal(RUN("validate", in_folder("jobs.jsonl"), "-m",
                         program_model), 0);
    assert_int_equal(RUN("run", in_folder("jobs.jsonl"), "-o",
                         in_folder("out.jsonl"), "-m", program_model), 0);
    read_answers(in_folder("out.jsonl"), &answers);
    assert_int_equal(answers.n, N_JOBS);
    for (int i = 0; i < N_JOBS; i++) {
        json_t *kept = json_loads(answers.text[i + 1], 0, NULL);
        json_t *choice = json_array_get(json_object_get(kept, "choices"), 0);

        assert_string_equal(
            json_string_value(json_object_get(choice, "finish_reason")),
            "stop");
        assert_form(i / N_MODES,
                    json_string_value(json_object_get(
                        json_object_get(choice, "message"), "content")));
        json_decref(kept);
    }
    answers_fini(&answers);
}

/* What can not be held to is refused beforehand, by name; what did not come to
 * its end fails, and what there is of it stands beside. Neither costs others. */
static void
a_form_that_can_not_be_had_costs_its_own_job(void **state)
{
    static const char more[] =
        "{\"custom_id\":\"unique\",\"body\":{\"messages\":[{\"role\":\"user\","
        "\"content\":\"x\"}],\"guided_json\":{\"type\":\"array\","
        "\"uniqueItems\":true}}}\n"
        "{\"custom_id\":\"look\",\"body\":{\"messages\":[{\"role\":\"user\","
        "\"content\":\"x\"}],\"guided_regex\":\"(?=a)b\"}}\n"
        "{\"custom_id\":\"short\",\"body\":{\"messages\":[{\"role\":\"user\","
        "\"content\":\"x\"}],\"max_tokens\":5,\"guided_regex\":\"[a-z]{90}\","
        "\"nightshift\":{\"mode\":\"ar\"}}}\n";
    static const char *const codes[] = { "unsupported", "unsupported",
                                         "grammar_incomplete" };
    static const char *const named[] = { "uniqueItems", "body.guided_regex",
                                         "max_tokens" };
    struct answers answers;
    char *said;

    (void)state;
    write_forms(in_folder("more.jsonl"), more);
    assert_int_equal(RUN("validate", in_folder("more.jsonl"), "-m",
                         program_model), 1);
    said = slurp(in_folder("stdout"));
    assert_non_null(strstr(said, "uniqueItems"));
    assert_non_null(strstr(said, "body.guided_regex"));
    free(said);
    assert_int_equal(RUN("run", in_folder("more.jsonl"), "-o",
                         in_folder("more.out"), "-m", program_model), 1);
    read_answers(in_folder("more.out"), &answers);
    assert_int_equal(answers.n, N_JOBS + 3);
    for (int i = 0; i < 3; i++) {
        json_t *kept = json_loads(answers.text[N_JOBS + 1 + i], 0, NULL);
        json_t *error = json_object_get(kept, "error");

        assert_string_equal(json_string_value(json_object_get(error, "code")),
                            codes[i]);
        assert_non_null(strstr(
            json_string_value(json_object_get(error, "message")), named[i]));
        json_decref(kept);
    }
    answers_fini(&answers);
    said = slurp(in_folder("more.out"));
    assert_non_null(strstr(said, "\"detail\":\""));
    free(said);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_have_their_form_in_every_mode),
        cmocka_unit_test(a_form_that_can_not_be_had_costs_its_own_job),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
