#include "daemon/pipeline.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/deliver.h"
#include "daemon/intake.h"
#include "daemon/parts.h"
#include "daemon/prepare.h"
#include "daemon/schedule.h"
#include "daemon/work.h"

int64_t
ns_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int64_t
ns_unix_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* --- works ------------------------------------------------------------- */

void
ns_blocks_destroy(struct ns_blocks *blocks)
{
    if (!blocks)
        return;
    ns_ids_fini(&blocks->tokens);
    free(blocks->length);
    free(blocks);
}

void
ns_work_destroy(struct ns_work *work)
{
    if (!work)
        return;
    ns_blocks_destroy(work->unsaved);
    json_decref(work->tool_calls);
    json_decref(work->part_list);
    ns_buf_fini(&work->detail);
    ns_buf_fini(&work->reasoning);
    ns_buf_fini(&work->content);
    ns_buf_fini(&work->controls);
    ns_pictures_fini(&work->pictures);
    ns_grammar_destroy(work->grammar);
    ns_parts_destroy(work->parts);
    ns_fetch_fini(&work->fetch);
    ns_ids_fini(&work->prompt);
    ns_ids_fini(&work->draft);
    ns_job_destroy(work->job);
    free(work->texts);
    free((void *)work->message.bytes);
    free(work);
}

void
ns_work_fail(struct ns_pipeline *pipeline, struct ns_work *work,
             enum ns_result_status status)
{
    enum ns_job_mode mode = work->claim.stored_mode;

    if (!work->error.code)
        work->error.code = "internal";
    work->result = ns_result_of_error(status, &work->error);
    work->result.mode = mode;
    work->result.seed = work->claim.stored_seed;
    work->result.model_rev =
        ns_engine_model(pipeline->options.engine)->revision;
    work->result.engine_rev = ns_engine_revision(pipeline->options.engine);
}

void
ns_work_advance(struct ns_pipeline *pipeline, struct ns_work *work,
                enum ns_job_event event)
{
    enum ns_job_phase phase = work->state.phase;
    struct ns_queue *queue = NULL;
    struct ns_error err;

    work->errand.action = ns_jobstate_step(&work->state, event);
    switch (work->errand.action) {
    case NS_DO_PREPARE:
    case NS_DO_CHECK:
        queue = pipeline->to_pool;
        break;
    case NS_DO_RUN:
        queue = pipeline->to_engine;
        break;
    case NS_DO_CLAIM:
    case NS_DO_FINISH:
    case NS_DO_REFUSE:
    case NS_DO_GIVE_BACK:
        queue = pipeline->to_sink;
        break;
    case NS_DO_ACKNOWLEDGE:
    case NS_DO_PARK:
    case NS_DO_RELEASE:
        queue = pipeline->to_loop;
        break;
    case NS_DO_CHECKPOINT:
        return; /* the holder keeps it */
    case NS_DO_NOTHING:
        ns_fail(&err, NS_FATAL, "event %d for a job that is %s", (int)event,
                ns_job_phase_name(phase));
        ns_pipeline_fail(pipeline, &err);
        work->errand.action = NS_DO_RELEASE;
        queue = pipeline->to_loop;
        break;
    }
    ns_queue_push(queue, work);
}

/* --- stop and failure -------------------------------------------------- */

void
ns_pipeline_stop(struct ns_pipeline *pipeline, int64_t grace_ms)
{
    int64_t until = ns_now_ms() + grace_ms;
    int64_t present = atomic_load(&pipeline->stop_ms);

    while (until < present && !atomic_compare_exchange_weak(
                                  &pipeline->stop_ms, &present, until))
        ;
}

void
ns_pipeline_pause(struct ns_pipeline *pipeline, bool paused)
{
    atomic_store(&pipeline->paused, paused);
}

int64_t
ns_pipeline_grace_left(const struct ns_pipeline *pipeline)
{
    int64_t until = atomic_load(&pipeline->stop_ms), left;

    if (until == INT64_MAX)
        return -1;
    left = until - ns_now_ms();
    return left > 0 ? left : 0;
}

void
ns_pipeline_end_input(struct ns_pipeline *pipeline,
                      const struct ns_error *error)
{
    pthread_mutex_lock(&pipeline->lock);
    if (pipeline->failure.status == NS_OK)
        pipeline->failure = *error;
    pthread_mutex_unlock(&pipeline->lock);
}

void
ns_pipeline_fail(struct ns_pipeline *pipeline, const struct ns_error *error)
{
    ns_pipeline_end_input(pipeline, error);
    ns_pipeline_stop(pipeline, 0);
}

enum ns_status
ns_pipeline_failure(struct ns_pipeline *pipeline, struct ns_error *err)
{
    enum ns_status status;

    pthread_mutex_lock(&pipeline->lock);
    status = pipeline->failure.status;
    if (status != NS_OK)
        *err = pipeline->failure;
    pthread_mutex_unlock(&pipeline->lock);
    return status;
}

struct ns_pipeline_tuning
ns_pipeline_tuning(struct ns_pipeline *pipeline)
{
    struct ns_pipeline_tuning tuning;

    pthread_mutex_lock(&pipeline->lock);
    tuning = pipeline->tuning;
    pthread_mutex_unlock(&pipeline->lock);
    return tuning;
}

void
ns_pipeline_tune(struct ns_pipeline *pipeline,
                 const struct ns_pipeline_tuning *tuning)
{
    pthread_mutex_lock(&pipeline->lock);
    pipeline->tuning = *tuning;
    pthread_mutex_unlock(&pipeline->lock);
}

bool
ns_pipeline_healthy(struct ns_pipeline *pipeline)
{
    int64_t pass = atomic_load(&pipeline->pass_since_ms);
    int64_t store = atomic_load(&pipeline->store_since_ms);
    struct ns_pipeline_tuning tuning = ns_pipeline_tuning(pipeline);
    int64_t limit = tuning.pass_limit_ms;
    int64_t longest = atomic_load(&pipeline->longest_pass_ms);
    int64_t now = ns_now_ms();

    if (longest * 10 > limit)
        limit = longest * 10;
    return (pass == 0 || now - pass <= limit) &&
           (store == 0 || now - store <= (tuning.store_limit_ms
                                              ? tuning.store_limit_ms
                                              : NS_STORE_LIMIT_MS));
}

struct ns_pipeline_counts
ns_pipeline_counts(const struct ns_pipeline *pipeline)
{
    const struct ns_metrics *metrics = pipeline->metrics;
    struct ns_pipeline_counts out = { 0 };

#define COPY(name) out.name = atomic_load(&metrics->name)
    COPY(received);
    COPY(in_flight);
    COPY(duplicates);
    COPY(fenced);
    COPY(passes);
    COPY(prefill_rows);
    COPY(new_tokens);
    COPY(canvas_steps);
    COPY(canvas_blocks);
    COPY(job_tokens);
    COPY(job_passes);
    COPY(prompt_tokens);
#undef COPY
    out.ok = atomic_load(&metrics->ended[NS_RESULT_OK]);
    for (int i = NS_RESULT_OK + 1; i < NS_METRICS_STATUSES; i++)
        out.failed += atomic_load(&metrics->ended[i]);
    out.troubles = atomic_load(&metrics->retries);
    out.pass_ms = atomic_load(&metrics->pass_s.sum_micro) / 1000;
    return out;
}

/* --- start and end ----------------------------------------------------- */

static enum ns_status
start_threads(struct ns_pipeline *pipeline, struct ns_error *err)
{
    uint32_t n = pipeline->options.prepare_threads + 2;
    int rc;

    pipeline->threads = calloc(n, sizeof(*pipeline->threads));
    if (!pipeline->threads)
        return ns_fail(err, NS_FATAL, "out of memory for %u threads", n);
    for (uint32_t i = 0; i < n; i++) {
        rc = pthread_create(&pipeline->threads[i], NULL,
                            i + 2 < n    ? ns_prepare_thread
                            : i + 1 < n ? ns_schedule_thread
                                        : ns_deliver_thread,
                            pipeline);
        if (rc != 0)
            return ns_fail(err, NS_FATAL, "start a thread: %s", strerror(rc));
        /* For `top -H` and debuggers; that it may fail is no matter. */
        pthread_setname_np(pipeline->threads[i], i + 2 < n   ? "prepare"
                                                 : i + 1 < n ? "engine"
                                                             : "sink");
        pipeline->n_threads++;
    }
    return NS_OK;
}

enum ns_status
ns_pipeline_create(const struct ns_pipeline_options *options,
                   struct ns_pipeline **out, struct ns_error *err)
{
    struct ns_pipeline *pipeline = calloc(1, sizeof(*pipeline));
    uint32_t window = options->window;
    enum ns_status status;

    if (!pipeline)
        return ns_fail(err, NS_FATAL, "out of memory for the pipeline");
    pipeline->options = *options;
    pipeline->tuning = options->tuning;
    pipeline->metrics =
        options->metrics ? options->metrics : &pipeline->own_metrics;
    atomic_store(&pipeline->metrics->window, window);
    pipeline->jitter = (uint64_t)ns_unix_now_ms() ^ (uint64_t)getpid() << 32;
    atomic_store(&pipeline->stop_ms, INT64_MAX);
    pthread_mutex_init(&pipeline->lock, NULL);

    /* Every job in flight fits each queue, so that no thread ever waits for a
     * sink that waits for its store: beside itself a job has at most two lots
     * of blocks there, those that are being saved and the last ones. */
    status = ns_queue_create(window, false, &pipeline->to_pool, err);
    if (status == NS_OK)
        status = ns_queue_create(window, false, &pipeline->to_engine, err);
    if (status == NS_OK)
        status = ns_queue_create(3 * (size_t)window, false, &pipeline->to_sink,
                                 err);
    if (status == NS_OK)
        status = ns_queue_create(window, true, &pipeline->to_loop, err);
    if (status == NS_OK)
        status = ns_backlog_create(
            ns_engine_load(options->engine).age_step_ms, NS_GROUP_RIDERS,
            &pipeline->pending, err);
    if (status == NS_OK)
        status = start_threads(pipeline, err);
    if (status != NS_OK) {
        ns_pipeline_destroy(pipeline);
        return status;
    }
    *out = pipeline;
    return NS_OK;
}

bool
ns_pipeline_turn(struct ns_pipeline *pipeline, int *wait_ms)
{
    ns_intake_turn(pipeline);
    *wait_ms = (int)ns_intake_wait_ms(pipeline);
    return pipeline->n_flying > 0 ||
           (!pipeline->ended && !ns_pipeline_stopping(pipeline));
}

int
ns_pipeline_descriptor(const struct ns_pipeline *pipeline)
{
    return ns_queue_descriptor(pipeline->to_loop);
}

void
ns_pipeline_destroy(struct ns_pipeline *pipeline)
{
    int wait_ms;

    if (!pipeline)
        return;
    /* Only with every thread running can the rest be let go in order. */
    if (pipeline->n_threads == pipeline->options.prepare_threads + 2) {
        ns_pipeline_stop(pipeline, 0);
        while (ns_pipeline_turn(pipeline, &wait_ms))
            usleep(1000);
    }
    if (pipeline->to_pool)
        ns_queue_close(pipeline->to_pool);
    if (pipeline->to_engine)
        ns_queue_close(pipeline->to_engine);
    if (pipeline->to_sink)
        ns_queue_close(pipeline->to_sink);
    for (uint32_t i = 0; i < pipeline->n_threads; i++)
        pthread_join(pipeline->threads[i], NULL);
    free(pipeline->threads);
    ns_queue_destroy(pipeline->to_loop);
    ns_backlog_destroy(pipeline->pending);
    ns_queue_destroy(pipeline->to_sink);
    ns_queue_destroy(pipeline->to_engine);
    ns_queue_destroy(pipeline->to_pool);
    pthread_mutex_destroy(&pipeline->lock);
    free(pipeline);
}
