/* What device.cuh names, against statements of its own: on the simulator in
 * every check, and the same file on a card in `make gpu-check`. Needs nothing
 * but CUDA and libc; prints TAP. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.cuh"

/* ---- helpers ----------------------------------------------------------------- */

static int n_tests, n_failed;
static bool test_failed;
static uint32_t random_state = 1;

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            printf("# line %d: %s\n", __LINE__, #condition);                  \
            test_failed = true;                                               \
            return;                                                           \
        }                                                                     \
    } while (0)

static uint32_t
random_bits(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static float
float_of_bits(uint32_t bits)
{
    float v;

    memcpy(&v, &bits, sizeof(v));
    return v;
}

static uint32_t
bits_of_float(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

/* The device's copy of n elements; zeros if host is NULL. Leaks: the process
 * is short. */
template <class T>
static T *
to_device(const T *host, size_t n)
{
    T *device = NULL;

    if (cudaMalloc(&device, n * sizeof(T)) != cudaSuccess ||
        (host ? cudaMemcpy(device, host, n * sizeof(T), cudaMemcpyHostToDevice)
              : cudaMemset(device, 0, n * sizeof(T))) != cudaSuccess) {
        printf("Bail out! no device memory: %s\n",
               cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
    return device;
}

template <class T>
static bool
to_host(T *host, const T *device, size_t n)
{
    cudaError_t error = cudaDeviceSynchronize();

    if (error == cudaSuccess)
        error = cudaMemcpy(host, device, n * sizeof(T),
                           cudaMemcpyDeviceToHost);
    if (error != cudaSuccess)
        printf("# %s\n", cudaGetErrorString(error));
    return error == cudaSuccess;
}

/* ---- matrices ------------------------------------------------------------------ */

__global__ void
ldmatrix_kernel(uint32_t *out, bool trans)
{
    uint16_t *rows = ns_shared<uint16_t>(0);
    uint32_t lane = threadIdx.x, r[4];

    for (uint32_t i = lane; i < 256; i += 32)
        rows[i] = (uint16_t)(1000 + i);
    __syncthreads();
    if (trans)
        ns_ldmatrix_x4_trans(r, rows + lane * 8);
    else
        ns_ldmatrix_x4(r, rows + lane * 8);
    for (int m = 0; m < 4; m++)
        out[lane * 4 + (uint32_t)m] = r[m];
}

/* Element (row, column) of a matrix is half column % 2 of the register of lane
 * 4 row + column / 2; transposed, with row and column exchanged. */
static void
a_matrix_is_spread_over_the_lanes_as_the_manual_says(void)
{
    uint32_t *device = to_device<uint32_t>(NULL, 128), got[128];

    for (int trans = 0; trans < 2; trans++) {
        CHECK(ns_launch(0, 1, 32, 512, ldmatrix_kernel, device,
                        (bool)trans) == cudaSuccess);
        CHECK(to_host(got, device, 128));
        for (uint32_t m = 0; m < 4; m++)
            for (uint32_t row = 0; row < 8; row++)
                for (uint32_t column = 0; column < 8; column++) {
                    uint32_t i = trans ? column : row;
                    uint32_t j = trans ? row : column;
                    uint32_t half = got[(4 * i + j / 2) * 4 + m] >>
                                    (j % 2 * 16);

                    CHECK((half & 0xffff) == 1000 + m * 64 + row * 8 + column);
                }
    }
}

/* T: two bf16 or four e4m3 a register, along k. */
template <class T, int K, bool E4M3>
__global__ void
mma_kernel(const T *a, const T *b, float *d)
{
    uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, fa[4], fb[2];
    uint32_t k = t * (4 / sizeof(T));
    float sum[4];

    for (uint32_t i = 0; i < 4; i++)
        fa[i] = *(const uint32_t *)(const void *)(a + (g + i % 2 * 8) * K + k +
                                                  i / 2 * (K / 2));
    for (uint32_t i = 0; i < 2; i++)
        fb[i] = *(const uint32_t *)(const void *)(b + g * K + k + i * (K / 2));
    for (uint32_t c = 0; c < 4; c++)
        sum[c] = d[(g + c / 2 * 8) * 8 + 2 * t + c % 2];
    if (E4M3)
        ns_mma_m16n8k32_e4m3(sum, fa, fb);
    else
        ns_mma_m16n8k16_bf16(sum, fa, fb);
    for (uint32_t c = 0; c < 4; c++)
        d[(g + c / 2 * 8) * 8 + 2 * t + c % 2] = sum[c];
}

/* Straight from the formats' definitions. */
static double
value_of(uint16_t bf16)
{
    return float_of_bits((uint32_t)bf16 << 16);
}

static double
value_of(uint8_t e4m3)
{
    int exponent = e4m3 >> 3 & 15, fraction = e4m3 & 7;
    double v = exponent == 0 ? fraction / 8.0 / 64.0
                             : (1 + fraction / 8.0) * pow(2, exponent - 7);

    return e4m3 & 0x80 ? -v : v;
}

/* a and b are such that every sum is exact, in whatever order. */
template <class T, int K, bool E4M3>
static void
product(const T *a, const T *b)
{
    float d[16 * 8], got[16 * 8];

    for (int i = 0; i < 128; i++)
        d[i] = (float)(random_bits() % 100);
    float *device = to_device(d, 128);

    CHECK((ns_launch(0, 1, 32, 0, mma_kernel<T, K, E4M3>, to_device(a, 16 * K),
                     to_device(b, 8 * K), device)) == cudaSuccess);
    CHECK(to_host(got, device, 128));
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double want = d[i * 8 + j];

            for (int k = 0; k < K; k++)
                want += value_of(a[i * K + k]) * value_of(b[j * K + k]);
            CHECK(got[i * 8 + j] == (float)want);
        }
}

static void
a_bf16_product_is_the_sum_over_k(void)
{
    uint16_t a[16 * 16], b[8 * 16];

    for (int i = 0; i < 256; i++)
        a[i] = (uint16_t)(bits_of_float((float)(random_bits() % 17) - 8) >> 16);
    for (int i = 0; i < 128; i++)
        b[i] = (uint16_t)(bits_of_float((float)(random_bits() % 17) - 8) >> 16);
    product<uint16_t, 16, false>(a, b);
}

static void
an_e4m3_product_is_the_sum_over_k(void)
{
    uint8_t a[16 * 32], b[8 * 32];

    for (int i = 0; i < 512; i++) /* exponents 6..9, both signs */
        a[i] = (uint8_t)(0x30 + random_bits() % 32 + random_bits() % 2 * 128);
    for (int i = 0; i < 256; i++)
        b[i] = (uint8_t)(0x30 + random_bits() % 32 + random_bits() % 2 * 128);
    product<uint8_t, 32, true>(a, b);
}

/* ---- numbers --------------------------------------------------------------------- */

enum { NUMBERS = 32768 };

__global__ void
numbers_kernel(const float *v, uint8_t *e4m3, uint16_t *bf16, uint32_t *pair,
               float *decoded, float *power)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;

    e4m3[i] = ns_e4m3_of(v[i]);
    bf16[i] = ns_bf16_of(v[i]);
    pair[i] = ns_bf16_pair(v[i], -v[i]);
    decoded[i] = ns_e4m3_to_float((uint8_t)i);
    power[i] = ns_exp2(v[i]);
}

static float numbers[NUMBERS], decoded[NUMBERS], power[NUMBERS];
static uint8_t e4m3[NUMBERS];
static uint16_t bf16[NUMBERS];
static uint32_t pair[NUMBERS];

/* Values of all sizes; each fourth halfway between two of a format. */
static bool
convert_numbers(void)
{
    for (int i = 0; i < NUMBERS; i++) {
        float v = ldexpf((float)(random_bits() % 65536) - 32768,
                         (int)(random_bits() % 24) - 24);

        if (i % 8 == 0) {
            uint8_t code = (uint8_t)(random_bits() % 0x7e);

            v = (float)((value_of(code) + value_of((uint8_t)(code + 1))) / 2);
        } else if (i % 8 == 4) {
            v = float_of_bits((bits_of_float(v) & 0xffff0000u) | 0x8000u);
        }
        numbers[i] = v;
    }
    numbers[1] = 1e30f;
    numbers[2] = -1e30f;
    numbers[3] = NAN;
    float *d_power = to_device<float>(NULL, NUMBERS);
    float *d_decoded = to_device<float>(NULL, NUMBERS);
    uint8_t *d_e4m3 = to_device<uint8_t>(NULL, NUMBERS);
    uint16_t *d_bf16 = to_device<uint16_t>(NULL, NUMBERS);
    uint32_t *d_pair = to_device<uint32_t>(NULL, NUMBERS);

    return ns_launch(0, NUMBERS / 256, 256, 0, numbers_kernel,
                     to_device(numbers, NUMBERS), d_e4m3, d_bf16, d_pair,
                     d_decoded, d_power) == cudaSuccess &&
           to_host(e4m3, d_e4m3, NUMBERS) && to_host(bf16, d_bf16, NUMBERS) &&
           to_host(pair, d_pair, NUMBERS) &&
           to_host(decoded, d_decoded, NUMBERS) &&
           to_host(power, d_power, NUMBERS);
}

static void
e4m3_is_the_nearest_code_and_even_on_ties(void)
{
    CHECK(convert_numbers());
    for (int i = 0; i < 256; i++)
        if ((i & 0x7f) == 0x7f)
            CHECK(isnan(decoded[i]));
        else
            CHECK(decoded[i] == (float)value_of((uint8_t)i));
    for (int i = 0; i < NUMBERS; i++) {
        double best = INFINITY;
        int nearest = 0x7f;

        if (isnan(numbers[i])) {
            CHECK((e4m3[i] & 0x7f) == 0x7f);
            continue;
        }
        for (int code = 0; code < 0x7f; code++) {
            double distance = fabs(value_of((uint8_t)code) - fabs(numbers[i]));

            if (distance < best || (distance == best && code % 2 == 0)) {
                best = distance;
                nearest = code;
            }
        }
        CHECK(e4m3[i] == (nearest | (signbit(numbers[i]) ? 0x80 : 0)));
    }
}

static void
bf16_is_the_nearest_value_and_even_on_ties(void)
{
    CHECK(convert_numbers());
    for (int i = 0; i < NUMBERS; i++) {
        uint32_t bits = bits_of_float(numbers[i]), rest = bits & 0xffff;
        uint32_t want = bits >> 16;

        if (isnan(numbers[i])) {
            CHECK(isnan(value_of(bf16[i])));
            continue;
        }
        if (rest > 0x8000 || (rest == 0x8000 && want % 2 == 1))
            want++;
        CHECK(bf16[i] == want);
        CHECK(pair[i] == (want | (want ^ 0x8000) << 16));
    }
}

static void
exp2_is_near_enough(void)
{
    CHECK(convert_numbers());
    for (int i = 0; i < NUMBERS; i++)
        if (fabsf(numbers[i]) < 100) {
            double want = exp2((double)numbers[i]);

            CHECK(fabs(power[i] - want) <= want * 0x1p-21);
        }
}

/* ---- warps -------------------------------------------------------------------------- */

__global__ void
warp_kernel(int32_t *out)
{
    int32_t lane = (int32_t)(threadIdx.x % 32);
    int32_t *to = out + threadIdx.x * 5;

    to[0] = ns_shfl(lane * 3, 7);
    to[1] = ns_shfl_xor(lane, 5);
    to[2] = ns_shfl_up(lane, 4);
    to[3] = (int32_t)ns_ballot(lane % 3 == 0);
    to[4] = ns_shfl(lane, lane + 1); /* from a lane each of its own, wrapping */
}

static void
lanes_give_each_other_what_they_hold(void)
{
    int32_t *device = to_device<int32_t>(NULL, 320), got[320];
    uint32_t mask = 0;

    for (int j = 0; j < 32; j += 3)
        mask |= 1u << j;
    CHECK(ns_launch(0, 1, 64, 0, warp_kernel, device) == cudaSuccess);
    CHECK(to_host(got, device, 320));
    for (int i = 0; i < 64; i++) {
        int lane = i % 32;

        CHECK(got[i * 5] == 21);
        CHECK(got[i * 5 + 1] == (lane ^ 5));
        CHECK(got[i * 5 + 2] == (lane < 4 ? lane : lane - 4));
        CHECK((uint32_t)got[i * 5 + 3] == mask);
        CHECK(got[i * 5 + 4] == (lane + 1) % 32);
    }
}

__global__ void
count_kernel(int32_t *count, int32_t *only)
{
    atomicAdd(count, 1);
    atomicMax(count + 1, (int32_t)(threadIdx.x + 32 * threadIdx.y));
    if (atomicCAS(only, -1, (int32_t)blockIdx.x) == -1)
        atomicAdd(count + 2, 1); /* the first alone */
}

static void
atomics_count_every_thread(void)
{
    const int32_t start[4] = { 0, 0, 0, -1 };
    int32_t *device = to_device(start, 4), got[4];

    CHECK(ns_launch(0, dim3(3, 2, 2), dim3(32, 4), 0, count_kernel, device,
                    device + 3) == cudaSuccess);
    CHECK(to_host(got, device, 4));
    CHECK(got[0] == 12 * 128);
    CHECK(got[1] == 127);
    CHECK(got[2] == 1);
    CHECK(got[3] >= 0 && got[3] < 3);
}

/* ---- copies that land later --------------------------------------------------------- */

/* Copies four stages of 64 x 16 bytes, two under way, the last one not valid;
 * each thread sums what others have copied. */
__global__ void
stages_kernel(const float *x, float *y)
{
    float *stage = ns_shared<float>(0), sum = 0;
    uint32_t i = threadIdx.x;

    for (uint32_t s = 0; s < 2; s++) {
        ns_cp_async_16(stage + s * 256 + i * 4, x + s * 256 + i * 4, true);
        ns_cp_async_commit();
    }
    for (uint32_t s = 0; s < 4; s++) {
        ns_cp_async_wait<1>();
        __syncthreads();
        for (uint32_t j = 0; j < 4; j++)
            sum += stage[s % 2 * 256 + (255 - i * 4 - j)];
        __syncthreads();
        if (s + 2 < 4)
            ns_cp_async_16(stage + s % 2 * 256 + i * 4,
                           x + (s + 2) * 256 + i * 4, s + 2 != 3);
        ns_cp_async_commit();
    }
    y[i] = sum;
}

static void
a_pipeline_of_copies_sums_what_it_should(void)
{
    float x[1024], got[64], *to = to_device<float>(NULL, 64);

    for (int i = 0; i < 1024; i++)
        x[i] = (float)(i % 37);
    CHECK(ns_launch(0, 1, 64, 2048, stages_kernel,
                    (const float *)to_device(x, 1024), to) == cudaSuccess);
    CHECK(to_host(got, to, 64));
    for (int i = 0; i < 64; i++) {
        float want = 0;

        for (int s = 0; s < 3; s++)
            for (int j = 0; j < 4; j++)
                want += x[s * 256 + 255 - i * 4 - j];
        CHECK(got[i] == want);
    }
}

/* ---- launches ------------------------------------------------------------------------ */

__global__ void
large_kernel(uint32_t *out, uint32_t n)
{
    uint32_t *words = ns_shared<uint32_t>(0), sum = 0;

    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        words[i] = i;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += words[n - 1 - i];
    out[threadIdx.x] = sum;
}

static void
a_block_may_have_all_the_shared_memory_of_sm_90(void)
{
    uint32_t *device = to_device<uint32_t>(NULL, 128), got[128];
    uint32_t n = NS_SHARED_MAX / 4, sum = 0;

    CHECK(ns_launch(0, 2, 128, NS_SHARED_MAX, large_kernel, device, n) ==
          cudaSuccess);
    CHECK(to_host(got, device, 128));
    for (int i = 0; i < 128; i++)
        sum += got[i];
    CHECK(sum == n / 2 * (n - 1));
    CHECK(ns_launch(0, 2, 128, NS_SHARED_MAX + 1, large_kernel, device, n) !=
          cudaSuccess);
    cudaGetLastError();
}

static void
test(const char *name, void (*run)(void))
{
    test_failed = false;
    run();
    n_failed += test_failed;
    printf("%sok %d - %s\n", test_failed ? "not " : "", ++n_tests, name);
}

#define TEST(f) test(#f, f)

int
main(void)
{
    printf("1..10\n");
    TEST(a_matrix_is_spread_over_the_lanes_as_the_manual_says);
    TEST(a_bf16_product_is_the_sum_over_k);
    TEST(an_e4m3_product_is_the_sum_over_k);
    TEST(e4m3_is_the_nearest_code_and_even_on_ties);
    TEST(bf16_is_the_nearest_value_and_even_on_ties);
    TEST(exp2_is_near_enough);
    TEST(lanes_give_each_other_what_they_hold);
    TEST(atomics_count_every_thread);
    TEST(a_pipeline_of_copies_sums_what_it_should);
    TEST(a_block_may_have_all_the_shared_memory_of_sm_90);
    return n_failed > 0;
}
