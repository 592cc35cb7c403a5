/* batch.h - the ragged batch: what one pass works on, field by field.
 *
 * Built anew for every pass by the engine, from the planner's choice: segments
 * of any kinds and sequences are laid out as flat rows. The order of rows is
 *
 *     canvases with a soft embedding | canvases on their first step |
 *     other segments that need the head | segments that only write KV
 *
 * so that each part of a pass that concerns some rows concerns a leading run
 * of them: self-conditioning the first, decoder scalars the first two, the
 * last layer's output the first three. A row's results do not depend on its
 * place (the row contract), so the order is free to choose.
 *
 * Owns:   its host arrays and their device copy, sized once.
 * Thread: engine thread.
 */
#ifndef NS_ENGINE_BATCH_H
#define NS_ENGINE_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"

/* A picture's placeholders in a prompt: positions first..end - 1, which see
 * each other whole, and the rows that stand in their place. */
struct ns_batch_group {
    uint32_t first, end;
    const float *soft; /* host: [end - first][H]; NULL: the placeholders' own */
};

/* What the engine puts in. Tokens, groups and soft tokens are borrowed until
 * the pass has run. */
struct ns_batch_segment {
    enum ns_segment_kind kind;
    uint32_t slot;     /* of the page tables, and of the soft store */
    uint32_t position; /* of its first token: cached before it */
    uint32_t n_tokens;
    const int32_t *tokens;
    const struct ns_batch_group *group; /* rising; those outside are passed by */
    uint32_t n_groups;
    bool soft_in;          /* canvas: a soft embedding waits in the store */
    bool soft_out;         /* canvas: not the last allowed step */
    enum { NS_HEAD_NONE, NS_HEAD_LAST, NS_HEAD_ALL } head;
    /* Per head row of the segment, n of them (1 or n_tokens): */
    float inv_temperature, top_p;
    const double *uniform; /* < 0: argmax */
    const uint32_t *const *mask; /* NULL: none; see ns_head, as of */
    struct ns_candidate *top;    /* [n][NS_HEAD_TOP] out; NULL: not wanted */
    uint32_t owner;        /* the engine's own; untouched */
    uint32_t row0;         /* out: first row */
    uint32_t head0;        /* out: first head row */
};

struct ns_batch {
    uint32_t max_rows, max_segments, window;
    bool causal_groups; /* groups see each other no more than text does */
    uint32_t n_segments;
    struct ns_batch_segment *segment; /* in row order once laid out */
    struct ns_segment *kernel_segment;

    uint32_t n_rows;
    uint32_t n_soft_in; /* rows: leading run with a soft embedding  */
    uint32_t n_canvas;  /* rows: leading run of canvases            */
    uint32_t n_live;    /* rows: leading run that the head may want */
    uint32_t *soft_in_from; /* [n_soft_in] rows of the soft store */

    uint32_t n_images;
    struct ns_batch_image { /* rows of the pass that get soft tokens */
        uint32_t row0, n_rows;
        const float *soft;
    } *image; /* [max_rows]: each has a row at least */

    uint32_t n_head; /* head rows; the first n_soft_out write soft rows */
    uint32_t n_soft_out;
    uint32_t *head_row;    /* [n_head] row of the pass */
    uint32_t *soft_out_to; /* [n_soft_out] rows of the soft store */
    float *inv_temperature, *top_p;
    double *uniform;
    const uint32_t **mask;
    struct ns_candidate **top;
    bool any_top_p, any_mask, any_top;
    int32_t *argmax, *sampled; /* out of the head */
    float *entropy;

    struct ns_pass pass; /* for the kernels */

    /* private */
    struct ns_backend *be;
    int32_t *host;   /* ids, position, lo_full, lo_sliding, hi: [5][max_rows] */
    uint8_t *decoder;
    int32_t *device; /* the same, then decoder */
    uint32_t canvas_stride; /* rows of one slot in the soft store */
};

enum ns_status ns_batch_create(struct ns_backend *be, uint32_t max_rows,
                               uint32_t max_segments, uint32_t window,
                               uint32_t canvas_stride, struct ns_batch **out,
                               struct ns_error *err);
void ns_batch_destroy(struct ns_batch *batch); /* takes NULL */

void ns_batch_reset(struct ns_batch *batch);
/* Adds a segment; the caller has kept to max_rows and max_segments. */
void ns_batch_add(struct ns_batch *batch,
                  const struct ns_batch_segment *segment);
/* Orders and numbers the rows, and uploads what the kernels read. */
void ns_batch_lay_out(struct ns_batch *batch, const int32_t *page_full,
                      const int32_t *page_sliding, uint32_t page_stride);

#endif
