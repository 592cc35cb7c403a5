/* tokenizer_tables.h - what tokenizer_load.c fills and tokenizer.c reads.
 *
 * Private to the two. Everything is found by hash or by id; nothing changes
 * once it is loaded.
 */
#ifndef NS_ENGINE_TOKENIZER_TABLES_H
#define NS_ENGINE_TOKENIZER_TABLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <xxhash.h>

#include "base/buf.h"

enum {
    PRESENT = 1, /* the id is in use */
    IN_VOCAB = 2,
    ADDED = 4,
    SPECIAL = 8,
    CONTROL = 16,
    BYTE = 32, /* <0xNN>: `byte` says which */
};

enum { TOKENIZER_BIGRAM_BITS = 22 };

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

static inline const char *
content_of(const struct ns_tokenizer *t, int32_t id)
{
    return t->contents.data + t->tokens[id].at;
}

static inline bool
has_flag(const struct ns_tokenizer *t, int32_t id, uint8_t flag)
{
    return id >= 0 && (uint32_t)id < t->n_tokens &&
           (t->tokens[id].flags & flag);
}

static inline int32_t
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

static inline uint64_t
mix(uint64_t z)
{
    z = (z ^ z >> 33) * 0xff51afd7ed558ccdull;
    z = (z ^ z >> 33) * 0xc4ceb9fe1a85ec53ull;
    return z ^ z >> 33;
}

static inline struct merge *
merge_slot(const struct ns_tokenizer *t, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t slot = mix(key) & t->merge_mask;

    while (t->merges[slot].left >= 0 &&
           (t->merges[slot].left != left || t->merges[slot].right != right))
        slot = (slot + 1) & t->merge_mask;
    return &t->merges[slot];
}

static inline size_t
bigram_bit(uint32_t left, uint32_t right)
{
    return mix((uint64_t)left << 32 | right) >> (64 - TOKENIZER_BIGRAM_BITS);
}

static inline bool
may_join(const struct ns_tokenizer *t, uint32_t left, uint32_t right)
{
    size_t bit = bigram_bit(left, right);

    return t->bigrams[bit / 64] >> (bit % 64) & 1;
}

#endif
