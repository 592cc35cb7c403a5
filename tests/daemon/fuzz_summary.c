/* A text of any bytes, split and laid out: every byte is in one part, in order,
 * parts are within their limit and whole characters, every node is taken once,
 * and all end in one. The first two bytes choose the size of a part, and whether
 * it is two texts. */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "daemon/summary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check(int holds)
{
    if (!holds)
        abort();
}

static const struct ns_tokenizer *
tokenizer(void)
{
    static struct ns_tokenizer *opened;
    struct ns_error err;

    if (!opened)
        check(ns_tokenizer_open("tests/cases/tokenizer/tiny/tokenizer.json",
                                &opened, &err) == NS_OK);
    return opened;
}

static size_t
tokens_of(const char *text, size_t length)
{
    struct ns_span span = { text, length, false };
    struct ns_ids ids = { .limit = UINT32_MAX };
    struct ns_error err;
    size_t n;

    check(ns_tokenizer_encode(tokenizer(), &span, 1, &ids, &err) == NS_OK);
    n = ids.n;
    ns_ids_fini(&ids);
    return n;
}

static void
check_parts(const struct ns_summary *tree, const char *text,
            const size_t *ends, size_t length)
{
    size_t at = 0;
    json_t *list;

    for (uint32_t i = 0; i < tree->n_parts; i++) {
        const struct ns_summary_part *part = &tree->part[i];
        size_t n = part->end - part->first;

        check(part->first == at && part->end > at && part->end <= length);
        check(ns_utf8_span(text + at, n) == n);
        check(tokens_of(text + at, n) <= tree->part_tokens);
        check(part->heading <= tree->n_headings);
        check(part->end <= ends[part->text]);
        check(part->text == 0 || part->first >= ends[part->text - 1]);
        at = part->end;
    }
    check(at == length);
    for (uint32_t h = 0; h < tree->n_headings; h++)
        check(tree->heading[h].above <= h &&
              tree->heading[h].first + tree->heading[h].n <= length);
    list = ns_summary_parts(tree, text);
    check(json_array_size(list) == tree->n_parts);
    json_decref(list);
}

static void
check_rounds(const struct ns_summary *tree)
{
    check(tree->n_rounds >= 2 && tree->round_first[1] == tree->n_parts);
    check(tree->round_first[tree->n_rounds] == tree->n_nodes);
    for (uint32_t r = 1; r < tree->n_rounds; r++) {
        uint32_t next = tree->round_first[r - 1];

        check(tree->round_first[r + 1] - tree->round_first[r] <
              tree->round_first[r] - next);
        for (uint32_t i = tree->round_first[r]; i < tree->round_first[r + 1];
             i++) {
            check(tree->node[i].n > 0 && tree->node[i].first == next);
            next += tree->node[i].n;
        }
        check(next == tree->round_first[r]);
    }
    check(tree->node[ns_summary_final(tree)].last_part == tree->n_parts - 1);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ns_summary *tree = NULL;
    struct ns_error err = { 0 };
    uint32_t part_tokens;
    size_t length, ends[2], n_texts;
    char *text;

    if (size < 2)
        return 0;
    part_tokens = NS_SUMMARY_LEAST + (data[0] | (data[1] & 7) << 8);
    length = ns_utf8_span((const char *)data + 2, size - 2);
    text = malloc(length + 1); /* with a NUL, as a JSON text has it */
    check(text != NULL);
    memcpy(text, data + 2, length);
    text[length] = '\0';
    n_texts = 1 + (data[1] >> 7);
    ends[0] = ends[1] = length;
    if (n_texts == 2)
        ends[0] = ns_utf8_span(text, length / 3);
    if (ns_summary_create(text, ends, n_texts, tokenizer(), part_tokens, &tree,
                          &err) != NS_OK) {
        check(err.code && strcmp(err.code, "over_context") == 0);
    } else if (tree) {
        check_parts(tree, text, ends, length);
        check_rounds(tree);
    } else {
        check(tokens_of(text, length) <= part_tokens);
    }
    ns_summary_destroy(tree);
    free(text);
    return 0;
}
