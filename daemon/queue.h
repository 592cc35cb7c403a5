/* queue.h - a bounded queue of pointers: how work moves between threads.
 *
 * Who pushes lets go of what the pointer leads to, who pops holds it from
 * there. The condition variables and the one lock of a queue live here and
 * nowhere else; the lock guards the ring and is never held across a call.
 *
 * A closed queue takes nothing more and is drained by its readers. A queue may
 * also ring a descriptor, for a thread that sleeps in poll(2).
 *
 * Owns:   the ring, not what the pointers lead to.
 * Thread: any, any number on both sides.
 */
#ifndef NS_DAEMON_QUEUE_H
#define NS_DAEMON_QUEUE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

struct ns_queue;

enum ns_status ns_queue_create(size_t capacity, bool pollable,
                               struct ns_queue **out, struct ns_error *err);
void ns_queue_destroy(struct ns_queue *queue); /* takes NULL */

/* Waits for room. False when the queue is closed: the caller keeps `item`. */
bool ns_queue_push(struct ns_queue *queue, void *item);

/* As above without waiting: false also when it is full. */
bool ns_queue_try_push(struct ns_queue *queue, void *item);

/* Waits for an item: `timeout_ms` < 0 for ever, 0 not at all. NULL when the
 * time is over, or the queue is closed and empty. */
void *ns_queue_pop(struct ns_queue *queue, int timeout_ms);

/* What waits is still popped; whoever waits is woken. */
void ns_queue_close(struct ns_queue *queue);

size_t ns_queue_length(struct ns_queue *queue);

/* Readable while an item waits, or the queue is closed; -1 if not pollable. */
int ns_queue_descriptor(const struct ns_queue *queue);

#endif
