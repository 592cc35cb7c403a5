#include "engine/outlook.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MEMORY = 64, N_MODES = NS_MODE_HYBRID + 1 };

static const double HYSTERESIS = 1.15;

struct learnt { /* means of a job */
    uint32_t n;
    double answer, canvases, steps;
};

struct ns_outlook {
    struct ns_outlook_options options;
    pthread_mutex_t lock;
    struct ns_cost_rates rates;
    /* The last row is of all classes together. */
    struct learnt learnt[NS_N_JOB_CLASSES + 1][N_MODES];
};

enum ns_status
ns_outlook_create(const struct ns_outlook_options *options,
                  struct ns_outlook **out, struct ns_error *err)
{
    struct ns_outlook *outlook = calloc(1, sizeof(*outlook));

    if (!outlook)
        return ns_fail(err, NS_FATAL, "out of memory for the outlook");
    outlook->options = *options;
    outlook->rates = options->rates;
    pthread_mutex_init(&outlook->lock, NULL);
    *out = outlook;
    return NS_OK;
}

void
ns_outlook_destroy(struct ns_outlook *outlook)
{
    if (!outlook)
        return;
    pthread_mutex_destroy(&outlook->lock);
    free(outlook);
}

struct ns_cost_rates
ns_outlook_rates(struct ns_outlook *outlook)
{
    struct ns_cost_rates rates;

    pthread_mutex_lock(&outlook->lock);
    rates = outlook->rates;
    pthread_mutex_unlock(&outlook->lock);
    return rates;
}

const struct ns_outlook_options *
ns_outlook_options(const struct ns_outlook *outlook)
{
    return &outlook->options;
}

double
ns_outlook_seconds(struct ns_outlook *outlook, const struct ns_cost_load *load)
{
    struct ns_cost_rates rates = ns_outlook_rates(outlook);

    return ns_cost_seconds(&outlook->options.shape, &rates, load);
}

void
ns_outlook_learn_pass(struct ns_outlook *outlook,
                      const struct ns_cost_load *load, double seconds)
{
    pthread_mutex_lock(&outlook->lock);
    ns_cost_learn(&outlook->options.shape, &outlook->rates, load, seconds);
    pthread_mutex_unlock(&outlook->lock);
}

static void
learn(struct learnt *learnt, const struct ns_yield *yield)
{
    double weight;

    if (learnt->n < UINT32_MAX)
        learnt->n++;
    weight = 1.0 / (learnt->n < MEMORY ? learnt->n : MEMORY);
    learnt->answer += weight * (yield->answer - learnt->answer);
    learnt->canvases += weight * (yield->canvases - learnt->canvases);
    learnt->steps += weight * (yield->steps - learnt->steps);
}

void
ns_outlook_learn_job(struct ns_outlook *outlook, enum ns_job_class job_class,
                     enum ns_mode mode, const struct ns_yield *yield)
{
    pthread_mutex_lock(&outlook->lock);
    learn(&outlook->learnt[job_class][mode], yield);
    learn(&outlook->learnt[NS_N_JOB_CLASSES][mode], yield);
    pthread_mutex_unlock(&outlook->lock);
}

void
ns_outlook_forget_jobs(struct ns_outlook *outlook)
{
    pthread_mutex_lock(&outlook->lock);
    memset(outlook->learnt, 0, sizeof(outlook->learnt));
    pthread_mutex_unlock(&outlook->lock);
}

/* Before anything was seen: 16 tokens a step, of which a draft keeps a third,
 * and answers of 300 tokens. */
static struct ns_expectation
guess(const struct ns_outlook *outlook, enum ns_mode mode,
      uint32_t canvas_length)
{
    double kept = mode == NS_MODE_HYBRID ? canvas_length / 3.0
                                         : canvas_length;
    double steps = canvas_length / 16.0;

    if (steps > outlook->options.max_steps)
        steps = outlook->options.max_steps;
    return (struct ns_expectation){ .answer = 300,
                                    .steps = steps > 1 ? steps : 1,
                                    .kept = kept,
                                    .canvases = 300 / kept };
}

struct ns_expectation
ns_outlook_expect(struct ns_outlook *outlook, enum ns_job_class job_class,
                  enum ns_mode mode, uint32_t max_tokens,
                  uint32_t canvas_length)
{
    struct ns_expectation expect = guess(outlook, mode, canvas_length);
    struct learnt learnt;

    pthread_mutex_lock(&outlook->lock);
    learnt = outlook->learnt[job_class][mode];
    if (learnt.n == 0)
        learnt = outlook->learnt[NS_N_JOB_CLASSES][mode];
    pthread_mutex_unlock(&outlook->lock);
    if (learnt.n > 0) {
        expect.n = learnt.n;
        expect.answer = learnt.answer;
        if (learnt.canvases > 0) {
            expect.steps = learnt.steps / learnt.canvases;
            expect.kept = learnt.answer / learnt.canvases;
            expect.canvases = learnt.canvases;
        }
    }
    if (expect.answer > max_tokens) {
        expect.canvases *= max_tokens / expect.answer;
        expect.answer = max_tokens;
    }
    if (expect.kept < 1)
        expect.kept = 1;
    if (expect.canvases < 1)
        expect.canvases = 1;
    if (mode == NS_MODE_AR)
        expect.canvases = 0;
    return expect;
}

/* Sequences of this kind that go into a pass, or into memory. */
static uint32_t
batch_of(const struct ns_outlook_options *options, uint32_t rows,
         double positions)
{
    const struct ns_cost_shape *shape = &options->shape;
    double near = positions < shape->window ? positions : shape->window;
    double bytes = shape->full_bytes * positions +
                   shape->sliding_bytes * near + shape->state_bytes;
    double batch = floor((double)options->pass_tokens / rows);

    if (batch > options->max_sequences)
        batch = options->max_sequences;
    if (options->memory_bytes > 0 && batch > options->memory_bytes / bytes)
        batch = options->memory_bytes / bytes;
    return batch < 1 ? 1 : (uint32_t)batch;
}

static double
pass_seconds(const struct ns_outlook_options *options,
             const struct ns_cost_rates *rates, enum ns_segment_kind kind,
             uint32_t batch, uint32_t rows, uint32_t position, uint32_t head)
{
    struct ns_cost_load load = { 0 };
    bool canvas = kind == NS_SEGMENT_CANVAS;

    for (uint32_t i = 0; i < batch; i++)
        ns_cost_add(&options->shape, &load, kind, rows, position, head,
                    canvas ? rows : 0, canvas);
    return ns_cost_seconds(&options->shape, rates, &load);
}

double
ns_outlook_job_seconds(struct ns_outlook *outlook, enum ns_job_class job_class,
                       enum ns_mode mode, uint32_t prompt, uint32_t max_tokens,
                       uint32_t canvas_length)
{
    const struct ns_outlook_options *options = &outlook->options;
    struct ns_cost_rates rates = ns_outlook_rates(outlook);
    struct ns_expectation expect =
        ns_outlook_expect(outlook, job_class, mode, max_tokens,
                          canvas_length);
    uint32_t rows = mode == NS_MODE_AR ? 1 : canvas_length;
    uint32_t position = prompt + (uint32_t)(expect.answer / 2);
    uint32_t batch = batch_of(options, rows,
                              (double)position + canvas_length);
    double canvases, step, commit;

    if (mode == NS_MODE_AR)
        return expect.answer / batch *
               pass_seconds(options, &rates, NS_SEGMENT_AR, batch, 1,
                            position, 1);
    canvases = expect.canvases;
    step = pass_seconds(options, &rates, NS_SEGMENT_CANVAS, batch, rows,
                        position, rows);
    commit = pass_seconds(options, &rates, NS_SEGMENT_COMMIT, batch, rows,
                          position, mode == NS_MODE_HYBRID ? rows : 0);
    /* The last block of a diffusion answer is not committed. */
    return (canvases * expect.steps * step +
            (mode == NS_MODE_HYBRID ? canvases : canvases - 1) * commit) /
           batch;
}

enum ns_mode
ns_outlook_mode(struct ns_outlook *outlook, enum ns_job_class job_class,
                enum ns_mode resolved, uint32_t prompt, uint32_t max_tokens,
                uint32_t canvas_length, double *gain)
{
    double now = ns_outlook_job_seconds(outlook, job_class, resolved, prompt,
                                        max_tokens, canvas_length);
    enum ns_mode best = resolved;
    double least = now;

    for (int mode = NS_MODE_DIFFUSION; mode < N_MODES; mode++) {
        double seconds;

        if (mode == (int)resolved ||
            (mode != NS_MODE_DIFFUSION && !outlook->options.ar_capable) ||
            (mode == NS_MODE_DIFFUSION && resolved != NS_MODE_DIFFUSION))
            continue;
        seconds = ns_outlook_job_seconds(outlook, job_class,
                                         (enum ns_mode)mode, prompt,
                                         max_tokens, canvas_length);
        if (seconds < least && seconds * HYSTERESIS < now) {
            least = seconds;
            best = (enum ns_mode)mode;
        }
    }
    if (gain)
        *gain = now / least;
    return best;
}
