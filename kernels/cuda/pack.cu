/* pack.cu - from a checkpoint's mapped rows to the device.
 *
 * Rows are copied into one of two pinned pieces of host memory, padded and
 * put into the order of the packing, while the other one is on its way: the
 * file is read once, in order, and the card's link never waits for it.
 */
#include <string.h>

#include "kernels/cuda/cuda.cuh"

extern "C" {
#include "kernels/float8.h"
}

/* Where a row of the packed weight comes from; false: it is padding. */
static bool
source_row(enum ns_packing packing, const struct ns_matrix *sources,
           uint32_t n_sources, uint32_t n, uint32_t row,
           const struct ns_matrix **source, uint32_t *source_row)
{
    if (packing == NS_PACK_GATED) {
        uint32_t up = row / 8 % 2, output = row / 16 * 8 + row % 8;

        if (output >= n)
            return false;
        *source = n_sources == 2 ? &sources[up] : &sources[0];
        *source_row = n_sources == 2 ? output : output + up * n;
        return true;
    }
    for (uint32_t s = 0; s < n_sources; s++) {
        if (row < sources[s].n) {
            *source = &sources[s];
            *source_row = row;
            return true;
        }
        row -= sources[s].n;
    }
    return false;
}

/* The packed shape, or a sentence that says why there is none. */
static const char *
shape_of(const struct ns_backend *be, enum ns_packing packing,
         const struct ns_matrix *sources, uint32_t n_sources,
         struct ns_weight *out)
{
    struct ns_weight w;

    memset(&w, 0, sizeof(w));
    if (n_sources == 0)
        return "no source";
    w.packing = packing;
    w.k = sources[0].k;
    w.count = sources[0].count;
    w.e4m3 = sources[0].dtype == NS_E4M3;
    w.dtype = sources[0].dtype == NS_BF16 ? NS_BF16 : NS_F32;
    if (w.e4m3 && ((const struct cuda *)be)->fp8)
        w.dtype = NS_E4M3;
    for (uint32_t s = 0; s < n_sources; s++) {
        if (sources[s].k != w.k || sources[s].count != w.count ||
            sources[s].dtype != sources[0].dtype)
            return "sources of different shapes or types";
        if (sources[s].n == 0 || sources[s].k == 0 || sources[s].count == 0)
            return "an empty source";
        if (w.e4m3 != (sources[s].scale != NULL))
            return "codes go with scales, and nothing else does";
        w.n += sources[s].n;
    }
    if (packing == NS_PACK_TABLE &&
        (n_sources != 1 || w.count != 1 || w.e4m3))
        return "a table is one matrix, not of codes";
    if (packing == NS_PACK_GATED) {
        if (n_sources > 2 || w.n % 2 != 0 ||
            (n_sources == 2 && sources[0].n != sources[1].n))
            return "gate and up of different shapes";
        w.n /= 2;
    }
    w.bytes = (size_t)w.count * weight_rows(&w) * weight_ld(&w) *
              ns_dtype_bytes(w.dtype);
    if (w.dtype == NS_E4M3)
        w.bytes += (size_t)w.count * weight_rows(&w) * sizeof(float);
    *out = w;
    return NULL;
}

size_t
cuda_packed_bytes(const struct ns_backend *be, enum ns_packing packing,
                  const struct ns_matrix *sources, uint32_t n_sources)
{
    struct ns_weight w;

    return shape_of(be, packing, sources, n_sources, &w) ? 0 : w.bytes;
}

/* A half as fp32; exact. */
static float
half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    uint32_t bits;
    float value;

    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        memcpy(&bits, &value, sizeof(bits));
        bits |= sign;
    } else {
        exponent = exponent == 31 ? 255 : exponent + 112;
        bits = sign | exponent << 23 | fraction << 13;
    }
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* scale: of codes that are widened. */
static void
copy_row(unsigned char *to, enum ns_dtype to_type, const unsigned char *from,
         enum ns_dtype dtype, uint32_t k, float scale)
{
    bool widened = dtype == NS_E4M3 && to_type != NS_E4M3;

    for (uint32_t i = 0; widened && i < k; i++) {
        float value = ns_e4m3_value(from[i]) * scale;

        memcpy(to + (size_t)i * sizeof(value), &value, sizeof(value));
    }
    if (widened)
        return;
    if (dtype != NS_F16) {
        memcpy(to, from, k * ns_dtype_bytes(dtype));
        return;
    }
    for (uint32_t i = 0; i < k; i++) {
        uint16_t half;
        float value;

        memcpy(&half, from + (size_t)i * 2, sizeof(half));
        value = half_to_float(half);
        memcpy(to + (size_t)i * 4, &value, sizeof(value));
    }
}

/* Fills host memory with packed rows from..from + n - 1 of all the matrices,
 * one behind the other. */
static void
fill_rows(const struct ns_weight *w, const struct ns_matrix *sources,
          uint32_t n_sources, size_t from, size_t n, unsigned char *to)
{
    size_t row_bytes = weight_ld(w) * ns_dtype_bytes(w->dtype);
    uint32_t rows = weight_rows(w);

    for (size_t i = from; i < from + n; i++, to += row_bytes) {
        size_t matrix = i / rows;
        const struct ns_matrix *source;
        const unsigned char *from_matrix;
        uint32_t row;

        memset(to, 0, row_bytes);
        if (!source_row(w->packing, sources, n_sources, w->n,
                        (uint32_t)(i % rows), &source, &row))
            continue;
        from_matrix = source->parts
                          ? (const unsigned char *)source->parts[matrix]
                          : (const unsigned char *)source->data +
                                matrix * source->n * source->k *
                                    ns_dtype_bytes(source->dtype);
        copy_row(to, w->dtype,
                 from_matrix + (size_t)row * source->k *
                                   ns_dtype_bytes(source->dtype),
                 source->dtype, source->k,
                 source->scale ? source->scale[matrix * source->n + row] : 1);
    }
}

/* Scales of packed rows from..from + n - 1 of all the matrices. */
static void
fill_scales(const struct ns_weight *w, const struct ns_matrix *sources,
            uint32_t n_sources, size_t from, size_t n, float *to)
{
    const struct ns_matrix *source;
    uint32_t rows = weight_rows(w), row;

    for (size_t i = from; i < from + n; i++)
        *to++ = source_row(w->packing, sources, n_sources, w->n,
                           (uint32_t)(i % rows), &source, &row)
                    ? source->scale[i / rows * source->n + row] : 0;
}

/* One pinned piece after the other: rows, or the scales behind them. */
static cudaError_t
send(struct cuda *cuda, const struct ns_weight *w,
     const struct ns_matrix *sources, uint32_t n_sources, bool scales)
{
    size_t row_bytes = scales ? sizeof(float)
                              : weight_ld(w) * ns_dtype_bytes(w->dtype);
    size_t rows = (size_t)w->count * weight_rows(w);
    size_t rows_at_once = STAGE_BYTES / row_bytes;
    unsigned char *to = (unsigned char *)w->data +
                        (scales ? weight_scales_at(w) : 0);
    cudaError_t error = cudaSuccess;
    int half = 0;

    for (size_t at = 0; at < rows && error == cudaSuccess; half = !half) {
        size_t n = rows - at < rows_at_once ? rows - at : rows_at_once;

        error = cudaEventSynchronize(cuda->stage_free[half]);
        if (error != cudaSuccess)
            break;
        if (scales)
            fill_scales(w, sources, n_sources, at, n,
                        (float *)(void *)cuda->stage[half]);
        else
            fill_rows(w, sources, n_sources, at, n, cuda->stage[half]);
        error = cudaMemcpyAsync(to + at * row_bytes, cuda->stage[half],
                                n * row_bytes, cudaMemcpyHostToDevice,
                                cuda->stream);
        if (error == cudaSuccess)
            error = cudaEventRecord(cuda->stage_free[half], cuda->stream);
        at += n;
    }
    return error;
}

static enum ns_status
stream(struct cuda *cuda, const struct ns_weight *w,
       const struct ns_matrix *sources, uint32_t n_sources,
       struct ns_error *err)
{
    size_t row_bytes = weight_ld(w) * ns_dtype_bytes(w->dtype);
    cudaError_t error;

    if (row_bytes > STAGE_BYTES)
        return ns_fail(err, NS_REJECT, "rows of %zu bytes, limit %d",
                       row_bytes, STAGE_BYTES);
    error = send(cuda, w, sources, n_sources, false);
    if (error == cudaSuccess && w->dtype == NS_E4M3)
        error = send(cuda, w, sources, n_sources, true);
    return error == cudaSuccess
               ? NS_OK
               : ns_fail(err, NS_FATAL, "cuda: sending weights: %s",
                         cudaGetErrorString(error));
}

enum ns_status
cuda_pack(struct ns_backend *be, enum ns_packing packing,
          const struct ns_matrix *sources, uint32_t n_sources,
          struct ns_weight *out, struct ns_error *err)
{
    const char *problem;
    struct ns_weight w;
    enum ns_status status;

    problem = shape_of(be, packing, sources, n_sources, &w);
    if (problem)
        return ns_fail(err, NS_REJECT, "cannot pack: %s", problem);
    status = be->ops->alloc(be, w.bytes, "weights", &w.data, err);
    if (status != NS_OK)
        return status;
    status = stream(cuda_of(be), &w, sources, n_sources, err);
    if (status != NS_OK) {
        be->ops->release(be, w.data);
        return status;
    }
    *out = w;
    return NS_OK;
}

void
cuda_drop(struct ns_backend *be, struct ns_weight *weight)
{
    be->ops->release(be, weight->data);
    memset(weight, 0, sizeof(*weight));
}
