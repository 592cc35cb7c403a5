#include "daemon/prepare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/form.h"
#include "daemon/judge.h"
#include "daemon/parts.h"
#include "engine/prompt.h"
#include "engine/outlook.h"
#include "engine/request.h"
#include "engine/rng.h"

/* A job is bounded by its message; this only bounds what a prompt made of it
 * may grow to, well above any context, so that a refusal can name the count. */
enum { PROMPT_BYTES = 64 << 20, PROMPT_TOKENS = 16 << 20 };

enum { FETCH_TRIES = 3 };

/* Errors of the engine name fields of the conversation; results, of the line. */
static void
name_in_body(struct ns_error *err)
{
    char param[sizeof(err->param)];

    if (strncmp(err->param, "messages", 8) != 0 &&
        strncmp(err->param, "tools", 5) != 0)
        return;
    memcpy(param, err->param, sizeof(param));
    snprintf(err->param, sizeof(err->param), "body.%s", param);
}

enum ns_status
ns_prepare_tokens(const struct ns_job *job,
                  const struct ns_tokenizer *tokenizer, bool empty_thought,
                  const struct ns_pictures *pictures, struct ns_ids *out, bool *in_thought, struct ns_error *err)
{
    const struct ns_prompt_options options = {
        .thinking = job->thinking,
        .generation_prompt = true,
        .empty_thought = empty_thought,
    };
    struct ns_prompt prompt = { 0 };
    uint32_t image_tokens[NS_JOB_IMAGES] = { 0 };
    uint32_t n_images = pictures ? pictures->n : 0;
    /* A copy: the job's own stays as it came, for another try. */
    json_t *messages = json_deep_copy(job->messages);
    enum ns_status status;

    *out = (struct ns_ids){ .limit = PROMPT_TOKENS };
    *in_thought = false;
    if (!messages)
        return ns_fail(err, NS_FATAL, "out of memory for the messages");
    status = ns_prompt_open_arguments(messages, err);
    if (status == NS_OK)
        status = ns_prompt_render(messages, job->tools, &options,
                                  PROMPT_BYTES, &prompt, err);
    if (status == NS_OK && prompt.n_images != n_images)
        status = ns_refuse(err, "unsupported", "body.messages",
                           "%u images in the prompt, and %u can be read",
                           prompt.n_images, n_images);
    for (uint32_t i = 0; i < n_images; i++)
        image_tokens[i] = pictures->image[i].size.n_tokens;
    if (status == NS_OK)
        status = ns_prompt_encode(&prompt, tokenizer,
                                  pictures ? &pictures->ids : NULL,
                                  image_tokens, out, err);
    if (status == NS_OK)
        *in_thought = prompt.in_thought;
    else
        name_in_body(err);
    ns_prompt_fini(&prompt);
    json_decref(messages);
    return status;
}

enum ns_status
ns_prepare_draft(const struct ns_job *job,
                 const struct ns_tokenizer *tokenizer, struct ns_ids *out,
                 struct ns_error *err)
{
    const struct ns_span span = { job->draft, job->draft_length, false };

    memset(out, 0, sizeof(*out));
    out->limit = PROMPT_TOKENS;
    return job->draft ? ns_tokenizer_encode(tokenizer, &span, 1, out, err)
                      : NS_OK;
}

static enum ns_status
max_tokens_of(const struct ns_job *job, const struct ns_config *config,
              enum ns_mode mode, uint32_t n_prompt, uint32_t fallback,
              uint32_t *out, struct ns_error *err)
{
    uint32_t room = ns_request_max_tokens(config, n_prompt, mode,
                                          job->canvas_length);

    if (room == 0)
        return ns_refuse(err, "over_context", "body.messages",
                         "the prompt is %u tokens; the context of %u leaves "
                         "no room for a canvas of %u",
                         n_prompt, config->max_position,
                         job->canvas_length ? job->canvas_length
                                            : config->canvas_length);
    if (job->has_max_tokens && job->max_tokens > room)
        return ns_refuse(err, "over_context", "body.max_tokens",
                         "max_tokens is %u; behind a prompt of %u tokens the "
                         "context of %u leaves %u",
                         job->max_tokens, n_prompt, config->max_position,
                         room);
    *out = job->has_max_tokens ? job->max_tokens
           : fallback < room  ? fallback
                              : room;
    return NS_OK;
}

static struct ns_sampler_options
sampler_of(const struct ns_job *job, const struct ns_generation *generation)
{
    return (struct ns_sampler_options){
        .t_min = job->has_t_min ? (float)job->t_min : generation->t_min,
        .t_max = job->has_t_max ? (float)job->t_max : generation->t_max,
        .entropy_bound = job->has_entropy_bound ? (float)job->entropy_bound
                                                : generation->entropy_bound,
        .max_denoising_steps = job->max_denoising_steps
                                   ? job->max_denoising_steps
                                   : generation->max_denoising_steps,
        .stability_threshold = job->has_stability_threshold
                                   ? job->stability_threshold
                                   : generation->stability_threshold,
        .confidence_threshold = job->has_confidence_threshold
                                    ? (float)job->confidence_threshold
                                    : generation->confidence_threshold,
    };
}

static enum ns_mode
engine_mode(enum ns_job_mode mode)
{
    switch (mode) {
    case NS_JOB_DIFFUSION:
        return NS_MODE_DIFFUSION;
    case NS_JOB_AR:
        return NS_MODE_AR;
    case NS_JOB_HYBRID:
        return NS_MODE_HYBRID;
    case NS_JOB_AUTO:
        break;
    }
    return NS_MODE_AUTO;
}

static enum ns_job_mode
job_mode(enum ns_mode mode)
{
    switch (mode) {
    case NS_MODE_DIFFUSION:
        return NS_JOB_DIFFUSION;
    case NS_MODE_AR:
        return NS_JOB_AR;
    case NS_MODE_HYBRID:
        return NS_JOB_HYBRID;
    case NS_MODE_AUTO:
        break;
    }
    return NS_JOB_AUTO;
}

/* Where the placeholders of each picture begin. Only slots of the template
 * become placeholders, so they are in the order of the pictures. */
static void
place_pictures(const struct ns_ids *prompt, const struct ns_pictures *pictures,
               struct ns_request_image *images)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < pictures->n; i++) {
        while (at < prompt->n &&
               prompt->id[at] != pictures->ids.placeholder)
            at++;
        images[i] = (struct ns_request_image){ at, &pictures->image[i] };
        at += pictures->image[i].size.n_tokens;
    }
}

enum ns_status
ns_prepare_mode(const struct ns_job *job, const struct ns_model *model,
                enum ns_job_mode fallback, enum ns_mode *out,
                struct ns_error *err)
{
    enum ns_job_mode asked = job->mode == NS_JOB_AUTO ? fallback : job->mode;

    return ns_request_resolve_mode(model, engine_mode(asked),
                                   job->task == NS_JOB_TASK_CODE,
                                   job->thinking, out, err);
}

static enum ns_job_class
class_of(const struct ns_job *job, const struct ns_pictures *pictures)
{
    if (pictures->n > 0)
        return NS_CLASS_PICTURE;
    switch (job->task) {
    case NS_JOB_TASK_CODE:
        return NS_CLASS_CODE;
    case NS_JOB_TASK_SUMMARIZE:
        return NS_CLASS_SUMMARY;
    case NS_JOB_TASK_NONE:
        break;
    }
    return NS_CLASS_OTHER;
}

enum ns_status
ns_prepare_request(const struct ns_job *job, const struct ns_model *model,
                   enum ns_mode mode, const struct ns_ids *prompt,
                   bool in_thought, const struct ns_pictures *pictures,
                   struct ns_request_image *images,
                   uint32_t default_max_tokens, struct ns_request *out,
                   struct ns_error *err)
{
    if (prompt->n > UINT32_MAX)
        return ns_refuse(err, "over_context", "body.messages",
                         "the prompt is %zu tokens", prompt->n);
    place_pictures(prompt, pictures, images);
    *out = (struct ns_request){
        .prompt = prompt->id,
        .n_prompt = (uint32_t)prompt->n,
        .images = images,
        .n_images = pictures->n,
        .mode = mode,
        .job_class = class_of(job, pictures),
        .canvas_length = job->canvas_length,
        .has_temperature = job->has_temperature,
        .temperature = (float)job->temperature,
        .top_p = job->has_top_p ? (float)job->top_p : 1.0f,
        .thinking = job->thinking,
        .in_thought = in_thought,
        .thinking_budget = job->thinking ? job->thinking_budget : 0,
        .sampler = sampler_of(job, &model->generation),
        .stop = job->stop,
        .n_stop = job->n_stop,
        .priority = job->priority,
        .deadline_ms = job->has_deadline ? job->deadline_ms : 0,
    };
    return max_tokens_of(job, &model->config, mode, out->n_prompt,
                         default_max_tokens, &out->max_tokens, err);
}

/* A mode that the job and the model alone do not give was chosen by cost, by
 * whoever claimed it first: equal jobs may then differ in their bytes. */
static void
tell_choice(struct ns_pipeline *pipeline, struct ns_work *work)
{
    enum ns_job_mode fallback = ns_pipeline_tuning(pipeline).mode;
    enum ns_mode fixed, stored = engine_mode(work->claim.stored_mode);
    struct ns_error err;

    if (fallback == NS_JOB_AUTO &&
        ns_prepare_mode(work->job, ns_engine_model(pipeline->options.engine),
                        fallback, &fixed, &err) == NS_OK &&
        fixed != stored)
        ns_job_warn(work->job, "mode: %s, chosen for throughput in the place "
                    "of %s", ns_request_mode_name(stored),
                    ns_request_mode_name(fixed));
}

/* Goes on behind the claim's blocks. Where they are not this request's (the size
 * of parts was changed since) it begins anew, and stores none: theirs stand. */
static void
resume(struct ns_work *work, struct ns_request *request)
{
    const struct ns_claim *claim = &work->claim;
    const struct ns_parts *parts = work->parts;
    uint32_t n_tokens = 0, n_blocks = 0;
    bool alien = parts && parts->alien;

    if (parts)
        ns_parts_resume(parts, claim, &n_tokens, &n_blocks);
    for (uint32_t i = n_tokens; i < claim->n_tokens; i++)
        alien = alien || claim->tokens[i] < 0;
    request->resume_blocks = n_blocks;
    if (alien)
        work->no_checkpoints = true;
    if (alien || claim->n_blocks <= n_blocks)
        return;
    request->resume = claim->tokens + n_tokens;
    request->n_resume = claim->n_tokens - n_tokens;
    request->resume_blocks = claim->n_blocks;
}

static enum ns_status
fill_request(struct ns_pipeline *pipeline, struct ns_work *work,
             bool in_thought, struct ns_error *err)
{
    const struct ns_model *model = ns_engine_model(pipeline->options.engine);
    uint32_t fallback = ns_pipeline_tuning(pipeline).default_max_tokens;
    const struct ns_job *job = work->job;
    struct ns_request *request = &work->request;
    enum ns_status status;

    status = ns_prepare_request(job, model,
                                engine_mode(work->claim.stored_mode),
                                &work->prompt, in_thought, &work->pictures,
                                work->images, fallback, request, err);
    if (status != NS_OK)
        return status;
    request->seed = ns_judge_seed(work);
    request->grammar = work->grammar;
    request->draft = work->draft.id;
    request->n_draft = (uint32_t)work->draft.n;
    if (work->attempt == 0) /* the only one that leaves blocks */
        resume(work, request);
    if (job->mode == NS_JOB_AUTO)
        tell_choice(pipeline, work);
    if (!job->has_max_tokens && request->max_tokens < fallback)
        ns_job_warn(work->job, "max_tokens: the default of %u is cut to %u by "
                    "the context", fallback, request->max_tokens);
    return ns_engine_check(pipeline->options.engine, request, err);
}

/* What a status of this stage means for the job. */
static enum ns_job_event
event_of(enum ns_status status, enum ns_job_event good,
         enum ns_job_event rejected)
{
    if (status == NS_OK)
        return good;
    return status == NS_REJECT ? rejected : NS_ON_TROUBLE;
}

/* --- parts ------------------------------------------------------------- */

enum ns_status
ns_prepare_node(const struct ns_job *job, const struct ns_model *model,
                const struct ns_tokenizer *tokenizer, bool empty_thought,
                enum ns_mode mode, struct ns_parts *parts, uint32_t node,
                struct ns_ids *prompt, struct ns_request *out,
                struct ns_error *err)
{
    const struct ns_pictures none = { 0 };
    struct ns_job of_node = *job;
    enum ns_status status;
    bool in_thought;

    of_node.messages = parts->messages;
    of_node.has_max_tokens = true;
    of_node.max_tokens = parts->tree->node_tokens;
    of_node.n_stop = 0;
    memset(prompt, 0, sizeof(*prompt));
    status = ns_parts_messages(parts, node, err);
    if (status == NS_OK)
        status = ns_prepare_tokens(&of_node, tokenizer, empty_thought, &none,
                                   prompt, &in_thought, err);
    if (status == NS_OK)
        status = ns_prepare_request(&of_node, model, mode, prompt, in_thought,
                                    &none, NULL, 0, out, err);
    return status;
}

/* A text that is too long for one summary gets a tree of them. */
static enum ns_status
split(struct ns_pipeline *pipeline, struct ns_work *work,
      struct ns_error *err)
{
    struct ns_engine *engine = pipeline->options.engine;

    return ns_parts_create(work->job, &work->claim,
                           &ns_engine_model(engine)->config,
                           ns_engine_tokenizer(engine),
                           engine_mode(work->claim.stored_mode),
                           work->prompt.n,
                           ns_pipeline_tuning(pipeline).summary_chunk,
                           &work->parts, err);
}

static enum ns_status
prepare_node(struct ns_pipeline *pipeline, struct ns_work *work, uint32_t i,
             struct ns_error *err)
{
    struct ns_engine *engine = pipeline->options.engine;
    struct ns_parts *parts = work->parts;
    struct ns_request *request = &parts->request[i];
    uint32_t node = parts->node[i];
    enum ns_status status;

    status = ns_prepare_node(work->job, ns_engine_model(engine),
                             ns_engine_tokenizer(engine),
                             ns_engine_empty_thought(engine),
                             engine_mode(work->claim.stored_mode), parts, node,
                             &parts->prompt[i], request, err);
    if (status == NS_OK) {
        request->seed = ns_mix(work->claim.stored_seed ^ ns_mix(node)) >> 11;
        status = ns_engine_check(engine, request, err);
    }
    if (status == NS_REJECT)
        ns_parts_blame(parts, node, err);
    return status;
}

/* The next round's requests; the last one's prompt is the work's own. */
static enum ns_status
prepare_round(struct ns_pipeline *pipeline, struct ns_work *work,
              bool *in_thought, struct ns_error *err)
{
    struct ns_engine *engine = pipeline->options.engine;
    struct ns_parts *parts = work->parts;
    const json_t *own = work->job->messages;
    enum ns_status status;

    ns_ids_fini(&work->prompt);
    work->no_checkpoints = work->no_checkpoints || parts->alien;
    if (ns_summary_advance(parts->tree)) {
        /* What the scheduler asks of a job that runs. */
        work->request = (struct ns_request){
            .deadline_ms = work->job->has_deadline ? work->job->deadline_ms : 0
        };
        status = ns_parts_begin_round(parts, err);
        for (uint32_t i = 0; i < parts->n && status == NS_OK; i++)
            status = prepare_node(pipeline, work, i, err);
        return status;
    }
    parts->is_final = true;
    status = ns_parts_messages(parts, ns_summary_final(parts->tree), err);
    work->job->messages = parts->messages;
    if (status == NS_OK)
        status = ns_prepare_tokens(work->job, ns_engine_tokenizer(engine),
                                   ns_engine_empty_thought(engine),
                                   &work->pictures, &work->prompt, in_thought,
                                   err);
    work->job->messages = own;
    return status;
}

/* On the fetcher's thread: the work comes back to the pool. */
static void
fetched(struct ns_fetch *fetch)
{
    struct ns_work *work = fetch->data;

    ns_queue_push(work->pipeline->to_pool, work);
}

/* Whether the work is the fetcher's for now: it has URLs, and what they bring
 * is not there yet. The job's own messages last as long as a fetch, those with
 * documents in them do not. */
static bool
fetch_first(struct ns_pipeline *pipeline, struct ns_work *work,
            struct ns_references *references)
{
    const struct ns_pictures_options *options = &pipeline->options.pictures;

    if (work->fetch.n > 0 ||
        !ns_pictures_urls(options, work->job, &work->fetch))
        return false;
    ns_references_fini(references);
    ns_pictures_urls(options, work->job, &work->fetch);
    work->pipeline = pipeline;
    work->fetch.done = fetched;
    work->fetch.data = work;
    ns_fetcher_start(options->fetcher, &work->fetch);
    return true;
}

/* A server that fails again and again is the job's fault in the end. */
static enum ns_status
load_pictures(struct ns_pipeline *pipeline, struct ns_work *work,
              const struct ns_references *references)
{
    enum ns_status status =
        ns_pictures_load(&pipeline->options.pictures, work->job, references,
                         &work->fetch, &work->pictures, &work->error);

    if (work->fetch.status == NS_RETRY && status == NS_RETRY &&
        work->state.troubles + 1 >= FETCH_TRIES) {
        ns_context(&work->error, "given up after %d tries", FETCH_TRIES);
        status = work->error.status = NS_REJECT;
    }
    ns_fetch_fini(&work->fetch);
    return status;
}

/* Documents, pictures, tokens; a text too long becomes parts. `*elsewhere`: the
 * fetcher has the work now. */
static enum ns_status
read_job(struct ns_pipeline *pipeline, struct ns_work *work, bool *in_thought,
         bool *elsewhere)
{
    struct ns_engine *engine = pipeline->options.engine;
    struct ns_references references;
    enum ns_status status;

    status = ns_references_load(&pipeline->options.references, work->job,
                                ns_now_ms() - work->received_ms, &references,
                                &work->error);
    work->blameless = status == NS_RETRY;
    *elsewhere = status == NS_OK && fetch_first(pipeline, work, &references);
    if (*elsewhere)
        return NS_OK;
    if (status == NS_OK)
        status = load_pictures(pipeline, work, &references);
    if (status == NS_OK)
        status = ns_prepare_tokens(work->job, ns_engine_tokenizer(engine),
                                   ns_engine_empty_thought(engine),
                                   &work->pictures, &work->prompt, in_thought,
                                   &work->error);
    if (status == NS_OK)
        status = ns_judge_hear(&pipeline->options.judge,
                               ns_engine_tokenizer(engine), work,
                               &work->error);
    if (status == NS_OK)
        status = split(pipeline, work, &work->error);
    ns_references_fini(&references);
    return status;
}

/* The request of the whole answer. */
static enum ns_status
complete(struct ns_pipeline *pipeline, struct ns_work *work, bool in_thought)
{
    enum ns_status status;

    status = ns_prepare_draft(work->job,
                              ns_engine_tokenizer(pipeline->options.engine),
                              &work->draft, &work->error);
    if (status == NS_OK)
        status = ns_form_grammar(work->job, &work->grammar, &work->error);
    if (status == NS_OK)
        status = ns_judge_check(&pipeline->options.judge, work->job,
                                &work->error);
    if (status == NS_OK)
        status = fill_request(pipeline, work, in_thought, &work->error);
    return status;
}

static void
prepare(struct ns_pipeline *pipeline, struct ns_work *work)
{
    enum ns_status status = NS_OK;
    bool in_thought = false, elsewhere = false;
    enum ns_job_event event;

    if (work->job->has_deadline &&
        work->job->deadline_ms <= ns_unix_now_ms() + work->clock_shift_ms) {
        ns_refuse(&work->error, "expired", "nightshift.deadline",
                  "the deadline had passed before the job was run");
        ns_work_fail(pipeline, work, NS_RESULT_EXPIRED);
        ns_work_advance(pipeline, work, NS_ON_EXPIRED);
        return;
    }
    ns_ids_fini(&work->prompt); /* of an earlier try */
    ns_ids_fini(&work->draft);
    ns_pictures_fini(&work->pictures);
    ns_grammar_destroy(work->grammar);
    work->grammar = NULL;
    work->blameless = false;
    if (!work->parts) {
        status = read_job(pipeline, work, &in_thought, &elsewhere);
        if (elsewhere)
            return;
    }
    if (status == NS_OK && work->parts)
        status = prepare_round(pipeline, work, &in_thought, &work->error);
    if (status == NS_OK && (!work->parts || work->parts->is_final))
        status = complete(pipeline, work, in_thought);
    event = event_of(status, NS_ON_PREPARED, NS_ON_UNFIT);
    if (event == NS_ON_UNFIT)
        ns_work_fail(pipeline, work, NS_RESULT_FAILED);
    if (event == NS_ON_TROUBLE && !work->error.code)
        work->error.code = work->blameless ? "documents_away"
                                           : "out_of_memory";
    if (event == NS_ON_PREPARED)
        atomic_fetch_add(&pipeline->metrics->prompt_tokens,
                         work->parts && !work->parts->is_final
                             ? ns_parts_tokens(work->parts)
                             : work->prompt.n);
    ns_work_advance(pipeline, work, event);
}

/* The mode that would be fastest. The prompt is not counted yet: four bytes of
 * the message are taken for a token. */
static enum ns_mode
fastest_mode(struct ns_pipeline *pipeline, const struct ns_work *work,
             enum ns_mode resolved)
{
    const struct ns_pictures none = { 0 };
    struct ns_engine *engine = pipeline->options.engine;
    const struct ns_config *config = &ns_engine_model(engine)->config;
    const struct ns_job *job = work->job;
    uint64_t prompt = work->message.length / 4;

    if (prompt > config->max_position)
        prompt = config->max_position;
    return ns_outlook_mode(
        ns_engine_outlook(engine), class_of(job, &none), resolved,
        (uint32_t)prompt,
        job->has_max_tokens
            ? job->max_tokens
            : ns_pipeline_tuning(pipeline).default_max_tokens,
        job->canvas_length ? job->canvas_length : config->canvas_length,
        NULL);
}

/* Mode and seed are settled from the job, the configuration and the checkpoint
 * alone, before the first claim stores them; unless cost may choose the mode.
 */
static enum ns_status
settle(struct ns_pipeline *pipeline, struct ns_work *work,
       struct ns_error *err)
{
    struct ns_pipeline_tuning tuning = ns_pipeline_tuning(pipeline);
    const struct ns_job *job = work->job;
    enum ns_status status;

    work->seed = job->has_seed ? job->seed : ns_job_seed(job, tuning.seed);
    status = ns_prepare_mode(job, ns_engine_model(pipeline->options.engine),
                             tuning.mode, &work->mode, err);
    if (status != NS_OK)
        return status;
    if (tuning.by_throughput && job->mode == NS_JOB_AUTO &&
        tuning.mode == NS_JOB_AUTO && !job->draft) /* ar takes none */
        work->mode = fastest_mode(pipeline, work, work->mode);
    work->claim.job = work->job;
    work->claim.mode = work->claim.stored_mode = job_mode(work->mode);
    work->claim.seed = work->claim.stored_seed = work->seed;
    return NS_OK;
}

static void
parse(struct ns_pipeline *pipeline, struct ns_work *work)
{
    struct ns_job_options options = pipeline->options.job;
    enum ns_status status;

    options.now_ms = ns_unix_now_ms();
    status = ns_job_parse(&work->message, &options, &work->job, &work->error);
    if (!pipeline->options.keep_payloads) {
        free((void *)work->message.bytes);
        work->message.bytes = NULL;
    }
    if (status == NS_OK)
        status = settle(pipeline, work, &work->error);
    if (status == NS_FATAL || !work->job) {
        /* Nothing can be said about it, so it is not said: it comes again. */
        ns_pipeline_fail(pipeline, &work->error);
        ns_work_advance(pipeline, work, NS_ON_STOP);
        return;
    }
    ns_work_advance(pipeline, work,
                    status == NS_OK ? NS_ON_PARSED : NS_ON_REFUSED);
}

void *
ns_prepare_thread(void *data)
{
    struct ns_pipeline *pipeline = data;
    struct ns_work *work;

    while ((work = ns_queue_pop(pipeline->to_pool, -1)) != NULL) {
        if (work->state.phase == NS_PHASE_CHECKING)
            ns_judge(pipeline, work);
        else if (ns_pipeline_stopping(pipeline))
            ns_work_advance(pipeline, work, NS_ON_STOP);
        else if (atomic_load(&work->fenced))
            ns_work_advance(pipeline, work, NS_ON_FENCED);
        else if (work->state.phase == NS_PHASE_RECEIVED)
            parse(pipeline, work);
        else
            prepare(pipeline, work);
    }
    return NULL;
}
