/* memory.h - the sum of what an engine takes, before it takes it.
 *
 * Weights, the two pools of pages, work rows and scratch, soft embeddings:
 * all is taken at open, so that no pass allocates and none runs out. Bytes.
 */
#ifndef NS_ENGINE_MEMORY_H
#define NS_ENGINE_MEMORY_H

#include "engine/engine.h"

/* `options` with every 0 replaced by what it stands for. */
struct ns_engine_options ns_memory_defaults(
    const struct ns_model *model, const struct ns_engine_options *options);

/* NS_REJECT with the numbers when it does not fit. `options` as above. */
enum ns_status ns_memory_plan(const struct ns_model *model,
                              const struct ns_engine_options *options,
                              struct ns_memory_plan *out,
                              struct ns_error *err);

/* Rows that one pass adds to a sequence, but for a longer picture's. */
uint32_t ns_memory_chunk(const struct ns_model *model,
                         const struct ns_engine_options *options);

/* Rows of the largest pass. */
uint32_t ns_memory_rows(const struct ns_model *model,
                        const struct ns_engine_options *options);

#endif
