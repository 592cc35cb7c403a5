#include <regex.h>
#include <stdio.h>

#include "tests/engine/machine.h"
#include "tests/fault.h"

static struct ns_automaton *
regex(const char *pattern)
{
    struct ns_grammar *grammar = NULL;
    struct ns_error err;

    if (ns_grammar_regex(pattern, strlen(pattern), &grammar, &err) != NS_OK)
        fail_msg("%s: %s", pattern, err.text);
    return machine_over(grammar);
}

static void
a_pattern_takes_what_it_says_and_nothing_else(void **state)
{
    static const struct {
        const char *pattern, *yes[5], *no[5];
    } cases[] = {
        { "", { "" }, { "a" } },
        { "abc", { "abc" }, { "", "ab", "abcd", "xabc", "ABC" } },
        { "^abc$", { "abc" }, { "^abc$", "ab" } },
        { "a|bc|", { "a", "bc", "" }, { "b", "abc" } },
        { "^a|b$", { "a", "b" }, { "ab", "" } },
        { "(?:ab)+", { "ab", "abab" }, { "", "aba" } },
        { "(?<year>[0-9]{4})-(0[1-9]|1[0-2])",
          { "2024-01", "1999-12" },
          { "2024-00", "2024-13", "24-01", "2024-1" } },
        { "a{2}", { "aa" }, { "a", "aaa" } },
        { "a{2,}", { "aa", "aaaaa" }, { "a", "" } },
        { "a{0,2}?b", { "b", "ab", "aab" }, { "aaab", "a" } },
        { "a{0}", { "" }, { "a" } },
        { "a{,2}", { "a{,2}" }, { "", "aa" } },
        { "x{", { "x{" }, { "x" } },
        { "a*?b+?c??", { "b", "aabbc", "bc" }, { "a", "c" } },
        { "(a*)*b", { "b", "aaab" }, { "a", "ba" } },
        { "(a*|b)*", { "", "abba" }, { "c" } },
        { "[a-cx-]+", { "abc", "x-" }, { "d", "y", "" } },
        { "[^a-c]", { "d", "\n", "\xc3\xa9", "\xf0\x9f\x98\x80" },
          { "a", "c", "dd", "\xc3", "\xa9" } },
        { "[]a]", { NULL }, { "", "a", "]a]" } },
        { "[^]", { "a", "]", "\n" }, { "" } },
        { "[\\]\\-a]", { "]", "-", "a" }, { "\\", "b" } },
        { "[\\w.]+@\\w+", { "a.b@c" }, { "@c", "a b@c" } },
        { "\\d\\D\\s\\S\\w\\W", { "1a a_-", "0\xc3\xa9\xe2\x80\xa8""bz " },
          { "aa a_-", "1a  _-" } },
        { ".", { "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80" },
          { "", "\n", "\r", "\xe2\x80\xa8", "ab" } },
        { "\\.\\*\\/\\$\\^\\\\", { ".*/$^\\" }, { "a" } },
        { "\\t\\n\\r\\f\\v\\x41\\u0042\\u{1f600}\\ud83d\\ude00\\cA",
          { "\t\n\r\f\v""AB\xf0\x9f\x98\x80\xf0\x9f\x98\x80\x01" }, { "" } },
        { "\xc3\xa4+[\xc3\xb6-\xc3\xbc]", { "\xc3\xa4\xc3\xb6",
          "\xc3\xa4\xc3\xa4\xc3\xbc" }, { "\xc3\xa4", "a\xc3\xb6" } },
        { "[\\u0000-\\u{10ffff}]", { "a", "\xef\xbf\xbf", "\xee\x80\x80" },
          { "\xed\xa0\x80", "\xed\xbf\xbf", "\xf4\x90\x80\x80", "\xc0\x80",
            "\xff" } },
        { "\\p{Lu}\\p{Letter}*", { "A", "\xc3\x84\xc3\xb6", "\xce\xa9z" },
          { "", "a", "A1", "\xc3\xa4" } },
        { "[\\p{Script=Greek}\\d]+", { "\xce\xb1""1" }, { "a", "" } },
        { "\\P{L}[^\\p{gc=Nd}]", { "1a", "-\xc3\xa4" }, { "a1", "11", "aa" } },
        { "[\\u0900-\\u{1f000}]", { "\xe0\xa4\x80", "\xf0\x9f\x80\x80" },
          { "\xe0\xa3\xbf", "\xf0\x9f\x80\x81", "a" } },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct ns_automaton *a = NULL;
        struct ns_grammar *grammar;
        struct ns_error err;

        if (!cases[i].yes[0]) { /* nothing matches it */
            assert_int_equal(ns_grammar_regex(cases[i].pattern,
                                              strlen(cases[i].pattern),
                                              &grammar, &err), NS_REJECT);
            assert_string_equal(err.code, "bad_param");
            continue;
        }
        a = regex(cases[i].pattern);
        for (size_t k = 0; k < 5 && cases[i].yes[k]; k++)
            if (!machine_accepts(a, cases[i].yes[k]))
                fail_msg("/%s/ refuses \"%s\"", cases[i].pattern,
                         cases[i].yes[k]);
        for (size_t k = 0; k < 5 && cases[i].no[k]; k++)
            if (machine_accepts(a, cases[i].no[k]))
                fail_msg("/%s/ takes \"%s\"", cases[i].pattern,
                         cases[i].no[k]);
        machine_finish(a, ns_automaton_start(a));
        ns_automaton_destroy(a);
    }
}

static void
a_pattern_that_is_none_is_refused_with_the_reason(void **state)
{
    static const struct {
        const char *pattern, *code, *why;
    } cases[] = {
        { "(", "bad_param", "byte 1: a group is not closed" },
        { ")", "bad_param", "byte 0: a group is closed that" },
        { "a)b", "bad_param", "byte 1: a group is closed that" },
        { "[a", "bad_param", "byte 2: a class is not closed" },
        { "[b-a]", "bad_param", "order" },
        { "[a-\\d]", "bad_param", "order" },
        { "a{3,2}", "bad_param", "order" },
        { "*", "bad_param", "nothing to repeat" },
        { "a**", "bad_param", "nothing to repeat" },
        { "a|+", "bad_param", "nothing to repeat" },
        { "^*", "bad_param", "an anchor is repeated" },
        { "\\", "bad_param", "backslash" },
        { "\\a", "bad_param", "no meaning" },
        { "\\x4", "bad_param", "hex" },
        { "\\u00g0", "bad_param", "hex" },
        { "\\u{110000}", "bad_param", "code point" },
        { "\\u{}", "bad_param", "code point" },
        { "\\ud800", "bad_param", "surrogate" },
        { "\\udc00\\ud800", "bad_param", "surrogate" },
        { "\\c1", "bad_param", "letter" },
        { "(?<a", "bad_param", "name" },
        { "\xff", "bad_param", "UTF-8" },
        { "(?=a)", "unsupported", "look-around" },
        { "(?!a)", "unsupported", "look-around" },
        { "(?<=a)b", "unsupported", "look-around" },
        { "(?<!a)b", "unsupported", "look-around" },
        { "(?i)a", "unsupported", "group of this kind" },
        { "(a)\\1", "unsupported", "reference back" },
        { "(?<n>a)\\k<n>", "unsupported", "reference back" },
        { "\\ba", "unsupported", "word boundary" },
        { "\\07", "unsupported", "octal" },
        { "a^b", "unsupported", "^ or $ inside" },
        { "a$b", "unsupported", "^ or $ inside" },
        { "(^a)*", "unsupported", "^ or $ inside" },
        { "\\p{Nope}", "unsupported", "not known" },
        { "\\pL", "bad_param", "braces" },
        { "\\p{L", "bad_param", "braces" },
        { "[a-\\p{L}]", "bad_param", "order" },
        { "\\p{L}\\p{L}\\p{L}\\p{L}\\p{L}\\p{L}\\p{L}\\p{L}\\p{L}",
          "grammar_limit", "more than 8" },
        { "a{65537}", "grammar_limit", "65536" },
        { "a{1,99999999999999999999}", "grammar_limit", "65536" },
        { "(a{1000}){1000}", "grammar_limit", "262144 instructions" },
        { "(((){1000}){1000}){1000}", "grammar_limit", "4194304 steps" },
    };
    struct ns_grammar *grammar;
    struct ns_error err;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const char *pattern = cases[i].pattern;

        if (ns_grammar_regex(pattern, strlen(pattern), &grammar, &err) !=
            NS_REJECT)
            fail_msg("/%s/ was not refused", pattern);
        if (strcmp(err.code, cases[i].code) || !strstr(err.text, cases[i].why))
            fail_msg("/%s/: %s: %s", pattern, err.code, err.text);
    }
    assert_int_equal(ns_grammar_regex("a\0b", 3, &grammar, &err), NS_REJECT);
}

static void
a_pattern_is_bounded_in_length_and_depth(void **state)
{
    char *text = malloc(NS_REGEX_BYTES + 2);
    struct ns_grammar *grammar;
    struct ns_error err;

    (void)state;
    assert_non_null(text);
    memset(text, 'a', NS_REGEX_BYTES + 1);
    assert_int_equal(ns_grammar_regex(text, NS_REGEX_BYTES, &grammar, &err),
                     NS_OK);
    ns_grammar_destroy(grammar);
    assert_int_equal(ns_grammar_regex(text, NS_REGEX_BYTES + 1, &grammar,
                                      &err), NS_REJECT);
    assert_string_equal(err.code, "grammar_limit");
    assert_non_null(strstr(err.text, "65537 bytes, limit 65536"));
    for (size_t depth = NS_REGEX_DEPTH; depth <= NS_REGEX_DEPTH + 1; depth++) {
        memset(text, '(', depth);
        text[depth] = 'a';
        memset(text + depth + 1, ')', depth);
        assert_int_equal(ns_grammar_regex(text, 2 * depth + 1, &grammar, &err),
                         depth > NS_REGEX_DEPTH ? NS_REJECT : NS_OK);
        if (depth <= NS_REGEX_DEPTH)
            ns_grammar_destroy(grammar);
    }
    assert_string_equal(err.code, "grammar_limit");
    /* One that starts 65,534 groups must not take a stack of that depth. */
    memset(text, '(', NS_REGEX_BYTES);
    assert_int_equal(ns_grammar_regex(text, NS_REGEX_BYTES, &grammar, &err),
                     NS_REJECT);
    free(text);
}

/* --- against the C library's own expressions */

static uint64_t seed;

static uint32_t
draw(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static void
add(char *text, const char *more)
{
    assert_true(strlen(text) + strlen(more) < 4096);
    strcat(text, more);
}

static void
random_pattern(char *text, unsigned depth)
{
    static const char *const atom[] = { "a", "b", "[ab]", "[^a]", ".", "c" };
    static const char *const times[] = { "*", "+", "?", "{2}", "{1,2}",
                                         "{0,1}", "{2,}" };
    uint32_t n_terms = 1 + draw(3), n_alternatives = 1 + draw(2);

    for (uint32_t i = 0; i < n_alternatives; i++) {
        if (i > 0)
            add(text, "|");
        for (uint32_t k = 0; k < n_terms; k++) {
            if (depth > 0 && draw(3) == 0) {
                add(text, "(");
                random_pattern(text, depth - 1);
                add(text, ")");
            } else {
                add(text, atom[draw(6)]);
            }
            if (draw(2))
                add(text, times[draw(7)]);
        }
    }
}

static void
random_patterns_take_what_the_C_library_takes(void **state)
{
    char pattern[4096], whole[4200], text[8];
    unsigned taken = 0, refused = 0;

    (void)state;
    seed = 1;
    for (int i = 0; i < 300; i++) {
        struct ns_automaton *a;
        regex_t posix;

        pattern[0] = '\0';
        random_pattern(pattern, 2);
        snprintf(whole, sizeof(whole), "^(%s)$", pattern);
        assert_int_equal(regcomp(&posix, whole, REG_EXTENDED | REG_NOSUB), 0);
        a = regex(pattern);
        for (uint32_t number = 0; number < 3 * 3 * 3 * 3 * 3 * 4; number++) {
            uint32_t left = number / 4, length = 2 + number % 4;
            bool yes;

            for (uint32_t k = 0; k < length; k++, left /= 3)
                text[k] = (char)('a' + left % 3);
            text[length] = '\0';
            yes = machine_accepts(a, text);
            if (yes != (regexec(&posix, text, 0, NULL, 0) == 0))
                fail_msg("/%s/ and \"%s\"", pattern, text);
            taken += yes;
            refused += !yes;
        }
        regfree(&posix);
        ns_automaton_destroy(a);
    }
    assert_true(taken > 10000 && refused > 10000);
}

/* --- choices */

static void
a_choice_takes_each_text_as_a_whole(void **state)
{
    static const char *const choice[] = { "yes", "no", "yes and no", "y",
                                          "\xc3\xa4", "\xc3\xb6", "no" };
    static const char *const other[] = { "", "ye", "yes ", "yes and n",
                                         "\xc3", "nono", "\xc3\xbc" };
    struct ns_grammar *grammar;
    struct ns_automaton *a;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_grammar_choice(choice, 7, &grammar, &err), NS_OK);
    a = machine_over(grammar);
    for (size_t i = 0; i < 7; i++) {
        assert_true(machine_accepts(a, choice[i]));
        assert_false(machine_accepts(a, other[i]));
    }
    assert_true(ns_automaton_ended(a, machine_run(a, "no", 2)));
    assert_false(ns_automaton_ended(a, machine_run(a, "yes", 3)));
    assert_true(ns_automaton_ended(a, machine_run(a, "yes and no", 10)));
    ns_automaton_destroy(a);
}

static void
choices_that_are_none_are_refused(void **state)
{
    const char *const empty[] = { "a", "" }, *const torn[] = { "\xc3" };
    struct ns_grammar *grammar;
    struct ns_error err;
    char *huge = malloc(NS_CHOICE_BYTES + 2);
    const char *const two[] = { "a", huge };

    (void)state;
    assert_non_null(huge);
    memset(huge, 'x', NS_CHOICE_BYTES);
    huge[NS_CHOICE_BYTES] = '\0';
    assert_int_equal(ns_grammar_choice(NULL, 0, &grammar, &err), NS_REJECT);
    assert_string_equal(err.code, "bad_param");
    assert_int_equal(ns_grammar_choice(empty, 2, &grammar, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "choice 1 is empty"));
    assert_int_equal(ns_grammar_choice(torn, 1, &grammar, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "choice 0 is not UTF-8"));
    assert_int_equal(ns_grammar_choice(two, 2, &grammar, &err), NS_REJECT);
    assert_non_null(strstr(err.text, "1048576 bytes"));
    assert_string_equal(err.code, "grammar_limit");
    /* Within that limit the program has its own. */
    assert_int_equal(ns_grammar_choice(two + 1, 1, &grammar, &err),
                     NS_REJECT);
    assert_non_null(strstr(err.text, "262144 instructions"));
    free(huge);
}

static void
ten_thousand_choices_share_their_ends(void **state)
{
    static char text[10000][24];
    static const char *choice[10000];
    struct ns_grammar *grammar;
    struct ns_automaton *a;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 10000; i++) {
        snprintf(text[i], sizeof(text[i]), "item %d of the list", i * 7919);
        choice[i] = text[i];
    }
    assert_int_equal(ns_grammar_choice(choice, 10000, &grammar, &err), NS_OK);
    a = machine_over(grammar);
    for (int i = 0; i < 10000; i++)
        assert_true(ns_automaton_ended(
            a, machine_run(a, text[i], strlen(text[i]))));
    assert_false(machine_accepts(a, "item 1 of the list"));
    assert_true(ns_automaton_n_states(a) < 30000);
    ns_automaton_destroy(a);
}

static void
grammars_that_accept_by_the_same_program_have_one_hash(void **state)
{
    static const char *const pattern[] = { "ab|ac", "(?:ab)|(ac)", "a[bc]",
                                           "ab|ad" };
    unsigned char hash[4][16];

    (void)state;
    for (int i = 0; i < 4; i++) {
        struct ns_grammar *grammar;
        struct ns_error err;

        assert_int_equal(ns_grammar_regex(pattern[i], strlen(pattern[i]),
                                          &grammar, &err), NS_OK);
        ns_grammar_hash(grammar, hash[i]);
        ns_grammar_destroy(grammar);
    }
    assert_memory_equal(hash[0], hash[1], 16);
    assert_memory_not_equal(hash[0], hash[2], 16);
    assert_memory_not_equal(hash[0], hash[3], 16);
}

static void
memory_that_runs_out_is_fatal_wherever_it_does(void **state)
{
    static const char *const choice[] = { "yes", "no" };
    static const char pattern[] = "(a[^b]|\\w{2,70})+";
    struct ns_grammar *grammar;
    struct ns_error err;
    enum ns_status status;

    (void)state;
    for (int n = 0;; n++) {
        grammar = NULL;
        fault_arm(n);
        status = ns_grammar_regex(pattern, strlen(pattern), &grammar, &err);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
        assert_null(grammar);
    }
    assert_int_equal(status, NS_OK);
    ns_grammar_destroy(grammar);
    for (int n = 0;; n++) {
        grammar = NULL;
        fault_arm(n);
        status = ns_grammar_choice(choice, 2, &grammar, &err);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
        assert_null(grammar);
    }
    assert_int_equal(status, NS_OK);
    ns_grammar_destroy(grammar);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pattern_takes_what_it_says_and_nothing_else),
        cmocka_unit_test(a_pattern_that_is_none_is_refused_with_the_reason),
        cmocka_unit_test(a_pattern_is_bounded_in_length_and_depth),
        cmocka_unit_test(random_patterns_take_what_the_C_library_takes),
        cmocka_unit_test(a_choice_takes_each_text_as_a_whole),
        cmocka_unit_test(choices_that_are_none_are_refused),
        cmocka_unit_test(ten_thousand_choices_share_their_ends),
        cmocka_unit_test(grammars_that_accept_by_the_same_program_have_one_hash),
        cmocka_unit_test(memory_that_runs_out_is_fatal_wherever_it_does),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
