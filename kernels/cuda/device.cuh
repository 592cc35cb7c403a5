/* device.cuh - what differs between a card and the simulator, and nothing else.
 *
 * Kernels are plain CUDA C++. They launch through ns_launch, take their shared
 * memory from ns_shared, and reach PTX through the names below; nvcc turns
 * those into the instruction, tests/cudasim into what the PTX manual says of
 * it. Under the simulator the same file is compiled for the host.
 *
 * Fragments, lane l of a warp, g = l / 4, t = l % 4 (PTX manual, "Matrix
 * Fragments for mma.m16n8k16 / m16n8k32"):
 *
 *   bf16  a[0] row g   k 2t,2t+1     a[1] row g+8     a[2], a[3] k + 8
 *         b[0] col g   k 2t,2t+1     b[1] k + 8
 *   e4m3  a[0] row g   k 4t..4t+3    a[1] row g+8     a[2], a[3] k + 16
 *         b[0] col g   k 4t..4t+3    b[1] k + 16
 *   d     d[0], d[1] row g, columns 2t, 2t+1          d[2], d[3] row g+8
 *
 * All lanes of a warp call a collective together: shuffles, ballot, syncwarp,
 * ldmatrix and mma. Blocks have 32 * n threads.
 */
#ifndef NS_KERNELS_CUDA_DEVICE_CUH
#define NS_KERNELS_CUDA_DEVICE_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

/* The most shared memory that a block may ask for on sm_90. */
enum { NS_SHARED_MAX = 227 << 10 };

#ifdef NS_CUDASIM
#include "cudasim.h"
#else

/* ---- launching and shared memory ------------------------------------------ */

/* Enqueues one launch; an error may belong to an earlier one. */
template <class... P, class... A>
static inline cudaError_t
ns_launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes,
          void (*kernel)(P...), A... args)
{
    cudaLaunchConfig_t config = {};

    if (shared_bytes > 48u << 10) {
        cudaError_t error = cudaFuncSetAttribute(
            (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
            (int)shared_bytes);

        if (error != cudaSuccess)
            return error;
    }
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, (P)args...);
}

/* A byte of the block's dynamic shared memory; byte 0 is aligned to 128. */
template <class T>
__device__ static inline T *
ns_shared(size_t byte_offset)
{
    extern __shared__ __align__(128) unsigned char ns_shared_memory[];

    return (T *)(void *)(ns_shared_memory + byte_offset);
}

__device__ static inline uint32_t
ns_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* ---- shared memory from afar ---------------------------------------------- */

/* Starts a copy of 16 bytes, both ends aligned to 16; not valid: 16 zero bytes,
 * and the source is not read. */
__device__ static inline void
ns_cp_async_16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     ns_shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

/* Ends a group of this thread's copies. */
__device__ static inline void
ns_cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most N of this thread's groups are under way. Other threads
 * see what was copied behind a barrier. */
template <int N>
__device__ static inline void
ns_cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- matrices --------------------------------------------------------------- */

/* Four 8x8 matrices of 16-bit elements: lanes 8i..8i+7 give the rows of matrix
 * i, 16 bytes each; r[i] is its fragment. */
__device__ static inline void
ns_ldmatrix_x4(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(ns_shared_address(shared_row))
        : "memory");
}

__device__ static inline void
ns_ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(ns_shared_address(shared_row))
        : "memory");
}

/* d += a . b */
__device__ static inline void
ns_mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                     const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]),
                   "r"(b[1]));
}

__device__ static inline void
ns_mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4],
                     const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]),
                   "r"(b[1]));
}

/* ---- warps -------------------------------------------------------------------- */

/* T has four bytes. */
template <class T>
__device__ static inline T
ns_shfl(T v, int lane)
{
    return __shfl_sync(0xffffffffu, v, lane);
}

template <class T>
__device__ static inline T
ns_shfl_xor(T v, int mask)
{
    return __shfl_xor_sync(0xffffffffu, v, mask);
}

/* Lanes below delta keep their own. */
template <class T>
__device__ static inline T
ns_shfl_up(T v, unsigned delta)
{
    return __shfl_up_sync(0xffffffffu, v, delta);
}

__device__ static inline unsigned
ns_ballot(bool bit)
{
    return __ballot_sync(0xffffffffu, bit);
}

/* Orders the warp's memory too; shuffles do not. */
__device__ static inline void
ns_syncwarp(void)
{
    __syncwarp();
}

/* ---- numbers -------------------------------------------------------------------- */

/* 2^x, relative error below 2^-22. */
__device__ static inline float
ns_exp2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats rounded to nearest even, lo in the lower half. */
__device__ static inline uint32_t
ns_bf16_pair(float lo, float hi)
{
    uint32_t pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

__device__ static inline uint16_t
ns_bf16_of(float v)
{
    uint16_t bits;

    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

/* To nearest even; beyond 448 it is 448, NaN stays NaN. */
__device__ static inline uint8_t
ns_e4m3_of(float v)
{
    uint16_t pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(pair)
        : "f"(0.0f), "f"(v));
    return (uint8_t)(pair & 0xff);
}

__device__ static inline float
ns_e4m3_to_float(uint8_t code)
{
    uint32_t halves;
    float v;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)code));
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }"
        : "=f"(v)
        : "r"(halves));
    return v;
}

__device__ static inline uint32_t
ns_float_bits(float v)
{
    return __float_as_uint(v);
}

__device__ static inline float
ns_bits_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

/* sin and cos of pi * x */
__device__ static inline float
ns_sinpi(float x)
{
    return sinpif(x);
}

__device__ static inline float
ns_cospi(float x)
{
    return cospif(x);
}

#endif /* NS_CUDASIM */

__device__ static inline float
ns_bf16_to_float(uint16_t bits)
{
    return ns_bits_float((uint32_t)bits << 16);
}

#endif
