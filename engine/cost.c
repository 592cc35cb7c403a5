#include "engine/cost.h"

#include <math.h>
#include <string.h>

/* ---- shapes ------------------------------------------------------------ */

/* What the sums need of a configuration. */
struct plan_shape {
    double hidden, dense, vocab, expert, n_heads, n_experts, top_k;
    double linear_bytes;    /* of a weight of the layers */
    double embedding_bytes; /* of one of the embedding and the conditioning */
    double value_bytes;     /* of a cached value */
    bool plain;
};

static void
add_layer(struct ns_cost_shape *out, const struct plan_shape *p, bool full,
          double head_dim, double n_kv_heads, double n_rotated)
{
    double q = p->n_heads * head_dim, kv = n_kv_heads * head_dim;
    double attention = p->hidden * (q + (full ? 1 : 2) * kv) + q * p->hidden;
    double mlp = 3 * p->hidden * p->dense, router = p->hidden * p->n_experts;
    double expert = 3 * p->hidden * p->expert;
    double pair = 4 * p->n_heads * head_dim; /* q.k and p.v */

    /* Whatever layer is added last is the one that stays here. */
    out->spared_dense = 2 * (q * p->hidden + mlp + router);
    out->spared_experts = 2 * p->top_k * expert;
    out->spared_full_pair = full ? pair : 0;
    out->spared_sliding_pair = full ? 0 : pair;

    out->dense += 2 * (attention + mlp + router);
    out->dense_bytes += (attention + mlp + router) * p->linear_bytes;
    out->experts += 2 * p->top_k * expert;
    out->expert_row_bytes += p->top_k * (2 * p->hidden + 3 * p->expert) *
                             p->value_bytes;
    out->row_bytes += 10 * p->hidden * p->value_bytes;
    out->expert_bytes += expert * p->linear_bytes;
    if (full) {
        out->full_pair += pair;
        out->full_bytes += (p->plain ? 2 * kv
                                     : kv + n_kv_heads * 2 * n_rotated) *
                           p->value_bytes;
    } else {
        out->sliding_pair += pair;
        out->sliding_bytes += 2 * kv * p->value_bytes;
    }
}

static void
add_ends(struct ns_cost_shape *out, const struct plan_shape *p)
{
    double conditioning = 3 * p->hidden * p->dense;

    out->conditioned = 2 * conditioning;
    out->conditioned_bytes = conditioning * p->embedding_bytes;
    out->head = 2 * p->hidden * p->vocab;
    out->embedding_bytes = p->hidden * p->vocab * p->embedding_bytes;
    out->n_experts = (uint32_t)p->n_experts;
    out->top_k = (uint32_t)p->top_k;
    out->weight_bytes = out->dense_bytes + out->conditioned_bytes +
                        out->embedding_bytes +
                        p->n_experts * out->expert_bytes;
    out->state_bytes = out->canvas_length *
                       (p->hidden * p->value_bytes + 64);
}

void
ns_cost_shape_of(const struct ns_model *model, double value_bytes, bool plain,
                 struct ns_cost_shape *out)
{
    const struct ns_config *config = &model->config;
    double bytes = (double)ns_dtype_bytes(model->dtype);
    struct plan_shape p = {
        .hidden = config->hidden,
        .dense = config->intermediate,
        .vocab = config->vocab,
        .expert = config->expert_dim,
        .n_heads = config->n_heads,
        .n_experts = config->n_experts,
        .top_k = config->top_k,
        .linear_bytes = bytes,
        .embedding_bytes = bytes,
        .value_bytes = value_bytes,
        .plain = plain,
    };

    memset(out, 0, sizeof(*out));
    out->window = config->sliding_window;
    out->canvas_length = config->canvas_length;
    out->max_position = config->max_position;
    for (uint32_t i = 0; i < config->n_layers; i++)
        add_layer(out, &p, config->layer[i].full, config->layer[i].head_dim,
                  config->layer[i].n_kv_heads,
                  config->partial_rotary * config->layer[i].head_dim / 2);
    add_ends(out, &p);
}

void
ns_cost_shape_released(double weight_bytes, struct ns_cost_shape *out)
{
    struct plan_shape p = {
        .hidden = 2816,
        .dense = 2112,
        .vocab = 262144,
        .expert = 704,
        .n_heads = 16,
        .n_experts = 128,
        .top_k = 8,
        .linear_bytes = weight_bytes,
        .embedding_bytes = 2,
        .value_bytes = 2,
    };

    memset(out, 0, sizeof(*out));
    out->window = 1024;
    out->canvas_length = 256;
    out->max_position = 262144;
    for (uint32_t i = 0; i < 30; i++) {
        bool full = i % 6 == 5;

        add_layer(out, &p, full, full ? 512 : 256, full ? 2 : 8, 64);
    }
    add_ends(out, &p);
}

/* ---- machines ---------------------------------------------------------- */

struct ns_cost_rates
ns_cost_guess(uint32_t n_threads)
{
    double flops = 4e10 * (n_threads ? n_threads : 1);

    return (struct ns_cost_rates){
        .flops = { flops, flops, flops / 2, flops },
        .bytes = 1e10,
        .pass_s = 1e-4,
    };
}

/* Peaks by the data sheets; of them is expected: dense products .70, experts
 * .55, attention .50, head .60, streaming .85, 0.4 ms a pass. Attention and
 * head are bf16 whatever the weights are. */
#define RATES(dense, bf16, bandwidth)                                         \
    { .flops = { (dense) * .70, (dense) * .55, (bf16) * .50, (bf16) * .60 }, \
      .bytes = (bandwidth) * .85, .pass_s = 4e-4 }

static const struct ns_cost_card cards[] = {
    { "h100-80gb", 80.0 * (1u << 30), RATES(989e12, 989e12, 3.35e12),
      RATES(1979e12, 989e12, 3.35e12), 2 },
    { "h200", 141e9, RATES(989e12, 989e12, 4.8e12),
      RATES(1979e12, 989e12, 4.8e12), 2 },
};

const struct ns_cost_card *
ns_cost_card_at(uint32_t index)
{
    return index < sizeof(cards) / sizeof(cards[0]) ? &cards[index] : NULL;
}

const struct ns_cost_card *
ns_cost_card(const char *name)
{
    const struct ns_cost_card *card = NULL;

    for (uint32_t i = 0; (card = ns_cost_card_at(i)) != NULL; i++)
        if (strcmp(card->name, name) == 0)
            break;
    return card;
}

double
ns_cost_card_pool(const struct ns_cost_card *card,
                  const struct ns_cost_shape *shape)
{
    double left = .97 * card->memory_bytes - shape->weight_bytes - 4.35e9;

    return left > 0 ? left : 0;
}

/* ---- loads and times --------------------------------------------------- */

/* Keys that `rows` causal rows see behind `position` others, within the last
 * `window`; 0: no window. */
static double
causal_pairs(double rows, double position, double window)
{
    double growing;

    if (window == 0 || position + rows <= window)
        return rows * (position + (rows + 1) / 2);
    growing = position < window ? window - position : 0;
    return growing * (position + (growing + 1) / 2) +
           (rows - growing) * window;
}

static double
smaller(double a, double b)
{
    return a < b ? a : b;
}

static double
larger(double a, double b)
{
    return a > b ? a : b;
}

void
ns_cost_add(const struct ns_cost_shape *shape, struct ns_cost_load *load,
            enum ns_segment_kind kind, uint32_t rows, uint32_t position,
            uint32_t head_rows, uint32_t soft_rows, bool conditioned)
{
    double reach = smaller(position, shape->window);
    bool canvas = kind == NS_SEGMENT_CANVAS;
    double full = canvas ? (double)rows * ((double)position + rows)
                         : causal_pairs(rows, position, 0);
    double sliding = canvas ? (double)rows * (reach + rows)
                            : causal_pairs(rows, position, shape->window);

    load->rows += rows;
    load->full_pairs += full;
    load->sliding_pairs += sliding;
    if (!canvas && head_rows == 0) {
        load->writing_rows += rows;
        load->writing_full_pairs += full;
        load->writing_sliding_pairs += sliding;
    }
    load->kv_bytes += shape->full_bytes * position +
                      shape->sliding_bytes * reach;
    load->head_rows += head_rows;
    load->soft_rows += soft_rows;
    if (conditioned)
        load->conditioned_rows += rows;
}

void
ns_cost_add_batch(const struct ns_cost_shape *shape, struct ns_cost_load *load,
                  const struct ns_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_segments; i++) {
        const struct ns_batch_segment *segment = &batch->segment[i];
        uint32_t head = segment->head == NS_HEAD_ALL    ? segment->n_tokens
                        : segment->head == NS_HEAD_LAST ? 1
                                                        : 0;

        ns_cost_add(shape, load, segment->kind, segment->n_tokens,
                    segment->position, head, segment->soft_out ? head : 0,
                    segment->soft_in);
    }
}

/* The two sides of each class: operations and bytes. */
struct sides {
    double flops[NS_N_COST_CLASSES], bytes[NS_N_COST_CLASSES];
};

static struct sides
sides_of(const struct ns_cost_shape *shape, const struct ns_cost_load *load)
{
    double hit = 0;
    struct sides s;

    /* Experts that some row goes to, were the choices independent. */
    if (shape->n_experts > 0)
        hit = shape->n_experts *
              (1 - pow(1 - (double)shape->top_k / shape->n_experts,
                       load->rows));
    s.flops[NS_COST_DENSE] = shape->dense * load->rows -
                             shape->spared_dense * load->writing_rows +
                             shape->conditioned * load->conditioned_rows;
    s.bytes[NS_COST_DENSE] =
        shape->dense_bytes +
        (load->conditioned_rows > 0 ? shape->conditioned_bytes : 0);
    s.flops[NS_COST_EXPERTS] = shape->experts * load->rows -
                               shape->spared_experts * load->writing_rows;
    s.bytes[NS_COST_EXPERTS] = hit * shape->expert_bytes +
                               load->rows * shape->expert_row_bytes;
    s.flops[NS_COST_ATTENTION] = shape->full_pair * load->full_pairs +
                                 shape->sliding_pair * load->sliding_pairs -
                                 shape->spared_full_pair *
                                     load->writing_full_pairs -
                                 shape->spared_sliding_pair *
                                     load->writing_sliding_pairs;
    s.bytes[NS_COST_ATTENTION] = load->kv_bytes;
    s.flops[NS_COST_HEAD] = shape->head * (load->head_rows + load->soft_rows);
    s.bytes[NS_COST_HEAD] =
        load->head_rows > 0
            ? shape->embedding_bytes * (load->soft_rows > 0 ? 2 : 1)
            : 0;
    s.flops[NS_COST_ROWS] = 0;
    s.bytes[NS_COST_ROWS] = load->rows * shape->row_bytes;
    return s;
}

static bool
bound_by_memory(const struct sides *s, const struct ns_cost_rates *rates,
                int c)
{
    return c == NS_COST_ROWS ||
           s->flops[c] / rates->flops[c] < s->bytes[c] / rates->bytes;
}

static double
seconds_of(const struct sides *s, const struct ns_cost_rates *rates, int c)
{
    return bound_by_memory(s, rates, c) ? s->bytes[c] / rates->bytes
                                        : s->flops[c] / rates->flops[c];
}

double
ns_cost_seconds(const struct ns_cost_shape *shape,
                const struct ns_cost_rates *rates,
                const struct ns_cost_load *load)
{
    struct sides s = sides_of(shape, load);
    double sum = rates->pass_s;

    for (int c = 0; c < NS_N_COST_CLASSES; c++)
        sum += seconds_of(&s, rates, c);
    return sum;
}

void
ns_cost_learn(const struct ns_cost_shape *shape, struct ns_cost_rates *rates,
              const struct ns_cost_load *load, double seconds)
{
    const double step = 0.25, most = 0.7; /* of log(measured / predicted) */
    struct sides s = sides_of(shape, load);
    double part[NS_N_COST_CLASSES], sum = rates->pass_s, squares, miss;
    double memory = 0;
    bool by_memory[NS_N_COST_CLASSES];

    if (!(seconds > 0))
        return;
    for (int c = 0; c < NS_N_COST_CLASSES; c++) {
        part[c] = seconds_of(&s, rates, c);
        sum += part[c];
    }
    miss = log(seconds / sum);
    miss = larger(-most, smaller(most, miss));
    squares = rates->pass_s / sum * (rates->pass_s / sum);
    for (int c = 0; c < NS_N_COST_CLASSES; c++) {
        by_memory[c] = bound_by_memory(&s, rates, c);
        if (by_memory[c])
            memory += part[c] / sum;
        else
            squares += part[c] / sum * (part[c] / sum);
    }
    squares += memory * memory;
    for (int c = 0; c < NS_N_COST_CLASSES; c++)
        if (!by_memory[c])
            rates->flops[c] *= exp(-step * miss * part[c] / sum / squares);
    rates->bytes *= exp(-step * miss * memory / squares);
    rates->pass_s *= exp(step * miss * (rates->pass_s / sum) / squares);
}
