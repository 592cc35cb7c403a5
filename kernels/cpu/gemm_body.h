/* gemm_body.h - strips in register tiles, for gemm_<isa>.c but AMX.
 *
 * Plan:     a tile of TILE_ROWS by two registers stays in registers over the
 *           whole of k; a's rows are broadcast from their own storage. Rows are
 *           dealt to tiles evenly (256 rows are 9 tiles of 14 and 10 of 13, not
 *           18 and a tail of 4), which no bit depends on.
 *           Sixteen columns (avx2: eight) that end a strip take one register.
 * Registers: sixteen of them do not hold 6 rows, a pair of weights and both of
 *           its halves, so that AVX2 takes pairs in tiles of PAIR_ROWS = 5.
 * bf16:     the product of a pair of inputs with a pair of weights is one
 *           instruction on 32-bit lanes, so that the fp32 tile serves it as it
 *           is: broadcasts, loads and "fma" move pairs (BF16_PRODUCTS).
 * Includer: defines WIDTH, TILE_ROWS, PAIR_ROWS, the register type `reg` and its reg_*
 *           operations, and ISA(name).
 */
#ifndef TILE_ROWS
#error "included by gemm_<isa>.c only"
#endif

enum {
    TILE_COLS = 2 * WIDTH,
    STRIP_COLS = 32,
    STEP_BYTES = 128,   /* of a panel: 32 floats, or 32 pairs of bf16 */
    AHEAD_STEPS = 2048, /* a panel that is larger would push out its own rows */
};

struct tile {
    float *c;
    size_t ldc;
    const float *a;
    size_t lda;
    const void *b;
    size_t ldb; /* f32: floats */
    uint32_t k;
    bool more;
    const char *ahead; /* to fetch into L2, so many bytes a step of k */
    size_t ahead_step;
};

/* Rows are addressed as three to a base pointer (base, + lda, + 2 lda), which
 * keeps fourteen of them in the general registers. */
#define ROW(r) (p[(r) / 3] + (size_t)((r) % 3) * t->lda)

#define EACH_ROW _Pragma("GCC unroll 14") for (int r = 0; r < n; r++)

/* n and wide, the registers across, are constants where these are inlined. */
VEC_INLINE void
tile_begin(const struct tile *t, const int n, const int wide, reg acc[][2],
           const float *p[])
{
    EACH_ROW
    {
        if (r % 3 == 0)
            p[r / 3] = t->a + (size_t)r * t->lda;
        acc[r][0] = acc[r][1] = reg_zero();
        if (t->more) {
            acc[r][0] = reg_load(t->c + (size_t)r * t->ldc);
            if (wide > 1)
                acc[r][1] = reg_load(t->c + (size_t)r * t->ldc + WIDTH);
        }
    }
}

VEC_INLINE void
tile_end(const struct tile *t, const int n, const int wide, reg acc[][2])
{
    EACH_ROW
    {
        reg_store(t->c + (size_t)r * t->ldc, acc[r][0]);
        if (wide > 1)
            reg_store(t->c + (size_t)r * t->ldc + WIDTH, acc[r][1]);
    }
}

VEC_INLINE void
tile_floats(const struct tile *t, const int n, const int wide)
{
    reg acc[TILE_ROWS][2];
    const float *p[(TILE_ROWS + 2) / 3];
    const float *b = t->b;
    const char *ahead = t->ahead;

    tile_begin(t, n, wide, acc, p);
    for (uint32_t k = 0; k < t->k; k++) {
        reg b0 = reg_load(b), b1 = reg_load(b + WIDTH);

        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + 64, _MM_HINT_T1);
        ahead += t->ahead_step;
        EACH_ROW
        {
            reg a = reg_set(*ROW(r));

            acc[r][0] = reg_fma(a, b0, acc[r][0]);
            if (wide > 1)
                acc[r][1] = reg_fma(a, b1, acc[r][1]);
        }
        _Pragma("GCC unroll 5") for (int i = 0; i < (n + 2) / 3; i++) p[i]++;
        b += t->ldb;
    }
    tile_end(t, n, wide, acc);
}

VEC_INLINE void
tile_f32(const struct tile *t, const int n)
{
    tile_floats(t, n, 2);
}

VEC_INLINE void
tile_half(const struct tile *t, const int n)
{
    tile_floats(t, n, 1);
}

#ifndef BF16_PRODUCTS
VEC_INLINE void
tile_pairs(const struct tile *t, const int n)
{
    reg acc[TILE_ROWS][2];
    const float *p[(TILE_ROWS + 2) / 3];
    const uint16_t *b = t->b;
    const char *ahead = t->ahead;

    tile_begin(t, n, 2, acc, p);
    for (uint32_t k = 0; k + 1 < t->k; k += 2) {
        regi w0 = regi_load(b), w1 = regi_load(b + 2 * WIDTH);
        reg b0 = reg_low_bf16(w0), b1 = reg_low_bf16(w1);

        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + 64, _MM_HINT_T1);
        ahead += t->ahead_step;
        EACH_ROW
        {
            reg a = reg_set(*ROW(r));

            acc[r][0] = reg_fma(a, b0, acc[r][0]);
            acc[r][1] = reg_fma(a, b1, acc[r][1]);
        }
        b0 = reg_high_bf16(w0);
        b1 = reg_high_bf16(w1);
        EACH_ROW
        {
            reg a = reg_set(ROW(r)[1]);

            acc[r][0] = reg_fma(a, b0, acc[r][0]);
            acc[r][1] = reg_fma(a, b1, acc[r][1]);
        }
        _Pragma("GCC unroll 5") for (int i = 0; i < (n + 2) / 3; i++) p[i] += 2;
        b += 2 * STRIP_COLS;
    }
    if (t->k % 2) { /* the second of the last pair does not exist */
        reg b0 = reg_low_bf16(regi_load(b));
        reg b1 = reg_low_bf16(regi_load(b + 2 * WIDTH));

        EACH_ROW
        {
            reg a = reg_set(*ROW(r));

            acc[r][0] = reg_fma(a, b0, acc[r][0]);
            acc[r][1] = reg_fma(a, b1, acc[r][1]);
        }
    }
    tile_end(t, n, 2, acc);
}
#endif

typedef void tile_fn(const struct tile *);

#define TILES(name)                                                           \
    static void name##_1(const struct tile *t) { name(t, 1); }                \
    static void name##_2(const struct tile *t) { name(t, 2); }                \
    static void name##_3(const struct tile *t) { name(t, 3); }                \
    static void name##_4(const struct tile *t) { name(t, 4); }                \
    static void name##_5(const struct tile *t) { name(t, 5); }                \
    static void name##_6(const struct tile *t) { name(t, 6); }                \
    TILES_ABOVE_6(name)                                                       \
    static tile_fn *const name##_of[] = {                                     \
        name##_1, name##_2, name##_3, name##_4, name##_5, name##_6,           \
        TABLE_ABOVE_6(name)                                                   \
    };

#if TILE_ROWS == 14
#define TILES_ABOVE_6(name)                                                   \
    static void name##_7(const struct tile *t) { name(t, 7); }                \
    static void name##_8(const struct tile *t) { name(t, 8); }                \
    static void name##_9(const struct tile *t) { name(t, 9); }                \
    static void name##_10(const struct tile *t) { name(t, 10); }              \
    static void name##_11(const struct tile *t) { name(t, 11); }              \
    static void name##_12(const struct tile *t) { name(t, 12); }              \
    static void name##_13(const struct tile *t) { name(t, 13); }              \
    static void name##_14(const struct tile *t) { name(t, 14); }
#define TABLE_ABOVE_6(name)                                                   \
    name##_7, name##_8, name##_9, name##_10, name##_11, name##_12, name##_13, \
        name##_14
#else
#define TILES_ABOVE_6(name)
#define TABLE_ABOVE_6(name)
#endif

TILES(tile_f32)
TILES(tile_half)
#ifndef BF16_PRODUCTS
TILES(tile_pairs)
#endif

static void
strip_run(const struct strip *s, tile_fn *const tile_of[],
          tile_fn *const half_of[], uint32_t tile_rows, uint32_t n_steps,
          size_t half_bytes)
{
    uint32_t n_tiles = (s->n_rows + tile_rows - 1) / tile_rows;
    uint32_t n_passes = n_tiles * (STRIP_COLS / TILE_COLS), row = 0;
    float edge[TILE_ROWS * TILE_COLS] __attribute__((aligned(64)));
    const char *ahead = s->b;
    size_t step = 0;

    /* A few dozen rows outrun the memory that weights come from: while a panel
     * is at work the next one is fetched, evenly over all passes. (With one
     * tile there is but one stream, which the hardware foresees.) */
    if (s->ahead && n_steps <= AHEAD_STEPS && n_tiles > 1) {
        ahead = s->ahead;
        step = STEP_BYTES / n_passes;
    }

    for (uint32_t i = 0; i < n_tiles; i++) {
        uint32_t n = (s->n_rows - row) / (n_tiles - i);

        for (uint32_t col = 0; col < s->n_cols; col += TILE_COLS) {
            uint32_t n_cols = s->n_cols - col;
            struct tile t = {
                .c = s->c + row * s->ldc + col,
                .ldc = s->ldc,
                .a = (const float *)s->a + row * s->lda,
                .lda = s->lda,
                .b = (const char *)s->b + (col ? half_bytes : 0),
                .ldb = s->ldb,
                .k = s->k,
                .more = s->more,
                .ahead = ahead,
                .ahead_step = step,
            };

            ahead += step * n_steps;

            if (n_cols >= TILE_COLS) {
                tile_of[n - 1](&t);
                continue;
            }
            if (n_cols == WIDTH && half_of) {
                half_of[n - 1](&t);
                continue;
            }
            /* The last columns go by way of a whole tile. */
            t.c = edge;
            t.ldc = TILE_COLS;
            for (uint32_t r = 0; s->more && r < n; r++)
                memcpy(edge + r * TILE_COLS, s->c + (row + r) * s->ldc + col,
                       n_cols * sizeof(float));
            tile_of[n - 1](&t);
            for (uint32_t r = 0; r < n; r++)
                memcpy(s->c + (row + r) * s->ldc + col, edge + r * TILE_COLS,
                       n_cols * sizeof(float));
        }
        row += n;
    }
}

#ifdef BF16_PRODUCTS
void
ISA(gemm_bf16)(const struct strip *strip)
{
    struct strip pairs = *strip;

    pairs.lda /= 2;
    pairs.k = (strip->k + 1) / 2;
    pairs.ldb = STRIP_COLS;
    strip_run(&pairs, tile_f32_of, tile_half_of, TILE_ROWS, pairs.k,
              TILE_COLS * sizeof(float));
}
#else
void
ISA(gemm_f32)(const struct strip *strip)
{
    strip_run(strip, tile_f32_of, tile_half_of, TILE_ROWS, strip->k,
              TILE_COLS * sizeof(float));
}

void
ISA(gemm_pairs)(const struct strip *strip)
{
    strip_run(strip, tile_pairs_of, NULL, PAIR_ROWS, (strip->k + 1) / 2,
              TILE_COLS * 2 * sizeof(uint16_t));
}
#endif
