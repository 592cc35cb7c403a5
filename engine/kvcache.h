/* kvcache.h - the prefix: pages, two pools, shared prefixes, counts.
 *
 * A page holds NS_PAGE positions. One pool serves all full layers, one all
 * sliding layers; page p of a pool is one slice of each of its layers. Pages
 * are counted: a sequence holds each page that its page table names, and the
 * prefix tree holds pages of whole, finished prompt pages, so that prompts
 * that start with the same tokens share them.
 *
 * The prefix tree has one node a page of prompt tokens. A sequence declares
 * its prompt when it is submitted, before it runs: nodes are then known to be
 * wanted, and the sliding pages in front of a fork are kept although the
 * window of the first sequence has left them. What no sequence uses stays as
 * a cache and goes, least recently used first, when pages are needed.
 *
 *     page:  free --> private (one sequence) --> in the tree, pinned (a
 *            sequence holds it) <--> in the tree, idle --> free
 *
 * Promise: a running sequence promises pages (prompt and reserve) when it is
 * admitted; admission looks at what is neither pinned, nor held, nor promised.
 *
 * Owns:   the pools' device memory, page tables, nodes.
 * Thread: engine thread.
 */
#ifndef NS_ENGINE_KVCACHE_H
#define NS_ENGINE_KVCACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/model.h"
#include "engine/planner.h"
#include "kernels/backend.h"

struct ns_kvcache;

struct ns_kvcache_options {
    uint32_t full_pages, sliding_pages;
    uint32_t n_slots;      /* rows of the page tables: sequences at once */
    uint32_t max_positions; /* of one sequence */
    uint32_t chunk;        /* most positions that one pass adds to one, but for
                            * what is whole and longer */
    bool plain;            /* full layers keep K and V, not V and a slice */
    bool no_sharing;
};

enum ns_status ns_kvcache_create(const struct ns_config *config,
                                 uint32_t n_rotated_full,
                                 struct ns_backend *be,
                                 const struct ns_kvcache_options *options,
                                 struct ns_kvcache **out,
                                 struct ns_error *err);
void ns_kvcache_destroy(struct ns_kvcache *kv); /* takes NULL */

/* Bytes of one page over all layers of its pool; type: the backend's. */
uint64_t ns_kvcache_full_page_bytes(const struct ns_config *config,
                                    enum ns_dtype type,
                                    uint32_t n_rotated_full, bool plain);
uint64_t ns_kvcache_sliding_page_bytes(const struct ns_config *config,
                                       enum ns_dtype type);

/* What the kernels see of a layer, and the page tables (device). */
struct ns_kv_layer ns_kvcache_layer(const struct ns_kvcache *kv,
                                    uint32_t layer);
const int32_t *ns_kvcache_table(const struct ns_kvcache *kv, bool full);
uint32_t ns_kvcache_table_stride(const struct ns_kvcache *kv);

/* One sequence's hold on the cache. */
struct ns_kv_hold;

/* Makes a hold for a prompt; nothing is taken yet but nodes. `ids` is what
 * tells prompts apart: tokens, and in the place of a picture's placeholders
 * what stands for its content. `whole` are the pictures, rising: they are
 * shared whole or not at all. Both are borrowed for the call. The last prompt
 * token is never shared. */
enum ns_status ns_kvcache_declare(struct ns_kvcache *kv, const int32_t *ids,
                                  uint32_t n, const struct ns_whole *whole,
                                  uint32_t n_whole, struct ns_kv_hold **out,
                                  struct ns_error *err);
void ns_kvcache_drop(struct ns_kvcache *kv,
                     struct ns_kv_hold *hold); /* takes NULL; releases too */

enum ns_admission {
    NS_ADMITTED,
    NS_ADMIT_LATER,  /* pages or slots are short just now */
    NS_ADMIT_SHARED, /* another sequence is computing its prefix: wait */
};

/* Takes a slot and adopts the shared prefix that is ready. Promises pages for
 * `n_positions` (at least the known tokens). `cached` gets the positions that
 * need no prefill. */
enum ns_admission ns_kvcache_admit(struct ns_kvcache *kv,
                                   struct ns_kv_hold *hold,
                                   uint32_t n_positions, uint32_t *cached);
/* Gives slot, pages and promise back; the declaration stays. */
void ns_kvcache_release(struct ns_kvcache *kv, struct ns_kv_hold *hold);

uint32_t ns_kvcache_slot(const struct ns_kv_hold *hold);

/* Makes pages for positions below `n`. False when there are none left, even
 * after idle ones went; what was made stays. */
bool ns_kvcache_extend(struct ns_kvcache *kv, struct ns_kv_hold *hold,
                       uint32_t n);
/* Positions below `n` hold their final rows: prompt pages that are whole join
 * the tree, sliding pages behind the window of position `n` are let go. */
void ns_kvcache_settle(struct ns_kvcache *kv, struct ns_kv_hold *hold,
                       uint32_t n);

/* Whether a hold over n positions alone, with pictures of up to
 * `largest_whole`, would fit the empty pools; the numbers are for the refusal.
 */
bool ns_kvcache_fits(const struct ns_kvcache *kv, uint32_t n_positions,
                     uint32_t largest_whole, uint32_t *full_needed,
                     uint32_t *sliding_needed);

struct ns_kv_counts {
    uint32_t full_free, sliding_free;   /* idle pages of the tree counted */
    uint32_t full_pages, sliding_pages;
    uint32_t slots_free;
    uint64_t evicted;
};
struct ns_kv_counts ns_kvcache_counts(const struct ns_kvcache *kv);

/* Walks everything and says whether the counts agree: for tests. */
bool ns_kvcache_check(const struct ns_kvcache *kv);

#endif
