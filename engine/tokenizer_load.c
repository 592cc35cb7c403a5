/* tokenizer_load.c - tokenizer.json to tables, with every doubt refused. */
#include "engine/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/reader.h"
#include "engine/json_scan.h"
#include "engine/tokenizer_tables.h"

enum {
    MAX_FILE = 256 << 20,
    MAX_IDS = 1 << 20,
    MAX_MERGES = 1 << 21,
    MAX_CONTENT = 1024, /* bytes of one token; the released file has 93 */
    MAX_ADDED = 256,    /* bytes of one added token */
    MAX_ADDED_JSON = 16 << 20,
    MAX_CONTENTS = 64 << 20,
};

/* The markers of the chat format, for files that do not flag them special. */
/* clang-format off */
static const char *const markers[] = {
    "<|tool>",          "<tool|>",          "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", "<|\"|>",       "<|think|>",
    "<|channel>",       "<channel|>",       "<|turn>",      "<turn|>",
    "<|image>",         "<|image|>",        "<image|>",     "[multimodal]",
    "<mask>",           "<bos>",            "<eos>",        "<pad>",
};
/* clang-format on */

static bool
is_unused_name(const char *text, size_t length)
{
    if (length < 9 || memcmp(text, "<unused", 7) != 0 ||
        text[length - 1] != '>')
        return false;
    for (size_t i = 7; i < length - 1; i++)
        if (text[i] < '0' || text[i] > '9')
            return false;
    return true;
}

static bool
is_control_name(const char *text, size_t length)
{
    for (size_t i = 0; i < sizeof(markers) / sizeof(*markers); i++)
        if (strlen(markers[i]) == length &&
            memcmp(markers[i], text, length) == 0)
            return true;
    return is_unused_name(text, length);
}

static int
hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Value of "<0xNN>", or -1. */
static int
byte_value(const char *text, size_t length)
{
    int high, low;

    if (length != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    high = hex_digit(text[3]);
    low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

static size_t
power_above(size_t n)
{
    size_t power = 1024;

    while (power < n)
        power *= 2;
    return power;
}

struct load {
    struct ns_tokenizer *t;
    struct ns_scan scan;
    const char *name;
    struct ns_error *err;
};

static bool
key_is(const struct ns_scan *scan, const char *key)
{
    return scan->text.length == strlen(key) &&
           (scan->text.length == 0 ||
            memcmp(scan->text.data, key, scan->text.length) == 0);
}

static enum ns_status
no_memory(struct load *load)
{
    return ns_fail(load->err, NS_FATAL, "out of memory reading %s", load->name);
}

static enum ns_status reject(struct load *load, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Names the file and says what is wrong with it. */
static enum ns_status
reject(struct load *load, const char *format, ...)
{
    char why[300];
    va_list ap;

    va_start(ap, format);
    vsnprintf(why, sizeof(why), format, ap);
    va_end(ap);
    return ns_refuse(load->err, "bad_model", NULL, "%s: %s", load->name, why);
}

/* A token's content for a sentence: short, and on one line. */
static const char *
shown(const char *text, size_t length, char out[72])
{
    size_t n = 0;

    for (size_t i = 0; i < length && n < 64; i++) {
        unsigned char c = (unsigned char)text[i];

        if (c >= 0x20 && c < 0x7f)
            out[n++] = (char)c;
        else
            n += (size_t)snprintf(out + n, 5, "\\x%02x", c);
    }
    out[n] = '\0';
    return out;
}

static enum ns_status
grow_tokens(struct load *load, uint32_t n)
{
    struct ns_tokenizer *t = load->t;
    uint32_t capacity = t->token_capacity ? t->token_capacity : 1024;
    struct token *tokens;

    if (n > t->token_capacity) {
        while (capacity < n)
            capacity *= 2; /* n is at most MAX_IDS */
        tokens = realloc(t->tokens, capacity * sizeof(*tokens));
        if (!tokens)
            return no_memory(load);
        t->tokens = tokens;
        t->token_capacity = capacity;
    }
    if (n > t->n_tokens) {
        memset(t->tokens + t->n_tokens, 0,
               (n - t->n_tokens) * sizeof(*t->tokens));
        t->n_tokens = n;
    }
    return NS_OK;
}

/* Enters a token under an id that is still free. */
static enum ns_status
add_token(struct load *load, const char *field, const char *text, size_t length,
          uint64_t id, uint8_t flags)
{
    struct ns_tokenizer *t = load->t;
    char show[72];
    enum ns_status status;
    struct token *token;
    int byte;

    if (id >= MAX_IDS)
        return reject(load, "%s: id %llu of \"%s\" is over the limit of %d",
                      field, (unsigned long long)id, shown(text, length, show),
                      MAX_IDS - 1);
    if (length == 0 || length > MAX_CONTENT)
        return reject(load, "%s: token %llu has %zu bytes, allowed are 1 to %d",
                      field, (unsigned long long)id, length, MAX_CONTENT);
    status = grow_tokens(load, (uint32_t)id + 1);
    if (status != NS_OK)
        return status;
    token = &t->tokens[id];
    if (token->flags & PRESENT)
        return reject(load, "%s: id %llu is given to \"%s\" and again", field,
                      (unsigned long long)id, shown(text, length, show));
    token->at = (uint32_t)t->contents.length;
    token->length = (uint32_t)length;
    token->flags = flags | PRESENT;
    if (is_control_name(text, length))
        token->flags |= CONTROL;
    byte = byte_value(text, length);
    if (byte >= 0 && (flags & IN_VOCAB)) {
        token->flags |= BYTE;
        token->byte = (uint8_t)byte;
        t->byte_id[byte] = (int32_t)id;
    }
    ns_buf_add(&t->contents, text, length);
    ns_buf_byte(&t->contents, '\0');
    return ns_buf_check(&t->contents, load->name, load->err);
}

static enum ns_status
read_vocab(struct load *load, const struct ns_reader *slice)
{
    struct ns_scan *scan = &load->scan;
    struct ns_buf key;
    uint64_t id;
    enum ns_status status = NS_OK;

    ns_buf_init(&key, NS_SCAN_STRING);
    scan->in = *slice;
    if (ns_scan_open(scan, '{'))
        while (status == NS_OK && ns_scan_member(scan)) {
            ns_buf_reset(&key);
            ns_buf_add(&key, scan->text.data, scan->text.length);
            status = ns_buf_check(&key, load->name, load->err);
            if (status == NS_OK && ns_scan_uint(scan, &id))
                status =
                    add_token(load, "model.vocab", key.data ? key.data : "",
                              key.length, id, IN_VOCAB);
        }
    ns_buf_fini(&key);
    return status == NS_OK ? ns_scan_check(scan, load->name, load->err)
                           : status;
}

/* One token may carry one id only, whether from model.vocab or added. */
static enum ns_status
index_content(struct load *load, int32_t id)
{
    struct ns_tokenizer *t = load->t;
    const char *text = content_of(t, id);
    size_t length = t->tokens[id].length, slot;
    int32_t other = find_content(t, text, length);
    char show[72];

    if (other >= 0)
        return reject(load, "\"%s\" stands under the ids %d and %d",
                      shown(text, length, show), other, id);
    slot = XXH3_64bits(text, length) & t->content_mask;
    while (t->by_content[slot] >= 0)
        slot = (slot + 1) & t->content_mask;
    t->by_content[slot] = id;
    return NS_OK;
}

/* Sized for the vocabulary and for as many added tokens as the file could
 * bring (each has an id and a content), so that the table never grows. */
static enum ns_status
index_vocab(struct load *load, const struct ns_reader *added)
{
    struct ns_tokenizer *t = load->t;
    size_t n_added = ns_reader_left(added) / sizeof("{\"id\":1,\"content\":");
    size_t slots = power_above(2 * (t->n_tokens + n_added));
    enum ns_status status = NS_OK;

    t->by_content = malloc(slots * sizeof(*t->by_content));
    if (!t->by_content)
        return no_memory(load);
    memset(t->by_content, 0xff, slots * sizeof(*t->by_content));
    t->content_mask = slots - 1;
    for (uint32_t id = 0; id < t->n_tokens && status == NS_OK; id++)
        if (t->tokens[id].flags & PRESENT)
            status = index_content(load, (int32_t)id);
    return status;
}

/* read_added has made room for a node for every byte, so none moves. */
static void
add_to_trie(struct ns_tokenizer *t, const char *text, size_t length, int32_t id)
{
    uint32_t *link = &t->roots[(unsigned char)text[0]];
    uint32_t at = 0;

    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];

        while (*link && t->nodes[*link].byte != byte)
            link = &t->nodes[*link].sibling;
        if (!*link) {
            *link = t->n_nodes;
            t->nodes[t->n_nodes] = (struct node){ .id = -1, .byte = byte };
            t->n_nodes++;
        }
        at = *link;
        link = &t->nodes[at].child;
    }
    t->nodes[at].id = id;
}

/* Enters one, or flags the token of the vocabulary that it is. */
static enum ns_status
enter_added(struct load *load, const char *text, size_t length, uint64_t id,
            uint8_t flags)
{
    struct ns_tokenizer *t = load->t;
    int32_t known = find_content(t, text, length);
    enum ns_status status;
    char show[72];

    shown(text, length, show);
    if (known < 0) {
        status = add_token(load, "added_tokens", text, length, id, flags);
        if (status == NS_OK)
            status = index_content(load, (int32_t)id);
        if (status != NS_OK)
            return status;
        known = (int32_t)id;
    } else if ((uint64_t)known != id) {
        return reject(load,
                      "added_tokens: \"%s\" has id %llu here and %d "
                      "elsewhere",
                      show, (unsigned long long)id, known);
    } else if (has_flag(t, known, ADDED | BYTE)) {
        return reject(load, "added_tokens: \"%s\" %s", show,
                      has_flag(t, known, BYTE) ? "is a byte token"
                                               : "stands there twice");
    }
    t->tokens[known].flags |= flags;
    add_to_trie(t, text, length, known);
    return NS_OK;
}

static enum ns_status
read_added_token(struct load *load, struct ns_buf *content, size_t index)
{
    static const char *const plain[] = { "single_word", "lstrip", "rstrip",
                                         "normalized" };
    struct ns_scan *scan = &load->scan;
    uint8_t flags = ADDED;
    uint64_t id = UINT64_MAX;

    ns_buf_reset(content);
    if (!ns_scan_open(scan, '{'))
        return NS_OK; /* sticks in the scan */
    while (ns_scan_member(scan)) {
        bool special = key_is(scan, "special");
        size_t i = 0;

        if (key_is(scan, "id")) {
            ns_scan_uint(scan, &id);
            continue;
        }
        if (key_is(scan, "content")) {
            if (ns_scan_string(scan))
                ns_buf_add(content, scan->text.data, scan->text.length);
            continue;
        }
        while (i < 4 && !key_is(scan, plain[i]))
            i++;
        if (i < 4 && ns_scan_peek(scan) != 'f')
            return reject(load, "added_tokens[%zu].%s must be false", index,
                          plain[i]);
        if (special && ns_scan_peek(scan) == 't')
            flags |= SPECIAL | CONTROL;
        ns_scan_skip(scan, NULL);
    }
    if (scan->problem)
        return NS_OK;
    if (content->failed)
        return no_memory(load);
    if (content->over || content->length == 0 || id == UINT64_MAX)
        return reject(load,
                      "added_tokens[%zu] needs an id and a content of 1 "
                      "to %d bytes",
                      index, MAX_ADDED);
    return enter_added(load, content->data, content->length, id, flags);
}

static enum ns_status
read_added(struct load *load, const struct ns_reader *slice)
{
    struct ns_tokenizer *t = load->t;
    struct ns_scan *scan = &load->scan;
    struct ns_buf content;
    enum ns_status status = NS_OK;
    size_t n = 0;

    if (ns_reader_left(slice) > MAX_ADDED_JSON)
        return reject(load, "added_tokens has %zu bytes, the limit is %d",
                      ns_reader_left(slice), MAX_ADDED_JSON);
    /* A node a byte at most, as a content is shorter than its JSON; node 0
     * means "none". What is not used is never touched. */
    t->nodes = calloc(ns_reader_left(slice) + 1, sizeof(*t->nodes));
    if (!t->nodes)
        return no_memory(load);
    t->n_nodes = 1;
    ns_buf_init(&content, MAX_ADDED);
    scan->in = *slice;
    if (ns_scan_open(scan, '['))
        while (status == NS_OK && ns_scan_element(scan))
            status = read_added_token(load, &content, n++);
    ns_buf_fini(&content);
    return status == NS_OK ? ns_scan_check(scan, load->name, load->err)
                           : status;
}

static void
note_bigrams(struct ns_tokenizer *t, const char *text, size_t length)
{
    uint32_t left = 0, right = 0;

    for (size_t i = 0, n; i < length; i += n) {
        n = ns_utf8_char(text + i, length - i, &right);
        if (i > 0) {
            size_t bit = bigram_bit(left, right);

            t->bigrams[bit / 64] |= 1ull << (bit % 64);
        }
        left = right;
    }
}

static enum ns_status
add_merge(struct load *load, const char *text, size_t length, size_t cut,
          size_t gap, uint32_t rank)
{
    struct ns_tokenizer *t = load->t;
    char joined[2 * MAX_CONTENT], show[72];
    size_t n_right = length - cut - gap;
    struct merge *merge;
    int32_t id[3];

    id[0] = find_content(t, text, cut);
    id[1] = find_content(t, text + cut + gap, n_right);
    id[2] = -1;
    if (id[0] >= 0 && id[1] >= 0) { /* so both are short enough */
        memcpy(joined, text, cut);
        memcpy(joined + cut, text + cut + gap, n_right);
        id[2] = find_content(t, joined, cut + n_right);
    }
    for (int i = 0; i < 3; i++) {
        if (!has_flag(t, id[i], IN_VOCAB))
            return reject(load,
                          "model.merges[%u] \"%s\": its %s is not in "
                          "model.vocab",
                          rank, shown(text, length, show),
                          i == 0   ? "left"
                          : i == 1 ? "right"
                                   : "result");
        /* Else plain text could merge into a marker, or into a byte. */
        if (has_flag(t, id[i], CONTROL | BYTE))
            return reject(load,
                          "model.merges[%u] \"%s\" touches the %s token "
                          "%d",
                          rank, shown(text, length, show),
                          has_flag(t, id[i], BYTE) ? "byte" : "control", id[i]);
    }
    merge = merge_slot(t, id[0], id[1]);
    if (merge->left >= 0)
        return reject(load, "model.merges[%u] \"%s\" stands there twice", rank,
                      shown(text, length, show));
    *merge = (struct merge){ id[0], id[1], id[2], rank };
    note_bigrams(t, joined, cut + n_right);
    return NS_OK;
}

/* A merge is ["a", "b"] or "a b". Tokens hold no U+0020 (spaces are U+2581),
 * so the one space cuts. */
static enum ns_status
read_merge(struct load *load, struct ns_buf *pair, uint32_t rank)
{
    struct ns_scan *scan = &load->scan;
    size_t cut = 0, parts = 0;
    const char *space;

    ns_buf_reset(pair);
    if (ns_scan_peek(scan) == '"') {
        if (!ns_scan_string(scan))
            return NS_OK; /* sticks in the scan */
        ns_buf_add(pair, scan->text.data, scan->text.length);
        space = pair->data ? memchr(pair->data, ' ', pair->length) : NULL;
        if (pair->failed)
            return no_memory(load);
        if (!space || memchr(space + 1, ' ',
                             (size_t)(pair->data + pair->length - space) - 1))
            return reject(load,
                          "model.merges[%u] must be two tokens and one "
                          "space",
                          rank);
        return add_merge(load, pair->data, pair->length,
                         (size_t)(space - pair->data), 1, rank);
    }
    if (!ns_scan_open(scan, '['))
        return NS_OK;
    while (ns_scan_element(scan) && ns_scan_string(scan)) {
        if (parts++ == 1)
            cut = pair->length;
        if (parts <= 2)
            ns_buf_add(pair, scan->text.data, scan->text.length);
    }
    if (pair->failed)
        return no_memory(load);
    if (scan->problem)
        return NS_OK;
    if (parts != 2)
        return reject(load, "model.merges[%u] has %zu parts, must be 2", rank,
                      parts);
    return add_merge(load, pair->data ? pair->data : "", pair->length, cut, 0,
                     rank);
}

/* Counts first, so that the table is made once. */
static enum ns_status
read_merges(struct load *load, const struct ns_reader *slice)
{
    struct ns_tokenizer *t = load->t;
    struct ns_scan *scan = &load->scan;
    struct ns_buf pair;
    enum ns_status status = NS_OK;
    size_t n = 0, slots;
    uint32_t rank = 0;

    scan->in = *slice;
    if (ns_scan_open(scan, '['))
        while (n <= MAX_MERGES && ns_scan_element(scan) &&
               ns_scan_skip(scan, NULL))
            n++;
    if (scan->problem)
        return ns_scan_check(scan, load->name, load->err);
    if (n > MAX_MERGES)
        return reject(load, "model.merges are more than %d", MAX_MERGES);
    slots = power_above(2 * n);
    t->merges = malloc(slots * sizeof(*t->merges));
    t->bigrams =
        calloc((size_t)1 << (TOKENIZER_BIGRAM_BITS - 6), sizeof(*t->bigrams));
    if (!t->merges || !t->bigrams)
        return no_memory(load);
    memset(t->merges, 0xff, slots * sizeof(*t->merges));
    t->merge_mask = slots - 1;
    t->n_merges = n;

    scan->in = *slice;
    ns_buf_init(&pair, 2 * NS_SCAN_STRING);
    if (ns_scan_open(scan, '['))
        while (status == NS_OK && ns_scan_element(scan))
            status = read_merge(load, &pair, rank++);
    ns_buf_fini(&pair);
    return status == NS_OK ? ns_scan_check(scan, load->name, load->err)
                           : status;
}

/* Whether both hold the same value; members must stand in the same order, as
 * the one known writer of these files puts them. */
static bool
same_value(struct ns_scan *a, struct ns_scan *b)
{
    char kind = ns_scan_peek(a);
    struct ns_reader word_a, word_b;
    bool more;

    if (kind != ns_scan_peek(b))
        return false;
    if (kind == '{' || kind == '[') {
        if (!ns_scan_open(a, kind) || !ns_scan_open(b, kind))
            return false;
        for (;;) {
            more = kind == '{' ? ns_scan_member(a) : ns_scan_element(a);
            if (more != (kind == '{' ? ns_scan_member(b) : ns_scan_element(b)))
                return false;
            if (!more)
                return !a->problem && !b->problem;
            if (kind == '{' &&
                (a->text.length != b->text.length ||
                 memcmp(a->text.data, b->text.data, a->text.length) != 0))
                return false;
            if (!same_value(a, b))
                return false;
        }
    }
    if (kind == '"')
        return ns_scan_string(a) && ns_scan_string(b) &&
               a->text.length == b->text.length &&
               memcmp(a->text.data, b->text.data, a->text.length) == 0;
    return ns_scan_skip(a, &word_a) && ns_scan_skip(b, &word_b) &&
           ns_reader_left(&word_a) == ns_reader_left(&word_b) &&
           memcmp(word_a.at, word_b.at, ns_reader_left(&word_a)) == 0;
}

/* The encoder below is one fixed pipeline; a file that asks for another one
 * must not be encoded with ours. */
static enum ns_status
expect_section(struct load *load, const struct ns_reader *slice,
               const char *field, const char *expected)
{
    struct ns_scan *scan = &load->scan, want;
    enum ns_status status = NS_OK;

    if (!slice->at)
        return reject(load, "%s is missing", field);
    ns_scan_init(&want, expected, strlen(expected));
    scan->in = *slice;
    if (!same_value(scan, &want)) {
        if (scan->text.failed || want.text.failed)
            status = no_memory(load);
        else
            status = reject(load, "%s is not the supported form %s", field,
                            expected);
    }
    ns_scan_fini(&want);
    return status;
}

/* The parts of the file that matter, found in one pass and read in the order
 * that suits us; the order in the file is the writer's business. */
enum section {
    ADDED_TOKENS,
    NORMALIZER,
    PRE_TOKENIZER,
    DECODER,
    MODEL,
    N_TOP,
    TYPE = N_TOP,
    BYTE_FALLBACK,
    IGNORE_MERGES,
    DROPOUT,
    PREFIX,
    SUFFIX,
    VOCAB,
    MERGES,
    N_SECTIONS,
};

static const char *const section_keys[N_SECTIONS] = {
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "decoder",
    "model",
    "type",
    "byte_fallback",
    "ignore_merges",
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "vocab",
    "merges",
};

/* Finds the sections first..end in the object that comes next and passes all
 * others. The model is entered, not passed: it is nearly all of the file. */
static enum ns_status
find_sections(struct load *load, struct ns_reader *at, int first, int end)
{
    struct ns_scan *scan = &load->scan;
    enum ns_status status = NS_OK;

    if (!ns_scan_open(scan, '{'))
        return NS_OK; /* sticks in the scan */
    while (status == NS_OK && ns_scan_member(scan)) {
        int i = first;

        while (i < end && !key_is(scan, section_keys[i]))
            i++;
        if (i == end) {
            ns_scan_skip(scan, NULL);
        } else if (at[i].at) {
            status = reject(load, "%s stands there twice", section_keys[i]);
        } else if (i == MODEL) {
            at[i] = scan->in;
            status = find_sections(load, at, N_TOP, N_SECTIONS);
        } else {
            ns_scan_skip(scan, &at[i]);
        }
    }
    return status;
}

static enum ns_status
index_characters(struct load *load)
{
    struct ns_tokenizer *t = load->t;

    for (int i = 0; i < 256; i++)
        if (t->byte_id[i] < 0)
            return reject(load, "model.vocab lacks the byte token <0x%02X>", i);
    for (int i = 0; i < 128; i++) {
        char c = (char)i;
        int32_t id = find_content(t, &c, 1);

        t->ascii_id[i] =
            has_flag(t, id, IN_VOCAB) && !has_flag(t, id, CONTROL) ? id : -1;
    }
    return NS_OK;
}

/* What the encoder and decoder below do, and nothing else. */
static enum ns_status
check_pipeline(struct load *load, const struct ns_reader *at)
{
    static const struct {
        enum section section;
        const char *field, *want;
        bool optional;
    } fixed[] = {
        { NORMALIZER, "normalizer",
          "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},"
          "\"content\":\"\u2581\"}",
          false },
        { PRE_TOKENIZER, "pre_tokenizer",
          "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
          "\"behavior\":\"MergedWithPrevious\",\"invert\":false}",
          false },
        { DECODER, "decoder",
          "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\","
          "\"pattern\":{\"String\":\"\u2581\"},\"content\":\" \"},"
          "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}",
          false },
        { TYPE, "model.type", "\"BPE\"", false },
        { BYTE_FALLBACK, "model.byte_fallback", "true", false },
        { IGNORE_MERGES, "model.ignore_merges", "false", true },
        { DROPOUT, "model.dropout", "null", true },
        { PREFIX, "model.continuing_subword_prefix", "null", true },
        { SUFFIX, "model.end_of_word_suffix", "null", true },
    };
    enum ns_status status = NS_OK;

    if (!at[MODEL].at)
        return reject(load, "model is missing");
    for (size_t i = 0; i < sizeof(fixed) / sizeof(*fixed); i++) {
        const struct ns_reader *slice = &at[fixed[i].section];

        if (status == NS_OK && (slice->at || !fixed[i].optional))
            status = expect_section(load, slice, fixed[i].field, fixed[i].want);
    }
    for (int i = 0; i < N_SECTIONS && status == NS_OK; i++)
        if (!at[i].at && (i == ADDED_TOKENS || i == VOCAB || i == MERGES))
            status = reject(load, "%s is missing", section_keys[i]);
    return status;
}

static enum ns_status
read_file(struct load *load)
{
    struct ns_scan *scan = &load->scan;
    struct ns_reader at[N_SECTIONS] = { 0 };
    enum ns_status status;

    status = find_sections(load, at, ADDED_TOKENS, N_TOP);
    ns_scan_end(scan);
    if (status == NS_OK)
        status = ns_scan_check(scan, load->name, load->err);
    if (status == NS_OK)
        status = check_pipeline(load, at);
    if (status == NS_OK)
        status = read_vocab(load, &at[VOCAB]);
    if (status == NS_OK)
        status = index_vocab(load, &at[ADDED_TOKENS]);
    if (status == NS_OK)
        status = read_added(load, &at[ADDED_TOKENS]);
    if (status == NS_OK)
        status = index_characters(load);
    if (status == NS_OK) /* last: it wants to know every control token */
        status = read_merges(load, &at[MERGES]);
    return status;
}

enum ns_status
ns_tokenizer_parse(const char *json, size_t length, const char *name,
                   struct ns_tokenizer **out, struct ns_error *err)
{
    struct load load = { .name = name, .err = err };
    enum ns_status status;

    if (length > MAX_FILE)
        return ns_refuse(err, "bad_model", NULL,
                         "%s has %zu bytes, the limit is %d", name, length,
                         MAX_FILE);
    load.t = calloc(1, sizeof(*load.t));
    if (!load.t)
        return no_memory(&load);
    ns_buf_init(&load.t->contents, MAX_CONTENTS);
    memset(load.t->byte_id, 0xff, sizeof(load.t->byte_id));
    ns_scan_init(&load.scan, json, length);
    status = read_file(&load);
    ns_scan_fini(&load.scan);
    if (status == NS_OK)
        *out = load.t;
    else
        ns_tokenizer_close(load.t);
    return status;
}

enum ns_status
ns_tokenizer_open(const char *path, struct ns_tokenizer **out,
                  struct ns_error *err)
{
    void *map = MAP_FAILED;
    struct stat st;
    enum ns_status status;
    int fd;

    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return ns_fail_errno(err, NS_REJECT, "open %s", path);
    if (fstat(fd, &st) == -1) {
        status = ns_fail_errno(err, NS_REJECT, "stat %s", path);
        goto out;
    }
    if (!S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > MAX_FILE) {
        status =
            ns_refuse(err, "bad_model", NULL,
                      "%s must be a file of 1 to %d bytes", path, MAX_FILE);
        goto out;
    }
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
        status = ns_fail_errno(err, NS_FATAL, "map %s", path);
        goto out;
    }
    status = ns_tokenizer_parse(map, (size_t)st.st_size, path, out, err);
out:
    if (map != MAP_FAILED)
        munmap(map, (size_t)st.st_size);
    close(fd);
    return status;
}

void
ns_tokenizer_close(struct ns_tokenizer *t)
{
    if (!t)
        return;
    free(t->nodes);
    free(t->bigrams);
    free(t->merges);
    free(t->by_content);
    free(t->tokens);
    ns_buf_fini(&t->contents);
    free(t);
}
