/* backlog.h - what waits for the engine, in the order in which it is to go in.
 *
 * The order is that of ns_rank_compare as far as it is known before a sequence
 * exists: priority, raised by one for each age step waited; then deadline; then
 * the longest; then who came first. Aging is kept in the key and not in the
 * clock (whoever came a step earlier stands one priority higher, now and
 * later), so the order never changes and heaps hold it: a million wait at the
 * price of some twenty comparisons each.
 *
 * Riders: whoever goes in takes along others of its group, up to a number,
 * unless someone of a higher priority waits. So the prefix that they share is
 * computed once and let go of, where the order alone would come back to it
 * each time that a deadline of the group comes up.
 *
 * Owns:   its nodes. Borrows the items.
 * Thread: one at a time.
 */
#ifndef NS_ENGINE_BACKLOG_H
#define NS_ENGINE_BACKLOG_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct ns_backlog_key {
    int32_t priority;    /* higher first */
    int64_t arrived_ms;  /* any clock, one for all */
    int64_t deadline_ms; /* 0: none */
    uint64_t group;      /* of a shared prefix; 0: shares nothing */
    uint32_t length;     /* tokens of prompt and answer */
};

struct ns_backlog;

enum ns_status ns_backlog_create(uint32_t age_step_ms, /* 0: nothing ages */
                                 uint32_t riders, /* NS_GROUP_RIDERS; 0:
                                                   * groups are not looked at */
                                 struct ns_backlog **out,
                                 struct ns_error *err);
void ns_backlog_destroy(struct ns_backlog *backlog); /* takes NULL */

/* The group of a prompt: those that begin with the same 256 tokens are taken
 * to share a prefix; 0 where there are fewer. */
enum { NS_GROUP_TOKENS = 256, NS_GROUP_RIDERS = 32 };
uint64_t ns_backlog_group(const int32_t *prompt, uint32_t n);

/* NS_FATAL: out of memory; the item is not in. */
enum ns_status ns_backlog_push(struct ns_backlog *backlog,
                               const struct ns_backlog_key *key, void *item,
                               struct ns_error *err);
/* What pop would take; NULL: empty. */
void *ns_backlog_first(struct ns_backlog *backlog);
void *ns_backlog_pop(struct ns_backlog *backlog);
size_t ns_backlog_length(const struct ns_backlog *backlog);

#endif
