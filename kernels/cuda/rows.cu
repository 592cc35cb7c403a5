/* rows.cu - rows by index: embedding, gather, scatter; a block a row. */
#include "kernels/cuda/cuda.cuh"

template <class W>
__global__ void
embed_kernel(struct ns_rows y, const W *table, size_t ld, uint32_t vocab,
             const int32_t *ids, float scale, struct fault *fault)
{
    uint32_t i = blockIdx.x;
    int32_t id = ids[i];
    float *to = row_at(y, i);

    if (id < 0 || (uint32_t)id >= vocab) {
        if (threadIdx.x == 0 && atomicCAS(&fault->kind, 0, 1) == 0) {
            fault->row = (int32_t)i;
            fault->value = id;
        }
        return;
    }
    for (uint32_t j = threadIdx.x; j < y.n_cols; j += blockDim.x)
        to[j] = as_float<W>(table[(size_t)id * ld + j]) * scale;
}

void
embed_cuda(struct ns_backend *be, struct ns_rows y,
           const struct ns_weight *table, const int32_t *ids, float scale)
{
    struct cuda *cuda = cuda_of(be);
    size_t ld = weight_ld(table);

    if (table->dtype == NS_F32)
        LAUNCH(cuda, y.n_rows, row_threads(y.n_cols), 0, embed_kernel<float>,
               y, (const float *)table->data, ld, table->n, ids, scale,
               cuda->fault);
    else
        LAUNCH(cuda, y.n_rows, row_threads(y.n_cols), 0,
               embed_kernel<uint16_t>, y, (const uint16_t *)table->data, ld,
               table->n, ids, scale, cuda->fault);
}

__global__ void
move_kernel(struct ns_rows y, struct ns_rows x, const uint32_t *index,
            bool to_index)
{
    uint32_t i = blockIdx.x, other = index[i];
    const float *from = row_at(x, to_index ? i : other);
    float *to = row_at(y, to_index ? other : i);

    for (uint32_t j = threadIdx.x; j < x.n_cols; j += blockDim.x)
        to[j] = from[j];
}

/* Row descriptors go over in parts that the scratch holds. */
static void
move(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
     const uint32_t *index, bool to_index)
{
    struct cuda *cuda = cuda_of(be);
    uint32_t n = to_index ? x.n_rows : y.n_rows;

    for (uint32_t at = 0; at < n;) {
        uint32_t part = n - at < cuda->index_count
                            ? n - at : (uint32_t)cuda->index_count;
        struct ns_rows from = x, to = y;

        if (to_index)
            from.data += at * from.stride;
        else
            to.data += at * to.stride;
        cuda_put(cuda, cuda->index, index + at, part * sizeof(*index));
        LAUNCH(cuda, part, row_threads(x.n_cols), 0, move_kernel, to, from,
               cuda->index, to_index);
        at += part;
    }
}

void
gather_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const uint32_t *index)
{
    move(be, y, x, index, false);
}

void
scatter_cuda(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
             const uint32_t *index)
{
    move(be, y, x, index, true);
}
