/* What the simulator is for: kernels that are broken on purpose, each of which
 * must be caught, and the runtime's part of it. The instructions themselves
 * are test_instructions.cu's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
extern "C" {
#include <cmocka.h>
}

#include "kernels/cuda/device.cuh"

/* ---- helpers ----------------------------------------------------------------- */

static cudaStream_t stream;

static int
fresh(void **)
{
    unsetenv("NS_CUDASIM_SEED");
    unsetenv("NS_CUDASIM_FAULT");
    unsetenv("NS_CUDASIM_MEMORY");
    unsetenv("NS_CUDASIM_DEVICES");
    unsetenv("CUDA_VISIBLE_DEVICES");
    cudasim_reset();
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                     cudaSuccess);
    return 0;
}

static void
restart(void)
{
    cudasim_reset();
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                     cudaSuccess);
}

template <class T>
static T *
device_copy(const T *host, size_t n)
{
    T *device;

    assert_int_equal(cudaMalloc(&device, n * sizeof(T)), cudaSuccess);
    if (host)
        assert_int_equal(cudaMemcpy(device, host, n * sizeof(T),
                                    cudaMemcpyHostToDevice),
                         cudaSuccess);
    return device;
}

template <class T>
static void
to_host(T *host, const T *device, size_t n)
{
    assert_int_equal(cudaMemcpy(host, device, n * sizeof(T),
                                cudaMemcpyDeviceToHost),
                     cudaSuccess);
}

static void
passes(void)
{
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_string_equal(cudasim_report(), "");
}

/* The launch ended so, the report says these, and the device is lost. */
static void
caught(cudaError_t error, const char *what, const char *kernel)
{
    void *memory;

    assert_int_equal(cudaStreamSynchronize(stream), error);
    if (!strstr(cudasim_report(), what) || !strstr(cudasim_report(), kernel))
        fail_msg("\"%s\" does not say \"%s\" of %s", cudasim_report(), what,
                 kernel);
    assert_int_equal(cudaMalloc(&memory, 1), error);
    assert_int_equal(cudaStreamSynchronize(stream), error);
}

/* ---- kernels that are right, and what breaks them ---------------------------------- */

/* Reverses 128 floats through shared memory. */
__global__ void
reverse_kernel(float *x, bool barrier)
{
    float *part = ns_shared<float>(0);

    part[threadIdx.x] = x[threadIdx.x];
    if (barrier)
        __syncthreads();
    x[threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
}

static void
run_reverse(bool barrier)
{
    float x[128];

    for (int i = 0; i < 128; i++)
        x[i] = (float)i;
    float *device = device_copy(x, 128);

    ns_launch(stream, 1, 128, sizeof(x), reverse_kernel, device, barrier);
    if (!barrier)
        return;
    passes();
    to_host(x, device, 128);
    for (int i = 0; i < 128; i++)
        assert_true(x[i] == (float)(127 - i));
}

static void
a_barrier_makes_shared_memory_seen_in_any_order_of_threads(void **)
{
    for (int seed = 0; seed < 20; seed++) {
        char text[16];

        snprintf(text, sizeof(text), "%d", seed);
        setenv("NS_CUDASIM_SEED", text, 1);
        restart();
        run_reverse(true);
    }
}

static void
a_missing_barrier_is_caught(void **)
{
    run_reverse(false);
    caught(cudaErrorLaunchFailure, "before it was written", "reverse_kernel");
    for (int seed = 1; seed < 20; seed++) {
        char text[16];

        snprintf(text, sizeof(text), "%d", seed);
        setenv("NS_CUDASIM_SEED", text, 1);
        restart();
        run_reverse(false);
        assert_int_equal(cudaStreamSynchronize(stream),
                         cudaErrorLaunchFailure);
    }
}

/* Two rounds through one buffer: the second must not overtake the first. */
__global__ void
rounds_kernel(float *x, bool barrier)
{
    float *part = ns_shared<float>(0), sum = 0;

    for (int round = 0; round < 3; round++) {
        part[threadIdx.x] = x[threadIdx.x] + (float)round;
        __syncthreads();
        sum += part[(threadIdx.x + 33) % blockDim.x];
        if (barrier)
            __syncthreads();
    }
    x[threadIdx.x] = sum;
}

static void
a_buffer_that_is_filled_again_too_early_is_caught(void **)
{
    float x[64] = { 0 }, *device = device_copy(x, 64);

    ns_launch(stream, 1, 64, sizeof(x), rounds_kernel, device, true);
    passes();
    ns_launch(stream, 1, 64, sizeof(x), rounds_kernel, device, false);
    caught(cudaErrorLaunchFailure, "no barrier between", "rounds_kernel");
}

/* A warp's own exchange needs a syncwarp, and no more. */
__global__ void
neighbours_kernel(int *x, bool sync)
{
    int *part = ns_shared<int>(0);
    uint32_t i = threadIdx.x;

    part[i] = x[i];
    if (sync)
        ns_syncwarp();
    else
        (void)ns_ballot(true); /* orders lanes, not memory */
    x[i] = part[i ^ 1];
}

static void
a_warp_orders_its_memory_by_syncwarp_alone(void **)
{
    int x[64] = { 0 }, *device = device_copy(x, 64);

    ns_launch(stream, 1, 64, sizeof(x), neighbours_kernel, device, true);
    passes();
    ns_launch(stream, 1, 64, sizeof(x), neighbours_kernel, device, false);
    caught(cudaErrorLaunchFailure, "no barrier between", "neighbours_kernel");
}

__global__ void
across_warps_kernel(int *x)
{
    int *part = ns_shared<int>(0);

    part[threadIdx.x] = x[threadIdx.x];
    ns_syncwarp();
    x[threadIdx.x] = part[(threadIdx.x + 32) % 64];
}

static void
a_syncwarp_does_not_order_two_warps(void **)
{
    int x[64] = { 0 }, *device = device_copy(x, 64);

    ns_launch(stream, 1, 64, sizeof(x), across_warps_kernel, device);
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
}

/* ---- copies that land later --------------------------------------------------------- */

enum copy_mistake { NONE, NO_WAIT, NO_BARRIER, SHALLOW_WAIT, EARLY_REFILL };

/* Copies 4 stages of 32 x 16 bytes with two under way, and sums them. */
__global__ void
stages_kernel(const float *x, float *y, enum copy_mistake mistake)
{
    float *stage = ns_shared<float>(0), sum = 0;
    uint32_t i = threadIdx.x;

    for (uint32_t s = 0; s < 2; s++) {
        ns_cp_async_16(stage + s * 256 + i * 4, x + s * 256 + i * 4, true);
        ns_cp_async_commit();
    }
    for (uint32_t s = 0; s < 4; s++) {
        if (mistake == SHALLOW_WAIT)
            ns_cp_async_wait<2>();
        else if (mistake != NO_WAIT)
            ns_cp_async_wait<1>();
        if (mistake != NO_BARRIER)
            __syncthreads();
        for (uint32_t j = 0; j < 4; j++)
            sum += stage[s % 2 * 256 + (255 - i * 4 - j)];
        if (mistake != EARLY_REFILL)
            __syncthreads();
        if (s + 2 < 4)
            ns_cp_async_16(stage + s % 2 * 256 + i * 4,
                           x + (s + 2) * 256 + i * 4, s + 2 != 3);
        ns_cp_async_commit();
    }
    y[i] = sum;
}

static void
run_stages(enum copy_mistake mistake)
{
    float x[1024], got[64];

    for (int i = 0; i < 1024; i++)
        x[i] = (float)(i % 37);
    float *from = device_copy(x, 1024), *to = device_copy<float>(NULL, 64);

    ns_launch(stream, 1, 64, 2048, stages_kernel, (const float *)from, to,
              mistake);
    if (mistake != NONE)
        return;
    passes();
    to_host(got, to, 64);
    for (int i = 0; i < 64; i++) {
        float want = 0;

        for (int s = 0; s < 3; s++) /* the fourth is zeros */
            for (int j = 0; j < 4; j++)
                want += x[s * 256 + 255 - i * 4 - j];
        assert_true(got[i] == want);
    }
}

static void
a_pipeline_of_copies_sums_what_it_should(void **)
{
    run_stages(NONE);
}

static void
a_missing_wait_is_caught(void **)
{
    run_stages(NO_WAIT);
    caught(cudaErrorLaunchFailure, "before cp.async.wait_group",
           "stages_kernel");
}

static void
a_wait_for_too_few_groups_is_caught(void **)
{
    run_stages(SHALLOW_WAIT);
    caught(cudaErrorLaunchFailure, "before cp.async.wait_group",
           "stages_kernel");
}

static void
a_missing_barrier_behind_a_wait_is_caught(void **)
{
    run_stages(NO_BARRIER);
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
}

static void
a_stage_that_is_filled_while_it_is_read_is_caught(void **)
{
    run_stages(EARLY_REFILL);
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
}

/* ---- addresses ------------------------------------------------------------------------ */

/* Transposes rows of `columns` with a stride. */
__global__ void
stride_kernel(const float *x, float *y, uint32_t rows, uint32_t stride)
{
    for (uint32_t row = 0; row < rows; row++)
        y[threadIdx.x * rows + row] = x[row * stride + threadIdx.x];
}

static void
a_wrong_stride_is_caught(void **)
{
    float x[32 * 10] = { 0 }, *from = device_copy(x, 320),
          *to = device_copy(x, 320);

    ns_launch(stream, 1, 32, 0, stride_kernel, (const float *)from, to, 10u,
              32u);
    passes();
    ns_launch(stream, 1, 32, 0, stride_kernel, (const float *)from, to, 10u,
              33u);
    caught(cudaErrorIllegalAddress, "outside what was allocated",
           "stride_kernel");
}

__global__ void
touch_kernel(float *at, bool write)
{
    if (threadIdx.x != 7 || blockIdx.x != 2)
        return;
    if (write)
        *at = 1;
    else
        at[1] = at[0];
}

static void
memory_that_is_not_the_devices_is_caught(void **)
{
    float on_host = 0, *freed = device_copy<float>(NULL, 100);
    float *odd = (float *)(void *)((char *)device_copy<float>(NULL, 4) + 2);

    ns_launch(stream, 3, 32, 0, touch_kernel, &on_host, true);
    caught(cudaErrorIllegalAddress, "block (2,0,0), thread (7,0,0)",
           "touch_kernel");
    restart();
    freed = device_copy<float>(NULL, 100);
    assert_int_equal(cudaFree(freed), cudaSuccess);
    ns_launch(stream, 3, 32, 0, touch_kernel, freed, true);
    caught(cudaErrorIllegalAddress, "outside what was allocated",
           "touch_kernel");
    restart();
    odd = (float *)(void *)((char *)device_copy<float>(NULL, 4) + 2);
    ns_launch(stream, 3, 32, 0, touch_kernel, odd, true);
    caught(cudaErrorMisalignedAddress, "write", "touch_kernel");
    restart();
    ns_launch(stream, 3, 32, 0, touch_kernel,
              device_copy<float>(NULL, 5) + 4, false);
    caught(cudaErrorIllegalAddress, "a write of 4", "touch_kernel");
}

__global__ void
overrun_kernel(uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += 32)
        ns_shared<unsigned char>(0)[i] = 1;
}

static void
shared_memory_that_was_not_asked_for_is_caught(void **)
{
    ns_launch(stream, 1, 32, 100, overrun_kernel, 100u);
    passes();
    ns_launch(stream, 1, 32, 100, overrun_kernel, 101u);
    caught(cudaErrorIllegalAddress, "byte 100 of 100", "overrun_kernel");
}

__global__ void
unwritten_kernel(float *y)
{
    float *part = ns_shared<float>(0);

    if (threadIdx.x != 5)
        part[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = part[threadIdx.x];
}

static void
shared_memory_that_was_never_written_is_caught(void **)
{
    float *y = device_copy<float>(NULL, 32);

    ns_launch(stream, 1, 32, 128, unwritten_kernel, y);
    caught(cudaErrorLaunchFailure, "thread (5,0,0): shared memory byte 20",
           "unwritten_kernel");
}

/* ---- divergence ------------------------------------------------------------------------ */

enum divergence { EARLY_EXIT, TWO_PLACES, HALF_WARP, MIXED };

__global__ void
divergent_kernel(enum divergence how)
{
    switch (how) {
    case EARLY_EXIT:
        if (threadIdx.x == 40)
            return;
        __syncthreads();
        break;
    case TWO_PLACES:
        if (threadIdx.x < 32)
            __syncthreads();
        else
            __syncthreads();
        break;
    case HALF_WARP:
        if (threadIdx.x % 32 < 16)
            ns_syncwarp();
        break;
    case MIXED:
        if (threadIdx.x % 32 < 16)
            ns_syncwarp();
        else
            (void)ns_ballot(true);
        break;
    }
}

static void
threads_that_part_at_a_barrier_are_caught(void **)
{
    static const char *const says[] = { "thread 40 has ended",
                                        "at __syncthreads of line",
                                        "thread 16 has ended",
                                        "at ns_syncwarp of line" };

    for (int how = EARLY_EXIT; how <= MIXED; how++) {
        restart();
        ns_launch(stream, 1, 64, 0, divergent_kernel, (enum divergence)how);
        caught(cudaErrorLaunchFailure, says[how], "divergent_kernel");
    }
}

/* ---- launches and memory ---------------------------------------------------------------- */

static void
launches_that_no_card_takes_are_refused(void **)
{
    float *y = device_copy<float>(NULL, 1);

    assert_int_equal(ns_launch(stream, 1, 1025, 0, unwritten_kernel, y),
                     cudaErrorInvalidConfiguration);
    assert_int_equal(ns_launch(stream, 0, 32, 0, unwritten_kernel, y),
                     cudaErrorInvalidConfiguration);
    assert_int_equal(ns_launch(stream, dim3(1, 65536), 32, 0,
                               unwritten_kernel, y),
                     cudaErrorInvalidConfiguration);
    assert_int_equal(ns_launch(stream, 1, 32, (size_t)NS_SHARED_MAX + 1,
                               unwritten_kernel, y),
                     cudaErrorInvalidValue);
    passes(); /* and none of it sticks */
}

static void
a_small_card_runs_out_of_memory_and_gets_it_back(void **)
{
    size_t left, whole;
    void *a, *b;

    setenv("NS_CUDASIM_MEMORY", "1M", 1);
    restart();
    assert_int_equal(cudaMalloc(&a, 700 << 10), cudaSuccess);
    assert_int_equal(cudaMalloc(&b, 400 << 10), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMemGetInfo(&left, &whole), cudaSuccess);
    assert_int_equal(left, 324 << 10);
    assert_int_equal(whole, 1 << 20);
    assert_int_equal(cudaFree(a), cudaSuccess);
    assert_int_equal(cudaMalloc(&b, 400 << 10), cudaSuccess);
    cudasim_freeze(1);
    assert_int_equal(cudaMalloc(&a, 1), cudaErrorMemoryAllocation);
    assert_non_null(strstr(cudasim_report(), "after the start"));
}

static void
host_memory_that_is_used_again_too_early_is_read_too_late(void **)
{
    int *pinned, *device = device_copy<int>(NULL, 1), pageable = 1, got;

    assert_int_equal(cudaMallocHost(&pinned, sizeof(*pinned)), cudaSuccess);
    *pinned = 1;
    cudaMemcpyAsync(device, pinned, sizeof(int), cudaMemcpyHostToDevice,
                    stream);
    *pinned = 2;
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    to_host(&got, device, 1);
    assert_int_equal(got, 2);
    /* What is not pinned, the call itself copies. */
    cudaMemcpyAsync(device, &pageable, sizeof(int), cudaMemcpyHostToDevice,
                    stream);
    pageable = 2;
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    to_host(&got, device, 1);
    assert_int_equal(got, 1);
    assert_int_equal(cudaFreeHost(pinned), cudaSuccess);
}

__global__ void
add_kernel(int *x, int by)
{
    if (threadIdx.x == 0)
        *x += by;
}

static void
a_graph_runs_again_with_the_arguments_it_was_captured_with(void **)
{
    const int zero = 0;
    int *x = device_copy(&zero, 1), got, by = 3;
    cudaGraphExec_t run;
    cudaGraph_t graph;

    assert_int_equal(cudaStreamBeginCapture(stream,
                                            cudaStreamCaptureModeGlobal),
                     cudaSuccess);
    ns_launch(stream, 1, 32, 0, add_kernel, x, by);
    by = 100;
    ns_launch(stream, 1, 32, 0, add_kernel, x, 4);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    assert_int_equal(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    to_host(&got, x, 1);
    assert_int_equal(got, 0); /* capturing runs nothing */
    for (int i = 0; i < 2; i++)
        assert_int_equal(cudaGraphLaunch(run, stream), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    to_host(&got, x, 1);
    assert_int_equal(got, 14);
    cudaGraphExecDestroy(run);
    /* Waiting inside of a capture breaks it. */
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    assert_int_equal(cudaStreamSynchronize(stream),
                     cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph),
                     cudaErrorStreamCaptureInvalidated);
}

static void
an_event_waits_for_its_own_stream_alone(void **)
{
    const int zero[2] = { 0, 0 };
    int *x = device_copy(zero, 2), got[2];
    cudaStream_t other;
    cudaEvent_t event;

    assert_int_equal(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking),
                     cudaSuccess);
    assert_int_equal(cudaEventCreate(&event), cudaSuccess);
    ns_launch(other, 1, 32, 0, add_kernel, x, 5);
    cudaEventRecord(event, other);
    ns_launch(other, 1, 32, 0, add_kernel, x, 6); /* behind the event */
    cudaStreamWaitEvent(stream, event, 0);
    assert_int_equal(cudaEventQuery(event), cudaErrorNotReady);
    ns_launch(stream, 1, 32, 0, add_kernel, x + 1, 1);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    to_host(got, x, 2);
    assert_int_equal(got[0], 5);
    assert_int_equal(got[1], 1);
    assert_int_equal(cudaEventQuery(event), cudaSuccess);
    cudaEventDestroy(event);
    cudaStreamDestroy(other);
    to_host(got, x, 1);
    assert_int_equal(got[0], 11);
}

/* ---- faults and devices -------------------------------------------------------------------- */

static void
an_injected_fault_comes_where_it_was_asked_for_and_sticks(void **)
{
    const int zero = 0;
    int *x;

    setenv("NS_CUDASIM_FAULT", "after:3:cudaErrorECCUncorrectable", 1);
    restart();
    x = device_copy(&zero, 1); /* operation 1 */
    ns_launch(stream, 1, 32, 0, add_kernel, x, 1);
    ns_launch(stream, 1, 32, 0, add_kernel, x, 1);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_int_equal(ns_launch(stream, 1, 32, 0, add_kernel, x, 1),
                     cudaSuccess); /* a card does not know yet, either */
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorECCUncorrectable);
    assert_int_equal(ns_launch(stream, 1, 32, 0, add_kernel, x, 1),
                     cudaErrorECCUncorrectable);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorECCUncorrectable);
}

static void
devices_have_memory_and_errors_of_their_own(void **)
{
    float *first, *second;
    int n;

    setenv("NS_CUDASIM_DEVICES", "2", 1);
    restart();
    assert_int_equal(cudaGetDeviceCount(&n), cudaSuccess);
    assert_int_equal(n, 2);
    assert_int_equal(cudaSetDevice(2), cudaErrorInvalidDevice);
    first = device_copy<float>(NULL, 4);
    assert_int_equal(cudaSetDevice(1), cudaSuccess);
    second = device_copy<float>(NULL, 4);
    cudaSetDevice(0);
    ns_launch(stream, 3, 32, 0, touch_kernel, second, true);
    caught(cudaErrorIllegalAddress, "memory of device 1 on device 0",
           "touch_kernel");
    /* The other one goes on. */
    assert_int_equal(cudaSetDevice(1), cudaSuccess);
    assert_int_equal(cudaMemset(second, 0, 16), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    (void)first;
}

static void
a_process_sees_the_devices_that_it_may(void **)
{
    struct cudaDeviceProp prop;
    int n;

    setenv("NS_CUDASIM_DEVICES", "4", 1);
    setenv("CUDA_VISIBLE_DEVICES", "3,1,7,0", 1); /* 7 ends the list */
    cudasim_reset();
    assert_int_equal(cudaGetDeviceCount(&n), cudaSuccess);
    assert_int_equal(n, 2);
    assert_int_equal(cudaGetDeviceProperties(&prop, 0), cudaSuccess);
    assert_string_equal(prop.name, "simulated H100 3");
    assert_int_equal(cudaSetDevice(2), cudaErrorInvalidDevice);
}

static void
a_machine_may_have_no_device(void **)
{
    int n;

    setenv("NS_CUDASIM_DEVICES", "0", 1);
    cudasim_reset();
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    assert_int_equal(n, 0);
}

#define TEST(f) { #f, f, fresh, NULL, NULL }

int
main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_barrier_makes_shared_memory_seen_in_any_order_of_threads),
        TEST(a_missing_barrier_is_caught),
        TEST(a_buffer_that_is_filled_again_too_early_is_caught),
        TEST(a_warp_orders_its_memory_by_syncwarp_alone),
        TEST(a_syncwarp_does_not_order_two_warps),
        TEST(a_pipeline_of_copies_sums_what_it_should),
        TEST(a_missing_wait_is_caught),
        TEST(a_wait_for_too_few_groups_is_caught),
        TEST(a_missing_barrier_behind_a_wait_is_caught),
        TEST(a_stage_that_is_filled_while_it_is_read_is_caught),
        TEST(a_wrong_stride_is_caught),
        TEST(memory_that_is_not_the_devices_is_caught),
        TEST(shared_memory_that_was_not_asked_for_is_caught),
        TEST(shared_memory_that_was_never_written_is_caught),
        TEST(threads_that_part_at_a_barrier_are_caught),
        TEST(launches_that_no_card_takes_are_refused),
        TEST(a_small_card_runs_out_of_memory_and_gets_it_back),
        TEST(host_memory_that_is_used_again_too_early_is_read_too_late),
        TEST(a_graph_runs_again_with_the_arguments_it_was_captured_with),
        TEST(an_event_waits_for_its_own_stream_alone),
        TEST(an_injected_fault_comes_where_it_was_asked_for_and_sticks),
        TEST(devices_have_memory_and_errors_of_their_own),
        TEST(a_process_sees_the_devices_that_it_may),
        TEST(a_machine_may_have_no_device),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
