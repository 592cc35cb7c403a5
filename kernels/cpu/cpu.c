/* cpu.c - the cpu backend: opening, memory, and the way into the ops.
 *
 * The engine calls the table below. Each op checks that its shapes agree (an
 * assert: a mismatch is our own bug), does nothing once a failure sticks, and
 * passes on to the table of the chosen instruction set, on the clock.
 */
#include "kernels/cpu/cpu.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/size.h"
#include "kernels/contract.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/ref.h"

enum {
    ALIGN = 64,
    ZERO_BYTES = 4 << 20,   /* that one task clears */
    LARGE_BYTES = 16 << 20, /* from here on memory is asked after first */
    MAX_THREADS = 1024,
};

/* ---- memory ---------------------------------------------------------- */

/* Stands right in front of what memory_take returns. */
struct taken {
    void *raw; /* what malloc gave */
    size_t bytes;
};

struct zeroing {
    unsigned char *at;
    size_t bytes;
};

static void
zero_part(void *ctx, uint32_t task, uint32_t thread)
{
    const struct zeroing *zeroing = ctx;
    size_t from = (size_t)task * ZERO_BYTES;
    size_t left = zeroing->bytes - from;

    (void)thread;
    memset(zeroing->at + from, 0, left < ZERO_BYTES ? left : ZERO_BYTES);
}

/* Large pages where the kernel has them: weights are streamed, and pages of
 * 4 KiB cost a tenth of the time in address translation. */
static void
advise_large_pages(unsigned char *at, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)at + page - 1) / page * page;
    uintptr_t to = ((uintptr_t)at + bytes) / page * page;

    if (to > from)
        (void)madvise((void *)from, to - from, MADV_HUGEPAGE);
}

enum ns_status
memory_take(struct cpu *cpu, size_t bytes, bool zero, const char *what,
            void **out, struct ns_error *err)
{
    struct taken taken = { .bytes = bytes };
    unsigned char *at;
    size_t whole;

    if (!ns_size_add(bytes, sizeof(taken) + ALIGN, &whole))
        return ns_fail(err, NS_FATAL, "%s: %zu bytes are too many", what,
                       bytes);
    /* Linux promises memory that it does not have and kills who touches it:
     * a large piece is refused here, while there is someone to tell. */
    if (bytes >= LARGE_BYTES && bytes > machine_available_bytes())
        return ns_fail(err, NS_FATAL,
                       "%s needs %zu MiB, the machine has %llu MiB left", what,
                       bytes >> 20,
                       (unsigned long long)machine_available_bytes() >> 20);
    taken.raw = malloc(whole);
    if (!taken.raw)
        return ns_fail(err, NS_FATAL, "out of memory: %s needs %zu bytes",
                       what, bytes);
    at = (unsigned char *)taken.raw + sizeof(taken) + ALIGN - 1;
    at -= (uintptr_t)at % ALIGN;
    memcpy(at - sizeof(taken), &taken, sizeof(taken));
    if (bytes >= LARGE_BYTES)
        advise_large_pages(at, bytes);
    if (zero) {
        struct zeroing zeroing = { at, bytes };

        pool_run(cpu->pool,
                 (uint32_t)((bytes + ZERO_BYTES - 1) / ZERO_BYTES), zero_part,
                 &zeroing);
    }
    cpu->bytes_in_use += bytes;
    *out = at;
    return NS_OK;
}

void
memory_drop(struct cpu *cpu, void *memory)
{
    struct taken taken;

    if (!memory)
        return;
    memcpy(&taken, (unsigned char *)memory - sizeof(taken), sizeof(taken));
    cpu->bytes_in_use -= taken.bytes;
    free(taken.raw);
}

static enum ns_status
op_alloc(struct ns_backend *be, size_t bytes, const char *what, void **out,
         struct ns_error *err)
{
    return memory_take((struct cpu *)be, bytes, true, what, out, err);
}

static void
op_release(struct ns_backend *be, void *memory)
{
    memory_drop((struct cpu *)be, memory);
}

static uint64_t
op_available_bytes(const struct ns_backend *be)
{
    (void)be;
    return machine_available_bytes();
}

static void
op_upload(struct ns_backend *be, void *device, const void *host, size_t bytes)
{
    (void)be;
    if (bytes > 0)
        memcpy(device, host, bytes);
}

static void
op_download(struct ns_backend *be, void *host, const void *device,
            size_t bytes)
{
    (void)be;
    if (bytes > 0)
        memcpy(host, device, bytes);
}

static size_t
larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t
per_thread(const struct ns_backend_sizes *sizes)
{
    size_t bytes = larger(ref_thread_scratch_bytes(sizes),
                          cpu_thread_scratch_bytes(sizes));

    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t
op_scratch_bytes(const struct ns_backend *be,
                 const struct ns_backend_sizes *sizes)
{
    const struct cpu *cpu = (const struct cpu *)be;

    return cpu_scratch_bytes(sizes) +
           per_thread(sizes) * pool_threads(cpu->pool);
}

static enum ns_status
op_reserve(struct ns_backend *be, const struct ns_backend_sizes *sizes,
           struct ns_error *err)
{
    struct cpu *cpu = (struct cpu *)be;
    size_t thread_bytes = per_thread(sizes), shared = cpu_scratch_bytes(sizes);
    void *scratch = NULL, *thread_scratch = NULL;
    enum ns_status status;

    status = memory_take(cpu, shared, true, "scratch of the ops", &scratch,
                         err);
    if (status != NS_OK)
        return status;
    status = memory_take(cpu, thread_bytes * pool_threads(cpu->pool), true,
                         "scratch of the threads", &thread_scratch, err);
    if (status != NS_OK) {
        memory_drop(cpu, scratch);
        return status;
    }
    memory_drop(cpu, cpu->scratch);
    memory_drop(cpu, cpu->thread_scratch);
    cpu->scratch = scratch;
    cpu->thread_scratch = thread_scratch;
    cpu->scratch_bytes = shared;
    cpu->thread_scratch_bytes = thread_bytes;
    cpu->sizes = *sizes;
    return NS_OK;
}

/* ---- failures and the clock ------------------------------------------- */

void
cpu_fail(struct cpu *cpu, const char *format, ...)
{
    va_list ap;

    if (cpu->sticky.status != NS_OK)
        return;
    cpu->sticky = (struct ns_error){ .status = NS_FATAL };
    va_start(ap, format);
    vsnprintf(cpu->sticky.text, sizeof(cpu->sticky.text), format, ap);
    va_end(ap);
}

static enum ns_status
op_sync(struct ns_backend *be, struct ns_error *err)
{
    struct cpu *cpu = (struct cpu *)be;
    enum ns_status status = cpu->sticky.status;

    if (status != NS_OK)
        *err = cpu->sticky;
    cpu->sticky = (struct ns_error){ 0 };
    return status;
}

static uint64_t
now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Runs `call` on the table of the instruction set unless a failure sticks. */
#define TIMED(be, call)                                                       \
    do {                                                                      \
        struct cpu *cpu_ = (struct cpu *)(be);                                \
        uint64_t start_ = now_ns();                                           \
                                                                              \
        if (cpu_->sticky.status != NS_OK)                                     \
            return;                                                           \
        cpu_->ops.call;                                                       \
        cpu_->base.busy_ns += now_ns() - start_;                              \
    } while (0)

/* ---- the ops ---------------------------------------------------------- */

static const struct ns_backend_sizes *
sizes_of(const struct ns_backend *be)
{
    return &((const struct cpu *)be)->sizes;
}

static void
op_embed(struct ns_backend *be, struct ns_rows y,
         const struct ns_weight *table, const int32_t *ids, float scale)
{
    assert(table->packing == NS_PACK_TABLE && y.n_cols == table->k);
    for (uint32_t i = 0; i < y.n_rows; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= table->n) {
            cpu_fail((struct cpu *)be, "token %d in row %u, vocabulary of %u",
                     ids[i], i, table->n);
            return;
        }
    TIMED(be, embed(be, y, table, ids, scale));
}

static void
op_gather(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          const uint32_t *index)
{
    ns_contract_gather(y, x, index);
    TIMED(be, gather(be, y, x, index));
}

static void
op_scatter(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const uint32_t *index)
{
    ns_contract_gather(x, y, index);
    TIMED(be, scatter(be, y, x, index));
}

static void
op_rmsnorm(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const float *w, float eps)
{
    assert(ns_same_shape(y, x));
    TIMED(be, rmsnorm(be, y, x, w, eps));
}

static void
op_add_norm(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
            const float *w, float eps)
{
    assert(ns_same_shape(x, a));
    TIMED(be, add_norm(be, x, a, w, eps));
}

static void
op_add_then_norm(struct ns_backend *be, struct ns_rows x, struct ns_rows a,
                 float eps)
{
    assert(ns_same_shape(x, a));
    TIMED(be, add_then_norm(be, x, a, eps));
}

static void
op_branch_norms(struct ns_backend *be, struct ns_rows y[3], struct ns_rows x,
                const float *const w[3], float eps)
{
    for (int i = 0; i < 3; i++)
        assert(ns_same_shape(y[i], x));
    TIMED(be, branch_norms(be, y, x, w, eps));
}

static void
op_layer_end(struct ns_backend *be, struct ns_rows x, struct ns_rows m,
             struct ns_rows e, const float *w_m, const float *w_e,
             const float *w, float eps, const float scalar[2],
             const uint8_t *decoder)
{
    assert(ns_same_shape(x, m) && ns_same_shape(x, e));
    TIMED(be, layer_end(be, x, m, e, w_m, w_e, w, eps, scalar, decoder));
}

static void
op_linear(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
          const struct ns_weight *w)
{
    ns_contract_product(sizes_of(be), y, x, w, NS_PACK_LINEAR);
    TIMED(be, linear(be, y, x, w));
}

static void
op_gated(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
         const struct ns_weight *w)
{
    ns_contract_product(sizes_of(be), y, x, w, NS_PACK_GATED);
    TIMED(be, gated(be, y, x, w));
}

static void
op_qkv(struct ns_backend *be, const struct ns_pass *pass,
       const struct ns_qkv *args)
{
    ns_contract_qkv(sizes_of(be), pass, args);
    TIMED(be, qkv(be, pass, args));
}

static void
op_attention(struct ns_backend *be, const struct ns_pass *pass,
             const struct ns_attention *args)
{
    ns_contract_attention(sizes_of(be), pass, args);
    TIMED(be, attention(be, pass, args));
}

static void
op_route(struct ns_backend *be, int32_t *index, float *weight, float *probs,
         struct ns_rows logits, const float *expert_scale, uint32_t top_k)
{
    assert(top_k >= 1 && top_k <= logits.n_cols);
    TIMED(be, route(be, index, weight, probs, logits, expert_scale, top_k));
}

static void
op_experts(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const int32_t *index, const float *weight, uint32_t top_k,
           const struct ns_weight *gate_up, const struct ns_weight *down)
{
    ns_contract_experts(sizes_of(be), y, x, top_k, gate_up, down);
    TIMED(be, experts(be, y, x, index, weight, top_k, gate_up, down));
}

static void
op_head(struct ns_backend *be, const struct ns_head *args)
{
    ns_contract_head(sizes_of(be), args);
    TIMED(be, head(be, args));
}

static void
op_patch_place(struct ns_backend *be, struct ns_rows rows, const float *table_,
               uint32_t n_positions, const int32_t *x, const int32_t *y)
{
    for (uint32_t i = 0; i < rows.n_rows; i++)
        assert((uint32_t)x[i] < n_positions && (uint32_t)y[i] < n_positions);
    TIMED(be, patch_place(be, rows, table_, n_positions, x, y));
}

static void
op_patch_qkv(struct ns_backend *be, const struct ns_patch_qkv *args)
{
    ns_contract_patch_qkv(args);
    TIMED(be, patch_qkv(be, args));
}

static void
op_patch_pool(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
              const uint32_t *corner, const uint32_t *columns, uint32_t side,
              float scale, const float *bias, const float *std)
{
    ns_contract_patch_pool(y, x, corner, columns, side, bias, std);
    TIMED(be, patch_pool(be, y, x, corner, columns, side, scale, bias, std));
}

static void
op_clamp(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
         float least, float most)
{
    assert(ns_same_shape(y, x));
    TIMED(be, clamp(be, y, x, least, most));
}

static void
op_gelu_times(struct ns_backend *be, struct ns_rows y, struct ns_rows up)
{
    assert(ns_same_shape(y, up));
    TIMED(be, gelu_times(be, y, up));
}

static void
op_logits(struct ns_backend *be, struct ns_rows h,
          const struct ns_weight *table, float softcap, float *out)
{
    assert(table->packing == NS_PACK_TABLE && h.n_cols == table->k);
    TIMED(be, logits(be, h, table, softcap, out));
}

static void
op_close(struct ns_backend *be)
{
    struct cpu *cpu = (struct cpu *)be;

    memory_drop(cpu, cpu->scratch);
    memory_drop(cpu, cpu->thread_scratch);
    pool_destroy(cpu->pool);
    free(cpu);
}

static const struct ns_backend_ops table = {
    .name = "cpu",
    .close = op_close,
    .sync = op_sync,
    .alloc = op_alloc,
    .release = op_release,
    .available_bytes = op_available_bytes,
    .upload = op_upload,
    .download = op_download,
    .packed_bytes = cpu_packed_bytes,
    .pack = cpu_pack,
    .drop = cpu_drop,
    .embed = op_embed,
    .gather = op_gather,
    .scatter = op_scatter,
    .rmsnorm = op_rmsnorm,
    .add_norm = op_add_norm,
    .add_then_norm = op_add_then_norm,
    .branch_norms = op_branch_norms,
    .layer_end = op_layer_end,
    .linear = op_linear,
    .gated = op_gated,
    .qkv = op_qkv,
    .attention = op_attention,
    .route = op_route,
    .experts = op_experts,
    .head = op_head,
    .patch_place = op_patch_place,
    .patch_qkv = op_patch_qkv,
    .patch_pool = op_patch_pool,
    .clamp = op_clamp,
    .gelu_times = op_gelu_times,
    .logits = op_logits,
    .reserve = op_reserve,
    .scratch_bytes = op_scratch_bytes,
};

/* ---- opening ---------------------------------------------------------- */

/* What options ask for against what the machine has. */
static enum ns_status
choose_isa(const struct ns_backend_options *options, enum isa *out,
           struct ns_error *err)
{
    const char *arithmetic = options->arithmetic;
    bool want_bf16 = false, any = false; /* fp8 is done by fp32's code */
    enum isa isa;
    char list[64];

    if (arithmetic && strcmp(arithmetic, "auto") == 0)
        any = true;
    else if (arithmetic && strcmp(arithmetic, "bf16") == 0)
        want_bf16 = true;
    else if (arithmetic && strcmp(arithmetic, "fp32") != 0 &&
             strcmp(arithmetic, "fp8") != 0)
        return ns_fail(err, NS_REJECT,
                       "there is no arithmetic \"%.40s\"; there are fp32, fp8, "
                       "bf16 and auto",
                       arithmetic);

    if (options->isa) {
        isa = isa_of_name(options->isa);
        if (isa == N_ISA || !machine_has(isa))
            return ns_fail(err, NS_REJECT,
                           "this machine has no \"%.40s\"; it has %s",
                           options->isa, machine_list(list, sizeof(list)));
        if (arithmetic && !any && want_bf16 != isa_is_bf16(isa))
            return ns_fail(err, NS_REJECT,
                           "arithmetic %s does not go with %s; %s",
                           arithmetic, options->isa,
                           want_bf16 ? "avx512bf16 and amx have bf16 products"
                                     : "it is for bf16 products");
        *out = isa;
        return NS_OK;
    }

    for (isa = ISA_AMX; isa > ISA_REF; isa--)
        if ((any || want_bf16 == isa_is_bf16(isa)) && machine_has(isa))
            break;
    if (want_bf16 && !isa_is_bf16(isa))
        return ns_fail(err, NS_REJECT,
                       "arithmetic bf16 needs avx512bf16 or amx; this machine "
                       "has %s",
                       machine_list(list, sizeof(list)));
    *out = isa;
    return NS_OK;
}

/* Equal names promise equal bits: avx2 and avx512 share one. */
static const char *
arithmetic_name(enum isa isa, bool fp8)
{
    static const char *const names[N_ISA] = { "fp32-ref", "fp32", "fp32",
                                              "bf16-avx512", "bf16-amx" };

    return !fp8 ? names[isa] : isa == ISA_REF ? "fp8-ref" : "fp8";
}

static void
fill_ops(struct ns_backend_ops *ops, enum isa isa)
{
    cpu_ops_ref(ops);
    if (isa >= ISA_AVX2)
        cpu_ops_avx2(ops);
    if (isa >= ISA_AVX512)
        cpu_ops_avx512(ops);
    if (isa >= ISA_AVX512BF16)
        cpu_ops_avx512bf16(ops);
    if (isa >= ISA_AMX)
        cpu_ops_amx(ops);
}

enum ns_status
cpu_open(const struct ns_backend_options *options, struct ns_backend **out,
         struct ns_error *err)
{
    uint32_t n_threads = options->n_threads;
    struct cpu *cpu = NULL;
    enum ns_status status;
    enum isa isa = ISA_REF;

    status = choose_isa(options, &isa, err);
    if (status != NS_OK)
        return status;
    if (n_threads == 0)
        n_threads = machine_threads();
    if (n_threads > MAX_THREADS)
        return ns_fail(err, NS_REJECT, "%u threads, limit %d", n_threads,
                       MAX_THREADS);

    cpu = calloc(1, sizeof(*cpu));
    if (!cpu)
        return ns_fail(err, NS_FATAL, "out of memory for the cpu backend");
    status = pool_create(n_threads, &cpu->pool, err);
    if (status != NS_OK) {
        free(cpu);
        return status;
    }
    fill_ops(&cpu->ops, isa);
    cpu->bf16_products = isa_is_bf16(isa);
    cpu->fp8_rows =
        options->arithmetic && strcmp(options->arithmetic, "fp8") == 0;
    cpu->base.ops = &table;
    snprintf(cpu->base.arithmetic, sizeof(cpu->base.arithmetic), "%s",
             arithmetic_name(isa, cpu->fp8_rows));
    *out = &cpu->base;
    return NS_OK;
}
