#include "daemon/summary.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"

enum {
    PIECE_BYTES = 96,   /* a token a byte at worst: less than any part */
    SLACK = 16,         /* of so many tokens one is left free: joined, pieces
                         * may be read otherwise than apart */
    SHOWN_HEADING = 120,
};

/* Where a piece ends, the best first. */
enum rank { AT_HEADING, AT_PARAGRAPH, AT_LINE, AT_SENTENCE, IN_CODE, AT_WORD,
            AT_CHARACTER };

/* The text in short runs, each with its tokens: what parts are made of. */
struct piece {
    size_t end;
    uint32_t n_tokens;
    enum rank rank;            /* of its end */
    size_t heading, n_heading; /* that it stands under */
};

struct split {
    const char *text;
    size_t length;
    const struct ns_tokenizer *tokenizer;
    struct piece *piece;
    size_t n, capacity;
    size_t heading, n_heading; /* the latest */
    char fence;                /* mark of the open one; 0: none */
    size_t n_fence;
    struct ns_error *err;
};

static enum ns_status
no_memory(struct ns_error *err)
{
    return ns_fail(err, NS_FATAL, "out of memory for the parts of a text");
}

/* ---- pieces ------------------------------------------------------------ */

static enum ns_status
add_piece(struct split *s, size_t first, size_t end, enum rank rank)
{
    struct ns_span span = { s->text + first, end - first, false };
    struct ns_ids ids = { .limit = UINT32_MAX };
    enum ns_status status;

    if (s->n == s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 256;
        struct piece *grown = realloc(s->piece, capacity * sizeof(*grown));

        if (!grown)
            return no_memory(s->err);
        s->piece = grown;
        s->capacity = capacity;
    }
    status = ns_tokenizer_encode(s->tokenizer, &span, 1, &ids, s->err);
    s->piece[s->n++] = (struct piece){ end, (uint32_t)ids.n, rank, s->heading,
                                       s->n_heading };
    ns_ids_fini(&ids);
    return status;
}

/* How many marks open or close a fence at the start of a line; 0: none. */
static size_t
fence_of(const char *line, size_t n, char *mark)
{
    size_t at = 0, first;

    while (at < n && at < 3 && line[at] == ' ')
        at++;
    first = at;
    if (at == n || (line[at] != '`' && line[at] != '~'))
        return 0;
    *mark = line[at];
    while (at < n && line[at] == *mark)
        at++;
    return at - first >= 3 ? at - first : 0;
}

static bool
is_heading(const char *line, size_t n)
{
    size_t level = 0;

    while (level < n && line[level] == '#')
        level++;
    return level >= 1 && level <= 6 && level < n && line[level] == ' ';
}

static bool
is_blank(const char *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isspace((unsigned char)line[i]))
            return false;
    return true;
}

static size_t
line_end(const struct split *s, size_t at)
{
    const char *newline = memchr(s->text + at, '\n', s->length - at);

    return newline ? (size_t)(newline - s->text) + 1 : s->length;
}

/* Notes what the line opens, closes and says; the rank of its end. */
static enum rank
read_line(struct split *s, size_t at, size_t end)
{
    const char *line = s->text + at;
    size_t n = end - at, marks;
    char mark = 0;

    marks = fence_of(line, n, &mark);
    if (s->fence) {
        if (marks >= s->n_fence && mark == s->fence) {
            s->fence = 0;
            return AT_PARAGRAPH;
        }
        return IN_CODE;
    }
    if (marks) {
        s->fence = mark;
        s->n_fence = marks;
        return IN_CODE;
    }
    if (is_heading(line, n)) {
        s->heading = at;
        s->n_heading = n;
        while (s->n_heading && isspace((unsigned char)line[s->n_heading - 1]))
            s->n_heading--;
        return AT_WORD; /* a heading stays with what follows it */
    }
    if (end < s->length && is_heading(s->text + end,
                                      line_end(s, end) - end))
        return AT_HEADING;
    return is_blank(line, n) ? AT_PARAGRAPH : AT_LINE;
}

/* Where a piece of a long line may end: at most PIECE_BYTES on. */
static size_t
cut_of(const struct split *s, size_t at, enum rank *rank)
{
    size_t most = at + PIECE_BYTES, end;

    for (end = most; end > at + PIECE_BYTES / 4; end--)
        if (s->text[end - 1] == ' ' && strchr(".!?", s->text[end - 2])) {
            *rank = AT_SENTENCE;
            return end;
        }
    for (end = most; end > at + PIECE_BYTES / 4; end--)
        if (s->text[end - 1] == ' ') {
            *rank = AT_WORD;
            return end;
        }
    *rank = AT_CHARACTER;
    for (end = most; ((unsigned char)s->text[end] & 0xc0) == 0x80; end--)
        ;
    return end;
}

static enum ns_status
cut_to_pieces(struct split *s)
{
    enum ns_status status = NS_OK;
    enum rank rank, inner;

    for (size_t at = 0, end; at < s->length && status == NS_OK; at = end) {
        end = line_end(s, at);
        rank = read_line(s, at, end);
        while (end - at > PIECE_BYTES && status == NS_OK) {
            size_t cut = cut_of(s, at, &inner);

            status = add_piece(s, at, cut, inner);
            at = cut;
        }
        if (status == NS_OK)
            status = add_piece(s, at, end, rank);
    }
    return status;
}

/* ---- parts ------------------------------------------------------------- */

/* The piece that a part from `first` on ends with. */
static size_t
last_of_part(const struct split *s, size_t first, uint32_t most,
             uint32_t *n_tokens)
{
    uint64_t sum = 0, half = 0;
    size_t end = first, best;

    while (end < s->n && (end == first || sum + s->piece[end].n_tokens <= most))
        sum += s->piece[end++].n_tokens;
    best = end - 1;
    if (end < s->n) /* the best in the second half, the later among equals */
        for (size_t i = first; i < end; i++) {
            half += s->piece[i].n_tokens;
            if (2 * half >= sum &&
                (s->piece[i].rank < s->piece[best].rank ||
                 (s->piece[i].rank == s->piece[best].rank && i > best)))
                best = i;
        }
    *n_tokens = 0;
    for (size_t i = first; i <= best; i++)
        *n_tokens += s->piece[i].n_tokens;
    return best;
}

static enum ns_status
make_parts(const struct split *s, struct ns_summary *summary)
{
    uint32_t capacity = 0;

    for (size_t first = 0; first < s->n;) {
        uint32_t n_tokens;
        uint32_t most = summary->part_tokens - summary->part_tokens / SLACK;
        size_t last = last_of_part(s, first, most, &n_tokens);
        const struct piece *head = &s->piece[first];
        struct ns_summary_part *grown;

        if (summary->n_parts == NS_SUMMARY_PARTS)
            return ns_refuse(s->err, "over_context", "body.messages",
                             "the text has more than %d parts of %u tokens",
                             NS_SUMMARY_PARTS, summary->part_tokens);
        if (summary->n_parts == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            grown = realloc(summary->part, capacity * sizeof(*grown));
            if (!grown)
                return no_memory(s->err);
            summary->part = grown;
        }
        summary->part[summary->n_parts++] = (struct ns_summary_part){
            .first = first ? s->piece[first - 1].end : 0,
            .end = s->piece[last].end,
            .n_tokens = n_tokens,
            .heading = head->heading,
            .n_heading = head->n_heading,
        };
        first = last + 1;
    }
    return NS_OK;
}

/* ---- rounds ------------------------------------------------------------ */

/* Of `n` nodes from `first` on, the next round's; balanced. */
static void
combine(struct ns_summary *summary, uint32_t first, uint32_t n, uint32_t fan)
{
    uint32_t groups = (n + fan - 1) / fan;

    for (uint32_t g = 0; g < groups; g++) {
        uint32_t from = (uint32_t)((uint64_t)n * g / groups);
        uint32_t to = (uint32_t)((uint64_t)n * (g + 1) / groups);

        summary->node[summary->n_nodes++] = (struct ns_summary_node){
            .first_part = summary->node[first + from].first_part,
            .last_part = summary->node[first + to - 1].last_part,
            .first = first + from,
            .n = to - from,
        };
    }
}

static enum ns_status
make_rounds(struct ns_summary *summary, struct ns_error *err)
{
    uint32_t fan = summary->part_tokens /
                   (summary->node_tokens + NS_SUMMARY_LABEL);
    uint32_t first = 0, n = summary->n_parts;

    if (fan < 2)
        fan = 2;
    /* n + n/2 + n/4 ... + 1, and a round for each halving. */
    summary->node = calloc(2 * (size_t)n + 34, sizeof(*summary->node));
    summary->round_first = calloc(34, sizeof(*summary->round_first));
    if (!summary->node || !summary->round_first)
        return no_memory(err);
    for (uint32_t i = 0; i < n; i++)
        summary->node[summary->n_nodes++] = (struct ns_summary_node){
            .first_part = i, .last_part = i
        };
    for (;;) {
        summary->round_first[++summary->n_rounds] = summary->n_nodes;
        if (n == 1 && summary->n_rounds > 1)
            return NS_OK;
        combine(summary, first, n, fan);
        first += n;
        n = summary->n_nodes - first;
    }
}

enum ns_status
ns_summary_create(const char *text, size_t length,
                  const struct ns_tokenizer *tokenizer, uint32_t part_tokens,
                  struct ns_summary **out, struct ns_error *err)
{
    struct split split = { .text = text, .length = length,
                           .tokenizer = tokenizer, .err = err };
    struct ns_summary *summary = calloc(1, sizeof(*summary));
    enum ns_status status;

    *out = NULL;
    if (!summary)
        return no_memory(err);
    summary->part_tokens = part_tokens;
    summary->node_tokens = part_tokens / 4;
    if (summary->node_tokens > NS_SUMMARY_MOST_NODE)
        summary->node_tokens = NS_SUMMARY_MOST_NODE;
    status = cut_to_pieces(&split);
    if (status == NS_OK)
        status = make_parts(&split, summary);
    if (status == NS_OK && summary->n_parts > 1) {
        status = make_rounds(summary, err);
        if (status == NS_OK) {
            *out = summary;
            summary = NULL;
        }
    }
    free(split.piece);
    ns_summary_destroy(summary);
    return status;
}

void
ns_summary_destroy(struct ns_summary *summary)
{
    if (!summary)
        return;
    for (uint32_t i = 0; i < summary->n_nodes; i++)
        free(summary->node[i].text);
    free(summary->node);
    free(summary->round_first);
    free(summary->part);
    free(summary);
}

enum ns_status
ns_summary_set(struct ns_summary *summary, uint32_t node, const char *text,
               size_t length, struct ns_error *err)
{
    char *copy = malloc(length + 1);

    if (!copy)
        return no_memory(err);
    memcpy(copy, text, length);
    copy[length] = '\0';
    free(summary->node[node].text);
    summary->node[node].text = copy;
    summary->node[node].length = length;
    return NS_OK;
}

bool
ns_summary_advance(struct ns_summary *summary)
{
    while (summary->round + 1 < summary->n_rounds) {
        for (uint32_t i = summary->round_first[summary->round];
             i < summary->round_first[summary->round + 1]; i++)
            if (!summary->node[i].text)
                return true;
        summary->round++;
    }
    return false;
}

/* ---- texts ------------------------------------------------------------- */

static void
put_label(struct ns_buf *out, const struct ns_summary_node *node)
{
    if (node->first_part == node->last_part)
        ns_buf_printf(out, "[part %u]\n", node->first_part + 1);
    else
        ns_buf_printf(out, "[parts %u-%u]\n", node->first_part + 1,
                      node->last_part + 1);
}

/* A summary can not carry a label of its own: "[part" becomes "(part". */
static void
put_without_labels(struct ns_buf *out, const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        ns_buf_byte(out, text[i] == '[' && length - i > 5 &&
                                 strncasecmp(text + i + 1, "part", 4) == 0
                             ? '('
                             : text[i]);
}

char *
ns_summary_source(const struct ns_summary *summary, uint32_t node,
                  const char *text)
{
    const struct ns_summary_node *at = &summary->node[node];
    struct ns_buf out;

    ns_buf_init(&out, SIZE_MAX / 2);
    if (at->n == 0) {
        const struct ns_summary_part *part = &summary->part[node];

        ns_buf_add(&out, text + part->first, part->end - part->first);
    }
    for (uint32_t i = at->first; i < at->first + at->n; i++) {
        const struct ns_summary_node *from = &summary->node[i];

        ns_buf_text(&out, i > at->first ? "\n\n" : "");
        put_label(&out, from);
        put_without_labels(&out, from->text, from->length);
    }
    if (out.failed) {
        ns_buf_fini(&out);
        return NULL;
    }
    return out.data;
}

json_t *
ns_summary_parts(const struct ns_summary *summary, const char *text)
{
    json_t *parts = json_array();

    for (uint32_t i = 0; parts && i < summary->n_parts; i++) {
        const struct ns_summary_part *part = &summary->part[i];
        size_t n = part->n_heading < SHOWN_HEADING ? part->n_heading
                                                   : SHOWN_HEADING;
        json_t *one = json_pack("{s:i, s:[I, I], s:i}", "part", (int)i + 1,
                                "bytes", (json_int_t)part->first,
                                (json_int_t)part->end, "tokens",
                                (int)part->n_tokens);

        while (n > 0 && ((unsigned char)text[part->heading + n] & 0xc0) == 0x80)
            n--;
        if (one && n > 0)
            json_object_set_new(one, "heading",
                                json_stringn(text + part->heading, n));
        if (!one || json_array_append_new(parts, one) != 0) {
            json_decref(parts);
            return NULL;
        }
    }
    return parts;
}
