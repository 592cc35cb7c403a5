/* request.h - what a model allows a request to ask, before any engine is open.
 *
 * Pure checks over the model's configuration, so that a file of jobs can be
 * validated without running anything and is told the same as when it runs. The
 * engine adds the one question that needs its pages: whether they suffice.
 *
 * Thread: any; nothing is shared.
 */
#ifndef NS_ENGINE_REQUEST_H
#define NS_ENGINE_REQUEST_H

#include "engine/engine.h"
#include "engine/model.h"

/* Fills in what a job leaves open: NS_MODE_AUTO by task and thinking (hybrid
 * for code and thought where the checkpoint is AR-capable, else diffusion); ar
 * and hybrid are refused where it is not. */
enum ns_status ns_request_resolve_mode(const struct ns_model *model,
                                       enum ns_mode asked, bool code,
                                       bool thinking, enum ns_mode *out,
                                       struct ns_error *err);

/* The largest max_tokens that fits behind a prompt of `n_prompt`; 0: none. In
 * whole canvases but for ar. canvas_length 0: the model's. */
uint32_t ns_request_max_tokens(const struct ns_config *config,
                               uint32_t n_prompt, enum ns_mode mode,
                               uint32_t canvas_length);

/* NS_REJECT as ns_engine_check, but for over_memory. `thinks`: the tokenizer
 * has the marks of a thought. */
enum ns_status ns_request_check(const struct ns_model *model, bool thinks,
                                const struct ns_request *request,
                                struct ns_error *err);

/* "diffusion"; "auto" for AUTO. */
const char *ns_request_mode_name(enum ns_mode mode);

#endif
