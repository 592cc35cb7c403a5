/* canvas.h - the block of output tokens being denoised for one sequence.
 *
 * A canvas starts as random tokens. Each denoise step samples every position,
 * accepts the most confident within the entropy bound and renoises the rest,
 * until the argmax is stable and confident or the steps run out. What is
 * committed is the argmax of the last step, never the sampled canvas.
 *
 *     start --> step <--> step --> done (argmax is the block, or the draft)
 *
 * Owns:   its tokens, argmax and their history, in one allocation.
 * Thread: engine thread.
 */
#ifndef NS_ENGINE_CANVAS_H
#define NS_ENGINE_CANVAS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct ns_canvas {
    uint32_t length;
    uint32_t block;   /* keys its draws */
    uint32_t n_left;  /* n of the next step; 0: none has started */
    uint32_t n_steps; /* taken */
    uint32_t n_same;  /* steps in a row with the present argmax */
    uint32_t n_accepted; /* by the last step */
    float mean_entropy;  /* of the last step */
    int32_t *token;   /* [length] what goes into the next step */
    int32_t *argmax;  /* [length] of the last step */
    uint8_t *accepted;   /* [length] by the last step */
    double *uniform;     /* [length] of the coming step's samples */
    /* private */
    uint32_t *order;
};

struct ns_denoise_options {
    float t_min, t_max; /* the job's temperature already in them */
    float entropy_bound, confidence_threshold;
    uint32_t max_steps, stability_threshold;
    bool take_argmax; /* temperature 0: the argmax is the sample */
    uint64_t seed;
    uint32_t vocab;
};

enum ns_status ns_canvas_init(struct ns_canvas *canvas, uint32_t max_length,
                              struct ns_error *err);
void ns_canvas_fini(struct ns_canvas *canvas);

/* A new canvas of `length` tokens: the given ones first, noise behind them. */
void ns_canvas_start(struct ns_canvas *canvas,
                     const struct ns_denoise_options *options,
                     uint32_t length, uint32_t block, const int32_t *given,
                     uint32_t n_given);
/* Before a pass: 1/T of the coming step; fills `uniform`. */
float ns_canvas_prepare(struct ns_canvas *canvas,
                        const struct ns_denoise_options *options);
/* After it. `sampled`, `argmax`, `entropy`: the head's, [length]. Returns true
 * when the canvas is done. NS_RETRY in `err` (code nan_logits) and true when
 * the numbers are no numbers. */
bool ns_canvas_step(struct ns_canvas *canvas,
                    const struct ns_denoise_options *options,
                    const int32_t *argmax, const int32_t *sampled,
                    const float *entropy, struct ns_error *err);

/* Whether the last step found it stable and confident: false when it is done
 * because its steps ran out. */
bool ns_canvas_converged(const struct ns_canvas *canvas,
                         const struct ns_denoise_options *options);

#endif
