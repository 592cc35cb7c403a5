/* What validators turn down, and what they must let through. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/tool.h"
#include "daemon/validators.h"

enum { ROOM = 1 << 16 };

/* `unit` so often behind `head`. */
static char *
rounds(const char *head, const char *unit, int n)
{
    static char text[ROOM];
    size_t at = (size_t)snprintf(text, sizeof(text), "%s", head);

    for (int i = 0; i < n && at + strlen(unit) < sizeof(text); i++)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%s", unit);
    return text;
}

static bool
repeats(const char *text, bool cut)
{
    struct ns_reason reason = { "" };
    bool good = ns_validate_repetition(text, strlen(text), cut, &reason);

    assert_int_equal(!good, reason.text[0] != '\0');
    return !good;
}

static void
a_collapse_into_repetition_is_told_from_text_that_repeats(void **state)
{
    static const char table[] =
        "| city | open | clean |\n|------|------|-------|\n";
    static const char prose[] =
        "The report says that the pump failed on Monday, that it was mended "
        "on Tuesday, and that nobody was hurt. ";

    (void)state;
    assert_true(repeats(rounds(prose, "the ", 60), true));
    assert_true(repeats(rounds(prose, "a", 400), true));
    assert_true(repeats(rounds("", "and so on, ", 60), true));
    assert_true(repeats(rounds("", "and so on, ", 60), false));
    assert_true(repeats(rounds(prose, "0.0, ", 300), true));
    assert_true(repeats(rounds(prose, "\xe7\x9a\x84", 200), true));
    assert_true(repeats(
        "we we saw saw the the pump pump that that had had failed failed on "
        "on a a cold cold day day in in the the north north of of our our "
        "land land and and so so we we went went home home to to sleep sleep "
        "and and dream dream of of it it all all night night", false));

    /* Sentences that come back, and a run that something ends in order. */
    assert_true(repeats(rounds("So: ", prose, 5), true));
    assert_true(repeats(rounds("So: ", prose, 5), false));
    assert_true(repeats(rounds("{\"a\": \"", "na", 200), true));
    assert_true(repeats(strcat(rounds("{\"a\": \"", "na", 200), "\"}]\n```\n"),
                        true));
    assert_true(repeats(rounds("", "]", 300), true));
    assert_true(repeats(rounds(prose, "!", 300), true));

    assert_false(repeats("", true));
    assert_false(repeats("a", true));
    assert_false(repeats(rounds("So: ", prose, 4), true));
    assert_false(repeats(rounds(prose, prose, 2), false));
    assert_false(repeats(rounds(prose, "0, ", 300), true)); /* 900 of figures */
    assert_false(repeats(rounds(prose, "1 0 0\n", 160), true));
    assert_false(repeats(strcat(rounds("[", "0, ", 300), "0]\n"), false));
    assert_false(repeats(rounds(prose, "x x x o o o\n", 14), false));
    assert_false(repeats(rounds(
        "\xe4\xbc\x9a\xe8\xad\xb0\xe3\x81\xae\xe8\xa8\x98\xe9\x8c\xb2",
        "\xe3\x80\x82", 3), true));
    assert_false(repeats(prose, true));
    assert_false(repeats(rounds(prose, "-", 79), true));
    assert_false(repeats(rounds(table, "| yes | yes | yes |\n", 8), false));
    assert_false(repeats(rounds(table, "| yes | yes | yes |\n", 9), true));
    assert_false(repeats(rounds(prose, "0, ", 100), false)); /* less than half */
    assert_false(repeats("That that is, is; that that is not, is not; is "
                         "that it? It is.", false));
    /* Long, orderly and different in each line. */
    {
        static char list[ROOM];
        size_t at = 0;

        for (int i = 0; i < 400; i++)
            at += (size_t)snprintf(list + at, sizeof(list) - at,
                                   "  { \"id\": %d, \"value\": 0 },\n", i);
        assert_false(repeats(list, true));
    }
}

/* What people wrote, cut where a limit might have cut it. */
static void
texts_of_ours_are_no_collapse_wherever_they_are_cut(void **state)
{
    static const char *const paths[] = {
        "README.md", "docs/VALIDATORS.md", "daemon/validators.c",
        "daemon/metrics.c", "config/options.c", "connectors/schema.sql",
        "examples/demo-jobs.jsonl", "examples/demo-answers.jsonl",
        "daemon/http_page.html", "daemon/nightshift.1",
    };
    struct ns_reason reason;

    (void)state;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        static char text[ROOM];
        FILE *file = fopen(paths[i], "r");
        size_t length;

        assert_non_null(file);
        length = fread(text, 1, sizeof(text), file);
        fclose(file);
        assert_true(length > 1000);
        for (size_t n = 0; n <= length; n += 7)
            if (!ns_validate_repetition(text, n, true, &reason))
                fail_msg("%s, %zu bytes: %s", paths[i], n, reason.text);
    }
}

static bool
open_fence(const char *text)
{
    struct ns_reason reason;

    return !ns_validate_fence(text, strlen(text), &reason);
}

static void
a_fence_has_to_be_closed_by_one_of_its_kind(void **state)
{
    struct ns_reason reason;
    static const char open[] = "a\nb\n```python\nx = 1\n";

    (void)state;
    assert_true(open_fence(open));
    assert_false(ns_validate_fence(open, strlen(open), &reason));
    assert_non_null(strstr(reason.text, "line 3"));
    assert_true(open_fence("````\n```\n"));
    assert_true(open_fence("~~~\n```\n"));
    assert_true(open_fence("```c\nint x; ```\n"));
    assert_true(open_fence("```\n``` not yet\n"));
    assert_false(open_fence("```python\nx = 1\n```\n"));
    assert_false(open_fence("```python\nx = 1\n```"));
    assert_false(open_fence("   ~~~~ c\n```\n~~~~~~  \nand on"));
    assert_false(open_fence("no fence, `code` and ``` in a line\n"));
    assert_false(open_fence("    ``` is an indented line\n"));
    assert_false(open_fence("```one `line` of code```\n"));
    assert_false(open_fence(""));
}

static void
control_strings_leak_but_may_be_spoken_of(void **state)
{
    struct ns_tokenizer *tokenizer;
    struct ns_buf spoken_of;
    struct ns_reason reason;
    struct ns_error err;
    json_t *asked;

    (void)state;
    assert_int_equal(
        ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                          &tokenizer, &err), NS_OK);
#define LEAKS(text, spoken_of) \
    !ns_validate_control(text, strlen(text), spoken_of, tokenizer, &reason)
    assert_true(LEAKS("done.<turn|>\n<|turn>user\nmore", NULL));
    assert_non_null(strstr(reason.text, "<turn|>"));
    assert_true(LEAKS("<eos>", "<bos>\n"));
    assert_true(LEAKS("<<eos>", NULL));
    assert_true(LEAKS("say <|\"|> now", NULL));
    assert_false(LEAKS("what does <eos> do?", "<bos>\n<eos>\n"));
    assert_false(LEAKS("a < b and b > c, <b>bold</b>, <eos", NULL));
    assert_false(LEAKS("", NULL));
    /* Of texts as they are, not as JSON writes them. */
    asked = json_loads("[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
                       "\"text\":\"what is <|\\\"|>, or <eos> and <eos>?\"}]},"
                       "{\"<bos>\":1}]", 0, NULL);
    ns_buf_init(&spoken_of, 1000);
    ns_controls_of(asked, tokenizer, &spoken_of);
    ns_controls_of(NULL, tokenizer, &spoken_of);
    assert_string_equal(spoken_of.data, "<|\"|>\n<eos>\n");
    assert_false(LEAKS("say <|\"|> now", spoken_of.data));
    assert_true(LEAKS("say <bos> now", spoken_of.data));
    ns_buf_fini(&spoken_of);
    json_decref(asked);
#undef LEAKS
    ns_tokenizer_close(tokenizer);
}

static void
json_is_one_value_and_satisfies_its_schema(void **state)
{
    json_t *schema = json_loads("{\"type\":\"object\",\"required\":[\"a\"]}",
                                0, NULL);
    struct ns_reason reason;

    (void)state;
#define GOOD(text, schema) \
    ns_validate_json(text, strlen(text), schema, &reason)
    assert_true(GOOD(" {\"a\": [1, null]}\n", schema));
    assert_true(GOOD("3", NULL));
    assert_false(GOOD("{\"b\": 1}", schema));
    assert_non_null(strstr(reason.text, "required"));
    assert_false(GOOD("{\"a\": 1", NULL));
    assert_false(GOOD("{\"a\": 1} and more", NULL));
    assert_false(GOOD("```json\n{}\n```", NULL));
    assert_false(GOOD("", NULL));
#undef GOOD
    json_decref(schema);
}

static void
code_is_found_in_its_fences(void **state)
{
    static const char text[] = "Two:\n```py\na = 1\n```\n~~~c++\nint x;\n~~~\n"
                               "``` Python \nb = 2\n```\nand\n```python\nc";
    static const char *const parts[] = { "a = 1\n", "b = 2\n", "c" };
    static const size_t lines[] = { 3, 9, 13 };
    struct ns_code code;
    size_t at = 0;

    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_true(ns_next_code(text, strlen(text), "python|py", &at, &code));
        assert_int_equal(code.length, strlen(parts[i]));
        assert_memory_equal(code.text, parts[i], code.length);
        assert_int_equal(code.line, lines[i]);
    }
    assert_false(ns_next_code(text, strlen(text), "python|py", &at, &code));
    at = 0;
    assert_false(ns_next_code(text, strlen(text), "c|h", &at, &code));
    at = 0;
    assert_true(ns_next_code("int x;", 6, "c|h", &at, &code));
    assert_int_equal(code.length, 6);
    assert_false(ns_next_code("int x;", 6, "c|h", &at, &code));
    at = 0;
    assert_false(ns_next_code("", 0, "c|h", &at, &code));
    at = 0;
    assert_true(ns_next_code("```c", 4, "c|h", &at, &code)); /* cut there */
    assert_int_equal(code.length, 0);
    assert_false(ns_next_code("```c", 4, "c|h", &at, &code));
}

/* ---- tools ----------------------------------------------------------------- */

static const char python[] = "/usr/bin/python3", cc[] = "/usr/bin/cc";

static bool
parses(bool is_python, const char *code, char *says)
{
    static struct ns_tool_answer answer;
    enum ns_status status;
    struct ns_error err;
    bool good = is_python ? ns_tool_python(python, code, strlen(code), &answer,
                                           &status, &err)
                          : ns_tool_c(cc, code, strlen(code), &answer, &status,
                                      &err);

    if (status != NS_OK)
        fail_msg("%s", err.text);
    if (!good && says)
        strcpy(says, answer.says);
    return good;
}

static void
python_parses_or_says_where_it_does_not_and_nothing_runs(void **state)
{
    char says[NS_TOOL_SAYS + 1], path[] = "/tmp/nightshift-tool-XXXXXX";
    char code[256];
    char *deep = rounds("x = ", "(", 60000);
    static const char *const heavy[] = { "-", "not ", "1+", "a.b.", "lambda:",
                                         "[", "f'{" };

    (void)state;
    assert_true(parses(true, "def f(x):\n    return x + 1\n", NULL));
    assert_true(parses(true, "", NULL));
    assert_false(parses(true, "def f(x):\nreturn x\n", says));
    assert_non_null(strstr(says, "line 2"));
    assert_null(strchr(says, '\n'));
    assert_false(parses(true, "return 1", says));
    assert_false(parses(true, "x = '\xff'", says));
    assert_false(parses(true, "x = \xe2\x80\x9c", says));
    assert_non_null(strstr(says, "\xe2\x80\x9c"));
    assert_false(parses(true, "# coding: rot13\nx = 1\n", says));
    for (size_t i = 0; i < sizeof(heavy) / sizeof(heavy[0]); i++) {
        assert_false(parses(true, rounds("x = ", heavy[i], 9000), says));
        assert_null(strstr(says, "Traceback"));
    }
    assert_true(parses(true, "x = 9 ** 9 ** 9 ** 9\ny = 'a' * 10 ** 12\n",
                       NULL));
    assert_false(parses(true, deep, says));
    assert_int_equal(close(mkstemp(path)), 0);
    snprintf(code, sizeof(code), "import os\nos.unlink('%s')\n", path);
    assert_true(parses(true, code, NULL));
    assert_int_equal(unlink(path), 0); /* it was still there */
}

static void
c_parses_or_says_where_it_does_not_and_reads_no_file_of_ours(void **state)
{
    static const char *const bad[] = {
        "#include \"/etc/passwd\"\n",
        "#include </etc/passwd>\n",
        "  # include \"../../etc/passwd\"\n",
        "#inc\\\nlude \"/etc/passwd\"\n",
        "%:include \"/etc/passwd\"\n",
        "/* a */ #include \"/etc/passwd\"\n",
        "#/* a */include /* b */ \"/etc/passwd\"\n",
        "#define F \"/etc/passwd\"\n#include F\n",
        "#include_next </etc/passwd>\n",
        "#import \"/etc/passwd\"\n",
        "#embed \"/etc/passwd\"\n",
        "#pragma GCC dependency \"/etc/passwd\"\n",
        "#include </dev/stdin>\n",
        "#include",
        "#include \"etc/passwd\"\n", /* from its folder, / */
        "#include \"dev/zero\"\n",
        "#include <sys/../../../etc/passwd>\n",
        "#inc\\ \nlude \"/etc/passwd\"\n",
        "#inc\\\r\nlude \"/etc/passwd\"\n",
        "\\\n#\\\n\\\ninclude \"/etc/passwd\"\n",
        "\xef\xbb\xbf#include \"/etc/passwd\"\n",
        "int x;\r#include \"/etc/passwd\"\n",
        /* Where a comment seems to begin, and does not. */
        "// \\\n/*\n#include \"/etc/passwd\"\n//*/\n",
        "char *s = R\"(\n/* )\";\n#include \"/etc/passwd\"\n/* */\n",
        "/* a *\\\n/#include \"/etc/passwd\"\n",
        "/*\n*//**/#/**//*\n*/include \"/etc/passwd\"\n",
        "%\\\n:include \"/etc/passwd\"\n",
        "#/**/pragma/**/GCC dependency \"/etc/passwd\"\n",
    };
    char says[NS_TOOL_SAYS + 1];

    (void)state;
    assert_true(parses(false, "#include <stdio.h>\n#include <sys/types.h>\n"
                              "int main(void) { puts(\"#include F\"); }\n",
                       NULL));
    assert_false(parses(false, "int main(void) { return 0;\n", says));
    assert_non_null(strstr(says, "error"));
    assert_null(strchr(says, '\n'));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (parses(false, bad[i], says))
            fail_msg("%s", bad[i]);
        assert_null(strstr(says, "root"));
        assert_null(strstr(says, ":1:"));
    }
    /* Of another file's words nothing is passed on. */
    assert_false(parses(false, "int x;\n#line 1 \"/etc/passwd\"\nroot y;\n",
                        says));
    assert_null(strstr(says, "root"));
    assert_true(parses(false, "#pragma GCC diagnostic push\n"
                              "#include \"stdio.h\"\n#if 1 // # include\n"
                              "#endif\n%:define N 1\nint x; /* # */\n",
                       NULL));
    /* Depth, which a compiler answers with its own death. */
    assert_false(parses(false, rounds("int x = ", "(", 60000), says));
    assert_false(parses(false, rounds("int x = ", "{", 60000), says));
    /* Much work from little text. */
    assert_false(parses(false,
                        "#define A(x) x x x x x x x x x x\n"
                        "#define B(x) A(A(A(x)))\n#define C(x) B(B(x))\n"
                        "int y[] = { C(C(1,)) };\n", says));
}

static void
run_script(const char *script, int exit_status)
{
    const char *const argv[] = { python, "-I", "-S", "-c", script, NULL };
    struct ns_tool_answer answer;
    struct ns_error err;

    assert_int_equal(ns_tool_run(argv, "", 0, &answer, &err), NS_OK);
    if (answer.exit_status != exit_status)
        fail_msg("%s: %d, %s", script, answer.exit_status, answer.says);
}

static void
a_tool_is_held_to_its_limits(void **state)
{
    static const struct {
        const char *script;
        int status;
    } tries[] = {
        { "import sys; sys.exit(7)", 7 },
        { "import socket\ntry:\n socket.socket()\nexcept PermissionError:\n"
          " raise SystemExit(3)", 3 },
        { "import os\ntry:\n os.kill(os.getppid(), 9)\nexcept "
          "PermissionError:\n raise SystemExit(4)", 4 },
        { "import os\ntry:\n f = os.open('/tmp/nightshift-tool-wrote', os.O_CREAT | "
          "os.O_WRONLY)\n os.write(f, b'x')\nexcept OSError:\n "
          "raise SystemExit(5)", 5 },
        { "import os\nraise SystemExit(6 if not os.environ.get('HOME') and "
          "os.getcwd() == '/' else 0)", 6 },
        { "x = bytearray(2 << 30)", 1 },
        { "import os\nn = 0\nfor f in range(64):\n try:\n  os.fstat(f)\n"
          "  n += 1\n except OSError:\n  pass\nraise SystemExit(8 if n == 3 "
          "else 0)", 8 },
        { "while True: pass", -1 },
        { "import os\ntry:\n os.fork()\nexcept PermissionError:\n os._exit(9)",
          9 },
        { "import threading\ntry:\n threading.Thread(target=id, args=(1,))"
          ".start()\nexcept RuntimeError:\n raise SystemExit(10)", 10 },
        { "import resource, os\ntry:\n resource.prlimit(os.getppid(), "
          "resource.RLIMIT_CPU)\nexcept PermissionError:\n "
          "raise SystemExit(11)", 11 },
        { "import signal\ntry:\n signal.raise_signal(15)\nexcept "
          "PermissionError:\n raise SystemExit(12)", 12 },
        { "import os, sys, time\nsys.stdout.close()\nos.close(1)\nos.close(2)"
          "\ntime.sleep(100)", -1 },
    }, of_files[] = {
        { "try:\n open('/etc/passwd')\nexcept PermissionError:\n "
          "raise SystemExit(13)", 13 },
        { "import os\ntry:\n open('/proc/%d/environ' % os.getppid())\nexcept "
          "PermissionError:\n raise SystemExit(14)", 14 },
        { "import os\ntry:\n os.open('/tmp/nightshift-tool-made', os.O_CREAT | "
          "os.O_WRONLY)\nexcept PermissionError:\n raise SystemExit(15)", 15 },
        { "import os\ntry:\n os.listdir('/home')\nexcept PermissionError:\n "
          "raise SystemExit(16)", 16 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(tries) / sizeof(tries[0]); i++)
        run_script(tries[i].script, tries[i].status);
    unlink("/tmp/nightshift-tool-wrote");
    for (size_t i = 0; i < sizeof(of_files) / sizeof(of_files[0]); i++)
        if (ns_tool_fences_files())
            run_script(of_files[i].script, of_files[i].status);
}

static void
a_tool_that_is_not_there_or_is_none_is_said(void **state)
{
    static const char elsewhere[] = "/tmp/nightshift-tool-python";
    const char *const argv[] = { "/nowhere/at/all", NULL };
    char command[100];
    struct ns_tool_answer answer;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_tool_run(argv, "", 0, &answer, &err), NS_RETRY);
    assert_non_null(strstr(err.text, "/nowhere/at/all"));
    assert_int_equal(ns_tool_check("/nowhere/at/all", "validators.cc", &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "validators.cc"));
    assert_int_equal(ns_tool_check("cc", "validators.cc", &err), NS_REJECT);
    assert_int_equal(ns_tool_check(cc, "validators.cc", &err), NS_OK);
    assert_int_equal(ns_tool_try_python(python, &err), NS_OK);
    assert_int_equal(ns_tool_try_c(cc, &err), NS_OK);
    /* One that says no to all, one that says yes, one of the other kind. */
    assert_int_equal(ns_tool_try_python("/bin/false", &err), NS_REJECT);
    assert_non_null(strstr(err.text, "validators.python"));
    assert_int_equal(ns_tool_try_python("/bin/true", &err), NS_REJECT);
    assert_int_equal(ns_tool_try_c("/bin/false", &err), NS_REJECT);
    assert_int_equal(ns_tool_try_c("/bin/true", &err), NS_REJECT);
    assert_int_equal(ns_tool_try_c(python, &err), NS_REJECT);
    assert_int_equal(ns_tool_try_python(cc, &err), NS_REJECT);
    /* One that lies where no programs lie. */
    snprintf(command, sizeof(command), "cp %s %s", python, elsewhere);
    assert_int_equal(system(command), 0);
    assert_int_equal(ns_tool_try_python(elsewhere, &err), NS_OK);
    unlink(elsewhere);
}

int
main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            a_collapse_into_repetition_is_told_from_text_that_repeats),
        cmocka_unit_test(texts_of_ours_are_no_collapse_wherever_they_are_cut),
        cmocka_unit_test(a_fence_has_to_be_closed_by_one_of_its_kind),
        cmocka_unit_test(control_strings_leak_but_may_be_spoken_of),
        cmocka_unit_test(json_is_one_value_and_satisfies_its_schema),
        cmocka_unit_test(code_is_found_in_its_fences),
        cmocka_unit_test(
            python_parses_or_says_where_it_does_not_and_nothing_runs),
        cmocka_unit_test(
            c_parses_or_says_where_it_does_not_and_reads_no_file_of_ours),
        cmocka_unit_test(a_tool_is_held_to_its_limits),
        cmocka_unit_test(a_tool_that_is_not_there_or_is_none_is_said),
    };

    if (ns_tool_is_helper(argc, argv))
        return ns_tool_main(argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
