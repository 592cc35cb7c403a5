#include "engine/canvas.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/rng.h"
#include "engine/sampler.h"

enum ns_status
ns_canvas_init(struct ns_canvas *canvas, uint32_t max_length,
               struct ns_error *err)
{
    memset(canvas, 0, sizeof(*canvas));
    canvas->token = calloc(max_length, sizeof(int32_t));
    canvas->argmax = calloc(max_length, sizeof(int32_t));
    canvas->accepted = calloc(max_length, 1);
    canvas->uniform = calloc(max_length, sizeof(double));
    canvas->order = calloc(max_length, sizeof(uint32_t));
    if (!canvas->token || !canvas->argmax || !canvas->accepted ||
        !canvas->uniform || !canvas->order) {
        ns_canvas_fini(canvas);
        return ns_fail(err, NS_FATAL, "out of memory for a canvas");
    }
    return NS_OK;
}

void
ns_canvas_fini(struct ns_canvas *canvas)
{
    free(canvas->token);
    free(canvas->argmax);
    free(canvas->accepted);
    free(canvas->uniform);
    free(canvas->order);
    memset(canvas, 0, sizeof(*canvas));
}

void
ns_canvas_start(struct ns_canvas *canvas,
                const struct ns_denoise_options *options, uint32_t length,
                uint32_t block, const int32_t *given, uint32_t n_given)
{
    canvas->length = length;
    canvas->block = block;
    canvas->n_left = options->max_steps;
    canvas->n_steps = 0;
    canvas->n_same = 0;
    for (uint32_t i = 0; i < length; i++)
        canvas->token[i] =
            i < n_given ? given[i]
                        : ns_draw_token(ns_draw(options->seed, block, 0,
                                                NS_DRAW_CANVAS, i),
                                        options->vocab);
}

float
ns_canvas_prepare(struct ns_canvas *canvas,
                  const struct ns_denoise_options *options)
{
    float t = ns_sampler_temperature(options->t_min, options->t_max,
                                     canvas->n_left, options->max_steps);

    for (uint32_t i = 0; i < canvas->length; i++)
        canvas->uniform[i] =
            options->take_argmax
                ? -1.0
                : ns_draw_uniform(ns_draw(options->seed, canvas->block,
                                          canvas->n_left, NS_DRAW_SAMPLE, i));
    return 1.0f / t;
}

bool
ns_canvas_converged(const struct ns_canvas *canvas,
                    const struct ns_denoise_options *options)
{
    return canvas->n_same > options->stability_threshold &&
           canvas->mean_entropy < options->confidence_threshold;
}

bool
ns_canvas_step(struct ns_canvas *canvas,
               const struct ns_denoise_options *options,
               const int32_t *argmax, const int32_t *sampled,
               const float *entropy, struct ns_error *err)
{
    uint32_t length = canvas->length;
    bool same = canvas->n_steps > 0;

    canvas->mean_entropy = ns_sampler_mean(entropy, length);
    if (!isfinite(canvas->mean_entropy)) {
        ns_fail(err, NS_RETRY, "logits are not numbers in block %u, step %u",
                canvas->block, canvas->n_steps + 1);
        err->code = "nan_logits";
        return true;
    }
    canvas->n_accepted =
        ns_sampler_accept(entropy, length, options->entropy_bound,
                          canvas->accepted, canvas->order);
    for (uint32_t i = 0; i < length; i++) {
        if (canvas->argmax[i] != argmax[i])
            same = false;
        canvas->argmax[i] = argmax[i];
        /* What is not accepted becomes a new random token, not its old one. */
        canvas->token[i] =
            canvas->accepted[i]
                ? (options->take_argmax ? argmax[i] : sampled[i])
                : ns_draw_token(ns_draw(options->seed, canvas->block,
                                        canvas->n_left, NS_DRAW_RENOISE, i),
                                options->vocab);
    }
    canvas->n_same = same ? canvas->n_same + 1 : 1;
    canvas->n_steps++;
    canvas->n_left--;
    return canvas->n_left == 0 || ns_canvas_converged(canvas, options);
}
