/* source.h - where jobs come from: poll, acknowledge, close.
 *
 *     poll --> message --> (parse, claim, run, store) --> acknowledge
 *
 * A source hands out every message at least once and forgets it only when it
 * is acknowledged: once its result, or its dead letter, is durable in the
 * store. Acknowledgements come in any order; what the source may forget is
 * what lies below the lowest one still missing (ledger.h).
 *
 * A source bounds what it has handed out: when its window is full, poll says
 * NS_MESSAGE_NONE until something is acknowledged. Nothing is dropped.
 *
 * Thread: the event loop only, all three calls.
 */
#ifndef NS_CONNECTORS_SOURCE_H
#define NS_CONNECTORS_SOURCE_H

#include <stdbool.h>

#include "base/error.h"
#include "connectors/message.h"

struct ns_source;

struct ns_source_ops {
    const char *name; /* "files", "spool", "kafka" */

    /* The next message, waiting at most `timeout_ms` for one. Its pointers are
     * borrowed until the next poll. NS_RETRY: the world was at fault, poll
     * again later. NS_REJECT: the input as a whole is unusable and the text
     * says why (the file changed while it was read; an edited line whose
     * result stands): stop. NS_FATAL: broken. */
    enum ns_status (*poll)(struct ns_source *source, int timeout_ms,
                           struct ns_message *out, struct ns_error *err);

    /* The message's outcome is durable. Unknown positions and positions of an
     * older epoch are ignored: someone else answers for them. Never waits; what
     * remains to be done (an offset commit, closing a finished file) happens in
     * a later poll. */
    void (*acknowledge)(struct ns_source *source, struct ns_position position);

    void (*close)(struct ns_source *source);

    /* NULL where there is nothing to do. What must go on while nothing is
     * polled, because the window is full or the daemon drains: keeping the
     * membership in a group, storing positions. Called at least once a second;
     * hardly waits. Errors as poll's. */
    enum ns_status (*tend)(struct ns_source *source, struct ns_error *err);

    /* Whether the position is still this source's to acknowledge; NULL: always.
     * A job that waits for its turn and is no longer ours can be dropped. */
    bool (*owns)(const struct ns_source *source, struct ns_position position);
};

struct ns_source { /* the first member of each kind */
    const struct ns_source_ops *ops;
};

static inline enum ns_status
ns_source_poll(struct ns_source *source, int timeout_ms, struct ns_message *out,
               struct ns_error *err)
{
    return source->ops->poll(source, timeout_ms, out, err);
}

static inline void
ns_source_acknowledge(struct ns_source *source, struct ns_position position)
{
    source->ops->acknowledge(source, position);
}

static inline enum ns_status
ns_source_tend(struct ns_source *source, struct ns_error *err)
{
    return source->ops->tend ? source->ops->tend(source, err) : NS_OK;
}

static inline bool
ns_source_owns(const struct ns_source *source, struct ns_position position)
{
    return !source->ops->owns || source->ops->owns(source, position);
}

static inline void
ns_source_close(struct ns_source *source)
{
    if (source)
        source->ops->close(source);
}

#endif
