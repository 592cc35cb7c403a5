#include "kernels/cpu/scratch.h"

#include <string.h>

/* Takes `bytes` from the front of what is left; with a NULL base it only
 * counts. Sizes come from a checked config and saturate rather than wrap. */
static void *
carve(unsigned char *base, size_t *used, size_t count, size_t bytes)
{
    void *out = base ? base + *used : NULL;

    if (__builtin_mul_overflow(count, bytes, &bytes) ||
        bytes > SIZE_MAX / 2 - 63 - *used)
        *used = SIZE_MAX / 2;
    else
        *used += scratch_round(bytes);
    return out;
}

void
expert_scratch_carve(struct expert_scratch *s, unsigned char *base,
                     uint32_t n_rows, uint32_t top_k, uint32_t n_experts,
                     uint32_t hidden, uint32_t inner)
{
    size_t copies = (size_t)n_rows * top_k, used = 0;

    s->max_tasks = (uint32_t)(copies / EXPERT_ROWS + n_experts);
    s->row = carve(base, &used, copies, sizeof(*s->row));
    s->slot = carve(base, &used, copies, sizeof(*s->slot));
    s->place = carve(base, &used, copies, sizeof(*s->place));
    s->n_placed = carve(base, &used, n_rows, sizeof(*s->n_placed));
    s->start = carve(base, &used, (size_t)n_experts + 1, sizeof(*s->start));
    s->tasks = carve(base, &used, s->max_tasks, sizeof(*s->tasks));
    s->n_of_size = carve(base, &used, EXPERT_ROWS + 2, sizeof(*s->n_of_size));
    s->copies = carve(base, &used, copies, hidden * sizeof(float));
    s->inner = carve(base, &used, copies, operand_ld(inner) * sizeof(float));
    s->bytes = used;
}

uint32_t
expert_scratch_sort(struct expert_scratch *s, const int32_t *index,
                    uint32_t n_rows, uint32_t top_k, uint32_t n_experts)
{
    uint32_t n_copies = n_rows * top_k, n_tasks = 0, at = 0;

    memset(s->start, 0, ((size_t)n_experts + 1) * sizeof(*s->start));
    memset(s->n_placed, 0, n_rows * sizeof(*s->n_placed));
    for (uint32_t i = 0; i < n_copies; i++)
        s->start[index[i]]++;
    for (uint32_t e = 0; e <= n_experts; e++) {
        uint32_t n = s->start[e];

        s->start[e] = at;
        at += n;
    }
    for (uint32_t i = 0; i < n_copies; i++) {
        uint32_t at_expert = s->start[index[i]]++;

        s->row[at_expert] = i / top_k;
        s->slot[at_expert] = i;
    }
    /* start[e] has moved to where expert e ends. */
    for (uint32_t i = 0; i < n_copies; i++) {
        uint32_t row = s->row[i];

        s->place[row * top_k + s->n_placed[row]++] = i;
    }

    /* Each expert's copies in even tasks, counted by size, then placed with
     * the largest first. */
    memset(s->n_of_size, 0, (EXPERT_ROWS + 2) * sizeof(*s->n_of_size));
    for (int round = 0; round < 2; round++) {
        for (uint32_t e = 0; e < n_experts; e++) {
            uint32_t first = e == 0 ? 0 : s->start[e - 1];
            uint32_t left = s->start[e] - first;
            uint32_t cuts = (left + EXPERT_ROWS - 1) / EXPERT_ROWS;

            for (; cuts > 0; cuts--) {
                uint32_t n = left / cuts;

                if (round == 0) {
                    s->n_of_size[EXPERT_ROWS - n + 1]++;
                    n_tasks++;
                } else {
                    s->tasks[s->n_of_size[EXPERT_ROWS - n]++] =
                        (struct expert_task){ e, first, n };
                }
                first += n;
                left -= n;
            }
        }
        for (uint32_t i = 1; round == 0 && i < EXPERT_ROWS + 2; i++)
            s->n_of_size[i] += s->n_of_size[i - 1];
    }
    return n_tasks;
}

void
head_scratch_carve(struct head_scratch *s, unsigned char *base,
                   uint32_t n_rows, uint32_t vocab, uint32_t hidden)
{
    uint32_t n_tiles = (vocab + HEAD_TILE - 1) / HEAD_TILE;
    size_t used = 0;

    s->n_rows = n_rows < HEAD_GROUP ? n_rows : HEAD_GROUP;
    s->n_tiles = n_tiles;
    s->part_tiles = (n_tiles + HEAD_PARTS - 1) / HEAD_PARTS;
    s->n_parts = (n_tiles + s->part_tiles - 1) / s->part_tiles;
    s->parts = carve(base, &used, (size_t)s->n_rows * s->n_parts,
                     sizeof(*s->parts));
    s->tiles = carve(base, &used, (size_t)s->n_rows * n_tiles,
                     sizeof(*s->tiles));
    s->top = carve(base, &used, (size_t)s->n_rows * s->n_parts,
                   NS_HEAD_TOP * sizeof(*s->top));
    s->soft = carve(base, &used, (size_t)s->n_rows * s->n_parts,
                    hidden * sizeof(float));
    s->bytes = used;
}

void
head_thread_carve(struct head_thread *s, unsigned char *base, uint32_t vocab,
                  uint32_t hidden)
{
    size_t whole = ((size_t)vocab + HEAD_TILE - 1) / HEAD_TILE * HEAD_TILE;
    size_t used = 0;

    s->operand = carve(base, &used, HEAD_ROWS,
                       operand_ld(hidden) * sizeof(float));
    s->l = carve(base, &used, HEAD_ROWS, HEAD_TILE * sizeof(float));
    s->panel = carve(base, &used, HEAD_TILE, PANEL * sizeof(float));
    s->rounded = carve(base, &used, HEAD_ROWS, HEAD_TILE * sizeof(float));
    s->row = carve(base, &used, whole, sizeof(float));
    s->row_e = carve(base, &used, whole, sizeof(float));
    s->bytes = used;
}

void
attention_thread_carve(struct attention_thread *s, unsigned char *base,
                       uint32_t head_dim, uint32_t n_heads)
{
    size_t pairs = attention_pairs(head_dim), rows, used = 0;

    rows = pairs > n_heads ? pairs : n_heads;

    s->k = carve(base, &used, NS_PAGE, operand_ld(head_dim) * sizeof(float));
    s->v = carve(base, &used, NS_PAGE, operand_ld(head_dim) * sizeof(float));
    s->q = carve(base, &used, rows, attention_ld(head_dim) * sizeof(float));
    s->sum = carve(base, &used, rows, attention_ld(head_dim) * sizeof(float));
    s->score = carve(base, &used, rows, NS_PAGE * sizeof(float));
    s->most = carve(base, &used, rows, sizeof(float));
    s->total = carve(base, &used, rows, sizeof(float));
    s->bytes = used;
}

static size_t
larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t
cpu_scratch_bytes(const struct ns_backend_sizes *sizes)
{
    struct expert_scratch experts;
    struct head_scratch head;

    expert_scratch_carve(&experts, NULL, sizes->n_rows, sizes->top_k,
                         sizes->n_experts, sizes->hidden, sizes->expert_dim);
    head_scratch_carve(&head, NULL, sizes->n_head_rows, sizes->vocab,
                       sizes->hidden);
    return larger(larger(experts.bytes, head.bytes),
                  ((size_t)sizes->n_rows + 1) * sizeof(uint32_t));
}

size_t
cpu_thread_scratch_bytes(const struct ns_backend_sizes *sizes)
{
    struct attention_thread attention;
    struct head_thread head;
    size_t experts = 0, narrow = 0; /* heads, of which more pairs fit */

    head_thread_carve(&head, NULL, sizes->vocab, sizes->hidden);
    attention_thread_carve(&attention, NULL, sizes->head_dim, sizes->n_heads);
    carve(NULL, &narrow, 2 * NS_PAGE,
          operand_ld(sizes->head_dim) * sizeof(float));
    carve(NULL, &narrow, ATTENTION_BYTES + 8 * 64, 1); /* 64: each array's end */
    carve(NULL, &experts, EXPERT_ROWS,
          operand_ld(sizes->hidden) * sizeof(float));
    carve(NULL, &experts, EXPERT_ROWS,
          2 * operand_ld(sizes->expert_dim) * sizeof(float));
    return larger(larger(OPERAND_BYTES, experts),
                  larger(larger(attention.bytes, narrow), head.bytes));
}
