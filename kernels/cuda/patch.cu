/* patch.cu - what the vision tower does besides products and attention.
 *
 * Contract: cpu/patch_ref.c. A few thousand rows a picture: plain kernels.
 */
#include "kernels/cuda/cuda.cuh"

enum { WARPS = 4 };

__global__ void
place_kernel(struct ns_rows rows, const float *table, uint32_t n_positions,
             const int32_t *x, const int32_t *y)
{
    uint32_t i = blockIdx.x, n = rows.n_cols;
    const float *by_x = table + (size_t)x[i] * n;
    const float *by_y = table + ((size_t)n_positions + (size_t)y[i]) * n;
    float *row = row_at(rows, i);

    for (uint32_t j = threadIdx.x; j < n; j += blockDim.x)
        row[j] += by_x[j] + by_y[j];
}

void
patch_place_cuda(struct ns_backend *be, struct ns_rows rows,
                 const float *table, uint32_t n_positions, const int32_t *x,
                 const int32_t *y)
{
    LAUNCH(cuda_of(be), rows.n_rows, row_threads(rows.n_cols), 0, place_kernel,
           rows, table, n_positions, x, y);
}

/* A warp for each (row, head of q, k or v). The output may be the input. */
__global__ void
patch_qkv_kernel(struct ns_patch_qkv args)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t n = args.q.n_cols, d = n / args.n_heads, quarter = d / 4;
    uint32_t item = blockIdx.y * WARPS + warp, row = blockIdx.x;
    float *x = ns_shared<float>(warp * d * sizeof(float));
    uint32_t kind = item / args.n_heads; /* q, k, v */
    uint32_t head = item % args.n_heads;
    const float *w = kind == 0 ? args.q_norm : kind == 1 ? args.k_norm : NULL;
    const float *raw;
    float sum = 0, inverse;
    float *out;

    if (kind > 2)
        return;
    raw = row_at(args.qkv, row) + (size_t)kind * n + (size_t)head * d;
    for (uint32_t j = lane; j < d; j += 32)
        sum = fmaf(raw[j], raw[j], sum);
    inverse = 1.0f / sqrtf(warp_sum(sum) / (float)d + args.eps);
    for (uint32_t j = lane; j < d; j += 32)
        x[j] = w ? raw[j] * inverse * w[j] : raw[j] * inverse;
    ns_syncwarp();
    /* The first half of a head turns by x, the second by y. */
    for (uint32_t j = lane; j < 2 * quarter && kind < 2; j += 32) {
        uint32_t pair = j % quarter, half = j / quarter;
        int32_t at = half ? args.y[row] : args.x[row];
        float angle = (float)at * args.frequency[pair];
        float c, s;
        float *to = x + half * 2 * quarter + pair;
        float a = to[0], b = to[quarter];

        ns_turn(angle, &c, &s);
        to[0] = fmaf(a, c, -(b * s));
        to[quarter] = fmaf(b, c, a * s);
    }
    ns_syncwarp();
    out = row_at(kind == 0 ? args.q : kind == 1 ? args.k : args.v, row) +
          (size_t)head * d;
    for (uint32_t j = lane; j < d; j += 32)
        out[j] = x[j];
}

void
patch_qkv_cuda(struct ns_backend *be, const struct ns_patch_qkv *args)
{
    uint32_t d = args->q.n_cols / args->n_heads;
    dim3 grid(args->q.n_rows, divide_up(3 * args->n_heads, WARPS));

    LAUNCH(cuda_of(be), grid, WARPS * 32, WARPS * d * sizeof(float),
           patch_qkv_kernel, *args);
}

struct pooling {
    struct ns_rows y, x;
    const uint32_t *corner, *columns;
    uint32_t side;
    float scale;
    const float *bias, *std;
};

__global__ void
pool_kernel(struct pooling args)
{
    uint32_t i = blockIdx.x, side = args.side;
    uint32_t corner = args.corner[i], columns = args.columns[i];
    float *y = row_at(args.y, i);

    for (uint32_t j = threadIdx.x; j < args.y.n_cols; j += blockDim.x) {
        float sum = 0, value;

        for (uint32_t line = 0; line < side; line++)
            for (uint32_t column = 0; column < side; column++)
                sum += row_at(args.x, corner + line * columns + column)[j];
        value = sum / (float)(side * side) * args.scale;
        y[j] = args.bias ? (value - args.bias[j]) * args.std[j] : value;
    }
}

void
patch_pool_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
                const uint32_t *corner, const uint32_t *columns, uint32_t side,
                float scale, const float *bias, const float *std)
{
    struct cuda *cuda = cuda_of(be);
    uint32_t n = y.n_rows, half = (uint32_t)(cuda->index_count / 2);

    for (uint32_t at = 0; at < n; at += half) {
        uint32_t part = n - at < half ? n - at : half;
        struct pooling args = { y, x, cuda->index, cuda->index + part, side,
                                scale, bias, std };

        args.y.data += at * y.stride;
        cuda_put(cuda, cuda->index, corner + at, part * sizeof(*corner));
        cuda_put(cuda, cuda->index + part, columns + at,
                 part * sizeof(*columns));
        LAUNCH(cuda, part, row_threads(y.n_cols), 0, pool_kernel, args);
    }
}

__global__ void
clamp_kernel(struct ns_rows y, struct ns_rows x, float least, float most)
{
    const float *from = row_at(x, blockIdx.x);
    float *to = row_at(y, blockIdx.x);

    for (uint32_t j = threadIdx.x; j < y.n_cols; j += blockDim.x)
        to[j] = from[j] < least ? least : from[j] > most ? most : from[j];
}

void
clamp_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           float least, float most)
{
    LAUNCH(cuda_of(be), y.n_rows, row_threads(y.n_cols), 0, clamp_kernel, y,
           x, least, most);
}

__global__ void
gelu_times_kernel(struct ns_rows y, struct ns_rows up)
{
    const float *by = row_at(up, blockIdx.x);
    float *to = row_at(y, blockIdx.x);

    for (uint32_t j = threadIdx.x; j < y.n_cols; j += blockDim.x)
        to[j] = gelu_tanh(to[j]) * by[j];
}

void
gelu_times_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows up)
{
    LAUNCH(cuda_of(be), y.n_rows, row_threads(y.n_cols), 0, gelu_times_kernel,
           y, up);
}
