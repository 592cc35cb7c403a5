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
            AT_CHARACTER, NEVER /* inside code that fits a part */ };

/* The text in short runs, each with its tokens: what parts are made of. */
struct piece {
    size_t end;
    uint32_t text, n_tokens;
    enum rank rank;   /* of its end */
    uint32_t heading; /* that it stands under */
};

struct split {
    const char *text;
    size_t length;     /* end of the present one of the texts */
    uint32_t n_texts;  /* before it */
    const struct ns_tokenizer *tokenizer;
    struct piece *piece;
    size_t n, capacity;
    uint32_t most; /* tokens of a part */
    struct ns_summary *summary; /* its headings */
    uint32_t heading, headings_capacity; /* the latest */
    char fence; /* mark of the open one; 0: none */
    size_t n_fence, fence_first; /* marks; the piece that it begins with */
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
    s->piece[s->n++] = (struct piece){ end, s->n_texts, (uint32_t)ids.n,
                                       rank, s->heading };
    ns_ids_fini(&ids);
    return status;
}

static bool
is_blank(const char *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isspace((unsigned char)line[i]))
            return false;
    return true;
}

/* How many marks begin the line, of which kind, and what is behind them. 0: it
 * is no fence. */
static size_t
fence_of(const char *line, size_t n, char *mark, size_t *behind)
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
    *behind = at;
    return at - first >= 3 ? at - first : 0;
}

/* 1 to 6, or 0: it is none. */
static size_t
heading_level(const char *line, size_t n)
{
    size_t level = 0;

    while (level < n && line[level] == '#')
        level++;
    return level <= 6 && level < n && line[level] == ' ' ? level : 0;
}

/* The heading that this line is, below those of lower levels before it. */
static enum ns_status
add_heading(struct split *s, size_t at, size_t n, size_t level)
{
    struct ns_summary *summary = s->summary;
    struct ns_summary_heading *grown;
    uint32_t above = s->heading;

    if (summary->n_headings == s->headings_capacity) {
        uint32_t capacity = s->headings_capacity ? 2 * s->headings_capacity
                                                 : 64;

        grown = realloc(summary->heading, capacity * sizeof(*grown));
        if (!grown)
            return no_memory(s->err);
        summary->heading = grown;
        s->headings_capacity = capacity;
    }
    while (above && summary->heading[above - 1].level >= level)
        above = summary->heading[above - 1].above;
    for (; n > level && isspace((unsigned char)s->text[at + n - 1]); n--)
        ;
    for (at += level, n -= level; n > 0 && s->text[at] == ' '; n--)
        at++;
    summary->heading[summary->n_headings++] = (struct ns_summary_heading){
        .first = at, .n = n, .level = (uint32_t)level, .above = above,
    };
    s->heading = summary->n_headings;
    return NS_OK;
}

static size_t
line_end(const struct split *s, size_t at)
{
    const char *newline = memchr(s->text + at, '\n', s->length - at);

    return newline ? (size_t)(newline - s->text) + 1 : s->length;
}

/* Notes what the line opens, closes and says; `*rank` is that of its end. */
static enum ns_status
read_line(struct split *s, size_t at, size_t end, enum rank *rank)
{
    const char *line = s->text + at;
    size_t n = end - at, marks, level, behind = 0;
    char mark = 0;

    marks = fence_of(line, n, &mark, &behind);
    *rank = IN_CODE;
    if (s->fence) {
        if (marks >= s->n_fence && mark == s->fence &&
            is_blank(line + behind, n - behind)) {
            s->fence = 0;
            *rank = AT_PARAGRAPH;
        }
        return NS_OK;
    }
    /* Three marks and three more on the same line are code within a line. */
    if (marks && !(mark == '`' && memchr(line + behind, '`', n - behind))) {
        s->fence = mark;
        s->n_fence = marks;
        s->fence_first = s->n;
        return NS_OK;
    }
    level = heading_level(line, n);
    if (level) {
        *rank = AT_WORD; /* a heading stays with what follows it */
        return add_heading(s, at, n, level);
    }
    *rank = end < s->length &&
                    heading_level(s->text + end, line_end(s, end) - end)
                ? AT_HEADING
            : is_blank(line, n) ? AT_PARAGRAPH
                                : AT_LINE;
    return NS_OK;
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

/* The pieces from `first` on are a block of code: one that fits is not cut. */
static void
keep_whole(struct split *s, size_t first)
{
    uint64_t sum = 0;

    for (size_t i = first; i < s->n; i++)
        sum += s->piece[i].n_tokens;
    for (size_t i = first; i + 1 < s->n && sum <= s->most; i++)
        s->piece[i].rank = NEVER;
}

/* One text more, from `first` to `end`. */
static enum ns_status
cut_to_pieces(struct split *s, size_t first, size_t end_of_text)
{
    enum ns_status status = NS_OK;
    enum rank rank, inner;

    s->length = end_of_text;
    s->heading = 0;
    s->fence = 0;
    for (size_t at = first, end; at < s->length && status == NS_OK; at = end) {
        bool was_code = s->fence;

        end = line_end(s, at);
        status = read_line(s, at, end, &rank);
        while (end - at > PIECE_BYTES && status == NS_OK) {
            size_t cut = cut_of(s, at, &inner);

            status = add_piece(s, at, cut, inner);
            at = cut;
        }
        if (status == NS_OK)
            status = add_piece(s, at, end, rank);
        if (was_code && !s->fence)
            keep_whole(s, s->fence_first);
    }
    if (s->fence) /* to the end */
        keep_whole(s, s->fence_first);
    s->n_texts++;
    return status;
}

/* ---- parts ------------------------------------------------------------- */

/* Of the pieces from `first` to `end` the one with the best end, the later among
 * equals; SIZE_MAX: none may end a part. */
static size_t
best_of(const struct split *s, size_t first, size_t end)
{
    size_t best = SIZE_MAX;

    for (size_t i = first; i < end; i++)
        if (s->piece[i].rank != NEVER &&
            (best == SIZE_MAX || s->piece[i].rank <= s->piece[best].rank))
            best = i;
    return best;
}

/* The piece that a part from `first` on ends with: in the second half of what
 * fits, or before that where the whole half is of one block of code. */
static size_t
last_of_part(const struct split *s, size_t first, uint32_t *n_tokens)
{
    uint64_t sum = 0, half = 0;
    size_t end = first, middle = first, best;

    while (end < s->n && s->piece[end].text == s->piece[first].text &&
           (end == first || sum + s->piece[end].n_tokens <= s->most))
        sum += s->piece[end++].n_tokens;
    while (2 * (half += s->piece[middle].n_tokens) < sum)
        middle++;
    best = end == s->n || s->piece[end].text != s->piece[first].text
               ? end - 1
               : best_of(s, middle, end);
    if (best == SIZE_MAX)
        best = best_of(s, first, middle);
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
        size_t last = last_of_part(s, first, &n_tokens);
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
            .text = s->piece[first].text,
            .first = first ? s->piece[first - 1].end : 0,
            .end = s->piece[last].end,
            .n_tokens = n_tokens,
            .heading = s->piece[first].heading,
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
ns_summary_create(const char *text, const size_t *ends, size_t n_texts,
                  const struct ns_tokenizer *tokenizer, uint32_t part_tokens,
                  struct ns_summary **out, struct ns_error *err)
{
    struct split split = { .text = text, .tokenizer = tokenizer, .err = err };
    struct ns_summary *summary = calloc(1, sizeof(*summary));
    enum ns_status status = NS_OK;

    *out = NULL;
    if (!summary)
        return no_memory(err);
    summary->part_tokens = part_tokens;
    summary->node_tokens = part_tokens / 4;
    if (summary->node_tokens > NS_SUMMARY_MOST_NODE)
        summary->node_tokens = NS_SUMMARY_MOST_NODE;
    split.summary = summary;
    split.most = part_tokens - part_tokens / SLACK;
    for (size_t i = 0; i < n_texts && status == NS_OK; i++)
        status = cut_to_pieces(&split, i ? ends[i - 1] : 0, ends[i]);
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
    free(summary->heading);
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

/* What a part stands under, the outermost first; NULL without memory. */
static json_t *
headings_of(const struct ns_summary *summary, uint32_t heading,
            const char *text)
{
    json_t *list = json_array();

    for (uint32_t h = heading; list && h;) {
        const struct ns_summary_heading *at = &summary->heading[h - 1];
        const char *first = text + at->first;
        size_t n = at->n;

        if (n > SHOWN_HEADING)
            for (n = SHOWN_HEADING; ((unsigned char)first[n] & 0xc0) == 0x80;)
                n--;
        if (json_array_insert_new(list, 0, json_stringn(first, n)) != 0) {
            json_decref(list);
            return NULL;
        }
        h = at->above;
    }
    return list;
}

json_t *
ns_summary_parts(const struct ns_summary *summary, const char *text)
{
    bool several = summary->part[summary->n_parts - 1].text > 0;
    json_t *parts = json_array();
    size_t start = 0; /* of the present text */

    for (uint32_t i = 0; parts && i < summary->n_parts; i++) {
        const struct ns_summary_part *part = &summary->part[i];
        json_t *one;

        if (i > 0 && part->text != part[-1].text)
            start = part->first;
        one = json_pack("{s:i, s:[I, I], s:i, s:o}", "part", (int)i + 1,
                        "bytes", (json_int_t)(part->first - start),
                        (json_int_t)(part->end - start), "tokens",
                        (int)part->n_tokens, "headings",
                        headings_of(summary, part->heading, text));
        if (one && several)
            json_object_set_new(one, "text", json_integer(part->text + 1));
        if (!one || json_array_append_new(parts, one) != 0) {
            json_decref(parts);
            return NULL;
        }
    }
    return parts;
}
