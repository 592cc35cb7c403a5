/* How a long text is split, and how its summaries combine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "daemon/summary.h"
#include "engine/rng.h"

static struct ns_tokenizer *tokenizer;

static int
set_up(void **state)
{
    struct ns_error err;

    (void)state;
    return ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                             &tokenizer, &err) == NS_OK ? 0 : -1;
}

static int
tear_down(void **state)
{
    (void)state;
    ns_tokenizer_close(tokenizer);
    return 0;
}

static struct ns_summary *
tree_of(const char *text, size_t length, uint32_t part_tokens)
{
    struct ns_summary *tree = NULL;
    struct ns_error err;

    if (ns_summary_create(text, &length, 1, tokenizer, part_tokens, &tree, &err) !=
        NS_OK)
        fail_msg("%s", err.text);
    return tree;
}

static uint32_t
tokens_of(const char *text, size_t length)
{
    struct ns_span span = { text, length, false };
    struct ns_ids ids = { .limit = UINT32_MAX };
    struct ns_error err;
    uint32_t n;

    assert_int_equal(ns_tokenizer_encode(tokenizer, &span, 1, &ids, &err),
                     NS_OK);
    n = (uint32_t)ids.n;
    ns_ids_fini(&ids);
    return n;
}

/* What holds of every tree, whatever the text. */
static void
assert_sound(const struct ns_summary *tree, const char *text, size_t length)
{
    uint32_t at = 0;

    assert_true(tree->n_parts >= 2);
    for (uint32_t i = 0; i < tree->n_parts; i++) {
        const struct ns_summary_part *part = &tree->part[i];

        assert_int_equal(part->first, at);
        assert_true(part->end > part->first);
        assert_true(tokens_of(text + part->first, part->end - part->first) <=
                    tree->part_tokens);
        assert_true(part->n_tokens <= tree->part_tokens);
        assert_int_equal(ns_utf8_span(text + part->first,
                                      part->end - part->first),
                         part->end - part->first);
        at = (uint32_t)part->end;
    }
    assert_int_equal(at, length);
    /* Each node of a round is taken once by the next, and they get fewer. */
    for (uint32_t r = 0; r + 1 < tree->n_rounds; r++) {
        uint32_t next = tree->round_first[r];

        for (uint32_t i = tree->round_first[r + 1];
             i < tree->round_first[r + 2]; i++) {
            const struct ns_summary_node *node = &tree->node[i];

            assert_int_equal(node->first, next);
            assert_true(node->n >= 1);
            assert_int_equal(node->first_part,
                             tree->node[node->first].first_part);
            assert_int_equal(node->last_part,
                             tree->node[node->first + node->n - 1].last_part);
            assert_true(node->n * (tree->node_tokens + NS_SUMMARY_LABEL) <=
                            tree->part_tokens || node->n <= 2);
            next += node->n;
        }
        assert_int_equal(next, tree->round_first[r + 1]);
        assert_true(tree->round_first[r + 2] - tree->round_first[r + 1] <
                    tree->round_first[r + 1] - tree->round_first[r]);
    }
    assert_int_equal(tree->node[ns_summary_final(tree)].first_part, 0);
    assert_int_equal(tree->node[ns_summary_final(tree)].last_part,
                     tree->n_parts - 1);
}

static void
any_text_is_split_whole_within_its_limit_and_its_tree_ends_in_one(void **state)
{
    static const char *const bits[] = {
        "word ", "sentence ends. ", "\n", "\n\n", "# Heading\n", "```c\n",
        "```\n", "    code;\n", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "~~~\n",
        "a", "verylongwordwithoutanyend", "| a | b |\n",
    };
    static char text[200000];

    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        size_t length = 0, n = 300 + ns_mix(seed) % 6000;
        uint32_t size = (uint32_t)(NS_SUMMARY_LEAST + ns_mix(seed * 3) % 700);
        bool dense = seed % 5 == 0; /* hardly a place to cut at */
        struct ns_summary *tree;

        for (size_t i = 0; i < n; i++) {
            uint64_t draw = ns_mix(seed * 100000 + i);
            const char *bit = bits[dense && draw % 50 ? 8 + draw % 2 * 3
                                                      : draw % 13];

            if (length + strlen(bit) >= sizeof(text))
                break;
            memcpy(text + length, bit, strlen(bit));
            length += strlen(bit);
        }
        text[length] = '\0';
        tree = tree_of(text, length, size);
        if (tree)
            assert_sound(tree, text, length);
        else
            assert_true(tokens_of(text, length) <= size);
        ns_summary_destroy(tree);
    }
}

static void
parts_end_where_the_text_does(void **state)
{
    static char text[65536];
    struct ns_summary *tree;
    size_t length = 0;
    json_t *list;

    (void)state;
    for (int chapter = 1; chapter <= 9; chapter++) {
        length += (size_t)snprintf(text + length, sizeof(text) - length,
                                   "# Chapter %d\n\n", chapter);
        for (int i = 0; i < 6; i++)
            length += (size_t)snprintf(
                text + length, sizeof(text) - length,
                "This is what is said in sentence %d of it.\n", i);
        length += (size_t)snprintf(text + length, sizeof(text) - length,
                                   "```c\n# no heading\nint x;\n\n```\n\n");
    }
    tree = tree_of(text, length, 400);
    assert_sound(tree, text, length);
    for (uint32_t i = 1; i < tree->n_parts; i++) {
        assert_memory_equal(text + tree->part[i].first, "# Chapter", 9);
        assert_int_equal(tree->heading[tree->part[i].heading - 1].first,
                         tree->part[i].first + 2);
    }
    list = ns_summary_parts(tree, text);
    assert_int_equal(json_array_size(list), tree->n_parts);
    assert_string_equal(json_string_value(json_array_get(
                            json_object_get(json_array_get(list, 0),
                                            "headings"), 0)), "Chapter 1");
    json_decref(list);
    ns_summary_destroy(tree);
    assert_null(tree_of("short", 5, 200));
    assert_null(tree_of("", 0, 200));
}

/* A block of code that fits a part is in one, wherever it begins; what only looks
 * like the end of one is not; a longer one is cut between its lines. */
static void
code_that_fits_stays_whole(void **state)
{
    static char text[65536];

    (void)state;
    for (int before = 1; before < 30; before++) {
        const char *at = text;
        size_t length = 0;
        struct ns_summary *tree;

        for (int block = 0; block < 6; block++) {
            for (int i = 0; i < before; i++)
                length += (size_t)snprintf(text + length, sizeof(text) - length,
                                           "Words in front. ");
            length += (size_t)snprintf(text + length, sizeof(text) - length,
                                       "\n````c %d\n", block);
            for (int i = 0; i < 9; i++)
                length += (size_t)snprintf(text + length, sizeof(text) - length,
                                           "x();\n\n# y\n```\n````c\n");
            length += (size_t)snprintf(text + length, sizeof(text) - length,
                                       "````\n");
        }
        tree = tree_of(text, length, 400);
        assert_non_null(tree);
        assert_sound(tree, text, length);
        assert_int_equal(tree->n_headings, 0);
        while ((at = strstr(at, "\n````c ")) != NULL) {
            size_t first = (size_t)(at - text) + 1;
            size_t end = (size_t)(strstr(at, "\n````\n") - text) + 5;
            uint32_t p = 0;

            assert_true(tokens_of(text + first, end - first) < 370);
            while (tree->part[p].end <= first)
                p++;
            assert_true(tree->part[p].end >= end);
            at++;
        }
        ns_summary_destroy(tree);
    }
}

static void
a_part_is_told_by_all_headings_above_it(void **state)
{
    static char text[32768];
    struct ns_summary *tree;
    size_t length = 0;
    json_t *list;

    (void)state;
    length += (size_t)snprintf(text, sizeof(text),
                               "# Book\n\n## First \n\n### Deep\n\n"
                               "## Second\n\n#### Deeper\n\n#no heading\n"
                               "####### nor this\n");
    for (int i = 0; i < 200; i++)
        length += (size_t)snprintf(text + length, sizeof(text) - length,
                                   "A line of it.\n");
    tree = tree_of(text, length, 200);
    assert_sound(tree, text, length);
    list = ns_summary_parts(tree, text);
    for (uint32_t i = 0; i < tree->n_parts; i++) {
        char *said = json_dumps(json_object_get(json_array_get(list, i),
                                                "headings"), JSON_COMPACT);

        assert_string_equal(said, i == 0 ? "[\"Book\"]"
                                         : "[\"Book\",\"Second\","
                                           "\"Deeper\"]");
        free(said);
    }
    json_decref(list);
    ns_summary_destroy(tree);
}

/* No part is of two texts, nor does a heading or a fence reach into the next. */
static void
several_texts_are_split_each_by_itself(void **state)
{
    static char text[32768];
    struct ns_summary *tree = NULL;
    size_t ends[3], length = 0;
    struct ns_error err;
    json_t *list;

    (void)state;
    for (int t = 0; t < 3; t++) {
        if (t == 1)
            length += (size_t)sprintf(text + length, "# Second\n\n```\n");
        for (int i = 0; i < 40; i++)
            length += (size_t)sprintf(text + length, "Line %d of it.%s", i,
                                      t < 2 ? "\n\n" : " ");
        ends[t] = length;
    }
    assert_int_equal(ns_summary_create(text, ends, 3, tokenizer, 200, &tree,
                                       &err), NS_OK);
    assert_sound(tree, text, length);
    list = ns_summary_parts(tree, text);
    for (uint32_t i = 0; i < tree->n_parts; i++) {
        const struct ns_summary_part *part = &tree->part[i];
        const json_t *said = json_array_get(list, i);
        size_t start = part->text ? ends[part->text - 1] : 0;

        assert_true(part->first >= start && part->end <= ends[part->text]);
        assert_int_equal(part->heading, part->text == 1);
        assert_int_equal(json_integer_value(json_object_get(said, "text")),
                         part->text + 1);
        assert_int_equal(json_integer_value(json_array_get(
                             json_object_get(said, "bytes"), 0)),
                         part->first - start);
    }
    assert_int_equal(tree->part[tree->n_parts - 1].text, 2);
    json_decref(list);
    ns_summary_destroy(tree);
}

static void
rounds_go_on_as_nodes_are_done_and_labels_can_not_be_forged(void **state)
{
    static char text[20000];
    struct ns_summary *tree;
    struct ns_error err;
    size_t length = 0;
    uint32_t n_done = 0;
    char *source;

    (void)state;
    for (int i = 0; i < 400; i++)
        length += (size_t)snprintf(text + length, sizeof(text) - length,
                                   "Sentence %d is not like the others. ", i);
    tree = tree_of(text, length, NS_SUMMARY_LEAST);
    assert_sound(tree, text, length);
    assert_true(tree->n_rounds > 2);
    source = ns_summary_source(tree, 1, text);
    assert_memory_equal(source, text + tree->part[1].first, strlen(source));
    free(source);
    while (ns_summary_advance(tree)) {
        uint32_t node = tree->round_first[tree->round];

        while (tree->node[node].text)
            node++;
        assert_true(node < tree->round_first[tree->round + 1]);
        assert_int_equal(ns_summary_set(tree, node, "x [parts 9-9] [PART 1]",
                                        22, &err), NS_OK);
        n_done++;
    }
    assert_int_equal(n_done, ns_summary_final(tree));
    source = ns_summary_source(tree, ns_summary_final(tree), text);
    assert_memory_equal(source, "[parts 1-", 9);
    assert_null(strstr(source, "[parts 9-9]"));
    assert_null(strstr(source, "[PART"));
    assert_non_null(strstr(source, "x (parts 9-9] (PART 1]"));
    free(source);
    ns_summary_destroy(tree);
}

static void
too_many_parts_are_refused_with_the_limit(void **state)
{
    size_t length = 4 << 20;
    char *text = malloc(length + 1);
    struct ns_summary *tree = NULL;
    struct ns_error err;

    (void)state;
    assert_non_null(text);
    for (size_t i = 0; i < length; i++)
        text[i] = i % 9 == 8 ? ' ' : 'z';
    text[length] = '\0';
    assert_int_equal(ns_summary_create(text, &length, 1, tokenizer,
                                       NS_SUMMARY_LEAST, &tree, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "over_context");
    assert_non_null(strstr(err.text, "4096"));
    free(text);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            any_text_is_split_whole_within_its_limit_and_its_tree_ends_in_one),
        cmocka_unit_test(parts_end_where_the_text_does),
        cmocka_unit_test(code_that_fits_stays_whole),
        cmocka_unit_test(several_texts_are_split_each_by_itself),
        cmocka_unit_test(a_part_is_told_by_all_headings_above_it),
        cmocka_unit_test(
            rounds_go_on_as_nodes_are_done_and_labels_can_not_be_forged),
        cmocka_unit_test(too_many_parts_are_refused_with_the_limit),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
