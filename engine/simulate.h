/* simulate.h - a schedule without running it.
 *
 * Plays jobs through the order of the backlog, the planner's own fill and the
 * cost model, pass by pass, under a machine's memory. What a job will answer is
 * not known before it runs: the caller says what it expects of each.
 *
 * Other ways of packing are here to be compared with, and differ from ours in
 * the fields of the policy alone. Memory is counted in bytes of prefix and
 * canvas; a job reserves prompt and answer when it is let in, so none is put
 * back.
 *
 * Pure; deterministic; any thread.
 */
#ifndef NS_ENGINE_SIMULATE_H
#define NS_ENGINE_SIMULATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/cost.h"
#include "engine/engine.h"

struct ns_sim_job {
    double arrival_s;
    double deadline_s; /* 0: none */
    int32_t priority;
    enum ns_mode mode; /* not AUTO */
    uint32_t prompt;   /* tokens, soft tokens of pictures counted */
    uint32_t answer;   /* tokens expected */
    uint32_t canvas_length;
    float steps;       /* denoise steps of a canvas; ar: unused */
    float kept;        /* hybrid: tokens kept of a canvas, one at least */
    uint64_t group;    /* of a shared prefix; 0: none */
    uint32_t shared;   /* its tokens */
    /* Out: 0 for a job that never started. */
    double start_s, end_s;
    uint32_t cached;
    bool missed; /* its deadline: ended later, or was never begun */
};

struct ns_sim_policy {
    const char *name;
    bool ranked;   /* priority, aging, deadline, groups, longest; else by
                    * arrival alone */
    bool sharing;  /* prefixes are computed once */
    bool whole;    /* static batches: the next begins when the last has ended */
    bool expires;  /* what is too late is not begun */
    bool sated;    /* none is let in that the next pass has no room for */
    uint32_t riders; /* of a group, see backlog.h */
    uint32_t max_sequences;
};

struct ns_sim_machine {
    struct ns_cost_shape shape;
    struct ns_cost_rates rates;
    double memory_bytes; /* for prefixes and canvases */
    uint32_t pass_tokens;
    uint32_t age_step_ms;
};

struct ns_sim_report {
    double seconds;      /* from the first arrival to the last end */
    double busy_s;       /* inside passes */
    double prefill_s, denoise_s, commit_s; /* ar counts as commit: shares of
                          * busy_s by rows */
    uint64_t passes, canvas_steps;
    uint64_t prompt_tokens, cached_tokens, answer_tokens;
    uint64_t timely_tokens; /* of answers that met their deadlines */
    uint32_t done, missed, refused; /* refused: never fits alone */
    double peak_bytes, mean_sequences, mean_rows;
    uint32_t peak_sequences;
};

/* Plays `jobs` (in any order; their out fields are set) to the end. */
enum ns_status ns_simulate(const struct ns_sim_machine *machine,
                           const struct ns_sim_policy *policy,
                           struct ns_sim_job *jobs, size_t n,
                           struct ns_sim_report *report,
                           struct ns_error *err);

#endif
