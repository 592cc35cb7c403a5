/* forward.h - one pass of the model over a batch.
 *
 * ns_forward reads top to bottom as the model: embeddings and
 * self-conditioning, the layers, the head. It enqueues everything, syncs once
 * and leaves argmax, sample and entropy of the head rows in the batch.
 *
 * Owns:   the pass's work rows and the soft store (one canvas of rows a slot:
 *         the soft embedding between two denoise steps).
 * Thread: engine thread.
 */
#ifndef NS_ENGINE_FORWARD_H
#define NS_ENGINE_FORWARD_H

#include "base/error.h"
#include "engine/batch.h"
#include "engine/kvcache.h"
#include "engine/model.h"
#include "kernels/backend.h"

struct ns_forward;

/* Called after the named point of a pass, rows in pass order, for tests:
 * "input" (layer 0's), "hidden" (a layer's output), "router_probs",
 * "router_weights", "router_index" (as floats), "final_hidden" (head rows). */
typedef void ns_probe(void *ctx, const char *point, uint32_t layer,
                      const struct ns_rows *rows);

enum ns_status ns_forward_create(const struct ns_model *model,
                                 struct ns_kvcache *kv, uint32_t max_rows,
                                 uint32_t n_slots, struct ns_forward **out,
                                 struct ns_error *err);
void ns_forward_destroy(struct ns_forward *fw); /* takes NULL */
void ns_forward_set_probe(struct ns_forward *fw, ns_probe *probe, void *ctx);

/* What create() and the backend take for passes of this size: work rows and
 * scratch; the soft store. */
void ns_forward_bytes(const struct ns_model *model, uint32_t max_rows,
                      uint32_t n_slots, uint64_t *work, uint64_t *soft);

enum ns_status ns_forward(struct ns_forward *fw, struct ns_batch *batch,
                          struct ns_error *err);

/* Rows of a slot in the soft store (tests put their own there). */
struct ns_rows ns_forward_soft(struct ns_forward *fw, uint32_t slot);

#endif
