/* docs/FAULTS.md against the tests: no row without a test that is run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <ctype.h>
#include <glob.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 50, LONGEST = 200 };

static char *
slurp(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = calloc(1, 1 << 20);

    if (!file)
        fail_msg("%s is not there: run from the root", path);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, file) < (1 << 20) - 1);
    fclose(file);
    return text;
}

/* Whether the word stands in a text, and is not a part of a longer one. */
static bool
holds_word(const char *text, const char *before, const char *word)
{
    char sought[2 * LONGEST];
    size_t n = (size_t)snprintf(sought, sizeof(sought), "%s%s", before, word);

    for (; (text = strstr(text, sought)) != NULL; text++)
        if (!isalnum((unsigned char)text[n]) && text[n] != '_')
            return true;
    return false;
}

/* Defined in that program, and on its list. */
static bool
is_run(const char *program, const char *name)
{
    char pattern[2 * LONGEST], *text;
    bool runs;
    glob_t found;

    snprintf(pattern, sizeof(pattern), "tests/*/%s.c", program);
    if (glob(pattern, 0, NULL, &found) != 0 || found.gl_pathc != 1)
        fail_msg("%s is not one test program", program);
    text = slurp(found.gl_pathv[0]);
    globfree(&found);
    runs = holds_word(text, "\n", name) &&
           (holds_word(text, "TEST(", name) ||
            holds_word(text, "unit_test(", name) ||
            holds_word(text, "unit_test(\n            ", name) ||
            holds_word(text, "unit_test_setup_teardown(", name) ||
            holds_word(text, "unit_test_setup_teardown(\n            ", name));
    free(text);
    return runs;
}

/* Each "test_x `name`" up to the end; how many there were. */
static int
check_names(const char *from, const char *to)
{
    char program[LONGEST], name[LONGEST];
    int n = 0;

    for (const char *p = from; (p = strstr(p, "test_")) != NULL && p < to;
         p++) {
        if (sscanf(p, "test_%150[a-z_]%*[ \n]`%150[a-z0-9_]`", program,
                   name) != 2)
            fail_msg("no name of a test: %.60s", p);
        memmove(program + 5, program, strlen(program) + 1);
        memcpy(program, "test_", 5);
        if (!is_run(program, name))
            fail_msg("%s does not run %s", program, name);
        n++;
    }
    return n;
}

static void
each_row_of_the_matrix_names_tests_that_are_run(void **state)
{
    char *text = slurp("docs/FAULTS.md"), *line = strstr(text, "| 1 |");
    char label[16];

    (void)state;
    assert_non_null(line);
    for (int row = 1; row <= ROWS; row++) {
        char *end = strchr(line, '\n');
        int n;

        assert_non_null(end);
        snprintf(label, sizeof(label), "| %d |", row);
        if (strncmp(line, label, strlen(label)) != 0)
            fail_msg("row %d is not where it should be: %.40s", row, line);
        n = check_names(line, end);
        if (n == 0)
            fail_msg("row %d names no test", row);
        line = end + 1;
    }
    assert_int_not_equal(*line, '|');
    assert_true(check_names(line, text + strlen(text)) >= 2); /* controls */
    free(text);
}

static void
a_name_that_is_not_run_is_noticed(void **state)
{
    (void)state;
    assert_true(is_run("test_matrix", "a_name_that_is_not_run_is_noticed"));
    assert_false(is_run("test_matrix", "a_name_that_is_not"));
    assert_false(is_run("test_matrix", "is_run"));
    assert_false(is_run("test_jobstate", "a_name_that_is_not_run_is_noticed"));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row_of_the_matrix_names_tests_that_are_run),
        cmocka_unit_test(a_name_that_is_not_run_is_noticed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
