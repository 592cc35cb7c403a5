/* outlook.h - what is to be expected of jobs and passes on this machine.
 *
 * Learns from each pass what the machine's rates are (cost.h) and from each
 * finished job how long answers of its class are and how many steps and kept
 * tokens a canvas takes, as means that favour the last sixty-odd. From both
 * follows what a job costs in each mode.
 *
 * Thread: any; a lock inside, held for some additions.
 */
#ifndef NS_ENGINE_OUTLOOK_H
#define NS_ENGINE_OUTLOOK_H

#include "engine/cost.h"
#include "engine/engine.h"

struct ns_outlook;

struct ns_outlook_options {
    struct ns_cost_shape shape;
    struct ns_cost_rates rates; /* to begin with */
    uint32_t pass_tokens, max_sequences;
    double memory_bytes; /* of the pools */
    uint32_t max_steps;  /* of a canvas */
    bool ar_capable;
};

enum ns_status ns_outlook_create(const struct ns_outlook_options *options,
                                 struct ns_outlook **out,
                                 struct ns_error *err);
void ns_outlook_destroy(struct ns_outlook *outlook); /* takes NULL */

/* The prediction for a pass. */
double ns_outlook_seconds(struct ns_outlook *outlook,
                          const struct ns_cost_load *load);
void ns_outlook_learn_pass(struct ns_outlook *outlook,
                           const struct ns_cost_load *load, double seconds);

/* What one finished job tells. Canvases: those denoised to their end. */
struct ns_yield {
    uint32_t answer;   /* tokens */
    uint32_t canvases; /* 0 in ar */
    uint32_t steps;    /* of them all */
};
void ns_outlook_learn_job(struct ns_outlook *outlook,
                          enum ns_job_class job_class, enum ns_mode mode,
                          const struct ns_yield *yield);

/* As if no job had been seen: what they taught was no job's. */
void ns_outlook_forget_jobs(struct ns_outlook *outlook);

struct ns_expectation {
    uint32_t n;     /* jobs it was learnt from; 0: a guess */
    double answer;  /* tokens, no more than max_tokens */
    double steps;   /* of a canvas */
    double kept;    /* tokens of a canvas that stay */
    double canvases; /* of the answer; 0 in ar */
};
/* Of the class; of all classes together where it has shown nothing yet. */
struct ns_expectation ns_outlook_expect(struct ns_outlook *outlook,
                                        enum ns_job_class job_class,
                                        enum ns_mode mode, uint32_t max_tokens,
                                        uint32_t canvas_length);

/* Machine seconds that a job's answer takes in a full batch of its kind, the
 * prompt left out: it costs the same in each mode. */
double ns_outlook_job_seconds(struct ns_outlook *outlook,
                              enum ns_job_class job_class, enum ns_mode mode,
                              uint32_t prompt, uint32_t max_tokens,
                              uint32_t canvas_length);

/* The mode that gives most tokens a second, `resolved` unless another is
 * faster by more than 1.15. What was to be verified stays so: diffusion is not
 * chosen in the place of hybrid or ar. `gain` (may be NULL) gets by how much. */
enum ns_mode ns_outlook_mode(struct ns_outlook *outlook,
                             enum ns_job_class job_class,
                             enum ns_mode resolved, uint32_t prompt,
                             uint32_t max_tokens, uint32_t canvas_length,
                             double *gain);

/* As things stand. */
struct ns_cost_rates ns_outlook_rates(struct ns_outlook *outlook);
const struct ns_outlook_options *ns_outlook_options(
    const struct ns_outlook *outlook);

#endif
