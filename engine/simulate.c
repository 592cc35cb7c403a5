#include "engine/simulate.h"

#include <stdlib.h>
#include <string.h>

#include "engine/backlog.h"
#include "engine/planner.h"

enum { NONE = -1 };

/* A shared prefix: absent, being computed by one sequence, or ready. */
struct prefix {
    uint64_t id;
    uint32_t tokens;
    uint32_t holders;  /* sequences that run on it */
    uint32_t to_come;  /* jobs of it that have not started */
    bool there, ready;
    int32_t previous, next; /* in the idle list, oldest first */
    bool idle;
    struct sequence *waiting; /* for the one that computes it */
    struct prefix *next_awaited; /* of those with someone waiting */
};

struct sequence {
    struct ns_sim_job *job;
    struct prefix *prefix; /* NULL: shares nothing */
    uint64_t number;
    int64_t step; /* of aging, like the backlog's */
    uint32_t cached, encode, answer_left, steps_left;
    float owed; /* of a step, so that fractions of steps add up */
    bool prefill, drafted, conditioned, finished;
    double bytes; /* its own part of the memory */
    struct sequence *next;
};

struct simulation {
    const struct ns_sim_machine *machine;
    const struct ns_sim_policy *policy;
    struct ns_sim_report *report;
    struct ns_backlog *backlog;
    struct sequence *all; /* [n], one a job */
    struct sequence **arriving; /* [n] by arrival */
    size_t n, next_arrival;
    struct prefix *prefix;
    size_t n_prefixes;
    int32_t idle_first, idle_last;

    struct sequence **running; /* in rank order */
    struct ns_want *want;
    struct ns_grant *grant;
    uint32_t n_running, n_held; /* held: wait for a prefix */
    struct prefix *awaited;
    double now, bytes; /* bytes: taken by all, idle prefixes too */
    double row_s[3];
};

/* ---- memory ------------------------------------------------------------ */

static double
page_up(double positions)
{
    double pages = (double)(uint64_t)((positions + NS_PAGE - 1) / NS_PAGE);

    return pages * NS_PAGE;
}

static double
prefix_bytes(const struct ns_cost_shape *shape, uint32_t tokens)
{
    uint32_t near = tokens < shape->window ? tokens : shape->window;

    return shape->full_bytes * tokens + shape->sliding_bytes * near;
}

static double
own_bytes(const struct simulation *sim, const struct ns_sim_job *job,
          uint32_t shared)
{
    const struct ns_cost_shape *shape = &sim->machine->shape;
    double all = (double)job->prompt + job->answer + job->canvas_length;
    double near = (double)shape->window + shape->canvas_length;

    all = page_up(all - shared);
    return shape->full_bytes * all +
           shape->sliding_bytes * (all < near ? all : near) +
           (job->mode == NS_MODE_AR ? 0 : shape->state_bytes);
}

static void
unlink_idle(struct simulation *sim, struct prefix *prefix)
{
    if (prefix->previous != NONE)
        sim->prefix[prefix->previous].next = prefix->next;
    else
        sim->idle_first = prefix->next;
    if (prefix->next != NONE)
        sim->prefix[prefix->next].previous = prefix->previous;
    else
        sim->idle_last = prefix->previous;
    prefix->idle = false;
}

static void
drop_prefix(struct simulation *sim, struct prefix *prefix)
{
    if (prefix->idle)
        unlink_idle(sim, prefix);
    sim->bytes -= prefix_bytes(&sim->machine->shape, prefix->tokens);
    prefix->there = prefix->ready = false;
}

/* The last that ran on it has ended: kept while others are to come. */
static void
idle_prefix(struct simulation *sim, struct prefix *prefix)
{
    if (prefix->to_come == 0) {
        drop_prefix(sim, prefix);
        return;
    }
    prefix->idle = true;
    prefix->previous = sim->idle_last;
    prefix->next = NONE;
    if (sim->idle_last != NONE)
        sim->prefix[sim->idle_last].next = (int32_t)(prefix - sim->prefix);
    else
        sim->idle_first = (int32_t)(prefix - sim->prefix);
    sim->idle_last = (int32_t)(prefix - sim->prefix);
}

/* Makes room for `bytes` out of idle prefixes other than `keep`. */
static bool
make_room(struct simulation *sim, double bytes, const struct prefix *keep)
{
    int32_t at = sim->idle_first;

    while (sim->bytes + bytes > sim->machine->memory_bytes && at != NONE) {
        struct prefix *prefix = &sim->prefix[at];

        at = prefix->next;
        if (prefix != keep)
            drop_prefix(sim, prefix);
    }
    return sim->bytes + bytes <= sim->machine->memory_bytes;
}

/* ---- in and out -------------------------------------------------------- */

/* < 0: a is on a higher level than b, as the planner has it. */
static int
compare_levels(const struct sequence *a, const struct sequence *b, bool ranked)
{
    double x = a->job->deadline_s, y = b->job->deadline_s;

    if (!ranked)
        return 0;
    if (a->step != b->step)
        return a->step < b->step ? -1 : 1;
    if (x == y)
        return 0;
    return y == 0 || (x != 0 && x < y) ? -1 : 1;
}

static bool
outranks(const struct sequence *a, const struct sequence *b, bool ranked)
{
    int order = compare_levels(a, b, ranked);
    double x = (double)a->job->prompt + a->job->answer;
    double y = (double)b->job->prompt + b->job->answer;

    if (order != 0)
        return order < 0;
    if (ranked && x != y)
        return x > y;
    return a->number < b->number;
}

static void
start(struct simulation *sim, struct sequence *seq)
{
    struct ns_sim_job *job = seq->job;
    struct prefix *prefix = seq->prefix;
    uint32_t at = sim->n_running++;

    seq->bytes = own_bytes(sim, job, prefix ? prefix->tokens : 0);
    sim->bytes += seq->bytes;
    if (prefix) {
        if (prefix->idle)
            unlink_idle(sim, prefix);
        if (!prefix->there) {
            sim->bytes += prefix_bytes(&sim->machine->shape, prefix->tokens);
            prefix->there = true;
        }
        prefix->holders++;
        prefix->to_come--;
        seq->cached = prefix->ready ? prefix->tokens : 0;
    }
    if (sim->bytes > sim->report->peak_bytes)
        sim->report->peak_bytes = sim->bytes;
    seq->encode = job->prompt - seq->cached;
    seq->prefill = true;
    seq->answer_left = job->answer > 0 ? job->answer : 1;
    job->start_s = sim->now;
    job->cached = seq->cached;
    sim->report->prompt_tokens += job->prompt;
    sim->report->cached_tokens += seq->cached;
    for (; at > 0 && outranks(seq, sim->running[at - 1],
                              sim->policy->ranked); at--)
        sim->running[at] = sim->running[at - 1];
    sim->running[at] = seq;
    if (sim->n_running > sim->report->peak_sequences)
        sim->report->peak_sequences = sim->n_running;
}

/* Whether it could be let in; a false leaves all as it was. */
static bool
admit(struct simulation *sim, struct sequence *seq)
{
    const struct prefix *prefix = seq->prefix;
    double bytes = own_bytes(sim, seq->job, prefix ? prefix->tokens : 0);

    if (prefix && !prefix->there)
        bytes += prefix_bytes(&sim->machine->shape, prefix->tokens);
    if (!make_room(sim, bytes, prefix))
        return false;
    start(sim, seq);
    return true;
}

static void
end(struct simulation *sim, uint32_t index)
{
    struct sequence *seq = sim->running[index];
    struct ns_sim_job *job = seq->job;

    sim->n_running--;
    memmove(&sim->running[index], &sim->running[index + 1],
            (sim->n_running - index) * sizeof(*sim->running));
    sim->bytes -= seq->bytes;
    if (seq->prefix && --seq->prefix->holders == 0)
        idle_prefix(sim, seq->prefix);
    job->end_s = sim->now;
    job->missed = job->deadline_s > 0 && job->end_s > job->deadline_s;
    sim->report->missed += job->missed;
    sim->report->done++;
    sim->report->answer_tokens += job->answer;
    if (!job->missed)
        sim->report->timely_tokens += job->answer;
}

/* Out of the backlog for good, unrun. */
static void
pass_over(struct simulation *sim, struct sequence *seq, bool missed)
{
    seq->job->missed = missed;
    sim->report->missed += missed;
    sim->report->refused += !missed;
    if (seq->prefix && --seq->prefix->to_come == 0 &&
        seq->prefix->idle)
        drop_prefix(sim, seq->prefix);
}

static enum ns_status
arrive(struct simulation *sim, struct ns_error *err)
{
    const struct ns_sim_policy *policy = sim->policy;
    enum ns_status status = NS_OK;

    while (status == NS_OK && sim->next_arrival < sim->n &&
           sim->arriving[sim->next_arrival]->job->arrival_s <= sim->now) {
        struct sequence *seq = sim->arriving[sim->next_arrival++];
        struct ns_backlog_key key = { 0 };

        if (policy->ranked)
            key = (struct ns_backlog_key){
                .priority = seq->job->priority,
                .arrived_ms = (int64_t)(seq->job->arrival_s * 1000),
                .deadline_ms = (int64_t)(seq->job->deadline_s * 1000),
                .group = policy->sharing ? seq->job->group : 0,
                .length = seq->job->prompt + seq->job->answer,
            };
        status = ns_backlog_push(sim->backlog, &key, seq, err);
    }
    return status;
}

static void
hold(struct simulation *sim, struct sequence *seq)
{
    struct prefix *prefix = seq->prefix;

    if (!prefix->waiting) {
        prefix->next_awaited = sim->awaited;
        sim->awaited = prefix;
    }
    seq->next = prefix->waiting;
    prefix->waiting = seq;
    sim->n_held++;
}

/* Whether those that run fill a pass, but for what `next` presses out of it:
 * more would take memory, not time. */
static bool
sated(const struct simulation *sim, const struct sequence *next)
{
    uint32_t rows = 0;

    if (!sim->policy->sated)
        return false;
    for (uint32_t i = 0; i < sim->n_running; i++) {
        const struct sequence *seq = sim->running[i];

        if (compare_levels(next, seq, sim->policy->ranked) < 0)
            continue;
        rows += seq->prefill ? seq->encode : 0;
        rows += seq->job->mode == NS_MODE_AR ? 1 : seq->job->canvas_length;
        if (rows >= sim->machine->pass_tokens)
            return true;
    }
    return false;
}

/* Those that wait for a prefix go in once it is there, before others. */
static void
admit_held(struct simulation *sim)
{
    struct prefix **at = &sim->awaited;

    while (*at) {
        struct prefix *prefix = *at;

        while (prefix->waiting && (prefix->ready || !prefix->there) &&
               sim->n_running < sim->policy->max_sequences &&
               !sated(sim, prefix->waiting)) {
            struct sequence *seq = prefix->waiting;

            if (!admit(sim, seq)) {
                if (sim->n_running > 0)
                    return;
                pass_over(sim, seq, false);
            }
            prefix->waiting = seq->next;
            sim->n_held--;
        }
        if (prefix->waiting)
            at = &prefix->next_awaited;
        else
            *at = prefix->next_awaited;
    }
}

static bool
too_late(const struct simulation *sim, const struct sequence *seq)
{
    return sim->policy->expires && seq->job->deadline_s > 0 &&
           seq->job->deadline_s < sim->now;
}

static void
admit_waiting(struct simulation *sim)
{
    const struct ns_sim_policy *policy = sim->policy;
    struct sequence *seq;

    if (policy->whole && sim->n_running > 0)
        return;
    admit_held(sim);
    while (sim->n_running < policy->max_sequences &&
           (seq = ns_backlog_first(sim->backlog)) != NULL &&
           !sated(sim, seq)) {
        struct prefix *prefix = seq->prefix;

        if (too_late(sim, seq)) {
            pass_over(sim, seq, true);
        } else if (prefix && prefix->there && !prefix->ready) {
            if (sim->n_held == 4 * policy->max_sequences)
                return;
            hold(sim, seq);
        } else if (!admit(sim, seq)) {
            if (sim->n_running > 0 || sim->n_held > 0)
                return; /* none may overtake: the large would starve */
            pass_over(sim, seq, false);
        }
        ns_backlog_pop(sim->backlog);
    }
}

/* ---- a pass ------------------------------------------------------------ */

static void
state_wants(struct simulation *sim)
{
    uint32_t level = 0;

    for (uint32_t i = 0; i < sim->n_running; i++) {
        struct sequence *seq = sim->running[i];
        bool canvas = seq->job->mode != NS_MODE_AR && !seq->drafted;

        if (i > 0 && compare_levels(sim->running[i - 1], seq,
                                    sim->policy->ranked) < 0)
            level++;
        sim->want[i] = (struct ns_want){
            .level = level,
            .n_encode = seq->drafted ? seq->job->canvas_length : seq->encode,
            .prefill = seq->prefill,
            .n_canvas = canvas ? seq->job->canvas_length : 0,
            .at = seq->cached,
        };
    }
}

static double
price(struct simulation *sim, uint32_t rows)
{
    const struct ns_cost_shape *shape = &sim->machine->shape;
    struct ns_cost_load load = { 0 };
    double by_kind[3] = { 0, 0, 0 }, seconds;

    for (uint32_t i = 0; i < sim->n_running; i++) {
        const struct sequence *seq = sim->running[i];
        const struct ns_grant *grant = &sim->grant[i];
        uint32_t length = seq->job->canvas_length;
        bool diffusion = seq->job->mode == NS_MODE_DIFFUSION;

        if (grant->n_encode > 0) {
            uint32_t n = grant->n_encode;
            bool last = n == sim->want[i].n_encode && !diffusion;

            ns_cost_add(shape, &load,
                        seq->prefill ? NS_SEGMENT_PREFILL : NS_SEGMENT_COMMIT,
                        n, seq->cached, seq->drafted ? n : last, 0, false);
            by_kind[seq->prefill ? 0 : 2] += n;
        }
        if (grant->canvas) {
            ns_cost_add(shape, &load, NS_SEGMENT_CANVAS, length,
                        seq->cached + grant->n_encode, length, length,
                        seq->conditioned);
            by_kind[1] += length;
            sim->report->canvas_steps++;
        }
    }
    seconds = ns_cost_seconds(shape, &sim->machine->rates, &load);
    for (int k = 0; k < 3; k++)
        sim->row_s[k] += seconds * by_kind[k] / rows;
    return seconds;
}

static void
take(struct sequence *seq, uint32_t n)
{
    seq->answer_left -= n < seq->answer_left ? n : seq->answer_left;
    seq->finished = seq->answer_left == 0;
}

static void
after_encode(struct sequence *seq, uint32_t n)
{
    enum ns_mode mode = seq->job->mode;

    if (seq->drafted) {
        uint32_t kept = seq->job->kept < 1 ? 1 : (uint32_t)seq->job->kept;

        seq->drafted = false;
        seq->cached += kept - 1;
        seq->encode = 1;
        take(seq, kept);
        return;
    }
    seq->cached += n;
    seq->encode -= n;
    if (seq->prefix && seq->cached >= seq->prefix->tokens)
        seq->prefix->ready = true;
    if (seq->encode > 0)
        return;
    seq->prefill = false;
    if (mode == NS_MODE_AR) {
        take(seq, 1);
        seq->encode = 1;
    }
}

static void
after_canvas(struct sequence *seq)
{
    if (!seq->conditioned) { /* its first step */
        seq->owed += seq->job->steps;
        seq->steps_left = seq->owed < 1 ? 1 : (uint32_t)seq->owed;
        seq->owed -= (float)seq->steps_left;
        seq->conditioned = true;
    }
    if (--seq->steps_left > 0)
        return;
    seq->conditioned = false;
    if (seq->job->mode == NS_MODE_HYBRID) {
        seq->drafted = true;
        return;
    }
    seq->encode = seq->job->canvas_length;
    take(seq, seq->job->canvas_length);
}

static void
run_pass(struct simulation *sim)
{
    struct ns_sim_report *report = sim->report;
    uint32_t rows;
    double seconds;

    state_wants(sim);
    rows = ns_planner_fill(sim->want, sim->n_running,
                           sim->machine->pass_tokens,
                           2 * sim->policy->max_sequences, sim->grant);
    seconds = price(sim, rows);
    sim->now += seconds;
    report->busy_s += seconds;
    report->passes++;
    report->mean_rows += rows;
    report->mean_sequences += sim->n_running;
    for (uint32_t i = 0; i < sim->n_running; i++) {
        struct sequence *seq = sim->running[i];

        if (sim->grant[i].n_encode > 0)
            after_encode(seq, sim->grant[i].n_encode);
        if (sim->grant[i].canvas)
            after_canvas(seq);
    }
    for (uint32_t i = sim->n_running; i-- > 0;)
        if (sim->running[i]->finished)
            end(sim, i);
}

/* ---- beginning and end ------------------------------------------------- */

static int
by_arrival(const void *a, const void *b)
{
    const struct sequence *x = *(struct sequence *const *)a;
    const struct sequence *y = *(struct sequence *const *)b;

    if (x->job->arrival_s != y->job->arrival_s)
        return x->job->arrival_s < y->job->arrival_s ? -1 : 1;
    return x->job < y->job ? -1 : x->job > y->job;
}

static int
by_group(const void *a, const void *b)
{
    const struct sequence *x = *(struct sequence *const *)a;
    const struct sequence *y = *(struct sequence *const *)b;

    return x->job->group < y->job->group ? -1 : x->job->group > y->job->group;
}

/* One prefix for each group; sequences point at theirs. */
static void
list_prefixes(struct simulation *sim)
{
    qsort(sim->arriving, sim->n, sizeof(*sim->arriving), by_group);
    for (size_t i = 0; i < sim->n; i++) {
        struct sequence *seq = sim->arriving[i];
        struct prefix *prefix;

        if (!sim->policy->sharing || seq->job->group == 0 ||
            seq->job->shared == 0 || seq->job->shared >= seq->job->prompt)
            continue;
        if (sim->n_prefixes == 0 ||
            sim->prefix[sim->n_prefixes - 1].id != seq->job->group)
            sim->prefix[sim->n_prefixes++] = (struct prefix){
                .id = seq->job->group,
                .tokens = seq->job->shared,
            };
        prefix = &sim->prefix[sim->n_prefixes - 1];
        if (seq->job->shared < prefix->tokens)
            prefix->tokens = seq->job->shared; /* what all of them share */
        prefix->to_come++;
        seq->prefix = prefix;
    }
    qsort(sim->arriving, sim->n, sizeof(*sim->arriving), by_arrival);
}

static enum ns_status
set_up(struct simulation *sim, struct ns_sim_job *jobs, size_t n,
       struct ns_error *err)
{
    uint32_t most = sim->policy->max_sequences;
    int64_t step_ms = sim->machine->age_step_ms;

    sim->n = n;
    sim->idle_first = sim->idle_last = NONE;
    sim->all = calloc(n + 1, sizeof(*sim->all));
    sim->arriving = calloc(n + 1, sizeof(*sim->arriving));
    sim->prefix = calloc(n + 1, sizeof(*sim->prefix));
    sim->running = calloc(most, sizeof(*sim->running));
    sim->want = calloc(most, sizeof(*sim->want));
    sim->grant = calloc(most, sizeof(*sim->grant));
    if (!sim->all || !sim->arriving || !sim->prefix || !sim->running ||
        !sim->want || !sim->grant)
        return ns_fail(err, NS_FATAL, "out of memory for %zu jobs", n);
    for (size_t i = 0; i < n; i++) {
        struct ns_sim_job *job = &jobs[i];

        job->start_s = job->end_s = 0;
        job->cached = 0;
        job->missed = false;
        sim->all[i].job = job;
        sim->all[i].number = i;
        if (step_ms > 0)
            sim->all[i].step = (int64_t)(job->arrival_s * 1000) / step_ms -
                               job->priority;
        sim->arriving[i] = &sim->all[i];
    }
    list_prefixes(sim);
    return ns_backlog_create(sim->machine->age_step_ms, sim->policy->riders,
                             &sim->backlog, err);
}

enum ns_status
ns_simulate(const struct ns_sim_machine *machine,
            const struct ns_sim_policy *policy, struct ns_sim_job *jobs,
            size_t n, struct ns_sim_report *report, struct ns_error *err)
{
    struct simulation sim = {
        .machine = machine,
        .policy = policy,
        .report = report,
    };
    enum ns_status status;
    double first;

    memset(report, 0, sizeof(*report));
    if (policy->max_sequences == 0 || machine->pass_tokens == 0)
        return ns_fail(err, NS_REJECT,
                       "max_sequences and pass_tokens must not be 0");
    status = set_up(&sim, jobs, n, err);
    if (status != NS_OK)
        goto out;
    first = n > 0 ? jobs[0].arrival_s : 0;
    for (size_t i = 1; i < n; i++)
        if (jobs[i].arrival_s < first)
            first = jobs[i].arrival_s;
    sim.now = first;
    for (;;) {
        status = arrive(&sim, err);
        if (status != NS_OK)
            goto out;
        admit_waiting(&sim);
        if (sim.n_running > 0) {
            run_pass(&sim);
            continue;
        }
        if (sim.next_arrival == n)
            break;
        sim.now = sim.arriving[sim.next_arrival]->job->arrival_s;
    }
    report->seconds = sim.now - first;
    report->prefill_s = sim.row_s[0];
    report->denoise_s = sim.row_s[1];
    report->commit_s = sim.row_s[2];
    if (report->passes > 0) {
        report->mean_rows /= (double)report->passes;
        report->mean_sequences /= (double)report->passes;
    }
out:
    ns_backlog_destroy(sim.backlog);
    free(sim.all);
    free(sim.arriving);
    free(sim.prefix);
    free(sim.running);
    free(sim.want);
    free(sim.grant);
    return status;
}
