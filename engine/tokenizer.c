#include "engine/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/reader.h"
#include "base/size.h"
#include "engine/json_scan.h"

enum {
    MAX_FILE = 256 << 20,
    MAX_IDS = 1 << 20,
    MAX_MERGES = 1 << 21,
    MAX_CONTENT = 1024, /* bytes of one token; the released file has 93 */
    MAX_ADDED = 256,    /* bytes of one added token */
    MAX_ADDED_JSON = 16 << 20,
    MAX_CONTENTS = 64 << 20,
    BIGRAM_BITS = 22,
    FLUSH_KEEP = 3, /* a character may lack that many bytes */
};

enum {
    PRESENT = 1, /* the id is in use */
    IN_VOCAB = 2,
    ADDED = 4,
    SPECIAL = 8,
    CONTROL = 16,
    BYTE = 32, /* <0xNN>: `byte` says which */
};

struct token {
    uint32_t at, length; /* in `contents`; a NUL follows */
    uint8_t flags;
    uint8_t byte;
};

/* The added tokens as a trie: a node a byte, siblings in a list. */
struct node {
    uint32_t child, sibling; /* 0: none */
    int32_t id;              /* -1: no token ends here */
    unsigned char byte;
};

struct merge {
    int32_t left, right, result; /* left -1: a free slot */
    uint32_t rank;
};

struct ns_tokenizer {
    struct ns_buf contents;
    struct token *tokens;
    uint32_t n_tokens, token_capacity;

    int32_t *by_content; /* open addressing, -1 free */
    size_t content_mask;

    struct merge *merges; /* open addressing by (left, right) */
    size_t merge_mask, n_merges;

    /* Which characters ever stand side by side inside a merged token, as
     * hashed bits. Where two neighbours never do, no merge crosses, and BPE
     * may cut the text there: words instead of documents in the heap. A
     * false hit only misses a cut. */
    uint64_t *bigrams;

    struct node *nodes;
    uint32_t n_nodes;
    uint32_t roots[256]; /* first node by first byte; 0: none */

    int32_t byte_id[256];
    int32_t ascii_id[128]; /* id of the one-character token, or -1 */
};

/* What decides a token's class, from MODEL.md's list of the chat format. */
static const char *const markers[] = {
    "<|tool>",        "<tool|>",      "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", "<|\"|>", "<|think|>",
    "<|channel>",     "<channel|>",   "<|turn>",      "<turn|>",
    "<|image>",       "<|image|>",    "<image|>",     "[multimodal]",
    "<mask>",         "<bos>",        "<eos>",        "<pad>",
};

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

static const char *
content_of(const struct ns_tokenizer *t, int32_t id)
{
    return t->contents.data + t->tokens[id].at;
}

static bool
has_flag(const struct ns_tokenizer *t, int32_t id, uint8_t flag)
{
    return id >= 0 && (uint32_t)id < t->n_tokens &&
           (t->tokens[id].flags & flag);
}

static int32_t
find_content(const struct ns_tokenizer *t, const char *text, size_t length)
{
    size_t slot = XXH3_64bits(text, length) & t->content_mask;

    for (; t->by_content[slot] >= 0; slot = (slot + 1) & t->content_mask) {
        int32_t id = t->by_content[slot];

        if (t->tokens[id].length == length &&
            memcmp(content_of(t, id), text, length) == 0)
            return id;
    }
    return -1;
}

static uint64_t
mix(uint64_t z)
{
    z = (z ^ z >> 33) * 0xff51afd7ed558ccdull;
    z = (z ^ z >> 33) * 0xc4ceb9fe1a85ec53ull;
    return z ^ z >> 33;
}

static struct merge *
merge_slot(const struct ns_tokenizer *t, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t slot = mix(key) & t->merge_mask;

    while (t->merges[slot].left >= 0 && (t->merges[slot].left != left ||
                                         t->merges[slot].right != right))
        slot = (slot + 1) & t->merge_mask;
    return &t->merges[slot];
}

static size_t
bigram_bit(uint32_t left, uint32_t right)
{
    return mix((uint64_t)left << 32 | right) >> (64 - BIGRAM_BITS);
}

static bool
may_join(const struct ns_tokenizer *t, uint32_t left, uint32_t right)
{
    size_t bit = bigram_bit(left, right);

    return t->bigrams[bit / 64] >> (bit % 64) & 1;
}

static size_t
power_above(size_t n)
{
    size_t power = 1024;

    while (power < n)
        power *= 2;
    return power;
}

/* Loading ------------------------------------------------------------------ */

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
    return ns_fail(load->err, NS_FATAL, "out of memory reading %s",
                   load->name);
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
add_token(struct load *load, const char *field, const char *text,
          size_t length, uint64_t id, uint8_t flags)
{
    struct ns_tokenizer *t = load->t;
    char show[72];
    enum ns_status status;
    struct token *token;
    int byte;

    if (id >= MAX_IDS)
        return ns_fail(load->err, NS_REJECT,
                       "%s: %s: id %llu of \"%s\" is over the limit of %d",
                       load->name, field, (unsigned long long)id,
                       shown(text, length, show), MAX_IDS - 1);
    if (length == 0 || length > MAX_CONTENT)
        return ns_fail(load->err, NS_REJECT,
                       "%s: %s: token %llu has %zu bytes, allowed are 1 to %d",
                       load->name, field, (unsigned long long)id, length,
                       MAX_CONTENT);
    status = grow_tokens(load, (uint32_t)id + 1);
    if (status != NS_OK)
        return status;
    token = &t->tokens[id];
    if (token->flags & PRESENT)
        return ns_fail(load->err, NS_REJECT,
                       "%s: %s: id %llu is given to \"%s\" and again",
                       load->name, field, (unsigned long long)id,
                       shown(text, length, show));
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
                status = add_token(load, "model.vocab",
                                   key.data ? key.data : "", key.length, id,
                                   IN_VOCAB);
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
        return ns_fail(load->err, NS_REJECT,
                       "%s: \"%s\" stands under the ids %d and %d",
                       load->name, shown(text, length, show), other, id);
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
add_to_trie(struct ns_tokenizer *t, const char *text, size_t length,
            int32_t id)
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
        return ns_fail(load->err, NS_REJECT,
                       "%s: added_tokens: \"%s\" has id %llu here and %d "
                       "elsewhere", load->name, show, (unsigned long long)id,
                       known);
    } else if (has_flag(t, known, ADDED | BYTE)) {
        return ns_fail(load->err, NS_REJECT,
                       "%s: added_tokens: \"%s\" %s", load->name, show,
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
            return ns_fail(load->err, NS_REJECT,
                           "%s: added_tokens[%zu].%s must be false",
                           load->name, index, plain[i]);
        if (special && ns_scan_peek(scan) == 't')
            flags |= SPECIAL | CONTROL;
        ns_scan_skip(scan, NULL);
    }
    if (scan->problem)
        return NS_OK;
    if (content->failed)
        return no_memory(load);
    if (content->over || content->length == 0 || id == UINT64_MAX)
        return ns_fail(load->err, NS_REJECT,
                       "%s: added_tokens[%zu] needs an id and a content of 1 "
                       "to %d bytes", load->name, index, MAX_ADDED);
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
        return ns_fail(load->err, NS_REJECT,
                       "%s: added_tokens has %zu bytes, the limit is %d",
                       load->name, ns_reader_left(slice), MAX_ADDED_JSON);
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
            return ns_fail(load->err, NS_REJECT,
                           "%s: model.merges[%u] \"%s\": its %s is not in "
                           "model.vocab", load->name, rank,
                           shown(text, length, show),
                           i == 0 ? "left" : i == 1 ? "right" : "result");
        /* Else plain text could merge into a marker, or into a byte. */
        if (has_flag(t, id[i], CONTROL | BYTE))
            return ns_fail(load->err, NS_REJECT,
                           "%s: model.merges[%u] \"%s\" touches the %s token "
                           "%d", load->name, rank, shown(text, length, show),
                           has_flag(t, id[i], BYTE) ? "byte" : "control",
                           id[i]);
    }
    merge = merge_slot(t, id[0], id[1]);
    if (merge->left >= 0)
        return ns_fail(load->err, NS_REJECT,
                       "%s: model.merges[%u] \"%s\" stands there twice",
                       load->name, rank, shown(text, length, show));
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
        if (!space || memchr(space + 1, ' ', (size_t)(pair->data +
                                                      pair->length - space) -
                                                 1))
            return ns_fail(load->err, NS_REJECT,
                           "%s: model.merges[%u] must be two tokens and one "
                           "space", load->name, rank);
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
        return ns_fail(load->err, NS_REJECT,
                       "%s: model.merges[%u] has %zu parts, must be 2",
                       load->name, rank, parts);
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
        return ns_fail(load->err, NS_REJECT,
                       "%s: model.merges are more than %d", load->name,
                       MAX_MERGES);
    slots = power_above(2 * n);
    t->merges = malloc(slots * sizeof(*t->merges));
    t->bigrams = calloc((size_t)1 << (BIGRAM_BITS - 6), sizeof(*t->bigrams));
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
            if (more != (kind == '{' ? ns_scan_member(b)
                                     : ns_scan_element(b)))
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
        return ns_fail(load->err, NS_REJECT, "%s: %s is missing", load->name,
                       field);
    ns_scan_init(&want, expected, strlen(expected));
    scan->in = *slice;
    if (!same_value(scan, &want)) {
        if (scan->text.failed || want.text.failed)
            status = no_memory(load);
        else
            status = ns_fail(load->err, NS_REJECT,
                             "%s: %s is not the supported form %s",
                             load->name, field, expected);
    }
    ns_scan_fini(&want);
    return status;
}

/* The parts of the file that matter, found in one pass and read in the order
 * that suits us; the order in the file is the writer's business. */
enum section {
    ADDED_TOKENS, NORMALIZER, PRE_TOKENIZER, DECODER, MODEL, N_TOP,
    TYPE = N_TOP, BYTE_FALLBACK, IGNORE_MERGES, DROPOUT, PREFIX, SUFFIX, VOCAB,
    MERGES, N_SECTIONS,
};

static const char *const section_keys[N_SECTIONS] = {
    "added_tokens", "normalizer", "pre_tokenizer", "decoder", "model",
    "type", "byte_fallback", "ignore_merges", "dropout",
    "continuing_subword_prefix", "end_of_word_suffix", "vocab", "merges",
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
            status = ns_fail(load->err, NS_REJECT, "%s: %s stands there twice",
                             load->name, section_keys[i]);
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
            return ns_fail(load->err, NS_REJECT,
                           "%s: model.vocab lacks the byte token <0x%02X>",
                           load->name, i);
    for (int i = 0; i < 128; i++) {
        char c = (char)i;
        int32_t id = find_content(t, &c, 1);

        t->ascii_id[i] = has_flag(t, id, IN_VOCAB) &&
                         !has_flag(t, id, CONTROL) ? id : -1;
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
          "\"content\":\"\u2581\"}", false },
        { PRE_TOKENIZER, "pre_tokenizer",
          "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},"
          "\"behavior\":\"MergedWithPrevious\",\"invert\":false}", false },
        { DECODER, "decoder",
          "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\","
          "\"pattern\":{\"String\":\"\u2581\"},\"content\":\" \"},"
          "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}", false },
        { TYPE, "model.type", "\"BPE\"", false },
        { BYTE_FALLBACK, "model.byte_fallback", "true", false },
        { IGNORE_MERGES, "model.ignore_merges", "false", true },
        { DROPOUT, "model.dropout", "null", true },
        { PREFIX, "model.continuing_subword_prefix", "null", true },
        { SUFFIX, "model.end_of_word_suffix", "null", true },
    };
    enum ns_status status = NS_OK;

    if (!at[MODEL].at)
        return ns_fail(load->err, NS_REJECT, "%s: model is missing",
                       load->name);
    for (size_t i = 0; i < sizeof(fixed) / sizeof(*fixed); i++) {
        const struct ns_reader *slice = &at[fixed[i].section];

        if (status == NS_OK && (slice->at || !fixed[i].optional))
            status = expect_section(load, slice, fixed[i].field,
                                    fixed[i].want);
    }
    for (int i = 0; i < N_SECTIONS && status == NS_OK; i++)
        if (!at[i].at && (i == ADDED_TOKENS || i == VOCAB || i == MERGES))
            status = ns_fail(load->err, NS_REJECT, "%s: %s is missing",
                             load->name, section_keys[i]);
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
        return ns_fail(err, NS_REJECT, "%s has %zu bytes, the limit is %d",
                       name, length, MAX_FILE);
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
        status = ns_fail(err, NS_REJECT,
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

/* Asking ------------------------------------------------------------------- */

uint32_t
ns_tokenizer_size(const struct ns_tokenizer *tokenizer)
{
    return tokenizer->n_tokens;
}

int32_t
ns_tokenizer_id(const struct ns_tokenizer *tokenizer, const char *content)
{
    return find_content(tokenizer, content, strlen(content));
}

const char *
ns_tokenizer_content(const struct ns_tokenizer *tokenizer, int32_t id)
{
    return has_flag(tokenizer, id, PRESENT) ? content_of(tokenizer, id) : NULL;
}

bool
ns_tokenizer_is_control(const struct ns_tokenizer *tokenizer, int32_t id)
{
    return has_flag(tokenizer, id, CONTROL);
}

bool
ns_tokenizer_is_special(const struct ns_tokenizer *tokenizer, int32_t id)
{
    return has_flag(tokenizer, id, SPECIAL);
}

void
ns_ids_fini(struct ns_ids *ids)
{
    free(ids->id);
    ids->id = NULL;
    ids->n = ids->capacity = 0;
}

enum ns_status
ns_ids_add(struct ns_ids *ids, int32_t id, struct ns_error *err)
{
    if (ids->n >= ids->limit)
        return ns_refuse(err, "over_context", NULL,
                         "the text has more than %zu tokens", ids->limit);
    if (ids->n == ids->capacity) {
        size_t capacity = ids->capacity ? 2 * ids->capacity : 256, bytes;
        int32_t *grown;

        grown = ns_size_mul(capacity, sizeof(*grown), &bytes)
                    ? realloc(ids->id, bytes) : NULL;
        if (!grown)
            return ns_fail(err, NS_FATAL, "out of memory for %zu tokens",
                           capacity);
        ids->id = grown;
        ids->capacity = capacity;
    }
    ids->id[ids->n++] = id;
    return NS_OK;
}

/* Encoding ----------------------------------------------------------------- */

/* A word in the making: the symbols as a list by index, and the pairs that
 * could merge as a heap of rank << 32 | index, so that the lowest rank comes
 * first and the leftmost among equals. A pair whose symbols have changed
 * since is known by its rank, which is no longer that of the pair. */
struct symbol {
    int32_t id; /* -1: swallowed by the one before it */
    uint32_t previous, next;
};

#define NONE UINT32_MAX

struct encoder {
    const struct ns_tokenizer *t;
    struct ns_ids *out;
    struct ns_error *err;
    struct symbol *symbols; /* owned */
    size_t n_symbols, symbol_capacity;
    uint64_t *heap; /* owned */
    size_t n_heap, heap_capacity;
};

static enum ns_status
push_symbol(struct encoder *enc, int32_t id)
{
    if (enc->n_symbols == enc->symbol_capacity) {
        size_t capacity = 2 * enc->symbol_capacity + 256;
        struct symbol *grown =
            realloc(enc->symbols, capacity * sizeof(*grown));

        if (!grown)
            return ns_fail(enc->err, NS_FATAL,
                           "out of memory for a word of %zu symbols",
                           capacity);
        enc->symbols = grown;
        enc->symbol_capacity = capacity;
    }
    enc->symbols[enc->n_symbols++].id = id;
    return NS_OK;
}

static enum ns_status
push_pair(struct encoder *enc, uint32_t at)
{
    const struct symbol *left = &enc->symbols[at];
    const struct merge *merge;
    uint64_t key;
    size_t i;

    if (left->next == NONE)
        return NS_OK;
    merge = merge_slot(enc->t, left->id, enc->symbols[left->next].id);
    if (merge->left < 0)
        return NS_OK;
    if (enc->n_heap == enc->heap_capacity) {
        size_t capacity = 2 * enc->heap_capacity + 256;
        uint64_t *grown = realloc(enc->heap, capacity * sizeof(*grown));

        if (!grown)
            return ns_fail(enc->err, NS_FATAL,
                           "out of memory for %zu pairs", capacity);
        enc->heap = grown;
        enc->heap_capacity = capacity;
    }
    key = (uint64_t)merge->rank << 32 | at;
    for (i = enc->n_heap++; i > 0 && enc->heap[(i - 1) / 2] > key;
         i = (i - 1) / 2)
        enc->heap[i] = enc->heap[(i - 1) / 2];
    enc->heap[i] = key;
    return NS_OK;
}

static uint64_t
pop_pair(struct encoder *enc)
{
    uint64_t top = enc->heap[0], last = enc->heap[--enc->n_heap];
    size_t i = 0, child;

    while ((child = 2 * i + 1) < enc->n_heap) {
        if (child + 1 < enc->n_heap &&
            enc->heap[child + 1] < enc->heap[child])
            child++;
        if (enc->heap[child] >= last)
            break;
        enc->heap[i] = enc->heap[child];
        i = child;
    }
    enc->heap[i] = last;
    return top;
}

static enum ns_status
merge_pair(struct encoder *enc, uint64_t pair)
{
    uint32_t at = (uint32_t)pair, rank = (uint32_t)(pair >> 32);
    struct symbol *left = &enc->symbols[at], *right;
    const struct merge *merge;
    enum ns_status status;

    if (left->id < 0 || left->next == NONE)
        return NS_OK;
    right = &enc->symbols[left->next];
    merge = merge_slot(enc->t, left->id, right->id);
    if (merge->left < 0 || merge->rank != rank)
        return NS_OK;
    left->id = merge->result;
    left->next = right->next;
    right->id = -1;
    if (left->next != NONE)
        enc->symbols[left->next].previous = at;
    if (left->previous != NONE) {
        status = push_pair(enc, left->previous);
        if (status != NS_OK)
            return status;
    }
    return push_pair(enc, at);
}

/* Merges the symbols gathered so far and sends them out. */
static enum ns_status
end_word(struct encoder *enc)
{
    uint32_t n = (uint32_t)enc->n_symbols;
    enum ns_status status = NS_OK;

    for (uint32_t i = 0; i < n; i++) {
        enc->symbols[i].previous = i == 0 ? NONE : i - 1;
        enc->symbols[i].next = i + 1 == n ? NONE : i + 1;
    }
    enc->n_heap = 0;
    for (uint32_t i = 0; i < n && status == NS_OK; i++)
        status = push_pair(enc, i);
    while (enc->n_heap > 0 && status == NS_OK)
        status = merge_pair(enc, pop_pair(enc));
    for (uint32_t i = 0; i < n && status == NS_OK; i = enc->symbols[i].next) {
        status = ns_ids_add(enc->out, enc->symbols[i].id, enc->err);
        if (enc->symbols[i].next == NONE)
            break;
    }
    enc->n_symbols = 0;
    return status;
}

/* A character as its own token, or as its bytes. */
static enum ns_status
push_character(struct encoder *enc, const char *text, size_t length)
{
    const struct ns_tokenizer *t = enc->t;
    enum ns_status status = NS_OK;
    int32_t id;

    if (length == 1) {
        id = t->ascii_id[(unsigned char)text[0]];
    } else {
        id = find_content(t, text, length);
        if (!has_flag(t, id, IN_VOCAB) || has_flag(t, id, CONTROL))
            id = -1;
    }
    if (id >= 0)
        return push_symbol(enc, id);
    for (size_t i = 0; i < length && status == NS_OK; i++)
        status = push_symbol(enc, t->byte_id[(unsigned char)text[i]]);
    return status;
}

/* BPE over a stretch of text without added tokens; it is UTF-8. */
static enum ns_status
encode_piece(struct encoder *enc, const char *text, size_t length)
{
    uint32_t before = 0;
    enum ns_status status = NS_OK;

    for (size_t i = 0, n; i < length && status == NS_OK; i += n) {
        const char *at = text + i;
        uint32_t code = 0;
        bool space;

        n = ns_utf8_char(at, length - i, &code);
        space = code == ' ';
        if (space)
            code = 0x2581;
        if (i > 0 && !may_join(enc->t, before, code)) {
            status = end_word(enc);
            if (status != NS_OK)
                break;
        }
        status = space ? push_character(enc, "\u2581", 3)
                       : push_character(enc, at, n);
        before = code;
    }
    return status == NS_OK && enc->n_symbols ? end_word(enc) : status;
}

/* The longest added token at `text`; control tokens count only up to
 * `trusted` bytes. Its length, or 0. */
static size_t
match_added(const struct ns_tokenizer *t, const char *text, size_t length,
            size_t trusted, int32_t *id)
{
    uint32_t at = t->roots[(unsigned char)text[0]];
    size_t best = 0;

    for (size_t i = 0; i < length; i++) {
        while (at && t->nodes[at].byte != (unsigned char)text[i])
            at = t->nodes[at].sibling;
        if (!at)
            break;
        if (t->nodes[at].id >= 0 &&
            (i + 1 <= trusted || !has_flag(t, t->nodes[at].id, CONTROL))) {
            best = i + 1;
            *id = t->nodes[at].id;
        }
        at = t->nodes[at].child;
    }
    return best;
}

/* The joined text, walked once: `span` is the one that holds `i`, and it ends
 * at `span_end`. */
static enum ns_status
encode_joined(struct encoder *enc, const char *text, size_t length,
              const struct ns_span *spans)
{
    size_t from = 0, i = 0, span_end = spans[0].length, n;
    enum ns_status status = NS_OK;
    int32_t id = -1;

    while (i < length && status == NS_OK) {
        while (i >= span_end) {
            spans++;
            span_end += spans->length;
        }
        if (!enc->t->roots[(unsigned char)text[i]]) {
            i++;
            continue;
        }
        n = match_added(enc->t, text + i, length - i,
                        spans->trusted ? span_end - i : 0, &id);
        if (n == 0) {
            i++;
            continue;
        }
        status = encode_piece(enc, text + from, i - from);
        if (status == NS_OK)
            status = ns_ids_add(enc->out, id, enc->err);
        i += n;
        from = i;
    }
    return status == NS_OK ? encode_piece(enc, text + from, length - from)
                           : status;
}

enum ns_status
ns_tokenizer_encode(const struct ns_tokenizer *tokenizer,
                    const struct ns_span *spans, size_t n_spans,
                    struct ns_ids *out, struct ns_error *err)
{
    struct encoder enc = { .t = tokenizer, .out = out, .err = err };
    enum ns_status status;
    size_t length = 0, n = 0;
    char *joined = NULL;

    for (size_t i = 0; i < n_spans; i++) {
        size_t good = ns_utf8_span(spans[i].text, spans[i].length);

        if (good < spans[i].length)
            return ns_refuse(err, "bad_text", NULL,
                             "the text is not UTF-8 at byte %zu",
                             length + good);
        if (!ns_size_add(length, spans[i].length, &length) ||
            length >= UINT32_MAX)
            return ns_refuse(err, "too_large", NULL,
                             "the text is over 4 GiB");
    }
    if (length == 0)
        return NS_OK;
    joined = malloc(length);
    if (!joined)
        return ns_fail(err, NS_FATAL, "out of memory for %zu bytes of text",
                       length);
    for (size_t i = 0; i < n_spans; n += spans[i++].length)
        if (spans[i].length)
            memcpy(joined + n, spans[i].text, spans[i].length);
    status = encode_joined(&enc, joined, length, spans);
    free(enc.heap);
    free(enc.symbols);
    free(joined);
    return status;
}

/* Decoding ----------------------------------------------------------------- */

static const char replacement[] = "\xef\xbf\xbd";

void
ns_decoder_init(struct ns_decoder *decoder)
{
    decoder->n_pending = 0;
}

static void
put_run(struct ns_decoder *decoder, size_t n, struct ns_buf *out)
{
    const char *run = (const char *)decoder->pending;

    if (ns_utf8_span(run, n) == n)
        ns_buf_add(out, run, n);
    else
        for (size_t i = 0; i < n; i++)
            ns_buf_add(out, replacement, 3);
    memmove(decoder->pending, decoder->pending + n, decoder->n_pending - n);
    decoder->n_pending -= n;
}

void
ns_decoder_flush(struct ns_decoder *decoder, struct ns_buf *out)
{
    put_run(decoder, decoder->n_pending, out);
}

static void
push_byte(struct ns_decoder *decoder, uint8_t byte, struct ns_buf *out)
{
    const char *run = (const char *)decoder->pending;

    if (decoder->n_pending == sizeof(decoder->pending)) {
        size_t good = ns_utf8_span(run, decoder->n_pending);

        /* What follows the good part is a character cut in two, or bad. */
        put_run(decoder,
                decoder->n_pending - good <= FLUSH_KEEP ? good
                                                        : decoder->n_pending,
                out);
    }
    decoder->pending[decoder->n_pending++] = byte;
}

void
ns_decoder_push(struct ns_decoder *decoder,
                const struct ns_tokenizer *tokenizer, int32_t id,
                bool skip_control, struct ns_buf *out)
{
    const struct token *token;
    const char *text, *end, *mark;

    if (!has_flag(tokenizer, id, PRESENT) ||
        (skip_control && has_flag(tokenizer, id, CONTROL)))
        return;
    token = &tokenizer->tokens[id];
    if (token->flags & BYTE) {
        push_byte(decoder, token->byte, out);
        return;
    }
    ns_decoder_flush(decoder, out);
    text = content_of(tokenizer, id);
    end = text + token->length;
    while ((mark = memmem(text, (size_t)(end - text), "\u2581", 3))) {
        ns_buf_add(out, text, (size_t)(mark - text));
        ns_buf_byte(out, ' ');
        text = mark + 3;
    }
    ns_buf_add(out, text, (size_t)(end - text));
}

void
ns_tokenizer_decode(const struct ns_tokenizer *tokenizer, const int32_t *ids,
                    size_t n, bool skip_control, struct ns_buf *out)
{
    struct ns_decoder decoder;

    ns_decoder_init(&decoder);
    for (size_t i = 0; i < n; i++)
        ns_decoder_push(&decoder, tokenizer, ids[i], skip_control, out);
    ns_decoder_flush(&decoder, out);
}
