#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/reader.h"
#include "base/size.h"
#include "engine/tokenizer_tables.h"

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

size_t
ns_tokenizer_bytes(const struct ns_tokenizer *tokenizer, int32_t id, char *out,
                   size_t room)
{
    const struct token *token;
    const char *text;
    size_t n = 0;

    if (!has_flag(tokenizer, id, PRESENT) || has_flag(tokenizer, id, CONTROL))
        return 0;
    token = &tokenizer->tokens[id];
    if (token->flags & BYTE) {
        *out = (char)token->byte;
        return 1;
    }
    text = content_of(tokenizer, id);
    for (uint32_t i = 0; i < token->length; n++) {
        bool space = token->length - i >= 3 &&
                     memcmp(text + i, "\u2581", 3) == 0;

        if (n == room)
            return 0;
        out[n] = space ? ' ' : text[i];
        i += space ? 3 : 1;
    }
    return n;
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
                    ? realloc(ids->id, bytes)
                    : NULL;
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
        struct symbol *grown = realloc(enc->symbols, capacity * sizeof(*grown));

        if (!grown)
            return ns_fail(enc->err, NS_FATAL,
                           "out of memory for a word of %zu symbols", capacity);
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
            return ns_fail(enc->err, NS_FATAL, "out of memory for %zu pairs",
                           capacity);
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
        if (child + 1 < enc->n_heap && enc->heap[child + 1] < enc->heap[child])
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
            return ns_refuse(err, "too_large", NULL, "the text is over 4 GiB");
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

enum { FLUSH_KEEP = 3 }; /* a character may lack that many bytes */

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
