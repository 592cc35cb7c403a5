/* Every op by itself against the golden probes: each from its recorded input.
 *
 * Groups text_fp32 (tolerance 5e-5, routing 5e-6) and text_bf16_sharded (two
 * units of bf16). The reader of vectors is the engine's own, which is why this
 * lies here and not in tests/kernels.
 */
#include "tests/kernels/lab.h"

#include "engine/safetensors.h"

static const float eps = 1e-6f;

enum { PROMPT = 20, CANVAS = 32, WINDOW = 16, EXPERTS = 8, TOP_K = 2 };

struct group {
    const char *name;
    bool bf16;
    uint32_t hidden;
    uint32_t sliding, full; /* the layers that were probed */
};

static const struct group groups[] = {
    { "text_fp32", false, 64, 0, 2 },
    { "text_bf16_sharded", true, 80, 0, 5 },
};

struct golden {
    struct lab *lab;
    const struct group *group;
    struct ns_safetensors *model, *probe;
    char where[64]; /* "enc.0": in front of the names of the probes */
    uint32_t layer;
    bool full, decoder;
    uint32_t n_rows;
};

/* ---- reading vectors --------------------------------------------------- */

static float
stored_float(const struct ns_stored_tensor *t, size_t i)
{
    const unsigned char *data = t->data;
    uint16_t half;
    uint32_t bits;
    float value;

    if (t->dtype == NS_STORED_F32) {
        memcpy(&value, data + 4 * i, 4);
        return value;
    }
    assert_int_equal(t->dtype, NS_STORED_BF16);
    memcpy(&half, data + 2 * i, 2);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static size_t
elements(const struct ns_stored_tensor *t)
{
    size_t n = 1;

    for (uint32_t i = 0; i < t->rank; i++)
        n *= t->dim[i];
    return n;
}

static const struct ns_stored_tensor *
must_find(struct ns_safetensors *st, const char *name)
{
    const struct ns_stored_tensor *t = ns_safetensors_find(st, name);

    if (!t)
        fail_msg("no tensor %s", name);
    return t;
}

static float *
floats_of(struct golden *g, struct ns_safetensors *st, const char *name)
{
    const struct ns_stored_tensor *t = must_find(st, name);
    float *out = lab_take(g->lab, elements(t) * sizeof(*out));

    for (size_t i = 0; i < elements(t); i++)
        out[i] = stored_float(t, i);
    return out;
}

static struct ns_rows
rows_of(struct golden *g, const char *name)
{
    const struct ns_stored_tensor *t = must_find(g->probe, name);
    uint32_t n_rows = (uint32_t)t->dim[0];
    struct ns_rows rows = lab_rows(g->lab, n_rows,
                                   (uint32_t)(elements(t) / n_rows));

    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t j = 0; j < rows.n_cols; j++)
            row(rows, i)[j] = stored_float(t, (size_t)i * rows.n_cols + j);
    return rows;
}

/* A probe of the present layer and mode: "input_layernorm", ... */
static const char *
probe_name(const struct golden *g, const char *name, char out[128])
{
    snprintf(out, 128, "%s.%s", g->where, name);
    return out;
}

static struct ns_rows
probe(struct golden *g, const char *name)
{
    char full[128];

    return rows_of(g, probe_name(g, name, full));
}

static float *
layer_floats(struct golden *g, const char *name)
{
    char full[128];

    snprintf(full, sizeof(full), "model.decoder.layers.%u.%s", g->layer, name);
    return floats_of(g, g->model, full);
}

static struct ns_matrix
stored_matrix(struct golden *g, const char *name)
{
    const struct ns_stored_tensor *t = must_find(g->model, name);

    return (struct ns_matrix){
        .data = t->data,
        .dtype = t->dtype == NS_STORED_BF16 ? NS_BF16 : NS_F32,
        .count = t->rank == 3 ? (uint32_t)t->dim[0] : 1,
        .n = (uint32_t)t->dim[t->rank - 2],
        .k = (uint32_t)t->dim[t->rank - 1],
    };
}

static struct ns_matrix
layer_matrix(struct golden *g, const char *name)
{
    char full[128];

    snprintf(full, sizeof(full), "model.decoder.layers.%u.%s", g->layer, name);
    return stored_matrix(g, full);
}

/* fp32: `tolerance`. bf16: so many units of the value or, where it is small,
 * of its row's root mean square, since rounding happened on the way. */
static void
compare(struct golden *g, const char *name, struct ns_rows got,
        struct ns_rows want, double tolerance, double units)
{
    assert_int_equal(got.n_rows, want.n_rows);
    assert_int_equal(got.n_cols, want.n_cols);
    for (uint32_t i = 0; i < got.n_rows; i++) {
        double sum = 0, off = tolerance;

        for (uint32_t j = 0; j < got.n_cols; j++)
            sum += (double)row(want, i)[j] * (double)row(want, i)[j];
        for (uint32_t j = 0; j < got.n_cols; j++) {
            double w = (double)row(want, i)[j];

            if (g->group->bf16)
                off = units * 0x1p-7 * fmax(fabs(w), sqrt(sum / got.n_cols));
            if (!(fabs((double)row(got, i)[j] - w) <= off))
                fail_msg("%s %s: %s.%s [%u][%u]: %.9g, should be %.9g within "
                         "%.3g",
                         g->lab->isa, g->group->name, g->where, name, i, j,
                         (double)row(got, i)[j], w, off);
        }
    }
}

static void
check(struct golden *g, const char *name, struct ns_rows got)
{
    compare(g, name, got, probe(g, name), 5e-5, 2);
}

static void
weightless(float *ones, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        ones[j] = 1;
}

/* ---- the ops of one layer ---------------------------------------------- */

static void
check_linear(struct golden *g, const char *in, const char *out,
             const char *weight)
{
    struct ns_matrix m = layer_matrix(g, weight);
    struct ns_weight w = lab_pack(g->lab, NS_PACK_LINEAR, &m, 1);
    struct ns_rows y = lab_rows(g->lab, g->n_rows, m.n);

    g->lab->ops->linear(g->lab->be, y, probe(g, in), &w);
    check(g, out, y);
    g->lab->ops->drop(g->lab->be, &w);
}

static void
check_norm(struct golden *g, const char *in, const char *out)
{
    struct ns_rows y = lab_rows(g->lab, g->n_rows, g->group->hidden);
    char name[96];

    snprintf(name, sizeof(name), "%s.weight", out);
    g->lab->ops->rmsnorm(g->lab->be, y, probe(g, in), layer_floats(g, name),
                         eps);
    check(g, out, y);
}

static void
check_norms_and_products(struct golden *g)
{
    struct ns_matrix m[2];
    struct ns_weight gated, down;
    struct ns_rows inner, y = lab_rows(g->lab, g->n_rows, g->group->hidden);

    check_norm(g, "layer_in", "input_layernorm");
    check_linear(g, "input_layernorm", "self_attn.q_proj",
                 "self_attn.q_proj.weight");
    check_linear(g, "input_layernorm", "self_attn.k_proj",
                 "self_attn.k_proj.weight");
    if (!g->full)
        check_linear(g, "input_layernorm", "self_attn.v_proj",
                     "self_attn.v_proj.weight");
    check_norm(g, "self_attn", "post_attention_layernorm");
    check_norm(g, "mlp", "post_feedforward_layernorm_1");
    check_norm(g, "experts", "post_feedforward_layernorm_2");

    m[0] = layer_matrix(g, "mlp.gate_proj.weight");
    m[1] = layer_matrix(g, "mlp.up_proj.weight");
    gated = lab_pack(g->lab, NS_PACK_GATED, m, 2);
    inner = lab_rows(g->lab, g->n_rows, m[0].n);
    m[0] = layer_matrix(g, "mlp.down_proj.weight");
    down = lab_pack(g->lab, NS_PACK_LINEAR, m, 1);
    g->lab->ops->gated(g->lab->be, inner,
                       probe(g, "pre_feedforward_layernorm"), &gated);
    g->lab->ops->linear(g->lab->be, y, inner, &down);
    /* Four roundings of the reference lie between: gate, gelu, up, product. */
    compare(g, "mlp", y, probe(g, "mlp"), 5e-5, 5);
    g->lab->ops->drop(g->lab->be, &gated);
    g->lab->ops->drop(g->lab->be, &down);
}

/* In bf16 the reference rounds the router's input and logits: where two
 * experts are as good as equal it may have taken the other. Then both choice
 * and weights become the recorded ones. */
static void
forgive_near_tie(struct golden *g, uint32_t i, int32_t *index,
                 const int32_t *chosen, float *weight)
{
    struct ns_rows probs = probe(g, "router.probs");
    struct ns_rows recorded = probe(g, "router.weights");

    for (uint32_t slot = 0; slot < TOP_K && g->group->bf16; slot++) {
        double ours = (double)row(probs, i)[index[slot]];
        double theirs = (double)row(probs, i)[chosen[slot]];

        if (index[slot] == chosen[slot] ||
            fabs(ours - theirs) > 4 * 0x1p-7 * theirs)
            continue;
        memcpy(index, chosen, TOP_K * sizeof(*index));
        memcpy(weight, row(recorded, i), TOP_K * sizeof(*weight));
    }
}

/* From the residual behind the attention on. */
static void
check_experts_and_end(struct golden *g)
{
    struct lab *lab = g->lab;
    uint32_t n = g->n_rows, hidden = g->group->hidden;
    struct ns_rows x = probe(g, "layer_in");
    struct ns_rows branch[3] = { lab_rows(lab, n, hidden),
                                 lab_rows(lab, n, hidden),
                                 lab_rows(lab, n, hidden) };
    struct ns_rows logits = lab_rows(lab, n, EXPERTS);
    struct ns_rows y = lab_rows(lab, n, hidden);
    struct ns_rows routed = { .n_rows = n, .n_cols = TOP_K, .stride = TOP_K };
    struct ns_rows probs = { .n_rows = n, .n_cols = EXPERTS,
                             .stride = EXPERTS };
    struct ns_matrix m = layer_matrix(g, "router.proj.weight");
    struct ns_weight router = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    struct ns_weight gate_up, down;
    const struct ns_stored_tensor *stored;
    float *scale = layer_floats(g, "router.scale");
    float *ones = lab_take(lab, hidden * sizeof(*ones));
    int32_t *index = lab_take(lab, n * TOP_K * sizeof(*index));
    int32_t *chosen = lab_take(lab, n * TOP_K * sizeof(*chosen));
    uint8_t *decoder = lab_take(lab, n);
    float scalar[2] = { 1, 1 };
    char name[128];

    /* x = residual; the three branches of it */
    lab->ops->add_norm(lab->be, x, probe(g, "self_attn"),
                       layer_floats(g, "post_attention_layernorm.weight"),
                       eps);
    if (g->group->bf16) /* the reference holds it in bf16 */
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < hidden; j++)
                row(x, i)[j] = to_bf16(row(x, i)[j]);
    weightless(ones, hidden);
    lab->ops->branch_norms(
        lab->be, branch, x,
        (const float *const[3]){
            layer_floats(g, "pre_feedforward_layernorm.weight"),
            layer_floats(g, "pre_feedforward_layernorm_2.weight"), ones },
        eps);
    check(g, "pre_feedforward_layernorm", branch[0]);
    check(g, "pre_feedforward_layernorm_2", branch[1]);
    check(g, "router.norm", branch[2]);

    /* router: from its own norm, times scale and H^(-1/2) */
    for (uint32_t j = 0; j < hidden; j++)
        scale[j] *= 1 / sqrtf((float)hidden);
    branch[2] = probe(g, "router.norm");
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < hidden; j++)
            row(branch[2], i)[j] *= scale[j];
    lab->ops->linear(lab->be, logits, branch[2], &router);
    routed.data = lab_take(lab, n * TOP_K * sizeof(float));
    probs.data = lab_take(lab, n * EXPERTS * sizeof(float));
    lab->ops->route(lab->be, index, routed.data, probs.data, logits,
                    layer_floats(g, "router.per_expert_scale"), TOP_K);
    compare(g, "router.probs", probs, probe(g, "router.probs"), 5e-6, 4);
    stored = must_find(g->probe, probe_name(g, "router.index", name));
    assert_int_equal(stored->dtype, NS_STORED_I32);
    memcpy(chosen, stored->data, n * TOP_K * sizeof(*chosen));
    for (uint32_t i = 0; i < n; i++)
        forgive_near_tie(g, i, index + (size_t)i * TOP_K,
                         chosen + (size_t)i * TOP_K,
                         routed.data + (size_t)i * TOP_K);
    assert_memory_equal(index, chosen, n * TOP_K * sizeof(*index));
    compare(g, "router.weights", routed, probe(g, "router.weights"), 5e-6, 4);

    /* experts, from the recorded choice */
    m = layer_matrix(g, "experts.gate_up_proj");
    gate_up = lab_pack(lab, NS_PACK_GATED, &m, 1);
    m = layer_matrix(g, "experts.down_proj");
    down = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    routed = probe(g, "router.weights");
    for (uint32_t i = 0; i < n; i++) /* without the gaps of rows */
        memmove(routed.data + (size_t)i * TOP_K, row(routed, i),
                TOP_K * sizeof(float));
    lab->ops->experts(lab->be, y, probe(g, "pre_feedforward_layernorm_2"),
                      chosen, routed.data, TOP_K, &gate_up, &down);
    compare(g, "experts", y, probe(g, "experts"), 5e-5, 5);

    /* the end: the norm of both alone, then all of it */
    for (uint32_t i = 0; i < n; i++) {
        memset(row(y, i), 0, hidden * sizeof(float));
        decoder[i] = g->decoder;
    }
    lab->ops->layer_end(
        lab->be, y, probe(g, "mlp"), probe(g, "experts"),
        layer_floats(g, "post_feedforward_layernorm_1.weight"),
        layer_floats(g, "post_feedforward_layernorm_2.weight"),
        layer_floats(g, "post_feedforward_layernorm.weight"), eps, scalar,
        decoder);
    compare(g, "post_feedforward_layernorm", y,
            probe(g, "post_feedforward_layernorm"), 5e-5, 4);
    snprintf(name, sizeof(name),
             "model.encoder.language_model.layers.%u.layer_scalar", g->layer);
    scalar[0] = floats_of(g, g->model, name)[0];
    scalar[1] = layer_floats(g, "layer_scalar")[0];
    lab->ops->layer_end(
        lab->be, x, probe(g, "mlp"), probe(g, "experts"),
        layer_floats(g, "post_feedforward_layernorm_1.weight"),
        layer_floats(g, "post_feedforward_layernorm_2.weight"),
        layer_floats(g, "post_feedforward_layernorm.weight"), eps, scalar,
        decoder);
    compare(g, "layer_out", x, probe(g, "layer_out"), 5e-5, 4);
    lab->ops->drop(lab->be, &router);
    lab->ops->drop(lab->be, &gate_up);
    lab->ops->drop(lab->be, &down);
}

/* qkv and attention; the encoder's run leaves the cache for the decoder's. */
static void
check_attention(struct golden *g, struct ns_kv_layer kv)
{
    struct lab *lab = g->lab;
    uint32_t n = g->n_rows, d = kv.head_dim, nkv = kv.n_kv_heads, first;
    uint32_t nq = probe(g, "self_attn.q_proj").n_cols / d;
    struct ns_rows q_proj = probe(g, "self_attn.q_proj");
    struct ns_rows k_proj = probe(g, "self_attn.k_proj");
    struct ns_rows v_proj = k_proj;
    struct ns_rows attended = lab_rows(lab, n, nq * d);
    struct ns_rows y = lab_rows(lab, n, g->group->hidden);
    struct ns_matrix m = layer_matrix(g, "self_attn.o_proj.weight");
    struct ns_weight o = lab_pack(lab, NS_PACK_LINEAR, &m, 1);
    int32_t *page = lab_take(lab, sizeof(*page)); /* page 0 holds all */
    int32_t *position = lab_take(lab, n * sizeof(*position));
    int32_t *lo = lab_take(lab, n * sizeof(*lo));
    int32_t *hi = lab_take(lab, n * sizeof(*hi));
    float *still = lab_take(lab, d / 2 * sizeof(*still));
    struct ns_segment segment = {
        .n_rows = n, .kind = NS_SEGMENT_CANVAS,
        .position = g->decoder ? PROMPT : 0,
    };
    struct ns_pass pass = {
        .n_rows = n, .n_segments = 1, .segments = &segment,
        .position = position, .lo_full = lo, .lo_sliding = lo, .hi = hi,
        .page_full = page, .page_sliding = page, .page_stride = 1,
    };
    struct ns_qkv qkv = {
        .qkv = lab_rows(lab, n, (nq + nkv * (g->full ? 1 : 2)) * d),
        .q = lab_rows(lab, n, nq * d), .k = lab_rows(lab, n, nkv * d),
        .v = lab_rows(lab, n, nkv * d),
        .q_norm = layer_floats(g, "self_attn.q_norm.weight"),
        .k_norm = layer_floats(g, "self_attn.k_norm.weight"),
        .frequency = still, .eps = eps, .n_heads = nq, .has_v = !g->full,
        .kv = kv, .pages = page,
    };
    struct ns_attention attention = {
        .out = attended, .q = qkv.q, .k = qkv.k, .v = qkv.v, .n_heads = nq,
        .kv = kv, .pages = page, .lo = lo, .k_norm = qkv.k_norm,
    };

    if (!g->full)
        v_proj = probe(g, "self_attn.v_proj");
    for (uint32_t i = 0; i < n; i++) {
        memcpy(row(qkv.qkv, i), row(q_proj, i), nq * d * sizeof(float));
        memcpy(row(qkv.qkv, i) + nq * d, row(k_proj, i),
               nkv * d * sizeof(float));
        if (!g->full)
            memcpy(row(qkv.qkv, i) + (nq + nkv) * d, row(v_proj, i),
                   nkv * d * sizeof(float));
        position[i] = (int32_t)(segment.position + i);
        hi[i] = g->decoder ? PROMPT : position[i] + 1;
        first = g->decoder ? PROMPT : (uint32_t)position[i];
        lo[i] = !g->full && first + 1 > WINDOW ? (int32_t)(first + 1 - WINDOW)
                                               : 0;
    }

    /* Norms alone: nothing turns, nothing is written. */
    lab->ops->qkv(lab->be, &pass, &qkv);
    check(g, "self_attn.q_norm", qkv.q);
    check(g, "self_attn.k_norm", qkv.k);
    check(g, "self_attn.v_norm", qkv.v);

    qkv.frequency = floats_of(g, g->probe,
                              g->full ? "inv_freq.full_attention"
                                      : "inv_freq.sliding_attention");
    if (!g->decoder)
        segment.kind = NS_SEGMENT_PREFILL;
    lab->ops->qkv(lab->be, &pass, &qkv);
    if (!g->decoder) {
        char name[32];

        snprintf(name, sizeof(name), "kv.%u.k", g->layer);
        compare(g, name, qkv.k, rows_of(g, name), 5e-5, 3);
        snprintf(name, sizeof(name), "kv.%u.v", g->layer);
        compare(g, name, qkv.v, rows_of(g, name), 5e-5, 2);
    }
    lab->ops->attention(lab->be, &pass, &attention);
    lab->ops->linear(lab->be, y, attended, &o);
    /* In bf16 the reference rounds scores of up to 20 in front of their
     * exponentials: a tenth off is its own noise. */
    compare(g, "self_attn", y, probe(g, "self_attn"), 5e-5, 16);
    lab->ops->drop(lab->be, &o);
}

static void
check_layer(struct golden *g, uint32_t layer, bool full)
{
    struct lab *lab = g->lab;
    struct ns_kv_layer kv = {
        .n_kv_heads = full ? 1 : 2, .head_dim = full ? 32 : 16,
        .n_rotated = full ? 4 : 8, .compact = full,
    };

    g->layer = layer;
    g->full = full;
    kv.page_bytes = (size_t)NS_PAGE * kv.n_kv_heads *
                    (kv.head_dim +
                     (full ? 2 * kv.n_rotated : kv.head_dim)) *
                    sizeof(float);
    kv.base = lab_take(lab, kv.page_bytes);
    for (int decoder = 0; decoder < 2; decoder++) {
        size_t mark = lab->n_pieces;

        g->decoder = decoder;
        g->n_rows = decoder ? CANVAS : PROMPT;
        snprintf(g->where, sizeof(g->where), "%s.%u", decoder ? "dec" : "enc",
                 layer);
        check_norms_and_products(g);
        lab_release_to(lab, mark);
        check_attention(g, kv);
        lab_release_to(lab, mark);
        check_experts_and_end(g);
        lab_release_to(lab, mark);
    }
}

static void
golden_open(struct golden *g, struct lab *lab, const struct group *group,
            const char *probe_case)
{
    char path[128];
    struct ns_error err;

    *g = (struct golden){ .lab = lab, .group = group };
    snprintf(path, sizeof(path), "tests/cases/%s/model", group->name);
    if (ns_safetensors_open(path, &g->model, &err) != NS_OK)
        fail_msg("%s", err.text);
    snprintf(path, sizeof(path), "tests/cases/%s/%s.safetensors", group->name,
             probe_case);
    if (ns_safetensors_open_file(path, &g->probe, &err) != NS_OK)
        fail_msg("%s", err.text);
}

static void
golden_close(struct golden *g)
{
    lab_release_to(g->lab, 0);
    ns_safetensors_close(g->model);
    ns_safetensors_close(g->probe);
}

/* bf16 products on fp32 vectors are 2^-8 off by design. */
static bool
applies(const struct lab *lab, const struct group *group)
{
    return group->bf16 || !lab->bf16;
}

static void
layers(struct lab *lab)
{
    for (size_t i = 0; i < LENGTH(groups); i++) {
        struct golden g;

        if (!applies(lab, &groups[i]))
            continue;
        golden_open(&g, lab, &groups[i], "probe");
        check_layer(&g, groups[i].sliding, false);
        check_layer(&g, groups[i].full, true);
        golden_close(&g);
    }
}

static void
every_op_of_a_layer_gives_its_recorded_output(void **state)
{
    (void)state;
    on_every_isa(layers);
}

/* ---- self-conditioning ------------------------------------------------- */

/* The head makes soft embeddings from hidden states; the vectors give logits.
 * With rows [E[v], one at v] and hidden states [0, logits] it sees just those
 * logits, and the front of its soft rows is softmax(logits) . E. */
static void
check_soft(struct golden *g, float scale)
{
    struct lab *lab = g->lab;
    struct ns_matrix e = stored_matrix(g, "model.decoder.embed_tokens.weight");
    struct ns_rows z = rows_of(g, "sc.logits");
    uint32_t hidden = e.k, vocab = e.n, k = hidden + vocab;
    uint32_t n = z.n_rows;
    unsigned char *data = calloc((size_t)vocab * k, 4);
    struct ns_matrix wide = { .data = data, .dtype = e.dtype, .n = vocab,
                              .k = k, .count = 1 };
    struct ns_weight table;
    float inverse[CANVAS], entropy[CANVAS];
    double u[CANVAS];
    int32_t argmax[CANVAS], sampled[CANVAS];
    struct ns_head head = {
        .h = lab_rows(lab, n, k), .table = &table, .softcap = 1e6f,
        .inv_temperature = inverse, .uniform = u, .argmax = argmax,
        .sampled = sampled, .entropy = entropy, .n_soft = n,
        .soft = lab_rows(lab, n, k), .soft_scale = scale,
    };
    struct ns_rows soft;

    assert_non_null(data);
    for (uint32_t v = 0; v < vocab; v++) {
        size_t each = ns_dtype_bytes(e.dtype);
        const unsigned char *from = e.data;
        uint16_t one_bf16 = 0x3f80;
        float one = 1;

        memcpy(data + (size_t)v * k * each, from + (size_t)v * hidden * each,
               hidden * each);
        memcpy(data + ((size_t)v * k + hidden + v) * each,
               e.dtype == NS_BF16 ? (void *)&one_bf16 : (void *)&one, each);
    }
    table = lab_pack(lab, NS_PACK_TABLE, &wide, 1);
    for (uint32_t i = 0; i < n; i++) {
        memset(row(head.h, i), 0, hidden * sizeof(float));
        memcpy(row(head.h, i) + hidden, row(z, i), vocab * sizeof(float));
        inverse[i] = 1;
        u[i] = -1;
    }
    lab->ops->head(lab->be, &head);
    soft = head.soft;
    soft.n_cols = hidden;
    compare(g, "sc.soft", soft, rows_of(g, "sc.soft"), 5e-5, 4);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t v = 0; v < vocab; v++)
            assert_true(row(z, i)[v] <= row(z, i)[argmax[i]]);
    lab->ops->drop(lab->be, &table);
    free(data);
}

static void
self_conditioning(struct lab *lab)
{
    static const char front[] = "model.decoder.self_conditioning";

    for (size_t i = 0; i < LENGTH(groups); i++) {
        uint32_t hidden = groups[i].hidden;
        float scale = sqrtf((float)hidden);
        struct ns_matrix m[2];
        struct ns_weight w;
        struct ns_rows x, inner, y;
        struct golden g;
        int32_t *ids;
        char name[128];

        if (!applies(lab, &groups[i]))
            continue;
        if (groups[i].bf16)
            scale = to_bf16(scale);
        golden_open(&g, lab, &groups[i], "probe");
        snprintf(g.where, sizeof(g.where), "self-conditioning");

        m[0] = stored_matrix(&g, "model.decoder.embed_tokens.weight");
        w = lab_pack(lab, NS_PACK_TABLE, m, 1);
        ids = lab_take(lab, CANVAS * sizeof(*ids));
        memcpy(ids, must_find(g.probe, "canvas_ids")->data,
               CANVAS * sizeof(*ids));
        x = lab_rows(lab, CANVAS, hidden);
        lab->ops->embed(lab->be, x, &w, ids, scale);
        compare(&g, "sc.embeds", x, rows_of(&g, "sc.embeds"), 1e-6, 1);
        lab->ops->drop(lab->be, &w);
        check_soft(&g, scale);

        y = lab_rows(lab, CANVAS, hidden);
        snprintf(name, sizeof(name), "%s.pre_norm.weight", front);
        lab->ops->rmsnorm(lab->be, y, rows_of(&g, "sc.soft"),
                          floats_of(&g, g.model, name), eps);
        compare(&g, "sc.pre_norm", y, rows_of(&g, "sc.pre_norm"), 5e-5, 2);

        snprintf(name, sizeof(name), "%s.gate_proj.weight", front);
        m[0] = stored_matrix(&g, name);
        snprintf(name, sizeof(name), "%s.up_proj.weight", front);
        m[1] = stored_matrix(&g, name);
        inner = lab_rows(lab, CANVAS, m[0].n);
        for (int j = 0; j < 2; j++) {
            const char *out = j ? "sc.up_proj" : "sc.gate_proj";

            w = lab_pack(lab, NS_PACK_LINEAR, &m[j], 1);
            lab->ops->linear(lab->be, inner, rows_of(&g, "sc.pre_norm"), &w);
            compare(&g, out, inner, rows_of(&g, out), 5e-5, 2);
            lab->ops->drop(lab->be, &w);
        }
        w = lab_pack(lab, NS_PACK_GATED, m, 2);
        lab->ops->gated(lab->be, inner, rows_of(&g, "sc.pre_norm"), &w);
        lab->ops->drop(lab->be, &w);
        snprintf(name, sizeof(name), "%s.down_proj.weight", front);
        m[0] = stored_matrix(&g, name);
        w = lab_pack(lab, NS_PACK_LINEAR, m, 1);
        lab->ops->linear(lab->be, y, inner, &w);
        compare(&g, "sc.down_proj", y, rows_of(&g, "sc.down_proj"), 5e-5, 5);
        lab->ops->drop(lab->be, &w);

        x = rows_of(&g, "sc.embeds");
        lab->ops->add_then_norm(lab->be, x, rows_of(&g, "sc.down_proj"), eps);
        compare(&g, "sc.post_norm", x, rows_of(&g, "sc.post_norm"), 5e-5, 2);
        golden_close(&g);
    }
}

static void
every_op_of_the_self_conditioning_gives_its_recorded_output(void **state)
{
    (void)state;
    on_every_isa(self_conditioning);
}

/* ---- head -------------------------------------------------------------- */

static void
heads(struct lab *lab)
{
    static const char *const cases[] = { "forward_len17", "forward_len48",
                                         "forward_len40" };

    for (size_t i = 0; i < LENGTH(groups) * LENGTH(cases); i++) {
        const struct group *group = &groups[i / LENGTH(cases)];
        const char *name = cases[i % LENGTH(cases)];
        struct ns_rows h, want, got;
        struct ns_matrix m;
        struct ns_weight table;
        struct golden g;

        if (!applies(lab, group) ||
            (i % LENGTH(cases) == (group->bf16 ? 1 : 2)))
            continue;
        golden_open(&g, lab, group, name);
        snprintf(g.where, sizeof(g.where), "%s", name);
        h = rows_of(&g, "enc.final_hidden");
        want = rows_of(&g, "enc.logits");
        got = (struct ns_rows){ .n_rows = want.n_rows, .n_cols = want.n_cols,
                                .stride = want.n_cols };
        got.data = lab_take(lab, (size_t)got.n_rows * got.n_cols *
                                     sizeof(float));
        m = stored_matrix(&g, "model.decoder.embed_tokens.weight");
        table = lab_pack(lab, NS_PACK_TABLE, &m, 1);
        lab->ops->logits(lab->be, h, &table, 30, got.data);
        compare(&g, "enc.logits", got, want, 5e-5, 2);
        lab->ops->drop(lab->be, &table);
        golden_close(&g);
    }
}

static void
logits_come_out_of_the_recorded_hidden_states(void **state)
{
    (void)state;
    on_every_isa(heads);
}

/* ---- rope -------------------------------------------------------------- */

/* A head of ones in front and zeros behind turns into cosines and sines. */
static void
ropes(struct lab *lab)
{
    static const struct {
        const char *name;
        uint32_t head_dim, n_rotated;
    } kinds[] = { { "sliding_attention", 256, 128 },
                  { "full_attention", 512, 64 } };
    struct ns_error err;

    for (size_t kind = 0; kind < LENGTH(kinds); kind++) {
        uint32_t d = kinds[kind].head_dim, half = d / 2, n;
        const struct ns_stored_tensor *positions;
        struct golden g = { .lab = lab, .group = &groups[0] };
        struct ns_segment segment = { .kind = NS_SEGMENT_CANVAS };
        struct ns_pass pass = { .n_segments = 1, .segments = &segment };
        struct ns_rows cosine, sine;
        struct ns_qkv qkv;
        int32_t *position;
        float *norm;
        char name[64];

        if (ns_safetensors_open_file(
                "tests/cases/rope/rope_released.safetensors", &g.probe,
                &err) != NS_OK)
            fail_msg("%s", err.text);
        positions = must_find(g.probe, "positions");
        n = (uint32_t)positions->dim[0];
        position = lab_take(lab, n * sizeof(*position));
        memcpy(position, positions->data, n * sizeof(*position));
        segment.n_rows = pass.n_rows = n;
        pass.position = position;
        norm = lab_take(lab, d * sizeof(*norm));
        for (uint32_t j = 0; j < d; j++)
            norm[j] = sqrtf(0.5f); /* undoes the norm of half a head of ones */
        snprintf(name, sizeof(name), "%s.inv_freq", kinds[kind].name);
        qkv = (struct ns_qkv){
            .qkv = lab_rows(lab, n, 2 * d), .q = lab_rows(lab, n, d),
            .k = lab_rows(lab, n, d), .v = lab_rows(lab, n, d),
            .q_norm = norm, .k_norm = norm,
            .frequency = floats_of(&g, g.probe, name), .n_heads = 1,
            .kv = { .n_kv_heads = 1, .head_dim = d,
                    .n_rotated = kinds[kind].n_rotated },
        };
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < 2 * d; j++)
                row(qkv.qkv, i)[j] = j % d < half;
        lab->ops->qkv(lab->be, &pass, &qkv);
        lab_sync(lab);
        snprintf(name, sizeof(name), "%s.cos", kinds[kind].name);
        cosine = rows_of(&g, name);
        snprintf(name, sizeof(name), "%s.sin", kinds[kind].name);
        sine = rows_of(&g, name);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < half; j++)
                for (int of_k = 0; of_k < 2; of_k++) {
                    const float *x = row(of_k ? qkv.k : qkv.q, i);

                    assert_near(lab, "cosine", (double)x[j],
                                (double)row(cosine, i)[j], 2e-6);
                    assert_near(lab, "sine", (double)x[j + half],
                                (double)row(sine, i)[j], 2e-6);
                }
        ns_safetensors_close(g.probe);
        lab_release_to(lab, 0);
    }
}

static void
rotation_is_exact_up_to_the_last_released_position(void **state)
{
    (void)state;
    on_every_isa(ropes);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_of_a_layer_gives_its_recorded_output),
        cmocka_unit_test(
            every_op_of_the_self_conditioning_gives_its_recorded_output),
        cmocka_unit_test(logits_come_out_of_the_recorded_hidden_states),
        cmocka_unit_test(rotation_is_exact_up_to_the_last_released_position),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
