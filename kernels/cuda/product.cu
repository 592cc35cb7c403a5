/* product.cu - products of rows with weights, plain and grouped.
 *
 * Contract: cpu/linear_ref.c; y = a . w^T and its epilogues (cuda.cuh).
 * Plan:     bf16: BM x BN outputs a block, 64 k a stage, stages in flight by
 *           cp.async, mma.sync m16n8k16 fed by ldmatrix from rows of 128 bytes
 *           whose 16-byte pieces are turned by the row (no bank conflicts).
 *           fp8: the same bytes, 128 k a stage, mma.sync m16n8k32; a stage's
 *           sum is made from zero and added.
 *           fp32: 64 x 64 outputs, chains of fmaf over k.
 * Rows:     an output is one chain over k in rising order whatever the tile
 *           around it, so small and large tiles give the same bits, and a tile
 *           of one row those of a tile of 128.
 * Grouped:  a tile names its rows of the weight and of the operand; rows are
 *           gathered as they are loaded.
 */
#include <assert.h>
#include <float.h>

#include "kernels/cuda/cuda.cuh"

extern "C" {
#include "kernels/float8.h"
}

/* ---- operands ------------------------------------------------------------ */

__global__ void
round_kernel(uint16_t *to, size_t ld, struct ns_rows x)
{
    const float *from = row_at(x, blockIdx.x);

    to += blockIdx.x * ld;
    for (uint32_t j = threadIdx.x * 2; j < ld; j += blockDim.x * 2) {
        float low = j < x.n_cols ? from[j] : 0.0f;
        float high = j + 1 < x.n_cols ? from[j + 1] : 0.0f;

        *(uint32_t *)(void *)(to + j) = ns_bf16_pair(low, high);
    }
}

/* Contract: ns_e4m3_row. */
__global__ void
quantise_kernel(uint8_t *to, size_t ld, float *scales, struct ns_rows x)
{
    const float *from = row_at(x, blockIdx.x);
    float largest = 0, scale;

    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x) {
        float size = fabsf(from[j]);

        largest = fmaxf(largest, size <= FLT_MAX ? size : INFINITY);
    }
    largest = block_max(largest, ns_shared<float>(0));
    scale = largest / NS_E4M3_MAX;
    if (scale < FLT_MIN)
        scale = largest > 0 ? FLT_MIN : 1;
    if (largest == INFINITY) /* there was one, or a NaN: no scale */
        scale = NAN;
    to += blockIdx.x * ld;
    for (uint32_t j = threadIdx.x; j < ld; j += blockDim.x)
        to[j] = j < x.n_cols ? ns_e4m3_of(from[j] / scale) : 0;
    if (threadIdx.x == 0)
        scales[blockIdx.x] = scale;
}

const void *
cuda_operand(struct cuda *cuda, struct ns_rows x, enum ns_dtype w_type,
             size_t *lda)
{
    if (!takes_mma(cuda, w_type)) {
        *lda = x.stride;
        return x.data;
    }
    if (w_type == NS_E4M3) {
        *lda = round_up(x.n_cols, PAD_E4M3);
        assert(x.n_rows * *lda <= cuda->operand_bytes &&
               x.n_rows <= cuda->operand_scales);
        LAUNCH(cuda, x.n_rows, row_threads(x.n_cols), 32 * sizeof(float),
               quantise_kernel, (uint8_t *)cuda->operand, *lda,
               cuda->operand_scale, x);
        return cuda->operand;
    }
    *lda = round_up(x.n_cols, PAD);
    assert(x.n_rows * *lda * sizeof(uint16_t) <= cuda->operand_bytes);
    LAUNCH(cuda, x.n_rows, row_threads(x.n_cols), 0, round_kernel,
           (uint16_t *)cuda->operand, *lda, x);
    return cuda->operand;
}

/* Rows of so many columns that cuda_operand takes at once. */
static uint32_t
operand_rows(const struct cuda *cuda, enum ns_dtype w_type, uint32_t k)
{
    size_t rows = cuda->operand_bytes / (round_up(k, PAD) * sizeof(uint16_t));

    if (w_type == NS_E4M3) {
        rows = cuda->operand_bytes / round_up(k, PAD_E4M3);
        if (rows > cuda->operand_scales)
            rows = cuda->operand_scales;
    }
    assert(rows > 0);
    return rows < UINT32_MAX ? (uint32_t)rows : UINT32_MAX;
}

/* ---- what both kernels share ----------------------------------------------- */

/* What a block works on. */
struct work {
    uint32_t first, n_rows; /* of the operand (through gather), and of y */
    uint32_t w_row;
};

/* False: there is no such tile. */
template <int BM>
__device__ static inline bool
take_work(const struct product &p, struct work *work)
{
    if (p.tiles) {
        if (blockIdx.x >= *p.n_tiles)
            return false;
        work->first = p.tiles[blockIdx.x].first;
        work->n_rows = p.tiles[blockIdx.x].n_rows;
        work->w_row = p.tiles[blockIdx.x].w_row;
        return true;
    }
    work->first = blockIdx.x * BM;
    work->n_rows = p.m - work->first < BM ? p.m - work->first : BM;
    work->w_row = 0;
    return true;
}

__device__ static inline void
store_output(const struct product &p, uint32_t row, uint32_t col, float v)
{
    size_t at = row * p.ldy + col;

    if (p.epilogue == GATED && p.y_operand) {
        /* The padding of an operand is written too: zeros, as the padding of
         * the weights is. */
        if (col < p.ldy)
            ((uint16_t *)p.y)[at] = ns_bf16_of(v);
        return;
    }
    if (col >= p.n)
        return;
    float *y = (float *)p.y;

    if (p.epilogue == WEIGHTED)
        y[at] = v * p.factor[row];
    else if (p.epilogue == ADD)
        y[at] = fmaf(y[at], p.factor[row], v);
    else
        y[at] = v;
}

/* Rows of the packed weight that a product goes over. */
static uint32_t
packed_columns(const struct product *p)
{
    if (p->epilogue != GATED)
        return p->n;
    return 2 * (uint32_t)(p->y_operand ? p->ldy : round_up(p->n, 8));
}

__device__ static inline uint32_t
weight_columns(const struct product &p)
{
    return p.epilogue == GATED ? 2 * ((p.n + 7) / 8 * 8) : p.n;
}

/* ---- fp32 ------------------------------------------------------------------ */

enum { FP32_TILE = 64, FP32_K = 16, FP32_LD = FP32_TILE + 4 };

/* Column of the tile that is output j (0..3) of thread x (0..15): in GATED 0
 * and 1 are gates, 2 and 3 their ups. */
__device__ static inline uint32_t
fp32_column(bool gated, uint32_t x, uint32_t j)
{
    uint32_t output = 2 * x + j % 2;

    return gated ? output / 8 * 16 + output % 8 + j / 2 * 8 : 4 * x + j;
}

template <class W>
__global__ void
product_fp32_kernel(struct product p)
{
    float *a = ns_shared<float>(0);                          /* [k][row] */
    float *b = ns_shared<float>(FP32_K * FP32_LD * sizeof(float));
    const float *operand = (const float *)p.a;
    const W *w = (const W *)p.w;
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    uint32_t n0 = blockIdx.y * FP32_TILE, columns = weight_columns(p);
    bool gated = p.epilogue == GATED;
    float sum[4][4];
    struct work work;

    if (!take_work<FP32_TILE>(p, &work))
        return;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            sum[i][j] = 0;
    for (uint32_t k0 = 0; k0 < p.k; k0 += FP32_K) {
        for (uint32_t i = threadIdx.x; i < FP32_TILE * FP32_K; i += 256) {
            uint32_t line = i / FP32_K, k = i % FP32_K;
            float v = 0;

            if (line < work.n_rows && k0 + k < p.k) {
                uint32_t row = work.first + line;

                if (p.gather)
                    row = (uint32_t)p.gather[row];
                v = operand[row * p.lda + k0 + k];
            }
            a[k * FP32_LD + line] = v;
        }
        for (uint32_t i = threadIdx.x; i < FP32_TILE * FP32_K; i += 256) {
            uint32_t n = p.k_rows ? i % FP32_TILE : i / FP32_K;
            uint32_t k = p.k_rows ? i / FP32_TILE : i % FP32_K;
            float v = 0;

            if (n0 + n < columns && k0 + k < p.k)
                v = as_float<W>(p.k_rows
                                    ? w[(k0 + k) * p.ldw + n0 + n]
                                    : w[(work.w_row + n0 + n) * p.ldw + k0 +
                                        k]);
            b[k * FP32_LD + n] = v;
        }
        __syncthreads();
        uint32_t depth = p.k - k0 < FP32_K ? p.k - k0 : FP32_K;

        if (4 * ty >= work.n_rows)
            depth = 0; /* rows that nobody stores */
        for (uint32_t k = 0; k < depth; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(a[k * FP32_LD + 4 * ty + i],
                                     b[k * FP32_LD +
                                       fp32_column(gated, tx, j)],
                                     sum[i][j]);
        __syncthreads();
    }
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t line = 4 * ty + i, row = work.first + line;

        if (line >= work.n_rows)
            continue;
        if (gated)
            for (uint32_t j = 0; j < 2; j++) {
                uint32_t column = n0 / 2 + 2 * tx + j;

                if (column < p.n)
                    ((float *)p.y)[row * p.ldy + column] =
                        gelu_tanh(sum[i][j]) * sum[i][j + 2];
            }
        else
            for (uint32_t j = 0; j < 4; j++)
                store_output(p, row, n0 + 4 * tx + j, sum[i][j]);
    }
}

/* ---- bf16 and fp8 ---------------------------------------------------------- */

enum { ROW_BYTES = 128 }; /* of one row a stage */

/* Byte of 16-byte piece `piece` of a row, turned by the row. */
__device__ static inline uint32_t
turned(uint32_t row, uint32_t piece, uint32_t row_bytes)
{
    return row * row_bytes + ((piece ^ (row & 7)) << 4);
}

template <int BM, int BN, int WARPS_M, int WARPS_N, int STAGES>
struct mma_shape {
    static const int THREADS = WARPS_M * WARPS_N * 32;
    static const int A_BYTES = BM * ROW_BYTES;
    static const int B_BYTES = BN * ROW_BYTES;
    static const int STAGE = A_BYTES + B_BYTES;
    static const int SHARED = STAGES * STAGE;
    static const int A_PIECES = BM * 8 / THREADS; /* a thread */
    static const int B_PIECES = BN * 8 / THREADS;
    static const int MI = BM / WARPS_M / 16; /* of m16 a warp */
    static const int NI = BN / WARPS_N / 8;  /* of n8 */
};

/* T: uint16_t, bf16; or uint8_t, codes (no K_ROWS). */
template <class T, int BM, int BN, int WARPS_M, int WARPS_N, int STAGES,
          bool K_ROWS>
__global__ void
__launch_bounds__(WARPS_M * WARPS_N * 32, sizeof(T) == 1 ? 1 : 2)
product_mma_kernel(struct product p)
{
    typedef mma_shape<BM, BN, WARPS_M, WARPS_N, STAGES> S;
    const bool FP8 = sizeof(T) == 1;
    const uint32_t BK = ROW_BYTES / sizeof(T), PIECE = 16 / sizeof(T);
    unsigned char *shared = ns_shared<unsigned char>(0);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t wm = warp / WARPS_N * (BM / WARPS_M);
    uint32_t wn = warp % WARPS_N * (BN / WARPS_N);
    uint32_t n0 = blockIdx.y * BN, columns = weight_columns(p);
    uint32_t n_steps = (p.k + BK - 1) / BK;
    const T *w = (const T *)p.w;
    const T *a_from[S::A_PIECES], *b_from[S::B_PIECES];
    bool a_there[S::A_PIECES], b_there[S::B_PIECES];
    float sum[S::MI][S::NI][4], stage[S::MI][S::NI][4]; /* stage: of fp8 */
    struct work work;

    if (!take_work<BM>(p, &work))
        return;

    /* What this thread loads a stage: fixed pieces, 64 k further each time. */
    for (int i = 0; i < S::A_PIECES; i++) {
        uint32_t piece = threadIdx.x + (uint32_t)i * S::THREADS;
        uint32_t row = work.first + piece / 8;

        a_there[i] = piece / 8 < work.n_rows;
        if (!a_there[i])
            row = work.first;
        if (p.gather)
            row = (uint32_t)p.gather[row];
        a_from[i] = (const T *)p.a + row * p.lda + piece % 8 * PIECE;
    }
    for (int i = 0; i < S::B_PIECES; i++) {
        uint32_t piece = threadIdx.x + (uint32_t)i * S::THREADS;

        if (K_ROWS) {
            uint32_t column = n0 + piece % (BN / 8) * 8;

            b_there[i] = column < p.ldw;
            b_from[i] = w + piece / (BN / 8) * p.ldw +
                        (b_there[i] ? column : 0);
        } else {
            uint32_t row = n0 + piece / 8;

            b_there[i] = row < columns;
            b_from[i] = w + (work.w_row + (b_there[i] ? row : 0)) * p.ldw +
                        piece % 8 * PIECE;
        }
    }

    auto load = [&](uint32_t step) {
        unsigned char *a = shared + step % STAGES * S::STAGE;
        unsigned char *b = a + S::A_BYTES;

        for (int i = 0; i < S::A_PIECES; i++) {
            uint32_t piece = threadIdx.x + (uint32_t)i * S::THREADS;

            ns_cp_async_16(a + turned(piece / 8, piece % 8, ROW_BYTES),
                           a_from[i] + (size_t)step * BK, a_there[i]);
        }
        for (int i = 0; i < S::B_PIECES; i++) {
            uint32_t piece = threadIdx.x + (uint32_t)i * S::THREADS;

            if (K_ROWS) {
                uint32_t k = piece / (BN / 8);
                bool there = b_there[i] && step * BK + k < p.k;

                ns_cp_async_16(b + turned(k, piece % (BN / 8), BN * 2),
                               there ? b_from[i] + (size_t)step * BK * p.ldw
                                     : w,
                               there);
            } else {
                ns_cp_async_16(b + turned(piece / 8, piece % 8, ROW_BYTES),
                               b_from[i] + (size_t)step * BK, b_there[i]);
            }
        }
    };

    for (int i = 0; i < S::MI; i++)
        for (int j = 0; j < S::NI; j++)
            for (int c = 0; c < 4; c++)
                sum[i][j][c] = 0;
    for (uint32_t step = 0; step < STAGES - 1; step++) {
        if (step < n_steps)
            load(step);
        ns_cp_async_commit();
    }
    for (uint32_t step = 0; step < n_steps; step++) {
        const unsigned char *a = shared + step % STAGES * S::STAGE;
        const unsigned char *b = a + S::A_BYTES;

        ns_cp_async_wait<STAGES - 2>();
        __syncthreads(); /* the stage is there, and the one before is free */
        if (step + STAGES - 1 < n_steps)
            load(step + STAGES - 1);
        ns_cp_async_commit();
        if (FP8)
#pragma unroll
            for (int i = 0; i < S::MI; i++)
#pragma unroll
                for (int j = 0; j < S::NI; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        stage[i][j][c] = 0;
#pragma unroll
        for (uint32_t k = 0; k < ROW_BYTES / 32; k++) {
            uint32_t fa[S::MI][4], fb[S::NI][2];

#pragma unroll
            for (int i = 0; i < S::MI; i++)
                ns_ldmatrix_x4(fa[i], a + turned(wm + (uint32_t)i * 16 +
                                                     lane % 16,
                                                 2 * k + lane / 16,
                                                 ROW_BYTES));
#pragma unroll
            for (int j = 0; j < S::NI; j += 2) {
                uint32_t r[4], n = wn + (uint32_t)j * 8;

                if (K_ROWS)
                    ns_ldmatrix_x4_trans(
                        r, b + turned(16 * k + lane % 8 + lane / 8 % 2 * 8,
                                      n / 8 + lane / 16, BN * 2));
                else
                    ns_ldmatrix_x4(
                        r, b + turned(n + lane % 8 + lane / 16 * 8,
                                      2 * k + lane / 8 % 2, ROW_BYTES));
                fb[j][0] = r[0];
                fb[j][1] = r[1];
                fb[j + 1][0] = r[2];
                fb[j + 1][1] = r[3];
            }
#pragma unroll
            for (int i = 0; i < S::MI; i++)
#pragma unroll
                for (int j = 0; j < S::NI; j++)
                    if (FP8)
                        ns_mma_m16n8k32_e4m3(stage[i][j], fa[i], fb[j]);
                    else
                        ns_mma_m16n8k16_bf16(sum[i][j], fa[i], fb[j]);
        }
        if (FP8)
#pragma unroll
            for (int i = 0; i < S::MI; i++)
#pragma unroll
                for (int j = 0; j < S::NI; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[i][j][c] += stage[i][j][c];
    }

#pragma unroll
    for (int i = 0; i < S::MI; i++)
#pragma unroll
        for (uint32_t c = 0; c < 4; c += 2) {
            uint32_t line = wm + (uint32_t)i * 16 + lane / 4 + c * 4;
            uint32_t row = work.first + line;

            if (line >= work.n_rows)
                continue;
            if (FP8) {
                float by = p.a_scale[p.gather ? (uint32_t)p.gather[row] : row];

#pragma unroll
                for (int j = 0; j < S::NI; j++)
#pragma unroll
                    for (uint32_t e = 0; e < 2; e++) {
                        uint32_t column = n0 + wn + (uint32_t)j * 8 +
                                          lane % 4 * 2 + e;

                        sum[i][j][c + e] *=
                            column < columns
                                ? by * p.w_scale[work.w_row + column] : 0;
                    }
            }
            if (p.epilogue == GATED) {
#pragma unroll
                for (int j = 0; j < S::NI; j += 2) {
                    uint32_t column = (n0 + wn) / 2 + (uint32_t)j * 4 +
                                      lane % 4 * 2;

                    for (uint32_t e = 0; e < 2; e++)
                        store_output(p, row, column + e,
                                     gelu_tanh(sum[i][j][c + e]) *
                                         sum[i][j + 1][c + e]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < S::NI; j++)
                    for (uint32_t e = 0; e < 2; e++)
                        store_output(p, row,
                                     n0 + wn + (uint32_t)j * 8 +
                                         lane % 4 * 2 + e,
                                     sum[i][j][c + e]);
            }
        }
}

/* ---- launching --------------------------------------------------------------- */

template <class W>
static void
launch_fp32(struct cuda *cuda, const struct product *p)
{
    uint32_t columns = p->epilogue == GATED ? 2 * (uint32_t)round_up(p->n, 8)
                                            : p->n;
    dim3 grid(p->tiles ? p->max_tiles : divide_up(p->m, FP32_TILE),
              divide_up(columns, FP32_TILE));

    assert(!p->tiles || p->rows_per_tile <= FP32_TILE);
    LAUNCH(cuda, grid, 256, 2 * FP32_K * FP32_LD * sizeof(float),
           product_fp32_kernel<W>, *p);
}

template <class T, int BM, int BN, int WARPS_M, int WARPS_N, int STAGES,
          bool K_ROWS>
static void
launch_mma(struct cuda *cuda, const struct product *p)
{
    typedef mma_shape<BM, BN, WARPS_M, WARPS_N, STAGES> S;
    auto kernel = product_mma_kernel<T, BM, BN, WARPS_M, WARPS_N, STAGES,
                                     K_ROWS>;
    dim3 grid(p->tiles ? p->max_tiles : divide_up(p->m, BM),
              divide_up(packed_columns(p), BN));

    LAUNCH(cuda, grid, S::THREADS, S::SHARED, kernel, *p);
}

void
cuda_product(struct cuda *cuda, const struct product *p)
{
    uint32_t rows = p->tiles ? p->rows_per_tile : p->m;

    assert(p->w_type != NS_E4M3 || !p->k_rows);
    assert(!takes_mma(cuda, p->w_type) || rows <= 32 || !p->tiles ||
           p->rows_per_tile == 128);
    if (p->w_type == NS_F32)
        launch_fp32<float>(cuda, p);
    else if (p->w_type == NS_E4M3 && rows <= 32)
        launch_mma<uint8_t, 32, 32, 2, 2, 6, false>(cuda, p);
    else if (p->w_type == NS_E4M3)
        launch_mma<uint8_t, 128, 128, 2, 4, 3, false>(cuda, p);
    else if (!cuda->bf16)
        launch_fp32<uint16_t>(cuda, p);
    else if (p->k_rows)
        launch_mma<uint16_t, 128, 128, 2, 4, 3, true>(cuda, p);
    else if (rows <= 32)
        launch_mma<uint16_t, 32, 32, 2, 2, 6, false>(cuda, p);
    else
        launch_mma<uint16_t, 128, 128, 2, 4, 3, false>(cuda, p);
}

static void
product_of_rows(struct cuda *cuda, struct ns_rows y, struct ns_rows x,
                const struct ns_weight *w, enum epilogue epilogue)
{
    uint32_t at_once = takes_mma(cuda, w->dtype)
                           ? operand_rows(cuda, w->dtype, w->k) : x.n_rows;

    for (uint32_t at = 0; at < x.n_rows; at += at_once) {
        struct ns_rows part = x;
        struct product p = {};

        part.data += at * x.stride;
        part.n_rows = x.n_rows - at < at_once ? x.n_rows - at : at_once;
        p.a = cuda_operand(cuda, part, w->dtype, &p.lda);
        p.a_scale = cuda->operand_scale;
        p.m = part.n_rows;
        p.w = w->data;
        p.w_scale = weight_scales(w);
        p.w_type = w->dtype;
        p.ldw = weight_ld(w);
        p.n = w->n;
        p.k = w->k;
        p.epilogue = epilogue;
        p.y = y.data + at * y.stride;
        p.ldy = y.stride;
        cuda_product(cuda, &p);
    }
}

void
linear_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const struct ns_weight *w)
{
    product_of_rows(cuda_of(be), y, x, w, STORE);
}

void
gated_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const struct ns_weight *w)
{
    product_of_rows(cuda_of(be), y, x, w, GATED);
}
