#include "engine/sequence.h"

#include <stdlib.h>
#include <string.h>

#include "engine/draft.h"
#include "engine/rng.h"
#include "engine/verify.h"

enum {
    /* Passes of hybrid after which its drafts must have paid. */
    HYBRID_TRIAL_PASSES = 24,
    REPLY_LIMIT_BYTES = 64 << 20,
    /* A given text has credit for so many verdicts that keep next to nothing;
     * what it keeps earns more. Without credit it is judged no more. */
    TEXT_MUST_KEEP = 4,
    TEXT_EARNS_BY = 8,
    TEXT_FIRST_CREDIT = 1,
    TEXT_MOST_CREDIT = 6,
};

static void
append(struct ns_sequence *seq, int32_t id)
{
    seq->known[seq->n_known++] = id;
    if (ns_reply_push(seq->reply, id)) {
        seq->finished = true;
        seq->finish = NS_FINISH_STOP;
    }
}

static struct ns_denoise_options
denoise_options(const struct ns_request *request, uint32_t vocab)
{
    const struct ns_sampler_options *sampler = &request->sampler;
    struct ns_denoise_options options = {
        .t_min = sampler->t_min,
        .t_max = sampler->t_max,
        .entropy_bound = sampler->entropy_bound,
        .confidence_threshold = sampler->confidence_threshold,
        .max_steps = sampler->max_denoising_steps,
        .stability_threshold = sampler->stability_threshold,
        .seed = request->seed,
        .vocab = vocab,
    };

    /* In hybrid the temperature is the verdict's; drafts keep the schedule. */
    if (request->mode == NS_MODE_DIFFUSION && request->has_temperature) {
        if (request->temperature > 0) {
            options.t_min *= request->temperature;
            options.t_max *= request->temperature;
        } else {
            options.take_argmax = true;
        }
    }
    return options;
}

enum ns_status
ns_sequence_create(const struct ns_request *request,
                   const struct ns_answer_rules *rules,
                   struct ns_sequence **out, struct ns_error *err)
{
    struct ns_sequence *seq = calloc(1, sizeof(*seq));
    struct ns_reply_options reply = {
        .tokenizer = rules->tokenizer,
        .in_thought = request->in_thought,
        .stop = request->stop,
        .n_stop = request->n_stop,
        .limit_bytes = REPLY_LIMIT_BYTES,
    };
    uint32_t length = request->canvas_length;
    enum ns_status status;

    if (!seq)
        return ns_fail(err, NS_FATAL, "out of memory for a sequence");
    seq->request = *request;
    seq->rules = rules;
    seq->denoise = denoise_options(request, rules->vocab);
    seq->text_credit = TEXT_FIRST_CREDIT;
    seq->rank.priority = request->priority;
    seq->rank.deadline_ms = request->deadline_ms;
    seq->rank.length = request->n_prompt + request->max_tokens;
    seq->capacity = request->n_prompt + request->n_resume +
                    request->max_tokens + 1;
    seq->whole = calloc(request->n_images + 1u, sizeof(*seq->whole));
    seq->group = calloc(request->n_images + 1u, sizeof(*seq->group));
    seq->known = calloc(seq->capacity, sizeof(int32_t));
    seq->carry = calloc(length, sizeof(int32_t));
    seq->uniform = calloc(length, sizeof(double));
    if (request->grammar) {
        seq->mask = calloc(length + 1u, sizeof(*seq->mask));
        seq->top = calloc((size_t)length * NS_HEAD_TOP, sizeof(*seq->top));
        status = ns_guide_create(rules->constraints, request->grammar,
                                 request->thinking, request->in_thought,
                                 &seq->guide, err);
        if (status != NS_OK)
            goto out;
    }
    if ((request->grammar && (!seq->mask || !seq->top)) || !seq->known || !seq->carry || !seq->uniform || !seq->whole ||
        !seq->group) {
        status = ns_fail(err, NS_FATAL, "out of memory for a sequence of "
                         "%u tokens", seq->capacity);
        goto out;
    }
    status = ns_canvas_init(&seq->canvas, length, err);
    if (status != NS_OK)
        goto out;
    status = ns_reply_create(&reply, &seq->reply, err);
    if (status != NS_OK)
        goto out;
    memcpy(seq->known, request->prompt, request->n_prompt * sizeof(int32_t));
    seq->n_known = request->n_prompt;
    for (uint32_t i = 0; i < request->n_images; i++) {
        const struct ns_request_image *image = &request->images[i];
        uint32_t n_tokens = image->image->size.n_tokens;

        seq->whole[i] = (struct ns_whole){ image->position,
                                           image->position + n_tokens };
        seq->group[i] = (struct ns_batch_group){
            .first = image->position,
            .end = image->position + n_tokens,
        };
        seq->usage.image_tokens += n_tokens;
    }
    for (uint32_t i = 0; i < request->n_resume; i++)
        append(seq, request->resume[i]);
    seq->block_start = seq->n_known;
    seq->next_block = request->resume_blocks;
    seq->usage.prompt_tokens = request->n_prompt;
    seq->usage.blocks = request->resume_blocks;
    *out = seq;
    seq = NULL;
out:
    ns_sequence_destroy(seq);
    return status;
}

void
ns_sequence_destroy(struct ns_sequence *seq)
{
    if (!seq)
        return;
    ns_canvas_fini(&seq->canvas);
    ns_reply_destroy(seq->reply);
    ns_guide_destroy(seq->guide);
    free(seq->mask);
    free(seq->top);
    free(seq->whole);
    free(seq->group);
    free(seq->known);
    free(seq->carry);
    free(seq->uniform);
    free(seq);
}

uint32_t
ns_sequence_n_answer(const struct ns_sequence *seq)
{
    return seq->n_known - seq->request.n_prompt;
}

const int32_t *
ns_sequence_answer(const struct ns_sequence *seq)
{
    return seq->known + seq->request.n_prompt;
}

bool
ns_sequence_is_ar(const struct ns_sequence *seq)
{
    return seq->request.mode == NS_MODE_AR || seq->as_ar || seq->tail;
}

static uint32_t
canvas_length(const struct ns_sequence *seq)
{
    uint32_t room = seq->rules->max_position - seq->n_known;

    return seq->request.canvas_length < room ? seq->request.canvas_length
                                             : room;
}

/* What follows in the text that was given to start from; 0: nothing. */
static uint32_t
given_text(const struct ns_sequence *seq, int32_t next, const int32_t **out)
{
    const struct ns_request *request = &seq->request;
    uint32_t at, n, most = canvas_length(seq);

    if (request->n_draft == 0)
        return 0;
    at = ns_draft_place(request->draft, request->n_draft,
                        ns_sequence_answer(seq), ns_sequence_n_answer(seq),
                        next);
    n = request->n_draft - at;
    *out = request->draft + at;
    return n < most ? n : most;
}

/* hybrid: what was given is judged as it is, before anything is denoised. True
 * when that is what the next pass is for. First all that is known is encoded,
 * and no canvas opened; then the text from the choice for the next token on is
 * the draft, or, where it has been left, that choice alone. */
static bool
judge_text(struct ns_sequence *seq, struct ns_want *want)
{
    const int32_t *text = &seq->choice;
    uint32_t n;

    if (seq->request.mode != NS_MODE_HYBRID || seq->request.n_draft == 0 ||
        seq->canvas_open || seq->text_credit == 0)
        return false;
    if (want->n_encode > 0)
        return true;
    if (!seq->has_choice)
        return false;
    n = given_text(seq, seq->choice, &text);
    if (n == 0) {
        text = &seq->choice;
        n = 1;
    }
    seq->canvas.length = n;
    memcpy(seq->canvas.argmax, text, n * sizeof(*text));
    seq->drafted = seq->from_text = true;
    want->n_encode = n;
    return true;
}

struct ns_want
ns_sequence_want(struct ns_sequence *seq)
{
    struct ns_want want = {
        .n_encode = seq->n_known - seq->n_cached,
        .at = seq->n_cached,
        .whole = seq->whole,
        .n_whole = seq->request.n_images,
    };

    if (seq->drafted) {
        want.n_encode = seq->canvas.length;
        return want;
    }
    want.prefill = seq->n_cached < seq->request.n_prompt ||
                   want.n_encode > seq->request.canvas_length;
    if (ns_sequence_is_ar(seq) || judge_text(seq, &want))
        return want;
    if (!seq->canvas_open) {
        const int32_t *given = seq->carry;
        uint32_t n_given = seq->n_carry;
        bool hybrid = seq->request.mode == NS_MODE_HYBRID;
        /* hybrid's canvases start anywhere: keyed by where. */
        uint32_t block = hybrid ? ns_sequence_n_answer(seq)
                                : seq->next_block;

        if (!hybrid) /* whose text was judged: what is left is wrong */
            n_given = given_text(seq, -1, &given);
        ns_canvas_start(&seq->canvas, &seq->denoise, canvas_length(seq),
                        block, given, n_given);
        seq->canvas_open = true;
    }
    want.n_canvas = seq->canvas.length;
    return want;
}

static bool
is_end(const struct ns_answer_rules *rules, int32_t id)
{
    for (uint32_t i = 0; i < rules->n_eos; i++)
        if (rules->eos_id[i] == id)
            return true;
    return false;
}

static void
finish(struct ns_sequence *seq, enum ns_finish how)
{
    seq->finished = true;
    seq->finish = how;
}

static bool
at_limit(const struct ns_sequence *seq)
{
    return ns_sequence_n_answer(seq) >= seq->request.max_tokens ||
           seq->n_known >= seq->rules->max_position;
}

static void
close_thought(struct ns_sequence *seq)
{
    const struct ns_answer_rules *rules = seq->rules;

    for (uint32_t i = 0; i < rules->n_thought_end && !at_limit(seq); i++)
        append(seq, rules->thought_end[i]);
}

bool
ns_sequence_take(struct ns_sequence *seq, int32_t id)
{
    uint32_t budget = seq->request.thinking_budget;

    if (id != seq->rules->pad_id) /* as the reference counts */
        seq->usage.new_tokens++;
    if (is_end(seq->rules, id)) {
        seq->ended = true;
        finish(seq, id == seq->rules->tool_response_id ? NS_FINISH_TOOL_CALLS
                                                       : NS_FINISH_STOP);
        return false;
    }
    append(seq, id);
    if (seq->finished) /* a stop string */
        return false;
    if (seq->guide) {
        ns_guide_follow(seq->guide, ns_sequence_answer(seq),
                        ns_sequence_n_answer(seq));
        if (ns_guide_ended(seq->guide)) {
            finish(seq, NS_FINISH_STOP);
            return false;
        }
    }
    if (budget > 0 && !at_limit(seq) && ns_reply_in_thought(seq->reply) &&
        ns_reply_thought_tokens(seq->reply) >= budget) {
        close_thought(seq);
        if (!seq->finished && at_limit(seq))
            finish(seq, NS_FINISH_LENGTH);
        return false;
    }
    if (at_limit(seq)) {
        finish(seq, NS_FINISH_LENGTH);
        return false;
    }
    return true;
}

double
ns_sequence_ar_uniform(const struct ns_sequence *seq, uint32_t at)
{
    const struct ns_request *request = &seq->request;

    if (!request->has_temperature || request->temperature <= 0)
        return -1.0;
    return ns_draw_uniform(ns_draw(request->seed, 0, 0, NS_DRAW_AR, at));
}

static void
carry_rest(struct ns_sequence *seq, uint32_t from)
{
    seq->n_carry = 0;
    for (uint32_t i = from; i < seq->canvas.length; i++)
        seq->carry[seq->n_carry++] = seq->canvas.argmax[i];
}

/* A verdict is in. A hybrid whose drafts gain less than a token a pass goes on
 * as ar; its answer is the same either way. */
static void
weigh_drafts(struct ns_sequence *seq)
{
    uint32_t passes = seq->usage.passes - seq->before_trial.passes;
    uint32_t tokens = seq->usage.new_tokens - seq->before_trial.tokens;

    if (passes >= HYBRID_TRIAL_PASSES && tokens < passes)
        seq->as_ar = true;
}

/* The same of the text that was given; what came of it is not the canvases'. */
static void
weigh_text(struct ns_sequence *seq, uint32_t n_kept)
{
    if (n_kept < TEXT_MUST_KEEP)
        seq->text_credit--;
    seq->text_credit += n_kept / TEXT_EARNS_BY;
    if (seq->text_credit > TEXT_MOST_CREDIT)
        seq->text_credit = TEXT_MOST_CREDIT;
    seq->before_trial.passes = seq->usage.passes;
    seq->before_trial.tokens = seq->usage.new_tokens;
}

const uint32_t *const *
ns_sequence_masks(struct ns_sequence *seq)
{
    uint32_t n = seq->drafted ? seq->canvas.length : 0, got;

    if (!seq->guide)
        return NULL;
    ns_guide_follow(seq->guide, ns_sequence_answer(seq),
                    ns_sequence_n_answer(seq));
    got = ns_guide_masks(seq->guide, seq->canvas.argmax, n, seq->mask);
    if (got == 0) /* the guide has failed, and so will the request */
        return NULL;
    if (!seq->drafted)
        return seq->mask;
    /* The draw behind nothing of the draft is known: it is `choice`. */
    if (got <= n)
        seq->canvas.length = got - 1;
    return seq->mask + 1;
}

void
ns_sequence_keep_to_grammar(struct ns_sequence *seq, int32_t *argmax,
                            int32_t *sampled)
{
    uint32_t n = seq->canvas.length;

    if (!seq->guide)
        return;
    ns_guide_follow(seq->guide, ns_sequence_answer(seq),
                    ns_sequence_n_answer(seq));
    if (ns_guide_path(seq->guide,
                      (const struct ns_candidate(*)[NS_HEAD_TOP])seq->top, n,
                      argmax))
        memcpy(sampled, argmax, n * sizeof(*sampled));
}

/* How much of a canvas under a grammar joins the answer: all of it where it has
 * converged, else what the model itself would have written there, and one token
 * at least. */
static uint32_t
uncontested(const struct ns_sequence *seq)
{
    const struct ns_canvas *canvas = &seq->canvas;
    uint32_t n = 0;

    if (!seq->guide || ns_canvas_converged(canvas, &seq->denoise))
        return canvas->length;
    while (n < canvas->length &&
           canvas->argmax[n] == seq->top[(size_t)n * NS_HEAD_TOP].id)
        n++;
    return n > 0 ? n : 1;
}

void
ns_sequence_canvas_done(struct ns_sequence *seq)
{
    const struct ns_canvas *canvas = &seq->canvas;

    seq->canvas_open = false;
    if (seq->request.mode == NS_MODE_DIFFUSION) {
        uint32_t n = uncontested(seq);
        bool more = true;

        for (uint32_t i = 0; i < n && more; i++)
            more = ns_sequence_take(seq, canvas->argmax[i]);
        seq->tail = more && n < canvas->length && seq->rules->ar_capable;
        return;
    }
    if (canvas->argmax[0] == seq->choice) {
        seq->drafted = true;
        return;
    }
    /* The first token already differs: no pass is needed to know. */
    seq->usage.drafted += canvas->length;
    seq->has_choice = false;
    if (ns_sequence_take(seq, seq->choice))
        carry_rest(seq, 1);
    else
        seq->n_carry = 0;
    weigh_drafts(seq);
}

void
ns_sequence_judge(struct ns_sequence *seq, const int32_t *row_choice)
{
    const struct ns_canvas *canvas = &seq->canvas;
    struct ns_verdict verdict = ns_verify(canvas->argmax, canvas->length,
                                          seq->choice, row_choice);
    bool more = true;

    seq->drafted = seq->has_choice = false;
    seq->n_carry = 0;
    seq->usage.drafted += canvas->length;
    for (uint32_t i = 0; i < verdict.n_kept && more; i++) {
        seq->usage.kept++;
        seq->n_cached++; /* the commit pass wrote its row */
        more = ns_sequence_take(seq, canvas->argmax[i]);
    }
    if (more && ns_sequence_take(seq, verdict.next))
        carry_rest(seq, verdict.n_kept + 1);
    if (seq->from_text)
        weigh_text(seq, verdict.n_kept);
    else
        weigh_drafts(seq);
    seq->from_text = false;
}

void
ns_sequence_choose(struct ns_sequence *seq, int32_t choice)
{
    if (ns_sequence_is_ar(seq)) {
        ns_sequence_take(seq, choice);
        if (seq->n_known - seq->block_start >= seq->request.canvas_length)
            seq->tail = false;
    } else {
        seq->choice = choice;
        seq->has_choice = true;
    }
}

enum ns_status
ns_sequence_check_content(struct ns_sequence *seq,
                          const struct ns_reply_text *reply,
                          struct ns_error *err)
{
    const char *cut = reply->stopped || seq->finish == NS_FINISH_STOP
                          ? "a stop string or an early end"
                          : "max_tokens";

    if (!seq->guide)
        return NS_OK;
    return ns_guide_judge(seq->guide, reply->content, reply->content_length,
                          cut, err);
}

struct ns_engine_progress
ns_sequence_progress(const struct ns_sequence *seq)
{
    const struct ns_canvas *canvas = &seq->canvas;
    uint32_t n_prompt = seq->request.n_prompt;
    struct ns_engine_progress progress = {
        .id = seq->request.id,
        .mode = seq->request.mode,
        .stage = NS_STAGE_COMMIT,
        .submitted_ms = seq->submitted_ms,
        .n_prompt = n_prompt,
        .n_read = seq->n_cached < n_prompt ? seq->n_cached : n_prompt,
        .n_tokens = ns_sequence_n_answer(seq),
        .max_tokens = seq->request.max_tokens,
        .block = seq->next_block,
    };

    if (seq->n_cached < n_prompt)
        progress.stage = NS_STAGE_PREFILL;
    else if (ns_sequence_is_ar(seq))
        progress.stage = NS_STAGE_AR;
    else if (seq->canvas_open)
        progress.stage = NS_STAGE_DENOISE;
    if (progress.stage != NS_STAGE_DENOISE)
        return progress;
    progress.step = canvas->n_steps;
    progress.max_steps = seq->denoise.max_steps;
    progress.canvas_length = canvas->length;
    if (canvas->n_steps == 0) /* what is accepted is the last canvas's yet */
        return progress;
    progress.n_accepted = canvas->n_accepted;
    for (uint32_t i = 0; i < canvas->length && i < NS_PROGRESS_CELLS; i++)
        if (canvas->accepted[i])
            progress.accepted[i / 8] |= (uint8_t)(1u << i % 8);
    return progress;
}

void
ns_sequence_put_back(struct ns_sequence *seq)
{
    /* Only diffusion loses work: a canvas that is not done starts anew from
     * the same noise. What ar and hybrid have taken stays taken. */
    seq->running = false;
    seq->n_cached = 0;
    seq->canvas_open = seq->drafted = seq->has_choice = false;
    seq->from_text = false;
    seq->n_carry = 0;
    if (seq->guide)
        ns_guide_release(seq->guide);
}
