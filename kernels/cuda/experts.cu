/* experts.cu - rows to their experts, two grouped products, and back.
 *
 * Contract: cpu/moe_ref.c. Copies of rows are sorted by expert and then by
 * row, by counting: a block an expert looks through the whole choice, twice.
 * No atomics: where a copy lies depends on the choice alone, and what is
 * computed for it not even on that. A row's copies are added with its experts
 * rising.
 */
#include "kernels/cuda/cuda.cuh"

enum { THREADS = 256 };

/* How many of the copies in front of this thread's, and in the whole block,
 * have `here` set; `part` is shared, a word a warp. */
__device__ static inline uint32_t
count_before(bool here, uint32_t *part, uint32_t *all)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = 0;
    unsigned bits = ns_ballot(here);

    __syncthreads(); /* part may still be read from the round before */
    if (lane == 0)
        part[warp] = (uint32_t)__popc(bits);
    __syncthreads();
    *all = 0;
    for (uint32_t i = 0; i < THREADS / 32; i++) {
        before += i < warp ? part[i] : 0;
        *all += part[i];
    }
    return before + (uint32_t)__popc(bits & ((1u << lane) - 1));
}

/* start[e + 1] = copies of expert e */
__global__ void
count_kernel(const int32_t *index, uint32_t copies, uint32_t *start)
{
    uint32_t *part = ns_shared<uint32_t>(0), total = 0, all;
    int32_t expert = (int32_t)blockIdx.x;

    for (uint32_t from = 0; from < copies; from += THREADS) {
        uint32_t i = from + threadIdx.x;

        count_before(i < copies && index[i] == expert, part, &all);
        total += all;
    }
    if (threadIdx.x == 0)
        start[blockIdx.x + 1] = total;
}

/* Sums the counts up, and cuts each expert's copies into tiles. */
__global__ void
tile_kernel(uint32_t *start, uint32_t n_experts, uint32_t per_tile,
            uint32_t matrix_rows, struct product_tile *tiles,
            uint32_t *n_tiles, bool counts)
{
    uint32_t n = 0;

    if (threadIdx.x != 0)
        return;
    if (counts)
        start[0] = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        if (counts)
            start[e + 1] += start[e];
        for (uint32_t at = start[e]; at < start[e + 1]; at += per_tile) {
            uint32_t rows = start[e + 1] - at;

            tiles[n].w_row = e * matrix_rows;
            tiles[n].first = at;
            tiles[n].n_rows = rows < per_tile ? rows : per_tile;
            n++;
        }
    }
    *n_tiles = n;
}

struct placing {
    const int32_t *index;
    const float *weight;
    uint32_t top_k, copies;
    struct expert_scratch s;
};

__global__ void
place_kernel(struct placing args)
{
    uint32_t *part = ns_shared<uint32_t>(0), all;
    uint32_t at = args.s.start[blockIdx.x], k = args.top_k;
    int32_t expert = (int32_t)blockIdx.x;

    for (uint32_t from = 0; from < args.copies; from += THREADS) {
        uint32_t i = from + threadIdx.x;
        bool here = i < args.copies && args.index[i] == expert;
        uint32_t to = at + count_before(here, part, &all);

        at += all;
        if (!here)
            continue;
        uint32_t row = i / k, rank = 0;

        for (uint32_t slot = 0; slot < k; slot++)
            rank += args.index[row * k + slot] < expert;
        args.s.row[to] = (int32_t)row;
        args.s.weight[to] = args.weight[i];
        args.s.place[row * k + rank] = (int32_t)to;
    }
}

__global__ void
combine_kernel(struct ns_rows y, const float *out, const int32_t *place,
               uint32_t top_k)
{
    const int32_t *from = place + (size_t)blockIdx.x * top_k;
    float *to = row_at(y, blockIdx.x);

    for (uint32_t j = threadIdx.x; j < y.n_cols; j += blockDim.x) {
        float sum = 0;

        for (uint32_t i = 0; i < top_k; i++)
            sum += out[(size_t)from[i] * y.n_cols + j];
        to[j] = sum;
    }
}

static void
sort_copies(struct cuda *cuda, const struct placing *args, uint32_t n_experts,
            uint32_t per_tile, uint32_t matrix_rows)
{
    const struct expert_scratch *s = &args->s;

    LAUNCH(cuda, n_experts, THREADS, THREADS / 32 * sizeof(uint32_t),
           count_kernel, args->index, args->copies, s->start);
    LAUNCH(cuda, 1, 32, 0, tile_kernel, s->start, n_experts, per_tile,
           matrix_rows, s->tiles, s->n_tiles, true);
    LAUNCH(cuda, n_experts, THREADS, THREADS / 32 * sizeof(uint32_t),
           place_kernel, *args);
}

void
experts_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
             const int32_t *index, const float *weight, uint32_t top_k,
             const struct ns_weight *gate_up, const struct ns_weight *down)
{
    struct cuda *cuda = cuda_of(be);
    const struct expert_scratch *s = &cuda->experts;
    uint32_t n_experts = gate_up->count, copies = x.n_rows * top_k;
    bool wide = takes_mma(cuda, gate_up->dtype) &&
                takes_mma(cuda, down->dtype) && copies / n_experts > 32;
    uint32_t per_tile = wide ? 128 : 32;
    struct placing placing = { index, weight, top_k, copies, *s };
    struct product p = {};

    sort_copies(cuda, &placing, n_experts, per_tile, weight_rows(gate_up));
    p.a = cuda_operand(cuda, x, gate_up->dtype, &p.lda);
    p.a_scale = cuda->operand_scale;
    p.gather = s->row;
    p.m = copies;
    p.w = gate_up->data;
    p.w_scale = weight_scales(gate_up);
    p.w_type = gate_up->dtype;
    p.ldw = weight_ld(gate_up);
    p.n = gate_up->n;
    p.k = gate_up->k;
    p.epilogue = GATED;
    p.y = s->inner;
    p.y_operand = takes_bf16(cuda, down->dtype);
    p.ldy = round_up(down->k, PAD);
    p.tiles = s->tiles;
    p.n_tiles = s->n_tiles;
    p.max_tiles = divide_up(copies, per_tile) + n_experts;
    p.rows_per_tile = per_tile;
    cuda_product(cuda, &p);

    LAUNCH(cuda, 1, 32, 0, tile_kernel, s->start, n_experts, per_tile,
           weight_rows(down), s->tiles, s->n_tiles, false);
    p.a = s->inner;
    p.lda = p.ldy;
    if (down->dtype == NS_E4M3) { /* its rows' scales wait for whole rows */
        struct ns_rows inner = { (float *)s->inner, copies, down->k, p.ldy };

        p.a = cuda_operand(cuda, inner, down->dtype, &p.lda);
    }
    p.gather = NULL;
    p.w = down->data;
    p.w_scale = weight_scales(down);
    p.w_type = down->dtype;
    p.ldw = weight_ld(down);
    p.n = down->n;
    p.k = down->k;
    p.epilogue = WEIGHTED;
    p.factor = s->weight;
    p.y = s->out;
    p.y_operand = false;
    p.ldy = down->n;
    cuda_product(cuda, &p);
    LAUNCH(cuda, y.n_rows, row_threads(y.n_cols), 0, combine_kernel, y,
           (const float *)s->out, (const int32_t *)s->place, top_k);
}
