#include "daemon/queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/size.h"

struct ns_queue {
    pthread_mutex_t lock; /* innermost: nothing is locked below it */
    pthread_cond_t not_empty, not_full;
    size_t capacity, head, length; /* guarded, as all below */
    bool closed, ringing;
    int descriptor; /* const after create */
    void *ring[];
};

enum ns_status
ns_queue_create(size_t capacity, bool pollable, struct ns_queue **out,
                struct ns_error *err)
{
    struct ns_queue *queue = NULL;
    pthread_condattr_t attr;
    size_t bytes;

    if (capacity == 0 || !ns_size_mul(capacity, sizeof(void *), &bytes) ||
        !ns_size_add(bytes, sizeof(*queue), &bytes))
        return ns_fail(err, NS_FATAL, "a queue of %zu items", capacity);
    queue = calloc(1, bytes);
    if (!queue)
        return ns_fail(err, NS_FATAL, "out of memory for a queue");
    queue->capacity = capacity;
    queue->descriptor = -1;
    if (pollable) {
        queue->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (queue->descriptor == -1) {
            free(queue);
            return ns_fail_errno(err, NS_FATAL, "eventfd");
        }
    }
    /* Time-outs follow the clock that nobody sets. */
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->not_empty, &attr);
    pthread_cond_init(&queue->not_full, &attr);
    pthread_condattr_destroy(&attr);
    *out = queue;
    return NS_OK;
}

void
ns_queue_destroy(struct ns_queue *queue)
{
    if (!queue)
        return;
    pthread_cond_destroy(&queue->not_full);
    pthread_cond_destroy(&queue->not_empty);
    pthread_mutex_destroy(&queue->lock);
    if (queue->descriptor != -1)
        close(queue->descriptor);
    free(queue);
}

/* Makes the descriptor say what the queue is; the lock is held. */
static void
ring(struct ns_queue *queue)
{
    bool wanted = queue->length > 0 || queue->closed;
    uint64_t count = 1;

    if (queue->descriptor == -1 || wanted == queue->ringing)
        return;
    /* Neither can block or fail: the counter is 0 or 1 and non-blocking. */
    if (wanted)
        queue->ringing = write(queue->descriptor, &count, 8) == 8;
    else
        queue->ringing = read(queue->descriptor, &count, 8) != 8;
}

static bool
push(struct ns_queue *queue, void *item, bool wait)
{
    bool pushed = false;

    pthread_mutex_lock(&queue->lock);
    while (wait && !queue->closed && queue->length == queue->capacity)
        pthread_cond_wait(&queue->not_full, &queue->lock);
    if (!queue->closed && queue->length < queue->capacity) {
        queue->ring[(queue->head + queue->length) % queue->capacity] = item;
        queue->length++;
        pushed = true;
        ring(queue);
        pthread_cond_signal(&queue->not_empty);
    }
    pthread_mutex_unlock(&queue->lock);
    return pushed;
}

bool
ns_queue_push(struct ns_queue *queue, void *item)
{
    return push(queue, item, true);
}

bool
ns_queue_try_push(struct ns_queue *queue, void *item)
{
    return push(queue, item, false);
}

void *
ns_queue_pop(struct ns_queue *queue, int timeout_ms)
{
    struct timespec until;
    void *item = NULL;
    int rc = 0;

    if (timeout_ms > 0) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
    }
    pthread_mutex_lock(&queue->lock);
    while (queue->length == 0 && !queue->closed && timeout_ms != 0 &&
           rc != ETIMEDOUT)
        rc = timeout_ms < 0
                 ? pthread_cond_wait(&queue->not_empty, &queue->lock)
                 : pthread_cond_timedwait(&queue->not_empty, &queue->lock,
                                          &until);
    if (queue->length > 0) {
        item = queue->ring[queue->head];
        queue->head = (queue->head + 1) % queue->capacity;
        queue->length--;
        ring(queue);
        pthread_cond_signal(&queue->not_full);
    }
    pthread_mutex_unlock(&queue->lock);
    return item;
}

void
ns_queue_close(struct ns_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    ring(queue);
    pthread_cond_broadcast(&queue->not_empty);
    pthread_cond_broadcast(&queue->not_full);
    pthread_mutex_unlock(&queue->lock);
}

size_t
ns_queue_length(struct ns_queue *queue)
{
    size_t length;

    pthread_mutex_lock(&queue->lock);
    length = queue->length;
    pthread_mutex_unlock(&queue->lock);
    return length;
}

int
ns_queue_descriptor(const struct ns_queue *queue)
{
    return queue->descriptor;
}
