/* norm.cu - RMS norms, alone and with the sums around them; a block a row.
 *
 * A row's sum of squares is one strided chain a thread, then a tree: it
 * depends on the row's length alone.
 */
#include "kernels/cuda/cuda.cuh"

__device__ static inline float
inverse_rms(const float *x, uint32_t n, float eps, float *part)
{
    float sum = 0;

    for (uint32_t j = threadIdx.x; j < n; j += blockDim.x)
        sum = fmaf(x[j], x[j], sum);
    return 1.0f / sqrtf(block_sum(sum, part) / (float)n + eps);
}

__global__ void
rmsnorm_kernel(struct ns_rows y, struct ns_rows x, const float *w, float eps)
{
    const float *from = row_at(x, blockIdx.x);
    float *to = row_at(y, blockIdx.x);
    float inverse = inverse_rms(from, x.n_cols, eps, ns_shared<float>(0));

    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x)
        to[j] = w ? from[j] * inverse * w[j] : from[j] * inverse;
}

__global__ void
add_norm_kernel(struct ns_rows x, struct ns_rows a, const float *w, float eps)
{
    const float *from = row_at(a, blockIdx.x);
    float *to = row_at(x, blockIdx.x);
    float inverse = inverse_rms(from, a.n_cols, eps, ns_shared<float>(0));

    for (uint32_t j = threadIdx.x; j < a.n_cols; j += blockDim.x)
        to[j] += w ? from[j] * inverse * w[j] : from[j] * inverse;
}

__global__ void
add_then_norm_kernel(struct ns_rows x, struct ns_rows a, float eps)
{
    const float *from = row_at(a, blockIdx.x);
    float *to = row_at(x, blockIdx.x);
    float inverse;

    /* Each thread reads again only what it wrote itself. */
    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x)
        to[j] += from[j];
    inverse = inverse_rms(to, x.n_cols, eps, ns_shared<float>(0));
    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x)
        to[j] *= inverse;
}

struct branches {
    struct ns_rows y[3];
    const float *w[3];
};

__global__ void
branch_norms_kernel(struct branches branches, struct ns_rows x, float eps)
{
    const float *from = row_at(x, blockIdx.x);
    float inverse = inverse_rms(from, x.n_cols, eps, ns_shared<float>(0));

    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x) {
        float normed = from[j] * inverse;

        for (int b = 0; b < 3; b++)
            row_at(branches.y[b], blockIdx.x)[j] =
                branches.w[b] ? normed * branches.w[b][j] : normed;
    }
}

struct layer_end {
    struct ns_rows x, m, e;
    const float *w_m, *w_e, *w;
    float eps, scalar[2];
    const uint8_t *decoder;
};

__global__ void
layer_end_kernel(struct layer_end args)
{
    float *part = ns_shared<float>(0);
    uint32_t n = args.x.n_cols, i = blockIdx.x;
    const float *m = row_at(args.m, i), *e = row_at(args.e, i);
    float *x = row_at(args.x, i);
    float scalar = args.decoder[i] ? args.scalar[1] : args.scalar[0];
    float inverse_m = inverse_rms(m, n, args.eps, part);
    float inverse_e = inverse_rms(e, n, args.eps, part);
    float sum = 0, inverse;

    for (uint32_t j = threadIdx.x; j < n; j += blockDim.x) {
        float both = m[j] * inverse_m * args.w_m[j] +
                     e[j] * inverse_e * args.w_e[j];

        sum = fmaf(both, both, sum);
    }
    inverse = 1.0f / sqrtf(block_sum(sum, part) / (float)n + args.eps);
    for (uint32_t j = threadIdx.x; j < n; j += blockDim.x) {
        float both = m[j] * inverse_m * args.w_m[j] +
                     e[j] * inverse_e * args.w_e[j];

        x[j] = (x[j] + both * inverse * args.w[j]) * scalar;
    }
}

enum { PARTS_BYTES = 32 * sizeof(float) };

void
rmsnorm_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
             const float *w, float eps)
{
    LAUNCH(cuda_of(be), x.n_rows, row_threads(x.n_cols), PARTS_BYTES,
           rmsnorm_kernel, y, x, w, eps);
}

void
add_norm_cuda(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
              const float *w, float eps)
{
    LAUNCH(cuda_of(be), x.n_rows, row_threads(x.n_cols), PARTS_BYTES,
           add_norm_kernel, x, a, w, eps);
}

void
add_then_norm_cuda(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                   float eps)
{
    LAUNCH(cuda_of(be), x.n_rows, row_threads(x.n_cols), PARTS_BYTES,
           add_then_norm_kernel, x, a, eps);
}

void
branch_norms_cuda(struct ns_backend *be, struct ns_rows y[3], struct ns_rows x,
                  const float *const w[3], float eps)
{
    struct branches branches = { { y[0], y[1], y[2] },
                                 { w[0], w[1], w[2] } };

    LAUNCH(cuda_of(be), x.n_rows, row_threads(x.n_cols), PARTS_BYTES,
           branch_norms_kernel, branches, x, eps);
}

void
layer_end_cuda(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
               struct ns_rows e, const float *w_m, const float *w_e,
               const float *w, float eps, const float scalar[2],
               const uint8_t *decoder)
{
    struct layer_end args = { x, m, e, w_m, w_e, w, eps,
                              { scalar[0], scalar[1] }, decoder };

    LAUNCH(cuda_of(be), x.n_rows, row_threads(x.n_cols), PARTS_BYTES,
           layer_end_kernel, args);
}
