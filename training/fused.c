/* fused.c - the element-wise chains of one training step, each in one sweep.
 *
 * Loaded by model.py with ctypes when the processor has AVX-512 with bf16; otherwise model.py does the same with
 * PyTorch operations (fused_check.py compares both). Activations are bf16, weights of norms fp32, rows contiguous,
 * widths multiples of 16. nt: number of threads.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf;
typedef __m512 V;

static inline V ld(const bf *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void st(bf *p, V v)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v));
}

static inline V set(float x) { return _mm512_set1_ps(x); }
static inline float sum(V v) { return _mm512_reduce_add_ps(v); }

static inline V vexp(V x)
{
    x = _mm512_max_ps(_mm512_min_ps(x, set(88.0f)), set(-87.0f));
    V n = _mm512_roundscale_ps(_mm512_mul_ps(x, set(1.44269504f)), 0);
    V r = _mm512_fnmadd_ps(n, set(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, set(-2.12194440e-4f), r);
    V p = set(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, set(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, set(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, set(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, set(0.5f));
    p = _mm512_fmadd_ps(p, r, set(1.0f));
    p = _mm512_fmadd_ps(p, r, set(1.0f));
    return _mm512_scalef_ps(p, n);
}

static inline V vtanh(V x)
{
    V e = vexp(_mm512_add_ps(x, x));
    return _mm512_sub_ps(set(1.0f), _mm512_div_ps(set(2.0f), _mm512_add_ps(e, set(1.0f))));
}

/* out = (res + x / rms(x) * w) * scalar[row]; res, w and scalar may be NULL. scale[row] is kept for the way back. */
void rms_fwd(const bf *x, const float *w, const bf *res, const float *scalar, bf *out, float *scale, long n, long h, float eps, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n; i++) {
        const bf *a = x + i * h;
        V s = set(0);
        for (long j = 0; j < h; j += 16) {
            V v = ld(a + j);
            s = _mm512_fmadd_ps(v, v, s);
        }
        float k = 1.0f / sqrtf(sum(s) / (float)h + eps), f = scalar ? scalar[i] : 1.0f;
        scale[i] = k;
        for (long j = 0; j < h; j += 16) {
            V y = _mm512_mul_ps(ld(a + j), set(k));
            if (w)
                y = _mm512_mul_ps(y, _mm512_loadu_ps(w + j));
            if (res)
                y = _mm512_add_ps(y, ld(res + i * h + j));
            st(out + i * h + j, _mm512_mul_ps(y, set(f)));
        }
    }
}

/* d: gradient of out. dx; dres (d * scalar) if not NULL; dw added to; dscalar[row] if not NULL, from out. */
void rms_bwd(const bf *x, const float *w, const float *scalar, const bf *out, const float *scale, const bf *d, bf *dx, bf *dres, float *dw,
             float *dscalar, long n, long h, int nt)
{
#pragma omp parallel num_threads(nt)
    {
        float acc[1024];
        memset(acc, 0, sizeof acc);
#pragma omp for
        for (long i = 0; i < n; i++) {
            const bf *a = x + i * h, *g = d + i * h;
            float k = scale[i], f = scalar ? scalar[i] : 1.0f;
            V dot = set(0), whole = set(0);
            for (long j = 0; j < h; j += 16) {
                V gg = ld(g + j);
                if (dscalar)
                    whole = _mm512_fmadd_ps(gg, ld(out + i * h + j), whole);
                gg = _mm512_mul_ps(gg, set(f));
                if (dres)
                    st(dres + i * h + j, gg);
                V y = _mm512_mul_ps(ld(a + j), set(k));
                if (w) {
                    V t = _mm512_fmadd_ps(gg, y, _mm512_loadu_ps(acc + j));
                    _mm512_storeu_ps(acc + j, t);
                    gg = _mm512_mul_ps(gg, _mm512_loadu_ps(w + j));
                }
                dot = _mm512_fmadd_ps(gg, y, dot);
            }
            float m = sum(dot) / (float)h;
            if (dscalar)
                dscalar[i] = sum(whole) / f;
            for (long j = 0; j < h; j += 16) {
                V gg = _mm512_mul_ps(ld(g + j), set(f)), y = _mm512_mul_ps(ld(a + j), set(k));
                if (w)
                    gg = _mm512_mul_ps(gg, _mm512_loadu_ps(w + j));
                st(dx + i * h + j, _mm512_mul_ps(_mm512_fnmadd_ps(y, set(m), gg), set(k)));
            }
        }
        if (w) {
#pragma omp critical
            for (long j = 0; j < h; j++)
                dw[j] += acc[j];
        }
    }
}

/* h [n, 2m] = gate | up; out [n, m] = gelu(gate) * up */
void gated_fwd(const bf *h, bf *out, long n, long m, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n; i++)
        for (long j = 0; j < m; j += 16) {
            V g = ld(h + i * 2 * m + j), u = ld(h + i * 2 * m + m + j);
            V c = _mm512_mul_ps(set(0.7978845608f), _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_mul_ps(g, set(0.044715f)), g));
            V a = _mm512_mul_ps(_mm512_mul_ps(set(0.5f), g), _mm512_add_ps(set(1), vtanh(c)));
            st(out + i * m + j, _mm512_mul_ps(a, u));
        }
}

void gated_bwd(const bf *h, const bf *d, bf *dh, long n, long m, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n; i++)
        for (long j = 0; j < m; j += 16) {
            V g = ld(h + i * 2 * m + j), u = ld(h + i * 2 * m + m + j), e = ld(d + i * m + j);
            V gg = _mm512_mul_ps(g, g);
            V t = vtanh(_mm512_mul_ps(set(0.7978845608f), _mm512_fmadd_ps(gg, _mm512_mul_ps(g, set(0.044715f)), g)));
            V half = _mm512_mul_ps(set(0.5f), _mm512_add_ps(set(1), t));
            V inner = _mm512_mul_ps(set(0.7978845608f), _mm512_fmadd_ps(gg, set(3 * 0.044715f), set(1)));
            V slope = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(set(0.5f), g), _mm512_fnmadd_ps(t, t, set(1))), inner, half);
            st(dh + i * 2 * m + j, _mm512_mul_ps(_mm512_mul_ps(e, u), slope));
            st(dh + i * 2 * m + m + j, _mm512_mul_ps(e, _mm512_mul_ps(g, half)));
        }
}

/* In place: s [b, heads, t, t] -> softmax(s + bias[b, t, t]) */
void softmax_fwd(bf *s, const bf *bias, long b, long heads, long t, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long r = 0; r < b * heads * t; r++) {
        float buf[1024];
        bf *row = s + r * t;
        const bf *add = bias + (r / (heads * t) * t + r % t) * t;
        V top = set(-3e38f), all = set(0);
        for (long j = 0; j < t; j += 16) {
            V v = _mm512_add_ps(ld(row + j), ld(add + j));
            _mm512_storeu_ps(buf + j, v);
            top = _mm512_max_ps(top, v);
        }
        float m = _mm512_reduce_max_ps(top);
        for (long j = 0; j < t; j += 16) {
            V v = _mm512_loadu_ps(buf + j);
            __mmask16 in = _mm512_cmp_ps_mask(v, set(m - 80.0f), _CMP_GT_OQ);
            v = in ? _mm512_maskz_mov_ps(in, vexp(_mm512_sub_ps(v, set(m)))) : set(0);
            _mm512_storeu_ps(buf + j, v);
            all = _mm512_add_ps(all, v);
        }
        float k = 1.0f / sum(all);
        for (long j = 0; j < t; j += 16)
            st(row + j, _mm512_mul_ps(_mm512_loadu_ps(buf + j), set(k)));
    }
}

/* In place on d: d -> p * (d - sum(p * d)) */
void softmax_bwd(const bf *p, bf *d, long rows, long t, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long r = 0; r < rows; r++) {
        const bf *a = p + r * t;
        bf *g = d + r * t;
        V dot = set(0);
        for (long j = 0; j < t; j += 16)
            dot = _mm512_fmadd_ps(ld(a + j), ld(g + j), dot);
        float m = sum(dot);
        for (long j = 0; j < t; j += 16)
            st(g + j, _mm512_mul_ps(ld(a + j), _mm512_sub_ps(ld(g + j), set(m))));
    }
}

/* One head row: norm, weight, turn. cos and sin have d/2 entries; NULL: no turn. */
static void head_fwd(const bf *x, const float *w, const float *c, const float *s, bf *out, float *scale, long d, float eps)
{
    V q = set(0);
    for (long j = 0; j < d; j += 16) {
        V v = ld(x + j);
        q = _mm512_fmadd_ps(v, v, q);
    }
    float k = 1.0f / sqrtf(sum(q) / (float)d + eps);
    *scale = k;
    if (!w) {
        for (long j = 0; j < d; j += 16)
            st(out + j, _mm512_mul_ps(ld(x + j), set(k)));
        return;
    }
    long h = d / 2;
    for (long j = 0; j < h; j += 16) {
        V a = _mm512_mul_ps(_mm512_mul_ps(ld(x + j), set(k)), _mm512_loadu_ps(w + j));
        V b = _mm512_mul_ps(_mm512_mul_ps(ld(x + h + j), set(k)), _mm512_loadu_ps(w + h + j));
        V cc = _mm512_loadu_ps(c + j), ss = _mm512_loadu_ps(s + j);
        st(out + j, _mm512_fmsub_ps(a, cc, _mm512_mul_ps(b, ss)));
        st(out + h + j, _mm512_fmadd_ps(b, cc, _mm512_mul_ps(a, ss)));
    }
}

/* y [b*t, width] -> q [b,heads,t,d], k [b,kv,t,d], v [b,kv,t,d]; full: v is the raw key projection.
 * cos, sin [b*t, d/2]; scale [b*t, heads+2kv]. */
void heads_fwd(const bf *y, const float *qn, const float *kn, const float *cs, const float *sn, bf *q, bf *k, bf *v, float *scale, long b, long t,
               long heads, long kv, long d, int full, float eps, int nt)
{
    long width = (heads + (full ? 1 : 2) * kv) * d, per = heads + 2 * kv;
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < b * t; i++) {
        const float *c = cs + i * d / 2, *s = sn + i * d / 2;
        const bf *row = y + i * width;
        long bi = i / t, ti = i % t;
        for (long h = 0; h < heads; h++)
            head_fwd(row + h * d, qn, c, s, q + ((bi * heads + h) * t + ti) * d, scale + i * per + h, d, eps);
        for (long h = 0; h < kv; h++) {
            head_fwd(row + (heads + h) * d, kn, c, s, k + ((bi * kv + h) * t + ti) * d, scale + i * per + heads + h, d, eps);
            head_fwd(row + (heads + (full ? 0 : kv) + h) * d, 0, 0, 0, v + ((bi * kv + h) * t + ti) * d, scale + i * per + heads + kv + h, d, eps);
        }
    }
}

/* Gradient of one head row, stored or added to dx. */
static void head_bwd(const bf *x, const float *w, const float *c, const float *s, const bf *g, float k, bf *dx, float *dw, long d, int add)
{
    float e[256], y[256];
    long h = d / 2;
    V dot = set(0);
    for (long j = 0; j < h; j += 16) {
        V a = ld(g + j), b = ld(g + h + j);
        if (w) {
            V cc = _mm512_loadu_ps(c + j), ss = _mm512_loadu_ps(s + j);
            V a2 = _mm512_fmadd_ps(a, cc, _mm512_mul_ps(b, ss));
            b = _mm512_fmsub_ps(b, cc, _mm512_mul_ps(a, ss));
            a = a2;
        }
        V ya = _mm512_mul_ps(ld(x + j), set(k)), yb = _mm512_mul_ps(ld(x + h + j), set(k));
        if (w) {
            _mm512_storeu_ps(dw + j, _mm512_fmadd_ps(a, ya, _mm512_loadu_ps(dw + j)));
            _mm512_storeu_ps(dw + h + j, _mm512_fmadd_ps(b, yb, _mm512_loadu_ps(dw + h + j)));
            a = _mm512_mul_ps(a, _mm512_loadu_ps(w + j));
            b = _mm512_mul_ps(b, _mm512_loadu_ps(w + h + j));
        }
        dot = _mm512_fmadd_ps(a, ya, dot);
        dot = _mm512_fmadd_ps(b, yb, dot);
        _mm512_storeu_ps(e + j, a);
        _mm512_storeu_ps(e + h + j, b);
        _mm512_storeu_ps(y + j, ya);
        _mm512_storeu_ps(y + h + j, yb);
    }
    float m = sum(dot) / (float)d;
    for (long j = 0; j < d; j += 16) {
        V r = _mm512_mul_ps(_mm512_fnmadd_ps(_mm512_loadu_ps(y + j), set(m), _mm512_loadu_ps(e + j)), set(k));
        st(dx + j, add ? _mm512_add_ps(r, ld(dx + j)) : r);
    }
}

void heads_bwd(const bf *y, const float *qn, const float *kn, const float *cs, const float *sn, const float *scale, const bf *dq, const bf *dk,
               const bf *dv, bf *dy, float *dqn, float *dkn, long b, long t, long heads, long kv, long d, int full, int nt)
{
    long width = (heads + (full ? 1 : 2) * kv) * d, per = heads + 2 * kv;
#pragma omp parallel num_threads(nt)
    {
        float aq[256] = {0}, ak[256] = {0};
#pragma omp for
        for (long i = 0; i < b * t; i++) {
            const float *c = cs + i * d / 2, *s = sn + i * d / 2, *sc = scale + i * per;
            const bf *row = y + i * width;
            bf *out = dy + i * width;
            long bi = i / t, ti = i % t;
            for (long h = 0; h < heads; h++)
                head_bwd(row + h * d, qn, c, s, dq + ((bi * heads + h) * t + ti) * d, sc[h], out + h * d, aq, d, 0);
            for (long h = 0; h < kv; h++) {
                head_bwd(row + (heads + h) * d, kn, c, s, dk + ((bi * kv + h) * t + ti) * d, sc[heads + h], out + (heads + h) * d, ak, d, 0);
                long o = (heads + (full ? 0 : kv) + h) * d;
                head_bwd(row + o, 0, 0, 0, dv + ((bi * kv + h) * t + ti) * d, sc[heads + kv + h], out + o, 0, d, full);
            }
        }
#pragma omp critical
        for (long j = 0; j < d; j++) {
            dqn[j] += aq[j];
            dkn[j] += ak[j];
        }
    }
}

/* out[i] = sum over k copies of w[i,k] * o[inverse[i*k..]]; w NULL: plain sum */
void combine(const bf *o, const int64_t *inverse, const float *w, bf *out, long n, long k, long h, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n; i++)
        for (long j = 0; j < h; j += 16) {
            V s = set(0);
            for (long c = 0; c < k; c++)
                s = _mm512_fmadd_ps(ld(o + inverse[i * k + c] * h + j), set(w ? w[i * k + c] : 1.0f), s);
            st(out + i * h + j, s);
        }
}

/* Gradient to the sorted copies, g[i] = w[order[i]] * d[order[i] / k], and to the weights */
void spread(const bf *d, const bf *o, const int64_t *order, const float *w, bf *g, float *dw, long n, long k, long h, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n * k; i++) {
        long c = order[i];
        const bf *a = d + c / k * h;
        V dot = set(0);
        for (long j = 0; j < h; j += 16) {
            V v = ld(a + j);
            dot = _mm512_fmadd_ps(v, ld(o + i * h + j), dot);
            st(g + i * h + j, _mm512_mul_ps(v, set(w[c])));
        }
        dw[c] = sum(dot);
    }
}

/* Loss of every row behind the soft-cap, times weight; z becomes its gradient. */
void loss(bf *z, const int64_t *target, const float *weight, float *out, long n, long v, float cap, int nt)
{
#pragma omp parallel for num_threads(nt)
    for (long i = 0; i < n; i++) {
        float t[8192], p[8192];
        bf *row = z + i * v;
        V all = set(0);
        for (long j = 0; j < v; j += 16) {
            V x = vtanh(_mm512_mul_ps(ld(row + j), set(1.0f / cap)));
            V e = vexp(_mm512_mul_ps(_mm512_sub_ps(x, set(1.0f)), set(cap)));
            _mm512_storeu_ps(t + j, x);
            _mm512_storeu_ps(p + j, e);
            all = _mm512_add_ps(all, e);
        }
        float s = sum(all), w = weight[i];
        out[i] = w * (logf(s) - (t[target[i]] - 1.0f) * cap);
        float k = 1.0f / s;
        V vk = set(k), vw = set(w);
        p[target[i]] -= s;
        for (long j = 0; j < v; j += 16) {
            V x = _mm512_loadu_ps(t + j);
            V g = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(p + j), vk), _mm512_fnmadd_ps(x, x, set(1)));
            st(row + j, _mm512_mul_ps(g, vw));
        }
    }
}
