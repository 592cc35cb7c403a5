/* scratch.h - where the tuned ops keep what they keep during an op.
 *
 * All of it is taken by reserve() and sized by scratch.c from the bounds of a
 * pass. No two ops run at once, so each starts at the front.
 */
#ifndef NS_KERNELS_CPU_SCRATCH_H
#define NS_KERNELS_CPU_SCRATCH_H

#include "kernels/cpu/cpu.h"

enum {
    BLOCK_ROWS = 224,        /* rows that go through a weight together */
    OPERAND_BYTES = 1 << 20, /* of such a block, rounded or gathered */
    EXPERT_ROWS = 112,       /* copies of one expert in one task */
    ATTENTION_ROWS = 256,    /* (row, head) pairs that share a key tile, and */
    ATTENTION_BYTES = 568 << 10, /* what they keep of it in L2, both at most */
    HEAD_TILE = 256,         /* vocabulary rows that stay hot, with their sum */
    HEAD_PARTS = 16,         /* at most: parts of the vocabulary */
    HEAD_ROWS = 128,         /* rows against one tile */
    HEAD_GROUP = 256,        /* rows whose parts are kept at a time */
};

/* Row length of an operand's copy: AMX eats 32 inputs at a time, and rows that
 * lie a power of two apart would share the same few sets of the caches. */
static inline uint32_t
operand_ld(uint32_t k)
{
    uint32_t ld = (k + 31) & ~31u;

    return ld % 512 ? ld : ld + 32;
}

static inline size_t
scratch_round(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static inline void *
scratch_of_thread(const struct cpu *cpu, uint32_t thread)
{
    return cpu->thread_scratch + thread * cpu->thread_scratch_bytes;
}

/* One copy of a row for one expert. */
struct expert_task {
    uint32_t expert, first, n_copies; /* first: place in the sorted order */
};

/* What experts() keeps, carved from the shared scratch. */
struct expert_scratch {
    uint32_t *row;      /* [copies] row of x, sorted by expert             */
    uint32_t *slot;     /* [copies] row * top_k + slot, in the same order  */
    uint32_t *place;    /* [rows][top_k] places of a row, experts rising   */
    uint32_t *n_placed; /* [rows] */
    uint32_t *start;    /* [n_experts + 1] */
    struct expert_task *tasks; /* by falling load */
    uint32_t max_tasks;
    uint32_t *n_of_size;
    float *copies; /* [copies][hidden] down's output */
    float *inner;  /* [copies][inner] gelu(gate) * up, if tasks are cut */
    size_t bytes;
};

/* With a NULL base it only counts the bytes. */
void expert_scratch_carve(struct expert_scratch *scratch, unsigned char *base,
                          uint32_t n_rows, uint32_t top_k, uint32_t n_experts,
                          uint32_t hidden, uint32_t inner);

/* Fills all but `copies` from the experts of each row. Returns how many tasks
 * there are. */
uint32_t expert_scratch_sort(struct expert_scratch *scratch,
                             const int32_t *index, uint32_t n_rows,
                             uint32_t top_k, uint32_t n_experts);

/* What a part of the vocabulary says about a row. l is the logit times the
 * inverse temperature. */
struct head_part {
    double sum;      /* of e^(l - highest)                  */
    double weighted; /* of (l - highest) e^(l - highest)    */
    float highest;   /* l                                   */
    float best;      /* the highest logit                   */
    int32_t argmax;  /* its first token                     */
    uint32_t n_top;  /* candidates                          */
};

struct head_tile {
    float sum, reference; /* of e^(l - reference) */
};

/* What head() keeps of up to HEAD_GROUP rows. */
struct head_scratch {
    uint32_t n_rows, n_tiles, part_tiles, n_parts;
    struct head_part *parts; /* [rows][parts] */
    struct head_tile *tiles; /* [rows][tiles] */
    struct ns_candidate *top; /* [rows][parts][NS_HEAD_TOP] */
    float *soft;             /* [parts][rows][hidden] sums of e^(l - .) E */
    size_t bytes;
};

void head_scratch_carve(struct head_scratch *scratch, unsigned char *base,
                        uint32_t n_rows, uint32_t vocab, uint32_t hidden);

/* What a thread keeps in head(). */
struct head_thread {
    void *operand; /* [HEAD_ROWS][hidden] */
    float *l;      /* [HEAD_ROWS][HEAD_TILE] logits, then e^(l - highest) */
    float *panel;  /* [HEAD_TILE][32] of the table */
    void *rounded; /* [HEAD_ROWS][HEAD_TILE] */
    float *row, *row_e; /* [vocab] each, for a nucleus */
    size_t bytes;
};

/* What a row sees of a key tile: keys first..end - 1. */
struct span {
    uint32_t first, end;
};

/* What a thread keeps in attention(). */
struct attention_thread {
    float *k;     /* [2][d][32]: a tile of K, keys side by side */
    float *v;     /* [NS_PAGE][d], padded; only where d has no whole panels */
    float *q, *sum; /* [pairs][attention_ld(d)]: queries, and sums of V */
    float *score;   /* [pairs][NS_PAGE], then weights */
    float *most, *total; /* [pairs]; total 0: has seen nothing yet */
    size_t bytes;
};

/* Rows an odd number of cache lines apart. */
static inline uint32_t
attention_ld(uint32_t head_dim)
{
    return ((head_dim + 31) & ~31u) + 16;
}

/* How many pairs of a row and a head share a key tile. */
static inline uint32_t
attention_pairs(uint32_t head_dim)
{
    size_t fit = ATTENTION_BYTES /
                 ((2 * attention_ld(head_dim) + NS_PAGE + 2) * sizeof(float));

    return fit < ATTENTION_ROWS ? (uint32_t)fit : ATTENTION_ROWS;
}

void attention_thread_carve(struct attention_thread *scratch,
                            unsigned char *base, uint32_t head_dim,
                            uint32_t n_heads);

void head_thread_carve(struct head_thread *scratch, unsigned char *base,
                       uint32_t vocab, uint32_t hidden);

#endif
