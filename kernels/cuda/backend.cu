/* backend.cu - the cuda backend: opening, memory, and the way into the ops.
 *
 * Everything runs on one stream in the order of the calls. What the caller's
 * host memory holds is copied into a pinned ring before a call returns, so
 * nothing is borrowed longer; what a call answers into host memory is there
 * once sync() has returned.
 */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/cuda.cuh"

extern "C" {
#include "base/size.h"
#include "kernels/contract.h"
}

/* ---- failures ------------------------------------------------------------ */

void
cuda_fail(struct cuda *cuda, const char *format, ...)
{
    va_list ap;

    if (cuda->sticky.status != NS_OK)
        return;
    memset(&cuda->sticky, 0, sizeof(cuda->sticky));
    cuda->sticky.status = NS_FATAL;
    va_start(ap, format);
    vsnprintf(cuda->sticky.text, sizeof(cuda->sticky.text), format, ap);
    va_end(ap);
}

bool
cuda_ok(struct cuda *cuda, cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return true;
    cuda_fail(cuda, "cuda: %s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
    return false;
}

/* ---- copies ---------------------------------------------------------------- */

static uint64_t
now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void
cuda_enter(struct cuda *cuda)
{
    cuda_ok(cuda, cudaSetDevice(cuda->device), "choosing the device");
}

static void
started(struct cuda *cuda)
{
    cuda_enter(cuda);
    if (cuda->started_ns == 0)
        cuda->started_ns = now_ns();
}

/* Waits for all that is enqueued, and hands out what was asked for. */
static void
drain(struct cuda *cuda)
{
    if (cuda->sticky.status == NS_OK &&
        cuda_ok(cuda, cudaStreamSynchronize(cuda->stream), "the pass"))
        for (uint32_t i = 0; i < cuda->n_answers; i++)
            memcpy(cuda->answer[i].to, cuda->answer[i].from,
                   cuda->answer[i].bytes);
    cuda->n_answers = 0;
    cuda->ring_used = 0;
}

/* Room in the ring, free of what the device may still read. */
static void *
ring_take(struct cuda *cuda, size_t bytes)
{
    void *room;

    bytes = round_up(bytes, 64);
    assert(bytes <= RING_BYTES);
    if (cuda->ring_used + bytes > RING_BYTES)
        drain(cuda);
    room = cuda->ring + cuda->ring_used;
    cuda->ring_used += bytes;
    return room;
}

void
cuda_put(struct cuda *cuda, void *device, const void *host, size_t bytes)
{
    started(cuda);
    for (size_t at = 0; at < bytes && cuda->sticky.status == NS_OK;) {
        size_t part = bytes - at < RING_BYTES / 2 ? bytes - at
                                                  : RING_BYTES / 2;
        void *room = ring_take(cuda, part);

        memcpy(room, (const char *)host + at, part);
        cuda_ok(cuda,
                cudaMemcpyAsync((char *)device + at, room, part,
                                cudaMemcpyHostToDevice, cuda->stream),
                "copying to the device");
        at += part;
    }
}

void
cuda_answer(struct cuda *cuda, void *host, const void *device, size_t bytes)
{
    void *room;

    if (bytes == 0)
        return;
    if (cuda->n_answers == MAX_ANSWERS)
        drain(cuda);
    room = ring_take(cuda, bytes);
    if (cuda->sticky.status != NS_OK ||
        !cuda_ok(cuda,
                 cudaMemcpyAsync(room, device, bytes, cudaMemcpyDeviceToHost,
                                 cuda->stream),
                 "copying from the device"))
        return;
    cuda->answer[cuda->n_answers++] = (struct answer){ host, room, bytes };
}

static void
op_upload(struct ns_backend *be, void *device, const void *host, size_t bytes)
{
    cuda_put(cuda_of(be), device, host, bytes);
}

static void
op_download(struct ns_backend *be, void *host, const void *device,
            size_t bytes)
{
    struct cuda *cuda = cuda_of(be);

    cuda_enter(cuda);
    for (size_t at = 0; at < bytes && cuda->sticky.status == NS_OK;) {
        size_t part = bytes - at < RING_BYTES / 2 ? bytes - at
                                                  : RING_BYTES / 2;

        cuda_answer(cuda, (char *)host + at, (const char *)device + at, part);
        drain(cuda);
        at += part;
    }
}

static enum ns_status
op_sync(struct ns_backend *be, struct ns_error *err)
{
    struct cuda *cuda = cuda_of(be);
    struct fault fault = { 0, 0, 0 };
    enum ns_status status;

    cuda_enter(cuda);
    cuda_answer(cuda, &fault, cuda->fault, sizeof(fault));
    drain(cuda);
    if (fault.kind != 0) {
        cuda_fail(cuda, "token %d in row %d is outside the vocabulary",
                  fault.value, fault.row);
        /* The device is well: the next pass starts clean. */
        cudaMemsetAsync(cuda->fault, 0, sizeof(fault), cuda->stream);
    }
    if (cuda->started_ns != 0)
        cuda->base.busy_ns += now_ns() - cuda->started_ns;
    cuda->started_ns = 0;
    status = cuda->sticky.status;
    if (status != NS_OK)
        *err = cuda->sticky;
    memset(&cuda->sticky, 0, sizeof(cuda->sticky));
    return status;
}

/* ---- memory ---------------------------------------------------------------- */

static enum ns_status
op_alloc(struct ns_backend *be, size_t bytes, const char *what, void **out,
         struct ns_error *err)
{
    struct cuda *cuda = cuda_of(be);
    size_t left = 0, whole = 0;
    cudaError_t error;
    void *memory;

    cuda_enter(cuda);
    /* No piece has zero bytes: each has an address of its own. */
    error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (error != cudaSuccess) {
        cudaGetLastError(); /* or the next launch would report it */
        cudaMemGetInfo(&left, &whole);
        return ns_fail(err, NS_FATAL,
                       "%s needs %zu MiB, the card has %zu MiB of %zu MiB "
                       "left (%s)",
                       what, bytes >> 20, left >> 20, whole >> 20,
                       cudaGetErrorString(error));
    }
    error = cudaMemsetAsync(memory, 0, bytes ? bytes : 1, cuda->stream);
    if (error != cudaSuccess) {
        cudaFree(memory);
        return ns_fail(err, NS_FATAL, "cuda: clearing %s: %s", what,
                       cudaGetErrorString(error));
    }
    cuda->bytes_in_use += bytes;
    *out = memory;
    return NS_OK;
}

static void
op_release(struct ns_backend *be, void *memory)
{
    (void)be;
    cudaFree(memory);
}

static uint64_t
op_available_bytes(const struct ns_backend *be)
{
    size_t left = 0, whole = 0;

    cuda_enter(cuda_of((struct ns_backend *)be));
    if (cudaMemGetInfo(&left, &whole) != cudaSuccess)
        return 0;
    return left;
}

/* Calls for one piece after the other, so that counting and carving agree. */
struct carver {
    unsigned char *base; /* NULL: only count */
    size_t used;
};

static void *
piece(struct carver *carver, size_t bytes)
{
    void *at = carver->base ? carver->base + carver->used : NULL;

    carver->used += round_up(bytes, 256);
    return at;
}

static size_t
larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void
carve_experts(struct carver *carver, struct expert_scratch *s,
              const struct ns_backend_sizes *sizes)
{
    size_t copies = (size_t)sizes->n_rows * sizes->top_k;

    s->row = (int32_t *)piece(carver, copies * sizeof(*s->row));
    s->weight = (float *)piece(carver, copies * sizeof(*s->weight));
    s->place = (int32_t *)piece(carver, copies * sizeof(*s->place));
    s->start = (uint32_t *)piece(carver, (sizes->n_experts + 1) *
                                             sizeof(*s->start));
    /* Tiles of 32 rows at least, and a part of one an expert. */
    s->tiles = (struct product_tile *)piece(
        carver, (divide_up(copies, 32) + sizes->n_experts) *
                    sizeof(*s->tiles));
    s->n_tiles = (uint32_t *)piece(carver, sizeof(*s->n_tiles));
    s->inner = piece(carver, copies * round_up(sizes->expert_dim, PAD) *
                                 sizeof(float));
    s->out = (float *)piece(carver, copies * sizes->hidden * sizeof(float));
}

static void
carve_head(struct carver *carver, struct head_scratch *s,
           const struct ns_backend_sizes *sizes)
{
    size_t rows = sizes->n_head_rows < HEAD_ROWS ? sizes->n_head_rows
                                                 : HEAD_ROWS;
    size_t tiles = divide_up(sizes->vocab, HEAD_TILE);
    size_t part = head_part(sizes->vocab);

    s->logits = (float *)piece(carver, rows * part * sizeof(float));
    s->p = piece(carver, rows * part * sizeof(float));
    s->row = (struct head_row *)piece(carver, rows * sizeof(*s->row));
    s->tile = (struct head_tile *)piece(carver,
                                        rows * tiles * sizeof(*s->tile));
    s->factor = (float *)piece(carver, rows * sizeof(float));
    s->drawn = (float *)piece(carver, rows * HEAD_TILE * sizeof(float));
    s->draw = (struct product_tile *)piece(carver, rows * sizeof(*s->draw));
    s->n_draw = (uint32_t *)piece(carver, sizeof(*s->n_draw));
    s->inv_temperature = (float *)piece(carver, rows * sizeof(float));
    s->top_p = (float *)piece(carver, rows * sizeof(float));
    s->uniform = (double *)piece(carver, rows * sizeof(double));
    s->whole = (float *)piece(carver, NUCLEUS_ROWS * (size_t)sizes->vocab *
                                          sizeof(float));
    s->mask = (uint32_t *)piece(carver, rows * divide_up(sizes->vocab, 32) *
                                            sizeof(uint32_t));
    s->mask_of = (int32_t *)piece(carver, rows * sizeof(int32_t));
    s->wants_top = (uint8_t *)piece(carver, rows);
    s->top = (struct ns_candidate *)piece(carver, rows * NS_HEAD_TOP *
                                                      sizeof(*s->top));
    s->argmax = (int32_t *)piece(carver, rows * sizeof(int32_t));
    s->sampled = (int32_t *)piece(carver, rows * sizeof(int32_t));
    s->entropy = (float *)piece(carver, rows * sizeof(float));
    s->logsumexp = (float *)piece(carver, rows * sizeof(float));
}

static void
carve(struct cuda *to, const struct ns_backend_sizes *sizes,
      struct carver *carver)
{
    size_t rows = larger(larger(sizes->n_rows, sizes->n_patches),
                         sizes->n_head_rows);
    size_t width = round_up(larger(sizes->hidden,
                                   (size_t)sizes->n_heads * sizes->head_dim),
                            PAD);

    size_t copies = (size_t)sizes->n_rows * sizes->top_k;

    /* Products go over more rows or wider ones in several parts; experts have
     * all copies' codes at once. */
    to->operand_bytes = larger(rows, 256) * width * sizeof(uint16_t);
    to->operand_bytes = larger(to->operand_bytes,
                               copies * round_up(sizes->expert_dim, PAD_E4M3));
    to->operand = piece(carver, to->operand_bytes);
    to->operand_scales = larger(larger(rows, 256), copies);
    to->operand_scale = (float *)piece(carver,
                                       to->operand_scales * sizeof(float));
    to->index_count = 2 * rows;
    to->index = (uint32_t *)piece(carver, to->index_count *
                                              sizeof(*to->index));
    to->segments.device = (struct ns_segment *)piece(
        carver, MAX_SEGMENTS * sizeof(struct ns_segment));
    carve_experts(carver, &to->experts, sizes);
    carve_head(carver, &to->head, sizes);
}

static size_t
op_scratch_bytes(const struct ns_backend *be,
                 const struct ns_backend_sizes *sizes)
{
    struct carver carver = { NULL, 0 };
    struct cuda *scratch = (struct cuda *)calloc(1, sizeof(*scratch));

    (void)be;
    if (!scratch)
        return SIZE_MAX;
    carve(scratch, sizes, &carver);
    free(scratch);
    return carver.used;
}

static enum ns_status
op_reserve(struct ns_backend *be, const struct ns_backend_sizes *sizes,
           struct ns_error *err)
{
    struct cuda *cuda = cuda_of(be);
    struct carver carver = { NULL, 0 };
    enum ns_status status;
    void *scratch = NULL;

    status = op_alloc(be, op_scratch_bytes(be, sizes), "scratch of the ops",
                      &scratch, err);
    if (status != NS_OK)
        return status;
    op_release(be, cuda->scratch);
    cuda->scratch = (unsigned char *)scratch;
    carver.base = cuda->scratch;
    carve(cuda, sizes, &carver);
    cuda->scratch_bytes = carver.used;
    cuda->segments.n = 0;
    cuda->sizes = *sizes;
    return NS_OK;
}

/* ---- the segments of a pass ------------------------------------------------ */

/* All layers of a pass ask; the first one uploads. */
const struct ns_segment *
cuda_segments(struct cuda *cuda, const struct ns_pass *pass)
{
    struct segment_table *table = &cuda->segments;
    size_t bytes = pass->n_segments * sizeof(*pass->segments);

    assert(pass->n_segments <= MAX_SEGMENTS);
    if (table->n >= pass->n_segments &&
        memcmp(table->mirror, pass->segments, bytes) == 0)
        return table->device;
    memcpy(table->mirror, pass->segments, bytes);
    table->n = pass->n_segments;
    cuda_put(cuda, table->device, pass->segments, bytes);
    return table->device;
}

/* ---- the ops --------------------------------------------------------------- */

static const struct ns_backend_sizes *
cuda_sizes(const struct ns_backend *be)
{
    return &((const struct cuda *)be)->sizes;
}

/* Leaves an op undone if there is nothing to do, or a failure sticks. */
#define ENTER(be, n_rows)                                                     \
    do {                                                                      \
        if ((n_rows) == 0 || cuda_of(be)->sticky.status != NS_OK)             \
            return;                                                           \
        started(cuda_of(be));                                                 \
    } while (0)

static void
op_embed(struct ns_backend *be, struct ns_rows y,
         const struct ns_weight *table, const int32_t *ids, float scale)
{
    assert(table->packing == NS_PACK_TABLE && y.n_cols == table->k);
    ENTER(be, y.n_rows);
    embed_cuda(be, y, table, ids, scale);
}

static void
op_gather(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          const uint32_t *index)
{
    ns_contract_gather(y, x, index);
    ENTER(be, y.n_rows);
    gather_cuda(be, y, x, index);
}

static void
op_scatter(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const uint32_t *index)
{
    ns_contract_gather(x, y, index);
    ENTER(be, x.n_rows);
    scatter_cuda(be, y, x, index);
}

static void
op_rmsnorm(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const float *w, float eps)
{
    assert(ns_same_shape(y, x));
    ENTER(be, x.n_rows);
    rmsnorm_cuda(be, y, x, w, eps);
}

static void
op_add_norm(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
            const float *w, float eps)
{
    assert(ns_same_shape(x, a));
    ENTER(be, x.n_rows);
    add_norm_cuda(be, x, a, w, eps);
}

static void
op_add_then_norm(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                 float eps)
{
    assert(ns_same_shape(x, a));
    ENTER(be, x.n_rows);
    add_then_norm_cuda(be, x, a, eps);
}

static void
op_branch_norms(struct ns_backend *be, struct ns_rows y[3], struct ns_rows x,
                const float *const w[3], float eps)
{
    for (int i = 0; i < 3; i++)
        assert(ns_same_shape(y[i], x));
    ENTER(be, x.n_rows);
    branch_norms_cuda(be, y, x, w, eps);
}

static void
op_layer_end(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
             struct ns_rows e, const float *w_m, const float *w_e,
             const float *w, float eps, const float scalar[2],
             const uint8_t *decoder)
{
    assert(ns_same_shape(x, m) && ns_same_shape(x, e));
    ENTER(be, x.n_rows);
    layer_end_cuda(be, x, m, e, w_m, w_e, w, eps, scalar, decoder);
}

static void
op_linear(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          const struct ns_weight *w)
{
    ns_contract_product(cuda_sizes(be), y, x, w, NS_PACK_LINEAR);
    ENTER(be, x.n_rows);
    linear_cuda(be, y, x, w);
}

static void
op_gated(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
         const struct ns_weight *w)
{
    ns_contract_product(cuda_sizes(be), y, x, w, NS_PACK_GATED);
    ENTER(be, x.n_rows);
    gated_cuda(be, y, x, w);
}

static void
op_qkv(struct ns_backend *be, const struct ns_pass *pass,
       const struct ns_qkv *args)
{
    ns_contract_qkv(cuda_sizes(be), pass, args);
    ENTER(be, pass->n_rows);
    qkv_cuda(be, pass, args);
}

static void
op_attention(struct ns_backend *be, const struct ns_pass *pass,
             const struct ns_attention *args)
{
    ns_contract_attention(cuda_sizes(be), pass, args);
    ENTER(be, pass->n_rows);
    attention_cuda(be, pass, args);
}

static void
op_route(struct ns_backend *be, int32_t *index, float *weight, float *probs,
         struct ns_rows logits, const float *expert_scale, uint32_t top_k)
{
    assert(top_k >= 1 && top_k <= logits.n_cols);
    ENTER(be, logits.n_rows);
    route_cuda(be, index, weight, probs, logits, expert_scale, top_k);
}

static void
op_experts(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const int32_t *index, const float *weight, uint32_t top_k,
           const struct ns_weight *gate_up, const struct ns_weight *down)
{
    ns_contract_experts(cuda_sizes(be), y, x, top_k, gate_up, down);
    assert(down->n <= cuda_sizes(be)->hidden);
    ENTER(be, x.n_rows);
    experts_cuda(be, y, x, index, weight, top_k, gate_up, down);
}

static void
op_head(struct ns_backend *be, const struct ns_head *args)
{
    ns_contract_head(cuda_sizes(be), args);
    ENTER(be, args->h.n_rows);
    head_cuda(be, args);
}

static void
op_patch_place(struct ns_backend *be, struct ns_rows rows, const float *table,
               uint32_t n_positions, const int32_t *x, const int32_t *y)
{
    ENTER(be, rows.n_rows);
    patch_place_cuda(be, rows, table, n_positions, x, y);
}

static void
op_patch_qkv(struct ns_backend *be, const struct ns_patch_qkv *args)
{
    ns_contract_patch_qkv(args);
    ENTER(be, args->q.n_rows);
    patch_qkv_cuda(be, args);
}

static void
op_patch_pool(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
              const uint32_t *corner, const uint32_t *columns, uint32_t side,
              float scale, const float *bias, const float *std)
{
    ns_contract_patch_pool(y, x, corner, columns, side, bias, std);
    ENTER(be, y.n_rows);
    patch_pool_cuda(be, y, x, corner, columns, side, scale, bias, std);
}

static void
op_clamp(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
         float least, float most)
{
    assert(ns_same_shape(y, x));
    ENTER(be, y.n_rows);
    clamp_cuda(be, y, x, least, most);
}

static void
op_gelu_times(struct ns_backend *be, struct ns_rows y, struct ns_rows up)
{
    assert(ns_same_shape(y, up));
    ENTER(be, y.n_rows);
    gelu_times_cuda(be, y, up);
}

static void
op_logits(struct ns_backend *be, struct ns_rows h,
          const struct ns_weight *table, float softcap, float *out)
{
    assert(table->packing == NS_PACK_TABLE && h.n_cols == table->k);
    ENTER(be, h.n_rows);
    logits_cuda(be, h, table, softcap, out);
}

static void
op_close(struct ns_backend *be)
{
    struct cuda *cuda = cuda_of(be);

    cudaSetDevice(cuda->device);
    if (cuda->stream)
        cudaStreamSynchronize(cuda->stream);
    cudaFree(cuda->scratch);
    cudaFree(cuda->fault);
    cudaFreeHost(cuda->ring);
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(cuda->stage[i]);
        if (cuda->stage_free[i])
            cudaEventDestroy(cuda->stage_free[i]);
    }
    if (cuda->stream)
        cudaStreamDestroy(cuda->stream);
    free(cuda->segments.mirror);
    free(cuda);
}

static void
fill_ops(struct ns_backend_ops *ops)
{
    ops->name = "cuda";
    ops->close = op_close;
    ops->sync = op_sync;
    ops->alloc = op_alloc;
    ops->release = op_release;
    ops->available_bytes = op_available_bytes;
    ops->upload = op_upload;
    ops->download = op_download;
    ops->packed_bytes = cuda_packed_bytes;
    ops->pack = cuda_pack;
    ops->drop = cuda_drop;
    ops->embed = op_embed;
    ops->gather = op_gather;
    ops->scatter = op_scatter;
    ops->rmsnorm = op_rmsnorm;
    ops->add_norm = op_add_norm;
    ops->add_then_norm = op_add_then_norm;
    ops->branch_norms = op_branch_norms;
    ops->layer_end = op_layer_end;
    ops->linear = op_linear;
    ops->gated = op_gated;
    ops->qkv = op_qkv;
    ops->attention = op_attention;
    ops->route = op_route;
    ops->experts = op_experts;
    ops->head = op_head;
    ops->patch_place = op_patch_place;
    ops->patch_qkv = op_patch_qkv;
    ops->patch_pool = op_patch_pool;
    ops->clamp = op_clamp;
    ops->gelu_times = op_gelu_times;
    ops->logits = op_logits;
    ops->reserve = op_reserve;
    ops->scratch_bytes = op_scratch_bytes;
}

/* ---- opening --------------------------------------------------------------- */

/* "auto": products of codes where the checkpoint has codes. */
static enum ns_status
choose_arithmetic(const char *name, struct cuda *cuda, struct ns_error *err)
{
    cuda->fp8 = !name || strcmp(name, "auto") == 0 || strcmp(name, "fp8") == 0;
    cuda->bf16 = cuda->fp8 || strcmp(name, "bf16") == 0;
    if (cuda->bf16 || strcmp(name, "fp32") == 0)
        return NS_OK;
    return ns_fail(err, NS_REJECT,
                   "there is no arithmetic \"%.40s\"; there are fp32, bf16, "
                   "fp8 and auto",
                   name);
}

/* What a card costs the process before the first weight; all or nothing. */
static enum ns_status
take_basics(struct cuda *cuda, struct ns_error *err)
{
    cudaError_t error;
    void *memory;

    error = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&cuda->stage_free[i],
                                         cudaEventDisableTiming);
        if (error == cudaSuccess)
            error = cudaMallocHost((void **)&cuda->stage[i], STAGE_BYTES);
    }
    if (error == cudaSuccess)
        error = cudaMallocHost((void **)&cuda->ring, RING_BYTES);
    if (error != cudaSuccess)
        return ns_fail(err, NS_FATAL, "cuda: opening the device: %s",
                       cudaGetErrorString(error));
    cuda->segments.mirror = (struct ns_segment *)calloc(
        MAX_SEGMENTS, sizeof(struct ns_segment));
    if (!cuda->segments.mirror)
        return ns_fail(err, NS_FATAL, "out of memory for the cuda backend");
    if (op_alloc(&cuda->base, sizeof(*cuda->fault), "fault word", &memory,
                 err) != NS_OK)
        return NS_FATAL;
    cuda->fault = (struct fault *)memory;
    return NS_OK;
}

extern "C" __attribute__((visibility("default"))) enum ns_status
ns_backend_cuda_open(const struct ns_backend_options *options,
                     struct ns_backend **out, struct ns_error *err)
{
    /* Written once, the same by everyone who opens one. */
    static struct ns_backend_ops table;
    struct cuda *cuda;
    enum ns_status status;
    cudaError_t error;
    int n_devices = 0;
    struct cuda chosen;

    status = choose_arithmetic(options->arithmetic, &chosen, err);
    if (status != NS_OK)
        return status;
    error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess || n_devices == 0)
        return ns_fail(err, NS_REJECT, "this machine has no cuda device: %s",
                       error == cudaSuccess ? "the driver lists none"
                                            : cudaGetErrorString(error));
    if (options->device >= (uint32_t)n_devices)
        return ns_fail(err, NS_REJECT,
                       "engine.device is %u, the process sees %d cuda devices",
                       options->device, n_devices);
    error = cudaSetDevice((int)options->device);
    if (error != cudaSuccess)
        return ns_fail(err, NS_FATAL, "cuda: device %u: %s", options->device,
                       cudaGetErrorString(error));
    cuda = (struct cuda *)calloc(1, sizeof(*cuda));
    if (!cuda)
        return ns_fail(err, NS_FATAL, "out of memory for the cuda backend");
    cuda->device = (int)options->device;
    cuda->bf16 = chosen.bf16;
    cuda->fp8 = chosen.fp8;
    fill_ops(&table);
    cuda->base.ops = &table;
    cuda->base.kv_type = cuda->bf16 ? NS_BF16 : NS_F32;
    snprintf(cuda->base.arithmetic, sizeof(cuda->base.arithmetic), "%s",
             cuda->fp8    ? "fp8-cuda"
             : cuda->bf16 ? "bf16-cuda"
                          : "fp32-cuda");
    status = take_basics(cuda, err);
    if (status != NS_OK) {
        op_close(&cuda->base);
        return status;
    }
    *out = &cuda->base;
    return NS_OK;
}
