/* The pipeline over a source, a store and an engine that do what the test
 * says: every order of events that the real ones can bring about, without
 * waiting for them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/metrics.h"
#include "daemon/pipeline.h"
#include "daemon/work.h"

enum { MAX_JOBS = 400, BLOCK = 16, MAX_RUNNING = 8, DRAWN = 1 << 20 };

/* What the engine does with a job, by its seed. */
enum script { RUNS = 1, NEVER_FITS, TROUBLE_ONCE, BAD_CALL, BREAKS, SLOW,
              KILLS, HANGS, FAILS };

/* --- the engine -------------------------------------------------------- */

struct running {
    struct ns_request request;
    uint32_t n_done, n_blocks;
    int32_t *tokens;
};

struct ns_engine {
    struct ns_model model;
    struct ns_tokenizer *tokenizer;
    struct running running[MAX_RUNNING];
    struct ns_event event[4 * MAX_RUNNING];
    size_t n_events, next_event;
    _Atomic int n_passes, most_running, trouble_left, n_alone_broken;
    _Atomic uint32_t n_resumed_blocks;
    _Atomic int n_nodes; /* of texts in parts, told by the seed they are given */
    enum script nodes;   /* what it does with those */
};

static char revision[] = "fake 1";

const struct ns_model *
ns_engine_model(const struct ns_engine *engine)
{
    return &engine->model;
}

const struct ns_tokenizer *
ns_engine_tokenizer(const struct ns_engine *engine)
{
    return engine->tokenizer;
}

bool
ns_engine_empty_thought(const struct ns_engine *engine)
{
    (void)engine;
    return false;
}

const char *
ns_engine_revision(const struct ns_engine *engine)
{
    (void)engine;
    return revision;
}

struct ns_engine_load
ns_engine_load(const struct ns_engine *engine)
{
    (void)engine;
    return (struct ns_engine_load){ .pass_tokens = MAX_RUNNING,
                                    .full_pages_free = 3 };
}

uint32_t
ns_engine_progress(const struct ns_engine *engine, struct ns_engine_progress *out,
                   uint32_t n)
{
    (void)engine;
    (void)out;
    (void)n;
    return 0;
}

struct ns_outlook *
ns_engine_outlook(const struct ns_engine *e)
{
    (void)e;
    return NULL; /* asked for by throughput alone */
}

const struct ns_memory_plan *
ns_engine_memory(const struct ns_engine *engine)
{
    static const struct ns_memory_plan memory = { .full_pages = 10 };

    (void)engine;
    return &memory;
}

enum ns_status
ns_engine_check(const struct ns_engine *engine,
                const struct ns_request *request, struct ns_error *err)
{
    (void)engine;
    if (request->seed == NEVER_FITS)
        return ns_refuse(err, "over_memory", NULL, "needs more than there is");
    return NS_OK;
}

/* What it does with the request. */
static enum script
script_of(const struct ns_engine *engine, const struct ns_request *request)
{
    return request->seed > DRAWN ? engine->nodes
                                 : (enum script)request->seed;
}

static int
count_running(const struct ns_engine *engine)
{
    int n = 0;

    for (int i = 0; i < MAX_RUNNING; i++)
        n += engine->running[i].n_done <
             engine->running[i].request.max_tokens;
    return n;
}

static void
drop(struct running *running)
{
    free(running->tokens);
    *running = (struct running){ 0 };
}

void
ns_engine_cancel(struct ns_engine *engine, uint64_t id)
{
    for (int i = 0; i < MAX_RUNNING; i++)
        if (engine->running[i].request.id == id)
            drop(&engine->running[i]);
}

/* Answers of the last pass are gone now. */
static void
reap(struct ns_engine *engine)
{
    for (size_t i = 0; i < engine->n_events; i++)
        if (engine->event[i].kind == NS_EVENT_DONE)
            ns_engine_cancel(engine, engine->event[i].id);
    engine->n_events = engine->next_event = 0;
}

enum ns_status
ns_engine_submit(struct ns_engine *engine, const struct ns_request *request,
                 struct ns_error *err)
{
    struct running *running = engine->running;

    reap(engine);
    while (running < engine->running + MAX_RUNNING && running->request.id)
        running++;
    if (running == engine->running + MAX_RUNNING)
        return ns_fail(err, NS_RETRY, "full");
    *running = (struct running){ .request = *request,
                                 .n_done = request->n_resume,
                                 .n_blocks = request->resume_blocks };
    running->tokens = calloc(request->max_tokens + BLOCK, sizeof(int32_t));
    for (uint32_t i = 0; i < request->n_resume; i++)
        running->tokens[i] = request->resume[i];
    atomic_fetch_add(&engine->n_resumed_blocks, request->resume_blocks);
    atomic_fetch_add(&engine->n_nodes, request->seed > DRAWN);
    if (count_running(engine) > engine->most_running)
        engine->most_running = count_running(engine);
    return NS_OK;
}

static struct ns_event *
say(struct ns_engine *engine, enum ns_event_kind kind,
    const struct running *running)
{
    struct ns_event *event = &engine->event[engine->n_events++];

    *event = (struct ns_event){ .kind = kind, .id = running->request.id };
    return event;
}

static void
advance(struct ns_engine *engine, struct running *running)
{
    struct ns_request *request = &running->request;
    struct ns_event *event;
    uint32_t n = request->max_tokens - running->n_done;

    if (script_of(engine, request) == FAILS) {
        event = say(engine, NS_EVENT_FAILED, running);
        ns_refuse(&event->error, "over_memory", NULL, "too much");
        drop(running);
        return;
    }
    if (script_of(engine, request) == TROUBLE_ONCE &&
        atomic_fetch_sub(&engine->trouble_left, 1) > 0) {
        event = say(engine, NS_EVENT_FAILED, running);
        ns_fail(&event->error, NS_RETRY, "not now");
        drop(running);
        return;
    }
    n = n < BLOCK ? n : BLOCK;
    /* A token tells its place and its seed, so that a hole would show. */
    for (uint32_t i = 0; i < n; i++)
        running->tokens[running->n_done + i] =
            (int32_t)(request->seed % DRAWN * 1000 + running->n_done + i);
    if (n > 0) { /* a resumed job may have had its last block */
        event = say(engine, NS_EVENT_BLOCK, running);
        event->block = running->n_blocks++;
        event->tokens = running->tokens + running->n_done;
        event->n_tokens = n;
        running->n_done += n;
    }
    if (running->n_done < request->max_tokens)
        return;
    event = say(engine, NS_EVENT_DONE, running);
    event->tokens = running->tokens;
    event->n_tokens = running->n_done;
    event->reply.content = "an answer";
    event->reply.content_length = 9;
    if (request->seed == BAD_CALL) {
        event->reply.bad_tool_call = true;
        event->reply.bad_call_text = "call:(";
    }
    event->usage.completion_tokens = running->n_done;
    event->usage.new_tokens = running->n_done - request->n_resume;
    event->usage.blocks = running->n_blocks;
    event->usage.passes = 2 * (running->n_blocks - request->resume_blocks);
    event->usage.prompt_tokens = request->n_prompt;
}

enum ns_status
ns_engine_pass(struct ns_engine *engine, struct ns_pass_report *report,
               struct ns_error *err)
{
    reap(engine);
    engine->n_passes++;
    *report = (struct ns_pass_report){ 0 };
    for (int i = 0; i < MAX_RUNNING; i++) {
        if (engine->running[i].request.id == 0)
            continue;
        if (engine->running[i].request.seed == BREAKS)
            return ns_fail(err, NS_FATAL, "the card fell off");
        if (engine->running[i].request.seed == KILLS)
            _exit(86); /* the process is gone, as by a wild pointer */
        if (script_of(engine, &engine->running[i].request) == SLOW)
            usleep(2000);
        if (engine->running[i].request.seed == HANGS)
            usleep(400000);
        report->n_rows++;
        report->n_canvases++;
        report->new_tokens += BLOCK;
        advance(engine, &engine->running[i]);
    }
    return NS_OK;
}

bool
ns_engine_next_event(struct ns_engine *engine, struct ns_event *out)
{
    if (engine->next_event == engine->n_events)
        return false;
    *out = engine->event[engine->next_event++];
    return true;
}

static struct ns_engine *
make_engine(void)
{
    struct ns_engine *engine = calloc(1, sizeof(*engine));
    struct ns_error err;

    assert_non_null(engine);
    engine->model.config.canvas_length = BLOCK;
    engine->model.config.max_position = 4096;
    engine->model.generation.ar_capable = false;
    strcpy(engine->model.revision, "model 1");
    assert_int_equal(ns_tokenizer_open(
                         "tests/cases/tokenizer/tiny/tokenizer.json",
                         &engine->tokenizer, &err),
                     NS_OK);
    return engine;
}

static void
destroy_engine(struct ns_engine *engine)
{
    for (int i = 0; i < MAX_RUNNING; i++)
        drop(&engine->running[i]);
    ns_tokenizer_close(engine->tokenizer);
    free(engine);
}

/* --- source and store -------------------------------------------------- */

struct job_row { /* what the world knows of one job */
    char json[5000];
    const char *id;
    int n_handed_out, n_acknowledged;
    int n_rows;
    char status[16], code[32], content[32];
    int n_claims, n_given_back, n_own_fault;
    pid_t owner; /* 0: given back */
    uint32_t stalls, blocks_seen;
    bool held;
    uint64_t fence;
    uint32_t n_blocks, block_tokens[128];
    int32_t tokens[4096];
    uint32_t n_tokens;
};

struct world {
    struct ns_source source;
    struct ns_store store;
    struct job_row *job; /* [MAX_JOBS] */
    int n_jobs, next;
    uint64_t next_fence;
    int finish_retries; /* finish calls that say RETRY first */
    bool finish_breaks; /* and then FATAL */
    bool poll_fails_once;
    bool moved; /* jobs called so are another's now */
    int gate;   /* no job from this one on just now; 0: open */
    _Atomic int n_finish_calls, n_checkpoints;
    const char *cancel_id;
    int64_t pass_limit_ms, store_limit_ms;
    uint32_t tenant_jobs;
    struct ns_metrics *metrics;
    _Atomic int claim_hangs_ms; /* once */
    uint64_t window_bytes;
    int most_out, most_held, most_alone, n_tended;
};

static enum ns_status
poll_world(struct ns_source *source, int timeout_ms, struct ns_message *out,
           struct ns_error *err)
{
    struct world *world = (struct world *)source;
    struct job_row *job;
    int out_now = 0;

    (void)timeout_ms;
    if (world->poll_fails_once) {
        world->poll_fails_once = false;
        return ns_fail(err, NS_RETRY, "the disk hiccups");
    }
    for (int i = 0; i < world->n_jobs; i++)
        out_now += world->job[i].n_handed_out > world->job[i].n_acknowledged;
    if (out_now > world->most_out)
        world->most_out = out_now;
    if (world->gate && world->next >= world->gate) {
        out->kind = NS_MESSAGE_NONE;
        return NS_OK;
    }
    if (world->next == world->n_jobs) {
        out->kind = NS_MESSAGE_END;
        return NS_OK;
    }
    job = &world->job[world->next++];
    job->n_handed_out++;
    *out = (struct ns_message){ .kind = NS_MESSAGE_JOB,
                                .position = { .offset = (uint64_t)world->next },
                                .origin = "test", .bytes = job->json,
                                .length = strlen(job->json) };
    return NS_OK;
}

static void
acknowledge(struct ns_source *source, struct ns_position position)
{
    ((struct world *)source)->job[position.offset - 1].n_acknowledged++;
}

static void
close_nothing(struct ns_source *source)
{
    (void)source;
}

static struct job_row *
row_of(struct world *world, const struct ns_job *job)
{
    return &world->job[job->position.offset - 1];
}

/* Of jobs that must run alone nothing else may be held beside. */
static void
count_held(struct world *world)
{
    int n_held = 0, n_alone = 0;

    for (int i = 0; i < world->n_jobs; i++) {
        n_held += world->job[i].held;
        n_alone += world->job[i].held && world->job[i].stalls >= 2;
    }
    if (n_held > world->most_held)
        world->most_held = n_held;
    if (n_alone > world->most_alone)
        world->most_alone = n_alone;
}

static enum ns_status
claim(struct ns_store *store, struct ns_claim *items, size_t n,
      struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    usleep((useconds_t)atomic_exchange(&world->claim_hangs_ms, 0) * 1000);
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);
        const char *id = items[i].job->id;

        row->n_claims++;
        items[i].stored_mode = items[i].mode;
        items[i].stored_seed = items[i].seed;
        if (row->n_rows > 0) {
            items[i].outcome = NS_CLAIM_FINAL;
        } else if ((strncmp(id, "wait", 4) == 0 ||
                    strncmp(id, "revoked", 7) == 0) &&
                   row->n_claims == 1) {
            items[i].outcome = NS_CLAIM_WAIT;
            items[i].wait_ms = 5;
        } else if (strncmp(id, "final", 5) == 0) {
            row->n_rows = 1;
            items[i].outcome = NS_CLAIM_FINAL;
        } else if (strncmp(id, "conflict", 8) == 0) {
            items[i].outcome = NS_CLAIM_CONFLICT;
            ns_refuse(&items[i].error, "id_conflict", "custom_id", "taken");
        } else {
            items[i].outcome = NS_CLAIM_RUN;
            items[i].fence = row->fence = ++world->next_fence;
            items[i].tokens = row->tokens;
            items[i].n_tokens = row->n_tokens;
            items[i].n_blocks = row->n_blocks;
            items[i].block_tokens = row->block_tokens;
            if (strncmp(id, "poison", 6) == 0)
                row->stalls = 2;
            else if (row->owner == 0 || row->owner == getpid())
                row->stalls = 0;
            else
                row->stalls = row->n_blocks > row->blocks_seen
                                  ? 1
                                  : row->stalls + 1;
            row->owner = getpid();
            row->blocks_seen = row->n_blocks;
            items[i].stalls = row->stalls;
            if (row->stalls > 3) {
                row->n_rows = 1;
                strcpy(row->status, "dead");
                items[i].outcome = NS_CLAIM_FINAL;
                continue;
            }
            row->held = true;
            count_held(world);
        }
    }
    return NS_OK;
}

static enum ns_status
look(struct ns_store *store, struct ns_claim *items, size_t n,
     struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    for (size_t i = 0; i < n; i++)
        items[i].outcome = row_of(world, items[i].job)->n_rows > 0
                               ? NS_CLAIM_FINAL : 0;
    return NS_OK;
}

static enum ns_status
heartbeat(struct ns_store *store, struct ns_heartbeat *items, size_t n,
          struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);

        items[i].outcome = NS_STORE_DONE;
        items[i].cancel = world->cancel_id &&
                          strcmp(items[i].job->id, world->cancel_id) == 0;
        if (strncmp(items[i].job->id, "overtaken", 9) == 0) {
            row->fence = ++world->next_fence; /* someone else has it ... */
            row->n_rows = 1;                  /* ... and is done */
            items[i].outcome = NS_STORE_FENCED;
        }
    }
    return NS_OK;
}

static enum ns_status
checkpoint(struct ns_store *store, struct ns_checkpoint *items, size_t n,
           struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);

        items[i].outcome = NS_STORE_FENCED;
        if (row->fence != items[i].fence)
            continue;
        assert_int_equal(items[i].block, row->n_blocks); /* no hole */
        memcpy(row->tokens + row->n_tokens, items[i].tokens,
               items[i].n_tokens * sizeof(int32_t));
        row->n_tokens += items[i].n_tokens;
        row->block_tokens[row->n_blocks++] = items[i].n_tokens;
        items[i].outcome = NS_STORE_DONE;
        world->n_checkpoints++;
    }
    return NS_OK;
}

static enum ns_status
finish(struct ns_store *store, struct ns_finished *items, size_t n,
       struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    world->n_finish_calls++;
    if (world->finish_retries > 0) {
        world->finish_retries--;
        return ns_fail(err, NS_RETRY, "disk full");
    }
    if (world->finish_breaks)
        return ns_fail(err, NS_FATAL, "the disk is gone");
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);
        const struct ns_result *result = items[i].result;

        items[i].outcome = NS_STORE_FENCED;
        if (row->fence != items[i].fence)
            continue;
        if (strncmp(items[i].job->id, "fenced", 6) == 0 &&
            row->n_claims == 1) {
            row->fence = ++world->next_fence;
            continue;
        }
        row->n_rows++;
        row->held = false;
        snprintf(row->status, sizeof(row->status), "%s",
                 ns_result_status_name(result->status));
        snprintf(row->code, sizeof(row->code), "%s",
                 result->status == NS_RESULT_OK ? "" : result->error.code);
        snprintf(row->content, sizeof(row->content), "%.*s",
                 (int)result->content_length,
                 result->content ? result->content : "");
        assert_non_null(result->engine_rev);
        items[i].outcome = NS_STORE_DONE;
    }
    return NS_OK;
}

static enum ns_status
refuse(struct ns_store *store, struct ns_refusal *items, size_t n,
       struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);

        row->n_rows++;
        strcpy(row->status, "dead");
        snprintf(row->code, sizeof(row->code), "%s", items[i].error.code);
        items[i].outcome = NS_STORE_DONE;
    }
    return NS_OK;
}

static enum ns_status
retry(struct ns_store *store, struct ns_give_back *items, size_t n,
      struct ns_error *err)
{
    struct world *world =
        (struct world *)((char *)store - offsetof(struct world, store));

    (void)err;
    for (size_t i = 0; i < n; i++) {
        struct job_row *row = row_of(world, items[i].job);

        items[i].outcome = row->fence == items[i].fence ? NS_STORE_DONE
                                                        : NS_STORE_FENCED;
        row->n_given_back++;
        row->owner = 0;
        row->held = false;
        row->n_own_fault += items[i].own_fault;
        row->fence = 0;
    }
    return NS_OK;
}

static int64_t
heartbeat_ms(const struct ns_store *store)
{
    (void)store;
    return 2;
}

static enum ns_status
tend(struct ns_source *source, struct ns_error *err)
{
    (void)err;
    ((struct world *)source)->n_tended++;
    return NS_OK;
}

static bool
owns(const struct ns_source *source, struct ns_position position)
{
    const struct world *world = (const struct world *)source;

    const char *id = world->job[position.offset - 1].id;

    return strncmp(id, "revoked", 7) != 0 &&
           (!world->moved || strncmp(id, "moved", 5) != 0);
}

static const struct ns_source_ops source_ops = {
    .name = "test",
    .poll = poll_world,
    .acknowledge = acknowledge,
    .close = close_nothing,
    .tend = tend,
    .owns = owns,
};
static const struct ns_store_ops store_ops = {
    .name = "test",
    .claim = claim,
    .heartbeat = heartbeat,
    .checkpoint = checkpoint,
    .finish = finish,
    .refuse = refuse,
    .retry = retry,
    .heartbeat_ms = heartbeat_ms,
    .look = look,
};

static struct world *
make_world(void)
{
    /* Shared with children that die: what the disk would keep. */
    struct world *world =
        mmap(NULL, sizeof(*world) + MAX_JOBS * sizeof(struct job_row),
             PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(world, MAP_FAILED);
    world->source.ops = &source_ops;
    world->store.ops = &store_ops;
    world->job = (struct job_row *)(world + 1);
    return world;
}

static void
destroy_world(struct world *world)
{
    munmap(world, sizeof(*world) + MAX_JOBS * sizeof(struct job_row));
}

static struct job_row *
add_job(struct world *world, const char *id, uint64_t seed,
        uint32_t max_tokens, const char *ours)
{
    struct job_row *row = &world->job[world->n_jobs++];

    snprintf(row->json, sizeof(row->json),
             "{\"custom_id\":\"%s\",\"method\":\"POST\",\"url\":"
             "\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"
             "\"user\",\"content\":\"hello\"}],\"seed\":%d,\"max_tokens\":%u%s"
             "}}",
             id, (int)seed, max_tokens, ours);
    row->id = id;
    return row;
}

/* A text in parts of 128 tokens. */
static struct job_row *
add_text(struct world *world, const char *id, uint64_t seed)
{
    struct job_row *row = add_job(world, id, seed, 40,
                                  ",\"nightshift\":{\"task\":{\"type\":"
                                  "\"summarize\",\"chunk_tokens\":128}}");
    char *hello = strstr(row->json, "hello"), rest[500];

    snprintf(rest, sizeof(rest), "%s", hello + 5);
    for (int i = 0; i < 60; i++)
        hello += sprintf(hello, "Sentence %d says what it says. ", i);
    strcpy(hello, rest);
    return row;
}

static struct ns_pipeline *
start(struct world *world, struct ns_engine *engine, uint32_t window)
{
    struct ns_pipeline_options options = {
        .engine = engine,
        .source = &world->source,
        .store = &world->store,
        .job = { .canvas_length = BLOCK },
        .model_name = "fake",
        .window = window,
        .max_claims = 2 * MAX_RUNNING,
        .window_bytes = 1 << 20,
        .prepare_threads = 2,
        .tuning = { .default_max_tokens = 64, .poll_ms = 1, .retry_ms = 5,
                    .pass_limit_ms = 60000 },
    };
    struct ns_pipeline *pipeline;
    struct ns_error err;

    if (world->pass_limit_ms)
        options.tuning.pass_limit_ms = world->pass_limit_ms;
    options.tuning.store_limit_ms = world->store_limit_ms;
    options.tuning.tenant_jobs = world->tenant_jobs;
    options.metrics = world->metrics;
    if (world->window_bytes)
        options.window_bytes = world->window_bytes;
    assert_int_equal(ns_pipeline_create(&options, &pipeline, &err), NS_OK);
    return pipeline;
}

static void
turn_to_the_end(struct ns_pipeline *pipeline)
{
    int64_t until = ns_now_ms() + 20000;
    int wait_ms;

    while (ns_pipeline_turn(pipeline, &wait_ms)) {
        assert_true(ns_now_ms() < until); /* it hangs */
        usleep(wait_ms > 1 ? 1000 : 100);
    }
}

static void
run_all(struct world *world, struct ns_engine *engine)
{
    struct ns_pipeline *pipeline = start(world, engine, 32);
    struct ns_error err;

    turn_to_the_end(pipeline);
    assert_int_equal(ns_pipeline_failure(pipeline, &err), NS_OK);
    ns_pipeline_destroy(pipeline);
}

/* --- the tests --------------------------------------------------------- */

static void
every_job_gets_one_row_and_one_acknowledgement(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    static char ids[MAX_JOBS][16];

    (void)state;
    for (int i = 0; i < 300; i++) {
        snprintf(ids[i], sizeof(ids[i]), "job-%d", i);
        add_job(world, ids[i], RUNS, 16 + (uint32_t)i % 70, "");
    }
    world->poll_fails_once = true;
    run_all(world, engine);
    for (int i = 0; i < 300; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_int_equal(world->job[i].n_acknowledged, 1);
        assert_string_equal(world->job[i].status, "ok");
        assert_string_equal(world->job[i].content, "an answer");
    }
    /* Host memory follows the window, not the backlog. */
    assert_true(world->most_out <= 32);
    assert_true(engine->most_running > 1);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_bad_job_costs_one_error_row_and_no_other_job_anything(void **state)
{
    static const struct {
        const char *id;
        uint64_t seed;
        const char *ours, *status, *code;
    } jobs[] = {
        { "good", RUNS, "", "ok", "" },
        { "unfit", NEVER_FITS, "", "failed", "over_memory" },
        { "call", BAD_CALL, "", "failed", "bad_tool_call" },
        { "mode", RUNS, ",\"nightshift\":{\"mode\":\"ar\"}", "dead",
          "unsupported" },
        { "typo", RUNS, ",\"nightshift\":{\"mdoe\":\"ar\"}", "dead",
          "unknown_field" },
        { "late", RUNS, ",\"nightshift\":{\"deadline\":"
          "\"2020-01-01T00:00:00Z\"}", "expired", "expired" },
        { "conflict", RUNS, "", "dead", "id_conflict" },
        { "good-2", RUNS, "", "ok", "" },
    };
    enum { N = sizeof(jobs) / sizeof(jobs[0]) };
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();

    (void)state;
    for (int i = 0; i < N; i++)
        add_job(world, jobs[i].id, jobs[i].seed, 40, jobs[i].ours);
    strcpy(add_job(world, "", RUNS, 1, "")->json, "{\"custom_id\":");
    run_all(world, engine);
    for (int i = 0; i <= N; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_int_equal(world->job[i].n_acknowledged, 1);
        assert_string_equal(world->job[i].status,
                            i < N ? jobs[i].status : "dead");
        assert_string_equal(world->job[i].code,
                            i < N ? jobs[i].code : "bad_json");
    }
    destroy_world(world);
    destroy_engine(engine);
}

static void
jobs_that_must_wait_are_fenced_or_in_trouble_end_all_the_same(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct job_row *waits, *final, *fenced, *trouble, *overtaken, *revoked;

    (void)state;
    waits = add_job(world, "wait", RUNS, 40, "");
    final = add_job(world, "final", RUNS, 40, "");
    fenced = add_job(world, "fenced", RUNS, 40, "");
    trouble = add_job(world, "trouble", TROUBLE_ONCE, 40, "");
    overtaken = add_job(world, "overtaken", SLOW, 1000, "");
    revoked = add_job(world, "revoked", RUNS, 40, "");
    engine->trouble_left = 1;
    world->finish_retries = 2;
    run_all(world, engine);
    assert_true(world->n_tended > 0);
    /* Someone else's by now: neither run nor acknowledged. */
    assert_int_equal(revoked->n_claims, 1);
    assert_int_equal(revoked->n_rows + revoked->n_acknowledged, 0);
    for (int i = 0; i < world->n_jobs - 1; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_int_equal(world->job[i].n_acknowledged, 1);
    }
    assert_int_equal(waits->n_claims, 2);
    assert_int_equal(final->n_claims, 1);
    assert_int_equal(fenced->n_claims, 2);
    assert_int_equal(trouble->n_own_fault, 1);
    assert_string_equal(trouble->status, "ok");
    /* Its row is the other owner's: ours was dropped without a trace. */
    assert_string_equal(overtaken->status, "");
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_cancelled_job_stops_at_its_next_block(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();

    (void)state;
    add_job(world, "long", SLOW, 1000, "");
    world->cancel_id = "long";
    run_all(world, engine);
    assert_string_equal(world->job[0].status, "cancelled");
    assert_int_equal(world->job[0].n_acknowledged, 1);
    assert_true(engine->n_passes < 1000 / BLOCK);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_stop_gives_back_what_runs_and_the_next_start_carries_on(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    uint32_t kept = 0;
    int wait_ms;

    (void)state;
    for (int i = 0; i < 20; i++)
        add_job(world, "long", SLOW, 320, "");
    pipeline = start(world, engine, 12);
    while (world->n_checkpoints < 20 && ns_pipeline_turn(pipeline, &wait_ms))
        usleep(200);
    ns_pipeline_stop(pipeline, 0);
    turn_to_the_end(pipeline);
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < 20; i++) {
        struct job_row *row = &world->job[i];

        assert_int_equal(row->n_acknowledged, row->n_rows);
        assert_int_equal(row->n_own_fault, 0); /* a deploy costs nothing */
        kept += row->n_rows ? 0 : row->n_blocks;
    }
    assert_true(kept > 0);

    for (int i = 0; i < 20; i++)
        world->job[i].n_handed_out = world->job[i].n_acknowledged;
    world->next = 0;
    engine->n_resumed_blocks = 0;
    run_all(world, engine);
    assert_int_equal(engine->n_resumed_blocks, kept);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_true(world->job[i].n_acknowledged >= 1);
        for (uint32_t t = 0; t < world->job[i].n_tokens; t++)
            assert_int_equal(world->job[i].tokens[t], SLOW * 1000 + t);
    }
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_stop_with_grace_lets_what_runs_finish(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    int wait_ms, n_rows = 0;

    (void)state;
    for (int i = 0; i < 200; i++)
        add_job(world, "long", SLOW, 64, "");
    pipeline = start(world, engine, 16);
    while (engine->n_passes < 2 && ns_pipeline_turn(pipeline, &wait_ms))
        usleep(200);
    ns_pipeline_stop(pipeline, 10000);
    turn_to_the_end(pipeline);
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < 200; i++) {
        n_rows += world->job[i].n_rows;
        assert_int_equal(world->job[i].n_acknowledged, world->job[i].n_rows);
    }
    assert_true(n_rows >= 1 && n_rows <= 64);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_broken_engine_stops_everything_and_acknowledges_nothing_unstored(
    void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 40; i++)
        add_job(world, "job", i == 25 ? BREAKS : RUNS, 64, "");
    pipeline = start(world, engine, 16);
    turn_to_the_end(pipeline);
    assert_int_equal(ns_pipeline_failure(pipeline, &err), NS_FATAL);
    assert_string_equal(err.text, "the card fell off");
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < 40; i++)
        assert_int_equal(world->job[i].n_acknowledged, world->job[i].n_rows);
    assert_int_equal(world->job[25].n_rows, 0);
    assert_int_equal(world->job[25].n_own_fault, 0);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_lost_store_stops_everything_and_acknowledges_nothing(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    struct ns_error err;

    (void)state;
    for (int i = 0; i < 40; i++)
        add_job(world, "job", RUNS, 64, "");
    world->finish_breaks = true;
    pipeline = start(world, engine, 16);
    turn_to_the_end(pipeline);
    assert_int_equal(ns_pipeline_failure(pipeline, &err), NS_FATAL);
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < 40; i++)
        assert_int_equal(world->job[i].n_acknowledged, 0);
    assert_int_equal(world->n_finish_calls, 1);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_pipeline_that_is_dropped_in_the_middle_ends_in_order(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    int wait_ms;

    (void)state;
    for (int i = 0; i < 40; i++)
        add_job(world, "job", SLOW, 640, "");
    pipeline = start(world, engine, 16);
    for (int i = 0; i < 20; i++) {
        assert_true(ns_pipeline_turn(pipeline, &wait_ms));
        usleep(500);
    }
    assert_true(ns_pipeline_healthy(pipeline));
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < 40; i++)
        assert_int_equal(world->job[i].n_acknowledged, world->job[i].n_rows);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_job_that_took_the_process_down_before_runs_alone(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();

    (void)state;
    for (int i = 0; i < 6; i++)
        add_job(world, "poison", SLOW, 48, "");
    run_all(world, engine);
    assert_int_equal(engine->most_running, 1);
    assert_int_equal(world->most_held, 1);
    for (int i = 0; i < 6; i++)
        assert_string_equal(world->job[i].status, "ok");
    destroy_world(world);
    destroy_engine(engine);
}

/* Starts again whenever a job has killed it, `n_done` jobs that are done in
 * front of the others each time. */
static void
kill_again_and_again(int n_done)
{
    struct world *world = make_world();
    int status, n_deaths = 0;

    for (int i = 0; i < n_done; i++)
        add_job(world, "final", RUNS, 32, "");
    for (int i = 0; i < 60; i++)
        add_job(world, "job", i == 7 || i == 31 ? KILLS : RUNS, 32, "");
    for (;; n_deaths++) {
        pid_t pid = fork();

        assert_true(pid >= 0 && n_deaths < 30);
        if (pid == 0) { /* a start of the daemon */
            struct ns_engine *engine = make_engine();
            struct ns_pipeline *pipeline = start(world, engine, 32);

            turn_to_the_end(pipeline);
            ns_pipeline_destroy(pipeline);
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WEXITSTATUS(status) == 0)
            break;
        assert_int_equal(WEXITSTATUS(status), 86);
        world->next = 0; /* what was not acknowledged comes again */
        for (int i = 0; i < world->n_jobs; i++)
            world->job[i].held = false;
    }
    assert_in_range(n_deaths, 4, 8); /* four each; the first ones may be shared */
    assert_int_equal(world->most_alone, 1);
    for (int i = n_done; i < world->n_jobs; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_string_equal(world->job[i].status,
                            i - n_done == 7 || i - n_done == 31 ? "dead"
                                                                : "ok");
    }
    /* A long row of them is looked at together, and not claimed. */
    if (n_done > 64)
        assert_true(world->job[n_done - 1].n_claims <= n_deaths);
    destroy_world(world);
}

/* One tenant sends ten windows of jobs and may have one begun; what another
 * sent behind them is done while most of those still wait, and none is lost. */
static void
a_flood_from_one_tenant_stops_no_other(void **state)
{
    enum { WINDOW = 4, FLOOD = 10 * WINDOW, OTHERS = 6 };
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_metrics metrics;
    struct ns_pipeline *pipeline;
    uint64_t most_put_off = 0;
    int n_done, n_before = -1, wait_ms;

    (void)state;
    ns_metrics_init(&metrics);
    world->tenant_jobs = 1;
    world->metrics = &metrics;
    for (int i = 0; i < FLOOD; i++)
        add_job(world, "a", SLOW, 48, ",\"nightshift\":{\"tenant\":\"a\"}");
    for (int i = 0; i < OTHERS; i++)
        add_job(world, "b", RUNS, 16, ",\"nightshift\":{\"tenant\":\"b\"}");
    pipeline = start(world, engine, WINDOW);
    while (ns_pipeline_turn(pipeline, &wait_ms)) {
        uint64_t put_off = atomic_load(&metrics.put_off);

        most_put_off = put_off > most_put_off ? put_off : most_put_off;
        n_done = 0;
        for (int i = FLOOD; i < world->n_jobs; i++)
            n_done += world->job[i].n_rows;
        if (n_done == OTHERS && n_before < 0) {
            n_before = 0;
            for (int i = 0; i < FLOOD; i++)
                n_before += world->job[i].n_rows;
        }
        usleep(wait_ms > 1 ? 1000 : 100);
    }
    assert_in_range(n_before, 0, FLOOD / 2);
    assert_in_range(most_put_off, WINDOW, FLOOD + OTHERS);
    assert_int_equal(atomic_load(&metrics.put_off), 0);
    for (int i = 0; i < world->n_jobs; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_string_equal(world->job[i].status, "ok");
    }
    ns_pipeline_destroy(pipeline);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_job_that_kills_the_process_ends_dead_and_its_neighbours_ok(void **state)
{
    (void)state;
    kill_again_and_again(0);
}

static void
the_same_behind_many_jobs_that_are_read_again(void **state)
{
    (void)state;
    kill_again_and_again(200);
}

static void
no_more_is_begun_than_the_engine_can_soon_take(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;

    (void)state;
    for (int i = 0; i < 200; i++)
        add_job(world, "job", RUNS, 64, "");
    pipeline = start(world, engine, 128);
    turn_to_the_end(pipeline);
    ns_pipeline_destroy(pipeline);
    assert_true(world->most_held > MAX_RUNNING);
    assert_true(world->most_held <= 2 * MAX_RUNNING);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_pass_that_hangs_is_not_healthy(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    bool was_ill = false;
    int wait_ms;

    (void)state;
    add_job(world, "job", HANGS, 16, "");
    world->pass_limit_ms = 100;
    pipeline = start(world, engine, 4);
    assert_true(ns_pipeline_healthy(pipeline));
    while (ns_pipeline_turn(pipeline, &wait_ms)) {
        was_ill = was_ill || !ns_pipeline_healthy(pipeline);
        usleep(1000);
    }
    assert_true(was_ill);
    assert_true(ns_pipeline_healthy(pipeline)); /* it came back */
    ns_pipeline_destroy(pipeline);
    destroy_world(world);
    destroy_engine(engine);
}

static void
a_store_that_hangs_is_not_healthy(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    bool was_ill = false;
    int wait_ms;

    (void)state;
    add_job(world, "job", RUNS, 16, "");
    world->store_limit_ms = 100;
    atomic_store(&world->claim_hangs_ms, 1500);
    pipeline = start(world, engine, 4);
    assert_true(ns_pipeline_healthy(pipeline));
    while (ns_pipeline_turn(pipeline, &wait_ms)) {
        was_ill = was_ill || !ns_pipeline_healthy(pipeline);
        usleep(1000);
    }
    assert_true(was_ill);
    assert_true(ns_pipeline_healthy(pipeline)); /* it came back */
    assert_string_equal(world->job[0].status, "ok");
    ns_pipeline_destroy(pipeline);
    destroy_world(world);
    destroy_engine(engine);
}

static void
what_moved_away_before_it_was_claimed_is_not_begun(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct ns_pipeline *pipeline;
    int64_t until = ns_now_ms() + 20000;
    int wait_ms;

    (void)state;
    for (int i = 0; i < 2 * MAX_RUNNING; i++) /* all that may be claimed */
        add_job(world, "job", SLOW, 1000, "");
    for (int i = 0; i < 8; i++)
        add_job(world, "moved", RUNS, 16, "");
    world->gate = 2 * MAX_RUNNING;
    pipeline = start(world, engine, 32);
    while (engine->most_running < MAX_RUNNING) {
        assert_true(ns_pipeline_turn(pipeline, &wait_ms));
        assert_true(ns_now_ms() < until);
        usleep(1000);
    }
    usleep(50000); /* the others are claimed too, and wait for a place */
    world->gate = 0;
    while (world->next < world->n_jobs) {
        assert_true(ns_pipeline_turn(pipeline, &wait_ms));
        assert_true(ns_now_ms() < until);
    }
    world->moved = true;
    turn_to_the_end(pipeline);
    ns_pipeline_destroy(pipeline);
    for (int i = 0; i < world->n_jobs; i++) {
        bool ours = strcmp(world->job[i].id, "job") == 0;

        assert_int_equal(world->job[i].n_rows, ours);
        assert_int_equal(world->job[i].n_acknowledged, ours);
        assert_int_equal(world->job[i].n_claims, ours);
    }
    destroy_world(world);
    destroy_engine(engine);
}

static void
intake_waits_while_the_window_is_full_of_bytes(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();

    (void)state;
    for (int i = 0; i < 40; i++)
        add_job(world, "job", RUNS, 16, "");
    world->window_bytes = strlen(world->job[0].json) * 3;
    run_all(world, engine);
    assert_true(world->most_out >= 2 && world->most_out <= 3);
    for (int i = 0; i < 40; i++)
        assert_int_equal(world->job[i].n_rows, 1);
    destroy_world(world);
    destroy_engine(engine);
}

static void
assert_idle(const struct ns_engine *engine)
{
    for (int i = 0; i < MAX_RUNNING; i++)
        assert_int_equal(engine->running[i].request.id, 0);
}

/* More parts than the engine holds at a time, beside jobs without. */
static void
texts_in_parts_run_beside_other_jobs_and_each_has_one_row(void **state)
{
    static const char *const ids[] = { "a", "b", "c", "d", "e", "f", "g", "h" };
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();

    (void)state;
    engine->nodes = RUNS;
    for (int i = 0; i < 8; i++)
        if (i % 2)
            add_job(world, ids[i], RUNS, 40, "");
        else
            add_text(world, ids[i], RUNS);
    run_all(world, engine);
    assert_true(engine->n_nodes > 4 * MAX_RUNNING);
    assert_int_equal(engine->most_running, MAX_RUNNING);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(world->job[i].n_rows, 1);
        assert_int_equal(world->job[i].n_acknowledged, 1);
        assert_string_equal(world->job[i].status, "ok");
        assert_string_equal(world->job[i].content, "an answer");
    }
    destroy_world(world);
    destroy_engine(engine);
}

/* Whatever ends a text in parts ends all of its parts. */
static void
parts_end_with_their_text(void **state)
{
    static const struct {
        const char *id;
        enum script nodes;
        const char *status, *code;
        int n_own_fault;
    } ends[] = {
        { "failed", FAILS, "failed", "over_memory", 0 },
        { "cancelled", SLOW, "cancelled", "cancelled", 0 },
        { "overtaken", SLOW, "", "", 0 },
        { "trouble", TROUBLE_ONCE, "ok", "", 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        struct world *world = make_world();
        struct ns_engine *engine = make_engine();
        struct job_row *text = add_text(world, ends[i].id, RUNS);
        struct job_row *other = add_job(world, "other", RUNS, 40, "");

        engine->nodes = ends[i].nodes;
        engine->trouble_left = 1;
        world->cancel_id = "cancelled";
        run_all(world, engine);
        assert_string_equal(text->status, ends[i].status);
        assert_string_equal(text->code, ends[i].code);
        assert_int_equal(text->n_rows, 1);
        assert_int_equal(text->n_acknowledged, 1);
        assert_int_equal(text->n_own_fault, ends[i].n_own_fault);
        assert_string_equal(other->status, "ok");
        reap(engine);
        assert_idle(engine);
        destroy_world(world);
        destroy_engine(engine);
    }
}

/* Stopped again and again in the midst of its parts: none that was done is made
 * again. */
static void
a_stop_keeps_the_parts_that_are_done(void **state)
{
    struct world *world = make_world();
    struct ns_engine *engine = make_engine();
    struct job_row *text = add_text(world, "text", RUNS);
    int n_nodes, n_starts = 0;

    (void)state;
    engine->nodes = RUNS;
    run_all(world, engine);
    n_nodes = engine->n_nodes;
    assert_string_equal(text->status, "ok");
    assert_true(n_nodes > MAX_RUNNING);
    *text = (struct job_row){ 0 };
    world->n_jobs = world->next = 0;
    add_text(world, "text", RUNS);
    engine->nodes = SLOW;
    engine->n_nodes = 0;
    while (text->n_rows == 0) {
        struct ns_pipeline *pipeline = start(world, engine, 4);
        int wait_ms, n_passes = engine->n_passes;

        assert_true(++n_starts <= n_nodes + 3);
        while (ns_pipeline_turn(pipeline, &wait_ms)) {
            if (engine->n_passes > n_passes + 4)
                ns_pipeline_stop(pipeline, 0);
            usleep(200);
        }
        ns_pipeline_destroy(pipeline);
        reap(engine);
        assert_idle(engine);
        world->next = 0;
    }
    assert_true(n_starts > 2);
    assert_string_equal(text->status, "ok");
    assert_string_equal(text->content, "an answer");
    /* Of each start at most what ran when it was stopped was in vain. */
    assert_true(engine->n_nodes >= n_nodes);
    assert_true(engine->n_nodes <= n_nodes + (n_starts - 1) * MAX_RUNNING);
    destroy_world(world);
    destroy_engine(engine);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_job_gets_one_row_and_one_acknowledgement),
        cmocka_unit_test(
            a_bad_job_costs_one_error_row_and_no_other_job_anything),
        cmocka_unit_test(
            jobs_that_must_wait_are_fenced_or_in_trouble_end_all_the_same),
        cmocka_unit_test(a_cancelled_job_stops_at_its_next_block),
        cmocka_unit_test(
            a_stop_gives_back_what_runs_and_the_next_start_carries_on),
        cmocka_unit_test(a_stop_with_grace_lets_what_runs_finish),
        cmocka_unit_test(
            a_broken_engine_stops_everything_and_acknowledges_nothing_unstored),
        cmocka_unit_test(
            a_lost_store_stops_everything_and_acknowledges_nothing),
        cmocka_unit_test(
            a_pipeline_that_is_dropped_in_the_middle_ends_in_order),
        cmocka_unit_test(a_job_that_took_the_process_down_before_runs_alone),
        cmocka_unit_test(a_flood_from_one_tenant_stops_no_other),
        cmocka_unit_test(
            a_job_that_kills_the_process_ends_dead_and_its_neighbours_ok),
        cmocka_unit_test(the_same_behind_many_jobs_that_are_read_again),
        cmocka_unit_test(no_more_is_begun_than_the_engine_can_soon_take),
        cmocka_unit_test(a_pass_that_hangs_is_not_healthy),
        cmocka_unit_test(a_store_that_hangs_is_not_healthy),
        cmocka_unit_test(what_moved_away_before_it_was_claimed_is_not_begun),
        cmocka_unit_test(intake_waits_while_the_window_is_full_of_bytes),
        cmocka_unit_test(
            texts_in_parts_run_beside_other_jobs_and_each_has_one_row),
        cmocka_unit_test(parts_end_with_their_text),
        cmocka_unit_test(a_stop_keeps_the_parts_that_are_done),
    };

    ns_log_set_level(NS_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
