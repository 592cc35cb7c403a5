#include "engine/engine_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/version.h"
#include "engine/memory.h"
#include "engine/prompt.h"

enum { MAX_PATH = 4096 };

/* ---- opening --------------------------------------------------------- */

static enum ns_status
make_rules(struct ns_engine *engine, struct ns_error *err)
{
    const struct ns_generation *generation = &engine->model->generation;
    struct ns_answer_rules *rules = &engine->rules;
    struct ns_span span = { "\n<channel|>", 11, true };
    struct ns_ids ids = { .limit = sizeof(rules->thought_end) /
                                   sizeof(rules->thought_end[0]) };
    struct ns_constraint_options constraints = {
        .tokenizer = engine->tokenizer,
        .vocab = engine->model->config.vocab,
        .end_id = generation->eos_id,
        .n_end = generation->n_eos,
        .max_sequences = engine->options.max_sequences,
        .canvas_length = engine->model->config.canvas_length,
    };
    enum ns_status status;

    rules->vocab = engine->model->config.vocab;
    rules->max_position = engine->model->config.max_position;
    rules->pad_id = generation->pad_id;
    rules->eos_id = generation->eos_id;
    rules->n_eos = generation->n_eos;
    rules->tokenizer = engine->tokenizer;
    rules->ar_capable = generation->ar_capable;
    rules->tool_response_id = ns_tokenizer_id(engine->tokenizer,
                                              "<|tool_response>");
    constraints.call_id = rules->tool_response_id;
    status = ns_constraints_create(&constraints, &rules->constraints, err);
    if (status != NS_OK)
        return status;
    if (ns_tokenizer_id(engine->tokenizer, "<channel|>") < 0)
        return NS_OK; /* a model that cannot think */
    status = ns_tokenizer_encode(engine->tokenizer, &span, 1, &ids, err);
    if (status == NS_OK) {
        memcpy(rules->thought_end, ids.id, ids.n * sizeof(int32_t));
        rules->n_thought_end = (uint32_t)ids.n;
    }
    ns_ids_fini(&ids);
    return status;
}

static enum ns_status
open_tokenizer(struct ns_engine *engine, struct ns_error *err)
{
    char path[MAX_PATH];
    enum ns_status status;

    snprintf(path, sizeof(path), "%s/tokenizer.json",
             engine->options.model_directory);
    status = ns_tokenizer_open(path, &engine->tokenizer, err);
    if (status != NS_OK)
        return status;
    if (ns_tokenizer_size(engine->tokenizer) > engine->model->config.vocab)
        return ns_fail(err, NS_REJECT,
                       "%s: ids reach %u, the model's vocabulary is %u", path,
                       ns_tokenizer_size(engine->tokenizer) - 1,
                       engine->model->config.vocab);
    return NS_OK;
}

static enum ns_status
make_lists(struct ns_engine *engine, struct ns_error *err)
{
    uint32_t n = engine->options.max_sequences;

    engine->running.capacity = n;
    /* Those that are put back wait too. */
    engine->waiting.capacity = n * (NS_WAITING_PER_RUNNING + 1);
    engine->over.capacity = n * (NS_WAITING_PER_RUNNING + 1);
    engine->event_capacity = n * (NS_WAITING_PER_RUNNING + 2);
    engine->running.item = calloc(n, sizeof(struct ns_sequence *));
    engine->waiting.item = calloc(engine->waiting.capacity,
                                  sizeof(struct ns_sequence *));
    engine->over.item = calloc(engine->over.capacity,
                               sizeof(struct ns_sequence *));
    engine->events = calloc(engine->event_capacity, sizeof(struct ns_event));
    engine->want = calloc(n, sizeof(struct ns_want));
    engine->grant = calloc(n, sizeof(struct ns_grant));
    engine->rank = calloc(n, sizeof(struct ns_rank));
    if (!engine->running.item || !engine->waiting.item ||
        !engine->over.item || !engine->events || !engine->want ||
        !engine->grant || !engine->rank)
        return ns_fail(err, NS_FATAL, "out of memory opening the engine");
    return NS_OK;
}

/* Each picture of a pass has a row at least. */
static enum ns_status
open_vision(struct ns_engine *engine, uint32_t rows, struct ns_error *err)
{
    engine->n_image_room = rows;
    engine->image = calloc(rows, sizeof(*engine->image));
    engine->image_soft = calloc(rows, sizeof(*engine->image_soft));
    if (!engine->image || !engine->image_soft)
        return ns_fail(err, NS_FATAL, "out of memory opening the engine");
    return ns_vision_create(engine->model, engine->options.image_cache_bytes,
                            &engine->vision, err);
}

static enum ns_status
open_outlook(struct ns_engine *engine, struct ns_error *err)
{
    const struct ns_memory_plan *memory = &engine->memory;
    struct ns_outlook_options outlook = {
        .rates = ns_cost_guess(engine->options.backend.n_threads),
        .pass_tokens = engine->options.pass_tokens,
        .max_sequences = engine->options.max_sequences,
        .memory_bytes = (double)(memory->full_bytes + memory->sliding_bytes),
        .max_steps = engine->model->generation.max_denoising_steps,
        .ar_capable = engine->model->generation.ar_capable,
    };

    ns_cost_shape_of(engine->model, sizeof(float), engine->options.kv_plain,
                     &outlook.shape);
    return ns_outlook_create(&outlook, &engine->outlook, err);
}

enum ns_status
ns_engine_open(const struct ns_engine_options *options,
               struct ns_engine **out, struct ns_error *err)
{
    struct ns_engine *engine = calloc(1, sizeof(*engine));
    struct ns_kvcache_options kv;
    enum ns_status status;
    uint32_t rows;

    if (!engine)
        return ns_fail(err, NS_FATAL, "out of memory opening the engine");
    engine->options = *options;
    status = ns_backend_open(&options->backend, &engine->be, err);
    if (status != NS_OK)
        goto out;
    status = ns_model_open(options->model_directory, engine->be,
                           &engine->model, err);
    if (status != NS_OK)
        goto out;
    engine->options = ns_memory_defaults(engine->model, options);
    status = ns_memory_plan(engine->model, &engine->options, &engine->memory,
                            err);
    if (status != NS_OK)
        goto out;
    status = open_tokenizer(engine, err);
    if (status != NS_OK)
        goto out;
    engine->empty_thought =
        ns_prompt_wants_empty_thought(options->model_directory);
    status = make_rules(engine, err);
    if (status != NS_OK)
        goto out;
    status = make_lists(engine, err);
    if (status != NS_OK)
        goto out;

    rows = ns_memory_rows(engine->model, &engine->options);
    kv = (struct ns_kvcache_options){
        .full_pages = engine->memory.full_pages,
        .sliding_pages = engine->memory.sliding_pages,
        .n_slots = engine->options.max_sequences,
        .max_positions = engine->model->config.max_position,
        .chunk = ns_memory_chunk(engine->model, &engine->options),
        .plain = options->kv_plain,
        .no_sharing = options->no_prefix_sharing,
    };
    status = ns_kvcache_create(&engine->model->config,
                               engine->model->weights.n_rotated_full,
                               engine->be, &kv, &engine->kv, err);
    if (status != NS_OK)
        goto out;
    /* A sequence may bring an encoded run and a canvas to one pass. */
    status = ns_batch_create(engine->be, rows,
                             2 * engine->options.max_sequences,
                             engine->model->config.sliding_window,
                             engine->model->config.canvas_length,
                             &engine->batch, err);
    if (status != NS_OK)
        goto out;
    status = ns_forward_create(engine->model, engine->kv, rows,
                               engine->options.max_sequences, &engine->fw,
                               err);
    if (status != NS_OK)
        goto out;
    engine->batch->causal_groups = !engine->model->config.vision_groups;
    if (ns_model_sees(engine->model)) {
        status = open_vision(engine, rows, err);
        if (status != NS_OK)
            goto out;
    }
    status = open_outlook(engine, err);
    if (status != NS_OK)
        goto out;
    snprintf(engine->revision, sizeof(engine->revision), "%s-%s/%s/%s",
             NS_VERSION, NS_NUMERICS, engine->be->ops->name,
             engine->be->arithmetic);
    *out = engine;
    engine = NULL;
out:
    ns_engine_close(engine);
    return status;
}

void
ns_engine_drop_all(struct ns_engine *engine, struct ns_sequence_list *list)
{
    for (uint32_t i = 0; i < list->n; i++) {
        if (engine->kv)
            ns_kvcache_drop(engine->kv, list->item[i]->hold);
        ns_sequence_destroy(list->item[i]);
    }
    list->n = 0;
}

void
ns_engine_close(struct ns_engine *engine)
{
    if (!engine)
        return;
    ns_engine_drop_all(engine, &engine->waiting);
    ns_engine_drop_all(engine, &engine->running);
    ns_engine_drop_all(engine, &engine->over);
    ns_vision_destroy(engine->vision);
    ns_outlook_destroy(engine->outlook);
    ns_forward_destroy(engine->fw);
    ns_batch_destroy(engine->batch);
    ns_kvcache_destroy(engine->kv);
    ns_constraints_destroy(engine->rules.constraints);
    ns_tokenizer_close(engine->tokenizer);
    ns_model_close(engine->model);
    ns_backend_close(engine->be);
    free(engine->waiting.item);
    free(engine->running.item);
    free(engine->over.item);
    free(engine->events);
    free(engine->want);
    free(engine->grant);
    free(engine->rank);
    free(engine->image);
    free(engine->image_soft);
    free(engine);
}

/* ---- what is const while it is open ------------------------------------ */

const struct ns_model *
ns_engine_model(const struct ns_engine *engine)
{
    return engine->model;
}

const struct ns_tokenizer *
ns_engine_tokenizer(const struct ns_engine *engine)
{
    return engine->tokenizer;
}

bool
ns_engine_empty_thought(const struct ns_engine *engine)
{
    return engine->empty_thought;
}

const char *
ns_engine_revision(const struct ns_engine *engine)
{
    return engine->revision;
}

const struct ns_memory_plan *
ns_engine_memory(const struct ns_engine *engine)
{
    return &engine->memory;
}

struct ns_outlook *
ns_engine_outlook(const struct ns_engine *engine)
{
    return engine->outlook;
}

void
ns_engine_set_trace(struct ns_engine *engine, const struct ns_trace *trace)
{
    engine->trace = trace;
}

struct ns_forward *
ns_engine_forward(struct ns_engine *engine)
{
    return engine->fw;
}

struct ns_vision *
ns_engine_vision(struct ns_engine *engine)
{
    return engine->vision;
}

struct ns_kvcache *
ns_engine_kvcache(struct ns_engine *engine)
{
    return engine->kv;
}
