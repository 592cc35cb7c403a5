/* metrics.h - what the pipeline counts, and how it is told to Prometheus.
 *
 * The stages add, the web server reads, nobody locks and nobody waits: every
 * number is an atomic of its own. A reading may therefore be torn between two
 * numbers, never within one, and a histogram's buckets and count agree since
 * the count is made of the buckets read.
 *
 * Only numbers and words of fixed sets come in here: no job id, no text of a
 * prompt or an answer, no error text. Error codes are counted by name for the
 * codes that are known, all others together as "other", so that no input can
 * make the set grow.
 *
 * Owns: nothing but its numbers. Thread: any, but for what says otherwise.
 */
#ifndef NS_DAEMON_METRICS_H
#define NS_DAEMON_METRICS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "connectors/kafka.h"
#include "connectors/result.h"
#include "engine/engine.h"

enum {
    NS_HISTOGRAM_BUCKETS = 16, /* the one without a bound not counted */
    NS_METRICS_CODES = 64,
    NS_METRICS_STATUSES = NS_RESULT_EXPIRED + 1,
};

struct ns_histogram {
    _Atomic uint64_t bucket[NS_HISTOGRAM_BUCKETS + 1]; /* not cumulative */
    _Atomic uint64_t sum_micro;                        /* in millionths */
};

struct ns_metrics {
    struct ns_histogram queue_s, run_s; /* of jobs that ran to their end */
    struct ns_histogram tokens_per_pass; /* likewise; a job's own passes */
    struct ns_histogram pass_s, pass_fill; /* fill: rows / budget */
    struct ns_histogram pass_miss; /* measured / predicted */
    struct ns_histogram kv_fill; /* of the fuller pool, behind each pass */

    _Atomic uint64_t received, in_flight, running, window; /* jobs */
    _Atomic uint64_t ended[NS_METRICS_STATUSES]; /* rows stored, by status */
    _Atomic uint64_t errors[NS_METRICS_CODES];   /* of rows not ok, by code */
    _Atomic uint64_t turned_down[NS_N_VALIDATORS]; /* answers, by validator */
    _Atomic uint64_t source_away, store_away; /* 1: at the last call */
    _Atomic uint64_t duplicates, fenced, retries, checkpoints;
    _Atomic uint64_t put_off;        /* jobs whose tenant may begin no more */
    _Atomic uint64_t blocks_dropped; /* damaged, or behind a hole */

    _Atomic uint64_t passes, prefill_rows, canvas_rows, commit_rows, ar_rows;
    _Atomic uint64_t canvas_steps, canvas_blocks, new_tokens;
    _Atomic uint64_t prompt_tokens;
    _Atomic uint64_t job_tokens, job_passes, cached_tokens; /* of done jobs */
    _Atomic uint64_t put_back, images_asked, images_encoded;
    _Atomic uint64_t full_pages, full_pages_free;
    _Atomic uint64_t sliding_pages, sliding_pages_free;
};

/* All zero; pages and window are set by who knows them. */
void ns_metrics_init(struct ns_metrics *metrics);

/* The engine thread, after each pass. `memory` as of ns_engine_memory. */
void ns_metrics_pass(struct ns_metrics *metrics,
                     const struct ns_pass_report *report,
                     const struct ns_engine_load *load,
                     const struct ns_memory_plan *memory);
/* The engine thread, for each job that is done. */
void ns_metrics_job(struct ns_metrics *metrics,
                    const struct ns_result *result, uint32_t new_tokens);
/* The sink, for each row that is stored. `code` is NULL when it is ok. */
void ns_metrics_ended(struct ns_metrics *metrics,
                      enum ns_result_status status, const char *code);

/* The pool, for each answer that a validator turned down. */
void ns_metrics_turned_down(struct ns_metrics *metrics,
                            enum ns_validator validator);

/* What the metrics do not know by themselves. */
struct ns_metrics_about {
    const char *version, *model, *model_revision; /* NULL before it is known */
    int64_t start_unix_s;
    bool ready, healthy;
    const struct ns_kafka_state *kafka; /* NULL: the source is another */
};

/* Appends the text format 0.0.4 to `out`. */
void ns_metrics_write(const struct ns_metrics *metrics,
                      const struct ns_metrics_about *about,
                      struct ns_buf *out);

/* Jobs in flight that no pass works on: in preparation, waiting for their turn
 * or on their way into the store. */
uint64_t ns_metrics_waiting(const struct ns_metrics *metrics);

/* "other" for an index out of range; for tests. */
const char *ns_metrics_code(size_t index);

#endif
