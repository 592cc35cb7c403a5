/* qkv_body.h - head-wise norms, rotation, and the writing of prefix KV; the
 * same for patches of pictures, which are turned by two places.
 *
 * Contract: qkv_ref.c and patch_ref.c, to the tolerances in test_attention.c
 *           and test_patch.c.
 * Plan:     tasks of a few rows. A row's cosines and sines are made once, four
 *           at a time in double, and serve all of its heads. Norm and weight
 *           round apart, so that K = V * k_norm holds to the bit where nothing
 *           turns: compact pages count on it.
 */
#include <math.h>

enum { QKV_ROWS = 8 };

struct qkv_job {
    struct cpu *cpu;
    const struct ns_pass *pass;
    const struct ns_qkv *args;
};

/* cos and sin of four angles. The angle is exact, pi/2 is taken off it in two
 * parts, and both series end below 1e-10 on the +-pi/4 that are left. */
VEC_INLINE void
sine_cosine(__m128 angle, float *c, float *s)
{
    __m256d a = _mm256_cvtps_pd(angle);
    __m256d n = _mm256_round_pd(
        _mm256_mul_pd(a, _mm256_set1_pd(0.63661977236758134308)),
        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256d x = _mm256_fnmadd_pd(n, _mm256_set1_pd(0x1.921fb54442d18p+0), a);
    __m256d x2, sine, cosine, swap;
    __m128i quadrant = _mm256_cvtpd_epi32(n);
    __m256i wide = _mm256_cvtepi32_epi64(quadrant);
    __m256d sign_s, sign_c;

    x = _mm256_fnmadd_pd(n, _mm256_set1_pd(0x1.1a62633145c07p-54), x);
    x2 = _mm256_mul_pd(x, x);

    sine = _mm256_set1_pd(-1.0 / 39916800);
    sine = _mm256_fmadd_pd(sine, x2, _mm256_set1_pd(1.0 / 362880));
    sine = _mm256_fmadd_pd(sine, x2, _mm256_set1_pd(-1.0 / 5040));
    sine = _mm256_fmadd_pd(sine, x2, _mm256_set1_pd(1.0 / 120));
    sine = _mm256_fmadd_pd(sine, x2, _mm256_set1_pd(-1.0 / 6));
    sine = _mm256_fmadd_pd(_mm256_mul_pd(sine, x2), x, x);

    cosine = _mm256_set1_pd(-1.0 / 3628800);
    cosine = _mm256_fmadd_pd(cosine, x2, _mm256_set1_pd(1.0 / 40320));
    cosine = _mm256_fmadd_pd(cosine, x2, _mm256_set1_pd(-1.0 / 720));
    cosine = _mm256_fmadd_pd(cosine, x2, _mm256_set1_pd(1.0 / 24));
    cosine = _mm256_fmadd_pd(cosine, x2, _mm256_set1_pd(-0.5));
    cosine = _mm256_fmadd_pd(cosine, x2, _mm256_set1_pd(1.0));

    /* An odd quadrant swaps them, bit 1 turns the sine's sign, and the
     * cosine's is turned in quadrants 1 and 2. */
    swap = _mm256_castsi256_pd(_mm256_slli_epi64(wide, 63));
    sign_s = _mm256_castsi256_pd(
        _mm256_slli_epi64(_mm256_srli_epi64(wide, 1), 63));
    sign_c = _mm256_castsi256_pd(_mm256_slli_epi64(
        _mm256_srli_epi64(_mm256_add_epi64(wide, _mm256_set1_epi64x(1)), 1),
        63));
    _mm_storeu_ps(s, _mm256_cvtpd_ps(_mm256_xor_pd(
                         _mm256_blendv_pd(sine, cosine, swap), sign_s)));
    _mm_storeu_ps(c, _mm256_cvtpd_ps(_mm256_xor_pd(
                         _mm256_blendv_pd(cosine, sine, swap), sign_c)));
}

static void
make_turns(const float *frequency, uint32_t n, int32_t position, float *c,
           float *s)
{
    for (uint32_t j = 0; j < n; j += 4) {
        float f[4] = { 0 };

        memcpy(f, frequency + j, (n - j < 4 ? n - j : 4) * sizeof(float));
        sine_cosine(_mm_mul_ps(_mm_set1_ps((float)position),
                               _mm_loadu_ps(f)),
                    c + j, s + j);
    }
}

static void
norm_head(float *out, const float *x, const float *w, uint32_t d, float eps)
{
    vf squares = vf_set(0.0f), inverse;

    for (uint32_t j = 0; j < d; j += LANES) {
        vf v = vf_load_some(x + j, lanes_left(d, j));

        squares = vf_fma(v, v, squares);
    }
    inverse = vf_set(1.0f / sqrtf(vf_sum(squares) / (float)d + eps));
    for (uint32_t j = 0; j < d; j += LANES) {
        uint32_t some = lanes_left(d, j);
        vf y = vf_mul(vf_load_some(x + j, some), inverse);

        if (w)
            y = vf_mul(y, vf_load_some(w + j, some));
        vf_store_some(out + j, y, some);
    }
}

/* The first n pairs (j, half + j) of x. */
static void
rotate(float *x, uint32_t half, uint32_t n, const float *c, const float *s)
{
    for (uint32_t j = 0; j < n; j += LANES) {
        uint32_t some = lanes_left(n, j);
        vf a = vf_load_some(x + j, some);
        vf b = vf_load_some(x + half + j, some);
        vf cosine = vf_load_some(c + j, some);
        vf sine = vf_load_some(s + j, some);

        vf_store_some(x + j, vf_fnma(b, sine, vf_mul(a, cosine)), some);
        vf_store_some(x + half + j, vf_fma(a, sine, vf_mul(b, cosine)), some);
    }
}

static void
qkv_row(const struct qkv_job *job, uint32_t i, float *c, float *s)
{
    const struct ns_qkv *args = job->args;
    const struct ns_segment *segment = segment_of_row(job->pass, i);
    uint32_t d = args->kv.head_dim, n_kv = args->kv.n_kv_heads;
    uint32_t r = args->kv.n_rotated;
    uint32_t position = (uint32_t)job->pass->position[i];
    const float *raw = args->qkv.data + i * args->qkv.stride;
    float *q = args->q.data + i * args->q.stride;
    float *k = args->k.data + i * args->k.stride;
    float *v = args->v.data + i * args->v.stride;

    make_turns(args->frequency, r, (int32_t)position, c, s);
    for (uint32_t head = 0; head < args->n_heads; head++, raw += d, q += d) {
        norm_head(q, raw, args->q_norm, d, args->eps);
        rotate(q, d / 2, r, c, s);
    }
    for (uint32_t head = 0; head < n_kv; head++, raw += d, k += d, v += d) {
        norm_head(k, raw, args->k_norm, d, args->eps);
        rotate(k, d / 2, r, c, s);
        norm_head(v, args->has_v ? raw + (size_t)n_kv * d : raw, NULL, d,
                  args->eps);
        if (segment && segment->kind != NS_SEGMENT_CANVAS)
            kv_store(&args->kv,
                     kv_page(job->pass, &args->kv, args->pages, segment->slot,
                             position),
                     head, position % NS_PAGE, k, v);
    }
}

static void
qkv_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct qkv_job *job = ctx;
    uint32_t end = (task + 1) * QKV_ROWS, r = job->args->kv.n_rotated;
    float *c = scratch_of_thread(job->cpu, thread), *s = c + operand_ld(r);

    for (uint32_t i = task * QKV_ROWS; i < end && i < job->pass->n_rows; i++)
        qkv_row(job, i, c, s);
}

void
ISA(qkv)(struct ns_backend *be, const struct ns_pass *pass,
         const struct ns_qkv *args)
{
    struct qkv_job job = { (struct cpu *)be, pass, args };

    pool_run(job.cpu->pool, (pass->n_rows + QKV_ROWS - 1) / QKV_ROWS, qkv_task,
             &job);
}

struct patch_job {
    struct cpu *cpu;
    const struct ns_patch_qkv *args;
};

/* c and s hold a quarter of a head for x, then one for y. */
static void
norm_and_turn(const struct ns_patch_qkv *args, float *out, const float *raw,
              const float *w, uint32_t d, const float *c, const float *s)
{
    norm_head(out, raw, w, d, args->eps);
    for (uint32_t axis = 0; axis < 2; axis++)
        rotate(out + axis * (d / 2), d / 4, d / 4, c + axis * operand_ld(d / 4),
               s + axis * operand_ld(d / 4));
}

static void
patch_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct patch_job *job = ctx;
    const struct ns_patch_qkv *args = job->args;
    uint32_t n = args->q.n_cols, d = n / args->n_heads, ld = operand_ld(d / 4);
    uint32_t end = (task + 1) * QKV_ROWS;
    float *c = scratch_of_thread(job->cpu, thread), *s = c + 2 * ld;

    for (uint32_t i = task * QKV_ROWS; i < end && i < args->q.n_rows; i++) {
        const float *raw = args->qkv.data + i * args->qkv.stride;
        float *q = args->q.data + i * args->q.stride;
        float *k = args->k.data + i * args->k.stride;
        float *v = args->v.data + i * args->v.stride;

        make_turns(args->frequency, d / 4, args->x[i], c, s);
        make_turns(args->frequency, d / 4, args->y[i], c + ld, s + ld);
        for (uint32_t at = 0; at < n; at += d) {
            norm_and_turn(args, q + at, raw + at, args->q_norm, d, c, s);
            norm_and_turn(args, k + at, raw + n + at, args->k_norm, d, c, s);
            norm_head(v + at, raw + (size_t)2 * n + at, NULL, d, args->eps);
        }
    }
}

void
ISA(patch_qkv)(struct ns_backend *be, const struct ns_patch_qkv *args)
{
    struct patch_job job = { (struct cpu *)be, args };

    pool_run(job.cpu->pool, (args->q.n_rows + QKV_ROWS - 1) / QKV_ROWS,
             patch_task, &job);
}
