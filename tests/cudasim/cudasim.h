/* cudasim.h - the device side of the simulator: what device.cuh names.
 *
 * A launch runs its blocks one after the other, a fibre a thread. Every access
 * that kernel code makes is seen: the .cu files are compiled with gcc's
 * -fsanitize=thread, whose calls (__tsan_read4 and so on) end in memory.cc
 * instead of in that library. So these end a launch, with one line on stderr
 * that names kernel, block and thread, and a sticky error as on a card:
 *
 *   out of range, freed, host or another device's memory   IllegalAddress
 *   an address that is not aligned to what is read there   MisalignedAddress
 *   shared memory read before it was written, or while a cp.async is under
 *     way; two threads at one byte with no barrier between  LaunchFailure
 *   a barrier or collective that some threads never reach, or that they reach
 *     at different places                                   LaunchFailure
 *
 * Not seen: races in global memory, and what a kernel does through memcpy.
 *
 * Environment, read when the process first uses the runtime:
 *   NS_CUDASIM_DEVICES=N      devices; 1. CUDA_VISIBLE_DEVICES picks of them
 *   NS_CUDASIM_MEMORY=BYTES   of a device, with K, M or G; 1G
 *   NS_CUDASIM_TRACK=N        shared memory is watched for races and unwritten
 *                             bytes in each Nth block only; 1. Everything else
 *                             is checked in all
 *   NS_CUDASIM_SEED=N         not 0: threads and blocks run in a random order
 *   NS_CUDASIM_FAULT=after:N:cudaErrorNAME   what the N + 1st operation on a
 *                             device ends with, and every one behind it
 */
#ifndef CUDASIM_H
#define CUDASIM_H

#include <math.h>
#include <string.h>
#include <tuple>

#include "cuda_runtime.h"

/* ---- for tests ------------------------------------------------------------- */

#pragma GCC visibility push(default)
extern "C" {
/* Drops all devices and memory and reads the environment again. */
void cudasim_reset(void);
/* While frozen every allocation fails and is reported. */
void cudasim_freeze(int frozen);
/* What ended the last launch that was ended; "" if none was. */
const char *cudasim_report(void);
}
#pragma GCC visibility pop

/* ---- launching --------------------------------------------------------------- */

/* What a fibre runs: the kernel with its arguments, by value. */
struct sim_call {
    virtual ~sim_call() {}
    virtual void run() const = 0;
    size_t bytes; /* of the whole object: a fibre reads its arguments there */
};

template <class... P>
struct sim_call_of : sim_call {
    void (*kernel)(P...);
    std::tuple<P...> args;

    sim_call_of(void (*kernel_)(P...), P... args_)
        : kernel(kernel_), args(args_...)
    {
        bytes = sizeof(*this);
    }
    void run() const override { std::apply(kernel, args); }
};

cudaError_t sim_enqueue_launch(cudaStream_t stream, dim3 grid, dim3 block,
                               size_t shared_bytes, const void *kernel,
                               sim_call *call /* owned */);

template <class... P, class... A>
static inline cudaError_t
ns_launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes,
          void (*kernel)(P...), A... args)
{
    return sim_enqueue_launch(stream, grid, block, shared_bytes,
                              (const void *)kernel,
                              new sim_call_of<P...>(kernel, (P)args...));
}

/* ---- collectives ---------------------------------------------------------------- */

void *sim_shared(size_t byte_offset);
void sim_barrier(int line);
void sim_syncwarp(int line);
void sim_cp_async(void *shared, const void *global, bool valid);
void sim_cp_commit(void);
void sim_cp_wait(int n);
void sim_ldmatrix(uint32_t *r, const void *row, bool trans, int line);
void sim_mma_bf16(float *d, const uint32_t *a, const uint32_t *b, int line);
void sim_mma_e4m3(float *d, const uint32_t *a, const uint32_t *b, int line);
enum sim_shuffle { SIM_INDEX, SIM_XOR, SIM_UP };
uint32_t sim_shfl(enum sim_shuffle kind, uint32_t v, unsigned by, int line);
unsigned sim_ballot(bool bit, int line);
/* Ends the launch unless the calling thread may do this. */
void sim_check_atomic(const void *at, size_t bytes);

static inline void
__syncthreads(int line = __builtin_LINE())
{
    sim_barrier(line);
}

template <class T>
static inline T *
ns_shared(size_t byte_offset)
{
    return (T *)sim_shared(byte_offset);
}

static inline void
ns_cp_async_16(void *shared, const void *global, bool valid)
{
    sim_cp_async(shared, global, valid);
}

static inline void
ns_cp_async_commit(void)
{
    sim_cp_commit();
}

template <int N>
static inline void
ns_cp_async_wait(void)
{
    sim_cp_wait(N);
}

static inline void
ns_ldmatrix_x4(uint32_t (&r)[4], const void *row, int line = __builtin_LINE())
{
    sim_ldmatrix(r, row, false, line);
}

static inline void
ns_ldmatrix_x4_trans(uint32_t (&r)[4], const void *row,
                     int line = __builtin_LINE())
{
    sim_ldmatrix(r, row, true, line);
}

static inline void
ns_mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                     const uint32_t (&b)[2], int line = __builtin_LINE())
{
    sim_mma_bf16(d, a, b, line);
}

static inline void
ns_mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4],
                     const uint32_t (&b)[2], int line = __builtin_LINE())
{
    sim_mma_e4m3(d, a, b, line);
}

template <class T>
static inline T
sim_shfl_of(enum sim_shuffle kind, T v, unsigned by, int line)
{
    uint32_t bits;

    static_assert(sizeof(T) == sizeof(bits), "shuffles move four bytes");
    memcpy(&bits, &v, sizeof(bits));
    bits = sim_shfl(kind, bits, by, line);
    memcpy(&v, &bits, sizeof(bits));
    return v;
}

template <class T>
static inline T
ns_shfl(T v, int lane, int line = __builtin_LINE())
{
    return sim_shfl_of(SIM_INDEX, v, (unsigned)lane, line);
}

template <class T>
static inline T
ns_shfl_xor(T v, int mask, int line = __builtin_LINE())
{
    return sim_shfl_of(SIM_XOR, v, (unsigned)mask, line);
}

template <class T>
static inline T
ns_shfl_up(T v, unsigned delta, int line = __builtin_LINE())
{
    return sim_shfl_of(SIM_UP, v, delta, line);
}

static inline unsigned
ns_ballot(bool bit, int line = __builtin_LINE())
{
    return sim_ballot(bit, line);
}

static inline void
ns_syncwarp(int line = __builtin_LINE())
{
    sim_syncwarp(line);
}

/* ---- atomics -------------------------------------------------------------------- */

/* A fibre runs until it waits, so what lies between two waits is atomic. */
#define SIM_ATOMIC __attribute__((no_sanitize("thread"), noinline))

template <class T>
SIM_ATOMIC static T
atomicCAS(T *at, T expected, T desired)
{
    T old;

    sim_check_atomic(at, sizeof(T));
    old = *at;
    if (old == expected)
        *at = desired;
    return old;
}

template <class T>
SIM_ATOMIC static T
atomicAdd(T *at, T v)
{
    T old;

    sim_check_atomic(at, sizeof(T));
    old = *at;
    *at = old + v;
    return old;
}

template <class T>
SIM_ATOMIC static T
atomicMax(T *at, T v)
{
    T old;

    sim_check_atomic(at, sizeof(T));
    old = *at;
    if (old < v)
        *at = v;
    return old;
}

/* ---- numbers -------------------------------------------------------------------- */

uint8_t sim_e4m3_of(float v);
float sim_e4m3_to_float(uint8_t code);

static inline uint32_t
ns_float_bits(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

static inline float
ns_bits_float(uint32_t bits)
{
    float v;

    memcpy(&v, &bits, sizeof(v));
    return v;
}

static inline float
ns_exp2(float x)
{
    return exp2f(x);
}

static inline float
ns_sinpi(float x)
{
    return (float)sin(M_PI * (double)x);
}

static inline float
ns_cospi(float x)
{
    return (float)cos(M_PI * (double)x);
}

static inline uint16_t
ns_bf16_of(float v)
{
    uint32_t bits = ns_float_bits(v);

    if (v != v)
        return 0x7fff;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline uint32_t
ns_bf16_pair(float lo, float hi)
{
    return ns_bf16_of(lo) | (uint32_t)ns_bf16_of(hi) << 16;
}

static inline uint8_t
ns_e4m3_of(float v)
{
    return sim_e4m3_of(v);
}

static inline float
ns_e4m3_to_float(uint8_t code)
{
    return sim_e4m3_to_float(code);
}

#endif
