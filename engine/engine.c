#include "engine/engine_private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/request.h"

enum { PASSES_TO_TRUST = 8 }; /* before a prediction is one */

static int64_t
now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static uint64_t
now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- admission of requests -------------------------------------------- */

/* What is left to ask once the model allows the request: do the pools? */
static enum ns_status
check_pages(const struct ns_engine *engine, const struct ns_request *request,
            struct ns_error *err)
{
    const struct ns_config *config = &engine->model->config;
    uint32_t length = request->canvas_length ? request->canvas_length
                                             : config->canvas_length;
    uint32_t positions = request->n_prompt + request->max_tokens + length;
    uint32_t full, sliding, largest = 0;
    struct ns_kv_counts counts;

    for (uint32_t i = 0; i < request->n_images; i++)
        if (request->images[i].image->size.n_tokens > largest)
            largest = request->images[i].image->size.n_tokens;
    if (positions > config->max_position)
        positions = config->max_position;
    if (ns_kvcache_fits(engine->kv, positions, largest, &full, &sliding))
        return NS_OK;
    counts = ns_kvcache_counts(engine->kv);
    return ns_refuse(err, "over_memory", "body.max_tokens",
                     "prompt and answer may take %u positions: %u pages of "
                     "full layers (there are %u), %u of sliding layers (there "
                     "are %u)", positions, full, counts.full_pages, sliding,
                     counts.sliding_pages);
}

enum ns_status
ns_engine_check(const struct ns_engine *engine,
                const struct ns_request *request, struct ns_error *err)
{
    enum ns_status status =
        ns_request_check(engine->model, engine->rules.n_thought_end > 0,
                         request, err);

    return status == NS_OK ? check_pages(engine, request, err) : status;
}

static void
forget_events(struct ns_engine *engine)
{
    ns_engine_drop_all(engine, &engine->over);
    engine->n_events = engine->next_event = 0;
}

static void
list_add(struct ns_sequence_list *list, struct ns_sequence *seq)
{
    list->item[list->n++] = seq;
}

static void
list_remove(struct ns_sequence_list *list, uint32_t index)
{
    memmove(&list->item[index], &list->item[index + 1],
            (list->n - index - 1) * sizeof(struct ns_sequence *));
    list->n--;
}

/* Declares the prompt to the cache. Where placeholders stand, what tells
 * prompts apart is the picture: words of its digest, one after the other, kept
 * apart from tokens by their sign. A group has more than the eight that a
 * digest has, and is shared whole. */
static enum ns_status
declare(struct ns_engine *engine, struct ns_sequence *seq,
        struct ns_error *err)
{
    const struct ns_request *request = &seq->request;
    const int32_t *ids = request->prompt;
    int32_t *key = NULL;
    enum ns_status status;

    if (request->n_images > 0) {
        key = malloc(request->n_prompt * sizeof(*key));
        if (!key)
            return ns_fail(err, NS_FATAL, "out of memory for a prompt's keys");
        memcpy(key, ids, request->n_prompt * sizeof(*key));
        ids = key;
    }
    for (uint32_t i = 0; i < request->n_images; i++)
        for (uint32_t at = seq->whole[i].first; at < seq->whole[i].end; at++) {
            uint32_t word = (at - seq->whole[i].first) % 8, bits;

            memcpy(&bits, request->images[i].image->digest + 4 * word, 4);
            key[at] = (int32_t)(bits | 0x80000000u);
        }
    status = ns_kvcache_declare(engine->kv, ids, request->n_prompt, seq->whole,
                                request->n_images, &seq->hold, err);
    free(key);
    return status;
}

enum ns_status
ns_engine_submit(struct ns_engine *engine, const struct ns_request *request,
                 struct ns_error *err)
{
    struct ns_request copy = *request;
    struct ns_sequence *seq = NULL;
    enum ns_status status = ns_engine_check(engine, request, err);

    if (status != NS_OK)
        return status;
    if (engine->waiting.n >=
        engine->options.max_sequences * NS_WAITING_PER_RUNNING)
        return ns_fail(err, NS_RETRY, "%u requests wait already",
                       engine->waiting.n);
    if (copy.canvas_length == 0)
        copy.canvas_length = engine->model->config.canvas_length;
    status = ns_sequence_create(&copy, &engine->rules, &seq, err);
    if (status != NS_OK)
        return status;
    status = declare(engine, seq, err);
    if (status != NS_OK) {
        ns_sequence_destroy(seq);
        return status;
    }
    seq->rank.number = engine->n_submitted++;
    seq->submitted_ms = now_ms();
    list_add(&engine->waiting, seq);
    return NS_OK;
}

/* One that runs may have an event that is still to be read: it is kept until
 * the next pass. One that waits has none. */
void
ns_engine_cancel(struct ns_engine *engine, uint64_t id)
{
    struct ns_sequence_list *lists[] = { &engine->waiting, &engine->running };

    for (int l = 0; l < 2; l++)
        for (uint32_t i = 0; i < lists[l]->n; i++) {
            struct ns_sequence *seq = lists[l]->item[i];

            if (seq->request.id != id)
                continue;
            list_remove(lists[l], i);
            ns_kvcache_drop(engine->kv, seq->hold);
            seq->hold = NULL;
            if (seq->running)
                list_add(&engine->over, seq);
            else
                ns_sequence_destroy(seq);
            return;
        }
}

/* ---- events ------------------------------------------------------------ */

bool
ns_engine_next_event(struct ns_engine *engine, struct ns_event *out)
{
    if (engine->next_event == engine->n_events)
        return false;
    *out = engine->events[engine->next_event++];
    return true;
}

static struct ns_event *
add_event(struct ns_engine *engine, enum ns_event_kind kind,
          struct ns_sequence *seq)
{
    struct ns_event *event = &engine->events[engine->n_events++];

    *event = (struct ns_event){ .kind = kind, .id = seq->request.id };
    seq->usage.completion_tokens = ns_sequence_n_answer(seq) +
                                   (seq->ended ? 1 : 0);
    seq->usage.reasoning_tokens = ns_reply_thought_tokens(seq->reply);
    event->usage = seq->usage;
    return event;
}

/* Reports the block that has joined what is known. */
static void
report_block(struct ns_engine *engine, struct ns_sequence *seq)
{
    struct ns_event *event;

    seq->usage.blocks++;
    event = add_event(engine, NS_EVENT_BLOCK, seq);
    event->block = seq->next_block++;
    event->tokens = seq->known + seq->block_start;
    event->n_tokens = seq->n_known - seq->block_start;
    seq->block_start = seq->n_known;
}

/* What it took, for those of its kind to come. */
static void
learn_job(struct ns_engine *engine, const struct ns_sequence *seq)
{
    const struct ns_usage *usage = &seq->usage;
    struct ns_yield yield = { .answer = usage->new_tokens,
                              .steps = usage->denoise_steps };

    /* The figures of its last part alone; or of one that had a start. */
    if (seq->request.n_resume > 0 || seq->request.n_draft > 0)
        return;
    if (seq->request.mode == NS_MODE_DIFFUSION)
        yield.canvases = usage->blocks;
    else if (seq->request.mode == NS_MODE_HYBRID)
        yield.canvases = usage->drafted / seq->request.canvas_length;
    ns_outlook_learn_job(engine->outlook, seq->request.job_class,
                         seq->request.mode, &yield);
}

static void
report_done(struct ns_engine *engine, struct ns_sequence *seq)
{
    struct ns_error err;
    struct ns_event *event;
    enum ns_status status;

    if (seq->ended || seq->n_known > seq->block_start)
        seq->usage.blocks++;
    learn_job(engine, seq);
    event = add_event(engine, NS_EVENT_DONE, seq);
    event->tokens = ns_sequence_answer(seq);
    event->n_tokens = ns_sequence_n_answer(seq);
    event->finish = seq->finish;
    status = ns_reply_finish(seq->reply, &event->reply, &err);
    if (status == NS_OK)
        status = ns_sequence_check_content(seq, &event->reply, &err);
    if (status != NS_OK) {
        event->kind = NS_EVENT_FAILED;
        event->error = err;
    } else if (event->reply.stopped) {
        event->finish = NS_FINISH_STOP;
    }
}

static void
report_failed(struct ns_engine *engine, struct ns_sequence *seq,
              const struct ns_error *err)
{
    add_event(engine, NS_EVENT_FAILED, seq)->error = *err;
    seq->finished = true;
}

/* ---- a pass ------------------------------------------------------------ */

static uint32_t
age_step_ms(const struct ns_engine *engine)
{
    return engine->options.age_step_s * 1000;
}

/* Insertion sort by rank: lists are short and stay nearly in order. */
static void
sort_by_rank(struct ns_engine *engine, struct ns_sequence_list *list)
{
    int64_t now = now_ms();

    for (uint32_t i = 0; i < list->n; i++)
        list->item[i]->rank.waited_ms = now - list->item[i]->submitted_ms;
    for (uint32_t i = 1; i < list->n; i++) {
        struct ns_sequence *held = list->item[i];
        uint32_t j = i;

        for (; j > 0 && ns_rank_compare(&list->item[j - 1]->rank, &held->rank,
                                        age_step_ms(engine)) > 0; j--)
            list->item[j] = list->item[j - 1];
        list->item[j] = held;
    }
}

static uint32_t
reservation(const struct ns_engine *engine, const struct ns_sequence *seq)
{
    uint64_t worst = (uint64_t)seq->request.n_prompt +
                     seq->request.max_tokens + seq->request.canvas_length;
    uint64_t reserve = (uint64_t)seq->n_known +
                       engine->options.reserve_tokens;

    if (worst > engine->model->config.max_position)
        worst = engine->model->config.max_position;
    return (uint32_t)(reserve < worst ? reserve : worst);
}

/* Whether those that run fill a pass already, but for what `next` presses out
 * of it. More of them would not make it faster, but take pages that shared
 * prefixes are kept in. */
static bool
sated(const struct ns_engine *engine, const struct ns_sequence *next)
{
    uint64_t rows = 0;

    for (uint32_t i = 0; i < engine->running.n; i++) {
        const struct ns_sequence *seq = engine->running.item[i];

        if (ns_rank_presses(&next->rank, &seq->rank, age_step_ms(engine)))
            continue;
        rows += seq->n_known - seq->n_cached;
        if (!ns_sequence_is_ar(seq))
            rows += seq->request.canvas_length;
    }
    return rows >= engine->options.pass_tokens;
}

static void
admit_waiting(struct ns_engine *engine)
{
    sort_by_rank(engine, &engine->waiting);
    for (uint32_t i = 0; i < engine->waiting.n;) {
        struct ns_sequence *seq = engine->waiting.item[i];
        enum ns_admission how;
        uint32_t cached;

        if (sated(engine, seq))
            return; /* and so for those behind it */
        how = ns_kvcache_admit(engine->kv, seq->hold,
                               reservation(engine, seq), &cached);
        if (how == NS_ADMIT_LATER)
            return; /* none may overtake: the large would starve */
        if (how == NS_ADMIT_SHARED) {
            i++; /* its turn comes when the prefix is there */
            continue;
        }
        seq->n_cached = cached;
        if (cached > seq->usage.cached_tokens)
            seq->usage.cached_tokens = cached;
        seq->running = true;
        list_remove(&engine->waiting, i);
        list_add(&engine->running, seq);
    }
}

static void
put_back(struct ns_engine *engine, uint32_t index)
{
    struct ns_sequence *seq = engine->running.item[index];

    list_remove(&engine->running, index);
    ns_kvcache_release(engine->kv, seq->hold);
    ns_sequence_put_back(seq);
    list_add(&engine->waiting, seq);
    engine->n_put_back++;
}

/* Makes pages for what was granted; when there are none, someone yields and
 * the pass is planned anew. */
static bool
make_pages(struct ns_engine *engine)
{
    for (uint32_t i = 0; i < engine->running.n; i++) {
        struct ns_sequence *seq = engine->running.item[i];
        uint32_t victim;

        if (engine->grant[i].n_encode == 0 ||
            ns_kvcache_extend(engine->kv, seq->hold,
                              seq->n_cached + engine->grant[i].n_encode))
            continue;
        for (uint32_t j = 0; j < engine->running.n; j++)
            engine->rank[j] = engine->running.item[j]->rank;
        victim = ns_planner_victim(engine->rank, engine->running.n);
        if (victim < engine->running.n)
            put_back(engine, victim);
        return false;
    }
    return true;
}

static void
add_canvas(struct ns_engine *engine, struct ns_sequence *seq, uint32_t owner)
{
    struct ns_batch_segment segment = {
        .kind = NS_SEGMENT_CANVAS,
        .slot = ns_kvcache_slot(seq->hold),
        .position = seq->n_known,
        .n_tokens = seq->canvas.length,
        .tokens = seq->canvas.token,
        .soft_in = seq->canvas.n_steps > 0,
        .soft_out = seq->canvas.n_left > 1,
        .head = NS_HEAD_ALL,
        .inv_temperature = ns_canvas_prepare(&seq->canvas, &seq->denoise),
        .top_p = 1.0f,
        .uniform = seq->canvas.uniform,
        .top = seq->top,
        .owner = owner,
    };

    ns_batch_add(engine->batch, &segment);
}

static float
ar_inv_temperature(const struct ns_request *request)
{
    return request->has_temperature && request->temperature > 0
               ? 1.0f / request->temperature
               : 1.0f;
}

static void
add_encode(struct ns_engine *engine, struct ns_sequence *seq, uint32_t owner,
           const struct ns_want *want, uint32_t n)
{
    uint32_t at = ns_sequence_n_answer(seq);
    bool whole = n == want->n_encode;
    struct ns_batch_segment segment = {
        .kind = want->prefill ? NS_SEGMENT_PREFILL
                : n == 1      ? NS_SEGMENT_AR
                              : NS_SEGMENT_COMMIT,
        .slot = ns_kvcache_slot(seq->hold),
        .position = seq->n_cached,
        .n_tokens = n,
        .tokens = seq->drafted ? seq->canvas.argmax
                               : seq->known + seq->n_cached,
        .group = seq->group,
        .n_groups = want->prefill ? seq->request.n_images : 0,
        .inv_temperature = ar_inv_temperature(&seq->request),
        .top_p = seq->request.top_p,
        .uniform = seq->uniform,
        .owner = owner,
    };

    if (seq->drafted) {
        segment.head = NS_HEAD_ALL;
        segment.mask = ns_sequence_masks(seq);
        segment.n_tokens = seq->canvas.length;
        for (uint32_t i = 0; i < segment.n_tokens; i++)
            seq->uniform[i] = ns_sequence_ar_uniform(seq, at + 1 + i);
    } else if ((seq->request.mode != NS_MODE_DIFFUSION || seq->tail) &&
               whole) {
        segment.head = NS_HEAD_LAST;
        segment.mask = ns_sequence_masks(seq);
        seq->uniform[0] = ns_sequence_ar_uniform(seq, at);
    }
    ns_batch_add(engine->batch, &segment);
}

/* Calls for the soft tokens of all pictures that the granted chunks hold, in
 * one go. `take`: the second round, which hands them out. */
static uint32_t
list_images(struct ns_engine *engine, bool take)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < engine->running.n; i++) {
        struct ns_sequence *seq = engine->running.item[i];
        uint32_t end = seq->n_cached + engine->grant[i].n_encode;

        for (uint32_t g = 0; g < seq->request.n_images; g++) {
            struct ns_batch_group *group = &seq->group[g];

            if (!take)
                group->soft = NULL;
            if (group->first < seq->n_cached || group->end > end)
                continue;
            if (take)
                group->soft = engine->image_soft[n];
            else
                engine->image[n] = seq->request.images[g].image;
            n++;
        }
    }
    return n;
}

static enum ns_status
encode_images(struct ns_engine *engine, struct ns_error *err)
{
    enum ns_status status;
    uint32_t n;

    if (!engine->vision)
        return NS_OK;
    n = list_images(engine, false);
    if (n == 0)
        return NS_OK;
    status = ns_vision_encode(engine->vision, engine->image, n,
                              engine->image_soft, err);
    if (status == NS_OK)
        list_images(engine, true);
    return status;
}

static void
build_batch(struct ns_engine *engine, struct ns_pass_report *report)
{
    ns_batch_reset(engine->batch);
    ns_constraints_begin_pass(engine->rules.constraints);
    for (uint32_t i = 0; i < engine->running.n; i++) {
        struct ns_sequence *seq = engine->running.item[i];
        const struct ns_grant *grant = &engine->grant[i];
        bool counts = grant->canvas;

        if (grant->canvas) {
            add_canvas(engine, seq, i);
            report->n_canvases++;
            report->canvas_rows += seq->canvas.length;
        }
        if (grant->n_encode > 0) {
            const struct ns_want *want = &engine->want[i];

            add_encode(engine, seq, i, want, grant->n_encode);
            if (want->prefill)
                report->prefill_rows += grant->n_encode;
            else if (grant->n_encode == 1)
                report->ar_rows++;
            else
                report->commit_rows += grant->n_encode;
            counts = counts || !want->prefill;
        }
        if (counts)
            seq->usage.passes++;
    }
    report->n_rows = engine->batch->n_rows;
    report->n_segments = engine->batch->n_segments;
    ns_batch_lay_out(engine->batch, ns_kvcache_table(engine->kv, true),
                     ns_kvcache_table(engine->kv, false),
                     ns_kvcache_table_stride(engine->kv));
}

static void
choose(struct ns_engine *engine, struct ns_sequence *seq,
       const int32_t *choice)
{
    if (engine->trace && engine->trace->chosen)
        engine->trace->chosen(engine->trace->ctx, seq->request.id,
                              ns_sequence_n_answer(seq), choice[0]);
    ns_sequence_choose(seq, choice[0]);
}

static void
after_encode(struct ns_engine *engine, struct ns_sequence *seq,
             const struct ns_batch_segment *segment)
{
    const struct ns_batch *batch = engine->batch;

    for (uint32_t i = 0; segment->head != NS_HEAD_NONE &&
                         i < (segment->head == NS_HEAD_ALL
                                  ? segment->n_tokens : 1); i++)
        if (!isfinite(batch->entropy[segment->head0 + i])) {
            struct ns_error err;

            ns_fail(&err, NS_RETRY, "logits are not numbers at position %u",
                    segment->position);
            err.code = "nan_logits";
            report_failed(engine, seq, &err);
            return;
        }
    if (seq->drafted) {
        if (engine->trace && engine->trace->judged)
            engine->trace->judged(engine->trace->ctx, seq->request.id,
                                  batch->sampled + segment->head0,
                                  segment->n_tokens);
        ns_sequence_judge(seq, batch->sampled + segment->head0);
    } else {
        seq->n_cached += segment->n_tokens;
        if (segment->head == NS_HEAD_LAST)
            choose(engine, seq, batch->sampled + segment->head0);
    }
    if (!seq->finished)
        ns_kvcache_settle(engine->kv, seq->hold, seq->n_cached);
}

static void
after_canvas(struct ns_engine *engine, struct ns_sequence *seq,
             const struct ns_batch_segment *segment)
{
    const struct ns_batch *batch = engine->batch;
    const struct ns_trace *trace = engine->trace;
    int32_t *argmax = batch->argmax + segment->head0;
    int32_t *sampled = batch->sampled + segment->head0;
    float *entropy = batch->entropy + segment->head0;
    struct ns_error err = { .status = NS_OK };
    bool done;

    if (trace && trace->sampled)
        trace->sampled(trace->ctx, seq->request.id, &seq->canvas, argmax,
                       sampled, entropy);
    ns_sequence_keep_to_grammar(seq, argmax, sampled);
    done = ns_canvas_step(&seq->canvas, &seq->denoise, argmax, sampled,
                          entropy, &err);
    if (err.status != NS_OK) {
        report_failed(engine, seq, &err);
        return;
    }
    seq->usage.denoise_steps++;
    if (trace && trace->stepped)
        trace->stepped(trace->ctx, seq->request.id, &seq->canvas, done);
    if (done)
        ns_sequence_canvas_done(seq);
}

/* Encoded runs first: the choice for a canvas's first token comes from them. */
static void
collect(struct ns_engine *engine)
{
    struct ns_batch *batch = engine->batch;

    for (uint32_t s = 0; s < batch->n_segments; s++) {
        const struct ns_batch_segment *segment = &batch->segment[s];
        struct ns_sequence *seq = engine->running.item[segment->owner];

        if (segment->kind != NS_SEGMENT_CANVAS)
            after_encode(engine, seq, segment);
    }
    for (uint32_t s = 0; s < batch->n_segments; s++) {
        const struct ns_batch_segment *segment = &batch->segment[s];
        struct ns_sequence *seq = engine->running.item[segment->owner];

        if (segment->kind == NS_SEGMENT_CANVAS && !seq->finished)
            after_canvas(engine, seq, segment);
    }
}

static bool
failed(const struct ns_engine *engine, const struct ns_sequence *seq)
{
    for (uint32_t i = 0; i < engine->n_events; i++)
        if (engine->events[i].id == seq->request.id &&
            engine->events[i].kind == NS_EVENT_FAILED)
            return true;
    return false;
}

/* Reports blocks and completions; those that are over leave. */
static void
report_progress(struct ns_engine *engine)
{
    for (uint32_t i = 0; i < engine->running.n;) {
        struct ns_sequence *seq = engine->running.item[i];
        uint32_t unreported = seq->n_known - seq->block_start;
        bool drawn = seq->request.mode != NS_MODE_DIFFUSION || seq->tail;
        struct ns_error err;

        if (seq->guide && !failed(engine, seq) &&
            ns_guide_check(seq->guide, &err) != NS_OK)
            report_failed(engine, seq, &err);
        if (!seq->finished) {
            if (unreported >= (drawn ? seq->request.canvas_length : 1))
                report_block(engine, seq);
            i++;
            continue;
        }
        if (!failed(engine, seq))
            report_done(engine, seq);
        ns_kvcache_drop(engine->kv, seq->hold);
        seq->hold = NULL;
        list_remove(&engine->running, i);
        list_add(&engine->over, seq);
    }
}

static void
set_levels(struct ns_engine *engine)
{
    struct ns_sequence *const *item = engine->running.item;
    uint32_t level = 0;

    for (uint32_t i = 0; i < engine->running.n; i++) {
        if (i > 0 && ns_rank_presses(&item[i - 1]->rank, &item[i]->rank,
                                     age_step_ms(engine)))
            level++;
        engine->want[i].level = level;
    }
}

static void
plan(struct ns_engine *engine)
{
    uint32_t n;

    do {
        n = engine->running.n;
        sort_by_rank(engine, &engine->running);
        for (uint32_t i = 0; i < n; i++)
            engine->want[i] = ns_sequence_want(engine->running.item[i]);
        set_levels(engine);
        ns_planner_fill(engine->want, n, engine->options.pass_tokens,
                        engine->batch->max_segments, engine->grant);
    } while (!make_pages(engine) && engine->running.n < n);
}

enum ns_status
ns_engine_pass(struct ns_engine *engine, struct ns_pass_report *report,
               struct ns_error *err)
{
    uint64_t start = now_ns();
    struct ns_cost_load load = { 0 };
    enum ns_status status;
    uint32_t before = 0, after = 0;

    memset(report, 0, sizeof(*report));
    forget_events(engine);
    admit_waiting(engine);
    if (engine->running.n == 0)
        return NS_OK;
    plan(engine);
    status = encode_images(engine, err);
    if (status != NS_OK)
        return status;
    build_batch(engine, report);
    ns_cost_add_batch(&ns_outlook_options(engine->outlook)->shape, &load,
                      engine->batch);
    if (engine->n_learnt >= PASSES_TO_TRUST)
        report->predicted_ns =
            (uint64_t)(1e9 * ns_outlook_seconds(engine->outlook, &load));
    report->plan_ns = now_ns() - start;
    status = ns_forward(engine->fw, engine->batch, err);
    if (status != NS_OK)
        return status;
    for (uint32_t i = 0; i < engine->running.n; i++)
        before += engine->running.item[i]->usage.new_tokens;
    collect(engine);
    for (uint32_t i = 0; i < engine->running.n; i++)
        after += engine->running.item[i]->usage.new_tokens;
    report_progress(engine);
    report->new_tokens = after - before;
    report->ns = now_ns() - start;
    if (engine->batch->n_images == 0) { /* the tower is not priced */
        ns_outlook_learn_pass(engine->outlook, &load,
                              1e-9 * (double)report->ns);
        engine->n_learnt++;
    }
    return NS_OK;
}

struct ns_engine_load
ns_engine_load(const struct ns_engine *engine)
{
    struct ns_kv_counts counts = ns_kvcache_counts(engine->kv);
    struct ns_engine_load load = {
        .running = engine->running.n,
        .waiting = engine->waiting.n,
        .pass_tokens = engine->options.pass_tokens,
        .age_step_ms = age_step_ms(engine),
        .full_pages_free = counts.full_free,
        .sliding_pages_free = counts.sliding_free,
        .put_back = engine->n_put_back,
    };

    if (engine->vision) {
        load.images_asked = ns_vision_counts(engine->vision).n_asked;
        load.images_encoded = ns_vision_counts(engine->vision).n_encoded;
    }
    return load;
}

uint32_t
ns_engine_progress(const struct ns_engine *engine, struct ns_engine_progress *out,
                   uint32_t n)
{
    if (n > engine->running.n)
        n = engine->running.n;
    for (uint32_t i = 0; i < n; i++)
        out[i] = ns_sequence_progress(engine->running.item[i]);
    return n;
}
