#include "daemon/intake.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

enum {
    POLLS_PER_TURN = 256,
    POLL_BACKOFF_MS = 50,
    POLL_BACKOFF_CAP_MS = 5000,
    TEND_MS = 500,
    PUT_OFF_WINDOWS = 16,
};

static bool
copy_texts(struct ns_work *work)
{
    const char **const texts[] = {
        &work->message.origin,       &work->message.id,
        &work->message.batch,        &work->message.trace_parent,
        &work->message.trace_state,  &work->message.headers,
    };
    size_t n = sizeof(texts) / sizeof(texts[0]), length = 1;
    char *copy;

    for (size_t i = 0; i < n; i++)
        length += *texts[i] ? strlen(*texts[i]) + 1 : 0;
    work->texts = copy = malloc(length);
    if (!copy)
        return false;
    for (size_t i = 0; i < n; i++)
        if (*texts[i]) {
            length = strlen(*texts[i]) + 1;
            *texts[i] = memcpy(copy, *texts[i], length);
            copy += length;
        }
    return true;
}

/* The message is borrowed until the next poll, so the work keeps a copy: the
 * bytes by themselves, since they go first, and all texts in one piece. */
static struct ns_work *
take_in(const struct ns_message *message)
{
    struct ns_work *work = calloc(1, sizeof(*work));
    char *copy;

    if (!work)
        return NULL;
    work->message = *message;
    work->message.bytes = NULL;
    work->length = message->bytes ? message->length : 0;
    if (message->bytes) {
        copy = malloc(message->length + 1);
        if (!copy)
            goto fail;
        memcpy(copy, message->bytes, message->length);
        copy[message->length] = '\0';
        work->message.bytes = copy;
    }
    if (!copy_texts(work))
        goto fail;
    work->received_ms = ns_now_ms();
    return work;
fail:
    ns_work_destroy(work);
    return NULL;
}

/* Jobs whose tenant may begin no more leave their places to others, so that a
 * flood from one tenant stops nobody's intake: not before they are sixteen
 * windows of jobs, or a second window of bytes. Both counts are the sink's,
 * and may be a moment old. */
static bool
has_room(const struct ns_pipeline *pipeline)
{
    uint64_t n_off = atomic_load(&pipeline->n_put_off);
    uint64_t bytes_off = atomic_load(&pipeline->bytes_put_off);
    uint64_t window = pipeline->options.window;
    uint64_t bytes = pipeline->options.window_bytes;

    if (n_off > PUT_OFF_WINDOWS * window)
        n_off = PUT_OFF_WINDOWS * window;
    if (bytes_off > bytes)
        bytes_off = bytes;
    return pipeline->n_flying < window + n_off &&
           (pipeline->n_flying == n_off ||
            pipeline->bytes_flying < bytes + bytes_off);
}

static void
poll_failed(struct ns_pipeline *pipeline, enum ns_status status,
            const struct ns_error *err)
{
    int64_t delay = POLL_BACKOFF_MS;

    if (status != NS_RETRY) {
        if (status == NS_REJECT)
            ns_pipeline_end_input(pipeline, err);
        else
            ns_pipeline_fail(pipeline, err);
        pipeline->ended = true;
        return;
    }
    if (pipeline->n_poll_failures == 0)
        ns_log_warn("source.retry", "source=%s error=\"%s\"",
                    pipeline->options.source->ops->name, err->text);
    for (uint32_t i = 0;
         i < pipeline->n_poll_failures && delay < POLL_BACKOFF_CAP_MS; i++)
        delay *= 2;
    pipeline->n_poll_failures++;
    atomic_store(&pipeline->metrics->source_away, 1);
    pipeline->poll_at_ms = ns_now_ms() + delay;
}

static void
begin(struct ns_pipeline *pipeline, struct ns_work *work)
{
    work->next_flying = pipeline->flying;
    if (pipeline->flying)
        pipeline->flying->previous_flying = work;
    pipeline->flying = work;
    pipeline->n_flying++;
    pipeline->bytes_flying += work->length;
}

static void
poll_source(struct ns_pipeline *pipeline)
{
    struct ns_message message = { 0 };
    struct ns_error err = { 0 };
    enum ns_status status;
    struct ns_work *work;

    for (int i = 0; i < POLLS_PER_TURN && has_room(pipeline); i++) {
        status = ns_source_poll(pipeline->options.source, 0, &message, &err);
        if (status != NS_OK) {
            poll_failed(pipeline, status, &err);
            return;
        }
        pipeline->n_poll_failures = 0;
        atomic_store(&pipeline->metrics->source_away, 0);
        if (message.kind == NS_MESSAGE_END) {
            pipeline->ended = true;
            return;
        }
        if (message.kind == NS_MESSAGE_SKIPPED)
            return; /* signals and the rest first; poll_at_ms lies behind us */
        if (message.kind == NS_MESSAGE_NONE) {
            pipeline->poll_at_ms =
                ns_now_ms() + ns_pipeline_tuning(pipeline).poll_ms;
            return;
        }
        work = take_in(&message);
        if (!work) {
            /* It was handed out and never acknowledged, so it comes again. */
            ns_fail(&err, NS_FATAL, "out of memory for a job of %" PRIu64
                    " bytes", message.length);
            ns_pipeline_fail(pipeline, &err);
            return;
        }
        begin(pipeline, work);
        atomic_fetch_add(&pipeline->metrics->received, 1);
        atomic_store(&pipeline->metrics->in_flight, pipeline->n_flying);
        work->errand.action = NS_DO_PREPARE;
        ns_queue_push(pipeline->to_pool, work);
    }
}

static void
end(struct ns_pipeline *pipeline, struct ns_work *work)
{
    if (work->previous_flying)
        work->previous_flying->next_flying = work->next_flying;
    else
        pipeline->flying = work->next_flying;
    if (work->next_flying)
        work->next_flying->previous_flying = work->previous_flying;
    pipeline->n_flying--;
    pipeline->bytes_flying -= work->length;
    atomic_store(&pipeline->metrics->in_flight, pipeline->n_flying);
    ns_work_destroy(work);
}

static uint32_t
jitter(struct ns_pipeline *pipeline)
{
    pipeline->jitter = pipeline->jitter * 6364136223846793005u +
                       1442695040888963407u;
    return (uint32_t)(pipeline->jitter >> 32);
}

static void
park(struct ns_pipeline *pipeline, struct ns_work *work)
{
    int64_t wait_ms = work->claim.wait_ms;

    /* Who was fenced must not claim back at once: two holders that steal from
     * each other make no progress. */
    if (atomic_load(&work->fenced) && wait_ms < 1000)
        wait_ms = 1000;
    if (wait_ms > 30000)
        wait_ms = 30000;
    work->due_ms = ns_now_ms() + wait_ms +
                   (int64_t)(jitter(pipeline) % (uint32_t)(wait_ms / 8 + 1));
    work->next = pipeline->parked;
    pipeline->parked = work;
}

static void
take_back(struct ns_pipeline *pipeline)
{
    struct ns_work *work;

    while ((work = ns_queue_pop(pipeline->to_loop, 0)) != NULL) {
        switch (work->errand.action) {
        case NS_DO_ACKNOWLEDGE:
            ns_source_acknowledge(pipeline->options.source,
                                  work->message.position);
            pipeline->poll_at_ms = 0;
            end(pipeline, work);
            break;
        case NS_DO_PARK:
            park(pipeline, work);
            break;
        default: /* released */
            end(pipeline, work);
            break;
        }
    }
}

static void
unpark(struct ns_pipeline *pipeline)
{
    struct ns_work **at = &pipeline->parked, *work;
    bool stopping = ns_pipeline_stopping(pipeline);
    int64_t now_ms = ns_now_ms();

    while ((work = *at) != NULL) {
        if (!stopping && work->due_ms > now_ms) {
            at = &work->next;
            continue;
        }
        *at = work->next;
        /* A message that another member of the group has now is its to run. */
        ns_work_advance(pipeline, work,
                        stopping || !ns_source_owns(pipeline->options.source,
                                                    work->message.position)
                            ? NS_ON_STOP
                            : NS_ON_DUE);
    }
}

/* Also while nothing is taken in: the window is full, or we drain. */
static void
tend_source(struct ns_pipeline *pipeline)
{
    int64_t now_ms = ns_now_ms();
    struct ns_error err = { 0 };
    enum ns_status status;

    if (now_ms < pipeline->tend_at_ms)
        return;
    pipeline->tend_at_ms = now_ms + TEND_MS;
    status = ns_source_tend(pipeline->options.source, &err);
    if (status != NS_OK)
        poll_failed(pipeline, status, &err);
    for (struct ns_work *work = pipeline->flying; work;
         work = work->next_flying)
        if (!ns_source_owns(pipeline->options.source, work->message.position))
            atomic_store(&work->moved, true);
}

void
ns_intake_turn(struct ns_pipeline *pipeline)
{
    if (ns_pipeline_stopping(pipeline))
        ns_fetcher_stop(pipeline->options.pictures.fetcher);
    tend_source(pipeline);
    take_back(pipeline);
    unpark(pipeline);
    if (!pipeline->ended && !ns_pipeline_stopping(pipeline) &&
        !atomic_load(&pipeline->paused) &&
        ns_now_ms() >= pipeline->poll_at_ms)
        poll_source(pipeline);
    take_back(pipeline);
}

int64_t
ns_intake_wait_ms(struct ns_pipeline *pipeline)
{
    int64_t now_ms = ns_now_ms(), wait_ms = TEND_MS;

    for (struct ns_work *work = pipeline->parked; work; work = work->next)
        if (work->due_ms - now_ms < wait_ms)
            wait_ms = work->due_ms - now_ms;
    if (!pipeline->ended && !ns_pipeline_stopping(pipeline) &&
        !atomic_load(&pipeline->paused) && has_room(pipeline) && pipeline->poll_at_ms - now_ms < wait_ms)
        wait_ms = pipeline->poll_at_ms - now_ms;
    return wait_ms < 0 ? 0 : wait_ms;
}
