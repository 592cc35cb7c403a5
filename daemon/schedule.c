#include "daemon/schedule.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "daemon/board.h"
#include "daemon/parts.h"
#include "daemon/work.h"
#include "engine/backlog.h"

enum { BLOCK_TOKENS = 1 << 20 };

struct schedule {
    struct ns_pipeline *pipeline;
    struct ns_engine *engine;
    struct ns_backlog *pending; /* the pipeline's */
    struct ns_work *running;
    uint32_t n_running;
    uint64_t next_id;
    bool alone;  /* the one that runs must stay so */
    bool broken; /* the engine is only good to close */
};

/* --- lists ------------------------------------------------------------- */

/* Takes the running work with this id off the list; NULL if there is none. */
static struct ns_work *
find_running(struct schedule *schedule, uint64_t id)
{
    struct ns_work *work = schedule->running;

    while (work && work->request.id != id)
        work = work->next;
    return work;
}

static void
remove_running(struct schedule *schedule, struct ns_work *work)
{
    struct ns_work **at = &schedule->running;

    while (*at != work)
        at = &(*at)->next;
    *at = work->next;
    schedule->n_running--;
    if (schedule->n_running == 0)
        schedule->alone = false;
}

/* --- checkpoints ------------------------------------------------------- */

static enum ns_status
keep_block(struct ns_work *work, const struct ns_event *event,
           struct ns_error *err)
{
    struct ns_blocks *blocks = work->unsaved;
    uint32_t *length;

    if (!blocks) {
        blocks = calloc(1, sizeof(*blocks));
        if (!blocks)
            return ns_fail(err, NS_FATAL, "out of memory for a block");
        blocks->errand.action = NS_DO_CHECKPOINT;
        blocks->work = work;
        blocks->tokens.limit = BLOCK_TOKENS;
        blocks->first = event->block;
        work->unsaved = blocks;
    }
    if (blocks->n == blocks->capacity) {
        length = realloc(blocks->length,
                         (blocks->capacity + 8) * sizeof(*length));
        if (!length)
            return ns_fail(err, NS_FATAL, "out of memory for a block");
        blocks->length = length;
        blocks->capacity += 8;
    }
    for (uint32_t i = 0; i < event->n_tokens; i++)
        if (ns_ids_add(&blocks->tokens, event->tokens[i], err) != NS_OK)
            return NS_FATAL;
    blocks->length[blocks->n++] = event->n_tokens;
    return NS_OK;
}

/* The sink gets them ahead of whatever the work itself is sent there for. */
static void
send_blocks(struct schedule *schedule, struct ns_work *work)
{
    struct ns_blocks *blocks = work->unsaved;

    if (!blocks)
        return;
    work->unsaved = NULL;
    work->checkpoint_ms = ns_now_ms();
    atomic_store(&work->saving, true);
    if (!ns_queue_push(schedule->pipeline->to_sink, blocks))
        ns_blocks_destroy(blocks);
}

/* While those before are still on their way, as for as long as the store is
 * away, they gather here and go together: so the queue of the sink has room. */
static void
send_when_due(struct schedule *schedule, struct ns_work *work)
{
    if (!atomic_load(&work->saving) &&
        ns_now_ms() - work->checkpoint_ms >=
            ns_pipeline_tuning(schedule->pipeline).checkpoint_ms)
        send_blocks(schedule, work);
}

/* --- jobs in parts ------------------------------------------------------- */

static bool
has_round(const struct ns_work *work)
{
    return work->parts && !work->parts->is_final;
}

/* The parent goes on to another thread: none of its nodes runs any more, and
 * those that wait belong to nobody. */
static void
disperse(struct schedule *schedule, struct ns_work *parent)
{
    struct ns_parts *parts = parent->parts;

    for (uint32_t i = 0; i < parts->n; i++) {
        struct ns_work *node = parts->child[i];
        bool runs = node && find_running(schedule, node->request.id) == node;

        if (!node)
            continue;
        parts->child[i] = NULL;
        node->parent = NULL;
        if (runs) {
            if (!schedule->broken)
                ns_engine_cancel(schedule->engine, node->request.id);
            remove_running(schedule, node);
            ns_work_destroy(node);
        }
    }
}

static void
leave_parent(struct schedule *schedule, struct ns_work *parent,
             enum ns_job_event event)
{
    disperse(schedule, parent);
    if (event == NS_ON_STOP || event == NS_ON_TROUBLE)
        send_blocks(schedule, parent);
    else if (event == NS_ON_DONE && !atomic_load(&parent->saving))
        send_blocks(schedule, parent); /* the next round is behind these */
    if (event != NS_ON_DONE) {
        ns_blocks_destroy(parent->unsaved);
        parent->unsaved = NULL;
    }
    ns_work_advance(schedule->pipeline, parent, event);
}

/* --- out of the engine ------------------------------------------------- */

static void
leave(struct schedule *schedule, struct ns_work *work,
      enum ns_job_event event)
{
    remove_running(schedule, work);
    if (event == NS_ON_STOP || event == NS_ON_TROUBLE)
        send_blocks(schedule, work);
    ns_blocks_destroy(work->unsaved);
    work->unsaved = NULL;
    ns_work_advance(schedule->pipeline, work, event);
}

static bool
copy_text(struct ns_buf *buf, const char *text, size_t length)
{
    struct ns_error err;

    ns_buf_fini(buf);
    ns_buf_init(buf, SIZE_MAX / 2);
    ns_buf_add(buf, text, length);
    return ns_buf_check(buf, "an answer", &err) == NS_OK;
}

static const char *
finish_name(enum ns_finish finish)
{
    switch (finish) {
    case NS_FINISH_STOP:
        return "stop";
    case NS_FINISH_LENGTH:
        return "length";
    case NS_FINISH_TOOL_CALLS:
        return "tool_calls";
    }
    return "stop";
}

/* The event's texts are gone with the next pass, so the work takes copies. */
static bool
keep_texts(struct ns_work *work, const struct ns_reply_text *reply)
{
    struct ns_result *result = &work->result;

    if (!copy_text(&work->content, reply->content, reply->content_length))
        return false;
    if (reply->content_length > 0 || !reply->tool_calls) {
        result->content = work->content.data ? work->content.data : "";
        result->content_length = work->content.length;
    }
    if (reply->thought) {
        if (!copy_text(&work->reasoning, reply->thought,
                       reply->thought_length))
            return false;
        result->reasoning = work->reasoning.data ? work->reasoning.data : "";
        result->reasoning_length = work->reasoning.length;
    }
    json_decref(work->tool_calls);
    work->tool_calls = NULL;
    if (reply->tool_calls) {
        work->tool_calls = json_deep_copy(reply->tool_calls);
        if (!work->tool_calls)
            return false;
        result->tool_calls = work->tool_calls;
    }
    if (reply->bad_tool_call) {
        const char *raw = reply->bad_call_text ? reply->bad_call_text : "";

        if (!copy_text(&work->detail, raw, strlen(raw)))
            return false;
        result->detail = work->detail.data;
        result->detail_length = work->detail.length;
    }
    return true;
}

static void
keep_cost(struct schedule *schedule, struct ns_work *work,
          const struct ns_usage *usage)
{
    struct ns_pipeline *pipeline = schedule->pipeline;
    struct ns_result *result = &work->result;
    int64_t now_ms = ns_now_ms();

    result->mode = work->claim.stored_mode;
    result->seed = work->request.seed;
    result->attempts = work->attempt + 1;
    result->prompt_tokens = usage->prompt_tokens;
    result->cached_tokens = usage->cached_tokens;
    result->completion_tokens = usage->completion_tokens;
    if (work->parts) { /* what its nodes read and wrote counts as well */
        result->prompt_tokens += work->parts->prompt_tokens;
        result->cached_tokens += work->parts->cached_tokens;
        result->completion_tokens += work->parts->completion_tokens;
    }
    result->image_tokens = usage->image_tokens;
    result->reasoning_tokens = usage->reasoning_tokens;
    result->blocks = usage->blocks;
    work->spent_passes += usage->passes;
    work->spent_steps += usage->denoise_steps;
    result->passes = work->spent_passes;
    result->denoise_steps = work->spent_steps;
    result->drafted = usage->drafted;
    result->kept = usage->kept;
    if (usage->passes)
        result->tokens_per_pass = (double)usage->new_tokens / usage->passes;
    if (usage->denoise_steps)
        result->tokens_per_denoise_step =
            (double)usage->new_tokens / usage->denoise_steps;
    result->queued_ms = work->submitted_ms - work->received_ms;
    result->run_ms = now_ms - work->submitted_ms;
    result->resumed_across = work->claim.resumed_across;
    /* The block that ends an answer need not have been told of before. */
    if (work->request.mode != NS_MODE_AR && usage->blocks > work->n_blocks)
        atomic_fetch_add(&pipeline->metrics->canvas_blocks,
                         usage->blocks - work->n_blocks);
    ns_metrics_job(pipeline->metrics, result, usage->new_tokens);
}

static void
done(struct schedule *schedule, struct ns_work *work,
     const struct ns_event *event)
{
    const struct ns_pipeline_options *options = &schedule->pipeline->options;
    struct ns_result *result = &work->result;

    *result = (struct ns_result){
        .status = NS_RESULT_OK,
        .finish_reason = finish_name(event->finish),
        .model = options->report_asked_name && work->job->model
                     ? work->job->model
                     : options->model_name,
        .created_s = (int64_t)time(NULL),
    };
    if (event->reply.bad_tool_call) {
        /* An answer whose call can not be read is not a success. */
        result->status = NS_RESULT_FAILED;
        ns_refuse(&result->error, "bad_tool_call", NULL,
                  "the model wrote a tool call that does not parse; its raw "
                  "text stands beside");
    }
    if (!keep_texts(work, &event->reply)) {
        ns_fail(&work->error, NS_RETRY, "out of memory for the answer");
        work->error.code = "out_of_memory";
        leave(schedule, work, NS_ON_TROUBLE);
        return;
    }
    if (work->parts) {
        json_decref(work->part_list);
        work->part_list = ns_summary_parts(work->parts->tree,
                                           work->parts->text);
        result->parts = work->part_list;
    }
    keep_cost(schedule, work, &event->usage);
    result->model_rev = ns_engine_model(schedule->engine)->revision;
    result->engine_rev = ns_engine_revision(schedule->engine);
    leave(schedule, work, NS_ON_DONE);
}

static void
failed(struct schedule *schedule, struct ns_work *work,
       const struct ns_event *event)
{
    const struct ns_reply_text *reply = &event->reply;

    work->error = event->error;
    if (event->error.status == NS_REJECT) {
        ns_work_fail(schedule->pipeline, work, NS_RESULT_FAILED);
        keep_cost(schedule, work, &event->usage);
        /* What there is of an answer that is not whole, for a person. */
        if (reply->content_length > 0 &&
            copy_text(&work->detail, reply->content, reply->content_length)) {
            work->result.detail = work->detail.data;
            work->result.detail_length = work->detail.length;
        }
        leave(schedule, work, NS_ON_UNFIT);
        return;
    }
    if (!work->error.code)
        work->error.code = "engine";
    leave(schedule, work, NS_ON_TROUBLE);
}

/* What ends a job from outside, seen where a block ends. */
static enum ns_job_event
interruption(struct schedule *schedule, struct ns_work *work)
{
    if (atomic_load(&work->fenced))
        return NS_ON_FENCED;
    if (atomic_load(&work->cancel)) {
        ns_refuse(&work->error, "cancelled", NULL, "cancelled on request");
        ns_work_fail(schedule->pipeline, work, NS_RESULT_CANCELLED);
        return NS_ON_CANCELLED;
    }
    if (work->request.deadline_ms &&
        work->request.deadline_ms <=
            ns_unix_now_ms() + work->clock_shift_ms) {
        ns_refuse(&work->error, "expired", "nightshift.deadline",
                  "the deadline passed while the job was run");
        ns_work_fail(schedule->pipeline, work, NS_RESULT_EXPIRED);
        return NS_ON_EXPIRED;
    }
    return NS_N_EVENTS;
}

/* A node is done: its summary is kept, and stored like a block. */
static void
node_done(struct schedule *schedule, struct ns_work *node,
          const struct ns_event *event)
{
    struct ns_pipeline *pipeline = schedule->pipeline;
    struct ns_work *parent = node->parent;
    struct ns_parts *parts = parent->parts;
    struct ns_ids tokens;
    struct ns_event stored;
    enum ns_status status;

    status = ns_parts_take(parts, parts->node[node->node], event->tokens,
                           event->n_tokens, &event->usage, &tokens,
                           &parent->error);
    parent->spent_passes += event->usage.passes;
    parent->spent_steps += event->usage.denoise_steps;
    parts->child[node->node] = NULL;
    remove_running(schedule, node);
    ns_work_destroy(node);
    if (status != NS_OK) {
        ns_ids_fini(&tokens);
        parent->error.code = "out_of_memory";
        leave_parent(schedule, parent, NS_ON_TROUBLE);
        return;
    }
    stored = (struct ns_event){ .block = parent->n_blocks++,
                                .tokens = tokens.id,
                                .n_tokens = (uint32_t)tokens.n };
    ns_work_advance(pipeline, parent, NS_ON_BLOCK);
    if (!parent->no_checkpoints &&
        keep_block(parent, &stored, &parent->error) != NS_OK)
        parent->no_checkpoints = true;
    ns_ids_fini(&tokens);
    if (++parts->n_done == parts->n)
        leave_parent(schedule, parent, NS_ON_DONE);
    else
        send_when_due(schedule, parent);
}

/* What one node can not do, the job can not. */
static void
node_failed(struct schedule *schedule, struct ns_work *node,
            const struct ns_event *event)
{
    struct ns_work *parent = node->parent;

    parent->error = event->error;
    ns_parts_blame(parent->parts, parent->parts->node[node->node],
                   &parent->error);
    if (event->error.status == NS_REJECT) {
        ns_work_fail(schedule->pipeline, parent, NS_RESULT_FAILED);
        leave_parent(schedule, parent, NS_ON_UNFIT);
        return;
    }
    if (!parent->error.code)
        parent->error.code = "engine";
    leave_parent(schedule, parent, NS_ON_TROUBLE);
}

static void
node_event(struct schedule *schedule, struct ns_work *node,
           const struct ns_event *event)
{
    enum ns_job_event end;

    switch (event->kind) {
    case NS_EVENT_BLOCK:
        end = interruption(schedule, node->parent);
        if (end != NS_N_EVENTS)
            leave_parent(schedule, node->parent, end);
        break;
    case NS_EVENT_DONE:
        node_done(schedule, node, event);
        break;
    case NS_EVENT_FAILED:
        node_failed(schedule, node, event);
        break;
    }
}

static void
block(struct schedule *schedule, struct ns_work *work,
      const struct ns_event *event)
{
    struct ns_pipeline *pipeline = schedule->pipeline;
    uint64_t id = work->request.id;
    enum ns_job_event end;
    struct ns_error err;

    if (work->request.mode != NS_MODE_AR)
        atomic_fetch_add(&pipeline->metrics->canvas_blocks, 1);
    work->n_blocks++;
    ns_work_advance(pipeline, work, NS_ON_BLOCK);
    if (work->attempt == 0 && !work->no_checkpoints &&
        keep_block(work, event, &err) != NS_OK) {
        /* The job goes on without: the row of blocks must have no hole. */
        ns_log_warn("checkpoint.lost", "error=\"%s\"", err.text);
        ns_blocks_destroy(work->unsaved);
        work->unsaved = NULL;
        work->no_checkpoints = true;
        return;
    }
    end = interruption(schedule, work);
    if (end != NS_N_EVENTS) {
        ns_engine_cancel(schedule->engine, id);
        leave(schedule, work, end);
        return;
    }
    send_when_due(schedule, work);
}

static void
collect(struct schedule *schedule)
{
    struct ns_event event;
    struct ns_work *work;

    while (ns_engine_next_event(schedule->engine, &event)) {
        work = find_running(schedule, event.id);
        if (!work)
            continue;
        if (work->is_node) {
            node_event(schedule, work, &event);
            continue;
        }
        switch (event.kind) {
        case NS_EVENT_BLOCK:
            block(schedule, work, &event);
            break;
        case NS_EVENT_DONE:
            done(schedule, work, &event);
            break;
        case NS_EVENT_FAILED:
            failed(schedule, work, &event);
            break;
        }
    }
}

/* --- into the engine --------------------------------------------------- */

/* False, and `error` of the job says why: without memory. */
static bool
add_pending(struct schedule *schedule, struct ns_work *work)
{
    struct ns_work *job = work->is_node ? work->parent : work;
    const struct ns_request *request = &work->request;
    struct ns_backlog_key key = {
        .priority = request->priority,
        .arrived_ms = work->received_ms,
        .deadline_ms = request->deadline_ms,
        .group = ns_backlog_group(request->prompt, request->n_prompt),
        .length = request->n_prompt + request->max_tokens,
    };

    if (ns_backlog_push(schedule->pending, &key, work, &job->error) == NS_OK)
        return true;
    job->error.code = "out_of_memory";
    return false;
}

/* A job in parts began with the first of them, not with each of its rounds. */
static void
note_begin(struct ns_work *work)
{
    work->checkpoint_ms = ns_now_ms();
    if (!work->parts || !work->parts->is_begun)
        work->submitted_ms = work->checkpoint_ms;
    if (work->parts)
        work->parts->is_begun = true;
}

/* A round's nodes wait for the engine as jobs do, side by side. */
static void
spread(struct schedule *schedule, struct ns_work *parent)
{
    struct ns_parts *parts = parent->parts;

    note_begin(parent);
    for (uint32_t i = 0; i < parts->n; i++) {
        struct ns_work *node = calloc(1, sizeof(*node));

        if (!node) {
            ns_fail(&parent->error, NS_RETRY, "out of memory for %u parts",
                    parts->n);
            parent->error.code = "out_of_memory";
            leave_parent(schedule, parent, NS_ON_TROUBLE);
            return;
        }
        node->is_node = true;
        node->node = i;
        node->parent = parent;
        node->request = parts->request[i];
        node->received_ms = parent->received_ms;
        node->claim.stalls = parent->claim.stalls;
        parts->child[i] = node;
        if (!add_pending(schedule, node)) {
            parts->child[i] = NULL;
            ns_work_destroy(node);
            leave_parent(schedule, parent, NS_ON_TROUBLE);
            return;
        }
    }
}

static void
take_in(struct schedule *schedule)
{
    bool idle = ns_backlog_length(schedule->pending) == 0 &&
                !schedule->running;
    struct ns_work *work;

    while ((work = ns_queue_pop(schedule->pipeline->to_engine,
                                idle ? -1 : 0)) != NULL) {
        if (has_round(work))
            spread(schedule, work);
        else if (!add_pending(schedule, work))
            ns_work_advance(schedule->pipeline, work, NS_ON_TROUBLE);
        idle = false;
    }
}

/* A stop takes no more in; out of time it lets go of what runs, too. */
static void
let_go(struct schedule *schedule)
{
    struct ns_pipeline *pipeline = schedule->pipeline;
    struct ns_work *work;

    if (!schedule->broken && !ns_pipeline_stopping(pipeline))
        return;
    while ((work = ns_backlog_pop(schedule->pending)) != NULL) {
        struct ns_work *parent = work->parent;

        if (!work->is_node) {
            ns_work_advance(pipeline, work, NS_ON_STOP);
            continue;
        }
        if (parent) {
            parent->parts->child[work->node] = NULL;
            leave_parent(schedule, parent, NS_ON_STOP);
        }
        ns_work_destroy(work);
    }
    while ((schedule->broken || ns_pipeline_out_of_time(pipeline)) &&
           (work = schedule->running) != NULL) {
        if (work->is_node) {
            leave_parent(schedule, work->parent, NS_ON_STOP);
            continue;
        }
        if (!schedule->broken)
            ns_engine_cancel(schedule->engine, work->request.id);
        leave(schedule, work, NS_ON_STOP);
    }
}

/* The job leaves without having come in; a node is gone with it. */
static void
refuse(struct schedule *schedule, struct ns_work *work,
       enum ns_job_event event)
{
    struct ns_work *parent = work->parent;

    if (!work->is_node) {
        ns_work_advance(schedule->pipeline, work, event);
        return;
    }
    parent->parts->child[work->node] = NULL;
    leave_parent(schedule, parent, event);
    ns_work_destroy(work);
}

/* True when the work went somewhere, false when it has to wait. */
static bool
submit(struct schedule *schedule, struct ns_work *work)
{
    struct ns_work *job = work->is_node ? work->parent : work;
    enum ns_job_event end;
    enum ns_status status;

    if (!job) { /* a node whose job has left */
        ns_work_destroy(work);
        return true;
    }
    end = interruption(schedule, job);
    if (end != NS_N_EVENTS) {
        refuse(schedule, work, end);
        return true;
    }
    if (schedule->alone ||
        (work->claim.stalls >= NS_ALONE_FROM && schedule->n_running > 0))
        return false;
    work->request.id = schedule->next_id + 1;
    status = ns_engine_submit(schedule->engine, &work->request, &job->error);
    switch (status) {
    case NS_OK:
        schedule->next_id++;
        schedule->alone = work->claim.stalls >= NS_ALONE_FROM;
        note_begin(work);
        work->n_blocks = work->request.resume_blocks;
        work->next = schedule->running;
        schedule->running = work;
        schedule->n_running++;
        return true;
    case NS_RETRY:
        if (schedule->n_running > 0)
            return false;
        /* Nothing runs that could make room: a bug, or memory. */
        job->error.code = "engine";
        refuse(schedule, work, NS_ON_TROUBLE);
        return true;
    case NS_REJECT:
        ns_work_fail(schedule->pipeline, job, NS_RESULT_FAILED);
        refuse(schedule, work, NS_ON_UNFIT);
        return true;
    default:
        if (!job->error.code)
            job->error.code = "out_of_memory";
        refuse(schedule, work, NS_ON_TROUBLE);
        return true;
    }
}

static void
feed(struct schedule *schedule)
{
    struct ns_work *work;

    while ((work = ns_backlog_first(schedule->pending)) != NULL &&
           submit(schedule, work))
        ns_backlog_pop(schedule->pending);
}

/* --- the pass ---------------------------------------------------------- */

static void
pass(struct schedule *schedule)
{
    struct ns_pipeline *pipeline = schedule->pipeline;
    struct ns_pass_report report = { 0 };
    struct ns_engine_load load;
    struct ns_error err = { 0 };
    enum ns_status status;
    int64_t took_ms, since_ms = ns_now_ms();

    atomic_store(&pipeline->pass_since_ms, since_ms);
    status = ns_engine_pass(schedule->engine, &report, &err);
    atomic_store(&pipeline->pass_since_ms, 0);
    took_ms = ns_now_ms() - since_ms;
    if (took_ms > atomic_load(&pipeline->longest_pass_ms))
        atomic_store(&pipeline->longest_pass_ms, took_ms);
    if (status != NS_OK) {
        ns_log_error("engine.broken", "error=\"%s\"", err.text);
        err.status = NS_FATAL;
        ns_pipeline_fail(pipeline, &err);
        schedule->broken = true;
        return;
    }
    ns_log_debug("pass.ran", "rows=%u canvases=%u us=%" PRIu64
                 " predicted_us=%" PRIu64 " plan_us=%" PRIu64, report.n_rows,
                 report.n_canvases, report.ns / 1000,
                 report.predicted_ns / 1000, report.plan_ns / 1000);
    load = ns_engine_load(schedule->engine);
    ns_metrics_pass(pipeline->metrics, &report, &load,
                    ns_engine_memory(schedule->engine));
    collect(schedule);
    if (report.n_rows == 0 && schedule->running) {
        /* The planner promises to have something for whoever is admitted. */
        ns_fail(&err, NS_FATAL, "the engine holds %u jobs and runs none",
                schedule->n_running);
        ns_pipeline_fail(pipeline, &err);
        schedule->broken = true;
    }
}

static void
tell_load(struct schedule *schedule)
{
    struct ns_board *board = schedule->pipeline->options.board;
    uint32_t n = 0;

    if (!schedule->broken)
        n = ns_engine_load(schedule->engine).running;
    atomic_store(&schedule->pipeline->metrics->running, n);
    if (board && n > 0)
        ns_board_put(board, schedule->engine);
    else if (board)
        ns_board_clear(board);
}

void *
ns_schedule_thread(void *data)
{
    struct ns_pipeline *pipeline = data;
    struct schedule schedule = { .pipeline = pipeline,
                                 .engine = pipeline->options.engine,
                                 .pending = pipeline->pending };
    struct ns_engine_load load = ns_engine_load(schedule.engine);

    /* A report of nothing: the size of the pools is known before a pass. */
    ns_metrics_pass(pipeline->metrics, &(struct ns_pass_report){ 0 }, &load,
                    ns_engine_memory(schedule.engine));
    for (;;) {
        take_in(&schedule);
        if (ns_backlog_length(schedule.pending) == 0 && !schedule.running)
            return NULL; /* only a closed queue lets an idle thread go */
        let_go(&schedule);
        if (!schedule.broken)
            feed(&schedule);
        if (schedule.running && !schedule.broken)
            pass(&schedule);
        tell_load(&schedule);
    }
}
