#include "engine/vocabulary.h"

#include <stdlib.h>
#include <string.h>

struct node {
    uint32_t skip;  /* the first node that does not begin with this one */
    uint32_t first; /* ids[first..]: the tokens that end here, */
    uint16_t n_ids; /* so many */
    uint8_t byte;
    uint8_t depth; /* bytes in front of this one */
};

struct text {
    const unsigned char *bytes;
    uint32_t length;
    int32_t id;
};

struct ns_vocabulary {
    struct node *node;
    uint32_t n_nodes, n_tokens, n_ids;
    int32_t *id;           /* by the order of their bytes */
    unsigned char *bytes;  /* of all tokens, one behind the other */
    struct text *text;     /* [n_ids] by order of bytes */
    uint32_t *place;       /* [n_tokens] in `text`; UINT32_MAX: has no bytes */
};

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for the tokens' bytes");
}

static int
by_bytes(const void *a, const void *b)
{
    const struct text *x = a, *y = b;
    uint32_t n = x->length < y->length ? x->length : y->length;
    int order = memcmp(x->bytes, y->bytes, n);

    if (order == 0 && x->length != y->length)
        order = x->length < y->length ? -1 : 1;
    if (order == 0)
        order = x->id < y->id ? -1 : 1;
    return order;
}

/* All tokens' bytes, and `text` in order. */
static enum ns_status
read_tokens(struct ns_vocabulary *v, const struct ns_tokenizer *tokenizer,
            struct ns_error *err)
{
    char room[NS_TOKEN_BYTES];
    size_t total = 0, at = 0;

    for (uint32_t id = 0; id < v->n_tokens; id++)
        total += ns_tokenizer_bytes(tokenizer, (int32_t)id, room,
                                    sizeof(room));
    v->bytes = malloc(total + sizeof(room));
    v->text = calloc(v->n_tokens + 1u, sizeof(*v->text));
    v->id = calloc(v->n_tokens + 1u, sizeof(*v->id));
    v->place = calloc(v->n_tokens + 1u, sizeof(*v->place));
    v->node = calloc(total + 1, sizeof(*v->node));
    if (!v->bytes || !v->text || !v->id || !v->place || !v->node)
        return no_memory(err);
    for (uint32_t id = 0; id < v->n_tokens; id++) {
        size_t n = ns_tokenizer_bytes(tokenizer, (int32_t)id,
                                      (char *)v->bytes + at,
                                      sizeof(room));

        v->place[id] = UINT32_MAX;
        if (n == 0)
            continue;
        v->text[v->n_ids++] = (struct text){ v->bytes + at, (uint32_t)n,
                                             (int32_t)id };
        at += n;
    }
    qsort(v->text, v->n_ids, sizeof(*v->text), by_bytes);
    for (uint32_t i = 0; i < v->n_ids; i++) {
        v->id[i] = v->text[i].id;
        v->place[v->id[i]] = i;
    }
    return NS_OK;
}

/* Each text adds the nodes that it does not share with the one before. */
static void
build(struct ns_vocabulary *v)
{
    uint32_t open[NS_TOKEN_BYTES], n_open = 0;

    for (uint32_t i = 0; i < v->n_ids; i++) {
        const struct text *text = &v->text[i];
        uint32_t same = 0;

        while (same < n_open && same < text->length &&
               v->node[open[same]].byte == text->bytes[same])
            same++;
        while (n_open > same)
            v->node[open[--n_open]].skip = v->n_nodes;
        while (n_open < text->length) {
            v->node[v->n_nodes] = (struct node){
                .first = i,
                .byte = text->bytes[n_open],
                .depth = (uint8_t)n_open,
            };
            open[n_open++] = v->n_nodes++;
        }
        if (v->node[open[n_open - 1]].n_ids++ == 0)
            v->node[open[n_open - 1]].first = i;
    }
    while (n_open > 0)
        v->node[open[--n_open]].skip = v->n_nodes;
}

enum ns_status
ns_vocabulary_create(const struct ns_tokenizer *tokenizer,
                     struct ns_vocabulary **out, struct ns_error *err)
{
    struct ns_vocabulary *v = calloc(1, sizeof(*v));
    enum ns_status status;

    if (!v)
        return no_memory(err);
    v->n_tokens = ns_tokenizer_size(tokenizer);
    status = read_tokens(v, tokenizer, err);
    if (status == NS_OK) {
        build(v);
        *out = v;
        v = NULL;
    }
    ns_vocabulary_destroy(v);
    return status;
}

void
ns_vocabulary_destroy(struct ns_vocabulary *v)
{
    if (!v)
        return;
    free(v->node);
    free(v->id);
    free(v->bytes);
    free(v->text);
    free(v->place);
    free(v);
}

bool
ns_vocabulary_mask(const struct ns_vocabulary *v,
                   struct ns_automaton *automaton, uint32_t state,
                   uint32_t *bits)
{
    uint32_t at[NS_TOKEN_BYTES + 1] = { state };

    for (uint32_t i = 0; i < v->n_nodes;) {
        const struct node *node = &v->node[i];
        uint32_t next = ns_automaton_next(automaton, at[node->depth],
                                          node->byte);

        if (next == NS_AUTOMATON_FULL)
            return false;
        if (next == NS_AUTOMATON_DEAD) {
            i = node->skip;
            continue;
        }
        at[node->depth + 1] = next;
        for (uint32_t t = node->first; t < node->first + node->n_ids; t++)
            bits[v->id[t] / 32] |= 1u << v->id[t] % 32;
        i++;
    }
    return true;
}

bool
ns_vocabulary_has(const struct ns_vocabulary *v, int32_t id)
{
    return id >= 0 && (uint32_t)id < v->n_tokens &&
           v->place[id] != UINT32_MAX;
}

uint32_t
ns_vocabulary_next(const struct ns_vocabulary *v,
                   struct ns_automaton *automaton, uint32_t state, int32_t id)
{
    const struct text *text;

    if (!ns_vocabulary_has(v, id))
        return NS_AUTOMATON_DEAD;
    text = &v->text[v->place[id]];
    for (uint32_t i = 0; i < text->length && state != NS_AUTOMATON_DEAD; i++)
        state = ns_automaton_next(automaton, state, text->bytes[i]);
    return state;
}

int32_t
ns_vocabulary_shortest(const struct ns_vocabulary *v,
                       struct ns_automaton *automaton, uint32_t state)
{
    uint32_t from = 0, end = v->n_nodes;
    int32_t best = -1;

    while (ns_automaton_rest(automaton, state) > 0 && from < end) {
        uint8_t byte = ns_automaton_shortest(automaton, state);

        while (from < end && v->node[from].byte != byte)
            from = v->node[from].skip;
        state = ns_automaton_next(automaton, state, byte);
        if (from >= end || state == NS_AUTOMATON_FULL)
            break;
        if (v->node[from].n_ids > 0)
            best = v->id[v->node[from].first];
        end = v->node[from].skip;
        from++;
    }
    return best;
}
