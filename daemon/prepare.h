/* prepare.h - the pool's stage: message to job, job to request.
 *
 * A work comes twice: as bytes, to be parsed and to get its mode and seed, and
 * again when it is claimed, to become prompt, tokens and a request for the
 * engine. Nothing is shared between two works but what is const after open.
 *
 * `nightshift validate` uses the same functions without an engine, so that
 * what it accepts is what runs.
 */
#ifndef NS_DAEMON_PREPARE_H
#define NS_DAEMON_PREPARE_H

#include "daemon/pictures.h"
#include "daemon/work.h"

void *ns_prepare_thread(void *pipeline);

/* The job's prompt as token ids, and whether it ends inside an opened thought.
 * `empty_thought`: the checkpoint's dialect (prompt.h). `pictures`: of the
 * job, loaded; NULL where it has none. Zeroes `out` first;
 * fini whatever comes back. NS_REJECT: bad_param, empty_prompt, bad_text,
 * too_large. */
enum ns_status ns_prepare_tokens(const struct ns_job *job,
                                 const struct ns_tokenizer *tokenizer,
                                 bool empty_thought,
                                 const struct ns_pictures *pictures,
                                 struct ns_ids *out,
                                 bool *in_thought, struct ns_error *err);

/* The job's text to start from as tokens; control strings in it are text. Zero
 * where it has none; fini whatever comes back. */
enum ns_status ns_prepare_draft(const struct ns_job *job,
                                const struct ns_tokenizer *tokenizer,
                                struct ns_ids *out, struct ns_error *err);

/* The mode a job runs in: its own, else `fallback`, resolved for the model.
 * NS_REJECT: unsupported. */
enum ns_status ns_prepare_mode(const struct ns_job *job,
                               const struct ns_model *model,
                               enum ns_job_mode fallback, enum ns_mode *out,
                               struct ns_error *err);

/* The request that the job is, but for seed and resumed blocks, which a claim
 * brings. `prompt` and `pictures` are borrowed by it, `images` has room for
 * the pictures. max_tokens is what was asked for, or `default_max_tokens` cut
 * to what the context leaves: in whole canvases but for ar. NS_REJECT with
 * over_context where not even one canvas fits, or an explicit value does not;
 * the model's other limits are ns_request_check's. */
enum ns_status ns_prepare_request(const struct ns_job *job,
                                  const struct ns_model *model,
                                  enum ns_mode mode,
                                  const struct ns_ids *prompt,
                                  bool in_thought,
                                  const struct ns_pictures *pictures,
                                  struct ns_request_image *images,
                                  uint32_t default_max_tokens,
                                  struct ns_request *out,
                                  struct ns_error *err);

/* The request of a node but the final one (parts.h), which is the job's but for
 * what is the whole answer's. `prompt` is zeroed first, and borrowed by it; fini
 * whatever comes back. */
enum ns_status ns_prepare_node(const struct ns_job *job,
                               const struct ns_model *model,
                               const struct ns_tokenizer *tokenizer,
                               bool empty_thought, enum ns_mode mode,
                               struct ns_parts *parts, uint32_t node,
                               struct ns_ids *prompt, struct ns_request *out,
                               struct ns_error *err);

#endif
