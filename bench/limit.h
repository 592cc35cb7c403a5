/* limit.h - what this machine can do at most, to put beside a measurement.
 *
 * Rates of back-to-back multiply-adds on registers, and of reading memory, on
 * all of n threads at once; the best of a few short runs. Shared processors
 * differ by a factor of two between minutes: only figures of one run compare.
 * A header with the code in it: each program of bench/ is one file.
 */
#ifndef NS_BENCH_LIMIT_H
#define NS_BENCH_LIMIT_H

#include <immintrin.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/machine.h"

enum limit { LIMIT_AVX2, LIMIT_AVX512, LIMIT_BF16, LIMIT_AMX, LIMIT_READ };

enum {
    LIMIT_THREADS = 256,
    LIMIT_RUNS = 5,
    CHAINS = 12, /* cover the latency of two units at 5 cycles */
    READ_BYTES = 64 << 20,
};

struct limit_job {
    enum limit limit;
    uint64_t rounds;
    unsigned char *memory;
    double work; /* operations or bytes */
    volatile float sink;
};

#define EACH_CHAIN _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++)

__attribute__((target("avx2,fma"))) static void
work_avx2(struct limit_job *job)
{
    __m256 sum[CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);

    EACH_CHAIN sum[i] = _mm256_set1_ps((float)i);
    for (uint64_t n = 0; n < job->rounds; n++)
        EACH_CHAIN sum[i] = _mm256_fmadd_ps(sum[i], x, y);
    EACH_CHAIN job->sink += _mm256_cvtss_f32(sum[i]);
    job->work = (double)job->rounds * CHAINS * 8 * 2;
}

__attribute__((target("avx512f"))) static void
work_avx512(struct limit_job *job)
{
    __m512 sum[CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);

    EACH_CHAIN sum[i] = _mm512_set1_ps((float)i);
    for (uint64_t n = 0; n < job->rounds; n++)
        EACH_CHAIN sum[i] = _mm512_fmadd_ps(sum[i], x, y);
    EACH_CHAIN job->sink += _mm512_cvtss_f32(sum[i]);
    job->work = (double)job->rounds * CHAINS * 16 * 2;
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) static void
work_bf16(struct limit_job *job)
{
    __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sum[CHAINS];

    EACH_CHAIN sum[i] = _mm512_setzero_ps();
    for (uint64_t n = 0; n < job->rounds; n++)
        EACH_CHAIN sum[i] = _mm512_dpbf16_ps(sum[i], one, one);
    EACH_CHAIN job->sink += _mm512_cvtss_f32(sum[i]);
    job->work = (double)job->rounds * CHAINS * 32 * 2;
}

__attribute__((target("amx-tile,amx-bf16"))) static void
work_amx(struct limit_job *job)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (uint64_t n = 0; n < job->rounds; n++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    job->work = (double)job->rounds * 4 * (16 * 16 * 32 * 2);
}

static void
work_read(struct limit_job *job)
{
    uint64_t sum[8] = { 0 };

    for (size_t at = 0; at < READ_BYTES; at += sizeof(sum)) {
        uint64_t line[8];

        memcpy(line, job->memory + at, sizeof(line));
        for (int i = 0; i < 8; i++)
            sum[i] ^= line[i];
    }
    for (int i = 0; i < 8; i++)
        job->sink += (float)(sum[i] & 1);
    job->work = READ_BYTES;
}

static void *
limit_main(void *data)
{
    static void (*const work[])(struct limit_job *) = { work_avx2, work_avx512,
                                                  work_bf16, work_amx,
                                                  work_read };
    struct limit_job *job = data;

    work[job->limit](job);
    return NULL;
}

static inline double
seconds(bool cpu)
{
    struct timespec now;

    clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* One run on all threads; 0 if a thread cannot be started. */
static inline double
limit_rate(struct limit_job *jobs, uint32_t n_threads)
{
    pthread_t thread[LIMIT_THREADS];
    double start = seconds(n_threads == 1), work = 0.0;
    uint32_t n_started = 0;

    for (; n_started < n_threads; n_started++)
        if (pthread_create(&thread[n_started], NULL, limit_main,
                           &jobs[n_started]) != 0)
            break;
    for (uint32_t i = 0; i < n_started; i++) {
        pthread_join(thread[i], NULL);
        work += jobs[i].work;
    }
    return n_started < n_threads ? 0.0 : work / (seconds(n_threads == 1) - start) * 1e-9;
}

/* GFLOP/s, or GB/s for LIMIT_READ. 0 if the processor lacks it. A single
 * thread is timed by the processor time it got: neighbours then cost less. */
static inline double
cpu_limit(enum limit limit, uint32_t n_threads)
{
    static const enum isa needs[] = { ISA_AVX2, ISA_AVX512, ISA_AVX512BF16,
                                      ISA_AMX, ISA_REF };
    struct limit_job *jobs;
    double best = 0.0;
    bool ready = true;

    if (n_threads < 1 || n_threads > LIMIT_THREADS ||
        !machine_has(needs[limit]))
        return 0.0;
    jobs = calloc(n_threads, sizeof(*jobs));
    for (uint32_t i = 0; jobs && i < n_threads; i++) {
        jobs[i].limit = limit;
        jobs[i].rounds = limit == LIMIT_AMX ? 1 << 20 : 6 << 20;
        if (limit != LIMIT_READ)
            continue;
        jobs[i].memory = malloc(READ_BYTES);
        ready = ready && jobs[i].memory;
        if (jobs[i].memory)
            memset(jobs[i].memory, 1, READ_BYTES);
    }
    for (int run = 0; jobs && ready && run < LIMIT_RUNS; run++) {
        double now = limit_rate(jobs, n_threads);

        best = now > best ? now : best;
    }
    for (uint32_t i = 0; jobs && i < n_threads; i++)
        free(jobs[i].memory);
    free(jobs);
    return best;
}

#endif
