/* head.cu - the vocabulary: statistics, the draw, the soft embedding.
 *
 * Contract: cpu/head_ref.c. The vocabulary goes by in parts (head_part): a
 * part's logits are one product, then one kernel takes from them the highest
 * logit and, for each tile of HEAD_TILE tokens, its own maximum and sums; for
 * soft rows it leaves e^(l - highest so far), which a second product turns into
 * the part's share of the soft row, earlier shares rescaled. What is kept of
 * the vocabulary is 12 bytes a tile. A draw finds its tile by the sums of
 * tiles, in order and in double, takes that tile's logits again (the same bits:
 * the row contract), and goes through its tokens. What a mask does not leave has
 * z = -infinity from the moment its logit is read.
 *
 * Rows with a nucleus hold their logits whole, NUCLEUS_ROWS at a time.
 */
#include <assert.h>

#include "kernels/cuda/cuda.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

static_assert((int)THREADS == (int)HEAD_TILE, "a thread a token of a tile");
static_assert((int)NS_HEAD_TOP == 32, "a lane a candidate");

/* ---- what the parts leave -------------------------------------------------- */

struct part {
    struct head_scratch s;
    uint32_t vocab, start, n; /* tokens start .. start + n - 1 */
    uint32_t ld;              /* of logits and p */
    uint32_t n_tiles;         /* of the vocabulary */
    uint32_t n_soft;
    float softcap;
    bool bf16; /* type of p */
};

__device__ static inline float
capped(float raw, float softcap)
{
    return softcap > 0 ? softcap * tanhf(raw / softcap) : raw;
}

/* A row's mask; NULL: it may choose any token. */
__device__ static inline const uint32_t *
mask_of(const struct head_scratch &s, uint32_t row, uint32_t vocab)
{
    int32_t which = s.mask_of[row];

    return which < 0 ? NULL : s.mask + (size_t)which * ((vocab + 31) / 32);
}

__device__ static inline bool
left(const uint32_t *mask, uint32_t v)
{
    return !mask || (mask[v / 32] >> v % 32 & 1);
}

/* A warp's list, a candidate a lane as they fall; c is the same in all lanes and
 * its id higher than those of its equals. False: it is none of the highest. */
__device__ static inline bool
offer(struct ns_candidate &mine, struct ns_candidate c)
{
    float z = ns_shfl_up(mine.z, 1);
    int32_t id = ns_shfl_up(mine.id, 1);

    if (!(c.z > ns_shfl(mine.z, 31)))
        return false;
    if (c.z > mine.z) {
        bool here = threadIdx.x % 32 == 0 || !(c.z > z);

        mine.z = here ? c.z : z;
        mine.id = here ? c.id : id;
    }
    return true;
}

/* The part's highest z join those of the parts before. Each warp has a run of
 * the part, and the first adds up their lists, ids rising. Reads logits that
 * part_kernel then overwrites. */
__global__ void
top_kernel(struct part args)
{
    struct ns_candidate *lists = ns_shared<struct ns_candidate>(0);
    uint32_t row = blockIdx.x, warp = threadIdx.x / 32;
    uint32_t lane = threadIdx.x % 32, run = (args.n + WARPS - 1) / WARPS;
    uint32_t end = (warp + 1) * run < args.n ? (warp + 1) * run : args.n;
    const float *logits = args.s.logits + (size_t)row * args.ld;
    const uint32_t *mask = mask_of(args.s, row, args.vocab);
    struct ns_candidate *top = args.s.top + (size_t)row * NS_HEAD_TOP + lane;
    const struct ns_candidate none = { -1, -INFINITY };
    struct ns_candidate mine = none;

    if (!args.s.wants_top[row])
        return;
    for (uint32_t from = warp * run; from < end; from += 32) {
        uint32_t v = from + lane;
        float z = v < end && left(mask, args.start + v)
                      ? capped(logits[v], args.softcap)
                      : -INFINITY;
        unsigned higher = ns_ballot(z > ns_shfl(mine.z, 31));

        for (; higher; higher &= higher - 1) {
            int which = __ffs((int)higher) - 1;
            struct ns_candidate c = {
                (int32_t)(args.start + from) + which, ns_shfl(z, which)
            };

            offer(mine, c);
        }
    }
    lists[threadIdx.x] = mine;
    __syncthreads();
    if (warp != 0)
        return;
    mine = args.start > 0 ? *top : none;
    for (uint32_t w = 0; w < WARPS; w++)
        for (uint32_t i = 0; i < 32 && offer(mine, lists[w * 32 + i]); i++)
            continue;
    *top = mine;
}

/* A row's logits of this part become l, and its tiles' sums. */
__global__ void
part_kernel(struct part args)
{
    float *shared = ns_shared<float>(0);
    uint32_t row = blockIdx.x, t = threadIdx.x;
    struct head_row *state = &args.s.row[row];
    float *logits = args.s.logits + (size_t)row * args.ld;
    const uint32_t *mask = mask_of(args.s, row, args.vocab);
    float inv = args.s.inv_temperature[row], best = -INFINITY;
    float highest = -INFINITY, before;
    int32_t argmax = 0;
    bool nan = false;

    for (uint32_t from = 0; from < args.n; from += HEAD_TILE) {
        uint32_t v = from + t;
        bool there = v < args.n && left(mask, args.start + v);
        float z = there ? capped(logits[v], args.softcap) : -INFINITY;
        float l = there ? z * inv : -INFINITY, most, sum, weighted, first;
        struct head_tile *tile =
            &args.s.tile[(size_t)row * args.n_tiles +
                         (args.start + from) / HEAD_TILE];

        nan = block_max(z != z ? 1.0f : 0.0f, shared) > 0 || nan;
        most = block_max(z, shared);
        /* The lowest token among equals: counts below 2^24 are exact. */
        first = block_max(z == most ? -(float)v : -INFINITY, shared);
        if (most > best) {
            best = most;
            argmax = (int32_t)(args.start + (uint32_t)-first);
        }
        most = block_max(l, shared);
        sum = there && l > -INFINITY ? expf(l - most) : 0;
        weighted = sum > 0 ? sum * (l - most) : 0;
        sum = block_sum(sum, shared);
        weighted = block_sum(weighted, shared);
        if (v < args.n)
            logits[v] = l;
        if (t == 0) {
            tile->reference = most;
            tile->sum = sum;
            tile->weighted = weighted;
        }
        highest = fmaxf(highest, most);
    }
    before = args.start == 0 ? -INFINITY : state->highest;
    highest = fmaxf(highest, before);
    if (row < args.n_soft)
        for (uint32_t v = t; v < args.ld; v += THREADS) {
            float p = v < args.n ? expf(logits[v] - highest) : 0;

            if (args.bf16)
                ((uint16_t *)args.s.p)[(size_t)row * args.ld + v] =
                    ns_bf16_of(p);
            else
                ((float *)args.s.p)[(size_t)row * args.ld + v] = p;
        }
    __syncthreads(); /* all have read the state */
    if (t != 0)
        return;
    if (args.start == 0) {
        state->nan = 0;
        state->best = -INFINITY;
        state->argmax = 0;
    }
    if (best > state->best) {
        state->best = best;
        state->argmax = argmax;
    }
    state->nan |= nan;
    state->highest = highest;
    args.s.factor[row] = before == -INFINITY ? 0 : expf(before - highest);
}

/* ---- a row's answers --------------------------------------------------------- */

struct finish {
    struct head_scratch s;
    uint32_t vocab, n_tiles;
};

/* First token of the HEAD_TILE, or all, that the draw of a tile reads. */
__host__ __device__ static inline uint32_t
drawn_from(uint32_t tile, uint32_t vocab)
{
    uint32_t width = vocab < HEAD_TILE ? vocab : HEAD_TILE;
    uint32_t from = tile * HEAD_TILE;

    return from + width <= vocab ? from : vocab - width;
}

__global__ void
finish_kernel(struct finish args)
{
    double *mass = ns_shared<double>(0), *extra = mass + args.n_tiles;
    uint32_t row = blockIdx.x, tile = 0;
    struct head_row *state = &args.s.row[row];
    const struct head_tile *tiles = args.s.tile + (size_t)row * args.n_tiles;
    double total = 0, weighted = 0, before = 0, sum = 0, target, u;
    float highest = state->highest;

    for (uint32_t i = threadIdx.x; i < args.n_tiles; i += THREADS) {
        double below = (double)tiles[i].reference - (double)highest;
        double scale = tiles[i].sum > 0 ? exp(below) : 0;

        mass[i] = scale * (double)tiles[i].sum;
        extra[i] = scale > 0 ? scale * ((double)tiles[i].weighted +
                                        below * (double)tiles[i].sum) : 0;
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (uint32_t i = 0; i < args.n_tiles; i++) {
        total += mass[i];
        weighted += extra[i];
    }
    if (!(total > 0)) /* nothing is left of it */
        state->nan = 1;
    u = args.s.uniform[row];
    target = u * total;
    for (uint32_t i = 0; i < args.n_tiles; i++) {
        if (mass[i] > 0) {
            tile = i;
            before = sum;
            if (sum + mass[i] > target)
                break;
        }
        sum += mass[i];
    }
    state->total = total;
    state->rest = target - before;
    state->tile = tile;
    args.s.draw[row].w_row = drawn_from(tile, args.vocab);
    args.s.draw[row].first = row;
    args.s.draw[row].n_rows = 1;
    if (row == 0)
        *args.s.n_draw = gridDim.x;
    args.s.argmax[row] = state->nan ? 0 : state->argmax;
    args.s.sampled[row] = args.s.argmax[row];
    args.s.entropy[row] = state->nan ? NAN
                                     : (float)(log(total) - weighted / total);
    args.s.logsumexp[row] = state->nan ? NAN
                                       : (float)((double)highest + log(total));
}

/* Which token of the drawn tile it is; the last that can be if rounding leaves
 * none. */
__global__ void
pick_kernel(struct finish args, float softcap)
{
    double *p = ns_shared<double>(0);
    uint32_t row = blockIdx.x, t = threadIdx.x;
    const struct head_row *state = &args.s.row[row];
    uint32_t from = drawn_from(state->tile, args.vocab);
    uint32_t v = state->tile * HEAD_TILE + t;
    double rest = state->rest;
    int32_t token;

    if (args.s.uniform[row] < 0 || state->nan)
        return;
    p[t] = 0;
    if (v < args.vocab && left(mask_of(args.s, row, args.vocab), v)) {
        float raw = args.s.drawn[(size_t)row * HEAD_TILE + v - from];
        float l = capped(raw, softcap) * args.s.inv_temperature[row];

        p[t] = exp((double)l - (double)state->highest);
    }
    __syncthreads();
    if (t != 0)
        return;
    token = (int32_t)(state->tile * HEAD_TILE);
    for (uint32_t i = 0; i < HEAD_TILE; i++) {
        if (p[i] > 0)
            token = (int32_t)(state->tile * HEAD_TILE + i);
        rest -= p[i];
        if (rest < 0)
            break;
    }
    args.s.sampled[row] = token;
}

__global__ void
soft_kernel(struct ns_rows soft, const struct head_row *row, float scale,
            bool bf16)
{
    float *to = row_at(soft, blockIdx.x);
    float factor = (float)((double)scale / row[blockIdx.x].total);

    for (uint32_t j = threadIdx.x; j < soft.n_cols; j += blockDim.x) {
        float v = to[j] * factor;

        to[j] = bf16 ? ns_bf16_to_float(ns_bf16_of(v)) : v;
    }
}

/* ---- nucleus ------------------------------------------------------------------- */

/* Sum over the block in a fixed order. */
__device__ static inline double
block_total(double v, double *part)
{
    double sum = 0;

    __syncthreads(); /* part may still be read from the sum before */
    part[threadIdx.x] = v;
    __syncthreads();
    for (uint32_t i = 0; i < THREADS; i++)
        sum += part[i];
    return sum;
}

/* Unsigned numbers in the order of the floats. */
__device__ static inline uint32_t
ordered(float v)
{
    uint32_t bits = ns_float_bits(v == 0 ? 0.0f : v);

    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct nucleus {
    struct head_scratch s;
    const uint32_t *rows; /* of the head, a block each */
    uint32_t vocab;
    float softcap;
};

/* The smallest set of the likeliest tokens with a mass of at least top_p, the
 * lowest index first among equals: all above a threshold, found bit by bit, and
 * the first few that lie on it. */
__global__ void
nucleus_kernel(struct nucleus args)
{
    double *part = ns_shared<double>(0);
    uint32_t row = args.rows[blockIdx.x], t = threadIdx.x, threshold = 0;
    const struct head_row *state = &args.s.row[row];
    const uint32_t *mask = mask_of(args.s, row, args.vocab);
    float *l = args.s.whole + (size_t)blockIdx.x * args.vocab;
    float inv = args.s.inv_temperature[row];
    double highest = (double)state->highest, total = 0, need, above = 0;
    double rest, kept, on = 0;
    uint32_t n_on = 0, seen = 0;
    int32_t token = 0;

    if (state->nan)
        return;
    for (uint32_t v = t; v < args.vocab; v += THREADS) {
        l[v] = left(mask, v) ? capped(l[v], args.softcap) * inv : -INFINITY;
        total += exp((double)l[v] - highest);
    }
    need = (double)args.s.top_p[row] * block_total(total, part);
    for (uint32_t bit = 0x80000000u; bit > 0; bit /= 2) {
        double mass = 0;

        for (uint32_t v = t; v < args.vocab; v += THREADS)
            if (ordered(l[v]) >= (threshold | bit))
                mass += exp((double)l[v] - highest);
        if (block_total(mass, part) >= need)
            threshold |= bit;
    }
    for (uint32_t v = t; v < args.vocab; v += THREADS) {
        double p = exp((double)l[v] - highest);

        if (ordered(l[v]) > threshold)
            above += p;
        else if (ordered(l[v]) == threshold)
            on = p; /* all of them have the same */
    }
    above = block_total(above, part);
    __syncthreads();
    part[t] = on;
    __syncthreads();
    for (uint32_t i = 0; i < THREADS; i++)
        on = part[i] > on ? part[i] : on;
    while (n_on == 0 || (above + n_on * on < need && n_on < args.vocab))
        n_on++;
    kept = 0;
    /* A tile at a time, so that thread 0 reads its tokens in order. */
    rest = 0;
    for (int pass = 0; pass < 2; pass++) {
        seen = 0;
        for (uint32_t from = 0; from < args.vocab; from += THREADS) {
            uint32_t v = from + t;

            __syncthreads();
            part[t] = v < args.vocab && ordered(l[v]) >= threshold
                          ? (ordered(l[v]) > threshold ? 1 : -1) *
                                exp((double)l[v] - highest)
                          : 0;
            __syncthreads();
            if (t != 0)
                continue;
            for (uint32_t i = 0; i < THREADS; i++) {
                double p = part[i];

                if (p < 0)
                    p = seen++ < n_on ? -p : 0;
                if (pass == 0) {
                    kept += p;
                } else if (p > 0 && rest >= 0) {
                    token = (int32_t)(from + i);
                    rest -= p;
                }
            }
        }
        rest = args.s.uniform[row] * kept;
    }
    if (t == 0)
        args.s.sampled[row] = token;
}

__global__ void
cap_kernel(float *z, uint32_t vocab, float softcap)
{
    float *row = z + (size_t)blockIdx.x * vocab;

    for (uint32_t v = threadIdx.x; v < vocab; v += blockDim.x)
        row[v] = capped(row[v], softcap);
}

/* ---- launching ------------------------------------------------------------------- */

/* logits = rows of `a` times tokens start .. start + n - 1 */
static struct product
logits_of(const struct ns_weight *table, const void *a, size_t lda, uint32_t m,
          uint32_t start, uint32_t n, float *y, size_t ldy)
{
    struct product p = {};

    p.a = a;
    p.lda = lda;
    p.m = m;
    p.w = (const char *)table->data +
          start * weight_ld(table) * ns_dtype_bytes(table->dtype);
    p.w_type = table->dtype;
    p.ldw = weight_ld(table);
    p.n = n;
    p.k = table->k;
    p.epilogue = STORE;
    p.y = y;
    p.ldy = ldy;
    return p;
}

static void
one_part(struct cuda *cuda, const struct ns_head *args, const struct part *part,
         const void *h, size_t ldh, uint32_t m, struct ns_rows soft)
{
    const struct ns_weight *table = args->table;
    struct product p = logits_of(table, h, ldh, m, part->start, part->n,
                                 part->s.logits, part->ld);

    cuda_product(cuda, &p);
    if (args->top)
        LAUNCH(cuda, m, THREADS, THREADS * sizeof(struct ns_candidate),
               top_kernel, *part);
    LAUNCH(cuda, m, THREADS, THREADS / 32 * sizeof(float), part_kernel, *part);
    if (part->n_soft == 0)
        return;
    p.a = part->s.p;
    p.lda = part->ld;
    p.m = part->n_soft;
    p.n = table->k;
    p.k = part->n;
    p.k_rows = true;
    p.epilogue = part->start == 0 ? STORE : ADD;
    p.factor = part->s.factor;
    p.y = soft.data;
    p.ldy = soft.stride;
    cuda_product(cuda, &p);
}

static bool
has_nucleus(const struct ns_head *args, uint32_t i)
{
    return args->uniform[i] >= 0 && args->top_p && args->top_p[i] < 1;
}

/* Rows first .. first + m - 1 of the head, row 0 of the scratch being the
 * first. */
static void
nuclei(struct cuda *cuda, const struct ns_head *args, const void *h,
       size_t ldh, uint32_t first, uint32_t m)
{
    size_t row_bytes = ldh * operand_bytes(cuda, args->table->dtype);
    uint32_t vocab = args->table->n, rows[NUCLEUS_ROWS], n = 0;
    struct nucleus nucleus = { cuda->head, cuda->index, vocab,
                               args->softcap };

    for (uint32_t i = 0; i < m; i++) {
        if (has_nucleus(args, first + i)) {
            struct product p = logits_of(
                args->table, (const char *)h + i * row_bytes, ldh, 1, 0, vocab,
                cuda->head.whole + (size_t)n * vocab, vocab);

            cuda_product(cuda, &p);
            rows[n++] = i;
        }
        if (n == 0 || (n < NUCLEUS_ROWS && i + 1 < m))
            continue;
        cuda_put(cuda, cuda->index, rows, n * sizeof(*rows));
        LAUNCH(cuda, n, THREADS, THREADS * sizeof(double), nucleus_kernel,
               nucleus);
        n = 0;
    }
}

/* The masks of m rows from the first on, each that differs from the one before
 * once; and which rows want candidates. */
static void
put_wishes(struct cuda *cuda, const struct ns_head *args, uint32_t first,
           uint32_t m)
{
    size_t words = divide_up(args->table->n, 32);
    const uint32_t *last = NULL;
    uint8_t wants_top[HEAD_ROWS];
    int32_t which[HEAD_ROWS], n = 0;

    for (uint32_t i = 0; i < m; i++) {
        const uint32_t *mask = args->mask ? args->mask[first + i] : NULL;

        if (mask && mask != last)
            cuda_put(cuda, cuda->head.mask + words * n++, mask,
                     words * sizeof(*mask));
        last = mask ? mask : last;
        which[i] = mask ? n - 1 : -1;
        wants_top[i] = args->top && args->top[first + i];
    }
    cuda_put(cuda, cuda->head.mask_of, which, m * sizeof(*which));
    if (args->top)
        cuda_put(cuda, cuda->head.wants_top, wants_top, m);
}

/* Lists that lie one behind the other, as those of a canvas do, are one
 * answer. */
static void
answer_top(struct cuda *cuda, struct ns_candidate *const *top, uint32_t m)
{
    for (uint32_t i = 0, n; i < m; i += n) {
        for (n = 1; top[i] && i + n < m &&
                    top[i + n] == top[i] + (size_t)n * NS_HEAD_TOP;)
            n++;
        if (top[i])
            cuda_answer(cuda, top[i],
                        cuda->head.top + (size_t)i * NS_HEAD_TOP,
                        n * NS_HEAD_TOP * sizeof(**top));
    }
}

static void
head_rows(struct cuda *cuda, const struct ns_head *args, uint32_t first,
          uint32_t m)
{
    const struct ns_weight *table = args->table;
    struct head_scratch *s = &cuda->head;
    uint32_t vocab = table->n, size = head_part(vocab);
    uint32_t width = vocab < HEAD_TILE ? vocab : HEAD_TILE;
    struct ns_rows h = args->h, soft = args->soft;
    struct finish finish = { *s, vocab, divide_up(vocab, HEAD_TILE) };
    struct product p;
    size_t ldh;
    const void *operand;

    h.data += first * h.stride;
    h.n_rows = m;
    soft.data += args->n_soft > first ? first * soft.stride : 0;
    soft.n_rows = args->n_soft > first ? args->n_soft - first : 0;
    soft.n_rows = soft.n_rows < m ? soft.n_rows : m;
    cuda_put(cuda, s->inv_temperature, args->inv_temperature + first,
             m * sizeof(float));
    cuda_put(cuda, s->uniform, args->uniform + first, m * sizeof(double));
    if (args->top_p)
        cuda_put(cuda, s->top_p, args->top_p + first, m * sizeof(float));
    put_wishes(cuda, args, first, m);
    operand = cuda_operand(cuda, h, table->dtype, &ldh);
    for (uint32_t start = 0; start < vocab; start += size) {
        struct part part = {};

        part.s = *s;
        part.vocab = vocab;
        part.start = start;
        part.n = vocab - start < size ? vocab - start : size;
        part.ld = size;
        part.n_tiles = finish.n_tiles;
        part.n_soft = soft.n_rows;
        part.softcap = args->softcap;
        part.bf16 = takes_bf16(cuda, table->dtype);
        one_part(cuda, args, &part, operand, ldh, m, soft);
    }
    LAUNCH(cuda, m, THREADS, 2 * finish.n_tiles * sizeof(double),
           finish_kernel, finish);
    p = logits_of(table, operand, ldh, m, 0, width, s->drawn, HEAD_TILE);
    p.tiles = s->draw;
    p.n_tiles = s->n_draw;
    p.max_tiles = m;
    p.rows_per_tile = 1;
    cuda_product(cuda, &p);
    LAUNCH(cuda, m, THREADS, THREADS * sizeof(double), pick_kernel, finish,
           args->softcap);
    nuclei(cuda, args, operand, ldh, first, m);
    if (soft.n_rows > 0)
        LAUNCH(cuda, soft.n_rows, row_threads(soft.n_cols), 0, soft_kernel,
               soft, (const struct head_row *)s->row, args->soft_scale,
               table->dtype == NS_BF16);
    if (args->top)
        answer_top(cuda, args->top + first, m);
    cuda_answer(cuda, args->argmax + first, s->argmax, m * sizeof(int32_t));
    cuda_answer(cuda, args->sampled + first, s->sampled, m * sizeof(int32_t));
    cuda_answer(cuda, args->entropy + first, s->entropy, m * sizeof(float));
    if (args->logsumexp)
        cuda_answer(cuda, args->logsumexp + first, s->logsumexp,
                    m * sizeof(float));
}

void
head_cuda(struct ns_backend *be, const struct ns_head *args)
{
    for (uint32_t at = 0; at < args->h.n_rows; at += HEAD_ROWS)
        head_rows(cuda_of(be), args, at,
                  args->h.n_rows - at < HEAD_ROWS ? args->h.n_rows - at
                                                  : (uint32_t)HEAD_ROWS);
}

void
logits_cuda(struct ns_backend *be, struct ns_rows h,
            const struct ns_weight *table, float softcap, float *out)
{
    struct cuda *cuda = cuda_of(be);
    uint32_t vocab = table->n;

    for (uint32_t at = 0; at < h.n_rows; at += NUCLEUS_ROWS) {
        struct ns_rows part = h;
        struct product p;
        const void *operand;
        size_t lda;

        part.data += at * h.stride;
        part.n_rows = h.n_rows - at < NUCLEUS_ROWS ? h.n_rows - at
                                                   : (uint32_t)NUCLEUS_ROWS;
        operand = cuda_operand(cuda, part, table->dtype, &lda);
        p = logits_of(table, operand, lda, part.n_rows, 0, vocab,
                      cuda->head.whole, vocab);
        cuda_product(cuda, &p);
        LAUNCH(cuda, part.n_rows, THREADS, 0, cap_kernel, cuda->head.whole,
               vocab, softcap);
        be->ops->download(be, out + (size_t)at * vocab, cuda->head.whole,
                          (size_t)part.n_rows * vocab * sizeof(float));
    }
}
