/* cost.h - what a pass costs: the model's shapes against a machine's rates.
 *
 * A pass is priced as the sum over a few classes of operations of
 * max(operations / rate, bytes / bandwidth), and a fixed cost: one bound by
 * memory does not hide under one bound by arithmetic, which is how a stream of
 * kernels behaves. Shapes come from the configuration alone. Rates start as a
 * guess or as what is expected of a named card, and each pass that was run
 * corrects those that made up most of its time.
 *
 * Units: floating-point operations (a multiply-add is two), bytes, seconds.
 * Pure; any thread, one at a time.
 */
#ifndef NS_ENGINE_COST_H
#define NS_ENGINE_COST_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/batch.h"
#include "engine/model.h"

enum ns_cost_class {
    NS_COST_DENSE,     /* projections, dense mlp, router, self-conditioning */
    NS_COST_EXPERTS,
    NS_COST_ATTENTION,
    NS_COST_HEAD,      /* logits, statistics, soft embeddings */
    NS_COST_ROWS,      /* norms, rotations, sums: bytes of rows alone */
    NS_N_COST_CLASSES,
};

struct ns_cost_shape { /* of one model on one backend */
    /* Operations of a row. Of attention: of a pair of query and key, over all
     * layers of the kind and all heads. */
    double dense, conditioned, experts, head, full_pair, sliding_pair;
    /* Of them what rows that only write KV are spared in the last layer. */
    double spared_dense, spared_experts, spared_full_pair, spared_sliding_pair;
    /* Bytes read once a pass: all dense weights; one expert of all layers; the
     * embedding. Of a cached position: over all layers of the kind. */
    double dense_bytes, conditioned_bytes, expert_bytes, embedding_bytes;
    double full_bytes, sliding_bytes;
    /* Bytes of a row's activations that experts and row operations move. */
    double expert_row_bytes, row_bytes;
    double weight_bytes; /* all of them */
    double state_bytes;  /* of a canvas in flight */
    uint32_t n_experts, top_k;
    uint32_t window, canvas_length, max_position;
};

struct ns_cost_rates {
    double flops[NS_COST_ROWS]; /* per second */
    double bytes;                    /* per second */
    double pass_s;                   /* of any pass */
};

/* What a pass carries, in sums. */
struct ns_cost_load {
    double rows, conditioned_rows, head_rows, soft_rows;
    double full_pairs, sliding_pairs, kv_bytes;
    /* Of them by segments that only write KV: neither canvas nor head. */
    double writing_rows, writing_full_pairs, writing_sliding_pairs;
};

/* `value_bytes`: of an activation or cached value (4 on the cpu). Weights take
 * what they take packed, when the model was described or opened; else what the
 * checkpoint's type takes. `plain`: K and V of full layers apart. */
void ns_cost_shape_of(const struct ns_model *model, double value_bytes,
                      bool plain, struct ns_cost_shape *out);

/* A guess for a machine of which nothing was measured yet. */
struct ns_cost_rates ns_cost_guess(uint32_t n_threads);

struct ns_cost_card { /* what a data sheet says, and what is expected of it */
    const char *name; /* "h100-80gb" */
    double memory_bytes;
    struct ns_cost_rates bf16, fp8; /* dense weights in that type */
    double value_bytes;
};
/* NULL: there is none of that name. By index, NULL behind the last. */
const struct ns_cost_card *ns_cost_card(const char *name);
const struct ns_cost_card *ns_cost_card_at(uint32_t index);
/* What a card leaves for prefixes and canvases beside these weights, the vision
 * tower (1.15 GB), work rows (2.5 GB) and what its driver keeps (0.7 GB and
 * 3 %). */
double ns_cost_card_pool(const struct ns_cost_card *card,
                         const struct ns_cost_shape *shape);
/* The released 26B-A4B, without its files. `weight_bytes`: of a linear weight,
 * 2 (bf16) or 1 (FP8). */
void ns_cost_shape_released(double weight_bytes, struct ns_cost_shape *out);

/* Adds a segment of `rows` rows behind `position` cached ones. `head_rows` of
 * them meet the head, `soft_rows` leave a soft embedding, `conditioned` start
 * from one. */
void ns_cost_add(const struct ns_cost_shape *shape, struct ns_cost_load *load,
                 enum ns_segment_kind kind, uint32_t rows, uint32_t position,
                 uint32_t head_rows, uint32_t soft_rows, bool conditioned);

/* All segments of a batch. */
void ns_cost_add_batch(const struct ns_cost_shape *shape,
                       struct ns_cost_load *load,
                       const struct ns_batch *batch);

double ns_cost_seconds(const struct ns_cost_shape *shape,
                       const struct ns_cost_rates *rates,
                       const struct ns_cost_load *load);

/* Corrects the rates by a pass that took `seconds`: each class by its share of
 * the predicted time, so that passes of different make tell the classes apart
 * (a Kaczmarz step in the logarithms: rates stay positive, and a pass that was
 * off by more than a factor of two counts as one that was off by two). */
void ns_cost_learn(const struct ns_cost_shape *shape,
                   struct ns_cost_rates *rates,
                   const struct ns_cost_load *load, double seconds);

#endif
