/* parts.h - a job that is summarised in parts: from its tree to requests.
 *
 * Made where a `task: summarize` turns out longer than `limits.summary_chunk`
 * (or the job's own chunk_tokens), or than the context. What is split is the
 * longest text of the one user message, and every other of about a quarter of a
 * part or more: documents. All its other texts, the instructions, stand in every
 * request. Each round of the tree (summary.h) is a set of requests that the
 * engine gets at once, so that they share batches and the prefix of the
 * instruction; the last round is the job's own request, and ends as any other.
 *
 * A node's seed is a draw of the job's seed and its number. Its summary is
 * stored as a block: -1 - node, the part size, the tokens that it read and
 * wrote, and the tokens themselves; the blocks of the final request come behind
 * those. So a job that is taken up again has the nodes that were done, and ends
 * with the same bytes and the same usage.
 *
 * The pool builds and the engine thread runs; whoever holds the work holds
 * this.
 */
#ifndef NS_DAEMON_PARTS_H
#define NS_DAEMON_PARTS_H

#include "daemon/summary.h"
#include "daemon/work.h"

enum { NS_PARTS_TEXTS = 64 }; /* more stand in every request */

struct ns_parts {
    const struct ns_tokenizer *tokenizer; /* borrowed */
    struct ns_summary *tree; /* owned, as all below */
    char *text;              /* what was split, one text behind the other */
    size_t length;
    size_t end[NS_PARTS_TEXTS], n_texts;
    json_t *messages; /* a copy; these two stand in it: */
    json_t *system, *holder;
    const char *key;      /* of the text in its holder */
    char *instruction;    /* the system message as it was */
    uint32_t n_node_blocks; /* all nodes but the final one */
    bool is_final;        /* the final request has been made */
    bool alien;           /* the claim's blocks are not of this tree */

    /* Of the present round, [n]: nodes that are not done. */
    uint32_t n, n_done;
    uint32_t *node;
    struct ns_ids *prompt;
    struct ns_request *request;

    /* Engine thread. */
    struct ns_work **child; /* [n]: running or waiting; NULL: over */
    bool is_begun;
    uint32_t prompt_tokens, cached_tokens, completion_tokens; /* of nodes */
};

/* The tree of the job's present messages, and what `claim` (NULL: none) remembers
 * of it. `n_prompt`: tokens of the job as it stands. `limit`: tokens of a part
 * where the job names none; 0: only what does not fit the context is split.
 * `*out` NULL: the job runs as it stands, since it fits, or has pictures, tools,
 * a thought, a draft or several turns. NS_REJECT: over_context. */
enum ns_status ns_parts_create(const struct ns_job *job,
                               const struct ns_claim *claim,
                               const struct ns_config *config,
                               const struct ns_tokenizer *tokenizer,
                               enum ns_mode mode, size_t n_prompt,
                               uint32_t limit, struct ns_parts **out,
                               struct ns_error *err);
void ns_parts_destroy(struct ns_parts *parts); /* takes NULL */

/* Makes room for the requests of the tree's present round, of the nodes that
 * are not done: `n` and `node` are set. */
enum ns_status ns_parts_begin_round(struct ns_parts *parts,
                                    struct ns_error *err);

/* Of the round's prompts together. */
size_t ns_parts_tokens(const struct ns_parts *parts);

/* The messages of a node. They are those of the job from here until the next
 * call; NS_FATAL without memory. */
enum ns_status ns_parts_messages(struct ns_parts *parts, uint32_t node,
                                 struct ns_error *err);

/* Says in front of the error whose it is: "parts 3-5 of 9: ...". */
void ns_parts_blame(const struct ns_parts *parts, uint32_t node,
                    struct ns_error *err);

/* Where the claim's blocks of the final request begin: tokens and blocks that
 * come before it. */
void ns_parts_resume(const struct ns_parts *parts,
                     const struct ns_claim *claim, uint32_t *n_tokens,
                     uint32_t *n_blocks);

/* A node's answer is there, these tokens: keeps its text and counts what it cost,
 * and says how it is stored, in `block` (zeroed first; owned by the caller). */
enum ns_status ns_parts_take(struct ns_parts *parts, uint32_t node,
                             const int32_t *tokens, uint32_t n_tokens,
                             const struct ns_usage *usage,
                             struct ns_ids *block, struct ns_error *err);

#endif
