/* trace.h - a look inside the engine, for tests and the vectors.
 *
 * The sampled tokens of a step may be replaced, so that recorded trajectories
 * replay draw for draw. Nothing of the product uses this.
 */
#ifndef NS_ENGINE_TRACE_H
#define NS_ENGINE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/canvas.h"
#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/vision.h"

struct ns_trace {
    void *ctx;
    /* The head has spoken; `canvas->token` is what went in. */
    void (*sampled)(void *ctx, uint64_t id, const struct ns_canvas *canvas,
                    const int32_t *argmax, int32_t *sampled,
                    const float *entropy);
    /* The step is over; `canvas->token` is what comes out. */
    void (*stepped)(void *ctx, uint64_t id, const struct ns_canvas *canvas,
                    bool done);
    /* hybrid and ar: a choice for the answer position `at`. */
    void (*chosen)(void *ctx, uint64_t id, uint32_t at, int32_t token);
    /* hybrid: the choices behind each draft token, which may be spoiled. */
    void (*judged)(void *ctx, uint64_t id, int32_t *row_choice, uint32_t n);
};

void ns_engine_set_trace(struct ns_engine *engine,
                         const struct ns_trace *trace); /* borrowed */
struct ns_forward *ns_engine_forward(struct ns_engine *engine);
struct ns_vision *ns_engine_vision(struct ns_engine *engine); /* or NULL */
struct ns_kvcache *ns_engine_kvcache(struct ns_engine *engine);

#endif
