/* pack.c - weights from the checkpoint's order into panels (layouts: cpu.h).
 *
 * One task packs one panel, so a layer's experts or a vocabulary spread over
 * all threads. Sources lie in a mapped file at any alignment: bytes are read
 * with memcpy only. Every byte of the copy is written, padding included.
 */
#include <string.h>

#include "base/size.h"
#include "kernels/cpu/cpu.h"
#include "kernels/float8.h"

enum {
    TABLE_ROWS = 64, /* rows of a table that one task copies */
    PACK_K = 64,     /* inputs that a panel is filled with at a time */
};

/* What to pack, agreed upon by all sources. */
struct plan {
    enum ns_packing packing;
    const struct ns_matrix *sources;
    uint32_t n_sources;
    enum ns_dtype stored; /* of the sources */
    enum ns_dtype dtype;  /* of the copy */
    uint32_t n, k, count;
    uint32_t n_panels; /* of one matrix of the count */
    size_t panel_bytes, panels_at, bytes;
    unsigned char *data;
};

size_t
packed_panel_bytes(enum ns_dtype dtype, uint32_t k)
{
    if (dtype == NS_F32)
        return (size_t)k * PANEL * sizeof(float);
    return ((size_t)k + 1) / 2 * PANEL * 2 * sizeof(uint16_t);
}

static uint32_t
panels_of(uint32_t n)
{
    return n / PANEL + (n % PANEL != 0);
}

/* The rows of a table, up to where its panels start. */
static size_t
table_bytes(enum ns_dtype dtype, uint32_t n, uint32_t k)
{
    return ((size_t)n * k * ns_dtype_bytes(dtype) + 63) & ~(size_t)63;
}

const void *
packed_panel(const struct ns_weight *w, uint32_t expert, uint32_t panel)
{
    const unsigned char *data = w->data;
    size_t n_panels = panels_of(w->n);

    if (w->packing == NS_PACK_GATED)
        n_panels *= 2;
    else if (w->packing == NS_PACK_TABLE)
        data += table_bytes(w->dtype, w->n, w->k);
    return data + (expert * n_panels + panel) *
                      packed_panel_bytes(w->dtype, w->k);
}

const void *
packed_table_row(const struct ns_weight *w, uint32_t row)
{
    return (const unsigned char *)w->data +
           (size_t)row * w->k * ns_dtype_bytes(w->dtype);
}

static enum ns_status
plan_make(enum ns_packing packing, const struct ns_matrix *sources,
          uint32_t n_sources, struct plan *out, struct ns_error *err)
{
    struct plan plan = { .packing = packing, .sources = sources,
                         .n_sources = n_sources };
    size_t panels, table = 0;
    uint64_t n = 0;

    if (n_sources == 0)
        return ns_fail(err, NS_REJECT, "nothing to pack");
    plan.stored = sources[0].dtype;
    plan.dtype = plan.stored == NS_BF16 ? NS_BF16 : NS_F32;
    plan.k = sources[0].k;
    plan.count = sources[0].count;
    for (uint32_t i = 0; i < n_sources; i++) {
        const struct ns_matrix *source = &sources[i];

        if (source->dtype != plan.stored)
            return ns_fail(err, NS_REJECT,
                           "matrices of one product differ in type");
        if ((source->dtype == NS_E4M3) != (source->scale != NULL))
            return ns_fail(err, NS_REJECT, "codes without scales, or scales "
                           "without codes");
        if (source->k != plan.k || source->count != plan.count)
            return ns_fail(err, NS_REJECT,
                           "matrices of one product differ: [%u of %u, %u] "
                           "beside [%u of %u, %u]",
                           source->count, source->n, source->k, plan.count,
                           sources[0].n, plan.k);
        n += source->n;
    }
    if (n == 0 || plan.k == 0 || plan.count == 0)
        return ns_fail(err, NS_REJECT, "an empty matrix");

    if (packing == NS_PACK_GATED) {
        if (n_sources > 2 || n % 2 != 0 ||
            (n_sources == 2 && sources[0].n != sources[1].n))
            return ns_fail(err, NS_REJECT,
                           "gate and up do not match: %u matrices, %llu rows",
                           n_sources, (unsigned long long)n);
        n /= 2;
    }
    if (packing == NS_PACK_TABLE &&
        (n_sources != 1 || plan.count != 1 || plan.stored == NS_E4M3))
        return ns_fail(err, NS_REJECT, "a table is one matrix, not of codes");
    if (n > INT32_MAX || plan.k > INT32_MAX)
        return ns_fail(err, NS_REJECT, "a matrix of [%llu, %u] is too large",
                       (unsigned long long)n, plan.k);
    plan.n = (uint32_t)n;
    plan.n_panels = panels_of(plan.n) * (packing == NS_PACK_GATED ? 2u : 1u);

    plan.panel_bytes = packed_panel_bytes(plan.dtype, plan.k);
    if (packing == NS_PACK_TABLE)
        table = table_bytes(plan.dtype, plan.n, plan.k);
    plan.panels_at = table;
    if (!ns_size_mul(plan.n_panels, plan.count, &panels) ||
        panels > UINT32_MAX - plan.n ||
        !ns_size_mul(panels, plan.panel_bytes, &plan.bytes) ||
        !ns_size_add(plan.bytes, table, &plan.bytes))
        return ns_fail(err, NS_REJECT, "%u matrices of [%u, %u] are too large",
                       plan.count, plan.n, plan.k);
    *out = plan;
    return NS_OK;
}

struct stored_row {
    const unsigned char *bytes;
    float scale; /* of codes */
};

/* The stored row behind output `n` of matrix `i`: sources side by side. For
 * GATED, rows 0..n-1 are the gate's and n..2n-1 the up's, whether they come
 * from one source or from two. */
static struct stored_row
stored_row(const struct plan *plan, uint32_t i, uint32_t n)
{
    const struct ns_matrix *source = plan->sources;
    size_t row_bytes = plan->k * ns_dtype_bytes(plan->stored), row;

    while (n >= source->n) {
        n -= source->n;
        source++;
    }
    row = (size_t)i * source->n + n;
    return (struct stored_row){
        source->parts
            ? (const unsigned char *)source->parts[i] + n * row_bytes
            : (const unsigned char *)source->data + row * row_bytes,
        source->scale ? source->scale[row] : 1.0f,
    };
}

static float
widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
    uint32_t bits;
    float value;

    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exactly */
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31)
        bits = sign | 0x7f800000u | mantissa << 13;
    else
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static float
load_float(const struct plan *plan, struct stored_row row, uint32_t k)
{
    uint16_t half;
    float value;

    if (plan->stored == NS_F32) {
        memcpy(&value, row.bytes + (size_t)k * sizeof(value), sizeof(value));
        return value;
    }
    if (plan->stored == NS_E4M3)
        return ns_e4m3_value(row.bytes[k]) * row.scale;
    memcpy(&half, row.bytes + (size_t)k * sizeof(half), sizeof(half));
    return widen_f16(half);
}

/* Inputs k..end-1 of one output into its column of the panel. */
static void
pack_column(const struct plan *plan, unsigned char *panel, uint32_t column,
            struct stored_row row, uint32_t k, uint32_t end)
{
    if (plan->dtype == NS_F32) {
        float *to = (float *)(void *)panel + column;

        for (; k < end; k++)
            to[(size_t)k * PANEL] = load_float(plan, row, k);
    } else {
        uint16_t *to = (uint16_t *)(void *)panel + 2 * column;

        for (; k < end; k++)
            memcpy(&to[(size_t)(k / 2) * PANEL * 2 + k % 2],
                   row.bytes + (size_t)k * sizeof(*to), sizeof(*to));
    }
}

static void
pack_panel(void *ctx, uint32_t task, uint32_t thread)
{
    const struct plan *plan = ctx;
    uint32_t matrix = task / plan->n_panels, panel = task % plan->n_panels;
    unsigned char *to = plan->data + plan->panels_at +
                        task * plan->panel_bytes;
    struct stored_row row[PANEL];
    uint32_t first = panel * PANEL, shift = 0, n_rows = 0;

    (void)thread;
    if (plan->packing == NS_PACK_GATED) {
        first = panel / 2 * PANEL;
        shift = panel % 2 ? plan->n : 0;
    }
    for (; n_rows < PANEL && first + n_rows < plan->n; n_rows++)
        row[n_rows] = stored_row(plan, matrix, shift + first + n_rows);
    if (n_rows < PANEL || plan->k % 2 != 0)
        memset(to, 0, plan->panel_bytes); /* there is padding */
    /* In steps of k, so that the lines being filled stay in L1. */
    for (uint32_t k = 0; k < plan->k; k += PACK_K) {
        uint32_t end = plan->k - k < PACK_K ? plan->k : k + PACK_K;

        for (uint32_t i = 0; i < n_rows; i++)
            pack_column(plan, to, i, row[i], k, end);
    }
}

static void
pack_rows(void *ctx, uint32_t task, uint32_t thread)
{
    const struct plan *plan = ctx;
    uint32_t row = task * TABLE_ROWS, end = row + TABLE_ROWS;
    size_t row_bytes = plan->k * ns_dtype_bytes(plan->dtype);

    (void)thread;
    for (; row < end && row < plan->n; row++) {
        struct stored_row from = stored_row(plan, 0, row);
        unsigned char *to = plan->data + row * row_bytes;

        if (plan->stored == plan->dtype)
            memcpy(to, from.bytes, row_bytes);
        else
            for (uint32_t k = 0; k < plan->k; k++)
                ((float *)(void *)to)[k] = load_float(plan, from, k);
    }
}

size_t
cpu_packed_bytes(const struct ns_backend *be, enum ns_packing packing,
                 const struct ns_matrix *sources, uint32_t n_sources)
{
    struct ns_error ignored;
    struct plan plan;

    (void)be;
    if (plan_make(packing, sources, n_sources, &plan, &ignored) != NS_OK)
        return 0;
    return plan.bytes;
}

enum ns_status
cpu_pack(struct ns_backend *be, enum ns_packing packing,
         const struct ns_matrix *sources, uint32_t n_sources,
         struct ns_weight *out, struct ns_error *err)
{
    struct cpu *cpu = (struct cpu *)be;
    enum ns_status status;
    struct plan plan;
    void *data;

    status = plan_make(packing, sources, n_sources, &plan, err);
    if (status != NS_OK)
        return status;
    status = memory_take(cpu, plan.bytes, false, "a packed weight", &data,
                         err);
    if (status != NS_OK)
        return status;
    plan.data = data;
    if (packing == NS_PACK_TABLE) {
        size_t used = (size_t)plan.n * plan.k * ns_dtype_bytes(plan.dtype);

        memset(plan.data + used, 0, plan.panels_at - used);
        pool_run(cpu->pool, (plan.n + TABLE_ROWS - 1) / TABLE_ROWS, pack_rows,
                 &plan);
    }
    pool_run(cpu->pool, plan.n_panels * plan.count, pack_panel, &plan);
    *out = (struct ns_weight){ .packing = packing, .dtype = plan.dtype,
                               .e4m3 = plan.stored == NS_E4M3,
                               .n = plan.n, .k = plan.k, .count = plan.count,
                               .data = data, .bytes = plan.bytes };
    return NS_OK;
}

void
cpu_drop(struct ns_backend *be, struct ns_weight *weight)
{
    memory_drop((struct cpu *)be, weight->data);
    *weight = (struct ns_weight){ 0 };
}
