/* pipeline.h - from source to store: the threads, the queues, start and stop.
 *
 *     event loop --parse--> pool --claim--> sink --prepare--> pool
 *         ^                                                     |
 *         |                                                    run
 *         |                                                     v
 *         '--acknowledge, park, release-- sink <--finish-- engine thread
 *
 * `nightshift run` and nightshiftd are the same pipeline over different ends.
 * The caller's thread is the event loop: it owns the source, the timers and
 * the signals, and calls turn. Queues are bounded by the window, so no push
 * of a job ever waits; only blocks to be stored can make the engine wait, for
 * the sink, which waits for nobody but the store. No lock is held across a
 * pass or a call into the store.
 *
 * Owns:    threads, queues, the jobs in flight.
 * Borrows: engine, source and store until destroy; all outlive it.
 * Thread:  the event loop, but for the functions marked `any`.
 */
#ifndef NS_DAEMON_PIPELINE_H
#define NS_DAEMON_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "connectors/job.h"
#include "connectors/source.h"
#include "connectors/store.h"
#include "daemon/pictures.h"
#include "daemon/references.h"
#include "engine/engine.h"

struct ns_board;
struct ns_metrics;

struct ns_pipeline_tuning { /* what a reload may change */
    enum ns_job_mode mode;  /* of jobs that name none */
    bool by_throughput;     /* `auto` is whatever is fastest, see outlook.h */
    uint64_t seed;          /* with the job id: the seed of jobs without one */
    uint32_t default_max_tokens;
    uint32_t summary_chunk; /* tokens of a part; 0: what fits the context */
    int64_t poll_ms;       /* an idle source is asked this often */
    int64_t checkpoint_ms; /* least time between two of one job */
    int64_t retry_ms;      /* first delay after a trouble */
    int64_t store_retry_ms; /* longest wait for a store that is away; 0: 5 s */
    int64_t pass_limit_ms; /* a pass may always take this long */
    int64_t store_limit_ms; /* and one call into the store; 0: a minute */
    uint32_t tenant_jobs;  /* of one tenant begun at a time; 0: any number */
};

struct ns_judge_options { /* of judge.h; texts are borrowed */
    uint32_t validators;     /* bits of enum ns_validator, where a job names
                              * none */
    uint32_t retries;        /* likewise */
    const char *python, *cc; /* NULL: not here */
};

struct ns_pipeline_options {
    struct ns_engine *engine;
    struct ns_source *source;
    struct ns_store *store;
    struct ns_job_options job; /* borrowed, texts too */
    struct ns_pictures_options pictures; /* borrowed */
    struct ns_references_options references; /* borrowed */
    struct ns_judge_options judge;
    const char *model_name;    /* what results report; borrowed */
    bool report_asked_name;    /* results report the name that the job gave */
    bool keep_payloads;        /* the store keeps what it refuses */
    struct ns_metrics *metrics; /* borrowed; NULL: counted for us alone */
    struct ns_board *board;    /* borrowed; NULL: nobody looks on */
    uint32_t window;           /* jobs in flight */
    uint32_t max_claims;       /* of them begun: what the engine can soon take */
    uint64_t window_bytes;     /* of input in them */
    uint32_t prepare_threads;
    struct ns_pipeline_tuning tuning;
};

struct ns_pipeline;

/* Starts the threads. The caller has blocked the signals it waits for. */
enum ns_status ns_pipeline_create(const struct ns_pipeline_options *options,
                                  struct ns_pipeline **out,
                                  struct ns_error *err);

/* One turn of the event loop, without waiting: takes in, parks, acknowledges.
 * `*wait_ms` is how long there is nothing to do unless the descriptor becomes
 * readable. True while there is anything left; false when the source has
 * ended, or a stop is through, and every job has ended. */
bool ns_pipeline_turn(struct ns_pipeline *pipeline, int *wait_ms);
int ns_pipeline_descriptor(const struct ns_pipeline *pipeline);

/* Takes nothing in any more. Jobs in the engine may finish within `grace_ms`;
 * what then runs is kept at its last block and given back. A second call can
 * only shorten the time. */
void ns_pipeline_stop(struct ns_pipeline *pipeline, int64_t grace_ms);
/* While paused nothing is taken in and nothing begun; what runs goes on. */
void ns_pipeline_pause(struct ns_pipeline *pipeline, bool paused); /* any */

/* Milliseconds of grace left; -1 when no stop was asked for. */
int64_t ns_pipeline_grace_left(const struct ns_pipeline *pipeline);

/* NS_OK, or what went wrong with source, store or engine: the first of them.
 * The pipeline stopped itself because of it. */
enum ns_status ns_pipeline_failure(struct ns_pipeline *pipeline,
                                   struct ns_error *err);

/* From the next job on. */
void ns_pipeline_tune(struct ns_pipeline *pipeline,
                      const struct ns_pipeline_tuning *tuning);

/* Whether each thread that must move has moved within its limit. */
bool ns_pipeline_healthy(struct ns_pipeline *pipeline); /* any */

struct ns_pipeline_counts { /* since create; a snapshot that may be torn */
    uint64_t received, in_flight; /* jobs */
    uint64_t ok, failed;          /* rows stored: ok, all others */
    uint64_t duplicates, fenced, troubles;
    uint64_t passes, pass_ms, prefill_rows, new_tokens;
    uint64_t canvas_steps, canvas_blocks; /* their ratio: steps per canvas */
    uint64_t job_tokens, job_passes; /* of done jobs: tokens per forward */
    uint64_t prompt_tokens;
};
struct ns_pipeline_counts ns_pipeline_counts(
    const struct ns_pipeline *pipeline); /* any */

/* Stops at once if it must, joins the threads. Takes NULL. */
void ns_pipeline_destroy(struct ns_pipeline *pipeline);

#endif
