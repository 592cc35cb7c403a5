/* work.h - one job on its way, and what the four stages share.
 *
 * A work is held by one thread at a time and moves by pointer. Whoever holds
 * it says what happened (ns_work_advance), which steps its state and hands it
 * to the thread that comes next; from then on the former holder must not look
 * at it. Two flags are the exception: the sink, whose heartbeats hear of
 * cancels and of newer owners, sets them on a work that another thread holds.
 *
 * The stages are intake.h (event loop), prepare.h (pool), schedule.h (engine
 * thread) and deliver.h (sink thread). Private to daemon/.
 */
#ifndef NS_DAEMON_WORK_H
#define NS_DAEMON_WORK_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/buf.h"
#include "daemon/jobstate.h"
#include "daemon/metrics.h"
#include "daemon/pictures.h"
#include "daemon/pipeline.h"
#include "daemon/queue.h"
#include "engine/backlog.h"
#include "engine/tokenizer.h"

/* What a queue carries: a work, or (only to the sink) blocks of one. */
struct ns_errand {
    enum ns_job_action action;
};

struct ns_work {
    struct ns_errand errand; /* first: what the next holder is to do */
    struct ns_jobstate state;
    struct ns_work *next; /* in a list of its holder */
    struct ns_pipeline *pipeline; /* set while the fetcher holds it */

    struct ns_message message; /* bytes: owned; until parsed, or claimed */
    char *texts;               /* owned: what its other pointers borrow from */
    uint64_t length;
    struct ns_job *job; /* owned; NULL until parsed */
    enum ns_mode mode;
    uint64_t seed;
    struct ns_claim claim; /* fence, blocks to resume from */
    int64_t clock_shift_ms; /* by which the store's clock is before the host's:
                             * deadlines count by it */

    struct ns_ids prompt, draft;
    struct ns_fetch fetch;       /* of its URLs, until they are decoded */
    struct ns_pictures pictures; /* owned; as the images below, of request */
    struct ns_request_image images[NS_JOB_IMAGES];
    struct ns_parts *parts; /* owned; NULL: it is not summarised in parts */
    struct ns_work *parent; /* of a node of those: whose, or NULL: nobody's any
                             * more. The engine thread's alone */
    bool is_node;
    uint32_t node;          /* index in the parent's round */
    struct ns_grammar *grammar; /* owned; NULL: any text */
    struct ns_buf controls; /* control strings in the job's own texts; owned */
    uint32_t attempt; /* of the claim, from 0: judge.h */
    uint32_t spent_passes, spent_steps; /* of all of them */
    struct ns_request request;
    struct ns_error error; /* refused, unfit or in trouble: why */
    struct ns_result result;
    struct ns_buf content, reasoning, detail; /* under the result; owned */
    json_t *tool_calls, *part_list;           /* likewise */

    bool blameless; /* what is in trouble is not the job: it counts no retry */
    int64_t received_ms, submitted_ms; /* monotonic */
    int64_t due_ms;                    /* parked until */

    /* Engine thread. */
    uint32_t n_blocks;      /* told of, those before a resume counted */
    int64_t checkpoint_ms;  /* of the last one sent */
    struct ns_blocks *unsaved; /* owned */
    _Atomic bool saving; /* blocks are on their way: until the sink has them */
    bool no_checkpoints;       /* one was lost: no later one without it */

    /* Sink thread: the works whose claim it keeps alive, and whose they are. */
    struct ns_tenant *tenant;
    bool put_off; /* sink: its tenant may begin no more; others go past it */
    struct ns_work *next_held, *previous_held;
    bool held;

    _Atomic bool fenced, cancel; /* set by the sink for whoever holds it */

    /* Event loop: all works in flight. `moved` tells the sink that another
     * member of the group has the message now: not to be begun here. */
    struct ns_work *next_flying, *previous_flying;
    _Atomic bool moved;
};

/* Blocks on their way to the sink, ahead of anything else of their work. */
struct ns_blocks {
    struct ns_errand errand; /* first: NS_DO_CHECKPOINT */
    struct ns_work *work;    /* only `job` and `claim.fence` are read */
    struct ns_ids tokens;    /* one block after another */
    uint32_t first, n, capacity;
    uint32_t *length; /* [n] */
};

struct ns_pipeline {
    struct ns_pipeline_options options; /* const but for tuning */

    struct ns_queue *to_pool, *to_engine, *to_sink, *to_loop;
    struct ns_backlog *pending; /* engine thread: ready, not yet in it */
    pthread_t *threads; /* pool, then engine, then sink */
    uint32_t n_threads;

    /* Guards the two fields below; innermost, held for a copy. */
    pthread_mutex_t lock;
    struct ns_pipeline_tuning tuning;
    struct ns_error failure;

    /* Nothing is taken in and nothing claimed: by a signal to this process. */
    _Atomic bool paused;

    /* Monotonic time at which nothing may run any more; INT64_MAX: go on. */
    _Atomic int64_t stop_ms;

    /* Works that are put off: they count in a window of their own, since they
     * would fill that of all. Written by the sink. */
    _Atomic uint64_t n_put_off, bytes_put_off;

    /* For the watchdog: since when, or 0. */
    _Atomic int64_t pass_since_ms, store_since_ms;
    _Atomic int64_t longest_pass_ms;

    /* Event loop. */
    struct ns_work *parked, *flying;
    uint64_t n_flying, bytes_flying;
    bool ended;          /* the source has no more */
    int64_t poll_at_ms;  /* not to be asked before */
    int64_t tend_at_ms;
    uint32_t n_poll_failures;
    uint64_t jitter;

    struct ns_metrics *metrics;    /* the caller's, or own_metrics */
    struct ns_metrics own_metrics;
};

enum {
    NS_RETRY_CAP_MS = 300000,
    NS_STORE_LIMIT_MS = 60000, /* of one call, before it counts as stuck */
    NS_ALONE_FROM = 2,         /* stalls */
};

int64_t ns_now_ms(void);      /* monotonic */
int64_t ns_unix_now_ms(void); /* the calendar's */

/* Steps the state and hands the work on. Any thread, as its holder. */
void ns_work_advance(struct ns_pipeline *pipeline, struct ns_work *work,
                     enum ns_job_event event);
/* The work ends failed with work->error (NS_REJECT) or with `status`. */
void ns_work_fail(struct ns_pipeline *pipeline, struct ns_work *work,
                  enum ns_result_status status);
void ns_work_destroy(struct ns_work *work); /* takes NULL */
void ns_blocks_destroy(struct ns_blocks *blocks); /* takes NULL */

/* Something all jobs need is broken: everything stops. The first error counts
 * and is what ns_pipeline_failure says. */
void ns_pipeline_fail(struct ns_pipeline *pipeline,
                      const struct ns_error *error);
/* The same for the input as a whole: what was taken in still runs. */
void ns_pipeline_end_input(struct ns_pipeline *pipeline,
                           const struct ns_error *error);
struct ns_pipeline_tuning ns_pipeline_tuning(struct ns_pipeline *pipeline);

static inline bool
ns_pipeline_stopping(struct ns_pipeline *pipeline)
{
    return atomic_load(&pipeline->stop_ms) != INT64_MAX;
}

static inline bool
ns_pipeline_out_of_time(struct ns_pipeline *pipeline)
{
    int64_t stop_ms = atomic_load(&pipeline->stop_ms);

    return stop_ms != INT64_MAX && ns_now_ms() >= stop_ms;
}

#endif
