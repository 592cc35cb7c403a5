/* measure.h - the rates of this machine, before the first job comes.
 *
 * Runs some passes of each kind over noise: prompts of two lengths, canvases
 * alone and together, single tokens. The engine's outlook learns from them as
 * from any pass. Takes a few dozen passes' time; leaves nothing behind but
 * idle pages.
 *
 * Thread: engine thread, with nothing submitted.
 */
#ifndef NS_ENGINE_MEASURE_H
#define NS_ENGINE_MEASURE_H

#include "engine/engine.h"

/* Begins no further trial once `limit_ms` are over. */
enum ns_status ns_measure(struct ns_engine *engine, uint32_t limit_ms,
                          struct ns_error *err);

#endif
