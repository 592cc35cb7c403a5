/* summary.h - a text too long for one summary: its parts, and how they combine.
 *
 *     text --split--> part 1 ... part n     a summary of each: round 0
 *                       \ | /    \ | /
 *                     [parts 1-5] [6-9]     summaries of summaries: round 1 ...
 *                            \   /
 *                            final          the job's answer
 *
 * A part ends where the text itself does: in front of a heading if it can, else
 * behind a paragraph, a closed block of code, a line, a sentence, a word; never
 * inside a character, nor inside a block of code that fits into one part. Cuts
 * are sought in the second half of what fits, so that no part is much smaller
 * than another. Every byte is in exactly one part. Several texts are split one
 * after the other, and no part is of two.
 *
 * Nodes are numbered round by round, parts first, the final one last. A node
 * takes at least two of the round before (but for the last of an odd row), so
 * that each round is shorter than the one before, and all end in one. A summary
 * in between has at most a quarter of a part's tokens, so that two fit at least.
 *
 * Pure. Thread: one at a time.
 */
#ifndef NS_DAEMON_SUMMARY_H
#define NS_DAEMON_SUMMARY_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/tokenizer.h"

enum {
    NS_SUMMARY_LEAST = 128,  /* tokens of a part, at least what is asked for */
    NS_SUMMARY_PARTS = 4096,
    NS_SUMMARY_MOST_NODE = 512, /* tokens of a summary in between */
    NS_SUMMARY_LABEL = 16,      /* tokens that "[parts 12-34]" may take */
};

struct ns_summary_part {
    uint32_t text;     /* of several, from 0 */
    size_t first, end; /* bytes of all */
    uint32_t n_tokens; /* about */
    uint32_t heading;  /* index + 1: what its beginning stands under; 0: none */
};

struct ns_summary_heading {
    size_t first, n; /* bytes, without its marks; n may be 0 */
    uint32_t level;  /* 1 to 6 */
    uint32_t above;  /* index + 1 of the next one of a lower level; 0: none */
};

struct ns_summary_node {
    uint32_t first_part, last_part; /* of the text */
    uint32_t first, n;              /* nodes that it takes; n 0: a part */
    char *text;                     /* owned: its summary; NULL: not yet */
    size_t length;
};

struct ns_summary {
    uint32_t part_tokens, node_tokens; /* at most: of a part, of a summary */
    struct ns_summary_part *part;
    uint32_t n_parts;
    struct ns_summary_heading *heading;
    uint32_t n_headings;
    struct ns_summary_node *node;
    uint32_t n_nodes;
    uint32_t round, n_rounds; /* the present one; the last is the final node's */
    uint32_t *round_first;    /* [n_rounds + 1] nodes */
};

/* Splits `text`, which is `n_texts` (one at least) joined, each up to its end,
 * into parts of at most `part_tokens` (NS_SUMMARY_LEAST at least) and lays out
 * the rounds. NS_OK with `*out` NULL: one part holds all of it. NS_REJECT: more
 * than NS_SUMMARY_PARTS parts (over_context). */
enum ns_status ns_summary_create(const char *text, const size_t *ends,
                                 size_t n_texts,
                                 const struct ns_tokenizer *tokenizer,
                                 uint32_t part_tokens, struct ns_summary **out,
                                 struct ns_error *err);
void ns_summary_destroy(struct ns_summary *summary); /* takes NULL */

/* Copies the summary of a node in. */
enum ns_status ns_summary_set(struct ns_summary *summary, uint32_t node,
                              const char *text, size_t length,
                              struct ns_error *err);

/* Goes on to the first round that is not done. True while that is not the
 * final one. */
bool ns_summary_advance(struct ns_summary *summary);

static inline uint32_t
ns_summary_final(const struct ns_summary *summary)
{
    return summary->n_nodes - 1;
}

/* What a node is to summarise: a part of `text`, or the labelled summaries that
 * it takes. Owned by the caller. NULL without memory. */
char *ns_summary_source(const struct ns_summary *summary, uint32_t node,
                        const char *text);

/* The parts for a result: [{"part":1,"bytes":[0,900],"tokens":210,
 * "headings":["Chapter 1","Of it"]}, ...], of several texts with "text":1 and
 * the bytes of that one; NULL without memory. */
json_t *ns_summary_parts(const struct ns_summary *summary, const char *text);

#endif
