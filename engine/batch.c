#include "engine/batch.h"

#include <stdlib.h>
#include <string.h>

enum { IDS, POSITION, LO_FULL, LO_SLIDING, HI, N_ARRAYS };

enum ns_status
ns_batch_create(struct ns_backend *be, uint32_t max_rows,
                uint32_t max_segments, uint32_t window,
                uint32_t canvas_stride, struct ns_batch **out,
                struct ns_error *err)
{
    struct ns_batch *batch = calloc(1, sizeof(*batch));
    enum ns_status status;
    void *memory;

    if (!batch)
        return ns_fail(err, NS_FATAL, "out of memory for the batch");
    batch->be = be;
    batch->max_rows = max_rows;
    batch->max_segments = max_segments;
    batch->window = window;
    batch->canvas_stride = canvas_stride;
    batch->segment = calloc(max_segments, sizeof(*batch->segment));
    batch->kernel_segment = calloc(max_segments,
                                   sizeof(*batch->kernel_segment));
    batch->image = calloc(max_rows, sizeof(*batch->image));
    batch->soft_in_from = calloc(max_rows, sizeof(uint32_t));
    batch->head_row = calloc(max_rows, sizeof(uint32_t));
    batch->soft_out_to = calloc(max_rows, sizeof(uint32_t));
    batch->inv_temperature = calloc(max_rows, sizeof(float));
    batch->top_p = calloc(max_rows, sizeof(float));
    batch->uniform = calloc(max_rows, sizeof(double));
    batch->mask = calloc(max_rows, sizeof(*batch->mask));
    batch->top = calloc(max_rows, sizeof(*batch->top));
    batch->argmax = calloc(max_rows, sizeof(int32_t));
    batch->sampled = calloc(max_rows, sizeof(int32_t));
    batch->entropy = calloc(max_rows, sizeof(float));
    batch->host = calloc((size_t)N_ARRAYS * max_rows, sizeof(int32_t));
    batch->decoder = calloc(max_rows, 1);
    if (!batch->segment || !batch->kernel_segment || !batch->image ||
        !batch->soft_in_from ||
        !batch->head_row || !batch->soft_out_to || !batch->inv_temperature ||
        !batch->top_p || !batch->uniform || !batch->mask || !batch->top ||
        !batch->argmax ||
        !batch->sampled || !batch->entropy || !batch->host ||
        !batch->decoder) {
        status = ns_fail(err, NS_FATAL, "out of memory for the batch");
        goto out;
    }
    status = be->ops->alloc(be,
                            (size_t)max_rows *
                                (N_ARRAYS * sizeof(int32_t) + 1),
                            "row descriptors", &memory, err);
    if (status != NS_OK)
        goto out;
    batch->device = memory;
    *out = batch;
    batch = NULL;
out:
    ns_batch_destroy(batch);
    return status;
}

void
ns_batch_destroy(struct ns_batch *batch)
{
    if (!batch)
        return;
    batch->be->ops->release(batch->be, batch->device);
    free(batch->segment);
    free(batch->kernel_segment);
    free(batch->image);
    free(batch->soft_in_from);
    free(batch->head_row);
    free(batch->soft_out_to);
    free(batch->inv_temperature);
    free(batch->top_p);
    free(batch->uniform);
    free(batch->mask);
    free(batch->top);
    free(batch->argmax);
    free(batch->sampled);
    free(batch->entropy);
    free(batch->host);
    free(batch->decoder);
    free(batch);
}

void
ns_batch_reset(struct ns_batch *batch)
{
    batch->n_segments = 0;
    batch->n_rows = 0;
}

void
ns_batch_add(struct ns_batch *batch, const struct ns_batch_segment *segment)
{
    batch->segment[batch->n_segments++] = *segment;
    batch->n_rows += segment->n_tokens;
}

/* Place in the row order: see batch.h. */
static int
rank(const struct ns_batch_segment *segment)
{
    if (segment->kind == NS_SEGMENT_CANVAS)
        return segment->soft_in ? 0 : 1;
    return segment->head != NS_HEAD_NONE ? 2 : 3;
}

static void
order_segments(struct ns_batch *batch)
{
    /* Insertion sort: stable, and the list is short and nearly in order. */
    for (uint32_t i = 1; i < batch->n_segments; i++) {
        struct ns_batch_segment held = batch->segment[i];
        uint32_t j = i;

        for (; j > 0 && rank(&batch->segment[j - 1]) > rank(&held); j--)
            batch->segment[j] = batch->segment[j - 1];
        batch->segment[j] = held;
    }
}

static void
describe_rows(struct ns_batch *batch, const struct ns_batch_segment *segment)
{
    int32_t *ids = batch->host, *position = ids + batch->max_rows;
    int32_t *lo_full = position + batch->max_rows;
    int32_t *lo_sliding = lo_full + batch->max_rows;
    int32_t *hi = lo_sliding + batch->max_rows;
    int32_t start = (int32_t)segment->position;
    int32_t window = (int32_t)batch->window;
    bool canvas = segment->kind == NS_SEGMENT_CANVAS;

    for (uint32_t i = 0; i < segment->n_tokens; i++) {
        uint32_t row = segment->row0 + i;
        int32_t at = start + (int32_t)i;
        /* A canvas sees the last W-1 cached positions, the same for all of
         * its rows; a causal row sees W keys, its own included. */
        int32_t lo = (canvas ? start : at) - window + 1;

        ids[row] = segment->tokens[i];
        position[row] = at;
        lo_full[row] = 0;
        lo_sliding[row] = lo > 0 ? lo : 0;
        hi[row] = canvas ? start : at + 1;
        batch->decoder[row] = canvas;
    }
}

/* Rows of a group see all of it, on both kinds of layer: behind themselves and
 * beyond the window too. What else they see reaches up to the group, so that
 * it stays one range. */
static void
describe_groups(struct ns_batch *batch, const struct ns_batch_segment *segment)
{
    int32_t *lo_sliding = batch->host + (size_t)LO_SLIDING * batch->max_rows;
    int32_t *hi = batch->host + (size_t)HI * batch->max_rows;
    uint32_t start = segment->position, stop = start + segment->n_tokens;

    for (uint32_t g = 0; g < segment->n_groups; g++) {
        const struct ns_batch_group *group = &segment->group[g];
        uint32_t first = group->first > start ? group->first : start;
        uint32_t end = group->end < stop ? group->end : stop;
        uint32_t row0 = segment->row0 + first - start;

        if (first >= end)
            continue;
        for (uint32_t row = row0; row < row0 + end - first &&
                                  !batch->causal_groups; row++) {
            hi[row] = (int32_t)end;
            if (lo_sliding[row] > (int32_t)group->first)
                lo_sliding[row] = (int32_t)group->first;
        }
        if (group->soft)
            batch->image[batch->n_images++] = (struct ns_batch_image){
                .row0 = row0,
                .n_rows = end - first,
                .soft = group->soft,
            };
    }
}

static void
add_head_rows(struct ns_batch *batch, struct ns_batch_segment *segment)
{
    uint32_t n = segment->head == NS_HEAD_ALL ? segment->n_tokens : 1;
    uint32_t row = segment->row0 + segment->n_tokens - n;

    segment->head0 = batch->n_head;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t h = batch->n_head++;

        batch->head_row[h] = row + i;
        batch->inv_temperature[h] = segment->inv_temperature;
        batch->top_p[h] = segment->top_p;
        batch->uniform[h] = segment->uniform ? segment->uniform[i] : -1.0;
        batch->mask[h] = segment->mask ? segment->mask[i] : NULL;
        batch->top[h] = segment->top ? segment->top + (size_t)i * NS_HEAD_TOP
                                     : NULL;
        batch->any_mask = batch->any_mask || batch->mask[h];
        batch->any_top = batch->any_top || batch->top[h];
        if (segment->top_p < 1.0f)
            batch->any_top_p = true;
        if (segment->soft_out) {
            batch->soft_out_to[h] = segment->slot * batch->canvas_stride + i;
            batch->n_soft_out = h + 1;
        }
    }
}

void
ns_batch_lay_out(struct ns_batch *batch, const int32_t *page_full,
                 const int32_t *page_sliding, uint32_t page_stride)
{
    struct ns_backend *be = batch->be;
    uint32_t row = 0;

    order_segments(batch);
    batch->n_soft_in = batch->n_canvas = batch->n_live = 0;
    batch->n_head = batch->n_soft_out = batch->n_images = 0;
    batch->any_top_p = batch->any_mask = batch->any_top = false;
    for (uint32_t s = 0; s < batch->n_segments; s++) {
        struct ns_batch_segment *segment = &batch->segment[s];
        int place = rank(segment);

        segment->row0 = row;
        batch->kernel_segment[s] = (struct ns_segment){
            .row0 = row,
            .n_rows = segment->n_tokens,
            .slot = segment->slot,
            .position = segment->position,
            .kind = segment->kind,
        };
        describe_rows(batch, segment);
        describe_groups(batch, segment);
        if (place == 0)
            for (uint32_t i = 0; i < segment->n_tokens; i++)
                batch->soft_in_from[row + i] =
                    segment->slot * batch->canvas_stride + i;
        row += segment->n_tokens;
        if (place == 0)
            batch->n_soft_in = row;
        if (place <= 1)
            batch->n_canvas = row;
        if (place <= 2)
            batch->n_live = row;
    }
    /* Head rows that make a soft embedding come first. */
    for (uint32_t s = 0; s < batch->n_segments; s++)
        if (batch->segment[s].soft_out)
            add_head_rows(batch, &batch->segment[s]);
    for (uint32_t s = 0; s < batch->n_segments; s++)
        if (!batch->segment[s].soft_out &&
            batch->segment[s].head != NS_HEAD_NONE)
            add_head_rows(batch, &batch->segment[s]);

    for (int a = 0; a < N_ARRAYS; a++)
        be->ops->upload(be, batch->device + (size_t)a * batch->max_rows,
                        batch->host + (size_t)a * batch->max_rows,
                        batch->n_rows * sizeof(int32_t));
    be->ops->upload(be, batch->device + (size_t)N_ARRAYS * batch->max_rows,
                    batch->decoder, batch->n_rows);
    batch->pass = (struct ns_pass){
        .n_rows = batch->n_rows,
        .n_segments = batch->n_segments,
        .segments = batch->kernel_segment,
        .ids = batch->device + (size_t)IDS * batch->max_rows,
        .position = batch->device + (size_t)POSITION * batch->max_rows,
        .lo_full = batch->device + (size_t)LO_FULL * batch->max_rows,
        .lo_sliding = batch->device + (size_t)LO_SLIDING * batch->max_rows,
        .hi = batch->device + (size_t)HI * batch->max_rows,
        .page_full = page_full,
        .page_sliding = page_sliding,
        .page_stride = page_stride,
        .decoder = (const uint8_t *)(batch->device +
                                     (size_t)N_ARRAYS * batch->max_rows),
    };
}
