/* spool_look.h - what stands in a spool, for people: nothing is locked, nothing
 * is changed, and what a daemon does meanwhile may or may not be seen.
 *
 * Thread: any.
 */
#ifndef NS_CONNECTORS_SPOOL_LOOK_H
#define NS_CONNECTORS_SPOOL_LOOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum ns_spool_state {
    NS_SPOOL_WAITING, /* in in/ */
    NS_SPOOL_RUNNING, /* in work/ */
    NS_SPOOL_DONE,    /* in done/ */
    NS_SPOOL_DEAD,    /* in dead/: could not be read */
};

struct ns_spool_entry {
    const char *name; /* "jobs.jsonl" */
    enum ns_spool_state state;
    uint64_t ok, failed; /* result lines that stand */
};

typedef enum ns_status (*ns_spool_visitor)(void *context,
                                           const struct ns_spool_entry *,
                                           struct ns_error *err);
/* Each file of the spool, or (`name` not NULL) that one. The latest state, if
 * it moves meanwhile. NS_REJECT: there is no such folder. */
enum ns_status ns_spool_look(const char *directory, const char *name,
                             ns_spool_visitor visit, void *context,
                             struct ns_error *err);

/* Each result line of out/NAME or, while it runs, out/NAME.part, in the order
 * they stand. A torn tail is left out. NS_REJECT: there is none. */
enum ns_status ns_spool_results(
    const char *directory, const char *name,
    enum ns_status (*visit)(void *context, const char *line, size_t length,
                            bool ok, struct ns_error *err),
    void *context, struct ns_error *err);

#endif
