#include "engine/measure.h"

#include <stdlib.h>
#include <time.h>

#include "engine/outlook.h"
#include "engine/request.h"
#include "engine/rng.h"

enum { ROUNDS = 3, PASSES = 5, MOST_TOGETHER = 4, ANSWER = 1024 };

static const uint32_t lengths[] = { 48, 700 };

struct trial {
    enum ns_mode mode;
    uint32_t n; /* sequences at once */
};

/* Words from the middle of the vocabulary, away from control tokens. */
static void
make_noise(int32_t *prompt, uint32_t n, uint32_t vocab, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        prompt[i] = (int32_t)(vocab / 4) +
                    ns_draw_token(ns_mix(seed << 32 | i), vocab / 4);
}

/* Each sequence goes through prefill, one after another, and then some passes
 * with all others; then all are taken back: what they answer is noise. */
static enum ns_status
run_trial(struct ns_engine *engine, const struct trial *trial,
          int32_t *prompts, uint32_t n_prompt, uint64_t *id,
          struct ns_error *err)
{
    const struct ns_model *model = ns_engine_model(engine);
    const struct ns_generation *generation = &model->generation;
    uint32_t most = ns_request_max_tokens(&model->config, n_prompt,
                                          trial->mode, 0);
    struct ns_sampler_options sampler = {
        .t_min = generation->t_min,
        .t_max = generation->t_max,
        .entropy_bound = generation->entropy_bound,
        .max_denoising_steps = generation->max_denoising_steps,
        .stability_threshold = generation->stability_threshold,
        .confidence_threshold = generation->confidence_threshold,
    };
    uint64_t first = *id;
    enum ns_status status = NS_OK;
    struct ns_pass_report report;

    for (uint32_t i = 0; i < trial->n && status == NS_OK; i++) {
        int32_t *prompt = prompts + (size_t)i * n_prompt;
        struct ns_request request = {
            .id = *id,
            .prompt = prompt,
            .n_prompt = n_prompt,
            .mode = trial->mode,
            .seed = *id,
            .max_tokens = most < ANSWER ? most : ANSWER,
            .top_p = 1.0f,
            .sampler = sampler,
        };

        make_noise(prompt, n_prompt, model->config.vocab, *id);
        status = ns_engine_submit(engine, &request, err);
        if (status == NS_REJECT) { /* too much for this model or its pools */
            status = NS_OK;
            break;
        }
        if (status != NS_OK)
            break;
        ++*id;
        do
            status = ns_engine_pass(engine, &report, err);
        while (status == NS_OK && report.prefill_rows > 0);
    }
    for (uint32_t i = 0; i < PASSES && status == NS_OK; i++)
        status = ns_engine_pass(engine, &report, err);
    for (uint64_t i = first; i < *id; i++)
        ns_engine_cancel(engine, i);
    return status;
}

static int64_t
now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

enum ns_status
ns_measure(struct ns_engine *engine, uint32_t limit_ms, struct ns_error *err)
{
    static const struct trial trials[] = {
        { NS_MODE_DIFFUSION, 1 },
        { NS_MODE_DIFFUSION, MOST_TOGETHER },
        { NS_MODE_AR, 1 },
        { NS_MODE_AR, MOST_TOGETHER },
    };
    size_t n_trials = sizeof(trials) / sizeof(trials[0]);
    uint32_t longest = lengths[sizeof(lengths) / sizeof(lengths[0]) - 1];
    int32_t *noise = calloc((size_t)MOST_TOGETHER * longest, sizeof(*noise));
    int64_t until_ms = now_ms() + limit_ms;
    enum ns_status status = NS_OK;
    uint64_t id = 1;

    if (!noise)
        return ns_fail(err, NS_FATAL, "out of memory measuring the machine");
    if (!ns_engine_model(engine)->generation.ar_capable)
        n_trials = 2;
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (size_t t = 0; t < n_trials; t++)
            for (size_t p = 0; p < sizeof(lengths) / sizeof(lengths[0]) &&
                               status == NS_OK && now_ms() < until_ms; p++)
                status = run_trial(engine, &trials[t], noise, lengths[p],
                                   &id, err);
    free(noise);
    ns_outlook_forget_jobs(ns_engine_outlook(engine));
    return status;
}
