#include "daemon/deliver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/parts.h"
#include "daemon/work.h"

enum {
    BATCH = 64,
    BACKOFF_MS = 50, /* the first wait for a store that is away, at most */
    BACKOFF_CAP_MS = 5000, /* unless daemon.store_retry says otherwise */
    GRACE_MS = 5000, /* for a store in trouble, behind the end of a stop */
    HEARTBEAT_MS = 1000,
    REPLAY = 32, /* jobs done before, in a row: so may those behind them be */
};

/* Whose jobs wait or are begun. There while it has one. */
struct ns_tenant {
    const char *name; /* behind the struct */
    size_t n_works, n_held;
    struct ns_tenant *next;
};

struct deliver {
    struct ns_pipeline *pipeline;
    struct ns_store *store;
    struct ns_work *held; /* works whose claim is ours */
    size_t n_held;
    struct ns_work *waiting; /* to be claimed, in that order */
    struct ns_work *last;    /* of them; unset when there are none */
    struct ns_tenant *tenants;
    size_t n_runs;           /* claims that were ours, up to a window's worth */
    size_t n_final;          /* in a row: jobs that were done before */
    struct ns_work *alone;   /* held; nothing is claimed beside it */
    int64_t every_ms, heartbeat_at_ms;
    bool lost; /* the store is of no more use */
    uint64_t jitter;

    struct ns_errand *batch[BATCH];
    size_t n;
};

/* --- whose they are ----------------------------------------------------- */

static const char *
tenant_of(const struct ns_work *work)
{
    return work->job->tenant ? work->job->tenant : "default";
}

/* False: memory. */
static bool
join_tenant(struct deliver *deliver, struct ns_work *work)
{
    const char *name = tenant_of(work);
    struct ns_tenant *tenant = deliver->tenants;

    while (tenant && strcmp(tenant->name, name) != 0)
        tenant = tenant->next;
    if (!tenant) {
        tenant = calloc(1, sizeof(*tenant) + strlen(name) + 1);
        if (!tenant)
            return false;
        tenant->name = strcpy((char *)(tenant + 1), name);
        tenant->next = deliver->tenants;
        deliver->tenants = tenant;
    }
    tenant->n_works++;
    work->tenant = tenant;
    return true;
}

static void
put_off(struct deliver *deliver, struct ns_work *work, bool is_off)
{
    struct ns_pipeline *pipeline = deliver->pipeline;

    if (work->put_off == is_off)
        return;
    work->put_off = is_off;
    if (is_off) {
        atomic_fetch_add(&pipeline->n_put_off, 1);
        atomic_fetch_add(&pipeline->bytes_put_off, work->length);
    } else {
        atomic_fetch_sub(&pipeline->n_put_off, 1);
        atomic_fetch_sub(&pipeline->bytes_put_off, work->length);
    }
    atomic_store(&pipeline->metrics->put_off,
                 atomic_load(&pipeline->n_put_off));
}

static void
leave_tenant(struct deliver *deliver, struct ns_work *work)
{
    struct ns_tenant *tenant = work->tenant, **at = &deliver->tenants;

    put_off(deliver, work, false);
    work->tenant = NULL;
    if (!tenant || --tenant->n_works > 0)
        return;
    while (*at != tenant)
        at = &(*at)->next;
    *at = tenant->next;
    free(tenant);
}

/* Over its share a tenant waits, and so does one that is paused; the jobs of
 * others go past them. */
static bool
may_begin(const struct deliver *deliver, const struct ns_tenant *tenant,
          size_t n_chosen, uint32_t share)
{
    const struct ns_store *store = deliver->store;

    return (share == 0 || tenant->n_held + n_chosen < share) &&
           (!store->ops->may_claim ||
            store->ops->may_claim(store, tenant->name));
}

/* --- the claims that are ours ------------------------------------------ */

static void
hold(struct deliver *deliver, struct ns_work *work)
{
    work->next_held = deliver->held;
    work->previous_held = NULL;
    if (deliver->held)
        deliver->held->previous_held = work;
    deliver->held = work;
    deliver->n_held++;
    work->tenant->n_held++;
    work->held = true;
}

static void
let_go(struct deliver *deliver, struct ns_work *work)
{
    if (!work->held)
        return;
    if (work->previous_held)
        work->previous_held->next_held = work->next_held;
    else
        deliver->held = work->next_held;
    if (work->next_held)
        work->next_held->previous_held = work->previous_held;
    deliver->n_held--;
    work->tenant->n_held--;
    work->held = false;
    leave_tenant(deliver, work);
    if (deliver->alone == work)
        deliver->alone = NULL;
}

/* --- asking ------------------------------------------------------------ */

static uint32_t
jitter(struct deliver *deliver)
{
    deliver->jitter = deliver->jitter * 6364136223846793005u +
                      1442695040888963407u;
    return (uint32_t)(deliver->jitter >> 32);
}

/* Whether a call that the world made fail is to be made again, after a wait. */
static bool
again(struct deliver *deliver, unsigned n_tries, const struct ns_error *err)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    int64_t cap_ms = ns_pipeline_tuning(pipeline).store_retry_ms;
    int64_t delay = ns_backoff_ms(n_tries + 1, BACKOFF_MS,
                                  cap_ms > 0 ? cap_ms : BACKOFF_CAP_MS,
                                  jitter(deliver));

    if (n_tries == 0)
        ns_log_warn("store.retry", "store=%s error=\"%s\"",
                    deliver->store->ops->name, err->text);
    for (int64_t until = ns_now_ms() + delay;; usleep(10000)) {
        int64_t stop_ms = atomic_load(&pipeline->stop_ms);

        if (stop_ms != INT64_MAX && ns_now_ms() > stop_ms + GRACE_MS)
            return false;
        if (ns_now_ms() >= until)
            return true;
    }
}

enum operation { CLAIM, LOOK, HEARTBEAT, CHECKPOINT, FINISH, REFUSE, GIVE_BACK };

static enum ns_status
ask_once(struct deliver *deliver, enum operation operation, void *items,
         size_t n, struct ns_error *err)
{
    struct ns_store *store = deliver->store;

    switch (operation) {
    case CLAIM:
        return store->ops->claim(store, items, n, err);
    case LOOK:
        return store->ops->look(store, items, n, err);
    case HEARTBEAT:
        return store->ops->heartbeat(store, items, n, err);
    case CHECKPOINT:
        return store->ops->checkpoint(store, items, n, err);
    case FINISH:
        return store->ops->finish(store, items, n, err);
    case REFUSE:
        return store->ops->refuse(store, items, n, err);
    case GIVE_BACK:
        return store->ops->retry(store, items, n, err);
    }
    return ns_fail(err, NS_FATAL, "operation %d of a store", (int)operation);
}

static void heartbeat(struct deliver *deliver);

/* One operation over `n` items until it is answered. False: the store is lost,
 * and with it the outcomes. */
static bool
ask(struct deliver *deliver, enum operation operation, void *items, size_t n)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    struct ns_error err = { 0 };
    enum ns_status status = NS_OK;

    for (unsigned n_tries = 0; n > 0; n_tries++) {
        /* Our leases may have run out meanwhile, and what is claimed be the
         * second message of a job that we hold: it would take it from us. */
        if (operation == CLAIM && n_tries > 0)
            heartbeat(deliver);
        if (deliver->lost)
            return false;
        atomic_store(&pipeline->store_since_ms, ns_now_ms());
        status = ask_once(deliver, operation, items, n, &err);
        atomic_store(&pipeline->store_since_ms, 0);
        atomic_store(&pipeline->metrics->store_away, status == NS_RETRY);
        if (status == NS_OK && n_tries > 0)
            ns_log_info("store.back", "store=%s tries=%u",
                        deliver->store->ops->name, n_tries);
        if (status != NS_RETRY || !again(deliver, n_tries, &err))
            break;
    }
    if (status == NS_OK)
        return true;
    ns_pipeline_fail(pipeline, &err);
    deliver->lost = true;
    return false;
}

/* The works of this batch that came for `action`, in the order they came. */
static size_t
works_for(struct deliver *deliver, enum ns_job_action action,
          struct ns_work *out[BATCH])
{
    size_t n = 0;

    for (size_t i = 0; i < deliver->n; i++)
        if (deliver->batch[i]->action == action)
            out[n++] = (struct ns_work *)deliver->batch[i];
    return n;
}

/* --- the operations ---------------------------------------------------- */

/* Works that this batch moves on are then another thread's: each operation
 * looks at its works for the last time when it advances them. */

static void
count_checkpoints(struct deliver *deliver, const struct ns_checkpoint *items,
             size_t n)
{
    struct ns_metrics *metrics = deliver->pipeline->metrics;

    for (size_t i = 0; i < n; i++)
        atomic_fetch_add(items[i].outcome == NS_STORE_FENCED
                             ? &metrics->fenced
                             : &metrics->checkpoints, 1);
}

static void
checkpoint(struct deliver *deliver)
{
    struct ns_checkpoint items[BATCH];
    size_t n = 0;

    for (size_t at = 0; at < deliver->n; at++) {
        struct ns_blocks *blocks = (struct ns_blocks *)deliver->batch[at];
        const int32_t *tokens;

        if (blocks->errand.action != NS_DO_CHECKPOINT)
            continue;
        tokens = blocks->tokens.id;
        for (uint32_t b = 0; b < blocks->n; b++) {
            items[n++] = (struct ns_checkpoint){
                .job = blocks->work->job,
                .fence = blocks->work->claim.fence,
                .block = blocks->first + b,
                .tokens = tokens,
                .n_tokens = blocks->length[b],
            };
            tokens += blocks->length[b];
            if (n == BATCH && ask(deliver, CHECKPOINT, items, n))
                count_checkpoints(deliver, items, n);
            if (n == BATCH)
                n = 0;
        }
    }
    if (ask(deliver, CHECKPOINT, items, n))
        count_checkpoints(deliver, items, n);
    for (size_t at = 0; at < deliver->n; at++)
        if (deliver->batch[at]->action == NS_DO_CHECKPOINT) {
            struct ns_blocks *blocks = (struct ns_blocks *)deliver->batch[at];

            atomic_store(&blocks->work->saving, false);
            ns_blocks_destroy(blocks);
        }
}

static void
finish(struct deliver *deliver, struct ns_work *const *works, size_t n)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    struct ns_finished items[BATCH];
    bool answered;

    for (size_t i = 0; i < n; i++)
        items[i] = (struct ns_finished){ .job = works[i]->job,
                                       .fence = works[i]->claim.fence,
                                       .result = &works[i]->result };
    answered = ask(deliver, FINISH, items, n);
    for (size_t i = 0; i < n; i++) {
        let_go(deliver, works[i]);
        if (!answered) {
            ns_work_advance(pipeline, works[i], NS_ON_LOST);
        } else if (items[i].outcome == NS_STORE_FENCED) {
            atomic_fetch_add(&pipeline->metrics->fenced, 1);
            atomic_store(&works[i]->fenced, true);
            ns_work_advance(pipeline, works[i], NS_ON_FENCED);
        } else {
            ns_metrics_ended(pipeline->metrics, works[i]->result.status,
                             works[i]->result.error.code);
            ns_work_advance(pipeline, works[i], NS_ON_STORED);
        }
    }
}

static void
refuse(struct deliver *deliver, struct ns_work *const *works, size_t n)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    struct ns_refusal items[BATCH];
    bool answered;

    for (size_t i = 0; i < n; i++)
        items[i] = (struct ns_refusal){ .job = works[i]->job,
                                        .error = works[i]->error,
                                        .payload = works[i]->message.bytes,
                                        .payload_length = works[i]->length };
    answered = ask(deliver, REFUSE, items, n);
    for (size_t i = 0; i < n; i++) {
        if (answered)
            ns_metrics_ended(pipeline->metrics, NS_RESULT_DEAD,
                             items[i].error.code);
        ns_work_advance(pipeline, works[i],
                        answered ? NS_ON_STORED : NS_ON_LOST);
    }
}

static void
give_back(struct deliver *deliver, struct ns_work *const *works, size_t n)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    int64_t base_ms = ns_pipeline_tuning(pipeline).retry_ms;
    struct ns_give_back items[BATCH];
    bool answered;

    for (size_t i = 0; i < n; i++) {
        struct ns_work *work = works[i];
        bool own = !work->state.stopping && !atomic_load(&work->fenced);

        work->claim.wait_ms =
            own ? ns_backoff_ms(work->state.troubles, base_ms, NS_RETRY_CAP_MS,
                                jitter(deliver))
                : 0;
        items[i] = (struct ns_give_back){
            .job = work->job,
            .fence = work->claim.fence,
            .delay_ms = work->claim.wait_ms,
            .own_fault = own && !work->blameless,
            .code = own ? work->error.code : "stopped",
        };
        if (own) {
            char id[256];

            atomic_fetch_add(&pipeline->metrics->retries, 1);
            ns_log_warn("job.retry", "job=%s code=%s delay_ms=%lld error=\"%s\"",
                        ns_log_escape(work->job->id, strlen(work->job->id), id,
                                      sizeof(id)),
                        work->error.code, (long long)work->claim.wait_ms,
                        work->error.text);
        }
    }
    answered = ask(deliver, GIVE_BACK, items, n);
    for (size_t i = 0; i < n; i++) {
        let_go(deliver, works[i]);
        ns_work_advance(pipeline, works[i],
                        !answered ? NS_ON_LOST
                        : items[i].outcome == NS_STORE_FENCED ? NS_ON_FENCED
                                                              : NS_ON_STORED);
    }
}

/* Keeps the leases, and hears who lost his and who is to be cancelled. The
 * list may be longer than a batch: each call takes the next ones. */
static void
heartbeat(struct deliver *deliver)
{
    struct ns_heartbeat items[BATCH];
    struct ns_work *works[BATCH], *work = deliver->held;
    size_t n;

    deliver->heartbeat_at_ms = ns_now_ms() + deliver->every_ms;
    while (work) {
        for (n = 0; work && n < BATCH; work = work->next_held) {
            items[n] = (struct ns_heartbeat){ .job = work->job,
                                              .fence = work->claim.fence };
            works[n++] = work;
        }
        if (!ask(deliver, HEARTBEAT, items, n))
            return;
        for (size_t i = 0; i < n; i++) {
            if (items[i].cancel)
                atomic_store(&works[i]->cancel, true);
            if (items[i].outcome == NS_STORE_FENCED) {
                atomic_store(&works[i]->fenced, true);
                let_go(deliver, works[i]);
            }
        }
    }
}

/* --- claims, one poisoned job among them perhaps ------------------------ */

/* A job that takes the process down takes all claims down with it, and each of
 * them counts one stall. So that only the guilty one ends for it:
 *
 *   - no more is claimed than the engine can soon take;
 *   - a job with two stalls is claimed alone, and nothing beside it: what it
 *     takes down next time is only itself;
 *   - the first claims of a process, which may be those that the last one left
 *     behind, are made one by one, so that the rule above can hold for each.
 *
 * A topic that is read again holds jobs that are done, perhaps a million, and a
 * round trip for each takes hours. Those are looked for many at a time: that
 * claims nothing.
 */

static bool
goes_before(const struct ns_job *a, const struct ns_job *b)
{
    int64_t a_by = a->has_deadline ? a->deadline_ms : INT64_MAX;
    int64_t b_by = b->has_deadline ? b->deadline_ms : INT64_MAX;

    if (a->priority != b->priority)
        return a->priority > b->priority;
    return a_by < b_by;
}

static void
add_waiting(struct deliver *deliver, struct ns_work *work)
{
    struct ns_work **at = &deliver->waiting;

    if (!join_tenant(deliver, work)) { /* the message comes again */
        ns_fail(&work->error, NS_FATAL, "out of memory for a tenant");
        ns_pipeline_fail(deliver->pipeline, &work->error);
        ns_work_advance(deliver->pipeline, work, NS_ON_LOST);
        return;
    }
    /* Most go behind all others, however many those are. */
    if (*at && !goes_before(work->job, deliver->last->job))
        at = &deliver->last->next;
    while (*at && !goes_before(work->job, (*at)->job))
        at = &(*at)->next;
    work->next = *at;
    *at = work;
    if (!work->next)
        deliver->last = work;
}

static void
claimed(struct deliver *deliver, struct ns_work *work)
{
    struct ns_pipeline *pipeline = deliver->pipeline;

    switch (work->claim.outcome) {
    case NS_CLAIM_RUN:
        if (deliver->n_runs < pipeline->options.window)
            deliver->n_runs++;
        deliver->n_final = 0;
        hold(deliver, work);
        free((void *)work->message.bytes); /* it will not be refused now */
        work->message.bytes = NULL;
        if (work->claim.stalls >= NS_ALONE_FROM && !deliver->alone)
            deliver->alone = work;
        work->attempt = work->spent_passes = work->spent_steps = 0;
        ns_parts_destroy(work->parts); /* of an earlier try */
        work->parts = NULL;
        work->n_blocks = work->claim.n_blocks;
        atomic_fetch_add(&pipeline->metrics->blocks_dropped,
                         work->claim.n_dropped);
        ns_work_advance(pipeline, work, NS_ON_CLAIM_RUN);
        return;
    case NS_CLAIM_WAIT:
        ns_work_advance(pipeline, work, NS_ON_CLAIM_WAIT);
        return;
    case NS_CLAIM_FINAL:
        if (work->claim.given_up)
            ns_metrics_ended(pipeline->metrics, work->claim.ended,
                             work->claim.ended_code);
        else
            atomic_fetch_add(&pipeline->metrics->duplicates, 1);
        deliver->n_final++;
        ns_work_advance(pipeline, work, NS_ON_CLAIM_FINAL);
        return;
    case NS_CLAIM_CONFLICT:
        work->error = work->claim.error;
        ns_work_advance(pipeline, work, NS_ON_CLAIM_CONFLICT);
        return;
    }
    ns_fail(&work->error, NS_FATAL, "the store answered a claim with %d",
            (int)work->claim.outcome);
    ns_pipeline_fail(pipeline, &work->error);
    ns_work_advance(pipeline, work, NS_ON_LOST);
}

static void
claim(struct deliver *deliver, struct ns_work *const *works, size_t n)
{
    struct ns_claim items[BATCH];
    bool answered;

    for (size_t i = 0; i < n; i++) {
        items[i] = (struct ns_claim){ .job = works[i]->job,
                                      .mode = works[i]->claim.mode,
                                      .seed = works[i]->claim.seed };
        atomic_store(&works[i]->fenced, false);
        atomic_store(&works[i]->cancel, false);
    }
    answered = ask(deliver, CLAIM, items, n);
    for (size_t i = 0; i < n; i++) {
        if (!answered || items[i].outcome != NS_CLAIM_RUN)
            leave_tenant(deliver, works[i]);
        if (!answered) {
            ns_work_advance(deliver->pipeline, works[i], NS_ON_LOST);
            continue;
        }
        works[i]->claim = items[i];
        atomic_store(&works[i]->cancel, items[i].cancel);
        works[i]->clock_shift_ms =
            items[i].clock_ms ? items[i].clock_ms - ns_unix_now_ms() : 0;
        claimed(deliver, works[i]);
    }
}

/* The next works that may be begun, in their order, off the list. */
static size_t
choose(struct deliver *deliver, struct ns_work *works[BATCH], size_t most)
{
    uint32_t share = ns_pipeline_tuning(deliver->pipeline).tenant_jobs;
    struct ns_work **at = &deliver->waiting, *before = NULL, *work;
    size_t n = 0, n_same;

    while (n < most && (work = *at) != NULL) {
        bool moved = atomic_load(&work->moved);

        n_same = 0;
        for (size_t i = 0; i < n; i++)
            n_same += works[i]->tenant == work->tenant;
        if (!moved && !may_begin(deliver, work->tenant, n_same, share)) {
            put_off(deliver, work, true);
            before = work;
            at = &work->next;
            continue;
        }
        put_off(deliver, work, false);
        *at = work->next;
        if (deliver->last == work)
            deliver->last = before;
        if (moved) {
            leave_tenant(deliver, work);
            ns_work_advance(deliver->pipeline, work, NS_ON_STOP);
        } else {
            works[n++] = work;
        }
    }
    return n;
}

/* Takes those of the next that are done already off the list. False: none. */
static bool
pass_over_done(struct deliver *deliver)
{
    struct ns_claim items[BATCH];
    struct ns_work **at = &deliver->waiting, *before = NULL, *work;
    size_t n = 0, n_done = 0;

    if (!deliver->store->ops->look)
        return false;
    for (work = *at; work && n < BATCH; work = work->next)
        items[n++] = (struct ns_claim){ .job = work->job };
    if (!ask(deliver, LOOK, items, n))
        return false; /* the claims will find out, too */
    for (size_t i = 0; i < n; i++) {
        work = *at;
        if (items[i].outcome != NS_CLAIM_FINAL) {
            deliver->n_final = 0;
            before = work;
            at = &work->next;
            continue;
        }
        *at = work->next;
        if (deliver->last == work)
            deliver->last = before;
        leave_tenant(deliver, work);
        work->claim.outcome = NS_CLAIM_FINAL;
        work->claim.given_up = false;
        claimed(deliver, work);
        n_done++;
    }
    return n_done > 0;
}

static void
claim_waiting(struct deliver *deliver)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    size_t most = pipeline->options.max_claims, n, batch;
    struct ns_work *works[BATCH], *work;

    while (ns_pipeline_stopping(pipeline) && (work = deliver->waiting)) {
        /* Nothing is begun that would be given back at once. */
        deliver->waiting = work->next;
        leave_tenant(deliver, work);
        ns_work_advance(pipeline, work, NS_ON_STOP);
    }
    while (deliver->waiting && !deliver->alone && deliver->n_held < most &&
           !atomic_load(&pipeline->paused)) {
        if (deliver->n_final >= REPLAY && pass_over_done(deliver))
            continue;
        /* As where a call is made again: behind an answer that took long. */
        if (ns_now_ms() >= deliver->heartbeat_at_ms)
            heartbeat(deliver);
        batch = deliver->n_runs < pipeline->options.window ? 1 : BATCH;
        if (batch > most - deliver->n_held)
            batch = most - deliver->n_held;
        n = choose(deliver, works, batch);
        if (n == 0)
            break;
        claim(deliver, works, n);
    }
}

/* So that an idle daemon knows, and says, that it could not take a job in, and
 * each hears of a pause. What is wrong for good is left to the first operation
 * to find. */
static void
tend(struct deliver *deliver)
{
    struct ns_pipeline *pipeline = deliver->pipeline;
    struct ns_store *store = deliver->store;
    _Atomic uint64_t *away = &pipeline->metrics->store_away;
    struct ns_error err = { 0 };
    bool was_away = atomic_load(away), is_away;

    if (deliver->lost || ns_pipeline_stopping(pipeline))
        return;
    atomic_store(&pipeline->store_since_ms, ns_now_ms());
    is_away = store->ops->tend(store, &err) != NS_OK;
    atomic_store(&pipeline->store_since_ms, 0);
    atomic_store(away, is_away);
    if (is_away && !was_away)
        ns_log_warn("store.away", "store=%s error=\"%s\"", store->ops->name,
                    err.text);
    if (!is_away && was_away)
        ns_log_info("store.back", "store=%s", store->ops->name);
}

static void
handle(struct deliver *deliver)
{
    struct ns_work *to_claim[BATCH];
    /* Sorted out before the first is advanced: behind that the errand of a
     * work says what its next holder is to do. */
    struct ns_work *finished[BATCH], *refused[BATCH], *given_back[BATCH];
    size_t n_finished, n_refused, n_given_back, n;

    n_finished = works_for(deliver, NS_DO_FINISH, finished);
    n_refused = works_for(deliver, NS_DO_REFUSE, refused);
    n_given_back = works_for(deliver, NS_DO_GIVE_BACK, given_back);
    n = works_for(deliver, NS_DO_CLAIM, to_claim);
    checkpoint(deliver);
    finish(deliver, finished, n_finished);
    refuse(deliver, refused, n_refused);
    give_back(deliver, given_back, n_given_back);
    for (size_t i = 0; i < n; i++)
        add_waiting(deliver, to_claim[i]);
    claim_waiting(deliver);
}

void *
ns_deliver_thread(void *data)
{
    struct ns_pipeline *pipeline = data;
    struct deliver deliver = { .pipeline = pipeline,
                               .store = pipeline->options.store,
                               .jitter = pipeline->jitter };
    struct ns_errand *errand;
    bool asks = deliver.store->ops->tend != NULL;
    int64_t wait_ms;

    deliver.every_ms = deliver.store->ops->heartbeat_ms(deliver.store);
    if (deliver.every_ms <= 0 || deliver.every_ms > HEARTBEAT_MS)
        deliver.every_ms = HEARTBEAT_MS;
    deliver.heartbeat_at_ms = ns_now_ms() + deliver.every_ms;
    for (;;) {
        wait_ms = -1;
        if (deliver.held || asks || deliver.waiting) {
            wait_ms = deliver.heartbeat_at_ms - ns_now_ms();
            if (wait_ms < 0)
                wait_ms = 0;
        }
        errand = ns_queue_pop(pipeline->to_sink, (int)wait_ms);
        if (!errand && (wait_ms < 0 || ns_now_ms() < deliver.heartbeat_at_ms))
            return NULL; /* closed and empty */
        for (deliver.n = 0; errand; ) {
            deliver.batch[deliver.n++] = errand;
            errand = deliver.n < BATCH ? ns_queue_pop(pipeline->to_sink, 0)
                                       : NULL;
        }
        if (deliver.n > 0)
            handle(&deliver);
        if (ns_now_ms() >= deliver.heartbeat_at_ms) {
            heartbeat(&deliver);
            if (asks)
                tend(&deliver);
            claim_waiting(&deliver); /* a stop lets them go */
        }
    }
}
