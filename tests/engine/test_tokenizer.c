#include "engine/tokenizer.h"

#include <errno.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/reader.h"
#include "tests/fault.h"
#include "tests/lines.h"

#define TINY "tests/cases/tokenizer/tiny/tokenizer.json"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10 /* what we promise, we promise without a sanitizer */
#else
#define SLOWER 1
#endif

static struct ns_tokenizer *tiny, *real;

/* Of this process: colleagues on the machine do not count. */
static double
seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static struct ns_tokenizer *
opened(const char *path)
{
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_error err = { 0 };

    if (ns_tokenizer_open(path, &tokenizer, &err) != NS_OK)
        print_error("%s\n", err.text);
    assert_non_null(tokenizer);
    return tokenizer;
}

static struct ns_ids
encoded(const struct ns_tokenizer *tokenizer, const struct ns_span *spans,
        size_t n_spans)
{
    struct ns_ids ids = { .limit = 8 << 20 };
    struct ns_error err = { 0 };

    if (ns_tokenizer_encode(tokenizer, spans, n_spans, &ids, &err) != NS_OK)
        fail_msg("%s", err.text);
    return ids;
}

static struct ns_ids
encoded_text(const struct ns_tokenizer *tokenizer, const char *text,
             size_t length, bool trusted)
{
    struct ns_span span = { text, length, trusted };

    return encoded(tokenizer, &span, 1);
}

static void
assert_same_ids(const struct ns_ids *have, const struct ns_ids *want)
{
    assert_int_equal(have->n, want->n);
    if (want->n)
        assert_memory_equal(have->id, want->id, want->n * sizeof(*want->id));
}

static void
assert_decodes(const struct ns_tokenizer *tokenizer, const struct ns_ids *ids,
               const json_t *want, size_t line)
{
    struct ns_buf out;

    ns_buf_init(&out, 1 << 20);
    ns_tokenizer_decode(tokenizer, ids->id, ids->n, false, &out);
    if (out.length != json_string_length(want) ||
        (out.length && memcmp(out.data, json_string_value(want), out.length)))
        fail_msg("line %zu: decoded \"%s\", expected \"%s\"", line,
                 out.data ? out.data : "", json_string_value(want));
    ns_buf_fini(&out);
}

static void
check_line(size_t line, const json_t *value, void *data)
{
    const struct ns_tokenizer *tokenizer = data;
    const json_t *text = json_object_get(value, "text");
    const json_t *ids = json_object_get(value, "ids");
    struct ns_ids want = { .limit = 1 << 20 }, plain = { .limit = 1 << 20 };
    struct ns_error err;

    for (size_t i = 0; i < json_array_size(ids); i++) {
        int32_t id = (int32_t)json_integer_value(json_array_get(ids, i));

        assert_int_equal(ns_ids_add(&want, id, &err), NS_OK);
        if (!ns_tokenizer_is_special(tokenizer, id))
            assert_int_equal(ns_ids_add(&plain, id, &err), NS_OK);
    }
    if (text) {
        struct ns_ids have =
            encoded_text(tokenizer, json_string_value(text),
                         json_string_length(text), true);

        for (size_t i = 0; i < want.n && i < have.n; i++)
            if (have.id[i] != want.id[i])
                fail_msg("line %zu: id %zu is %d, expected %d", line, i,
                         have.id[i], want.id[i]);
        assert_int_equal(have.n, want.n);
        ns_ids_fini(&have);
    }
    assert_decodes(tokenizer, &want, json_object_get(value, "decoded"), line);
    assert_decodes(tokenizer, &plain, json_object_get(value, "decoded_skip"),
                   line);
    ns_ids_fini(&want);
    ns_ids_fini(&plain);
}

static void
every_line_of_the_tiny_vocabulary_is_exact(void **state)
{
    (void)state;
    assert_int_equal(lines_each("tests/cases/tokenizer/tiny.jsonl",
                                check_line, tiny), 398);
}

static void
every_line_of_the_real_vocabulary_is_exact(void **state)
{
    (void)state;
    assert_int_equal(lines_each("tests/cases/tokenizer/real.jsonl",
                                check_line, real), 404);
}

static void
the_real_file_loads_within_a_second_and_a_half(void **state)
{
    double start = seconds();
    struct ns_tokenizer *tokenizer = opened(lines_real_tokenizer());
    double took = seconds() - start;

    (void)state;
    print_message("loading took %.3f s\n", took);
    assert_int_equal(ns_tokenizer_size(tokenizer), 262145);
    ns_tokenizer_close(tokenizer);
    assert_true(took < 1.5 * SLOWER);
}

/* The peculiar tokens are told by name, and none is ever merged from text. */
static void
job_text_never_yields_a_control_token(void **state)
{
    const struct ns_tokenizer *both[] = { tiny, real };

    (void)state;
    for (int k = 0; k < 2; k++) {
        const struct ns_tokenizer *t = both[k];
        struct ns_buf text, back;

        ns_buf_init(&text, 1 << 20);
        ns_buf_init(&back, 1 << 20);
        for (int32_t id = 0; id < (int32_t)ns_tokenizer_size(t); id++)
            if (ns_tokenizer_is_control(t, id)) {
                ns_buf_text(&text, ns_tokenizer_content(t, id));
                ns_buf_text(&text, id % 3 ? "" : " x\n");
            }
        struct ns_ids safe = encoded_text(t, text.data, text.length, false);
        struct ns_ids open = encoded_text(t, text.data, text.length, true);
        size_t n_control = 0;

        for (size_t i = 0; i < safe.n; i++)
            assert_false(ns_tokenizer_is_control(t, safe.id[i]));
        for (size_t i = 0; i < open.n; i++)
            n_control += ns_tokenizer_is_control(t, open.id[i]);
        assert_true(n_control >= (k == 0 ? 20 : 6000));
        ns_tokenizer_decode(t, safe.id, safe.n, false, &back);
        assert_int_equal(back.length, text.length);
        assert_memory_equal(back.data, text.data, text.length);
        ns_ids_fini(&safe);
        ns_ids_fini(&open);
        ns_buf_fini(&text);
        ns_buf_fini(&back);
    }
}

static void
a_control_token_matches_only_inside_one_trusted_span(void **state)
{
    static const struct {
        struct ns_span spans[3];
        bool found;
    } cases[] = {
        { { { "<|turn>", 7, true }, { "", 0, false }, { "", 0, true } },
          true },
        { { { "<|tu", 4, true }, { "rn>", 3, true }, { "", 0, true } },
          false },
        { { { "<|tu", 4, true }, { "rn>", 3, false }, { "", 0, true } },
          false },
        { { { "<|tu", 4, false }, { "rn>", 3, true }, { "", 0, true } },
          false },
        { { { "<", 1, false }, { "|turn>", 6, true }, { "", 0, true } },
          false },
        { { { "a<|turn>b", 9, true }, { "<|turn>", 7, false },
            { "", 0, false } }, true },
        { { { "<|turn>", 7, false }, { "", 0, true }, { "", 0, true } },
          false },
    };
    int32_t turn = ns_tokenizer_id(tiny, "<|turn>");

    (void)state;
    for (size_t c = 0; c < sizeof(cases) / sizeof(*cases); c++) {
        struct ns_ids ids = encoded(tiny, cases[c].spans, 3);
        int n = 0;

        for (size_t i = 0; i < ids.n; i++)
            n += ids.id[i] == turn;
        assert_int_equal(n, cases[c].found ? 1 : 0);
        ns_ids_fini(&ids);
    }
}

/* Words, runs and other added tokens form across borders as within. */
static void
ids_do_not_depend_on_where_spans_are_cut(void **state)
{
    static const char text[] =
        "  the weather\n\n\n of the\t\thour: \u00fcber \u2581\u2581 caf\u00e9 "
        "<table> \U0001f600\U0001f600 \"quoted\"    end\n\n";
    const struct ns_tokenizer *both[] = { tiny, real };
    size_t length = sizeof(text) - 1;
    unsigned draw = 12345;

    (void)state;
    for (int k = 0; k < 2; k++) {
        struct ns_ids want = encoded_text(both[k], text, length, false);

        for (int round = 0; round < 500; round++) {
            struct ns_span spans[sizeof(text)];
            size_t n = 0, from = 0;

            for (size_t i = 1; i <= length; i++) {
                draw = draw * 1103515245 + 12345;
                if (i < length && ((draw >> 16) % 4 ||
                                   (text[i] & 0xc0) == 0x80))
                    continue;
                spans[n++] = (struct ns_span){ text + from, i - from,
                                               draw >> 20 & 1 };
                from = i;
            }
            struct ns_ids have = encoded(both[k], spans, n);

            assert_same_ids(&have, &want);
            ns_ids_fini(&have);
        }
        ns_ids_fini(&want);
    }
}

/* The definition, quadratic: merge the lowest rank, leftmost, again and
 * again. Only for ASCII text without added tokens. */
static void
assert_merges_as_defined(const char *text, const json_t *merges)
{
    char part[64][64];
    size_t n = strlen(text), i;
    struct ns_ids have = encoded_text(tiny, text, n, false);

    for (i = 0; i < n; i++)
        snprintf(part[i], sizeof(part[i]), "%s",
                 text[i] == ' ' ? "\u2581" : (char[]){ text[i], 0 });
    for (size_t rank = 0; rank < json_array_size(merges);) {
        const json_t *merge = json_array_get(merges, rank);
        const char *left = json_string_value(json_array_get(merge, 0));
        const char *right = json_string_value(json_array_get(merge, 1));

        for (i = 0; i + 1 < n; i++)
            if (!strcmp(part[i], left) && !strcmp(part[i + 1], right))
                break;
        if (i + 1 >= n) {
            rank++;
            continue;
        }
        strcat(part[i], right);
        memmove(part[i + 1], part[i + 2], (n - i - 2) * sizeof(*part));
        n--;
        rank = 0;
    }
    assert_int_equal(have.n, n);
    for (i = 0; i < n; i++) {
        const char *content = ns_tokenizer_content(tiny, have.id[i]);

        if (content[0] != '<' || !content[1])
            assert_string_equal(content, part[i]);
    }
    ns_ids_fini(&have);
}

static void
merging_equals_its_definition_on_random_text(void **state)
{
    static const char letters[] = "  eethhroinwsadr,u\"";
    json_t *file = json_load_file(TINY, 0, NULL);
    const json_t *merges =
        json_object_get(json_object_get(file, "model"), "merges");
    unsigned draw = 7;

    (void)state;
    assert_int_equal(json_array_size(merges), 162);
    for (int round = 0; round < 400; round++) {
        char text[41];
        size_t n = 1 + (size_t)(round % 40);

        for (size_t i = 0; i < n; i++) {
            draw = draw * 1103515245 + 12345;
            text[i] = letters[(draw >> 16) % (sizeof(letters) - 1)];
        }
        text[n] = '\0';
        assert_merges_as_defined(text, merges);
    }
    json_decref(file);
}

static void
text_comes_back_whole(void **state)
{
    const struct ns_tokenizer *both[] = { tiny, real };
    unsigned draw = 99;

    (void)state;
    for (int round = 0; round < 2000; round++) {
        const struct ns_tokenizer *t = both[round % 2];
        char text[400];
        size_t n = 0;
        struct ns_buf whole, pieces;
        struct ns_decoder decoder;

        while (n < 300) {
            uint32_t code;

            draw = draw * 1103515245 + 12345;
            code = draw >> 8;
            switch (draw >> 30) {
            case 0:
                code %= 0x80;
                break;
            case 1:
                code %= 0x800;
                break;
            case 2:
                code %= 0xd800;
                break;
            default:
                code = 0x10000 + code % 0x20000;
            }
            if (code == 0x2581)
                continue;
            if (code < 0x80) {
                text[n++] = (char)code; /* NUL is as good as any */
            } else if (code < 0x800) {
                text[n++] = (char)(0xc0 | code >> 6);
                text[n++] = (char)(0x80 | (code & 63));
            } else if (code < 0x10000) {
                text[n++] = (char)(0xe0 | code >> 12);
                text[n++] = (char)(0x80 | (code >> 6 & 63));
                text[n++] = (char)(0x80 | (code & 63));
            } else {
                text[n++] = (char)(0xf0 | code >> 18);
                text[n++] = (char)(0x80 | (code >> 12 & 63));
                text[n++] = (char)(0x80 | (code >> 6 & 63));
                text[n++] = (char)(0x80 | (code & 63));
            }
        }
        struct ns_ids ids = encoded_text(t, text, n, false);

        ns_buf_init(&whole, 1 << 20);
        ns_buf_init(&pieces, 1 << 20);
        ns_decoder_init(&decoder);
        ns_tokenizer_decode(t, ids.id, ids.n, true, &whole);
        for (size_t i = 0; i < ids.n; i++) {
            ns_decoder_push(&decoder, t, ids.id[i], true, &pieces);
            /* never half a character */
            assert_int_equal(ns_utf8_span(pieces.data ? pieces.data : "",
                                          pieces.length), pieces.length);
        }
        ns_decoder_flush(&decoder, &pieces);
        assert_int_equal(whole.length, n);
        assert_memory_equal(whole.data, text, n);
        assert_int_equal(pieces.length, n);
        assert_memory_equal(pieces.data, text, n);
        ns_buf_fini(&whole);
        ns_buf_fini(&pieces);
        ns_ids_fini(&ids);
    }
}

static void
a_long_run_of_bytes_is_flushed_at_a_whole_character(void **state)
{
    struct ns_decoder decoder;
    struct ns_buf out;

    (void)state;
    ns_buf_init(&out, 1 << 20);
    ns_decoder_init(&decoder);
    for (int i = 0; i < 5000; i++) {
        ns_decoder_push(&decoder, tiny, ns_tokenizer_id(tiny, "<0xE4>"),
                        true, &out);
        ns_decoder_push(&decoder, tiny, ns_tokenizer_id(tiny, "<0xBD>"),
                        true, &out);
        ns_decoder_push(&decoder, tiny, ns_tokenizer_id(tiny, "<0xA0>"),
                        true, &out);
    }
    ns_decoder_flush(&decoder, &out);
    assert_int_equal(out.length, 15000);
    for (size_t i = 0; i < out.length; i += 3)
        assert_memory_equal(out.data + i, "\u4f60", 3);

    ns_buf_reset(&out);
    for (int i = 0; i < 5000; i++)
        ns_decoder_push(&decoder, tiny, ns_tokenizer_id(tiny, "<0xE4>"),
                        true, &out);
    ns_decoder_flush(&decoder, &out);
    assert_int_equal(out.length, 15000); /* U+FFFD for each */
    assert_memory_equal(out.data, "\ufffd", 3);
    ns_buf_fini(&out);
}

static void
a_megabyte_is_encoded_in_well_under_a_second(void **state)
{
    static const char *const units[] = {
        "The quick brown fox jumps over the lazy dog, and then some. ",
        "a", " ", "\n", "ab", "<", "<|", "<unused", "\u4f60", "\U0001f600",
        "\u2581", "=", "\xd0\xb6", "{\"key\": [1, 2, 3]},\n", "<unused9", ""
    };
    size_t length = 1 << 20;
    char *text = malloc(length + 64);

    (void)state;
    assert_non_null(text);
    for (size_t u = 0; u < sizeof(units) / sizeof(*units); u++) {
        size_t n = strlen(units[u]), at = 0;
        double start, took;
        struct ns_ids ids;

        while (n && at < length) {
            memcpy(text + at, units[u], n);
            at += n;
        }
        for (; !n && at < length; at++) /* letters at random */
            text[at] = (char)('a' + (at * at * 2654435761u >> 13) % 26);
        start = seconds();
        ids = encoded_text(real, text, at, u % 2);
        took = seconds() - start;
        print_message("%-12.12s %8zu bytes %8zu tokens %.3f s\n", units[u],
                      at, ids.n, took);
        assert_true(took < 1.0 * SLOWER);
        ns_ids_fini(&ids);
    }
    free(text);
}

static void
too_many_tokens_and_broken_text_are_refused(void **state)
{
    struct ns_ids ids = { .limit = 3 };
    struct ns_error err;
    struct ns_span many = { "a b c d e f", 11, false };
    struct ns_span torn[2] = { { "ok \xe4\xbd", 5, false },
                               { "\xa0", 1, false } };

    (void)state;
    assert_int_equal(ns_tokenizer_encode(tiny, &many, 1, &ids, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "over_context");
    ns_ids_fini(&ids);
    assert_int_equal(ns_tokenizer_encode(tiny, torn, 2, &ids, &err),
                     NS_REJECT);
    assert_string_equal(err.code, "bad_text");
    assert_non_null(strstr(err.text, "byte 3"));
    assert_int_equal(ids.n, 0);
    ns_ids_fini(&ids);
}

static void
unknown_ids_decode_to_nothing(void **state)
{
    int32_t ids[] = { -1, 318, 512, INT32_MAX, INT32_MIN, 319 };
    struct ns_buf out;

    (void)state;
    ns_buf_init(&out, 100);
    ns_tokenizer_decode(tiny, ids, 6, false, &out);
    assert_string_equal(out.data, "ab");
    assert_null(ns_tokenizer_content(tiny, 512));
    assert_null(ns_tokenizer_content(tiny, -1));
    assert_int_equal(ns_tokenizer_id(tiny, "<|turn>"), 105);
    assert_int_equal(ns_tokenizer_id(tiny, "no such token"), -1);
    ns_buf_fini(&out);
}

/* Hostile files: the tiny one with one thing changed ----------------------- */

static void
refused(const char *text, size_t length, const char *why)
{
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_error err = { 0 };
    enum ns_status status;

    status = ns_tokenizer_parse(text, length, "file", &tokenizer, &err);
    assert_null(tokenizer);
    assert_int_equal(status, NS_REJECT);
    assert_string_equal(err.code, "bad_model");
    if (!strstr(err.text, why))
        fail_msg("said \"%s\", expected \"%s\"", err.text, why);
}

static void
a_hostile_file_is_refused_with_a_reason(void **state)
{
    static const struct {
        const char *from, *to, *why;
    } cases[] = {
        { "\"type\": \"BPE\"", "\"type\": \"WordPiece\"", "model.type" },
        { "\"type\": \"BPE\",", "", "model.type is missing" },
        { "\"byte_fallback\": true", "\"byte_fallback\": false",
          "model.byte_fallback" },
        { "\"ignore_merges\": false", "\"ignore_merges\": true",
          "model.ignore_merges" },
        { "\"dropout\": null", "\"dropout\": 0.1", "model.dropout" },
        { "\"type\": \"Replace\"", "\"type\": \"NFC\"", "normalizer" },
        { "\"behavior\": \"MergedWithPrevious\"",
          "\"behavior\": \"Isolated\"", "pre_tokenizer" },
        { "\"type\": \"ByteFallback\"", "\"type\": \"ByteLevel\"",
          "decoder" },
        { "\"normalizer\":", "\"normaliser\":", "normalizer is missing" },
        { "\"model\":", "\"modem\":", "model is missing" },
        { "\"merges\":", "\"mergers\":", "merges is missing" },
        { "\"vocab\":", "\"words\":", "vocab is missing" },
        { "\"he\": 351", "\"he\": 1048576", "limit of 1048575" },
        { "\"he\": 351", "\"he\": 99999999999999999999", "too large" },
        { "\"he\": 351", "\"he\": -1", "whole number" },
        { "\"he\": 351", "\"he\": 3.5", "whole number" },
        { "\"he\": 351", "\"he\": \"351\"", "whole number" },
        { "\"he\": 351", "\"he\": 352", "id 352 is given" },
        { "\"he\": 351", "\"er\": 351", "stands under the ids 351 and 354" },
        { "\"he\": 351", "\"\": 351", "0 bytes" },
        { "\"<0x41>\": 77", "\"<0x410>\": 77", "byte token <0x41>" },
        { "\"h\",\n\"e\"", "\"h\",\n\"\u0141\"", "right is not in" },
        { "\"h\",\n\"e\"", "\"\u0141\",\n\"e\"", "left is not in" },
        { "\"h\",\n\"e\"", "\"h\",\n\"v\"", "result is not in" },
        { "\"h\",\n\"e\"", "\"h\"", "has 1 parts" },
        { "\"h\",\n\"e\"", "\"h\",\n\"e\",\n\"r\"", "has 3 parts" },
        { "[\n\"h\",\n\"e\"\n]", "\"h e r\"", "one space" },
        { "[\n\"h\",\n\"e\"\n]", "\"he\"", "one space" },
        { "[\n\"h\",\n\"e\"\n]", "7", "array must stand" },
        { "\"h\",\n\"e\"", "\"\\n\",\n\"\\n\"", "stands there twice" },
        { "\"special\": true", "\"special\": true,\n\"lstrip\": true",
          "added_tokens[0].lstrip must be false" },
        { "\"normalized\": false", "\"normalized\": true",
          "added_tokens[0].normalized must be false" },
        { "\"id\": 1,", "\"id\": 7,", "has id 7 here and 1 elsewhere" },
        { "\"content\": \"<eos>\"", "\"content\": \"<pad>\"",
          "has id 1 here and 0 elsewhere" },
        { "\"content\": \"<eos>\"", "\"content\": \"<0x00>\"",
          "elsewhere" },
        { "\"content\": \"<eos>\"", "\"content\": \"\"",
          "added_tokens[1] needs an id and" },
        { "\"content\": \"<eos>\"", "\"content\": 3",
          "string must stand" },
        { "\"version\": \"1.0\",",
          "\"version\": \"1.0\", \"model\": {},", "model stands there twice" },
        { "\"he\": 351", "\"h\xff\": 351", "not UTF-8" },
        { "\"he\": 351", "\"h\ne\": 351", "control character" },
        { "\"he\": 351", "\"h\\ud800\": 351", "surrogate" },
        { "\"he\": 351", "\"h\\u00g0\": 351", "hex digits" },
        { "\"he\": 351", "\"h\\q\": 351", "unknown escape" },
        { "\"version\": \"1.0\",", "\"version\": \"1.0\"", "comma" },
        { "\"version\": \"1.0\",",
          "\"version\": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "nested" },
    };
    size_t length;
    char *file = lines_file(TINY, &length);

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char *at = strstr(file, cases[i].from);
        struct ns_buf text;

        if (!at)
            fail_msg("case %zu: \"%s\" is not in the file", i,
                     cases[i].from);
        ns_buf_init(&text, 1 << 20);
        ns_buf_add(&text, file, (size_t)(at - file));
        ns_buf_text(&text, cases[i].to);
        ns_buf_text(&text, at + strlen(cases[i].from));
        refused(text.data, text.length, cases[i].why);
        ns_buf_fini(&text);
    }
    for (size_t n = 0; n < length - 2; n += 1 + n / 64)
        refused(file, n, "");
    file[length++] = 'x'; /* in place of the NUL */
    refused(file, length, "more text");
    free(file);
}

/* Were this taken, "<|turn>" typed in a document would become the marker. */
static void
merges_that_would_make_a_control_token_are_refused(void **state)
{
    static const char *const changes[][2] = {
        { "\"he\": 351", "\"he\": 351, \"<|\": 512, \"turn>\": 513" },
        { "\"merges\": [", "\"merges\": [[\"<|\", \"turn>\"]," },
    };
    size_t length;
    char *file = lines_file(TINY, &length);
    struct ns_buf text;
    const char *from = file;

    (void)state;
    ns_buf_init(&text, 1 << 20);
    for (int i = 0; i < 2; i++) {
        const char *at = strstr(from, changes[i][0]);

        assert_non_null(at);
        ns_buf_add(&text, from, (size_t)(at - from));
        ns_buf_text(&text, changes[i][1]);
        from = at + strlen(changes[i][0]);
    }
    ns_buf_text(&text, from);
    refused(text.data, text.length, "touches the control token 105");
    ns_buf_fini(&text);
    free(file);
}

static void
merges_may_be_written_as_one_text(void **state)
{
    json_t *file = json_load_file(TINY, 0, NULL);
    json_t *model = json_object_get(file, "model");
    json_t *merges = json_object_get(model, "merges"), *texts = json_array();
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_error err;
    char *text;

    (void)state;
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);

        json_array_append_new(
            texts, json_sprintf("%s %s",
                                json_string_value(json_array_get(merge, 0)),
                                json_string_value(json_array_get(merge, 1))));
    }
    /* and in another order of members: merges before vocab */
    json_object_set_new(model, "merges", texts);
    json_t *vocab = json_incref(json_object_get(model, "vocab"));
    json_object_del(model, "vocab");
    json_object_set_new(model, "vocab", vocab);
    text = json_dumps(file, JSON_COMPACT | JSON_ENSURE_ASCII);
    assert_int_equal(ns_tokenizer_parse(text, strlen(text), "file",
                                        &tokenizer, &err), NS_OK);
    lines_each("tests/cases/tokenizer/tiny.jsonl", check_line, tokenizer);
    ns_tokenizer_close(tokenizer);
    free(text);
    json_decref(file);
}

static void
long_added_tokens_match_whole(void **state)
{
    size_t length;
    char *file = lines_file(TINY, &length);
    char *at = strstr(file, "\"added_tokens\": [");
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_error err;
    struct ns_buf text, all;

    (void)state;
    assert_non_null(at);
    at += strlen("\"added_tokens\": [");
    ns_buf_init(&text, 1 << 20);
    ns_buf_init(&all, 1 << 20);
    ns_buf_add(&text, file, (size_t)(at - file));
    for (int i = 0; i < 26; i++) {
        char content[256];

        memset(content, 'a' + i, sizeof(content));
        content[255] = '\0';
        ns_buf_printf(&text, "{\"id\":%d,\"content\":\"%s\"},", 600 + i,
                      content);
        ns_buf_text(&all, content);
    }
    ns_buf_text(&text, at);
    assert_int_equal(ns_tokenizer_parse(text.data, text.length, "file",
                                        &tokenizer, &err), NS_OK);
    struct ns_ids ids = encoded_text(tokenizer, all.data, all.length, false);

    assert_int_equal(ids.n, 26);
    for (int i = 0; i < 26; i++)
        assert_int_equal(ids.id[i], 600 + i);
    ns_ids_fini(&ids);
    ns_tokenizer_close(tokenizer);
    ns_buf_fini(&text);
    ns_buf_fini(&all);
    free(file);
}

static void
a_missing_file_is_refused(void **state)
{
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_error err;

    (void)state;
    assert_int_equal(ns_tokenizer_open("tests/no/such", &tokenizer, &err),
                     NS_REJECT);
    assert_int_equal(ns_tokenizer_open("tests", &tokenizer, &err), NS_REJECT);
    assert_null(tokenizer);
}

static void
every_failed_allocation_is_reported(void **state)
{
    struct ns_tokenizer *tokenizer = NULL;
    struct ns_span span = { "the weather in \u00fc\u00fc <|turn>", 27, true };
    struct ns_error err;
    enum ns_status status;
    int n;

    (void)state;
    for (n = 0;; n++) {
        fault_arm(n);
        status = ns_tokenizer_open(TINY, &tokenizer, &err);
        if (!fault_fired())
            break;
        if (status != NS_FATAL)
            fail_msg("allocation %d: %s", n, err.text);
        assert_null(tokenizer);
    }
    assert_int_equal(status, NS_OK);
    print_message("parse: %d allocations\n", n);
    for (n = 0;; n++) {
        struct ns_ids ids = { .limit = 1000 };

        fault_arm(n);
        status = ns_tokenizer_encode(tokenizer, &span, 1, &ids, &err);
        ns_ids_fini(&ids);
        if (!fault_fired())
            break;
        assert_int_equal(status, NS_FATAL);
    }
    assert_int_equal(status, NS_OK);
    assert_true(n >= 4);
    ns_tokenizer_close(tokenizer);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_line_of_the_tiny_vocabulary_is_exact),
        cmocka_unit_test(every_line_of_the_real_vocabulary_is_exact),
        cmocka_unit_test(the_real_file_loads_within_a_second_and_a_half),
        cmocka_unit_test(job_text_never_yields_a_control_token),
        cmocka_unit_test(a_control_token_matches_only_inside_one_trusted_span),
        cmocka_unit_test(ids_do_not_depend_on_where_spans_are_cut),
        cmocka_unit_test(merging_equals_its_definition_on_random_text),
        cmocka_unit_test(text_comes_back_whole),
        cmocka_unit_test(a_long_run_of_bytes_is_flushed_at_a_whole_character),
        cmocka_unit_test(a_megabyte_is_encoded_in_well_under_a_second),
        cmocka_unit_test(too_many_tokens_and_broken_text_are_refused),
        cmocka_unit_test(unknown_ids_decode_to_nothing),
        cmocka_unit_test(a_hostile_file_is_refused_with_a_reason),
        cmocka_unit_test(merges_that_would_make_a_control_token_are_refused),
        cmocka_unit_test(merges_may_be_written_as_one_text),
        cmocka_unit_test(long_added_tokens_match_whole),
        cmocka_unit_test(a_missing_file_is_refused),
        cmocka_unit_test(every_failed_allocation_is_reported),
    };
    int failed;

    tiny = opened(TINY);
    real = opened(lines_real_tokenizer());
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    ns_tokenizer_close(tiny);
    ns_tokenizer_close(real);
    return failed;
}
